"""Lesson 5: the whole model against loops from the formulas, and the two golden equalities.

    pytest tests/test_05_full_model.py

The oracle reads one lane token by token in NumPy, without segments, memory lists, masks or shifts.
"""
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn

from course.checks import unit_circle
from helpers import run_examples

lesson = import_module("05_full_model")
Config, TransformerXL, CONFIGS = lesson.Config, lesson.TransformerXL, lesson.CONFIGS
lesson_4 = import_module("04_rel_shift")

SMALL = Config(vocab_size=11, n_layer=2, d_model=6, n_head=3, d_head=4, d_inner=7, mem_len=5)


# ---- helpers ------------------------------------------------------------------------------------

def model_of(config=SMALL, std=0.4, seed=0):
    """Float64, every weight random and large, so that a wrong one shows."""
    torch.manual_seed(seed)
    model = TransformerXL(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def read(model, x, cuts, y=None):
    """Read x (B, n) in segments of lengths `cuts`, the memory handed on -> outputs, memories."""
    memory, outputs, memories, start = None, [], [], 0
    for T in cuts:
        targets = None if y is None else y[:, start : start + T]
        out, memory = model(x[:, start : start + T], memory, targets)
        outputs.append(out)
        memories.append(memory)
        start += T
    return torch.cat(outputs, dim=1), memories


def norm(z, layer_norm):
    mean, variance = z.mean(), ((z - z.mean()) ** 2).mean()
    return (z - mean) / np.sqrt(variance + 1e-5) * layer_norm["weight"] + layer_norm["bias"]


def oracle(model, tokens, cuts):
    """Logits (n, V) of one lane, from the equations of section 3.3, one query and key at a time."""
    c, w = model.config, {k: z.detach().numpy() for k, z in model.state_dict().items()}
    D, H, C, M = c.d_model, c.n_head, c.d_head, c.mem_len
    starts = [sum(cuts[:i]) for i, T in enumerate(cuts) for _ in range(T)]  # of tokens' segments
    h = [w["embedding.weight"][t] * math.sqrt(D) for t in tokens]
    for n in range(c.n_layer):
        p, pair = f"layers.{n}.", n if c.untie_r else 0
        W_q, W_kE, W_kR, W_v, W_o = (w[p + f"attention.{k}.weight"] for k in (
            "W_q", "W_kE", "W_kR", "W_v", "W_o"))
        out = []
        for i in range(len(tokens)):
            first = i - M if c.same_length else starts[i] - M
            keys, heads = range(max(0, first), i + 1), []
            for a in range(H):
                rows = slice(a * C, (a + 1) * C)
                u, v, q = w["u"][pair, a], w["v"][pair, a], W_q[rows] @ h[i]
                score = []
                for j in keys:
                    d = i - j if c.clamp_len <= 0 else min(i - j, c.clamp_len)
                    R = unit_circle([d], D)[0].numpy()
                    k, r = W_kE[rows] @ h[j], W_kR[rows] @ R
                    score.append((q @ k + q @ r + u @ k + v @ r) / math.sqrt(C))
                weight = np.exp(score) / np.exp(score).sum()
                heads.append(sum(z * (W_v[rows] @ h[j]) for z, j in zip(weight, keys)))
            norms = [{k: w[p + f"norm_{m}.{k}"] for k in ("weight", "bias")} for m in (1, 2)]
            o = norm(h[i] + W_o @ np.concatenate(heads), norms[0])
            inner = np.maximum(w[p + "W_1.weight"] @ o + w[p + "W_1.bias"], 0)
            out.append(norm(o + w[p + "W_2.weight"] @ inner + w[p + "W_2.bias"], norms[1]))
        h = out
    return torch.tensor(np.array(h) @ w["embedding.weight"].T + w["embedding.bias"])


VARIANTS = {"plain": SMALL, "untied u and v": replace(SMALL, untie_r=True),
            "same_length": replace(SMALL, same_length=True, mem_len=3),
            "clamp": replace(SMALL, clamp_len=2), "no memory": replace(SMALL, mem_len=0),
            "all": replace(SMALL, untie_r=True, same_length=True, clamp_len=3, mem_len=4)}


# ---- against the formulas -----------------------------------------------------------------------

@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cuts", [(3, 4, 2), (1, 1, 7), (6, 2, 1)], ids=str)
def test_the_model_is_the_papers_equations(name, cuts):
    """Four terms, memory, post-norm, tied output: equal to loops over queries and keys."""
    model = model_of(VARIANTS[name])
    x = torch.randint(11, (2, sum(cuts)))
    logits, _ = read(model, x, cuts)
    for lane in range(2):
        wanted = oracle(model, x[lane].tolist(), cuts)
        worst = (logits[lane] - wanted).abs().max().item()
        assert worst < 1e-10, f"lane {lane} is off by {worst:.1e} from the formula"


def test_the_loss_is_minus_log_p_of_each_target_in_nats():
    """model(x, memory, y) gives -ln p(y) for every token, not a mean, and shifts nothing itself."""
    model, x, y = model_of(), torch.randint(11, (2, 5)), torch.randint(11, (2, 5))
    logits, loss = model(x)[0], model(x, None, y)[0]
    for b in range(2):
        for t in range(5):
            p = np.exp(logits[b, t].detach().numpy())
            assert loss[b, t].item() == pytest.approx(-math.log(p[y[b, t]] / p.sum()), abs=1e-10)


@pytest.mark.parametrize("name", [
    "u", "v", "embedding.weight", "embedding.bias", "layers.0.attention.W_kR.weight",
    "layers.1.attention.W_kE.weight", "layers.1.attention.W_v.weight",
    "layers.0.attention.W_q.weight", "layers.1.W_2.weight"])
def test_gradients_are_those_of_the_formula(name):
    """Autograd through the model against finite differences of the loop oracle (one segment)."""
    model = model_of()
    x, y = torch.randint(11, (1, 4)), torch.randint(11, (4,))
    model(x, None, y[None])[0].sum().backward()
    parameter = dict(model.named_parameters())[name]

    def loss():
        logits = oracle(model, x[0].tolist(), (4,))
        return nn.functional.cross_entropy(logits, y, reduction="sum").item()

    for index in torch.randperm(parameter.numel())[:6].tolist():
        flat, step = parameter.data.view(-1), 1e-5
        old = flat[index].item()
        values = []
        for sign in (1, -1):
            flat[index] = old + sign * step
            values.append(loss())
        flat[index] = old
        wanted = (values[0] - values[1]) / (2 * step)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(wanted, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("T, M", [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5)])
def test_attention_is_lesson_4s_score(T, M):
    """The chain of the course: lesson 5's attention is lesson 4's relative_score, masked."""
    attention = model_of().layers[0].attention
    h, memory = torch.randn(2, T, 6).double(), torch.randn(2, M, 6).double()
    u, v, K = torch.randn(3, 4).double(), torch.randn(3, 4).double(), M + T
    R, hidden = lesson.distance_encoding(K, 6), lesson.hidden_keys(T, M, M, False)
    rows = torch.cat([memory, h], 1)
    q, k, values = (z.view(2, -1, 3, 4).transpose(1, 2) for z in (
        h @ attention.W_q.weight.T, rows @ attention.W_kE.weight.T, rows @ attention.W_v.weight.T))
    Q = lesson_4.projected_distances(R.flip(0), attention.W_kR.weight.view(3, 4, 6))
    score = lesson_4.relative_score(q, k, Q, u, v) / 2  # sqrt(C) = 2
    out = score.masked_fill(hidden, -math.inf).softmax(-1) @ values
    joined = out.transpose(1, 2).reshape(2, T, -1)
    assert (attention.attend(q, k, values, Q, u, v, hidden) - joined).abs().max() < 1e-12
    wanted = joined @ attention.W_o.weight.T
    assert (attention(h, memory, R, u, v, hidden) - wanted).abs().max() < 1e-12


def test_the_attention_can_be_replaced_by_name():
    """`attend` does all between the projections, so another order of work has one place to go."""
    model, x = model_of(), torch.randint(11, (2, 4))
    shapes, before = [], model(x)[0]
    for layer in model.layers:
        attend = layer.attention.attend

        def other(*given, attend=attend):
            shapes.append([tuple(z.shape) for z in given])
            return attend(*given)

        layer.attention.attend = other
    after, memory = model(x)
    assert after.equal(before)
    model(x[:, :3], memory)
    heads = [(2, 3, 3, 4), (2, 3, 7, 4), (2, 3, 7, 4), (3, 7, 4), (3, 4), (3, 4), (3, 7)]
    assert shapes[2:] == [heads, heads], "q, k, value, Q, u, v, hidden"


def test_heads_are_consecutive_features():
    """Head a of a projected state is its features a C ... (a + 1) C - 1."""
    attention, z = lesson.RelativeAttention(SMALL), torch.arange(2 * 5 * 12).view(2, 5, 12)
    heads = attention.heads(z)
    assert heads.shape == (2, 3, 5, 4)
    for a in range(3):
        assert heads[:, a].equal(z[..., 4 * a : 4 * a + 4])
    assert attention.heads(z[0]).equal(heads[0])  # as for R, which has no lanes


def test_the_feed_forward_network_is_relu_and_then_dropout():
    """Lesson 1's network with the paper's dropout, in this order; each norm after its sum."""
    layer, calls = lesson.Layer(SMALL), []
    for name, module in layer.named_children():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    layer(torch.randn(1, 2, 6), torch.randn(1, 3, 6), torch.randn(5, 6), torch.randn(3, 4),
          torch.randn(3, 4), lesson.hidden_keys(2, 3, 3, False))
    assert calls == ["attention", "dropout_output", "norm_1", "W_1", "relu", "dropout_inner",
                     "W_2", "dropout_ff", "norm_2"]


# ---- the two golden equalities ------------------------------------------------------------------

@pytest.mark.parametrize("cuts", [(3, 3, 3, 3), (1,) * 12, (5, 1, 6), (2, 10)], ids=str)
def test_golden_1_segments_with_enough_memory_are_one_pass(cuts):
    """While nothing has left the memory, cutting the text changes no logit."""
    model = model_of(replace(SMALL, mem_len=12))
    x = torch.randint(11, (2, 12))
    assert (read(model, x, cuts)[0] - model(x)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("M", [0, 1, 4, 20])
def test_golden_2_with_same_length_no_loss_depends_on_the_cut(M):
    """Every query sees M + 1 keys: any cut, a single pass included, from the first token on."""
    model = model_of(replace(SMALL, mem_len=M, same_length=True))
    x, y = torch.randint(11, (2, 2, 12))
    one = model(x, None, y)[0]
    for cuts in ((1,) * 12, (2,) * 6, (4,) * 3, (5, 1, 6)):
        loss = read(model, x, cuts, y)[0]
        assert torch.isfinite(loss).all(), "a query that sees no key at all gives NaN"
        assert (loss - one).abs().max() < 1e-12, f"cut into {cuts}"


def test_without_same_length_the_cut_does_matter():
    """The second equality is same_length's doing, not trivial."""
    model = model_of(replace(SMALL, mem_len=2))
    x, y = torch.randint(11, (2, 1, 12))
    difference = (read(model, x, (2,) * 6, y)[0] - read(model, x, (4,) * 3, y)[0]).abs().max()
    assert difference > 1e-3


@pytest.mark.parametrize("T, m, M", [
    (1, 0, 3), (4, 0, 3), (4, 2, 3), (4, 3, 3), (7, 3, 3), (4, 0, 0)])
def test_same_length_shows_every_query_the_same_number_of_keys(T, m, M):
    """M + 1 keys: itself and M before it, fewer only where the text has not begun."""
    visible = ~lesson.hidden_keys(T, m, M, True)
    assert visible.shape == (T, m + T)
    assert visible.sum(1).tolist() == [min(M + 1, m + i + 1) for i in range(T)]
    assert all(visible[i, m + i] and not visible[i, m + i + 1 :].any() for i in range(T))
    plain = ~lesson.hidden_keys(T, m, M, False)
    assert plain.sum(1).tolist() == [m + i + 1 for i in range(T)]


# ---- masks and distances ------------------------------------------------------------------------

def test_the_future_never_shows():
    """Changing token t changes no loss before position t, with memory and without."""
    model = model_of()
    x, y = torch.randint(11, (2, 1, 9))
    before = read(model, x, (3, 4, 2), y)[0]
    for t in range(9):
        other = x.clone()
        other[0, t] = (x[0, t] + 1) % 11
        moved = (read(model, other, (3, 4, 2), y)[0] - before)[0] != 0
        assert not moved[:t].any() and moved[t], f"token {t} changed"


def test_every_memory_row_is_seen():
    """Changing any row of any layer's memory changes some loss: none is hidden by the mask."""
    model = model_of()
    x, y = torch.randint(11, (2, 2, 5))
    _, memory = model(x)
    before = model(x, memory, y)[0]
    for n in range(2):
        for row in range(5):
            other = [z.clone() for z in memory]
            other[n][:, row] += 1
            assert ((model(x, other, y)[0] - before).abs() > 1e-9).any(1).all(), (n, row)


@pytest.mark.parametrize("dtype, size", [
    (torch.float32, 300), (torch.bfloat16, 300), (torch.float16, 60)], ids=str)
def test_a_hidden_probability_is_exactly_zero_in_every_dtype(dtype, size):
    """However low the scores of the visible keys: no "large enough" number, only -inf, will do."""
    attention = lesson.RelativeAttention(SMALL).to(dtype)
    h, memory = size * torch.randn(8, 4, 6, dtype=dtype), size * torch.randn(8, 1, 6, dtype=dtype)
    R = lesson.distance_encoding(5, 6).to(dtype)
    u, v = torch.randn(2, 3, 4, dtype=dtype)
    seen, hidden = [], lesson.hidden_keys(4, 1, 1, False)
    for W in attention.parameters():
        nn.init.normal_(W, std=0.25)
    attention.dropout_attention.register_forward_hook(lambda module, args, out: seen.append(out))
    attention(h, memory, R, u, v, hidden)
    assert (seen[0][:, :, hidden] == 0).all(), "a hidden key got some probability"
    assert torch.isfinite(seen[0]).all()


def test_distances_descend_and_clamp_from_above():
    """R's rows are the distances K - 1 ... 0; clamp_len merges the far ones, not the near."""
    R = lesson.distance_encoding(6, 4)
    assert (R - unit_circle([5, 4, 3, 2, 1, 0], 4)).abs().max() < 1e-12
    clamped = lesson.distance_encoding(6, 4, clamp_len=2)
    assert all(clamped[i].equal(R[3]) for i in range(4)) and clamped[4:].equal(R[4:])
    assert lesson.distance_encoding(6, 4, clamp_len=-1).equal(R)


# ---- memory -------------------------------------------------------------------------------------

@pytest.mark.parametrize("M, cuts", [
    (5, (2, 2, 2, 2)), (3, (4, 4)), (0, (2, 2, 2)), (4, (1, 6, 2))])
def test_memory_is_the_last_rows_of_each_layers_input(M, cuts):
    """First in, first out, M rows, for M larger and smaller than T, and 0."""
    model = model_of(replace(SMALL, mem_len=M, same_length=True))
    x = torch.randint(11, (2, sum(cuts)))
    inputs = [[] for _ in model.layers]
    for layer, kept in zip(model.layers, inputs):
        layer.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(args[0].detach()))
    _, memories = read(model, x, cuts)
    for i, memory in enumerate(memories):
        seen = sum(cuts[: i + 1])
        assert isinstance(memory, list) and len(memory) == 2
        for n, rows in enumerate(memory):
            wanted = torch.cat(inputs[n][: i + 1], 1)[:, max(0, seen - M) : seen]
            assert rows.shape == (2, min(M, seen), 6) and rows.equal(wanted)
            assert not rows.requires_grad
    if M:
        embedded = model.embedding(x)[:, -min(M, x.shape[1]) :] * math.sqrt(6)
        assert memories[-1][0].equal(embedded), "layer 1's input is the scaled embedding"


def test_memory_is_never_changed_in_place():
    """The caller may keep a memory and go on from it twice."""
    model, x = model_of(), torch.randint(11, (2, 3))
    _, memory = model(x)
    copies = [z.clone() for z in memory]
    first = model(x, memory)[0]
    assert model(x, memory)[0].equal(first)
    assert all(a.equal(b) for a, b in zip(memory, copies)) and len(memory) == 2


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "gradients"])
def test_the_memory_is_a_list_in_every_mode(training, gradients):
    """N detached tensors (B, m, D), and the same losses; one mode goes on from another's."""
    model = model_of().train(training)  # no dropout
    x, y = torch.randint(11, (2, 2, 4))
    wanted, past = model_of()(x, None, y)
    with torch.set_grad_enabled(gradients):
        losses, memory = model(x, None, y)
        assert type(memory) is type(model(x)[1]) is list and len(memory) == 2
        assert all(a.equal(b) and not a.requires_grad for a, b in zip(memory, past))
        assert losses.equal(wanted) and losses.requires_grad == gradients
        assert model(x, past, y)[0].equal(model_of()(x, memory, y)[0])


def test_no_memory_is_not_a_memory_of_zeros():
    """The first segment has no past; zeros would be attended to."""
    model, x, y = model_of(), torch.randint(11, (2, 3)), torch.randint(11, (2, 3))
    zeros = [torch.zeros(2, 5, 6).double()] * 2
    assert (model(x, None, y)[0] - model(x, zeros, y)[0]).abs().max() > 1e-3


def test_lengths_are_read_at_every_call():
    """A trained model is evaluated at other lengths by replacing its config; no weight moves."""
    model, x = model_of(replace(SMALL, mem_len=8)), torch.randint(11, (2, 6))
    _, memory = model(x)
    model.config = replace(model.config, mem_len=4)
    shorter, new = model(x, memory)
    assert new[0].shape[1] == 4
    assert shorter.equal(model(x, [rows[:, -4:] for rows in memory])[0])
    model.config = replace(model.config, mem_len=0)
    assert (model(x, memory)[0] - model(x)[0]).abs().max() == 0


def test_no_gradient_crosses_the_boundary_and_two_backwards_work():
    """The gradient of segment 2's loss with respect to segment 1's input is exactly zero."""
    model = model_of()
    x, y = torch.randint(11, (2, 1, 6))
    inputs = []
    model.embedding.register_forward_hook(lambda module, args, out: inputs.append(out))
    loss_1, memory = model(x[:, :3], None, y[:, :3])
    loss_2, _ = model(x[:, 3:], memory, y[:, 3:])
    gradient = torch.autograd.grad(loss_2.sum(), inputs, allow_unused=True, retain_graph=True)
    assert gradient[0] is None and gradient[1].abs().max() > 0
    loss_1.sum().backward()
    loss_2.sum().backward()


# ---- sizes, initial values, dropout -------------------------------------------------------------

# of the official scripts, or ours where the paper gives a number of parameters only (see 05):
#                V        N   D     H   C    FF    M    dropouts   count
PUBLISHED = {
    "enwik8-12L": (204, 12, 512, 8, 64, 2048, 512, 0.1, 0.0, 41_055_436),
    "enwik8-18L": (204, 18, 640, 10, 64, 2208, 512, 0.1, 0.0, 87_965_708),
    "enwik8-24L": (204, 24, 1024, 8, 128, 3072, 768, 0.15, 0.15, 277_231_820),
    "text8-12L": (27, 12, 512, 8, 64, 2048, 512, 0.1, 0.0, 40_964_635),
    "text8-24L": (27, 24, 1024, 8, 128, 3072, 768, 0.15, 0.15, 277_050_395),
    "wt103-standard": (267_735, 16, 410, 10, 41, 2100, 150, 0.1, 0.0, 151_107_538),
    "wt103-large": (267_735, 18, 1024, 16, 64, 4096, 384, 0.2, 0.2, 285_170_506),
    "lm1b-base": (793_471, 18, 1024, 8, 128, 4096, 32, 0.0, 0.0, 357_812_082),
    "lm1b-medium": (793_471, 24, 1024, 8, 128, 4608, 32, 0.0, 0.0, 464_834_418),
    "lm1b-large": (793_471, 24, 1280, 16, 80, 8192, 32, 0.05, 0.05, 841_295_982),
    "ptb": (10_000, 16, 380, 10, 38, 704, 70, 0.2, 0.2, 23_965_064)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_parameter_counts_are_the_published_ones(name):
    """Exact, and counted without allocating: 841 million parameters would take three gigabytes."""
    c, (*sizes, count) = CONFIGS[name], PUBLISHED[name]
    assert [c.vocab_size, c.n_layer, c.d_model, c.n_head, c.d_head, c.d_inner, c.mem_len, c.dropout,
            c.dropout_attention] == sizes
    assert lesson.count_parameters(c) == count
    bands = {"wt103": (20_000, 40_000, 200_000), "lm1b": (60_000, 100_000, 640_000)}
    assert c.cutoffs == bands.get(name.split("-")[0], ())
    assert c.div_val == (4 if name == "wt103-large" or name.startswith("lm1b") else 1)
    assert c.tie_projections == (not name.startswith("lm1b"))
    assert (c.untie_r, c.same_length, c.clamp_len) == (False, False, 0)


def test_every_named_size_is_known_here():
    """The three for a CPU have no published values."""
    assert CONFIGS.keys() - PUBLISHED.keys() == {"tiny", "laptop", "laptop-words"}


@pytest.mark.parametrize("name, count", [
    ("wt103-standard", 151_119_838), ("wt103-large", 285_205_322), ("lm1b-large", 841_354_862)])
def test_parameter_counts_of_the_released_models(name, count):
    """The released word-level weights have u and v for each layer."""
    assert lesson.count_parameters(replace(CONFIGS[name], untie_r=True)) == count


def test_the_other_counts():
    """Our dimensions give the paper's millions; untie_r adds u and v for each further layer."""
    assert round(lesson.count_parameters(CONFIGS["enwik8-18L"]) / 1e6) == 88
    assert round(lesson.count_parameters(CONFIGS["lm1b-medium"]) / 1e7) == 46
    wider = lesson.count_parameters(replace(CONFIGS["ptb"], d_inner=900))
    assert round(wider / 1e5) == 264
    tied, untied = (lesson.count_parameters(replace(SMALL, untie_r=z)) for z in (False, True))
    assert untied - tied == 2 * 3 * 4  # u and v (H, C), for one layer more
    for change in ({"mem_len": 99}, {"same_length": True}, {"clamp_len": 3}):
        assert lesson.count_parameters(replace(SMALL, **change)) == tied


@pytest.mark.parametrize("words", [{}, {"cutoffs": (900, 1900), "div_val": 2}],
                         ids=["full", "bands"])
def test_first_values_are_the_authors(words):
    """N(0, 0.02) for matrices, embedding, u, v; N(0, 0.01) for projections of the adaptive softmax;
    gains N(1, 0.02); biases 0.  Each parameter draws its own."""
    model = TransformerXL(Config(3000, n_layer=3, d_model=128, n_head=3, d_head=32, d_inner=256,
                                 untie_r=True, **words))
    kinds = {}
    for name, z in model.named_parameters():
        kind = next((kind for kind in ("bias", "norm", "project") if kind in name), "weight")
        kinds.setdefault(kind, {})[name] = z.detach()
    assert not any(z.any() for z in kinds.pop("bias").values())
    assert len(kinds["norm"]) == 6 and len(kinds.get("project", ())) == (4 if words else 0)
    for kind, (mean, std) in {"norm": (1, 0.02), "project": (0, 0.01), "weight": (0, 0.02)}.items():
        for name, z in kinds.get(kind, {}).items():  # within five standard errors
            n = z.numel()
            assert z.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(n)), name
            assert z.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
    first = [tuple(z.flatten()[:8].tolist()) for part in kinds.values() for z in part.values()]
    assert len(set(first)) == len(first), "two parameters begin alike"


def test_the_initial_loss_is_that_of_knowing_nothing():
    """ln V, nearly."""
    model = TransformerXL(Config(205, n_layer=3, d_model=128, n_head=3, d_head=32, d_inner=256))
    x, y = torch.randint(205, (2, 4, 32))
    assert model(x, None, y)[0].mean().item() == pytest.approx(math.log(205), rel=0.05)


def test_the_weights_have_the_names_of_the_lesson():
    """What checkpoints, the authors' layout and the experiments go by."""
    model = TransformerXL(replace(SMALL, n_layer=1))
    layer = {f"attention.W_{z}.weight": (12, 6) for z in ("q", "kE", "kR", "v")}
    layer |= {"attention.W_o.weight": (6, 12), "W_1.weight": (7, 6), "W_1.bias": (7,),
              "W_2.weight": (6, 7), "W_2.bias": (6,)}
    layer |= {f"norm_{n}.{z}": (6,) for n in (1, 2) for z in ("weight", "bias")}
    wanted = {"u": (1, 3, 4), "v": (1, 3, 4), "embedding.weight": (11, 6), "embedding.bias": (11,)}
    wanted |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    assert {name: tuple(z.shape) for name, z in model.state_dict().items()} == wanted


def test_dropout_stands_at_the_authors_places():
    """Embedding, R (once a segment, for all layers), probabilities, after W_o, inside FF, final."""
    model = TransformerXL(replace(SMALL, dropout=0.25, dropout_attention=0.5)).train()
    places = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    layer = ("attention.dropout_attention", "dropout_output", "dropout_inner", "dropout_ff")
    wanted = {"dropout_embedding", "dropout_R", "dropout_final"}
    wanted |= {f"layers.{n}.{place}" for n in range(2) for place in layer}
    assert set(places) == wanted
    assert all(p == (0.5 if n.endswith("attention") else 0.25) for n, p in places.items())
    calls = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda m, args, out, name=name: calls.setdefault(name, []).append(args[0].shape))
    model(torch.randint(11, (2, 5)))
    assert {n: len(z) for n, z in calls.items()} == dict.fromkeys(wanted, 1)
    assert calls["dropout_R"] == [(5, 6)] and calls["dropout_embedding"] == [(2, 5, 6)]
    assert calls["layers.0.attention.dropout_attention"] == [(2, 3, 5, 5)]
    assert calls["layers.0.dropout_inner"] == [(2, 5, 7)]
    assert calls["dropout_final"] == calls["layers.1.dropout_ff"] == [(2, 5, 6)]
    x = torch.randint(11, (2, 5))
    assert not model(x)[0].equal(model(x)[0]) and model.eval()(x)[0].equal(model(x)[0])


# ---- generation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("M, same_length", [(20, False), (3, True), (0, True), (20, True)])
def test_greedy_generation_is_the_argmax_of_one_pass_at_every_step(M, same_length):
    """One token at a time with memory equals reading the whole text again: exact, only cheaper."""
    model = model_of(replace(SMALL, d_model=24, mem_len=M, same_length=same_length), seed=4)
    for name, parameter in model.named_parameters():
        if "norm" in name or name == "embedding.bias":  # if random, one symbol wins everywhere
            nn.init.constant_(parameter, float(name.endswith("weight")))
    text = torch.randint(11, (2, 4))
    winners = model(torch.arange(11)[None])[0].argmax(-1)
    assert len(winners.unique()) > 2, "a model on which this test could not fail"
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    tokens = lesson.generate(model, text, 8, top_k=1)
    assert shapes == [(2, 4)] + [(2, 1)] * 7, "the prompt is read once, then one token at a time"
    for step in range(8):
        best = model(text)[0][:, -1].argmax(-1, keepdim=True)
        assert tokens[:, step : step + 1].equal(best), f"token {step}"
        text = torch.cat([text, best], 1)


def test_generation_keeps_its_promises():
    """Shapes, reproducible draws, the default top_k of a small vocabulary, the mode put back."""
    model = model_of().train()
    a, b = (lesson.generate(model, torch.tensor([1, 2]), 5,
                            generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert a.shape == (5,) and a.equal(b) and a.dtype == torch.int64 and model.training
    assert lesson.generate(model, torch.tensor([[1, 2]]), 0).shape == (1, 0)
    with pytest.raises(ValueError):
        lesson.generate(model, torch.tensor([1, 99]), 5)
    assert model.training


def test_sampling_draws_from_the_top_k_by_their_softmax():
    """Only the top_k best, in the proportion of their softmax at that temperature."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        draws = torch.cat([lesson.sample_top_k(logits.expand(4000, 5), 3, temperature)])
        share = torch.bincount(draws.flatten(), minlength=5) / 4000
        weight = np.exp(np.array([3.0, 1.0, 2.0]) / temperature)
        wanted = torch.tensor([0, *(weight / weight.sum()), 0], dtype=torch.float32)
        assert (share - wanted).abs().max() < 0.04, f"temperature {temperature}: {share.tolist()}"
        assert share[0] == share[4] == 0


# ---- bad input ----------------------------------------------------------------------------------

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda m: m(TOKENS + 11), "token 11 outside vocabulary of 11"),
    (lambda m: m(TOKENS - 1), "token -1 outside"),
    (lambda m: m(TOKENS, None, TOKENS + 12), "token 12"),
    (lambda m: m(TOKENS.float()), "int64"),
    (lambda m: m(TOKENS[0]), r"\(B, T\)"),
    (lambda m: m(TOKENS[:, :0]), "both at least 1"),
    (lambda m: m(TOKENS, None, TOKENS[:, :2]), r"\(2, 2\)"),
    (lambda m: m(TOKENS, m(TOKENS[:1])[1]), "memory must be"),
    (lambda m: m(TOKENS, m(TOKENS)[1][:1]), "list of 2"),
    (lambda m: m(TOKENS, torch.zeros(2, 2, 5, 6)), "list of 2"),
    (lambda m: m(TOKENS, [torch.zeros(2, 5, 8)] * 2), r"\(2, m, 6\)"),
    (lambda m: lesson.generate(m, TOKENS[:, :0], 2), "both at least 1"),
    (lambda m: lesson.generate(m, TOKENS, 2, top_k=12), "12"),
    (lambda m: lesson.generate(m, TOKENS, 2, top_k=0), "0"),
    (lambda m: lesson.generate(m, TOKENS, 2, temperature=0), "temperature"),
    (lambda m: lesson.generate(m, TOKENS, -1), "got -1"),
    (lambda m: replace(SMALL, mem_len=-1), "mem_len must be at least 0, got -1"),
    (lambda m: replace(SMALL, n_layer=0), "n_layer must be at least 1, got 0"),
    (lambda m: replace(SMALL, d_model=7), "even"),
    (lambda m: replace(SMALL, dropout=1.0), "dropout must be in"),
    (lambda m: replace(SMALL, dropout_attention=-0.1), "dropout_attention"),
], ids=lambda z: z if isinstance(z, str) else "")
def test_bad_input_is_a_value_error_with_the_numbers(call, words):
    """What would fail far from its cause, or silently, is refused where it comes in."""
    with pytest.raises(ValueError, match=words):
        call(model_of())


# ---- the file itself ----------------------------------------------------------------------------

def test_the_examples_in_the_docstrings_are_true():
    """The worked examples run."""
    run_examples(lesson)


@pytest.mark.slow
def test_the_lesson_shows_its_point(tmp_path, monkeypatch, capsys):
    """main(): the equalities at rounding, the exact counts, a figure."""
    monkeypatch.setattr(lesson, "RUNS", tmp_path)
    lesson.main()
    printed = capsys.readouterr().out
    assert "41,055,436" in printed and "277,231,820" in printed
    lines = [line.split()[4:7] for line in printed.splitlines() if line.startswith("  M ")]
    enough, cut, same = ([float(z) for z in line] for line in lines)
    assert max(enough) < 1e-12 and min(cut) > 1e-6 and max(same) < 1e-12
    assert float(printed.split("changes nothing: ")[1].split()[0]) < 1e-12
    assert (tmp_path / "05_memory_length.png").stat().st_size > 0
