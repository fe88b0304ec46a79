"""What a corpus promises: the right bytes, cut and numbered in one way, or one clear sentence.

The downloads are tried against a server of our own on this machine, which can also lie, stall and
hang up.  Nothing here needs a network.

    pytest tests/system/test_corpora.py
"""
import errno
import hashlib
import io
import lzma
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.request
import zipfile
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from support import corpora, download, progress
from support.corpora import File, Source, as_bytes, compressed_bits, decode, encode, load

# stands for enwik8; its lines grow longer, so that dropping newlines before or after a cut differs
RAW = "".join(f"<page {i * i}>{' naïve café' * (i // 20)}\n" for i in range(200)).encode()


# ---- cutting ------------------------------------------------------------------------------------

def write(tmp_path, data, name="notes.txt"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def whole(corpus):
    return as_bytes(torch.cat([corpus.train, corpus.valid, corpus.test]), corpus.vocab)


@pytest.mark.parametrize("n", [40, 41, 59, 60, 1000, 1019])
def test_a_file_is_cut_into_90_5_and_5_percent(tmp_path, n):
    """Valid and test are n // 20 bytes each, train is the rest, nothing is lost between them."""
    data = RAW[:n]
    corpus = load(write(tmp_path, data))
    part = n // 20
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (n - 2 * part, part, part)
    assert whole(corpus) == data


def test_the_splits_together_decode_to_the_text(tmp_path):
    """Text in equals text out, whatever its alphabet (cut so that no character is torn)."""
    text = "Ein Gedächtnis, 記憶, память. " * 20
    corpus = load(write(tmp_path, text.encode()))
    assert decode(torch.cat([corpus.train, corpus.valid, corpus.test]), corpus.vocab) == text


def test_tokens_are_one_byte_each(tmp_path):
    """A hundred million tokens should take a hundred megabytes; vocab is plain integers."""
    corpus = load(write(tmp_path, RAW))
    assert {split.dtype for split in (corpus.train, corpus.valid, corpus.test)} == {torch.uint8}
    assert corpus.train.dim() == 1
    assert {type(byte) for byte in corpus.vocab} == {int}
    assert (corpus.name, corpus.unit) == ("notes.txt", "bpc")


def test_a_file_with_all_256_bytes_works(tmp_path):
    """The largest vocabulary: token 255 is inside it, and comparisons in uint8 do not overflow."""
    data = bytes(range(256)) * 4
    corpus = load(write(tmp_path, data))
    assert len(corpus.vocab) == 256
    assert whole(corpus) == data


def test_the_checksum_is_another_for_another_text_or_cut(tmp_path):
    """A resumed run asks by it whether it has its own text."""
    corpus, again = (load(write(tmp_path, RAW)) for _ in range(2))
    valid, test = torch.cat([corpus.valid, corpus.test]).tensor_split([9])
    others = replace(corpus, valid=valid, test=test), replace(corpus, train=corpus.train.flip(0))
    assert len({corpora.checksum(text) for text in (corpus, again, *others)}) == 3


# ---- the vocabulary -----------------------------------------------------------------------------

def test_vocabulary_is_by_falling_count_then_by_first_appearance(tmp_path):
    """The official order: z and a tie at 20, z came first; then m, the only one that is rarer."""
    corpus = load(write(tmp_path, b"za" * 20 + b"mm"))
    assert corpus.vocab == [ord("z"), ord("a"), ord("m")]
    assert corpus.train[:4].tolist() == [0, 1, 0, 1]


def test_vocabulary_counts_all_three_splits(tmp_path):
    """A byte that occurs in the test split alone has a token, and its count decides its place."""
    corpus = load(write(tmp_path, b"aab" * 18 + b"b" * 30 + b"cccc"))
    assert corpus.vocab == [ord("b"), ord("a"), ord("c")]
    assert not (corpus.train == 2).any()
    assert (corpus.test == 2).any()


def test_encode_and_decode_are_inverse(tmp_path):
    """A prompt goes through as UTF-8 bytes, int64 as an embedding wants them."""
    vocab = load(write(tmp_path, RAW)).vocab
    tokens = encode("naïve café", vocab)
    assert (tokens.dtype, tokens.shape) == (torch.int64, (12,))  # two characters take two bytes
    assert [vocab[t] for t in tokens] == list("naïve café".encode())
    assert decode(tokens, vocab) == decode(tokens.tolist(), vocab) == "naïve café"


def test_decode_of_torn_characters_shows_a_mark():
    """A model may emit half a character: it becomes U+FFFD, not an error."""
    assert decode(torch.tensor([0, 1]), [0xC3, ord("a")]) == "\N{REPLACEMENT CHARACTER}a"
    assert decode([], [ord("a")]) == ""


def test_encode_names_the_characters_that_the_corpus_lacks():
    """A prompt with symbols that were never trained is refused, and the symbols are named."""
    vocab = list(b"abc def\xc3")
    with pytest.raises(ValueError, match="no 'B', 'é'$"):
        encode("a Bé Bad", vocab)
    with pytest.raises(ValueError, match="empty"):
        encode("", vocab)


@pytest.mark.parametrize("token", [-1, 3, 256, 300])
def test_decode_refuses_a_token_outside_the_vocabulary(token):
    """Negative numbers do not count from the end, and 256 does not wrap around to 0."""
    with pytest.raises(ValueError, match=f"token {token} outside vocabulary of 3"):
        decode(torch.tensor([0, token]), list(b"abc"))


def test_compressed_bits_are_those_of_the_compressors():
    """8 bits times the compressed size, per byte: the text itself is compressed, not the tokens."""
    data = Path(threading.__file__).read_bytes()  # some real text, on which zlib -6 and -9 differ
    vocab = list(range(255, -1, -1))
    assert compressed_bits(encode(data.decode(), vocab), vocab) == {
        "zlib": 8 * len(zlib.compress(data, 9)) / len(data),
        "xz": 8 * len(lzma.compress(data)) / len(data)}


# ---- the built-in corpus ------------------------------------------------------------------------

KEPT = ["zoo.py", "a/b.py", "a-b.py", "a.py", "test.py", "testing/kept.py", "config/kept.py",
        "json/deep/er.py"]
NOT_KEPT = ["readme.txt", "a/data.pyc", "test/x.py", "json/tests/x.py", "idle/idle_test/x.py",
            "site-packages/pip/x.py", "dist-packages/x.py", "a/encodings/x.py", "pydoc_data/x.py",
            "lib2to3/pgen/x.py", "config-3.11-x86_64/x.py"]


@pytest.fixture
def made_library(tmp_path, monkeypatch):
    for name in KEPT + NOT_KEPT:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# this is {name}\n")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    return tmp_path


def test_stdlib_is_the_python_files_outside_the_excluded_folders(made_library):
    """Excluded are folders, at any depth, not files that happen to be called test.py."""
    text = whole(load("stdlib")).decode()
    assert all(f"# this is {name}\n" in text for name in KEPT)
    assert not any(name in text for name in NOT_KEPT)


def test_stdlib_is_sorted_by_the_relative_path_as_text(made_library):
    """The order must not depend on the disk; '-' < '.' < '/', so a/b.py comes after a.py."""
    found = [p.relative_to(made_library).as_posix() for p in made_library.rglob("*.py")]
    kept = sorted(name for name in found if name in KEPT)
    assert kept[:3] == ["a-b.py", "a.py", "a/b.py"]
    expected = b"".join((made_library / name).read_bytes() for name in kept)
    assert whole(load("stdlib")) == whole(load("stdlib")) == expected


def test_the_real_stdlib_says_exactly_what_it_is():
    """Results on it compare between machines only if Python's version and the bytes agree."""
    corpus = load("stdlib")
    data = whole(corpus)
    digest = hashlib.sha256(data).hexdigest()[:8]
    version = sys.version.split()[0]
    assert corpus.name == f"stdlib (Python {version}, {len(data):,} bytes, sha256 {digest}…)"
    assert len(data) > 5_000_000


# ---- downloads ----------------------------------------------------------------------------------

def zipped(data, member="enwik8"):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(member, data)
    return archive.getvalue()


def source(address, archive, raw=RAW):
    """The entry of the table that describes these bytes truly."""
    return Source(File("enwik8.zip", len(archive), "sha256:" + hashlib.sha256(archive).hexdigest(),
                       (address,)),
                  (File("enwik8", len(raw), "sha1:" + hashlib.sha1(raw).hexdigest()),))


class Site:
    """A web site on this machine whose answer a test can change, and a folder to load into."""

    def __init__(self, root, monkeypatch):
        self.requests, self.root, self.monkeypatch = [], root, monkeypatch
        self.archive = zipped(RAW)
        self.answer = lambda request: self.send(request, self.archive)
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.requests.append(self.headers)
                site.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/enwik8.zip"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.publish()

    def send(self, request, data, length=None, status=200):
        request.send_response(status)
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        request.wfile.write(data)

    def publish(self, *addresses):
        """Write the table's entry for self.archive, to be fetched from self.address or others."""
        entry = source(self.address, self.archive)
        archive = entry.archive._replace(addresses=addresses or (self.address,))
        self.monkeypatch.setattr(corpora, "SOURCES", {"enwik8": entry._replace(archive=archive)})

    def files(self):
        return {path.name: path.read_bytes() for path in self.root.glob("*")}

    def refusal(self, by_hand=False):
        """Load, and return the message of the failure: one line, nothing half-done left behind."""
        with pytest.raises(ValueError) as caught:
            load("enwik8", root=self.root)
        message = str(caught.value)
        assert "\n" not in message and "\r" not in message
        assert "enwik8" not in self.files()
        assert not any(name.endswith(".part") for name in self.files())
        if by_hand:
            assert corpora.SOURCES["enwik8"].archive.addresses[0] in message
            assert f"save it as {self.root / 'enwik8.zip'}" in message
            assert self.files() == {}
        return message


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")  # a proxy could not reach this machine's own server
    monkeypatch.setenv("NO_PROXY", "*")
    site = Site(tmp_path / "new" / "data", monkeypatch)
    yield site
    site.server.shutdown()
    site.server.server_close()


def test_a_benchmark_is_fetched_checked_and_unpacked_once(site):
    """The second load reads the file that the first one left, and asks nobody."""
    corpus = load("enwik8", root=site.root)
    assert whole(corpus) == RAW
    assert (corpus.name, corpus.unit) == ("enwik8 (all bytes)", "bpc")
    assert site.files() == {"enwik8": RAW, "enwik8.zip": site.archive}
    assert whole(load("enwik8", root=site.root)) == RAW
    assert len(site.requests) == 1
    assert "transformer-xl" in site.requests[0]["User-Agent"]


def test_the_published_sizes_give_the_published_cut():
    """90, 5 and 5 percent of the raw 100,000,000 bytes are the 90M / 5M / 5M of the literature."""
    for name in "enwik8", "text8":
        entry = corpora.SOURCES[name]
        assert (entry.files[0].size, entry.files[0].size // 20) == (100_000_000, 5_000_000)
        assert entry.archive.checksum.startswith("sha256:")


def test_newlines_are_dropped_after_the_cut(site):
    """The official count: the raw bytes are cut first, then each part loses its newlines."""
    full = load("enwik8", root=site.root)
    kept = load("enwik8", root=site.root, drop_newlines=True)
    cut = len(RAW) // 20
    for split, part in [(kept.train, RAW[:-2 * cut]), (kept.valid, RAW[-2 * cut:-cut]),
                        (kept.test, RAW[-cut:])]:
        assert as_bytes(split, kept.vocab) == part.replace(b"\n", b"")
        assert len(split) == len(part) - part.count(b"\n") < len(part)
    assert len(kept.vocab) == len(full.vocab) - 1
    assert kept.vocab == [byte for byte in full.vocab if byte != 10]
    assert kept.name == "enwik8 (newlines dropped)"
    with pytest.raises(ValueError, match="enwik8"):
        load("stdlib", drop_newlines=True)


def test_a_second_address_is_tried_when_the_first_is_dead(site):
    """Addresses die, and each of them is judged by the same checksum."""
    site.publish(f"http://127.0.0.1:{closed_port()}/enwik8.zip", site.address)
    assert whole(load("enwik8", root=site.root)) == RAW


def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_of_the_server_is_one_sentence(site, status):
    """It names the address, the server's answer, and where a file fetched by hand belongs."""
    site.answer = lambda request: site.send(request, b"<html>no</html>", status=status)
    assert str(status) in site.refusal(by_hand=True)


def test_no_network_is_one_sentence(site):
    """Nobody listens at that port: the commonest failure of all."""
    site.publish(f"http://127.0.0.1:{closed_port()}/enwik8.zip")
    assert "refused" in site.refusal(by_hand=True)


def test_a_server_that_does_not_speak_http_is_one_sentence(site):
    """What the other side said may hold line breaks; the message does not."""
    site.answer = lambda request: request.wfile.write(b"SSH-2.0-hello\r\n\r\nother\r\n")
    site.refusal(by_hand=True)


def test_a_server_that_stalls_is_given_up(site, monkeypatch):
    """There is a timeout (shortened here), so a dead line cannot hang a run for ever."""
    patient, done = urllib.request.urlopen, threading.Event()

    def stall(request):
        request.send_response(200)
        request.end_headers()
        done.wait(5)

    site.answer = stall
    monkeypatch.setattr(urllib.request, "urlopen",
                        lambda request, timeout: patient(request, timeout=timeout / 300))
    assert "timed out" in site.refusal(by_hand=True)
    done.set()


def test_other_bytes_of_the_right_length_are_refused(site):
    """The size is right and a single bit is not: only the checksum sees it."""
    wrong = bytes([site.archive[0] ^ 1]) + site.archive[1:]
    site.answer = lambda request: site.send(request, wrong)
    assert "checksum" in site.refusal(by_hand=True)


@pytest.mark.parametrize("announced", ["all", "half"])
def test_a_download_that_breaks_off_is_refused(site, announced):
    """The connection closes early, with a header that promised more, or one that did not."""
    half = site.archive[:len(site.archive) // 2]
    length = len(site.archive if announced == "all" else half)
    site.answer = lambda request: site.send(request, half, length=length)
    message = site.refusal(by_hand=True)
    assert f"{len(half):,} bytes, expected {len(site.archive):,}" in message


def test_a_server_that_never_stops_is_cut_off(site):
    """It is refused as soon as it sends more than the file has, not when the disk is full."""
    hung_up = threading.Event()

    def pour(request):
        request.send_response(200)
        request.end_headers()
        try:
            for _ in range(1000):
                request.wfile.write(bytes(1 << 18))
        except OSError:
            hung_up.set()

    site.answer = pour
    assert "more than" in site.refusal(by_hand=True)
    assert hung_up.wait(2)


def test_an_interrupted_download_leaves_nothing(site, monkeypatch):
    """Ctrl-C is no Exception, but the half-written file must go all the same."""
    class Interrupted(io.BytesIO):
        def read(self, n):
            if self.tell():
                raise KeyboardInterrupt
            return super().read(100)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Interrupted(site.archive))
    with pytest.raises(KeyboardInterrupt):
        load("enwik8", root=site.root)
    assert site.files() == {}


# ---- archives -----------------------------------------------------------------------------------

def put_by_hand(site, data, name="enwik8.zip"):
    site.root.mkdir(parents=True)
    (site.root / name).write_bytes(data)


def test_an_archive_fetched_by_hand_is_taken_without_a_request(site):
    """On a machine without a network the zip can be carried there."""
    put_by_hand(site, site.archive)
    assert whole(load("enwik8", root=site.root)) == RAW
    assert site.requests == []


def test_an_archive_fetched_by_hand_is_checked_the_same_way(site):
    """A wrong one is not used, not deleted (it is the user's), and the message names it."""
    wrong = zipped(RAW + b"!")
    put_by_hand(site, wrong)
    message = site.refusal()
    assert str(site.root / "enwik8.zip") in message and "delete it" in message
    assert site.files() == {"enwik8.zip": wrong}
    same_size = site.archive[:-1] + bytes([site.archive[-1] ^ 1])
    (site.root / "enwik8.zip").write_bytes(same_size)
    assert "checksum" in site.refusal()
    assert site.requests == []


@pytest.mark.parametrize("member", ["../evil", "/tmp/evil", "enwik9", "folder/enwik8"])
def test_a_zip_that_holds_another_name_is_refused(site, member):
    """No name in an archive decides where something is written."""
    site.archive = zipped(RAW, member)
    site.publish()
    assert member in site.refusal()
    everything = {path.name for path in site.root.parent.parent.rglob("*")}
    assert everything == {"new", "data", "enwik8.zip"}


def test_other_members_of_a_zip_are_left_alone(site):
    """The one wanted member is taken by its name; what else is there never reaches the disk."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../evil", RAW[::-1])
        file.writestr("enwik8", RAW)
    site.archive = archive.getvalue()
    site.publish()
    assert whole(load("enwik8", root=site.root)) == RAW
    everything = {path.name for path in site.root.parent.parent.rglob("*")}
    assert everything == {"new", "data", "enwik8.zip", "enwik8"}


def full_disk(monkeypatch, fails_at):
    """The disk is full for files of the name `fails_at`."""
    class Watched(io.FileIO):
        def write(self, data):
            if Path(self.name).name == fails_at:
                super().write(data[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(download, "open", Watched, raising=False)


@pytest.mark.parametrize("damage", ["no zip", "torn", "bent"])
def test_a_broken_zip_is_one_sentence(site, damage):
    """Even where the table describes the broken file: no traceback of zipfile or zlib."""
    good = zipped(RAW)
    site.archive = {"no zip": b"<html>" * 50, "torn": good[:-10],
                    "bent": good[:60] + bytes(60) + good[120:]}[damage]
    site.publish()
    message = site.refusal()
    assert str(site.root / "enwik8.zip") in message and "delete it" in message


def test_a_raw_file_of_the_wrong_size_is_refused(site):
    """A file that somebody else put there, or cut short, is not silently trained on."""
    put_by_hand(site, RAW[:-1], "enwik8")
    with pytest.raises(ValueError, match=f"{len(RAW) - 1:,} bytes, expected {len(RAW):,}; delete"):
        load("enwik8", root=site.root)
    assert site.requests == []


@pytest.mark.parametrize("name", ["enwik8.zip.part", "enwik8.part"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(site, monkeypatch, name):
    """While fetching, or while unpacking: what is there afterwards is whole."""
    full_disk(monkeypatch, fails_at=name)
    message = site.refusal()
    assert "No space left" in message and str(site.root / name.removesuffix(".part")) in message
    assert set(site.files().values()) <= {site.archive}


def test_a_data_folder_that_cannot_be_made_is_one_sentence(site, tmp_path):
    """Here a file is in the way."""
    write(tmp_path, b"", "new")
    assert str(tmp_path / "new") in site.refusal()


def test_slow_copies_show_their_progress(site, monkeypatch, capsys):
    """Megabytes on a redrawn line, wiped at the end; what has just been fetched is not read again
    to be checked, what was put there by hand is.
    """
    load("enwik8", root=site.root)
    assert capsys.readouterr() == ("", "")
    (site.root / "enwik8").unlink()
    (site.root / "enwik8.zip").unlink()
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for first in "fetching", "checking":
        load("enwik8", root=site.root)
        shown = capsys.readouterr().err
        labels = [part.split()[0] for part in shown.split("\r") if part.strip()]
        assert labels == [first, "unpacking"] and "0.0 MB/0.0 MB " in shown
        assert shown.endswith(" \r") and "\n" not in shown
        (site.root / "enwik8").unlink()


# ---- bad input ----------------------------------------------------------------------------------

def test_an_unknown_name_lists_the_known_and_offers_the_nearest(tmp_path):
    """A typing error costs one line of reading, not a search."""
    with pytest.raises(ValueError, match="file that exists.*stdlib, enwik8, text8.*mean enwik8"):
        load("enwik9", root=tmp_path)
    with pytest.raises(ValueError, match="book.txt' is neither") as caught:
        load(tmp_path / "no" / "book.txt")
    assert "did you mean" not in str(caught.value)


def test_a_folder_is_no_corpus(tmp_path):
    """One file is wanted; a folder is refused by name."""
    with pytest.raises(ValueError, match="neither a file"):
        load(tmp_path)


@pytest.mark.parametrize("n", [0, 1, 39])
def test_a_text_too_short_to_cut_is_refused_with_both_numbers(tmp_path, n):
    """Each split needs one token to read and one to predict: 2 in 5 percent are 40 in all."""
    with pytest.raises(ValueError, match=f"notes.txt has {n} bytes.* 40 are needed"):
        load(write(tmp_path, b"x" * n))


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    """What the system says about it, without its traceback."""
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match="notes.txt cannot be read .*Permission denied") as caught:
        load(write(tmp_path, RAW))
    assert "\n" not in str(caught.value)


def test_main_prints_what_the_corpus_holds(tmp_path, capsys):
    """Sizes, vocabulary, the beginning, and the compressors' figures."""
    path = write(tmp_path, RAW)
    corpora.main([str(path)])
    out = capsys.readouterr().out
    corpus = load(path)
    bits = compressed_bits(corpus.test, corpus.vocab)
    for figure in ("notes.txt", f"{len(corpus.train):,}", f"{len(corpus.test):,}",
                   f"vocabulary {len(set(RAW))}", repr(RAW.decode()[:200]),
                   f"{bits['zlib']:.3f}", f"{bits['xz']:.3f}"):
        assert figure in out


def test_main_says_what_is_wrong_in_one_line_and_exits_with_1():
    """As a program: exit status 1, one line on stderr, no traceback, nothing on stdout."""
    run = subprocess.run([sys.executable, "-m", "support.corpora", "no such book"], timeout=60,
                         cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("corpora.py: 'no such book' is neither")
    assert run.stderr.count("\n") == 1


def test_main_ends_quietly_when_nobody_reads_on(tmp_path):
    """As in `| head`: no traceback."""
    command = [sys.executable, "-m", "support.corpora", str(write(tmp_path, RAW))]
    run = subprocess.Popen(command, cwd=Path(__file__).parent.parent.parent, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    run.stdout.close()
    assert (run.stderr.read(), run.wait(60)) == (b"", 0)
    run.stderr.close()
