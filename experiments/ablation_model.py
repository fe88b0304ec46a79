"""The model of the ablations: recurrence, encoding and loss, each to be switched (paper, table 6).

The frame is lesson 5's; what differs between the rows of the table is where position enters:

    ours       R_i-j, a sinusoid of the distance, through W_kR; all four terms     lessons 3 and 4
    shaw       a learned vector for each distance, in terms (a) and (b) only       lesson 3, preface
    vaswani    a sinusoid of the place in the segment, added to the embedding      lesson 1
    al-rfou    a learned vector for each place, added to the input of each layer

Shaw et al. (2018) learn K vectors, those of training; what is farther counts as the farthest.  Of
Al-Rfou et al. (2018) the two auxiliary losses are missing, as in the paper's row.  Recurrence is a
mem_len above 0, and needs distances: lesson 2 shows what absolute places do to a memory.

With encoding "ours" and the full loss this is lesson 5's model: the same weights give the same
losses (tests/experiments/test_ablation_model.py).  Written for switching, not for speed: every
call projects its whole memory.
"""
import math
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support.adaptive_softmax import AdaptiveSoftmax
from support.fast import Dropout

lesson_1, lesson_2, lesson_4, lesson_5 = (import_module(name) for name in (
    "01_vanilla_segments", "02_recurrence", "04_rel_shift", "05_full_model"))
sinusoid, update_memory = lesson_1.sinusoid, lesson_2.update_memory
relative_score, projected_distances = lesson_4.relative_score, lesson_4.projected_distances
TiedEmbedding, hidden_keys = lesson_5.TiedEmbedding, lesson_5.hidden_keys
initialized = lesson_5.initialized

ENCODINGS = ("ours", "shaw", "vaswani", "al-rfou")


class Attention(nn.Module):
    """From the segment to memory and segment; the distances count or do not."""

    def __init__(self, config, encoding, T):
        super().__init__()
        self.encoding, D, self.H, self.C = encoding, config.d_model, config.n_head, config.d_head
        HC = self.H * self.C
        self.W_q, self.W_kE, self.W_v = (
            initialized(nn.Linear(D, HC, bias=False)) for _ in range(3))
        self.W_o = initialized(nn.Linear(HC, D, bias=False))
        self.dropout_attention = Dropout(config.dropout_attention)
        if encoding == "ours":
            self.W_kR = initialized(nn.Linear(D, HC, bias=False))
        if encoding == "shaw":
            self.distances = nn.Parameter(torch.randn(self.H, config.mem_len + T, self.C) * 0.02)

    def keys_of_distances(self, R, K):
        """Q (H, K, C), the distances K - 1, ..., 0; R (K, D) by ascending distance."""
        if self.encoding == "ours":
            return projected_distances(R, self.W_kR.weight.view(self.H, self.C, -1))
        far = self.distances.shape[1] - 1
        return self.distances[:, torch.arange(K - 1, -1, -1, device=R.device).clamp(max=far)]

    def forward(self, h, rows, R, u, v, hidden):
        """h (B, T, D), rows (B, K, D), R (K, D), u, v (H, C), hidden (T, K) -> (B, T, D)."""
        q, k, value = (z.unflatten(-1, (self.H, self.C)).transpose(1, 2) for z in (
            self.W_q(h), self.W_kE(rows), self.W_v(rows)))  # (B, H, T, C), (B, H, K, C) twice
        if self.encoding in ("ours", "shaw"):
            score = relative_score(q, k, self.keys_of_distances(R, rows.shape[1]).to(q), u, v)
        else:
            score = q @ k.transpose(-1, -2)  # (B, H, T, K)
        score = (score / math.sqrt(self.C)).masked_fill(hidden, float("-inf"))
        out = self.dropout_attention(score.softmax(-1)) @ value
        return self.W_o(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention, add, norm; feed-forward, add, norm: lesson 5's, around another attention."""

    def __init__(self, config, encoding, T):
        super().__init__()
        D, FF, p = config.d_model, config.d_inner, config.dropout
        self.attention, self.dropout_output = Attention(config, encoding, T), Dropout(p)
        self.W_1, self.dropout_inner = initialized(nn.Linear(D, FF)), Dropout(p)
        self.W_2, self.dropout_ff = initialized(nn.Linear(FF, D)), Dropout(p)
        self.norm_1, self.norm_2 = (
            initialized(nn.LayerNorm(D), mean=1.0) for _ in range(2))

    def forward(self, h, *context):
        """(B, T, D) -> (B, T, D)."""
        h = self.norm_1(h + self.dropout_output(self.attention(h, *context)))
        inner = self.dropout_inner(F.relu(self.W_1(h)))
        return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


class AblationModel(nn.Module):
    """model(x, memory, y) -> losses (B, T) in nats, new memory: a list of N tensors (B, m, D).

    T is the segment length of training, which the learned encodings need.  In training the half
    loss counts the later half of each segment twice, and the earlier not at all.
    """

    def __init__(self, config, T, encoding="ours", half_loss=False):
        super().__init__()
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {', '.join(ENCODINGS)}, got {encoding!r}")
        if config.mem_len and encoding in ("vaswani", "al-rfou"):
            raise ValueError(f"{encoding} knows places, not distances, so it can have no memory; "
                             f"mem_len is {config.mem_len}")
        self.config, self.T, self.encoding, self.half_loss = config, T, encoding, half_loss
        self.variant = f"{encoding}, {'half' if half_loss else 'full'} loss, T {T}"
        D = config.d_model
        self.embedding = (AdaptiveSoftmax if config.cutoffs else TiedEmbedding)(config)
        self.layers = nn.ModuleList(Layer(config, encoding, T) for _ in range(config.n_layer))
        if encoding == "ours":
            self.u, self.v = (nn.Parameter(torch.randn(config.n_head, config.d_head) * 0.02)
                              for _ in range(2))
        if encoding == "al-rfou":
            self.places = nn.Parameter(torch.randn(config.n_layer, T, D) * 0.02)
        self.dropout_embedding, self.dropout_R, self.dropout_final = (
            Dropout(config.dropout) for _ in range(3))

    def forward(self, x, memory, y):
        """x, y (B, T) int64, memory None or the list of the call before.  ValueError: al-rfou, if
        x is longer than the segments of training, for which there are no places.
        """
        config, T = self.config, x.shape[1]
        if self.encoding == "al-rfou" and T > self.T:
            raise ValueError(f"al-rfou has learned {self.T} places, x has {T} tokens")
        h = self.dropout_embedding(self.embedding(x) * math.sqrt(config.d_model))
        if self.encoding == "vaswani":
            h = h + self.dropout_R(sinusoid(torch.arange(T, device=h.device), config.d_model).to(h))
        memory = memory or [h[:, :0]] * config.n_layer
        m = min(memory[0].shape[1], config.mem_len)
        distance = torch.arange(m + T, device=h.device)
        distance = distance.clamp(max=config.clamp_len) if config.clamp_len > 0 else distance
        R = self.dropout_R(sinusoid(distance, config.d_model).to(h))  # (K, D)
        zero = h.new_zeros(1, 1)  # Shaw's score has no terms (c) and (d)
        u, v = (self.u, self.v) if self.encoding == "ours" else (zero, zero)
        hidden = hidden_keys(T, m, config.mem_len, config.same_length, x.device)  # (T, K)
        new_memory = []
        for n, layer in enumerate(self.layers):
            if self.encoding == "al-rfou":
                h = h + self.places[n, :T]
            past = memory[n][:, memory[n].shape[1] - m :]
            new_memory.append(update_memory(past, h, config.mem_len))
            h = layer(h, torch.cat([past, h], dim=1), R, u, v, hidden)
        losses = self.embedding.losses(self.dropout_final(h), y)
        if self.half_loss and self.training:
            losses = 2 * losses * (torch.arange(T, device=h.device) >= T // 2)
        return losses, new_memory
