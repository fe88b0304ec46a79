"""Every benchmark from its archive to a test figure, at toy size on the CPU.

    pytest tests/system/test_train_benchmarks.py

The archives are made here, with the names and folders of the published ones, and lie where a user
who fetched them by hand would put them.
"""
import hashlib
import random
import signal
from importlib import import_module
from itertools import count

import pytest

from system.crash import runs_differ
from course.oracles import segments
from support import corpora
from system.archives import tarred, zipped
from training import batches
from training.batches import SentenceLanes

train = import_module("train")
FLAGS = ["--device", "cpu", "--dtype", "float32", "--n-layer", "1", "--d-model", "16", "--n-head",
         "2", "--d-inner", "16", "--mem-len", "8", "--segment", "8", "--batch", "4", "--steps",
         "4", "--eval-segment", "8", "--eval-mem-len", "8", "--eval-every", "4", "--log-every",
         "2", "--n-tokens", "5", "--lr", "0.03", "--warmup", "5"]


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing takes longer than all else in these runs."""
    monkeypatch.setattr(train.log, "draw", lambda *arguments: None)


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
        # lanes of sentences know slices only; the exercise `segments` may read otherwise
        monkeypatch.setattr(train.lesson_1, "segments", segments)
    else:
        publish(name, [sentences(*z) for z in ((170, 0), (30, 1), (30, 2))], root, monkeypatch)
    return ["--cutoffs", "5", "11", "--div-val", "2"] if name != "ptb" else []


@pytest.mark.parametrize("name", [
    "text8", "wt103", "lm1b", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "enwik8", "wikitext-2", "ptb"))])
def test_from_the_archive_to_the_test_figure(name, tmp_path, monkeypatch, capsys):
    """`--dataset NAME`: unpacked, trained, tested; and from the folder tested again and sampled."""
    root = tmp_path / "data"
    flags = made(name, root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", None)  # nothing is fetched
    given = ["--dataset", name, "--data-dir", str(root), "--out", str(tmp_path / "run")]
    assert train.main([*FLAGS, *given, *flags]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    corpus = corpora.load(name, root)
    unit = "bpc" if name in ("enwik8", "text8") else "ppl"
    assert f" {unit} (evaluation T 8, M 8" in line and f"{len(corpus.test) - 1:,} pred" in line
    prompt = "w1 w4" if unit == "ppl" else "w1 w"
    again = [*given, "--device", "cpu", "--eval-only", "--sample", prompt, "--n-tokens", "9"]
    assert train.main(again) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == line and any(prompt in words for words in said)


def test_a_sentence_corpus_is_shuffled_by_seed_and_epoch(tmp_path, monkeypatch):
    """Another order in the second reading; a run that was stopped in it goes on exactly there."""
    made("lm1b", tmp_path / "data", monkeypatch)
    orders, original, step = [], SentenceLanes, train.train_step
    given = [*FLAGS, "--dataset", "lm1b", "--data-dir", str(tmp_path / "data"), "--seed", "5",
             "--cutoffs", "9", "--segment", "64", "--steps", "9", "--eval-every", "9",
             "--log-every", "2"]

    def watched(tokens, B, separator, seed, epoch):
        orders.append((seed, epoch))
        return original(tokens, B, separator, seed, epoch)

    def interrupted(*args, calls=count(1)):
        if next(calls) == 8:  # in the second reading
            signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(batches, "SentenceLanes", watched)
    assert train.main([*given, "--out", str(tmp_path / "whole")]) == 0
    assert orders == [(5, 0), (5, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", interrupted)
        assert train.main([*given, "--out", str(tmp_path / "parts")]) == 130
    orders.clear()
    assert train.main([*given, "--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert orders == [(5, 1)] and not runs_differ(tmp_path / "whole", tmp_path / "parts")


def test_the_synthetic_corpus_is_a_dataset(tmp_path, capsys):
    """`--dataset copies`: trained and tested, gone on with, tested again and sampled."""
    out = ["--device", "cpu", "--out", str(tmp_path / "run")]
    long = ["--eval-segment", "1000", "--eval-tokens", "100"]  # in few calls
    assert train.main([*FLAGS, *long, "--dataset", "copies", *out]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "49,999 predictions; copies (distances 24, 48, 72, 96))" in line
    for act in (["--resume"], ["--eval-only", "--sample", "AaMm", "--n-tokens", "9"]):
        assert train.main([*act, *out]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[-1] == line and any("AaMm" in words for words in said) == ("--sample" in act)
