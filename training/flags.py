"""The command line: a flag for each setting, and one line for every mistake.

The flags are the fields of Flags and of presets.Recipe, with their help, and the sizes of lesson
5's Config, whose help is in MODEL_FLAGS.
"""
import argparse
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from shlex import quote

from support.names import did_you_mean, printable
from training import checkpoint, job, presets
from training.command import Parser, flag, option

ROOT = Path(__file__).resolve().parent.parent  # of train.py
PRETRAINED = ROOT / "pretrained"  # the included model


@dataclass(frozen=True)
class Flags:
    """The flags of train.py that are not settings of a Recipe or Config: those are in `typed`."""

    model: str = option("", "a model by its name, see below (default: by dataset and device)")
    data_dir: str = option(str(ROOT / "data"), "where corpora are kept")
    device: str = option("", "(default: the best one available)", ("cpu", "cuda"))
    out: str = option("", "folder of the run (default: runs/DATASET-MODEL)")
    resume: bool = option(False, "resume the run in --out with its original settings")
    init: str = option("", "start a new run from the run in this folder, such as pretrained")
    eval_only: bool = option(False, "evaluate the run in --out, or else pretrained/")
    sample: str = option(None, "let the run in --out, or else pretrained/, continue this text")
    n_tokens: int = option(500, "length of a sample")
    top_k: int = option(40, "most candidates for each token of it; 1: always the best", least=1)
    temperature: float = option(1.0, "below 1 more peaked, above 1 flatter", least=1e-30)
    dry_run: bool = option(False, "print the resources that the run needs, and stop")
    compile: bool = option(False, "fewer kernels on a GPU, an estimated 2.2 to 3 times as fast "
                           "(training/README.md, On a GPU); experiments.speed measures it")
    typed: dict = field(default_factory=dict)  # {setting: value} of those on the command line

    def __post_init__(self):
        presets.check(self)
        is_new, is_trained = self.init or self.dry_run, self.eval_only or self.sample is not None
        if bool(is_new) + self.resume + is_trained > 1:
            raise ValueError("--init and --dry-run are for a new run, --resume for one that was "
                             "stopped, --eval-only and --sample for a trained model: give one")
        if self.compile and (is_trained or self.typed.get("plain")):
            raise ValueError("--compile is for training, and not with --plain; leave it out")

    @cached_property
    def start(self):
        """The content of the checkpoint that a new run starts from; None without --init."""
        return checkpoint.to_evaluate(Path(self.init)) if self.init else None


MODEL_FLAGS = {  # the corpus or the evaluation decides the other fields of Config
    "n_layer": "layers N",
    "d_model": "model width D",
    "n_head": "heads H",
    "d_head": "width C of a head",
    "d_inner": "width FF inside the feed-forward network",
    "mem_len": "memory length M; 0: no memory",
    "dropout": "of hidden states",
    "dropout_attention": "of attention probabilities",
    "cutoffs": "indices that split the vocabulary, sorted by frequency, into bands",
    "div_val": "each band's vectors are div_val times narrower than the last band's",
    "untie_r": "u and v for each layer, not one pair"}


def add_flag(group, field, default):
    """Add the flag of a dataclass's field; --help shows its choices and its default."""
    text = MODEL_FLAGS.get(field.name) or field.metadata["help"]
    if default:
        text += f" (default: {default})"
    kind, choices = field.type, field.metadata.get("choices")
    metavar = "|".join(choices) if choices else {str: "TEXT", tuple: "N"}.get(kind)
    is_path = field.name in ("data_dir", "init", "out", "text")  # no shell expands ~ after =
    options = {"type": expanduser if is_path else kind, "metavar": metavar or kind.__name__.upper()}
    if kind is bool:
        options = {"action": "store_true"}
    elif kind is tuple:
        options |= {"type": int, "nargs": "*"}
    group.add_argument(flag(field.name), help=text, **options)


def parse(argv, description):
    """Parse the command line -> Flags.  ValueError, one sentence, for a mistake."""
    parser = Parser(prog="train.py", description=description, argument_default=argparse.SUPPRESS,
                    epilog=f"models: {', '.join(presets.MODELS)}; the defaults are laptop's")
    sizes = [field for field in fields(presets.Config) if field.name in MODEL_FLAGS]
    for title, settings, defaults in (
            ("data and training", fields(presets.Recipe), presets.RECIPES["laptop"]),
            ("sizes", sizes, presets.CONFIGS["laptop"]),
            ("what is done", fields(Flags)[:-1], Flags())):
        group = parser.add_argument_group(title)
        for setting in settings:
            add_flag(group, setting, getattr(defaults, setting.name))
    values = vars(parser.parse_args(argv))
    for key in (key for key, value in values.items() if value == ""):
        raise ValueError(f"{flag(key)} is empty: give it a value, or leave it out")
    if "cutoffs" in values:
        values["cutoffs"] = tuple(values["cutoffs"])
    if "text" in values:
        values["text"] = str(Path(values["text"]).resolve())  # the same file on --resume
    names = [field.name for field in fields(Flags) if field.name in values]
    return Flags(**{name: values.pop(name) for name in names}, typed=values)


def choose_model(flags, device):
    """Return the name, Config and Recipe that the flags select for a new run.

    They are those of a preset, or of the run that --init names, with the values that were typed.
    ValueError for an unknown name, and for sizes that are not those of --init.
    """
    typed = flags.typed
    if "text" in typed and "dataset" in typed:
        raise ValueError("--text and --dataset are two corpora; give one of them")
    if flags.start:
        name, config, recipe = job.settings_of(flags.start)
        check_kept(flags, flags.start, {"dropout", "dropout_attention", "mem_len"}
                   | typed.keys() - MODEL_FLAGS.keys())
        recipe = replace(recipe, dtype="auto")  # it may be on another machine
    else:
        name, config, recipe = choose_preset(flags, device)
    sizes = {key: typed[key] for key in typed.keys() & MODEL_FLAGS.keys()}
    training = {key: typed[key] for key in typed.keys() - MODEL_FLAGS.keys()}
    if training.keys() & {"steps", "minutes"}:
        training = {"steps": 0, "minutes": 0.0} | training
    if training.keys() & {"text", "dataset"}:
        training = {"text": "", "drop_newlines": False} | training
    return name, replace(config, **sizes), replace(recipe, **training)


def choose_preset(flags, device):
    """Return the name, Config and Recipe of --model, or of the dataset's model for this device."""
    dataset = flags.typed.get("dataset", "stdlib")
    paper, small = presets.DATASETS.get(dataset, presets.DATASETS["stdlib"])
    name = flags.model or (paper if device == "cuda" else small)
    if name not in presets.MODELS:
        raise ValueError(f"unknown model {name!r}, known are {', '.join(presets.MODELS)}"
                         f"{did_you_mean(name, presets.MODELS)}")
    if name == small != paper and not flags.model:
        print(f"no GPU found: {small!r} is the model for {dataset}; {paper!r} needs a GPU "
              f"(--model {paper} chooses it here)")
    config, recipe = presets.MODELS[name]
    large = presets.CONFIGS[paper]
    if large.cutoffs and config.vocab_size < large.vocab_size:  # a small model, many words
        config = replace(config, vocab_size=large.vocab_size, cutoffs=large.cutoffs,
                         div_val=4 if config.d_model >= 64 else 2)
    return name, config, recipe


def adapt_to_vocabulary(config, V, flags):
    """Return the Config for V symbols, without the bands of a preset that would be empty."""
    if "cutoffs" in flags.typed:
        return replace(config, vocab_size=V)
    fits = tuple(first for first in config.cutoffs if first < V)
    div_val = config.div_val if fits or "div_val" in flags.typed else 1
    return replace(config, vocab_size=V, cutoffs=fits, div_val=div_val)


def choose_folder(flags, name, recipe):
    """Return the folder of a run: --out, or runs/DATASET-MODEL next to train.py."""
    text = Path(recipe.text or recipe.dataset).stem  # a foreign checkpoint may name any path
    return Path(flags.out or ROOT / "runs" / printable(f"{text}-{Path(name).name}"))


def find_folder(flags, device):
    """Return the folder to evaluate or sample: pretrained/ if none was named or trained."""
    name, _, recipe = choose_model(flags, device)
    path = choose_folder(flags, name, recipe)
    named = flags.typed.keys() & ({"dataset"} if flags.eval_only else {"dataset", "text"})
    if named or flags.out or flags.model or any(path.glob("*.pt")):
        return path
    print(f"no run in {path}: using the included model (pretrained/)")
    return PRETRAINED


def restore_settings(flags, saved):
    """Return a checkpoint's name, Config and Recipe, with what was typed and may change.

    ValueError if another setting differs from the saved one.  (A text may have moved: its content
    is compared when it is read.)  --eval-only may be on another machine, so its dtype is auto.
    """
    name, config, recipe = job.settings_of(saved)
    free = {"eval_segment", "eval_mem_len", "eval_clamp_len", "plain", "seed"}
    if flags.resume:
        free = {"micro_batch", "save_minutes", "text"}
    elif flags.eval_only:
        free |= {"dtype", "text"}
        recipe = replace(recipe, dtype="auto")
    check_kept(flags, saved, free)
    changes = {key: flags.typed[key] for key in flags.typed.keys() & free}
    if "text" in changes:  # enwik8's newlines are not those of a file
        changes["drop_newlines"] = False
    return name, config, replace(recipe, **changes)


def check_kept(flags, saved, free):
    """Raise ValueError for a typed setting that is not free and differs from the saved one."""
    known = saved["config"] | saved["recipe"] | {"model": saved["name"]}
    if flags.compile and known["plain"]:
        raise ValueError("the run has --plain; leave --compile out")
    typed = flags.typed | ({"model": flags.model} if flags.model else {})
    for key in typed.keys() - free:
        if typed[key] != known[key] and (key, typed[key]) != ("dtype", "auto"):
            init = f"; --init {quote(str(saved['path'].parent))} starts a new run from its weights"
            raise ValueError(
                f"the run keeps its settings: {flag(key)} is {known[key] or 'not set'} there, not "
                f"{typed[key]}{init * (flags.resume and key in saved['recipe'])}")
