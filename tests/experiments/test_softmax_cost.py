"""What is measured of the two softmaxes: parameters, and the largest activation with a row a token.

    pytest tests/experiments/test_softmax_cost.py
"""
import math
from importlib import import_module

import torch

softmax_cost, lesson_5 = import_module("softmax_cost"), import_module("05_full_model")


def test_the_largest_tensor_with_a_row_a_token():
    """Larger ones without such a row do not count."""
    with softmax_cost.Largest(5) as largest:
        torch.ones(5, 7) @ torch.ones(7, 11)
        torch.ones(1000)
    assert largest.shape == (5, 11)


def test_the_adaptive_softmax_builds_no_row_of_all_words():
    """T = 6, V = 500: the full one has the logits of every token at once."""
    found = {}
    for cutoffs in ((), (20, 100)):
        config = lesson_5.Config(500, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8, mem_len=6,
                                 cutoffs=cutoffs)
        parameters, peak, seconds, found[cutoffs] = softmax_cost.measure(config)
        assert parameters == lesson_5.count_parameters(config) and peak > 0 < seconds
    assert math.prod(found[()]) == 6 * 500 > 2 * math.prod(found[20, 100])
