"""How training would scale to 1,024 GPUs, on paper: a formula and assumptions, no measurement.

    python experiments/scaling.py                     the paper's models on 1, 8, 64, 1,024 GPUs
    python experiments/scaling.py --what check        the formula beside what others measured
    python experiments/scaling.py --what figure       speed over GPUs, into runs/scaling.png

Plain data parallelism: n GPUs hold the whole model and b = B / n (rounded up) of the B lanes each,
with the memory of these lanes; where n is above B, B grows to n.  DistributedDataParallel averages
the gradients (S bytes) in buckets of 25 MiB while the backward pass goes on.  In seconds:

    compute    = parts N fixed + b T F / (fraction peak)            F: FLOPs a token (estimate.py)
    all-reduce = 2 (n - 1) / n S / bandwidth + ceil(S / bucket) 2 log2(n) latency
    exposed    = max(0, that of the layers - 2/3 compute / parts) + that of embedding and output
    step       = compute + exposed

`exposed` is the part of the all-reduce that the backward pass does not overlap.  `fixed` is what a
layer takes in a step however few lanes there are (starting kernels, Adam).  `parts` (micro-batches)
is the least with which the memory fits.  Backward is 2/3 of the compute.  The embedding is the
output matrix, too, so its gradient is complete only with the very last operation: nothing is left
to overlap its all-reduce.  The bandwidth is that of the slowest link, nvlink up to 8 GPUs, network
above; the hops are those of a tree.
"""
import math
import sys
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from matplotlib.figure import Figure

import common
from common import lesson_1, lesson_5, presets
from training import estimate

NAME, MODELS = "scaling", ("enwik8-12L", "enwik8-24L", "wt103-large", "lm1b-large")
# NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL/README.md, DGX A100, mixed
# precision: lanes a GPU, tokens/s on 1 GPU and on 8; T = M; the models from pytorch/wt103_*.yaml
BASE = replace(presets.CONFIGS["wt103-standard"], d_model=512, n_head=8, d_head=64, d_inner=2048,
               mem_len=192)
MEASURED = (("base", BASE, 32, 59_961, 449_890),
            ("large", presets.CONFIGS["wt103-large"], 8, 21_554, 159_185),
            ("large", presets.CONFIGS["wt103-large"], 16, 25_084, 191_148))


@dataclass(frozen=True)
class Machine:
    """What is assumed of the machine; every field is a flag.  Sources: results.md."""

    peak: float = 989.0  # TFLOP/s, bf16 without sparsity: one H200
    fraction: float = 0.19  # of the peak, beyond the fixed part: NVIDIA's A100 (--what check)
    fixed: float = 2.2  # milliseconds a layer and step: the same A100
    card: float = 141.0  # GB of memory
    nvlink: float = 370.0  # GB/s through each GPU in a node of 8
    network: float = 350.0  # GB/s through each node
    latency: float = 5.0  # microseconds a hop
    gradient: float = 4.0  # bytes a parameter that are all-reduced
    price: float = 3.0  # dollars an hour and GPU


@cache
def parameters(config):
    """Parameters of the model, and of its embedding and output alone; nothing is allocated."""
    with torch.device("meta"):
        model = lesson_5.TransformerXL(config)
    return [sum(p.numel() for p in part.parameters()) for part in (model, model.embedding)]


def all_reduce(size, n, m):
    """Seconds to sum `size` bytes over n GPUs; 0 for one."""
    bandwidth = 1e9 * (m.nvlink if n <= 8 else m.network)
    hops = math.ceil(size / (25 * 2**20)) * 2 * math.ceil(math.log2(n))
    return 2 * (n - 1) / n * size / bandwidth + hops * m.latency / 1e6


def exposed(config, n, m, backward):
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


def predict(name, n, m):
    """All figures of one model on n GPUs, as a dict; times in seconds, memory in bytes."""
    config, run = presets.CONFIGS[name], presets.RUNS[name]
    batch, T = max(run.batch, n), run.segment
    b = math.ceil(batch / n)
    size, parts = memory(config, T, b, m)
    operations = estimate.flops_per_step(config, b, T)
    compute = parts * config.n_layer * m.fixed / 1e3 + operations / (m.fraction * m.peak * 1e12)
    late = exposed(config, n, m, 2 / 3 * compute / parts)
    speed = batch * T / (compute + late)
    training = run.steps * run.batch * T / speed
    return {"lanes": b, "parts": parts, "bytes": size, "step": compute + late, "exposed": late,
            "all_reduce": all_reduce(m.gradient * parameters(config)[0], n, m), "speed": speed,
            "training": training, "cost": n * training / 3600 * m.price}


def short(z):
    """Three digits, more would claim too much: 0.0123, 4.56, 789, 12,300."""
    return f"{float(f'{z:.3g}'):,.0f}" if z >= 100 else f"{z:.3g}"


def table(*rows):
    """Print rows of text as a table in Markdown; the first is the head."""
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(map(str, row)) + " |")


def show_speed(names, m, gpus):
    """A line for each model and number of GPUs."""
    rows = [("model", "GPUs", "lanes a GPU", "parts", "GB a GPU", "step, ms", "all-reduce, ms",
             "exposed", "tokens/s", "hours", "cost, $", "of n GPUs")]
    for name in names:
        alone = predict(name, 1, m)["speed"]
        for n in gpus:
            z = predict(name, n, m)
            numbers = (z["bytes"] / 1e9, 1e3 * z["step"], 1e3 * z["all_reduce"],
                       1e3 * z["exposed"], z["speed"], z["training"] / 3600, z["cost"])
            star = "*" if n > presets.RUNS[name].batch else ""
            rows.append((name, f"{n:,}{star}", z["lanes"], z["parts"], *map(short, numbers),
                         f"{z['speed'] / n / alone:.0%}"))
    table(*rows)


def show_check(names, m, gpus):
    """NVIDIA's measurements: what our defaults are taken from, and what the formula misses."""
    (_, config, lanes, slow, _), (_, _, twice, fast, _) = MEASURED[1:]
    one, two = lanes * config.mem_len / slow, twice * config.mem_len / fast  # seconds of a step
    rate = estimate.flops_per_step(config, twice - lanes, config.mem_len) / (two - one)
    print(f"large: fixed part {1e3 * (2 * one - two) / config.n_layer:.2f} ms a layer, beyond it "
          f"{rate / 1e12:.1f} TFLOP/s, {rate / 312e12:.3f} of an A100's peak\n")
    rows = [("model", "lanes a GPU", "1 GPU, ms a step", "8 GPUs, measured", "predicted",
             "times as fast, measured", "predicted")]
    theirs = Machine(nvlink=240, gradient=2)  # A100; float16 gradients (apex O2)
    for name, config, lanes, alone, eight in MEASURED:
        step, found = lanes * config.mem_len / alone, 8 * lanes * config.mem_len / eight
        ours = step + exposed(config, 8, theirs, 2 / 3 * step)
        rows.append((name, lanes, *(f"{1e3 * z:.1f}" for z in (step, found, ours)),
                     f"{eight / alone:.2f}", f"{8 * step / ours:.2f}"))
    table(*rows)


def draw(names, m, gpus):
    """Speed over GPUs: whole lines up to B GPUs, dotted where B has to grow."""
    axes = Figure(figsize=(7, 4.5), layout="constrained").subplots()
    powers = [2**i for i in range(11)]
    for i, name in enumerate(names):
        speeds = [predict(name, n, m)["speed"] for n in powers]
        times = [speed / speeds[0] for speed in speeds]
        within = sum(n <= presets.RUNS[name].batch for n in powers)
        axes.plot(powers, times, ":", color=f"C{i}")
        axes.plot(powers[:within], times[:within], "o-", color=f"C{i}", markersize=4,
                  linewidth=4 if name == "enwik8-24L" else 1.5,  # the next one lies on it
                  label=f"{name}, B = {presets.RUNS[name].batch}")
    axes.plot(powers, powers, "--", color="0.6", linewidth=1, label="n times one GPU")
    axes.set(xscale="log", yscale="log", xlabel="GPUs (log scale)", xticks=powers,
             xticklabels=powers, ylabel="times as fast as one GPU (log scale)",
             title="Training by the formula; dotted: a larger batch than the paper's")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    lesson_1.RUNS.mkdir(exist_ok=True)
    common.save_figure(axes.figure, lesson_1.RUNS / "scaling.png")


WHAT = {"speed": show_speed, "check": show_check, "figure": draw}


@common.command
def main(argv):
    """Print a table, or draw."""
    flags = common.new_parser(NAME, __doc__)
    flags.add_argument("--what", choices=WHAT, default="speed")
    flags.add_argument(
        "--model", choices=[name for name, run in presets.RUNS.items() if run.steps])
    flags.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 1024])
    for field in fields(Machine):
        flags.add_argument(f"--{field.name}", type=float, default=field.default)
    given = flags.parse_args(argv)
    machine = Machine(**{field.name: getattr(given, field.name) for field in fields(Machine)})
    for name, value in {"gpus": min(given.gpus), **vars(machine)}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} must be above 0, got {value}")
    WHAT[given.what]([given.model] if given.model else MODELS, machine, given.gpus)


if __name__ == "__main__":
    sys.exit(main())
