"""The regularisers, each alone: masks, expectations, what evaluation sees, and sums by hand.

    pytest tests/experiments/test_regularisers.py
"""
import math
from importlib import import_module

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from helpers import assert_close, randomized


lesson_5, regularisers = import_module("05_full_model"), import_module("regularisers")
LockedDropout, WordDropout, DropConnect, Penalised, Recipe = (
    getattr(regularisers, name) for name in
    ("LockedDropout", "WordDropout", "DropConnect", "Penalised", "Recipe"))
CONFIG = lesson_5.Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=6, mem_len=5)
ALL = Recipe(word=0.3, input=0.3, inside=0.3, attention=0.3, output=0.3, connect=0.3,
             locked_inside=True, alpha=2.0, beta=1.0)
x, y = torch.arange(24).view(2, 12) % 11, torch.arange(1, 25).view(2, 12) % 11


def plain(seed=0):
    torch.manual_seed(seed)
    return randomized(lesson_5.TransformerXL(CONFIG))


# ---- masks --------------------------------------------------------------------------------------

def test_locked_one_mask_for_all_time_steps():
    """Each lane has one, over features; entries are 0 or 1 / (1 - p), p of them 0."""
    drop = LockedDropout(0.4)
    mask = drop(torch.ones(50, 7, 60))  # (B, T, D)
    assert (mask == mask[:, :1]).all(), "a mask changes with time"
    assert {round(z, 5) for z in mask.unique().tolist()} == {0.0, round(1 / 0.6, 5)}
    share = (mask[:, 0] == 0).double().mean().item()
    assert abs(share - 0.4) < 5 * math.sqrt(0.24 / 3000), share
    assert len({tuple(row.tolist()) for row in mask[:, 0]}) == 50, "lanes share a mask"
    assert (drop(torch.ones(50, 7, 60)) != mask).any(), "calls share a mask"
    rows = drop(torch.full((9, 60), 3.0))  # R (n, D)
    assert (rows == rows[0]).all() and rows.unique().tolist() == pytest.approx([0, 5])


def test_word_dropout_takes_whole_words():
    """All occurrences of a word share one fate in a call; the others are scaled.  The output layer,
    which is tied to it, sees every row.
    """
    embedding = lesson_5.TiedEmbedding(lesson_5.Config(400, d_model=4))
    drop = WordDropout(embedding, 0.25)
    words = torch.arange(400).repeat(2).view(2, 400)
    nn.init.ones_(embedding.weight)
    ratio = drop(words)  # (2, 400, 4)
    assert (ratio == ratio[:1, :, :1]).all(), "two fates in one call"
    lost = (ratio[0, :, 0] == 0)
    assert abs(lost.double().mean().item() - 0.25) < 5 * math.sqrt(0.1875 / 400)
    assert ratio[0, ~lost].sub(1 / 0.75).abs().max() < 1e-6
    assert ((drop(words)[0, :, 0] == 0) != lost).any(), "calls share a mask"
    h = torch.ones(1, 1, 4)
    assert torch.equal(drop.logits(h), embedding.logits(h))


def test_dropconnect_is_a_linear_layer_with_fewer_weights():
    """Its output is that of the masked matrix; the mask is new in each call; the bias stays."""
    linear = nn.Linear(20, 30)
    drop, z = DropConnect(linear, 0.3), torch.randn(5, 20)
    torch.manual_seed(3)
    out = drop(z)
    torch.manual_seed(3)
    weight = F.dropout(linear.weight, 0.3)
    assert (out - z @ weight.T - linear.bias).abs().max() < 1e-6
    assert not torch.equal(out, drop(z)), "calls share a mask"


@pytest.mark.parametrize("part, value", [
    ("word", 1), ("word", -0.1), ("input", 1.0), ("alpha", -1), ("decay", math.inf),
    ("average_rate", math.nan)])
def test_a_rate_outside_its_range_is_refused(part, value):
    """Dropouts are in [0, 1), the other numbers in [0, inf), integers too."""
    with pytest.raises(ValueError, match=f"{part} must be in"):
        Recipe(**{part: value})


# ---- put into the model -------------------------------------------------------------------------

def test_evaluation_does_not_see_them():
    """All parts on: in eval mode logits and memory are the plain model's to the bit."""
    model = plain()
    regular = regularisers.regularise(plain(), ALL)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            wanted, found = (z.eval()(x)[0] for z in (model, regular))
        assert torch.equal(wanted, found)
    different = [regular.train()(x)[0] for _ in range(2)]
    assert not torch.equal(*different)


@pytest.mark.parametrize("locked, locked_inside", [(True, False), (False, True)])
def test_where_what_is_dropped(locked, locked_inside):
    """The rate of each of lesson 5's dropouts, and whether it is locked; DropConnect takes the
    matrices of each attention and no other; word dropout the embedding of the input.
    """
    recipe = Recipe(input=0.1, inside=0.2, attention=0.3, output=0.4, locked=locked,
                    locked_inside=locked_inside, connect=0.5, word=0.6)
    model = regularisers.regularise(plain(), recipe)
    wanted = {"dropout_embedding": (0.1, locked), "dropout_final": (0.4, locked),
              "dropout_R": (0.2, locked_inside)}
    for n in (0, 1):
        wanted |= {f"layers.{n}.{name}": (0.2, locked_inside)
                   for name in ("dropout_output", "dropout_inner", "dropout_ff")}
        wanted[f"layers.{n}.attention.dropout_attention"] = 0.3, False
    modules = dict(model.named_modules())
    assert wanted == {name: (module.p, isinstance(module, LockedDropout))
                      for name, module in modules.items() if "dropout" in name}
    connected = {name: z.p for name, z in modules.items() if isinstance(z, DropConnect)}
    assert connected == {f"layers.{n}.attention.W_{z}": 0.5
                         for n in (0, 1) for z in ("q", "kE", "kR", "v", "o")}
    assert isinstance(model.embedding, WordDropout) and model.embedding.p == 0.6


# ---- activations --------------------------------------------------------------------------------

def test_penalised_reads_the_last_hidden_state():
    """The mean loss is the plain one and the penalty: AR of what is after the last dropout, TAR of
    what is before it; so is the gradient; nothing of the graph is held afterwards.
    """
    model, other = (regularisers.regularise(plain(), Recipe(output=0.5)).train() for _ in "ab")
    penalised = Penalised(model, 0.3, 0.7)
    torch.manual_seed(5)
    loss, memory = penalised(x, None, y)
    assert penalised.seen is None
    caught = []
    other.dropout_final.register_forward_hook(lambda _, inputs, out: caught.extend((*inputs, out)))
    torch.manual_seed(5)
    wanted, wanted_memory = other(x, None, y)
    h, dropped = caught
    assert (dropped == 0).any() and (h != 0).all()
    penalty = 0.3 * dropped.square().mean() + 0.7 * (h[:, 1:] - h[:, :-1]).square().mean()
    # the penalty is float32 at least in the sum; the model here is float64
    assert (loss - wanted - penalty).abs().max() < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(memory, wanted_memory))
    loss.mean().backward()
    (wanted.mean() + penalty).backward()
    for a, b in zip(model.parameters(), other.parameters()):
        assert_close(a.grad, b.grad, "gradient", tolerance=1e-5)
    one = torch.ones(1, 1, 2)  # of one token there is no change in time
    assert regularisers.activation_penalty(one, 2 * one, 1, 9).item() == 4.0


# ---- length, optimizer, average -----------------------------------------------------------------

def test_segment_lengths():
    """Near T, in one of twenty near T / 2, whole tenths, decided by seed and step."""
    def lengths(seed, T=70):
        return [regularisers.segment_length(T, seed, step) for step in range(2000)]

    found = lengths(0)
    assert found == lengths(0) != lengths(1)
    assert {z % 7 for z in found} == {0} and min(found) > 0
    halves, whole = ([z for z in found if (z <= 49) == low] for low in (True, False))
    assert abs(len(halves) / 2000 - 0.05) < 5 * math.sqrt(0.0475 / 2000)
    assert abs(sum(whole) / len(whole) - 70) < 0.7 and abs(sum(halves) / len(halves) - 35) < 3
    spread = math.sqrt(sum((z - 70) ** 2 for z in whole) / len(whole))
    assert 4.5 < spread < 6.5, spread  # 5, and the rounding's 2
    assert min(lengths(0, 8)) > 0  # a tenth is no whole number
