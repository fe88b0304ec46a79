"""Lesson 2: a memory that is first in, first out, gradient-free, and changes nothing it should not.

    pytest tests/test_02_recurrence.py

The oracle reads the whole stream at once: a token of a segment that starts at s sees the rows from
s - M up to itself.  It is a loop over tokens, written from the formulas in float64.
"""
import math
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course.checks import unit_circle
from helpers import assert_close, gradients, randomized, run_examples, visible

lesson_1, lesson = import_module("01_vanilla_segments"), import_module("02_recurrence")

# T, M: one token, no memory, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6)]


# ---- helpers ------------------------------------------------------------------------------------

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


def norm(x, layer_norm):
    x = x - x.mean()
    return x / (x.pow(2).mean() + 1e-5).sqrt() * layer_norm.weight + layer_norm.bias


def stream_by_formula(model, x, T, M):
    """One stream (n,) in segments of T -> logits (n, V), as the recurrence is meant to be."""
    E, D = model.embedding.weight, model.embedding.weight.shape[1]
    h = [math.sqrt(D) * E[token] + unit_circle([t % T], D)[0] for t, token in enumerate(x.tolist())]
    for layer in model.layers:
        first, _, second = layer.feed_forward
        above = []
        for i in range(len(h)):
            start = i // T * T  # of the segment that i stands in; before it is memory
            rows = [h[j].detach() if j < start else h[j]
                    for j in range(max(0, start - M), i + 1)]
            o = norm(h[i] + attend(layer.attention, h[i], rows), layer.norm_1)
            inner = (first.weight @ o + first.bias).clamp(min=0)
            above.append(norm(o + second.weight @ inner + second.bias, layer.norm_2))
        h = above
    return torch.stack(h) @ E.T


def in_segments(model, x, T):
    """(B, n) -> logits (B, n, V), the memory handed on, and the last memory."""
    memory, parts = None, []
    for part in x.split(T, dim=1):
        logits, memory = model(part, memory)
        parts.append(logits)
    return torch.cat(parts, dim=1), memory


def sources(N, T, M, t):
    """All tokens of the stream that prediction t can depend on: step down layer by layer."""
    tokens = {t}
    for _ in range(N):
        tokens = {j for i in tokens for j in range(max(0, i // T * T - M), i + 1)}
    return tokens


# ---- the memory ---------------------------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES + [(3, 100)])
def test_memory_is_first_in_first_out(T, M):
    """After each segment the memory is the last M rows of all that was seen, or all if fewer."""
    B, D = 2, 5
    seen = memory = torch.randn(B, 0, D)
    for _ in range(4):
        h = torch.randn(B, T, D)
        memory, seen = lesson.update_memory(memory, h, M), torch.cat([seen, h], dim=1)
        wanted = seen[:, [i for i in range(seen.shape[1]) if i >= seen.shape[1] - M]]
        assert memory.shape == wanted.shape, (
            f"after {seen.shape[1]} rows, M = {M}: {memory.shape[1]} rows kept"
            + (" (in Python rows[-0:] is everything)" if M == 0 else ""))
        assert memory.equal(wanted), "the newest rows are kept, oldest first"


def test_memory_is_detached_and_the_old_one_is_left_alone():
    """SG of the paper: what is remembered has no history, and nothing is changed in place."""
    old, new = torch.randn(2, 3, 5), torch.randn(2, 4, 5, requires_grad=True)
    copy = old.clone()
    memory = lesson.update_memory(old, new * 2, 5)
    assert not memory.requires_grad, "the memory still holds the graph of its segment: no SG"
    assert old.equal(copy)


@pytest.mark.parametrize("T, M", SHAPES)
def test_causal_mask_counts_the_memory_in(T, M):
    """Query i is key M + i: all of the memory is seen, itself too, and nothing after it."""
    mask = lesson.causal_mask(T, M)
    assert mask.dtype == torch.bool and mask.shape == (T, M + T)
    count = (~mask).sum(1).tolist()
    assert count == [M + i + 1 for i in range(T)], (
        f"visible keys of each query: {count}; the diagonal belongs at column M = {M}")
    assert mask.equal(~visible(T, M))


@pytest.mark.parametrize("T, M", SHAPES)
def test_attention_with_memory_equals_loops_forward_and_gradient(T, M):
    """Queries from the segment only; keys and values from memory, then segment."""
    B, D, H, C = 2, 10, 3, 4
    attention = lesson.Attention(D, H, C).double()
    h = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(B, M, D, dtype=torch.float64, requires_grad=True)
    found = attention(h, memory)
    rows = torch.cat([memory, h], dim=1)
    wanted = torch.stack([torch.stack([attend(attention, h[b, i], rows[b, : M + i + 1])
                                       for i in range(T)]) for b in range(B)])
    assert_close(found, wanted, "attention over memory and segment, against loops")
    leaves = [h, memory, *attention.parameters()]
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        if b.numel():
            assert_close(a, b, "gradient of the attention against loops")


def test_masked_probabilities_are_exactly_zero():
    """However large a future score is, it gets nothing, also behind a memory."""
    attention = lesson.Attention(10, 3, 4).double()
    for W in (attention.W_q, attention.W_k):
        nn.init.normal_(W.weight, std=1e4)  # scores up to 10^9
    h, memory = torch.randn(2, 6, 10).double(), torch.randn(2, 3, 10).double()
    other = h.clone()
    other[:, 4:] = torch.randn(2, 2, 10)
    assert attention(h, memory)[:, :4].equal(attention(other, memory)[:, :4])


# ---- the model against the formulas -------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES)
def test_segments_with_memory_equal_one_loop_over_the_stream(T, M):
    """Each layer remembers its own input; forward and gradient of every weight, SG included.

    Wrong here: the memory of another layer, memory behind the segment, T rows kept in place of M,
    a mask without the memory, a gradient into the past.
    """
    model, x = tiny_model(N=2, M=M), torch.randint(11, (2, 3 * T + 1))
    found, memory = in_segments(model, x, T)
    wanted = torch.stack([stream_by_formula(model, lane, T, M) for lane in x])
    for s in range(0, x.shape[1], T):
        assert_close(found[:, s : s + T], wanted[:, s : s + T], f"logits of segment {s // T}")
    assert [m.shape for m in memory] == [(2, min(M, x.shape[1]), 12)] * 2
    leaves = list(model.parameters())
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of a weight", tolerance=1e-8)


def test_without_memory_it_is_lesson_1():
    """Same weights (the memory adds none), first segment: the same logits and gradients."""
    model = tiny_model()
    vanilla = lesson_1.VanillaTransformer(V=11, N=2, D=12, H=3, FF=20).double()
    vanilla.load_state_dict(model.state_dict())
    x = torch.randint(11, (3, 5))
    found, wanted = model(x)[0], vanilla(x)
    assert_close(found, wanted, "no memory yet, so nothing but lesson 1")
    slopes, slopes_1 = (gradients(out, list(m.parameters()))
                        for out, m in ((found, model), (wanted, vanilla)))
    for a, b in zip(slopes, slopes_1):
        assert_close(a, b, "gradients without a memory")


def test_memory_of_length_0_is_lesson_1_for_every_segment():
    """M = 0 remembers nothing, also in the second and third segment."""
    model = tiny_model(M=0)
    vanilla = lesson_1.VanillaTransformer(V=11, N=2, D=12, H=3, FF=20).double()
    vanilla.load_state_dict(model.state_dict())
    x = torch.randint(11, (2, 12))
    wanted = torch.cat([vanilla(part) for part in x.split(4, dim=1)], dim=1)
    assert_close(in_segments(model, x, 4)[0], wanted, "M = 0 in three segments")


def test_no_memory_is_not_a_memory_of_zeros():
    """Zeros are attended to: they take probability away from what is there."""
    model, x = tiny_model(N=2, M=4), torch.randint(11, (2, 5))
    zeros = [torch.zeros(2, 4, 12, dtype=torch.float64)] * 2
    empty = [torch.zeros(2, 0, 12, dtype=torch.float64)] * 2
    assert_close(model(x, None)[0], model(x, empty)[0], "None is a memory with no rows")
    assert (model(x, None)[0] - model(x, zeros)[0]).abs().max() > 1e-3


def test_future_is_hidden_and_all_of_the_memory_counts():
    """Change one token: nothing before it moves.  Change one row of memory: something does."""
    M, T = 4, 5
    model = tiny_model(N=2, M=M)
    memory, x = model(torch.randint(11, (1, M)))[1], torch.randint(11, (1, T))
    before = model(x, memory)[0]
    for t in range(T):
        other = x.clone()
        other[0, t] = (x[0, t] + 1) % 11
        moved = (model(other, memory)[0] - before).abs().amax(-1)[0] > 0
        assert moved.tolist() == [i >= t for i in range(T)], f"token {t} moves {moved.tolist()}"
    for layer in range(2):
        for row in range(M):
            other = [m.clone() for m in memory]
            other[layer][0, row] += 1
            moved = (model(x, other)[0] - before).abs().amax(-1)[0] > 0
            assert moved.all(), f"row {row} of layer {layer}'s memory is not seen by all queries"


def test_model_changes_no_memory_in_place():
    """The caller keeps the old memory: asked again, the model gives the same answer."""
    model, x = tiny_model(N=2, M=4), torch.randint(11, (2, 3))
    memory = model(torch.randint(11, (2, 4)))[1]
    copies = [m.clone() for m in memory]
    first, second = model(x, memory)[0], model(x, memory)[0]
    assert first.equal(second)
    assert all(m.equal(c) for m, c in zip(memory, copies))


def test_a_new_model_guesses_evenly():
    """Before training the loss is about ln V; a wrong scale of the tied embedding shows here."""
    V = 200
    x, y = torch.randint(V, (2, 4, 32))
    loss = lesson_1.token_losses(lesson.RecurrentTransformer(V)(x)[0], y).mean().item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


def test_no_weight_depends_on_the_memory_length():
    """A model is trained with one M and evaluated with another."""
    shapes = [{name: w.shape for name, w in tiny_model(M=M).named_parameters()} for M in (0, 9)]
    assert shapes[0] == shapes[1]
    with pytest.raises(ValueError, match=r"5\b.*\b12\b"):
        lesson.RecurrentTransformer(11, D=12, H=5)


# ---- the stop-gradient --------------------------------------------------------------------------

def test_gradient_stops_at_the_segment_boundary():
    """Segment 2's loss sends exactly 0 into segment 1, and something into segment 2."""
    model = tiny_model()
    x, y = torch.randint(11, (2, 2, 10))
    first, second = lesson.gradient_into(model, x, y, 5)
    assert first == 0.0, "the gradient flows into the past: the memory was not detached"
    assert second > 0
    assert not model.embedding._forward_hooks, "the model is left as it was found"


def test_gradient_into_would_see_a_leak(monkeypatch):
    """The measurement is worth something: without the stop-gradient it is not 0."""
    monkeypatch.setattr(lesson, "update_memory", lambda memory, h, M: h)
    x, y = torch.randint(11, (2, 2, 10))
    first, second = lesson.gradient_into(tiny_model(), x, y, 5)
    assert first > 0 and second > 0


def test_two_backward_passes_in_a_row_work():
    """As in training: each segment has a graph of its own, which its backward pass frees."""
    model, x = tiny_model(), torch.randint(11, (2, 5))
    logits, memory = model(x)
    logits.sum().backward()
    logits, memory = model(x, memory)
    try:
        logits.sum().backward()
    except RuntimeError as error:
        pytest.fail(f"the second segment reached back into the first one's graph: {error}")


# ---- what the lesson measures -------------------------------------------------------------------

@pytest.mark.parametrize("N", [1, 2, 3, 5])
@pytest.mark.parametrize("T, M", SHAPES)
def test_reach_equals_a_walk_through_the_layers(N, T, M):
    """From the last token of a segment, step down through every row that a memory still holds."""
    t = 50 * T - 1
    found, wanted = lesson.reach(N, T, M), t - min(sources(N, T, M, t))
    assert found == wanted, f"N = {N}, T = {T}, M = {M}: {found} tokens back, counted {wanted}"
    if M % T == 0:
        assert found == N * M + T - 1


@pytest.mark.parametrize("N, T, M", [(1, 4, 4), (2, 4, 4), (3, 2, 2), (2, 3, 6), (2, 4, 2),
                                     (3, 4, 6), (2, 5, 0)])
def test_changes_reach_exactly_as_far_as_the_walk_says(N, T, M):
    """The first token moves the losses that can see it, and all others by exactly 0."""
    change = lesson.change_by_distance(N, T, M, segments=6)
    assert change.shape == (6 * T,)
    moved = [t for t, c in enumerate(change.tolist()) if c != 0]
    assert moved == [t for t in range(6 * T) if 0 in sources(N, T, M, t)]
    if M % T == 0:
        assert max(moved) == lesson.reach(N, T, M)


def test_stream_losses_equal_segments_one_by_one():
    """-ln p of every token in nats, (B, n), with the memory handed on."""
    model = tiny_model(M=3)
    x, y = torch.randint(11, (2, 2, 9))
    p = in_segments(model, x, 4)[0].softmax(-1)
    wanted = torch.stack([torch.stack([-p[b, t, y[b, t]].log() for t in range(9)])
                          for b in range(2)])
    assert_close(lesson.stream_losses(model, x, y, 4), wanted, "losses of a stream")


@pytest.mark.parametrize("j, k", [(0, 6), (3, 4), (6, 0)])
def test_absolute_positions_confuse_memory_and_segment(j, k):
    """Tokens at the same position of two segments can change places unnoticed; at others, not."""
    model = lesson.RecurrentTransformer(V=16, N=1, D=12, H=3, FF=20, M=8).double()
    same, other = lesson.confusion(model, 8, j, j), lesson.confusion(model, 8, j, k)
    assert same < 1e-14, f"both at position {j}: one layer cannot notice, yet outputs move {same}"
    assert other > 1e-6, f"at positions {j} and {k} the exchange shows, yet outputs move {other}"


# ---- the lesson as a whole ----------------------------------------------------------------------

def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)


@pytest.mark.slow
def test_main_counts_the_reach_and_shows_the_confusion(monkeypatch, tmp_path, capsys):
    """Exact zeros, exact counts: one more segment for each layer."""
    monkeypatch.setattr(lesson, "RUNS", tmp_path / "runs")
    lesson.main()
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "02_reach.png").stat().st_size > 0
    assert "lesson 2 minus lesson 1: 0\n" in out
    assert "into segment 1 0\n" in out
    for N, farthest in ((1, 15), (2, 23), (3, 31), (4, 39)):
        segments = [1] * N + [0] * (6 - N)
        assert f"N = {N}: following segments {segments} -> {N}; farthest {farthest}," in out
    same, other = (float(line.split("by ")[1].split()[0])
                   for line in out.splitlines() if line.startswith("  by "))
    assert same < 1e-14 < 1e-5 < other
