"""Figures 5 to 7 of the paper (appendix D): where a model attends, and which terms cause it.

A query's attention is a probability for each of the M + 1 keys that it sees, at the distances 0
(itself) to M.  The average over many queries says how far back a head looks.

    figure 5    this average for each head
    figure 6    the three heads that look furthest (by the mean distance of their average) at one
                position of real text: at which tokens
    figure 7    a score is the sum of four terms (lesson 3).  The same average of attentions made
                from (a), (b) or (d) alone, beside the whole; the paper leaves out (c), and so do we

An average hides what a single query picks: (a) can be peaked for each and yet uniform over all.

    python experiments/figures5_to_7_attention.py    of the model in pretrained/, in seconds
    python experiments/figures5_to_7_attention.py --checkpoint runs/stdlib-laptop --memory 640

M 640 is the paper's.  The text is the validation split of the model's corpus.  One model is
described and nothing compared: other seeds, other heads.
"""
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import ceil, log, log2
from pathlib import Path

import common  # before torch

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from common import corpora, lesson_1, train

lesson_4 = import_module("04_rel_shift")
NAME = "figures5_to_7_attention"
EXCERPTS, SEGMENT = 8, 64  # places of the split that are read side by side; tokens at a time
PARTS = {"whole": "k-", "(a) alone": "C0:", "(b) alone": "C1--", "(d) alone": "C2-."}


def terms(q, k, k_R, u, v):
    """Return the terms of lesson 4's relative_score, (a) to (d), from its arguments, divided by
    sqrt(C), (4, B, H, T, K).

    q (B, H, T, C), k (B, H, K, C), k_R (H, K, C) by descending distance, u, v (H, C).
    """
    u, v = (bias[:, None].expand_as(q) for bias in (u, v))  # the same for every query
    k, k_R = k.transpose(-1, -2), k_R.transpose(-1, -2)  # (B, H, C, K), (H, C, K)
    b, d = lesson_4.rel_shift(q @ k_R), lesson_4.rel_shift(v @ k_R)
    return torch.stack([q @ k, b, u @ k, d]) / q.shape[-1] ** 0.5


@torch.no_grad()
def averages(model, tokens, n):
    """Return attention by distance, the mean over the last n of tokens (B, L) per lane; L - n >= M.

    So all n have a full memory.  (4, N, H, M + 1) float64, PARTS in front; each row sums to 1.
    """
    c, memory = model.config, None
    sums = torch.zeros(4, c.n_layer, c.n_head, c.mem_len + 1, dtype=torch.float64)

    def look(number, attend, *given):
        q, k, _, k_R, u, v, mask = given
        table = terms(q, k, k_R, u, v)[..., ~mask]  # a query's keys as in the text
        table = table.unflatten(-1, (q.shape[2], c.mem_len + 1)).flip(-1)  # nearest first
        for i, score in enumerate((table.sum(0), *table[[0, 1, 3]])):
            sums[i, number] += score.double().softmax(-1).sum((0, 2))
        return attend(*given)

    past, counted = (part.split(SEGMENT, dim=1) for part in tokens.long().tensor_split([-n], dim=1))
    parts = [*past, *counted]
    for i, x in enumerate(train.progress(parts, "reading segment", len(parts))):
        if i == len(past):  # lesson 5 returns no scores: compute them from its arguments
            for number, layer in enumerate(model.layers):
                layer.attention.attend = partial(look, number, layer.attention.attend)
        _, memory = model(x, memory, last_only=True)  # logits of one token are enough
    for layer in model.layers:
        del layer.attention.attend  # what remains is the class's own
    return sums / (n * len(tokens))


def measures(p, whole):
    """Return (..., 3) for p (..., M + 1): entropy in bits, mean distance in tokens, and total
    variation from the whole (the share of p that is elsewhere there)."""
    entropy, distances = torch.special.entr(p).sum(-1) / log(2), torch.arange(p.shape[-1])
    return torch.stack([entropy, p @ distances.to(p), (p - whole).abs().sum(-1) / 2], dim=-1)


def draw_heads(p, names):
    """Plot figure 5: p (heads, M + 1), a row for each head."""
    figure = Figure(figsize=(9, 1.4 + 0.16 * max(12, len(p))), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(p.clamp(min=1e-5).numpy(), cmap="magma", norm=LogNorm(1e-5, 1),
                        aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(p)), names)
    axes.set(xlabel="distance of the key (tokens back; 0 is the query itself)",
             title="Average attention of each head (*: the three that look furthest)")
    figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.02, 1)), label="probability")
    return figure


def label(symbol):
    """Return a symbol of the vocabulary, visible: a character for a byte, or a word and a gap."""
    if isinstance(symbol, str):
        return "¶" if symbol in corpora.SEPARATORS else symbol + " "
    return {9: "→", 10: "¶", 32: "·"}.get(symbol, chr(symbol) if 32 < symbol < 127 else "▯")


def draw_text(p, labels, names, title, width=80):
    """Plot figure 6: p (heads, M + 1) colors the M + 1 labels, in lines up to width or a ¶."""
    places, row, column = [], 0, 0
    for text in labels:
        if column and column + len(text) > width:
            row, column = row + 1, 0
        places.append((row, column))
        row, column = (row + 1, 0) if text == "¶" else (row, column + len(text))
    rows = places[-1][0] + 1
    figure = Figure(figsize=(11, len(p) * (18 * rows / width + 0.5) + 0.4), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for axes, head, name in zip(figure.subplots(len(p), squeeze=False)[:, 0], p.flip(-1), names):
        floor, grid = 0.1 / len(head), torch.full((rows, width), torch.nan)
        norm = LogNorm(floor, head.max().item())
        for text, (row, column), value in zip(labels, places, head.clamp(min=floor).tolist()):
            grid[row, column : column + len(text)] = value
            axes.text(column - 0.5, row, text[:width], fontsize=1100 / width, family="monospace",
                      color="white" if norm(value) > 0.6 else "black", va="center",
                      parse_math=False)  # $ is no formula here
        image = axes.imshow(grid.numpy(), cmap="Oranges", norm=norm, aspect="auto")
        axes.set(xticks=[], yticks=[], title=name)
        figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.02, 1)), label="probability")
    return figure


def draw_terms(p, names):
    """Plot figure 7: p (4, heads, M + 1), a panel for each head, a line for each of PARTS."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, head, name in zip(panels.flat, p.unbind(1), names):
        for row, (part, style) in zip(head, PARTS.items()):
            axes.plot(row.numpy(), style, label=part)
        axes.axhline(1 / p.shape[-1], color="grey", linewidth=0.8, label="all keys alike")
        axes.set(title=name, yscale="log", xlabel="distance of the key (tokens back)",
                 ylabel="probability (logarithmic)")
        axes.label_outer()
    panels[0, 0].legend()
    return figure


def position_of(given, n):
    """Return the position to show.  ValueError if the flags do not fit a split of n tokens."""
    M, queries = given.memory, given.queries
    if n <= (need := EXCERPTS * (M + ceil(queries / EXCERPTS))) or min(M, queries) < 1:
        raise ValueError(f"--memory {M} and --queries {queries} must be at least 1, and need "
                         f"{need + 1:,} tokens of the validation split; it has {n:,}")
    position = n // 2 if given.position is None else given.position
    if not M <= position <= n - 2:
        raise ValueError(f"--position must be {M} to {n - 2}, with a memory before it and a target "
                         f"after it, got {position}")
    return position


def report(numbers, names, wide, M):
    """Print the measures (4, N * H, 3): the mean of all heads, and those that look furthest."""
    print(f"{'':35}entropy (bits)   mean distance   apart from the whole\n"
          f"{'all keys alike':35}{log2(M + 1):14.2f}{M / 2:16.1f}")
    for name, rows in [(f"mean of {len(names)} heads", numbers.mean(1)),
                       *((names[i], numbers[:, i]) for i in wide)]:
        for part, row in zip(PARTS, rows.tolist()):
            print("{:24} {:10}{:14.2f}{:16.1f}{:23.2f}".format(name, part, *row))


@common.make_main
def main(argv):
    """Read the validation split, print numbers, draw."""
    flags = common.new_parser(NAME, __doc__, "--data-dir", "--checkpoint")
    flags.add_argument("--memory", type=int, default=256, help="M, in tokens; default: 256")
    flags.add_argument("--queries", type=int, default=4096, help="in the averages; default: 4096")
    flags.add_argument("--position", type=int, help="of the token in figure 6; default: the middle")
    flags.add_argument("--out", type=Path, help=f"default: runs/{NAME}-, and the run's folder")
    given = flags.parse_args(argv)
    path = given.checkpoint or common.PRETRAINED
    model, recipe, corpus, content = common.open_run(path, given.data_dir)
    config, tokens, M, H = model.config, corpus.valid, given.memory, model.config.n_head
    position = position_of(given, len(tokens))
    given.out = given.out or lesson_1.RUNS / f"{NAME}-{content.path.resolve().parent.name}"
    given.out.mkdir(parents=True, exist_ok=True)
    model.config = replace(config, mem_len=M, same_length=True, clamp_len=recipe.eval_clamp_len)

    n = ceil(given.queries / EXCERPTS)
    excerpts = lesson_1.lanes(tokens, EXCERPTS)[:, : M + n]
    p = averages(model, excerpts, n).flatten(1, 2)  # (4, N * H, M + 1)
    numbers = measures(p, p[0])  # (4, N * H, 3)
    wide = numbers[0, :, 1].topk(min(3, p.shape[1])).indices.tolist()
    names = [f"layer {i // H + 1} head {i % H + 1}" for i in range(p.shape[1])]
    print(f"{content.path}: step {content['state']['step']:,}, {corpus.name}\n"
          f"{EXCERPTS * n:,} queries of the validation split, each with M = {M} tokens before it")
    report(numbers, names, wide, M)

    first = max(0, position - config.n_layer * M)  # N layers reach N * M tokens back
    seen = averages(model, tokens[None, first : position + 1], 1)[0].flatten(0, 1)[wide]
    *labels, target = (label(corpus.vocab[i]) for i in tokens[position - M : position + 2])
    print(f"position {position:,}: {''.join(labels[-40:])}, next {target}")
    title = f"Where the last of {M + 1} tokens looks; the next one, to be predicted, is {target}"
    chosen = [f"{names[i]}: mean distance {numbers[0, i, 1]:.0f} tokens" for i in wide]
    rows = torch.cat([p.mean(1, keepdim=True), p[:, wide]], dim=1)
    starred = [name + " *" * (i in wide) for i, name in enumerate(names)]
    common.save_figure(draw_heads(p[0], starred), given.out / "figure5_heads.png")
    common.save_figure(draw_text(seen, labels, chosen, title), given.out / "figure6_text.png")
    common.save_figure(draw_terms(rows, [f"mean of {len(names)} heads", *chosen]),
                       given.out / "figure7_terms.png")


if __name__ == "__main__":
    sys.exit(main())
