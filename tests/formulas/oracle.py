"""SPOILERS.  Compute the models of lessons 1, 2, 3 and 5 from the paper's equations.

    log_p = read(model, x, lengths)      x (B, n), read in segments of these lengths

The code takes one query, one head and one key at a time, and nothing is shifted, masked or cached.
Hidden states of earlier segments are detached: this is the stop-gradient SG of section 3.2.  Only
the names of the weights come from the lessons.  If a dropout is replaced by stand_ins.Multiply, its
factor multiplies where the authors' code has the dropout.
"""
import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from course.oracles import normalized, unit_circle


def factor(part, dropout):
    """Return the factor of the Multiply that replaces a dropout, otherwise 1."""
    return getattr(getattr(part, dropout, None), "factor", 1)


def attended(part, rows, R, u, v):
    """Attend from the last of the rows (B, D) to all of them -> (B, D).  R[d] (D,) encodes distance
    d, and u and v are (H, C).  If u is None, no distances are used."""
    heads = []
    for a in range(part.H):
        own = slice(a * part.C, (a + 1) * part.C)  # the head's rows of each weight
        q, scores = rows[-1] @ part.W_q.weight[own].T, []
        for distance, row in zip(range(len(rows))[::-1], rows):
            if u is None:
                score = q * (row @ part.W_k.weight[own].T)
            else:
                k = row @ part.W_kE.weight[own].T
                r = R[distance] @ part.W_kR.weight[own].T
                score = q * k + q * r + u[a] * k + v[a] * r  # (a) + (b) + (c) + (d)
            scores.append(score.sum(-1, keepdim=True) / math.sqrt(part.C))
        weights = torch.stack(scores).exp()  # (K, B, 1)
        values = torch.stack(rows) @ part.W_v.weight[own].T  # (K, B, C)
        heads.append((weights * values).sum(0) / weights.sum(0))
    return factor(part, "dropout_attention") * torch.cat(heads, 1) @ part.W_o.weight.T


def transformed(layer, rows, *context):
    """Compute the layer's output for the last of the rows (B, D) that it attends to -> (B, D)."""
    W_1, W_2 = (layer.W_1, layer.W_2) if hasattr(layer, "W_1") else layer.feed_forward[::2]
    a, b, c = (factor(layer, f"dropout_{place}") for place in ("output", "inner", "ff"))
    h = normalized(rows[-1] + a * attended(layer.attention, rows, *context), layer.norm_1)
    inner = b * (h @ W_1.weight.T + W_1.bias).clamp(min=0)
    return normalized(h + c * (inner @ W_2.weight.T + W_2.bias), layer.norm_2)


def embeddings(words):
    """Return the table of all embeddings, (V, D)."""
    if isinstance(words, nn.Embedding):
        return words.weight
    return torch.cat([rows if project is None else rows @ project.T
                      for rows, project in zip(words.rows, words.project_in)])


def log_probabilities(words, h):
    """Compute the log-probability of every word after the states (B, n, D) -> (B, n, V)."""
    def softmax(rows, bias, project=None):
        powers = ((h if project is None else h @ project) @ rows.T + bias).exp()
        return powers / powers.sum(-1, keepdim=True)

    if isinstance(words, nn.Embedding):
        return softmax(words.weight, getattr(words, "bias", 0)).log()
    bias, *biases = words.bias.split([len(rows) for rows in words.rows])
    head = softmax(torch.cat([words.rows[0], words.tail_rows]), torch.cat([bias, words.tail_bias]),
                   words.project_out[0])
    p, *tails = head.split([len(bias)] + [1] * len(biases), -1)
    bands = zip(tails, words.rows[1:], biases, words.project_out[1:])
    return torch.cat([p, *(tail * softmax(*band) for tail, *band in bands)], -1).log()


def read(model, x, lengths):
    """Read x (B, n) -> log-probabilities (B, n, V)."""
    c = getattr(model, "config", None) or SimpleNamespace(
        mem_len=getattr(model, "M", 0), same_length=False, clamp_len=0, untie_r=False)
    starts = [sum(lengths[:s]) for s, T in enumerate(lengths) for _ in range(T)]  # of each token
    E, clamp = embeddings(model.embedding), c.clamp_len if c.clamp_len > 0 else len(starts)
    R = unit_circle([min(distance, clamp) for distance in range(len(starts))], E.shape[1])
    R, u, v = factor(model, "dropout_R") * R, None, None
    h = factor(model, "dropout_embedding") * math.sqrt(E.shape[1]) * E[x]
    if not hasattr(model, "u"):  # lessons 1 and 2: positions in the segment
        h = h + unit_circle([i - start for i, start in enumerate(starts)], E.shape[1])
    for n, layer in enumerate(model.layers):
        if hasattr(model, "u"):
            u, v = (bias.view(-1, *bias.shape[-2:])[n if c.untie_r else 0]
                    for bias in (model.u, model.v))
        states = []
        for i, start in enumerate(starts):
            first = max(0, (i if c.same_length else start) - c.mem_len)
            rows = [h[:, j].detach() if j < start else h[:, j] for j in range(first, i + 1)]
            states.append(transformed(layer, rows, R, u, v))
        h = torch.stack(states, 1)
    return log_probabilities(model.embedding, factor(model, "dropout_final") * h)
