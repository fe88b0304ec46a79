"""What is decided and said around a run: flags, presets, estimates, dtypes, log lines.

    pytest tests/system/test_presets.py
"""
import dataclasses
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from support import corpora
from training import estimate, log, machine, job as runs
from training.flags import MODEL_FLAGS, Flags, for_vocabulary, chosen
from training.job import State
from training import presets

train = import_module("train")
lesson_5 = import_module("05_full_model")
RUN = presets.Recipe(steps=40, dtype="auto", log_every=20)


# ---- flags and presets --------------------------------------------------------------------------

def test_every_setting_is_a_flag_with_its_help(capsys):
    """Of Recipe, of what is done, and of the sizes; choices and defaults stand beside it."""
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for field in [*dataclasses.fields(presets.Recipe), *dataclasses.fields(Flags)[:-1]]:
        assert f"--{field.name.replace('_', '-')} " in said
        assert " ".join(field.metadata["help"].split()) in said.replace("- ", "-"), field.name
        assert "|".join(field.metadata["choices"]) in said
    for name, text in MODEL_FLAGS.items():
        assert f"--{name.replace('_', '-')} " in said and text in said
    assert "(laptop: 0.012, enwik8-12L: 0.00025)" in said and "(default: 40)" in said


def test_sizes_are_those_of_lesson_5():
    """But for what the corpus or the evaluation decides, and one choice of lm1b's."""
    names = [field.name for field in dataclasses.fields(lesson_5.Config)]
    others = {"vocab_size", "tie_projections", "same_length", "clamp_len"}
    assert list(MODEL_FLAGS) == [name for name in names if name not in others]


def flags_of(given):
    """Flags with a model, and settings of a run or a size."""
    given = dict(given)
    return Flags(model=given.pop("model", ""), typed=given)


@pytest.mark.parametrize("given, device, name, cutoffs, div_val", [
    ({"model": "enwik8-12L"}, "cpu", "enwik8-12L", (), 1),
    ({"dataset": "wt103"}, "cpu", "laptop-words", (20_000, 40_000, 200_000), 4),
    ({"dataset": "wt103", "cutoffs": (5, 9), "div_val": 2}, "cpu", "laptop-words", (5, 9), 2),
    ({"dataset": "wt103"}, "cuda", "wt103-standard", (20_000, 40_000, 200_000), 1)], ids=str)
def test_what_a_benchmarks_name_trains(given, device, name, cutoffs, div_val):
    """Without a GPU a small model, with the bands of the benchmark: 267,735 words are not one
    softmax.  --model forces the paper's size, other cutoffs can be given.
    """
    found, config, _ = chosen(flags_of(given), device)
    assert (found, config.cutoffs, config.div_val) == (name, cutoffs, div_val)


@pytest.mark.parametrize("given, V, bands", [
    ({}, 205, ()), ({}, 3000, (2000,)), ({"cutoffs": (5, 9)}, 205, (5, 9))], ids=str)
def test_a_text_of_few_symbols_has_no_bands_for_rare_words(given, V, bands):
    """So the small model of words can be trained on bytes; what was asked for stays."""
    flags = flags_of({"model": "laptop-words"} | given)
    _, config, _ = chosen(flags, "cpu")
    config = for_vocabulary(config, V, flags)
    assert (config.vocab_size, config.cutoffs) == (V, bands)


@pytest.mark.parametrize("name, lengths", [  # batch, T, M, steps, warm-up, rate, evaluation
    ("enwik8-12L", (22, 512, 512, 400_000, 0, 2.5e-4, 80, 2100, 820)),
    ("enwik8-24L", (64, 768, 768, 400_000, 4000, 2.5e-4, 128, 3800, 1000)),
    ("text8-12L", (22, 512, 512, 400_000, 0, 2.5e-4, 80, 2100, 820)),
    ("wt103-standard", (60, 150, 150, 200_000, 0, 2.5e-4, 64, 640, 400)),
    ("wt103-large", (128, 384, 384, 4_000_000, 16_000, 2.5e-4, 128, 1600, 1000)),
    ("lm1b-base", (224, 32, 32, 500_000, 20_000, 2.5e-4, 32, 128, 0)),
    ("lm1b-large", (512, 32, 32, 1_200_000, 30_000, 1e-4, 32, 128, 0))])
def test_schedules_are_the_official_ones(name, lengths):
    """Of every published configuration, as one row of numbers."""
    _, config, recipe = chosen(Flags(model=name), "cpu")
    assert lengths == (
        recipe.batch, recipe.segment, config.mem_len, recipe.steps, recipe.warmup, recipe.lr,
        recipe.eval_segment, recipe.eval_mem_len, recipe.eval_clamp_len)
    assert recipe.dataset == name.split("-")[0]
    assert (recipe.optimizer, recipe.schedule, recipe.clip) == ("adam", "cosine", 0.25)


def test_every_model_has_a_schedule_and_every_benchmark_a_model():
    """The tables fit each other; a benchmark that has models of its own trains one of them."""
    assert presets.CONFIGS.keys() == presets.RECIPES.keys()
    assert set(presets.DATASETS) == {"stdlib", "copies", *corpora.SOURCES}
    trained = {recipe.dataset for recipe in presets.RECIPES.values()}
    assert trained <= presets.DATASETS.keys()
    for data, (large, small) in presets.DATASETS.items():
        assert {large, small} <= presets.CONFIGS.keys()
        assert data not in trained or presets.RECIPES[large].dataset == data


def test_help_and_dry_run_know_each_benchmark(capsys, monkeypatch):
    """--help names it; --dry-run counts its published vocabulary, and fetches nothing."""
    monkeypatch.setattr("urllib.request.urlopen", None)
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for name, source in corpora.SOURCES.items():
        assert re.search(rf"\b{name}\b", text)
        assert train.main(["--dry-run", "--device", "cpu", "--dataset", name]) == 0
        assert f" on {name}, vocabulary {source.vocab_size:,}\n" in capsys.readouterr().out


@pytest.mark.parametrize("library, device, asked", [
    ("glibc", "cpu", [(-4, 0), (-1, -1)]), ("glibc", "cuda", []), ("musl", "cpu", [])])
def test_what_a_step_frees_is_kept(library, device, asked, monkeypatch):
    """M_MMAP_MAX 0 and M_TRIM_THRESHOLD -1: no block is handed back; only glibc can be told."""
    calls = []
    known = {"mallopt": lambda *pair: calls.append(pair)} if library == "glibc" else {}
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace(**known))
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    machine.tune(device)
    assert calls == asked


# ---- published sizes ----------------------------------------------------------------------------

# of the official scripts, or ours where the paper gives a number of parameters only:
#                V        N   D     H   C    FF    M    dropouts   count
PUBLISHED = {
    "enwik8-12L": (204, 12, 512, 8, 64, 2048, 512, 0.1, 0.0, 41_055_436),
    "enwik8-18L": (204, 18, 640, 10, 64, 2208, 512, 0.1, 0.0, 87_965_708),
    "enwik8-24L": (204, 24, 1024, 8, 128, 3072, 768, 0.15, 0.15, 277_231_820),
    "text8-12L": (27, 12, 512, 8, 64, 2048, 512, 0.1, 0.0, 40_964_635),
    "text8-24L": (27, 24, 1024, 8, 128, 3072, 768, 0.15, 0.15, 277_050_395),
    "wt103-standard": (267_735, 16, 410, 10, 41, 2100, 150, 0.1, 0.0, 151_107_538),
    "wt103-large": (267_735, 18, 1024, 16, 64, 4096, 384, 0.2, 0.2, 285_170_506),
    "lm1b-base": (793_471, 18, 1024, 8, 128, 4096, 32, 0.0, 0.0, 357_812_082),
    "lm1b-medium": (793_471, 24, 1024, 8, 128, 4608, 32, 0.0, 0.0, 464_834_418),
    "lm1b-large": (793_471, 24, 1280, 16, 80, 8192, 32, 0.05, 0.05, 841_295_982),
    "ptb": (10_000, 16, 380, 10, 38, 704, 70, 0.2, 0.2, 23_965_064)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_parameter_counts_are_the_published_ones(name):
    """Exact, and counted without allocating: 841 million parameters would take three gigabytes."""
    c, (*sizes, count) = presets.CONFIGS[name], PUBLISHED[name]
    assert [c.vocab_size, c.n_layer, c.d_model, c.n_head, c.d_head, c.d_inner, c.mem_len, c.dropout,
            c.dropout_attention] == sizes
    assert presets.count_parameters(c) == count
    bands = {"wt103": (20_000, 40_000, 200_000), "lm1b": (60_000, 100_000, 640_000)}
    assert c.cutoffs == bands.get(name.split("-")[0], ())
    assert c.div_val == (4 if name == "wt103-large" or name.startswith("lm1b") else 1)
    assert c.tie_projections == (not name.startswith("lm1b"))
    assert (c.untie_r, c.same_length, c.clamp_len) == (False, False, 0)


def test_every_named_size_is_known_here():
    """The three for a CPU, which have no published values, and the published ones."""
    assert presets.CONFIGS.keys() - PUBLISHED.keys() == {"tiny", "laptop", "laptop-words"}


@pytest.mark.parametrize("name, count", [
    ("wt103-standard", 151_119_838), ("wt103-large", 285_205_322), ("lm1b-large", 841_354_862)])
def test_parameter_counts_of_the_released_models(name, count):
    """The released word-level weights have u and v for each layer."""
    assert presets.count_parameters(replace(presets.CONFIGS[name], untie_r=True)) == count


# ---- what a run will take -----------------------------------------------------------------------

@pytest.mark.parametrize("bands", [{}, {"cutoffs": (11, 20, 30), "div_val": 2}], ids=str)
def test_operations_are_those_that_torch_counts(bands):
    """Every matrix product of the forward pass, two operations for a multiplication and addition.

    Here all tokens are in the head, so the share that the formula gives to the tails is missing.
    """
    B, T = 5, 9
    config = lesson_5.Config(53, n_layer=2, d_model=24, n_head=3, d_head=10, d_inner=44, mem_len=7,
                             **bands)
    x, memory = torch.randint(11, (B, T)), [torch.randn(B, 7, 24) for _ in range(2)]
    model = lesson_5.TransformerXL(config)
    with FlopCounterMode(display=False) as counter:
        model(x, memory, x)
    tails = sum(width * (end - first + 2 * 24) * math.log(end / first) / math.log(53)
                for width, first, end in ((12, 11, 20), (6, 20, 30), (3, 30, 53)) if bands)
    R = 2 * 2 * (7 + T) * 24 * 30  # the formula leaves out the projection of R
    formula = estimate.flops_per_step(config, B, T) / 3 - 2 * B * T * tails + R
    assert counter.get_total_flops() == pytest.approx(formula, abs=6)


def test_a_dry_run_says_what_a_run_will_take_and_does_nothing(tmp_path, monkeypatch, capsys):
    """Parameters, memory, steps, operations, hours; nothing is fetched, no folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "load", None)
    for flags, words in (
            (["--model", "wt103-standard", "--tokens-per-second", "50000", "--out", "run"],
             ["151,107,538", "9,000 (60 lanes of 150)", "200,000 (1,800,000,000 tokens)",
              "10.0 at 50,000 tokens/s", "GB"]),
            (["--model", "laptop"], ["as many as 4.2 minutes give"]),
            (["--dataset", "copies"], ["laptop on copies, vocabulary 32"]),
            (["--model", "enwik8-12L", "--drop-newlines"], ["41,055,436"])):
        assert train.main(["--dry-run", "--device", "cpu", *flags]) == 0
        said = capsys.readouterr().out
        assert all(word in said for word in words)
    assert train.main(["--dry-run", "--device", "cpu", "--tokens-per-second", "-5"]) == 1
    assert "above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_the_vocabulary_of_a_text(tmp_path, capsys):
    """It is there already, so it is read; a benchmark would have to be fetched."""
    (tmp_path / "notes.txt").write_text("abc" * 40)
    argv = ["--dry-run", "--device", "cpu", "--model", "tiny", "--text"]
    assert train.main([*argv, str(tmp_path / "notes.txt")]) == 0
    assert "notes.txt, vocabulary 3\n" in capsys.readouterr().out
    assert train.main([*argv, str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err


def test_who_has_seen_enough_is_no_mistake(monkeypatch, capsys):
    """`train.py --dry-run | head -1` says nothing more, and its status is that of a SIGPIPE."""
    def closed(*given, **options):
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", closed)
        assert train.main(["--dry-run", "--device", "cpu"]) == 141
    assert capsys.readouterr().err == ""


def test_all_lanes_have_a_memory_however_many_are_read_at_a_time():
    """A micro-batch of half the lanes halves the activations, and gradients wait beside them."""
    config = presets.CONFIGS["enwik8-12L"]
    whole, half = (estimate.bytes_of_run(config, 41_055_949, 22, 512, "bf16", size)
                   for size in (0, 11))
    assert whole.pop("activations") == pytest.approx(2 * half.pop("activations"), abs=1)
    waiting = "gradients, beyond what the activations leave free"
    assert (whole.pop(waiting), half.pop(waiting)) == (0, 4 * 41_055_949)
    assert whole == half


def test_a_micro_batch_has_at_most_all_lanes(capsys):
    """22 lanes take what they take, also if 44 may be read at a time."""
    said = []
    for size in ("0", "22", "44"):
        assert train.main(["--model", "enwik8-12L", "--dry-run", "--micro-batch", size]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("flags", [
    "--model wt103-standard --dataset ptb", "--model wt103-large --text LICENSE",
    "--model tiny --dataset wt103", "--model wt103-large --dataset ptb"])
def test_a_model_fits_another_vocabulary(flags, monkeypatch, capsys):
    """Bands beyond it go, and with the last their narrowing; a narrow model has wider ones."""
    monkeypatch.chdir(Path(train.__file__).parent)
    assert train.main([*flags.split(), "--device", "cpu", "--dry-run"]) == 0, capsys.readouterr()


# ---- hardware -----------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio, dtype", [(1.4, "float32"), (1.6, "bf16")])
def test_bf16_is_chosen_where_products_are_clearly_faster(ratio, dtype, monkeypatch):
    """On a CPU one product of the model's size is timed; what was asked for is not."""
    seen, config = [], presets.CONFIGS["tiny"]

    def repeat(product, **options):
        seen.append(product())
        return [9.0, ratio if seen[-1].dtype == torch.float32 else 1.0, 9.0]

    monkeypatch.setattr(machine.timeit, "repeat", repeat)
    assert machine.choose_dtype(replace(RUN, batch=3, segment=5), config, "cpu") == dtype
    assert [z.shape for z in seen] == [(15, config.d_inner)] * 2
    assert machine.choose_dtype(replace(RUN, dtype="bf16"), None, "cpu") == "bf16"


def test_without_a_compiler_training_goes_on_with_one_line(monkeypatch, capsys):
    """The model as it is, and what the trial drew is not missing later."""
    def fails(model, **options):
        def call(*arguments):
            torch.rand(1)
            raise RuntimeError("no C++ compiler\nsecond line")
        return call

    model, x, before = nn.Linear(3, 3), torch.ones(2, 3), torch.get_rng_state()
    monkeypatch.setattr(torch, "compile", fails)
    assert machine.compiled(model, nullcontext(), x, x) is model
    assert torch.get_rng_state().equal(before)
    assert capsys.readouterr().out.splitlines() == [
        "compiling the training step, up to two minutes",
        "not compiled: RuntimeError: no C++ compiler"]


# ---- what a run says ----------------------------------------------------------------------------

def job_of(path):
    """As much of a run as metrics.tsv needs."""
    model = nn.Linear(2, 3)
    corpus = SimpleNamespace(unit="bpc", name="made up $1")
    return SimpleNamespace(name="toy", path=path, model=model, device=model.weight.device,
                           state=State(), corpus=corpus)


def test_metrics_are_means_since_the_last_line(tmp_path, capsys):
    """In bits per character, over the steps that were finite, the largest loss beside them; a loss
    twice the mean before it is said at once.
    """
    job, path, x = job_of(tmp_path), tmp_path / "metrics.tsv", torch.zeros(2, 3)
    metrics = log.Log()
    metrics.open(job)
    for step in range(40):
        loss = {1: 2.5, 12: 2.5, 14: math.nan}.get(step, 1.0)
        job.state.record_step(x, math.isfinite(loss), 1.0)
        metrics.training(job.state, RUN, 0.01, loss, 0.5, step / 40)
    metrics.validation(job.state, 2.0)
    metrics.close()
    bits = [f"{nats / math.log(2):.4f}" for nats in (22 / 19, 2.5, 1.0, 2.0)]
    assert [list(row.values()) for row in log.read_metrics(path)] == [
        ["20", "120", "20.0", "0.01", "0.5", *bits[:2], "1", ""],
        ["40", "240", "40.0", "0.01", "0.5", bits[2], bits[2], "1", ""],
        ["40", "240", "40.0", "", "", "", "", "", bits[3]]]
    said = capsys.readouterr().out
    assert "toy: 9 parameters on made up $1" in said and f"validation {bits[3]} bpc" in said
    assert said.count("a spike") == 1 and "step 13 | loss 3.607 bpc: a spike" in said


@pytest.mark.parametrize("unit", ["bpc", "ppl"])
def test_a_curve_is_drawn(tmp_path, monkeypatch, unit):
    """In a folder of any name: $ begins a formula in a title, digits a line of metrics.tsv; fonts
    lack many signs.
    """
    out = tmp_path / "$\\frac$ a\n5\tb 記憶"
    job = job_of(out)
    job.corpus.unit = unit
    out.mkdir()
    monkeypatch.setattr("sys.argv", ["train.py", "--out", str(out)])
    metrics = log.Log()
    metrics.open(job)
    metrics.validation(job.state, 2.0)
    metrics.close()
    assert len(log.read_metrics(out / "metrics.tsv")) == 1
    log.draw(out / "metrics.tsv", job.corpus)
    assert (out / "curve.png").stat().st_size > 1000


def test_a_loss_too_large_for_exp_is_an_infinite_perplexity():
    """A model that diverges must not end in an OverflowError."""
    assert log.in_unit(800.0, "ppl") == math.inf
    assert log.in_unit(2.0, "ppl") == pytest.approx(math.exp(2))
