"""Attention maps: the terms are the model's, by distance, and what is shown is what was read.

    pytest tests/experiments/test_attention_maps.py
"""
import shutil
from argparse import Namespace
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from helpers import assert_close

maps = import_module("attention_maps")
train, lesson_3 = maps.train, import_module("03_relative_attention")
lesson_5 = import_module("05_full_model")
SMALL = ["--memory", "20", "--queries", "50"]  # of 8 places, so 7 queries each


# ---- attention by distance ----------------------------------------------------------------------

def make(M, untie=False):
    """A model whose attention is neither flat nor a single key; mem_len M, same_length, float64."""
    model = lesson_5.TransformerXL(lesson_5.Config(
        9, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=8, mem_len=M, same_length=True,
        untie_r=untie)).double().eval()
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
    R = lesson_3.sinusoid(torch.arange(k.shape[2]), D)
    table = lesson_3.four_terms_all_pairs(q, k, R, attention.W_kR.weight.view(H, C, D), u, v)
    return (table / C**0.5).detach()


@pytest.mark.parametrize("untie", [False, True])
def test_each_term_is_that_of_lesson_3_and_their_sum_the_models(untie):
    """(a), (b), (c) and (d), in this order; softmax of their sum, times the values, is what the
    attention gives.
    """
    model, x = make(6, untie), torch.randint(9, (2, 13))
    for attention, (q, k, value, Q, u, v, hidden), out in attended(model, x[:, :8], x[:, 8:]):
        found, wanted = maps.terms(q, k, Q, u, v).detach(), pairs(attention, q, k, u, v)
        for name, a, b in zip("abcd", found, wanted):
            assert_close(a[..., ~hidden], b[..., ~hidden], f"term ({name})")
        own = found.sum(0).masked_fill(hidden, float("-inf")).softmax(-1) @ value  # (B, H, T, C)
        assert_close(torch.cat(own.unbind(1), dim=-1), out, "the attention's output")


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


@pytest.mark.parametrize("M, n", [(5, 7), (7, 1), (1, 9), (4, 4)])
def test_averages_against_loops(monkeypatch, M, n):
    """However the text is cut, only the last n queries count; each row sums to 1."""
    monkeypatch.setattr(maps, "SEGMENT", 4)
    model, tokens = make(M), torch.randint(9, (2, 12), dtype=torch.uint8)
    tokens = tokens[:, : M + n]
    found = maps.averages(model, tokens, n)
    assert_close(found, by_loops(model, tokens.long(), n), "the averages")
    assert_close(found.sum(-1), torch.ones(4, 2, 3, dtype=torch.float64), "the sums")


def test_the_model_is_as_it_was():
    """After the end and after an error: tokens that the model refuses."""
    model = make(3)
    attends = [layer.attention.attend for layer in model.layers]
    maps.averages(model, torch.randint(9, (1, 8)), 2)
    with pytest.raises(ValueError, match="outside vocabulary"):
        maps.averages(model, torch.tensor([[1, 2, 3, 4, 5, 6, 99]]), 2)
    assert [layer.attention.attend for layer in model.layers] == attends


def test_measures_by_hand():
    """Four keys: two of them alike, one alone, all alike; against the first."""
    p = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]],
                     dtype=torch.float64)
    wanted = torch.tensor([[1, 0.5, 0], [0, 3, 1], [2, 1.5, 0.5]], dtype=torch.float64)
    assert_close(maps.measures(p, p[0]), wanted, "entropy, mean distance, total variation")


# ---- what is shown ------------------------------------------------------------------------------

def test_symbols_are_made_visible():
    """Bytes as characters, also those that have none; words with the gap behind them."""
    assert [maps.label(z) for z in (65, 32, 10, 9, 0, 200)] == ["A", "·", "¶", "→", "▯", "▯"]
    assert [maps.label(z) for z in ("cat", "<eos>", "<S>")] == ["cat ", "¶", "¶"]


def test_figure_6_has_the_text_in_lines_over_its_attention():
    """Words are wrapped, ¶ ends a line; a word's cells have its colour, nearest key last."""
    labels = ["cat ", "sat ", "on ", "¶", "the ", "incomprehensible "]
    p = torch.tensor([[0.05, 0.3, 0.2, 0.1, 0.25, 0.1]])
    axes = maps.draw_text(p, labels, ["one"], "title", width=9).axes[0]
    assert [text.get_position() for text in axes.texts] == [
        (-0.5, 0), (3.5, 0), (-0.5, 1), (2.5, 1), (-0.5, 2), (-0.5, 3)]
    rows = [row.compressed().tolist() for row in axes.images[0].get_array()]
    wanted = [[0.1] * 4 + [0.25] * 4, [0.1] * 3 + [0.2], [0.3] * 4, [0.05] * 9]
    assert rows == [pytest.approx(row) for row in wanted]


def test_what_is_shown_is_what_was_read(run_folder, tmp_path, monkeypatch, capsys):
    """Averages over 8 places of the validation split; the heads that look furthest; the text before
    the position, read from as far back as it can be heard of.
    """
    shown = {}
    for name in ("draw_heads", "draw_text", "draw_terms"):
        monkeypatch.setattr(maps, name, lambda *given, name=name, real=getattr(maps, name): (
            shown.update({name: given}) or real(*given)))
    assert maps.main(["--checkpoint", str(run_folder), *SMALL, "--position", "333",
                      "--out", str(tmp_path)]) == 0
    content = maps.checkpoint.best(run_folder)
    model, run, _ = train.restored(content, "cpu")
    model.config = replace(model.config, mem_len=20, same_length=True, clamp_len=6)
    valid = train.read_corpus({}, run, content).valid
    p = maps.averages(model, maps.lanes(valid, 8)[:, :27], 7).flatten(1, 2)
    distance = p[0] @ torch.arange(21.0).double()
    wide = sorted(range(4), key=lambda i: -distance[i])[:3]
    assert_close(shown["draw_heads"][0], p[0], "figure 5")
    assert_close(shown["draw_terms"][0], torch.cat([p.mean(1, keepdim=True), p[:, wide]], dim=1),
                 "figure 7: the mean, and the three that look furthest")
    seen, labels, names, title = shown["draw_text"]
    at_end = maps.averages(model, valid[None, :334], 1)[0].flatten(0, 1)[wide]
    assert_close(seen, at_end, "figure 6, from the beginning of the split", 1e-5)
    text = (run_folder.parent / "notes.txt").read_text()
    first = len(text) * 9 // 10 + 313
    *wanted, target = text[first : first + 22].replace(" ", "·").replace("\n", "¶")
    assert labels == wanted and title.endswith(f"is {target}")
    printed = capsys.readouterr().out
    for figure in ("figure5_heads", "figure6_text", "figure7_terms"):
        path = tmp_path / f"{figure}.png"
        assert f"figure: {path}\n" in printed and path.stat().st_size > 10_000
    assert f"position 333: {''.join(wanted)}, next {target}\n" in printed
    for i, name in zip(wide, names):
        head = f"layer {i // 2 + 1} head {i % 2 + 1}"
        assert name == f"{head}: mean distance {distance[i]:.0f} tokens" and f"\n{head}" in printed


def test_without_a_checkpoint_one_is_trained_once(run_folder, tmp_path, monkeypatch):
    """Stopped, gone on with, then only used."""
    here, asked = tmp_path / "here", []
    monkeypatch.setattr(maps, "HERE", here)
    monkeypatch.setattr(maps.corpora, "load", lambda name: Namespace(valid=range(10_000)))

    def quick(given, device):
        asked.append(given)
        if "resume" not in given:
            shutil.copytree(run_folder, here)
            return 130
        (here / "curve.png").touch()  # drawn when a run has ended

    monkeypatch.setattr(train, "train", quick)
    given = Namespace(checkpoint=None, memory=20, queries=50, position=None)
    with pytest.raises(KeyboardInterrupt):
        maps.trained(given)
    for _ in range(2):
        assert maps.trained(given).path == here / "best.pt"
    assert asked == [{"minutes": 1.0, "out": str(here)}, {"resume": True, "out": str(here)}]
    with pytest.raises(ValueError, match="it has 10,000"):  # before a minute is gone
        monkeypatch.setattr(maps, "HERE", tmp_path / "other")
        maps.trained(Namespace(checkpoint=None, memory=2000, queries=50, position=None))


@pytest.mark.parametrize("memory, position, found", [
    (67, None, 300), (20, 20, 20), (20, 598, 598), (68, None, "need 601"), (20, 599, "to 598"),
    (20, 19, "must be 20")])
def test_what_a_split_of_600_tokens_is_enough_for(memory, position, found):
    """8 places of 67 + 7 = 74 tokens; a memory before the position, and a target behind it."""
    given = Namespace(memory=memory, queries=50, position=position)
    if isinstance(found, int):
        assert maps.checked(given, range(600)) == found
    else:
        with pytest.raises(ValueError, match=found):
            maps.checked(given, range(600))
