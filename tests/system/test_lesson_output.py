"""Each lesson prints what follows "# It prints" at its end: a reader need not run it."""
import ast
import re
from importlib import import_module

import pytest

from course.exercises import LESSONS, ROOT

BITS = 0.15  # a trained model's losses: Python 3.10 to 3.13 differ by up to 0.12, as their texts do
FACTOR = 3  # numbers such as 6e-04, of random models
ROUNDING = 1e-6  # below this it is rounding error, however large
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?: ms)?")
SAMPLE = "(yours differs):"  # the line after it is a sampled text, as Python writes a string


def block(text):
    """Return the output that a lesson shows at its end: the lines after "#" and five spaces.

    The other comment lines are remarks on the output.
    """
    head, *rest = text[text.index("\n# It prints") + 1 :].splitlines()
    assert re.fullmatch(r"# It prints \(seed 0, Python 3\.\d+\.\d+; .*", head)
    assert all(line.startswith("#") for line in rest), "one run of lines with #, to the end"
    return [line[5:] for line in rest if line.startswith("#     ")]


def is_near(told, printed):
    """Compare two numbers as text; times are not compared."""
    if told.endswith(" ms"):
        return True
    x, y = (float(number.replace(",", "")) for number in (told, printed))
    if "e" in told:
        return y < ROUNDING if x < ROUNDING else x / FACTOR <= y <= x * FACTOR
    return abs(x - y) <= (BITS if "." in told else 0)


def differing(told, printed):
    """Return the pairs of lines that differ in a word or in a number; for a sample, in its length.
    """
    wrong, is_sample = [], False
    for pair in zip(told, printed, strict=True):
        words, numbers = zip(*(
            (NUMBER.sub("0", line).split(), NUMBER.findall(line)) for line in pair))
        same = words[0] == words[1] and all(map(is_near, *numbers))
        if is_sample:
            same = len({len(ast.literal_eval(line.strip())) for line in pair}) == 1
        wrong += [] if same else [pair]
        is_sample = pair[0].endswith(SAMPLE)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS[:-1])
def test_a_lesson_prints_what_it_says(name, monkeypatch, tmp_path, capsys):
    """Words and exact numbers are equal, others near; its figures are drawn."""
    lesson_1, shown = import_module(LESSONS[0]), []
    draw = lesson_1.show_by_position
    monkeypatch.setattr(lesson_1, "show_by_position", lambda curves, *given: (
        shown.extend(curves.values()), draw(curves, *given)))
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    import_module(name).main()
    if name == LESSONS[0]:
        assert shown == [pytest.approx(import_module(LESSONS[2]).LESSON_1, abs=BITS)]
    printed = capsys.readouterr().out.splitlines()
    assert differing(block((ROOT / f"{name}.py").read_text(encoding="utf-8")), printed) == []
    for figure in re.findall("figure: runs/(.*)", "\n".join(printed)):
        assert (tmp_path / "runs" / figure).stat().st_size > 0
        assert (ROOT / "figures" / figure).is_file(), "the READMEs show a copy"


def test_a_lesson_repeats_the_losses_of_the_lesson_before():
    """Its BEFORE is what that lesson prints; the slow test compares the block with the run."""
    losses = []
    for name in LESSONS[:3]:
        lines, before = block((ROOT / f"{name}.py").read_text(encoding="utf-8")), losses
        losses = [line for line in lines if re.fullmatch(r"   lesson \d: \D+ \d\.\d\d", line)]
        assert losses[: len(before)] == before and len(losses) > len(before)
        module = import_module(name)
        repeated = getattr(module, "BEFORE", {})
        assert [f"   {key:38} {loss:.2f}" for key, loss in repeated.items()] == before
    shown = " ".join(f"{loss:.2f}" for loss in (*module.LESSON_1[:4], module.LESSON_1[-1]))
    (line,) = (line for line in lines if line.endswith(shown))
    assert line in block((ROOT / f"{LESSONS[0]}.py").read_text(encoding="utf-8"))
