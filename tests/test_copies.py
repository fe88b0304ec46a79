"""The text with dependencies of known length: every copy is one, and the best loss is exact.

    pytest tests/test_copies.py
"""
import math
from importlib import import_module

import pytest
import torch

copies = import_module("copies")


def test_every_copy_repeats_the_name_its_marker_points_to():
    """And no name is copied twice, so that nothing nearer tells of it."""
    tokens, sources = copies.text(2000, 3).tolist(), set()
    places = [i for i, is_copy in enumerate(copies.is_copy(torch.tensor(tokens))) if is_copy]
    assert 0.4 < len(places) / 2000 < 0.6
    for place in places:
        distance = copies.DISTANCES[tokens[place - 1] - copies.MARKERS]
        name = tokens[place - distance]
        assert place % copies.GROUP == copies.PLACE and name < copies.NAMES
        assert tokens[place] == copies.NAMES + name
        sources.add(place - distance)
    assert len(sources) == len(places)
    names = [token for token in tokens if token < copies.NAMES]
    assert len(names) == 2000 and set(names) == set(range(copies.NAMES))


def test_the_best_loss_by_hand():
    """Two copies of 21 back and one each of 45, 69: after 45 tokens one of four is unknown."""
    filler, markers = copies.FILLERS, [copies.MARKERS + k for k in (0, 0, 1, 2)]
    tokens = torch.tensor([filler, *(t for m in markers for t in (m, copies.NAMES))])
    unknown = [copies.best_loss(tokens, c) / math.log(copies.NAMES) for c in (20, 21, 44, 45, 69)]
    assert unknown == pytest.approx([1, 0.5, 0.5, 0.25, 0])


def test_the_corpus_has_three_different_parts():
    """One vocabulary, which is as large as the tokens need."""
    corpus = copies.corpus(400)
    assert [len(z) for z in (corpus.train, corpus.valid, corpus.test)] == [3200, 160, 160]
    assert not corpus.valid.equal(corpus.test) and int(corpus.train.max()) < len(corpus.vocab)
    assert len(set(corpus.vocab)) == copies.FILLERS + 4 and corpus.unit == "bpc"
