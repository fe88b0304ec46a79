"""A program or a model rejects input that it cannot use in one line, and writes nothing."""
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import blank
import grade
from course.exercises import LESSONS, ROOT
from helpers import content_of, refusal
from training import checkpoint

lesson_1, lesson_5, train = map(import_module, (LESSONS[0], LESSONS[4], "train"))

NEW = "--model tiny --device cpu --text notes.txt --out new "
NO_TEXT = "--model tiny --device cpu --out new "
RESUME = "--resume --out small --device cpu "
REFUSED = {  # program: command line, words of the sentence
    "train": [
        # names
        (NO_TEXT + "--dataset enwik9", "; did you mean enwik8?"),
        (NEW + "--model wt103-lage", "did you mean wt103-large?"),
        (NEW + "--smaple=x", "did you mean --sample?"),
        ([*NEW.split(), "a\n\x1bb"], "unrecognized arguments: a  b"),
        (NEW + "--optimizer lion", "adam or muon, got 'lion'"),
        (NEW + "--device cuda", "no CUDA device"), (NEW + "--compile", "--compile needs a GPU"),
        (NEW + "--compile --plain", "not with --plain"), ("--sample a --compile", "for training"),
        (NEW + "--dataset stdlib", "give one of them"),
        # files
        (NO_TEXT + "--text project", "there is no file"),
        (NO_TEXT + "--text brief.txt", "39 bytes, but at least 40"),
        (NEW + "--out brief.txt/run", "'brief.txt/run'; use another folder with --out"),
        ([*NEW.split(), "--out", ""], "--out is empty"),
        # pretrained/ does not replace a run that is named or resumed
        *((f"{flags} --device cpu", "no checkpoint at") for flags in (
            "--eval-only --out nowhere", "--sample a --dataset stdlib", "--sample a --model laptop",
            "--resume")),
        ("--sample a --device cpu --text x/notes.txt", "runs/notes-laptop/best.pt; train first"),
        ("--resume --device cpu --out no&state", "cannot be resumed; --init 'no&state' starts"),
        ("--resume --device cpu --out no&random", "or incomplete, and cannot be resumed"),
        ("--sample a --device cpu --out no&state", "step must be of type int, got '3'"),
        ("--eval-only --device cpu --out no&vocab", "vocab_size must be at least 1, got 0"),
        ("--init no&name --device cpu", "checkpoint.pt does not fit this code: train again (KeyE"),
        *((f"--init no&{spoiled} --device cpu", words) for spoiled, words in (
            ("shape", "size mismatch"), ("n", 'not "list"'), ("v", "unhashable type: 'list'"))),
        ("--sample a --device cpu --out no&recipe", "int, got [[[[[[[...]]]]]]]"),
        *((f"--sample a --device cpu --out no&{spoiled}", "the file has fewer weights")
          for spoiled in ("model", "config")),
        # settings
        (NEW + "--steps 3 --minutes 1", "one length"),
        (NEW + "--lr 0", "must be above 0, got 0"), (NEW + "--lr inf", "must be at most"),
        (NEW + "--batch 0", "must be at least 1, got 0"), (NEW + "--batch 9999", "--batch 9999:"),
        # sizes
        (NEW + "--d-model 33 --d-head 16", "d_model must be even"),
        (NEW + "--dropout 1", "must be in [0, 1), got 1.0"),
        (NEW + "--cutoffs 5 5", "cutoffs must ascend"),
        (NEW + "--cutoffs 900", "below the vocabulary size"),
        (NEW + "--div-val 2", "so it needs cutoffs"),
        (NEW + "--div-val 0", "div_val must be at least 1"),
        (NEW + "--cutoffs 2 3 4 --div-val 4", "leaves no width"),
        ("--resume --eval-only --out small", "--resume for one that was stopped"),
        # a run from the weights of another one
        ("--init small --device cpu --out new --n-layer 3", "--n-layer is 2 there, not 3"),
        ("--sample abc --out small --text short.txt", "short.txt"),
        ("--sample abc --out small --temperature nan", "--temperature must be"),
        # other settings than those of a run, or another text (other symbols, another order)
        (RESUME + "--plain", "--plain is not set there"),
        (RESUME + "--model laptop", "--model is tiny there"),
        *((RESUME + f"--text {name}.txt", "it has changed since") for name in ("short", "turned")),
        ("--eval-only --out small --text short.txt", "; replace them, or train a new model"),
        (NEW + "--dry-run --eval-only", "--dry-run are for a new run"),
        (NO_TEXT.replace("new", "small") + "--dry-run", "small holds a run already"),
        ("--eval-only --out small --dataset enwik8", "--dataset is stdlib there")],
    "blank": [
        ("relshift", "did you mean rel_shift?"), ("qqqq", "blank.py --list shows all"),
        ("Layer.foward", "did you mean Layer.forward?"), ("", "--help"),
        ("--undo reach", "was not blanked here"), ("--undo rech", "did you mean reach?"),
        ("reach --exam", "--exam and --only go with --all"), ("--submit small", "there already"),
        ("--all .", "there already"), ("--all project/students", "inside the project"),
        ("--all short.txt", "there already"), ("--all short.txt/below", "short.txt")],
    "grade": [
        ("nowhere", "does not exist"), ("short.txt", "is a file"),
        ("none", "and 0 .py files"), (". --feedback short.txt", "not an empty folder"),
        ("project/tests", "1 .py files (grade.py); hand in one .zip per student, as blank.py "
         "--submit packs it, or name the folder of the class"),
        (". --cvs x", "--cvs"), ("", "SUBMISSIONS"), (". --feedback none", "not an empty folder"),
        (". --only lanes,raech", "did you mean reach?"),
        *((f". {flag} {name}", f"{name} is no regular file") for flag in ("--csv", "--gradescope")
          for name in ("nowhere/a.csv", "none", "/dev/null", "/dev/stdout"))],  # a device, a link
    "experiments.lab": [
        ("--rows our", "invalid choice"), ("--device cuda", "no CUDA device"),
        ("--out short.txt", "another folder with --out")],
    "experiments.speed": [("--scale large", "invalid choice")],
    "experiments.official_weights": [
        ("no.bin --model tiny", "no.bin cannot be read as a state dict")]}


@pytest.mark.parametrize("program, argv, words", [
    (program, *row) for program, rows in REFUSED.items() for row in rows],
    ids=lambda value: ascii(value)[1:-1][:60])
def test_a_command_line_is_rejected_in_one_line(
        program, argv, words, text, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in (("notes.txt", text.read_text()), ("short.txt", "x = 10000\n" * 20),
                          ("turned.txt", text.read_text()[:8] + text.read_text()[:7:-1]),
                          ("brief.txt", "x" * 39),
                          ("none/.hidden.py", ""), ("small.zip", ""), ("runs/other", ""),
                          ("project/tests/grade.py", ""),
                          ("project/02_recurrence.py", (ROOT / "02_recurrence.py").read_text())):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    content = checkpoint.load(small() / "checkpoint.pt") | {"path": ""}
    for change in ({"recipe": content["recipe"] | {"seed": [[[[[[[[0]]]]]]]]}}, {"random": None},
                   {"config": content["config"] | {"d_inner": 10**9}}, {"model": {}}, {"vocab": []},
                   {"name": [], "n": 0}, {"config": content["config"] | {"d_inner": 1}, "shape": 0},
                   {"state": {"step": "3"}}, {"vocab": [[]], "v": 0}, {"name": None}):
        new = {name: z for name, z in (content | change).items() if z is not None}
        checkpoint.save(Path(f"no&{[*change][-1]}/checkpoint.pt"), new)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "train_step", None)
    monkeypatch.setattr(lesson_1, "RUNS", tmp_path / "runs")
    monkeypatch.setattr("training.flags.ROOT", tmp_path)
    monkeypatch.setattr(blank, "ROOT", tmp_path / "project")
    monkeypatch.setattr(grade, "grade_all", None)
    before = content_of(Path())
    argv = argv.split() if isinstance(argv, str) else argv
    assert import_module(program).main(argv) == 1
    error = capsys.readouterr().err.rpartition("\r")[2]  # the text after a progress line
    lines = [line for line in error.split("\n") if line.strip()]
    assert len(lines) == 1 and words in lines[0], lines
    assert lines[0].startswith(program.removeprefix("experiments.") + ".py: ")
    assert content_of(Path()) == before


CODE = """import os, pathlib, sys, support; from support import files
assert sys.excepthook is sys.__excepthook__
print('a\\u2026', os.environ.get('MPLBACKEND'))
files.write_atomically(pathlib.Path('file'), lambda file: file.write('\\u2026'), 'x')
sys.stderr.write('b')
def main():
    raise KeyboardInterrupt
support.run_lesson(main, '')"""


@pytest.mark.parametrize("streams, wanted", [
    ("", "a? None\nbstopped\n"), (">&-", "bstopped\n"), ("2>&-", "a? None\n"),
    *((argument, "a? None\n\nIt takes no arguments.\nb") for argument in ("--help", "3"))])
def test_a_program_accepts_any_streams_locale_backend_and_ctrl_c(streams, wanted, tmp_path):
    """Streams and files are ASCII, or streams are closed; the backend of figures is missing."""
    (tmp_path / "file.part").symlink_to(tmp_path / "mine")
    result = subprocess.run(
        f'"{sys.executable}" -X utf8=0 -c "{CODE}" {streams}', shell=True, text=True, cwd=tmp_path,
        capture_output=True, env={"PYTHONPATH": str(ROOT), "MPLBACKEND": "module://nothing",
                                  "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"})
    assert (result.stdout + result.stderr, result.returncode) == (wanted, streams != "--help")
    assert content_of(tmp_path) == {tmp_path / "file": "…".encode()}  # follows no link


SMALL = lesson_5.Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)
X = torch.zeros(2, 4, dtype=torch.int64)
PAST = torch.zeros(2, 4, 8)


@pytest.mark.parametrize("given, words", [
    ({"n_layer": "4"}, "n_layer must be of type int"),
    ({"n_layer": True}, "must be of type int, got True"),
    ({"mem_len": 10**30}, f"mem_len must be at most {2**63 - 1}"),
    ({"mem_len": -1}, "mem_len must be at least 0, got -1"),
    *(({"init_std": std}, f"init_std must be above 0 and finite, got {std}")
      for std in (0.0, math.nan, math.inf)),
    ((X.tolist(),), "got list"), ((X, None, X.numpy()), "got ndarray"), ((X.double(),), "float64"),
    ((X[0],), "(4,)"), ((X[:, :0],), "(2, 0)"), ((X, None, X[:, :2]), "(2, 2)"),
    ((X.to("meta"),), "on meta"), ((X, None, X.to("meta")), "on meta"),
    ((X + 11,), "token 11 outside vocabulary of 11"), ((X, None, X - 1), "token -1 outside"),
    ((X, [PAST[0, 0], PAST]), "(8,)"), ((X, [PAST]), "list of 2"), ((X, PAST), "list of 2"),
    ((X, [PAST, PAST.tolist()]), "got list"), ((X, [PAST, PAST[:1]]), "(1, 4, 8)"),
    ((X, [PAST, PAST[:, :1]]), "(2, 1, 8)"), ((X, [PAST, PAST[..., 1:]]), "(2, 4, 7)"),
    ((X, [PAST, PAST.double()]), "got torch.float64"), ((X, [PAST, PAST.to("meta")]), "on meta")])
def test_sizes_and_tensors_that_fit_no_model_are_rejected(given, words):
    """They would fail far from the cause, or silently.  NumPy's numbers are accepted."""
    if isinstance(given, dict):
        assert words in refusal(replace, SMALL, **given)
    else:
        assert words in refusal(lesson_5.TransformerXL(SMALL), *given)
    replace(SMALL, vocab_size=np.int64(11), dropout=np.float32(0.5), cutoffs=[3])


def test_a_sample_needs_lanes_and_a_temperature_above_0(needs_shipped_solutions):
    model = lesson_5.TransformerXL(SMALL)
    assert "one shape (B, T)" in refusal(lesson_5.generate, model, X[0], 3)
    for temperature in (0.0, -1.0, math.nan):
        assert "temperature must be above 0" in refusal(
            lesson_5.sample_top_k, torch.zeros(1, 5), 2, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("command, status, words", [
    ("04_rel_shift.py --help", 0, "Lesson 4. The relative shift"),
    ("tests/test_04_rel_shift.py", 1, "python does not run tests: use pytest tests/")])
def test_files_that_take_no_arguments_say_how_to_use_them(command, status, words):
    found, out = subprocess.getstatusoutput(f'cd "{ROOT}" && "{sys.executable}" {command}')
    assert found == status and words in out
