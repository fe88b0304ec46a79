"""A run that is killed at any write and resumed equals an uninterrupted run, bit for bit."""
import os
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch

from system.kills import Killed, kill_at, runs_differ
from system.conftest import run
from training import log

WRITES = [(os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir"), (torch, "save"),
          (log, "write_line")]
FLAGS = ("--steps 6 --eval-every 4 --segment 16 --dropout 0.2 --plain --n-layer 1 "
         "--save-minutes 0.01").split()


def continued(text, out, n):
    """Start or resume the run in `out`, kill it at write n, and return whether it was killed."""
    resume = ["--resume"] if any(out.glob("*.pt")) else []
    with pytest.MonkeyPatch.context() as patch:
        kill_at(n, patch, *WRITES)
        try:
            assert run(text, out, *FLAGS, *resume) == 0
            return False
        except Killed:
            return True


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_write_and_resumed(stride, text, tmp_path, monkeypatch):
    """It is killed twice.  A line may be half written, and the newest checkpoint damaged."""
    monkeypatch.setattr("train.finish", lambda job, flags: None)  # is slow and writes nothing
    clock = count(step=0.4)  # seconds of a step
    monkeypatch.setattr("train.time.perf_counter", lambda: next(clock))
    whole = tmp_path / "whole"
    assert run(text, whole, *FLAGS) == 0
    for n in count(0, stride):
        out = tmp_path / f"{n}"
        if not continued(text, out, n):
            break
        if n % 2 and (out / "metrics.tsv").exists():
            with open(out / "metrics.tsv", "a", encoding="utf-8") as file:
                file.write("²\t\n1")  # no number that int reads; 1 of 10, say
        newest = out / "checkpoint.pt"
        if n % 3 == 0 and newest.exists() and (out / "previous.pt").exists():
            newest.write_bytes(newest.read_bytes()[:-30])
        continued(text, out, n % 13)
        assert not continued(text, out, 999)
        assert not runs_differ(whole, out), n
        shutil.rmtree(out)
    assert n > 40
