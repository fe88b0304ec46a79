"""Checks (ValueError) of input that would otherwise fail far from its cause, or silently."""
from dataclasses import fields
from numbers import Integral, Real
from reprlib import repr as short

import torch

MOST = 2**63 - 1  # the largest integer of torch
KINDS = {int: Integral, float: Real, tuple: (tuple, list)}  # NumPy's numbers are also numbers


def types(settings):
    """Raise ValueError if a field of a dataclass has neither its type nor its default."""
    for field in fields(settings):
        kind, value = field.type, getattr(settings, field.name)
        if value is not field.default and (not isinstance(value, KINDS.get(kind, kind))
                                           or isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{field.name} must be of type {kind.__name__}, got {short(value)}")


def above_0(name, value):
    """Raise ValueError unless a number is above 0."""
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")


def config(c):
    """Raise ValueError for sizes that fit no Transformer-XL."""
    types(c)
    for field in fields(c):
        name, value = field.name, getattr(c, field.name)
        lowest = {"mem_len": 0, "clamp_len": -MOST}.get(name, 1)
        if field.type is int and not lowest <= value <= MOST:
            bound = f"at least {lowest}" if value < lowest else f"at most {MOST}"
            raise ValueError(f"{name} must be {bound}, got {value}")
        if name.startswith("dropout") and not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
    if not 0 < c.init_std < float("inf"):
        raise ValueError(f"init_std must be above 0 and finite, got {c.init_std}")
    if c.d_model % 2:
        raise ValueError(f"d_model must be even (sine and cosine halves), got {c.d_model}")
    edges = (0, *c.cutoffs, c.vocab_size)  # of the adaptive softmax's bands
    if any(first >= end for first, end in zip(edges, edges[1:])):
        raise ValueError("cutoffs must ascend, above 0 and below the vocabulary size "
                         f"{c.vocab_size}, got {short(c.cutoffs)}")
    if c.div_val > 1 and not c.cutoffs:
        raise ValueError(f"div_val {c.div_val} narrows the bands, so it needs cutoffs")
    if c.d_model // c.div_val ** len(c.cutoffs) < 1:
        raise ValueError(f"d_model {c.d_model} divided by div_val {c.div_val} once for each of "
                         f"{len(c.cutoffs)} cutoffs leaves no width")


def call(model, x, memory, y):
    """Raise ValueError unless x, y (B, T) and memory, N tensors (B, m, D), fit the model."""
    tokens(model, x, y)
    if memory is None:
        return
    config, device = model.config, model.u.device
    if not (isinstance(memory, list) and len(memory) == config.n_layer):
        raise ValueError(f"memory must be a list of {config.n_layer} tensors, one for each layer; "
                         f"got {type(memory).__name__}")
    for past in memory:
        if not isinstance(past, torch.Tensor) or past.dim() != 3 or (
                (past.dtype, past.device) != (model.u.dtype, device)
                or past.shape != (len(x), memory[0].shape[1], config.d_model)):
            raise ValueError(f"memory must be (B, m, D) = ({len(x)}, m, {config.d_model}) in each "
                             f"layer, {model.u.dtype} on {device}, got {describe(past)}")


def tokens(model, x, y):
    """Raise ValueError unless x and y are int64 (B, T) on the model's device, in its vocabulary."""
    device, V = model.u.device, model.config.vocab_size
    for given in (x,) if y is None else (x, y):
        if not (isinstance(given, torch.Tensor) and given.shape == x.shape and 0 not in given.shape
                and (given.dtype, given.dim(), given.device) == (torch.int64, 2, device)):
            raise ValueError("x and y must be int64 of one shape (B, T), both at least 1, on the "
                             f"model's {device}; got {describe(given)}, x is {describe(x)}")
        if given.device.type == "cpu":  # on a GPU every call would wait for the values
            for token in (given.min().item(), given.max().item()):
                if not 0 <= token < V:
                    raise ValueError(f"token {token} outside vocabulary of {V}")


def describe(given):
    """Describe what was passed to a call, for its error message."""
    if not isinstance(given, torch.Tensor):
        return type(given).__name__
    return f"{given.dtype} {tuple(given.shape)} on {given.device}"
