"""Lesson 4. The relative shift: the same score from K projections (paper, appendix B).

The problem.  Lesson 3 projects a vector R_(i-j) for every pair (i, j): T * K
projections, and T * K * (D + H * C) numbers to store, each R and what becomes of it in
the heads, although there are only K different distances.

The one new idea.  Project each distance once: row n of Q is W_kR R_(K-1-n), so the K
rows have *descending* distances (Q is the paper's letter; the queries are q).  One
product q Q^T holds every wanted number, but in the wrong column: row i must move left
by T - 1 - i.  Moving every row by its own amount is a pad, a reshape and a drop.

With T = 3 queries, M = 2 keys of memory, K = 5.  Each number is 10 * query + distance:

          q Q^T              pad one cell (.)       the same numbers    drop the first
                             before every row       in rows of T        row: T x K again
    [ 4  3  2  1  0]       [.  4  3  2  1  0]        [ .  4  3]         [ 2  1  0  . 14]
    [14 13 12 11 10]       [. 14 13 12 11 10]        [ 2  1  0]         [13 12 11 10  .]
    [24 23 22 21 20]       [. 24 23 22 21 20]        [ . 14 13]         [24 23 22 21 20]
                                                     [12 11 10]
                                                     [ . 24 23]
                                                     [22 21 20]

Row 0 now starts with distance 2 = M, row 2 with 4 = M + 2.  What is left to the right
of distance 0 (. and 14 in row 0, . in row 1) are *leftovers*: the pad and the beginning
of the next query's row.  They are wrong, and harmless: those keys are in the future,
and the causal mask covers exactly these cells.  This is why future cells need not be
zero, and why the mask is not optional.

    python 04_rel_shift.py      a few seconds: equalities, leftovers, price, a figure

New letter:  Q (H, K, C), the projected R by descending distance.  Positions cost T * K
projections before and K now; the score itself is still a matrix of T * K numbers.
"""
import time
from importlib import import_module

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.progress import progress

lesson_1 = import_module("01_vanilla_segments")
RUNS, sinusoid = lesson_1.RUNS, lesson_1.sinusoid
causal_mask = import_module("02_recurrence").causal_mask
four_terms_all_pairs = import_module("03_relative_attention").four_terms_all_pairs


# ---- one shift, three times ----------------------------------------------------------

def rel_shift_loops(x):
    """Entry by entry (appendix B): shifted[i, j] = x[i, j + T - 1 - i] for j <= M + i.

    (..., T, K) -> (..., T, K).  Future cells, j > M + i, are 0.
    """
    T, K = x.shape[-2:]
    shifted = torch.zeros_like(x)
    for i in range(T):
        for j in range(K - T + i + 1):
            shifted[..., i, j] = x[..., i, j + T - 1 - i]
    return shifted


def rel_shift_by_index(x):
    """The same rule as one gather.  (..., T, K) -> (..., T, K).

    Future cells repeat distance 0.  torch.gather along the last axis fills cell (i, j)
    from row i of x, column index[i, j].
    """
    T, K = x.shape[-2:]
    i, j = torch.arange(T, device=x.device)[:, None], torch.arange(K, device=x.device)
    source = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, source.expand(x.shape))


def rel_shift(x):
    """The same rule without an index: pad, reshape, drop.  (..., T, K) -> (..., T, K).

    Future cells hold leftovers and MUST be masked; here tril puts 0 there.

    >>> x = torch.tensor([[4, 3, 2, 1, 0], [14, 13, 12, 11, 10], [24, 23, 22, 21, 20]])
    >>> rel_shift(x).tril(2)
    tensor([[ 2,  1,  0,  0,  0],
            [13, 12, 11, 10,  0],
            [24, 23, 22, 21, 20]])
    """
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same numbers in the same order, in rows of T
    # number the cells row by row from 0: the pad moves the argument's cell (i, c) to
    # i * (K + 1) + 1 + c; without the first T cells that is i * K + c - (T - 1 - i)
    return x[..., 1:, :].reshape(*batch, T, K)


# ---- the four terms from K distances -------------------------------------------------

def relative_score(q, k, Q, u, v):
    """All four terms of lesson 3, (B, H, T, K), from K projected distances, not T * K.

    q (B, H, T, C), k (B, H, K, C), Q (H, K, C) by descending distance, u, v (H, C).
    Not yet scaled and not masked; future cells hold leftovers.
    """
    # u, v as (H, 1, C): the same for every query
    content = (q + u[:, None]) @ k.transpose(-1, -2)  # (a) + (c) = (q_i + u) . k_j
    position = (q + v[:, None]) @ Q.transpose(-1, -2)  # (b) + (d) = (q_i + v) . Q_n
    return content + rel_shift(position)  # (B, H, T, K)


def term_d(v, Q, T):
    """Term (d) alone, (H, T, K): ONE vector Q v of K numbers, seen through T shifts."""
    d = torch.einsum("hc,hkc->hk", v, Q)  # (H, K): no query in it, so the same for all
    return rel_shift(d[:, None].expand(-1, T, -1))


def projected_distances(R, W_kR):
    """R (K, D) by *ascending* distance, W_kR (H, C, D) -> Q (H, K, C) by descending."""
    return torch.einsum("kd,hcd->hkc", R.flip(0), W_kR)


# ---- the lesson ----------------------------------------------------------------------

def example(B, H, T, M, C, D, dtype=torch.float64):
    """Random q, k, R, W_kR, u, v for lesson 3's function; R by ascending distance."""
    K = M + T
    return [torch.randn(B, H, T, C, dtype=dtype), torch.randn(B, H, K, C, dtype=dtype),
            sinusoid(torch.arange(K), D).to(dtype), torch.randn(H, C, D, dtype=dtype),
            torch.randn(H, C, dtype=dtype), torch.randn(H, C, dtype=dtype)]


def score_by_pairs(q, k, R, W_kR, u, v):
    """The score (B, H, T, K) of lesson 3."""
    return four_terms_all_pairs(q, k, R, W_kR, u, v).sum(0)


def score_by_shift(q, k, R, W_kR, u, v):
    """The score (B, H, T, K) of this lesson, from the same six tensors."""
    return relative_score(q, k, projected_distances(R, W_kR), u, v)


def difference(T, M):
    """How far the two scores differ where the mask shows them: values, gradients."""
    leaves = [z.requires_grad_() for z in example(2, 3, T, M, 4, 6)]
    hidden = causal_mask(T, M)
    slow = score_by_pairs(*leaves).masked_fill(hidden, 0.0)
    fast = score_by_shift(*leaves).masked_fill(hidden, 0.0)
    weight = torch.randn_like(slow)  # for a loss in which every cell counts differently
    slow_gradients = torch.autograd.grad((slow * weight).sum(), leaves)
    fast_gradients = torch.autograd.grad((fast * weight).sum(), leaves)
    both = zip(slow_gradients, fast_gradients)
    return ((slow - fast).abs().max().item(),
            max((a - b).abs().max().item() for a, b in both))


def milliseconds(function, arguments=()):
    """Milliseconds of a forward and backward pass: the fastest of five."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        function(*arguments).sum().backward()
        times.append(1000 * (time.perf_counter() - start))
    return min(times[1:])  # the first call warms up, and other programs only slow down


def show_leftovers(T=3, M=2):
    """The drawing above, computed: what is in brackets stands under the mask."""
    K, hidden = M + T, causal_mask(T, M)
    x = torch.tensor([[10 * i + K - 1 - j for j in range(K)] for i in range(T)])
    print("10 * query + distance, shifted; the pad is 0:")
    for numbers, dark in zip(rel_shift(x).tolist(), hidden.tolist()):
        print(" ", *(f"[{n:2}]" if d else f" {n:2} " for n, d in zip(numbers, dark)))
    cells = [tuple(cell) for cell in hidden.nonzero().tolist()]
    print(f"  in brackets: leftovers, cells {cells} - and that is the causal mask")


def show_equalities():
    """Three ways to shift agree to the bit; the score is lesson 3's up to rounding."""
    shapes = [(T, M) for T in (1, 2, 3, 7) for M in (0, 1, 2, 9)]
    same = 0
    for T, M in shapes:
        x = torch.randn(2, T, M + T)
        seen = ~causal_mask(T, M)
        loops, gather, fast = (shift(x)[:, seen] for shift in (
            rel_shift_loops, rel_shift_by_index, rel_shift))
        same += loops.equal(gather) and loops.equal(fast)
    print("loops = gather = pad-reshape-drop, to the bit: "
          f"{same} of {len(shapes)} shapes (T, M)")
    forward, backward = zip(*(difference(T, M) for T, M in shapes))
    print(f"against lesson 3's all pairs: scores {max(forward):.0e}, "
          f"gradients {max(backward):.0e}")


def show_term_d(T=3, M=2):
    """Each row of term (d) is the next moved left by one: row 0 is row 2 moved by 2."""
    _, _, R, W_kR, _, v = example(1, 1, T, M, 4, 6)
    d = term_d(v, projected_distances(R, W_kR), T)[0]  # (T, K)
    moved = (d[0, : M + 1] - d[2, 2:]).abs().max()
    print(f"term (d): row 0 is row 2 moved by 2, difference {moved:g}")


def show_price(lengths, H=4, C=32, D=128):
    """Time both scores, forward and backward; count the numbers in position vectors."""
    prices = []
    for T in progress(lengths, "measuring", len(lengths)):
        K = 2 * T  # M = T
        leaves = [z.requires_grad_() for z in example(1, H, T, T, C, D, torch.float32)]
        slow = milliseconds(score_by_pairs, leaves)
        fast = milliseconds(score_by_shift, leaves)
        vector = D + H * C  # numbers in an R and what W_kR makes of it for all heads
        prices.append((slow, fast, T * K * vector, K * vector))  # by pair, by distance
    print("score and gradients, milliseconds; numbers in all position vectors:\n"
          f"  T = M {'pairs':>7} {'shift':>6} ms {'pairs':>13} {'shift':>8} numbers")
    for T, (slow, fast, large, small) in zip(lengths, prices):
        print(f"  {T:5} {slow:7.1f} {fast:6.1f}    {large:13,} {small:8,} "
              f"= {large // small} times fewer")
    return prices


def draw(lengths, prices):
    """Both prices against T, on logarithmic axes."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    slow, fast, large, small = zip(*prices)
    left, right = figure.subplots(1, 2)
    for axes, pairs, shift, unit in (
            (left, slow, fast, "forward and backward (ms)"),
            (right, large, small, "numbers in position vectors")):
        axes.loglog(lengths, pairs, "o-", label="every pair (lesson 3)")
        axes.loglog(lengths, shift, "o-", label="the shift")
        axes.set_xticks(lengths, lengths, minor=False)
        axes.minorticks_off()
        axes.set(xlabel="T = M (log scale)", ylabel=f"{unit}, log scale")
        axes.legend()
    figure.suptitle("The price of the four terms: B = 1, H = 4, C = 32, D = 128")
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "04_price.png", dpi=120)
    print(f"figure: {RUNS.name}/04_price.png")


def main():
    """The three shifts agree; where the leftovers stand; what the trick saves."""
    torch.manual_seed(0)
    show_leftovers()
    show_equalities()
    show_term_d()
    lengths = (32, 64, 128, 256)
    draw(lengths, show_price(lengths))


if __name__ == "__main__":
    main()

# Ask yourself
#   1. For T = 1 the shift does nothing.  Why is that right?
#   2. Why must distances descend along the keys?  Try the drawing with ascending ones.
#   3. With T = 4 and M = 2: how many cells are leftovers, and does M change that?
# Change and watch
#   1. Pad on the right (and drop the last row) instead: which equalities fail?
#   2. In difference, mask with causal_mask(T + M, 0)[:T], which forgets the offset M:
#      which visible cells are no longer compared, and do the printed lines notice?
