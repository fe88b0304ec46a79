"""Broken input by the thousand, and one rule for all of it: it works, or one sentence refuses it.

    python tests/system/fuzz.py --inputs 5000   command lines, texts, checkpoints
    python tests/system/fuzz.py --only 17       one input again, shown in full

Number and seed decide an input.  A fault is any exception but a ValueError of ours, a warning, a
hang, code run out of a pickle, and a refusal after which the folder is not as it was.
"""
import argparse
import functools
import io
import os
import random
import sys
import tempfile
import traceback
import urllib.request
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "tests")) if folder not in sys.path]
import train
from course.lessons import limit_resources, time_limit
from support import corpora
from support.progress import progress

NOTES = " ".join(
    random.Random(0).choices(["abba", "bad", "cede", "deed", "a", "é"], k=500)).encode()
TINY = ("--text notes.txt --model tiny --device cpu --dtype float32 --segment 8 --mem-len 12 "
        "--eval-segment 16 --eval-mem-len 16 --steps 2 --n-tokens 3 --out run").split()
WORDS = ["0", "1", "-1", "", " ", "nan", "inf", "1e300", str(2**63), "9" * 999, "1.5", "0x10", "٣",
         "x", "é😀", "\0", "a\n5\tb", "--", "-", "\udcff", "y" * 300, ".", "/", "file/x", "%s"]
FLAGS = ["--segment", "--mem-len", "--batch", "--lr", "--clip", "--seed", "--steps", "--warmup",
         "--dropout", "--n-layer", "--d-model", "--eval-every", "--micro-batch", "--text", "--out",
         "--data-dir", "--dataset", "--model", "--device", "--dtype", "--optimizer", "--schedule",
         "--top-k", "--temperature", "--resume", "--eval-only", "--dry-run", "--plain"]
SORTS = [b"\n", b"\0", b"\xff", b" \t\r\n\v\f", bytes(range(256)), b"\xef\xbb\xbf", b"w" * 5000,
         "é😀\u2028\u3000\x85".encode(), b"<eos> <unk> <S> ", b"\xf0\x9f", b"\xed\xa0\x80", b""]


def bent(draw, data):
    """Bytes cut off, left out, written over, put between, or something else altogether."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        middle = draw.choice((*SORTS, draw.randbytes(4), data[:99]))
        end = at + draw.choice((0, len(middle), draw.randrange(60), len(data)))
        data = data[:at] + middle + data[end:]
    return data


def command_line(argv):
    """train.main(argv): ValueError if it refused, AssertionError if not as it should."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        status = train.main(argv)
    lines = errors.getvalue().replace("\r", "\n").strip().splitlines()
    if status:
        assert (status, len(lines)) == (1, 1) and lines[0].startswith("train.py: "), lines
        raise ValueError(lines[0])


@functools.cache
def trained():
    """The files of a run of two steps, {name: bytes}."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "notes.txt").write_bytes(NOTES)
        command_line([*TINY, "--text", f"{name}/notes.txt", "--out", f"{name}/run"])
        return {path.name: path.read_bytes() for path in Path(name, "run").iterdir()}


# ---- the kinds: each makes files in the working folder, and gives what is to be tried ------------

def command(draw):
    """Flags with odd values, after those of a run that works."""
    argv = [*TINY]
    for flag in draw.choices(FLAGS, k=draw.choice((1, 1, 2, 4))):
        argv += [flag] + [draw.choice((*WORDS, *["1", "2", "8"] * 10))] * (draw.random() < 0.9)
    return argv, functools.partial(command_line, argv), ()


def text(draw):
    """The bytes of a file for --text: read, encoded, decoded."""
    data = bent(draw, draw.choice((b"", NOTES)))
    Path("t.txt").write_bytes(data)

    def act():
        corpus = corpora.load(Path("t.txt").resolve())
        splits = torch.cat([corpus.train, corpus.valid, corpus.test])
        assert corpora.as_bytes(splits, corpus.vocab) == data
        corpora.compressed_bits(corpus)
    return data, act, ()


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def checkpoint(draw):
    """A run whose files are as they were, bent, or hold code, gone on with."""
    Path("run").mkdir()
    for name, data in trained().items():
        if name.endswith(".pt") and draw.random() < 0.2:
            content, file = torch.load(io.BytesIO(data)), io.BytesIO()
            content[draw.choice([*content])] = Evil()
            torch.save(content, file)
            data = file.getvalue()
        Path("run", name).write_bytes(bent(draw, data) if draw.random() < 0.2 else data)
    act = draw.choice((["--resume"], ["--eval-only"], ["--sample", "abba"]))
    argv = [*act, "--out", "run", "--device", "cpu", "--n-tokens", "2"]
    return argv, functools.partial(command_line, argv), ("run/damaged.pt", "run/checkpoint.pt")


# ---- the judge ----------------------------------------------------------------------------------

KINDS = (command, text, checkpoint)


def files():
    """{path: what is there} below the working folder; a lock is no trace."""
    paths = [path for path in Path().rglob("*") if path.name != "lock"]
    return {path.as_posix(): path.read_bytes() for path in paths
            if path.is_file() and not path.is_symlink()} | {
            path.as_posix(): "no file" for path in paths if path.name == "evil"}


def verdict(act, allowed=()):
    """Try it in the working folder -> ("worked" | "refused" | "fault", what came of it)."""
    before, said, outcome = files(), "", "worked"
    offline = mock.patch.object(urllib.request, "urlopen", side_effect=OSError("no network"))
    own_text = mock.patch.object(corpora, "standard_library", return_value=(NOTES,) * 3)
    try:
        with offline, own_text, warnings.catch_warnings(), time_limit(10):
            warnings.simplefilter("error")
            act()
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome, said = "refused", str(error)
        ours = ROOT in Path(last.filename).parents and ".venv" not in last.filename and (
            "raise" in last.line)  # what int("x") or torch says is no help
        if type(error) is not ValueError or not ours or "\n" in said or " " not in said:
            return "fault", f"{type(error).__name__} from {last.filename}:{last.lineno}: {said}"
    after = files()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if "evil" in after or any(name.endswith(".part") for name in changed):
        return "fault", f"code out of a pickle was run, or half a file is left: {changed}"
    if outcome == "refused" and "not finite" not in said and changed - {*allowed}:
        return "fault", f"{sorted(changed)} changed, although refused: {said}"
    return outcome, said


def judge(number, seed):
    """Try one input -> (outcome, what came of it, kind and what was tried)."""
    draw, here, kind = random.Random(f"{number} {seed}"), Path.cwd(), KINDS[number % len(KINDS)]
    trained(), torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            Path("notes.txt").write_bytes(NOTES)
            Path("file").write_bytes(b"kept")
            what, act, allowed = kind(draw)
            return (*verdict(act, allowed), f"{kind.__name__} {what}")
        finally:
            os.chdir(here)


def main(argv=None):
    """Try many inputs of all kinds; each fault with the command that repeats it, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=600, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this number alone, in full")
    given = parser.parse_args(argv)
    limit_resources()
    numbers = range(given.inputs) if given.only is None else [given.only]
    counts = Counter()
    for number in progress(numbers, "input", len(numbers)):
        outcome, said, what = judge(number, given.seed)
        counts[outcome] += 1
        if outcome == "fault" or given.only is not None:
            print(f"\r{outcome}: python tests/system/fuzz.py --only {number} --seed {given.seed}\n"
                  f"  {what[:800]!a}\n  {said[:800]!a}", flush=True)
    print(", ".join(f"{outcome} {count:,}" for outcome, count in sorted(counts.items())))
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())
