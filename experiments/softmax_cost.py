"""Why the adaptive softmax is there: what wt103-large takes in training with and without.

The same model twice, once with a softmax over all 267,735 words and once with the adaptive one,
each in a process of its own: parameters, seconds of forward and backward, the largest resident
memory and the largest activation, for one lane of T = M = 384 tokens as rare as 1 / rank (Zipf's
law).  Adam's moments, 8 more bytes for each parameter, are not there.  Not for Windows.

    python experiments/softmax_cost.py        about a minute, 6 GB of memory
    python experiments/softmax_cost.py --layers 2    the same with fewer layers
"""
import argparse
import math
import multiprocessing
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import resident_peak

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support import fast

lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.CONFIGS["wt103-large"]


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


def measure(config):
    """One lane, forward and backward: (parameters, peak in GB, middle of 3 in s, largest shape)."""
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


def main(argv=None):
    """Print a line for each of the two."""
    parser = argparse.ArgumentParser(description="A step with the full and the adaptive softmax.")
    parser.add_argument("--layers", type=int, default=CONFIG.n_layer)
    config = replace(CONFIG, n_layer=parser.parse_args(argv).layers)
    print(f"N {config.n_layer}, D {config.d_model}, T = M = {config.mem_len}, B 1, "
          f"{config.vocab_size:,} words; {torch.get_num_threads()} threads")
    for name, c in (("full", replace(config, cutoffs=(), div_val=1)), ("adaptive", config)):
        print(f"{name} ...", end="\r", file=sys.stderr, flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a peak of its own
            parameters, peak, seconds, shape = pool.apply(measure, (c,))
        print(f"{name:8}  {parameters:11,} parameters  {seconds:5.2f} s forward and backward  peak "
              f"{peak:.1f} GB (weights and gradients {8 * parameters / 1e9:.1f})  "
              f"largest activation {shape}, {4 * math.prod(shape) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
