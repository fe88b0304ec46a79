"""Flags made from the fields of dataclasses, and one line for every mistake.

A field `lr: float = 3e-3  # highest learning rate` becomes `--lr`, a float, with this comment and
its default as the help.  So a setting is written down once, and its help stands beside it.
"""
import argparse
import inspect
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch

from training import ranks


@dataclass(frozen=True)
class Command:
    """What is done, and where."""

    model: str = ""  # a model by its name, see below (default: by dataset and device)
    data_dir: str = ""  # where corpora are kept (default: data)
    device: str = ""  # cpu or cuda (default: the best present)
    out: str = ""  # folder of the run (default: runs/DATASET-MODEL)
    resume: bool = False  # go on with the run in --out, with the settings it began with
    eval_only: bool = False  # evaluate the run in --out on its test split
    sample: str = ""  # let the run in --out continue this text
    n_tokens: int = 500  # length of a sample
    top_k: int = 40  # candidates for each token of it
    temperature: float = 1.0  # below 1 sharper, above 1 wilder
    dry_run: bool = False  # print what the run will take, and stop
    tokens_per_second: float = 0.0  # the speed that --dry-run counts with
    compile: bool = False  # compile the training step (torch.compile): for a GPU


# of Config: what the corpus or the evaluation decides
NO_FLAGS = "vocab_size", "tie_projections", "same_length", "clamp_len"


def flag(name):
    """The flag of a field: eval_mem_len -> --eval-mem-len."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of the usage page."""

    def __init__(self, **options):
        defaults = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS,
                    "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**defaults | options)

    def error(self, message):
        """Raise what main prints."""
        raise ValueError(f"{message} (python {self.prog} --help lists all flags)")


@cache
def comments(settings):
    """{field: the comment after it} of a dataclass, from its source."""
    pattern = r"^    (\w+): [^#\n]*  # (.+)$"
    return dict(re.findall(pattern, inspect.getsource(settings), re.MULTILINE))


def add_fields(parser, settings, presets=None):
    """A flag for each field of a dataclass; presets, by name, say what the default is."""
    group, texts = parser.add_argument_group(settings.__name__), comments(settings)
    for field in (field for field in fields(settings) if field.name not in NO_FLAGS):
        options = {"type": field.type}
        if field.type is bool:
            options = {"action": "store_true"}
        elif field.type is tuple:
            options = {"type": int, "nargs": "*", "metavar": "N"}
        elif field.type is str:
            options["metavar"] = "TEXT"
        defaults = [f"{name}: {getattr(presets[name], field.name)}" for name in (
            "laptop", "enwik8-12L")] if presets else [f"default: {field.default}"]
        if field.type is bool or field.default in ("", ()) and not presets:
            defaults = []
        text = f"{texts[field.name]} ({', '.join(defaults)})" if defaults else texts[field.name]
        group.add_argument(flag(field.name), help=text.replace("%", "%%"), **options)


def parse(argv, description, presets):
    """The command line -> {field: value} of the flags that were given, and of no others.

    So `"resume" in given` asks whether somebody typed --resume.  presets: for each dataclass, its
    instances by the name of the model.  ValueError, one sentence.
    """
    names = ", ".join(next(iter(presets.values())))
    parser = Parser(prog="train.py", description=description, epilog=f"models: {names}")
    for kind, instances in presets.items():
        add_fields(parser, kind, instances)
    add_fields(parser, Command)
    given = vars(parser.parse_args(argv))
    for name, value in given.items():
        if isinstance(value, str) and value != value.encode(errors="ignore").decode():
            parser.error(f"{flag(name)} {value!r} is not UTF-8")
        if isinstance(value, list) and name != "cutoffs":  # argparse makes [] of --text=--
            parser.error(f"{flag(name)} needs a value")
    if "cutoffs" in given:
        given["cutoffs"] = tuple(given["cutoffs"])
    if "text" in given:
        given["text"] = str(Path(given["text"]).resolve())  # the same file on --resume
    return given


def settings(given, device, configs, runs, models):
    """The name, Config and Run that flags mean, from train.py's tables.  ValueError if none.

    models says what each dataset trains on a GPU and without one.
    """
    if "text" in given and "dataset" in given:
        raise ValueError("--text and --dataset name two corpora; give one of them")
    paper, small = models.get(given.get("dataset", "stdlib"), models["stdlib"])
    name = given.get("model") or (paper if device == "cuda" else small)
    if name not in configs:
        raise ValueError(f"unknown model {name!r}, known are {', '.join(configs)}")
    config, run, large = configs[name], chosen(runs[name], given), configs[paper]
    if run.keys() & {"steps", "tokens", "minutes"}:
        run = {"steps": 0, "tokens": 0, "minutes": 0.0} | run
    if large.cutoffs and config.vocab_size < large.vocab_size:  # a small model for as many words
        config = replace(config, vocab_size=large.vocab_size, cutoffs=large.cutoffs, div_val=4)
    sizes = chosen(config, given)
    if sizes.keys() & {"n_head", "d_model"} and "d_head" not in sizes:
        D, H = (sizes.get(key, getattr(config, key)) for key in ("d_model", "n_head"))
        if H < 1 or D % H:
            raise ValueError(f"{H} heads do not divide the model width {D}")
        sizes["d_head"] = D // H
    return name, replace(config, **sizes), replace(runs[name], **run)


def for_vocabulary(config, V, given):
    """A Config for V symbols: a preset's bands are kept as far as there are words for them."""
    fits = tuple(first for first in config.cutoffs if first < V)
    return replace(config, vocab_size=V,
                   cutoffs=config.cutoffs if "cutoffs" in given else fits)


def chosen(settings, given):
    """Of the flags that were given, those that are fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(settings) if field.name in given}


def check_agreement(given, content, act, free=()):
    """ValueError if a flag that was given, and is not free, differs from the checkpoint's."""
    saved = content["config"] | content["run"] | {"model": content["name"]}
    for key, value in given.items():
        if key in saved and key not in free and value not in (saved[key], "auto"):
            raise ValueError(f"{act} goes on with the settings of the run: {flag(key)} is "
                             f"{saved[key] or 'not set'} there, not {value}")


def other_lengths(given, content):
    """For --sample and --eval-only: the settings of a checkpoint's Run that were given anew.

    ValueError if another of its settings was given, too.
    """
    free = {"eval_segment", "eval_mem_len", "eval_clamp_len", "plain", "text"} & given.keys()
    act = "--sample" if "sample" in given else "--eval-only"
    check_agreement(given, content, act, free | {"seed"})
    return {name: given[name] for name in free}


def sampling(given, run, model):
    """What lesson 5's generate is asked for.  ValueError if the model cannot draw it."""
    check_sampling(given, model.config.vocab_size)
    generator = torch.Generator(model.u.device).manual_seed(given.get("seed", run.seed))
    return {"n_tokens": given.get("n_tokens", 500), "top_k": given.get("top_k", 40),
            "temperature": given.get("temperature", 1.0), "generator": generator}


def check_sampling(given, V):
    """ValueError if what is asked for cannot be drawn: said now, not after days of training."""
    n_tokens, top_k, temperature = (given.get(name, default) for name, default in (
        ("n_tokens", 0), ("top_k", 1), ("temperature", 1.0)))
    if n_tokens < 0:
        raise ValueError(f"--n-tokens must be 0 or more, got {n_tokens}")
    if not 1 <= top_k <= V:
        raise ValueError(f"--top-k must be from 1 to the vocabulary size {V}, got {top_k}")
    if not 1e-30 <= temperature:  # logits divided by less overflow
        raise ValueError(f"--temperature must be at least 1e-30, got {temperature}; --top-k 1 "
                         "takes the best symbol always")


def failed(program, sentence):
    """Say why in one line, and return the exit status."""
    if ranks.RANK:
        time.sleep(2)  # torchrun ends this process meanwhile, if the first rank has failed
        sentence = f"rank {ranks.RANK}: {sentence}"
    print(f"{program}: " + " ".join(str(sentence).split()), file=sys.stderr)
    return 1


def exit_status(program, act, *arguments):
    """Run act(*arguments) -> its exit status, or 1 after one line for whatever went wrong."""
    try:
        return act(*arguments)
    except ValueError as error:
        return failed(program, error)
    except OSError as error:
        return failed(program, f"{error}; what was saved before is whole: make room, or name "
                      "another folder with --out; go on with --resume if there is a checkpoint")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "t allocate" in str(error):
            # the last is what torch says on a CPU: can't allocate memory
            return failed(program, "out of memory: a smaller model, --batch, --segment, "
                          "--eval-segment or --eval-mem-len takes less; --dry-run says what "
                          "training takes")
        if ranks.lost(error):
            return failed(program, "another rank has ended, so this one ends, too")
        raise
    except KeyboardInterrupt:
        print(f"\n{program}: stopped", file=sys.stderr)
        return 130
