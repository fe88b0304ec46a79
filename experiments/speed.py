"""Table 9 of the paper: the slowdown of a sliding window relative to a memory.

    python -m experiments.speed       4 layers, a minute on two cores; --scale paper: 24 layers

Without a memory each prediction has a long context only if all of it is read again (Al-Rfou et al.
2018).  Ours reads segments of 128 tokens with a full memory of the attention length.  The window is
as fast as possible: it uses fused causal attention, and its last layer has a single query.
"""
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median

if not __package__:
    sys.exit("run it as python -m experiments.speed, in the project's folder")

import torch
import torch.nn as nn

import train
from training import machine, presets
from training.command import Parser, exit_status
from training.reader import reader_of

lesson_5 = import_module("05_full_model")
PAPER_SLOWDOWN = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length: times slower
SEGMENT, TURNS = 128, 5  # tokens that ours reads at once; measurements of each
SIZES = {"small": lesson_5.Config(256, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024),
         "paper": presets.CONFIGS["enwik8-24L"]}


def make_window(c):
    """Return a function that predicts a token from each window (B, L); it adds no positions."""
    embedding = nn.Embedding(c.vocab_size, c.d_model)
    last = nn.TransformerEncoderLayer(c.d_model, c.n_head, c.d_inner, dropout=0, batch_first=True)
    below = nn.TransformerEncoder(last, c.n_layer - 1, enable_nested_tensor=False)  # copies of it
    causal = nn.Transformer.generate_square_subsequent_mask(c.mem_len)

    def predict(x):
        h = below(embedding(x), causal, is_causal=True)  # fused attention, which reads no mask
        out, _ = last.self_attn(h[:, -1:], h, h, need_weights=False)
        h = last.norm1(h[:, -1:] + out)  # (B, 1, D)
        h = last.norm2(h + last.linear2(torch.relu(last.linear1(h))))
        return h @ embedding.weight.T

    return predict


@torch.no_grad()
def time_turns(c, flags):
    """Return the milliseconds per token of memory and window in each turn but the first."""
    with torch.device(flags.device):
        reader, predict = reader_of(lesson_5.TransformerXL(c).eval()), make_window(c)
        x, window = (torch.randint(c.vocab_size, (1, n)) for n in (SEGMENT, c.mem_len))
    memory, times = None, []
    with machine.autocast(flags, flags.device):
        for _ in range(0, c.mem_len, SEGMENT):
            _, memory = reader(x, memory, x)  # until it is full
        for _ in train.progress(range(TURNS + 1), "turn", TURNS + 1):
            for call, n in (lambda: reader(x, memory, x), SEGMENT), (lambda: predict(window), 1):
                start = time.perf_counter()
                call()
                if flags.device == "cuda":
                    torch.cuda.synchronize()
                times.append(1000 * (time.perf_counter() - start) / n)
    return times[2::2], times[3::2]


def run(argv=None):
    """Measure, and print a line for each length."""
    parser = Parser(prog="python -m experiments.speed", description=__doc__)
    parser.add_argument("--scale", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="")
    flags = parser.parse_args(argv)
    flags.device = machine.choose(flags.device)
    print(f"{flags.scale}, {flags.dtype}, {machine.name(flags.device)}: milliseconds per token")
    for M, paper in PAPER_SLOWDOWN.items():
        memory, window = time_turns(replace(SIZES[flags.scale], mem_len=M, same_length=True), flags)
        slower = sorted(a / b for a, b in zip(window, memory))
        print(f"M {M}: memory {median(memory):.3f}, window {median(window):.3f}; times slower "
              f"{median(slower):.4g} [{slower[0]:.4g} ... {slower[-1]:.4g}], paper {paper}")


main = partial(exit_status, "speed.py", run)

if __name__ == "__main__":
    sys.exit(main())
