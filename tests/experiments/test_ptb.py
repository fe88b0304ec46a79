"""Penn Treebank: what is dropped and averaged, and how the evaluation is chosen."""
import signal
from importlib import import_module

import pytest
import torch

ptb, lesson_5 = import_module("ptb"), import_module("05_full_model")
corpora, presets, train = ptb.corpora, ptb.presets, ptb.train
CONFIG = lesson_5.Config(20, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8,
                         dropout=0.1)
RECIPE = presets.Recipe("ptb", batch=4, segment=8, steps=26, lr=3e-3, warmup=5, eval_segment=64,
                        eval_mem_len=16, eval_every=10, eval_tokens=200, dtype="float32")
TEXTS = (torch.arange(4000) * torch.arange(4000) % 19).split([3000, 500, 500])
CORPUS = corpora.Corpus(*TEXTS, [f"word{i}" for i in range(20)], "ptb")


def fit(path):
    return ptb.fit(path, CONFIG, RECIPE, (0.3, 0.2), CORPUS, "cpu").model


def test_locked_dropout_has_one_mask_for_all_time_steps():
    """Each lane has one, over features; entries are 0 or 1 / (1 - p)."""
    mask = ptb.LockedDropout(0.4)(torch.ones(50, 7, 60))  # (B, T, D)
    assert (mask == mask[:, :1]).all(), "a mask changes with time"
    assert {round(z, 5) for z in mask.unique().tolist()} == {0.0, round(1 / 0.6, 5)}
    assert len({tuple(row.tolist()) for row in mask[:, 0]}) == 50, "lanes share a mask"


def test_the_average_is_the_mean_of_the_last_weights(tmp_path, monkeypatch):
    """It is of the weights after each of the last 8 of 26 steps, at the learning rate of the step
    before them, and the model until then.  Validation uses the average; dropout is locked.  A run
    that is stopped in step 25 and resumed has the same average."""
    seen, rates, read = [], [], []
    step, evaluate = train.train_step, train.evaluate

    def watched(model, optimizer, *given):
        locked = model.dropout_embedding, model.dropout_final
        assert [each.p for each in locked if type(each) is ptb.LockedDropout] == [0.3, 0.2]
        if len(seen) == 24:
            signal.raise_signal(signal.SIGINT)
        out = step(model, optimizer, *given)
        seen.append(model.u.detach().clone())
        rates.append(optimizer.param_groups[0]["lr"])
        wanted = torch.stack(seen[18:] or seen[-1:]).mean(0)
        assert torch.allclose(model.mean.u, wanted, atol=1e-6)
        return out

    wanted = fit(tmp_path / "whole").state_dict()
    monkeypatch.setattr(train, "train_step", watched)
    monkeypatch.setattr(train, "evaluate", lambda model, *rest: (
        read.append((len(seen), model.u.clone())), evaluate(model, *rest))[1])
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped")
    model = fit(tmp_path / "stopped")
    assert len(seen) == 26 and not model.training
    assert all(wanted[name].equal(z) for name, z in model.state_dict().items())
    assert [n for n, _ in read] == [10, 20, 26] and read[-1][1].equal(model.u)
    assert rates[17:] == [train.learning_rate(RECIPE, 17, 17 / 26)] * 9 and rates[16] > rates[17]


def test_lengths_are_chosen_on_the_validation_split(monkeypatch):
    """A clamp is tried only beyond the 16 distances of training.  The paper has 24.1M weights."""
    assert presets.count_parameters(ptb.SCALES["paper"][0]) == 23_351_824
    seen, reader = [], lesson_5.TransformerXL(CONFIG).eval()

    def evaluate(model, tokens, recipe):
        assert tokens is CORPUS.valid
        seen.append((recipe.eval_mem_len, recipe.eval_clamp_len))
        return abs(seen[-1][0] - 16) + (seen[-1][1] == 0)

    monkeypatch.setattr(train, "evaluate", evaluate)
    found = ptb.choose_lengths(reader, CORPUS, RECIPE, (8, 16, 32))
    assert seen == [(8, 0), (16, 0), (16, 15), (32, 0), (32, 15)]
    assert (found.eval_mem_len, found.eval_clamp_len) == (16, 15)


def test_a_small_run_prints_the_test_score(tmp_path, monkeypatch, capsys):
    """It reads the lengths that were chosen; a second one trains nothing."""
    monkeypatch.setitem(ptb.SCALES, "small", (CONFIG, RECIPE, (0.3, 0.2), (8, 16)))
    monkeypatch.setattr(ptb.lesson_1, "RUNS", tmp_path)
    monkeypatch.setattr(corpora, "load", lambda name, root: CORPUS)
    lines = []
    for _ in range(2):
        assert ptb.main(["--device", "cpu", "--seed", "3"]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
        monkeypatch.setattr(train, "train_step", None)
    assert lines[0] == lines[1] and lines[0].startswith("test ")
