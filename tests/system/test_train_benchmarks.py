"""Every benchmark from its archive to a test figure, at toy size on the CPU.

    pytest tests/system/test_train_benchmarks.py

The archives are made here, with the names and folders of the published ones, and lie where a user
who fetched them by hand would put them.
"""
import hashlib
import math
import random
import signal
from importlib import import_module

import pytest
import torch
from test_word_corpora import tarred, zipped

from support import corpora

train = import_module("train")
FLAGS = ["--device", "cpu", "--dtype", "float32", "--n-layer", "1", "--d-model", "16", "--n-head",
         "2", "--d-inner", "16", "--mem-len", "8", "--segment", "8", "--batch", "4", "--steps",
         "60", "--eval-segment", "8", "--eval-mem-len", "8", "--eval-every", "30", "--log-every",
         "10", "--n-tokens", "20", "--lr", "0.01", "--warmup", "10"]


def sentences(n, seed):
    """Lines of words where the next word depends on the last; every word occurs in each text."""
    draw, words = random.Random(seed), [f"w{i}" for i in range(17)]
    lines = [" ".join(words)]
    for _ in range(n):
        i, line = draw.randrange(17), []
        for _ in range(draw.randint(3, 9)):
            line.append(words[i])
            i = (3 * i + draw.randint(0, 2)) % 17
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def publish(name, texts, root, monkeypatch, **changes):
    """Put an archive with these texts into root, and their true sizes into the table of sources."""
    source = corpora.SOURCES[name]
    members = {source.folder + file.name: text.encode() for file, text in zip(source.files, texts)}
    data = (zipped if source.archive.name.endswith(".zip") else tarred)(members)
    root.mkdir()
    (root / source.archive.name).write_bytes(data)
    described = source.archive._replace(
        size=len(data), checksum="sha256:" + hashlib.sha256(data).hexdigest())
    files = tuple(file._replace(size=None, checksum=None)
                  for file, _ in zip(source.files, texts))
    monkeypatch.setitem(corpora.SOURCES, name, source._replace(
        archive=described, files=files, counts=(), **changes))


def made(name, root, monkeypatch):
    """The benchmark at toy size, and the flags that a toy vocabulary needs."""
    if name in ("enwik8", "text8"):
        publish(name, ["".join(sentences(300, 0))], root, monkeypatch)
        return []
    if name == "lm1b":
        listed = "\n".join(["<S>", "</S>", "<UNK>", *(f"w{i}" for i in range(16))]) + "\n"
        shards = corpora.SOURCES[name].files
        monkeypatch.setitem(corpora.SOURCES, name, corpora.SOURCES[name]._replace(
            files=(*shards[:2], shards[-1])))
        publish(name, [sentences(90, 0), sentences(80, 1), sentences(30, 2)], root, monkeypatch,
                vocabulary=corpora.SOURCES[name].vocabulary._replace(checksum=None))
        (root / corpora.SOURCES[name].vocabulary.name).write_text(listed)
    else:
        publish(name, [sentences(*z) for z in ((170, 0), (30, 1), (30, 2))], root, monkeypatch)
    return ["--cutoffs", "5", "11", "--div-val", "2"] if name != "ptb" else []


@pytest.mark.parametrize("name", ["enwik8", "text8", "wt103", "wikitext-2", "lm1b", "ptb"])
def test_from_the_archive_to_the_test_figure(name, tmp_path, monkeypatch, capsys):
    """`--dataset NAME`: unpacked, trained, tested, sampled; resumed, and evaluated once more."""
    root, out = tmp_path / "data", tmp_path / "run"
    flags = made(name, root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", None)  # nothing is fetched
    given = [*FLAGS, "--dataset", name, "--data-dir", str(root), "--out", str(out), *flags]
    assert train.main(given) == 0
    shown = capsys.readouterr().out
    line = shown.splitlines()[-1]
    unit = "bpc" if name in ("enwik8", "text8") else "ppl"
    assert line.startswith("test ") and f" {unit} (evaluation T 8, M 8" in line
    corpus = corpora.load(name, root)
    assert f"{len(corpus.test) - 1:,} predictions" in line
    value, V = float(line.split()[1]), len(corpus.vocab)
    counts = torch.bincount(corpus.test.long(), minlength=V).double()
    p = counts[counts > 0] / counts.sum()
    unigram = -(p * p.log()).sum().item()
    assert value < 0.95 * (unigram / math.log(2) if unit == "bpc" else math.exp(unigram))
    assert (out / "curve.png").stat().st_size > 0
    again = ["--dataset", name, "--data-dir", str(root), "--out", str(out), "--device", "cpu"]
    assert train.main([*again, "--eval-only"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    prompt = "w1 w4" if unit == "ppl" else "w1 w"
    assert train.main([*again, "--sample", prompt, "--n-tokens", "9"]) == 0
    assert prompt in capsys.readouterr().out


def test_a_sentence_corpus_is_shuffled_by_seed_and_epoch(tmp_path, monkeypatch):
    """Another order in the second reading; a run that was stopped in it goes on exactly there."""
    made("lm1b", tmp_path / "data", monkeypatch)
    orders = []
    original = corpora.SentenceLanes

    def watched(tokens, B, separator, seed, epoch):
        orders.append((seed, epoch))
        return original(tokens, B, separator, seed, epoch)

    monkeypatch.setattr(corpora, "SentenceLanes", watched)

    def run(out, *flags, status=0):
        given = [*FLAGS, "--dataset", "lm1b", "--data-dir", str(tmp_path / "data"), "--seed", "5"]
        given += ["--cutoffs", "9", "--out", str(tmp_path / out), *flags]
        assert train.main(given) == status

    run("whole")
    assert orders[:2] == [(5, 0), (5, 1)]
    step, calls = train.train_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 47:  # in the second reading
            signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(train, "train_step", interrupted)
    run("parts", status=130)
    monkeypatch.setattr(train, "train_step", step)
    orders.clear()
    run("parts", "--resume")
    assert orders[0] == (5, 1)
    one, two = (torch.load(tmp_path / out / "checkpoint.pt", weights_only=True)["model"]
                for out in ("whole", "parts"))
    assert all(z.equal(two[name]) for name, z in one.items())


def test_other_words_than_the_checkpoints_are_refused(tmp_path, monkeypatch, capsys):
    """A word that the text lacked in training has no row in the model."""
    made("ptb", tmp_path / "data", monkeypatch)
    given = ["--dataset", "ptb", "--data-dir", str(tmp_path / "data"), "--out",
             str(tmp_path / "run"), "--device", "cpu"]
    assert train.main([*FLAGS, *given]) == 0
    path = tmp_path / "data" / "ptb.train.txt"
    path.write_text(path.read_text().replace("w3", "W3"))
    capsys.readouterr()
    assert train.main([*given, "--eval-only"]) == 1
    assert "it has changed since" in capsys.readouterr().err
    assert train.main([*given, "--sample", "w1 hello"]) == 1
    assert "the corpus has no 'hello'" in capsys.readouterr().err


def test_cutoffs_beyond_the_vocabulary_are_refused(tmp_path, monkeypatch, capsys):
    """Before a folder is made; the numbers are in the sentence."""
    made("wt103", tmp_path / "data", monkeypatch)
    assert train.main([*FLAGS, "--dataset", "wt103", "--data-dir", str(tmp_path / "data"), "--out",
                       str(tmp_path / "run"), "--cutoffs", "5", "99"]) == 1
    assert "below the vocabulary size 18, got (5, 99)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
