"""How training would scale to 1,024 GPUs, on paper: a formula and assumptions, no measurement.

    python experiments/scaling.py                     the paper's models on 1, 8, 64, 1,024 GPUs
    python experiments/scaling.py --what limits       where each model breaks first
    python experiments/scaling.py --what check        the formula beside what others measured
    python experiments/scaling.py --what figure       speed over GPUs, into runs/scaling.png
    python experiments/scaling.py --model enwik8-12L --tokens-per-second X

X is the speed of one GPU with all lanes, as experiments/benchmark.py prints it with `--what train
--size enwik8-12L --dtype bf16 --device cuda`; without it a fraction of the card's peak is assumed.

Plain data parallelism: n GPUs hold the whole model and b = B / n (rounded up) of the B lanes each,
with the memory of these lanes; where n is above B, B grows to n.  DistributedDataParallel averages
the gradients (S bytes) in buckets of 25 MiB while the backward pass goes on.  In seconds:

    compute    = parts N fixed + b T F / (fraction peak)            F: FLOPs a token (estimate.py)
    all-reduce = 2 (n - 1) / n S / bandwidth + ceil(S / bucket) hops latency
    not hidden = max(0, that of the layers - 2/3 compute / parts) + that of embedding and output
    step       = compute + not hidden

`fixed` is what a layer takes in a step however few lanes there are (starting kernels, Adam), so it
is a floor.  `parts` (micro-batches) is the least with which the memory fits.  Backward is 2/3 of
the compute.  The embedding is the output matrix, too, so its gradient is complete only with the
very last operation of the backward pass: nothing is left to hide its all-reduce.  Each byte crosses
each link 2 (n - 1) / n times (NVIDIA/nccl-tests, doc/PERFORMANCE.md); the bandwidth is that of the
slowest link, nvlink up to 8 GPUs, network above.  A ring makes 2 (n - 1) hops, a tree 2 log2 n.

Validation: each GPU reads its share of the tokens, after N M tokens as context; a segment takes
N fixed / 3 and the operations of its forward pass.  Then one GPU writes the checkpoint, all wait.

Sources of the assumptions (fields of Machine): experiments/scaling.md.
"""
import argparse
import math
import sys
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support import command_line, corpora, estimate

lesson_1, lesson_5, train = (import_module(name) for name in (
    "01_vanilla_segments", "05_full_model", "train"))
CONFIGS, RUNS_OF = lesson_5.CONFIGS, train.RUNS_OF

MODELS = ("enwik8-12L", "enwik8-18L", "enwik8-24L", "text8-24L", "wt103-standard", "wt103-large",
          "lm1b-base", "lm1b-large")
NODE, BUCKET = 8, 25 * 2**20  # GPUs joined by NVLink; bytes of a bucket (DDP's default)
# NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL/README.md, DGX A100, mixed
# precision: model, lanes a GPU, tokens/s on 1 GPU and on 8; the models from pytorch/wt103_*.yaml
MEASURED = (("base", 32, 59_961, 449_890), ("large", 8, 21_554, 159_185),
            ("large", 16, 25_084, 191_148))
THEIRS = {"base": (replace(CONFIGS["wt103-standard"], d_model=512, n_head=8, d_head=64, mem_len=192,
                           d_inner=2048), 192), "large": (CONFIGS["wt103-large"], 384)}
# the same file, lanes and twice as many on one GPU: tokens/s of both (V100: DGX-1)
TWO_SIZES = (("A100", "large", 8, 21_554, 25_084), ("V100", "large", 2, 6_907, 10_210),
             ("V100", "base", 16, 26_639, 36_692))
# the same file, A100, one lane, FP16 in pure Python: T, M, milliseconds a segment
THEIR_EVALUATION = {"base": (64, 640, 15.38), "large": (128, 1600, 18.20)}


@dataclass(frozen=True)
class Machine:
    """What is assumed of the machine; every field is a flag."""

    peak: float = 989.0  # TFLOP/s, bf16 without sparsity: one H200
    fraction: float = 0.19  # of the peak, beyond the fixed part: NVIDIA's A100 (--what check)
    fixed: float = 2.2  # milliseconds a layer and step: the same A100
    card: float = 141.0  # GB of memory
    nvlink: float = 370.0  # GB/s through each GPU in a node of 8
    network: float = 350.0  # GB/s through each node
    latency: float = 5.0  # microseconds a hop
    algorithm: str = "tree"  # or ring
    gradient: float = 4.0  # bytes a parameter that are all-reduced
    disk: float = 1.0  # GB/s
    price: float = 3.0  # dollars an hour and GPU

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "algorithm" and not 0 < value < math.inf:
                raise ValueError(f"--{name} must be above 0, got {value}")


@lru_cache
def parameters(config):
    """Parameters of the model, and of its embedding and output alone; nothing is allocated."""
    with torch.device("meta"):
        model = lesson_5.TransformerXL(config)
    return [sum(p.numel() for p in part.parameters()) for part in (model, model.embedding)]


def all_reduce(size, n, m):
    """Seconds to sum `size` bytes over n GPUs; 0 for one."""
    hops = 2 * (n - 1) if m.algorithm == "ring" else 2 * math.ceil(math.log2(n))
    bandwidth = 1e9 * (m.nvlink if n <= NODE else m.network)
    return 2 * (n - 1) / n * size / bandwidth + math.ceil(size / BUCKET) * hops * m.latency / 1e6


def not_hidden(config, n, m, backward):
    """Seconds by which the gradients' all-reduce lengthens a step with this backward pass."""
    every, late = (m.gradient * count for count in parameters(config))
    return max(0, all_reduce(every - late, n, m) - backward) + all_reduce(late, n, m)


def memory(config, T, b, m):
    """Bytes on a GPU with b lanes, and in how many parts it reads them, so that they fit."""
    count = parameters(config)[0]
    for parts in range(1, b + 1):
        size = sum(estimate.bytes_of_run(
            config, count, b, T, "bf16", math.ceil(b / parts)).values())
        if size <= 1e9 * m.card:
            return size, parts
    raise ValueError(f"{size / 1e9:.1f} GB for {count:,} parameters and {b} lanes, "
                     f"read one by one, and --card has {m.card}: shard the model (fully_shard)")


def flops_per_second(config, run, m, measured):
    """Of one GPU beyond its fixed part: assumed, or from the measured tokens/s with all lanes."""
    if not measured:
        return m.fraction * m.peak * 1e12
    fixed = memory(config, run.segment, run.batch, m)[1] * config.n_layer * m.fixed / 1e3
    seconds = run.batch * run.segment / measured
    if seconds <= fixed:
        raise ValueError(f"at {measured:,.0f} tokens/s a step takes {1000 * seconds:.1f} ms, less "
                         f"than its assumed fixed part of {1000 * fixed:.1f} ms: lower --fixed")
    return estimate.flops_per_step(config, run.batch, run.segment) / (seconds - fixed)


def reckon(name, n, m, measured=None):
    """All figures of one model on n GPUs, as a dict; times in seconds, memory in bytes."""
    config, run = CONFIGS[name], RUNS_OF[name]
    T, N, count = run.segment, config.n_layer, parameters(config)[0]
    batch = max(run.batch, n)
    b, rate = math.ceil(batch / n), flops_per_second(config, run, m, measured)
    size, parts = memory(config, T, b, m)
    fixed, lane = parts * N * m.fixed / 1e3, estimate.flops_per_step(config, 1, T) / rate
    compute = fixed + b * lane
    late = not_hidden(config, n, m, 2 / 3 * compute / parts)
    speed = batch * T / (compute + late)
    # validations, each with a checkpoint: weights, two moments, memory of all lanes
    context, valid = N * run.eval_mem_len, run.eval_tokens or (
        corpora.SOURCES[run.dataset].counts or (0, 0))[1]  # 0: not known
    tokens = math.ceil(valid / n) + context * (n > 1 and valid > 0)
    read = train.reading_length(run)  # tokens at a time
    segment = (N * m.fixed / 1e3 + estimate.flops_per_step(
        replace(config, mem_len=run.eval_mem_len), 1, read) / rate) / 3
    checkpoint = 12 * count + 4 * N * batch * config.mem_len * config.d_model
    pauses = run.steps // run.eval_every * (
        math.ceil(tokens / read) * segment + checkpoint / (1e9 * m.disk))
    training = run.steps * run.batch * T / speed
    return {"batch": batch, "lanes": b, "bytes": size, "parts": parts, "step": compute + late,
            "all_reduce": all_reduce(m.gradient * count, n, m), "not_hidden": late, "speed": speed,
            "training": training, "pauses": pauses, "context": context, "valid": valid,
            "checkpoint": checkpoint, "cost": n * (training + pauses) / 3600 * m.price,
            "losses": {"the fixed part": fixed, "the all-reduce": late,
                       "unequal lanes": (b - batch / n) * lane}}


def short(z):
    """Three digits, more would claim too much: 0.0123, 4.56, 789, 12,300."""
    return f"{float(f'{z:.3g}'):,.0f}" if z >= 100 else f"{z:.3g}"


def table(*rows):
    """Print rows of text as a table in Markdown; the first is the head."""
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(map(str, row)) + " |")


def speed_table(names, m, given):
    """A line for each model and number of GPUs."""
    rows = [("model", "GPUs", "lanes a GPU", "GB a GPU", "step, ms", "all-reduce, ms",
             "not hidden", "tokens/s", "of n GPUs", "hours: training + pauses", "cost, $")]
    for name in names:
        one = reckon(name, 1, m, given.tokens_per_second)
        for n in given.gpus:
            z = reckon(name, n, m, given.tokens_per_second)
            share = z["speed"] / n / one["speed"]
            parts = f", {z['parts']} parts" if z["parts"] > 1 else ""
            rows.append((
                name, f"{n:,}{'*' * (n > RUNS_OF[name].batch)}", f"{z['lanes']}{parts}",
                *(short(x) for x in (z["bytes"] / 1e9, 1e3 * z["step"], 1e3 * z["all_reduce"],
                                     1e3 * z["not_hidden"], z["speed"])),
                f"{share:.0%}" if share >= 0.01 else f"{share:.1%}",
                f"{short(z['training'] / 3600)} + {short(z['pauses'] / 3600)}", short(z["cost"])))
    table(*rows)


def limits_table(names, m, given):
    """Where each model breaks first, and what sharding would be for."""
    rows = [("model", "million parameters", "GB at 16 bytes each", "checkpoint, GB", "most GPUs: B",
             "below half from", "most lost by", "all-reduce above 10% from", "context N M",
             "above a GPU's share from")]
    powers = [2**i for i in range(1, 11)]
    for name in names:
        count = parameters(CONFIGS[name])[0]
        all_n = {n: reckon(name, n, m, given.tokens_per_second) for n in (1, *powers)}
        half = next((n for n in powers
                     if all_n[n]["speed"] < n / 2 * all_n[1]["speed"]), None)
        loud = next((n for n in powers if all_n[n]["not_hidden"] > all_n[n]["step"] / 10), "-")
        losses, z = all_n[half]["losses"] if half else {"-": 0}, all_n[1]
        rows.append((name, short(count / 1e6), short(16 * count / 1e9),
                     short(z["checkpoint"] / 1e9), RUNS_OF[name].batch, half or "-",
                     max(losses, key=losses.get), loud, f"{z['context']:,}",
                     math.floor(z["valid"] / z["context"]) + 1 if z["valid"] else "not known"))
    table(*rows)
    state = [size * parameters(CONFIGS["lm1b-large"])[0] for size in (16, 18)]
    print(f"\n- lm1b-large: weights, gradients and Adam's moments {state[0] / 1e9:.1f} GB, with "
          f"bf16 copies of the weights {state[1] / 1e9:.1f} GB.")
    for card in (80, 141):
        print(f"- {card} GB are full at {card / 18:.1f} billion parameters (18 bytes each), "
              "without any activations.")


def split(name, lanes, slow, fast):
    """Seconds of a step of theirs for each lane and whatever the lanes, from lanes and 2 lanes."""
    T = THEIRS[name][1]
    one, two = lanes * T / slow, 2 * lanes * T / fast
    return (two - one) / lanes, 2 * one - two


def check_table(names, m, given):
    """NVIDIA's measurements: what our defaults are taken from, and what the formula misses."""
    theirs = Machine(peak=312, nvlink=240, gradient=2)  # A100; float16 gradients (apex O2)
    for gpu, name, lanes, slow, fast in TWO_SIZES:
        lane, fixed = split(name, lanes, slow, fast)
        config, T = THEIRS[name]
        operations = estimate.flops_per_step(config, 1, T)
        print(f"- {gpu}, {name}: fixed part {1e3 * fixed / config.n_layer:.2f} ms a layer, beyond "
              f"it {operations / lane / 1e12:.1f} TFLOP/s"
              + (f", {operations / lane / 312e12:.3f} of the peak" if gpu == "A100" else ""))
    print()
    rows = [("model", "lanes a GPU", "1 GPU, ms a step", "8 GPUs, measured", "predicted",
             "times as fast, measured", "predicted")]
    for name, lanes, one, eight in MEASURED:
        config, T = THEIRS[name]
        step, found = lanes * T / one, 8 * lanes * T / eight
        ours = step + not_hidden(config, 8, theirs, 2 / 3 * step)
        rows.append((name, lanes, *(f"{1e3 * z:.1f}" for z in (step, found, ours)),
                     f"{eight / one:.2f}", f"{8 * step / ours:.2f}"))
    table(*rows)
    print()
    for name, (T, M, milliseconds) in THEIR_EVALUATION.items():
        config = replace(THEIRS[name][0], mem_len=M)
        ours = (config.n_layer * theirs.fixed + 1e3 * estimate.flops_per_step(config, 1, T)
                / (theirs.fraction * 312e12)) / 3
        print(f"- evaluating {name}, one lane, T {T}, M {M}: measured {milliseconds:.1f} ms a "
              f"segment, by the formula {ours:.1f}")


def figure(names, m, given):
    """Speed over GPUs: whole lines up to B GPUs, dotted where B has to grow.

    text8-24L is left out, enwik8-24L but for V; its line is wide, for wt103-large lies on it.
    """
    axes = Figure(figsize=(7, 4.5), layout="constrained").subplots()
    powers = [2**i for i in range(11)]
    for name in names if len(names) == 1 else [z for z in names if z != "text8-24L"]:
        B = RUNS_OF[name].batch
        speed = {n: reckon(name, n, m, given.tokens_per_second)["speed"] for n in (*powers, B)}
        within = sorted(n for n in speed if n <= B)
        line, = axes.plot(within, [speed[n] / speed[1] for n in within], label=f"{name}, B = {B}",
                          linewidth=4 if name == "enwik8-24L" else 1.5)
        beyond = sorted(n for n in speed if n >= B)
        axes.plot(beyond, [speed[n] / speed[1] for n in beyond], ":", color=line.get_color())
        axes.plot(B, speed[B] / speed[1], "o", markersize=4, color=line.get_color())
    axes.plot(powers, powers, "--", color="0.6", linewidth=1, label="n times one GPU")
    axes.set(xscale="log", yscale="log", xlabel="GPUs (log scale)", xticks=powers,
             xticklabels=powers, ylabel="times as fast as one GPU (log scale)",
             title="Training by the formula; dotted: a larger batch than the paper's")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    lesson_1.RUNS.mkdir(exist_ok=True)
    axes.figure.savefig(lesson_1.RUNS / "scaling.png", dpi=120)
    print(f"figure: {lesson_1.RUNS.name}/scaling.png")


WHAT = {"speed": speed_table, "limits": limits_table, "check": check_table, "figure": figure}


def main(argv=None):
    """Print a table.  Exit status 1 and one line for a mistake."""
    parser = command_line.Parser(prog="experiments/scaling.py", argument_default=None,
                                 description="Scaling of training, on paper.")
    parser.add_argument("--what", choices=WHAT, default="speed")
    parser.add_argument("--model", choices=RUNS_OF, metavar="NAME", help="default: the paper's")
    parser.add_argument("--tokens-per-second", type=float, help="of one GPU, measured")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 1024])
    for field in fields(Machine):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default,
                            choices=("tree", "ring") if field.type is str else None,
                            help=f"default: {field.default}")
    try:
        given = parser.parse_args(argv)
        speed = given.tokens_per_second
        if speed is not None and not (given.model and 0 < speed < math.inf):
            raise ValueError("--tokens-per-second must be above 0 and goes with one --model")
        if given.model and not RUNS_OF[given.model].steps:
            raise ValueError(f"{given.model} trains for minutes, not steps: no hours to reckon")
        if min(given.gpus) < 1:
            raise ValueError(f"--gpus must be at least 1, got {min(given.gpus)}")
        machine = Machine(**{z.name: getattr(given, z.name) for z in fields(Machine)})
        WHAT[given.what]([given.model] if given.model else MODELS, machine, given)
    except ValueError as error:
        print(f"scaling.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
