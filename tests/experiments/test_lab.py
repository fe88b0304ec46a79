"""Test the lab from end to end at the scale tiny: train, measure, append, kill, resume."""
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from course.exercises import ROOT
from experiments import lab, measures, variants
from helpers import assert_close
from support import corpora

TINY = ["--scale", "tiny", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_text(tmp_path, monkeypatch):
    """The lab's text is a small file, not Python's library."""
    path, load = tmp_path / "notes.txt", corpora.load
    path.write_text("".join(f"n{i // 9}_a {'a' * (i % 5)}\n" for i in range(4400)))
    monkeypatch.setattr(corpora, "load", lambda name, **more: load(str(path), **more))


def run(out, *flags):
    """Run the lab -> its status and the lines of its table."""
    status = lab.main([*TINY, "--out", str(out), *flags])
    return status, lab.read_results(out / "results.tsv")


def test_models_with_known_losses_have_known_results_once(tmp_path, monkeypatch, capsys):
    """The validation loss is lowest at L = 16, the test loss at 4, and hard tokens need less.

    With L = 16 tokens 5, 4 and 3 of the test split, by falling loss, gain from contexts of up to 8,
    16 and 24; with L = 11 all gain up to 12.  An excerpt has 24 tokens before those that count.
    """
    draw, forward, begun, read = random.Random(0), variants.Variant.forward, [], []
    text = [*draw.choices("ab", k=36_000), *2000 * "v", *draw.choices("xyz", (5, 3, 2), k=2000)]
    (tmp_path / "notes.txt").write_text("".join(text))

    def known(model, x, memory=None, y=None, last_only=False):
        if model.training and memory is None:
            begun.append((x[0, :8].tolist(), model.layers[0].W_1.weight.sum().item()))
        if model.training or y is None:
            return forward(model, x, memory, y, last_only)
        L = 1 + model.config.mem_len * model.config.same_length  # 1 in a window
        c = torch.arange(1, x.shape[1] + 1)
        gain = {16: torch.minimum(c, 48 - 8 * y), 11: c.clamp(max=12), 4: 30}.get(L, 0)
        return x.shape[1] + torch.where(y == 2, abs(L - 16), 3 * y - gain / 20), None

    def again(*rows):
        return run(tmp_path, "--rows", *rows, "--seeds", "0", "1", "2", "--steps", "5")

    monkeypatch.setattr(variants.Variant, "forward", known)
    monkeypatch.setattr(lab, "Reader", lambda model: read.append(model) or model)
    rows = "ours", "ours-none-176", "vaswani"
    monkeypatch.setattr(lab, "GROUPS", {"recl": rows[:2]})
    status, lines = again(*rows)
    assert (status, len(read)) == (0, 6)  # no Reader for Vaswani's
    assert all(set(line) == set(lab.RESULT_COLUMNS) and line["steps"] == "5" for line in lines)
    found = {(line["row"], line["measure"], line["length"], line["seed"]): float(line["value"])
             for line in lines}
    assert len(found) == len(lines)  # none twice
    assert {("ours", "attention b", "4", "2"), ("ours", "apart d", "", "0")} <= {*found}
    for row, seed, recl in (rows[0], "1", [8, 16, 24]), (rows[1], "2", [12, 12, 12]):
        assert [found[row, "recl", r, seed] for r in ("0.1", "0.5", "1.0")] == recl
        mean = found[row, "test windows", "4", seed] - 4  # three times a token
        for L in 4, 8, 16, 24:
            assert found[row, "valid windows", str(L), seed] == L + 15
            assert found[row, "test windows", str(L), seed] == pytest.approx(L + mean)
    assert [found["ours", "valid memory", L, "1"] for L in ("4", "8", "16")] == [52, 48, 40]
    assert found["ours", "test memory", "4", "1"] == pytest.approx(mean + 54.5)
    for each in zip(*begun):  # the first segment and the weights: a seed's rows have the same
        assert [each.index(z) for z in each] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    with monkeypatch.context() as patch:
        patch.setattr(lab, "train_row", lambda *given: pytest.fail("trained again"))
        assert again(*rows) == (0, lines)
    with monkeypatch.context() as patch:  # another machine: neither its numbers nor its weights
        patch.setattr(lab.machine, "name", lambda device: "another")
        assert again("ours") == (1, lines)
    assert "other settings (machine)" in capsys.readouterr().err
    # another group needs the losses by context again, and nothing else is written twice
    (tmp_path / "ours-2" / "contexts.pt").unlink()
    monkeypatch.setattr(lab, "GROUPS", {"recl": rows[:2], "other": ("lstm", "ours")})
    _, after = again("ours", "lstm")
    assert after[: len(lines)] == lines
    added = {(line["row"], line["measure"], line["seed"]) for line in after[len(lines) :]}
    assert added == {(row, measure, seed) for seed in "012" for row, measure in (
        ("ours", "other"), *(("lstm", each) for each in (
            "other", "parameters", "copying", "valid memory", "test memory")))}


@pytest.mark.parametrize("name", ["lab", "report", "speed", "official_weights"])
def test_a_file_that_is_run_by_its_path_prints_its_command(name):
    found = subprocess.run([sys.executable, ROOT / f"experiments/{name}.py"], capture_output=True)
    assert found.returncode and found.stderr.count(b"\n") == 1
    assert f"python -m experiments.{name} ".encode() in found.stderr


def test_words_are_averaged_at_one_rate_and_both_splits_read_whole(tmp_path, monkeypatch, capsys):
    """The mean of the weights after the last three of ten steps counts, after two kills too.

    One is a Ctrl-C in training, one comes while measuring: neither leaves a line.
    """
    tiny, step, seen = variants.SCALES["tiny"], lab.train.train_step, []
    monkeypatch.setitem(variants.SCALES, "tiny", replace(
        tiny, dataset="ptb", recipe=replace(tiny.recipe, steps=10), lengths=(4,)))

    def watch(model, optimizer, *given):
        found = step(model, optimizer, *given)
        seen.append((optimizer.param_groups[0]["lr"], model.layers[1].W_1.weight.clone()))
        if len(seen) == 8:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(lab.train, "train_step", watch)
    monkeypatch.setattr(lab, "Reader", lambda model: model)
    monkeypatch.setattr(measures.train, "evaluate", lambda model, tokens, recipe: (
        assert_close(model.layers[1].W_1.weight, sum(W for _, W in seen[7:]) / 3, "mean", 1e-6),
        len(tokens) + recipe.eval_mem_len)[1])
    flags = "--rows", "words-both", "--seeds", "0"
    assert run(tmp_path, *flags) == (130, [])
    assert "the same command resumes" in capsys.readouterr().err
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(measures, "losses_of_splits", lambda *given: exit())
        run(tmp_path, *flags)
    assert not (tmp_path / "results.tsv").exists()
    status, lines = run(tmp_path, *flags)
    assert status == 0 and len({rate for rate, _ in seen[7:]}) == 1 and seen[6][0] != seen[7][0]
    assert [line["measure"] for line in lines] == ["parameters", "valid memory", "test memory"]
    assert run(tmp_path, *flags, "--dtype", "bf16") == (1, lines)
    assert "other settings (recipe); name another folder" in capsys.readouterr().err
