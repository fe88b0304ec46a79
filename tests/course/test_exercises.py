"""The exercises: one test each, which says what is wrong and why.

    pytest -k rel_shift            one exercise
    pytest -k rel_shift --hints    the same, with a hint
    python tests/blank.py --list   all of them, and how far you are
"""
import textwrap

import pytest

from course.exercises import EXERCISES, BY_NAME, state


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_exercise(name, request):
    """Solved, or a diagnosis: see checks.py for what is tested."""
    found, message = state(name)
    if found == "missing":
        pytest.skip(message)
    if found == "failing":
        hint = BY_NAME[name].hint if request.config.getoption("hints") else (
            f"pytest -k {name} --hints")
        diagnosis, *below = message.splitlines()
        message = "\n".join([*textwrap.wrap(diagnosis, 96), *below, "",
                             *textwrap.wrap(f"hint: {hint}", 96)])
    if found != "solved":
        pytest.fail(message, pytrace=False)
