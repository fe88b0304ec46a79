"""Dynamic evaluation: nothing is learned before it is predicted, and the steps are as written."""
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from support import corpora
from training import presets

dynamic, lesson_5 = import_module("dynamic_evaluation"), import_module("05_full_model")
GIVEN = SimpleNamespace(segment=8, memory=16, sgd_rate=0.1, rms_rate=1e-3, epsilon=1e-5, decay=1e-3)
V, RECIPE = 8, presets.RECIPES["tiny"]
NOISE = torch.randint(V, (2000,), generator=torch.Generator().manual_seed(1))


def corpus_of(test):
    return corpora.Corpus(NOISE, NOISE[-90:], test, list(range(V)), "noise")


@pytest.fixture
def model(monkeypatch):
    """A small model for V symbols, as it was initialized."""
    monkeypatch.setattr(dynamic, "STATISTICS", 2)
    torch.manual_seed(0)
    config = replace(presets.CONFIGS["tiny"], vocab_size=V, dropout=0.1)
    return lesson_5.TransformerXL(config).eval()


@pytest.mark.parametrize("step", ["sgd", "rms"])
def test_nothing_is_learned_before_it_is_predicted(step, model):
    """A changed token changes all losses from its own on and none before.  The losses of a text
    that repeats itself fall; at the end the weights are the first ones again."""
    before = {name: W.clone() for name, W in model.state_dict().items()}
    text, n = NOISE[:3].repeat(100), 53  # in the middle of a segment
    changed = text.clone()
    changed[n] = (changed[n] + 1) % V
    one, other = (dynamic.dynamic_losses(step, model, corpus_of(z), GIVEN, RECIPE)
                  for z in (text, changed))
    assert one[: n - 1].equal(other[: n - 1]) and len(one) == 299
    assert (one[n - 1 :] != other[n - 1 :]).all()
    assert one[200:].mean() < one[:50].mean() - 0.3
    assert all(W.equal(before[name]) for name, W in model.state_dict().items())
    assert not model.training and model.config.mem_len == presets.CONFIGS["tiny"].mem_len


def test_the_steps_are_as_written():
    """sgd clips a gradient of norm 5.  For rms s is 2 and 6, and the mean of the tensors is 4; a
    decay that would lead beyond W_0 ends there."""
    W = torch.tensor([1.0, 2.0], requires_grad=True)
    W.grad = torch.tensor([3.0, 4.0])
    dynamic.sgd_step([W], 0.5)
    assert W.tolist() == pytest.approx([1 - 0.5 * 0.6, 2 - 0.5 * 0.8])
    weights = [torch.tensor([1.0], requires_grad=True), torch.full((1, 2), 5.0, requires_grad=True)]
    trained, s = ([torch.tensor([a]), torch.full((1, 2), b)] for a, b in ((2.0, 7.0), (2.0, 6.0)))
    for W, gradient in zip(weights, (0.4, 0.9)):
        W.grad = torch.full_like(W, gradient)
    dynamic.rms_step(weights, trained, *dynamic.step_sizes(s, 0.1, 0.5, 0.8))
    first = 1 - 0.1 * 0.4 / (2 + 0.5) + 0.8 * 2 / 4 * (2 - 1)
    second = 5 - 0.1 * 0.9 / (6 + 0.5) + 1.0 * (7 - 5)  # 0.8 * 6 / 4 is above 1
    assert [z.flatten()[0].item() for z in weights] == pytest.approx([first, second])


def test_s_is_the_root_of_the_mean_square_on_the_training_text(model):
    """Of the gradients of each segment's mean loss, with the memory of --memory."""
    given = SimpleNamespace(segment=8, memory=4)
    s = dynamic.gradient_sizes(model, corpus_of(NOISE[:50]), given, RECIPE)
    squares, memory, x = 0, None, NOISE[:17]
    model.config = replace(model.config, mem_len=4, same_length=True)
    for a in (0, 8):
        model.zero_grad()
        losses, memory = model(x[None, a : a + 8], memory, x[None, a + 1 : a + 9])
        losses.mean().backward()
        squares += model.u.grad**2 / 2
    found = dict(zip((name for name, _ in model.named_parameters()), s))["u"]
    assert torch.allclose(found, squares.sqrt(), rtol=1e-5)
