"""Checkpoints that survive a kill, a full disk, a flipped bit.

    checkpoint.pt.part   a new checkpoint is written here and flushed to the disk;
    previous.pt          then the old checkpoint.pt is renamed to this,
    checkpoint.pt        and the new one to this; a rename is atomic

So at any moment a complete checkpoint is on the disk, and usually two.  torch.save writes a zip
archive, whose records have checksums (CRC-32).  torch.load ignores them, so they are compared here
by the standard library; if the newest checkpoint is damaged, the one before it is used.
"""
import os
from contextlib import contextmanager
from errno import EINVAL
from shlex import quote
from zipfile import ZipFile

import torch

from support.files import write_atomically
from training import ranks

try:
    import fcntl
except ImportError:  # on Windows nothing guards the folder
    fcntl = None

FORMAT = "transformer-xl-from-scratch 9"  # identifies our checkpoints


def save(path, content, backup=None):
    """Write a checkpoint; `backup` keeps the one before.  OSError, with the path, if that fails."""
    try:
        write_atomically(path, lambda file: torch.save(content, file), backup=backup)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        reason = error.__context__ or error  # torch's own message does not name it
        raise OSError(f"could not write {path}: {reason}") from None


def load(path):
    """Read a checkpoint -> its content, with its "path", on the CPU; no code in it is run.

    ValueError if it is missing, damaged, or not a checkpoint; OSError if it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; train first, or name another folder")
    try:
        with ZipFile(path) as archive:
            compressed = [record.filename for record in archive.infolist() if record.compress_type]
            if wrong := compressed or archive.testzip():  # it compares the checksums
                raise ValueError(f"bad CRC-32 or compression of {wrong}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # truncated, a flipped bit, another file, a pickle that runs code
        if isinstance(error, MemoryError) or "t allocate" in str(error):
            raise
        cause = error.__context__ or error  # zipfile hides it
        kind = ValueError if getattr(cause, "errno", EINVAL) == EINVAL else OSError
        raise kind(f"{path} is unreadable, damaged or not a train.py checkpoint ({cause!r:.99})")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a train.py checkpoint (its format is not {FORMAT!r})")
    return content | {"path": path}


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


def find(path, resume):
    """Return the content of the checkpoint to resume from, on all ranks; None for a new run.

    ValueError if a new run would overwrite another one, or if there is none to resume.
    """
    last, before, saved = path / "checkpoint.pt", path / "previous.pt", None
    if ranks.RANK == 0 and resume:
        saved = load_first_valid(last, before)
        if "column" not in saved.get("state", ()) or not {"optimizer", "random"} <= saved.keys():
            raise ValueError(f"{saved['path']} is from an earlier version, or incomplete, and "
                             f"cannot be resumed; --init {quote(str(path))} starts a new run from "
                             "its weights")
        if saved["path"] == before and last.exists():
            last.replace(path / "damaged.pt")  # the next save must not rename it to `before`
    elif ranks.RANK == 0 and any(path.glob("*.pt")):
        raise ValueError(f"{path} holds a run already: resume it with --resume, or use another "
                         "folder with --out")
    chosen = ranks.broadcast(saved and saved["path"])  # the others read the same file
    return saved or chosen and load(chosen)


def to_evaluate(out):
    """Return the content of the checkpoint to evaluate: the best, otherwise the last."""
    return load_first_valid(*(out / f"{name}.pt" for name in ("best", "checkpoint", "previous")))


def random_state(device):
    """Return the random state of the device, which samples the dropout: a row for each rank."""
    module = torch.cuda if device == "cuda" else torch
    return ranks.gather(module.get_rng_state()[None])


def set_random_state(rows, device, seed):
    """Restore this rank's random state; on other devices, or on another number, begin a new one."""
    module = torch.cuda if device == "cuda" else torch
    if rows.shape == (ranks.COUNT, len(module.get_rng_state())):
        module.set_rng_state(rows[ranks.RANK].clone())  # set_rng_state ignores a view's offset
    else:
        torch.manual_seed(seed + ranks.RANK)


@contextmanager
def locked(folder):
    """Make a folder and lock it against other runs, on rank 0; at the end remove the lock, and the
    folder if it is new and nothing was written to it.  ValueError if another run holds it.
    """
    if ranks.RANK > 0:
        yield
        return
    for name in ("lock", "checkpoint.pt", "previous.pt", "best.pt", "metrics.tsv", "curve.png"):
        if (path := folder / name).is_symlink() or path.exists() > path.is_file():
            raise ValueError(f"{path} is not a regular file; use another folder with --out")
    lock, is_new = folder / "lock", not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(lock))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:  # another run holds it, or has just removed the file that is open here
            raise ValueError(f"{folder} is in use by another run: wait for its end, or use another "
                             "folder with --out")
        try:
            yield
        finally:
            if fcntl:  # Windows cannot remove an open file
                lock.unlink(missing_ok=True)
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
