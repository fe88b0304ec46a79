"""Small benchmarks: archives in memory, what a table says of them, and how they are refused."""
import errno
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from support import files
from support.download import File


def zipped(members):
    """{name: bytes} -> the bytes of a zip."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return archive.getvalue()


def tarred(members):
    """{name: bytes} -> the bytes of a tar.gz."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def published(name, data, *addresses):
    """The File that describes these bytes truly."""
    digest = hashlib.sha256(data).hexdigest()
    return File(name, len(data), f"sha256:{digest}", addresses or ("http://127.0.0.1:9/x",))


def refusal(act, *arguments, **more):
    """The sentence of the ValueError with which act(*arguments) refuses: one line."""
    with pytest.raises(ValueError) as caught:
        act(*arguments, **more)
    message = str(caught.value)
    assert "\n" not in message and "\r" not in message
    return message


def full_disk(monkeypatch, name):
    """The disk is full for the file of this name, after ten bytes."""
    class Full(io.FileIO):
        def write(self, data):
            if Path(self.name).name == name:
                super().write(data[:10])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(files, "open", Full, raising=False)
