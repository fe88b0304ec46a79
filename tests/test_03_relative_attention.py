"""Lesson 3: the four terms, each with its own vectors, and a model that knows only distances.

    pytest -k four_terms      the rules of the exercise, in the order in which they stand here
    pytest tests/test_03_relative_attention.py

A test that takes `four_terms` is one of its rules; what follows below is about the whole lesson.
"""
import math
import re
from importlib import import_module
from math import nan

import numpy as np
import pytest
import torch
import torch.nn as nn

from course import oracles, stand_ins
from course.rules import replaced, same
from helpers import assert_close, gradients, in_segments, randomized, visible

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
lesson = import_module("03_relative_attention")

# T, M: one token, no memory, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6)]


# ---- exercise four_terms ------------------------------------------------------------------------

def example(four_terms):
    """Two queries, 1 and 10, after four keys of memory: all is of width 1, to be read off."""
    q, k = np.array([[1.0], [10.0]]), np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    R = np.array([[5.0], [6.0], [7.0], [8.0], [9.0], [10.0]])
    W_kR, u, v = np.array([[2.0]]), np.array([100.0]), np.array([1000.0])
    return four_terms(q, k, R, W_kR, u, v)  # W_kR R_d is 10, 12, ... 20 for distance 0, 1, ... 5


def test_nan_stands_in_the_future(four_terms):
    """The result is an array (4, T, K), with NaN where key j comes after query i, which is key
    m + i: such a key has no distance.  All other cells are filled."""
    terms = example(four_terms)
    is_nan = np.isnan(terms) if isinstance(terms, np.ndarray) else terms
    assert same(is_nan, np.array([[[0, 0, 0, 0, 0, 1],
                                   [0, 0, 0, 0, 0, 0]]] * 4))


def test_term_a_is_query_times_key(four_terms):
    """(a) is q_i . k_j: does key j fit this query?"""
    assert same(example(four_terms)[0], np.array([[1, 2, 3, 4, 5, nan],
                                                  [10, 20, 30, 40, 50, 60]]))


def test_term_b_is_query_times_distance(four_terms):
    """(b) is q_i . (W_kR R_d), where d is how far back key j is: m + i - j."""
    assert same(example(four_terms)[1], np.array([[18, 16, 14, 12, 10, nan],
                                                  [200, 180, 160, 140, 120, 100]]))


def test_term_c_is_u_times_key(four_terms):
    """(c) is u . k_j: no query is in it, u takes its place."""
    assert same(example(four_terms)[2], np.array([[100, 200, 300, 400, 500, nan],
                                                  [100, 200, 300, 400, 500, 600]]))


def test_term_d_is_v_times_distance(four_terms):
    """(d) is v . (W_kR R_d), where d is how far back key j is: m + i - j."""
    assert same(example(four_terms)[3], np.array([[18000, 16000, 14000, 12000, 10000, nan],
                                                  [20000, 18000, 16000, 14000, 12000, 10000]]))


@pytest.mark.parametrize("term, wanted", [(0, 11), (1, 39), (2, 43), (3, 30)])
def test_products_are_sums_over_the_width(four_terms, term, wanted):
    """Each term is a sum over the width of a head, C, and is not divided by anything."""
    q, k, u, v = np.array([[1.0, 2]]), np.array([[3.0, 4]]), np.array([5.0, 7]), np.array([2.0, 1])
    R, W_kR = np.array([[1.0, 0, 2]]), np.array([[1.0, 2, 3], [4, 5, 6]])  # W_kR R_0 is (7, 16)
    assert same(four_terms(q, k, R, W_kR, u, v)[term, 0, 0], wanted, tolerance=1e-4)


@pytest.mark.parametrize("T, m", SHAPES)
def test_other_sizes(four_terms, T, m):
    """The same for any T and m, and for a head of width C = 4 and R of width D = 6."""
    wanted = oracles.terms_of_one_head(*whole_numbers(T, m))
    assert same(four_terms(*whole_numbers(T, m)), wanted, tolerance=1e-9)


def test_arguments_stay_as_they_were(four_terms):
    """No argument is changed: R, say, will be needed again."""
    given, before = whole_numbers(3, 2), whole_numbers(3, 2)
    four_terms(*given)
    assert all(np.array_equal(a, b) for a, b in zip(given, before))


def whole_numbers(T, m, C=4, D=6):
    """q, k, R, W_kR, u, v for one head; the same whole numbers at each call."""
    draw = np.random.default_rng(T + 10 * m)
    shapes = (T, C), (m + T, C), (m + T, D), (C, D), (C,), (C,)
    return [draw.integers(-3, 4, shape).astype(float) for shape in shapes]


# ---- beyond the exercise: the four terms of all heads -------------------------------------------

NAMES = ("q", "k", "R", "W_kR", "u", "v")


@pytest.mark.parametrize("T, m", SHAPES)
def test_all_pairs_equal_one_distance_after_the_other_forward_and_gradient(T, m):
    """Each of the four terms by itself, not divided by sqrt(C), and its gradients into all."""
    B, H, C, D, seen = 2, 3, 4, 6, visible(T, m)
    shapes = (B, H, T, C), (B, H, m + T, C), (m + T, D), (H, C, D), (H, C), (H, C)
    leaves = [torch.randn(z, dtype=torch.float64, requires_grad=True) for z in shapes]
    found = lesson.four_terms_all_pairs(*leaves)
    assert found.shape == (4, B, H, T, m + T)
    found, wanted = found[..., seen], oracles.terms_by_distance(*leaves)[..., seen]
    for name, a, b in zip("abcd", found, wanted):
        assert_close(a, b, f"term ({name})")
    for name, a, b in zip(NAMES, gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}")


# ---- the attention and the model ----------------------------------------------------------------

@pytest.fixture
def without_exercises():
    """The lesson's model on oracles in place of the exercises that it uses."""
    with replaced(lesson_1, sinusoid=oracles.sinusoid), replaced(
            lesson_2, update_memory=oracles.last_rows, stream_losses=stand_ins.stream_losses,
            causal_mask=lambda T, m, device=None: ~visible(T, m)):
        yield


def attention_and_leaves(T, M, B=2, D=10, H=3, C=4):
    """A RelativeAttention, and random h, memory, u, v for it."""
    attention = lesson.RelativeAttention(D, H, C).double()
    shapes = (B, T, D), (B, M, D), (H, C), (H, C)
    return attention, [torch.randn(z, dtype=torch.float64, requires_grad=True) for z in shapes]


def tiny_model(N=2, M=4):
    return randomized(lesson.RelativeTransformer(V=11, N=N, D=12, H=3, FF=20, M=M))


@pytest.mark.parametrize("T, M", SHAPES)
def test_attention_equals_loops_forward_and_gradient(without_exercises, T, M):
    """Softmax of all four terms over sqrt(C), C the width of a head, and values from h~."""
    attention, leaves = attention_and_leaves(T, M)
    found, wanted = attention(*leaves), oracles.relative_attention(attention, *leaves)
    assert_close(found, wanted, "attention against loops")
    names, weights = zip(*attention.named_parameters())
    leaves = *leaves, *weights
    for name, a, b in zip(("h", "memory", "u", "v", *names),
                          gradients(found, leaves), gradients(wanted, leaves)):
        if b.numel():
            assert_close(a, b, f"gradient into {name}")


def test_attention_shows_the_terms_that_it_uses(without_exercises):
    """`terms` are those of its own projections and the sinusoid, not scaled and not masked."""
    T, M, H = 3, 2, 3
    attention, (h, memory, u, v) = attention_and_leaves(T, M, H=H)
    rows = torch.cat([memory, h], dim=1)
    q, k = (torch.stack((z @ W.weight.T).chunk(H, -1), dim=1)  # (B, H, n, C)
            for z, W in ((h, attention.W_q), (rows, attention.W_kE)))
    W_kR = torch.stack(attention.W_kR.weight.chunk(H))
    wanted = oracles.terms_by_distance(q, k, oracles.unit_circle(range(M + T), 10), W_kR, u, v)
    seen = visible(T, M)
    assert_close(attention.terms(h, memory, u, v)[..., seen], wanted[..., seen], "terms")


def test_masked_probabilities_are_exactly_zero(without_exercises):
    """However large a future score is, it gets nothing; the mask covers content and position."""
    attention, (h, memory, u, v) = attention_and_leaves(6, 3)
    for W in (attention.W_q, attention.W_kE, attention.W_kR):
        nn.init.normal_(W.weight, std=1e4)  # scores up to 10^9
    other = h.detach().clone()
    other[:, 4:] = torch.randn(2, 2, 10)
    assert attention(h, memory, u, v)[:, :4].equal(attention(other, memory, u, v)[:, :4])


@pytest.mark.parametrize("T, M", [(1, 0), (3, 2), (2, 5), (4, 4)])
def test_segments_with_memory_equal_one_loop_over_the_stream(without_exercises, T, M):
    """Each layer remembers its own input; forward and gradient of every weight, SG included."""
    model, x = tiny_model(M=M), torch.randint(11, (2, 2 * T + 1))
    found, memory = in_segments(model, x, T)
    wanted = torch.stack([oracles.relative_stream(model, lane, T, M) for lane in x])
    assert_close(found, wanted, "logits, segment after segment")
    assert [m.shape for m in memory] == [(2, min(M, x.shape[1]), 12)] * 2
    names, leaves = zip(*model.named_parameters())
    for name, a, b in zip(names, gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}", tolerance=1e-8)


def against_one_pass(model, x, T):
    """The largest difference of logits: segments with a memory against a single pass."""
    return (in_segments(model, x, T)[0] - model(x)[0]).abs().max().item()


@pytest.mark.parametrize("n, T", [(12, 4), (13, 4), (7, 1), (9, 20)])
def test_segments_equal_one_pass_if_nothing_is_forgotten(n, T):
    """With distances in place of positions a cut leaves no trace; lesson 2 cannot do that."""
    x = torch.randint(11, (2, n))
    assert against_one_pass(tiny_model(M=n), x, T) < 1e-12
    if T < n:
        absolute = randomized(lesson_2.RecurrentTransformer(V=11, N=2, D=12, H=3, FF=20, M=n))
        assert against_one_pass(absolute, x, T) > 1e-3
        assert against_one_pass(tiny_model(M=0), x, T) > 1e-3, (
            "the measurement must notice a memory that is missing")


def test_the_lesson_prints_that_a_cut_changes_nothing(capsys):
    """Rounding for distances, and much more for absolute positions."""
    lesson.show_segments_against_one_pass()
    out = capsys.readouterr().out
    absolute, relative = (float(re.search(rf"{name} \(.*\): (\S+)", out)[1])
                          for name in ("absolute", "relative"))
    assert relative < 1e-12 and absolute > 1e-3


def test_the_lesson_prints_that_loops_and_pairs_agree(monkeypatch, capsys):
    """Rounding; and a term that is wrong for one pair shows."""
    lesson.show_loops_against_pairs(T=3, m=4)
    assert float(capsys.readouterr().out.split()[-1]) < 1e-12
    right = lesson.four_terms
    monkeypatch.setattr(lesson, "four_terms", lambda *given: right(*given) + np.eye(3, 7))
    lesson.show_loops_against_pairs(T=3, m=4)
    out = capsys.readouterr().out
    assert "18 visible cells" in out and float(out.split()[-1]) > 0.9


def test_u_and_v_are_two_weights_shared_by_all_layers():
    """The paper's default: one u and one v, (H, C) each, and W_kR in every layer; R is fixed."""
    V, N, D, H, FF = 11, 3, 12, 3, 20
    model = lesson.RelativeTransformer(V, N=N, D=D, H=H, FF=FF)
    assert model.u.shape == model.v.shape == (H, D // H)
    layer = 5 * D * D + (D * FF + FF) + (FF * D + D) + 2 * (D + D)
    assert sum(w.numel() for w in model.parameters()) == V * D + N * layer + 2 * D


def test_a_new_model_guesses_evenly():
    """Before training the loss is about ln V; a wrong scale of the tied embedding shows here."""
    V = 200
    x, y = torch.randint(V, (2, 4, 32))
    loss = lesson_1.token_losses(lesson.RelativeTransformer(V)(x)[0], y).mean().item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


# ---- training and measuring ---------------------------------------------------------------------

class Pairs(nn.Module):
    """Scores each token after the one before it; notes and numbers the memories."""

    def __init__(self, V):
        super().__init__()
        self.scores = nn.Parameter(torch.linspace(-1, 1, V * V).view(V, V))
        self.given = []

    def forward(self, x, memory=None):
        self.given.append((x, memory))
        return self.scores[x], len(self.given)


class WithoutMemory(Pairs):
    """The same for lesson 1, which knows no memory."""

    def forward(self, x):
        return super().forward(x)[0]


def one_round():
    """x and y of the three segments of a text, and stand-ins that cut the text into them."""
    x, y = torch.randint(11, (2, 3, 2, 4))
    return x, {"lanes": lambda tokens, B: (tokens, B), "segments": lambda stream, T: {
        (("text", 2), 4): zip(x, y)}[stream, T]}


def test_fit_hands_the_memory_on_and_forgets_it_at_the_start_of_the_text():
    """Segment s + 1 gets the memory that segment s gave; a new round begins without one."""
    model, (x, cut) = Pairs(11), one_round()
    with replaced(lesson_1, **cut):
        lesson.fit(model, "text", B=2, T=4, steps=8)
    assert all(given.equal(x[step % 3]) for step, (given, _) in enumerate(model.given))
    assert [memory for _, memory in model.given] == [None, 1, 2, None, 4, 5, None, 7]


def test_fit_takes_the_steps_of_lesson_1():
    """For a model that makes nothing of its memory both loops end with the same weights: the same
    targets, fresh and clipped gradients of the mean loss, and rates."""
    ours, theirs, (_, cut) = Pairs(11), WithoutMemory(11), one_round()
    with replaced(lesson_1, **cut):
        lesson.fit(ours, "text", B=2, T=4, steps=70, lr=0.1)
        lesson_1.fit(theirs, "text", B=2, T=4, steps=70, lr=0.1)
    assert ours.scores.equal(theirs.scores) and not ours.scores.equal(Pairs(11).scores)


@pytest.mark.parametrize("n, B, T", [(12, 1, 5), (11, 1, 5), (9, 1, 1), (5, 1, 20), (25, 3, 3)])
def test_bits_per_token_is_a_mean_over_tokens(n, B, T):
    """A short last segment counts by its tokens, not as a segment; nats become bits; all lanes
    count; and a second call gives the same."""
    model, tokens = Pairs(7), torch.randint(7, (n,)).to(torch.uint8)
    p = model.scores.detach().double().exp()
    inputs = (n - 1) // B * B
    pairs = list(zip(tokens.tolist(), tokens[1:].tolist()))[:inputs]
    wanted = sum(-math.log2(p[a, b] / p[a].sum()) for a, b in pairs) / inputs
    found = [lesson.bits_per_token(model, tokens, B, T) for _ in range(2)]
    assert found == [pytest.approx(wanted, abs=1e-5)] * 2
    calls = math.ceil(inputs // B / T)
    assert [memory for _, memory in model.given[:calls]] == [None, *range(1, calls)]
    assert model.given[calls][1] is None, "the second call begins without a memory"
