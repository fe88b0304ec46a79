"""Every benchmark from its archive to a test score, at toy size on the CPU.

The archives are made here, with the names and folders of the published ones, and lie where a user
who fetched them by hand would put them.
"""
import random
from importlib import import_module

import pytest

from course.oracles import segments
from helpers import published, tarred, zipped
from support import corpora
from system.small_runs import TINY, no_curve_and_no_flush

train = import_module("train")
FLAGS = [*TINY, "--n-layer", "1", "--steps", "4", "--eval-segment", "1000", "--eval-tokens", "100"]
WORDS = [f"w{i}" for i in range(17)]


def sentences(seed):
    """A hundred lines of words; every word occurs in each text."""
    draw = random.Random(seed)
    lines = [WORDS, *(draw.choices(WORDS, k=draw.randint(3, 9)) for _ in range(99))]
    return "".join(" ".join(line) + "\n" for line in lines)


def publish(name, root, monkeypatch):
    """Put a benchmark at toy size into root -> the flags that a toy vocabulary needs."""
    source = corpora.SOURCES[name]
    files = source.files if name != "lm1b" else (*source.files[:2], source.files[-1])
    files = tuple(file._replace(size=None, checksum=None) for file in files)
    texts = [sentences(seed) for seed, _ in enumerate(files)]
    members = {source.folder + file.name: text.encode() for file, text in zip(files, texts)}
    data = (zipped if source.archive.name.endswith(".zip") else tarred)(members)
    root.mkdir()
    (root / source.archive.name).write_bytes(data)
    changes = {"archive": published(source.archive.name, data), "files": files, "counts": ()}
    if name == "lm1b":
        listed = "\n".join(["<S>", "</S>", "<UNK>", *WORDS[1:]]) + "\n"
        (root / source.vocabulary.name).write_text(listed)
        changes["vocabulary"] = source.vocabulary._replace(checksum=None)
        # lanes of sentences know slices only; the exercise `segments` may read otherwise
        monkeypatch.setattr(train.lesson_1, "segments", segments)
    monkeypatch.setitem(corpora.SOURCES, name, source._replace(**changes))
    has_bands = name in ("wt103", "wikitext-2", "lm1b")
    return ["--cutoffs", "5", "11", "--div-val", "2"] if has_bands else []


@pytest.mark.parametrize("name", corpora.SOURCES)
def test_from_the_archive_to_the_test_score(name, tmp_path, monkeypatch, capsys):
    """`--dataset NAME`: unpacked, trained, tested; and from the folder tested again and sampled."""
    root = tmp_path / "data"
    flags = publish(name, root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", None)  # nothing is fetched
    given = ["--dataset", name, "--data-dir", str(root), "--out", str(tmp_path / "run")]
    assert train.main([*FLAGS, *given, *flags]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    corpus = corpora.load(name, root)
    unit = "bpc" if name in ("enwik8", "text8") else "ppl"
    assert f" {unit} (evaluation T 1000, M 16" in line and f"{len(corpus.test) - 1:,} pred" in line
    prompt = "w1 w" if unit == "bpc" else "w1 w4"
    again = [*given, "--device", "cpu", "--eval-only", "--sample", prompt, "--n-tokens", "9"]
    assert train.main(again) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == line and any(prompt in words for words in printed)
