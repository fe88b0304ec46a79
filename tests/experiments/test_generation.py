"""The measures of a generated text by hand; without memory is really without; the table is true.

    pytest tests/experiments/test_generation.py
"""
import hashlib
import math
import random
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from statistics import mean

import pytest
import torch
from matplotlib.figure import Figure
from test_word_corpora import tarred

from helpers import assert_close, randomized, run_examples

generation = import_module("generation")
train, corpora, study = generation.train, generation.corpora, generation.study
lesson_5, checkpoint = train.lesson_5, generation.checkpoint
FLAGS = ["--model", "tiny", "--steps", "12", "--segment", "16", "--dtype", "float32", "--device",
         "cpu", "--n-tokens", "5", "--top-k", "5"]
SMALL = ["--prompts", "2", "--n-tokens", "60", "--top-k", "9", "--seeds", "3", "5"]


# ---- the measures -------------------------------------------------------------------------------

def test_the_worked_examples():
    """Those of the docstrings."""
    run_examples(generation)


@pytest.mark.parametrize("text, n, wanted", [
    ("abcdefgh", 2, 0), ("abab", 2, 1 / 3), ("aaaa", 1, 3 / 4), ("aaaa", 2, 2 / 3), ("abc", 3, 0),
    ("abc", 4, 0), ("", 1, 0), ("abcabcabc", 3, 4 / 7),
    (["to", "be", "or", "not", "to", "be"], 2, 1 / 5), (["ab", "a", "b"], 1, 0)])
def test_repetition(text, n, wanted):
    """Counted by hand: all n-grams but the first of each kind."""
    assert generation.repetition(text, n) == pytest.approx(wanted)


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


def test_a_name_that_ends_a_prompt_may_be_cut():
    """Even if it stands whole before: its last occurrence is the one at the end."""
    assert generation.come_back("a name, name", "a name, name", " name", set()) == []
    assert generation.come_back("name, name a", "name, name a", "", set()) == [(2, False)]


def test_words_that_come_back():
    """A word is a token, so ages count words."""
    prompt = ["First", "Anna", "<eos>", "saw", "Bertha", ",", "Anna", "then", "Carla", "."]
    pairs = generation.come_back(prompt, prompt, ["and", "Anna", "saw", "First"], {"then"})
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


# ---- without memory -----------------------------------------------------------------------------

RUN = train.Run(segment=5, steps=1, dtype="bf16", eval_mem_len=20)
CONFIG = lesson_5.Config(23, n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=9)


def given(**changes):
    """What without_memory is handed."""
    return {"n_tokens": 7, "top_k": 6, "temperature": 0.7, "seed": 4} | changes


@pytest.mark.parametrize("P", [8, 3], ids=["a longer prompt", "a shorter one"])
def test_each_token_comes_from_the_last_T_alone(P, monkeypatch):
    """The logits of each step are those of one pass over exactly these, and the best are drawn.
    In float32 like continue_text's, even if the run was trained in bf16.
    """
    model = randomized(lesson_5.TransformerXL(CONFIG)).float().eval()
    prompt = torch.randint(23, (2, P))
    seen, forward = [], model.forward

    def spy(x, memory=None, y=None, last_only=False):
        assert memory is None
        result = forward(x, memory, y, last_only)
        seen.append(result[0][:, -1])
        return result

    monkeypatch.setattr(model, "forward", spy)
    new = generation.without_memory(model, prompt, RUN, given())
    assert new.shape == (2, 7) and model.config == CONFIG and len(seen) == 7
    text, generator = torch.cat([prompt, new], dim=1), torch.Generator().manual_seed(4)
    for i, logits in enumerate(seen):
        window = text[:, max(0, P + i - 5) : P + i]
        assert window.shape[1] == min(5, P + i)
        whole = forward(window)[0][:, -1]  # with gradients: the plain form, not evaluation's
        assert_close(logits, whole.detach(), f"logits of step {i}", 1e-4)
        drawn = lesson_5.sample_top_k(logits, 6, 0.7, generator)
        assert drawn.equal(new[:, i : i + 1])


def test_only_with_memory_the_first_token_counts():
    """Prompts that differ before the last T only: the same text without memory, others with."""
    model = randomized(lesson_5.TransformerXL(CONFIG)).eval()
    for norm in (model.layers[-1].norm_2, model.embedding):  # else a few tokens win everywhere
        torch.nn.init.zeros_(norm.bias)
    prompt = torch.randint(23, (1, 12)).repeat(2, 1)
    prompt[1, :7] = (prompt[1, :7] + 1) % 23
    flags = given(n_tokens=30)
    for sample, same in ((generation.without_memory, True), (train.continue_text, False)):
        one, other = (sample(model, z[None], RUN, flags) for z in prompt)
        assert one.equal(other) == same
        assert one.equal(sample(model, prompt[:1], RUN, flags))  # the same seed
        assert not one.equal(sample(model, prompt[:1], RUN, flags | {"seed": 5}))
    both = generation.without_memory(model, prompt, RUN, given(n_tokens=1, top_k=1))
    assert both[0].equal(both[1])


# ---- the experiment -----------------------------------------------------------------------------

def text_of(n, seed):
    """Lines in which names are introduced, and come back for a while."""
    draw = random.Random(seed)
    known, lines = ["self"], []
    for _ in range(n):
        if draw.random() < 0.3:
            known = [*known[-6:], "".join(draw.choices("abcdefgh", k=draw.randint(4, 8)))]
        lines.append("    " + " ".join(draw.choices([*known, "self", "to"], k=5)))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A tiny model of bytes, trained for a moment."""
    folder = tmp_path_factory.mktemp("generation")
    (folder / "notes.txt").write_text(text_of(900, 0))
    assert train.main([*FLAGS, "--text", str(folder / "notes.txt"), "--out",
                       str(folder / "run")]) == 0
    return folder / "run"


def blocks_of(folder):
    """samples.txt, taken apart: [(prompt's number, kind, text's number, prompt, new text)]."""
    written = (folder / "samples.txt").read_text().removesuffix("\n")
    return [re.fullmatch(r"(?s)(?:=== )?prompt (\d), ([a-z ]+) (\d)\n(.*)>>>(.*)", z).groups()
            for z in written.split("\n\n=== ")]


def test_the_samples_are_those_of_the_model(run_folder, tmp_path, monkeypatch, capsys):
    """With the memory that was asked for, and without one; a bar counts each token."""
    bars, Bar = [], study.Bar
    monkeypatch.setattr(study, "Bar", lambda total: bars.append(Bar(total)) or bars[-1])
    assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--memory", "40", "--out",
                            str(tmp_path / "new" / "out")]) == 0
    assert [(bar.total, bar.done) for bar in bars] == [(120, 120)] * 2
    content = checkpoint.best(run_folder)
    model, run, _ = train.restored(content, "cpu")
    corpus = train.read_corpus({}, run, content)
    half = len(corpus.test) // 2
    tokens = torch.stack([corpus.test[:512], corpus.test[half : half + 512]]).long()
    wanted = {("true continuation", 1): [corpus.test[a : a + 60] for a in (512, half + 512)]}
    for k, seed in ((1, 3), (2, 5)):
        flags = given(n_tokens=60, top_k=9, temperature=1.0, seed=seed)
        wanted["with memory", k] = train.continue_text(
            model, tokens, replace(run, eval_mem_len=40), flags)
        wanted["without memory", k] = generation.without_memory(model, tokens, run, flags)
    assert not wanted["with memory", 1].equal(wanted["without memory", 1])
    assert {z[:3]: z[3:] for z in blocks_of(tmp_path / "new" / "out")} == {
        (str(i + 1), kind, str(k)): tuple(corpora.decode(z, corpus.vocab)
                                          for z in (tokens[i], texts[i]))
        for (kind, k), texts in wanted.items() for i in (0, 1)}
    out = capsys.readouterr().out
    assert (tmp_path / "new/out/samples.txt").read_text().split("\n\n===")[0] in out
    assert "\nM 40, T 16;" in out


def test_the_table_is_that_of_the_samples(run_folder, tmp_path, monkeypatch, capsys):
    """Everything is counted again from samples.txt, with other means.  A tiny model brings no name
    back, so the samples are pieces of both prompts here.
    """
    def piece(first):
        def sample(model, prompt, run, given):
            own, other = (z[:, first + 30 * given["seed"] :] for z in (prompt, prompt.flip(0)))
            return torch.cat([own[:, :20], other[:, :40]], dim=1)
        return sample

    figures = []
    monkeypatch.setattr(generation, "Figure", lambda **more: figures.append(
        Figure(**more)) or figures[-1])
    monkeypatch.setattr(generation, "COMMON", 3)
    monkeypatch.setattr(train, "continue_text", piece(0))
    monkeypatch.setattr(generation, "without_memory", piece(120))
    assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--out", str(tmp_path)]) == 0
    out, blocks = capsys.readouterr().out, blocks_of(tmp_path)
    prompts = {z[0]: z[3] for z in blocks}
    text = (run_folder.parent / "notes.txt").read_text()
    counts = Counter(re.findall("[a-z]{4,}", text[: len(text) - 2 * (len(text) // 20)]))
    common = [name for name, _ in counts.most_common(3)]
    ages = {}  # prompt -> {name: age}
    for i, prompt in prompts.items():
        inner = re.sub(r"^[a-z]+|[a-z]+$", lambda z: "." * len(z[0]), prompt)
        ages[i] = {name: 512 - inner.rindex(name) - len(name)
                   for name in re.findall("[a-z]{4,}", inner)
                   if name not in common and name != re.search("[a-z]*$", prompt)[0]}
        for name, age in ages[i].items():  # not inside another name
            assert not inner[512 - age].isalpha() and not inner[511 - age - len(name)].isalpha()

    def row(kind, k, others=False):
        """The four numbers of a kind and seed."""
        texts = {z[0]: z for z in blocks if z[1:3] == (kind, str(k))}
        grams, pairs = [], []
        for i, (*_, prompt, new) in texts.items():
            z = [new[a : a + 16] for a in range(len(new) - 15)]
            grams.append(sum(gram in z[:a] for a, gram in enumerate(z)) / len(z))
            cut = re.sub("^[a-z]+", "", new) if prompt[-1].isalpha() else new
            there = set(re.findall("[a-z]{4,}", cut))
            wanted = ages[i] if not others else {
                name: age for name, age in ages["2" if i == "1" else "1"].items()
                if name not in prompt.split()}
            pairs += [(age, name in there) for name, age in wanted.items()]
        return [None if others else mean(grams), *(
            mean([back for age, back in pairs if a <= age < b])
            for a, b in ((0, 999), (0, 16), (16, 999)))]

    wanted = {f"{kind} memory": [row(f"{kind} memory", k) for k in (1, 2)]
              for kind in ("with", "without")}
    wanted["true continuation"] = [row("true continuation", 1)]
    wanted["chance"] = [row("with memory", k, True) for k in (1, 2)]
    numbers = [mean(row[1] for row in rows) for rows in wanted.values()]
    assert 0 < min(numbers) and len(set(numbers)) == 4  # none can stand for another
    lines = {line[:17].strip(): line[17:] for line in out.splitlines()}
    for kind, rows in wanted.items():
        found = lines[kind].replace(" ± ", "±").split()
        assert found == ["-" if z[0] is None else study.spread(z).replace(" ± ", "±")
                         for z in zip(*rows)], kind
    sizes = [len(z) for z in ages.values()]
    late = sum(age < 16 for z in ages.values() for age in z.values())
    assert f"T 16; {sum(sizes)} names, {late} of them among the last T tokens" in out

    axes, = figures[0].axes
    assert axes.get_ylim()[0] == 0 and axes.get_ylabel()
    assert [z.get_text() for z in figures[0].legends[0].get_texts()] == list(wanted)
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[:4] == pytest.approx([mean(z) for z in zip(*wanted["with memory"])])
    dots = [line.get_ydata().tolist() for line in axes.lines]
    assert dots[4:8] == [pytest.approx(z) for z in zip(*wanted["without memory"])]
    assert (tmp_path / "generation.png").read_bytes()[:4] == b"\x89PNG"


def test_both_kinds_get_the_same(run_folder, tmp_path, monkeypatch, capsys):
    """Prompts, seeds and flags; a file is as good as its folder; M is the run's by default."""
    calls = []

    def spy(kind):
        def sample(model, prompt, run, given):
            assert not model.training
            calls.append((kind, prompt, run.eval_mem_len, given["seed"], given["top_k"],
                          given["temperature"]))
            return prompt[:, : given["n_tokens"]]
        return sample

    monkeypatch.setattr(train, "continue_text", spy("with"))
    monkeypatch.setattr(generation, "without_memory", spy("without"))
    assert generation.main(["--checkpoint", str(run_folder / "best.pt"), *SMALL, "--temperature",
                            "0.5", "--out", str(tmp_path)]) == 0
    M = train.RUNS_OF["tiny"].eval_mem_len
    assert [(kind, *more) for kind, _, *more in calls] == [
        (kind, M, seed, 9, 0.5) for kind in ("with", "without") for seed in (3, 5)]
    assert all(prompt.equal(calls[0][1]) and prompt.shape == (2, 512) for _, prompt, *_ in calls)
    assert "temperature 0.5" in capsys.readouterr().out


def test_no_prompt_longer_than_T(run_folder, tmp_path, monkeypatch, capsys):
    """Then no name was last seen before the last T: no number, and a figure all the same."""
    monkeypatch.setattr(generation, "PROMPT", 16)
    monkeypatch.setattr(generation, "COMMON", 3)
    assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line[:4] in ("with", "true", "chan")] == ["-"] * 4
    assert (tmp_path / "generation.png").exists()


@pytest.mark.slow
def test_words(tmp_path, monkeypatch, capsys):
    """A corpus of words: names are words, n-grams are of four."""
    lines = text_of(500, 1).splitlines()
    texts = [lines, lines[200:250], lines[250:500]]
    data = tarred({corpora.SOURCES["ptb"].folder + file.name: "\n".join(z).encode() + b"\n"
                   for file, z in zip(corpora.SOURCES["ptb"].files, texts)})
    source = corpora.SOURCES["ptb"]
    (tmp_path / source.archive.name).write_bytes(data)
    monkeypatch.setitem(corpora.SOURCES, "ptb", source._replace(
        archive=source.archive._replace(
            size=len(data), checksum="sha256:" + hashlib.sha256(data).hexdigest()),
        files=tuple(file._replace(size=None, checksum=None) for file in source.files), counts=()))
    monkeypatch.setattr(generation, "COMMON", 3)
    measured, measure = [], generation.measure
    monkeypatch.setattr(generation, "measure", lambda *z: measured.append(z) or measure(*z))
    root = ["--data-dir", str(tmp_path)]
    assert train.main([*FLAGS, "--dataset", "ptb", *root, "--out", str(tmp_path / "run")]) == 0
    assert generation.main(["--checkpoint", str(tmp_path / "run"), *root, *SMALL, "--out",
                            str(tmp_path / "out")]) == 0
    words = " <eos> ".join(texts[2]).split()
    prompts, true, common, T = measured[-1]
    assert prompts[0] == words[:512] and true[0] == words[512:572] and T == 16
    names = Counter(word for word in " ".join(lines).split() if len(word) > 3)
    assert common == {name for name, _ in names.most_common(3)}
    line = next(z for z in capsys.readouterr().out.splitlines() if z.startswith("true"))
    assert line[17:].split()[0] == f"{mean(generation.repetition(z, 4) for z in true):.3f}"
    assert (tmp_path / "out" / "samples.txt").read_text().count(">>>") == 10


@pytest.mark.slow
def test_without_a_checkpoint_one_is_trained_once(tmp_path, monkeypatch, capsys):
    """For two minutes, into --out; the second call takes it; if training fails, so do we."""
    (tmp_path / "notes.txt").write_text(text_of(900, 0))
    calls, main = [], train.main

    def quick(flags):
        calls.append(flags)
        return main([*FLAGS, "--text", str(tmp_path / "notes.txt"), *flags[2:]])

    monkeypatch.setattr(train, "main", quick)
    flags = [*SMALL, "--out", str(tmp_path / "out")]
    assert generation.main(flags) == 0 and generation.main(flags) == 0
    assert calls == [["--minutes", "2", "--out", str(tmp_path / "out")]]
    (tmp_path / "out" / "curve.png").unlink()  # as if training had been stopped
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        generation.main(flags)
    assert stopped.value.code == 1 and "--resume" in one_line(capsys, "train.py: ")


# ---- mistakes -----------------------------------------------------------------------------------

def one_line(capsys, start="generation.py: "):
    """What is on stderr, progress aside: one line."""
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    lines = [line for line in map(str.strip, lines) if line]
    assert len(lines) == 1 and lines[0].startswith(start), lines
    return lines[0]


@pytest.mark.parametrize("flags, words", [
    (["--checkpoint", "nowhere"], "no checkpoint at nowhere"),
    (["--checkpoint", "."], "no checkpoint at ."),
    (["--checkpoint", "other.txt"], "other.txt is damaged or no checkpoint"),
    (["--prompts", "9"], "take 5,148"), (["--n-tokens", "2000"], "take 5,024"),
    (["--prompts", "1"], "--prompts"), (["--n-tokens", "0"], "--n-tokens"),
    (["--top-k", "0"], "--top-k"), (["--top-k", "400"], "--top-k must be from 1 to the"),
    (["--temperature", "0"], "temperature"), (["--temperature", "nan"], "temperature"),
    (["--memory", "-1"], "--memory"), (["--seeds", "0", "-1"], "--seeds"),
    (["--seeds", "2", "2"], "--seeds must be different"), (["--seeds", str(2**64)], "--seeds"),
    (["--seeds"], "--seeds"), (["--prompts", "many"], "many"), (["--prompt", "3"], "--prompt"),
    (["--out", "other.txt"], "other.txt")])
def test_a_mistake_is_one_line_and_leaves_nothing(flags, words, run_folder, tmp_path, monkeypatch,
                                                  capsys):
    """Status 1, the flag or number that is wrong, and no file more."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("no checkpoint")
    monkeypatch.setattr(train, "main", lambda flags: 1 / 0)
    base = ["--checkpoint", str(run_folder), *SMALL, "--out", "new"]
    assert generation.main([*base, *flags]) == 1
    assert words in one_line(capsys)
    assert [path.name for path in tmp_path.rglob("*")] == ["other.txt"]


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
    assert "is not the text" in one_line(capsys) and not (tmp_path / "new").exists()
