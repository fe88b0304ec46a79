"""Attention maps: the terms are the model's, by distance, and what is shown is what was read.

    pytest tests/experiments/test_figures5_to_7_attention.py
"""
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from helpers import assert_close

maps = import_module("figures5_to_7_attention")
lesson_1 = import_module("01_vanilla_segments")
lesson_3 = import_module("03_relative_attention")
lesson_5 = import_module("05_full_model")


# ---- attention by distance ----------------------------------------------------------------------

def make(M):
    """A model whose attention is neither flat nor a single key; mem_len M, same_length, float64."""
    model = lesson_5.TransformerXL(lesson_5.Config(
        9, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=8, mem_len=M, same_length=True,
        untie_r=True)).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def attended(model, *parts):
    """Read parts (B, T) one by one -> what `attend` was given for the last, and gave, by layer."""
    seen, memory = [], None
    for layer in model.layers:
        def watched(*given, attention=layer.attention):
            out = type(attention).attend(attention, *given)
            seen.append((attention, given, out))
            return out

        layer.attention.attend = watched
    with torch.no_grad():
        for x in parts:
            seen.clear()
            _, memory = model(x, memory)
    for layer in model.layers:
        del layer.attention.attend
    return seen


def pairs(attention, q, k, u, v):
    """Lesson 3's four terms (4, B, H, T, K) from the same queries and keys, and scaled."""
    H, C, D = attention.H, attention.C, attention.W_kR.in_features
    R = lesson_1.sinusoid(torch.arange(k.shape[2]), D)
    table = lesson_3.four_terms_all_pairs(q, k, R, attention.W_kR.weight.view(H, C, D), u, v)
    return (table / C**0.5).detach()


def by_loops(model, tokens, n):
    """What averages should be, from one pass over tokens (B, L): query by query, key by key."""
    B, L = tokens.shape
    M, rows = model.config.mem_len, []
    for attention, (q, k, _, _, u, v, _), _ in attended(model, tokens):
        table = pairs(attention, q, k, u, v)  # (4, B, H, L, L)
        for part in (table.sum(0), table[0], table[1], table[3]):
            for head in range(attention.H):
                p = [torch.stack([part[b, head, t, t - d] for d in range(M + 1)]).softmax(0)
                     for b in range(B) for t in range(L - n, L)]
                rows.append(torch.stack(p).mean(0))
    return torch.stack(rows).view(model.config.n_layer, 4, attention.H, M + 1).transpose(0, 1)


@pytest.mark.parametrize("M, n", [(5, 7), (1, 9)])
def test_averages_against_loops(monkeypatch, M, n):
    """However the text is cut, only the last n queries count; each row sums to 1."""
    monkeypatch.setattr(maps, "SEGMENT", 4)
    model, tokens = make(M), torch.randint(9, (2, 12), dtype=torch.uint8)
    tokens = tokens[:, : M + n]
    found = maps.averages(model, tokens, n)
    assert_close(found, by_loops(model, tokens.long(), n), "the averages")
    assert_close(found.sum(-1), torch.ones(4, 2, 3, dtype=torch.float64), "the sums")


def test_measures_by_hand():
    """Four keys: two of them alike, one alone, all alike; against the first."""
    p = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]],
                     dtype=torch.float64)
    wanted = torch.tensor([[1, 0.5, 0], [0, 3, 1], [2, 1.5, 0.5]], dtype=torch.float64)
    assert_close(maps.measures(p, p[0]), wanted, "entropy, mean distance, total variation")


# ---- what is shown ------------------------------------------------------------------------------

def test_what_is_shown_is_what_was_read(run_folder, unread, tmp_path, monkeypatch):
    """Averages over 8 places of the validation split; the heads that look furthest; the text before
    the position, read from as far back as it can depend on.
    """
    shown = {}
    for name in ("draw_heads", "draw_text", "draw_terms"):
        monkeypatch.setattr(maps, name, lambda *given, name=name: shown.update({name: given}))
    monkeypatch.setattr(maps.common, "save_figure", lambda figure, path: None)
    unread("test")
    assert maps.main(["--checkpoint", str(run_folder), "--memory", "20", "--queries", "50",
                      "--position", "333", "--out", str(tmp_path)]) == 0
    model, recipe, corpus, _ = maps.common.open_run(run_folder, "data")
    model.config = replace(model.config, mem_len=20, same_length=True, clamp_len=6)
    pieces = lesson_1.lanes(corpus.valid, 8)[:, :27]
    p = maps.averages(model, pieces, 7)[0].flatten(0, 1)  # 7 queries each
    assert_close(shown["draw_heads"][0], p, "figure 5")
    distance = p @ torch.arange(21.0).double()
    wide = sorted(range(4), key=lambda i: -distance[i])[:3]
    seen, labels, _, title = shown["draw_text"]
    at_end = maps.averages(model, corpus.valid[None, :334], 1)[0].flatten(0, 1)[wide]
    assert_close(seen, at_end, "figure 6, from the beginning of the split", 1e-5)
    text = (run_folder.parent / "notes.txt").read_text()
    first = len(text) * 9 // 10 + 313
    *wanted, target = text[first : first + 22].replace(" ", "·").replace("\n", "¶")
    assert labels == wanted and title.endswith(f"is {target}")
