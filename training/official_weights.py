"""The authors' weights in our model, and ours in their layout.

The problem.  A model is the published one if the published weights give the published number in it.
The official PyTorch code (and the port to `transformers`, now retired, which adds the prefix
`transformer.`) names, stacks and orders the same tensors in another way:

    theirs                                        ours
    layers.n.dec_attn.qkv_net.weight (3 HC, D)    W_q, W_kE, W_v
    layers.n.dec_attn.r_net, o_net                W_kR, W_o
    layers.n.dec_attn.layer_norm                  norm_1
    layers.n.pos_ff.CoreNet.0, .3, layer_norm     W_1, W_2, norm_2
    r_w_bias, r_r_bias (H, C), or one per layer   u, v (1 or N, H, C)
    word_emb.emb_layers.i, emb_projs.i            embedding: rows of band i, project_in
    crit.out_layers.i, out_projs.i                the same rows (tied), bias, project_out
    crit.cluster_weight, cluster_bias             tail_rows, tail_bias; the official code has the
                                                  LAST tail first, the port the first
    pos_emb.inv_freq                              none: R is computed; compared when loading

experiments/official_weights.py is the command.

What our tests cannot show, since the released files are not at hand: that those files hold the
names listed here, and that the data are cut into words as they were when the weights were trained.
Three differences remain on purpose: with same_length we show M + 1 keys (as the TensorFlow code
did) where the official PyTorch code shows M; we evaluate the last, shorter segment, too; and our
first segment has no memory, where the port attends to a memory of zeros.
"""
from dataclasses import asdict, replace
from itertools import accumulate

import torch
import torch.nn as nn

from training import presets


# ---- which of their tensors is which of ours ----------------------------------------------------

def places(model, port):
    """Where each official tensor belongs: {its name: [parts of our weights, stacked in its rows]}.

    The parts are views: what is copied into them is in the model.
    """
    prefix, words, config = "transformer." if port else "", model.embedding, model.config
    table = {}
    for n, layer in enumerate(model.layers):
        attention, name = layer.attention, f"{prefix}layers.{n}."
        table |= {
            name + "dec_attn.qkv_net.weight": [
                attention.W_q.weight, attention.W_kE.weight, attention.W_v.weight],
            name + "dec_attn.r_net.weight": [attention.W_kR.weight],
            name + "dec_attn.o_net.weight": [attention.W_o.weight]}
        for ours, theirs in ((layer.norm_1, "dec_attn.layer_norm"), (layer.W_1, "pos_ff.CoreNet.0"),
                             (layer.W_2, "pos_ff.CoreNet.3"), (layer.norm_2, "pos_ff.layer_norm")):
            table |= {f"{name}{theirs}.weight": [ours.weight], f"{name}{theirs}.bias": [ours.bias]}
        if config.untie_r:
            table |= {name + "dec_attn.r_w_bias": [model.u[n]],
                      name + "dec_attn.r_r_bias": [model.v[n]]}
    if not config.untie_r:
        table |= {prefix + "r_w_bias": [model.u[0]], prefix + "r_r_bias": [model.v[0]]}

    if not config.cutoffs:
        return table | {prefix + "word_emb.emb_layers.0.weight": [words.weight],
                        "crit.out_layers.0.weight": [words.weight],
                        "crit.out_layers.0.bias": [words.bias]}
    order = range(len(config.cutoffs)) if port else reversed(range(len(config.cutoffs)))
    order = list(order)  # the tails, as theirs are stacked
    table |= {"crit.cluster_weight": [words.tail_rows[i : i + 1] for i in order],
              "crit.cluster_bias": [words.tail_bias[i : i + 1] for i in order]}
    if config.div_val == 1:  # one table for all bands
        return table | {prefix + "word_emb.emb_layers.0.weight": list(words.rows),
                        "crit.out_layers.0.weight": list(words.rows),
                        "crit.out_layers.0.bias": [words.bias]}
    for i, (first, end) in enumerate(words.bands):
        table |= {f"{prefix}word_emb.emb_layers.{i}.weight": [words.rows[i]],
                  f"{prefix}word_emb.emb_projs.{i}": [words.project_in[i]],
                  f"crit.out_layers.{i}.weight": [words.rows[i]],
                  f"crit.out_layers.{i}.bias": [words.bias[first:end]],
                  f"crit.out_projs.{i}": [words.project_out[i]]}
    return table


def frequencies(D):
    """inv_freq of the official code, (D/2,), float64."""
    return 10000 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)


def is_port(state):
    """Whether the names are those of the port to `transformers`."""
    return any(name.startswith("transformer.") for name in state)


def description(state):
    """The sizes of the model that official weights belong to, as fields of Config.

    `cutoffs` are known if the bands have tables of their own; otherwise, with div_val 1, only how
    many there are, and `cutoffs` is that number.  Which projections are tied is in no shape.
    """
    names = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    try:
        untied = "layers.0.dec_attn.r_w_bias" in names and "r_w_bias" not in names
        H, C = names["layers.0.dec_attn.r_w_bias" if untied else "r_w_bias"].shape
        FF, D = names["layers.0.pos_ff.CoreNet.0.weight"].shape
        tables = [z for name, z in names.items() if name.startswith("word_emb.emb_layers.")]
        layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
        cutoffs = len(names.get("crit.cluster_bias", ()))
        if len(tables) > 1:
            cutoffs = tuple(accumulate(len(z) for z in tables[:-1]))
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError("these are no weights of the official Transformer-XL or of its port "
                         f"({error} is missing or of another shape)") from None
    return {"vocab_size": sum(len(z) for z in tables), "n_layer": len(layers), "d_model": D,
            "n_head": H, "d_head": C, "d_inner": FF, "untie_r": untied, "cutoffs": cutoffs}


def looks_like(state):
    """Name of the preset whose sizes these weights have, or a list of the sizes.

    u and v for each layer or shared are both accepted.
    """
    found = description(state)
    for name, config in presets.CONFIGS.items():
        known = asdict(config)
        if config.div_val == 1:
            known["cutoffs"] = len(config.cutoffs)
        if all(known[key] == value for key, value in found.items() if key != "untie_r"):
            return name
    return ", ".join(f"{key} {value}" for key, value in found.items())


def compare(model, state, port):
    """Hold a state dict against our model -> (what is wrong, a sentence each; bands untied there).

    A band is untied if the file has two projections of it, where our model has one for both.
    """
    table, prefix = places(model, port), "transformer." if port else ""
    wrong, filled, untied_bands = [], {}, []
    sines = prefix + "pos_emb.inv_freq"
    # the port lists a shared pair u, v again under every layer
    again = {} if not port or model.config.untie_r else {
        f"{prefix}layers.{n}.dec_attn.{bias}": prefix + bias
        for n in range(len(model.layers)) for bias in ("r_w_bias", "r_r_bias")}
    for name, parts in table.items():
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        if name not in state:
            wrong.append(f"{name} is missing")
        elif tuple(state[name].shape) != shape:
            wrong.append(f"{name} is {tuple(state[name].shape)}, not {shape}")
        else:
            same = filled.setdefault(tuple(part.data_ptr() for part in parts), name)
            equal = state[name].double().equal(state[same].double())
            if name.startswith("crit.out_projs.") and not equal:
                untied_bands.append(int(name.removeprefix("crit.out_projs.")))
            elif not equal:
                wrong.append(f"{name} is not equal to {same}, to which this model ties it")
    wrong += [f"{name} is not equal to {shared}" for name, shared in again.items()
              if name in state and shared in state and not state[name].equal(state[shared])]
    surplus = state.keys() - table.keys() - again.keys() - {sines}
    wrong += [f"{name} is too much" for name in sorted(surplus)]
    ours, half = frequencies(model.config.d_model), torch.float16
    if sines not in state:
        wrong.append(f"{sines} is missing")
    elif state[sines].shape != ours.shape or not torch.allclose(
            state[sines].double().cpu(), ours, rtol=1e-3 if state[sines].dtype == half else 1e-5):
        wrong.append(f"{sines} holds other frequencies")
    return wrong, untied_bands


@torch.no_grad()
def load_official_weights(model, state):
    """Copy a state dict of the official code, or of the port, into our model.

    Every tensor must be there, once, in its shape, and a word's two rows must be equal; ValueError
    otherwise, before anything is copied.  Projections that the model ties and the file does not
    become two.  Float16 weights are taken into the model's dtype.
    """
    port = is_port(state)
    wrong, untied_bands = compare(model, state, port)
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        untied = description(state)["untie_r"]
        shared = "" if untied == model.config.untie_r else (
            f"; u and v are {'one pair for each layer' if untied else 'shared'} there, so load "
            f"them into replace(config, untie_r={untied})")
        raise ValueError(f"not the weights of this model: {'; '.join(wrong[:3])}{more}. They look "
                         f"like {looks_like(state)}{shared}")
    words = model.embedding
    for i in untied_bands:
        words.project_out[i] = nn.Parameter(words.project_in[i].detach().clone())
        model.config = replace(model.config, tie_projections=False)
    for name, parts in places(model, port).items():
        for part, rows in zip(parts, state[name].split([len(part) for part in parts])):
            part.copy_(rows)
    return model


def official_state(model, port=False):
    """Our weights in the layout of the official code or the port: {name: tensor}, copies."""
    state = {name: torch.cat([part.detach() for part in parts])
             for name, parts in places(model, port).items()}
    inv_freq = frequencies(model.config.d_model).to(model.u)
    return state | {("transformer." if port else "") + "pos_emb.inv_freq": inv_freq}


def read(path):
    """A file of weights -> {name: tensor}, without running any code in it.  ValueError if not."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except Exception:  # cut off, no such file format, or a pickled model, which would run code
        raise ValueError(f"{path} is no state dict; from a whole pickled model, save its "
                         "state_dict() with the code that it belongs to") from None
    if not isinstance(state, dict) or not all(
            isinstance(name, str) and torch.is_tensor(z) for name, z in state.items()):
        raise ValueError(f"{path} holds no state dict (names and tensors)")
    return state
