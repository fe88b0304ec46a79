"""Text in, token arrays out: the corpora of this course.

The problem.  Two results compare only if they count the same tokens of the same text.  So a corpus
is known to the byte: a benchmark comes from its published address, is checked against its published
size and checksum, and is cut where the literature cuts it.

What comes out is a `Corpus`: three 1-D tensors of tokens (train, valid, test), the vocabulary that
turns them back into text, and a name that says what the numbers count.  Tokens are bytes, or words
where the literature counts words (wt103, wikitext-2, ptb, lm1b).

    python corpora.py               the built-in corpus: Python's own library, no download
    python corpora.py enwik8        a benchmark: fetched into data/ once, and checked
    python corpora.py notes.txt     any file of yours

prints what was read, and how small zlib and xz make the test split of bytes: a model that needs
more bits than they do has learned little.
"""
import argparse
import codecs
import difflib
import hashlib
import itertools
import json
import lzma
import os
import re
import signal
import stat
import sys
import sysconfig
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class File(NamedTuple):
    """A file as it was published, and how to know that it arrived whole."""
    name: str  # in the data folder
    size: int | None  # bytes; None if nobody has published it
    checksum: str | None  # "algorithm:hexadecimal digest"
    addresses: tuple[str, ...] = ()  # tried in order; a member of an archive has none


class Source(NamedTuple):
    """A benchmark: one file of bytes, three of words, or shards of sentences and a vocabulary."""
    archive: File  # zip or tar.gz
    files: tuple[File, ...]  # wanted from it: the text; train, valid, test; shards, held-out shard
    folder: str = ""  # what stands before their names in the archive
    counts: tuple[int, ...] = ()  # published: tokens of train, valid and test, words in vocabulary
    counted: int = 3  # how many of the splits the vocabulary counts
    vocabulary: File | None = None


def wikitext(name, size, checksum, files, **more):
    """The two WikiTexts differ in their sizes only."""
    hosts = "https://wikitext.smerity.com", "https://s3.amazonaws.com/research.metamind.io/wikitext"
    archive = File(f"{name}-v1.zip", size, checksum, tuple(f"{h}/{name}-v1.zip" for h in hosts))
    return Source(archive, tuple(File(f"{name}/wiki.{split}.tokens", None, f"sha1:{digest}")
                                 for split, digest in files.items()), **more)


LM1B = "1-billion-word-language-modeling-benchmark-r13output"
SOURCES = {
    "enwik8": Source(
        File("enwik8.zip", 36_445_475,
             "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
             ("http://mattmahoney.net/dc/enwik8.zip",)),
        (File("enwik8", 100_000_000, "sha1:57b8363b814821dc9d47aa4d41f58733519076b2"),)),
    "text8": Source(
        File("text8.zip", 31_344_016,
             "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
             ("http://mattmahoney.net/dc/text8.zip",)),
        (File("text8", 100_000_000, "md5:3bea1919949baf155f99411df5fada7e"),)),
    "wt103": wikitext(
        "wikitext-103", 190_229_076,
        "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        {"train": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
         "valid": "c326ac59dc587676d58c422eb8a03e119582f92b",
         "test": "8a5befc548865cec54ed4273cf87dbbad60d1e47"},
        counts=(103_227_021, 217_646, 245_569, 267_735), counted=1),
    "wikitext-2": wikitext(
        "wikitext-2", 4_475_746,
        "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        {"train": "863f29c46ef9d167fff4940ec821195882fe29d1",
         "valid": "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
         "test": "c7b8ce0aa086fb34dab808c5c49224211eb2b172"},
        counts=(2_088_628, 217_646, 245_569, 33_278)),
    "ptb": Source(
        File("simple-examples.tgz", 34_869_662, "md5:30177ea32e27c525793142b6bf2c8e2d",
             ("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",)),
        (File("ptb.train.txt", 5_101_618, "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420"),
         File("ptb.valid.txt", 399_782, "md5:aa0affc06ff7c36e977d7cd49e3839bf"),
         File("ptb.test.txt", 449_945, "md5:8b80168b89c18661a38ef683c0dc3721")),
        "./simple-examples/data/", (929_589, 73_760, 82_430, 10_000)),
    "lm1b": Source(
        File(f"{LM1B}.tar.gz", 1_792_209_805,
             "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
             (f"http://www.statmt.org/lm-benchmark/{LM1B}.tar.gz",)),
        (*(File(f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100",
                None, None) for i in range(1, 100)),
         File(f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
              None, None)),
        vocabulary=File(
            "1b_word_vocab.txt", None,
            "sha256:c758fee313a5c952995f391a659fe31cde50f2b11f5fae6c0e75a0a6e79fa34d",
            ("https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt",))),
}
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings",
           "pydoc_data", "lib2to3"}  # of the standard library: tests, tables, other people's code


# ---- fetching: a file appears under its name when it is whole and right, or not at all ----------

@contextmanager
def progress(label, total=None):
    """Yield a function that is told of every n bytes done; slow work shows a line on stderr."""
    done, line = 0, ""
    shown = started = time.monotonic()

    def advance(n):
        nonlocal done, line, shown
        done += n
        part = f"{done / total:.0%} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
        line = f"\r{label}: {part}"
        if time.monotonic() - shown > 0.5:
            shown = time.monotonic()
            print(line, end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if shown > started:
            print(line, file=sys.stderr)


def check(stream, file, label, write=lambda piece: None):
    """Read a stream to its end and hand its pieces to `write`.

    Raises ValueError as soon as more than the published size comes (servers and archives can lie
    about their length), and at the end if less came or the checksum differs.
    """
    done, digest = 0, hashlib.new((file.checksum or "sha256:").split(":")[0])
    with progress(label, file.size) as advance:
        while piece := stream.read(1 << 18):
            done += len(piece)
            if file.size is not None and done > file.size:
                raise ValueError(f"more than the expected {file.size:,} bytes")
            digest.update(piece)
            write(piece)
            advance(len(piece))
    found = f"{digest.name}:{digest.hexdigest()}"
    if file.size not in (None, done):
        raise ValueError(f"{done:,} bytes, expected {file.size:,}")
    if file.checksum not in (None, found):
        raise ValueError(f"checksum {found}, expected {file.checksum}")


def copy(stream, path, file, label):
    """Copy a stream to path, checking on the way.  Leaves nothing after an error."""
    part = Path(f"{path}.part")
    try:
        with open(part, "wb") as output:
            check(stream, file, label, output.write)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # whatever went wrong, Ctrl-C included


def download(file, path):
    """Fetch path from the first address that has the right file.

    Raises ValueError, one sentence, which also says how to do it by hand.
    """
    reasons, agent = [], {"User-Agent": "transformer-xl-from-scratch"}  # some refuse Python's own
    for address in file.addresses:
        request = urllib.request.Request(address, headers=agent)
        try:
            with urllib.request.urlopen(request, timeout=30) as stream:
                return copy(stream, path, file, f"fetching {address}")
        except (OSError, HTTPException, ValueError) as error:
            reasons.append(f"{address} ({' '.join(str(error).split())})")  # one line, always
    raise ValueError(f"{path} is missing and cannot be fetched from {' or '.join(reasons)}; fetch "
                     f"it by hand and save it as {path}, where it will be checked the same way")


def fetch(file, root):
    """Return the path of a published file in root, fetched if it is missing, checked always.

    Always, because it may have been put there by hand.  Raises ValueError.
    """
    path = Path(root, file.name)
    if not path.is_file():  # a pipe there would never end
        path.parent.mkdir(parents=True, exist_ok=True)
        download(file, path)
    try:
        with open(path, "rb") as stream:
            check(stream, file, f"checking {path}")
    except ValueError as error:
        raise ValueError(f"{path} is not the file of {file.addresses[0]} ({error}); delete it and "
                         "run again") from None
    return path


def members(archive):
    """Yield (name, size, is it a plain file, how to open it) for all in a zip or tar.gz."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the zip was not made on Unix
                plain = kind in (0, stat.S_IFREG) and not info.is_dir()
                yield info.filename, info.file_size, plain, lambda: file.open(info)
    else:
        with tarfile.open(archive, "r|gz") as file:  # "|": in one pass, gzip cannot go back
            for info in file:
                if file.offset > 1100 * archive.stat().st_size:  # gzip packs 1,032 to 1 at most
                    raise ValueError(f"{info.name!r} ends behind the end, at {file.offset:,}")
                plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
                yield info.name, info.size, plain, lambda: file.extractfile(info)


def unpack(archive, source, wanted):
    """Copy the wanted members, {path: File}, of a checked archive; no name in it becomes a path.

    Raises ValueError if it is not the published archive or a path cannot be written.
    """
    path, found = next(iter(wanted)), []
    missing = {source.folder + file.name: path for path, file in wanted.items()}
    try:
        for name, size, plain, opened in members(archive):
            found.append(name)
            if name in missing:
                path = missing.pop(name)
                if not plain:
                    raise ValueError(f"{name!r} is not a plain file")
                path.parent.mkdir(parents=True, exist_ok=True)
                if wanted[path].size not in (None, size):
                    raise ValueError(f"{name!r} has {size:,} bytes, expected "
                                     f"{wanted[path].size:,}")
                with opened() as stream:  # the header may lie
                    copy(stream, path, wanted[path]._replace(size=size), f"unpacking {path}")
        if missing:
            raise ValueError(f"holds {found[:3]}, expected {next(iter(missing))!r}")
    except OSError as error:
        raise ValueError(f"{path} cannot be unpacked from {archive} ({error})") from None
    except Exception as error:  # broken bytes give a dozen types: of zipfile, tarfile, zlib, lzma
        raise ValueError(f"{archive} is not the archive of {source.archive.addresses[0]} ({error});"
                         " delete it and run again") from None


def unpacked(source, root):
    """Return the paths of a benchmark's files, unpacked in root at the first call.

    Later calls check only the sizes: a file gets its name after its checksum was right, so it is
    wrong only if somebody put another one there.  They write nothing: root may be read-only.
    """
    files = {Path(root, file.name): file for file in source.files}
    if wanted := {path: file for path, file in files.items() if not path.is_file()}:
        unpack(fetch(source.archive, root), source, wanted)
    for path, file in files.items():
        if file.size not in (None, path.stat().st_size):
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, expected {file.size:,}; "
                             "delete it and run again")
    return list(files)


def standard_library():
    """Return the .py files of Python's own library as bytes, in the order of their relative paths.

    Real text on every machine, which uses a name again after thousands of bytes: just what a
    memory is for.
    """
    folder, paths = Path(sysconfig.get_path("stdlib")), []
    for here, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith("config-")]
        paths += [Path(here, f).relative_to(folder).as_posix() for f in files if f.endswith(".py")]
    return b"".join((folder / path).read_bytes() for path in sorted(paths))


# ---- from text to tokens ------------------------------------------------------------------------

@dataclass(frozen=True)
class Corpus:
    """One text: train, valid and test are 1-D tensors of positions in the list `vocab`.

    For bytes they are uint8 (a segment becomes int64 when it is used), and vocab holds the byte
    values; for words they are int32, and vocab holds words.  `name` says what the numbers count.
    If sentences are independent (lm1b), `separator` is the token that stands around each.
    """
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    vocab: list
    name: str
    separator: int | None = None

    @property
    def unit(self):
        """The unit of results: "bpc", bits per byte, or "ppl", perplexity, if tokens are words.

        Perplexity is over all tokens, the `<eos>` of each line among them (in lm1b the closing
        `<S>` of each sentence, and words outside its vocabulary as `<UNK>`).
        """
        return "bpc" if isinstance(self.vocab[0], int) else "ppl"


def checksum(corpus):
    """CRC-32 of all tokens and of where they are cut: another number for another text."""
    number, splits = 0, (corpus.train, corpus.valid, corpus.test)
    with progress("comparing the text", sum(split.nbytes for split in splits)) as advance:
        for split in splits:
            number = zlib.crc32(str(len(split)).encode(), number)
            for piece in split.split(BLOCK):
                number = zlib.crc32(piece.numpy(), number)
                advance(piece.nbytes)
    return number


def tensor(data):
    """Bytes (n) -> uint8 tensor (n,), by way of a bytearray: torch wants memory it may write to."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def vocabulary(data):
    """The official order: byte values that occur, by falling count, ties by first appearance."""
    counts = torch.bincount(tensor(data), minlength=256).tolist()
    return sorted((b for b in range(256) if counts[b]), key=lambda b: (-counts[b], data.find(b)))


def byte_table(vocab):
    """Return the table with which bytes.translate turns bytes of the vocabulary into tokens."""
    return bytes.maketrans(bytes(vocab), bytes(range(len(vocab))))


def read(name, root):
    """Return the bytes of a corpus or file, and a label that says what they are."""
    if name == "stdlib":
        data = standard_library()
        return data, (f"stdlib (Python {sys.version.split()[0]}, {len(data):,} bytes, "
                      f"sha256 {hashlib.sha256(data).hexdigest()[:8]}…)")
    if name in SOURCES:
        return unpacked(SOURCES[name], root)[0].read_bytes(), name
    if Path(name).is_file():
        return Path(name).read_bytes(), Path(name).name
    known = ["stdlib", *SOURCES]
    near = "".join(f"; did you mean {k}?" for k in difflib.get_close_matches(name, known, n=1))
    raise ValueError(f"{name!r} is neither a file that exists nor one of {', '.join(known)}{near}")


def load(name_or_path, root="data", drop_newlines=False):
    """Return a Corpus: "stdlib", a benchmark (kept in the folder root), or a file.

    wt103, wikitext-2, ptb and lm1b are words, the others bytes, cut into 90, 5 and 5 percent.
    drop_newlines counts enwik8 as the paper does, whose pipeline loses the newlines: 204 symbols in
    place of 205, 88,982,818 training tokens, and about 0.02 bpc more for the same model.

    Raises ValueError, one line, for whatever goes wrong: no such name or file, too little text, a
    failed download, a full disk.
    """
    name = str(name_or_path)
    if drop_newlines and name != "enwik8":
        raise ValueError(f"drop_newlines is the official count of enwik8, not of {name}")
    try:
        if name in SOURCES and SOURCES[name].vocabulary:
            return sentence_corpus(name, root)
        if name in SOURCES and len(SOURCES[name].files) > 1:
            return word_corpus(name, root)
        return byte_corpus(name, root, drop_newlines)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error})") from None


def byte_corpus(name, root, drop_newlines):
    """Return a Corpus of bytes; what `load` says of them is done here."""
    data, label = read(name, root)
    if name == "enwik8":
        label += " (newlines dropped)" if drop_newlines else " (all bytes)"
    twentieth = len(data) // 20
    if twentieth < 2:  # one token to read, one to predict
        raise ValueError(f"{label} has {len(data)} bytes, but at least 40 are needed for 2 in each "
                         "of train, valid and test")
    drop = b"\n" if drop_newlines else b""  # after the cut, as the official code does
    vocab = [byte for byte in vocabulary(data) if byte not in drop]
    parts = data[:-2 * twentieth], data[-2 * twentieth:-twentieth], data[-twentieth:]
    train, valid, test = (tensor(part.translate(byte_table(vocab), drop)) for part in parts)
    return Corpus(train, valid, test, vocab, label)


# ---- words: read in blocks, because a text may be larger than memory ----------------------------

BLOCK = 1 << 20  # bytes of text, or tokens, that are worked on at a time
PARALLEL = 1 << 25  # bytes of text for which it pays to start processes
SEPARATORS = "<eos>", "<S>"  # what ends a line: <S> in lm1b, <eos> elsewhere


class Closed(dict):
    """{word: token}; a word that it lacks is `<UNK>`."""

    def __missing__(self, word):
        return self["<UNK>"]


def unix(text):
    """Let every line end with a newline alone, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_words(text, separator):
    """Split text at white space; the separator stands for the end of each line."""
    return text.replace("\n", f" {separator} ").split()


def line_with(paths, wrong):
    """Say where the first wrong line is (slow: called when it is known that there is one)."""
    for path in paths:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if wrong(line):
                    return f"{path}, line {number},"


def text_of(path, start=0, end=None):
    """Return bytes start to end of a file as text, its last line ended.  Raises ValueError."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read() if end is None else file.read(end - start)
    if start == 0 and data.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{path}, line 1, begins with a byte order mark; plain UTF-8 is needed")
    if b"\0" in data:
        raise ValueError(f"{line_with([path], lambda line: chr(0) in line)} holds a NUL byte")
    try:
        text = unix(data.decode())
    except UnicodeDecodeError:
        line = line_with([path], lambda line: re.search("[\udc80-\udcff]", line))
        raise ValueError(f"{line} is not UTF-8") from None
    return text + "\n" if text and text[-1] != "\n" else text


def blocks(path, separator):
    """Cut a text at ends of lines: a list of (path, start, end, separator), offsets in bytes."""
    cuts, size = [0], path.stat().st_size
    with open(path, "rb") as file:
        while cuts[-1] < size:
            file.seek(min(cuts[-1] + BLOCK, size))
            file.readline()  # up to and with a newline, so a cut never parts \r and \n
            cuts.append(file.tell())
    return [(path, start, end, separator) for start, end in zip(cuts, cuts[1:])]


def block_tokens(block, token=None):
    """Return the tokens of a block, (n,) int32, from a {word: token}."""
    path, start, end, separator = block
    words = split_words(text_of(path, start, end), separator)
    token = in_worker["token"] if token is None else token
    return np.fromiter(map(token.__getitem__, words), np.int32, len(words))


in_worker = {}  # a process of a pool gets the vocabulary once, when it starts


def start_worker(token):
    """Begin a process of a pool; Ctrl-C is for the parent alone, which then ends the others."""
    in_worker["token"] = token
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tokenize(path, separator, token, advance=lambda n: None, pool=None):
    """Yield the tokens of a text block by block, in order; a pool must know `token` already."""
    jobs = blocks(path, separator)
    done = pool.imap(block_tokens, jobs) if pool else (block_tokens(job, token) for job in jobs)
    for (_, start, end, _), tokens in zip(jobs, done):
        advance(end - start)
        yield tokens


def joined(parts, path):
    """Join arrays of tokens; ValueError if they are not enough to read one and predict one."""
    tokens = np.concatenate([[], *parts], dtype=np.int32, casting="unsafe")
    if len(tokens) < 2:
        raise ValueError(f"{path} has {len(tokens)} tokens, but at least 2 are needed")
    return tokens


def word_corpus(name, root):
    """Return a Corpus of words: `<eos>` ends each line, an empty line is a lone `<eos>`.

    `<eos>` is token 0, then words come by falling count, ties by first appearance.
    """
    source, splits = SOURCES[name], []
    paths = unpacked(source, root)
    number = defaultdict(itertools.count(1).__next__, {"<eos>": 0})  # a new word gets the next
    with progress(f"reading {name}", sum(path.stat().st_size for path in paths)) as advance:
        for path in paths:  # the numbers of first appearance: counts are known at the end only
            splits.append(joined(tokenize(path, "<eos>", number, advance), path))
    pieces = [np.array_split(split, 1 + len(split) // BLOCK) for split in splits]  # views
    counts = sum(np.bincount(piece, minlength=len(number))
                 for split in pieces[:source.counted] for piece in split)
    words = list(number)
    if not counts.all():
        word = words[counts.argmin()]
        line = line_with(paths[source.counted:], lambda line: word in line.split())
        raise ValueError(f"{line} has the word {word!r}, which the training split lacks")
    counts[0] = np.iinfo(counts.dtype).max
    order = np.argsort(-counts, kind="stable")
    token = np.argsort(order)  # the other way round: from number to token
    for piece in (piece for split in pieces for piece in split):
        piece[:] = token[piece]
    found = (*map(len, splits), len(words))
    if source.counts and found != source.counts:
        raise ValueError(f"{name} in {root} has (train, valid, test, vocabulary) {found}, published"
                         f" is {source.counts}: a file was changed; delete these and run again")
    return Corpus(*map(torch.from_numpy, splits), [words[i] for i in order], name)


# ---- sentences: encoded once, into a file that is mapped into memory ----------------------------

def sentence_corpus(name, root):
    """Return a Corpus of independent sentences, `<S> s1 <S> s2 <S> ... sn <S>`.

    One `<S>` ends a sentence and begins the next.  The official `<S> w1 ... wn <S>` around each has
    the same n + 1 predictions, since its first `<S>` is never a target.  Words that the published
    vocabulary lacks are `<UNK>`.  The held-out shard is valid and test.
    """
    source = SOURCES[name]
    *shards, heldout = unpacked(source, root)
    listed = fetch(source.vocabulary, root)
    token = read_vocabulary(listed)
    train = encode_once(Path(root, f"{name}.train.int32"), [listed, *shards], token)
    test = torch.from_numpy(joined([[token["<S>"]], *tokenize(heldout, "<S>", token)], heldout))
    return Corpus(train, test, test, list(token), name, token["<S>"])


def read_vocabulary(path):
    """Return {word: token} from a file whose lines begin with a word (its count may follow)."""
    token = Closed()
    for line, text in enumerate(text_of(path).split("\n")[:-1], 1):
        word = (text.split() or [""])[0]
        if not word or word in token:
            what = f"a second {word!r}" if word else "no word"
            raise ValueError(f"{path}, line {line}, has {what}")
        token[word] = len(token)
    for word in ("<S>", "<UNK>"):
        if word not in token:
            raise ValueError(f"{path} lacks {word}")
    return token


def checksums(paths):
    """Return {file name: sha256}, with progress over all."""
    found = {}
    with progress("checking for changes", sum(path.stat().st_size for path in paths)) as advance:
        for path in paths:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while piece := file.read(1 << 18):
                    digest.update(piece)
                    advance(len(piece))
            found[path.name] = digest.hexdigest()
    return found


def encode_once(cache, sources, token):
    """Return `<S>` and the tokens of sources[1:] as an int32 tensor mapped from the file `cache`.

    A journal beside it, cache.json, has the checksums of all sources (the first is the vocabulary):
    when one changes, all is encoded anew.  It also has how many texts and tokens are done, so that
    a killed run goes on after its last whole text.  Raises ValueError if cache cannot be written.
    """
    part, journal = Path(f"{cache}.part"), Path(f"{cache}.json")
    done, now = read_journal(journal), checksums(sources)
    made = cache if cache.is_file() else part
    try:
        held = made.stat().st_size // 4 if made.is_file() else 0  # tokens
        if (done.get("sources") != now or held < done["tokens"]
                or made == cache and held > done["tokens"]):
            cache.unlink(missing_ok=True)  # before anything else: it is no longer true
            part.write_bytes(np.int32(token["<S>"]))
            done = {"sources": now, "texts": 0, "tokens": 1}
        if not cache.is_file():
            append(sources[1:], part, journal, done, token)
            os.replace(part, cache)
    except OSError as error:
        raise ValueError(f"{cache} cannot be written ({error})") from None
    if done["tokens"] < 2:
        raise ValueError(f"{sources[1]} and all other training texts are empty")
    return torch.from_file(str(cache), shared=False, size=done["tokens"], dtype=torch.int32)


def read_journal(path):
    """Return what the journal says, or {} if there is none that makes sense."""
    try:
        done = json.loads(path.read_text())
        sane = type(done["texts"]) is type(done["tokens"]) is int and done["texts"] >= 0
        return done if sane and done["tokens"] > 0 else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def append(texts, part, journal, done, token):
    """Append the texts that are not done yet; after each the journal is brought up to date."""
    texts = texts[done["texts"]:]
    size = sum(path.stat().st_size for path in texts)
    n = min(4, os.cpu_count())
    pool = Pool(n, start_worker, (token,)) if size > PARALLEL else nullcontext()
    with open(part, "r+b") as file, progress(f"writing {part}", size) as advance, pool as pool:
        file.truncate(4 * done["tokens"])  # what came after the last whole text
        file.seek(0, os.SEEK_END)
        for path in texts:
            for tokens in tokenize(path, "<S>", token, advance, pool):
                file.write(tokens)
                done["tokens"] += len(tokens)
            done["texts"] += 1
            file.flush()
            os.fsync(file.fileno())  # the tokens are on the disk before the journal says so
            Path(f"{journal}.part").write_text(json.dumps(done))
            os.replace(f"{journal}.part", journal)


class SentenceLanes:
    """Sentences in a new order for each epoch, as B lanes that `segments` reads like a tensor.

    Lane b is made of every B-th sentence of the order, each as `<S> w1 ... wn`; all lanes end where
    the shortest does.  stream[:, a:c] finds any columns, so a run can go on where it stopped.
    shape is (B, L + 1).  tokens are not copied: for each sentence two integers are kept.
    """

    def __init__(self, tokens, B, separator, seed, epoch):
        self.tokens, self.lanes = tokens, []
        starts, position = [], 0
        with progress("ordering sentences", 8 * len(tokens)) as advance:  # read, then put in lanes
            for piece in tokens.split(BLOCK):
                starts.append(np.flatnonzero(piece.numpy() == separator) + position)
                position += len(piece)
                advance(4 * len(piece))
            starts = np.concatenate(starts)
            n = len(starts) - 1  # the last separator begins no sentence
            if not 1 <= B <= n:
                raise ValueError(f"{n:,} sentences cannot be read in {B} lanes")
            order = np.random.default_rng((seed, epoch)).permutation(n)
            for b in range(B):
                chosen = order[b::B]
                ends = (starts[chosen + 1] - starts[chosen]).cumsum()  # of sentences, in the lane
                self.lanes.append((ends, starts[chosen + 1] - ends))  # column + this: in tokens
                advance(4 * int(ends[-1]))
        self.shape = B, 1 + min(int(ends[-1]) for ends, _ in self.lanes)

    def __getitem__(self, index):
        """stream[:, a:c] -> the tokens of columns a to c of all lanes, (B, c - a)."""
        rows, columns = index
        if rows != slice(None):
            raise ValueError("all lanes are read together: stream[:, a:c]")
        columns = np.arange(*columns.indices(self.shape[1]))
        places = []
        for ends, shift in self.lanes:  # (the column after a lane's end is its last separator)
            sentence = np.searchsorted(ends, columns, side="right").clip(max=len(ends) - 1)
            places.append(columns + shift[sentence])
        return self.tokens[torch.from_numpy(np.stack(places))]


# ---- between text and tokens --------------------------------------------------------------------

def encode(text, vocab):
    """Turn text into tokens, (n,) int64: the bytes of its UTF-8, or its words and ends of lines.

    Raises ValueError for empty text and for characters or words that the corpus lacks.
    """
    if isinstance(vocab[0], int):
        how = "utf-8", "surrogatepass"  # surrogates: what Python makes of an argument not in UTF-8
        lacking = [c for c in dict.fromkeys(text) if not set(c.encode(*how)) <= set(vocab)]
        tokens, unit, advice = text.encode(*how).translate(byte_table(vocab)), "character", ""
    else:
        token = {word: i for i, word in enumerate(vocab)}
        words = split_words(unix(text), next(s for s in SEPARATORS if s in token))
        lacking = [word for word in dict.fromkeys(words) if word not in token]
        tokens, unit = [token.get(word) for word in words], "word"
        advice = "".join(f"; write {u} instead" for u in ("<unk>", "<UNK>") if u in token)
    if lacking:
        raise ValueError(f"the corpus has no {', '.join(map(repr, lacking[:5]))}{advice}")
    if not tokens:
        raise ValueError(f"the text is empty, at least one {unit} is needed")
    return torch.tensor(list(tokens))


# ---- and back -----------------------------------------------------------------------------------

def checked(tokens, vocab):
    """Return tokens as a tensor on the CPU; ValueError if one is not in vocab."""
    try:
        tokens = torch.as_tensor(tokens).cpu()
    except Exception as error:  # for what cannot be a tensor torch has many types
        raise ValueError(f"tokens cannot be made of {type(tokens).__name__} ({error})") from None
    if tokens.dim() != 1 or tokens.dtype.is_floating_point and len(tokens) or tokens.is_complex():
        raise ValueError(f"tokens must be integers (n,), got {tokens.dtype} {tuple(tokens.shape)}")
    for token in tokens.aminmax() if tokens.numel() else ():
        if not 0 <= int(token) < len(vocab):  # int, because 256 is 0 in uint8
            raise ValueError(f"token {token} outside vocabulary of {len(vocab)}")
    return tokens


def as_bytes(tokens, vocab):
    """Turn tokens of a byte corpus, (n,), into n bytes; ValueError if one is not in vocab."""
    table = bytes.maketrans(bytes(range(len(vocab))), bytes(vocab))
    return checked(tokens, vocab).to(torch.uint8).numpy().tobytes().translate(table)


def decode(tokens, vocab):
    """Turn tokens into text: bytes that are not UTF-8 become U+FFFD, separators end a line."""
    if isinstance(vocab[0], int):
        return as_bytes(tokens, vocab).decode("utf-8", errors="replace")
    words = (vocab[token] for token in checked(tokens, vocab).tolist())
    text = "".join("\n" if word in SEPARATORS else f"{word} " for word in words)
    return text.replace(" \n", "\n").removesuffix(" ")


def compressed_bits(tokens, vocab):
    """Return {"zlib": bits, "xz": bits} per token of a byte corpus, as zlib -9 and xz need them.

    An easy bar for a model: they start from nothing, they have not seen the training split.
    """
    data = as_bytes(tokens, vocab)
    sizes = {"zlib": len(zlib.compress(data, 9)), "xz": len(lzma.compress(data))}
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def main(argv=None):
    """Print what a corpus holds, and how well two compressors do on a test split of bytes."""
    parser = argparse.ArgumentParser(description="Show what a corpus holds.")
    parser.add_argument("corpus", nargs="?", default="stdlib", metavar="NAME or FILE",
                        help=f"stdlib (the default), {', '.join(SOURCES)}, or a file")
    parser.add_argument("--data-dir", default="data", metavar="FOLDER",
                        help="where benchmarks are kept (default: data)")
    given = parser.parse_args(argv)
    try:
        corpus = load(given.corpus, given.data_dir)
    except ValueError as error:
        raise SystemExit(f"corpora.py: {error}") from None
    print(corpus.name)
    print(f"  tokens: train {len(corpus.train):,}, valid {len(corpus.valid):,}, "
          f"test {len(corpus.test):,}; vocabulary {len(corpus.vocab):,}")
    print(f"  begins: {decode(corpus.train[:800], corpus.vocab)[:200]!r}")
    if corpus.unit == "bpc":
        bits = compressed_bits(corpus.test, corpus.vocab)
        print(f"  test split in bits per byte: zlib -9 {bits['zlib']:.3f}, xz {bits['xz']:.3f} "
              "(neither has seen the training split)")


if __name__ == "__main__":
    main()
