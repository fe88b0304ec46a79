"""Memory length and depth: what is evaluated, where the gain ends, and the text where it is known.

    pytest tests/test_memory_length.py
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
    """Without and with clamp, at M + T - 1 of training; as trained, and so with same_length."""
    *_, setting = memory_length.SIZES["tiny"]
    corpus, seen = copies.corpus(4000), []
    monkeypatch.setattr(study, "memory_losses", lambda model, tokens, before, run, **lengths: (
        seen.append(lengths) or torch.full((2, 30), float(len(seen)))))
    free, clamped, trained, same = memory_length.evaluate(None, setting, corpus, 8)
    common = {"same_length": True, "segment": 64}
    assert seen == [{"mem_len": M, "clamp_len": clamp, **common} for clamp in (0, 15)
                    for M in setting.lengths] + [{}, {"same_length": True}]
    assert list(free.values()) == [1, 2, 3, 4] and list(clamped.values()) == [5, 6, 7, 8]
    assert (trained, same) == (9, 10)


def test_the_floor_bends_where_a_distance_ends():
    """All that M + 1 tokens tell: a name 21 back is known from M = 20 on, to the token."""
    tokens = copies.text(3000, 0)
    floor = {M: copies.best_loss(tokens, M + 1) for M in (19, 20, 43, 44, 67, 68, 91, 92, 200)}
    assert floor[19] > floor[20] == floor[43] > floor[44] == floor[67] > floor[68] == floor[91]
    assert floor[92] == floor[200] == 0 < floor[91]


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
    """One layer, any weights: a name 21 tokens before its copy, so 20 before the marker that is
    read last, moves the prediction of the copy with M = 20, and by exactly nothing with 19.
    """
    config = lesson_5.Config(24, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8)
    model = lesson_5.TransformerXL(config).double().eval()
    run = study.train.Run(batch=1, segment=4, steps=1, dtype="float32")
    tokens = copies.text(200, 5)
    place = next(i for i in range(40, 1600) if copies.is_copy(tokens)[i]
                 and tokens[i - 1] == copies.MARKERS)
    other = tokens.clone()
    other[place - 21] = (tokens[place - 21] + 1) % copies.NAMES
    for M in (18, 19, 20, 21, 30):
        losses = [study.memory_losses(model, z[None, place - 40 : place + 1].long(), 0, run,
                                      mem_len=M, same_length=True)[0, -1] for z in (tokens, other)]
        assert (losses[0] != losses[1]) == (M >= 20), M


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    """A validation split that is too short: said before anything is trained."""
    monkeypatch.setattr(study.Bar, "there", False)
    text = tmp_path / "notes.txt"
    text.write_text("too short " * 20)
    flags = ["--size", "tiny", "--text", str(text), "--out", str(tmp_path / "o")]
    assert memory_length.main(flags) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "10 tokens, 77 are needed" in error[0]
    assert not list((tmp_path / "o").iterdir())
