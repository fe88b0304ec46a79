"""What several test files use: how to compare, and a loss in which every entry counts."""
import torch
import torch.nn as nn


def assert_close(found, wanted, message, tolerance=1e-12):
    assert found.shape == wanted.shape, (
        f"{message}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    worst = (found - wanted).abs().max().item()
    assert worst < tolerance, f"{message}: off by {worst:.1e}"  # NaN is off, too


def gradients(output, leaves):
    """Gradients of a loss in which every entry of the output has a weight of its own."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weight).sum(), leaves)


def randomized(model):
    """Float64, and every weight random: a norm that starts as the identity hides mistakes."""
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model.double()


def visible(T, M):
    """The cells that count, (T, M + T): key j is at most query i, which is key M + i."""
    seen = torch.tensor([[j <= M + i for j in range(M + T)] for i in range(T)])
    assert seen.sum() == T * M + T * (T + 1) // 2
    return seen
