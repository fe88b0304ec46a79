"""Tables 6, 7 and 10: the paper's figures, shuffled lines, equal memory, and the counting of order.

    pytest tests/experiments/test_table6_ablation.py
"""
from collections import Counter
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

table6 = import_module("table6_ablation")
corpora, study = import_module("support.corpora"), import_module("study")
lesson_5 = import_module("05_full_model")
ON_CPU = SimpleNamespace(device="cpu")


def result(row, *seeds):
    """What report prints of a row: for each seed the loss as trained, and by length."""
    return [(z, {8: z + 0.5, 16: z}) for z in seeds]


def test_the_papers_sizes():
    """128M parameters on WikiText-103 and 0.3B on One Billion Word."""
    for config, millions in ((table6.WT103, 128), (table6.LM1B, 301)):
        assert round(lesson_5.count_parameters(config) / 1e6) == millions
    assert table6.SIZES["paper"].run.segment == 128 and len(table6.ROWS) == 9 + 3 + 3


@pytest.mark.parametrize("size, dataset, own", [
    ("laptop", "copies", "copies"), ("tiny", "copies", "tiny"), ("paper", "lm1b", "lm1b"),
    ("laptop", "lm1b", "laptop"), ("paper", "wt103", "paper")])
def test_two_corpora_have_settings_of_their_own(size, dataset, own):
    given = SimpleNamespace(size=size, dataset=dataset, synthetic=dataset == "copies")
    setting, found = table6.setting_of(given, SimpleNamespace(vocab=range(800_000)))
    assert found == own and setting.config.vocab_size == 800_000
    assert setting.run == table6.SIZES[own].run


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


def test_best_is_the_shortest_length_that_is_as_good():
    """Within 0.001; as trained may be better than all lengths."""
    assert table6.best(2.0, {4: 1.202, 8: 1.5, 16: 1.2009, 32: 1.2, 64: 1.3}) == (1.2, 16)
    assert table6.best(1.1, {8: 1.5, 16: 1.2}) == (1.1, "trained")


def test_order_is_counted_against_the_paper(capsys):
    """Three rows of two seeds: the second lies above the first, the third around both."""
    rows = [row for row in table6.ROWS if row.table == 7]
    losses = {rows[0]: (1.0, 1.05), rows[1]: (1.2, 1.3), rows[2]: (1.02, 1.4)}
    results = {row: result(row, *seeds) for row, seeds in losses.items()}
    points = table6.report(7, rows, results, dict.fromkeys(rows, 1234))
    assert [above for _, above, _ in points] == [
        pytest.approx(z) for z in ([0, 0], [0.2, 0.25], [0.02, 0.35])]
    assert points[2][2] == pytest.approx(0.0727, abs=1e-4)  # ln(27.1 / 25.2)
    out = capsys.readouterr().out
    # two seeds of equal models do not overlap in one of three cases: 3 pairs, 1
    assert "of 3 pairs of rows the seeds, which do not overlap, tell 1 apart (by chance 1), 1 of " \
           "them in the paper's order" in out
    assert "1.250 ± 0.050" in out and "0.225 ± 0.025" in out and "1,234" in out


def test_evaluation_sees_what_it_says(monkeypatch):
    """With recurrence M = L - 1 and same_length; without, windows of L; al-rfou not beyond T."""
    setting = table6.SIZES["tiny"]
    corpus, seen = study.copies.corpus(4_000), []
    monkeypatch.setattr(study, "memory_losses", lambda model, tokens, before, segment, **lengths: (
        seen.append((segment, lengths)) or torch.ones(2, 30)))
    monkeypatch.setattr(study, "window_losses", lambda model, tokens, before, L: (
        seen.append(L) or torch.ones(2, 30)))
    for row, wanted in ((table6.ROWS[0], [(8, {})] + [
            (64, {"mem_len": L - 1, "same_length": True}) for L in setting.lengths]),
            (table6.ROWS[3], [8, *setting.lengths]), (table6.ROWS[8], [8, 4, 8])):
        seen.clear()
        bar = study.Bar(100)
        table6.evaluate(None, row, setting, corpus, setting.run.segment, bar)
        assert bar.done == pytest.approx(setting.run.steps / 4)
        assert seen == wanted


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
