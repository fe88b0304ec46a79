"""The optimized form of lesson 5's model, where it gives the lessons' numbers (test_fast.py).

    model = TransformerXL(config)
    reader = prepare(model)                 the model now trains faster
    model.eval()
    loss, memory = reader(x, memory, y)     called like the model, without gradients

What you read is what runs.  `prepare` compares: a small model of the same class and a Reader of it
must give the same losses and logits.  After an edit that changes them, or with a part replaced, the
model runs as it is written.  The training half below replaces only the text that the tests have
compared; comments and docstrings do not count.

Training.  Attention reads and writes its (T, K) scores once for each operation that computes,
shifts, scales or masks them.  So the shift is a view, the scale is applied to q (T * C elements
instead of T * K), sum and mask work in place, and the heads come first: one product serves all
lanes of a head.  No gradient is computed for the memory's rows.  Dropout takes 16 random bits per
element.

Inference.  Lesson 5 caches hidden states, and each call projects all K = m + T of them to keys and
values, since in training W_kE and W_v learn from all.  Without gradients these projections never
change, so a Reader computes each once and caches it, and so it does with the distance keys.  All
else, the score, the mask, the encoding, is the lessons' own.
"""
import hashlib
import inspect
import io
import math
import textwrap
import tokenize
from dataclasses import replace
from functools import cache
from importlib import import_module

import torch
import torch.nn as nn
import torch.nn.functional as F

from support import validate

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
lesson_4 = import_module("04_rel_shift")
lesson_5 = import_module("05_full_model")
say_once = cache(print)  # a line that was printed before is not printed again

# ---- what may be replaced -----------------------------------------------------------------------

# of the code that test_fast.py has compared; when that code changes the test prints this
COMPARED = "47b8714cb2c447e3c8071f7a5c1997f795b19c59cdecf1491ad81dc6a8f434f4"


def prepare(model, plain=False):
    """Replace parts of the model, so that it trains faster, and return a Reader of it.

    Return the model itself, unchanged, if plain, or (then a line says so) if a Reader of its class
    gives other numbers, or its modules are not those that its class makes.
    """
    if plain:
        return model
    c = model.config
    parts = c.untie_r, len(c.cutoffs), c.div_val, c.tie_projections
    if not (is_as_made(model) and agrees(type(model), *parts)):
        say_once("the model runs as it is written, since training/fast.py would not give its "
                 "numbers: slower to train and evaluate, several times slower to sample")
        return model
    if type(model) is lesson_5.TransformerXL and checksum_of_lessons() == COMPARED:
        replace_parts(model)
    else:
        say_once("training runs as the lessons are written, since training/fast.py does not know "
                 "this code: slower")
    return Reader(model)


@cache
@torch.no_grad()
def agrees(kind, untie_r, bands, div_val, tie_projections):
    """Return whether a small model of this class and a Reader of it give the same numbers."""
    small = lesson_5.Config(
        11 + 2 * bands, n_layer=2, d_model=2 * max(3, div_val**bands), n_head=3, d_head=4,
        d_inner=7, mem_len=5, cutoffs=tuple(range(4, 4 + 3 * bands, 3)), div_val=div_val,
        tie_projections=tie_projections, untie_r=untie_r)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        try:
            model = kind(small).double().eval()
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
        except Exception:  # another constructor, parts with other names, ...
            return False
    return True


def is_as_made(model):
    """Return whether the model's modules are what its class makes from its config, before or after
    `replace_parts`: the same classes and sizes, with the same numbers of parameters, hooks, own
    methods, ...  Dropout rates and dtypes may differ.
    """
    def describe(model):  # extra_repr has sizes, eps, whether there is a bias, ...
        return [(name, type(z), isinstance(z, (nn.Dropout, nn.ParameterList)) or z.extra_repr(),
                 {key: len(value) if isinstance(value, dict) else type(value)
                  for key, value in vars(z).items()}) for name, z in model.named_modules()]

    try:
        with torch.device("meta"):  # sizes without numbers
            made = type(model)(model.config)
    except TypeError:  # another constructor
        return False
    return describe(model) in (describe(made), describe(replace_parts(made)))


def checksum_of_lessons():
    """Return the SHA-256 of the lessons' code that training replaces, of all but its comments and
    docstrings: functions, and classes with their present methods.
    """
    parts = (lesson_1.sinusoid, lesson_2.update_memory, lesson_4.rel_shift,
             lesson_4.relative_score, lesson_5.attention_mask, lesson_5.distance_encoding,
             lesson_5.RelativeAttention, lesson_5.Layer, lesson_5.TiedEmbedding,
             lesson_5.TransformerXL)
    text = "".join(code_of(textwrap.dedent(inspect.getsource(z))) for part in parts for z in (
        part, *filter(inspect.isfunction, vars(part).values())))
    return hashlib.sha256(text.encode()).hexdigest()


def code_of(text):
    """Return Python text without comments and docstrings, and with { } for its blocks."""
    kept, before = [], tokenize.NEWLINE
    blocks = {tokenize.INDENT: "{", tokenize.DEDENT: "}"}
    for kind, string, *_ in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind in (tokenize.COMMENT, tokenize.NL):
            continue
        if kind != tokenize.STRING or before not in (tokenize.NEWLINE, tokenize.INDENT):
            kept.append(blocks.get(kind, string.strip()))  # all but a docstring
        before = kind
    return " ".join(filter(None, kept))


# ---- training: attention, dropout ---------------------------------------------------------------

def shift_padded(x):
    """Shift the rows of a product that already has lesson 4's extra cell in front of each.

    (..., T, K + 1) -> (..., T, K): drop the first T elements, read the rest in rows of K.
    A view: nothing is copied.  As in lesson 4, cells after distance 0 must be masked.
    Here an element is 10 * query + distance, and K = 5; lesson 4 pads at 5 and 15.

    >>> shift_padded(torch.tensor([[5, 4, 3, 2, 1, 0], [15, 14, 13, 12, 11, 10]]))
    tensor([[ 3,  2,  1,  0, 15],
            [14, 13, 12, 11, 10]])
    """
    T, width = x.shape[-2:]
    return x.flatten(-2)[..., T:].unflatten(-1, (T, width - 1))


def attend(q_u, q_v, k, value, k_R, mask, dropout):
    """Return lesson 5's attention (H, B, T, C) from scaled queries, heads first.

    q_u, q_v (H, B, T, C) are q + u and q + v, k and value (H, B, K, C), mask (T, K).
    k_R (H, K + 1 or more, C), by descending distance, has a row more than there are keys:
    its column in the product is the cell that lesson 4 pads, dropped or masked like it.
    Rows after distance 0 only make k_R longer; their columns are masked or cut off.
    """
    B, T = q_u.shape[1:3]
    content = q_u @ k.mT  # (a) + (c), (H, B, T, K)
    # (b) + (d): one product for all lanes of a head, which share its k_R
    position = (q_v.flatten(1, 2) @ k_R.mT).unflatten(1, (B, T))  # (H, B, T, K + 1 or more)
    score = content.add_(shift_padded(position)[..., : k.shape[2]])
    # in place (_), as the backward pass needs neither product; detached, as a masked
    # score has probability 0, so its gradient is 0 without the mask
    score.detach().masked_fill_(mask, -math.inf)
    return dropout(score.softmax(-1)) @ value


class Attention(lesson_5.RelativeAttention):
    """Lesson 5's attention, optimized.  It uses the weights of W_q, W_kE and W_v without calling
    these modules.
    """

    def forward(self, h, memory, R, u, v, mask):
        """Return lesson 5's result, from one product for h and one for memory."""
        H, C = self.H, self.C
        W_kv = torch.cat([self.W_kE.weight, self.W_v.weight])  # (2 * H * C, D)
        qkv = F.linear(h, torch.cat([self.W_q.weight, W_kv]))  # (B, T, 3 * H * C)
        q, *new = qkv.unflatten(-1, (3, H, C)).permute(2, 3, 0, 1, 4)  # (H, B, T, C)
        old = F.linear(memory, W_kv).unflatten(-1, (2, H, C)).permute(2, 3, 0, 1, 4)
        k, value = (torch.cat(z, dim=2) for z in zip(old, new))  # (H, B, K, C)
        k_R = self.W_kR(R).unflatten(-1, (H, C)).transpose(0, 1)  # (H, K, C)
        # a multiple of 8 rows: the product's rows are then aligned in memory, also in 16 bits
        k_R = F.pad(k_R, (0, 0, 1, -(k_R.shape[1] + 1) % 8))  # (H, K + 1 or more, C)
        scale = 1 / math.sqrt(C)
        q, u, v = scale * q, scale * u[:, None, None], scale * v[:, None, None]
        out = attend(q + u, q + v, k, value, k_R, mask, self.dropout_attention)
        return self.W_o(out.permute(1, 2, 0, 3).flatten(2))


class Dropout(nn.Dropout):
    """nn.Dropout, on a CPU with 16 random bits per element: p is a multiple of 1 / 65536."""

    def forward(self, input):
        """Zero each element with probability p; scale the others to keep the mean."""
        if not self.training or self.p == 0:
            return input
        if input.device.type != "cpu":
            return super().forward(input)
        dropped = min(round(65536 * self.p), 65535)  # of 65,536 values that mean "drop"
        draws = torch.empty((input.numel() + 3) // 4, dtype=torch.int64, device="cpu")
        draws.random_(-(2**63), None)  # all 64 bits are random
        numbers = draws.view(torch.int16)[: input.numel()].view(input.shape)  # -32768 ... 32767
        kept = numbers.ge_(dropped - 32768)  # in place: 0 (dropped) or 1
        return input * kept.to(input.dtype).mul_(65536 / (65536 - dropped))


def replace_parts(model):
    """Give lesson 5's attentions and dropouts the classes above; return the model.

    Modules, parameters and the keys of the state dict stay; a second call changes nothing.
    """
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
        elif type(module) is lesson_5.RelativeAttention:
            module.__class__ = Attention
    return model


# ---- inference ----------------------------------------------------------------------------------

BLOCK = 64  # queries that attend at a time


class Memory:
    """The memory of a Reader: keys and values of the last m positions, and distance keys."""

    def __init__(self, model, lanes, past, k_R, clamp_len):
        self.model, self.lanes = model, lanes
        self.past = past  # N pairs (k, value), each (B, H, m, C)
        self.k_R, self.clamp_len = k_R, clamp_len  # N tensors (H, n, C), made with this clamp_len


class Reader:
    """Lesson 5's model in eval mode with cached keys and values, called like the model.

    Its memory is opaque.  After the weights change begin with None.
    """

    def __init__(self, model):
        self.model = model

    # delegated to the model
    training = property(lambda self: self.model.training)
    u = property(lambda self: self.model.u)
    config = property(lambda self: self.model.config,
                      lambda self, config: setattr(self.model, "config", config))

    def train(self, mode=True):
        """Set the model's mode."""
        self.model.train(mode)
        return self

    def eval(self):
        """Set the model's eval mode."""
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
        M, same_length = self.config.mem_len, self.config.same_length
        for start in range(0, T, BLOCK):
            t, end = min(BLOCK, T - start), m + min(start + BLOCK, T)
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
                q[:, :, queries], *(z[:, :, seen] for z in new), k_R[n][:, -mask.shape[1] :],
                u[n], v[n], mask) for queries, seen, mask in blocks], dim=1)
            h = layer.norm_1(h + a.W_o(out))
            h = layer.norm_2(h + layer.W_2(layer.relu(layer.W_1(h))))
        memory = Memory(model, B, past, k_R, c.clamp_len)
        if y is not None:
            return model.embedding.losses(h, y), memory
        return model.embedding.logits(h[:, -1:] if last_only else h), memory
