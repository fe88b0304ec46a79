"""Test downloads: a file is complete and correct, or one sentence says why it is missing."""
import hashlib
import itertools
import urllib.request
from contextlib import nullcontext
from http.client import BadStatusLine
from types import SimpleNamespace

import pytest

from course.lessons import time_limit
from helpers import published, refusal, tarred, zipped
from support.download import File, Source, fetch, unpack

DATA = bytes(range(256)) * 3
FLIPPED = DATA[:-1] + b"!"
TEXTS = {"one": b"the cat\n", "two": b"sat\n"}
IN_FOLDER = {f"w/{name}": data for name, data in TEXTS.items()}
SITE = "http://example.org/file"


@pytest.fixture
def web(monkeypatch):
    """Return {address: bytes, an iterator of bytes, or an error}; web["asked"] lists requests."""
    web = {"asked": []}

    def urlopen(request, timeout):  # without a timeout a dead connection would hang a run forever
        web["asked"].append(request)
        answer = web[request.full_url]
        if isinstance(answer, Exception):
            raise answer
        pieces = iter([answer] if isinstance(answer, bytes) else answer)
        return nullcontext(SimpleNamespace(read=lambda n: next(pieces, b"")))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return web


def files_in(root):
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def source_of(archive):
    """Return the table's entry for TEXTS, which are in a folder w/ of the archive."""
    wanted = tuple(File(name, len(data)) for name, data in TEXTS.items())
    return Source("words", (), 0, archive, wanted, "w/")


@pytest.mark.parametrize("known", ["size", "sha256", "md5"])
def test_a_file_is_fetched_once_and_checked(web, tmp_path, known):
    """The second address is used if the first fails; an existing file is only checked."""
    checksum = None if known == "size" else f"{known}:{hashlib.new(known, DATA).hexdigest()}"
    file = File("file", len(DATA) if known == "size" else None, checksum, ("http://dead/", SITE))
    wrong = FLIPPED if checksum else b"!"
    web.update({"http://dead/": ConnectionRefusedError(), SITE: wrong})
    refusal(fetch, file, tmp_path / "new")
    web[SITE] = DATA
    for _ in range(2):
        assert fetch(file, tmp_path / "new").read_bytes() == DATA
    assert len(web["asked"]) == 4 and files_in(tmp_path) == {"file": DATA}
    assert "transformer-xl" in web["asked"][0].get_header("User-agent")
    (tmp_path / "new" / "file").write_bytes(wrong)
    message = refusal(fetch, file, tmp_path / "new")
    assert f"file is not the file of {file.addresses[0]}" in message and "delete it" in message
    assert files_in(tmp_path) == {"file": wrong}


@pytest.mark.parametrize("answer, words", [
    (BadStatusLine("SSH-2.0-hello\r\n\r\nother"), "SSH"), (TimeoutError("timed out"), "timed out"),
    (FLIPPED, "checksum sha256:"), (DATA[:9], "9 bytes, expected 768"),
    (itertools.repeat(b"more"), "more than the expected 768 bytes")])
def test_a_bad_response_raises_one_sentence_and_leaves_no_file(web, tmp_path, answer, words):
    """The sentence has the address, the error, and the path for a file that is fetched by hand."""
    web[SITE] = answer
    with time_limit(10):
        message = refusal(fetch, published("file", DATA, SITE), tmp_path)
    assert words in message and SITE in message and f"it as {tmp_path / 'file'}" in message
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("name, pack", [("a.zip", zipped), ("a.tar.gz", tarred)])
def test_only_the_listed_members_are_unpacked_once(web, tmp_path, name, pack):
    """Members get the names of the table; no name in an archive determines a path."""
    web[SITE] = pack({"../evil": b"!", "w/evil": b"!", "/tmp/evil": b"!"} | IN_FOLDER)
    source, root = source_of(published(name, web[SITE], SITE)), tmp_path / "new" / "data"
    assert unpack(source, root) == [root / "one", root / "two"]
    assert files_in(tmp_path) == {name: web[SITE]} | TEXTS
    (root / name).unlink()
    unpack(source, root)  # needs no archive now
    assert files_in(tmp_path) == TEXTS
    (root / "two").write_bytes(b"s")
    assert "two has 1 bytes, expected 4; delete it" in refusal(unpack, source, root)


@pytest.mark.parametrize("name, pack", [("a.zip", zipped), ("a.tar.gz", tarred)])
@pytest.mark.parametrize("length", [None, 30], ids=["another member", "torn"])
def test_a_wrong_or_truncated_archive_raises_one_sentence(tmp_path, name, pack, length):
    """This holds even if its checksum is that of the table, and no partial file remains."""
    data = pack({"w/one": b"", "../w/two": b""})[:length]
    (tmp_path / name).write_bytes(data)
    message = refusal(unpack, source_of(published(name, data)), tmp_path)
    assert str(tmp_path / name) in message and "delete it and run again" in message
    assert length or "holds ['w/one', '../w/two'], expected 'w/two'" in message
    assert files_in(tmp_path).keys() <= {name, "one"}


@pytest.mark.parametrize("name", ["a.zip", "two"])
def test_a_file_that_cannot_be_written_raises_one_sentence(web, tmp_path, name):
    """The disk may be full while fetching or unpacking; here a folder has the temporary name."""
    (tmp_path / f"{name}.part").mkdir()
    web[SITE] = zipped(IN_FOLDER)
    message = refusal(unpack, source_of(published("a.zip", web[SITE], SITE)), tmp_path)
    assert "Errno" in message and str(tmp_path / name) in message and "delete" not in message
