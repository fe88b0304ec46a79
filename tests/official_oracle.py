"""The official Transformer-XL from its weights file, in plain NumPy loops: what a loader must equal.

A state dict in the layout of the authors' PyTorch code (or of its port to `transformers`) goes in,
the loss of every token comes out, one lane, query, key and head after the other.  Written from the
paper's formulas and from the layout's names and shapes; it knows nothing of our model.
"""
import math

import numpy as np


def random_state(rng, n_layer, d_model, n_head, d_head, d_inner, vocab_size, cutoffs=(), div_val=1,
                 untie_r=False, port=False, tie_projections=()):
    """{name: float64 array}, all values random, of a size that makes each of them count.

    tie_projections has a bool for each band: is the output's projection the input's?
    """
    D, HC, FF = d_model, n_head * d_head, d_inner
    prefix = "transformer." if port else ""

    def draw(*shape, std=1.0, mean=0.0):
        return rng.normal(mean, std, shape)

    state = {}
    edges = (0, *cutoffs, vocab_size)
    if div_val == 1:  # one table, whatever the cutoffs
        table = draw(vocab_size, D, std=0.5)
        state[prefix + "word_emb.emb_layers.0.weight"] = table
        state["crit.out_layers.0.weight"] = table
        state["crit.out_layers.0.bias"] = draw(vocab_size)
    else:
        for i, (first, end) in enumerate(zip(edges, edges[1:])):
            width = D // div_val**i
            rows, into, out = draw(end - first, width), draw(D, width, std=0.5), draw(D, width)
            state[f"{prefix}word_emb.emb_layers.{i}.weight"] = rows
            state[f"{prefix}word_emb.emb_projs.{i}"] = into
            state[f"crit.out_layers.{i}.weight"] = rows
            state[f"crit.out_layers.{i}.bias"] = draw(end - first)
            state[f"crit.out_projs.{i}"] = into if tie_projections[i] else 0.5 * out
    if cutoffs:
        state["crit.cluster_weight"] = draw(len(cutoffs), D, std=0.7)
        state["crit.cluster_bias"] = draw(len(cutoffs))
    for n in range(n_layer):
        layer = f"{prefix}layers.{n}."
        state |= {
            layer + "dec_attn.qkv_net.weight": draw(3 * HC, D, std=0.5),
            layer + "dec_attn.r_net.weight": draw(HC, D, std=0.5),
            layer + "dec_attn.o_net.weight": draw(D, HC, std=0.5),
            layer + "dec_attn.layer_norm.weight": draw(D, std=0.3, mean=1.0),
            layer + "dec_attn.layer_norm.bias": draw(D, std=0.3),
            layer + "pos_ff.CoreNet.0.weight": draw(FF, D, std=0.5),
            layer + "pos_ff.CoreNet.0.bias": draw(FF, std=0.5),
            layer + "pos_ff.CoreNet.3.weight": draw(D, FF, std=0.5),
            layer + "pos_ff.CoreNet.3.bias": draw(D, std=0.5),
            layer + "pos_ff.layer_norm.weight": draw(D, std=0.3, mean=1.0),
            layer + "pos_ff.layer_norm.bias": draw(D, std=0.3)}
        if untie_r:
            state[layer + "dec_attn.r_w_bias"] = draw(n_head, d_head)
            state[layer + "dec_attn.r_r_bias"] = draw(n_head, d_head)
    if not untie_r:
        state[prefix + "r_w_bias"], state[prefix + "r_r_bias"] = draw(2, n_head, d_head)
    state[prefix + "pos_emb.inv_freq"] = np.array([10000 ** (-2 * k / D) for k in range(D // 2)])
    return state


def band_of(word, cutoffs):
    """The number of the band that holds a word, and the word's number inside it."""
    starts = [0, *cutoffs]
    i = max(i for i, start in enumerate(starts) if start <= word)
    return i, word - starts[i]


def embedding(state, prefix, word, cutoffs, div_val):
    """The scaled embedding of one word, (D,)."""
    i, row = (0, word) if div_val == 1 else band_of(word, cutoffs)
    vector = state[f"{prefix}word_emb.emb_layers.{i}.weight"][row]
    if div_val > 1:
        vector = state[f"{prefix}word_emb.emb_projs.{i}"] @ vector
    return vector * math.sqrt(len(vector))


def normalised(z, state, name):
    """LayerNorm of one vector, eps 1e-5."""
    deviation = z - z.mean()
    z = deviation / math.sqrt((deviation * deviation).mean() + 1e-5)
    return z * state[name + ".weight"] + state[name + ".bias"]


def log_probabilities(state, h, cutoffs=(), div_val=1, port=False):
    """ln p of every word after the last layer's h (D,), in the order of the vocabulary, (V,)."""
    names = [n for n in state if n.startswith("crit.out_layers.") and n.endswith("bias")]
    edges = (0, *cutoffs, sum(len(state[n]) for n in names))

    def scores(i, extra_rows=None, extra_biases=None):
        """The log-softmax of band i, behind whose words further rows may stand."""
        if div_val == 1:
            rows = state["crit.out_layers.0.weight"][edges[i] : edges[i + 1]]
            biases, narrow = state["crit.out_layers.0.bias"][edges[i] : edges[i + 1]], h
        else:
            rows, biases = (state[f"crit.out_layers.{i}.{kind}"] for kind in ("weight", "bias"))
            narrow = h @ state[f"crit.out_projs.{i}"]
        logits = [narrow @ row + bias for row, bias in zip(rows, biases)]
        if extra_rows is not None:
            logits += [narrow @ row + bias for row, bias in zip(extra_rows, extra_biases)]
        largest = max(logits)
        total = largest + math.log(sum(math.exp(z - largest) for z in logits))
        return [z - total for z in logits]

    if not cutoffs:
        return np.array(scores(0))
    head = scores(0, state["crit.cluster_weight"], state["crit.cluster_bias"])
    found = head[: cutoffs[0]]
    for i in range(1, len(cutoffs) + 1):
        # the official code counts the tails from the end of the head, the port from its words on
        tail = head[cutoffs[0] + i - 1] if port else head[-i]
        found += [tail + z for z in scores(i)]
    return np.array(found)


def losses(state, segments, n_layer, n_head, d_head, cutoffs=(), div_val=1, mem_len=0, clamp_len=0,
           same_length=False, port=False):
    """-ln p of every target, in nats: [(x, y), ...], each (B, T) -> [(B, T), ...].

    The segments are read one after the other; the first has no memory at all.
    """
    prefix, C, HC = "transformer." if port else "", d_head, n_head * d_head
    B = len(segments[0][0])
    memories = [[[] for _ in range(n_layer)] for _ in range(B)]  # rows (D,), oldest first
    results = []
    for x, y in segments:
        result = np.zeros(x.shape)
        for lane in range(B):
            h = [embedding(state, prefix, word, cutoffs, div_val) for word in x[lane]]
            for n in range(n_layer):
                memory, name = memories[lane][n], f"{prefix}layers.{n}."
                rows = memory + h
                memories[lane][n] = rows[len(rows) - mem_len :] if mem_len < len(rows) else rows
                own = name + "dec_attn." if name + "dec_attn.r_w_bias" in state else prefix
                u, v = state[own + "r_w_bias"], state[own + "r_r_bias"]
                qkv = state[name + "dec_attn.qkv_net.weight"]
                W_r = state[name + "dec_attn.r_net.weight"]
                out = []
                for i, h_i in enumerate(h):
                    here = len(memory) + i  # the query's own place among the rows
                    first = max(0, here - mem_len) if same_length else 0
                    joined = np.zeros(HC)
                    for a in range(n_head):
                        part = slice(a * C, (a + 1) * C)
                        W_q, W_k, W_v = qkv[:HC][part], qkv[HC : 2 * HC][part], qkv[2 * HC :][part]
                        q, score = W_q @ h_i, []
                        for j in range(first, here + 1):
                            distance = here - j
                            if clamp_len > 0:
                                distance = min(distance, clamp_len)
                            angles = distance * state[prefix + "pos_emb.inv_freq"]
                            R = [math.sin(z) for z in angles] + [math.cos(z) for z in angles]
                            k, r = W_k @ rows[j], W_r[part] @ np.array(R)
                            score.append((q @ k + q @ r + u[a] @ k + v[a] @ r) / math.sqrt(C))
                        weights = [math.exp(z - max(score)) for z in score]
                        for j, weight in zip(range(first, here + 1), weights):
                            joined[part] += weight / sum(weights) * (W_v @ rows[j])
                    attended = state[name + "dec_attn.o_net.weight"] @ joined
                    o = normalised(h_i + attended, state, name + "dec_attn.layer_norm")
                    ff = name + "pos_ff.CoreNet."
                    inner = state[ff + "0.weight"] @ o + state[ff + "0.bias"]
                    inner = np.array([max(z, 0.0) for z in inner])
                    inner = state[ff + "3.weight"] @ inner + state[ff + "3.bias"]
                    out.append(normalised(o + inner, state, name + "pos_ff.layer_norm"))
                h = out
            for t, target in enumerate(y[lane]):
                result[lane, t] = -log_probabilities(state, h[t], cutoffs, div_val, port)[target]
        results.append(result)
    return results
