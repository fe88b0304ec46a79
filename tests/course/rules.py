"""Find the rules of an exercise, and run them on any function, by pytest or by a call.

    def test_a_query_sees_itself(causal_mask):
        \"\"\"A query sees itself.\"\"\"
        assert same(causal_mask(2, 0), [[0, 1], [0, 0]])

A test that takes an exercise as an argument is a rule of it: one sentence, one assert.  It may also
take parameters, but no other fixture, so it can be called with another function at any time.
"""
import inspect
import io
import itertools
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from unittest.mock import patch

import numpy as np
import pytest
import torch

from course import lessons, oracles
from course.exercises import BY_NAME, EXERCISES, find
from course.lessons import time_limit

SECONDS = 10  # the limit for one rule; all rules of one exercise take less than a second
SETTINGS = (  # of this process; a mistake in one exercise must not cost a point in another
    (os.environ.update, {**os.environ}), (sys.path.__setitem__, slice(None), [*sys.path]),
    (sys.setrecursionlimit, sys.getrecursionlimit()), (random.seed, 0), (np.random.seed, 0),
    (torch.set_num_threads, 1),  # sums must not depend on the number of cores
    (torch.set_grad_enabled, True), (torch.set_default_device, None),
    (torch.set_default_dtype, torch.float32), (torch.set_autocast_enabled, "cpu", False),
    (torch.use_deterministic_algorithms, False), (torch.autograd.set_detect_anomaly, False),
    # only the CPU's seed, which is a hundred times faster; no student writes this number
    (torch.default_generator.manual_seed, 8_675_120_309_417))
replaced = patch.multiple  # replaces names of a module in a `with` block: one exercise is tested


# ---- the rules of an exercise -------------------------------------------------------------------

@dataclass(frozen=True, eq=False)  # hashable, for error_of
class Rule:
    """A test that takes an exercise as an argument, with one set of its parameters."""

    exercise: str
    function: Callable
    values: dict


def exercise_of(item):
    """Return the name of the exercise of which this pytest item is a rule, or None."""
    return next((name for name in getattr(item, "fixturenames", ()) if name in BY_NAME), None)


def rule_of(item):
    """Return the Rule of a pytest item."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    own = inspect.signature(item.function).parameters  # a plugin may add others
    return Rule(exercise_of(item), item.function, {k: values[k] for k in values if k in own})


@cache
def rules_of(name):
    """Return the rules of an exercise in the order of its test file, without running pytest."""
    found = []
    for test, function in vars(import_module(BY_NAME[name].test_file)).items():
        if test.startswith("test_") and name in inspect.signature(function).parameters:
            marks = [mark.args for mark in getattr(function, "pytestmark", ())]  # parametrize only
            for choice in itertools.product(*(values for _, values in marks)):
                values = {}
                for (names, _), value in zip(marks, choice):
                    names = names.split(", ")
                    values |= zip(names, value if len(names) > 1 else [value])
                found.append(Rule(name, function, values))
    return found


def run(rule, function):
    """Run a rule on this function.  Raises an error if the function breaks it."""
    reset()
    with alone(rule.exercise):
        rule.function(**{**rule.values, rule.exercise: function})


@contextmanager
def alone(name):
    """Replace the exercises that this one may call with oracles: each is judged alone."""
    with ExitStack() as stack:
        for file, oracle_of in oracles.REPLACED.items():
            others = {part: oracle_of[part] for part in oracle_of if part != name}
            if others and file in sys.modules:
                stack.enter_context(replaced(sys.modules[file], create=True, **others))
        yield


def reset():
    """Set the same seed and settings for every test, so that none depends on earlier ones."""
    for change, *values in SETTINGS:
        change(*values)


def sentence_of(rule):
    """Return the rule in words: the first paragraph of its docstring."""
    return " ".join(inspect.getdoc(rule.function).split("\n\n")[0].split())


# ---- the state of an exercise -------------------------------------------------------------------

FAILURES = (Exception, SystemExit, pytest.fail.Exception)
passed = Counter()  # exercise -> how many of its rules have passed under pytest
states = {}  # exercise -> (state, message); each is judged once


def judge(name, function):
    """Return (None, "") if all rules hold, otherwise (the first broken rule, the message)."""
    try:
        with warnings.catch_warnings(), lessons.no_terminal():
            warnings.simplefilter("ignore")
            for rule in rules_of(name):
                with time_limit(SECONDS):
                    run(rule, function)
    except FAILURES as error:
        return rule, failure_message(rule, function, error)
    return None, ""


def failure_message(rule, function, error):
    """Return the message for a student: the diagnosis, the rule, and the values."""
    name, exercise = rule.exercise, BY_NAME[rule.exercise]
    if not (isinstance(error, NotImplementedError) and str(error).startswith(f"{name} is blank")):
        from course.diagnosis import diagnose  # imports the table of mistakes, which is long
        return f"{name}: {diagnose(rule, function, error)}"
    node, _ = find(lessons.under_test[exercise.file].read_bytes(), exercise.function)
    if len(node.body) > 2:  # more than a docstring and the stub
        return f"{name} is blank: it has code now, so delete its `raise NotImplementedError`"
    return (f"{name} is blank: write {exercise.function} in {exercise.file}.py, then run "
            f"pytest -k {name}\n{exercise.task}")


def counted():
    """Return the exercises whose lesson is under test."""
    return [exercise for exercise in EXERCISES if exercise.file in lessons.under_test]


def state(name):
    """Return ("solved" | "blank" | "failing", message) for the code under test.  This runs its
    rules, unless pytest has run them already."""
    exercise = BY_NAME[name]
    if name not in states:
        with redirect_stdout(io.StringIO()):  # a student's prints would disturb the table
            record(name, lessons.problem_of(exercise)
                   or judge(name, lessons.function_of(exercise))[1])
    return states[name]


def record(name, message=""):
    """Record the message of an exercise, "" if it is solved."""
    is_blank = message.startswith(f"{name} is blank: ")
    kind = "blank" if is_blank else "failing" if message else "solved"
    states[name] = kind, message
    lessons.note(exercise=name, state=kind, message=message)


def progress_line():
    """Return the progress: 9 of 18 exercises solved; next: rel_shift (04)."""
    todo = [e for e in counted() if state(e.name)[0] != "solved"]
    line = f"{len(counted()) - len(todo)} of {len(counted())} exercises solved"
    if len(counted()) < len(EXERCISES):
        line += f" ({len(EXERCISES) - len(counted())} more are not in XL_CODE)"
    return line + (f"; next: {todo[0].name} ({todo[0].lesson})" if todo else "")
