"""SPOILERS.  Right solutions of lesson 5 in an unusual form."""
import math

from importlib import import_module

import torch


def attention_mask(T, m, M, same_length, device=None):
    ahead = torch.arange(m + T, device=device).repeat(T, 1)
    ahead -= torch.arange(m, m + T, device=device)[:, None]  # key minus query
    least = -M if same_length else -(m + T)
    return (ahead > 0).logical_or_(ahead < least)


def distance_encoding(K, D, clamp_len=0, device=None):
    near = min(K, clamp_len + 1) if clamp_len > 0 else K  # distances that are told apart
    R = lesson_1.sinusoid(torch.arange(near - 1, -1, -1, device=device), D)
    return torch.cat([R[:1].expand(K - near, D), R])


class RelativeAttention:
    def attend(self, q, k, value, k_R, u, v, mask):
        lesson_4, heads = import_module("04_rel_shift"), []
        for n, (q_n, k_n, value_n) in enumerate(zip(q.unbind(1), k.unbind(1), value.unbind(1))):
            one = slice(n, n + 1)
            score = lesson_4.relative_score(q_n[:, None], k_n[:, None], k_R[one], u[one], v[one])
            score = score.squeeze(1).transpose(1, 2).div_(math.sqrt(self.C))  # (B, K, T)
            score.masked_fill_(mask.T, float("-inf"))
            p = self.dropout_attention(score.softmax(1))
            heads.append(torch.einsum("bkt,bkc->btc", p, value_n))
        return torch.cat(heads, dim=-1)


class Layer:
    def forward(self, h, memory, R, u, v, mask):
        for block in 1, 2:
            made = self.attention(h, memory, R, u, v, mask) if block == 1 else self.W_1(h).relu_()
            made = self.W_2(self.dropout_inner(made)) if block == 2 else made
            drop = self.dropout_output if block == 1 else self.dropout_ff
            norm = self.norm_1 if block == 1 else self.norm_2
            h = norm(torch.add(h, drop(made)))
        return h
