"""Lesson 5.  The complete Transformer-XL (Dai et al., ACL 2019; sections 3.2 and 3.3).

The parts are built and compared by now: segments (01), memory (02), the four-term score (03), the
shift (04).  This file rebuilds them, mask and shift in a new form, as the model that train.py
trains, and adds what a complete one needs: dropout, the weights' first values, generation.  Beside
it stand the sizes of the paper (sizes.py), the softmax for large vocabularies
(adaptive_softmax.py), the faster memory of evaluation (evaluation_memory.py) and a faster dropout
(fast_dropout.py).

    tokens (B, T) -> embedding E * sqrt(D) -> h -> layer 1 ... layer N -> h E^T + b -> logits, loss
    layer n: attention from h to [memory n o h], add, norm; feed-forward, add, norm
    and layer n's input h goes into the new memory n (o joins along time); evaluation keeps its
    keys and values

One idea is new, `same_length`: without it the first query of a segment sees M keys before it and
the last M + T - 1, so a loss depends on where the text was cut.  With it every query sees the
distances 0..M, M + 1 keys (itself and M before it), and the cut no longer matters at all.

What is written for speed says so, with what it brings in float32 and in bf16 (python
experiments/parts.py, two cores of an Intel Xeon with AMX): the shift as a view, heads in front,
ReLU behind its dropout.  The tests hold each equal to the plain form.

    python 05_full_model.py     half a minute: what a cut changes, the sizes, a sample, a figure

In code N is n_layer, D is d_model, H and C are n_head and d_head, FF is d_inner, M is mem_len.
"""
import math
from dataclasses import replace
from importlib import import_module

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure

from support.adaptive_softmax import AdaptiveSoftmax, float32_at_least
from support.corpora import decode, encode, load
from support.evaluation_memory import EvaluationMemory
from support.fast_dropout import Dropout
from support.sizes import CONFIGS, Config, check

lesson_1, lesson_2 = import_module("01_vanilla_segments"), import_module("02_recurrence")
RUNS, lanes, segments = lesson_1.RUNS, lesson_1.lanes, lesson_1.segments
sinusoid, token_losses = lesson_1.sinusoid, lesson_1.token_losses
update_memory = lesson_2.update_memory
fit = import_module("03_relative_attention").fit


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


def distance_encoding(n, D, clamp_len=0, device=None):
    """R (n, D): sinusoids of the distances n - 1, ..., 1, 0.

    With clamp_len > 0 larger distances count as clamp_len, so that evaluation with a longer memory
    than that of training meets no distance unseen there.
    """
    distance = torch.arange(n - 1, -1, -1, device=device)
    return sinusoid(distance.clamp(max=clamp_len) if clamp_len > 0 else distance, D)


def shift_padded(x):
    """Lesson 4's rel_shift of a table that has a cell in front of each row already.

    (..., T, K + 1) -> (..., T, K): drop the first T numbers, read the others in rows of K.  This is
    a view, so nothing is copied (attention 1.14 times as fast in float32, 1.02 in bf16).  As in
    lesson 4, what stands behind distance 0 must be masked.  Here a number is 10 * query +
    distance, and K = 5; 5 and 15 stand where lesson 4 pads.

    >>> shift_padded(torch.tensor([[5, 4, 3, 2, 1, 0], [15, 14, 13, 12, 11, 10]]))
    tensor([[ 3,  2,  1,  0, 15],
            [14, 13, 12, 11, 10]])
    """
    T, width = x.shape[-2:]
    return x.flatten(-2)[..., T:].unflatten(-1, (T, width - 1))


class RelativeAttention(nn.Module):
    """Multi-head attention over memory and segment with the four-term score of section 3.3.

    Heads come first here, (H, B, T, C), not (B, H, T, C) as in lessons 1 to 4: so the queries of
    all lanes meet the one Q of their head in a single product, (B * T, C) times (C, K + 1), and Q
    is not copied for each lane (with the scale on q 1.08 times as fast in float32, 1.31 in bf16).

    forward is handed keys, values and Q ready made.  TransformerXL.forward makes them with the two
    methods before it: in training from all K rows, in evaluation most come from earlier calls.
    """

    def __init__(self, config):
        super().__init__()
        D, self.H, self.C = config.d_model, config.n_head, config.d_head
        HC = self.H * self.C
        self.W_q, self.W_kR = nn.Linear(D, HC, bias=False), nn.Linear(D, HC, bias=False)
        self.W_kv = nn.Linear(D, 2 * HC, bias=False)  # W_kE and W_v in one product
        self.W_o = nn.Linear(HC, D, bias=False)
        self.dropout_attention = Dropout(config.dropout_attention)

    def heads(self, z):
        """(..., H * C) -> (H, ..., C)."""
        return z.view(*z.shape[:-1], self.H, self.C).movedim(-2, 0)

    def keys_values(self, rows):
        """Rows (B, n, D) -> their keys and values, both (H, B, n, C)."""
        return [self.heads(z) for z in self.W_kv(rows).chunk(2, dim=-1)]

    def project_distances(self, R):
        """R (n, D) -> Q (H, n, C): W_kR R, one key for each distance."""
        return self.heads(self.W_kR(R))

    def forward(self, h, k, value, Q, u, v, hidden):
        """Queries from h (B, T, D) look at k, value (H, B, K, C) -> (B, T, D); u, v are (H, C).

        hidden is (T, K).  Q (H, K + 1, C) has the distances K, ..., 1, 0.  No key is K away:
        the column of this distance stands where lesson 4 pads zeros, and is dropped or masked like
        them.
        """
        scale = 1 / math.sqrt(self.C)  # on q, u and v: T * C numbers instead of T * K
        q, u, v = scale * self.heads(self.W_q(h)), scale * u, scale * v  # q (H, B, T, C)
        # A_ij = [(q_i + u) . k_j + (q_i + v) . (W_kR R_i-j)] / sqrt(C): terms (a) + (c), (b) + (d)
        content = (q + u[:, None, None]) @ k.transpose(-1, -2)  # (H, B, T, K)
        position = (q + v[:, None, None]).flatten(1, 2) @ Q.transpose(-1, -2)  # (H, B * T, K + 1)
        position = shift_padded(position.unflatten(1, h.shape[:2]))  # (H, B, T, K)
        # -inf, not a large negative number: a hidden probability is exactly 0 in every number type.
        # In place (_): no gradient needs the two products, so their sum needs no table of its own
        score = content.add_(position).masked_fill_(hidden, float("-inf"))
        out = self.dropout_attention(score.softmax(-1)) @ value  # (H, B, T, C)
        return self.W_o(out.permute(1, 2, 0, 3).flatten(-2))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward with ReLU, add, norm (post-norm)."""

    def __init__(self, config):
        super().__init__()
        D, FF, p = config.d_model, config.d_inner, config.dropout
        self.attention, self.dropout_output = RelativeAttention(config), Dropout(p)
        self.W_1, self.dropout_inner = nn.Linear(D, FF), Dropout(p)
        self.W_2, self.dropout_ff = nn.Linear(FF, D), Dropout(p)
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, h, k, value, Q, u, v, hidden):
        """h (B, T, D), the others as for the attention -> (B, T, D)."""
        h = self.norm_1(h + self.dropout_output(self.attention(h, k, value, Q, u, v, hidden)))
        # dropout, then ReLU: the same as the other way round, since relu(c z) = c relu(z) for
        # c >= 0 (here 0 or 1 / (1 - p)), but ReLU and W_2 then keep one table for the gradients,
        # not two (a quarter of the memory of this network; 1.03 and 1.21 times as fast)
        inner = F.relu(self.dropout_inner(self.W_1(h)))  # (B, T, FF)
        return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


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
        return token_losses(float32_at_least(self.logits(h)), y)  # bf16 would round the sum over V


class TransformerXL(nn.Module):
    """The language model.  The caller hands the memory on, and may go on from the same one twice:
    no call changes what an old memory holds (how, in evaluation: evaluation_memory.py).
    """

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

    def make_R(self, count, h):
        """R (count, D) for the distances count - 1, ..., 1, 0, in the number type of h."""
        c = self.config
        return distance_encoding(count, c.d_model, c.clamp_len, h.device).to(h)

    def forward(self, x, memory=None, y=None, last_only=False):
        """Read x (B, T) int64 after the memory of the call before; None is no past yet.

        Returns logits (B, T, V), or (B, 1, V) if last_only, or with targets y (B, T) the losses
        -ln p(y) in nats, (B, T); and the new memory: a list of N tensors (B, m <= M, D), detached,
        or, in eval mode under no_grad, an EvaluationMemory, good until a weight changes.
        ValueError: see `check` in sizes.py.
        """
        config = self.config
        evaluating = not (torch.is_grad_enabled() or self.training)
        check(x, memory, y, self, evaluating)
        T = x.shape[1]
        h = self.dropout_embedding(self.words.embed(x) * math.sqrt(config.d_model))  # (B, T, D)
        if not evaluating:
            memory = memory or [h[:, :0]] * config.n_layer  # no rows at all, not rows of zeros
            m = min(memory[0].shape[1], config.mem_len)  # fewer than held, if mem_len was lowered
            R = self.dropout_R(self.make_R(m + T + 1, h))  # (K + 1, D), see shift_padded
            new_memory = []
        else:
            new_memory = EvaluationMemory(self, memory, h)  # the past, and room for T rows
            m = new_memory.m  # rows of the past, as above
        hidden = hidden_keys(T, m, config.mem_len, config.same_length, x.device)  # (T, K)
        u, v = (bias.expand(config.n_layer, -1, -1) for bias in (self.u, self.v))  # (N, H, C)
        for n, layer in enumerate(self.layers):
            if not evaluating:  # the plain form: all K rows of [past o h] are projected
                past = memory[n][:, memory[n].shape[1] - m :]  # not -m: if m = 0 that takes all
                new_memory.append(update_memory(past, h, config.mem_len))
                k, value = layer.attention.keys_values(torch.cat([past, h], dim=1))
                Q = layer.attention.project_distances(R)
            else:  # the same three; only the T new rows are projected, the rest by earlier calls
                k, value, Q = new_memory.add(n, layer.attention, h)
            h = layer(h, k, value, Q, u[n], v[n], hidden)
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
    with torch.device("meta"):  # all layers are alike, so two are enough
        one, two = (sum(p.numel() for p in TransformerXL(replace(config, n_layer=n)).parameters())
                    for n in (1, 2))
    return one + (config.n_layer - 1) * (two - one)


# ---- the lesson ---------------------------------------------------------------------------------

@torch.no_grad()
def losses_in_segments(model, tokens, T):
    """Read (n,) tokens in segments of T, the memory handed on -> (n - 1,) losses in nats."""
    memory, losses = None, []
    for x, y in segments(lanes(tokens, 1), T):
        loss, memory = model(x, memory, y)
        losses.append(loss[0])
    return torch.cat(losses)


def main():
    """What a cut changes and what not, the sizes, a sample, what a longer memory is worth."""
    torch.manual_seed(0)
    tokens, cuts, at_1 = torch.randint(205, (97,)), (1, 4, 16, 96), {}
    model = TransformerXL(CONFIGS["tiny"]).double().eval()
    print("how far 96 losses move if the text is cut into T = 4, 16, 96 instead of 1 (float64):")
    for M, same_length, words in ((96, False, "rounding: nothing has left the memory"),
                                  (16, False, "more: the first queries see less than the last"),
                                  (16, True, "rounding: all see M + 1 keys")):
        model.config = replace(model.config, mem_len=M, same_length=same_length)
        one, *others = (losses_in_segments(model, tokens, T) for T in cuts)
        at_1[M, same_length] = one  # the losses at T = 1
        print(f"  M {M}, same_length {same_length!s:5} ",
              *(f"{(other - one).abs().max():.0e}" for other in others), "", words)
    difference = (at_1[16, True] - at_1[16, False]).abs().max()
    print(f"at T = 1 same_length changes nothing: {difference:.0e}")
    print("parameters:")
    for name, c in CONFIGS.items():
        print(f"  {name:14}  N {c.n_layer:2}  D {c.d_model:4}  V {c.vocab_size:7,}  "
              f"{count_parameters(c):11,}")

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
#   2. Drop .eval() from the tiny model in main (it has no dropout, so only the memory is another:
#      the list), and begin with M rows of zeros: for h[:, :0] in forward write
#      h.new_zeros(len(h), config.mem_len, config.d_model).  Which row no longer prints rounding?
