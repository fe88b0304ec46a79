"""memory_length: the lowest loss on the synthetic text, and what each model is evaluated with.

    pytest tests/experiments/test_memory_length.py
"""
import math
from importlib import import_module

import pytest
import torch

memory_length, common = import_module("memory_length"), import_module("common")


def test_the_best_loss_is_that_of_one_who_knows_the_rule():
    """ln 8 for each of four distances that is too far, the entropy of a copy for the others."""
    copied = -0.9125 * math.log(0.9125) - 7 * 0.0125 * math.log(0.0125)
    for c, known in ((23, 0), (24, 1), (71, 2), (96, 4)):
        wanted = (known * copied + (4 - known) * math.log(8)) / 4
        assert memory_length.best_loss(c) == pytest.approx(wanted)


def test_each_model_has_its_memory_and_is_read_at_all_lengths(
        monkeypatch, unread, notes, tmp_path):
    """Without a clamp, and with M + T - 1."""
    asked = []

    def note(reader, tokens, before, segment, **lengths):
        asked.append((reader.config.n_layer, reader.config.mem_len, segment, lengths))
        return torch.ones(2, 30)

    monkeypatch.setattr(common, "memory_losses", note)
    unread("test")
    assert memory_length.main(["--scale", "tiny", "--dataset", str(notes), "--seeds", "0", "--out",
                               str(tmp_path)]) == 0
    wanted = []
    for N, M in ((1, 0), (1, 8), (2, 0), (2, 8)):  # T is 8
        wanted += [(N, M, 64, {"mem_len": length, "same_length": True, "clamp_len": clamp})
                   for clamp in (0, M + 7) for length in (1, 4, 8, 16)]
    assert asked == wanted
