"""The resources that a run needs, before it is started: bytes, floating-point operations."""
import math

from support.corpora import load
from support.download import SOURCES
from training import presets
from training.flags import adapt_to_vocabulary, choose_model


def bands(config):
    """Yield the width, rows and share of the targets of each band of the (adaptive) softmax.

    A word's frequency is assumed to be proportional to 1 / rank (Zipf); all targets need the head.
    """
    V, tails = config.vocab_size, config.cutoffs
    yield config.d_model, (*tails, V)[0] + len(tails), 1
    for i, (first, end) in enumerate(zip(tails, (*tails[1:], V)), 1):
        yield config.d_model // config.div_val**i, end - first, math.log(end / first) / math.log(V)


def flops_per_step(config, B, T):
    """Return the floating-point operations of a training step: three times its forward pass.

    These are the matrix products with a full memory, two operations for each multiply-add: per
    token and layer 2 (2 D HC + 2 D FF + (K/T) 2 D HC + 3 K HC).  Masked cells count; the projection
    of R, one for all lanes, does not.
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    products = B * T * D * HC + B * K * D * 2 * HC  # q; k and v
    products += 3 * B * T * K * HC  # scores by content, by position, and the sum of the values
    products += B * T * (HC * D + 2 * D * FF)  # W_o, W_1, W_2
    project = 2 * D if config.div_val > 1 else 0  # into a band and out of it
    softmax = sum(share * width * (rows + project) for width, rows, share in bands(config))
    return round(6 * (config.n_layer * products + B * T * softmax))


def dry_run(flags, device):
    """Print the resources that a run needs: size, bytes, tokens, operations -> exit status, 0.

    The bytes are exact, but those of activations are missing: they depend on machine and dtype.
    """
    name, config, recipe = choose_model(flags, device)
    if flags.start:
        V = config.vocab_size
    elif recipe.dataset in SOURCES and not recipe.text:  # published, so nothing is downloaded
        V = SOURCES[recipe.dataset].vocab_size - recipe.drop_newlines
    else:
        V = len(load(recipe.text or recipe.dataset).vocab)
    config = adapt_to_vocabulary(config, V, flags)
    parameters, B, T = presets.count_parameters(config), recipe.batch, recipe.segment
    moments = 2 * parameters  # of Adam; Muon has one of its matrices
    if recipe.optimizer == "muon":
        D, HC = config.d_model, config.n_head * config.d_head
        moments -= config.n_layer * D * (5 * HC + 2 * config.d_inner)
    memory = config.n_layer * B * config.mem_len * config.d_model
    flops = flops_per_step(config, B, T)
    length = f"as many as {recipe.minutes} minutes give"
    if steps := recipe.steps:
        length = f"{steps:,} ({steps * B * T:,} tokens, {flops * steps:.3g} FLOPs)"
    print(f"{name} on {recipe.text or recipe.dataset}, vocabulary {config.vocab_size:,}\n"
          f"parameters       {parameters:,}\n"
          f"bytes            {4 * parameters:,} of weights, as many of gradients\n"
          f"                 {4 * moments:,} of {recipe.optimizer.title()}'s moments\n"
          f"                 {4 * memory:,} of the full memory\n"
          "                 and those of activations, fewer with --micro-batch\n"
          f"tokens per step  {B * T:,} ({B} lanes of {T})\n"
          f"FLOPs            {flops:.3g} per step, {flops / (B * T):.3g} per token\n"
          f"steps            {length}")
    return 0
