"""The authors' weights in our model, evaluated on the test split.

    python -m experiments.official_weights model.bin --model wt103-large

Our model is the published one if the published weights reach the published score.  The official
code has other names, which parts_by_name lists; its port to `transformers`, now retired, puts the
prefix `transformer.` before most of them.

The released files were not available, so no test shows that they have these names, and that the
data are split into words as for the training.  Three differences are on purpose: with same_length a
query sees M + 1 keys (as in the TensorFlow code), in the official PyTorch code M; the last, shorter
segment counts as well; and the first has no memory, where the port has a memory of zeros.
"""
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

__package__ or sys.exit("run python -m experiments.official_weights in the project's folder")

import torch

import train
from training import machine, presets
from training.command import Parser, exit_status
from training.reader import reader_of
from training.text import read_corpus

lesson_1, lesson_5 = import_module("01_vanilla_segments"), import_module("05_full_model")
PAPER = {"enwik8-12L": "1.06 bpc", "enwik8-24L": "0.99 bpc", "text8-24L": "1.08 bpc",
         "wt103-standard": "24.0 ppl", "wt103-large": "18.3 ppl", "lm1b-large": "21.8 ppl"}


def parts_by_name(model):
    """Return {official name: [views of our weights that are stacked in its rows]}."""
    c, words, table = model.config, model.embedding, {}
    for n, layer in enumerate(model.layers):
        attention, name = layer.attention, f"layers.{n}."
        table |= {name + "dec_attn.qkv_net.weight": [
                      attention.W_q.weight, attention.W_kE.weight, attention.W_v.weight],
                  name + "dec_attn.r_net.weight": [attention.W_kR.weight],
                  name + "dec_attn.o_net.weight": [attention.W_o.weight]}
        for ours, theirs in ((layer.norm_1, "dec_attn.layer_norm"), (layer.W_1, "pos_ff.CoreNet.0"),
                             (layer.W_2, "pos_ff.CoreNet.3"), (layer.norm_2, "pos_ff.layer_norm")):
            table |= {f"{name}{theirs}.weight": [ours.weight], f"{name}{theirs}.bias": [ours.bias]}
    for n, (u, v) in enumerate(zip(model.u, model.v)):
        name = f"layers.{n}.dec_attn." if c.untie_r else ""
        table |= {name + "r_w_bias": [u], name + "r_r_bias": [v]}
    rows = list(words.rows) if c.cutoffs else [words.weight]
    if c.cutoffs:
        tails = range(len(c.cutoffs))[::-1]  # the last tail comes first
        table |= {"crit.cluster_weight": [words.tail_rows[i : i + 1] for i in tails],
                  "crit.cluster_bias": [words.tail_bias[i : i + 1] for i in tails]}
    if c.div_val == 1:  # one table for all bands
        return table | {"word_emb.emb_layers.0.weight": rows, "crit.out_layers.0.weight": rows,
                        "crit.out_layers.0.bias": [words.bias]}
    for i, (first, end) in enumerate(words.bands):
        table |= {f"word_emb.emb_layers.{i}.weight": [rows[i]],
                  f"word_emb.emb_projs.{i}": [words.project_in[i]],
                  f"crit.out_layers.{i}.weight": [rows[i]],
                  f"crit.out_layers.{i}.bias": [words.bias[first:end]],
                  f"crit.out_projs.{i}": [words.project_out[i]]}
    return table


@torch.no_grad()
def load_official_weights(model, state):
    """Copy a state dict {name: tensor} of the official code or its port into our model; return it.
    ValueError unless it has the names and shapes of this model, and equal tensors where it ties."""
    if any(name.startswith("transformer.") for name in state):  # the port has the first tail first
        state = {name.removeprefix("transformer."): value.flip(0) if "cluster" in name else value
                 for name, value in state.items()}
    for bias in {"r_w_bias", "r_r_bias"} & state.keys():  # the port repeats a shared pair
        state = {name: value for name, value in state.items()
                 if not (name.endswith(f".{bias}") and value.equal(state[bias]))}
    table = parts_by_name(model)  # without pos_emb.inv_freq: R is computed
    ours = {name: (sum(map(len, parts)), *parts[0].shape[1:]) for name, parts in table.items()}
    theirs = {name: (*value.shape,) for name, value in state.items() if name != "pos_emb.inv_freq"}
    wrong = [f"{name} is {theirs.get(name, 'missing')}, in the model {ours.get(name, 'missing')}"
             for name in ours | theirs if theirs.get(name) != ours.get(name)]
    if not wrong:
        for name, parts in table.items():
            for part, rows in zip(parts, state[name].split([len(part) for part in parts])):
                part.copy_(rows)
        wrong = [f"{name} differs from the tensor that this model ties to it" for name, parts
                 in table.items() if not torch.cat(parts).equal(state[name].to(parts[0]))]
    if wrong:
        raise ValueError(f"not the weights of this model ({len(wrong)} differences): "
                         f"{'; '.join(wrong[:3])}")
    return model


def read_state_dict(path):
    """Read a file of weights -> {name: tensor}, without running code in it.  ValueError if not."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not all(map(torch.is_tensor, state.values())):
            raise TypeError
    except Exception as error:  # missing, cut off, or a pickled model, which would run code
        raise ValueError(f"{path} cannot be read as a state dict ({type(error).__name__}); from a "
                         "whole pickled model save its state_dict() with its own code") from None
    return state


def run(argv=None):
    """Evaluate a file of official weights beside the published number: one line."""
    parser = Parser(prog="python -m experiments.official_weights", description=__doc__)
    parser.add_argument("--data-dir", default=lesson_1.RUNS.parent / "data", metavar="FOLDER")
    parser.add_argument("file", help="a state dict in the official layout")
    parser.add_argument("--model", choices=presets.CONFIGS, metavar="NAME", required=True,
                        help="its sizes: " + ", ".join(presets.CONFIGS))
    flags = parser.parse_args(argv)
    device, state = machine.choose(), read_state_dict(flags.file)
    config, recipe = presets.CONFIGS[flags.model], presets.RECIPES[flags.model]
    is_shared = {"r_w_bias", "transformer.r_w_bias"} & state.keys()  # one u, v for all layers
    model = lesson_5.TransformerXL(replace(config, untie_r=not is_shared))
    reader = reader_of(load_official_weights(model, state).to(device).eval())
    recipe = replace(recipe, drop_newlines=recipe.dataset == "enwik8")  # as the authors count it
    corpus = read_corpus(recipe, flags.data_dir)
    if len(corpus.vocab) != config.vocab_size:
        raise ValueError(f"{flags.model} has {config.vocab_size:,} words, {corpus.name} has "
                         f"{len(corpus.vocab):,}: other data, or another vocabulary")
    print(f"{train.score_line(reader, corpus, recipe)}; published: {PAPER.get(flags.model, '-')}")


main = partial(exit_status, "official_weights.py", run)

if __name__ == "__main__":
    sys.exit(main())
