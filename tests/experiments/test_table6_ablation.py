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


@pytest.fixture
def notes(tmp_path):
    """A small text with lines, as a file."""
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"line {i % 7} has {'a' * (i % 5)} cat\n" for i in range(4400)))
    return path


def test_the_papers_sizes():
    """128M parameters on WikiText-103 and 0.3B on One Billion Word."""
    for config, millions in ((table6.WT103, 128), (table6.LM1B, 301)):
        assert round(lesson_5.count_parameters(config) / 1e6) == millions
    assert table6.SIZES["paper"].run.segment == 128 and len(table6.ROWS) == 9 + 3 + 3


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
    with pytest.raises(ValueError, match="has none: leave out table 7"):
        table6.without_order(study.copies.corpus(400))


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
    assert table6.best(2.0, {8: 1.5, 16: 1.2009, 32: 1.2, 64: 1.3}) == (1.2, 16)
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
    swapped = results | {rows[0]: result(rows[0], 1.5, 1.6)}
    table6.report(7, rows, swapped, dict.fromkeys(rows, 1234))
    assert "tell 2 apart (by chance 1), 0 of them" in capsys.readouterr().out


@pytest.mark.slow
def test_all_tables_in_small(notes, tmp_path, capsys, monkeypatch):
    """Every row of every table, three figures; a second call trains nothing."""
    flags = ["--size", "tiny", "--text", str(notes), "--out", str(tmp_path / "out"), "--seeds", "0",
             "1"]
    assert table6.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("yes ", "no "))]
    assert len(rows) == 15
    for line, row in zip(rows, table6.ROWS):
        assert line.split()[:3] == ["yes" if row.recurrence else "no", row.encoding, row.loss]
        assert str(row.paper[0]) in line
    for table in (6, 7, 10):
        assert (tmp_path / "out" / f"table{table}.png").stat().st_size > 10_000
    trained = {path.name for path in (tmp_path / "out").glob("*.pt")}
    assert len(trained) == 2 * (9 + 3 + 2)  # table 10 shares its first row with table 6
    monkeypatch.setattr(study.train, "train_step", lambda *_: 1 / 0)
    assert table6.main(flags) == 0
    again = [line for line in capsys.readouterr().out.splitlines()
             if line.startswith(("yes ", "no "))]
    assert [line.split()[:3] for line in again] == [line.split()[:3] for line in rows]


def test_evaluation_sees_what_it_says(monkeypatch):
    """With recurrence M = L - 1 and same_length; without, windows of L; al-rfou not beyond T."""
    setting = table6.SIZES["tiny"]
    corpus = study.copies.corpus(40_000)
    setting = table6.replace(setting, config=table6.replace(
        setting.config, vocab_size=len(corpus.vocab)), run=table6.replace(
        setting.run, dtype="float32"))
    seen = []
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


def test_mistakes_are_one_line(notes, tmp_path, capsys, monkeypatch):
    """A split that is too short, a table that is not there."""
    monkeypatch.setattr(study.Bar, "there", False)
    notes.write_text("too short\n" * 20)
    for flags, words in ((["--text", str(notes), "--tables", "6"], "10 tokens, 85 are needed"),
                         (["--text", str(notes)], "fewer than 200"),
                         (["--tables", "9"], "invalid")):
        assert table6.main(["--size", "tiny", "--out", str(tmp_path / "out"), *flags]) == 1
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and words in error[0]


def test_kept_for_backward_counts_bytes():
    """exp keeps its result, a product both factors, a sum nothing; what is kept twice counts once.

    The unit is MiB, 2^20 bytes.
    """
    n = 1 << 16
    a, b = (torch.randn(n, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one = 8 * n / 2**20
    for function, wanted in ((lambda: a.exp(), 1), (lambda: a * b, 2), (lambda: a + b, 0),
                             (lambda: a * a, 1), (lambda: a.view(2, -1) * a.view(2, -1), 1),
                             (lambda: a.exp().exp(), 2)):
        assert table6.kept_for_backward(function) == wanted * one
