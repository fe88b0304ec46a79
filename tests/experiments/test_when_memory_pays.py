"""when_memory_pays: the copying score, the notes beside a run, and the steps read from them.

    pytest tests/experiments/test_when_memory_pays.py
"""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

when, common = import_module("when_memory_pays"), import_module("common")
corpora, job, presets = (import_module(name) for name in (
    "support.corpora", "training.job", "training.presets"))


class Copier:
    """In the place of a Reader: 0 nats where x stood before with y after it, otherwise 2."""

    u = torch.zeros(1)

    def __call__(self, x, memory, y):
        losses = torch.full(x.shape, 2.0)
        for lane, (one, next_one) in enumerate(zip(x.tolist(), y.tolist())):
            seen = {}
            for i, pair in enumerate(zip(one, next_one)):
                losses[lane, i] = 0.0 if seen.get(pair[0]) == pair[1] else 2.0
                seen[pair[0]] = pair[1]
        return losses, None


def test_one_who_copies_has_a_score_and_one_who_does_not_has_none():
    """In 8 of 10,000 tokens hardly any comes twice by chance."""
    assert when.copying_score(Copier(), 10_000, 8) == pytest.approx(-2.0, abs=0.02)
    model = common.lesson_5.TransformerXL(common.lesson_5.CONFIGS["tiny"]).eval()
    assert when.copying_score(model, 50, 8) == pytest.approx(0.0, abs=0.01)


@pytest.fixture
def noted(notes, tmp_path):
    """A job on the notes, its study, and a NotingReader for it."""
    corpus, study = corpora.load(str(notes)), when.SCALES["tiny"]
    config = replace(study.config, vocab_size=len(corpus.vocab))
    model = common.lesson_5.TransformerXL(config).eval()
    work = job.Job(tmp_path, "a run", model, study.recipe, corpus)
    return work, study, when.NotingReader(work, study)


def test_the_notes_change_no_loss_and_hold_those_of_each_length(noted):
    """A validation with a NotingReader is one with a Reader, and each has its line."""
    work, study, reader = noted
    tokens = work.corpus.valid[:60]
    plain = common.fast.prepared(work.model)
    wanted = common.train.evaluate(plain, tokens, study.recipe)
    assert common.train.evaluate(reader, tokens, study.recipe) == wanted
    work.state.step = 3
    common.train.evaluate(reader, tokens, study.recipe)
    found = when.read_notes(work.path)
    pieces = common.excerpts(work.corpus.valid, 16, study.count, study.n, "cpu")
    losses = [common.memory_losses(plain, pieces, 16, 128, mem_len=M, same_length=True).mean()
              for M in study.lengths]
    assert list(found) == [0, 3] and found[3][:-1] == pytest.approx([z.item() for z in losses])


def test_a_validation_that_is_repeated_after_a_kill_counts_once(tmp_path):
    (tmp_path / "notes.tsv").write_text("0\t2.0\t1.5\t0\n10\t9\t9\t9\n10\t1.0\t0.5\t-1\n")
    assert when.read_notes(tmp_path) == {0: (2.0, 1.5, 0.0), 10: (1.0, 0.5, -1.0)}


def test_the_first_step_is_that_after_which_it_stays(tmp_path):
    """A single step in between does not count; and it may never be."""
    notes = {step: (value, 0.0, 0.0) for step, value in ((0, 0), (1000, 1), (2000, 0), (3000, 1),
                                                         (4000, 1))}
    assert when.first_step(notes, lambda z: when.gain(z) > 0.5) == "3,000"
    assert when.first_step(notes, lambda z: when.gain(z) > 1.5) == "-"
    assert when.first_step(notes, lambda z: when.gain(z) > -1) == "0"
