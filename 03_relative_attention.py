"""Lesson 3. Relative positions: the score with four terms (paper, 3.3).

The problem.  In lesson 2 a token in memory and one in the segment share a position.
Counting on through the whole text would reach positions that were never trained.

The one new idea.  A query need not know *where* a key is, only *how far back*: distance
i - j goes into the score, and no position is added to the embedding.  Expand layer 1's
absolute score, W_q (E_i + U_i) times W_k (E_j + U_j), and replace term by term:

        absolute             relative (here)
    (a) W_q E_i . W_k E_j    q_i . k_j              does key j fit this query?
    (b) W_q E_i . W_k U_j    q_i . (W_kR R_(i-j))   does this query want that distance?
    (c) W_q U_i . W_k E_j    u   . k_j              how telling is key j at all?
    (d) W_q U_i . W_k U_j    v   . (W_kR R_(i-j))   how telling is that distance?

(c) and (d) are the same for all queries at that key or distance.

  * U_j, where key j stands, becomes R_(i-j), how far back: a fixed sinusoid.
  * W_q U_i, where the query stands, says nothing about the distance.  Learned vectors
    take its place: u, where it meets content (c), and v, where it meets distance (d).
  * Content and position get projections of their own: k_j = W_kE h_j, and W_kR.  In
    higher layers h stands for E.  Lesson 2 adds U once; here every layer gets R.
  * Shaw et al. (2018) have (a) and (b) only, and learn a vector for each distance: at
    first those of 7 and 8 are unrelated, while R_7 and R_8 are alike from the start.

    python 03_relative_attention.py      half a minute: equalities, training, heat maps

New letters, the paper's:  R (K, D), where R[d] encodes distance d; W_kE, W_kR, u, v (no
longer the values).  In the text i counts all tokens; in code query i is key M + i.
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

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
RUNS, lanes, segments = lesson_1.RUNS, lesson_1.lanes, lesson_1.segments
sinusoid, token_losses = lesson_1.sinusoid, lesson_1.token_losses
head_width, Layer = lesson_1.head_width, lesson_1.Layer  # around the attention
causal_mask, update_memory = lesson_2.causal_mask, lesson_2.update_memory


# ---- the four terms, twice -----------------------------------------------------------

def four_terms(q, k, R, W_kR, u, v):
    """The equation, one entry at a time, for one head in NumPy -> (4, T, K).

    q (T, C), k (K, C), R (K, D) by distance, W_kR (C, D), u, v (C,).  Query i is key
    M + i, after M = K - T keys of memory.  NaN for future keys.  Not yet scaled.
    """
    (T, C), K = q.shape, k.shape[0]
    M, terms = K - T, np.full((4, T, K), np.nan)
    for i in range(T):
        for j in range(M + i + 1):
            distance = M + i - j
            terms[0, i, j] = q[i] @ k[j]  # (a)
            terms[1, i, j] = q[i] @ (W_kR @ R[distance])  # (b)
            terms[2, i, j] = u @ k[j]  # (c)
            terms[3, i, j] = v @ (W_kR @ R[distance])  # (d)
    return terms


def four_terms_all_pairs(q, k, R, W_kR, u, v):
    """The same for all heads at once in torch, R spelled out for every pair (i, j).

    q (B, H, T, C), k (B, H, K, C), R (K, D), W_kR (H, C, D), u, v (H, C) ->
    (4, B, H, T, K).  Future cells must be masked: there (a) and (c) hold a future key's
    score, (b) and (d) that of distance 0 (the clamp).
    """
    (B, H, T, C), K = q.shape, k.shape[2]
    i, j = torch.arange(T, device=q.device)[:, None], torch.arange(K, device=q.device)
    distance = (K - T + i - j).clamp(min=0)  # (T, K)
    # einsum names each axis by a letter (i for T, j for K), multiplies, and sums over
    # letters that do not come back after ->: term_a is q @ k.transpose(-1, -2)
    r = torch.einsum("hcd,ijd->hijc", W_kR, R[distance])  # (H, T, K, C): each pair
    term_a = torch.einsum("bhic,bhjc->bhij", q, k)  # (B, H, T, K)
    term_b = torch.einsum("bhic,hijc->bhij", q, r)  # (B, H, T, K)
    term_c = torch.einsum("hc,bhjc->bhj", u, k)[:, :, None]  # (B, H, 1, K): any query
    term_d = torch.einsum("hc,hijc->hij", v, r)  # (H, T, K): any text
    return torch.stack(torch.broadcast_tensors(term_a, term_b, term_c, term_d))


# ---- the model of lesson 2 with relative positions -----------------------------------

class RelativeAttention(nn.Module):
    """Attention by content and distance, slow and obvious; lesson 4 makes it fast."""

    def __init__(self, D, H, C):
        super().__init__()
        self.H, self.C = H, C
        self.W_q, self.W_kE, self.W_v, self.W_kR = (  # W_kR: keys of distances    # NEW
            nn.Linear(D, H * C, bias=False) for _ in range(4))
        self.W_o = nn.Linear(H * C, D, bias=False)

    def terms_and_values(self, h, memory, u, v):
        """-> the four terms (4, B, H, T, K), not yet scaled; values (B, H, K, C)."""
        (B, T, D), K, H, C = h.shape, memory.shape[1] + h.shape[1], self.H, self.C
        h_tilde = torch.cat([memory, h], dim=1)  # (B, K, D)
        q = self.W_q(h).view(B, T, H, C).transpose(1, 2)  # (B, H, T, C)
        k = self.W_kE(h_tilde).view(B, K, H, C).transpose(1, 2)  # (B, H, K, C)
        values = self.W_v(h_tilde).view(B, K, H, C).transpose(1, 2)  # (B, H, K, C)
        R = sinusoid(torch.arange(K, device=h.device), D).to(h)  # (K, D)          # NEW
        W_kR = self.W_kR.weight.view(H, C, D)
        return four_terms_all_pairs(q, k, R, W_kR, u, v), values

    def terms(self, h, memory, u, v):
        """The four terms (4, B, H, T, K) alone, for a look at them."""
        return self.terms_and_values(h, memory, u, v)[0]

    def forward(self, h, memory, u, v):
        """(B, T, D), (B, m, D), u, v (H, C) -> (B, T, D)."""
        (B, T, D), m = h.shape, memory.shape[1]
        terms, values = self.terms_and_values(h, memory, u, v)
        score = terms.sum(0) / math.sqrt(self.C)  # the scale covers all four      # NEW
        score = score.masked_fill(causal_mask(T, m, h.device), float("-inf"))
        return self.W_o((score.softmax(-1) @ values).transpose(1, 2).reshape(B, T, -1))


class RelativeTransformer(nn.Module):
    """The first small Transformer-XL: no absolute positions, u and v for all layers."""

    def __init__(self, V, N=2, D=128, H=4, FF=512, M=32):
        super().__init__()
        self.D, self.M = D, M
        self.embedding = nn.Embedding(V, D)
        C = head_width(D, H)
        self.layers = nn.ModuleList(
            Layer(RelativeAttention(D, H, C), D, FF) for _ in range(N))
        self.u, self.v = (nn.Parameter(z * 0.02) for z in torch.randn(2, H, C))    # NEW
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x, memory=None):
        """x (B, T), N memories (B, m, D) or None -> logits (B, T, V), new memories."""
        # no U: R says where.  sqrt(D) stays, as in the authors' code              # NEW
        h = self.embedding(x) * math.sqrt(self.D)
        if memory is None:
            memory = [h[:, :0]] * len(self.layers)
        new_memory = []
        for layer, past in zip(self.layers, memory):
            new_memory.append(update_memory(past, h, self.M))
            h = layer(h, past, self.u, self.v)                                     # NEW
        return h @ self.embedding.weight.T, new_memory


def fit(model, tokens, B, T, steps, lr=5e-3):
    """Lesson 1's training loop with the memory handed on from segment to segment."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = list(segments(lanes(tokens, B), T))
    for step in progress(range(steps), "training step", steps):
        if step % len(batches) == 0:
            memory = None  # the text begins (again): no past                      # NEW
        x, y = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1 - step / steps)
        logits, memory = model(x, memory)                                          # NEW
        loss = token_losses(logits, y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


# ---- the lesson ----------------------------------------------------------------------

@torch.no_grad()
def segments_against_one_pass(model, x, T):
    """The largest difference of logits: segments with memory against one pass."""
    memory, parts = None, []
    for part in x.split(T, dim=1):
        logits, memory = model(part, memory)
        parts.append(logits)
    return (torch.cat(parts, dim=1) - model(x)[0]).abs().max().item()


@torch.no_grad()
def bits_per_token(model, tokens, T):
    """Mean loss of one stream read in segments of T, the memory handed on."""
    x, y = tokens[None, :-1].long(), tokens[None, 1:].long()  # one lane
    return lesson_2.stream_losses(model, x, y, T).mean().item() / math.log(2)


def show_loops_against_pairs(T=3, M=4, C=5, D=6):
    """The equation entry by entry and the einsums give the same terms (B = H = 1)."""
    shapes = (1, 1, T, C), (1, 1, M + T, C), (M + T, D), (1, C, D), (1, C), (1, C)
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    loops = torch.tensor(four_terms(*(z.squeeze().numpy() for z in arguments)))
    pairs = four_terms_all_pairs(*arguments)[:, 0, 0]  # (4, T, K)
    seen = ~causal_mask(T, M)
    print(f"loops against pairs, {int(seen.sum())} visible cells x 4 terms, float64: "
          f"{(loops - pairs)[:, seen].abs().max():.0e}")


def show_segments_against_one_pass():
    """With relative positions a cut changes nothing if M holds the whole past.

    What a shorter memory does: lesson 5.
    """
    print("4 segments with memory against one pass, largest difference of logits:")
    for name, kind in (("absolute (lesson 2)", lesson_2.RecurrentTransformer),
                       ("relative (lesson 3)", RelativeTransformer)):
        model = kind(50, D=32, H=2, M=64).double()
        x = torch.randint(50, (1, 64))
        print(f"  {name}  {segments_against_one_pass(model, x, 16):.0e}")


def show_use_of_biases(model, tokens, T):
    """What a trained model loses without u, v or both (in the paper: table 6)."""
    print(f"trained on text: {bits_per_token(model, tokens, T):.2f} bits per byte;")
    for name, biases in (("u = 0, so without (c)", "u"), ("v = 0, so without (d)", "v"),
                         ("both 0, so Shaw's terms (a) + (b)", "uv")):
        without = deepcopy(model)
        for bias in biases:
            nn.init.zeros_(getattr(without, bias))
        print(f"  {name}: {bits_per_token(without, tokens, T):.2f}")
    print("  (not retrained; 500 steps make little use of u.  The paper retrained:\n"
          "  perplexity, e^loss, 27.02 with all four terms, 27.94 with Shaw's two)")


@torch.no_grad()
def draw_terms(model, tokens, vocab, T):
    """Heat maps of layer 1's four terms in head 1: T tokens after T of memory."""
    attention = model.layers[0].attention
    h = model.embedding(tokens.long()[None]) * math.sqrt(model.D)  # layer 1's input
    terms = attention.terms(h[:, T:], h[:, :T], model.u, model.v)[:, 0, 0]  # (4, T, K)
    terms = terms.masked_fill(causal_mask(T, T), torch.nan) / math.sqrt(attention.C)
    text = list(decode(tokens, vocab).replace(" ", "·").replace("\n", "¶"))
    names = ("(a) content", "(b) content-dependent position", "(c) global content",
             "(d) global position")
    figure = Figure(figsize=(11, 6.5), layout="compressed")
    for axes, name, term in zip(figure.subplots(2, 2).flat, names, terms):
        limit = term.abs().nan_to_num().max().item()  # a scale for each term
        image = axes.imshow(term.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=axes, shrink=0.8, label="part of the score")
        axes.set_xticks(range(2 * T), text, fontsize=11, family="monospace")
        axes.set_yticks(range(T), text[T:], fontsize=11, family="monospace")
        axes.set(title=name, ylabel="query", xlabel="key: memory, then the segment")
        axes.axvline(T - 0.5, color="black", linewidth=0.8)
    RUNS.mkdir(exist_ok=True)
    figure.savefig(RUNS / "03_four_terms.png", dpi=120)
    print(f"figure: {RUNS.name}/03_four_terms.png")


def main():
    """Loops against pairs, segments against one pass, and what each term does."""
    torch.manual_seed(0)
    show_loops_against_pairs()
    show_segments_against_one_pass()
    T, M, corpus = 32, 32, load("stdlib")
    model = RelativeTransformer(len(corpus.vocab), M=M)
    fit(model, corpus.train[:2_000_000], B=32, T=T, steps=500)
    show_use_of_biases(model, corpus.valid[:20_000], T)
    draw_terms(model, corpus.valid[5000:5032], corpus.vocab, 16)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Which terms change if only the query's token changes?  Which if only the key's?
#   2. Row i of term (d), against row i + 1: what is the relation?
#   3. Why must R cover K = M + T distances, and not T?
# Change and watch
#   1. Divide by sqrt(D) in place of sqrt(C) in forward: which printed lines notice?
