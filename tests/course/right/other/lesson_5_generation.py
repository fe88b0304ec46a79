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
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if n_tokens < 0:
        raise ValueError("n_tokens")
    top_k = top_k or min(40, model.config.vocab_size)
    x, memory, mode = torch.atleast_2d(prompt), None, model.training
    out = x[:, :0]
    model.train(False)
    try:
        while out.shape[1] < n_tokens:
            logits, memory = model(x, memory)
            x = sample_top_k(logits[:, logits.shape[1] - 1], top_k, temperature, generator)
            out = torch.hstack([out, x])
    finally:
        model.train(mode)
    return out.view(*prompt.shape[:-1], n_tokens)
