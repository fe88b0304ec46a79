"""Command lines that once got through: each is refused in one line, or works.

    pytest tests/system/test_command_line.py
"""
import pytest

import fuzz


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """What the judge says of a command line, with a tiny model on notes.txt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(fuzz.NOTES)
    start = [*fuzz.TINY, "--text", "notes.txt", "--out", "run", "--steps", "2", "--n-tokens", "3"]
    return lambda *flags: fuzz.verdict(
        fuzz.Input("", lambda: fuzz.command_line([*start, *flags])), tmp_path)


@pytest.mark.parametrize("flags, words", [
    (["--seed", str(10**30)], "--seed must be at most"),
    (["--eval-mem-len", str(2**63)], "eval-mem-len"),
    (["--eval-clamp-len", str(10**30)], "eval-clamp-len"),
    (["--batch", str(10**400), "--dry-run"], "--batch"),
    (["--temperature", "1e-300"], "temperature"),
    (["--lr=--"], "--lr"),
    (["--text=--"], "--text needs a value"),
    (["a\nb"], "a b"),
    (["--n-layer", "100000000"], "parameters"),
    (["--out", "\udcff"], "UTF-8"),
    (["--lr", "1e300", "--warmup", "0"], "not finite"),
], ids=lambda z: " ".join(z)[:30] if isinstance(z, list) else "")
def test_a_command_line_is_refused_in_one_line(flags, words, outcome):
    """Before anything is written, if that can be known before."""
    said = outcome(*flags)
    assert said[0] == "refused" and words in said[1], said


def test_a_folder_of_any_name_gets_its_curve(outcome, tmp_path):
    """$ begins a formula in a title, digits a line of metrics.tsv; fonts lack many signs."""
    name = "$\\frac$ a\n5\tb 記憶"
    assert outcome("--out", name) == ("worked", "")
    assert (tmp_path / name / "curve.png").exists()
