"""Test training and evaluation: the loops of lessons 1 and 2, and the functions of train.py."""
import random
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn

from course import oracles
from helpers import assert_close, randomized, refusal
from support import corpora
from support.progress import progress
from training import machine, presets
from training.flags import Flags
from training.job import Job
from training.text import sentence_lanes

train, lesson_1, lesson_2, lesson_5 = map(import_module, (
    "train", "01_vanilla_segments", "02_recurrence", "05_full_model"))

RECIPE = presets.Recipe(steps=10, batch=4, segment=8, dtype="float32", eval_segment=5,
                        eval_mem_len=7, eval_clamp_len=4)


class Bigram(nn.Module):
    """Scores each token by the previous token; records the memories, and numbers its own."""

    def __init__(self, has_memory):
        super().__init__()
        self.scores = nn.Parameter(torch.linspace(-1, 1, 121).view(11, 11))
        self.has_memory, self.memories = has_memory, []

    def forward(self, x, memory=None):
        self.memories.append(memory)
        return (self.scores[x], len(self.memories)) if self.has_memory else self.scores[x]


@pytest.mark.parametrize("lesson, memories", [
    (lesson_1, [None] * 8), (lesson_2, [None, 1, 2, None, 4, 5, None, 7])], ids=["1", "2"])
def test_fit_equals_the_loop_from_the_formulas(lesson, memories):
    """Segments repeat in order; gradients are clipped, and the rate warms up and decays."""
    found, wanted = Bigram(lesson is lesson_2), Bigram(False)
    text = torch.cat([torch.full((12,), 3), torch.randint(11, (13,))])
    adam = torch.optim.Adam(wanted.parameters())
    batches = list(oracles.segments(oracles.lanes(text, 2), 4))
    norms = []
    for step in range(70):
        x, y = batches[step % len(batches)]
        loss = nn.functional.cross_entropy(wanted(x).flatten(0, 1), y.flatten())
        (gradient,) = torch.autograd.grad(loss, [wanted.scores])
        norms.append(gradient.norm())
        wanted.scores.grad = gradient * min(1, 0.25 / norms[-1])
        adam.param_groups[0]["lr"] = 0.1 * min((step + 1) / 50, 1 - step / 70)
        adam.step()
    lesson.fit(found, text, B=2, T=4, steps=70, lr=0.1)
    assert_close(found.scores, wanted.scores, "weights", tolerance=1e-4)
    assert found.memories[:8] == memories and min(norms) < 0.25 < max(norms)


@pytest.mark.parametrize("terminal, lines", [
    (True, ["", "step 1/30 ", "step 2/30 "]), (False, ["step 11/30 ", "step 22/30 "])])
def test_progress_yields_every_item_and_keeps_stdout_clean(terminal, lines, monkeypatch, capsys):
    """Progress is on stderr: one line on a terminal, and elsewhere one line per ten seconds."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("time.monotonic", iter(range(1000)).__next__)  # a slow computer
    assert list(progress(range(30), "step", 30)) == list(range(30))
    out, err = capsys.readouterr()
    assert out == "" and ("\r" in err) == terminal
    assert err.split("\r" if terminal else "\n")[: len(lines)] == lines


@pytest.mark.parametrize("dtype, wanted", [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_autocast_affects_only_matrix_products(dtype, wanted):
    matrix = torch.ones(2, 2)
    with machine.autocast(replace(RECIPE, dtype=dtype), "cpu"):
        assert (matrix @ matrix).dtype == wanted and (matrix + matrix).dtype == torch.float32
    assert (matrix @ matrix).dtype == torch.float32


def test_sampling_uses_eval_mode_and_the_evaluation_memory():
    """The prompt (P,) becomes one lane, and the recipe's seed determines the tokens (n,)."""
    model = randomized(lesson_5.TransformerXL(lesson_5.Config(
        11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=2, dropout=0.5)))
    prompt = torch.arange(9)
    generator = torch.Generator().manual_seed(5)
    flags = Flags(n_tokens=20, top_k=3, temperature=0.5)
    found = train.sample(model, prompt, replace(RECIPE, seed=5), flags)
    model.eval().config = replace(model.config, mem_len=7, same_length=True, clamp_len=4)
    assert found.equal(lesson_5.generate(model, prompt[None], 20, 3, 0.5, generator)[0])


TEXT = torch.tensor([0, 1, 2, 0, 3, 0, 4, 5, 0, 6, 7, 0])


def test_batches_of_sentences_continue_where_they_stopped():
    """Each epoch has a new order, and looking at a segment changes nothing."""
    corpus = corpora.Corpus(TEXT, TEXT, TEXT, [97], "made up", separator=0)
    model = lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"])
    made, again = (Job(None, "", model, replace(RECIPE, batch=2, segment=2, seed=5), corpus)
                   for _ in range(2))
    while made.state.epoch < 3:
        again.restore({"model": model.state_dict(), "optimizer": made.optimizer.state_dict(),
                       "state": vars(made.state), "random": torch.zeros(0)})
        made.segment(0)
        x, y = made.next_segment()
        column, epoch = made.state.column, made.state.epoch
        lanes = sentence_lanes(TEXT, 2, 0, 5, epoch)
        first = column - x.shape[1]
        assert x.equal(lanes[:, first:column].long())
        assert y.equal(lanes[:, first + 1 : column + 1].long())
        assert all(a.equal(b) for a, b in zip((x, y), again.next_segment()))
        assert again.state == made.state


@pytest.mark.parametrize("n, B", [(1, 1), (53, 8), (9, 9), (1003, 10)])
def test_lanes_of_sentences_equal_those_written_out_by_hand(n, B):
    """Lane b has the sentences order[b::B]; all lanes are as long as the shortest."""
    draw, numbers = random.Random(0), iter(range(8, 10**5))  # no word twice; 7 is the separator
    sentences = [[7, *(next(numbers) for _ in range(draw.randrange(7)))] for _ in range(n)]
    tokens = torch.tensor(sum(sentences, []) + [7], dtype=torch.int32)
    lanes = sentence_lanes(tokens, B, 7, seed=3, epoch=2)
    order = np.random.default_rng((3, 2)).permutation(n)
    wanted = [sum((sentences[i] for i in order[b::B]), []) + [7] for b in range(B)]
    L = min(map(len, wanted)) - 1
    assert lanes.dtype == torch.int32 and lanes.tolist() == [lane[: L + 1] for lane in wanted]
    message = refusal(sentence_lanes, tokens, n + 1, 7, 0, 0)
    assert message == f"--batch must be 1 to {n:,}, the number of sentences, got {n + 1}"
