"""What a run leans on: whole files whatever happens, damage noticed, one run in a folder.

    pytest tests/system/test_checkpoint.py
"""
import os
import pickle
import signal
import time
from collections import Counter

import pytest
import torch

from system.kills import differences
from helpers import exit_status
from training import checkpoint
from training.job import Stop

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
    assert acts == ["flush", "checkpoint.pt -> previous.pt", "checkpoint.pt.part -> checkpoint.pt",
                    "flush folder"]


@pytest.mark.parametrize("name", ["out.bin", "weights.part"])
def test_the_files_of_others_beside_it_stay(tmp_path, name):
    """`out.part` is not ours, and what ends in `.part` may be what is asked for."""
    (tmp_path / "out.part").write_text("theirs")
    checkpoint.save(tmp_path / name, CONTENT)
    assert {path.name for path in tmp_path.iterdir()} == {"out.part", name}
    assert (tmp_path / "out.part").read_text() == "theirs"


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
            outcomes["CRC" if "bad CRC" in str(error) else "refused"] += 1
            assert "damaged or no checkpoint" in str(error) or "it does not say" in str(error)
    assert min(outcomes.values()) > 1 and len(outcomes) == 3, outcomes


class Evil:
    """A pickle that runs a command when it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("content, words", [
    (Evil(), "damaged or no checkpoint"), ({"weights": 1}, "it does not say"),
    ([1], "it does not say")], ids=str)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path, monkeypatch, content, words):
    """And no code in it is run, whether torch has packed it or not."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    for data in (pickle.dumps(content), None):
        path.write_bytes(data) if data else torch.save(content, path)
        with pytest.raises(ValueError, match="no checkpoint" if data else words):
            checkpoint.load(path)
    assert not (tmp_path / "evil").exists()


def test_the_one_before_is_used_if_the_newest_is_not_there(paths, tmp_path, capsys):
    """Silently; if all are damaged, or none is there, it is an error.  best.pt has none before."""
    path, before = paths
    assert [checkpoint.load_first_valid(*paths)["step"], checkpoint.load(before)["step"]] == [2, 1]
    path.unlink()
    assert checkpoint.load_first_valid(path, before).path == before
    assert capsys.readouterr().out == ""
    before.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="previous.pt is damaged"):
        checkpoint.load_first_valid(path, before)
    before.unlink()
    with pytest.raises(ValueError, match="no checkpoint at .*checkpoint.pt"):
        checkpoint.load_first_valid(path, before)
    checkpoint.save(tmp_path / "best.pt", CONTENT)
    checkpoint.save(tmp_path / "best.pt", CONTENT)
    assert list(files(tmp_path)) == ["best.pt"]


# ---- one run in a folder, signals ---------------------------------------------------------------

def in_a_fork(act):
    """The exit status of act() in a process of its own; 99 if it comes to its end."""
    child = os.fork()
    if not child:
        try:
            act()
        except KeyboardInterrupt:
            os._exit(130)
        finally:
            os._exit(99)
    return exit_status(child)


@needs_locks
@needs_fork
def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    """And not after it."""
    def refused():
        with pytest.raises(ValueError, match="belongs to a run that is going on"):
            checkpoint.lock(tmp_path)
        os._exit(7)

    with checkpoint.lock(tmp_path):
        assert in_a_fork(refused) == 7
    checkpoint.lock(tmp_path).close()


def interrupted(number, times=1, ask=False):
    """Stop, with a signal so many times, that is asked for afterwards or not."""
    with Stop() as stop:
        assert not stop.requested()
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert not ask or stop.requested() and stop.number == number


@signals
def test_a_signal_waits_for_the_end_of_the_step(number):
    """It is asked for after each step; afterwards the handlers are as they were."""
    handlers = [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]
    interrupted(number, ask=True)
    assert handlers == [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]


@needs_fork
@signals
def test_a_second_signal_exits_at_once_and_one_that_nobody_asked_for_is_not_lost(number):
    """With the status that convention gives to the signal; as it would have ended the program."""
    assert in_a_fork(lambda: interrupted(number, times=2)) == 128 + number
    assert in_a_fork(lambda: interrupted(number)) in (130, -number)
