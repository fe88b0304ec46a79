"""SPOILERS.  Are the rules of the exercises right?  Every known mistake is refused and named, every
rule is broken by one, and an unusual right solution of every exercise passes.

    pytest tests/course/test_course.py
"""
import ast
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from course import lessons, mistakes, rules
from course.diagnosis import counted, outcome_of_mistake, side_by_side
from course.exercises import BY_NAME, EXERCISES, LESSONS, find
from course.rules import judge, rules_of, sentence_of
from helpers import copy_of_project

NAMES = list(BY_NAME)
MANY = ("relative_attention", "layer", "train_step", "evaluate")  # mistakes: they take seconds
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
        wanted = mistake.sentence or sentences[mistake.name]
        rows = [line for line in message.split("\n")[1:] if re.match(r" +\[.*\d\]", line)]
        assert max(map(len, rows), default=0) <= 110, f"too wide to read:\n{message}"
        if rule is None or wanted != one_line(message).removeprefix(f"{name}: "):
            wrong.append(f"should say: {wanted}\n  says: {message or 'nothing, it passes'}")
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


def test_every_public_bug_is_among_the_mistakes():
    found = {m.bug for name in NAMES for m in mistakes.mistakes_for(name)}
    assert found - {0} == set(mistakes.BUGS)


@each
def test_lines_and_task_of_an_exercise(name):
    """At most twenty lines, counted right, and a task of three sentences."""
    body = lessons.solution(BY_NAME[name]).split(":\n", 1)[1].splitlines()
    lines = [line for line in body if not line.strip().startswith("#")]
    assert BY_NAME[name].lines == len(lines) <= 20
    assert len(re.findall(r"\S[.!?](?= [A-Z]|$)", BY_NAME[name].task)) == 3


# ---- right solutions ----------------------------------------------------------------------------

def unusual(name):
    """The right solution of an exercise that is not written as in its lesson, as text."""
    text = (lessons.TESTS / "course" / "right.py").read_text()
    node, _ = find(text, BY_NAME[name].function)
    return textwrap.dedent(ast.get_source_segment(text, node, padded=True)) + "\n"


@each
def test_an_unusual_right_solution_keeps_the_rules(name):
    assert judge(name, mistakes.function_from(name, unusual(name))) == (None, "")


@pytest.mark.slow
def test_nobody_relies_on_more_than_the_rules_ask(tmp_path):
    """With an unusual right solution of every exercise, and none put back, pytest is green."""
    project = copy_of_project(tmp_path)
    for file in LESSONS:
        lessons.keep_pristine(file, project)
        text = lessons.pristine(file)
        for exercise in [e for e in EXERCISES if e.file == file]:
            node, _ = find(text, exercise.function)
            (new,) = ast.parse(unusual(exercise.name)).body
            new.body.insert(0, node.body[0])  # the docstring and its examples stay
            text = text.replace(ast.get_source_segment(text, node, padded=True), textwrap.indent(
                ast.unparse(new), node.col_offset * " "))
        (project / f"{file}.py").write_text(text)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=project, text=True,
                          capture_output=True, timeout=900)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if "FAILED" in line)
    assert lines[-1] == f"{len(EXERCISES)} of {len(EXERCISES)} exercises solved"


# ---- what a student is told ---------------------------------------------------------------------

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
    ("torch.nn.Linear(2, 3)(torch.ones(4))",  # raised in a file of torch's
     "RuntimeError in line {line} (torch.nn.Linear(2, 3)(torch.ones(4))): ")])
def test_accident_is_told_in_one_line(name, body, words):
    function = with_body(name, body)
    rule, message = judge(name, function)
    code = getattr(function, "__wrapped__", function).__code__
    assert rule and words.format(line=max(n for *_, n in code.co_lines() if n)) in one_line(message)


def test_an_endless_loop_and_an_array_are_told(monkeypatch):
    """An array in place of a tensor is right in its numbers, but not what was asked for."""
    _, message = judge("rel_shift", lambda x: x.numpy())
    assert "the result is a NumPy array, should be a torch tensor" in one_line(message)
    monkeypatch.setattr(rules, "SECONDS", 1)
    _, message = judge("reach", with_body("reach", "while True: pass"))
    assert "endless loop" in one_line(message) and "in line" in message


@pytest.mark.parametrize("edit, words", [
    (("a line that was", "here"), "{rule}"),  # the lesson was edited since: left out
    ("def reach(N, T, M):\n    import warnings\n    warnings.warn('noisy')\n    return 0\n",
     "name")])
def test_a_mistake_disturbs_no_diagnosis(monkeypatch, recwarn, edit, words):
    """A wrong answer is compared with every mistake: one may not fit, torch warns of another."""
    mistake = mistakes.Mistake("reach", "name", (edit,))
    monkeypatch.setattr(mistakes, "mistakes_for", lambda name: [mistake])
    rule, message = judge("reach", lambda N, T, M: 0)
    assert one_line(message) == f"reach: {words.format(rule=sentence_of(rule))}"
    assert not recwarn.list


def test_a_mistake_is_named_whatever_stands_in_the_cells_that_it_leaves_open():
    def moved_by_i(x):
        return torch.stack([torch.cat([row[i:], 0 * row[:i]]) for i, row in enumerate(x)])

    _, message = judge("rel_shift_by_index", moved_by_i)
    assert one_line(message).startswith("rel_shift_by_index: row i is moved by i")


def test_a_difference_is_said_as_it_is():
    """What two digits do not show; the shape of a row; the values of an assert without `same`;
    how much of a long print is left out."""
    wanted = torch.arange(4.0, dtype=torch.float64).view(2, 2)
    for by, words in ((3e-5, " wrong, by 3e-05 at most,"), (0.5, " wrong, the")):
        given = SimpleNamespace(wanted=wanted, found=wanted + by, compared=None, tolerance=1e-8)
        assert f"4 of 4 entries are{words}" in counted(given)
    said = side_by_side([1, 2, 3], torch.tensor([1, 2]))
    assert "expected (3,), got (2,)" in said and "[1 2 3]" in said and "[1 2]" in said
    _, message = judge("rel_shift", lambda x: lessons.function_of(BY_NAME["rel_shift"])(x).float())
    assert "found: torch.float32 == torch.float16" in message
    assert rules.first_lines("a\n" * 23).splitlines()[19:] == ["a", "... (3 more lines)"]


@pytest.mark.parametrize("found, goes_on", [("solved", True), ("failing", False)])
def test_the_next_exercise_is_named_after_a_solved_one(found, goes_on, monkeypatch):
    """A student whose exercise fails stays with it."""
    monkeypatch.setattr(rules, "state", lambda name: (found, ""))
    monkeypatch.setattr(lessons, "is_blank", lambda e: e.name == "segments")
    line = rules.line_of("lanes")
    assert line.startswith(f"lanes is {found}") and ("next: segments" in line) == goes_on
