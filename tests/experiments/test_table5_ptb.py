"""Penn Treebank: what is dropped and averaged, the choice on valid, one reading of test."""
import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch

ptb, lesson_5 = import_module("table5_ptb"), import_module("05_full_model")
train, corpora = ptb.train, import_module("support.corpora")
CONFIG, RECIPE, DROPOUTS, _ = ptb.SCALES["tiny"]


@pytest.fixture
def setting(words):
    """(config, recipe, corpus) of a tiny run of 26 steps."""
    corpus = corpora.load("ptb", root=words)
    return replace(CONFIG, vocab_size=len(corpus.vocab)), replace(RECIPE, dtype="float32"), corpus


def fit(setting, path, dropouts=DROPOUTS):
    config, recipe, corpus = setting
    return ptb.fit(config, recipe, dropouts, corpus, path, "cpu")


def test_locked_one_mask_for_all_time_steps():
    """Each lane has one, over features; entries are 0 or 1 / (1 - p)."""
    mask = ptb.LockedDropout(0.4)(torch.ones(50, 7, 60))  # (B, T, D)
    assert (mask == mask[:, :1]).all(), "a mask changes with time"
    assert {round(z, 5) for z in mask.unique().tolist()} == {0.0, round(1 / 0.6, 5)}
    assert len({tuple(row.tolist()) for row in mask[:, 0]}) == 50, "lanes share a mask"


def test_where_what_is_dropped():
    """The rate of each of lesson 5's dropouts, and whether it is locked; the paper's size."""
    assert ptb.presets.count_parameters(ptb.SCALES["paper"][0]) == 23_351_824  # of 24.1 million
    model = lesson_5.TransformerXL(replace(CONFIG, vocab_size=11))
    ptb.regularize(model, ptb.Dropouts(0.1, 0.2, 0.3, 0.4))
    found = {name.split(".")[-1]: (module.p, isinstance(module, ptb.LockedDropout))
             for name, module in model.named_modules() if "dropout" in name}
    assert found == {
        "dropout_embedding": (0.1, True), "dropout_R": (0.2, False), "dropout_inner": (0.2, False),
        "dropout_output": (0.2, False), "dropout_ff": (0.2, False),
        "dropout_attention": (0.3, False), "dropout_final": (0.4, True)}


def test_the_average_is_the_mean_of_the_last_weights(setting, tmp_path, monkeypatch):
    """It is of the weights after each of the last 8 of 26 steps, at the learning rate of the step
    before them, and the model until then.  Validation uses the average."""
    seen, rates, read = [], [], []
    step, evaluate = ptb.Averaging.step, train.evaluate

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
    assert rates[16] > rates[17] and not model.training


@pytest.mark.parametrize("stop, left, optimizer", [(5, 23, "adam"), (25, 3, "muon")],
                         ids=["before the average", "in it"])
def test_going_on_to_the_bit(stop, left, optimizer, setting, tmp_path, monkeypatch):
    """A killed run goes on to the same average, once.  Other dropouts are refused."""
    steps, step = [], train.train_step
    setting = setting[0], replace(setting[1], optimizer=optimizer), setting[2]

    def counted(*arguments):
        if len(steps) == stop:
            raise RuntimeError("the machine is gone")
        steps.append(1)
        return step(*arguments)

    whole = fit(setting, tmp_path / "a").state_dict()
    monkeypatch.setattr(train, "train_step", counted)
    monkeypatch.setattr(train, "fraction_done", lambda recipe, state: (
        setattr(state, "seconds", 25 * state.step), state.step / recipe.steps)[1])
    with pytest.raises(RuntimeError):
        fit(setting, tmp_path / "b")  # a step takes 25 seconds, so every third one is saved
    for wanted in (left, 0):
        steps[:] = [None] * 99
        found = fit(setting, tmp_path / "b").state_dict()
        assert len(steps) == 99 + wanted and all(whole[name].equal(found[name]) for name in whole)
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, tmp_path / "b", replace(DROPOUTS, input=0.1))


def test_the_test_split_is_read_once(setting, tmp_path, monkeypatch):
    """It is read only with --test.  Memory and clamp are those with the lowest loss on valid.  A
    clamp is tried only beyond the 16 distances of training."""
    config, recipe, corpus = setting
    path, seen, model = tmp_path / "result.json", [], lesson_5.TransformerXL(config).eval()

    def evaluate(model, tokens, recipe):
        M, clamp = recipe.eval_mem_len, recipe.eval_clamp_len
        seen.append(("test" if tokens is corpus.test else "valid", M, clamp))
        return abs(M - 16) + (clamp == 0)

    def result(test):
        return ptb.result_of(model, corpus, recipe, (8, 16, 32), path, test)

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert "test" not in result(False)
    assert seen == [("valid", *z) for z in [(8, 0), (16, 0), (16, 15), (32, 0), (32, 15)]]
    found = result(True)
    assert "test" in found and (found["M"], found["clamp"]) == (16, 15)
    assert found["valid"]["16, 15"] == 1.0
    assert result(True) == found == json.loads(path.read_text())
    assert seen[5:] == [("test", 16, 15)], "chosen or read twice"
