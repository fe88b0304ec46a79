"""What the tests of several experiments read: small texts, and a finished run of train.py."""
import random
from importlib import import_module

import pytest
import torch

from support import corpora
from training import checkpoint


@pytest.fixture(scope="session")
def train_tiny():
    """A function: train.py's tiny model for a moment, into a folder."""
    train = import_module("train")

    def trained(out, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train.log, "draw", lambda *given: None)  # takes longer than all else
            assert train.main([
                "--model", "tiny", "--steps", "12", "--segment", "16", "--dtype", "float32",
                "--device", "cpu", "--n-tokens", "5", "--top-k", "5", "--lr", "0.01",
                "--eval-clamp-len", "6", "--out", str(out), *map(str, flags)]) == 0
        return out

    return trained


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, train_tiny):
    """A run on notes.txt beside it, in which names come back; its heads are made sharper, so that
    they differ.
    """
    folder, draw = tmp_path_factory.mktemp("experiments"), random.Random(0)
    known, lines = ["self"], []
    for _ in range(900):
        if draw.random() < 0.3:
            known = [*known[-6:], "".join(draw.choices("abcdefgh", k=draw.randint(4, 8)))]
        lines.append("    " + " ".join(draw.choices([*known, "self", "to"], k=5)))
    (folder / "notes.txt").write_text("\n".join(lines) + "\n")
    out = train_tiny(folder / "run", "--text", folder / "notes.txt")
    content = checkpoint.best(out)
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


@pytest.fixture
def seen(monkeypatch):
    """What common's losses were asked for, in order; each loss is the number of its call."""
    calls, common = [], import_module("common")

    def losses(given):
        calls.append(given)
        return torch.full((2, 30), float(len(calls)))

    monkeypatch.setattr(common, "memory_losses", lambda model, tokens, before, segment, **lengths:
                        losses((segment, lengths)))
    monkeypatch.setattr(common, "window_losses", lambda model, tokens, before, L: losses(L))
    return calls
