"""The n-gram bar: its probabilities equal sets and counts written out.

    pytest tests/experiments/test_kneser_ney.py
"""
import math
import random
import re
from importlib import import_module

import pytest

lesson = import_module("kneser_ney")
corpora = lesson.corpora


def text(n=400, V=9, seed=1):
    """A stream of words in which some follow each other more often; 0 ends a line."""
    draw, tokens = random.Random(seed), [0]
    for _ in range(n):
        tokens.append(draw.choice([(2 * tokens[-1] + 1) % V, draw.randrange(V), 3]))
    return tokens


def lines(tokens):
    """The stream as lines, each with the <eos> before it and its own."""
    ends = [i for i, word in enumerate(tokens) if word == 0]
    return [tokens[a : b + 1] for a, b in zip(ends, ends[1:] + [len(tokens)])]


def oracle(tokens, V, order, h, word):
    """p(word | h) from the definitions: every count is a search through the lines."""
    def occurrences(gram):
        return sum(tuple(line[i : i + len(gram)]) == gram and (i > 0 or len(gram) > 1)
                   for line in lines(tokens) for i in range(len(line) - len(gram) + 1))

    def grams(length):
        return {tuple(line[i : i + length]) for line in lines(tokens)
                for i in range(length == 1, len(line) - length + 1)}

    def count(gram):
        if len(gram) == order or len(gram) > 1 and gram[0] == 0:
            return occurrences(gram)
        return sum(longer[1:] == gram for longer in grams(len(gram) + 1))

    if h is None:
        return 1 / V
    table = {gram: count(gram) for gram in grams(len(h) + 1)}
    n = [sum(c == k for c in table.values()) for k in range(5)]
    D = [0, 0.5, 0.5, 0.5]
    if n[1] and n[2] and n[3]:
        Y = n[1] / (n[1] + 2 * n[2])
        exact = [0, *(k - (k + 1) * Y * n[k + 1] / n[k] for k in (1, 2, 3))]
        D = exact if all(0 < exact[k] < k for k in (1, 2, 3)) else D
    shorter = oracle(tokens, V, order, h[1:] if h else None, word)
    follow = {gram: c for gram, c in table.items() if gram[:-1] == h}
    if not follow:
        return shorter
    total, freed = sum(follow.values()), sum(D[min(c, 3)] for c in follow.values())
    c = follow.get(h + (word,), 0)
    return (c - D[min(c, 3)] + freed * shorter) / total


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_are_those_of_the_definitions(order):
    """Contexts seen and unseen, at the beginning of a line and inside."""
    tokens = text(120, 6)
    model = lesson.KneserNey(tokens, 6, order)
    draw = random.Random(0)
    seen = [context for context, _ in lesson.contexts(tokens, order)]
    unseen = [tuple(draw.randrange(1, 6) for _ in range(order - 1)) for _ in range(4)]
    for h in draw.sample(seen, 8) + unseen:
        word = draw.randrange(6)
        assert model.probability(h, word) == pytest.approx(
            oracle(tokens, 6, order, h, word), abs=1e-12), (h, word)


def test_odd_counts_leave_no_word_without_probability():
    """Where the estimated discounts would be 0, or all of a count, each is one half."""
    once = [[10 + i, 40 + i, 0] for i in range(30)]
    often = [[70 + i, 100 + i, 0] for i in range(30)] * 3
    tokens = [0] + sum(once + often + [[1, 2, 0]] * 2, [])
    model = lesson.KneserNey(tokens, 130, 2)
    assert model.discounts[2] == [0, 0.5, 0.5, 0.5]
    p = [model.probability((1,), word) for word in range(130)]
    assert min(p) > 0 and sum(p) == pytest.approx(1, abs=1e-12)


def test_the_printed_perplexity(words, capsys):
    """Of all tokens of the test split but the first."""
    names = [file.name for file in corpora.SOURCES["ptb"].files]
    train, _, test = ((words / name).read_text().replace("\n", " <eos> ").split()
                      for name in names)
    ids = {word: i for i, word in enumerate(dict.fromkeys(["<eos>", *train]))}
    train, test = ([ids[word] for word in split] for split in (train, test))
    assert lesson.main(["--data-dir", str(words), "--order", "2"]) == 0
    model = lesson.KneserNey(train, len(ids), 2)
    pairs = list(lesson.contexts(test, 2))
    nats = -sum(math.log(model.probability(*pair)) for pair in pairs) / len(pairs)
    said = re.search(r"test (\S+) ppl \(2-gram", capsys.readouterr().out)
    assert float(said[1]) == pytest.approx(math.exp(nats), abs=0.006)  # two digits
    assert len(pairs) == len(test) - 1
