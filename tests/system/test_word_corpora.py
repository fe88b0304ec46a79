"""Test corpora of words: they have the published tokens in order, or raise one clear sentence."""
import random
from collections import Counter
from importlib import import_module

import numpy as np
import pytest
import torch

from course.oracles import segments
from system.kills import Killed, kill_at
from system.conftest import TINY
from helpers import published, refusal, zipped
from support import corpora
from support.corpora import decode, encode, load
from support.download import File, Source
from training.batches import SentenceLanes

train = import_module("train")
VOCABULARY = b"<S>\n<UNK>\na\nb\nc\nd\n"
NAMES = "shard2", "shard3", "shard1"
SHARDS = [b"a b\n\nc a\n", b"d\nx b\n", b"c c c"]
TOKENS = [0, 2, 3, 0, 0, 4, 2, 0, 5, 0, 1, 3, 0, 4, 4, 4, 0]  # by VOCABULARY


def load_as(kind, root, texts, **more):
    """Write and load these files, {name: bytes}, as a benchmark of this kind."""
    for name, text in texts.items():
        (root / name).write_bytes(text)
    source = Source(kind, (), 0, None, tuple(map(File, texts)))._replace(**more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corpora.SOURCES, "new", source)
        return load("new", root)


def words(root, train, valid=b"a\n", test=b"a\n", **more):
    return load_as("words", root, {"train": train, "valid": valid, "test": test}, **more)


def sentences(root, shards, vocabulary=VOCABULARY):
    (root / "vocab").write_bytes(vocabulary)
    return load_as("sentences", root, dict(zip(NAMES, shards)) | {"heldout": b"b a\n"},
                   vocabulary=File("vocab"))


def strange_text(seed):
    """Return words with many separators between them: three kinds of newlines, Unicode spaces."""
    pick = random.Random(seed).choice
    gaps = [" ", " ", " ", "  ", "\t", "\n", "\n", "\r\n", "\r", "\n\n", "\v", "\f", "\x1c", "\x85",
            "\u2028", "\u3000", "\ufeff"]
    return "".join(pick("a b c é 記憶 cat <unk> 😀 x.y".split()) + pick(gaps) for _ in range(300))


def test_words_follow_the_official_rule(tmp_path):
    """Lines, as in Python's text mode, are stripped and split at white space, and end in `<eos>`.
    The vocabulary starts with `<eos>`; words follow by decreasing count, then by appearance."""
    corpus, every = words(tmp_path, *(strange_text(seed).encode() for seed in range(3))), []
    for name in ("train", "valid", "test"):
        with open(tmp_path / name, encoding="utf-8") as file:
            wanted = [word for line in file for word in (*line.strip().split(), "<eos>")]
        assert [corpus.vocab[i] for i in getattr(corpus, name).tolist()] == wanted
        every += wanted
    counts = Counter(every)
    del counts["<eos>"]
    assert corpus.vocab == ["<eos>", *sorted(counts, key=lambda w: (-counts[w], every.index(w)))]
    assert corpus.train.dtype == corpus.test.dtype == torch.int32 and corpus.unit == "ppl"
    corpus = words(tmp_path, b"a a b b b c c c c", b"a a a a a a\n", counted=1)  # as wt103
    assert corpus.vocab == ["<eos>", "c", "b", "a"]


def test_unpublished_counts_and_bad_texts_are_rejected(tmp_path):
    """The sentence has the found and the published numbers of tokens and the vocabulary sizes."""
    words(tmp_path, b"a b\n", counts=(3, 2, 2), vocab_size=3)
    for *counts, V in ((4, 2, 2, 3), (3, 2, 2, 4)):
        message = refusal(words, tmp_path, b"a b\n", counts=tuple(counts), vocab_size=V)
        assert f"(3, 2, 2, 3), published is {(*counts, V)}: a file was changed" in message
    assert refusal(words, tmp_path, b"\n").endswith("train has 1 tokens, but at least 2 are needed")
    for make, text in (words, b"a\n\nb \xff\n"), (sentences, [b"a\n", b"b \xff"]):
        message = refusal(make, tmp_path, text)
        assert message.startswith("new cannot be read") and "('utf-8' codec can't" in message


def test_words_are_encoded_and_decoded():
    """Words are joined by single spaces; newlines become separators and newlines again."""
    vocab = ["<eos>", "the", "cat", "sat"]
    for text in ("cat\nsat\n", "the cat\n\nsat the", "\ncat"):
        assert decode(encode(text, vocab), vocab) == text
    assert encode(" the\r\n cat\rsat\t", vocab).tolist() == [1, 0, 2, 0, 3]
    assert encode("\na\n", ["<S>", "a"]).tolist() == [0, 1, 0]  # lm1b uses another separator
    assert decode([0, 1, 0], ["<S>", "a"]) == "\na\n"


def test_sentences_are_between_single_separators(tmp_path):
    """Unknown words are <UNK>, empty sentences are kept, and shards are in the table's order."""
    corpus = sentences(tmp_path, SHARDS)
    assert corpus.train.tolist() == TOKENS and corpus.train.dtype == torch.int32
    assert corpus.valid.tolist() == corpus.test.tolist() == [0, 3, 2, 0]
    assert (corpus.vocab, corpus.unit, corpus.separator) == (
        ["<S>", "<UNK>", "a", "b", "c", "d"], "ppl", 0)


def test_the_vocabulary_keeps_the_order_of_its_file_and_ignores_counts(tmp_path):
    """Each line of the published file has a word and its count; words may have odd characters."""
    vocabulary = "</S> 9\r\nb\x85c 8\na\n<UNK> 3\n<S> 2".encode()
    corpus = sentences(tmp_path, [b"a\n"], vocabulary=vocabulary)
    assert corpus.vocab == ["</S>", "b", "a", "<UNK>", "<S>"]
    assert corpus.train.tolist() == [4, 2, 4] and corpus.separator == 4


def test_a_killed_encoding_restarts(tmp_path, monkeypatch):
    """A killed encoding leaves no partial file, and the next one encodes all shards."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, (corpora, "tokenize"))
        sentences(tmp_path, SHARDS)
    assert sentences(tmp_path, SHARDS).train.tolist() == TOKENS
    assert {path.name for path in tmp_path.iterdir()} == {
        *NAMES, "heldout", "vocab", "new.train.int32"}


@pytest.mark.parametrize("kind, unit, sizes", [
    ("bytes", "bpc", []), ("words", "ppl", ["--model", "laptop-words", "--n-layer", "1"]),
    ("sentences", "ppl", ["--cutoffs", "2", "4", "--div-val", "2"])])
def test_from_the_archive_to_the_test_score(kind, unit, sizes, tmp_path, monkeypatch, capsys):
    """`--dataset NAME` unpacks, trains and tests; the folder is then tested again and sampled."""
    draw, names = random.Random(0), ("train", "valid", "test")
    lines = [" ".join(draw.choices("abcd", k=6)) for _ in range(60)]
    data = zipped({name: ("\n".join(lines) + "\n").encode() for name in names})
    (tmp_path / "a.zip").write_bytes(data)
    (tmp_path / "vocab").write_bytes(VOCABULARY)
    monkeypatch.setitem(corpora.SOURCES, "new", Source(
        kind, (), 0, published("a.zip", data), tuple(map(File, names)), vocabulary=File("vocab")))
    # lanes of sentences support only slices; a student's `segments` may read them in another way
    monkeypatch.setattr(train.lesson_1, "segments", segments)
    given = ["--dataset", "new", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run"),
             "--dtype", "float32"]  # auto measures again, and may find another
    assert train.main([*TINY, *given, "--steps", "3", *sizes]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f" {unit} (evaluation T 16, M 16" in line and "; new)" in line
    use = ["--eval-only", "--sample", "a d", "--n-tokens", "9", "--device", "cpu"]
    assert train.main([*given, *use]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == line and any(words.startswith("a d") for words in printed)


@pytest.mark.parametrize("n, B", [(1, 1), (53, 8), (9, 9), (1003, 10)])
def test_lanes_of_sentences_equal_those_written_out_by_hand(n, B):
    """Lane b has the sentences order[b::B], shuffled by seed and epoch, with their separators.  All
    lanes are as long as the shortest, and are sliced like a tensor, so that a run can resume."""
    draw, numbers = random.Random(0), iter(range(8, 10**5))  # no word twice; 7 is the separator
    sentences = [[7, *(next(numbers) for _ in range(draw.randrange(7)))] for _ in range(n)]
    tokens = torch.tensor(sum(sentences, []) + [7], dtype=torch.int32)
    lanes = SentenceLanes(tokens, B, 7, seed=3, epoch=2)
    order = np.random.default_rng((3, 2)).permutation(n)
    wanted = [sum((sentences[i] for i in order[b::B]), []) + [7] for b in range(B)]
    L = min(map(len, wanted)) - 1
    assert lanes.shape == (B, L + 1) and lanes[:, 0:2].dtype == torch.int32
    for a, c in ((0, L + 1), (0, 1), (L // 2, L // 2 + 9), (L, L + 1), (L, 10**6)):
        assert lanes[:, a:c].tolist() == [lane[:L + 1][a:c] for lane in wanted]
    message = refusal(SentenceLanes, tokens, n + 1, 7, 0, 0)
    assert message == f"--batch must be 1 to {n:,}, the number of sentences, got {n + 1}"
