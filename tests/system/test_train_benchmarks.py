"""Every benchmark from its archive to a test score, at toy size on the CPU.

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

from course.oracles import segments
from support import corpora
from helpers import tarred, zipped
from training import checkpoint

train = import_module("train")
FLAGS = ["--device", "cpu", "--dtype", "float32", "--n-layer", "1", "--d-model", "16", "--n-head",
         "2", "--d-inner", "16", "--mem-len", "8", "--segment", "8", "--batch", "4", "--steps",
         "4", "--eval-segment", "1000", "--eval-mem-len", "8", "--eval-every", "4", "--eval-tokens",
         "100", "--log-every", "2", "--n-tokens", "5", "--lr", "0.03", "--warmup", "5"]


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing takes longer than all else in these runs."""
    monkeypatch.setattr(train.log, "draw", lambda *arguments: None)


def sentences(n, seed):
    """Lines of words where the next word depends on the last; every word occurs in each text."""
    draw, lines = random.Random(seed), [" ".join(f"w{i}" for i in range(17))]
    for _ in range(n):
        i, line = draw.randrange(17), []
        for _ in range(draw.randint(3, 9)):
            line.append(f"w{i}")
            i = (3 * i + draw.randint(0, 2)) % 17
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def publish(name, root, monkeypatch):
    """Put a benchmark at toy size into root -> the flags that a toy vocabulary needs."""
    if name == "copies":
        return []
    source, sizes = corpora.SOURCES[name], {"enwik8": [300], "text8": [300], "lm1b": [90, 80, 30]}
    texts = [sentences(n, seed) for seed, n in enumerate(sizes.get(name, [170, 30, 30]))]
    files = tuple(file._replace(size=None, checksum=None) for file in (
        (*source.files[:2], source.files[-1]) if name == "lm1b" else source.files))
    members = {source.folder + file.name: text.encode() for file, text in zip(files, texts)}
    data = (zipped if source.archive.name.endswith(".zip") else tarred)(members)
    root.mkdir()
    (root / source.archive.name).write_bytes(data)
    checksum = "sha256:" + hashlib.sha256(data).hexdigest()
    changes = {"archive": source.archive._replace(size=len(data), checksum=checksum),
               "files": files, "counts": ()}
    if name == "lm1b":
        listed = "\n".join(["<S>", "</S>", "<UNK>", *(f"w{i}" for i in range(16))]) + "\n"
        (root / source.vocabulary.name).write_text(listed)
        changes["vocabulary"] = source.vocabulary._replace(checksum=None)
        # lanes of sentences know slices only; the exercise `segments` may read otherwise
        monkeypatch.setattr(train.lesson_1, "segments", segments)
    monkeypatch.setitem(corpora.SOURCES, name, source._replace(**changes))
    has_bands = name in ("wt103", "wikitext-2", "lm1b")
    return ["--cutoffs", "5", "11", "--div-val", "2"] if has_bands else []


@pytest.mark.parametrize("name", [
    "copies", "text8", "wt103", "lm1b", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "enwik8", "wikitext-2", "ptb"))])
def test_from_the_archive_to_the_test_score(name, tmp_path, monkeypatch, capsys):
    """`--dataset NAME`: unpacked, trained, tested; and from the folder tested again and sampled."""
    root = tmp_path / "data"
    flags = publish(name, root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", None)  # nothing is fetched
    given = ["--dataset", name, "--data-dir", str(root), "--out", str(tmp_path / "run")]
    assert train.main([*FLAGS, *given, *flags]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    corpus = corpora.load(name, root)
    unit = "bpc" if name in ("copies", "enwik8", "text8") else "ppl"
    assert f" {unit} (evaluation T 1000, M 8" in line and f"{len(corpus.test) - 1:,} pred" in line
    prompt = "AaMm" if name == "copies" else "w1 w" if unit == "bpc" else "w1 w4"
    again = [*given, "--device", "cpu", "--eval-only", "--sample", prompt, "--n-tokens", "9"]
    assert train.main(again) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == line and any(prompt in words for words in printed)


def test_a_sentence_corpus_is_shuffled_by_seed_and_epoch(tmp_path, monkeypatch):
    """Another order in the second reading; a run that was stopped in it resumes exactly there."""
    publish("lm1b", tmp_path / "data", monkeypatch)
    batches, step, orders = import_module("training.batches"), train.train_step, []
    given = [*FLAGS, "--dataset", "lm1b", "--data-dir", str(tmp_path / "data"), "--seed", "5",
             "--cutoffs", "9", "--segment", "64", "--steps", "9", "--eval-every", "9"]

    def watched(tokens, B, separator, seed, epoch, original=batches.SentenceLanes):
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
    whole, parts = (checkpoint.load(tmp_path / run / "checkpoint.pt") for run in ("whole", "parts"))
    assert orders == [(5, 1)] and whole["batches"] == parts["batches"]
    assert all(z.equal(parts["model"][name]) for name, z in whole["model"].items())
