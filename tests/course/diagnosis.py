"""Diagnose a broken rule by comparing the student's result with those of the known mistakes.

`diagnose` runs the broken rule with each known mistake (mistakes.py) in place of the function.  If
one has the same incorrect result, the message begins with its sentence, otherwise with the rule's
sentence.  The rule and the expected and actual values follow, side by side.
"""
import inspect
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import pytest
import torch

from course import mistakes
from course.exercises import BY_NAME
from course.lessons import raised, solution, time_limit
from course.rules import (
    FAILURES, Comparison, equal, place_of, rules_of, run, sentence_of, tensor)

SECONDS = 5  # the limit for the comparison with all mistakes


# ---- the outcome of a rule ----------------------------------------------------------------------

@dataclass
class Outcome:
    """A rule was broken by a wrong result, by an error, or by another assert of the rule."""

    error: BaseException
    comparison: Comparison | None  # the last one, if it failed

    def kind(self):
        """Return "number", "error" or "rule"."""
        if not isinstance(self.error, AssertionError | pytest.fail.Exception):
            return "error"
        return "rule" if self.comparison is None else "number"

    def is_like(self, other):
        """Return whether both are the same incorrect result; a result of only NaN never is."""
        if self.kind() != other.kind():
            return False
        if self.kind() == "error":
            return (type(self.error), str(self.error)) == (type(other.error), str(other.error))
        if self.kind() == "rule":
            return True
        mine, theirs = self.comparison, other.comparison
        if mine.found is None or theirs.found is None or nothing_but_nan(mine.found):
            return False
        compared = mine.compared if mine.found.shape == mine.wanted.shape else None
        given = mine.found
        if given.shape == theirs.found.shape:
            given = given.double().where(theirs.found != mistakes.ANY, mistakes.ANY)
        return equal(given, theirs.found, compared, max(mine.tolerance, 1e-9))


def outcome(error):
    """Return the Outcome of the rule that has just raised this error."""
    last = Comparison.last
    return Outcome(error, last if last is not None and not last else None)


def outcome_of(rule, function):
    """Run a rule, and return its Outcome, or None if it holds.  Raises TimeoutError when the time
    for all comparisons is over."""
    try:
        run(rule, function)
    except TimeoutError:
        raise
    except FAILURES as error:
        return outcome(error.with_traceback(None))
    return None


outcomes = {}  # (mistake, rule) -> Outcome, so that each pair runs once


def outcome_of_mistake(rule, mistake):
    """Return the Outcome of a rule with this mistake in place of the exercise."""
    key = mistake, rule.name
    if key not in outcomes:
        outcomes[key] = outcome_of(rule, mistake.function())
    return outcomes[key]


def alike_under(rule, mistake, mine):
    """Return whether this mistake also passes the rule, or breaks it with the same result."""
    theirs = outcome_of_mistake(rule, mistake)
    return theirs is mine if None in (theirs, mine) else mine.is_like(theirs)


# ---- which mistake is it? -----------------------------------------------------------------------

def misconception(rule, function, mine):
    """Return the sentence of the mistake with the same answers as this function, or "".

    If several mistakes have the same answers, the one that agrees in most of the other rules is
    chosen.  If the shipped function also breaks this rule, the lesson was edited elsewhere, and no
    mistake fits.
    """
    shipped = mistakes.function_from(rule.exercise, solution(BY_NAME[rule.exercise]))
    if mine.kind() == "rule" or outcome_of(rule, shipped) is not None:
        return ""
    alike = [mistake for mistake in mistakes.mistakes_for(rule.exercise)
             if mistake.sentence and alike_under(rule, mistake, mine)]
    if len({mistake.sentence for mistake in alike}) > 1:
        all_mine = [(other, outcome_of(other, function)) for other in rules_of(rule.exercise)]
        alike.sort(key=lambda mistake: -sum(
            alike_under(other, mistake, here) for other, here in all_mine))
    return alike[0].sentence if alike else ""


def diagnose(rule, function, error):
    """Return the message for a broken rule; its first line is the diagnosis."""
    mine, asked = outcome(error), sentence_of(rule)
    comparison = mine.comparison if mine.kind() == "number" else None
    sentence = comparison.problem() if comparison is not None else ""
    if not sentence and not isinstance(error, TimeoutError):
        try:
            # students need not see the output and the warnings of the mistakes
            with time_limit(SECONDS), redirect_stdout(StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sentence = misconception(rule, function, mine)
        except TimeoutError:
            pass
    if mine.kind() == "error":
        code = getattr(inspect.unwrap(function), "__code__", None)
        what = raised(error, code and code.co_filename)
        if "rejected" in rule.name and not sentence:  # the function raised another error
            sentence = asked
        lines = [sentence, f"  {what}"] if sentence else [what]
    else:
        lines = [sentence or asked]
    if lines[0] != asked:
        lines.append(f"  the rule: {asked}")
    lines += [f"  {place_of(rule)}:", *source(rule)]
    if mine.kind() == "rule":
        lines += found_by_pytest(error)
    if comparison is not None and not comparison.problem():
        if not sentence:
            lines.append(f"  {counted(comparison)}")
        lines.append(side_by_side(comparison.wanted, comparison.found, comparison.compared))
    return "\n".join(lines)


def source(rule):
    """Return the lines of a rule after its docstring, [] if there are more than 10."""
    lines = inspect.getsource(rule.function).split('"""')[-1].strip("\n").rstrip().split("\n")
    return lines if len(lines) <= 10 else []


def found_by_pytest(error):
    """Return the values of a plain assert as pytest reports them, "    found: 3 == 4"; [] if they
    explain nothing."""
    noted = str(error).split("\n")[0].removeprefix("assert ")
    return [f"    found: {noted[:90]}"] if noted and noted not in ("False", "not True") else []


# ---- expected and got, side by side -------------------------------------------------------------

def nothing_but_nan(z):
    """Return whether every element is NaN."""
    return z.numel() > 0 and bool(z.isnan().all())


def counted(comparison):
    """Describe in a sentence how much of a result is wrong."""
    got, wanted, compared = comparison.found, comparison.wanted, comparison.compared
    if got.shape != wanted.shape:
        return f"the shape must be {tuple(wanted.shape)}, got {tuple(got.shape)}"
    if nothing_but_nan(got) and not nothing_but_nan(wanted):
        return "every number is NaN: 0 / 0, 0 * inf or inf - inf on the way"
    if not wanted.dim():
        return f"the result must be {wanted.item():.6g}, got {got.item():.6g}"
    apart = (got.double() - wanted.double()).abs()
    wrong = apart.gt(comparison.tolerance) | (got.isnan() != wanted.isnan())
    if compared is not None:
        wrong = wrong & compared
    first = wrong.nonzero()[0].tolist()
    count = wrong.numel() if compared is None else int(compared.expand_as(wrong).sum())
    largest = apart[wrong].max()
    little = f", by {largest:.0e} at most" * bool(largest < 0.01)  # two digits may not show it
    return (f"{int(wrong.sum())} of {count} entries are wrong{little}, the first at "
            f"[{', '.join(map(str, first))}]")


def cells(matrix, mask, decimals):
    """Return the elements of a (rows, columns) tensor as text; a masked cell is a dot."""
    return [["." if mask is not None and mask[i, j] else f"{z.item():.{decimals}f}"
             for j, z in enumerate(row)] for i, row in enumerate(matrix)]


def side_by_side(wanted, got, compared=None):
    """Return two matrices or vectors as text, expected left and got right, at most 10 x 12 numbers.

    If they are larger or have more dimensions, only the part around the first difference is shown.
    """
    shapes = [tuple(tensor(z).shape) for z in (wanted, got)]
    wanted, got = (torch.atleast_2d(tensor(z)) for z in (wanted, got))
    mask = None if compared is None else ~compared
    where, columns = "", 12
    if any(z.is_floating_point() and not equal(z, z.round()) for z in (wanted, got)):
        columns = 6  # with decimals they are wider
    if wanted.shape == got.shape:
        differs = (wanted.double() - got.double()).abs().gt(1e-12) | (wanted.isnan() != got.isnan())
        if mask is not None:
            differs = differs & ~mask
        first = differs.nonzero()[0].tolist() if differs.any() else [0] * wanted.dim()
        if wanted.dim() > 2:
            where = f"at [{', '.join(map(str, first[:-2]))}] "
            wanted, got = wanted[tuple(first[:-2])], got[tuple(first[:-2])]
        top, left = max(0, first[-2] - 9), max(0, first[-1] - columns + 1)
        part = slice(top, top + 10), slice(left, left + columns)
        if wanted.shape[0] > 10 or wanted.shape[1] > columns:
            where += f"from row {top}, column {left} on" if top or left else "the upper left part"
        wanted, got = wanted[part], got[part]
        mask = None if mask is None else mask[part]
    else:
        where = f"shape: expected {shapes[0]}, got {shapes[1]}"
        wanted, got = (z.flatten(0, -2)[:10, :columns] for z in (wanted, got))
        mask = None
    numbers = torch.cat([z.double().flatten() for z in (wanted, got)])
    numbers = numbers[numbers.isfinite()]
    decimals = 0 if (numbers == numbers.round()).all() else 2
    while decimals and decimals < 6 and wanted.shape == got.shape and (
            cells(wanted, mask, decimals) == cells(got, mask, decimals)):
        decimals += 2
    left, right = cells(wanted, mask, decimals), cells(got, mask, decimals)
    width = max([len(z) for row in left + right for z in row], default=1)
    rows = [["[" + " ".join(z.rjust(width) for z in row) + "]" for row in side]
            for side in (left, right)]
    space = max([len(row) for row in rows[0]] + [len("expected")]) + 4
    lines = [where] * bool(where) + ["expected".ljust(space) + "got"]
    for i in range(max(len(left), len(right))):
        a, b = (side[i] if i < len(side) else "" for side in rows)
        lines.append(a.ljust(space) + b)
    if mask is not None and mask.any():
        lines.append("(a dot: masked, not compared)")
    return "\n".join("    " + line.rstrip() for line in lines)
