"""What several test files use: how to compare, and a loss in which every entry counts."""
import doctest
import os
import signal
import time

import torch
import torch.nn as nn

from course.checks import seen_cells


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
    seen = seen_cells(T, M)
    assert seen.sum() == T * M + T * (T + 1) // 2
    return seen


def terms_by_distance(q, k, R, W_kR, u, v):
    """The four terms (4, B, H, T, K) of section 3.3, one distance after the other; future cells 0.

    Queries that are `d` tokens behind their key stand on one diagonal of the table.
    """
    (B, H, T, C), K = q.shape, k.shape[2]
    table = torch.zeros(4, B, H, T, K, dtype=q.dtype)
    for d in range(K):
        r = (W_kR * R[d]).sum(-1)[:, None]  # (H, 1, C): W_kR times the R of this distance
        queries = torch.arange(max(0, T - K + d), T)  # those that have a key so far back
        keys = queries + (K - T - d)
        q_d, k_d = q[:, :, queries], k[:, :, keys]  # (B, H, some, C)
        values = [q_d * k_d, q_d * r, u[:, None] * k_d, (v[:, None] * r).expand(q_d.shape)]
        table[..., queries, keys] = torch.stack(values).sum(-1)
    return table


def wait_until(true, what, seconds=60):
    """Wait for true() to be true; AssertionError, and what was waited for, if it never is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} seconds for {what}"
        time.sleep(0.01)


def exit_status(child, seconds=60):
    """The exit status of a forked child; killed, and an AssertionError, if it does not end."""
    ended = []

    def has_ended():
        number, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if number else [])
        return ended

    try:
        wait_until(has_ended, f"the end of process {child}", seconds)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ended[0]


def run_examples(lesson):
    """The worked examples in the docstrings are true; an error goes through as it is."""
    assert doctest.testmod(lesson, raise_on_error=True).attempted > 0
