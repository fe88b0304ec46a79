"""Lesson 4. The relative shift: the same score from K projections (paper, appendix B).

You need lessons 2 and 3.  You learn why a score by distance costs no more than one by
content, and the three lines that make it so.  20 minutes (an estimate).

The problem.  Lesson 3 makes a key W_kR R_(i-j) for every pair (i, j), T * K of them,
and keeps each of these vectors for the gradient, although there are only K different
distances.

The one new idea.  Project each distance once, into K keys of distances k_R, the largest
first, since along a row of keys distances fall: column n of q k_R^T holds distance
K - 1 - n.  Cell (i, j) wants distance m + i - j, which is there, in another column:

    K - 1 - n = m + i - j,  so  n = j + (T - 1 - i):  row i moves left by T - 1 - i

The paper says so in appendix B (k_R is called Q there); to move every row by its own
amount with a pad, a reshape and a drop is a trick of the authors' code.

With T = 3 queries, m = 2 keys of memory, K = 5.  Each number is 10 * query + distance:

          q k_R^T            pad one cell (.)       the same numbers    drop the first
                             before every row       in rows of T        row: T x K again
    [ 4  3  2  1  0]       [.  4  3  2  1  0]        [ .  4  3]         [ 2  1  0  . 14]
    [14 13 12 11 10]       [. 14 13 12 11 10]        [ 2  1  0]         [13 12 11 10  .]
    [24 23 22 21 20]       [. 24 23 22 21 20]        [ . 14 13]         [24 23 22 21 20]
                                                     [12 11 10]
                                                     [ . 24 23]
                                                     [22 21 20]

Row 0 now starts with distance 2 = m, row 2 with 4 = m + 2.  What is left to the right
of distance 0 (. and 14 in row 0, . in row 1) are *leftovers*: the pad and the beginning
of the next query's row.  They are wrong, and harmless: those keys are in the future,
and the causal mask covers exactly these cells.  This is why future cells need not be
zero, and why the mask is not optional.

    python 04_rel_shift.py      a few seconds: leftovers, equalities, price, a figure

New letter:  k_R (H, K, C), the keys of distances.  From here on row 0 of R is distance
K - 1 (in lesson 3 distance 0).  The score is still a matrix of T * K numbers.
"""
import time
from importlib import import_module

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.progress import progress

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
lesson_3 = import_module("03_relative_attention")


# ---- one shift, three times ----------------------------------------------------------

def rel_shift_loops(x):
    """Entry by entry (appendix B): shifted[i, j] = x[i, j + T - 1 - i] for j <= m + i.

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
    """The same rule as one gather.  (..., T, K) -> (..., T, K).

    Future cells repeat distance 0.  torch.gather along the last axis fills cell (i, j)
    from row i of x, column index[i, j].
    """
    T, K = x.shape[-2:]
    i = torch.arange(T, device=x.device)[:, None]
    j = torch.arange(K, device=x.device)
    n = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, n.expand(x.shape))


def rel_shift(x):
    """The same rule without an index: pad, reshape, drop.  (..., T, K) -> (..., T, K).

    Future cells hold leftovers and MUST be masked; in the example tril puts 0 there.

    >>> x = torch.tensor([[4, 3, 2, 1, 0], [14, 13, 12, 11, 10], [24, 23, 22, 21, 20]])
    >>> rel_shift(x).tril(2)
    tensor([[ 2,  1,  0,  0,  0],
            [13, 12, 11, 10,  0],
            [24, 23, 22, 21, 20]])
    """
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same numbers in the same order, in rows of T
    # Count the cells row by row.  In the drawing 13, of query 1, was number 6; two
    # zeros come before it: 8; without the first T = 3 it is 5, the first of row 1.
    # In general cell (i, n) moves from i K + n to i K + n + (i + 1) - T, which is
    # i K + n - (T - 1 - i): T - 1 - i to the left.
    return x[..., 1:, :].reshape(*batch, T, K)


# ---- the four terms from K distances -------------------------------------------------

def relative_score(q, k, k_R, u, v):
    """All four terms of lesson 3, (B, H, T, K), from K keys of distances, not T * K.

    q (B, H, T, C), k (B, H, K, C), k_R (H, K, C) by descending distance, u, v (H, C).
    The score is not scaled and not masked yet; future cells hold leftovers.
    """
    u = u[:, None]  # (H, 1, C): the same for every query
    v = v[:, None]
    content = (q + u) @ k.transpose(-1, -2)  # (a) + (c) = (q_i + u) . k_j
    position = (q + v) @ k_R.transpose(-1, -2)  # (b) + (d) = (q_i + v) . k_R_n
    return content + rel_shift(position)  # (B, H, T, K)


def projected_distances(R, W_kR):
    """R (K, D) by descending distance, W_kR (H, C, D) -> k_R (H, K, C)."""
    return torch.einsum("kd,hcd->hkc", R, W_kR)


# ---- the lesson ----------------------------------------------------------------------

def example(B, H, T, m, C, D, dtype=torch.float64):
    """Random q, k, R, W_kR, u, v; R by descending distance."""
    K = m + T
    distance = torch.arange(K - 1, -1, -1)
    return [torch.randn(B, H, T, C, dtype=dtype), torch.randn(B, H, K, C, dtype=dtype),
            lesson_1.sinusoid(distance, D).to(dtype), torch.randn(H, C, D, dtype=dtype),
            torch.randn(H, C, dtype=dtype), torch.randn(H, C, dtype=dtype)]


def score_by_pairs(q, k, R, W_kR, u, v):
    """Lesson 3's score (B, H, T, K); there R ascends, so it is turned round."""
    return lesson_3.four_terms_all_pairs(q, k, R.flip(0), W_kR, u, v).sum(0)


def score_by_shift(q, k, R, W_kR, u, v):
    """The score (B, H, T, K) of this lesson, from the same six tensors."""
    return relative_score(q, k, projected_distances(R, W_kR), u, v)


def show_leftovers(T=3, m=2):
    """The drawing above, computed: what is in brackets stands under the mask."""
    K = m + T
    mask = lesson_2.causal_mask(T, m)
    x = torch.tensor([[10 * i + K - 1 - n for n in range(K)] for i in range(T)])
    print("10 * query + distance, shifted; in brackets the leftovers (the pad is 0):")
    for numbers, masked in zip(rel_shift(x).tolist(), mask.tolist()):
        cells = [f"[{n:2}]" if dark else f" {n:2} " for n, dark in zip(numbers, masked)]
        print(" ", *cells)
    print(f"  under the causal mask are the cells {mask.nonzero().tolist()}")


def show_equalities():
    """Three ways to shift agree to the bit; the score is lesson 3's up to rounding."""
    shapes = [(T, m) for T in (1, 2, 3, 7) for m in (0, 1, 2, 9)]
    same = 0
    largest = 0.0
    for T, m in shapes:
        seen = ~lesson_2.causal_mask(T, m)
        x = torch.randn(2, T, m + T)
        loops = rel_shift_loops(x)[:, seen]
        same += (loops.equal(rel_shift_by_index(x)[:, seen])
                 and loops.equal(rel_shift(x)[:, seen]))
        tensors = example(2, 3, T, m, 4, 6)
        difference = score_by_pairs(*tensors) - score_by_shift(*tensors)
        largest = max(largest, difference[..., seen].abs().max().item())
    print("loops = gather = pad-reshape-drop, to the bit: "
          f"{same} of {len(shapes)} shapes")
    print(f"scores against lesson 3's, all pairs: {largest:.0e}")


def milliseconds(function, arguments):
    """Milliseconds of a forward and backward pass: the fastest of five."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        function(*arguments).sum().backward()
        times.append(1000 * (time.perf_counter() - start))
    return min(times[1:])  # the first call warms up, and other programs only slow down


def show_price(lengths, H=4, C=32, D=128):
    """Time both scores, forward and backward: milliseconds by pairs, by the shift."""
    pairs = []
    shift = []
    for T in progress(lengths, "measuring", len(lengths)):
        tensors = [z.requires_grad_() for z in example(1, H, T, T, C, D, torch.float32)]
        pairs.append(milliseconds(score_by_pairs, tensors))
        shift.append(milliseconds(score_by_shift, tensors))
    print("vectors of distances that are projected, and milliseconds of a score:")
    for T, slow, fast in zip(lengths, pairs, shift):
        print(f"  T = m = {T:3}: by pairs {T * 2 * T:7,}, by the shift {2 * T:3}; "
              f"{slow:.1f} ms, {fast:.1f} ms")
    return pairs, shift


def draw(lengths, pairs, shift):
    """Both prices against T, on logarithmic axes."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    axes.loglog(lengths, pairs, "o-", label="every pair (lesson 3)")
    axes.loglog(lengths, shift, "o-", label="the shift")
    axes.set_xticks(lengths, lengths, minor=False)
    axes.minorticks_off()
    axes.set(xlabel="T = m (log scale)", ylabel="forward and backward (ms, log scale)",
             title="The price of the four terms: B = 1, H = 4, C = 32, D = 128")
    axes.legend()
    lesson_1.save(axes.figure, "04_price.png")


def main():
    """Where the leftovers stand; the three shifts agree; what the trick saves."""
    torch.manual_seed(0)
    show_leftovers()
    show_equalities()
    lengths = (32, 64, 128, 256)
    pairs, shift = show_price(lengths)
    draw(lengths, pairs, shift)


if __name__ == "__main__":
    main()

# Ask yourself (answers: tests/course/answers.md, which your teacher has)
#   1. For T = 1 the shift does nothing.  Why is that right?
#   2. Why must distances descend along the keys?  Try the drawing with ascending ones.
#   3. With T = 4 and m = 2: how many cells are leftovers, and does m change that?
# Change and watch
#   1. Pad on the right (and drop the last row) instead: which equalities fail?
#   2. In show_equalities write causal_mask(T + m, 0)[:T], which forgets the offset m:
#      which visible cells are no longer compared, and do the printed lines notice?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     10 * query + distance, shifted; in brackets the leftovers (the pad is 0):
#         2    1    0  [ 0] [14]
#        13   12   11   10  [ 0]
#        24   23   22   21   20
#       under the causal mask are the cells [[0, 3], [0, 4], [1, 4]]
# The cells in brackets, and no others, are those that the mask covers.
#
#     loops = gather = pad-reshape-drop, to the bit: 16 of 16 shapes
#     scores against lesson 3's, all pairs: 5e-15
# Rounding: the shift is a faster way to the same score.
#
#     vectors of distances that are projected, and milliseconds of a score:
#       T = m =  32: by pairs   2,048, by the shift  64; 6.7 ms, 0.5 ms
#       T = m =  64: by pairs   8,192, by the shift 128; 19.5 ms, 0.7 ms
#       T = m = 128: by pairs  32,768, by the shift 256; 72.6 ms, 1.4 ms
#       T = m = 256: by pairs 131,072, by the shift 512; 312.9 ms, 2.5 ms
# Twice the length: four times as many vectors by pairs, twice as many by the shift.
#
#     figure: runs/04_price.png
