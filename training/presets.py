"""Every named model and how it is trained: its Config and its Recipe, one block of keywords each.

wt103-large and lm1b-large follow the authors' TPU scripts, which reached the published 18.3 and
21.8.  Other models named after a dataset follow their PyTorch scripts (such as run_enwik8_base.sh),
unless a comment says otherwise.  "tiny", "laptop" and "laptop-words" are ours.  vocab_size is that
of the published parameter counts (enwik8: without newlines); train.py sets it by its corpus.
"""
import math
from dataclasses import dataclass, fields, replace
from importlib import import_module

from support import validate
from support.download import SOURCES
from training.command import flag, option
from training.optimizers import OPTIMIZERS

lesson_5 = import_module("05_full_model")
Config = lesson_5.Config
ABOVE_0 = math.nextafter(0, 1)  # the smallest number above 0

# the models that --dataset trains: with a GPU, without one
DATASETS = {"stdlib": ("laptop", "laptop"), "copies": ("laptop", "laptop"),
            **{name: source.models for name, source in SOURCES.items()}}


def check(settings):
    """Raise ValueError for an option with a value of another type, or out of its range."""
    validate.types(settings)
    for setting in (setting for setting in fields(settings) if setting.metadata):
        name, value = flag(setting.name), getattr(settings, setting.name)
        choices, least = setting.metadata["choices"], setting.metadata["least"]
        if setting.type in (int, float) and not least <= value <= validate.MOST:
            bound = (f"at most {validate.MOST}" if value > validate.MOST else
                     "above 0" if least == ABOVE_0 else f"at least {least}")
            raise ValueError(f"{name} must be {bound}, got {value}")
        if choices and value not in (*choices, setting.default):
            raise ValueError(f"{name} must be {' or '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class Recipe:
    """The settings of data and training; lengths are in tokens.  ValueError for impossible ones."""

    dataset: str = option("stdlib", ", ".join(DATASETS))
    batch: int = option(16, "lanes B", least=1)
    segment: int = option(128, "segment length T", least=1)
    steps: int = option(0, "length of the run in steps (or --minutes)")
    lr: float = option(3e-3, "highest learning rate", least=ABOVE_0)
    warmup: int = option(100, "steps until it is reached")
    eval_segment: int = option(512, "smallest T of evaluation; it changes no loss", least=1)
    eval_mem_len: int = option(512, "memory length M of evaluation")
    eval_clamp_len: int = option(0, "larger distances are encoded as this; 0: off")
    optimizer: str = option("adam", "muon is for the layers' matrices", tuple(OPTIMIZERS))
    muon_lr: float = option(0.02, "highest learning rate of Muon; lr is Adam's", least=ABOVE_0)
    schedule: str = option("cosine", "decay of the learning rate", ("cosine", "sqrt"))
    eval_every: int = option(1000, "steps between validations; 0: at each tenth of the run")
    eval_tokens: int = option(100_000, "validation tokens during training; 0: all")
    log_every: int = option(50, "steps between lines of metrics.tsv", least=1)
    minutes: float = option(0.0, "length of the run in minutes of training, instead of steps")
    short_steps: int = option(0, "first steps, in which T is half as long")
    text: str = option("", "train on this file instead of a dataset, as bytes, split 90/5/5")
    drop_newlines: bool = option(False, "enwik8 as the authors count it: V = 204")
    micro_batch: int = option(0, "lanes at a time, gradients accumulated; 0: all")
    clip: float = option(0.25, "largest norm of the gradient", least=ABOVE_0)
    save_minutes: float = option(10.0, "most minutes between two checkpoints", least=ABOVE_0)
    seed: int = option(0, "seed of weights, dropout and samples")
    dtype: str = option("auto", "of matrix products; auto: the faster", ("auto", "float32", "bf16"))
    plain: bool = option(False, "evaluate and sample without a Reader")

    def __post_init__(self):
        check(self)
        if (self.steps > 0) == (self.minutes > 0):
            raise ValueError("a run needs one length above 0, --steps or --minutes, got "
                             f"{self.steps} and {self.minutes}")


WT103_CUTOFFS = (20_000, 40_000, 200_000)
LM1B_CUTOFFS = (60_000, 100_000, 640_000)
INTERVALS = {"eval_every": 4000, "log_every": 200}  # in the authors' scripts

MODELS = {
    "tiny": (lesson_5.CONFIGS["tiny"], Recipe(
        batch=4, segment=16, steps=200, eval_segment=16, eval_mem_len=32, eval_every=100)),
    # in equal time Muon learns more than Adam, and 5 short first steps more than 3 whole ones
    "laptop": (lesson_5.CONFIGS["laptop"], Recipe(
        minutes=4.2, short_steps=200, lr=0.012, optimizer="muon", schedule="sqrt", warmup=20,
        clip=1.0, eval_mem_len=256, eval_every=0, eval_tokens=20_000)),
    "laptop-words": (Config(
        vocab_size=10_000, n_layer=4, d_model=128, n_head=2, d_head=64, d_inner=512, mem_len=64,
        dropout=0.1, cutoffs=(2000,)), Recipe(
        dataset="ptb", batch=32, segment=64, minutes=10, warmup=50, optimizer="muon",
        schedule="sqrt", eval_segment=64, eval_mem_len=128, eval_every=500, eval_tokens=20_000)),
    "enwik8-12L": (lesson_5.CONFIGS["enwik8-12L"], Recipe(
        dataset="enwik8", batch=22, segment=512, steps=400_000, lr=2.5e-4, warmup=0, **INTERVALS,
        eval_segment=80, eval_mem_len=2100, eval_clamp_len=820, eval_tokens=500_000)),
    "enwik8-18L": (Config(  # ours: the paper gives 88M parameters and the score
        vocab_size=204, n_layer=18, d_model=640, n_head=10, d_head=64, d_inner=2208, mem_len=512,
        dropout=0.1), Recipe(
        dataset="enwik8", batch=22, segment=512, steps=400_000, lr=2.5e-4, warmup=4000, **INTERVALS,
        eval_segment=80, eval_mem_len=2100, eval_clamp_len=820, eval_tokens=500_000)),
    "enwik8-24L": (Config(
        vocab_size=204, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072, mem_len=768,
        dropout=0.15, dropout_attention=0.15), Recipe(
        dataset="enwik8", batch=64, segment=768, steps=400_000, lr=2.5e-4, warmup=4000, **INTERVALS,
        eval_segment=128, eval_mem_len=3800, eval_clamp_len=1000, eval_tokens=500_000)),
    "wt103-standard": (Config(
        vocab_size=267_735, n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100,
        mem_len=150, dropout=0.1, cutoffs=WT103_CUTOFFS), Recipe(
        dataset="wt103", batch=60, segment=150, steps=200_000, lr=2.5e-4, warmup=0,
        eval_segment=64, eval_mem_len=640, eval_clamp_len=400, eval_tokens=0, **INTERVALS)),
    "wt103-large": (Config(  # 285M parameters, where the paper says 257M
        vocab_size=267_735, n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096,
        mem_len=384, dropout=0.2, dropout_attention=0.2, cutoffs=WT103_CUTOFFS, div_val=4,
        untie_r=True, init_std=0.005), Recipe(
        dataset="wt103", batch=128, segment=384, steps=4_000_000, lr=2.5e-4, warmup=16_000,
        eval_segment=128, eval_mem_len=1600, eval_clamp_len=1000, eval_tokens=0, **INTERVALS)),
    "lm1b-base": (Config(
        vocab_size=793_471, n_layer=18, d_model=1024, n_head=8, d_head=128, d_inner=4096,
        mem_len=32, cutoffs=LM1B_CUTOFFS, div_val=4, tie_projections=False), Recipe(
        dataset="lm1b", batch=224, segment=32, steps=500_000, lr=2.5e-4, warmup=20_000,
        eval_segment=32, eval_mem_len=128, eval_tokens=0, **INTERVALS)),
    "lm1b-large": (Config(  # the TPU script has no projections in band 0, so 838M
        vocab_size=793_471, n_layer=24, d_model=1280, n_head=16, d_head=80, d_inner=8192,
        mem_len=32, dropout=0.05, dropout_attention=0.05, cutoffs=LM1B_CUTOFFS, div_val=4,
        tie_projections=False, untie_r=True, init_std=0.005), Recipe(
        dataset="lm1b", batch=512, segment=32, steps=1_200_000, lr=1e-4, warmup=30_000,
        eval_segment=32, eval_mem_len=128, eval_tokens=0, **INTERVALS)),
    "ptb": (Config(  # adapted from the authors' later code (experiments/questions.md)
        vocab_size=10_000, n_layer=16, d_model=380, n_head=10, d_head=38, d_inner=704, mem_len=70,
        dropout=0.2, dropout_attention=0.2), Recipe(
        dataset="ptb", batch=10, segment=70, steps=166_000, lr=3e-4, warmup=3000, eval_segment=70,
        eval_mem_len=280, eval_every=1328, eval_tokens=0, log_every=100)),
}
config, recipe = MODELS["lm1b-base"]  # 0.46B: N and FF as an author gave in public (issue 69)
MODELS["lm1b-medium"] = replace(config, n_layer=20, d_inner=6144), recipe
for size in ("12L", "24L"):  # text8's are enwik8's
    config, recipe = MODELS[f"enwik8-{size}"]
    MODELS[f"text8-{size}"] = replace(config, vocab_size=27), replace(recipe, dataset="text8")
CONFIGS = {name: config for name, (config, _) in MODELS.items()}
RECIPES = {name: recipe for name, (_, recipe) in MODELS.items()}
