"""The lessons' figures show what was measured, and each main measures on the right text."""
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from course import oracles
from course.exercises import LESSONS

lesson_1, lesson_2, lesson_3, lesson_4, lesson_5 = map(import_module, LESSONS[:-1])


@pytest.fixture
def axes(monkeypatch):
    """The list of all axes of the figures, which are not written."""
    axes = []
    monkeypatch.setattr(lesson_1, "save", lambda figure, name: axes.extend(figure.axes))
    return axes


def lines_of(axes):
    """Return the label and the points of each line."""
    return [(line.get_label(), *map(list, line.get_data())) for line in axes.lines]


def test_curves_and_bars(axes, monkeypatch, capsys):
    lesson_1.show_by_position({"a": [9, 8, 7, 6, 5, 4], "b": [2, 3]}, "", "")
    assert " 9.00 8.00 7.00 6.00 4.00\n" in capsys.readouterr().out
    shifted, relative_score = [], lesson_4.relative_score
    monkeypatch.setattr(lesson_4, "relative_score", lambda *given: (
        shifted.append(1), relative_score(*given))[1])
    monkeypatch.setattr(lesson_4, "milliseconds", lambda function: (  # 3 T, by the shift T
        shifted.clear(), function().shape[1] * (1 if shifted else 3))[1])
    lesson_4.show_cost((8, 16))
    monkeypatch.setattr(lesson_2, "lane_losses", lambda model, *_, **__: torch.tensor(
        math.log(2) * (model.config.mem_len + model.config.clamp_len)))
    lesson_5.show_loss_by_memory_length(lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"]), "")
    lesson_1.show_losses({"lesson 1: a": 3.0, "lesson 2: b": 2.0}, "")
    by_position, cost, by_length, bars = axes
    assert lines_of(by_position) == [
        ("a", [*range(6)], [9, 8, 7, 6, 5, 4]), ("b", [0, 1], [2, 3])]
    assert [points for _, *points in lines_of(cost)] == [[[8, 16], [24, 48]], [[8, 16], [8, 16]]]
    plain, clamped, (_, trained, _) = lines_of(by_length)
    assert plain[1:] == ([4, 16, 64, 256, 383, 1024],
                         pytest.approx([4, 16, 64, 256, 383, 1024]))
    assert clamped[1:] == ([383, 1024], pytest.approx([383, 1024 + 383])) and trained == [383] * 2
    assert [label.get_text() for label in bars.get_yticklabels()] == ["lesson 1: a", "lesson 2: b"]
    assert [bar.get_width() for bar in bars.patches] == [3.0, 2.0]


def test_a_figure_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "runs").touch()  # a file, not a folder
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    with pytest.raises(SystemExit, match="/runs/a.png cannot be written: File exists"):
        lesson_1.save(lesson_1.Figure(), "a.png")


def test_lesson_2_colors_the_states_on_which_the_last_one_depends(axes):
    """Layer by layer a state depends on its segment so far and on M tokens before that."""
    T, N, n = 3, 2, 12
    lesson_2.draw_mechanism(T, N, n)
    for panel, M in zip(axes, (0, T), strict=True):
        rows = [oracles.tokens_seen(n - 1, k, T, M) for k in range(N + 1)]  # k rows below the last
        used = {(token, N - k) for k, row in enumerate(rows) for token in row}
        *_, unused, segment, cached = (set(zip(x, y)) for _, x, y in lines_of(panel))
        assert segment == {(t, k) for t, k in used if t >= n - T} and segment | cached == used
        assert unused == {(t, k) for t in range(n) for k in range(N + 1)} - used
        assert f"depends on {len(rows[-1])} tokens" in panel.get_title()
        assert len(rows[-1]) == lesson_2.reach(N, T, M) + 1


def test_lesson_3_has_the_four_terms_scaled_and_masked(axes):
    model, T, tokens = lesson_3.RelativeTransformer(5, M=4), 3, torch.tensor([0, 1, 2, 3, 4, 1])
    lesson_3.draw_terms(model, tokens, b"a\n bc", T)
    h, attention = model.embedding(tokens[None]) * math.sqrt(model.D), model.layers[0].attention
    terms = attention.terms(h[:, T:], h[:, :T], model.u, model.v)[:, 0, 0] / math.sqrt(attention.C)
    terms = terms.masked_fill(lesson_2.causal_mask(T, T), math.nan)
    for panel, term in zip((a for a in axes if a.get_xlabel()), terms, strict=True):
        shown = torch.tensor(panel.images[0].get_array().filled(math.nan))
        assert shown.allclose(term, equal_nan=True)
        assert "".join(label.get_text() for label in panel.get_xticklabels()) == "a¶·bc¶"


@pytest.mark.parametrize("lesson, trainer, shows", [
    (lesson_1, lesson_1, ["window_losses"]), (lesson_2, lesson_2, ["lane_losses"]),
    (lesson_3, lesson_2, ["lane_losses", "draw_terms"]),
    (lesson_4, lesson_2, []), (lesson_5, lesson_2, ["lane_losses"])], ids="12345")
def test_a_main_trains_on_train_and_evaluates_on_valid(lesson, trainer, shows, monkeypatch, axes):
    """The corpus has no test split, so reading it would fail.  Lesson 4 reads no text, and lesson 5
    only evaluates."""
    read, corpus = set(), SimpleNamespace(
        vocab=bytes(range(128)), train=torch.ones(700_000), valid=torch.full((300_000,), 2.0))
    results = {"window_losses": torch.ones(6250, 32), "lane_losses": torch.ones(32, 64)}
    monkeypatch.setattr(lesson_1, "load", lambda name: corpus)
    monkeypatch.setattr(lesson_5, "with_vocabulary", lambda *_: corpus)
    monkeypatch.setattr(lesson_4, "show_cost", lambda lengths: None)
    for name in ("fit", *shows):
        owner = lesson if name == "draw_terms" else trainer
        monkeypatch.setattr(owner, name, lambda model, tokens, *rest, name=name, **more: (
            read.add((name, *tokens.unique().tolist())), results.get(name))[1])
    lesson.main()
    trained = set() if lesson in (lesson_4, lesson_5) else {("fit", 1)}
    assert read == {(name, 2) for name in shows} | trained
