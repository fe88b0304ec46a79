"""The relative effective context length on losses worked by hand, and the losses of table 8.

    pytest tests/experiments/test_table8_recl.py
"""
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized, run_examples
from training import presets
from training.optimizers import optimizer_of

table8, common = import_module("table8_recl"), import_module("common")
AblationModel = import_module("table6_ablation").AblationModel
lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4)
CONTEXTS = [100, 200, 300, 400]


# ---- the measure --------------------------------------------------------------------------------


def planted(*models):
    """Losses by context of each model, the same at every position: (models, 4, 3) in float64."""
    return torch.tensor(models, dtype=torch.float64)[..., None].expand(-1, -1, 3)


def test_a_model_that_uses_200_tokens_gets_200():
    """Whatever r; one that never gains gets the first context, one that always does the last."""
    losses = planted([3.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0], [3.0, 2.5, 2.2, 1.9])
    for r in (0.1, 0.5, 1.0):
        assert table8.recl(losses[:2], CONTEXTS, r) == [200, 100]
    assert table8.recl(losses[1:], CONTEXTS, 1.0) == [100, 400]


def test_gains_count_against_the_best_of_the_group():
    """A weak model that only catches up gains nothing: its loss at c' is no lower than b(c)."""
    weak, strong = [4.0, 3.0, 2.5, 2.4], [2.0, 2.0, 2.0, 2.0]
    assert table8.recl(planted(weak), CONTEXTS, 1.0) == [400]
    assert table8.recl(planted(weak, strong), CONTEXTS, 1.0) == [100, 100]


def test_a_gain_of_exactly_the_threshold_goes_on():
    """g < threshold stops, so equal does not: 1 - exp(0 - ln 2) is one half exactly."""
    losses = planted([math.log(2), 0.0, 0.0, 0.0])
    assert 1 - math.exp(0.0 - math.log(2)) == 0.5
    assert table8.recl(losses, CONTEXTS, 1.0, threshold=0.5) == [200]
    assert table8.recl(losses, CONTEXTS, 1.0, threshold=0.5000001) == [100]


def test_a_run_is_measured_alone(run_folder, monkeypatch, capsys):
    """On the test split, with the memory that the run is evaluated with; its own group."""
    read, lengths = table8.losses_by_context, []
    monkeypatch.setattr(table8, "losses_by_context", lambda model, text, contexts, attention, B: (
        lengths.append(attention), read(model, text, contexts, attention, B))[1])
    assert table8.main(["--size", "tiny", "--checkpoint", str(run_folder)]) == 0
    printed = capsys.readouterr().out
    model, run, corpus, _ = common.open_run(run_folder, "data")
    contexts, _, stretches, W = table8.SIZES["tiny"]
    W = W // 4 + len(contexts)  # a quarter of the positions
    assert lengths == [run.eval_mem_len + 1] * stretches
    losses = torch.cat([read(model, text, contexts, run.eval_mem_len + 1, 3)
                        for text in table8.stretches_of(corpus, contexts, stretches, W)], dim=1)
    for r in table8.FRACTIONS:
        assert f"r = {r}: RECL {table8.recl(losses[None], contexts, r)[0]} tokens" in printed


@pytest.mark.parametrize("factor, length", [(0.9899, 200), (0.9901, 100)])
def test_the_rule_stops_below_one_percent(factor, length):
    """exp f falls by the factor from 100 to 200 tokens: 1.01 percent goes on, 0.99 stops."""
    second = 2.0 + math.log(factor)
    assert table8.recl(planted([2.0, second, second, second]), CONTEXTS, 1.0) == [length]


def test_the_hard_positions_are_those_of_the_best_model_and_change_with_c():
    """Ten positions; r = 0.1 takes the one with the largest b(c, t), another one for each c."""
    losses = torch.full((2, 2, 10), 1.0, dtype=torch.float64)
    losses[:, 0, 4] = 5.0  # hard at the first context for both models ...
    losses[0, 0, 7] = 9.0  # ... this only for one, so b is 1
    losses[:, 1, 6] = 6.0  # hard at the second
    losses[:, 1, 4] = torch.tensor([2.0, 8.0])
    assert [table8.hard_loss(losses, i, 0, 0, 0.1) for i in (0, 1)] == [5.0, 5.0]
    assert table8.hard_loss(losses, 0, 0, 1, 0.1) == 2.0
    assert table8.hard_loss(losses, 1, 0, 1, 0.1) == 5.0  # min: a worse loss does not count
    assert table8.hard_loss(losses, 0, 1, 0, 0.1) == 1.0
    assert table8.hard_loss(losses, 0, 0, 1, 0.2) == pytest.approx((2 + 1) / 2)
    assert table8.hard_loss(losses, 0, 0, 1, 0.01) == 2.0  # at least one position


def test_the_docstrings_example():
    run_examples(table8)


# ---- table 8 ------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, T", [("ours", 5), ("lstm", 5), ("al-rfou", 5), ("al-rfou", 70)])
def test_losses_are_after_exactly_so_many_tokens(kind, T):
    """Each loss against a window of its own, cut out by hand; al-rfou reads T tokens at most."""
    if kind == "lstm":
        model = table8.LSTM(CONFIG, 2000).double()
    else:
        model = AblationModel(
            CONFIG if kind == "ours" else replace(CONFIG, mem_len=0), T, kind)
        model = randomized(model)
    model, tokens = model.eval(), torch.randint(7, (400,))
    contexts = [40, 80, 120]  # read in segments of 64, so a state is handed on
    found = table8.losses_by_context(model, tokens, contexts, 30, 2)
    positions = range(120, 281, 40)
    assert found.shape == (3, len(positions))
    for i, c in enumerate(contexts):
        for k, t in enumerate(positions):
            used = min(c, T) if kind == "al-rfou" else c
            x, y = tokens[None, t - used : t], tokens[None, t - used + 1 : t + 1]
            with common.evaluating_with(model, mem_len=29, same_length=True):
                wanted = model(x, None, y)[0][0, -1]
            assert_close(found[i, k].double(), wanted, f"position {t} after {c}", 1e-5)


def test_the_lstm_trains_with_the_optimizer_of_the_others():
    """Muon takes its matrices, as it takes those of our layers."""
    model = table8.LSTM(CONFIG, 2000)
    muon = optimizer_of(model, replace(presets.RUNS["laptop"], steps=1, minutes=0.0)).parts[1]
    assert {id(z) for z in muon.param_groups[0]["params"]} == {
        id(z) for z in model.layers.parameters() if z.dim() == 2}
