"""Attention maps: the terms are the model's, by distance, and what is shown is what was read."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

maps = import_module("figures5_to_7_attention")
lesson_1, lesson_3, lesson_5 = map(import_module, (
    "01_vanilla_segments", "03_relative_attention", "05_full_model"))


@pytest.mark.parametrize("M, n", [(5, 7), (1, 9)])
def test_averages_against_loops(M, n, monkeypatch):
    """For any segmentation only the last n queries count; the loops use lesson 3's four terms."""
    model = randomized(lesson_5.TransformerXL(lesson_5.Config(
        9, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=8, mem_len=M, same_length=True,
        untie_r=True))).eval()
    tokens, L, seen = torch.randint(9, (2, M + n), dtype=torch.uint8), M + n, []
    attend = lesson_5.RelativeAttention.attend
    with monkeypatch.context() as patch:
        patch.setattr(lesson_5.RelativeAttention, "attend", lambda attention, *given: (
            seen.append((attention, given)), attend(attention, *given))[1])
        model(tokens.long())
    wanted = torch.zeros(4, 2, 3, M + 1).double()
    for layer, (attention, (q, k, _, _, u, v, _)) in enumerate(seen):
        R, W_kR = lesson_1.sinusoid(torch.arange(L), 16), attention.W_kR.weight.view(3, 4, 16)
        table = lesson_3.four_terms_all_pairs(q, k, R, W_kR, u, v).detach() / 2  # sqrt(C)
        for i, part in enumerate((table.sum(0), table[0], table[1], table[3])):  # (B, H, L, L)
            for t in range(M, L):
                p = torch.stack([part[:, :, t, t - d] for d in range(M + 1)], -1).softmax(-1)
                wanted[i, layer] += p.mean(0) / n
    monkeypatch.setattr(maps, "SEGMENT", 4)
    assert_close(maps.averages(model, tokens, n), wanted, "the averages")


def test_measures_by_hand():
    """Four keys: two of them alike, one alone, all alike; against the first."""
    p = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]]).double()
    wanted = torch.tensor([[1, 0.5, 0], [0, 3, 1], [2, 1.5, 0.5]]).double()
    assert_close(maps.measures(p, p[0]), wanted, "entropy, mean distance, total variation")


def test_what_is_shown_is_what_was_read(run_folder, unread, tmp_path, monkeypatch):
    """Averages over 8 places of the validation split; the heads that look furthest; the text."""
    shown = {}
    for name in ("draw_heads", "draw_text", "draw_terms"):
        monkeypatch.setattr(maps, name, lambda *given, name=name: shown.update({name: given}))
    monkeypatch.setattr(maps.common, "save_figure", lambda figure, path: None)
    unread("test")
    assert maps.main(["--checkpoint", str(run_folder), "--memory", "20", "--queries", "50",
                      "--position", "333", "--out", str(tmp_path)]) == 0
    model, recipe, corpus, _ = maps.common.open_run(run_folder, "data")
    model.config = replace(model.config, mem_len=20, same_length=True, clamp_len=6)
    excerpts = lesson_1.lanes(corpus.valid, 8)[:, :27]
    p = maps.averages(model, excerpts, 7)[0].flatten(0, 1)  # 7 queries each
    assert_close(shown["draw_heads"][0], p, "figure 5")
    distance = p @ torch.arange(21.0).double()
    wide = sorted(range(4), key=lambda i: -distance[i])[:3]
    seen, labels, _, title = shown["draw_text"]
    at_end = maps.averages(model, corpus.valid[None, :334], 1)[0].flatten(0, 1)[wide]
    assert_close(seen, at_end, "figure 6, from the beginning of the split", 1e-5)
    text = (run_folder.parent / "notes.txt").read_text()
    first = len(text) - len(text) // 20 * 2 + 313
    *wanted, target = text[first : first + 22].replace(" ", "·").replace("\n", "¶")
    assert labels == wanted and title.endswith(f"is {target}")
