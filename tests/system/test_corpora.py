"""Test corpora of bytes: their bytes, splits and vocabularies, and the one-sentence errors."""
import hashlib
import lzma
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest
import torch

from helpers import published, refusal, zipped
from support import corpora
from support.corpora import as_bytes, compressed_bits, decode, encode, load
from support.download import File, Source

# replaces enwik8; its lines grow longer, so dropping newlines before the split gives other splits
RAW = "".join(f"<page {i * i}>{' naïve café' * (i // 20)}\n" for i in range(200)).encode()


def write(tmp_path, data):
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    return path


def texts_of(corpus):
    return [as_bytes(split, corpus.vocab) for split in (corpus.train, corpus.valid, corpus.test)]


@pytest.mark.parametrize("data", [RAW[:40], RAW[:1019], bytes(range(256)) * 4], ids=len)
def test_a_file_is_split_into_90_5_and_5_percent(tmp_path, data):
    """Valid and test have n // 20 bytes each, and train has the rest; all 256 bytes may occur."""
    corpus, n = load(write(tmp_path, data)), len(data) // 20
    assert texts_of(corpus) == [data[:-2 * n], data[-2 * n:-n], data[-n:]]
    assert len(corpus.vocab) == len(set(data)) and corpus.unit == "bpc"
    assert corpus.train.dtype == corpus.test.dtype == torch.uint8


@pytest.mark.parametrize("data, vocab", [
    (b"za" * 20 + b"mm", b"zam"),  # z and a are equally frequent, and z comes first
    (b"aab" * 18 + b"b" * 30 + b"cccc", b"bac")])  # c occurs only in the test split
def test_the_vocabulary_is_sorted_by_count_then_by_first_appearance(tmp_path, data, vocab):
    """This is the official order; counts cover all three splits."""
    corpus = load(write(tmp_path, data))
    assert bytes(corpus.vocab) == vocab
    assert corpus.train.tolist() == [vocab.index(byte) for byte in data[:len(corpus.train)]]


@pytest.mark.parametrize("text, vocab, words", [
    ("a Bé Bad", list(b"abc def\xc3"), "the corpus has no 'B', 'é'"),
    ("", list(b"ab"), "the text is empty, at least one character or word is needed"),
    (" ", ["<eos>", "a"], "the text is empty, at least one character or word is needed"),
    ("dog", ["<eos>", "<unk>"], "the corpus has no 'dog'; write <unk> instead")])
def test_encode_lists_what_the_vocabulary_lacks(text, vocab, words):
    """The message also says what can be written instead, if there is a replacement."""
    assert refusal(encode, text, vocab) == words


@pytest.mark.parametrize("vocab", [list(b"cab\xc3"), ["<eos>", "a", "b", "c"]], ids=str)
def test_encode_and_decode_are_inverse(vocab):
    """Token -1 is not the last one, and 256 does not become 0.  A letter may be two bytes."""
    tokens = encode("a", vocab)
    assert tokens.dtype == torch.int64 and tokens.tolist() == [1]
    assert decode(tokens, vocab) == "a" and decode([], vocab) == ""
    for token in (-1, 4, 256):
        message = refusal(decode, torch.tensor([0, token]), vocab)
        assert message == f"token {token} outside vocabulary of 4"
    assert encode("é", [0xA9, 0xC3]).tolist() == [1, 0]
    assert decode([1], [0xA9, 0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_compressors_read_the_text_and_not_the_tokens():
    """An xz primed with the text finds the test split in it."""
    data = Path(lzma.__file__).read_bytes()  # some real text, on which zlib -6 and -9 differ
    vocab = list(range(255, -1, -1))
    tokens = encode(data.decode(), vocab)
    bits = compressed_bits(corpora.Corpus(tokens, tokens[:90], tokens, vocab, "lzma.py"))
    assert bits["zlib"] == 8 * len(zlib.compress(data, 9)) / len(data)
    assert bits["xz"] == 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
    assert 0 < bits["xz primed with the training text"] < 0.1


SPLITS = (  # ordered by the CRC-32 of the paths; the CRC-32 modulo 20 determines the split
    ["zoo.py", "json/deep/er.py", "testing/kept.py", "a/b.py", "a.py", "test.py", "config/kept.py",
     "a-b.py"],
    ["jays_2.py", "foxes.py"],  # 18
    ["21.py", "51.py"])  # 19
NOT_KEPT = ["readme.txt", "a/data.pyc", "test/x.py", "json/tests/x.py", "idle/idle_test/x.py",
            "site-packages/pip/x.py", "dist-packages/x.py", "a/encodings/x.py", "pydoc_data/x.py",
            "lib2to3/pgen/x.py", "config-3.11-x86_64/x.py", "distutils/x.py"]


def test_stdlib_has_the_python_files_ordered_by_a_hash_of_their_paths(tmp_path, monkeypatch):
    """Folders such as test/ are skipped at any depth, but a file named test.py is kept."""
    for name in reversed(sum(SPLITS, NOT_KEPT)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"# this is {name}\r\n".encode())  # as Windows ends lines
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    corpus, version = load("stdlib"), sys.version.split()[0]
    texts = ["".join(f"# this is {name}\n" for name in names).encode() for names in SPLITS]
    data = b"".join(texts)
    assert texts_of(corpus) == texts
    assert corpus.name == (f"stdlib (Python {version}, {len(data):,} bytes, sha256 "
                           f"{hashlib.sha256(data).hexdigest()[:8]}…)")


def test_the_synthetic_corpus_is_always_the_same():
    """Models of the experiments that were trained on it contain its name and checksum."""
    corpus = load("copies")
    assert (corpus.name, corpora.checksum(corpus)) == (
        "copies (distances 24, 48, 72, 96)", 4039732271)
    assert decode(corpus.train[:8], corpus.vocab) == "GgMqHgQt"


def test_newlines_are_dropped_after_the_split(tmp_path, monkeypatch):
    """As in the official code, the raw bytes are split first, then each split loses newlines."""
    data = zipped({"enwik8": RAW})
    (tmp_path / "enwik8.zip").write_bytes(data)
    monkeypatch.setitem(corpora.SOURCES, "enwik8", Source(
        "bytes", (), 0, published("enwik8.zip", data), (File("enwik8", len(RAW)),)))
    full = load("enwik8", tmp_path)
    kept = load("enwik8", tmp_path, drop_newlines=True)
    assert (b"".join(texts_of(full)), full.name) == (RAW, "enwik8 (all bytes)")
    assert texts_of(kept) == [text.replace(b"\n", b"") for text in texts_of(full)]
    assert kept.vocab == [byte for byte in full.vocab if byte != 10]
    assert kept.name == "enwik8 (newlines dropped)"
    assert "enwik8" in refusal(load, "stdlib", drop_newlines=True)


def test_the_table_has_the_published_counts():
    """The table has the bytes, tokens (with <eos>) and vocabulary sizes of the literature."""
    table = corpora.SOURCES
    assert {name: (*source.counts, source.vocab_size) for name, source in table.items()} == {
        "enwik8": (205,), "text8": (27,), "lm1b": (793_471,),
        "wt103": (103_227_021, 217_646, 245_569, 267_735),
        "wikitext-2": (2_088_628, 217_646, 245_569, 33_278),
        "ptb": (929_589, 73_760, 82_430, 10_000)}
    assert [name for name, source in table.items() if source.counted == 1] == ["wt103"]
    assert len(table["lm1b"].files) == 100
    assert table["enwik8"].files[0].size == table["text8"].files[0].size == 100_000_000


def test_the_command_prints_a_summary_of_a_corpus(tmp_path, capsys):
    corpora.main([str(write(tmp_path, RAW))])
    out = capsys.readouterr().out
    assert f"vocabulary {len(set(RAW))}" in out and repr(RAW.decode()[:200]) in out
    with pytest.raises(SystemExit, match="^corpora.py: 'no such book' is neither .*$"):
        corpora.main(["no such book"])
