"""Left open by the paper: how much memory, in training and after, and how deep a model?

For models of several depths, trained with several memory lengths, this draws the loss over the
memory length of evaluation: where is the gain, and where does it end?  N layers reach N times as
far.  It is read once as it is, and once with clamp_len: distances above those of training count as
the largest of training, M + T - 1.

    python experiments/memory_length.py --dtype bf16         half an hour on two cores
    python experiments/memory_length.py --scale copies       where the gains are known to the token
    python experiments/memory_length.py --scale paper        WikiText-103; GPUs

Losses are nats per token of the validation split.  "ends at" is the shortest memory within 0.002
nats of the best.
"""
import math
import statistics
import sys
from dataclasses import replace

from matplotlib.figure import Figure

import common
import table6_ablation
from common import Study, corpora, fast, lesson_5, mean_table, presets

NAME, TABLE_6 = "memory_length", table6_ablation.SCALES
# depths, memory lengths of training, and table 6's studies; lengths are memories of evaluation
SCALES = {
    "tiny": ((1, 2), (0, 8), replace(TABLE_6["tiny"], lengths=(1, 4, 8, 16))),
    "small": ((1, 2, 4), (0, 128, 512), replace(TABLE_6["small"], lengths=(
        32, 64, 96, 128, 192, 256, 384, 512, 768, 1024))),
    "copies": ((1, 2), (32, 64), replace(TABLE_6["copies"], lengths=(
        12, 22, 23, 32, 46, 47, 56, 70, 71, 80, 94, 95, 110, 128))),
    "paper": ((4, 8, 16), (0, 150, 600), Study(
        presets.CONFIGS["wt103-standard"], presets.RECIPES["wt103-standard"],
        (40, 80, 150, 300, 450, 640, 900, 1200, 1600), count=16, n=12_000))}
COLORS = ("tab:orange", "tab:blue", "tab:green")


def best_loss(c):
    """Return the lowest mean loss on the synthetic text that c tokens of context allow, in nats.

    It falls by a step at each of its distances, and is flat after the last.
    """
    copy, symbols = corpora.COPY_PROBABILITY, corpora.SYMBOLS_PER_KIND
    right = copy + (1 - copy) / symbols  # of the symbol that stood there
    other = (1 - copy) / symbols  # and of each of the others
    known = -right * math.log(right) - (symbols - 1) * other * math.log(other)
    losses = [known if d <= c else math.log(symbols) for d in corpora.DISTANCES]
    return statistics.mean(losses)


def evaluate(model, study, corpus, M):
    """Return mean losses in nats, {memory length: loss}, without and with clamp."""
    before, T = study.lengths[-1], study.recipe.segment
    tokens = common.excerpts(corpus.valid, before, study.count, study.n, model.u.device)
    reader = fast.prepared(model)
    return [{length: common.memory_losses(reader, tokens, before, max(64, T), mem_len=length,
                                          same_length=True, clamp_len=clamp).mean().item()
             for length in study.lengths} for clamp in (0, M + T - 1)]


def report(results, study, floor):
    """Print a line for each model: the gain from memory, and where it ends."""
    shortest, longest = study.lengths[0], study.lengths[-1]
    print("nats per token, mean ± half the range over the seeds; above best: with the longest "
          f"memory, M {longest}\n N  M in training{'best':>16}{f'gain over M {shortest}':>18}"
          f"{'ends at M':>11}{'above best':>16}{'..., clamped':>16}")
    for (N, M), seeds in results.items():
        free, clamped = zip(*seeds)
        best = [min(*a.values(), *b.values()) for a, b in zip(free, clamped)]
        gain = [min(a[shortest], b[shortest]) - low for a, b, low in zip(free, clamped, best)]
        above, above_clamped = ([z[longest] - low for z, low in zip(part, best)]
                                for part in (free, clamped))
        both = {length: min(z[length] for z in (mean_table(free), mean_table(clamped)))
                for length in study.lengths}
        end = next(length for length, z in both.items() if z <= min(both.values()) + 0.002)
        print(f"{N:2}{M:15}{common.spread(best):>16}{common.spread(gain):>18}{end:11}"
              f"{common.spread(above):>16}{common.spread(above_clamped):>16}")
    if floor:
        print("what M + 1 tokens tell: " + ", ".join(
            f"M {M}: {loss:.3f}" for M, loss in floor.items()))


def draw(results, study, floor, path, nats):
    """Plot a panel for each depth: loss over the memory length, a color per memory of training."""
    depths = list(dict.fromkeys(N for N, _ in results))
    figure = Figure(figsize=(1 + 3 * len(depths), 3.8), layout="constrained")
    panels = figure.subplots(1, len(depths), sharey=True)
    for axes, depth in zip(panels, depths):
        models = {M: list(zip(*seeds)) for (N, M), seeds in results.items() if N == depth}
        for color, (M, parts) in zip(COLORS, models.items()):
            for tables, style, name in zip(parts, ("-", ":"), ("", ", clamped")):
                low, high = ([pick(z[L] for z in tables) for L in study.lengths]
                             for pick in (min, max))
                axes.fill_between(study.lengths, low, high, color=color, alpha=0.12, linewidth=0)
                axes.plot(study.lengths, mean_table(tables).values(), style, color=color,
                          linewidth=2, label=f"trained with M {M}{name}")
        if floor:
            axes.step(*zip(*floor.items()), color="black", where="post",
                      label="what M + 1 tokens tell")
        axes.set(xscale="log", title=f"{depth} layer{'s' * (depth > 1)}", xlabel="M at evaluation")
        ticks = (23, 47, 71, 95, 128) if floor and 95 in study.lengths else study.lengths[1::2]
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.grid(axis="y", alpha=0.4)
    panels[0].set(ylabel=f"{nats}{' (not from 0)' * (not floor)}")
    if floor:
        panels[0].set(ylim=(-0.1, 3.5))
    panels[0].legend(fontsize=9)
    common.save_figure(figure, path)


@common.make_main
def main(argv):
    """Train what is missing, evaluate, print, draw."""
    given, corpus = common.begin(
        common.make_flags(NAME, __doc__, SCALES).parse_args(argv), NAME)
    depths, memories, study = SCALES[given.scale]
    config = replace(study.config, vocab_size=len(corpus.vocab))
    common.excerpts(corpus.valid, study.lengths[-1], study.count, study.n, "cpu")  # long enough?

    def make(N, M):
        return lesson_5.TransformerXL(replace(config, n_layer=N, mem_len=M)).to(given.device)

    recipe, results = study.recipe, {}
    for N in depths:
        for M in memories:
            models = common.fit_seeds(lambda: make(N, M), corpus, recipe, given, f"N{N}-M{M}")
            results[N, M] = [evaluate(model, study, corpus, M) for model in models]
    print(f"{corpus.name}; segments of {recipe.segment}, {recipe.steps:,} steps of "
          f"{recipe.batch} lanes, seeds {given.seeds}, {given.dtype}")
    floor = {M: best_loss(M + 1) for M in study.lengths} if given.dataset == "copies" else {}
    report(results, study, floor)
    draw(results, study, floor, given.out / "memory_length.png", common.nats_per_token(corpus))


if __name__ == "__main__":
    sys.exit(main())
