"""Penn Treebank: recipes, going on, the choice on valid, one reading of test, the figures.

    pytest tests/experiments/test_table5_ptb.py
"""
import json
import math
import time
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from helpers import randomized

ptb, lesson_5 = import_module("table5_ptb"), import_module("05_full_model")
common, train, checkpoint = ptb.common, ptb.train, ptb.checkpoint
corpora = import_module("support.corpora")
TINY = ptb.SCALES["tiny"]


@pytest.fixture
def setting(words, monkeypatch):
    """(config, run, corpus) of a tiny run of some 26 steps."""
    corpus = corpora.load("ptb", root=words)
    corpus = replace(corpus, train=corpus.train[:401])
    return (replace(TINY.config, vocab_size=len(corpus.vocab)),
            replace(TINY.run, tokens=800, dtype="float32"), corpus)


def fit(setting, recipe, path):
    config, run, corpus = setting
    return ptb.fit(config, run, recipe, corpus, path, "cpu")


def stop_at(monkeypatch, n):
    """Ctrl-C in step n -> the steps that were begun."""
    steps, step = [], train.train_step

    def watched(*given):
        if len(steps) == n:
            raise KeyboardInterrupt
        steps.append(1)
        return step(*given)

    monkeypatch.setattr(train, "train_step", watched)
    return steps


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
    ptb.regularise(model, ptb.Recipe(0.1, 0.2, 0.3, 0.4, locked))
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
    """By hand: warm-up of 5 steps, the cosine's end at 0.4 of the run; without averaging lr's own.
    """
    config, run, corpus = setting
    run, model = replace(run, lr=0.3, warmup=5), lesson_5.TransformerXL(config)
    training = ptb.Averaging(model, run, ptb.Recipe(average_from=0.4), corpus)
    found = [training.rate(step, done, 8) for step, done in (
        (0, 0.0), (9, 0.0), (9, 0.2), (9, 0.39999999), (9, 0.4), (9, 1.0))]
    assert found == pytest.approx([0.06, 0.3, 0.2, 0.1, 0.05, 0.05], abs=1e-6)
    training = ptb.Averaging(model, run, ptb.Recipe(), corpus)
    assert training.rate(9, 0.5, 8) == pytest.approx(0.15)


def test_the_average_is_the_mean_of_the_last_weights(setting, tmp_path, monkeypatch):
    """Of those after each step from average_from on; the finished model is it."""
    seen, update = [], ptb.AveragedModel.update_parameters

    def watched(mean, model):
        seen.append(model.u.detach().clone())
        update(mean, model)

    monkeypatch.setattr(ptb.AveragedModel, "update_parameters", watched)
    model, curve = fit(setting, ptb.Recipe(average_from=0.5), tmp_path / "m.pt")
    steps = 26
    assert len(seen) in (steps // 2, steps // 2 + 1)
    assert torch.allclose(model.u, torch.stack(seen).mean(0), atol=1e-6)
    tokens, last, averaged = curve[-1]
    valid = train.validation_tokens(setting[2], setting[1])
    assert averaged == pytest.approx(train.evaluate(model, valid, setting[1]), abs=1e-5)


# ---- going on -----------------------------------------------------------------------------------

def test_going_on_to_the_bit(setting, tmp_path, monkeypatch):
    """Stopped within the averaging, a run goes on to the same weights and curve; then it is
    finished, and nothing is trained.  Another recipe is refused.
    """
    recipe = replace(TINY.recipe, average_from=0.3)
    whole, curve = fit(setting, recipe, tmp_path / "a.pt")
    ticks = iter(range(0, 10**9, 100))  # a clock by which saving takes 100 s: every 21 steps
    monkeypatch.setattr(common, "EVERY", 0)
    with monkeypatch.context() as patch:
        stop_at(patch, 24)
        patch.setattr(common, "time", SimpleNamespace(
            monotonic=lambda: next(ticks), perf_counter=time.perf_counter))
        with pytest.raises(KeyboardInterrupt):
            fit(setting, recipe, tmp_path / "b.pt")
    saved = checkpoint.read(tmp_path / "b.pt")
    at = saved["state"]["step"]
    assert 0 < at < 24 and saved["mean"]["n_averaged"] and "optimizer" in saved
    torch.manual_seed(99)  # what happened in between must not matter
    steps = stop_at(monkeypatch, None)
    for left in (26 - at, 0):
        steps.clear()
        found, found_curve = fit(setting, recipe, tmp_path / "b.pt")
        assert len(steps) == left and not found.training
        for (name, a), b in zip(whole.state_dict().items(), found.state_dict().values()):
            assert torch.equal(a, b), name
        assert curve == found_curve
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, replace(recipe, input=0.1), tmp_path / "b.pt")


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


def test_losses_by_temperature(setting):
    """One lane, every token once, the logits divided; or the mean over known words alone, while the
    others are read all the same.
    """
    config, run, corpus = setting
    model, tokens = model_of(setting), corpus.valid[:100].long()
    run = replace(run, eval_segment=7, eval_mem_len=11, eval_clamp_len=9)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens[5:9]] = True
    found = ptb.losses_by_temperature(model, tokens, run, (1.0, 2.0, 0.5))
    (some,) = ptb.losses_by_temperature(model, tokens, run, (1.0,), known)
    assert found[0] == pytest.approx(train.evaluate(model, tokens, run), abs=1e-5)
    logits = logits_by_hand(model, tokens, 11, 9)
    for temperature, loss in zip((1.0, 2.0, 0.5), found):
        assert loss == pytest.approx(
            F.cross_entropy(logits / temperature, tokens[1:]).item(), abs=1e-5)
    those = known[tokens[1:]]
    assert 4 < those.sum() < 90
    assert some == pytest.approx(
        F.cross_entropy(logits[those], tokens[1:][those]).item(), abs=1e-5)


def test_the_choice_is_made_on_valid(setting, monkeypatch):
    """All memories, with and without the clamp of training, all temperatures; the lowest wins."""
    config, run, corpus = setting
    seen = []

    def losses(model, tokens, at):
        seen.append((at.eval_mem_len, at.eval_clamp_len))
        return [5.0, 5.0, 4.0 - (seen[-1] == (16, 15)), 4.5, 5.0, 5.0]

    monkeypatch.setattr(ptb, "losses_by_temperature", losses)
    nats, at, temperature = ptb.choose(model_of(setting), corpus.valid, run, (8, 16, 32))
    assert seen == [(8, 0), (16, 0), (16, 15), (32, 0), (32, 15)]  # 15 is 8 + 8 - 1
    assert (nats, at.eval_mem_len, at.eval_clamp_len) == (3.0, 16, 15)
    assert temperature == ptb.TEMPERATURES[2]


def test_the_test_split_is_read_once(setting, tmp_path, monkeypatch):
    """Only if asked; each reading is noted before it begins, and if it is interrupted the note
    stays.  A log that is damaged, or about other weights, is left as it is.
    """
    config, run, corpus = setting
    path, seen, losses = tmp_path / "result.json", [], ptb.losses_by_temperature

    def watched(model, tokens, at, temperatures=ptb.TEMPERATURES):
        seen.append("test" if tokens is corpus.test else "valid")
        if seen[-1] == "test":
            noted = json.loads(path.read_text())
            assert len(noted["readings"]) == seen.count("test") and "test" not in noted
            if seen.count("test") == 1:
                raise KeyboardInterrupt
        return losses(model, tokens, at, temperatures)

    def result(test, seed=0):
        return ptb.result_of(model_of(setting, seed), corpus, run, (8, 16), path, test)

    monkeypatch.setattr(ptb, "losses_by_temperature", watched)
    assert result(False)["readings"] == [] and seen == ["valid"] * 3
    with pytest.raises(KeyboardInterrupt):
        result(True)
    found = result(True)
    assert "test" in found and len(found["readings"]) == 2 and json.loads(path.read_text()) == found
    assert result(True) == found and seen[3:] == ["test"] * 2, "chosen or read twice"
    for text, seed in ((path.read_text(), 1), ("[1, 2]", 0), ("{}", 0)):
        path.write_text(text)
        with pytest.raises(ValueError, match="result.json is damaged, or about another model"):
            result(True, seed)
        assert path.read_text() == text and len(seen) == 5
