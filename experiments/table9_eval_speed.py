"""Table 9 of the paper: how much slower is a sliding window than a memory?

    python experiments/table9_eval_speed.py                    4 layers, a minute on two cores
    python experiments/table9_eval_speed.py --scale paper      24 layers
    python experiments/table9_eval_speed.py --scale paper --dtype bf16 --device cuda --lanes 16

Without a memory each prediction has a long context only if all of it is read again (Al-Rfou et al.
2018).  Ours reads segments of 128 tokens with a full memory of that length.  The window is as fast
as it can be: fused causal attention, and of the last layer only the last position.

Weights and tokens are random.  The two are measured turn by turn; a ratio is the median of the
turns' ratios.
"""
import sys
import time
from dataclasses import replace
from statistics import median

import common  # before torch

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import fast, lesson_5, machine, presets, train

NAME = "table9_eval_speed"
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length: times slower
SEGMENT, TURNS = 128, 5  # tokens that ours reads at once; measurements of each
SCALES = {"tiny": lesson_5.CONFIGS["tiny"],
          "small": lesson_5.Config(256, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024),
          "paper": presets.CONFIGS["enwik8-24L"]}


def reader(config, given):
    """Return a function that reads a segment per lane after a full memory."""
    model = fast.prepare(lesson_5.TransformerXL(config).to(given.device).eval())
    memory = None

    @torch.no_grad()
    def read():
        nonlocal memory
        x = torch.randint(config.vocab_size, (given.lanes, SEGMENT), device=given.device)
        with machine.autocast(given, given.device):
            _, memory = model(x, memory, x)

    for _ in range(0, config.mem_len, SEGMENT):
        read()
    return read


def window(config, given):
    """Return a function that predicts one token per lane from a window.  Nothing is trained, only
    the work counts; that of adding positions is none.
    """
    L = config.mem_len
    embedding = nn.Embedding(config.vocab_size, config.d_model, device=given.device)
    *layers, last = (nn.TransformerEncoderLayer(
        config.d_model, config.n_head, config.d_inner, dropout=0.0, batch_first=True,
        device=given.device) for _ in range(config.n_layer))
    causal = nn.Transformer.generate_square_subsequent_mask(L, device=given.device)

    @torch.no_grad()
    def predict():
        x = torch.randint(config.vocab_size, (given.lanes, L), device=given.device)
        with machine.autocast(given, given.device):
            h = embedding(x)
            for layer in layers:  # is_causal takes the fused attention, which reads no mask
                h = layer(h, causal, is_causal=True)
            out, _ = last.self_attn(h[:, -1:], h, h, need_weights=False)
            h = last.norm1(h[:, -1:] + out)  # (B, 1, D)
            h = last.norm2(h + last.linear2(F.relu(last.linear1(h))))
            F.linear(h, embedding.weight)

    return predict


def measure(config, given):
    """Return the milliseconds per token of memory and window in each turn, after one to warm up."""
    sides = ((reader(config, given), given.lanes * SEGMENT), (window(config, given), given.lanes))
    times = []
    for _ in train.progress(range(TURNS + 1), "turn", TURNS + 1):
        for call, n in sides:
            start = time.perf_counter()
            call()
            if given.device == "cuda":
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start) / n)
    return times[2::2], times[3::2]


@common.make_main
def main(argv):
    """Measure, and print a line for each length."""
    flags = common.new_parser(NAME, __doc__, "--dtype", "--device")
    flags.add_argument("--scale", choices=SCALES, default="small")
    flags.add_argument("--lanes", type=int, default=1, help="read side by side; default: 1")
    flags.add_argument("--lengths", type=int, nargs="+", default=[*PAPER],
                       help="of memory and window, in tokens; default: the paper's")
    given = flags.parse_args(argv)
    if min(given.lanes, *given.lengths) < 1:
        raise ValueError("--lanes and --lengths must be at least 1")
    given.device = machine.choose(given.device)
    print(f"{given.scale}, {given.dtype}, {given.device}, {torch.get_num_threads()} threads: "
          f"milliseconds per token, medians of {TURNS} turns")
    for M in given.lengths:
        config = replace(SCALES[given.scale], mem_len=M, same_length=True)
        memory, slow = measure(config, given)
        ratios = [a / b for a, b in zip(slow, memory)]
        print(f"M {M}: memory {median(memory):.3f}, window {median(slow):.3f}; times slower "
              f"{median(ratios):.4g} [{min(ratios):.4g} ... {max(ratios):.4g}], paper "
              f"{PAPER.get(M, '-')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
