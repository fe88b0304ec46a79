"""The model that comes with the course: what it holds, and when it is used.

    pytest tests/system/test_pretrained.py
"""
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from support import corpora
from training import checkpoint, flags, job
from system.small_runs import again, failure, finished, no_curve_and_no_flush, small, text

train, lesson_5 = import_module("train"), import_module("05_full_model")
ROOT = flags.ROOT


@pytest.fixture(scope="module")
def saved():
    return checkpoint.to_evaluate(flags.PRETRAINED)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder for the runs in which there is none yet."""
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    return tmp_path


def sample(*flags):
    return train.main(["--sample", "class ", "--n-tokens", "3", "--device", "cpu", *flags])


# ---- what it is ---------------------------------------------------------------------------------

def test_it_is_small_and_holds_weights_sizes_and_vocabulary(saved):
    assert [path.name for path in flags.PRETRAINED.glob("*.pt")] == ["best.pt"]
    assert saved.path.stat().st_size <= 4_000_000
    assert "optimizer" not in saved and saved["state"]["memory"] is None
    assert saved["run"]["text"] == "" and len(saved["vocab"]) == saved["config"]["vocab_size"]


def test_it_predicts_a_text_of_the_repository(saved):
    """Loaded strictly, float32: the licence costs what it cost when the model came in."""
    model, run, _ = job.restored(saved, "cpu")
    tokens = corpora.encode((ROOT / "LICENSE").read_text(encoding="utf-8"), saved["vocab"])
    bits = train.evaluate(model, tokens, replace(run, dtype="float32")) / math.log(2)
    assert bits == pytest.approx(2.1030, abs=0.002)


def test_the_readme_says_which_text_it_was_trained_on(saved):
    said = (flags.PRETRAINED / "README.md").read_text(encoding="utf-8")
    assert f"checksum {saved['text']}" in said and f"{saved['state']['step']:,} steps" in said


# ---- when it is used ----------------------------------------------------------------------------

def test_it_speaks_where_there_is_no_run_yet(home, capsys):
    assert sample() == 0
    said = capsys.readouterr().out
    assert "no run of yours" in said and str(flags.PRETRAINED) in said and "class " in said


def test_a_run_of_ones_own_comes_first(home, small, capsys):
    (home / "runs").mkdir()
    small().rename(home / "runs" / "stdlib-laptop")
    assert train.main(["--sample", "a", "--n-tokens", "3", "--device", "cpu"]) == 0
    assert str(flags.PRETRAINED) not in capsys.readouterr().out


@pytest.mark.parametrize("named", ["--out nowhere", "--dataset stdlib", "--text LICENSE",
                                   "--model laptop"])
def test_it_does_not_stand_for_a_run_that_is_named(home, named, capsys):
    assert "no checkpoint at" in failure(capsys, sample(*named.split()))


def test_training_is_not_begun_from_it(home, capsys):
    assert "no checkpoint at" in failure(capsys, train.main(["--resume", "--device", "cpu"]))


# ---- another Python, whose library is another text ----------------------------------------------

def another(vocab):
    """A library of 100 bytes whose vocabulary has the same bytes in another order."""
    splits = (torch.randint(len(vocab), (n,), dtype=torch.uint8) for n in (80, 10, 10))
    return corpora.Corpus(*splits, vocab[::-1], "stdlib (Python 4)")


def test_the_library_of_another_python_is_read_in_its_tokens(saved, home, capsys, monkeypatch):
    """The bytes stay what they are; it is said."""
    other = another(saved["vocab"])
    monkeypatch.setattr(job, "load", lambda *given, **options: other)
    seen = []
    monkeypatch.setattr(train, "evaluate", lambda model, tokens, *rest, **options: (
        seen.append(tokens), 1.0)[1])
    assert train.main(["--eval-only", "--device", "cpu"]) == 0
    assert "another Python" in capsys.readouterr().out
    assert corpora.as_bytes(seen[0], saved["vocab"]) == corpora.as_bytes(other.test, other.vocab)


def test_a_byte_that_it_never_met_is_named(saved):
    other = another(saved["vocab"])
    with pytest.raises(ValueError, match=r"bytes that the vocabulary lacks: \[7\]"):
        corpora.with_vocabulary(replace(other, vocab=[*other.vocab[1:], 7]), saved["vocab"])


def test_a_run_does_not_go_on_with_another_library(saved, home, capsys, monkeypatch):
    monkeypatch.setattr(job, "load", lambda *given, **options: another(saved["vocab"]))
    folder = home / "run"
    folder.mkdir()
    checkpoint.save(folder / "checkpoint.pt", dict(saved))
    assert "not the text" in failure(capsys, again(folder, "--resume"))
