"""Test blank.py in this process on a copy of the lessons: it never loses a student's work."""
import ast
import os
import re
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

import blank
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, find
from helpers import content_of

pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a copy of the lessons in a folder that is not the working folder."""
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "grade.py").touch()  # else it would be the student edition
    for file in LESSONS:
        blank.write_whole(root / f"{file}.py", lessons.pristine(file))
    monkeypatch.setattr(blank, "ROOT", root)
    monkeypatch.chdir(tmp_path)
    return root


def failure(capsys, *argv):
    """Return the error line of blank.py; check that the status is 1 and that it is the only one."""
    assert blank.main([*argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("blank.py: ")
    return line


def test_a_blank_keeps_all_but_the_body_and_undo_puts_it_back(project, capsys):
    """A blank shows the task.  Undoing restores every byte, although line numbers change."""
    path = project / "train.py"  # as some editors save it
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    before = content_of(project)
    for exercise in EXERCISES:
        path = project / f"{exercise.file}.py"
        old, _ = find(path.read_bytes(), exercise.function)
        assert blank.main([exercise.name]) == 0
        text, blanked = lessons.text_of(path), content_of(project)
        node, first = find(text, exercise.function)
        stub = " ".join(line.strip(" #") for line in text.splitlines()[first - 1:node.end_lineno])
        assert exercise.task in stub and max(map(len, text.splitlines())) <= 88
        assert isinstance(node.body.pop(), ast.Raise)  # and nothing else is left
        old.body[1:] = []
        assert ast.dump(node) == ast.dump(old)
        assert blank.main([exercise.name]) == 0 and content_of(project) == blanked
        assert "blank already" in capsys.readouterr().out
    for exercise in EXERCISES[::2] + EXERCISES[1::2][::-1]:
        assert blank.main(["--undo", exercise.name]) == 0
    (project / "tests/course/pristine").rmdir(), (project / "tests/course").rmdir()
    assert content_of(project) == before


def test_an_attempt_is_never_destroyed(project, capsys):
    """Blank and undo append the attempt to a file.  The last of two definitions counts."""
    path = project / "04_rel_shift.py"
    shipped = b"def rel_shift():\n    pass\n" + path.read_bytes()
    path.write_bytes(shipped)
    for i, act in enumerate((["rel_shift"], ["--undo", "rel_shift"])):
        blank.main(["rel_shift"])
        stub = blank.Lesson(BY_NAME["rel_shift"]).body
        blank.write_whole(path, lessons.text_of(path).replace(stub, f"    return x + {i}\n"))
        assert blank.main(act) == 0
        assert "runs/attempts.txt" in capsys.readouterr().out
    assert path.read_bytes() == shipped, "an attempt came back, not the solution"
    assert (project / "runs" / "attempts.txt").read_text() == (
        "rel_shift\n    return x + 0\nrel_shift\n    return x + 1\n")


def test_colabs_notebook_packs_what_the_student_wrote(project):
    """Its cells run from top to bottom."""
    notebook = (ROOT / "tests/classroom/colab.ipynb").read_text(encoding="utf-8")
    for command in re.findall(r'^ +"!python tests/blank.py ([^"\\]*)', notebook, re.MULTILINE):
        assert blank.main(command.split()) == 0
    with zipfile.ZipFile("me.zip") as archive:
        assert b"reach is blank" in archive.read("02_recurrence.py")


def test_a_file_that_cannot_be_taken_apart_is_left_alone(project, capsys):
    path = project / "04_rel_shift.py"
    good = path.read_bytes()
    for bad, words in ((good + b"\ndef f(:\n", "line"),
                       (good + "# \xe9".encode("latin-1"), "this line is not UTF-8 text; save"),
                       (good.replace(b"rel_shift(x", b"shift(x"), "no rel_shift in")):
        path.write_bytes(bad)
        assert words in failure(capsys, "rel_shift")
        assert path.read_bytes() == bad


def test_a_lesson_that_imports_other_files_is_not_packed(project, capsys):
    """Otherwise it passes here, and is broken when it is graded.  A syntax error is packed."""
    for line in ("from my_helpers import shift", "def f(): import scipy.special",
                 "m = importlib.import_module('mine')"):
        blank.write_whole(project / "04_rel_shift.py", line)
        assert "04_rel_shift.py imports" in failure(capsys, "--submit", "anna")
    blank.write_whole(project / "04_rel_shift.py", "def rel_shift(:\n")
    assert blank.main(["--submit", "broken"]) == 0 and [*Path().glob("*.zip")] == [
        Path("broken.zip")]


def test_a_full_disk_loses_nothing(project, capsys, monkeypatch):
    """A failed blank leaves no files, whichever flush fails, and --undo works after a later one."""
    (project / "tests/course/pristine").mkdir(parents=True)
    before, full = content_of(project), OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock())
    for n in range(3):  # the flush of the kept text, of its folder or of the lesson
        os.fsync.side_effect = [None] * n + [full]
        assert "No space left" in failure(capsys, "rel_shift")
        assert content_of(project) == before
    os.fsync.side_effect = None
    assert blank.main(["rel_shift"]) == blank.main(["--undo", "rel_shift"]) == 0
    assert content_of(project) == before
    os.fsync.side_effect = full
    assert "No such file" in failure(capsys, "--all", "students")
    assert [path.name for path in Path().iterdir()] == ["project"]
