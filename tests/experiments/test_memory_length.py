"""Memory length and depth: what is evaluated, where the gain ends, and the text where it is known.

    pytest tests/experiments/test_memory_length.py
"""
from importlib import import_module

import pytest
import torch

memory_length = import_module("memory_length")
study, lesson_5 = memory_length.study, import_module("05_full_model")
copies = study.copies


def test_where_the_gain_ends():
    """The shortest memory within 0.002 of the best."""
    assert memory_length.where({4: 1.203, 8: 1.2019, 16: 1.2, 32: 1.21}) == (1.2, 8)
    assert memory_length.where({4: 1.0, 8: 1.2}) == (1.0, 4)


def test_the_lengths_that_are_tried(monkeypatch):
    """Without and with clamp, at M + T - 1 of training; as trained, and with
    same_length and M + T / 2 keys.
    """
    *_, setting = memory_length.SIZES["tiny"]
    corpus, seen, bar = copies.corpus(40_000), [], study.Bar(100)
    monkeypatch.setattr(study, "memory_losses", lambda model, tokens, before, segment, **lengths: (
        seen.append((segment, lengths)) or torch.full((2, 30), float(len(seen)))))
    free, clamped, trained, same = memory_length.evaluate(
        None, setting, corpus, 8, bar)
    wanted = [(64, {"mem_len": M, "clamp_len": clamp, "same_length": True})
              for clamp in (0, 15) for M in setting.lengths]
    assert seen == [*wanted, (8, {"mem_len": 12, "same_length": True}), (8, {})]
    assert bar.done == pytest.approx(setting.run.steps / 4)
    assert list(free.values()) == [1, 2, 3, 4] and list(clamped.values()) == [5, 6, 7, 8]
    assert (trained, same) == (10, 9)


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["a file", "copies"])
def test_the_experiment_in_small(known, tmp_path, capsys):
    """A line for each depth and memory with their gains; a figure; the floor where it is known."""
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"line {i % 7} has {'a' * (i % 5)} cat\n" for i in range(900)))
    flags = ["--dataset", "copies"] if known else ["--text", str(text)]
    out = tmp_path / "out"
    assert memory_length.main(["--size", "tiny", "--out", str(out), "--seeds", "0", "1", *flags]
                              ) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:2] for line in lines if line[:2].strip().isdigit()]
    assert rows == [["1", "0"], ["1", "8"], ["2", "0"], ["2", "8"]]
    assert any(line.startswith("what M + 1 tokens tell: M 1: 2.079") for line in lines) == known
    assert (out / "memory_length.png").stat().st_size > 10_000
    assert len(list(out.glob("*.pt"))) == 8


def test_a_memory_ends_at_the_token():
    """One layer, any weights: a symbol that comes back after 24 tokens, so 23 before the query,
    moves its prediction with M = 23, and by exactly nothing with 22.
    """
    config = lesson_5.Config(32, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8)
    model = lesson_5.TransformerXL(config).double().eval()
    tokens = copies.text(41, 5).long()
    other = tokens.clone()
    other[40 - 24] = (tokens[40 - 24] + 1) % copies.EACH
    for M in (20, 22, 23, 24, 30):
        losses = [study.memory_losses(model, z[None], 0, 4, mem_len=M, same_length=True)[0, -1]
                  for z in (tokens, other)]
        assert (losses[0] != losses[1]) == (M >= 23), M


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    """A validation split that is too short: said before anything is trained."""
    monkeypatch.setattr(study.Bar, "there", False)
    text = tmp_path / "notes.txt"
    text.write_text("too short " * 20)
    flags = ["--size", "tiny", "--text", str(text), "--out", str(tmp_path / "o")]
    assert memory_length.main(flags) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "10 tokens, 77 are needed" in error[0]
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["lock"]
