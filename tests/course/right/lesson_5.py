"""SPOILERS.  Right solutions of lesson 5 in an unusual form: row by row, head by head."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def attention_mask(T, m, M, same_length, device=None):
    mask = torch.ones(T, m + T, dtype=torch.bool, device=device)
    for i in range(T):
        first = max(0, m + i - M) if same_length else 0
        mask[i, first : m + i + 1] = False
    return mask


def distance_encoding(K, D, clamp_len=0, device=None):
    limit = clamp_len if clamp_len > 0 else K
    distances = [min(limit, K - 1 - r) for r in range(K)]
    return lesson_1.sinusoid(torch.tensor(distances, device=device), D)


class RelativeAttention:
    def attend(self, q, k, value, k_R, u, v, mask):
        T, K = mask.shape
        heads = []
        for n in range(self.H):
            a = (q[:, n] + u[n]) @ k[:, n].mT  # (B, T, K)
            b = (q[:, n] + v[n]) @ k_R[n].mT
            b = torch.stack([F.pad(b[:, i, T - 1 - i :], (0, T - 1 - i)) for i in range(T)], 1)
            score = ((a + b) * self.C ** -0.5).masked_fill(mask, -torch.inf)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            p = self.dropout_attention(weight / weight.sum(-1, keepdim=True))
            heads.append(p @ value[:, n])
        return torch.stack(heads, 2).reshape(len(q), T, -1)


class Layer:
    def forward(self, h, *past):
        attend = lambda z: self.dropout_output(self.attention(z, *past))
        feed = nn.Sequential(self.W_1, nn.ReLU(), self.dropout_inner, self.W_2, self.dropout_ff)
        for block, norm in ((attend, self.norm_1), (feed, self.norm_2)):
            h = norm(h + block(h))
        return h
