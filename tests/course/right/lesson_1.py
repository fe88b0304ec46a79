"""SPOILERS.  Right solutions of lesson 1 in an unusual form: one piece, one column at a time."""
import math

import torch


def lanes(tokens, B):
    n = len(tokens)
    if B < 1 or n <= B:
        raise ValueError
    L = (n - 1) // B
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
        x = stream[:, t : t + y.shape[1]]
        yield x.to(torch.int64), y.to(torch.int64)
        t += T


def sinusoid(position, D):
    if D % 2 == 1:
        raise ValueError("odd")
    position = position.double()
    table = position.new_zeros(len(position), D)
    for k in range(D // 2):
        frequency = 1 / 10000 ** (2 * k / D)
        table[:, k] = torch.sin(position * frequency)
        table[:, D // 2 + k] = torch.sin(position * frequency + math.pi / 2)
    return table
