"""Test downloads: a file is complete and correct, or one sentence says why it is missing."""
import hashlib
import io
import urllib.request
from http.client import BadStatusLine

import pytest

from helpers import published, refusal, tarred, zipped
from support.download import File, Source, fetch, unpack

DATA = bytes(range(256)) * 3
FLIPPED = DATA[:-1] + b"!"
TEXTS = {"w/one": b"the cat\n", "w/two": b"sat\n"}
SITE = "http://example.org/file"
archives = pytest.mark.parametrize("name, pack", [("a.zip", zipped), ("a.tar.gz", tarred)])


@pytest.fixture
def web(monkeypatch):
    """Return {address: bytes or an error}, in place of the network, and the requests."""
    web = {"asked": []}

    def urlopen(request, timeout):  # without a timeout a dead connection would hang a run forever
        web["asked"].append(request)
        if isinstance(web[request.full_url], Exception):
            raise web[request.full_url]
        return io.BytesIO(web[request.full_url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return web


def files_in(root):
    return {path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*") if path.is_file()}


def source_of(archive, names=TEXTS):
    """Return an entry of the table."""
    return Source("words", (), 0, archive, tuple(
        File(name, len(TEXTS.get(name, ""))) for name in names))


def test_a_file_is_fetched_once_and_checked(web, tmp_path):
    """The second address is used if the first fails; an existing file is only checked."""
    file = File("file", None, f"md5:{hashlib.md5(DATA).hexdigest()}", ("http://dead/", SITE))
    web.update({"http://dead/": ConnectionRefusedError(), SITE: DATA})
    for _ in range(2):
        assert fetch(file, tmp_path / "new").read_bytes() == DATA
    assert len(web["asked"]) == 2 and files_in(tmp_path) == {"new/file": DATA}
    assert "transformer-xl" in web["asked"][0].get_header("User-agent")
    (tmp_path / "new" / "file").write_bytes(FLIPPED)
    message = refusal(fetch, file, tmp_path / "new")
    assert f"file is not the file of {file.addresses[0]}" in message and "delete it" in message
    assert files_in(tmp_path) == {"new/file": FLIPPED}
    web[SITE] = bytes(2**18 + 1)  # is read in two pieces
    assert fetch(published("large", web[SITE], SITE), tmp_path).stat().st_size == 2**18 + 1


@pytest.mark.parametrize("answer, words", [
    (BadStatusLine("SSH-2.0-hello\r\n\r\nother"), "SSH"), (TimeoutError("timed out"), "timed out"),
    (FLIPPED, "checksum sha256:"), (DATA[:9], "9 bytes, expected 768"),
    (DATA * 9, "more than the expected 768 bytes")])
def test_a_bad_response_raises_one_sentence_and_leaves_no_file(web, tmp_path, answer, words):
    web[SITE] = answer
    message = refusal(fetch, published("file", DATA, SITE), tmp_path)
    assert words in message and SITE in message and f"it as {tmp_path / 'file'}" in message
    assert files_in(tmp_path) == {}


@archives
def test_only_the_listed_members_are_unpacked_once(web, tmp_path, name, pack):
    """Members get the names of the table; no name in an archive determines a path."""
    web[SITE], archive = TimeoutError(), File(name, addresses=(SITE,))  # no checksum
    for names, listed in (("ab", "{0}/a, {0}/b"), ("abcd", "{0}/a, ..., {0}/d")):
        message = refusal(unpack, source_of(archive, names), tmp_path)
        assert message.endswith("or save its unpacked files as " + listed.format(tmp_path))
    web[SITE] = pack({"../evil": b"!", "w/evil": b"!", "/tmp/evil": b"!"} | TEXTS)
    source = source_of(archive, ("w/two", "w/one"))
    (tmp_path / "w/two").mkdir(parents=True)  # so that this file cannot be written
    message = refusal(unpack, source, tmp_path)
    assert f"{name} cannot be unpacked ({tmp_path / 'w/two'} is not a regular file" in message
    (tmp_path / "w/two").rmdir()
    assert unpack(source, tmp_path) == [tmp_path / "w/two", tmp_path / "w/one"]
    assert files_in(tmp_path) == {name: web[SITE]} | TEXTS
    (tmp_path / name).unlink()
    unpack(source, tmp_path)  # needs no archive now
    assert files_in(tmp_path) == TEXTS
    (tmp_path / "w/two").write_bytes(b"s")
    assert "two does not have 4 bytes; delete it" in refusal(unpack, source, tmp_path)


@archives
@pytest.mark.parametrize("two, length, words", [
    ("../w/two", None, "expected 'w/two'"), ("w/two", None, "3 bytes, expected 4"),
    ("w/two", 30, "")], ids=["another member", "another size", "torn"])
def test_a_wrong_archive_raises_one_sentence(tmp_path, name, pack, two, length, words):
    """This holds even if its checksum is that of the table, and no partial file remains."""
    data = pack({"w/one": TEXTS["w/one"], two: b"sat"})[:length]
    (tmp_path / name).write_bytes(data)
    message = refusal(unpack, source_of(published(name, data)), tmp_path)
    assert str(tmp_path / name) in message and "delete it and run again" in message
    assert words in message and files_in(tmp_path).keys() <= {name, "w/one"}
