"""Lesson 2. Memory: cache a segment, stop the gradient, reuse it (paper, 3.2).

You need lesson 1.  You learn how the past becomes keys and values, how far back each
layer can then attend, and why absolute positions break.  About 30 minutes.

The problem.  Lesson 1's model forgets everything at each segment boundary.

The one new idea.  Each layer caches its *input*, the hidden states h of a segment.  For
the next segment it prepends them to the input, for keys and values only:

    h~ = [SG(memory) ; h]         SG: stop gradient; [ ; ]: concatenated along time
    q = h W_q   k = h~ W_k   value = h~ W_v

Cached states are not recomputed and get no gradient, so training stays affordable; but
information still flows, and each layer reaches M tokens further back.

                            segment 1     segment 2     segment 3     T = M = 4, N = 2
    h2, made by layer 2     .  .  .  .    .  .  .  .    .  .  .  P
    h1, made by layer 1     .  .  .  .   [a  x  x  x]   x  x  x  x
    h0, the embeddings     [b  x  x  x]   x  .  .  .    .  .  .  .

P is the last state of segment 3.  To compute it, layer 2 attends to a and every x in
row h1, so it reaches 7 tokens back.  Brackets mark a layer's memory.  When a was
computed, in segment 2, layer 1 attended to b and every x in row h0: b is 11 tokens
before P.  (The dots in row h0 are reached through the other x of row h1.)

Absolute positions no longer work.  Let queries follow position 3 (T > 4).  Swap token
p, at position 3 of the memory, and token q, at position 3 of the segment:

    the key at position 3 of the memory     (E_p + U_3) W_k   becomes   (E_q + U_3) W_k
    the key at position 3 of the segment    (E_q + U_3) W_k   becomes   (E_p + U_3) W_k

Later queries see both keys, with their values, and attention ignores the order of keys:
no later output of layer 1 changes.  The paper calls this *temporal confusion*.

    python 02_recurrence.py      up to a minute: a gradient, the reach, a swap, the loss

New letters:  M longest memory, m <= M memory now, K = m + T keys.  NEW marks new code.
"""
import math
from importlib import import_module

from support import run_lesson
from support.progress import progress

import torch
import torch.nn as nn
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")  # `import` takes no leading digit
# what lesson 1 printed
BEFORE = {"lesson 1: each segment alone": 2.73, "lesson 1: sliding window": 2.70}


# ---- the two new functions -----------------------------------------------------------

def update_memory(memory, h, M):
    """Return the last M hidden states of [memory ; h], detached: first in, first out.

    (B, m, D), (B, T, D) -> (B, min(M, m + T), D).  Until M tokens have been read the
    memory is shorter than M; it is never padded with zeros.

    >>> old, new = torch.tensor([[[1.], [2.], [3.]]]), torch.tensor([[[4.], [5.]]])
    >>> update_memory(old, new, 3).flatten().tolist()
    [3.0, 4.0, 5.0]
    """
    joined = torch.cat([memory, h], dim=1)  # (B, m + T, D)
    first = max(0, joined.shape[1] - M)  # a negative index would count from the end
    return joined[:, first:].detach()


def causal_mask(T, m, device=None):
    """Return a mask (T, m + T), True where a query must *not* attend to a key.

    The first m keys are memory, so query i is itself key m + i; later keys are future.

    >>> causal_mask(2, 3).int()
    tensor([[0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(m + T, device=device)
    return j > m + i  # (T, K)


# ---- the model of lesson 1 with a memory ---------------------------------------------

class Attention(lesson_1.Attention):
    """The weights of lesson 1; keys and values come from memory and segment."""

    def forward(self, h, memory):                                                  # NEW
        """(B, T, D), (B, m, D) -> (B, T, D)."""
        B, T, D = h.shape
        m = memory.shape[1]                                                        # NEW
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)                       # NEW
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_k(h_tilde).view(B, m + T, self.H, self.C).transpose(1, 2)       # NEW
        value = self.W_v(h_tilde).view(B, m + T, self.H, self.C).transpose(1, 2)   # NEW
        score = q @ k.transpose(-1, -2) / math.sqrt(self.C)  # (B, H, T, K)
        mask = causal_mask(T, m, h.device)  # offset by the memory                 # NEW
        probability = score.masked_fill(mask, float("-inf")).softmax(-1)
        out = probability @ value  # (B, H, T, C)
        return self.W_o(out.transpose(1, 2).reshape(B, T, -1))


class RecurrentTransformer(nn.Module):
    """Lesson 1's model with cached layer inputs; positions are still absolute."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=32):
        super().__init__()
        self.D = D
        self.M = M                                                                 # NEW
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            lesson_1.Layer(Attention(D, H, D // H), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):                                             # NEW
        """x (B, T), N memories (B, m, D) or None -> logits (B, T, V), new memories."""
        E = self.embedding(x) * math.sqrt(self.D)
        position = torch.arange(x.shape[1], device=x.device)
        U = lesson_1.sinusoid(position, self.D).to(E)
        h = E + U
        if memory is None:  # nothing cached yet: memories of length 0             # NEW
            memory = [h[:, :0]] * len(self.layers)                                 # NEW
        new_memory = []  # for the next call; this one reads the past              # NEW
        for layer, past in zip(self.layers, memory):                               # NEW
            new_memory.append(update_memory(past, h, self.M))  # the layer's input # NEW
            h = layer(h, past)                                                     # NEW
        return h @ self.embedding.weight.T, new_memory                             # NEW


def reach(N, T, M):
    """Return how many tokens back the last token of a segment reaches in N layers.

    In each layer a token attends to M tokens before the *start of its segment*; one
    layer below, the earliest of these M does the same.  If T divides M: N * M + T - 1.

    >>> reach(1, 4, 4), reach(2, 4, 4), reach(3, 4, 0)
    (7, 11, 3)
    """
    token = T - 1  # the segment starts at 0; T = M = 4 gives 3, -4, -8, ...
    for _ in range(N):
        segment_start = token - token % T  # also correct below 0: in Python -5 % 4 is 3
        token = segment_start - M
    return T - 1 - token


def stream_losses(model, x, y, T):
    """Read x (B, n) in segments of T, carrying the memory over -> (B, n) in nats."""
    memory = None
    losses = []
    for x_T, y_T in zip(x.split(T, dim=1), y.split(T, dim=1)):
        logits, memory = model(x_T, memory)
        losses.append(lesson_1.token_losses(logits, y_T))
    return torch.cat(losses, dim=1)


# ---- training and evaluation ---------------------------------------------------------

def fit(model, tokens, B, T, steps, lr):
    """Train as in lesson 1, carrying the memory from each segment to the next."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(lesson_1.segments(lesson_1.lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        if step % len(batches) == 0:
            memory = None  # the text starts: nothing came before it               # NEW
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        logits, memory = model(x, memory)                                          # NEW
        loss = lesson_1.token_losses(logits, y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


@torch.no_grad()
def lane_losses(model, tokens, B=lesson_1.BUDGET["B"], T=lesson_1.BUDGET["T"]):
    """Read tokens (n,) as B lanes, in segments of T -> losses (B, L) in nats."""
    stream = lesson_1.lanes(tokens.long(), B)
    return stream_losses(model, stream[:, :-1], stream[:, 1:], T)


# ---- the lesson ----------------------------------------------------------------------

def show_stopped_gradient(T=8, M=8, D=32):
    """Print a layer's gradients with respect to this and the previous segment."""
    layer = lesson_1.Layer(Attention(D, H=2, C=16), D, FF=64)
    h_1 = torch.randn(1, T, D, requires_grad=True)  # hidden states of segment 1
    h_2 = torch.randn(1, T, D, requires_grad=True)
    memory = update_memory(h_1[:, :0], h_1, M)
    output = layer(h_2, memory)[0, -1, 0]  # any element will do
    # allow_unused: None where there is no path, instead of an error
    grad_1, grad_2 = torch.autograd.grad(output, [h_1, h_2], allow_unused=True)
    print(f"gradient into segment 2: up to {grad_2.abs().max():.2f}")
    largest = None if grad_1 is None else grad_1.abs().max().item()
    print(f"gradient into segment 1: {largest}")


@torch.no_grad()
def change_by_distance(N, T=8, M=8, n_segments=6):
    """Return how much each loss changes if token 0 is replaced: (n,) nats."""
    torch.manual_seed(N)
    model = RecurrentTransformer(V=11, N=N, D=16, H=2, FF=32, M=M).double()
    x = torch.randint(11, (1, n_segments * T))  # also the targets: any will do
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % 11
    return (stream_losses(model, x, x, T) - stream_losses(model, other, x, T)).abs()[0]


def show_reach(T=8, M=8):
    """Print the farthest token whose loss depends on token 0, for several models."""
    print(f"token 0 changed, T = {T}, M = {M}: farthest token whose loss changes")
    for N, length in ((4, 0), (1, M), (2, M), (3, M), (4, M)):
        farthest = int(change_by_distance(N, T, length).nonzero().max())
        print(f"  N = {N}, M = {length}: {farthest:2}, reach() predicts "
              f"{reach(N, T, length):2}")


# for a figure: skip these two, nothing later needs them
def states(layers, h, change, T, M):
    """Return the states of all layers if `change` (B, N + 1, n, 1) is added to them."""
    rows = [h + change[:, 0]]  # row 0: the embeddings
    for k, layer in enumerate(layers, 1):
        past, outputs = rows[-1][:, :0], []
        for segment in rows[-1].split(T, dim=1):
            outputs.append(layer(segment, past))
            past = update_memory(past, segment, M)
        rows.append(torch.cat(outputs, dim=1) + change[:, k])
    return torch.stack(rows, dim=1)


@torch.no_grad()
def draw_mechanism(T=4, N=3, n=16, D=16):
    """Change each state in turn; plot those that change the last one, and the paths."""
    layers = [lesson_1.Layer(Attention(D, H=2, C=8), D, FF=32) for _ in range(N)]
    h = torch.randn(1, n, D)
    change = torch.eye((N + 1) * n).view(-1, N + 1, n, 1)  # a lane for each state
    old = torch.arange(n) < n - T  # tokens before the last segment
    for axes, M in zip(Figure(figsize=(8, 5), layout="tight").subplots(2), (0, T)):
        changed = states(layers, h, change, T, M) != states(layers, h, 0 * change, T, M)
        changed = changed.any(-1).view(N + 1, n, N + 1, n)  # cause, effect
        used = changed[:, :, N, -1]  # (N + 1, n), True if it changes the last state
        for k in range(N):  # a path: from a state in row k to a used one in row k + 1
            path = (changed[k, :, k + 1] & used[k + 1]).nonzero().T
            axes.plot(path, (k, k + 1), color="0.8" if k < N - 1 else "0.4", zorder=0)
        for dots, style in (~used, "C7."), (used & ~old, "C0o"), (used & old, "C1s"):
            axes.plot(*dots.nonzero().T.flip(0), style)  # tokens, rows
        axes.vlines([t - 0.5 for t in range(T, n, T)], -0.3, N + 0.3, "0.4", ":")
        name = f"With a memory of {M}" if M else "Without a memory"
        axes.set(title=f"{name}: the last state depends on {used[0].sum()} tokens",
                 ylabel="layer", yticks=range(N + 1), xticks=range(n))
    axes.set(xlabel="token (squares: cached, without a gradient)")
    lesson_1.save(axes.figure, "02_mechanism.png")


@torch.no_grad()
def show_confusion(T=8, M=8):
    """Swap a memory and a segment token; print the largest change of a later loss."""
    model = RecurrentTransformer(V=50, N=1, D=32, H=2, FF=64, M=M).double()
    x = torch.arange(2 * T)[None]  # two segments, no token occurs twice
    print("one untrained layer, memory and segment token swapped: later losses change")
    for k, positions in ((3, "both were at position 3"), (4, "at positions 3 and 4")):
        other = x.clone()
        other[0, [3, T + k]] = x[0, [T + k, 3]]
        change = stream_losses(model, x, x, T) - stream_losses(model, other, x, T)
        print(f"  by {change[:, T + k + 1 :].abs().max():.0e} if {positions}")


def main():
    """Show the gradient, the reach, the confusion and its effect on the loss."""
    torch.manual_seed(0)
    show_stopped_gradient()
    draw_mechanism()
    show_reach()
    show_confusion()
    train, valid, vocab = lesson_1.load_text()
    model = RecurrentTransformer(len(vocab))
    fit(model, train, **lesson_1.BUDGET)
    loss = lesson_1.bits(lane_losses(model, valid))
    lesson_1.show_losses(BEFORE | {"lesson 2: memory, absolute positions": loss},
                         "With absolute positions a memory makes the model worse")


if __name__ == "__main__":
    run_lesson(main, __doc__)

# Ask yourself
#   1. Why does a layer cache its input, and not its output?
#   2. Gradients stop at the boundary.  How can W_k and W_v learn to use the memory?
#   3. Could a two-layer model detect the swap at position j?  By which hidden states?
# Change and watch
#   1. Set M=16 in show_reach, and n_segments=10: how much does each layer add?
#   2. Let the memory keep its gradient: which lines change, and why does fit fail?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     gradient into segment 2: up to 0.87
#     gradient into segment 1: None
# None is stronger than a gradient of 0: autograd finds no path into segment 1.
#
#     figure: runs/02_mechanism.png
# A state is colored if changing it changes the last state (top right) of three layers,
# here with T = 4.  Each layer reaches M = 4 tokens further back.
#
#     token 0 changed, T = 8, M = 8: farthest token whose loss changes
#       N = 4, M = 0:  7, reach() predicts  7
#       N = 1, M = 8: 15, reach() predicts 15
#       N = 2, M = 8: 23, reach() predicts 23
#       N = 3, M = 8: 31, reach() predicts 31
#       N = 4, M = 8: 39, reach() predicts 39
# Each layer adds M = 8.  All losses after these tokens change by exactly 0.
#
#     one untrained layer, memory and segment token swapped: later losses change
#       by 9e-16 if both were at position 3
#       by 5e-05 if at positions 3 and 4
# 9e-16 is rounding error: the same keys in another order.  5e-05 is a real change,
# small because the weights are untrained.
#
#     bits per byte: the same training, the same bytes to evaluate on
#       lesson 1: each segment alone           2.73
#       lesson 1: sliding window               2.70
#       lesson 2: memory, absolute positions   3.40
#     figure: runs/losses.png
# This memory is worse than none, also at learning rates .001, .0025 and .01: 3.45,
# 3.34, 3.59.  The swap suggests why: each position has two keys, one in memory and one
# in the segment.  A head that looks for the previous token by its position finds both,
# and gets a mixture of the two; in lesson 1 it finds one.
