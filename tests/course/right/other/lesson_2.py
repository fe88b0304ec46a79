"""SPOILERS.  Right solutions of lesson 2 in an unusual form: other cuts, own tensors in place."""
import torch


@torch.no_grad()
def update_memory(memory, h, M):
    from_h = min(M, h.shape[1])
    from_memory = min(M - from_h, memory.shape[1])
    old = memory.narrow(1, memory.shape[1] - from_memory, from_memory)
    return torch.cat([old, h.narrow(1, h.shape[1] - from_h, from_h)], dim=1)


def causal_mask(T, m, device=None):
    key = torch.arange(m + T, device=device)
    query = key[m:].clone()
    mask = key.new_ones(T, m + T).cumsum_(1)
    mask -= 1
    mask -= query.view(T, 1)
    return torch.einsum("ij->ij", mask.clamp_(0, 1)).bool()


def reach(N, T, M):
    start, tokens = 0, T - 1
    while N:
        N, before = N - 1, start - M
        tokens += M + before % T if N else M
        start = before - before % T
    return tokens


def stream_losses(model, x, y, T):
    found, memory, t = x.new_zeros(x.shape, dtype=torch.float64), None, 0
    while t < x.shape[1]:
        logits, memory = model(x[:, t : t + T], memory)
        p = logits.softmax(-1).gather(2, y[:, t : t + T].unsqueeze(2)).squeeze(2)
        found = found.index_copy(1, torch.arange(t, t + p.shape[1]), -p.log().double())
        t += T
    return found
