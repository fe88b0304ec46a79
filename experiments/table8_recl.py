"""Table 8 of the paper, figures 3 and 4: how long is the context that a model makes use of?

The point where the loss stops falling is an unfair measure for a model that is already good with
few tokens.  The relative effective context length, RECL (section 4.3, appendix C), measures each
model of a group against the best of the group at the shorter context, where that is worst.
With l_i(c, t) = -ln p_i(x_t | the c tokens before), in nats:

    b(c, t)    = min_i l_i(c, t)                          the best model's loss at context c
    T_r(c)     = the fraction r of positions where b(c, t) is largest: the hard ones
    f_i(c, c') = mean over T_r(c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Start with a small c; if a context of c' = c + step gains less than 1 percent, g_i < 0.01, the RECL
of model i is c; otherwise continue from c'.  The paper does not say which step: perhaps 100.

Five models with about the same number of parameters: ours; with Shaw's encoding; without
recurrence; a vanilla model, which reads the last T of a longer context; an LSTM.  The first three
read with a memory, whose length is chosen on the validation split; RECL is measured on test.  The
interval is that of these models' mean when positions are drawn with replacement (bootstrap).  It
says nothing about other seeds, and neighboring positions depend on each other.

    python experiments/table8_recl.py --dtype bf16         half an hour after table 6, in its --out
    python experiments/table8_recl.py --scale copies       where the length is known
    python experiments/table8_recl.py --scale paper        WikiText-103; GPUs

What makes it cheap.  One pass over a window gives the losses after 1, 2, 3 ... tokens of context,
all exact, since there is nothing before the window.  The windows begin a step apart:

    window 0    [ step 1 ][ step 2 ][ step 3 ]
    window 1              [ step 1 ][ step 2 ][ step 3 ]
    window 2                        [ step 1 ][ step 2 ][ step 3 ]
                                              ^ the token here is predicted from 3, 2 and 1 steps
"""
import sys
from math import exp
from statistics import mean, median

import common  # before torch

import torch
import torch.nn as nn
from matplotlib.figure import Figure

import table6_ablation
from common import lesson_5, train
from table6_ablation import Row

NAME = "table8_recl"
# as rows of table 6, but with the paper's RECL at r = 0.1, 0.5 and 1.0
MODELS = {"ours": Row(8, True, "ours", "full", (700, 600, 500)),
          "shaw": Row(8, True, "shaw", "full", (400, 400, 300)),
          "no recurrence": Row(8, False, "ours", "full", (300, 300, 300)),
          "vanilla": Row(8, False, "vaswani", "half", (128, 128, 128)),
          "lstm": Row(8, True, "lstm", "full", (400, 300, 200))}
STYLES = dict(zip(MODELS, ("o-", "s-", "^:", "v:", "x--")))
FRACTIONS, DRAWS = (0.1, 0.5, 1.0), 200
# contexts; windows read side by side; spans of the text; windows in each.  Training is table 6's
SCALES = {"tiny": (range(4, 25, 4), 8, 2, 20), "small": (range(64, 1025, 64), 100, 8, 500),
         "copies": (range(24, 145, 24), 100, 8, 250), "paper": (range(100, 1601, 100), 16, 8, 250)}


def hard_loss(losses, i, c, other, r):
    """Return f_i(c, other), in nats; c and other are indices of contexts.

    losses (models, contexts, positions); T_r is the fraction r of the positions, at least one.
    """
    best = losses[:, c].min(0).values  # b(c, t)
    hard = best.topk(max(1, round(r * len(best)))).indices  # T_r(c)
    return torch.minimum(best, losses[i, other])[hard].double().mean().item()


def recl(losses, contexts, r, threshold=0.01):
    """Return the RECL of each model, in tokens; the largest context means "at least that".

    losses (models, contexts, positions) in nats, contexts ascending.  Two models and one position:
    the first gains from 200 tokens and no more, the second never.

    >>> recl(torch.tensor([[[3.0], [2.0], [2.0]], [[3.0], [3.0], [3.0]]]), [100, 200, 300], r=1.0)
    [200, 100]
    """
    lengths = []
    for i in range(len(losses)):
        c = 0
        while c + 1 < len(contexts):
            here, there = (hard_loss(losses, i, c, other, r) for other in (c, c + 1))
            if 1 - exp(there - here) < threshold:  # g = (exp here - exp there) / exp here
                break
            c += 1
        lengths.append(contexts[c])
    return lengths


class LSTM(nn.Module):
    """The baseline with a state: two layers of torch's, as wide as `parameters` allow, tied."""

    def __init__(self, config, parameters):
        super().__init__()
        self.config = config
        self.embedding = (lesson_5.AdaptiveSoftmax if config.cutoffs else lesson_5.TiedEmbedding)(
            config)
        for weight in self.embedding.parameters():
            nn.init.normal_(weight, std=0.02)
        D = config.d_model
        width = max(w for w in range(8, 4096, 8)  # two layers, and a matrix back to D
                    if 4 * w * (D + 3 * w + 4) + w * D <= parameters)
        self.layers = nn.LSTM(D, width, num_layers=2, batch_first=True)  # named as in lesson 5
        self.out = nn.Linear(width, D, bias=False)

    def forward(self, x, memory, y):
        """Read like the others; memory is a list of two states and two cells, each (B, width)."""
        h = self.embedding(x) * self.config.d_model**0.5
        state = memory and tuple(torch.stack(z) for z in (memory[:2], memory[2:]))
        h, state = self.layers(h, state)
        return self.embedding.losses(self.out(h), y), [z.detach() for part in state for z in part]


def make(name, study, given):
    """Return the untrained model of this name."""
    if name != "lstm":
        return table6_ablation.make(MODELS[name], study, given)
    ours = table6_ablation.make(MODELS["ours"], study, given)
    parameters = sum(z.numel() for z in ours.layers.parameters())
    return LSTM(study.config, parameters).to(given.device)


def best_length(model, study, corpus):
    """Return the memory, T to 16 T tokens and the query itself, with the lowest validation loss."""
    T = study.recipe.segment
    tokens = common.excerpts(corpus.valid, 16 * T, study.count, study.n, model.u.device)
    losses = {length: common.memory_losses(model, tokens, 16 * T, max(64, T), mem_len=length - 1,
                                           same_length=True).mean().item()
              for length in (T, 2 * T, 4 * T, 8 * T, 16 * T)}
    return min(losses, key=losses.get)


def losses_by_context(model, tokens, contexts, attention, side_by_side):
    """Return -ln p in nats after exactly c tokens, for each c in contexts: (contexts, positions).

    contexts are step, 2 step, 3 step ...; positions are the tokens (n,) at I step, (I + 1) step ...
    for I contexts, each met with all of them.
    """
    step, most, I = contexts[0], contexts[-1], len(contexts)
    windows = tokens.unfold(0, most + 1, step).long()  # (W, most + 1)
    P = len(windows) - I + 1

    def read(windows, segment=64):
        for part in windows.split(side_by_side):
            yield common.memory_losses(model, part, 0, segment, mem_len=attention - 1,
                                       same_length=True)

    if getattr(model, "encoding", "") == "vaswani":  # trained on T positions: the last T tokens
        seen, by_length = [min(c, model.T) for c in contexts], {}
        for L in set(seen):
            last = tokens[I * step - L :].unfold(0, L + 1, step)[:P].long()  # (P, L + 1)
            by_length[L] = torch.cat([losses[:, -1] for losses in read(last, L)])  # in one piece
        return torch.stack([by_length[L] for L in seen])
    table = torch.cat([losses[:, step - 1 :: step] for losses in read(windows)])  # (W, I)
    # the loss of window w at column i is that of position w + i + 1, counted in steps
    return torch.stack([table[I - 1 - i : I - 1 - i + P, i] for i in range(I)])


def draw(losses, contexts, path, title):
    """Plot figures 3 and 4 from the losses (models, contexts, positions) of each seed."""
    left, right = Figure(figsize=(10, 4), layout="constrained").subplots(1, 2)
    shown = []
    for i, (name, style) in enumerate(STYLES.items()):
        gains = [[exp(hard_loss(z, i, c, c, 0.1)) - exp(hard_loss(z, i, c, c + 1, 0.1))
                  for c in range(len(contexts) - 1)] for z in losses]
        left.plot(contexts[:-1], [mean(z) for z in zip(*gains)], style, markersize=4, label=name)
        perplexities = [z[i].double().mean(-1).exp().tolist() for z in losses]
        curve = [mean(z) for z in zip(*perplexities)]
        right.plot(contexts, curve, style, markersize=4)
        shown += curve * (name != "vanilla")  # which would flatten the others
    left.set(xlabel=f"context c (tokens), to c + {contexts[0]}", xlim=(0, None), ylim=(0, None),
             ylabel="gain in perplexity", title=f"figure 3: hardest tenth, {title}")
    right.set(xlabel="context (tokens)", ylabel="perplexity (not from 0)", xlim=(0, None),
              title="figure 4: all positions", ylim=(0.95 * min(shown), 1.3 * max(shown)))
    left.legend()
    right.grid(axis="y", alpha=0.4)
    common.save_figure(left.figure, path)


def spans_of(corpus, contexts, spans, W, device):
    """Return spans of the test split for W windows each.  ValueError if it is too short."""
    need, n = contexts[0] * (W - 1) + contexts[-1] + 1, len(corpus.test)
    if n < spans * need:
        raise ValueError(f"the test split has {n:,} tokens, {spans * need:,} are needed")
    # i tokens later than it might, so that in the synthetic text each kind of token has its turn
    starts = ((n - need) // spans // 8 * 8 * i + i for i in range(spans))
    return [corpus.test[start : start + need].to(device) for start in starts]


def drawn_means(losses, contexts, r):
    """Return (DRAWS, models): the mean RECL of the seeds, for positions drawn with replacement."""
    n, means = losses[0].shape[-1], []
    generator = torch.Generator().manual_seed(0)
    for _ in train.progress(range(DRAWS), f"drawing positions, r = {r}", DRAWS):
        drawn = torch.randint(n, (n,), generator=generator)
        of_seeds = [recl(z[..., drawn], contexts, r) for z in losses]
        means.append([mean(z) for z in zip(*of_seeds)])
    return torch.tensor(means, dtype=torch.float64)


def report(lengths, losses, contexts):
    """Print, for each fraction r, the RECL of each model beside the paper's."""
    for k, r in enumerate(FRACTIONS):
        found = [recl(z, contexts, r) for z in losses]
        means, drawn = [mean(z) for z in zip(*found)], drawn_means(losses, contexts, r)
        print(f"\n{f'r = {r}':15}memory{'mean (interval)':>22}{'ours less it':>22}   seeds, paper")
        for i, (name, row) in enumerate(MODELS.items()):
            print(f"{name:15}{'state' if name == 'lstm' else int(median(lengths[name])):>6}"
                  f"{common.with_interval(means[i], drawn[:, i]):>22}"
                  f"{common.with_interval(means[0] - means[i], drawn[:, 0] - drawn[:, i]):>22}"
                  f"   {' '.join(str(z[i]) for z in found)}, {row.paper[k]}")


@common.make_main
def main(argv):
    """Train what is missing, read, print the table, draw."""
    flags = common.make_flags(NAME, __doc__, SCALES)
    given, corpus = common.begin(flags.parse_args(argv), NAME)
    study = table6_ablation.study_of(given, corpus)
    contexts, side_by_side, spans, W = SCALES[given.scale]
    texts, T = spans_of(corpus, contexts, spans, W, given.device), study.recipe.segment
    common.excerpts(corpus.valid, 16 * T, study.count, study.n, "cpu")  # long enough?
    models, losses, lengths = {}, [], {name: [] for name in MODELS}
    for name, row in MODELS.items():  # for each name the models of all seeds
        models[name] = [job.model for job in common.fit_seeds(
            lambda: make(name, study, given), corpus, study.recipe, given,
            table6_ablation.stem(row))]
    for models_of_a_seed in zip(*models.values()):
        group = []
        for name, model in zip(MODELS, models_of_a_seed):
            length = T if name in ("vanilla", "lstm") else best_length(model, study, corpus)
            lengths[name].append(length)
            group.append(torch.cat([losses_by_context(
                model, text, contexts, length, side_by_side) for text in texts], dim=1))
        losses.append(torch.stack(group))
    print(f"{corpus.name}; {losses[0].shape[-1]:,} positions, contexts {contexts[0]}, "
          f"{contexts[1]} ... {contexts[-1]} or more; segments of {T} in training\n"
          f"RECL in tokens, seeds {given.seeds}")
    report(lengths, losses, contexts)
    draw(losses, contexts, given.out / "recl.png", corpus.name.split(" (")[0])


if __name__ == "__main__":
    sys.exit(main())
