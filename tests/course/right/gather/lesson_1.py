"""SPOILERS.  Right solutions of lesson 1 in an unusual form: by index."""
import math

import torch


def lanes(tokens, B):
    if B < 1 or len(tokens) < B + 1:
        raise ValueError("too few tokens, or no lane")
    L = (len(tokens) - 1) // B
    index = torch.arange(B)[:, None] * L + torch.arange(L + 1)[None, :]
    return tokens[index.to(tokens.device)]


def segments(stream, T, start=0):
    if T < 1:
        raise ValueError("T")
    columns = torch.arange(start, stream.shape[1] - 1, device=stream.device)
    parts = columns.split(T) if len(columns) else ()
    return ((stream.index_select(1, part).long(), stream.index_select(1, part + 1).long())
            for part in parts)


def sinusoid(position, D):
    if D % 2:
        raise ValueError("odd")
    k = torch.arange(D // 2, device=position.device).double()
    frequency = torch.exp(k * (-2 * math.log(10000.0) / D))
    angle = torch.outer(position.to(torch.float64), frequency)
    return torch.hstack([torch.sin(angle), torch.cos(angle)])
