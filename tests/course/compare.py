"""Compare a result with the expected one, and show what differs side by side.

    assert same(rel_shift(x), [[2, 1, 0, ..., ...],
                               [13, 12, 11, 10, ...],
                               [24, 23, 22, 21, 20]])
"""
from copy import deepcopy
from itertools import zip_longest

import numpy as np
import torch

ROWS, COLUMNS = 10, 12  # the largest part that is shown; with decimals half as many columns


class Differs(AssertionError):
    """A result differs from the expected one.  The text, which a student sees, shows both."""


class WrongKind(AssertionError):
    """A result cannot be compared, such as None or a list.  The text is a sentence."""


def same(got, wanted, compared=None, tolerance=0.0):
    """Return True if shape and values are equal (NaN equals NaN); otherwise raise an error.

    wanted: a tensor, an array (then the result must also be one), a number, lists of numbers, in
    which `...` marks a cell that is not compared, or a tuple of numbers if the result must be a
    list of numbers.  compared: (T, K) bool, True for the cells that are compared.
    """
    if isinstance(wanted, list) and "Ellipsis" in str(wanted):
        compared = torch.tensor([[z is not ... for z in row] for row in wanted])
        wanted = [[0 if z is ... else z for z in row] for row in wanted]
    found, target = tensor(got), tensor(wanted)
    if got is None:
        raise WrongKind("the result is None, so nothing is returned: did you forget `return`?")
    if found is None or isinstance(got, np.ndarray) != isinstance(wanted, np.ndarray):
        what = "a NumPy array" if isinstance(wanted, np.ndarray) else "a torch tensor"
        wish = (f"a list of {len(wanted)} numbers" if isinstance(wanted, tuple) else
                f"{what} of shape {tuple(target.shape)}" if target.dim() else "a number")
        kind = "NumPy array" if isinstance(got, np.ndarray) else type(got).__name__
        raise WrongKind(f"the result must be {wish}, got a {kind}")
    if found.shape != target.shape:
        raise Differs(f"the shape must be {tuple(target.shape)}, got {tuple(found.shape)}\n"
                      + side_by_side(target, found))
    wrong = ~torch.isclose(found.double(), target.double(), 0, tolerance, equal_nan=True)
    if compared is not None:
        wrong = wrong & compared
    if wrong.any():
        raise Differs(f"{counted(found, target, wrong, compared)}\n"
                      + side_by_side(target, found, compared, wrong.nonzero()[0].tolist()))
    return True


def unchanged(function, *given):
    """Return True if a call leaves its arguments as they are; otherwise raise an error."""
    before = deepcopy(given)
    function(*given)
    return all(map(same, given, before))


def sets_no_seed(function, *given):
    """Return whether a call leaves torch's own generator alone."""
    torch.rand(1)  # otherwise its own seed, set again, would change nothing
    before = torch.get_rng_state()
    function(*given)
    return torch.get_rng_state().equal(before)


def tensor(z):
    """Return a tensor, an array, a number or lists of numbers as a tensor; otherwise None."""
    try:
        return z.detach() if isinstance(z, torch.Tensor) else torch.tensor(np.array(z))
    except (TypeError, ValueError, RuntimeError):
        return None


def counted(got, wanted, wrong, compared):
    """Describe in a sentence how much of a result is wrong."""
    if not wanted.dim():
        return f"the result must be {wanted}, got {got}"
    count = wrong.numel() if compared is None else int(compared.expand_as(wrong).sum())
    right = wanted.double()[wrong]
    off = (got.double()[wrong] - right).abs()
    little = f", by {off.max():.0e} at most" * bool(off.max() < 0.01)  # two digits may not show it
    rounded = " (is there a float32 on the way?)" * bool((off < 1e-5 * (1 + right.abs())).all())
    return (f"{int(wrong.sum())} of {count} entries are wrong{little}{rounded}, the first at "
            f"{wrong.nonzero()[0].tolist()}")


def side_by_side(wanted, got, compared=None, first=()):
    """Return two matrices or vectors as text, expected left and got right.

    If they are larger, only the part around the first difference is shown.
    """
    where = ""
    if wanted.shape == got.shape and wanted.dim() > 2:
        where = f"at {first[:-2]}"
        wanted, got = wanted[tuple(first[:-2])], got[tuple(first[:-2])]
    sides = [torch.atleast_2d(z).double().flatten(0, -2) for z in (wanted, got)]
    numbers = torch.cat([z[z.isfinite()] for z in sides])
    decimals = 0 if (numbers == numbers.round()).all() else 2
    width = COLUMNS // (2 if decimals else 1)
    row, column = [0, 0, *first][-2:]
    top, left = max(0, row - ROWS + 1), max(0, column - width + 1)
    if wanted.shape == got.shape and (len(sides[0]) > ROWS or sides[0].shape[1] > width):
        where += f" from row {top}, column {left} on"

    def cells(side):
        """Return the numbers of one side as text; a dot is a cell that is not compared."""
        return [["." if compared is not None and not compared[i, j] else f"{z:.{decimals}f}"
                 for j, z in enumerate(line[left : left + width], left)]
                for i, line in enumerate(side[top : top + ROWS].tolist(), top)]

    texts = [cells(side) for side in sides]
    wide = max((len(z) for text in texts for line in text for z in line), default=1)
    expected, found = ([f"[{' '.join(z.rjust(wide) for z in line)}]" for line in text]
                       for text in texts)
    space = max(map(len, [*expected, "expected"])) + 4
    pairs = zip_longest(["expected", *expected], ["got", *found], fillvalue="")
    lines = [where.strip()] * bool(where) + [a.ljust(space) + b for a, b in pairs]
    if compared is not None and not compared.all():
        lines.append("(a dot: masked, not compared)")
    return "\n".join("    " + line.rstrip() for line in lines)
