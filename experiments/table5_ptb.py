"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

The paper says "variational dropout and weight average" and nothing more, and no script for it was
published.  This is the published architecture, W_kR included, within 24.1 million parameters, with
these two parts, and the effect of each.

    python experiments/table5_ptb.py --what effects        each part's effect, small: hours
    python experiments/table5_ptb.py --scale whole         train.py's small model, the whole text
    python experiments/table5_ptb.py --scale paper --test   train, choose, test; a GPU

Variational dropout (Gal & Ghahramani 2016; Merity, Keskar and Socher 2017, 4.2) draws one mask for
all time steps of a segment: a feature that is dropped is absent for all of it, and cannot be read
off the neighbouring word.  Here it stands at the input and the output, as in that work on LSTMs;
inside the layers, where it hurts (results.md), each number is dropped by itself.  The weight
average is the mean of the weights after each step of the run's last part, at a constant rate.

The model of a run is that average.  Memory length, clamp and temperature of its evaluation are
chosen on the validation split.  Only with --test is the test split read: as one lane, every token,
once for each finished model.  result-SEED.json says what was chosen, and when what was read.
"""
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.optim.swa_utils import AveragedModel

import common
from common import checkpoint, fast, lesson_1, lesson_5, log, presets, train

NAME = "table5_ptb"
TEMPERATURES = (0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
ppl = partial(log.in_unit, unit="ppl")  # of a mean loss in nats


# ---- what is trained ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How strongly a model is regularised; the defaults are: not at all."""

    input: float = 0.0  # dropout rates: of the embedded words,
    inside: float = 0.0  # of R, after the attention, inside and after the feed-forward network,
    attention: float = 0.0  # of the attention probabilities,
    output: float = 0.0  # of the last hidden state
    locked: bool = True  # input and output have one mask for all time steps
    average_from: float = 1.0  # where the weight average begins, as a part of the run; 1: none


@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and on how much of the text."""

    config: lesson_5.Config
    run: presets.Run  # with its length in tokens, later
    epochs: int
    recipe: Recipe
    memories: tuple  # of evaluation, to choose from
    part: int = 1  # train on the first 1/part of the text


RUN = presets.Run("ptb", tokens=1, eval_segment=64)
SCALES = {
    "tiny": Size(lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16,
                                 mem_len=8),
                 replace(RUN, batch=4, segment=8, lr=3e-3, warmup=5, eval_mem_len=16,
                         eval_every=10, eval_tokens=200),
                 epochs=2, recipe=Recipe(0.3, 0.1, 0.1, 0.3, average_from=0.7), part=10,
                 memories=(8, 16)),
    "small": Size(lesson_5.Config(2, n_layer=4, d_model=96, n_head=3, d_head=32, d_inner=192,
                                  mem_len=32),
                   replace(RUN, batch=16, segment=32, lr=2e-3, warmup=200, eval_mem_len=64,
                           eval_every=227, eval_tokens=20_000),
                   epochs=18, recipe=Recipe(0.3, 0.1, 0.1, 0.3, average_from=0.7), part=12,
                   memories=(32, 64, 128, 256)),
    "whole": Size(replace(presets.CONFIGS["laptop-words"], dropout=0.0, cutoffs=()),
                  replace(RUN, batch=16, segment=64, lr=2e-3, warmup=400, eval_mem_len=128,
                          eval_every=907, eval_tokens=20_000),
                  epochs=6, recipe=Recipe(0.1, 0.1, 0.1, 0.2, average_from=0.7),
                  memories=(64, 128, 256, 512)),
    # 12 layers of 384 suit a GPU's multiples of 64; the authors' later code has 16 of 380
    "paper": Size(replace(presets.CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                          d_inner=1152, dropout=0.0, dropout_attention=0.0),
                  replace(RUN, batch=20, segment=70, lr=3e-4, warmup=3000, eval_segment=512,
                          eval_mem_len=140, eval_every=1992, eval_tokens=0),
                  epochs=150, recipe=Recipe(0.6, 0.2, 0.2, 0.5, average_from=0.7),
                  memories=(70, 140, 280, 560, 1120))}
EFFECTS = {  # what each changes in the recipe
    "recipe": {}, "no input dropout": {"input": 0.0}, "no inside dropout": {"inside": 0.0},
    "no attention dropout": {"attention": 0.0}, "no output dropout": {"output": 0.0},
    "not locked": {"locked": False}, "no average": {"average_from": 1.0},
    "nothing": vars(Recipe())}


class LockedDropout(nn.Module):
    """Dropout with one mask for all time steps of a call: (B, T, D), mask (B, 1, D)."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, z):
        """(B, T, D) -> (B, T, D), the mean kept; in evaluation z itself."""
        return F.dropout1d(z.mT, self.p, self.training).mT


def regularise(model, recipe):
    """Put the recipe's dropouts in the place of lesson 5's -> the model."""
    kind = LockedDropout if recipe.locked else nn.Dropout
    model.dropout_embedding, model.dropout_final = kind(recipe.input), kind(recipe.output)
    model.dropout_R = nn.Dropout(recipe.inside)
    for layer in model.layers:
        layer.dropout_output, layer.dropout_inner, layer.dropout_ff = (
            nn.Dropout(recipe.inside) for _ in range(3))
        layer.attention.dropout_attention = nn.Dropout(recipe.attention)
    return model


class Averaging(common.Training):
    """What common.fit asks for: training by a recipe, with a curve of validations.

    A row of the curve: tokens, and the validation loss in nats of the weights and of their average.
    """

    def __init__(self, model, run, recipe, corpus):
        super().__init__(regularise(model, recipe), run)
        self.recipe, self.mean = recipe, AveragedModel(model)
        self.valid, self.curve = train.validation_tokens(corpus, run), []

    def rate(self, step, done, T):
        """The cosine ends where the average begins, at a third of run.lr; half of that from there.
        """
        run, begin = self.run, self.recipe.average_from
        if begin == 1:
            return super().rate(step, done, T)
        warm = run.lr * (step + 1) / max(1, run.warmup)
        cosine = train.learning_rate(replace(run, warmup=0), step, min(1.0, done / begin))
        return min(warm, (run.lr + 2 * cosine) / 3) * (0.5 if done >= begin else 1.0)

    def after_step(self, state, loss, done):
        """Average, and every eval_every steps a row of the curve."""
        if done >= self.recipe.average_from:
            self.mean.update_parameters(self.model)
        if state.step % self.run.eval_every == 0 or state.tokens >= self.run.tokens:
            averaged = self.validate(self.mean.module) if self.mean.n_averaged else math.inf
            self.curve.append((state.tokens, self.validate(self.model), averaged))

    def validate(self, model):
        """The validation loss in nats."""
        return train.evaluate(fast.prepared(model), self.valid, self.run, "validating")

    def keep(self, finished):
        """A finished model becomes the average, if there is one."""
        if finished and self.mean.n_averaged:
            self.model.load_state_dict(self.mean.module.state_dict())
        more = {} if finished else {"mean": self.mean.state_dict()}
        return super().keep(finished) | more | {"curve": self.curve}

    def restore(self, content):
        """The same back."""
        super().restore(content)
        self.curve = content["curve"]
        if "mean" in content:
            self.mean.load_state_dict(content["mean"])


def fit(config, run, recipe, corpus, path, device):
    """Train what is saved at path, or what is left of it -> the model that is kept, its curve."""
    torch.manual_seed(run.seed)
    model = lesson_5.TransformerXL(config).to(device)
    training = Averaging(model, run, recipe, corpus)
    common.fit(model, corpus, run, path, training)
    return model, training.curve


# ---- evaluation ---------------------------------------------------------------------------------

@torch.no_grad()
def losses_by_temperature(model, tokens, run, temperatures=TEMPERATURES, known=None):
    """Mean losses in nats, [one for each temperature], over all n - 1 predictions of n tokens.

    One lane, each token once, memory and clamp of the run.  The logits are divided by the
    temperature: above 1 the model is less sure.  With known (V,) bool only these words count.
    """
    reader, memory, table = fast.prepared(model), None, []
    stream = lesson_1.lanes(tokens.to(model.u.device), 1)
    parts = math.ceil((len(tokens) - 1) / run.eval_segment)
    with train.evaluating(reader, run):
        read = lesson_1.segments(stream, run.eval_segment)
        for x, y in train.progress(read, "evaluating", parts):
            logits, memory = reader(x, memory)
            table.append(torch.cat([lesson_1.token_losses(logits / z, y) for z in temperatures]))
    table = torch.cat(table, dim=1).double().cpu()  # (temperatures, n - 1)
    return (table if known is None else table[:, known[tokens[1:].long()]]).mean(1).tolist()


def choose(model, valid, run, memories):
    """The evaluation with the lowest validation loss -> (nats, run, temperature).

    A clamp is tried at the longest distance of training, if evaluation has longer ones.
    """
    longest, found = model.config.mem_len + run.segment - 1, []
    for M in memories:
        for clamp in (0, longest) if M > longest else (0,):
            at = replace(run, eval_mem_len=M, eval_clamp_len=clamp)
            loss, temperature = min(zip(losses_by_temperature(model, valid, at), TEMPERATURES))
            found.append((loss, at, temperature))
    return min(found, key=lambda one: one[0])


def result_of(model, corpus, run, memories, path, test):
    """Choose the evaluation and, if asked, read the test split -> what `path` says of them.

    Both are done once for a model.  A reading is noted before it begins, so that one that was
    interrupted, and is repeated, can be seen.  ValueError if the file is about other weights.
    """
    weights = hashlib.sha256(b"".join(
        z.cpu().numpy().tobytes() for z in model.state_dict().values())).hexdigest()

    def note(result):
        checkpoint.write(path, lambda file: json.dump(result, file, indent=1))

    if not path.exists():
        nats, at, temperature = choose(model, corpus.valid, run, memories)
        note({"weights": weights, "valid": ppl(nats), "M": at.eval_mem_len,
              "clamp": at.eval_clamp_len, "temperature": temperature, "readings": []})
    try:
        result = json.loads(path.read_text())
        if result["weights"] != weights:
            raise ValueError
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{path} is damaged, or about another model; it logs what was read of the "
                         "test split, so move it away, and keep it") from None
    if test and "test" not in result:
        result["readings"].append(time.strftime("%Y-%m-%d %H:%M:%S"))
        note(result)
        at = replace(run, eval_mem_len=result["M"], eval_clamp_len=result["clamp"])
        result["test"] = ppl(*losses_by_temperature(model, corpus.test, at,
                                                    (result["temperature"],)))
        note(result)
    return result


def describe(result, corpus):
    """A result in one line."""
    line = (f"valid {result['valid']:.2f} ppl (M {result['M']}, clamp {result['clamp'] or 'none'}, "
            f"temperature {result['temperature']})")
    if "test" in result:
        line += (f" | test {result['test']:.2f} ppl, {len(corpus.test) - 1:,} predictions, read "
                 + ", after an interruption ".join(result["readings"]))
    return line


# ---- the outcome --------------------------------------------------------------------------------

def points(curve, epochs):
    """[(epochs, validation perplexity)], of the weights or, where it is lower, their average."""
    return [(epochs * tokens / curve[-1][0], ppl(min(losses))) for tokens, *losses in curve]


def report(curves, kept, epochs):
    """A line for each recipe: its validation curve in perplexity, and the best of it; and for each
    seed the loss of the model that is kept, over known words, in nats above that of the recipe.
    """
    marks = [epochs * k / 6 for k in range(1, 7)]
    print(f"{'valid ppl after epochs':26}" + "".join(f"{mark:7.3g}" for mark in marks)
          + f"{'best':>8} | kept, nats above the recipe, known words")
    for name in dict.fromkeys(name for name, _ in curves):
        seeds = [seed for other, seed in curves if other == name]
        drawn = [points(curves[name, seed], epochs) for seed in seeds]
        line = [statistics.mean(min(z, key=lambda one: abs(one[0] - mark))[1] for z in drawn)
                for mark in marks]
        best = statistics.mean(min(value for _, value in z) for z in drawn)
        above = [kept[name, seed] - kept["recipe", seed] for seed in seeds]
        print(f"{name:26}" + "".join(f"{z:7.0f}" for z in line) + f"{best:8.1f} | "
              + "  ".join(f"{z:+.3f}" for z in above))


def draw(curves, path, epochs, title):
    """A panel for each recipe: validation perplexity over epochs, the recipe itself in grey."""
    names = list(dict.fromkeys(name for name, _ in curves))
    low = min(value for curve in curves.values() for _, value in points(curve, epochs))
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.9 * columns + 0.4, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(panels, names):
        for (other, _), curve in curves.items():
            if other in ("recipe", name):
                color = "tab:blue" if other == name else "0.6"
                axes.plot(*zip(*points(curve, epochs)), color=color)
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
    parser.add_argument("--epochs", type=int, metavar="N")
    given = parser.parse_args(argv)
    if given.epochs is not None and given.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {given.epochs}")
    if given.what == "effects" and given.test:
        raise ValueError("--test is for --what recipe: nothing is to be chosen by the test split")
    return given


@common.exit_status
def main(argv):
    """Train what is missing, print, draw; for the recipe choose the evaluation and test."""
    given, corpus = common.begin(parse(argv), NAME)
    size = SCALES[given.scale]
    epochs = given.epochs or size.epochs
    corpus = replace(corpus, train=corpus.train[: len(corpus.train) // size.part])
    config = replace(size.config, vocab_size=len(corpus.vocab))
    epoch = lesson_1.lanes(corpus.train, size.run.batch)[:, 1:].numel()  # predictions
    run = replace(size.run, tokens=epochs * epoch)
    run = common.choose_dtype(lesson_5.TransformerXL(config).to(given.device), run, given.out)
    print(f"{presets.count_parameters(config):,} parameters, {len(corpus.train):,} tokens of "
          f"training, {epochs} epochs, {run.batch} lanes of {run.segment}, {run.dtype}", flush=True)
    curves, kept, valid = {}, {}, train.validation_tokens(corpus, run)
    known = torch.bincount(corpus.train, minlength=len(corpus.vocab)) > 0  # of a part: not all
    names = ["recipe"] if given.what == "recipe" else dict.fromkeys(["recipe", *given.only])
    for name in names:
        recipe = replace(size.recipe, **EFFECTS[name])
        for seed in given.seeds:
            path = given.out / f"{'-'.join(name.split())}-{seed}.pt"
            model, curves[name, seed] = fit(config, replace(run, seed=seed), recipe, corpus, path,
                                            given.device)
            if given.what == "effects":
                kept[name, seed], = losses_by_temperature(model, valid, run, (1.0,), known)
            else:
                result = result_of(model, corpus, run, size.memories,
                                   given.out / f"result-{seed}.json", given.test)
                print(f"seed {seed}: {describe(result, corpus)}", flush=True)
    if given.what == "effects":
        report(curves, kept, epochs)
    draw(curves, given.out / f"{given.what}.png", epochs,
         f"Penn Treebank, {len(corpus.train):,} tokens of training; grey: the recipe")


if __name__ == "__main__":
    sys.exit(main())
