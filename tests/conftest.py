"""Choose the tests and the code under test, report broken rules, and print your progress.

    pytest                        all quick tests
    pytest -k rel_shift           the rules of one exercise; --hints adds a hint
    pytest -m rule                the rules of all exercises
    pytest -m slow                the slow tests, such as complete lessons
    XL_CODE=folder pytest         the rules, on the lesson files of a submission

A test that takes an exercise as an argument is a rule of it (course/rules.py).  Only the first
broken rule of an exercise is reported; its later rules are skipped.  Only rules run on a
submission, and while one of your own exercises is blank or incorrect.
"""
import os
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = map(str, (ROOT / "tests", ROOT))  # before any other folder
from course import lessons, rules
from course.exercises import BY_NAME, EXERCISES, LESSONS
from course.rules import exercise_of
from support.names import did_you_mean

XL_CODE = os.environ.get("XL_CODE")
LINES = 20  # of what a function prints, the last ones
first_failures = {}  # exercise -> pytest's item of its first broken rule


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--hints", action="store_true", help="show a hint with a failing exercise")
    for plugin in ("cacheprovider", "stepwise") if XL_CODE else ():
        pluginmanager.unregister(name=plugin)  # they would write into the project


def chosen(config):
    """Return the exercises given by -k, as in `-k "lanes or segments"`, or [] if there are none."""
    names = config.option.keyword.split(" or ")
    return names if all(name in BY_NAME for name in names) else []


def pytest_configure(config):
    """Import the lessons, and make each exercise a fixture.  With file::test, slow tests run."""
    functions = {e.name: pytest.fixture(lambda e=e: lessons.function_of(e)) for e in EXERCISES}
    config.pluginmanager.register(type("Functions", (), functions))
    if config.option.markexpr == "not slow" and any("::" in arg for arg in config.args):
        config.option.markexpr = ""
    files = [BY_NAME[name].file for name in chosen(config)]  # an exercise needs no later lesson
    try:
        if XL_CODE:
            lessons.take_lessons_from(XL_CODE)
        lessons.import_lessons(max(files, key=LESSONS.index, default=LESSONS[-1]))
    except ValueError as error:
        raise pytest.UsageError(f"XL_CODE: {error}" if XL_CODE else error) from None


@cache
def only_rules():
    """Return whether all other tests are left out."""
    return bool(XL_CODE) or (
        lessons.in_work() and any(rules.state(e.name)[0] != "solved" for e in EXERCISES))


def pytest_ignore_collect(collection_path, config):
    """Ignore what has no rules, because a blank or broken lesson may make its import fail."""
    files = {BY_NAME[name].test_file for name in chosen(config) or BY_NAME}
    is_other = collection_path.stem not in files and (
        chosen(config) or collection_path.name.startswith("test_") and only_rules())
    return True if is_other else None  # pytest decides


def pytest_collection_modifyitems(config, items):
    """Let -m rule and -k select rules, and leave out what is not tested."""
    names = {exercise.name for exercise in rules.counted()} & set(chosen(config) or BY_NAME)
    kept = []
    for item in items:
        if name := exercise_of(item):
            item.add_marker("rule")
            item.extra_keyword_matches.add(name)
        if name in names or not (name or chosen(config) or only_rules()):
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Set the same seed for every test, so that none depends on earlier ones."""
    rules.reset()


@pytest.fixture
def needs_shipped_solutions():
    """Skip a test of bits or words, because another correct solution may round or print others."""
    if lessons.in_work():
        pytest.skip("compares with the shipped solutions: blank.py --undo restores them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Report only the first broken rule of an exercise, and stop an endless loop."""
    name = exercise_of(item)
    if name is None:
        return (yield)
    if first_failures.get(name, item) is not item:  # a plugin may run a broken rule again
        pytest.skip(f"after the first broken rule of {name}")
    if lessons.problem_of(BY_NAME[name]):
        pytest.fail(pytrace=False)
    lessons.go_home()
    is_typed = sys.__stdin__ and sys.__stdin__.isatty()
    debugger = sys.breakpointhook if is_typed else lessons.BREAKPOINT
    with lessons.time_limit(rules.SECONDS), rules.alone(name), rules.replaced(
            sys, breakpointhook=debugger):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Replace the traceback of a broken rule with a diagnosis."""
    report, name = (yield), exercise_of(item)
    if name and call.when == "call" and report.passed:
        rules.passed[name] += 1
        if rules.passed[name] == len(rules.rules_of(name)):
            rules.record(name)
    if name and report.failed:
        first_failures[name], exercise = item, BY_NAME[name]
        message = lessons.problem_of(exercise) or rules.failure_message(
            rules.rule_of(item), lessons.function_of(exercise), call.excinfo.value)
        rules.record(name, message)
        hint = exercise.hint if item.config.getoption("hints") else f"pytest -k {name} --hints"
        report.sections = [(head, "\n".join(text.splitlines()[-LINES:]))
                           for head, text in report.sections]
        report.longrepr = "\n".join(part for line in f"{message}\nhint: {hint}".splitlines()
                                    for part in textwrap.wrap(line, 96, subsequent_indent="  "))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Print which files were tested, how many exercises are solved, and which is next."""
    yield  # the summary of pytest
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.collectonly or session.exitstatus == pytest.ExitCode.INTERRUPTED or (
            session.items and not any(map(exercise_of, session.items))) or reporter is None:
        return  # no exercise is judged after Ctrl-C: it may be an endless loop
    lines = [f"code under test: {path}" for path in lessons.under_test.values() if XL_CODE]
    if only_rules.cache_info().currsize and only_rules():  # called only if there are other tests
        lines.append("only rules ran" + (": the other tests follow when all exercises in this "
                                         "folder are solved") * (not XL_CODE))
    for word in session.config.option.keyword.split() if not session.items else ():
        if word not in BY_NAME and (closest := did_you_mean(word, BY_NAME)):
            lines.append(f"no exercise is called {word}{closest}")
    counted = {exercise.name for exercise in rules.counted()}
    lines += [f"{name} is {rules.state(name)[0] if name in counted else 'not in XL_CODE'}"
              for name in chosen(session.config)] or [rules.progress_line()]
    for line in lines:
        reporter.write_line(line)
