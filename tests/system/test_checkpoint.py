"""What a run leans on: whole files whatever happens, damage noticed, one run in a folder.

    pytest tests/system/test_checkpoint.py
"""
import math
import os
import pickle
import signal
import time
from collections import Counter
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from crash_test import differences
from helpers import exit_status
from support import checkpoint, corpora
from support.folder import Folder

CONTENT = {"format": checkpoint.FORMAT, "weights": torch.arange(9.0), "step": 3}
needs_locks = pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
signals = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture
def paths(tmp_path):
    """checkpoint.pt, of step 2, and previous.pt, of step 1."""
    found = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.save(found[0], CONTENT | {"step": step}, found[1])
    return found


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- writing ------------------------------------------------------------------------------------

def test_the_last_two_are_kept(paths, tmp_path):
    """The one before under its own name; best.pt has none."""
    assert [checkpoint.load(path)["step"] for path in paths] == [2, 1]
    checkpoint.save(tmp_path / "best.pt", CONTENT)
    assert sorted(files(tmp_path)) == ["best.pt", "checkpoint.pt", "previous.pt"]


@pytest.mark.skipif(os.name == "nt", reason="a folder cannot be flushed on Windows")
def test_flushed_before_it_is_renamed_and_the_folder_after(paths, monkeypatch):
    """In this order, or a loss of power leaves a name without a content."""
    acts, real, flush = [], os.replace, os.fsync

    def rename(one, two):
        acts.append(f"{one.name} -> {two.name}")
        real(one, two)

    def fsync(number):
        acts.append("flush folder" if os.path.isdir(f"/proc/self/fd/{number}") else "flush")
        flush(number)

    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(paths[0], CONTENT, paths[1])
    assert acts == ["flush", "checkpoint.pt -> previous.pt", "checkpoint.part -> checkpoint.pt",
                    "flush folder"]


@pytest.mark.parametrize("broken", ["torch.save", "os.fsync", "os.replace", "builtins.open"])
def test_a_failing_write_leaves_all_as_it_was(paths, tmp_path, monkeypatch, broken):
    """A full disk in the middle, a flush that fails, a folder that cannot be written to."""
    left = files(tmp_path)

    def fails(*arguments, **options):
        if broken == "torch.save":
            arguments[1].write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fails)
        with pytest.raises(OSError, match="could not write .*checkpoint.pt: .*No space left"):
            checkpoint.save(paths[0], CONTENT | {"step": 3}, paths[1])
    assert left == files(tmp_path)


# ---- reading ------------------------------------------------------------------------------------

def damaged(good):
    """The file cut off or with a bit flipped, anywhere."""
    for size in (*range(0, len(good), 101), len(good) - 1):
        yield good[:size]
    for place in range(0, 8 * len(good), 101):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        yield data


def test_damage_is_noticed_or_changes_nothing(paths):
    """Refused in a sentence, or (in the padding of the archive) the content is the same."""
    outcomes = Counter()
    for data in damaged(paths[0].read_bytes()):
        paths[0].write_bytes(data)
        try:
            assert not differences(checkpoint.load(paths[0]), CONTENT | {"step": 2})
            outcomes["the same"] += 1
        except ValueError as error:
            outcomes["CRC" if "Bad CRC" in str(error) else "refused"] += 1
            assert "damaged or no checkpoint" in str(error) or "it does not say" in str(error)
    assert min(outcomes.values()) > 1 and len(outcomes) == 3, outcomes


class Evil:
    """A pickle that runs a command when it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("content, words", [
    (Evil(), "damaged or no checkpoint"), ({"weights": 1}, "it does not say"),
    ([1], "it does not say"),
    (CONTENT | {"weights": torch.tensor([math.inf])}, "in /weights other than finite numbers"),
    (CONTENT | {"weights": torch.ones(2).double()}, "finite numbers of float32")], ids=str)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path, monkeypatch, content, words):
    """And no code in it is run, whether torch has packed it or not."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    for data in (pickle.dumps(content), None):
        path.write_bytes(data) if data else torch.save(content, path)
        with pytest.raises(ValueError, match="no checkpoint" if data else words):
            checkpoint.load(path)
    assert not (tmp_path / "evil").exists()


def test_the_one_before_is_used_and_it_says_so(paths, capsys):
    """If the newest is damaged; silently if it is not there; if all are damaged it is an error."""
    path, before = paths
    assert checkpoint.newest(path, before).path == path
    good = path.read_bytes()
    path.unlink()
    assert checkpoint.newest(path, before).path == before and capsys.readouterr().out == ""
    path.write_bytes(good[:-9])
    assert checkpoint.newest(path, before)["step"] == 1
    said = capsys.readouterr().out
    assert "checkpoint.pt is damaged" in said and said.endswith(f"using {before}\n")
    before.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="previous.pt is damaged"):
        checkpoint.newest(path, before)
    path.unlink(), before.unlink()
    with pytest.raises(ValueError, match="no checkpoint at .*checkpoint.pt"):
        checkpoint.newest(path, before)


# ---- what a run saves and gets back -------------------------------------------------------------

class Toy(nn.Module):
    """A model of one matrix."""
    def __init__(self, config=None):
        super().__init__()
        self.u = nn.Parameter(torch.randn(4, 4))


@pytest.fixture
def job():
    """What train.py's `begin` makes, with a toy model, in the middle of a run."""
    Config = import_module("05_full_model").Config
    tokens, model = torch.arange(9) % 2, Toy()
    job = SimpleNamespace(
        name="toy", config=Config(2, n_layer=2, d_model=4, mem_len=5), model=model,
        run=import_module("train").Run(steps=9, batch=3, dtype="float32"),
        corpus=corpora.Corpus(tokens, tokens, tokens, [97, 98], "made up"),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        state=checkpoint.State(step=3, column=8, memory=[torch.randn(3, 5, 4) for _ in range(2)]))
    model.u.pow(2).sum().backward()
    job.optimizer.step()
    return job


def begun(job, path):
    """Save the job in a new folder."""
    with Folder(path) as folder:
        assert folder.resume({}, job.name, job.config, job.run)[-1] is None
        folder.own(new=True)
        folder.open(job, None)
        folder.save_best(job.model, job.state)
        folder.save(job.model, job.optimizer, job.state)


def test_a_folder_gives_back_what_was_saved(job, tmp_path):
    """Sizes, settings, place, weights, moments, random state, memory; best.pt has no memory."""
    begun(job, tmp_path)
    drawn = torch.rand(5)
    with Folder(tmp_path) as folder:
        name, config, run, state, content = folder.resume(
            {"resume": True, "save_minutes": 5.0}, "other", job.config, replace(job.run, lr=1.0))
    assert (name, config, run) == ("toy", job.config, replace(job.run, save_minutes=5.0))
    model = checkpoint.make_model(Toy, lambda config: 16, config, content)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpoint.restore(content, optimizer, state, config, run, "cpu")
    assert torch.rand(5).equal(drawn) and model.u.equal(job.model.u)
    assert not differences(vars(state), vars(job.state))
    assert not differences(optimizer.state_dict(), job.optimizer.state_dict())
    best = checkpoint.best(tmp_path)
    assert best.path.name == "best.pt" and best["state"]["memory"] is None


@pytest.mark.parametrize("spoil", [
    lambda content: content["state"].update(memory=[torch.zeros(2, 5, 4)] * 2),
    lambda content: content["optimizer"]["state"][0].update(exp_avg=torch.zeros(4))],
    ids=["lanes", "moments"])
def test_what_does_not_fit_the_run_is_refused(job, tmp_path, spoil):
    """Before anything is trained with it."""
    begun(job, tmp_path)
    content = checkpoint.load(tmp_path / "checkpoint.pt")
    spoil(content)
    with pytest.raises(ValueError, match="checkpoint.pt cannot be resumed"):
        checkpoint.restore(content, job.optimizer, job.state, job.config, job.run, "cpu")


def test_weights_of_another_model_are_refused(job, tmp_path):
    """More of them than were saved, or of other names."""
    begun(job, tmp_path)
    content = checkpoint.load(tmp_path / "checkpoint.pt")
    for kind, count in ((Toy, 17), (lambda config: nn.Linear(4, 4, bias=False), 16)):
        with pytest.raises(ValueError, match="weights of another model"):
            checkpoint.make_model(kind, lambda config: count, job.config, content)


def test_a_state_counts_steps_and_begins_the_text_again():
    """Tokens, columns and seconds add up; the text's first segment has no past."""
    state = checkpoint.State(memory=[torch.zeros(1)])
    for _ in range(2):
        state.count(torch.zeros(2, 3), 1.0, 0.5, 2.0)
    assert (state.step, state.tokens, state.column, state.seconds) == (2, 12, 6, 4.0)
    state.begin_text_again()
    assert (state.column, state.memory, state.epoch, state.tokens) == (0, None, 1, 12)


def test_ten_bad_steps_in_a_row_are_too_many():
    """One that is finite in between begins the count anew."""
    state = checkpoint.State()
    for loss in (*9 * [math.nan], 1.0, *9 * [math.inf]):
        state.count(torch.zeros(2, 3), loss, 0.5, 1.0)
        state.stop_if_never_finite()
    state.count(torch.zeros(2, 3), 1.0, math.nan, 1.0)
    with pytest.raises(ValueError, match="ten steps in a row, up to step 20"):
        state.stop_if_never_finite()
    assert state.skipped == 19 and state.loss_count == 1


# ---- one run in a folder ------------------------------------------------------------------------

@needs_locks
@needs_fork
def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    """And not after it, however it ended; who holds the folder is in the sentence."""
    def refused():
        with checkpoint.Lock(tmp_path) as other, pytest.raises(
                ValueError, match=r"going on \(the night shift\): wait"):
            other.take()

    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            lock = checkpoint.Lock(tmp_path)
            lock.take(), lock.sign("the night shift"), os.write(tell, b"!")
            time.sleep(60)
        finally:
            os._exit(99)
    try:
        assert os.read(ready, 1) == b"!"
        refused()
    finally:
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) == -signal.SIGKILL
    with checkpoint.Lock(tmp_path) as lock:
        assert lock.take() == lock.take() == "the night shift"  # taken twice by its owner: once
        refused()


@needs_locks
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    """The run goes on."""
    def flock(*arguments):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    with checkpoint.Lock(tmp_path) as lock:
        assert lock.take() == ""
    assert "cannot be locked" in capsys.readouterr().out


# ---- signals ------------------------------------------------------------------------------------

@signals
def test_a_signal_waits_for_the_end_of_the_step(number):
    """It is asked for after each step; afterwards the handlers are as they were."""
    handlers = [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]
    with checkpoint.Stop() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.asked() and stop.number == number
    assert handlers == [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]


@signals
def test_a_signal_ends_an_evaluation_at_once(number):
    """The run goes on after the block, where it is asked for the signal."""
    reached = []
    with checkpoint.Stop() as stop:
        with stop.at_once():
            os.kill(os.getpid(), number)
            time.sleep(1)
            reached.append("its end")
        reached.append("what is after it")
        assert stop.asked() and stop.number == number
    assert reached == ["what is after it"]


def test_an_error_goes_through():
    """A KeyboardInterrupt that is no signal's, and any other error."""
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), checkpoint.Stop() as stop, stop.at_once():
            raise error


@needs_fork
@signals
def test_a_second_signal_leaves_at_once(number):
    """In the middle of a block, with the status that convention gives to the signal."""
    child = os.fork()
    if not child:
        with checkpoint.Stop():
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        os._exit(99)
    assert exit_status(child) == 128 + number
