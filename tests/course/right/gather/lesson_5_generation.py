"""SPOILERS.  Right generation in an unusual form: by rank and threshold, into one tensor."""
import torch


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if not (1 <= top_k <= logits.shape[1] and temperature > 0):
        raise ValueError("top_k or temperature")
    order = logits.argsort(dim=-1, descending=True)[:, :top_k]
    p = (logits.take_along_dim(order, -1) / temperature).softmax(-1)
    chance = torch.rand(len(logits), 1, generator=generator)
    place = (p.cumsum(-1) < chance).sum(-1, keepdim=True).clamp(max=top_k - 1)
    return order.take_along_dim(place, -1)


@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    new = torch.zeros(len(prompt), n_tokens, dtype=torch.int64, device=prompt.device)
    top_k = top_k if top_k < model.config.vocab_size else model.config.vocab_size
    read, memory = prompt, None
    for n in range(n_tokens):
        logits, memory = model(read, memory)
        read = sample_top_k(logits[:, -1, :], top_k, temperature, generator)
        new[:, n] = read[:, 0]
    return new
