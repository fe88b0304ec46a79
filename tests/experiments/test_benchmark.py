"""What is compared is equal, every call does its work, and what is printed was measured.

    pytest tests/experiments/test_benchmark.py
"""
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import assert_close, gradients, randomized
from training import fast

benchmark, baselines, parts, common, table9 = map(import_module, (
    "benchmark", "baselines", "benchmark_parts", "common", "table9_eval_speed"))
lesson_5 = import_module("05_full_model")


# ---- benchmark.py -------------------------------------------------------------------------------


def same_weights(config):
    """Our model and the plain form of it, float64, with the same random weights."""
    ours, theirs = randomized(lesson_5.TransformerXL(config)), baselines.Plain(config).double()
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
        assert_close(other.T, loss, "the losses", 1e-5)  # its cross entropy is float32
    logits, _ = ours(x, memory)
    assert_close(theirs(x.T, past)[0].transpose(0, 1), logits, "the logits", 1e-5)
    found = torch.autograd.grad(loss.sum(), [ours.u, ours.layers[0].attention.W_kR.weight])
    wanted = torch.autograd.grad(other.sum(), [theirs.u, theirs.layers[0].r_net.weight])
    assert_close(found[0][0], wanted[0], "the gradient into u", 1e-5)
    assert_close(found[1], wanted[1], "the gradient into W_kR", 1e-5)


@pytest.mark.parametrize("make", [benchmark.Ours, baselines.make], ids=["ours", "plain"])
def test_every_call_does_its_work(make):
    """A step changes the weights; evaluation and generation change nothing but their memory."""
    made = make(benchmark.SIZES["tiny"], "float32", "cpu")
    before = [p.detach().clone() for p in made.model.parameters()]
    made.evaluate(), made.generate()
    assert all(a.equal(b) for a, b in zip(before, made.model.parameters()))
    made.step(), made.step()
    assert not all(a.equal(b) for a, b in zip(before, made.model.parameters()))
    assert not torch.equal(made.evaluate(), made.evaluate())


def test_what_a_token_reads_by_hand():
    """N = 2, D = 2, HC = 3, V = 5, FF = 4, M = 6: K = 7; the weights are counted one by one."""
    config = lesson_5.Config(5, n_layer=2, d_model=2, n_head=3, d_head=1, d_inner=4, mem_len=4)
    size = benchmark.Size(config, batch=1, segment=2, eval_segment=2, eval_mem_len=6)
    read = [p.numel() for name, p in lesson_5.TransformerXL(config).named_parameters()
            if "W_kR" not in name]
    positions = 2 * 7 * 3  # of all layers: keys, values, distances
    assert benchmark.bytes_of_a_token(size, "float32") == 4 * (sum(read) + 3 * positions)
    size = replace(size, eval_batch=5)  # each lane has keys and values of its own
    assert benchmark.bytes_of_a_token(size, "bf16") == 2 * (sum(read) + 11 * positions)


@pytest.mark.parametrize("what", ["train", "eval"])
def test_the_products_are_those_that_the_model_makes(what, monkeypatch):
    """Their operations are what torch counts in a forward pass with a full memory."""
    monkeypatch.setattr(fast, "BLOCK", 4)
    size = replace(benchmark.SIZES["tiny"], eval_segment=8, batch=4, micro_batch=2)
    made, counter = benchmark.Ours(size, "float32", "cpu"), FlopCounterMode(display=False)
    x = made.tokens(size.micro_batch, size.segment)
    if what == "train":
        made.train(True)
        memory = made.model(x)[1]
        with counter:
            made.model(x, memory, x)
        parts, projected = 2, 2 * 2 * (16 + 16) * 32 * 32  # of R, in two layers
    else:
        made.train(False)
        with counter:
            made.evaluate()
        parts = 1
        projected = 0
    wanted = sum(2 * math.prod(z) for z in benchmark.products(size, what))
    assert parts * (counter.get_total_flops() - projected) == wanted


@pytest.mark.parametrize("what, tokens, others", [
    ("train", 32, 32), ("eval", 32, 8), ("generate", 1, 1), ("window", 32, 1)])
def test_a_line_for_each_implementation(what, tokens, others, capsys, monkeypatch):
    """The middle of three repetitions after the warm-up, for each token, and the ratio."""
    name = "window" if what == "window" else "plain"
    in_a_row = 1 if what == "window" else tokens // others
    clock, now = {"ours": iter([9, 9, 2, 4, 3]), name: iter(
        z for z in (9, 9, 12, 12, 12) for _ in range(in_a_row))}, [0.0]

    def load(source):
        assert source in ("ours", str(Path("plain.py").resolve()), "window")

        def call():
            now[0] += next(clock["ours" if source == "ours" else name])
        return lambda *_: SimpleNamespace(**{benchmark.METHODS[what]: call})

    def limit(*_):
        return 6e9 * tokens, 12e9, "the work"

    def peak(function, source, method, size, dtype, device):
        assert function is benchmark.peak_memory and method == benchmark.METHODS[what]
        assert size.eval_segment == {"window": {"ours": 32, "window": 1}, "eval": {"ours": 32}}.get(
            what, {}).get(source, 8) and (dtype, device) == ("float32", "cpu")
        return 0.25

    monkeypatch.setattr(benchmark, "in_new_process", peak)
    monkeypatch.setattr(parts, "now", lambda device: now[0])
    monkeypatch.setattr(benchmark, "IN_A_ROW", 1)
    monkeypatch.setattr(benchmark, "limit_of_products", limit)
    monkeypatch.setattr(benchmark, "limit_of_reading", limit)
    monkeypatch.setattr(benchmark, "load", load)
    against = [] if what == "window" else ["--against", "plain.py"]
    assert benchmark.main(["--what", what, "--size", "tiny", "--repetitions", "3", "--threads", "1",
                           *against]) == 0
    _, line, ours, other = capsys.readouterr().out.splitlines()
    unit = "GB/s" if what == "generate" else "GFLOP/s"
    assert line == "limit: the work"
    assert ours.startswith("ours ") and f"{1000 * 3 / tokens:.3f} ms a token" in ours
    for rate, found in ((6 * tokens / 3, ours), (6 * others / 12, other)):
        assert f" {rate:.1f} {unit}, {rate / 12:4.0%} of the limit " in found
    assert other.startswith(f"{name} ") and f"{1000 * 12 / others:.3f} ms a token" in other
    assert other.endswith(f"ours is {4 * tokens // others}.00 times as fast")


def test_the_window_reads_all_of_it_and_keeps_the_last_position():
    """Its fused, shortened form predicts what all positions of all layers, masked, predict."""
    size = replace(benchmark.SIZES["tiny"], eval_mem_len=7, eval_batch=30)
    model, last = randomized(baselines.SlidingWindow(size, "float32", "cpu")).float(), []
    model.layers[-1].norm2.register_forward_hook(lambda *given: last.append(given[2]))
    torch.manual_seed(3)
    found = model.evaluate()
    torch.manual_seed(3)
    h = model.embedding(torch.randint(256, (30, 7))) + model.position
    for layer in model.layers:
        h = layer(h, src_mask=torch.ones(7, 7).triu(1).bool())
    assert last[0].shape == (30, 1, 32)
    assert_close(last[0], last[1][:, -1:], "the last hidden state", 1e-4)
    assert found.tolist() == (h[:, -1] @ model.embedding.weight.T).argmax(-1).tolist()


# ---- the smaller comparisons --------------------------------------------------------------------

@pytest.mark.parametrize("name", parts.ATTENTION)
def test_every_form_is_lesson_5s_attention(name):
    """Outputs before W_o and all gradients."""
    B, H, T, C, K = 2, 3, 3, 4, 8
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C))]
    mask = lesson_5.attention_mask(T, K - T, K - T, False)
    attention = lesson_5.RelativeAttention(lesson_5.Config(
        9, n_layer=1, d_model=H * C, n_head=H, d_head=C, d_inner=5))
    wanted = attention.attend(*leaves, mask)
    found = parts.ATTENTION[name](attention, *leaves, mask)
    assert_close(found, wanted, name, 1e-10)
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves)):
        assert_close(a, b, f"{name}: gradient", 1e-10)


@pytest.mark.parametrize("what, forms", [("parts", 10), ("reading", 7)])
def test_a_line_for_each_form(what, forms, capsys, monkeypatch):
    """The middle of its repetitions, and the first form's over it."""
    def measured(calls, *_):
        return {name: (call(), [2 / i, 4 / i, 3 / i])[1]
                for i, (name, call) in enumerate(calls.items(), 1)}
    monkeypatch.setattr(parts, "measure", measured)
    assert benchmark.main(["--what", what, "--size", "tiny", "--dtype", "bf16"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert sum("ms" in line for line in lines) == forms
    for number, name in ((1, lines[1]), (2, lines[2])):
        assert f" {3000 / number:.2f} ms {number}.00 times as fast" in name
        assert name.endswith("MB kept") == (what == "parts")


def test_what_arithmetic_allows_in_table_9():
    """By hand for N = 1, D = HC = 2, FF = 3."""
    config = lesson_5.Config(5, n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=3)
    assert table9.allowed(config, 10, T=2) == 10 * (28 + 10 * 2) / (28 + 3 * 12 * 2)


def test_table_9_stops_where_memory_ends(monkeypatch):
    """What fitted counts; if nothing did, one line says so."""
    def measure(calls, *_):
        lanes = calls["ours"].__self__.size.eval_batch
        if lanes >= 4:
            raise torch.OutOfMemoryError
        return {side: [1.0] for side in calls}
    monkeypatch.setattr(benchmark, "measure", measure)
    given = SimpleNamespace(lanes=[1, 4], dtype="float32", device="cpu", repetitions=1)
    assert table9.milliseconds_a_token(benchmark.SIZES["tiny"], given)["window"] == [1000]
    given.lanes = [4, 8]
    with pytest.raises(ValueError, match="length 32 already with 4 lanes"):
        table9.milliseconds_a_token(benchmark.SIZES["tiny"], given)


@pytest.mark.parametrize("left", [(), ("checkpoint.pt",), ("previous.pt",)])
def test_a_run_goes_on_from_what_is_left(left, tmp_path, monkeypatch):
    """A kill between two renames leaves previous.pt alone; a new folder has no checkpoint."""
    for name in (*left, "metrics.tsv"):
        (tmp_path / name).touch()
    calls = []
    monkeypatch.setattr(common.train, "command", calls.append)
    common.train_run(tmp_path, ["--steps", "6"])
    assert [call.count("--resume") for call in calls] == [1 if left else 0]
