"""What a corpus of bytes promises: the right bytes, cut and numbered in one way, or one sentence.

    pytest tests/system/test_corpora.py
"""
import errno
import hashlib
import lzma
import sys
import sysconfig
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import corpora
from support.corpora import as_bytes, compressed_bits, decode, encode, load, standard_library
from support.download import File, Source
from helpers import published, refusal, zipped

# stands for enwik8; its lines grow longer, so that dropping newlines before or after a cut differs
RAW = "".join(f"<page {i * i}>{' naïve café' * (i // 20)}\n" for i in range(200)).encode()


def write(tmp_path, data):
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    return path


def all_tokens(corpus):
    return torch.cat([corpus.train, corpus.valid, corpus.test])


def whole(corpus):
    return as_bytes(all_tokens(corpus), corpus.vocab)


# ---- cutting ------------------------------------------------------------------------------------

@pytest.mark.parametrize("data", [RAW[:40], RAW[:1019], bytes(range(256)) * 4],
                         ids=len)
def test_a_file_is_cut_into_90_5_and_5_percent(tmp_path, data):
    """Valid and test are n // 20 bytes each, train is the rest; all 256 bytes may occur."""
    corpus, part = load(write(tmp_path, data)), len(data) // 20
    assert [len(corpus.valid), len(corpus.test)] == [part, part]
    assert whole(corpus) == data and len(corpus.vocab) == len(set(data))
    assert {z.dtype for z in (corpus.train, corpus.valid, corpus.test)} == {torch.uint8}
    assert {type(byte) for byte in corpus.vocab} == {int}


def test_the_checksum_is_another_for_another_text_or_cut(tmp_path):
    """A resumed run asks by it whether it has its own text."""
    corpus, again = (load(write(tmp_path, RAW)) for _ in range(2))
    valid, test = torch.cat([corpus.valid, corpus.test]).tensor_split([9])
    others = replace(corpus, valid=valid, test=test), replace(corpus, train=corpus.train.flip(0))
    assert len({corpora.checksum(text) for text in (corpus, again, *others)}) == 3


@pytest.mark.parametrize("data, vocab", [
    (b"za" * 20 + b"mm", b"zam"),  # z and a as often as each other, z came first
    (b"aab" * 18 + b"b" * 30 + b"cccc", b"bac")])  # c is in the test split alone
def test_the_vocabulary_is_by_falling_count_then_by_first_appearance(tmp_path, data, vocab):
    """The official order, counted over all three splits."""
    corpus = load(write(tmp_path, data))
    assert bytes(corpus.vocab) == vocab
    assert all_tokens(corpus).tolist() == [vocab.index(byte) for byte in data]


# ---- between text and tokens --------------------------------------------------------------------

def test_encode_and_decode_are_inverse(tmp_path):
    """A prompt goes through as UTF-8 bytes, int64 as an embedding wants them."""
    vocab = load(write(tmp_path, RAW)).vocab
    tokens = encode("naïve café", vocab)
    assert tokens.dtype == torch.int64
    assert [vocab[t] for t in tokens] == list("naïve café".encode())
    assert decode(tokens, vocab) == decode(tokens.tolist(), vocab) == "naïve café"
    assert decode([], vocab) == ""
    assert decode([0, 1], [0xC3, ord("a")]) == "\N{REPLACEMENT CHARACTER}a"  # half a character


@pytest.mark.parametrize("text, vocab, words", [
    ("a Bé Bad", list(b"abc def\xc3"), "the corpus has no 'B', 'é'"),
    ("", list(b"ab"), "the text is empty, at least one character or word is needed"),
    (" ", ["<eos>", "a"], "the text is empty, at least one character or word is needed"),
    ("dog", ["<eos>", "<unk>"], "the corpus has no 'dog'; write <unk> instead"),
    ("ab\udcff", list(b"ab"), r"the corpus has no '\udcff'")])  # Python's form of other bytes
def test_encode_names_what_the_corpus_lacks(text, vocab, words):
    """And says what can be written instead, if there is anything."""
    assert refusal(encode, text, vocab) == words


@pytest.mark.parametrize("vocab", [list(b"abc"), ["<eos>", "a", "b"]], ids=["bytes", "words"])
def test_decode_refuses_what_are_no_tokens_of_the_corpus(vocab):
    """Negative numbers do not count from the end, and 256 does not wrap around to 0."""
    for token in (-1, 3, 256, 300):
        message = refusal(decode, torch.tensor([0, token]), vocab)
        assert message == f"token {token} outside vocabulary of 3"


def test_compressed_bits_are_those_of_the_compressors():
    """8 bits times the compressed size, per byte: the text itself is compressed, not the tokens."""
    data = Path(lzma.__file__).read_bytes()  # some real text, on which zlib -6 and -9 differ
    vocab = list(range(255, -1, -1))
    tokens = encode(data.decode(), vocab)
    bits = compressed_bits(corpora.Corpus(tokens[:90], tokens[:90], tokens, vocab, "lzma.py"))
    assert bits["zlib"] == 8 * len(zlib.compress(data, 9)) / len(data)
    assert bits["xz"] == 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


# ---- the built-in corpus ------------------------------------------------------------------------

SPLITS = (  # in the order of the CRC-32 of their paths; what it is modulo 20 decides on the split
    ["zoo.py", "json/deep/er.py", "testing/kept.py", "a/b.py", "a.py", "test.py", "config/kept.py",
     "a-b.py"],
    ["jays_2.py", "foxes.py"],  # 18
    ["21.py", "51.py"])  # 19
KEPT = sum(SPLITS, [])
NOT_KEPT = ["readme.txt", "a/data.pyc", "test/x.py", "json/tests/x.py", "idle/idle_test/x.py",
            "site-packages/pip/x.py", "dist-packages/x.py", "a/encodings/x.py", "pydoc_data/x.py",
            "lib2to3/pgen/x.py", "config-3.11-x86_64/x.py", "distutils/x.py"]


def test_stdlib_is_the_python_files_dealt_by_a_hash_of_their_paths(tmp_path, monkeypatch):
    """Excluded are folders, at any depth, not files that happen to be called test.py."""
    for name in reversed(KEPT + NOT_KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# this is {name}\n")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    corpus = load("stdlib")
    found = [as_bytes(split, corpus.vocab).decode() for split in (
        corpus.train, corpus.valid, corpus.test)]
    assert found == ["".join(f"# this is {name}\n" for name in names) for names in SPLITS]


def test_a_file_of_stdlib_stays_in_its_split_whatever_stands_beside_it(tmp_path, monkeypatch):
    """Another version of Python has files more or less, and Windows other ends of lines."""
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    for number in range(200):
        (tmp_path / f"{number}.py").write_bytes(b"# this is %d\r\n" % number)
    before = standard_library()
    for number in range(0, 200, 2):
        (tmp_path / f"{number}.py").unlink()
    for many, few in zip(before, standard_library()):
        lines = many.decode().splitlines(keepends=True)
        odd = [line for line in lines if int(line.split()[-1]) % 2]
        assert few.decode() == "".join(odd) and "\r" not in few.decode() and few


def test_the_real_stdlib_says_exactly_what_it_is():
    """Results on it compare between machines only if Python's version and the bytes agree."""
    corpus = load("stdlib")
    data = whole(corpus)
    digest = hashlib.sha256(data).hexdigest()[:8]
    version = sys.version.split()[0]
    assert corpus.name == f"stdlib (Python {version}, {len(data):,} bytes, sha256 {digest}…)"
    assert len(data) > 5_000_000


# ---- the synthetic corpus -----------------------------------------------------------------------

def test_each_kind_repeats_what_stood_its_distance_before():
    """Nine times in ten, or by chance; and at no other distance more often than by chance."""
    tokens = corpora.draw_copies(40_000, 3).long()
    assert (tokens // corpora.EACH).equal(torch.arange(40_000) % len(corpora.DISTANCES))
    for kind, d in enumerate(corpora.DISTANCES):
        mine = tokens[kind :: len(corpora.DISTANCES)]
        for back in (4, 16, 24, 48, 72, 96):
            step = back // len(corpora.DISTANCES)
            share = (mine[step:] == mine[:-step]).double().mean().item()
            chance = 1 / corpora.EACH
            if back % d == 0:  # k copies in a row
                kept = corpora.KEPT ** (back // d)
                assert share == pytest.approx(kept + (1 - kept) * chance, abs=0.02)
            elif back < d:
                assert share == pytest.approx(chance, abs=0.04)


def test_the_synthetic_corpus_is_always_the_same():
    """Its name and checksum stand in the models of the experiments that were trained on it."""
    corpus = load("copies")
    assert (corpus.name, corpora.checksum(corpus)) == (
        "copies (distances 24, 48, 72, 96)", 4039732271)
    assert [len(z) for z in (corpus.train, corpus.valid, corpus.test)] == [10**6, 50_000, 50_000]
    assert corpus.unit == "bpc" and decode(corpus.train[:8], corpus.vocab) == "GgMqHgQt"


# ---- benchmarks ---------------------------------------------------------------------------------

@pytest.fixture
def enwik8(tmp_path, monkeypatch):
    """RAW as the benchmark enwik8, its archive put by hand into the folder that is returned."""
    data = zipped({"enwik8": RAW})
    (tmp_path / "enwik8.zip").write_bytes(data)
    monkeypatch.setattr(corpora, "SOURCES", {"enwik8": Source(
        "bytes", (), 0, published("enwik8.zip", data), (File("enwik8", len(RAW)),))})
    return tmp_path


def test_newlines_are_dropped_after_the_cut(enwik8):
    """The official count: the raw bytes are cut first, then each part loses its newlines."""
    full = load("enwik8", root=enwik8)
    assert (whole(full), full.name) == (RAW, "enwik8 (all bytes)")
    kept = load("enwik8", root=enwik8, drop_newlines=True)
    cut = len(RAW) // 20
    parts = RAW[:-2 * cut], RAW[-2 * cut:-cut], RAW[-cut:]
    for split, part in zip((kept.train, kept.valid, kept.test), parts):
        assert as_bytes(split, kept.vocab) == part.replace(b"\n", b"") != part
    assert kept.vocab == [byte for byte in full.vocab if byte != 10]
    assert kept.name == "enwik8 (newlines dropped)"
    assert "enwik8" in refusal(load, "stdlib", drop_newlines=True)


def test_the_kind_of_a_benchmark_is_said_and_not_guessed(tmp_path, monkeypatch):
    """Three files may be of bytes, which are not cut then; an unknown kind is refused."""
    texts = {"train": b"abba\ncab", "valid": b"ab\n", "test": b"cc"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    source = Source("bytes", (), 4, published("a.zip", b""), tuple(map(File, texts)))
    monkeypatch.setitem(corpora.SOURCES, "new", source)
    corpus = load("new", tmp_path)
    splits = [as_bytes(z, corpus.vocab) for z in (corpus.train, corpus.valid, corpus.test)]
    assert (splits, corpus.unit) == ([*texts.values()], "bpc")
    monkeypatch.setitem(corpora.SOURCES, "new", source._replace(kind="letters"))
    assert "'letters', known are bytes, words, sentences" in refusal(load, "new", tmp_path)


def test_each_entry_fits_its_kind():
    """As many files as its reader takes, and a vocabulary if they are sentences."""
    for name, source in corpora.SOURCES.items():
        assert source.kind in ("bytes", "words", "sentences"), name
        n = len(source.files)
        assert n == 3 or (source.kind, n) == ("bytes", 1) or source.kind == "sentences", name
        assert (source.vocabulary is not None) == (source.kind == "sentences"), name


def test_the_table_has_the_published_figures():
    """Bytes; or tokens with <eos>, and vocabularies, as the literature has them."""
    table = corpora.SOURCES
    counts = {name: (*source.counts, source.vocab_size) for name, source in table.items()}
    assert counts.items() >= {
        "enwik8": (205,), "text8": (27,), "lm1b": (793_471,),
        "wt103": (103_227_021, 217_646, 245_569, 267_735),
        "wikitext-2": (2_088_628, 217_646, 245_569, 33_278),
        "ptb": (929_589, 73_760, 82_430, 10_000)}.items()
    assert [name for name, source in table.items() if source.counted == 1] == ["wt103"]
    assert len(table["lm1b"].files) == 100
    assert table["enwik8"].files[0].size == table["text8"].files[0].size == 100_000_000
    for source in table.values():
        for file in filter(None, [source.archive, source.vocabulary]):
            kind, digest = file.checksum.split(":")
            assert hashlib.new(kind).digest_size * 2 == len(digest)


# ---- bad input ----------------------------------------------------------------------------------

def test_an_unknown_name_lists_the_known_and_offers_the_nearest(tmp_path):
    """A typing error costs one line of reading, not a search; a folder is no corpus."""
    message = refusal(load, "enwik9", tmp_path)
    assert "file that exists" in message and "stdlib, enwik8, text8" in message
    assert message.endswith("; did you mean enwik8?")
    for path in tmp_path, tmp_path / "no" / "book.txt":
        message = refusal(load, path)
        assert message == f"there is no file {path}"


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    """What the system says about it, without its traceback."""
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = refusal(load, write(tmp_path, RAW))
    assert "notes.txt cannot be read" in message and "Permission denied" in message


# ---- the command --------------------------------------------------------------------------------

def test_an_xz_that_has_read_a_text_needs_nothing_for_it():
    """It finds the test split in the text before it; one that is new costs as much as alone."""
    new, old = torch.randint(256, (2, 4000), dtype=torch.uint8)
    for test, low, high in ((old[500:3500], 0, 0.2), (new, 7.9, 8.4)):
        corpus = corpora.Corpus(old, old, test, list(range(256)), "made up")
        assert low < compressed_bits(corpus)["xz that has read the training text"] < high


def test_main_prints_what_the_corpus_holds(tmp_path, capsys):
    """Sizes, vocabulary, the beginning, and the compressors' figures."""
    path = write(tmp_path, RAW)
    corpora.main([str(path)])
    out = capsys.readouterr().out
    corpus = load(path)
    for figure in ("notes.txt", f"{len(corpus.train):,}", f"{len(corpus.test):,}",
                   f"vocabulary {len(set(RAW))}", repr(RAW.decode()[:200]),
                   *(f"{name} {z:.3f}" for name, z in compressed_bits(corpus).items())):
        assert figure in out


def test_main_says_what_is_wrong_in_one_line(capsys):
    """Which Python prints on stderr, with exit status 1."""
    with pytest.raises(SystemExit, match="^corpora.py: 'no such book' is neither .*$"):
        corpora.main(["no such book"])
    assert capsys.readouterr().out == ""
