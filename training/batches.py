"""The training text as batches: a run's position in the text, and the order of sentences."""
from importlib import import_module

import numpy as np
import torch

from support.progress import progress
from training import ranks

lesson_1 = import_module("01_vanilla_segments")


class Batches:
    """The segments of this rank's lanes, in the order of the text, repeatedly.

    Independent sentences (lm1b's) are in a new order in each epoch.  A resumed run passes column
    and epoch from its checkpoint.  ValueError if the text has too few tokens.
    """

    def __init__(self, corpus, recipe, device, column=0, epoch=0):
        self.corpus, self.recipe, self.device = corpus, recipe, device
        self.mine = ranks.my_lanes(recipe.batch)
        self.column = column  # where the next segment begins
        self.epoch = epoch  # complete passes over the text
        self.text_begins = False  # whether the last segment was the text's first: without context
        self.stream = self.lanes()

    def lanes(self):
        """Return the text as B lanes, (B, L + 1)."""
        if self.corpus.separator is None:
            try:
                return lesson_1.lanes(self.corpus.train, self.recipe.batch).to(self.device)
            except ValueError as error:
                raise ValueError(f"--batch {self.recipe.batch}: {error}") from None
        return sentence_lanes(self.corpus.train, self.recipe.batch, self.corpus.separator,
                              self.recipe.seed, self.epoch)

    def state(self):
        """Return the part that a checkpoint stores."""
        return {"column": self.column, "epoch": self.epoch}

    def __next__(self):
        """Return the next segment x, y (B, T), without end; the text's last one may be shorter."""
        if self.column >= self.stream.shape[1] - 1:  # the whole text has been read
            self.column = 0
            self.epoch += 1
            self.stream = None  # frees its memory first
            self.stream = self.lanes()
        self.text_begins = self.column == 0
        x, y = self.segment(self.column)
        self.column += x.shape[1]
        return x, y

    def segment(self, column):
        """Return x, y (B, T) from this column on; the position in the text does not change."""
        x, y = next(lesson_1.segments(self.stream, self.recipe.segment, column))
        return x[self.mine].to(self.device), y[self.mine].to(self.device)


def sentence_lanes(tokens, B, separator, seed, epoch):
    """Return all sentences, in a new order for each epoch, as B lanes, (B, L + 1).

    Lane b consists of every B-th sentence of the order, each as `<S> w1 ... wn`, and of the
    separator after the last one; all lanes end where the shortest one does.
    """
    starts = np.flatnonzero(tokens.numpy() == separator)
    lengths = np.diff(starts)  # of the sentences; none follows the last separator
    n = len(lengths)
    if B > n:
        raise ValueError(f"--batch must be 1 to {n:,}, the number of sentences, got {B}")
    order = np.random.default_rng((seed, epoch)).permutation(n)
    L = min(lengths[order[b::B]].sum() for b in range(B))
    stream = torch.empty(B, L + 1, dtype=tokens.dtype)
    for b in progress(range(B), "ordering the sentences of lane", B):
        sentences = [tokens[starts[i] : starts[i + 1]] for i in order[b::B]]
        stream[b] = torch.cat([*sentences, tokens[starts[-1:]]])[: L + 1]
    return stream
