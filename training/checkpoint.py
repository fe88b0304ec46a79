"""Checkpoints that survive what happens to a run of days: a kill, a full disk, a flipped bit.

    checkpoint.part   the new one is written here and flushed to the disk; then
    previous.pt       what was checkpoint.pt gets this name, and
    checkpoint.pt     the new one gets this; a rename is done or not, never half

So at any moment a whole checkpoint is on the disk, and mostly two.  What comes back is checked:
torch.save writes a zip archive, whose records carry a checksum each (CRC-32).  torch.load does not
look at them; here the standard library does, and if the newest checkpoint is damaged, the one
before it is used.  State is the place of a run, Lock keeps a second run out of its folder, Stop
ends it between two steps.
"""
import math
import os
import signal
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from zipfile import ZipFile

import torch

from support import validate
from training import ranks
from support.corpora import checksum
from support.progress import progress

try:
    import fcntl
except ImportError:  # Windows: there nobody watches over the folder
    fcntl = None

FORMAT = "transformer-xl-from-scratch 5"  # what a checkpoint of ours calls itself


# ---- where a run stands -------------------------------------------------------------------------

@dataclass
class State:
    """Where the training loop stands; all of it goes into the checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluations not counted
    column: int = 0  # of the lanes: where the next segment begins
    epoch: int = 0  # how often the text has been read
    memory: list = None  # N tensors (B, m, D), of this rank's lanes
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # since the last line of metrics.tsv, in nats
    loss_count: int = 0
    loss_max: float = 0.0
    spike: bool = False  # the last loss was more than twice the mean of ten or more before it
    lines: int = 0  # of metrics.tsv
    best: float = math.inf  # lowest validation loss so far, in nats
    evaluated: int = 0  # the step of the last validation

    def __post_init__(self):
        validate.types(self)
        for name, value in vars(self).items():
            if name not in ("memory", "best") and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, got {value}")

    def count(self, x, loss, norm, seconds):
        """One more step, on x (B, T), with this loss (nats) and gradient norm."""
        self.step += 1
        self.tokens += x.numel() * ranks.COUNT
        self.column += x.shape[1]
        (self.seconds,) = ranks.largest(self.seconds + seconds)
        self.spike = self.loss_count >= 10 and loss > 2 * self.loss_sum / self.loss_count
        if math.isfinite(loss + norm):
            self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1
            self.loss_max = max(self.loss_max, loss)
            self.skipped_in_a_row = 0
        else:
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1

    def stop_if_never_finite(self):
        """ValueError after ten steps in a row that were not finite."""
        if self.skipped_in_a_row == 10:
            raise ValueError(f"ten steps in a row, up to step {self.step}, had a loss or gradient "
                             "that is not finite, so training stops; none of them has reached the "
                             "weights, nor those saved. Begin anew with smaller --lr and "
                             "--muon-lr, and another --out")

    def begin_text_again(self):
        """The next segment is the text's first, and has no past."""
        self.column, self.memory, self.epoch = 0, None, self.epoch + 1


# ---- files that are whole, whatever happens -----------------------------------------------------

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


class Content(dict):
    """What a checkpoint holds, and the path that it came from."""

    path = None


def load(path):
    """Read a checkpoint of ours -> Content.  ValueError if it is not there, damaged, or something
    else.
    """
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
    content = Content(content)
    content.path = path
    return content


def tensors_in(value, where=""):
    """All tensors in nested dicts and lists -> [(where, tensor)]."""
    if isinstance(value, torch.Tensor):
        return [(where, value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()
    return [found for key, inner in pairs for found in tensors_in(inner, f"{where}/{key}")]


def newest(*paths):
    """The content of the first of these checkpoints that is there and whole.

    What is passed over is said.  ValueError if there is none.
    """
    there = [path for path in paths if path.exists()] or paths[:1]
    for path, next_one in zip(there, there[1:]):
        try:
            return load(path)
        except ValueError as error:
            print(f"{error}; using {next_one}")
    return load(there[-1])


def best(out):
    """The content of the checkpoint that is evaluated: the best, or else the last."""
    return newest(*(out / name for name in ("best.pt", "checkpoint.pt", "previous.pt")))


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


# ---- what a checkpoint holds --------------------------------------------------------------------

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


def unpack(content, Config, Run):
    """A checkpoint's content -> Config, Run, State.  ValueError if something else is in it."""
    try:
        config, run, state = (
            kind(**content[name]) for kind, name in
            ((Config, "config"), (Run, "run"), (State, "state")))
        vocab, kinds = content["vocab"], {type(symbol) for symbol in content["vocab"]}
        if not (isinstance(content["name"], str) and isinstance(vocab, list)
                and len(vocab) == len(set(vocab)) == config.vocab_size
                and (kinds == {int} and 0 <= min(vocab) <= max(vocab) < 256
                     or kinds == {str} and {"<eos>", "<S>"} & set(vocab))):
            raise ValueError(f"no vocabulary of {config.vocab_size} bytes or words")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{content.path} does not hold what a checkpoint of train.py holds: "
                         f"{type(error).__name__} {error}") from None
    return config, run, state


def check_text(content, corpus):
    """ValueError if a checkpoint's content was trained on another text than this corpus."""
    if content and (content["vocab"], content["text"]) != (corpus.vocab, checksum(corpus)):
        raise ValueError(f"{corpus.name} is not the text that the checkpoint was trained on: it "
                         f"has changed since ({len(content['vocab'])} symbols then, "
                         f"{len(corpus.vocab)} now); put the old one back, or train anew "
                         "in another folder")


def check_place(content, state, lanes):
    """ValueError if a checkpoint stands past the end of the lanes (B, n) that it reads."""
    if content and state.column >= lanes.shape[1] - 1:
        raise ValueError(f"{content.path} stands at column {state.column} of lanes that are "
                         f"{lanes.shape[1]} long")


def make_model(kind, count_parameters, config, content=None):
    """kind(config), with the weights in a checkpoint's content.

    ValueError if they are the weights of another model.
    """
    parameters = count_parameters(config)
    if not content:
        return kind(config)
    try:
        held = sum(z.numel() for z in content["model"].values())
        if parameters > held:  # before a large one is built for nothing
            raise TypeError(f"{held:,} numbers")
        model = kind(config)
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{content.path} holds the weights of another model than it says "
                         f"({content.get('name')}): {str(error).splitlines()[0]}") from None
    return model


def restore(content, optimizer, state, config, run, device):
    """The rest of a checkpoint back: the optimizer's moments, the random state, this rank's memory.

    ValueError, and nothing is written yet, if they do not fit the model of this run.
    """
    shape, memory = (config.n_layer, run.batch, config.d_model), content["state"]["memory"]
    try:
        if memory and (len(memory), *memory[0].shape[::2]) != shape or len(
                {past.shape for past in memory or ()}) > 1 or memory and memory[0].dim() != 3:
            raise ValueError(f"the memory is not of (N, B, D) = {shape}")
        optimizer.load_state_dict(content["optimizer"])
        set_random_state(content, run.seed + state.step)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{content.path} cannot be resumed: {type(error).__name__} {reason}"
                         ) from None
    mine = ranks.my_lanes(run.batch)
    state.memory = memory and [past[mine].to(device) for past in memory]


# ---- stopping -----------------------------------------------------------------------------------

class Stop:
    """Ctrl-C and SIGTERM end the run, but not in mid-step, so that what is saved is whole.

        with Stop() as stop:
            while not stop.asked():     after every step; several ranks stop together
                ...
                with stop.at_once():    a validation need not come to its end: a signal ends
                    ...                 this block, and the program goes on after it
            if stop.asked(): ...        save; stop.number says which signal it was

    A second signal leaves at once; the checkpoint on disk is whole at any moment.  Several ranks
    may each get a signal, or get it twice (from the cluster and from torchrun, which hands it on),
    so there the first is enough, and it waits for a place where all ranks meet.
    """

    def __enter__(self):
        self.number, self.idle = 0, False
        self.handlers = {number: signal.signal(number, self.handle)
                         for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, signal_number, frame):
        """Called by Python on the signal."""
        if self.number and ranks.COUNT == 1:
            os._exit(128 + signal_number)
        self.number = self.number or signal_number
        if self.idle and ranks.COUNT == 1:
            raise KeyboardInterrupt

    def asked(self):
        """Whether a signal has come, to any rank."""
        self.number = int(*ranks.largest(self.number))
        return self.number > 0

    @contextmanager
    def at_once(self):
        """A signal in this block ends it (one process only)."""
        self.idle = True
        try:
            yield
        except KeyboardInterrupt:
            if not self.number:
                raise
        finally:
            self.idle = False

    def __exit__(self, *exception):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
