"""Test the measurements of the lessons: losses, terms and costs."""
import doctest
import math
from importlib import import_module

import pytest
import torch
from torch.nn.functional import cross_entropy

from course.exercises import LESSONS
from helpers import assert_close, randomized

lesson_1, lesson_2, _, lesson_4 = map(import_module, LESSONS[:4])


@pytest.mark.parametrize("n, T", [(23, 4), (21, 5), (9, 1), (70 * 3 + 2, 3)])
def test_segment_and_window_losses_equal_separate_passes(n, T):
    """Windows start without context, T apart if they are segments; n may exceed a batch."""
    model = randomized(lesson_1.VanillaTransformer(V=11, N=2, D=12, H=3, FF=20))
    tokens = torch.randint(11, (n,))
    for stride in (T, 1, 3):
        found = lesson_1.window_losses(model, tokens.byte(), T, stride)
        wanted = [cross_entropy(model(tokens[None, s : s + T])[0], tokens[s + 1 : s + T + 1],
                                reduction="none") for s in range(0, n - T, stride)]
        assert_close(found, torch.stack(wanted), f"stride {stride}", tolerance=1e-10)
    assert not found.requires_grad


@pytest.mark.parametrize("n, T", [(243, 4), (246, 8)])
def test_windows_are_compared_with_segments_over_the_same_tokens_in_bits(n, T):
    """A window gains nothing for a model that ignores its input."""
    scores, tokens = torch.randn(7), torch.randint(7, (n,))
    model = lambda x: scores.expand(*x.shape, 7)
    losses = lesson_1.window_losses(model, tokens, T, T)
    assert lesson_1.show_sliding_window(model, tokens, losses) == pytest.approx(0, abs=1e-5)
    assert lesson_1.show_sliding_window(model, tokens, losses + 1) == pytest.approx(1 / math.log(2))


@pytest.mark.parametrize("n, B, T", [(12, 1, 5), (9, 1, 1), (5, 1, 20), (27, 3, 3)])
def test_lane_losses_are_those_of_all_tokens(n, B, T):
    """A short last segment counts by its number of tokens, and all lanes count."""
    scores = torch.randn(7, 7)
    tokens = torch.randint(7, (n,))
    inputs = (n - 1) // B * B
    wanted = cross_entropy(scores.double()[tokens[:inputs]], tokens[1 : inputs + 1]).item()
    losses = lesson_2.lane_losses(lambda x, memory: (scores[x], None), tokens.byte(), B, T)
    assert lesson_1.bits(losses) == pytest.approx(wanted / math.log(2), abs=1e-5)


def test_milliseconds_is_the_fastest_after_a_first_call(monkeypatch):
    """Six calls run forward and backward; the first one warms up, and the fastest one counts."""
    seconds = [0.0001, 0.001, 0.003, 0.002, 7, 0.002]
    monkeypatch.setattr(lesson_4.timeit, "repeat", lambda call, number, repeat: [
        call() or second for _, second in zip(range(number * repeat), seconds)])
    x = torch.ones(3, requires_grad=True)
    assert lesson_4.milliseconds(lambda: x * 2) == pytest.approx(1)
    assert x.grad.tolist() == [12, 12, 12], "the backward pass must also be measured"


def test_a_figure_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "runs").touch()  # a file, not a folder
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    with pytest.raises(SystemExit, match="/runs/a.png cannot be written: File exists"):
        lesson_1.save(lesson_1.Figure(), "a.png")


def test_the_examples_in_the_docstrings_are_correct():
    """Every lesson except lesson 3 has examples, and these return what they show."""
    found = {name: doctest.testmod(import_module(name), raise_on_error=True).attempted
             for name in LESSONS}
    assert [name for name in found if not found[name]] == [LESSONS[2]]
