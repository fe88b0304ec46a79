"""Lesson 1. The broken baseline: a Transformer on independent segments (section 3.1).

The problem.  A language model predicts each token from all tokens before it.  A
Transformer cannot read a whole book at once, so Al-Rfou et al. (2018) cut the text into
segments of T tokens and train on each as if nothing stood before it.  No information
crosses a boundary, and since boundaries fall anywhere, the first tokens of each segment
are predicted from almost nothing: the paper calls it *context fragmentation*.  The usual
cure at evaluation is a *sliding window*: move on by a single token, read the whole window
again, keep only its last prediction.  That costs T times as much.

The one idea here: cut a stream so that a later lesson can remember (`lanes`, `segments`),
and measure what forgetting costs.

    python 01_vanilla_segments.py      trains for about half a minute, prints, draws

The text is the source code of Python's own standard library: it is on every machine, and
it uses its names again and again.  A token is a byte: `load` gives 1-D uint8 tensors, the
training, validation and test part, in which each byte is a number from 0 to V - 1.

Letters used in every file:  B lanes, T segment length, D model width, H heads, C width of
a head, N layers, V vocabulary, FF width inside the feed-forward network.  Later: M memory
length, K = M + T keys.  Losses are in nats; bits = nats / ln 2.
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


# ---- the data: one stream, B lanes, segments of T ---------------------------------------

def lanes(tokens, B):
    """Cut one stream into B lanes, (n,) -> (B, L + 1), L = (n - 1) // B inputs each.

    The B lanes are the batch: lane b starts where lane b - 1 stops.  The last column of a
    lane is only a target: it is the next lane's first input, because the target of every
    input is the next token *of the stream*.  Up to B - 1 tokens at its end are left over.

    >>> lanes(torch.arange(23), 2)
    tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11],
            [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]])

    Raises ValueError when B < 1 or when a lane would have no input.
    """
    if B < 1:
        raise ValueError(f"a stream is cut into at least 1 lane, not {B}")
    L = (len(tokens) - 1) // B
    if L < 1:
        raise ValueError(f"{B} lanes need at least {B + 1} tokens, got {len(tokens)}")
    return torch.stack([tokens[b * L : (b + 1) * L + 1] for b in range(B)])  # (B, L + 1)


def segments(stream, T, start=0):
    """Cut lanes (B, L + 1) into x, y (B, T): inputs and their next tokens, in order.

    Row b of one segment goes on where row b of the segment before stopped; the last segment
    may be shorter.  They become int64, which nn.Embedding wants.  `start` is the column to
    begin at, for a run that goes on where it was interrupted.

    >>> for x, y in segments(lanes(torch.arange(23), 2), 4):
    ...     print(x.tolist(), y.tolist())
    [[0, 1, 2, 3], [11, 12, 13, 14]] [[1, 2, 3, 4], [12, 13, 14, 15]]
    [[4, 5, 6, 7], [15, 16, 17, 18]] [[5, 6, 7, 8], [16, 17, 18, 19]]
    [[8, 9, 10], [19, 20, 21]] [[9, 10, 11], [20, 21, 22]]

    Raises ValueError when T < 1.
    """
    if T < 1:
        raise ValueError(f"a segment has at least 1 token, not {T}")
    L = stream.shape[1] - 1
    for t in range(start, L, T):
        end = min(t + T, L)
        yield stream[:, t:end].long(), stream[:, t + 1 : end + 1].long()


# ---- the model: leaf to root ------------------------------------------------------------

def sinusoid(position, D):
    """Encode positions (n,) as sines and cosines -> (n, D), float64.

    Vaswani et al. (2017), in the layout of the official code: all D/2 sines, then all
    cosines, frequencies 10000^(-2k/D), k = 0, 1, ...  Raises ValueError when D is odd.
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
        self.W_q, self.W_k, self.W_v = (nn.Linear(D, H * C, bias=False) for _ in range(3))
        self.W_o = nn.Linear(H * C, D, bias=False)

    def forward(self, h):
        """(B, T, D) -> (B, T, D)."""
        B, T, D = h.shape
        q, k, v = (W(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
                   for W in (self.W_q, self.W_k, self.W_v))
        # A_ij = q_i . k_j / sqrt(C) for j <= i: nothing may be predicted from its future
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
        T = x.shape[1]
        U = sinusoid(torch.arange(T, device=x.device), self.D)  # t *within the segment*
        # .02 is small, for the output layer; sqrt(128) makes it .23, beside U's .71 (root
        # mean squares): at first positions are louder than tokens, but no longer by 35 to 1
        h = self.embedding(x) * math.sqrt(self.D)
        h = h + U.to(h)  # (B, T, D), in the dtype of h
        for layer in self.layers:
            h = layer(h)
        return h @ self.embedding.weight.T  # the output layer is the embedding (tied)


def token_losses(logits, y):
    """-ln p(y) of every token in nats: (..., V), (...) -> (...), here (B, T)."""
    logits, targets = logits.flatten(0, -2), y.flatten()  # (B * T, V), (B * T,)
    return F.cross_entropy(logits, targets, reduction="none").view(y.shape)


# ---- training and the two ways to evaluate ----------------------------------------------

def fit(model, tokens, B, T, steps, lr=5e-3):
    """Train on independent segments; the rate rises for 50 steps, then falls to 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(segments(lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        loss = token_losses(model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


@torch.no_grad()
def one_pass_losses(model, tokens, T):
    """Evaluate as trained, each segment alone: (n,) -> (S, T) nats, S whole segments."""
    S = (len(tokens) - 1) // T
    x = tokens[: S * T].long().view(S, T)
    y = tokens[1 : S * T + 1].long().view(S, T)
    batches = progress(zip(x.split(64), y.split(64)), "one pass", math.ceil(S / 64))
    return torch.cat([token_losses(model(a), b) for a, b in batches])


@torch.no_grad()
def sliding_window_losses(model, tokens, T, every=1):
    """Predict tokens T, T + every, ... of (n,), each from the T before it -> (W,) nats."""
    predicted = range(T, len(tokens), every)
    x = torch.stack([tokens[t - T : t] for t in predicted]).long()  # (W, T), W windows
    y = tokens[T::every].long()  # (W,): each window has one target, the token after it
    batches = progress(zip(x.split(64), y.split(64)), "window", math.ceil(len(x) / 64))
    # the model predicts at all T positions of a window; all but the last are thrown away
    return torch.cat([token_losses(model(a)[:, -1], b) for a, b in batches])


# ---- the lesson -------------------------------------------------------------------------

def show_fragmentation(model, tokens, T):
    """Each segment alone: print and return the losses by position, (T,) in bits."""
    losses = one_pass_losses(model, tokens, T) / math.log(2)  # (S, T)
    by_position = losses.mean(0)  # (T,)
    mean, later = losses.mean(), by_position[T // 2 :].mean()
    print(f"segments of {T} bytes, each alone: {mean:.2f} bits per byte, the first of a "
          f"segment {by_position[0]:.2f},\n  the second {by_position[1]:.2f}, the later "
          f"half {later:.2f}: fragmentation costs {mean - later:.2f} on average")
    return by_position


def show_sliding_window(model, tokens, T):
    """The cure and its price: print both, return the window's mean loss in bits."""
    tokens = tokens[: (len(tokens) - 1) // T * T + 1]  # whole segments and a last target
    every = 59  # a sample will do; and as 59 and 64 share no factor, it has tokens from
    predicted = torch.arange(T, len(tokens), every)  # all positions of a segment alike
    start = time.perf_counter()
    window = sliding_window_losses(model, tokens, T, every) / math.log(2)  # (W,)
    middle = time.perf_counter()
    losses = one_pass_losses(model, tokens, T).flatten() / math.log(2)  # of tokens 1, 2, ...
    end = time.perf_counter()
    same = losses[predicted - 1]  # (W,): the same tokens
    print(f"sliding window, {len(window)} predictions: {window.mean():.2f} bits per byte; "
          f"the same in one pass: {same.mean():.2f}")
    ratio = (middle - start) / len(window) / ((end - middle) / len(losses))
    print(f"  tokens through the model for a prediction: {T} to 1; seconds, measured: "
          f"{ratio:.0f} to 1")
    return window.mean().item()


def draw(by_position, window):
    """The loss at each position of a segment, beside that of the sliding window."""
    T = len(by_position)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(T), by_position.tolist(), ".-", label="each segment alone")
    axes.axhline(window, color="tab:orange", label=f"sliding window: {T} times the work")
    axes.set(xlabel="position in the segment", ylabel="loss (bits per byte)",
             ylim=(0, None), title="The first tokens of every segment pay")
    axes.legend()
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "01_fragmentation.png", dpi=120)
    print(f"figure: {RUNS.name}/01_fragmentation.png")


def main():
    """Train the baseline; show what fragmentation costs, and what the cure costs."""
    torch.manual_seed(0)
    T, corpus = 64, load("stdlib")
    model = VanillaTransformer(len(corpus.vocab))
    fit(model, corpus.train[:2_000_000], B=32, T=T, steps=1000)
    by_position = show_fragmentation(model, corpus.valid, T)
    window = show_sliding_window(model, corpus.valid, T)
    draw(by_position, window)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why does the loss fall within a segment although all positions share the weights?
#   2. The target of a lane's last input stands in the next lane. Why is that no mistake?
#   3. Position 0 predicts from one byte. Which loss could the best possible model reach?
# Change and watch
#   1. T = 16, then T = 128: how do the cost of fragmentation and the price of the cure move?
#   2. Delete the line that adds U: which positions get worse, and why not all of them?
