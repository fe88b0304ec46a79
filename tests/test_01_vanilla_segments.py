"""Lesson 1: a stream cut so that nothing is lost or mixed, and a model that cannot cheat.

    pytest tests/test_01_vanilla_segments.py

The oracles are plain loops, written from the formulas in float64.
"""
import math
import re
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn

from course.checks import unit_circle
from helpers import assert_close, gradients, randomized, run_examples

lesson = import_module("01_vanilla_segments")


# ---- helpers ------------------------------------------------------------------------------------

def attend_by_loops(attention, h):
    """(T, D) -> (T, D): query i over keys 0..i, one head after another."""
    outputs = []
    for i in range(len(h)):
        heads = []
        for n in range(attention.H):
            head = slice(n * attention.C, (n + 1) * attention.C)
            W_q, W_k, W_v = (W.weight[head] for W in (attention.W_q, attention.W_k, attention.W_v))
            q = W_q @ h[i]
            score = [q @ (W_k @ h[j]) / math.sqrt(attention.C) for j in range(i + 1)]
            total = sum(s.exp() for s in score)
            heads.append(sum(s.exp() / total * (W_v @ h[j]) for j, s in enumerate(score)))
        outputs.append(attention.W_o.weight @ torch.cat(heads))
    return torch.stack(outputs)


def norm(x, layer_norm):
    x = x - x.mean(-1, keepdim=True)
    return (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer_norm.weight
            + layer_norm.bias)


def logits_by_formula(model, x):
    """One segment (T,) -> logits (T, V): embedding, position, post-norm layers, tied output."""
    E = model.embedding.weight
    D = E.shape[1]
    h = torch.stack([math.sqrt(D) * E[token] + unit_circle([t], D)[0]
                     for t, token in enumerate(x.tolist())])
    for layer in model.layers:
        h = norm(h + attend_by_loops(layer.attention, h), layer.norm_1)
        first, _, second = layer.feed_forward
        inner = (h @ first.weight.T + first.bias).clamp(min=0)
        h = norm(h + inner @ second.weight.T + second.bias, layer.norm_2)
    return h @ E.T


def nll(logits, y):
    """-ln p(y) in nats of one prediction (V,)."""
    return (logits.exp().sum().log() - logits[y]).item()


class Unigram(nn.Module):
    """Does not look at its input: the loss of a target tells which token it was."""

    def __init__(self, V):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(V))

    def forward(self, x):
        return self.scores.expand(*x.shape, -1)

    def cost(self, y):
        return torch.tensor([nll(self.scores.detach(), t) for t in y.flatten()]).view(y.shape)


class Counter(nn.Module):
    """Is sure that token t + step follows token t (modulo V)."""

    def __init__(self, V, step):
        super().__init__()
        self.V, self.step = V, step

    def forward(self, x):
        return 9.0 * nn.functional.one_hot((x + self.step) % self.V, self.V)


def tiny_model(V=11):
    return lesson.VanillaTransformer(V, N=2, D=12, H=3, FF=20)


# ---- the data -----------------------------------------------------------------------------------

@pytest.mark.parametrize("n, B", [(23, 2), (24, 3), (7, 1), (2, 1), (6, 5), (101, 7)])
def test_lanes_are_contiguous_pieces_of_the_stream(n, B):
    """The inputs of all lanes, one behind the other, are the stream."""
    stream = 100 + torch.arange(n)
    L = (n - 1) // B
    found = lesson.lanes(stream, B)
    assert found.shape == (B, L + 1), (
        f"{n} tokens in {B} lanes: {L} inputs a lane and one target more is (B, L + 1) = "
        f"{(B, L + 1)}, got {tuple(found.shape)}")
    assert found[:, :-1].flatten().equal(stream[: B * L]), (
        "a lane is a piece of the stream as it stands; neighbouring tokens dealt out to different "
        "lanes leave every lane with a text that nobody wrote")
    assert found[:, -1].equal(found[:, -2] + 1), "the last target is the stream's next token"


@pytest.mark.parametrize("n, B, T", [(23, 2, 4), (23, 2, 11), (23, 2, 30), (40, 3, 1), (9, 1, 3)])
def test_every_target_is_the_next_token_of_the_stream(n, B, T):
    """y is x moved by exactly one, also at the end of a segment and at the end of a lane."""
    targets = []
    for x, y in lesson.segments(lesson.lanes(torch.arange(n), B), T):
        assert x.shape == y.shape
        assert y.tolist() == (x + 1).tolist(), (
            "in the stream 0, 1, 2, ... the target of t is t + 1: "
            + ("these targets are not shifted" if y.equal(x) else
               "these targets are shifted twice" if y.equal(x + 2) else f"x {x}, y {y}"))
        targets += y.flatten().tolist()
    wanted = list(range(1, B * ((n - 1) // B) + 1))
    assert sorted(targets) == wanted, "each token but the first is predicted exactly once"


@pytest.mark.parametrize("B, L, T", [(2, 11, 4), (3, 12, 4), (2, 3, 7), (5, 6, 1), (1, 9, 2)])
def test_segments_come_in_stream_order(B, L, T):
    """Row b goes on where row b of the segment before stopped; a short rest is not thrown away."""
    table = torch.randint(50, (B, L + 1))
    parts = list(lesson.segments(table, T))
    widths = [x.shape[1] for x, _ in parts]
    assert widths == [T] * (L // T) + [L % T] * (L % T > 0)
    assert torch.cat([x for x, _ in parts], dim=1).equal(table[:, :-1])
    assert torch.cat([y for _, y in parts], dim=1).equal(table[:, 1:])


def test_segments_can_begin_where_a_run_was_interrupted():
    """From column `start` on, the same segments come as without an interruption."""
    table = lesson.lanes(torch.arange(47), 2)  # 23 inputs a lane
    whole = list(lesson.segments(table, 5))
    for done in range(len(whole) + 1):
        rest = list(lesson.segments(table, 5, start=5 * done))
        assert len(rest) == len(whole) - done
        for (x, y), (x_whole, y_whole) in zip(rest, whole[done:]):
            assert x.equal(x_whole) and y.equal(y_whole)


def test_segments_are_int64_as_an_embedding_wants_them():
    """A corpus is stored as one byte a token; arithmetic on such tokens would wrap around."""
    table = lesson.lanes(torch.arange(250, 256).to(torch.uint8), 1)
    x, y = next(lesson.segments(table, 4))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert (x.tolist(), y.tolist()) == ([[250, 251, 252, 253]], [[251, 252, 253, 254]])


def test_impossible_cuts_are_refused_with_their_numbers():
    """The message says what was asked; its wording is free."""
    for B in (0, -2):
        with pytest.raises(ValueError, match=str(B)):
            lesson.lanes(torch.arange(9), B)
    for n, B in ((5, 5), (1, 1), (0, 1), (3, 7)):
        with pytest.raises(ValueError, match=rf"\b{n}\b"):
            lesson.lanes(torch.arange(n), B)
    for T in (0, -3):
        with pytest.raises(ValueError, match=str(T)):
            list(lesson.segments(torch.arange(10)[None], T))


# ---- the model, from leaf to root ---------------------------------------------------------------

@pytest.mark.parametrize("D", [2, 6, 10])
def test_sinusoid_is_all_sines_then_all_cosines(D):
    """Position p at frequency 10000^(-2k/D), in the layout of the official code."""
    positions = [0, 1, 2, 7, 1000, 123456]
    found = lesson.sinusoid(torch.tensor(positions), D)
    assert found.dtype == torch.float64, "float32 angles are wrong in the 3rd digit far out"
    assert_close(found, unit_circle(positions, D),
                 "sines first, then cosines, not interleaved", tolerance=1e-9)


def test_sinusoid_keeps_the_order_of_the_positions():
    """Row r belongs to position[r], whatever the order: later lessons ask for distances."""
    position = torch.tensor([5, 0, 3, 3])
    found, ordered = lesson.sinusoid(position, 4), lesson.sinusoid(torch.arange(6), 4)
    assert found.equal(ordered[position])


def test_widths_that_do_not_come_out_even_are_refused():
    """An odd sinusoid, or heads that do not divide the width: the message holds the numbers."""
    with pytest.raises(ValueError, match="7"):
        lesson.sinusoid(torch.arange(3), 7)
    assert lesson.head_width(12, 3) == 4
    for H in (5, 0, -3, 24):
        with pytest.raises(ValueError, match=rf"{H}\b.*\b12\b"):
            lesson.head_width(12, H)
    with pytest.raises(ValueError, match=r"5\b.*\b12\b"):
        lesson.VanillaTransformer(11, D=12, H=5)


@pytest.mark.parametrize("B, T", [(2, 5), (3, 1), (1, 4)])
def test_attention_equals_loops_forward_and_gradient(B, T):
    """softmax(q . k / sqrt(C)) v over keys 0..i; C is the width of a head, not of the model."""
    D, H, C = 10, 3, 4
    attention = lesson.Attention(D, H, C).double()
    h = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    found, wanted = attention(h), torch.stack([attend_by_loops(attention, lane) for lane in h])
    assert_close(found, wanted, "attention against loops")
    leaves = [h, *attention.parameters()]
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of the attention against loops")


def test_masked_probabilities_are_exactly_zero():
    """However large a future score is, it gets nothing: the mask is -inf, not a large number."""
    attention = lesson.Attention(10, 3, 4).double()
    for W in (attention.W_q, attention.W_k):
        nn.init.normal_(W.weight, std=1e4)  # scores up to 10^9
    h = torch.randn(2, 6, 10, dtype=torch.float64)
    other = h.clone()
    other[:, 4:] = torch.randn(2, 2, 10, dtype=torch.float64)
    assert attention(h)[:, :4].equal(attention(other)[:, :4]), "the future shows through the mask"


def test_layer_hands_its_attention_what_it_needs():
    """Lessons 2 and 3 put their own attention in; memory, u and v arrive in the order given."""
    given = []

    class Attention(nn.Module):
        def forward(self, *args):
            given.extend(args)
            return args[0]

    h = torch.randn(2, 3, 4)
    lesson.Layer(Attention(), 4, 8)(h, "memory", "u", "v")
    assert given[0] is h and given[1:] == ["memory", "u", "v"]


def test_model_equals_the_formulas_forward_and_gradient():
    """sqrt(D) on the embedding, positions, norms after the sums, ReLU, tied output."""
    model = randomized(tiny_model())
    x = torch.randint(11, (2, 5))
    found, wanted = model(x), torch.stack([logits_by_formula(model, lane) for lane in x])
    assert_close(found, wanted, "logits against the formulas", tolerance=1e-10)
    leaves = list(model.parameters())
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of a weight against the formulas", tolerance=1e-9)


def test_no_prediction_sees_a_later_token_and_all_see_each_earlier_one():
    """Change token t: outputs before t do not move at all, those from t on do."""
    model = randomized(tiny_model())
    x = torch.randint(11, (1, 7))
    before = model(x)
    for t in range(7):
        other = x.clone()
        other[0, t] = (x[0, t] + 1) % 11
        moved = (model(other) - before).abs().amax(-1)[0] > 0
        assert not moved[:t].any(), f"token {t} shows in predictions before it"
        assert moved[t:].all(), f"token {t} is invisible to predictions after it"


def test_model_has_no_weights_of_its_own_for_the_output():
    """The output layer is the embedding: the count has V * D once."""
    V, N, D, FF = 11, 2, 12, 20
    layer = 4 * D * D + (D * FF + FF) + (FF * D + D) + 2 * (D + D)
    assert sum(w.numel() for w in tiny_model(V).parameters()) == V * D + N * layer


def test_a_new_model_guesses_evenly():
    """Before training the loss is about ln V; a wrong scale of the tied embedding shows here."""
    V = 200
    model = lesson.VanillaTransformer(V)
    x, y = torch.randint(V, (2, 4, 64))
    loss = lesson.token_losses(model(x), y).mean().item()
    assert loss == pytest.approx(math.log(V), rel=0.05)


def test_token_losses_are_nats_for_each_token():
    """-ln softmax(logits)[y], not averaged, and its gradient is p - 1 at the target."""
    B, T, V = 2, 3, 5
    logits = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    y = torch.randint(V, (B, T))
    found = lesson.token_losses(logits, y)
    wanted = torch.tensor([[nll(logits[b, t].detach(), y[b, t]) for t in range(T)]
                           for b in range(B)], dtype=torch.float64)
    assert_close(found.detach(), wanted, "losses in nats, one a token")
    p = np.exp(logits.detach().numpy())
    p /= p.sum(-1, keepdims=True)
    slope = torch.from_numpy(p - np.eye(V)[y.numpy()])
    assert_close(torch.autograd.grad(found.sum(), logits)[0], slope, "gradient p - 1[y]")


# ---- training and the two ways to evaluate ------------------------------------------------------

def test_progress_hands_on_every_item_and_keeps_stdout_clean(monkeypatch, capsys):
    """Progress is for the eye: it goes to stderr, and what is measured goes through unchanged."""
    monkeypatch.setattr(lesson.time, "monotonic", iter(range(1000)).__next__)  # a slow computer
    assert list(lesson.progress("abc", "step", 3)) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 2/3" in err


def test_fit_lowers_the_loss_on_a_text_that_repeats():
    """Trained to copy its input, or to look two tokens ahead, the model would not get there."""
    text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6] * 12).to(torch.uint8)
    model = tiny_model()
    x, y = next(lesson.segments(lesson.lanes(text, 1), 8))
    before = lesson.token_losses(model(x), y).mean().item()
    lesson.fit(model, text, B=2, T=8, steps=100)
    after = lesson.token_losses(model(x), y).mean().item()
    assert after < before / 2, f"loss {before:.2f} before, {after:.2f} after 100 steps"


@pytest.mark.parametrize("tokens", [torch.full((201,), 3), torch.arange(201) % 11])
def test_fit_steps_along_the_gradient_of_one_segment_after_the_other(monkeypatch, tokens):
    """Lanes in stream order, round and round; fresh gradients, clipped; a rate that falls to 0."""
    model, read, rates = Unigram(11), [], []
    nn.init.zeros_(model.scores)  # the first text's gradients are clipped, the second's are not
    batches = list(lesson.segments(lesson.lanes(tokens, 4), 9))

    class Recorder(torch.optim.Adam):
        def step(self, *args):
            x, y = batches[len(rates) % len(batches)]
            assert read[-1].equal(x), f"step {len(rates)} reads another segment"
            occurs = y.flatten().bincount(minlength=11) / y.numel()
            wanted = model.scores.detach().softmax(-1) - occurs  # of the mean loss
            wanted *= min(1, 0.25 / wanted.norm())
            assert_close(model.scores.grad, wanted, f"gradient of step {len(rates)} alone", 1e-5)
            rates.append(self.param_groups[0]["lr"])
            return super().step(*args)

    monkeypatch.setattr(torch.optim, "Adam", Recorder)
    model.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    lesson.fit(model, tokens, B=4, T=9, steps=80, lr=1e-3)
    assert len(rates) == 80
    assert rates.index(max(rates)) > 10 and max(rates) <= 1e-3, "the rate warms up"
    assert rates[-1] == pytest.approx(1e-3 / 80), "and falls linearly to 0"


@pytest.mark.parametrize("n, T", [(23, 4), (21, 5), (9, 1), (70 * 3 + 2, 3)])
def test_one_pass_losses_equal_a_loop_over_segments(n, T):
    """Segment s holds tokens sT..sT+T-1 and knows nothing else; more than one batch of 64 works."""
    model, tokens = randomized(tiny_model()), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson.one_pass_losses(model, tokens, T)
    assert found.shape == ((n - 1) // T, T) and not found.requires_grad
    for s in range(len(found)):
        x, y = tokens[s * T : s * T + T].long(), tokens[s * T + 1 : s * T + T + 1].long()
        logits = model(x[None])[0].detach()
        wanted = torch.tensor([nll(row, t) for row, t in zip(logits, y)], dtype=torch.float64)
        assert_close(found[s], wanted, f"segment {s} of {len(found)}", tolerance=1e-10)


@pytest.mark.parametrize("n, T, every", [
    (12, 4, 1), (9, 1, 1), (70, 3, 1), (6, 5, 1), (23, 4, 3), (24, 4, 3), (25, 4, 3), (9, 2, 50)])
def test_sliding_window_losses_equal_a_loop_over_windows(n, T, every):
    """Token t is predicted from tokens t-T..t-1 alone, in a window of its own."""
    model, tokens = randomized(tiny_model()), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson.sliding_window_losses(model, tokens, T, every)
    assert not found.requires_grad
    wanted = [nll(model(tokens[t - T : t].long()[None])[0, -1].detach(), int(tokens[t]))
              for t in range(T, n, every)]
    assert_close(found, torch.tensor(wanted, dtype=torch.float64), "windows", tolerance=1e-10)


@pytest.mark.parametrize("every", [1, 3, 7])
def test_both_evaluations_predict_the_same_tokens(every):
    """From token T on, one pass pays for exactly the tokens that the sliding window pays for."""
    T, V = 8, 13
    model, tokens = Unigram(V), torch.randint(V, (9 * T + 1,))
    window = lesson.sliding_window_losses(model, tokens, T, every)
    one = lesson.one_pass_losses(model, tokens, T).flatten()[T - 1 :: every]
    wanted = model.cost(tokens[T::every])
    assert_close(window, wanted, "the window's targets", tolerance=1e-5)
    assert_close(one, wanted, "one pass's targets", tolerance=1e-5)


@pytest.mark.parametrize("step, surprised", [(1, False), (0, True), (2, True)])
def test_targets_are_one_token_ahead_in_every_loss(step, surprised):
    """Only who predicts t + 1 is right; a copying model pays, so no loss compares x with itself."""
    V, T = 7, 4
    model, tokens = Counter(V, step), torch.arange(30) % V
    right = math.log(1 + (V - 1) * math.exp(-9))
    wanted = right + 9 * surprised
    for losses in (lesson.one_pass_losses(model, tokens, T),
                   lesson.sliding_window_losses(model, tokens, T)):
        assert losses.mean().item() == pytest.approx(wanted, abs=1e-4)


# ---- the lesson as a whole ----------------------------------------------------------------------

def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)


@pytest.mark.slow
def test_main_shows_what_fragmentation_costs(monkeypatch, tmp_path, capsys):
    """The first bytes of a segment pay, and the cure is exactly T times the work."""
    monkeypatch.setattr(lesson, "RUNS", tmp_path / "runs")
    lesson.main()
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "01_fragmentation.png").stat().st_size > 0
    assert "segments of 64 bytes" in out
    first, second, later = map(float, re.search(
        r"the first of a\s+segment (\S+),\s+the second (\S+), the later half (\S+):",
        out).groups())
    assert first > second > later, "with more context a prediction is cheaper"
    count, window, one = re.search(
        r"(\d+) predictions: (\S+) bits per byte; the same in one pass: (\S+)", out).groups()
    inputs = (len(lesson.load("stdlib").valid) - 1) // 64 * 64
    assert int(count) == len(range(64, inputs + 1, 59))
    assert float(window) < float(one)
    assert "for a prediction: 64 to 1;" in out
