"""Checkpoints with other things inside than a run has saved: refused whole, in one line.

    pytest tests/system/test_checkpoint_contents.py
"""
import math
import re

import pytest
import torch

import fuzz

NAN, WIDE = torch.tensor(math.nan), torch.zeros(2, 3)
DAMAGE = {
    "no run": lambda c: c.pop("run"), "vocab is too short": lambda c: c["vocab"].pop(),
    "run is a tensor": lambda c: c.update(run=WIDE),
    "vocab holds no byte": lambda c: c["vocab"].__setitem__(0, 999),
    "untie_r is a tensor": lambda c: c["config"].update(untie_r=WIDE),
    "too many layers": lambda c: c["config"].update(n_layer=10**9),
    "step is text": lambda c: c["state"].update(step="x"),
    "a weight is not finite": lambda c: c["model"].update(u=c["model"]["u"] * NAN),
    "a weight is sparse": lambda c: c["model"].update(u=c["model"]["u"].to_sparse()),
    "a weight has another name": lambda c: c["model"].update(w=c["model"].pop("u")),
    "a weight is code": lambda c: c["model"].update(u=fuzz.Evil()),
}
FOR_RESUME = {
    "step is far below 0": lambda c: c["state"].update(step=-10**9),
    "column is past the end": lambda c: c["state"].update(column=10**9),
    "memory of one layer": lambda c: c["state"]["memory"].pop(),
    "memory of other lanes": lambda c: c["state"].update(
        memory=[z[:3] for z in c["state"]["memory"]]),
    "memory of two dimensions": lambda c: c["state"]["memory"].__setitem__(0, WIDE),
    "no random state": lambda c: c.pop("random"),
    "no optimizer": lambda c: c.pop("optimizer"),
    "no second moment": lambda c: c["optimizer"][0]["state"][0].pop("exp_avg_sq"),
    "moments of another shape": lambda c: c["optimizer"][0]["state"][0].update(exp_avg=WIDE),
    "moments are a tensor": lambda c: c["optimizer"][0]["state"].update({0: WIDE}),
    "six steps": lambda c: c["optimizer"][0]["state"][0].update(step=WIDE),
    "betas are text": lambda c: c["optimizer"][0]["param_groups"][0].update(betas="x"),
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
