"""What word corpora promise: the published tokens in the published order, or one clear sentence.

Small corpora are made here and described truly in the table; nothing is fetched from a network.

    pytest tests/system/test_word_corpora.py
"""
import hashlib
import io
import os
import random
import tarfile
import zipfile
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from test_corpora import Site, closed_port, full_disk

from support import corpora, progress
from support.corpora import File, SentenceLanes, Source, decode, encode, load

lesson = import_module("01_vanilla_segments")
SPLITS = "train", "valid", "test"
TEXTS = {"wiki.train.tokens": b" = The cat = \n\n the cat sat on a mat \n",
         "wiki.valid.tokens": b"a cat sat\n", "wiki.test.tokens": b"the <unk> sat\n"}


# ---- small corpora ------------------------------------------------------------------------------

def as_bytes(text):
    return text.encode() if isinstance(text, str) else text


def file_of(name, data, size=0, addresses=("http://127.0.0.1/none",)):
    """What the table says of these bytes."""
    size = len(data) if size == 0 else size
    return File(name, size, "sha256:" + hashlib.sha256(data).hexdigest(), addresses)


class Shelf:
    """A data folder, and a table that describes what is put into it."""

    def __init__(self, root, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        root.mkdir(parents=True)

    def list(self, name, **entry):
        entry = {"archive": File("none.zip", None, None, ("http://127.0.0.1/none",))} | entry
        self.monkeypatch.setattr(corpora, "SOURCES", {name: Source(**entry)})

    def put(self, texts):
        for name, text in texts.items():
            (self.root / name).write_bytes(as_bytes(text))
        return tuple(File(name, None, None) for name in texts)

    def words(self, train, valid="a\n", test="a\n", name="ptb", **entry):
        self.list(name, files=self.put(dict(zip(SPLITS, (train, valid, test)))), **entry)
        return load(name, root=self.root)

    def sentences(self, *texts, **more):
        self.put_sentences(*texts, **more)
        return load("lm1b", root=self.root)

    def put_sentences(self, shards, vocabulary="<S>\n<UNK>\na\nb\nc\nd\n", heldout="b a\n"):
        files = self.put({f"shard-{i}": text for i, text in enumerate((*shards, heldout))})
        self.put({"vocab.txt": vocabulary})
        self.list("lm1b", files=files, vocabulary=file_of("vocab.txt", as_bytes(vocabulary)))

    def refusal(self, make, *arguments, **more):
        with pytest.raises(ValueError) as caught:
            make(*arguments, **more)
        message = str(caught.value)
        assert "\n" not in message and "\r" not in message
        return message.replace(f"{self.root}{os.sep}", "")

    def files(self):
        return {path.name: path.read_bytes() for path in self.root.glob("*") if path.is_file()}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    return Shelf(tmp_path / "data", monkeypatch)


def words_of(split, vocab):
    return [vocab[token] for token in split.tolist()]


def official_words(path, end="<eos>"):
    """Another approach: line by line in Python's text mode."""
    return [word for line in open(path, encoding="utf-8") for word in (*line.strip().split(), end)]


def strange_text(seed, n=300):
    """Words and all that may stand between them: newlines of three kinds, Unicode's spaces."""
    pick = random.Random(seed).choice
    gaps = [" ", " ", " ", "  ", "\t", "\n", "\n", "\r\n", "\r", "\n\n", "\v", "\f", "\x1c", "\x85",
            "\u2028", "\u3000", "\ufeff"]
    return "".join(pick("a b c é 記憶 cat <unk> 😀 x.y".split()) + pick(gaps) for _ in range(n))


# ---- the rules of words -------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(8))
def test_words_are_those_of_the_official_rule(shelf, seed):
    """Stripped, split at white space, `<eos>` after each line, as Python's text mode sees lines."""
    corpus = shelf.words(*(strange_text(f"{seed} {split}") for split in SPLITS))
    every = []
    for split in SPLITS:
        wanted = official_words(shelf.root / split)
        assert words_of(getattr(corpus, split), corpus.vocab) == wanted
        every += wanted
    counts = Counter(every)
    del counts["<eos>"]
    assert corpus.vocab == ["<eos>", *sorted(counts, key=lambda w: (-counts[w], every.index(w)))]


@pytest.mark.parametrize("text, words", [
    ("a b\n", "a b <eos>"), ("a b", "a b <eos>"), ("a\n\nb\n", "a <eos> <eos> b <eos>"),
    ("\n\n", "<eos> <eos>"), ("a\r\nb\r\n", "a <eos> b <eos>"), ("a\rb", "a <eos> b <eos>"),
    ("a\n\rb\n", "a <eos> <eos> b <eos>"), (" a\u3000b \n", "a b <eos>"),
    ("a\n ", "a <eos> <eos>")])
def test_what_ends_a_line(shelf, text, words):
    """Worked examples: an empty line is a lone `<eos>`, the last line needs no newline."""
    corpus = shelf.words(text)
    assert " ".join(words_of(corpus.train, corpus.vocab)) == words


def test_ties_in_the_vocabulary_are_broken_by_first_appearance_over_all_splits(shelf):
    """d is counted three times over the splits; c, b and a twice each, in order of appearance."""
    corpus = shelf.words("c b a\nd\n", "a b d\n", "d c\n")
    assert corpus.vocab == ["<eos>", "d", "c", "b", "a"]
    assert corpus.train.tolist() == [2, 3, 4, 0, 1, 0]


def test_wt103_counts_the_training_split_alone(shelf):
    """What valid says often does not rise; <eos> is 0 though it is the rarest."""
    corpus = shelf.words("a a b b b c c c c", "a a a a a a\n", "a\n", name="wt103", counted=1)
    assert corpus.vocab == ["<eos>", "c", "b", "a"]


def test_what_a_word_corpus_is(shelf):
    """int32 tensors, words in the vocabulary, perplexity, no independent sentences."""
    corpus = shelf.words("a b\n")
    for split in SPLITS:
        assert (getattr(corpus, split).dtype, getattr(corpus, split).dim()) == (torch.int32, 1)
    assert {type(word) for word in corpus.vocab} == {str}
    assert (corpus.name, corpus.unit, corpus.separator) == ("ptb", "ppl", None)


@pytest.mark.parametrize("change", range(5))
def test_a_published_corpus_of_other_counts_is_refused(shelf, change):
    """Tokens of each split and the vocabulary, each checked, with both figures in the sentence."""
    counts = [3, 2, 2, 3]
    if change == 4:
        assert len(shelf.words("a b\n", counts=tuple(counts)).vocab) == 3
        return
    counts[change] += 1
    message = shelf.refusal(shelf.words, "a b\n", counts=tuple(counts))
    assert "(3, 2, 2, 3)" in message and str(tuple(counts)) in message and "changed" in message


def test_a_word_that_training_lacks_is_refused_by_the_counts(shelf):
    """In wt103 the training split alone makes the vocabulary."""
    message = shelf.refusal(shelf.words, "a b\n", "zebra\n", counted=1, counts=(3, 2, 2, 3))
    assert "(3, 2, 2, 4), published is (3, 2, 2, 3)" in message


def test_the_table_has_the_published_figures():
    """Training tokens with <eos>, and vocabularies, as the literature has them."""
    published = {name: entry.counts for name, entry in corpora.SOURCES.items() if entry.counts}
    assert published == {"wt103": (103_227_021, 217_646, 245_569, 267_735),
                         "wikitext-2": (2_088_628, 217_646, 245_569, 33_278),
                         "ptb": (929_589, 73_760, 82_430, 10_000)}
    assert [name for name, entry in corpora.SOURCES.items() if entry.counted == 1] == ["wt103"]
    assert len(corpora.SOURCES["lm1b"].files) == 100
    for entry in corpora.SOURCES.values():
        for file in (entry.archive, *entry.files, *filter(None, [entry.vocabulary])):
            if file.checksum:
                kind, digest = file.checksum.split(":")
                assert hashlib.new(kind).digest_size * 2 == len(digest)


# ---- bad texts ----------------------------------------------------------------------------------

@pytest.mark.parametrize("text, sentence", [
    (b"a\r\nb\rc a\0b\n", "train, line 3, holds a NUL byte"),
    (b"a\n\nb \xff\n", "train, line 3, is not UTF-8"),
    (b"a b\nc \xc3", "train, line 2, is not UTF-8"),
    (b"\xef\xbb\xbfa b\n",
     "train, line 1, begins with a byte order mark; plain UTF-8 is needed"),
    ("a b\n".encode("utf-16"), "train, line 1, holds a NUL byte"),
    (b"", "train has 0 tokens, but at least 2 are needed"),
    (b"\n", "train has 1 tokens, but at least 2 are needed")])
def test_a_bad_text_is_refused_with_its_line(shelf, text, sentence):
    """File and line are what one needs to mend it."""
    assert shelf.refusal(shelf.words, text) == sentence


def test_a_mark_inside_a_text_is_a_character(shelf):
    """U+FEFF is a byte order mark at the beginning only."""
    assert "\ufeffb" in shelf.words("a\n\ufeffb\n").vocab


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


def test_sentences_are_encoded_and_decoded(shelf):
    """In lm1b the separator is <S>."""
    vocab = shelf.sentences(["a b\n"]).vocab
    assert words_of(encode("\na b\n", vocab), vocab) == ["<S>", "a", "b", "<S>"]
    assert decode([0, 2, 3, 0], vocab) == "\na b\n"


def test_encode_names_the_words_that_the_corpus_lacks():
    """And says what can be written instead, if there is anything."""
    with pytest.raises(ValueError, match="^the corpus has no 'dog', 'Cat'$"):
        encode("the dog Cat dog", ["<eos>", "the", "cat"])
    for unknown in "<unk>", "<UNK>":
        with pytest.raises(ValueError, match=f"^the corpus has no 'dog'; write {unknown} instead$"):
            encode("dog", ["<S>", unknown])
    for text in "", " ":
        with pytest.raises(ValueError, match="empty"):
            encode(text, ["<eos>", "a"])


@pytest.mark.parametrize("token", [-1, 3])
def test_decode_refuses_a_token_outside_the_vocabulary(token):
    """Negative numbers do not count from the end."""
    with pytest.raises(ValueError, match=f"token {token} outside vocabulary of 3"):
        decode(torch.tensor([0, token]), ["<eos>", "a", "b"])


def test_main_prints_what_a_word_corpus_holds(shelf, capsys):
    """Sizes, vocabulary and beginning; compressors are for bytes."""
    shelf.words("the cat\n" * 1000)
    corpora.main(["ptb", "--data-dir", str(shelf.root)])
    out = capsys.readouterr().out
    for part in ("ptb\n", "train 3,000, valid 2, test 2; vocabulary 4", r"'the cat\nthe cat\n"):
        assert part in out
    assert "zlib" not in out


# ---- archives -----------------------------------------------------------------------------------

def zipped(members, change=lambda info: None):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            change(info)
            file.writestr(info, data)
    return archive.getvalue()


def tarred(members, change=lambda info: None):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            file.addfile(info, io.BytesIO(data))
    return archive.getvalue()


class Library(Site):
    """A web site on this machine that has several files."""

    def __init__(self, root, monkeypatch):
        self.shelf, self.served = Shelf(root, monkeypatch), {}
        super().__init__(root, monkeypatch)
        self.answer = lambda request: self.send(request, self.served[request.path[1:]])
        self.address = self.address.removesuffix("enwik8.zip")

    def publish(self):
        pass

    def offer(self, archive, data, texts=TEXTS, folder="w/", addresses=None):
        """Serve an archive, and list it as the source of "ptb" and of these texts."""
        self.served[archive] = data
        addresses = addresses or (self.address + archive,)
        self.shelf.list("ptb", archive=file_of(archive, data, addresses=addresses), folder=folder,
                        files=tuple(file_of(name, text) for name, text in texts.items()))


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    library = Library(tmp_path / "data", monkeypatch)
    yield library
    library.server.shutdown()
    library.server.server_close()


def folder(texts, name="w/"):
    return {name + key: text for key, text in texts.items()}


ARCHIVES = pytest.mark.parametrize("archive, pack", [("a.zip", zipped), ("a.tar.gz", tarred),
                                                     ("a.tgz", tarred)])


@ARCHIVES
def test_an_archive_is_fetched_checked_and_unpacked_once(library, archive, pack):
    """Only the wanted members reach the disk, under the names of the table."""
    data = pack({"../evil": b"!", "w/evil": b"!", **folder(TEXTS), "/tmp/evil": b"!"})
    library.offer(archive, data)
    corpus = load("ptb", root=library.root)
    assert decode(corpus.valid, corpus.vocab) == "a cat sat\n"
    assert library.shelf.files() == {archive: data, **TEXTS}
    load("ptb", root=library.root)
    assert len(library.requests) == 1
    assert "transformer-xl" in library.requests[0]["User-Agent"]
    assert {path.name for path in library.root.parent.rglob("*")} == {"data", archive, *TEXTS}


@ARCHIVES
def test_members_in_folders_are_unpacked_into_folders(library, archive, pack):
    """The names in the data folder are those of the members, as if unpacked by hand."""
    library.offer(archive, pack(folder(TEXTS)), folder(TEXTS), folder="")
    load("ptb", root=library.root)
    assert (library.root / "w" / "wiki.train.tokens").read_bytes() == TEXTS["wiki.train.tokens"]


def test_where_the_texts_are_nothing_is_fetched_or_written(library):
    """The folder may be read-only, and need not hold the archive."""
    library.offer("a.zip", b"")
    library.shelf.put(TEXTS)
    os.chmod(library.root, 0o555)
    try:
        load("ptb", root=library.root)
    finally:
        os.chmod(library.root, 0o755)
    assert library.shelf.files() == TEXTS and library.requests == []


@ARCHIVES
def test_only_what_is_missing_is_unpacked(library, archive, pack):
    """An interrupted unpacking goes on; files that are there stay as they are."""
    library.offer(archive, pack(folder(TEXTS)))
    load("ptb", root=library.root)
    kept = library.root / "wiki.train.tokens"
    before = kept.stat().st_mtime_ns
    (library.root / "wiki.test.tokens").unlink()
    load("ptb", root=library.root)
    assert kept.stat().st_mtime_ns == before and len(library.requests) == 1


def test_a_text_of_another_size_is_refused(library):
    """Somebody cut it short."""
    library.offer("a.zip", b"")
    library.shelf.put(TEXTS | {"wiki.test.tokens": b"a"})
    assert "wiki.test.tokens has 1 bytes, expected" in library.shelf.refusal(load, "ptb",
                                                                             library.root)


def refused(library):
    """The message; nothing but the archive is in or beside the data folder afterwards."""
    message = library.shelf.refusal(load, "ptb", library.root)
    (archive,) = library.served
    wanted = {"data", archive, *TEXTS}
    assert {path.name for path in library.root.parent.rglob("*")} <= wanted
    assert message.startswith(archive) and "delete it and run again" in message
    return message


@ARCHIVES
def test_a_missing_member_is_named(library, archive, pack):
    """The first that is wanted and not there."""
    texts = folder(TEXTS)
    del texts["w/wiki.valid.tokens"]
    library.offer(archive, pack({"other": b""} | texts))
    message = refused(library)
    assert "expected 'w/wiki.valid.tokens'" in message and "other" in message


@ARCHIVES
@pytest.mark.parametrize("prefix", ["../", "/tmp/", "w/../w/", "./w/"])
def test_a_member_of_nearly_the_right_name_is_not_taken(library, archive, pack, prefix):
    """Names are compared, never resolved."""
    library.offer(archive, pack(folder(TEXTS, prefix)))
    assert "expected 'w/wiki.train.tokens'" in refused(library)


@ARCHIVES
@pytest.mark.parametrize("damage", ["none", "torn", "bent"])
def test_a_broken_archive_is_one_sentence(library, archive, pack, damage):
    """Even where the table describes the broken one: no traceback of zipfile, tarfile or zlib."""
    good = pack(folder(TEXTS))
    library.offer(archive, {"none": b"<html>" * 50, "torn": good[:len(good) // 2],
                            "bent": good[:60] + bytes(40) + good[100:]}[damage])
    refused(library)


@ARCHIVES
def test_an_archive_put_there_by_hand_is_checked_in_pieces(library, archive, pack, monkeypatch):
    """Taken without a request if it is right, named if it is not; never read as a whole."""
    data = pack(folder(TEXTS))
    library.offer(archive, data)
    (library.root / archive).write_bytes(data[:-1] + b"?")
    assert "checksum" in refused(library)
    (library.root / archive).write_bytes(data)
    monkeypatch.setattr(Path, "read_bytes", None)
    load("ptb", root=library.root)
    assert library.requests == []


def test_a_second_address_is_tried(library):
    """The first address of the WikiTexts is dead."""
    library.offer("a.zip", zipped(folder(TEXTS)), addresses=(
        f"http://127.0.0.1:{closed_port()}/a.zip", library.address + "a.zip"))
    load("ptb", root=library.root)
    assert len(library.requests) == 1


def test_a_file_without_a_published_size_is_fetched(library, capsys):
    """The vocabulary of lm1b: by its checksum alone, which is looked at when it is loaded, too."""
    shelf = library.shelf
    shelf.sentences(["a b\n"])
    entry, data = corpora.SOURCES["lm1b"], (library.root / "vocab.txt").read_bytes()
    library.served["vocab.txt"] = data
    shelf.list("lm1b", **entry._replace(vocabulary=file_of(
        "vocab.txt", data, None, (library.address + "vocab.txt",)))._asdict())
    (library.root / "vocab.txt").unlink()
    assert load("lm1b", root=library.root).vocab[:2] == ["<S>", "<UNK>"]
    (library.root / "vocab.txt").write_bytes(data + b"e\n")
    message = shelf.refusal(load, "lm1b", library.root)
    assert message.startswith("vocab.txt is not the file of http") and "checksum" in message
    (library.root / "vocab.txt").unlink()
    library.served["vocab.txt"] = data + b"e\n"
    assert "save it as" in shelf.refusal(load, "lm1b", library.root)


# ---- sentences ----------------------------------------------------------------------------------

SHARDS = ["a b\n\nc a\n", "d\nx b\n", "c c c"]


def stream(shards):
    """The official tokens, but one <S> between sentences in place of two."""
    return ["<S>"] + [word if word in "abcd" else "<UNK>" if word != "<S>" else word
                      for text in shards for line in text.splitlines()
                      for word in (*line.split(), "<S>")]


def test_sentences_stand_between_single_separators(shelf):
    """Unknown words are <UNK>, an empty sentence is an empty sentence, shards follow in order."""
    corpus = shelf.sentences(SHARDS)
    assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)
    assert words_of(corpus.valid, corpus.vocab) == ["<S>", "b", "a", "<S>"]
    assert corpus.test.equal(corpus.valid)
    assert corpus.train.dtype == corpus.test.dtype == torch.int32
    assert (corpus.vocab, corpus.unit, corpus.separator) == (
        ["<S>", "<UNK>", "a", "b", "c", "d"], "ppl", 0)
    predictions = sum(len(line.split()) + 1 for text in SHARDS for line in text.splitlines())
    assert len(corpus.train) - 1 == predictions


def test_the_vocabulary_keeps_the_order_of_its_file_and_ignores_counts(shelf):
    """Lines of the published file are a word and its count; words may hold odd characters."""
    corpus = shelf.sentences(["a\n"], "</S> 9\r\nb\x85c 8\na\n<UNK> 3\n<S> 2")
    assert corpus.vocab == ["</S>", "b", "a", "<UNK>", "<S>"]
    assert corpus.train.tolist() == [4, 2, 4] and corpus.separator == 4


@pytest.mark.parametrize("shards, heldout, sentence", [
    (["", "a\n"], "a\n", "shard-0 has 0 tokens, but at least 2 are needed"),
    (["a\n"], "", "shard-1 has 0 tokens, but at least 2 are needed"),
    (["a\n", "b\n\0"], "a\n", "shard-1, line 2, holds a NUL byte"),
    (["a\n"], b"b\n\xff", "shard-1, line 2, is not UTF-8")])
def test_a_bad_shard_is_refused(shelf, shards, heldout, sentence):
    """By name, and with its line."""
    assert shelf.refusal(shelf.sentences, shards, heldout=heldout) == sentence


CACHE = "lm1b.train.int32"


def encoded_from(shelf, monkeypatch, make):
    """Load, and return the names of the training shards that were read as text."""
    read, real = [], corpora.lines_of

    def watched(path):
        read.append(path.name)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(corpora, "lines_of", watched)
        make()
    return [name for name in read if name not in ("vocab.txt", "shard-3")]


def test_sentences_are_encoded_once(shelf, monkeypatch):
    """The second load maps the file, and writes nothing; the shards' own files are gone."""
    corpus = shelf.sentences(SHARDS)
    before = shelf.files()
    assert before[CACHE] == corpus.train.numpy().tobytes()
    assert [path.name for path in shelf.root.iterdir() if "int32" in path.name] == [CACHE]
    os.chmod(shelf.root, 0o555)
    try:
        assert encoded_from(shelf, monkeypatch, lambda: load("lm1b", shelf.root)) == []
    finally:
        os.chmod(shelf.root, 0o755)
    assert shelf.files() == before


class Killed(BaseException):
    pass


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


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_what_a_killed_run_leaves_is_whole_and_the_next_goes_on(tmp_path, pack):
    """From the archive to the tokens, killed before the 1st, 2nd, 3rd, ... step."""
    suffix = "zip" if pack is zipped else "tgz"
    texts = dict(zip("123v", (*(text.encode() for text in SHARDS), b"b a\n")))
    data = pack(texts)  # once: a tar.gz has the time in it
    with pytest.MonkeyPatch.context() as patch:
        shelf = Shelf(tmp_path / "whole", patch)
        vocab = shelf.sentences(SHARDS).vocab
        whole = texts | {CACHE: shelf.files()[CACHE]}
        for name, text in zip("123", SHARDS):
            tokens = [vocab.index(word) for word in stream([text])[1:]]
            whole[f"{CACHE}.shards/{name}"] = np.int32(tokens).tobytes()
        for n in range(1000):
            shelf = Shelf(tmp_path / f"{n}", patch)
            shelf.put({f"a.{suffix}": data, "vocab.txt": "<S>\n<UNK>\na\nb\nc\nd\n"})
            shelf.list("lm1b", archive=file_of(f"a.{suffix}", data),
                       files=tuple(map(File, texts)), vocabulary=File("vocab.txt"))
            alive = True
            try:
                with pytest.MonkeyPatch.context() as doom:
                    killed_at(n, doom)
                    load("lm1b", shelf.root)
            except Killed:
                alive = False
            for path in shelf.root.rglob("*"):
                name = path.relative_to(shelf.root).as_posix()
                assert name not in whole or path.read_bytes() == whole[name], f"half of {name}"
            corpus = load("lm1b", shelf.root)
            assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)
            assert [p.name for p in shelf.root.iterdir() if "int32" in p.name] == [CACHE]
            if alive:
                break
    assert n > 20


def test_a_resumed_run_reads_only_the_shards_that_have_no_file(shelf, monkeypatch):
    """Two shards were whole, the third was begun."""
    real = corpora.write

    def dying(path, pieces):
        if path.name == "shard-2":
            Path(f"{path}.part").write_bytes(b"begun")
            raise Killed
        real(path, pieces)

    with monkeypatch.context() as doom, pytest.raises(Killed):
        doom.setattr(corpora, "write", dying)
        shelf.sentences(SHARDS)
    assert CACHE not in shelf.files()
    names = encoded_from(shelf, monkeypatch, lambda: load("lm1b", shelf.root))
    assert names == ["shard-2"]
    corpus = load("lm1b", shelf.root)
    assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)


@pytest.mark.parametrize("name", ["shard-1", CACHE])
def test_a_full_disk_leaves_nothing_under_the_final_name(shelf, monkeypatch, name):
    """One sentence, and the next load, with room, does it all."""
    with monkeypatch.context() as patch:
        full_disk(patch, fails_at=f"{name}.part")
        message = shelf.refusal(shelf.sentences, SHARDS)
    assert message.startswith(f"{CACHE} cannot be written") and "No space left" in message
    assert not list(shelf.root.rglob(f"{name}*.part")) and CACHE not in shelf.files()
    corpus = load("lm1b", shelf.root)
    assert words_of(corpus.train, corpus.vocab) == stream(SHARDS)


def test_slow_work_on_sentences_shows_its_progress(shelf, monkeypatch, capsys):
    """Reading, joining, and finding the sentences of an epoch."""
    clock = iter(range(10_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    corpus = shelf.sentences(SHARDS)
    SentenceLanes(corpus.train, 1, 0, 0, 0)
    shown = capsys.readouterr().err
    for label in ("shard-0 0.0 MB/0.0 MB", "joining shard 3/3", "finding sentences in part 1/1",
                  "ordering the sentences of lane 1/1"):
        assert label in shown
    assert shown.endswith(" \r") and "\n" not in shown


# ---- lanes of sentences -------------------------------------------------------------------------

def many_sentences(n, seed=0):
    """n sentences of 0 to 6 words, no word twice, token 7 the separator -> tokens, sentences."""
    rng, next_word, sentences = random.Random(seed), 8, []
    for _ in range(n):
        length = rng.randrange(7)
        sentences.append([7, *range(next_word, next_word + length)])
        next_word += length
    return torch.tensor(sum(sentences, []) + [7], dtype=torch.int32), sentences


def all_of(found):
    return found[:, 0:found.shape[1]].tolist()


@pytest.mark.parametrize("n, B", [(1, 1), (50, 1), (50, 4), (53, 8), (9, 9)])
def test_lanes_of_sentences_are_those_written_out_by_hand(monkeypatch, n, B):
    """order[b::B], each sentence with its separator, one more at the end, cut at the shortest."""
    monkeypatch.setattr(corpora, "BLOCK", 10)
    tokens, sentences = many_sentences(n)
    lanes = SentenceLanes(tokens, B, 7, seed=3, epoch=2)
    order = np.random.default_rng((3, 2)).permutation(n)
    wanted = [sum((sentences[i] for i in order[b::B]), []) + [7] for b in range(B)]
    L = min(map(len, wanted)) - 1
    assert lanes.shape == (B, L + 1)
    assert all_of(lanes) == [lane[:L + 1] for lane in wanted]
    assert lanes[:, 0:2].dtype == torch.int32


def test_an_epoch_has_every_sentence_once_but_for_the_tails():
    """By the words themselves: none twice, and in each lane only what comes after L is missing."""
    tokens, sentences = many_sentences(1003)
    lanes = SentenceLanes(tokens, 10, 7, seed=0, epoch=0)
    words = [word for lane in all_of(lanes) for word in lane if word != 7]
    assert len(words) == len(set(words))
    starts = {sentence[1]: sentence for sentence in sentences if sentence[1:]}
    for lane in all_of(lanes):
        at = [i for i, word in enumerate(lane) if word == 7]
        for a, b in zip(at, at[1:]):  # whole sentences, word by word
            assert b - a == 1 or starts[lane[a + 1]] == lane[a:b]
    missing = len(tokens) - 1 - 10 * (lanes.shape[1] - 1)
    assert 0 < missing < len(tokens) / 10  # the tails are short


def test_seeds_and_epochs_give_orders_of_their_own():
    """And the same seed and epoch the same order."""
    tokens, _ = many_sentences(200)
    orders = [all_of(SentenceLanes(tokens, 2, 7, seed, epoch))
              for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]]
    assert orders[0] == orders[4]
    assert all(a != b for i, a in enumerate(orders[:4]) for b in orders[:i])


@pytest.mark.parametrize("B", [1, 3, 7])
@pytest.mark.parametrize("T", [1, 4, 5, 1000])
def test_lesson_1_reads_lanes_of_sentences_and_resumes_at_any_column(B, T):
    """What `segments` yields is the same as from a tensor, from whatever column it starts."""
    tokens, _ = many_sentences(100)
    lanes = SentenceLanes(tokens, B, 7, seed=5, epoch=1)
    table = lanes[:, :]
    assert table.shape == lanes.shape
    for start in (0, 1, T, 2 * T, lanes.shape[1] - 2):
        found, wanted = (list(lesson.segments(x, T, start)) for x in (lanes, table))
        assert len(found) == len(wanted) > 0 or start >= lanes.shape[1] - 1
        for (x, y), (x_wanted, y_wanted) in zip(found, wanted):
            assert x.dtype == torch.int64
            assert x.equal(x_wanted) and y.equal(y_wanted)


@pytest.mark.parametrize("B", [0, 4])
def test_lanes_without_a_sentence_are_refused(B):
    """At least one for each lane."""
    with pytest.raises(ValueError, match=f"3 sentences cannot be read in {B} lanes"):
        SentenceLanes(many_sentences(3)[0], B, 7, 0, 0)
    with pytest.raises(ValueError, match="all lanes"):
        SentenceLanes(many_sentences(3)[0], 2, 7, 0, 0)[0:1, 0:1]
