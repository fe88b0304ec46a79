"""SPOILERS.  Right solutions of lesson 4 in an unusual form: by index, by flat views."""
import torch


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    i = torch.arange(T, device=x.device).view(T, 1)
    j = torch.arange(K, device=x.device).view(1, K)
    return x[..., i, torch.minimum(j - i + T - 1, torch.tensor(K - 1))]


def rel_shift(x):
    T, K = x.shape[-2:]
    return x.flatten(-2)[..., T - 1 :].unfold(-1, K, max(1, K - 1))
