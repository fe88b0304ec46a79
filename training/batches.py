"""The training text as batches: a run's position in the text, and the order of sentences.

    batches = Batches(corpus, recipe, device)
    for x, y in batches:                x, y (B, T): one segment after the other, without end
        if batches.text_begins:         the segment has no context: pass memory = None
"""
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
        self.T = recipe.segment
        self.mine = ranks.my_lanes(recipe.batch)
        self.column = column  # where the next segment begins
        self.epoch = epoch  # complete passes over the text
        self.text_begins = False  # whether the last segment was the first of the text
        self.stream = self.lanes()

    def lanes(self):
        """Return the text as B lanes, (B, L + 1)."""
        if self.corpus.separator is None:
            try:
                return lesson_1.lanes(self.corpus.train, self.recipe.batch).to(self.device)
            except ValueError as error:
                raise ValueError(f"--batch {self.recipe.batch}: {error}") from None
        return SentenceLanes(self.corpus.train, self.recipe.batch, self.corpus.separator,
                             self.recipe.seed, self.epoch)

    def state(self):
        """Return the part that a checkpoint stores."""
        return {"column": self.column, "epoch": self.epoch}

    def __iter__(self):
        return self

    def __next__(self):
        """Return the next segment x, y (B, T); the last one of the text may be shorter."""
        if self.column >= self.stream.shape[1] - 1:  # the whole text has been read
            self.column = 0
            self.epoch += 1
            if self.corpus.separator is not None:
                self.stream = None  # frees its memory first
                self.stream = self.lanes()
        self.text_begins = self.column == 0
        x, y = self.segment(self.column)
        self.column += x.shape[1]
        return x, y

    def segment(self, column):
        """Return x, y (B, T) from this column on; the position in the text does not change."""
        x, y = next(lesson_1.segments(self.stream, self.T, column))
        return x[self.mine].to(self.device), y[self.mine].to(self.device)


class SentenceLanes:
    """Sentences in a new order for each epoch, as B lanes that `segments` reads like a tensor.

    Lane b consists of every B-th sentence of the order, each as `<S> w1 ... wn`; all lanes end
    where the shortest one does.  stream[:, a:c] returns any columns, so a run can resume anywhere.
    shape is (B, L + 1).  Tokens are not copied: each sentence takes two integers.
    """

    def __init__(self, tokens, B, separator, seed, epoch):
        self.tokens, self.lanes = tokens, []
        starts = np.flatnonzero(tokens.numpy() == separator)
        n = len(starts) - 1  # no sentence follows the last separator
        if not 1 <= B <= n:
            raise ValueError(f"--batch must be 1 to {n:,}, the number of sentences, got {B}")
        order = np.random.default_rng((seed, epoch)).permutation(n)
        for b in progress(range(B), "ordering the sentences of lane", B):
            chosen = order[b::B]
            ends = (starts[chosen + 1] - starts[chosen]).cumsum()  # of sentences, in the lane
            self.lanes.append((ends, starts[chosen + 1] - ends))  # column + this: in tokens
        self.shape = B, 1 + min(int(ends[-1]) for ends, _ in self.lanes)

    def __getitem__(self, index):
        """Return the tokens of columns a to c of all lanes, (B, c - a), for stream[:, a:c]."""
        _, columns = index
        columns = np.arange(*columns.indices(self.shape[1]))
        places = []
        for ends, shift in self.lanes:  # (the column after a lane's end is its last separator)
            sentence = np.searchsorted(ends, columns, side="right").clip(max=len(ends) - 1)
            places.append(columns + shift[sentence])
        return self.tokens[torch.from_numpy(np.stack(places))]
