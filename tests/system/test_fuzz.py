"""Broken input is refused in one sentence: some drawn by fuzz.py, and what its judge must see.

    pytest tests/system/test_fuzz.py
    python tests/system/fuzz.py --inputs 5000      the long form
"""
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fuzz


@pytest.mark.parametrize("kind, count", [("command", 5), ("text", 10), ("archive", 10),
                                         ("checkpoint", 6), ("sizes", 15)])
def test_drawn_inputs_work_or_are_refused(kind, count, monkeypatch):
    """No traceback, hang, warning, half-written file, or code out of a pickle."""
    monkeypatch.setattr(fuzz.train.log, "draw", lambda *arguments: None)  # curves take long
    outcomes = [fuzz.judge(kind, number, seed=1) for number in range(count)]
    wrong = [f"--kind {kind} --only {number} --seed 1: {said}"
             for number, (outcome, said, _) in enumerate(outcomes) if outcome == "fault"]
    assert not wrong, "python tests/system/fuzz.py " + "\n".join(wrong)
    found = {outcome for outcome, *_ in outcomes}
    assert found == {"worked", "refused"}, "the inputs are too tame, or too wild, to say anything"


def endless():
    while True:
        pass


def refuse(sentence):
    raise ValueError(sentence)


FAULTS = {
    "an error of torch": lambda: torch.zeros(2).view(3),
    "a ValueError that is not ours": lambda: int("x"),
    "a hang": endless,
    "gigabytes": lambda: torch.empty(10**10),
    "a warning": lambda: warnings.warn("divided by zero"),
    "two lines": lambda: refuse("first\nsecond"),
    "no sentence": lambda: refuse("7"),
    "a change, although refused": lambda: Path("new").touch() or refuse("the disk is full"),
    "a half-written file": Path("checkpoint.part").touch,
    "code out of a pickle": Path("evil").mkdir}


@pytest.mark.skipif(sys.platform != "linux", reason="needs an alarm and a limit of memory")
@pytest.mark.parametrize("what", FAULTS)
def test_the_judge_sees_every_kind_of_fault(what, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.delenv("XL_HANDED_IN", raising=False)  # whose words may be anything
    monkeypatch.chdir(tmp_path)
    assert fuzz.verdict(fuzz.Input(what, FAULTS[what]), tmp_path)[0] == "fault"


def test_the_judge_lets_work_and_honest_refusals_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fuzz.verdict(fuzz.Input("", Path("new").touch), tmp_path) == ("worked", "")
    refusal = fuzz.Input("", lambda: refuse("the text is empty"))
    assert fuzz.verdict(refusal, tmp_path) == ("refused", "the text is empty")
