"""SPOILERS.  Right solutions of lesson 2 in an unusual form: row by row, layer by layer."""
import torch


def update_memory(memory, h, M):
    old, new = memory.shape[1], h.shape[1]
    kept = h.new_empty(h.shape[0], min(M, old + new), h.shape[2]).detach()
    with torch.no_grad():
        for row in range(1, kept.shape[1] + 1):
            kept[:, -row] = h[:, -row] if row <= new else memory[:, new - row]
    return kept


def causal_mask(T, m, device=None):
    mask = torch.zeros(T, m + T, dtype=torch.bool, device=device)
    for i in range(T):
        mask[i, m + i + 1 :] = True
    return mask


def reach(N, T, M):
    def first_seen(layers):
        if layers == 0:
            return T - 1
        return math.floor(first_seen(layers - 1) / T) * T - M
    return T - 1 - first_seen(N)


def stream_losses(model, x, y, T):
    def read(t, memory):
        if t >= x.shape[1]:
            return []
        logits, memory = model(x[:, t : t + T], memory)
        targets = y[:, t : t + T]
        columns = [lesson_1.token_losses(logits[:, i], targets[:, i]) for i in range(
            targets.shape[1])]
        return columns + read(t + T, memory)
    return torch.stack(read(0, None), dim=1)
