"""What `train.py --sample` draws.

    pytest tests/system/test_sampling.py
"""
import math
from importlib import import_module

import pytest
import torch

from training import fast, presets
from training.flags import Flags

train = import_module("train")
READING = presets.Recipe(steps=1, dtype="float32", eval_segment=5, eval_mem_len=7)


def a_model(form="plain", V=11, broken=False):
    """A small model, or a Reader of it; if it is broken its logits are not finite."""
    torch.manual_seed(0)
    model = train.lesson_5.TransformerXL(train.lesson_5.Config(
        V, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6, dropout=0.5))
    if broken:
        model.embedding.bias.data.fill_(math.nan)
    return model if form == "plain" else fast.Reader(model)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("form", ["plain", "Reader"])
def test_a_prompt_is_continued_in_eval_mode_and_the_mode_put_back(form, training, monkeypatch):
    """A prompt (P,) gives (n_tokens,); lesson 5's generate gets it as one lane, (1, P)."""
    model, generate, seen = a_model(form).train(training), train.lesson_5.generate, []

    def watched(model, prompt, **options):
        seen.append((model.training, model.config.mem_len, tuple(prompt.shape)))
        return generate(model, prompt, **options)

    monkeypatch.setattr(train.lesson_5, "generate", watched)
    new = train.sample(model, torch.tensor([1, 2, 3]), READING, Flags(n_tokens=5))
    assert seen == [(False, 7, (1, 3))]
    assert new.shape == (5,) and new.dtype == torch.int64
    assert model.training is training and model.config.mem_len == 6


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("form", ["plain", "Reader"])
@pytest.mark.parametrize("prompt, broken, words", [
    ([1, 99], False, "99"), ([-1], False, "-1"), ([1, 2], True, "not finite")],
    ids=["above V", "below 0", "broken weights"])
def test_the_mode_is_put_back_after_an_error(
        prompt, broken, words, form, training, needs_shipped_solutions):
    """So are the lengths."""
    model = a_model(form, broken=broken).train(training)
    with pytest.raises(ValueError, match=words):
        train.sample(model, torch.tensor(prompt), READING, Flags(n_tokens=5))
    assert model.training is training and model.config.mem_len == 6


@pytest.mark.parametrize("V", [3, 200])
def test_unless_top_k_is_given_it_is_40_or_the_vocabulary(V, monkeypatch):
    """A vocabulary of fewer than 40 symbols is no mistake."""
    asked, draw = [], train.lesson_5.sample_top_k
    monkeypatch.setattr(train.lesson_5, "sample_top_k", lambda logits, top_k, *more: (
        asked.append(top_k), draw(logits, top_k, *more))[1])
    train.sample(a_model(V=V), torch.tensor([1, 2]), READING, Flags(n_tokens=2))
    assert asked == [min(40, V)] * 2


def test_the_same_seed_draws_the_same_text():
    """That of the run, unless another one is given."""
    first, again, other = (train.sample(
        a_model(), torch.tensor([1, 2]), READING, Flags(n_tokens=20, typed=asked)).tolist()
        for asked in ({}, {"seed": 0}, {"seed": 1}))
    assert first == again != other
