"""Lesson 1. The broken baseline: a Transformer on independent segments (paper, 3.1).

The problem.  A language model predicts each token from all tokens before it.  A book is
too long to be read at once, so Al-Rfou et al. (2018) cut the text into segments of T
tokens and train on each as if nothing stood before it.  Boundaries fall anywhere, and
the first tokens of a segment lack context: *context fragmentation* in the paper (Dai et
al., "Transformer-XL", ACL 2019).  The usual cure at evaluation is a *sliding window*:
move on by one token, read all of it again, keep the last prediction.  T times the work.

    python 01_vanilla_segments.py      trains for about half a minute, prints, draws

Letters used in every file:  B lanes, T segment length, D model width, H heads, C width
of a head, N layers, V vocabulary, FF width inside the feed-forward network; E embedded
tokens, U encoded positions.  Later: M memory length, K keys, of memory and segment
together.  Losses are in nats; bits = nats / ln 2.
"""
import math
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.corpora import load
from support.progress import progress

RUNS = Path(__file__).resolve().parent / "runs"
BATCH = 64  # segments or windows that are evaluated together


# ---- the data: one stream, B lanes, segments of T ------------------------------------

def lanes(tokens, B):
    """Cut one stream into B lanes, (n,) -> (B, L + 1), L = (n - 1) // B inputs each.

    The B lanes are the batch: lane b starts where lane b - 1 stops.  The last column of
    a lane is only a target: it is the next lane's first input, as the target of each
    input is the next token *of the stream*.  Up to B - 1 tokens at the end are unused.

    >>> lanes(torch.arange(23), 2)
    tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11],
            [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]])
    """
    if B < 1:
        raise ValueError(f"a stream is cut into at least 1 lane, not {B}")
    L = (len(tokens) - 1) // B
    if L < 1:
        raise ValueError(f"{B} lanes need at least {B + 1} tokens, got {len(tokens)}")
    return torch.stack([tokens[b * L : (b + 1) * L + 1] for b in range(B)])


def segments(stream, T, start=0):
    """Cut lanes (B, L + 1) into x, y (B, T): inputs and their next tokens, in order.

    Row b of one segment goes on where row b of the segment before stopped; the last may
    be shorter.  Tokens become int64, as nn.Embedding wants.  `start` is the column to
    begin at, for a run that was interrupted.  Raises ValueError when T < 1.

    >>> for x, y in segments(lanes(torch.arange(23), 2), 4):
    ...     print(x.tolist(), y.tolist())
    [[0, 1, 2, 3], [11, 12, 13, 14]] [[1, 2, 3, 4], [12, 13, 14, 15]]
    [[4, 5, 6, 7], [15, 16, 17, 18]] [[5, 6, 7, 8], [16, 17, 18, 19]]
    [[8, 9, 10], [19, 20, 21]] [[9, 10, 11], [20, 21, 22]]
    """
    if T < 1:
        raise ValueError(f"a segment has at least 1 token, not {T}")
    L = stream.shape[1] - 1
    for t in range(start, L, T):
        end = min(t + T, L)
        yield stream[:, t:end].long(), stream[:, t + 1 : end + 1].long()


# ---- the model: leaf to root ---------------------------------------------------------

def sinusoid(position, D):
    """Encode positions (n,) as D/2 sines, then D/2 cosines -> (n, D), float64.

    Frequencies 10000^(-2k/D), k = 0, 1, ...  Raises ValueError when D is odd.
    """
    if D % 2:
        raise ValueError(f"the sinusoid needs an even width, got {D}")
    two_k = torch.arange(0, D, 2, dtype=torch.float64, device=position.device)
    angle = position.double()[:, None] * 10000.0 ** (-two_k / D)  # (n, D/2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # (n, D)


def head_width(D, H):
    """C = D / H, the width of a head.  Raises ValueError when H does not divide D."""
    if H < 1 or D % H:
        raise ValueError(f"{H} heads do not divide the model width {D}")
    return D // H


class Attention(nn.Module):
    """Multi-head attention: position i looks at positions 0..i of its own segment."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H, self.C = H, C
        self.W_q, self.W_k, self.W_v = (
            nn.Linear(D, H * C, bias=False) for _ in range(3))
        self.W_o = nn.Linear(H * C, D, bias=False)

    def forward(self, h):
        """(B, T, D) -> (B, T, D)."""
        B, T, D = h.shape
        q, k, v = (W(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
                   for W in (self.W_q, self.W_k, self.W_v))
        # A_ij = q_i . k_j / sqrt(C) for j <= i; a later token must not help to predict
        score = q @ k.transpose(-1, -2) / math.sqrt(self.C)  # (B, H, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
        probability = score.masked_fill(future, float("-inf")).softmax(-1)
        return self.W_o((probability @ v).transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    """Attention, then a feed-forward network; a norm *after* each sum (post-norm)."""

    def __init__(self, attention, D, FF):
        super().__init__()
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, h, *context):
        """(B, T, D) -> (B, T, D).  Later attentions need a context besides h."""
        h = self.norm_1(h + self.attention(h, *context))
        return self.norm_2(h + self.feed_forward(h))


class VanillaTransformer(nn.Module):
    """A causal model with absolute positions and no idea of what came before x."""

    def __init__(self, V, N=2, D=128, H=4, FF=512):
        super().__init__()
        self.D = D
        self.embedding = nn.Embedding(V, D)
        C = head_width(D, H)
        self.layers = nn.ModuleList(Layer(Attention(D, H, C), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x):
        """Tokens (B, T) int64 -> logits (B, T, V)."""
        position = torch.arange(x.shape[1], device=x.device)  # *within the segment*
        U = sinusoid(position, self.D)  # (T, D)
        # weights of .02 would drown in U (root mean square .71); times sqrt(128): .23
        E = self.embedding(x) * math.sqrt(self.D)
        h = E + U.to(E)  # (B, T, D), in the dtype of E
        for layer in self.layers:
            h = layer(h)
        return h @ self.embedding.weight.T  # the output layer is the embedding (tied)


def token_losses(logits, y):
    """-ln p(y) of every token in nats: (..., V), (...) -> (...), here (B, T)."""
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(y.shape)


# ---- training and the two ways to evaluate -------------------------------------------

def fit(model, tokens, B, T, steps, lr=5e-3):
    """Train; the rate is the smaller of a rise over 50 steps and a fall over all."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(segments(lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        loss = token_losses(model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        # a gradient longer than .25 is shortened to it: no wild steps
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


@torch.no_grad()
def one_pass_losses(model, tokens, T):
    """Evaluate as trained, each segment alone: (n,) -> (S, T) nats, S segments."""
    S = (len(tokens) - 1) // T
    x, y = (z[: S * T].long().view(S, T).split(BATCH) for z in (tokens, tokens[1:]))
    batches = progress(zip(x, y), "one pass", len(x))
    return torch.cat([token_losses(model(a), b) for a, b in batches])


@torch.no_grad()
def sliding_window_losses(model, tokens, T, every=1):
    """Predict tokens T, T + every, ..., each from the T before: (n,) -> (W,) nats."""
    predicted = range(T, len(tokens), every)  # W tokens, a window in front of each
    x = torch.stack([tokens[t - T : t] for t in predicted]).long().split(BATCH)
    y = torch.stack([tokens[t] for t in predicted]).long().split(BATCH)
    batches = progress(zip(x, y), "window", len(x))
    return torch.cat([token_losses(model(a)[:, -1], b) for a, b in batches])  # the last


# ---- the lesson ----------------------------------------------------------------------

def show_fragmentation(model, tokens, T):
    """Each segment alone: print and return the mean loss by position, (T,) bits."""
    by_position = one_pass_losses(model, tokens, T).mean(0) / math.log(2)
    mean, later = by_position.mean(), by_position[T // 2 :].mean()
    print(f"segments of {T} bytes, each alone: {mean:.2f} bits per byte, the first of "
          f"a\n  segment {by_position[0]:.2f}, the second {by_position[1]:.2f}, the "
          f"later half {later:.2f}: fragmentation costs\n  {mean - later:.2f} on "
          "average, against the later half, which lacks context, too")
    return by_position


def show_sliding_window(model, tokens, T):
    """The cure and its price: print both, return the window's mean loss in bits."""
    tokens = tokens[: (len(tokens) - 1) // T * T + 1]  # whole segments, one last target
    every = 59  # a sample; 59 and T share no factor: all positions of a segment occur
    start = time.perf_counter()
    window = sliding_window_losses(model, tokens, T, every) / math.log(2)  # (W,)
    middle = time.perf_counter()
    by_token = one_pass_losses(model, tokens, T).flatten() / math.log(2)  # from token 1
    end = time.perf_counter()
    place = torch.arange(T, len(tokens), every) - 1  # (W,): where the same tokens are
    same = by_token[place]
    n = max(1, T // 8)
    early = place % T < n  # (W,): those at the beginning of a segment
    ratio = (middle - start) / len(window) / ((end - middle) / len(by_token))
    print(f"sliding window, {len(window)} predictions: {window.mean():.2f} bits per "
          f"byte; the same in one pass: {same.mean():.2f}\n  tokens through the model "
          f"for a prediction: {T} to 1; seconds, measured: {ratio:.0f} to 1\n"
          f"  a segment's first {n} tokens: {window[early].mean():.2f}, in one pass "
          f"{same[early].mean():.2f}; the others: {window[~early].mean():.2f}, "
          f"{same[~early].mean():.2f}:\n  it mends the beginnings "
          f"(standard error of its mean: {window.std() / len(window) ** 0.5:.2f})")
    return window.mean().item()


def draw(by_position, window):
    """The loss at each position of a segment, beside that of the sliding window."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    axes.plot(by_position.tolist(), ".-", label="each segment alone")
    axes.axhline(window, color="C1", label=f"window: {len(by_position)} times the work")
    axes.set(xlabel="position in the segment", ylabel="loss (bits per byte)",
             ylim=(0, None), title="The first tokens of every segment pay")
    axes.legend()
    RUNS.mkdir(exist_ok=True)
    axes.figure.savefig(RUNS / "01_fragmentation.png", dpi=120)
    print(f"figure: {RUNS.name}/01_fragmentation.png")


def main():
    """Train the baseline; show what fragmentation costs, and what the cure costs."""
    torch.manual_seed(0)
    T = 64
    # the source code of Python's standard library, found on every machine; a token is a
    # byte's place in corpus.vocab, the list of the bytes that occur, so V < 256
    corpus = load("stdlib")  # .train, .valid and .test are 1-D uint8 tensors
    model = VanillaTransformer(len(corpus.vocab))
    fit(model, corpus.train[:2_000_000], B=32, T=T, steps=1000)
    by_position = show_fragmentation(model, corpus.valid, T)
    window = show_sliding_window(model, corpus.valid, T)
    draw(by_position, window)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why does the loss fall within a segment, if all positions share the weights?
#   2. Position 0 predicts from one byte.  Could it beat counted pairs of bytes?
# Change and watch
#   1. T = 16, then 128 in main: what becomes of the loss and the work of both ways?
#   2. Write h = E for h = E + U.to(E): which positions get worse, and why not all?
