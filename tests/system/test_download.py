"""What download.py promises: a file appears whole and right, or not at all; one sentence says why.

A server of our own on this machine answers; it can also lie, stall and hang up.

    pytest tests/system/test_download.py
"""
import contextlib
import hashlib
import io
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from course.lessons import time_limit
from support import download
from support.download import File, Source, fetch, unpack
from system.archives import full_disk, published, refusal, tarred, zipped

DATA = bytes(range(256)) * 3
TEXTS = {"w/one": b"the cat\n", "w/two": b"sat\n"}
NOBODY = "http://127.0.0.1:9/file"  # the port of "discard": nobody listens there


# ---- a web site on this machine -----------------------------------------------------------------

class Site:
    """What it serves, {name: bytes}; how it answers; and the headers of what it was asked for."""

    def __init__(self, root):
        self.root, self.served, self.requests = root, {}, []
        self.answer = lambda request: send(request, self.served[request.path[1:]])
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.requests.append(self.headers)
                site.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/"

    def publish(self, name="file", data=DATA):
        self.served[name] = data
        return published(name, data, self.address + name)

    def files(self):
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}


def send(request, data, length=None, status=200):
    request.send_response(status)
    request.send_header("Content-Length", str(len(data) if length is None else length))
    request.end_headers()
    request.wfile.write(data)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")  # a proxy could not reach this machine's own server
    site = Site(tmp_path / "new" / "data")
    yield site
    site.server.shutdown()
    site.server.server_close()


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


# ---- fetching -----------------------------------------------------------------------------------

def test_a_file_is_fetched_once(site):
    """What lies there already, from the first time or put there by hand, is only checked."""
    file = site.publish()
    for _ in range(2):
        assert fetch(file, site.root) == site.root / "file"
        assert site.files() == {"file": DATA}
    assert len(site.requests) == 1
    assert "transformer-xl" in site.requests[0]["User-Agent"]


@pytest.mark.parametrize("known", ["size", "sha256", "md5"])
def test_what_is_published_is_compared(site, known):
    """A size, or a checksum of any kind; what nobody has published is not asked for."""
    checksum = None if known == "size" else f"{known}:{hashlib.new(known, DATA).hexdigest()}"
    size = len(DATA) if known == "size" else None
    file = File("file", size, checksum, (site.address + "file",))
    site.served["file"] = DATA + b"!" if known == "size" else flipped(DATA)
    refusal(fetch, file, site.root)
    site.served["file"] = DATA
    assert fetch(file, site.root).read_bytes() == DATA


def test_a_second_address_is_tried_when_the_first_is_dead(site):
    file = site.publish()
    fetch(file._replace(addresses=(NOBODY, site.address + "file")), site.root)
    assert site.files() == {"file": DATA}


def pour(request):
    """Far more than the file has."""
    send(request, b"", length=1 << 30)
    with contextlib.suppress(OSError):
        for _ in range(1000):
            request.wfile.write(bytes(1 << 18))


BAD_ANSWERS = {
    "not found": (lambda request: send(request, b"<html>", status=404), "404"),
    "no HTTP": (lambda request: request.wfile.write(b"SSH-2.0-hello\r\n\r\nother\r\n"), "SSH"),
    "another bit": (lambda request: send(request, flipped(DATA)), "checksum sha256:"),
    "hung up": (lambda request: send(request, DATA[:9], len(DATA)), "9 bytes, expected 768"),
    "endless": (pour, "more than the expected 768 bytes")}


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_a_bad_answer_is_one_sentence_and_leaves_nothing(site, what):
    """The address, what came of it, and where a file fetched by hand belongs."""
    site.answer, words = BAD_ANSWERS[what]
    file = site.publish()
    message = refusal(fetch, file, site.root)
    assert words in message and file.addresses[0] in message
    assert f"save it as {site.root / 'file'}" in message
    assert site.files() == {}


def test_a_server_that_stalls_is_given_up(site, monkeypatch):
    """There is a timeout (here a small part of it), so a dead line cannot hang a run for ever."""
    real, done = urllib.request.urlopen, threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen",
                        lambda request, timeout: real(request, timeout=timeout / 300))
    site.answer = lambda request: done.wait(30)
    assert "timed out" in refusal(fetch, site.publish(), site.root)
    done.set()


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    """It is no Exception, but the half-written file must go all the same."""
    class Interrupted(io.BytesIO):
        def read(self, n):
            if self.tell():
                raise KeyboardInterrupt
            return super().read(100)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Interrupted(DATA))
    with pytest.raises(KeyboardInterrupt):
        fetch(published("file", DATA), tmp_path)
    assert not list(tmp_path.iterdir())


# ---- what lies there already --------------------------------------------------------------------

@pytest.mark.parametrize("wrong, words", [(DATA[:9], "9 bytes"), (flipped(DATA), "checksum")])
def test_a_wrong_file_put_there_by_hand_is_refused_and_kept(tmp_path, wrong, words):
    """It is the user's; the message names it."""
    (tmp_path / "file").write_bytes(wrong)
    message = refusal(fetch, published("file", DATA), tmp_path)
    assert message.startswith(f"{tmp_path / 'file'} is not the file of http") and words in message
    assert "delete it" in message and (tmp_path / "file").read_bytes() == wrong


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("make", ["mkfifo", "mkdir"])
def test_what_is_no_file_does_not_hang(make, tmp_path):
    """To open a pipe would wait for ever."""
    getattr(os, make)(tmp_path / "file")
    source = Source("bytes", (), 0, published("a.zip", b""), (File("file"),))
    with time_limit(10):
        assert "missing" in refusal(fetch, published("file", DATA), tmp_path)
        assert "missing" in refusal(unpack, source, tmp_path)


# ---- archives -----------------------------------------------------------------------------------

ARCHIVES = pytest.mark.parametrize("name, pack", [("a.zip", zipped), ("a.tar.gz", tarred)])


def source_of(archive, folder="w/"):
    """An archive's entry of the table: TEXTS, without what stands before their names in it."""
    return Source("words", (), 0, archive, tuple(File(name.removeprefix(folder), len(data))
                                                 for name, data in TEXTS.items()), folder)


@ARCHIVES
def test_the_wanted_members_are_unpacked_and_no_others(site, name, pack):
    """Under the names of the table; no name in an archive decides where something is written."""
    data = pack({"../evil": b"!", "w/evil": b"!", "/tmp/evil": b"!"} | TEXTS)
    source = source_of(site.publish(name, data))
    for _ in range(2):
        assert unpack(source, site.root) == [site.root / "one", site.root / "two"]
    assert site.files() == {name: data, "one": b"the cat\n", "two": b"sat\n"}
    assert len(site.requests) == 1 and not list(site.root.parent.parent.rglob("evil"))


def test_where_the_files_are_nothing_is_fetched_or_written(tmp_path):
    """The folder may be read-only, and need not hold the archive."""
    for name, data in TEXTS.items():
        (tmp_path / name.removeprefix("w/")).write_bytes(data)
    os.chmod(tmp_path, 0o555)
    try:
        unpack(source_of(published("a.zip", b"")), tmp_path)
    finally:
        os.chmod(tmp_path, 0o755)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    (tmp_path / "two").write_bytes(b"s")
    message = refusal(unpack, source_of(published("a.zip", b"")), tmp_path)
    assert "two has 1 bytes, expected 4; delete it" in message


@ARCHIVES
@pytest.mark.parametrize("broken", ["another member", "in another folder", "torn"])
def test_an_archive_that_is_not_what_it_should_be_is_one_sentence(tmp_path, name, pack, broken):
    """Though the table describes it: no traceback, and nothing of it stays in the folder."""
    members = {"another member": {"w/one": b"", "w/too": b""},
               "in another folder": {"w/one": b"", "../w/two": b""}}.get(broken, TEXTS)
    data = pack(members)[: 30 if broken == "torn" else None]
    (tmp_path / name).write_bytes(data)
    message = refusal(unpack, source_of(published(name, data)), tmp_path)
    assert str(tmp_path / name) in message and "delete it and run again" in message
    assert broken == "torn" or f"holds {list(members)}, expected 'w/two'" in message
    assert not list(tmp_path.rglob("t*o")) and not list(tmp_path.rglob("*.part"))


# ---- the disk -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["a.zip", "two"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(site, monkeypatch, name):
    """While fetching, or while unpacking."""
    source = source_of(site.publish("a.zip", zipped(TEXTS)))
    full_disk(monkeypatch, f"{name}.part")
    message = refusal(unpack, source, site.root)
    assert "No space left" in message and str(site.root / name) in message
    assert site.files().keys() <= {"a.zip", "one"}
