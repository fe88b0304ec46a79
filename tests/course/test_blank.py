"""blank.py, called in-process on a copy of the lessons: whatever happens, nothing is lost.

    pytest tests/course/test_blank.py
"""
import ast
import os
import shutil
from pathlib import Path

import pytest

import blank
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, find

NAMES = [e.name for e in EXERCISES]


pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the lessons in a folder that is not the working folder."""
    root = tmp_path / "project"
    (root / "tests" / "course").mkdir(parents=True)
    (root / "training").mkdir()
    for file in ("tests/README.md", "tests/course/plain_reader.py"):
        shutil.copy(ROOT / file, root / file)
    (root / "training" / "fast.py").touch()
    for file in LESSONS:
        (root / f"{file}.py").write_text(lessons.pristine(file))
    (root / "tests" / "grade.py").touch()
    monkeypatch.setattr(blank, "ROOT", root)
    monkeypatch.setattr(blank, "STORE", root / ".exercises")
    monkeypatch.chdir(tmp_path)
    return root


def failure(capsys, status):
    """What a mistake must look like: status 1 and one line on stderr."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 1 and len(lines) == 1 and lines[0].startswith("blank.py: "), lines
    return lines[0]


def files(root):
    return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# ---- blank and undo -----------------------------------------------------------------------------

@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_a_blank_keeps_all_but_the_body_and_undo_puts_it_back(project, capsys, exercise):
    """Signature, docstring and example stay; the task stands there; undo is exact to the byte."""
    before = files(project)
    path = project / f"{exercise.file}.py"
    assert blank.main([exercise.name]) == 0
    assert f"pytest -k {exercise.name}" in capsys.readouterr().out
    text = path.read_text()
    node, first = find(text, exercise.function)
    old, _ = find(before[Path(path.name)].decode(), exercise.function)
    for one, other in ((node.args, old.args), (node.decorator_list, old.decorator_list)):
        assert ast.dump(ast.Module(one, [])) == ast.dump(ast.Module(other, []))
    assert ast.get_docstring(node) == ast.get_docstring(old)
    left = [z for z in node.body if not isinstance(z, ast.Expr)]
    assert len(left) == 1 and isinstance(left[0], ast.Raise), "only the stub is left"
    stub = " ".join(line.strip(" #") for line in text.splitlines()[first - 1 : node.end_lineno])
    assert exercise.task in stub and max(map(len, text.splitlines())) <= 88
    assert blank.main(["--undo", exercise.name]) == 0
    assert files(project) == before


def test_an_attempt_is_never_destroyed(project, capsys):
    """Blanked again, or undone, an attempt is kept beside, and it says where."""
    path = project / "04_rel_shift.py"
    shipped = path.read_bytes()
    for n, act in enumerate((["rel_shift"], ["--undo", "rel_shift"]), 1):
        blank.main(["rel_shift"])
        text = path.read_text()
        stub = blank.Lesson(BY_NAME["rel_shift"]).body
        path.write_text(text.replace(stub, f"    return x * {n}  # my attempt\n"))
        capsys.readouterr()
        assert blank.main(act) == 0
        kept = project / ".exercises" / "attempts" / f"rel_shift-{n}.py"
        assert f".exercises/attempts/rel_shift-{n}.py" in capsys.readouterr().out.replace("\\", "/")
        assert kept.read_text().startswith("def rel_shift(x):") and f"x * {n}" in kept.read_text()
    assert path.read_bytes() == shipped, "the solution came back, not an attempt"


def test_blank_twice_changes_nothing(project, capsys):
    """The second time the stub is not taken for a solution or an attempt."""
    blank.main(["reach"])
    before = files(project)
    assert blank.main(["reach"]) == 0
    assert "blank already" in capsys.readouterr().out and files(project) == before


def test_exercises_of_one_file_do_not_disturb_each_other(project):
    """Undone in another order than blanked, while line numbers move."""
    before = files(project)
    for name in NAMES:
        assert blank.main([name]) == 0
    for name in NAMES[::2] + NAMES[1::2][::-1]:
        assert blank.main(["--undo", name]) == 0
    assert files(project) == before


def test_windows_line_endings_stay(project):
    """A file with \\r\\n has nothing else afterwards, blanked and put back."""
    path = project / "02_recurrence.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = path.read_bytes()
    blank.main(["reach"])
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")
    blank.main(["--undo", "reach"])
    assert path.read_bytes() == before


# ---- bad input ----------------------------------------------------------------------------------

def test_a_file_that_cannot_be_taken_apart_is_left_alone(project, capsys):
    """A syntax error, mixed tabs, another encoding, a function with another name, read-only."""
    path = project / "04_rel_shift.py"
    good = path.read_bytes()
    for bad, words in ((good + b"\ndef f(:\n", "line"),
                       (good + b"\nif 1:\n\tx = 1\n        y = 2\n", "TabError"),
                       (good + "# \xe9".encode("latin-1"), "not UTF-8"),
                       (good.replace(b"def rel_shift(", b"def shift("), "no rel_shift in")):
        path.write_bytes(bad)
        before = files(project)
        assert words in failure(capsys, blank.main(["rel_shift"]))
        assert files(project) == before
    path.write_bytes(good)
    path.chmod(0o444)
    assert "read-only" in failure(capsys, blank.main(["rel_shift"]))
    assert path.read_bytes() == good
    assert not list(project.rglob("*.part"))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_loses_nothing(project, capsys, monkeypatch, call):
    """The lesson file is written beside and renamed: it is whole at every moment."""
    def full(*arguments):
        raise OSError(28, "No space left on device")

    before = (project / "04_rel_shift.py").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert "No space left" in failure(capsys, blank.main(["rel_shift"]))
        assert "No space left" in failure(capsys, blank.main(["--all", "students"]))
    assert (project / "04_rel_shift.py").read_bytes() == before
    assert not list(project.rglob("*.part")) and not Path("students").exists()
