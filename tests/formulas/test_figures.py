"""Mains print and plot what was measured on the right text; drawings show what is computed."""
import math
from importlib import import_module
from inspect import getclosurevars, getsource
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_rgba
from pytest import approx

from course import exercises, oracles
from system import test_lesson_output as output

lesson_1, lesson_2, lesson_3, lesson_4, lesson_5 = map(import_module, exercises.LESSONS[:-1])
FALLING = [(32 - t) / 16.5 for t in range(32)]  # with a mean of 1


@pytest.fixture
def drawn(needs_shipped_solutions, monkeypatch, capsys):
    """The panels that the mains draw, without training, and the models that they measure.

    Stand-ins for losses fall along a segment and grow with M and clamp; training reads even tokens.
    """
    text, read, models, axes = torch.arange(1_400_000) % 100, set(), [], []
    corpus = SimpleNamespace(vocab=bytes(range(9, 109)), train=text[::2], valid=text[1::2])

    def measure(model, tokens, T=32, stride=32, **sizes):
        models.append(model)
        read.add((tokens[0].item() % 2, "lr" in sizes))
        c = getattr(model, "config", None)
        M = c.mem_len + c.clamp_len if c else getattr(model, "M", 1)
        return torch.tensor([FALLING] * ((len(tokens) - T - 1) // stride + 1)) * math.log(2) * M

    for owner, name, stand_in in (
            (lesson_1, "load", lambda name: corpus), (lesson_1, "fit", measure),
            (lesson_1, "save", lambda figure, name: (
                axes.extend(figure.axes), print(f"figure: runs/{name}"))),
            (lesson_1, "window_losses", measure), (lesson_2, "lane_losses", measure),
            (lesson_2, "fit", measure), (lesson_5, "with_vocabulary", lambda *_: corpus),
            (lesson_4, "milliseconds", lambda call: (model := getclosurevars(call).nonlocals[
                "model"]).M - isinstance(model.layers[0].attention, lesson_4.ShiftAttention)),
            (output, "BITS", math.inf)):
        monkeypatch.setattr(owner, name, stand_in)
    for lesson in lesson_1, lesson_2, lesson_4, lesson_5, lesson_3:
        lesson.main()
        printed = capsys.readouterr().out.splitlines()
        assert output.differing(output.block(getsource(lesson)), printed) == []
    assert printed[-1].endswith("alone, read with a memory: 32.00, first byte 62.06")
    assert read == {(0, True), (1, False)}
    return axes, [z for z in models if isinstance(z, lesson_3.RelativeTransformer)], corpus.valid


def test_figures(drawn):
    axes, (alone, model, *measured), text = drawn
    assert measured == [alone, model, alone]
    first, _, *mechanism, _, cost, by_length, a, b, c, d, by_position, bars = axes
    points = [[tuple(map(list, line.get_data())) for line in panel.lines]
              for panel in (first, by_position, by_length, cost, *mechanism)]
    assert points[0] + points[1] == [([*range(32)], approx(losses)) for losses in (
        FALLING, lesson_3.LESSON_1, [0] * 32, [32 * z for z in FALLING])]
    lengths = 4, 16, 64, 256, 383, 1024, 1407
    assert points[2][:2] == [([*lengths[:6]], approx(lengths[:6])), (
        [383, 1024], approx(lengths[4::2]))] and points[2][2][0] == [383] * 2
    assert points[3] == [([32, 64, 128, 256], [M - z for M in (32, 64, 128, 256)]) for z in (0, 1)]
    names = [label.get_text() for label in bars.get_yticklabels()]
    assert names == [*lesson_3.BEFORE, *(line.get_label() for line in by_position.lines[1:])]
    widths = [bar.get_width() for bar in bars.patches]
    assert widths == approx([*lesson_3.BEFORE.values(), 0, 32]) and bars.yaxis_inverted()
    for panel, lines, M in zip(mechanism, points[4:], (0, 4)):  # T is 4, N is 3
        seen = [(t, 3 - k) for k in range(4) for t in oracles.tokens_seen(15, k, 4, M)]
        *paths, unused, segment, cached = ({*zip(*line)} for line in lines)
        assert segment == {(t, n) for t, n in seen if t > 11} and segment | cached == {*seen}
        assert unused == {(t, n) for t in range(16) for n in range(4)} - {*seen}
        assert {*map(frozenset, paths)} == {frozenset([(s, n - 1), (t, n)]) for t, n in seen if n
                                            for s in oracles.tokens_seen(t, 1, 4, M)}
        assert [z[0, 0] for z in panel.collections[0].get_segments()] == [3.5, 7.5, 11.5]
        assert panel.get_title().endswith(f" on {len([n for _, n in seen if n == 0])} tokens")
    h = model.embedding(text[5000:5024][None]) * math.sqrt(model.D)
    terms = model.layers[0].attention.terms(h[:, 12:], h[:, :12], model.u, model.v)[:, 0, 0]
    for n, panel, term in zip("abcd", (a, b, c, d), terms.tril(12) / math.sqrt(32)):  # no future
        assert torch.tensor(panel.images[0].get_array().filled(0)).allclose(term)
        assert panel.get_title().startswith(f"({n})")
        assert panel.get_xticklabels()[11].get_text() == "·"
    color = {to_rgba(name): name for name in ("k", "C0", "C1", "C7", "0.5", "0.7")}
    assert [color[bar.get_facecolor()] for bar in bars.patches] == ["0.7"] * 3 + ["C0"] * 2
    assert " ".join(color[to_rgba(line.get_color())] + line.get_marker() + line.get_linestyle()
                    for panel in (first, mechanism[1], by_position, by_length, cost)
                    for line in panel.lines[-3:]) == (
        "k.- C7.None C0oNone C1sNone k.- C1^-- C0o- C1o- C0s-- 0.5None: C1s-- C0o-")
    assert [z.get_text() for panel in (first, mechanism[1], d, cost, by_length) for z in (
        panel.xaxis.label, panel.yaxis.label, *panel.texts,
        *getattr(panel.get_legend(), "texts", ()))] == [
        "position in the segment", "bits per byte (not from 0)", names[0],
        "token (squares: cached, without a gradient)", "layer",
        "key: memory, then the segment", "query", "T = M (log scale)",
        "forward and backward (ms, log scale)", "for all pairs:\n256 ms", "by the shift:\n255 ms",
        "M: tokens visible before a query", "bits per byte", *(f" {M:.2f}" for M in lengths),
        "distances as they are", "clamped at 383", "largest distance in training: 383"]


@pytest.mark.parametrize("show, name, words", [
    (lesson_3.show_loops_against_pairs, "four_terms_all_pairs", "18 visible cells: 1e+00"),
    (lesson_4.show_equalities, "rel_shift_by_index", ": 0 of 16 shapes"),
    (lesson_4.show_equalities, "rel_shift", "against lesson 3's: 1e+00")])
def test_a_difference_in_one_key_is_printed(show, name, words, monkeypatch, capsys):
    """Each query has another element for its own key, m + i: a mask without m would hide most."""
    lesson = import_module(show.__module__)
    right = getattr(lesson, name)
    monkeypatch.setattr(lesson, name, lambda *given: (found := right(*given)) + torch.eye(
        found.shape[-1])[found.shape[-1] - found.shape[-2] :])
    show()
    assert words in capsys.readouterr().out


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
