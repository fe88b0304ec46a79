"""SPOILERS.  Right solutions of lesson 4 in an unusual form: own tensors in place."""
import torch


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    columns = torch.arange(K, device=x.device).repeat(T, 1)
    columns += torch.arange(T - 1, -1, -1, device=x.device)[:, None]
    columns.clamp_(max=K - 1)
    flat = x.reshape(-1, T, K)
    return torch.stack([matrix.gather(1, columns) for matrix in flat]).reshape(x.shape)


def rel_shift(x):
    T, K = x.shape[-2:]
    flat = torch.cat([x.new_zeros(*x.shape[:-1], 1), x], dim=-1).flatten(-2)
    return flat[..., T:].unflatten(-1, (T, K))
