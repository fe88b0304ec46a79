"""What the tests of several experiments use: small texts, a run of train.py, a split to be left."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from support import corpora
from training import checkpoint, job


class Unread:
    """In the place of a split of the corpus: it fails when it is touched."""

    def touched(self, *_):
        raise AssertionError("this split must not be read")

    __getattr__ = __getitem__ = __len__ = __iter__ = __torch_function__ = touched


@pytest.fixture
def unread(monkeypatch):
    """unread("test"): from here on the corpora that experiments get have Unread as this split."""
    def forbid(split):
        def without(load):
            return lambda *given, **more: replace(load(*given, **more), **{split: Unread()})

        common, checksum = import_module("common"), job.checksum  # which reads all splits
        monkeypatch.setattr(common, "read_corpus", without(common.read_corpus))
        monkeypatch.setattr(corpora, "load", without(corpora.load))
        monkeypatch.setattr(job, "checksum", lambda corpus: (
            0 if isinstance(getattr(corpus, split), Unread) else checksum(corpus)))
    return forbid


@pytest.fixture(scope="session")
def notes(tmp_path_factory):
    """A small text with lines, in which names come back, as a file."""
    path = tmp_path_factory.mktemp("experiments") / "notes.txt"
    path.write_text("".join(f"n{i // 9}_a {'a' * (i % 5)}\n" for i in range(4400)))
    return path


@pytest.fixture(scope="session")
def run_folder(notes):
    """A run on these notes; its attention is made more peaked, so that heads differ."""
    out = notes.parent / "run"
    assert import_module("train").main([
        "--model", "tiny", "--steps", "12", "--segment", "16", "--dtype", "float32", "--device",
        "cpu", "--n-tokens", "5", "--top-k", "5", "--lr", "0.01", "--eval-clamp-len", "6",
        "--text", str(notes), "--out", str(out)]) == 0
    content = checkpoint.to_evaluate(out)
    for name, weight in content["model"].items():
        weight *= 60 if "W_q" in name else 1
    checkpoint.save(content.path, dict(content))
    return out


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A folder with a small ptb, for --data-dir: 600, 40 and 90 lines of words, by a rule."""
    data, source = tmp_path / "data", corpora.SOURCES["ptb"]
    (data / source.files[0].name).parent.mkdir(parents=True)
    for file, n in zip(source.files, (600, 40, 90)):
        firsts = torch.randint(20, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        (data / file.name).write_text("".join(
            " ".join(f"word{(first + k) % 20}" for k in range(12)) + "\n" for first in firsts))
    monkeypatch.setitem(corpora.SOURCES, "ptb", source._replace(
        files=tuple(file._replace(size=None, checksum=None) for file in source.files), counts=()))
    return data
