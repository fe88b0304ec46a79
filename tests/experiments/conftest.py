"""What the tests of several experiments use: small texts, a run of train.py, a split to be left."""
import random
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from support import corpora
from training import job
from training import checkpoint, log


class Unread:
    """In the place of a split of the corpus: it fails when it is touched."""

    def touched(self, *_):
        raise AssertionError("this split must not be read")

    __getattr__ = __getitem__ = __len__ = __iter__ = __torch_function__ = touched


@pytest.fixture
def unread(monkeypatch):
    """unread("test"): from here on the corpora that experiments get have Unread as this split."""
    def forbid(split):
        common, load = import_module("common"), corpora.load
        open_run = common.open_run

        def opened(*given):
            model, run, corpus, content = open_run(*given)
            return model, run, replace(corpus, **{split: Unread()}), content

        monkeypatch.setattr(common, "open_run", opened)
        monkeypatch.setattr(corpora, "load", lambda *given, **more: replace(
            load(*given, **more), **{split: Unread()}))
        checksum = job.checksum  # reads all splits
        monkeypatch.setattr(job, "checksum", lambda corpus: (
            0 if isinstance(getattr(corpus, split), Unread) else checksum(corpus)))
    return forbid


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run on notes.txt beside it, in which names come back; its attention is made more peaked, so
    that heads differ.
    """
    folder, draw = tmp_path_factory.mktemp("experiments"), random.Random(0)
    known, lines = ["self"], []
    for _ in range(900):
        if draw.random() < 0.3:
            known = [*known[-6:], "".join(draw.choices("abcdefgh", k=draw.randint(4, 8)))]
        lines.append("    " + " ".join(draw.choices([*known, "self", "to"], k=5)))
    (folder / "notes.txt").write_text("\n".join(lines) + "\n")
    out = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "draw", lambda *given: None)  # takes longer than all else
        assert import_module("train").main([
            "--model", "tiny", "--steps", "12", "--segment", "16", "--dtype", "float32", "--device",
            "cpu", "--n-tokens", "5", "--top-k", "5", "--lr", "0.01", "--eval-clamp-len", "6",
            "--text", str(folder / "notes.txt"), "--out", str(out)]) == 0
    content = checkpoint.to_evaluate(out)
    for name, weight in content["model"].items():
        weight *= 8 if "W_q" in name else 1
    checkpoint.save(content.path, dict(content))
    return out


@pytest.fixture
def notes(tmp_path):
    """A small text with lines, as a file."""
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"line {i % 7} has {'a' * (i % 5)} cat\n" for i in range(4400)))
    return path


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A folder with a small ptb, for --data-dir: lines of twelve words, by a rule that can be
    learned in part; 600, 40 and 90 of them.
    """
    data, source = tmp_path / "data", corpora.SOURCES["ptb"]
    data.mkdir()
    for file, n in zip(source.files, (600, 40, 90)):
        firsts = torch.randint(20, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        (data / file.name).write_text("".join(
            " ".join(f"word{(first + k) % 20}" for k in range(12)) + "\n" for first in firsts))
    monkeypatch.setitem(corpora.SOURCES, "ptb", source._replace(
        files=tuple(file._replace(size=None, checksum=None) for file in source.files), counts=()))
    return data
