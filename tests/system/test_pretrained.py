"""Test the model that is included in the course: its content, and when it is used."""
import math
from dataclasses import replace
from importlib import import_module
from unittest.mock import Mock

import pytest
import torch

from support import corpora
from training import checkpoint, flags, job, presets, text as texts

train = import_module("train")
CPU = "--n-tokens", "3", "--device", "cpu"


@pytest.fixture(scope="module")
def saved():
    return checkpoint.to_evaluate(flags.PRETRAINED)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a folder for runs that contains no run yet."""
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    return tmp_path


def test_it_predicts_a_text_of_the_repository(saved):
    """The file is small, has no optimizer, and predicts LICENSE as well as when it was added."""
    assert [path.name for path in flags.PRETRAINED.glob("*.pt")] == ["best.pt"]
    assert saved["path"].stat().st_size <= 8_000_000 and "optimizer" not in saved
    model, run = job.load_model(saved, "cpu"), presets.Recipe(**saved["recipe"])
    license = (flags.PRETRAINED.parent / "LICENSE").read_text(encoding="utf-8")
    tokens = corpora.encode(license, saved["vocab"])
    bits = train.evaluate(model, tokens, replace(run, dtype="float32")) / math.log(2)
    assert bits == pytest.approx(1.9266, abs=0.002)
    page = (flags.PRETRAINED / "README.md").read_text(encoding="utf-8")
    assert f"checksum {saved['text']}" in page and f"{saved['state']['step']:,} steps" in page


def test_it_is_used_if_there_is_no_run_yet(home, small, capsys):
    assert train.main(["--sample", "class ", *CPU]) == 0
    said = capsys.readouterr().out
    assert "no run of yours" in said and "class " in said
    assert f"{flags.PRETRAINED / 'best.pt'}: step 29,348\n" in said
    (home / "runs").mkdir()
    small().rename(home / "runs" / "stdlib-laptop")
    assert train.main(["--sample", "a", *CPU]) == 0
    assert str(flags.PRETRAINED) not in capsys.readouterr().out


def test_it_evaluates_any_text_in_its_vocabulary(home, small, text, capsys, monkeypatch):
    """So does a run in --out.  The line says that the model was trained on another text."""
    evaluate, out = Mock(return_value=1.0), small()
    monkeypatch.setattr(train, "evaluate", evaluate)
    turned = home / "turned.txt"
    turned.write_text(text.read_text()[::-1])
    for more, said in ([], "no run of yours"), (["--out", str(out)], f"{out / 'best.pt'}: step 3"):
        assert train.main(["--eval-only", "--text", str(turned), *more, *CPU]) == 0
        output = capsys.readouterr().out
        assert said in output and output.endswith("; turned.txt, not the text of its training)\n")
        vocab = checkpoint.to_evaluate(out if more else flags.PRETRAINED)["vocab"]
        assert corpora.decode(evaluate.call_args.args[1], vocab) == turned.read_text()[-12:]


def test_the_library_of_another_python_is_read_in_its_tokens(saved, home, capsys, monkeypatch):
    """Only bytes that the vocabulary lacks are left out; a message reports them."""
    vocab, evaluate = saved["vocab"], Mock(return_value=1.0)
    splits = torch.tensor([0, 3, 1, 0, 2] * 6, dtype=torch.uint8).split(10)
    other = corpora.Corpus(*splits, [ord("\t"), *vocab[2::-1]], "stdlib (Python 4)")
    assert ord("\t") not in vocab
    monkeypatch.setattr(texts, "load", lambda *given, **options: other)
    monkeypatch.setattr(train, "evaluate", evaluate)
    assert train.main(["--eval-only", *CPU]) == 0
    output = capsys.readouterr().out
    assert "(Python 4), not the text of" in output and "b'\\t' is left out, since" in output
    assert corpora.as_bytes(evaluate.call_args.args[1], vocab) == corpora.as_bytes(
        other.test, other.vocab).replace(b"\t", b"")
