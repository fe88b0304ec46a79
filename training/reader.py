"""A Reader of lesson 5's model: evaluation and generation, faster, where the numbers are the same.

    reader = reader_of(model)
    model.eval()
    loss, memory = reader(x, memory, y)     called like the model, without gradients

Lesson 5 caches hidden states, and each call projects all K = m + T of them to keys and values,
since in training W_kE and W_v learn from all.  Without gradients these projections never change, so
a Reader computes each once and caches it, and so it does with the distance keys.  All else, the
score, the mask, the encoding, is the lessons' own.
"""
import math
from collections import namedtuple
from dataclasses import replace
from functools import cache
from importlib import import_module

import torch
import torch.nn as nn

from support import validate

lesson_5 = import_module("05_full_model")
say_once = cache(print)  # a line that was printed before is not printed again


def reader_of(model, plain=False):
    """Return a Reader of the model, or the model itself if plain.

    It also is the model itself, and a line says so, if its class is not lesson 5's, or if a Reader
    gives other numbers than lesson 5, as after some edits of it.  A Reader sees the class: it
    misses changes of one model, such as a hook or weight_norm.
    """
    if plain:
        return model
    c = model.config
    parts = c.untie_r, len(c.cutoffs), c.div_val, c.tie_projections
    if type(model) is lesson_5.TransformerXL and agrees(*parts):
        return Reader(model)
    say_once("the model runs as it is written, since training/reader.py would not give its "
             "numbers: slower to evaluate, several times slower to sample on a CPU")
    return model


@cache
@torch.no_grad()
def agrees(untie_r, bands, div_val, tie_projections):
    """Return whether a small model of lesson 5 and a Reader of it give the same numbers."""
    small = lesson_5.Config(
        11 + 2 * bands, n_layer=2, d_model=2 * max(3, div_val**bands), n_head=3, d_head=4,
        d_inner=7, mem_len=5, cutoffs=tuple(range(4, 4 + 3 * bands, 3)), div_val=div_val,
        tie_projections=tie_projections, untie_r=untie_r)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        try:
            model = lesson_5.TransformerXL(small).double().eval()
            for weight in model.parameters():
                nn.init.normal_(weight, std=0.5)
            for change in ({}, {"same_length": True}, {"clamp_len": 3}):
                model.config, past, cached = replace(small, **change), None, None
                for x in torch.randint(small.vocab_size, (4, 2, 3)):
                    for y, last_only in ((None, True), (None, False), (x, False)):
                        out, memory = model(x, past, y, last_only)
                        found, new = Reader(model)(x, cached, y, last_only)
                        if not torch.allclose(out, found, rtol=0, atol=1e-9):
                            return False
                    past, cached = memory, new
        except Exception:  # parts with other names, ...
            return False
    return True


BLOCK, GPU_BLOCK = 64, 512  # queries that attend at a time
# the memory of a Reader: past is N pairs (k, value), each (B, H, m, C); k_R is N tensors (H, n, C)
Memory = namedtuple("Memory", "model lanes past k_R clamp_len")  # k_R was made with this clamp_len


class Reader:
    """Lesson 5's model in eval mode with cached keys and values, called like the model.

    Its memory is opaque.  After the weights change begin with None.
    """

    def __init__(self, model):
        self.model = model

    training = property(lambda self: self.model.training)
    u = property(lambda self: self.model.u)
    config = property(lambda self: self.model.config,
                      lambda self, config: setattr(self.model, "config", config))

    def train(self, mode=True):
        """Set the model's mode."""
        self.model.train(mode)
        return self

    def eval(self):
        """Set the model's mode to evaluation."""
        return self.train(False)

    def check(self, x, memory, y):
        """Raise ValueError unless the model is in eval mode, and x, y and memory fit it."""
        validate.tokens(self.model, x, y)
        if self.model.training:
            raise ValueError("a Reader needs eval mode, since it caches what dropout would "
                             "change; call eval() first")
        if memory is not None and not (isinstance(memory, Memory) and memory.model is self.model):
            raise ValueError("memory must be None or what a Reader of this model has returned, "
                             f"got {validate.describe(memory)}")
        if memory is not None and memory.lanes != len(x):
            raise ValueError(f"memory has {memory.lanes} lanes, x has {len(x)}")

    def distance_keys(self, memory, K, T, like):
        """Return k_R of each layer, (H, n, C), for n >= K distances: the cached ones if they do."""
        c = self.config
        if memory and memory.clamp_len == c.clamp_len and memory.k_R[0].shape[1] >= K:
            return memory.k_R
        n = max(K, min(c.mem_len + T, 2 * K))
        R = lesson_5.distance_encoding(n, c.d_model, c.clamp_len, like.device).to(like)
        return [layer.attention.heads(layer.attention.W_kR(R)) for layer in self.model.layers]

    def in_blocks(self, T, m, device):
        """Yield, for each block of queries, its slice, the slice of the keys that it may see, and
        the mask: with same_length 64 queries see M + 64 keys, not M + T.
        """
        block = BLOCK if device.type == "cpu" else GPU_BLOCK
        M, same_length = self.config.mem_len, self.config.same_length
        for start in range(0, T, block):
            t, end = min(block, T - start), m + min(start + block, T)
            first = max(0, m + start - M) if same_length else 0
            mask = lesson_5.attention_mask(t, end - first - t, M, same_length, device)
            yield slice(start, start + t), slice(first, end), mask

    @torch.no_grad()
    def __call__(self, x, memory=None, y=None, last_only=False):
        """Return logits (B, T, V) or, with y, losses (B, T), and the memory, as the model."""
        self.check(x, memory, y)
        model, c, (B, T) = self.model, self.config, x.shape
        h = model.embedding(x) * math.sqrt(c.d_model)  # (B, T, D)
        m = min(memory.past[0][0].shape[2], c.mem_len) if memory else 0
        k_R = self.distance_keys(memory, m + T, T, h)
        u, v = (bias.expand(c.n_layer, -1, -1) for bias in (model.u, model.v))
        past, blocks = [], list(self.in_blocks(T, m, x.device))
        for n, layer in enumerate(model.layers):
            a = layer.attention
            q, *new = (a.heads(W(h)) for W in (a.W_q, a.W_kE, a.W_v))  # (B, H, T, C) each
            if m:
                new = [torch.cat([old[:, :, -m:], now], dim=2)  # (B, H, K, C)
                       for old, now in zip(memory.past[n], new)]
            past.append([z[:, :, max(0, m + T - c.mem_len) :] for z in new])
            out = torch.cat([a.attend(
                q[:, :, queries], *(z[:, :, seen] for z in new), k_R[n][:, -mask.shape[1] :].to(q),
                u[n], v[n], mask) for queries, seen, mask in blocks], dim=1)
            h = layer.norm_1(h + a.W_o(out))
            h = layer.norm_2(h + layer.W_2(layer.relu(layer.W_1(h))))
        memory = Memory(model, B, past, k_R, c.clamp_len)
        if y is not None:
            return model.embedding.losses(h, y), memory
        return model.embedding.logits(h[:, -1:] if last_only else h), memory
