"""Tables 6, 7 and 10 use lesson 5's model, lesson 1's and Shaw's; their rows are as they say."""
import math
from collections import Counter
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import assert_close, randomized
from maths import oracle

table6, common = import_module("table6_ablation"), import_module("common")
corpora = import_module("support.corpora")
lesson_1, lesson_5 = import_module("01_vanilla_segments"), import_module("05_full_model")
CONFIG = lesson_5.Config(11, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=10, mem_len=5)


def made(encoding, half_loss=False):
    """A model in float64, for segments of 4; what is frozen stays 0."""
    config = CONFIG if encoding in ("ours", "shaw") else replace(CONFIG, mem_len=0)
    model = table6.AblationModel(config, 4, encoding, half_loss)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5)
    return model.double().eval()


def test_the_row_of_ours_is_lesson_5():
    """Same weights, two segments."""
    ours, wanted = made("ours"), randomized(lesson_5.TransformerXL(CONFIG)).eval()
    ours.load_state_dict(wanted.state_dict())
    memory = past = None
    for x, y in torch.randint(11, (2, 2, 2, 4)):
        loss, memory = ours(x, memory, y)
        other, past = wanted(x, past, y)
        assert_close(loss, other, "the losses")


def test_vaswani_is_lesson_1():
    """The same weights; what lesson 1 has not is 0."""
    wanted = randomized(lesson_1.VanillaTransformer(11, N=2, D=12, H=3, FF=10))
    ours, state = made("vaswani"), wanted.state_dict()
    for old, new in (("W_k.", "W_kE."), ("feed_forward.0", "W_1"), ("feed_forward.2", "W_2")):
        state = {name.replace(old, new): weight for name, weight in state.items()}
    ours.embedding.bias.data.zero_()
    assert not ours.load_state_dict(state, strict=False).unexpected_keys
    x, y = torch.randint(11, (2, 2, 9))  # longer than T = 4: a sinusoid goes on
    assert_close(ours(x, None, y)[0], lesson_1.token_losses(wanted(x), y), "the losses")


def test_shaws_score_is_terms_a_and_b_with_learned_distances():
    """Key by key; beyond the distances of training, up to 8, the farthest counts."""
    attention, zero = made("shaw").layers[0].attention, torch.zeros(3, 4).double()
    rows = torch.randn(2, 12, 12).double()
    memory, h = rows[:, :9], rows[:, 9:]
    mask = lesson_5.attention_mask(3, 9, 9, False)
    found = attention(h, memory, torch.randn(12, 12).double(), zero, zero, mask)  # no R counts
    learned = attention.W_kR.rows  # (9, H * C)
    attention.W_kR.weight = torch.eye(12).double()  # the encoding is the key
    R = learned[[min(distance, 8) for distance in range(12)]]
    wanted = [oracle.attended(attention, rows[:, : n + 1].unbind(1), R, zero, zero)
              for n in (9, 10, 11)]
    assert_close(found, torch.stack(wanted, 1), "the attention")


@pytest.mark.parametrize("n", [0, 1])
def test_al_rfou_adds_positions_before_each_layer(n):
    model = made("al-rfou")
    x, y = torch.randint(11, (2, 1, 4))
    before = model(x, None, y)[0][0]
    model.layers[n].positions.data[0, 2] += torch.randn(12)
    changed = (model(x, None, y)[0][0] - before).abs() > 1e-9
    assert changed.tolist() == [False, False, True, True]


def test_the_half_loss_counts_the_later_half_twice_in_training_only():
    """An odd segment of 5: tokens 2, 3 and 4."""
    half, full = made("ours", half_loss=True), made("ours")
    full.load_state_dict(half.state_dict())
    x, y = torch.randint(11, (2, 2, 5))
    assert_close(half(x, None, y)[0], full(x, None, y)[0], "in evaluation")
    wanted = full(x, None, y)[0] * torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0])
    assert_close(half.train()(x, None, y)[0], wanted, "in training")


def test_a_row_is_what_it_says_and_is_read_with_an_attention_of_L(notes, monkeypatch):
    """With recurrence M is L - 1, since the query counts; without, a window has L tokens.  Al-Rfou
    has no positions beyond T.  Term (c) belongs to u, (d) to v."""
    asked, corpus, study = [], corpora.load(notes), table6.SCALES["tiny"]
    monkeypatch.setattr(common, "memory_losses", lambda *given, **lengths: (
        asked.append((given[3], lengths)), torch.ones(2, 30))[1])
    monkeypatch.setattr(common, "window_losses", lambda *given: (
        asked.append(given[3]), torch.ones(2, 30))[1])
    by_memory = [(64, {"mem_len": L - 1, "same_length": True}) for L in (4, 8, 16, 24, 4)]
    for row in table6.ROWS[:15]:
        model = table6.make(row, study, SimpleNamespace(device="cpu"))
        assert (model.encoding, model.half_loss) == (row.encoding, row.loss == "half")
        assert model.config.mem_len == (8 if row.recurrence else 0)
        for z, encodings in ((model.u, ("ours", "ours-d")), (model.v, ("ours", "ours-c"))):
            assert z.requires_grad == bool(z.any()) == (row.encoding in encodings)
        asked.clear()
        table6.evaluate(model, row, study, corpus, 8)
        windows = [4, 8, 4] if row.encoding == "al-rfou" else [4, 8, 16, 24, 4]
        assert asked == (by_memory if row.recurrence else windows)


def test_table_7_shuffles_lines_and_chooses_on_valid(notes, tmp_path, monkeypatch):
    """The splits keep their lines, except the last, cut one; training draws an order each epoch."""
    corpus = corpora.load(notes)
    shuffled = table6.without_order(corpus)
    assert shuffled.separator == corpus.vocab.index(10) and shuffled.train.equal(corpus.train)
    for old, new in ((corpus.valid, shuffled.valid), (corpus.test, shuffled.test)):
        before, after = (Counter(corpora.decode(z.long(), corpus.vocab).split("\n"))
                         for z in (old, new))
        assert (before - after).total() <= 3 and (after - before).total() <= 3
        assert not new.equal(old[: len(new)])
    trained, read, job = [], [], SimpleNamespace(model=None)
    monkeypatch.setattr(common, "fit_seeds", lambda *given: trained.append(given[1]) or [job])
    monkeypatch.setattr(table6, "evaluate", lambda *given: read.append(given[3]) or (
        {8: 1.0, 16: 1.0}, 1.0))
    assert not table6.main(f"--scale tiny --dataset {notes} --tables 7 --out {tmp_path}".split())
    assert all(z.separator == shuffled.separator for z in trained)
    assert read[0].valid.equal(shuffled.valid) and read[0].test.equal(shuffled.test)


def test_the_length_is_chosen_on_valid_and_scored_on_test(notes, monkeypatch):
    """Of an eighth as many tokens; the shortest within 0.001 nats."""
    corpus, study, row = corpora.load(notes), table6.SCALES["tiny"], table6.ROWS[0]
    losses = {4: 1.2, 8: 1.0, 16: 0.9995}
    monkeypatch.setattr(common, "excerpts", lambda split, before, count, n, _: (
        "valid" if split is corpus.valid else "test", n))
    monkeypatch.setattr(common, "memory_losses", lambda _, tokens, *given, mem_len=0, **more: (
        torch.tensor(losses.get(mem_len + 1, 1.1) if tokens == ("valid", 3)
                     else 2.0 + mem_len if tokens == ("test", 30) else math.nan)))
    model = table6.make(row, study, SimpleNamespace(device="cpu"))
    found = table6.evaluate(model, row, study, corpus, 8)
    assert found == (pytest.approx({**losses, 24: 1.1}), 2.0 + 7)


def test_order_is_compared_with_the_papers(capsys):
    """Seed by seed: the second row is always above the first, the third not."""
    rows = [row for row in table6.ROWS if row.table == 7]
    losses = zip(rows, ((1.0, 1.05, 1.1), (1.2, 1.25, 1.33), (1.02, 1.02, 1.4)))
    results = {row: [({8: 1.0, 16: 0.9}, z) for z in seeds] for row, seeds in losses}
    points = table6.report(7, rows, results)
    assert points[1][1] == pytest.approx([0.2, 0.2, 0.23])
    lines = capsys.readouterr().out.splitlines()
    assert "1.260 ± 0.065" in lines[4]  # the mean, and half the range
    assert "0.210 ± 0.043" in lines[4]  # 4.303 * 0.01732 / sqrt(3)
    assert [line.split()[-1] for line in lines[3:6]] == ["-", "same", "bounded"]
    assert table6.status([-0.2, -0.3, -0.25], 0.1) == "reversed"
