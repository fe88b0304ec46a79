"""Lesson 4: the rules of rel_shift_by_index and rel_shift: every row moves left by its own amount.

    pytest -k rel_shift      the rules of one exercise, in the order of this file

All rules except one ignore cells of the future, which are masked later: they are `...` here.
"""
import math

import pytest
import torch

from course import oracles
from course.compare import same, unchanged
from course.stand_ins import kind_of
from helpers import gradients

# T, m: one token, no memory, T = m, memory longer and shorter than a segment, K odd and even
SHAPES = [(3, 0), (2, 4), (1, 3), (1, 0), (5, 0), (2, 1), (3, 2), (2, 5), (5, 3), (3, 3), (4, 7)]


# ---- what both exercises must do ----------------------------------------------------------------
# Each number is 10 * query + distance; before the shift distances descend along every row.

def drawn():
    """Return the matrix at the top of the lesson, with T = 3 and m = 2."""
    return torch.tensor([[4, 3, 2, 1, 0],
                         [14, 13, 12, 11, 10],
                         [24, 23, 22, 21, 20]])


SHIFTED = [[2, 1, 0, ..., ...],
           [13, 12, 11, 10, ...],
           [24, 23, 22, 21, 20]]


def shifts(shift, T, m, batch=()):
    """Compare shifted (T, m + T) matrices of 100 * query + distance with the oracle's."""
    x = oracles.labeled(T, m)
    x = x + 10_000 * torch.arange(math.prod(batch)).reshape(*batch, 1, 1)
    return same(shift(x.clone()), oracles.shift(x), oracles.visible_entries(T, m))


def sends_gradients_back(shift):
    """Compare the gradients of x: each visible cell's goes to the cell that its value came from."""
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 0], [8, 9, 10, 11, 12]])
    return same(gradients((shift(x) * weight).sum(), [x])[0], [[[[0, 0, 1, 2, 3],
                                                                 [0, 4, 5, 6, 7],
                                                                 [8, 9, 10, 11, 12]]] * 2])


lengths = pytest.mark.parametrize("T, m", SHAPES)
batches = pytest.mark.parametrize("T, m, batch", [(3, 2, (2,)), (2, 5, (2, 3)), (3, 3, (1, 1))])


# ---- exercise rel_shift_by_index ----------------------------------------------------------------

def test_each_cell_gets_its_own_distance(rel_shift_by_index):
    """Row i moves left by T - 1 - i, so that cell (i, j) holds query i's own distance m + i - j."""
    assert same(rel_shift_by_index(drawn()), SHIFTED)


@lengths
def test_each_cell_at_other_lengths(rel_shift_by_index, T, m):
    """The same holds for any T and m: the result is (T, K), each row moved by its own amount."""
    assert shifts(rel_shift_by_index, T, m)


@pytest.mark.parametrize("T, m", [(3, 2), (4, 0)])
def test_future_cells_repeat_distance_0(rel_shift_by_index, T, m):
    """Where the column would be beyond the end, the future, the last one is used: distance 0."""
    x = oracles.labeled(T, m)
    wanted = oracles.shift(x).where(oracles.visible_entries(T, m), x[:, -1:])
    assert same(rel_shift_by_index(x.clone()), wanted)


@batches
def test_one_index_serves_lanes_and_heads(rel_shift_by_index, T, m, batch):
    """There may be any number of leading dimensions: each (T, K) matrix is shifted separately."""
    assert shifts(rel_shift_by_index, T, m, batch)


def test_the_gather_does_not_change_x(rel_shift_by_index):
    """x itself is not changed."""
    assert unchanged(rel_shift_by_index, drawn())


def test_the_gather_keeps_the_dtype(rel_shift_by_index):
    """The values keep their dtype and device: create the index with `device=x.device`."""
    assert kind_of(rel_shift_by_index, drawn().half()) == (torch.float16, "meta")


def test_the_gather_reads_a_transposed_x(rel_shift_by_index):
    """A transposed or expanded x is shifted like any other."""
    assert same(rel_shift_by_index(drawn().t().contiguous().t()), SHIFTED)


def test_gradients_go_back_through_the_gather(rel_shift_by_index):
    """The gradient of each visible cell goes back to the cell that its value came from."""
    assert sends_gradients_back(rel_shift_by_index)


# ---- exercise rel_shift -------------------------------------------------------------------------

def test_row_i_moves_left_by_T_minus_1_minus_i(rel_shift):
    """Row i moves left by T - 1 - i, so that cell (i, j) holds query i's own distance m + i - j."""
    x = torch.tensor([[4, 3, 2, 1, 0],
                      [14, 13, 12, 11, 10],
                      [24, 23, 22, 21, 20]])
    assert same(rel_shift(x), [[2, 1, 0, ..., ...],
                               [13, 12, 11, 10, ...],
                               [24, 23, 22, 21, 20]])


@lengths
def test_other_lengths(rel_shift, T, m):
    """The same holds for any T and m, without a memory (m = 0) or with a long one: T determines how
    far the rows move. The last query's row does not move, even if it is the only one."""
    assert shifts(rel_shift, T, m)


def test_values_keep_their_dtype(rel_shift):
    """The values keep their dtype and device (a pad made by torch.zeros is float32)."""
    assert kind_of(rel_shift, drawn().half()) == (torch.float16, "meta")


@batches
def test_lanes_and_heads(rel_shift, T, m, batch):
    """There may be any number of leading dimensions: each (T, K) matrix is shifted separately."""
    assert shifts(rel_shift, T, m, batch)


def test_x_is_not_changed(rel_shift):
    """x itself is not changed."""
    assert unchanged(rel_shift, drawn())


def test_rows_need_not_be_contiguous(rel_shift):
    """A transposed or expanded x is shifted like any other, whatever its order in memory."""
    assert same(rel_shift(drawn().t().contiguous().t()), SHIFTED)


def test_gradients_go_back(rel_shift):
    """The gradient of each visible cell goes back to the cell that its value came from."""
    assert sends_gradients_back(rel_shift)
