"""What the experiments share: their flags, training that goes on, losses after so many tokens.

An experiment trains some models, each with several seeds, and compares them.  Every finished model
is kept in the folder of the experiment (--out), and an unfinished one every minute: after a stop
the same command goes on.  Training is train.py's step and learning rate.
"""
import argparse
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
import checkpoint
import copies
import corpora
from sizes import Config

lesson_1, train = import_module("01_vanilla_segments"), import_module("train")
lanes, segments, RUNS = lesson_1.lanes, lesson_1.segments, lesson_1.RUNS
EVERY = 60  # seconds between two savings of an unfinished model


# ---- the command line ---------------------------------------------------------------------------

@dataclass(frozen=True)
class Setting:
    """A size of an experiment: what is trained, and on how much it is evaluated."""

    config: Config  # the vocabulary size is the corpus's, later
    run: train.Run
    lengths: tuple  # attention lengths, contexts or memories that are tried, ascending
    count: int  # pieces that are read side by side in evaluation ...
    n: int  # ... and predictions of each


def flags_of(name, about, sizes):
    """The flags that all experiments have, as a parser that can take more."""
    flags = train.Parser(prog=f"experiments/{name}.py", description=about, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--size", choices=sizes, default="laptop")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--dataset", help="stdlib (default; with --size paper wt103), copies (a "
                       f"synthetic text), {', '.join(corpora.SOURCES)}")
    flags.add_argument("--text", metavar="FILE", help="this file instead, as bytes")
    flags.add_argument("--data-dir", default=RUNS.parent / "data", metavar="FOLDER")
    flags.add_argument("--out", metavar="FOLDER", help="where the trained models are kept "
                       f"(default: runs/{name}-SIZE-DATASET)")
    flags.add_argument("--device", choices=("cpu", "cuda"),
                       default="cuda" if torch.cuda.is_available() else "cpu")
    return flags


def checked(given, name):
    """Complete the flags: dataset and folder; the corpus comes with them.  ValueError."""
    if given.text and given.dataset:
        raise ValueError("--text and --dataset name two corpora; give one of them")
    if len(set(given.seeds)) < len(given.seeds) or min(given.seeds) < 0:
        raise ValueError(f"--seeds must be different and at least 0, got {given.seeds}")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave the flag out")
    usual = "wt103" if given.size == "paper" else "stdlib"
    given.dataset = Path(given.text).stem if given.text else given.dataset or usual
    corpus = copies.corpus() if given.dataset == "copies" and not given.text else corpora.load(
        given.text or given.dataset, root=given.data_dir)
    given.out = Path(given.out or RUNS / f"{name}-{given.size}-{given.dataset}")
    given.out.mkdir(parents=True, exist_ok=True)
    return given, corpus


def ended(name, experiment, argv):
    """Run experiment(argv) -> exit status; whatever was wrong is said in one line."""
    try:
        experiment(argv)
        return 0
    except (ValueError, OSError) as error:
        Bar.clear()
        print(f"{name}.py: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{name}.py: stopped; the same command goes on", file=sys.stderr)
        return 130


class Bar:
    """One line on stderr: what runs, how much is done, and how long the rest will take."""

    there = False  # whether such a line stands on the screen

    def __init__(self, total):
        self.total, self.done, self.begun, self.shown = total, 0, time.monotonic(), 0.0

    def skip(self, n):
        """So many units of the total need not be done."""
        self.total -= n

    def advance(self, text, n=1):
        """So many more are done."""
        self.done += n
        now = time.monotonic()
        if now - self.shown > 0.5:
            self.shown, gone, Bar.there = now, now - self.begun, True
            left = gone * (self.total - self.done) / self.done
            print(f"\r{text} | {self.done / self.total:.0%} | {train.clock(gone)}, "
                  f"{train.clock(left)} left    ", end="", file=sys.stderr, flush=True)

    @classmethod
    def clear(cls):
        """The line makes room."""
        if cls.there:
            print("\r" + " " * 78, end="\r", file=sys.stderr, flush=True)
        cls.there = False


# ---- training -----------------------------------------------------------------------------------

def kept(path, settings, device):
    """What is left of an earlier run at path, None if nothing.  ValueError if it was another."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        same = content["settings"] == settings
    except Exception as error:  # cut off, flipped, or something else: many types
        raise ValueError(f"{path} is damaged ({str(error).splitlines()[0][:80]}); delete it, and "
                         "this model is trained anew") from None
    if not same:
        raise ValueError(f"{path} was trained with other settings ({content['settings']}, now "
                         f"{settings}); name another folder with --out")
    return content


def number_type(model, run):
    """The run with the number type that is faster here, measured, where it says auto."""
    x = torch.zeros(run.batch, run.segment, dtype=torch.int64, device=next(
        model.parameters()).device)
    return replace(run, dtype=train.choose_dtype(model, run, x, x)) if run.dtype == "auto" else run


def fit(model, corpus, run, path, bar, weight=1):
    """Train for run.steps, or take what is kept at path -> the model, evaluating.

    A step counts as `weight` units of the bar.
    ValueError if something else is kept there; OSError if nothing can be written.
    """
    device = next(model.parameters()).device
    step, epoch, column, memory = 0, 0, 0, None
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    settings = f"{type(model).__name__} {model.config} {replace(run, dtype='')} {corpus.name}"
    content = kept(path, settings, device)
    if content:
        step, epoch, column, memory = content["place"]
        model.load_state_dict(content["model"])
        bar.skip(weight * step)
    if step < run.steps:
        stream, saved = train.training_lanes(corpus, run, epoch, device), time.monotonic()
        if content:
            optimizer.load_state_dict(content["optimizer"])
            torch.set_rng_state(content["random"].cpu())
    model.train()
    while step < run.steps:
        if column >= stream.shape[1] - 1:  # the text begins again, without a past
            epoch, column, memory = epoch + 1, 0, None
            if corpus.separator is not None:  # with its sentences in another order
                stream = train.training_lanes(corpus, run, epoch, device)
        x, y = (z.to(device) for z in next(segments(stream, run.segment, column)))
        optimizer.param_groups[0]["lr"] = train.learning_rate(run, step, step / run.steps)
        loss, _, memory = train.train_step(model, optimizer, x, y, memory, run)
        step, column = step + 1, column + x.shape[1]
        bar.advance(f"{path.stem}: loss {loss:.3f}", weight)
        if (done := step == run.steps) or time.monotonic() - saved > EVERY:
            content = {"settings": settings, "model": model.state_dict(),
                       "place": (step, epoch, column, None if done else memory)}
            if not done:
                content |= {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            checkpoint.write(path, lambda file: torch.save(content, file), "wb")
            saved = time.monotonic()
    return model.eval()


# ---- losses after so many tokens ----------------------------------------------------------------

@contextmanager
def lengths(model, run, **changes):
    """Inside the block the model's config has these lengths, the run's number type, no gradient."""
    config = model.config
    try:
        model.config = replace(config, **changes)
        with torch.no_grad(), train.autocast(run, next(model.parameters()).device.type):
            yield
    finally:
        model.config = config


def pieces(tokens, before, count, n):
    """Cut tokens (N,) into count pieces (count, before + n + 1): context, then n inputs to count.

    The context of a piece is what stands before it in the text.  ValueError if that is too short.
    """
    need = before + count * n + 1
    if len(tokens) < need:
        raise ValueError(f"the split to evaluate has {len(tokens):,} tokens, {need:,} are needed")
    return tokens[:need].unfold(0, before + n + 1, n).long()


def memory_losses(model, tokens, before, run, segment=0, **changes):
    """Read pieces (B, before + n + 1) with a memory -> losses (B, n), the context not counted.

    In segments of T = run.segment, or as given; changes are those of the model's config, such as
    mem_len=512, same_length=True.
    """
    memory, losses, device = None, [], next(model.parameters()).device
    with lengths(model, run, **changes):
        for x, y in segments(tokens.to(device), segment or run.segment):
            loss, memory = model(x, memory, y)
            losses.append(loss.float())
    return torch.cat(losses, dim=1)[:, before:]


def window_losses(model, tokens, before, L, run):
    """The same without a memory: from windows of L tokens, the last quarter of each counted.

    So a prediction is made from L - L // 4 + 1 to L tokens.
    """
    stride, device = max(1, L // 4), next(model.parameters()).device
    n = tokens.shape[1] - 1 - before
    ends = [*range(before + stride, before + n, stride), before + n]
    windows = torch.stack([tokens[:, end - L : end + 1] for end in ends], 1)  # (B, W, L + 1)
    losses = []
    with lengths(model, run, mem_len=0):
        for z in windows.flatten(0, 1).to(device).split(max(1, 8192 // L)):
            losses.append(model(z[:, :-1], None, z[:, 1:])[0].float()[:, L - stride :])
    losses = torch.cat(losses).view(len(tokens), len(ends), stride)
    last = n - (len(ends) - 1) * stride  # the last window shares tokens with the one before
    return torch.cat([losses[:, :-1].flatten(1), losses[:, -1, stride - last :]], dim=1)


def counted(corpus, tokens, before):
    """Which losses (B, n) of pieces count: all, but of the text with known lengths the copies."""
    targets = tokens[:, before + 1 :]
    return copies.is_copy(targets) if corpus.name.startswith("copies") else targets >= 0


def spread(values, digits=3):
    """Mean and half the range over the seeds, as text."""
    half = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}"
