"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

The paper says "variational dropout and weight average" and nothing more, and no script for it was
published.  This is the published architecture, W_kR included, within 24.1 million parameters, one
model, no cache, no dynamic evaluation, with the parts of regularisers.py, and the search for how
strong each should be.  ptb.md is its log.

    python experiments/ptb.py --size paper                  the recipe: train, choose, test; a GPU
    python experiments/ptb.py --size paper --what effects   the recipe with one part changed, each
    python experiments/ptb.py --what effects                the same small: a twelfth of the text
    python experiments/ptb.py --size whole                  the whole text, train.py's small model

A run is a recipe and a seed, in a folder of its own under --out.  What is finished is kept, and an
unfinished run goes on where it stopped.  Several processes may work in one --out: each takes the
next run that nobody works on, so that small runs share a GPU (or the cores) side by side:

    for i in 1 2 3; do python experiments/ptb.py --size paper & done; wait

(On a CPU put OMP_NUM_THREADS=1 in front: processes whose threads wait for each other are slow.)

The last weights, or their average, rounded to bf16, are the model.  Memory length, clamp and
temperature of the evaluation are chosen on the validation split.  The test split is read as one
lane, every token, once for each finished model, by the recipe alone: test.tsv in the run's folder
logs the reading, and a model that stands there is not read again.
"""
import hashlib
import math
import statistics
import sys
import time
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path

import torch
from matplotlib.figure import Figure

import study
from regularisers import Penalised, Recipe, averaged, optimizer_of, regularise, segment_length
from study import checkpoint, corpora, lanes, segments, train

NAME = "ptb"
lesson_5 = import_module("05_full_model")
CONFIGS, TransformerXL = lesson_5.CONFIGS, lesson_5.TransformerXL
TEMPERATURES = (0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
COLUMNS = ("step", "tokens", "seconds", "rate", "train", "valid", "averaged")  # of curve.tsv


# ---- what is trained ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and on how much of the text."""

    config: train.Config
    run: train.Run  # its tokens are for one epoch until --epochs is known
    epochs: int
    recipe: Recipe
    part: int = 1  # train on the first 1/part of the text
    memories: tuple = ()  # of evaluation, to choose from
    average_steps: int = 1000  # of the exponential average


# the authors' later code has 16 layers of 380 without W_kR; 12 of 384 suit a GPU's multiples of 64
MODELS = {"16x380": replace(CONFIGS["ptb"], dropout=0.0, dropout_attention=0.0),
          "12x384": replace(CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                            d_inner=1152, dropout=0.0, dropout_attention=0.0)}
RECIPE = Recipe(word=0.2, input=0.6, inside=0.2, attention=0.2, output=0.5, alpha=0.2, beta=0.1,
                decay=1.2e-6, decoupled=False, embedding_rate=2.0, average="equal",
                average_from=0.7, average_rate=0.5)
SMALL = Recipe(word=0.1, input=0.3, inside=0.1, attention=0.1, output=0.3, alpha=0.2, beta=0.1,
               decay=0.1, average="equal", average_from=0.7, average_rate=0.5)
MILD = Recipe(word=0.05, input=0.15, inside=0.1, attention=0.1, output=0.2, decay=0.1,
              average="equal", average_from=0.7, average_rate=0.5)
SIZES = {
    "tiny": Size(train.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8),
                 train.Run("ptb", batch=4, segment=8, tokens=1, lr=3e-3, warmup=5, eval_segment=64,
                           eval_mem_len=16, eval_every=10, eval_tokens=200),
                 epochs=2, recipe=SMALL, part=10, memories=(8, 16)),
    "laptop": Size(train.Config(2, n_layer=4, d_model=96, n_head=3, d_head=32, d_inner=192,
                                mem_len=32),
                   train.Run("ptb", batch=16, segment=32, tokens=1, lr=2e-3, warmup=200,
                             eval_segment=64, eval_mem_len=64, eval_every=227, eval_tokens=20_000),
                   epochs=18, recipe=SMALL, part=12, memories=(32, 64, 128, 256),
                   average_steps=300),
    "whole": Size(replace(CONFIGS["laptop-words"], dropout=0.0),
                  train.Run("ptb", batch=16, segment=64, tokens=1, lr=2e-3, warmup=400,
                            eval_segment=64, eval_mem_len=128, eval_every=907, eval_tokens=20_000),
                  epochs=8, recipe=MILD, memories=(64, 128, 256, 512), average_steps=1000),
    "paper": Size(MODELS["12x384"],
                  train.Run("ptb", batch=20, segment=70, tokens=1, lr=3e-4, warmup=3000,
                            eval_segment=512, eval_mem_len=140, eval_every=1992, eval_tokens=0),
                  epochs=150, recipe=RECIPE, memories=(70, 140, 280, 560, 1120),
                  average_steps=20_000)}


def effects(recipe):
    """{name: recipe}: the recipe, then with one part taken out, added or changed."""
    def but(**changes):
        return replace(recipe, **changes)

    changed = {
        "nothing": Recipe(),
        "only independent dropout": Recipe(
            input=0.2, inside=0.2, attention=0.2, output=0.2, locked=False),
        "no word dropout": but(word=0.0),
        "no input dropout": but(input=0.0),
        "no inside dropout": but(inside=0.0),
        "no attention dropout": but(attention=0.0),
        "no output dropout": but(output=0.0),
        "not locked": but(locked=False),
        "locked inside": but(locked_inside=True),
        "DropConnect 0.1": but(connect=0.1),
        "no AR, no TAR": but(alpha=0.0, beta=0.0),
        "no decay": but(decay=0.0),
        "decay 0.1 beside": but(decay=0.1, decoupled=True),
        "decay 1.2e-6 inside": but(decay=1.2e-6, decoupled=False),
        "random lengths": but(vary=True),
        "no average": but(average="", average_from=1.0, average_rate=1.0),
        "exponential average": but(average="ema"),
        "embedding rate x 2": but(embedding_rate=2.0),
        "embedding rate x 1": but(embedding_rate=1.0),
    }
    return {"recipe": recipe} | {name: z for name, z in changed.items() if z != recipe}


# ---- training -----------------------------------------------------------------------------------

def rate_at(run, recipe, step, done):
    """Warm-up, a cosine from run.lr to a third of it, then, while weights are averaged, constant.

    Without averaging the cosine ends at 0, as train.py's does.
    """
    lowest = 1 / 3 if recipe.average else 0.0
    cosine = train.learning_rate(run, step, min(1.0, done / recipe.average_from))
    rate = min(lowest * run.lr + (1 - lowest) * cosine, run.lr * (step + 1) / max(1, run.warmup))
    return rate * (recipe.average_rate if done >= recipe.average_from else 1.0)


class Curve(list):
    """The lines of curve.tsv: dicts of COLUMNS, losses in nats."""

    def write(self, path):
        """As text, the losses as perplexities."""
        rows = ["\t".join(COLUMNS)]
        for row in self:
            shown = {name: f"{math.exp(min(99, row[name])):.3f}" if row[name] is not None else ""
                     for name in ("train", "valid", "averaged")}
            shown |= {"seconds": f"{row['seconds']:.1f}", "rate": f"{row['rate']:.3g}"}
            rows.append("\t".join(str((row | shown)[name]) for name in COLUMNS))
        checkpoint.write(path, lambda file: file.write("\n".join(rows) + "\n"))

    def losses(self):
        """[(tokens, nats)]: the validation loss of the weights or, if lower, of their average."""
        return [(row["tokens"], row["valid"] if row["averaged"] is None
                 else min(row["valid"], row["averaged"])) for row in self]

    def best(self):
        """The lowest of them."""
        return min(loss for _, loss in self.losses())

    def after(self, tokens):
        """The first of them that was measured after so many tokens."""
        return next(loss for at, loss in self.losses() if at >= tokens)


def rounded(model):
    """A state dict rounded to bf16: what is kept of a finished model (2 bytes a weight)."""
    return {name: z.bfloat16() for name, z in model.state_dict().items()}


def fit(config, run, recipe, size, corpus, folder, device, compiling=None):
    """Train in a folder, from the start or from where it stopped -> plain model, its curve.

    The model has the final weights (averaged, if the recipe says so), rounded to bf16.
    ValueError if the folder holds another run, OSError if nothing can be written.
    """
    path = folder / "model.pt"
    settings = " ".join(map(str, (config, run, recipe, size.part, size.average_steps,
                                  corpora.checksum(corpus))))
    content = study.saved(path, settings)
    stream = lanes(corpus.train, run.batch)  # (B, n)
    tokens_each = stream[:, 1:].numel()  # of an epoch
    plain = TransformerXL(config).to(device).eval()  # evaluates the weights of the one that learns
    curve = Curve(content["curve"] if content else ())
    if content and content["finished"]:
        plain.load_state_dict(content["model"])
        return plain, curve

    bar = study.Bar(run.tokens)
    torch.manual_seed(run.seed)
    model = regularise(TransformerXL(config).to(device), recipe)
    penalised = Penalised(model, recipe.alpha, recipe.beta)
    optimizer = optimizer_of(model, recipe, run.lr)
    mean = averaged(plain, recipe, size.average_steps)
    stream = stream.to(device)
    step, epoch, column, memory, seconds, losses, skipped = 0, 0, 0, None, 0.0, [], 0
    if content:
        step, epoch, column, memory = content["place"]
        memory = memory and [z.to(device) for z in memory]
        seconds, losses = content["seconds"], content["losses"]
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        mean.load_state_dict(content["mean"])
        checkpoint.set_random_state(content, run.seed)
        bar.skip(content["tokens"])
    valid = corpus.valid[: run.eval_tokens + 1] if run.eval_tokens else corpus.valid
    first = next(segments(stream, run.segment))
    learner = train.compiled(penalised, run, *first, compiling) if compiling else penalised
    model.train()

    def keep(finished=False):
        """Save what going on needs, or the finished weights; the curve as text beside them."""
        best = mean.module if mean.n_averaged else model
        content = {"settings": settings, "place": (step, epoch, column, memory), "curve": [*curve],
                   "seconds": seconds, "losses": losses, "tokens": tokens, "finished": finished,
                   "model": rounded(best) if finished else model.state_dict()}
        if not finished:
            content |= {"optimizer": optimizer.state_dict(), "mean": mean.state_dict()}
            content |= checkpoint.random_state(device)
        checkpoint.save(path, content)
        curve.write(folder / "curve.tsv")

    last, pause = time.monotonic(), study.EVERY
    while (tokens := epoch * tokens_each + column * run.batch) < run.tokens:
        begun, done = time.perf_counter(), tokens / run.tokens
        length = segment_length(run.segment, run.seed, step) if recipe.vary else run.segment
        x, y = next(segments(stream, length, column))
        rate = rate_at(run, recipe, step, done) * x.shape[1] / run.segment
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        loss, norm, memory = train.train_step(learner, optimizer, x, y, memory, run)
        if math.isfinite(loss + norm):
            losses.append(loss - penalised.penalty.item())
            skipped = 0
        elif (skipped := skipped + 1) == 10:  # none of them has reached the weights
            raise ValueError(f"{folder}: ten steps in a row, up to step {step + 1}, had a loss or "
                             "gradient that is not finite; try a smaller --lr and another --out")
        if recipe.average and done >= recipe.average_from:
            mean.update_parameters(model)
        step, column = step + 1, column + x.shape[1]
        if column == stream.shape[1] - 1:
            epoch, column, memory = epoch + 1, 0, None
        seconds += time.perf_counter() - begun
        bar.advance(f"{folder.name}: loss {loss:.3f}", x.numel())
        tokens = epoch * tokens_each + column * run.batch
        if step % run.eval_every == 0 or tokens >= run.tokens:
            curve.append(dict(zip(COLUMNS, (
                step, tokens, seconds, rate, statistics.mean(losses or [math.inf]),
                loss_of(plain, model, valid, run),
                loss_of(plain, mean.module, valid, run) if mean.n_averaged else None))))
            losses = []
        if time.monotonic() - last > pause:
            start = time.monotonic()
            keep()
            last = time.monotonic()
            pause = max(study.EVERY, 20 * (last - start))
    keep(finished=True)
    bar.clear()
    plain.load_state_dict(study.saved(path, settings)["model"])
    return plain, curve


def loss_of(plain, learner, tokens, run):
    """The validation loss in nats of the weights that another model of the same names has."""
    plain.load_state_dict(learner.state_dict())
    return train.evaluate(plain, tokens, run, "validating")


# ---- evaluation ---------------------------------------------------------------------------------

@torch.no_grad()
def losses_by_temperature(model, tokens, run, temperatures=TEMPERATURES):
    """Mean losses in nats, [one for each temperature], over all n - 1 predictions of n tokens.

    train.evaluate's way of reading: one lane, each token once, memory and clamp of the run.  The
    logits are divided by the temperature: above 1 the model is less sure of itself.
    """
    stream, memory = lanes(tokens.to(model.u.device), 1), None
    totals = torch.zeros(len(temperatures), dtype=torch.float64)
    parts = math.ceil((len(tokens) - 1) / run.eval_segment)
    label = f"evaluating, M {run.eval_mem_len}, clamp {run.eval_clamp_len or 'none'},"
    with train.evaluating(model, run):
        for x, y in train.progress(segments(stream, run.eval_segment), label, parts):
            logits, memory = model(x, memory)
            for i, temperature in enumerate(temperatures):
                totals[i] += lesson_5.token_losses(logits / temperature, y).double().sum().cpu()
    return (totals / (len(tokens) - 1)).tolist()


def choose(model, valid, run, memories):
    """The evaluation with the lowest validation loss -> (nats, run, temperature)."""
    training = model.config.mem_len + run.segment - 1  # the longest distance of training
    found = []
    for M in memories:
        for clamp in (0, training):
            at = replace(run, eval_mem_len=M, eval_clamp_len=clamp)
            found += [(loss, at, temperature) for temperature, loss in zip(
                TEMPERATURES, losses_by_temperature(model, valid, at))]
    return min(found, key=lambda one: one[0])


def read_test(model, name, corpus, chosen, path):
    """The test perplexity of a model, read once: what is in `path` is not read again -> the line.
    """
    weights = hashlib.sha256()
    for z in model.state_dict().values():
        weights.update(z.cpu().numpy().tobytes())
    key = weights.hexdigest()[:16]
    earlier = path.read_text().splitlines() if path.exists() else []
    for line in earlier:
        if key in line:
            return line
    nats, at, temperature = chosen
    (test,) = losses_by_temperature(model, corpus.test, at, (temperature,))
    line = (f"{name}\tweights {key}\tvalid {math.exp(nats):.2f} ppl\ttest {math.exp(test):.2f} ppl"
            f"\tT {at.eval_segment}, M {at.eval_mem_len}, clamp {at.eval_clamp_len or 'none'}, "
            f"temperature {temperature}\t{len(corpus.test) - 1:,} predictions\t"
            f"{time.strftime('%Y-%m-%d %H:%M')}")
    checkpoint.write(path, lambda file: file.write("\n".join([*earlier, line]) + "\n"))
    return line


# ---- many runs, and what came out ---------------------------------------------------------------

def finished(jobs, out, work):
    """work(job, folder) for every job that no other process works on -> {job: what it returned}.

    A job is (name, seed).  What was taken is asked for once more when the others are done.
    """
    results = {}
    for job in [*jobs, *jobs]:
        folder = out / f"{'-'.join(job[0].replace(',', '').split())}-{job[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        with checkpoint.Lock(folder) as lock:
            try:
                lock.take()
            except ValueError:  # another process is at it
                continue
            if job not in results:
                results[job] = work(job, folder)
    return {job: results[job] for job in jobs if job in results}


def report(curves, epochs, total):
    """Print a line for each recipe: its validation curve in perplexity, the best, and how far that
    is from the first recipe's, in nats, seed by seed.
    """
    names = list(dict.fromkeys(name for name, _ in curves))
    marks = [total * k // 6 for k in range(1, 7)]
    print(f"{'valid ppl after epochs':26}" + "".join(f"{epochs * k / 6:7.3g}" for k in range(1, 7))
          + f"{'best':>9}  nats above {names[0]!r}")
    for name in names:
        those = {seed: curve for (other, seed), curve in curves.items() if other == name}
        line = [statistics.mean(math.exp(min(99, curve.after(mark))) for curve in those.values())
                for mark in marks]
        best = statistics.mean(math.exp(curve.best()) for curve in those.values())
        above = [curve.best() - curves[names[0], seed].best() for seed, curve in those.items()
                 if (names[0], seed) in curves]
        print(f"{name:26}" + "".join(f"{z:7.1f}" for z in line) + f"{best:9.2f}  "
              + "  ".join(f"{z:+.3f}" for z in above))
    for (name, seed), curve in curves.items():
        if name == names[0] and curve[-1]["averaged"] is not None:
            print(f"averaging, seed {seed}: {math.exp(curve[-1]['valid']):.2f} ppl with the last "
                  f"weights, {math.exp(curve[-1]['averaged']):.2f} with their average")


def draw(curves, path, epochs, total, title):
    """A panel for each recipe: validation perplexity over epochs, the first recipe in grey."""
    names = list(dict.fromkeys(name for name, _ in curves))
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.9 * columns + 0.4, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    low = math.exp(min(curve.best() for curve in curves.values()))
    for axes, name in zip(panels.flat, names):
        for other, color, width in ((names[0], "0.6", 1.5), (name, "tab:blue", 1.5)):
            for (which, _), curve in curves.items():
                if which == other:
                    line = [(tokens / total * epochs, math.exp(min(99, loss)))
                            for tokens, loss in curve.losses()]
                    axes.plot(*zip(*line), color=color, linewidth=width)
        axes.set_title(name, fontsize=10)
        axes.set(ylim=(0.95 * low, 2.2 * low), xlim=(0, epochs))
        axes.grid(alpha=0.3)
    for axes in list(panels.flat)[len(names):]:
        axes.set_visible(False)
    figure.supxlabel("epochs")
    figure.supylabel("validation perplexity (not from 0)")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def flags():
    """The command line."""
    parser = train.Parser(prog="experiments/ptb.py", description=__doc__, allow_abbrev=False,
                          formatter_class=train.argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--what", choices=("recipe", "effects"), default="recipe")
    add("--size", choices=SIZES, default="laptop")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--only", nargs="+", metavar="NAME", help="of the effects, these")
    add("--model", choices=MODELS, help="with --size paper (default: 12x384)")
    add("--set", nargs="+", default=[], metavar="PART=VALUE",
        help=f"change the recipe: {', '.join(field.name for field in fields(Recipe))}")
    add("--epochs", type=int, metavar="N")
    add("--lr", type=float, help="highest learning rate")
    add("--batch", type=int, metavar="B", help="lanes")
    add("--data-dir", default=study.RUNS.parent / "data", metavar="FOLDER")
    add("--out", metavar="FOLDER", help=f"where the runs are kept (default: runs/{NAME}-SIZE)")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", nargs="?", const="default", choices=("default", "reduce-overhead"),
        help="compile the training step, for a GPU; reduce-overhead: with CUDA graphs")
    return parser


def changed(recipe, settings):
    """The recipe with ["word=0.1", ...] -> Recipe.  ValueError for what is no part or no value."""
    kinds = {field.name: field.type for field in fields(Recipe)}
    for setting in settings:
        part, _, text = setting.partition("=")
        try:
            kind = kinds[part]
            value = {"True": True, "False": False}[text] if kind is bool else kind(text)
            recipe = replace(recipe, **{part: value})
        except (KeyError, ValueError) as error:
            raise ValueError(f"--set {setting}: {error}; the parts are " + ", ".join(
                f"{name} ({kind.__name__})" for name, kind in kinds.items())) from None
    return recipe


def asked(given):
    """What the flags ask for -> Size with its run and epochs, {name: recipe}.  ValueError."""
    train.check_device(given.device)
    study.check_seeds(given.seeds)
    size = SIZES[given.size]
    if given.model:
        if given.size != "paper":
            raise ValueError("--model is for --size paper; the others have a model of their own")
        size = replace(size, config=MODELS[given.model])
    for name in ("epochs", "batch"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(given, name)}")
    run = replace(size.run, batch=given.batch or size.run.batch,
                  lr=size.run.lr if given.lr is None else given.lr)
    size = replace(size, run=run, epochs=given.epochs or size.epochs)
    recipe = changed(size.recipe, given.set)
    recipes = effects(recipe) if given.what == "effects" else {
        " ".join(["recipe", *given.set]): recipe}
    unknown = set(given.only or recipes) - set(recipes)
    if unknown:
        raise ValueError(f"--only {' '.join(map(repr, sorted(unknown)))}: the effects are "
                         f"{', '.join(map(repr, recipes))}")
    return size, {name: z for name, z in recipes.items() if name in (given.only or recipes)}


def experiment(argv):
    """Train what is missing, print, draw; for the recipe choose the evaluation and test."""
    given = flags().parse_args(argv)
    size, recipes = asked(given)
    corpus = corpora.load(NAME, root=given.data_dir)
    corpus = replace(corpus, train=corpus.train[: len(corpus.train) // size.part])
    config = replace(size.config, vocab_size=len(corpus.vocab))
    total = size.epochs * lanes(corpus.train, size.run.batch)[:, 1:].numel()
    run = replace(size.run, tokens=total)
    out = Path(given.out or study.RUNS / f"{NAME}-{given.size}")
    out.mkdir(parents=True, exist_ok=True)
    if given.device == "cuda":
        torch.set_float32_matmul_precision("high")
    run = study.number_type(TransformerXL(config).to(given.device), run, out)
    print(f"{lesson_5.count_parameters(config):,} parameters, {len(corpus.train):,} tokens of "
          f"training, {size.epochs} epochs, {run.batch} lanes of {run.segment}, {run.dtype}",
          flush=True)
    jobs = [(name, seed) for name in recipes for seed in given.seeds]

    def work(job, folder):
        name, seed = job
        model, curve = fit(config, replace(run, seed=seed), recipes[name], size, corpus, folder,
                           given.device, given.compile)
        if given.what == "effects":
            return curve
        exact = replace(run, dtype="float32")
        chosen = choose(model, corpus.valid, exact, size.memories)
        print(read_test(model, f"{given.size} {folder.name}", corpus, chosen,
                        folder / "test.tsv"), flush=True)
        return curve

    curves = finished(jobs, out, work)
    missing = len(jobs) - len(curves)
    if missing:
        print(f"{missing} of {len(jobs)} runs belong to other processes; the same command again "
              "shows all")
    if given.what == "effects" and curves:
        report(curves, size.epochs, total)
    if curves:
        draw(curves, out / f"{given.what}.png", size.epochs, total,
             f"Penn Treebank, {given.size}: {len(corpus.train):,} tokens of training")


def main(argv=None):
    """Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    return study.ended(NAME, experiment, argv)


if __name__ == "__main__":
    sys.exit(main())
