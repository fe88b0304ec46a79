"""Lesson 5.  The complete Transformer-XL (Dai et al., ACL 2019; sections 3.2 and 3.3).

The parts are built and compared by now: segments (01), memory (02), the four-term score
(03), the shift (04).  This file joins them into the model that train.py trains, and
adds what a complete one needs: dropout, initial weights, the paper's sizes, generation.

    tokens (B, T) -> E[x] * sqrt(D) -> h -> layer 1 ... layer N -> h E^T + b -> logits
    layer n:  attention of h to [memory n o h], add, norm;  feed-forward, add, norm
    memory:   a list of N tensors (B, m, D), m <= M: the last M inputs of each layer
    E (V, D) is here the embedding matrix itself, b the bias of the output layer

New are two options for reading with a longer memory than in training:

  * same_length: without it the first query of a segment sees M keys before it and the
    last one M + T - 1, so a loss depends on where the text was cut; with it each query
    sees itself and the M keys before it, if any, so that evaluation may cut where it is
    fastest (training goes without it, as the authors do);
  * clamp_len: larger distances count as this one, so none is new to the trained model.

This is the plain form; support/fast.py does the same work in a faster order.  Texts of
words have an embedding of their own (support/adaptive_softmax.py): sorted by frequency,
cut into bands, narrower vectors for rarer words.  The byte models do without.

    python 05_full_model.py     half a minute: cuts, sizes, a sample, a figure
"""
import math
from dataclasses import dataclass, replace
from importlib import import_module

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from support import validate
from support.adaptive_softmax import AdaptiveSoftmax, float32_at_least
from support.corpora import decode, encode, load

lesson_1 = import_module("01_vanilla_segments")
RUNS, sinusoid, token_losses = lesson_1.RUNS, lesson_1.sinusoid, lesson_1.token_losses
lesson_2 = import_module("02_recurrence")
update_memory, stream_losses = lesson_2.update_memory, lesson_2.stream_losses
fit = import_module("03_relative_attention").fit
relative_score = import_module("04_rel_shift").relative_score


@dataclass(frozen=True)
class Config:
    """The sizes of a model.  ValueError, naming the numbers, if no model can have them.

    mem_len, same_length and clamp_len touch no weight and are read at every call:
    `model.config = replace(model.config, mem_len=2100, same_length=True)`.
    """

    vocab_size: int  # V
    n_layer: int = 4  # layers N
    d_model: int = 128  # model width D
    n_head: int = 2  # heads H
    d_head: int = 64  # width C of a head
    d_inner: int = 512  # width FF inside the feed-forward network
    mem_len: int = 128  # memory length M; 0: no memory
    dropout: float = 0.0  # of hidden states
    dropout_attention: float = 0.0  # of attention probabilities
    cutoffs: tuple = ()  # words: where the vocabulary is cut into bands
    div_val: int = 1  # words: each further band is so many times narrower
    tie_projections: bool = True  # words: one matrix into a band and out of it
    untie_r: bool = False  # u and v for each layer, not one pair (the authors' name)
    same_length: bool = False  # each query sees itself and M keys before it
    clamp_len: int = 0  # the largest distance told apart; 0 or less: no clamp

    def __post_init__(self):
        validate.config(self)


# Three small sizes of ours, then those of the authors' scripts.  V is that of the
# published parameter counts (204: enwik8 without newlines); train.py puts its corpus's
# own there.  For enwik8-18L, ptb and lm1b-medium the paper gives only the number of
# parameters: these sizes are ours.  wt103-large has 285M, where the paper says 257M.
WT103, LM1B = (20_000, 40_000, 200_000), (60_000, 100_000, 640_000)  # cutoffs
CONFIGS = {name: Config(*sizes) for name, sizes in {
    #                  V        N   D     H   C    FF    M    dropout, of attention,
    #                                                         cutoffs, div_val, tied
    "tiny":           (205,     2,  32,   2,  16,  64,   16),
    "laptop":         (205,     4,  128,  2,  64,  512,  128),
    "laptop-words":   (10_000,  4,  128,  2,  64,  512,  64,  0.1, 0.0, (2000,)),
    "enwik8-12L":     (204,     12, 512,  8,  64,  2048, 512, 0.1),
    "enwik8-18L":     (204,     18, 640,  10, 64,  2208, 512, 0.1),
    "enwik8-24L":     (204,     24, 1024, 8,  128, 3072, 768, 0.15, 0.15),
    "text8-12L":      (27,      12, 512,  8,  64,  2048, 512, 0.1),
    "text8-24L":      (27,      24, 1024, 8,  128, 3072, 768, 0.15, 0.15),
    "ptb":            (10_000,  16, 380,  10, 38,  704,  70,  0.2, 0.2),
    "wt103-standard": (267_735, 16, 410,  10, 41,  2100, 150, 0.1, 0.0, WT103),
    "wt103-large":    (267_735, 18, 1024, 16, 64,  4096, 384, 0.2, 0.2, WT103, 4),
    "lm1b-base":      (793_471, 18, 1024, 8,  128, 4096, 32,  0.0, 0.0, LM1B, 4, False),
    "lm1b-medium":    (793_471, 24, 1024, 8,  128, 4608, 32,  0.0, 0.0, LM1B, 4, False),
    "lm1b-large":     (793_471, 24, 1280, 16, 80,  8192, 32,  .05, .05, LM1B, 4, False),
}.items()}


# ---- the model: leaf to root --------------------------------------------------------

def hidden_keys(T, m, M, same_length, device=None):
    """Which keys a query must not see, (T, m + T) bool, with a memory of m <= M.

    The future (distance below 0), and with same_length all that is more than M back.

    >>> hidden_keys(3, 2, 2, same_length=True).int()
    tensor([[0, 0, 0, 1, 1],
            [1, 0, 0, 0, 1],
            [1, 1, 0, 0, 0]], dtype=torch.int32)
    """
    i, j = torch.arange(T, device=device)[:, None], torch.arange(m + T, device=device)
    distance = m + i - j  # (T, K), since query i is key m + i
    return (distance < 0) | (distance > M) if same_length else distance < 0


def distance_encoding(K, D, clamp_len=0, device=None):
    """R (K, D): sinusoids of the distances K - 1, ..., 1, 0; with clamp_len > 0 larger
    ones count as clamp_len.  Already descending, so W_kR(R) is lesson 4's Q: no flip.
    """
    distance = torch.arange(K - 1, -1, -1, device=device)
    return sinusoid(distance.clamp(max=clamp_len) if clamp_len > 0 else distance, D)


def initialized(module, mean=0.0):
    """The module with the authors' initial weights N(mean, 0.02), and bias 0."""
    nn.init.normal_(module.weight, mean, 0.02)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)
    return module


class RelativeAttention(nn.Module):
    """Multi-head attention over memory and segment, scored by content and distance."""

    def __init__(self, config):
        super().__init__()
        D, self.H, self.C = config.d_model, config.n_head, config.d_head
        HC = self.H * self.C
        self.W_q, self.W_kE, self.W_kR, self.W_v = (
            initialized(nn.Linear(D, HC, bias=False)) for _ in range(4))
        self.W_o = initialized(nn.Linear(HC, D, bias=False))
        self.dropout_attention = nn.Dropout(config.dropout_attention)

    def heads(self, z):
        """Take the heads apart: (..., n, H * C) -> (..., H, n, C)."""
        return z.unflatten(-1, (self.H, self.C)).transpose(-3, -2)

    def attend(self, q, k, value, Q, u, v, hidden):
        """Weighted sums of the values, the heads joined: -> (B, T, H * C).

        q (B, H, T, C), k and value (B, H, K, C), Q (H, K, C) by descending distance;
        hidden (T, K) bool is the mask: which keys a query must not see.
        """
        score = relative_score(q, k, Q, u, v) / math.sqrt(self.C)  # (B, H, T, K)
        # -inf, not a large negative number: a hidden probability is exactly 0
        probability = score.masked_fill(hidden, float("-inf")).softmax(-1)
        out = self.dropout_attention(probability) @ value  # (B, H, T, C)
        return out.transpose(1, 2).flatten(2)

    def forward(self, h, memory, R, u, v, hidden):
        """h (B, T, D), memory (B, m, D), R (K, D), u, v (H, C) -> (B, T, D)."""
        h_tilde = torch.cat([memory, h], dim=1)  # [memory o h], (B, K, D)
        q = self.heads(self.W_q(h))  # (B, H, T, C): queries from the segment only
        k = self.heads(self.W_kE(h_tilde))  # (B, H, K, C)
        value = self.heads(self.W_v(h_tilde))  # (B, H, K, C)
        Q = self.heads(self.W_kR(R))  # (H, K, C): a key for each distance
        return self.W_o(self.attend(q, k, value, Q, u, v, hidden))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward, add, norm: each norm *after* its sum."""

    def __init__(self, config):
        super().__init__()
        D, FF, p = config.d_model, config.d_inner, config.dropout
        self.attention, self.dropout_output = RelativeAttention(config), nn.Dropout(p)
        self.W_1, self.relu = initialized(nn.Linear(D, FF)), nn.ReLU()
        self.W_2 = initialized(nn.Linear(FF, D))
        self.dropout_inner, self.dropout_ff = nn.Dropout(p), nn.Dropout(p)
        self.norm_1 = initialized(nn.LayerNorm(D), mean=1.0)
        self.norm_2 = initialized(nn.LayerNorm(D), mean=1.0)

    def forward(self, h, memory, R, u, v, hidden):
        """h (B, T, D), the others as for the attention -> (B, T, D)."""
        attended = self.attention(h, memory, R, u, v, hidden)
        h = self.norm_1(h + self.dropout_output(attended))
        inner = self.dropout_inner(self.relu(self.W_1(h)))  # (B, T, FF)
        return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


class TiedEmbedding(nn.Embedding):
    """Tokens in and out: row t is the embedding of token t, and its output weight."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.d_model)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        initialized(self)

    def logits(self, h):
        """(B, T, D) -> (B, T, V)."""
        return F.linear(h, self.weight, self.bias)

    def losses(self, h, y):
        """(B, T, D), targets (B, T) -> -ln p(y) in nats, (B, T), never in 16 bits."""
        return token_losses(float32_at_least(self.logits(h)), y)


class TransformerXL(nn.Module):
    """The language model.  The caller hands the memory on from segment to segment."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        shape = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        self.u, self.v = (nn.Parameter(torch.randn(shape) * 0.02) for _ in range(2))
        self.embedding = (AdaptiveSoftmax if config.cutoffs else TiedEmbedding)(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.dropout_embedding, self.dropout_R, self.dropout_final = (
            nn.Dropout(config.dropout) for _ in range(3))

    def distances(self, K, device):
        """R (K, D) with the config's clamp_len."""
        return distance_encoding(K, self.config.d_model, self.config.clamp_len, device)

    def hidden(self, T, m, device):
        """The mask (T, m + T) with the config's M and same_length."""
        return hidden_keys(T, m, self.config.mem_len, self.config.same_length, device)

    def forward(self, x, memory=None, y=None, last_only=False):
        """Read x (B, T) int64 after the memory of the call before; None: no past yet.

        Returns logits (B, T, V), or (B, 1, V) if last_only, or with targets y (B, T)
        the losses -ln p(y) in nats, (B, T); and the new memory, a list of N detached
        tensors (B, m, D).  ValueError, with the numbers, if x, y or memory do not fit.
        """
        validate.call(self, x, memory, y)
        c, D, T = self.config, self.config.d_model, x.shape[1]
        h = self.dropout_embedding(self.embedding(x) * math.sqrt(D))  # (B, T, D)
        if memory is None:
            memory = [h[:, :0]] * c.n_layer  # nothing at all, not zeros
        m = min(memory[0].shape[1], c.mem_len)  # mem_len may be lower than it was
        memory = [past[:, past.shape[1] - m :] for past in memory]  # (B, m, D) each
        R = self.dropout_R(self.distances(m + T, x.device).to(h))  # once for all layers
        hidden = self.hidden(T, m, x.device)  # (T, K)
        u, v = (z.expand(c.n_layer, -1, -1) for z in (self.u, self.v))  # (N, H, C)
        new_memory = []
        for n, layer in enumerate(self.layers):
            new_memory.append(update_memory(memory[n], h, c.mem_len))  # a layer's input
            h = layer(h, memory[n], R, u[n], v[n], hidden)
        h = self.dropout_final(h)
        if y is not None:
            return self.embedding.losses(h, y), new_memory
        return self.embedding.logits(h[:, -1:] if last_only else h), new_memory


def count_parameters(config):
    """The exact number of parameters, without making any (torch's meta device)."""
    with torch.device("meta"):  # all layers are alike, so two are enough
        models = [TransformerXL(replace(config, n_layer=n)) for n in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    return one + (config.n_layer - 1) * (two - one)


# ---- generation (appendix E) --------------------------------------------------------

def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    """Draw from the top_k most probable tokens: (B, V) -> (B, 1).

    A temperature below 1 sharpens.  ValueError unless 1 <= top_k <= V, temperature > 0.
    """
    V = logits.shape[-1]
    if not 1 <= top_k <= V:
        raise ValueError(f"top_k must be from 1 to V = {V}, got {top_k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    best, tokens = logits.float().topk(top_k)  # (B, top_k), descending
    probability = (best / temperature).softmax(-1)
    choice = torch.multinomial(probability, 1, generator=generator)  # (B, 1)
    return tokens.gather(-1, choice)


@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    """Sample n_tokens more after each prompt: (B, P) int64 -> (B, n_tokens).

    The prompt is read once, then one token at a time: the memory is the past.  A prompt
    (P,) gives (n_tokens,); top_k None is min(40, V).  A Reader of the model
    (support/fast.py) may take its place.
    """
    if prompt.dim() == 1:
        return generate(model, prompt[None], n_tokens, top_k, temperature, generator)[0]
    if n_tokens < 0:
        raise ValueError(f"n_tokens must be 0 or more, got {n_tokens}")
    top_k = min(40, model.config.vocab_size) if top_k is None else top_k
    tokens, x, memory, training = [prompt[:, :0]], prompt, None, model.training
    model.eval()
    try:
        for _ in range(n_tokens):
            logits, memory = model(x, memory, last_only=True)  # (B, 1, V)
            x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
            tokens.append(x)
    finally:
        model.train(training)
    return torch.cat(tokens, dim=1)


# ---- the lesson ---------------------------------------------------------------------

@torch.no_grad()
def show_what_a_cut_changes():
    """Two cases in which a cut changes nothing, and one in which it does."""
    x, y = torch.randint(205, (2, 1, 96))  # any targets will do
    at_1 = {}
    model = TransformerXL(CONFIGS["tiny"]).double().eval()
    print("how far 96 losses move if cut into T = 4, 16, 96 instead of 1 (float64):")
    for M, same_length, words in (
            (96, False, "rounding: nothing has left the memory"),
            (16, False, "more: first queries see less than last ones"),
            (16, True, "rounding: all see M keys before them")):
        model.config = replace(model.config, mem_len=M, same_length=same_length)
        one, *others = (stream_losses(model, x, y, T) for T in (1, 4, 16, 96))
        at_1[M, same_length] = one
        moved = (f"{(other - one).abs().max():.0e}" for other in others)
        print(f"  M {M}, same_length {same_length!s:5} ", *moved, "", words)
    moved = (at_1[16, True] - at_1[16, False]).abs().max()
    print(f"at T = 1 same_length changes nothing: {moved:.0e}")


@torch.no_grad()
def show_what_the_past_is_worth(model, tokens, T):
    """The loss over the memory length: one model, no weight changed."""
    x, y = tokens[None, :-1].long(), tokens[None, 1:].long()
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    print("bits per byte with a memory of", end="")
    for M in (1, 4, 16, 64, 256):
        model.config = replace(model.config, mem_len=M, same_length=True)
        bits = stream_losses(model, x, y, T).mean().item() / math.log(2)
        axes.bar_label(axes.bar(str(M), bits, color="tab:blue"), fmt="%.2f")
        print(f"  {M}: {bits:.2f}", end="")
    axes.set(xlabel=f"M at evaluation: keys before each query (trained with {T})",
             ylabel="bits per byte", title="What the past is worth to one model")
    RUNS.mkdir(exist_ok=True)
    axes.figure.savefig(RUNS / "05_memory_length.png", dpi=120)
    print(f"\nfigure: {RUNS.name}/05_memory_length.png")


def main():
    """What a cut changes and what not, the sizes, a sample, what the past is worth."""
    torch.manual_seed(0)
    show_what_a_cut_changes()
    for name, c in CONFIGS.items():
        print(f"  {name:14}  N {c.n_layer:2}  D {c.d_model:4}  V {c.vocab_size:7,}  "
              f"{count_parameters(c):11,} parameters")
    corpus, T, prompt = load("stdlib"), 64, "def read("
    model = TransformerXL(Config(len(corpus.vocab), n_layer=2, mem_len=T))
    fit(model, corpus.train[:2_000_000], B=16, T=T, steps=600)
    model.eval()
    tokens = generate(model, encode(prompt, corpus.vocab), 200, top_k=10)
    print(f"after 600 steps:\n{prompt}{decode(tokens, corpus.vocab)}")
    show_what_the_past_is_worth(model, corpus.valid[:20_000], T)


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why are R and the mask made once for all layers, but the memory for each?
#   2. With same_length, T = 96 and M = 16: how many keys does query 90 see, and which?
#   3. What would go wrong if generate kept the memory but fed the prompt again, too?
# Change and watch
#   1. Write `distance >= M` for `distance > M` in hidden_keys: which printed line shows
#      it, and which do not?
#   2. Begin with zeros: write h.new_zeros(len(h), c.mem_len, c.d_model) for h[:, :0].
#      Which line of show_what_a_cut_changes no longer prints rounding?
#   3. Give the figure's last bar clamp_len=127.  Without, it reads distances that were
#      never trained: does it pay for that?
