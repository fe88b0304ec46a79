"""memory_length: the lowest loss on the synthetic text, and what each model is evaluated with.

    pytest tests/experiments/test_memory_length.py
"""
import math
from importlib import import_module

import pytest
import torch

memory_length, common = import_module("memory_length"), import_module("common")
corpora, lesson_5 = import_module("support.corpora"), import_module("05_full_model")


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


def test_each_model_is_read_at_all_lengths(monkeypatch, unread, notes):
    """Without a clamp and with its own, M + T - 1; as trained; and with same_length and as many
    keys, M + T / 2.
    """
    asked, (*_, study) = [], memory_length.SCALES["tiny"]
    monkeypatch.setattr(common, "memory_losses", lambda model, tokens, before, segment, **lengths: (
        asked.append((segment, lengths)), torch.full((2, 30), float(len(asked))))[1])
    model = lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"])
    unread("test")
    found = memory_length.evaluate(model, study, corpora.load(notes), 5)
    T, L = study.recipe.segment, study.lengths
    both = [(64, {"mem_len": length, "same_length": True, "clamp_len": clamp})
            for clamp in (0, 5 + T - 1) for length in L]
    assert asked == [*both, (T, {"mem_len": 5 + T // 2, "same_length": True}), (T, {})]
    n = len(L)
    assert found == (dict(zip(L, range(1, n + 1))), dict(zip(L, range(n + 1, 2 * n + 1))),
                     2 * n + 2, 2 * n + 1)
