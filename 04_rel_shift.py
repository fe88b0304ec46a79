"""Lesson 4. The relative shift: the same score from K projections (paper, appendix B).

The problem.  Lesson 3 projects a vector R_i-j for every pair (i, j): T * K * D numbers in memory
and T * K projections, although there are only K different distances.

The one new idea.  Project each distance once, Q_k = W_kR R_(K-1-k): K rows, distances *descending*
(Q is the paper's letter; the queries are q).  One product q Q^T holds every wanted number, but in
the wrong column: row i must move left by T - 1 - i.  Moving every row by its own amount is a pad, a
reshape and a drop.

With T = 3 queries, M = 2 rows of memory, K = 5.  Each number is 10 * query + distance:

          q Q^T               pad one cell (.)        the same numbers     drop the first row,
                              before every row         in rows of T         read as T x K again
    [ 4  3  2  1  0]        [.  4  3  2  1  0]         [ .  4  3]          [ 2  1  0  . 14]
    [14 13 12 11 10]        [. 14 13 12 11 10]         [ 2  1  0]          [13 12 11 10  .]
    [24 23 22 21 20]        [. 24 23 22 21 20]         [ . 14 13]          [24 23 22 21 20]
                                                       [12 11 10]
                                                       [ . 24 23]
                                                       [22 21 20]

Row 0 now starts with distance 2 = M, row 2 with 4 = M + 2.  What stands behind distance 0 (. and 14
in row 0, . in row 1) are *leftovers*: the pad and the beginning of the next query's row.  They are
wrong, and harmless: those keys are in the future, and the causal mask covers exactly these cells.
This is why the upper triangle need not be zero, and why the mask is not optional.

    python 04_rel_shift.py      a few seconds: equalities, the leftovers, the price over T, a figure

New letter:  Q (H, K, C), the projected R by descending distance.  Positions cost T * K projections
before and K now; the score itself stays a table of T * K numbers.
"""
import math
import statistics
import time
from importlib import import_module

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.progress import progress

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
lesson_3 = import_module("03_relative_attention")
RUNS, sinusoid = lesson_1.RUNS, lesson_1.sinusoid
causal_mask, four_terms_all_pairs = lesson_2.causal_mask, lesson_3.four_terms_all_pairs


# ---- one shift, three times ---------------------------------------------------------------------

def rel_shift_loops(x):
    """The rule of appendix B, entry by entry: shifted[i, j] = x[i, j + T - 1 - i] for j <= M + i.

    (..., T, K) -> (..., T, K).  Future cells, j > M + i, are 0.
    """
    T, K = x.shape[-2:]
    shifted = torch.zeros_like(x)
    for i in range(T):
        for j in range(K - T + i + 1):
            shifted[..., i, j] = x[..., i, j + T - 1 - i]
    return shifted


def rel_shift_by_index(x):
    """The same rule as one gather.  (..., T, K) -> (..., T, K).  Future cells repeat distance 0."""
    T, K = x.shape[-2:]
    i, j = torch.arange(T, device=x.device)[:, None], torch.arange(K, device=x.device)
    source = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, source.expand(x.shape))


def rel_shift(x):
    """The same rule without an index: pad, reshape, drop.  (..., T, K) -> (..., T, K).

    Future cells hold leftovers and MUST be masked.

    >>> rel_shift(torch.tensor([[4, 3, 2, 1, 0], [14, 13, 12, 11, 10], [24, 23, 22, 21, 20]]))
    tensor([[ 2,  1,  0,  0, 14],
            [13, 12, 11, 10,  0],
            [24, 23, 22, 21, 20]])
    """
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same numbers in the same order, in rows of T
    return x[..., 1:, :].reshape(*batch, T, K)  # T numbers dropped: row i moved left by T - 1 - i


# ---- the four terms from K distances ------------------------------------------------------------

def relative_score(q, k, Q, u, v):
    """All four terms of lesson 3, (B, H, T, K), from K projected distances instead of T * K.

    q (B, H, T, C), k (B, H, K, C), Q (H, K, C) by descending distance, u, v (H, C).
    Not yet scaled and not masked; future cells hold leftovers.
    """
    # u, v as (H, 1, C): the same for every query
    content = (q + u[:, None]) @ k.transpose(-1, -2)  # (a) + (c) = (q_i + u) . k_j
    position = (q + v[:, None]) @ Q.transpose(-1, -2)  # (b) + (d) = (q_i + v) . Q_k, unshifted
    return content + rel_shift(position)  # (B, H, T, K)


def term_d(v, Q, T):
    """Term (d) alone, (H, T, K): ONE vector Q v of K numbers, seen through T shifts."""
    d = torch.einsum("hc,hkc->hk", v, Q)  # (H, K): no query in it, so the same for all of them
    return rel_shift(d[:, None].expand(-1, T, -1))


def projected_distances(R, W_kR):
    """Q (H, K, C): the rows of R (K, D), in descending distance, through W_kR (H, C, D)."""
    return torch.einsum("kd,hcd->hkc", R.flip(0), W_kR)


# ---- the lesson ---------------------------------------------------------------------------------

def example(B, H, T, M, C, D, dtype=torch.float64):
    """Random q, k, R, W_kR, u, v for lesson 3's function; R by ascending distance."""
    K = M + T
    return [torch.randn(B, H, T, C, dtype=dtype), torch.randn(B, H, K, C, dtype=dtype),
            sinusoid(torch.arange(K), D).to(dtype), torch.randn(H, C, D, dtype=dtype),
            torch.randn(H, C, dtype=dtype), torch.randn(H, C, dtype=dtype)]


def difference(T, M):
    """Largest differences between lesson 3's attention scores and the shift: forward, gradient."""
    leaves = [z.requires_grad_() for z in example(2, 3, T, M, 4, 6)]
    q, k, R, W_kR, u, v = leaves
    future = causal_mask(T, M)
    slow = four_terms_all_pairs(*leaves).sum(0).masked_fill(future, 0.0)
    fast = relative_score(q, k, projected_distances(R, W_kR), u, v).masked_fill(future, 0.0)
    weight = torch.randn_like(slow)  # a loss in which every cell counts differently
    gradients = [torch.autograd.grad((score * weight).sum(), leaves) for score in (slow, fast)]
    return ((slow - fast).abs().max().item(),
            max((a - b).abs().max().item() for a, b in zip(*gradients)))


def milliseconds(function):
    """Median milliseconds of five forward and backward passes."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        function().sum().backward()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])  # the first call warms up


def kept_for_backward(function):
    """MiB that autograd keeps between the forward and the backward pass: the memory of training.

    The hook is called with each tensor that the graph saves.
    """
    sizes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()  # a storage that is kept twice counts once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = function()  # holds the graph, so that no storage is given to another tensor
    del kept
    return sum(sizes.values()) / 2**20


def main():
    """Show that the three shifts agree, where the leftovers stand, and what the trick saves."""
    torch.manual_seed(0)
    T, M, K = 3, 2, 5
    x = torch.tensor([[10 * i + K - 1 - j for j in range(K)] for i in range(T)])
    future = causal_mask(T, M)
    print("10 * query + distance, shifted:")
    for row, hidden in zip(rel_shift(x).tolist(), future.tolist()):
        print("  " + "".join(f"[{n:2}] " if h else f" {n:2}  " for n, h in zip(row, hidden)))
    print("  in brackets: leftovers, cells", [tuple(cell) for cell in future.nonzero().tolist()],
          "- and that is the causal mask")

    shapes = [(T, M) for T in (1, 2, 3, 7) for M in (0, 1, 2, 9)]
    same = 0
    for T, M in shapes:
        x, seen = torch.randn(2, T, M + T), ~causal_mask(T, M)
        loops = rel_shift_loops(x)[:, seen]
        if loops.equal(rel_shift_by_index(x)[:, seen]) and loops.equal(rel_shift(x)[:, seen]):
            same += 1
    print(f"loops = gather = pad-reshape-drop, to the bit: {same} of {len(shapes)} shapes (T, M)")
    forward, backward = zip(*(difference(T, M) for T, M in shapes))
    print(f"against lesson 3's all pairs: scores {max(forward):.0e}, gradients {max(backward):.0e}")
    _, _, R, W_kR, _, v = example(1, 1, 3, 2, 4, 6)
    d = term_d(v, projected_distances(R, W_kR), 3)[0]  # (T, K)
    print(f"term (d): row 0 is row 2 moved by 2, difference {(d[0, :3] - d[2, 2:]).abs().max():g}")

    lengths, prices = (32, 64, 128, 256), []
    for T in progress(lengths, "measuring", len(lengths)):
        leaves = [z.requires_grad_() for z in example(1, 4, T, T, 32, 128, torch.float32)]
        q, k, R, W_kR, u, v = leaves
        ways = (lambda: four_terms_all_pairs(*leaves).sum(0),
                lambda: relative_score(q, k, projected_distances(R, W_kR), u, v))
        prices.append([f(way) for f in (milliseconds, kept_for_backward) for way in ways])
    for T, (slow, fast, large, small) in zip(lengths, prices):
        print(f"T = M = {T:3}: every pair {slow:5.1f} ms {large:5.1f} MiB, shift {fast:3.1f} ms "
              f"{small:3.1f} MiB: {slow / fast:2.0f} times faster, {large / small:3.0f} smaller")

    figure = Figure(figsize=(9, 4), layout="constrained")
    slow, fast, large, small = zip(*prices)
    for axes, a, b, unit in zip(figure.subplots(1, 2), (slow, large), (fast, small), (
            "forward and backward (ms)", "kept for the backward pass (MiB)")):
        axes.loglog(lengths, a, "o-", label="every pair (lesson 3)")
        axes.loglog(lengths, b, "o-", label="the shift")
        axes.set_xticks(lengths, lengths, minor=False)
        axes.minorticks_off()
        axes.set(xlabel="T = M (log scale)", ylabel=f"{unit}, log scale")
        axes.legend()
    figure.suptitle("The price of the four terms: B = 1, H = 4, C = 32, D = 128")
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "04_price.png", dpi=120)
    print(f"figure: {RUNS.name}/04_price.png")


if __name__ == "__main__":
    main()

# Ask yourself
#   1. For T = 1 the shift does nothing.  Why is that right?
#   2. Why must distances descend along the key axis?  Try the drawing above with ascending ones.
#   3. What stands in the leftover cells of row 0, and whose numbers are they?
# Change and watch
#   1. Pad on the right (and drop the last row) instead: which equalities fail, and in which rows?
#   2. In difference, mask with causal_mask(T + M, 0)[:T], which forgets the offset M: which visible
#      cells are no longer compared, and do the printed lines notice?
