"""The measures of a generated text by hand; what a token is drawn from; the table is true.

    pytest tests/experiments/test_generation.py
"""
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import randomized, run_examples

generation = import_module("generation")
train, corpora, study = generation.train, generation.corpora, generation.study
lesson_5 = train.lesson_5
SMALL = ["--prompts", "2", "--n-tokens", "60", "--top-k", "9", "--seeds", "3", "5"]


# ---- the measures -------------------------------------------------------------------------------

def test_the_worked_examples():
    """Those of the docstrings."""
    run_examples(generation)


@pytest.mark.parametrize("text, wanted", [
    ("_get a_bc(x) abc", [("_get", 0, 4), ("a_bc", 5, 9)]),  # three characters are no name
    ("4abcd é_abcd abc4", [("_abcd", 7, 12), ("abc4", 13, 17)]),
    (["The", "name", "@-@", "name2", "<eos>", "na-me"], [("name", 1, 2), ("name2", 3, 4)])])
def test_names(text, wanted):
    """With their places; in a list of words a name is a whole word."""
    assert generation.names(text) == wanted


#           0         1         2         3
PROMPT_1 = "cuts alpha beta_2 alpha self gamma cut"  # 38 characters


@pytest.mark.parametrize("new, back", [
    (" nothing alphas xgamma", ""), (" alpha", "alpha"), ("gamma beta_2", "beta_2"),
    (" gamma alpha gamma", "alpha gamma"), ("alpha", ""), (" self cuts cut", "")])
def test_names_that_come_back(new, back):
    """alpha ends 15 characters before the end, beta_2 21, gamma 4.  self is common; cuts and cut
    may be cut; what stands first in the new text goes on with cut, unless a blank is between.
    """
    ages = {"alpha": 15, "beta_2": 21, "gamma": 4}
    pairs = generation.come_back(PROMPT_1, PROMPT_1, new, {"self"})
    assert sorted(pairs) == sorted((age, name in back.split()) for name, age in ages.items())


def test_words_that_come_back():
    """A word is a token, so ages count words, and the first new one is no part of another."""
    prompt = ["First", "Anna", "<eos>", "saw", "Bertha", ",", "Anna", "then", "Carla", "."]
    pairs = generation.come_back(prompt, prompt, ["Anna", "saw", "First"], {"then"})
    assert pairs == [(3, True), (5, False), (1, False)]  # Anna, Bertha, Carla


def test_shares_by_age():
    """An age of T is before the last T tokens; a share of nothing is no number."""
    pairs = [(3, True), (4, False), (5, True), (6, True), (9, False)]
    assert generation.shares(pairs, 5) == [3 / 5, 1 / 2, 2 / 3]
    assert generation.shares(pairs, 4) == [3 / 5, 1, 1 / 2]
    found = generation.shares(pairs, 20)
    assert found[:2] == [3 / 5, 3 / 5] and math.isnan(found[2])
    assert all(map(math.isnan, generation.shares([], 5)))


def test_the_whole_measure():
    """Two texts: each with its own names, and by chance with those that only the other has."""
    prompts = ["- anna bert both -", "- carl dora both -"]
    texts = [" bert dora", " anna both"]  # bert; by chance dora; both; by chance anna
    own, others = generation.measure(prompts, texts, {"nobody"}, 10)
    # ages: anna 12, bert 7, both 2
    assert own[1:] == [2 / 6, 2 / 4, 0] and own[0] == 0
    assert math.isnan(others[0]) and others[1:] == [2 / 4, 1 / 2, 1 / 2]
    own, _ = generation.measure(prompts, texts, {"bert"}, 10)
    assert own[1:] == [1 / 5, 1 / 3, 0]


def test_repetition_of_all_texts():
    """The mean over the texts: n-grams are of 16 bytes, or of 4 words."""
    text = "0123456789abcdef"
    twice = [text + text, text + " " + text, "no repetition here"]  # 1 of 17, 1 of 18, 0 of 3
    own, _ = generation.measure(["-"] * 3, twice, set(), 9)
    assert own[0] == pytest.approx((1 / 17 + 1 / 18) / 3)
    own, _ = generation.measure([["-"]], [["a", "b", "c", "d"] * 2], set(), 9)
    assert own[0] == 1 / 5


# ---- the samples --------------------------------------------------------------------------------

RUN = train.Run(segment=5, steps=1, dtype="bf16", eval_mem_len=9, eval_clamp_len=7)
CONFIG = lesson_5.Config(23, n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=4)


@pytest.mark.parametrize("P", [8, 3], ids=["a longer prompt", "a shorter one"])
@pytest.mark.parametrize("memory", [True, False], ids=["with memory", "without"])
def test_each_token_is_drawn_after_what_its_kind_may_read(memory, P):
    """With memory after the whole text, read once with the lengths of evaluation; without, after
    the last T alone, with those of training.  In full precision even if the run was trained in
    bf16; the model stays as it is, so that a second call gives the same.
    """
    model, prompt = randomized(lesson_5.TransformerXL(CONFIG)).eval(), torch.randint(23, (2, P))
    given = {"n_tokens": 12, "top_k": 6, "temperature": 0.7, "seed": 4}
    sample = train.continue_text if memory else generation.without_memory
    new = sample(model, prompt, RUN, given)
    assert new.shape == (2, 12) and model.config == CONFIG and not model.training
    assert sample(model, prompt, RUN, given).equal(new)
    assert not sample(model, prompt, RUN, given | {"seed": 5}).equal(new)
    text, draws = torch.cat([prompt, new], dim=1), torch.Generator().manual_seed(4)
    if memory:
        model.config = replace(CONFIG, mem_len=9, clamp_len=7, same_length=True)
    for t in range(P, P + 12):
        logits = model(text[:, 0 if memory else max(0, t - 5) : t])[0][:, -1].detach()
        drawn = lesson_5.sample_top_k(logits, 6, 0.7, draws)
        assert drawn.equal(text[:, t : t + 1]), f"token {t}"


# ---- the experiment -----------------------------------------------------------------------------

@pytest.fixture
def watched(monkeypatch):
    """[(kind, prompt, new, run, given)] for each call of the two samplers."""
    calls = []
    for kind, module, name in (("with memory", train, "continue_text"),
                               ("without memory", generation, "without_memory")):
        def sample(model, prompt, run, given, kind=kind, real=getattr(module, name)):
            assert not model.training
            calls.append((kind, prompt, real(model, prompt, run, given), run, given))
            return calls[-1][2]
        monkeypatch.setattr(module, name, sample)
    return calls


def test_samples_and_table(run_folder, watched, tmp_path, monkeypatch, capsys):
    """Both kinds get the same prompts, seeds and flags, and the memory that was asked for.  Their
    texts are written behind the prompts; the rows are what `measure` says of them.
    """
    measured = []

    def measure(prompts, texts, common, T):
        measured.append((prompts, texts, common, T))
        k = len(measured)
        return [[k + 0.1, k + 0.2, k + 0.3, k + 0.4], [math.nan, k + 0.5, k + 0.6, k + 0.7]]

    monkeypatch.setattr(generation, "measure", measure)
    monkeypatch.setattr(generation, "COMMON", 3)
    out = tmp_path / "new" / "out"
    assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--memory", "40", "--out",
                            str(out)]) == 0
    notes = run_folder.parent / "notes.txt"
    vocab, text = corpora.load(notes).vocab, notes.read_text()
    n = len(text) // 20
    firsts = [-n, n // 2 - n]  # of the prompts, in the test split
    prompts = [text[a : a + 512] for a in firsts]
    texts = [[corpora.decode(z, vocab) for z in new] for _, _, new, *_ in watched]
    texts.append([text[a + 512 : a + 572] for a in firsts])
    names = Counter(re.findall("[a-z]{4,}", text[: -2 * n])).most_common(3)
    assert measured == [(prompts, new, {name for name, _ in names}, 16) for new in texts]
    kinds = ["with memory"] * 2 + ["without memory"] * 2 + ["true continuation"]
    written = (out / "samples.txt").read_text()
    for kind, k, new in zip(kinds, (1, 2, 1, 2, 1), texts):
        for i in (0, 1):
            assert f"prompt {i + 1}, {kind} {k}\n{prompts[i]}>>>{new[i]}\n" in written
    assert [(kind, run.eval_mem_len, given["seed"], given["top_k"]) for kind, _, _, run, given in
            watched] == [(kind, 40, seed, 9) for kind, seed in zip(kinds, (3, 5, 3, 5))]
    printed = capsys.readouterr().out
    lines = {line[:17].strip(): line[17:].split()[::3] for line in printed.splitlines()}
    assert lines["with memory"] == ["1.600", "1.700", "1.800", "1.900"]
    assert lines["without memory"] == ["3.600", "3.700", "3.800", "3.900"]
    assert lines["true continuation"] == ["5.100", "5.200", "5.300", "5.400"]
    assert lines["chance"][0] == "-" and "2.000 ± 0.500" in printed
    assert "\nM 40, T 16;" in printed and f"figure: {out / 'generation.png'}" in printed
    assert (out / "generation.png").stat().st_size > 10_000


@pytest.mark.slow
def test_words(words, tmp_path, train_tiny, monkeypatch):
    """A corpus of words: names are words, n-grams are of four."""
    train_tiny(tmp_path / "run", "--dataset", "ptb", "--data-dir", words)
    measured, measure = [], generation.measure
    monkeypatch.setattr(generation, "measure", lambda *z: measured.append(z) or measure(*z))
    assert generation.main(["--checkpoint", str(tmp_path / "run"), "--data-dir", str(words), *SMALL,
                            "--out", str(tmp_path / "out")]) == 0
    text = (words / corpora.SOURCES["ptb"].files[2].name).read_text()
    text = text.replace("\n", " <eos> ").split()
    prompts, true, *_ = measured[-1]
    assert prompts[0] == text[:512] and true[0] == text[512:572]
    assert (tmp_path / "out" / "samples.txt").read_text().count(">>>") == 10


def test_without_a_checkpoint_one_is_trained_once(tmp_path, run_folder, monkeypatch):
    """For two minutes, into --out; the second call takes it; if training fails, so do we."""
    calls, out = [], tmp_path / "out"

    def quick(flags):
        calls.append(flags)
        shutil.copytree(run_folder, out)
        (out / "curve.png").touch()  # drawn when a run has ended

    monkeypatch.setattr(train, "main", quick)
    given = generation.parse(["--out", str(out)])
    for _ in range(2):
        assert generation.load(given)[1].eval_mem_len == train.RUNS_OF["tiny"].eval_mem_len
    assert calls == [["--minutes", "2", "--out", str(out)]]
    (out / "curve.png").unlink()  # as if training had been stopped
    monkeypatch.setattr(train, "main", lambda flags: 1)
    with pytest.raises(SystemExit):
        generation.load(given)


def test_another_text_is_refused(tmp_path, run_folder, monkeypatch, capsys):
    """The prompts come from the text of the training, not from one that has its name now."""
    notes = run_folder.parent / "notes.txt"
    old = notes.read_text()
    try:
        notes.write_text(old[:-9] + "notes.\n\n\n")
        assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--out",
                                str(tmp_path / "new")]) == 1
    finally:
        notes.write_text(old)
    assert "is not the text" in capsys.readouterr().err and not (tmp_path / "new").exists()
