"""Adam for all weights, or Muon for the layers' matrices beside it (training/optimizers.py)."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from system.kills import runs_differ
from system.small_runs import again, at_call, ctrl_c, no_curve_and_no_flush, run, text
from training import presets
from training.optimizers import OPTIMIZERS, optimizer_of

lesson_5 = import_module("05_full_model")
RUN = replace(presets.RECIPES["tiny"], optimizer="muon", lr=0.02, muon_lr=0.1)
TINY = lesson_5.CONFIGS["tiny"]


@pytest.mark.parametrize("config", [TINY, replace(
    TINY, vocab_size=50, cutoffs=(10, 30), div_val=2)], ids=["bytes", "words"])
def test_muon_moves_the_matrices_of_the_layers_and_adam_all_else(config):
    """Each weight is in one part, once; embeddings and projections of bands stay with Adam."""
    model = lesson_5.TransformerXL(config)
    names = {id(weight): name for name, weight in model.named_parameters()}

    def names_of(part):
        return [names[id(weight)] for group in part.param_groups for weight in group["params"]]

    adam, muon = optimizer_of(model, RUN).parts
    assert sorted(names_of(muon)) == sorted(
        f"layers.{n}.{name}.weight" for n in range(2) for name in (
            *(f"attention.{W}" for W in ("W_q", "W_kE", "W_kR", "W_v", "W_o")), "W_1", "W_2"))
    assert sorted(names_of(adam) + names_of(muon)) == sorted(names.values())
    (only,) = optimizer_of(model, replace(RUN, optimizer="adam")).parts
    assert sorted(names_of(only)) == sorted(names.values())
    assert [type(part) for part in (adam, muon, only)] == [
        torch.optim.Adam, torch.optim.Muon, torch.optim.Adam]


def test_both_rates_rise_and_fall_together():
    """set_rate takes Adam's; Muon's is the same part of its own highest one."""
    optimizer = optimizer_of(lesson_5.TransformerXL(TINY), RUN)
    optimizer.set_rate(RUN.lr / 4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [0.005, 0.025], rel=1e-12)


def test_a_run_with_an_optimizer_of_ones_own_is_resumed_to_the_bit(text, tmp_path, monkeypatch):
    """Whatever its state consists of: here torch's Adafactor."""
    monkeypatch.setitem(OPTIMIZERS, "adam", lambda model, recipe: [
        torch.optim.Adafactor(model.parameters(), lr=recipe.lr)])
    assert run(text, tmp_path / "whole", "--steps", "9") == 0
    with at_call(6, ctrl_c):
        assert run(text, tmp_path / "broken", "--steps", "9") == 130
    assert again(tmp_path / "broken", "--resume") == 0
    assert not runs_differ(tmp_path / "whole", tmp_path / "broken")
