"""A run of train.py or of an experiment: its model, optimizer, text and progress."""
import math
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module

import torch

from support import corpora, validate
from training import checkpoint, presets, ranks, text
from training.optimizers import OPTIMIZERS

lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")


@dataclass
class State:
    """The progress of a run: what a checkpoint stores besides weights, optimizer, random state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, without evaluations
    column: int = 0  # of the lanes, where the next segment begins
    epoch: int = 0  # complete passes over the text
    memory: list = None  # N tensors (B, m, D), of this rank's lanes
    loss_sum: float = 0.0  # of the finite losses since the last line of metrics.tsv
    loss_count: int = 0
    loss_max: float = 0.0
    skipped: int = 0  # steps with a gradient that was not finite
    skipped_in_a_row: int = 0
    lowest: float = math.inf  # lowest validation loss so far, in nats
    validated_at: int = 0  # the step of the last validation
    tenths_validated: int = 0  # tenths of the run that were done then

    def record_step(self, x, loss, norm, seconds):
        """Count one step, on x (B, T).  ValueError after ten skipped ones in a row."""
        self.step += 1
        self.tokens += x.numel() * ranks.COUNT
        self.seconds += seconds
        if math.isfinite(loss):
            self.loss_sum += loss
            self.loss_count += 1
            self.loss_max = max(self.loss_max, loss)
        is_skipped = not math.isfinite(norm)
        self.skipped += is_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        if self.skipped_in_a_row == 10:
            raise ValueError(f"ten steps in a row, up to step {self.step}, had a gradient that is "
                             "not finite; the weights, also those saved, are from before. Start "
                             "again with smaller --lr and --muon-lr, and another --out")


class Job:
    """Everything about a run.

    path, name             the folder, the model's name
    model, recipe, corpus  the model, the settings of its training, the text
    reader                 the model for evaluation, such as a Reader; None: no validation
    optimizer, state       what else changes with each step
    metrics                the open metrics.tsv, in `fit`
    """

    def __init__(self, path, name, model, recipe, corpus, optimizer=None, reader=None):
        self.path, self.name, self.corpus = path, name, corpus
        self.model, self.recipe = model, recipe
        self.optimizer = optimizer or OPTIMIZERS[recipe.optimizer](model, recipe)
        self.reader = reader
        self.device = next(model.parameters()).device
        self.state, self.saved_at, self.printed_at = State(), 0.0, time.monotonic()
        self.step_seconds = deque(maxlen=99)
        self.graphs = self.untimed = 0  # of compiled layers; such steps, not yet counted
        self.identity = {  # the part of all checkpoints that never changes
            "format": checkpoint.FORMAT, "name": name, "config": asdict(model.config),
            "recipe": asdict(recipe), "vocab": corpus.vocab, "text": corpora.checksum(corpus)}
        if ranks.RANK:  # each rank samples its own dropout
            torch.manual_seed(recipe.seed + ranks.RANK)

    def restore(self, saved):
        """Continue from the content of a checkpoint, bit for bit."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = state = State(**saved["state"])
        mine = ranks.my_lanes(self.recipe.batch)
        state.memory = state.memory and [past[mine].to(self.device) for past in state.memory]
        self.saved_at = state.seconds
        checkpoint.set_random_state(saved["random"], self.device.type,
                                    self.recipe.seed + state.step)

    @cached_property
    def stream(self):
        """The text as B lanes, (B, L + 1), in the order of this epoch."""
        return text.lanes(self.corpus, self.recipe, self.state.epoch, self.device)

    def segment(self, column):
        """Return x, y (B, T) of this rank's lanes from a column on; the last one may be shorter."""
        x, y = next(lesson_1.segments(self.stream, self.recipe.segment, column))
        mine = ranks.my_lanes(self.recipe.batch)
        return x[mine].to(self.device), y[mine].to(self.device)

    def next_segment(self):
        """Return the next x, y (B, T), without end; where the text begins, the memory is None."""
        state = self.state
        if state.column >= self.stream.shape[1] - 1:  # the whole text has been read
            state.column = 0
            state.epoch += 1
            del self.stream  # made again when it is used
        if state.column == 0:
            state.memory = None
        x, y = self.segment(state.column)
        # half of T (Press et al. 2021); a run that also halved M ended worse (1.316, not 1.240 bpc)
        if state.step < self.recipe.short_steps:
            x, y = (tokens[:, : -(-self.recipe.segment // 2)] for tokens in (x, y))
        state.column += x.shape[1]
        return x, y

    def without_pause(self, seconds):
        """Return the seconds of a step; the median step's, if the process was suspended in it.
        A step that compiled layers counts later, as a median step, when the next one is timed."""
        before, self.graphs = self.graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if ranks.largest(self.graphs > before):
            self.untimed += 1
            return 0.0
        usual = sorted(self.step_seconds or [seconds])[len(self.step_seconds) // 2]
        self.step_seconds.append(seconds)
        untimed, self.untimed = self.untimed, 0
        return untimed * usual + (usual if seconds > max(10, 10 * usual) else seconds)

    def save_best(self):
        """Write best.pt: everything that evaluation and sampling need."""
        if ranks.RANK == 0:
            checkpoint.save(self.path / "best.pt", self.identity | {
                "model": self.model.state_dict(), "state": vars(self.state) | {"memory": None}})

    def save(self):
        """Write checkpoint.pt, with all lanes' memory; keep the one before as previous.pt."""
        memory = self.state.memory and [ranks.gather(past) for past in self.state.memory]
        content = self.identity | {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "random": checkpoint.random_state(self.device.type),
            "state": vars(self.state) | {"memory": memory}}
        if ranks.RANK == 0:
            os.fsync(self.metrics.fileno())  # its lines are on the disk before the checkpoint
            checkpoint.save(self.path / "checkpoint.pt", content, self.path / "previous.pt")
        ranks.broadcast(None)  # no rank continues or exits before the file is written
        self.saved_at = self.state.seconds


def settings_of(saved):
    """Return a checkpoint's name, Config and Recipe.  ValueError if its content fits no run."""
    try:
        validate.types(State(**saved["state"]))
        name = "" + saved["name"]  # TypeError unless it is a string; the file may be foreign
        return name, load_model(saved, "cpu").config, presets.Recipe(**saved["recipe"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{saved['path']} does not fit this code: train again ({error!r:.200})")


def load_model(saved, device):
    """Return the model of a checkpoint, in eval mode."""
    config = presets.Config(**saved["config"] | {"vocab_size": len({*saved["vocab"]})})
    storages = (weight.untyped_storage() for weight in saved["model"].values())
    stored = sum({part.data_ptr(): part.nbytes() for part in storages}.values())  # views share one
    if config.n_layer * config.d_model * (config.n_head * config.d_head + config.d_inner) > stored:
        raise ValueError("the file has fewer weights than its sizes need")  # 10^9 layers, say
    model = lesson_5.TransformerXL(config)
    model.load_state_dict(saved["model"])
    return model.to(device).eval()
