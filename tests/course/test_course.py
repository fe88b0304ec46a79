"""SPOILERS.  Are the rules of the exercises right?  Every known mistake is refused and named, every
rule is broken by one, and an unusual right solution of every exercise passes.

    pytest tests/course/test_course.py
"""
import ast
import re
import subprocess
import sys
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from course import lessons, mistakes, rules
from course.diagnosis import counted, outcome_of_mistake, side_by_side
from course.exercises import BY_NAME, EXERCISES, LESSONS, find
from course.rules import judge, rules_of, sentence_of
from helpers import copy_of_project

NAMES = [exercise.name for exercise in EXERCISES]
MANY = ("relative_attention", "layer", "train_step", "evaluate")  # mistakes: they take seconds
RIGHT = lessons.TESTS / "course" / "right"
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")

each = pytest.mark.parametrize("name", NAMES)


def one_line(message):
    """The first line of a message, after checking what every message must be."""
    first = message.split("\n")[0]
    assert len(first) < 300, f"the diagnosis is too long to read:\n{message}"
    assert "site-packages" not in message and "Traceback" not in message, message
    return first


# ---- the table of mistakes ----------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in MANY)) for name in NAMES])
def test_each_mistake_is_refused_and_named(name):
    """Put in the exercise's place, it breaks a rule, and is called by its name."""
    wrong = []
    sentences = {rule.function.__name__: sentence_of(rule) for rule in rules_of(name)}
    for mistake in mistakes.mistakes_for(name):
        rule, message = judge(name, mistake.function())
        if rule is None:
            wrong.append(f"passes: {mistake.name}")
            continue
        wanted = mistake.sentence or sentences[mistake.name]
        first = one_line(message)
        rows = [line for line in message.split("\n")[1:] if re.match(r" +\[.*\d\]", line)]
        assert max(map(len, rows), default=0) <= 110, f"too wide to read:\n{message}"
        if wanted != first.removeprefix(f"{name}: "):
            wrong.append(f"should say: {wanted}\n  says: {message}")
    assert not wrong, "\n".join(wrong)


@each
def test_each_rule_is_broken_by_a_mistake(name):
    """A rule that no known mistake breaks is never seen to fail."""
    broken = {rule.function.__name__ for rule in rules_of(name)
              if any(outcome_of_mistake(rule, mistake) for mistake in mistakes.mistakes_for(name))}
    assert {rule.function.__name__ for rule in rules_of(name)} == broken


def test_pytest_runs_the_rules_that_a_diagnosis_tries(request):
    """The same tests and parameters, found in another way; in the order of the exercises, since
    grade.py takes the first without a result for the one that has hung."""
    files = sorted({exercise.test_file for exercise in EXERCISES})
    found = [rules.rule_of(item) for file in files for item in pytest.Module.from_parent(
        request.session, path=lessons.TESTS / f"{file}.py").collect() if rules.exercise_of(item)]
    wanted = [rule for name in NAMES for rule in rules_of(name)]
    assert [(rule.exercise, rule.name) for rule in found] == [
        (rule.exercise, rule.name) for rule in wanted]


def test_mistakes_differ_from_each_other():
    sources = Counter(ast.unparse(ast.parse(m.source()))
                      for name in NAMES for m in mistakes.mistakes_for(name))
    sources.update(ast.unparse(ast.parse(lessons.solution(exercise))) for exercise in EXERCISES)
    twice = [source for source, count in sources.items() if count > 1]
    assert not twice, f"two mistakes are one, or one is the right solution:\n{twice[0]}"


def test_every_public_bug_is_among_the_mistakes():
    found = {m.bug for name in NAMES for m in mistakes.mistakes_for(name)}
    assert found - {0} == set(mistakes.BUGS)


def test_a_mistake_that_no_longer_fits_is_left_out_of_a_diagnosis(monkeypatch):
    """A lesson may be edited, its mistakes not yet: a student's answer is judged all the same."""
    gone = mistakes.Mistake("reach", "gone", (("a line that was", "here"),))
    monkeypatch.setattr(mistakes, "mistakes_for", lambda name: [gone])
    rule, message = judge("reach", lambda N, T, M: 0)
    assert rule and message.startswith(f"reach: {sentence_of(rule)}")


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_lines_and_task_of_an_exercise(exercise):
    """At most twenty lines, counted right, and a task of three sentences."""
    body = lessons.solution(exercise).split(":\n", 1)[1].splitlines()
    lines = [line for line in body if not line.strip().startswith("#")]
    assert exercise.lines == len(lines) <= 20
    assert len(re.findall(r"\S[.!?](?= [A-Z]|$)", exercise.task)) == 3


# ---- right solutions ----------------------------------------------------------------------------

def unusual(name):
    """The right solution of an exercise that is not written as in its lesson, as text."""
    for path in sorted(RIGHT.glob("*.py")):
        text = path.read_text()
        try:
            node, _ = find(text, BY_NAME[name].function)
            return textwrap.dedent(ast.get_source_segment(text, node, padded=True)) + "\n"
        except KeyError:
            pass
    raise KeyError(f"right/ has no {name}")


@each
def test_an_unusual_right_solution_keeps_the_rules(name):
    assert judge(name, mistakes.function_from(name, unusual(name))) == (None, "")


@pytest.mark.slow
def test_nobody_relies_on_more_than_the_rules_ask(tmp_path):
    """With an unusual right solution of every exercise, and none put back, pytest is green."""
    project = copy_of_project(tmp_path)
    for file in LESSONS:
        lessons.keep_pristine(file, project)
    for exercise in EXERCISES:
        path = project / f"{exercise.file}.py"
        text = path.read_text()
        node, _ = find(text, exercise.function)
        lines = text.splitlines(keepends=True)
        top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        (theirs,) = ast.parse(unusual(exercise.name)).body
        theirs.body.insert(0, node.body[0])  # the docstring and its examples stay
        lines[top - 1 : node.end_lineno] = textwrap.indent(
            ast.unparse(theirs) + "\n", node.col_offset * " ")
        path.write_text("".join(lines))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=project, text=True,
                          capture_output=True, timeout=900)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if "FAILED" in line)
    assert lines[-1] == f"{len(EXERCISES)} of {len(EXERCISES)} exercises solved"


# ---- accidents that happen in every exercise ----------------------------------------------------

def with_body(name, body):
    """The right first line and another body, as a function."""
    tree = ast.parse(lessons.solution(BY_NAME[name]))
    tree.body[0].body = ast.parse(textwrap.dedent(body)).body
    return mistakes.function_from(name, ast.unparse(tree))


@each
@pytest.mark.parametrize("body, words", [
    ("pass", "nothing is returned"),
    ("return 'text'", "str"),
    ("[][3]", "IndexError in line {line} ([][3]): list index out of range"),
    ("torch.ones(2) @ torch.ones(3)",
     "RuntimeError in line {line} (torch.ones(2) @ torch.ones(3)): ")])
def test_accident_is_told_in_one_line(name, body, words):
    function = with_body(name, body)
    rule, message = judge(name, function)
    code = getattr(function, "__wrapped__", function).__code__
    assert rule and words.format(line=max(n for *_, n in code.co_lines() if n)) in one_line(message)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"four_terms", "segments", "train_step"}))
def test_a_numpy_array_in_place_of_a_tensor_is_told(name):
    _, message = judge(name, with_body(name, "import numpy\nreturn numpy.zeros(3)"))
    assert "NumPy array, should be a" in one_line(message) or "ndarray" in one_line(message)


def test_what_is_cut_of_a_long_print_is_said():
    """The first twenty lines, and how many more there were."""
    assert rules.first_lines("a\n" * 20) == "\n".join("a" * 20)
    assert rules.first_lines("a\n" * 23).splitlines()[19:] == ["a", "... (3 more lines)"]


@pytest.mark.parametrize("by, words", [(3e-5, " wrong, by 3e-05 at most,"), (0.5, " wrong, the")])
def test_a_difference_too_small_to_be_seen_is_said(by, words):
    wanted = torch.arange(4.0, dtype=torch.float64).view(2, 2)
    given = SimpleNamespace(wanted=wanted, found=wanted + by, compared=None, tolerance=1e-8)
    assert f"4 of 4 entries are{words}" in counted(given)


def test_the_shape_of_a_row_of_numbers_is_told_as_it_is():
    """Though it is printed as a matrix of one row."""
    said = side_by_side([1, 2, 3], torch.tensor([1, 2]))
    assert "expected (3,), got (2,)" in said and "[1 2 3]" in said and "[1 2]" in said


def test_a_plain_assert_shows_its_values():
    """A rule without `same` also says what it found."""
    rule = next(rule for rule in rules_of("rel_shift") if "dtype" in rule.name)
    with pytest.raises(AssertionError) as error:
        rules.run(rule, lambda x: x.float())
    assert "found: torch.float32 == torch.float16" in rules.failure_message(
        rule, lambda x: x.float(), error.value)


@pytest.mark.parametrize("found, goes_on", [("solved", True), ("failing", False)])
def test_the_next_exercise_is_named_after_a_solved_one(found, goes_on, monkeypatch):
    """A student whose exercise fails stays with it."""
    monkeypatch.setattr(rules, "state", lambda name: (found, ""))
    monkeypatch.setattr(lessons, "is_blank", lambda e: e.name == "segments")
    line = rules.line_of("lanes")
    assert line.startswith(f"lanes is {found}") and ("next: segments" in line) == goes_on


def test_no_warning_of_a_mistake_reaches_a_student(monkeypatch, recwarn):
    """A wrong answer is compared with every mistake; torch warns of some of them."""
    noisy = mistakes.Mistake("reach", "noisy", (
        "def reach(N, T, M):\n    import warnings\n    warnings.warn('noisy')\n    return 1\n",))
    monkeypatch.setattr(mistakes, "mistakes_for", lambda name: [noisy])
    _, message = judge("reach", lambda N, T, M: 1)
    assert message.startswith("reach: noisy") and not recwarn.list


def test_endless_loop_is_told(monkeypatch):
    monkeypatch.setattr(rules, "SECONDS", 1)
    rule, message = judge("reach", with_body("reach", "while True: pass"))
    assert "endless loop" in one_line(message) and "in line" in message
