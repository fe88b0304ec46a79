"""Attention maps: the terms are the model's, by distance, and what is shown is what was read.

    pytest tests/experiments/test_attention_maps.py
"""
import os
import random
import signal
from dataclasses import replace
from importlib import import_module
from math import log2

import pytest
import torch
import torch.nn as nn

from matplotlib.figure import Figure

from helpers import assert_close

maps = import_module("attention_maps")
train, lesson_3 = maps.train, import_module("03_relative_attention")
lesson_5 = import_module("05_full_model")
PNG = b"\x89PNG\r\n\x1a\n"


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


@pytest.mark.parametrize("untie", [False, True])
def test_the_terms_are_what_the_attention_adds_up(untie):
    """Softmax of their sum, times the values: what `attend` gives."""
    model, x = make(6, untie), torch.randint(9, (2, 13))
    for _, (q, k, value, Q, u, v, hidden), wanted in attended(model, x[:, :8], x[:, 8:]):
        score = maps.terms(q, k, Q, u, v).sum(0)
        out = score.masked_fill(hidden, float("-inf")).softmax(-1) @ value  # (B, H, T, C)
        out = torch.cat(out.unbind(1), dim=-1)
        assert out.shape == (2, 5, 12) and hidden.shape == (5, 11)
        assert_close(out, wanted, "the attention's output")


def pairs(attention, q, k, u, v):
    """Lesson 3's four terms (4, B, H, T, K) from the same queries and keys, and scaled."""
    H, C, D = attention.H, attention.C, attention.W_kR.in_features
    R = lesson_3.sinusoid(torch.arange(k.shape[2]), D)
    table = lesson_3.four_terms_all_pairs(q, k, R, attention.W_kR.weight.view(H, C, D), u, v)
    return (table / C**0.5).detach()


def test_each_term_is_that_of_lesson_3():
    """(a), (b), (c) and (d), in this order, wherever a key is visible."""
    model, x = make(6), torch.randint(9, (2, 13))
    for attention, (q, k, _, Q, u, v, hidden), _ in attended(model, x[:, :8], x[:, 8:]):
        found = maps.terms(q, k, Q, u, v).detach()
        wanted = pairs(attention, q, k, u, v)
        for name, a, b in zip("abcd", found, wanted):
            assert_close(a[..., ~hidden], b[..., ~hidden], f"term ({name})")


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


def test_what_stands_before_the_memory_is_heard_of(monkeypatch):
    """The last query's attention in layer 2 depends on M tokens before its own M, no further."""
    monkeypatch.setattr(maps, "SEGMENT", 4)
    model, tokens = make(5), torch.randint(9, (1, 31))
    one = maps.averages(model, tokens, 1)
    assert_close(maps.averages(model, tokens[:, -11:], 1), one, "2 layers of 5")
    assert (maps.averages(model, tokens[:, -6:], 1) - one).abs().max() > 1e-4


def test_a_planted_head_is_found_at_its_distance():
    """Term (d) alone, with v along one row and this row of W_kR along R_3, peaks at distance 3."""
    model, tokens = make(6), torch.randint(9, (2, 20))
    attention = model.layers[1].attention
    with torch.no_grad():
        nn.init.zeros_(attention.W_q.weight), nn.init.zeros_(model.u), nn.init.zeros_(model.v)
        model.v[0, 2, 1] = 1.0
        R = lesson_3.sinusoid(torch.arange(4), 16)
        attention.W_kR.weight[2 * 4 + 1] = 500 * R[3]
    p = maps.averages(model, tokens, 9)
    for part in (0, 3):  # the whole and (d)
        assert p[part, 1, 2].argmax() == 3 and p[part, 1, 2, 3] > 0.999
        assert p[part, 1, :2].max() < 0.5
    figure = maps.draw_text(p[0, 1, 2:], list("abcdefg"), ["planted"], "")
    assert figure.axes[0].images[0].get_array()[0, :7].argmax() == 3  # "d", three before "g"
    figure = maps.draw_text(p[0, 1, 2:], list("abcde") + ["fg ", "h"], ["planted"], "")
    assert figure.axes[0].images[0].get_array()[0, :9].argmax() == 3


def test_zeroed_weights_make_a_term_alone_uniform():
    """(a) and (b) without queries, (d) without v; (c) is left, so the whole is not uniform."""
    model, tokens = make(6), torch.randint(9, (2, 20))
    for zero, flat in (("W_q", (1, 2)), ("v", (3,))):
        with torch.no_grad():
            for layer in model.layers:
                nn.init.zeros_(layer.attention.W_q.weight if zero == "W_q" else model.v)
        p = maps.averages(model, tokens, 14)
        for part in flat:
            assert_close(p[part], torch.full_like(p[part], 1 / 7), f"part {part}")
        assert (p[0] - 1 / 7).abs().min(-1).values.max() > 1e-5


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


# ---- figures ------------------------------------------------------------------------------------

def test_symbols_are_made_visible():
    """Bytes as characters, also those that have none; words with the gap behind them."""
    assert [maps.label(z) for z in (65, 32, 10, 9, 0, 200)] == ["A", "·", "¶", "→", "▯", "▯"]
    assert [maps.label(z) for z in ("cat", "<eos>", "<S>")] == ["cat ", "¶", "¶"]


def test_figure_6_has_the_text_in_lines_over_its_attention():
    """Words are wrapped, ¶ ends a line, $ is no formula; the colour is that of the word."""
    labels = ["$a$ ", "cat ", "sat ", "¶", "on ", "incomprehensible "]
    p = torch.tensor([[0.05, 0.3, 0.2, 0.1, 0.25, 0.1], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
    figure = maps.draw_text(p, labels, ["one", "two"], "$title$", width=9)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["one", "two"]
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == [
        "$a$ ", "cat ", "sat ", "¶", "on ", "incompreh"]
    assert not any(text.get_parse_math() for text in axes.texts)
    assert [text.get_position() for text in axes.texts] == [
        (-0.5, 0), (3.5, 0), (-0.5, 1), (3.5, 1), (-0.5, 2), (-0.5, 3)]
    grid = torch.tensor(axes.images[0].get_array().filled(torch.nan))
    nan = torch.nan
    wanted = torch.tensor([[0.1] * 4 + [0.25] * 4 + [nan], [0.1] * 4 + [0.2] + [nan] * 4,
                           [0.3] * 3 + [nan] * 6, [0.05] * 9])
    assert torch.allclose(grid.float(), wanted, equal_nan=True)


def test_figures_5_and_7_have_a_row_or_line_for_each():
    """Nothing is cut off that is above the floor of the colours; a panel's lines are its head's."""
    p = torch.rand(4, 4, 6, dtype=torch.float64)
    image = maps.draw_heads(p[0], list("wxyz")).axes[0].images[0].get_array()
    assert_close(torch.tensor(image.data), p[0], "figure 5")
    panels = maps.draw_terms(p, list("wxyz")).axes
    for i, (axes, name) in enumerate(zip(panels, "wxyz")):
        assert axes.get_title() == name
        for j, line in enumerate(axes.lines[:4]):
            assert line.get_label() == list(maps.PARTS)[j]
            assert_close(torch.tensor(line.get_ydata()), p[j, i], "figure 7")


# ---- the experiment -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of pseudo-random words: 12,000 bytes, so 600 of validation."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde\n", k=draw.randint(1, 6))) for _ in range(4000)]
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(" ".join(words)[:12_000])
    return path


TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--n-tokens", "5"]


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The folder of a finished run of train.py, its heads made sharper so that they differ."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.log, "draw", lambda *given: None)  # takes longer than all else
        assert train.main([*TINY, "--text", str(text), "--steps", "30", "--lr", "0.01",
                           "--eval-clamp-len", "6", "--out", str(out)]) == 0
    content = maps.checkpoint.best(out)
    for name, weight in content["model"].items():
        weight *= 8 if "W_q" in name else 1
    maps.checkpoint.save(content.path, dict(content))
    return out


@pytest.fixture
def no_figures(monkeypatch):
    """Empty ones, since drawing takes longer than all else."""
    for name in ("draw_heads", "draw_text", "draw_terms"):
        monkeypatch.setattr(maps, name, lambda *given: Figure(figsize=(1, 1)))


FLAGS = ["--memory", "20", "--queries", "50"]  # of 8 places, so 7 queries each


def test_the_printed_numbers_are_those_of_the_model(run, text, tmp_path, monkeypatch, capsys,
                                                    request):
    """Averages over 8 places of the split, the widest heads, the text; from folder and file."""
    shown = {}
    real_text, real_terms = maps.draw_text, maps.draw_terms
    monkeypatch.setattr(maps, "draw_text", lambda *given: (
        shown.update(text=given), real_text(*given))[1])
    monkeypatch.setattr(maps, "draw_terms", lambda *given: (
        shown.update(terms=given), real_terms(*given))[1])
    out = tmp_path / "new" / "figures"
    flags = [*FLAGS, "--position", "333", "--out", str(out)]
    assert maps.main(["--checkpoint", str(run), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("5_heads", "6_text", "7_terms"):
        assert (out / f"figure{name}.png").read_bytes().startswith(PNG)
        assert f"figure: {out / f'figure{name}.png'}" in lines

    content = maps.checkpoint.best(run)
    model, settings, _ = train.restored(content, "cpu")
    model.config = replace(model.config, mem_len=20, same_length=True, clamp_len=6)
    valid = train.read_corpus({}, settings, content).valid
    p = maps.averages(model, train.lanes(valid, 8)[:, :27], 7)
    numbers = maps.measures(p, p[0]).flatten(1, 2)  # (4, heads, 3)
    assert lines[0].startswith(f"{content.path}: step 30, ") and lines[1].startswith("56 queries")
    assert lines[3].split() == ["all", "keys", "alike", f"{log2(21):.2f}", "10.0"]
    order = sorted(range(4), key=lambda i: -numbers[0, i, 1])[:3]
    rows = [numbers.mean(1)] + [numbers[:, i] for i in order]
    names = ["mean of 4 heads"] + [f"layer {i // 2 + 1} head {i % 2 + 1}" for i in order]
    for i, line in enumerate(lines[4:20]):
        name, part = names[i // 4], list(maps.PARTS)[i % 4]
        assert line.startswith(name) and line[25:].startswith(part)
        wanted = rows[i // 4][i % 4].tolist()
        assert line.split()[-3:] == [f"{wanted[0]:.2f}", f"{wanted[1]:.1f}", f"{wanted[2]:.2f}"]
    assert lines[20].startswith("the paper")
    rows, titles = shown["terms"]
    assert_close(rows[:, 0], p.flatten(1, 2).mean(1), "figure 7, all heads")
    assert_close(rows[:, 1:], p.flatten(1, 2)[:, order], "figure 7, the widest")
    assert [title.split(":")[0] for title in titles] == names

    rows, labels, titles, title = shown["text"]
    at_end = maps.averages(model, valid[None, :334], 1)[0].flatten(0, 1)[order]
    assert_close(rows, at_end, "figure 6 from the beginning of the split", 1e-5)
    written = text.read_bytes()[10_800 + 313 : 10_800 + 335].decode()  # 90% is training
    *wanted, target = written.replace(" ", "·").replace("\n", "¶")
    assert labels == wanted and title.endswith(f"is {target}")
    assert f"position 333: {''.join(wanted)}, next {target}" in lines
    assert [title.split(":")[0] for title in titles] == names[1:]

    request.getfixturevalue("no_figures")
    assert maps.main(["--checkpoint", str(run / "best.pt"), *flags]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_default_position_is_the_middle(run, tmp_path, capsys, no_figures):
    assert maps.main(["--checkpoint", str(run), *FLAGS, "--out", str(tmp_path)]) == 0
    assert "\nposition 300: " in capsys.readouterr().out


def failure(capsys, status):
    """What a mistake must look like: status 1 and exactly one line on stderr."""
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert status == 1 and len(error) == 1 and error[0].startswith("attention_maps.py: "), error
    return error[0]


@pytest.mark.parametrize("flags, message", [
    (("--checkpoint", "{tmp}/nothing"), "no checkpoint at {tmp}/nothing; "),
    (("--checkpoint", "{tmp}"), "no checkpoint at {tmp}; "),
    (("--checkpoint", "{text}"), "is damaged or no checkpoint of train.py"),
    (("--memory", "0"), "must be at least 1, got 0 and 50"),
    (("--queries", "-3"), "must be at least 1, got 20 and -3"),
    (("--memory", "68"), "need 601 tokens of the validation split, it has 600"),
    (("--queries", "1" + 30 * "0"), "of the validation split, it has 600"),
    (("--position", "19"), "--position must be 20 to 598, "),
    (("--position", "599"), "--position must be 20 to 598, "),
    (("--position", "-1"), "--position must be 20 to 598, "),
    (("--memory", "long"), "argument --memory: invalid int value: 'long'"),
    (("--position", "nan"), "argument --position: invalid int value: 'nan'"),
    (("--queries", "1.5"), "argument --queries: invalid int value: '1.5'"),
    (("--size", "tiny"), "unrecognized arguments: --size tiny"),
    (("--out", "{text}"), "File exists")])
def test_a_mistake_gets_one_line(run, text, tmp_path, capsys, flags, message):
    """Status 1, and no figure and no folder is made."""
    flags = [flag.format(tmp=tmp_path, text=text) for flag in flags]
    status = maps.main(["--checkpoint", str(run), *FLAGS, "--out", str(tmp_path / "new"), *flags])
    assert message.format(tmp=tmp_path) in failure(capsys, status)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flags", [("--memory", "67"), ("--position", "598"), ("--position", "20")])
def test_the_last_that_is_no_mistake(run, tmp_path, no_figures, flags):
    status = maps.main(["--checkpoint", str(run), *FLAGS, "--out", str(tmp_path), *flags])
    assert status == 0 and len(list(tmp_path.glob("*.png"))) == 3


@pytest.mark.slow
def test_without_a_checkpoint_one_is_trained_once(text, tmp_path, monkeypatch, capsys):
    """Refused before it is trained; stopped; gone on with; then only used."""
    here, asked, real = tmp_path / "here", [], maps.command_line.parse
    load = maps.corpora.load

    def parse(argv, *others):  # 30 steps of a tiny model in place of a minute
        asked.append(argv)
        return real([*TINY, *argv] if "--resume" in argv else [
            *TINY, "--steps", "30", "--text", str(text), *argv[2:]], *others)

    monkeypatch.setattr(maps, "HERE", here)
    monkeypatch.setattr(maps.command_line, "parse", parse)
    monkeypatch.setattr(maps.corpora, "load", lambda name, **options: load(
        text if name == "stdlib" else name, **options))
    assert "it has 600" in failure(capsys, maps.main(["--memory", "68"])) and not asked

    step, calls = train.train_step, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", interrupted)
    assert maps.main(FLAGS) == 130 and not list(here.glob("*.png"))
    assert "the same command goes on" in capsys.readouterr().err
    assert maps.main(FLAGS) == 0
    assert asked == [["--minutes", "1", "--out", str(here)], ["--resume", "--out", str(here)]]
    assert len(calls) == 30 and len(list(here.glob("figure*.png"))) == 3
    first = capsys.readouterr().out
    assert maps.main(FLAGS) == 0 and len(asked) == 2
    assert capsys.readouterr().out == first[first.index(f"{here}/best.pt: step 30"):]
