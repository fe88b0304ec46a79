"""SPOILERS.  Right solutions of lesson 2 in an unusual form: other cuts, own tensors in place."""
import torch


@torch.no_grad()
def update_memory(memory, h, M):
    from_h = min(M, h.shape[1])
    from_memory = min(M - from_h, memory.shape[1])
    old = memory.narrow(1, memory.shape[1] - from_memory, from_memory)
    return torch.cat([old, h.narrow(1, h.shape[1] - from_h, from_h)], dim=1)


def causal_mask(T, M, device=None):
    key = torch.arange(M + T, device=device)
    query = key[M:].clone()
    hidden = key.new_ones(T, M + T).cumsum_(1)
    hidden -= 1
    hidden -= query.view(T, 1)
    return torch.einsum("ij->ij", hidden.clamp_(0, 1)).bool()


def reach(N, T, M):
    start, tokens = 0, T - 1
    while N:
        N, before = N - 1, start - M
        tokens += M + before % T if N else M
        start = before - before % T
    return tokens


def gradient_into(model, x, y, T):
    inputs, largest = [], []
    def keep(module, args, out):
        out.retain_grad()
        inputs.append(out)
    handle = model.embedding.register_forward_hook(keep)
    try:
        losses = stream_losses(model, x, y, T)
    finally:
        handle.remove()
    losses[:, T : 2 * T].sum().backward()
    for h in inputs:
        largest.append(0.0 if h.grad is None else float(h.grad.abs().max()))
    return tuple(largest)
