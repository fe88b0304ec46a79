"""The folder of a run: what does not fit it is refused in one sentence, and nothing is lost.

    pytest tests/system/test_run_folders.py
"""
import os

import pytest

from support import corpora
from training import checkpoint, job
from system.small_runs import (
    again, failure, finished, no_curve_and_no_flush, run, small, text)


@pytest.mark.skipif(checkpoint.fcntl is None, reason="no locks on Windows")
@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=["new", "resume"])
def test_two_runs_in_one_folder(text, small, capsys, flags):
    """The second is refused with a sentence, before it looks at a checkpoint which the first may
    just be moving, and changes nothing; --eval-only is allowed.
    """
    out = small()
    path = out / "checkpoint.pt"
    path.write_bytes(b"") if flags else path.unlink()
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    with checkpoint.lock(out):
        assert "belongs to a run that is going on" in failure(
            capsys, run(text, out, "--steps", "3", *flags))
        assert left == {path.name: path.read_bytes() for path in out.iterdir()}
        assert again(out, "--eval-only") == 0


def test_a_run_is_not_overwritten_and_not_changed(text, small, capsys, monkeypatch):
    """A folder that holds a run is refused; so is going on with other settings or another text."""
    out = small()
    before, good = (out / "checkpoint.pt").read_bytes(), text.read_text()
    assert "holds a run already" in failure(capsys, run(text, out, "--steps", "3"))
    for flags, words in ((["--lr", "0.5"], "--lr is"), (["--plain"], "--plain is not set there"),
                         (["--model", "laptop"], "--model is tiny there, not laptop")):
        assert words in failure(capsys, again(out, "--resume", *flags))
    monkeypatch.setattr(job, "load", lambda path, **options: corpora.load(other))
    for changed in ("x" * 250, good[::-1]):  # other symbols; the same, but at other places
        other = out / "changed.txt"
        other.write_text(changed)
        for flag in ("--resume", "--eval-only"):
            assert "it has changed since" in failure(capsys, again(out, flag))
    assert (out / "checkpoint.pt").read_bytes() == before
    monkeypatch.undo()
    assert again(out, "--resume", "--save-minutes", "5") == 0


def test_a_run_is_evaluated_as_it_was_trained(text, small, tmp_path, capsys):
    """Another text or dtype beside --eval-only would be passed over without a word."""
    out, other = small(), tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    for flags, words in ((["--text", str(other)], "not the text that the checkpoint was trained"),
                         (["--dataset", "enwik8"], "--dataset is stdlib there, not enwik8"),
                         (["--dtype", "bf16"], "--dtype is float32 there, not bf16")):
        assert words in failure(capsys, again(out, "--eval-only", *flags))
    assert again(out, "--eval-only", "--text", str(text), "--plain", "--seed", "4") == 0


def test_a_text_may_move(text, tmp_path, capsys):
    """A run goes on, and is evaluated, where its text lies by another name; not with another one.
    """
    out, moved = tmp_path / "run", tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    assert run(moved, out, "--steps", "6") == 0
    (tmp_path / "gone.txt").write_text("x" + text.read_text())
    moved.unlink()
    for act in ("--eval-only", "--resume"):
        assert "moved.txt" in failure(capsys, again(out, act))
        assert "not the text" in failure(capsys, again(
            out, act, "--text", str(tmp_path / "gone.txt")))
        assert again(out, act, "--text", str(text)) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(text, tmp_path, monkeypatch, capsys):
    """The operating system's own refusal, in the middle of a run."""
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: real(
        "/dev/full" if str(path).endswith(".part") else path, *a, **k))
    status = run(text, tmp_path / "run", "--steps", "6")
    assert "could not write" in failure(capsys, status)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_best_model_without_its_run_is_not_overwritten(text, small, capsys):
    """Somebody has deleted the large checkpoints."""
    out = small()
    left = (out / "best.pt").read_bytes()
    (out / "checkpoint.pt").unlink()
    assert "holds a run already" in failure(capsys, run(text, out, "--steps", "3", "--seed", "1"))
    assert left == (out / "best.pt").read_bytes()
