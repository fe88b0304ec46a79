"""Penn Treebank: what is dropped and averaged, the choice on valid, one reading of test.

    pytest tests/experiments/test_table5_ptb.py
"""
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import randomized

ptb, lesson_5 = import_module("table5_ptb"), import_module("05_full_model")
train = ptb.train
corpora = import_module("support.corpora")
CONFIG, RECIPE, DROPOUTS, _ = ptb.SCALES["tiny"]


@pytest.fixture
def setting(words):
    """(config, recipe, corpus) of a tiny run of 26 steps."""
    corpus = corpora.load("ptb", root=words)
    return replace(CONFIG, vocab_size=len(corpus.vocab)), replace(RECIPE, dtype="float32"), corpus


def fit(setting, path, dropouts=DROPOUTS):
    config, recipe, corpus = setting
    return ptb.fit(config, recipe, dropouts, corpus, path, "cpu")


# ---- what is trained ----------------------------------------------------------------------------

def test_the_published_architecture_within_24_1_million():
    """The exact count; W_kR is there."""
    config, *_ = ptb.SCALES["paper"]
    assert ptb.presets.count_parameters(config) == 23_351_824
    small = replace(config, n_layer=1, vocab_size=5)
    assert "layers.0.attention.W_kR.weight" in lesson_5.TransformerXL(small).state_dict()


def test_locked_one_mask_for_all_time_steps():
    """Each lane has one, over features; entries are 0 or 1 / (1 - p), p of them 0."""
    drop = ptb.LockedDropout(0.4)
    mask = drop(torch.ones(50, 7, 60))  # (B, T, D)
    assert (mask == mask[:, :1]).all(), "a mask changes with time"
    assert {round(z, 5) for z in mask.unique().tolist()} == {0.0, round(1 / 0.6, 5)}
    share = (mask[:, 0] == 0).double().mean().item()
    assert abs(share - 0.4) < 5 * math.sqrt(0.24 / 3000), share
    assert len({tuple(row.tolist()) for row in mask[:, 0]}) == 50, "lanes share a mask"
    assert (drop(torch.ones(50, 7, 60)) != mask).any(), "calls share a mask"


def test_where_what_is_dropped():
    """The rate of each of lesson 5's dropouts, and whether it is locked; in eval mode none."""
    config = replace(CONFIG, vocab_size=11)
    plain, model = (randomized(lesson_5.TransformerXL(config)) for _ in "ab")
    model.load_state_dict(plain.state_dict())
    ptb.regularize(model, ptb.Dropouts(0.1, 0.2, 0.3, 0.4))
    wanted = {"dropout_embedding": (0.1, True), "dropout_final": (0.4, True),
              "dropout_R": (0.2, False)}
    for n in (0, 1):
        wanted |= {f"layers.{n}.{name}": (0.2, False)
                   for name in ("dropout_output", "dropout_inner", "dropout_ff")}
        wanted[f"layers.{n}.attention.dropout_attention"] = 0.3, False
    assert wanted == {name: (module.p, isinstance(module, ptb.LockedDropout))
                      for name, module in model.named_modules() if "dropout" in name}
    x = torch.arange(24).view(2, 12) % 11
    assert model.eval()(x)[0].equal(plain.eval()(x)[0])


def test_the_average_is_the_mean_of_the_last_weights(setting, tmp_path, monkeypatch):
    """Of those after each of the last 8 of 26 steps, at the rate of the step before them; until
    then it is the model.  What is validated is the average.
    """
    seen, rates, read = [], [], []
    step, set_rate, evaluate = ptb.Averaging.step, ptb.Averaging.set_rate, train.evaluate

    def watched(averaging):
        step(averaging)
        seen.append(averaging.model.u.detach().clone())
        kept = seen[18:] or seen[-1:]
        assert torch.allclose(averaging.mean.module.u, torch.stack(kept).mean(0), atol=1e-6)
        rates.append(averaging.param_groups[0]["lr"])

    monkeypatch.setattr(ptb.Averaging, "step", watched)
    monkeypatch.setattr(train, "evaluate", lambda model, *rest: (
        read.append((len(seen), model.u.clone())), evaluate(model, *rest))[1])
    model = fit(setting, tmp_path / "m")
    assert len(seen) == 26 and torch.allclose(model.u, torch.stack(seen[18:]).mean(0), atol=1e-6)
    assert [n for n, _ in read] == [10, 20, 26] and read[-1][1].equal(model.u)
    assert rates[17:] == [train.learning_rate(setting[1], 17, 17 / 26)] * 9
    assert rates[16] > rates[17]


@pytest.mark.parametrize("stop", [5, 24], ids=["before the average", "in it"])
def test_going_on_to_the_bit(stop, setting, tmp_path, monkeypatch):
    """Killed before or in the averaging, a run goes on to the same average; then it is finished,
    and nothing is trained.  Other dropouts are refused.
    """
    steps, step = [], train.train_step

    def counted(*arguments):
        if len(steps) == stop:
            raise RuntimeError("the machine is gone")
        steps.append(1)
        return step(*arguments)

    whole = fit(setting, tmp_path / "a")
    monkeypatch.setattr(train, "train_step", counted)
    monkeypatch.setattr(train, "is_validation_due", lambda recipe, state: state.step % 4 == 0
                        and state.validated_at < state.step)
    with pytest.raises(RuntimeError):
        fit(setting, tmp_path / "b")
    for left in (26 - stop // 4 * 4, 0):
        steps[:] = [None] * 99
        found = fit(setting, tmp_path / "b")
        for (name, a), b in zip(whole.state_dict().items(), found.state_dict().values()):
            assert torch.equal(a, b), name
        assert len(steps) == 99 + left
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, tmp_path / "b", replace(DROPOUTS, input=0.1))


# ---- evaluation ---------------------------------------------------------------------------------

def model_of(setting):
    torch.manual_seed(0)
    return lesson_5.TransformerXL(setting[0]).eval()


def test_the_test_split_is_read_once(setting, tmp_path, monkeypatch):
    """Only if asked; each reading is noted before it begins, and if it is interrupted the note
    stays.  The memory is chosen on valid: the one with the lowest loss.
    """
    config, recipe, corpus = setting
    path, seen, loss = tmp_path / "result.json", [], ptb.mean_loss

    def watched(model, tokens, recipe, M):
        seen.append("test" if tokens is corpus.test else "valid")
        if seen[-1] == "test":
            noted = json.loads(path.read_text())
            assert len(noted["readings"]) == seen.count("test") and "test" not in noted
            if seen.count("test") == 1:
                raise KeyboardInterrupt
        return loss(model, tokens, recipe, M) - (M == 16)

    def result(test):
        return ptb.result_of(model_of(setting), corpus, recipe, (8, 16, 32), path, test)

    monkeypatch.setattr(ptb, "mean_loss", watched)
    assert result(False)["readings"] == [] and seen == ["valid"] * 3
    with pytest.raises(KeyboardInterrupt):
        result(True)
    found = result(True)
    assert "test" in found and found["M"] == 16 and len(found["readings"]) == 2
    assert json.loads(path.read_text()) == found
    assert result(True) == found and seen[3:] == ["test"] * 2, "chosen or read twice"
