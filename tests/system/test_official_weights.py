"""The authors' weights in our model: the losses of loops in NumPy, and nothing but exact names.

    pytest tests/system/test_official_weights.py

`random_state` makes a state dict in the layout of the official PyTorch code or of its port;
`losses` reads with one by the formulas of the paper, section 3.3, one query and key at a time.
"""
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from training import presets

official, lesson_5 = import_module("official_weights"), import_module("05_full_model")
FULL = lesson_5.Config(
    vocab_size=29, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=11, mem_len=6)
BANDS = replace(FULL, cutoffs=(5, 11, 19))
TIED = replace(BANDS, div_val=2)
CASES = {
    "full softmax": FULL,
    "full, u and v per layer": replace(FULL, untie_r=True),
    "div_val 1, per layer, same_length, clamp": replace(
        BANDS, untie_r=True, same_length=True, clamp_len=4, mem_len=5),
    "div_val 2, tied tails": TIED,
    "div_val 4, three bands, untied, no memory": replace(
        BANDS, div_val=4, cutoffs=(5, 11), tie_projections=False, untie_r=True, mem_len=0)}
EACH = [(case, port) for case in CASES for port in (False, True)]


# ---- the oracle ---------------------------------------------------------------------------------

def random_state(c, port):
    """Random weights {name: float64 tensor}, scaled so that losses differ by nats.

    div_val 1: one table, whatever the cutoffs; above 1 a table (n_i, D // div_val^i) per band with
    projections (D, D // div_val^i); tied ones are equal in all bands but the first.
    """
    draw, D, HC = np.random.default_rng(0), c.d_model, c.n_head * c.d_head

    def normal(*shape, std=None, mean=0.0):
        return mean + (std or shape[-1] ** -0.5) * draw.standard_normal(shape)

    state = {"pos_emb.inv_freq": np.array([10000.0 ** (-2 * k / D) for k in range(D // 2)])}
    edges = [0, c.vocab_size] if c.div_val == 1 else [0, *c.cutoffs, c.vocab_size]
    for i, (first, end) in enumerate(zip(edges, edges[1:])):
        table = 2 * normal(end - first, D // c.div_val**i)
        state[f"word_emb.emb_layers.{i}.weight"] = state[f"crit.out_layers.{i}.weight"] = table
        state[f"crit.out_layers.{i}.bias"] = normal(end - first, std=1)
        if c.div_val > 1:
            into, out = (normal(*table.shape[1:], D).T for _ in range(2))
            state[f"word_emb.emb_projs.{i}"] = into
            state[f"crit.out_projs.{i}"] = into if i and c.tie_projections else out
    if c.cutoffs:
        state["crit.cluster_weight"] = 2 * normal(len(c.cutoffs), D)
        state["crit.cluster_bias"] = normal(len(c.cutoffs), std=1)
    layers = [f"layers.{n}." for n in range(c.n_layer)]
    for prefix in [f"{layer}dec_attn." for layer in layers] if c.untie_r else [""]:
        for bias in ("r_w_bias", "r_r_bias"):
            state[prefix + bias] = normal(c.n_head, c.d_head, std=1)
    for layer in layers:
        for name, rows, columns in (
                ("dec_attn.qkv_net", 3 * HC, D), ("dec_attn.r_net", HC, D),
                ("dec_attn.o_net", D, HC), ("pos_ff.CoreNet.0", c.d_inner, D),
                ("pos_ff.CoreNet.3", D, c.d_inner)):
            state[f"{layer}{name}.weight"] = normal(rows, columns)
        state[layer + "pos_ff.CoreNet.0.bias"] = normal(c.d_inner, std=0.5, mean=1.0)
        state[layer + "pos_ff.CoreNet.3.bias"] = normal(D, std=0.5)
        for norm in ("dec_attn.layer_norm", "pos_ff.layer_norm"):
            state[f"{layer}{norm}.weight"] = normal(D, std=0.2, mean=1.0)
            state[f"{layer}{norm}.bias"] = normal(D, std=0.5)
    return {("" if name.startswith("crit.") or not port else "transformer.") + name:
            torch.from_numpy(z.copy()) for name, z in state.items()}


def log_softmax(logits):
    return logits - math.log(np.exp(logits).sum())


def norm(x, get, name):
    centred = x - x.mean()
    x = centred / math.sqrt((centred**2).mean() + 1e-5)
    return x * get(name + "weight") + get(name + "bias")


def embed(get, token, c):
    """The embedding (D,) of a token, times the root of D: its band's row, projected."""
    if c.div_val == 1:
        return math.sqrt(c.d_model) * get("word_emb.emb_layers.0.weight")[token]
    band = sum(token >= cutoff for cutoff in c.cutoffs)
    row = get(f"word_emb.emb_layers.{band}.weight")[token - [0, *c.cutoffs][band]]
    return math.sqrt(c.d_model) * get(f"word_emb.emb_projs.{band}") @ row


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
        parts.append(log_softmax(logits))
        if i:
            parts[i] = parts[i] + parts[0][c.cutoffs[0] + i - 1 if port else -i]
    return np.concatenate([parts[0][: edges[1]], *parts[1:]])


def layer_output(get, n, h, memory, c):
    """Layer n on one lane: h (T, D), memory (m, D) -> (T, D)."""
    attn, ff = f"layers.{n}.dec_attn.", f"layers.{n}.pos_ff."
    D, H, C, rows, m = c.d_model, c.n_head, c.d_head, np.concatenate([memory, h]), len(memory)
    W_q, W_k, W_v = get(attn + "qkv_net.weight").reshape(3, H, C, D)
    W_R = get(attn + "r_net.weight").reshape(H, C, D)
    u, v = get(attn + "r_w_bias", "r_w_bias"), get(attn + "r_r_bias", "r_r_bias")
    out = []
    for i, query in enumerate(h):
        heads = []
        for a in range(H):
            q, scores = W_q[a] @ query, []
            reach = min(c.mem_len, m + i) if c.same_length else m + i
            keys = rows[m + i - reach : m + i + 1]
            for distance, key in zip(range(reach, -1, -1), keys):
                distance = min(distance, c.clamp_len) if c.clamp_len > 0 else distance
                angles = [distance * 10000.0 ** (-2 * k / D) for k in range(D // 2)]
                r = W_R[a] @ [*map(math.sin, angles), *map(math.cos, angles)]
                k = W_k[a] @ key
                scores.append((q @ k + q @ r + u[a] @ k + v[a] @ r) / math.sqrt(C))
            weights = np.exp(log_softmax(np.array(scores)))
            heads.append(sum(p * (W_v[a] @ key) for p, key in zip(weights, keys)))
        o = get(attn + "o_net.weight") @ np.concatenate(heads) + query
        o = norm(o, get, attn + "layer_norm.")
        inner = np.maximum(get(ff + "CoreNet.0.weight") @ o + get(ff + "CoreNet.0.bias"), 0)
        x = get(ff + "CoreNet.3.weight") @ inner + get(ff + "CoreNet.3.bias") + o
        out.append(norm(x, get, ff + "layer_norm."))
    return np.array(out)


def losses(state, segments, c, port):
    """-ln p(y) of one lane: an array (T,) per segment (x, y); the memory starts empty."""
    def get(*names):  # the first that is there
        return next(state[key].numpy() for name in names for key in (name, "transformer." + name)
                    if key in state)

    memories, result = [np.zeros((0, c.d_model))] * c.n_layer, []
    for x, y in segments:
        h = np.array([embed(get, token, c) for token in x])
        for n in range(c.n_layer):
            rows = np.concatenate([memories[n], h])
            h = layer_output(get, n, h, memories[n], c)
            memories[n] = rows[max(0, len(rows) - c.mem_len) :]
        result.append([-log_probabilities(get, z, c, port)[t] for z, t in zip(h, y)])
    return result


# ---- what is loaded -----------------------------------------------------------------------------

def load(config, state):
    return official.load_official_weights(lesson_5.TransformerXL(config).double(), state).eval()


@pytest.mark.parametrize("case, port", EACH)
def test_the_losses_are_those_of_loops(case, port):
    """Three segments with memory; targets in every band, then in the first and the last alone."""
    c, draw = CASES[case], np.random.default_rng(1)
    state = random_state(c, port)
    model, edges = load(c, state), (0, *c.cutoffs, c.vocab_size)
    for words in {(0, 29), edges[:2], edges[-2:]}:
        segments = [draw.integers(*words, size=(2, T)) for T in (4, 3, 5)]
        memory = None
        for (x, y), wanted in zip(segments, losses(state, segments, c, port)):
            with torch.no_grad():
                found, memory = model(torch.tensor(x)[None], memory, torch.tensor(y)[None])
            assert np.ptp(wanted) > 0.2, "losses that hardly differ would hide a mistake"
            assert np.abs(found[0].numpy() - wanted).max() < 1e-12


@pytest.mark.parametrize("case, port", EACH)
def test_each_tensor_must_be_there_with_its_shape_and_no_other(case, port):
    state = random_state(CASES[case], port)
    for name, z in state.items():
        others = {key: value for key, value in state.items() if key != name}
        for wrong, why in ((others, "is missing|is not in this model"),
                           (others | {name: torch.cat([z, z[:1]])}, rf"{name} is \(")):
            with pytest.raises(ValueError, match=f"not the weights of this model.*({why})"):
                load(CASES[case], wrong)
    with pytest.raises(ValueError, match="crit.extra is not in this model"):
        load(CASES[case], state | {"crit.extra": torch.zeros(2)})


@pytest.mark.parametrize("name, why", [
    ("crit.out_layers.1.weight", "word_emb.emb_layers.1.weight differs"),
    ("crit.out_projs.2", "emb_projs.2 differs"), ("pos_emb.inv_freq", "other frequencies")])
def test_a_file_that_does_not_tie_what_the_model_ties_is_refused(name, why):
    state = random_state(TIED, False)
    with pytest.raises(ValueError, match=why):
        load(TIED, state | {name: state[name] * 1.01})


def test_the_port_may_be_float16_and_list_shared_u_and_v_per_layer():
    half = {name: z.half() for name, z in random_state(FULL, True).items()}
    again = {f"transformer.layers.{n}.dec_attn.{bias}": half[f"transformer.{bias}"]
             for n in (0, 1) for bias in ("r_w_bias", "r_r_bias")}
    model = official.load_official_weights(lesson_5.TransformerXL(FULL), half | again)
    assert model.embedding.bias.equal(half["crit.out_layers.0.bias"].float())
    again["transformer.layers.1.dec_attn.r_w_bias"] = half["transformer.r_w_bias"] + 1
    with pytest.raises(ValueError, match="r_w_bias differs"):
        load(FULL, half | again)


# ---- the command --------------------------------------------------------------------------------

def test_a_file_is_evaluated_and_refused_in_one_line(tmp_path, monkeypatch, capsys):
    text, path = tmp_path / "notes.txt", tmp_path / "model.bin"
    text.write_text("the cat sat on the mat, and the dog sat on the cat; " * 20)
    config = replace(FULL, vocab_size=len(set(text.read_text())), untie_r=True)
    monkeypatch.setitem(presets.CONFIGS, "small", replace(config, untie_r=False))
    monkeypatch.setitem(presets.RECIPES, "small", replace(
        presets.RECIPES["tiny"], dataset=str(text), eval_mem_len=20))
    monkeypatch.setattr(official, "PAPER", {"small": "1.23 bpc"})
    argv = [str(path), "--model", "small", "--device", "cpu"]
    torch.save(state := random_state(config, True), path)
    assert official.main(argv) == 0
    reader, recipe = load(config, state), presets.RECIPES["small"]
    nats = official.train.evaluate(reader.float(), official.read_corpus(
        recipe, None).test, recipe)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"test {nats / math.log(2):.4f} bpc (")
    assert line.endswith("; published: 1.23 bpc")

    def refused(argv, why):
        assert official.main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("official_weights.py: ") and why in line

    refused(argv[:1], "--model")
    text.write_text(text.read_text().replace("cat", "CAT"))
    refused(argv, "another vocabulary")
    for content, why in ((None, "cannot be read"), (b"not one", "not a state dict"),
                         ({"a": 3}, "not a state dict"), ({"a": torch.zeros(2)}, "is missing")):
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        refused(argv, why)
