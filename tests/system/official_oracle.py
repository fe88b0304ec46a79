"""An oracle for the layout of the official Transformer-XL weights: NumPy, plain loops, no tricks.

`random_state` draws a state dict in the layout of the official PyTorch code or of its retired
port; `losses` reads token streams with one. The model is that of Dai et al. 2019, section 3.3,
written once more from the formulas: every score is four small dot products. It is slow, and meant
for sizes such as N = 2 layers, D = 8, V = 30. Everything is computed in float64.

Letters: B lanes, T positions of a segment, M memory rows, K = M + T keys, N layers, H heads of
width C, D model width, V vocabulary; u, v the two global biases, R the sinusoid of a distance.
d_embed = D throughout. `cutoffs` are the inner borders of the bands (neither 0 nor V).
"""

import math

import numpy as np


def full_name(name, port):
    """The key of `name` in the state dict: the port prefixes all but the softmax (`crit.`)."""
    return "transformer." + name if port and not name.startswith("crit.") else name


def random_state(rng, n_layer, d_model, n_head, d_head, d_inner, vocab_size, cutoffs=(),
                 div_val=1, untie_r=False, port=False, tie_projections=()):
    """Random weights, dict of key -> float64 array, scaled so that logits spread over nats.

    Every array moves the losses but pos_emb.inv_freq, which is a formula and never read here.
    div_val = 1: one table (V, D), no projections, whatever the cutoffs. div_val > 1: per band i a
    table (n_i, D // div_val**i) and projections (D, D // div_val**i), band 0 included.
    tie_projections: () for none, or one bool per band; True: out_projs.i *is* emb_projs.i.
    The softmax weights are the embedding tables (same array under both keys). untie_r: u and v
    per layer instead of, not beside, the shared pair. Source: the official code's layout.
    """
    D, HC, n_bands = d_model, n_head * d_head, len(cutoffs) + 1
    if D % 2 or D // div_val ** (n_bands - 1) == 0:
        raise ValueError("d_model must be even and every band at least one wide")
    if tie_projections and (div_val == 1 or len(tie_projections) != n_bands):
        raise ValueError("tie_projections: one bool per band, and only where div_val > 1")
    state = {}

    def put(name, array):
        state[full_name(name, port)] = array

    def normal(*shape, std, mean=0.0):
        return mean + std * rng.standard_normal(shape)

    def put_linear(name, n_out, n_in, bias_mean=None):
        put(name + ".weight", normal(n_out, n_in, std=n_in ** -0.5))
        if bias_mean is not None:
            put(name + ".bias", normal(n_out, std=0.5, mean=bias_mean))

    def put_norm(name):
        put(name + ".weight", normal(D, std=0.2, mean=1.0))
        put(name + ".bias", normal(D, std=0.5))

    def put_biases(prefix):
        put(prefix + "r_w_bias", normal(n_head, d_head, std=1.0))  # u, content
        put(prefix + "r_r_bias", normal(n_head, d_head, std=1.0))  # v, position

    # A hidden state has entries near 1: 2 / sqrt(width) gives logits a deviation of about 2 nats.
    edges = [0, vocab_size] if div_val == 1 else [0, *cutoffs, vocab_size]
    for i in range(len(edges) - 1):
        n, width = edges[i + 1] - edges[i], D // div_val ** i
        table = normal(n, width, std=2 * width ** -0.5)
        put(f"word_emb.emb_layers.{i}.weight", table)
        put(f"crit.out_layers.{i}.weight", table)
        put(f"crit.out_layers.{i}.bias", normal(n, std=1.0))
        if div_val > 1:
            proj = normal(D, width, std=D ** -0.5)
            tied = tie_projections and tie_projections[i]
            put(f"word_emb.emb_projs.{i}", proj)
            put(f"crit.out_projs.{i}", proj if tied else normal(D, width, std=D ** -0.5))
    if n_bands > 1:
        put("crit.cluster_weight", normal(n_bands - 1, D, std=2 * D ** -0.5))
        put("crit.cluster_bias", normal(n_bands - 1, std=1.0))

    put("pos_emb.inv_freq", np.array([10000.0 ** (-2 * k / D) for k in range(D // 2)]))
    if not untie_r:
        put_biases("")
    for l in range(n_layer):
        attn, ff = f"layers.{l}.dec_attn.", f"layers.{l}.pos_ff."
        if untie_r:
            put_biases(attn)
        put_linear(attn + "qkv_net", 3 * HC, D)
        put_linear(attn + "r_net", HC, D)
        put_linear(attn + "o_net", D, HC)
        put_norm(attn + "layer_norm")
        put_linear(ff + "CoreNet.0", d_inner, D, bias_mean=1.0)  # few ReLUs stay shut
        put_linear(ff + "CoreNet.3", D, d_inner, bias_mean=0.0)
        put_norm(ff + "layer_norm")
    return state


def reader(state, port):
    """get(*names): the float64 array under the first of the unprefixed names that is there."""
    def get(*names):
        keys = [full_name(name, port) for name in names]
        return np.asarray(state[next((k for k in keys if k in state), keys[-1])], np.float64)
    return get


def log_softmax(logits):
    """(n,) -> (n,), in nats."""
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def layer_norm(x, weight, bias):
    """x (D,) -> (D,): zero mean, unit (biased) variance with eps 1e-5, then gain and bias."""
    centred = x - x.mean()
    return centred / math.sqrt((centred ** 2).mean() + 1e-5) * weight + bias


def sinusoid(distance, D):
    """R of one distance, (D,), layout [sin..., cos...] (the official code; not interleaved)."""
    angles = [distance * 10000.0 ** (-2 * k / D) for k in range(D // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def embed(get, token, cutoffs, div_val):
    """sqrt(D) times the embedding of one token, (D,): its band's row, projected if need be."""
    if div_val == 1:
        row = get("word_emb.emb_layers.0.weight")[token]
    else:
        band = sum(token >= cutoff for cutoff in cutoffs)
        start = [0, *cutoffs][band]
        row = get(f"word_emb.emb_layers.{band}.weight")[token - start]
        row = get(f"word_emb.emb_projs.{band}") @ row
    return math.sqrt(len(row)) * row


def log_probabilities(state, hidden, cutoffs=(), div_val=1, port=False):
    """ln p of every word after one hidden state (D,) -> (V,) (adaptive softmax of Grave et al.).

    The head holds the words of band 0 and one column per tail band; a word of band i has the
    log-probability of its band in the head plus its own in the softmax of the band. The column of
    band i is -i in the official code (reversed order), cutoffs[0] + i - 1 in the port.
    """
    get = reader(state, port)
    edges, parts = [0, *cutoffs, None], []
    for i, (first, last) in enumerate(zip(edges, edges[1:])):
        if div_val == 1:  # one table for all bands, no projections
            W, bias = get("crit.out_layers.0.weight"), get("crit.out_layers.0.bias")
            W, bias, x = W[first:last], bias[first:last], hidden
        else:
            W, bias = get(f"crit.out_layers.{i}.weight"), get(f"crit.out_layers.{i}.bias")
            x = hidden @ get(f"crit.out_projs.{i}")
        logits = W @ x + bias
        if i == 0:
            if cutoffs:
                clusters = get("crit.cluster_weight") @ x + get("crit.cluster_bias")
                logits = np.concatenate([logits, clusters])
            head = log_softmax(logits)
            parts.append(head[:last])
        else:
            column = cutoffs[0] + i - 1 if port else -i
            parts.append(head[column] + log_softmax(logits))
    return np.concatenate(parts)


def layer_output(get, l, h, memory, n_head, d_head, max_distance, clamp_len):
    """Layer l on one lane: h (T, D), memory (M, D) -> (T, D). Dai et al. 2019, section 3.3.

    Query i sees the keys at distances 0..max_distance (None: all the way back); a distance above
    clamp_len > 0 is encoded as clamp_len.
    """
    attn, ff = f"layers.{l}.dec_attn.", f"layers.{l}.pos_ff."
    (T, D), M, H, C = h.shape, len(memory), n_head, d_head
    # Rows of qkv_net: all of q, then k, then v; within each one head after the other.
    W_q, W_k, W_v = get(attn + "qkv_net.weight").reshape(3, H, C, D)
    W_R = get(attn + "r_net.weight").reshape(H, C, D)
    u, v = get(attn + "r_w_bias", "r_w_bias"), get(attn + "r_r_bias", "r_r_bias")  # (H, C)
    keys = np.concatenate([memory, h])  # (K, D)
    out = np.zeros((T, D))
    for i in range(T):
        heads = []
        for n in range(H):
            q, scores, values = W_q[n] @ h[i], [], []
            for j in range(M + T):
                distance = M + i - j
                if distance < 0 or (max_distance is not None and distance > max_distance):
                    continue
                encoded = min(distance, clamp_len) if clamp_len > 0 else distance
                k, r = W_k[n] @ keys[j], W_R[n] @ sinusoid(encoded, D)
                a, b, c, d = q @ k, q @ r, u[n] @ k, v[n] @ r
                scores.append((a + b + c + d) / math.sqrt(C))
                values.append(W_v[n] @ keys[j])
            weights = np.exp(log_softmax(np.array(scores)))
            heads.append(sum(p * value for p, value in zip(weights, values)))
        o = get(attn + "o_net.weight") @ np.concatenate(heads) + h[i]
        o = layer_norm(o, get(attn + "layer_norm.weight"), get(attn + "layer_norm.bias"))
        inner = get(ff + "CoreNet.0.weight") @ o + get(ff + "CoreNet.0.bias")
        x = get(ff + "CoreNet.3.weight") @ np.maximum(inner, 0) + get(ff + "CoreNet.3.bias") + o
        out[i] = layer_norm(x, get(ff + "layer_norm.weight"), get(ff + "layer_norm.bias"))
    return out


def losses(state, segments, n_layer, n_head, d_head, cutoffs=(), div_val=1, *, mem_len,
           clamp_len=0, same_length=False, port=False):
    """-ln p(y) in nats for every target: one (B, T) array per segment, in stream order.

    segments: (x, y) pairs of integer arrays (B, T), read one after the other; B is the same in
    all, T may vary. Memory l holds the last mem_len inputs of layer l and starts empty, for the
    port too. same_length: a query sees at most mem_len + 1 keys, distances 0..mem_len, however
    the stream is cut. clamp_len = 0: no clamping.
    """
    get = reader(state, port)
    max_distance = mem_len if same_length else None
    result = [np.zeros(np.shape(y)) for _, y in segments]
    for lane in range(len(segments[0][0])):
        memories = [None] * n_layer
        for (x, y), loss in zip(segments, result):
            h = np.array([embed(get, int(t), cutoffs, div_val) for t in x[lane]])
            for l in range(n_layer):
                memory = np.zeros((0, h.shape[1])) if memories[l] is None else memories[l]
                seen = np.concatenate([memory, h])
                memories[l] = seen[max(0, len(seen) - mem_len):]
                h = layer_output(get, l, h, memory, n_head, d_head, max_distance, clamp_len)
            for t, target in enumerate(y[lane]):
                log_p = log_probabilities(state, h[t], cutoffs, div_val, port)
                loss[lane, t] = -log_p[int(target)]
    return result
