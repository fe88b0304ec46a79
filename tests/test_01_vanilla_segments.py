"""Lesson 1: a stream cut so that nothing is lost or mixed, and a model that cannot cheat.

    pytest -k lanes       the rules of one exercise, in the order in which they stand here
    pytest -k segments
    pytest -k sinusoid
    pytest tests/test_01_vanilla_segments.py

A test that takes an exercise by its name is one of its rules; what follows below is about the
whole lesson, and uses oracles (plain loops, written from the formulas) in place of the exercises.
"""
import math
import os
import re
import sys
import time
from importlib import import_module
from itertools import islice

import pytest
import torch
import torch.nn as nn

from course import oracles
from course.rules import same
from helpers import assert_close, gradients, randomized, run_examples

lesson = import_module("01_vanilla_segments")


# ---- exercise lanes -----------------------------------------------------------------------------
# The stream is 0, 1, 2, ...: each number says where it stood.

@pytest.mark.parametrize("n", [15, 13])
def test_a_lane_is_one_piece_of_the_stream(lanes, n):
    """Lane b is one piece of the stream, L + 1 tokens from b * L on, with L = (n - 1) // B: its
    last token is the first of the next lane. What is left over at the end is not used."""
    assert same(lanes(torch.arange(n), 3), [[0, 1, 2, 3, 4],
                                            [4, 5, 6, 7, 8],
                                            [8, 9, 10, 11, 12]])


def test_one_input_a_lane(lanes):
    """B + 1 tokens are enough: each lane has one input and its target."""
    assert same(lanes(torch.arange(5), 4), [[0, 1], [1, 2], [2, 3], [3, 4]])


@pytest.mark.parametrize("n, B", [(8, 2), (24, 3), (7, 1), (2, 1), (9, 5), (101, 7)])
def test_any_tokens(lanes, n, B):
    """Any tokens may stand in a stream of any length; lanes only cuts it."""
    stream = torch.randint(1000, (n,))
    assert same(lanes(stream.clone(), B), oracles.lanes(stream, B))


def test_tokens_keep_their_type(lanes):
    """The tokens keep their dtype: a corpus is stored in bytes, and in int64 takes eight times as
    much."""
    assert lanes(torch.arange(11, dtype=torch.uint8), 2).dtype == torch.uint8


def test_the_stream_stays_as_it_was(lanes):
    """The stream itself is not changed."""
    stream = torch.arange(15)
    lanes(stream, 3)
    assert same(stream, torch.arange(15))


@pytest.mark.parametrize("B", [0, -2])
def test_less_than_one_lane_is_refused(lanes, B):
    """B < 1 is refused with a ValueError."""
    with pytest.raises(ValueError):
        lanes(torch.arange(9), B)


@pytest.mark.parametrize("n, B", [(5, 5), (3, 7), (1, 1), (0, 1)])
def test_a_stream_too_short_is_refused(lanes, n, B):
    """A stream that has not one input for each lane, and one target more, is refused with a
    ValueError."""
    with pytest.raises(ValueError):
        lanes(torch.arange(n), B)


# ---- exercise segments --------------------------------------------------------------------------
# Three lanes of 10 inputs and a last target: lane b holds 100 * b + column.

def three_lanes():
    return 100 * torch.arange(3)[:, None] + torch.arange(11)


def listed(result):
    """The segments as a list, at most 20 of them: some never end."""
    return list(islice(result, 20))


def joined(result):
    """One segment after another, x above y: (2, B, ...)."""
    return torch.cat([torch.stack([x, y]) for x, y in listed(result)], dim=-1)


def test_x_begins_with_the_first_column(segments):
    """The first x is the first T columns of all lanes, (B, T)."""
    x, y = next(segments(three_lanes(), 4))
    assert same(x, [[0, 1, 2, 3],
                    [100, 101, 102, 103],
                    [200, 201, 202, 203]])


def test_y_is_one_column_further(segments):
    """y is one column further than x: the target of each input is the next token of its lane."""
    x, y = next(segments(three_lanes(), 4))
    assert same(y, [[1, 2, 3, 4],
                    [101, 102, 103, 104],
                    [201, 202, 203, 204]])


@pytest.mark.parametrize("T, start, widths", [
    (4, 0, (4, 4, 2)), (5, 0, (5, 5)), (11, 0, (10,)), (1, 7, (1, 1, 1)), (4, 10, ())])
def test_widths_of_the_segments(segments, T, start, widths):
    """Each segment is T wide and begins where the one before has ended; the last may be shorter,
    but is never empty. The last column of the lanes is no input."""
    assert same([x.shape[1] for x, y in listed(segments(three_lanes(), T, start))], widths)


def test_no_target_is_lost(segments):
    """The last y ends with the last column: each input has its target, in a short segment, too."""
    x, y = listed(segments(three_lanes(), 4))[-1]
    assert same(y, [[9, 10],
                    [109, 110],
                    [209, 210]])


def test_start_is_a_column(segments):
    """`start` is the column at which the first segment begins."""
    x, y = next(segments(three_lanes(), 4, 2))
    assert same(x, [[2, 3, 4, 5],
                    [102, 103, 104, 105],
                    [202, 203, 204, 205]])


@pytest.mark.parametrize("B, L, T, start", [
    (2, 11, 4, 0), (3, 12, 4, 0), (2, 3, 7, 0), (5, 6, 1, 0), (1, 9, 2, 4), (3, 12, 5, 3)])
def test_all_tokens_in_their_order(segments, B, L, T, start):
    """One segment after another, x is all inputs from `start` on, and y all their targets."""
    stream = torch.randint(1000, (B, L + 1))
    assert same(joined(segments(stream.clone(), T, start)),
                joined(oracles.segments(stream, T, start)))


def test_x_and_y_are_int64(segments):
    """x and y are int64, as an embedding and a loss want them; a corpus is stored in bytes."""
    x, y = next(segments(torch.arange(250, 256, dtype=torch.uint8)[None], 4))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("T", [0, -3])
def test_less_than_one_column_is_refused(segments, T):
    """T < 1 is refused with a ValueError."""
    with pytest.raises(ValueError):
        next(segments(three_lanes(), T), None)


# ---- exercise sinusoid --------------------------------------------------------------------------

def test_position_0(sinusoid):
    """First stand all D/2 sines, then all D/2 cosines: position 0 has the angles 0, with sine 0
    and cosine 1."""
    assert same(sinusoid(torch.tensor([0]), 6), [[0, 0, 0, 1, 1, 1]])


def test_frequencies_fall_from_1(sinusoid):
    """Frequency k is 10000^(-2k/D), k = 0, 1, ...; for D = 8 these are 1, 0.1, 0.01, 0.001."""
    wanted = [[0.841471, 0.099833, 0.010000, 0.001000, 0.540302, 0.995004, 0.999950, 1.000000]]
    assert same(sinusoid(torch.tensor([1]), 8), wanted, tolerance=1e-5)


def test_row_r_encodes_position_r(sinusoid):
    """Row r encodes position[r], in whatever order they come: later lessons ask for distances."""
    wanted = [[0.656987, 0.753902], [0, 1], [0.656987, 0.753902], [0.909297, -0.416147]]
    assert same(sinusoid(torch.tensor([7, 0, 7, 2]), 2), wanted, tolerance=1e-5)


@pytest.mark.parametrize("D", [2, 4, 6, 10, 64])
def test_other_widths(sinusoid, D):
    """The same for any even D."""
    wanted = oracles.unit_circle(range(30), D)
    assert same(sinusoid(torch.arange(30), D), wanted, tolerance=1e-5)


def test_float64_is_returned(sinusoid):
    """The result is float64; whoever needs less converts it."""
    assert sinusoid(torch.tensor([1, 2, 3]), 4).dtype == torch.float64


def test_float64_before_the_product(sinusoid):
    """Nearly right, but far out digits are lost: make positions and frequencies float64 *before*
    they are multiplied, and the exponents before 10000 is raised to them."""
    far = [1000, 123456]
    assert same(sinusoid(torch.tensor(far), 10), oracles.unit_circle(far, 10), tolerance=1e-8)


@pytest.mark.parametrize("D", [7, 1])
def test_an_odd_width_is_refused(sinusoid, D):
    """An odd D is refused with a ValueError: sines and cosines come in pairs."""
    with pytest.raises(ValueError):
        sinusoid(torch.arange(3), D)


# ---- beyond the exercises: the model, from leaf to root -----------------------------------------

@pytest.fixture
def by_oracles(monkeypatch):
    """Oracles in place of the exercises: what is tested here does not depend on them."""
    for name, oracle in (("lanes", oracles.lanes), ("segments", oracles.segments),
                         ("sinusoid", lambda p, D: oracles.unit_circle(p.tolist(), D))):
        monkeypatch.setattr(lesson, name, oracle)


def attend_by_loops(attention, h):
    """(T, D) -> (T, D): one head after another, query i over keys 0..i."""
    heads = []
    for n in range(attention.H):
        head = slice(n * attention.C, (n + 1) * attention.C)
        q, k, v = (h @ W.weight[head].T for W in (attention.W_q, attention.W_k, attention.W_v))
        weights = [(k[: i + 1] @ q[i] / math.sqrt(attention.C)).exp() for i in range(len(h))]
        heads.append(torch.stack([w / w.sum() @ v[: len(w)] for w in weights]))
    return torch.cat(heads, dim=1) @ attention.W_o.weight.T


def logits_by_formula(model, x):
    """One segment (T,) -> logits (T, V): embedding, position, post-norm layers, tied output."""
    E = model.embedding.weight
    h = math.sqrt(E.shape[1]) * E[x] + oracles.unit_circle(range(len(x)), E.shape[1])
    for layer in model.layers:
        h = layer.norm_1(h + attend_by_loops(layer.attention, h))
        first, _, second = layer.feed_forward
        inner = (h @ first.weight.T + first.bias).clamp(min=0)
        h = layer.norm_2(h + inner @ second.weight.T + second.bias)
    return h @ E.T


def tiny_model(V=11):
    return lesson.VanillaTransformer(V, N=2, D=12, H=3, FF=20)


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
    """However small the visible scores are: the mask is -inf, not merely a large number."""
    attention = lesson.Attention(10, 3, 4).double()
    nn.init.normal_(attention.W_q.weight, std=1e6)
    attention.W_k.weight = nn.Parameter(-attention.W_q.weight.detach())  # q . k_own is about -1e13
    h = torch.randn(2, 6, 10, dtype=torch.float64)
    other = h.clone()
    other[:, 4:] = torch.randn(2, 2, 10, dtype=torch.float64)
    assert attention(h)[:, :4].equal(attention(other)[:, :4]), "the future shows through the mask"


def test_model_equals_the_formulas_forward_and_gradient(by_oracles):
    """sqrt(D) on the embedding, positions, norms after the sums, ReLU, tied output."""
    model = randomized(tiny_model())
    x = torch.randint(11, (2, 5))
    found, wanted = model(x), torch.stack([logits_by_formula(model, lane) for lane in x])
    assert_close(found, wanted, "logits against the formulas", tolerance=1e-10)
    leaves = list(model.parameters())
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "gradient of a weight against the formulas", tolerance=1e-9)


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


# ---- training and the two ways to evaluate ------------------------------------------------------

class Unigram(nn.Module):
    """Does not look at its input: the loss of a target tells which token it was."""

    def __init__(self, V):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(V))

    def forward(self, x):
        return self.scores.expand(*x.shape, -1)


def nll(logits, y):
    """-ln p(y) in nats: (..., V), (...) -> (...)."""
    p = logits.detach().exp() / logits.detach().exp().sum(-1, keepdim=True)
    return -p.gather(-1, y.long()[..., None])[..., 0].log()


def test_token_losses_are_nats_for_each_token():
    """-ln softmax(logits)[y], not averaged, and its gradient is p - 1 at the target."""
    B, T, V = 2, 3, 5
    logits = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    y = torch.randint(V, (B, T))
    found = lesson.token_losses(logits, y)
    assert_close(found, nll(logits, y), "losses in nats, one a token")
    slope = logits.softmax(-1) - torch.eye(V)[y]
    assert_close(torch.autograd.grad(found.sum(), logits)[0], slope, "gradient p - 1[y]")


@pytest.mark.parametrize("tokens", [torch.full((201,), 3), torch.arange(201) % 11])
def test_fit_steps_along_the_gradient_of_one_segment_after_the_other(
        monkeypatch, by_oracles, tokens):
    """Lanes in stream order, round and round; fresh gradients, clipped; the rate rises, falls."""
    model, read, rates = Unigram(11), [], []
    nn.init.zeros_(model.scores)  # the first text's gradients are clipped, the second's are not
    batches = list(oracles.segments(oracles.lanes(tokens, 4), 9))

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
    assert rates == pytest.approx([1e-3 * min((s + 1) / 50, 1 - s / 80) for s in range(80)])
    assert model.scores.abs().max() > 1e-3, "the steps are taken"


@pytest.mark.parametrize("n, T", [(23, 4), (21, 5), (9, 1), (70 * 3 + 2, 3)])
def test_one_pass_losses_equal_a_loop_over_segments(by_oracles, n, T):
    """Segment s holds tokens sT..sT+T-1 and knows nothing else; more than one batch of 64 works."""
    model, tokens = randomized(tiny_model()), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson.one_pass_losses(model, tokens, T)
    assert found.shape == ((n - 1) // T, T) and not found.requires_grad
    for s in range(len(found)):
        x, y = tokens[s * T : s * T + T].long(), tokens[s * T + 1 : s * T + T + 1]
        assert_close(found[s], nll(model(x[None])[0], y), f"segment {s}", tolerance=1e-10)


@pytest.mark.parametrize("n, T, every", [
    (12, 4, 1), (9, 1, 1), (70, 3, 1), (6, 5, 1), (24, 4, 3), (9, 2, 50)])
def test_sliding_window_losses_equal_a_loop_over_windows(by_oracles, n, T, every):
    """Token t is predicted from tokens t-T..t-1 alone, in a window of its own."""
    model, tokens = randomized(tiny_model()), torch.randint(11, (n,)).to(torch.uint8)
    found = lesson.sliding_window_losses(model, tokens, T, every)
    assert not found.requires_grad
    wanted = [nll(model(tokens[t - T : t].long()[None])[0, -1], tokens[t])
              for t in range(T, n, every)]
    assert_close(found, torch.stack(wanted), "windows", tolerance=1e-10)


# ---- the lesson as a whole ----------------------------------------------------------------------

def test_fragmentation_is_shown_by_position(capsys):
    """Bits, one mean for each position of a segment, and that of the later half."""
    model, tokens = Unigram(7), torch.randint(7, (62,))
    found = lesson.show_fragmentation(model, tokens, 4)
    bits = (nll(model.scores.expand(60, -1), tokens[1:61]) / math.log(2)).view(15, 4).mean(0)
    assert_close(found, bits, "bits by position", tolerance=1e-5)
    words = " ".join(capsys.readouterr().out.split())
    assert f"segments of 4 bytes, each alone: {found.mean():.2f} bits per byte" in words
    assert (f"the first of a segment {found[0]:.2f}, the second {found[1]:.2f}, the later half "
            f"{found[2:].mean():.2f}") in words


@pytest.mark.parametrize("n, T, count", [(243, 4, 14), (246, 8, 14)])
def test_sliding_window_is_compared_on_the_same_tokens(capsys, n, T, count):
    """One that does not look at its input pays the same both ways; a rest is left out."""
    model, tokens = Unigram(7), torch.randint(7, (n,))
    found = lesson.show_sliding_window(model, tokens, T)
    predicted = tokens[T::17][:count]
    bits = (nll(model.scores.expand(count, -1), predicted) / math.log(2)).mean().item()
    assert found == pytest.approx(bits, abs=1e-5)
    said = re.fullmatch(
        f"sliding window: (.*) bits per byte\n  the same {count} bytes in one pass: (.*)\n",
        capsys.readouterr().out)
    assert [*map(float, said.groups())] == pytest.approx([bits, bits], abs=0.006)  # two digits


def test_the_sliding_window_mends_the_beginnings_of_segments():
    """A prediction at position T - 1 of a segment is the same both ways, one at 0 has T tokens."""
    class Last(nn.Module):
        def forward(self, x):  # how many tokens stand before the next one, as its logit
            return torch.arange(1.0, x.shape[1] + 1)[:, None].expand(*x.shape, 2) * torch.tensor(
                [1.0, 0.0])

    tokens = torch.zeros(13, dtype=torch.uint8)
    alone, window = (measure(Last(), tokens, 4) for measure in (
        lesson.one_pass_losses, lesson.sliding_window_losses))
    assert window.allclose(alone[0, 3].expand(9)) and (alone[:, 0] > alone[:, 3]).all()


@pytest.mark.parametrize("terminal, said", [
    (True, ["", "step 1/30 ", "step 2/30 "]), (False, ["step 11/30 ", "step 22/30 "])])
def test_progress_hands_on_every_item_and_keeps_stdout_clean(terminal, said, monkeypatch, capsys):
    """It goes to stderr: on a terminal a line that is written over, elsewhere one in ten seconds.
    """
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(time, "monotonic", iter(range(1000)).__next__)  # a slow computer
    assert list(lesson.progress(range(30), "step", 30)) == list(range(30))
    out, err = capsys.readouterr()
    assert out == "" and ("\r" in err) == terminal
    assert [line for line in err.split("\r" if terminal else "\n")][: len(said)] == said


def test_figure_is_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lesson, "RUNS", tmp_path / "runs")
    lesson.draw(torch.tensor([5.0, 4.0, 3.0]), 2.5)
    assert capsys.readouterr().out == "figure: runs/01_fragmentation.png\n"
    assert (tmp_path / "runs" / "01_fragmentation.png").stat().st_size > 0


@pytest.mark.skipif("XL_CODE" in os.environ, reason="a student's functions need no examples")
def test_examples_in_the_docstrings():
    """What the lesson shows is what happens."""
    run_examples(lesson)
