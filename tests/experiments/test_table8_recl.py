"""Table 8: the losses that the measure is fed, five models, their lines and the figure.

    pytest tests/experiments/test_table8_recl.py
"""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

table8 = import_module("table8_recl")
study, ablation_model = table8.study, import_module("ablation_model")
lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4)


@pytest.mark.parametrize("kind", ["ours", "lstm", "al-rfou"])
def test_losses_are_after_exactly_so_many_tokens(kind):
    """Each loss against a window of its own, cut out by hand; al-rfou reads 5 tokens at most."""
    if kind == "lstm":
        model = table8.LSTM(CONFIG, 2000).double()
    else:
        model = ablation_model.AblationModel(
            CONFIG if kind == "ours" else replace(CONFIG, mem_len=0), 5, kind)
        model = randomized(model)
    model, tokens = model.eval(), torch.randint(7, (400,))
    contexts = [40, 80, 120]  # read in segments of 64, so a state is handed on
    found = table8.losses_by_context(model, tokens, contexts, 30, 2, study.Bar(10**6))
    positions = range(120, 281, 40)
    assert found.shape == (3, len(positions))
    for i, c in enumerate(contexts):
        for k, t in enumerate(positions):
            used = min(c, 5) if kind == "al-rfou" else c
            x, y = tokens[None, t - used : t], tokens[None, t - used + 1 : t + 1]
            with study.evaluating_with(model, mem_len=29, same_length=True):
                wanted = model(x, None, y)[0][0, -1]
            assert_close(found[i, k].double(), wanted, f"position {t} after {c}", 1e-5)


def test_the_best_memory_is_that_of_the_lowest_loss(monkeypatch):
    """Of T to 16 T, the query itself included."""
    contexts = []
    setting = table8.table6_ablation.SIZES["tiny"]
    corpus = study.copies.corpus(4_000)
    monkeypatch.setattr(study, "memory_losses", lambda model, tokens, before, segment, **lengths: (
        contexts.append(lengths) or torch.full((1,), abs(lengths["mem_len"] - 30.0))))
    assert table8.best_length(None, setting, corpus, study.Bar(10**6)) == 32
    assert contexts == [{"mem_len": M, "same_length": True} for M in (7, 15, 31, 63, 127)]


def test_the_lstm_hands_its_state_on_and_is_no_larger():
    """Two segments are one; no gradient into the first; its parameters are the most that fit."""
    model = table8.LSTM(CONFIG, 2000).double()
    size = sum(z.numel() for part in (model.lstm, model.out) for z in part.parameters())
    width = model.lstm.hidden_size + 8
    assert size <= 2000 < 4 * width * (8 + 3 * width + 4) + 8 * width
    x, y = torch.randint(7, (2, 3, 9))
    whole, _ = model(x, None, y)
    first, memory = model(x[:, :4], None, y[:, :4])
    second, memory = model(x[:, 4:], memory, y[:, 4:])
    assert_close(torch.cat([first, second], 1), whole, "the losses")
    assert [z.shape for z in memory] == 4 * [(3, model.lstm.hidden_size)]
    assert not any(z.requires_grad for z in memory)
