"""Table 9 of the paper: how much slower is a sliding window than a memory?

A model without memory can give each prediction a long context only by reading a window of it afresh
(Al-Rfou et al. 2018).  Ours reads segments of 128 on with a memory of that length, and keeps its
keys and values projected (training/fast.py); the plain form projects the whole memory in every call
(both others: baselines.py).

    python experiments/table9_eval_speed.py                       a few minutes on two cores
    python experiments/table9_eval_speed.py --size enwik8-12L --repetitions 3      half an hour
    python experiments/table9_eval_speed.py --size paper --dtype bf16 --device cuda \\
        --lanes 1 4 10 16 32                                      enwik8-24L, on a GPU

Nothing is extrapolated: each length is measured, turn by turn, with random tokens and weights, and
each side has as many lanes as pay most for it, up to the number at which one runs out of memory.
The paper gives ratios on one GPU; beside them stands what arithmetic allows, the ratio of the
multiplications for a token and layer:

    window    L (2 D HC + 2 D FF + 2 D HC + L HC)     keys, values; feed-forward; query, output;
                                                      scores and values, half of L on average
    ours      2 D HC + 2 D FF + 2 D HC + 3 K HC       scores by content and distance, and values

The window's last layer is shortened to the last position, which the bound does not count: with 4
layers it is up to a quarter too high.
"""
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

import common
import baselines
import benchmark

NAME = "table9_eval_speed"
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length: times slower
SIZES = {"tiny": "tiny", "laptop": "S", "enwik8-12L": "enwik8-12L", "paper": "enwik8-24L"}
SEGMENT = 128
# name: what makes it, tokens of a lane in a call, how it is drawn, what it is
SIDES = {"ours": (benchmark.Ours, SEGMENT, "o-", "ours: the memory is projected once"),
         "plain": (baselines.PlainForm, SEGMENT, "s--", "plain: it is projected in every call"),
         "window": (baselines.SlidingWindow, 1, "^:", "sliding window: no memory")}


def allowed(config, L, T=SEGMENT):
    """How many times slower the window must be for each token, by arithmetic: see above."""
    D, HC = config.d_model, config.n_head * config.d_head
    projections = 2 * D * HC + 2 * D * config.d_inner + 2 * D * HC
    return L * (projections + L * HC) / (projections + 3 * (L + T) * HC)


def milliseconds_a_token(size, given):
    """{side: the times of its repetitions}, with the lanes that pay most and fit into memory."""
    best = {side: [math.inf] for side in SIDES}
    for lanes in sorted(set(given.lanes)):
        sized = replace(size, eval_batch=lanes)
        try:
            calls = {side: make(sized, given.dtype, given.device).evaluate
                     for side, (make, *_) in SIDES.items()}
            seconds = benchmark.measure(calls, given.repetitions, given.device)
        except torch.OutOfMemoryError:
            if lanes > min(given.lanes):
                break
            raise ValueError(f"out of memory at length {size.eval_mem_len:,} already with "
                             f"{lanes} lanes") from None
        for side, (_, tokens, *_) in SIDES.items():
            best[side] = min(best[side], [1000 * z / (lanes * tokens) for z in seconds[side]],
                             key=statistics.median)
    return best


@common.command
def main(argv):
    """Print a line for each length, and draw tokens a second over the length."""
    flags = common.new_parser(NAME, __doc__, "--dtype", "--device")
    flags.add_argument("--size", choices=SIZES, default="laptop")
    flags.add_argument("--repetitions", type=int, default=5)
    flags.add_argument("--lanes", type=int, nargs="+", default=[1, 4], help="tried, ascending")
    flags.add_argument("--lengths", type=int, nargs="+", default=list(PAPER), help="in tokens")
    flags.add_argument("--out", default=common.lesson_1.RUNS / NAME, metavar="FOLDER")
    given = flags.parse_args(argv)
    if min(given.repetitions, *given.lanes, *given.lengths) < 1:
        raise ValueError("--repetitions, --lanes and --lengths must be at least 1")
    common.machine.check(given.device)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    name, middles = SIZES[given.size], []
    size = replace(benchmark.SIZES[name], eval_segment=SEGMENT)
    config = size.config
    print(f"milliseconds a token, median of {given.repetitions}; {name} (N "
          f"{config.n_layer}, D {config.d_model}), {given.dtype}, {given.device}, T {SEGMENT}, "
          f"best of {given.lanes} lanes\nlength      ours     plain    window  window / ours  "
          "[range]          arithmetic allows  paper (on a GPU)")
    for length in given.lengths:
        times = milliseconds_a_token(replace(size, eval_mem_len=length), given)
        middle = {side: statistics.median(z) for side, z in times.items()}
        low, high = (a(times["window"]) / b(times["ours"]) for a, b in ((min, max), (max, min)))
        print(f"{length:6}" + "".join(f"{z:10.3f}" for z in middle.values())
              + f"{middle['window'] / middle['ours']:15,.0f}  "
              f"{f'[{low:,.0f} ... {high:,.0f}]':15}{allowed(config, length):19,.0f}"
              f"{PAPER.get(length, '-'):>18}", flush=True)
        middles.append(middle)
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for side, (*_, style, label) in SIDES.items():
        axes.plot(given.lengths, [1000 / z[side] for z in middles], style, label=label)
    axes.set(yscale="log", xlabel="memory, or length of the window (tokens)", xlim=(0, None),
             ylabel="tokens per second (log scale)",
             title=f"Evaluation of {name}, {given.dtype}, {given.device}")
    axes.grid(axis="y", alpha=0.4)
    axes.legend()
    common.save_figure(axes.figure, out / "speed.png")


if __name__ == "__main__":
    sys.exit(main())
