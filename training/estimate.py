"""The resources that a run needs, before it is started: bytes, floating-point operations."""
import math

from support.corpora import load
from support.download import SOURCES
from training import presets
from training.flags import adapt_to_vocabulary, choose_model
from training.machine import choose_dtype


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


def bytes_of_run(config, parameters, B, T, dtype, at_a_time=0, optimizer="adam"):
    """Estimate the peak memory of training with B lanes on a GPU, in bytes -> {purpose: bytes}.

    Activations, of at_a_time lanes (0: all), are stored for the backward pass: the inputs of a
    matrix product, b bytes per element; the input of a norm and the result of a softmax, 4 bytes;
    the mask of a dropout, 1 byte.  A CPU and --plain need more; CUDA itself and gaps between
    tensors are not included.
    """
    N, D, FF, H, M = config.n_layer, config.d_model, config.d_inner, config.n_head, config.mem_len
    HC, K, lanes, b = H * config.d_head, M + T, at_a_time or B, 2 if dtype == "bf16" else 4
    mask, score_mask = config.dropout > 0, config.dropout_attention > 0  # 1 byte, or none
    layer = T * ((2 * b + 8 + 2 * mask) * D + 3 * b * HC)  # W_q, W_1, norms; q + u, q + v, W_o
    layer += T * (b + mask) * FF + K * b * (D + 2 * HC)  # W_2; [memory, h], keys, values
    again = b if score_mask or b == 2 else 0  # the softmax's result, dropped out or in 16 bits
    layer += H * T * K * (4 + score_mask + again)
    softmax = [4 * T * share * rows for _, rows, share in bands(config)]
    # Temporary tensors add the largest of: [memory, h], from which the new memories are sliced;
    # two gradients of the largest band of the softmax; three tensors like a layer's scores
    wide = K + 8 - K % 8  # of the positions' scores, in fast.py
    passing = max(4 * N * B * K * D, lanes * 2 * max(softmax), lanes * 4 * H * T * (2 * K + wide))
    activations, gradients = round(lanes * (N * layer + sum(softmax)) + passing), 4 * parameters
    if not at_a_time:  # a single backward pass frees activations as it makes gradients
        gradients = max(0, gradients - activations)
    weights = parameters * (14 if dtype == "bf16" else 12)  # bf16: and a copy
    if optimizer == "muon":  # stores one moment of its matrices, Adam two
        weights -= 4 * N * D * (5 * HC + 2 * FF)
    return {f"weights, moments of {optimizer.title()}": weights,
            "gradients, beyond what the activations leave free": gradients,
            "memories of the layers (hidden states), old and new": 8 * N * B * M * D,
            "activations": activations}


def dry_run(flags, device):
    """Print the resources that a run needs: size, memory, steps, operations -> exit status, 0."""
    name, config, recipe = choose_model(flags, device)
    if recipe.dataset in SOURCES and not recipe.text:  # published, so nothing is downloaded
        V = SOURCES[recipe.dataset].vocab_size - recipe.drop_newlines
    else:
        V = len(load(recipe.text or recipe.dataset).vocab)
    config = adapt_to_vocabulary(config, V, flags)
    parameters = presets.count_parameters(config)
    dtype = "float32" if (recipe.dtype, device) == ("auto", "cpu") else choose_dtype(
        recipe, config, device)
    B, T = recipe.batch, recipe.segment
    at_a_time = recipe.micro_batch if recipe.micro_batch < B else 0
    needs = bytes_of_run(config, parameters, B, T, dtype, at_a_time, recipe.optimizer)
    steps, flops = recipe.steps, flops_per_step(config, B, T)
    print(f"{name} on {recipe.text or recipe.dataset}, vocabulary {config.vocab_size:,}\n"
          f"parameters       {parameters:,}\n"
          f"memory needed    about {sum(needs.values()) / 1e9:.1f} GB at the peak, {dtype}; "
          "--micro-batch N takes less")
    for what, size in needs.items():
        print(f"                 {size / 1e9:6.2f} GB  {what}")
    print(f"tokens per step  {B * T:,} ({B} lanes of {T})\n"
          f"FLOPs            {flops:.3g} per step, {flops / (B * T):.3g} per token")
    if steps:
        print(f"steps            {steps:,} ({steps * B * T:,} tokens, {flops * steps:.3g} FLOPs)")
    else:
        print(f"steps            as many as {recipe.minutes} minutes give")
    return 0
