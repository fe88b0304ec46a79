"""Each experiment ends in a small run, prints its lines and saves its figures; a split that it must
not read fails when it is touched, and a second call trains nothing."""
from importlib import import_module

import pytest

train = import_module("train")
TRAINED = "--scale tiny --seeds 0 --out {out} "
TABLE_6 = TRAINED + "--dataset {notes} --tables "
PROGRAMS = {  # program: flags, split that must not be read, files, beginnings of printed lines
    "table6_ablation 6": (TABLE_6 + "6", None, ["table6.png"], [
        "yes ours full", "no ours full", "yes vaswani full", "yes ours-cd full"]),
    "table6_ablation 7": (TABLE_6 + "7", None, ["table7.png"], ["no ours full"]),
    "table6_ablation 10": (
        TABLE_6 + "10", None, ["table10.png", "none-ours-half-9-0/checkpoint.pt"],
        ["no ours full"]),
    "table8_recl": (TRAINED + "--dataset {notes}", None, ["recl.png"], ["shaw", "lstm"]),
    "when_memory_pays": (TRAINED + "--dataset {notes}", "test", ["when_memory_pays.png"], [
        "muon 4 16", "adam 1 16", "muon 1 0", "N 1:"]),
    "table5_ptb": (TRAINED + "--data-dir {words}", "test", ["recipe-0/checkpoint.pt"], ["seed 0:"]),
    "appendix_e_generation": ("--checkpoint {run} --out {out} --prompts 2 --n-tokens 9 --length 40 "
                              "--seeds 3 5", "valid", [], ["with memory", "chance"]),
    "dynamic_evaluation": ("--checkpoint {run} {run} --segment 16 --memory 16", "valid", [], [
        "static evaluation", "dynamic evaluation, sgd", "dynamic evaluation, rms"]),
    "longer_attention": ("--checkpoint {run} {run}", "valid", [], ["L 128:", "L 256, clamped:"]),
    "figures5_to_7_attention": (
        "--checkpoint {run} --out {out} --memory 20 --queries 16", "test",
        ["figure5_heads.png", "figure6_text.png", "figure7_terms.png"], ["position"]),
    "table9_eval_speed": ("--scale tiny --lengths 5 20", None, [], ["M 5:", "M 20:"])}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_small_run(program, notes, words, run_folder, unread, tmp_path, monkeypatch, capsys):
    flags, forbidden, files, beginnings = PROGRAMS[program]
    main, out = import_module(program.split()[0]).main, tmp_path / "out"
    if forbidden:
        unread(forbidden)
    monkeypatch.setattr(import_module("dynamic_evaluation"), "STATISTICS", 5)
    argv = flags.format(out=out, notes=notes, words=words, run=run_folder).split()

    def results():
        lines = [" ".join(line.split()) + " " for line in capsys.readouterr().out.splitlines()]
        return [[line for line in lines if line.startswith(start + " ")] for start in beginnings]

    assert main(argv) == 0
    found = results()
    assert all(found), found
    assert all((out / file).stat().st_size > 10_000 for file in files)
    if "--seeds 0" in flags:
        monkeypatch.setattr(train, "train_step", None)
        assert main(argv) == 0 and results() == found
