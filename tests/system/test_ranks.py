"""Several ranks are one: lanes, gradients, evaluation, checkpoints, and how they end together.

    pytest tests/system/test_ranks.py

The ranks are processes on this machine that talk through gloo, as GPUs do through NCCL.
"""
import faulthandler
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
import torch

from system.kills import differences, runs_differ
from helpers import wait_until
from training import checkpoint, log, presets, ranks

train, lesson_5 = import_module("train"), import_module("05_full_model")
ROOT = Path(train.__file__).parent
SETTINGS = presets.Recipe(steps=10, batch=4, dtype="float32", eval_segment=5, eval_mem_len=7)
FLAGS = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--segment", "8", "--mem-len",
         "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "1", "--eval-every",
         "4", "--n-tokens", "9"]


# ---- some ranks ---------------------------------------------------------------------------------

def rank_main(rank, count, port, log, function, arguments):
    """The process of one rank: what torchrun would set, then function(*arguments)."""
    file = open(f"{log}-{rank}", "w", buffering=1)
    sys.stdout = sys.stderr = file
    faulthandler.dump_traceback_later(90, file=file)  # says where a test hangs
    signal.alarm(200)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(count)}
    ranks.RANK, ranks.COUNT = rank, count
    ranks.end(function(*arguments) or 0)


def on_ranks(count, tmp_path, function, *arguments, patience=100, again=True):
    """Run function(*arguments) on so many ranks -> exit statuses, and what each has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    log.with_name("log-0").unlink(missing_ok=True)
    context = get_context("forkserver")  # a clean process that imports all this once
    context.set_forkserver_preload(["test_ranks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # and finds it
        ensure_running()
    children = [context.Process(target=rank_main, args=(r, count, port, log, function, arguments))
                for r in range(count)]
    for child in children:
        child.start()
    # not counted: the first time the server imports torch
    wait_until(log.with_name("log-0").exists, "the first rank to begin", seconds=120)
    end = time.monotonic() + patience
    for child in children:
        child.join(max(0, end - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join(10)
    said = [Path(f"{log}-{r}").read_text() for r in range(count)]
    if again and any("in init_process_group" in words for words in said):  # they have not met:
        return on_ranks(count, tmp_path, function, *arguments, again=False)  # the port was taken
    return [c.exitcode for c in children], said


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing takes longer than all else in these runs."""
    monkeypatch.setattr(log, "draw", lambda *arguments: None)


@pytest.fixture
def text(tmp_path):
    """500 bytes of text."""
    path = tmp_path / "notes.txt"
    path.write_bytes(bytes((97 + torch.randint(5, (500,))).tolist()))
    return path


def curve(folder):
    """Training and validation losses of a run."""
    return [float(row["train"] or row["valid"]) for row in
            log.read_metrics(folder / "metrics.tsv")]


def tokens(folder):
    """Tokens read at each line of metrics.tsv: those of all ranks."""
    return [row["tokens"] for row in log.read_metrics(folder / "metrics.tsv")]


# ---- arithmetic, without processes --------------------------------------------------------------

def test_lanes_are_dealt_out_in_order(monkeypatch):
    """Every lane once; a number of ranks that does not divide B is refused with those that do."""
    monkeypatch.setattr(ranks, "COUNT", 3)
    found = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "RANK", rank)
        found += range(12)[ranks.my_lanes(12)]
    assert found == list(range(12))
    with pytest.raises(ValueError, match="--batch 22 .* 3 ranks; start 1, 2, 11, 22 ranks.*--batch 21"):
        ranks.my_lanes(22)
    monkeypatch.setattr(ranks, "COUNT", 8)
    with pytest.raises(ValueError, match="start 1, 2 ranks, or use --batch 8"):
        ranks.my_lanes(2)


@pytest.mark.parametrize("environment, wanted", [
    ({}, (0, 1)), ({"RANK": "1"}, (0, 1)), ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3))], ids=str)
def test_a_rank_is_one_of_several(environment, wanted, monkeypatch):
    """RANK alone, as a cluster may leave it in the environment, says nothing."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = runpy.run_path(ranks.__file__)
    assert (found["RANK"], found["COUNT"]) == wanted


def test_ranks_agree_twice_a_step(text, tmp_path, monkeypatch):
    """On the loss in train_step; on seconds and a signal after it, and after a validation."""
    calls, reduce = [], ranks.all_reduce
    monkeypatch.setattr(ranks, "all_reduce", lambda *given: calls.append(given) or reduce(*given))
    argv = ["--text", str(text), "--steps", "8", "--out", str(tmp_path / "run")]
    assert train.main([*FLAGS, *argv]) == 0
    assert len(calls) == 2 * 8 + 2


# ---- two ranks are one --------------------------------------------------------------------------

def small_model():
    """Of lesson 5, the same on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = lesson_5.TransformerXL(lesson_5.Config(
        11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def four_steps(path, micro_batch):
    """Four steps in float64, dropout off; the first rank saves all there is to compare."""
    ranks.join("cpu")
    model, optimizer = small_model()
    stream, mine = torch.randint(11, (4, 25)), ranks.my_lanes(4)
    first = stream[mine, :6]
    learner = ranks.parallel(model, first, first)
    recipe = replace(SETTINGS, micro_batch=micro_batch)
    memory, numbers, gradients = None, [], []
    for column in range(0, 24, 6):
        x, y = stream[mine, column : column + 6], stream[mine, column + 1 : column + 7]
        loss, norm, memory = train.train_step(learner, optimizer, x, y, memory, recipe)
        numbers += [loss, norm]
        gradients += [p.grad.clone() for p in model.parameters()]
    memory = [ranks.gather(z) for z in memory]
    numbers.append(ranks.on_rank_0(train.evaluate, model, stream.flatten(), SETTINGS))
    if ranks.RANK == 0:
        torch.save([torch.tensor(numbers).double(), *memory, *model.state_dict().values(),
                    *gradients], path)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_two_ranks_are_one(tmp_path, micro_batch):
    """Losses, evaluation, the memory in the order of the stream, weights, gradients."""
    four_steps(tmp_path / "one", micro_batch)
    statuses, said = on_ranks(2, tmp_path, four_steps, tmp_path / "two", micro_batch)
    assert statuses == [0, 0], "\n".join(said)
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-9


def whole_run(argv, stop_at=0, stop_rank=0, break_at=0, where="train_step"):
    """train.main(argv); at a step, or a call of another function, one rank gets a SIGTERM, or
    fails.
    """
    real, calls = getattr(train, where), count(1)

    def step(*arguments):
        call = next(calls)
        if ranks.RANK == stop_rank and call == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if ranks.RANK == stop_rank and call == break_at:
            raise ValueError("the cables have been mixed up")
        return real(*arguments)

    setattr(train, where, step)
    log.draw = lambda *arguments: None
    return train.main(argv)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_ranks_stop_together_and_another_number_goes_on(text, tmp_path, capsys, optimizer):
    """A signal for one rank ends all after the same step; one rank goes on with all lanes."""
    argv = [*FLAGS, "--text", str(text), "--steps", "12", "--optimizer", optimizer]
    out = tmp_path / "two"
    assert train.main([*argv, "--out", str(tmp_path / "one")]) == 0
    figure = capsys.readouterr().out.split("\ntest ")[1]
    statuses, said = on_ranks(2, tmp_path, whole_run, [*argv, "--out", str(out)], 6, 1)
    assert statuses == [143, 143], said
    assert "stopped after step 6, saved; go on with" in said[0] and said[1] == ""
    content = checkpoint.load(out / "checkpoint.pt")
    assert [len(z) for z in content["state"]["memory"]] == [4] * 2 and len(content["random"]) == 2
    assert train.main(["--resume", "--out", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "saved by 2 ranks, now there are 1" in said
    assert curve(out) == pytest.approx(curve(tmp_path / "one"), abs=2e-3)
    assert tokens(out) == tokens(tmp_path / "one")
    assert float(said.split("\ntest ")[1][:6]) == pytest.approx(float(figure[:6]), abs=2e-3)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_waits_for_its_end(text, tmp_path):
    """The others wait for rank 0; after its last evaluation all must agree, too."""
    argv = [*FLAGS, "--text", str(text), "--steps", "12", "--out", str(tmp_path / "run")]
    statuses, said = on_ranks(2, tmp_path, whole_run, argv, 3, 0, 0, "evaluate")
    assert statuses == [143, 143] and "stopped after step 12, saved" in said[0]
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["state"]["validated_at"] == 12


def test_another_number_of_ranks_draws_anew(monkeypatch, capsys):
    """Each rank something else, the same again from the same seed."""
    content = {"random": torch.get_rng_state()[None], "random_cuda": None}
    monkeypatch.setattr(ranks, "COUNT", 2)
    drawn = []
    for rank, seed in ((0, 5), (1, 5), (0, 6), (1, 5)):
        monkeypatch.setattr(ranks, "RANK", rank)
        checkpoint.set_random_state(content, seed)
        drawn.append(torch.rand(1).item())
    assert drawn[1] == drawn[3] != drawn[0] != drawn[2]
    assert "saved by 1 ranks, now there are 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("count, how, statuses", [
    (4, (6, 1), [143] * 4), (2, (0, 0, 2, "evaluate"), [1, 1])], ids=["a signal", "a validation"])
def test_resumed_on_as_many_ranks_to_the_bit(count, how, statuses, text, tmp_path):
    """Dropout on: parameters, optimizer, every rank's random state, memory, metrics; after a
    signal, and after a validation that came to no end, in which no step is lost.
    """
    argv = [*FLAGS, "--text", str(text), "--steps", "12", "--dropout", "0.2",
            "--optimizer", "muon"]
    assert on_ranks(count, tmp_path, whole_run, [*argv, "--out", str(tmp_path / "whole")])[0] == (
        [0] * count)
    broken = [*argv, "--out", str(tmp_path / "broken")]
    assert on_ranks(count, tmp_path, whole_run, broken, *how)[0] == statuses
    content = checkpoint.load(tmp_path / "broken" / "checkpoint.pt")
    assert content["state"]["step"] == (6 if how[0] else 8)
    assert on_ranks(count, tmp_path, whole_run, [*broken, "--resume"])[0] == [0] * count
    assert not runs_differ(tmp_path / "whole", tmp_path / "broken")
    assert differences(content["random"][0], content["random"][1]), "each rank draws its own"


@pytest.mark.slow
def test_a_failing_rank_ends_all(text, tmp_path):
    """Within seconds, and its reason is the one that is read."""
    argv = [*FLAGS, "--text", str(text), "--steps", "12", "--out", str(tmp_path / "run")]
    statuses, said = on_ranks(2, tmp_path, whole_run, argv, 0, 1, 6, patience=30)
    assert statuses == [1, 1]
    assert said[1] == "train.py: rank 1: the cables have been mixed up\n"
    assert said[0].endswith("train.py: another rank has exited, so this one also exits\n")
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 4


@pytest.mark.slow
def test_torchrun_restarts_a_run_and_it_goes_on_by_itself(text, tmp_path):
    """A rank is killed; after the restart the run resumes; the same again would be refused."""
    killer = tmp_path / "killer.py"
    killer.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from training import ranks
from training import presets
real, calls = train.train_step, [0]
def step(*arguments):
    calls[0] += 1
    if ranks.RANK == 1 and calls[0] == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
train.train_step = step
ranks.end(train.main())
""")
    flags = [*FLAGS, "--text", str(text), "--steps", "12"]

    def torchrun(restarts, *more):
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             f"--max-restarts={restarts}", str(killer), *flags, *more], capture_output=True,
            text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert on_ranks(2, tmp_path, whole_run, [*flags, "--out", str(whole)])[0] == [0, 0]
    done = torchrun(1, "--out", str(broken))
    assert done.returncode == 0, done.stderr
    assert "going on from step 8" in done.stdout and "\ntest " in done.stdout
    assert not runs_differ(whole, broken)
    before = (broken / "checkpoint.pt").read_bytes()
    done = torchrun(1, "--out", str(broken))  # another torchrun: its restart is none of this run
    assert done.returncode != 0 and "holds a run already" in done.stderr
    assert "going on" not in done.stdout and before == (broken / "checkpoint.pt").read_bytes()
