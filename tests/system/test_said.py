"""What a run says and shows is what it did, and our own presets are what was tuned.

The paper's presets stand in test_presets.py.
"""
import math
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support import corpora
from training import checkpoint, fast, log, presets, job as runs
from training.flags import Flags
from training.job import State

train, lesson_5 = import_module("train"), import_module("05_full_model")


# ---- our own presets ----------------------------------------------------------------------------

OURS = {  # the size and the run of each
    "tiny": ({"vocab_size": 205, "n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16,
              "d_inner": 64, "mem_len": 16},
             {"batch": 4, "segment": 16, "steps": 200, "eval_segment": 16, "eval_mem_len": 32,
              "eval_every": 100}),
    "laptop": ({"vocab_size": 205, "n_layer": 4, "d_model": 128, "n_head": 2, "d_head": 64,
                "d_inner": 512, "mem_len": 128},
               {"dataset": "stdlib", "batch": 16, "segment": 128, "minutes": 4.2, "lr": 0.012,
                "optimizer": "muon", "muon_lr": 0.02, "schedule": "sqrt", "warmup": 20,
                "clip": 1.0, "eval_segment": 512, "eval_mem_len": 512, "eval_clamp_len": 0,
                "eval_every": 0, "eval_tokens": 20_000}),
    "laptop-words": ({"vocab_size": 10_000, "n_layer": 4, "d_model": 128, "n_head": 2,
                      "d_head": 64, "d_inner": 512, "mem_len": 64, "dropout": 0.1,
                      "cutoffs": (2000,)},
                     {"dataset": "ptb", "batch": 32, "segment": 64, "minutes": 10, "warmup": 50,
                      "optimizer": "muon", "schedule": "sqrt", "eval_segment": 64,
                      "eval_mem_len": 128, "eval_every": 500, "eval_tokens": 20_000}),
    "ptb": ({"vocab_size": 10_000, "n_layer": 16, "d_model": 380, "n_head": 10, "d_head": 38,
             "d_inner": 704, "mem_len": 70, "dropout": 0.2, "dropout_attention": 0.2},
            {"dataset": "ptb", "batch": 10, "segment": 70, "steps": 166_000, "lr": 3e-4,
             "warmup": 3000, "eval_segment": 70, "eval_mem_len": 280, "eval_every": 1328,
             "eval_tokens": 0, "log_every": 100})}


@pytest.mark.parametrize("name", OURS)
def test_our_own_presets(name):
    """What is not written here is at its default."""
    for found, wanted in zip((presets.CONFIGS[name], presets.RECIPES[name]), OURS[name]):
        assert {key: getattr(found, key) for key in wanted} == wanted
        assert not [z.name for z in fields(found)
                    if getattr(found, z.name) != z.default and z.name not in wanted]


def test_what_each_dataset_trains():
    assert presets.DATASETS.items() >= {
        "stdlib": ("laptop", "laptop"), "copies": ("laptop", "laptop"),
        "enwik8": ("enwik8-12L", "laptop"), "text8": ("text8-12L", "laptop"),
        "wt103": ("wt103-standard", "laptop-words"), "lm1b": ("lm1b-base", "laptop-words"),
        "ptb": ("ptb", "laptop-words"), "wikitext-2": ("ptb", "laptop-words")}.items()


# ---- the log line, the curve, the compressors ---------------------------------------------------

@pytest.mark.parametrize("now, said", [(4.9, ""), (5.1, (
    "step 30 | 25% | loss of this step 2.885 bpc | 90 tok/s | 1m40s, 5m00s left | 2 steps "
    "skipped\n"))])
def test_the_log_line_by_a_clock(now, said, monkeypatch, capsys):
    """After five seconds at the earliest; of 100 seconds a quarter is done, so 300 are left."""
    metrics = log.Log()
    metrics.unit, metrics.last_printed = "bpc", 0.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    state = State(step=30, tokens=9000, seconds=100.0, skipped=2)
    metrics.training(state, presets.Recipe(steps=120, log_every=7), 0.1, 2.0, 0.5, 0.25)
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("unit, scale, bottom", [("bpc", "linear", True), ("ppl", "log", False)])
def test_the_curve_shows_both_losses_over_the_tokens(unit, scale, bottom, tmp_path, monkeypatch):
    path, drawn = tmp_path / "metrics.tsv", []
    path.write_text("# python train.py\nstep\n10\t1000000\t5\t0.1\t1\t3.5\t4\t0\t\n"
                    "20\t2000000\t9\t\t\t\t\t\t3.25\n30\t3000000\t9\t0.1\t1\t2.5\t4\t0\t\n")
    monkeypatch.setattr(log.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    log.draw(path, SimpleNamespace(unit=unit, name="notes (a text)"))
    (axes,) = drawn[0].axes
    assert [[list(map(float, z)) for z in line.get_data()] for line in axes.lines] == [
        [[1, 3], [3.5, 2.5]], [[2], [3.25]]]
    assert [line.get_label().split(",")[0] for line in axes.lines] == ["training", "validation"]
    assert axes.get_xlim()[0] == 0 and (axes.get_ylim()[0] == 0) == bottom
    assert axes.get_yscale() == scale and "tokens" in axes.get_xlabel()


def test_compressors_read_the_test_split(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(log, "compressed_bits", lambda corpus: {"zlib": 7})
    corpus = SimpleNamespace(unit="bpc", vocab=b"ab", test=torch.zeros(7), valid=torch.zeros(5),
                             train=torch.zeros(90))
    log.print_next_steps(
        tmp_path, presets.Recipe(steps=1), corpus, torch.tensor([0, 1]), torch.tensor([1]))
    said = capsys.readouterr().out
    assert "zlib 7.0000" in said and "\nab>>>b\n" in said


# ---- how a run begins, and what it calls --------------------------------------------------------

@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"{i * i % 97} " for i in range(150)))
    return path


def flags_of(notes, **more):
    return Flags(model="tiny", out=str(notes.parent / "run"), device="cpu", n_tokens=2,
                 typed={"text": str(notes), "steps": 3, "dtype": "float32", "segment": 8} | more)


def opened(flags):
    """The job that train.py opens."""
    path = Path(flags.out)
    return runs.open_job(path, partial(train.make_job, flags, "cpu", path), flags.resume)


def test_a_run_says_what_is_done_and_continues_the_test_split(notes, monkeypatch):
    """The log line comes after the step that it is about; at the end the curve is drawn."""
    done, shown, drawn = [], [], []
    monkeypatch.setattr(log.Log, "training", lambda *given: done.append(given[-1]))
    monkeypatch.setattr(log, "draw", lambda path, corpus: drawn.append(path))
    monkeypatch.setattr(log, "print_next_steps", lambda out, recipe, corpus, prompt, new: (
        shown.append(corpora.decode(prompt, corpus.vocab))))
    assert train.train(flags_of(notes), torch.device("cpu")) == 0
    assert done == [1 / 3, 2 / 3, 1] and drawn == [notes.parent / "run" / "metrics.tsv"]
    text = notes.read_text()
    assert text.endswith(shown[0]) and len(shown[0]) == len(text) // 20


@pytest.mark.parametrize("plain", [False, True])
def test_a_checkpoint_is_used_in_the_form_that_was_trained(plain, notes, monkeypatch, capsys):
    monkeypatch.setattr(log, "draw", lambda *given: None)
    train.train(flags_of(notes, plain=plain), torch.device("cpu"))
    asked, real = [], fast.prepared
    monkeypatch.setattr(fast, "prepared", lambda model, plain=False: (
        asked.append(plain), real(model, plain))[1])
    flags = Flags(out=str(notes.parent / "run"), eval_only=True)
    train.evaluate_or_sample(flags, torch.device("cpu"))
    assert asked[-1] is plain


def test_the_seed_is_set_before_the_weights_are_drawn(notes):
    found = []
    for _ in "ab":
        torch.manual_seed(len(found))
        with opened(flags_of(notes)) as job:
            found.append(job.model.u.clone())
    assert found[0].equal(found[1])


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_them(notes, monkeypatch):
    with opened(flags_of(notes)) as job:
        order = []
        monkeypatch.setattr(job.log, "flush", lambda: order.append("lines"))
        monkeypatch.setattr(checkpoint, "save", lambda path, *_: order.append(path.name))
        job.save()
    assert order == ["lines", "checkpoint.pt"]


def test_a_resumed_run_is_saved_so_many_minutes_after_it_began(notes, monkeypatch):
    monkeypatch.setattr(log, "draw", lambda *given: None)
    flags = flags_of(notes)
    with opened(flags) as job:
        job.state.seconds = 1000.0
        job.save()
    flags = Flags(out=flags.out, resume=True, device="cpu")
    with opened(flags) as job:
        assert job.saved_at == job.state.seconds == 1000.0 and math.isinf(job.state.lowest)
