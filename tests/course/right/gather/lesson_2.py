"""SPOILERS.  Right solutions of lesson 2 in an unusual form: by index, triu and gather."""
import torch


def update_memory(memory, h, M):
    rows = torch.cat([memory.detach(), h.detach()], dim=1)
    n = rows.shape[1]
    newest = torch.arange(n, device=h.device)[n - min(n, M) :]
    return rows.index_select(1, newest)


def causal_mask(T, m, device=None):
    return torch.ones(T, m + T, dtype=torch.bool, device=device).triu(1 + m)


def reach(N, T, M):
    token = T - 1
    for _ in range(N):
        token = token - token % T - M
    return T - 1 - token


def stream_losses(model, x, y, T):
    memory, logits = None, []
    for segment in x.split(T, 1):
        part, memory = model(segment, memory)
        logits.append(part)
    return -torch.cat(logits, 1).log_softmax(-1).gather(-1, y[..., None])[..., 0]
