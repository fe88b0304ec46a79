"""SPOILERS.  Test the rules of the exercises: they reject and identify every known mistake.  Each
rule is broken by a mistake, and unusual correct solutions pass.
"""
import inspect
import os
import random
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import blank
from course import diagnosis, lessons, mistakes, rules
from course.compare import Differs, same
from course.exercises import BY_NAME, EXERCISES, LESSONS
from course.rules import judge, rules_of, sentence_of
from helpers import copy_of_project

NAMES = list(BY_NAME)
ONE, TWO, _, FOUR, *_ = LESSONS
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")

each = pytest.mark.parametrize("name", NAMES)


def diagnosis_of(name, function):
    """Return the first line of the message; check that no line of numbers below is too wide."""
    first, *below = judge(name, function)[1].split("\n")
    assert not [line for line in below if re.match(r" +\[.*\d\]", line) and len(line) > 110]
    return first.removeprefix(f"{name}: ")


@each
def test_each_mistake_is_rejected_and_diagnosed(name):
    """Each known mistake breaks a rule and is named by its sentence; each rule is broken by one."""
    known, tried = mistakes.mistakes_for(name), rules_of(name)
    sentences = {rule.function.__name__: sentence_of(rule) for rule in tried}
    assert [diagnosis_of(name, mistake.function()) for mistake in known] == [
        mistake.sentence or sentences[mistake.name] for mistake in known]
    errors = [(rule.function, diagnosis.error_of(rule, mistake.function()))
              for rule in tried for mistake in known]
    assert {rule.function for rule in tried} == {function for function, error in errors if error}
    assert not [error for _, error in errors if isinstance(error, NameError)], "a misspelled edit"


def test_pytest_runs_the_rules_that_a_diagnosis_tries(request):
    """grade.py assumes their order: the first exercise without a result is the one that hung."""
    files = sorted({exercise.test_file for exercise in EXERCISES})
    found = [rules.rule_of(item) for file in files for item in pytest.Module.from_parent(
        request.session, path=lessons.TESTS / f"{file}.py").collect() if rules.exercise_of(item)]
    wanted = [rule for name in NAMES for rule in rules_of(name)]
    found, wanted = ([(rule.exercise, rule.function.__name__, str(rule.values)) for rule in both]
                     for both in (found, wanted))
    assert [*dict.fromkeys(found)] == [*dict.fromkeys(wanted)]  # a plugin may repeat a test


@each
def test_lines_and_task_of_an_exercise(name):
    body = lessons.solution(BY_NAME[name]).split(":\n", 1)[1].splitlines()
    lines = [line for line in body if not line.strip().startswith("#")]
    assert BY_NAME[name].lines == len(lines) <= 20
    assert len(re.findall(r"\S[.!?](?= [A-Z]|$)", BY_NAME[name].task)) == 3


# the other three return a number or a mask, which their rules compare completely
RIGHT = lessons.TESTS / "course" / "right.py"
UNUSUAL = [name for name in NAMES if name not in ("causal_mask", "reach", "attention_mask")]


@each
def test_an_unusual_correct_solution_passes(name):
    """Its parameters may also have other names, except T of stream_losses."""
    text = lessons.solution(BY_NAME[name], RIGHT if name in UNUSUAL else None)
    assert (text != lessons.solution(BY_NAME[name])) == (name in UNUSUAL)
    function = mistakes.function_from(name, text)
    assert judge(name, lambda *given, T=None: function(*given, *[T] * bool(T))) == (None, "")


@pytest.mark.slow
def test_no_other_test_requires_more_than_the_rules(tmp_path):
    """All other tests pass with unusual correct solutions in the lessons."""
    project = copy_of_project(tmp_path)
    for file in LESSONS:
        lessons.keep_pristine(file, project)
    for exercise in map(BY_NAME.get, UNUSUAL):
        lesson = blank.Lesson(exercise, project / f"{exercise.file}.py")
        body = blank.Lesson(exercise, RIGHT).body
        blank.write_whole(lesson.path, lesson.before + body + lesson.after)
    halves = [subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp",
         tmp_path / str(i), *folders], cwd=project, text=True, stdout=subprocess.PIPE)
        for i, folders in enumerate((["tests/system"], ["tests/formulas", "tests/experiments"]))]
    for half in halves:
        out = half.communicate(timeout=900)[0]
        assert half.returncode == 0, "\n".join(re.findall("^FAILED.*", out, re.MULTILINE))


@pytest.mark.parametrize("name, text", [
    ("attention_mask", "far = torch.arange(T)[:, None] - torch.arange(m + T) + m > M\n    return "
                       "lesson_2.causal_mask(T, m, device) | (far & same_length).to(device)"),
    ("rel_shift", "return rel_shift_by_index(x)")])
def test_an_exercise_may_call_one_that_is_blank(name, text, monkeypatch):
    for lesson, called in (TWO, "causal_mask"), (FOUR, "rel_shift_by_index"):
        monkeypatch.setattr(sys.modules[lesson], called, None)
    assert judge(name, with_body(name, text)) == (None, "")


SETTINGS = {  # a line that changes what an expression returns
    "torch.set_default_dtype(torch.float16)": torch.get_default_dtype,
    "torch.set_default_device('meta')": torch.get_default_device,
    "torch.set_grad_enabled(False)": torch.is_grad_enabled,
    "torch.set_num_threads(2)": torch.get_num_threads,
    "torch.set_autocast_enabled('cpu', True)": lambda: torch.is_autocast_enabled("cpu"),
    "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled,
    "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled,
    "torch.manual_seed(1)": lambda: torch.get_rng_state().sum(),
    "np.random.seed(1)": lambda: np.random.get_state()[1].sum(),
    "random.seed(1)": random.getstate,
    "sys.path.clear()": lambda: [*sys.path],
    "sys.setrecursionlimit(100)": sys.getrecursionlimit,
    "os.environ.clear()": lambda: os.environ.get("PATH"),
    "warnings.simplefilter('error')": lambda: [*warnings.filters],
    "sys.breakpointhook = None": lambda: sys.breakpointhook,
    "sys.stdin.close()": lambda: sys.stdin.closed,
    "sys.stdout.close()": lambda: sys.stdout.closed,
    "sys.stderr = None": lambda: sys.stderr}
LINES = "\n".join(["import os, random, sys, warnings, numpy as np, torch", *SETTINGS])


def test_settings_of_a_lesson_or_an_exercise_cost_no_other_point(tmp_path, monkeypatch):
    """Nor does an assignment to the name of an exercise, which is reported."""
    path = tmp_path / f"{ONE}.py"
    path.write_text(f"{lessons.pristine(ONE)}\nlanes = lanes(torch.arange(9), 2)\n{LINES}")
    monkeypatch.setitem(lessons.under_test, ONE, path)
    monkeypatch.setitem(sys.modules, ONE, sys.modules[ONE])
    monkeypatch.setattr(lessons, "missing", {})
    before = [read() for read in SETTINGS.values()]
    lessons.import_lessons(ONE)
    assert [read() for read in SETTINGS.values()] == before and not lessons.broken
    assert "later line of 01_vanilla_segments.py assigns lanes again (a Tensor" in (
        lessons.problem_of(BY_NAME["lanes"])) and callable(sys.modules[ONE].lanes), "ours is used"
    with lessons.no_terminal(), warnings.catch_warnings():
        exec(LINES, {})
    rules.reset()
    assert [read() for read in SETTINGS.values()] == before


def with_body(name, body):
    """Return a function with the shipped first line and another body."""
    head = lessons.solution(BY_NAME[name]).split(":\n", 1)[0]
    return mistakes.function_from(name, f"{head}:\n    {body}\n")


@each
@pytest.mark.parametrize("body, words", [
    ("pass", "nothing is returned"),
    ("return 'text'", "str"),
    ("[][3]", "IndexError in line {line} ([][3]): list index out of range"),
    ("torch.nn.Linear(2, 3)(torch.ones(4))",  # this error is raised inside torch
     "RuntimeError in line {line} (torch.nn.Linear(2, 3)(torch.ones(4))): ")])
def test_an_accident_is_reported_in_one_line(name, body, words):
    function = with_body(name, body)
    code = getattr(function, "__wrapped__", function).__code__
    line = max(n for *_, n in code.co_lines() if n)
    assert words.format(line=line) in diagnosis_of(name, function)


def test_an_endless_loop_an_array_and_another_dtype_are_reported(monkeypatch, pytestconfig):
    """The array has the right values, but the result must be a tensor."""
    right = lessons.function_of(BY_NAME["rel_shift"])
    assert "torch tensor of shape (3, 5), got a NumPy" in diagnosis_of(
        "rel_shift", lambda x: x.numpy())
    message = judge("rel_shift", lambda x: right(x).float())[1]
    plain = pytestconfig.option.assertmode == "plain"  # then asserts show no values
    assert plain or "found: (torch.float32, 'meta') == (torch.f" in message
    message = judge("generate", lessons.function_of(BY_NAME["generate"]).__wrapped__)[1]
    assert plain or "found: any([True, True])" in message
    assert "breakpoint() is still in the code" in diagnosis_of(
        "reach", with_body("reach", "breakpoint()"))
    assert "T keeps its name" in judge("stream_losses", lambda model, x, y, n: 0)[1]
    monkeypatch.setattr(rules, "SECONDS", 1)
    said = diagnosis_of("reach", with_body("reach", "while True: pass"))
    assert "endless loop" in said and "in line" in said


def test_the_warnings_of_a_mistake_are_not_shown(monkeypatch, recwarn):
    """A wrong result is compared with every mistake, and some of them make torch warn."""
    noisy = mistakes.Mistake("reach", "name", ("return __import__('warnings').warn('noisy') or 0",))
    monkeypatch.setattr(mistakes, "mistakes_for", lambda name: [noisy])
    assert diagnosis_of("reach", lambda N, T, M: 0) == "name" and not recwarn.list


def test_a_mistake_is_diagnosed_only_if_the_shipped_function_is_correct(monkeypatch):
    """An edit outside the function would give every mistake the same result."""
    monkeypatch.setattr(diagnosis, "error_of", diagnosis.error_of.__wrapped__)  # without a cache
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, sizes: x.new_zeros(len(x), 6))
    said = diagnosis_of("rel_shift", lessons.function_of(BY_NAME["rel_shift"]))
    assert said.startswith("Row i moves left by ")


def test_a_mistake_is_diagnosed_whatever_its_undefined_cells_contain():
    def moved_by_i(x):
        return torch.stack([torch.cat([row[i:], 0 * row[:i]]) for i, row in enumerate(x)])
    assert diagnosis_of("rel_shift_by_index", moved_by_i).startswith("row i is moved by i")


@pytest.mark.parametrize("got, wanted, text", [
    ([1.0], [torch.nan], "1 of 1 entries are wrong, the first at [0]"),
    ([3e-5, 0.5], [0.0, 0.5], "1 of 2 entries are wrong, by 3e-05 at most, the first at [0]"),
    ([1 / 3], [0.333333], "wrong, by 3e-07 at most (is there a float32 on the way?), the first"),
    ([0.5, 1.0], [0.0, 0.5], "2 of 2 entries are wrong, the first at [0]"),
    (1000 + 1e-9, 1000.0, "the result must be 1000.0, got 1000.000000001"),
    (torch.tensor([1, 2]), [1, 2, 3], "(3,), got (2,)\n    expected    got\n"
     "    [1 2 3]     [1 2]")])
def test_a_difference_is_found_and_described(got, wanted, text):
    """NaN equals only NaN, a tolerance is absolute, and small differences and shapes are shown."""
    assert same([torch.nan, 5e-10], [torch.nan, 0.0], tolerance=6e-10)
    with pytest.raises(Differs, match=re.escape(text)):
        same(got, wanted, tolerance=6e-10)


@pytest.mark.parametrize("page", ["README.md", "tests/README.md"])
def test_the_quoted_failure_and_rule_are_real(page):
    """Each quoted line is in the message for a wrong row, or in the rule's source."""
    wrong = next(mistake for mistake in mistakes.mistakes_for("rel_shift")
                 if mistake.sentence.startswith("the rows went to the right"))
    rule, message = judge("rel_shift", wrong.function())
    quoted = re.findall(r"^ *(rel_shift: the rows.*?)\n(?:\n|```|hint)|^( *def test_row_i.*?)\n\n",
                        (lessons.ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    known = " ".join((message + inspect.getsource(rule.function)).split())
    lines = "\n".join(a + b for a, b in quoted).splitlines()
    assert len(lines) >= 5
    assert not [line for line in lines if " ".join(line.split(" ...")[0].split()) not in known]
