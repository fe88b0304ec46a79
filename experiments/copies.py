"""A text whose dependencies have a known length: a name comes back after so many tokens.

Real text of this size has little beyond a few hundred tokens, and nobody knows how much a model
should find there.  Here everything is known.  The text comes in groups of eight tokens:

    NAME f f f marker copy f f      NAME is drawn from NAMES names, f from four fillers

In half of the groups the marker names one of DISTANCES, and the copy is the name that stood this
many tokens before, in lower case; in the others two more fillers stand in their place.  No name is
copied twice, so a context of c tokens tells all about the copies with a distance of at most c, and
nothing about the others: the best loss after c tokens, `best_loss`, is exact.  It falls by a step
at each distance and is flat behind the last.

    python experiments/copies.py      the beginning of the text
"""
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from corpora import Corpus

NAMES, GROUP, PLACE = 8, 8, 5  # where in its group a copy stands
DISTANCES = (21, 45, 69, 93)  # PLACE more than a multiple of GROUP: there stands a name
VOCABULARY = [ord(symbol) for symbol in "ABCDEFGHabcdefgh1234.,;:"]
MARKERS, FILLERS = 2 * NAMES, 2 * NAMES + len(DISTANCES)


def text(n, seed):
    """n groups -> tokens (8 n,) uint8: numbers of VOCABULARY."""
    draw, tokens, copied = random.Random(seed), [], set()
    for group in range(n):
        tokens += [draw.randrange(NAMES)] + [FILLERS + draw.randrange(4) for _ in range(7)]
        place = GROUP * group + PLACE
        free = [k for k, d in enumerate(DISTANCES) if d <= place and place - d not in copied]
        if free and draw.random() < 0.5:
            k = draw.choice(free)
            copied.add(place - DISTANCES[k])
            tokens[place - 1], tokens[place] = MARKERS + k, NAMES + tokens[place - DISTANCES[k]]
    return torch.tensor(tokens, dtype=torch.uint8)


def corpus(n=60_000):
    """The text as a Corpus: n groups to train on, a twentieth each to validate and to test."""
    return Corpus(text(n, 0), text(n // 20, 1), text(n // 20, 2), VOCABULARY,
                  f"copies (distances {', '.join(map(str, DISTANCES))})")


def is_copy(tokens):
    """Which of the tokens are copies, bool, of the same shape."""
    return (tokens >= NAMES) & (tokens < MARKERS)


def best_loss(tokens, c):
    """The lowest mean loss at the copies of tokens (n,) that c tokens of context allow, in nats."""
    marker = tokens[(tokens >= MARKERS) & (tokens < FILLERS)].long() - MARKERS
    return (torch.tensor(DISTANCES)[marker] > c).double().mean().item() * math.log(NAMES)


if __name__ == "__main__":
    print(bytes(VOCABULARY[token] for token in text(20, 0)).decode())
