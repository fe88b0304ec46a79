"""The resources that a run needs, before it is started: bytes, floating-point operations."""
from pathlib import Path

import torch

from support.corpora import load
from support.download import SOURCES
from training import checkpoint, presets
from training.flags import adapt_to_vocabulary, choose_model
from training.optimizers import OPTIMIZERS


def flops_per_step(config, B, T):
    """Return the floating-point operations of a training step: three times its forward pass.

    These are the matrix products with a full memory, two operations for each multiply-add.  Masked
    cells count.  The projection of R, one for all lanes, does not, nor do the projections and the
    tails of an adaptive softmax: how many targets need them depends on the text.
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    products = B * T * D * HC + B * K * D * 2 * HC  # q; k and v
    products += 3 * B * T * K * HC  # scores by content, by position, and the sum of the values
    products += B * T * (HC * D + 2 * D * FF)  # W_o, W_1, W_2
    head = (*config.cutoffs, config.vocab_size)[0] + len(config.cutoffs)  # rows of the softmax
    return 6 * (config.n_layer * products + B * T * D * head)


def dry_run(flags, device):
    """Print the resources that a run needs: parameters, bytes, tokens, FLOPs -> exit status, 0."""
    name, config, recipe = choose_model(flags, device)
    if flags.out:
        checkpoint.find(Path(flags.out), resume=False)  # ValueError, as a new run's
    if flags.start:
        V = config.vocab_size
    elif recipe.dataset in SOURCES and not recipe.text:  # published, so nothing is downloaded
        V = SOURCES[recipe.dataset].vocab_size - recipe.drop_newlines
    else:
        V = len(load(recipe.text or recipe.dataset).vocab)
    config = adapt_to_vocabulary(config, V, flags)
    with torch.device("meta"):  # shapes, no values
        model = presets.lesson_5.TransformerXL(config)
    parameters, B, T = sum(W.numel() for W in model.parameters()), recipe.batch, recipe.segment
    moments = sum(W.numel() * (1 if group.get("kind") == "muon" else 2)  # Adam has two each
                  for group in OPTIMIZERS[recipe.optimizer](model, recipe).param_groups
                  for W in group["params"])
    memory = config.n_layer * B * config.mem_len * config.d_model
    flops = flops_per_step(config, B, T)
    steps = recipe.steps
    length = (f"{steps:,} ({steps * B * T:,} tokens, {flops * steps:.3g} FLOPs)" if steps else
              f"as many as {recipe.minutes} minutes give")
    print(f"{name} on {recipe.text or recipe.dataset}, vocabulary {config.vocab_size:,}\n"
          f"parameters       {parameters:,}\n"
          f"bytes            {4 * parameters:,} of weights, as many of gradients\n"
          f"                 {4 * moments:,} of {recipe.optimizer.title()}'s moments\n"
          f"                 {4 * memory:,} of the full memory, besides activations\n"
          f"                 {16 * parameters + 12 * (moments + memory):,} on disk during a save\n"
          f"tokens per step  {B * T:,} ({B} lanes of {T})\n"
          f"FLOPs            {flops:.3g} per step, {flops / (B * T):.3g} per token\n"
          f"steps            {length}")
    return 0
