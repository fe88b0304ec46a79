"""Broken input by the thousand, and one rule for all of it: it works, or one sentence refuses it.

    python tests/system/fuzz.py --inputs 5000 --seed 0           all kinds, with a table at the end
    python tests/system/fuzz.py --kind archive --only 17 --seed 0    one input again, shown in full

Six kinds are drawn: command lines, texts, archives and the files of a data folder, checkpoints,
configurations, tensors.  Number, kind and seed decide an input, so each can be had again.  A fault
is any exception but a ValueError of ours (for train.py: anything but one line on stderr and
status 1), a warning, a hang, gigabytes of memory, code run out of a pickle, a process left behind,
and a refusal after which the folder is not as it was.  tests/system/test_fuzz.py is the short form.
"""
import argparse
import functools
import gzip
import io
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import urllib.error
import urllib.request
import warnings
import zipfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

try:
    import resource
except ImportError:  # Windows
    resource = None

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]
from support import corpora, estimate
import train

lesson_1, lesson_5 = import_module("01_vanilla_segments"), import_module("05_full_model")
Config = lesson_5.Config
SECONDS = 10  # for one input; the slowest honest one takes a tenth of it
ROOM = 2 << 30  # bytes that one input may ask for
TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--segment", "8", "--mem-len",
        "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "1"]
NOTES = " ".join(
    random.Random(0).choices(["abba", "bad", "cede", "deed", "a", "é"], k=500)).encode()
ODD = [None, True, -1, 0, 1, 2, 3.5, 2**31, 2**63, 10**30, math.nan, math.inf, 1e308, 1e-308, "",
       "4", "x", "\0", "a\nb", "é😀", b"", [], [1], (), (1, "a"), {}, {"a": 1}, {0: 0}]
WORDS = ["0", "1", "2", "-1", "", " ", "nan", "inf", "-inf", "1e300", "1e-300", "1e999",
         "1000000000", str(2**63), str(10**30), "9" * 5000, "1.5", "0x10", "1_0", "٣", "x", "é😀",
         "\0", "a\n5\tb", "--", "-", "--resume", "\udcff", "$a$b", "$\\frac$", "y" * 300, ".", "..",
         "/", "file", "file/x", "notes.txt", "run", "nowhere/x", "a=b", "%s", "{}", "*"]


class Input(NamedTuple):
    """What is tried, in words; how; and the files that it may make although it is refused."""

    what: str
    act: object
    allowed: tuple = ()


class Fault(Exception):
    """Something happened that must not happen."""


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
            status = train.main([*TINY, *flags, "--n-tokens", "1"])
        if status != 0:
            raise Fault("the run that all others start from was refused")
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
    """train.main(argv): nothing if it worked, ValueError if it refused, Fault if it did neither."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors, "", write_through=True)
               for errors in ("strict", "backslashreplace")]  # as those of a terminal
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]), mock.patch.object(
            sys, "argv", ["train.py", *argv]):
        try:
            status = train.main(argv)
        except SystemExit as leaving:  # --help
            status = leaving.code
    lines = streams[1].buffer.getvalue().decode().replace("\r", "\n").strip().splitlines()
    if status in (0, None):
        return
    if status != 1 or len(lines) != 1 or not lines[0].startswith("train.py: "):
        raise Fault(f"status {status}, on stderr {lines}")
    raise ValueError(lines[0])


USUAL = {  # what works for a flag; every other value of it is drawn from WORDS
    "--n-layer": "1 2", "--d-model": "8 32 33", "--n-head": "1 2 3", "--d-head": "4 16",
    "--d-inner": "1 8", "--mem-len": "0 5", "--dropout": "0 0.5", "--dropout-attention": "0 0.5",
    "--div-val": "1 2 4", "--batch": "1 4 50", "--micro-batch": "0 1 3 99", "--segment": "1 8 5000",
    "--lr": "0.01 1", "--warmup": "0 3", "--clip": "0.2 9", "--eval-segment": "4 16 500",
    "--eval-mem-len": "0 9", "--eval-clamp-len": "0 3", "--eval-every": "1 2",
    "--eval-tokens": "0 1 9", "--log-every": "1 2", "--seed": "0 7", "--temperature": "0.5 1 9",
    "--top-k": "1 3 99", "--tokens-per-second": "0.5 1e9", "--out": "run other new/other 記憶",
    "--text": "notes.txt notes.txt bytes.bin short.txt", "--data-dir": "data file new/data",
    "--dataset": " ".join(["stdlib", *corpora.SOURCES, "enwik9"]), "--device": "cpu cuda tpu",
    "--dtype": "auto float32 bf16", "--cutoffs": "2 4"}
LENGTHS = {"--steps": "1 2 3 0 -1 x 1.5", "--tokens": "32 99 0 -5 nan",
           "--minutes": "1e-5 0 -1 inf x", "--n-tokens": "0 1 9 -3 x"}  # others are slow, rightly
ACTS = {"--resume": 5, "--eval-only": 4, "--sample": 4, "--dry-run": 3, "--drop-newlines": 1,
        "--compile": 1, "--help": 0.1}  # how often


def command(draw, folder):
    """A command line: usual and odd values of some flags, and those that say what to do."""
    (folder / "bytes.bin").write_bytes(draw.randbytes(3000))
    (folder / "short.txt").write_bytes(NOTES[:60])
    acts = draw.choices([*ACTS], [*ACTS.values()], k=draw.choice((0, 0, 0, 1, 1, 1, 2)))
    goes_on = bool({"--resume", "--eval-only", "--sample"} & set(acts))
    if draw.random() < (0.9 if goes_on else 0.1):
        put_run(folder)
    flags = []
    for name in draw.choices([*USUAL, *LENGTHS], [1] * len(USUAL) + [0.3] * len(LENGTHS),
                             k=draw.choice((0, 1, 1, 2, 2, 5))):
        usual = (USUAL | LENGTHS)[name].split()
        odd = name in USUAL and draw.random() < 0.3
        value = draw.choice(WORDS if odd else usual)
        flags += [f"{name}={value}"] if draw.random() < 0.2 else [name, value]
        while name == "--cutoffs" and draw.random() < 0.6:
            flags.append(draw.choice([*WORDS, "3", "5"]))
    for act in acts:
        flags += [act, draw.choice((draw.choice(WORDS), "abba"))] if act == "--sample" else [act]
    if "--dry-run" in flags:
        flags += ["--model", draw.choice([*train.CONFIGS, *WORDS])]
    elif draw.random() < 0.1 and flags:  # an argument lost, or one too many
        at = draw.randrange(len(flags))
        flags[at : at + draw.randrange(2)] = draw.choices(WORDS, k=draw.randrange(2))
    length = draw.choice((["--steps", "2"], ["--tokens", "64"], ["--minutes", "1e-5"]))
    start = [*TINY, *length, "--n-tokens", "3"]
    if goes_on and draw.random() < 0.8:
        start = ["--device", "cpu", "--n-tokens", "3"]
    elif not re.search("--(text|dataset)", " ".join(flags)):
        start += ["--text", "notes.txt"]
    argv = [*start, *([] if "--out" in flags else ["--out", "run"]), *flags]
    return Input(f"train.py {argv}", functools.partial(command_line, argv))


# ---- texts --------------------------------------------------------------------------------------

def strange_bytes(draw, most=400):
    """Bytes of one or two sorts: few or many, of few values or of all."""
    sorts = [b"\n", b"\0", b"\xff", b"a", b"a b\n", b" \t\r\n\v\f", bytes(range(256)), b"\r\n",
             b"\xef\xbb\xbf", "é😀\u2028\u3000\x85".encode(), b"<eos> <unk> <S> <UNK> ", NOTES,
             b"\xf0\x9f", b"\xed\xa0\x80", b"w" * 5000]
    data = b""
    for sort in draw.choices(sorts, k=draw.choice((0, 1, 1, 1, 2, 3))):
        data += sort * draw.choice((1, 1, 3, most // len(sort) + 1))
    if draw.random() < 0.2:
        data = bytes(draw.choices(data, k=len(data))) if data else data
    return data[: draw.choice((None, None, 0, 1, 2, 39, 40, 41, len(data) // 2))]


def text(draw, folder):
    """The bytes of a file for --text: read, encoded, decoded, now and then trained on."""
    data, path = strange_bytes(draw, 3000), folder / draw.choice(("t.txt", "記憶 .txt", "$\\frac$"))
    path.write_bytes(data)
    prompt = data[: draw.randrange(50)].decode(errors=draw.choice(["replace", "surrogateescape"]))

    def act():
        corpus = corpora.load(path)
        splits = torch.cat([corpus.train, corpus.valid, corpus.test])
        if corpora.as_bytes(splits, corpus.vocab) != data:
            raise Fault("what was read is not what the file holds")
        corpora.compressed_bits(corpus.test, corpus.vocab)
        tokens = corpora.encode(prompt, corpus.vocab)
        if prompt.isprintable() and corpora.decode(tokens, corpus.vocab) != prompt:
            raise Fault("encoding and decoding changed the text")

    if draw.random() < 0.2:
        argv = [*TINY, "--text", str(path), "--out", "run", "--steps", "1", "--n-tokens", "2"]
        act = functools.partial(command_line, argv)
    return Input(f"text {path.name!r} of {len(data)} bytes, {data[:60]!r}", act)


# ---- archives, and what else lies in a data folder ----------------------------------------------

def bent(draw, data):
    """Bytes cut, flipped, overwritten, repeated, or something else altogether."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, how = draw.randrange(len(data) + 1), draw.randrange(7)
        if how == 0:
            del data[at:]
        elif how in (1, 2, 3) and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how == 4:
            data[at : at + 4] = draw.choice((bytes(4), b"\xff" * 4, draw.randbytes(4)))
        elif how == 5:
            data[at:at] = data[: draw.randrange(99)]
        else:
            del data[at : at + draw.randrange(60)]
    return bytes(data) if draw.random() < 0.95 else draw.choice((b"", b"<html>" * 50, bytes(999)))


def packed(draw, form, members):
    """A zip or tar.gz of {name: bytes}; one member may be no file, nested, huge, twice, renamed."""
    file, victim = io.BytesIO(), draw.choice(list(members))
    how = draw.choice(("", "", "", "link", "hard", "folder", "nested", "bomb", "name", "twice",
                       "pax"))
    members = members | ({victim: bytes(4_000_000)} if how == "bomb" else {})
    prefix = draw.choice(("../", "/", "./", "\\", "C:", "\0")) if how == "name" else ""
    entries = [(prefix + name if name == victim else name, name == victim, data)
               for name, data in members.items()] + [(victim, True, b"!")] * (how == "twice")
    with warnings.catch_warnings():  # of zipfile, that a name is there twice
        warnings.simplefilter("ignore")
        (zip_of if form == "zip" else tar_of)(draw, file, entries, how)
    data = file.getvalue()
    if form != "zip":  # bent within the gzip, where no checksum notices
        data = gzip.compress(bent(draw, data) if draw.random() < 0.5 else data, 1, mtime=0)
    data = bent(draw, data) if draw.random() < 0.4 else data
    return packed(draw, form, {victim: data}) if how == "nested" else data


def zip_of(draw, file, entries, how):
    """Write entries (name, is it the victim, bytes) as a zip."""
    modes = {"link": 0o120777, "hard": 0o010666, "folder": 0o040777}
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
                          zipfile.ZIP_LZMA))
    with zipfile.ZipFile(file, "w") as archive:
        for name, victim, data in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if victim and how in modes:
                info.create_system, info.external_attr = 3, modes[how] << 16
            archive.writestr(info, data)


def tar_of(draw, file, entries, how):
    """The same as a tar, in one of its three formats."""
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "folder": tarfile.DIRTYPE}
    with tarfile.open(fileobj=file, mode="w", format=draw.randrange(3)) as archive:
        for name, victim, data in entries:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if victim and how in kinds:
                info.type, info.linkname, info.size = kinds[how], "/etc/passwd", 0
            if how == "pax":
                info.pax_headers = {"size": draw.choice(("-1", "x", "9" * 20, "0")),
                                    "GNU.sparse.major": draw.choice(("0", "1", "x"))}
            archive.addfile(info, io.BytesIO(data if info.size else b""))


def listed(name, data, truly):
    """The table's entry for a file, with its true checksum or with none that fits."""
    return corpora.File(name, len(data), "sha256:" + sha256(data if truly else b"?").hexdigest(),
                        ("http://127.0.0.1/none",))


def archive(draw, folder):
    """A data folder: an archive or its files, whole or broken, as the table says or not."""
    root, name = folder / "data", draw.choice(["enwik8", "ptb", "ptb", "lm1b", "lm1b"])
    names = {"enwik8": ["enwik8"], "ptb": ["train", "valid", "test"], "lm1b": ["s/1", "s/2", "s/3"]}
    texts = {file: NOTES[:300] + b"\n" for file in names[name]}
    if draw.random() < 0.3:
        texts[draw.choice(names[name])] = strange_bytes(draw)
    form = "zip" if name == "enwik8" else draw.choice(("zip", "tar.gz"))
    data, words = packed(draw, form, texts), b"\n".join([b"<S>", b"<UNK>", *sorted(
        set(NOTES.split()))])
    table = mock.patch.object(corpora, "SOURCES", {name: corpora.Source(
        listed(f"a.{form}", data, draw.random() < 0.9),
        tuple(corpora.File(file, draw.choice((None, len(data))), None)
              for file, data in texts.items()),
        vocabulary=listed("v", words, draw.random() < 0.95) if name == "lm1b" else None)})
    words = bent(draw, words) if draw.random() < 0.2 else words
    contents = {f"a.{form}": data} | ({"v": words} if name == "lm1b" else {})
    contents |= texts if draw.random() < 0.6 else {}
    for file, content in contents.items():
        (root / file).parent.mkdir(exist_ok=True, parents=True)
        (root / file).write_bytes(content)
    cache, good = f"{name}.train.int32", None
    if name == "lm1b" and "s/1" in contents and draw.random() < 0.7:
        with table:
            good = encoded_before(root)
    if draw.random() < 0.2:  # something else in the place of a file
        path = root / draw.choice([*texts, *contents, cache, f"{cache}.shards"])
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        draw.choice((path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to("/no"),
                     lambda: os.mkfifo(path)))()

    def act():
        with table:
            corpus = corpora.load(name, root)
        if good is not None and corpus.train.tolist() != good:
            raise Fault("other tokens than before")
        corpora.decode(corpus.train[:50], corpus.vocab)

    return Input(f"{name} in {form}, {data[:30]!r}..., files {sorted(contents)}", act,
                 tuple(f"data/{file}" for file in (
                     *texts, cache, f"{cache}.shards/1", f"{cache}.shards/2")))


def encoded_before(root):
    """Let lm1b be encoded -> the tokens; None if it is refused."""
    try:
        return corpora.load("lm1b", root).train.tolist()
    except ValueError:
        return None


# ---- checkpoints --------------------------------------------------------------------------------

class Evil:
    """A pickle that makes a file when it is loaded; see `judge`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def spots(value):
    """All places in nested dicts and lists, as (container, key)."""
    keys = list(value) if isinstance(value, dict) else (
        range(len(value)) if isinstance(value, list) else ())
    return [spot for key in keys for spot in ((value, key), *spots(value[key]))]


def strange_tensor(draw, like):
    """Another type, another shape, or numbers that nobody trained."""
    bad = draw.choice((math.nan, math.inf, 3e38, -1, 0, 1e-40))
    return draw.choice((
        lambda: like.double(), lambda: like.bfloat16(), lambda: like.to(torch.int64),
        lambda: like.to(torch.complex64), lambda: like.bool(), lambda: like[:0], lambda: like[None],
        lambda: like.flatten()[:-1], lambda: like.transpose(0, -1),
        lambda: torch.full_like(like, bad), lambda: like.flatten()[:1].expand(10**9),
        lambda: like.to("meta"),
        lambda: torch.zeros(2, 3).to_sparse(), lambda: torch.tensor(bad)))()


def damage(draw, content):
    """One or two entries of nested dicts and lists become something else, vanish or get a name."""
    for _ in range(draw.choice((1, 1, 2))):
        places = spots(content)
        if not places:
            return
        container, key = draw.choice(places if draw.random() < 0.8 else
                                     [(content, key) for key in content])
        value = container[key]
        how = draw.random()
        if how < 0.1 and isinstance(container, dict):
            del container[key]
        elif how < 0.2 and isinstance(container, dict):
            container[draw.choice((f"{key}2", 7, "", None))] = container.pop(key)
        elif isinstance(value, torch.Tensor) and value.dim() and how < 0.8:
            container[key] = strange_tensor(draw, value)
        else:
            container[key] = draw.choice([*ODD, torch.zeros(2, 3), torch.tensor(math.nan)])


def checkpoint(draw, folder):
    """A run whose checkpoints are cut, bent, of other types or shapes, or hold code."""
    acts = (["--resume"], ["--eval-only"], ["--sample", "abba"], ["--sample", "a", "--eval-only"])
    argv, how = draw.choice(acts), draw.choice(("bytes", "inside", "inside", "inside", "code"))

    def change(name, content):
        if how == "inside":
            damage(draw, content)
            run = content.get("run")
            for key in ("steps", "tokens", "minutes") if isinstance(run, dict) else ():
                if isinstance(run.get(key), (int, float)) and run[key] > 4:
                    run[key] = 4  # more would be honest, and slow
        elif how == "code":
            evil = draw.choice((Evil(os.mkdir, "evil"), Evil(exec, "import os; os.mkdir('evil')"),
                                Evil(getattr, Path("x"), "name"), Evil(torch.load, "evil")))
            container, key = draw.choice(spots(content))
            container[key] = evil

    put_run(folder, change)
    metrics = how == "inside" and draw.random() < 0.1
    for path in sorted((folder / "run").glob("*.tsv" if metrics else "*.pt")):
        if how == "bytes" or path.suffix == ".tsv":
            path.write_bytes(bent(draw, path.read_bytes()))
        elif how == "code" and draw.random() < 0.3:
            path.write_bytes(pickle.dumps(Evil(os.mkdir, "evil"), draw.randrange(5)))
    argv = [*argv, "--out", "run", "--device", "cpu", "--n-tokens", "2"]
    return Input(f"checkpoint, {how}: {argv}", functools.partial(command_line, argv))


# ---- configurations -----------------------------------------------------------------------------

def config(draw, folder):
    """Config of usual and odd values; what it lets pass must make a model that reads and writes."""
    usual = {"vocab_size": (7, 50), "n_layer": (1, 2), "d_model": (2, 8, 12), "n_head": (1, 2, 3),
             "d_head": (1, 4, 5), "d_inner": (1, 16), "dropout": (0.0, 0.5, 0), "div_val": (1, 2),
             "dropout_attention": (0.0, 0.9), "untie_r": (False, True), "mem_len": (0, 3, 9),
             "same_length": (False, True), "clamp_len": (0, 2, -1), "cutoffs": ((2,), [2, 4]),
             "tie_projections": (True, False)}
    lists = [(1, 1), (4, 2), (0,), (-1,), (1.5,), ("a",), (None,), (10**30,)]
    values = {name: draw.choice(choices) for name, choices in usual.items()}
    if values["div_val"] == 1 and draw.random() < 0.5:
        values["cutoffs"] = ()
    for name in draw.choices(list(usual), k=draw.choice((0, 1, 1, 2))):
        values[name] = draw.choice(ODD + lists)

    def act():
        made = Config(**values)
        if lesson_5.count_parameters(made) > 5_000_000:
            return
        model = lesson_5.TransformerXL(made)
        x, memory = torch.zeros(2, 4, dtype=torch.int64), None
        for _ in range(3):
            losses, memory = model(x, memory, x)
            losses.sum().backward()
        if not losses.isfinite().all():
            raise Fault(f"losses {losses}")
        lesson_5.generate(model, x, 2)
        replace(made, mem_len=5)
        parameters = lesson_5.count_parameters(made)
        estimate.flops_per_step(made, 2, 4)
        estimate.bytes_of_run(made, parameters, 2, 4, "float32")

    return Input(f"Config({', '.join(f'{k}={v!r}' for k, v in values.items())})", act)


# ---- tensors ------------------------------------------------------------------------------------

@functools.cache
def model_of(number, training):
    """One of four small models, in training or in eval mode."""
    base = Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)
    change = ({}, {"cutoffs": (3, 6), "div_val": 2}, {"n_layer": 3, "d_model": 12},
              {"dropout": 0.1})
    torch.manual_seed(number)
    return lesson_5.TransformerXL(replace(base, **change[number])).train(training)


def tensors(draw, folder):
    """Calls of the library with tensors of other types, shapes, devices, values, or with none."""
    shape = draw.choice(((2, 4), (1, 1), (3, 2), (2, 9), (4,), (), (0, 4), (2, 0), (1, 2, 3)))
    x = torch.randint(11, shape, generator=torch.Generator().manual_seed(draw.randrange(99)))
    others = [x + 1, x - 1, x * 10**9, x.int(), x.to(torch.uint8), x.double(), x.bool(),
              x.to("meta"), x.tolist(), x.numpy(), x.float() * math.nan, x.to_sparse(),
              x.to(torch.complex64), x[..., ::2] if x.dim() else x, *ODD]
    z = draw.choice([x, x, draw.choice(others)])
    model, other = (model_of(draw.randrange(4), draw.random() < 0.5) for _ in range(2))
    other = draw.choice((model, other))
    name, quiet = draw.choice(list(CALLS)), draw.random() < 0.5

    def act():
        with torch.no_grad() if quiet else torch.enable_grad():
            past, lanes = None, draw.choice((x, x, torch.zeros(3, 5, dtype=torch.int64)))
            if draw.random() < 0.7 and lanes.dim() == 2 and lanes.numel():
                past = other(lanes)[1]  # perhaps that of another model, or of more lanes
                if isinstance(past, list) and draw.random() < 0.5:
                    at = draw.randrange(len(past))
                    past[at] = draw.choice([strange_tensor(draw, past[at]), *ODD])
                past = draw.choice((past, past, draw.choice(ODD)))
            y = x if name not in ("forward", "forward with targets") else draw.choice((x, z))
            CALLS[name](model, z, past, y, draw)

    kind = f"{z.dtype} {tuple(z.shape)}" if isinstance(z, torch.Tensor) else repr(z)
    return Input(f"{name} of {kind}", act)


def whole(draw, *usual):
    """An argument that is an integer: mostly a usual one."""
    return draw.choice((*usual, *usual, -1, 0, 1, 2, 40, 2**31, 2**63, 10**30))


# The functions that students write again are asked with any numbers, but of the type they name.
CALLS = {
    "forward": lambda model, z, past, y, draw: model(z, past),
    "forward with targets": lambda model, z, past, y, draw: model(z, past, y),
    "generate": lambda model, z, past, y, draw: lesson_5.generate(
        model, y, draw.choice((-1, 0, 2)), draw.choice((None, 3, whole(draw, 1))),
        draw.choice((1.0, 0.0, -1.0, math.nan, math.inf, 1e300, 1e-30))) if y.dim() else None,
    "lanes": lambda model, z, past, y, draw: lesson_1.lanes(y.flatten(), whole(draw, 2)),
    "segments": lambda model, z, past, y, draw: list(lesson_1.segments(
        torch.zeros(2, 9), whole(draw, 2), whole(draw, 0))),
    "sinusoid": lambda model, z, past, y, draw: lesson_1.sinusoid(
        y.flatten(), draw.choice((0, 1, 2, 7, 8))),
    "encode": lambda model, z, past, y, draw: corpora.encode(
        draw.choice([word for word in (*ODD, *WORDS, "ab") if isinstance(word, str)]),
        draw.choice((list(b"ab 12"), ["<eos>", "a", "b"], list(range(256))))),
    "decode": lambda model, z, past, y, draw: corpora.decode(
        z, draw.choice((list(b"abcdefghijk"), ["<eos>", *"abcdefghij"]))),
    "SentenceLanes": lambda model, z, past, y, draw: corpora.SentenceLanes(
        torch.tensor([0, 1, 2, 0, 3, 0]), whole(draw, 1, 2), 0, 0, 0)[:, 0:3],
}


# ---- the judge ----------------------------------------------------------------------------------

KINDS = {"command": command, "text": text, "archive": archive, "checkpoint": checkpoint,
         "config": config, "tensors": tensors}


def refuse(*arguments, **more):
    """In the place of urlopen and torch.compile: there is no network, and no compiler."""
    raise urllib.error.URLError("there is no network here")


@contextmanager
def bounded():
    """Some seconds and some memory, where the system can keep both; no warnings, no network."""
    def ring(number, frame):
        raise Hang(f"still running after {SECONDS} seconds")

    statm = Path("/proc/self/statm")
    limits = resource.getrlimit(resource.RLIMIT_AS) if resource and statm.exists() else None
    if hasattr(signal, "setitimer"):
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
    if limits:
        taken = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, limits[1]))
    try:
        with warnings.catch_warnings(), mock.patch.object(urllib.request, "urlopen", refuse), \
                mock.patch.object(torch, "compile", lambda *arguments, **more: refuse), \
                mock.patch.object(corpora, "standard_library", lambda: NOTES):
            warnings.simplefilter("error")
            yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if limits:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def files(folder):
    """{path: what is there} below a folder; a lock is no trace, nor is a folder in data/."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not name.startswith("data") or not path.is_dir():
            found[name] = "folder or pipe"
    if "run/damaged.pt" in found and "run/checkpoint.pt" not in found:  # put aside, nothing lost
        found["run/checkpoint.pt"] = found.pop("run/damaged.pt")
    return {name: what for name, what in found.items() if not name.endswith("run/lock")}


def judge(kind, number, seed):
    """Try one input -> ("worked" | "refused" | "fault", what was tried, what came of it)."""
    draw, here = random.Random(f"{kind} {number} {seed}"), Path.cwd()
    trained(), torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        try:
            os.chdir(folder)
            (folder / "notes.txt").write_bytes(NOTES)
            (folder / "file").write_bytes(b"kept")
            (folder / "empty.txt").touch()
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
            ROOT, ROOT / "support", ROOT / "tests" / "system") and "raise" in last.line
        if type(error) is not ValueError or not ours:  # what int("x") or torch says is no help
            return "fault", f"{type(error).__name__} from {last.filename}: {said}"
        if not re.search(r"\w+\W+\w+", said) or "\n" in said or "\r" in said:
            return "fault", f"no sentence: {said!r}"
    except Fault as error:
        return "fault", str(error)
    except (Exception, Hang) as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(
            error.__traceback__) if Path(f.filename).parent in (ROOT, ROOT / "support")]
        return "fault", f"{type(error).__name__} by way of {', '.join(frames)}: {error}"
    after = files(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if "evil" in after:
        return "fault", "code out of a pickle was run"
    if multiprocessing.active_children():
        return "fault", "a process was left behind"
    if outcome == "refused" and not re.search("not finite|best.pt", said):
        # (a run that diverged has left its traces, and what is best is read at the end only)
        changed -= {name for name in changed if name in case.allowed or name == "data"}
        if changed:
            return "fault", f"{sorted(changed)} changed, although refused: {said}"
    elif left := [name for name in changed if name.endswith(".part")]:
        return "fault", f"{left} left"
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
    table = {kind: {"tried": 0, "worked": 0, "refused": 0, "fault": 0} for kind in kinds}
    start, shown, total, done = time.monotonic(), 0, len(numbers) * len(kinds), 0
    for number in numbers:
        for kind in kinds:
            outcome, said, what = judge(kind, number, given.seed)
            table[kind]["tried"] += 1
            table[kind][outcome] += 1
            done += 1
            if outcome == "fault" or given.only is not None:
                print(f"\r{outcome}: python tests/system/fuzz.py --kind {kind} --only {number} --seed "
                      f"{given.seed}\n  {what[:800]!a}\n  {said[:800]!a}", flush=True)
            if time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                left = (shown - start) * (total / done - 1)
                print(f"\r{done:,} of {total:,}, {left:.0f} s left ", end="", file=sys.stderr,
                      flush=True)
    print("\r" + " " * 40, file=sys.stderr)
    for kind, counts in table.items():
        print(f"{kind:12}" + "".join(f"{name} {count:6,}   " for name, count in counts.items()))
    return int(any(counts["fault"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
