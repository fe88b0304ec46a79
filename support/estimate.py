"""What a run will take: bytes, floating-point operations, hours; before it is started."""
import math
import os
from contextlib import contextmanager
from dataclasses import replace

import torch

from support import distributed

# of the published corpora, so that --dry-run reads no data
VOCABULARY = {"enwik8": 205, "text8": 27, "wt103": 267_735, "lm1b": 793_471, "ptb": 10_000,
              "wikitext-2": 33_278}


def flops_per_step(config, B, T):
    """Floating-point operations of one training step: three times those of its forward pass.

    Counted are the matrix products, two for each multiplication and addition, with a full memory:
    for one token and layer 2 (2 D HC + 2 D FF + (K/T) 2 D HC + 3 K HC).  Cells that the mask hides
    are in it; the projection of R, one for all lanes, is not.  For the adaptive softmax the targets
    are taken to be as rare as 1 / rank (Zipf).
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    products = B * T * D * HC + B * K * D * 2 * HC  # q; k and v
    products += 3 * B * T * K * HC  # scores by content, by position, and the sum of the values
    products += B * T * (HC * D + 2 * D * FF)  # W_o, W_1, W_2
    edges = (0, *config.cutoffs, config.vocab_size)
    softmax = 0  # multiplications for one token
    for i, (first, end) in enumerate(zip(edges, edges[1:])):
        width = D // config.div_val**i
        share = math.log(end / first) / math.log(config.vocab_size) if i else 1  # of the targets
        rows = end - first if i else end + len(config.cutoffs)
        softmax += share * width * (rows + (2 * D if config.div_val > 1 else 0))
    return round(6 * (config.n_layer * products + B * T * softmax))


def bytes_of_run(config, parameters, B, T, dtype, at_a_time=0):
    """Estimate of the largest memory in training with B lanes, in bytes, by what it is for.

    Activations are what the backward pass needs of the lanes that are read at a time (0: all), and
    one layer's scores while they are made; bf16 is taken to save a third of them (the tests see 20
    to 40 percent) and copies the weights.
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    dropped = 1.25 * (config.dropout > 0)  # what dropout returns, and its mask of 1 byte
    layer = T * ((4 + 2 * dropped) * D + 3 * HC + (1 + dropped) * FF) + K * (D + 2 * HC)
    layer += config.n_head * T * K * (1 + 1.25 * (config.dropout_attention > 0))
    head = config.cutoffs[0] if config.cutoffs else config.vocab_size
    activations = config.n_layer * layer + 3 * T * head + 3 * config.n_head * T * K
    return {"weights, gradients, two moments of Adam": parameters * (18 if dtype == "bf16" else 16),
            "memory of the layers, old and new": 8 * config.n_layer * B * config.mem_len * D,
            "activations": round(4 * (at_a_time or B) * activations
                                 * (2 / 3 if dtype == "bf16" else 1))}


def vocabulary(run, config):
    """The vocabulary size to count with: the published one, or for other texts config's."""
    if run.text:
        return config.vocab_size
    if run.dataset not in ("stdlib", *VOCABULARY):
        raise ValueError(f"unknown dataset {run.dataset!r}, known are "
                         f"{', '.join(['stdlib', *VOCABULARY])}")
    if run.dataset not in VOCABULARY:
        return config.vocab_size
    return VOCABULARY[run.dataset] - run.drop_newlines


def report(name, config, run, count_parameters, device, speed=None):
    """Print what a run will take: size, memory, steps, operations and, given tokens/s, hours.

    Returns the exit status, 0.
    """
    config = replace(config, vocab_size=vocabulary(run, config))
    parameters = count_parameters(config)
    if speed is not None and not speed > 0:
        raise ValueError(f"--tokens-per-second must be above 0, got {speed}")
    dtype = run.dtype if run.dtype != "auto" else "bf16" if device == "cuda" else "float32"
    B, T = run.batch, run.segment
    needs = bytes_of_run(config, parameters, B, T, dtype, run.micro_batch)
    steps, flops = run.steps or math.ceil(run.tokens / (B * T)), flops_per_step(config, B, T)
    if run.minutes and speed:
        steps = int(60 * run.minutes * speed / (B * T))
    print(f"{name} on {run.text or run.dataset}, vocabulary {config.vocab_size:,}\n"
          f"parameters       {parameters:,}\n"
          f"memory           about {sum(needs.values()) / 1e9:.1f} GB, {dtype}")
    for what, size in needs.items():
        print(f"                 {size / 1e9:6.2f} GB  {what}")
    print(f"tokens per step  {B * T:,} ({B} lanes of {T})\n"
          f"steps            {f'{steps:,}' if steps else f'as many as {run.minutes} minutes give'}"
          f"{f' ({steps * B * T:,} tokens)' if steps else ''}\n"
          f"FLOPs            {flops:.3g} a step, {flops / (B * T):.3g} a token"
          f"{f', {flops * steps:.3g} in all' if steps else ''}")
    if speed:
        hours = steps * B * T / speed / 3600
        print(f"hours            {hours:,.1f} at {speed:,.0f} tokens/s, "
              f"which are {flops / (B * T) * speed / 1e12:.3g} TFLOP/s")
    else:
        print("hours            name a speed with --tokens-per-second")
    return 0


def check_weights_fit(parameters):
    """ValueError if weights, gradients and moments are more than the memory of this machine."""
    if hasattr(os, "sysconf"):
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 16 * parameters > room:
            raise ValueError(f"a model of {parameters:,} parameters takes "
                             f"{16 * parameters / 1e9:,.0f} GB, more than this machine has; "
                             "--dry-run says how much of what")


@contextmanager
def what_would_fit(config, model, run):
    """If the block, a training step, is out of memory: ValueError with what takes less."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError(too_large(config, model, run)) from None


def too_large(config, model, run):
    """What to say when a training step does not fit into the memory of a GPU."""
    device, parameters = model.u.device, sum(p.numel() for p in model.parameters())
    B = run.batch // distributed.COUNT
    size = min(run.micro_batch or B, B)
    room = torch.cuda.get_device_properties(device).total_memory if model.u.is_cuda else 0

    def gigabytes(n):
        needs = bytes_of_run(config, parameters, B, run.segment, run.dtype, n)
        return sum(needs.values()) / 1e9

    said = (f"out of memory with {size} lanes at a time, which need about {gigabytes(size):.1f} "
            "GB; ")
    if size == 1:
        return said + "a shorter --segment or a smaller model may fit"
    fits = [n for n in range(1, size) if gigabytes(n) < 0.9e-9 * room] or [max(1, size // 2)]
    return said + (f"--micro-batch {fits[-1]} needs about {gigabytes(fits[-1]):.1f} GB and gives "
                   "the same result, up to the draws of dropout")
