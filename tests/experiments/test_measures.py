"""Compare each measure of the lab with its formula, or with windows cut out by hand."""
import doctest
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from experiments import measures, variants
from helpers import assert_close, randomized

lesson_1, lesson_3, lesson_5 = map(import_module, (
    "01_vanilla_segments", "03_relative_attention", "05_full_model"))
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6)


@pytest.fixture
def model():
    return randomized(lesson_5.TransformerXL(replace(CONFIG, mem_len=16))).eval()


def test_excerpts_are_spread_and_carry_their_context():
    found = measures.excerpts(torch.arange(27), 2, 3, 4)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16],
                              [20, 21, 22, 23, 24, 25, 26]]
    with pytest.raises(ValueError, match="has 14 tokens, 15 are needed"):
        measures.excerpts(torch.arange(14), 2, 3, 4)


@pytest.mark.parametrize("L, stride", [(3, 1), (12, 3)])
def test_a_window_gives_its_last_quarter(L, stride):
    """Each loss equals the loss in its window, cut out by hand; 10 is not a multiple of 3."""
    model = randomized(variants.Variant(replace(CONFIG, mem_len=0), 4, "vaswani")).eval()
    tokens = measures.excerpts(torch.randint(7, (60,)), 12, 2, 10)
    found = measures.window_losses(model, tokens, 12, L)
    assert found.shape == (2, 10)
    for j in range(10):
        end = min(12 + (j // stride + 1) * stride, 22)  # after the window's last input
        window = tokens[:, end - L : end]
        loss = model(window, None, tokens[:, end - L + 1 : end + 1])[0]
        assert_close(found[:, j].double(), loss[:, L - (end - 12 - j)].detach(), f"loss {j}", 1e-5)


@pytest.mark.parametrize("copies, score", [(True, -2), (False, 0)])
def test_only_a_model_that_copies_has_a_score(copies, score, model, monkeypatch):
    """A token, or pair, that came before costs 0 nats, others cost 2."""
    def losses(x, memory, y):
        came_before = (y[:, :, None] == x[:, None]).tril()  # (B, target, earlier token)
        if copies:
            is_pair = (y[:, :, None] == y[:, None]) & (x[:, :, None] == x[:, None])
            came_before = is_pair.tril(-1)
        return 2.0 * ~came_before.any(-1), None

    model.config = replace(CONFIG, vocab_size=10_000)
    monkeypatch.setattr(model, "forward", losses)
    assert measures.copying_score(model, 8) == pytest.approx(score, abs=0.02)


def test_attention_by_distance_against_loops(monkeypatch, M=5, n=7):
    """Only the last n queries count; the loops use lesson 3's four terms."""
    model = randomized(lesson_5.TransformerXL(replace(
        CONFIG, vocab_size=9, d_model=16, n_head=3, mem_len=M, same_length=True,
        untie_r=True))).eval()
    tokens, L, seen = torch.randint(9, (2, M + n), dtype=torch.uint8), M + n, []
    attend = lesson_5.RelativeAttention.attend
    monkeypatch.setattr(lesson_5.RelativeAttention, "attend", lambda attention, *given: (
        seen.append((attention, given)), attend(attention, *given))[1])
    model(tokens.long())
    wanted = torch.zeros(4, 2, 3, M + 1).double()
    for layer, (attention, (q, k, _, _, u, v, _)) in enumerate(seen):
        R = lesson_1.sinusoid(torch.arange(L), 16)
        W_kR = attention.W_kR.weight.view(3, 4, 16)
        table = lesson_3.four_terms_all_pairs(q, k, R, W_kR, u, v).detach() / 2  # sqrt(C)
        for i, part in enumerate((table.sum(0), table[0], table[1], table[3])):  # (B, H, L, L)
            for t in range(M, L):
                p = torch.stack([part[:, :, t, t - d] for d in range(M + 1)], -1).softmax(-1)
                wanted[i, layer] += p.mean(0) / n
    assert_close(measures.attention_by_distance(model, tokens, n), wanted, "the attention")


def test_attention_in_numbers(model, monkeypatch):
    """Two heads attend to three keys; `apart` is the share that differs from the whole."""
    corpus = SimpleNamespace(valid=torch.zeros(99))
    by_head = torch.tensor([[[[1, 0, 0], [0.5, 0.5, 0]]], [[[0, 0, 1], [0.25, 0.75, 0]]],
                            [[[1, 0, 0], [0.5, 0.5, 0]]], [[[0, 1, 0], [0.5, 0.5, 0]]]]).double()
    monkeypatch.setattr(measures, "attention_by_distance", lambda *given: by_head)
    found = measures.attention(model, corpus, 2, each_head=True)
    assert found["attention whole", 0] == 0.75 and found["attention a", 2] == 0.5
    assert found["attention b", 1] == 0.25 and found["attention d", 1] == 0.75
    assert found["head 1", 1] == 0.5 and found["head 0", 2] == 0
    assert found["entropy whole", ""] == 0.5 and found["apart a", ""] == pytest.approx(0.625)


def test_memory_is_removed_in_one_layer_or_shuffled(model, needs_shipped_solutions):
    """A layer without output needs no memory; without distances order has no effect."""
    def measured():  # 16 tokens of context, 48 that count
        found = measures.memory_by_layer(model, corpus, 4, 1, 48)
        return [round(bits, 9) for bits in found.values()]

    corpus = SimpleNamespace(test=torch.randint(7, (65,)))
    x, y = corpus.test[16:64].view(12, 4), corpus.test[17:].view(12, 4)
    found = measured()
    assert found == measured() and len({*found}) == 5
    assert found[1] == pytest.approx(lesson_1.bits(model(x, None, y)[0]))
    for k in range(2):
        attention = model.layers[k].attention
        kept = attention.W_o.weight.data.clone()
        attention.W_o.weight.data.zero_()
        every, none, _, *without = measured()
        assert (without[k], without[1 - k]) == (every, none)
        attention.W_o.weight.data.copy_(kept)
        attention.W_kR.weight.data.zero_()
    every, _, shuffled, *_ = measured()
    assert shuffled == every


def test_a_gradient_passes_through_k_segments(model):
    """It equals that of one pass over them and the last; what comes before has no gradient."""
    tokens = torch.randint(7, (1, 21))
    weights = list(model.parameters())
    for k in 0, 2, 3:
        found = measures.gradient(model, tokens, 4, k)
        first = 4 * (4 - k)
        _, memory = model(tokens[:, :first])
        losses, _ = model(tokens[:, first:20], memory, tokens[:, first + 1 :])
        wanted = torch.autograd.grad(losses[:, -4:].mean(), weights)
        assert_close(found, torch.cat([part.flatten() for part in wanted]), f"k {k}", 1e-10)


def test_gradients_are_compared(model, monkeypatch):
    """The mean over two places is (3, 0) for k = 0 and (3, 4) for k = 1."""
    monkeypatch.setattr(measures, "gradient", lambda model, tokens, T, k: (
        tokens[0, -1] * torch.tensor([6.0, 8 * k])))
    corpus = SimpleNamespace(valid=torch.tensor([0] * 40 + [1] * 40))
    found = measures.stopped_gradient(model, corpus, 4, places=2)
    assert found["gradient lacks", 1] == pytest.approx(0.8)


def formula(losses, i, c, r):
    """Return g_i(c, c + 1) of appendix C from lists losses[model][context][position]."""
    b = [min(position) for position in zip(*(model[c] for model in losses))]
    hard = sorted(range(len(b)), key=lambda t: -b[t])[: max(1, round(r * len(b)))]
    here, there = (math.exp(sum(min(b[t], losses[i][other][t]) for t in hard) / len(hard))
                   for other in (c, c + 1))
    return (here - there) / here


@pytest.mark.parametrize("r", [0.01, 0.5, 1.0])
def test_the_gain_of_a_context_is_that_of_the_formula(r):
    """RECL ends where perplexity falls by less than 1 percent: here the loss falls by 0.0098."""
    assert doctest.testmod(measures, raise_on_error=True).attempted
    falling = torch.tensor([[[2.0], [1.9898], [1.98]]], dtype=torch.float64)
    assert measures.recl(falling, [100, 200, 300], r=1.0) == [200]
    losses = torch.rand(3, 4, 20, dtype=torch.float64) + 2
    for i in range(3):
        for c in range(3):
            assert measures.gain(losses, i, c, r) == pytest.approx(
                formula(losses.tolist(), i, c, r))


@pytest.mark.parametrize("kind", ["ours", "lstm"])
def test_losses_have_exact_contexts(model, kind):
    model = randomized(variants.LSTM(CONFIG, 2000)).eval() if kind == "lstm" else model
    tokens, contexts = torch.randint(7, (400,)), [40, 80, 120]  # in segments of 64, with a state
    found = measures.losses_by_context(model, tokens, contexts, 30)
    model.config = replace(CONFIG, mem_len=29, same_length=True)
    for i, c in enumerate(contexts):
        for k, t in enumerate(range(120, 281, 40)):
            wanted = model(tokens[None, t - c : t], None, tokens[None, t - c + 1 : t + 1])[0]
            assert_close(found[i, k].double(), wanted[0, -1].detach(), f"{t} after {c}", 1e-5)
