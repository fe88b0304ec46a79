"""Lesson 2. Memory: cache a segment, stop the gradient, reuse it (paper, section 3.2).

The problem.  Lesson 1's model forgets everything at each segment boundary.

The one new idea.  While reading segment s, every layer keeps its *input* rows.  While reading
segment s + 1, the same layer puts them in front of its new input, for keys and values only:

    h~ = [SG(memory) o h]         SG is stop-gradient, [a o b] joins a and b along time
    q = h W_q   k = h~ W_k   v = h~ W_v

The past is not run through the layers again and gets no gradient, so training stays affordable, but
information flows: each layer reaches M tokens further back.  (No gradient reaches the remembered
rows, but the weights that read them, W_k and W_v, do learn to make use of them.)

          segment 0       segment 1       segment 2       (T = M = 4, N = 2)
  h2      . . . .         . . . .         . . . Q         the loss at Q ...
  h1      . . . .        [x x x x         x x x x]        ... sees 7 back through layer 2 ...
  h0     [x x x x         x x x x]        x x x x         ... and 11 back through layer 1 below it
  [ ]: what layer 2 reads for Q, and what layer 1 reads for the memory that layer 2 has of segment 1

What it breaks.  Absolute positions: a memory row carries the same position j as a row of the new
segment, and one layer provably cannot tell which came first (*temporal confusion*).  Lesson 3
mends it.

    python 02_recurrence.py      a few seconds: exact zeros, exact counts, one figure

New letters:  M the longest memory, m <= M the rows held so far, K = m + T keys.  What is new
against lesson 1 is marked NEW.
"""
import math
from importlib import import_module

import torch
import torch.nn as nn
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")  # `import` takes no name that starts with a digit
RUNS, sinusoid, token_losses = lesson_1.RUNS, lesson_1.sinusoid, lesson_1.token_losses
head_width, Layer, VanillaTransformer = (
    lesson_1.head_width, lesson_1.Layer, lesson_1.VanillaTransformer)


# ---- the two new functions ----------------------------------------------------------------------

def update_memory(memory, h, M):
    """First in, first out: the last M rows of [memory o h], detached.

    (B, m, D), (B, T, D) -> (B, min(M, m + T), D).  Before M rows have been seen the memory is
    simply shorter: no zeros are attended to in place of a past that is not there.

    >>> old, new = torch.tensor([[[1.], [2.], [3.]]]), torch.tensor([[[4.], [5.]]])
    >>> update_memory(old, new, 3).flatten().tolist()
    [3.0, 4.0, 5.0]
    """
    m, T = memory.shape[1], h.shape[1]
    # cut, then join: so only the rows that stay are copied and kept.  max(0, ...), since a negative
    # index would count from the end
    old, new = memory[:, max(0, m + T - M) :], h[:, max(0, T - M) :]
    return torch.cat([old, new], dim=1).detach()


def causal_mask(T, M, device=None):
    """Which keys a query must *not* see: (T, M + T) bool.

    The first M keys are memory, so query i is itself key M + i; a key after that is the future.

    >>> causal_mask(2, 3).int()
    tensor([[0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(M + T, device=device)
    return j > M + i  # (T, K)


def reach(N, T, M):
    """How many tokens back the last prediction of a segment can see through N layers.

    A query sees from M rows before its *segment's* start, so each layer steps back to the start of
    the segment it has arrived in, and M further.  If M is a multiple of T: N * M + T - 1.

    >>> reach(1, 4, 4), reach(2, 4, 4), reach(3, 4, 0)
    (7, 11, 3)
    """
    first = 0  # the query's segment starts at 0, the query is token T - 1
    for _ in range(N):
        first = first // T * T - M
    return T - 1 - first


# ---- the model of lesson 1 with a memory --------------------------------------------------------

class Attention(nn.Module):
    """Queries from the segment; keys and values from memory and segment."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H, self.C = H, C
        self.W_q, self.W_k, self.W_v = (nn.Linear(D, H * C, bias=False) for _ in range(3))
        self.W_o = nn.Linear(H * C, D, bias=False)

    def forward(self, h, memory):
        """(B, T, D), (B, m, D) -> (B, T, D)."""
        (B, T, D), m = h.shape, memory.shape[1]
        rows = torch.cat([memory, h], dim=1)  # (B, K, D)                                     # NEW
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_k(rows).view(B, m + T, self.H, self.C).transpose(1, 2)  # (B, H, K, C)     # NEW
        v = self.W_v(rows).view(B, m + T, self.H, self.C).transpose(1, 2)  # (B, H, K, C)     # NEW
        score = q @ k.transpose(-1, -2) / math.sqrt(self.C)  # (B, H, T, K)
        hidden = causal_mask(T, m, h.device)  # offset by the memory                          # NEW
        probability = score.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.W_o((probability @ v).transpose(1, 2).reshape(B, T, -1))


class RecurrentTransformer(nn.Module):
    """Lesson 1's model with a memory for each layer's input, and still with absolute positions."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=64):
        super().__init__()
        self.D, self.M = D, M
        self.embedding = nn.Embedding(V, D)
        C = head_width(D, H)
        self.layers = nn.ModuleList(Layer(Attention(D, H, C), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):
        """Tokens (B, T), a list of N memories (B, m, D) or None -> logits (B, T, V), new memory."""
        B, T = x.shape
        U = sinusoid(torch.arange(T, device=x.device), self.D)
        h = self.embedding(x) * math.sqrt(self.D)
        h = h + U.to(h)
        if memory is None:  # no past: memories with no rows                                  # NEW
            memory = [h[:, :0]] * len(self.layers)
        new_memory = []
        for layer, past in zip(self.layers, memory):
            new_memory.append(update_memory(past, h, self.M))  # the layer's input            # NEW
            h = layer(h, past)
        return h @ self.embedding.weight.T, new_memory


# ---- what a memory does, in exact numbers -------------------------------------------------------

def stream_losses(model, x, y, T):
    """Read (B, n) in segments of T, handing the memory on -> losses (B, n) in nats."""
    memory, losses = None, []
    for a, b in zip(x.split(T, dim=1), y.split(T, dim=1)):
        logits, memory = model(a, memory)
        losses.append(token_losses(logits, b))
    return torch.cat(losses, dim=1)


def gradient_into(model, x, y, T):
    """The largest |gradient| that the second segment's summed loss sends into each one's input."""
    inputs = []
    hook = model.embedding.register_forward_hook(lambda module, args, out: inputs.append(out))
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    hook.remove()
    gradients = torch.autograd.grad(loss_2, inputs, allow_unused=True)
    # None is autograd's word for "not connected": exactly zero, not merely small
    return [0.0 if g is None else g.abs().max().item() for g in gradients]


def change_by_distance(N, T=8, M=8, segments=7):
    """Change the stream's first token: how much does each loss move?  (segments * T,) nats."""
    torch.manual_seed(N)
    model = RecurrentTransformer(V=11, N=N, D=16, H=2, FF=32, M=M).double()
    x, y = torch.randint(11, (2, 1, segments * T))  # any targets will do
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % 11
    with torch.no_grad():
        return (stream_losses(model, x, y, T) - stream_losses(model, other, y, T)).abs()[0]


@torch.no_grad()
def confusion(model, T, j, k):
    """Exchange token j of the memory and token k of the segment: how far do later outputs move?"""
    memory_tokens = torch.arange(T)[None]  # all different, so that every exchange is a change
    segment_tokens = torch.arange(T, 2 * T)[None]
    a, b = memory_tokens.clone(), segment_tokens.clone()
    a[0, j], b[0, k] = segment_tokens[0, k], memory_tokens[0, j]
    before = model(segment_tokens, model(memory_tokens)[1])[0]
    after = model(b, model(a)[1])[0]
    return (before - after)[:, max(j, k) + 1 :].abs().max().item()


def main():
    """Exact zeros across the boundary, the staircase of reach, and the confusion that remains."""
    torch.manual_seed(0)
    T = M = 8
    model = RecurrentTransformer(V=50, N=2, D=32, H=2, FF=64, M=M).double()
    vanilla = VanillaTransformer(V=50, N=2, D=32, H=2, FF=64).double()
    vanilla.load_state_dict(model.state_dict())  # the memory added no weight
    x, y = torch.randint(50, (2, 1, 2 * T))
    difference = (model(x)[0] - vanilla(x)).abs().max()
    print(f"without a memory, lesson 2 minus lesson 1: {difference:g}")
    into_1, into_2 = gradient_into(model, x, y, T)
    print(f"gradient of segment 2's loss: into segment 2 {into_2:.3f}, into segment 1 {into_1:g}")

    print(f"one token changed, T = {T}, M = {M}: which losses move?  (expected: up to N M + T - 1)")
    changes = [change_by_distance(N, T, M) for N in (1, 2, 3, 4)]
    for N, change in enumerate(changes, 1):
        moved = [int((part != 0).any()) for part in change.split(T)[1:]]
        farthest = int(change.nonzero().max())
        print(f"  N = {N}: following segments {moved} -> {sum(moved)}; "
              f"farthest {farthest}, reach() says {reach(N, T, M)}")

    single = RecurrentTransformer(V=50, N=1, D=32, H=2, FF=64, M=M).double()
    print("one layer, a token in memory and one in the segment change places; later outputs move")
    same, other = confusion(single, T, 3, 3), confusion(single, T, 3, 4)
    print(f"  by {same:.0e} if both stood at position 3: rounding, so the pasts look the same")
    print(f"  by {other:.0e} if they stood at positions 3 and 4")

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    table = torch.stack(changes)
    image = axes.imshow(table.where(table != 0, torch.nan).log10().numpy(), aspect="auto",
                        extent=(0, table.shape[1], 4.5, 0.5))
    axes.set(xlabel=f"distance from the changed token (a segment is {T} tokens wide)",
             ylabel="layers N", yticks=(1, 2, 3, 4), xticks=range(0, table.shape[1] + 1, T),
             title="White: a change of exactly 0.  Each layer reaches one memory further")
    figure.colorbar(image, label="log10 of the change (nats)")
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "02_reach.png", dpi=120)
    print(f"figure: {RUNS.name}/02_reach.png")


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why does layer n remember its input and not its output?  Who would read the top output?
#   2. Gradients stop at the boundary, and yet the model learns to use the memory.  How can that be?
#   3. With two layers instead of one, would the exchange at position j still go unnoticed?  Which
#      layer could notice it, and through what?
# Change and watch
#   1. M = 16 in main, with segments=10 in change_by_distance: what does a step measure now?
#   2. Drop .detach() in update_memory: which printed line changes?  What would the second
#      loss.backward() of a training loop (lesson 3's fit) say?
