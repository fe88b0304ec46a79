"""Checkpoints that survive what happens to a run of days: a kill, a full disk, a flipped bit.

    checkpoint.part   the new one is written here and flushed to the disk; then
    previous.pt       what was checkpoint.pt gets this name, and
    checkpoint.pt     the new one gets this; a rename is done or not, never half

So at any moment a whole checkpoint is on the disk, and mostly two.  What comes back is checked:
torch.save writes a zip archive, whose records carry a checksum each (CRC-32).  torch.load does not
look at them; here the standard library does, and if the newest checkpoint is damaged, the one
before it is used.  Lock keeps a second run out of the folder, Stop ends a run between two steps.
"""
import os
import signal
import warnings
from contextlib import contextmanager
from zipfile import ZipFile

import torch

from support import distributed
from support.progress import progress

try:
    import fcntl
except ImportError:  # Windows: there nobody watches over the folder
    fcntl = None

FORMAT = "transformer-xl-from-scratch 3"  # what a checkpoint of ours calls itself


def write(path, fill, mode="w", keep=None):
    """Write a file beside, flush it, rename it: `path` holds the new content or the old one.

    fill(file) writes the content; what `path` held gets the name `keep`, if given (so that for a
    moment it has only this).  OSError, and nothing left over, if that fails.
    """
    beside = path.with_suffix(".part")
    try:
        with open(beside, mode) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(beside, path)
        flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise OSError(f"could not write {path}: {error}") from None
    finally:
        beside.unlink(missing_ok=True)


def flush_folder(folder):
    """A rename is on the disk only when the folder is (Windows cannot be asked for that)."""
    if os.name != "nt":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def save(path, content, keep=None):
    """Write a checkpoint."""
    write(path, lambda file: torch.save(content, file), "wb", keep)


def read(path):
    """What torch.save has written to a file, on the CPU, without running any code in it.

    ValueError with the reason if it is damaged, or something else.
    """
    try:
        with ZipFile(path) as archive:
            records = archive.infolist()
            for record in progress(records, f"checking {path.name}", len(records)):
                with archive.open(record) as file:
                    while file.read(2**20):  # compares the checksum at the end
                        pass
        with warnings.catch_warnings():  # of a foreign pickle; the refusal below says it better
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # cut off, flipped, not a checkpoint, or a pickle that runs code
        raise ValueError((str(error) or type(error).__name__).splitlines()[0][:100]) from None


def load(path):
    """Read a checkpoint of ours.  ValueError if it is not there, damaged, or something else."""
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; train first, or name its folder with --out")
    try:
        content = read(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged or no checkpoint of train.py ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of train.py (it does not say {FORMAT!r})")
    for where, z in tensors_in(content):
        if (z.layout, z.device.type) != (torch.strided, "cpu") or not (
                z.dtype == torch.uint8 or z.dtype == torch.float32 and z.isfinite().all()):
            raise ValueError(f"{path} has in {where} other than finite numbers of float32")
    return content


def tensors_in(value, where=""):
    """All tensors in nested dicts and lists -> [(where, tensor)]."""
    if isinstance(value, torch.Tensor):
        return [(where, value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()
    return [found for key, inner in pairs for found in tensors_in(inner, f"{where}/{key}")]


def newest(*paths):
    """Path and content of the first of these checkpoints that is there and whole.

    What is passed over is said.  ValueError if there is none.
    """
    there = [path for path in paths if path.exists()] or paths[:1]
    for path, next_one in zip(there, there[1:]):
        try:
            return path, load(path)
        except ValueError as error:
            print(f"{error}; using {next_one}")
    return there[-1], load(there[-1])


class Lock:
    """Keeps other runs out of a folder until it is closed or the process ends, however that ends.

        with Lock(folder) as lock:
            lock.take()         ValueError if another process holds it
    """

    def __init__(self, folder):
        self.folder, self.file = folder, None

    def take(self):
        """Lock the folder, which exists, if that is not done yet -> what the last owner signed."""
        if self.file is None:
            self.file = open(self.folder / "lock", "a+")
            try:
                if fcntl:
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.folder} belongs to a run that is going on ({self.read()}):"
                                 " wait for its end, or name another folder with --out") from None
            except OSError as error:  # a network file system that knows no locks
                print(f"{self.folder} cannot be locked ({error}): let no other run use it")
        return self.read()

    def read(self):
        """What the last owner signed."""
        self.file.seek(0)
        return self.file.read()

    def sign(self, name):
        """Say whose folder it is, for those who find it locked."""
        self.file.truncate(0)
        self.file.write(name)
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.file:
            self.file.close()


def random_state(device):
    """The random state of every rank, a row each: to draw on as if nothing had happened."""
    return {"random": distributed.gather(torch.get_rng_state()[None]), "random_cuda": (
        distributed.gather(torch.cuda.get_rng_state()[None]) if device == "cuda" else None)}


def set_random_state(content, seed):
    """The same back; with another number of ranks a new one from the seed."""
    rows, rows_cuda = content["random"], content["random_cuda"]
    if len(rows) != distributed.COUNT:
        torch.manual_seed(seed + distributed.RANK)
        print(f"saved by {len(rows)} ranks, now there are {distributed.COUNT}: dropout draws anew")
        return
    # cloned, since torch reads a row of a larger tensor wrongly
    torch.set_rng_state(rows[distributed.RANK].clone())
    if rows_cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rows_cuda[distributed.RANK].clone())


def take_up(content, path, optimizer, shape):
    """Adam's moments and the random state of a checkpoint back.  ValueError, and nothing is written
    yet, if they, or the memory of shape (N, B, D), do not fit the model of this run.

    torch would end the process without a word if moments had another shape than their weights.
    """
    try:
        memory = content["state"]["memory"]
        if memory and (len(memory), *memory[0].shape[::2]) != shape or len(
                {rows.shape for rows in memory or ()}) > 1 or memory and memory[0].dim() != 3:
            raise ValueError(f"the memory is not of (N, B, D) = {shape}")
        if not all(isinstance(z, dict) for z in content["optimizer"]["state"].values()):
            raise ValueError("moments of another form")
        optimizer.load_state_dict(content["optimizer"])
        (group,) = optimizer.param_groups
        for weight in group["params"] if optimizer.state else ():
            moments = optimizer.state[weight]
            if {moments["exp_avg"].shape, moments["exp_avg_sq"].shape} != {weight.shape} or (
                    moments["step"].numel() != 1):
                raise ValueError("moments of another shape")
        settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
        if settings != {key: optimizer.defaults[key] for key in settings}:
            raise ValueError(f"settings of Adam {settings}")
        set_random_state(content, content["run"]["seed"] + content["state"]["step"])
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be gone on with: {type(error).__name__} {reason}"
                         ) from None


class Stop:
    """Ctrl-C and SIGTERM end the run, but not in mid-step, so that what is saved is whole.

    A second one leaves at once; the checkpoint on disk is whole at any moment.  Several ranks may
    each get a signal, or get it twice (from the cluster and from torchrun, which hands it on), so
    there the first is enough, and it waits for a place where all ranks meet.
    """

    def __enter__(self):
        self.number, self.busy = 0, False
        self.handlers = {number: signal.signal(number, self.handle)
                         for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, signal_number, frame):
        """Called by Python on the signal."""
        if self.number and distributed.COUNT == 1:
            os._exit(128 + signal_number)
        self.number = self.number or signal_number
        if not self.busy and distributed.COUNT == 1:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self):
        """`with stop.held_back():` lets the block finish first; several ranks stop together."""
        self.busy = True
        yield
        self.busy = False
        agreed = int(*distributed.largest(self.number))  # of ranks some may not have heard of it
        if agreed:
            self.number = agreed
            raise KeyboardInterrupt

    def __exit__(self, *exception):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
