"""Adam for all weights, or Muon for the layers' matrices beside it (training/optimizers.py)."""
import copy
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from training.optimizers import OPTIMIZERS, optimizer_of
from training import presets

train = import_module("train")
lesson_5 = import_module("05_full_model")
RUN = replace(presets.RECIPES["tiny"], optimizer="muon", lr=0.02, muon_lr=0.1, dtype="float32",
              clip=1.0)
WORDS = replace(lesson_5.CONFIGS["tiny"], vocab_size=50, cutoffs=(10, 30), div_val=2)


def made(config=lesson_5.CONFIGS["tiny"], recipe=RUN):
    """A model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = lesson_5.TransformerXL(config)
    return model, optimizer_of(model, recipe)


def steps(model, optimizer, n, x=torch.arange(16).view(2, 8)):
    """n training steps."""
    for _ in range(n):
        loss, norm, _ = train.train_step(model, optimizer, x, x, None, RUN)
    return loss, norm


@pytest.mark.parametrize("config", [lesson_5.CONFIGS["tiny"], WORDS], ids=["bytes", "words"])
def test_muon_moves_the_matrices_of_the_layers_and_adam_all_else(config):
    """Each weight is in one part, once; embeddings and projections of bands stay with Adam."""
    model, optimizer = made(config)
    names = {id(weight): name for name, weight in model.named_parameters()}
    adam, muon = ([names[id(weight)] for weight in part.param_groups[0]["params"]]
                  for part in optimizer.parts)
    wanted = [f"layers.{n}.{name}.weight" for n in range(2) for name in (
        *(f"attention.{W}" for W in ("W_q", "W_kE", "W_kR", "W_v", "W_o")), "W_1", "W_2")]
    assert sorted(muon) == sorted(wanted)
    assert sorted(adam + muon) == sorted(names.values())
    (only,) = made(config, replace(RUN, optimizer="adam"))[1].parts
    assert len(only.param_groups[0]["params"]) == len(names)


def test_a_step_of_muon_is_as_long_in_every_direction():
    """All singular values of an update are about rate * sqrt(max(1, rows / columns)): the
    iteration's coefficients leave 0.5 to 1.5 of it.  The gradient's own differ a hundredfold.
    """
    model, optimizer = made()
    optimizer.set_rate(RUN.lr)
    before = copy.deepcopy(model)
    x = torch.randint(205, (8, 64), generator=torch.Generator().manual_seed(1))
    steps(model, optimizer, 1, x)
    for name in ("attention.W_v", "W_1", "W_2"):
        old, new = (dict(z.layers[1].named_parameters())[name + ".weight"]
                    for z in (before, model))
        rows, columns = new.shape
        size = torch.linalg.svdvals(new - old).detach()
        wanted = RUN.muon_lr * math.sqrt(max(1, rows / columns))
        largest_gradient, *_, least_gradient = torch.linalg.svdvals(new.grad).tolist()
        assert (size / wanted).max() < 1.6
        assert (size / wanted > 0.4).float().mean() > 0.7
        assert largest_gradient > 50 * least_gradient


def test_both_rates_rise_and_fall_together():
    """set_rate takes Adam's; Muon's is the same part of its own highest one."""
    optimizer = made()[1]
    optimizer.set_rate(RUN.lr / 4)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx(
        [0.005, 0.025], rel=1e-12)


def adafactor(model, recipe):
    """One that a reader adds: its moments have other shapes than the weights."""
    return [torch.optim.Adafactor(model.parameters(), lr=recipe.lr)]


@pytest.mark.parametrize("name", ["adam", "muon", "adafactor"])
def test_what_was_saved_goes_on_to_the_bit(name, monkeypatch):
    """Two steps, saved, two more: as four."""
    monkeypatch.setitem(OPTIMIZERS, "adafactor", adafactor)
    recipe = SimpleNamespace(**vars(RUN) | {"optimizer": name})
    whole, optimizer = made(recipe=recipe)
    steps(whole, optimizer, 4)
    first, optimizer = made(recipe=recipe)
    steps(first, optimizer, 2)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second, optimizer = made(recipe=recipe)
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    steps(second, optimizer, 2)
    assert all(a.equal(b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("spoil", [
    lambda states: states.pop(),
    lambda states: states[1]["param_groups"][0]["params"].pop()])
def test_the_state_of_something_else_is_refused(spoil):
    """A ValueError that a resumed run turns into its one line."""
    model, optimizer = made()
    steps(model, optimizer, 1)
    states = copy.deepcopy(optimizer.state_dict())
    spoil(states)
    with pytest.raises((ValueError, KeyError)):
        made()[1].load_state_dict(states)


def test_a_step_that_is_not_finite_moves_nothing():
    """Neither weights nor the averages of both parts."""
    model, optimizer = made()
    steps(model, optimizer, 2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    clean = model.embedding.losses
    model.embedding.losses = lambda h, y: clean(h, y) * torch.nan
    _, norm = steps(model, optimizer, 1)
    assert math.isnan(norm)
    assert all(z.equal(model.state_dict()[name]) for name, z in kept[0].items())
    for old, new in zip(kept[1], optimizer.state_dict(), strict=True):
        for n, moments in old["state"].items():
            assert all(z.equal(new["state"][n][name]) for name, z in moments.items())
