"""Lesson 5.  The complete Transformer-XL (Dai et al., ACL 2019; sections 3.2 and 3.3).

You need lessons 1 to 4.  You learn how the parts make one model, what lets it read with
a longer memory than in training, and how it writes.  35 minutes (an estimate).

This file joins the parts, segments (01), memory (02), the four-term score (03) and the
shift (04), into the model that train.py trains, and adds what a complete one needs.

    tokens (B, T) -> embedding * sqrt(D) -> h -> layer 1 ... layer N -> logits (B, T, V)
    layer n:  attention of h to [memory n ; h], add, norm;  feed-forward, add, norm
    memory:   a list of N tensors (B, m, D), m <= M: the last M inputs of each layer
    logits:   h times the transposed embedding matrix (V, D), and a bias

Two options for reading with a longer memory are of the authors' code, not the paper:

  * clamp_len: distances above it are treated as clamp_len, so that none is untrained;
  * same_length: each query sees itself and the M keys before it, if there are so many.

                         key j   0  1  2  3  4         0  1  2  3  4      distances,
    query 0, which is key 2      2  1  0  .  .         2  1  0  .  .      T = 3
    query 1, which is key 3      3  2  1  0  .         .  2  1  0  .      m = M = 2
    query 2, which is key 4      4  3  2  1  0         .  .  2  1  0      a dot: masked
                                 as in lesson 2        same_length

Left, the last query of a segment sees T - 1 keys more than the first, so a loss depends
on where the text was cut; right, it does not, and evaluation may choose a faster cut.
(This is the plain form; training/fast.py does the same work in a faster order.)

    python 05_full_model.py     half a minute: cuts, a sample, what the past is worth
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
lesson_2 = import_module("02_recurrence")
lesson_3 = import_module("03_relative_attention")
lesson_4 = import_module("04_rel_shift")


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
    # three for texts of words alone (support/adaptive_softmax.py); skip them at first
    cutoffs: tuple = ()  # where the vocabulary, sorted by frequency, is cut into bands
    div_val: int = 1  # each further band has vectors so many times narrower
    tie_projections: bool = True  # one matrix leads into a band and out of it
    untie_r: bool = False  # u and v for each layer, not one pair (the authors' name)
    same_length: bool = False  # each query sees itself and M keys before it
    clamp_len: int = 0  # the largest distance that is distinguished; 0 or less: none

    def __post_init__(self):
        validate.config(self)


# Two sizes of ours, and the paper's for one GPU; all others are in training/presets.py.
# train.py puts its corpus's own vocabulary in: enwik8 has 205 bytes, the paper's 204.
CONFIGS = {
    "tiny": Config(vocab_size=205, n_layer=2, d_model=32, n_head=2, d_head=16,
                   d_inner=64, mem_len=16),
    "laptop": Config(vocab_size=205, n_layer=4, d_model=128, n_head=2, d_head=64,
                     d_inner=512, mem_len=128),
    "enwik8-12L": Config(vocab_size=204, n_layer=12, d_model=512, n_head=8, d_head=64,
                         d_inner=2048, mem_len=512, dropout=0.1),
}


# ---- the model: leaf to root --------------------------------------------------------

def attention_mask(T, m, M, same_length, device=None):
    """Which keys a query must not see, (T, m + T) bool, with a memory of m <= M.

    The future (distance below 0), and with same_length all that is more than M back.

    >>> attention_mask(3, 1, 2, same_length=True).int()  # one hidden state, of two
    tensor([[0, 0, 1, 1],
            [0, 0, 0, 1],
            [1, 0, 0, 0]], dtype=torch.int32)
    """
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(m + T, device=device)
    distance = m + i - j  # (T, K), since query i is key m + i
    if same_length:
        return (distance < 0) | (distance > M)
    return distance < 0


def distance_encoding(K, D, clamp_len=0, device=None):
    """R (K, D): sinusoids of the distances K - 1, ..., 1, 0, each at most clamp_len."""
    distance = torch.arange(K - 1, -1, -1, device=device)
    if clamp_len > 0:
        distance = distance.clamp(max=clamp_len)
    return lesson_1.sinusoid(distance, D)


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
        D = config.d_model
        self.H = config.n_head
        self.C = config.d_head
        self.W_q = initialized(nn.Linear(D, self.H * self.C, bias=False))
        self.W_kE = initialized(nn.Linear(D, self.H * self.C, bias=False))
        self.W_kR = initialized(nn.Linear(D, self.H * self.C, bias=False))
        self.W_v = initialized(nn.Linear(D, self.H * self.C, bias=False))
        self.W_o = initialized(nn.Linear(self.H * self.C, D, bias=False))
        self.dropout_attention = nn.Dropout(config.dropout_attention)

    def heads(self, z):
        """Take the heads apart: (..., n, H * C) -> (..., H, n, C)."""
        return z.unflatten(-1, (self.H, self.C)).transpose(-3, -2)

    def attend(self, q, k, value, k_R, u, v, mask):
        """What attention computes from its projections: -> (B, T, H * C).

        q (B, H, T, C), k and value (B, H, K, C), k_R (H, K, C) by descending distance,
        u, v (H, C), mask (T, K).  It has no weights: all that is learned is outside.
        """
        score = lesson_4.relative_score(q, k, k_R, u, v)  # (B, H, T, K)
        score = score / math.sqrt(self.C)
        # -inf, not a large negative number: a masked probability is exactly 0
        probability = score.masked_fill(mask, float("-inf")).softmax(-1)
        out = self.dropout_attention(probability) @ value  # (B, H, T, C)
        return out.transpose(1, 2).flatten(2)

    def forward(self, h, memory, R, u, v, mask):
        """h (B, T, D), memory (B, m, D), R (K, D), u, v (H, C) -> (B, T, D)."""
        h_tilde = torch.cat([memory, h], dim=1)  # [memory ; h], (B, K, D)
        q = self.heads(self.W_q(h))  # (B, H, T, C): queries from the segment only
        k = self.heads(self.W_kE(h_tilde))  # (B, H, K, C)
        value = self.heads(self.W_v(h_tilde))  # (B, H, K, C)
        k_R = self.heads(self.W_kR(R))  # (H, K, C): a key for each distance
        return self.W_o(self.attend(q, k, value, k_R, u, v, mask))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward, add, norm: each norm *after* its sum."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.attention = RelativeAttention(config)
        self.dropout_output = nn.Dropout(config.dropout)
        self.norm_1 = initialized(nn.LayerNorm(D), mean=1.0)  # N(1, .02), as theirs
        self.W_1 = initialized(nn.Linear(D, config.d_inner))
        self.relu = nn.ReLU()
        self.dropout_inner = nn.Dropout(config.dropout)
        self.W_2 = initialized(nn.Linear(config.d_inner, D))
        self.dropout_ff = nn.Dropout(config.dropout)
        self.norm_2 = initialized(nn.LayerNorm(D), mean=1.0)

    def forward(self, h, memory, R, u, v, mask):
        """h (B, T, D), the others as for the attention -> (B, T, D)."""
        attended = self.attention(h, memory, R, u, v, mask)
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
        """(B, T, D), targets (B, T) -> -ln p(y) in nats, (B, T), float32 at least."""
        return lesson_1.token_losses(float32_at_least(self.logits(h)), y)


class TransformerXL(nn.Module):
    """The language model.  The caller hands the memory on from segment to segment."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        pairs = config.n_layer if config.untie_r else 1  # of u and v
        shape = (pairs, config.n_head, config.d_head)
        self.u = nn.Parameter(0.02 * torch.randn(shape))
        self.v = nn.Parameter(0.02 * torch.randn(shape))
        self.embedding = (AdaptiveSoftmax if config.cutoffs else TiedEmbedding)(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.dropout_embedding = nn.Dropout(config.dropout)
        self.dropout_R = nn.Dropout(config.dropout)
        self.dropout_final = nn.Dropout(config.dropout)

    def distances(self, K, device):
        """R (K, D) with the config's clamp_len."""
        return distance_encoding(K, self.config.d_model, self.config.clamp_len, device)

    def attention_mask(self, T, m, device):
        """The mask (T, m + T) with the config's M and same_length."""
        c = self.config
        return attention_mask(T, m, c.mem_len, c.same_length, device)

    def forward(self, x, memory=None, y=None, last_only=False):
        """Read x (B, T) int64 after the memory of the call before; None: no past yet.

        Returns logits (B, T, V), or (B, 1, V) if last_only, or with targets y (B, T)
        the losses -ln p(y) in nats, (B, T); and the new memory, a list of N detached
        tensors (B, m, D).  ValueError, with the numbers, if x, y or memory do not fit.
        """
        validate.call(self, x, memory, y)
        c = self.config
        B, T = x.shape
        h = self.dropout_embedding(self.embedding(x) * math.sqrt(c.d_model))
        if memory is None:
            memory = [h[:, :0]] * c.n_layer  # nothing at all, not zeros
        m = min(memory[0].shape[1], c.mem_len)  # less, if mem_len was lowered meanwhile
        memory = [past[:, past.shape[1] - m :] for past in memory]  # (B, m, D) each
        R = self.dropout_R(self.distances(m + T, x.device).to(h))  # once for all layers
        mask = self.attention_mask(T, m, x.device)  # (T, K)
        u = self.u.expand(c.n_layer, -1, -1)  # (N, H, C): one pair for every layer,
        v = self.v.expand(c.n_layer, -1, -1)  # or with untie_r the N pairs as they are
        new_memory = []
        for n, layer in enumerate(self.layers):
            new_memory.append(lesson_2.update_memory(memory[n], h, c.mem_len))
            h = layer(h, memory[n], R, u[n], v[n], mask)
        h = self.dropout_final(h)
        if y is not None:
            return self.embedding.losses(h, y), new_memory
        return self.embedding.logits(h[:, -1:] if last_only else h), new_memory


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
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    """Sample n_tokens more after each prompt: (B, P) int64 -> (B, n_tokens).

    The model, in eval mode, reads the prompt once, then one token at a time: the memory
    is the past.  A faster Reader of it (training/fast.py) may take its place.
    """
    top_k = min(top_k, model.config.vocab_size)
    memory = None
    x = prompt
    tokens = [prompt[:, :0]]
    for _ in range(n_tokens):
        logits, memory = model(x, memory, last_only=True)  # (B, 1, V)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
        tokens.append(x)
    return torch.cat(tokens, dim=1)


# ---- the lesson ---------------------------------------------------------------------

@torch.no_grad()
def show_what_a_cut_changes(M, same_length, expected):
    """How far do 96 losses move, if the text is cut into segments of T and not of 1?"""
    torch.manual_seed(0)
    x, y = torch.randint(205, (2, 1, 96))  # any targets will do
    model = TransformerXL(CONFIGS["tiny"]).double().eval()
    model.config = replace(model.config, mem_len=M, same_length=same_length)
    one_by_one = lesson_2.stream_losses(model, x, y, T=1)
    print(f"M {M}, same_length {same_length}: {expected}")
    for T in (4, 16, 96):
        move = (lesson_2.stream_losses(model, x, y, T) - one_by_one).abs().max()
        print(f"  segments of {T:2} against 1: {move:.0e}")


@torch.no_grad()
def show_what_the_past_is_worth(model, tokens, T):
    """The loss over the memory length: one model, no weight changed."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for M in (1, 4, 16, 64, 256):
        model.config = replace(model.config, mem_len=M, same_length=True)
        bits = lesson_3.bits_per_token(model, tokens, 16, T)
        axes.bar_label(axes.bar(str(M), bits, color="tab:blue"), fmt="%.2f")
        print(f"  with a memory of {M:3}: {bits:.2f} bits per byte")
    axes.set(xlabel=f"M, keys before each query (after 600 steps with M = {T})",
             ylabel="bits per byte", ylim=(0, 4), title="What the past is worth")
    lesson_1.save(axes.figure, "05_memory_length.png")


def main():
    """What a cut changes and what not, a sample, and what the past is worth."""
    print("an untrained model's losses, the text cut in different ways, should be")
    show_what_a_cut_changes(96, False, "equal, as nothing has left the memory")
    show_what_a_cut_changes(16, False, "different, as first queries see less than last")
    show_what_a_cut_changes(16, True, "equal, as all queries see M keys before them")
    corpus = load("stdlib")
    T = 64
    model = TransformerXL(Config(len(corpus.vocab), n_layer=2, mem_len=T))
    lesson_3.fit(model, corpus.train[:620_000], B=16, T=T, steps=600)
    model.eval()
    prompt = encode("def read(", corpus.vocab)[None]  # (1, P)
    tokens = generate(model, prompt, 60, top_k=10)
    print("after 600 steps on text, `def read(` goes on so (yours differs):")
    print(f"  {decode(tokens[0], corpus.vocab)!r}")
    show_what_the_past_is_worth(model, corpus.valid[:200_000], T)


if __name__ == "__main__":
    main()

# Ask yourself (answers: tests/course/answers.md, which your teacher has)
#   1. Why are R and the mask made once for all layers, but the memory for each?
#   2. With same_length, T = 96 and M = 16: how many keys does query 90 see, and which?
#   3. What would go wrong if generate fed the whole text again in each call?
# Change and watch
#   1. Let same_length show each query one key less: which printed lines notice it?
#   2. Begin with zeros: write h.new_zeros(len(h), c.mem_len, c.d_model) for h[:, :0].
#      Which case of show_what_a_cut_changes is no longer rounding?
#   3. Give the figure's last bar clamp_len=127.  Did it pay for untrained distances?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     an untrained model's losses, the text cut in different ways, should be
#     M 96, same_length False: equal, as nothing has left the memory
#       segments of  4 against 1: 9e-16
#       segments of 16 against 1: 9e-16
#       segments of 96 against 1: 9e-16
#     M 16, same_length False: different, as first queries see less than last
#       segments of  4 against 1: 6e-04
#       segments of 16 against 1: 7e-04
#       segments of 96 against 1: 1e-03
#     M 16, same_length True: equal, as all queries see M keys before them
#       segments of  4 against 1: 9e-16
#       segments of 16 against 1: 9e-16
#       segments of 96 against 1: 9e-16
#     after 600 steps on text, `def read(` goes on so (yours differs):
#       'nemone, name):\n                 set_remourine, returnen warc'
# Rounding in training makes yours another one, of 60 bytes.
#
#       with a memory of   1: 3.44 bits per byte
#       with a memory of   4: 2.81 bits per byte
#       with a memory of  16: 2.73 bits per byte
#       with a memory of  64: 2.72 bits per byte
#       with a memory of 256: 2.72 bits per byte
# More past is worth less and less; here more than in training does no harm.  (Not to
# be compared with lessons 1 and 3: another size, other steps.)
#
#     figure: runs/05_memory_length.png
