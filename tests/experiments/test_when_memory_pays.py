"""when_memory_pays: the copying score, the notes beside a run, and the steps read from them."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

when, common = import_module("when_memory_pays"), import_module("common")
corpora, job = import_module("support.corpora"), import_module("training.job")


class Stub(torch.nn.Module):
    """In the place of a Reader: 0 nats where known(x, y, pairs seen) is true, otherwise 2."""

    u = torch.zeros(1)
    config = common.lesson_5.CONFIGS["tiny"]

    def __init__(self, known):
        super().__init__()
        self.known = known

    def __call__(self, x, memory, y):
        losses = torch.full(x.shape, 2.0)
        for lane, pairs in enumerate(zip(x.tolist(), y.tolist())):
            seen = []
            for i, pair in enumerate(zip(*pairs)):
                losses[lane, i] *= not self.known(*pair, seen)
                seen.append(pair)
        return losses, None


@pytest.mark.parametrize("known, score", [
    (lambda x, y, seen: (x, y) in seen, -2.0),  # copies
    (lambda x, y, seen: any(y in pair for pair in seen), 0.0),  # counts, in whatever order
    (lambda x, y, seen: False, 0.0)])
def test_only_one_who_copies_has_a_score(known, score):
    """In 8 of 10,000 tokens hardly any comes twice by chance."""
    assert when.copying_score(Stub(known), 10_000, 8) == pytest.approx(score, abs=0.02)


@pytest.fixture
def noted(notes, tmp_path):
    """A job on the notes, its study, and a NotingReader for it."""
    corpus, study = corpora.load(str(notes)), when.SCALES["tiny"]
    config = replace(study.config, vocab_size=len(corpus.vocab))
    model = common.lesson_5.TransformerXL(config).eval()
    work = job.Job(tmp_path, "a run", model, study.recipe, corpus)
    return work, study, when.NotingReader(work, study)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_the_notes_change_no_loss_and_hold_those_of_each_length(noted, dtype):
    """Always in float32.  A validation that is repeated after a kill counts once."""
    work, study, reader = noted
    tokens, recipe = work.corpus.valid[:60], replace(study.recipe, dtype=dtype)
    plain = common.fast.prepare(work.model)
    wanted = common.train.evaluate(plain, tokens, recipe)
    for step in (0, 3, 3):
        work.state.step = step
        assert common.train.evaluate(reader, tokens, recipe) == wanted
    found = when.read_notes(work.path)
    pieces = common.excerpts(work.corpus.valid, 16, study.count, study.n, "cpu")
    losses = [common.memory_losses(plain, pieces, 16, 128, mem_len=M, same_length=True).mean()
              for M in study.lengths]
    score = when.copying_score(plain, len(work.corpus.vocab), 2)
    assert list(found) == [0, 3] and score != 0
    assert found[3] == [*(z.item() for z in losses), score]


def test_the_first_step_is_that_after_which_it_stays():
    """A single step in between does not count; and it may never be."""
    notes = {step: (value, 0.0, 0.0) for step, value in ((0, 0), (1000, 1), (2000, 0), (3000, 1),
                                                         (4000, 1))}
    assert when.first_step(notes, lambda z: when.gain(z) > 0.5) == "3,000"
    assert when.first_step(notes, lambda z: when.gain(z) > 1.5) == "-"
    assert when.first_step(notes, lambda z: when.gain(z) > -1) == "0"
