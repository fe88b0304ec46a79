"""SPOILERS.  Right solutions of lesson 2 in an unusual form: by index, triu and autograd.grad."""
import torch


def update_memory(memory, h, M):
    rows = torch.cat([memory.detach(), h.detach()], dim=1)
    n = rows.shape[1]
    newest = torch.arange(n, device=h.device)[n - min(n, M) :]
    return rows.index_select(1, newest)


def causal_mask(T, M, device=None):
    return torch.ones(T, M + T, dtype=torch.bool, device=device).triu(1 + M)


def reach(N, T, M):
    token = T - 1
    for _ in range(N):
        token = token - token % T - M
    return T - 1 - token


def gradient_into(model, x, y, T):
    inputs = []
    with model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out)):
        losses = stream_losses(model, x, y, T)
    second = losses.split(T, dim=1)[1]
    found = torch.autograd.grad(second.sum(), inputs, allow_unused=True, materialize_grads=True)
    return [max(g.max().item(), -g.min().item()) for g in found]
