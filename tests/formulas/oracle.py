"""SPOILERS.  Compute the models of lessons 1, 2, 3 and 5 from the paper's equations.

    log_p = read(model, x, lengths)      x (B, n), read in segments of these lengths

The code takes one query, one head and one key at a time, and nothing is shifted, masked or cached.
Hidden states of earlier segments are detached: this is the stop-gradient SG of section 3.2.  Only
the names of the weights come from the lessons.  If a dropout is replaced by stand_ins.Multiply, its
factor multiplies where the authors' code has the dropout.  The score and the layer are in
course/oracles.py, which the rules also use.
"""
import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from course import oracles
from course.oracles import factor, unit_circle


def attended(part, rows, R, u, v):
    """Attend from the last of the rows (B, D) to all of them -> (B, D).  R[d] (D,) encodes distance
    d, and u and v are (H, C).  In lessons 1 and 2 there is no W_kR: distances have no keys."""
    W_k = getattr(part, "W_kE", None) or part.W_k
    W_kR = getattr(part, "W_kR", None)
    heads = []
    for a in range(part.H):
        own = slice(a * part.C, (a + 1) * part.C)  # the head's rows of each weight
        q = rows[-1] @ part.W_q.weight[own].T
        keys = []
        for distance, row in zip(range(len(rows))[::-1], rows):
            k_R = R[distance] @ W_kR.weight[own].T if W_kR else 0
            keys.append((row @ W_k.weight[own].T, k_R, row @ part.W_v.weight[own].T))
        heads.append(oracles.attend(q, keys, u[a], v[a]))
    return factor(part, "dropout_attention") * torch.cat(heads, 1) @ part.W_o.weight.T


def embeddings(words):
    """Return the table of all embeddings, (V, D)."""
    if isinstance(words, nn.Embedding):
        return words.weight
    return torch.cat([rows if project is None else rows @ project.T
                      for rows, project in zip(words.rows, words.project_in)])


def log_probabilities(words, h):
    """Compute the log-probability of every word after the states (B, n, D) -> (B, n, V)."""
    def softmax(rows, bias, project=None):
        return ((h if project is None else h @ project) @ rows.T + bias).softmax(-1)

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
    E = embeddings(model.embedding)
    clamp = c.clamp_len if c.clamp_len > 0 else len(starts)
    R = unit_circle([min(distance, clamp) for distance in range(len(starts))], E.shape[1])
    R = factor(model, "dropout_R") * R
    h = factor(model, "dropout_embedding") * math.sqrt(E.shape[1]) * E[x]
    if not hasattr(model, "u"):  # lessons 1 and 2: positions in the segment
        h = h + unit_circle([i - start for i, start in enumerate(starts)], E.shape[1])
    for n, layer in enumerate(model.layers):
        u = v = [0] * layer.attention.H
        if hasattr(model, "u"):
            u, v = (bias.view(-1, *bias.shape[-2:])[n if c.untie_r else 0]
                    for bias in (model.u, model.v))
        states = []
        for i, start in enumerate(starts):
            first = max(0, (i if c.same_length else start) - c.mem_len)
            rows = [h[:, j].detach() if j < start else h[:, j] for j in range(first, i + 1)]
            states.append(oracles.layer(layer, rows[-1], attended(layer.attention, rows, R, u, v)))
        h = torch.stack(states, 1)
    return log_probabilities(model.embedding, factor(model, "dropout_final") * h)
