"""Adam for all weights, or Muon for the layers' matrices beside it (training/optimizers.py)."""
from dataclasses import replace
from importlib import import_module

import torch

from training import presets
from training.optimizers import optimizer_of

lesson_5 = import_module("05_full_model")
RUN = replace(presets.RECIPES["tiny"], optimizer="muon", lr=0.02, muon_lr=0.1)
BANDS = replace(lesson_5.CONFIGS["tiny"], vocab_size=50, cutoffs=(10, 30), div_val=2)


def test_muon_moves_the_matrices_of_the_layers_and_adam_all_else():
    """Each weight is in one part, once; embeddings and projections of bands stay with Adam."""
    model = lesson_5.TransformerXL(BANDS)
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
