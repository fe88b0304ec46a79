"""Each experiment in small: it ends, draws its figure, and a second call trains nothing.

    pytest tests/experiments/test_tiny_runs.py
"""
import gc
from importlib import import_module

import pytest

common, train = import_module("common"), import_module("train")
RUNS = {  # script: flags, figures, beginnings of lines that are printed
    "table6_ablation": ("--size tiny --text {notes} --seeds 0", ("table6", "table7", "table10"), {
        "yes ours full": 3, "yes shaw full": 2, "yes ours half": 2, "no ours full": 3}),
    "table8_recl": ("--size tiny --text {notes} --seeds 0 1", ("recl",), {"shaw": 1, "lstm": 1}),
    "memory_length": ("--size tiny --text {notes} --seeds 0 1", ("memory_length",), {
        "1 0": 1, "1 8": 1, "2 0": 1, "2 8": 1}),
    "appendix_e_generation": ("--size tiny --dataset copies --seeds 0 1", ("generation",), {
        "with memory": 1, "without memory": 1, "true continuation": 1, "chance 0.125": 1}),
    "optimizers": ("--size tiny --seeds 0 1", ("optimizers",), {
        "adam sqrt": 4, "muon cosine": 4, "adam, ": 1, "muon, ": 1, "gradient: ": 1}),
    "table5_ptb": ("--size tiny --data-dir {words} --seeds 0 --what effects --only recipe",
            ("effects",), {"recipe": 1}),
    "table9_eval_speed": ("--size tiny --repetitions 2 --lanes 1 2 --lengths 5 20", ("speed",), {
        "5 ": 1, "20 ": 1})}
SLOW = "table6_ablation", "table8_recl", "memory_length", "appendix_e_generation", "optimizers"


@pytest.mark.parametrize("script", [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS])
def test_a_tiny_run(script, notes, words, tmp_path, monkeypatch, capsys):
    flags, figures, beginnings = RUNS[script]
    main, out = import_module(script).main, tmp_path / "out"
    out.mkdir()
    (out / "dtype").write_text("float32")  # else it is measured
    argv = ["--out", str(out), *flags.format(notes=notes, words=words).split()]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    for figure in figures:
        path = out / f"{figure}.png"
        assert f"figure: {path}\n" in printed and path.stat().st_size > 10_000
    lines = [" ".join(line.split()) + " " for line in printed.splitlines()]
    for beginning, n in beginnings.items():
        assert sum(line.startswith(beginning) for line in lines) == n, beginning
    if script == "table5_ptb" or script in SLOW:
        monkeypatch.setattr(train, "train_step", None)
        gc.collect()  # the first call's lock ends with what it has made, as with its process
        assert main(argv) == 0 and capsys.readouterr().out == printed
