"""One run of train.py: what is trained, where it stands, and the folder that it lives in.

    with opened(flags, device, train_step) as job:      a new run, or the one in its folder
        job.model, job.optimizer, job.batches, ...      all that the loop works with
        job.save()                                      after this --resume goes on from here

Stop, at the end, lets Ctrl-C and SIGTERM end a run between two steps.
"""
import math
import os
import signal
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from support.corpora import checksum, load, with_vocabulary
from training import checkpoint, estimate, fast, machine, presets, ranks
from training.batches import Batches
from training.flags import check_agreement, for_vocabulary, settings
from training.log import Log, say_what_a_gpu_trains
from training.optimizers import optimizer_of

lesson_5 = import_module("05_full_model")
ROOT = Path(__file__).resolve().parent.parent  # of train.py
PRETRAINED = ROOT / "pretrained"  # the model that comes with the course, see the README there


@dataclass
class State:
    """Where the training stands, but for the place in the text, which the Batches know."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluations not counted
    memory: list = None  # N tensors (B, m, D), of this rank's lanes
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    best: float = math.inf  # lowest validation loss so far, in nats
    evaluated: int = 0  # the step of the last validation
    tenths: int = 0  # of the run that were done then

    def count(self, x, finite, seconds):
        """One more step, on x (B, T)."""
        self.step += 1
        self.tokens += x.numel() * ranks.COUNT
        (self.seconds,) = ranks.largest(self.seconds + seconds)
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1

    def stop_if_never_finite(self):
        """ValueError after ten steps in a row that were not finite."""
        if self.skipped_in_a_row == 10:
            raise ValueError(f"ten steps in a row, up to step {self.step}, had a loss or gradient "
                             "that is not finite, so training stops; none of them has reached the "
                             "weights, nor those saved. Begin anew with smaller --lr and "
                             "--muon-lr, and another --out")


# ---- the folder ---------------------------------------------------------------------------------

def folder_of(flags, name, run):
    """Where a run lives: --out, or runs/DATASET-MODEL beside train.py."""
    text = Path(run.text).stem if run.text else run.dataset
    return Path(flags.out or ROOT / "runs" / f"{text}-{name}")


def folder_to_use(flags, name, run):
    """The folder to evaluate or sample from: pretrained/ if none is named and none was trained."""
    path = folder_of(flags, name, run)
    named = flags.out or flags.model or flags.typed.keys() & {"dataset", "text"}
    if named or any(path.glob("*.pt")):
        return path
    print("there is no run of yours yet, so this is the model that comes with the course")
    return PRETRAINED


def read_corpus(flags, run, saved=None, similar=False):
    """The run's corpus.  ValueError if it is not the one that a checkpoint was trained on.

    `similar`: the library of another Python will do, too, to be read in the checkpoint's tokens.
    """
    with ranks.first_alone():  # it may fetch and unpack
        corpus = load(run.text or run.dataset, drop_newlines=run.drop_newlines,
                      root=flags.data_dir or ROOT / "data")
    if saved and (saved["vocab"], saved["text"]) != (corpus.vocab, checksum(corpus)):
        if similar and run.dataset == "stdlib" and not run.text:
            print(f"{corpus.name} is the library of another Python than the model was trained on; "
                  "a file that stands in both is in the same split of both")
            return with_vocabulary(corpus, saved["vocab"])
        raise ValueError(f"{corpus.name} is not the text that the checkpoint was trained on: it "
                         f"has changed since ({len(saved['vocab'])} symbols then, "
                         f"{len(corpus.vocab)} now); put the old one back, or train anew "
                         "in another folder")
    return corpus


def choose_checkpoint(path, lock, resume):
    """The content of the checkpoint to go on from; None for a new run.

    After torchrun has restarted its ranks a run goes on by itself, if it is this torchrun's.
    ValueError if a new run would overwrite one, or if there is none to go on with.
    """
    last, before = path / "checkpoint.pt", path / "previous.pt"
    there = last.exists() or before.exists()
    restarted = there and ranks.restarts()
    again = restarted and lock.take().endswith(f" {ranks.launch()}")
    if not resume and not again:
        if there:
            raise ValueError(f"{path} holds a run already: add --resume to go on with it, "
                             "or keep it and name another folder with --out")
        return None
    if there:
        lock.take()
    saved = checkpoint.newest(last, before)
    if saved.path == before and last.exists():  # damaged: it must not become the one before
        os.replace(last, path / "damaged.pt")
        print(f"kept the damaged one as {path / 'damaged.pt'}")
    return saved


def own(path, lock, new):
    """Make the folder, or take the one that is there, for this process alone."""
    path.mkdir(parents=True, exist_ok=True)
    lock.take()
    if new:
        choose_checkpoint(path, lock, False)  # refuses again, now under the lock
        for left in ("best.pt", "metrics.tsv"):  # of a run whose checkpoints are gone
            if (path / left).exists():
                os.replace(path / left, path / f"old-{left}")
    lock.sign(f"process {os.getpid()}, started by {ranks.launch()}")
    for name in ("checkpoint.pt", "best.pt", "metrics.tsv"):  # of a save that was killed
        (path / f"{name}.part").unlink(missing_ok=True)


# ---- the run ------------------------------------------------------------------------------------

@contextmanager
def opened(flags, device, train_step):
    """The run that the flags mean, new or gone on with; its folder is locked until the end.

    train_step is train.py's, which is tried in both dtypes if the choice is left to the machine.
    """
    name, config, run = settings(flags, device)
    path = folder_of(flags, name, run)
    with checkpoint.Lock(path) as lock:
        # the first rank chooses the checkpoint, the others read what it has chosen
        saved = choose_checkpoint(path, lock, flags.resume) if ranks.RANK == 0 else None
        chosen = ranks.first(saved and saved.path)
        if chosen is None:
            job = Job.new(name, config, run, flags, device)
        else:
            job = Job.resumed(saved or checkpoint.load(chosen), flags, device)
        if ranks.RANK == 0:
            own(path, lock, new=chosen is None)
        job.path = path
        job.get_ready(flags, train_step, new=chosen is None)
        try:
            yield job
        finally:
            job.log.close()


class Job:
    """All that a run consists of.  `new` and `resumed` are the two ways to make one.

    name, config, run      the model's name, its sizes, the settings of the training
    corpus, batches        the text, and the place in it
    model, reader          the model, and what reads without gradients (fast.prepared)
    learner                the model as train_step is given it: of several ranks, compiled
    optimizer, state, log  what else changes with each step
    """

    def __init__(self, name, config, run, corpus, device):
        self.name, self.config, self.run, self.corpus = name, config, run, corpus
        self.state, self.log, self.saved_at = State(), Log(), 0.0
        estimate.check_weights_fit(presets.count_parameters(config))
        machine.tune(device)
        torch.manual_seed(run.seed)
        self.model = lesson_5.TransformerXL(config).to(device)
        self.reader = fast.prepared(self.model, run.plain)
        self.optimizer = optimizer_of(self.model, run)

    @classmethod
    def new(cls, name, config, run, flags, device):
        """A run that begins: weights from the seed, the first segment of the text."""
        ranks.my_lanes(run.batch)  # refuses a batch that cannot be dealt out
        corpus = read_corpus(flags, run)
        job = cls(name, for_vocabulary(config, len(corpus.vocab), flags), run, corpus, device)
        job.batches = Batches(corpus, run, device)
        ranks.draw_differently(run.seed)  # to each rank its own dropout
        return job

    @classmethod
    def resumed(cls, saved, flags, device):
        """A run that goes on where a checkpoint was saved, as if nothing had happened."""
        # a text may have moved: that it is the same is seen when it is read
        free = flags.typed.keys() & {"micro_batch", "save_minutes", "text"}
        check_agreement(flags, saved, "--resume", free)
        with checkpoint.believed(saved):
            config, run = presets.Config(**saved["config"]), presets.Run(**saved["run"])
        run = replace(run, **{key: flags.typed[key] for key in free})
        mine = ranks.my_lanes(run.batch)  # refuses a batch that cannot be dealt out
        corpus = read_corpus(flags, run, saved)
        job = cls(saved["name"], config, run, corpus, device)
        with checkpoint.believed(saved):
            job.model.load_state_dict(saved["model"])
            job.optimizer.load_state_dict(saved["optimizer"])
            job.state, job.log = State(**saved["state"]), Log(**saved["log"])
            job.batches = Batches(corpus, run, device, **saved["batches"])
            memory = job.state.memory
            job.state.memory = memory and [past[mine].to(device) for past in memory]
            checkpoint.set_random_state(saved, run.seed + job.state.step)
        job.saved_at = job.state.seconds
        return job

    def get_ready(self, flags, train_step, new):
        """What the first step needs besides: the dtype, the ranks, the compiler, metrics.tsv."""
        device = self.model.u.device.type
        x, y = self.batches.segment(0)
        part = slice(self.run.micro_batch or len(x))  # what goes through the model at a time
        x, y = x[part], y[part]
        if new:
            say_what_a_gpu_trains(flags, device)
            dtype = machine.choose_dtype(train_step, self.model, self.run, x, y)
            self.run = replace(self.run, dtype=ranks.first(dtype))
        self.learner = ranks.parallel(self.model, x, y)
        if flags.compile:
            context = machine.autocast(self.run, device)
            self.learner = machine.compiled(self.learner, context, x, y)
        self.identity = {  # what never changes in the checkpoints
            "format": checkpoint.FORMAT, "name": self.name, "config": asdict(self.config),
            "run": asdict(self.run), "vocab": self.corpus.vocab, "text": checksum(self.corpus)}
        self.log.open(self)

    def save_best(self):
        """best.pt: all that evaluating and sampling need."""
        if ranks.RANK == 0:
            checkpoint.save(self.path / "best.pt", self.identity | {
                "model": self.model.state_dict(), "state": vars(self.state) | {"memory": None}})

    def save(self):
        """checkpoint.pt, and the one before it as previous.pt: all that resuming needs.

        The memory is that of all B lanes in the order of the stream, so that the run can go on with
        another number of ranks.
        """
        self.saved_at = self.state.seconds
        memory = self.state.memory and [ranks.gather(past) for past in self.state.memory]
        content = self.identity | checkpoint.random_state(self.model.u.device.type) | {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "state": vars(self.state) | {"memory": memory}, "batches": self.batches.state(),
            "log": self.log.state()}
        if ranks.RANK == 0:
            self.log.flush()  # the lines that the checkpoint counts are on the disk before it
            checkpoint.save(self.path / "checkpoint.pt", content, self.path / "previous.pt")
        ranks.first(None)  # no rank goes on, or ends, before it is written


def restored(saved, device):
    """A checkpoint's content -> its model in eval mode, Run and State."""
    with checkpoint.believed(saved):
        config, run = presets.Config(**saved["config"]), presets.Run(**saved["run"])
        state = State(**saved["state"])
    estimate.check_weights_fit(presets.count_parameters(config))
    model = lesson_5.TransformerXL(config)
    with checkpoint.believed(saved):
        model.load_state_dict(saved["model"])
    return model.to(device).eval(), run, state


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
