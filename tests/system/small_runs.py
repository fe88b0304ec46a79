"""Small runs of train.py for the tests: a text, a finished run, and how a mistake must look."""
import io
import os
import random
import shutil
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from training import checkpoint, log

train = import_module("train")
TINY = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--segment", "8", "--mem-len",
        "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "2",
        "--n-tokens", "5"]
# 225 training bytes in 4 lanes of 56 inputs: the text begins anew after 7 segments of 8
WHOLE = "--steps", "9", "--eval-every", "3", "--dropout", "0.2", "--optimizer", "muon"


@pytest.fixture(scope="module", autouse=True)
def no_curve_and_no_flush():
    """What takes longer than all else in these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "draw", lambda *arguments: None)
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of pseudo-random words, the same in every test: 250 bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=draw.randint(1, 6))) for _ in range(99)]
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(" ".join(words)[:250])
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """finished(*flags): a run that nobody has disturbed, made once -> its folder, its last line."""
    @cache
    def once(*flags):
        out = tmp_path_factory.mktemp("finished")
        with redirect_stdout(io.StringIO()) as said:
            assert run(text, out, *flags) == 0
        return out, said.getvalue().splitlines()[-1]

    return once


@pytest.fixture
def small(finished, tmp_path):
    """small(): the folder of a run of three steps, to be read or spoiled."""
    return lambda: Path(shutil.copytree(finished("--steps", "3")[0], tmp_path / "small"))


def run(text, out, *flags):
    return train.main([*TINY, "--text", str(text), "--out", str(out), *flags])


def again(out, *flags):
    """A command on a folder that holds a run."""
    return train.main([*flags, "--out", str(out), "--device", "cpu"])


def files():
    """What is in the working folder; locks are not counted."""
    return {path: path.read_bytes() for path in Path().rglob("*")
            if path.is_file() and path.name != "lock"}


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def failure(capsys, status):
    """What a mistake must look like: status 1 and exactly one line on stderr."""
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert status == 1 and len(error) == 1 and error[0].startswith("train.py: "), error
    return error[0]


@contextmanager
def at_call(number, act, where="train_step"):
    """In the block: act() in the middle of the number-th call of a function of train.py."""
    def wrapped(*given, **more):
        if watched.call_count == number:
            act()
        return DEFAULT  # what the real one returns

    watched = Mock(wraps=getattr(train, where), side_effect=wrapped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, where, watched)
        yield


def saved(out, name="checkpoint"):
    return checkpoint.load(out / f"{name}.pt")["state"]
