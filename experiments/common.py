"""What the experiments share: flags, training that resumes, losses at a context length.

An experiment trains some models with several seeds each and compares them.  Each model is a run
like train.py's, in its own folder within the experiment's (--out), saved every minute: the same
command resumes it.  Evaluation is in float32: the thresholds of the measures are finer than bf16.
"""
import math
import statistics
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
import train  # before torch, for which it sets GOMP_SPINCOUNT

import torch

from support import corpora, validate
from training import checkpoint, fast, log, machine, presets
from training.command import Parser
from training.flags import PRETRAINED, exit_status
from training.job import Job, open_job, read_corpus, load_model

lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")


# ---- the command line ---------------------------------------------------------------------------

@dataclass(frozen=True)
class Study:
    """A scale of an experiment: what is trained, and on how much text it is evaluated."""

    config: lesson_5.Config  # the corpus decides vocab_size
    recipe: presets.Recipe
    lengths: tuple  # attention or memory lengths to try, in tokens, ascending
    count: int  # excerpts that are read side by side in evaluation ...
    n: int  # ... and predictions in each


DATASETS = {"tiny": "stdlib", "small": "stdlib", "copies": "copies", "paper": "wt103",
            "lm1b": "lm1b"}  # what a scale is for
SHARED = {  # flags that several experiments take
    "--seeds": {"type": int, "nargs": "+", "default": [0, 1, 2]},
    "--data-dir": {"default": lesson_1.RUNS.parent / "data", "metavar": "FOLDER"},
    "--device": {"choices": ("cpu", "cuda"), "default": "", "help": "default: the best present"},
    "--dtype": {"choices": ("float32", "bf16"), "default": "float32",
                "help": "of matrix products; bf16 is faster on a GPU, and on a CPU that has it"},
    "--checkpoint": {"type": Path, "metavar": "RUN", "help": "a run of train.py, or a file in it"}}


def new_parser(name, about, *shared):
    """Return a parser with these of the SHARED flags, whose --help begins with `about`."""
    parser = Parser(prog=f"experiments/{name}.py", description=about)
    for flag in shared:
        parser.add_argument(flag, **SHARED[flag])
    return parser


def make_flags(name, about, scales):
    """Return the parser of an experiment that trains models."""
    flags = new_parser(name, about, "--seeds", "--data-dir", "--device", "--dtype")
    flags.add_argument("--scale", choices=scales, default="small")
    flags.add_argument("--dataset", help=f"stdlib, copies (a synthetic text), "
                       f"{', '.join(corpora.SOURCES)}, or a file, as bytes (default: the scale's)")
    flags.add_argument("--out", metavar="FOLDER", help="where the trained models are kept "
                       f"(default: runs/{name}-SCALE-DATASET)")
    return flags


def begin(given, name):
    """Complete the flags: dataset and folder.  Return them and the corpus.  ValueError."""
    if len(set(given.seeds)) < len(given.seeds) or not all(
            0 <= seed <= validate.MOST for seed in given.seeds):
        raise ValueError(f"--seeds must be different, from 0 to {validate.MOST}, got {given.seeds}")
    given.device = machine.choose(given.device)
    given.dataset = given.dataset or DATASETS[given.scale]
    corpus = corpora.load(given.dataset, root=given.data_dir)
    folder = f"{name}-{given.scale}-{Path(given.dataset).stem}"
    given.out = Path(given.out or lesson_1.RUNS / folder)
    given.out.mkdir(parents=True, exist_ok=True)
    return given, corpus


def make_main(experiment):
    """Turn experiment(argv) into main(argv=None), which returns the exit status, as train.py's."""
    name = Path(experiment.__code__.co_filename).name
    return lambda argv=None: exit_status(name, experiment, argv)


# ---- training -----------------------------------------------------------------------------------

def fit(path, make, corpus, recipe, optimizer=None, reader=None):
    """Train the model that make() returns, or resume it, in the folder `path` -> its Job, the model
    in eval mode.

    optimizer(model) and reader(job) are for a Job that has its own.  ValueError if another
    run is there; KeyboardInterrupt, and all is saved, after a signal.
    """
    def make_job(saved):
        torch.manual_seed(recipe.seed)
        model = make()
        # lesson 5's model trains faster from here on
        fast.prepare(model, plain=type(model) is not lesson_5.TransformerXL)
        steps = optimizer and optimizer(model)
        name = f"{path.name}: {type(model).__name__} {getattr(model, 'variant', '')}".strip()
        job = Job(path, name, model, recipe, corpus, steps)
        job.reader = reader and reader(job)
        if other := [key for key, value in job.fixed_content.items() if saved
                     and saved[key] != value]:
            raise ValueError(f"{path} was trained with other settings ({', '.join(other)}); name "
                             "another folder with --out")
        return job

    recipe = replace(recipe, save_minutes=1.0)
    with open_job(path, make_job, resume=any(path.glob("*.pt"))) as job:
        if train.fit(job):
            print(f"{path} is saved; the same command resumes it", file=sys.stderr)
            raise KeyboardInterrupt
    job.model.eval()
    return job


def fit_seeds(make, corpus, recipe, given, name, **own):
    """Yield the Job of the model that make() returns, trained, for each seed of the command line.

    own are fit's optimizer and reader.
    """
    for seed in given.seeds:
        recipe = replace(recipe, seed=seed, dtype=given.dtype)
        yield fit(given.out / f"{name}-{seed}", make, corpus, recipe, **own)


def open_run(path, data_dir, device="cpu"):
    """Open a run's folder, or a checkpoint in it -> its model, Recipe, corpus, and the content."""
    if not (path.is_file() or any(path.glob("*.pt"))):
        raise ValueError(f"no checkpoint at {path}; name the folder of a run of train.py")
    content = checkpoint.load(path) if path.is_file() else checkpoint.to_evaluate(path)
    model, recipe = load_model(content, device), presets.Recipe(**content["recipe"])
    corpus = read_corpus(recipe, data_dir, content, similar=True)
    return model, recipe, corpus, content


# ---- losses at a context length -----------------------------------------------------------------

def excerpts(tokens, before, count, n, device):
    """Take count excerpts (count, before + n + 1) of the tokens (N,), evenly spread.

    The first `before` tokens are context, the next n are inputs whose predictions count.
    ValueError if the text is too short for excerpts whose counted parts do not overlap.
    """
    need = before + count * n + 1
    if len(tokens) < need:
        raise ValueError(f"the split to evaluate has {len(tokens):,} tokens, {need:,} are needed")
    last = len(tokens) - (before + n + 1)  # start of the last excerpt
    starts = (last * i // max(1, count - 1) for i in range(count))
    parts = [tokens[start : start + before + n + 1] for start in starts]
    return torch.stack(parts).long().to(device)


@torch.no_grad()
def memory_losses(model, tokens, before, segment, **changes):
    """Read excerpts (B, before + n + 1) with a memory -> losses (B, n), without the context's.

    T is segment; changes are those of the config, such as mem_len=512.  The model may be a Reader.
    """
    memory, losses = None, []
    parts = math.ceil((tokens.shape[1] - 1) / segment)
    with train.evaluating(model, **changes):
        for x, y in train.progress(lesson_1.segments(tokens, segment), "evaluating", parts):
            loss, memory = model(x, memory, y)
            losses.append(loss)
    return torch.cat(losses, dim=1)[:, before:].cpu()


@torch.no_grad()
def window_losses(model, tokens, before, L):
    """Read excerpts without a memory, in windows of L tokens; the last quarter of each is counted.

    So each prediction has a context of L - L // 4 + 1 to L tokens.
    """
    stride, n = max(1, L // 4), tokens.shape[1] - 1 - before
    ends = [*range(before + stride, before + n, stride), before + n]
    windows = torch.stack([tokens[:, end - L : end + 1] for end in ends], 1)  # (B, W, L + 1)
    at_once = max(1, min(8192, 2**27 // model.config.vocab_size) // L)  # their logits fit
    losses, parts = [], windows.flatten(0, 1).split(at_once)
    with train.evaluating(model, mem_len=0):
        for z in train.progress(parts, "evaluating windows", len(parts)):
            losses.append(model(z[:, :-1], None, z[:, 1:])[0][:, L - stride :].cpu())
    losses = torch.cat(losses).view(len(tokens), len(ends), stride)
    last = n - (len(ends) - 1) * stride  # the last window shares tokens with the one before
    return torch.cat([losses[:, :-1].flatten(1), losses[:, -1, stride - last :]], dim=1)


def nats_per_token(corpus):
    """Return the unit of the losses, as a figure names it."""
    return f"nats per {'byte' if corpus.unit == 'bpc' else 'word'}"


def save_figure(figure, path):
    """Save a figure of matplotlib, and say where."""
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def spread(values, digits=3):
    """Return the mean and half the range over the seeds, as text."""
    half = (max(values) - min(values)) / 2
    middle = round(statistics.mean(values), digits) + 0.0  # + 0.0: no minus before a zero
    return f"{middle:.{digits}f} ± {half:.{digits}f}"


def with_interval(value, drawn, digits=0):
    """Return a value and the ends of its 95 percent interval, from draws (n,), as text."""
    low, high = drawn.double().quantile(torch.tensor([0.025, 0.975]).double())
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def mean_table(tables):
    """Return the mean of tables {length: loss}, one for each seed."""
    return {length: statistics.mean(z[length] for z in tables) for length in tables[0]}
