"""The lessons' figures show what was measured, and each main measures on the right text.

What a lesson prints is held by the block at its end (test_printed.py).
"""
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from course.exercises import LESSONS

lesson_1, lesson_2, lesson_3, lesson_4, lesson_5 = map(import_module, LESSONS[:-1])


@pytest.fixture
def saved(monkeypatch):
    """Figures are kept here in place of being written: {name: figure}."""
    figures = {}
    monkeypatch.setattr(lesson_1, "save", lambda figure, name: figures.update({name: figure}))
    return figures


def lines(axes):
    """[(label, x, y)] of the lines that are drawn."""
    return [(line.get_label(), *(list(map(float, z)) for z in line.get_data()))
            for line in axes.lines]


def test_lesson_1_draws_the_loss_by_position_and_the_window(saved):
    lesson_1.draw(torch.tensor([5.0, 4.0, 3.0]), 2.5)
    (axes,) = saved["01_fragmentation.png"].axes
    assert lines(axes) == [("each segment alone", [0, 1, 2], [5, 4, 3]),
                           ("window, mean (work x 3)", [0, 1], [2.5, 2.5])]
    assert axes.get_ylim()[0] == 0 and "bits" in axes.get_ylabel()


def test_lesson_2_draws_a_row_for_each_depth_and_white_for_exact_zeros(saved):
    changes = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.01], [1.0, 0.0], [10.0, 1.0]])
    lesson_2.draw(changes, T=1, M=3)
    axes = saved["02_reach.png"].axes[0]
    shown = torch.tensor(axes.images[0].get_array().filled(math.nan))
    nan = math.nan
    wanted = torch.tensor([[0, nan], [0, -1], [0, -2], [0, nan], [1, 0]])
    assert shown.allclose(wanted, equal_nan=True)
    assert [z.get_text() for z in axes.get_yticklabels()] == ["4, no memory", "1", "2", "3", "4"]
    assert axes.images[0].get_extent() == [0, 2, 4.5, -0.5]  # row N around y = N, from 0 down


def test_lesson_2_measures_four_layers_without_memory_then_one_to_four_with(monkeypatch, capsys):
    def change(N, T, M):
        return torch.arange(40).lt(lesson_2.reach(N, T, M) + 1) * (100.0 * N + M)
    monkeypatch.setattr(lesson_2, "change_by_distance", change)
    rows = lesson_2.show_reach(4, 4)
    assert rows[:, 0].tolist() == [400, 104, 204, 304, 404]
    words = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[3].strip(",") for line in words] == [line[-1] for line in words]


def test_lesson_3_draws_the_four_terms_scaled_and_masked(saved, monkeypatch):
    model, T = lesson_3.RelativeTransformer(5, M=4), 3
    attention = model.layers[0].attention
    terms = torch.arange(4.0 * 2 * T * 2 * T).view(4, 1, 2, T, 2 * T)  # lane, head
    given = []
    monkeypatch.setattr(attention, "terms", lambda *z: given.append(z) or terms)
    lesson_3.draw_terms(model, torch.tensor([0, 1, 2, 3, 4, 1]), b"a\n bc", T)
    axes = [a for a in saved["03_four_terms.png"].axes if a.images and a.get_xlabel()]
    assert [a.get_title()[:3] for a in axes] == ["(a)", "(b)", "(c)", "(d)"]
    for a, term in zip(axes, terms[:, 0, 0]):
        shown = torch.tensor(a.images[0].get_array().filled(math.nan))
        wanted = term.masked_fill(lesson_2.causal_mask(T, T), math.nan) / math.sqrt(attention.C)
        assert shown.allclose(wanted, equal_nan=True)
        low, high = a.images[0].get_clim()
        assert low == -high
        assert "".join(z.get_text() for z in a.get_xticklabels()) == "a¶·bc¶"
        assert "".join(z.get_text() for z in a.get_yticklabels()) == "bc¶"
    (h, memory, u, v), = given
    scaled = model.embedding.weight[[0, 1, 2, 3, 4, 1]] * math.sqrt(model.D)
    assert torch.cat([memory, h], 1).equal(scaled[None]) and h.shape[1] == T
    assert u is model.u and v is model.v


def test_lesson_4_draws_both_prices_against_the_length(saved, monkeypatch, capsys):
    prices = {lesson_4.score_by_pairs: iter([3.0, 9.0]), lesson_4.score_by_shift: iter([1.0, 2.0])}
    monkeypatch.setattr(lesson_4, "milliseconds", lambda score, tensors: next(prices[score]))
    monkeypatch.setattr(lesson_4, "progress", lambda items, *rest: items)
    lesson_4.draw((8, 16), *lesson_4.show_price((8, 16)))
    (axes,) = saved["04_price.png"].axes
    assert lines(axes) == [("every pair (lesson 3)", [8, 16], [3, 9]),
                           ("the shift", [8, 16], [1, 2])]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "by pairs     128, by the shift  16; 3.0 ms, 1.0 ms" in capsys.readouterr().out


def test_lesson_5_draws_the_loss_of_each_memory_length(saved, monkeypatch):
    model = lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"])

    def bits(model, tokens, B, T):
        assert (tokens, B, T) == ("valid", 16, 64) and model.config.same_length
        return 3 - model.config.mem_len / 256
    monkeypatch.setattr(lesson_3, "bits_per_token", bits)
    lesson_5.show_what_the_past_is_worth(model, "valid", 64)
    (axes,) = saved["05_memory_length.png"].axes
    assert [bar.get_height() for bar in axes.patches] == [3 - M / 256 for M in (1, 4, 16, 64, 256)]
    assert [z.get_text() for z in axes.get_xticklabels()] == ["1", "4", "16", "64", "256"]


@pytest.mark.parametrize("lesson, show, split", [
    (lesson_1, ("show_fragmentation", "show_sliding_window"), "fit"),
    (lesson_3, ("bits_per_token", "draw_terms"), "fit"),
    (lesson_5, ("show_what_the_past_is_worth",), "lesson_3.fit")], ids=["1", "3", "5"])
def test_a_main_trains_on_train_and_shows_on_valid(lesson, show, split, monkeypatch, saved):
    """A test split has not even to be there: nothing reads it."""
    corpus = SimpleNamespace(vocab=bytes(range(128)), train=torch.full((10**6 + 10**5,), 1),
                             valid=torch.full((300_000,), 2))
    read = []
    monkeypatch.setattr(lesson, "load", lambda name: corpus)
    owner = lesson_3 if split == "lesson_3.fit" else lesson
    monkeypatch.setattr(owner, "fit", lambda model, tokens, **more: read.append(
        ("train", tokens.unique().tolist())))
    for name in show:
        monkeypatch.setattr(lesson, name, lambda model, tokens, *rest, **more: read.append(
            ("shown", tokens.unique().tolist())) or torch.tensor(len(read)))
    drawn = []
    monkeypatch.setattr(lesson, "draw", lambda *given: drawn.extend(given), raising=False)
    lesson.main()
    assert lesson is not lesson_1 or drawn == [2, 3]  # what the two have returned
    assert set(map(str, read)) == {"('train', [1])", "('shown', [2])"} and len(read) > len(show)
