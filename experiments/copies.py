"""A text whose dependencies have a known length: each symbol comes back after so many tokens.

Real text of this size has little beyond some hundred tokens, and nobody knows how much a model
should find there.  Here everything is known.  Four kinds of symbols, eight of each, take turns; a
token is, with probability KEPT, the symbol that stood one of DISTANCES before, its kind's own, and
else one of its kind drawn at random:

    kind               A        a        M        m        A        a        M        m   ...
    repeats what was   24       48       72       96       24       48       72       96  tokens ago

So c tokens of context tell all about the kinds with a distance of at most c, and nothing about the
others, and the lowest loss after c tokens, `best_loss`, is exact: it falls by a step at each
distance and is flat behind the last.

    python experiments/copies.py      the beginning of the text
"""
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support.corpora import Corpus

DISTANCES = (24, 48, 72, 96)  # multiples of the number of kinds: there stands the same kind
EACH, KEPT = 8, 0.9
VOCABULARY = [ord(symbol) for symbol in "ABCDEFGHabcdefghMNOPQRSTmnopqrst"]


def text(n, seed):
    """Tokens (n,) uint8: numbers of VOCABULARY."""
    draw, tokens = random.Random(seed), []
    for t in range(n):
        kind = t % len(DISTANCES)
        back = t - DISTANCES[kind]
        tokens.append(tokens[back] if back >= 0 and draw.random() < KEPT
                      else EACH * kind + draw.randrange(EACH))
    return torch.tensor(tokens, dtype=torch.uint8)


def corpus(n=1_000_000):
    """The text as a Corpus: n tokens to train on, a twentieth each to validate and to test."""
    return Corpus(text(n, 0), text(n // 20, 1), text(n // 20, 2), VOCABULARY,
                  f"copies (distances {', '.join(map(str, DISTANCES))})")


def best_loss(c):
    """The lowest mean loss that c tokens of context allow, in nats a token."""
    right = KEPT + (1 - KEPT) / EACH  # the probability of the symbol that stood there
    other = (1 - KEPT) / EACH  # and of each of the others
    known = -right * math.log(right) - (EACH - 1) * other * math.log(other)
    return sum(known if d <= c else math.log(EACH) for d in DISTANCES) / len(DISTANCES)


if __name__ == "__main__":
    print(bytes(VOCABULARY[token] for token in text(300, 0)).decode())
