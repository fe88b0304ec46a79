"""The benchmarks, as published: fetched, checked, unpacked.

A file appears under its name when it is complete and correct, or not at all: Ctrl-C, a full disk
and a lost connection leave nothing half-written.  Size and checksum are compared with the published
ones while a file is fetched, or when you have put it there by hand.
"""
import hashlib
import tarfile
import urllib.request
import zipfile
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from support.files import write_atomically
from support.progress import progress


class File(NamedTuple):
    """A file as it was published, and how to check that it is complete."""
    name: str  # in the data folder, and in its archive
    size: int | None = None  # bytes; None if it is not published
    checksum: str | None = None  # "algorithm:hexadecimal digest"
    addresses: tuple[str, ...] = ()  # tried in order; a file of an archive has none


class Source(NamedTuple):
    """A benchmark: everything that is known about it."""
    kind: str  # "bytes", "words" or "sentences"
    models: tuple[str, str]  # that --dataset trains, with a GPU and without
    vocab_size: int  # as published
    archive: File | None  # zip or tar.gz; None if each file has addresses
    files: tuple[File, ...]  # train, valid, test; for bytes perhaps one text, which is then split;
    # for sentences the shards, the held-out one, the vocabulary
    counts: tuple[int, ...] = ()  # of words, published: tokens of train, valid and test
    counted: int = 3  # number of splits whose words the vocabulary counts


def wikitext(name, models, vocab_size, size, checksum, **more):
    """Return the entry of one of the two WikiTexts."""
    hosts = "https://wikitext.smerity.com", "https://s3.amazonaws.com/research.metamind.io/wikitext"
    archive = File(f"{name}-v1.zip", size, checksum, tuple(f"{h}/{name}-v1.zip" for h in hosts))
    files = tuple(File(f"{name}/wiki.{split}.tokens") for split in ("train", "valid", "test"))
    return Source("words", models, vocab_size, archive, files, **more)


LM1B = "1-billion-word-language-modeling-benchmark-r13output"
SOURCES = {
    "enwik8": Source(
        "bytes", ("enwik8-12L", "laptop"), 205,
        File("enwik8.zip", 36_445_475,
             "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
             ("http://mattmahoney.net/dc/enwik8.zip",)),
        (File("enwik8", 100_000_000),)),
    "text8": Source(
        "bytes", ("text8-12L", "laptop"), 27,
        File("text8.zip", 31_344_016,
             "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
             ("http://mattmahoney.net/dc/text8.zip",)),
        (File("text8", 100_000_000),)),
    "tinyshakespeare": Source(
        "bytes", ("laptop", "laptop"), 65, None,
        (File("tinyshakespeare/input.txt", 1_115_394,  # in tensorflow/datasets, checksums.tsv
              "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
              ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt",)),)),
    "wt103": wikitext(
        "wikitext-103", ("wt103-standard", "laptop-words"), 267_735, 190_229_076,
        "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        counts=(103_227_021, 217_646, 245_569), counted=1),
    "wikitext-2": wikitext(
        "wikitext-2", ("ptb", "laptop-words"), 33_278, 4_475_746,
        "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        counts=(2_088_628, 217_646, 245_569)),
    "ptb": Source(
        "words", ("ptb", "laptop-words"), 10_000,
        File("simple-examples.tgz", 34_869_662, "md5:30177ea32e27c525793142b6bf2c8e2d",
             ("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",)),
        (File("./simple-examples/data/ptb.train.txt", 5_101_618),
         File("./simple-examples/data/ptb.valid.txt", 399_782),
         File("./simple-examples/data/ptb.test.txt", 449_945)),
        counts=(929_589, 73_760, 82_430)),
    "lm1b": Source(
        "sentences", ("lm1b-base", "laptop-words"), 793_471,
        File(f"{LM1B}.tar.gz", 1_792_209_805,
             "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
             (f"http://www.statmt.org/lm-benchmark/{LM1B}.tar.gz",)),
        (*(File(f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100")
           for i in range(1, 100)),
         File(f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"),
         File("1b_word_vocab.txt", None,
              "sha256:c758fee313a5c952995f391a659fe31cde50f2b11f5fae6c0e75a0a6e79fa34d",
              ("https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt",)))),
}


# ---- fetch, check, unpack -----------------------------------------------------------------------

def checked(stream, file, label):
    """Yield the content of a stream, 256 kB at a time, and compare it with the published file.

    Raises ValueError at the end, or as soon as it is too long, as a server may never stop.
    """
    done, digest = 0, hashlib.new((file.checksum or "sha256:").split(":")[0])
    pieces = iter(lambda: stream.read(1 << 18), b"")
    for piece in progress(pieces, label, file.size, len):
        done += len(piece)
        if file.size is not None and done > file.size:
            raise ValueError(f"more than the expected {file.size:,} bytes")
        digest.update(piece)
        yield piece
    found = f"{digest.name}:{digest.hexdigest()}"
    if file.size not in (None, done):
        raise ValueError(f"{done:,} bytes, expected {file.size:,}")
    if file.checksum not in (None, found):
        raise ValueError(f"checksum {found}, expected {file.checksum}")


def download(file, path):
    """Fetch path from the first address that has the published file; ValueError if none has."""
    reasons, agent = [], {"User-Agent": "transformer-xl-from-scratch"}  # some refuse Python's own
    for address in file.addresses:
        request = urllib.request.Request(address, headers=agent)
        try:
            with urllib.request.urlopen(request, timeout=30) as stream:
                pieces = checked(stream, file, f"fetching {address}")
                return write_atomically(path, lambda to: to.writelines(pieces))
        except (OSError, HTTPException, ValueError) as error:
            reasons.append(f"{address} ({' '.join(str(error).split())})")  # one line, always
    raise ValueError(f"{path} is missing and cannot be fetched from {' or '.join(reasons)}; fetch "
                     f"it by hand and save it as {path}, where it will be checked the same way")


def fetch(file, root):
    """Return the path of a published file in root: downloaded, or checked if it is there."""
    path = Path(root, file.name)
    if not path.is_file():  # a pipe there would never end
        download(file, path)
        return path
    try:
        with open(path, "rb") as stream:
            for _ in checked(stream, file, f"checking {path}"):
                pass
    except ValueError as error:
        raise ValueError(f"{path} is not the file of {file.addresses[0]} ({error}); delete it and "
                         "run again") from None
    return path


def members(archive):
    """Yield (name, function that opens it) for each member of a zip or tar.gz, in its order."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                yield info.filename, partial(file.open, info)
    else:
        with tarfile.open(archive, "r:gz") as file:
            for info in file:
                yield info.name, partial(file.extractfile, info)


def extract(archive, files, root):
    """Unpack files of an archive into root.  Names in it are compared, never used as paths.

    ValueError if the archive lacks one or is broken, or if a path cannot be written.
    """
    missing = {file.name: file for file in files}
    try:
        for name, opened in members(archive):
            if file := missing.pop(name, None):
                path = Path(root, file.name)
                with opened() as stream:
                    pieces = checked(stream, file, f"unpacking {path}")
                    write_atomically(path, lambda to: to.writelines(pieces))
        if missing:
            raise ValueError(f"expected {next(iter(missing))!r} in it")
    except OSError as error:
        raise ValueError(f"{archive} cannot be unpacked ({error})") from None
    except Exception as error:  # zipfile, tarfile, zlib and lzma raise a dozen types
        raise ValueError(f"{archive} is damaged or another archive ({error}); delete it and run "
                         "again") from None


def unpack(source, root):
    """Return the paths of source.files in root: missing ones are fetched, or unpacked from the
    archive.  ValueError if that fails, or if a size is not the published one.
    """
    paths = {file: Path(root, file.name) for file in source.files}
    wanted = [file for file in paths if not file.addresses and not paths[file].is_file()]
    if wanted:
        try:
            archive = fetch(source.archive, root)
        except ValueError as error:
            names = [str(paths[file]) for file in wanted]
            if len(names) > 3:
                names[1:-1] = ["..."]
            raise ValueError(f"{error}, or save its unpacked files as {', '.join(names)}") from None
        extract(archive, wanted, root)
    for file, path in paths.items():
        if file.addresses:
            fetch(file, root)
        elif file.size not in (None, path.stat().st_size):
            raise ValueError(f"{path} does not have {file.size:,} bytes; delete it and run again")
    return [*paths.values()]
