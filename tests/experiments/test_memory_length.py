"""Memory length and depth: what is evaluated, where the gain ends, and the text where it is known.

    pytest tests/experiments/test_memory_length.py
"""
from importlib import import_module

import pytest
import torch

memory_length = import_module("memory_length")
study, lesson_5 = memory_length.study, import_module("05_full_model")
copies = study.copies


def test_where_the_gain_ends():
    """The shortest memory within 0.002 of the best."""
    assert memory_length.where({4: 1.203, 8: 1.2019, 16: 1.2, 32: 1.21}) == (1.2, 8)
    assert memory_length.where({4: 1.0, 8: 1.2}) == (1.0, 4)


def test_the_lengths_that_are_tried(monkeypatch):
    """Without and with clamp, at M + T - 1 of training; as trained, and with
    same_length and M + T / 2 keys.
    """
    *_, setting = memory_length.SIZES["tiny"]
    corpus, seen, bar = copies.corpus(4_000), [], study.Bar(100)
    monkeypatch.setattr(study, "memory_losses", lambda model, tokens, before, segment, **lengths: (
        seen.append((segment, lengths)) or torch.full((2, 30), float(len(seen)))))
    free, clamped, trained, same = memory_length.evaluate(
        None, setting, corpus, 8, bar)
    wanted = [(64, {"mem_len": M, "clamp_len": clamp, "same_length": True})
              for clamp in (0, 15) for M in setting.lengths]
    assert seen == [*wanted, (8, {"mem_len": 12, "same_length": True}), (8, {})]
    assert bar.done == pytest.approx(setting.run.steps / 4)
    assert list(free.values()) == [1, 2, 3, 4] and list(clamped.values()) == [5, 6, 7, 8]
    assert (trained, same) == (10, 9)


def test_a_memory_ends_at_the_token():
    """One layer, any weights: a symbol that comes back after 24 tokens, so 23 before the query,
    moves its prediction with M = 23, and by exactly nothing with 22.
    """
    config = lesson_5.Config(32, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8)
    model = lesson_5.TransformerXL(config).double().eval()
    tokens = copies.text(41, 5).long()
    other = tokens.clone()
    other[40 - 24] = (tokens[40 - 24] + 1) % copies.EACH
    for M in (20, 22, 23, 24, 30):
        losses = [study.memory_losses(model, z[None], 0, 4, mem_len=M, same_length=True)[0, -1]
                  for z in (tokens, other)]
        assert (losses[0] != losses[1]) == (M >= 23), M
