"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

The paper says "variational dropout and weight average" and nothing more, and no script for it was
published.  This is the published architecture, W_kR included, within 24.1 million parameters, with
the parts of regularisers.py, and the search for how strong each should be.

    python experiments/table5_ptb.py --what effects        each part's effect, small: hours
    python experiments/table5_ptb.py --size whole          train.py's small model, the whole text
    python experiments/table5_ptb.py --size paper --what effects   the effects at full size; a GPU
    python experiments/table5_ptb.py --size paper --test   the recipe: train, choose, test; a GPU

A run is a recipe and a seed, in a folder of its own under --out; a run that was stopped goes on (to
the bit on a CPU; on a GPU sums come in any order).  Another model, length, batch or rate needs
another --out.  Several processes may work in one --out: each takes the next run that nobody works
on, so that small runs share a GPU, or the cores (with OMP_NUM_THREADS=1, else they are slow).

The model of a run is its last weights, or the average of those of its last part, rounded to bf16.
Memory length, clamp and temperature of its evaluation are chosen on the validation split.  Only
with --test is the test split read: as one lane, every token, once for each finished model.
result.json in the run's folder has the choice and what was read.
"""
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, fields, replace

import torch
from matplotlib.figure import Figure

import common
from common import checkpoint, fast, lesson_1, lesson_5, presets, train
from regularisers import Recipe, Regularised, changed, ppl

NAME = "table5_ptb"
TEMPERATURES = (0.9, 0.95, 1.0, 1.05, 1.1, 1.15)


# ---- what is trained ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and on how much of the text."""

    config: lesson_5.Config
    run: presets.Run  # with its length in tokens, later
    epochs: int
    recipe: Recipe
    memories: tuple  # of evaluation, to choose from
    part: int = 1  # train on the first 1/part of the text


# the authors' later code has 16 layers of 380 without W_kR; 12 of 384 suit a GPU's multiples of 64
MODELS = {"16x380": replace(presets.CONFIGS["ptb"], dropout=0.0, dropout_attention=0.0),
          "12x384": replace(presets.CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                            d_inner=1152, dropout=0.0, dropout_attention=0.0)}
RECIPE = Recipe(word=0.2, input=0.6, inside=0.2, attention=0.2, output=0.5, alpha=0.2, beta=0.1,
                decay=1.2e-6, decoupled=False, average="equal", average_from=0.7, average_rate=0.5)
SMALL = Recipe(word=0.1, input=0.3, inside=0.1, attention=0.1, output=0.3, alpha=0.2, beta=0.1,
               decay=0.1, average="equal", average_from=0.7, average_rate=0.5)
MILD = Recipe(input=0.1, inside=0.1, attention=0.1, output=0.2, alpha=0.1, beta=0.05,
              average="equal", average_from=0.7, average_rate=0.5)
RUN = presets.Run("ptb", tokens=1, eval_segment=64)
SIZES = {
    "tiny": Size(lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16,
                                 mem_len=8),
                 replace(RUN, batch=4, segment=8, lr=3e-3, warmup=5, eval_mem_len=16,
                         eval_every=10, eval_tokens=200),
                 epochs=2, recipe=SMALL, part=10, memories=(8, 16)),
    "laptop": Size(lesson_5.Config(2, n_layer=4, d_model=96, n_head=3, d_head=32, d_inner=192,
                                   mem_len=32),
                   replace(RUN, batch=16, segment=32, lr=2e-3, warmup=200, eval_mem_len=64,
                           eval_every=227, eval_tokens=20_000),
                   epochs=18, recipe=SMALL, part=12, memories=(32, 64, 128, 256)),
    "whole": Size(replace(presets.CONFIGS["laptop-words"], dropout=0.0, cutoffs=()),
                  replace(RUN, batch=16, segment=64, lr=2e-3, warmup=400, eval_mem_len=128,
                          eval_every=907, eval_tokens=20_000),
                  epochs=6, recipe=MILD, memories=(64, 128, 256, 512)),
    "paper": Size(MODELS["12x384"],
                  replace(RUN, batch=20, segment=70, lr=3e-4, warmup=3000, eval_segment=512,
                          eval_mem_len=140, eval_every=1992, eval_tokens=0),
                  epochs=150, recipe=RECIPE, memories=(70, 140, 280, 560, 1120))}
BASELINES = {"nothing": Recipe(), "only independent dropout": Recipe(
    input=0.2, inside=0.2, attention=0.2, output=0.2, locked=False)}
EFFECTS = {  # what each changes in the recipe
    "no word dropout": {"word": 0.0}, "no input dropout": {"input": 0.0},
    "no inside dropout": {"inside": 0.0}, "no attention dropout": {"attention": 0.0},
    "no output dropout": {"output": 0.0}, "not locked": {"locked": False},
    "locked inside": {"locked_inside": True}, "DropConnect 0.1": {"connect": 0.1},
    "no AR, no TAR": {"alpha": 0.0, "beta": 0.0}, "no decay": {"decay": 0.0},
    "decay 0.1 beside": {"decay": 0.1, "decoupled": True},
    "decay 1.2e-6 inside": {"decay": 1.2e-6, "decoupled": False}, "random lengths": {"vary": True},
    "no average": {"average": "", "average_from": 1.0, "average_rate": 1.0},
    "exponential average": {"average": "ema"}, "embedding rate x 2": {"embedding_rate": 2.0},
    "embedding rate x 1": {"embedding_rate": 1.0}}


def effects(recipe):
    """{name: recipe}: itself, the baselines, each of EFFECTS; without those that change nothing."""
    others = {name: replace(recipe, **changes) for name, changes in EFFECTS.items()}
    return {"recipe": recipe} | {
        name: other for name, other in (BASELINES | others).items() if other != recipe}


# ---- one run: training, evaluation --------------------------------------------------------------

def fit(config, run, recipe, corpus, folder, device, mode=None):
    """Train in a folder, or go on there -> the model with the weights that are kept, its curve.

    mode is torch.compile's; None: not compiled.
    """
    torch.manual_seed(run.seed)
    model = lesson_5.TransformerXL(config).to(device)
    training = Regularised(model, run, recipe, corpus, folder, mode)
    common.fit(model, corpus, run, folder / "model.pt", training)
    return model, training.curve


@torch.no_grad()
def losses_by_temperature(model, tokens, run, temperatures=TEMPERATURES, known=None):
    """Mean losses in nats, [one for each temperature], over all n - 1 predictions of n tokens.

    One lane, each token once, memory and clamp of the run.  The logits are divided by the
    temperature: above 1 the model is less sure.  With known (V,) bool only these words count.
    """
    reader, memory, table = fast.Reader(model), None, []
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
        found = losses_by_temperature(model, corpus.test, at, (result["temperature"], 1.0))
        result["test"], result["test at temperature 1"] = map(ppl, found)
        note(result)
    return result


def describe(result, corpus):
    """A result in one line."""
    line = (f"valid {result['valid']:.2f} ppl (M {result['M']}, clamp {result['clamp'] or 'none'}, "
            f"temperature {result['temperature']})")
    if "test" in result:
        line += (f" | test {result['test']:.2f} ppl, {result['test at temperature 1']:.2f} at "
                 f"temperature 1, {len(corpus.test) - 1:,} predictions, read "
                 + ", after an interruption ".join(result["readings"]))
    return line


# ---- many runs, and what came out ---------------------------------------------------------------

def each_run(jobs, out, work):
    """work(job, folder) for every job, (name, seed), that no other process works on.

    Returns {job: what it returned}, and the jobs that failed: why is printed at once.
    """
    results, failed = {}, []
    for name, seed in jobs:
        folder = out / f"{'-'.join(name.replace(',', '').split())}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with checkpoint.Lock(folder) as lock:
            try:
                lock.take()
            except ValueError:  # another process is at it
                continue
            try:
                results[name, seed] = work((name, seed), folder)
            except ValueError as error:
                print(f"{folder.name} failed: {error}", flush=True)
                failed.append((name, seed))
    return results, failed


def points(curve, epochs):
    """[(epochs, validation perplexity)], of the weights or, where it is lower, their average."""
    return [(epochs * row["tokens"] / curve[-1]["tokens"],
             ppl(min(row["valid"], row["averaged"] or math.inf))) for row in curve]


def report(curves, kept, base, epochs):
    """A line for each recipe: its validation curve in perplexity, and the best of it; and for each
    seed the loss of the model that is kept, over known words, in nats above that of `base`.
    """
    marks = [epochs * k / 6 for k in range(1, 7)]
    print(f"{'valid ppl after epochs':26}" + "".join(f"{mark:7.3g}" for mark in marks)
          + f"{'best':>8} | kept, nats above {base!r}, known words")
    for name in dict.fromkeys(name for name, _ in curves):
        seeds = [seed for other, seed in curves if other == name]
        drawn = [points(curves[name, seed], epochs) for seed in seeds]
        line = [statistics.mean(min(z, key=lambda one: abs(one[0] - mark))[1] for z in drawn)
                for mark in marks]
        best = statistics.mean(min(value for _, value in z) for z in drawn)
        above = [kept[name, seed] - kept[base, seed] for seed in seeds if (base, seed) in kept]
        print(f"{name:26}" + "".join(f"{z:7.0f}" for z in line) + f"{best:8.1f} | "
              + "  ".join(f"{z:+.3f}" for z in above))
    for (name, seed), curve in curves.items():
        if name == base and curve[-1]["averaged"] is not None:
            print(f"averaging, seed {seed}: {ppl(curve[-1]['valid']):.2f} ppl with the last "
                  f"weights, {ppl(curve[-1]['averaged']):.2f} with their average")


def draw(curves, path, epochs, title):
    """A panel for each recipe: validation perplexity over epochs, the first recipe in grey."""
    names = list(dict.fromkeys(name for name, _ in curves))
    low = min(value for curve in curves.values() for _, value in points(curve, epochs))
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.9 * columns + 0.4, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(panels, names):
        for (other, _), curve in curves.items():
            if other in (names[0], name):
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

def flags():
    """Those of all experiments, and our own."""
    parser = common.make_flags(NAME, __doc__, SIZES, dataset="ptb")
    add = parser.add_argument
    add("--what", choices=("recipe", "effects"), default="recipe")
    add("--test", action="store_true", help="read the test split, with --what recipe")
    add("--only", nargs="+", metavar="NAME", help="of the effects, these")
    add("--model", choices=MODELS, help="with --size paper (default: 12x384)")
    add("--set", nargs="+", default=[], metavar="PART=VALUE",
        help=f"change the recipe: {', '.join(field.name for field in fields(Recipe))}")
    add("--epochs", type=int, metavar="N")
    add("--lr", type=float, help="highest learning rate")
    add("--warmup", type=int, help="steps until it is reached")
    add("--batch", type=int, metavar="B", help="lanes")
    add("--compile", nargs="?", const="default", choices=("default", "reduce-overhead"),
        help="compile the training step, for a GPU; reduce-overhead: with CUDA graphs")
    return parser


def asked(given):
    """What the flags ask for -> Size with its run and epochs, {name: recipe}.  ValueError."""
    if given.model and given.size != "paper":
        raise ValueError("--model is for --size paper; the others have a model of their own")
    if given.epochs is not None and given.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {given.epochs}")
    if given.test and given.what == "effects":
        raise ValueError("--test is for --what recipe: nothing is to be chosen by the test split")
    if given.only and given.what == "recipe":
        raise ValueError("--only is for --what effects")
    size = SIZES[given.size]
    typed = {name: getattr(given, name) for name in ("batch", "lr", "warmup")
             if getattr(given, name) is not None}
    size = replace(size, config=MODELS.get(given.model, size.config),
                   run=replace(size.run, **typed), epochs=given.epochs or size.epochs)
    recipe = changed(size.recipe, given.set)
    recipes = effects(recipe) if given.what == "effects" else {
        " ".join(["recipe", *given.set]): recipe}
    if unknown := set(given.only or ()) - set(recipes):
        raise ValueError(f"--only {' '.join(map(repr, sorted(unknown)))}: the effects are "
                         f"{', '.join(map(repr, recipes))}")
    recipes = {name: z for name, z in recipes.items() if name in (given.only or recipes)}
    if given.compile and any(z.vary for z in recipes.values()):
        raise ValueError("--compile compiles for one length of segments: leave 'random lengths' "
                         "out (--only names what remains), or --compile")
    return size, recipes


@common.command
def main(argv):
    """Train what is missing, print, draw; for the recipe choose the evaluation and test."""
    given = flags().parse_args(argv)
    size, recipes = asked(given)
    given, corpus = common.begin(given, NAME, lock=False)  # each run has a lock of its own
    corpus = replace(corpus, train=corpus.train[: len(corpus.train) // size.part])
    config = replace(size.config, vocab_size=len(corpus.vocab))
    epoch = lesson_1.lanes(corpus.train, size.run.batch)[:, 1:].numel()  # predictions
    run = replace(size.run, tokens=size.epochs * epoch)
    run = common.choose_dtype(lesson_5.TransformerXL(config).to(given.device), run, given.out)
    print(f"{presets.count_parameters(config):,} parameters, {len(corpus.train):,} tokens of "
          f"training, {size.epochs} epochs, {run.batch} lanes of {run.segment}, {run.dtype}",
          flush=True)
    kept, valid = {}, train.validation_tokens(corpus, run)
    known = torch.bincount(corpus.train, minlength=len(corpus.vocab)) > 0  # of a part: not all

    def work(job, folder):
        name, seed = job
        model, curve = fit(config, replace(run, seed=seed), recipes[name], corpus, folder,
                           given.device, given.compile)
        if given.what == "recipe":
            result = result_of(model, corpus, run, size.memories, folder / "result.json",
                               given.test)
            print(f"{folder.name}: {describe(result, corpus)}", flush=True)
        else:
            kept[job], = losses_by_temperature(model, valid, run, (1.0,), known)
        return curve

    jobs = [(name, seed) for name in recipes for seed in given.seeds]
    curves, failed = each_run(jobs, given.out, work)
    if curves and given.what == "effects":
        report(curves, kept, jobs[0][0], size.epochs)
    if missing := len(jobs) - len(curves) - len(failed):
        print(f"{missing} of {len(jobs)} runs belong to other processes; the same command again "
              "shows all")
    elif curves:
        draw(curves, given.out / f"{given.what}.png", size.epochs,
             f"Penn Treebank, {len(corpus.train):,} tokens of training; grey: {jobs[0][0]}")
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} runs failed; why is said above")


if __name__ == "__main__":
    sys.exit(main())
