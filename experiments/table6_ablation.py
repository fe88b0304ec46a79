"""Tables 6, 7 and 10 of the paper: what recurrence, encoding and loss are worth.

    table 6     nine models of the same width and depth, on text with long dependencies
    table 7     three of them on text without: its lines shuffled (the paper: One Billion Word,
                whose sentences are), so that recurrence brings an end of fragmentation, and
                context within lines that are longer than a segment, but no more
    table 10    with equal memory in training instead of equal segments: without recurrence there is
                room for longer ones, up to what the first model takes; that is measured.  They
                read as many segments, so more tokens

    python experiments/table6_ablation.py                              half an hour on two cores
    python experiments/table6_ablation.py --tables 6 --dataset copies  where all is known
    python experiments/table6_ablation.py --size paper --tables 6 10   WikiText-103; GPUs
    python experiments/table6_ablation.py --size paper --tables 7 --dataset lm1b

Each model reads pieces of the validation split with many attention lengths L.  With recurrence each
query sees L keys, itself included, most of them in memory, and N layers reach N (L - 1) tokens
back; without, a window of L tokens moves on by a quarter of L, and nothing beyond it is seen.
"trained" is evaluated with the lengths of training (without recurrence: windows of T, which is
kinder than segments of T); "best" is the best of all, "at" the shortest length within 0.001 nats of
it.  Length and loss are of the same tokens.

Losses are in nats a token.  A row also says how far it lies above the first; for the paper this is
ln(perplexity / that of the first row).  Order and sign compare with ours, size does not: there a
token is a word, about five bytes.
"""
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, log

import torch
from matplotlib.figure import Figure

import common
from ablation_model import AblationModel, lesson_5
from common import Config, Setting, corpora, train

NAME = "table6_ablation"


@dataclass(frozen=True)
class Row:
    """A row of the paper: its table, the model, perplexity as trained and best, best length."""

    table: int
    recurrence: bool
    encoding: str
    loss: str
    paper: tuple


ROWS = (
    Row(6, True, "ours", "full", (27.02, 26.77, 500)),
    Row(6, True, "shaw", "full", (27.94, 27.94, 256)),
    Row(6, True, "ours", "half", (28.69, 28.33, 460)),
    Row(6, False, "ours", "full", (29.59, 29.02, 260)),
    Row(6, False, "ours", "half", (30.10, 30.10, 120)),
    Row(6, False, "shaw", "full", (29.75, 29.75, 120)),
    Row(6, False, "shaw", "half", (30.50, 30.50, 120)),
    Row(6, False, "vaswani", "half", (30.97, 30.97, 120)),
    Row(6, False, "al-rfou", "half", (31.16, 31.16, 120)),
    Row(7, True, "ours", "full", (25.2, 25.2, "-")),
    Row(7, True, "shaw", "full", (25.7, 25.7, "-")),
    Row(7, False, "ours", "full", (27.1, 27.1, "-")),
    Row(10, True, "ours", "full", (27.02, 26.77, 500)),
    Row(10, False, "ours", "full", (27.98, 27.98, 400)),
    Row(10, False, "ours", "half", (28.83, 28.83, 120)))
COLORS = {"ours": "tab:blue", "shaw": "tab:orange", "vaswani": "tab:green", "al-rfou": "tab:red"}

# 128M and 0.3B parameters as in the paper, which names no dimensions: these are ours
WT103 = replace(lesson_5.CONFIGS["wt103-standard"], d_model=350, d_head=35, d_inner=2150)
LM1B = replace(lesson_5.CONFIGS["lm1b-base"], n_layer=20, d_inner=2048)
SIZES = {
    "tiny": Setting(Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16),
                    train.Run(batch=4, segment=8, steps=6), (4, 8, 16, 24), count=2, n=30),
    "laptop": Setting(Config(2, n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512),
                      train.Run(batch=64, segment=16, steps=1000),
                      (8, 16, 24, 32, 48, 64, 96, 128, 192, 256), count=16, n=960),
    "copies": Setting(Config(2, n_layer=2, d_model=64, n_head=4, d_head=32, d_inner=128),
                      train.Run(batch=16, segment=64, steps=700),
                      (16, 24, 32, 48, 64, 72, 96, 128), count=16, n=960),
    "paper": Setting(WT103, replace(train.RUNS_OF["wt103-standard"], segment=128),
                     (60, 120, 180, 256, 300, 360, 400, 450, 500, 560, 640),
                     count=16, n=12_000),
    "lm1b": Setting(LM1B, replace(train.RUNS_OF["lm1b-base"], steps=400_000), (16, 32, 64, 96, 128),
                    count=16, n=12_000)}


def setting_of(given, corpus):
    """The setting for a corpus, and its name: two corpora have settings of their own."""
    own = given.size
    if given.dataset == "copies" and own == "laptop":
        own = "copies"
    if given.dataset == "lm1b" and own == "paper":
        own = "lm1b"
    config = replace(SIZES[own].config, vocab_size=len(corpus.vocab))
    return replace(SIZES[own], config=config), own


def without_order(corpus):
    """The same corpus with its lines shuffled: validation once, training anew in each epoch."""
    if corpus.separator is not None:
        return corpus  # One Billion Word is so already
    ends = [symbol for symbol in (10, "<eos>") if symbol in corpus.vocab]
    if not ends:
        raise ValueError(f"table 7 shuffles lines, and {corpus.name} has none: leave out table 7")
    separator = corpus.vocab.index(ends[0])
    if min((split == separator).sum() for split in (corpus.train, corpus.valid)) < 200:
        raise ValueError(f"table 7 shuffles lines, and {corpus.name} has fewer than 200 in a "
                         "split: leave out table 7")
    valid = corpora.SentenceLanes(corpus.valid, 1, separator, 0, 0)
    return replace(corpus, separator=separator, valid=valid[:, : valid.shape[1]][0])


def make(row, setting, given, T=0):
    """The untrained model of a row, for segments of T (0: the setting's)."""
    T = T or setting.run.segment
    config = replace(setting.config, mem_len=T if row.recurrence else 0)
    return AblationModel(config, T, row.encoding, row.loss == "half").to(given.device)


def stem(row):
    """What the file of a row's model is called, before its seed."""
    return f"{'recurrence' if row.recurrence else 'none'}-{row.encoding}-{row.loss}"


def kept_for_backward(function):
    """MiB that autograd keeps between the forward and the backward pass: the memory of training.

    The hook is called with each tensor that the graph saves.
    """
    sizes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()  # a storage that is kept twice counts once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = function()  # holds the graph, so that no storage is given to another tensor
    del kept
    return sum(sizes.values()) / 2**20


def longest_segment(row, setting, given):
    """T of a row of table 10, and its MiB: at most what the first model keeps.

    What is measured is what autograd keeps between the two passes.
    """
    def kept(row, T):
        model, memory = make(row, setting, given, T), None
        x = (setting.config.vocab_size ** torch.rand(setting.run.batch, T)).long() - 1  # Zipf
        x = x.to(given.device)
        if row.recurrence:
            memory = [torch.zeros(len(x), T, setting.config.d_model, device=given.device)
                      ] * setting.config.n_layer
        with train.autocast(setting.run, given.device):
            return kept_for_backward(lambda: model(x, memory, x)[0].mean())

    torch.manual_seed(0)  # with an adaptive softmax the tokens count, too
    T = setting.run.segment
    limit, more = kept(ROWS[0], T), max(1, T // 16)
    while not row.recurrence and kept(row, T + more) <= limit:
        T += more
    return T, kept(row, T)


def evaluate(model, row, setting, corpus, T, bar):
    """Mean losses in nats: as trained, and {attention length: loss}; none where al-rfou has no
    places.  In all it counts as a quarter of the steps of training.
    """
    before = setting.lengths[-1]
    tokens = common.pieces(corpus.valid, before, setting.count, setting.n)
    losses = {}
    for L in ("trained", *setting.lengths):
        bar.advance(f"evaluating {row.encoding}, {L}", setting.run.steps / 4 / (
            1 + len(setting.lengths)))
        if row.recurrence and L == "trained":
            loss = common.memory_losses(model, tokens, before, T)
        elif row.recurrence:
            loss = common.memory_losses(model, tokens, before, max(64, T), mem_len=L - 1,
                                       same_length=True)
        elif L == "trained" or L <= T or row.encoding != "al-rfou":
            loss = common.window_losses(model, tokens, before, T if L == "trained" else L)
        else:
            continue
        losses[L] = loss.mean().item()
    return losses.pop("trained"), losses


def best(as_trained, losses):
    """The best loss of an evaluation, and the shortest length within 0.001 nats of it."""
    lowest = min(as_trained, *losses.values())
    return lowest, next((L for L, loss in losses.items() if loss <= lowest + 0.001), "trained")


def report(table, rows, results, sizes):
    """Print one table beside the paper's -> [(row, above the first in nats by seed, paper's)]."""
    print(f"\ntable {table}, nats a token: mean ± half the range over the seeds\n"
          f"{'recurrence':11}{'encoding':9}{'loss':5}{'parameters':>11}{'trained':>15}{'best':>15}"
          f"{'at':>8}{'above row 1':>17} | paper{'best':>8}{'at':>5}{'above':>7}")
    points, raw = [], {}
    for row in rows:
        raw[row] = lowest = [best(*result)[0] for result in results[row]]
        above = [mine - best(*first)[0] for mine, first in zip(lowest, results[rows[0]])]
        paper = log(row.paper[1] / rows[0].paper[1])
        at = best(*(statistics.mean(z) if isinstance(z[0], float) else
                    {L: statistics.mean(loss[L] for loss in z) for L in z[0]}
                    for z in zip(*results[row])))[1]
        print(f"{'yes' if row.recurrence else 'no':11}{row.encoding:9}{row.loss:5}{sizes[row]:11,}"
              f"{common.spread([result[0] for result in results[row]]):>15}"
              f"{common.spread(lowest):>15}{at:>8}{common.spread(above):>17} | "
              f"{row.paper[0]:5}{row.paper[1]:8}{row.paper[2]:>5}{paper:7.3f}")
        points.append((row, above, paper))
    pairs = list(combinations(points, 2))
    clear = [(a, b) for a, b in pairs if max(raw[a[0]]) < min(raw[b[0]])
             or max(raw[b[0]]) < min(raw[a[0]])]
    same = [(a, b) for a, b in clear if (raw[a[0]] < raw[b[0]]) == (a[2] < b[2])]
    chance = 2 / comb(2 * len(lowest), len(lowest))  # that equal models are told apart
    print(f"of {len(pairs)} pairs of rows the seeds, which do not overlap, tell {len(clear)} apart "
          f"(by chance {chance * len(pairs):.0f}), {len(same)} of them in the paper's order")
    return points


def name(row):
    """For figures and lines."""
    return f"{row.encoding}, {row.loss}, {'recurrence' if row.recurrence else 'none'}"


def draw(points, results, path, title):
    """Left: how far each row lies above the first, beside the paper's.  Right: over the length."""
    figure = Figure(figsize=(12, 1.8 + 0.32 * max(6, len(points))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for y, (row, above, paper) in enumerate(points):
        left.plot(above, [y] * len(above), "o", color=COLORS[row.encoding], alpha=0.7)
        left.plot(paper, y, "k|", markersize=14)
        lengths = list(results[row][0][1])  # al-rfou has only those of training
        right.plot(lengths, [statistics.mean(r[1][L] for r in results[row]) for L in lengths],
                   "o-" if row.recurrence else "^:", color=COLORS[row.encoding], markersize=4,
                   fillstyle="full" if row.loss == "full" else "none", label=name(row))
    left.set_yticks(range(len(points)), [name(row) for row, *_ in points])
    left.invert_yaxis()
    left.set(title=title, xlabel="nats above the first row; dots: seeds, bar: paper")
    left.grid(axis="x", alpha=0.4)
    lowest = min(min(r[1].values()) for row, *_ in points for r in results[row])
    highest = max(0.05, *(max(above) for _, above, _ in points))
    right.set(xlabel="attention length (log scale)", ylabel="nats a token (not from 0)",
              xscale="log", title="mean of the seeds",
              ylim=(lowest - 0.1 * highest, lowest + 2 * highest))
    tried = list(results[points[0][0]][0][1])
    ticks = [L for L in tried if L & (L - 1) == 0] if 16 in tried else tried[::2]  # powers of two
    right.set_xticks(ticks, ticks)
    right.minorticks_off()
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def experiment(argv):
    """Train what is missing, evaluate, print, draw."""
    flags = common.make_flags(NAME, __doc__, ("tiny", "laptop", "paper"))
    flags.add_argument("--tables", type=int, nargs="+", choices=(6, 7, 10), default=[6, 7, 10])
    given, ordered = common.begin(flags.parse_args(argv), NAME)
    setting, _ = setting_of(given, ordered)
    setting = replace(setting, run=common.choose_dtype(make(ROWS[0], setting, given), setting.run,
                                                     given.out))
    rows = [row for row in ROWS if row.table in given.tables]
    shuffled = without_order(ordered) if 7 in given.tables else ordered
    for corpus in (ordered, shuffled):
        common.pieces(corpus.valid, setting.lengths[-1], setting.count, setting.n)  # long enough?
    print(f"{ordered.name}; segments of {setting.run.segment}, {setting.run.steps:,} steps of "
          f"{setting.run.batch} lanes, seeds {given.seeds}, {setting.run.dtype}")
    bar, results = common.Bar(len(rows) * len(given.seeds) * 1.25 * setting.run.steps), {}
    sizes = {}
    for row in rows:
        corpus, T, ending = ordered, setting.run.segment, ""
        if row.table == 7:
            corpus, ending = shuffled, "-shuffled"
        if row.table == 10:
            T, MiB = longest_segment(row, setting, given)
            ending = f"-{T}" * (T > setting.run.segment)
            bar.clear()
            print(f"{name(row)}: segments of {T} keep {MiB:.1f} MiB for the backward pass")
        results[row] = []
        for seed in given.seeds:
            torch.manual_seed(seed)
            model = make(row, setting, given, T)
            model = common.fit(model, corpus, replace(setting.run, segment=T, seed=seed),
                              given.out / f"{stem(row)}{ending}-{seed}.pt", bar)
            sizes[row] = sum(z.numel() for z in model.parameters())
            results[row].append(evaluate(model, row, setting, corpus, T, bar))
    bar.clear()
    for table in dict.fromkeys(given.tables):
        mine = [row for row in rows if row.table == table]
        points = report(table, mine, results, sizes)
        draw(points, results, given.out / f"table{table}.png",
             f"table {table}, {corpus.name.split(' (')[0]}")


def main(argv=None):
    """Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    return common.run(NAME, experiment, argv)


if __name__ == "__main__":
    sys.exit(main())
