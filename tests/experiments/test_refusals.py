"""What an experiment is given and cannot use is said in one line, with status 1; nothing is begun.

    pytest tests/experiments/test_refusals.py
    pytest tests/experiments/test_refusals.py -k ptb
"""
from importlib import import_module

import pytest
import torch

common, train = import_module("common"), import_module("train")
SMALL = "--scale tiny --text {short} --out new "
RUN, PTB = "--checkpoint {run} ", "--scale tiny --out new --data-dir {words} "
REFUSED = {
    "memory_length": [  # its flags are those of table6 and table8, too
        ("--seeds 1 1", "--seeds must be different"), (f"--seeds {2**63}", "--seeds must be"),
        ("--text a --dataset ptb", "two corpora"), ("--text no.txt", "no.txt"),
        ("--dataset nothing", "'nothing' is neither a file"), ("--device cuda", "no CUDA device"),
        ("--scale huge", "invalid choice"), (SMALL, "10 tokens, 77 are needed"),
        ("--scale tiny --text {short} --out {short}", "another folder with --out")],
    "table6_ablation": [(SMALL + "--tables 6", "10 tokens, 85 are needed"),
                        (SMALL + "--tables 7", "fewer than 200 in a split: leave out table 7")],
    "table8_recl": [(SMALL, "10 tokens, 202 are needed")],
    "table9_eval_speed": [("--lanes 0", "at least 1"), ("--what all", "invalid choice")],
    "table5_ptb": [
        (PTB + "--what effects --only no-luck", "no-luck"),
        (PTB + "--text a", "unrecognized"), (PTB + "--what effects --test", "--test is for")],
    "appendix_e_generation": [
        ("--checkpoint nowhere", "no checkpoint at nowhere"),
        ("--checkpoint {short}", "is damaged or no checkpoint"),
        (RUN + "--prompts 9 --n-tokens 60", "take 5,148"), (RUN + "--prompts 1", "--prompts"),
        (RUN + "--memory -1", "--memory"), (RUN + "--top-k 0", "--top-k must be at least 1"),
        (RUN + "--dataset stdlib", "unrecognized"),
        (RUN + "--prompts 2 --n-tokens 9 --out {short}", "another folder with --out")],
    "dynamic_evaluation": [
        ("--checkpoint nowhere", "no checkpoint at nowhere"),
        ("--chekpoint {run}", "did you mean --checkpoint"), (RUN + "--seed 5", "unrecognized"),
        (RUN + "--segment 0", "--segment must be at least 1"), ("--device cuda", "no CUDA device")],
    "figures5_to_7_attention": [
        ("--checkpoint nowhere", "no checkpoint at nowhere; "),
        (RUN + "--memory 0", "must be at least 1, got 0 and 4096"),
        (RUN + "--memory 20 --queries {all}", "tokens of the validation split, it has {n}"),
        (RUN + "--memory 20 --queries 8 --position 19", "--position must be 20 to {last}, "),
        (RUN + "--memory 20 --queries 8 --position {behind}", "--position must be 20 to {last}, ")]}


@pytest.mark.parametrize("script, flags, part", [
    (script, *row) for script, rows in REFUSED.items() for row in rows])
def test_one_line(script, flags, part, run_folder, words, tmp_path, monkeypatch, capsys):
    """On stderr, with status 1; nothing is trained or written, except the lock of a folder."""
    short, n = tmp_path / "short.py", len((run_folder.parent / "notes.txt").read_text()) // 20
    short.write_text("x = 10000\n" * 20)  # its splits: 180, 10 and 10 tokens
    names = {"run": run_folder, "words": words, "short": short, "n": f"{n:,}", "all": n,
             "last": n - 2, "behind": n - 1}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "train_step", None)
    monkeypatch.setattr(common.lesson_1, "RUNS", tmp_path / "runs")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    main = import_module(script).main
    assert main(flags.format(**names).split()) == 1
    error = capsys.readouterr().err.rpartition("\r")[2]  # behind the progress that slow ones show
    lines = [line for line in error.split("\n") if line.strip()]
    assert len(lines) == 1 and part.format(**names) in lines[0], lines
    assert lines[0].startswith(main.__module__ + ".py: ")
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in after - before} <= {"lock"}
