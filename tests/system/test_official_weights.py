"""The authors' weights in our model: the losses of loops in NumPy, and nothing but exact names.

    pytest tests/system/test_official_weights.py

`losses` reads with a state dict in the layout of the official PyTorch code, or of its port, by the
formulas of the paper, section 3.3: one query, one head and one key at a time.
"""
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from helpers import randomized
from training import presets

official, lesson_5 = import_module("official_weights"), import_module("05_full_model")
FULL = lesson_5.Config(29, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=11, mem_len=6)
BANDS = replace(FULL, cutoffs=(5, 11, 19))
TIED = replace(BANDS, div_val=2)
CASES = {
    "full softmax": FULL,
    "div_val 1, per layer, same_length, clamp": replace(
        BANDS, untie_r=True, same_length=True, clamp_len=4, mem_len=5),
    "div_val 2, tied tails": TIED,
    "div_val 4, three bands, untied, no memory": replace(
        BANDS, div_val=4, cutoffs=(5, 11), tie_projections=False, untie_r=True, mem_len=0)}
EACH = [(case, port) for case in CASES for port in (False, True)]


def random_state(c, port, *names):
    """Random weights by the names that the loader wants; `losses` has names of its own."""
    model = randomized(lesson_5.TransformerXL(c))
    table = official.parts_by_name(model, dict.fromkeys(["transformer.", *names] * port))
    sines = 10000.0 ** -(torch.arange(0, c.d_model, 2).double() / c.d_model)
    return {name: torch.cat(parts).detach() for name, parts in table.items()} | {
        "transformer." * port + "pos_emb.inv_freq": sines}


def norm(x, get, name):
    x = (x - x.mean()) / math.sqrt(x.var() + 1e-5)
    return x * get(name + "weight") + get(name + "bias")


def embeddings(get, c):
    """The table of all embeddings (V, D): the rows of each band, projected."""
    if c.div_val == 1:
        return get("word_emb.emb_layers.0.weight")
    return np.concatenate([
        get(f"word_emb.emb_layers.{i}.weight") @ get(f"word_emb.emb_projs.{i}").T
        for i in range(len(c.cutoffs) + 1)])


def log_probabilities(get, h, c, port):
    """ln p of every word after h (D,) -> (V,).  The head's column of band i is -i in the official
    code, cutoffs[0] + i - 1 in the port.
    """
    edges, parts = [0, *c.cutoffs, None], []
    for i, (first, last) in enumerate(zip(edges, edges[1:])):
        table, x = 0 if c.div_val == 1 else i, h
        if c.div_val > 1:
            x = h @ get(f"crit.out_projs.{i}")
        logits = get(f"crit.out_layers.{table}.weight") @ x + get(f"crit.out_layers.{table}.bias")
        logits = logits[first:last] if c.div_val == 1 else logits
        if i == 0 and c.cutoffs:
            logits = np.append(logits, get("crit.cluster_weight") @ x + get("crit.cluster_bias"))
        parts.append(logits - math.log(np.exp(logits).sum()))
        if i:
            parts[i] = parts[i] + parts[0][c.cutoffs[0] + i - 1 if port else -i]
    return np.concatenate([parts[0][: edges[1]], *parts[1:]])


def layer_output(get, n, h, memory, c):
    """Layer n on one lane: h (T, D), memory (m, D) -> (T, D)."""
    attn, ff = f"layers.{n}.dec_attn.", f"layers.{n}.pos_ff."
    D, H, C, rows, m = c.d_model, c.n_head, c.d_head, np.concatenate([memory, h]), len(memory)
    W_q, W_k, W_v = get(attn + "qkv_net.weight").reshape(3, H, C, D)
    W_R = get(attn + "r_net.weight").reshape(H, C, D)
    frequencies = 10000.0 ** -(np.arange(0, D, 2) / D)
    u, v = (get((attn if c.untie_r else "") + name) for name in ("r_w_bias", "r_r_bias"))
    out = []
    for i, query in enumerate(h):
        heads = []
        for a in range(H):
            q, scores = W_q[a] @ query, []
            keys = rows[max(0, m + i - c.mem_len) if c.same_length else 0 : m + i + 1]
            for distance, key in zip(range(len(keys))[::-1], keys):
                angles = min(distance, c.clamp_len or distance) * frequencies
                r = W_R[a] @ np.append(np.sin(angles), np.cos(angles))
                k = W_k[a] @ key
                scores.append((q @ k + q @ r + u[a] @ k + v[a] @ r) / math.sqrt(C))
            weights = np.exp(scores)
            heads.append(sum(p * (W_v[a] @ key) for p, key in zip(weights, keys)) / weights.sum())
        o = get(attn + "o_net.weight") @ np.concatenate(heads) + query
        o = norm(o, get, attn + "layer_norm.")
        inner = np.maximum(get(ff + "CoreNet.0.weight") @ o + get(ff + "CoreNet.0.bias"), 0)
        x = get(ff + "CoreNet.3.weight") @ inner + get(ff + "CoreNet.3.bias") + o
        out.append(norm(x, get, ff + "layer_norm."))
    return np.array(out)


def losses(state, segments, c, port):
    """-ln p(y) of one lane: an array (T,) per segment (x, y); the memory starts empty."""
    unread = {name for name in state if "inv_freq" not in name}

    def get(name):
        name = "transformer." * (port and not name.startswith("crit.")) + name
        unread.discard(name)
        return state[name].numpy()

    memories, result = [np.zeros((0, c.d_model))] * c.n_layer, []
    for x, y in segments:
        h = math.sqrt(c.d_model) * embeddings(get, c)[x]
        for n in range(c.n_layer):
            rows = np.concatenate([memories[n], h])
            h = layer_output(get, n, h, memories[n], c)
            memories[n] = rows[max(0, len(rows) - c.mem_len) :]
        result.append([-log_probabilities(get, z, c, port)[t] for z, t in zip(h, y)])
    assert not unread
    return result


def load(config, state):
    return official.load_official_weights(lesson_5.TransformerXL(config).double(), state).eval()


@pytest.mark.parametrize("case, port", EACH)
def test_the_losses_are_those_of_loops(case, port):
    """Three segments with memory, words of every band."""
    c, draw = CASES[case], np.random.default_rng(1)
    state, memory = random_state(c, port), None
    model = load(c, state)
    segments = [draw.integers(29, size=(2, T)) for T in (4, 3, 5)]
    for (x, y), wanted in zip(segments, losses(state, segments, c, port)):
        found, memory = model(torch.tensor(x)[None], memory, torch.tensor(y)[None])
        assert np.abs(found[0].detach().numpy() - wanted).max() < 1e-12


@pytest.mark.parametrize("case, port", EACH)
def test_each_tensor_must_be_there_with_its_shape_and_no_other(case, port):
    state = random_state(CASES[case], port)
    for name, z in state.items():
        for wrong in ({key: value for key, value in state.items() if key != name},
                      state | {name: torch.cat([z, z[:1]])}, state | {f"{name}.1": z}):
            with pytest.raises(ValueError, match="not the weights of this model.*is "):
                load(CASES[case], wrong)


@pytest.mark.parametrize("name", ["crit.out_projs.2", "transformer.pos_emb.inv_freq",
                                  "transformer.layers.1.dec_attn.r_w_bias"])
def test_what_the_model_ties_must_be_equal_in_the_file(name):
    """The port may list a shared u again for each layer; the sines must be ours."""
    state = random_state(TIED, True, name)
    load(TIED, state)
    with pytest.raises(ValueError, match="differs|other frequencies"):
        load(TIED, state | {name: state[name] * 1.01})


def test_a_file_is_evaluated_and_refused_in_one_line(tmp_path, monkeypatch, capsys):
    text, path = tmp_path / "notes.txt", tmp_path / "model.bin"
    text.write_text("the cat sat on the mat, and the dog sat on the cat; " * 20)
    config = replace(FULL, vocab_size=len(set(text.read_text())), untie_r=True)
    recipe = replace(presets.RECIPES["tiny"], dataset=str(text), eval_mem_len=20)
    monkeypatch.setitem(presets.CONFIGS, "small", replace(config, untie_r=False))
    monkeypatch.setitem(presets.RECIPES, "small", recipe)
    state, argv = random_state(config, True), [str(path), "--model", "small", "--device", "cpu"]
    torch.save(state, path)
    assert official.main(argv) == 0
    model = load(config, state).float()
    nats = official.train.evaluate(model, official.read_corpus(recipe, None).test, recipe)
    assert f"test {nats / math.log(2):.4f} bpc (" in capsys.readouterr().out
    text.write_text("another text " * 50)
    for content, why in ((state, "another vocabulary"), ({"a": 3}, "not a state dict"),
                         (model, "whole pickled model"), (None, "cannot be read")):
        torch.save(content, path) if content else path.unlink()
        assert official.main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("official_weights.py: ") and why in line
