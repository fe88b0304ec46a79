"""Test odd flags: they work, or one line rejects them and the folder does not change."""
import random
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from course.lessons import time_limit
from system.conftest import TINY, failure, files

WORDS = ["0", "1", "2", "8", "-1", "", " ", "nan", "inf", "1e300", str(2**63), "9" * 999, "1.5",
         "0x10", "٣", "x", "é😀", "\0", "a\n5\tb", "--", "-", "\udcff", "y" * 300, ".", "/", "%s",
         "notes.txt/x"]
FLAGS = ["--segment", "--mem-len", "--batch", "--lr", "--clip", "--seed", "--steps", "--warmup",
         "--dropout", "--n-layer", "--d-model", "--eval-every", "--micro-batch", "--text", "--out",
         "--data-dir", "--dataset", "--model", "--device", "--dtype", "--optimizer", "--schedule",
         "--top-k", "--temperature", "--resume", "--eval-only", "--dry-run", "--plain"]


@pytest.mark.parametrize("number", [
    *range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100))])
def test_odd_flags_work_or_are_rejected(number, text, tmp_path, monkeypatch, capfd):
    draw = random.Random(number)
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_bytes(text.read_bytes())
    argv = [*TINY, "--text", "notes.txt", "--steps", "2", "--out", "new"]
    for flag in draw.choices(FLAGS, k=draw.choice((1, 1, 2, 4))):
        argv += [flag] + [draw.choice(WORDS)] * (draw.random() < 0.9)
    before = files()
    with warnings.catch_warnings(), time_limit(20):
        warnings.simplefilter("error")
        status = import_module("train").main(argv)
    if status:
        sentence = failure(capfd, status)
        assert " " in sentence.removeprefix("train.py: ") and files() == before, sentence
    assert not list(Path().rglob("*.part"))
