"""What the lessons measure and print: losses, reach, terms, costs.

    pytest tests/maths/test_measures.py
"""
import doctest
import math
import re
from importlib import import_module

import numpy as np
import pytest
import torch

from course import oracles
from course.exercises import LESSONS
from helpers import assert_close, randomized, visible

lesson_1, lesson_2, lesson_3, lesson_4 = map(import_module, (
    "01_vanilla_segments", "02_recurrence", "03_relative_attention", "04_rel_shift"))


def nll(logits, y):
    """-ln p(y) in nats: (..., V), (...) -> (...)."""
    p = logits.detach().exp() / logits.detach().exp().sum(-1, keepdim=True)
    return -p.gather(-1, y.long()[..., None])[..., 0].log()


def some_model():
    return randomized(lesson_1.VanillaTransformer(V=11, N=2, D=12, H=3, FF=20))


def ignoring_its_input(V):
    """Make a model of which the loss of a target tells which token it was, and its V scores."""
    scores = torch.randn(V)
    return (lambda x: scores.expand(*x.shape, V)), scores


def printed(capsys):
    """Return all words that were printed, one space between them."""
    return " ".join(capsys.readouterr().out.split())


# ---- lesson 1: losses, one pass and sliding window ----------------------------------------------

def test_token_losses_are_nats_for_each_token():
    """-ln softmax(logits)[y], not averaged, and its gradient is p - 1 at the target."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (2, 3))
    found = lesson_1.token_losses(logits, y)
    assert_close(found, nll(logits, y), "losses in nats, one per token")
    slope = logits.softmax(-1) - torch.eye(5)[y]
    assert_close(torch.autograd.grad(found.sum(), logits)[0], slope, "gradient p - 1[y]")


@pytest.mark.parametrize("n, T", [(23, 4), (21, 5), (9, 1), (70 * 3 + 2, 3)])
def test_one_pass_losses_are_those_of_each_segment_alone(n, T):
    """Segment s is tokens sT ... sT + T - 1, without context; more than one batch of 64 works."""
    model, tokens = some_model(), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson_1.one_pass_losses(model, tokens, T)
    assert found.shape == ((n - 1) // T, T) and not found.requires_grad
    for s in range(len(found)):
        x, y = tokens[s * T : s * T + T].long(), tokens[s * T + 1 : s * T + T + 1]
        assert_close(found[s], nll(model(x[None])[0], y), f"segment {s}", tolerance=1e-10)


@pytest.mark.parametrize("n, T, every", [
    (12, 4, 1), (9, 1, 1), (70, 3, 1), (6, 5, 1), (24, 4, 3), (9, 2, 50)])
def test_sliding_window_losses_are_those_of_each_window_alone(n, T, every):
    """Token t is predicted from tokens t - T ... t - 1, in a window of its own."""
    model, tokens = some_model(), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson_1.sliding_window_losses(model, tokens, T, every)
    assert not found.requires_grad
    wanted = [nll(model(tokens[t - T : t].long()[None])[0, -1], tokens[t])
              for t in range(T, n, every)]
    assert_close(found, torch.stack(wanted), "windows", tolerance=1e-10)


def test_fragmentation_is_shown_by_position(capsys):
    """Bits: the mean for each position of a segment, and that of the later half."""
    (model, scores), tokens = ignoring_its_input(7), torch.randint(7, (62,))
    found = lesson_1.show_fragmentation(model, tokens, 4)
    bits = (nll(scores.expand(60, 7), tokens[1:61]) / math.log(2)).view(15, 4).mean(0)
    assert_close(found, bits, "bits by position", tolerance=1e-5)
    words = printed(capsys)
    assert f"segments of 4 bytes, each alone: {found.mean():.2f} bits per byte" in words
    assert (f"the first of a segment {found[0]:.2f}, the second {found[1]:.2f}, the later half "
            f"{found[2:].mean():.2f}") in words


@pytest.mark.parametrize("n, T, count", [(243, 4, 14), (246, 8, 14)])
def test_sliding_window_is_compared_on_the_same_tokens(capsys, n, T, count):
    """A model that ignores its input has the same loss both ways; a rest is left out."""
    (model, scores), tokens = ignoring_its_input(7), torch.randint(7, (n,))
    found = lesson_1.show_sliding_window(model, tokens, T)
    bits = nll(scores.expand(count, 7), tokens[T::17][:count]).mean().item() / math.log(2)
    assert found == pytest.approx(bits, abs=1e-5)
    said = re.fullmatch(f"sliding window: (.*) bits per byte the same {count} bytes in one pass: "
                        "(.*)", printed(capsys))
    assert [*map(float, said.groups())] == pytest.approx([bits, bits], abs=0.006)  # two digits


# ---- lesson 2: gradient, reach, confusion -------------------------------------------------------

def test_the_stopped_gradient_is_shown(monkeypatch, capsys):
    """None for segment 1; a memory that is not detached would show."""
    lesson_2.show_stopped_gradient(T=4, M=4)
    assert "gradient into segment 1: None\n" in capsys.readouterr().out
    monkeypatch.setattr(lesson_2, "update_memory", lambda memory, h, M: torch.cat([memory, h], 1))
    lesson_2.show_stopped_gradient(T=4, M=4)
    assert "gradient into segment 1: None" not in capsys.readouterr().out


@pytest.mark.parametrize("N, T, M", [(1, 4, 4), (2, 4, 4), (3, 2, 2), (2, 3, 6), (2, 4, 2),
                                     (3, 4, 6), (2, 5, 0)])
def test_a_change_reaches_exactly_as_far_as_the_walk_says(N, T, M):
    """The first token changes the losses of the tokens that depend on it, all others by exactly 0.
    """
    change = lesson_2.change_by_distance(N, T, M, n_segments=6)
    assert change.shape == (6 * T,)
    changed = [t for t, c in enumerate(change.tolist()) if c > 0]
    assert changed == [t for t in range(6 * T) if 0 in oracles.tokens_seen(t, N, T, M)]


@pytest.mark.parametrize("j, k", [(0, 6), (3, 4), (6, 0)])
def test_absolute_positions_confuse_memory_and_segment(j, k):
    """Swapping tokens at the same position of two segments changes nothing in one layer; at other
    positions, and in two layers, it does."""
    one, two = (lesson_2.RecurrentTransformer(V=16, N=N, D=12, H=3, FF=20, M=8).double()
                for N in (1, 2))
    assert lesson_2.confusion(one, 8, j, j) < 1e-12 < 1e-6 < lesson_2.confusion(one, 8, j, k)
    if j < 6:  # before position 7 the states of layer 1 have changed, too
        assert lesson_2.confusion(two, 8, j, j) > 1e-6, "two tokens must have been swapped"


# ---- lesson 3: terms, bits per token ------------------------------------------------------------

@pytest.mark.parametrize("T, m", [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3)])
def test_the_terms_of_all_pairs_are_the_four_terms(T, m):
    """Each of the four terms, not divided by sqrt(C), for all lanes and heads."""
    shapes = (2, 3, T, 4), (2, 3, m + T, 4), (m + T, 6), (3, 4, 6), (3, 4), (3, 4)
    leaves, seen = [torch.randn(z, dtype=torch.float64) for z in shapes], visible(T, m)
    found = lesson_3.four_terms_all_pairs(*leaves)
    assert found.shape == (4, 2, 3, T, m + T)
    wanted = oracles.terms_by_distance(*leaves)[..., seen]
    for name, a, b in zip("abcd", found[..., seen], wanted):
        assert_close(a, b, f"term ({name})")


def test_an_attention_shows_the_terms_that_it_uses():
    """Those of its own projections, not scaled: scaled, their softmax is what attends."""
    attention = lesson_3.RelativeAttention(10, 1, 4).double()
    h, memory, u, v = (torch.randn(z, dtype=torch.float64) for z in (
        (1, 3, 10), (1, 2, 10), (1, 4), (1, 4)))
    score = attention.terms(h, memory, u, v).sum(0)[0, 0] / 2  # sqrt(C)
    value = torch.cat([memory, h], 1)[0] @ attention.W_v.weight.T
    wanted = score.masked_fill(~visible(3, 2), -math.inf).softmax(-1) @ value
    assert_close(attention(h, memory, u, v)[0], wanted @ attention.W_o.weight.T, "from the terms")


@pytest.mark.parametrize("n, B, T", [(12, 1, 5), (11, 1, 5), (9, 1, 1), (5, 1, 20), (25, 3, 3)])
def test_bits_per_token_is_a_mean_over_tokens(n, B, T):
    """A short last segment counts by its tokens, not as a segment; nats become bits; all lanes
    count; and a second call returns the same."""
    scores, tokens = torch.randn(7, 7), torch.randint(7, (n,)).to(torch.uint8)
    inputs, memories = (n - 1) // B * B, []

    def bigram(x, memory=None):
        memories.append(memory)
        return scores[x], len(memories)

    losses = nll(scores.double()[tokens[:inputs].long()], tokens[1 : inputs + 1])
    wanted = pytest.approx(losses.mean().item() / math.log(2), abs=1e-5)
    assert [lesson_3.bits_per_token(bigram, tokens, B, T) for _ in range(2)] == [wanted] * 2
    calls = math.ceil(inputs // B / T)
    assert memories[: calls + 1] == [None, *range(1, calls), None]


def test_loops_and_pairs_are_shown_to_agree(monkeypatch, capsys):
    """Rounding; and a term that is wrong for one pair shows."""
    lesson_3.show_loops_against_pairs(T=3, m=4)
    assert float(printed(capsys).split()[-1]) < 1e-12
    right = lesson_3.four_terms
    monkeypatch.setattr(lesson_3, "four_terms", lambda *given: right(*given) + np.eye(3, 7))
    lesson_3.show_loops_against_pairs(T=3, m=4)
    words = printed(capsys)
    assert "18 visible cells" in words and float(words.split()[-1]) > 0.9


# ---- lesson 4: shifts and their cost ------------------------------------------------------------

def test_the_loops_follow_the_entry_rule():
    """rel_shift_loops, the lesson's first form, is the rule of appendix B; future cells are 0."""
    x = torch.randn(2, 3, 5)
    wanted = oracles.shift(x).masked_fill(~visible(3, 2), 0)
    assert lesson_4.rel_shift_loops(x).equal(wanted)


def test_the_shifts_are_shown_to_agree(monkeypatch, capsys):
    """All shapes to the bit, and scores up to rounding; without the shift both lines show it."""
    lesson_4.show_equalities()
    same, score = capsys.readouterr().out.splitlines()
    assert same.endswith("to the bit: 16 of 16 shapes") and float(score.split()[-1]) < 1e-12
    monkeypatch.setattr(lesson_4, "rel_shift", lambda x: x)
    lesson_4.show_equalities()
    same, score = capsys.readouterr().out.splitlines()
    assert same.endswith("to the bit: 4 of 16 shapes") and float(score.split()[-1]) > 0.1


def test_the_shift_keeps_a_row_for_each_distance_and_not_for_each_pair():
    """The largest tensor that is kept for the gradient: T * K * D elements in lesson 3, K * D here.
    """
    T, D, sizes = 32, 64, []
    leaves = [z.requires_grad_() for z in lesson_4.example(1, 2, T, T, 16, D)]
    for score in (lesson_4.score_by_pairs, lesson_4.score_by_shift):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
                lambda z, kept=kept: kept.append(z.numel()) or z, lambda z: z):
            score(*leaves)
        sizes.append(max(kept))
    assert sizes[0] >= T * 2 * T * D and sizes[1] <= 2 * T * D


def test_milliseconds_is_the_fastest_after_a_first_call(monkeypatch):
    """Six calls, forward and backward; the first one warms up, disturbed ones do not count."""
    seconds = iter([0, 0.0001, 10, 10.001, 20, 20.003, 30, 30.002, 40, 47, 50, 50.002])
    monkeypatch.setattr(lesson_4.time, "perf_counter", seconds.__next__)
    x = torch.ones(3, requires_grad=True)
    assert lesson_4.milliseconds(lambda z: z * 2, [x]) == pytest.approx(1)
    assert x.grad.tolist() == [12, 12, 12], "the backward pass is measured, too"


# ---- all lessons --------------------------------------------------------------------------------

def test_the_examples_in_the_docstrings_are_true():
    """The worked examples of the lessons run, and return what they show."""
    assert sum(doctest.testmod(import_module(name), raise_on_error=True).attempted
               for name in LESSONS)
