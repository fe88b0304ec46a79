"""Broken input: a few hundred drawn by fuzz.py, and by name each kind that once got through.

    pytest tests/system/test_fuzz.py
    python tests/system/fuzz.py --inputs 5000      the long form
"""
import io
import math
import os
import random
import re
import sys
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import fuzz
import numpy as np
import pytest
import torch
from test_corpora import RAW, source

from support import corpora
from support.corpora import decode, encode, load

lesson_5 = import_module("05_full_model")
CONFIGS, Config = lesson_5.CONFIGS, lesson_5.Config
SMALL = Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)
X = torch.zeros(2, 4, dtype=torch.int64)


@pytest.fixture(autouse=True)
def no_curve(monkeypatch, request):
    """Drawing takes longer than all else in these runs; only one test looks at it."""
    if "curve" not in request.node.name:
        monkeypatch.setattr(fuzz.train.log, "draw", lambda *arguments: None)


# ---- drawn --------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, count", [("command", 16), ("text", 50), ("archive", 50),
                                         ("checkpoint", 32), ("config", 40), ("tensors", 120)])
def test_drawn_inputs_work_or_are_refused(kind, count):
    """No traceback, hang, warning, half-written file, or code out of a pickle."""
    outcomes = [fuzz.judge(kind, number, seed=1) for number in range(count)]
    wrong = [f"--kind {kind} --only {number} --seed 1: {said}"
             for number, (outcome, said, _) in enumerate(outcomes) if outcome == "fault"]
    assert not wrong, "python tests/system/fuzz.py " + "\n".join(wrong)
    found = {outcome for outcome, *_ in outcomes}
    assert found == {"worked", "refused"}, "the inputs are too tame, or too wild, to say anything"


def test_an_input_is_drawn_again_from_its_number():
    """The command that fuzz.py prints with a fault repeats it."""
    for kind in ("archive", "config", "tensors"):
        assert fuzz.judge(kind, 3, 5)[2] == fuzz.judge(kind, 3, 5)[2] != fuzz.judge(kind, 4, 5)[2]


class Bad:
    """Kinds of cases that the judge must see through."""
    def crash():
        raise KeyError("name")

    def torch_error():
        torch.zeros(2).view(3)

    def foreign_value_error():
        int("x")

    def hang():
        while True:
            pass

    def blow_up():
        torch.empty(10**10)

    def warn():
        np.array([1.0]) / 0

    def two_lines():
        raise ValueError("first\nsecond")

    def half_written():
        Path("checkpoint.part").write_bytes(b"half")
        raise ValueError("the disk is full")

    def left_part():
        Path("checkpoint.part").write_bytes(b"half")

    def evil():
        os.mkdir("evil")


@pytest.mark.skipif(sys.platform != "linux", reason="needs an alarm and a limit of memory")
@pytest.mark.parametrize("name", [name for name in vars(Bad) if not name.startswith("_")])
def test_the_judge_sees_every_kind_of_fault(name, tmp_path, monkeypatch):
    """A test of broken input that is itself blind would be worth nothing."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    outcome, said = fuzz.verdict(fuzz.Input(name, getattr(Bad, name)), tmp_path)
    assert outcome == "fault", said


def test_the_judge_lets_work_and_honest_refusals_pass(tmp_path, monkeypatch):
    """One of each."""
    monkeypatch.chdir(tmp_path)
    assert fuzz.verdict(fuzz.Input("", lambda: Path("new").touch()), tmp_path)[0] == "worked"
    refusal = fuzz.Input("", lambda: lesson_5.TransformerXL(SMALL)(X + 50))
    assert fuzz.verdict(refusal, tmp_path) == ("refused", "token 50 outside vocabulary of 11")


# ---- found: configurations ----------------------------------------------------------------------

@pytest.mark.parametrize("change, words", [
    ({"n_layer": "4"}, "n_layer must be of type int, got '4'"),
    ({"n_layer": True}, "n_layer must be of type int, got True"),
    ({"d_model": 8.0}, "d_model must be of type int, got 8.0"),
    ({"mem_len": None}, "mem_len must be of type int"),
    ({"dropout": "0.1"}, "dropout must be of type float"),
    ({"untie_r": "yes"}, "untie_r must be of type bool"),
    ({"cutoffs": 3}, "cutoffs must be of type tuple"),
    ({"cutoffs": (3, "a")}, "cutoffs must be integers"),
    ({"cutoffs": torch.zeros(2, 2)}, "cutoffs must be of type tuple, got tensor"),
    ({"mem_len": 10**30}, f"mem_len must be at most {2**63 - 1}"),
    ({"clamp_len": 2**63}, "clamp_len must be at most"),
    ({"d_inner": 2**50}, "d_model 8 times 1125899906842624"),
    ({"d_model": 2**31, "cutoffs": (3,), "div_val": 2}, "d_model 2147483648 times 2147483648"),
], ids=lambda z: " ".join(z) if isinstance(z, dict) else "")
def test_a_configuration_of_other_types_or_beyond_all_machines(change, words):
    """One line each, with the name and the value."""
    with pytest.raises(ValueError, match=words) as caught:
        replace(SMALL, **change)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    """A vocabulary counted by NumPy is no mistake."""
    config = Config(np.int64(11), n_layer=1, d_model=8, dropout=np.float32(0.5), cutoffs=[3])
    assert lesson_5.count_parameters(config) == lesson_5.count_parameters(
        Config(11, n_layer=1, d_model=8, dropout=0.5, cutoffs=(3,)))


def test_a_billion_layers_are_counted_at_once():
    """A layer too many on the command line is no reason to wait."""
    one, two = (lesson_5.count_parameters(replace(SMALL, n_layer=n, untie_r=True)) for n in (1, 2))
    found = lesson_5.count_parameters(replace(SMALL, n_layer=10**9, untie_r=True))
    assert found == one + (10**9 - 1) * (two - one)
    for config in (SMALL, CONFIGS["tiny"]):
        model = lesson_5.TransformerXL(replace(config, n_layer=5))
        assert sum(p.numel() for p in model.parameters()) == lesson_5.count_parameters(
            replace(config, n_layer=5))


# ---- found: tensors -----------------------------------------------------------------------------

@pytest.mark.parametrize("x, words", [
    ([[1, 2]], "got list"), (np.zeros((2, 4)), "got ndarray"), (X.to("meta"), "on meta"),
    (X.to_sparse(), "sparse"), (None, "got NoneType"),
], ids=["list", "NumPy", "meta", "sparse", "None"])
def test_what_is_no_tensor_of_the_models_device(x, words):
    """As tokens and as targets."""
    model = lesson_5.TransformerXL(SMALL)
    with pytest.raises(ValueError, match=f"x and y must be .*{words}"):
        model(x)
    if x is not None:
        with pytest.raises(ValueError, match=f"x and y must be .*{words}"):
            model(X, None, x)


@pytest.mark.parametrize("change", [
    torch.Tensor.double, torch.Tensor.bool, lambda z: None, lambda z: z.tolist(),
    lambda z: z.to("meta"), lambda z: z[0], torch.Tensor.to_sparse,
], ids=["float64", "bool", "None", "list", "meta", "2-D", "sparse"])
def test_a_memory_of_other_types(change):
    """One layer is enough; the message says what is wanted and what came."""
    model = lesson_5.TransformerXL(SMALL)
    memory = model(X)[1]
    for layer in range(2):
        changed = [change(z) if n == layer else z for n, z in enumerate(memory)]
        with pytest.raises(ValueError, match=r"memory must be \(B, m, D\) = \(2, m, 8\).*got"):
            model(X, changed)
    model(X, memory)


# ---- found: text --------------------------------------------------------------------------------

def test_a_prompt_that_is_not_utf_8_names_the_character():
    """Python hands over such an argument with surrogates in it."""
    with pytest.raises(ValueError, match=r"no '\\udcff'$"):
        encode("ab\udcff", list(b"ab"))
    with pytest.raises(ValueError, match=r"no 'x\\udcff'"):
        encode("a x\udcff", ["<eos>", "a"])


@pytest.mark.parametrize("tokens", ["x", None, 1, [None], [[1]], [0.5], [1j], torch.zeros(2, 2),
                                    torch.zeros(2, device="meta"), 10**30], ids=repr)
@pytest.mark.parametrize("vocab", [list(b"abc"), ["<eos>", "a"]], ids=["bytes", "words"])
def test_what_are_no_tokens_cannot_be_decoded(tokens, vocab):
    """One sentence, whatever type torch has for it."""
    with pytest.raises(ValueError, match="^tokens "):
        decode(tokens, vocab)


# ---- found: data folders ------------------------------------------------------------------------

def zipped(data, method):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", method) as file:
        file.writestr("enwik8", data)
    return archive.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
                                    zipfile.ZIP_LZMA])
def test_a_zip_of_any_method_that_is_bent_anywhere(method, tmp_path, monkeypatch):
    """lzma has an error of its own; struct, zlib and bz2 have others."""
    good, draw = zipped(RAW, method), random.Random(0)
    for _ in range(60):
        bent = bytearray(good)
        for _ in range(draw.choice((1, 20))):
            bent[draw.randrange(len(bent))] = draw.randrange(256)
        monkeypatch.setattr(corpora, "SOURCES", {"enwik8": source("http://x", bytes(bent))})
        (tmp_path / "enwik8.zip").write_bytes(bent)
        try:
            load("enwik8", tmp_path)
            (tmp_path / "enwik8").unlink()
        except ValueError as error:
            assert type(error) is ValueError
        assert [path.name for path in tmp_path.iterdir()] == ["enwik8.zip"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["enwik8", "enwik8.zip"])
def test_a_pipe_in_the_place_of_a_corpus_does_not_hang(name, tmp_path, monkeypatch):
    """To open it would wait for ever; a folder there is refused, too."""
    entry = source("http://127.0.0.1:9/x", zipped(RAW, zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(corpora, "SOURCES", {"enwik8": entry})
    for make in (os.mkfifo, os.mkdir):
        make(tmp_path / name)
        with fuzz.bounded(), pytest.raises(ValueError, match="enwik8.zip"):
            load("enwik8", tmp_path)
        (os.rmdir if make is os.mkdir else os.unlink)(tmp_path / name)


# ---- found: command lines and checkpoints of train.py -------------------------------------------

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a text."""
    fuzz.trained()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(fuzz.NOTES)
    return tmp_path


def outcome(folder, *argv, **more):
    """What the judge says of a command line, with a tiny model on notes.txt."""
    start = [*fuzz.TINY, "--text", "notes.txt", "--out", "run", "--n-tokens", "3"]
    argv = [*(start if more.get("start", True) else ["--device", "cpu", "--out", "run"]), *argv]
    return fuzz.verdict(fuzz.Input("", lambda: fuzz.command_line(argv)), folder)


@pytest.mark.parametrize("flags, words", [
    (["--seed", str(10**30)], "--seed must be at most"),
    (["--eval-mem-len", str(2**63)], "eval-mem-len"),
    (["--eval-clamp-len", str(10**30)], "eval-clamp-len"),
    (["--batch", str(10**400), "--dry-run"], "--batch"),
    (["--temperature", "1e-300"], "temperature"),
    (["--lr=--"], "--lr"), (["--device=--"], "--device"),
    (["a\nb"], "a b"),
    (["--n-layer", "100000000"], "parameters"),
    (["--out", "\udcff"], "UTF-8"),
    (["--lr", "1e300", "--warmup", "0"], "not finite"),
], ids=lambda z: " ".join(z)[:30] if isinstance(z, list) else "")
def test_a_command_line_is_refused_in_one_line(flags, words, folder):
    """Before anything is written, if that can be known before."""
    said = outcome(folder, "--steps", "2", *flags)
    assert said[0] == "refused" and words in said[1], said


def test_a_folder_of_any_name_gets_its_curve(folder):
    """$ begins a formula in a title, digits a line of metrics.tsv; fonts lack many signs."""
    name = "$\\frac$ a\n5\tb 記憶"
    assert outcome(folder, "--steps", "2", "--out", name) == ("worked", "")
    assert (folder / name / "curve.png").exists()


NAN, WIDE = torch.tensor(math.nan), torch.zeros(2, 3)
DAMAGE = {
    "no run": lambda c: c.pop("run"), "no name": lambda c: c.pop("name"),
    "no vocab": lambda c: c.pop("vocab"), "no state": lambda c: c.pop("state"),
    "config is a list": lambda c: c.update(config=[]),
    "run is a tensor": lambda c: c.update(run=WIDE),
    "vocab is a dict": lambda c: c.update(vocab={}),
    "vocab is too short": lambda c: c["vocab"].pop(),
    "vocab holds no byte": lambda c: c["vocab"].__setitem__(0, 999),
    "vocab holds lists": lambda c: c["vocab"].__setitem__(0, []),
    "untie_r is a tensor": lambda c: c["config"].update(untie_r=WIDE),
    "too many layers": lambda c: c["config"].update(n_layer=10**9),
    "a key of run is a number": lambda c: c["run"].update({7: 7}),
    "segment is text": lambda c: c["run"].update(segment="x"),
    "step is text": lambda c: c["state"].update(step="x"),
    "weights are a number": lambda c: c.update(model=1.0),
    "a weight is not finite": lambda c: c["model"].update(u=c["model"]["u"] * NAN),
    "a weight is complex": lambda c: c["model"].update(u=c["model"]["u"] * 1j),
    "a weight is sparse": lambda c: c["model"].update(u=c["model"]["u"].to_sparse()),
    "a weight is on meta": lambda c: c["model"].update(u=c["model"]["u"].to("meta")),
}
FOR_RESUME = {
    "step is far below 0": lambda c: c["state"].update(step=-10**9),
    "column is far behind": lambda c: c["state"].update(column=10**9),
    "seconds is None": lambda c: c["state"].update(seconds=None),
    "memory is a number": lambda c: c["state"].update(memory=3),
    "memory of one layer": lambda c: c["state"]["memory"].pop(),
    "memory of two dimensions": lambda c: c["state"]["memory"].__setitem__(0, WIDE),
    "random is text": lambda c: c.update(random="x"),
    "no random state": lambda c: c.pop("random"),
    "no optimizer": lambda c: c.pop("optimizer"),
    "no second moment": lambda c: c["optimizer"]["state"][0].pop("exp_avg_sq"),
    "moments of another shape": lambda c: c["optimizer"]["state"][0].update(exp_avg=WIDE),
    "moments are a tensor": lambda c: c["optimizer"]["state"].update({0: WIDE}),
    "six steps": lambda c: c["optimizer"]["state"][0].update(step=WIDE),
    "betas are text": lambda c: c["optimizer"]["param_groups"][0].update(betas="x"),
}


@pytest.mark.parametrize("what", [*DAMAGE, *FOR_RESUME])
def test_a_checkpoint_with_other_things_inside_is_refused_whole(what, folder):
    """By --resume and --sample, in one line; nothing in the folder has changed."""
    fuzz.put_run(folder, lambda name, content: (
        None if name == "best.pt" and what in FOR_RESUME else (DAMAGE | FOR_RESUME)[what](content)))
    for flags in [["--resume"]] + [["--sample", "abba"]] * (what in DAMAGE):
        said = outcome(folder, *flags, start=False)
        assert said[0] == "refused" and re.search(r"\.pt|parameters", said[1]), (flags, said)
