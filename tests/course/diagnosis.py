"""Diagnose a broken rule by comparing the student's result with those of the known mistakes.

`diagnose` runs the broken rule with each known mistake (mistakes.py) in place of the function.  If
one is reported with the same text, the message begins with its sentence, otherwise with the rule's
sentence.  The rule and the expected and actual values follow, side by side.
"""
import inspect
import re
import warnings
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO

import pytest

from course import mistakes
from course.compare import Differs, WrongKind
from course.exercises import BY_NAME
from course.lessons import raised, solution, time_limit
from course.rules import FAILURES, rules_of, run, sentence_of

SECONDS = 5  # the limit for the comparison with all mistakes


@cache
def error_of(rule, function):
    """Run a rule, and return its error or None.  Raises TimeoutError when all time is over."""
    try:
        run(rule, function)
    except TimeoutError:
        raise
    except FAILURES as error:
        return error.with_traceback(None)
    return None


def alike(mine, theirs):
    """Return whether two errors have the same text; ANY in a mistake's result equals any number."""
    words = [re.findall(r"[^\s\[\]]+", str(error)) for error in (mine, theirs)]
    return len(words[0]) == len(words[1]) and all(
        a == b or b.startswith(str(mistakes.ANY)) for a, b in zip(*words))


def misconception(rule, function, mine):
    """Return the sentence of the mistake with the same result in most of the broken rules, or "".
    If the shipped function also breaks this one, the lesson was edited elsewhere."""
    shipped = mistakes.function_from(rule.exercise, solution(BY_NAME[rule.exercise]))
    if is_plain(mine) or isinstance(mine, TimeoutError) or error_of(rule, shipped):
        return ""

    def agreement(mistake):
        """Return the share of equal results, or 0 if only the mistake breaks some rule."""
        both = [(error_of(other, function), error_of(other, mistake.function()))
                for other in rules_of(rule.exercise)]
        if any(theirs and not error for error, theirs in both):
            return 0
        broken = [alike(error, theirs) for error, theirs in both
                  if error and not (is_plain(error) and is_plain(theirs))]
        return sum(broken) / max(1, len(broken))

    found = {mistake: agreement(mistake) for mistake in mistakes.mistakes_for(rule.exercise)
             if mistake.sentence and alike(mine, error_of(rule, mistake.function()))}
    best = max(found, key=found.get, default=None)
    return best.sentence if best and found[best] >= 0.5 else ""


def is_plain(error):
    """Return whether this is a plain assert, `pytest.raises` or a WrongKind: without values."""
    return isinstance(error, AssertionError | pytest.fail.Exception) and not isinstance(
        error, Differs)


def diagnose(rule, function, error):
    """Return the message for a broken rule; its first line is the diagnosis."""
    asked, sentence, below = sentence_of(rule), "", []
    # students need not see the output and the warnings of the mistakes
    with suppress(TimeoutError), time_limit(SECONDS), redirect_stdout(StringIO()), (
            warnings.catch_warnings()):
        warnings.simplefilter("ignore")
        sentence = misconception(rule, function, error)
    is_about_errors = "rejected" in rule.function.__name__
    if is_about_errors and isinstance(error, AssertionError):  # the function's own
        sentence = "you use assert, which raises an AssertionError; use `if` and `raise ValueError`"
    lines = [sentence or asked]
    if isinstance(error, WrongKind):
        lines = [str(error)]
    elif isinstance(error, Differs):
        below = [f"  {error}"]
    elif is_plain(error):  # as pytest reports it: 3 == 4
        # below False or not True, pytest says where it comes from
        noted = re.sub(r"^assert \(?(False|not True)\)?\n \+  where \w+ = ", "", str(error))
        noted = noted.split("\n")[0].removeprefix("assert ")
        if noted not in ("", "False", "not True"):
            below = [f"    found: {noted[:90]}"]
    else:
        code = getattr(inspect.unwrap(function), "__code__", None)
        what = raised(error, code and code.co_filename)
        # a rule that wants a ValueError explains why another error is wrong
        lines = [lines[0], f"  {what}"] if sentence or is_about_errors else [what]
    if lines[0] != asked:
        lines.append(f"  the rule: {asked}")
    source = inspect.getsource(rule.function).split('"""')[-1].strip("\n").rstrip()
    place = [f"line {rule.function.__code__.co_firstlineno}",
             *(f"{name} = {value}" for name, value in rule.values.items())]  # such as T = 3
    place = f"  {BY_NAME[rule.exercise].test_file}.py, {', '.join(place)}:"
    return "\n".join([*lines, place, source, *below])
