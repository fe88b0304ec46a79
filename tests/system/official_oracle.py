"""An oracle for the layout of the official Transformer-XL weights: NumPy, plain loops, no tricks.

`random_state` draws a state dict in the layout of the official PyTorch code or of its retired
port; `losses` reads token streams with one, by the formulas of Dai et al. 2019, section 3.3, in
float64.  c is a Config, of which the fields are read alone.
"""
import math

import numpy as np


def full_name(name, port):
    """The key of `name` in the state dict: the port prefixes all but the softmax (`crit.`)."""
    return "transformer." + name if port and not name.startswith("crit.") else name


def random_state(c, port=False):
    """Random weights, {name: float64 array}, scaled so that logits spread over nats.

    div_val = 1: one table (V, D), no projections, whatever the cutoffs. div_val > 1: per band i a
    table (n_i, D // div_val**i) and projections (D, D // div_val**i), band 0 included; if they are
    tied, out_projs.i is emb_projs.i in all bands but the first. The softmax weights are the
    embedding tables. untie_r: u and v per layer instead of, not beside, the shared pair.
    """
    draw, D = np.random.default_rng(0), c.d_model

    def normal(*shape, std=1.0, mean=0.0):
        return mean + std * draw.standard_normal(shape)

    state = {"pos_emb.inv_freq": np.array([10000.0 ** (-2 * k / D) for k in range(D // 2)])}
    # A hidden state has entries near 1: 2 / sqrt(width) gives logits a deviation of about 2 nats.
    edges = [0, c.vocab_size] if c.div_val == 1 else [0, *c.cutoffs, c.vocab_size]
    for i, (first, end) in enumerate(zip(edges, edges[1:])):
        width = D // c.div_val ** i
        state[f"word_emb.emb_layers.{i}.weight"] = normal(end - first, width, std=2 * width ** -0.5)
        state[f"crit.out_layers.{i}.weight"] = state[f"word_emb.emb_layers.{i}.weight"]
        state[f"crit.out_layers.{i}.bias"] = normal(end - first)
        if c.div_val > 1:
            one, other = normal(D, width, std=D ** -0.5), normal(D, width, std=D ** -0.5)
            state[f"word_emb.emb_projs.{i}"] = one
            state[f"crit.out_projs.{i}"] = one if i and c.tie_projections else other
    if c.cutoffs:
        state["crit.cluster_weight"] = normal(len(c.cutoffs), D, std=2 * D ** -0.5)
        state["crit.cluster_bias"] = normal(len(c.cutoffs))
    layers = [f"layers.{n}." for n in range(c.n_layer)]
    for prefix in [f"{layer}dec_attn." for layer in layers] if c.untie_r else [""]:
        state[prefix + "r_w_bias"] = normal(c.n_head, c.d_head)  # u, content
        state[prefix + "r_r_bias"] = normal(c.n_head, c.d_head)  # v, position
    HC = c.n_head * c.d_head
    for layer in layers:
        for name, rows, columns in (
                ("dec_attn.qkv_net", 3 * HC, D), ("dec_attn.r_net", HC, D),
                ("dec_attn.o_net", D, HC), ("pos_ff.CoreNet.0", c.d_inner, D),
                ("pos_ff.CoreNet.3", D, c.d_inner)):
            state[f"{layer}{name}.weight"] = normal(rows, columns, std=columns ** -0.5)
        state[layer + "pos_ff.CoreNet.0.bias"] = normal(c.d_inner, std=0.5, mean=1.0)  # few ReLUs
        state[layer + "pos_ff.CoreNet.3.bias"] = normal(D, std=0.5)  # ... stay shut
        for norm in ("dec_attn.layer_norm", "pos_ff.layer_norm"):
            state[f"{layer}{norm}.weight"] = normal(D, std=0.2, mean=1.0)
            state[f"{layer}{norm}.bias"] = normal(D, std=0.5)
    return {full_name(name, port): array for name, array in state.items()}


def log_softmax(logits):
    """(n,) -> (n,), in nats."""
    return logits - math.log(np.exp(logits).sum())


def layer_norm(x, weight, bias):
    """x (D,) -> (D,): zero mean, unit (biased) variance with eps 1e-5, then gain and bias."""
    centred = x - x.mean()
    return centred / math.sqrt((centred ** 2).mean() + 1e-5) * weight + bias


def sinusoid(distance, D):
    """R of one distance, (D,), layout [sin..., cos...] (the official code; not interleaved)."""
    angles = [distance * 10000.0 ** (-2 * k / D) for k in range(D // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def embed(get, token, c):
    """The embedding of one token, (D,), times the root of D: its band's row, projected."""
    if c.div_val == 1:
        row = get("word_emb.emb_layers.0.weight")[token]
    else:
        band = sum(token >= cutoff for cutoff in c.cutoffs)
        row = get(f"word_emb.emb_layers.{band}.weight")[token - [0, *c.cutoffs][band]]
        row = get(f"word_emb.emb_projs.{band}") @ row
    return math.sqrt(len(row)) * row


def log_probabilities(get, hidden, c, port):
    """ln p of every word after one hidden state (D,) -> (V,) (adaptive softmax of Grave et al.).

    The head holds the words of band 0 and one column per tail band; a word of band i has the
    log-probability of its band in the head plus its own in the softmax of the band. The column of
    band i is -i in the official code (reversed order), cutoffs[0] + i - 1 in the port.
    """
    edges, parts = [0, *c.cutoffs, None], []
    for i, (first, last) in enumerate(zip(edges, edges[1:])):
        if c.div_val == 1:  # one table for all bands, no projections
            x = hidden
            logits = get("crit.out_layers.0.weight") @ x + get("crit.out_layers.0.bias")
            logits = logits[first:last]
        else:
            x = hidden @ get(f"crit.out_projs.{i}")
            logits = get(f"crit.out_layers.{i}.weight") @ x + get(f"crit.out_layers.{i}.bias")
        if i == 0:
            if c.cutoffs:
                clusters = get("crit.cluster_weight") @ x + get("crit.cluster_bias")
                logits = np.concatenate([logits, clusters])
            head = log_softmax(logits)
            parts.append(head[:last])
        else:
            parts.append(head[c.cutoffs[0] + i - 1 if port else -i] + log_softmax(logits))
    return np.concatenate(parts)


def layer_output(get, n, h, memory, c):
    """Layer n on one lane: h (T, D), memory (M, D) -> (T, D). Dai et al. 2019, section 3.3.

    With same_length query i sees the keys at distances 0..mem_len, else all of them; a distance
    above clamp_len > 0 is encoded as clamp_len.
    """
    attn, ff = f"layers.{n}.dec_attn.", f"layers.{n}.pos_ff."
    D, H, C, seen = h.shape[1], c.n_head, c.d_head, np.concatenate([memory, h])
    # Rows of qkv_net: all of q, then k, then v; within each one head after the other.
    W_q, W_k, W_v = get(attn + "qkv_net.weight").reshape(3, H, C, D)
    W_R = get(attn + "r_net.weight").reshape(H, C, D)
    u, v = get(attn + "r_w_bias", "r_w_bias"), get(attn + "r_r_bias", "r_r_bias")  # (H, C)
    out = []
    for i, query in enumerate(h):
        reach = min(c.mem_len, len(memory) + i) if c.same_length else len(memory) + i
        distances = range(reach + 1)
        keys = [seen[len(memory) + i - distance] for distance in distances]
        R = [sinusoid(min(distance, c.clamp_len) if c.clamp_len > 0 else distance, D)
             for distance in distances]
        heads = []
        for w_q, w_k, w_v, w_R, u_h, v_h in zip(W_q, W_k, W_v, W_R, u, v):
            q, scores = w_q @ query, []
            for key, r in zip(keys, R):
                k, r = w_k @ key, w_R @ r
                scores.append((q @ k + q @ r + u_h @ k + v_h @ r) / math.sqrt(C))
            weights = np.exp(log_softmax(np.array(scores)))
            heads.append(sum(p * (w_v @ key) for p, key in zip(weights, keys)))
        o = get(attn + "o_net.weight") @ np.concatenate(heads) + query
        o = layer_norm(o, get(attn + "layer_norm.weight"), get(attn + "layer_norm.bias"))
        inner = get(ff + "CoreNet.0.weight") @ o + get(ff + "CoreNet.0.bias")
        x = get(ff + "CoreNet.3.weight") @ np.maximum(inner, 0) + get(ff + "CoreNet.3.bias") + o
        out.append(layer_norm(x, get(ff + "layer_norm.weight"), get(ff + "layer_norm.bias")))
    return np.array(out)


def losses(state, segments, c, port=False):
    """-ln p(y) in nats for every target: one (B, T) array per segment, in stream order.

    segments: (x, y) pairs of integer arrays (B, T), read one after the other; B is the same in
    all, T may vary. Memory n holds the last mem_len inputs of layer n and starts empty, for the
    port too.
    """
    def get(*names):  # the first that is there
        keys = [full_name(name, port) for name in names]
        return state[next(key for key in keys if key in state)]

    result = [np.zeros(y.shape) for _, y in segments]
    for lane in range(len(segments[0][0])):
        memories = [np.zeros((0, c.d_model))] * c.n_layer
        for (x, y), loss in zip(segments, result):
            h = np.array([embed(get, token, c) for token in x[lane]])
            for n in range(c.n_layer):
                seen = np.concatenate([memories[n], h])
                h = layer_output(get, n, h, memories[n], c)
                memories[n] = seen[max(0, len(seen) - c.mem_len):]
            for t, target in enumerate(y[lane]):
                loss[lane, t] = -log_probabilities(get, h[t], c, port)[target]
    return result
