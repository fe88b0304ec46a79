"""The same model in another order of work: faster, and equal (tests: test_fast.py).

Lesson 5 is written to be read; here is what costs time, for those who want to know.

    model = TransformerXL(config)
    reader = prepared(model)                trains faster from here on; reader reads faster
    model.eval()
    loss, memory = reader(x, memory, y)     called like the model, without gradients

What you read is what runs: `prepared` stands in only for the text of the lessons that
the tests have compared, and only for models of exactly those classes.  Whoever edits a
lesson, or replaces a part of a model, gets the model as it is written.

Training.  Attention reads and writes its (T, K) scores once for each step that makes,
moves, scales or masks them.  The numbers say how many times as fast each change is: the
time without it divided by the time with it.

                                                            times as fast in
                                                                   float32   bf16
    Attention.attend, against lesson 5's                             1.23    1.29
      of it: shift as a view, nothing is padded or copied            1.11    1.02
             heads in front, one product for all lanes of a head;
               the scale on q, T * C numbers instead of T * K        1.06    1.11
             sum and mask in place, no gradient through the mask     1.04    1.14
    Attention.forward: no gradient for the memory's rows             1.06    1.06
    Dropout from 16 random bits a number, against torch's            3.2     3.5
    DropoutReLU: one tensor is kept, not two                         1.00    1.01

Reading.  In training each call projects all K = M + T positions to keys and values,
since W_kE and W_v learn from all.  Without gradients earlier calls have projected M of
them, and the distances too: with M = 2,100 and T = 80 keeping them leaves 27 times less
to project, with T = 1 over 2,000 times.  Keys and values lie in a buffer with room at
its end, so most calls write their T and copy none.  M = 4; the first call reads 4
tokens, each later one 2:

    [a a a a . . . .]    memory 1: the caller holds the 4 of call 1
    [a a a a b b . .]    call 2 writes after them; memory 2 is the last 4, a a b b
    [a a a a b b c c]    call 3; then, no room left, the last 4 move to a new buffer

What a caller holds never changes: a second call after memory 1 (beams, two ways to go
on) finds the room taken, and copies its M into a buffer of its own.

What is left is reading numbers (T = 1) and products.  So the arrays are laid out in the
order in which these operations read them, and that is again so many times as fast:

                                                            times as fast in
                                                                   float32   bf16
    a row times W_1, its longer side in one piece                     2.7     1.0
    scores of a query: k_R as rows of K numbers, not of C             3.5     8.3
    480 tokens a call: queries in blocks of 64, since under
      same_length each block sees M + 64 keys, not M + T              1.8

How much all of it brings: training/README.md.  Measured on a core of an AMD EPYC with
AVX512-bf16, torch 2.13: `python experiments/benchmark.py --threads 1 --repetitions 30`
with --what parts or reading, and --dtype bf16.
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
COMPARED = "fd1ef2e35f40d719ef855bf272b8cd3a82caf8d6fa445fad9aeeadcce314ef39"


def checksum_of_lessons():
    """Return the SHA-256 of the text whose work is done here in another order, or which
    that order relies on: of functions, and of classes with the methods that they have now.
    """
    parts = (lesson_1.sinusoid, lesson_2.update_memory, lesson_4.rel_shift,
             lesson_4.relative_score, lesson_5.attention_mask, lesson_5.distance_encoding,
             lesson_5.RelativeAttention, lesson_5.Layer, lesson_5.TiedEmbedding,
             lesson_5.TransformerXL)
    text = "".join(inspect.getsource(z) for part in parts for z in (
        part, *filter(inspect.isfunction, vars(part).values())))
    return hashlib.sha256(text.encode()).hexdigest()


def describe(model):
    """List what two models must have in common: of each module its name, class and sizes,
    and how many parameters, hooks, ... it has.  Rates of dropout and dtypes may differ.
    """
    return [(name, type(z), isinstance(z, (nn.Dropout, nn.ParameterList)) or z.extra_repr(),
             {key: len(value) if isinstance(value, dict) else type(value)
              for key, value in vars(z).items()}) for name, z in model.named_modules()]


def is_lesson_5s(model):
    """Tell whether the model is what lesson 5 makes of its config, or `replace_parts` of
    that: no subclass, no other module, no hook, no method of its own.
    """
    with torch.device("meta"):  # sizes without numbers
        made = lesson_5.TransformerXL(model.config)
    return describe(model) in (describe(made), describe(replace_parts(made)))


@cache
def say_once(line):
    """Print the line, unless it was printed before."""
    print(line)


def prepared(model, plain=False):
    """Make the model train faster, in place, and return what reads it faster: a Reader.

    The model itself is returned, unchanged, if plain; and, with a line that says so, if
    the lessons' text or the model is another than what was compared.
    """
    if plain:
        return model
    if checksum_of_lessons() != COMPARED:
        say_once("lesson 5 (or an earlier one) was edited, so the model runs as it is written "
                 "there: slower to train, several times slower to evaluate and sample")
        return model
    if not is_lesson_5s(model):
        say_once("the model is not exactly lesson 5's (another class or module, or a hook), so "
                 "it runs as it is: slower to train, several times slower to evaluate and sample")
        return model
    return Reader(replace_parts(model))


# ---- training: attention, dropout, ReLU ---------------------------------------------

def shift_padded(x):
    """Lesson 4's rel_shift of a product that has a cell in front of each row already.

    (..., T, K + 1) -> (..., T, K): drop the first T numbers, read the others in rows of
    K.  A view: nothing is copied.  As in lesson 4, what stands after distance 0 must be
    masked.  Here a number is 10 * query + distance, and K = 5; 5 and 15 stand where
    lesson 4 pads.

    >>> shift_padded(torch.tensor([[5, 4, 3, 2, 1, 0], [15, 14, 13, 12, 11, 10]]))
    tensor([[ 3,  2,  1,  0, 15],
            [14, 13, 12, 11, 10]])
    """
    T, width = x.shape[-2:]
    return x.flatten(-2)[..., T:].unflatten(-1, (T, width - 1))


class Attention(lesson_5.RelativeAttention):
    """Lesson 5's attention in another order of work, made from one of lesson 5.

    It has the modules of that one, with the same parameters under the same names.  Of
    W_q, W_kE and W_v it reads the weights, and does not call the modules.
    """

    def __init__(self, attention):
        nn.Module.__init__(self)  # not lesson 5's, which would draw new weights
        self.H, self.C = attention.H, attention.C
        for name, child in attention.named_children():  # W_q ... W_o, dropout_attention
            setattr(self, name, child)

    def attend(self, q, k, value, k_R, u, v, mask):
        """What lesson 5's attend does: -> (B, T, H * C).

        q (B, H, T, C), k and value (B, H, K, C), u, v (H, C), mask (T, K) bool.  k_R is
        (H, K, C) by descending distance, or (H, K + 1, C) with one distance more: no
        key is K away, so its column is the cell that lesson 4 pads, dropped or masked
        like it.
        """
        B, H, T, C = q.shape
        if k_R.shape[1] == k.shape[2]:
            k_R = F.pad(k_R, (0, 0, 1, 0))  # (H, K + 1, C)
        q, k, value = (z.transpose(0, 1) for z in (q, k, value))  # (H, B, n, C)
        scale = 1 / math.sqrt(C)  # on T * C numbers a head, not on T * K
        q, u, v = scale * q, scale * u[:, None, None], scale * v[:, None, None]
        content = (q + u) @ k.transpose(-1, -2)  # (a) + (c), (H, B, T, K)
        # (b) + (d): all lanes of a head meet its one k_R in a single product
        position = (q + v).flatten(1, 2) @ k_R.transpose(-1, -2)  # (H, B * T, K + 1)
        position = shift_padded(position.unflatten(1, (B, T)))  # (H, B, T, K)
        score = content.add_(position)  # in place (_): no gradient needs the two
        # products, nor need one pass through the mask: where a probability is 0, so is
        # the gradient of its score
        score.detach().masked_fill_(mask, float("-inf"))
        out = self.dropout_attention(score.softmax(-1)) @ value  # (H, B, T, C)
        return out.permute(1, 2, 0, 3).flatten(2)

    def forward(self, h, memory, R, u, v, mask):
        """What lesson 5's forward does, in one product for h and one for memory: no
        gradient flows into the memory, so none is made for its rows.
        """
        H, C = self.H, self.C
        W_kv = torch.cat([self.W_kE.weight, self.W_v.weight])  # (2 * H * C, D)
        qkv = F.linear(h, torch.cat([self.W_q.weight, W_kv]))  # (B, T, 3 * H * C)
        q, *new = qkv.unflatten(-1, (3, H, C)).permute(2, 0, 3, 1, 4)  # (B, H, T, C)
        old = F.linear(memory, W_kv).unflatten(-1, (2, H, C)).permute(2, 0, 3, 1, 4)
        # heads in front in memory, too, so that no product has to copy them
        k, value = (
            torch.cat([x.transpose(0, 1), y.transpose(0, 1)], dim=2).transpose(0, 1)
            for x, y in zip(old, new))  # (B, H, K, C)
        return self.W_o(self.attend(q, k, value, self.heads(self.W_kR(R)), u, v, mask))


class Dropout(nn.Dropout):
    """nn.Dropout, with 16 random bits for each number on a CPU.

    p is rounded to a multiple of 1 / 65536.
    """

    def forward(self, z):
        """(...) -> (...): zero with probability p, else scaled to keep the mean."""
        if not self.training or self.p == 0:
            return z
        if z.device.type != "cpu":
            return super().forward(z)
        dropped = min(round(65536 * self.p), 65535)  # of 65,536 values that mean "drop"
        draws = torch.empty((z.numel() + 3) // 4, dtype=torch.int64, device="cpu")
        draws.random_(-(2**63), None)  # None: to the largest, so all 64 bits are random
        numbers = draws.view(torch.int16)[: z.numel()].view(z.shape)  # -32768 ... 32767
        kept = numbers.ge_(dropped - 32768)  # in place: 0 (dropped) or 1
        return z * kept.to(z.dtype).mul_(65536 / (65536 - dropped))


class DropoutReLU(Dropout):
    """Dropout, then ReLU: the same as the other way round, as relu(c z) = c relu(z) for
    c >= 0.  But ReLU and the product after it keep one tensor for the gradients.
    """

    def forward(self, z):
        """(...) -> (...), not below 0."""
        return F.relu(super().forward(z))


def replace_parts(model):
    """Replace lesson 5's attention and dropouts by those above, and return the model.

    No parameter changes and no key of the state dict; a second call changes nothing.
    """
    for module in model.modules():  # parents first, so the new attention is visited too
        if type(module) is lesson_5.Layer and type(module.dropout_inner) is nn.Dropout:
            module.dropout_inner = DropoutReLU(module.dropout_inner.p)
            module.relu = nn.Identity()
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
            elif type(child) is lesson_5.RelativeAttention:
                setattr(module, name, Attention(child))
    return model.train(model.training)  # new parts are in the model's mode


# ---- reading without gradients ------------------------------------------------------

BLOCK = 64  # queries that attend at a time


def dtype_of_products(h):
    """What autocast makes of h in a matrix product: bf16 of float32; float64 stays."""
    kind = h.device.type
    casts = torch.is_autocast_enabled(kind) and h.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else h.dtype


class LayerWeights:
    """A layer as it is read: one matrix for q, k and v; the scale in q, u and v."""

    def __init__(self, layer, u, v, dtype):
        a, self.dtype = layer.attention, dtype
        self.parts, scale = (3, a.H, a.C), 1 / math.sqrt(a.C)
        qkv = torch.cat([scale * a.W_q.weight, a.W_kE.weight, a.W_v.weight])
        self.W_qkv, self.W_o, self.W_1, self.W_2 = (self.matrix(weight) for weight in (
            qkv, a.W_o.weight, layer.W_1.weight, layer.W_2.weight))
        self.b_1, self.b_2 = layer.W_1.bias.to(dtype), layer.W_2.bias.to(dtype)
        self.uv = scale * torch.stack([u, v])[:, :, None, None]  # (2, H, 1, 1, C)
        self.norm_1, self.norm_2 = layer.norm_1, layer.norm_2

    def matrix(self, weight):
        """(out, in) -> (in, out) with the longer rows in one piece: a single row of h,
        as in generation, is multiplied up to twice as fast, and others no slower.
        """
        weight = weight.to(self.dtype).t()
        return weight.contiguous() if weight.shape[0] <= weight.shape[1] else weight

    def project(self, h, B):
        """h (B * T, D) -> q + u and q + v (2, H, B, T, C), k and value (H, B, T, C)."""
        z = (h.to(self.dtype) @ self.W_qkv).view(B, -1, *self.parts)  # (B, T, 3, H, C)
        q, k, value = z.permute(2, 3, 0, 1, 4)
        return (q + self.uv).to(self.dtype), k, value

    def finish(self, out, h):
        """What follows attention: out (B * T, H * C), h (B * T, D) -> (B * T, D)."""
        h = self.norm_1(h + out @ self.W_o)
        inner = torch.addmm(self.b_1, h.to(self.dtype), self.W_1).relu_()
        return self.norm_2(h + torch.addmm(self.b_2, inner, self.W_2))


class Weights:
    """All layers as they are read, in the dtype of products, made by a call without a
    memory and handed on in memories, so that they go with the last of these.

    Their copies are D (4 H C + FF) numbers a layer, 60% of the model's; where autocast
    casts, W_2 too: 90%, of 2 bytes each.
    """

    def __init__(self, model, dtype):
        self.model, self.dtype, self.all = model, dtype, list(model.parameters())
        u, v = (z.expand(model.config.n_layer, -1, -1) for z in (model.u, model.v))
        self.layers = [LayerWeights(*z, dtype) for z in zip(model.layers, u, v)]
        self.u, self.versions = model.u.detach().clone(), self.count_changes()

    def count_changes(self):
        """How often each weight was changed in place, as far as torch counts it."""
        return [0 if z.is_inference() else z._version for z in self.all]

    def changed(self):
        """Whether the model's weights are others by now, as far as it can be seen.

        torch does not count what fused Adam does, or a change through .data; of these
        u's numbers tell, on a CPU (a GPU would be waited for).
        """
        u = self.model.u
        if self.versions != self.count_changes():
            return True
        if (u.dtype, u.device) != (self.u.dtype, self.u.device):
            return True
        return u.device.type == "cpu" and not u.equal(self.u)


class Buffer:
    """Keys (N, H, B, C, room) and values (N, H, B, room, C), filled from the front.

    So both are read in long rows; a bf16 product of one row needs that.
    """

    def __init__(self, config, B, room, like):
        N, H, C = config.n_layer, config.n_head, config.d_head
        self.keys = like.new_empty(N, H, B, C, room)
        self.values = like.new_empty(N, H, B, room, C)
        self.room, self.filled = room, 0

    def has_room(self, end, T, like):
        """Whether T positions of this dtype and device may be written after `end`."""
        keys = self.keys
        return (self.filled == end and end + T <= self.room  # free, and long enough
                and (keys.dtype, keys.device) == (like.dtype, like.device)
                # what inference_mode has made must not be written to outside of it
                and (torch.is_inference_mode_enabled() or not keys.is_inference()))


class Memory:
    """What a Reader hands back: a place in a buffer of keys and values, k_R by layer,
    and the weights that made them.

        positions    [ ... | m of the past | T new | room ]
                           end - K                end         K = m + T
    """

    def __init__(self, model, past, h):
        """Room for the T positions of h (B, T, D) after the last M of past, if any."""
        config, (B, T, _), dtype = model.config, h.shape, dtype_of_products(h)
        self.lanes, self.clamp_len = B, config.clamp_len
        self.m = min(past.next_m, config.mem_len) if past else 0
        self.K = self.m + T
        self.next_m = min(self.K, config.mem_len)  # what the next call may see
        same = past and past.weights.dtype == dtype
        self.weights = past.weights if same else Weights(model, dtype)
        like = h[0, :0].to(dtype)
        if past and past.buffer.has_room(past.end, T, like):
            self.buffer, self.end = past.buffer, past.end + T
        else:  # twice what is needed, so a full memory is copied once in M positions
            room = self.K + self.next_m
            self.buffer, self.end = Buffer(config, B, room, like), self.K
            if self.m:
                old, kept = past.buffer, slice(past.end - self.m, past.end)
                self.buffer.keys[..., : self.m] = old.keys[..., kept]
                self.buffer.values[..., : self.m, :] = old.values[..., kept, :]
        self.buffer.filled = self.end
        if same and past.clamp_len == self.clamp_len and past.count > self.K:
            self.k_R, self.count = past.k_R, past.count
        else:  # enough until the buffer or mem_len grows
            self.count = min(self.buffer.room, config.mem_len + T) + 1
            R = model.distances(self.count, h.device).to(dtype)
            # (H, C, count) each, for the distances count - 1, ..., 1, 0
            self.k_R = [z.heads(R @ z.W_kR.weight.to(dtype).t()).mT.contiguous()
                      for z in (layer.attention for layer in model.layers)]
        self.blocks = list(self.in_blocks(model, T))

    def in_blocks(self, model, T):
        """For each block of t queries: which they are, which k keys all of them may see
        between them, and mask (t, k), unless a single query sees all.
        """
        M, same_length = model.config.mem_len, model.config.same_length
        device = model.u.device
        for start in range(0, T, BLOCK):
            t, end = min(BLOCK, T - start), self.m + min(start + BLOCK, T)
            first = max(0, self.m + start - M) if same_length else 0
            mask = model.attention_mask(t, end - first - t, device) if t > 1 else None
            yield slice(start, start + t), slice(first, end), mask

    def attend(self, n, both, k, value):
        """Layer n's sums of values, (B * T, H * C), of what LayerWeights.project gave.

        The keys and values are written to the buffer first.
        """
        _, H, B, T, C = both.shape
        here, buffer, out = slice(self.end - self.K, self.end), self.buffer, []
        keys, values = buffer.keys[n, ..., here], buffer.values[n, ..., here, :]
        keys[..., self.m :], values[..., self.m :, :] = k.mT, value
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # of H * B
        for queries, seen, mask in self.blocks:
            q_u, q_v = both[:, :, :, queries]  # (H, B, t, C)
            t, K = q_u.shape[2], seen.stop - seen.start
            width = K if mask is None else K + 1  # with the cell that is shifted
            position = q_v.reshape(H, B * t, C) @ self.k_R[n][..., -width:]  # (b) + (d)
            position = position.view(H * B, t, width)
            score = q_u.reshape(H * B, t, C) @ keys[..., seen]  # (a) + (c)
            if mask is None:
                score.add_(position)
            else:
                score.add_(shift_padded(position))
                # two corners hold all that is masked: the future, and what is too far
                score[..., :t].masked_fill_(mask[:, :t], -math.inf)
                score[..., -t:].masked_fill_(mask[:, -t:], -math.inf)
            out.append(score.softmax(-1) @ values[:, seen])  # (H * B, t, C)
        out = torch.cat(out, dim=1).view(H, B, T, C)
        return out.permute(1, 2, 0, 3).reshape(B * T, H * C)


class Reader:
    """Lesson 5's model in eval mode, without gradients: called like it, equal results.

    Its memory is opaque: keys, values and distances as earlier calls projected them,
    and copies of the weights that did so (see Weights).  When the model's weights have
    changed begin with None, which makes new ones; an old memory is refused where the
    change can be seen (see Weights.changed; on a GPU fused Adam's cannot).
    """

    def __init__(self, model):
        self.model = model

    # the model's own
    training = property(lambda self: self.model.training)
    u = property(lambda self: self.model.u)
    config = property(lambda self: self.model.config,
                      lambda self, config: setattr(self.model, "config", config))

    def train(self, mode=True):
        """Switch the model."""
        self.model.train(mode)
        return self

    def eval(self):
        """Switch the model."""
        return self.train(False)

    def check(self, x, memory, y):
        """ValueError unless the model is in eval mode, and x, y and memory fit it."""
        validate.tokens(self.model, x, y)
        if self.model.training:
            raise ValueError("a Reader reads in eval mode, since a dropout would draw "
                             "anew what it keeps; call eval() first")
        if memory is None:
            return
        if not isinstance(memory, Memory):
            raise ValueError("memory must be None or what a Reader of this model has "
                             f"returned, got {validate.described(memory)}")
        if memory.weights.model is not self.model:
            raise ValueError("memory is that of another model")
        if memory.lanes != len(x):
            raise ValueError(f"memory is that of {memory.lanes} lanes, x has {len(x)}")
        if memory.weights.changed():
            raise ValueError("the model's weights have changed since the memory was "
                             "made; begin with None")

    @torch.no_grad()
    def __call__(self, x, memory=None, y=None, last_only=False):
        """As the model: x, y (B, T) -> logits (B, T, V) or losses (B, T); a memory."""
        self.check(x, memory, y)
        model = self.model
        h = model.embedding(x) * math.sqrt(model.config.d_model)  # (B, T, D)
        memory, shape, h = Memory(model, memory, h), h.shape, h.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):  # the weights are cast
            for n, layer in enumerate(memory.weights.layers):
                out = memory.attend(n, *layer.project(h, len(x)))
                h = layer.finish(out, h)  # (B * T, D)
        h = h.view(shape)
        if y is not None:
            return model.embedding.losses(h, y), memory
        return model.embedding.logits(h[:, -1:] if last_only else h), memory
