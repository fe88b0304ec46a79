"""How a wrong result becomes a sentence: compare it with the right one and with known mistakes.

    expect("rel_shift(x)", got, wanted, known={"the last row was dropped": wrong, ...})

raises Wrong if `got` is not `wanted`.  If it equals what a known mistake gives, that sentence comes
first; if not, the first differing cell.  Below stand the expected and the found, side by side.
"""
from contextlib import contextmanager

import numpy as np
import torch

from course.exercises import Wrong


def tensor(z):
    """A tensor, an array or a number as a tensor; None for anything else."""
    if isinstance(z, np.ndarray):
        return torch.from_numpy(z)
    if isinstance(z, torch.Tensor):
        return z.detach()
    if isinstance(z, (bool, int, float, np.number)):
        return torch.tensor(z)
    return None


def same(a, b, seen=None, tolerance=0.0):
    """Equal in shape and, on the cells that count, in value; NaN equals NaN."""
    a, b = tensor(a), tensor(b)
    if a is None or b is None or a.shape != b.shape:
        return False
    if seen is not None:
        a, b = a[..., seen], b[..., seen]
    a, b = a.double(), b.double()
    return bool(((a - b).abs().le(tolerance) | (a == b) | (a.isnan() & b.isnan())).all())


def cells(matrix, hidden, decimals):
    """The numbers of a (rows, columns) tensor as text; what does not count is a dot."""
    def text(z):
        if z.dtype == torch.bool:
            return str(int(z))
        return f"{z.item():.{decimals}f}"
    return [["." if hidden is not None and hidden[i, j] else text(z) for j, z in enumerate(row)]
            for i, row in enumerate(matrix)]


def side_by_side(wanted, got, seen=None):
    """Two matrices (or vectors), at most 10 x 12 numbers each: expected left, got right.

    Of more dimensions, or of more numbers, the part around the first difference.
    """
    wanted, got = (z if z.dim() else z[None] for z in (tensor(wanted), tensor(got)))
    wanted, got = (z if z.dim() > 1 else z[None] for z in (wanted, got))
    hidden = None if seen is None else ~seen
    where, columns = "", 12
    if any(z.is_floating_point() and not same(z, z.round()) for z in (wanted, got)):
        columns = 6  # with decimals they are wider
    if wanted.shape == got.shape:
        differs = (wanted.double() - got.double()).abs().gt(1e-12) | (wanted.isnan() != got.isnan())
        if hidden is not None:
            differs = differs & ~hidden
        first = differs.nonzero()[0].tolist() if differs.any() else [0] * wanted.dim()
        if wanted.dim() > 2:
            where = f"at [{', '.join(map(str, first[:-2]))}] "
            wanted, got = wanted[tuple(first[:-2])], got[tuple(first[:-2])]
        top, left = max(0, first[-2] - 9), max(0, first[-1] - columns + 1)
        part = slice(top, top + 10), slice(left, left + columns)
        if wanted.shape[0] > 10 or wanted.shape[1] > columns:
            where += f"from row {top}, column {left} on" if top or left else "the upper left part"
        wanted, got = wanted[part], got[part]
        hidden = None if hidden is None else hidden[part]
    else:
        where = f"shape: expected {tuple(wanted.shape)}, got {tuple(got.shape)}"
        if wanted.dim() == got.dim() > 2 and wanted.shape[:-2] == got.shape[:-2]:
            wanted, got = (z[(0,) * (z.dim() - 2)] for z in (wanted, got))
            where += ", the first"
        wanted, got = (z.flatten(0, -2)[:10, :columns] for z in (wanted, got))
        hidden = None
    numbers = torch.cat([z.double().flatten() for z in (wanted, got)])
    numbers = numbers[numbers.isfinite()]
    decimals = 0 if (numbers == numbers.round()).all() else 2
    while decimals and decimals < 6 and wanted.shape == got.shape and (
            cells(wanted, hidden, decimals) == cells(got, hidden, decimals)):
        decimals += 2
    left, right = cells(wanted, hidden, decimals), cells(got, hidden, decimals)
    width = max([len(z) for row in left + right for z in row], default=1)
    rows = [["[" + " ".join(z.rjust(width) for z in row) + "]" for row in side]
            for side in (left, right)]
    space = max([len(row) for row in rows[0]] + [len("expected")]) + 4
    lines = [where] * bool(where) + ["expected".ljust(space) + "got"]
    for i in range(max(len(left), len(right))):
        a, b = (side[i] if i < len(side) else "" for side in rows)
        lines.append(a.ljust(space) + b)
    if hidden is not None and hidden.any():
        lines.append("(a dot: hidden by the mask, not compared)")
    return "\n".join("    " + line.rstrip() for line in lines)


def nothing_but_nan(z):
    """Not a number in it."""
    z = tensor(z)
    return z.numel() > 0 and bool(z.isnan().all())


def explain(got, wanted, known, seen, tolerance):
    """The sentence for a wrong result."""
    shown = seen if got.shape == wanted.shape else None
    for mistake, wrong in known.items():
        wrong = wrong() if callable(wrong) else wrong
        other = not same(wrong, wanted, seen, tolerance)  # here the mistake makes a difference
        # many mistakes end in NaN alone, so that NaN alone names none of them
        if other and not nothing_but_nan(wrong) and same(got, wrong, shown, max(tolerance, 1e-9)):
            return mistake
    if got.shape != wanted.shape:
        return f"the shape is {tuple(got.shape)}, should be {tuple(wanted.shape)}"
    if nothing_but_nan(got) and not nothing_but_nan(wanted):
        return "every number is NaN: 0 * inf or inf - inf on the way"
    if not wanted.dim():
        return f"the result is {got.item():.6g}, should be {wanted.item():.6g}"
    wrong = (got.double() - wanted.double()).abs().gt(tolerance) | (got.isnan() != wanted.isnan())
    if seen is not None:
        wrong = wrong & seen
    first = wrong.nonzero()[0].tolist()
    count = wrong.numel() if seen is None else int(seen.expand_as(wrong).sum())
    return (f"{int(wrong.sum())} of {count} entries are wrong, the first at "
            f"[{', '.join(map(str, first))}]")


def expect(what, got, wanted, known={}, seen=None, tolerance=0.0, dtype=None):
    """Wrong, with the diagnosis, unless got equals wanted on the cells in `seen`."""
    if got is None:
        raise Wrong(f"nothing is returned: did you forget `return`?\n  {what}")
    found, wanted = tensor(got), tensor(wanted)
    if found is None or wanted.dim() and not isinstance(got, torch.Tensor):
        kind = "NumPy array" if isinstance(got, np.ndarray) else type(got).__name__
        wish = f"a torch tensor of shape {tuple(wanted.shape)}" if wanted.dim() else "a number"
        raise Wrong(f"the result is a {kind}, should be {wish}\n  {what}")
    if not same(found, wanted, seen, tolerance):
        raise Wrong(f"{explain(found, wanted, known, seen, tolerance)}\n  {what}\n"
                    f"{side_by_side(wanted, found, seen)}")
    if dtype is not None and found.dtype != dtype:
        raise Wrong(f"the numbers are right, but their type is {found.dtype}, should be {dtype}\n"
                    f"  {what}")


def demand(condition, sentence, what=""):
    """Wrong with this sentence unless the condition holds."""
    if not condition:
        raise Wrong(sentence + (f"\n  {what}" if what else ""))


def refuses(what, call):
    """The call must end in a ValueError."""
    try:
        result = call()
    except ValueError:
        return
    except (NotImplementedError, TimeoutError):  # blank, or endless
        raise
    except Exception as error:
        found = f"it ended in a {type(error).__name__} ({' '.join(str(error).split())})"
    else:
        found = f"it gave {' '.join(str(result).split())}"
        if isinstance(result, torch.Tensor):
            found = f"it gave a tensor of shape {tuple(result.shape)}"
    raise Wrong(f"{what} must be refused with a ValueError, but {found[:100]}")


def told(what, clues, call):
    """What the call returns.  An error that holds a clue means something to us: say what."""
    try:
        return call()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        for clue, sentence in clues.items():
            if clue in text and not isinstance(error, NotImplementedError):
                raise Wrong(f"{sentence}\n  {what}\n  {type(error).__name__}: {text}") from None
        raise


def same_slopes(what, names, got, wanted, tolerance):
    """Wrong at the first gradient that is not the right one; the result itself was."""
    for name, a, b in zip(names, got, wanted):
        if not same(a, b, tolerance=tolerance):
            why = "no gradient comes through" if not a.any() else "a part of it is missing"
            raise Wrong(f"the result is right, but the gradient into {name} is not: {why}, so "
                        f"something is detached on the way\n  {what}\n{side_by_side(b, a)}")


def gradients(output, leaves):
    """Gradients of a loss in which every entry counts differently; 0 where nothing is connected."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    if not output.requires_grad:
        return [torch.zeros_like(z) for z in leaves]
    found = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(z) if g is None else g for g, z in zip(found, leaves)]


@contextmanager
def replaced(owner, **names):
    """Other values for some names of a module, in the block: an exercise is tested by itself."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    vars(owner).update(names)
    try:
        yield
    finally:
        for name in names:
            del vars(owner)[name]
        vars(owner).update(before)
