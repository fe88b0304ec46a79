"""Test checkpoints and signals: files stay complete, damage is detected, and signals wait."""
import io
import os
import pickle
import signal
import time
from unittest.mock import Mock

import pytest
import torch

from system.kills import differences
from helpers import content_of, refusal, zipped
from training import checkpoint
from training.signals import Stop

CONTENT = {"format": checkpoint.FORMAT, "weights": torch.arange(9.0), "step": 3,
           "state": {"column": 0}, "optimizer": {}, "random": 0}


@pytest.fixture
def paths(tmp_path):
    """Save checkpoint.pt of step 2 and previous.pt of step 1."""
    found = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.save(found[0], CONTENT | {"step": step}, found[1])
    return found


@pytest.mark.skipif(os.name == "nt", reason="a folder cannot be flushed on Windows")
def test_a_file_is_flushed_before_its_rename_and_the_folder_after_it(paths, monkeypatch):
    """In any other order a loss of power could leave an empty file with a valid name."""
    acts, real = [], os.replace
    monkeypatch.setattr(os, "replace", lambda one, two: (
        acts.append(f"{one.name} -> {two.name}"), real(one, two)))
    monkeypatch.setattr(os, "fsync", lambda number: acts.append(
        "flush folder" if os.path.isdir(f"/proc/self/fd/{number}") else "flush"))
    checkpoint.save(paths[0], CONTENT, paths[1])
    assert acts == ["flush", "checkpoint.pt -> previous.pt", "checkpoint.pt.part -> checkpoint.pt",
                    "flush folder"]


FULL = OSError("No space left on device")
FAILS = Mock(side_effect=FULL)
Disk = type("Disk", (io.BytesIO,), {"read": FAILS, "write": Mock(side_effect=[64, *99 * [FULL]])})
WRITE, READ = "could not write .*checkpoint.pt: .*No", "checkpoint.pt is unreadable.*No"


@pytest.mark.parametrize("words, broken, mock", [
    (WRITE, "os.fsync", FAILS), (WRITE, "os.replace", FAILS), (WRITE, "builtins.open", FAILS),
    (WRITE, "builtins.open", Mock(return_value=Disk())), (READ, "torch.load", FAILS),
    (READ, "io.open", Mock(return_value=Disk())),
    ("can", "torch.load", Mock(side_effect=RuntimeError("can't allocate what is left")))])
def test_a_failing_write_or_read_changes_nothing(paths, tmp_path, monkeypatch, words, broken, mock):
    """On a full disk torch raises a RuntimeError, which hides the reason; so does zipfile."""
    left = content_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(broken, mock)
        with pytest.raises((OSError, RuntimeError), match=f"{words}.* left"):
            if "write" in words:
                checkpoint.save(paths[0], CONTENT | {"step": 3}, paths[1])
            checkpoint.find(tmp_path, resume=True)
    assert left == content_of(tmp_path)


def test_damage_is_detected_or_changes_nothing(paths):
    """The file is cut, or one bit flipped, at many places; flips of padding change nothing."""
    outcomes, good = set(), paths[0].read_bytes()
    whole = int.from_bytes(good, "little")
    for data in (*(good[:size] for size in (*range(0, len(good), 97), len(good) - 1)),
                 *((whole ^ 1 << bit).to_bytes(len(good), "little")
                   for bit in range(0, 8 * len(good), 97))):
        paths[0].write_bytes(data)
        try:
            assert checkpoint.load(paths[0]).pop("path") == paths[0]
            assert not differences(checkpoint.load(paths[0]), CONTENT | {"step": 2, "path": ""})
            outcomes.add("the same")
        except ValueError as error:
            outcomes.add("CRC" if "bad CRC" in str(error) else "refused")
            assert "not a train.py checkpoint" in str(error)
    assert len(outcomes) == 3


# its pickle runs a command when it is loaded
EVIL = type("Evil", (), {"__reduce__": lambda self: (os.mkdir, ("evil",))})()


@pytest.mark.parametrize("content, words", [
    (EVIL, "damaged or not a train.py checkpoint"), ({"format": "another"}, "its format is not"),
    ([1], "its format is not")], ids=["pickle", "format", "list"])
def test_other_files_are_rejected(tmp_path, monkeypatch, content, words):
    """No code in such a file is run, whether torch saved it or pickle did; nothing is expanded."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps(content))
    assert "not a train.py checkpoint" in refusal(checkpoint.load, path)
    torch.save(content, path)
    assert words in refusal(checkpoint.load, path)
    assert not (tmp_path / "evil").exists()
    path.write_bytes(zipped({"data.pkl": b""}))
    assert "compression of ['data.pkl']" in refusal(checkpoint.load, path)


def test_the_previous_checkpoint_is_used_if_the_newest_is_damaged(paths, tmp_path, capsys):
    assert checkpoint.to_evaluate(tmp_path)["step"] == 2
    paths[0].write_bytes(b"half a checkpoint")
    assert capsys.readouterr().out == "" and checkpoint.to_evaluate(tmp_path)["step"] == 1
    assert "checkpoint.pt is unreadable, damaged or " in capsys.readouterr().out
    assert checkpoint.find(tmp_path, resume=True)["step"] == 1
    assert (tmp_path / "damaged.pt").read_bytes() == b"half a checkpoint"
    checkpoint.save(paths[0], CONTENT, paths[1])
    assert checkpoint.load(paths[1])["step"] == 1


@pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
def test_a_lock_belongs_to_one_run_and_leaves_nothing(tmp_path, monkeypatch):
    """A lock that another run removes between our open and our flock protects nothing."""
    for name in ("lock", "checkpoint.pt", "previous.pt", "best.pt", "metrics.tsv", "curve.png"):
        (tmp_path / name).symlink_to("nowhere")  # is neither followed nor replaced
        assert f"{name} is not a regular file" in refusal(checkpoint.locked(tmp_path).__enter__)
        (tmp_path / name).unlink()
    for folder, left in (tmp_path / "new", False), (tmp_path, True):
        with pytest.raises(KeyError), checkpoint.locked(folder):
            assert "in use" in refusal(checkpoint.locked(folder).__enter__)
            assert (folder / "lock").exists()
            raise KeyError
        assert folder.exists() == left and not (folder / "lock").exists()
    flock, remove = checkpoint.fcntl.flock, (tmp_path / "lock").unlink
    for again in (lambda: None, (tmp_path / "lock").touch):  # a third run may have made a new one
        monkeypatch.setattr(checkpoint.fcntl, "flock", lambda *given: (
            remove(), again(), flock(*given)))
        assert "in use" in refusal(checkpoint.locked(tmp_path).__enter__)


def interrupted(number, times=1, ask=False):
    """Send this process a signal within Stop; with `ask`, check that `agree` records it."""
    with Stop() as stop:
        assert not stop.number
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        if ask:
            stop.agree()
            assert stop.number == number


def end_of(act):
    """Return the exit status of a process that runs act(); 99 means that act() returned."""
    child = os.fork()
    if not child:
        signal.alarm(60)  # kills it if it hangs, so that the wait below ends
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` ignores it
        try:
            act()
        except KeyboardInterrupt:
            os._exit(130)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_a_second_one_exits_and_none_is_lost(number):
    """Only a second signal, or one that `agree` did not record, ends the program."""
    handlers = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
    interrupted(number, ask=True)
    assert handlers == [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
    assert end_of(lambda: interrupted(number, times=2)) == 128 + number
    assert end_of(lambda: interrupted(number)) in (130, -number)
