"""Several ranks equal one in lanes, gradients, evaluation and checkpoints, and they end together.
The ranks are processes on this machine that communicate through gloo."""
import os
import runpy
import signal
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from helpers import refusal
from support import progress
from system.kills import runs_differ
from system.conftest import TINY, again, at_call
from training import checkpoint, flags, log, machine, presets, ranks

train, lesson_5 = map(import_module, ("train", "05_full_model"))
RECIPE = presets.Recipe(steps=10, batch=4, dtype="float32", eval_segment=5, eval_mem_len=7)
STOP = partial(signal.raise_signal, signal.SIGTERM)
FLAGS = [*TINY, "--eval-every", "4", "--steps", "12", "--text"]


def rank_main(rank, count, port, log, act):
    """Set the variables that torchrun would set, and call act(), in the process of one rank."""
    sys.stdout = sys.stderr = open(f"{log}-{rank}", "w", buffering=1)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(count)}
    ranks.end(act() or 0)


def on_ranks(count, tmp_path, act):
    """Call act() on `count` ranks, and return each rank's exit status and output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("forkserver")  # a clean process that imports this file once
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # lets it find this file
        ensure_running()
    children = [context.Process(target=rank_main, args=(r, count, port, tmp_path / "log", act))
                for r in range(count)]
    for child in children:
        child.start()
    end = time.monotonic() + 150
    for child in children:
        child.join(max(0, end - time.monotonic()))
        child.kill()
        child.join(10)
    return [c.exitcode for c in children], [
        (tmp_path / f"log-{r}").read_text() for r in range(count)]


def test_each_rank_has_its_own_lanes_and_dropout_and_rank_0s_dtype(text, tmp_path, monkeypatch):
    """So has each of another number of ranks that resume a run.  Only rank 0 locks the folder."""
    monkeypatch.setattr(ranks, "COUNT", 3)
    given = "tiny", lesson_5.CONFIGS["tiny"], replace(RECIPE, text=str(text), dtype="auto")
    found, seeds, locks = [], [], []
    for rank in range(3):
        monkeypatch.setattr(ranks, "RANK", rank)
        found += range(12)[ranks.my_lanes(12)]
        locks.append(checkpoint.locked(tmp_path)), locks[-1].__enter__()  # to the end of the test
        monkeypatch.setattr(ranks, "broadcast", Mock(side_effect=[None, None, RECIPE]))
        assert train.make_job(flags.Flags(), "cpu", given, tmp_path).recipe is RECIPE
        checkpoint.set_random_state(torch.zeros(2, 9), "cpu", torch.initial_seed())  # adds the rank
        seeds.append(torch.initial_seed())
    assert found == list(range(12)) and seeds == [0, 2, 4]
    with pytest.raises(ValueError, match="22 .* 3 ranks; use --batch 21"):
        ranks.my_lanes(22)


def test_only_a_program_that_joins_has_ranks(monkeypatch, capsys):
    """A cluster may set the variables; a program of one process also prints its progress."""
    for owner, name in ((ranks, "COUNT"), (ranks, "RANK"), (progress, "is_quiet"), (sys, "stdout")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # join changes them
    monkeypatch.setattr(time, "monotonic", count(0, 20).__next__)
    monkeypatch.setattr(ranks.dist, "init_process_group", begin := Mock())
    monkeypatch.setattr(torch.cuda, "set_device", choose := Mock())
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "3", "RANK": "2"})
    found = runpy.run_path(ranks.__file__)
    assert (found["COUNT"], found["RANK"]) == (1, 0)
    for size, wanted, printed in ("1", (1, 0), True), ("3", (3, 2), False):
        monkeypatch.setattr(os, "environ", {"WORLD_SIZE": size, "RANK": "2", "LOCAL_RANK": "1"})
        ranks.join("cuda")
        assert (ranks.COUNT, ranks.RANK) == wanted and list(progress.progress("ab", "letter"))
        assert ("letter 1" in capsys.readouterr().err) == printed
    choose.assert_called_once_with(1)
    begin.assert_called_once_with("cpu:gloo,cuda:nccl", timeout=timedelta(hours=2))
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "abc"})
    assert "unset WORLD_SIZE: invalid literal" in refusal(ranks.join, "cpu")


def four_steps(path, micro_batch, is_compiled=False):
    """Make four steps, maybe compiled (a trial, for 0 and 6 tokens); rank 0 saves the results."""
    ranks.join("cpu")
    torch.manual_seed(0)
    model = lesson_5.TransformerXL(lesson_5.Config(
        11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=6)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if is_compiled:
        torch.compile = partial(torch.compile, backend="aot_eager")  # needs no compiler
        machine.compile_layers(model)
    stream = torch.randint(11, (4, 25))
    mine = ranks.my_lanes(4)
    wrapped = ranks.parallel(model, stream[mine, :6], stream[mine, :6], micro_batch)
    if ranks.COUNT > 1:
        sent = []
        wrapped.register_comm_hook(None, lambda state, bucket: (
            sent.append(bucket.index()), allreduce_hook(None, bucket))[1])
    recipe = replace(RECIPE, micro_batch=micro_batch)
    memory, found = None, []
    for column in range(0, 24, 6):
        x = stream[mine, column : column + 6]
        y = stream[mine, column + 1 : column + 7]
        loss, norm, memory = train.train_step(wrapped, optimizer, x, y, memory, recipe)
        loss = ranks.mean(loss)
        found += [torch.tensor([loss, norm]), *(p.grad.clone() for p in model.parameters())]
    assert ranks.COUNT == 1 or sent == [0] * 4, "gradients were not sent once per step"
    assert not is_compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    found += [ranks.gather(past) for past in memory] + [*model.state_dict().values()]
    found.append(torch.tensor(ranks.on_rank_0(train.evaluate, model, stream.flatten(), RECIPE)))
    if ranks.RANK == 0:
        torch.save(found, path)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch, is_compiled", [(0, False), (1, False), (0, True)])
def test_two_ranks_equal_one(tmp_path, micro_batch, is_compiled):
    four_steps(tmp_path / "one", micro_batch)
    statuses, said = on_ranks(
        2, tmp_path, partial(four_steps, tmp_path / "two", micro_batch, is_compiled))
    assert statuses == [0, 0], "\n".join(said)
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-9


def fail():
    raise ValueError("the cables have been mixed up")


def whole_run(argv, number=0, act=STOP, on_rank=0, where="train_step"):
    """Run train.main(argv); in one call of a function of train.py a rank stops or fails."""
    log.draw = lambda *arguments: None
    with at_call(number, lambda: ranks.RANK == on_rank and act(), where):
        return train.main(argv)


@pytest.mark.slow
def test_ranks_stop_together_and_other_ranks_resume(text, tmp_path, capsys):
    argv = [*FLAGS, str(text), "--out"]
    out = tmp_path / "two"
    assert train.main([*argv, str(tmp_path / "one")]) == 0
    score = capsys.readouterr().out.split("\ntest ")[1]
    statuses, said = on_ranks(2, tmp_path, partial(whole_run, [*argv, str(out)], 6, on_rank=1))
    assert statuses == [143, 143], said
    assert "stopped after step 6, saved; continue with" in said[0] and said[1] == ""
    content = checkpoint.load(out / "checkpoint.pt")
    assert [len(past) for past in content["state"]["memory"]] == [4] * 2
    assert len(content["random"]) == 2
    assert again(out, "--resume") == 0
    one, two = ([float(number) for row in log.read_metrics(folder / "metrics.tsv")
                 for number in (row["tokens"], row["train"] or row["valid"])]
                for folder in (tmp_path / "one", out))
    assert two == pytest.approx(one, abs=2e-3)
    resumed = capsys.readouterr().out.split("\ntest ")[1]
    assert float(resumed[:6]) == pytest.approx(float(score[:6]), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("count, how, statuses, step", [
    (4, {"number": 6, "on_rank": 1}, [143] * 4, 6),
    (2, {"number": 2, "where": "evaluate"}, [143, 143], 8),
    (2, {"number": 2, "act": fail, "where": "evaluate"}, [1, 1], 8)],
    ids=["a signal", "a signal in a validation", "a failure in a validation"])
def test_resuming_with_the_same_ranks_is_exact(count, how, statuses, step, text, tmp_path):
    """Every rank's random state agrees too; a validation that is interrupted loses no step."""
    argv = [*FLAGS, str(text), "--dropout", "0.2", "--optimizer", "muon", "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert on_ranks(count, tmp_path, partial(whole_run, [*argv, str(whole)]))[0] == [0] * count
    found, said = on_ranks(count, tmp_path, partial(whole_run, [*argv, str(broken)], **how))
    assert found == statuses, said
    content = checkpoint.load(broken / "checkpoint.pt")
    assert content["state"]["step"] == step
    if "act" in how:  # rank 0 prints the reason
        assert said[0].endswith("train.py: the cables have been mixed up\n")
        assert said[1] == "train.py: rank 1: another rank has exited, so this one also exits\n"
    again = partial(whole_run, [*argv, str(broken), "--resume"])
    assert on_ranks(count, tmp_path, again)[0] == [0] * count
    assert not runs_differ(whole, broken)
