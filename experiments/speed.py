"""Table 9 of the paper: the slowdown of a sliding window relative to a memory.

    python -m experiments.speed       4 layers, a minute on two cores; --scale paper: 24 layers
    python -m experiments.speed --scale gpu --dtype bf16    training/README.md's table

Without a memory each prediction has a long context only if all of it is read again (Al-Rfou et al.
2018).  Ours reads segments of 128 tokens with a full memory of the attention length.  The window is
as fast as possible: it uses fused causal attention, and its last layer has a single query.
"""
import sys
import timeit
from dataclasses import replace
from functools import partial
from importlib import import_module

__package__ or sys.exit("run python -m experiments.speed in the project's folder")

import torch
import torch.nn as nn

import train
from training import estimate, machine, optimizers, presets
from training.command import Parser, exit_status
from training.reader import reader_of

lesson_5 = import_module("05_full_model")
PAPER_SLOWDOWN = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # attention length: times slower
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


def seconds(call):
    """Return the median seconds of five calls, after two that may compile."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    return sorted(timeit.repeat(lambda: (call(), wait()), number=1, repeat=7)[2:])[2]


@torch.no_grad()
def time_token(c, flags, T=128):
    """Return the seconds per token of memory and of window."""
    with torch.device(flags.device):
        reader, predict = reader_of(lesson_5.TransformerXL(c).eval()), make_window(c)
        x, window = (torch.randint(c.vocab_size, (1, n)) for n in (T, c.mem_len))
    memory = None
    with machine.autocast(flags, flags.device):
        for _ in range(0, c.mem_len, T):
            _, memory = reader(x, memory, x)  # until it is full
        return seconds(lambda: reader(x, memory, x)) / T, seconds(lambda: predict(window))


def measure_gpu(flags):
    """Print this GPU's rows of the table in training/README.md."""
    config, recipe = presets.MODELS["enwik8-12L"]
    recipe, c = replace(recipe, dtype=flags.dtype), replace(config, mem_len=2100, same_length=True)
    x = torch.randint(config.vocab_size, (recipe.batch, recipe.segment), device=flags.device)
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=flags.device)
    most = 2 * 8192**3 / seconds(lambda: square @ square)  # FLOPs per second
    read, generated = (1 / time_token(c, flags, T)[0] for T in (512, 1))
    print("|card|layers|ms per step|tokens/s|TFLOP/s|of bf16|peak GB|hours|evaluated|generated|")
    for form, prepare in ("plain", id), ("compiled", machine.compile_layers):
        prepare(model := lesson_5.TransformerXL(config).to(flags.device))
        given = model, optimizers.adam(model, recipe), x, x
        *_, memory = train.train_step(*given, None, recipe)  # full, since M = T
        torch.cuda.reset_peak_memory_stats()
        step = seconds(lambda: train.train_step(*given, memory, recipe))
        flops, peak = estimate.flops_per_step(config, *x.shape), torch.cuda.max_memory_allocated()
        print(f"|{machine.name(flags.device)}|{form}|{1000 * step:.1f}|{x.numel() / step:,.0f}|"
              f"{flops / step / 1e12:.0f}|{flops / step / most:.0%}|{peak / 1e9:.1f}|"
              f"{step * recipe.steps / 3600:.1f}|{read:,.0f}|{generated:,.0f}|")


def run(argv=None):
    """Measure, and print a line for each length or form."""
    parser = Parser(prog="python -m experiments.speed", description=__doc__)
    parser.add_argument("--scale", choices=(*SIZES, "gpu"), default="small")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    flags = parser.parse_args(argv)
    flags.device = machine.choose("cuda" if flags.scale == "gpu" else "")
    if flags.scale == "gpu":
        return measure_gpu(flags)
    print(f"{flags.scale}, {flags.dtype}, {machine.name(flags.device)}: milliseconds per token")
    for M, paper in PAPER_SLOWDOWN.items():
        memory, window = time_token(replace(SIZES[flags.scale], mem_len=M, same_length=True), flags)
        print(f"M {M}: memory {1000 * memory:.3f}, window {1000 * window:.3f}; times slower "
              f"{window / memory:.4g}, paper {paper}")


main = partial(exit_status, "speed.py", run)

if __name__ == "__main__":
    sys.exit(main())
