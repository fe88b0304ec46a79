"""The forms that are compared for speed give the same numbers and gradients.

    pytest tests/experiments/test_parts.py
"""
from importlib import import_module

import pytest
import torch

from helpers import assert_close, gradients

parts, lesson_5 = import_module("parts"), import_module("05_full_model")


@pytest.mark.parametrize("name", parts.ATTENTION)
@pytest.mark.parametrize("T, m", [(3, 5), (4, 0)])
def test_every_form_is_lesson_5s_attention(name, T, m):
    """Outputs before W_o and all gradients."""
    B, H, C, K = 2, 3, 4, m + T
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C))]
    hidden = lesson_5.hidden_keys(T, m, m, False)
    attention = lesson_5.RelativeAttention(lesson_5.Config(
        9, n_layer=1, d_model=H * C, n_head=H, d_head=C, d_inner=5))
    wanted = attention.attend(*leaves, hidden)
    found = parts.ATTENTION[name](attention, *leaves, hidden)
    assert_close(found, wanted, name, 1e-10)
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"{name}: gradient", 1e-10)


def test_relu_and_dropout_change_places():
    """The same draws give the same numbers: torch's dropout and ours may differ, orders not."""
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
              for shape in ((2, 5, 6), (8, 6), (6, 8))]
    results = []
    for form in parts.RELU.values():
        torch.manual_seed(3)
        out = parts.feed_forward(form)(*leaves)
        results.append((out, *gradients(out, leaves)))
    for a, b in zip(*results):
        assert_close(a, b, "the other order", 1e-12)


def test_three_comparisons_are_printed(capsys):
    """Each form with its time, and what it keeps."""
    assert parts.main(["--sizes", "2", "128", "2", "4", "512", "--repetitions", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kept = {line[2:32].strip(): float(line.split()[-3]) for line in lines if "kept" in line}
    assert set(kept) == {*parts.ATTENTION, *parts.DROPOUT, *parts.RELU}
    assert kept["fast.DropoutReLU"] < kept["ReLU, then dropout"]
