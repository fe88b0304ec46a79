"""Lesson 4: every row moves left by its own amount, and the score is that of lesson 3.

    pytest -k rel_shift_by_index      the rules of one exercise, in the order of this file
    pytest -k rel_shift
    pytest tests/test_04_rel_shift.py

A test that takes an exercise by its name is one of its rules; what follows below is about the whole
lesson.  Cells of the future are never compared, because the causal mask hides them: `...` stands
for them.
"""
import math
from importlib import import_module

import pytest
import torch

from course import oracles
from course.rules import same
from helpers import assert_close, gradients, run_examples, visible

lesson_3, lesson = import_module("03_relative_attention"), import_module("04_rel_shift")

# T, m: one token, no memory, T = m, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (5, 0), (2, 1), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6), (4, 7)]


# ---- what both exercises must do ----------------------------------------------------------------
# Each number is 10 * query + distance; before the shift distances descend along every row.

def drawn():
    """The matrix at the top of the lesson: T = 3, m = 2."""
    return torch.tensor([[4, 3, 2, 1, 0],
                         [14, 13, 12, 11, 10],
                         [24, 23, 22, 21, 20]])


SHIFTED = [[2, 1, 0, ..., ...],
           [13, 12, 11, 10, ...],
           [24, 23, 22, 21, 20]]


def shifts(shift, T, m, batch=()):
    """Is each (T, m + T) matrix shifted, whose numbers are 100 * query + distance?"""
    x = oracles.labelled(T, m)
    x = x + 10_000 * torch.arange(math.prod(batch)).reshape(*batch, 1, 1)
    return same(shift(x.clone()), oracles.shift(x), visible(T, m))


def leaves_alone(shift):
    """Is x after the call what it was before?"""
    x = drawn()
    shift(x)
    return same(x, drawn())


def shifts_what_is_transposed(shift):
    """Is an x shifted whose rows do not stand one after the other in memory?"""
    return same(shift(drawn().t().contiguous().t()), SHIFTED)


def sends_gradients_back(shift):
    """Does the gradient of each visible cell come to the cell that its number was taken from?"""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 0], [8, 9, 10, 11, 12]])
    return same(gradients((shift(x) * weight).sum(), [x])[0], [[0, 0, 1, 2, 3],
                                                               [0, 4, 5, 6, 7],
                                                               [8, 9, 10, 11, 12]])


lengths = pytest.mark.parametrize("T, m", SHAPES)
batches = pytest.mark.parametrize("T, m, batch", [(3, 2, (2,)), (2, 5, (2, 3)), (5, 1, (2, 3))])


# ---- exercise rel_shift_by_index ----------------------------------------------------------------

def test_each_cell_gets_its_own_distance(rel_shift_by_index):
    """Row i moves left by T - 1 - i, so that cell (i, j) holds query i's own distance m + i - j."""
    assert same(rel_shift_by_index(drawn()), SHIFTED)


@lengths
def test_each_cell_at_other_lengths(rel_shift_by_index, T, m):
    """The same for any T and m: the result is (T, K), each row moved by its own amount."""
    assert shifts(rel_shift_by_index, T, m)


@pytest.mark.parametrize("T, m", [(3, 2), (4, 0)])
def test_future_cells_repeat_distance_0(rel_shift_by_index, T, m):
    """Where the column would lie beyond the end (the future) stands the last one, distance 0."""
    x = oracles.labelled(T, m)
    wanted = oracles.shift(x).where(visible(T, m), x[:, -1:])
    assert same(rel_shift_by_index(x.clone()), wanted)


@batches
def test_one_index_serves_lanes_and_heads(rel_shift_by_index, T, m, batch):
    """Any number of leading dimensions may come first: each (T, K) matrix is shifted by itself."""
    assert shifts(rel_shift_by_index, T, m, batch)


def test_the_gather_leaves_x_alone(rel_shift_by_index):
    """x itself is not changed."""
    assert leaves_alone(rel_shift_by_index)


def test_the_gather_keeps_the_dtype(rel_shift_by_index):
    """The numbers are gathered and keep their dtype."""
    assert rel_shift_by_index(drawn().half()).dtype == torch.float16


def test_the_gather_reads_a_transposed_x(rel_shift_by_index):
    """An x that was transposed or expanded is shifted like any other."""
    assert shifts_what_is_transposed(rel_shift_by_index)


def test_gradients_go_back_through_the_gather(rel_shift_by_index):
    """The gradient of each visible cell goes back to the cell that its number came from."""
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


def test_without_memory(rel_shift):
    """Without a memory, query 0 sees itself alone: its distance 0 moves to column 0."""
    x = torch.tensor([[2, 1, 0],
                      [12, 11, 10],
                      [22, 21, 20]])
    assert same(rel_shift(x), [[0, ..., ...],
                               [11, 10, ...],
                               [22, 21, 20]])


def test_memory_longer_than_the_segment(rel_shift):
    """Rows move by what T says, however long the memory is."""
    x = torch.tensor([[5, 4, 3, 2, 1, 0],
                      [15, 14, 13, 12, 11, 10]])
    assert same(rel_shift(x), [[4, 3, 2, 1, 0, ...],
                               [15, 14, 13, 12, 11, 10]])


def test_a_single_query(rel_shift):
    """The last query's row stays where it is, also if it is the only one."""
    assert same(rel_shift(torch.tensor([[3, 2, 1, 0]])), [[3, 2, 1, 0]])


@lengths
def test_other_lengths(rel_shift, T, m):
    """The same for any T and m: the result is (T, K), each row moved by its own amount."""
    assert shifts(rel_shift, T, m)


def test_numbers_keep_their_dtype(rel_shift):
    """The numbers are moved and keep their dtype (a pad made by torch.zeros is float32)."""
    assert rel_shift(drawn().half()).dtype == torch.float16


@batches
def test_lanes_and_heads(rel_shift, T, m, batch):
    """Any number of leading dimensions may come first: each (T, K) matrix is shifted by itself."""
    assert shifts(rel_shift, T, m, batch)


def test_x_stays_as_it_was(rel_shift):
    """x itself is not changed."""
    assert leaves_alone(rel_shift)


def test_rows_need_not_stand_one_after_the_other(rel_shift):
    """An x that was transposed or expanded is shifted like any other: the numbers count, not where
    they stand in memory."""
    assert shifts_what_is_transposed(rel_shift)


def test_gradient_goes_back(rel_shift):
    """The gradient of each visible cell goes back to the cell that its number came from."""
    assert sends_gradients_back(rel_shift)


# ---- beyond the exercises: the score -------------------------------------------------------------

def test_the_loops_follow_the_entry_rule():
    """rel_shift_loops, the lesson's first form, is the rule of appendix B; future cells are 0."""
    x = torch.randn(2, 3, 5)
    found, future = lesson.rel_shift_loops(x), ~visible(3, 2)
    assert found[..., ~future].equal(oracles.shift(x)[..., ~future])
    assert (found[..., future] == 0).all()


def leaves_for(T, m, B=2, H=3, C=4, D=6):
    """Random q, k, R, W_kR, u, v.  R is random as well: no symmetry of a sinusoid can help."""
    shapes = ((B, H, T, C), (B, H, m + T, C), (m + T, D), (H, C, D), (H, C), (H, C))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def fast_score(q, k, R, W_kR, u, v):
    return lesson.relative_score(q, k, lesson.projected_distances(R.flip(0), W_kR), u, v)


def kept_for_backward(function):
    """MiB that autograd keeps between the two passes; a storage that is kept twice counts once."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = function()  # holds the graph, so that no storage is given to another tensor
    del kept
    return sum(sizes.values()) / 2**20


@pytest.mark.parametrize("T, m", SHAPES)
def test_distances_are_projected_one_by_one(T, m):
    """Row n of k_R is W_kR times row n of R, for each head: the order is that of R."""
    _, _, R, W_kR, _, _ = leaves_for(T, m)
    wanted = torch.stack([torch.stack([W_kR[h] @ row for row in R]) for h in range(3)])
    assert_close(lesson.projected_distances(R, W_kR), wanted, "k_R against its definition")


@pytest.mark.parametrize("T, m", SHAPES)
def test_score_equals_the_formula_forward_and_gradient(T, m):
    """All four terms, not scaled, on the visible cells; gradients into all six inputs."""
    leaves = leaves_for(T, m)
    found = fast_score(*leaves)
    assert found.shape == (2, 3, T, m + T)
    wanted = oracles.terms_by_distance(*leaves).sum(0)
    found, wanted = (z[..., visible(T, m)] for z in (found, wanted))
    assert_close(found, wanted, "score against section 3.3")
    for name, a, b in zip(("q", "k", "R", "W_kR", "u", "v"),
                          gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}")


@pytest.mark.parametrize("B, H, C, D", [(2, 3, 4, 6), (1, 2, 5, 8), (3, 1, 2, 4)])
@pytest.mark.parametrize("T, m", SHAPES)
def test_score_equals_lesson_3_forward_and_gradient(T, m, B, H, C, D):
    """The trick changes the price and nothing else: K projections in place of T * K."""
    leaves, seen = leaves_for(T, m, B, H, C, D), visible(T, m)
    fast = fast_score(*leaves)[..., seen]
    slow = lesson_3.four_terms_all_pairs(*leaves).sum(0)[..., seen]
    assert fast.shape[-1] == T * m + T * (T + 1) // 2
    assert_close(fast, slow, "score against lesson 3")
    for name, a, b in zip(("q", "k", "R", "W_kR", "u", "v"),
                          gradients(fast, leaves), gradients(slow, leaves)):
        assert_close(a, b, f"gradient into {name} against lesson 3")


@pytest.mark.parametrize("T, m", SHAPES)
def test_behind_the_mask_the_probabilities_are_those_of_lesson_3(T, m):
    """Leftovers are harmless: masked and scaled, each row sums to 1 over the same visible keys."""
    leaves, mask = leaves_for(T, m), ~visible(T, m)
    fast, slow = ((score / math.sqrt(4)).masked_fill(mask, -math.inf).softmax(-1) for score in (
        fast_score(*leaves), lesson_3.four_terms_all_pairs(*leaves).sum(0)))
    assert_close(fast, slow, "probabilities")
    assert (fast[..., mask] == 0).all()


@pytest.mark.parametrize("T, m", SHAPES)
def test_term_d_is_one_vector_seen_through_T_shifts(T, m):
    """v . (W_kR R_distance) has no query in it: each row is the row below, moved left by one."""
    q, k, R, W_kR, u, v = leaves_for(T, m)
    score = fast_score(0 * q, 0 * k, R, W_kR, 0 * u, v)  # all other terms are 0
    for i, j in visible(T, m).nonzero().tolist():
        wanted = torch.stack([v[h] @ (W_kR[h] @ R[m + i - j]) for h in range(3)])
        assert_close(score[0, :, i, j], wanted, f"term (d) at query {i}, key {j}")
        if i + 1 < T:
            assert_close(score[0, :, i, j], score[0, :, i + 1, j + 1], "row i against row i + 1")


# ---- what the lesson measures -------------------------------------------------------------------

def test_example_has_the_shapes_of_lesson_3():
    """q, k, R, W_kR, u, v; R is the sinusoid by descending distance."""
    B, H, T, m, C, D = 2, 3, 5, 2, 4, 6
    found = lesson.example(B, H, T, m, C, D)
    assert [tuple(z.shape) for z in found] == [
        (B, H, T, C), (B, H, m + T, C), (m + T, D), (H, C, D), (H, C), (H, C)]
    assert_close(found[2], oracles.unit_circle(range(m + T)[::-1], D), "R")


def test_the_lesson_prints_that_the_shifts_agree(monkeypatch, capsys):
    """All shapes to the bit, and scores up to rounding; without the shift both lines show it."""
    lesson.show_equalities()
    same, score = capsys.readouterr().out.splitlines()
    assert same.endswith("to the bit: 16 of 16 shapes") and float(score.split()[-1]) < 1e-12
    monkeypatch.setattr(lesson, "rel_shift", lambda x: x)
    lesson.show_equalities()
    same, score = capsys.readouterr().out.splitlines()
    assert same.endswith("to the bit: 4 of 16 shapes") and float(score.split()[-1]) > 0.1


def test_the_lesson_prints_the_leftovers_in_brackets(our_own, capsys):
    """The drawing at the top of the lesson, and the cells under the mask."""
    lesson.show_leftovers()
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:4]] == [
        ["2", "1", "0", "[", "0]", "[14]"], ["13", "12", "11", "10", "[", "0]"],
        ["24", "23", "22", "21", "20"]]


def test_shift_keeps_a_row_for_each_distance_and_not_for_each_pair():
    """Training memory: T * K * D numbers and more in lesson 3, a tenth of it and less here."""
    kept = {}
    for T in (32, 64):
        leaves = [z.requires_grad_() for z in lesson.example(1, 2, T, T, 16, 64, torch.float32)]
        slow = kept_for_backward(lambda: lesson.score_by_pairs(*leaves))
        fast = kept_for_backward(lambda: lesson.score_by_shift(*leaves))
        assert slow * 2**20 >= T * 2 * T * 64 * 4, "lesson 3 spells R out for every pair"
        kept[T] = slow, fast
    assert kept[64][0] > 3.5 * kept[32][0], "every pair: quadratic in T"
    assert kept[64][1] < kept[64][0] / 10 and kept[32][1] < kept[32][0] / 10


def test_milliseconds_is_the_fastest_after_a_first_call(monkeypatch):
    """Six calls, the first one warms up; calls that are disturbed do not count."""
    seconds = iter([0, 0.0001, 10, 10.001, 20, 20.003, 30, 30.002, 40, 47, 50, 50.002])
    monkeypatch.setattr(lesson.time, "perf_counter", seconds.__next__)
    x = torch.ones(3, requires_grad=True)
    assert lesson.milliseconds(lambda z: z * 2, [x]) == pytest.approx(1)
    assert x.grad.tolist() == [12, 12, 12], "the backward pass is measured, too"


# ---- the lesson as a whole ----------------------------------------------------------------------

def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)
