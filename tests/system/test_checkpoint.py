"""What checkpoint.py promises: whole files whatever happens, damage noticed, one run in a folder.

    pytest tests/system/test_checkpoint.py
"""
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from support import checkpoint
import crash_test
from helpers import exit_status

CONTENT = {"format": checkpoint.FORMAT, "weights": torch.arange(9.0), "step": 3}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- writing ------------------------------------------------------------------------------------

def test_the_last_two_are_kept(tmp_path):
    """The one before under its own name; best.pt has none."""
    path, before = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    for step in range(4):
        checkpoint.save(path, CONTENT | {"step": step}, before)
    assert (checkpoint.load(path)["step"], checkpoint.load(before)["step"]) == (3, 2)
    checkpoint.save(tmp_path / "best.pt", CONTENT)
    assert names(tmp_path) == ["best.pt", "checkpoint.pt", "previous.pt"]


@pytest.mark.skipif(os.name == "nt", reason="a folder cannot be flushed on Windows")
def test_flushed_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    """In this order, or a loss of power leaves a name without a content."""
    acts, path, before = [], tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    checkpoint.save(path, CONTENT, before)
    real_replace, real_fsync = os.replace, os.fsync

    def replace(one, two):
        acts.append(f"{one.name} -> {two.name}")
        real_replace(one, two)

    def fsync(number):
        acts.append("flush " + os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
                    if os.path.exists("/proc/self/fd") else "flush")
        real_fsync(number)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(path, CONTENT, before)
    assert [act.split(" /")[0] for act in acts if "flush" not in act] == [
        "checkpoint.pt -> previous.pt", "checkpoint.part -> checkpoint.pt"]
    assert [i for i, act in enumerate(acts) if act.startswith("flush")] == [0, 3]
    assert acts[0] in ("flush", "flush checkpoint.part")
    assert acts[3] in ("flush", f"flush {tmp_path.name}")


@pytest.mark.parametrize("broken", ["save", "fsync", "replace", "open"])
def test_a_failing_write_leaves_all_as_it_was(tmp_path, monkeypatch, broken):
    """A full disk in the middle, a flush that fails, a folder that cannot be written to."""
    path, before = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.save(path, CONTENT | {"step": step}, before)
    left = [(name, (tmp_path / name).read_bytes()) for name in names(tmp_path)]

    def fails(*arguments, **options):
        if broken == "save":
            arguments[1].write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    where = {"save": "torch", "open": "builtins"}.get(broken, "os")
    monkeypatch.setattr(f"{where}.{broken}", fails)
    with pytest.raises(OSError, match="could not write .*checkpoint.pt: .*No space left"):
        checkpoint.save(path, CONTENT | {"step": 3}, before)
    monkeypatch.undo()
    assert left == [(name, (tmp_path / name).read_bytes()) for name in names(tmp_path)]


# ---- reading ------------------------------------------------------------------------------------

def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path):
    """Anywhere in the file: refused, or (in the padding of the archive) the content is the same."""
    path, noticed = tmp_path / "checkpoint.pt", 0
    checkpoint.save(path, CONTENT)
    good = path.read_bytes()
    places = range(0, 8 * len(good), 43)
    for place in places:
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            found = checkpoint.load(path)
        except ValueError as error:
            noticed += 1
            assert "checkpoint" in str(error) and "\n" not in str(error)
        else:
            assert not crash_test.differences(found, CONTENT)
    assert noticed > len(places) / 4


def test_a_flipped_weight_is_noticed(tmp_path):
    """torch.load alone would not see it."""
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, CONTENT)
    data = bytearray(path.read_bytes())
    place = bytes(data).index(torch.arange(9.0).numpy().tobytes()) + 14
    data[place] ^= 1
    path.write_bytes(data)
    assert not torch.load(path, weights_only=True)["weights"].equal(CONTENT["weights"])
    with pytest.raises(ValueError, match="damaged or no checkpoint .*CRC"):
        checkpoint.load(path)


def test_cut_off_anywhere_is_refused(tmp_path):
    """Every length but the whole."""
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, CONTENT)
    good = path.read_bytes()
    for size in (*range(0, len(good), 41), len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match="damaged or no checkpoint"):
            checkpoint.load(path)


def test_the_one_before_is_used_and_it_says_so(tmp_path, capsys):
    """If the newest is damaged; silently if it is not there; if all are damaged it is an error."""
    path, before = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    with pytest.raises(ValueError, match="no checkpoint at .*checkpoint.pt"):
        checkpoint.newest(path, before)
    for step in (1, 2):
        checkpoint.save(path, CONTENT | {"step": step}, before)
    content = checkpoint.newest(path, before)
    assert (content.path, content["step"], capsys.readouterr().out) == (path, 2, "")
    path.write_bytes(path.read_bytes()[:-9])
    content = checkpoint.newest(path, before)
    said = capsys.readouterr().out
    assert (content.path, content["step"]) == (before, 1)
    assert "checkpoint.pt is damaged" in said and said.endswith(f"using {before}\n")
    before.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="previous.pt is damaged"):
        checkpoint.newest(path, before)
    path.unlink()
    checkpoint.save(before, CONTENT)
    capsys.readouterr()
    assert checkpoint.newest(path, before).path == before and capsys.readouterr().out == ""


# ---- one run in a folder ------------------------------------------------------------------------

needs_locks = pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")


@needs_locks
def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    """And not after it, however it ended; who holds the folder is in the sentence."""
    holder = ("import sys, time, pathlib, fcntl\n"
              "file = open(sys.argv[1], 'a+')\n"
              "fcntl.flock(file, fcntl.LOCK_EX)\n"
              "file.write('process 123, on the night shift'); file.flush()\n"
              "print('locked', flush=True); time.sleep(60)\n")
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path / "lock")],
                          stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "locked\n"
        with checkpoint.Lock(tmp_path) as lock, pytest.raises(
                ValueError, match=r"going on \(process 123, on the night shift\): wait"):
            lock.take()
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    with checkpoint.Lock(tmp_path) as lock:
        assert lock.take() == "process 123, on the night shift"
        lock.sign("mine")
        assert lock.take() == "mine"  # taken twice by its owner: once
        with checkpoint.Lock(tmp_path) as other, pytest.raises(ValueError, match="mine"):
            other.take()
    with checkpoint.Lock(tmp_path) as lock:
        assert lock.take() == "mine"


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

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_step(number):
    """It is asked for after each step; afterwards the handlers are as they were."""
    handlers = [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]
    with checkpoint.Stop() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.asked() and stop.number == number
    assert stop.number == number
    assert handlers == [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_at_once(number):
    """The run goes on after the block, where it is asked for the signal."""
    reached = []
    with checkpoint.Stop() as stop:
        with stop.at_once():
            reached.append("the evaluation")
            os.kill(os.getpid(), number)
            time.sleep(1)
            reached.append("its end")
        reached.append("what is after it")
        assert stop.asked() and stop.number == number
    assert reached == ["the evaluation", "what is after it"]


def test_an_error_goes_through():
    """A KeyboardInterrupt that is no signal's, and any other error."""
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), checkpoint.Stop() as stop, stop.at_once():
            raise error


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
