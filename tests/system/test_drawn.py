"""The lessons' figures show what was measured, and each main measures on the right text."""
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from course.exercises import LESSONS

lesson_1, lesson_2, lesson_3, lesson_4, lesson_5 = map(import_module, LESSONS[:-1])


@pytest.fixture
def axes(monkeypatch):
    """The list of all axes of the figures, which are not written."""
    axes = []
    monkeypatch.setattr(lesson_1, "save", lambda figure, name: axes.extend(figure.axes))
    return axes


def test_curves_and_bars(axes, monkeypatch):
    losses = math.log(2) * torch.tensor([[6.0, 4.0, 2.0], [4.0, 4.0, 4.0]])  # nats
    lesson_1.show_fragmentation(losses)
    shifted, relative_score = [], lesson_4.relative_score
    monkeypatch.setattr(lesson_4, "relative_score", lambda *given: (
        shifted.append(1), relative_score(*given))[1])
    monkeypatch.setattr(lesson_4, "milliseconds", lambda function: (  # 3 T, by the shift T
        shifted.clear(), function().shape[1] * (1 if shifted else 3))[1])
    lesson_4.show_cost((8, 16))
    monkeypatch.setattr(lesson_2, "bits_per_token", lambda model, *_, **__: model.config.mem_len)
    lesson_5.show_loss_by_memory_length(lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"]), "")
    lesson_1.show_thread({"a": 3.0, "b": 2.0})
    lines = [[(line.get_label(), *map(list, line.get_data())) for line in a.lines] for a in axes]
    assert [line[1:] for line in lines[0]] == [([0, 1, 2], pytest.approx([5, 4, 3]))]
    assert lines[1] == [("for all pairs", [8, 16], [24, 48]), ("by the shift", [8, 16], [8, 16])]
    labels = [z.get_text() for z in axes[2].get_xticklabels()]
    assert labels == ["4", "16", "64", "384", "1024", "1024, clamped"]
    assert [bar.get_height() for bar in axes[2].patches] == [4, 16, 64, 384, 1024, 1024]
    assert [z.get_text() for z in axes[3].get_yticklabels()] == ["a", "b"]
    assert [bar.get_width() for bar in axes[3].patches] == [3.0, 2.0]


def test_lesson_2_has_a_row_for_each_depth_and_white_for_exact_zeros(axes):
    """The first is of four layers without memory."""
    lesson_2.show_reach(4, 4)
    shown = axes[0].images[0].get_array()
    farthest = [max(row.nonzero()[0]) for row in ~shown.mask]
    assert farthest == [lesson_2.reach(4, 4, 0), *(lesson_2.reach(N, 4, 4) for N in (1, 2, 3, 4))]
    changes = [lesson_2.change_by_distance(N, 4, M) for N, M in (
        (4, 0), (1, 4), (2, 4), (3, 4), (4, 4))]
    assert torch.tensor(shown.filled(-math.inf)).equal(torch.stack(changes).log10())


def test_lesson_3_has_the_four_terms_scaled_and_masked(axes):
    model, T, tokens = lesson_3.RelativeTransformer(5, M=4), 3, torch.tensor([0, 1, 2, 3, 4, 1])
    lesson_3.draw_terms(model, tokens, b"a\n bc", T)
    h, attention = model.embedding(tokens[None]) * math.sqrt(model.D), model.layers[0].attention
    terms = attention.terms(h[:, T:], h[:, :T], model.u, model.v)[:, 0, 0] / math.sqrt(attention.C)
    terms = terms.masked_fill(lesson_2.causal_mask(T, T), math.nan)
    for a, term in zip((a for a in axes if a.get_xlabel()), terms, strict=True):
        shown = torch.tensor(a.images[0].get_array().filled(math.nan))
        assert shown.allclose(term, equal_nan=True)
        assert "".join(z.get_text() for z in a.get_xticklabels()) == "a¶·bc¶"


@pytest.mark.parametrize("lesson, trainer, shows", [
    (lesson_1, lesson_1, ["window_losses"]), (lesson_2, lesson_2, ["bits_per_token"]),
    (lesson_3, lesson_2, ["bits_per_token", "draw_terms"]),
    (lesson_4, lesson_2, ["bits_per_token"]), (lesson_5, lesson_2, ["bits_per_token"])],
    ids="12345")
def test_a_main_trains_on_train_and_evaluates_on_valid(lesson, trainer, shows, monkeypatch, axes):
    """A test split does not even exist: nothing reads it.  Lesson 5 trains nothing."""
    read, corpus = set(), SimpleNamespace(
        vocab=bytes(range(128)), train=torch.ones(700_000), valid=torch.full((300_000,), 2.0))
    results = {"window_losses": torch.ones(6250, 32), "bits_per_token": 1.0}
    monkeypatch.setattr(lesson_1, "load", lambda name: corpus)
    monkeypatch.setattr(lesson_5, "with_vocabulary", lambda *_: corpus)
    monkeypatch.setattr(lesson_4, "show_cost", lambda lengths: None)
    for name in ("fit", *shows):
        owner = lesson if name == "draw_terms" else trainer
        monkeypatch.setattr(owner, name, lambda model, tokens, *rest, name=name, **more: (
            read.add((name, *tokens.unique().tolist())), results.get(name))[1])
    lesson.main()
    trained = set() if lesson is lesson_5 else {("fit", 1)}
    assert read == {(name, 2) for name in shows} | trained
