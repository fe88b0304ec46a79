"""What all tests share: whose code is tested, what waits for a blank exercise, how far you are.

    pytest                        everything that is quick
    pytest -k rel_shift           the rules of one exercise; --hints adds a hint
    pytest -m slow                the rest: whole lessons, run as a reader runs them
    XL_CODE=folder pytest         a student's files laid over ours

A test that takes an exercise by its name is a rule of it (course/rules.py).  The first rule that is
broken speaks, and the others of that exercise are left out.  Any other test that calls a function
which is still blank, or wrong, says nothing about itself: it is skipped, and waits for that one.
"""
import difflib
import os
import sys
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "experiments")]  # after tests/: its helpers are ours
from course import rules, submission
from course.exercises import BY_NAME, EXERCISES, LESSONS

torch.set_num_threads(1)  # the tensors are tiny, and sums must not depend on the number of cores
waiting = Counter()  # how many tests wait for what
spoken = {}  # exercise -> the message of its first broken rule
interrupted = []  # not empty after Ctrl-C


def pytest_addoption(parser):
    parser.addoption("--hints", action="store_true", help="show a hint with a failing exercise")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs long; left out unless -m asks for it")
    place = os.environ.get("XL_CODE")
    if place is not None:
        try:
            submission.lay_over(place)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    alone = BY_NAME.get(config.option.keyword)  # one exercise needs no later lesson
    submission.import_lessons(alone.file if alone else LESSONS[-1])


# ---- which tests run, and in what order ---------------------------------------------------------

def exercise_of(item):
    """The name of the exercise that a test is a rule of, or None."""
    shift = getattr(getattr(item, "callspec", None), "params", {}).get("shift")
    return next((name for name in (*item.fixturenames, shift) if name in BY_NAME), None)


def pytest_ignore_collect(collection_path, config):
    """One exercise alone needs one file."""
    alone = BY_NAME.get(config.option.keyword)
    return alone and collection_path.name.startswith("test_") and (
        collection_path.stem != alone.test_file) or None


def pytest_itemcollected(item):
    """-k finds a rule by its exercise, which it takes as an argument."""
    if exercise_of(item):
        item.extra_keyword_matches.add(exercise_of(item))


def pytest_collection_modifyitems(config, items):
    """The rules first.  Slow tests only if -m decides or a test is asked for by file::test."""
    left_out = []
    if config.option.keyword in BY_NAME:
        left_out = [item for item in items if exercise_of(item) != config.option.keyword]
    elif not config.option.markexpr and not any("::" in arg for arg in config.args):
        left_out = [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: exercise_of(item) is None)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The tests that need a lesson which cannot be imported wait for it; the others run."""
    report = yield
    if report.failed and submission.broken and collector.path.is_file():
        text, stem = collector.path.read_text(), collector.path.stem
        for lesson, why in submission.broken.items():
            rules_here = any(e.test_file == stem for e in EXERCISES if e.file == lesson)
            if (rules_here or f'"{lesson}"' in text or f"import {lesson}" in text
                    or lesson in str(report.longrepr)):  # imported by what it imports
                waiting[why] += 1
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 0, f"Skipped: {why}")
                break
    return report


# ---- the functions under test -------------------------------------------------------------------

def fixture_of(name):
    """The fixture by which a rule takes an exercise."""
    @pytest.fixture(name=name)
    def function():
        return solution(name)
    return function


def solution(name):
    """The function under test; None if there is none."""
    exercise = BY_NAME[name]
    if submission.overlay and not submission.overlay.has(exercise):
        pytest.skip(f"{name} is not in XL_CODE; where it is needed, ours is used")
    return None if submission.problem_of(exercise) else submission.function_of(exercise)


for exercise in EXERCISES:
    globals()[f"fixture_{exercise.name}"] = fixture_of(exercise.name)


@pytest.fixture
def shift(request):
    """For the rules that both exercises of lesson 4 have."""
    return solution(request.param)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, so none depends on those that ran before it."""
    torch.default_generator.manual_seed(0)  # of the CPU alone: a hundredth of the time
    rules.Comparison.last = None


@pytest.fixture
def our_own():
    """For tests that compare bits or words of our own solutions: a right one may round, or speak,
    otherwise."""
    for exercise in EXERCISES:
        if not submission.is_as_shipped(exercise):
            pytest.skip(f"compares with our own {exercise.name}")


@pytest.fixture
def process_of_its_own():
    """For tests that start Python anew: what happens there cannot be watched from here."""
    if submission.overlay:
        pytest.skip("starts a process of its own, which knows nothing of XL_CODE")
    for exercise in EXERCISES:
        if rules.state(exercise.name)[0] != "solved":
            waiting[exercise.name] += 1
            pytest.skip(f"waits for {exercise.name}")


# ---- rules that are broken, and tests that wait -------------------------------------------------

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """All other tests begin after the wrong exercises have been set aside: before their fixtures
    put anything in an exercise's place."""
    if exercise_of(item) is None:
        set_wrong_ones_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The first broken rule of an exercise speaks.  An endless loop ends."""
    name = exercise_of(item)
    if name in spoken:
        pytest.skip(f"after the first broken rule of {name}")
    if name is None:
        return (yield)
    if problem := submission.problem_of(BY_NAME[name]):
        pytest.fail(f"{name}: {problem}", pytrace=False)
    with submission.time_limit(rules.SECONDS), torch.enable_grad():
        return (yield)


@cache
def set_wrong_ones_aside():
    """Once, after the rules: who calls a wrong exercise from now on waits for it."""
    for exercise in EXERCISES:
        if rules.state(exercise.name)[0] == "failing" and not submission.is_missing(exercise):
            submission.set_aside(exercise)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A broken rule becomes a diagnosis, a failure that comes from an unsolved exercise a skip."""
    report = yield
    if not report.failed or not call.excinfo:
        return report
    name, error = exercise_of(item), call.excinfo.value
    if name:
        report.longrepr = spoken[name] = told(item, name, error)
        report.sections = [(title, rules.beginning(text)) for title, text in report.sections]
    elif blank := submission.blank_in(error):
        waiting[blank.name] += 1
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0,
                           f"Skipped: waits for {blank.name}")
    return report


def told(item, name, error):
    """What is printed for a broken rule."""
    message = str(error)  # why there is no function to judge
    if function := item.funcargs.get(name) or item.funcargs.get("shift"):
        rule = next(r for r in rules.rules_of(name) if r.test.__name__ == item.originalname
                    and r.parameters == parameters_of(item, r))
        message = rules.message(name, rule, function, error)
    rules.states[name] = rules.named(item, message)
    hint = BY_NAME[name].hint if item.config.getoption("hints") else f"pytest -k {name} --hints"
    diagnosis, *below = message.splitlines()
    wrapped = [part for line in below for part in (
        textwrap.wrap(line, 96, subsequent_indent="  ") if len(line) > 100 else [line])]
    return "\n".join([*textwrap.wrap(diagnosis, 96), *wrapped, *textwrap.wrap(f"hint: {hint}", 96)])


def parameters_of(item, rule):
    """The parameters of a test as its rule has them, without the exercise itself."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    return {key: given[key] for key in rule.parameters}


# ---- what is said at the end --------------------------------------------------------------------

def pytest_terminal_summary(terminalreporter, config):
    for line in submission.whose():
        terminalreporter.write_line(line)
    keyword = config.option.keyword
    close = difflib.get_close_matches(keyword, BY_NAME, 1, 0.7) if keyword not in BY_NAME else []
    if close:
        terminalreporter.write_line(f"no exercise is called {keyword}; did you mean {close[0]}?")
    for name, count in waiting.items():
        noun = "test waits" if count == 1 else "tests wait"
        if name not in BY_NAME:
            noun = noun.replace("test", "test file")
        terminalreporter.write_line(f"{count} {noun} for {name}")


def pytest_keyboard_interrupt():
    """After Ctrl-C nothing is judged any more: the function may be an endless loop."""
    interrupted.append(True)


def pytest_sessionfinish(session):
    """Tests that wait for a wrong exercise, or a broken lesson, are no success."""
    wrong = [] if interrupted else [
        name for name in waiting if name in BY_NAME and rules.state(name)[0] == "failing"]
    if (wrong or submission.broken) and session.exitstatus in (
            pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config):
    """One line at the end: how many exercises are solved, and which is next."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not config.option.collectonly and not interrupted:
        alone = config.option.keyword in BY_NAME
        reporter.write_line(rules.line_of(config.option.keyword) if alone
                            else rules.progress_line())
