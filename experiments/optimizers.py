"""Adam and Muon at the same number of steps, where only the optimizer differs.

    python experiments/optimizers.py          half an hour on two cores

Both train the default model from the same weights on the same segments.  Each is tried with four
learning rates and two schedules, with the first seed, and trains three seeds with what was best.
Muon has two rates, its own and Adam's for embeddings, biases and norms: they move together, in the
default's ratio.  The loss that decides is that of pieces of the validation text, read as in
training (M = T); then longer memories are tried, on the same pieces.

Why should Muon be faster?  It is said to treat all directions of a matrix alike where a gradient
and Adam's step favour a few (training/optimizers.py).  This can be looked at: one matrix of a
trained model gets a series of gradients, and the last of them and what both optimizers make of the
series are taken apart into singular values.
"""
import math
import sys
from dataclasses import replace
from itertools import product

import torch
from matplotlib.figure import Figure

import common
from common import Setting, lesson_5, presets, train
from training.batches import Batches

NAME = "optimizers"
RATES = {"adam": (0.0015, 0.003, 0.006, 0.012), "muon": (0.005, 0.01, 0.02, 0.04)}
SCHEDULES = {"sqrt": {"schedule": "sqrt", "warmup": 20, "clip": 1.0},  # the default run's
             "cosine": {"schedule": "cosine", "warmup": 100, "clip": 0.25}}  # other runs'
COLORS = {"adam": "C1", "muon": "C0", "gradient": "C7"}
SIZES = {
    "tiny": Setting(lesson_5.CONFIGS["tiny"], presets.Run(batch=4, segment=16, steps=6),
                    (8, 16, 32), count=2, n=30),
    "laptop": Setting(presets.CONFIGS["laptop"],
                      replace(presets.RUNS["laptop"], minutes=0.0, steps=1300),
                      (32, 64, 128, 256, 512, 1024), count=16, n=960)}


def trained(optimizer, rate, schedule, seed, setting, corpus, given):
    """The model of one run."""
    run = replace(setting.run, optimizer=optimizer, muon_lr=rate, seed=seed,
                  lr=rate * (0.6 if optimizer == "muon" else 1), **SCHEDULES[schedule])
    torch.manual_seed(seed)
    model = lesson_5.TransformerXL(setting.config).to(given.device)
    return common.fit(model, corpus, run,
                      given.out / f"{optimizer}-{rate:g}-{schedule}-{seed}.pt")


def bits(model, tokens, setting, M):
    """The loss of pieces of text with memory length M, in bits per byte."""
    losses = common.memory_losses(model, tokens, setting.lengths[-1], setting.run.segment,
                                  mem_len=M, same_length=True)
    return losses.mean().item() / math.log(2)


def spectra(model, corpus, run, steps):
    """Singular values, the largest first and as 1: of a gradient of W_q, and of both updates.

    The model stands still.  Two copies of the matrix, always put back to 0, get its gradients, one
    for each segment; what the last step has made of them is that step.
    """
    weight = model.layers[len(model.layers) // 2].attention.W_q.weight
    copies = {name: torch.zeros_like(weight, requires_grad=True) for name in RATES}
    optimizers = (torch.optim.Adam([copies["adam"]], lr=1.0),
                  torch.optim.Muon([copies["muon"]], lr=1.0))  # a decay of 0 is 0
    batches, memory = Batches(corpus, run, weight.device), None
    for _ in train.progress(range(steps), "gradients", steps):
        x, y = next(batches)
        losses, memory = model(x, memory, y)
        gradient, = torch.autograd.grad(losses.mean(), weight)
        for copy in copies.values():
            copy.data.zero_()
            copy.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    matrices = {"gradient": gradient} | {name: -z.detach() for name, z in copies.items()}
    values = {name: torch.linalg.svdvals(z) for name, z in matrices.items()}
    return {name: z / z[0] for name, z in values.items()}


def draw(trials, losses, values, path):
    """Three panels: the search, what a memory brings to each model, the singular values."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    search, memory, spectrum = figure.subplots(1, 3)
    for (name, schedule), line in zip(product(RATES, SCHEDULES), ("o-", "x:") * 2):
        points = [(rate, bpc) for (*z, rate), bpc in trials.items() if z == [name, schedule]]
        search.plot(*zip(*points), line, color=COLORS[name], label=f"{name.title()}, {schedule}")
    for name, tables in losses.items():
        for table in tables:
            memory.plot(*zip(*table.items()), "o-", color=COLORS[name], markersize=4, alpha=0.7,
                        label=name.title() * (table is tables[0]))
    for name, z in values.items():
        spectrum.plot(range(1, len(z) + 1), z.cpu(), color=COLORS[name],
                      label="gradient" if name == "gradient" else f"step of {name.title()}")
    search.set(title="the search: one seed", xlabel="learning rate (log scale)", xscale="log",
               ylabel="validation loss (bits per byte)", ylim=(0, None))
    memory.set(title="the best of each: three seeds", xlabel="memory M at evaluation (log scale)",
               xscale="log", ylabel="validation loss (bits per byte)", ylim=(0, None))
    spectrum.set(title="singular values of W_q's step", xlabel="number, the largest first",
                 ylabel="size (largest: 1; log scale)", yscale="log", ylim=(1e-3, 1.5))
    search.set_xticks(RATES["adam"], RATES["adam"])
    lengths = list(losses["muon"][0])
    memory.set_xticks(lengths, lengths)
    for axes in (search, memory, spectrum):
        axes.minorticks_off()
        axes.grid(alpha=0.4)
        axes.legend()
    common.save_figure(figure, path)


@common.command
def main(argv):
    """Search, train, evaluate, print and draw."""
    flags = common.make_flags(NAME, __doc__, tuple(SIZES), dataset="stdlib")
    given, corpus = common.begin(flags.parse_args(argv), NAME)
    setting, T = SIZES[given.size], SIZES[given.size].run.segment
    setting = replace(setting, config=replace(setting.config, vocab_size=len(corpus.vocab)))
    tokens = common.pieces(corpus.valid, setting.lengths[-1], setting.count, setting.n)
    setting = replace(setting, run=common.choose_dtype(
        lesson_5.TransformerXL(setting.config).to(given.device), setting.run, given.out))
    print(f"{corpus.name}; {setting.run.steps:,} steps, seeds {given.seeds}, {setting.run.dtype}; "
          f"validation in bits per byte\nthe search, seed {given.seeds[0]}, M {T}")
    trials, losses = {}, {}
    for name, schedule in product(RATES, SCHEDULES):
        for rate in RATES[name]:
            model = trained(name, rate, schedule, given.seeds[0], setting, corpus, given)
            trials[name, schedule, rate] = bits(model, tokens, setting, T)
            print(f"{name:5}{schedule:>8}{rate:8g}{trials[name, schedule, rate]:8.3f}", flush=True)
    for name in RATES:
        *_, schedule, rate = min((key for key in trials if key[0] == name), key=trials.get)
        models = [trained(name, rate, schedule, seed, setting, corpus, given)
                  for seed in given.seeds]
        losses[name] = [{M: bits(model, tokens, setting, M) for M in setting.lengths}
                        for model in models]
        print(f"{name}, {schedule}, {rate:g}:  " + "  ".join(
            f"M {M}: {common.spread([table[M] for table in losses[name]])}"
            for M in setting.lengths))
    values = spectra(models[0], corpus, setting.run, steps=30)
    for name, z in values.items():
        energy = (z.square().cumsum(0) / z.square().sum() < 0.9).sum() + 1
        print(f"{name}: {energy} of {len(z)} singular values hold 90 percent of its squares")
    draw(trials, losses, values, given.out / "optimizers.png")


if __name__ == "__main__":
    sys.exit(main())
