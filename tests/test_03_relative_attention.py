"""Lesson 3: the four terms, each with its own vectors, and a model that knows only distances.

    pytest tests/test_03_relative_attention.py

The oracle for the score goes through the distances, a diagonal each; the one for the model reads
the whole stream at once, token by token.  Both are float64, from section 3.3 of the paper.
"""
import math
import re
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn

from course.checks import unit_circle
from helpers import assert_close, gradients, randomized, terms_by_distance, visible

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
lesson = import_module("03_relative_attention")

# T, M: one token, no memory, memory longer and shorter than a segment, K odd and even
SHAPES = [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5), (5, 3), (3, 3), (2, 6)]
TERMS = ("(a) q_i . k_j", "(b) q_i . (W_kR R_i-j)", "(c) u . k_j", "(d) v . (W_kR R_i-j)")


# ---- helpers ------------------------------------------------------------------------------------

def leaves_for(T, M, B=2, H=3, C=4, D=6):
    """Random q, k, R, W_kR, u, v.  R is random as well: no symmetry of a sinusoid can help."""
    shapes = ((B, H, T, C), (B, H, M + T, C), (M + T, D), (H, C, D), (H, C), (H, C))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def attend(attention, query_row, rows, u, v):
    """One query over the rows (K, D) that it may see; the last row is the query's own."""
    D, heads = len(query_row), []
    for n in range(attention.H):
        head = slice(n * attention.C, (n + 1) * attention.C)
        W_q, W_kE, W_kR, W_v = (W.weight[head] for W in (
            attention.W_q, attention.W_kE, attention.W_kR, attention.W_v))
        q, score = W_q @ query_row, []
        for j, row in enumerate(rows):
            k, r = W_kE @ row, W_kR @ unit_circle([len(rows) - 1 - j], D)[0]
            score.append((q @ k + q @ r + u[n] @ k + v[n] @ r) / math.sqrt(attention.C))
        p = torch.stack(score).exp()
        heads.append(sum(w * (W_v @ row) for w, row in zip(p / p.sum(), rows)))
    return attention.W_o.weight @ torch.cat(heads)


def norm(x, layer_norm):
    x = x - x.mean()
    return x / (x.pow(2).mean() + 1e-5).sqrt() * layer_norm.weight + layer_norm.bias


def stream_by_formula(model, x, T, M):
    """One stream (n,) in segments of T -> logits (n, V), as the paper's summary has it."""
    E, D = model.embedding.weight, model.embedding.weight.shape[1]
    h = [math.sqrt(D) * E[token] for token in x.tolist()]
    for layer in model.layers:
        first, _, second = layer.feed_forward
        above = []
        for i in range(len(h)):
            start = i // T * T  # of the segment that i stands in; before it is memory
            rows = [h[j].detach() if j < start else h[j]
                    for j in range(max(0, start - M), i + 1)]
            a = attend(layer.attention, h[i], rows, model.u, model.v)
            o = norm(h[i] + a, layer.norm_1)
            inner = (first.weight @ o + first.bias).clamp(min=0)
            above.append(norm(o + second.weight @ inner + second.bias, layer.norm_2))
        h = above
    return torch.stack(h) @ E.T


def tiny_model(N=2, M=4):
    return randomized(lesson.RelativeTransformer(V=11, N=N, D=12, H=3, FF=20, M=M))


def in_segments(model, x, T):
    memory, parts = None, []
    for part in x.split(T, dim=1):
        logits, memory = model(part, memory)
        parts.append(logits)
    return torch.cat(parts, dim=1), memory


class Spy(nn.Module):
    """Does not look at its input, notes what it is given, and numbers the memories it returns."""

    def __init__(self, V):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(V))
        self.given = []

    def forward(self, x, memory=None):
        self.given.append((x, memory))
        return self.scores.expand(*x.shape, -1), len(self.given)


# ---- the four terms -----------------------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES)
def test_four_terms_equal_those_of_one_distance_after_the_other(T, M):
    """The equation for one head; NaN exactly where the key is in the future."""
    q, k, R, W_kR, u, v = (z.detach().numpy() for z in leaves_for(T, M))
    q, k, W_kR, u, v = q[1, 2], k[1, 2], W_kR[2], u[2], v[2]
    found = lesson.four_terms(q, k, R, W_kR, u, v)
    heads = [torch.from_numpy(z) for z in (q, k, R, W_kR, u, v)]
    for n in (0, 1):
        heads[n] = heads[n][None, None]  # one lane, one head
    wanted = terms_by_distance(*heads[:3], *(z[None] for z in heads[3:]))[:, 0, 0]
    wanted[:, ~visible(T, M)] = torch.nan
    for name, a, b in zip(TERMS, found, wanted):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=f"term {name}")


@pytest.mark.parametrize("T, M", SHAPES)
def test_all_pairs_equal_one_distance_after_the_other_forward_and_gradient(T, M):
    """Each of the four terms by itself, and its gradients into q, k, R, W_kR, u and v."""
    leaves, seen = leaves_for(T, M), visible(T, M)
    found = lesson.four_terms_all_pairs(*leaves)
    assert found.shape == (4, 2, 3, T, M + T)
    found, wanted = found[..., seen], terms_by_distance(*leaves)[..., seen]
    for name, a, b in zip(TERMS, found, wanted):
        assert_close(a, b, f"term {name}, not divided by sqrt(C)")
    for name, a, b in zip(("q", "k", "R", "W_kR", "u", "v"),
                          gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}")


@pytest.mark.parametrize("T, M", SHAPES)
def test_row_of_R_is_the_distance_and_memory_counts(T, M):
    """With R[d] = 10 + d the position term shows which distance each cell took: M + i - j."""
    one = torch.ones(1, 1, 1)
    R = 10 + torch.arange(M + T, dtype=torch.float32)[:, None]
    terms = lesson.four_terms_all_pairs(one.expand(1, 1, T, 1), one.expand(1, 1, M + T, 1), R, one,
                                        one[0], one[0])
    for name, term in ((TERMS[1], terms[1, 0, 0]), (TERMS[3], terms[3, 0, 0])):
        for i, j in visible(T, M).nonzero().tolist():
            distance = int(term[i, j]) - 10
            assert distance == M + i - j, (
                f"term {name}: query {i} is key {M + i}, so key {j} is {M + i - j} back, not "
                f"{distance}" + (" (the memory is forgotten)" if distance == i - j else ""))


def test_u_belongs_to_content_and_v_to_position():
    """u = 0 removes term (c) and nothing else, v = 0 term (d): Shaw's score is what remains."""
    *others, u, v = leaves_for(3, 2)
    whole, none = lesson.four_terms_all_pairs(*others, u, v)[..., visible(3, 2)], 0 * u
    for zeroed, gone in (((none, v), 2), ((u, none), 3)):
        terms = lesson.four_terms_all_pairs(*others, *zeroed)[..., visible(3, 2)]
        for n, name in enumerate(TERMS):
            if n == gone:
                assert (terms[n] == 0).all(), f"term {name} is left although its bias is 0"
            else:
                assert terms[n].equal(whole[n]), f"term {name} changed with the other bias"


# ---- the attention and the model ----------------------------------------------------------------

@pytest.mark.parametrize("T, M", SHAPES)
def test_attention_equals_loops_forward_and_gradient(T, M):
    """Softmax of all four terms over sqrt(C), C the width of a head, and values from h~."""
    B, D, H, C = 2, 10, 3, 4
    attention = lesson.RelativeAttention(D, H, C).double()
    shapes = ((B, T, D), (B, M, D), (H, C), (H, C))
    h, memory, u, v = leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = attention(h, memory, u, v)
    rows = torch.cat([memory, h], dim=1)
    wanted = torch.stack([torch.stack([attend(attention, h[b, i], rows[b, : M + i + 1], u, v)
                                       for i in range(T)]) for b in range(B)])
    assert_close(found, wanted, "attention against loops")
    names = ["h", "memory", "u", "v", *(name for name, _ in attention.named_parameters())]
    leaves += attention.parameters()
    for name, a, b in zip(names, gradients(found, leaves), gradients(wanted, leaves)):
        if b.numel():
            assert_close(a, b, f"gradient into {name}")


def test_attention_shows_the_terms_that_it_uses():
    """`terms` are those of its own projections and the sinusoid, not scaled and not masked."""
    T, M, D = 3, 2, 10
    attention = lesson.RelativeAttention(D, 3, 4).double()
    h, memory = torch.randn(2, T, D).double(), torch.randn(2, M, D).double()
    u, v = torch.randn(2, 3, 4).double()
    found = attention.terms(h, memory, u, v)[..., visible(T, M)]
    rows = torch.cat([memory, h], dim=1)
    q, k = (torch.stack([z @ W.weight[n * 4 : n * 4 + 4].T for n in range(3)], dim=1)
            for z, W in ((h, attention.W_q), (rows, attention.W_kE)))
    R = unit_circle(range(M + T), D)
    W_kR = torch.stack([attention.W_kR.weight[n * 4 : n * 4 + 4] for n in range(3)])
    wanted = terms_by_distance(q, k, R, W_kR, u, v)[..., visible(T, M)]
    assert_close(found, wanted, "terms of the attention")


def test_masked_probabilities_are_exactly_zero():
    """However large a future score is, it gets nothing; the mask covers content and position."""
    attention = lesson.RelativeAttention(10, 3, 4).double()
    for W in (attention.W_q, attention.W_kE, attention.W_kR):
        nn.init.normal_(W.weight, std=1e4)  # scores up to 10^9
    h, memory = torch.randn(2, 6, 10).double(), torch.randn(2, 3, 10).double()
    u, v = torch.randn(2, 3, 4).double()
    other = h.clone()
    other[:, 4:] = torch.randn(2, 2, 10)
    assert attention(h, memory, u, v)[:, :4].equal(attention(other, memory, u, v)[:, :4])


@pytest.mark.parametrize("T, M", SHAPES)
def test_segments_with_memory_equal_one_loop_over_the_stream(T, M):
    """Each layer remembers its own input; forward and gradient of every weight, SG included."""
    model, x = tiny_model(N=2, M=M), torch.randint(11, (2, 2 * T + 1))
    found, memory = in_segments(model, x, T)
    wanted = torch.stack([stream_by_formula(model, lane, T, M) for lane in x])
    for s in range(0, x.shape[1], T):
        assert_close(found[:, s : s + T], wanted[:, s : s + T], f"logits of segment {s // T}")
    assert [m.shape for m in memory] == [(2, min(M, x.shape[1]), 12)] * 2
    names, leaves = zip(*model.named_parameters())
    for name, a, b in zip(names, gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"gradient into {name}", tolerance=1e-8)


@pytest.mark.parametrize("n, T", [(12, 4), (13, 4), (7, 1), (9, 20)])
def test_segments_equal_one_pass_if_nothing_is_forgotten(n, T):
    """With distances in place of positions a cut leaves no trace; lesson 2 cannot do that."""
    x = torch.randint(11, (2, n))
    assert lesson.segments_against_one_pass(tiny_model(M=n), x, T) < 1e-12
    if T < n:
        absolute = randomized(lesson_2.RecurrentTransformer(V=11, N=2, D=12, H=3, FF=20, M=n))
        assert lesson.segments_against_one_pass(absolute, x, T) > 1e-3
        assert lesson.segments_against_one_pass(tiny_model(M=0), x, T) > 1e-3, (
            "the measurement must notice a memory that is missing")


def test_distances_end_the_confusion_of_lesson_2():
    """A token in memory and one in the segment can no longer change places unnoticed."""
    model = lesson.RelativeTransformer(V=16, N=1, D=12, H=3, FF=20, M=8).double()
    nn.init.normal_(model.v)
    assert lesson_2.confusion(model, 8, 3, 3) > 1e-6


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


def test_first_segment_has_no_memory_rather_than_zeros():
    """A memory of zeros is attended to and changes the loss."""
    model, x = tiny_model(N=2, M=4), torch.randint(11, (2, 5))
    zeros, empty = ([torch.zeros(2, m, 12, dtype=torch.float64)] * 2 for m in (4, 0))
    assert_close(model(x)[0], model(x, empty)[0], "None is a memory with no rows")
    assert (model(x)[0] - model(x, zeros)[0]).abs().max() > 1e-3


def test_gradient_stops_at_the_segment_boundary():
    """Segment 2's loss sends exactly 0 into segment 1; two backward passes in a row work."""
    model = tiny_model()
    x, y = torch.randint(11, (2, 2, 10))
    first, second = lesson_2.gradient_into(model, x, y, 5)
    assert first == 0.0 and second > 0
    logits, memory = model(x[:, :5])
    logits.sum().backward()
    model(x[:, 5:], memory)[0].sum().backward()


def test_u_and_v_are_two_weights_shared_by_all_layers():
    """The paper's default: one u and one v, (H, C) each, and W_kR in every layer; R is fixed."""
    V, N, D, H, FF = 11, 3, 12, 3, 20
    model = lesson.RelativeTransformer(V, N=N, D=D, H=H, FF=FF)
    assert model.u.shape == model.v.shape == (H, D // H)
    layer = 5 * D * D + (D * FF + FF) + (FF * D + D) + 2 * (D + D)
    assert sum(w.numel() for w in model.parameters()) == V * D + N * layer + 2 * D
    with pytest.raises(ValueError, match=r"5\b.*\b12\b"):
        lesson.RelativeTransformer(11, D=12, H=5)


def test_a_new_model_guesses_evenly():
    """Before training the loss is about ln V; a wrong scale of the tied embedding shows here."""
    V = 200
    x, y = torch.randint(V, (2, 4, 32))
    loss = lesson_1.token_losses(lesson.RelativeTransformer(V)(x)[0], y).mean().item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


# ---- training and measuring ---------------------------------------------------------------------

def test_fit_hands_the_memory_on_and_forgets_it_at_the_start_of_the_text():
    """Segment s + 1 gets the memory that segment s gave; a new round begins without one."""
    model, tokens = Spy(11), torch.randint(11, (23,))
    lesson.fit(model, tokens, B=2, T=4, steps=8)  # 11 inputs a lane: 3 segments a round
    order = [x for x, _ in lesson_1.segments(lesson_1.lanes(tokens, 2), 4)]
    assert all(x.equal(order[step % 3]) for step, (x, _) in enumerate(model.given))
    assert [memory for _, memory in model.given] == [None, 1, 2, None, 4, 5, None, 7]


@pytest.mark.parametrize("tokens", [torch.full((201,), 3), torch.arange(201) % 11])
def test_fit_takes_the_steps_of_lesson_1(monkeypatch, tokens):
    """Fresh gradients of the mean loss, clipped to norm 0.25, and the rates of lesson 1."""
    batches = list(lesson_1.segments(lesson_1.lanes(tokens, 4), 9))
    rates, spy = [], Spy(11)
    nn.init.zeros_(spy.scores)

    class Recorder(torch.optim.Adam):
        def step(self, *args):
            if isinstance(model, Spy):  # without context the gradient is p minus what occurs
                _, y = batches[(len(rates) - 70) % len(batches)]
                occurs = y.flatten().bincount(minlength=11) / y.numel()
                wanted = spy.scores.detach().softmax(-1) - occurs
                wanted *= min(1, 0.25 / wanted.norm())
                assert_close(spy.scores.grad, wanted, "gradient of this step alone", 1e-5)
            rates.append(self.param_groups[0]["lr"])
            return super().step(*args)

    monkeypatch.setattr(torch.optim, "Adam", Recorder)
    for module, model in ((lesson_1, lesson_1.VanillaTransformer(11, N=1, D=12, H=3, FF=20)),
                          (lesson, spy)):
        module.fit(model, tokens, B=4, T=9, steps=70, lr=1e-3)
    assert len(rates) == 140 and rates[:70] == rates[70:]


def test_fit_lowers_the_loss_on_a_text_that_repeats():
    """Trained to copy its input, or to look two tokens ahead, the model would not get there."""
    text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6] * 12).to(torch.uint8)
    model = lesson.RelativeTransformer(11, N=2, D=12, H=3, FF=20, M=4)
    before = lesson.bits_per_token(model, text, 8)
    lesson.fit(model, text, B=2, T=8, steps=100)
    after = lesson.bits_per_token(model, text, 8)
    assert after < before / 2, f"{before:.2f} bits before, {after:.2f} after 100 steps"


@pytest.mark.parametrize("n, T", [(12, 5), (11, 5), (9, 1), (5, 20)])
def test_bits_per_token_is_a_mean_over_tokens(n, T):
    """A short last segment counts by its tokens, not as a segment; nats become bits."""
    model, tokens = Spy(7), torch.randint(7, (n,)).to(torch.uint8)
    p = model.scores.detach().double().exp()
    wanted = sum(-math.log2(p[t] / p.sum()) for t in tokens[1:].tolist()) / (n - 1)
    assert lesson.bits_per_token(model, tokens, T) == pytest.approx(wanted, abs=1e-5)
    calls = math.ceil((n - 1) / T)
    assert [memory for _, memory in model.given] == [None, *range(1, calls)]
    assert torch.cat([x for x, _ in model.given], dim=1).equal(tokens[None, :-1].long())


# ---- the lesson as a whole ----------------------------------------------------------------------

@pytest.mark.slow
def test_main_shows_that_distances_survive_the_cut(monkeypatch, tmp_path, capsys):
    """Loops equal pairs, segments equal one pass (not so in lesson 2), and every term is used."""
    monkeypatch.setattr(lesson, "RUNS", tmp_path / "runs")
    lesson.main()
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "03_four_terms.png").stat().st_size > 0
    cells, worst = re.search(r"(\d+) visible cells x 4 terms, float64: (\S+)", out).groups()
    assert int(cells) == 3 * 4 + 3 * 4 // 2 and float(worst) < 1e-12
    absolute, relative = (float(re.search(rf"{name} \(.*\) +(\S+)", out)[1])
                          for name in ("absolute", "relative"))
    assert relative < 1e-12 and absolute > 1e-3
    trained = float(re.search(r"trained on text: (\S+) bits", out)[1])
    maimed = [float(bits) for bits in re.findall(r"^  .* 0, so .*: (\S+)$", out, re.M)]
    assert len(maimed) == 3 and all(trained - 0.1 < bits < trained + 3 for bits in maimed)
