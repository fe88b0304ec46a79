"""SPOILERS.  Compute the results of the exercises in another way than the lessons.

A rule that compares many values calls one of these functions.  They are slow and independent of the
lessons: powers of complex numbers, bands of visible cells, rolled rows, one distance at a time.
"""
import math

import numpy as np
import torch


# ---- lesson 1 -----------------------------------------------------------------------------------

def unit_circle(distances, D):
    """Return the encoding (n, D) of n distances in float64, as powers of D/2 complex numbers of
    modulus 1, whose angles form a geometric series from 1 to 10000^(2/D - 1)."""
    unit = np.exp(1j * np.geomspace(1, 10000 ** (2 / D - 1), D // 2))
    exponents = torch.as_tensor(distances).double()[:, None]
    powers = torch.from_numpy(unit).to(exponents.device) ** exponents
    return torch.cat([powers.imag, powers.real], 1)


def lanes(tokens, B):
    """Return windows of L + 1 tokens with stride L: (n,) -> (B, L + 1)."""
    L = (len(tokens) - 1) // B
    return tokens.unfold(0, L + 1, L)[:B]


def segments(stream, T, start=0):
    """Return an iterator of the pairs x and y, which have T columns each: (B, T), int64."""
    stream = stream[:, start:].long()
    return zip(stream[:, :-1].split(T, 1), stream[:, 1:].split(T, 1))


# ---- lesson 2: what is visible ------------------------------------------------------------------

def tokens_seen(t, N, T, M):
    """Return all tokens on which prediction t can depend, found layer by layer."""
    tokens = {t}
    for _ in range(N):
        tokens = {j for i in tokens for j in range(max(0, i // T * T - M), i + 1)}
    return tokens


def visible_entries(T, m, most=None):
    """Return (T, m + T), True for visible keys: a triangle, or a band that is `most` keys wide."""
    past = torch.ones(T, m + T, dtype=torch.bool).tril(m)
    return past if most is None else past.triu(m + 1 - most)


# ---- lessons 3 and 4 ----------------------------------------------------------------------------

def terms_of_one_head(*given):
    """Return the four terms of section 3.3 for one head of NumPy arrays, (4, T, K), with NaN for
    future keys.  The distance keys descend, and their products are rolled."""
    q, k, R, W_kR, u, v = map(torch.from_numpy, given)
    T, K = len(q), len(k)
    k_R = R.flip(0) @ W_kR.T  # (K, C)
    terms = [q @ k.T, shift(q @ k_R.T), (k @ u).expand(T, K), shift((k_R @ v).expand(T, K))]
    return torch.stack(terms).where(visible_entries(T, K - T), torch.nan).numpy()


def normalized(x, norm):
    """Apply a LayerNorm to vectors (..., D)."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def shift(x):
    """Roll each row to the left; values that enter from the right are in the future."""
    T = x.shape[-2]
    return torch.stack([x[..., i, :].roll(i - T + 1, -1) for i in range(T)], -2)


def labeled(T, M):
    """Return unshifted, descending distances, labeled as 100 * query + distance: (T, M + T)."""
    return torch.tensor([[100 * i + M + T - 1 - j for j in range(M + T)] for i in range(T)])


# ---- lesson 5 -----------------------------------------------------------------------------------

def sinusoid(position, D):
    """Replace lesson 1's sinusoid: (n,) -> (n, D).  Raises TypeError for other arguments."""
    if not isinstance(position, torch.Tensor) or position.dim() != 1:
        raise TypeError(f"sinusoid wants a tensor (n,) of positions, got {str(position)[:50]}")
    return unit_circle(position, D)


def distances_in(R):
    """Return the distance that each row of R (K, D) encodes, or R if it is not such a matrix."""
    if not isinstance(R, torch.Tensor) or R.dim() != 2 or R.shape[1] % 2:
        return R
    numbers = list(range(-3, 40))
    off = (R.detach()[:, None] - unit_circle(numbers, R.shape[1])).abs().amax(-1)  # (K, numbers)
    found = [numbers[row.argmin()] if row.min() < 1e-9 else torch.nan for row in off]
    return torch.tensor(found, dtype=torch.float64)


def relative_score(q, k, k_R, u, v):
    """Replace lesson 4's relative_score: (B, H, T, K).  Raises ValueError for other shapes."""
    found = [tuple(getattr(z, "shape", ())) for z in (q, k, k_R, u, v)]
    (B, H, T, C), K = (found[0] + (0,) * 4)[:4], found[1][2] if len(found[1]) == 4 else 0
    if found != [(B, H, T, C), (B, H, K, C), (H, K, C), (H, C), (H, C)] or T > K:
        raise ValueError("relative_score takes q (B, H, T, C), k (B, H, K, C), k_R (H, K, C), u "
                         f"and v (H, C), but it got {', '.join(map(str, found))}")
    content = torch.einsum("bhtc,bhkc->bhtk", q + u.unsqueeze(1), k)
    return content + shift(torch.einsum("bhtc,hkc->bhtk", q + v.unsqueeze(1), k_R))


def attend(q, keys, u, v):
    """Attend from one query q (..., C) to its keys, [(k, k_R, value), ...]."""
    scores = [q * k + q * k_R + u * k + v * k_R for k, k_R, _ in keys]  # (a) + (b) + (c) + (d)
    weights = [(score.sum(-1, keepdim=True) / math.sqrt(q.shape[-1])).exp() for score in scores]
    return sum(weight * value for weight, (*_, value) in zip(weights, keys)) / sum(weights)


def attention(q, k, value, k_R, u, v, mask):
    """Return (B, T, H * C).  Row n of k_R is distance K - 1 - n, and query i is key K - T + i."""
    T, K = mask.shape
    rows = []  # (B, H, C) of each query
    for i in range(T):
        seen = [(k[:, :, j], k_R[:, T - 1 - i + j], value[:, :, j]) for j in range(K)
                if not mask[i, j]]
        rows.append(attend(q[:, :, i], seen, u, v))
    return torch.stack(rows, 1).flatten(2)


def factor(part, dropout):
    """Return the factor of the Multiply that replaces a dropout, otherwise 1."""
    return getattr(getattr(part, dropout, None), "factor", 1)


def layer(part, h, attended):
    """Return a layer's output for h and the result of its attention, both (..., D)."""
    W_1, W_2 = (part.W_1, part.W_2) if hasattr(part, "W_1") else part.feed_forward[::2]
    relu = getattr(part, "relu", torch.relu)  # a rule of the layer checks that this is ReLU
    a, b, c = (factor(part, f"dropout_{place}") for place in ("output", "inner", "ff"))
    h = normalized(h + a * attended, part.norm_1)
    inner = b * relu(h @ W_1.weight.T + W_1.bias)
    return normalized(h + c * (inner @ W_2.weight.T + W_2.bias), part.norm_2)


# ---- lesson 5: generation -----------------------------------------------------------------------

def running_sums(prompt, n, V):
    """Return the n tokens (B, n) with which stand_ins.Adder continues a prompt (B, P)."""
    rows = prompt.tolist()
    for _ in range(n):
        rows = [row + [(sum(row) + len(row)) % V] for row in rows]
    return torch.tensor(rows)[:, prompt.shape[1] :]


# ---- train.py -----------------------------------------------------------------------------------

def mean_loss(tokens, T):
    """Return stand_ins.Ledger's mean loss: a target plus the previous segment's last input."""
    losses = [tokens[i + 1] + (tokens[i // T * T - 1] if i >= T else 0)
              for i in range(len(tokens) - 1)]
    return sum(losses) / len(losses)


# ---- in place of other exercises ----------------------------------------------------------------

REPLACED = {  # what one exercise may call of another
    "01_vanilla_segments": {"lanes": lanes, "segments": segments, "sinusoid": sinusoid},
    "02_recurrence": {"causal_mask": lambda T, m, device=None: ~visible_entries(T, m).to(device)},
    "04_rel_shift": {"rel_shift": shift, "rel_shift_by_index": shift,
                     "relative_score": relative_score}}
