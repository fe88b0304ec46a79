"""Small runs of train.py.  Functions import it, since pytest imports this before the lessons."""
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

TINY = ("--model tiny --dtype float32 --device cpu --segment 8 --mem-len 12 --eval-segment 9 "
        "--eval-mem-len 16 --log-every 2 --n-tokens 5").split()
# 225 training bytes are 4 lanes of 56 inputs, so the text restarts after 7 segments of 8
WHOLE = ("--steps", "9", "--eval-every", "3", "--dropout", "0.2", "--optimizer", "muon",
         "--warmup", "0")


@pytest.fixture(scope="module", autouse=True)
def no_curve_and_no_flush():
    """Skip the plots and the flushes, which take longer than the rest of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.log.draw", lambda *arguments: None)
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a file of 250 bytes of pseudo-random words, the same for every test."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=draw.randint(1, 6))) for _ in range(99)]
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(" ".join(words)[:250])
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """finished(*flags) makes an uninterrupted run once, and returns its folder and last line."""
    @cache
    def once(*flags):
        out = tmp_path_factory.mktemp("finished")
        with redirect_stdout(io.StringIO()) as said:
            assert run(text, out, *flags) == 0
        return out, said.getvalue().splitlines()[-1]

    return once


@pytest.fixture
def small(finished, tmp_path):
    """small() copies the folder of a run of three steps, so that a test may damage it."""
    return lambda: Path(shutil.copytree(finished("--steps", "3")[0], tmp_path / "small"))


def run(text, out, *flags):
    return import_module("train").main([*TINY, "--text", str(text), "--out", str(out), *flags])


def again(out, *flags):
    """Run train.py with these flags on a folder that contains a run."""
    return import_module("train").main([*flags, "--out", str(out), "--device", "cpu"])


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def failure(capsys, status):
    """Return the error line; check that the status is 1 and that stderr has only this line."""
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert status == 1 and len(error) == 1 and error[0].startswith("train.py: "), error
    return error[0]


@contextmanager
def at_call(number, act, where="train_step"):
    """Call act() during the number-th call of a function of train.py, within the block."""
    def wrapped(*given, **more):
        if watched.call_count == number:
            act()
        return DEFAULT  # returns the result of the real function

    watched = Mock(wraps=getattr(import_module("train"), where), side_effect=wrapped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"train.{where}", watched)
        yield


def saved(out, name="checkpoint"):
    return import_module("training.checkpoint").load(out / f"{name}.pt")["state"]
