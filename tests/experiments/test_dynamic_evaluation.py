"""Dynamic evaluation: nothing is learned before it is predicted, and the steps are as written.

    pytest tests/experiments/test_dynamic_evaluation.py
"""
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from support import corpora
from training import presets

dynamic, lesson_5 = import_module("dynamic_evaluation"), import_module("05_full_model")
GIVEN = SimpleNamespace(segment=8, memory=16, sgd_rate=0.1, rms_rate=1e-3, epsilon=1e-5, decay=1e-3)
V, RUN = 8, presets.RECIPES["tiny"]
both = pytest.mark.parametrize("step", ["sgd", "rms"])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(dynamic, "STATISTICS", 10)


@pytest.fixture
def model():
    """A small model for V symbols, as it was initialized."""
    torch.manual_seed(0)
    config = replace(presets.CONFIGS["tiny"], vocab_size=V, dropout=0.1)
    return lesson_5.TransformerXL(config).eval()


def a_corpus(test=None):
    """Symbols drawn uniformly: there is nothing to be learned."""
    draws = torch.Generator().manual_seed(1)
    train, valid, noise = (torch.randint(V, (n,), generator=draws) for n in (2000, 90, 400))
    return corpora.Corpus(train, valid, noise if test is None else test, list(range(V)), "noise")


@both
def test_no_loss_changes_before_the_token_that_was_changed(step, model):
    """Neither by what the model has read nor by what it has learned; those after it do."""
    text, n = a_corpus().test[:90], 53  # in the middle of a segment
    changed = text.clone()
    changed[n] = (changed[n] + 1) % V
    one, other = (dynamic.dynamic_losses(step, model, a_corpus(z), GIVEN, RUN)
                  for z in (text, changed))
    assert one[: n - 1].equal(other[: n - 1]) and len(one) == 89
    assert (one[n - 1 :] != other[n - 1 :]).all()


@both
def test_it_learns_and_forgets(step, model):
    """A text that repeats itself costs less and less; at the end the model is what it was, and in
    the mode that it was in.
    """
    before = {name: W.clone() for name, W in model.state_dict().items()}
    corpus = a_corpus(a_corpus().test[:3].repeat(100))
    losses = dynamic.dynamic_losses(step, model, corpus, GIVEN, RUN)
    assert losses[200:].mean() < losses[:50].mean() - 0.3
    assert all(W.equal(before[name]) for name, W in model.state_dict().items())
    assert not model.training and model.config.mem_len == presets.CONFIGS["tiny"].mem_len


def test_sgd_goes_down_the_clipped_gradient():
    W = torch.tensor([1.0, 2.0], requires_grad=True)
    W.grad = torch.tensor([3.0, 4.0])  # norm 5
    dynamic.sgd_step([W], 0.5)
    assert W.tolist() == pytest.approx([1 - 0.5 * 0.6, 2 - 0.5 * 0.8])


def test_rms_scales_by_the_training_gradients_and_goes_back():
    """Two tensors: s is 2 and 6, so its mean 4; and a decay that would lead beyond W_0 ends there.
    """
    weights = [torch.tensor([1.0], requires_grad=True), torch.tensor([[5.0]], requires_grad=True)]
    trained = [torch.tensor([2.0]), torch.tensor([[7.0]])]
    for W, gradient in zip(weights, (0.4, 0.9)):
        W.grad = torch.full_like(W, gradient)
    s = [torch.tensor([2.0]), torch.tensor([[6.0]])]
    dynamic.rms_step(weights, trained, *dynamic.paces(s, 0.1, 0.5, 0.8))
    first = 1 - 0.1 * 0.4 / (2 + 0.5) + 0.8 * 2 / 4 * (2 - 1)
    second = 5 - 0.1 * 0.9 / (6 + 0.5) + 1.0 * (7 - 5)  # 0.8 * 6 / 4 is above 1
    assert [z.item() for z in weights] == pytest.approx([first, second])


def test_s_is_the_root_of_the_mean_square_on_the_training_text(model, monkeypatch):
    """Of the gradients of each segment's mean loss, with the memory of --memory."""
    monkeypatch.setattr(dynamic, "STATISTICS", 2)
    corpus, given = a_corpus(), SimpleNamespace(segment=8, memory=4)
    s = dynamic.gradient_sizes(model, corpus, given, RUN)
    squares, memory, x = 0, None, corpus.train[:17].long()
    model.config = replace(model.config, mem_len=4, same_length=True)
    for a in (0, 8):
        model.zero_grad()
        losses, memory = model(x[None, a : a + 8], memory, x[None, a + 1 : a + 9])
        losses.mean().backward()
        squares += model.u.grad**2 / 2
    found = dict(zip((name for name, _ in model.named_parameters()), s))["u"]
    assert torch.allclose(found, squares.sqrt(), rtol=1e-5)
