"""Helper functions of several test files."""
import hashlib
import io
import shutil
import tarfile
import zipfile

import pytest
import torch
import torch.nn as nn

from course.exercises import ROOT
from support.download import File


def assert_close(found, wanted, message, tolerance=1e-12):
    assert found.shape == wanted.shape, (
        f"{message}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    worst = (found - wanted).abs().max().item()
    assert worst < tolerance, f"{message}: off by {worst:.1e}"  # false for NaN


def gradients(output, leaves):
    """Return the gradients (0 for a leaf without) of a loss that weights each element otherwise."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    loss = (output * weight).sum() if output.dim() else output
    if not loss.requires_grad:
        return [torch.zeros_like(z) for z in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(z) if g is None else g for g, z in zip(found, leaves)]


def randomized(model):
    """Make all weights random, in float64: a norm that starts as the identity hides mistakes."""
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model.double()


def copy_of_project(folder):
    """Copy the shipped files of the project into this folder, and return the path of the copy."""
    return shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(
        ".git", ".venv", ".pytest_cache", "__pycache__", "data", "runs", "pristine"))


def content_of(folder):
    """Return {path: its bytes, or False for a folder} for everything in a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def refusal(act, *arguments, **more):
    """Return the message, one line, of the ValueError that act(*arguments) raises."""
    with pytest.raises(ValueError) as caught:
        act(*arguments, **more)
    message = str(caught.value)
    assert "\n" not in message and "\r" not in message
    return message


def zipped(members):
    """Return the bytes of a zip with these members, {name: bytes}."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return archive.getvalue()


def tarred(members):
    """Return the bytes of a tar.gz with these members, {name: bytes}."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def published(name, data, *addresses):
    """Return the File with the size, checksum and addresses of these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return File(name, len(data), f"sha256:{digest}", addresses or ("http://example.org/",))
