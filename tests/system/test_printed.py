"""Each lesson prints what stands under "# It prints" at its end: a reader need not run it.

    pytest -m slow tests/system/test_printed.py       runs the lessons, two minutes
"""
import ast
import re
from importlib import import_module

import pytest

from course.exercises import LESSONS, ROOT

BITS = 0.15  # a trained model's losses: Python 3.10 to 3.13 differ by up to 0.12, as their texts do
FACTOR = 3  # numbers such as 6e-04, of random models
ROUNDING = 1e-6  # below this it is rounding, however much
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?: ms)?")
SAMPLE = "(yours differs):"  # the line after it is a sampled text, as Python writes a string

lesson_1 = import_module("01_vanilla_segments")


def block(text):
    """The lines that a lesson says it prints: those behind "#" and four spaces at its end.

    What stands closer to the "#" is a remark on the line above.
    """
    head, *rest = text[text.index("\n# It prints") + 1 :].splitlines()
    assert re.fullmatch(r"# It prints \(seed 0, Python 3\.\d+\.\d+; .*", head)
    assert all(line.startswith("#") for line in rest), "one run of lines with #, to the end"
    return [line[5:] for line in rest if line.startswith("#     ")]


def differs(line, found):
    """Why the line that was printed is not the one that is told, or ""."""
    words, other = (NUMBER.sub("0", z).split() for z in (line, found))
    if words != other:
        return f"words: {found!r} in place of {line!r}"
    for a, b in zip(NUMBER.findall(line), NUMBER.findall(found)):
        if a.endswith(" ms"):
            continue
        x, y = (float(z.replace(",", "")) for z in (a, b))
        if "e" in a:
            near = y < ROUNDING if x < ROUNDING else x / FACTOR <= y <= x * FACTOR
        else:
            near = abs(x - y) <= (BITS if "." in a else 0)
        if not near:
            return f"{b} in place of {a}: {line!r}"
    return ""


def all_that_differ(told, printed):
    """Line by line; of a sampled text its length alone is compared."""
    wrong = [] if len(told) == len(printed) else [f"{len(printed)} lines, told are {len(told)}"]
    for i, (line, found) in enumerate(zip(told, printed)):
        if i and told[i - 1].endswith(SAMPLE):
            lengths = [len(ast.literal_eval(z.strip())) for z in (line, found)]
            wrong += [f"samples of {lengths} characters"] * (lengths[0] != lengths[1])
        elif why := differs(line, found):
            wrong.append(why)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS[:-1])
def test_a_lesson_prints_what_it_says(name, monkeypatch, tmp_path, capsys):
    """Words and exact numbers are equal, others near; its figure is drawn."""
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    import_module(name).main()
    printed = capsys.readouterr().out.splitlines()
    assert all_that_differ(block((ROOT / f"{name}.py").read_text()), printed) == []
    figure = printed[-1].removeprefix("figure: ")
    assert (tmp_path / figure).stat().st_size > 0
    assert (ROOT / "figures" / (tmp_path / figure).name).is_file(), "the READMEs show a copy"


@pytest.mark.parametrize("line, found", [
    ("loss 2.50 bits", "loss 2.51 nats"), ("16 of 16 shapes", "15 of 16 shapes"),
    ("loss 2.50 bits", "loss 2.80 bits"), ("off by 9e-16", "off by 2e-03"),
    ("off by 6e-04", "off by 9e-16"), ("off by 6e-04", "off by 6e-02"),
    ("into 1: None", "into 1: 0")])
def test_a_line_that_is_not_true_is_seen(line, found):
    """Another word, another count, a loss too far away, a difference that is rounding no more."""
    assert differs(line, line) == "" and differs(line, found)


@pytest.mark.parametrize("line, found", [
    ("loss 2.50 bits", "loss 2.61 bits"), ("off by 9e-16", "off by 0e+00"),
    ("off by 6e-04", "off by 7e-04"), ("pairs 3.7 ms", "pairs  41.0 ms"), ("a  b", "a b")])
def test_a_line_that_differs_in_its_last_digits_is_true(line, found):
    """Times are not compared, and the version of Python moves a loss a little."""
    assert differs(line, found) == ""


def test_a_lesson_that_prints_more_or_another_sample_is_seen():
    """A line too many; a sample that is shorter.  Another text of the same length is none."""
    told = ["it writes (yours differs):", "  'ab\\n'", "end"]
    assert all_that_differ(told, ["it writes (yours differs):", "  'xyz'", "end"]) == []
    assert len(all_that_differ(told, ["it writes (yours differs):", "  'xy'", "end", "more"])) == 2
