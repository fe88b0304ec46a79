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
    return [["." if dot else f"{number:.0f}" for number, dot in zip(*rows)]
            for rows in zip(matrix, hidden)]


def test_the_four_steps_of_the_shift(needs_shipped_solutions):
    """Lesson 4 draws q k_R^T, the pad, the rows of T and the result.  A dot is a pad cell."""
    drawn = [[row.split() for row in re.findall(r"\[([ .\d]+)\]", line)]
             for line in lesson_4.__doc__.splitlines() if re.search(r"\d\]", line)]
    columns = [list(column) for column in zip(*drawn[:T])]
    columns[2] += [row for row, in drawn[T:]]  # the only one with more rows
    x = torch.tensor([[10 * query + K - 1 - n for n in range(K)] for query in range(T)]) + 1
    padded = F.pad(x, (1, 0))  # 0 is a pad cell, since 1 was added to each element
    steps = x, padded, padded.reshape(K + 1, T), lesson_4.rel_shift(x)
    assert columns == [cells(step - 1, step == 0) for step in steps]


def test_the_tables_of_distances():
    """Lesson 3's term (d) is the distance if R_d is d.  Lesson 5 masks lesson 4's shift of it."""
    one, R = np.ones((1, 1)), np.arange(K)[:, None]
    terms = lesson_3.four_terms(np.ones((T, 1)), np.ones((K, 1)), R, one, one[0], one[0])
    distance = lesson_4.rel_shift(torch.arange(K - 1, -1, -1).expand(T, K))
    pair = [cells(distance, lesson.attention_mask(T, m, m, on)) for on in (False, True)]
    for text, wanted in ((lesson_3.__doc__, cells(terms[3], np.isnan(terms[3]))),
                         (lesson.__doc__, [left + right for left, right in zip(*pair)])):
        rows = re.findall(r"query (\d), which is key (\d) +(\S.*)", text)
        assert [[i, j, *row.split()] for i, j, row in rows] == [
            [str(i), str(m + i), *row] for i, row in enumerate(wanted)]
