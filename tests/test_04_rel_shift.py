"""Lesson 4: every row moves left by its own amount, and the score is that of lesson 3.

    pytest tests/test_04_rel_shift.py

The oracle is the entry rule of appendix B, B[i, j] = x[i, j + T - 1 - i] for j <= M + i, cell by
cell.  Cells with j > M + i are never compared, because the causal mask hides them.
"""
import math
import re
from importlib import import_module

import pytest
import torch

from course.checks import unit_circle
from helpers import assert_close, gradients, run_examples, terms_by_distance, visible

lesson_3, lesson = import_module("03_relative_attention"), import_module("04_rel_shift")

# T, M: one token, no memory, T = M, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (5, 0), (2, 1), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6), (4, 7)]


# ---- helpers ------------------------------------------------------------------------------------

def by_the_rule(x):
    """The visible cells, in reading order, of x (..., T, K) shifted: (..., cells)."""
    T, K = x.shape[-2:]
    return torch.stack([x[..., i, j + T - 1 - i]
                        for i in range(T) for j in range(K - T + i + 1)], dim=-1)


def distances(T, M):
    """The worked example of the lesson: 100 * query + distance, distances descending, unshifted."""
    return torch.tensor([[100 * i + M + T - 1 - j for j in range(M + T)] for i in range(T)])


def leaves_for(T, M, B=2, H=3, C=4, D=6):
    """Random q, k, R, W_kR, u, v.  R is random as well: no symmetry of a sinusoid can help."""
    shapes = ((B, H, T, C), (B, H, M + T, C), (M + T, D), (H, C, D), (H, C), (H, C))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def fast_score(q, k, R, W_kR, u, v):
    return lesson.relative_score(q, k, lesson.projected_distances(R, W_kR), u, v)


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


# ---- the shift ----------------------------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES)
@pytest.mark.parametrize("name", ["rel_shift_loops", "rel_shift_by_index", "rel_shift"])
def test_shift_puts_each_distance_where_it_belongs(name, T, M):
    """Row i moves left by T - 1 - i, so that cell (i, j) holds query i's own distance M + i - j."""
    x = distances(T, M)
    shifted = getattr(lesson, name)(x)
    assert shifted.shape == (T, M + T)
    wanted = [100 * i + M + i - j for i, j in visible(T, M).nonzero().tolist()]
    assert shifted[visible(T, M)].tolist() == wanted, (
        f"{name}: for x =\n{x}\nthe result is\n{shifted}")


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("T, M", SHAPES)
@pytest.mark.parametrize("name", ["rel_shift_loops", "rel_shift_by_index", "rel_shift"])
def test_shift_only_moves_numbers(name, T, M, batch):
    """To the bit, for lanes and heads alike; the argument stays as it was."""
    x = torch.randn(*batch, T, M + T)
    copy = x.clone()
    found = getattr(lesson, name)(x)
    assert found.shape == x.shape
    assert found[..., visible(T, M)].equal(by_the_rule(x))
    assert x.equal(copy)


@pytest.mark.parametrize("T, M", SHAPES)
@pytest.mark.parametrize("name", ["rel_shift_loops", "rel_shift_by_index", "rel_shift"])
def test_gradient_moves_back_to_where_each_number_came_from(name, T, M):
    """x[i, c] gets the gradient of cell j = c - (T - 1 - i), and 0 if the shift drops it."""
    K = M + T
    x = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(T, K, dtype=torch.float64) * visible(T, M)
    found, = torch.autograd.grad((getattr(lesson, name)(x) * weight).sum(), x)
    wanted = torch.zeros(T, K, dtype=torch.float64)
    for i in range(T):
        for c in range(T - 1 - i, K):
            wanted[i, c] = weight[i, c - (T - 1 - i)]
    assert found.equal(wanted)


@pytest.mark.parametrize("name", ["rel_shift_loops", "rel_shift_by_index", "rel_shift"])
def test_shift_takes_views_of_any_layout(name):
    """Expanded and transposed tensors have no rows one behind the other in storage."""
    T, M = 3, 2
    shared = torch.randn(2, 1, M + T).expand(2, T, M + T)
    turned = torch.randn(2, M + T, T).transpose(1, 2)
    for x in (shared, turned):
        assert getattr(lesson, name)(x)[..., visible(T, M)].equal(by_the_rule(x))


@pytest.mark.parametrize("T, M", SHAPES)
def test_slow_shifts_say_what_stands_in_future_cells(T, M):
    """0 in the loops, distance 0 once more in the gather; in the fast one, whatever is left."""
    x = torch.randn(2, T, M + T) + 10
    future = ~visible(T, M)
    assert (lesson.rel_shift_loops(x)[:, future] == 0).all()
    rows = [i for i, _ in future.nonzero().tolist()]
    assert lesson.rel_shift_by_index(x)[:, future].equal(x[:, rows, -1])


# ---- the score ----------------------------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES)
def test_projected_distances_descend(T, M):
    """Q_k = W_kR R_(K-1-k): all K = M + T distances, the largest first, for each head."""
    _, _, R, W_kR, _, _ = leaves_for(T, M)
    K = M + T
    wanted = torch.stack([torch.stack([W_kR[h] @ R[K - 1 - n] for n in range(K)])
                          for h in range(3)])
    found = lesson.projected_distances(R, W_kR)
    ascending = found.shape == wanted.shape and K > 1 and found.allclose(wanted.flip(1))
    assert not ascending, "Q ascends, the shift needs descending distances"
    assert_close(found, wanted, "Q against its definition")


@pytest.mark.parametrize("T, M", SHAPES)
def test_score_equals_the_formula_forward_and_gradient(T, M):
    """All four terms, not scaled, on the visible cells; gradients into all six inputs."""
    leaves = leaves_for(T, M)
    found = fast_score(*leaves)
    assert found.shape == (2, 3, T, M + T)
    found, wanted = (z[..., visible(T, M)] for z in (found, terms_by_distance(*leaves).sum(0)))
    assert_close(found, wanted, "score against section 3.3")
    for name, a, b in zip(("q", "k", "R", "W_kR", "u", "v"),
                          gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}")


@pytest.mark.parametrize("B, H, C, D", [(2, 3, 4, 6), (1, 2, 5, 8), (3, 1, 2, 4)])
@pytest.mark.parametrize("T, M", SHAPES)
def test_score_equals_lesson_3_forward_and_gradient(T, M, B, H, C, D):
    """The trick changes the price and nothing else: K projections in place of T * K."""
    leaves, seen = leaves_for(T, M, B, H, C, D), visible(T, M)
    fast = fast_score(*leaves)[..., seen]
    slow = lesson_3.four_terms_all_pairs(*leaves).sum(0)[..., seen]
    assert fast.shape[-1] == T * M + T * (T + 1) // 2
    assert_close(fast, slow, "score against lesson 3")
    for name, a, b in zip(("q", "k", "R", "W_kR", "u", "v"),
                          gradients(fast, leaves), gradients(slow, leaves)):
        assert_close(a, b, f"gradient into {name} against lesson 3")


@pytest.mark.parametrize("T, M", SHAPES)
def test_behind_the_mask_the_probabilities_are_those_of_lesson_3(T, M):
    """Leftovers are harmless: masked and scaled, each row sums to 1 over the same visible keys."""
    leaves, hidden = leaves_for(T, M), ~visible(T, M)
    fast, slow = ((score / math.sqrt(4)).masked_fill(hidden, -math.inf).softmax(-1) for score in (
        fast_score(*leaves), lesson_3.four_terms_all_pairs(*leaves).sum(0)))
    assert_close(fast, slow, "probabilities")
    assert (fast[..., hidden] == 0).all()


@pytest.mark.parametrize("T, M", SHAPES)
def test_term_d_is_one_vector_seen_through_T_shifts(T, M):
    """v . (W_kR R_distance) has no query in it: each row is the row below, moved left by one."""
    _, _, R, W_kR, _, v = leaves_for(T, M)
    found = lesson.term_d(v, lesson.projected_distances(R, W_kR), T)
    assert found.shape == (3, T, M + T)
    for i, j in visible(T, M).nonzero().tolist():
        wanted = torch.stack([v[h] @ (W_kR[h] @ R[M + i - j]) for h in range(3)])
        assert_close(found[:, i, j], wanted, f"term (d) at query {i}, key {j}")
        if i + 1 < T:
            assert_close(found[:, i, j], found[:, i + 1, j + 1], "row i against row i + 1")


# ---- what the lesson measures -------------------------------------------------------------------

def test_example_has_the_shapes_of_lesson_3():
    """q, k, R, W_kR, u, v; R is the sinusoid by ascending distance."""
    B, H, T, M, C, D = 2, 3, 5, 2, 4, 6
    found = lesson.example(B, H, T, M, C, D)
    assert [tuple(z.shape) for z in found] == [
        (B, H, T, C), (B, H, M + T, C), (M + T, D), (H, C, D), (H, C), (H, C)]
    assert_close(found[2], unit_circle(range(M + T), D), "R")


@pytest.mark.parametrize("T, M", SHAPES)
def test_difference_is_rounding(T, M):
    """What main prints, shape by shape: forward and gradient against lesson 3."""
    forward, backward = lesson.difference(T, M)
    assert forward < 1e-12 and backward < 1e-12


def test_difference_would_see_a_wrong_shift(monkeypatch):
    """The measurement is worth something: without the shift it is large, both ways."""
    monkeypatch.setattr(lesson, "rel_shift", lambda x: x)
    forward, backward = lesson.difference(3, 2)
    assert forward > 0.1 and backward > 0.1


def test_shift_keeps_a_row_for_each_distance_and_not_for_each_pair():
    """Training memory: T * K * D numbers and more in lesson 3, a tenth of it and less here."""
    kept = {}
    for T in (32, 64):
        leaves = [z.requires_grad_() for z in lesson.example(1, 2, T, T, 16, 64, torch.float32)]
        slow = kept_for_backward(lambda: lesson_3.four_terms_all_pairs(*leaves))
        fast = kept_for_backward(lambda: fast_score(*leaves))
        assert slow * 2**20 >= T * 2 * T * 64 * 4, "lesson 3 spells R out for every pair"
        kept[T] = slow, fast
    assert kept[64][0] > 3.5 * kept[32][0], "every pair: quadratic in T"
    assert kept[64][1] < kept[64][0] / 10 and kept[32][1] < kept[32][0] / 10


def test_milliseconds_is_a_median_after_a_first_call(monkeypatch):
    """Six calls, the first one warms up; one call that is disturbed does not count."""
    seconds = iter([0, 9, 10, 10.001, 20, 20.003, 30, 30.002, 40, 47, 50, 50.002])
    monkeypatch.setattr(lesson.time, "perf_counter", seconds.__next__)
    x = torch.ones(3, requires_grad=True)
    assert lesson.milliseconds(lambda: x * 2) == pytest.approx(2)
    assert x.grad.tolist() == [12, 12, 12], "the backward pass is measured, too"


# ---- the lesson as a whole ----------------------------------------------------------------------

def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)


@pytest.mark.slow
def test_main_shows_equal_scores_at_another_price(monkeypatch, tmp_path, capsys):
    """The three shifts agree to the bit, the leftovers stand under the mask, all else is equal."""
    monkeypatch.setattr(lesson, "RUNS", tmp_path / "runs")
    lesson.main()
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "04_price.png").stat().st_size > 0
    assert "leftovers, cells [(0, 3), (0, 4), (1, 4)]" in out
    assert "to the bit: 16 of 16 shapes" in out
    scores, slopes = map(float, re.search(r"scores (\S+), gradients (\S+)", out).groups())
    assert scores < 1e-12 and slopes < 1e-12
    assert "row 0 is row 2 moved by 2, difference 0\n" in out
    smaller = [int(times) for times in re.findall(r"faster, +(\d+) times smaller", out)]
    assert smaller == sorted(smaller) and len(set(smaller)) == 4, "the gap grows with T"
