"""SPOILERS.  Are the rules of the exercises right?  Every known mistake is refused and named, every
unusual right solution passes, and no solution stands where students read.

    pytest tests/course/test_course.py
"""
import ast
import os
import re
import textwrap
from collections import Counter

import pytest

from course import mistakes, rules, submission
from course.diagnosis import outcome_of_mistake
from course.exercises import BY_NAME, EXERCISES, ROOT, find, text_of
from course.rules import judge, rules_of, state

NAMES = [exercise.name for exercise in EXERCISES]
MANY = ("relative_attention", "layer", "train_step", "evaluate")  # mistakes: they take seconds
RIGHT = sorted((ROOT / "tests" / "course" / "right").iterdir())

pytestmark = pytest.mark.skipif("XL_CODE" in os.environ, reason="tests the rules on our code only")


def waits(name):
    """Skip while the function in its lesson is not done."""
    if state(name)[0] != "solved":
        pytest.skip(f"waits for {name}")


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
    waits(name)
    wrong = []
    for mistake in mistakes.of(name):
        rule, message = judge(name, mistake.function())
        if rule is None:
            wrong.append(f"passes: {mistake.name}")
            continue
        wanted = mistake.sentence or rules_by_test(name)[mistake.name]
        first = one_line(message)
        rows = [line for line in message.split("\n")[1:] if re.match(r" +\[.*\d\]", line)]
        assert max(map(len, rows), default=0) <= 110, f"too wide to read:\n{message}"
        if wanted != first.removeprefix(f"{name}: "):
            wrong.append(f"should say: {wanted}\n  says: {message}")
    assert not wrong, "\n".join(wrong)


def rules_by_test(name):
    """{name of the test: its sentence} of an exercise."""
    return {rule.test.__name__: rule.sentence for rule in rules_of(name)}


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_is_needed_by_a_mistake(name):
    """A rule that no known mistake breaks is never seen to fail."""
    waits(name)
    kept = [rule for rule in rules_of(name)
            if not any(outcome_of_mistake(rule, mistake) for mistake in mistakes.of(name))]
    broken = {rule.test for rule in rules_of(name) if rule not in kept}
    assert not [rule.where for rule in kept if rule.test not in broken]


def test_mistakes_differ_from_each_other():
    sources = Counter(ast.unparse(ast.parse(m.source())) for n in NAMES for m in mistakes.of(n))
    sources.update(ast.unparse(ast.parse(mistakes.solution(name))) for name in NAMES)
    twice = [source for source, count in sources.items() if count > 1]
    assert not twice, f"two mistakes are one, or one is the right solution:\n{twice[0]}"


def test_every_public_bug_is_among_the_mistakes():
    assert {m.bug for name in NAMES for m in mistakes.of(name)} - {0} == set(mistakes.BUGS)


@pytest.mark.parametrize("name", NAMES)
def test_lines_and_task_of_an_exercise(name):
    """At most twenty lines, counted right, and a task of three sentences."""
    exercise, body = BY_NAME[name], mistakes.solution(name).split(":\n", 1)[1].splitlines()
    lines = [line for line in body if not line.strip().startswith("#")]
    assert exercise.lines == len(lines) <= 20
    assert len(re.findall(r"\S[.!?](?= [A-Z]|$)", exercise.task)) == 3


# ---- right solutions ----------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_shipped_solution_keeps_the_rules(name):
    waits(name)
    assert judge(name, submission.function_of(BY_NAME[name])) == (None, "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", RIGHT, ids=lambda path: path.name)
def test_unusual_right_solution_keeps_the_rules(folder, name):
    """The three folders of right/ hold one of each exercise; each can be laid over by XL_CODE."""
    waits(name)
    text = submission.Overlay(folder).functions[name].read_text()
    node, _ = find(text, BY_NAME[name].function)
    function = mistakes.function_from(name, text_of(text, node))
    assert judge(name, function) == (None, "")


@pytest.mark.parametrize("name", NAMES)
def test_solutions_are_those_of_the_lessons(name):
    waits(name)
    assert submission.is_as_shipped(BY_NAME[name]), (
        f"solutions.py differs from the lesson in {name}: copy the function over")


# ---- accidents that happen in every exercise ----------------------------------------------------

def with_body(name, body):
    """The source of a function with the right first line and another body."""
    tree = ast.parse(mistakes.solution(name))
    tree.body[0].body = ast.parse(textwrap.dedent(body)).body
    return mistakes.function_from(name, ast.unparse(tree))


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"four_terms", "segments", "train_step"}))
def test_a_numpy_array_in_place_of_a_tensor_is_told(name):
    _, message = judge(name, with_body(name, "import numpy\nreturn numpy.zeros(3)"))
    assert "NumPy array, should be a" in one_line(message) or "ndarray" in one_line(message)


def test_what_is_cut_of_a_long_print_is_said():
    """The first twenty lines, and how many more there were."""
    assert rules.beginning("a\n" * 20) == "\n".join("a" * 20)
    assert rules.beginning("a\n" * 23).splitlines()[19:] == ["a", "... (3 more lines)"]


def test_printing_is_no_mistake():
    assert judge("reach", with_body("reach", "print(N)\n" + "\n".join(
        mistakes.solution("reach").splitlines()[1:]).replace("\n    ", "\n")[4:])) == (None, "")


def test_endless_loop_is_told(monkeypatch):
    monkeypatch.setattr(rules, "SECONDS", 1)
    rule, message = judge("reach", with_body("reach", "while True: pass"))
    assert "endless loop" in one_line(message) and "in line" in message
