"""What benchmark.py measures with, and its comparisons inside our own model.

    python experiments/benchmark.py --what parts      what each part of support/fast.py brings in
                                                      training: attention (lesson 5's first, each
                                                      line one change more), its projections,
                                                      dropout, the order of dropout and ReLU
    python experiments/benchmark.py --what reading    and without gradients: the layout of weights
                                                      and distances, queries in blocks
    python experiments/benchmark.py --what softmax    what the adaptive softmax saves
    python experiments/benchmark.py --what dtype      does bf16 cost anything?

parts and reading compare forms that give the same numbers and gradients, which the tests hold.
softmax trains one lane with a softmax over all words, and with the adaptive one, on a CPU in
float32; Adam's moments, 8 more bytes for each parameter, are not there (about a minute, 10 GB).

dtype makes the same run of train.py twice, in float32 and with bf16 autocast: matrix products in
bf16; weights, norms, loss and optimizer in float32.  Same seed, so the same first weights, dropouts
and order of the text.  2,000 steps of the default model with Adam; further flags are train.py's.
The runs are kept in runs/dtype-*, and a command that was stopped goes on.
"""
import math
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode

import common
import optimizers
from support import fast
from support.progress import progress

lesson_5 = common.lesson_5
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


# ---- how time and memory are measured -----------------------------------------------------------

def now(device):
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(calls, repetitions, device, in_a_row=None):
    """{name: call} -> {name: seconds of a call in each repetition}, turn by turn after a warm-up.

    A repetition is the mean of so many calls in a row, {name: number}, else of one.
    """
    seconds = {name: [] for name in calls}
    for i in progress(range(repetitions + 2), "repetition", repetitions + 2):
        for name, call in calls.items():
            start = now(device)
            n = in_a_row[name] if in_a_row else 1
            for _ in range(n):
                call()
            if i >= 2:
                seconds[name].append((now(device) - start) / n)
    return seconds


def compare(title, calls, given, notes=None):
    """Print for each call, {name: call}, its milliseconds, and what the notes say of it."""
    seconds = measure(calls, given.repetitions, given.device)
    middles = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(middles.values()))
    print(title)
    for name, middle in middles.items():
        print(f"  {name:30} {1000 * middle:7.2f} ms  {first / middle:5.2f} times as fast"
              f"{notes[name] if notes else ''}")


def resident_peak():
    """The most memory that this process has had resident, in GB (Linux, macOS)."""
    if sys.platform == "darwin":
        import resource  # which Windows has not
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    # not getrusage: on Linux a new process begins with the peak of the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6


# ---- --what parts: attention is (module, q, k, value, Q, u, v, hidden), as lesson 5's attend -----

def shift_as_a_view(attention, q, k, value, Q, u, v, hidden):
    """Lesson 5's attend with one change."""
    content = (q + u[:, None]) @ k.mT
    position = fast.shift_padded((q + v[:, None]) @ F.pad(Q, (0, 0, 1, 0)).mT)
    score = ((content + position) / math.sqrt(attention.C)).masked_fill(hidden, -math.inf)
    return (attention.dropout_attention(score.softmax(-1)) @ value).transpose(1, 2).flatten(2)


def heads_in_front(attention, q, k, value, Q, u, v, hidden):
    """The scale on q and all lanes of a head in one product, too: fast.attend, but not in place."""
    (B, _, T, C), Q = q.shape, F.pad(Q, (0, 0, 1, 0))
    q, k, value = (z.transpose(0, 1) for z in (q, k, value))
    q, u, v = (z / math.sqrt(C) for z in (q, u[:, None, None], v[:, None, None]))
    content = (q + u) @ k.mT
    position = fast.shift_padded(((q + v).flatten(1, 2) @ Q.mT).unflatten(1, (B, T)))
    score = (content + position).masked_fill(hidden, -math.inf)
    return (attention.dropout_attention(score.softmax(-1)) @ value).permute(1, 2, 0, 3).flatten(2)


ATTENTION = {
    "lesson 5": lesson_5.RelativeAttention.attend,
    "+ shift as a view": shift_as_a_view,
    "+ heads in front, scale on q": heads_in_front,
    "+ in place: fast.attend": fast.attend}
FORWARD = {"lesson 5": lesson_5.RelativeAttention.forward, "fast.forward": fast.forward}
DROPOUT = {"nn.Dropout": nn.Dropout(0.1), "fast.Dropout": fast.Dropout(0.1)}
RELU = {"ReLU, then dropout": nn.Sequential(nn.ReLU(), fast.Dropout(0.1)),
        "fast.DropoutReLU": fast.DropoutReLU(0.1)}


def feed_forward(inner):
    """W_2 inner(W_1 h), as a function of leaves."""
    return lambda h, W_1, W_2: inner(h @ W_1.T) @ W_2.T


def compare_training(title, forms, inputs, given):
    """Print a line for each form: forward and backward, and MB kept between them."""
    calls = {name: lambda form=form: form(*inputs).sum().backward()
             for name, form in forms.items()}
    compare(title, calls, given, {
        name: f"  {common.kept_for_backward(lambda: form(*inputs)) / 1e6:6.1f} MB kept"
        for name, form in forms.items()})


def compare_parts(size, given):
    """Four comparisons in training, in the size's shapes."""
    c, B, T = size.config, size.batch, size.segment
    H, C, D, FF, K = c.n_head, c.d_head, c.d_model, c.d_inner, c.mem_len + T
    dtype = DTYPES[given.dtype]

    def leaf(*shape):
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def heads(*shape):  # as lesson 5 takes them apart
        return leaf(*shape, H, C).transpose(-3, -2)
    attention = lesson_5.RelativeAttention(c)
    hidden = lesson_5.hidden_keys(T, c.mem_len, c.mem_len, False)
    compare_training(
        "attention, without its projections",
        {name: partial(form, attention) for name, form in ATTENTION.items()},
        [heads(B, T), heads(B, K), heads(B, K), heads(K), leaf(H, C), leaf(H, C), hidden], given)
    attention.attend = MethodType(fast.attend, attention.to(dtype))
    compare_training(
        "attention with its projections",
        {name: partial(form, attention) for name, form in FORWARD.items()},
        [leaf(B, T, D), torch.randn(B, c.mem_len, D, dtype=dtype), torch.randn(K, D, dtype=dtype),
         leaf(H, C), leaf(H, C), hidden], given)
    compare_training("dropout of the feed-forward network", DROPOUT, [leaf(B, T, FF)], given)
    compare_training("feed-forward network",
                     {name: feed_forward(form) for name, form in RELU.items()},
                     [leaf(B, T, D), leaf(FF, D), leaf(D, FF)], given)


# ---- --what reading -----------------------------------------------------------------------------

def layer_that_reads(size, block, dtype):
    """A call that reads eval_segment tokens, with one layer, the queries in such blocks."""
    config = replace(size.config, n_layer=1, mem_len=size.eval_mem_len, same_length=True)
    reader = fast.Reader(lesson_5.TransformerXL(config).eval())
    x, before = (torch.zeros(1, n).long() for n in (size.eval_segment, size.eval_mem_len))

    def read(x, memory=None):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return reader(x, memory, last_only=True)[1]
    memory = read(before)

    def call():
        nonlocal memory
        fast.BLOCK = block
        memory = read(x, memory)
    return call


def reading_forms(size, dtype):
    """{what: {form: call}}: for one token in all layers, more than caches hold; a segment."""
    c, K = size.config, size.eval_mem_len + 1

    def several(*shape):
        return [torch.randn(shape).to(dtype) for _ in range(c.n_layer)]
    (row, *_), up = several(1, c.d_model), several(c.d_inner, c.d_model)
    q, *_ = several(c.n_head, 1, c.d_head)
    # windows of something longer, as in a buffer; the first form is as W_kR makes them
    whole = [z.transpose(0, 1).mT for z in several(K + 30, c.n_head, c.d_head)]
    distances, keys = ([z[..., -K:] for z in form] for form in (
        whole, [z.contiguous() for z in whole]))
    return {
        "a row times W_1": {"(out, in)": lambda z=up: [row @ w.t() for w in z],
                            "(in, out)": lambda z=[w.t().contiguous() for w in up]: [
                                row @ w for w in z]},
        "scores of one query": {
            "Q (K, H, C)": lambda: [q @ z for z in distances],
            "Q (H, K, C)": lambda z=[z.mT.contiguous().mT[..., -K:] for z in whole]: [
                q @ k for k in z],
            "Q (H, C, K)": lambda: [q @ z for z in keys]},
        f"{size.eval_segment} tokens in a layer": {
            f"blocks of {n}": layer_that_reads(size, n, dtype)
            for n in (size.eval_segment, fast.BLOCK)}}


@torch.no_grad()
def compare_reading(size, given):
    """Three comparisons without gradients."""
    for title, forms in reading_forms(size, DTYPES[given.dtype]).items():
        compare(title, forms, given)


# ---- --what softmax -----------------------------------------------------------------------------

class Largest(TorchDispatchMode):
    """Keeps the shape of the largest tensor that is made inside the block and has a row a token."""

    shape = torch.Size()

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for z in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(z) and self.tokens in z.shape:
                self.shape = max(self.shape, z.shape, key=torch.Size.numel)
        return result


def cost_of_a_step(config, threads):
    """One lane of T = M tokens as rare as 1 / rank, forward and backward.

    Returns parameters, peak memory in GB, seconds (the middle of three), largest shape.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, T = fast.prepare(lesson_5.TransformerXL(config)), config.mem_len
    parameters = sum(p.numel() for p in model.parameters())
    ranks = 1 / torch.arange(1.0, config.vocab_size + 1)
    x, y = torch.multinomial(ranks, 2 * T, replacement=True).view(2, 1, T)
    memory = [torch.randn(1, T, config.d_model) for _ in range(config.n_layer)]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        loss, _ = model(x, memory, y)
        loss.mean().backward()
        times.append(time.perf_counter() - start)
        model.zero_grad()
    peak = resident_peak()
    with Largest(T) as largest:
        model(x, memory, y)[0].mean().backward()
    return parameters, peak, sorted(times)[1], tuple(largest.shape)


def compare_softmax(size, given):
    """Print a line for the full softmax and for the adaptive one."""
    config = size.config
    if not config.cutoffs:
        raise ValueError(f"the model of --size {given.size} has no adaptive softmax")
    print(f"N {config.n_layer}, D {config.d_model}, T = M = {config.mem_len}, B 1, "
          f"{config.vocab_size:,} words; {given.threads} threads")
    for name, c in (("full", replace(config, cutoffs=(), div_val=1)), ("adaptive", config)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a peak of its own
            parameters, peak, seconds, shape = pool.apply(cost_of_a_step, (c, given.threads))
        print(f"{name:8}  {parameters:11,} parameters  {seconds:5.2f} s forward and backward  peak "
              f"{peak:.1f} GB (weights and gradients {8 * parameters / 1e9:.1f})  "
              f"largest activation {shape}, {4 * math.prod(shape) / 1e6:.0f} MB")


# ---- --what dtype -------------------------------------------------------------------------------

def compare_dtypes(given, flags):
    """Two runs of train.py with these flags: the last validations, and how far the curves part."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, curves = figure.subplots(), []
    for name, style in (("float32", "-"), ("bf16", "--")):
        rows = optimizers.train_until_done(common.RUNS / f"dtype-{name}", [
            *optimizers.FLAGS["adam"], "--steps", "2000", "--device", given.device, *flags,
            "--dtype", name])
        curve = [(int(row["step"]), float(row["train"])) for row in rows if row["train"]]
        axes.plot(*zip(*curve), style, label=name)
        curves.append(curve)
        valid = [row["valid"] for row in rows if row["valid"]][-1]
        print(f"{name:8} validation {valid} after {rows[-1]['step']} steps, "
              f"{float(rows[-1]['seconds']):.0f} s of training")
    rest = [abs(a - b) for (_, a), (_, b) in zip(*curves)][len(curves[0]) // 10 :]
    print(f"largest distance of the training curves after the first tenth: {max(rest):.4f}")
    axes.set(xlabel="step", ylabel="training loss (bits per byte)", xlim=(0, None),
             ylim=(0, None), title="The same run in two dtypes")
    axes.grid(alpha=0.4)
    axes.legend()
    common.save_figure(figure, common.RUNS / "dtype.png")
