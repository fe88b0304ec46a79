"""What kills leave behind: a process that dies at its n-th write, and runs compared bit for bit."""
import torch

from training import checkpoint, log


class Killed(BaseException):
    """Stands for SIGKILL: not an Exception, so that nothing catches it."""


def kill_at(n, patch, *places):
    """Raise Killed in place of call n of these functions, (owner, name) each, and of all later
    calls: a process that is dead cleans nothing up.  `patch` is pytest's.

    Between two writes a kill changes nothing on the disk, so these are all moments of a process.
    """
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
    """Return where two contents of checkpoints differ in a bit; seconds of training do not count.
    """
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [z for key in a if key != "seconds" for z in differences(
            a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [z for i, pair in enumerate(zip(a, b)) for z in differences(*pair, f"{path}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.equal(b)
    else:
        equal = type(a) is type(b) and a == b
    return [] if equal else [path]


def runs_differ(one, two):
    """Return where the runs in two folders differ: checkpoint, best model, lines of metrics.tsv."""
    found = []
    for name in ("checkpoint.pt", "best.pt"):
        found += differences(checkpoint.load(one / name), checkpoint.load(two / name), name)
    rows = [[row | {"seconds": ""} for row in log.read_metrics(folder / "metrics.tsv")]
            for folder in (one, two)]
    return found + (["metrics.tsv"] if rows[0] != rows[1] or len(rows[0]) < 4 else [])
