"""What each line of lesson 5 that is written for speed brings: plain form, then ours, step by step.

Attention (lesson 4's form first, each line one change more), dropout, and the order of dropout and
ReLU; forward and backward, milliseconds, and the tables that are kept for the gradients, MB.

    python experiments/parts.py                  B 8, T = M = 128, D 256, 4 heads, FF 1024
    python experiments/parts.py --dtype bf16

All forms give the same numbers and gradients (tests/test_parts.py).  Middle of the repetitions,
turn by turn.
"""
import argparse
import math
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
lesson_1, lesson_4, lesson_5 = (import_module(name) for name in (
    "01_vanilla_segments", "04_rel_shift", "05_full_model"))


def lessons_form(q, k, value, Q, u, v, hidden, shift_by_view=False):
    """Attention as in lesson 4, (B, H, n, C); q, k, value (B, n, H, C), Q (K + 1, H, C)."""
    q, k, value, Q = (z.movedim(-2, -3) for z in (q, k, value, Q))
    content = (q + u[:, None]) @ k.mT
    if shift_by_view:
        position = lesson_5.shift_padded((q + v[:, None]) @ Q.mT)
    else:
        position = lesson_4.rel_shift((q + v[:, None]) @ Q[:, 1:].mT)
    score = ((content + position) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return (score.softmax(-1) @ value).movedim(-3, -2).flatten(-2)


def heads_first(q, k, value, Q, u, v, hidden, in_place=False):
    """The same, (H, B, n, C), the scale on the left factors; the last steps to ours."""
    q, k, value, Q = (z.movedim(-2, 0) for z in (q, k, value, Q))
    scale = 1 / math.sqrt(q.shape[-1])
    B, T = q.shape[1:3]
    q, u, v = scale * q, scale * u, scale * v
    content = (q + u[:, None, None]) @ k.mT
    position = ((q + v[:, None, None]).flatten(1, 2) @ Q.mT).unflatten(1, (B, T))
    position = lesson_5.shift_padded(position)
    if in_place:
        score = content.add_(position).masked_fill_(hidden, -math.inf)
    else:
        score = (content + position).masked_fill(hidden, -math.inf)
    return (score.softmax(-1) @ value).permute(1, 2, 0, 3).flatten(-2)


ATTENTION = {
    "lesson 4": lessons_form,
    "+ shift as a view": lambda *z: lessons_form(*z, shift_by_view=True),
    "+ heads first, scale on q": heads_first,
    "+ scores in place": lambda *z: heads_first(*z, in_place=True)}
DROPOUT = {"nn.Dropout": nn.Dropout(0.1), "ours": lesson_5.Dropout(0.1)}
RELU = {
    "ReLU, then dropout": lambda h, W_1, W_2, drop: drop(F.relu(h @ W_1.T)) @ W_2.T,
    "dropout, then ReLU": lambda h, W_1, W_2, drop: F.relu(drop(h @ W_1.T)) @ W_2.T}


def compare(title, forms, inputs, repetitions):
    """Print a line for each form: milliseconds of forward and backward, MB kept between them."""
    seconds, kept = {name: [] for name in forms}, {}
    for i in lesson_1.progress(range(repetitions + 3), title, repetitions + 3):
        for name, form in forms.items():
            tables = {}

            def keep(z):
                tables[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
                return z
            if i == 0:  # counted apart: counting takes time
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
                    out = form(*inputs)
                kept[name] = sum(tables.values()) / 1e6
            start = time.perf_counter()
            form(*inputs).sum().backward()
            seconds[name].append(time.perf_counter() - start)
    print(title)
    first = statistics.median(next(iter(seconds.values()))[3:])
    for name, times in seconds.items():
        middle = statistics.median(times[3:])
        print(f"  {name:26} {1000 * middle:7.2f} ms  {first / middle:5.2f} times as fast  "
              f"{kept[name]:6.1f} MB kept")


def main(argv=None):
    """Three comparisons."""
    parser = argparse.ArgumentParser(description="What each speed-up of lesson 5 brings.")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--sizes", type=int, nargs=5, default=[8, 128, 4, 64, 1024],
                        metavar=tuple("BTHC") + ("FF",))
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args(argv)
    (B, T, H, C, FF), D = given.sizes, given.sizes[2] * given.sizes[3]
    number = torch.bfloat16 if given.dtype == "bf16" else torch.float32

    def leaf(*shape):
        return torch.randn(shape, dtype=number, requires_grad=True)
    hidden = lesson_5.hidden_keys(T, T, T, False)
    compare("attention, without its projections", ATTENTION,
            [leaf(B, T, H, C), leaf(B, 2 * T, H, C), leaf(B, 2 * T, H, C), leaf(2 * T + 1, H, C),
             leaf(H, C), leaf(H, C), hidden], given.repetitions)
    compare("dropout of the feed-forward network", DROPOUT, [leaf(B, T, FF)], given.repetitions)
    compare("feed-forward network", RELU,
            [leaf(B, T, D), leaf(FF, D), leaf(D, FF), DROPOUT["ours"]], given.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
