"""The optimized implementation of lesson 5's model: faster, equal results (test_fast.py).

    model = TransformerXL(config)
    reader = prepare(model)                 the model now trains faster
    model.eval()
    loss, memory = reader(x, memory, y)     called like the model, without gradients

What you read is what runs: `prepare` replaces only the text of the lessons that the
tests have compared, and only in models of exactly those classes.  After an edit of a
lesson, or with a part replaced, the model runs as it is written there.

Training.  Attention reads and writes its (T, K) scores once for each operation that
computes, shifts, scales or masks them.  So the shift is a view, the scale is applied to q
(T * C elements instead of T * K), sum and mask work in place, and the heads come first:
one product serves all lanes of a head.  No gradient is computed for the memory's rows.
Dropout takes 16 random bits per element.

Inference.  Lesson 5 caches hidden states, and each call projects all K = m + T of them
to keys and values, since in training W_kE and W_v learn from all.  Without gradients
these projections never change, so a Reader caches keys and values instead, and the
distance keys.  They are in a buffer with room at its end: most calls write their T and
copy nothing.  With M = 4, for a first call of 4 tokens and later calls of 2:

    [a a a a . . . .]    memory 1, returned by call 1, is a a a a
    [a a a a b b . .]    call 2 writes after them; memory 2 is the last 4, a a b b
    [a a a a b b c c]    call 3; after it, without room, the last 4 move to a new buffer

A returned memory never changes: a second call with memory 1 (to continue one text twice)
finds the room taken, and copies its M into a new buffer.  Arrays are in the order in which
products read them, which matters most for a single token.
"""
import hashlib
import inspect
import math
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

# ---- what may be replaced -----------------------------------------------------------

# of the text that test_fast.py has compared; when that text changes the test prints this
COMPARED = "3edb87c922d5904af83d3645b4be0c18a4c4948b434941c870d91f5910a2074c"


def checksum_of_lessons():
    """Return the SHA-256 of the lessons' text that is replaced or relied on here: functions, and
    classes with their present methods.
    """
    parts = (lesson_1.sinusoid, lesson_2.update_memory, lesson_4.rel_shift,
             lesson_4.relative_score, lesson_5.attention_mask, lesson_5.distance_encoding,
             lesson_5.RelativeAttention, lesson_5.Layer, lesson_5.TiedEmbedding,
             lesson_5.TransformerXL)
    text = "".join(inspect.getsource(z) for part in parts for z in (
        part, *filter(inspect.isfunction, vars(part).values())))
    return hashlib.sha256(text.encode()).hexdigest()


def is_lesson_5s(model):
    """Return whether the model is what lesson 5 builds from its config, before or after
    `replace_parts`: modules of the same classes and sizes, with the same numbers of
    parameters, hooks, own methods, ...  Dropout rates and dtypes may differ.
    """
    def describe(model):  # extra_repr has sizes, eps, whether there is a bias, ...
        return [(name, type(z), isinstance(z, (nn.Dropout, nn.ParameterList)) or z.extra_repr(),
                 {key: len(value) if isinstance(value, dict) else type(value)
                  for key, value in vars(z).items()}) for name, z in model.named_modules()]

    with torch.device("meta"):  # sizes without numbers
        made = lesson_5.TransformerXL(model.config)
    return describe(model) in (describe(made), describe(replace_parts(made)))


say_once = cache(print)  # a line that was printed before is not printed again


def prepare(model, plain=False):
    """Replace parts of the model, so that it trains faster, and return a Reader of it.

    Return the model itself, unchanged, if plain, or (then a line says so) if the lessons'
    text or the model is not what was compared.
    """
    if plain:
        return model
    if checksum_of_lessons() != COMPARED:
        reason = "lesson 5 (or an earlier one) was edited"
    elif not is_lesson_5s(model):
        reason = "the model is not exactly lesson 5's (another class or module, or a hook)"
    else:
        return Reader(replace_parts(model))
    say_once(f"{reason}, so the model runs as it is written there: slower to train and evaluate, "
             "several times slower to sample")
    return model


# ---- attention, for both ------------------------------------------------------------

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


# ---- training: attention, dropout ---------------------------------------------------

class Attention(nn.Module):
    """Lesson 5's attention, optimized, with the modules and parameter names of the original.

    It uses the weights of W_q, W_kE and W_v without calling these modules.
    """

    def __init__(self, attention):
        super().__init__()
        self.H, self.C = attention.H, attention.C
        for name, child in attention.named_children():  # W_q ... W_o, dropout_attention
            setattr(self, name, child)

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

    def forward(self, z):
        """Zero each element with probability p; scale the others to keep the mean."""
        if not self.training or self.p == 0:
            return z
        if z.device.type != "cpu":
            return super().forward(z)
        dropped = min(round(65536 * self.p), 65535)  # of 65,536 values that mean "drop"
        draws = torch.empty((z.numel() + 3) // 4, dtype=torch.int64, device="cpu")
        draws.random_(-(2**63), None)  # all 64 bits are random
        numbers = draws.view(torch.int16)[: z.numel()].view(z.shape)  # -32768 ... 32767
        kept = numbers.ge_(dropped - 32768)  # in place: 0 (dropped) or 1
        return z * kept.to(z.dtype).mul_(65536 / (65536 - dropped))


def replace_parts(model):
    """Replace lesson 5's attention and dropouts by those above; return the model.

    Parameters and the keys of the state dict stay; a second call changes nothing.
    """
    for module in model.modules():  # parents first, so the new attention is visited too
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
            elif type(child) is lesson_5.RelativeAttention:
                setattr(module, name, Attention(child))
    return model.train(model.training)  # also the new parts


# ---- inference ----------------------------------------------------------------------

BLOCK = 64  # queries that attend at a time: with same_length they see M + 64 keys


class ReadLayer:
    """A layer for inference: one matrix for q, k and v; the scale in q, u and v."""

    def __init__(self, layer, u, v, dtype):
        self.layer, self.attention, self.dtype = layer, layer.attention, dtype
        a, scale = layer.attention, 1 / math.sqrt(layer.attention.C)
        qkv = torch.cat([scale * a.W_q.weight, a.W_kE.weight, a.W_v.weight])
        self.W_qkv, self.W_o, self.W_1, self.W_2 = (self.matrix(weight) for weight in (
            qkv, a.W_o.weight, layer.W_1.weight, layer.W_2.weight))
        self.b_1, self.b_2 = layer.W_1.bias.to(dtype), layer.W_2.bias.to(dtype)
        self.u, self.v = scale * u[:, None, None], scale * v[:, None, None]

    def matrix(self, weight):
        """Transpose (out, in) -> (in, out), with the longer rows contiguous: a single row of
        h, as in generation, is multiplied up to twice as fast, others no slower.
        """
        weight = weight.to(self.dtype).t()
        return weight.contiguous() if weight.shape[0] <= weight.shape[1] else weight

    def project_distances(self, R):
        """Return the distance keys (H, C, K) of R (K, D)."""
        k_R = R @ self.attention.W_kR.weight.to(self.dtype).t()  # (K, H * C)
        return k_R.unflatten(-1, (self.attention.H, -1)).permute(1, 2, 0).contiguous()

    def read(self, h, keys, values, k_R, blocks):
        """Return the layer's output (B * T, D) for h (B * T, D).

        keys (H, B, C, K), values (H, B, K, C): those of h are written to their ends.
        """
        H, B, C, _ = keys.shape
        qkv = (h.to(self.dtype) @ self.W_qkv).view(B, -1, 3, H, C)
        q, k, value = qkv.permute(2, 3, 0, 1, 4)  # (H, B, T, C)
        T = q.shape[2]
        keys[..., -T:], values[..., -T:, :] = k.mT, value
        q_u, q_v = (q + self.u).to(self.dtype), (q + self.v).to(self.dtype)
        out = torch.cat([attend(
            q_u[:, :, queries], q_v[:, :, queries], keys[..., seen].mT, values[..., seen, :],
            k_R[..., -mask.shape[1] - 1 :].mT, mask, nn.Identity())
            for queries, seen, mask in blocks], dim=2)  # (H, B, T, C)
        out = out.permute(1, 2, 0, 3).reshape(B * T, H * C)
        h = self.layer.norm_1(h + out @ self.W_o)
        inner = torch.addmm(self.b_1, h.to(self.dtype), self.W_1).relu_()
        return self.layer.norm_2(h + torch.addmm(self.b_2, inner, self.W_2))


class Buffer:
    """Keys (N, H, B, C, room) and values (N, H, B, room, C), filled from the front."""

    def __init__(self, config, B, room, like):
        shape = config.n_layer, config.n_head, B
        self.keys = like.new_empty(*shape, config.d_head, room)
        self.values = like.new_empty(*shape, room, config.d_head)
        self.room, self.filled = room, 0


class Memory:
    """The memory of a Reader: a position in a buffer of keys and values, k_R of each
    layer, and the layers that made them.

        positions    [ ... | m of the past | T new | room ]
                           end - K                end         K = m + T
    """

    def __init__(self, model, past, h):
        """Make room for the T positions of h (B, T, D) after the last M of past."""
        config, (B, T, _) = model.config, h.shape
        M, kind = config.mem_len, h.device.type
        self.model, self.lanes, self.clamp_len = model, B, config.clamp_len
        if past:
            self.layers = past.layers
        else:
            cast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if cast else h.dtype
            u, v = (z.expand(config.n_layer, -1, -1) for z in (model.u, model.v))
            self.layers = [ReadLayer(*z, dtype) for z in zip(model.layers, u, v)]
        like = self.layers[0].W_qkv
        self.m = min(past.next_m, M) if past else 0
        self.K = self.m + T
        self.next_m = min(self.K, M)  # positions that the next call may see
        if past and past.end == past.buffer.filled <= past.buffer.room - T:
            self.buffer, self.end = past.buffer, past.end + T
        else:  # with room for next_m more: a full memory is copied once per M positions
            self.buffer, self.end = Buffer(config, B, self.K + self.next_m, like), self.K
            if self.m:
                kept = slice(past.end - self.m, past.end)
                self.buffer.keys[..., : self.m] = past.buffer.keys[..., kept]
                self.buffer.values[..., : self.m, :] = past.buffer.values[..., kept, :]
        self.buffer.filled = self.end
        if past and past.clamp_len == self.clamp_len and past.count > self.K:
            self.k_R, self.count = past.k_R, past.count
        else:  # all distances that a call can need in this buffer
            self.count = min(self.buffer.room, M + T) + 1
            R = lesson_5.distance_encoding(
                self.count, config.d_model, config.clamp_len, h.device).to(like)
            self.k_R = [z.project_distances(R) for z in self.layers]
        self.blocks = list(self.in_blocks(T))

    def of_layer(self, n):
        """Return layer n's keys, values and k_R, and the blocks."""
        here = slice(self.end - self.K, self.end)
        return (self.buffer.keys[n, ..., here], self.buffer.values[n, ..., here, :],
                self.k_R[n], self.blocks)

    def in_blocks(self, T):
        """Yield for each block of t queries their slice, the slice of the k keys that they
        may see, and the mask (t, k).
        """
        M, same_length = self.model.config.mem_len, self.model.config.same_length
        for start in range(0, T, BLOCK):
            t, end = min(BLOCK, T - start), self.m + min(start + BLOCK, T)
            first = max(0, self.m + start - M) if same_length else 0
            mask = lesson_5.attention_mask(
                t, end - first - t, M, same_length, self.model.u.device)
            yield slice(start, start + t), slice(first, end), mask


class Reader:
    """Lesson 5's model in eval mode with cached keys and values, called like the model.

    Its memory is opaque, and has copies of the weights: after they change begin with None.
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
        fits = isinstance(memory, Memory) and (memory.model, memory.lanes) == (self.model, len(x))
        if not (memory is None or fits):
            raise ValueError("memory must be None or what a Reader of this model has returned "
                             f"for {len(x)} lanes, got {validate.describe(memory)}")

    @torch.no_grad()
    def __call__(self, x, memory=None, y=None, last_only=False):
        """Return logits (B, T, V) or, with y, losses (B, T), and the memory, as the model."""
        self.check(x, memory, y)
        model = self.model
        h = model.embedding(x) * math.sqrt(model.config.d_model)  # (B, T, D)
        memory, shape, h = Memory(model, memory, h), h.shape, h.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):  # the weights are cast
            for n, layer in enumerate(memory.layers):
                h = layer.read(h, *memory.of_layer(n))
        h = h.view(shape)
        if y is not None:
            return model.embedding.losses(h, y), memory
        return model.embedding.logits(h[:, -1:] if last_only else h), memory
