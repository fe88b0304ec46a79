"""What the experiments share: training goes on to the bit, and losses are after so many tokens.

    pytest tests/test_study.py
"""
import argparse
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import assert_close, randomized

study, ablation_model = import_module("study"), import_module("ablation_model")
corpora, lesson_5 = import_module("corpora"), import_module("05_full_model")
Config = lesson_5.Config
CONFIG = Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6, dropout=0.2)
RUN = study.train.Run(batch=2, segment=5, steps=7, dtype="float32", warmup=2)
FLOAT64 = replace(RUN, segment=4)


def text(n, separator=None):
    """A corpus of n random tokens below 7."""
    tokens = torch.randint(7, (n,), dtype=torch.uint8)
    return corpora.Corpus(tokens, tokens, tokens, list(range(7)), "random", separator)


# ---- training -----------------------------------------------------------------------------------

@pytest.mark.parametrize("separator", [None, 3], ids=["one text", "sentences"])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_what_is_stopped_goes_on_to_the_bit(at, separator, tmp_path, monkeypatch):
    """Stopped in a step, some steps after the last save; the text begins again on the way."""
    corpus, step = text(47, separator), study.train.train_step
    monkeypatch.setattr(study, "EVERY", 0)

    def fit(path):
        torch.manual_seed(1)
        return study.fit(lesson_5.TransformerXL(CONFIG), corpus, RUN, path, study.Bar(7))

    def stop_at(model, *rest):
        if len(calls) == at:
            raise KeyboardInterrupt
        calls.append(1)
        return step(model, *rest)

    whole, calls = fit(tmp_path / "whole.pt").state_dict(), []
    monkeypatch.setattr(study.train, "train_step", stop_at)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut.pt")
    monkeypatch.setattr(study.train, "train_step", step)
    torch.manual_seed(99)
    gone_on = fit(tmp_path / "cut.pt").state_dict()
    assert all(whole[name].equal(gone_on[name]) for name in whole)
    monkeypatch.setattr(study.train, "train_step", lambda *_: 1 / 0)  # finished: nothing is trained
    again = fit(tmp_path / "cut.pt")
    assert not again.training and all(
        whole[name].equal(z) for name, z in again.state_dict().items())


def test_a_text_begins_again_without_a_past(tmp_path, monkeypatch):
    """Two lanes of 11 in segments of 5: steps 0, 3 and 6 have no memory; what is done is skipped.
    """
    step, pasts, bar = study.train.train_step, [], study.Bar(14)

    def watched(model, optimizer, x, y, memory, run):
        pasts.append((x.shape[1], memory is not None))
        return step(model, optimizer, x, y, memory, run)

    monkeypatch.setattr(study.train, "train_step", watched)
    for _ in range(2):
        study.fit(lesson_5.TransformerXL(CONFIG), text(23), RUN, tmp_path / "m.pt", bar, weight=2)
    assert pasts == [(5, False), (5, True), (1, True)] * 2 + [(5, False)]
    assert bar.done == 14 and bar.total == 0


def test_another_run_or_a_damaged_one_is_not_taken(tmp_path):
    """Other steps, another model, another text, half a file; the seed is in the settings, too."""
    path, corpus = tmp_path / "m.pt", text(60)
    run = replace(RUN, steps=1)
    study.fit(lesson_5.TransformerXL(CONFIG), corpus, run, path, study.Bar(1))
    content = path.read_bytes()
    for config, other, words in ((CONFIG, text(60), "random"), (replace(CONFIG, d_inner=9), 0, "9"),
                                 (CONFIG, run, "steps=2"), (CONFIG, run, "seed=5")):
        changed = {"steps=2": {"steps": 2}, "seed=5": {"seed": 5}}.get(words, {})
        another = replace(other, name="random 2") if isinstance(other, corpora.Corpus) else corpus
        with pytest.raises(ValueError, match="other settings.*name another folder"):
            study.fit(lesson_5.TransformerXL(config), another, replace(run, **changed), path,
                      study.Bar(1))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged.*delete it"):
        study.fit(lesson_5.TransformerXL(CONFIG), corpus, run, path, study.Bar(1))
    assert path.read_bytes() == content[: len(content) // 2]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    """OSError from the third saving; what the second has written is whole."""
    path, save, calls = tmp_path / "m.pt", torch.save, []
    monkeypatch.setattr(study, "EVERY", 0)

    def full(content, file):
        calls.append(1)
        save(content, file)
        if len(calls) == 3:
            raise OSError("No space left on device")

    monkeypatch.setattr(study.torch, "save", full)
    with pytest.raises(OSError, match="could not write.*No space left"):
        study.fit(lesson_5.TransformerXL(CONFIG), text(60), RUN, path, study.Bar(7))
    assert torch.load(path, weights_only=True)["place"][0] == 2 and len(calls) == 3
    assert list(tmp_path.iterdir()) == [path]


# ---- losses after so many tokens ----------------------------------------------------------------

def model_of(kind, **changes):
    """A random model in float64 without dropout."""
    config = replace(CONFIG, dropout=0.0, **changes)
    if kind == "ours":
        return randomized(lesson_5.TransformerXL(config)).eval()
    return randomized(ablation_model.AblationModel(config, 4, kind)).eval()


def test_pieces_carry_the_context_before_them():
    """Three pieces of 4 predictions, 2 tokens of context."""
    found = study.pieces(torch.arange(20), 2, 3, 4)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9, 10],
                              [8, 9, 10, 11, 12, 13, 14]]
    with pytest.raises(ValueError, match="14 tokens, 15 are needed"):
        study.pieces(torch.arange(14), 2, 3, 4)


@pytest.mark.parametrize("kind", ["ours", "shaw"])
@pytest.mark.parametrize("segment", [3, 16])
def test_a_memory_is_what_one_pass_over_the_piece_sees(kind, segment):
    """With same_length any cut gives the one pass's losses, behind the context."""
    model = model_of(kind)
    tokens = study.pieces(torch.randint(7, (60,)), 9, 2, 10)
    found = study.memory_losses(model, tokens, 9, FLOAT64, segment, mem_len=4, same_length=True)
    with study.lengths(model, FLOAT64, mem_len=4, same_length=True):
        wanted = model(tokens[:, :-1], None, tokens[:, 1:])[0]
    assert found.shape == (2, 10)
    assert_close(found.double(), wanted[:, 9:], "the losses", 1e-5)
    assert model.config.mem_len == 6 and not model.config.same_length


@pytest.mark.parametrize("L, stride", [(3, 1), (4, 1), (8, 2), (12, 3)])
def test_a_window_gives_its_last_quarter(L, stride):
    """Each prediction from a window of its own, cut out by hand; 10 is no multiple of 3."""
    model = model_of("vaswani", mem_len=0)
    tokens = study.pieces(torch.randint(7, (60,)), 12, 2, 10)
    found, n = study.window_losses(model, tokens, 12, L, FLOAT64), 10
    assert found.shape == (2, n)
    for j in range(n):
        end = min(12 + (j // stride + 1) * stride, 12 + n)  # behind the window's last input
        window = tokens[:, end - L : end]
        loss = model(window, None, tokens[:, end - L + 1 : end + 1])[0]
        assert_close(found[:, j].double(), loss[:, L - (end - 12 - j)].detach(), f"loss {j}", 1e-5)


def test_only_copies_count_in_the_text_with_known_lengths():
    """All targets of another text."""
    copies = study.copies
    corpus = copies.corpus(400)
    tokens = study.pieces(corpus.valid, 20, 2, 50)
    mask = study.counted(corpus, tokens, 20)
    assert mask.shape == (2, 50) and mask.equal(copies.is_copy(tokens)[:, 21:]) and mask.any()
    assert study.counted(text(200), tokens, 20).all()


def test_spread_is_mean_and_half_the_range():
    assert study.spread([1.0, 2.0, 4.5]) == "2.500 ± 1.750"


# ---- the command line ---------------------------------------------------------------------------

def test_the_bar_says_how_long_the_rest_takes(monkeypatch, capsys):
    """Ten units, two skipped, six done in 12 s: two left, 4 s."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(study.time, "monotonic", lambda: clock.now)
    bar = study.Bar(10)
    bar.skip(2)
    clock.now += 12
    bar.advance("a model", 6)
    assert "a model | 75% | 12s, 4s left" in capsys.readouterr().err
    study.Bar.clear()
    study.Bar.clear()  # nothing is there any more
    assert capsys.readouterr().err == "\r" + " " * 78 + "\r"


def parsed(*argv):
    return study.checked(study.flags_of("name", "about", ("tiny", "laptop", "paper")).parse_args(argv),
                         "name")


def test_flags_and_their_folder(tmp_path, monkeypatch):
    """The folder is named after experiment, size and text."""
    monkeypatch.setattr(study, "RUNS", tmp_path)
    given, corpus = parsed("--dataset", "copies", "--seeds", "4")
    assert given.out == tmp_path / "name-laptop-copies" and given.out.is_dir()
    assert corpus.name.startswith("copies") and given.seeds == [4]
    note = tmp_path / "notes.txt"
    note.write_text("the cat sat on the mat. " * 20)
    monkeypatch.setattr(study.corpora, "load", lambda name, root: name)
    for size, usual in (("tiny", "stdlib"), ("laptop", "stdlib"), ("paper", "wt103")):
        given, corpus = parsed("--size", size)
        assert corpus == usual and given.out == tmp_path / f"name-{size}-{usual}"
    monkeypatch.undo()
    given, corpus = parsed("--text", str(note), "--out", str(tmp_path / "x"), "--size", "tiny")
    assert given.out == tmp_path / "x" and corpus.name == "notes.txt"


@pytest.mark.parametrize("argv, words", [
    (["--seeds", "1", "1"], "--seeds must be different"), (["--seeds", "-1"], "at least 0"),
    (["--text", "a", "--dataset", "ptb"], "two corpora"), (["--size", "huge"], "invalid choice"),
    (["--dataset", "nothing"], "'nothing' is neither a file"), (["--text", "no.txt"], "no.txt"),
    (["--seeds", "x"], "invalid int"), (["--device", "cuda"], "no CUDA device")], ids=str)
def test_a_mistake_is_one_line(argv, words, tmp_path, monkeypatch, capsys):
    """Status 1, and no folder is made."""
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(study.Bar, "there", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert study.ended("name", lambda argv: parsed(*argv), argv) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and words in error[0] and error[0].startswith("name.py: ")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_says_how_to_go_on(capsys):
    """Status 130."""
    def stop(argv):
        raise KeyboardInterrupt
    assert study.ended("name", stop, []) == 130
    assert "the same command goes on" in capsys.readouterr().err
