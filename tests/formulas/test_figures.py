"""Figures and drawings show what was measured, and each main measures on the right text."""
import math
from importlib import import_module
from inspect import getclosurevars
from types import SimpleNamespace

import torch
from pytest import approx

from course import exercises, oracles

lesson_1, lesson_2, lesson_3, lesson_4, lesson_5 = map(import_module, exercises.LESSONS[:-1])


def test_figures(monkeypatch):
    """Training reads even tokens; stand-ins for losses grow along a segment, with M and clamp."""
    text, read, models, axes = torch.arange(1_400_000) % 100, set(), [], []
    corpus = SimpleNamespace(vocab=bytes(range(9, 109)), train=text[::2], valid=text[1::2])
    growing = [t / 15.5 for t in range(32)]  # with a mean of 1

    def measure(model, tokens, *_, **sizes):
        models.append(model)
        read.add((tokens[0].item() % 2, "lr" in sizes))
        c = getattr(model, "config", None)
        M = c.mem_len + c.clamp_len if c else getattr(model, "M", 1)
        return torch.tensor([growing] * 200) * math.log(2) * M

    for owner, name, stand_in in (
            (lesson_1, "load", lambda name: corpus), (lesson_1, "fit", measure),
            (lesson_1, "save", lambda figure, name: axes.extend(figure.axes)),
            (lesson_1, "window_losses", measure), (lesson_2, "lane_losses", measure),
            (lesson_2, "fit", measure), (lesson_5, "with_vocabulary", lambda *_: corpus),
            (lesson_4, "milliseconds", lambda call: (model := getclosurevars(call).nonlocals[
                "model"]).M - isinstance(model.layers[0].attention, lesson_4.ShiftAttention))):
        monkeypatch.setattr(owner, name, stand_in)
    for lesson in lesson_1, lesson_2, lesson_3, lesson_5:
        lesson.main()
    lesson_4.show_cost((8, 16))
    assert read == {(0, True), (1, False)}
    alone, _, *mechanism, _, a, b, c, d, by_position, bars, by_length, cost = axes
    points = [[tuple(map(list, line.get_data())) for line in panel.lines]
              for panel in (alone, by_position, by_length, cost, *mechanism)]
    assert points[0] + points[1] == [([*range(32)], approx(losses)) for losses in (
        growing, lesson_3.LESSON_1, [0] * 32, [32 * z for z in growing])]
    plain, clamped, (trained, _) = points[2]
    assert plain == ([4, 16, 64, 256, 383, 1024], approx(plain[0])) and trained == [383] * 2
    assert clamped == ([383, 1024], approx([383, 1407]))
    assert points[3] == [([8, 16], [8, 16]), ([8, 16], [7, 15])]
    names = [label.get_text() for label in bars.get_yticklabels()]
    assert names == [*lesson_3.BEFORE, *(line.get_label() for line in by_position.lines[1:])]
    widths = [bar.get_width() for bar in bars.patches]
    assert widths == approx([*lesson_3.BEFORE.values(), 0, 32])
    for panel, lines, M in zip(mechanism, points[4:], (0, 4)):  # T is 4, N is 3
        seen = [(t, 3 - k) for k in range(4) for t in oracles.tokens_seen(15, k, 4, M)]
        *_, unused, segment, cached = ({*zip(*line)} for line in lines)
        assert segment == {(t, n) for t, n in seen if t > 11} and segment | cached == {*seen}
        assert unused == {(t, n) for t in range(16) for n in range(4)} - {*seen}
        assert panel.get_title().endswith(f" on {len([n for _, n in seen if n == 0])} tokens")
    model = [z for z in models if isinstance(z, lesson_3.RelativeTransformer)][1]
    h = model.embedding(corpus.valid[5000:5024][None]) * math.sqrt(model.D)
    terms = model.layers[0].attention.terms(h[:, 12:], h[:, :12], model.u, model.v)[:, 0, 0]
    for panel, term in zip((a, b, c, d), terms.tril(12) / math.sqrt(32)):  # no future keys
        assert torch.tensor(panel.images[0].get_array().filled(0)).allclose(term)
        assert panel.get_xticklabels()[11].get_text() == "·"


def test_drawings(needs_shipped_solutions):
    """Lesson 4 draws the steps of its shift, lessons 3 and 5 tables of distances."""
    x = torch.tensor([[10 * i + 5 - n for n in range(5)] for i in range(3)])  # 1 + what is drawn
    padded = torch.cat([torch.zeros(3, 1), x], 1)  # 0 is drawn as a dot
    rows, shifted = padded.view(6, 3), lesson_4.rel_shift(x)
    steps = [step[i] for i in range(3) for step in (x, padded, rows, shifted)]
    distance, mask = lesson_4.rel_shift(x[:1].expand(3, 5)), lesson_5.attention_mask
    left, right = (distance.masked_fill(mask(3, 2, 2, on), 0) for on in (False, True))
    for lesson, lines in ((lesson_3, left), (lesson_4, [*steps, *rows[3:]]),
                          (lesson_5, torch.cat([left, right], 1))):
        wanted = " ".join(f"query {i}, which is key {i + 2} " * (lesson != lesson_4) + " ".join(
            "." if z == 0 else f"{z - 1:.0f}" for z in line) for i, line in enumerate(lines))
        assert wanted in " ".join(lesson.__doc__.replace("[", " ").replace("]", " ").split())
