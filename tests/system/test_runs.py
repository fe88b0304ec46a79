"""Start, stop and resume complete runs, whose results must agree bit for bit."""
import math
import os
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from shutil import which
from unittest.mock import Mock

import pytest
import torch

from course import lessons
from system.kills import runs_differ
from helpers import assert_close, content_of, gradients, refusal
from training import checkpoint, job as runs, log, machine, optimizers, ranks, signals
from system.conftest import TINY, WHOLE, again, at_call, failure, last_line, run, saved
from training.reader import Reader, reader_of

train, lesson_2, lesson_5 = map(import_module, ("train", "02_recurrence", "05_full_model"))


def test_a_run_leaves_a_test_score_metrics_and_checkpoints(finished, monkeypatch):
    out, score = finished(*WHOLE)
    assert score.startswith("test ")
    assert score.endswith(" bpc (evaluation T 16, M 16, clamp none; 11 predictions; notes.txt)")
    assert sorted(path.name for path in out.iterdir()) == [
        "best.pt", "checkpoint.pt", "metrics.tsv", "previous.pt"]
    assert saved(out, "best")["memory"] is None
    head = (out / "metrics.tsv").read_text()
    assert head.startswith(f"# python {shlex.join(sys.argv)}\n")
    assert f"# commit {log.commit()}, " in head and f"torch {torch.__version__}" in head
    assert "parameters" in head and (log.commit() == "unknown") != (lessons.ROOT / ".git").exists()
    monkeypatch.setattr(log, "__file__", __file__)  # as if tests/ were another project
    assert log.commit() == "unknown"


def test_eval_only_and_sample_need_only_the_folder(finished, capsys):
    out, figure = finished(*WHOLE)
    assert again(out, "--eval-only", "--dtype", "float32") == 0
    assert last_line(capsys) == figure
    assert again(out, "--eval-only", "--eval-mem-len", "3", "--eval-clamp-len", "2") == 0
    assert "M 3, clamp 2;" in last_line(capsys)
    samples = []
    for _ in range(2):
        assert again(out, "--sample", "abc", "--n-tokens", "9", "--top-k", "3") == 0
        samples.append(last_line(capsys))
    assert samples[0] == samples[1] and samples[0].startswith("abc") and len(samples[0]) == 12


def test_eval_only_chooses_its_dtype_by_the_machine(small, monkeypatch, capsys):
    """It ignores the checkpoint's float32 where bf16 is faster, unless --dtype is typed."""
    evaluate, out = Mock(return_value=1.0), small()
    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(machine.timeit, "repeat", Mock(side_effect=[[9.0], [1.0], [1.0], [30.0]]))
    for flags in ([], [], ["--dtype", "float32"]):
        assert again(out, "--eval-only", *flags) == 0
    chosen = [call.args[2].dtype for call in evaluate.call_args_list]
    assert chosen == ["bf16", "float32", "float32"]
    said = capsys.readouterr().out
    assert "bf16 makes a product 9 times as fast" in said and "bf16 is slower here" in said


@pytest.mark.parametrize("where, call, number, flags", [
    ("train_step", 7, signal.SIGTERM, WHOLE), ("evaluate", 3, signal.SIGINT, WHOLE),
    ("train_step", 2, signals.HANG_UP, WHOLE),
    ("train_step", 7, signal.SIGTERM, (*WHOLE, "--optimizer", "adam"))])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
        text, tmp_path, capsys, monkeypatch, finished, where, call, number, flags):
    """So it is with an optimizer of your own, here instead of adam.  A running run is locked."""
    monkeypatch.setitem(optimizers.OPTIMIZERS, "adam", lambda model, recipe: (
        torch.optim.Adafactor(model.parameters(), lr=recipe.lr)))
    (whole, score), out = finished(*flags), tmp_path / "a run"

    def act():
        assert checkpoint.fcntl is None or refusal(checkpoint.locked(out).__enter__)
        for _ in range(1 + (number == signals.HANG_UP)):  # the system and the shell both send it
            os.kill(os.getpid(), number)

    with at_call(call, act, where):
        assert run(text, out, *flags) == 128 + number
    assert f"continue with\n  python train.py --resume --out '{out}'\n" in capsys.readouterr().out
    state = saved(out)
    assert 56 * state["epoch"] + state["column"] == 8 * state["step"]
    assert again(out, "--resume") == 0
    said = capsys.readouterr().out  # a run that restarted would give the same score
    assert f"resuming at step {state['step']}," in said and said.splitlines()[-1] == score
    assert not runs_differ(whole, out)


def test_nohup_ctrl_c_a_suspended_process_and_compiled_layers(capfd, monkeypatch):
    """A pause, and a step that compiled (70, 80, 90 seconds), count as the median step."""
    before = signal.signal(signals.HANG_UP, signal.SIG_IGN)
    with signals.Stop() as stop:
        signal.raise_signal(signals.HANG_UP), signal.raise_signal(signal.SIGINT)
        stop.agree()
    signal.signal(signals.HANG_UP, before)
    assert stop.number == signal.SIGINT and "stopping after this" in capfd.readouterr().err
    job, found = Mock(step_seconds=[], graphs=0, untimed=0), []
    for took, n in zip((70, 80, 1, 1, 60, 9, 1, 90, 1, 60, 60, 60, 60), (1, *6 * [2], *6 * [3])):
        monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", n)
        found.append(runs.Job.without_pause(job, took))
    assert found == [0, 0, 3, 1, 1, 9, 1, 0, 2, 1, 1, 60, 60]


def test_a_run_in_another_thread_leaves_signals_alone(text, tmp_path):
    """Only the main thread may set handlers.  A notebook or a web server may train in another."""
    with ThreadPoolExecutor() as pool, lessons.time_limit(60):
        assert pool.submit(run, text, tmp_path / "run", "--steps", "3").result(60) == 0
        pool.submit(lessons.time_limit(60).__enter__).result(60)


@pytest.mark.parametrize("flags, wanted", [
    (["--steps", "14", "--eval-every", "7"], [5, 7, 12, 14, 14]),
    (["--steps", "40", "--eval-every", "0"], [*range(4, 41, 4), 40]),
    (["--minutes", "33", "--eval-every", "99", "--save-minutes", "24"], [11, 14, 14])])
def test_a_run_is_saved_after_minutes_of_training(text, tmp_path, monkeypatch, flags, wanted):
    """The default is ten minutes (--save-minutes); a validation saves, and restarts them."""
    steps, save = [], runs.Job.save
    monkeypatch.setattr(runs.Job, "save", lambda job: (steps.append(job.state.step), save(job)))
    # a step takes 2.4 minutes, without the pauses
    monkeypatch.setattr(runs.Job, "without_pause", lambda job, seconds: 160 * seconds)
    monkeypatch.setattr(ranks, "largest", lambda number: number and 0.9)
    monkeypatch.setattr(train, "train_step", Mock(return_value=(1.0, 1.0, None)))
    monkeypatch.setattr(train, "evaluate", Mock(return_value=1.0))
    assert run(text, tmp_path / "run", *flags) == 0
    assert steps == wanted


@pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=["new", "resume"])
def test_a_second_run_is_rejected_while_the_first_is_running(text, small, capsys, flags):
    """It reads no checkpoint, which the first may be moving; --eval-only is allowed."""
    out = small()
    path = out / "checkpoint.pt"
    path.write_bytes(b"") if flags else path.unlink()
    left = content_of(out)
    with checkpoint.locked(out):
        assert "is in use by another run" in failure(capsys, run(text, out, "--steps", "3", *flags))
        assert again(out, "--eval-only") == 0
    assert "holds a run already" in failure(capsys, run(text, out, "--steps", "3"))
    assert left == content_of(out)


def test_a_text_is_found_from_another_folder_and_may_move(text, tmp_path, monkeypatch, capsys):
    """Without --out a run's folder is named after its text.  It keeps its settings."""
    out, moved = tmp_path / "a b" / "runs" / "moved-tiny", tmp_path / "moved.txt"
    moved.write_bytes(text.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.flags.ROOT", tmp_path / "a b")
    assert train.main([*TINY, "--text", "moved.txt", "--steps", "3"]) == 0
    monkeypatch.chdir(out)
    assert again(out, "--eval-only") == 0
    moved.unlink()
    for act in "--eval-only --plain --seed 4", "--resume --save-minutes 5 --micro-batch 2":
        assert str(moved) in failure(capsys, again(out, *act.split()))
        assert again(out, *act.split(), "--text", str(text)) == 0
    for kept in ("--steps is 3", "--minutes is not set", "--lr is 0.003", "--seed is not set"):
        said = failure(capsys, again(out, "--resume", kept.split()[0], "9"))
        assert f"{kept} there, not 9" in said and f"; --init '{out}' starts a new run" in said


def test_the_best_finite_validation_is_kept_and_tested(text, tmp_path, monkeypatch):
    losses, seen = iter([1.7, math.nan, 1.9, 1.8, 2.0]), []
    monkeypatch.setattr(train, "evaluate", lambda model, *rest: (
        seen.append(model.u.sum().item()), next(losses))[1])
    assert run(text, tmp_path / "run", "--steps", "12", "--eval-every", "3") == 0
    assert (saved(tmp_path / "run", "best")["step"], saved(tmp_path / "run")["lowest"]) == (3, 1.7)
    assert len(set(seen)) == 4 and seen[4] == seen[0]


def test_ten_non_finite_steps_in_a_row_stop_the_run(text, tmp_path, monkeypatch, capsys):
    """A loss that is not finite enters no mean; with a finite norm its step is not skipped."""
    good, skipped, too = (1.0, 1.0, None), (math.nan, math.nan, None), (1.0, math.inf, None)
    monkeypatch.setattr(train, "train_step", Mock(side_effect=[
        good, skipped, (math.inf, 1.0, None), good, good, good, *5 * [skipped, too]]))
    status = run(text, tmp_path / "run", "--steps", "60", "--eval-every", "6")
    assert "ten steps in a row, up to step 16" in failure(capsys, status)
    for row in log.read_metrics(tmp_path / "run" / "metrics.tsv")[:2]:  # means of finite losses
        assert (row["train"], row["train_max"], row["skipped"]) == ("1.4427", "1.4427", "1")
    assert saved(tmp_path / "run")["step"] == 12 and saved(tmp_path / "run")["skipped"] == 7


def test_out_of_memory_is_reported_in_one_line(text, small, tmp_path, monkeypatch, capsys):
    out = small()
    gpu = torch.OutOfMemoryError("CUDA out of memory")
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")
    monkeypatch.setattr(train, "train_step", Mock(side_effect=gpu))
    monkeypatch.setattr(train, "evaluate", Mock(side_effect=cpu))
    for act in (lambda: run(text, tmp_path / "run", "--steps", "3"),
                lambda: again(out, "--eval-only")):
        said = failure(capsys, act())
        assert "out of memory: " in said and "--micro-batch" in said
    monkeypatch.setattr(train, "evaluate", Mock(side_effect=BrokenPipeError))  # as with `| head`
    assert again(out, "--eval-only") == 141 and capsys.readouterr().err == ""
    monkeypatch.setattr(train, "evaluate", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):  # other errors keep their traceback
        again(out, "--eval-only")


FAILS = Mock(side_effect=[RuntimeError("is\ngone"), lambda x: (x,), *999 * [RuntimeError()]])


@pytest.fixture
def graphs(backend, monkeypatch):
    """Compile with a backend, on a CPU; return torch's counter."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(machine, "choose", lambda *given: "cpu")
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, suppress_errors=False):
        yield torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[
    pytest.mark.slow, pytest.mark.skipif(not which("c++"), reason="there is no C++ compiler")])])
def test_compiled_layers_give_lesson_5s_losses_and_gradients(backend, graphs):
    """The memory has 0, then M tokens, and the last segment is shorter."""
    tiny, x = lesson_5.CONFIGS["tiny"], torch.randint(205, (2, 40))
    model, compiled = (lesson_5.TransformerXL(tiny).double() for _ in range(2))
    machine.compile_layers(compiled)
    compiled.load_state_dict(model.state_dict())  # same names
    assert type(reader_of(compiled)) is Reader
    for found, wanted in zip(*((losses := lesson_2.stream_losses(form, x, x, 16), *gradients(
            losses, [*form.parameters()])) for form in (compiled, model)), strict=True):
        assert_close(found, wanted, "compiled")
    assert graphs["unique_graphs"] > 1  # a trial's


@pytest.mark.parametrize("backend, T, count", [
    ("aot_eager", 8, 1 + 3), ("eager", 1, 1 + 13), (FAILS, 8, 1)])
def test_a_compiled_run_is_that_of_lesson_5_bit_for_bit(
        backend, T, count, graphs, text, tmp_path, monkeypatch, capsys):
    """It is resumed.  Only steps compile, once for each length of memory."""
    flags = *WHOLE, "--steps", "15", "--segment", f"{T}"
    monkeypatch.setattr(train, "reader_of", lambda model, plain: model)
    assert run(text, tmp_path / "plain", *flags) == 0
    with at_call(14, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert run(text, tmp_path / "run", *flags, "--compile") == 143
    assert again(tmp_path / "run", "--resume", "--compile") == 0
    assert graphs["unique_graphs"] == count
    assert ("raised: RuntimeError: is gone" in capsys.readouterr().out) == (backend is FAILS)
    assert not runs_differ(tmp_path / "plain", tmp_path / "run")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu(text, tmp_path, capsys):
    flags = ["--text", str(text), "--model", "tiny", "--steps", "4", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["recipe"]["dtype"] == "bf16"
    assert last_line(capsys).startswith("test ")
