"""Test the lines and plots of a run against its steps."""
import math
import os
import re
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import train
from system.conftest import run
from training import checkpoint, log, presets
from training.job import State


def test_the_log_line_by_a_clock(monkeypatch, capsys):
    """Lines are at least five seconds apart.  After 100 seconds a quarter is done: 300 are left."""
    job = Mock(state=State(step=30, tokens=9000, seconds=100.0, skipped=2), printed_at=0.0,
               recipe=presets.Recipe(steps=120, log_every=7), untimed=0)
    job.corpus.unit = "bpc"
    for now in (4.9, 5.1, 10.0, 11.0):  # the first and the third are too early
        monkeypatch.setattr(log.time, "monotonic", lambda now=now: now)
        log.record_training(job, 0.1, 2.0, 0.5, 0.25)
        job.untimed, job.state.seconds = now == 10, 100.0 * (now < 10)
    assert capsys.readouterr().out == (
        "step 30 | 25% | loss of this step 2.885 bpc | 90 tok/s | 0:01:40, 0:05:00 left | 2 steps "
        "skipped\nstep 30 | 25% | loss of this step 2.885 bpc | compiling the layers | 2 steps "
        "skipped\n")
    assert log.in_unit(800.0, "ppl") == math.inf  # exp would overflow


@pytest.mark.parametrize("length, took, steps", [
    ({"steps": 100, "eval_every": 50}, "0:04:25", 100), ({"steps": 100}, "0:05:45", 100),
    ({"steps": 100, "short_steps": 40}, "0:07:05", 100), ({"minutes": 10 / 3}, "0:05:45", 100),
    ({"steps": 100, "short_steps": 5}, "0:06:30", 100),
    ({"steps": 100, "short_steps": 900}, "0:05:45", 100),
    ({"minutes": 10 / 3, "short_steps": 40}, "0:05:45", 76),
    ({"minutes": 10 / 3, "short_steps": 900}, "0:05:45", 100)], ids=str)
def test_after_ten_steps_the_whole_time_is_known(length, took, steps, capsys):
    """A step takes two seconds, later 10/3; a token of the test (2,250) or a validation, 0.02."""
    job = Mock(state=State(step=10, tokens=1000, seconds=20.0), printed_at=math.inf,
               recipe=presets.Recipe(**{"eval_every": 0} | length, eval_tokens=500))
    job.corpus.test, job.corpus.unit = range(2250), "bpc"
    log.record_training(job, 0.1, 2.0, 0.5, 0.1)
    assert capsys.readouterr().out == (
        f"about {steps} steps; all in all, with validation and test, about {took}\n")


draw = log.draw  # no_curve_and_no_flush replaces log.draw for the runs below


def test_the_curve_shows_both_losses_over_the_tokens(tmp_path, monkeypatch):
    """The folder may have any name: $ starts a formula in a title, and fonts lack many signs."""
    path = tmp_path / os.fsdecode("$\\frac$ 記憶".encode()) / "metrics.tsv"
    drawn = []
    path.parent.mkdir()
    path.write_text("# python train.py\nstep\n10\t1000000\t5\t0.1\t1\t3.5\t4\t0\t\n"
                    "20\t2000000\t9\t\t\t\t\t\t3.25\n30\t3000000\t9\t0.1\t1\t2.5\t4\t0\t\n")
    save = log.Figure.savefig
    monkeypatch.setattr(log.Figure, "savefig", lambda figure, *given, **more: (
        drawn.extend(figure.axes), save(figure, *given, **more)))
    for unit in ("bpc", "ppl"):
        draw(path, SimpleNamespace(unit=unit, name="notes (a text)"))
    for axes in drawn:
        training, validation = axes.lines
        assert [*map(list, training.get_data())] == [[1, 3], [3.5, 2.5]]
        assert [*map(list, validation.get_data())] == [[2], [3.25]]
    assert [axes.get_yscale() for axes in drawn] == ["linear", "log"]
    assert path.with_name("curve.png").stat().st_size > 1000


@pytest.mark.parametrize("flags", [[], ["--plain"]], ids=["fast", "plain"])
def test_a_checkpoint_is_used_in_the_form_that_was_trained(flags, text, tmp_path, monkeypatch,
                                                           capsys):
    """A sample continues the start of the test split; no name controls the terminal or a file."""
    text = Path(copy(text, tmp_path / "a\n9\x1b.txt"))
    monkeypatch.setattr("sys.argv", ["train.py", "--text", str(text)])
    make = Mock(wraps=train.reader_of)
    out = str(tmp_path / "my run")
    monkeypatch.setattr(train, "reader_of", make)
    assert run(text, out, "--steps", "3", *flags) == 0
    said = capsys.readouterr().out
    metrics = Path(out, "metrics.tsv").read_text("utf-8")
    assert "on a 9 .txt\n" in said and not re.search("\n9|\x1b", metrics)
    assert f"\n{text.read_text()[-12:]}>>>" in said and f"--sample TEXT --out '{out}'\n" in said
    assert f" --init '{out}' --minutes 30 --out '{out}-30' " in said
    assert train.main(["--eval-only", "--out", out, "--device", "cpu"]) == 0
    assert [call.args[1] for call in make.call_args_list] == [bool(flags)] * 3


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_them(text, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(train, "finish", lambda job, flags: None)  # needs a checkpoint
    monkeypatch.setattr(os, "fsync", lambda file: order.append("lines"))
    monkeypatch.setattr(checkpoint, "save", lambda path, *given: order.append(path.name))
    assert run(text, tmp_path / "run", "--steps", "3", "--eval-every", "9") == 0
    assert order == [*3 * ["lines"], "checkpoint.pt", "best.pt", "lines", "checkpoint.pt"]
