"""Test corpora of bytes and of words: tokens, splits, vocabularies, errors."""
import gzip
import hashlib
import io
import lzma
import random
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest
import torch

import train
from helpers import published, refusal, zipped
from support import corpora
from support.corpora import as_bytes, decode, encode, load
from support.download import File, Source
from system.conftest import TINY
from system.kills import Killed, kill_at

# its lines grow longer, so dropping newlines before the split gives other splits
RAW = "".join(f"<page {i * i}>{' naïve café' * (i // 20)}\n" for i in range(200)).encode()


def texts_of(corpus):
    return [as_bytes(split, corpus.vocab) for split in (corpus.train, corpus.valid, corpus.test)]


@pytest.mark.parametrize("data, kind", [
    (RAW[:40], ""), (RAW[:1019], ""), (bytes(range(256)) * 4, ""),
    (b"aab" * 18 + b"b" * 30 + b"cccc", ""),  # c: only in test
    (gzip.compress(RAW), "compressed by gzip"), (lzma.compress(RAW), "compressed by xz"),
    (zipped({"a": RAW}), "a zip archive"), (b"%PDF-1.7" + RAW, "a PDF"),
    (b"\xff\xfe" + RAW, "UTF-16 text"), (b"\xfe\xff" + RAW, "UTF-16 text")], ids=len)
def test_a_file_is_split_into_90_5_and_5_percent(tmp_path, data, kind, capsys):
    """The vocabulary is in the official order: by decreasing count, then by appearance."""
    (tmp_path / "notes.txt").write_bytes(data)
    corpus = load(tmp_path / "notes.txt")
    n = len(data) // 20
    said = capsys.readouterr().out
    assert said.startswith(f"notes.txt is {kind}, read byte by") if kind else said == ""
    assert said.count("\n") == bool(kind)
    assert texts_of(corpus) == [data[:-2 * n], data[-2 * n:-n], data[-n:]]
    assert corpus.vocab == sorted(set(data), key=lambda b: (-data.count(b), data.index(b)))
    assert corpus.train.dtype == corpus.test.dtype == torch.uint8 and corpus.unit == "bpc"


def test_newlines_are_dropped_after_the_split(tmp_path, monkeypatch):
    (tmp_path / "enwik8").write_bytes(RAW)
    monkeypatch.setitem(corpora.SOURCES, "enwik8", Source("bytes", (), 25, None, (File("enwik8"),)))
    full, kept = (load("enwik8", tmp_path, drop_newlines=drop) for drop in (False, True))
    assert (b"".join(texts_of(full)), full.name) == (RAW, "enwik8 (all bytes)")
    assert texts_of(kept) == [text.replace(b"\n", b"") for text in texts_of(full)]
    assert kept.vocab == [byte for byte in full.vocab if byte != 10]
    assert kept.name == "enwik8 (newlines dropped)"
    assert "enwik8" in refusal(load, "stdlib", drop_newlines=True)


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
        (tmp_path / name).write_bytes(f"# this is {name}\r\n".encode())
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


def test_the_command_prints_sizes_and_what_compressors_need(tmp_path, capsys):
    """They read the text, not the tokens; primed with the text, xz finds the test split in it."""
    data = Path(lzma.__file__).read_bytes()  # some real text, on which zlib -6 and -9 differ
    (tmp_path / "notes.txt").write_bytes(20 * data)
    corpora.main([str(tmp_path / "notes.txt")])
    printed = capsys.readouterr().out
    bits = (8 * len(compressed) / len(data) for compressed in (
        zlib.compress(data, 9), lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)))
    assert "zlib {:.3f}, xz {:.3f}, xz primed with the other splits 0.0".format(*bits) in printed
    assert f"vocabulary {len(set(data))}\n" in printed and repr(data.decode()[:200]) in printed
    with pytest.raises(SystemExit, match="^corpora.py: 'no such book' is neither .*$"):
        corpora.main(["no such book"])


WORDS = ["<eos>", "the", "cat", "sat"]


@pytest.mark.parametrize("text, vocab, wanted", [
    ("ab", list(b"cab\xc3"), [1, 2]), ("é", [0xA9, 0xC3], [1, 0]),  # one letter, two bytes
    ("cat\nsat\n", WORDS, [2, 0, 3, 0]), ("the cat\n\nsat the", WORDS, [1, 2, 0, 0, 3, 1]),
    ("\na\n", ["<S>", "a"], [0, 1, 0]),
    ("a Bé Bad", list(b"abc def\xc3"), "the corpus has no 'B', 'é'"),
    ("", list(b"ab"), "the text is empty"), (" ", ["<eos>", "a"], "the text is empty"),
    ("dog", ["<eos>", "<unk>"], "the corpus has no 'dog'; write <unk> instead")], ids=ascii)
def test_encode_and_decode_are_inverse(text, vocab, wanted):
    """Newlines become separators, and newlines again; what the vocabulary lacks is listed."""
    if isinstance(wanted, str):
        assert refusal(encode, text, vocab).startswith(wanted)
        return
    found = encode(text, vocab)
    assert found.dtype == torch.int64 and found.tolist() == wanted
    assert decode(found, vocab) == text and decode(found[:0], vocab) == ""
    assert encode(" the\r\n cat\rsat\t", WORDS).tolist() == [1, 0, 2, 0, 3]
    assert encode("the\ncat", WORDS[1:]).tolist() == [0, 1]  # of another project: no separator


@pytest.mark.parametrize("letter", ["é", "記", "😀"], ids=ascii)
def test_the_bytes_of_half_a_letter_are_not_printed(letter):
    """A prompt may end within a letter.  Other bytes are visible; none controls the terminal."""
    whole, vocab = letter.encode(), list(range(256))
    tokens = torch.tensor(list(whole + b"a\xff\t\x1bb" + whole))
    for cut in range(1, len(whole)):
        assert decode(tokens[:-cut], vocab) == f"{letter}a\ufffd\t\ufffdb"
        assert decode(tokens[cut:], vocab) == f"a\ufffd\t\ufffdb{letter}"
    assert decode(torch.tensor([1, 0]), ["<eos>", "\x9b1m"]) == "\ufffd1m\n"


VOCABULARY = "</S> 9\n<UNK> 3\na\n<S> 2\nb\nc\nd\x85x 8\n".encode()
SHARDS = {"shard2": b"a b\n\nc a\n", "shard3": b"d\nx b\n", "shard1": b"c c c"}


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


def sentences(root, shards=SHARDS):
    return load_as("sentences", root, shards | {"heldout": b"b a\n", "vocab": VOCABULARY})


# with three kinds of newlines, and spaces of Unicode
STRANGE = "cat a\n\nb  é\tcat\r\n記憶 \n<unk>\r😀 b x.y\va\fb\x1cc\x85a\u2028cat\u3000é\ufeff\n c"


def test_words_follow_the_official_rule(tmp_path):
    """Lines are those of Python's text mode; each ends in `<eos>`, the vocabulary's first."""
    texts = STRANGE, STRANGE[9:], STRANGE[:9] + "\nnew"
    corpus = words(tmp_path, *(text.encode() for text in texts))
    every = []
    for name in ("train", "valid", "test"):
        with open(tmp_path / name, encoding="utf-8") as file:
            wanted = [word for line in file for word in (*line.strip().split(), "<eos>")]
        assert [corpus.vocab[i] for i in getattr(corpus, name).tolist()] == wanted
        every += wanted
    assert corpus.vocab == ["<eos>", *sorted(set(every) - {"<eos>"}, key=lambda word: (
        -every.count(word), every.index(word)))]
    assert corpus.train.dtype == corpus.test.dtype == torch.int32 and corpus.unit == "ppl"
    corpus = words(tmp_path, b"a a b b b c c c c", b"a a a a a a\n", counted=1)  # as wt103
    assert corpus.vocab == ["<eos>", "c", "b", "a"]


def test_unpublished_counts_and_bad_texts_are_rejected(tmp_path, monkeypatch):
    words(tmp_path, b"a b\n", counts=(3, 2, 2), vocab_size=3)
    for *counts, V in ((4, 2, 2, 3), (3, 2, 2, 4)):
        message = refusal(words, tmp_path, b"a b\n", counts=tuple(counts), vocab_size=V)
        assert f"(3, 2, 2, 3), published is {(*counts, V)}: a file was changed" in message
    for make, text in (words, b"a\n\nb \xff\n"), (sentences, {"shard": b"b \xff"}):
        message = refusal(make, tmp_path, text)
        assert message.startswith("new cannot be read") and "('utf-8' codec can't" in message
    message = refusal(load_as, "bytes", tmp_path, {"text": 40 * b"a"}, vocab_size=2)
    assert message == f"new in {tmp_path} is another text, of 1 symbols; delete it"
    monkeypatch.setattr(Path, "read_bytes", lambda path: bytes(2**62))
    assert "is too small for 40 bytes" in refusal(load, tmp_path / "text")


def test_sentences_have_single_separators_and_a_killed_encoding_restarts(tmp_path):
    """Unknown words are <UNK>, empty sentences are kept; a killed encoding leaves no file."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, (corpora, "tokenize"))
        sentences(tmp_path)
    corpus = sentences(tmp_path)
    assert corpus.train.tolist() == [3, 2, 4, 3, 3, 5, 2, 3, 6, 3, 1, 4, 3, 5, 5, 5, 3]
    assert corpus.train.dtype == torch.int32
    assert corpus.valid.tolist() == corpus.test.tolist() == [3, 4, 2, 3]
    assert (corpus.vocab, corpus.unit, corpus.separator) == (
        ["</S>", "<UNK>", "a", "<S>", "b", "c", "d"], "ppl", 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        *SHARDS, "heldout", "vocab", "new.train.int32"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind, n, unit, sizes", [
    ("bytes", 1, "bpc", []), ("words", 3, "ppl", ["--model", "laptop-words", "--n-layer", "1"]),
    ("sentences", 4, "ppl", ["--cutoffs", "2", "4", "--div-val", "2"])])
def test_from_the_addresses_to_the_test_score(kind, n, unit, sizes, tmp_path, monkeypatch, capsys):
    """`--dataset NAME` fetches, trains and tests; the folder, of any name, serves again."""
    draw = random.Random(0)
    text = "\n".join(" ".join(draw.choices("abcd", k=6)) for _ in range(60)).encode()
    web = {"http://1": text, "http://2": text, "http://3": text, "http://4": VOCABULARY}
    files = [published(url[-1], data, url) for url, data in web.items()]
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: io.BytesIO(
        web.pop(request.full_url)))  # each is fetched only once
    monkeypatch.setitem(corpora.SOURCES, "new", Source(kind, (), 6, None, tuple(files[:n])))
    given = ["--dataset", "new", "--data-dir", str(tmp_path), "--out", str(tmp_path / "é😀\n%s"),
             "--dtype", "float32"]  # auto measures again, and may find another
    assert train.main([*TINY, *given, "--steps", "3", *sizes]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f" {unit} (evaluation T 16, M 16" in line and "; new)" in line
    use = ["--eval-only", "--sample", "a d", "--n-tokens", "9", "--device", "cpu"]
    assert train.main([*given, *use]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == line and any(words.startswith("a d") for words in printed)
