"""What all tests share: whose code is tested, what waits for a blank exercise, how far you are.

    pytest                        everything that is quick
    pytest -k rel_shift           the rules of one exercise; --hints adds a hint
    pytest -m rule                the rules of all exercises
    pytest -m slow                the rest: whole lessons, run as a reader runs them
    XL_CODE=folder pytest         in a copy of the project, with a student's files laid over

A test that takes an exercise by its name is a rule of it (course/rules.py).  The first rule that is
broken speaks, and the others of that exercise are left out.  Any other test that calls a function
which is still blank, or wrong, says nothing about itself: it is skipped, and waits for that one.
"""
import difflib
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "experiments")]  # after tests/: its helpers are ours
from course import copies, lessons, rules
from course.exercises import BY_NAME, EXERCISES, LESSONS, in_lines
from course.rules import exercise_of

torch.set_num_threads(1)  # the tensors are tiny, and sums must not depend on the number of cores
waiting = Counter()  # how many tests wait for what
spoken = {}  # exercise -> the message of its first broken rule
interrupted = []  # not empty after Ctrl-C


def pytest_addoption(parser):
    parser.addoption("--hints", action="store_true", help="show a hint with a failing exercise")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With XL_CODE, all of this run happens in a copy of the project."""
    if place := os.environ.get("XL_CODE"):
        try:
            with copies.laid_over(place) as copy:
                return copy.run(config.invocation_params.args)
        except ValueError as error:
            raise pytest.UsageError(f"XL_CODE: {error}") from None


def chosen(config):
    """The exercises that -k names: `-k rel_shift`, `-k "lanes or segments"`; [] if it says else."""
    names = config.option.keyword.split(" or ")
    return names if all(name in BY_NAME for name in names) else []


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs long; left out unless -m asks for it")
    config.addinivalue_line("markers", "rule: says what an exercise must do")
    if "XL_HANDED_IN" in os.environ:
        copies.limit_resources()
    files = [BY_NAME[name].file for name in chosen(config)]  # one needs no later lesson
    lessons.import_lessons(max(files, key=LESSONS.index, default=LESSONS[-1]))


def pytest_sessionstart(session):
    rules.session[:] = [session]


# ---- which tests run, and in what order ---------------------------------------------------------

def pytest_ignore_collect(collection_path, config):
    """An exercise alone needs one file."""
    files = [BY_NAME[name].test_file for name in chosen(config)]
    if files and collection_path.name.startswith("test_") and collection_path.stem not in files:
        return True
    return None  # pytest decides


def pytest_itemcollected(item):
    """A rule is found by -m rule and -k; a report (--junitxml) notes its exercise, and later the
    state of that."""
    if name := exercise_of(item):
        item.add_marker("rule")
        item.extra_keyword_matches.add(name)
        item.user_properties.append(("exercise", name))
        if BY_NAME[name].file not in lessons.handed_in:
            item.user_properties.append(("state", "missing"))


def pytest_collection_modifyitems(config, items):
    """The rules first.  Slow tests only if -m decides or a test is asked for by file::test."""
    left_out = []
    if names := chosen(config):
        left_out = [item for item in items if exercise_of(item) not in names]
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
    if report.failed and lessons.broken and collector.path.is_file():
        text = collector.path.read_text() + str(report.longrepr)
        for lesson, why in lessons.broken.items():
            if re.search(rf"\b{lesson}\b", text):
                waiting[why] += 1
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 0, f"Skipped: {why}")
                break
    return report


# ---- the functions under test -------------------------------------------------------------------

def fixture_of(exercise):
    """The fixture by which a rule takes an exercise; None, if there is no function."""
    @pytest.fixture(name=exercise.name)
    def function():
        if exercise.file not in lessons.handed_in:
            pytest.skip(f"{exercise.name} is not in XL_CODE; where it is needed, ours is used")
        return None if lessons.problem_of(exercise) else lessons.function_of(exercise)
    return function


for exercise in EXERCISES:
    globals()[f"fixture_{exercise.name}"] = fixture_of(exercise)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, so none depends on those that ran before it."""
    rules.start_anew()


@pytest.fixture
def our_own():
    """For tests that compare bits or words of our own solutions: a right one may round, or speak,
    otherwise."""
    for exercise in EXERCISES:
        if not lessons.is_as_shipped(exercise):
            pytest.skip(f"compares with our own {exercise.name}")


@pytest.fixture
def process_of_its_own():
    """For tests that start Python anew: what waits there cannot be seen from here."""
    for exercise in EXERCISES:
        if rules.state(exercise.name)[0] not in ("solved", "missing"):
            waiting[exercise.name] += 1
            pytest.skip(f"waits for {exercise.name}")


# ---- rules that are broken, and tests that wait -------------------------------------------------

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """All other tests begin after the wrong exercises have been set aside: before their fixtures
    put anything in an exercise's place."""
    if exercise_of(item) is None:
        set_wrong_ones_aside()


@cache
def set_wrong_ones_aside():
    """Once, after the rules: who calls a wrong exercise from now on waits for it."""
    for exercise in EXERCISES:
        if rules.state(exercise.name)[0] == "failing" and exercise.file not in lessons.broken:
            lessons.set_aside(exercise)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The first broken rule of an exercise speaks.  An endless loop ends."""
    name = exercise_of(item)
    if name in spoken:
        pytest.skip(f"after the first broken rule of {name}")
    if name is None:
        return (yield)
    if problem := lessons.problem_of(BY_NAME[name]):
        pytest.fail(f"{name}: {problem}", pytrace=False)
    with lessons.time_limit(rules.SECONDS), torch.enable_grad():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A broken rule becomes a diagnosis, a failure that comes from an unsolved exercise a skip."""
    report, name = (yield), exercise_of(item)
    if name and call.when == "call" and report.passed:
        rules.passed.add((name, item.name))
    if not report.failed or not call.excinfo:
        return report
    if name:
        report.longrepr = spoken[name] = told(item, name, call.excinfo.value)
        report.sections = [(title, rules.beginning(text)) for title, text in report.sections]
    elif blank := lessons.blank_in(call.excinfo.value):
        waiting[blank.name] += 1
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0,
                           f"Skipped: waits for {blank.name}")
    return report


def told(item, name, error):
    """What is printed for a broken rule."""
    message = str(error)  # why there is no function to judge
    if function := item.funcargs.get(name):
        message = rules.message(name, item, function, error)
    rules.states[name] = rules.state_of(item, message)
    item.user_properties.append(("state", rules.states[name][0]))
    hint = BY_NAME[name].hint if item.config.getoption("hints") else f"pytest -k {name} --hints"
    diagnosis, *below = message.splitlines()
    wrapped = [part for line in below for part in (
        in_lines(line, 96, subsequent_indent="  ") if len(line) > 100 else [line])]
    return "\n".join([*in_lines(diagnosis, 96), *wrapped, *in_lines(f"hint: {hint}", 96)])


# ---- what is said at the end --------------------------------------------------------------------

def pytest_terminal_summary(terminalreporter, config):
    if len(lessons.handed_in) < len(LESSONS):
        for file in lessons.handed_in:
            terminalreporter.write_line(f"code under test: {ROOT / file}.py")
        terminalreporter.write_line(f"code under test: all else of {ROOT}")
    words = config.option.keyword.split() if not rules.session[0].items else []
    for word in words:
        if word not in BY_NAME and (close := difflib.get_close_matches(word, BY_NAME, 1, 0.5)):
            terminalreporter.write_line(f"no exercise is called {word}; did you mean {close[0]}?")
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
    if (wrong or lessons.broken) and session.exitstatus in (
            pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config):
    """One line at the end: how many exercises are solved, and which is next."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and rules.session and not config.option.collectonly and not interrupted:
        for name in chosen(config) or [None]:
            reporter.write_line(rules.line_of(name) if name else rules.progress_line())
