"""Lesson 5. The complete Transformer-XL (Dai et al., ACL 2019; sections 3.2 and 3.3) in one file.

The parts are built and compared by now: segments (01), memory (02), the four-term score (03), the
shift (04).  This file joins them, as the model that train.py trains, and adds what a complete one
needs: dropout, the weights' first values, generation with memory, the sizes of the paper.

    tokens (B, T) -> embedding E * sqrt(D) -> h -> layer 1 ... layer N -> h E^T + b -> logits, loss
    layer n: attention from h to [memory n o h], add, norm; feed-forward, add, norm
    and layer n's input h goes into the new memory n (o joins along time)

Two ideas are new.  `same_length`: without it the first query of a segment sees M keys before it and
the last M + T - 1, so a loss depends on where the text was cut.  With it every query sees the
distances 0..M, M + 1 keys (itself and M before it), and the cut no longer matters at all.  And the
adaptive softmax: with 267,735 words most of the work would go into words that hardly ever come.

    python 05_full_model.py     half a minute: two golden equalities, the sizes, a first sample

In code FF is d_inner, H x C is n_head x d_head, M is mem_len.
"""
import math
import time
from dataclasses import dataclass, replace
from importlib import import_module

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from corpora import decode, encode, load

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
RUNS, lanes, segments = lesson_1.RUNS, lesson_1.lanes, lesson_1.segments
sinusoid, token_losses = lesson_1.sinusoid, lesson_1.token_losses
update_memory = lesson_2.update_memory
fit = import_module("03_relative_attention").fit
rel_shift = import_module("04_rel_shift").rel_shift


# ---- the sizes ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Config:
    """What a model is.  mem_len, same_length and clamp_len are read at every call and touch no
    weight: a trained model is evaluated at other lengths by `model.config = replace(model.config,
    mem_len=2100, ...)`.
    """

    vocab_size: int
    n_layer: int = 4
    d_model: int = 128
    n_head: int = 2
    d_head: int = 64
    d_inner: int = 512
    dropout: float = 0.0
    dropout_attention: float = 0.0
    untie_r: bool = False  # u and v for each layer, instead of one pair shared by all
    mem_len: int = 128  # M, in tokens; 0: no memory
    same_length: bool = False  # every query sees M + 1 keys
    clamp_len: int = 0  # distances beyond are treated as this one; 0 or less: no clamp
    cutoffs: tuple = ()  # where the vocabulary is cut into bands; (): one softmax over all words
    div_val: int = 1  # the rows of band i are D / div_val^i wide
    tie_projections: bool = True  # of the tails, in and out; read if div_val > 1

    def __post_init__(self):
        sizes = ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "div_val")
        for name, value in vars(self).items():
            if name in sizes and value < 1 or name == "mem_len" and value < 0:
                raise ValueError(f"{name} must be at least {int(name in sizes)}, got {value}")
            if name.startswith("dropout") and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even (sine and cosine halves), got {self.d_model}")
        edges = (0, *self.cutoffs, self.vocab_size)
        if any(first >= end for first, end in zip(edges, edges[1:])):
            raise ValueError("cutoffs must ascend, above 0 and below the vocabulary size "
                             f"{self.vocab_size}, got {self.cutoffs}")
        if self.div_val > 1 and not self.cutoffs:
            raise ValueError(f"div_val {self.div_val} narrows the bands, so it needs cutoffs")
        if self.d_model // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(f"d_model {self.d_model} divided by div_val {self.div_val} once for "
                             f"each of {len(self.cutoffs)} cutoffs leaves no width")


# The training values of the official scripts, u and v shared by the layers.  vocab_size is that of
# the published parameter counts; train.py puts its corpus's own there (205 for enwik8 with
# newlines).  Ours are the dimensions of enwik8-18L (the authors give 88M parameters only), of
# lm1b-medium (only 0.46B; their script's model is lm1b-base) and of ptb (only 24M; with d_inner
# 900, as in their later code, the published architecture has 26.4M).  wt103-large has 285M
# parameters where the paper says 257M.  `tiny` and the two laptops are for a CPU.
CONFIGS = {
    "tiny": Config(205, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16),
    "laptop": Config(205),
    "laptop-words": Config(10_000, dropout=0.1, mem_len=64),
    "enwik8-12L": Config(204, n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048,
                         dropout=0.1, mem_len=512),
    "enwik8-18L": Config(204, n_layer=18, d_model=640, n_head=10, d_head=64, d_inner=2208,
                         dropout=0.1, mem_len=512),
    "enwik8-24L": Config(204, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072,
                         dropout=0.15, dropout_attention=0.15, mem_len=768),
    "wt103-standard": Config(267_735, n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100,
                             dropout=0.1, mem_len=150, cutoffs=(20_000, 40_000, 200_000)),
    "wt103-large": Config(267_735, n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096,
                          dropout=0.2, dropout_attention=0.2, mem_len=384,
                          cutoffs=(20_000, 40_000, 200_000), div_val=4),
    "lm1b-base": Config(793_471, n_layer=18, d_model=1024, n_head=8, d_head=128, d_inner=4096,
                        mem_len=32, cutoffs=(60_000, 100_000, 640_000), div_val=4,
                        tie_projections=False),
    "ptb": Config(10_000, n_layer=16, d_model=380, n_head=10, d_head=38, d_inner=704, dropout=0.2,
                  dropout_attention=0.2, mem_len=70),
}
CONFIGS["text8-12L"] = replace(CONFIGS["enwik8-12L"], vocab_size=27)
CONFIGS["text8-24L"] = replace(CONFIGS["enwik8-24L"], vocab_size=27)
CONFIGS["lm1b-medium"] = replace(CONFIGS["lm1b-base"], n_layer=24, d_inner=4608)
CONFIGS["lm1b-large"] = replace(CONFIGS["lm1b-base"], n_layer=24, d_model=1280, n_head=16,
                                d_head=80, d_inner=8192, dropout=0.05, dropout_attention=0.05)


# ---- the model: leaf to root --------------------------------------------------------------------

def hidden_keys(T, m, M, same_length, device=None):
    """Which keys a query must not see, (T, m + T) bool, for a memory of m <= M rows.

    Hidden is the future (distance below 0), and with same_length all beyond M.  Each query then
    sees M + 1 keys however the text is cut (fewer only where the text begins): itself and M rows,
    which is what a single query (T = 1) sees with a full memory anyway.

    >>> hidden_keys(3, 2, 2, same_length=True).int()
    tensor([[0, 0, 0, 1, 1],
            [1, 0, 0, 0, 1],
            [1, 1, 0, 0, 0]], dtype=torch.int32)
    """
    i, j = torch.arange(T, device=device)[:, None], torch.arange(m + T, device=device)
    distance = m + i - j  # (T, K), since query i is key m + i
    return (distance < 0) | (distance > M) if same_length else distance < 0


def distance_encoding(K, D, clamp_len=0, device=None):
    """R (K, D): sinusoids of the distances K - 1, ..., 1, 0, those above clamp_len as clamp_len.

    For evaluation with a memory longer than trained with: no distance is then unknown.
    """
    distance = torch.arange(K - 1, -1, -1, device=device)
    return sinusoid(distance.clamp(max=clamp_len) if clamp_len > 0 else distance, D)


class Dropout(nn.Dropout):
    """nn.Dropout, which spends most of its time on a CPU in drawing a random number for each entry.

    Here 64 random bits decide about four entries; so p is a multiple of 1/65536 there.
    """

    def forward(self, z):
        """(...) -> (...): zero with probability p, otherwise scaled so that the mean stays."""
        if not self.training or self.p == 0 or z.device.type != "cpu":
            return super().forward(z)
        dropped = min(round(65536 * self.p), 65535)  # of the 65,536 values of 16 bits
        bits = torch.empty(-(-z.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: z.numel()].view(z.shape) >= dropped - 32768
        return z * (kept.to(z.dtype) * (65536 / (65536 - dropped)))


class RelativeAttention(nn.Module):
    """Multi-head attention over memory and segment with the four-term score of section 3.3."""

    def __init__(self, config):
        super().__init__()
        D, self.H, self.C = config.d_model, config.n_head, config.d_head
        HC = self.H * self.C
        self.W_q, self.W_kR = nn.Linear(D, HC, bias=False), nn.Linear(D, HC, bias=False)
        self.W_kv = nn.Linear(D, 2 * HC, bias=False)  # W_kE and W_v in one product
        self.W_o = nn.Linear(HC, D, bias=False)
        self.dropout_attention = Dropout(config.dropout_attention)

    def forward(self, h, memory, R, u, v, hidden):
        """(B, T, D), (B, m, D), R (K, D), u, v (H, C), hidden (T, K) -> (B, T, D)."""
        (B, T, _), K = h.shape, R.shape[0]
        rows = torch.cat([memory, h], dim=1)  # (B, K, D)
        q = self.W_q(h).view(B, T, self.H, self.C).transpose(1, 2)  # (B, H, T, C)
        k, value = (z.view(B, K, self.H, self.C).transpose(1, 2)  # (B, H, K, C)
                    for z in self.W_kv(rows).chunk(2, dim=-1))
        Q = self.W_kR(R).view(K, self.H, self.C).transpose(0, 1)  # (H, K, C)

        # A_ij = [(q_i + u) . k_j + (q_i + v) . (W_kR R_i-j)] / sqrt(C): terms (a) + (c), (b) + (d)
        scale = 1 / math.sqrt(self.C)  # on the left factors: T * C numbers instead of T * K
        content = ((q + u[:, None]) * scale) @ k.transpose(-1, -2)  # (B, H, T, K)
        position = rel_shift(((q + v[:, None]) * scale) @ Q.transpose(-1, -2))  # (B, H, T, K)
        # -inf, not a large number: a hidden probability is exactly 0 in every number type (and in
        # place, since nobody else needs the sum)
        probability = (content + position).masked_fill_(hidden, float("-inf")).softmax(-1)
        out = self.dropout_attention(probability) @ value  # (B, H, T, C)
        return self.W_o(out.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward with ReLU, add, norm (post-norm)."""

    def __init__(self, config):
        super().__init__()
        D, FF, p = config.d_model, config.d_inner, config.dropout
        self.attention, self.dropout_output = RelativeAttention(config), Dropout(p)
        self.W_1, self.dropout_inner = nn.Linear(D, FF), Dropout(p)
        self.W_2, self.dropout_ff = nn.Linear(FF, D), Dropout(p)
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, h, memory, R, u, v, hidden):
        """h (B, T, D), memory (B, m, D), the others as for the attention -> (B, T, D)."""
        h = self.norm_1(h + self.dropout_output(self.attention(h, memory, R, u, v, hidden)))
        inner = self.dropout_inner(F.relu(self.W_1(h)))  # (B, T, FF)
        return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


def float32_at_least(logits):
    """For the softmax, also where autocast made the logits bf16: it sums V small numbers."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class FullSoftmax(nn.Module):
    """Words in and out: one row for each word, both its embedding and its output weight (tied)."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.output_bias = nn.Parameter(torch.empty(config.vocab_size))

    def embed(self, x):
        """Tokens (B, T) -> (B, T, D)."""
        return self.embedding(x)

    def logits(self, h):
        """(B, T, D) -> (B, T, V)."""
        return F.linear(h, self.embedding.weight, self.output_bias)

    def losses(self, h, y):
        """(B, T, D), targets (B, T) -> -ln p(y) in nats, (B, T)."""
        return token_losses(float32_at_least(self.logits(h)), y)


class AdaptiveSoftmax(nn.Module):
    """The same for a large vocabulary that is sorted by falling count, cut into bands at cutoffs.

    Frequent words stay in the head.  Each rarer band is one more entry of the head, behind which a
    small softmax over its own words waits until it is needed, with rows of width D / div_val^i
    (Grave et al. 2017; as input, Baevski & Auli 2019).  For cutoffs 20,000, 40,000 and 200,000:

        head    [ 20,000 words | tail 1 | tail 2 | tail 3 ]      for every token
                                   |        |        |
        tails           [ 20,000 words ]    |    [ 67,735 words ]        only for the tokens
                                   [ 160,000 words ]                     whose target is there

        p(word) = head[word]  in band 0,  head[tail i] * tail_i[word]  in band i

    With div_val > 1 a projection (D, width) leads from each band's rows to the model's width and
    another one back, which is the same one for the tails if tie_projections.
    """

    def __init__(self, config):
        super().__init__()
        D, edges = config.d_model, (0, *config.cutoffs, config.vocab_size)
        self.bands = list(zip(edges, edges[1:]))  # the first word of each band, and the next one's
        widths = [D // config.div_val**i for i in range(len(self.bands))]
        self.rows = nn.ParameterList(
            torch.empty(end - first, width) for (first, end), width in zip(self.bands, widths))
        self.tail_rows = nn.Parameter(torch.empty(len(config.cutoffs), D))  # of the head
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.tail_bias = nn.Parameter(torch.empty(len(config.cutoffs)))
        self.project_in = self.project_out = [None] * len(self.bands)  # all rows are D wide
        if config.div_val > 1:
            self.project_in = nn.ParameterList(torch.empty(D, width) for width in widths)
            self.project_out = nn.ParameterList(
                self.project_in[i] if i and config.tie_projections else torch.empty(D, width)
                for i, width in enumerate(widths))
        self.register_buffer("cutoffs", torch.tensor(config.cutoffs), persistent=False)

    def band(self, x):
        """The band of each token, (B, T) -> (B, T): how many cutoffs it has reached."""
        return (x[..., None] >= self.cutoffs).sum(-1)

    def embed(self, x):
        """Tokens (B, T) -> (B, T, D), each from its own band's rows."""
        band = self.band(x)  # (B, T)
        h = self.tail_rows.new_zeros(*x.shape, self.tail_rows.shape[1])
        for i, (first, _) in enumerate(self.bands):
            here = (band == i).nonzero(as_tuple=True)  # (n,), (n,)
            rows = F.embedding(x[here] - first, self.rows[i])  # (n, width)
            rows = rows if self.project_in[i] is None else F.linear(rows, self.project_in[i])
            h = h.index_put(here, rows.to(h.dtype))
        return h

    def scores(self, h, i):
        """Logits of band i, for a softmax of its own: (..., D) -> (..., words of the band).

        Band 0 is the head, with one more column at its end for each tail.
        """
        (first, end), rows = self.bands[i], self.rows[i]
        bias = self.bias[first:end]
        if i == 0:
            rows, bias = torch.cat([rows, self.tail_rows]), torch.cat([bias, self.tail_bias])
        narrow = h if self.project_out[i] is None else h @ self.project_out[i]  # (..., width)
        return float32_at_least(F.linear(narrow, rows, bias))

    def logits(self, h):
        """(B, T, D) -> log-probabilities of all words, (B, T, V): logits that already sum to 1."""
        n = self.bands[0][1]
        head, *tails = (self.scores(h, i).log_softmax(-1) for i in range(len(self.bands)))
        tails = [head[..., n + i, None] + tail for i, tail in enumerate(tails)]
        return torch.cat([head[..., :n], *tails], dim=-1)

    def losses(self, h, y):
        """(B, T, D), targets (B, T) -> -ln p(y) in nats, (B, T), without a table (B, T, V)."""
        band, n = self.band(y), self.bands[0][1]  # (B, T)
        loss = token_losses(self.scores(h, 0), torch.where(band == 0, y, n + band - 1))  # (B, T)
        for i, (first, _) in enumerate(self.bands[1:], 1):
            here = (band == i).nonzero(as_tuple=True)  # only tokens whose target is in this tail
            tail = token_losses(self.scores(h[here], i), y[here] - first)
            loss = loss.index_put(here, tail, accumulate=True)
        return loss


def check(x, memory, y, config):
    """Refuse, with the numbers, what would fail far from its cause or not at all: ValueError."""
    for z in (x,) if y is None else (x, y):
        if z.dtype != torch.int64 or z.dim() != 2 or z.shape != x.shape or 0 in z.shape:
            raise ValueError("x and y must be int64 of one shape (B, T), both at least 1; got "
                             f"{z.dtype} {tuple(z.shape)}, x is {tuple(x.shape)}")
        # not on a GPU, where each call would wait for the answer; train.py's tokens come from the
        # corpus that made the vocabulary
        for token in (z.min().item(), z.max().item()) if z.device.type == "cpu" else ():
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"token {token} outside vocabulary of {config.vocab_size}")
    if memory is not None and not (isinstance(memory, list) and len(memory) == config.n_layer):
        raise ValueError(f"memory must be a list of {config.n_layer} tensors, one for each layer")
    for rows in memory or ():
        if rows.dim() != 3 or rows.shape != (len(x), memory[0].shape[1], config.d_model):
            raise ValueError(f"memory must be (B, m, D) = ({len(x)}, m, {config.d_model}) in each "
                             f"layer, got {tuple(rows.shape)}")


class TransformerXL(nn.Module):
    """The language model.  The caller hands the memory on; it is never changed in place."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        pairs = config.n_layer if config.untie_r else 1
        self.words = AdaptiveSoftmax(config) if config.cutoffs else FullSoftmax(config)
        self.u = nn.Parameter(torch.empty(pairs, config.n_head, config.d_head))
        self.v = nn.Parameter(torch.empty(pairs, config.n_head, config.d_head))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.dropout_embedding, self.dropout_R, self.dropout_final = (
            Dropout(config.dropout) for _ in range(3))
        # as the authors: matrices, embedding, u and v N(0, 0.02), the projections of the adaptive
        # softmax N(0, 0.01); norm gains N(1, 0.02); biases 0
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0,
                                std=0.01 if "project" in name else 0.02)

    def forward(self, x, memory=None, y=None, last_only=False):
        """Read x (B, T) int64 after the memory of the call before; None is no past yet.

        Returns logits (B, T, V), or (B, 1, V) if last_only, or with targets y (B, T) the losses
        -ln p(y) in nats, (B, T); and the new memory, N tensors (B, min(M, m + T), D), detached.
        ValueError: see `check`.
        """
        config = self.config
        check(x, memory, y, config)
        B, T = x.shape
        h = self.dropout_embedding(self.words.embed(x) * math.sqrt(config.d_model))  # (B, T, D)
        if memory is None:
            memory = [h[:, :0]] * config.n_layer  # no past, which is not a past of zeros
        m = min(memory[0].shape[1], config.mem_len)  # fewer rows than held, if mem_len was lowered
        R = distance_encoding(m + T, config.d_model, config.clamp_len, x.device).to(h)
        R = self.dropout_R(R)  # (K, D): once for all layers
        hidden = hidden_keys(T, m, config.mem_len, config.same_length, x.device)  # (T, K)
        new_memory = []
        u, v = (bias.expand(config.n_layer, -1, -1) for bias in (self.u, self.v))  # (N, H, C)
        for n, layer in enumerate(self.layers):
            past = memory[n][:, memory[n].shape[1] - m :]
            new_memory.append(update_memory(past, h, config.mem_len))  # the layer's input
            h = layer(h, past, R, u[n], v[n], hidden)
        h = self.dropout_final(h)
        if y is not None:
            return self.words.losses(h, y), new_memory
        return self.words.logits(h[:, -1:] if last_only else h), new_memory

    @torch.no_grad()
    def generate(self, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
        """Sample n_tokens more for each row of the prompt, (B, P) int64 -> (B, n_tokens).

        The prompt is read once, then one token at a time: the memory is the past (appendix E), and
        only the last position is asked for its logits.  Each step's logits equal one pass over the
        whole text under same_length, otherwise while nothing has left the memory.  A prompt (P,)
        gives (n_tokens,); top_k None is min(40, V).
        """
        if prompt.dim() == 1:
            return self.generate(prompt[None], n_tokens, top_k, temperature, generator)[0]
        if n_tokens < 0:
            raise ValueError(f"n_tokens must be 0 or more, got {n_tokens}")
        top_k = min(40, self.config.vocab_size) if top_k is None else top_k
        tokens, x, memory, training = [prompt[:, :0]], prompt, None, self.training
        self.eval()
        try:
            for _ in range(n_tokens):
                logits, memory = self(x, memory, last_only=True)
                x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
                tokens.append(x)
        finally:
            self.train(training)
        return torch.cat(tokens, dim=1)


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    """Draw from the top_k most probable symbols only: (B, V) -> (B, 1).  top_k = 1: the best one.

    A temperature below 1 sharpens, above 1 flattens.  ValueError unless 1 <= top_k <= V and
    temperature > 0.
    """
    V = logits.shape[-1]
    if not 1 <= top_k <= V:
        raise ValueError(f"top_k must be between 1 and the vocabulary size {V}, got {top_k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    best, symbols = logits.float().topk(top_k)  # (B, top_k), descending
    choice = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)  # (B, 1)
    return symbols.gather(-1, choice)


def count_parameters(config):
    """The exact number of parameters, counted on the meta device: nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in TransformerXL(config).parameters())


# ---- the lesson ---------------------------------------------------------------------------------

@torch.no_grad()
def losses_in_segments(model, tokens, T):
    """Read (n,) tokens in segments of T, the memory handed on -> (n - 1,) losses in nats."""
    memory, losses = None, []
    for x, y in segments(lanes(tokens, 1), T):
        loss, memory = model(x, memory, y)
        losses.append(loss[0])
    return torch.cat(losses)


def seconds_of(words, V, n):
    """The middle of five: n words, as rare as 1 / rank, embedded, predicted, and all gradients."""
    y = torch.multinomial(1 / torch.arange(1.0, V + 1), n, replacement=True)[None]  # (1, n)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        words.losses(words.embed(y), y).sum().backward()
        times.append(time.perf_counter() - start)
    return sorted(times)[2]


def main():
    """The golden equalities, sizes, what the adaptive softmax saves, a sample after seconds."""
    torch.manual_seed(0)
    tokens, cuts = torch.randint(205, (97,)), (1, 4, 16, 96)
    model = TransformerXL(CONFIGS["tiny"]).double().eval()
    print("how far 96 losses move if the text is cut into T = 4, 16, 96 instead of 1 (float64):")
    for M, same_length in ((96, False), (16, False), (16, True)):
        model.config = replace(model.config, mem_len=M, same_length=same_length)
        one, *others = (losses_in_segments(model, tokens, T) for T in cuts)
        at_1 = one if not same_length else at_1  # that of M = 16 without same_length
        print(f"  M {M}, same_length {same_length!s:5} ",
              *(f"{(other - one).abs().max():.0e}" for other in others))
    print(f"at T = 1 same_length changes nothing: {(at_1 - one).abs().max():.0e}")
    print("parameters:")
    for name, c in CONFIGS.items():
        print(f"  {name:14}  N {c.n_layer:2}  D {c.d_model:4}  V {c.vocab_size:7,}  "
              f"{count_parameters(c):11,}")
    c = replace(CONFIGS["wt103-large"], d_model=128)
    n = 256
    print(f"embedding and softmax of {c.vocab_size:,} words, D {c.d_model}, {n} tokens and back:")
    for kind in (FullSoftmax, AdaptiveSoftmax):
        words = kind(c)
        for parameter in words.parameters():
            nn.init.normal_(parameter, std=0.02)
        print(f"  {kind.__name__:15}  {sum(p.numel() for p in words.parameters()):10,} parameters  "
              f"{seconds_of(words, c.vocab_size, n):.3f} s")

    corpus, T = load("stdlib"), 64
    model = TransformerXL(Config(len(corpus.vocab), n_layer=2, mem_len=T))
    fit(model, corpus.train[:2_000_000], B=16, T=T, steps=600)
    model.eval()
    model.config = replace(model.config, mem_len=256, same_length=True)
    prompt = "def read("
    new = model.generate(encode(prompt, corpus.vocab), 200, top_k=10)
    print(f"after 600 steps of {16 * T} bytes:\n{prompt}{decode(new, corpus.vocab)}")

    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for M in (1, 4, 16, 64, 256):
        model.config = replace(model.config, mem_len=M)
        bits = losses_in_segments(model, corpus.valid[:20_000], T).mean().item() / math.log(2)
        axes.bar_label(axes.bar(str(M), bits, color="tab:blue"), fmt="%.2f")
    axes.set(xlabel=f"M at evaluation: keys before each query (trained with memory {T})",
             ylabel="bits per byte", title="One model, no weight changed: what the past is worth")
    RUNS.mkdir(exist_ok=True)
    axes.figure.savefig(RUNS / "05_memory_length.png", dpi=120)
    print(f"figure: {RUNS.name}/05_memory_length.png")


if __name__ == "__main__":
    main()

# Ask yourself
#   1. Why are R and the mask made once for all layers, and the memory for each?
#   2. With same_length and T = 96, M = 16: how many keys does query 90 see, and which?
#   3. generate feeds one token at a time.  What would go wrong if it fed the prompt again as well?
# Change and watch
#   1. Write `distance >= M` for `distance > M`: which printed equality breaks, and which does not?
#   2. In forward, begin with M rows of zeros in each memory instead of none: which line notices?
