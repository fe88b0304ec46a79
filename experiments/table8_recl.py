"""Table 8 of the paper, figures 3 and 4: how long is the context that a model makes use of?

recl.py says what is measured.  Five models with about the same number of parameters: ours; with
Shaw's encoding; without recurrence; Al-Rfou's vanilla, which has places for T tokens and of longer
contexts is given the last T; an LSTM.  The paper's LSTM stands in another group, so its figures do
not compare.  The first three read on with a memory (the third was only trained without), of that
length, T to 16 T, which is best on the validation split; RECL is measured on the test split.

    python experiments/table8_recl.py                      a quarter of an hour on two cores
    python experiments/table8_recl.py --dataset copies     where the length is known
    python experiments/table8_recl.py --size paper         WikiText-103; GPUs

What makes it cheap.  One pass over a window gives the losses after 1, 2, 3 ... tokens of context,
all exact, since nothing stands before the window.  The windows begin a step apart:

    window 0    [ step 1 ][ step 2 ][ step 3 ]
    window 1              [ step 1 ][ step 2 ][ step 3 ]
    window 2                        [ step 1 ][ step 2 ][ step 3 ]
                                              ^ the token here is predicted from 3, 2 and 1 steps
"""
import statistics
import sys
from dataclasses import replace
from math import exp

import torch
import torch.nn as nn
from matplotlib.figure import Figure

import common
import table6_ablation
from ablation_model import AdaptiveSoftmax, TiedEmbedding
from recl import hard_loss, recl
from table6_ablation import Row

NAME = "table8_recl"
# as rows of table 6, but with the paper's RECL at r = 0.1, 0.5 and 1.0
MODELS = {"ours": Row(8, True, "ours", "full", (700, 600, 500)),
          "shaw": Row(8, True, "shaw", "full", (400, 400, 300)),
          "no recurrence": Row(8, False, "ours", "full", (300, 300, 300)),
          "vanilla": Row(8, False, "al-rfou", "half", (128, 128, 128)),
          "lstm": Row(8, True, "lstm", "full", (400, 300, 200))}
STYLES = dict(zip(MODELS, ("o-", "s-", "^:", "v:", "x--")))
FRACTIONS = (0.1, 0.5, 1.0)
# contexts; windows that are read side by side; stretches of the text, and windows in each.  Models
# and training are table 6's
SIZES = {"tiny": (range(4, 25, 4), 8, 2, 20), "laptop": (range(16, 257, 16), 100, 8, 500),
         "copies": (range(24, 145, 24), 100, 8, 250), "paper": (range(100, 1601, 100), 16, 8, 250)}


# ---- the models, and what they lose after so many tokens ----------------------------------------

class LSTM(nn.Module):
    """The baseline with a state: two layers of torch's, as wide as `parameters` allow, tied."""

    def __init__(self, config, parameters):
        super().__init__()
        self.config = config
        self.embedding = (AdaptiveSoftmax if config.cutoffs else TiedEmbedding)(config)
        for weight in self.embedding.parameters():
            nn.init.normal_(weight, std=0.02)
        D = config.d_model
        # two layers, and a matrix back to D
        sizes = {4 * width * (D + 3 * width + 4) + width * D: width for width in range(8, 4096, 8)}
        width = sizes[max(size for size in sizes if size <= parameters)]
        self.lstm = nn.LSTM(D, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, D, bias=False)

    def forward(self, x, memory, y):
        """As the other models; memory is a list of two states and two cells, each (B, width)."""
        h = self.embedding(x) * self.config.d_model**0.5
        state = memory and tuple(torch.stack(z) for z in (memory[:2], memory[2:]))
        h, state = self.lstm(h, state)
        return self.embedding.losses(self.out(h), y), [z.detach() for part in state for z in part]


def make(name, setting, given):
    """The untrained model of this name."""
    if name != "lstm":
        return table6_ablation.make(MODELS[name], setting, given)
    ours = table6_ablation.make(MODELS["ours"], setting, given)
    parameters = sum(z.numel() for z in ours.layers.parameters())
    return LSTM(setting.config, parameters).to(given.device)


def best_length(model, setting, corpus, bar):
    """The memory, T to 16 T tokens and the query itself, with the lowest validation loss."""
    T, losses = setting.run.segment, {}
    tokens = common.pieces(corpus.valid, 16 * T, setting.count, setting.n)
    for length in (T, 2 * T, 4 * T, 8 * T, 16 * T):
        losses[length] = common.memory_losses(model, tokens, 16 * T, max(64, T), mem_len=length - 1,
                                             same_length=True).mean().item()
        bar.advance("choosing a memory", tokens.numel())
    return min(losses, key=losses.get)


def losses_by_context(model, tokens, contexts, attention, side_by_side, bar):
    """-ln p in nats after exactly c tokens, for each c in contexts: (contexts, positions).

    contexts are step, 2 step, 3 step ...; positions are the tokens (n,) at I step, (I + 1) step ...
    for I contexts, each met with all of them.
    """
    step, most, I = contexts[0], contexts[-1], len(contexts)
    windows = tokens.unfold(0, most + 1, step).long()  # (W, most + 1)
    P = len(windows) - I + 1

    def read(windows):
        for part in windows.split(side_by_side):
            yield common.memory_losses(model, part, 0, 64, mem_len=attention - 1, same_length=True)
            bar.advance("reading windows", part.numel())

    if getattr(model, "places", None) is not None:  # it has T places: the last T tokens
        by_length = {L: torch.cat([losses[:, -1] for losses in read(
            tokens[I * step - L :].unfold(0, L + 1, step)[:P].long())])
            for L in {min(c, model.T) for c in contexts}}
        return torch.stack([by_length[min(c, model.T)] for c in contexts])
    table = torch.cat([losses[:, step - 1 :: step] for losses in read(windows)])  # (W, I)
    # the loss of window w at column i is that of position w + i + 1, counted in steps
    return torch.stack([table[I - 1 - i : I - 1 - i + P, i] for i in range(I)])


# ---- the experiment -----------------------------------------------------------------------------

def draw(losses, contexts, path, title):
    """Figures 3 and 4: losses are those of each seed, (models, contexts, positions)."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, style) in enumerate(STYLES.items()):
        gains = [[exp(hard_loss(z, i, c, c, 0.1)) - exp(hard_loss(z, i, c, c + 1, 0.1))
                  for c in range(len(contexts) - 1)] for z in losses]
        left.plot(contexts[:-1], [statistics.mean(z) for z in zip(*gains)], style, markersize=4,
                  label=name)
        means = [z[i].double().mean(-1).exp().tolist() for z in losses]
        right.plot(contexts, [statistics.mean(z) for z in zip(*means)], style, markersize=4,
                   label=name)
    left.set(xlabel=f"context c (tokens), to c + {contexts[0]}", xlim=(0, None), ylim=(0, None),
             ylabel="gain in perplexity a token", title=f"figure 3: hardest tenth, {title}")
    right.set(xlabel="context (tokens)", ylabel="perplexity a token (not from 0)", xlim=(0, None),
              title=f"figure 4: all positions, {title}")
    left.legend()
    right.grid(axis="y", alpha=0.4)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def experiment(argv):
    """Train what is missing, read, print the table, draw."""
    given, corpus = common.begin(common.make_flags(NAME, __doc__, ("tiny", "laptop", "paper"))
                                  .parse_args(argv), NAME)
    setting, own = table6_ablation.setting_of(given, corpus)
    if own not in SIZES:
        raise ValueError(f"{corpus.name} has no long dependencies to measure; take another text")
    contexts, side_by_side, stretches, W = SIZES[own]
    step, most = contexts[0], contexts[-1]
    need = step * (W - 1) + most + 1  # tokens of a stretch
    if len(corpus.test) < stretches * need:
        raise ValueError(f"the test split has {len(corpus.test):,} tokens, "
                         f"{stretches * need:,} are needed")
    common.pieces(corpus.valid, 16 * setting.run.segment, setting.count, setting.n)  # long enough?
    # a stretch begins i tokens later than it might, so that in the synthetic text, where kinds of
    # tokens take turns, each kind has its turn
    starts = [(len(corpus.test) - need) // stretches // 8 * 8 * i + i for i in range(stretches)]
    setting = replace(setting, run=common.choose_dtype(make("ours", setting, given), setting.run,
                                                     given.out))
    bar = common.Bar(len(MODELS) * len(given.seeds) * setting.run.steps)
    models = {}
    for seed in given.seeds:
        for name, row in MODELS.items():
            torch.manual_seed(seed)
            models[seed, name] = common.fit(make(name, setting, given), corpus, replace(
                setting.run, seed=seed), given.out / f"{table6_ablation.stem(row)}-{seed}.pt", bar)
    bar, losses, lengths = common.Bar(len(models) * stretches * W * most), [], {}
    T = setting.run.segment
    for seed in given.seeds:
        group = []
        for name in MODELS:
            model = models[seed, name]
            lengths[seed, name] = T if name in ("vanilla", "lstm") else best_length(
                model, setting, corpus, bar)
            group.append(torch.cat([losses_by_context(
                model, corpus.test[start : start + need], contexts, lengths[seed, name],
                side_by_side, bar) for start in starts], dim=1))
        losses.append(torch.stack(group))
    bar.clear()
    print(f"{corpus.name}; {losses[0].shape[-1]:,} positions, contexts {step}, {2 * step} ... "
          f"{most}; segments of {setting.run.segment} in training\nRECL in tokens for seeds "
          f"{given.seeds}; {most} stands for at least {most}\n{'model':15}{'parameters':>11}"
          f"{'memory':>9}" + "".join(f"{f'r = {r}':>18}" for r in FRACTIONS) + "   paper")
    found = {r: [recl(z, contexts, r) for z in losses] for r in FRACTIONS}
    for i, (name, row) in enumerate(MODELS.items()):
        attends = statistics.median(lengths[seed, name] for seed in given.seeds)
        print(f"{name:15}{sum(z.numel() for z in models[given.seeds[0], name].parameters()):11,}"
              f"{'state' if name == 'lstm' else int(attends):>9}"
              + "".join(f"{' '.join(str(z[i]) for z in found[r]):>18}" for r in FRACTIONS)
              + "   " + " / ".join(map(str, row.paper)))
    draw(losses, contexts, given.out / "recl.png", corpus.name.split(" (")[0])


def main(argv=None):
    """Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    return common.run(NAME, experiment, argv)


if __name__ == "__main__":
    sys.exit(main())
