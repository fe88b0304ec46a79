"""Tables 6, 7 and 10, and memory_length: lengths, shuffled lines, equal memory, order.

    pytest tests/experiments/test_tables.py
"""
import math
from collections import Counter
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

table6, memory_length = import_module("table6_ablation"), import_module("memory_length")
corpora, common = import_module("support.corpora"), import_module("common")
ON_CPU = SimpleNamespace(device="cpu")


def test_a_model_is_what_its_row_says():
    """Encoding, half or full loss, and a memory as long as a segment or none."""
    for row in table6.ROWS[:9]:
        model = table6.make(row, table6.SIZES["tiny"], ON_CPU)
        assert (model.encoding, model.half_loss) == (row.encoding, row.loss == "half")
        assert model.config.mem_len == (8 if row.recurrence else 0)


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


def test_equal_memory_is_measured():
    """Without recurrence there is room for longer segments, and not for one step longer still."""
    setting = table6.SIZES["tiny"]
    with_memory, without, _ = (row for row in table6.ROWS if row.table == 10)
    T, limit = table6.longest_segment(with_memory, setting, ON_CPU)
    longer, MiB = table6.longest_segment(without, setting, ON_CPU)
    assert T == setting.run.segment < longer and 0.8 * limit < MiB <= limit
    step = table6.replace(setting, run=table6.replace(setting.run, segment=longer + 1))
    assert table6.longest_segment(table6.replace(with_memory, recurrence=False), step, ON_CPU
                                  )[1] > limit


def test_order_is_counted_against_the_paper(capsys):
    """Three rows of two seeds: the second lies above the first, the third around both.  Two seeds
    of equal models do not overlap in one of three cases: 3 pairs, 1.
    """
    rows = [row for row in table6.ROWS if row.table == 7]
    losses = {rows[0]: (1.0, 1.05), rows[1]: (1.2, 1.3), rows[2]: (1.02, 1.4)}
    results = {row: [(z, {8: z + 0.5, 16: z}) for z in seeds]  # as trained, and by length
               for row, seeds in losses.items()}
    points = table6.report(7, rows, results, dict.fromkeys(rows, 1234))
    assert [above for _, above, _ in points] == [
        pytest.approx(z) for z in ([0, 0], [0.2, 0.25], [0.02, 0.35])]
    out = capsys.readouterr().out
    assert "of 3 pairs of rows the seeds, which do not overlap, tell 1 apart (by chance 1), 1 of " \
           "them in the paper's order" in out and "1.250 ± 0.050" in out


@pytest.fixture
def seen(monkeypatch):
    """What the losses were asked for, in order; each loss is the number of its call."""
    calls = []

    def losses(given):
        calls.append(given)
        return torch.full((2, 30), float(len(calls)))

    monkeypatch.setattr(common, "memory_losses", lambda model, tokens, before, segment, **lengths:
                        losses((segment, lengths)))
    monkeypatch.setattr(common, "window_losses", lambda model, tokens, before, L: losses(L))
    return calls


def test_evaluation_sees_what_it_says(seen):
    """With recurrence M = L - 1 and same_length; without, windows of L; al-rfou not beyond T."""
    setting, corpus = table6.SIZES["tiny"], SimpleNamespace(valid=torch.arange(200) % 7)
    for row, wanted in ((table6.ROWS[0], [(8, {})] + [
            (64, {"mem_len": L - 1, "same_length": True}) for L in setting.lengths]),
            (table6.ROWS[3], [8, *setting.lengths]), (table6.ROWS[8], [8, 4, 8])):
        seen.clear()
        table6.evaluate(None, row, setting, corpus, setting.run.segment, common.Bar(100))
        assert seen == wanted


def test_the_memories_that_are_tried(seen):
    """Without and with clamp, at M + T - 1 of training; as trained, and with same_length and
    M + T / 2 keys.
    """
    *_, setting = memory_length.SIZES["tiny"]
    free, clamped, *others = memory_length.evaluate(
        None, setting, SimpleNamespace(valid=torch.arange(200) % 7), 8, common.Bar(100))
    wanted = [(64, {"mem_len": M, "clamp_len": clamp, "same_length": True})
              for clamp in (0, 15) for M in setting.lengths]
    assert seen == [*wanted, (8, {"mem_len": 12, "same_length": True}), (8, {})]
    assert [*free.values(), *clamped.values(), *others] == [*range(1, 9), 10, 9]


def test_the_best_loss_is_that_of_a_counter_who_knows_the_rule():
    """ln 8 for a kind whose distance is too far, the entropy of a copy for the others."""
    tokens, n = corpora.draw_copies(60_000, 4).long(), len(corpora.DISTANCES)
    right = corpora.KEPT + (1 - corpora.KEPT) / corpora.EACH
    for c in (23, 24, 47, 48, 72, 95, 96, 200):
        total = 0.0
        for kind, d in enumerate(corpora.DISTANCES):
            places = torch.arange(200 + kind, 60_000, n)
            same = tokens[places] == tokens[places - d]
            wrong = (1 - right) / (corpora.EACH - 1)
            losses = torch.where(same, -math.log(right), -math.log(wrong))
            total += (losses.mean().item() if d <= c else math.log(corpora.EACH)) / n
        assert memory_length.best_loss(c) == pytest.approx(total, abs=0.01), c


def test_kept_for_backward_counts_bytes():
    """exp keeps its result, a product both factors, a sum nothing; what is kept twice counts once.

    The unit is MiB, 2^20 bytes.
    """
    n = 1 << 16
    a, b = (torch.randn(n, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one = 8 * n / 2**20
    for function, wanted in ((lambda: a.exp(), 1), (lambda: a * b, 2), (lambda: a + b, 0),
                             (lambda: a.view(2, -1) * a.view(2, -1), 1)):
        assert table6.kept_for_backward(function) == wanted * one
