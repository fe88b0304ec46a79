"""Lesson 4. The relative shift: the same score from K projections (paper, appendix B).

You need lessons 2 and 3.  You learn why K projected distances are enough for T * K
scores, and three lines of code that align them.  About 25 minutes.

The problem.  Lesson 3 computes a key W_kR R_(i-j) for every pair (i, j) and stores all
T * K vectors for the backward pass, although there are only K different distances.

The one new idea.  Project each distance once, into K distance keys k_R.  Row 0 of k_R
is the largest distance, K - 1.  So column n of q k_R^T holds distance K - 1 - n.  Cell
(i, j) needs distance m + i - j, from another column of row i:

    K - 1 - n = m + i - j  and  K = m + T,  so  n = j + T - 1 - i

Row i moves left by T - 1 - i (derived in the paper's appendix B).  The authors' code
moves all rows at once, with a pad, a reshape and a drop.

With T = 3 queries, m = 2 memory keys, K = 5.  Each element is 10 * query + distance:

    1. q k_R^T             2. pad one cell (.)     3. read in rows     4. drop row 0 and
                           before every row        of T                read in rows of K

    [ 4  3  2  1  0]       [.  4  3  2  1  0]        [ .  4  3]         [ 2  1  0  . 14]
    [14 13 12 11 10]       [. 14 13 12 11 10]        [ 2  1  0]         [13 12 11 10  .]
    [24 23 22 21 20]       [. 24 23 22 21 20]        [ . 14 13]         [24 23 22 21 20]
                                                     [12 11 10]
                                                     [ . 24 23]
                                                     [22 21 20]

Row 0 now starts with distance 2 = m, row 2 with 4 = m + 2.  The cells after distance 0
(. and 14 in row 0, . in row 1) hold *leftovers*: the pad and the start of the next
query's row.  They are wrong but harmless: those keys are in the future, and the causal
mask covers exactly these cells.  So they need not be zeroed, but the mask is not
optional.

    python 04_rel_shift.py      up to a minute: leftovers, equalities, the cost

New letter:  k_R (H, K, C), the distance keys.  From here on row 0 of R is distance
K - 1 (in lesson 3 distance 0).  The score is still a matrix of T * K elements.
"""
import timeit
from importlib import import_module

from support import run_lesson
from support.progress import progress

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
lesson_3 = import_module("03_relative_attention")


# ---- one shift, written in three ways ------------------------------------------------

def rel_shift_loops(x):
    """Shift cell by cell (appendix B): shifted[i, j] = x[i, j + T - 1 - i], j <= m + i.

    (..., T, K) -> (..., T, K).  Future cells, j > m + i, are 0.
    """
    T, K = x.shape[-2:]
    m = K - T
    shifted = torch.zeros_like(x)
    for i in range(T):
        for j in range(m + i + 1):
            shifted[..., i, j] = x[..., i, j + T - 1 - i]
    return shifted


def rel_shift_by_index(x):
    """Shift with one gather: (..., T, K) -> (..., T, K).

    Future cells repeat distance 0.  torch.gather along the last axis fills cell (i, j)
    from row i of x, column index[i, j].
    """
    T, K = x.shape[-2:]
    i = torch.arange(T, device=x.device)[:, None]
    j = torch.arange(K, device=x.device)
    n = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, n.expand(x.shape))


def rel_shift(x):
    """Shift without an index, by pad, reshape, drop: (..., T, K) -> (..., T, K).

    Future cells hold leftovers and MUST be masked; the example masks them with tril(2).

    >>> x = torch.tensor([[4, 3, 2, 1, 0], [14, 13, 12, 11, 10], [24, 23, 22, 21, 20]])
    >>> rel_shift(x).tril(2)
    tensor([[ 2,  1,  0,  0,  0],
            [13, 12, 11, 10,  0],
            [24, 23, 22, 21, 20]])
    """
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same elements in the same order, in rows of T
    # Number q k_R^T's cells row by row from 0.  In the drawing 13 is cell 6.  Two zeros
    # before it move it to 8; dropping T = 3 cells moves it to 5, the start of row 1.
    # In general cell (i, n) moves from i K + n to i K + n + (i + 1) - T, which is
    # i K + n - (T - 1 - i): it moves left by T - 1 - i.
    return x[..., 1:, :].reshape(*batch, T, K)


# ---- the four terms from K distances -------------------------------------------------

def relative_score(q, k, k_R, u, v):
    """Return the four terms' sum, (B, H, T, K), from K distance keys, not T * K.

    q (B, H, T, C), k (B, H, K, C), k_R (H, K, C) by descending distance, u, v (H, C).
    The score is not scaled and not masked yet; future cells hold leftovers.
    """
    u = u[:, None]  # (H, 1, C): the same for every query
    v = v[:, None]
    content = (q + u) @ k.transpose(-1, -2)  # (a) + (c) = (q_i + u) . k_j
    position = (q + v) @ k_R.transpose(-1, -2)  # (b) + (d) = (q_i + v) . k_R_n
    return content + rel_shift(position)  # (B, H, T, K)


class ShiftAttention(lesson_3.RelativeAttention):
    """Lesson 3's attention from K distance keys: the same weights, the same results."""

    def score(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> (B, H, T, K), with leftovers."""
        B, T, D = h.shape
        K = memory.shape[1] + T
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_kE(h_tilde).view(B, K, self.H, self.C).transpose(1, 2)
        distance = torch.arange(K - 1, -1, -1, device=h.device)  # descending      # NEW
        R = lesson_1.sinusoid(distance, D).to(h)  # (K, D)
        k_R = self.W_kR(R).view(K, self.H, self.C).transpose(0, 1)  # (H, K, C)    # NEW
        return relative_score(q, k, k_R, u, v)                                     # NEW


# ---- the lesson ----------------------------------------------------------------------

def show_leftovers(T=3, m=2):
    """Compute the drawing above and print the masked cells in brackets."""
    K = m + T
    mask = lesson_2.causal_mask(T, m)
    x = torch.tensor([[10 * i + K - 1 - n for n in range(K)] for i in range(T)])
    print("10 * query + distance, shifted; in brackets the leftovers (the pad is 0):")
    for elements, masked in zip(rel_shift(x).tolist(), mask.tolist()):
        print(" ", *(f"[{z:2}]" if is_masked else f" {z:2} "
                     for z, is_masked in zip(elements, masked)))


def show_equalities(D=6, H=3, C=4):
    """Compare three shifts bit for bit, and the score with lesson 3's."""
    pairs = lesson_3.RelativeAttention(D, H, C).double()
    shift = ShiftAttention(D, H, C).double()
    shift.load_state_dict(pairs.state_dict())
    shapes = [(T, m) for T in (1, 2, 3, 7) for m in (0, 1, 2, 9)]
    same = 0
    largest = 0.0
    for T, m in shapes:
        visible = ~lesson_2.causal_mask(T, m)
        x = torch.randn(2, T, m + T)
        loops = rel_shift_loops(x)[:, visible]
        same += (loops.equal(rel_shift_by_index(x)[:, visible])
                 and loops.equal(rel_shift(x)[:, visible]))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in (
            (2, T, D), (2, m, D), (H, C), (H, C))]  # h, memory, u, v
        difference = (pairs.score(*inputs) - shift.score(*inputs))[..., visible]
        largest = max(largest, difference.abs().max().item())
    print("loops = gather = pad-reshape-drop, bit for bit: "
          f"{same} of {len(shapes)} shapes")
    print(f"scores by the shift against lesson 3's: {largest:.0e}")


def milliseconds(function):
    """Return the time of a forward and backward pass in ms, the minimum of five."""
    times = timeit.repeat(lambda: function().sum().backward(), number=1, repeat=6)
    return 1000 * min(times[1:])  # skip the warm-up; take the least, as noise adds time


def show_cost(lengths, B=8):
    """Time a training pass with both attentions for several T = M; plot the times."""
    print("distance vectors to project; time of a forward and backward pass:")
    times = {"for all pairs": [], "by the shift": []}
    for T in progress(lengths, "measuring", len(lengths)):
        x = torch.randint(64, (B, T))
        for name, kind in zip(times, (lesson_3.RelativeAttention, ShiftAttention)):
            model = lesson_3.RelativeTransformer(64, M=T, attention=kind)
            _, memory = model(x)  # now the memory is full
            times[name].append(milliseconds(lambda: model(x, memory)[0]))
        pairs, shift = (z[-1] for z in times.values())
        print(f"  T = M = {T:3}: {T * 2 * T:7,} for all pairs, {2 * T:3} by the shift; "
              f"{pairs:.0f} ms, {shift:.0f} ms")
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for style, (name, values) in zip(("C1s--", "C0o-"), times.items()):
        axes.loglog(lengths, values, style, base=2)
        end = values[-1]
        axes.text(1.1 * lengths[-1], end, f"{name}:\n{end:.0f} ms", va="top")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="T = M (log scale)", ylabel="forward and backward (ms, log scale)",
             title="The shift makes a pass cheaper", xlim=(None, 1.8 * lengths[-1]))
    lesson_1.save(axes.figure, "04_cost.png")


def main():
    """Show the leftovers, the equalities and the cost."""
    torch.manual_seed(0)
    show_leftovers()
    show_equalities()
    show_cost((32, 64, 128, 256))


if __name__ == "__main__":
    run_lesson(main, __doc__)

# Ask yourself
#   1. For T = 1 the shift does nothing.  Why is that correct?
#   2. Why must distances descend along the keys?  Try the drawing with ascending ones.
#   3. With T = 4 and m = 2: how many cells are leftovers, and does m change that?
# Change and watch
#   1. Pad on the right (and drop the last row) instead: which equalities fail?
#   2. In show_equalities write causal_mask(T + m, 0)[:T], without the offset m: which
#      visible cells are no longer compared, and do the printed lines change?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     10 * query + distance, shifted; in brackets the leftovers (the pad is 0):
#         2    1    0  [ 0] [14]
#        13   12   11   10  [ 0]
#        24   23   22   21   20
# The causal mask, whose cells are in brackets, covers the leftovers and nothing else.
#
#     loops = gather = pad-reshape-drop, bit for bit: 16 of 16 shapes
#     scores by the shift against lesson 3's: 2e-15
# 2e-15 is rounding error: the shift is a faster way to the same score, and so to the
# same loss, before training and after it.
#
#     distance vectors to project; time of a forward and backward pass:
#       T = M =  32:   2,048 for all pairs,  64 by the shift; 19 ms, 11 ms
#       T = M =  64:   8,192 for all pairs, 128 by the shift; 43 ms, 23 ms
#       T = M = 128:  32,768 for all pairs, 256 by the shift; 106 ms, 54 ms
#       T = M = 256: 131,072 for all pairs, 512 by the shift; 717 ms, 172 ms
#     figure: runs/04_cost.png
# Doubling T = M quadruples the vectors for all pairs and doubles them for the shift.
# The shift's time grows faster than its vectors, as there are still T * K scores.
