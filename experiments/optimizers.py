"""Adam and Muon in the same five minutes, and what a memory brings to each model.

    python experiments/optimizers.py              five minutes for each seed and optimizer
    python experiments/optimizers.py --out runs/steps --steps 1500     further flags are train.py's

A run is `python train.py --seed N`, or the same with FLAGS["adam"], kept in a folder of --out; what
is finished is not trained again.  Its best model reads the first 100,000 bytes of the validation
text with memories from 0 to 2,048, beyond training's length twice: all distances as they are, and
the larger ones counted as the largest of training (clamp).  With M 0 each query sees only itself,
and that loss is above the figure.
"""
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

import common
from common import lesson_1, train
from training import fast, log

NAME = "optimizers"
MEMORIES = 0, 32, 64, 128, 256, 512, 1024, 2048
STYLES = {"adam": "C1", "muon": "C0"}
FLAGS = {"muon": ["--optimizer", "muon"],  # the default; Adam with what was best for it
         "adam": "--optimizer adam --lr 3e-3 --warmup 100 --schedule cosine --clip 0.25".split()}


def losses_over_memory(out, data_dir):
    """{(M, clamp): bpc on the beginning of the validation text} of a run's best model."""
    model, run, corpus, _ = common.open_run(out, data_dir)
    reader, tokens = fast.reader_of(model, run.plain), train.validation_tokens(corpus, run)
    found = {}
    farthest = model.config.mem_len + run.segment - 1  # the largest distance in training
    for M in MEMORIES:
        for clamp in {0, farthest if M > farthest else 0}:
            lengths = replace(run, eval_mem_len=M, eval_clamp_len=clamp)
            nats = train.evaluate(reader, tokens, lengths, f"{out.name}, M {M}")
            found[M, clamp > 0] = nats / math.log(2)
    return found


def draw(curves, losses, path):
    """The figure of {(name, seed): [(minutes, bpc)]} and {(name, seed): {(M, clamp): bpc}}."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, seed), curve in curves.items():
        label = name.title() if seed == min(s for _, s in curves) else None
        left.plot(*zip(*curve), STYLES[name], alpha=0.7, linewidth=1, label=label)
        for clamp, line, what in ((False, "o-", ""), (True, "x:", ", larger distances clamped")):
            points = {MEMORIES.index(M): loss for (M, clamped), loss in losses[name, seed].items()
                      if clamped == clamp}
            right.plot(points.keys(), points.values(), line, color=STYLES[name], alpha=0.7,
                       markersize=4, linewidth=1, label=label and label + what)
    left.set(xlabel="minutes of training", ylabel="training loss (bits per byte)", xlim=(0, None),
             ylim=(0, None), title="The same time, two optimizers")
    right.set(xlabel="memory M at evaluation (bytes)", ylabel="validation loss (bits per byte)",
              xticks=range(len(MEMORIES)), xticklabels=MEMORIES, ylim=(0, 2.5),
              title="What a memory brings to each")
    for axes in (left, right):
        axes.grid(alpha=0.4)
        axes.legend()
    common.save_figure(figure, path)


@common.command
def main(argv):
    """Train what is missing, evaluate all, print a table and draw."""
    flags = common.new_parser(NAME, __doc__, "--seeds", "--data-dir")
    flags.add_argument("--out", default=lesson_1.RUNS / NAME, metavar="FOLDER")
    given, others = flags.parse_known_args(argv)
    common.check_seeds(given.seeds)
    curves, losses = {}, {}
    for seed in given.seeds:
        for name in STYLES:
            out = Path(given.out) / f"{name}-{seed}"
            common.train_run(out, [*FLAGS[name], "--seed", str(seed), *others,
                                   "--data-dir", str(given.data_dir)])
            rows = log.read_metrics(out / "metrics.tsv")
            curves[name, seed] = [(float(row["seconds"]) / 60, float(row["train"]))
                                  for row in rows if row["train"]]
            losses[name, seed] = losses_over_memory(out, given.data_dir)
            print(f"{name}, seed {seed}: {rows[-1]['step']} steps, "
                  f"{float(rows[-1]['seconds']) / 60:.1f} minutes of training", flush=True)
    print("validation in bits per byte, mean over the seeds; (c): larger distances clamped\n"
          "M        " + " ".join(f"{name:>14}" for name in STYLES))
    for M, clamped in next(iter(losses.values())):
        means = [statistics.mean(losses[name, seed][M, clamped] for seed in given.seeds)
                 for name in STYLES]
        print(f"{M:<5} {'(c)' if clamped else '   '}" + " ".join(f"{z:14.4f}" for z in means))
    draw(curves, losses, Path(given.out) / "optimizers.png")


if __name__ == "__main__":
    sys.exit(main())
