"""SPOILERS.  Right solutions of lesson 5 in an unusual form: tables, einsum, rows by index."""
from importlib import import_module

import torch
import torch.nn.functional as F


def attention_mask(T, m, M, same_length, device=None):
    ones = torch.ones(T, m + T, dtype=torch.bool, device=device)
    mask = ones.triu(m + 1)
    if same_length:
        mask |= ones.tril(m - M - 1)
    return mask


def distance_encoding(K, D, clamp_len=0, device=None):
    near = min(K, clamp_len + 1) if clamp_len > 0 else K  # distances that are told apart
    R = lesson_1.sinusoid(torch.arange(near, device=device), D)
    return R[torch.arange(K - 1, -1, -1, device=device).clamp(max=near - 1)]


class RelativeAttention:
    def attend(self, q, k, value, k_R, u, v, mask):
        rel_shift = import_module("04_rel_shift").rel_shift
        B, H, T, C = q.shape
        q = q.transpose(1, 2)  # (B, T, H, C)
        score = torch.einsum("bihc,bhjc->bihj", q + u, k) + rel_shift(
            torch.einsum("bihc,hjc->bhij", q + v, k_R)).transpose(1, 2)
        score = score / C ** 0.5
        score = score.where(~mask[:, None], torch.tensor(-torch.inf, dtype=score.dtype))
        p = self.dropout_attention(F.softmax(score, dim=-1))  # (B, T, H, K)
        return torch.einsum("bihj,bhjc->bihc", p, value).reshape(B, T, H * C)


class Layer:
    def forward(self, h, memory, R, u, v, mask):
        made = self.attention(h, memory, R, u, v, mask)
        o = self.norm_1(self.dropout_output(made) + h)
        made = self.W_2(self.dropout_inner(self.W_1(o).clamp(min=0)))
        return self.norm_2(self.dropout_ff(made) + o)
