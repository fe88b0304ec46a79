"""Lesson 1. The broken baseline: a Transformer on independent segments (paper, 3.1).

You need to know PyTorch's modules, a training loop, and a transformer's attention.  You
learn how a text is read in lanes, and what forgetting costs.  15 minutes (an estimate).

The problem.  A language model predicts each token from all tokens before it.  A book is
too long to be read at once, so Al-Rfou et al. (2018) cut the text into segments of T
tokens and train on each as if nothing stood before it.  Boundaries fall anywhere, and
the first tokens of a segment lack context: the paper (Dai et al., "Transformer-XL", ACL
2019) calls it *context fragmentation*.  The usual cure at evaluation is a *sliding
window*: move on by one token, read the whole window again, keep its last prediction.
Then every prediction has T tokens of context, but it costs T times the work.

    python 01_vanilla_segments.py      trains for less than a minute, prints, draws

Letters used in every file:  B lanes (the rows of a batch), T segment length, D model
width, H heads, C width of a head, N layers, V vocabulary, FF width inside the
feed-forward network.  Losses are in nats; bits = nats / ln 2.
"""
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.corpora import load
from support.progress import progress

RUNS = Path(__file__).resolve().parent / "runs"  # where figures go
BATCH = 64  # segments or windows that are evaluated together


# ---- the data: one stream, B lanes, segments of T ------------------------------------

def lanes(tokens, B):
    """Cut one stream into B lanes, (n,) -> (B, L + 1), L = (n - 1) // B inputs each.

    The B lanes are the batch: lane b starts where lane b - 1 stops.  The last column of
    a lane is only a target, and the next lane's first input, because the target of each
    input is the next token *of the stream*.  Up to B - 1 tokens at the end are unused.
    Raises ValueError if no lane has an input.

    >>> lanes(torch.arange(23), 2)
    tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11],
            [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]])
    """
    L = (len(tokens) - 1) // B if B > 0 else 0
    rows = [tokens[b * L : (b + 1) * L + 1] for b in range(B)]
    if L < 1:
        raise ValueError(f"{len(tokens)} tokens cannot be cut into {B} lanes: it takes "
                         "at least 1 lane, and more tokens than lanes")
    return torch.stack(rows)


def segments(stream, T, start=0):
    """Cut lanes (B, L + 1) into x, y (B, T): inputs and their next tokens, in order.

    Row b of one segment goes on where row b of the segment before stopped, as lesson 2
    will need it; the last may be shorter.  Tokens become int64, for nn.Embedding.
    An interrupted run goes on from column `start`.  Raises ValueError when T < 1.

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
        x = stream[:, t:end].long()
        y = stream[:, t + 1 : end + 1].long()
        yield x, y


# ---- the model: leaf to root ---------------------------------------------------------

def sinusoid(position, D):
    """Encode positions (n,) as D/2 sines, then D/2 cosines -> (n, D), float64.

    The frequencies are 10000^(-2k/D), k = 0, 1, ...  ValueError when D is odd.
    """
    if D % 2:
        raise ValueError(f"the sinusoid needs an even width, got {D}")
    two_k = torch.arange(0, D, 2, dtype=torch.float64, device=position.device)
    frequency = 10000.0 ** (-two_k / D)  # (D/2,)
    angle = position.double()[:, None] * frequency  # (n, D/2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # (n, D)


class Attention(nn.Module):
    """Multi-head attention: position i looks at positions 0..i of its own segment."""

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
        # score_ij = q_i . k_j / sqrt(C) for j <= i: a later token must not help
        score = q @ k.transpose(-1, -2) / math.sqrt(self.C)  # (B, H, T, T)
        mask = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)  # the future
        probability = score.masked_fill(mask, float("-inf")).softmax(-1)
        out = probability @ value  # (B, H, T, C)
        return self.W_o(out.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    """Attention, then a feed-forward network; a norm *after* each sum (post-norm)."""

    def __init__(self, attention, D, FF):
        super().__init__()
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))
        self.norm_1 = nn.LayerNorm(D)
        self.norm_2 = nn.LayerNorm(D)

    def forward(self, h, *context):
        """(B, T, D) -> (B, T, D).  Context: nothing here, the memory in lesson 2."""
        h = self.norm_1(h + self.attention(h, *context))
        return self.norm_2(h + self.feed_forward(h))


class VanillaTransformer(nn.Module):
    """A causal model with absolute positions and no idea of what came before x."""

    def __init__(self, V, N=2, D=128, H=4, FF=512):
        super().__init__()
        self.D = D
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            Layer(Attention(D, H, D // H), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x):
        """Tokens (B, T) int64 -> logits (B, T, V)."""
        # weights of about .02 would drown in U, of about .7; times sqrt(D) they are .23
        E = self.embedding(x) * math.sqrt(self.D)  # (B, T, D), the embedded tokens
        position = torch.arange(x.shape[1], device=x.device)  # *within the segment*
        U = sinusoid(position, self.D).to(E)  # (T, D), in the dtype of E
        h = E + U
        for layer in self.layers:
            h = layer(h)
        return h @ self.embedding.weight.T  # the output layer is the embedding (tied)


def token_losses(logits, y):
    """-ln p(y) of every token in nats: (..., V), (...) -> (...), here (B, T)."""
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(y.shape)


def bits(losses):
    """The mean of losses in nats, in bits: a float."""
    return losses.mean().item() / math.log(2)


# ---- training and the two ways to evaluate -------------------------------------------

def fit(model, tokens, B, T, steps, lr=5e-3):
    """Train.  The rate rises towards lr (high: a small model), then falls to 0."""
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
    # unfold takes T + 1 tokens from 0, T, 2T, ...: x, and one more for the last target
    parts = tokens.long().unfold(0, T + 1, T).split(BATCH)  # (BATCH, T + 1) each
    losses = [token_losses(model(part[:, :-1]), part[:, 1:])
              for part in progress(parts, "one pass", len(parts))]
    return torch.cat(losses)


@torch.no_grad()
def sliding_window_losses(model, tokens, T, every=1):
    """Predict tokens T, T + every, ..., each from the T before: (n,) -> (W,) nats."""
    parts = tokens.long().unfold(0, T + 1, every).split(BATCH)  # from 0, every, ...
    losses = [token_losses(model(part[:, :-1])[:, -1], part[:, -1])  # the last alone
              for part in progress(parts, "window", len(parts))]
    return torch.cat(losses)


# ---- the lesson ----------------------------------------------------------------------

def show_fragmentation(model, tokens, T):
    """Each segment alone: print and return the mean loss by position, (T,) bits."""
    by_position = one_pass_losses(model, tokens, T).mean(0) / math.log(2)
    print(f"segments of {T} bytes, each alone: {by_position.mean():.2f} bits per byte")
    print(f"  the first of a segment {by_position[0]:.2f}, the second "
          f"{by_position[1]:.2f}, the later half {by_position[T // 2 :].mean():.2f}")
    return by_position


def show_sliding_window(model, tokens, T):
    """The cure and its price, on the same tokens: return the window's mean in bits."""
    tokens = tokens[: (len(tokens) - 1) // T * T + 1]  # whole segments, a target more
    every = 17  # a sample that meets all positions: 17 and T share no factor
    window = sliding_window_losses(model, tokens, T, every)  # tokens T, T + every, ...
    one_pass = one_pass_losses(model, tokens, T).flatten()  # [k] is that of token k + 1
    same = one_pass[T - 1 :: every]  # tokens T, T + every, ...
    print(f"sliding window: {bits(window):.2f} bits per byte")
    print(f"  the same {len(window)} bytes in one pass: {bits(same):.2f}")
    return bits(window)


def save(figure, name):
    """Write a figure into the folder runs/, and say so."""
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / name, dpi=120)
    print(f"figure: {RUNS.name}/{name}")


def draw(by_position, window):
    """The loss at each position of a segment, beside that of the sliding window."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    axes.plot(by_position.tolist(), ".-", label="each segment alone")
    axes.axhline(window, color="C1", label=f"window, mean (work x {len(by_position)})")
    axes.set(xlabel="position in the segment", ylabel="loss (bits per byte)",
             ylim=(0, None), title="The first tokens of every segment pay")
    axes.legend()
    save(axes.figure, "01_fragmentation.png")


def main():
    """Train the baseline; show what fragmentation costs, and what the cure costs."""
    torch.manual_seed(0)
    T = 32
    # the text of Python's own library; a token is a byte's place in corpus.vocab, the
    # list of the bytes that occur; .train, .valid and .test are uint8 tensors (n,)
    corpus = load("stdlib")
    model = VanillaTransformer(len(corpus.vocab))
    fit(model, corpus.train[:1_030_000], B=64, T=T, steps=500)
    by_position = show_fragmentation(model, corpus.valid[:300_000], T)
    window = show_sliding_window(model, corpus.valid[:300_000], T)
    draw(by_position, window)


if __name__ == "__main__":
    main()

# Ask yourself (answers: tests/course/answers.md, which your teacher has)
#   1. Why does the loss fall within a segment, if all positions share the weights?
#   2. Position 0 predicts from one byte.  Could it beat counted pairs of bytes?
# Change and watch
#   1. T = 8, then 128 in main: what becomes of the loss and the work of both ways?
#   2. Write h = E for h = E + U: which positions get worse, and why not all?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     segments of 32 bytes, each alone: 2.45 bits per byte
#       the first of a segment 3.70, the second 2.97, the later half 2.35
# The first is predicted from one byte, the second from two: they pay, and the mean with
# them.  That is context fragmentation.
#
#     sliding window: 2.39 bits per byte
#       the same 17644 bytes in one pass: 2.46
# The window mends it: each of these bytes is now predicted from 32 before it.  (They
# are other bytes than the later halves above; with these it cannot be compared.)  For
# each of them 32 tokens went through the model, in one pass one.
#
#     figure: runs/01_fragmentation.png
