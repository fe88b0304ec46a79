"""Lesson 3: the rules of four_terms, with different vectors in each term.

    pytest -k four_terms      in the order of this file
"""
from math import nan

import numpy as np
import pytest

from course import oracles
from course.compare import same, unchanged


# ---- exercise four_terms ------------------------------------------------------------------------

def example(four_terms):
    """Call four_terms for two queries, 1 and 10, after four keys of memory; all widths are 1."""
    q, k = np.array([[1.0], [10.0]]), np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    R = np.array([[5.0], [6.0], [7.0], [8.0], [9.0], [10.0]])
    W_kR, u, v = np.array([[2.0]]), np.array([100.0]), np.array([1000.0])
    return four_terms(q, k, R, W_kR, u, v)  # W_kR R_d is 10, 12, ... 20 for distance 0, 1, ... 5


def test_future_cells_are_nan(four_terms):
    """The result is an array (4, T, K) that is NaN where key j comes after query i, which is key m
    + i: such a key has no distance. All other cells have a value."""
    terms = example(four_terms)
    is_nan = np.isnan(terms) if isinstance(terms, np.ndarray) else terms
    assert same(is_nan, np.array([[[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]] * 4))


@pytest.mark.parametrize("term, wanted", [
    ("a", [[1, 2, 3, 4, 5, nan], [10, 20, 30, 40, 50, 60]]),
    ("b", [[18, 16, 14, 12, 10, nan], [200, 180, 160, 140, 120, 100]]),
    ("c", [[100, 200, 300, 400, 500, nan], [100, 200, 300, 400, 500, 600]]),
    ("d", [[18000, 16000, 14000, 12000, 10000, nan], [20000, 18000, 16000, 14000, 12000, 10000]])])
def test_the_four_terms(four_terms, term, wanted):
    """(a) is q_i . k_j, (b) is q_i . (W_kR R_d), (c) is u . k_j, without a query, and (d) is v .
    (W_kR R_d); d is how far back key j is, m + i - j."""
    assert same(example(four_terms)["abcd".index(term)], np.array(wanted))


@pytest.mark.parametrize("term, wanted", [(0, 11), (1, 39), (2, 43), (3, 30)])
def test_products_are_sums_over_the_width(four_terms, term, wanted):
    """Each term is a sum over the width of a head, C, and is not divided by anything."""
    q, k, u, v = np.array([[1.0, 2]]), np.array([[3.0, 4]]), np.array([5.0, 7]), np.array([2.0, 1])
    R, W_kR = np.array([[1.0, 0, 2]]), np.array([[1.0, 2, 3], [4, 5, 6]])  # W_kR R_0 is (7, 16)
    assert same(four_terms(q, k, R, W_kR, u, v)[term, 0, 0], wanted, tolerance=1e-4)


@pytest.mark.parametrize("T, m", [
    (1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6)])  # T < m, T = m, T > m
def test_other_sizes(four_terms, T, m):
    """The same holds for any T and m, for C = 4 and R of width D = 6. The result is float64."""
    wanted = oracles.terms_of_one_head(*numbers(T, m))
    assert same(four_terms(*numbers(T, m)), wanted, tolerance=1e-9)


def test_arguments_are_not_changed(four_terms):
    """No argument is changed: R, for example, is needed again."""
    assert unchanged(four_terms, *numbers(3, 2))


def numbers(T, m, C=4, D=6):
    """q, k, R, W_kR, u, v for one head; the same numbers at each call."""
    draw = np.random.default_rng(T + 10 * m)
    shapes = (T, C), (m + T, C), (m + T, D), (C, D), (C,), (C,)
    return [draw.integers(-30, 31, shape) / 10 for shape in shapes]
