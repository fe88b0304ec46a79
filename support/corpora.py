"""Text in, token arrays out: the corpora of this course.

load("stdlib") is the text of the lessons: the .py files of Python's own library, about ten million
bytes.  It needs no download, and names recur after thousands of bytes, which a memory can exploit.
A token is one byte, given as the byte's index in the vocabulary.  For benchmarks that are counted
in words (wt103, wikitext-2, ptb, lm1b) a token is a word.
load("copies") is a synthetic text whose lowest loss at each memory length is known (draw_copies).

Tokens are uint8, or int32 for words.  An embedding needs int64, eight bytes per token, so each
segment is converted (`.long()`) when it is used.

    python -m support.corpora enwik8        or stdlib, copies, a file of yours

prints the sizes of a corpus and, for bytes, the bits per byte that zlib and xz need for its test
split.  A model with a higher loss has learned little.
"""
import codecs
import hashlib
import itertools
import lzma
import os
import random
import re
import sys
import sysconfig
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from support.names import did_you_mean, printable, visible
from support.download import SOURCES, unpack
from support.files import write_atomically
from support.progress import progress

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings",
           "pydoc_data", "lib2to3",  # of the standard library: tests, tables, other people's code,
           "distutils"}  # and what Python 3.12 no longer has
SEPARATORS = "<eos>", "<S>"  # ends of a line: <S> in lm1b, <eos> elsewhere
FORMATS = {  # by the first bytes of a file
    b"\x1f\x8b": "compressed by gzip", b"\xfd7zXZ": "compressed by xz", b"PK\3\4": "a zip archive",
    b"%PDF": "a PDF", b"\xff\xfe": "UTF-16 text", b"\xfe\xff": "UTF-16 text"}


@dataclass(frozen=True)
class Corpus:
    """One text, split into three tensors (n,) of tokens: 90, 5 and 5 percent, or as published."""
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    vocab: list  # vocab[token] is the byte, 0 to 255, or the word
    name: str  # which also says how it was counted
    separator: int | None = None  # token around each sentence, if they are independent (lm1b)

    @property
    def unit(self):
        """The unit: "bpc", bits per byte, or "ppl", perplexity, if tokens are words."""
        return "bpc" if isinstance(self.vocab[0], int) else "ppl"


# ---- bytes --------------------------------------------------------------------------------------

def standard_library():
    """Return the .py files of Python's own library: the bytes of train, valid and test.

    A hash of a file's path (CRC-32) determines its position and its split, so that two versions of
    Python have nearly the same text.  Of 20 values, 18 mean train, one valid and one test.
    """
    folder, paths = Path(sysconfig.get_path("stdlib")), []
    for here, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith("config-")]
        paths += [Path(here, f).relative_to(folder).as_posix() for f in files if f.endswith(".py")]
    splits = bytearray(), bytearray(), bytearray()
    for number, path in sorted((zlib.crc32(path.encode()), path) for path in paths):
        text = (folder / path).read_bytes().replace(b"\r\n", b"\n")  # as Windows may end lines
        text = text.replace(b"\f", b"")  # page breaks, which newer libraries do not have
        splits[max(0, number % 20 - 17)].extend(text)
    return splits


def read(name, root):
    """Return the three splits of a corpus or file as bytes, and a label."""
    if name == "stdlib":
        splits = standard_library()
        data = b"".join(splits)
        return splits, (f"stdlib (Python {sys.version.split()[0]}, {len(data):,} bytes, "
                        f"sha256 {hashlib.sha256(data).hexdigest()[:8]}…)")
    if name in SOURCES:
        texts = [path.read_bytes() for path in unpack(SOURCES[name], root)]
        return texts if len(texts) == 3 else split(*texts, name), name
    if Path(name).is_file():
        data, label = Path(name).read_bytes(), printable(Path(name).name)
        for start, kind in FORMATS.items():
            if data.startswith(start):
                print(f"{label} is {kind}, read byte by byte: save it as UTF-8 text instead")
        return split(data, label), label
    if Path(name).is_absolute():  # as --text gives it
        raise ValueError(f"there is no file {name} (a folder or a pipe must be saved as a file)")
    known = ["stdlib", *SOURCES, "copies"]
    raise ValueError(f"{name!r} is neither a file that exists nor one of {', '.join(known)}"
                     f"{did_you_mean(name, known)}")


def split(data, label):
    """Split one text into train, valid and test; ValueError if it is too short."""
    twentieth = len(data) // 20
    if twentieth < 2:  # one token to read, one to predict
        raise ValueError(f"{label} has {len(data)} bytes, but at least 40 are needed")
    return data[:-2 * twentieth], data[-2 * twentieth:-twentieth], data[-twentieth:]


def tensor(data):
    """Return bytes as a tensor (n,), uint8, in a bytearray, since torch may write to it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def vocabulary(data):
    """Return the bytes that occur, in the official order: by decreasing count, then appearance."""
    counts = torch.bincount(tensor(data), minlength=256).tolist()
    return sorted((b for b in range(256) if counts[b]), key=lambda b: (-counts[b], data.find(b)))


def byte_corpus(name, root, drop_newlines):
    """Return a Corpus of bytes."""
    splits, label = read(name, root)
    if name == "enwik8":
        label += " (newlines dropped)" if drop_newlines else " (all bytes)"
    drop = b"\n" if drop_newlines else b""  # after the split, as in the official code
    vocab = [byte for byte in vocabulary(b"".join(splits)) if byte not in drop]
    if name in SOURCES and len(vocab) + drop_newlines != SOURCES[name].vocab_size:
        raise ValueError(f"{name} in {root} is another text, of {len(vocab)} symbols; delete it")
    table = bytes.maketrans(bytes(vocab), bytes(range(len(vocab))))
    return Corpus(*(tensor(part.translate(table, drop)) for part in splits), vocab, label)


# ---- words: read line by line, because a text may be larger than memory -------------------------

def tokenize(path, separator, token):
    """Tokenize a text by a dict {word: token} -> (n,) int32; the separator ends each line."""
    with open(path, encoding="utf-8") as file:
        lines = progress(file, f"reading {path}", path.stat().st_size,
                         lambda line: len(line.encode()))
        words = itertools.chain.from_iterable((*line.split(), separator) for line in lines)
        return torch.from_numpy(np.fromiter(map(token.__getitem__, words), np.int32))


def word_corpus(name, root):
    """Return a Corpus of words: `<eos>` ends each line, an empty line is a lone `<eos>`.

    `<eos>` is token 0, then come words by decreasing count, ties by first appearance.
    """
    source, paths = SOURCES[name], unpack(SOURCES[name], root)
    number = defaultdict(itertools.count(1).__next__, {"<eos>": 0})  # a new word gets the next
    splits = [tokenize(path, "<eos>", number) for path in paths]
    words = list(number)
    found, published = (*map(len, splits), len(words)), (*source.counts, source.vocab_size)
    if source.counts and found != published:
        raise ValueError(f"{name} in {root} has (train, valid, test, vocabulary) {found}, published"
                         f" is {published}: a file was changed; delete these and run again")
    counts = sum(torch.bincount(split, minlength=len(words)) for split in splits[:source.counted])
    counts[0] = counts.sum()
    order = counts.argsort(descending=True, stable=True)
    token = order.argsort().int()  # the inverse permutation: from number to token
    return Corpus(*(token[split] for split in splits), [words[i] for i in order], name)


# ---- sentences: encoded once, into a file that is mapped into memory ----------------------------

def sentence_corpus(name, root):
    """Return a Corpus of independent sentences, `<S> s1 <S> s2 <S> ... sn <S>`.

    One `<S>` ends a sentence and begins the next.  The official `<S> w1 ... wn <S>` around each has
    the same n + 1 predictions, since its first `<S>` is never a target.  Words that the published
    vocabulary lacks are `<UNK>`.  The held-out shard is valid and test.
    """
    *shards, heldout, words = unpack(SOURCES[name], root)
    with open(words, encoding="utf-8") as file:
        # a line is a word, and perhaps its count
        token = {line.split()[0]: number for number, line in enumerate(file)}
    vocab, unknown = list(token), token["<UNK>"]
    token = defaultdict(lambda: unknown, token)  # and any other word
    encoded = Path(root, f"{name}.train.int32")
    if not encoded.is_file():
        tokens = (tokenize(shard, "<S>", token).numpy() for shard in shards)
        pieces = itertools.chain([np.int32(token["<S>"]).tobytes()], tokens)
        write_atomically(encoded, lambda file: file.writelines(pieces))
    train = torch.from_file(str(encoded), shared=False, size=encoded.stat().st_size // 4,
                            dtype=torch.int32)
    first = torch.tensor([token["<S>"]], dtype=torch.int32)
    test = torch.cat([first, tokenize(heldout, "<S>", token)])
    return Corpus(train, test, test, vocab, name, token["<S>"])


# ---- a synthetic text, whose dependencies are known ---------------------------------------------

DISTANCES = (24, 48, 72, 96)  # multiples of the number of kinds: a token there is of the same kind


def draw_copies(n, seed):
    """Draw n tokens, (n,) uint8, whose dependencies have a known length.

    Four kinds of symbols, eight of each, take turns.  With probability 0.9 a token repeats the one
    at its kind's distance before it, otherwise it is a random symbol of its kind:

        kind               A        a        M        m        A        a        M        m   ...
        repeats what was   24       48       72       96       24       48       72       96  ago

    So c tokens of context determine the kinds with a distance of at most c, and no others.
    """
    draw, tokens = random.Random(seed), []
    for t in range(n):
        kind = t % len(DISTANCES)
        back = t - DISTANCES[kind]
        tokens.append(tokens[back] if back >= 0 and draw.random() < 0.9
                      else 8 * kind + draw.randrange(8))
    return torch.tensor(tokens, dtype=torch.uint8)


def synthetic_corpus():
    """Return draw_copies' text as a Corpus: 1,000,000 training tokens, 50,000 in other splits."""
    splits = (draw_copies(n, seed) for seed, n in enumerate((1_000_000, 50_000, 50_000)))
    return Corpus(*splits, list(b"ABCDEFGHabcdefghMNOPQRSTmnopqrst"),
                  f"copies (distances {', '.join(map(str, DISTANCES))})")


# ---- any corpus --------------------------------------------------------------------------------

def load(name_or_path, root="data", drop_newlines=False):
    """Return a Corpus: "stdlib", "copies", a benchmark (kept in the folder root), or a file.

    drop_newlines counts enwik8 as in the paper, whose pipeline loses the newlines: 204 symbols
    instead of 205.  Raises ValueError, one line, for any failure.
    """
    name = str(name_or_path)
    if drop_newlines and name != "enwik8":
        raise ValueError(f"drop_newlines applies only to enwik8, got {name}")
    if name == "copies":
        return synthetic_corpus()
    try:
        kind = SOURCES[name].kind if name in SOURCES else "bytes"  # as are stdlib and files
        if kind == "bytes":
            return byte_corpus(name, root, drop_newlines)
        return (word_corpus if kind == "words" else sentence_corpus)(name, root)
    except (MemoryError, OSError, UnicodeDecodeError) as error:
        path = Path(root, SOURCES[name].files[0].name) if name in SOURCES else Path(name)
        reason = str(error) or f"the memory is too small for {path.stat().st_size:,} bytes"
        raise ValueError(f"{name} cannot be read or encoded ({reason})") from None


def checksum(corpus):
    """Return the CRC-32 of all tokens and of the lengths of the splits."""
    number = 0
    for split in (corpus.train, corpus.valid, corpus.test):
        number = zlib.crc32(str(len(split)).encode(), number)
        number = zlib.crc32(split.numpy(), number)
    return number


def with_vocabulary(corpus, vocab):
    """Return a text of bytes in another vocabulary, without the bytes that this one lacks."""
    lacking = bytes(set(corpus.vocab) - set(vocab))  # such as tabs
    table = bytes.maketrans(bytes(vocab), bytes(range(len(vocab))))
    splits = (tensor(as_bytes(split, corpus.vocab).translate(table, lacking))
              for split in (corpus.train, corpus.valid, corpus.test))
    return Corpus(*splits, vocab, corpus.name)


# ---- between text and tokens --------------------------------------------------------------------

def encode(text, vocab):
    """Turn text into tokens, (n,) int64: its UTF-8 bytes, or its words and ends of lines.

    Raises ValueError for empty text and for characters or words that the corpus lacks.
    """
    token = {symbol: i for i, symbol in enumerate(vocab)}
    if isinstance(vocab[0], int):
        symbols = {c: c.encode() for c in text}
        parts = text
    else:
        separator = next((s for s in SEPARATORS if s in token), "\n")
        parts = re.sub("\r\n?|\n", f" {separator} ", text).split()
        symbols = {word: [word] for word in parts}
    lacking = [repr(part) for part in symbols if not token.keys() >= set(symbols[part])]
    if lacking:
        advice = "".join(f"; write {u} instead" for u in ("<unk>", "<UNK>") if u in token)
        raise ValueError(f"the corpus has no {', '.join(lacking[:5])}{advice}")
    if not parts:
        raise ValueError("the text is empty, at least one character or word is needed")
    return torch.tensor([token[symbol] for part in parts for symbol in symbols[part]])


def as_bytes(tokens, vocab):
    """Turn tokens of a byte corpus, (n,), into n bytes."""
    return tokens.cpu().to(torch.uint8).numpy().tobytes().translate(bytes(vocab).ljust(256))


def decode(tokens, vocab):
    """Turn tokens into text to print: bytes that are not UTF-8 become U+FFFD, half a character at
    either end is left out, separators end a line.
    """
    if isinstance(vocab[0], int):
        data = as_bytes(tokens, vocab).lstrip(bytes(range(0x80, 0xC0)))  # none begins a character
        return visible(codecs.getincrementaldecoder("utf-8")("replace").decode(data))
    words = (vocab[token] for token in tokens.tolist())
    text = "".join("\n" if word in SEPARATORS else f"{word} " for word in words)
    return visible(text.replace(" \n", "\n").removesuffix(" "))


def xz_size(data):
    """Return the size in bytes of data compressed by xz -9e, whose window is 64 MiB."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def compressed_bits(corpus):
    """Return {compressor: bits per byte of the test split}, for a corpus of bytes.

    zlib and xz start from nothing.  The fair baseline for a trained model is xz primed with the
    training and validation text: the bytes that the test split adds to their compressed size.
    It takes seconds for ten million bytes, and is omitted above 32 MB.
    """
    test = as_bytes(corpus.test, corpus.vocab)
    sizes = {"zlib": len(zlib.compress(test, 9)), "xz": xz_size(test)}
    if len(corpus.train) < 1 << 25:
        before = as_bytes(torch.cat([corpus.train, corpus.valid]), corpus.vocab)
        whole, part = map(xz_size, progress((before + test, before), "compressing text", 2))
        sizes["xz primed with the other splits"] = whole - part
    return {name: 8 * size / len(test) for name, size in sizes.items()}


def main(argv):
    """Print the sizes and beginning of a corpus, and bits per byte of compressors for bytes."""
    try:
        corpus = load(argv[0] if argv else "stdlib")
    except ValueError as error:
        raise SystemExit(f"corpora.py: {error}") from None
    print(f"{corpus.name}\n  tokens: train {len(corpus.train):,}, valid {len(corpus.valid):,}, "
          f"test {len(corpus.test):,}; vocabulary {len(corpus.vocab):,}\n"
          f"  begins: {decode(corpus.train[:800], corpus.vocab)[:200]!r}")
    if corpus.unit == "bpc":
        print("  test split in bits per byte: " + ", ".join(
            f"{name} {bits:.3f}" for name, bits in compressed_bits(corpus).items()))


if __name__ == "__main__":
    main(sys.argv[1:])
