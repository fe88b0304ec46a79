"""The measures of a generated text by hand; what a token is drawn from; the table is true.

    pytest tests/experiments/test_appendix_e_generation.py
"""
import math
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import randomized, run_examples
from training import presets

generation = import_module("appendix_e_generation")
train, corpora = generation.train, generation.corpora
lesson_5 = train.lesson_5
SMALL = ["--prompts", "2", "--n-tokens", "60", "--top-k", "9", "--seeds", "3", "5"]


# ---- the measures -------------------------------------------------------------------------------

def test_the_worked_examples():
    """Those of the docstrings."""
    run_examples(generation)


PROMPT_1 = "cuts alpha beta_2 alpha self gamma cut"  # 38 characters


@pytest.mark.parametrize("new, back", [
    (" nothing alphas xgamma", ""), (" alpha", "alpha"), ("gamma beta_2", "beta_2"),
    (" gamma alpha gamma", "alpha gamma"), ("alpha", ""), (" self cuts cut", "")])
def test_names_that_recur(new, back):
    """alpha ends 15 characters before the end, beta_2 21, gamma 4.  self is common; cuts and cut
    may be cut; what stands first in the new text goes on with cut, unless a blank is between.
    """
    ages = {"alpha": 15, "beta_2": 21, "gamma": 4}
    pairs = generation.recurring(PROMPT_1, PROMPT_1, new, {"self"})
    assert sorted(pairs) == sorted((age, name in back.split()) for name, age in ages.items())


def test_the_whole_measure():
    """Two texts: each with its own names, and by chance with those that only the other has; of all,
    of ages below T, and from T on.  A share of nothing is no number.
    """
    prompts = ["- anna bert both -", "- carl dora both -"]  # ages 12, 7 and 2
    texts = [" bert dora", " anna both"]  # bert; by chance dora; both; by chance anna
    own, others = generation.measure(prompts, texts, {"nobody"}, 7)
    assert own == [0, 2 / 6, 1 / 2, 1 / 4]
    assert others[1::2] == [2 / 4, 2 / 4] and all(map(math.isnan, others[::2]))
    own, _ = generation.measure(prompts, texts, {"bert"}, 7)
    assert own == [0, 1 / 5, 1 / 2, 0]


def test_repetition_of_all_texts():
    """The mean over the texts: n-grams are of 16 bytes, or of 4 words."""
    text = "0123456789abcdef"
    twice = [text + text, text + " " + text, "no repetition here"]  # 1 of 17, 1 of 18, 0 of 3
    own, _ = generation.measure(["-"] * 3, twice, set(), 9)
    assert own[0] == pytest.approx((1 / 17 + 1 / 18) / 3)
    own, _ = generation.measure([["-"]], [["a", "b", "c", "d"] * 2], set(), 9)
    assert own[0] == 1 / 5


# ---- the samples --------------------------------------------------------------------------------

RUN = presets.Run(segment=5, steps=1, dtype="bf16", eval_mem_len=9, eval_clamp_len=7)
CONFIG = lesson_5.Config(23, n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=4)


@pytest.mark.parametrize("memory, P", [(True, 8), (False, 8), (False, 3)])
def test_each_token_is_drawn_after_what_its_kind_may_read(memory, P):
    """With memory after the whole text, read once with the lengths of evaluation; without, after
    the last T alone, with those of training.  In full precision even if the run was trained in
    bf16; the model stays as it is, so that a second call gives the same.
    """
    model, prompt = randomized(lesson_5.TransformerXL(CONFIG)).eval(), torch.randint(23, (2, P))
    given = SimpleNamespace(n_tokens=12, top_k=6, temperature=0.7, device="cpu")

    def sample(seed):
        new = generation.sample({seed: model}, prompt, RUN, given)
        return new["with memory" if memory else "without memory"][0]

    new = sample(4)
    assert new.shape == (2, 12) and model.config == CONFIG and not model.training
    assert sample(4).equal(new) and not sample(5).equal(new)
    text, draws = torch.cat([prompt, new], dim=1), torch.Generator().manual_seed(4)
    if memory:
        model.config = replace(CONFIG, mem_len=9, clamp_len=7, same_length=True)
    for t in range(P, P + 12):
        logits = model(text[:, 0 if memory else max(0, t - 5) : t])[0][:, -1].detach()
        drawn = lesson_5.sample_top_k(logits, 6, 0.7, draws)
        assert drawn.equal(text[:, t : t + 1]), f"token {t}"


# ---- the experiment -----------------------------------------------------------------------------

def test_logits_that_overflow_are_one_line(run_folder, tmp_path, capsys, our_own):
    """Finite weights can make infinite logits, of which torch draws nothing."""
    path, checkpoint = tmp_path / "huge.pt", generation.checkpoint
    content = dict(checkpoint.best(run_folder))
    content["model"]["embedding.weight"] *= 1e30
    checkpoint.save(path, content)
    assert generation.main(["--checkpoint", str(path), "--out", str(tmp_path), *SMALL]) == 1
    assert "logits are not finite" in capsys.readouterr().err


def test_samples_and_table(run_folder, tmp_path, monkeypatch, capsys):
    """Both kinds get the same prompts of the test split, seeds, and the memory that was asked for;
    their texts are written behind the prompts, and the rows are what `measure` says of them.
    """
    calls, measured, real = [], [], generation.continued

    def continued(model, prompts, given, seed, T=0, in_turn=False):
        calls.append((seed, T, model.config.mem_len, given.top_k, in_turn))
        return real(model, prompts, given, seed, T, in_turn)

    monkeypatch.setattr(generation, "continued", continued)

    def measure(*given):
        measured.append(given)
        k = len(measured)
        return [[k + 0.1, k + 0.2, k + 0.3, k + 0.4], [math.nan, k + 0.5, k + 0.6, k + 0.7]]

    monkeypatch.setattr(generation, "measure", measure)
    monkeypatch.setattr(generation, "COMMON", 3)
    out = tmp_path / "new" / "out"
    assert generation.main(["--checkpoint", str(run_folder), *SMALL, "--memory", "40", "--out",
                            str(out)]) == 0
    assert calls == [(seed, T, M, 9, False) for seed in (3, 5) for T, M in ((0, 40), (16, 16))]
    text = (run_folder.parent / "notes.txt").read_text()
    n = len(text) // 20  # of the test split; its two prompts begin at its first and middle token
    starts = [-n, n // 2 - n]
    common = {name for name, _ in Counter(re.findall("[a-z]{4,}", text[: -2 * n])).most_common(3)}
    for prompts, new, *rest in measured:
        assert prompts == [text[a : a + 512] for a in starts] and rest == [common, 16]
    assert measured[4][1] == [text[a + 512 : a + 572] for a in starts], "the true continuation"
    written = (out / "samples.txt").read_text()
    assert f"prompt 2, without memory 1\n{prompts[1]}>>>{measured[2][1][1]}\n" in written
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {" ".join(line[:2]): line[2::3] for line in lines if "±" in line}
    assert rows["with memory"] == ["1.600", "1.700", "1.800", "1.900"]
    assert rows["without memory"] == ["3.600", "3.700", "3.800", "3.900"]
    assert rows["true continuation"] == ["5.100", "5.200", "5.300", "5.400"]
    assert (out / "generation.png").stat().st_size > 10_000


# ---- on the text of which all is known ----------------------------------------------------------

@pytest.mark.parametrize("T, read", [(0, [24] + [1] * 8), (12, [12] * 9)])
def test_a_copy_is_of_the_kind_whose_turn_it_is(T, read):
    """After a prompt read once, or from the last T: the most probable symbol of the kind."""
    model = lesson_5.TransformerXL(lesson_5.Config(
        32, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=40, same_length=True))
    for weight in model.eval().parameters():
        torch.nn.init.normal_(weight, std=2.0)  # so sharp that the best symbol is drawn always
    prompt, lengths = corpora.draw_copies(48, 1).view(2, 24).long(), []
    given = SimpleNamespace(n_tokens=9, top_k=32, temperature=1.0)
    hook = model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    new = generation.continued(model, prompt, given, 3, T, in_turn=True)
    hook.remove()
    tokens = torch.cat([prompt, new], dim=1)
    assert lengths == read and new.shape == (2, 9)
    assert (tokens[:, 24:] // corpora.EACH).equal((torch.arange(9) % 4).expand(2, -1))
    for t in range(24, 33):
        logits, _ = model(tokens[:, max(0, t - T) if T else 0 : t])
        best = logits[:, -1].unflatten(-1, (4, 8))[:, t % 4].softmax(-1).max(-1)
        sure = best.values > 0.999
        assert tokens[sure, t].equal((t % 4 * 8 + best.indices)[sure]), t
