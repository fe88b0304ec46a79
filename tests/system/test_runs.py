"""Runs as their users know them: a folder, stopping and going on to the bit, and every mistake.

    pytest tests/system/test_runs.py
"""
import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch

from system.crash import differences, runs_differ
from helpers import wait_until
from support import corpora
from training import checkpoint, fast, log, machine, presets, run as runs
from training.flags import Flags

train = import_module("train")
ROOT = Path(train.__file__).parent
TINY = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--segment", "8", "--mem-len",
        "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "2",
        "--n-tokens", "5"]
# 225 training bytes in 4 lanes of 56 inputs: the text begins anew after 7 segments of 8
WHOLE = "--steps", "9", "--eval-every", "3", "--dropout", "0.2", "--optimizer", "muon"


# ---- helpers ------------------------------------------------------------------------------------

@pytest.fixture(scope="module", autouse=True)
def no_curve_and_no_flush():
    """What takes longer than all else in these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "draw", lambda *arguments: None)
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of pseudo-random words, the same in every test: 250 bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=draw.randint(1, 6))) for _ in range(99)]
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(" ".join(words)[:250])
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """finished(*flags): a run that nobody has disturbed, made once -> its folder, its last line."""
    @cache
    def once(*flags):
        out = tmp_path_factory.mktemp("finished")
        with redirect_stdout(io.StringIO()) as said:
            assert run(text, out, *flags) == 0
        return out, said.getvalue().splitlines()[-1]

    return once


@pytest.fixture
def small(finished, tmp_path):
    """small(): the folder of a run of three steps, to be read or spoiled."""
    return lambda: Path(shutil.copytree(finished("--steps", "3")[0], tmp_path / "small"))


def run(text, out, *flags):
    return train.main([*TINY, "--text", str(text), "--out", str(out), *flags])


def again(out, *flags):
    """A command on a folder that holds a run."""
    return train.main([*flags, "--out", str(out), "--device", "cpu"])


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def failure(capsys, status):
    """What a mistake must look like: status 1 and exactly one line on stderr."""
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert status == 1 and len(error) == 1 and error[0].startswith("train.py: "), error
    return error[0]


@contextmanager
def at_call(number, act, where="train_step"):
    """In the block: act() in the middle of the number-th call of a function of train.py."""
    real, calls = getattr(train, where), count(1)

    def wrapped(*arguments, **options):
        if next(calls) == number:
            act()
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, where, wrapped)
        yield


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def crash(*arguments):
    raise RuntimeError("the machine is gone")


def scripted(*losses):
    """train_step that gives these losses, one after the other, and trains nothing."""
    losses = iter(losses)
    return lambda model, optimizer, x, y, memory, run: (next(losses), 1.0, memory)


def saved(out, name="checkpoint"):
    return checkpoint.load(out / f"{name}.pt")["state"]


# ---- a whole run --------------------------------------------------------------------------------

def test_a_run_leaves_a_figure_metrics_and_checkpoints(finished):
    """The last line is the test figure with its evaluation lengths; metrics.tsv says of what."""
    out, figure = finished(*WHOLE)
    assert figure.startswith("test ")
    assert figure.endswith(" bpc (evaluation T 16, M 16, clamp none; 11 predictions; notes.txt)")
    assert sorted(path.name for path in out.iterdir()) == [
        "best.pt", "checkpoint.pt", "lock", "metrics.tsv", "previous.pt"]
    steps = [row["step"] for row in log.read_metrics(out / "metrics.tsv")]
    assert steps == ["2", "3", "4", "6", "6", "8", "9"]
    assert saved(out, "best")["memory"] is None
    head = (out / "metrics.tsv").read_text()
    assert "commit" in head and f"torch {torch.__version__}" in head and "parameters" in head


def test_eval_only_and_sample_need_no_flags_but_the_folder(finished, capsys):
    """A checkpoint holds all that evaluating and sampling need, and repeats the run's figure."""
    out, figure = finished(*WHOLE)
    assert again(out, "--eval-only") == 0
    assert last_line(capsys) == figure
    assert again(out, "--eval-only", "--eval-mem-len", "3", "--eval-clamp-len", "2") == 0
    assert "M 3, clamp 2;" in last_line(capsys)
    samples = []
    for _ in range(2):
        assert again(out, "--sample", "abc", "--n-tokens", "9", "--top-k", "3") == 0
        samples.append(last_line(capsys))
    assert samples[0] == samples[1] and samples[0].startswith("abc") and len(samples[0]) == 12


@pytest.mark.parametrize("flags, words", [
    (["--n-tokens", "-1"], "--n-tokens must be 0 or more, got -1"),
    (["--top-k", "0"], "--top-k must be at least 1"),
    (["--temperature", "0"], "--temperature must be at least"),
    (["--temperature", "nan"], "--temperature must be at least")], ids=" ".join)
@pytest.mark.parametrize("act", [["--sample", "abc"], ["--resume"]], ids=["sample", "resume"])
def test_what_cannot_be_drawn_is_refused_in_one_line(act, flags, words, small, capsys):
    """Whether it is drawn now, or after the training."""
    assert words in failure(capsys, again(small(), *act, *flags))


# ---- sampling -----------------------------------------------------------------------------------

READING = presets.Run(steps=1, dtype="float32", eval_segment=5, eval_mem_len=7)


def a_model(form="plain", V=11, broken=False):
    """A small model, or a Reader of it; if it is broken its logits are not finite."""
    torch.manual_seed(0)
    model = train.lesson_5.TransformerXL(train.lesson_5.Config(
        V, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6, dropout=0.5))
    if broken:
        model.embedding.bias.data.fill_(math.nan)
    return model if form == "plain" else fast.Reader(model)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("form", ["plain", "Reader"])
def test_a_prompt_is_continued_in_eval_mode_and_the_mode_put_back(form, training, monkeypatch):
    """A prompt (P,) gives (n_tokens,); lesson 5's generate gets it as one lane, (1, P)."""
    model, generate, seen = a_model(form).train(training), train.lesson_5.generate, []

    def watched(model, prompt, **options):
        seen.append((model.training, model.config.mem_len, tuple(prompt.shape)))
        return generate(model, prompt, **options)

    monkeypatch.setattr(train.lesson_5, "generate", watched)
    new = train.sample(model, torch.tensor([1, 2, 3]), READING, Flags(n_tokens=5))
    assert seen == [(False, 7, (1, 3))]
    assert new.shape == (5,) and new.dtype == torch.int64
    assert model.training is training and model.config.mem_len == 6


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("form", ["plain", "Reader"])
@pytest.mark.parametrize("prompt, broken, words", [
    ([1, 99], False, "99"), ([-1], False, "-1"), ([1, 2], True, "not finite")],
    ids=["above V", "below 0", "broken weights"])
def test_the_mode_is_put_back_after_an_error(prompt, broken, words, form, training, our_own):
    """So are the lengths."""
    model = a_model(form, broken=broken).train(training)
    with pytest.raises(ValueError, match=words):
        train.sample(model, torch.tensor(prompt), READING, Flags(n_tokens=5))
    assert model.training is training and model.config.mem_len == 6


@pytest.mark.parametrize("asked, words", [
    ({"n_tokens": -1}, "--n-tokens must be 0 or more, got -1"), ({"top_k": 0}, "--top-k"),
    ({"temperature": 0.0}, "--temperature"), ({"temperature": math.nan}, "--temperature")], ids=str)
def test_what_no_model_can_draw_is_refused(asked, words):
    """Before anything is read."""
    with pytest.raises(ValueError, match=words):
        Flags(**asked)


def test_no_new_tokens_are_none():
    """n_tokens 0 is no mistake."""
    new = train.sample(a_model(), torch.tensor([1, 2]), READING, Flags(n_tokens=0))
    assert new.shape == (0,) and new.dtype == torch.int64


@pytest.mark.parametrize("V", [3, 200])
def test_unless_top_k_is_given_it_is_40_or_the_vocabulary(V, monkeypatch):
    """A vocabulary of fewer than 40 symbols is no mistake."""
    asked, draw = [], train.lesson_5.sample_top_k
    monkeypatch.setattr(train.lesson_5, "sample_top_k", lambda logits, top_k, *more: (
        asked.append(top_k), draw(logits, top_k, *more))[1])
    train.sample(a_model(V=V), torch.tensor([1, 2]), READING, Flags(n_tokens=2))
    assert asked == [min(40, V)] * 2


def test_the_same_seed_draws_the_same_text():
    """That of the run, unless another one is given."""
    first, again, other = (train.sample(
        a_model(), torch.tensor([1, 2]), READING, Flags(n_tokens=20, typed=asked)).tolist()
        for asked in ({}, {"seed": 0}, {"seed": 1}))
    assert first == again != other


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a child process")
def test_the_command_itself(text, tmp_path, process_of_its_own):
    """`python train.py`, stopped by a real Ctrl-C: status 130 and how to go on; then to the end."""
    out, metrics = tmp_path / "run", tmp_path / "run" / "metrics.tsv"
    command, pipes = [sys.executable, str(ROOT / "train.py")], {
        "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([*command, *TINY, "--text", str(text), "--out", str(out), "--steps",
                           "300"], **pipes) as child:
        wait_until(lambda: child.poll() is not None or metrics.exists()
                   and "\n8\t" in metrics.read_text(), "step 8", seconds=120)
        child.send_signal(signal.SIGINT)
        printed, errors = child.communicate(timeout=300)
    assert child.returncode == 130, errors
    assert f"python train.py --resume --out {out}" in printed and saved(out)["step"] >= 8
    done = subprocess.run([*command, "--resume", "--out", str(out)], timeout=300, **pipes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("test ")


# ---- stop and go on -----------------------------------------------------------------------------

@pytest.mark.parametrize("where, call, number", [
    ("train_step", 7, signal.SIGTERM), ("evaluate", 3, signal.SIGINT),
    *(pytest.param("train_step", call, signal.SIGINT, marks=pytest.mark.slow)
      for call in (1, 3, 8)),
    pytest.param("evaluate", 1, signal.SIGTERM, marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted_to_the_bit(text, tmp_path, capsys, finished, where, call,
                                                 number):
    """Parameters, optimizer, schedule, random state, place in the text, memory, metrics, figure.
    """
    (whole, figure), out = finished(*WHOLE), tmp_path / "run"
    with at_call(call, lambda: os.kill(os.getpid(), number), where):
        assert run(text, out, *WHOLE) == 128 + number
    assert "go on with" in capsys.readouterr().out
    read = checkpoint.load(out / "checkpoint.pt")["batches"]
    assert 56 * read["epoch"] + read["column"] == 8 * saved(out)["step"]
    assert again(out, "--resume") == 0
    assert last_line(capsys) == figure
    assert not runs_differ(whole, out)


def test_a_kill_between_a_line_of_metrics_and_its_checkpoint_doubles_nothing(
        text, tmp_path, finished, monkeypatch):
    """Stopped in a validation, gone on, and killed when its line is written, but not yet saved."""
    out = tmp_path / "run"
    with at_call(1, ctrl_c, "evaluate"):
        assert run(text, out, *WHOLE) == 130
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="gone"):
        patch.setattr(checkpoint, "save", crash)
        again(out, "--resume")
    assert [row["step"] for row in log.read_metrics(out / "metrics.tsv")] == ["2", "3"]
    assert again(out, "--resume") == 0
    assert not runs_differ(finished(*WHOLE)[0], out)


@pytest.mark.parametrize("flags, wanted", [
    (["--steps", "14", "--eval-every", "7"], [5, 7, 12, 14]),
    (["--minutes", "33.6", "--eval-every", "99", "--save-minutes", "24"], [11, 14])])
def test_a_run_is_saved_by_the_minutes_of_training(text, tmp_path, monkeypatch, flags, wanted):
    """At least every ten, unless --save-minutes says otherwise; a validation begins them anew."""
    steps, save, counted = [], runs.Job.save, runs.State.count

    def noted(job):
        steps.append(job.state.step)
        save(job)

    monkeypatch.setattr(runs.Job, "save", noted)
    monkeypatch.setattr(runs.State, "count", lambda self, x, finite, seconds: counted(
        self, x, finite, 60 * 2.4))  # a step takes 2.4 minutes
    monkeypatch.setattr(train, "train_step", scripted(*[1.0] * 14))
    monkeypatch.setattr(train, "evaluate", lambda *arguments: 1.0)
    assert run(text, tmp_path / "run", *flags) == 0
    assert steps == wanted


@pytest.mark.parametrize("what", ["damaged", "killed"])
def test_the_checkpoint_before_is_good_for_the_same_end(text, tmp_path, finished, capsys, what):
    """If the newest is damaged, which is said, and it is kept; or a save was killed half-way: the
    newest has moved already, and half a file is left, which is swept away.
    """
    out = tmp_path / "run"
    with at_call(8, ctrl_c):
        assert run(text, out, *WHOLE) == 130
    newest = out / "checkpoint.pt"
    if what == "damaged":
        newest.write_bytes(newest.read_bytes()[:-30])
    else:
        newest.rename(out / "previous.pt")
        for name in ("checkpoint.part", "older.part"):
            (out / name).write_bytes(b"half")
    capsys.readouterr()
    assert again(out, "--resume") == 0
    said = capsys.readouterr().out
    assert f"going on from step {6 if what == 'damaged' else 8}" in said
    assert ("checkpoint.pt is damaged" in said) == (what == "damaged")
    assert (out / "damaged.pt").exists() == (what == "damaged")
    assert not runs_differ(finished(*WHOLE)[0], out) and not list(out.glob("*.part"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills_in_short(process_of_its_own):
    """tests/system/crash.py with a few kills, half of them in a save: nothing is different."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "system" / "crash.py"), "--kills", "8", "--steps",
         "40"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 kills, " in done.stdout and ", 0 differences" in done.stdout


def test_the_crash_test_sees_a_difference(finished, tmp_path):
    """Another weight, another line, another type."""
    a, b = finished(*WHOLE)[0], tmp_path / "b"
    shutil.copytree(a, b)
    assert runs_differ(a, b) == []
    content = torch.load(b / "checkpoint.pt", weights_only=True)
    content["model"]["u"][0, 0, 0] += 1e-6
    content["state"]["tokens"] = float(content["state"]["tokens"])
    torch.save(content, b / "checkpoint.pt")
    (b / "metrics.tsv").write_text((a / "metrics.tsv").read_text() + "9\t1\n")
    assert runs_differ(a, b) == [
        "checkpoint.pt/model/u", "checkpoint.pt/state/tokens", "metrics.tsv"]
    assert differences({"a": 1}, {"b": 1}) == [""] and differences([1], [1, 2]) == [""]


# ---- losses that are not numbers, memory that does not suffice ----------------------------------

def test_the_best_finite_validation_is_kept_and_tested(text, tmp_path, monkeypatch):
    """Losses 1.7, NaN, 1.9, 1.8: the best stays 1.7, and its weights are tested."""
    losses, seen = iter([1.7, math.nan, 1.9, 1.8, 2.0]), []

    def evaluate(model, *rest):
        seen.append(model.u.sum().item())
        return next(losses)

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert run(text, tmp_path / "run", "--steps", "12", "--eval-every", "3") == 0
    assert (saved(tmp_path / "run", "best")["step"], saved(tmp_path / "run")["best"]) == (3, 1.7)
    assert len(set(seen)) == 4 and seen[4] == seen[0]


def test_ten_bad_steps_in_a_row_stop_the_run(text, tmp_path, monkeypatch, capsys):
    """One sentence, status 1, and the last good checkpoint as it was."""
    losses = [1.0, math.nan, math.nan, 1.0, 1.0, 1.0, *10 * [math.nan]]
    monkeypatch.setattr(train, "train_step", scripted(*losses))
    status = run(text, tmp_path / "run", "--steps", "60", "--eval-every", "6")
    assert "ten steps in a row, up to step 16" in failure(capsys, status)
    assert saved(tmp_path / "run")["step"] == 12 and saved(tmp_path / "run")["skipped"] == 8


def test_out_of_memory_is_a_sentence_with_what_fits(text, small, tmp_path, monkeypatch, capsys):
    """In a step a smaller micro-batch; else the general case."""
    def step(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def evaluate(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")

    out = small()
    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "evaluate", evaluate)
    said = failure(capsys, run(text, tmp_path / "run", "--steps", "3"))
    assert "out of memory with 4 lanes at a time" in said
    assert "--micro-batch 2 needs about" in said
    assert "out of memory: a smaller model" in failure(capsys, again(out, "--eval-only"))


def test_trials_and_steps_see_the_micro_batch(text, tmp_path, monkeypatch):
    """The run that needs it would not fit into memory otherwise, and another shape is compiled."""
    seen, real = [], train.train_step

    def step(model, optimizer, x, y, memory, run):
        seen.append(run.micro_batch)
        return real(model, optimizer, x, y, memory, run)

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(machine, "choose_dtype", lambda step, model, run, x, y: (
        seen.append(x.shape), "float32")[1])
    monkeypatch.setattr(machine, "compiled", lambda model, context, x, y: (
        seen.append(y.shape), model)[1])
    flags = ["--dtype", "auto", "--micro-batch", "3", "--compile", "--steps", "1"]
    assert run(text, tmp_path / "run", *flags) == 0
    assert seen == [(3, 8), (3, 8), 3]


# ---- folders ------------------------------------------------------------------------------------

def test_a_flag_that_cannot_be_is_no_damaged_checkpoint(small, monkeypatch, capsys):
    """A number of ranks that does not divide the lanes, a setting that no run can have."""
    out = small()
    assert "--micro-batch must be at least 0" in (said := failure(
        capsys, again(out, "--resume", "--micro-batch", "-1"))) and "checkpoint.pt" not in said
    monkeypatch.setattr(runs.ranks, "my_lanes", lambda B: list(range(B))[B])
    with pytest.raises(IndexError):  # as it is, not as a damaged checkpoint
        again(out, "--resume")


@pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=["new", "resume"])
def test_two_runs_in_one_folder(text, small, capsys, flags):
    """The second is refused with a sentence, before it looks at a checkpoint which the first may
    just be moving, and changes nothing; --eval-only is allowed.
    """
    out = small()
    path = out / "checkpoint.pt"
    path.write_bytes(b"") if flags else path.unlink()
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    with checkpoint.Lock(out) as lock:
        assert f"process {os.getpid()}," in lock.take()
        assert "belongs to a run that is going on" in failure(
            capsys, run(text, out, "--steps", "3", *flags))
        assert left == {path.name: path.read_bytes() for path in out.iterdir()}
        assert again(out, "--eval-only") == 0


def test_a_run_is_not_overwritten_and_not_changed(text, small, capsys, monkeypatch):
    """A folder that holds a run is refused; so is going on with other settings or another text."""
    out = small()
    before, good = (out / "checkpoint.pt").read_bytes(), text.read_text()
    assert "holds a run already" in failure(capsys, run(text, out, "--steps", "3"))
    for flags, words in ((["--lr", "0.5"], "--lr is"), (["--plain"], "--plain is not set there"),
                         (["--model", "laptop"], "--model is tiny there, not laptop")):
        assert words in failure(capsys, again(out, "--resume", *flags))
    monkeypatch.setattr(runs, "load", lambda path, **options: corpora.load(other))
    for changed in ("x" * 250, good[::-1]):  # other symbols; the same, but at other places
        other = out / "changed.txt"
        other.write_text(changed)
        for flag in ("--resume", "--eval-only"):
            assert "it has changed since" in failure(capsys, again(out, flag))
    assert (out / "checkpoint.pt").read_bytes() == before
    monkeypatch.undo()
    assert again(out, "--resume", "--save-minutes", "5") == 0


def test_a_run_is_evaluated_as_it_was_trained(text, small, tmp_path, capsys):
    """Another text or dtype beside --eval-only would be passed over without a word."""
    out, other = small(), tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    for flags, words in ((["--text", str(other)], "not the text that the checkpoint was trained"),
                         (["--dataset", "enwik8"], "--dataset is stdlib there, not enwik8"),
                         (["--dtype", "bf16"], "--dtype is float32 there, not bf16")):
        assert words in failure(capsys, again(out, "--eval-only", *flags))
    assert again(out, "--eval-only", "--text", str(text), "--plain", "--seed", "4") == 0


def test_a_text_may_move(text, tmp_path, capsys):
    """A run goes on, and is evaluated, where its text lies by another name; not with another one.
    """
    out, moved = tmp_path / "run", tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    assert run(moved, out, "--steps", "6") == 0
    (tmp_path / "gone.txt").write_text("x" + text.read_text())
    moved.unlink()
    for act in ("--eval-only", "--resume"):
        assert "moved.txt" in failure(capsys, again(out, act))
        assert "not the text" in failure(capsys, again(
            out, act, "--text", str(tmp_path / "gone.txt")))
        assert again(out, act, "--text", str(text)) == 0


def test_a_best_model_without_its_run_is_kept(text, small):
    """Somebody has deleted the large checkpoints: a new run there puts what is left aside."""
    out = small()
    left = {name: (out / name).read_bytes() for name in ("best.pt", "metrics.tsv")}
    (out / "checkpoint.pt").unlink()
    assert run(text, out, "--steps", "3", "--seed", "1") == 0
    assert left == {name: (out / f"old-{name}").read_bytes() for name in left}
    assert (out / "best.pt").read_bytes() != left["best.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(text, tmp_path, monkeypatch, capsys):
    """The operating system's own refusal, in the middle of a run."""
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: real(
        "/dev/full" if str(path).endswith(".part") else path, *a, **k))
    status = run(text, tmp_path / "run", "--steps", "6")
    assert "could not write" in failure(capsys, status)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]


# ---- bad input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--dataset", "enwik9"], "enwik8"),
    (["--model", "enormous"], "unknown model 'enormous', known are tiny"),
    (["--text", "nowhere.txt"], "nowhere.txt"),
    (["--text", "empty.txt"], "0 bytes, but at least 40"),
    (["--n-head", "3"], "3 heads do not divide the model width 32"),
    (["--steps", "3", "--minutes", "1"], "one length"),
    (["--lr", "nan"], "--lr"),
    (["--dataset", "stdlib", "--text", "notes.txt"], "give one of them"),
    (["--temperature", "1e-300"], "--temperature"),
    (["--top-k", "-1"], "--top-k"),
    (["--n-tokens", "-1"], "--n-tokens"),
    (["--out", "empty.txt/run"], "empty.txt"),
    (["--device", "tpu"], "must be cpu or cuda"),
    (["--eval-only"], "no checkpoint"),
    (["--resume"], "no checkpoint"),
    (["--sample", "abc"], "no checkpoint"),
    (["--seed", str(10**30)], "--seed must be at most"),
    (["--eval-mem-len", str(2**63)], "eval-mem-len"),
    (["--batch", str(10**400), "--dry-run"], "--batch"),
    (["--lr=--"], "--lr"),
    (["--text=--"], "--text needs a value"),
    (["a\nb"], "a b"),
    (["--n-layer", "100000000"], "parameters"),
    (["--out", "\udcff"], "UTF-8"),
], ids=lambda z: ascii(" ".join(z))[:30] if isinstance(z, list) else "")
def test_bad_input_is_one_line_and_leaves_nothing(flags, words, text, tmp_path, monkeypatch,
                                                  capsys):
    """What, where, what to do; status 1, before any training; no folder made."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, "notes.txt")
    Path("empty.txt").touch()
    source = [] if {"--text", "--dataset"} & set(flags) else ["--text", "notes.txt"]
    model = [] if "--model" in flags else ["--model", "tiny"]
    status = train.main([*model, *source, "--out", "run", "--device", "cpu", *flags])
    assert words in failure(capsys, status)
    assert not Path("run").exists() and Path("empty.txt").read_bytes() == b""


# ---- torch.compile, a GPU -----------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiled_step_gives_the_same_losses(text, tmp_path, capsys):
    """Dropout off: the same curve to rounding; evaluation and checkpoints are the model's own."""
    curves, flags = [], ["--n-layer", "1", "--steps", "9", "--log-every", "1", "--mem-len", "8"]
    for name, more in (("a", []), ("b", ["--compile"])):
        assert run(text, tmp_path / name, *flags, *more) == 0
        curves.append([float(row["train"]) for row in log.read_metrics(
            tmp_path / name / "metrics.tsv") if row["train"]])
    assert "compiled in" in capsys.readouterr().out
    assert len(curves[0]) == 9 and curves[0] == pytest.approx(curves[1], abs=1e-3)
    assert again(tmp_path / "b", "--resume") == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu(text, tmp_path, capsys):
    """bf16 on CUDA: train, stop, evaluate; the CPU does the same in float32 in the tests above."""
    flags = ["--text", str(text), "--model", "tiny", "--steps", "4", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["run"]["dtype"] == "bf16"
    assert last_line(capsys).startswith("test ")
