"""What is compared is equal, every call does its work, and what is printed was measured.

    pytest tests/experiments/test_benchmark.py
"""
import math
import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import assert_close, gradients, randomized

benchmark, plain, sliding_window, parts, number_types, optimizers, softmax_cost, table9 = map(
    import_module, ("benchmark", "plain", "sliding_window", "parts", "number_types", "optimizers",
                    "softmax_cost", "table9_eval_speed"))
lesson_5 = import_module("05_full_model")


# ---- benchmark.py -------------------------------------------------------------------------------


def same_weights(config):
    """Our model and the plain form of it, float64, with the same random weights."""
    ours, theirs = randomized(lesson_5.TransformerXL(config)), plain.Plain(config).double()
    theirs.embedding.weight.data = ours.embedding.weight.data
    theirs.bias.data, theirs.u.data, theirs.v.data = (
        ours.embedding.bias.data, ours.u.data[0], ours.v.data[0])
    theirs.frequency = 10000 ** -(torch.arange(0, config.d_model, 2) / config.d_model).double()
    for a, b in zip(ours.layers, theirs.layers):
        b.qkv_net.weight.data = torch.cat(
            [W.weight for W in (a.attention.W_q, a.attention.W_kE, a.attention.W_v)]).data
        b.r_net.weight.data, b.o_net.weight.data = (
            a.attention.W_kR.weight.data, a.attention.W_o.weight.data)
        for mine, its in ((a.norm_1, b.norm_1), (a.norm_2, b.norm_2), (a.W_1, b.feed_forward[0]),
                          (a.W_2, b.feed_forward[3])):
            its.weight.data, its.bias.data = mine.weight.data, mine.bias.data
    return ours.eval(), theirs.eval()


def test_the_plain_form_gives_our_losses_and_gradients():
    """Several segments with memory, same_length: only the speed may differ."""
    config = lesson_5.Config(11, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=9, mem_len=5,
                             same_length=True)
    ours, theirs = same_weights(config)
    memory, past = None, None
    for T in (4, 3, 6):
        x, y = torch.randint(11, (2, 2, T))
        loss, memory = ours(x, memory, y)
        other, past = theirs(x.T, past, y.T)
        assert_close(other.T, loss, "the losses", 1e-6)  # its cross entropy is float32
    logits, _ = ours(x, memory)
    assert_close(theirs(x.T, past)[0].transpose(0, 1), logits, "the logits", 1e-6)
    found = torch.autograd.grad(loss.sum(), [ours.u, ours.layers[0].attention.W_kR.weight])
    wanted = torch.autograd.grad(other.sum(), [theirs.u, theirs.layers[0].r_net.weight])
    assert_close(found[0][0], wanted[0], "the gradient into u", 1e-5)
    assert_close(found[1], wanted[1], "the gradient into W_kR", 1e-5)


@pytest.mark.parametrize("make", [benchmark.make, plain.make], ids=["ours", "plain"])
def test_every_call_does_its_work(make):
    """A step changes the weights; evaluation and generation change nothing but their memory."""
    made = make(benchmark.SIZES["tiny"], "float32", "cpu")
    before = [p.detach().clone() for p in made.model.parameters()]
    made.evaluate(), made.generate()
    assert all(a.equal(b) for a, b in zip(before, made.model.parameters()))
    made.step(), made.step()
    assert not all(a.equal(b) for a, b in zip(before, made.model.parameters()))
    assert not torch.equal(made.evaluate(), made.evaluate())


def test_operations_by_hand():
    """N = 1, D = HC = 2, FF = 3, V = 5, T = 2, M = 4: K = 6, one lane."""
    config = lesson_5.Config(5, n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=3, mem_len=4)
    size = benchmark.Size(config, batch=1, segment=2, eval_segment=2, eval_mem_len=4)
    layer = 2 * (2 * 2 * 2 + 2 * 2 * 3 + 3 * 2 * 2 * 2 + 3 * 6 * 2)
    assert benchmark.flops(size, "eval") == (2 * (layer + 2 * 2 * 5), 2)
    assert benchmark.flops(size, "train") == (3 * 2 * (layer + 2 * 2 * 5), 2)


@pytest.mark.parametrize("what, tokens", [("train", 32), ("eval", 8), ("generate", 1)])
def test_a_line_for_each_implementation(what, tokens, capsys, monkeypatch):
    """The middle of three repetitions behind the warm-up, for each token, and the ratio."""
    clock, now = {"": iter([9, 9, 2, 4, 3]), "plain.py": iter([9, 9, 12, 12, 12])}, [0.0]

    def load(path):
        def call():
            now[0] += next(clock[path])
        return lambda *_: SimpleNamespace(**{benchmark.METHODS[what]: call})

    monkeypatch.setattr(benchmark, "peak_memory", lambda *_: 0.25)
    monkeypatch.setattr(benchmark, "matmul_rate", lambda *_: 1e9)
    monkeypatch.setattr(benchmark, "now", lambda device: now[0])
    monkeypatch.setattr(benchmark, "IN_A_ROW", dict.fromkeys(benchmark.METHODS, 1))
    monkeypatch.setattr(benchmark, "load", load)
    assert benchmark.main(["--what", what, "--size", "tiny", "--repetitions", "3", "--threads", "1",
                           "--against", "plain.py"]) == 0
    _, ours, other = capsys.readouterr().out.splitlines()
    assert ours.startswith("ours ") and f"{1000 * 3 / tokens:.3f} ms a token" in ours
    assert other.startswith("plain ") and other.endswith("ours is 4.00 times as fast")


def test_the_window_reads_all_of_it_and_keeps_the_last_position():
    """Its fused, shortened form is what attention over the window gives for the last position."""
    size = replace(benchmark.SIZES["tiny"], eval_mem_len=7, eval_batch=3)
    model = randomized(sliding_window.make(size, "float32", "cpu"))
    h = torch.randn(3, 7, 32).double()
    for last_only in (False, True):
        layer = model.layers[0]
        q, (k, value) = layer.W_q(h), layer.W_kv(h).chunk(2, dim=-1)
        q, k, value = (z.view(3, 7, 2, 16).permute(0, 2, 1, 3) for z in (q, k, value))
        score = (q @ k.mT / 4).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        out = (score.softmax(-1) @ value).permute(0, 2, 1, 3).reshape(3, 7, 32)
        wanted = layer.norm_1(h + layer.W_o(out))
        wanted = layer.norm_2(wanted + layer.W_2(layer.W_1(wanted).relu()))
        assert_close(layer(h, last_only), wanted[:, -1:] if last_only else wanted, "a layer", 1e-10)


# ---- the smaller comparisons --------------------------------------------------------------------

@pytest.mark.parametrize("name", parts.ATTENTION)
def test_every_form_is_lesson_5s_attention(name):
    """Outputs before W_o and all gradients."""
    B, H, T, C, K = 2, 3, 3, 4, 8
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C))]
    hidden = lesson_5.hidden_keys(T, K - T, K - T, False)
    attention = lesson_5.RelativeAttention(lesson_5.Config(
        9, n_layer=1, d_model=H * C, n_head=H, d_head=C, d_inner=5))
    wanted = attention.attend(*leaves, hidden)
    found = parts.ATTENTION[name](attention, *leaves, hidden)
    assert_close(found, wanted, name, 1e-10)
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"{name}: gradient", 1e-10)


def test_the_adaptive_softmax_builds_no_row_of_all_words():
    """T = 6, V = 500: the full one has the logits of every token at once; larger tensors without a
    row a token do not count.
    """
    found = {}
    for cutoffs in ((), (20, 100)):
        config = lesson_5.Config(500, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8,
                                 mem_len=6, cutoffs=cutoffs)
        parameters, _, _, found[cutoffs] = softmax_cost.measure(config)
        assert parameters == lesson_5.count_parameters(config)
    assert math.prod(found[()]) == 6 * 500 > 2 * math.prod(found[20, 100])


def test_what_arithmetic_allows_in_table_9():
    """By hand for N = 1, D = HC = 2, FF = 3."""
    config = lesson_5.Config(5, n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=3)
    assert table9.allowed(config, 10, T=2) == 10 * (28 + 10 * 2) / (28 + 3 * 12 * 2)


@pytest.mark.slow
def test_the_distance_of_two_number_types(tmp_path, monkeypatch, capsys):
    """The printed one is that of the two metrics files."""
    monkeypatch.setattr(number_types.lesson_1, "RUNS", tmp_path)
    (tmp_path / "notes.txt").write_text("the cat sat on the mat, and then the other cat. " * 60)
    assert number_types.main(["--steps", "40", "--model", "tiny", "--log-every", "2", "--text",
                              str(tmp_path / "notes.txt"), "--device", "cpu"]) == 0
    printed = re.search("^largest.* ([^ ]+)$", capsys.readouterr().out, re.MULTILINE)[1]
    curves = [[float(row["train"]) for row in number_types.log.read_metrics(
        tmp_path / f"number_types-{dtype}" / "metrics.tsv") if row["train"]]
        for dtype in ("float32", "bf16")]
    wanted = max(abs(a - b) for a, b in zip(*(curve[2:] for curve in curves), strict=True))
    assert float(printed) == pytest.approx(wanted, abs=1e-4) and wanted > 0


def test_adam_and_muon_and_what_a_memory_brings(tmp_path, monkeypatch, capsys):
    """The printed losses are those of the models; a second call trains nothing."""
    monkeypatch.setattr(optimizers.lesson_1, "RUNS", tmp_path)
    monkeypatch.setattr(optimizers, "MEMORIES", (0, 16, 40))
    notes = tmp_path / "notes.txt"
    notes.write_text("the cat sat on the mat, and then the other cat. " * 60)
    argv = ["--seeds", "3", "--steps", "6", "--model", "tiny", "--log-every", "2", "--text",
            str(notes), "--device", "cpu", "--n-tokens", "5", "--dtype", "float32"]
    assert optimizers.main(argv) == 0
    rows = re.findall(r"^(\d+) +(\(c\))? +(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [row[:2] for row in rows] == [("0", ""), ("16", ""), ("40", ""), ("40", "(c)")]
    corpus = optimizers.train.read_corpus({}, optimizers.train.Run(text=str(notes), steps=1))
    for column, name in ((2, "adam"), (3, "muon")):
        content = optimizers.checkpoint.best(tmp_path / "optimizers" / f"{name}-3")
        assert content["run"]["optimizer"] == name
        model, _, _ = optimizers.train.restored(content, "cpu")
        for M, clamped, *_ in rows:
            model.config = replace(model.config, mem_len=int(M), same_length=True,
                                   clamp_len=31 if clamped else 0)  # M + T - 1 = 16 + 16 - 1
            losses, _ = model(corpus.valid[None, :-1].long(), None, corpus.valid[None, 1:].long())
            found = next(row for row in rows if row[:2] == (M, clamped))
            assert float(found[column]) == pytest.approx(losses.mean().item() / math.log(2),
                                                         abs=6e-5)
    monkeypatch.setattr(optimizers.train, "train_step", None)
    assert optimizers.main(argv) == 0
    assert (tmp_path / "optimizers.png").stat().st_size > 10_000
