"""The sizes of a Transformer-XL, those of the paper by name, and a refusal of what does not fit."""
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

import torch

from support.evaluation_memory import EvaluationMemory

MOST = 2**63 - 1  # the largest integer that torch knows
KINDS = {int: Integral, float: Real, tuple: (tuple, list)}  # so NumPy's numbers are numbers, too


def check_types(settings):
    """ValueError if a field of a dataclass holds another type than it names, its default aside."""
    for field in fields(settings):
        kind, value = field.type, getattr(settings, field.name)
        if value is not field.default and (not isinstance(value, KINDS.get(kind, kind))
                                           or isinstance(value, bool) and kind is not bool):
            got = " ".join(repr(value).split())[:80]  # one line, whatever it is
            raise ValueError(f"{field.name} must be of type {kind.__name__}, got {got}")


@dataclass(frozen=True)
class Config:
    """What a model is.  mem_len, same_length and clamp_len are read at every call and touch no
    weight: a trained model is evaluated at other lengths by `model.config = replace(model.config,
    mem_len=2100, ...)`.
    """

    vocab_size: int  # V
    n_layer: int = 4  # N
    d_model: int = 128  # D
    n_head: int = 2  # H
    d_head: int = 64  # C
    d_inner: int = 512  # FF, the width inside the feed-forward network
    dropout: float = 0.0
    dropout_attention: float = 0.0
    untie_r: bool = False  # u and v for each layer, not one pair for all (the authors' option)
    mem_len: int = 128  # M, in tokens; 0: no memory
    same_length: bool = False  # every query sees M + 1 keys
    clamp_len: int = 0  # distances beyond are treated as this one; 0 or less: no clamp
    # of the adaptive softmax (adaptive_softmax.py)
    cutoffs: tuple = ()  # where the vocabulary is cut into bands; (): one softmax over all words
    div_val: int = 1  # the rows of band i are D / div_val^i wide
    tie_projections: bool = True  # one matrix for both ways of a tail; read if div_val > 1

    def __post_init__(self):
        check_types(self)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            lowest = {"mem_len": 0, "clamp_len": -MOST}.get(name, 1)
            if field.type is int and not lowest <= value <= MOST:
                bound = f"at least {lowest}" if value < lowest else f"at most {MOST}"
                raise ValueError(f"{name} must be {bound}, got {value}")
            if name.startswith("dropout") and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even (sine and cosine halves), got {self.d_model}")
        widest = max(self.vocab_size, 2 * self.n_head * self.d_head, self.d_inner, self.d_model)
        if self.d_model * widest > 2**48:
            raise ValueError(f"d_model {self.d_model} times {widest}, a matrix of this model, is "
                             "more than any machine holds")
        edges = (0, *self.cutoffs, self.vocab_size)
        if not all(isinstance(edge, Integral) for edge in edges):
            raise ValueError(f"cutoffs must be integers, got {self.cutoffs}")
        if any(first >= end for first, end in zip(edges, edges[1:])):
            raise ValueError("cutoffs must ascend, above 0 and below the vocabulary size "
                             f"{self.vocab_size}, got {self.cutoffs}")
        if self.div_val > 1 and not self.cutoffs:
            raise ValueError(f"div_val {self.div_val} narrows the bands, so it needs cutoffs")
        if self.d_model // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(f"d_model {self.d_model} divided by div_val {self.div_val} once for "
                             f"each of {len(self.cutoffs)} cutoffs leaves no width")


# The training values of the official scripts, u and v shared by the layers.  vocab_size is that of
# the published parameter counts; train.py puts its corpus's own there (205 for enwik8 with
# newlines).  Three have dimensions of ours, since the paper gives a number of parameters only:
# enwik8-18L (88M), lm1b-medium (0.46B) and ptb (24M; with d_inner 900, as in the authors' later
# code, it would be 26.4M).  lm1b-base is the model of the authors' script.  wt103-large has 285M
# parameters where the paper says 257M.  `tiny` and the two laptops are for a CPU.
CONFIGS = {
    "tiny": Config(205, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16),
    "laptop": Config(205),
    "laptop-words": Config(10_000, dropout=0.1, mem_len=64),
    "enwik8-12L": Config(204, n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048,
                         dropout=0.1, mem_len=512),
    "enwik8-18L": Config(204, n_layer=18, d_model=640, n_head=10, d_head=64, d_inner=2208,
                         dropout=0.1, mem_len=512),
    "enwik8-24L": Config(204, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072,
                         dropout=0.15, dropout_attention=0.15, mem_len=768),
    "wt103-standard": Config(267_735, n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100,
                             dropout=0.1, mem_len=150, cutoffs=(20_000, 40_000, 200_000)),
    "wt103-large": Config(267_735, n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096,
                          dropout=0.2, dropout_attention=0.2, mem_len=384,
                          cutoffs=(20_000, 40_000, 200_000), div_val=4),
    "lm1b-base": Config(793_471, n_layer=18, d_model=1024, n_head=8, d_head=128, d_inner=4096,
                        mem_len=32, cutoffs=(60_000, 100_000, 640_000), div_val=4,
                        tie_projections=False),
    "ptb": Config(10_000, n_layer=16, d_model=380, n_head=10, d_head=38, d_inner=704, dropout=0.2,
                  dropout_attention=0.2, mem_len=70),
}
CONFIGS["text8-12L"] = replace(CONFIGS["enwik8-12L"], vocab_size=27)
CONFIGS["text8-24L"] = replace(CONFIGS["enwik8-24L"], vocab_size=27)
CONFIGS["lm1b-medium"] = replace(CONFIGS["lm1b-base"], n_layer=24, d_inner=4608)
CONFIGS["lm1b-large"] = replace(CONFIGS["lm1b-base"], n_layer=24, d_model=1280, n_head=16,
                                d_head=80, d_inner=8192, dropout=0.05, dropout_attention=0.05)


def described(z):
    """What a call was handed, for its refusal."""
    if not isinstance(z, torch.Tensor):
        return type(z).__name__
    layout = "" if z.layout == torch.strided else f", {z.layout}"
    return f"{z.dtype} {tuple(z.shape)} on {z.device}{layout}"


def check(x, memory, y, model, evaluating):
    """Refuse, with the numbers, what would fail far from its cause or not at all: ValueError."""
    config, device = model.config, model.u.device
    for z in (x,) if y is None else (x, y):
        if not (isinstance(z, torch.Tensor) and z.shape == x.shape and 0 not in z.shape
                and (z.dtype, z.dim(), z.device, z.layout)
                == (torch.int64, 2, device, torch.strided)):
            raise ValueError("x and y must be int64 of one shape (B, T), both at least 1, on the "
                             f"model's {device}; got {described(z)}, x is {described(x)}")
        if z.device.type == "cpu":  # on a GPU each call would wait for the answer
            for token in (z.min().item(), z.max().item()):
                if not 0 <= token < config.vocab_size:
                    raise ValueError(f"token {token} outside vocabulary of {config.vocab_size}")
    if memory is None:
        return
    if evaluating:
        if not isinstance(memory, EvaluationMemory) or memory.model is not model:
            raise ValueError("in eval mode under no_grad, memory must be what such a call of this "
                             f"model returned, or None; got {type(memory).__name__}")
        if memory.lanes != len(x):
            raise ValueError(f"memory is that of {memory.lanes} lanes, x has {len(x)}")
        return
    if not (isinstance(memory, list) and len(memory) == config.n_layer):
        raise ValueError(f"memory must be a list of {config.n_layer} tensors, one for each layer, "
                         f"with gradients on or in training mode; got {type(memory).__name__}")
    for rows in memory:
        if not isinstance(rows, torch.Tensor) or (
                (rows.dtype, rows.device, rows.layout) != (model.u.dtype, device, torch.strided)
                or rows.dim() != 3
                or rows.shape != (len(x), memory[0].shape[1], config.d_model)):
            raise ValueError(f"memory must be (B, m, D) = ({len(x)}, m, {config.d_model}) in each "
                             f"layer, {model.u.dtype} on {device}, got {described(rows)}")
