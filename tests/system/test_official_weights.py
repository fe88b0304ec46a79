"""Load the authors' weights: each tensor becomes the right weight, or is rejected."""
import math
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch

from experiments import official_weights as official
from helpers import randomized, refusal
from support import corpora
from training import presets

lesson_5 = import_module("05_full_model")
FULL = lesson_5.Config(29, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=11, mem_len=6)
BANDS = replace(FULL, cutoffs=(5, 11, 19))
CASES = {
    "full softmax": FULL, "div_val 1, per layer": replace(BANDS, untie_r=True),
    "div_val 2, tied tails": replace(BANDS, div_val=2), "div_val 4, three bands, untied": replace(
        BANDS, div_val=4, cutoffs=(5, 11), tie_projections=False, untie_r=True)}


def official_state(model, port):
    """Return our weights, named and stacked as in the official code or its port."""
    c, words, state = model.config, model.embedding, {}
    for n, layer in enumerate(model.layers):
        attention, at = layer.attention, f"layers.{n}."
        state[at + "dec_attn.qkv_net.weight"] = torch.cat(
            [attention.W_q.weight, attention.W_kE.weight, attention.W_v.weight])
        state[at + "dec_attn.r_net.weight"] = attention.W_kR.weight
        state[at + "dec_attn.o_net.weight"] = attention.W_o.weight
        for name, part in (("dec_attn.layer_norm", layer.norm_1), ("pos_ff.CoreNet.0", layer.W_1),
                           ("pos_ff.CoreNet.3", layer.W_2), ("pos_ff.layer_norm", layer.norm_2)):
            state |= {f"{at}{name}.weight": part.weight, f"{at}{name}.bias": part.bias}
        if c.untie_r or port:  # the port also lists a shared pair in each layer
            state |= {at + "dec_attn.r_w_bias": model.u[n * c.untie_r],
                      at + "dec_attn.r_r_bias": model.v[n * c.untie_r]}
    if not c.untie_r:
        state |= {"r_w_bias": model.u[0], "r_r_bias": model.v[0]}
    if c.div_val == 1:  # one table for all bands
        tables = [torch.cat([*words.rows]) if c.cutoffs else words.weight]
        biases = [words.bias]
    else:
        tables = words.rows
        biases = words.bias.split([len(rows) for rows in words.rows])
        for i, (narrow, wide) in enumerate(zip(words.project_out, words.project_in)):
            state |= {f"crit.out_projs.{i}": narrow, f"word_emb.emb_projs.{i}": wide}
    for i, (rows, bias) in enumerate(zip(tables, biases)):
        state |= {f"word_emb.emb_layers.{i}.weight": rows, f"crit.out_layers.{i}.weight": rows,
                  f"crit.out_layers.{i}.bias": bias}
    if c.cutoffs:  # the official code has the last tail first
        for name, tails in (("weight", words.tail_rows), ("bias", words.tail_bias)):
            state[f"crit.cluster_{name}"] = tails if port else tails.flip(0)
    state["pos_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, c.d_model, 2).double() / c.d_model)
    return {"transformer." * (port and not name.startswith("crit.")) + name: weight.detach()
            for name, weight in state.items()}


@pytest.mark.parametrize("port", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_tensor_becomes_its_weight_and_is_required(case, port):
    wanted, empty = (randomized(lesson_5.TransformerXL(CASES[case])) for _ in range(2))
    state = official_state(wanted, port)
    load = partial(official.load_official_weights, empty)
    found = load(state).state_dict()
    assert all(weight.equal(found[name]) for name, weight in wanted.state_dict().items())
    name = "crit.out_layers.0.weight"  # also the embedding
    weight = state[name]
    wrong = [{key: value for key, value in state.items() if key != name},
             state | {name: torch.cat([weight, weight[:1]])}, state | {f"{name}.1": weight},
             state | {name: 1.01 * weight}]
    if not CASES[case].untie_r:
        wrong.append(state | {"transformer." * port + "layers.1.dec_attn.r_w_bias": weight})
    for changed, named in zip(wrong, 4 * ["_layers.0.weight"] + ["layers.1.dec_attn.r_w_bias"]):
        message = refusal(load, changed)
        assert "not the weights of this model" in message and named in message


def test_a_file_is_evaluated_or_rejected_in_one_line(tmp_path, monkeypatch, capsys):
    text, path = tmp_path / "notes.txt", tmp_path / "model.bin"
    text.write_text("the cat sat on the mat, and the dog sat on the cat;\n" * 20)
    config = replace(FULL, vocab_size=len({*text.read_text()} - {"\n"}), untie_r=True)
    recipe = replace(presets.RECIPES["tiny"], dataset="enwik8", eval_mem_len=20)
    monkeypatch.delitem(corpora.SOURCES, "enwik8")  # whose number of symbols is another
    monkeypatch.setattr(corpora, "read", lambda name, root: (
        corpora.split(text.read_bytes(), name), name))
    monkeypatch.setitem(presets.CONFIGS, "small", replace(config, untie_r=False))
    monkeypatch.setitem(presets.RECIPES, "small", recipe)
    model = randomized(lesson_5.TransformerXL(config))
    argv = [str(path), "--model", "small"]
    state = official_state(model, port=True)
    torch.save(state, path)
    assert official.main(argv) == 0
    corpus = corpora.load("enwik8", drop_newlines=True)  # as the authors count it
    nats = official.train.evaluate(model.float(), corpus.test, recipe)
    assert f"test {nats / math.log(2):.4f} bpc (" in capsys.readouterr().out
    text.write_text("another text " * 50)
    for content, why in (state, "another vocabulary"), ({"a": 3}, "a state dict (TypeError)"):
        torch.save(content, path)
        assert official.main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("official_weights.py: ") and why in line
