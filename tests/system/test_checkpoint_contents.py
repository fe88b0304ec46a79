"""Checkpoints with other things inside than a run has saved: refused whole, in one line.

    pytest tests/system/test_checkpoint_contents.py
"""
import re

import pytest
import torch

import fuzz

WIDE = torch.zeros(2, 3)
DAMAGE = {
    "no run": lambda c: c.pop("run"),
    "run is a tensor": lambda c: c.update(run=WIDE),
    "a setting that no run can have": lambda c: c["run"].update(batch=0),
    "too many layers": lambda c: c["config"].update(n_layer=10**9),
    "a field too many": lambda c: c["state"].update(more=1),
    "weights of another model": lambda c: c["config"].update(d_inner=8),
    "a weight has another name": lambda c: c["model"].update(w=c["model"].pop("u")),
    "a weight is code": lambda c: c["model"].update(u=fuzz.Evil()),
}
FOR_RESUME = {
    "memory is a number": lambda c: c["state"].update(memory=3),
    "no random state": lambda c: c.pop("random"),
    "no optimizer": lambda c: c.pop("optimizer"),
    "no place in the text": lambda c: c.pop("batches"),
    "moments of another shape": lambda c: c["optimizer"][0]["state"][0].update(exp_avg=WIDE),
}


@pytest.mark.parametrize("what", [*DAMAGE, *FOR_RESUME])
def test_a_checkpoint_with_other_things_inside_is_refused_whole(what, tmp_path, monkeypatch):
    """By --sample, or by --resume if it alone reads that; nothing in the folder has changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(fuzz.NOTES)
    fuzz.put_run(tmp_path, lambda name, content: (
        None if name == "best.pt" and what in FOR_RESUME else (DAMAGE | FOR_RESUME)[what](content)))
    flags = ["--sample", "abba"] if what in DAMAGE else ["--resume"]
    argv = ["--device", "cpu", "--out", "run", "--n-tokens", "3", *flags]
    said = fuzz.verdict(fuzz.Input("", lambda: fuzz.command_line(argv)), tmp_path)
    assert said[0] == "refused" and re.search(r"\.pt|parameters", said[1]), said
