"""The relative effective context length on losses worked by hand, and the losses of table 8.

    pytest tests/experiments/test_table8_recl.py
"""
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized, run_examples

table6, table8, common = map(import_module, ("table6_ablation", "table8_recl", "common"))
AblationModel = table6.AblationModel
lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4)
CONTEXTS = [100, 200, 300, 400]


# ---- the measure --------------------------------------------------------------------------------

def recl_by_the_formulas(losses, contexts, r):
    """Of plain lists losses[model][context][position]: the formulas of the paper's appendix C, one
    position at a time.
    """
    models, n, found = range(len(losses)), len(losses[0][0]), []
    for i in models:
        k = 0
        while k + 1 < len(contexts):
            b = [min(losses[a][k][t] for a in models) for t in range(n)]
            hard = sorted(range(n), key=lambda t: -b[t])[: max(1, round(r * n))]
            f = [sum(min(b[t], losses[i][other][t]) for t in hard) / len(hard)
                 for other in (k, k + 1)]
            if (math.exp(f[0]) - math.exp(f[1])) / math.exp(f[0]) < 0.01:
                break
            k += 1
        found.append(contexts[k])
    return found


@pytest.mark.parametrize("r", [0.01, 0.1, 0.5, 1.0])
def test_recl_of_random_losses_is_that_of_the_formulas(r):
    """Models that gain by a factor of about 1.01 a context, so that they stop at different ones."""
    draw, several = torch.Generator().manual_seed(1), set()
    for _ in range(60):
        losses = torch.rand(3, 4, 20, generator=draw, dtype=torch.float64) * 0.05 + 2
        gains = 0.01 * torch.randint(4, (3, 1, 1), generator=draw)
        losses = losses - torch.arange(4)[:, None] * gains
        found = table8.recl(losses, CONTEXTS, r)
        assert found == recl_by_the_formulas(losses.tolist(), CONTEXTS, r)
        several |= set(found)
    assert len(several) > 2


def test_the_docstrings_example():
    run_examples(table8)


# ---- table 8 ------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, T", [("ours", 5), ("lstm", 5), ("al-rfou", 5), ("al-rfou", 70)])
def test_losses_are_after_exactly_so_many_tokens(kind, T):
    """Each loss against a window of its own, cut out by hand; al-rfou reads T tokens at most."""
    if kind == "lstm":
        model = table8.LSTM(CONFIG, 2000).double()
    else:
        model = AblationModel(
            CONFIG if kind == "ours" else replace(CONFIG, mem_len=0), T, kind)
        model = randomized(model)
    model, tokens = model.eval(), torch.randint(7, (400,))
    contexts = [40, 80, 120]  # read in segments of 64, so a state is handed on
    found = table8.losses_by_context(model, tokens, contexts, 30, 2)
    positions = range(120, 281, 40)
    assert found.shape == (3, len(positions))
    for i, c in enumerate(contexts):
        for k, t in enumerate(positions):
            used = min(c, T) if kind == "al-rfou" else c
            x, y = tokens[None, t - used : t], tokens[None, t - used + 1 : t + 1]
            with common.evaluating_with(model, mem_len=29, same_length=True):
                wanted = model(x, None, y)[0][0, -1]
            assert_close(found[i, k].double(), wanted, f"position {t} after {c}", 1e-5)


def test_the_lstm_hands_on_its_state():
    """Two segments are one pass of its layers, with sqrt(D) on the input; it has 2,000 parameters
    at most beside the embedding.
    """
    model = randomized(table8.LSTM(lesson_5.Config(7, n_layer=1, d_model=4), 2000))
    x, y = torch.randint(7, (2, 2, 6))
    _, memory = model(x[:, :3], None, y[:, :3])
    found, _ = model(x[:, 3:], memory, y[:, 3:])
    h, _ = model.layers(model.embedding.weight[x] * 4**0.5)
    logits = model.out(h) @ model.embedding.weight.T + model.embedding.bias
    wanted = torch.nn.functional.cross_entropy(logits.mT, y, reduction="none")
    assert_close(found, wanted[:, 3:], "the losses")
    size = sum(z.numel() for part in (model.layers, model.out) for z in part.parameters())
    assert 1000 < size <= 2000


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_length_is_chosen_on_valid_and_the_contexts_are_of_test(split, unread, notes):
    """The lowest validation loss of 1, 2, 4, 8 and 16 times T."""
    unread("test" if split == "valid" else "valid")
    corpus = common.corpora.load(notes)
    if split == "test":
        texts = table8.stretches_of(corpus, CONTEXTS, 2, 3, "cpu")
        assert [len(text) for text in texts] == [2 * 100 + 400 + 1] * 2
        assert texts[0].equal(corpus.test[:601])
        return
    study = replace(table6.SCALES["tiny"], config=replace(
        table6.SCALES["tiny"].config, vocab_size=len(corpus.vocab)))
    model = randomized(AblationModel(study.config, 8)).eval()
    tokens = common.pieces(corpus.valid, 128, study.count, study.n, "cpu")
    losses = {L: common.memory_losses(model, tokens, 128, 64, mem_len=L - 1,
                                      same_length=True).mean().item() for L in (8, 16, 32, 64, 128)}
    assert table8.best_length(model, study, corpus) == min(losses, key=losses.get)
