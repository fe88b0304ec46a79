"""Text in, token arrays out: the corpora of this course.

The problem.  Two results compare only if they count the same tokens of the same text.  So a corpus
is known to the byte: a benchmark comes from its published address, is checked against its published
size and checksum, and is cut where the literature cuts it.

What comes out is a `Corpus`: three 1-D tensors of tokens (train, valid, test), the vocabulary that
turns them back into text, and a name that says what the numbers count.

    python corpora.py               the built-in corpus: Python's own library, no download
    python corpora.py enwik8        a benchmark: fetched into data/ once, and checked
    python corpora.py notes.txt     any file of yours

prints what was read, and how small zlib and xz make the test split: a model that needs more bits
than they do has learned little.
"""
import argparse
import difflib
import hashlib
import lzma
import os
import sys
import sysconfig
import time
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import torch


class Source(NamedTuple):
    """Where a benchmark is published, and how to know that it arrived whole (sizes in bytes)."""
    addresses: tuple[str, ...]  # tried in order
    zip_size: int
    zip_checksum: str  # "algorithm:hexadecimal digest"
    member: str  # the one file wanted from the zip
    raw_size: int
    raw_checksum: str


SOURCES = {
    "enwik8": Source(
        ("http://mattmahoney.net/dc/enwik8.zip",), 36_445_475,
        "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        "enwik8", 100_000_000, "sha1:57b8363b814821dc9d47aa4d41f58733519076b2"),
    "text8": Source(
        ("http://mattmahoney.net/dc/text8.zip",), 31_344_016,
        "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        "text8", 100_000_000, "md5:3bea1919949baf155f99411df5fada7e"),
}
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings",
           "pydoc_data", "lib2to3"}  # of the standard library: tests, tables, other people's code


# ---- fetching: a file appears under its name when it is whole and right, or not at all ----------

def check(n, digest, size, checksum):
    """Raise ValueError unless n bytes with this digest are what was published."""
    found = f"{digest.name}:{digest.hexdigest()}"
    if n != size:
        raise ValueError(f"{n:,} bytes, expected {size:,}")
    if found != checksum:
        raise ValueError(f"checksum {found}, expected {checksum}")


def copy(stream, path, size, checksum, label):
    """Copy a stream to path, checking on the way; a slow copy shows its progress on stderr.

    Raises ValueError as soon as more than `size` bytes come (servers and zips can lie about their
    length), and at the end if fewer came or the checksum differs.  Leaves nothing after an error.
    """
    part, digest, done = Path(f"{path}.part"), hashlib.new(checksum.split(":")[0]), 0
    shown = started = time.monotonic()
    try:
        with open(part, "wb") as file:
            while piece := stream.read(1 << 18):
                done += len(piece)
                if done > size:
                    raise ValueError(f"more than the expected {size:,} bytes")
                digest.update(piece)
                file.write(piece)
                line = f"\r{label}: {done / size:.0%} of {size / 1e6:.1f} MB"
                if time.monotonic() - shown > 0.5:
                    shown = time.monotonic()
                    print(line, end="", file=sys.stderr, flush=True)
        check(done, digest, size, checksum)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # whatever went wrong, Ctrl-C included
        if shown > started:
            print(line, file=sys.stderr)


def download(addresses, path, size, checksum):
    """Fetch path from the first address that has the right file.

    Raises ValueError, one sentence, which also says how to do it by hand.
    """
    reasons, agent = [], {"User-Agent": "transformer-xl-from-scratch"}  # some refuse Python's own
    for address in addresses:
        request = urllib.request.Request(address, headers=agent)
        try:
            with urllib.request.urlopen(request, timeout=30) as stream:
                return copy(stream, path, size, checksum, f"fetching {address}")
        except (OSError, HTTPException, ValueError) as error:
            reasons.append(f"{address} ({' '.join(str(error).split())})")  # one line, always
    raise ValueError(f"{path} is missing and cannot be fetched from {' or '.join(reasons)}; fetch "
                     f"it by hand and save it as {path}, where it will be checked the same way")


def unpack(archive, path, source):
    """Check an archive and copy its one wanted member to path; no name in it becomes a path.

    Raises ValueError if it is not the published archive or path cannot be written.
    """
    try:
        data = archive.read_bytes()
        check(len(data), hashlib.new(source.zip_checksum.split(":")[0], data),
              source.zip_size, source.zip_checksum)
        with zipfile.ZipFile(archive) as file:
            if source.member not in file.namelist():
                raise ValueError(f"holds {file.namelist()[:3]}, expected {source.member!r}")
            with file.open(source.member) as stream:
                copy(stream, path, source.raw_size, source.raw_checksum, f"unpacking {path}")
    except OSError as error:
        raise ValueError(f"{path} cannot be unpacked from {archive} ({error})") from None
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{archive} is not the archive of {source.addresses[0]} ({error}); "
                         "delete it and run again") from None


def fetch(name, root):
    """Return the bytes of a benchmark: root/name, made at the first call from root/name.zip.

    Later calls check only its size: it got its name after its checksum was right, so it is wrong
    only if somebody put another file there.
    """
    source, raw, archive = SOURCES[name], Path(root, name), Path(root, f"{name}.zip")
    if not raw.exists():
        raw.parent.mkdir(parents=True, exist_ok=True)
        if not archive.exists():
            download(source.addresses, archive, source.zip_size, source.zip_checksum)
        unpack(archive, raw, source)  # checks again: the archive may have been put there by hand
    if raw.stat().st_size != source.raw_size:
        raise ValueError(f"{raw} has {raw.stat().st_size:,} bytes, expected {source.raw_size:,}; "
                         "delete it and run again")
    return raw.read_bytes()


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
    values.  `name` says what the numbers count.
    """
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    vocab: list
    name: str
    separator: int | None = None

    @property
    def unit(self):
        """The unit of results: "bpc", bits per byte, or "ppl", perplexity, if tokens are words."""
        return "bpc" if isinstance(self.vocab[0], int) else "ppl"


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
        return fetch(name, root), name
    if Path(name).is_file():
        return Path(name).read_bytes(), Path(name).name
    known = ["stdlib", *SOURCES]
    near = "".join(f"; did you mean {k}?" for k in difflib.get_close_matches(name, known, n=1))
    raise ValueError(f"{name!r} is neither a file that exists nor one of {', '.join(known)}{near}")


def load(name_or_path, root="data", drop_newlines=False):
    """Return a Corpus of byte tokens: "stdlib", a benchmark (kept in the folder root), or a file.

    Each is cut into 90, 5 and 5 percent of its bytes.  drop_newlines counts enwik8 as the paper
    does, whose pipeline loses the newlines: 204 symbols in place of 205, 88,982,818 training
    tokens, and about 0.02 bpc more for the same model.

    Raises ValueError, one line, for whatever goes wrong: no such name or file, too little text, a
    failed download, a full disk.
    """
    name = str(name_or_path)
    if drop_newlines and name != "enwik8":
        raise ValueError(f"drop_newlines is the official count of enwik8, not of {name}")
    try:
        data, label = read(name, root)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error})") from None
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


def encode(text, vocab):
    """Turn text into tokens of a byte corpus: n bytes of UTF-8 -> (n,) int64.

    Raises ValueError for empty text and for characters that the corpus lacks.
    """
    if not text:
        raise ValueError("the text is empty, at least one character is needed")
    lacking = [c for c in dict.fromkeys(text) if not set(c.encode()) <= set(vocab)]
    if lacking:
        raise ValueError(f"the corpus has no {', '.join(map(repr, lacking[:5]))}")
    return torch.tensor(list(text.encode().translate(byte_table(vocab))))


# ---- and back -----------------------------------------------------------------------------------

def as_bytes(tokens, vocab):
    """Turn tokens of a byte corpus, (n,), into n bytes; ValueError if one is not in vocab."""
    tokens = torch.as_tensor(tokens).cpu()
    for token in tokens.aminmax() if tokens.numel() else ():
        if not 0 <= int(token) < len(vocab):  # int, because 256 is 0 in uint8
            raise ValueError(f"token {token} outside vocabulary of {len(vocab)}")
    table = bytes.maketrans(bytes(range(len(vocab))), bytes(vocab))
    return tokens.to(torch.uint8).numpy().tobytes().translate(table)


def decode(tokens, vocab):
    """Turn tokens of a byte corpus into text; bytes that are not UTF-8 become U+FFFD."""
    return as_bytes(tokens, vocab).decode("utf-8", errors="replace")


def compressed_bits(tokens, vocab):
    """Return {"zlib": bits, "xz": bits} per token of a byte corpus, as zlib -9 and xz need them.

    An easy bar for a model: they start from nothing, they have not seen the training split.
    """
    data = as_bytes(tokens, vocab)
    sizes = {"zlib": len(zlib.compress(data, 9)), "xz": len(lzma.compress(data))}
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def main(argv=None):
    """Print what a corpus holds, and how well two compressors do on its test split."""
    parser = argparse.ArgumentParser(description="Show what a corpus holds.")
    parser.add_argument("corpus", nargs="?", default="stdlib", metavar="NAME or FILE",
                        help=f"stdlib (the default), {', '.join(SOURCES)}, or a file")
    try:
        corpus = load(parser.parse_args(argv).corpus)
    except ValueError as error:
        raise SystemExit(f"corpora.py: {error}") from None
    print(corpus.name)
    print(f"  tokens: train {len(corpus.train):,}, valid {len(corpus.valid):,}, "
          f"test {len(corpus.test):,}; vocabulary {len(corpus.vocab)}")
    print(f"  begins: {decode(corpus.train[:800], corpus.vocab)[:200]!r}")
    bits = compressed_bits(corpus.test, corpus.vocab)
    print(f"  test split in bits per byte: zlib -9 {bits['zlib']:.3f}, xz {bits['xz']:.3f} "
          "(neither has seen the training split)")


if __name__ == "__main__":
    main()
