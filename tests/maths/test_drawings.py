"""Test the numbers that lessons draw in their docstrings: compute them with the lessons' code."""
import re
from importlib import import_module

import numpy as np
import torch
import torch.nn.functional as F

lesson_3, lesson_4, lesson = map(import_module, (
    "03_relative_attention", "04_rel_shift", "05_full_model"))
T, m, K = 3, 2, 5  # of all drawings


def cells(matrix, hidden):
    """Return the numbers of a matrix as text, with a dot where `hidden` is True."""
    return [["." if dot else f"{z:.0f}" for z, dot in zip(*rows)] for rows in zip(matrix, hidden)]


def test_the_four_steps_of_the_shift():
    """Lesson 4 draws q k_R^T, the pad, the rows of T and the result.  A dot is a pad cell."""
    drawn = [[row.split() for row in re.findall(r"\[([ .\d]+)\]", line)]
             for line in lesson_4.__doc__.splitlines() if re.search(r"\d\]", line)]
    x = torch.tensor([[10 * query + K - 1 - n for n in range(K)] for query in range(T)]) + 1
    padded = F.pad(x, (1, 0))  # 0 is a pad cell, since 1 was added to each element
    steps = [cells(z - 1, z == 0) for z in (
        x, padded, padded.reshape(K + 1, T), lesson_4.rel_shift(x))]
    first, second, third, fourth = zip(*drawn[:T])
    third += tuple(row for row, in drawn[T:])
    assert [list(step) for step in (first, second, third, fourth)] == steps


def tables(text):
    """Return the rows of a table of distances as lists of text, checking the index of each key."""
    rows = re.findall(r"query (\d), which is key (\d) +(\S.*)", text)
    assert [(int(i), int(j)) for i, j, _ in rows] == [(i, m + i) for i in range(T)]
    return [row.split() for *_, row in rows]


def test_the_distances_of_lesson_3():
    """With all weights 1, term (d) is R_d; here R_d is the distance d itself."""
    one, R = np.ones((1, 1)), np.arange(K)[:, None]
    terms = lesson_3.four_terms(np.ones((T, 1)), np.ones((K, 1)), R, one, one[0], one[0])
    assert tables(lesson_3.__doc__) == cells(terms[3], np.isnan(terms[3]))


def test_the_distances_of_lesson_5():
    """Left without same_length, right with it: lesson 4's shift of the distances, masked."""
    distance = lesson_4.rel_shift(torch.arange(K - 1, -1, -1).expand(T, K))
    left, right = (cells(distance, lesson.attention_mask(T, m, m, same_length))
                   for same_length in (False, True))
    assert tables(lesson.__doc__) == [a + b for a, b in zip(left, right)]
