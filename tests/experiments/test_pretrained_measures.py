"""Test the measures of the model in pretrained/ on small models, against their formulas."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

pretrained, presets = import_module("pretrained"), import_module("training.presets")
lesson_1, lesson_5, corpora = pretrained.lesson_1, pretrained.lesson_5, pretrained.corpora
CONFIG = lesson_5.Config(45, n_layer=2, d_model=12, n_head=2, d_head=6, d_inner=8, mem_len=12)
NOISE = torch.randint(45, (900,), generator=torch.Generator().manual_seed(0))
CORPUS = corpora.Corpus(NOISE, NOISE, NOISE[100:161], [*range(45)], "noise")


@pytest.fixture
def model():
    return randomized(lesson_5.TransformerXL(CONFIG)).eval()


def test_memory_is_removed_in_one_layer_or_shuffled(model, needs_shipped_solutions):
    """A layer without output needs no memory; without distances order has no effect."""
    def measured():  # 12 tokens of context, 48 that count
        return [round(z, 9) for z in pretrained.memory_by_layer(model, CORPUS, 4, 1, 48).values()]

    x, y = (NOISE[start : start + 48].view(12, 4) for start in (112, 113))
    assert measured()[1] == pytest.approx(lesson_1.bits(model(x, None, y)[0]))
    assert len({*measured()}) == 5
    for k in range(2):
        attention = model.layers[k].attention
        kept = attention.W_o.weight.data.clone()
        attention.W_o.weight.data.zero_()
        every, none, _, *without = measured()
        assert (without[k], without[1 - k]) == (every, none)
        attention.W_o.weight.data.copy_(kept)
        attention.W_kR.weight.data.zero_()
    every, _, shuffled, *_ = measured()
    assert shuffled == every


@pytest.mark.parametrize("k", [0, 2, 3])
def test_a_gradient_passes_through_k_segments(k, model):
    """It equals that of one pass over them and the last; what comes before has no gradient."""
    tokens, first, memory = NOISE[None, :17], 4 * (3 - k), None
    found = pretrained.gradient(model, tokens, 4, k)
    if first:
        _, memory = model(tokens[:, :first])
    losses, _ = model(tokens[:, first:16], memory, tokens[:, first + 1 :])
    wanted = torch.autograd.grad(losses[:, -4:].mean(), list(model.parameters()))
    assert_close(found, torch.cat([part.flatten() for part in wanted]), "the gradient", 1e-10)


def test_gradients_are_compared(model, monkeypatch):
    """The mean over two places is (3, 0) for k = 0 and (3, 4) for k = 1."""
    monkeypatch.setattr(pretrained, "gradient", lambda model, tokens, T, k: (
        tokens[0, -1] * torch.tensor([6.0, 8 * k])))
    corpus = replace(CORPUS, valid=torch.tensor([0] * 40 + [1] * 40))
    found = pretrained.stopped_gradient(model, corpus, 4, places=2)
    values = [found[f"gradient {name}", 1] for name in ("lacks", "cosine", "norm")]
    assert values == pytest.approx([0.8, 0.6, 5]) and found["gradient norm", 0] == 3


def test_dynamic_evaluation_learns_from_what_it_has_predicted(model):
    """Weights follow the formula; some are pulled back fully.  The model is unchanged."""
    before = [W.detach().clone() for W in model.parameters()]
    found = pretrained.dynamic_evaluation(model, CORPUS, 41, 4, 8, 0.01, 0.5, 0.1)
    assert all(W.equal(old) for W, old in zip(model.parameters(), before))
    model.config, test = replace(CONFIG, mem_len=8, same_length=True), CORPUS.test[None, :42]
    bits = lesson_1.bits(model(test[:, :-1], None, test[:, 1:])[0])
    s, losses = [0 * W for W in before], []
    for tokens in NOISE[None, :801], test:
        memory = None
        for part in (tokens[:, a : a + 5] for a in range(0, tokens.shape[1] - 1, 4)):
            loss, memory = model(part[:, :-1], memory, part[:, 1:])
            gradients = torch.autograd.grad(loss.mean(), list(model.parameters()))
            if tokens is not test:
                s = [(z**2 + g**2 / 200).sqrt() for z, g in zip(s, gradients)]
                continue
            losses.append(loss[0])
            mean = sum(z.mean() for z in s) / len(s)
            for W, W_0, g, z in zip(model.parameters(), before, gradients, s):
                W.data += (0.5 * z / mean).clamp(max=1) * (W_0 - W.data) - 0.01 * g / (z + 0.1)
    assert [*found.values()] == pytest.approx([bits, lesson_1.bits(torch.cat(losses))], rel=1e-9)


def test_names_that_recur(monkeypatch):
    """One of nam_i, tom_i and both recurs, two without memory, one of 14 others; self and inco
    do not count.  Without memory a new token sees the last T = 16."""
    def tokens(texts):
        return torch.tensor([[*text.encode()] for text in texts])

    def generate(model, text, n):
        if n == 24:
            return sampled
        texts_read.append(text)
        return without[:, [len(texts_read) - 1]]

    sampled = tokens(f"mple self nam{i} nam{(i + 1) % 8} inc" for i in range(8))
    without, texts_read = tokens(f"part self both tom{i} incom" for i in range(8)), []
    test = tokens(f"part self nam{i} tom{i} both inco" + 24 * " " for i in range(8)).flatten()
    corpus = corpora.Corpus(tokens(["self " * 9])[0], NOISE, torch.cat([test, test[:1]]),
                            [*range(128)], "names")
    monkeypatch.setattr(lesson_5, "generate", generate)
    found = pretrained.names_that_recur(
        lesson_5.TransformerXL(CONFIG), corpus, presets.RECIPES["tiny"], 29, 24, 8)
    assert [*found.values()] == pytest.approx([100 / 3, 200 / 3, 100 / 14])
    assert texts_read[-1].equal(without[:, 7:23]) and texts_read[0].shape == (8, 16)
