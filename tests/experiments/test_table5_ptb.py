"""Penn Treebank: recipes, going on, the choice on valid, one reading of test, the figures.

    pytest tests/experiments/test_table5_ptb.py
"""
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from helpers import randomized

ptb, lesson_5 = import_module("table5_ptb"), import_module("05_full_model")
train = ptb.train
corpora = import_module("support.corpora")
TINY = ptb.SCALES["tiny"]


@pytest.fixture
def setting(words):
    """(config, run, corpus) of a tiny run of 26 steps."""
    corpus = corpora.load("ptb", root=words)
    corpus = replace(corpus, train=corpus.train[:417])
    return (replace(TINY.config, vocab_size=len(corpus.vocab)),
            replace(TINY.recipe, steps=26, dtype="float32"), corpus)


def fit(setting, dropouts, path):
    config, recipe, corpus = setting
    return ptb.fit(config, recipe, dropouts, corpus, path, "cpu")


# ---- what is trained ----------------------------------------------------------------------------

def test_the_published_architecture_within_24_1_million():
    """The exact count; W_kR is there."""
    config = ptb.SCALES["paper"].config
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


@pytest.mark.parametrize("locked", [True, False])
def test_where_what_is_dropped(locked):
    """The rate of each of lesson 5's dropouts, and whether it is locked; in eval mode none."""
    config = replace(TINY.config, vocab_size=11)
    plain, model = (randomized(lesson_5.TransformerXL(config)) for _ in "ab")
    model.load_state_dict(plain.state_dict())
    ptb.regularize(model, ptb.Dropouts(0.1, 0.2, 0.3, 0.4, locked))
    wanted = {"dropout_embedding": (0.1, locked), "dropout_final": (0.4, locked),
              "dropout_R": (0.2, False)}
    for n in (0, 1):
        wanted |= {f"layers.{n}.{name}": (0.2, False)
                   for name in ("dropout_output", "dropout_inner", "dropout_ff")}
        wanted[f"layers.{n}.attention.dropout_attention"] = 0.3, False
    assert wanted == {name: (module.p, isinstance(module, ptb.LockedDropout))
                      for name, module in model.named_modules() if "dropout" in name}
    x = torch.arange(24).view(2, 12) % 11
    assert model.eval()(x)[0].equal(plain.eval()(x)[0])
    assert not model.train()(x)[0].equal(model(x)[0])


def test_the_rate_falls_to_a_third_and_is_halved_where_the_average_begins(setting):
    """By hand: warm-up of 2 of 20 steps, the cosine's end at 0.4 of the run; without an average the
    loop's own.
    """
    config, recipe, corpus = setting
    recipe, model = replace(recipe, lr=0.3, warmup=2, steps=20), lesson_5.TransformerXL(config)
    averaging, rates = ptb.Averaging(model, recipe, ptb.Dropouts(average_from=0.4)), []
    for _ in range(20):
        averaging.set_rate(9.0)
        rates.append(averaging.param_groups[0]["lr"])
    third = 0.1 + 0.1 * (1 + math.cos(math.pi * 7 / 8))
    assert [rates[n] for n in (0, 4, 7, 8, 19)] == pytest.approx([0.15, 0.2, third, 0.05, 0.05])
    averaging = ptb.Averaging(model, recipe, ptb.Dropouts())
    averaging.set_rate(0.15)
    assert averaging.param_groups[0]["lr"] == 0.15


def test_the_average_is_the_mean_of_the_last_weights(setting, tmp_path, monkeypatch):
    """Of those after each step from average_from on; before that it is the model; the curve is its.
    """
    seen, curve, step, evaluate = [], [], ptb.Averaging.step, train.evaluate

    def watched(averaging):
        step(averaging)
        seen.append(averaging.model.u.detach().clone())
        kept = seen[13:] or seen[-1:]
        assert torch.allclose(averaging.mean.module.u, torch.stack(kept).mean(0), atol=1e-6)

    monkeypatch.setattr(ptb.Averaging, "step", watched)
    monkeypatch.setattr(train, "evaluate", lambda model, *rest: (
        curve.append((len(seen), model.u.clone())), evaluate(model, *rest))[1])
    model = fit(setting, ptb.Dropouts(average_from=0.5), tmp_path / "m")
    assert len(seen) == 26 and torch.allclose(model.u, torch.stack(seen[13:]).mean(0), atol=1e-6)
    assert [n for n, _ in curve] == [10, 20, 26] and curve[-1][1].equal(model.u)
    *_, (epochs, valid) = ptb.read_curve(tmp_path / "m", 2)
    tokens = train.validation_tokens(setting[2], setting[1])
    assert epochs == 2 and valid == pytest.approx(
        math.exp(evaluate(model, tokens, setting[1])), abs=1e-3)


@pytest.mark.parametrize("stop", [5, 24], ids=["before the average", "in it"])
def test_going_on_to_the_bit(stop, setting, tmp_path, monkeypatch):
    """Killed before or in the averaging, a run goes on to the same average and curve; then it is
    finished, and nothing is trained.  Other dropouts are refused.
    """
    dropouts, steps, step = replace(TINY.dropouts, average_from=0.6), [], train.train_step

    def counted(*arguments):
        if len(steps) == stop:
            raise RuntimeError("the machine is gone")
        steps.append(1)
        return step(*arguments)

    whole = fit(setting, dropouts, tmp_path / "a")
    monkeypatch.setattr(train, "train_step", counted)
    monkeypatch.setattr(train, "is_validation_due", lambda recipe, state: state.step % 4 == 0
                        and state.validated_at < state.step)
    with pytest.raises(RuntimeError):
        fit(setting, dropouts, tmp_path / "b")
    monkeypatch.setattr(train, "is_validation_due", lambda recipe, state: state.step in (10, 20, 26)
                        and state.validated_at < state.step)
    for _ in "ab":
        steps[:] = [None] * 99
        found = fit(setting, dropouts, tmp_path / "b")
        for (name, a), b in zip(whole.state_dict().items(), found.state_dict().values()):
            assert torch.equal(a, b), name
        assert len(steps) == 99 + (26 - stop // 4 * 4) * (_ == "a")
    assert ptb.read_curve(tmp_path / "a", 2)[-1] == ptb.read_curve(tmp_path / "b", 2)[-1]
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, replace(dropouts, input=0.1), tmp_path / "b")


# ---- evaluation ---------------------------------------------------------------------------------

def model_of(setting, seed=0):
    torch.manual_seed(seed)
    model = lesson_5.TransformerXL(setting[0]).eval()
    for z in model.parameters():
        torch.nn.init.normal_(z, std=0.3)
    return model


def logits_by_hand(model, tokens, M, clamp):
    """Of every prediction, in one pass: with same_length the same as segment by segment."""
    model = model.double()
    model.config = replace(model.config, mem_len=M, clamp_len=clamp, same_length=True)
    with torch.no_grad():
        return model(tokens[None, :-1].long())[0][0]


def test_the_mean_loss(setting):
    """One lane, every token once; or the mean over known words alone, while the others are read all
    the same.
    """
    config, recipe, corpus = setting
    model, tokens = model_of(setting), corpus.valid[:100].long()
    recipe = replace(recipe, eval_segment=7, eval_mem_len=11, eval_clamp_len=9)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens[5:9]] = True
    found, some = (ptb.mean_loss(model, tokens, recipe, words) for words in (None, known))
    assert found == pytest.approx(train.evaluate(model, tokens, recipe), abs=1e-6)
    logits, those = logits_by_hand(model, tokens, 11, 9), known[tokens[1:]]
    assert found == pytest.approx(F.cross_entropy(logits, tokens[1:]).item(), abs=1e-5)
    assert 4 < those.sum() < 90
    assert some == pytest.approx(
        F.cross_entropy(logits[those], tokens[1:][those]).item(), abs=1e-5)


def test_the_choice_is_made_on_valid(setting, monkeypatch):
    """All memories, with and without the clamp of training; the lowest wins."""
    config, recipe, corpus = setting
    seen = []

    def loss(model, tokens, at):
        seen.append((at.eval_mem_len, at.eval_clamp_len))
        return 4.0 - (seen[-1] == (16, 15))

    monkeypatch.setattr(ptb, "mean_loss", loss)
    nats, at = ptb.choose(model_of(setting), corpus.valid, recipe, (8, 16, 32))
    assert seen == [(8, 0), (16, 0), (16, 15), (32, 0), (32, 15)]  # 15 is 8 + 8 - 1
    assert (nats, at.eval_mem_len, at.eval_clamp_len) == (3.0, 16, 15)


def test_the_test_split_is_read_once(setting, tmp_path, monkeypatch):
    """Only if asked; each reading is noted before it begins, and if it is interrupted the note
    stays.  A log about other weights is left as it is.
    """
    config, recipe, corpus = setting
    path, seen, loss = tmp_path / "result.json", [], ptb.mean_loss

    def watched(model, tokens, at):
        seen.append("test" if tokens is corpus.test else "valid")
        if seen[-1] == "test":
            noted = json.loads(path.read_text())
            assert len(noted["readings"]) == seen.count("test") and "test" not in noted
            if seen.count("test") == 1:
                raise KeyboardInterrupt
        return loss(model, tokens, at)

    def result(test, seed=0):
        return ptb.result_of(model_of(setting, seed), corpus, recipe, (8, 16), path, test)

    monkeypatch.setattr(ptb, "mean_loss", watched)
    assert result(False)["readings"] == [] and seen == ["valid"] * 3
    with pytest.raises(KeyboardInterrupt):
        result(True)
    found = result(True)
    assert "test" in found and len(found["readings"]) == 2 and json.loads(path.read_text()) == found
    assert result(True) == found and seen[3:] == ["test"] * 2, "chosen or read twice"
    with pytest.raises(ValueError, match="result.json is about another model"):
        result(True, seed=1)
    assert json.loads(path.read_text()) == found and len(seen) == 5
