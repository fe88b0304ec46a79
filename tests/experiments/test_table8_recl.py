"""The relative effective context length on losses worked by hand, and the losses of table 8."""
import doctest
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import assert_close, randomized

table6, table8, common = map(import_module, ("table6_ablation", "table8_recl", "common"))
lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4)
CONTEXTS = [100, 200, 300, 400]


def recl_by_the_formulas(losses, contexts, r):
    """Apply the formulas of the paper's appendix C to lists losses[model][context][position]."""
    models, n, found = range(len(losses)), len(losses[0][0]), []
    for i in models:
        k = 0
        while k + 1 < len(contexts):
            b = [min(losses[a][k][t] for a in models) for t in range(n)]
            hard = sorted(range(n), key=lambda t: -b[t])[: max(1, round(r * n))]
            f = [sum(min(b[t], losses[i][other][t]) for t in hard) / len(hard)
                 for other in (k, k + 1)]
            if (math.exp(f[0]) - math.exp(f[1])) / math.exp(f[0]) < 0.01:
                break
            k += 1
        found.append(contexts[k])
    return found


@pytest.mark.parametrize("r", [0.01, 0.5, 1.0])
def test_recl_of_random_losses_is_that_of_the_formulas(r):
    """Models that gain by a factor of about 1.01 a context, so that they stop at different ones."""
    assert doctest.testmod(table8, raise_on_error=True).attempted
    draw, several = torch.Generator().manual_seed(1), set()
    for _ in range(60):
        losses = torch.rand(3, 4, 20, generator=draw, dtype=torch.float64) * 0.05 + 2
        gains = 0.01 * torch.randint(4, (3, 1, 1), generator=draw)
        losses = losses - torch.arange(4)[:, None] * gains
        found = table8.recl(losses, CONTEXTS, r)
        assert found == recl_by_the_formulas(losses.tolist(), CONTEXTS, r)
        several |= set(found)
    assert len(several) > 2


def test_positions_are_drawn_with_replacement_for_all_seeds_alike():
    """One position of 20 gains 0.2 nats.  Drawn once, the RECL is 100, drawn twice, 200."""
    losses = torch.full((2, 2, 20), 2.0)
    losses[0, 1, 7] = 1.8
    drawn = table8.drawn_means([losses, losses], CONTEXTS[:2], 1.0)
    assert drawn.shape == (200, 2) and (drawn[:, 1] == 100).all()
    assert set(drawn[:, 0].tolist()) == {100, 200} and 20 < (drawn[:, 0] == 200).sum() < 90


@pytest.mark.parametrize("kind, T", [("ours", 5), ("lstm", 5), ("vaswani", 5), ("vaswani", 70)])
def test_losses_are_after_exactly_so_many_tokens(kind, T):
    """Each loss against a window of its own, cut out by hand; vaswani reads T tokens at most."""
    config = replace(CONFIG, mem_len=4 * (kind == "ours"))
    model = randomized(table8.LSTM(config, 2000) if kind == "lstm" else
                       table6.AblationModel(config, T, kind)).eval()
    tokens, contexts = torch.randint(7, (400,)), [40, 80, 120]  # in segments of 64, with a state
    found = table8.losses_by_context(model, tokens, contexts, 30, 2)
    for i, c in enumerate(contexts):
        for k, t in enumerate(range(120, 281, 40)):
            used = min(c, T) if kind == "vaswani" else c
            x, y = tokens[None, t - used : t], tokens[None, t - used + 1 : t + 1]
            with common.train.evaluating(model, mem_len=29, same_length=True):
                wanted = model(x, None, y)[0][0, -1].detach()
            assert_close(found[i, k].double(), wanted, f"position {t} after {c}", 1e-5)


def test_the_lstm_is_as_large_as_it_may_be():
    """It has 2,000 parameters at most beside the embedding."""
    model = table8.LSTM(replace(CONFIG, d_model=4), 2000)
    size = sum(z.numel() for part in (model.layers, model.out) for z in part.parameters())
    assert 1000 < size <= 2000


def test_the_length_is_chosen_on_valid_and_the_contexts_are_of_test(unread, notes, monkeypatch):
    """The memory, T to 16 T with the query, that has the lowest loss."""
    test = common.corpora.load(notes).test
    unread("valid")
    one, other = table8.spans_of(common.corpora.load(notes), CONTEXTS, 2, 3, "cpu")
    assert one.equal(test[: 2 * 100 + 400 + 1]) and len(other) == len(one)
    monkeypatch.undo()
    unread("test")
    monkeypatch.setattr(common, "memory_losses", lambda *given, mem_len, same_length: (
        torch.tensor([abs(mem_len - 11.4)])))  # 15 is nearest
    model = SimpleNamespace(u=torch.zeros(1))
    assert table8.best_length(model, table6.SCALES["tiny"], common.corpora.load(notes)) == 16
