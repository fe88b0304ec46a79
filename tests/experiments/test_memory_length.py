"""memory_length: the memories that are tried, and the lowest loss on the synthetic text.

    pytest tests/experiments/test_memory_length.py
"""
import math
from importlib import import_module

import pytest
import torch

memory_length, common = import_module("memory_length"), import_module("common")
corpora = import_module("support.corpora")


def test_the_best_loss_is_that_of_a_counter_who_knows_the_rule():
    """ln 8 for a kind whose distance is too far, the entropy of a copy for the others."""
    tokens, n = corpora.draw_copies(60_000, 4).long(), len(corpora.DISTANCES)
    right = corpora.KEPT + (1 - corpora.KEPT) / corpora.EACH
    for c in (23, 24, 47, 48, 72, 95, 96, 200):
        total = 0.0
        for kind, d in enumerate(corpora.DISTANCES):
            places = torch.arange(200 + kind, 60_000, n)
            same = tokens[places] == tokens[places - d]
            wrong = (1 - right) / (corpora.EACH - 1)
            losses = torch.where(same, -math.log(right), -math.log(wrong))
            total += (losses.mean().item() if d <= c else math.log(corpora.EACH)) / n
        assert memory_length.best_loss(c) == pytest.approx(total, abs=0.01), c
