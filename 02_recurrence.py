"""Lesson 2. Memory: cache a segment, stop the gradient, reuse it (paper, 3.2).

The problem.  Lesson 1's model forgets everything at each segment boundary.

The one new idea.  Each layer keeps its *input*, the hidden states h of a segment.  When
it reads the next segment, it puts them in front, for keys and values only:

    h~ = [SG(memory) o h]         SG is stop-gradient, [a o b] joins a and b along time
    q = h W_q   k = h~ W_k   v = h~ W_v

The past is not run through the layers again and gets no gradient, so training stays
affordable; but information flows.  If T divides M, each layer reaches M further back.

           segment 1     segment 2     segment 3      T = M = 4, N = 2
    h2                                 .  .  .  Q
    h1                  [x  x  x  x]   x  x  x  x     7 tokens back from Q
    h0    [x  x  x  x]   x  x  x  x                   11 back

h0 are the embeddings, h1 is what layer 1 makes of h0, h2 what layer 2 makes of h1.
Only the way from Q to the oldest token is drawn; what stands in brackets comes from
memory; 7 back is what layer 2 sees by itself.  To make Q, layer 2 reads h1 of segment 3
and, from memory, of segment 2.  That h1 was made one segment earlier, when layer 1 read
h0 of segment 2 and, from its memory then, of segment 1.

What it breaks: absolute positions.  An embedding at position j is E + U_j, in memory
and in the segment, and attention is a sum over an unordered set of keys.  Exchange the
token at j in the memory with the one at j in the segment: with one layer, no output of
the segment after j changes.  The paper calls it *temporal confusion*.

    python 02_recurrence.py      a few seconds: exact zeros, exact counts, one figure

New letters:  M the longest memory, m <= M its length so far, K = m + T keys.  (In
causal_mask, lesson 3's four_terms and lesson 4 the length so far is called M.)  NEW
marks what the model adds to lesson 1's.
"""
import math
from importlib import import_module

import torch
import torch.nn as nn
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")  # `import` takes no leading digit
RUNS, sinusoid, token_losses = lesson_1.RUNS, lesson_1.sinusoid, lesson_1.token_losses
head_width, Layer = lesson_1.head_width, lesson_1.Layer


# ---- the two new functions -----------------------------------------------------------

def update_memory(memory, h, M):
    """First in, first out: the last M hidden states of [memory o h], detached.

    (B, m, D), (B, T, D) -> (B, min(M, m + T), D).  Until M tokens were read the memory
    is shorter than M; it is never filled up with zeros.

    >>> old, new = torch.tensor([[[1.], [2.], [3.]]]), torch.tensor([[[4.], [5.]]])
    >>> update_memory(old, new, 3).flatten().tolist()
    [3.0, 4.0, 5.0]
    """
    joined = torch.cat([memory, h], dim=1)  # (B, m + T, D)
    first = max(0, joined.shape[1] - M)  # a negative index would count from the end
    return joined[:, first:].detach()


def causal_mask(T, M, device=None):
    """Which keys a query must *not* see: (T, M + T) bool.

    The first M keys are memory, so query i is itself key M + i; later keys are future.

    >>> causal_mask(2, 3).int()
    tensor([[0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(M + T, device=device)
    return j > M + i  # (T, K)


def reach(N, T, M):
    """How many tokens back the last prediction of a segment can see through N layers.

    A query sees from M tokens before its *segment's* start on, so each layer steps back
    to a segment's start, and M further.  If M is a multiple of T: N * M + T - 1.

    >>> reach(1, 4, 4), reach(2, 4, 4), reach(3, 4, 0)
    (7, 11, 3)
    """
    first = 0  # the query is token T - 1 of the segment that starts at 0
    for _ in range(N):
        # -4, -3, -2, -1 are one segment, if T = 4: // rounds down, so -3 // 4 * 4 is -4
        first = first // T * T - M
    return T - 1 - first


# ---- the model of lesson 1 with a memory ---------------------------------------------

class Attention(nn.Module):
    """Queries from the segment; keys and values from memory and segment."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H, self.C = H, C
        self.W_q, self.W_k, self.W_v = (
            nn.Linear(D, H * C, bias=False) for _ in range(3))
        self.W_o = nn.Linear(H * C, D, bias=False)

    def forward(self, h, memory):                                                  # NEW
        """(B, T, D), (B, m, D) -> (B, T, D)."""
        (B, T, D), m, H, C = h.shape, memory.shape[1], self.H, self.C
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)                       # NEW
        q = self.W_q(h).view(B, T, H, C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_k(h_tilde).view(B, m + T, H, C).transpose(1, 2)  # (B, H, K, C) # NEW
        v = self.W_v(h_tilde).view(B, m + T, H, C).transpose(1, 2)  # (B, H, K, C) # NEW
        score = q @ k.transpose(-1, -2) / math.sqrt(C)  # (B, H, T, K)
        hidden = causal_mask(T, m, h.device)  # offset by the memory               # NEW
        probability = score.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.W_o((probability @ v).transpose(1, 2).reshape(B, T, -1))


class RecurrentTransformer(nn.Module):
    """Lesson 1's model, each layer's input remembered; positions are still absolute."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=64):
        super().__init__()
        self.D, self.M = D, M                                                      # NEW
        self.embedding = nn.Embedding(V, D)
        C = head_width(D, H)
        self.layers = nn.ModuleList(Layer(Attention(D, H, C), D, FF) for _ in range(N))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):                                             # NEW
        """x (B, T), N memories (B, m, D) or None -> logits (B, T, V), new memories."""
        position = torch.arange(x.shape[1], device=x.device)
        U = sinusoid(position, self.D)
        E = self.embedding(x) * math.sqrt(self.D)
        h = E + U.to(E)
        if memory is None:  # no past: memories of length 0                        # NEW
            memory = [h[:, :0]] * len(self.layers)                                 # NEW
        new_memory = []                                                            # NEW
        for layer, past in zip(self.layers, memory):                               # NEW
            new_memory.append(update_memory(past, h, self.M))  # the layer's input # NEW
            h = layer(h, past)                                                     # NEW
        return h @ self.embedding.weight.T, new_memory                             # NEW


# ---- what a memory does, in exact numbers --------------------------------------------

def stream_losses(model, x, y, T):
    """Read (B, n) in segments of T, handing the memory on -> losses (B, n) in nats."""
    memory, losses = None, []
    for a, b in zip(x.split(T, dim=1), y.split(T, dim=1)):
        logits, memory = model(a, memory)
        losses.append(token_losses(logits, b))
    return torch.cat(losses, dim=1)


def gradient_into(model, x, y, T):
    """Largest |gradient| of segment 2's loss in the embeddings of segment 1, of 2."""
    inputs = []  # what model.embedding puts out for each segment
    def keep(module, args, output):
        output.retain_grad()  # without it backward() gives a .grad to weights only
        inputs.append(output)
    # a forward hook: PyTorch calls it with the output each time the module has run
    hook = model.embedding.register_forward_hook(keep)
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    hook.remove()
    loss_2.backward()
    # exactly 0 for segment 1, as the memory is detached.  0 and not None: the losses of
    # segment 1 are in the graph, too, and the slice sends zeros back through them
    return [h.grad.abs().max().item() for h in inputs]


def change_by_distance(N, T=8, M=8, segments=7):
    """Change the first token: how far does each loss of the stream move?  (n,) nats."""
    torch.manual_seed(N)
    model = RecurrentTransformer(V=11, N=N, D=16, H=2, FF=32, M=M).double()
    x, y = torch.randint(11, (2, 1, segments * T))  # any targets will do
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % 11
    with torch.no_grad():
        change = stream_losses(model, x, y, T) - stream_losses(model, other, y, T)
    return change.abs()[0]


@torch.no_grad()
def confusion(model, T, j, k):
    """Exchange token j in memory, token k in the segment: how do later outputs move?"""
    first, second = torch.arange(2 * T).view(2, 1, T)  # two segments, no token twice
    first_2, second_2 = first.clone(), second.clone()
    first_2[0, j], second_2[0, k] = second[0, k], first[0, j]
    memory, memory_2 = model(first)[1], model(first_2)[1]
    move = (model(second, memory)[0] - model(second_2, memory_2)[0]).abs()  # (1, T, V)
    return move[:, max(j, k) + 1 :].max().item()


# ---- the lesson ----------------------------------------------------------------------

def show_segment_boundary(T, M):
    """Nothing of lesson 1 has changed, and no gradient crosses the boundary."""
    model = RecurrentTransformer(V=50, N=2, D=32, H=2, FF=64, M=M).double()
    vanilla = lesson_1.VanillaTransformer(V=50, N=2, D=32, H=2, FF=64).double()
    vanilla.load_state_dict(model.state_dict())  # the memory added no weight
    x, y = torch.randint(50, (2, 1, 2 * T))
    difference = (model(x)[0] - vanilla(x)).abs().max()
    print(f"without a memory, lesson 2 minus lesson 1: {difference:g}")
    past, own = gradient_into(model, x, y, T)
    print("largest gradient of segment 2's loss, with respect to embedded tokens:\n"
          f"  into segment 2 {own:.3f}, into segment 1 {past:g}")


def show_reach(T, M):
    """Count how far one token shows through 1 to 4 layers -> the changes (4, n)."""
    print(f"first token changed, T = {T}, M = {M}: in which segments do losses move?")
    changes = torch.stack([change_by_distance(N, T, M) for N in (1, 2, 3, 4)])
    for N, change in enumerate(changes, 1):
        following = change.split(T)[1:]  # the segments after the first
        moved = [int((part != 0).any()) for part in following]
        print(f"  N = {N}: following segments {moved} -> {sum(moved)}; farthest "
              f"{int(change.nonzero().max())}, reach() says {reach(N, T, M)}")
    return changes


def show_confusion(T, M):
    """One layer cannot tell memory from segment where the positions are the same."""
    model = RecurrentTransformer(V=50, N=1, D=32, H=2, FF=64, M=M).double()
    same, other = confusion(model, T, 3, 3), confusion(model, T, 3, 4)
    print("one layer; a token in memory, one in the segment exchanged: outputs move")
    print(f"  by {same:.0e} if both stood at position 3: rounding, the keys are a set")
    print(f"  by {other:.0e} if they stood at positions 3 and 4")


def draw(changes, T):
    """The changes (5, n) by distance, logarithmic; white is exactly 0."""
    n = changes.shape[1]
    axes = Figure(figsize=(8, 3), layout="constrained").subplots()
    image = axes.imshow(changes.where(changes != 0, torch.nan).log10().numpy(),
                        aspect="auto", extent=(0, n, 4.5, -0.5))
    axes.set(xlabel=f"distance from the changed token (a segment is {T} tokens wide)",
             ylabel="layers N", yticks=range(5), xticks=range(0, n + 1, T),
             yticklabels=("4, M = 0", 1, 2, 3, 4),
             title=f"White: a change of exactly 0.  Each layer reaches M = {T} further")
    axes.figure.colorbar(image, label="log10 of the change (nats)")
    RUNS.mkdir(exist_ok=True)
    axes.figure.savefig(RUNS / "02_reach.png", dpi=120)
    print(f"figure: {RUNS.name}/02_reach.png")


def main():
    """Exact zeros across the boundary, the reach, and the confusion that remains."""
    torch.manual_seed(0)
    T = M = 8
    show_segment_boundary(T, M)
    changes = show_reach(T, M)
    show_confusion(T, M)
    alone = change_by_distance(4, T, M=0)  # as in lesson 1
    draw(torch.cat([alone[None], changes]), T)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why does a layer remember its input, and not its output?
#   2. Gradients stop at the boundary.  How can W_k and W_v learn to use the memory?
#   3. Could two layers notice the exchange at position j?  Through which hidden states?
# Change and watch
#   1. M = 16 in main, segments=10 in change_by_distance: how far does a layer step now?
#   2. Drop .detach() in update_memory: which printed line changes?
