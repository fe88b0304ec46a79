"""Lesson 3. Relative positions: the score with four terms (paper, 3.3).

You need lessons 1 and 2.  You learn the equation of Transformer-XL term by term, and
why distances let a segment continue a memory seamlessly.  About 35 minutes.

The problem.  In lesson 2 memory and segment share positions, already added into the
cached states.  Numbering the whole text would reach positions never seen in training.

The one new idea.  A score need not depend on *where* a key is, only on *how far back*:
distance i - j goes into the score, and no position is added to the embedding.  Layer
1's score in lesson 2 is a product of two sums, so it has four terms.  E_i is the
embedded token at position i, q_i = W_q E_i its query, k_j = W_k E_j a key (in these
formulas vectors are columns; in lesson 2 and in code they are rows):

    (W_q (E_i + U_i)) . (W_k (E_j + U_j))  =  (a) + (b) + (c) + (d)

        absolute             relative (here)         asks
    (a) W_q E_i . W_k E_j    q_i . k_j               does key j fit this query?
    (b) W_q E_i . W_k U_j    q_i . (W_kR R_(i-j))    does distance i - j fit this query?
    (c) W_q U_i . W_k E_j    u   . k_j               is key j important to all queries?
    (d) W_q U_i . W_k U_j    v   . (W_kR R_(i-j))    is distance i - j important to all?

  * U_j, the key's position, becomes R_(i-j), its distance, again as a fixed sinusoid.
    Content and distance are projected separately: now k_j = W_kE E_j; W_kR is new.
  * W_q U_i, the query's own position, is replaced by a vector that each head learns
    for all queries: u in (c), v in (d).  Higher layers use h instead of E; R stays.

In code i counts the segment's queries, j all keys.  Query i is key m + i, so i - j
becomes m + i - j.  For T = 3 queries, m = 2 memory keys (a dot: the future):

                           key j   0  1  2  3  4
    query 0, which is key 2        2  1  0  .  .
    query 1, which is key 3        3  2  1  0  .
    query 2, which is key 4        4  3  2  1  0

    python 03_relative_attention.py      up to a minute: equalities, heat maps, losses

New letters, the paper's:  R (K, D), where row n encodes distance n; W_kE, W_kR, u, v.
"""
import math
from importlib import import_module

from support import run_lesson
from support.corpora import decode

import numpy as np
import torch
import torch.nn as nn
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
BEFORE = lesson_2.BEFORE | {"lesson 2: memory, absolute positions": 3.40}
LESSON_1 = [  # its loss at each of the 32 positions of a segment
    3.79, 3.12, 2.93, 2.85, 2.83, 2.75, 2.71, 2.65, 2.64, 2.65, 2.70, 2.71, 2.68,
    2.68, 2.63, 2.68, 2.65, 2.64, 2.65, 2.62, 2.63, 2.69, 2.63, 2.62, 2.64, 2.75,
    2.62, 2.64, 2.61, 2.65, 2.62, 2.74]


# ---- the four terms, twice -----------------------------------------------------------

def four_terms(q, k, R, W_kR, u, v):
    """Compute the four terms, element by element, for one head in NumPy: -> (4, T, K).

    q (T, C), k (K, C), R (K, D) by distance, W_kR (C, D), u, v (C,).  Query i is key
    m + i, after m = K - T memory keys.  Future keys get NaN.  Nothing is scaled yet.
    """
    T, K = len(q), len(k)
    m = K - T
    terms = np.full((4, T, K), np.nan)
    for i in range(T):
        for j in range(m + i + 1):
            distance = m + i - j
            terms[0, i, j] = q[i] @ k[j]  # (a)
            terms[1, i, j] = q[i] @ (W_kR @ R[distance])  # (b)
            terms[2, i, j] = u @ k[j]  # (c)
            terms[3, i, j] = v @ (W_kR @ R[distance])  # (d)
    return terms


def four_terms_all_pairs(q, k, R, W_kR, u, v):
    """Compute the same for all heads in torch, with R expanded to all pairs (i, j).

    q (B, H, T, C), k (B, H, K, C), R (K, D), W_kR (H, C, D), u, v (H, C) ->
    (4, B, H, T, K).  Future cells also hold scores, and must be masked.
    """
    T, K = q.shape[2], k.shape[2]
    i = torch.arange(T, device=q.device)[:, None]
    j = torch.arange(K, device=q.device)
    distance = (K - T + i - j).clamp(min=0)  # (T, K), the future clamped to 0
    R_ij = R[distance]  # (T, K, D): for each pair its row of R
    # einsum names the axes and sums over those absent after ->.  Here it sums over d:
    # k_R_ij[h, i, j] = W_kR[h] @ R_ij[i, j].  Below, over c: a dot product per pair.
    k_R_ij = torch.einsum("hcd,ijd->hijc", W_kR, R_ij)  # (H, T, K, C)
    term_a = q @ k.transpose(-1, -2)  # (B, H, T, K): q_i . k_j
    term_b = torch.einsum("bhic,hijc->bhij", q, k_R_ij)  # (B, H, T, K): q_i . k_R_ij
    term_c = u[:, None] @ k.transpose(-1, -2)  # (B, H, 1, K): the same for any query
    term_d = torch.einsum("hc,hijc->hij", v, k_R_ij)  # (H, T, K): equal in all lanes
    return torch.stack(torch.broadcast_tensors(term_a, term_b, term_c, term_d))


# ---- the model of lesson 2 with relative positions -----------------------------------

class RelativeAttention(nn.Module):
    """Attention by content and distance, slow and obvious; lesson 4 makes it fast."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H = H
        self.C = C
        self.W_q = nn.Linear(D, H * C, bias=False)
        self.W_kE = nn.Linear(D, H * C, bias=False)  # content keys: W_k until now
        self.W_kR = nn.Linear(D, H * C, bias=False)  # distance keys               # NEW
        self.W_v = nn.Linear(D, H * C, bias=False)
        self.W_o = nn.Linear(H * C, D, bias=False)

    def terms(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> the four terms (4, B, H, T, K)."""
        B, T, D = h.shape
        K = memory.shape[1] + T
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_kE(h_tilde).view(B, K, self.H, self.C).transpose(1, 2)
        distance = torch.arange(K, device=h.device)                                # NEW
        R = lesson_1.sinusoid(distance, D).to(h)  # (K, D)                         # NEW
        W_kR = self.W_kR.weight.view(self.H, self.C, D)  # for the R of each pair  # NEW
        return four_terms_all_pairs(q, k, R, W_kR, u, v)                           # NEW

    def score(self, h, memory, u, v):
        """Sum the terms: -> (B, H, T, K); lesson 4 computes the sum another way."""
        return self.terms(h, memory, u, v).sum(0)                                  # NEW

    def forward(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> (B, T, D)."""
        B, T, D = h.shape
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)
        value = self.W_v(h_tilde).view(B, -1, self.H, self.C).transpose(1, 2)
        score = self.score(h, memory, u, v)  # (B, H, T, K)                        # NEW
        score = score / math.sqrt(self.C)  # in the authors' code, not in the paper
        mask = lesson_2.causal_mask(T, memory.shape[1], h.device)
        probability = score.masked_fill(mask, float("-inf")).softmax(-1)
        out = probability @ value  # (B, H, T, C)
        return self.W_o(out.transpose(1, 2).reshape(B, T, -1))


class RelativeTransformer(nn.Module):
    """The first small Transformer-XL: no absolute positions; layers share u and v."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=32, attention=RelativeAttention):
        super().__init__()
        self.D = D
        self.M = M
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            lesson_1.Layer(attention(D, H, D // H), D, FF) for _ in range(N))      # NEW
        self.u = nn.Parameter(0.02 * torch.randn(H, D // H))                       # NEW
        self.v = nn.Parameter(0.02 * torch.randn(H, D // H))                       # NEW
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):
        """x (B, T), N memories (B, m, D) or None -> logits (B, T, V), new memories."""
        h = self.embedding(x) * math.sqrt(self.D)  # no U, since R has distances   # NEW
        if memory is None:
            memory = [h[:, :0]] * len(self.layers)
        new_memory = []
        for layer, past in zip(self.layers, memory):
            new_memory.append(lesson_2.update_memory(past, h, self.M))
            h = layer(h, past, self.u, self.v)                                     # NEW
        return h @ self.embedding.weight.T, new_memory


# ---- the lesson ----------------------------------------------------------------------

def show_loops_against_pairs(T=3, m=4, C=5, D=6):
    """Print how much the two versions of the terms differ, for one lane and head."""
    shapes = (T, C), (m + T, C), (m + T, D), (C, D), (C,), (C,)
    q, k, R, W_kR, u, v = (torch.randn(z, dtype=torch.float64) for z in shapes)
    loops = torch.tensor(four_terms(*(z.numpy() for z in (q, k, R, W_kR, u, v))))
    pairs = four_terms_all_pairs(
        q[None, None], k[None, None], R, W_kR[None], u[None], v[None])[:, 0, 0]
    visible = ~lesson_2.causal_mask(T, m)
    difference = (loops - pairs)[:, visible].abs().max()
    print(f"loops against pairs, {int(visible.sum())} visible cells: {difference:.0e}")


@torch.no_grad()
def show_segments_against_one_pass():
    """Print how much segmentation changes losses if M covers all that came before."""
    print("4 segments with memory against one pass, largest difference of losses:")
    for name, kind in (("absolute (lesson 2)", lesson_2.RecurrentTransformer),
                       ("relative (lesson 3)", RelativeTransformer)):
        model = kind(50, D=32, H=2, M=64).double()
        x = torch.randint(50, (1, 64))  # also the targets: any will do
        parts = lesson_2.stream_losses(model, x, x, T=16)
        whole = lesson_2.stream_losses(model, x, x, T=64)
        print(f"  {name}: {(parts - whole).abs().max():.0e}")


@torch.no_grad()
def draw_terms(model, tokens, vocab, T):
    """Plot layer 1's terms in head 1: red is positive, · is a space, ¶ a newline."""
    attention = model.layers[0].attention
    h = model.embedding(tokens.long()[None]) * math.sqrt(model.D)  # layer 1's input
    terms = attention.terms(h[:, T:], h[:, :T], model.u, model.v)[:, 0, 0]  # (4, T, K)
    terms = terms.masked_fill(lesson_2.causal_mask(T, T), torch.nan) / attention.C**0.5
    text = list(decode(tokens, vocab).replace(" ", "·").replace("\n", "¶"))
    names = ("(a) content", "(b) content, distance", "(c) content, any query",
             "(d) distance, any query")
    most = terms.abs().nan_to_num().amax((1, 2)).tolist()  # of each term
    figure = Figure(figsize=(11, 6.4), layout="compressed")
    figure.suptitle("Columns of (c) ignore the query, diagonals of (d) ignore the text")
    for axes, name, term, z in zip(figure.subplots(2, 2).flat, names, terms, most):
        axes.imshow(term.numpy(), cmap="RdBu_r", vmin=-z, vmax=z)
        axes.axvline(T - 0.5, color="black")  # between memory and segment
        axes.set_xticks(range(2 * T), text, fontsize=11, family="monospace")
        axes.set_yticks(range(T), text[T:], fontsize=11, family="monospace")
        axes.set(title=f"{name}: up to {z:.2g}", ylabel="query",
                 xlabel="key: memory, then the segment")
    lesson_1.save(figure, "03_four_terms.png")


def mean_by_position(losses, T=lesson_1.BUDGET["T"]):
    """Average losses (B, n), in nats, by position in a segment -> T means in bits."""
    complete = losses.unfold(1, T, T)  # (B, segments, T)
    return (complete.mean((0, 1)) / math.log(2)).tolist()


def show_effect_of_memory(alone, recurrent, tokens):
    """Print and plot the losses of both models; then give the first a memory."""
    results = dict(BEFORE)
    curves = {"lesson 1: each segment alone": LESSON_1}
    for name, model in (("lesson 3: relative positions alone", alone),
                        ("lesson 3: memory, relative positions", recurrent)):
        losses = lesson_2.lane_losses(model, tokens)
        results[name] = lesson_1.bits(losses)
        curves[name] = mean_by_position(losses)
    lesson_1.show_by_position(curves, "03_by_position.png",
                              "A memory gives a segment's first bytes their context")
    lesson_1.show_losses(results, "With relative positions a memory helps")
    alone.M = recurrent.M  # its weights stay
    losses = lesson_2.lane_losses(alone, tokens)
    print(f"relative positions alone, read with a memory: {lesson_1.bits(losses):.2f}, "
          f"first byte {mean_by_position(losses)[0]:.2f}")


def main():
    """Compare loops with pairs, segments with one pass, no memory with a memory."""
    torch.manual_seed(0)
    show_loops_against_pairs()
    show_segments_against_one_pass()
    train, valid, vocab = lesson_1.load_text()
    models = []
    for M in (0, 32):
        torch.manual_seed(0)  # both start from the same weights
        models.append(RelativeTransformer(len(vocab), M=M))
        lesson_2.fit(models[-1], train, **lesson_1.BUDGET)
    draw_terms(models[-1], valid[5000:5024], vocab, T=12)
    show_effect_of_memory(*models, valid)


if __name__ == "__main__":
    run_lesson(main, __doc__)

# Ask yourself
#   1. Which terms change if only the query's token changes?  Which if only the key's?
#   2. How does row i of term (d) relate to row i + 1?
# Change and watch
#   1. Divide by sqrt(D) instead of sqrt(C) in forward: which printed lines change?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     loops against pairs, 18 visible cells: 2e-15
# This is rounding error: both compute the same terms.
#
#     4 segments with memory against one pass, largest difference of losses:
#       absolute (lesson 2): 3e-01
#       relative (lesson 3): 4e-16
# In lesson 2 each segment restarts at position 0; one pass continues to 63.  A distance
# is the same in both, and M = 64 covers all that came before.
#
#     figure: runs/03_four_terms.png
# (a) depends on both bytes, (b) on the query's byte and the distance.  (c) is constant
# in each column: it ignores the query, and is small here.  (d) is constant along each
# diagonal.  Each panel has its own colors.
#
#     by position in the segment: first byte, second, third, fourth, last
#       lesson 1: each segment alone           3.79 3.12 2.93 2.85 2.74
#       lesson 3: relative positions alone     3.83 3.14 2.76 2.58 2.53
#       lesson 3: memory, relative positions   2.44 2.43 2.48 2.40 2.49
#     figure: runs/03_by_position.png
# A memory removes the rise at the left edge of lesson 1's curve: a segment's first byte
# now attends to the 32 before it.  Relative positions lower the rest.
#
#     bits per byte: the same training, the same bytes to evaluate on
#       lesson 1: each segment alone           2.73
#       lesson 1: sliding window               2.70
#       lesson 2: memory, absolute positions   3.40
#       lesson 3: relative positions alone     2.58
#       lesson 3: memory, relative positions   2.45
#     figure: runs/losses.png
# Relative positions gain 0.15 bits by themselves, and a memory another 0.13.  With
# absolute positions the same memory loses 0.67.  This is the paper in short: recurrence
# needs relative positions.
#
#     relative positions alone, read with a memory: 2.49, first byte 2.49
# The model that was trained without a memory can be given one afterwards: 2.58 becomes
# 2.49, and a segment's first byte 2.49 instead of 3.83.  No weight belongs to a
# position: the model even handles distances 32 to 63, which did not occur in training.
