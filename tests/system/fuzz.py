"""Broken input by the thousand, and one rule for all of it: it works, or one sentence refuses it.

    python tests/system/fuzz.py --inputs 5000 --seed 0           all kinds, with a table at the end
    python tests/system/fuzz.py --kind archive --only 17 --seed 0    one input again, shown in full

Five kinds are drawn: command lines, texts, archives and the files of a data folder, checkpoints,
sizes and tensors.  Number, kind and seed decide an input, so each can be had again.  A fault is any
exception but a ValueError of ours (for train.py: anything but one line on stderr and status 1), a
warning, a hang, gigabytes of memory, code run out of a pickle, and a refusal after which the folder
is not as it was.  tests/system/test_fuzz.py is the short form.
"""
import argparse
import functools
import io
import math
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import urllib.request
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "tests")) if folder not in sys.path]
import os
from support import corpora, download
from training import estimate
from training.flags import SIZES, Flags, flag
from support.progress import progress
from system.archives import published, tarred, zipped
from training import presets
import train

lesson_5 = import_module("05_full_model")
SECONDS = 10  # for one input; the slowest honest one takes a tenth of it
ROOM = 2 << 30  # bytes that one input may ask for
TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--segment", "8", "--mem-len",
        "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "1"]
NOTES = " ".join(
    random.Random(0).choices(["abba", "bad", "cede", "deed", "a", "é"], k=500)).encode()
ODD = [None, True, -1, 0, 1, 2, 3.5, 2**31, 2**63, 10**30, math.nan, math.inf, 1e308, 1e-308, "",
       "4", "x", "\0", "a\nb", "é😀", b"", [], [1], (), (1, "a"), {}, {"a": 1}, {0: 0}]
USUAL = {int: (0, 1, 2, 8), float: (0.01, 0.5, 1.0), bool: (False, True),
         tuple: ((), (2,), (2, 4))}
WORDS = ["0", "1", "-1", "", " ", "nan", "inf", "1e300", "1e-300", "1000000000", str(2**63),
         "9" * 5000, "1.5", "0x10", "٣", "x", "é😀", "\0", "a\n5\tb", "--", "-", "--resume",
         "\udcff", "$\\frac$", "y" * 300, ".", "/", "file", "file/x", "notes.txt", "run", "%s"]


class Input(NamedTuple):
    """What is tried, in words; how; and the files that it may make although it is refused."""

    what: str
    act: object
    allowed: tuple = ()


class Hang(BaseException):
    """Time is up.  No Exception, so that no code under test takes it for an error of its own."""


# ---- command lines ------------------------------------------------------------------------------

@functools.cache
def trained():
    """The files of a run that was stopped after 2 of 4 steps, {name: bytes}."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "notes.txt").write_bytes(NOTES)
        flags = ["--text", f"{name}/notes.txt", "--out", f"{name}/run", "--steps", "2"]
        with redirect_stdout(io.StringIO()):
            assert train.main([*TINY, *flags, "--n-tokens", "1"]) == 0
        return {path.name: path.read_bytes() for path in Path(name, "run").iterdir()}


def put_run(folder, change=lambda name, content: None):
    """Put that run into folder / "run"; `change` may change a checkpoint before it is written."""
    (folder / "run").mkdir()
    for name, data in trained().items():
        if name.endswith(".pt"):
            content, file = torch.load(io.BytesIO(data)), io.BytesIO()
            content["run"] |= {"text": str(folder / "notes.txt"), "steps": 4}
            change(name, content)
            torch.save(content, file)
            data = file.getvalue()
        (folder / "run" / name).write_bytes(data)


def command_line(argv):
    """train.main(argv): ValueError if it refused, AssertionError if not as it should."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors, "", write_through=True)
               for errors in ("strict", "backslashreplace")]  # as those of a terminal
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]), mock.patch.object(
            sys, "argv", ["train.py", *argv]):
        try:
            status = train.main(argv)
        except SystemExit as leaving:  # --help
            status = leaving.code
    lines = streams[1].buffer.getvalue().decode().replace("\r", "\n").strip().splitlines()
    if status not in (0, None):
        assert (status, len(lines)) == (1, 1) and lines[0].startswith("train.py: "), lines
        raise ValueError(lines[0])


NAMES = {  # what works for flags of text, and some that does not
    "out": ["run", "other", "new/other", "記憶"], "data_dir": ["data", "file", "new/data"],
    "text": ["notes.txt", "notes.txt", "bytes.bin", "short.txt"], "device": ["cpu", "cuda", "tpu"],
    "dataset": ["stdlib", *corpora.SOURCES, "enwik9"], "dtype": ["auto", "float32", "bf16"],
    "optimizer": ["adam", "muon", "sgd"], "schedule": ["cosine", "sqrt", "none"]}
LENGTHS = ["--steps 2", "--tokens 64", "--minutes 1e-5", "--steps 0", "--tokens nan",
           "--minutes -1", "--steps x"]  # others are slow, rightly


def some_flags(draw):
    """Up to five flags with usual or odd values."""
    kinds = {field.name: field.type for settings in (lesson_5.Config, presets.Run, Flags)
             for field in fields(settings) if field.type not in (str, bool, dict)
             and (settings is not lesson_5.Config or field.name in SIZES)}
    names = (kinds | NAMES).keys() - {"steps", "tokens", "minutes", "n_tokens"}
    flags = []
    for name in draw.choices(sorted(names), k=draw.choice((0, 1, 1, 2, 5))):
        value = draw.choice(WORDS if draw.random() < 0.3 else NAMES.get(name) or USUAL[kinds[name]])
        values = map(str, value) if isinstance(value, tuple) else [str(value)]
        flags += draw.choice(([f"{flag(name)}={value}"], [flag(name), *values]))
    return flags


def command(draw, folder):
    """A command line: flags, what to do, and perhaps one word too many."""
    (folder / "bytes.bin").write_bytes(draw.randbytes(3000))
    (folder / "short.txt").write_bytes(NOTES[:60])
    acts = {"": 14, "--resume": 5, "--eval-only": 4, "--sample": 4, "--dry-run": 3, "--help": 0.1}
    act = draw.choices([*acts], [*acts.values()])[0]
    goes_on = act in ("--resume", "--eval-only", "--sample")
    if draw.random() < (0.9 if goes_on else 0.1):
        put_run(folder)
    more = {"--sample": [draw.choice((*WORDS, "abba"))],
            "--dry-run": ["--model", draw.choice([*presets.CONFIGS, *WORDS])]}
    flags = [act, *more.get(act, [])] if act else []
    flags += some_flags(draw) + [draw.choice(WORDS)] * (draw.random() < 0.1)
    start = ["--device", "cpu", "--n-tokens", "3", "--out", "run"]
    if not goes_on or draw.random() < 0.2:
        start += [*TINY, *draw.choices(LENGTHS, [9, 9, 2, 1, 1, 1, 1])[0].split()]
    if not goes_on and not re.search("--(text|dataset)", " ".join(flags)):
        start += ["--text", "notes.txt"]
    return Input(f"train.py {start + flags}", functools.partial(command_line, start + flags))


# ---- texts --------------------------------------------------------------------------------------

SORTS = [b"\n", b"\0", b"\xff", b"a b\n", b" \t\r\n\v\f", bytes(range(256)), b"\xef\xbb\xbf",
         "é😀\u2028\u3000\x85".encode(), b"<eos> <unk> <S> <UNK> ", b"\xf0\x9f", b"\xed\xa0\x80",
         b"w" * 5000, b"<html>", b"\xff" * 4, bytes(4), b""]


def bent(draw, data):
    """Bytes cut off, left out, written over, put between, or something else altogether."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        middle = draw.choice((*SORTS, draw.randbytes(4), data[:99])) * draw.choice((1, 1, 1, 50))
        end = at + draw.choice((0, len(middle), draw.randrange(60), len(data)))
        data = data[:at] + middle + data[end:]
    return data if draw.random() < 0.9 else data[:draw.choice((0, 1, 39, 40, 41))]


def text(draw, folder):
    """The bytes of a file for --text: read, encoded, decoded."""
    data = bent(draw, draw.choice((b"", NOTES)))
    path = folder / draw.choice(("t.txt", "記憶 .txt", "$\\frac$"))
    path.write_bytes(data)
    prompt = data[: draw.randrange(50)].decode(errors=draw.choice(["replace", "surrogateescape"]))

    def act():
        corpus = corpora.load(path)
        splits = torch.cat([corpus.train, corpus.valid, corpus.test])
        assert corpora.as_bytes(splits, corpus.vocab) == data
        corpora.compressed_bits(corpus.test, corpus.vocab)
        tokens = corpora.encode(prompt, corpus.vocab)
        assert not prompt.isprintable() or corpora.decode(tokens, corpus.vocab) == prompt

    return Input(f"text {path.name!r} of {len(data)} bytes, {data[:60]!r}", act)


# ---- archives, and what else lies in a data folder ----------------------------------------------

PARTS = {"enwik8": ["enwik8"], "ptb": ["train", "valid", "test"], "lm1b": ["s/1", "s/2", "s/3"]}


def archive(draw, folder):
    """A data folder: an archive or its files, whole or bent, or something else in their places."""
    root, name = folder / "data", draw.choice([*PARTS])
    pack, form = draw.choice(((zipped, "a.zip"), (tarred, "a.tar.gz")))
    texts = {part: bent(draw, NOTES) if draw.random() < 0.1 else NOTES for part in PARTS[name]}
    words = b"\n".join([b"<S>", b"<UNK>", *sorted(set(NOTES.split()))])
    contents = {form: pack(texts), "v": words}
    table = mock.patch.object(corpora, "SOURCES", {name: download.Source(
        published(form, contents[form]),
        tuple(download.File(part, draw.choice((None, len(NOTES)))) for part in texts),
        vocabulary=published("v", words) if name == "lm1b" else None)})
    contents |= texts if draw.random() < 0.6 else {}
    for file, data in contents.items():
        (root / file).parent.mkdir(exist_ok=True, parents=True)
        (root / file).write_bytes(bent(draw, data) if draw.random() < 0.1 else data)
    cache = f"{name}.train.int32"
    if draw.random() < 0.2:
        path = root / draw.choice([*contents, cache, f"{cache}.shards"])
        path.unlink(missing_ok=True)
        draw.choice((path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to("/no"),
                     lambda: os.mkfifo(path)))()

    def act():
        with table:
            corpora.load(name, root)

    made = *texts, cache, f"{cache}.shards/1", f"{cache}.shards/2"
    return Input(f"{name} in {form}, files {sorted(contents)}", act,
                 tuple(f"data/{file}" for file in made))


# ---- checkpoints --------------------------------------------------------------------------------

class Evil:
    """A pickle that makes a file when it is loaded; see `verdict`."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def spots(value):
    """All places in nested dicts and lists, as (container, key)."""
    keys = list(value) if isinstance(value, dict) else (
        range(len(value)) if isinstance(value, list) else ())
    return [spot for key in keys for spot in ((value, key), *spots(value[key]))]


def strange_tensor(draw, like):
    """Another type, another shape, or numbers that nobody trained."""
    bad = draw.choice((math.nan, math.inf, 3e38, -1, 0, 1e-40))
    return draw.choice((
        lambda: like.double(), lambda: like.to(torch.int64), lambda: like.to(torch.complex64),
        lambda: like[:0], lambda: like[None], lambda: like.flatten()[:-1],
        lambda: torch.full_like(like, bad), lambda: like.new_zeros(1).expand(10**9),
        lambda: like.to("meta"), lambda: torch.zeros(2, 3).to_sparse(),
        lambda: torch.tensor(bad)))()


def checkpoint(draw, folder):
    """A run whose checkpoints are as they were, cut, bent, or hold code."""
    argv = draw.choice((["--resume"], ["--eval-only"], ["--sample", "abba"]))
    how = draw.choice(("nothing", "bytes", "bytes", "code"))

    def change(name, content):
        if how == "code":
            container, key = draw.choice(spots(content))
            container[key] = Evil()

    put_run(folder, change)
    for path in sorted((folder / "run").glob("*.*")) if how == "bytes" else ():
        path.write_bytes(bent(draw, path.read_bytes()))
    argv = [*argv, "--out", "run", "--device", "cpu", "--n-tokens", "2"]
    return Input(f"checkpoint, {how}: {argv}", functools.partial(command_line, argv))


# ---- sizes and tensors --------------------------------------------------------------------------

def strange_tokens(draw, x):
    """Tokens of another type, shape or device, or none."""
    return draw.choice([
        x + 99, x - 1, x.int(), x.double(), x.to("meta"), x.tolist(), x.sum(), x[0], x[:, :0], x.mT,
        x.to_sparse(), x * math.nan, *ODD])


def sizes(draw, folder):
    """A Config, a model, and calls of it, where one thing is odd; what is let pass must work."""
    values = {field.name: draw.choice(USUAL[field.type]) for field in fields(lesson_5.Config)}
    values |= {"vocab_size": 9, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 8,
               "dropout": 0, "dropout_attention": 0.5, "div_val": 2 if values["cutoffs"] else 1}
    odd = draw.choice(("size", "size", "x", "y", "memory", "sample", ""))
    if odd == "size":
        lists = [(1, 1), (4, 2), [2, 4], (-1,), (1.5,), ("a",), (None,), (10**30,)]
        values[draw.choice([*values])] = draw.choice(ODD + lists)
    tokens = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]])
    x, y = (strange_tokens(draw, tokens) if odd == name else tokens for name in "xy")
    how = {"n_tokens": draw.choice((2, 2, 0)), "top_k": draw.choice((3, 3, -1, 0, 10**30)),
           "temperature": draw.choice((1.0, 0.0, -1.0, math.nan, math.inf, 1e300, 1e-30))}

    def act():
        made = lesson_5.Config(**values)
        parameters = presets.count_parameters(made)
        estimate.flops_per_step(made, 2, 4)
        estimate.bytes_of_run(made, parameters, 2, 4, "float32")
        if parameters > 5_000_000:
            return
        model, memory = lesson_5.TransformerXL(made), None
        for _ in range(2):
            losses, memory = model(x, memory, y)
            losses.sum().backward()
            assert losses.isfinite().all(), losses
        if odd == "memory":
            memory[-1] = draw.choice([strange_tensor(draw, memory[-1]), *ODD])
        model(x, memory)
        model.eval()
        found = lesson_5.generate(model, x, **how if odd == "sample" else {"n_tokens": 2})
        corpora.decode(found[0], list(range(9)))

    return Input(f"{values}, x {x}, y {y}, odd: {odd} {how}", act)


# ---- the judge ----------------------------------------------------------------------------------

KINDS = {"command": command, "text": text, "archive": archive, "checkpoint": checkpoint,
         "sizes": sizes}


@contextmanager
def bounded():
    """Some seconds and some memory, where the system can keep both; no warnings, no network."""
    def ring(number, frame):
        raise Hang(f"still running after {SECONDS} seconds")

    linux = sys.platform == "linux"
    if linux:
        resource = import_module("resource")
        limits = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, limits[1]))
    try:
        with warnings.catch_warnings(), mock.patch.object(
                urllib.request, "urlopen", side_effect=OSError("no network")), mock.patch.object(
                corpora, "standard_library", return_value=(NOTES,) * 3):
            warnings.simplefilter("error")
            yield
    finally:
        if linux:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            resource.setrlimit(resource.RLIMIT_AS, limits)


def files(folder):
    """{path: what is there} below a folder; a lock is no trace, nor is a folder in data/."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or path.is_file():
            found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes()
        elif not name.startswith("data") or not path.is_dir():
            found[name] = "folder or pipe"
    if "run/damaged.pt" in found and "run/checkpoint.pt" not in found:  # put aside, nothing lost
        found["run/checkpoint.pt"] = found.pop("run/damaged.pt")
    found.pop("run/lock", None)
    return found


def judge(kind, number, seed):
    """Try one input -> ("worked" | "refused" | "fault", what came of it, what was tried)."""
    draw, here = random.Random(f"{kind} {number} {seed}"), Path.cwd()
    trained(), torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        try:
            os.chdir(folder)
            (folder / "notes.txt").write_bytes(NOTES)
            (folder / "file").write_bytes(b"kept")
            case = KINDS[kind](draw, folder)
            return (*verdict(case, folder), case.what)
        finally:
            os.chdir(here)


def verdict(case, folder):
    """Run the case in its folder -> ("worked" | "refused" | "fault", what came of it)."""
    before, said, outcome = files(folder), "", "worked"
    try:
        with bounded():
            case.act()
    except ValueError as error:
        outcome, said = "refused", str(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(last.filename).parent in (
            ROOT, ROOT / "support", ROOT / "training",
            ROOT / "tests" / "system") and "raise" in last.line
        sentence = re.search(r"\w+\W+\w+", said) and not re.search("[\n\r]", said)
        if "XL_HANDED_IN" in os.environ:  # exercises of others refuse in their own words
            ours = sentence = True
        if type(error) is not ValueError or not ours:  # what int("x") or torch says is no help
            return "fault", f"{type(error).__name__} from {last.filename}: {said}"
        if not sentence:
            return "fault", f"no sentence: {said!r}"
    except (Exception, Hang) as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(
            error.__traceback__) if Path(f.filename).parent in (
                ROOT, ROOT / "support", ROOT / "training")]
        return "fault", f"{type(error).__name__} by way of {', '.join(frames)}: {error}"
    after = files(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if "evil" in after:
        return "fault", "code out of a pickle was run"
    if left := [name for name in changed if name.endswith(".part")]:
        return "fault", f"{left} left"
    # (a run that diverged has left its traces, and what is best is read at the end only)
    if outcome == "refused" and not re.search("not finite|best.pt", said):
        if changed - {"data", *case.allowed}:
            return "fault", f"{sorted(changed)} changed, although refused: {said}"
    return outcome, said


def main(argv=None):
    """Try many inputs of all kinds; a table, each fault with the command that repeats it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=600, help="how many, over all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="this kind alone")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this number alone, in full")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    kinds = [given.kind] if given.kind else list(KINDS)
    numbers = range((given.inputs - 1) // len(kinds) + 1) if given.only is None else [given.only]
    cases = [(number, kind) for number in numbers for kind in kinds]
    table = {kind: {"worked": 0, "refused": 0, "fault": 0} for kind in kinds}
    for number, kind in progress(cases, "input", len(cases)):
        outcome, said, what = judge(kind, number, given.seed)
        table[kind][outcome] += 1
        if outcome == "fault" or given.only is not None:
            print(f"\r{outcome}: python tests/system/fuzz.py --kind {kind} --only {number} --seed "
                  f"{given.seed}\n  {what[:800]!a}\n  {said[:800]!a}", flush=True)
    for kind, counts in table.items():
        print(f"{kind:12}" + "".join(f"{name} {count:6,}   " for name, count in counts.items()))
    return int(any(counts["fault"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
