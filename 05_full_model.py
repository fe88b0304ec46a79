"""Lesson 5.  The complete Transformer-XL (Dai et al., ACL 2019; sections 3.2 and 3.3).

You need lessons 1 to 4.  You learn how the parts make one model, how it uses a
longer memory than in training, and how it generates.  About 30 minutes.

This file joins segments (01), memory (02), the four-term score (03) and the shift (04)
into the model that train.py trains, and adds the remaining parts of a complete model.

    tokens (B, T) -> embedding * sqrt(D) -> h -> layer 1 ... layer N -> logits (B, T, V)
    layer n:  attention of h to [memory n ; h], add, norm;  feed-forward, add, norm
    memory:   a list of N tensors (B, m, D), m <= M: the last M inputs of each layer
    logits:   h times the transposed embedding matrix (V, D), plus a bias

Two options for a longer memory come from the authors' code, not from the paper:

  * clamp_len: larger distances count as this one; choose one that occurs in training;
  * same_length: each query sees itself and at most M keys before it.

For T = 3 queries and m = M = 2 memory keys these are the distances (a dot: masked):

                         key j   0  1  2  3  4         0  1  2  3  4
    query 0, which is key 2      2  1  0  .  .         2  1  0  .  .
    query 1, which is key 3      3  2  1  0  .         .  2  1  0  .
    query 2, which is key 4      4  3  2  1  0         .  .  2  1  0
                                 as in lesson 3        same_length

On the left, the last query of a segment sees T - 1 more keys than the first, so a loss
depends on the segmentation.  On the right it does not, so evaluation can use any T.
This is the reference implementation; training/reader.py gives the same losses faster.

    python 05_full_model.py    up to a minute: segment lengths, memory lengths, a sample
"""
import math
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from support import run_lesson, validate
from support.adaptive_softmax import AdaptiveSoftmax, float32_at_least
from support.corpora import decode, encode, load, with_vocabulary

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
lesson_4 = import_module("04_rel_shift")


@dataclass(frozen=True)
class Config:
    """The sizes of a model.  Raises ValueError, with the numbers, if they are invalid.

    mem_len, same_length and clamp_len affect no weight and are read at every call:
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
    # three for large vocabularies (support/adaptive_softmax.py); skip them at first
    cutoffs: tuple = ()  # splits the vocabulary, sorted by frequency, into bands
    div_val: int = 1  # each band is div_val times narrower than the last
    tie_projections: bool = True  # input and output share one projection
    untie_r: bool = False  # u and v for each layer, not one pair (the authors' name)
    init_std: float = 0.02  # initial weights, except norms: N(0, init_std)
    same_length: bool = False  # each query sees itself and at most M keys before it
    clamp_len: int = 0  # larger distances are encoded as this; 0 or less: off

    def __post_init__(self):
        validate.config(self)


# more sizes are in training/presets.py; train.py takes vocab_size from the corpus
CONFIGS = {
    "tiny": Config(vocab_size=205, n_layer=2, d_model=32, n_head=2, d_head=16,
                   d_inner=64, mem_len=16),
    "laptop": Config(vocab_size=205),  # all else by default
    "enwik8-12L": Config(vocab_size=204, n_layer=12, d_model=512, n_head=8, d_head=64,
                         d_inner=2048, mem_len=512, dropout=0.1),
}


# ---- the model: leaf to root --------------------------------------------------------

def attention_mask(T, m, M, same_length, device=None):
    """Return a mask (T, m + T), True for keys that a query must not attend to; m <= M.

    These keys are in the future (distance < 0) or, with same_length, more than M back.

    >>> attention_mask(3, 1, 2, same_length=True).int()  # the memory holds 1 of M = 2
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
    """Return R (K, D), the sinusoids of distances K - 1, ..., 0, at most clamp_len."""
    distance = torch.arange(K - 1, -1, -1, device=device)
    if clamp_len > 0:
        distance = distance.clamp(max=clamp_len)
    return lesson_1.sinusoid(distance, D)


def initialize(module, std, mean=0.0):
    """Initialize as the authors do: weight N(mean, std), bias 0; return the module."""
    nn.init.normal_(module.weight, mean, std)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)
    return module


class RelativeAttention(nn.Module):
    """Multi-head attention over memory and segment, scored by content and distance."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        std = config.init_std
        self.H = config.n_head
        self.C = config.d_head
        self.W_q = initialize(nn.Linear(D, self.H * self.C, bias=False), std)
        self.W_kE = initialize(nn.Linear(D, self.H * self.C, bias=False), std)
        self.W_kR = initialize(nn.Linear(D, self.H * self.C, bias=False), std)
        self.W_v = initialize(nn.Linear(D, self.H * self.C, bias=False), std)
        self.W_o = initialize(nn.Linear(self.H * self.C, D, bias=False), std)
        self.dropout_attention = nn.Dropout(config.dropout_attention)

    def heads(self, z):
        """Split into heads: (..., n, H * C) -> (..., H, n, C)."""
        return z.unflatten(-1, (self.H, self.C)).transpose(-3, -2)

    def attend(self, q, k, value, k_R, u, v, mask):
        """Compute attention from projections: -> (B, T, H * C).

        q (B, H, T, C), k and value (B, H, K, C), k_R (H, K, C) by descending distance,
        u, v (H, C), mask (T, K).
        """
        score = lesson_4.relative_score(q, k, k_R, u, v)  # (B, H, T, K)
        score = score / math.sqrt(self.C)
        # -inf, not a large negative number: a masked probability is exactly 0
        probability = score.masked_fill_(mask, float("-inf")).softmax(-1)  # in place
        out = self.dropout_attention(probability) @ value  # (B, H, T, C)
        return out.transpose(1, 2).flatten(2)

    def forward(self, h, memory, R, u, v, mask):
        """h (B, T, D), memory (B, m, D), R (K, D), u, v (H, C) -> (B, T, D)."""
        q = self.heads(self.W_q(h))  # (B, H, T, C): queries from the segment only
        # project memory and h apart: [memory ; h] would also get a gradient for memory
        k = self.heads(torch.cat([self.W_kE(memory), self.W_kE(h)], 1))  # (B, H, K, C)
        value = self.heads(torch.cat([self.W_v(memory), self.W_v(h)], 1))
        k_R = self.heads(self.W_kR(R))  # (H, K, C): one key per distance
        return self.W_o(self.attend(q, k, value, k_R, u, v, mask))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward, add, norm: each norm *after* its sum."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.attention = RelativeAttention(config)
        self.dropout_output = nn.Dropout(config.dropout)
        self.norm_1 = initialize(nn.LayerNorm(D), 0.02, mean=1.0)  # as the authors
        self.W_1 = initialize(nn.Linear(D, config.d_inner), config.init_std)
        self.relu = nn.ReLU()
        self.dropout_inner = nn.Dropout(config.dropout)
        self.W_2 = initialize(nn.Linear(config.d_inner, D), config.init_std)
        self.dropout_ff = nn.Dropout(config.dropout)
        self.norm_2 = initialize(nn.LayerNorm(D), 0.02, mean=1.0)

    def forward(self, h, memory, R, u, v, mask):
        """h (B, T, D), the others as for the attention -> (B, T, D)."""
        attended = self.attention(h, memory, R, u, v, mask)
        h = self.norm_1(h + self.dropout_output(attended))
        inner = self.dropout_inner(self.relu(self.W_1(h)))  # (B, T, FF)
        return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


class TiedEmbedding(nn.Embedding):
    """Input and output layer: row t embeds token t, and is its output weight."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.d_model)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        initialize(self, config.init_std)

    def logits(self, h):
        """(B, T, D) -> (B, T, V)."""
        return F.linear(h, self.weight, self.bias)

    def losses(self, h, y):
        """(B, T, D), targets (B, T) -> -ln p(y) in nats, (B, T)."""
        logits = float32_at_least(self.logits(h))  # bfloat16 is too coarse for a loss
        return lesson_1.token_losses(logits, y)


class TransformerXL(nn.Module):
    """The language model.  The caller carries its memory from segment to segment."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        pairs = config.n_layer if config.untie_r else 1  # of u and v
        shape = (pairs, config.n_head, config.d_head)
        self.u = nn.Parameter(config.init_std * torch.randn(shape))
        self.v = nn.Parameter(config.init_std * torch.randn(shape))
        self.embedding = (AdaptiveSoftmax if config.cutoffs else TiedEmbedding)(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.dropout_embedding = nn.Dropout(config.dropout)
        self.dropout_R = nn.Dropout(config.dropout)
        self.dropout_final = nn.Dropout(config.dropout)

    def forward(self, x, memory=None, y=None, last_only=False):
        """Read x (B, T) int64 after the memory of the previous call; None: no memory.

        Returns logits (B, T, V), or (B, 1, V) if last_only, or with targets y (B, T)
        the losses -ln p(y) in nats, (B, T); and the new memory, a list of N detached
        tensors (B, m, D).  Raises ValueError with numbers if x, y or memory do not fit.
        """
        validate.call(self, x, memory, y)
        c = self.config
        B, T = x.shape
        h = self.dropout_embedding(self.embedding(x) * math.sqrt(c.d_model))
        if memory is None:
            memory = [h[:, :0]] * c.n_layer  # nothing at all, not zeros
        m = min(memory[0].shape[1], c.mem_len)  # less if mem_len has been lowered
        memory = [past[:, past.shape[1] - m :] for past in memory]  # (B, m, D) each
        R = distance_encoding(m + T, c.d_model, c.clamp_len, x.device)  # for all layers
        R = self.dropout_R(R.to(h))  # (K, D)
        mask = attention_mask(T, m, c.mem_len, c.same_length, x.device)  # (T, K)
        # expand one pair to all layers; with untie_r there are N pairs already
        u = self.u.expand(c.n_layer, -1, -1)  # (N, H, C)
        v = self.v.expand(c.n_layer, -1, -1)
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
    """Sample one of the top_k most probable tokens: (B, V) -> (B, 1).

    The many improbable tokens are left out; a temperature below 1 favors likely ones.
    """
    validate.above_0("temperature", temperature)
    best, tokens = logits.float().topk(top_k)  # (B, top_k), descending
    probability = (best / temperature).softmax(-1)
    choice = torch.multinomial(probability, 1, generator=generator)  # (B, 1)
    return tokens.gather(-1, choice)


@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    """Sample n_tokens that continue each prompt: (B, P) int64 -> (B, n_tokens).

    The model, in eval mode, reads the prompt once, then each new token with its memory.
    """
    top_k = min(top_k, model.config.vocab_size)
    memory = None
    x = prompt
    tokens = []
    for _ in range(n_tokens):
        logits, memory = model(x, memory, last_only=True)  # (B, 1, V)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
        tokens.append(x)
    return torch.cat([prompt[:, :0], *tokens], dim=1)  # empty if n_tokens is 0


# ---- the lesson ---------------------------------------------------------------------

def load_pretrained():
    """Load the model in pretrained/ -> the model in eval mode, its vocabulary."""
    saved = torch.load(Path(__file__).parent / "pretrained/best.pt", weights_only=True)
    model = TransformerXL(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model.eval(), saved["vocab"]


@torch.no_grad()
def show_effect_of_segment_length(M, same_length, reason):
    """Print how much 96 losses of an untrained model change with T."""
    torch.manual_seed(0)
    x = torch.randint(205, (1, 96))  # also the targets: any will do
    model = TransformerXL(CONFIGS["tiny"]).double().eval()
    model.config = replace(model.config, mem_len=M, same_length=same_length)
    one_by_one = lesson_2.stream_losses(model, x, x, T=1)
    changes = [(lesson_2.stream_losses(model, x, x, T) - one_by_one).abs().max()
               for T in (4, 16, 96)]
    print(f"  M {M}, same_length {same_length}: ",
          *(f"{change:.0e}" for change in changes), f" ({reason})")


def show_loss_by_memory_length(model, tokens):
    """Print and plot the loss with longer and longer memories; no weight changes."""
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    print(f"the pretrained model, trained with M = {model.config.mem_len}, at")
    config = replace(model.config, same_length=True)
    lengths = 4, 16, 64, 256, 383, 1024, 1024
    losses = []
    for M, clamp in zip(lengths, (0, 0, 0, 0, 0, 0, 383)):
        model.config = replace(config, mem_len=M, clamp_len=clamp)
        losses.append(lesson_1.bits(lesson_2.lane_losses(model, tokens, B=4, T=128)))
        name = f"{M}, clamped" if clamp else f"{M}"
        print(f"  M = {name + ':':14} {losses[-1]:.2f} bits per byte")
        side = -0.2 if M == 383 or clamp else 0.06  # below the lines or above them
        axes.text(M, losses[-1] + side, f" {losses[-1]:.2f}")
    axes.semilogx(lengths[:6], losses[:6], "C1o-", label="distances as they are")
    axes.semilogx(lengths[4::2], losses[4::2], "C0s--", label="clamped at 383")
    axes.axvline(383, color="0.5", ls=":", label="largest distance in training: 383")
    axes.set_xticks(lengths[:6], lengths[:6])
    axes.set(xlabel="M: tokens visible before a query", xlim=(3, 1600), ylim=(0, 3.2),
             ylabel="bits per byte", title="Longer memories help; far longer ones harm")
    axes.legend()
    lesson_1.save(axes.figure, "05_memory_length.png")


def main():
    """Vary the segment length; vary a trained model's memory; generate a sample."""
    print("losses with T = 4, 16 and 96 differ from those with T = 1 by up to")
    show_effect_of_segment_length(96, False, "nothing has left the memory")
    show_effect_of_segment_length(16, False, "late queries see more")
    show_effect_of_segment_length(16, True, "all queries see 16 tokens back")
    model, vocab = load_pretrained()
    corpus = with_vocabulary(load("stdlib"), vocab)
    show_loss_by_memory_length(model, corpus.valid[: lesson_1.VALID // 4])
    torch.manual_seed(0)
    tokens = generate(model, encode("\n\ndef read(", vocab)[None], 60)  # (1, 60)
    print("its continuation of `def read(` (yours differs):")
    print(f"  {decode(tokens[0], vocab)!r}")


if __name__ == "__main__":
    run_lesson(main, __doc__)

# Ask yourself
#   1. Why are R and the mask computed once for all layers, but a memory for each?
#   2. With same_length, T = 96 and M = 16: how many keys does query 90 see, and which?
#   3. What would go wrong if generate passed the whole text again in each call?
# Change and watch
#   1. Give each query one key fewer with same_length: which printed lines change?
#   2. Replace h[:, :0] with h.new_zeros(len(h), c.mem_len, c.d_model).
#      Which case of show_effect_of_segment_length is no longer rounding error?
#   3. Clamp at 127 instead of 383: what does the loss at M = 1024 tell you about them?

# It prints (seed 0, Python 3.11.7; the last digits of losses and all times vary)
#     losses with T = 4, 16 and 96 differ from those with T = 1 by up to
#       M 96, same_length False:  9e-16 9e-16 9e-16  (nothing has left the memory)
#       M 16, same_length False:  4e-05 7e-05 1e-04  (late queries see more)
#       M 16, same_length True:  9e-16 9e-16 9e-16  (all queries see 16 tokens back)
# With same_length the segment length changes no loss, only the speed.
#
#     the pretrained model, trained with M = 256, at
#       M = 4:             2.80 bits per byte
#       M = 16:            1.79 bits per byte
#       M = 64:            1.27 bits per byte
#       M = 256:           1.08 bits per byte
#       M = 383:           1.05 bits per byte
#       M = 1024:          1.14 bits per byte
#       M = 1024, clamped: 1.05 bits per byte
#     figure: runs/05_memory_length.png
# Gains shrink as M grows.  In training distances went up to M + T - 1 = 383; much
# larger ones harm, unless clamp_len encodes them as 383.  (The bytes are a quarter of
# those in lessons 1 to 3; the model has 6 layers and was trained for 100 minutes.)
#
#     its continuation of `def read(` (yours differs):
#       'f):\n    """\n    Return a read and have to senddate.  The rea'
