"""Table 9: the arithmetic by hand, a line for each length, and lanes that do not fit.

    pytest tests/experiments/test_table9_eval_speed.py
"""
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

table9, benchmark = import_module("table9_eval_speed"), import_module("benchmark")
lesson_5 = import_module("05_full_model")


def test_what_arithmetic_allows_in_table_9():
    """By hand for N = 1, D = HC = 2, FF = 3, and rounded for the paper's 24 layers."""
    config = lesson_5.Config(5, n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=3)
    assert table9.allowed(config, 10, T=2) == 10 * (28 + 10 * 2) / (28 + 3 * 12 * 2)
    large = benchmark.CONFIGS["enwik8-24L"]
    assert [round(table9.allowed(large, L)) for L in table9.PAPER] == [
        678, 1352, 1919, 2422]


def test_lanes_that_do_not_fit_are_left_out(monkeypatch):
    """The best number of lanes before memory runs out counts."""
    given = SimpleNamespace(lanes=[1, 2, 4], repetitions=1, dtype="float32", device="cpu")

    def measure(calls, repetitions, device):
        lanes = calls["ours"].__self__.size.eval_batch
        if lanes == 4:
            raise torch.OutOfMemoryError("no room")
        return {name: [8.0 * lanes**0.5] * 2 + [8.0 * lanes**4] for name in calls}

    monkeypatch.setattr(benchmark, "measure", measure)
    best = table9.milliseconds_a_token(benchmark.SIZES["tiny"], given)
    assert best["window"] == pytest.approx([8000 / 2**0.5] * 2 + [64000])  # two lanes, a token each
    assert best["ours"] == pytest.approx([z / 8 for z in best["window"]])  # eight tokens each
