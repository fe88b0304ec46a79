"""SPOILERS.  Correct solutions of the exercises, written differently from their lesson."""
import math

import numpy as np
import torch
import torch.nn as nn


def lanes(tokens, B):
    if B < 1 or len(tokens) <= B:
        raise ValueError
    L = (len(tokens) - 1) // B
    return tokens[: B * L + 1].unfold(0, L + 1, L)


def segments(stream, T, start=0):
    while start < stream.shape[1] - 1:
        both = stream[:, start : start + T + 1].long()
        yield both[:, :-1], both[:, 1:]
        start += T


def sinusoid(position, D):
    exponent = torch.linspace(0, 2 / D - 1, D // 2, dtype=torch.float64, device=position.device)
    angle = position.double().outer(10000**exponent)
    return torch.cat([angle, angle + math.pi / 2], dim=1).sin()


def update_memory(memory, h, M):
    return torch.cat([memory, h], dim=1).flip(1)[:, :M].flip(1).detach()


def stream_losses(model, x, y, T):
    memory, losses = None, []
    for t in range(0, x.shape[1], T):
        logits, memory = model(x=x[:, t : t + T], memory=memory)
        losses.append(nn.functional.cross_entropy(logits.mT, y[:, t : t + T], reduction="none"))
    return torch.cat(losses, dim=1)


def four_terms(q, k, R, W_kR, u, v):
    T, K = len(q), len(k)
    i, j = np.ogrid[K - T : K, :K]
    r = (R @ W_kR.T)[i - j]  # (T, K, C); a negative index counts from the end
    b, c = np.einsum("tc,tkc->tk", q, r), np.tile(k @ u, (T, 1))
    return np.where(i < j, math.nan, [q @ k.T, b, c, r @ v])


def rel_shift_by_index(x):
    T = x.shape[-2]
    rows = [torch.cat([x[..., i, T - 1 - i :], *[x[..., i, -1:]] * (T - 1 - i)], dim=-1)
            for i in range(T)]
    return torch.stack(rows, dim=-2)


def rel_shift(x):
    T, K = x.shape[-2:]
    return x.flatten(-2)[..., T - 1 :].unfold(-1, K, max(1, K - 1))


def distance_encoding(K, D, clamp_len=0, device=None):
    limit = clamp_len if clamp_len > 0 else K
    distances = [min(limit, K - 1 - r) for r in range(K)]
    return lesson_1.sinusoid(position=torch.tensor(distances, device=device), D=D)


class RelativeAttention:
    def attend(self, q, k, value, k_R, u, v, mask):
        a_and_c = torch.einsum("bhtc,bhkc->bhtk", q + u[:, None], k)
        b_and_d = lesson_4.rel_shift(x=torch.einsum("bhtc,hkc->bhtk", q + v[:, None], k_R))
        score = ((a_and_c + b_and_d) * self.C**-0.5).masked_fill(mask, -torch.inf)
        p = self.dropout_attention(input=(score - score.logsumexp(-1, keepdim=True)).exp())
        return torch.einsum("bhtk,bhkc->bthc", p, value).flatten(2)


class Layer:
    def forward(self, h, memory, R, u, v, mask):
        attend = lambda z: self.dropout_output(
            self.attention(h=z, memory=memory, R=R, u=u, v=v, mask=mask))
        relu = type(self.relu)()  # not the layer's own module
        feed = nn.Sequential(self.W_1, relu, self.dropout_inner, self.W_2, self.dropout_ff)
        for block, norm in ((attend, self.norm_1), (feed, self.norm_2)):
            h = norm(input=h + block(h))
        return h


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    order = logits.double().argsort(descending=True)
    best = logits.double().gather(1, order) / temperature
    weights = (best - best[:, :1]).exp()
    weights[:, top_k:] = 0
    return order.gather(1, torch.multinomial(weights, 1, generator=generator))


def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    top_k, new = min(top_k, model.config.vocab_size), []
    with torch.no_grad():
        logits, memory = model(prompt)
        for _ in range(n_tokens):
            new.append(sample_top_k(logits=logits[:, -1], top_k=top_k, temperature=temperature,
                                    generator=generator))
            logits, memory = model(x=new[-1], memory=memory, y=None, last_only=True)
    return torch.cat(new, 1) if new else prompt[:, :0]


def train_step(model, optimizer, x, y, memory, recipe):
    optimizer.zero_grad(set_to_none=False)
    mean, new = 0.0, []
    for b in range(0, len(x), recipe.micro_batch or len(x)):
        part = slice(b, b + (recipe.micro_batch or len(x)))
        past = None if memory is None else [layer[part] for layer in memory]
        with machine.autocast(recipe=recipe, device=x.device.type):
            losses, after = model(x=x[part], memory=past, y=y[part])
            (losses / y.numel()).sum().backward()
        mean += losses.sum().item() / y.numel()
        new.append(after)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in grads]).norm().item()
    if not math.isfinite(norm):
        return mean, norm, memory
    for g in grads:
        g *= min(1.0, recipe.clip / (norm + 1e-6))
    optimizer.step()
    return mean, norm, [torch.cat(layers) for layers in zip(*new)]


def evaluate(model, tokens, recipe, label="evaluating"):
    device, memory, losses = model.u.device, None, []
    lane, T = lesson_1.lanes(tokens=tokens.to(device), B=1), evaluation_segment_length(recipe)
    block = machine.autocast(recipe=recipe, device=device.type)
    with torch.no_grad(), evaluating(model=model, recipe=recipe), block:
        parts = lesson_1.segments(stream=lane, T=T, start=0)
        for x, y in progress(items=parts, label=label, total=None, size=None):
            loss, memory = model(x=x, memory=memory, y=y, last_only=False)
            losses.append(loss[0].double())
    return torch.cat(losses).mean().item()
