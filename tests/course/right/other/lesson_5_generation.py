"""SPOILERS.  Right generation in an unusual form: all tokens but the best at -inf, in place in a
tensor of its own; the longer text in one tensor.
"""
import torch


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if top_k < 1 or top_k > logits.shape[1]:
        raise ValueError("top_k")
    if not temperature > 0:
        raise ValueError("temperature")
    score = logits / temperature
    worst = score.topk(top_k).values[:, -1:]
    score.masked_fill_(score < worst, -torch.inf)
    return score.softmax(-1).multinomial(1, generator=generator)


@torch.inference_mode()
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    x, memory, out = prompt, None, prompt[:, :0]
    while out.shape[1] < n_tokens:
        logits, memory = model(x, memory)
        last = logits[:, logits.shape[1] - 1]
        x = sample_top_k(last, min(top_k, last.shape[-1]), temperature, generator)
        out = torch.hstack([out, x])
    return out
