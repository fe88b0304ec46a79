"""SPOILERS.  Right generation in an unusual form: row by row; the prompt before the loop."""
import torch


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if top_k not in range(1, logits.shape[1] + 1):
        raise ValueError("no such top_k")
    if not temperature > 0:
        raise ValueError("no such temperature")
    tokens = []
    for row in logits.double():
        kept = row.sort(descending=True).indices[:top_k]
        weights = torch.exp((row[kept] - row.max()) / temperature)
        tokens.append(kept[torch.multinomial(weights, 1, generator=generator)])
    return torch.stack(tokens)


def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    top_k, new = min(top_k, model.config.vocab_size), []
    with torch.no_grad():
        logits, memory = model(prompt)
        for _ in range(n_tokens):
            new.append(sample_top_k(logits[:, -1], top_k, temperature, generator))
            logits, memory = model(new[-1], memory=memory)
    return torch.cat(new, 1) if new else prompt[:, :0]
