"""What word corpora promise: the published tokens in the published order, or one clear sentence.

Small corpora are made here and described truly in the table; nothing is fetched from a network.

    pytest tests/system/test_word_corpora.py
"""
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from support import corpora
from support.corpora import decode, encode, load
from training import batches
from training.batches import SentenceLanes
from support.download import File, Source
from helpers import published, refusal, zipped

SPLITS = "train", "valid", "test"
VOCABULARY = b"<S>\n<UNK>\na\nb\nc\nd\n"


# ---- small corpora ------------------------------------------------------------------------------

def bytes_of(text):
    return text.encode() if isinstance(text, str) else text


class Shelf:
    """A data folder, and a table of sources that describes what is put into it."""

    def __init__(self, root, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        root.mkdir()

    def put(self, **texts):
        for name, text in texts.items():
            (self.root / name).write_bytes(bytes_of(text))
        return tuple(map(File, texts))

    def list(self, name, files, archive=published("none.zip", b""), vocab_size=0, **more):
        kind = "sentences" if name == "lm1b" else "words"
        self.monkeypatch.setattr(corpora, "SOURCES", {
            name: Source(kind, (), vocab_size, archive, files, **more)})

    def words(self, train, valid="a\n", test="a\n", name="ptb", **more):
        """Load these three texts as a benchmark of words."""
        self.list(name, self.put(train=train, valid=valid, test=test), **more)
        return load(name, self.root)

    def sentences(self, shards, vocabulary=VOCABULARY, heldout="b a\n"):
        """Load shard1, shard2, ... and heldout as lm1b."""
        texts = {f"shard{i}": text for i, text in enumerate(shards, 1)} | {"heldout": heldout}
        self.put(vocab=vocabulary)
        self.list("lm1b", self.put(**texts),
                  vocabulary=published("vocab", bytes_of(vocabulary)))
        return load("lm1b", self.root)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    return Shelf(tmp_path / "data", monkeypatch)


def words_of(split, vocab):
    return [vocab[token] for token in split.tolist()]


# ---- the rules of words -------------------------------------------------------------------------

def strange_text(seed, n=300):
    """Words and all that may stand between them: newlines of three kinds, Unicode's spaces."""
    pick = random.Random(seed).choice
    gaps = [" ", " ", " ", "  ", "\t", "\n", "\n", "\r\n", "\r", "\n\n", "\v", "\f", "\x1c", "\x85",
            "\u2028", "\u3000", "\ufeff"]
    return "".join(pick("a b c é 記憶 cat <unk> 😀 x.y".split()) + pick(gaps) for _ in range(n))


@pytest.mark.parametrize("seed", range(2))
def test_words_are_those_of_the_official_rule(shelf, seed):
    """Stripped, split at white space, `<eos>` after each line, as Python's text mode sees lines.

    `<eos>` is the first of the vocabulary; words by falling count, ties by first appearance.
    """
    corpus = shelf.words(*(strange_text(f"{seed} {split}") for split in SPLITS))
    every = []
    for split in SPLITS:
        wanted = [word for line in open(shelf.root / split, encoding="utf-8")
                  for word in (*line.strip().split(), "<eos>")]
        assert words_of(getattr(corpus, split), corpus.vocab) == wanted
        every += wanted
    counts = Counter(every)
    del counts["<eos>"]
    assert corpus.vocab == ["<eos>", *sorted(counts, key=lambda w: (-counts[w], every.index(w)))]


def test_wt103_counts_the_training_split_alone(shelf):
    """What valid says often does not rise; <eos> is 0 though it is the rarest."""
    corpus = shelf.words("a a b b b c c c c", "a a a a a a\n", "a\n", name="wt103", counted=1)
    assert corpus.vocab == ["<eos>", "c", "b", "a"]
    assert {(z.dtype, z.dim()) for z in (corpus.train, corpus.valid, corpus.test)} == {
        (torch.int32, 1)}


@pytest.mark.parametrize("published_counts", [(4, 2, 2, 3), (3, 2, 3, 3), (3, 2, 2, 4)])
def test_a_corpus_of_other_counts_than_published_is_refused(shelf, published_counts):
    """Tokens of each split and the vocabulary, each checked, with both figures in the sentence."""
    shelf.words("a b\n", counts=(3, 2, 2), vocab_size=3)
    *counts, V = published_counts
    message = refusal(shelf.words, "a b\n", counts=tuple(counts), vocab_size=V)
    assert f"(3, 2, 2, 3), published is {published_counts}: a file was changed" in message


def test_a_bad_text_is_refused(shelf):
    """Too short, or no UTF-8: in one sentence."""
    assert refusal(shelf.words, b"\n") == (
        f"{shelf.root}{os.sep}train has 1 tokens, but at least 2 are needed")
    message = refusal(shelf.words, b"a\n\nb \xff\n")
    assert message.startswith("ptb cannot be read ('utf-8' codec can't decode byte 0xff")


# ---- encode and decode --------------------------------------------------------------------------

def test_words_are_encoded_and_decoded(shelf):
    """Joined by single spaces; newlines are <eos> and come back as newlines."""
    vocab = shelf.words("the cat sat\n").vocab
    for text in ("the cat", "cat\nsat\n", "the cat\n\nsat the", "\ncat"):
        tokens = encode(text, vocab)
        assert tokens.dtype == torch.int64
        assert decode(tokens, vocab) == decode(tokens.int(), vocab) == text
    assert words_of(encode(" the\r\n cat\rsat\t", vocab), vocab) == [
        "the", "<eos>", "cat", "<eos>", "sat"]
    assert decode([], vocab) == ""
    sentences = ["<S>", "a"]  # lm1b has another separator
    assert words_of(encode("\na\n", sentences), sentences) == ["<S>", "a", "<S>"]
    assert decode([0, 1, 0], sentences) == "\na\n"


def test_main_prints_what_a_word_corpus_holds(shelf, capsys):
    """Sizes, vocabulary and beginning; compressors are for bytes."""
    shelf.words("the cat\n" * 1000)
    corpora.main(["ptb", "--data-dir", str(shelf.root)])
    out = capsys.readouterr().out
    for part in ("ptb\n", "train 3,000, valid 2, test 2; vocabulary 4", r"'the cat\nthe cat\n"):
        assert part in out
    assert "zlib" not in out


# ---- sentences ----------------------------------------------------------------------------------

SHARDS = ["a b\n\nc a\n", "d\nx b\n", "c c c"]
CACHE = "lm1b.train.int32"


def stream(shards):
    """The official tokens, but one <S> between sentences in place of two."""
    known = {word: word for word in ("a", "b", "c", "d", "<S>")}
    lines = [line for text in shards for line in text.splitlines()]
    return ["<S>"] + [known.get(word, "<UNK>") for line in lines for word in (*line.split(), "<S>")]


def test_sentences_stand_between_single_separators(shelf):
    """Unknown words are <UNK>, an empty sentence is an empty sentence, shards follow in order."""
    corpus = shelf.sentences(SHARDS)
    assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)
    assert words_of(corpus.valid, corpus.vocab) == ["<S>", "b", "a", "<S>"]
    assert corpus.test.equal(corpus.valid)
    assert corpus.train.dtype == corpus.test.dtype == torch.int32
    assert (corpus.vocab, corpus.unit, corpus.separator) == (
        ["<S>", "<UNK>", "a", "b", "c", "d"], "ppl", 0)


def test_the_vocabulary_keeps_the_order_of_its_file_and_ignores_counts(shelf):
    """Lines of the published file are a word and its count; words may hold odd characters."""
    corpus = shelf.sentences(["a\n"], "</S> 9\r\nb\x85c 8\na\n<UNK> 3\n<S> 2")
    assert corpus.vocab == ["</S>", "b", "a", "<UNK>", "<S>"]
    assert corpus.train.tolist() == [4, 2, 4] and corpus.separator == 4


@pytest.mark.parametrize("shards, heldout", [(["a\n", b"b\n\xff"], "a\n"), (["a"], b"b\n\xff")])
def test_a_bad_shard_is_refused(shelf, shards, heldout):
    """In one sentence."""
    assert refusal(shelf.sentences, shards, heldout=heldout).startswith("lm1b cannot be read (")


def texts_read(monkeypatch, make):
    """The names of the training shards that are read as text while make() runs."""
    read, real = [], corpora.tokenize
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "tokenize",
                      lambda path, *more: read.append(path.name) or real(path, *more))
        make()
    return [name for name in read if name.startswith("shard")]


def test_sentences_are_encoded_once(shelf, monkeypatch):
    """The second load maps the file, and writes nothing; the shards' own files are gone."""
    corpus = shelf.sentences(SHARDS)
    before = {path: path.stat().st_mtime_ns for path in shelf.root.iterdir()}
    assert (shelf.root / CACHE).read_bytes() == corpus.train.numpy().tobytes()
    assert [path.name for path in before if "int32" in path.name] == [CACHE]
    os.chmod(shelf.root, 0o555)
    try:
        assert texts_read(monkeypatch, lambda: load("lm1b", shelf.root)) == []
    finally:
        os.chmod(shelf.root, 0o755)
    assert before == {path: path.stat().st_mtime_ns for path in shelf.root.iterdir()}


class Killed(BaseException):
    """In the place of SIGKILL: no Exception, so that nobody takes it for an error."""


def killed_at(n, monkeypatch):
    """From now on the n-th change of a file, or reading of a text, is not made: we are dead."""
    left = [n]

    def mortal(real):
        def call(*args, **kwargs):
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return real(*args, **kwargs)
        return call

    for place, name in [(os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir"),
                        (os, "rmdir"), (os, "unlink"), (corpora, "tokenize")]:
        monkeypatch.setattr(place, name, mortal(getattr(place, name)))


def test_what_a_killed_run_leaves_is_whole_and_the_next_goes_on(tmp_path):
    """From the archive to the tokens, killed before the 1st, 2nd, 3rd, ... step; shards that are
    done are not read again.
    """
    names = "shard1", "shard2", "shard3"
    texts = dict(zip((*names, "heldout"), map(bytes_of, [*SHARDS, "b a\n"])))
    data, vocab = zipped(texts), VOCABULARY.decode().split()
    pieces = {f"{CACHE}.shards/{name}": stream([text])[1:] for name, text in zip(names, SHARDS)}
    whole = texts | {path: np.int32([vocab.index(word) for word in words]).tobytes()
                     for path, words in (pieces | {CACHE: stream(SHARDS)}).items()}
    for n in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            shelf, alive = Shelf(tmp_path / f"{n}", patch), True
            shelf.put(**{"a.zip": data, "vocab": VOCABULARY})
            shelf.list("lm1b", tuple(map(File, texts)), published("a.zip", data),
                       vocabulary=File("vocab"))
            try:
                with pytest.MonkeyPatch.context() as doom:
                    killed_at(n, doom)
                    load("lm1b", shelf.root)
            except Killed:
                alive = False
            for path in shelf.root.rglob("*"):
                found = path.relative_to(shelf.root).as_posix()
                assert found not in whole or path.read_bytes() == whole[found], f"half of {found}"
            left = [] if (shelf.root / CACHE).is_file() else [
                name for name in names if not (shelf.root / f"{CACHE}.shards" / name).is_file()]
            assert texts_read(patch, lambda: load("lm1b", shelf.root)) == left
            corpus = load("lm1b", shelf.root)
            assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)
            assert [p.name for p in shelf.root.iterdir() if "int32" in p.name] == [CACHE]
        if alive:
            break
    assert n > 20


# ---- lanes of sentences -------------------------------------------------------------------------

def many_sentences(n):
    """n sentences of 0 to 6 words, no word twice, token 7 the separator -> tokens, sentences."""
    draw, next_word, sentences = random.Random(0), 8, []
    for _ in range(n):
        length = draw.randrange(7)
        sentences.append([7, *range(next_word, next_word + length)])
        next_word += length
    return torch.tensor(sum(sentences, []) + [7], dtype=torch.int32), sentences


@pytest.mark.parametrize("n, B", [(1, 1), (53, 8), (9, 9), (1003, 10)])
def test_lanes_of_sentences_are_those_written_out_by_hand(monkeypatch, n, B):
    """order[b::B], each sentence with its separator, one more at the end, cut at the shortest.

    So an epoch has every sentence once, but for the short tails.
    """
    monkeypatch.setattr(batches, "BLOCK", 10)
    tokens, sentences = many_sentences(n)
    lanes = SentenceLanes(tokens, B, 7, seed=3, epoch=2)
    order = np.random.default_rng((3, 2)).permutation(n)
    wanted = [sum((sentences[i] for i in order[b::B]), []) + [7] for b in range(B)]
    L = min(map(len, wanted)) - 1
    assert lanes.shape == (B, L + 1)
    assert lanes[:, :].tolist() == [lane[:L + 1] for lane in wanted]
    assert lanes[:, 0:2].dtype == torch.int32


def test_seeds_and_epochs_give_orders_of_their_own():
    """And the same seed and epoch the same order."""
    tokens, _ = many_sentences(200)
    orders = [SentenceLanes(tokens, 2, 7, *which)[:, :].tolist()
              for which in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]]
    assert orders[0] == orders[4]
    assert all(a != b for i, a in enumerate(orders[:4]) for b in orders[:i])


def test_lanes_of_sentences_are_sliced_like_a_tensor():
    """From any column to any other, so that a run reads on where it stopped."""
    lanes = SentenceLanes(many_sentences(100)[0], 3, 7, seed=5, epoch=1)
    for start in (0, 1, 50, lanes.shape[1] - 2, lanes.shape[1]):
        for end in (start + 1, start + 40, 10**6):
            assert lanes[:, start:end].equal(lanes[:, :][:, start:end])


@pytest.mark.parametrize("B", [0, 4])
def test_lanes_without_a_sentence_are_refused(B):
    """At least one for each lane, and all lanes are read together."""
    tokens, _ = many_sentences(3)
    message = refusal(SentenceLanes, tokens, B, 7, 0, 0)
    assert message == f"3 sentences cannot be read in {B} lanes"
    lanes = SentenceLanes(tokens, 2, 7, 0, 0)
    assert "all lanes" in refusal(lanes.__getitem__, (slice(0, 1), slice(0, 1)))
