"""Each lesson prints what follows "# It prints" at its end: a reader need not run it."""
import re
from importlib import import_module

import pytest

from course.exercises import LESSONS, ROOT

BITS = 0.15  # a trained model's losses: Python 3.10 to 3.13 differ by up to 0.12, as their texts do
FACTOR = 3  # numbers such as 6e-04, of random models
ROUNDING = 1e-6  # below this it is rounding error, however large
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?: ms)?")
LOSS = re.compile(r" +lesson \d: \D+ \d\.\d\d")
SAMPLE = "(yours differs):"  # the line after it is a sampled text


def block(text):
    """Return the output that a lesson shows at its end; other comment lines are remarks on it."""
    lines = text.partition("\n# It prints")[2].splitlines()
    return [line[5:] for line in lines if line.startswith("#     ")]


def is_near(told, printed):
    """Compare two numbers as text; times are not compared."""
    x, y = (float(number.removesuffix(" ms").replace(",", "")) for number in (told, printed))
    if "e" in told:
        return y < ROUNDING if x < ROUNDING else x / FACTOR <= y <= x * FACTOR
    return told.endswith(" ms") or abs(x - y) <= (BITS if "." in told else 0)


def differing(told, printed):
    """Return the pairs of lines that differ in a word or in a number; samples are not compared."""
    wrong, before = [], ""
    for pair in zip(told, printed, strict=True):
        words, numbers = zip(*((NUMBER.sub("0", line).split(), NUMBER.findall(line))
                               for line in pair))
        same = words[0] == words[1] and all(map(is_near, *numbers))
        wrong += [] if same or before.endswith(SAMPLE) else [pair]
        before = pair[0]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS[:-1])
def test_a_lesson_prints_its_documented_output(name, monkeypatch, tmp_path, capsys):
    """Words and exact numbers are equal, others near; losses rank equally; figures are drawn."""
    lesson_1, curves = import_module(LESSONS[0]), {}
    show = lesson_1.show_by_position
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(lesson_1, "show_by_position", lambda found, *texts: (
        curves.update(found), show(found, *texts)))
    import_module(name).main()
    printed = capsys.readouterr().out.splitlines()
    told = block((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    assert differing(told, printed) == []
    ranks = [sorted(filter(LOSS.fullmatch, lines), key=lambda line: float(line.split()[-1]))
             for lines in (told, printed)]
    assert [line.split()[:-1] for line in ranks[0]] == [line.split()[:-1] for line in ranks[1]]
    if "lesson 1: each segment alone" in curves:  # lesson 1 computes it, lesson 3 repeats it
        means = import_module(LESSONS[2]).LESSON_1
        assert curves["lesson 1: each segment alone"] == pytest.approx(means, abs=BITS)
    for figure in re.findall("figure: runs/(.*)", "\n".join(printed)):
        assert (tmp_path / "runs" / figure).stat().st_size > 0
        assert (ROOT / "figures" / figure).is_file(), "the READMEs show a copy"


def test_a_lesson_repeats_the_losses_of_the_lesson_before():
    """Its BEFORE is what that lesson prints; the slow test compares the block with the run."""
    blocks = [block((ROOT / f"{name}.py").read_text(encoding="utf-8")) for name in LESSONS[:3]]
    losses = [[*filter(LOSS.fullmatch, lines)] for lines in blocks]
    for name, before, now in zip(LESSONS[1:3], losses, losses[1:]):
        lesson = import_module(name)
        assert [f"   {key:38} {loss:.2f}" for key, loss in lesson.BEFORE.items()] == before
        assert now[: len(before)] == before
    shown = " ".join(f"{loss:.2f}" for loss in (*lesson.LESSON_1[:4], lesson.LESSON_1[-1]))
    (line,) = (line for line in blocks[0] if line.endswith(shown))
    assert line in blocks[2]
