"""Lesson 2: a memory that is first in, first out, gradient-free, and changes nothing it should not.

    pytest -k update_memory     the rules of one exercise, in the order in which they stand here
    pytest -k causal_mask
    pytest -k reach
    pytest -k stream_losses
    pytest tests/test_02_recurrence.py

A test that takes an exercise by its name is one of its rules; what follows below is about the whole
lesson: the model against loops over tokens, written from the formulas in float64.
"""
import math
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course import oracles, stand_ins
from course.rules import same
from helpers import assert_close, gradients, in_segments, randomized, run_examples

lesson_1, lesson = import_module("01_vanilla_segments"), import_module("02_recurrence")

# T, M: one token, no memory, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6)]


# ---- exercise update_memory ---------------------------------------------------------------------

def rows(first, end):
    """Hidden states number first, ..., end - 1 of two lanes: (2, end - first, 3).

    Each number is 100 * lane + 10 * row + feature.
    """
    lane, row, feature = torch.arange(2), torch.arange(first, end), torch.arange(3)
    return 100 * lane[:, None, None] + 10 * row[:, None] + feature


def test_a_full_memory_moves_on(update_memory):
    """First in, first out: the new rows go in after the old ones, the oldest ones go out, and the
    last M of both together stay."""
    assert same(update_memory(rows(0, 5), rows(5, 9), 5), rows(4, 9))


def test_a_memory_grows_until_it_is_full(update_memory):
    """While there are fewer than M rows, all stay; nothing is filled up."""
    assert same(update_memory(rows(0, 1), rows(1, 5), 7), rows(0, 5))


def test_a_segment_longer_than_the_memory(update_memory):
    """M rows stay, also if the segment has more: M says how many, not T."""
    assert same(update_memory(rows(0, 2), rows(2, 7), 3), rows(4, 7))


@pytest.mark.parametrize("m, T", [(4, 2), (0, 2)])
def test_nothing_is_kept_if_M_is_0(update_memory, m, T):
    """M = 0 keeps nothing: the result has no rows, (2, 0, 3)."""
    assert same(update_memory(rows(0, m), rows(m, m + T), 0), rows(0, 0))


@pytest.mark.parametrize("m, T, M, first", [(0, 3, 7, 0), (0, 4, 3, 1), (3, 2, 4, 1), (5, 1, 2, 4),
                                            (3, 2, 5, 0), (3, 2, 3, 2), (1, 5, 3, 3), (6, 2, 3, 5)])
def test_other_numbers_of_rows(update_memory, m, T, M, first):
    """The same for any number of old rows m, new rows T and kept rows M."""
    assert same(update_memory(rows(0, m), rows(m, m + T), M), rows(first, m + T))


def test_the_memory_has_the_type_of_h(update_memory):
    """The rows are kept as they are, in their own dtype."""
    assert update_memory(rows(0, 2).half(), rows(2, 4).half(), 3).dtype == torch.float16


def test_no_gradient_goes_back(update_memory):
    """The gradient is stopped, SG in the paper: if the result hangs on the graph of its segment,
    the second backward() of a training loop fails.  detach() cuts it off, old rows and new."""
    old, new = (torch.randn(2, n, 3, requires_grad=True) for n in (3, 4))
    assert not update_memory(old * 1, new * 1, 5).requires_grad  # * 1: results, as in a model


def test_the_segment_keeps_its_gradient(update_memory):
    """Only the result has no gradient; h itself is not detached, because its segment still needs
    the graph: detach() and not detach_()."""
    h = torch.randn(2, 4, 3, requires_grad=True) * 1
    update_memory(torch.randn(2, 3, 3), h, 5)
    assert h.requires_grad


def test_the_old_memory_stays_as_it_was(update_memory):
    """The arguments are not changed in place: the caller still needs the old memory."""
    memory, h = rows(0, 5), rows(5, 9)
    update_memory(memory, h, 5)
    assert same(memory, rows(0, 5)) and same(h, rows(5, 9))


# ---- exercise causal_mask -----------------------------------------------------------------------
# 1 is True, a key that is masked; each row belongs to a query

def test_masked_is_what_comes_after_the_query(causal_mask):
    """Query i is key m + i: it sees the whole memory and itself, and masked are the keys after it.
    """
    assert same(causal_mask(4, 2), [[0, 0, 0, 1, 1, 1],
                                    [0, 0, 0, 0, 1, 1],
                                    [0, 0, 0, 0, 0, 1],
                                    [0, 0, 0, 0, 0, 0]])


def test_without_memory_query_0_sees_itself_alone(causal_mask):
    """Without a memory, m = 0, query i is key i."""
    assert same(causal_mask(3, 0), [[0, 1, 1],
                                    [0, 0, 1],
                                    [0, 0, 0]])


def test_a_single_query_sees_everything(causal_mask):
    """The last query sees all keys, also if it is the only one."""
    assert same(causal_mask(1, 4), [[0, 0, 0, 0, 0]])


@pytest.mark.parametrize("T, m", [(1, 0), (2, 1), (5, 3), (3, 3), (2, 6), (4, 9), (7, 1)])
def test_masks_of_other_sizes(causal_mask, T, m):
    """The mask is (T, m + T) for any T and m."""
    assert same(causal_mask(T, m), ~oracles.seen_cells(T, m))


def test_a_mask_is_bool(causal_mask):
    """The mask is a bool tensor: masked_fill takes no other."""
    assert causal_mask(2, 3).dtype == torch.bool


def test_a_mask_stands_on_its_device(causal_mask):
    """Every tensor that is made here gets `device=device` (torch.arange, torch.ones): on a GPU the
    scores stand there, and the mask must, too."""
    assert stand_ins.on_the_device(lambda device: causal_mask(2, 3, device))


# ---- exercise reach -----------------------------------------------------------------------------

def test_one_layer(reach):
    """One layer: the last token of a segment sees T - 1 tokens back to the segment's start, and M
    further."""
    assert same(reach(N=1, T=5, M=10), 14)


def test_each_layer_goes_on_where_the_last_one_arrived(reach):
    """Each layer goes back to the start of the segment in which the one before arrived, and M
    further."""
    assert same(reach(N=2, T=4, M=4), 11)


@pytest.mark.parametrize("N, T, M, tokens", [(3, 5, 2, 16), (2, 4, 6, 17), (2, 7, 3, 16)])
def test_memory_that_ends_inside_a_segment(reach, N, T, M, tokens):
    """If M is no multiple of T, a layer arrives inside a segment: the next one first goes back to
    that segment's start."""
    assert same(reach(N, T, M), tokens)


def test_reach_without_memory(reach):
    """Without a memory nothing before the segment is seen, however many layers there are."""
    assert same(reach(N=3, T=4, M=0), 3)


def test_segments_of_one_token(reach):
    """With T = 1 each token is a segment, and each layer sees M tokens before it."""
    assert same(reach(N=3, T=1, M=2), 6)


@pytest.mark.parametrize("N, T, M", [(1, 1, 0), (1, 2, 5), (5, 1, 4), (2, 3, 2), (5, 5, 3),
                                     (3, 3, 3), (4, 3, 9), (5, 3, 4), (4, 4, 1), (4, 6, 8)])
def test_reach_counted_token_by_token(reach, N, T, M):
    """The same for any N, T and M, counted by a walk from token to token."""
    t = 50 * T - 1
    assert same(reach(N, T, M), t - min(oracles.tokens_seen(t, N, T, M)))


# ---- exercise stream_losses ---------------------------------------------------------------------
# A stand-in for the model, of which the losses are known: it expects a word the more, the more
# often it has read it in the segments before (that is its memory), and the word it reads now.

X = torch.tensor([[0, 1, 1, 2, 0],
                  [2, 2, 2, 1, 0]])
Y = torch.tensor([[1, 1, 2, 0, 0],
                  [2, 2, 1, 0, 1]])


@pytest.mark.parametrize("T", [2, 3, 5, 1])
def test_the_memory_is_handed_on(stream_losses, T):
    """The segments are read in order, and each call of the model gets the memory that the call
    before has returned.  The losses of all tokens come back, (B, n)."""
    assert same(stream_losses(stand_ins.Recalls(), X, Y, T), oracles.recalled(X, Y, T), None, 1e-9)


def test_the_first_segment_has_no_past(stream_losses):
    """The first call gets None for a memory: nothing, not zeros."""
    model = stand_ins.Recalls()
    stream_losses(model, X, Y, 3)
    assert model.memories[0] is None


def test_each_token_is_read_once(stream_losses):
    """Segments of T tokens, and the last one is what is left: 5 tokens are 2, 2 and 1."""
    model = stand_ins.Recalls()
    stream_losses(model, X, Y, 2)
    assert same(model.lengths, [2, 2, 1])


def test_the_losses_keep_their_gradient(stream_losses):
    """Who trains with these losses needs their graph: nothing is detached here."""
    assert stream_losses(stand_ins.Recalls(), X, Y, 3).requires_grad


# ---- beyond the exercises: attention and the model against the formulas -------------------------

@pytest.fixture
def oracles_in_place(monkeypatch):
    """What is tested depends on no exercise: oracles stand in the place of those it uses."""
    monkeypatch.setattr(lesson, "update_memory", oracles.last_rows)
    monkeypatch.setattr(lesson, "causal_mask", lambda T, m, device: ~oracles.seen_cells(T, m))
    monkeypatch.setattr(lesson_1, "sinusoid", oracles.sinusoid)
    monkeypatch.setattr(lesson, "stream_losses", stand_ins.stream_losses)


def tiny_model(N=2, M=4):
    return randomized(lesson.RecurrentTransformer(V=11, N=N, D=12, H=3, FF=20, M=M))


def attend(attention, query_row, rows):
    """One query over the rows (K, D) that it may see -> (D,)."""
    heads = []
    for n in range(attention.H):
        head = slice(n * attention.C, (n + 1) * attention.C)
        W_q, W_k, W_v = (W.weight[head] for W in (attention.W_q, attention.W_k, attention.W_v))
        q = W_q @ query_row
        score = torch.stack([q @ (W_k @ row) / math.sqrt(attention.C) for row in rows])
        p = score.exp() / score.exp().sum()
        heads.append(sum(weight * (W_v @ row) for weight, row in zip(p, rows)))
    return attention.W_o.weight @ torch.cat(heads)


def stream_by_formula(model, x, T, M):
    """One stream (n,) in segments of T -> logits (n, V), as the recurrence is meant to be.

    Token by token: one of a segment that starts at s sees the rows from s - M up to itself.
    """
    E, D = model.embedding.weight, model.embedding.weight.shape[1]
    U = oracles.unit_circle(range(T), D)
    h = [math.sqrt(D) * E[token] + U[t % T] for t, token in enumerate(x.tolist())]
    for layer in model.layers:
        above = []
        for i in range(len(h)):
            start = i // T * T  # of the segment that i stands in; before it is memory
            seen = [h[j].detach() if j < start else h[j] for j in range(max(0, start - M), i)]
            past = torch.stack(seen) if seen else h[i][None][:0]
            above.append(layer(h[i][None, None], past[None])[0, 0])  # a segment of one token
        h = above
    return torch.stack(h) @ E.T


@pytest.mark.parametrize("T, M", SHAPES)
def test_attention_with_memory_equals_loops_forward_and_gradient(oracles_in_place, T, M):
    """Queries from the segment only; keys and values from memory, then segment."""
    B, D, H, C = 2, 10, 3, 4
    attention = lesson.Attention(D, H, C).double()
    h, memory = (torch.randn(B, n, D, dtype=torch.float64, requires_grad=True) for n in (T, M))
    found, rows = attention(h, memory), torch.cat([memory, h], dim=1)
    wanted = torch.stack([torch.stack([attend(attention, h[b, i], rows[b, : M + i + 1])
                                       for i in range(T)]) for b in range(B)])
    assert_close(found, wanted, "attention over memory and segment, against loops")
    leaves = [h, *[memory] * (M > 0), *attention.parameters()]
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of the attention against loops")


def test_masked_probabilities_are_exactly_zero(oracles_in_place):
    """However low the visible scores are, a key of the future gets nothing, after a memory too."""
    attention = lesson.Attention(10, 3, 4).double()
    nn.init.normal_(attention.W_q.weight, std=1e6)
    attention.W_k.weight.data = -attention.W_q.weight  # query 0 gives itself about -10^13
    h, other = torch.randn(2, 2, 6, 10).double()
    memory, other[:, 0] = h[:, :1].expand(2, 3, 10), h[:, 0]
    assert attention(h, memory)[:, 0].equal(attention(other, memory)[:, 0])


@pytest.mark.parametrize("T, M", SHAPES)
def test_segments_with_memory_equal_one_loop_over_the_stream(oracles_in_place, T, M):
    """Each layer remembers its own input; forward and gradient of every weight, SG included.

    Wrong here: the memory of another layer, memory after the segment, T rows kept in place of M,
    zeros for a memory that is not there, a mask without the memory, a gradient into the past.
    """
    model, x = tiny_model(M=M), torch.randint(11, (2, 3 * T + 1))
    found, memory = in_segments(model, x, T)
    wanted = torch.stack([stream_by_formula(model, lane, T, M) for lane in x])
    for s in range(0, x.shape[1], T):
        assert_close(found[:, s : s + T], wanted[:, s : s + T], f"logits of segment {s // T}")
    assert [m.shape for m in memory] == [(2, min(M, x.shape[1]), 12)] * 2
    leaves = list(model.parameters())
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of a weight", tolerance=1e-8)


def test_model_changes_no_memory_in_place(oracles_in_place):
    """The caller keeps the old memory: asked again, the model gives the same answer."""
    model, x = tiny_model(), torch.randint(11, (2, 3))
    memory = model(torch.randint(11, (2, 4)))[1]
    copies = [m.clone() for m in memory]
    first, second = model(x, memory)[0], model(x, memory)[0]
    assert first.equal(second)
    assert all(m.equal(c) for m, c in zip(memory, copies))


def test_a_new_model_guesses_evenly(oracles_in_place):
    """Before training the loss is about ln V; a wrong scale of the tied embedding shows here."""
    V = 200
    x, y = torch.randint(V, (2, 4, 32))
    loss = lesson_1.token_losses(lesson.RecurrentTransformer(V)(x)[0], y).mean().item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


def test_no_weight_depends_on_the_memory_length():
    """A model is trained with one M and evaluated with another."""
    shapes = [{name: w.shape for name, w in tiny_model(M=M).named_parameters()} for M in (0, 9)]
    assert shapes[0] == shapes[1]


# ---- beyond the exercises: the lesson's functions together --------------------------------------

@pytest.mark.parametrize("M, n", [(4, 5), (0, 15)])
def test_without_memory_it_is_lesson_1(M, n):
    """Same weights (the memory adds none): the same logits and gradients in a first segment, and
    in every segment if M = 0."""
    model = tiny_model(M=M)
    vanilla = lesson_1.VanillaTransformer(V=11, N=2, D=12, H=3, FF=20).double()
    vanilla.load_state_dict(model.state_dict())
    x = torch.randint(11, (3, n))
    found = in_segments(model, x, 5)[0]
    wanted = torch.cat([vanilla(part) for part in x.split(5, dim=1)], dim=1)
    assert_close(found, wanted, "no memory, so nothing but lesson 1")
    for a, b in zip(gradients(found, list(model.parameters())),
                    gradients(wanted, list(vanilla.parameters()))):
        assert_close(a, b, "gradients without a memory")


def test_gradient_stops_at_the_segment_boundary():
    """Segment 2's losses send no gradient into what segment 1's tokens were embedded as, through
    any layer, and some into that of segment 2."""
    model, embedded = tiny_model(), []
    model.embedding.register_forward_hook(lambda module, given, out: embedded.append(out))
    memory = model(torch.randint(11, (2, 5)))[1]
    loss = model(torch.randint(11, (2, 5)), memory)[0].square().sum()
    first, second = torch.autograd.grad(loss, embedded, allow_unused=True)
    assert first is None, "the gradient flows into the past: the memory was not detached"
    assert second.abs().max() > 0


def test_the_lesson_prints_what_the_gradient_does(monkeypatch, capsys):
    """None for segment 1; a memory that is not detached would show."""
    lesson.show_stopped_gradient(T=4, M=4)
    assert "gradient into segment 1: None\n" in capsys.readouterr().out
    monkeypatch.setattr(lesson, "update_memory", lambda memory, h, M: torch.cat([memory, h], 1))
    lesson.show_stopped_gradient(T=4, M=4)
    assert "gradient into segment 1: None" not in capsys.readouterr().out


def test_two_backward_passes_in_a_row_work():
    """As in training: each segment has a graph of its own, which its backward pass frees."""
    model, x = tiny_model(), torch.randint(11, (2, 5))
    logits, memory = model(x)
    logits.sum().backward()
    model(x, memory)[0].sum().backward()  # an error if it reaches back into the first one's graph


# ---- beyond the exercises: what the lesson measures ---------------------------------------------

@pytest.mark.parametrize("N, T, M", [(1, 4, 4), (2, 4, 4), (3, 2, 2), (2, 3, 6), (2, 4, 2),
                                     (3, 4, 6), (2, 5, 0)])
def test_changes_reach_exactly_as_far_as_the_walk_says(oracles_in_place, N, T, M):
    """The first token moves the losses that can see it, and all others by exactly 0."""
    change = lesson.change_by_distance(N, T, M, n_segments=6)
    assert change.shape == (6 * T,)
    moved = [t for t, c in enumerate(change.tolist()) if c > 0]
    assert moved == [t for t in range(6 * T) if 0 in oracles.tokens_seen(t, N, T, M)]


@pytest.mark.parametrize("j, k", [(0, 6), (3, 4), (6, 0)])
def test_absolute_positions_confuse_memory_and_segment(oracles_in_place, j, k):
    """Tokens at the same position of two segments can change places unnoticed; at others, not."""
    model = lesson.RecurrentTransformer(V=16, N=1, D=12, H=3, FF=20, M=8).double()
    same_place, other = lesson.confusion(model, 8, j, j), lesson.confusion(model, 8, j, k)
    assert same_place < 1e-12 < 1e-6 < other
    if j < 6:  # two layers notice: before position 7 the states of layer 1 have changed, too
        two = lesson.RecurrentTransformer(V=16, N=2, D=12, H=3, FF=20, M=8).double()
        assert lesson.confusion(two, 8, j, j) > 1e-6, "two tokens must have been exchanged"


def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)
