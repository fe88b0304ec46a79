"""The resources that a run needs, before it is started: bytes, floating-point operations."""
import math

from support.corpora import load
from support.download import SOURCES
from training import presets
from training.flags import for_vocabulary, chosen


def bands(config):
    """Width, rows and share of the targets of each band of the softmax (adaptive_softmax.py; else
    one for all); targets are taken to be as rare as 1 / rank (Zipf), and all ask the head.
    """
    V, tails = config.vocab_size, config.cutoffs
    yield config.d_model, (*tails, V)[0] + len(tails), 1
    for i, (first, end) in enumerate(zip(tails, (*tails[1:], V)), 1):
        yield config.d_model // config.div_val**i, end - first, math.log(end / first) / math.log(V)


def flops_per_step(config, B, T):
    """Floating-point operations of one training step: three times those of its forward pass.

    Counted are the matrix products, two for each multiplication and addition, with a full memory:
    for one token and layer 2 (2 D HC + 2 D FF + (K/T) 2 D HC + 3 K HC).  Cells that the mask hides
    are in it; the projection of R, one for all lanes, is not.
    """
    D, FF, HC, K = config.d_model, config.d_inner, config.n_head * config.d_head, config.mem_len + T
    products = B * T * D * HC + B * K * D * 2 * HC  # q; k and v
    products += 3 * B * T * K * HC  # scores by content, by position, and the sum of the values
    products += B * T * (HC * D + 2 * D * FF)  # W_o, W_1, W_2
    project = 2 * D if config.div_val > 1 else 0  # into a band and out of it
    softmax = sum(share * width * (rows + project) for width, rows, share in bands(config))
    return round(6 * (config.n_layer * products + B * T * softmax))


def bytes_of_run(config, parameters, B, T, dtype, at_a_time=0, optimizer="adam"):
    """Estimate the most that training with B lanes holds on a GPU, in bytes, by what it is for.

    Activations, of the lanes that are read at a time (0: all), are what their backward pass needs:
    of a matrix product its inputs, b bytes a number; of a norm its input and of a softmax its
    result, 4 bytes; of a dropout a mask, 1 byte.  An estimate: a CPU and --plain hold more, and
    CUDA itself and gaps between tensors are not in it.
    """
    N, D, FF, H, M = config.n_layer, config.d_model, config.d_inner, config.n_head, config.mem_len
    HC, K, lanes, b = H * config.d_head, M + T, at_a_time or B, 2 if dtype == "bf16" else 4
    mask, score_mask = config.dropout > 0, config.dropout_attention > 0  # 1 byte, or none
    layer = T * ((2 * b + 8 + 2 * mask) * D + 3 * b * HC)  # W_q, W_1, norms; q + u, q + v, W_o
    layer += T * (b + mask) * FF + K * b * (D + 2 * HC)  # W_2; [memory, h], keys, values
    again = b if score_mask or b == 2 else 0  # the softmax's result, dropped out or in 16 bits
    layer += H * T * K * (4 + score_mask + again)
    softmax = [4 * T * share * rows for _, rows, share in bands(config)]
    # Beside them comes and goes the largest of: [memory, h], from which the new memories are cut;
    # two gradients of the largest band of the softmax; three tensors like the scores of a layer.
    passing = max(4 * N * B * K * D, lanes * 2 * max(softmax), lanes * 12 * H * T * K)
    activations, gradients = round(lanes * (N * layer + sum(softmax)) + passing), 4 * parameters
    if not at_a_time:  # in a single backward pass gradients come as activations go
        gradients = max(0, gradients - activations)
    weights = parameters * (14 if dtype == "bf16" else 12)  # bf16: and a copy
    if optimizer == "muon":  # has one moment of its matrices where Adam has two
        weights -= 4 * N * D * (5 * HC + 2 * FF)
    return {f"weights, moments of {optimizer.title()}": weights,
            "gradients, beyond what the activations leave free": gradients,
            "memories of the layers (hidden states), old and new": 8 * N * B * M * D,
            "activations": activations}


def vocabulary(recipe):
    """Return the vocabulary size: of a benchmark, which is not fetched, the published one; any
    other text is read.
    """
    if recipe.dataset in SOURCES and not recipe.text:
        return SOURCES[recipe.dataset].vocab_size - recipe.drop_newlines
    return len(load(recipe.text or recipe.dataset).vocab)


def dry_run(flags, device):
    """Print the resources that a run needs: size, memory, steps, operations -> exit status, 0."""
    name, config, recipe = chosen(flags, device)
    config = for_vocabulary(config, vocabulary(recipe), flags)
    parameters = presets.count_parameters(config)
    dtype = recipe.dtype if recipe.dtype != "auto" else "bf16" if device == "cuda" else "float32"
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
          f"FLOPs            {flops:.3g} a step, {flops / (B * T):.3g} a token")
    if steps:
        print(f"steps            {steps:,} ({steps * B * T:,} tokens, {flops * steps:.3g} FLOPs)")
    else:
        print(f"steps            as many as {recipe.minutes} minutes give")
    return 0
