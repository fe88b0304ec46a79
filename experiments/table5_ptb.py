"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

The paper says "variational dropout and weight average" and nothing more, and no script for it was
published.  This is the published architecture, W_kR included, within 24.1 million parameters, with
these two parts, and the effect of each.

    python experiments/table5_ptb.py --what effects        each part's effect, small: hours
    python experiments/table5_ptb.py --scale whole         train.py's small model, the whole text
    python experiments/table5_ptb.py --scale paper --test  train, choose, test; a GPU

Variational dropout (Gal & Ghahramani 2016; Merity, Keskar and Socher 2017, 4.2) draws one mask for
all time steps of a segment: a feature that is dropped is absent for all of it, and cannot be read
off the neighbouring word.  Here it is at the input and the output, as in that work on LSTMs; inside
the layers, where it hurts (results.md), each element is dropped by itself.  The weight average is
the mean of the weights after each step of the run's last part, at a constant rate.

The model of a run is that average; the curve and the choices on the validation split (memory length
and clamp of the evaluation) are about it.  Only with --test is the test split read: as one lane,
every token, once for each finished model.  result-SEED.json says what was chosen and read, when.
"""
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import common  # before torch

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.optim.swa_utils import AveragedModel

from common import checkpoint, fast, lesson_1, lesson_5, log, presets, train
from training.optimizers import Optimizer, optimizer_of

NAME = "table5_ptb"
ppl = partial(log.in_unit, unit="ppl")  # of a mean loss in nats


# ---- what is trained ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Dropouts:
    """The regularization of a model; the defaults are: none at all."""

    input: float = 0.0  # dropout rates: of the embedded words,
    inside: float = 0.0  # of R, after the attention, inside and after the feed-forward network,
    attention: float = 0.0  # of the attention probabilities,
    output: float = 0.0  # of the last hidden state
    locked: bool = True  # input and output have one mask for all time steps
    average_from: float = 1.0  # fraction of the run where the weight average begins; 1: none


@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and on how much of the text."""

    config: lesson_5.Config
    recipe: presets.Recipe  # with its length in steps, later
    epochs: int
    dropouts: Dropouts
    memories: tuple  # of evaluation, to choose from
    part: int = 1  # train on the first 1/part of the text


RUN = presets.Recipe("ptb", steps=1, eval_segment=64)
SMALL = Dropouts(0.3, 0.1, 0.1, 0.3, average_from=0.7)
SCALES = {
    "tiny": Size(lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16,
                                 mem_len=8),
                 replace(RUN, batch=4, segment=8, lr=3e-3, warmup=5, eval_mem_len=16,
                         eval_every=10, eval_tokens=200),
                 epochs=2, dropouts=SMALL, part=10, memories=(8, 16)),
    "small": Size(lesson_5.Config(2, n_layer=4, d_model=96, n_head=3, d_head=32, d_inner=192,
                                  mem_len=32),
                  replace(RUN, batch=16, segment=32, lr=2e-3, warmup=200, eval_mem_len=64,
                          eval_every=227, eval_tokens=20_000),
                  epochs=18, dropouts=SMALL, part=12, memories=(32, 64, 128, 256)),
    "whole": Size(replace(presets.CONFIGS["laptop-words"], dropout=0.0, cutoffs=()),
                  replace(RUN, batch=16, segment=64, lr=2e-3, warmup=400, eval_mem_len=128,
                          eval_every=907, eval_tokens=20_000),
                  epochs=6, dropouts=replace(SMALL, input=0.1, output=0.2),
                  memories=(64, 128, 256, 512)),
    # 12 layers of 384 suit a GPU's multiples of 64; the authors' later code has 16 of 380
    "paper": Size(replace(presets.CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                          d_inner=1152, dropout=0.0, dropout_attention=0.0),
                  replace(RUN, batch=20, segment=70, lr=3e-4, warmup=3000, eval_segment=512,
                          eval_mem_len=140, eval_every=1992, eval_tokens=0),
                  epochs=150, dropouts=Dropouts(0.6, 0.2, 0.2, 0.5, average_from=0.7),
                  memories=(70, 140, 280, 560, 1120))}
EFFECTS = {  # what each changes in the dropouts
    "recipe": {}, "no input dropout": {"input": 0.0}, "no inside dropout": {"inside": 0.0},
    "no attention dropout": {"attention": 0.0}, "no output dropout": {"output": 0.0},
    "not locked": {"locked": False}, "no average": {"average_from": 1.0},
    "nothing": vars(Dropouts())}


class LockedDropout(nn.Module):
    """Dropout with one mask for all time steps of a call: (B, T, D), mask (B, 1, D)."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, z):
        """(B, T, D) -> (B, T, D), the mean kept; in evaluation z itself."""
        return F.dropout1d(z.mT, self.p, self.training).mT


def regularize(model, dropouts):
    """Replace lesson 5's dropouts by these -> the model."""
    kind = LockedDropout if dropouts.locked else nn.Dropout
    model.dropout_embedding, model.dropout_final = kind(dropouts.input), kind(dropouts.output)
    model.dropout_R = nn.Dropout(dropouts.inside)
    for layer in model.layers:
        layer.dropout_output, layer.dropout_inner, layer.dropout_ff = (
            nn.Dropout(dropouts.inside) for _ in range(3))
        layer.attention.dropout_attention = nn.Dropout(dropouts.attention)
    model.variant = str(dropouts)
    return model


class Averaging(Optimizer):
    """The run's optimizer, and `mean`: the model of the mean of the weights after each step from
    average_from on; until then, or without an average, of the weights of the last step.

    The model, lesson 5's, is regularized in place; the mean needs no dropouts.
    """

    def __init__(self, model, recipe, dropouts):
        super().__init__(*optimizer_of(model, recipe).parts)
        self.mean = AveragedModel(model)
        self.model, self.recipe = regularize(model, dropouts), recipe
        self.begin, self.steps = dropouts.average_from, 0

    def set_rate(self, rate):
        """Begin a step.  With an average the cosine ends where it begins, at a third of recipe.lr,
        and half of that is the rate from there.
        """
        done, warm = self.steps / self.recipe.steps, (self.steps + 1) / max(1, self.recipe.warmup)
        self.is_averaging = done >= self.begin
        if self.begin < 1:
            cosine = (1 + math.cos(math.pi * min(1.0, done / self.begin))) / 2
            rate = self.recipe.lr * min(warm, (1 + 2 * cosine) / 3) * (1 - 0.5 * self.is_averaging)
        self.steps += 1
        super().set_rate(rate)

    def step(self):
        """Update all weights, and their mean."""
        super().step()
        self.mean.update_parameters(self.model)
        if not self.is_averaging:
            self.mean.n_averaged.zero_()  # so the next update copies the weights

    def state_dict(self):
        """Return a list: the state of each part, and its own."""
        return [*super().state_dict(), {"steps": self.steps, "mean": self.mean.state_dict()}]

    def load_state_dict(self, states):
        """Restore it."""
        super().load_state_dict(states[:-1])
        self.steps = states[-1]["steps"]
        self.mean.load_state_dict(states[-1]["mean"])


def fit(config, recipe, dropouts, corpus, path, device):
    """Train the run in the folder `path`, or what is left of it -> its average, in eval mode."""
    job = common.fit(
        path, lambda: lesson_5.TransformerXL(config).to(device), corpus, recipe,
        lambda model: Averaging(model, recipe, dropouts),
        lambda optimizer: fast.prepared(optimizer.mean.module))
    return job.optimizer.mean.module.eval()


# ---- evaluation ---------------------------------------------------------------------------------

def mean_loss(model, tokens, recipe, known=None):
    """Mean loss in nats over all predictions of n tokens, read as one lane with the lengths of the
    run's evaluation; with known (V,) bool only these words count.
    """
    losses = common.memory_losses(
        fast.prepared(model), tokens[None].long().to(model.u.device), 0,
        train.evaluation_segment_length(recipe), mem_len=recipe.eval_mem_len, same_length=True,
        clamp_len=recipe.eval_clamp_len)[0].double()
    return (losses if known is None else losses[known[tokens[1:].long()]]).mean().item()


def choose(model, valid, recipe, memories):
    """Choose the evaluation with the lowest validation loss -> (nats, run).

    A clamp is tried at the longest distance of training, if evaluation has longer ones.
    """
    longest, found = model.config.mem_len + recipe.segment - 1, []
    for M in memories:
        for clamp in (0, longest) if M > longest else (0,):
            at = replace(recipe, eval_mem_len=M, eval_clamp_len=clamp)
            found.append((mean_loss(model, valid, at), at))
    return min(found, key=lambda one: one[0])


def result_of(model, corpus, recipe, memories, path, test):
    """Choose the evaluation and, if asked, read the test split -> what `path` says of them.

    Both are done once for a model.  A reading is noted before it begins, so that one that was
    interrupted, and is repeated, can be seen.  ValueError if the file is about other weights.
    """
    weights = hashlib.sha256(b"".join(
        z.cpu().numpy().tobytes() for z in model.state_dict().values())).hexdigest()

    def note(result):
        checkpoint.write(path, lambda file: json.dump(result, file, indent=1))

    if not path.exists():
        nats, at = choose(model, corpus.valid, recipe, memories)
        note({"weights": weights, "valid": ppl(nats), "M": at.eval_mem_len,
              "clamp": at.eval_clamp_len, "readings": []})
    result = json.loads(path.read_text())
    if result["weights"] != weights:
        raise ValueError(f"{path} is about another model; it logs what was read of the test split, "
                         "so move it away, and keep it")
    if test and "test" not in result:
        result["readings"].append(time.strftime("%Y-%m-%d %H:%M:%S"))
        note(result)
        at = replace(recipe, eval_mem_len=result["M"], eval_clamp_len=result["clamp"])
        result["test"] = ppl(mean_loss(model, corpus.test, at))
        note(result)
    return result


def describe(result, corpus):
    """Return a result in one line."""
    line = (f"valid {result['valid']:.2f} ppl (M {result['M']}, clamp {result['clamp'] or 'none'})")
    if "test" in result:
        line += (f" | test {result['test']:.2f} ppl, {len(corpus.test) - 1:,} predictions, read "
                 + ", after an interruption ".join(result["readings"]))
    return line


# ---- the outcome --------------------------------------------------------------------------------

def read_curve(path, epochs):
    """Return [(epochs, validation perplexity)] of the run in the folder `path`."""
    rows = [row for row in log.read_metrics(path / "metrics.tsv") if row["valid"]]
    return [(epochs * int(row["tokens"]) / int(rows[-1]["tokens"]), float(row["valid"]))
            for row in rows]


def report(curves, kept, epochs):
    """Print for each recipe its validation curve in perplexity, the best of it, and for each seed
    the final loss over known words, in nats above that of the recipe.
    """
    marks = [epochs * k / 6 for k in range(1, 7)]
    print(f"{'valid ppl after epochs':26}" + "".join(f"{mark:7.3g}" for mark in marks)
          + f"{'best':>8} | kept, nats above the recipe, known words")
    for name in dict.fromkeys(name for name, _ in curves):
        seeds = [seed for other, seed in curves if other == name]
        drawn = [curves[name, seed] for seed in seeds]
        line = [statistics.mean(min(z, key=lambda one: abs(one[0] - mark))[1] for z in drawn)
                for mark in marks]
        lowest = statistics.mean(min(value for _, value in z) for z in drawn)
        above = [kept[name, seed] - kept["recipe", seed] for seed in seeds]
        print(f"{name:26}" + "".join(f"{z:7.0f}" for z in line) + f"{lowest:8.1f} | "
              + "  ".join(f"{z:+.3f}" for z in above))


def draw(curves, path, epochs, title):
    """Plot a panel for each recipe: validation perplexity over epochs, the whole recipe in grey."""
    names = list(dict.fromkeys(name for name, _ in curves))
    low = min(value for curve in curves.values() for _, value in curve)
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.9 * columns + 0.4, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(panels, names):
        for (other, _), curve in curves.items():
            if other in ("recipe", name):
                axes.plot(*zip(*curve), color="tab:blue" if other == name else "0.6")
        axes.set_title(name, fontsize=10)
        axes.set(ylim=(0.95 * low, 2.2 * low), xlim=(0, epochs))
        axes.grid(alpha=0.3)
    for axes in panels[len(names):]:
        axes.set_visible(False)
    figure.supxlabel("epochs")
    figure.supylabel("validation perplexity (not from 0)")
    figure.suptitle(title, fontsize=11)
    common.save_figure(figure, path)


# ---- the command line ---------------------------------------------------------------------------

def parse(argv):
    """The command line, checked.  ValueError."""
    parser = common.make_flags(NAME, __doc__, SCALES, dataset="ptb")
    parser.add_argument("--what", choices=("recipe", "effects"), default="recipe")
    parser.add_argument("--test", action="store_true", help="read the test split")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=EFFECTS, default=EFFECTS,
                        help=f"of the effects, these: {', '.join(EFFECTS)}")
    given = parser.parse_args(argv)
    if given.what == "effects" and given.test:
        raise ValueError("--test is for --what recipe: nothing is to be chosen by the test split")
    return given


@common.exit_status
def main(argv):
    """Train what is missing, print, draw; for the recipe choose the evaluation and test."""
    given, corpus = common.begin(parse(argv), NAME)
    size = SCALES[given.scale]
    corpus = replace(corpus, train=corpus.train[: len(corpus.train) // size.part])
    config = replace(size.config, vocab_size=len(corpus.vocab))
    columns = lesson_1.lanes(corpus.train, size.recipe.batch).shape[1] - 1
    recipe = replace(size.recipe, steps=size.epochs * math.ceil(columns / size.recipe.segment))
    recipe = common.choose_dtype(lesson_5.TransformerXL(config).to(given.device), recipe, given.out)
    print(f"{presets.count_parameters(config):,} parameters, {len(corpus.train):,} tokens of "
          f"training, {size.epochs} epochs, {recipe.batch} lanes of {recipe.segment}, "
          f"{recipe.dtype}", flush=True)
    curves, kept, valid = {}, {}, train.validation_tokens(corpus, recipe)
    known = torch.bincount(corpus.train, minlength=len(corpus.vocab)) > 0  # of a part: not all
    names = ["recipe"] if given.what == "recipe" else dict.fromkeys(["recipe", *given.only])
    for name in names:
        dropouts = replace(size.dropouts, **EFFECTS[name])
        for seed in given.seeds:
            path = given.out / f"{'-'.join(name.split())}-{seed}"
            model = fit(config, replace(recipe, seed=seed), dropouts, corpus, path, given.device)
            curves[name, seed] = read_curve(path, size.epochs)
            if given.what == "effects":
                kept[name, seed] = mean_loss(model, valid, recipe, known)
            else:
                result = result_of(model, corpus, recipe, size.memories,
                                   given.out / f"result-{seed}.json", given.test)
                print(f"seed {seed}: {describe(result, corpus)}", flush=True)
    if given.what == "effects":
        report(curves, kept, size.epochs)
    draw(curves, given.out / f"{given.what}.png", size.epochs,
         f"Penn Treebank, {len(corpus.train):,} tokens of training; grey: the recipe")


if __name__ == "__main__":
    sys.exit(main())
