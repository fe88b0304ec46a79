"""What all tests share: whose code is tested, what waits for a blank exercise, and how far you are.

    pytest                        everything that is quick
    pytest -k rel_shift           one exercise: its name after -k selects it alone
    pytest -k rel_shift --hints   ... with a hint
    pytest -m slow                the rest: whole lessons, run as a reader runs them
    XL_CODE=folder pytest         a student's files laid over ours

A test that fails because it called a function that is still blank, or wrong, says nothing about
itself: it is shown as skipped, with the name of the exercise that it waits for.
"""
import inspect
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(ROOT / "tests" / "system")]
from course import exercises

torch.set_num_threads(1)  # the tensors are tiny, and sums must not depend on the number of cores
waiting = Counter()  # how many tests wait for what
called = set()  # the code objects of exercises that the running test has called


def pytest_addoption(parser):
    parser.addoption("--hints", action="store_true", help="show a hint with a failing exercise")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs a whole lesson; left out unless -m asks for it")
    folder = os.environ.get("XL_CODE")
    if folder is not None:
        try:
            exercises.lay_over(folder)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    exercises.import_lessons()


def pytest_report_header(config):
    return exercises.whose() + [f"cannot be imported: {why}" for why in
                                dict.fromkeys(exercises.broken.values())]


# ---- which tests run, and in what order ---------------------------------------------------------

def pytest_ignore_collect(collection_path, config):
    """One exercise alone needs one file."""
    alone = config.option.keyword in exercises.BY_NAME
    return alone and collection_path.name.startswith("test_") and (
        collection_path.name != "test_exercises.py") or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The tests of a lesson that cannot be imported wait for it; they are not errors themselves."""
    report = yield
    text = collector.path.read_text() if report.failed and collector.path.is_file() else ""
    lesson = collector.name.removeprefix("test_").removesuffix(".py")
    why = next((why for name, why in exercises.broken.items()
                if name == lesson or f'"{name}"' in text), "")
    if report.failed and why:
        waiting[why] += 1
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {why}")
    return report


def pytest_collection_modifyitems(config, items):
    """Exercises first.  Slow tests only if -m decides or a test is asked for by file::test."""
    if config.option.keyword in exercises.BY_NAME:
        chosen = [item for item in items if item.name == f"test_exercise[{config.option.keyword}]"]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    items.sort(key=lambda item: item.path.name != "test_exercises.py")
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, so none depends on those that ran before it."""
    torch.manual_seed(0)


# ---- tests that wait for an exercise ------------------------------------------------------------

@pytest.fixture
def process_of_its_own():
    """For tests that start Python anew: what happens there cannot be watched from here."""
    if exercises.overlay:
        pytest.skip("starts a process of its own, which knows nothing of XL_CODE")
    for exercise in exercises.EXERCISES:
        if exercises.state(exercise.name)[0] != "solved":
            waiting[exercise.name] += 1
            pytest.skip(f"waits for {exercise.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """While an exercise is wrong, note whether the test calls it; do not enter an endless loop."""
    wrong = {code_of(e): e for e in unsolved("failing")}
    if not wrong or item.path.name == "test_exercises.py":
        return (yield)
    called.clear()

    def watch(frame, event, arg):
        if event == "call" and frame.f_code in wrong:
            called.add(frame.f_code)
            if "TimeoutError" in exercises.state(wrong[frame.f_code].name)[1]:
                raise TimeoutError("this exercise has run too long before")

    sys.setprofile(watch)
    try:
        return (yield)
    finally:
        sys.setprofile(None)


def code_of(exercise):
    """The code object of its function, which the interpreter's frames carry, too."""
    return inspect.unwrap(exercises.function_of(exercise)).__code__


def unsolved(how):
    """The exercises in this state whose function is there."""
    return [e for e in exercises.EXERCISES if exercises.state(e.name)[0] == how
            and e.file not in exercises.broken and exercises.is_there(e)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure that comes from an unsolved exercise becomes a skip that names it."""
    report = yield
    if report.failed and call.excinfo and item.path.name != "test_exercises.py":
        blank = exercises.is_blank(call.excinfo.value)
        wrong = [e for e in unsolved("failing") if code_of(e) in called]
        for exercise in ([blank] if blank else wrong)[:1]:
            waiting[exercise.name] += 1
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0,
                               f"Skipped: waits for {exercise.name}")
    return report


def pytest_terminal_summary(terminalreporter):
    for name, count in waiting.items():
        noun = "test waits" if count == 1 else "tests wait"
        if name not in exercises.BY_NAME:
            noun = noun.replace("test", "test file")
        terminalreporter.write_line(f"{count} {noun} for {name}")


def pytest_unconfigure(config):
    """One line at the end: how many exercises are solved, and which is next."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and "course.checks" in sys.modules and not config.option.collectonly:
        reporter.write_line(exercises.progress_line())
