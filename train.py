"""Train, evaluate, resume and sample a Transformer-XL: the model of lesson 5 on real text.

    python train.py                        the built-in corpus, a small model, about five minutes
    python train.py --text notes.txt       the same on any file
    python train.py --dataset enwik8       the paper's 12 layers on a GPU; small on a CPU
    python train.py --model wt103-large --dry-run    what a run will take, before it is started
    python train.py --resume               go on after Ctrl-C, exactly where the run stopped
    python train.py --sample "def main("   let the trained model continue a text
    python train.py --help                 everything else, with its defaults
    torchrun --nproc-per-node=2 train.py --dataset enwik8   on two GPUs (support/distributed.py)

A run lives in one folder (--out): checkpoint.pt and the one before it, previous.pt, best.pt (best
validation loss), metrics.tsv and curve.png; how they survive a crash stands in checkpoint.py.  The
file reads in the order of a run: settings, what it will take, learning rate, step, evaluation, what
a checkpoint holds, metrics, using a checkpoint, and the training loop (train_in).  Losses are in
nats inside, and shown as bits per character (bpc) where tokens are bytes, or as perplexity (ppl)
where they are words.
"""
import argparse
import copy
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from shutil import which

# Threads that wait for each other should not spin for long while another program wants the core:
# beside one busy process 8 seconds gave 6 steps with the default and 44 with this (alone 153 and
# 146; two cores of an Intel Xeon).  Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from support import corpora, distributed
from support.checkpoint import (
    FORMAT, Lock, Stop, load, newest, random_state, save, take_up, write)
from support.progress import progress
from support.validate import MOST, types as check_types

lesson_1, lesson_5 = import_module("01_vanilla_segments"), import_module("05_full_model")
RUNS, lanes, segments = lesson_1.RUNS, lesson_1.lanes, lesson_1.segments
CONFIGS, Config, TransformerXL = lesson_5.CONFIGS, lesson_5.Config, lesson_5.TransformerXL


# ---- settings -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    """How a model is trained and evaluated.  Every field is a flag; lengths are in tokens."""

    dataset: str = "stdlib"
    text: str = ""  # a file, instead of a dataset
    drop_newlines: bool = False
    batch: int = 16  # B lanes
    micro_batch: int = 0  # lanes at a time; 0: all
    segment: int = 128  # T
    steps: int = 0  # the length of the run: one of these three is not 0
    tokens: int = 0
    minutes: float = 0.0
    lr: float = 3e-3
    warmup: int = 100  # steps
    clip: float = 0.25
    eval_segment: int = 512  # T, M and clamp_len of evaluation, always with same_length
    eval_mem_len: int = 512
    eval_clamp_len: int = 0
    eval_every: int = 1000  # steps
    eval_tokens: int = 100_000  # validation tokens during training; 0: all
    log_every: int = 50  # steps
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self):
        check_types(self)
        for field in fields(self):
            value, least = getattr(self, field.name), 0
            if field.name in ("batch", "segment", "eval_segment", "eval_every", "log_every"):
                least = 1
            if field.type in (int, float) and not least <= value < math.inf:
                raise ValueError(f"{flag(field.name)} must be at least {least}, got {value}")
            if field.type is int and value > MOST:
                raise ValueError(f"{flag(field.name)} must be at most {MOST}, got {value}")
        if not self.lr > 0 or not self.clip > 0:
            raise ValueError(f"--lr and --clip must be above 0, got {self.lr} and {self.clip}")
        if sum(length > 0 for length in (self.steps, self.tokens, self.minutes)) != 1:
            raise ValueError("a run needs one length above 0: --steps, --tokens or --minutes")


# The official schedules: Adam, cosine to 0, clip 0.25.  None is published for 18 layers, for
# lm1b-medium and for ptb, whose regularisers are in experiments/ptb.py.
ENWIK8_12L = Run("enwik8", batch=22, segment=512, steps=400_000, lr=2.5e-4, warmup=0,
                 eval_segment=80, eval_mem_len=2100, eval_clamp_len=820, eval_every=4000,
                 eval_tokens=500_000, log_every=200)
ENWIK8_24L = replace(ENWIK8_12L, batch=64, segment=768, warmup=4000, eval_segment=128,
                     eval_mem_len=3800, eval_clamp_len=1000)
WT103 = Run("wt103", batch=60, segment=150, steps=200_000, lr=2.5e-4, warmup=0, eval_segment=64,
            eval_mem_len=640, eval_clamp_len=400, eval_every=4000, eval_tokens=0, log_every=200)
LM1B = Run("lm1b", batch=224, segment=32, steps=500_000, lr=2.5e-4, warmup=20_000, eval_segment=32,
           eval_mem_len=128, eval_every=4000, eval_tokens=0, log_every=200)
RUNS_OF = {
    "tiny": Run(segment=16, batch=4, steps=200, eval_segment=16, eval_mem_len=32, eval_every=100),
    "laptop": Run(minutes=4.2),
    "laptop-words": Run("ptb", segment=64, minutes=10, lr=2e-3, warmup=400, eval_segment=64,
                        eval_mem_len=128, eval_every=500, eval_tokens=20_000),
    "enwik8-12L": ENWIK8_12L,
    "enwik8-18L": replace(ENWIK8_12L, warmup=4000),
    "enwik8-24L": ENWIK8_24L,
    "text8-12L": replace(ENWIK8_12L, dataset="text8"),
    "text8-24L": replace(ENWIK8_24L, dataset="text8"),
    "wt103-standard": WT103,
    "wt103-large": replace(WT103, batch=128, segment=384, steps=4_000_000, warmup=16_000,
                           eval_segment=128, eval_mem_len=1600, eval_clamp_len=1000),
    "lm1b-base": LM1B,
    "lm1b-medium": LM1B,
    "lm1b-large": replace(LM1B, batch=512, steps=1_200_000, warmup=30_000, lr=1e-4),
    "ptb": Run("ptb", batch=10, segment=70, steps=166_000, lr=3e-4, warmup=3000, eval_segment=70,
               eval_mem_len=280, eval_every=1328, eval_tokens=0, log_every=100),
}
# what --dataset trains on a GPU, and without one
MODELS_OF = {"enwik8": ("enwik8-12L", "laptop"), "text8": ("text8-12L", "laptop"),
             "wt103": ("wt103-standard", "laptop-words"), "lm1b": ("lm1b-base", "laptop-words"),
             "ptb": ("ptb", "laptop-words"), "wikitext-2": ("ptb", "laptop-words")}
VOCABULARY = {"enwik8": 205, "text8": 27, "wt103": 267_735, "lm1b": 793_471, "ptb": 10_000,
              "wikitext-2": 33_278}


def flag(name):
    """The flag of a field: eval_mem_len -> --eval-mem-len."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of the usage page."""

    def error(self, message):
        """Raise what main prints."""
        raise ValueError(f"{message} (python {self.prog} --help lists all flags)")


def parse(argv):
    """The command line -> the flags that were given, as a dict; nothing else is in it.

    So `"resume" in given` asks whether somebody typed --resume.
    """
    parser = Parser(prog="train.py", argument_default=argparse.SUPPRESS, allow_abbrev=False,
                    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(group, name, kind, text, **options):
        values = []
        for model in ("laptop", "enwik8-12L"):
            for table in (RUNS_OF, CONFIGS):
                value = getattr(table[model], name, None)
                values += [f"{model}: {value}"] if value not in (None, "") else []
        text += f" ({', '.join(values)})" if values and kind else ""
        options |= {"type": kind} if kind else {"action": "store_true"}
        group.add_argument(flag(name), help=text.replace("%", "%%"), **options)

    data = parser.add_argument_group("data")
    add(data, "dataset", str, "stdlib, " + ", ".join(corpora.SOURCES))
    add(data, "text", str, "train on this file instead, as bytes, cut 90/5/5", metavar="FILE")
    add(data, "data_dir", str, "where corpora are kept (default: data)", metavar="FOLDER")
    add(data, "drop_newlines", None, "enwik8 as the authors count it: newlines dropped, V = 204")
    model = parser.add_argument_group("model")
    add(model, "model", str, "one of " + ", ".join(CONFIGS), metavar="NAME")
    for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len"):
        add(model, name, int, "")
    add(model, "dropout", float, "")
    add(model, "dropout_attention", float, "")
    add(model, "cutoffs", int, "where the adaptive softmax cuts the vocabulary into bands",
        nargs="*", metavar="WORD")
    add(model, "div_val", int, "the rows of each further band are so many times narrower")
    training = parser.add_argument_group("training")
    add(training, "batch", int, "lanes B")
    add(training, "micro_batch", int, "lanes at a time, gradients accumulated; 0: all")
    add(training, "segment", int, "segment length T")
    add(training, "steps", int, "length of the run in steps,")
    add(training, "tokens", int, "... or in tokens,")
    add(training, "minutes", float, "... or in minutes of training")
    add(training, "lr", float, "highest learning rate")
    add(training, "warmup", int, "steps until it is reached")
    add(training, "clip", float, "largest norm of the gradient")
    add(training, "seed", int, "")
    add(training, "dtype", str, "number type of the matrix products",
        choices=("auto", "float32", "bf16"))
    add(training, "device", str, "default: the best present", choices=("cpu", "cuda"))
    add(training, "compile", None, "compile the training step (torch.compile): for a GPU")
    evaluation = parser.add_argument_group("evaluation")
    add(evaluation, "eval_segment", int, "segment length T")
    add(evaluation, "eval_mem_len", int, "memory length M")
    add(evaluation, "eval_clamp_len", int, "longest distance told apart; 0: no clamp")
    add(evaluation, "eval_every", int, "steps between validations, each with a checkpoint")
    add(evaluation, "eval_tokens", int, "validation tokens used; 0: all")
    add(evaluation, "log_every", int, "steps between lines of metrics.tsv")
    run = parser.add_argument_group("run")
    add(run, "out", str, "folder of the run (default: runs/DATASET-MODEL)", metavar="FOLDER")
    add(run, "resume", None, "go on with the run in --out, with the settings it was started with")
    add(run, "eval_only", None, "evaluate the run in --out on its test split")
    add(run, "dry_run", None, "print what the run will take, and stop")
    add(run, "tokens_per_second", float, "the speed that --dry-run reckons with")
    add(run, "sample", str, "let the run in --out continue TEXT", metavar="TEXT")
    add(run, "n_tokens", int, "sample this many tokens (default: 500)")
    add(run, "top_k", int, "from this many candidates (default: 40)")
    add(run, "temperature", float, "below 1 sharper, above 1 wilder (default: 1.0)")
    given = vars(parser.parse_args(argv))
    if "cutoffs" in given:
        given["cutoffs"] = tuple(given["cutoffs"])
    for name, value in given.items():
        if isinstance(value, str) and value != value.encode(errors="ignore").decode():
            parser.error(f"{flag(name)} {value!r} is not UTF-8")
        if isinstance(value, list):  # argparse makes [] of --text=--
            parser.error(f"{flag(name)} needs a value")
    return given


def check_device(device):
    """ValueError if a GPU is asked for where torch finds none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave the flag out")


def settings(given, device):
    """Given flags -> (model name, Config, Run); the vocabulary size is the corpus's, later."""
    if "text" in given and "dataset" in given:
        raise ValueError("--text and --dataset name two corpora; give one of them")
    paper, small = MODELS_OF.get(given.get("dataset"), ("laptop", "laptop"))
    name = given.get("model") or (paper if device == "cuda" else small)
    if name not in CONFIGS:
        raise ValueError(f"unknown model {name!r}, known are {', '.join(CONFIGS)}")
    lengths = {"steps": 0, "tokens": 0, "minutes": 0.0}
    base = asdict(RUNS_OF[name]) | (lengths if lengths.keys() & given.keys() else {})
    run = Run(**base | {k: v for k, v in given.items() if k in base})
    shape = asdict(CONFIGS[name])
    if CONFIGS[paper].cutoffs and not shape["cutoffs"]:  # a small model, but as many words
        shape |= {"vocab_size": CONFIGS[paper].vocab_size, "cutoffs": CONFIGS[paper].cutoffs,
                  "div_val": 4}
    shape |= {k: v for k, v in given.items() if hasattr(CONFIGS[name], k)}
    if given.keys() & {"n_head", "d_model"} and "d_head" not in given:
        shape["d_head"] = lesson_1.head_width(shape["d_model"], shape["n_head"])
    return name, Config(**shape), run


# ---- what a run will take -----------------------------------------------------------------------

def flops_per_step(config, B, T):
    """Floating-point operations of one training step: three times those of its forward pass.

    Counted are the matrix products, two for each multiplication and addition, with a full memory:
    for one token and layer 2 (2 D HC + 2 D FF + (K/T) 2 D HC + 3 K HC).  Cells behind the mask are
    in it; the projection of R, one for all lanes, and the shift's column are not.  For the
    adaptive softmax the targets are taken to be as rare as 1 / rank (Zipf).
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    products = B * T * D * HC + B * K * D * 2 * HC  # q; k and v
    products += 3 * B * T * K * HC  # scores by content, by position, and the sum of the values
    products += B * T * (HC * D + 2 * D * FF)  # W_o, W_1, W_2
    edges = (0, *config.cutoffs, config.vocab_size)
    words = 0  # multiplications for one token
    for i, (first, end) in enumerate(zip(edges, edges[1:])):
        width = D // config.div_val**i
        share = math.log(end / first) / math.log(config.vocab_size) if i else 1  # of the targets
        rows = end - first if i else end + len(config.cutoffs)
        words += share * width * (rows + (2 * D if config.div_val > 1 else 0))
    return round(6 * (config.n_layer * products + B * T * words))


def bytes_of_run(config, B, T, dtype, at_a_time=0):
    """Estimate of the largest memory in training with B lanes, in bytes, by what it is for.

    Activations are what the backward pass needs of the lanes that are read at a time (0: all), and
    one layer's scores while they are made; bf16 is taken to save a third of them (the tests see 20
    to 40 percent) and copies the weights.
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    dropped = 1.25 * (config.dropout > 0)  # what dropout returns, and its mask of 1 byte
    layer = T * ((4 + 2 * dropped) * D + 3 * HC + (1 + dropped) * FF) + K * (D + 2 * HC)
    layer += config.n_head * T * K * (1 + 1.25 * (config.dropout_attention > 0))
    head = config.cutoffs[0] if config.cutoffs else config.vocab_size
    activations = config.n_layer * layer + 3 * T * head + 3 * config.n_head * T * K
    weights = lesson_5.count_parameters(config) * (18 if dtype == "bf16" else 16)
    return {"weights, gradients, two moments of Adam": weights,
            "memory of the layers, old and new": 8 * config.n_layer * B * config.mem_len * D,
            "activations": round(4 * (at_a_time or B) * activations
                                 * (2 / 3 if dtype == "bf16" else 1))}


def dry_run(given, device):
    """Print what a run will take: size, memory, steps, operations and, given a speed, hours.

    No data are read: the vocabulary is the published one, or for other texts the configuration's.
    """
    name, config, run = settings(given, device)
    B, T, speed = run.batch, run.segment, given.get("tokens_per_second")
    if speed is not None and not speed > 0:
        raise ValueError(f"--tokens-per-second must be above 0, got {speed}")
    if not run.text and run.dataset not in ("stdlib", *corpora.SOURCES):
        raise ValueError(f"unknown dataset {run.dataset!r}, known are "
                         f"{', '.join(['stdlib', *corpora.SOURCES])}")
    if run.dataset in VOCABULARY and not run.text:
        config = replace(config, vocab_size=VOCABULARY[run.dataset] - run.drop_newlines)
    dtype = run.dtype if run.dtype != "auto" else "bf16" if device == "cuda" else "float32"
    needs = bytes_of_run(config, B, T, dtype, run.micro_batch)
    steps, flops = run.steps or math.ceil(run.tokens / (B * T)), flops_per_step(config, B, T)
    if run.minutes and speed:
        steps = int(60 * run.minutes * speed / (B * T))
    print(f"{name} on {run.text or run.dataset}, vocabulary {config.vocab_size:,}\n"
          f"parameters       {lesson_5.count_parameters(config):,}\n"
          f"memory           about {sum(needs.values()) / 1e9:.1f} GB, {dtype}")
    for what, size in needs.items():
        print(f"                 {size / 1e9:6.2f} GB  {what}")
    print(f"tokens per step  {B * T:,} ({B} lanes of {T})\n"
          f"steps            {f'{steps:,}' if steps else f'as many as {run.minutes} minutes give'}"
          f"{f' ({steps * B * T:,} tokens)' if steps else ''}\n"
          f"FLOPs            {flops:.3g} a step, {flops / (B * T):.3g} a token"
          f"{f', {flops * steps:.3g} in all' if steps else ''}")
    if speed:
        hours = steps * B * T / speed / 3600
        print(f"hours            {hours:,.1f} at {speed:,.0f} tokens/s, "
              f"which are {flops / (B * T) * speed / 1e12:.3g} TFLOP/s")
    else:
        print("hours            name a speed with --tokens-per-second")
    return 0


# ---- learning rate, number type -----------------------------------------------------------------

def fraction_done(run, step, tokens, seconds):
    """How much of the run is behind us, 0 to 1, by whichever length it was given."""
    if run.minutes:
        return min(1.0, seconds / (60 * run.minutes))
    return min(1.0, tokens / run.tokens if run.tokens else step / run.steps)


def learning_rate(run, step, done):
    """Linear warm-up, then a cosine from lr to 0 over the whole run."""
    return run.lr * min((step + 1) / max(1, run.warmup), (1 + math.cos(math.pi * done)) / 2)


def autocast(run, device):
    """bf16 for matrix products, float32 for weights, norms and loss; or all float32.

    The attention's softmax is float32 on a GPU, and bf16 on a CPU, as torch's autocast has it.
    """
    return torch.autocast(device, dtype=torch.bfloat16, enabled=run.dtype == "bf16")


# ---- one step, one evaluation -------------------------------------------------------------------

def train_step(model, optimizer, x, y, memory, run):
    """One update from x, y (B, T) and the memory of the B lanes.

    The lanes go through in micro-batches, whose gradients add up to that of the whole batch.
    Returns the mean loss (nats), the gradient norm before clipping, and the new memory.  If loss or
    norm is not finite, nothing is updated and the old memory comes back: one such number would
    poison every weight.  With several ranks x, y and memory are the lanes of this one, the others
    are those of all, so all ranks decide alike.
    """
    optimizer.zero_grad()
    loss, memories, size = 0.0, [], run.micro_batch or len(x)
    for rows in (slice(first, first + size) for first in range(0, len(x), size)):
        with autocast(run, x.device.type), distributed.synchronized(model, rows.stop >= len(x)):
            losses, new_memory = model(x[rows], memory and [z[rows] for z in memory], y[rows])
        part = losses.sum() / y.numel()  # losses (rows, T), in nats
        part.backward()
        loss += part.detach()  # not item(), which would wait for the GPU: once a step, below
        memories.append(new_memory)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    loss, norm = distributed.mean(loss.item()), norm.item()
    if not math.isfinite(loss + norm):
        return loss, norm, memory
    optimizer.step()
    return loss, norm, [torch.cat(layer) for layer in zip(*memories)]


def choose_dtype(model, run, x, y):
    """bf16 or float32: on a GPU bf16 where it has it, on a CPU the faster of the two, measured."""
    if x.is_cuda:
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    times = {}
    with torch.random.fork_rng(devices=[]):  # what the trial draws, the run must not miss
        for dtype in ("float32", "bf16"):
            trial, seconds, memory = copy.deepcopy(model), [], None
            optimizer = torch.optim.Adam(trial.parameters(), lr=run.lr)
            for _ in range(5):
                start = time.perf_counter()
                memory = train_step(trial, optimizer, x, y, memory, replace(run, dtype=dtype))[2]
                seconds.append(time.perf_counter() - start)
            times[dtype] = min(seconds[2:])  # the first two fill the memory
    slower, faster = sorted(times, key=times.get, reverse=True)
    ratio = times[slower] / times[faster]
    print(f"number type: {faster}, measured {ratio:.1f} times as fast as {slower} here")
    return faster


def compiled(model, run, x, y, mode="default"):
    """The model for training, compiled by torch; as it is, and one line why, where that fails.

    The first segments have less memory than the others, so they are compiled for, too.  The mode is
    torch.compile's.
    """
    print("compiling the training step, up to two minutes", flush=True)
    start, memory, learner = time.monotonic(), None, torch.compile(model, dynamic=False, mode=mode)
    x, y = (z[: run.micro_batch or len(z)] for z in (x, y))
    try:
        with torch.random.fork_rng():  # what the trial draws, the run must not miss
            for _ in range(2):
                with autocast(run, x.device.type):
                    losses, memory = learner(x, memory, y)
                losses.mean().backward()
                model.zero_grad()  # CUDA graphs write over what they have returned before
                memory = [z.clone() for z in memory]
    except Exception as error:  # no compiler, or one that fails: many types, the reason first
        print(f"not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        learner = model
    if any(distributed.largest(learner is model)):  # one rank's failure is that of all
        learner = model
    else:
        print(f"compiled in {time.monotonic() - start:.0f} s")
    return learner


@contextmanager
def evaluating(model, run):
    """Inside the block: eval mode, the run's evaluation lengths, same_length; then as before."""
    training, config = model.training, model.config
    try:
        model.eval()
        model.config = replace(config, mem_len=run.eval_mem_len, same_length=True,
                               clamp_len=run.eval_clamp_len)
        yield
    finally:  # whatever happens, Ctrl-C included, the model trains on as it did
        model.config = config
        model.train(training)


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    """Mean loss in nats over n - 1 predictions of n tokens: exact, each token counted once.

    One lane, read in order with run.eval_mem_len tokens of memory and same_length: the first token
    is context only, and the last, shorter segment counts by its tokens.  The first `skip`
    predictions are made for the memory of the others and not counted.
    """
    device = model.u.device
    stream, memory = lanes(tokens.to(device), 1), None
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = math.ceil((len(tokens) - 1) / run.eval_segment)
    with evaluating(model, run), autocast(run, device.type):  # copies the weights to bf16 once
        for i, (x, y) in enumerate(progress(segments(stream, run.eval_segment), label, parts)):
            loss, memory = model(x, memory, y)
            total += loss[:, max(0, skip - i * run.eval_segment) :].double().sum()
    return total.item() / (len(tokens) - 1 - skip)


def evaluate_on_ranks(model, tokens, run, label):
    """`evaluate`, each rank a part of the predictions; to rounding the same.

    A layer sees M tokens back, so N layers N * M: these are read before the part, without counting.
    """
    if distributed.COUNT == 1:
        return evaluate(model, tokens, run, label)
    n = len(tokens) - 1
    start, end = (n * (distributed.RANK + i) // distributed.COUNT for i in (0, 1))
    skip, total = min(start, model.config.n_layer * run.eval_mem_len), 0.0
    if start < end:
        part = tokens[start - skip : end + 1]
        total = (end - start) * evaluate(model, part, run, label, skip)
    return distributed.mean(total) * distributed.COUNT / n


def shown(nats, unit):
    """A mean loss in the corpus's unit: bits per character, or perplexity."""
    if unit == "bpc":
        return nats / math.log(2)
    return math.exp(nats) if nats < 700 else math.inf  # beyond, exp overflows


# ---- checkpoint ---------------------------------------------------------------------------------

@dataclass
class State:
    """Where the loop stands; all of it goes into the checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluations not counted
    column: int = 0  # of the lanes: where the next segment begins
    epoch: int = 0  # how often the text has been read
    memory: list = None  # N tensors (B, m, D), of this rank's lanes
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # since the last line of metrics.tsv, in nats
    loss_count: int = 0
    loss_max: float = 0.0
    lines: int = 0  # of metrics.tsv
    best: float = math.inf  # lowest validation loss so far, in nats
    evaluated: int = 0  # the step of the last validation

    def __post_init__(self):
        check_types(self)
        for name, value in vars(self).items():
            if name not in ("memory", "best") and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, got {value}")

    def spike(self, loss):
        """Whether a loss is more than twice the mean since the last line, of ten steps or more."""
        return self.loss_count >= 10 and loss > 2 * self.loss_sum / self.loss_count

    def count(self, x, loss, norm):
        """One more step, on x (B, T), with this loss (nats) and gradient norm."""
        self.step += 1
        self.tokens += x.numel() * distributed.COUNT
        self.column += x.shape[1]
        if math.isfinite(loss + norm):
            self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1
            self.loss_max = max(self.loss_max, loss)
            self.skipped_in_a_row = 0
        else:
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1


def unpack(content, path):
    """A checkpoint's content -> Config, Run, State.  ValueError if something else is in it."""
    try:
        config, run, state = (
            kind(**content[name]) for kind, name in
            ((Config, "config"), (Run, "run"), (State, "state")))
        vocab, kinds = content["vocab"], {type(symbol) for symbol in content["vocab"]}
        if not (isinstance(content["name"], str) and isinstance(vocab, list)
                and len(vocab) == len(set(vocab)) == config.vocab_size
                and (kinds == {int} and 0 <= min(vocab) <= max(vocab) < 256
                     or kinds == {str} and {"<eos>", "<S>"} & set(vocab))):
            raise ValueError(f"no vocabulary of {config.vocab_size} bytes or words")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} does not hold what a checkpoint of train.py holds: "
                         f"{type(error).__name__} {error}") from None
    return config, run, state


def restore(content, path, device):
    """A checkpoint's content -> its model, on the device.  ValueError if they do not fit."""
    try:
        config = Config(**content["config"])
        held = sum(z.numel() for z in content["model"].values())
        if lesson_5.count_parameters(config) > held:  # before a large one is built for nothing
            raise TypeError(f"{held:,} numbers")
        model = TransformerXL(config)
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} holds the weights of another model than it says "
                         f"({content.get('name')}): {str(error).splitlines()[0]}") from None
    return model.to(device)


# ---- metrics ------------------------------------------------------------------------------------

# train: mean loss since the last line, train_max: the largest, which shows a spike; skipped: steps
COLUMNS = ("step", "tokens", "seconds", "lr", "grad_norm", "train", "train_max", "skipped", "valid")


def open_metrics(path, header, lines):
    """metrics.tsv, ready for the next line: new, or cut back to the lines that a checkpoint knows.
    """
    text = header + "\t".join(COLUMNS) + "\n"
    if lines and path.exists():
        old = path.read_text().splitlines(keepends=True)
        head = [line for line in old if not line[0].isdigit()]
        text = "".join(head + [line for line in old if line[0].isdigit()][:lines])
    write(path, lambda file: file.write(text))
    return open(path, "a", buffering=1)  # line by line, so that a look at it is never stale


def read_metrics(path):
    """The lines of a metrics.tsv -> [{column: text, empty where it has no value}]."""
    return [dict(zip(COLUMNS, line.rstrip("\n").split("\t")))
            for line in path.read_text().splitlines() if line[0].isdigit()]


def draw(path, unit, title):
    """curve.png beside metrics.tsv, drawn from it."""
    rows = read_metrics(path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for column, style, label in (("train", "-", "training, mean since the last point"),
                                 ("valid", "o-", "validation, with the memory of evaluation")):
        points = [(int(row["tokens"]) / 1e6, float(row[column])) for row in rows if row[column]]
        axes.plot(*zip(*points) if points else ((), ()), style, markersize=4, label=label)
    axes.set(xlabel="tokens read (millions)", ylabel=f"loss ({unit})",
             title=title.replace("$", r"\$"))  # it stands around formulas
    axes.set(xlim=(0, None))
    if unit == "bpc":
        axes.set(ylim=(0, None))
    else:  # it begins near the size of the vocabulary
        axes.set(yscale="log", ylabel="perplexity (logarithmic)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set(major_formatter="{x:,.0f}", minor_locator=NullLocator())
    axes.legend()
    with warnings.catch_warnings():  # of a letter in a file's name that the font lacks
        warnings.simplefilter("ignore")
        figure.savefig(path.with_name("curve.png"), dpi=120)


def clock(seconds):
    """Seconds as 5s, 4m05s or 3h04m."""
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else (
        f"{minutes}m{s:02}s" if minutes else f"{s}s")


def log_line(run, state, loss, unit):
    """Step, how far, loss, speed, time gone and left, in one line."""
    done = fraction_done(run, state.step, state.tokens, state.seconds)
    return (f"step {state.step:,} | {done:.0%} | loss {loss:.3f} {unit} | "
            f"{state.tokens / state.seconds:,.0f} tok/s | "
            f"{clock(state.seconds)}, {clock(state.seconds * (1 / done - 1))} left"
            + (f" | {state.skipped} steps skipped" if state.skipped else ""))


def circumstances(argv_text, model, corpus, device):
    """What a figure needs to be believed later: comment lines for the head of metrics.tsv."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=RUNS.parent,
                            capture_output=True, text=True).stdout.strip() if which("git") else ""
    hardware = torch.cuda.get_device_name() if device == "cuda" else (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    parameters = sum(p.numel() for p in model.parameters())
    return (f"# {argv_text}\n# commit {commit or 'unknown'}, Python {platform.python_version()}, "
            f"torch {torch.__version__}, {device}: {hardware}\n"
            f"# {parameters:,} parameters, {corpus.name}\n")


# ---- using a checkpoint, and what the training loop shares with it ------------------------------

def folder(given, name, run):
    """Where the run lives: --out, or runs/DATASET-MODEL beside this file."""
    corpus = Path(run.text).stem if run.text else run.dataset
    return Path(given["out"]) if "out" in given else RUNS / f"{corpus}-{name}"


def read_corpus(given, run, content=None):
    """The run's corpus; ValueError if it is not the one that a checkpoint was trained on."""
    corpus = corpora.load(run.text or run.dataset, root=given.get("data_dir", RUNS.parent / "data"),
                          drop_newlines=run.drop_newlines)
    if content and (content["vocab"], content["text"]) != (corpus.vocab, corpora.checksum(corpus)):
        raise ValueError(f"{corpus.name} is not the text that the checkpoint was trained on: it "
                         f"has changed since ({len(content['vocab'])} symbols then, "
                         f"{len(corpus.vocab)} now); put the old one back, or train anew "
                         "in another folder")
    return corpus


def validation_tokens(corpus, run):
    """What is evaluated during training: run.eval_tokens predictions of the split, or all."""
    return corpus.valid[: run.eval_tokens + 1] if run.eval_tokens else corpus.valid


def training_lanes(corpus, run, epoch, device):
    """The lanes of one reading of the text, (B, n): in order, or sentences in an order of its own.

    Independent sentences stay where they are and are gathered as they are needed.
    """
    if corpus.separator is None:
        return lanes(corpus.train, run.batch).to(device)
    return corpora.SentenceLanes(corpus.train, run.batch, corpus.separator, run.seed, epoch)


def test_line(model, corpus, run):
    """Evaluate the whole test split: the one line that a run is quoted by."""
    value = shown(evaluate_on_ranks(model, corpus.test, run, "testing"), corpus.unit)
    return (f"test {value:.4f} {corpus.unit} (evaluation T {run.eval_segment}, "
            f"M {run.eval_mem_len}, clamp {run.eval_clamp_len or 'none'}; "
            f"{len(corpus.test) - 1:,} predictions; {corpus.name})")


def continue_text(model, prompt, run, given):
    """Sample after prompt (P,) with the memory of evaluation -> the new tokens (n,)."""
    device = model.u.device
    generator = torch.Generator(device).manual_seed(given.get("seed", run.seed))
    try:
        with evaluating(model, run):
            return lesson_5.generate(model, prompt.to(device), given.get("n_tokens", 500),
                                     given.get("top_k"), given.get("temperature", 1.0),
                                     generator).cpu()
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError("the model's logits are not finite, so it cannot be sampled; train it "
                         "with a smaller --lr") from None


def best(out):
    """Path and content of the checkpoint that is evaluated: the best, or else the last."""
    return newest(*(out / name for name in ("best.pt", "checkpoint.pt", "previous.pt")))


def must_agree(given, content, act, free=()):
    """ValueError if a flag that was given, and is not free, differs from the checkpoint's."""
    saved = content["config"] | content["run"] | {"model": content["name"]}
    for key, value in given.items():
        if key in saved and key not in free and value not in (saved[key], "auto"):
            raise ValueError(f"{act} goes on with the settings of the run: {flag(key)} is "
                             f"{saved[key] or 'not set'} there, not {value}")


def check_sampling(given, V):
    """Refuse what `generate` would refuse, now and not after days of training.  ValueError."""
    if given.get("n_tokens", 0) < 0:
        raise ValueError(f"--n-tokens must be 0 or more, got {given['n_tokens']}")
    if 0 < given.get("temperature", 1.0) < 1e-30:  # logits divided by it overflow
        raise ValueError(f"--temperature must be at least 1e-30, got {given['temperature']}; "
                         "--top-k 1 takes the best symbol always")
    lesson_5.sample_top_k(torch.zeros(1, V), given.get("top_k", 1), given.get("temperature", 1.0),
                          torch.Generator())


def use(given, device):
    """--eval-only and --sample: what a checkpoint can do without being trained."""
    name, _, defaults = settings(given, device)
    out = folder(given, name, defaults)
    path, content = best(out)
    lengths = {"eval_segment", "eval_mem_len", "eval_clamp_len"} & given.keys()
    _, run, state = unpack(content, path)
    must_agree(given, content, "--sample" if "sample" in given else "--eval-only",
               lengths | {"seed"})
    run = replace(run, **{name: given[name] for name in lengths})
    model = restore(content, path, device).eval()
    print(f"{path}: step {state.step:,}")
    if "sample" in given:
        prompt = corpora.encode(given["sample"], content["vocab"])
        new = continue_text(model, prompt, run, given)
        print(corpora.decode(torch.cat([prompt, new]), content["vocab"]))
    if "eval_only" in given:
        with distributed.first_alone():
            corpus = read_corpus(given, run, content)
        print(test_line(model, corpus, run))
    return 0


# ---- the training loop --------------------------------------------------------------------------

def report(model, corpus, run, out, given):
    """The end of a run: curve, sample, what to try next, and last of all the test figure."""
    if (out / "best.pt").exists():  # not if no validation loss was finite
        path, content = best(out)
        model = restore(content, path, model.u.device)
    model.eval()
    if distributed.RANK == 0:
        draw(out / "metrics.tsv", corpus.unit, f"{out.name}: {corpus.name.split(' (')[0]}")
        prompt = corpus.test[:200].long()
        sample = continue_text(model, prompt, run, {"n_tokens": 300} | given)
        print(f"--- the beginning of the test split, and after >>> the model's own\n"
              f"{corpora.decode(prompt, corpus.vocab)}>>>{corpora.decode(sample, corpus.vocab)}\n"
              "---")
    source = f"--text {run.text}" if run.text else f"--dataset {run.dataset}"
    print(f"curve: {out / 'curve.png'}\n"
          f"try next: python train.py --sample TEXT --out {out}\n"
          f"          python train.py {source} --minutes 30 --out {out}-30")
    if corpus.unit == "bpc" and distributed.RANK == 0:
        compressed = corpora.compressed_bits(corpus.test, corpus.vocab)
        print("the test bytes by compressors, which have not seen the training split: "
              + ", ".join(f"{name} {bits:.4f}" for name, bits in compressed.items()))
    print(test_line(model, corpus, run))


def to_resume(out, given, lock):
    """Path and content of the checkpoint to go on from, None for a new run; ValueError if refused.

    After torchrun has restarted its ranks a run goes on by itself, if it is this torchrun's.
    """
    last, before = out / "checkpoint.pt", out / "previous.pt"
    there = last.exists() or before.exists()
    again = there and distributed.restarts() and lock.take().endswith(f" {distributed.launch()}")
    if "resume" not in given and not again:
        if there:
            raise ValueError(f"{out} holds a run already: add --resume to go on with it, or keep "
                             "it and name another folder with --out")
        return None, None
    if there:
        lock.take()
    path, content = newest(last, before)
    if path == before and last.exists():  # it is damaged, and must not become the one before
        os.replace(last, out / "damaged.pt")
        print(f"kept the damaged one as {out / 'damaged.pt'}")
    return path, content


def too_large(config, run, device):
    """What to say when a training step does not fit into the memory of a GPU."""
    B = run.batch // distributed.COUNT
    size = min(run.micro_batch or B, B)
    room = torch.cuda.get_device_properties(device).total_memory if device == "cuda" else 0

    def need(lanes):
        return sum(bytes_of_run(config, B, run.segment, run.dtype, lanes).values())

    smaller = [n for n in range(1, size) if need(n) < 0.9 * room] or [max(1, size // 2)]
    return ValueError(
        f"out of memory with {size} lanes at a time, which need about {need(size) / 1e9:.1f} GB; "
        + (f"--micro-batch {smaller[-1]} needs about {need(smaller[-1]) / 1e9:.1f} GB and gives "
           "the same result, up to the draws of dropout" if size > 1
           else "a shorter --segment or a smaller model may fit"))


def train(given, device):
    """Train from the start or from a checkpoint, then test, sample and draw."""
    name, config, run = settings(given, device)
    out = folder(given, name, run)
    with Lock(out) as lock:
        path, content = to_resume(out, given, lock) if distributed.RANK == 0 else (None, None)
        path = distributed.first(path)
        if path is not None and content is None:  # the other ranks read what the first has chosen
            content = load(path)
        return train_in(out, path, content, lock, given, device, name, config, run)


def train_in(out, path, content, lock, given, device, name, config, run):
    """Train in a folder, from the start or from the checkpoint at path with its content."""
    state = State()
    if content is not None:
        config, run, state = unpack(content, path)
        name = content["name"]
        must_agree(given, content, "--resume", {"micro_batch"})
        run = replace(run, micro_batch=given.get("micro_batch", run.micro_batch))
    elif device == "cpu" and run.dataset in MODELS_OF and "model" not in given:
        large = MODELS_OF[run.dataset][0]
        print(f"no GPU here: training the small model {name!r} on {run.dataset}; {large!r} takes "
              f"one, for {RUNS_OF[large].steps:,} steps of {RUNS_OF[large].batch} x "
              f"{RUNS_OF[large].segment} tokens (--model {large} forces it)")

    mine = distributed.my_lanes(run.batch)
    with distributed.first_alone():  # it may fetch and unpack
        corpus = read_corpus(given, run, content)
    text = corpora.checksum(corpus) if content is None else content["text"]  # compared just now
    stream = training_lanes(corpus, run, state.epoch, device)
    lanes(corpus.valid, 1), lanes(corpus.test, 1)  # too short for a prediction? say so now
    check_sampling(given, len(corpus.vocab))
    torch.manual_seed(run.seed)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # what stays float32 may use TF32
    config = replace(config, vocab_size=len(corpus.vocab))
    if hasattr(os, "sysconf"):
        need = 16 * lesson_5.count_parameters(config)
        if need > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ValueError(f"a model of {need / 16:,.0f} parameters takes {need / 1e9:,.0f} GB, "
                             "more than this machine has; --dry-run says how much of what")
    model = TransformerXL(config).to(device) if content is None else restore(content, path, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr, fused=True)
    if content is not None:
        if state.column >= stream.shape[1] - 1:
            raise ValueError(f"{path} stands at column {state.column} of lanes that are "
                             f"{stream.shape[1]} long")
        take_up(content, path, optimizer, (config.n_layer, run.batch, config.d_model))
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters on {corpus.name}")
    if distributed.RANK == 0:
        out.mkdir(parents=True, exist_ok=True)
        lock.take()
        if content is None:
            to_resume(out, given, lock)  # again, now under the lock: nobody was faster
            for left in ("best.pt", "metrics.tsv"):  # of a run whose checkpoints are gone
                if (out / left).exists():
                    os.replace(out / left, out / f"old-{left}")
        lock.sign(f"process {os.getpid()}, started by {distributed.launch()}")
        for part in out.glob("*.part"):  # of a save that was killed
            part.unlink()

    def next_segment():
        """x, y (B, T) of this rank's lanes at the column where the run stands, on the device."""
        return (z[mine].to(device) for z in next(segments(stream, run.segment, state.column)))

    if content is None:
        if distributed.RANK:
            # its own dropout; the weights are the first's
            torch.manual_seed(run.seed + distributed.RANK)
        if run.dtype == "auto":  # all ranks try, since they step together; the first decides
            run = replace(run, dtype=distributed.first(choose_dtype(model, run, *next_segment())))
    else:
        state.memory = state.memory and [layer[mine].to(device) for layer in state.memory]
        print(f"going on from step {state.step:,}, {clock(state.seconds)} of training")
    valid = validation_tokens(corpus, run)
    command = " ".join(" ".join(["python train.py", *sys.argv[1:]]).split())  # in one line
    metrics = open(os.devnull, "w") if distributed.RANK else open_metrics(
        out / "metrics.tsv", circumstances(command, model, corpus, device), state.lines)

    def line(rate="", norm="", train_loss="", train_max="", skipped="", valid_loss=""):
        """One line of metrics.tsv, in the order of COLUMNS."""
        print(state.step, state.tokens, f"{state.seconds:.1f}", rate, norm, train_loss, train_max,
              skipped, valid_loss, sep="\t", file=metrics)
        state.lines += 1

    def keep(file, with_optimizer=True):
        """Save all that evaluating and sampling need; with the optimizer, all that resuming needs.

        The memory is that of all B lanes in the order of the stream, so that the run can go on with
        another number of ranks.
        """
        content = {"format": FORMAT, "name": name, "config": asdict(config), "run": asdict(run),
                   "vocab": corpus.vocab, "model": model.state_dict(),
                   "text": text, "state": vars(state) | {"memory": None}}
        if with_optimizer:
            content["state"]["memory"] = state.memory and [
                distributed.gather(z) for z in state.memory]
            content |= {"optimizer": optimizer.state_dict()} | random_state(device)
        if distributed.RANK == 0:
            os.fsync(metrics.fileno())  # the lines that the checkpoint counts are on the disk
            save(out / file, content, out / "previous.pt" if with_optimizer else None)

    model.train()
    learner = distributed.learner(model, *next_segment())
    learner = compiled(learner, run, *next_segment()) if "compile" in given else learner
    last_line = time.monotonic()
    with metrics, Stop() as stop:
        try:
            while True:
                done = fraction_done(run, state.step, state.tokens, state.seconds)
                if state.evaluated < state.step and (done == 1 or state.step % run.eval_every == 0):
                    loss = evaluate_on_ranks(model, valid, run, "validating")
                    with stop.held_back():
                        state.evaluated, better = state.step, loss < state.best
                        state.best = loss if better else state.best  # also if loss is NaN
                        value = f"{shown(loss, corpus.unit):.4f}"
                        line(valid_loss=value)
                        print(f"step {state.step:,} | validation {value} {corpus.unit}", flush=True)
                        if better:
                            keep("best.pt", with_optimizer=False)
                        keep("checkpoint.pt")
                if done == 1:
                    break
                with stop.held_back():
                    start = time.perf_counter()
                    x, y = next_segment()
                    optimizer.param_groups[0]["lr"] = rate = learning_rate(run, state.step, done)
                    try:
                        loss, norm, state.memory = train_step(
                            learner, optimizer, x, y, state.memory, run)
                    except torch.OutOfMemoryError:
                        raise too_large(config, run, device) from None
                    if state.spike(loss):
                        print(f"step {state.step + 1:,} | loss {shown(loss, corpus.unit):.3f} "
                              f"{corpus.unit}: a spike, twice the mean before it", flush=True)
                    state.count(x, loss, norm)
                    if state.column == stream.shape[1] - 1:  # the text begins again, without a past
                        state.column, state.memory, state.epoch = 0, None, state.epoch + 1
                        if corpus.separator is not None:
                            stream = training_lanes(corpus, run, state.epoch, device)
                    seconds = state.seconds + time.perf_counter() - start
                    (state.seconds,) = distributed.largest(seconds)
                    if state.step % run.log_every == 0 and state.loss_count:
                        mean = shown(state.loss_sum / state.loss_count, corpus.unit)
                        line(f"{rate:.3g}", f"{norm:.3g}", f"{mean:.4f}",
                             f"{shown(state.loss_max, corpus.unit):.4f}", state.skipped)
                        state.loss_sum, state.loss_count, state.loss_max = 0.0, 0, 0.0
                if state.skipped_in_a_row >= 10:
                    raise ValueError(f"ten steps in a row, up to step {state.step}, had a loss or "
                                     "gradient that is not finite, so training stops; none of "
                                     f"them has reached the weights, nor those saved in {out}. "
                                     "Begin anew with a smaller --lr and another --out")
                if time.monotonic() - last_line > 5:
                    last_line = time.monotonic()
                    print(log_line(run, state, shown(loss, corpus.unit), corpus.unit), flush=True)
        except KeyboardInterrupt:
            keep("checkpoint.pt")
            distributed.first(None)  # no rank leaves before the first has written
            print(f"\nstopped after step {state.step:,}, saved; go on with\n"
                  f"  python train.py --resume --out {out}")
            return 128 + stop.number

    report(model, corpus, run, out, given)
    return 0


def failed(sentence):
    """Say why, and return the exit status.  What the first rank says the others need not repeat."""
    if distributed.RANK:
        time.sleep(2)  # torchrun ends this process meanwhile, if the first rank has failed
        sentence = f"rank {distributed.RANK}: {sentence}"
    print("train.py: " + " ".join(str(sentence).split()), file=sys.stderr)  # one line, always
    return 1


def main(argv=None):
    """Do what the command line says.  Exit status: 0, 1 for a mistake, 128 + n after signal n."""
    try:
        given = parse(argv)
        if "text" in given:
            given["text"] = str(Path(given["text"]).resolve())  # the same file on --resume
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(device)
        act = dry_run if "dry_run" in given else (
            use if given.keys() & {"eval_only", "sample"} else train)
        distributed.join(device)
        status = act(given, device)
        distributed.leave()
        return status
    except ValueError as error:
        return failed(error)
    except OSError as error:
        return failed(f"{error}; what was saved before is whole: make room, or name another folder "
                      "with --out; go on with --resume if there is a checkpoint")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "t allocate" in str(error):
            # the last is what torch says on a CPU: can't allocate memory
            return failed("out of memory: a smaller model, --batch, --segment, --eval-segment or "
                          "--eval-mem-len takes less; --dry-run says what training takes")
        if distributed.lost(error):
            return failed("another rank has ended, so this one ends, too")
        raise
    except KeyboardInterrupt:
        print("\ntrain.py: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    distributed.end(main())
