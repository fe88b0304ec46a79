"""A run of train.py or of an experiment: what is trained, its progress, its folder, its signals."""
import math
import os
import signal
import sys
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module

import torch

from support.corpora import checksum, load, with_vocabulary
from training import checkpoint, presets, ranks
from training.batches import Batches
from training.log import Log
from training.optimizers import OPTIMIZERS

lesson_5 = import_module("05_full_model")
HANG_UP = getattr(signal, "SIGHUP", 0)  # the terminal was closed; Windows has no such signal


@dataclass
class State:
    """The progress of a run, except its position in the text (Batches)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, without evaluations
    memory: list = None  # N tensors (B, m, D), of this rank's lanes
    skipped: int = 0  # steps with a loss or gradient that was not finite
    skipped_in_a_row: int = 0
    lowest: float = math.inf  # lowest validation loss so far, in nats
    validated_at: int = 0  # the step of the last validation
    tenths_validated: int = 0  # tenths of the run that were done then

    def record_step(self, x, finite, seconds):
        """Count one step, on x (B, T).  ValueError after ten in a row that were not finite."""
        self.step += 1
        self.tokens += x.numel() * ranks.COUNT
        self.seconds += seconds
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == 10:
            raise ValueError(f"ten steps in a row, up to step {self.step}, had a loss or gradient "
                             "that is not finite; the weights, also those saved, are from before. "
                             "Start again with smaller --lr and --muon-lr, and another --out")


# ---- text, folder, checkpoint -------------------------------------------------------------------

def is_library(recipe):
    """Return whether the text is Python's own library, which differs between versions."""
    return recipe.dataset == "stdlib" and not recipe.text


def read_corpus(recipe, data_dir, saved=None, similar=False):
    """Return the run's corpus, in the vocabulary of its checkpoint if that is given.

    ValueError if that was trained on another text; `similar` accepts another Python's library.
    """
    if ranks.RANK > 0:  # rank 0 comes first, since it may download and unpack
        ranks.broadcast(None)
    corpus = load(recipe.text or recipe.dataset, root=data_dir, drop_newlines=recipe.drop_newlines)
    if ranks.RANK == 0:
        ranks.broadcast(None)
    if saved is None:
        return corpus
    with suppress(ValueError):  # other words or bytes: another text
        same = in_vocabulary(corpus, saved, recipe)
        if checksum(same) == saved["text"]:
            return same
        if similar and is_library(recipe):
            print(f"{corpus.name} is the library of another Python than the model was trained on; "
                  "a file that is in both is in the same split of both")
            return same
    raise ValueError(f"{corpus.name} is not the text that the checkpoint was trained on: it is "
                     f"another one, or it has changed since ({len(saved['vocab'])} symbols "
                     f"then, {len(corpus.vocab)} now); restore it, or train in another folder")


def in_vocabulary(corpus, saved, recipe):
    """Return the corpus in the vocabulary of a checkpoint, if that is given.

    ValueError if that lacks a byte of it, or has other words.  Only Python's library is read
    without such bytes, for example tabs, since its versions differ in them.
    """
    vocab = saved["vocab"] if saved else corpus.vocab
    if corpus.vocab == vocab:
        return corpus
    if corpus.unit == "ppl" or not isinstance(vocab[0], int):
        raise ValueError(f"{corpus.name} has {len(corpus.vocab):,} symbols, the model has others "
                         f"({len(vocab):,}): bytes and words do not mix, words must be the same")
    lacking = bytes(set(corpus.vocab) - set(vocab))
    if lacking and not is_library(recipe):
        raise ValueError(f"{corpus.name} has bytes that the model's vocabulary lacks: "
                         f"{lacking[:20]!r}; replace them, or train without --init")
    if lacking:
        print(f"{lacking} is left out, since the model's vocabulary lacks it")
    return with_vocabulary(corpus, vocab)


def find_checkpoint(path, resume):
    """Return the content of the checkpoint to resume from; None for a new run.

    ValueError if a new run would overwrite another one, or if there is none to resume.
    """
    last, before = path / "checkpoint.pt", path / "previous.pt"
    if not resume:
        if any(path.glob("*.pt")):
            raise ValueError(f"{path} holds a run already: resume it with --resume, or use another "
                             "folder with --out")
        return None
    saved = checkpoint.load_first_valid(last, before)
    if saved["path"] == before:
        last.unlink(missing_ok=True)  # damaged: the next save must not rename it to `before`
    return saved


@contextmanager
def open_job(path, make, resume=False):
    """Yield the job in the folder `path`, new or resumed; the folder is locked until the end.

    make(saved) builds the Job from the content of a checkpoint or, from None, a new Job.
    """
    with ExitStack() as stack:
        saved = None
        if ranks.RANK == 0:
            if any(path.glob("*.pt")):
                stack.enter_context(checkpoint.lock(path))
            saved = find_checkpoint(path, resume)
        chosen = ranks.broadcast(saved and saved["path"])  # the others read the same file
        if chosen and saved is None:
            saved = checkpoint.load(chosen)
        job = make(saved)
        job.begin(saved)
        if ranks.RANK == 0 and saved is None:  # not before: a rejected run leaves no file
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(checkpoint.lock(path))
            find_checkpoint(path, resume)  # another run may have come and gone meanwhile
        saved = None  # frees its memory
        job.log.open(job)
        stack.enter_context(job.log.file)
        yield job


# ---- the run ------------------------------------------------------------------------------------

class Job:
    """Everything about a run.

    path, name             the folder, the model's name
    model, recipe, corpus  the model, the settings of its training, the text
    reader                 the model for evaluation, such as a Reader; None: no validation
    batches                the segments of the text, and the position in it
    learner                the model for train_step; with several ranks, wrapped
    optimizer, state, log  what else changes with each step
    """

    def __init__(self, path, name, model, recipe, corpus, optimizer=None, reader=None):
        self.path, self.name, self.corpus = path, name, corpus
        self.model, self.recipe = model, recipe
        self.optimizer = optimizer or OPTIMIZERS[recipe.optimizer](model, recipe)
        self.reader = reader
        self.device = next(model.parameters()).device
        self.state, self.log, self.saved_at = State(), Log(), 0.0
        self.step_seconds = deque(maxlen=99)
        self.fixed_content = {  # the part of all checkpoints that never changes
            "format": checkpoint.FORMAT, "name": name, "config": asdict(model.config),
            "recipe": asdict(recipe), "vocab": corpus.vocab, "text": checksum(corpus)}

    def begin(self, saved=None):
        """Prepare the first step of a new run, or the next one after a checkpoint, bit for bit."""
        mine, place = ranks.my_lanes(self.recipe.batch), saved["batches"] if saved else {}
        self.batches = Batches(self.corpus, self.recipe, self.device, **place)
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state, self.log = State(**saved["state"]), Log(**saved["log"])
            memory = self.state.memory
            self.state.memory = memory and [past[mine].to(self.device) for past in memory]
            self.saved_at = self.state.seconds
            checkpoint.set_random_state(saved["random"], self.device.type,
                                        self.recipe.seed + self.state.step)
        elif ranks.RANK:  # each rank draws its own dropout
            torch.manual_seed(self.recipe.seed + ranks.RANK)
        self.learner = ranks.parallel(self.model, *self.batches.segment(0))

    def without_pause(self, seconds):
        """Return the seconds of a step; the median step's, if the process was suspended in it."""
        usual = sorted(self.step_seconds or [seconds])[len(self.step_seconds) // 2]
        self.step_seconds.append(seconds)
        return usual if seconds > max(10, 10 * usual) else seconds

    def save_best(self):
        """Write best.pt: everything that evaluation and sampling need."""
        if ranks.RANK == 0:
            checkpoint.save(self.path / "best.pt", self.fixed_content | {
                "model": self.model.state_dict(), "state": vars(self.state) | {"memory": None}})

    def save(self):
        """Write checkpoint.pt, everything that resuming needs; keep the one before as previous.pt.

        The memory of all B lanes is saved, for any number of ranks.
        """
        memory = self.state.memory and [ranks.gather(past) for past in self.state.memory]
        content = self.fixed_content | {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "random": checkpoint.random_state(self.device.type), "log": asdict(self.log),
            "state": vars(self.state) | {"memory": memory}, "batches": self.batches.state()}
        if ranks.RANK == 0:
            self.log.flush()  # its lines must be on the disk before the checkpoint
            checkpoint.save(self.path / "checkpoint.pt", content, self.path / "previous.pt")
        ranks.broadcast(None)  # no rank continues or exits before the file is written
        self.saved_at = self.state.seconds


def load_model(saved, device):
    """Return the model of a checkpoint, in eval mode."""
    model = lesson_5.TransformerXL(presets.Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model.to(device).eval()


# ---- stopping -----------------------------------------------------------------------------------

class Stop:
    """Let Ctrl-C, SIGTERM and SIGHUP (unless nohup ignores it) end a run between two steps.

    `number` is the signal's number, once all ranks agree on it.  A second signal exits at once; the
    checkpoint on disk is always complete.  Several ranks may get the same signal twice, from the
    cluster and from torchrun, so they ignore the second, as one rank does a second SIGHUP.
    """

    def __enter__(self):
        self.received = self.number = 0
        self.handlers = {number: signal.signal(number, self.handle)
                         for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number}
        if self.handlers.get(HANG_UP) == signal.SIG_IGN:  # as under nohup
            signal.signal(HANG_UP, signal.SIG_IGN)
        self.terminals = [name for n, name in ((1, "stdout"), (2, "stderr")) if os.isatty(n)]
        return self

    def handle(self, signal_number, frame):
        """Record a signal; exit at the second."""
        if signal_number == HANG_UP:
            for name in self.terminals:  # writing to a closed terminal would raise OSError
                setattr(sys, name, open(os.devnull, "w"))
        elif self.received and ranks.COUNT == 1:
            os._exit(128 + signal_number)
        elif ranks.RANK == 0:  # print could be interrupted while it writes, and would fail
            os.write(2, b"\nstopping after this step or validation; again: at once\n")
        self.received = self.received or signal_number

    def agree(self, seconds):
        """Return the largest of the ranks' seconds, and record a signal to any rank."""
        seconds, number = ranks.largest(seconds, self.received)
        self.number = int(number)
        return seconds

    def __exit__(self, *exception):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.received and not self.number:  # it came after the last agreement
            signal.raise_signal(self.received)
