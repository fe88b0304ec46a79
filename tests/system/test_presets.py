"""Test the settings of a run before it starts: presets, flags, estimates, the dtype."""
import os
from ast import literal_eval
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from support.download import SOURCES
from training import estimate, machine, presets
from training.flags import PRETRAINED, Flags, adapt_to_vocabulary, choose_model

train, lesson_5 = map(import_module, ("train", "05_full_model"))
Config, Recipe = presets.Config, presets.Recipe
VOCABULARIES = {"enwik8": 204, "text8": 27, "wt103": 267_735, "lm1b": 793_471, "ptb": 10_000,
                "tinyshakespeare": 65}
WT103 = 20_000, 40_000, 200_000
BANDS = {"wt103": WT103, "lm1b": (60_000, 100_000, 640_000), "laptop-words": (2000,)}

# A row has the values of the authors' scripts, or ours, in the order of the fields: name, N, D, H,
# C, FF, M, dropouts, number of parameters; B, T, steps, rate, warm-up; evaluation T, M and clamp
PUBLISHED = """
enwik8-12L     12  512  8  64 2048 512  .1  .0  41055436  22 512  400000 2.5e-4     0  80 2100  820
enwik8-18L     18  640 10  64 2208 512  .1  .0  87965708  22 512  400000 2.5e-4  4000  80 2100  820
enwik8-24L     24 1024  8 128 3072 768 .15 .15 277231820  64 768  400000 2.5e-4  4000 128 3800 1000
text8-12L      12  512  8  64 2048 512  .1  .0  40964635  22 512  400000 2.5e-4     0  80 2100  820
text8-24L      24 1024  8 128 3072 768 .15 .15 277050395  64 768  400000 2.5e-4  4000 128 3800 1000
wt103-standard 16  410 10  41 2100 150  .1  .0 151107538  60 150  200000 2.5e-4     0  64  640  400
wt103-large    18 1024 16  64 4096 384  .2  .2 285205322 128 384 4000000 2.5e-4 16000 128 1600 1000
lm1b-base      18 1024  8 128 4096  32  .0  .0 357812082 224  32  500000 2.5e-4 20000  32  128    0
lm1b-medium    20 1024  8 128 6144  32  .0  .0 469020530 224  32  500000 2.5e-4 20000  32  128    0
lm1b-large     24 1280 16  80 8192  32 .05 .05 841354862 512  32 1200000   1e-4 30000  32  128    0
ptb            16  380 10  38  704  70  .2  .2  23965064  10  70  166000   3e-4  3000  70  280    0
laptop          4  128  2  64  512 128  .0  .0    883277  16 128       0   .012    20 512  256    0
laptop-words    4  128  2  64  512  64  .1  .0   2146961  32  64       0   3e-3    50  64  128    0
"""
OURS = {  # optimizer, decay, steps between validations, their tokens, ..., short steps, clip
    "ptb": ("adam", "cosine", 1328, 0, 100, 0, 0, 0.25),
    "laptop": ("muon", "sqrt", 0, 20_000, 50, 4.2, 200, 1.0),
    "laptop-words": ("muon", "sqrt", 500, 20_000, 50, 10, 0, 0.25)}


@pytest.mark.parametrize("row", PUBLISHED.strip().split("\n"), ids=lambda row: row.split()[0])
def test_every_field_and_number_of_parameters_is_the_published_one_or_ours(row):
    """No field is left to its default; counting allocates no weights."""
    name, *numbers = row.split()
    dataset = {"laptop": "stdlib", "laptop-words": "ptb"}.get(name, name.split("-")[0])
    large, numbers = "-large" in name, [*map(literal_eval, numbers)]
    count, words = numbers.pop(8), dataset in ("wt103", "lm1b")
    optimizer, decay, *often, clip = OURS.get(
        name, ("adam", "cosine", 4000, 0 if words else 500_000, 200, 0, 0, 0.25))
    assert [*vars(presets.CONFIGS[name]).values()] == [
        VOCABULARIES.get(dataset, 205), *numbers[:8], BANDS.get(name, BANDS.get(dataset, ())),
        4 if name == "wt103-large" or dataset == "lm1b" else 1, dataset != "lm1b", large,
        0.005 if large else 0.02, False, 0]
    assert [*vars(presets.RECIPES[name]).values()] == [
        dataset, *numbers[8:], optimizer, 0.02, decay, *often, "", False, 0, clip, 10, 0,
        "auto", False]
    with torch.device("meta"):
        model = lesson_5.TransformerXL(presets.CONFIGS[name])
    assert sum(W.numel() for W in model.parameters()) == count


def test_the_benchmarks_have_the_published_files_and_counts():
    """One of lm1b's 100 shards is held out, and the first of its 50 parts is read."""
    assert {name: (*source.counts, source.counted) for name, source in SOURCES.items()
            if source.counts} == {"wt103": (103_227_021, 217_646, 245_569, 1), "wikitext-2": (
                2_088_628, 217_646, 245_569, 3), "ptb": (929_589, 73_760, 82_430, 3)}
    *shards, heldout, _ = (file.name.split("/")[-1] for file in SOURCES["lm1b"].files)
    assert shards == [f"news.en-{i:05}-of-00100" for i in range(1, 100)]
    assert heldout == "news.en.heldout-00000-of-00050"


@pytest.mark.parametrize("typed, device, V, name, cutoffs, div_val", [
    ({"dataset": "wt103"}, "cuda", 267_735, "wt103-standard", WT103, 1),
    ({"dataset": "wt103"}, "cpu", 267_735, "laptop-words", WT103, 4),
    ({"dataset": "wt103", "cutoffs": (5, 9), "div_val": 2}, "cpu", 267_735, "laptop-words", (5, 9),
     2), ({"dataset": "ptb"}, "cpu", 10_000, "laptop-words", (2000,), 1),
    ({"model": "wt103-large", "dataset": "enwik8"}, "cpu", 205, "wt103-large", (), 1),
    ({"model": "tiny", "dataset": "wt103"}, "cpu", 267_735, "tiny", WT103, 2)], ids=str)
def test_a_model_fits_its_device_and_its_vocabulary(typed, device, V, name, cutoffs, div_val):
    """Without a GPU a benchmark trains a small model; bands beyond the vocabulary are dropped."""
    typed = dict(typed)
    flags = Flags(model=typed.pop("model", ""), typed=typed)
    found, config, _ = choose_model(flags, device)
    config = adapt_to_vocabulary(config, V, flags)
    assert (found, config.vocab_size, config.cutoffs, config.div_val) == (name, V, cutoffs, div_val)


def test_help_shows_choices_and_defaults(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    for words in ("auto|float32|bf16", "(default: 0.012)", "(default: 40)",
                  "largest norm of the gradient", "of hidden states", "an estimated 2.2 to 3"):
        assert words in output


def test_flops_equal_torchs_count():
    """The estimate omits only the projection of R, which all lanes share."""
    B, T = 5, 9
    config = Config(53, n_layer=2, d_model=24, n_head=3, d_head=10, d_inner=44, mem_len=7)
    x = torch.randint(11, (B, T))
    memory = [torch.randn(B, 7, 24) for _ in range(2)]
    model = lesson_5.TransformerXL(config)
    with FlopCounterMode(display=False) as counter:
        model(x, memory, x)
    R = 2 * 2 * (7 + T) * 24 * 30
    assert counter.get_total_flops() == estimate.flops_per_step(config, B, T) / 3 + R


@pytest.mark.parametrize("flags, words", [
    ("--model wt103-standard", [
        "151,107,538", f" {4 * 151_107_538:,} of weights", f"{8 * 151_107_538:,} of Adam's",
        "9,000 (60 lanes of 150)", "200,000 (1,800,000,000 tokens, ",
        f" {60 * 150 * 410 * 16 * 4:,} of the full memory",
        f" {4 * (10 * 151_107_538 + 3 * 60 * 150 * 410 * 16):,} on disk during a save"]),
    ("--model laptop --text notes.txt", ["as many as 4.2 minutes give", "vocabulary 3\n"]),
    ("--model enwik8-12L --drop-newlines --optimizer muon", [
        "41,055,436\n", f"{8 * 41_055_436 - 48 * 512 * (5 * 512 + 2 * 2048):,} of Muon's moments"]),
    (f"--init {PRETRAINED} --text notes.txt", ["laptop on ", "2,918,954\n"]),
    *((f"--dataset {name}", [f" on {name}, vocabulary {V:,}\n"])
      for name, V in (VOCABULARIES | {"enwik8": 205}).items())])
def test_a_dry_run_fetches_nothing(flags, words, tmp_path, monkeypatch, capsys):
    """It fetches no vocabulary either; it reads the user's text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", None)
    (tmp_path / "notes.txt").write_text("abc" * 40)
    assert train.main(["--dry-run", "--device", "cpu", *flags.split()]) == 0
    output = capsys.readouterr().out
    assert all(part in output for part in words), output
    assert os.listdir() == ["notes.txt"]


def test_a_gpu_that_emulates_bf16_trains_in_float32(monkeypatch):
    """There float32 products may use TF32, in training and in evaluation."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: (
        including_emulation))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    assert machine.choose() == "cuda" and seen == ["high"]
    assert machine.choose_dtype(Recipe(steps=1), None, "cuda").dtype == "float32"
    assert machine.choose_dtype(Recipe(steps=1, dtype="bf16"), None, "cuda").dtype == "bf16"
