"""Lesson 1. The broken baseline: a Transformer on independent segments (paper, 3.1).

You need PyTorch's modules, a training loop and a transformer's attention.  You learn to
feed a text in parallel rows (*lanes*), and what forgetting costs.  About 25 minutes.

The problem.  A language model predicts each token from all tokens before it.  A book is
too long to be read at once, so Al-Rfou et al. (2018) split the text into segments of T
tokens and train on each as if no text came before it.  The first tokens of a segment
lack context: the paper (Dai et al., "Transformer-XL", ACL 2019) calls this *context
fragmentation*.  The usual fix at evaluation is a *sliding window*: advance one token,
process the whole window again, keep its last prediction.  This costs T times as much.

The running experiment: lessons 2 and 3 change this model, one thing at a time.  Each
trains and evaluates it on the same bytes, and adds its loss to the printed list.

    python 01_vanilla_segments.py      up to a minute on two EPYC cores (slower: three)

Letters in every file:  B lanes, T segment length, D model width, H heads, C width of a
head, N layers, V vocabulary, FF feed-forward width.  Losses are in nats; 1 bit is ln 2.
"""
import math
from pathlib import Path

from support import run_lesson
from support.corpora import load
from support.files import write_atomically
from support.progress import progress

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

RUNS = Path(__file__).resolve().parent / "runs"  # where figures go
TRAIN, VALID = 518_000, 200_000  # bytes to train on (enough for 500 steps), to evaluate
BUDGET = {"B": 32, "T": 32, "steps": 500, "lr": 5e-3}  # training in lessons 1 to 3


# ---- the data: one stream, B lanes, segments of T ------------------------------------

def lanes(tokens, B):
    """Split one stream into B lanes, (n,) -> (B, L + 1), L = (n - 1) // B inputs each.

    The lanes are the rows of the batch.  A lane's last token is only a target: as an
    input it begins the next lane.  Up to B - 1 tokens at the end are unused.
    Raises ValueError if no lane has an input.

    >>> lanes(torch.arange(23), 2)
    tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11],
            [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]])
    """
    if B < 1 or len(tokens) <= B:
        raise ValueError(f"{len(tokens)} tokens cannot be cut into {B} lanes")
    L = (len(tokens) - 1) // B
    rows = [tokens[b * L : (b + 1) * L + 1] for b in range(B)]
    return torch.stack(rows)


def segments(stream, T, start=0):
    """Split lanes (B, L + 1), from column `start`, into inputs x and targets y (B, T).

    Row b of each segment continues row b of the previous segment, as lesson 2 requires;
    the last segment may be shorter.  Tokens become int64, for nn.Embedding.

    >>> for x, y in segments(lanes(torch.arange(23), 2), 4):
    ...     print(x.tolist(), y.tolist())
    [[0, 1, 2, 3], [11, 12, 13, 14]] [[1, 2, 3, 4], [12, 13, 14, 15]]
    [[4, 5, 6, 7], [15, 16, 17, 18]] [[5, 6, 7, 8], [16, 17, 18, 19]]
    [[8, 9, 10], [19, 20, 21]] [[9, 10, 11], [20, 21, 22]]
    """
    L = stream.shape[1] - 1
    for t in range(start, L, T):
        end = min(t + T, L)
        x = stream[:, t:end].long()
        y = stream[:, t + 1 : end + 1].long()
        yield x, y


# ---- the model, from its parts to the whole ------------------------------------------

def sinusoid(position, D):
    """Encode positions (n,) as D/2 sines, then D/2 cosines -> (n, D), float64.

    Attention ignores the order of keys, so each position gets its own vector, as if
    read off D/2 clocks, fast to slow, with frequencies 10000^(-2k/D), k = 0, 1, ...
    """
    two_k = torch.arange(0, D, 2, dtype=torch.float64, device=position.device)
    frequency = 10000.0 ** (-two_k / D)  # (D/2,)
    angle = position.double()[:, None] * frequency  # (n, D/2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # (n, D)


class Attention(nn.Module):
    """H parallel heads, each with its own q, k, value; position i attends to 0..i."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H = H
        self.C = C
        self.W_q = nn.Linear(D, H * C, bias=False)
        self.W_k = nn.Linear(D, H * C, bias=False)
        self.W_v = nn.Linear(D, H * C, bias=False)
        self.W_o = nn.Linear(H * C, D, bias=False)

    def forward(self, h):
        """(B, T, D) -> (B, T, D)."""
        B, T, D = h.shape
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_k(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        value = self.W_v(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        # score_ij = q_i . k_j / sqrt(C) for j <= i; later keys are masked
        score = q @ k.transpose(-1, -2) / math.sqrt(self.C)  # (B, H, T, T)
        mask = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)  # the future
        probability = score.masked_fill(mask, float("-inf")).softmax(-1)
        out = probability @ value  # (B, H, T, C)
        return self.W_o(out.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    """Attention, then a feed-forward network, each with a residual sum, then a norm."""

    def __init__(self, attention, D, FF):
        super().__init__()
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))
        self.norm_1 = nn.LayerNorm(D)
        self.norm_2 = nn.LayerNorm(D)

    def forward(self, h, *context):
        """(B, T, D) -> (B, T, D).  From lesson 2 on `context` has the memory."""
        h = self.norm_1(h + self.attention(h, *context))
        return self.norm_2(h + self.feed_forward(h))


class VanillaTransformer(nn.Module):
    """A causal model with absolute positions and no context before x."""

    def __init__(self, V, N=2, D=128, H=4, FF=512):
        super().__init__()
        self.D = D
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            Layer(Attention(D, H, D // H), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x):
        """Tokens (B, T) int64 -> logits (B, T, V)."""
        position = torch.arange(x.shape[1], device=x.device)  # *within the segment*
        E = self.embedding(x) * math.sqrt(self.D)  # (B, T, D), the embedded tokens
        U = sinusoid(position, self.D).to(E)  # (T, D), in the dtype of E
        h = E + U  # U is about .7, E about .2; without sqrt(D) E would be about .02
        for layer in self.layers:
            h = layer(h)
        return h @ self.embedding.weight.T  # tied: the embedding is the output layer


def token_losses(logits, y):
    """Return -ln p(y) of every token, in nats: (..., V), (...) -> (...)."""
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(y.shape)


def bits(losses):
    """Return the mean of losses in nats as a float in bits."""
    return losses.mean().item() / math.log(2)


# ---- the running experiment: text, training, evaluation ------------------------------

def load_text():
    """Load text of Python's library: -> train (TRAIN,), valid (VALID,), vocab."""
    corpus = load("stdlib")  # a token is the index of a byte in vocab
    return corpus.train[:TRAIN], corpus.valid[:VALID], corpus.vocab


def fit(model, tokens, B, T, steps, lr):
    """Train with Adam.  The learning rate warms up towards lr, then decays to 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(segments(lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        loss = token_losses(model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)  # no step is extreme
        optimizer.step()


@torch.no_grad()
def window_losses(model, tokens, T, stride):
    """Evaluate windows of T tokens, one every `stride`: (n,) -> (windows, T) nats."""
    # unfold takes T + 1 tokens, as x and targets overlap; 64 windows are read at once
    parts = tokens.long().unfold(0, T + 1, stride).split(64)
    losses = [token_losses(model(part[:, :-1]), part[:, 1:])
              for part in progress(parts, "evaluating", len(parts))]
    return torch.cat(losses)


# ---- the lesson ----------------------------------------------------------------------

def show_sliding_window(model, tokens, losses):
    """Print and return a sliding window's gain over separate segments, in bits."""
    T = losses.shape[1]
    stride = 17  # coprime to T: the sample covers all positions of a segment
    window = window_losses(model, tokens[: losses.numel() + 1], T, stride)[:, -1]
    # window w predicts targets w * stride to w * stride + T - 1; the last one counts
    gain = bits(losses.flatten()[T - 1 :: stride]) - bits(window)
    print(f"sliding window, on a sample of {len(window)} bytes: {gain:.2f} bits less")
    return gain


def show_by_position(curves, name, title):
    """Print and plot {model: mean losses by position in a segment, in bits}."""
    print("by position in the segment: first byte, second, third, fourth, last")
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for (model, means), style in zip(curves.items(), ("k.-", "C1^--", "C0o-")):
        print(f"  {model:38}", *(f"{z:.2f}" for z in (*means[:4], means[-1])))
        axes.plot(means, style, label=model)
    axes.set(xlabel="position in the segment", ylabel="bits per byte (not from 0)")
    axes.set_title(title)
    axes.legend()
    save(axes.figure, name)


def save(figure, name):
    """Write a figure into the folder runs/ and print its path."""
    try:
        write_atomically(RUNS / name, lambda file: figure.savefig(file, dpi=120))
    except OSError as error:
        raise SystemExit(f"{RUNS / name} cannot be written: {error.strerror}") from None
    print(f"figure: {RUNS.name}/{name}")


def show_losses(results, title):
    """Print {name: bits per byte} and plot bars; those of the last lesson are blue."""
    print("bits per byte: the same training, the same bytes to evaluate on")
    for name, loss in results.items():
        print(f"  {name:38} {loss:.2f}")
    lesson = name.split(":")[0]  # the last one
    colors = ["C0" if z.split(":")[0] == lesson else "0.7" for z in results]
    axes = Figure(figsize=(7, 2.5), layout="constrained").subplots()
    bars = axes.barh(list(results), list(results.values()), color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(xlabel="bits per byte (lower is better)", xlim=(0, 4), title=title)
    axes.invert_yaxis()  # the first on top
    save(axes.figure, "losses.png")


def main():
    """Train the baseline; show what a window gains, and the loss by position."""
    torch.manual_seed(0)
    train, valid, vocab = load_text()
    model = VanillaTransformer(len(vocab))
    fit(model, train, **BUDGET)
    losses = window_losses(model, valid, BUDGET["T"], BUDGET["T"])  # T apart: segments
    gain = show_sliding_window(model, valid, losses)
    by_position = (losses.mean(0) / math.log(2)).tolist()
    loss = bits(losses)
    title = f"The first byte costs {by_position[0]:.2f} bits, the mean {loss:.2f}"
    show_by_position({"lesson 1: each segment alone": by_position},
                     "01_fragmentation.png", title)
    show_losses({"lesson 1: each segment alone": loss, "lesson 1: sliding window":
                 loss - gain}, "A sliding window hardly helps")


if __name__ == "__main__":
    run_lesson(main, __doc__)

# Ask yourself
#   1. Why does the loss fall within a segment, although all positions share weights?
#   2. Position 0 sees one byte.  Could it beat byte-pair counts of the same text?
# Change and watch
#   1. Set T to 8, then 128, in BUDGET: how do both losses and both costs change?
#   2. Remove U from h = E + U: which positions get worse, and why not all?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     sliding window, on a sample of 11761 bytes: 0.03 bits less
# The window predicts each byte from the 32 before it, at 32 times the cost.
#
#     by position in the segment: first byte, second, third, fourth, last
#       lesson 1: each segment alone           3.79 3.12 2.93 2.85 2.74
#     figure: runs/01_fragmentation.png
# The first byte is predicted from one, the second from two: their high losses raise the
# mean.  This is context fragmentation.  In the figure it affects few bytes: from the
# ninth on the loss hardly falls.  So a longer past helps this model little.  Lesson 3
# returns to this figure.
#
#     bits per byte: the same training, the same bytes to evaluate on
#       lesson 1: each segment alone           2.73
#       lesson 1: sliding window               2.70
#     figure: runs/losses.png
# The sliding window's 2.70 is 2.73 minus the gain on the sample.
#
# How good is 2.73?  A uniform guess among the 170 bytes costs log2(170) = 7.41 bits; xz
# needs 1.96, as it copies from all 200,000 bytes and not from 32.
