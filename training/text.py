"""The text of a run: its corpus in the vocabulary of a model, as lanes, with sentences in order."""
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch

from support.corpora import checksum, load, with_vocabulary
from support.progress import progress
from training import ranks

lesson_1 = import_module("01_vanilla_segments")


def read_corpus(recipe, data_dir, saved=None, is_evaluated=False):
    """Return the run's corpus, in the vocabulary of its checkpoint if that is given.

    An evaluated text that is not the one of training says so in its name; otherwise ValueError.
    """
    if ranks.RANK > 0:  # rank 0 comes first, since it may download and unpack
        ranks.broadcast(None)
    corpus = load(recipe.text or recipe.dataset, root=data_dir, drop_newlines=recipe.drop_newlines)
    if ranks.RANK == 0:
        ranks.broadcast(None)
    if saved is None:
        return corpus
    if is_evaluated:
        corpus = in_vocabulary(corpus, saved, recipe)
        is_other = checksum(corpus) != saved.get("text")
        return replace(corpus, name=corpus.name + ", not the text of its training" * is_other)
    with suppress(ValueError):  # other words or bytes: another text
        same = in_vocabulary(corpus, saved, recipe)
        if checksum(same) == saved.get("text"):
            return same
    raise ValueError(f"{corpus.name} is not the text that the checkpoint was trained on: it is "
                     f"another one, or it has changed since ({len(saved['vocab'])} symbols "
                     f"then, {len(corpus.vocab)} now); restore it, or train in another folder")


def in_vocabulary(corpus, saved, recipe):
    """Return the corpus in the vocabulary of a checkpoint, if that is given.

    ValueError if that lacks a byte of it, or has other words.  Only Python's library is read
    without such bytes, for example tabs, since its versions differ in them.
    """
    vocab = saved["vocab"] if saved else corpus.vocab
    if corpus.vocab == vocab:
        return corpus
    if corpus.unit == "ppl" or not isinstance(vocab[0], int):
        raise ValueError(f"{corpus.name} has {len(corpus.vocab):,} symbols, the model has others "
                         f"({len(vocab):,}): bytes and words do not mix, words must be the same")
    lacking = bytes(set(corpus.vocab) - set(vocab))
    if lacking and (recipe.text or recipe.dataset != "stdlib"):
        raise ValueError(f"{corpus.name} has bytes that the model's vocabulary lacks: "
                         f"{lacking[:20]!r}; replace them, or train a new model")
    if lacking:
        print(f"{lacking} is left out, since the model's vocabulary lacks it")
    return with_vocabulary(corpus, vocab)


def lanes(corpus, recipe, epoch, device):
    """Return the training text as B lanes, (B, L + 1); ValueError if it has too few tokens.
    Independent sentences (lm1b's) are in a new order in each epoch, and stay on the CPU."""
    if corpus.separator is not None:
        return sentence_lanes(corpus.train, recipe.batch, corpus.separator, recipe.seed, epoch)
    try:
        return lesson_1.lanes(corpus.train, recipe.batch).to(device)
    except ValueError as error:
        raise ValueError(f"--batch {recipe.batch}: {error}") from None


def sentence_lanes(tokens, B, separator, seed, epoch):
    """Return all sentences, in a new order for each epoch, as B lanes, (B, L + 1).

    Lane b consists of every B-th sentence of the order, each as separator, w1 ... wn, and of the
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
