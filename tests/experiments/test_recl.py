"""The relative effective context length on losses worked by hand.

    pytest tests/experiments/test_recl.py
"""
import math
from importlib import import_module

import pytest
import torch

from helpers import run_examples

measure = import_module("recl")
CONTEXTS = [100, 200, 300, 400]


def planted(*models):
    """Losses by context of each model, the same at every position: (models, 4, 3) in float64."""
    return torch.tensor(models, dtype=torch.float64)[..., None].expand(-1, -1, 3)


def test_a_model_that_uses_200_tokens_gets_200():
    """Whatever r; one that never gains gets the first context, one that always does the last."""
    losses = planted([3.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0], [3.0, 2.5, 2.2, 1.9])
    for r in (0.1, 0.5, 1.0):
        assert measure.recl(losses[:2], CONTEXTS, r) == [200, 100]
    assert measure.recl(losses[1:], CONTEXTS, 1.0) == [100, 400]


def test_gains_count_against_the_best_of_the_group():
    """A weak model that only catches up gains nothing: its loss at c' is no lower than b(c)."""
    weak, strong = [4.0, 3.0, 2.5, 2.4], [2.0, 2.0, 2.0, 2.0]
    assert measure.recl(planted(weak), CONTEXTS, 1.0) == [400]
    assert measure.recl(planted(weak, strong), CONTEXTS, 1.0) == [100, 100]


@pytest.mark.parametrize("factor, length", [
    (0.989, 200), (0.9899, 200), (0.9901, 100), (0.991, 100)])
def test_the_rule_stops_below_one_percent(factor, length):
    """exp f falls by the factor from 100 to 200 tokens: 1.01 percent goes on, 0.99 stops."""
    second = 2.0 + math.log(factor)
    assert measure.recl(planted([2.0, second, second, second]), CONTEXTS, 1.0) == [length]


def test_a_gain_of_exactly_the_threshold_goes_on():
    """g < threshold stops, so equal does not: 1 - exp(0 - ln 2) is one half exactly."""
    losses = planted([math.log(2), 0.0, 0.0, 0.0])
    assert 1 - math.exp(0.0 - math.log(2)) == 0.5
    assert measure.recl(losses, CONTEXTS, 1.0, threshold=0.5) == [200]
    assert measure.recl(losses, CONTEXTS, 1.0, threshold=0.5000001) == [100]


def test_the_hard_positions_are_those_of_the_best_model_and_change_with_c():
    """Ten positions; r = 0.1 takes the one with the largest b(c, t), another one for each c."""
    losses = torch.full((2, 3, 10), 1.0, dtype=torch.float64)
    losses[:, 0, 4] = 5.0  # hard at the first context for both models ...
    losses[0, 0, 7] = 9.0  # ... this only for one, so b is 1
    losses[:, 1, 6] = 6.0  # hard at the second
    losses[0, 1, 4], losses[1, 1, 4] = 2.0, 4.0
    losses[0, 2, 6] = 3.0
    assert measure.hard_loss(losses, 0, 0, 0, 0.1) == measure.hard_loss(losses, 1, 0, 0, 0.1) == 5.0
    assert measure.hard_loss(losses, 0, 0, 1, 0.1) == 2.0
    assert measure.hard_loss(losses, 1, 0, 1, 0.1) == 4.0
    assert measure.hard_loss(losses, 0, 1, 2, 0.1) == 3.0
    assert measure.hard_loss(losses, 1, 0, 1, 0.2) == pytest.approx((4 + 1) / 2)
    assert measure.hard_loss(losses, 0, 0, 1, 0.01) == 2.0  # at least one position
    assert measure.hard_loss(losses, 0, 0, 0, 1.0) == pytest.approx((9 * 1 + 5) / 10)
    worse = losses.clone()
    worse[0, 1, 4] = 8.0
    assert measure.hard_loss(worse, 0, 0, 1, 0.1) == 5.0  # min: a worse loss does not count


def test_wrong_shapes_are_refused():
    """Contexts that are not those of the losses, an r beyond 1; the docstring's example is true."""
    for contexts, r in (([100, 200], 1.0), (CONTEXTS, 0.0), (CONTEXTS, 1.5)):
        with pytest.raises(ValueError, match="losses must be"):
            measure.recl(planted([1.0] * 4), contexts, r)
    run_examples(measure)
