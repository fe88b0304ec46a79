"""SPOILERS.  Right solutions of lesson 1 in an unusual form: views, complex numbers."""
import torch


def lanes(tokens, B):
    L = (len(tokens) - 1) // max(B, 1)
    if B < 1 or L < 1:
        raise ValueError(f"{len(tokens)} tokens do not fill {B} lanes")
    return tokens.unfold(0, L + 1, L)[:B]


def segments(stream, T, start=0):
    if not T > 0:
        raise ValueError(T)
    both = torch.stack([stream[:, :-1], stream[:, 1:]]).long()[..., start:]
    if not both.numel():
        return iter(())
    return iter([tuple(part) for part in both.split(T, dim=-1)])


def sinusoid(position, D):
    if D & 1:
        raise ValueError(f"{D}")
    frequency = torch.logspace(0, 2 / D - 1, D // 2, base=10000, dtype=torch.float64)
    angle = torch.einsum("n,k->nk", position.double(), frequency.to(position.device))
    wave = torch.polar(torch.ones_like(angle), angle)
    table = torch.stack([wave.imag, wave.real], dim=1)  # (n, 2, D/2)
    return table.flatten(1)
