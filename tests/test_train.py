"""train.py as its users run it: train, stop, go on, evaluate, sample, and every mistake.

    pytest tests/test_train.py
"""
import copy
import dataclasses
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import crash_test
from crash_test import differences, runs_differ
from helpers import exit_status, wait_until
from support import (
    checkpoint, command_line, corpora, distributed, estimate, folder, hardware, log)

train, lesson_5 = import_module("train"), import_module("05_full_model")
CONFIGS, Config = lesson_5.CONFIGS, lesson_5.Config
ROOT = Path(train.__file__).parent
TINY = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--segment", "8", "--mem-len",
        "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "3",
        "--n-tokens", "20"]


# ---- helpers ------------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def no_curve(monkeypatch, request):
    """Drawing takes longer than all else in these runs; only one test looks at it."""
    if "curve" not in request.node.name:
        monkeypatch.setattr(log, "draw", lambda *arguments: None)


@pytest.fixture
def text(tmp_path):
    """A file of pseudo-random words, the same in every test: 2,000 bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=draw.randint(1, 6))) for _ in range(900)]
    path = tmp_path / "notes.txt"
    path.write_text(" ".join(words)[:2000])
    return path


def run(text, out, *flags):
    return train.main([*TINY, "--text", str(text), "--out", str(out), *flags])


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def failure(capsys, status):
    """What a mistake must look like: status 1 and exactly one line on stderr."""
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert status == 1 and len(error) == 1 and error[0].startswith("train.py: "), error
    return error[0]


def same(a, b):
    """Equal to the bit, all the way down; seconds excepted."""
    assert not differences(a, b)


def same_runs(one, two):
    """Two folders hold the same run: checkpoints and metrics, time columns excepted."""
    assert not runs_differ(one, two)


def make_state(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    config = lesson_5.Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6,
                             dropout=dropout)
    model = lesson_5.TransformerXL(config)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


PRESETS = {train.Run: train.RUNS_OF, Config: CONFIGS}
SETTINGS = train.Run(steps=10, dtype="float32", eval_segment=5, eval_mem_len=7)


# ---- a whole run --------------------------------------------------------------------------------

def test_a_run_leaves_a_figure_a_curve_and_a_checkpoint(text, tmp_path, capsys):
    """The last line is the test figure with its evaluation lengths; the folder holds four files."""
    out = tmp_path / "run"
    assert run(text, out, "--steps", "12", "--eval-every", "6") == 0
    figure = last_line(capsys)
    assert figure.startswith("test ") and " bpc (evaluation T 16, M 16, clamp none; 99 " in figure
    assert sorted(p.name for p in out.iterdir()) == [
        "best.pt", "checkpoint.pt", "curve.png", "lock", "metrics.tsv", "previous.pt"]
    lines = [line for line in (out / "metrics.tsv").read_text().splitlines() if line[0].isdigit()]
    assert [line.split("\t")[0] for line in lines] == ["3", "6", "6", "9", "12", "12"]
    head = (out / "metrics.tsv").read_text()
    assert "commit" in head and f"torch {torch.__version__}" in head and "parameters" in head


def test_eval_only_and_sample_need_no_flags_but_the_folder(text, tmp_path, capsys):
    """A checkpoint holds all that evaluating and sampling need, and repeats the run's figure."""
    out = tmp_path / "run"
    run(text, out, "--steps", "12", "--eval-every", "6")
    figure = last_line(capsys)
    assert train.main(["--eval-only", "--out", str(out), "--device", "cpu"]) == 0
    assert last_line(capsys) == figure
    flags = ["--out", str(out), "--device", "cpu"]
    assert train.main(["--eval-only", "--eval-mem-len", "3", "--eval-clamp-len", "2", *flags]) == 0
    assert "M 3, clamp 2;" in last_line(capsys)
    samples = []
    for _ in range(2):
        assert train.main(["--sample", "abc", "--n-tokens", "9", "--top-k", "3", *flags]) == 0
        samples.append(last_line(capsys))
    assert samples[0] == samples[1] and samples[0].startswith("abc") and len(samples[0]) == 12


@pytest.mark.slow
def test_the_command_itself(text, tmp_path, process_of_its_own):
    """`python train.py` in a process of its own: status 0, and the figure last."""
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "--text", str(text), "--out",
               str(tmp_path / "run"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("test ")


# ---- stop and go on -----------------------------------------------------------------------------

def stop_at(monkeypatch, step, where="train_step"):
    """Send this process a Ctrl-C in the middle of the step-th call of train.train_step."""
    real, calls = getattr(train, where), [0]

    def wrapped(*arguments, **options):
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(train, where, wrapped)


def crash_at(monkeypatch, step):
    """Let the step-th call of train.train_step fail, as if the process had been killed there."""
    real, calls = train.train_step, [0]

    def crash(*arguments):
        calls[0] += 1
        if calls[0] == step:
            raise RuntimeError("the machine is gone")
        return real(*arguments)

    monkeypatch.setattr(train, "train_step", crash)


# 1,800 training bytes in 4 lanes of 449 inputs: 57 segments of 8, the last one of 1
@pytest.mark.parametrize("where, step", [
    ("train_step", 1), ("train_step", 4), ("train_step", 6), ("evaluate", 1), ("evaluate", 2)])
@pytest.mark.parametrize("length", [("--steps", "14"), ("--tokens", "440")], ids=lambda z: z[0])
def test_resumed_equals_uninterrupted_to_the_bit(text, tmp_path, capsys, monkeypatch, where, step,
                                                 length):
    """Parameters, optimizer, schedule, random state, stream position, memory, metrics, figure."""
    flags = (*length, "--eval-every", "6", "--dropout", "0.2")
    run(text, tmp_path / "whole", *flags)
    figure = last_line(capsys)
    with monkeypatch.context() as patch:
        stop_at(patch, step, where)
        assert run(text, tmp_path / "broken", *flags) == 130
    assert "go on with" in capsys.readouterr().out
    assert train.main(["--resume", "--out", str(tmp_path / "broken"), "--device", "cpu"]) == 0
    assert last_line(capsys) == figure
    same_runs(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("step", [56, 57, 58])
def test_resume_around_the_end_of_the_text(text, tmp_path, monkeypatch, step):
    """Where the text begins again the memory is empty, and a resumed run knows it, too."""
    flags = ("--steps", "60", "--eval-every", "30")
    run(text, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        assert run(text, tmp_path / "broken", *flags) == 130
    state = torch.load(tmp_path / "broken" / "checkpoint.pt", weights_only=True)["state"]
    assert (state["memory"] is None) == (step == 57)
    assert state["column"] == {56: 448, 57: 0, 58: 8}[step]
    train.main(["--resume", "--out", str(tmp_path / "broken"), "--device", "cpu"])
    same_runs(tmp_path / "whole", tmp_path / "broken")


def test_a_crash_after_a_validation_repeats_nothing(text, tmp_path, monkeypatch):
    """Lines of metrics.tsv behind the checkpoint are cut, and no validation is done twice."""
    flags = ("--steps", "14", "--eval-every", "6")
    run(text, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        crash_at(patch, 11)
        with pytest.raises(RuntimeError):
            run(text, tmp_path / "broken", *flags)
    assert "\n9\t" in (tmp_path / "broken" / "metrics.tsv").read_text()
    train.main(["--resume", "--out", str(tmp_path / "broken"), "--device", "cpu"])
    same_runs(tmp_path / "whole", tmp_path / "broken")


def test_the_best_model_is_tested_on_the_test_split(text, tmp_path, monkeypatch):
    """Validation on the valid split, best.pt kept while it gets worse, and best.pt tested."""
    corpus, seen, out = corpora.load(text), [], tmp_path / "run"
    losses = iter([2.0, 1.0, 3.0, 9.0])

    def evaluate(model, tokens, *rest):
        seen.append((tokens, copy.deepcopy(model.model.state_dict())))  # of the Reader
        return next(losses)

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert run(text, out, "--steps", "9", "--eval-every", "3", "--eval-tokens", "50") == 0
    assert [tokens.tolist() for tokens, _ in seen] == (
        [corpus.valid[:51].tolist()] * 3 + [corpus.test.tolist()])
    best = torch.load(out / "best.pt", weights_only=True)
    last = torch.load(out / "checkpoint.pt", weights_only=True)
    assert (best["state"]["step"], last["state"]["step"], last["state"]["best"]) == (6, 9, 1.0)
    same(best["model"], seen[1][1])
    same(best["model"], seen[3][1])
    assert not best["model"]["u"].equal(last["model"]["u"])


def test_metrics_are_means_since_the_last_line(text, tmp_path, monkeypatch):
    """In bits per character, over the steps that were counted."""
    losses = iter([1.0, 2.0, 6.0, 4.0, math.nan, 6.0])
    monkeypatch.setattr(train, "train_step", lambda *arguments: (next(losses), 1.0, arguments[4]))
    run(text, tmp_path / "run", "--steps", "6", "--eval-every", "6")
    rows = [line.split("\t") for line in (tmp_path / "run" / "metrics.tsv").read_text().splitlines()
            if line[0].isdigit()]
    assert [float(row[5]) for row in rows if row[5]] == pytest.approx(
        [3 / math.log(2), 5 / math.log(2)], abs=1e-3)


def test_a_run_is_saved_between_validations(text, tmp_path, monkeypatch, capsys):
    """Every --save-minutes, however far the next validation is: a kill costs no more, and the run
    goes on from there to the bit.
    """
    flags = ("--steps", "14", "--eval-every", "100", "--save-minutes", "1e-9", "--dropout", "0.2")
    run(text, tmp_path / "whole", *flags)
    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        crash_at(patch, 9)
        with pytest.raises(RuntimeError):
            run(text, out, *flags)
    assert checkpoint.load(out / "checkpoint.pt")["state"]["step"] == 8
    assert checkpoint.load(out / "previous.pt")["state"]["step"] == 7
    assert train.main(["--resume", "--out", str(out), "--device", "cpu"]) == 0
    assert "going on from step 8" in capsys.readouterr().out
    same_runs(tmp_path / "whole", out)


def test_between_validations_a_run_is_saved_by_the_minutes_of_training(text, tmp_path, monkeypatch):
    """At least every ten, unless --save-minutes says otherwise; a validation begins them anew."""
    saved, real = [], folder.Folder.save

    def save(self, model, optimizer, state):
        saved.append(state.step)
        real(self, model, optimizer, state)

    def count(self, x, loss, norm, seconds):
        counted(self, x, loss, norm, 60 * 2.4)

    counted = checkpoint.State.count
    monkeypatch.setattr(folder.Folder, "save", save)
    monkeypatch.setattr(checkpoint.State, "count", count)
    run(text, tmp_path / "a", "--steps", "14", "--eval-every", "7")
    assert saved == [5, 7, 12, 14]  # a step takes 2.4 minutes
    saved.clear()
    run(text, tmp_path / "b", "--steps", "14", "--eval-every", "100", "--save-minutes", "24")
    assert saved == [11, 14]


def test_a_damaged_checkpoint_costs_nothing_but_time(text, tmp_path, capsys, step=9):
    """The one before is used, it says so, the damaged one is kept, and the end is the same."""
    flags = ("--steps", "14", "--eval-every", "3")
    run(text, tmp_path / "whole", *flags)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        assert run(text, tmp_path / "broken", *flags) == 130
    path = tmp_path / "broken" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-30])
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(path.parent), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "checkpoint.pt is damaged" in said and "damaged.pt" in said
    assert f"going on from step {step - 3}" in said
    same_runs(tmp_path / "whole", tmp_path / "broken")
    assert (path.parent / "damaged.pt").exists()


def test_a_kill_between_a_line_of_metrics_and_its_checkpoint_doubles_nothing(text, tmp_path,
                                                                            monkeypatch):
    """Stopped in a validation, gone on, and killed when its line is written, but not yet saved."""
    flags = ("--steps", "14", "--eval-every", "6")
    run(text, tmp_path / "whole", *flags)
    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, "evaluate")
        assert run(text, out, *flags) == 130

    def killed(*arguments):
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "save", killed)
        with pytest.raises(RuntimeError, match="gone"):
            train.main(["--resume", "--out", str(out), "--device", "cpu"])
    lines = [row["step"] for row in log.read_metrics(out / "metrics.tsv")]
    assert lines == ["3", "6", "6"], "the line of the validation is there already"
    assert train.main(["--resume", "--out", str(out), "--device", "cpu"]) == 0
    same_runs(tmp_path / "whole", out)


def test_what_a_killed_save_leaves_is_swept_away(text, tmp_path):
    """Half a file beside, and the newest checkpoint moved already: the run goes on."""
    flags, out = ("--steps", "14", "--eval-every", "3"), tmp_path / "broken"
    run(text, tmp_path / "whole", *flags)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 9)
        assert run(text, out, *flags) == 130
    (out / "checkpoint.pt").rename(out / "previous.pt")
    (out / "checkpoint.part").write_bytes(b"half")
    (out / "older.part").write_bytes(b"half")
    assert train.main(["--resume", "--out", str(out), "--device", "cpu"]) == 0
    same_runs(tmp_path / "whole", out)
    assert not list(out.glob("*.part"))


@pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=["new", "resume"])
def test_two_runs_in_one_folder(text, tmp_path, capsys, flags):
    """The second is refused with a sentence, and changes nothing; --eval-only is allowed."""
    out = tmp_path / "run"
    run(text, out, "--steps", "3")
    if not flags:
        (out / "checkpoint.pt").unlink()
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    with checkpoint.Lock(out) as lock:
        assert f"process {os.getpid()}," in lock.take()
        assert "belongs to a run that is going on" in failure(
            capsys, run(text, out, "--steps", "3", *flags))
        assert left == {path.name: path.read_bytes() for path in out.iterdir()}
        assert train.main(["--eval-only", "--out", str(out), "--device", "cpu"]) == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills_in_short(tmp_path, process_of_its_own):
    """experiments/crash_test.py with a few kills, half of them in a save: nothing is different."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "crash_test.py"), "--kills", "8", "--steps",
         "40"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 kills, " in done.stdout and ", 0 differences" in done.stdout


def test_the_crash_test_sees_a_difference(text, tmp_path):
    """Another weight, another line, another type."""
    run(text, tmp_path / "a", "--steps", "9")
    assert runs_differ(tmp_path / "a", tmp_path / "a") == []
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    content = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)
    content["model"]["u"][0, 0, 0] += 1e-6
    content["state"]["tokens"] = float(content["state"]["tokens"])
    torch.save(content, tmp_path / "b" / "checkpoint.pt")
    with open(tmp_path / "b" / "metrics.tsv", "a") as file:
        file.write("9\t1\n")
    assert runs_differ(tmp_path / "a", tmp_path / "b") == [
        "checkpoint.pt/model/u", "checkpoint.pt/state/tokens", "metrics.tsv"]
    assert differences([torch.ones(2)], [torch.ones(2).double()]) == ["/0"]
    assert differences({"a": 1}, {"b": 1}) == [""] and differences([1], [1, 2]) == [""]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_preemption_notice_ends_a_run_in_good_order(text, tmp_path, process_of_its_own):
    """SIGTERM: status 143, and the checkpoint is of that step."""
    out, log = tmp_path / "run", tmp_path / "log"
    child = crash_test.start([*TINY, "--text", str(text), "--out", str(out), "--steps", "100000"],
                             log)
    try:
        wait_until(lambda: (out / "metrics.tsv").exists()
                   and "\n9\t" in (out / "metrics.tsv").read_text(), "step 9")
    finally:
        os.kill(child, signal.SIGTERM)
        status = exit_status(child)
    assert status == 143, log.read_text()
    step = checkpoint.load(out / "checkpoint.pt")["state"]["step"]
    assert step >= 9 and f"stopped after step {step}, saved" in log.read_text()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a child process")
def test_ctrl_c_saves_and_says_how_to_go_on(text, tmp_path, process_of_its_own):
    """A real Ctrl-C in a real process: status 130, a checkpoint, the command to go on with."""
    out = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "--text", str(text), "--out",
               str(out), "--steps", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        for _ in range(600):
            time.sleep(0.1)
            if (out / "metrics.tsv").exists() and "\n9\t" in (out / "metrics.tsv").read_text():
                break
        child.send_signal(signal.SIGINT)
        printed, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert f"python train.py --resume --out {out}" in printed
    assert torch.load(out / "checkpoint.pt", weights_only=True)["state"]["step"] >= 9
    assert not list(out.glob("*.part"))


def test_the_last_save_is_still_guarded(text, tmp_path, monkeypatch):
    """A second signal, which clusters send, must not find the handlers given back."""
    handlers, real = [], folder.save

    def save(*arguments):
        handlers.append(signal.getsignal(signal.SIGTERM).__name__)
        real(*arguments)

    monkeypatch.setattr(folder, "save", save)
    stop_at(monkeypatch, 3)
    assert run(text, tmp_path / "run", "--steps", "9") == 130
    assert handlers == ["handle"]


def test_trials_see_the_micro_batch(text, tmp_path, monkeypatch):
    """The run that needs it would not fit into memory otherwise, and another shape is compiled."""
    seen = []
    monkeypatch.setattr(hardware, "choose_dtype", lambda step, model, run, x, y: (
        seen.append(x.shape), "float32")[1])
    monkeypatch.setattr(hardware, "compiled", lambda model, context, x, y: (
        seen.append(y.shape), model)[1])
    flags = ["--dtype", "auto", "--micro-batch", "3", "--compile", "--steps", "2"]
    assert run(text, tmp_path / "run", *flags) == 0
    assert seen == [(3, 8), (3, 8)]


def test_plain_belongs_to_the_run(text, tmp_path, capsys):
    """Dropout draws otherwise in the other form: --resume keeps the form, and refuses another."""
    run(text, tmp_path / "a", "--steps", "9", "--dropout", "0.2", "--plain")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        run(text, tmp_path / "b", "--steps", "9", "--dropout", "0.2", "--plain")
    assert train.main(["--resume", "--out", str(tmp_path / "b"), "--device", "cpu"]) == 0
    same_runs(tmp_path / "a", tmp_path / "b")
    run(text, tmp_path / "c", "--steps", "3")
    capsys.readouterr()
    given = ["--plain", "--out", str(tmp_path / "c"), "--device", "cpu"]
    assert "--plain is not set there" in failure(capsys, train.main(["--resume", *given]))
    assert train.main(["--eval-only", *given]) == 0


def test_a_batch_that_cannot_be_dealt_out_is_refused_first(text, tmp_path, monkeypatch, capsys):
    """Before hours of download."""
    monkeypatch.setattr(distributed, "COUNT", 3)
    monkeypatch.setattr(distributed, "first", lambda value: value)
    monkeypatch.setattr(distributed, "join", lambda device: None)
    said = failure(capsys, run(tmp_path / "nowhere", tmp_path / "run", "--batch", "4"))
    assert "--batch 4: so many lanes cannot be dealt out evenly to 3 ranks" in said


def test_plain_trains_the_file_as_it_is_read(text, tmp_path, capsys):
    """--plain: no line of support/fast.py, and to rounding the same losses and figure."""
    figures = []
    for flags in ([], ["--plain"]):
        out = tmp_path / str(len(flags))
        with pytest.MonkeyPatch.context() as patch:
            if flags:
                patch.setattr(train.fast, "prepare", None)
                patch.setattr(train.fast, "Reader", None)
            assert run(text, out, "--steps", "12", "--eval-every", "6", *flags) == 0
        rows = log.read_metrics(out / "metrics.tsv")
        figures.append([float(row["train"] or row["valid"]) for row in rows])
        figures[-1].append(float(last_line(capsys).split()[1]))
    assert figures[0] == pytest.approx(figures[1], abs=2e-4)


def test_every_field_is_a_flag_with_its_comment_as_help(capsys):
    """Of Run, of Config but for what the corpus decides, and of Command; --help shows each."""
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for kind in (train.Run, Config, command_line.Command):
        texts = command_line.comments(kind)
        for field in dataclasses.fields(kind):
            if field.name not in command_line.NO_FLAGS:
                assert f"--{field.name.replace('_', '-')} " in said
                assert " ".join(texts[field.name].split()) in said.replace("- ", "-"), field.name


# ---- the parts ----------------------------------------------------------------------------------

def test_evaluation_counts_every_token_once():
    """n - 1 predictions for n tokens, a sum over tokens with the uneven last segment, any cut."""
    model, _ = make_state()
    model.double().train()
    config, tokens = model.config, torch.randint(11, (24,), dtype=torch.uint8)
    values = [train.evaluate(model, tokens, replace(SETTINGS, eval_segment=T))
              for T in (1, 5, 8, 50)]
    assert model.training and model.config == config, "evaluation leaves the model as it was"
    model.eval()
    model.config = replace(config, mem_len=7, same_length=True)
    total, memory = 0.0, None
    for t in range(23):
        x, y = tokens[None, t : t + 1].long(), tokens[None, t + 1 : t + 2].long()
        loss, memory = model(x, memory, y)
        total += loss.item()
    assert values == pytest.approx([total / 23] * 4, abs=1e-12)


def test_a_model_that_copies_its_input_has_a_known_loss(monkeypatch):
    """Targets are the next tokens: shifted exactly once, neither twice nor not at all."""
    class Copy(torch.nn.Module):
        """Predicts x + 1 with certainty: right everywhere on a stream that counts."""
        def __init__(self):
            super().__init__()
            self.u, self.config = torch.nn.Parameter(torch.zeros(1)), make_state()[0].config

        def forward(self, x, memory, y):
            logits = 50.0 * torch.nn.functional.one_hot((x + 1) % 11, 11).float()
            return import_module("01_vanilla_segments").token_losses(logits, y), memory

    counting = torch.arange(24) % 11
    assert train.evaluate(Copy(), counting, SETTINGS) < 1e-6
    assert train.evaluate(Copy(), counting * 0, SETTINGS) > 49


def test_the_learning_rate_warms_up_and_ends_at_zero():
    """Linear over the warm-up, half at the middle of the cosine, 0 at the end."""
    settings = replace(SETTINGS, lr=2.0, warmup=4)
    assert [train.learning_rate(settings, step, 0.0) for step in range(5)] == [0.5, 1, 1.5, 2, 2]
    assert train.learning_rate(settings, 9, 0.5) == pytest.approx(1.0)
    assert train.learning_rate(settings, 9, 0.25) == pytest.approx(1 + math.sqrt(0.5))
    assert train.learning_rate(settings, 9, 1.0) == 0
    assert train.learning_rate(replace(settings, warmup=0), 0, 0.0) == 2.0


def test_a_run_knows_its_length_in_steps_tokens_or_minutes():
    """The schedule follows whichever length was given."""
    def done(step, read, seconds, **length):
        state = checkpoint.State(step=step, tokens=read, seconds=float(seconds))
        return train.fraction_done(replace(SETTINGS, **{"steps": 0} | length), state)

    assert done(2, 99, 99, steps=8) == 0.25
    assert done(2, 50, 99, tokens=200) == 0.25
    assert done(2, 50, 30, minutes=2.0) == 0.25
    assert done(2, 50, 999, minutes=2.0) == 1


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5])
def test_micro_batches_add_up_to_the_batch(micro_batch):
    """Loss, gradient norm, updated weights and memory are those of all lanes at once."""
    x, y = torch.randint(11, (2, 5, 4))
    results = []
    for size in (0, micro_batch):
        (model, optimizer), memory = make_state(), None
        model.double()
        for _ in range(3):
            learner = distributed.Learner(model, size)
            loss, norm, memory = train.train_step(learner, optimizer, x, y, memory, SETTINGS)
        results.append([torch.tensor([loss, norm]).double(), *model.state_dict().values(), *memory])
    for whole, parts in zip(*results):
        assert (whole - parts).abs().max() < 1e-9


def test_the_gradient_is_clipped_to_a_norm():
    """However steep the loss, one step of plain descent moves the weights by rate times clip."""
    model, _ = make_state()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    x, y = torch.randint(11, (2, 3, 4))
    norm = train.train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), x, y, None,
                            replace(SETTINGS, clip=0.01))[1]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert norm > 0.01, "the norm that is reported is that before clipping"
    assert (after - before).norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_the_memory_goes_into_the_next_step():
    """A step with a memory has another loss than one without."""
    x, y = torch.randint(11, (2, 3, 4))
    model, optimizer = make_state()
    memory = train.train_step(model, optimizer, x, y, None, SETTINGS)[2]
    assert [rows.shape for rows in memory] == [(3, 4, 8)] * 2 and not memory[0].requires_grad
    losses = [train.train_step(copy.deepcopy(model), optimizer, x, y, past, SETTINGS)[0]
              for past in (None, memory)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_bad_step_changes_neither_weights_nor_memory(poison):
    """Not finite: no update, no new memory, no trace in the optimizer."""
    x, y = torch.randint(11, (2, 3, 4))
    model, optimizer = make_state()
    memory = train.train_step(model, optimizer, x, y, None, SETTINGS)[2]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if poison == "loss":
        hook = model.dropout_final.register_forward_hook(lambda m, args, out: out * math.nan)
    else:
        hook = model.u.register_hook(lambda gradient: gradient * math.inf)
    loss, norm, kept = train.train_step(model, optimizer, x, y, memory, SETTINGS)
    hook.remove()
    assert not math.isfinite(loss + norm) and kept is memory
    same(before[0], model.state_dict())
    same(before[1], optimizer.state_dict())


def test_ten_bad_steps_in_a_row_stop_the_run(text, tmp_path, monkeypatch, capsys):
    """One sentence, status 1, and the last good checkpoint as it was."""
    real, calls, out = train.train_step, [0], tmp_path / "run"

    def step(model, optimizer, x, y, memory, settings):
        calls[0] += 1
        if calls[0] in (2, 3) or calls[0] > 6:
            return math.nan, 1.0, memory
        return real(model, optimizer, x, y, memory, settings)

    monkeypatch.setattr(train, "train_step", step)
    status = run(text, out, "--steps", "60", "--eval-every", "6")
    assert "ten steps in a row, up to step 16" in failure(capsys, status)
    state = torch.load(out / "checkpoint.pt", weights_only=True)["state"]
    assert (state["step"], state["skipped"]) == (12, 8) and calls[0] == 16


def test_a_spike_is_in_the_log(text, tmp_path, monkeypatch, capsys):
    """The largest loss since the last line has a column of its own; twice the mean is said."""
    losses = iter([1.0] * 12 + [2.5] + [1.0] * 27)
    monkeypatch.setattr(train, "train_step", lambda *arguments: (next(losses), 1.0, arguments[4]))
    run(text, tmp_path / "run", "--steps", "40", "--log-every", "20")
    said = capsys.readouterr().out
    assert said.count("a spike") == 1
    assert f"step 13 | loss {2.5 / math.log(2):.3f} bpc: a spike" in said
    row, later, _ = log.read_metrics(tmp_path / "run" / "metrics.tsv")
    assert float(later["train_max"]) == float(later["train"]) < 1.5
    assert float(row["train_max"]) == pytest.approx(2.5 / math.log(2), abs=1e-3)
    assert float(row["train"]) < 1.6 and row["skipped"] == "0"


def test_out_of_memory_is_a_sentence_with_what_would_fit(text, tmp_path, monkeypatch, capsys):
    """A smaller micro-batch, with which the run goes on; and the general case."""
    flags = ("--steps", "14", "--eval-every", "3")
    run(text, tmp_path / "whole", *flags)
    real, calls = train.train_step, [0]

    def step(model, optimizer, x, y, memory, settings):
        calls[0] += 1
        if calls[0] > 5 and model.size != 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, optimizer, x, y, memory, settings)

    monkeypatch.setattr(train, "train_step", step)
    out = tmp_path / "run"
    said = failure(capsys, run(text, out, *flags))
    assert "out of memory with 4 lanes at a time" in said and "--micro-batch 2 needs about" in said
    assert train.main(["--resume", "--micro-batch", "2", "--out", str(out), "--device", "cpu"]) == 0
    a, b = (checkpoint.load(where / "checkpoint.pt")["model"]
            for where in (tmp_path / "whole", out))
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-4
    monkeypatch.setattr(train, "train_step", real)

    def evaluate(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert "out of memory: a smaller model" in failure(capsys, run(text, tmp_path / "b", *flags))


def test_choosing_the_number_type_draws_nothing(capsys):
    """The trial steps leave weights and random state alone."""
    model, _ = make_state(dropout=0.3)
    x, y, settings = *torch.randint(11, (2, 3, 4)), replace(SETTINGS, dtype="auto")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert hardware.choose_dtype(train.train_step, model, settings, x, y) in ("float32", "bf16")
    assert torch.get_rng_state().equal(state)
    same(before, model.state_dict())


# ---- checkpoints --------------------------------------------------------------------------------

def full_disk(content, file):
    file.write(b"half a checkpoint")
    raise OSError(28, "No space left on device")


def no_rename(source, target):
    raise OSError(30, "Read-only file system")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """Written beside and renamed: a full disk costs the new checkpoint, never the old one."""
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"a": 1})
    for target, name, broken in ((torch, "save", full_disk), (os, "replace", no_rename)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, broken)
            with pytest.raises(OSError, match="could not write"):
                checkpoint.save(path, {"a": 2})
        assert torch.load(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(text, tmp_path, monkeypatch, capsys):
    """The operating system's own refusal, in the middle of a run."""
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: real(
        "/dev/full" if str(path).endswith(".part") else path, *a, **k))
    status = run(text, tmp_path / "run", "--steps", "6")
    assert "could not write" in failure(capsys, status)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]


class Evil:
    """A pickle that runs a command when it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_what_is_no_checkpoint_of_ours_is_refused(text, tmp_path, monkeypatch, capsys):
    """Missing, cut off, garbage, code, another dict, other weights: one sentence each."""
    out, other = tmp_path / "run", tmp_path / "other"
    run(text, out, "--steps", "3")
    (out / "best.pt").unlink()
    path = out / "checkpoint.pt"
    good = path.read_bytes()
    content = torch.load(path, weights_only=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    def refused(flags=("--eval-only",)):
        return failure(capsys, train.main([*flags, "--out", str(out), "--device", "cpu"]))

    for size in (0, 10, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert "damaged or no checkpoint" in refused()
        assert "damaged or no checkpoint" in refused(["--resume"])
    path.write_bytes(pickle.dumps(Evil()))
    assert "no checkpoint" in refused() and not Path("evil").exists()
    torch.save({"weights": 1}, path)
    assert "no checkpoint of train.py" in refused()
    content["config"]["d_inner"] = 65
    torch.save(content, path)
    assert "another model" in refused()
    path.unlink()
    assert "no checkpoint at" in refused() and not other.exists()


def test_a_run_is_not_overwritten_and_not_changed(text, tmp_path, capsys):
    """A folder that holds a run is refused; so is --resume with other settings or another text."""
    out = tmp_path / "run"
    run(text, out, "--steps", "3")
    before = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert "holds a run already" in failure(capsys, run(text, out, "--steps", "3"))
    assert "--lr is" in failure(capsys, train.main(
        ["--resume", "--lr", "0.5", "--out", str(out), "--device", "cpu"]))
    assert "--model is tiny there, not laptop" in failure(capsys, train.main(
        ["--resume", "--model", "laptop", "--out", str(out), "--device", "cpu"]))
    written = text.read_text()
    for other in ("x" * 2000, written + written[:9], written[:-9], written[::-1]):
        text.write_text(other)  # other symbols; or the same, but not at the same places
        for flag in ("--resume", "--eval-only"):
            assert "it has changed since" in failure(capsys, train.main(
                [flag, "--out", str(out), "--device", "cpu"]))
    assert (out / "checkpoint.pt").read_bytes() == before


def test_a_best_model_without_its_run_is_kept(text, tmp_path):
    """Somebody has deleted the large checkpoints: a new run there puts what is left aside."""
    out = tmp_path / "run"
    run(text, out, "--steps", "3", "--eval-every", "1")
    left = {name: (out / name).read_bytes() for name in ("best.pt", "metrics.tsv")}
    (out / "checkpoint.pt").unlink(), (out / "previous.pt").unlink()
    assert run(text, out, "--steps", "3", "--seed", "1") == 0
    assert left == {name: (out / f"old-{name}").read_bytes() for name in left}
    assert (out / "best.pt").read_bytes() != left["best.pt"]


# ---- bad input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--dataset", "enwik9"], "enwik8"),
    (["--model", "enormous"], "unknown model 'enormous', known are tiny"),
    (["--speed", "9"], "--speed"),
    (["--text", "nowhere.txt"], "nowhere.txt"),
    (["--text", "."], ""),
    (["--text", "empty.txt"], "0 bytes, but at least 40"),
    (["--text", "short.txt"], "9 bytes, but at least 40"),
    (["--mem-len", "-1"], "mem_len must be at least 0, got -1"),
    (["--segment", "0"], "--segment must be at least 1, got 0"),
    (["--batch", "0"], "--batch must be at least 1"),
    (["--n-head", "3"], "3 heads do not divide the model width 32"),
    (["--batch", "1800"], "1800"),
    (["--steps", "3", "--minutes", "1"], "one length"),
    (["--steps", "0"], "one length"),
    (["--lr", "nan"], "--lr"),
    (["--lr", "fast"], "--lr"),
    (["--dropout", "1"], "dropout must be in"),
    (["--dataset", "stdlib", "--text", "notes.txt"], "give one of them"),
    (["--sample", ""], "no checkpoint"),
    (["--eval-only"], "no checkpoint"),
    (["--resume"], "no checkpoint"),
], ids=lambda z: " ".join(z) if isinstance(z, list) else "")
def test_bad_input_is_one_line_and_leaves_nothing(flags, words, text, tmp_path, monkeypatch,
                                                  capsys):
    """What, where, what to do; status 1; no folder made."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    source = [] if {"--text", "--dataset"} & set(flags) else ["--text", "notes.txt"]
    model = [] if "--model" in flags else ["--model", "tiny"]
    status = train.main([*model, *source, "--out", "run", "--device", "cpu", *flags])
    assert words in failure(capsys, status)
    assert not Path("run").exists()


def test_a_run_is_evaluated_as_it_was_trained(text, tmp_path, capsys):
    """Another text or number type beside --eval-only would be passed over without a word."""
    out = tmp_path / "run"
    run(text, out, "--steps", "3")
    (tmp_path / "other.txt").write_text(text.read_text())
    given = ["--out", str(out), "--device", "cpu", "--eval-only"]
    capsys.readouterr()
    for flags, words in ((["--text", str(tmp_path / "other.txt")], "--text is "),
                         (["--dataset", "enwik8"], "--dataset is stdlib there, not enwik8"),
                         (["--dtype", "bf16"], "--dtype is float32 there, not bf16")):
        assert words in failure(capsys, train.main([*given, *flags]))
    assert train.main([*given, "--text", str(text), "--eval-mem-len", "3", "--seed", "4"]) == 0


@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--n-tokens", "-3"], ["--top-k", "99"]],
                         ids=lambda z: z[0])
def test_sampling_flags_are_refused_before_training(flags, text, tmp_path, capsys):
    """Not after days of it."""
    assert flags[1] in failure(capsys, run(text, tmp_path / "run", "--steps", "3", *flags))
    assert not (tmp_path / "run").exists()


def test_a_validation_that_is_not_a_number_does_not_become_the_record(text, tmp_path, monkeypatch):
    """Losses 1.7, NaN, 1.9, 1.8: the best stays 1.7."""
    losses = iter([1.7, math.nan, 1.9, 1.8])
    original = train.evaluate

    def scripted(model, tokens, settings, label="evaluating"):
        if label == "validating":
            return next(losses)
        return original(model, tokens, settings, label)

    monkeypatch.setattr(train, "evaluate", scripted)
    assert run(text, tmp_path / "run", "--steps", "12", "--eval-every", "3") == 0
    best, last = (torch.load(tmp_path / "run" / name, weights_only=True)["state"]
                  for name in ("best.pt", "checkpoint.pt"))
    assert (best["step"], last["best"]) == (3, 1.7)


def test_a_loss_too_large_for_exp_is_an_infinite_perplexity():
    """A model that diverges must not end in an OverflowError."""
    assert log.in_unit(800.0, "ppl") == math.inf
    assert log.in_unit(2.0, "ppl") == pytest.approx(math.exp(2))


def test_bad_prompts_and_top_k(text, tmp_path, capsys):
    """Empty, with characters the corpus lacks, or with more candidates than there are symbols."""
    out = tmp_path / "run"
    run(text, out, "--steps", "3")
    capsys.readouterr()
    for flags, words in ((["--sample", ""], "empty"), (["--sample", "abZ"], "'Z'"),
                         (["--sample", "a", "--top-k", "7"], "7"),
                         (["--sample", "a", "--temperature", "0"], "temperature")):
        assert words in failure(capsys, train.main([*flags, "--out", str(out), "--device", "cpu"]))


def test_a_folder_that_cannot_be_made_is_one_sentence(text, tmp_path, capsys):
    """--out below a file; nothing is lost but the time to read the message."""
    (tmp_path / "file").write_text("kept")
    failure(capsys, run(text, tmp_path / "file" / "run", "--steps", "3"))
    assert (tmp_path / "file").read_text() == "kept"


def test_without_a_gpu_enwik8_trains_the_small_model():
    """The same command, honestly smaller; --model forces the paper's size; a GPU gets it."""
    assert train.settings({"dataset": "enwik8"}, "cpu")[0] == "laptop"
    assert train.settings({"dataset": "enwik8"}, "cuda")[0] == "enwik8-12L"
    name, config, run = train.settings({"model": "enwik8-12L"}, "cpu")
    assert (name, run.dataset, config.n_layer) == ("enwik8-12L", "enwik8", 12)
    assert (run.batch, run.segment, run.steps, run.lr) == (22, 512, 400_000, 2.5e-4)
    assert (run.eval_segment, run.eval_mem_len, run.eval_clamp_len) == (80, 2100, 820)


@pytest.mark.parametrize("name, lengths", [  # batch, T, M, steps, warm-up, rate, evaluation
    ("enwik8-24L", (64, 768, 768, 400_000, 4000, 2.5e-4, 128, 3800, 1000)),
    ("text8-12L", (22, 512, 512, 400_000, 0, 2.5e-4, 80, 2100, 820)),
    ("wt103-standard", (60, 150, 150, 200_000, 0, 2.5e-4, 64, 640, 400)),
    ("wt103-large", (128, 384, 384, 4_000_000, 16_000, 2.5e-4, 128, 1600, 1000)),
    ("lm1b-base", (224, 32, 32, 500_000, 20_000, 2.5e-4, 32, 128, 0)),
    ("lm1b-large", (512, 32, 32, 1_200_000, 30_000, 1e-4, 32, 128, 0))])
def test_schedules_are_the_official_ones(name, lengths):
    """Of every published configuration, as one row of numbers."""
    _, config, run = train.settings({"model": name}, "cpu")
    assert lengths == (run.batch, run.segment, config.mem_len, run.steps, run.warmup, run.lr,
                       run.eval_segment, run.eval_mem_len, run.eval_clamp_len)
    assert run.dataset == name.split("-")[0]


def test_every_model_has_a_schedule_and_every_benchmark_a_model():
    """The tables fit each other."""
    assert CONFIGS.keys() == train.RUNS_OF.keys()
    assert set(train.MODELS_OF) == {"stdlib", *corpora.SOURCES}
    for data, (large, small) in train.MODELS_OF.items():
        assert {large, small} <= CONFIGS.keys()
        assert data == "wikitext-2" or train.RUNS_OF[large].dataset == data


def test_a_small_model_gets_the_bands_of_its_benchmark():
    """Without a GPU 267,735 words are not one softmax; other cutoffs can be given."""
    name, config, _ = train.settings({"dataset": "wt103"}, "cpu")
    assert (name, config.div_val) == ("laptop-words", 4)
    assert config.cutoffs == (20_000, 40_000, 200_000)
    given = command_line.parse(
        ["--dataset", "wt103", "--cutoffs", "5", "9", "--div-val", "2"], "", PRESETS)
    _, config, _ = train.settings(given, "cpu")
    assert (config.cutoffs, config.div_val) == ((5, 9), 2)
    assert train.settings({"dataset": "ptb"}, "cpu")[1].cutoffs == ()
    assert train.settings({"dataset": "wt103"}, "cuda")[1] == CONFIGS["wt103-standard"]


# ---- torch.compile ------------------------------------------------------------------------------

def test_without_a_compiler_training_goes_on_with_one_line(text, tmp_path, monkeypatch, capsys):
    """--compile announces itself; a failure is one line, and the run is that without the flag."""
    def fails(model, **options):
        def call(*arguments):
            raise RuntimeError("no C++ compiler\nsecond line")
        return call
    assert run(text, tmp_path / "a", "--steps", "9", "--dropout", "0.2") == 0
    capsys.readouterr()
    monkeypatch.setattr(torch, "compile", fails)
    assert run(text, tmp_path / "b", "--steps", "9", "--dropout", "0.2", "--compile") == 0
    lines = [line for line in capsys.readouterr().out.splitlines()
             if line.startswith(("compil", "not compiled"))]
    assert lines == ["compiling the training step, up to two minutes",
                     "not compiled: RuntimeError: no C++ compiler"]
    same_runs(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_the_compiled_step_gives_the_same_losses(text, tmp_path, monkeypatch, capsys):
    """Dropout off: the same curve to rounding; evaluation and checkpoints are the model's own."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    flags = ["--steps", "9", "--log-every", "1", "--mem-len", "8"]
    assert run(text, tmp_path / "a", *flags) == 0
    assert run(text, tmp_path / "b", *flags, "--compile") == 0
    assert "compiled in" in capsys.readouterr().out
    curves = [[float(row["train"]) for row in log.read_metrics(tmp_path / name / "metrics.tsv")
               if row["train"]] for name in "ab"]
    assert len(curves[0]) == 9 and curves[0] == pytest.approx(curves[1], abs=1e-3)
    assert train.main(["--resume", "--out", str(tmp_path / "b")]) == 0


# ---- what a run will take -----------------------------------------------------------------------

SIZES = {"full": Config(53, n_layer=3, d_model=24, n_head=3, d_head=10, d_inner=44, mem_len=7),
         "bands": Config(53, n_layer=2, d_model=24, n_head=3, d_head=10, d_inner=44, mem_len=7,
                         cutoffs=(11, 20, 30), div_val=2)}


@pytest.mark.parametrize("name", SIZES)
def test_operations_are_those_that_torch_counts(name):
    """Every matrix product of the forward pass, two operations for a multiplication and addition.

    Here all tokens are in the head, so the share that the formula gives to the tails is missing.
    """
    config, (B, T) = SIZES[name], (5, 9)
    model = train.TransformerXL(config)
    x = torch.randint(11, (B, T))  # all in the head
    memory = [torch.randn(B, 7, 24) for _ in range(config.n_layer)]
    with FlopCounterMode(display=False) as counter:
        model(x, memory, x)
    tails = 0
    if name == "bands":
        for width, first, end in ((12, 11, 20), (6, 20, 30), (3, 30, 53)):
            tails += width * (end - first + 2 * 24) * math.log(end / first) / math.log(53)
    R = config.n_layer * 2 * (7 + T) * 24 * 30  # the formula leaves out the projection of R
    formula = estimate.flops_per_step(config, B, T) / 3 - 2 * B * T * tails + R
    assert counter.get_total_flops() == pytest.approx(formula, abs=6)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("model, change", [
    ("enwik8-12L", {"n_layer": 4, "d_model": 128, "n_head": 2, "d_inner": 512, "mem_len": 128}),
    ("enwik8-24L", {"n_layer": 4, "d_model": 128, "d_head": 16, "d_inner": 384, "mem_len": 96}),
    ("wt103-large", {"n_layer": 4, "d_model": 128, "n_head": 2, "d_inner": 512, "mem_len": 96,
                     "vocab_size": 900, "cutoffs": (100, 200, 500)})])
def test_the_estimated_memory_is_that_of_the_saved_tensors(model, change, dtype):
    """An estimate: within a factor of 1.6 of what autograd keeps for the backward pass."""
    config, B, sizes, kept = replace(CONFIGS[model], **change), 2, {}, []
    T, net = config.mem_len, train.TransformerXL(config).train()
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def keep(z):
        storage = z.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(z)  # so that its address is not used again
        return z

    x = torch.randint(100, (B, T))
    memory = [torch.randn(B, T, config.d_model) for _ in range(config.n_layer)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            net(x, memory, x)
    needs = estimate.bytes_of_run(
        config, lesson_5.count_parameters(config), B, T, dtype)
    assert 1 / 1.6 < needs["activations"] / sum(sizes.values()) < 1.6
    assert needs["memory of the layers, old and new"] == 2 * sum(z.nbytes for z in memory)


def test_a_dry_run_says_what_a_run_will_take_and_does_nothing(tmp_path, monkeypatch, capsys):
    """Parameters, memory, steps, operations, hours; no data are read and no folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "load", None)
    assert train.main(["--model", "wt103-standard", "--dry-run", "--tokens-per-second", "50000",
                       "--out", "run", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for words in ("151,107,538", "9,000 (60 lanes of 150)", "200,000 (1,800,000,000 tokens)",
                  "10.0 at 50,000 tokens/s", "GB"):
        assert words in text
    assert train.main(["--model", "laptop", "--dry-run", "--device", "cpu"]) == 0
    assert "as many as 4.2 minutes give" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reckons_with_the_data_and_the_micro_batch(capsys):
    """The vocabulary is the data's; all lanes have a memory, however many are read at a time."""
    base = ["--dry-run", "--device", "cpu"]
    assert train.main([*base, "--model", "enwik8-12L"]) == 0
    assert "vocabulary 205\n" in capsys.readouterr().out
    assert train.main([*base, "--model", "enwik8-12L", "--drop-newlines"]) == 0
    assert "41,055,436" in capsys.readouterr().out
    config = CONFIGS["enwik8-12L"]
    whole, parts = (estimate.bytes_of_run(config, 41_055_949, 22, 512, "bf16", size)
                    for size in (0, 11))
    same_key, activations = "memory of the layers, old and new", "activations"
    assert whole[same_key] == parts[same_key]
    assert whole[activations] == pytest.approx(2 * parts[activations], abs=1)
    for flags, words in ((["--dataset", "enwik9"], "unknown dataset 'enwik9'"),
                         (["--tokens-per-second", "-5"], "above 0"),
                         (["--model", "wt103-large", "--dataset", "enwik8"], "size 205")):
        assert words in failure(capsys, train.main([*base, *flags]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there(capsys):
    """--device cuda without one."""
    assert "no CUDA device" in failure(capsys, train.main(["--device", "cuda"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu(text, tmp_path, capsys):
    """bf16 on CUDA: train, stop, evaluate; the CPU does the same in float32 in the tests above."""
    flags = ["--text", str(text), "--model", "tiny", "--steps", "4", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["run"]["dtype"] == "bf16"
    assert last_line(capsys).startswith("test ")
