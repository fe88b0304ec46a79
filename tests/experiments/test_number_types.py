"""The comparison of number types trains both, and measures their distance.

    pytest tests/experiments/test_number_types.py
"""
from importlib import import_module

import pytest

number_types = import_module("number_types")


@pytest.mark.slow
def test_both_runs_and_their_distance(tmp_path, monkeypatch, capsys):
    """The printed distance is that of the two metrics files; a second call trains nothing again."""
    monkeypatch.setattr(number_types.lesson_1, "RUNS", tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("the cat sat on the mat, and then again the other cat. " * 60)
    flags = ["--steps", "40", "--model", "tiny", "--text", str(text), "--log-every", "2",
             "--device", "cpu"]
    assert number_types.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    curves = [[float(row["train"]) for row in number_types.log.read_metrics(
        tmp_path / f"number_types-{dtype}" / "metrics.tsv") if row["train"]]
        for dtype in ("float32", "bf16")]
    assert len(curves[0]) == len(curves[1]) == 20 and curves[0] != curves[1]
    wanted = max(abs(a - b) for a, b in zip(*(curve[2:] for curve in curves)))
    printed = next(line for line in lines if line.startswith("largest"))
    assert float(printed.split()[-1]) == pytest.approx(wanted, abs=1e-4)
    assert (tmp_path / "number_types.png").stat().st_size > 0
    monkeypatch.setattr(number_types.train, "main", lambda flags: 1 / 0)
    assert number_types.main(flags) == 0 and capsys.readouterr().out.splitlines()[-2] == printed
