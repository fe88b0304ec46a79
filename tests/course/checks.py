"""What each exercise is tested on, and the mistakes that are known by sight.

    CHECKS["rel_shift"](function)      returns, or raises Wrong with a diagnosis

Every check stands by itself: what the function calls from other exercises is replaced here by an
oracle, so that one wrong exercise does not make another one fail.  The most telling small case
comes first.  Sizes differ in every dimension, so that a swapped axis cannot pass.  A mistake is
known as the oracle with one parameter changed, as the right result transformed, or as a property
that fails: nothing here is the solution of an exercise written down.
"""
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from course.diagnosis import demand, expect, gradients, refuses, replaced, same, same_slopes, told
from course.exercises import Wrong

CHECKS = {}
# T, M: the telling one first; then one token, no memory, memory longer and shorter than a segment
SHAPES = ((3, 2), (2, 5), (5, 3), (4, 0), (1, 4), (1, 0), (3, 3), (2, 1), (4, 9))


def check(name):
    """Enter a function into CHECKS; it begins with the same random numbers each time."""
    def enter(function):
        def run(solution):
            torch.manual_seed(0)
            function(solution)
        CHECKS[name] = run
        return function
    return enter


def lesson(number):
    """The lesson whose file begins so, or train."""
    names = {1: "01_vanilla_segments", 2: "02_recurrence", 3: "03_relative_attention",
             4: "04_rel_shift", 5: "05_full_model"}
    return import_module(names.get(number, number))


class Watch(TorchFunctionMode):
    """Knows which tensors would stand on another device, without one: those that were made there,
    and all that was computed from them."""

    def __init__(self):
        super().__init__()
        self.there = {}  # by id, and kept alive, so that no id is used twice

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        given += [z for part in given if isinstance(part, (list, tuple)) for z in part]
        tensors = [z for z in given if isinstance(z, torch.Tensor) and z.dim()]
        there = any(isinstance(z, torch.device) and z.index == 0 for z in given)
        found = [id(z) in self.there for z in tensors]
        demand(there or all(found) or not any(found), "`device` reaches only some of the tensors: "
               "on a GPU those that are made without it stand elsewhere")
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and (there or any(found)):
            self.there[id(result)] = result
        return result


def uses_device(call):
    """The result must stand on the device that the call gets."""
    with Watch() as watch:
        result = call(torch.device("cpu", 0))
    demand(id(result) in watch.there, "`device` is ignored: on a GPU the result would stand "
           "elsewhere than the scores")


# ---- oracles, in another form than the lessons' -------------------------------------------------

def unit_circle(distances, D, first=1.0, last=None):
    """The encoding as powers of D/2 complex numbers of length 1: (n,) -> (n, D), float64.

    Their angles form a geometric series from `first` to `last`.
    """
    unit = np.exp(1j * np.geomspace(first, last or 10000 ** (2 / D - 1), D // 2))
    powers = unit ** np.array(distances, dtype=np.float64)[:, None]
    return torch.from_numpy(np.concatenate([powers.imag, powers.real], axis=1))


def seen_cells(T, m, most=None, first=0):
    """The visible keys as runs: row i is dark, sees at most `most`, is dark again.  (T, m + T)."""
    rows = []
    for i in range(T):
        count = m + i + 1 + first
        dark = 0 if most is None else max(0, count - most)
        rows.append(([False] * dark + [True] * (count - dark) + [False] * (m + T))[: m + T])
    return torch.tensor(rows)


def oracle_shift(x):
    """Row by row a roll to the left; what comes in from the right is in the future."""
    T = x.shape[-2]
    return torch.stack([x[..., i, :].roll(i - T + 1, -1) for i in range(T)], -2)


def labelled(T, M):
    """Unshifted distances, descending, each with its query in front: 10 * query + distance."""
    return torch.tensor([[(100 if M + T > 10 else 10) * i + M + T - 1 - j for j in range(M + T)]
                         for i in range(T)])


# ---- lesson 1 -----------------------------------------------------------------------------------

@check("lanes")
def check_lanes(lanes):
    for n, B in ((12, 2), (23, 2), (24, 3), (7, 1), (2, 1), (6, 5), (101, 7)):
        stream = torch.arange(n)
        L = (n - 1) // B
        wanted = stream.unfold(0, L + 1, L)[:B]
        whole = stream[: n // B * B]
        known = {
            "the last column is missing: the last input of a lane has its target in the next lane, "
            "so a lane is L + 1 tokens and shares one with its neighbour": wanted[:, :-1],
            "the lanes do not share a token: the target of a lane's last input is the first token "
            "of the next lane, which begins at b * L": whole.view(B, -1),
            "the tokens are dealt out in turn, so every lane is a text that nobody wrote: a lane "
            "is one contiguous piece of the stream": whole.view(-1, B).T,
            "the tokens are dealt out in turn: a lane is one contiguous piece of the stream":
            stream[: B * L].view(-1, B).T,
            "the tokens are dealt out in turn, and then the targets, too: a lane is one contiguous "
            "piece of the stream": torch.cat([
                stream[: B * L].view(L, B).T, stream[1 : B * L + 1].view(L, B).T[:, -1:]], 1),
            "the lanes are right, but stand as columns: (B, L + 1) has a lane in each row":
            wanted.T,
            "the first token is lost": wanted + 1,
            "the lanes come in reverse order": wanted.flip(0),
        }
        what = f"lanes(torch.arange({n}), {B})"
        got = told(what, {"equal size": "these are lanes of different lengths: each is L + 1 "
                          f"tokens long, here {L + 1}"}, lambda: lanes(stream, B))
        expect(what, got, wanted, known)
        demand(stream.equal(torch.arange(n)), "the stream itself was changed")
    tokens = torch.arange(200, 211, dtype=torch.uint8)
    expect("lanes(uint8 tokens, 2)", lanes(tokens, 2), tokens.unfold(0, 6, 5), dtype=torch.uint8)
    for n, B in ((9, 0), (9, -2), (5, 5), (1, 1), (0, 1), (3, 7)):
        refuses(f"lanes of {n} tokens with B = {B}", lambda: lanes(torch.arange(n), B))


@check("segments")
def check_segments(segments):
    for B, L, T, start in ((2, 11, 4, 0), (3, 12, 4, 0), (2, 3, 7, 0), (5, 6, 1, 0), (1, 9, 2, 0),
                           (2, 11, 4, 4), (3, 12, 5, 10), (2, 11, 4, 11)):
        stream = torch.arange(B * 100).view(B, 100)[:, : L + 1]
        call = f"segments(stream, T={T}, start={start}), where lane b is 100 b, 100 b + 1, ..., " \
               f"100 b + {L}"
        result = segments(stream, T, start)
        demand(result is not None, "nothing is returned: use `yield`", call)
        demand(hasattr(result, "__next__"), f"the result is a {type(result).__name__}: use "
               "`yield`, so that the segments are made one at a time", call)
        parts = list(result)
        demand(all(isinstance(p, (tuple, list)) and len(p) == 2
                   and all(isinstance(z, torch.Tensor) and z.dim() == 2 for z in p) for p in parts),
               "each segment is a pair x, y of tensors (B, T)", call)
        demand(all(len(z) == B for p in parts for z in p), "this cuts the lanes, not the columns: "
               "each segment holds a piece of ALL lanes",
               f"{call}\n  shapes of x: {[tuple(x.shape) for x, _ in parts]}")
        widths = [x.shape[1] for x, _ in parts]
        rest = L - start
        wanted = [T] * (rest // T) + [rest % T] * (rest % T > 0)
        shown = f"{call}\n  widths of x: expected {wanted}, got {widths}"
        demand(not (sum(widths) == sum(wanted) + 1 and sum(wanted)),
               "the last column is used as an input: it is only a target", shown)
        demand(widths != wanted[:-1] or not rest % T,
               "the last, shorter segment is lost: its tokens count as well", shown)
        demand(start == 0 or widths != [T] * (L // T) + [L % T] * (L % T > 0) or widths == wanted,
               "`start` is ignored: the first column that is read is column `start`", shown)
        demand(widths == wanted or widths != [min(T, L - t) for t in range(start, L)],
               "the segments begin one token after each other: the next one begins where the one "
               "before has ended", shown)
        demand(widths == wanted, "the stream is cut into segments of other lengths", shown)
        if parts and parts[0][1].shape == parts[0][0].shape:
            x, y = parts[0]
            to = start + x.shape[1]
            expect(call + ", the first y", y, stream[:, start + 1 : to + 1], {
                "the targets are not shifted: y is x itself, and the model would learn to copy": x,
                "the targets are shifted twice: y is one token further than x, not two":
                stream[:, start + 2 : to + 2],
                "the targets are the tokens before: y is one column further than x": x - 1})
        demand([y.shape for _, y in parts] == [x.shape for x, _ in parts],
               "y has not the shape of x: each input has exactly one target",
               f"{call}\n  shapes {[tuple(y.shape) for _, y in parts]}")
        if not parts:
            continue
        x, y = (torch.cat(z, dim=1) for z in zip(*parts))
        expect(call + ", all x joined", x, stream[:, start:-1], {
            "the inputs are the targets: x begins at column `start`": stream[:, start + 1 :]})
        expect(call + ", all y joined", y, stream[:, start + 1 :])
        demand((x.dtype, y.dtype) == (torch.int64,) * 2, f"x is {x.dtype} and y {y.dtype}", call)
    stream = torch.arange(240, 256, dtype=torch.uint8).view(2, 8)
    x, y = next(segments(stream, 3))
    demand((x.dtype, y.dtype) == (torch.int64,) * 2,
           f"x is {x.dtype} and y {y.dtype}, should be int64: a corpus is stored as bytes, but an "
           "embedding wants int64", "segments(uint8 stream, 3)")
    for T in (0, -3):
        refuses(f"T = {T}", lambda: list(segments(stream, T)))


@check("sinusoid")
def check_sinusoid(sinusoid):
    for positions, D in (([0, 1, 2, 3], 6), ([5, 0, 3, 3, 7], 4), ([0, 1, 9, 1000, 123456], 10),
                         ([2, 4, 1], 2)):
        wanted = unit_circle(positions, D)
        sines, cosines = wanted.chunk(2, 1)
        last, step = 10000 ** (2 / D - 1), 10000 ** (-2 / D)  # frequency, and ratio to the next
        known = {
            "sines and cosines are interleaved: here all sines come first, then all cosines":
            torch.stack([sines, cosines], -1).flatten(1),
            "the cosines stand first: sines, then cosines": torch.cat([cosines, sines], 1),
            "the frequencies fall half as fast as they should: the exponent is -2k/D, not -k/D":
            unit_circle(positions, D, last=last ** 0.5),
            "the frequencies fall twice as fast as they should: the exponent is -2k/D":
            unit_circle(positions, D, last=last ** 2),
            "the frequencies grow: the exponent is negative": unit_circle(
                positions, D, last=1 / last),
            "the frequencies end at exactly 1/10000: k/(D/2 - 1) in place of 2k/D":
            unit_circle(positions, D, last=1e-4),
            "the frequencies come in reverse order": unit_circle(positions, D, last, 1.0),
            "the frequencies begin with k = 1: the first one is 10000^0 = 1":
            unit_circle(positions, D, step, last * step),
            "row r encodes r, should encode position[r]": unit_circle(range(len(positions)), D),
            "the positions are counted from 1": unit_circle([p + 1 for p in positions], D),
            "positions and frequencies have changed places: a row is a position": wanted.T,
        }
        what = f"sinusoid(torch.tensor({positions}), {D})"
        got = sinusoid(torch.tensor(positions), D)
        if isinstance(got, torch.Tensor) and got.dtype != torch.float64:
            demand(not same(got, wanted, tolerance=0.05), "the angles are computed in "
                   f"{got.dtype}: far out its digits do not suffice; use float64", what)
        demand(same(got, wanted, tolerance=1e-8) or not same(got, wanted, tolerance=0.02), "the "
               "result is nearly right: something on the way is float32 (frequencies, or angles "
               "made float64 too late); far out its digits do not suffice, use float64", what)
        expect(what, got, wanted, known, tolerance=1e-8, dtype=torch.float64)
    refuses("an odd D = 7", lambda: sinusoid(torch.arange(3), 7))


# ---- lesson 2 -----------------------------------------------------------------------------------

@check("causal_mask")
def check_causal_mask(causal_mask):
    for T, M in SHAPES:
        wanted, what = ~seen_cells(T, M), f"causal_mask({T}, {M})"
        got = causal_mask(T, M)
        known = {
            "the offset M is forgotten: query i is key M + i, so the memory is hidden from the "
            "first queries": ~seen_cells(T, M, first=-M),
            "a query does not see itself: only keys AFTER it are the future":
            ~seen_cells(T, M, first=-1),
            "one key of the future shows: the first hidden key of query i is M + i + 1":
            ~seen_cells(T, M, first=1),
            "True and False are exchanged: True means hidden": ~wanted,
            "the memory is hidden, too": ~seen_cells(T, M) | (torch.arange(M + T) < M),
            "the mask is upside down: the first query sees least": wanted.flip(0),
            "the past is hidden and the future shows": wanted.flip(0, 1),
            "only the segment's T keys are there: the keys are M + T": wanted[:, M:],
            "queries and keys have changed places: each row belongs to a query": wanted.T,
            "nothing is hidden": torch.zeros_like(wanted),
        }
        expect(what, got, wanted, known)
        demand(got.dtype == torch.bool, f"the mask is {got.dtype}, should be bool: masked_fill "
               "takes no other", what)
    uses_device(lambda device: causal_mask(2, 3, device=device))


@check("update_memory")
def check_update_memory(update_memory):
    B, D = 2, 3
    for m, T, M in ((2, 5, 3), (3, 2, 4), (4, 2, 0), (1, 2, 4), (0, 2, 0), (1, 2, 7), (0, 3, 7),
                    (1, 5, 3), (5, 1, 2), (3, 2, 5), (3, 2, 3)):
        every = 100 * torch.arange(B)[:, None, None] + 10 * torch.arange(m + T)[:, None] + (
            torch.arange(D))  # (B, m + T, D): lane, row, feature
        old, new = every[:, :m].clone(), every[:, m:].clone()

        def last(count, rows=every):
            return rows.flip(1)[:, : max(0, count)].flip(1)
        wanted = last(M)
        known = {
            "everything is kept although M = 0: in Python rows[-0:] is all of rows"
            if M == 0 else "everything is kept: only the last M rows are": every,
            "the oldest rows are kept: the newest M are wanted": every[:, :M],
            "the old memory is thrown away, also where there is room: M rows of BOTH": last(M, new),
            "as many rows are kept as the segment is long: M, not T": last(T),
            "old and new have changed places: time runs from the memory into the segment":
            last(M, torch.cat([new, old], 1)),
            "old and new have changed places: the old rows come first": torch.cat(
                [last(M, new), old[:, max(0, m + T - M) :]], 1),
            "the new rows do not go in: the memory stays as it was": last(M, old),
            "there are fewer than M rows, and a negative index counts from the end: never let the "
            "first row be below 0": last(M - m - T) if M > m + T else wanted,
            "rows of zeros are put in front until there are M: a past that is not there is no "
            "past of zeros": torch.cat([every.new_zeros(B, max(0, M - m - T), D), wanted], 1),
            "the rows come newest first: the oldest is the first row": wanted.flip(1),
            "one row too many is kept": last(M + 1),
            "one row too few is kept": last(M - 1),
        }
        what = (f"update_memory(memory of m = {m} rows, h of T = {T} rows, M = {M}); the numbers "
                "are 100 * lane + 10 * row + feature")
        got = told(what, {"Sizes of tensors must match": "the rows are joined along another axis "
                          "than time, which is dim 1"}, lambda: update_memory(old, new, M))
        expect(what, got, wanted, known, dtype=torch.int64)
        demand(same(old, every[:, :m]) and same(new, every[:, m:]), "an argument was changed in "
               "place: the caller still needs the old memory", what)
    old, new = (torch.randn(2, rows, 5, requires_grad=True) for rows in (3, 4))
    got = update_memory(old * 1, new * 2, 5)
    demand(not got.requires_grad, "the gradient is not stopped: the result still hangs on the "
           "graph of its segment, so the second backward() of a training loop would fail",
           "update_memory(...).requires_grad is True; SG of the paper is detach()")
    h = new * 2
    update_memory(old.detach(), h, 5)
    demand(h.requires_grad, "the argument h was detached in place: the segment still needs its "
           "gradient")


def tensor_shape(z):
    """The shape as a tuple, or None."""
    return tuple(z.shape) if isinstance(z, torch.Tensor) else None


class Echo(nn.Module):
    """A model whose memory leaks as much gradient as one asks for, and that notes what it reads."""

    def __init__(self, V, D, leak):
        super().__init__()
        self.embedding, self.leak = nn.Embedding(V, D).double(), leak
        self.W = nn.Parameter(torch.randn(D, V, dtype=torch.float64))
        self.nudge = None  # added to the embedded tokens, to measure slopes without autograd
        self.position = 0

    def forward(self, x, memory=None):
        """(B, T) -> logits (B, T, V), memory (B, D)."""
        h = self.embedding(x)  # (B, T, D)
        if self.nudge is not None:
            h = h + self.nudge[:, self.position : self.position + x.shape[1]]
            self.position += x.shape[1]
        past = 0.0 if memory is None else memory[:, None]
        kept = h.sum(1)
        if self.leak:
            return (h + past).sin() @ self.W, kept.detach() * (1 - self.leak) + kept * self.leak
        return (h + past).sin() @ self.W, kept.detach()


@check("gradient_into")
def check_gradient_into(gradient_into):
    lesson_2 = lesson(2)
    B, T, D, V = 1, 3, 2, 5
    x, y = torch.tensor([[0, 3, 1, 4, 2, 0]]), torch.tensor([[2, 0, 4, 1, 1, 3]])

    def losses(model, x, y, T):
        memory, parts = None, []
        for a, b in zip(x.split(T, 1), y.split(T, 1)):
            logits, memory = model(a, memory)
            parts.append(-logits.log_softmax(-1).gather(-1, b[..., None])[..., 0])
        return torch.cat(parts, 1)

    for leak in (0.0, 0.5):
        torch.manual_seed(3)
        model = Echo(V, D, leak)
        slopes = torch.zeros(2, 2 * T, D, dtype=torch.float64)  # of each segment's loss, measured
        with torch.no_grad():
            for t in range(2 * T):
                for d in range(D):
                    for sign in (1e-6, -1e-6):
                        model.nudge = torch.zeros(B, 2 * T, D, dtype=torch.float64)
                        model.nudge[0, t, d], model.position = sign, 0
                        # a nudge goes through what was detached as well: take the leak into account
                        part = losses(model, x, y, T)[0]
                        sums = torch.stack([part[:T].sum(), part[T:].sum()])
                        slopes[:, t, d] += sums / (2 * sign)
        model.nudge = None
        slopes[1, :T] *= leak

        def largest(slope):
            return torch.stack([slope[:T].abs().max(), slope[T:].abs().max()])
        wanted = largest(slopes[1])
        what = "gradient_into(model, x, y, T), segments 1 and 2, for a model whose memory " + (
            "leaks half of the gradient" if leak else "is detached")
        with replaced(lesson_2, stream_losses=losses):
            try:
                got = gradient_into(model, x, y, T)
            except RuntimeError as error:
                if "unused" in str(error) or "not have been used" in str(error):
                    raise Wrong("autograd refuses, since segment 1's input is not connected to the "
                                f"loss: that is the answer 0, not an error\n  {what}") from None
                raise
        demand(not model.embedding._forward_hooks, "the hook on model.embedding is left behind: "
               "the model is not as it was found", what)
        demand(got is not None, "nothing is returned: did you forget `return`?", what)
        demand(isinstance(got, (list, tuple)) and len(got) == 2, f"the result is a "
               f"{type(got).__name__}, should be a list of two floats",
               f"{what}: {str(got)[:60]}")
        demand(None not in got, "None is autograd's word for 'not connected': the answer there is "
               "0.0", what)
        demand(all(isinstance(g, float) for g in got), "the results are "
               f"{type(got[0]).__name__}, should be floats (.item())", what)
        sums = slopes.sum(0)
        expect(what, torch.tensor(got, dtype=torch.float64), wanted, {
            "the loss is that of both segments: only the second one's is asked for": largest(sums),
            "the loss is that of the first segment: the second one's is asked for":
            largest(slopes[0]),
            "this is the gradient with respect to the weights of the embedding, where a token of "
            "both segments is one row: catch what the embedding puts OUT": largest(
                torch.zeros(V, D).double().index_add(0, x[0], slopes[1])[x[0]]),
            "you take the mean of the losses; it must be their sum": wanted / T,
            "you take the mean of both segments' losses; it must be the sum of the second's":
            wanted / (2 * T),
            "you return the largest value; it must be the largest absolute value":
            torch.stack([slopes[1, :T].max(), slopes[1, T:].max()]),
            "you return the mean |gradient|; it must be the largest": torch.stack(
                [slopes[1, :T].abs().mean(), slopes[1, T:].abs().mean()]),
            "you return the sum of the |gradient|; it must be the largest": torch.stack(
                [slopes[1, :T].abs().sum(), slopes[1, T:].abs().sum()]),
            "you return the norm of the gradient; it must be its largest entry": torch.stack(
                [slopes[1, :T].norm(), slopes[1, T:].norm()]),
            "the segments come in reverse order": wanted.flip(0),
        }, tolerance=1e-5)
        demand(leak or got[0] == 0.0, "the gradient into segment 1 is small, but not exactly 0")


@check("reach")
def check_reach(reach):
    def walk(N, T, M, up=False):
        """Layer by layer, all tokens that are seen; `up`: starts of segments are rounded up."""
        t = 50 * T - 1
        tokens = {t}
        for _ in range(N):
            tokens = {j for i in tokens for j in range(
                (-(-i // T) * T if up and i <= t - T else i - i % T) - M, i + 1)}
        return t - min(tokens)

    for N, T, M in ((3, 4, 4), (2, 4, 4), (1, 4, 4), (3, 4, 0), (3, 5, 2), (2, 4, 6), (4, 3, 9),
                    (3, 1, 2), (5, 3, 4), (2, 7, 3), (4, 6, 8), (1, 1, 0)):
        wanted, what = walk(N, T, M), f"reach(N={N}, T={T}, M={M})"
        got = reach(N, T, M)
        known = {
            "T - 1 is forgotten: the query is the LAST token of its segment": wanted - T + 1,
            "one too far: the distance from the last token to the segment's start is T - 1":
            wanted + 1,
            "N (M + T - 1): only the first layer looks from the end of a segment; the others look "
            "from the START of the segment that was reached": N * (M + T - 1),
            "N (M + T): memory reaches back from the start of a segment, not from its end":
            N * (M + T),
            "N M + T - 1 is right only if M is a multiple of T: the token that was reached stands "
            "inside a segment, and the next layer sees from that segment's START on":
            N * M + T - 1,
            "the start of a segment before the query's is missed: int(x / T) rounds towards 0, so "
            "below 0 it rounds up": walk(N, T, M, up=True),
            "the last layer is missing: this is the reach of N - 1 layers": walk(N - 1, T, M),
            "one layer too many: this is the reach of N + 1 layers": walk(N + 1, T, M),
            "one layer only: each layer goes on from where the one above arrived": M + T - 1,
            "the memory's start was taken for a segment's start: a layer sees M rows before the "
            "start of the segment": walk(N, T, M + T),
        }
        demand(got is None or isinstance(got, (int, float, np.number)), "the result is a "
               f"{type(got).__name__}, should be a whole number", what)
        expect(what, got, wanted, known)


# ---- lesson 3 -----------------------------------------------------------------------------------

@check("four_terms")
def check_four_terms(four_terms):
    names = ("(a) q_i . k_j", "(b) q_i . (W_kR R_(i-j))", "(c) u . k_j", "(d) v . (W_kR R_(i-j))")
    for T, M in SHAPES:
        K, C, D = M + T, 4, 6
        draw = np.random.default_rng(T + 10 * M)
        q, k, R, W, u, v = arguments = [draw.integers(-3, 4, shape).astype(float) for shape in (
            (T, C), (K, C), (K, D), (C, D), (C,), (C,))]
        i, j = np.mgrid[:T, :K]
        seen = torch.from_numpy(i + M >= j)

        def terms(distance=M + i - j, u=u, v=v, R=R, W=W, scale=1.0):
            r = np.take(np.einsum("kd,cd->kc", R, W), distance, axis=0, mode="wrap")  # (T, K, C)
            return torch.from_numpy(scale * np.stack([
                np.einsum("ic,jc->ij", q, k), np.einsum("ic,ijc->ij", q, r),
                np.einsum("c,jc,i->ij", u, k, np.ones(T)), np.einsum("c,ijc->ij", v, r)]))

        wanted = terms().masked_fill(~seen, torch.nan)
        copies = [z.copy() for z in arguments]
        what = f"four_terms(...) with T = {T}, M = {M}"
        got = told(what, {"setting an array element with a sequence": "a cell gets a whole vector: "
                          "the products are not summed over the width (@ does both)"},
                   lambda: four_terms(*arguments))
        expect_array(got, (4, T, K), what)
        found = torch.from_numpy(got)
        swapped = terms(u=v, v=u)
        if not same(found[2:], swapped[2:], seen):
            swapped = wanted  # one of the two biases is right
        wrong = {
            "the distance is i - j, so the memory is forgotten: query i is key M + i":
            terms(i - j),
            "R is read backwards: R[d] belongs to distance d": terms(K - 1 - (M + i - j)),
            "you index R by the key; it must be by the distance, M + i - j": terms(j),
            "you index R by the query; it must be by the distance, M + i - j": terms(M + i),
            "the distance is one too large": terms(M + i - j + 1),
            "the distance is one too small": terms(M + i - j - 1),
            "u and v are exchanged: u goes with the content, v with the position": swapped,
            "u stands where v should: (d) has its own bias": terms(v=u),
            "v stands where u should: (c) has its own bias": terms(u=v),
            "the terms are divided by sqrt(C): that comes later": terms(scale=1 / math.sqrt(C)),
        }
        for n, name in enumerate(names):
            if not same(found[n], wanted[n], seen):
                known = {m: w[n] for m, w in wrong.items()}
                known["this is another term: the order is (a), (b), (c), (d)"] = next(
                    (w for o, w in enumerate(terms()) if o != n and same(w, found[n], seen)),
                    wanted[n])
                known["nothing was entered here: the cells are still NaN"] = torch.full_like(
                    wanted[n], torch.nan)
                known["the memory is forgotten, so cells that count are still NaN: query i is key "
                      "M + i and sees the keys up to that one"] = (
                    wanted[n].masked_fill(torch.from_numpy(j > i), torch.nan))
                known["the query's own key is still NaN: distance 0 is seen as well"] = (
                    wanted[n].masked_fill(torch.from_numpy(i + M == j), torch.nan))
                expect(f"term {name} of {what}", found[n], wanted[n], known, seen, 1e-9)
        for n, name in enumerate(names):
            future = found[n][~seen]
            demand(bool(future.isnan().all()), "future keys have no distance, so NaN stands there; "
                   f"here are numbers in {int((~future.isnan()).sum())} of them",
                   f"term {name} of {what}")
        demand(all(np.array_equal(a, b) for a, b in zip(arguments, copies)),
               "an argument was changed in place", what)


def expect_array(got, shape, what):
    """A NumPy array of this shape."""
    demand(got is not None, "nothing is returned: did you forget `return`?", what)
    demand(isinstance(got, np.ndarray), f"the result is a {type(got).__name__}, should be a NumPy "
           "array", what)
    demand(got.shape == shape, f"the shape is {got.shape}, should be {shape}", what)


# ---- lesson 4 -----------------------------------------------------------------------------------

def moved_wrongly(T, K, padded):
    """How far row i goes to the left with the known mistakes, of pad and reshape or of an index."""
    known = {
        "the rows went to the right, into the future: did you drop the first row or the last? The "
        "first one holds what nobody needs": lambda i: -1 - i,
        "row i is moved to the right by i: the pad cell goes in front of each row, and the first "
        "row is dropped, not the last": lambda i: -i,
        "every row is moved one too far: the pad cell goes in front of each row, not behind it":
        lambda i: T - i,
        "nothing has moved: the padded numbers must be read in rows of T": lambda i: 0,
    } if padded else {}
    return known | {
        "nothing has moved: row i goes to the left by T - 1 - i": lambda i: 0,
        "row i is moved by i, should be T - 1 - i: that would be right for ascending distances":
        lambda i: i,
        "row i is moved to the right: it must go to the left": lambda i: i + 1 - T,
        "all rows are moved by T - 1: row i goes by its own T - 1 - i": lambda i: T - 1,
        "every row is moved one too far: row i goes by T - 1 - i": lambda i: T - i,
        "every row is moved one too little: row i goes by T - 1 - i": lambda i: T - 2 - i,
        "row i is moved by M - i: T, not M, belongs there (they are equal only by chance)":
        lambda i: K - T - i,
        "row i is moved by i + 1 in place of T - 1 - i": lambda i: i + 1,
    }


def has_moved(x, got, seen, step):
    """Is every row of got x, moved by step(i), as far as one can see and x goes?"""
    T, K = x.shape
    cells = [(i, j) for i in range(T) for j in range(K) if seen[i, j] and 0 <= j + step(i) < K]
    return bool(cells) and all(got[i, j] == x[i, j + step(i)] for i, j in cells)


def check_shift(shift, name):
    """What both ways to shift must do."""
    clues = {
        "invalid for input of size": "the numbers do not fit: (T, K + 1) padded numbers are as "
        "many as (K + 1, T); without one row of T they are T x K",
        "view size is not compatible": "these numbers do not stand one behind the other in memory: "
        "reshape copies where view refuses",
        "out of bounds for dimension 0": "gather runs along the wrong axis, the rows: the columns "
        "are the last one, -1",
        "out of bounds": "the index runs beyond the end of the row: there the last column is "
        "wanted, distance 0",
    }
    for T, M in SHAPES:
        x, seen = labelled(T, M), seen_cells(T, M)
        wanted = oracle_shift(x)
        what = (f"{name}(x) for T = {T}, M = {M}, x =\n" + "\n".join(
            "    [" + " ".join(f"{z:3}" for z in row) + "]" for row in x.tolist())
            + f"\n  (each number is {100 if M + T > 10 else 10} * query + distance)")
        got = told(what, clues, lambda: shift(x.clone()))
        known = {"transpose turns the table; reshape leaves the numbers in their order":
                 x.T.reshape(T, M + T)}
        if isinstance(got, torch.Tensor) and got.shape == x.shape and not same(got, wanted, seen):
            shown = got.where(seen, wanted)
            known |= {mistake: shown for mistake, step in moved_wrongly(
                T, M + T, name == "rel_shift").items() if has_moved(x, got, seen, step)}
        expect(what, got, wanted, known, seen)
        demand(got.dtype == x.dtype, f"the numbers became {got.dtype}, they were {x.dtype}", what)
    del clues["invalid for input of size"]
    clues[""] = "right for one matrix, but with leading dimensions it ends in an error"
    for batch in ((2,), (2, 3)):
        for T, M in ((3, 2), (2, 5), (5, 1)):
            x, seen = torch.randn(*batch, T, M + T, dtype=torch.float64), seen_cells(T, M)
            copy = x.clone()
            what = f"{name}(x) for x of shape {tuple(x.shape)}"
            got = told(what, clues, lambda: shift(x))
            first = x[(0,) * len(batch)]
            alone = torch.is_tensor(got) and same(got, oracle_shift(first).expand(x.shape), seen)
            expect(what, got, oracle_shift(x), {
                "every matrix became the first one" if alone else
                "right for one matrix, wrong with leading dimensions: the matrices were mixed":
                got}, seen)
            demand(x.equal(copy), "x itself was changed", what)
    T, M = 3, 2
    turned = torch.randn(2, M + T, T, dtype=torch.float64).transpose(1, 2)
    what = f"{name}(x) for a transposed x"
    got = told(what, clues, lambda: shift(turned))
    expect(what, got, oracle_shift(turned), {
        "right, except for an x whose rows do not stand one behind the other in memory: as_strided "
        "looks at the memory, reshape at the numbers": got}, seen_cells(T, M))
    x = torch.randn(T, M + T, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(T, M + T, dtype=torch.float64) * seen_cells(T, M)
    out = shift(x)
    demand(out.requires_grad, "the gradient is lost: the score could not be trained")
    same_slopes(f"{name}(x)", ["x"], torch.autograd.grad((out * weight).sum(), x),
                torch.autograd.grad((oracle_shift(x) * weight).sum(), x), 0.0)


@check("rel_shift")
def check_rel_shift(rel_shift):
    check_shift(rel_shift, "rel_shift")


@check("rel_shift_by_index")
def check_rel_shift_by_index(rel_shift_by_index):
    check_shift(rel_shift_by_index, "rel_shift_by_index")
    for T, M in ((3, 2), (4, 0)):
        x, seen = labelled(T, M), seen_cells(T, M)
        got = rel_shift_by_index(x)
        wanted = oracle_shift(x).where(seen, x[:, -1:])
        expect(f"rel_shift_by_index(x) for T = {T}, M = {M}; the cells of the future repeat "
               "distance 0, the last column", got, wanted, {
                   "the future holds 0: it repeats the number of distance 0":
                   wanted.where(seen, torch.zeros_like(wanted)),
                   "the index runs around the end: clamp it to the last column": oracle_shift(x)})


# ---- lesson 5 -----------------------------------------------------------------------------------

ATTENTION = {
    "u and v are exchanged: u goes with the content (k), v with the position (Q)": dict(swap=True),
    "u is used for both: the position has its own bias v": dict(both="u"),
    "v is used for both: the content has its own bias u": dict(both="v"),
    "u is missing: term (c)": dict(no="u"),
    "v is missing: term (d)": dict(no="v"),
    "the scale is missing: divide the score by sqrt(C)": dict(scale="none"),
    "the scale is 1 / sqrt(D): C, the width of a head, belongs there": dict(scale="D"),
    "the scale is 1 / sqrt(H C): C, the width of ONE head": dict(scale="HC"),
    "the scale is 1 / C, not 1 / sqrt(C)": dict(scale="C"),
    "the scale is 1 / sqrt(K): C, the width of a head, belongs there": dict(scale="K"),
    "the score is multiplied by sqrt(C), not divided": dict(scale="inverse"),
    "only the content part is scaled: 1 / sqrt(C) covers all four terms": dict(scale="content"),
    "only the position part is scaled: 1 / sqrt(C) covers all four terms": dict(scale="position"),
    "only q is scaled, u and v are not: 1 / sqrt(C) covers all four terms": dict(scale="q"),
    "the position part is not shifted": dict(shift="none"),
    "the whole score is shifted once more: relative_score has shifted what is to be shifted":
    dict(shift="twice"),
    "the content part was shifted as well: only the position part stands in the wrong columns":
    dict(shift="both"),
    "the content part was shifted and the position part not": dict(shift="content"),
    "the position part is missing: terms (b) and (d)": dict(position=False),
    "the content part is missing: terms (a) and (c)": dict(content=False),
    "only term (a), q k^T, is there: relative_score gives all four": dict(no="u", position=False),
    "the position part is one column off: row i goes to the left by T - 1 - i": dict(off=-1),
    "the position part is one column off: row i goes by T - 1 - i, not less": dict(off=1),
    "keys and values are exchanged": dict(swap_kv=True),
    "the keys serve as values, too": dict(values="keys"),
    "Q is read backwards: it comes with descending distances already": dict(flip=True),
    "nothing is hidden: the future shows (masked_fill gives a new tensor, masked_fill_ changes the "
    "old one)": dict(mask="none"),
    "what is to be seen is hidden, and the other way round": dict(mask="inverted"),
    "the position part is not hidden: add it BEFORE the mask, its upper cells are leftovers":
    dict(mask="content"),
    "hidden keys get a score of about 0: a score of 0 is not a probability of 0": dict(mask="zero"),
    "hidden probabilities are set to 0 after the softmax: the others then do not sum to 1":
    dict(mask="after"),
    "hidden keys get a large negative number: with scores like these that is not enough; use -inf":
    dict(mask="finite"),
    "the softmax runs over the queries: a query's probabilities over its KEYS sum to 1":
    dict(axis=-2),
    "the heads are joined in the wrong order: (B, H, T, C) must become (B, T, H, C) first, a "
    "reshape alone exchanges no axes": dict(join="reshape"),
    "the heads are joined in the wrong order: (B, T, C, H) mixes them; one head after the other is "
    "(B, T, H, C)": dict(join="mixed"),
    "the heads are not joined: (B, T, H, C) becomes (B, T, H * C)": dict(join="not"),
    "the heads are not joined: (B, H, T, C) becomes (B, T, H * C)": dict(join="not at all"),
    "W_o is applied here, and once more where this function is called": dict(W_o=True),
}


def content_and_position(q, k, Q, u, v):
    """Both parts of the score, all lanes and heads by einsum, the second not yet shifted."""
    return (torch.einsum("bhtc,bhkc->bhtk", q + u.unsqueeze(1), k),
            torch.einsum("bhtc,hkc->bhtk", q + v.unsqueeze(1), Q))


def score_oracle(q, k, Q, u, v):
    """In the place of lesson 4's relative_score; Wrong if the arguments do not fit each other."""
    shapes = [tensor_shape(z) for z in (q, k, Q, u, v)]
    found = list(map(str, shapes))
    fit = all(shapes) and [len(shape) for shape in shapes] == [4, 4, 3, 2, 2]
    if fit:
        (B, H, T, C), K = shapes[0], shapes[1][2]
        fit = shapes[1:] == [(B, H, K, C), (H, K, C), (H, C), (H, C)] and T <= K
    demand(fit, "relative_score takes q (B, H, T, C), k (B, H, K, C), Q (H, K, C), u and v (H, C), "
           f"in this order, but it got {', '.join(found)}")
    content, position = content_and_position(q, k, Q, u, v)
    return content + oracle_shift(position)


def attention_oracle(a, q, k, value, Q, u, v, hidden, **c):
    """The equation; `c` changes one parameter."""
    (B, H, T, C), K, D = q.shape, k.shape[2], a.W_q.in_features
    if c.get("swap_kv"):
        k, value = value, k
    value = k if c.get("values") else value
    Q = Q.flip(1) if c.get("flip") else Q
    if c.get("swap"):
        u, v = v, u
    u, v = {"u": (u, u), "v": (v, v)}.get(c.get("both"), (u, v))
    u, v = {"u": (0 * u, v), "v": (u, 0 * v)}.get(c.get("no"), (u, v))
    scale, s = c.get("scale"), C ** -0.5
    q, s = (s * q, 1.0) if scale == "q" else (q, s)
    content, position = content_and_position(q, k, Q, u, v)
    shift = c.get("shift", "position")
    if c.get("off") == -1:  # zeros come in
        position = oracle_shift(nn.functional.pad(position, (0, 1))).roll(-1, -1)[..., :-1]
    elif shift in ("position", "both", "twice"):
        position = oracle_shift(position).roll(c.get("off", 0), -1)
    content = oracle_shift(content) if shift in ("content", "both") else content
    s = {"none": 1.0, "D": D ** -0.5, "HC": (H * C) ** -0.5, "C": 1 / C, "inverse": C ** 0.5,
         "K": K ** -0.5}.get(scale, s)
    content = (1.0 if scale == "position" else s) * content * (c.get("content") is not False)
    position = (1.0 if scale == "content" else s) * position * (c.get("position") is not False)
    mask, axis = c.get("mask"), c.get("axis", -1)
    if mask == "content":
        content = content.masked_fill(hidden, 0.0)
    score = content + position
    score = oracle_shift(score) if shift == "twice" else score
    if mask in (None, "inverted", "finite", "zero"):
        fill = {"finite": -30.0, "zero": 0.0}.get(mask, -torch.inf)
        score = score.masked_fill(~hidden if mask == "inverted" else hidden, fill)
    p = score.softmax(axis)
    if mask == "after":
        p = p.masked_fill(hidden, 0.0)
    out = torch.einsum("bhtk,bhkc->bthc", p, value)
    if c.get("join", "").startswith("not"):
        return out if c["join"] == "not" else out.transpose(1, 2)
    out = {"reshape": out.transpose(1, 2), "mixed": out.mT}.get(c.get("join"), out)
    out = out.reshape(B, T, H * C)
    return out @ a.W_o.weight.T if c.get("W_o") else out


def not_finite(given, hidden):
    """A result with NaN or inf has many causes; what the dropout was given tells them apart."""
    if given and all(z.shape[-2:] == hidden.shape for z in given):
        p = torch.cat([z.reshape(-1, *hidden.shape) for z in given])
        if not p.isnan().any() and p.isinf().any():
            return ("there is no softmax: dropout_attention gets scores, among them -inf, and "
                    "should get probabilities")
        if p.isnan().equal(hidden.expand_as(p)):
            return ("the softmax does not run over the keys: for a hidden key it finds nothing but "
                    "-inf and gives NaN; a query's probabilities over its KEYS sum to 1")
        if p.isnan()[:, ~hidden].all():
            return ("all probabilities are NaN: a score is +inf, or the mask was multiplied by "
                    "-inf (0 * -inf is NaN); masked_fill puts -inf where it belongs")
    return "the result holds NaN or inf: 0 * inf or inf - inf on the way"


def attention_of(D, H, C):
    """A RelativeAttention in float64 with large weights, whose dropout only looks."""
    lesson_5 = lesson(5)
    a = lesson_5.RelativeAttention(
        lesson_5.Config(7, n_layer=1, d_model=D, n_head=H, d_head=C, d_inner=9)).double()
    for W in a.parameters():
        nn.init.normal_(W, std=0.7)
    a.dropout_attention = Times(1.0)
    return a


@check("relative_attention")
def check_relative_attention(attend):
    # what lesson 4 does is an oracle's work here, by whatever name it is called
    with replaced(lesson(5), relative_score=score_oracle), replaced(
            lesson(4), relative_score=score_oracle, rel_shift=oracle_shift):
        judge_attention(attend)


def judge_attention(attend):
    """All that is asked of `attend`."""
    for B, T, M, H, C, D in ((2, 3, 4, 5, 6, 8), (3, 4, 2, 5, 7, 8), (2, 5, 0, 3, 4, 10),
                             (2, 1, 5, 3, 4, 8), (4, 3, 5, 2, 7, 14), (2, 3, 1, 2, 3, 6)):
        K, a = M + T, attention_of(D, H, C)
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
            (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C))]
        hidden = ~seen_cells(T, M, most=max(2, K - 2))
        what = f"attend for B {B}, H {H}, T {T}, K {K}, C {C}"
        got = told(what, {f"({T}) must match the size of tensor b ({H})": "u or v is added along "
                          "time: (H, C) needs one axis more to meet (B, H, T, C)",
                          f"({B}) must match the size of tensor b ({H})": "u or v is added along "
                          "the lanes: (H, C) needs one axis more, not two, to meet (B, H, T, C)",
                          "view size is not compatible": "view refuses what transpose leaves "
                          "behind: reshape and flatten copy it",
                          f"({K}) must match the size of tensor b ({K + 1})": "the position part "
                          "has a column more than there are keys: of the padded numbers the first "
                          "T are dropped"},
                   lambda: attend(a, *leaves, hidden))
        wanted = attention_oracle(a, *leaves, hidden)
        if isinstance(got, torch.Tensor) and not got.isfinite().all():
            raise Wrong(f"{not_finite(a.dropout_attention.given, hidden)}\n  {what}")
        demand(a.dropout_attention.given or not isinstance(got, torch.Tensor),
               "dropout_attention is not called: it stands between the softmax and the values",
               what)
        expect(what, got, wanted, {m: (lambda c=c: attention_oracle(a, *leaves, hidden, **c))
                                   for m, c in ATTENTION.items()}, tolerance=1e-9)
        same_slopes(what, ["q", "k", "value", "Q", "u", "v"], gradients(got, leaves),
                    gradients(wanted, leaves), 1e-8)

    B, T, M, H, C = 2, 3, 2, 7, 4
    a, hidden = attention_of(6, H, C), ~seen_cells(T, M)
    shapes = (B, H, T, C), (B, H, M + T, C), (B, H, M + T, C), (H, M + T, C), (H, C), (H, C)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    got, seen = attend(a, *given, hidden), a.dropout_attention.given
    p, rows = torch.cat([z.flatten() for z in seen]), B * H * T  # all at once, or head by head
    demand(len(p) == rows * (M + T), "dropout_attention is called with "
           f"{', '.join(str(tuple(z.shape)) for z in seen[:3])}: it should see each of the "
           f"probabilities (B, H, T, K) = {(B, H, T, M + T)} once")
    demand(abs(p.sum() - rows) < 1e-9 and p.min() >= 0, "dropout_attention must see the "
           "probabilities: the rows that it got do not sum to 1")
    a.dropout_attention.factor = 0.0
    demand(bool((attend(a, *given, hidden) == 0).all()),
           "the result of dropout_attention is not used")
    # scores of visible keys far below any "large enough" number; only what query 0 must not see
    # has a value
    a.dropout_attention.factor = 1.0
    q, k, _, Q, u, v = given
    value = hidden[0].double()[:, None].expand(shapes[2])
    given = [1e100 * q.abs(), -1e100 * k.abs(), value, Q, u, v]
    demand(bool((attend(a, *given, hidden)[:, 0] == 0).all()), "a hidden key got some "
           "probability: with scores as large as these a large negative number is not enough; "
           "fill with -inf")


class Times(nn.Module):
    """Stands for a dropout: keeps what it is given, and multiplies, so that one sees whether it
    was called."""

    p = 0.0  # who asks for the rate of a dropout gets one that does nothing

    def __init__(self, factor):
        super().__init__()
        self.factor, self.given = factor, []

    def forward(self, z):
        self.given.append(z.detach())
        return self.factor * z


class Mix(nn.Module):
    """Stands for an attention: depends on every argument, each in its own way, and differently in
    each feature, for what is the same in all of them a norm takes away."""

    def forward(self, h, memory, R, u, v, hidden):
        slope = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)
        return h.roll(1, 1) + (2 * memory.sum() - 0.5 * R.sum() + 3 * u.sum() - v.sum()
                               + 5 * hidden.double().mean()) * slope


@check("layer")
def check_layer(forward):
    lesson_5 = lesson(5)
    B, T, M, H, C, D, FF = 2, 3, 4, 8, 5, 6, 9
    config = lesson_5.Config(9, n_layer=1, d_model=D, n_head=H, d_head=C, d_inner=FF)
    layer = lesson_5.Layer(config).double()
    for w in layer.parameters():
        nn.init.normal_(w)
    layer.attention = Mix()
    drops = {"dropout_output": Times(1.5), "dropout_inner": Times(0.7), "dropout_ff": Times(1.9)}
    for name, module in drops.items():
        setattr(layer, name, module)
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in (
        (B, T, D), (B, M, D), (M + T, D), (H, C), (H, C))] + [~seen_cells(T, M)]

    def oracle(dropout=(1.5, 0.7, 1.9), pre=(), residual=(1, 1), norms=("norm_1", "norm_2"),
               relu=torch.relu, again=False, order=range(6), ff=True, sums=(1, 1), after=(1, 1),
               before=(1, 1), late=1):
        """What is to be; `before`, `late`, `sums` and `after` are dropouts in other places: of a
        block's input, of W_2's result, of a sum, of a norm's result."""
        first, second = (getattr(layer, n) if n else (lambda z: z) for n in norms)
        h, *context = (arguments[n] for n in order)
        z = before[0] * (first(h) if 1 in pre else h)
        o = sums[0] * (residual[0] * h + dropout[0] * layer.attention(z, *context))
        o = after[0] * (o if 1 in pre else first(o))
        if not ff:
            return o
        inner = dropout[1] * relu(layer.W_1(before[1] * (second(o) if 2 in pre else o)))
        out = late * dropout[2] * layer.W_2(inner)
        out = sums[1] * ((h if again else o) * residual[1] + out)
        return after[1] * (out if 2 in pre else second(out))

    wanted = oracle()
    known = {
        "the norms stand before the blocks (pre-norm): this layer normalises each SUM": oracle(
            pre=(1, 2)),
        "norm_1 stands before the attention (pre-norm): it normalises the SUM": oracle(pre=(1,)),
        "norm_2 stands before the feed-forward network (pre-norm): it normalises the SUM": oracle(
            pre=(2,)),
        "h is not added to the attention's result: the first residual is missing": oracle(
            residual=(0, 1)),
        "the second residual is missing: what norm_1 gave is added to the feed-forward's result":
        oracle(residual=(1, 0)),
        "both residuals are missing": oracle(residual=(0, 0)),
        "your second sum adds the layer's input again; it must add what norm_1 gave": oracle(
            again=True),
        "norm_1 and norm_2 are exchanged": oracle(norms=("norm_2", "norm_1")),
        "norm_1 is used twice": oracle(norms=("norm_1", "norm_1")),
        "norm_2 is used twice": oracle(norms=("norm_2", "norm_2")),
        "norm_1 is missing": oracle(norms=(None, "norm_2")),
        "norm_2 is missing": oracle(norms=("norm_1", None)),
        "both norms are missing": oracle(norms=(None, None)),
        "ReLU is missing: two linear maps in a row are one": oracle(relu=lambda z: z),
        "the network between W_1 and W_2 is ReLU here, not GELU": oracle(
            relu=nn.functional.gelu),
        "dropout_output is missing, after the attention": oracle(dropout=(1, 0.7, 1.9)),
        "dropout_inner is missing, between ReLU and W_2": oracle(dropout=(1.5, 1, 1.9)),
        "dropout_ff is missing, after W_2": oracle(dropout=(1.5, 0.7, 1)),
        "all three dropouts are missing": oracle(dropout=(1, 1, 1)),
        "dropout_output and dropout_ff are exchanged": oracle(dropout=(1.9, 0.7, 1.5)),
        "dropout_inner and dropout_ff are exchanged": oracle(dropout=(1.5, 1.9, 0.7)),
        "the feed-forward part is missing": oracle(ff=False),
        "the residual is added after the norm, twice: each norm is of the SUM": lambda:
        (o := arguments[0] + layer.norm_1(1.5 * layer.attention(*arguments)))
        + layer.norm_2(1.9 * layer.W_2(0.7 * layer.W_1(o).relu())),
        "u and v are exchanged on the way to the attention": oracle(order=(0, 1, 2, 4, 3, 5)),
        "memory and R are exchanged on the way to the attention": oracle(order=(0, 2, 1, 3, 4, 5)),
        "dropout_output is used twice: after W_2 stands dropout_ff": oracle(
            dropout=(1.5, 0.7, 1.5)),
        "the dropout stands around the whole sum: only around what the attention made":
        oracle(dropout=(1, 0.7, 1.9), sums=(1.5, 1)),
        "the dropout stands around the whole second sum: only around what W_2 made": oracle(
            dropout=(1.5, 0.7, 1), sums=(1, 1.9)),
        "both dropouts stand around the whole sums: each only around what its block made": oracle(
            dropout=(1, 0.7, 1), sums=(1.5, 1.9)),
        "dropout_output stands after norm_1: it belongs to what the attention made, before the sum":
        oracle(dropout=(1, 0.7, 1.9), after=(1.5, 1)),
        "dropout_ff stands after norm_2: it belongs to what W_2 made, before the sum": oracle(
            dropout=(1.5, 0.7, 1), after=(1, 1.9)),
        "dropout_output and dropout_ff stand after the norms: they belong before the sums": oracle(
            dropout=(1, 0.7, 1), after=(1.5, 1.9)),
        "dropout_output stands before the attention, should be after it": oracle(
            dropout=(1, 0.7, 1.9), before=(1.5, 1)),
        "dropout_inner stands before W_1, should be between ReLU and W_2": oracle(
            dropout=(1.5, 1, 1.9), before=(1, 0.7)),
        "dropout_inner stands after W_2, should be between ReLU and W_2": oracle(
            dropout=(1.5, 1, 1.9), late=0.7),
    }
    for module in drops.values():
        module.given.clear()
    got = forward(layer, *arguments)
    shapes = {name: [tuple(z.shape) for z in module.given] for name, module in drops.items()}
    expect("forward of the layer (the attention is a stand-in, the dropouts multiply by 1.5, 0.7 "
           "and 1.9)", got, wanted, known, tolerance=1e-9)
    demand(shapes == {"dropout_output": [(B, T, D)], "dropout_inner": [(B, T, FF)],
                      "dropout_ff": [(B, T, D)]},
           f"the dropouts were called on {shapes}: once each, dropout_inner between W_1 and W_2")
    h = arguments[0].clone().requires_grad_()
    leaves = [h, *layer.parameters()]
    slopes = gradients(forward(layer, h, *arguments[1:]), leaves)
    arguments[0] = h
    names = ["h", *(name for name, _ in layer.named_parameters())]
    same_slopes("forward of the layer", names, slopes, gradients(oracle(), leaves), 1e-8)


@check("hidden_keys")
def check_hidden_keys(hidden_keys):
    for T, m, M in ((6, 2, 4), (3, 2, 2), (4, 3, 3), (4, 2, 3), (4, 0, 3), (7, 3, 3), (4, 0, 0),
                    (1, 3, 3), (5, 4, 2), (2, 6, 6)):
        for same_length in (True, False):
            most = M + 1 if same_length else None
            wanted, future = ~seen_cells(T, m, most), ~seen_cells(T, m)
            far = wanted & ~future
            what = f"hidden_keys(T={T}, m={m}, M={M}, same_length={same_length})"
            known = {
                "same_length is ignored: with it keys more than M back are hidden":
                future,
                "keys far back are hidden although same_length is off": ~seen_cells(T, m, M + 1),
                "each query sees M keys, should be M + 1: itself and M before it; a key exactly M "
                "back is seen": ~seen_cells(T, m, M) if M else torch.ones_like(wanted),
                "each query sees M + 2 keys, one too many": ~seen_cells(T, m, M + 2),
                "m, the rows held so far, was taken for M, the limit": ~seen_cells(T, m, m + 1),
                "T, the segment length, was taken for M": ~seen_cells(T, m, T + 1),
                "the memory is forgotten: query i is key m + i": ~seen_cells(
                    T, m, most, first=-m) if m else wanted,
                "query i is taken for key M + i: the memory holds m rows so far": ~seen_cells(
                    T, m, most, first=M - m),
                "True and False are exchanged: True means hidden": ~wanted,
                "nothing is hidden: a key is hidden if it is too far back OR in the future":
                torch.zeros_like(wanted),
                "only far keys are hidden, and the future shows": far,
                "one key of the future shows": far | ~seen_cells(T, m, first=1),
                "a query does not see itself": far | ~seen_cells(T, m, first=-1),
                "the memory is cut to M rows once for all queries: the limit moves on with each "
                "query": future | (torch.arange(m + T) < m - M),
                "queries and keys have changed places: each row belongs to a query": wanted.T,
            }
            got = hidden_keys(T, m, M, same_length)
            expect(what, got, wanted, known)
            demand(got.dtype == torch.bool, f"the mask is {got.dtype}, should be bool", what)
    for same_length in (True, False):
        uses_device(lambda device: hidden_keys(2, 3, 3, same_length, device=device))


@check("distance_encoding")
def check_distance_encoding(distance_encoding):
    lesson_5 = lesson(5)

    def encode(position, D):
        if not isinstance(position, torch.Tensor) or position.dim() != 1:
            raise Wrong(f"sinusoid wants a tensor (n,) of positions, got {str(position)[:50]}")
        return unit_circle(position.tolist(), D)

    for K, D, clamp in ((6, 4, 0), (6, 4, 2), (5, 6, 1), (4, 6, 9), (7, 4, -1), (1, 2, 0),
                        (9, 4, 8), (9, 4, 3)):
        down = list(range(K - 1, -1, -1))
        limit = clamp if clamp > 0 else K
        wanted = unit_circle([min(d, limit) for d in down], D)
        known = {
            "your distances ascend; they must descend, from K - 1 in the first row to 0":
            unit_circle([min(d, limit) for d in reversed(down)], D),
            "clamp_len has no effect: every DISTANCE beyond it becomes clamp_len": unit_circle(
                down, D),
            "distance 0 is missing: a query sees itself as well": unit_circle(
                [min(d, limit) for d in down[:-1]], D),
            "the largest distance, K - 1, is missing": unit_circle(
                [min(d, limit) for d in down[1:]], D),
            "it is clamped from the wrong side: the FAR distances become clamp_len, the near ones "
            "stay as they are": unit_circle([max(d, clamp) for d in down], D),
            "the row was clamped, not the distance": unit_circle(
                [K - 1 - min(r, limit) for r in range(K)], D),
            "clamp_len = 0 means no clamp, but here everything became distance 0": unit_circle(
                [0] * K, D),
            "a clamp_len of 0 or less means no clamp": unit_circle(
                [min(d, clamp) for d in down], D),
            "the distances run from K to 1: the last row must be distance 0": unit_circle(
                [min(d + 1, limit) for d in down], D),
            "the far distances became clamp_len - 1": unit_circle(
                [min(d, limit - 1) for d in down], D),
            "the far distances became clamp_len + 1": unit_circle(
                [min(d, limit + 1) for d in down], D),
            "the far distances became 0: they become clamp_len": unit_circle(
                [d if d <= limit else 0 for d in down], D),
            "the far distances wrap around: they become clamp_len": unit_circle(
                [d % limit if limit else d for d in down], D),
        }
        with replaced(lesson_5, sinusoid=encode):
            got = distance_encoding(K, D, clamp)
        expect(f"distance_encoding(K={K}, D={D}, clamp_len={clamp})", got, wanted, known,
               tolerance=1e-9)
    with replaced(lesson_5, sinusoid=encode):
        expect("distance_encoding(5, 4), no clamp_len given", distance_encoding(5, 4),
               unit_circle([4, 3, 2, 1, 0], 4), tolerance=1e-9)
    with replaced(lesson_5, sinusoid=lambda position, D: position[:, None].expand(-1, D) * 1.0):
        for clamp in (0, 2):
            uses_device(lambda device: distance_encoding(5, 4, clamp, device=device))


def judge_draws(sample, logits, top_k, temperature, weights, known, what):
    """4,000 draws from one row of logits against the probabilities; Wrong if they differ."""
    torch.manual_seed(0)
    V = len(logits)
    got = told(what, {"probability tensor contains": "multinomial got negative numbers: it needs "
                      "probabilities, so take the softmax"},
               lambda: sample(logits.expand(4000, V), top_k, temperature))
    demand(got is not None, "nothing is returned: did you forget `return`?", what)
    demand(tensor_shape(got) == (4000, 1), "the result is "
           f"{tensor_shape(got) or type(got).__name__}, should be a tensor of shape (B, 1)", what)
    demand(not got.is_floating_point() and int(got.min()) >= 0 and int(got.max()) < V,
           "the results are not tokens of the vocabulary, 0 ... V - 1", what)
    share = torch.bincount(got.flatten(), minlength=V) / 4000

    def near(weights):
        share_of = torch.tensor(weights) / sum(weights)
        return (share - share_of).abs().max() < 0.04 and not share[share_of == 0].any()
    if not near(weights):
        diagnosis = next((m for m, w in known.items() if near(w)),
                         "the tokens are drawn with other probabilities (does your softmax run "
                         "over the tokens, the last dim, and not over the rows?)")
        rows = [" ".join(f"{z:5.2f}" for z in row) for row in (
            (torch.tensor(weights) / sum(weights)).tolist(), share.tolist())]
        raise Wrong(f"{diagnosis}\n  {what}\n    share of the draws, token 0 ... {V - 1}\n"
                    f"    expected  [{rows[0]}]\n    got       [{rows[1]}]")


@check("sample_top_k")
def check_sample_top_k(sample_top_k):
    rows = torch.eye(4, 7)[:, [1, 0, 2, 4, 5, 3, 6]] * 50  # the best token differs from row to row
    winners, what = rows.argmax(-1, keepdim=True), "sample_top_k(four rows with a clear winner, 2)"
    got = sample_top_k(rows, 2)
    demand(not same(got, winners[:1].expand(4, 1)), "every row gets the same token: each row of "
           "the logits is drawn by itself", what)
    logits = torch.tensor([0.0, 3.0, 1.0, -0.5, -1.0, 2.0])
    V = len(logits)
    e = [math.exp(z) for z in logits]
    for top_k, T in ((3, 1.0), (3, 0.5), (4, 2.0), (V, 1.0), (1, 1.0), (2, 3.0)):
        order = sorted(range(V), key=lambda s: -logits[s])
        best = order[:top_k]

        def weights(temperature=T, chosen=best, logits=logits):
            return [math.exp(logits[s] / temperature) if s in chosen else 0.0 for s in range(V)]
        known = {
            "k + 1 candidates": weights(chosen=order[: top_k + 1]),
            "top_k is ignored: tokens beyond the k best are drawn": weights(chosen=range(V)),
            "temperature is ignored": weights(1.0),
            "you multiply the logits by the temperature; they must be divided by it":
            weights(1 / T),
            "the logits are divided by the temperature twice": weights(T * T),
            "always the best token: draw by the probabilities (torch.multinomial)": weights(
                chosen=best[:1]),
            "the k best are drawn evenly; they must be drawn by their softmax, over the tokens "
            "(the last dim), not over the rows": [
                1.0 if s in best else 0.0 for s in range(V)],
            "what multinomial draws is a place among the k best, not yet a token: translate it": [
                weights()[best[s]] if s < top_k else 0.0 for s in range(V)],
            "the k worst tokens are drawn": weights(chosen=order[::-1][:top_k]),
            "k - 1 candidates": weights(chosen=order[: max(1, top_k - 1)]),
            "the logits are drawn from as they are: multinomial needs probabilities, so take the "
            "softmax": [max(0.0, logits[s].item()) if s in best else 0.0 for s in range(V)],
            "the softmax is taken twice": [
                math.exp(math.exp(logits[s] / T) / sum(weights())) if s in best else 0.0
                for s in range(V)],
            "the temperature is applied to the probabilities, after the softmax over all": [
                math.exp(e[s] / sum(e) / T) if s in best else 0.0 for s in range(V)],
        }
        judge_draws(sample_top_k, logits, top_k, T, weights(), known,
                    f"sample_top_k(logits {logits.tolist()}, top_k={top_k}, temperature={T})")
    expect(what, got, winners)
    many = torch.randn(50, 9)
    draws = [sample_top_k(many, 5, 1.0, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    demand(draws[0].equal(draws[1]), "`generator` is ignored: the same seed must give the same "
           "tokens")
    demand(not draws[0].equal(draws[2]), "another seed gives the same tokens")
    copy = many.clone()
    state = torch.get_rng_state()
    sample_top_k(many, 5, 0.7, torch.Generator().manual_seed(1))
    demand(many.equal(copy), "the logits were changed in place")
    demand(torch.get_rng_state().equal(state), "a number is drawn without the `generator`")
    for top_k, T in ((0, 1.0), (10, 1.0), (-1, 1.0), (2, 0.0), (2, -1.0), (2, math.nan)):
        refuses(f"top_k = {top_k}, temperature = {T} at V = 9",
                lambda: sample_top_k(many, top_k, T))
    for top_k in (1, 9):
        sample_top_k(many, top_k)


class Adder(nn.Module):
    """A language model by arithmetic: the next token is the sum of all read so far, modulo V.

    Its memory is the number of tokens and their sum, so a token that is read twice, or a memory
    that is not handed on, shows in the very next token.
    """

    def __init__(self, V, broken_at=None):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V, mem_len=8, n_layer=1)
        self.u = nn.Parameter(torch.zeros(1))
        self.calls, self.broken_at = [], broken_at

    def forward(self, x, memory=None, y=None, last_only=False):
        self.calls.append((tuple(x.shape), memory is not None, self.training,
                           torch.is_grad_enabled()))
        if self.broken_at == len(self.calls):
            raise ValueError("on purpose")
        past = torch.zeros(len(x), dtype=torch.int64) if memory is None else memory[0]
        sums = past[:, None] + (x + 1).cumsum(1)
        V, read = self.config.vocab_size, sums[:, -1:] if last_only else sums
        return 20.0 * nn.functional.one_hot(read % V, V), [sums[:, -1]]


@check("generate")
def check_generate(generate):
    lesson_5 = lesson(5)
    drawn = []

    def best(logits, top_k, temperature=1.0, generator=None):
        demand(logits.dim() == 2, "sample_top_k gets the logits of the last position, (B, V), not "
               f"those of all, {tuple(logits.shape)}")
        demand(isinstance(top_k, int) and isinstance(temperature, (int, float)), "sample_top_k "
               f"gets top_k and temperature, two numbers, not {top_k} and {temperature}")
        drawn.append((tuple(logits.shape), top_k, temperature, generator))
        return logits.argmax(-1, keepdim=True)

    def oracle(prompt, n, V, reread=False, forget=False, first=False, stuck=False):
        out = []
        for row in prompt.tolist():
            total, new = sum(row) + len(row), []
            token = (row[0] + 1 if first else total) % V
            for _ in range(n):
                new.append(token)
                read = row if stuck else row + new if reread else [token]
                total = (0 if forget else total) + sum(read) + len(read)
                token = total % V
            out.append(new)
        return torch.tensor(out, dtype=torch.int64).view(len(prompt), n)

    generator = torch.Generator()
    for B, P, n, V in ((2, 3, 6, 101), (3, 1, 4, 53), (1, 5, 1, 53), (2, 4, 0, 53)):
        prompt = torch.randint(V, (B, P))
        model, wanted = Adder(V).train(), oracle(prompt, n, V)
        drawn.clear()
        what = (f"generate(model, prompt (B = {B}, P = {P}), n_tokens={n}) for a model whose next "
                "token is the sum of all it has read")
        with replaced(lesson_5, sample_top_k=best, generate=generate):
            got = generate(model, prompt, n, 7, 0.5, generator)
        shapes = [c[0] for c in model.calls]
        known = {
            "the prompt is returned as well: only the new tokens are asked for":
            torch.cat([prompt, wanted], 1),
            "the prompt is fed again in each step, although the memory holds it: everything is "
            "read twice": oracle(prompt, n, V, reread=True),
            "the prompt is read again in each step, and the new token never": oracle(
                prompt, n, V, stuck=True),
            "the memory is not handed on: every step forgets what was read before": oracle(
                prompt, n, V, forget=True),
            "the first token is drawn from the logits of the first position: the LAST one "
            "predicts what follows": oracle(prompt, n, V, first=True),
            "the first new token is lost": oracle(prompt, n + 1, V)[:, 1:],
            "one token too many": oracle(prompt, n + 1, V),
            "one token too few": wanted[:, :-1] if n else wanted,
        }
        expect(what, got, wanted, known, dtype=torch.int64)
        once = [(B, P)] + [(B, 1)] * n  # who reads the last token as well does no harm
        demand(shapes in (once[:-1], once), "the prompt is read once, then one token at a time; "
               f"the model was called with {shapes}", what)
        demand(all(memory == (i > 0) for i, (_, memory, _, _) in enumerate(model.calls)),
               "the memory of one call goes into the next, and the first has none", what)
        demand(not any(training for _, _, training, _ in model.calls), "the model is in training "
               "mode while it generates: dropout would be on", what)
        demand(not any(grad for _, _, _, grad in model.calls), "gradients are on: nothing is "
               "trained here (@torch.no_grad())", what)
        demand(model.training, "the model's mode is not put back: it was in training mode", what)
        demand(all(d == ((B, V), 7, 0.5, generator) for d in drawn),
               "sample_top_k must get logits (B, V), top_k, temperature and generator as they were "
               f"given; it got shape {drawn[0][0]}, {drawn[0][1:3]}" if drawn else "", what)
        model = Adder(V).eval()
        drawn.clear()
        with replaced(lesson_5, sample_top_k=best, generate=generate):
            generate(model, prompt, n, 7)
        demand(all(d[1:] == (7, 1.0, None) for d in drawn), "sample_top_k must get top_k 7, "
               f"temperature 1.0 and no generator, as given; it got {drawn and drawn[0][1:]}", what)
        demand(not model.training, "the model's mode is not put back: it was in eval mode", what)
    for V, wanted_k in ((101, 40), (27, 27)):
        drawn.clear()
        with replaced(lesson_5, sample_top_k=best, generate=generate):
            generate(Adder(V), torch.tensor([1, 2, 3]), 1, 7, 0.5, generator)
            demand(drawn == [((1, V), 7, 0.5, generator)], "for a prompt (P,) of one dimension "
                   "top_k, temperature or generator is lost")
            drawn.clear()
            got = generate(Adder(V), torch.tensor([1, 2, 3]), 4)
        expect("generate for a prompt (P,) of one dimension", got,
               oracle(torch.tensor([[1, 2, 3]]), 4, V)[0])
        demand(drawn[0][1] == wanted_k, f"top_k None is min(40, V): at V = {V} that is "
               f"{wanted_k}, not {drawn[0][1]}")
    model = Adder(53, broken_at=2).train()
    with replaced(lesson_5, sample_top_k=best, generate=generate):
        try:
            generate(model, torch.tensor([[1, 2]]), 4)
        except ValueError:
            pass
        demand(model.training, "after an error the model stays in eval mode: put the mode back "
               "whatever happens (try ... finally)")
        refuses("n_tokens = -1", lambda: generate(Adder(53), torch.tensor([[1]]), -1))


# ---- train.py -----------------------------------------------------------------------------------

class Ledger(nn.Module):
    """A model of one weight matrix that writes down how it is called.

    poison = (call, number, constant): what that call adds to its losses, as a constant (which has
    no gradient) or times the loss.
    """

    def __init__(self, V=7, D=4, poison=None):
        super().__init__()
        self.W = nn.Parameter(torch.randn(V, V, dtype=torch.float64))
        self.u = nn.Parameter(torch.randn(V, dtype=torch.float64))
        self.calls, self.poison = [], poison
        self.config = lesson(5).Config(V, d_model=D, mem_len=3)

    def forward(self, x, memory=None, y=None):
        self.calls.append(SimpleNamespace(
            x=x, y=y, memory=memory, training=self.training, config=self.config,
            autocast=torch.is_autocast_enabled("cpu"), grad=torch.is_grad_enabled()))
        demand(y is not None, "the model is called without targets: model(x, memory, y) gives the "
               "losses and the new memory")
        past = 0.0 if memory is None else memory[1][:, :, :1].mean(1)
        losses = -(self.W[x] + self.u * past[..., None] if memory is not None
                   else self.W[x]).log_softmax(-1).gather(-1, y[..., None])[..., 0]
        if self.poison and len(self.calls) == self.poison[0]:
            losses = losses + self.poison[1] * (1.0 if self.poison[2] else losses)
        rows = x[:, :, None].double() + torch.zeros(4)
        return losses, [(rows + n).detach() for n in range(2)]


class Descent:
    """Plain gradient descent that counts its steps (torch.optim takes a second to get ready)."""

    def __init__(self, model, lr):
        self.parameters, self.lr, self.steps = list(model.parameters()), lr, 0
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            p.grad = None

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for p in self.parameters:
                if p.grad is not None:
                    p -= self.lr * p.grad


@check("train_step")
def check_train_step(train_step):
    run = replace(lesson("train").RUNS_OF["tiny"], dtype="float32")
    B, T, V = 5, 6, 7
    x, y = torch.randint(V, (2, B, T))
    memory = [torch.randn(B, 3, 4, dtype=torch.float64) for _ in range(2)]
    copies = [layer.clone() for layer in memory]

    for past, clip in ((memory, 1e9), (None, 1e9), (memory, 0.05), (None, 0.05)):
        torch.manual_seed(1)
        model = Ledger()
        begin = {n: p.detach().clone() for n, p in model.named_parameters()}
        stale = {n: torch.randn_like(p) for n, p in model.named_parameters()}

        def slope(loss):
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True,
                                        retain_graph=True)
            return {n: torch.zeros_like(begin[n]) if g is None else g
                    for n, g in zip(begin, found)}
        losses, new = model(x, past, y)
        exact, rate = slope(losses.mean()), 0.5
        norm = sum(g.pow(2).sum() for g in exact.values()).sqrt().item()

        def after(grads, clip=clip, stale=None):
            grads = {n: g + (stale[n] if stale else 0) for n, g in grads.items()}
            length = sum(g.pow(2).sum() for g in grads.values()).sqrt()
            factor = min(1.0, clip / (length.item() + 1e-6))
            return torch.cat([(begin[n] - rate * factor * g).flatten() for n, g in grads.items()])

        for n, p in model.named_parameters():
            p.grad = stale[n].clone()
        model.calls.clear()
        settings = replace(run, clip=clip)
        what = f"train_step with clip {clip:g}, {'no memory' if past is None else 'a memory'}"
        got = train_step(model, Descent(model, rate), x, y, past, settings)
        demand(got is not None, "nothing is returned: did you forget `return`?", what)
        demand(isinstance(got, tuple) and len(got) == 3,
               f"the result is a {type(got).__name__}, should be a tuple of three: loss, norm, new "
               "memory", what)
        demand(len(model.calls) == 1, f"the model is called {len(model.calls)} times, should be "
               "once, with all lanes", what)
        call = model.calls[0]
        demand(call.x.equal(x) and call.y.equal(y), "the model does not get x and y as they are",
               what)
        if past is not None:
            demand(call.memory is not None, "the memory is not handed to the model", what)
            demand(all(a.equal(b) for a, b in zip(call.memory, past)),
                   "a lane got the memory of another lane", what)
        else:
            demand(call.memory is None, "without a memory the model gets None", what)
        demand(all(a.equal(b) for a, b in zip(memory, copies)), "the old memory was changed in "
               "place: a bad step must be able to hand it back", what)
        loss, found_norm, found_memory = got
        demand(isinstance(loss, float) and isinstance(found_norm, float),
               f"loss and norm are {type(loss).__name__} and {type(found_norm).__name__}, should "
               "be floats (.item()): a tensor would keep the graph alive", what)
        expect(f"the loss that {what} returns", loss, losses.mean().item(), {
            "the loss is the sum, not the mean": losses.sum().item(),
            "the loss is that of the first lane only": losses[0].mean().item(),
            "the loss is that of the last token only": losses[:, -1].mean().item(),
            "the loss is in bits: nats are asked for": losses.mean().item() / math.log(2),
        }, tolerance=1e-9)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        expect(f"the weights after {what}", weights, after(exact), {
            "the weights have not moved: optimizer.step() is missing": torch.cat(
                [w.flatten() for w in begin.values()]),
            "the gradients of the step before are still in: zero them first": after(
                exact, stale=stale),
            "the gradient is not clipped, or only after the step": after(exact, clip=1e9),
            "the gradient is that of the sum: the mean over B x T tokens is asked for":
            after(slope(losses.sum())),
            "the gradient is that of the last token only": after(slope(losses[:, -1].mean())),
            "the update goes uphill": torch.cat([(begin[n] + rate * g).flatten()
                                                 for n, g in exact.items()]),
        }, tolerance=1e-5 if clip < 1 else 1e-9)
        expect(f"the norm that {what} returns", found_norm, norm, {
            "you return the norm after clipping; it must be the one before, which "
            "clip_grad_norm_ returns": min(norm, clip)}, tolerance=1e-5)
        demand(isinstance(found_memory, list) and len(found_memory) == 2,
               "the new memory must be a list with a tensor for each layer", what)
        for n in range(2):
            expect(f"layer {n} of the memory that {what} returns", found_memory[n], new[n], {
                "this is the old memory: the model returned a new one": new[n] if past is None
                else past[n]})
    for poison in ((1, math.nan, False), (1, math.inf, True)):
        model = Ledger(poison=poison)
        before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        optimizer = Descent(model, 0.1)
        loss, norm, kept = train_step(model, optimizer, x, y, memory, replace(run, clip=0.25))
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        what = f"train_step where a loss is {poison[1]} and the gradient " + (
            "finite" if poison[2] else "too")
        demand(weights.equal(before) and not optimizer.steps, "a loss that is not a number reached "
               "the weights (or the optimizer): one such number spoils all of them", what)
        demand(kept is memory, "the memory of a bad step was kept: hand back the old one", what)
        demand(isinstance(loss, float) and isinstance(norm, float) and not math.isfinite(loss),
               "the bad loss is hidden: loss and norm are returned as they are, two floats; here "
               f"{loss} and {norm}", what)
    model = Ledger()
    model.W.register_hook(lambda gradient: gradient * math.inf)
    optimizer = Descent(model, 0.1)
    loss, norm, kept = train_step(model, optimizer, x, y, memory, replace(run, clip=0.25))
    demand(not optimizer.steps and kept is memory, "the loss is finite, but the gradient is not: "
           "this step must be left out as well")
    demand(isinstance(loss, float) and isinstance(norm, float) and math.isfinite(loss)
           and not math.isfinite(norm), "where only the gradient is bad, the loss is finite and "
           f"the norm is not; here they are {loss} and {norm}")
    model = Ledger()
    train_step(model, Descent(model, 0.1), x, y, None, replace(run, dtype="bf16"))
    demand(all(c.autocast for c in model.calls), "the model is called outside `with autocast(run, "
           "x.device.type)`: bf16 is asked for and not used")
    demand(not torch.is_autocast_enabled("cpu"), "autocast is still on after the step")
    model = Ledger()
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    real = model.forward

    def backward_inside(*arguments):  # as support/distributed.py's Learner does with micro-batches
        model.W.sum().backward()
        return real(*arguments)

    model.forward = backward_inside
    train_step(model, Descent(model, 1.0), x, y, None, replace(run, clip=1e9))
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    demand(moved[: model.W.numel()].mean() > 0.5, "the gradients are cleared after the model was "
           "called: clear them first, since with micro-batches the call makes backward passes of "
           "its own, whose gradients must stay")


@check("evaluate")
def check_evaluate(evaluate):
    train = lesson("train")
    run = replace(train.RUNS_OF["tiny"], dtype="float32", eval_segment=5, eval_mem_len=9,
                  eval_clamp_len=4)
    V = 7

    def one_lane(tokens, B):
        demand(B == 1, f"evaluation reads the text as ONE lane, not as {B}: at each lane's start "
               "the past would be missing")
        return tokens[None]

    def cut(stream, T, start=0):
        demand(stream.dim() == 2 and len(stream) == 1, "segments wants the lane (1, n) that lanes "
               f"gives, got shape {tuple(stream.shape)}")
        stream = stream[:, start:].long()
        return zip(stream[:, :-1].split(T, 1), stream[:, 1:].split(T, 1))

    names = dict(lanes=one_lane, segments=cut, progress=lambda items, label, total: items)
    for n, T in ((24, 5), (23, 11), (13, 1), (9, 50), (16, 5)):
        model = Ledger(V).train()
        config = model.config
        tokens = torch.randint(V, (n,), dtype=torch.uint8)
        settings = replace(run, eval_segment=T)
        what = f"evaluate(model, {n} tokens, ...) with eval_segment {T}"
        with replaced(train, **names):
            got = evaluate(model, tokens, settings)
        demand(got is not None, "nothing is returned: did you forget `return`?", what)
        demand(isinstance(got, float), f"the result is a {type(got).__name__}, should be a float",
               what)
        calls = list(model.calls)
        demand(calls, "the model is never called", what)
        x, y = tokens[:-1].long(), tokens[1:].long()
        segment = torch.arange(n - 1) // T  # which segment a token belongs to
        past = torch.tensor([0.0] + [part.double().mean() + 1 for part in x.split(T)])[segment]

        def entropies(past):
            scores = model.W.detach()[x] + past[:, None] * model.u.detach()
            return nn.functional.cross_entropy(scores, y, reduction="none")
        losses = entropies(past)
        total, alone = losses.sum().item(), entropies(0 * past).sum().item()
        means = [part.mean().item() for part in losses.split(T)]
        last = losses[segment == segment[-1]].sum().item()
        expect(what + " returns", got, total / (n - 1), {
            "the memory is not handed on from segment to segment": alone / (n - 1),
            "a mean of the segments' means: the last, shorter segment counts too much":
            sum(means) / len(means),
            "the sum is divided by the number of tokens: n tokens are n - 1 predictions":
            total / n,
            "the sum is not divided": total,
            "the last, shorter segment is left out": (total - last) / (n - 1),
            "the last, shorter segment is left out, and not counted": (total - last) / max(
                1, (n - 1) // T * T),
            "only the last segment counts": last / (n - 1),
            "the mean of the last segment only": means[-1],
            "the segments' means are added up": sum(means),
            "the means are added up and divided by the number of predictions":
            sum(means) / (n - 1),
            "the sum is divided by the number of segments": total / len(means),
            "the result is in bits: nats are asked for": total / (n - 1) / math.log(2),
            "the result is a perplexity: nats are asked for": math.exp(total / (n - 1)),
        }, tolerance=1e-9)
        skip = n // 2
        with replaced(train, **names):
            got = evaluate(model, tokens, settings, skip=skip)
        expect(what + f" with skip {skip} returns", got, losses[skip:].mean().item(), {
            "the first `skip` predictions are counted, too": total / (n - 1),
            "the sum of the others is divided by all predictions":
            losses[skip:].sum().item() / (n - 1),
            "skip counts predictions, not segments": losses[T:].sum().item() / (n - 1 - skip),
        }, tolerance=1e-9)
        demand(not any(c.training for c in calls), "dropout is on: call the model inside `with "
               "evaluating(model, run)`", what)
        demand(all((c.config.mem_len, c.config.same_length, c.config.clamp_len) == (9, True, 4)
                   for c in calls), "the model is called with its training lengths: call it inside "
               "`with evaluating(model, run)`", what)
        demand(model.training and model.config is config,
               "the model is not as it was: it must train on after the evaluation", what)
        demand(not any(c.grad for c in calls), "gradients are on: nothing is trained "
               "here (@torch.no_grad())", what)
    model = Ledger(V)
    with replaced(train, **names):
        evaluate(model, tokens, replace(run, dtype="bf16"))
    demand(all(c.autocast for c in model.calls), "the model is called outside `with autocast(run, "
           "device.type)`: bf16 is asked for and not used")
    seen = []
    names["progress"] = lambda items, label, total: (seen.append((label, total)), items)[1]
    for n, parts in ((16, 3), (17, 4)):
        seen.clear()
        with replaced(train, **names):
            evaluate(Ledger(V), torch.randint(V, (n,)), run, label="here")
        demand(not seen or str(seen[0]) == str(("here", parts)), "progress is told "
               f"{seen and seen[0]}, should be the label and {parts} segments of 5 for {n} tokens")
    for T in (1, 3001):
        with replaced(train, **names):
            got = evaluate(Small(), torch.zeros(3002, dtype=torch.int64), replace(
                run, eval_segment=T))
        demand(abs(got - Small.mean) < 1e-9, "the sum is kept in float32, where small losses "
               "vanish beside a large sum: add up in float64 (loss.double())",
               f"expected {Small.mean:.12f}, got {got:.12f}")


class Small(Ledger):
    """Losses in float32: one large, then many small ones."""

    mean = (1e6 + 3000 * float(np.float32(0.011))) / 3001

    def forward(self, x, memory=None, y=None):
        losses = torch.full(x.shape, 0.011)
        if memory is None:
            losses[0, 0] = 1e6
        return losses, [torch.zeros(1, 1, 1)] * 2
