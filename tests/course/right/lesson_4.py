"""SPOILERS.  Right solutions of lesson 4 in an unusual form: row by row."""
import torch


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    source = torch.zeros(T, K, dtype=torch.int64)
    for i in range(T):
        for j in range(K):
            source[i, j] = min(K - 1, j + T - 1 - i)
    return torch.take_along_dim(x, source.expand(x.shape), dim=-1)


def rel_shift(x):
    T = x.shape[-2]
    rows = [torch.cat([x[..., i, T - 1 - i :], 0 * x[..., i, : T - 1 - i]], -1) for i in range(T)]
    return torch.stack(rows, dim=-2)
