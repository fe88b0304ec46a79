"""Sizes and tensors that once got through: each is refused where it is handed over, in one line.

    pytest tests/system/test_validate.py
"""
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from helpers import refusal
from training import presets

lesson_5 = import_module("05_full_model")
SMALL = lesson_5.Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)
X = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize("change, words", [
    ({"n_layer": "4"}, "n_layer must be of type int, got '4'"),
    ({"n_layer": True}, "n_layer must be of type int, got True"),
    ({"mem_len": -1}, "mem_len must be at least 0, got -1"),
    ({"dropout": 1.0}, "dropout must be in"),
    ({"cutoffs": torch.zeros(2, 2)}, "cutoffs must be of type tuple, got tensor"),
    ({"mem_len": 10**30}, f"mem_len must be at most {2**63 - 1}"),
    ({"cutoffs": (5, 5)}, "ascend"), ({"cutoffs": (0, 5)}, "above 0"),
    ({"cutoffs": (5, 11)}, "below the vocabulary size 11"),
    ({"div_val": 0}, "div_val must be at least 1"), ({"div_val": 2}, "so it needs cutoffs"),
    ({"cutoffs": (2, 5, 7), "div_val": 3}, "no width"),
], ids=lambda z: " ".join(z) if isinstance(z, dict) else "")
def test_a_configuration_of_other_types_or_sizes(change, words):
    """One line each, with the name and the value, before anything is allocated."""
    assert words in refusal(replace, SMALL, **change)


def test_numbers_of_numpy_are_numbers():
    """A vocabulary counted by NumPy is no mistake."""
    config = lesson_5.Config(
        np.int64(11), n_layer=1, d_model=8, dropout=np.float32(0.5), cutoffs=[3])
    assert presets.count_parameters(config) == presets.count_parameters(
        lesson_5.Config(11, n_layer=1, d_model=8, dropout=0.5, cutoffs=(3,)))


def test_a_billion_layers_are_counted_at_once():
    """A layer too many on the command line is no reason to wait."""
    one, two = (presets.count_parameters(replace(SMALL, n_layer=n, untie_r=True)) for n in (1, 2))
    found = presets.count_parameters(replace(SMALL, n_layer=10**9, untie_r=True))
    assert found == one + (10**9 - 1) * (two - one)
    for config in (SMALL, lesson_5.CONFIGS["tiny"]):
        model = lesson_5.TransformerXL(replace(config, n_layer=5))
        assert sum(p.numel() for p in model.parameters()) == presets.count_parameters(
            replace(config, n_layer=5))


@pytest.mark.parametrize("x, words", [
    ([[1, 2]], "got list"), (np.zeros((2, 4)), "got ndarray"), (X.to("meta"), "on meta"),
    ("x", "got str")], ids=["list", "NumPy", "meta", "text"])
def test_what_is_no_tensor_of_the_models_device(x, words):
    """As tokens and as targets."""
    model = lesson_5.TransformerXL(SMALL)
    for arguments in (x,), (X, None, x):
        message = refusal(model, *arguments)
        assert message.startswith("x and y must be ") and words in message


@pytest.mark.parametrize("change", [
    torch.Tensor.double, lambda z: None, lambda z: z.to("meta"), lambda z: z[0],
], ids=["float64", "None", "meta", "2-D"])
def test_a_memory_of_other_types(change):
    """One layer is enough; the message says what is wanted and what came."""
    model = lesson_5.TransformerXL(SMALL)
    memory = model(X)[1]
    memory[1] = change(memory[1])
    message = refusal(model, X, memory)
    assert message.startswith("memory must be (B, m, D) = (2, m, 8)") and "got" in message
