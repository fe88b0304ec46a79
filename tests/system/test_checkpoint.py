"""What a run relies on: complete files whatever happens, damage noticed, signals that wait."""
import os
import pickle
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from system.kills import differences
from helpers import content_of, refusal
from training import checkpoint, ranks
from training.job import Stop, find_checkpoint

CONTENT = {"format": checkpoint.FORMAT, "weights": torch.arange(9.0), "step": 3}


@pytest.fixture
def paths(tmp_path):
    """checkpoint.pt, of step 2, and previous.pt, of step 1."""
    found = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint.save(found[0], CONTENT | {"step": step}, found[1])
    return found


# ---- writing ------------------------------------------------------------------------------------

@pytest.mark.skipif(os.name == "nt", reason="a folder cannot be flushed on Windows")
def test_a_file_is_flushed_before_its_rename_and_the_folder_after_it(paths, monkeypatch):
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


@pytest.mark.parametrize("broken, error", [
    ("torch.save", RuntimeError), ("os.fsync", OSError), ("os.replace", OSError),
    ("builtins.open", OSError)])
def test_a_failing_write_changes_nothing(paths, tmp_path, monkeypatch, broken, error):
    """On a full disk, say; torch reports it in its own way."""
    left = content_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(broken, Mock(side_effect=error("No space left on device")))
        with pytest.raises(OSError, match="could not write .*checkpoint.pt: .*No space left"):
            checkpoint.save(paths[0], CONTENT | {"step": 3}, paths[1])
    assert left == content_of(tmp_path)


# ---- reading ------------------------------------------------------------------------------------

def damaged(good):
    """The file cut off or with a bit flipped, anywhere."""
    for size in (*range(0, len(good), 101), len(good) - 1):
        yield good[:size]
    for bit in range(0, 8 * len(good), 101):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        yield data


def test_damage_is_detected_or_changes_nothing(paths):
    """Refused in a sentence, or (in the padding of the archive) the content is the same."""
    outcomes = set()
    for data in damaged(paths[0].read_bytes()):
        paths[0].write_bytes(data)
        try:
            assert not differences(checkpoint.load(paths[0]), CONTENT | {"step": 2})
            outcomes.add("the same")
        except ValueError as error:
            outcomes.add("CRC" if "bad CRC" in str(error) else "refused")
            assert "not a train.py checkpoint" in str(error)
    assert len(outcomes) == 3


class Evil:
    """A pickle that runs a command when it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("content, words", [
    (Evil(), "damaged or not a train.py checkpoint"), ({"format": "another"}, "its format is not"),
    ([1], "its format is not")], ids=str)
def test_other_files_are_rejected(tmp_path, monkeypatch, content, words):
    """And no code in it is run, whether torch has packed it or not."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps(content))
    assert "not a train.py checkpoint" in refusal(checkpoint.load, path)
    torch.save(content, path)
    assert words in refusal(checkpoint.load, path)
    assert not (tmp_path / "evil").exists()


def test_the_previous_checkpoint_is_used_if_the_newest_is_damaged(paths, tmp_path, capsys):
    """One line says so; the other one is read if nothing is wrong.  The next save keeps it."""
    assert checkpoint.load_first_valid(*paths)["step"] == 2
    paths[0].write_bytes(b"half a checkpoint")
    assert capsys.readouterr().out == "" and checkpoint.load_first_valid(*paths)["step"] == 1
    assert "checkpoint.pt is damaged" in capsys.readouterr().out
    assert find_checkpoint(tmp_path, resume=True)["step"] == 1
    checkpoint.save(paths[0], CONTENT, paths[1])
    assert checkpoint.load(paths[1])["step"] == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_several_ranks_map_a_checkpoint(paths, monkeypatch):
    """So they hold it once."""
    monkeypatch.setattr(ranks, "COUNT", 8)
    content = checkpoint.load(paths[0])
    assert not differences(content, CONTENT | {"step": 2})
    assert str(paths[0]) in Path("/proc/self/maps").read_text()


# ---- signals ------------------------------------------------------------------------------------

def interrupted(number, times=1, ask=False):
    """Stop, with a signal so many times, that is asked for afterwards or not."""
    with Stop() as stop:
        assert not stop.number
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert not ask or stop.agree(5.0) == 5.0 and stop.number == number


def end_of(act):
    """The exit status of act() in a process of its own; 99 if it comes to its end."""
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it if it hangs, and with it the wait below
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
    """One that is asked for ends nothing, and afterwards the handlers are as they were; the others
    end the program with the status that convention gives to the signal.
    """
    handlers = [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]
    interrupted(number, ask=True)
    assert handlers == [signal.getsignal(z) for z in (signal.SIGINT, signal.SIGTERM)]
    assert end_of(lambda: interrupted(number, times=2)) == 128 + number
    assert end_of(lambda: interrupted(number)) in (130, -number)
