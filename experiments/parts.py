"""What each part of support/fast.py brings: the plain form, then ours, step by step.

Attention (lesson 5's first, each line one change more), its projections, dropout, and the order of
dropout and ReLU; forward and backward, milliseconds, and what is kept for the gradients, MB.

    python experiments/parts.py                  B 8, T = M = 128, D 256, 4 heads, FF 1024
    python experiments/parts.py --dtype bf16

    python experiments/parts.py --reading        without gradients: 12 layers, D 512, M 2,100

All forms give the same numbers and gradients, which the tests hold.  Median of the repetitions,
turn by turn.
"""
import argparse
import math
import statistics
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support import fast
from support.progress import progress

lesson_5 = import_module("05_full_model")


# ---- the forms: attention is (module, q, k, value, Q, u, v, hidden), as lesson 5's attend --------

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


def compare(title, forms, inputs, repetitions):
    """Print a line for each form: milliseconds of forward and backward, MB kept between them."""
    seconds, kept = {name: [] for name in forms}, {}
    for i in progress(range(repetitions + 3), title, repetitions + 3):
        for name, form in forms.items():
            stored = {}

            def keep(z):
                stored[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
                return z
            if i == 0:  # counted apart: counting takes time
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
                    out = form(*inputs)
                kept[name] = sum(stored.values()) / 1e6
            start = time.perf_counter()
            form(*inputs).sum().backward()
            seconds[name].append(time.perf_counter() - start)
    print(title)
    first = statistics.median(next(iter(seconds.values()))[3:])
    for name, times in seconds.items():
        middle = statistics.median(times[3:])
        print(f"  {name:30} {1000 * middle:7.2f} ms  {first / middle:5.2f} times as fast  "
              f"{kept[name]:6.1f} MB kept")


def layer_that_reads(T, block, dtype, M=2100):
    """A call that reads T tokens after a memory of M, with one layer, queries in such blocks."""
    config = lesson_5.Config(256, n_layer=1, d_model=512, n_head=8, d_inner=2048, mem_len=M,
                             same_length=True)
    reader, x = fast.Reader(lesson_5.TransformerXL(config).eval()), torch.zeros(1, T).long()

    def read(x, memory=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return reader(x, memory, last_only=True)[1]
    memory = read(torch.zeros(1, M).long())

    def call():
        nonlocal memory
        fast.BLOCK = block
        memory = read(x, memory)
    return call


def reading(dtype, N=12, D=512, FF=2048, H=8, K=2101):
    """{what: {form: call}}: for one token in twelve layers, more than caches hold; a segment."""
    def several(*shape):
        return [torch.randn(shape).to(dtype) for _ in range(N)]
    (row, *_), (q, *_), up = several(1, D), several(H, 1, D // H), several(FF, D)
    # windows of something longer, as in a buffer; the first form is as W_kR makes them
    whole = [z.transpose(0, 1).mT for z in several(K + 30, H, D // H)]
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
        "480 tokens in a layer": {
            f"blocks of {n}": layer_that_reads(480, n, dtype) for n in (480, 64)}}


def compare_reading(dtype, repetitions):
    """Print a line for each form: milliseconds without gradients."""
    for title, forms in reading(dtype).items():
        seconds = {name: [] for name in forms}
        for _ in progress(range(repetitions + 3), title, repetitions + 3):
            for name, form in forms.items():
                start = time.perf_counter()
                with torch.no_grad():
                    form()
                seconds[name].append(time.perf_counter() - start)
        print(title)
        first, *_ = middles = [statistics.median(z[3:]) for z in seconds.values()]
        for name, middle in zip(forms, middles):
            print(f"  {name:30} {1000 * middle:7.2f} ms  {first / middle:5.2f} times as fast")


def main(argv=None):
    """Four comparisons in training, three in reading."""
    parser = argparse.ArgumentParser(description="What each part of support/fast.py brings.")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--sizes", type=int, nargs=5, default=[8, 128, 4, 64, 1024],
                        metavar=tuple("BTHC") + ("FF",))
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--reading", action="store_true", help="without gradients")
    given = parser.parse_args(argv)
    (B, T, H, C, FF), D = given.sizes, given.sizes[2] * given.sizes[3]
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    if given.reading:
        compare_reading(dtype, given.repetitions)
        return 0

    def leaf(*shape):
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def heads(*shape):  # as lesson 5 takes them apart
        return leaf(*shape, H, C).transpose(-3, -2)
    attention = lesson_5.RelativeAttention(lesson_5.Config(9, d_model=D, n_head=H, d_head=C))
    hidden = lesson_5.hidden_keys(T, T, T, False)
    compare("attention, without its projections",
            {name: partial(form, attention) for name, form in ATTENTION.items()},
            [heads(B, T), heads(B, 2 * T), heads(B, 2 * T), heads(2 * T), leaf(H, C), leaf(H, C),
             hidden], given.repetitions)
    attention.attend = MethodType(fast.attend, attention.to(dtype))
    compare("attention with its projections", {
        name: partial(form, attention) for name, form in FORWARD.items()},
            [leaf(B, T, D), torch.randn(B, T, D).to(dtype), torch.randn(2 * T, D).to(dtype),
             leaf(H, C), leaf(H, C), hidden], given.repetitions)
    compare("dropout of the feed-forward network", DROPOUT, [leaf(B, T, FF)], given.repetitions)
    compare("feed-forward network", {name: feed_forward(form) for name, form in RELU.items()},
            [leaf(B, T, D), leaf(FF, D), leaf(D, FF)], given.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
