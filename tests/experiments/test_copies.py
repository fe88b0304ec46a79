"""The text with dependencies of known length: what repeats, how often, and the best loss.

    pytest tests/experiments/test_copies.py
"""
import math
from importlib import import_module

import pytest
import torch

copies = import_module("copies")


def test_each_kind_repeats_what_stood_its_distance_before():
    """Nine times in ten, or by chance; and at no other distance more often than by chance."""
    tokens = copies.text(40_000, 3).long()
    assert (tokens // copies.EACH).equal(torch.arange(40_000) % len(copies.DISTANCES))
    for kind, d in enumerate(copies.DISTANCES):
        mine = tokens[kind :: len(copies.DISTANCES)]
        for back in (4, 16, 24, 48, 72, 96):
            step = back // len(copies.DISTANCES)
            share = (mine[step:] == mine[:-step]).double().mean().item()
            chance = 1 / copies.EACH
            if back % d == 0:  # k copies in a row
                kept = copies.KEPT ** (back // d)
                assert share == pytest.approx(kept + (1 - kept) * chance, abs=0.02)
            elif back < d:
                assert share == pytest.approx(chance, abs=0.04)


def test_the_best_loss_is_that_of_a_counter_who_knows_the_rule():
    """ln 8 for a kind whose distance is too far, the entropy of a copy for the others."""
    tokens, n = copies.text(60_000, 4).long(), len(copies.DISTANCES)
    right = copies.KEPT + (1 - copies.KEPT) / copies.EACH
    for c in (23, 24, 47, 48, 72, 95, 96, 200):
        total = 0.0
        for kind, d in enumerate(copies.DISTANCES):
            places = torch.arange(200 + kind, 60_000, n)
            same = tokens[places] == tokens[places - d]
            wrong = (1 - right) / (copies.EACH - 1)
            losses = torch.where(same, -math.log(right), -math.log(wrong))
            total += (losses.mean().item() if d <= c else math.log(copies.EACH)) / n
        assert copies.best_loss(c) == pytest.approx(total, abs=0.01), c
