"""Tables 6, 7 and 10: the model, lesson 5's in one position, lesson 1's in another, Shaw's by its
formula; what the rows are given and read; shuffled lines, equal memory, order.

    pytest tests/experiments/test_table6_ablation.py
"""
from collections import Counter
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import assert_close, gradients, randomized
from training.optimizers import optimizer_of

table6, common = import_module("table6_ablation"), import_module("common")
corpora = import_module("support.corpora")
lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(11, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=10, mem_len=5)
ABSOLUTE = replace(CONFIG, mem_len=0)
ON_CPU = SimpleNamespace(device="cpu")


# ---- the model ----------------------------------------------------------------------------------

def made(encoding, half_loss=False, T=4):
    """A random model in float64; what is frozen stays 0."""
    config = CONFIG if encoding in ("ours", "shaw") else ABSOLUTE
    model = table6.AblationModel(config, T, encoding, half_loss)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5)
    return model.double().eval()


@pytest.mark.parametrize("changes", [
    {"clamp_len": 3}, {"mem_len": 2, "same_length": True}, {"cutoffs": (3, 7), "div_val": 2}],
    ids=str)
def test_the_row_of_ours_is_lesson_5(changes):
    """Same weights, float64: losses and gradients through three segments."""
    config = replace(CONFIG, **changes)
    ours, wanted = (randomized(z).eval() for z in (
        table6.AblationModel(config, 4), lesson_5.TransformerXL(config)))
    ours.load_state_dict(wanted.state_dict())
    memory, past = None, None
    for T in (4, 3, 6):
        x, y = torch.randint(11, (2, 2, T))
        loss, memory = ours(x, memory, y)
        other, past = wanted(x, past, y)
        assert_close(loss, other, "the losses")
    leaves = [[m.u, m.layers[0].attention.W_kR.weight, m.layers[1].attention.W_kE.weight,
               m.layers[1].attention.W_v.weight] for m in (ours, wanted)]
    mine, its = gradients(loss, leaves[0]), gradients(other, leaves[1])
    for a, b in zip(mine, its):
        assert_close(a, b, "a gradient")


@pytest.mark.parametrize("encoding, u, v", [("ours-c", 0, 1), ("ours-d", 1, 0), ("ours-cd", 0, 0)])
def test_a_term_that_is_left_out_stays_out(encoding, u, v):
    """(c) is u's, (d) is v's: 0 from the beginning, and no step moves it."""
    model = table6.AblationModel(CONFIG, 4, encoding)
    assert [bool(z.any()) for z in (model.u, model.v)] == [u, v]
    assert [z.requires_grad for z in (model.u, model.v)] == [u, v]
    x, y = torch.randint(11, (2, 2, 4))
    model(x, None, y)[0].mean().backward()
    recipe = common.presets.Recipe(steps=1, optimizer="muon")
    optimizer = optimizer_of(model, recipe)
    optimizer.step()
    assert [bool(z.any()) for z in (model.u, model.v)] == [u, v]


def test_vaswani_is_lesson_1():
    """Absolute places, no memory: the baseline of lesson 1 with the same weights."""
    ours = made("vaswani")
    wanted = lesson_1.VanillaTransformer(11, N=2, D=12, H=3, FF=10).double()
    ours.embedding.bias.data.zero_()
    wanted.embedding.weight.data = ours.embedding.weight.data
    for a, b in zip(ours.layers, wanted.layers):
        b.attention.W_q.weight.data, b.attention.W_o.weight.data = (
            a.attention.W_q.weight.data, a.attention.W_o.weight.data)
        b.attention.W_k.weight.data, b.attention.W_v.weight.data = (
            a.attention.W_kE.weight.data, a.attention.W_v.weight.data)
        for mine, its in ((a.norm_1, b.norm_1), (a.norm_2, b.norm_2), (a.W_1, b.feed_forward[0]),
                          (a.W_2, b.feed_forward[2])):
            its.weight.data, its.bias.data = mine.weight.data, mine.bias.data
    x, y = torch.randint(11, (2, 2, 9))  # longer than T = 4: a sinusoid goes on
    assert_close(ours(x, None, y)[0], lesson_1.token_losses(wanted(x), y), "the losses")


def test_shaws_score_is_terms_a_and_b_with_learned_distances():
    """Entry by entry; beyond the distances of training the farthest counts."""
    attention = made("shaw").layers[0].attention
    far = attention.W_kR.rows.shape[1] - 1
    assert far == CONFIG.mem_len + 4 - 1
    rows = torch.randn(1, 12, 12).double()  # K = 12 > far + 1
    memory, h = rows[:, :9], rows[:, 9:]
    R, zero = torch.randn(12, 12).double(), torch.zeros(3, 4).double()  # R does not count
    found = attention(h, memory, R, zero, zero, lesson_5.attention_mask(3, 9, 9, False))
    k, value = (W(rows)[0].detach().view(12, 3, 4) for W in (attention.W_kE, attention.W_v))
    table = attention.W_kR.rows.detach()
    q, wanted = attention.W_q(h).detach()[0].view(3, 3, 4), torch.zeros(3, 12).double()
    for i in range(3):
        for head in range(3):
            score = torch.tensor([
                q[i, head] @ (k[j, head] + table[head, min(9 + i - j, far)]) / 4**0.5
                for j in range(9 + i + 1)], dtype=torch.float64)
            wanted[i, 4 * head : 4 * head + 4] = score.softmax(0) @ value[: 9 + i + 1, head]
    assert_close(found[0], attention.W_o(wanted), "the attention")


def test_al_rfou_adds_a_place_before_each_layer():
    """A layer's places change what it gets, where they stand, and no loss before them."""
    model = made("al-rfou")
    x, y = torch.randint(11, (2, 1, 4))
    inputs = []  # with the positions, since this hook comes after the model's
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    before = model(x, None, y)[0]
    model.layers[1].positions.data[0, 2] += 1.0
    after = model(x, None, y)[0]
    assert_close(inputs[2], inputs[0], "the first layer's input")
    moved = (inputs[3] - inputs[1])[0].detach().abs().sum(-1)
    assert moved[2] == pytest.approx(12.0) and moved[[0, 1, 3]].max() < 1e-12
    assert_close(before[:, :2], after[:, :2], "losses before the place")


def test_the_half_loss_counts_the_later_half_twice_in_training_only():
    """An odd segment of 5: tokens 2, 3 and 4."""
    half, full = made("ours", half_loss=True), made("ours")
    full.load_state_dict(half.state_dict())
    x, y = torch.randint(11, (2, 2, 5))
    assert_close(half(x, None, y)[0], full(x, None, y)[0], "in evaluation")
    trained = half.train()(x, None, y)[0]
    wanted = full(x, None, y)[0] * torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0])
    assert_close(trained, wanted, "in training")


# ---- the tables ---------------------------------------------------------------------------------

def test_a_model_is_what_its_row_says():
    """Encoding, half or full loss, and a memory as long as a segment or none."""
    for row in table6.ROWS[:9]:
        model = table6.make(row, table6.SCALES["tiny"], ON_CPU)
        assert (model.encoding, model.half_loss) == (row.encoding, row.loss == "half")
        assert model.config.mem_len == (8 if row.recurrence else 0)


def test_a_row_is_read_with_an_attention_of_L_tokens(notes, unread, monkeypatch):
    """With recurrence M is L - 1, the query being the last; without, a window of L.  Al-Rfou's has
    no positions beyond T.
    """
    asked, corpus, study = [], corpora.load(notes), table6.SCALES["tiny"]

    def note(*what):
        asked.append(what)
        return torch.ones(2, 30)

    monkeypatch.setattr(common, "memory_losses", lambda model, tokens, before, segment, **lengths:
                        note(segment, lengths))
    monkeypatch.setattr(common, "window_losses", lambda model, tokens, before, L: note(L))
    for row, wanted in (
            (table6.ROWS[0], [(8, {})] + [(64, {"mem_len": L - 1, "same_length": True})
                                          for L in (4, 8, 16, 24)]),
            (table6.ROWS[3], [(8,), (4,), (8,), (16,), (24,)]),
            (table6.ROWS[8], [(8,), (4,), (8,)])):
        asked.clear()
        table6.evaluate(table6.make(row, study, ON_CPU), row, study, corpus, 8)
        assert asked == wanted


def test_shuffled_lines_are_the_same_lines(notes):
    """Validation keeps its lines, but for the last, cut one; training draws an order each epoch."""
    corpus = corpora.load(notes)
    shuffled = table6.without_order(corpus)
    newline = corpus.vocab.index(10)
    assert shuffled.separator == newline and shuffled.train.equal(corpus.train)

    def lines(tokens):
        text = corpora.decode(tokens.long(), corpus.vocab)
        return Counter(line for line in text.split("\n")[1:-1] if line)

    before, after = lines(corpus.valid), lines(shuffled.valid)
    assert not shuffled.valid.equal(corpus.valid[: len(shuffled.valid)])
    assert sum((before - after).values()) <= 2 and sum((after - before).values()) <= 1


def test_order_is_compared_with_the_papers(capsys):
    """Three rows of two seeds: the second lies above the first, the third around both."""
    rows = [row for row in table6.ROWS if row.table == 7]
    losses = {rows[0]: (1.0, 1.05), rows[1]: (1.2, 1.3), rows[2]: (1.02, 1.4)}
    results = {row: [(z, {8: z + 0.5, 16: z}) for z in seeds]  # as trained, and by length
               for row, seeds in losses.items()}
    points = table6.report(7, rows, results, dict.fromkeys(rows, 1234))
    assert [above for _, above, _ in points] == [
        pytest.approx(z) for z in ([0, 0], [0.2, 0.25], [0.02, 0.35])]
    out = capsys.readouterr().out
    assert "1.250 ± 0.050" in out
    assert [line.split()[-1] for line in out.splitlines()[3:6]] == ["-", "same", "inconclusive"]
    assert table6.status([1.0, 1.1], [0.8, 0.9], 0.1) == "reversed"
