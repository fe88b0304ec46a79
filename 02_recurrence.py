"""Lesson 2. Memory: cache a segment, stop the gradient, reuse it (paper, 3.2).

You need lesson 1.  You learn how the past becomes keys and values, how far back each
layer can then see, and why absolute positions break.  20 minutes (an estimate).

The problem.  Lesson 1's model forgets everything at each segment boundary.

The one new idea.  Each layer keeps its *input*, the hidden states h of a segment.  When
it reads the next segment, it puts them in front, for keys and values only:

    h~ = [SG(memory) ; h]         SG is stop-gradient, [x ; y] joins x and y along time
    q = h W_q   k = h~ W_k   value = h~ W_v

The past is not run through the layers again and gets no gradient, so training stays
affordable; but information flows, and each layer reaches M further back.

                            segment 1     segment 2     segment 3     T = M = 4, N = 2
    h2, made by layer 2     .  .  .  .    .  .  .  .    .  .  .  P
    h1, made by layer 1     .  .  .  .   [a  x  x  x]   x  x  x  x
    h0, the embeddings     [b  x  x  x]   x  .  .  .    .  .  .  .

To make P, layer 2 reads a and the x in its row (its memory in brackets): 7 tokens back.
To make a, one segment earlier, layer 1 read b and the x in its row: 11 back from P.

What it breaks: absolute positions.  Exchange token x, at position 3 of the memory, and
token y, at position 3 of the segment:

    the key at position 3 of the memory     W_k (E_x + U_3)   becomes   W_k (E_y + U_3)
    the key at position 3 of the segment    W_k (E_y + U_3)   becomes   W_k (E_x + U_3)

A later query sees both, and attention sums over keys in whatever order: no later output
of the layer changes.  The paper calls it *temporal confusion*.

    python 02_recurrence.py      a few seconds: exact zeros, exact counts, one figure

New letters:  M the longest memory, m <= M its length so far, K = m + T keys.  NEW marks
what the model adds to lesson 1's.
"""
import math
from importlib import import_module

import torch
import torch.nn as nn
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")  # `import` takes no leading digit


# ---- the two new functions -----------------------------------------------------------

def update_memory(memory, h, M):
    """First in, first out: the last M hidden states of [memory ; h], detached.

    (B, m, D), (B, T, D) -> (B, min(M, m + T), D).  Until M tokens were read the memory
    is shorter than M; it is never filled up with zeros.

    >>> old, new = torch.tensor([[[1.], [2.], [3.]]]), torch.tensor([[[4.], [5.]]])
    >>> update_memory(old, new, 3).flatten().tolist()
    [3.0, 4.0, 5.0]
    """
    joined = torch.cat([memory, h], dim=1)  # (B, m + T, D)
    first = max(0, joined.shape[1] - M)  # a negative index would count from the end
    return joined[:, first:].detach()


def causal_mask(T, m, device=None):
    """Which keys a query must *not* see: (T, m + T) bool.

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
    """Lesson 1's model, each layer's input remembered; positions are still absolute."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=64):
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
        if memory is None:  # no past: memories of length 0                        # NEW
            memory = [h[:, :0]] * len(self.layers)                                 # NEW
        new_memory = []  # for the next call; this one reads the past              # NEW
        for layer, past in zip(self.layers, memory):                               # NEW
            new_memory.append(update_memory(past, h, self.M))  # the layer's input # NEW
            h = layer(h, past)                                                     # NEW
        return h @ self.embedding.weight.T, new_memory                             # NEW


def reach(N, T, M):
    """How many tokens back the last token of a segment can see through N layers.

    The earliest token that a layer reads stands M before the *start of the segment*;
    the layer below goes on from that token.  If T divides M: N * M + T - 1.

    >>> reach(1, 4, 4), reach(2, 4, 4), reach(3, 4, 0)
    (7, 11, 3)
    """
    token = T - 1  # of the segment that starts at 0; with T = M = 4: 3, -4, -8, ...
    for _ in range(N):
        segment_start = token - token % T  # in Python -3 % 4 is 1: -3 is in -4 ... -1
        token = segment_start - M
    return T - 1 - token


def stream_losses(model, x, y, T):
    """Read (B, n) in segments of T, handing the memory on -> losses (B, n) in nats."""
    memory = None
    losses = []
    for x_T, y_T in zip(x.split(T, dim=1), y.split(T, dim=1)):
        logits, memory = model(x_T, memory)
        losses.append(lesson_1.token_losses(logits, y_T))
    return torch.cat(losses, dim=1)


@torch.no_grad()
def change_by_distance(N, T=8, M=8, n_segments=7):
    """Change the first token: how far does each loss of the stream move?  (n,) nats."""
    torch.manual_seed(N)
    model = RecurrentTransformer(V=11, N=N, D=16, H=2, FF=32, M=M).double()
    x, y = torch.randint(11, (2, 1, n_segments * T))  # any targets will do
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % 11
    return (stream_losses(model, x, y, T) - stream_losses(model, other, y, T)).abs()[0]


@torch.no_grad()
def confusion(model, T, j, k):
    """Exchange token j in memory, token k in the segment: how do later losses move?"""
    stream = torch.arange(2 * T)[None]  # two segments, no token occurs twice
    other = stream.clone()
    other[0, [j, T + k]] = stream[0, [T + k, j]]
    y = stream  # any targets will do
    move = stream_losses(model, stream, y, T) - stream_losses(model, other, y, T)
    return move[:, T + max(j, k) + 1 :].abs().max().item()


# ---- the lesson ----------------------------------------------------------------------

def show_stopped_gradient(T, M, D=32):
    """One layer reads segment 2 after segment 1: where do gradients go?"""
    layer = lesson_1.Layer(Attention(D, H=2, C=16), D, FF=64)
    first = torch.randn(1, T, D, requires_grad=True)  # hidden states of segment 1
    second = torch.randn(1, T, D, requires_grad=True)
    memory = update_memory(first[:, :0], first, M)
    number = layer(second, memory)[0, -1, 0]  # any one number that the layer gives
    into_1, into_2 = torch.autograd.grad(number, [first, second], allow_unused=True)
    print(f"gradient into segment 2: up to {into_2.abs().max():.2f}")
    largest = None if into_1 is None else into_1.abs().max().item()
    print(f"gradient into segment 1: {largest}")


def show_reach(T, M):
    """Count how far one token shows through 1 to 4 layers -> the changes (5, n).

    It begins a segment, and what it reaches ends one: so far does the end look back.
    """
    print(f"token 0 changed, T = {T}, M = {M}: the farthest token whose loss moves is")
    changes = [change_by_distance(4, T, M=0)]  # no memory, as in lesson 1
    for N in (1, 2, 3, 4):
        changes.append(change_by_distance(N, T, M))
        farthest = int(changes[N].nonzero().max())
        print(f"  N = {N}: {farthest}, and reach() says {reach(N, T, M)}")
    return torch.stack(changes)


def show_confusion(T, M):
    """One layer cannot tell memory from segment where the positions are the same."""
    model = RecurrentTransformer(V=50, N=1, D=32, H=2, FF=64, M=M).double()
    print("one layer; a token in memory, one in the segment exchanged: losses move")
    print(f"  by {confusion(model, T, 3, 3):.0e} if both stood at position 3")
    print(f"  by {confusion(model, T, 3, 4):.0e} if they stood at positions 3 and 4")


def draw(changes, T, M):
    """The changes (5, n) by distance, logarithmic; white is exactly 0."""
    n = changes.shape[1]
    axes = Figure(figsize=(8, 3), layout="constrained").subplots()
    image = axes.imshow(changes.where(changes != 0, torch.nan).log10().numpy(),
                        aspect="auto", extent=(0, n, 4.5, -0.5))
    axes.set(xlabel=f"distance from the changed token (a segment is {T} tokens wide)",
             ylabel="layers N", yticks=range(5), xticks=range(0, n + 1, T),
             yticklabels=("4, no memory", 1, 2, 3, 4),
             title=f"White: a change of exactly 0.  Each layer reaches M = {M} further")
    axes.figure.colorbar(image, label="log10 of the change (nats)")
    lesson_1.save(axes.figure, "02_reach.png")


def main():
    """Exact zeros across the boundary, the reach, and the confusion that remains."""
    torch.manual_seed(0)
    T = M = 8
    show_stopped_gradient(T, M)
    changes = show_reach(T, M)
    show_confusion(T, M)
    draw(changes, T, M)


if __name__ == "__main__":
    main()

# Ask yourself (answers: tests/course/answers.md, which your teacher has)
#   1. Why does a layer remember its input, and not its output?
#   2. Gradients stop at the boundary.  How can W_k and W_v learn to use the memory?
#   3. Could two layers notice the exchange at position j?  Through which hidden states?
# Change and watch
#   1. T, M = 8, 16 in main, n_segments=10 in change_by_distance: how far is a step?
#   2. Let the memory keep its gradient: which printed line changes, and which do not?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     gradient into segment 2: up to 0.87
#     gradient into segment 1: None
# None is more than a gradient of 0: autograd finds no way back into segment 1.
#
#     token 0 changed, T = 8, M = 8: the farthest token whose loss moves is
#       N = 1: 15, and reach() says 15
#       N = 2: 23, and reach() says 23
#       N = 3: 31, and reach() says 31
#       N = 4: 39, and reach() says 39
# Each layer adds M = 8: 15, 23, 31, 39.  All losses after these move by exactly 0.
#
#     one layer; a token in memory, one in the segment exchanged: losses move
#       by 0e+00 if both stood at position 3
# 0, or about 1e-16, which is rounding: the same keys in another order.
#
#       by 1e-04 if they stood at positions 3 and 4
# At another position it is noticed.
#
#     figure: runs/02_reach.png
