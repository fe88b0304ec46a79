"""Table 9 of the paper: how much slower is a sliding window than a memory?  And how much faster is
training/fast.py than lesson 5 as it is written, on your machine?

    python experiments/table9_eval_speed.py                      the window, a few minutes
    python experiments/table9_eval_speed.py --what train         forward, backward, clip, Adam
    python experiments/table9_eval_speed.py --what eval          evaluation, as train.py does it
    python experiments/table9_eval_speed.py --what generate      one token after the other
    python experiments/table9_eval_speed.py --scale paper --dtype bf16 --device cuda --lanes 16

Weights and tokens are random, memories are full.  The sides are measured turn by turn; a ratio is
the median of the turns' ratios.  "fast" is lesson 5 with training/fast.py, "plain" without.

The window.  Without a memory each prediction has a long context only if all of it is read again
(Al-Rfou et al. 2018).  Ours reads segments of 128 tokens with a memory of that length.  The window
is as fast as it can be: fused causal attention, and of the last layer only the last position.
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
from training.optimizers import make_optimizer

NAME = "table9_eval_speed"
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length: times slower
SEGMENT = 128  # T beside a window
SMALL = lesson_5.Config(256, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024,
                        dropout=0.1, mem_len=128)
RECIPE = presets.Recipe(steps=1, eval_segment=64)
SCALES = {"tiny": presets.MODELS["tiny"],
          "small": (SMALL, replace(RECIPE, batch=8)),
          "medium": (replace(SMALL, n_layer=12, d_model=512, n_head=8, d_inner=2048),
                     replace(RECIPE, batch=4)),
          "enwik8-12L": presets.MODELS["enwik8-12L"], "paper": presets.MODELS["enwik8-24L"]}


def trainer(config, recipe, plain, device):
    """Return a function that makes one training step."""
    model, memory = lesson_5.TransformerXL(config).to(device), None
    fast.prepare(model, plain)
    optimizer = make_optimizer(model, recipe)

    def step():
        nonlocal memory
        x = torch.randint(config.vocab_size, (recipe.batch, recipe.segment), device=device)
        *_, memory = train.train_step(model, optimizer, x, x, memory, recipe)

    return step


def reader(config, recipe, plain, given, T):
    """Return a function that reads T tokens per lane after a full memory."""
    config = replace(config, mem_len=recipe.eval_mem_len, same_length=True)
    model = fast.prepare(lesson_5.TransformerXL(config).to(given.device).eval(), plain)
    memory = None

    @torch.no_grad()
    def read(T=T):
        nonlocal memory
        x = torch.randint(config.vocab_size, (given.lanes, T), device=given.device)
        with machine.autocast(recipe, given.device):
            _, memory = model(x, memory, x if T > 1 else None)

    for _ in range(0, recipe.eval_mem_len, SEGMENT):
        read(SEGMENT)
    return read


def window(config, recipe, given):
    """Return a function that predicts one token per lane from a window.  Nothing is trained, only
    the work counts; that of adding positions is none.
    """
    L = recipe.eval_mem_len
    embedding = nn.Embedding(config.vocab_size, config.d_model, device=given.device)
    *layers, last = (nn.TransformerEncoderLayer(
        config.d_model, config.n_head, config.d_inner, dropout=0.0, batch_first=True,
        device=given.device) for _ in range(config.n_layer))
    causal = nn.Transformer.generate_square_subsequent_mask(L, device=given.device)

    @torch.no_grad()
    def predict():
        x = torch.randint(config.vocab_size, (given.lanes, L), device=given.device)
        with machine.autocast(recipe, given.device):
            h = embedding(x)
            for layer in layers:  # is_causal takes the fused attention, which reads no mask
                h = layer(h, causal, is_causal=True)
            out, _ = last.self_attn(h[:, -1:], h, h, need_weights=False)
            h = last.norm1(h[:, -1:] + out)  # (B, 1, D)
            h = last.norm2(h + last.linear2(F.relu(last.linear1(h))))
            F.linear(h, embedding.weight)

    return predict


def measure(config, recipe, given):
    """Return {side: [milliseconds per token in each turn]}, after a turn that warms up."""
    longest = train.evaluation_segment_length(recipe)
    T = {"window": SEGMENT, "eval": longest, "generate": 1}.get(given.what)
    sides, tokens = {}, given.lanes * T if T else recipe.batch * recipe.segment
    for name in ("fast", "plain"):
        plain = name == "plain"
        sides[name] = (reader(config, recipe, plain, given, T) if T else
                       trainer(config, recipe, plain, given.device))
    if given.what == "window":
        sides["window"] = window(config, recipe, given)
    times = {name: [] for name in sides}
    for _ in train.progress(range(given.turns + 1), "turn", given.turns + 1):
        for name, call in sides.items():
            n = given.lanes if name == "window" else tokens
            calls = 16 if T == 1 else 1  # what the other side has left in caches is of no use
            start = now(given.device)
            for _ in range(calls):
                call()
            times[name].append(1000 * (now(given.device) - start) / (calls * n))
    return {name: z[1:] for name, z in times.items()}


def now(device):
    """Return seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@common.make_main
def main(argv):
    """Measure, and print a line for each length."""
    flags = common.new_parser(NAME, __doc__, "--dtype", "--device")
    flags.add_argument("--what", choices=("window", "train", "eval", "generate"), default="window")
    flags.add_argument("--scale", choices=SCALES, default="small")
    flags.add_argument("--turns", type=int, default=5)
    flags.add_argument("--lanes", type=int, default=1, help="read side by side; default: 1")
    flags.add_argument("--lengths", type=int, nargs="+", help="of memory and window, in tokens; "
                       "default: the paper's, without a window that of the scale")
    given = flags.parse_args(argv)
    config, recipe = SCALES[given.scale]
    lengths = given.lengths or (PAPER if given.what == "window" else [recipe.eval_mem_len])
    if min(given.turns, given.lanes, *lengths) < 1:
        raise ValueError("--turns, --lanes and --lengths must be at least 1")
    given.device = machine.choose(given.device)
    slow = "window" if given.what == "window" else "plain"
    print(f"{given.what} {given.scale}, {given.dtype}, {given.device}, {torch.get_num_threads()} "
          f"threads: milliseconds per token, medians of {given.turns} turns")
    for M in lengths:
        times = measure(config, replace(recipe, dtype=given.dtype, eval_mem_len=M), given)
        ratios = [a / b for a, b in zip(times[slow], times["fast"])]
        paper = f", paper {PAPER[M]}" if slow == "window" and M in PAPER else ""
        print(f"M {config.mem_len if given.what == 'train' else M}: "
              + ", ".join(f"{name} {median(z):.3f}" for name, z in times.items())
              + f"; {slow} / fast {median(ratios):.4g} [{min(ratios):.4g} ... {max(ratios):.4g}]"
              + paper, flush=True)


if __name__ == "__main__":
    sys.exit(main())
