"""Test odd input: it works, or one line rejects it and the folder does not change."""
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
BYTES = [b"\n", b"\0", b"\xff", b" \t\r\n\v\f", bytes(range(256)), b"\xef\xbb\xbf", b"w" * 5000,
         "é😀\u2028\u3000\x85".encode(), b"<eos> <unk> <S> ", b"\xf0\x9f", b"\xed\xa0\x80", b""]


def bend(draw, path):
    """Truncate a file, or delete, overwrite or insert some bytes."""
    data = path.read_bytes()
    for _ in range(draw.choice((1, 1, 2, 5))):
        first = draw.randrange(len(data) + 1)
        middle = draw.choice((*BYTES, draw.randbytes(4), data[:99]))
        end = first + draw.choice((0, len(middle), draw.randrange(60), len(data)))
        data = data[:first] + middle + data[end:]
    path.write_bytes(data)


@pytest.mark.parametrize("number", [
    *range(30), *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 180))])
def test_odd_input_works_or_is_rejected(number, text, small, tmp_path, monkeypatch, capfd):
    """The number selects odd flags, a text with odd bytes, or a run with damaged files."""
    draw, folder = random.Random(number), small()
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_bytes(text.read_bytes())
    argv = [*TINY, "--text", "notes.txt", "--steps", "2", "--out", "new"]
    if number % 3 == 0:
        for flag in draw.choices(FLAGS, k=draw.choice((1, 1, 2, 4))):
            argv += [flag] + [draw.choice(WORDS)] * (draw.random() < 0.9)
    elif number % 3 == 1:
        bend(draw, Path("notes.txt"))
    else:
        for path in draw.choices([*folder.glob("*.pt")], k=2):
            bend(draw, path)
        act = draw.choice((["--resume"], ["--eval-only"], ["--sample", "abba"]))
        argv = [*act, "--out", folder.name, "--device", "cpu", "--n-tokens", "2"]
    before = files()
    with warnings.catch_warnings(), time_limit(20):
        warnings.simplefilter("error")
        status = import_module("train").main(argv)
    if status:
        sentence = failure(capfd, status)
        assert " " in sentence.removeprefix("train.py: ") and files() == before, sentence
    assert not list(Path().rglob("*.part"))
