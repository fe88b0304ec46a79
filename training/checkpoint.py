"""Checkpoints that survive a kill, a full disk, a flipped bit.

    checkpoint.pt.part   a new checkpoint is written here and flushed to the disk;
    previous.pt          then the old checkpoint.pt is renamed to this,
    checkpoint.pt        and the new one to this; a rename is atomic

So at any moment a complete checkpoint is on the disk, and usually two.  torch.save writes a zip
archive, whose records have checksums (CRC-32).  torch.load ignores them, so they are compared here
by the standard library; if the newest checkpoint is damaged, the one before it is used.
"""
from zipfile import ZipFile

import torch

from support.files import write_atomically
from training import ranks

try:
    import fcntl
except ImportError:  # on Windows nothing guards the folder
    fcntl = None

FORMAT = "transformer-xl-from-scratch 9"  # identifies our checkpoints


# ---- complete files -----------------------------------------------------------------------------

def save(path, content, backup=None):
    """Write a checkpoint; the one that it replaces is renamed to `backup`, if given.

    OSError, with the path, if that fails.
    """
    try:
        write_atomically(path, lambda file: torch.save(content, file), backup=backup)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        reason = error.__context__ or error  # torch's own message does not name it
        raise OSError(f"could not write {path}: {reason}") from None


class Content(dict):
    """The content of a checkpoint, and its path."""

    path = None


def load(path):
    """Read a checkpoint -> Content, on the CPU, without running any code in it.

    ValueError if it is missing, damaged, or not a checkpoint.
    """
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; train first, or name another folder")
    try:
        with ZipFile(path) as archive:
            if damaged := archive.testzip():  # compares the checksums
                raise ValueError(f"bad CRC-32 of {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # truncated, a flipped bit, another file, a pickle that runs code
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise ValueError(f"{path} is damaged or not a train.py checkpoint ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a train.py checkpoint (its format is not {FORMAT!r})")
    content = Content(content)
    content.path = path
    return content


def load_first_valid(*paths):
    """Return the content of the first of these checkpoints that exists and is intact.

    Reports a damaged one.  ValueError if none is left.
    """
    there = [path for path in paths if path.exists()] or paths[:1]
    for path, next_one in zip(there, there[1:]):
        try:
            return load(path)
        except ValueError as error:
            print(f"{error}; using {next_one}")
    return load(there[-1])


def to_evaluate(out):
    """Return the content of the checkpoint to evaluate: the best, otherwise the last."""
    return load_first_valid(*(out / f"{name}.pt" for name in ("best", "checkpoint", "previous")))


# ---- random numbers -----------------------------------------------------------------------------

def random_state(device):
    """Return the random state of every rank, a row each."""
    return {"random": ranks.gather(torch.get_rng_state()[None]), "random_cuda": (
        ranks.gather(torch.cuda.get_rng_state()[None]) if device == "cuda" else None)}


def set_random_state(content, seed):
    """Restore this rank's random state; with another number of ranks use the seed."""
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
    """Lock a folder against other runs -> the open file: closing it, or an exit, releases the lock.

    ValueError if another run holds it.
    """
    file = open(folder / "lock", "a")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{folder} is in use by another run: wait for its end, or use another "
                         "folder with --out") from None
    except OSError as error:  # a network file system without locks
        print(f"{folder} cannot be locked ({error}): let no other run use it")
    return file
