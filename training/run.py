"""The folder of a run: what it goes on from, what it saves, and who may write into it."""
import os
from dataclasses import asdict, replace
from pathlib import Path

from training import ranks
from training.checkpoint import (
    FORMAT, Lock, State, check_text, load, newest, random_state, save, unpack)
from training.flags import check_agreement
from support.corpora import checksum
from support.corpora import load as load_corpus
from training.log import Metrics


ROOT = Path(__file__).resolve().parent.parent  # of train.py


def folder_of(given, name, config, run):
    """Where a run lives: --out, or runs/DATASET-MODEL beside train.py."""
    text = Path(run.text).stem if run.text else run.dataset
    return Path(given.get("out", ROOT / "runs" / f"{text}-{name}"))


def read_corpus(given, run, content=None):
    """The run's corpus.  ValueError if it is not the one in a checkpoint's content."""
    with ranks.first_alone():  # it may fetch and unpack
        corpus = load_corpus(run.text or run.dataset, drop_newlines=run.drop_newlines,
                             root=given.get("data_dir", ROOT / "data"))
    check_text(content, corpus)
    return corpus


class Folder:
    """The folder of one run: its checkpoints, its lock, its metrics.tsv.

        with Folder(path) as folder:
            ... = folder.resume(given, name, config, run)   what it goes on from, if it does
            folder.own(new)                                 from here on it is this run's alone
            folder.open(job, content)                       ... and its files can be written
            folder.save(model, optimizer, state)
    """

    def __init__(self, path):
        self.path, self.lock, self.metrics = path, Lock(path), None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.metrics:
            self.metrics.close()
        self.lock.__exit__()

    def resume(self, given, name, config, run):
        """What the run is: as given if it is a new one, as saved if it goes on.

        -> name, Config, Run, State, and the content of its checkpoint or None.  The first rank
        chooses the checkpoint, the others read what it has chosen.  ValueError if refused.
        """
        content = self.choose("resume" in given) if ranks.RANK == 0 else None
        path = ranks.first(content and content.path)
        if path is None:
            return name, config, run, State(), None
        content = load(path) if content is None else content
        config, run, state = unpack(content, type(config), type(run))
        # a text may have moved: that it is the same is seen when it is read
        free = {key: given[key] for key in given.keys() & {"micro_batch", "save_minutes", "text"}}
        check_agreement(given, content, "--resume", free)
        return content["name"], config, replace(run, **free), state, content

    def choose(self, resume):
        """The content of the checkpoint to go on from; None for a new run.

        After torchrun has restarted its ranks a run goes on by itself, if it is this torchrun's.
        """
        last, before = self.path / "checkpoint.pt", self.path / "previous.pt"
        there = last.exists() or before.exists()
        restarted = there and ranks.restarts()
        again = restarted and self.lock.take().endswith(f" {ranks.launch()}")
        if not resume and not again:
            if there:
                raise ValueError(f"{self.path} holds a run already: add --resume to go on with it, "
                                 "or keep it and name another folder with --out")
            return None
        if there:
            self.lock.take()
        content = newest(last, before)
        if content.path == before and last.exists():  # damaged: it must not become the one before
            os.replace(last, self.path / "damaged.pt")
            print(f"kept the damaged one as {self.path / 'damaged.pt'}")
        return content

    def own(self, new):
        """Make the folder, or take the one that is there, for this process alone."""
        if ranks.RANK == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            if new:
                self.choose(resume=False)  # refuses again, now under the lock: nobody was faster
                for left in ("best.pt", "metrics.tsv"):  # of a run whose checkpoints are gone
                    if (self.path / left).exists():
                        os.replace(self.path / left, self.path / f"old-{left}")
            self.lock.sign(f"process {os.getpid()}, started by {ranks.launch()}")
            for part in self.path.glob("*.part"):  # of a save that was killed
                part.unlink()

    def open(self, job, content):
        """Begin metrics.tsv, or go on with it, and note what never changes in the checkpoints.

        job: see `begin` in train.py; content: the checkpoint that it goes on from, or None.
        """
        text = content["text"] if content else checksum(job.corpus)
        self.identity = {"format": FORMAT, "name": job.name, "config": asdict(job.config),
                         "run": asdict(job.run), "vocab": job.corpus.vocab, "text": text}
        self.metrics = Metrics(self.path / "metrics.tsv", job)
        self.saved = job.state.seconds  # of training, at the last checkpoint

    def save_best(self, model, state):
        """best.pt: all that evaluating and sampling need."""
        if ranks.RANK == 0:
            save(self.path / "best.pt", self.identity | {
                "model": model.state_dict(), "state": vars(state) | {"memory": None}})

    def save(self, model, optimizer, state):
        """checkpoint.pt, and the one before it as previous.pt: all that resuming needs.

        The memory is that of all B lanes in the order of the stream, so that the run can go on with
        another number of ranks.
        """
        self.saved = state.seconds
        memory = state.memory and [ranks.gather(past) for past in state.memory]
        content = self.identity | random_state(model.u.device.type) | {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "state": vars(state) | {"memory": memory}}
        if ranks.RANK == 0:
            self.metrics.flush()  # the lines that the checkpoint counts are on the disk before it
            save(self.path / "checkpoint.pt", content, self.path / "previous.pt")
        ranks.first(None)  # no rank goes on, or ends, before it is written
