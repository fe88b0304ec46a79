"""Checkpoints that survive what happens to a run of days: a kill, a full disk, a flipped bit.

    checkpoint.pt.part   the new one is written here and flushed to the disk; then
    previous.pt          what was checkpoint.pt gets this name, and
    checkpoint.pt        the new one gets this; a rename is done or not, never half

So at any moment a whole checkpoint is on the disk, and mostly two.  What comes back is checked:
torch.save writes a zip archive, whose records carry a checksum each (CRC-32).  torch.load does not
look at them; here the standard library does, and if the newest checkpoint is damaged, the one
before it is used.  A file whose checksums hold is believed.
"""
import warnings
from zipfile import ZipFile

import torch

from support.files import write_atomically
from training import ranks

try:
    import fcntl
except ImportError:  # Windows: there nobody watches over the folder
    fcntl = None

FORMAT = "transformer-xl-from-scratch 8"  # what a checkpoint of ours calls itself


# ---- files that are whole, whatever happens -----------------------------------------------------

def write(path, fill, mode="w", backup=None):
    """Write a complete file (support/files.py).  OSError, with its name, if that fails."""
    try:
        write_atomically(path, fill, mode, backup)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise OSError(f"could not write {path}: {error}") from None


def save(path, content, backup=None):
    """Write a checkpoint; what it replaces is kept as `backup`, if given."""
    write(path, lambda file: torch.save(content, file), "wb", backup)


class Content(dict):
    """What a checkpoint holds, and the path that it came from."""

    path = None


def load(path):
    """Read a checkpoint -> Content, on the CPU, without running any code in it.

    ValueError if it is not there, damaged, or something else.
    """
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; train first, or name its folder with --out")
    try:
        with ZipFile(path) as archive:
            if damaged := archive.testzip():  # compares the checksums
                raise ValueError(f"bad CRC-32 of {damaged}")
        with warnings.catch_warnings():  # of a foreign pickle; the refusal below says it better
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # cut off, flipped, not a checkpoint, or a pickle that runs code
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise ValueError(f"{path} is damaged or no checkpoint of train.py ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of train.py (it does not say {FORMAT!r})")
    content = Content(content)
    content.path = path
    return content


def load_first_valid(*paths):
    """Return the content of the first of these checkpoints that is there and whole.

    A damaged one that is passed over is reported.  ValueError if none is left.
    """
    there = [path for path in paths if path.exists()] or paths[:1]
    for path, next_one in zip(there, there[1:]):
        try:
            return load(path)
        except ValueError as error:
            print(f"{error}; using {next_one}")
    return load(there[-1])


def to_evaluate(out):
    """Return the content of the checkpoint that is evaluated: the best, or else the last."""
    return load_first_valid(*(out / f"{name}.pt" for name in ("best", "checkpoint", "previous")))


# ---- random numbers -----------------------------------------------------------------------------

def random_state(device):
    """The random state of every rank, a row each: to draw on as if nothing had happened."""
    return {"random": ranks.gather(torch.get_rng_state()[None]), "random_cuda": (
        ranks.gather(torch.cuda.get_rng_state()[None]) if device == "cuda" else None)}


def set_random_state(content, seed):
    """The same back; with another number of ranks a new one from the seed."""
    rows, rows_cuda = content["random"], content["random_cuda"]
    if len(rows) != ranks.COUNT:
        torch.manual_seed(seed + ranks.RANK)
        print(f"saved by {len(rows)} ranks, now there are {ranks.COUNT}: dropout starts a "
              "new random sequence")
        return
    # cloned, since torch reads a row of a larger tensor wrongly
    torch.set_rng_state(rows[ranks.RANK].clone())
    if rows_cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rows_cuda[ranks.RANK].clone())


# ---- one run in a folder ------------------------------------------------------------------------

def lock(folder):
    """Keep other runs out of a folder -> the open file that does so until it is closed, or the
    process ends.  ValueError if another run holds it.
    """
    file = open(folder / "lock", "a")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{folder} belongs to a run that is going on: wait for its end, or name "
                         "another folder with --out") from None
    except OSError as error:  # a network file system that knows no locks
        print(f"{folder} cannot be locked ({error}): let no other run use it")
    return file
