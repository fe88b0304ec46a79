"""SPOILERS.  A right solution of every exercise in an unusual form: row by row, head by head, one
number or one weight at a time."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


# ---- lesson 1 -----------------------------------------------------------------------------------

def lanes(tokens, B):
    if B < 1 or len(tokens) <= B:
        raise ValueError
    L = (len(tokens) - 1) // B
    table = tokens.new_empty(B, L + 1)
    for b in range(B):
        table[b] = tokens[b * L : b * L + L + 1]
    return table


def segments(stream, T, start=0):
    if T < 1:
        raise ValueError("T")
    t = start
    while t < stream.shape[1] - 1:
        y = stream[:, t + 1 : t + T + 1]
        yield stream[:, t : t + y.shape[1]].to(torch.int64), y.to(torch.int64)
        t += T


def sinusoid(position, D):
    if D % 2 == 1:
        raise ValueError("odd")
    table = position.new_zeros(len(position), D, dtype=torch.float64)
    for k in range(D // 2):
        angle = position.double() / 10000 ** (2 * k / D)
        table[:, k] = torch.sin(angle)
        table[:, D // 2 + k] = torch.sin(angle + math.pi / 2)
    return table


# ---- lesson 2 -----------------------------------------------------------------------------------

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
        return math.floor(first_seen(layers - 1) / T) * T - M if layers else T - 1
    return T - 1 - first_seen(N)


def stream_losses(model, x, y, T):
    memory, columns = None, []
    for t in range(0, x.shape[1], T):
        logits, memory = model(x[:, t : t + T], memory)
        columns += [lesson_1.token_losses(logits[:, i], y[:, t + i])
                    for i in range(logits.shape[1])]
    return torch.stack(columns, dim=1)


# ---- lessons 3 and 4 ----------------------------------------------------------------------------

def four_terms(q, k, R, W_kR, u, v):
    def dot(a, b):
        return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))

    T, K = len(q), len(k)
    table = np.full((4, T, K), math.nan)
    for i in range(T):
        for j in range(K - T + i + 1):
            r = [dot(row, R[i + K - T - j]) for row in W_kR]
            table[:, i, j] = dot(q[i], k[j]), dot(q[i], r), dot(u, k[j]), dot(v, r)
    return table


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    source = torch.tensor([[min(K - 1, j + T - 1 - i) for j in range(K)] for i in range(T)])
    return torch.take_along_dim(x, source.expand(x.shape), dim=-1)


def rel_shift(x):
    T = x.shape[-2]
    rows = [torch.cat([x[..., i, T - 1 - i :], 0 * x[..., i, : T - 1 - i]], -1) for i in range(T)]
    return torch.stack(rows, dim=-2)


# ---- lesson 5 -----------------------------------------------------------------------------------

def attention_mask(T, m, M, same_length, device=None):
    mask = torch.ones(T, m + T, dtype=torch.bool, device=device)
    for i in range(T):
        first = max(0, m + i - M) if same_length else 0
        mask[i, first : m + i + 1] = False
    return mask


def distance_encoding(K, D, clamp_len=0, device=None):
    limit = clamp_len if clamp_len > 0 else K
    distances = [min(limit, K - 1 - r) for r in range(K)]
    return lesson_1.sinusoid(torch.tensor(distances, device=device), D)


class RelativeAttention:
    def attend(self, q, k, value, k_R, u, v, mask):
        T, heads = len(mask), []
        for n in range(self.H):
            b = (q[:, n] + v[n]) @ k_R[n].mT  # (B, T, K)
            b = torch.stack([F.pad(b[:, i, T - 1 - i :], (0, T - 1 - i)) for i in range(T)], 1)
            score = ((q[:, n] + u[n]) @ k[:, n].mT + b) * self.C ** -0.5
            score = score.masked_fill(mask, -torch.inf)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            p = self.dropout_attention(weight / weight.sum(-1, keepdim=True))
            heads.append(p @ value[:, n])
        return torch.stack(heads, 2).reshape(len(q), T, -1)


class Layer:
    def forward(self, h, *past):
        attend = lambda z: self.dropout_output(self.attention(z, *past))
        feed = nn.Sequential(self.W_1, nn.ReLU(), self.dropout_inner, self.W_2, self.dropout_ff)
        for block, norm in ((attend, self.norm_1), (feed, self.norm_2)):
            h = norm(h + block(h))
        return h


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if top_k not in range(1, logits.shape[1] + 1) or not temperature > 0:
        raise ValueError("no such top_k or temperature")
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


# ---- train.py -----------------------------------------------------------------------------------

def train_step(model, optimizer, x, y, memory, recipe):
    optimizer.zero_grad(set_to_none=False)
    size, mean, new = recipe.micro_batch or len(x), 0.0, []
    for b in range(0, len(x), size):
        past = None if memory is None else [layer[b : b + size] for layer in memory]
        with ranks.no_sync(model, b + size >= len(x)):
            with machine.autocast(recipe, x.device.type):
                losses, part = model(x[b : b + size], past, y[b : b + size])
            (losses / y.numel()).sum().backward()
        mean += losses.sum().item() / y.numel()
        new.append(part)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    mean, norm = ranks.mean(mean), torch.stack([g.norm() for g in grads]).norm().item()
    if not (math.isfinite(mean) and math.isfinite(norm)):
        return mean, norm, memory
    for g in grads:
        g *= min(1.0, recipe.clip / (norm + 1e-6))
    optimizer.step()
    return mean, norm, [torch.cat(layers) for layers in zip(*new)]


def evaluate(model, tokens, recipe, label="evaluating"):
    device, memory, counted = model.u.device.type, None, []
    lane = lesson_1.lanes(tokens.to(model.u.device), 1)
    with torch.no_grad(), evaluating(model, recipe), machine.autocast(recipe, device):
        for x, y in lesson_1.segments(lane, recipe.eval_segment):
            losses, memory = model(x, memory=memory, y=y)
            counted.append(losses[0].double())
    return torch.cat(counted).mean().item()
