"""What benchmark.py measures with, and its comparisons inside our own model.

    python experiments/benchmark.py --what parts      what each part of training/fast.py brings in
                                                      training: attention (lesson 5's first, each
                                                      line one change more), its projections,
                                                      dropout, the order of dropout and ReLU
    python experiments/benchmark.py --what reading    and without gradients: the layout of weights
                                                      and distances, queries in blocks
    python experiments/benchmark.py --what softmax    what the adaptive softmax saves

parts and reading compare forms that give the same numbers and gradients.  softmax trains one lane
with a softmax over all words, and with the adaptive one, on a CPU in float32, without Adam's
moments, 8 more bytes for each parameter (about a minute, 10 GB).
"""
import math
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import common
from common import lesson_5, presets, train
from training import fast
from support.progress import progress

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


# ---- how time and memory are measured -----------------------------------------------------------

def long_segments(size):
    """The size with the T that train.py's `evaluate` reads with, a multiple of its own."""
    T = size.eval_segment
    return replace(size, eval_segment=train.reading_length(size) // T * T)


def now(device):
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(calls, repetitions, device, in_a_row=None):
    """{name: call} -> {name: seconds of a call in each repetition}, turn by turn after a warm-up.

    A repetition is the mean of so many calls in a row, {name: number}, else one call.
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


def in_new_process(function, *arguments):
    """What a function gives in a process of its own, so that its peak of memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def resident_peak():
    """The most memory that this process has had resident, in GB (Linux, macOS)."""
    if sys.platform == "darwin":
        import resource  # which Windows has not
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    # not getrusage: on Linux a new process begins with the peak of the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6


# ---- --what parts: attention is (module, q, k, value, k_R, u, v, mask), as lesson 5's attend -----

def shift_as_a_view(attention, q, k, value, k_R, u, v, mask):
    """Lesson 5's attend with one change."""
    content = (q + u[:, None]) @ k.mT
    position = fast.shift_padded((q + v[:, None]) @ F.pad(k_R, (0, 0, 1, 0)).mT)
    score = ((content + position) / math.sqrt(attention.C)).masked_fill(mask, -math.inf)
    return (attention.dropout_attention(score.softmax(-1)) @ value).transpose(1, 2).flatten(2)


def heads_in_front(attention, q, k, value, k_R, u, v, mask):
    """The scale on q and all lanes of a head in one product: fast.Attention's, not in place."""
    (B, _, T, C), k_R = q.shape, F.pad(k_R, (0, 0, 1, 0))
    q, k, value = (z.transpose(0, 1) for z in (q, k, value))
    q, u, v = (z / math.sqrt(C) for z in (q, u[:, None, None], v[:, None, None]))
    content = (q + u) @ k.mT
    position = fast.shift_padded(((q + v).flatten(1, 2) @ k_R.mT).unflatten(1, (B, T)))
    score = (content + position).masked_fill(mask, -math.inf)
    return (attention.dropout_attention(score.softmax(-1)) @ value).permute(1, 2, 0, 3).flatten(2)


ATTENTION = {
    "lesson 5": lesson_5.RelativeAttention.attend,
    "+ shift as a view": shift_as_a_view,
    "+ heads in front, scale on q": heads_in_front,
    "+ in place: fast.Attention": fast.Attention.attend}


def feed_forward(inner, h, W_1, W_2):
    """The feed-forward network with this between its products."""
    return inner(h @ W_1.T) @ W_2.T


def training_forms(size, dtype):
    """What is compared, its forms, and their inputs, in the size's shapes."""
    c, B, T, M = size.config, size.batch, size.segment, size.config.mem_len
    H, C, D, FF, K = c.n_head, c.d_head, c.d_model, c.d_inner, M + T
    numbers = partial(torch.randn, dtype=dtype)
    leaf = partial(numbers, requires_grad=True)

    def heads(*shape):  # as lesson 5 takes them apart
        return leaf(*shape, H, C).transpose(-3, -2)
    attention = lesson_5.RelativeAttention(c).to(dtype)
    u, v, mask = leaf(H, C), leaf(H, C), lesson_5.attention_mask(T, M, M, False)
    yield "attention, without its projections", ATTENTION, [
        attention, heads(B, T), heads(B, K), heads(B, K), heads(K), u, v, mask]
    # both call the fast attend, so that they differ in the projections alone
    forward = {"lesson 5": lesson_5.RelativeAttention.forward,
               "fast.Attention": fast.Attention.forward}
    yield "attention with its projections", forward, [
        fast.Attention(attention), leaf(B, T, D), numbers(B, M, D), numbers(K, D), u, v, mask]
    dropout = {"nn.Dropout": nn.Dropout(0.1), "fast.Dropout": fast.Dropout(0.1)}
    yield "dropout of the feed-forward network", dropout, [leaf(B, T, FF)]
    relu = {"ReLU, then dropout": nn.Sequential(nn.ReLU(), fast.Dropout(0.1)),
            "fast.DropoutReLU": fast.DropoutReLU(0.1)}
    relu = {name: partial(feed_forward, inner) for name, inner in relu.items()}
    yield "feed-forward network", relu, [leaf(B, T, D), leaf(FF, D), leaf(D, FF)]


def compare_parts(size, given):
    """Four comparisons in training: forward and backward, and MB kept between them."""
    with torch.device(given.device):
        for title, forms, inputs in training_forms(size, DTYPES[given.dtype]):
            calls = {name: lambda form=form: form(*inputs).sum().backward()
                     for name, form in forms.items()}
            compare(title, calls, given, {
                name: f"  {common.kept_for_backward(lambda: form(*inputs))[0] / 1e6:6.1f} MB kept"
                for name, form in forms.items()})


# ---- --what reading -----------------------------------------------------------------------------

def multiply(a, matrices):
    """A product with each."""
    return [a @ z for z in matrices]


def layer_that_reads(size, block, dtype):
    """A call that reads eval_segment tokens, with one layer, the queries in such blocks."""
    config = replace(size.config, n_layer=1, mem_len=size.eval_mem_len, same_length=True)
    reader, memory = fast.prepared(lesson_5.TransformerXL(config).eval()), None

    def call(T=size.eval_segment):
        nonlocal memory
        fast.BLOCK, x = block, torch.zeros(1, T).long()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            memory = reader(x, memory, last_only=True)[1]
    call(size.eval_mem_len)  # fills the memory
    return call


def reading_forms(size, dtype):
    """{what: {form: call}}: for one token in all layers, more than caches hold; a segment."""
    c, K = size.config, size.eval_mem_len + 1
    H, C, D, layers = c.n_head, c.d_head, c.d_model, range(c.n_layer)
    numbers = partial(torch.randn, dtype=dtype)
    row, W_1 = numbers(1, D), [numbers(c.d_inner, D).t() for _ in layers]
    # k_R in windows of something longer, as in a buffer; the first form is as W_kR makes it
    q, k_R = numbers(H, 1, C), [numbers(K + 30, H, C).permute(1, 2, 0) for _ in layers]
    forms = {"k_R (K, H, C)": k_R, "k_R (H, K, C)": [z.mT.contiguous().mT for z in k_R],
             "k_R (H, C, K)": [z.contiguous() for z in k_R]}
    return {
        "a row times W_1": {
            "(out, in)": partial(multiply, row, W_1),
            "(in, out)": partial(multiply, row, [z.contiguous() for z in W_1])},
        "scores of one query": {
            name: partial(multiply, q, [z[..., -K:] for z in form])
            for name, form in forms.items()},
        f"{size.eval_segment} tokens in a layer": {
            f"blocks of {n}": layer_that_reads(size, n, dtype)
            for n in (size.eval_segment, fast.BLOCK)}}


@torch.no_grad()
def compare_reading(size, given):
    """Three comparisons without gradients."""
    with torch.device(given.device):
        for title, forms in reading_forms(long_segments(size), DTYPES[given.dtype]).items():
            compare(title, forms, given)


# ---- --what softmax -----------------------------------------------------------------------------

def cost_of_a_step(config, threads):
    """Forward and backward of one lane of T = M tokens -> parameters, peak memory in GB, seconds
    (the middle of three), shape of the largest tensor with a row a token that autograd keeps.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, T = lesson_5.TransformerXL(config), config.mem_len
    fast.prepared(model)
    x, y = common.random_tokens(config.vocab_size, 2, 1, T)
    memory = [torch.randn(1, T, config.d_model) for _ in range(config.n_layer)]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(x, memory, y)[0].mean().backward()
        times.append(time.perf_counter() - start)
        model.zero_grad()
    peak, (_, shapes) = resident_peak(), common.kept_for_backward(lambda: model(x, memory, y))
    largest = max((shape for shape in shapes if T in shape), key=torch.Size.numel)
    return presets.count_parameters(config), peak, statistics.median(times), tuple(largest)


def compare_softmax(size, given):
    """Print a line for the full softmax and for the adaptive one."""
    config = size.config
    if not config.cutoffs:
        raise ValueError(f"the model of --size {given.size} has no adaptive softmax")
    print(f"N {config.n_layer}, D {config.d_model}, T = M = {config.mem_len}, B 1, "
          f"{config.vocab_size:,} words; {given.threads} threads")
    for name, c in (("full", replace(config, cutoffs=(), div_val=1)), ("adaptive", config)):
        parameters, peak, seconds, shape = in_new_process(cost_of_a_step, c, given.threads)
        print(f"{name:8}  {parameters:11,} parameters  {seconds:5.2f} s forward and backward  peak "
              f"{peak:.1f} GB (weights and gradients {8 * parameters / 1e9:.1f})  "
              f"largest activation {shape}, {4 * math.prod(shape) / 1e6:.0f} MB")
