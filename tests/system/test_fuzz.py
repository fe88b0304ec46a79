"""Broken input is refused in one sentence: some drawn by fuzz.py, and what its judge must see."""
import warnings
from pathlib import Path

import pytest
import torch

import fuzz


def test_drawn_inputs_work_or_are_refused(our_own, monkeypatch):
    """No traceback, hang, warning, half-written file, or code out of a pickle."""
    monkeypatch.setattr(fuzz.train.log, "draw", lambda *arguments: None)  # curves take long
    found = [fuzz.judge(number, seed=1) for number in range(48)]
    assert not [(n, *said) for n, (outcome, *said) in enumerate(found) if outcome == "fault"]
    for kind in range(3):  # not too tame and not too wild
        assert {outcome for outcome, *_ in found[kind::3]} == {"worked", "refused"}


def refuse(sentence):
    raise ValueError(sentence)


@pytest.mark.parametrize("wanted, act", [
    ("fault", lambda: torch.zeros(2).view(3)), ("fault", lambda: int("x")),
    ("fault", lambda: warnings.warn("divided by zero")), ("fault", lambda: refuse("a\nb c")),
    ("fault", lambda: refuse("7")), ("fault", lambda: Path("new").touch() or refuse("a disk")),
    ("fault", Path("checkpoint.part").touch), ("fault", Path("evil").mkdir),
    ("worked", Path("new").touch), ("refused", lambda: refuse("the text is empty"))])
def test_the_judge_sees_every_kind_of_fault(wanted, act, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fuzz.verdict(act)[0] == wanted
