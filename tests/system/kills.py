"""Simulate a process that is killed at its n-th write, and compare runs bit for bit."""
import torch

from training import checkpoint, log


class Killed(BaseException):
    """Simulates SIGKILL; it is not an Exception, so no handler catches it."""


def kill_at(n, patch, *places):
    """Raise Killed instead of call n of these functions, (owner, name) each, and of all later
    calls, because a dead process cleans nothing up.  The disk does not change between two writes,
    so these calls cover every moment of a process.  `patch` is pytest's."""
    left = [n]

    def mortal(real):
        def call(*arguments, **options):
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return real(*arguments, **options)
        return call

    for owner, name in places:
        patch.setattr(owner, name, mortal(getattr(owner, name)))


def differences(a, b, path=""):
    """Return where two checkpoints are not bitwise equal, except for their seconds and path."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [place for key in a if key not in ("seconds", "path") for place in differences(
            a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [place for i, pair in enumerate(zip(a, b))
                for place in differences(*pair, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.equal(b)
    else:
        equal = type(a) is type(b) and a == b
    return [] if equal else [path]


def runs_differ(one, two):
    """Return the differences of two runs: in checkpoint.pt, in best.pt, and in metrics.tsv."""
    found = []
    for name in ("checkpoint.pt", "best.pt"):
        found += differences(checkpoint.load(one / name), checkpoint.load(two / name), name)
    rows = [[row | {"seconds": ""} for row in log.read_metrics(folder / "metrics.tsv")]
            for folder in (one, two)]
    return found + (["metrics.tsv"] if rows[0] != rows[1] or len(rows[0]) < 4 else [])
