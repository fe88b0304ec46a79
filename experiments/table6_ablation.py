"""Tables 6, 7 and 10 of the paper: the effects of recurrence, encoding and loss.

    table 6     nine models of the same width and depth, on text with long dependencies
    table 7     three of them on text without: its lines shuffled (the paper: One Billion Word), so
                that recurrence only ends fragmentation
    table 10    equal memory in training instead of equal segments: without recurrence these are
                longer by LONGER, which was measured for the small scale (results.md)

    python experiments/table6_ablation.py --tables 6 --dtype bf16      45 models, 5 minutes each
    python experiments/table6_ablation.py --scale paper --tables 6 10  WikiText-103; GPUs
    python experiments/table6_ablation.py --scale lm1b --tables 7

The model is lesson 5's, with its recurrence, encoding and loss to be switched:

    ours       R_i-j, a sinusoid of the distance, through W_kR; all four terms     lessons 3 and 4
    ours-c     the same without term (c): u stays 0.  ours-d: (d), v; ours-cd: both
    shaw       a learned vector for each distance, in terms (a) and (b) only       lesson 3, preface
    vaswani    a sinusoid of the position in the segment, added to the embedding   lesson 1
    al-rfou    a learned vector for each position, added to the input of each layer

Of Al-Rfou et al. (2018) the two auxiliary losses are missing, as in the paper's row.  Recurrence is
a mem_len above 0.  It needs distances; one row, vaswani with recurrence, does without, and shows
what temporal confusion costs (lesson 2).  Rows that the paper does not have show a dash.

Each model reads excerpts of the text with many attention lengths L.  With recurrence a query sees L
keys, itself included; without, a window of L tokens moves on by a quarter of L.  "best" is the loss
of the test split at the length chosen on the validation split, the shortest within 0.001 nats of
the lowest.  "above" is a row's loss less that of the first with the same seed: the mean, and its 95
percent interval by Student's t.
"""
import math
import sys
from dataclasses import dataclass, replace
from statistics import mean, stdev

import common  # before torch

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from common import Study, lesson_1, lesson_5, presets
from training.batches import SentenceLanes

NAME = "table6_ablation"
LONGER = 19 / 16
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # seeds: Student's t, 97.5 percent


@dataclass(frozen=True)
class Row:
    """A row of a table: the model; the paper's perplexity at its best length, and this length."""

    table: int
    recurrence: bool
    encoding: str
    loss: str
    paper: tuple = None

    def __str__(self):
        return f"{self.encoding}, {self.loss}, {'recurrence' if self.recurrence else 'none'}"


ROWS = (
    Row(6, True, "ours", "full", (26.77, 500)),
    Row(6, True, "shaw", "full", (27.94, 256)),
    Row(6, True, "ours", "half", (28.33, 460)),
    Row(6, False, "ours", "full", (29.02, 260)),
    Row(6, False, "ours", "half", (30.10, 120)),
    Row(6, False, "shaw", "full", (29.75, 120)),
    Row(6, False, "shaw", "half", (30.50, 120)),
    Row(6, False, "vaswani", "half", (30.97, 120)),
    Row(6, False, "al-rfou", "half", (31.16, 120)),
    Row(6, True, "vaswani", "full"),
    Row(6, False, "vaswani", "full"),
    Row(6, False, "al-rfou", "full"),
    Row(6, True, "ours-c", "full"),
    Row(6, True, "ours-d", "full"),
    Row(6, True, "ours-cd", "full"),
    Row(7, True, "ours", "full", (25.2, "-")),
    Row(7, True, "shaw", "full", (25.7, "-")),
    Row(7, False, "ours", "full", (27.1, "-")),
    Row(10, True, "ours", "full", (26.77, 500)),
    Row(10, True, "ours", "half", (28.33, 460)),
    Row(10, False, "ours", "full", (27.98, 400)),
    Row(10, False, "ours", "half", (28.83, 120)))
COLORS = {"ours": "tab:blue", "shaw": "tab:orange", "vaswani": "tab:green", "al-rfou": "tab:red",
          "ours-c": "tab:cyan", "ours-d": "tab:purple", "ours-cd": "tab:brown"}

# 128M and 0.3B parameters as in the paper, which names no dimensions: these are ours
WT103 = replace(presets.CONFIGS["wt103-standard"], d_model=350, d_head=35, d_inner=2150)
LM1B = replace(presets.CONFIGS["lm1b-base"], n_layer=20, d_inner=2048)
SCALES = {
    "tiny": Study(lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16),
                  presets.Recipe(batch=4, segment=8, steps=6), (4, 8, 16, 24), count=2, n=30),
    "small": Study(presets.CONFIGS["laptop"],
                   replace(presets.RECIPES["laptop"], minutes=0.0, steps=4300),
                   (64, 128, 192, 256, 384, 512, 768, 1024), count=16, n=8125),
    "copies": Study(lesson_5.Config(2, n_layer=2, d_model=64, n_head=4, d_head=32, d_inner=128),
                    presets.Recipe(batch=16, segment=64, steps=700),
                    (16, 24, 32, 48, 64, 72, 96, 128), count=16, n=960),
    "paper": Study(WT103, replace(presets.RECIPES["wt103-standard"], segment=128),
                   (60, 120, 180, 256, 300, 360, 400, 450, 500, 560, 640), count=16, n=12_000),
    "lm1b": Study(LM1B, replace(presets.RECIPES["lm1b-base"], steps=400_000), (16, 32, 64, 96, 128),
                  count=16, n=12_000)}


# ---- the model: lesson 5's, with another encoding or loss ---------------------------------------

class LearnedDistances(nn.Module):
    """Instead of W_kR: a learned vector per distance, for all heads; the last for all beyond.

    The table is one matrix, so that it is trained by Muon, as W_kR is.
    """

    def __init__(self, distances, width):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(distances, width) * 0.02)

    def forward(self, R):
        """R (K, D), of which only K counts -> (K, H * C) by descending distance."""
        distance = torch.arange(len(R) - 1, -1, -1, device=R.device)
        return self.rows[distance.clamp(max=len(self.rows) - 1)]


def add_sinusoid(dropout, given, h):
    """Add Vaswani's positions to the embedding (B, T, D): a hook of dropout_embedding."""
    positions = lesson_1.sinusoid(torch.arange(h.shape[1], device=h.device), h.shape[2]).to(h)
    return h + F.dropout(positions, dropout.p, dropout.training)


def add_positions(layer, given):
    """Add Al-Rfou's positions to the input (B, T, D) of a layer: a hook of it."""
    h, *others = given
    return h + layer.positions[:, : h.shape[1]], *others


class AblationModel(lesson_5.TransformerXL):
    """Lesson 5's model with another encoding; T is the segment length of training.

    In training half_loss counts the later half of each segment twice, the earlier not at all.
    """

    def __init__(self, config, T, encoding="ours", half_loss=False):
        super().__init__(config)
        self.T, self.encoding, self.half_loss = T, encoding, half_loss
        self.variant = f"{encoding}, {'half' if half_loss else 'full'} loss, T {T}"
        for weight, term in (self.u, "c"), (self.v, "d"):
            if not encoding.startswith("ours") or term in encoding.partition("-")[2]:
                nn.init.zeros_(weight).requires_grad_(False)
        if encoding == "vaswani":
            self.dropout_embedding.register_forward_hook(add_sinusoid)
        for layer in self.layers:
            if encoding == "shaw":
                layer.attention.W_kR = LearnedDistances(
                    config.mem_len + T, config.n_head * config.d_head)
            elif not encoding.startswith("ours"):
                nn.init.zeros_(layer.attention.W_kR.weight).requires_grad_(False)
            if encoding == "al-rfou":
                layer.positions = nn.Parameter(torch.randn(1, T, config.d_model) * 0.02)
                layer.register_forward_pre_hook(add_positions)

    def forward(self, x, memory=None, y=None):
        """x, y (B, T) -> losses (B, T) in nats, new memory."""
        losses, memory = super().forward(x, memory, y)
        if self.half_loss and self.training:
            T = x.shape[1]
            losses = 2 * losses * (torch.arange(T, device=x.device) >= T // 2)
        return losses, memory


def make(row, study, given, T=0):
    """Return the untrained model of a row, for segments of T (0: the study's)."""
    T = T or study.recipe.segment
    config = replace(study.config, mem_len=T if row.recurrence else 0)
    return AblationModel(config, T, row.encoding, row.loss == "half").to(given.device)


def stem(row):
    """Return the name of the folder of a row's model, before its seed."""
    return f"{'recurrence' if row.recurrence else 'none'}-{row.encoding}-{row.loss}"


# ---- texts and lengths --------------------------------------------------------------------------

def study_of(given, corpus):
    """Return the study of a scale, with the vocabulary of a corpus."""
    study = SCALES[given.scale]
    return replace(study, config=replace(study.config, vocab_size=len(corpus.vocab)))


def without_order(corpus):
    """Return the corpus with its lines shuffled: the training text in each epoch, others once."""
    if corpus.separator is not None:
        return corpus  # One Billion Word is so already
    ends = [corpus.vocab.index(symbol) for symbol in (10, "<eos>") if symbol in corpus.vocab]
    splits = corpus.train, corpus.valid, corpus.test
    if not ends or min((split == ends[0]).sum() for split in splits) < 200:
        raise ValueError(f"table 7 shuffles lines, and {corpus.name} has fewer than 200 in a "
                         "split: leave out table 7")
    lanes = [SentenceLanes(split, 1, ends[0], 0, 0) for split in splits[1:]]
    valid, test = (z[:, : z.shape[1]][0] for z in lanes)
    return replace(corpus, separator=ends[0], valid=valid, test=test)


# ---- the tables ---------------------------------------------------------------------------------

def evaluate(model, row, study, corpus, T):
    """Return mean losses in nats: of an eighth as much of the validation split {attention length:
    loss}, and of the test split that at the best length there.
    """
    def loss(split, n, L):
        before = study.lengths[-1]
        tokens = common.excerpts(split, before, study.count, n, model.u.device)
        if row.recurrence:
            losses = common.memory_losses(model, tokens, before, max(64, T), mem_len=L - 1,
                                          same_length=True)
        else:
            losses = common.window_losses(model, tokens, before, L)
        return losses.mean().item()

    lengths = [L for L in study.lengths if L <= T or row.encoding != "al-rfou"]  # T positions
    valid = {L: loss(corpus.valid, study.n // 8, L) for L in lengths}
    return valid, loss(corpus.test, study.n, best_length(valid))


def best_length(losses):
    """Return the shortest length within 0.001 nats of the lowest of these losses."""
    return next(L for L, loss in losses.items() if loss <= min(losses.values()) + 0.001)


def interval(values):
    """Return the mean of one value per seed, and half of its 95 percent interval."""
    if len(values) not in T95:
        return mean(values), math.inf
    return mean(values), T95[len(values)] * stdev(values) / math.sqrt(len(values))


def report(table, rows, results):
    """Print one table beside the paper's -> [(row, above the first in nats by seed, paper's)].
    Results are {row: [(losses of validation, loss of test) of each seed]}."""
    print(f"\ntable {table}, nats per token: mean ± half the range over the seeds; above row 1: "
          "mean of the differences ± half of its 95 percent interval\n"
          f"{'recurrence':11}{'encoding':9}{'loss':5}{'best':>15}{'at':>8}{'above row 1':>17}"
          f" | paper, ppl{'at':>5}  order")
    best = {row: [test for _, test in results[row]] for row in rows}
    points = []
    for row in rows:
        above = [mine - first for mine, first in zip(best[row], best[rows[0]])]
        theirs = row.paper or ("-", "-")
        paper = math.log(row.paper[0] / rows[0].paper[0]) if row.paper else None
        order = status(above, paper) if row.paper and row != rows[0] else ""
        print(f"{'yes' if row.recurrence else 'no':11}{row.encoding:9}{row.loss:5}"
              f"{common.spread(best[row]):>15}"
              f"{best_length(common.mean_table([valid for valid, _ in results[row]])):>8}"
              f"{'{:.3f} ± {:.3f}'.format(*interval(above)):>17} | "
              f"{theirs[0]:>10}{theirs[1]:>5}  {order}".rstrip())
        points.append((row, above, paper))
    return points


def status(above, paper):
    """Return how the differences of the seeds compare with the paper's: `bounded` if their interval
    contains 0."""
    middle, half = interval(above)
    if abs(middle) <= half:
        return "bounded"
    return "same" if (middle > 0) == (paper > 0) else "reversed"


def draw(points, results, path, title, nats):
    """Plot, left, how far each row is above the first; right, loss over attention length."""
    figure = Figure(figsize=(11, 1.2 + 0.3 * max(7, len(points))), layout="constrained")
    left, right = figure.subplots(1, 2)
    limit = 1.2 * max(0.05, *(max(above) for _, above, paper in points if paper is not None))
    for row, above, _ in points:
        style = {"color": COLORS[row.encoding], "marker": "o" if row.recurrence else "^",
                 "fillstyle": "full" if row.loss == "full" else "none"}
        left.plot(above, [str(row)] * len(above), linestyle="", **style)
        if min(above) > limit:
            left.text(limit, str(row), f"{mean(above):.2f} → ", ha="right", va="center")
        by_length = common.mean_table([valid for valid, _ in results[row]])
        right.plot(*zip(*by_length.items()), linestyle="-" if row.recurrence else ":", **style)
    left.invert_yaxis()
    left.set(title=title, xlim=(None, limit), xlabel=f"{nats} above the first row; a mark per seed")
    left.grid(axis="x", alpha=0.4)
    lowest = min(min(z.values()) for row, *_ in points for z, _ in results[row])
    lengths = [*results[points[0][0]][0][0]]  # al-rfou has only the lengths of training
    right.set(title="validation, mean of the seeds, same marks", ylabel=f"{nats} (not from 0)",
              ylim=(lowest - 0.1 * limit, lowest + 1.7 * limit), xscale="log",
              xlabel="attention length (log scale)")
    right.set_xticks(lengths, lengths, rotation=60)
    right.minorticks_off()
    common.save_figure(figure, path)


@common.make_main
def main(argv):
    """Train what is missing, evaluate, print, draw."""
    flags = common.make_flags(NAME, __doc__, SCALES)
    flags.add_argument("--tables", type=int, nargs="+", choices=(6, 7, 10), default=[6, 7, 10])
    given, ordered = common.begin(flags.parse_args(argv), NAME)
    study = study_of(given, ordered)
    rows = [row for row in ROWS if row.table in given.tables]
    shuffled = without_order(ordered) if 7 in given.tables else ordered
    for split in (ordered.valid, ordered.test, shuffled.valid, shuffled.test):  # long enough?
        common.excerpts(split, study.lengths[-1], study.count, study.n, "cpu")
    print(f"{ordered.name}; segments of {study.recipe.segment}, {study.recipe.steps:,} steps of "
          f"{study.recipe.batch} lanes, seeds {given.seeds}, {given.dtype}")
    results = {row: [] for row in rows}
    for row in rows:
        corpus, T, name = ordered, study.recipe.segment, stem(row)
        if row.table == 7:
            corpus, name = shuffled, name + "-shuffled"
        if row.table == 10 and not row.recurrence:
            T = int(LONGER * T)
            name += f"-{T}"
        recipe = replace(study.recipe, segment=T)
        jobs = common.fit_seeds(lambda: make(row, study, given, T), corpus, recipe, given, name)
        for job in jobs:
            results[row].append(evaluate(job.model, row, study, corpus, T))
    for table in dict.fromkeys(given.tables):
        of_table = [row for row in rows if row.table == table]
        points = report(table, of_table, results)
        draw(points, results, given.out / f"table{table}.png",
             f"table {table}, {corpus.name.split(' (')[0]}", common.nats_per_token(corpus))


if __name__ == "__main__":
    sys.exit(main())
