"""Lesson 3. Relative positions: the score with four terms (paper, section 3.3).

The problem.  In lesson 2 a token in memory and one in the segment share a position, and the model
cannot tell them apart.  Counting on through the whole text would reach positions never trained.

The one new idea.  A query never needs to know *where* a key is, only *how far back* it is.  So the
distance i - j goes into the score, and no position is added to the embedding anywhere.  Expand the
absolute score, W_q (E_i + U_i) times W_k (E_j + U_j), and replace term by term:

          absolute (lesson 2)           relative (here)
    (a)   W_q E_i . W_k E_j             q_i . k_j              content: unchanged
    (b)   W_q E_i . W_k U_j             q_i . (W_kR R_(i-j))   content-dependent position
    (c)   W_q U_i . W_k E_j             u   . k_j              global content: does key j matter?
    (d)   W_q U_i . W_k U_j             v   . (W_kR R_(i-j))   global position: is distance i-j?

  * U_j, where key j stands, becomes R_(i-j), how far back: a fixed sinusoid, not learned.
  * W_q U_i, where the query stands, says nothing about the distance: learned u and v instead.
  * Content and position get projections of their own: k_j = W_kE h_j, and W_kR.

Shaw et al. (2018) have only (a) and (b), no (c) and no (d), and a learned vector for each distance
in place of W_kR R_(i-j), so a sinusoid's knowledge of how near two distances are is missing.

This file is the slow, obvious version: every pair (i, j) gets its own R.  Lesson 4 makes it fast.

    python 03_relative_attention.py      trains for about half a minute; equalities, four heat maps

New letters, the paper's:  R (K, D) encodes distances, R[d] for distance d; W_kE, W_kR, u, v.  (v
was the values in lesson 2; from here on it is the bias, and the values have the whole word.)  Above
i and j count in the text; in code query i of a segment is key M + i: the distance is M + i - j.
"""
import math
from copy import deepcopy
from importlib import import_module

import numpy as np
import torch
import torch.nn as nn
from matplotlib.figure import Figure

from support.corpora import decode, load
from support.progress import progress

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
RUNS, lanes, segments = lesson_1.RUNS, lesson_1.lanes, lesson_1.segments
sinusoid, token_losses = lesson_1.sinusoid, lesson_1.token_losses
head_width, Layer = lesson_1.head_width, lesson_1.Layer  # the frame around the attention stays
causal_mask, update_memory = lesson_2.causal_mask, lesson_2.update_memory
RecurrentTransformer = lesson_2.RecurrentTransformer


# ---- the four terms, twice ----------------------------------------------------------------------

def four_terms(q, k, R, W_kR, u, v):
    """The equation, one entry at a time, for one head in NumPy.

    q (T, C), k (K, C), R (K, D) by distance, W_kR (C, D), u, v (C,)  ->  (4, T, K): terms (a)-(d).
    Query i is key M + i, M = K - T.  NaN where the key is in the future: there is no such distance.
    Not yet divided by sqrt(C).
    """
    (T, C), K = q.shape, k.shape[0]
    M, terms = K - T, np.full((4, T, K), np.nan)
    for i in range(T):
        for j in range(M + i + 1):
            distance = M + i - j
            terms[0, i, j] = q[i] @ k[j]  # (a) content
            terms[1, i, j] = q[i] @ (W_kR @ R[distance])  # (b) content-dependent position
            terms[2, i, j] = u @ k[j]  # (c) global content
            terms[3, i, j] = v @ (W_kR @ R[distance])  # (d) global position
    return terms


def four_terms_all_pairs(q, k, R, W_kR, u, v):
    """The same for all heads at once in torch, R spelled out for every pair (i, j).

    q (B, H, T, C), k (B, H, K, C), R (K, D), W_kR (H, C, D), u, v (H, C) -> (4, B, H, T, K).
    Future cells hold the value for distance 0; the mask hides them.  T * K projections of R.
    """
    (B, H, T, C), K = q.shape, k.shape[2]
    i, j = torch.arange(T, device=q.device)[:, None], torch.arange(K, device=q.device)
    distance = (K - T + i - j).clamp(min=0)  # (T, K)
    r = torch.einsum("hcd,ijd->hijc", W_kR, R[distance])  # (H, T, K, C): a vector for each pair
    a = torch.einsum("bhic,bhjc->bhij", q, k)
    b = torch.einsum("bhic,hijc->bhij", q, r)
    c = torch.einsum("hc,bhjc->bhj", u, k)[:, :, None].expand_as(a)  # the same for every query
    d = torch.einsum("hc,hijc->hij", v, r).expand_as(a)  # the same for every text
    return torch.stack([a, b, c, d])


# ---- the model of lesson 2 with relative positions ----------------------------------------------

class RelativeAttention(nn.Module):
    """Attention over memory and segment, by content and distance.  Quadratic: for reading only."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H, self.C = H, C
        self.W_q = nn.Linear(D, H * C, bias=False)
        self.W_kE = nn.Linear(D, H * C, bias=False)
        self.W_kR = nn.Linear(D, H * C, bias=False)  # keys of distances                      # NEW
        self.W_v = nn.Linear(D, H * C, bias=False)
        self.W_o = nn.Linear(H * C, D, bias=False)

    def terms(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> the four terms (4, B, H, T, K), not yet scaled."""
        (B, T, D), rows = h.shape, torch.cat([memory, h], dim=1)
        K = rows.shape[1]
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_kE(rows).view(B, K, self.H, self.C).transpose(1, 2)  # (B, H, K, C)
        R = sinusoid(torch.arange(K, device=h.device), D).to(h)  # (K, D): K, not T, distances
        W_kR = self.W_kR.weight.view(self.H, self.C, D)
        return four_terms_all_pairs(q, k, R, W_kR, u, v)

    def forward(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> (B, T, D)."""
        (B, T, D), m = h.shape, memory.shape[1]
        rows = torch.cat([memory, h], dim=1)
        values = self.W_v(rows).view(B, m + T, self.H, self.C).transpose(1, 2)  # (B, H, K, C)
        score = self.terms(h, memory, u, v).sum(0) / math.sqrt(self.C)  # the scale covers all four
        score = score.masked_fill(causal_mask(T, m, h.device), float("-inf"))
        return self.W_o((score.softmax(-1) @ values).transpose(1, 2).reshape(B, T, -1))


class RelativeTransformer(nn.Module):
    """Lesson 2's model without any absolute position: the first small Transformer-XL."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=32):
        super().__init__()
        self.D, self.M = D, M
        self.embedding = nn.Embedding(V, D)
        C = head_width(D, H)
        self.layers = nn.ModuleList(Layer(RelativeAttention(D, H, C), D, FF) for _ in range(N))
        self.u = nn.Parameter(torch.randn(H, C) * 0.02)  # shared by all layers               # NEW
        self.v = nn.Parameter(torch.randn(H, C) * 0.02)                                       # NEW
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):
        """Tokens (B, T), a list of N memories (B, m, D) or None -> logits (B, T, V), new memory."""
        h = self.embedding(x) * math.sqrt(self.D)  # and no U                                 # NEW
        if memory is None:
            memory = [h[:, :0]] * len(self.layers)
        new_memory = []
        for layer, past in zip(self.layers, memory):
            new_memory.append(update_memory(past, h, self.M))
            h = layer(h, past, self.u, self.v)
        return h @ self.embedding.weight.T, new_memory


def fit(model, tokens, B, T, steps, lr=5e-3):
    """Lesson 1's training loop with the memory handed on from segment to segment."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(segments(lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        if step % len(batches) == 0:
            memory = None  # the text begins (again): no past                                 # NEW
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        logits, memory = model(x, memory)                                                     # NEW
        loss = token_losses(logits, y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


# ---- the lesson ---------------------------------------------------------------------------------

@torch.no_grad()
def segments_against_one_pass(model, x, T):
    """The largest difference of logits between segments with memory and one pass over all."""
    memory, parts = None, []
    for part in x.split(T, dim=1):
        logits, memory = model(part, memory)
        parts.append(logits)
    return (torch.cat(parts, dim=1) - model(x)[0]).abs().max().item()


@torch.no_grad()
def bits_per_token(model, tokens, T):
    """Mean loss of one stream read in segments of T, the memory handed on."""
    memory, total = None, 0.0
    for x, y in segments(lanes(tokens, 1), T):
        logits, memory = model(x, memory)
        total += token_losses(logits, y).sum().item()
    return total / (len(tokens) - 1) / math.log(2)


def draw(terms, text, T):
    """Heat maps of the four terms (4, T, K) over the K characters that they belong to."""
    K = len(text)
    names = ("(a) content", "(b) content-dependent position", "(c) global content",
             "(d) global position")
    figure = Figure(figsize=(11, 6.5), layout="compressed")
    for axes, name, term in zip(figure.subplots(2, 2).flat, names, terms):
        limit = term.abs().nan_to_num().max().item()  # a scale each: (c), (d) are far smaller
        image = axes.imshow(term.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_title(f"{name}, part of the score")
        axes.set_xticks(range(K), list(text), fontsize=8, family="monospace")
        axes.set_yticks(range(T), list(text[K - T :]), fontsize=8, family="monospace")
        axes.set(xlabel=f"key: {K - T} of memory, then the segment", ylabel="query")
        axes.axvline(K - T - 0.5, color="black", linewidth=0.8)
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "03_four_terms.png", dpi=120)
    print(f"figure: {RUNS.name}/03_four_terms.png")


def main():
    """Loops against pairs, segments against one pass, and what each of the four terms does."""
    torch.manual_seed(0)
    C, D, T, M = 5, 6, 3, 4
    q, k, W_kR, u, v = (torch.randn(shape, dtype=torch.float64)
                        for shape in ((T, C), (M + T, C), (C, D), (C,), (C,)))
    R = sinusoid(torch.arange(M + T), D)
    loops = torch.tensor(four_terms(*(z.numpy() for z in (q, k, R, W_kR, u, v))))
    pairs = four_terms_all_pairs(q[None, None], k[None, None], R, W_kR[None], u[None], v[None])
    seen = ~causal_mask(T, M)
    print(f"loops against all pairs, {int(seen.sum())} visible cells x 4 terms, float64: "
          f"{(loops - pairs[:, 0, 0])[:, seen].abs().max():.0e}")

    x = torch.randint(50, (1, 64))
    print("4 segments with memory against one pass, largest difference of logits (float64):")
    for name, kind in (("absolute (lesson 2)", RecurrentTransformer),
                       ("relative (lesson 3)", RelativeTransformer)):
        model = kind(V=50, N=2, D=32, H=2, FF=64, M=64).double()
        print(f"  {name}  {segments_against_one_pass(model, x, 16):.0e}")

    T, M, corpus = 32, 32, load("stdlib")
    model = RelativeTransformer(len(corpus.vocab), M=M)
    fit(model, corpus.train[:2_000_000], B=32, T=T, steps=500)
    part = corpus.valid[:20_000]
    print(f"trained on text: {bits_per_token(model, part, T):.2f} bits per byte; with")
    for name, zero in (("u = 0, so without (c)", "u"), ("v = 0, so without (d)", "v"),
                       ("both 0, so Shaw's terms (a) + (b)", "uv")):
        maimed = deepcopy(model)
        for bias in zero:
            nn.init.zeros_(getattr(maimed, bias))
        print(f"  {name}: {bits_per_token(maimed, part, T):.2f}")
    print("  (not retrained; in the paper's table 6, each trained by itself, perplexity is 27.02\n"
          "  with all four terms and 27.94 with Shaw's)")

    x = corpus.valid[5000:5048].long()[None]
    with torch.no_grad():
        h = model.embedding(x) * math.sqrt(model.D)  # layer 1's input; half of it is its memory
        terms = model.layers[0].attention.terms(h[:, 24:], h[:, :24], model.u, model.v)
    terms = terms[:, 0, 0].masked_fill(causal_mask(24, 24), torch.nan)  # head 1: (4, T, K)
    text = decode(x[0], corpus.vocab).replace(" ", "·").replace("\n", "¶")
    draw(terms / math.sqrt(model.layers[0].attention.C), text, 24)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Which two terms change if only the query's token changes?  Which two if only the key's does?
#   2. Row i of term (d), against row i + 1: what is the relation?  (Lesson 4 lives on the answer.)
#   3. Why must R cover K = M + T distances, and not T?
# Change and watch
#   1. Divide by sqrt(D) instead of sqrt(C) in forward.  Which printed lines notice, which do not?
#   2. Let T and M grow to 64 in main (four times the wait).  What becomes slow, and for which line?
