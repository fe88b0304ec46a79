"""Each measure of the lab against its formula, or against windows cut out by hand."""
import doctest
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

measures, variants = import_module("measures"), import_module("variants")
lesson_1, lesson_3, lesson_5 = map(import_module, (
    "01_vanilla_segments", "03_relative_attention", "05_full_model"))
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6)
CONTEXTS = [100, 200, 300, 400]


def test_excerpts_are_spread_and_carry_their_context():
    """Three excerpts of 4 predictions after 2 tokens of context: at both ends and in the middle."""
    found = measures.excerpts(torch.arange(27), 2, 3, 4)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16],
                              [20, 21, 22, 23, 24, 25, 26]]
    with pytest.raises(ValueError, match="has 14 tokens, 15 are needed"):
        measures.excerpts(torch.arange(14), 2, 3, 4)


@pytest.mark.parametrize("encoding", ["ours", "shaw", "rope", "alibi"])
@pytest.mark.parametrize("T", [3, 16])
def test_a_memory_is_what_one_pass_over_the_piece_sees(T, encoding):
    """With same_length any cut gives the one pass's losses, after the context."""
    model = randomized(variants.Variant(CONFIG, 4, encoding)).eval()
    tokens = measures.excerpts(torch.randint(7, (60,)), 9, 2, 10)
    found = measures.memory_losses(model, tokens, 9, T, mem_len=4, same_length=True)
    assert model.config == CONFIG
    model.config = replace(CONFIG, mem_len=4, same_length=True)
    wanted = model(tokens[:, :-1], None, tokens[:, 1:])[0]
    assert_close(found.double(), wanted[:, 9:].detach(), "the losses", 1e-5)


@pytest.mark.parametrize("L, stride", [(3, 1), (8, 2), (12, 3)])
def test_a_window_gives_its_last_quarter(L, stride):
    """Each prediction from a window of its own, cut out by hand; 10 is no multiple of 3."""
    model = randomized(variants.Variant(replace(CONFIG, mem_len=0), 4, "vaswani")).eval()
    tokens = measures.excerpts(torch.randint(7, (60,)), 12, 2, 10)
    found = measures.window_losses(model, tokens, 12, L)
    assert found.shape == (2, 10)
    for j in range(10):
        end = min(12 + (j // stride + 1) * stride, 22)  # after the window's last input
        window = tokens[:, end - L : end]
        loss = model(window, None, tokens[:, end - L + 1 : end + 1])[0]
        assert_close(found[:, j].double(), loss[:, L - (end - 12 - j)].detach(), f"loss {j}", 1e-5)


class Stub(torch.nn.Module):
    """In the place of a Reader: 0 nats where known(x, y, pairs seen) is true, otherwise 2."""

    config = replace(CONFIG, vocab_size=10_000)

    def __init__(self, known):
        super().__init__()
        self.known = known

    def __call__(self, x, memory, y):
        losses = torch.full(x.shape, 2.0)
        for lane, pairs in enumerate(zip(x.tolist(), y.tolist())):
            seen = []
            for i, pair in enumerate(zip(*pairs)):
                losses[lane, i] *= not self.known(*pair, seen)
                seen.append(pair)
        return losses, None


@pytest.mark.parametrize("known, score", [
    (lambda x, y, seen: (x, y) in seen, -2.0),  # copies
    (lambda x, y, seen: any(y in pair for pair in seen), 0.0),  # counts, in whatever order
    (lambda x, y, seen: False, 0.0)])
def test_only_one_who_copies_has_a_score(known, score):
    """In 8 of 10,000 tokens hardly any comes twice by chance."""
    assert measures.copying_score(Stub(known), 8) == pytest.approx(score, abs=0.02)


@pytest.mark.parametrize("M, n", [(5, 7), (1, 9)])
def test_attention_by_distance_against_loops(M, n):
    """Only the last n queries count; the loops use lesson 3's four terms."""
    model = randomized(lesson_5.TransformerXL(replace(
        CONFIG, vocab_size=9, d_model=16, n_head=3, mem_len=M, same_length=True,
        untie_r=True))).eval()
    tokens, L, seen = torch.randint(9, (2, M + n), dtype=torch.uint8), M + n, []
    attend = lesson_5.RelativeAttention.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson_5.RelativeAttention, "attend", lambda attention, *given: (
            seen.append((attention, given)), attend(attention, *given))[1])
        model(tokens.long())
    wanted = torch.zeros(4, 2, 3, M + 1).double()
    for layer, (attention, (q, k, _, _, u, v, _)) in enumerate(seen):
        R, W_kR = lesson_1.sinusoid(torch.arange(L), 16), attention.W_kR.weight.view(3, 4, 16)
        table = lesson_3.four_terms_all_pairs(q, k, R, W_kR, u, v).detach() / 2  # sqrt(C)
        for i, part in enumerate((table.sum(0), table[0], table[1], table[3])):  # (B, H, L, L)
            for t in range(M, L):
                p = torch.stack([part[:, :, t, t - d] for d in range(M + 1)], -1).softmax(-1)
                wanted[i, layer] += p.mean(0) / n
    assert_close(measures.attention_by_distance(model, tokens, n), wanted, "the attention")


def test_attention_in_numbers(notes, monkeypatch):
    """Two heads of three keys: entropy, and the share that is elsewhere than in the whole."""
    corpus = import_module("support.corpora").load(notes)
    model = lesson_5.TransformerXL(CONFIG)
    by_head = torch.tensor([[[[1, 0, 0], [0.5, 0.5, 0]]], [[[0, 0, 1], [0.25, 0.75, 0]]],
                            [[[1, 0, 0], [0.5, 0.5, 0]]], [[[1, 0, 0], [0.5, 0.5, 0]]]]).double()
    monkeypatch.setattr(measures, "attention_by_distance", lambda *given: by_head)
    found = measures.attention(model, corpus, 2, each_head=True)
    assert found["attention whole", 0] == 0.75 and found["attention a", 2] == 0.5
    assert found["head 1", 1] == 0.5 and found["head 0", 2] == 0
    assert found["entropy whole", ""] == 0.5 and found["apart a", ""] == pytest.approx(0.625)
    assert found["norm u", ""] == pytest.approx(model.u.norm(dim=-1).mean().item())


def recl_by_the_formulas(losses, contexts, r):
    """Apply the formulas of the paper's appendix C to lists losses[model][context][position]."""
    models, n, found = range(len(losses)), len(losses[0][0]), []
    for i in models:
        k = 0
        while k + 1 < len(contexts):
            b = [min(losses[a][k][t] for a in models) for t in range(n)]
            hard = sorted(range(n), key=lambda t: -b[t])[: max(1, round(r * n))]
            f = [sum(min(b[t], losses[i][other][t]) for t in hard) / len(hard)
                 for other in (k, k + 1)]
            if (math.exp(f[0]) - math.exp(f[1])) / math.exp(f[0]) < 0.01:
                break
            k += 1
        found.append(contexts[k])
    return found


@pytest.mark.parametrize("r", [0.01, 0.5, 1.0])
def test_recl_of_random_losses_is_that_of_the_formulas(r):
    """Models that gain by a factor of about 1.01 a context, so that they stop at different ones."""
    assert doctest.testmod(measures, raise_on_error=True).attempted
    draw, several = torch.Generator().manual_seed(1), set()
    for _ in range(60):
        losses = torch.rand(3, 4, 20, generator=draw, dtype=torch.float64) * 0.05 + 2
        gains = 0.01 * torch.randint(4, (3, 1, 1), generator=draw)
        losses = losses - torch.arange(4)[:, None] * gains
        found = measures.recl(losses, CONTEXTS, r)
        assert found == recl_by_the_formulas(losses.tolist(), CONTEXTS, r)
        several |= set(found)
    assert len(several) > 2


@pytest.mark.parametrize("kind, positions", [("ours", 0), ("lstm", 0), ("vaswani", 5),
                                             ("vaswani", 70)])
def test_losses_are_after_exactly_so_many_tokens(kind, positions):
    """Each loss against a window of its own, cut out by hand; vaswani reads T tokens at most."""
    config = replace(CONFIG, mem_len=4 * (kind == "ours"))
    model = randomized(variants.LSTM(config, 2000) if kind == "lstm" else
                       variants.Variant(config, 5, kind)).eval()
    tokens, contexts = torch.randint(7, (400,)), [40, 80, 120]  # in segments of 64, with a state
    found = measures.losses_by_context(model, tokens, contexts, 30, positions)
    for i, c in enumerate(contexts):
        for k, t in enumerate(range(120, 281, 40)):
            used = min(c, positions or c)
            x, y = tokens[None, t - used : t], tokens[None, t - used + 1 : t + 1]
            with measures.train.evaluating(model, mem_len=29, same_length=True):
                wanted = model(x, None, y)[0][0, -1].detach()
            assert_close(found[i, k].double(), wanted, f"position {t} after {c}", 1e-5)
