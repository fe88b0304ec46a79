"""The output of a run: log lines on the terminal, metrics.tsv, and the curve plotted from it."""
import math
import os
import platform
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from shlex import join, quote
from shutil import which

import torch
from matplotlib.figure import Figure

from support.corpora import decode
from support.files import write_atomically
from support.names import printable
from training import machine, ranks

# train, train_max: the mean and the largest loss since the last line; skipped: steps, so far
COLUMNS = ("step", "tokens", "seconds", "lr", "grad_norm", "train", "train_max", "skipped", "valid")


def in_unit(nats, unit):
    """Convert a mean loss to the corpus's unit: bits per byte, or perplexity."""
    if unit == "bpc":
        return nats / math.log(2)
    return math.exp(nats) if nats < 700 else math.inf  # exp would overflow


def score_line(nats, corpus, recipe, T):
    """Return the line with a run's result and the lengths of its evaluation."""
    return (f"test {in_unit(nats, corpus.unit):.4f} {corpus.unit} (evaluation T {T}, M "
            f"{recipe.eval_mem_len}, clamp {recipe.eval_clamp_len or 'none'}; "
            f"{len(corpus.test) - 1:,} predictions; {corpus.name})")


def open_metrics(job):
    """Print what is trained; return the open metrics.tsv, for means of losses and validations.

    It is new, or truncated to the lines from before a checkpoint; a validation at the checkpoint's
    own step stays only if it was finished before.  Lines are not buffered; rank 0 writes them.
    """
    state, path = job.state, job.path / "metrics.tsv"
    parameters = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    print(printable(f"{job.name}: {parameters:,} parameters on {job.corpus.name}"))
    if state.step:
        print(f"resuming at step {state.step:,}, {state.seconds:,.0f} seconds of training")
    if ranks.RANK:
        return open(os.devnull, "w")
    command = printable(join(["python", *sys.argv]))  # in one line
    lines = [f"# {command}\n# commit {commit()}, Python {platform.python_version()}, "
             f"torch {torch.__version__}, {machine.name(job.device.type)}\n"
             f"# {parameters:,} parameters, {job.corpus.name}\n", "\t".join(COLUMNS) + "\n"]
    if state.step and path.exists():
        lines = [line for line in path.read_text("utf-8").splitlines(keepends=True)
                 if line.endswith("\n") and is_known(line, state)]
    write_atomically(path, lambda file: file.writelines(lines), "x")
    return open(path, "a", buffering=1, encoding="utf-8")


def write_line(job, **values):
    """Write one line of metrics.tsv; columns without a value stay empty."""
    state = job.state
    values |= {"step": state.step, "tokens": state.tokens, "seconds": f"{state.seconds:.1f}"}
    print(*(values.get(name, "") for name in COLUMNS), sep="\t", file=job.metrics)


def record_validation(job, loss):
    """Write and print a validation loss, in nats."""
    value = f"{in_unit(loss, job.corpus.unit):.4f}"
    write_line(job, valid=value)
    print(f"step {job.state.step:,} | validation {value} {job.corpus.unit}", flush=True)


def record_training(job, rate, loss, norm, done):
    """Write a line of means when due; print a loss every 5 seconds, at step 10 an estimate."""
    state, unit = job.state, job.corpus.unit
    if state.step % job.recipe.log_every == 0 and state.loss_count:
        mean = in_unit(state.loss_sum / state.loss_count, unit)
        largest = in_unit(state.loss_max, unit)
        write_line(job, lr=f"{rate:.3g}", grad_norm=f"{norm:.3g}", train=f"{mean:.4f}",
                   train_max=f"{largest:.4f}", skipped=state.skipped)
        state.loss_sum, state.loss_count, state.loss_max = 0.0, 0, 0.0
    recipe, done = job.recipe, max(done, 1e-9)  # 0 while layers are compiled
    steps, seconds = state.step / done, state.seconds / done
    short, now = (min(1, recipe.short_steps / n) for n in (steps, state.step))  # shares of steps
    steps = recipe.steps or steps * (3 + 2 * short) / (3 + 2 * now)  # whole ones take 5/3 as long
    seconds *= 1 if recipe.minutes else (5 - 2 * short) / (5 - 2 * now)
    if state.step == 10 and job.reader is not None:
        every = recipe.eval_every
        read = (steps / every if every else 10) * (recipe.eval_tokens or len(job.corpus.valid))
        # evaluation reads about as many tokens per second as training
        took = seconds + (read + len(job.corpus.test)) * state.seconds / state.tokens
        print(f"about {steps:,.0f} steps; all in all, with validation and test, about "
              f"{timedelta(seconds=int(min(took, 1e13)))}")
    if time.monotonic() - job.printed_at > 5:
        job.printed_at = time.monotonic()
        took, left = (timedelta(seconds=int(min(part, 1e13)))  # more would overflow
                      for part in (state.seconds, seconds - state.seconds))
        speed = ("compiling the layers" if job.untimed else
                 f"{state.tokens / state.seconds:,.0f} tok/s | {took}, {left} left")
        print(f"step {state.step:,} | {done:.0%} | loss of this step {in_unit(loss, unit):.3f} "
              f"{unit} | {speed}"
              + (f" | {state.skipped} steps skipped" if state.skipped else ""), flush=True)


def is_known(line, state):
    """Return whether a line of metrics.tsv is from before a checkpoint with this state."""
    step, is_validation = line.partition("\t")[0], not line.endswith("\t\n")
    is_saved = not is_validation or state.validated_at == state.step  # else it will be repeated
    return not step.isdecimal() or int(step) < state.step + is_saved


def read_metrics(path):
    """Read a metrics.tsv -> [{column: text, empty if there is no value}]."""
    return [dict(zip(COLUMNS, line.rstrip("\n").split("\t")))
            for line in path.read_text("utf-8").splitlines() if line[:1].isdecimal()]


def draw(path, corpus):
    """Plot a metrics.tsv as curve.png, in the same folder."""
    rows, unit = read_metrics(path), corpus.unit
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for column, style, label in (("train", "-", "training, mean since the last point"),
                                 ("valid", "o-", "validation (evaluation memory length)")):
        points = [(int(row["tokens"]) / 1e6, float(row[column])) for row in rows if row[column]]
        axes.plot(*zip(*points) if points else ((), ()), style, markersize=4, label=label)
    axes.set(xlabel="tokens read (millions)", ylabel=f"loss ({unit})", xlim=(0, None))
    if unit == "bpc":
        axes.set(ylim=(0, None))
    else:  # perplexity begins near the size of the vocabulary
        axes.set(yscale="log", ylabel="perplexity (logarithmic)")
    axes.legend()
    figure.savefig(path.with_name("curve.png"), dpi=120)


def commit():
    """Return the commit of this code; "unknown" if it is not in a repository of its own."""
    git = ["git", "--git-dir", "../.git", "rev-parse", "--short", "HEAD"]  # of no folder above
    found = subprocess.run(git, cwd=Path(__file__).parent, text=True,
                           capture_output=True).stdout.strip() if which("git") else ""
    return found or "unknown"


def print_next_steps(job, prompt, sample):
    """Print the end of a run: how the model continues a prompt, and commands to try next."""
    out, corpus = quote(str(job.path)), job.corpus
    print("--- the start of the test split; the model continues after >>>\n"
          f"{decode(prompt, corpus.vocab)}>>>{decode(sample, corpus.vocab)}\n---\n"
          f"curve: {job.path / 'curve.png'}\n"
          f"try next: python train.py --sample TEXT --out {out}\n"
          f"          python train.py --init {out} --minutes 30 --out {quote(f'{job.path}-30')}    "
          "(train further)")
