"""SPOILERS.  Right solutions of lesson 2 in an unusual form: row by row, layer by layer."""
import torch


def update_memory(memory, h, M):
    old, new = memory.shape[1], h.shape[1]
    kept = h.new_empty(h.shape[0], min(M, old + new), h.shape[2]).detach()
    with torch.no_grad():
        for row in range(1, kept.shape[1] + 1):
            kept[:, -row] = h[:, -row] if row <= new else memory[:, new - row]
    return kept


def causal_mask(T, M, device=None):
    mask = torch.zeros(T, M + T, dtype=torch.bool, device=device)
    for i in range(T):
        mask[i, M + i + 1 :] = True
    return mask


def reach(N, T, M):
    def first_seen(layers):
        if layers == 0:
            return T - 1
        return math.floor(first_seen(layers - 1) / T) * T - M
    return T - 1 - first_seen(N)


def gradient_into(model, x, y, T):
    embedded, losses, memory = [], [], None
    def catch(module, args, out):
        embedded.append(out)
    for t in range(0, x.shape[1], T):
        handle = model.embedding.register_forward_hook(catch)
        logits, memory = model(x[:, t : t + T], memory)
        handle.remove()
        losses.append(token_losses(logits, y[:, t : t + T]).sum())
    largest = []
    for h in embedded:
        slope, = torch.autograd.grad(losses[1], h, retain_graph=True, allow_unused=True)
        largest.append(0.0 if slope is None else slope.abs().max().item())
    return largest
