"""blank.py and what a student sees: nothing is lost, nothing of ours is passed off as theirs.

    pytest tests/course/test_blank.py

blank.py is called in-process on a copy of the lessons; the runs of pytest that a student would see
are made in processes of their own, on a student edition.
"""
import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import blank
from course import exercises
from course.exercises import EXERCISES, ROOT

NAMES = [e.name for e in EXERCISES]


@pytest.fixture(autouse=True)
def our_own_solutions():
    """These tests need the shipped solutions."""
    if exercises.overlay or any(exercises.state(name)[0] != "solved" for name in NAMES):
        pytest.skip("needs the shipped solutions of all exercises")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the lessons in a folder that is not the working folder."""
    root = tmp_path / "project"
    (root / "tests" / "course").mkdir(parents=True)
    for file in exercises.LESSONS:
        shutil.copy(ROOT / f"{file}.py", root)
    (root / "tests" / "course" / blank.TEACHERS[0]).touch()
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
    node, first = exercises.find(text, exercise.function)
    old, _ = exercises.find(before[Path(path.name)].decode(), exercise.function)
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
        stub = blank.Lesson(exercises.BY_NAME["rel_shift"]).body
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

@pytest.mark.parametrize("flags, words", [
    (["relshift"], "did you mean rel_shift?"), (["layers"], "did you mean layer?"),
    (["Layer.foward"], "did you mean Layer.forward?"), (["qqqq"], "--list shows all"), ([""], "''"),
    ([], "--help"), (["--undo"], "--help"), (["--undo", "reach"], "was not blanked here"),
    (["--undo", "rech"], "did you mean reach?"), (["reach", "--list"], "--help"),
    (["--all", "."], "there already"), (["--all", "project/students"], "inside the project"),
    (["--all", "file"], "there already"), (["--all", "file/below"], ""),
], ids=lambda z: " ".join(z) if isinstance(z, list) else "")
def test_bad_input_is_one_line_and_changes_nothing(project, capsys, flags, words):
    """What, where, what to do; status 1."""
    Path("file").write_text("kept")
    before = files(project)
    assert words in failure(capsys, blank.main(flags))
    assert files(project) == before and Path("file").read_text() == "kept"


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


@pytest.mark.parametrize("call", ["replace", "write_bytes"])
def test_a_full_disk_loses_nothing(project, capsys, monkeypatch, call):
    """The lesson file is written beside and renamed: it is whole at every moment."""
    def full(*arguments):
        raise OSError(28, "No space left on device")

    before = (project / "04_rel_shift.py").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(*{"replace": (os, "replace"), "write_bytes": (Path, "write_bytes")}[call],
                      full)
        assert "No space left" in failure(capsys, blank.main(["rel_shift"]))
        assert "No space left" in failure(capsys, blank.main(["--all", "students"])) or (
            call == "replace")
    assert (project / "04_rel_shift.py").read_bytes() == before
    assert not list(project.rglob("*.part")) and not Path("students").exists()


# ---- the student edition ------------------------------------------------------------------------

@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The student edition, written once."""
    if exercises.overlay or any(exercises.state(name)[0] != "solved" for name in NAMES):
        pytest.skip("needs the shipped solutions of all exercises")
    folder = tmp_path_factory.mktemp("class") / "course"
    assert blank.main(["--all", str(folder)]) == 0
    return folder


def test_the_edition_holds_no_solution(edition):
    """All blank, no teacher's file, no original, and no statement of a solution anywhere."""
    assert not [p for p in edition.rglob("*") if p.name in (*blank.TEACHERS, ".exercises", ".git")]
    assert (edition / "README.md").exists() and (edition / "tests" / "conftest.py").exists()
    texts = {p: p.read_text() for p in edition.rglob("*.py")}
    for exercise in EXERCISES:
        lesson = blank.Lesson(exercise, edition)
        assert lesson.is_blank()
        node, _ = exercises.find((ROOT / f"{exercise.file}.py").read_text(), exercise.function)
        if len(node.body) > 3:  # the text as a whole, and without its first and last line
            body = blank.Lesson(exercise, ROOT).body.splitlines()
            for path, text in texts.items():
                assert "\n".join(body[1:-1]) not in text, f"{exercise.name} stands in {path.name}"


def test_the_edition_says_that_there_is_nothing_to_undo(edition):
    """One sentence, and the attempt of a student who blanks again is kept."""
    command = [sys.executable, str(edition / "tests" / "blank.py")]
    done = subprocess.run([*command, "--undo", "reach"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and "student edition" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def pytest_in(folder, *flags, **environment):
    """What pytest prints there; -p no:cacheprovider keeps the folder as it is."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_blank_fails_what_depends_waits_all_else_runs(edition):
    """A whole file of tests in the student edition: no red but the exercises themselves."""
    status, out = pytest_in(edition, "tests/course/test_exercises.py", "tests/test_02_recurrence.py",
                            "-rs")
    assert status == 1
    assert f"{len(EXERCISES)} failed" in out and " passed" in out
    assert "Skipped: waits for" in out or "waits for update_memory" in out
    assert "tests wait for update_memory" in out
    assert "site-packages" not in out and "Traceback" not in out
    assert out.strip().splitlines()[-1] == (
        f"0 of {len(EXERCISES)} exercises solved; next: lanes (01)")


@pytest.mark.slow
def test_plain_pytest_in_the_edition_ends(edition):
    """No test waits for what a blank exercise will never do: plain pytest comes to its last line.
    """
    status, out = pytest_in(edition, "-q")
    assert status == 1
    assert out.strip().splitlines()[-1] == (
        f"0 of {len(EXERCISES)} exercises solved; next: lanes (01)")


def hand_in(folder, name, *wanted, change=lambda text: text):
    """A file with the shipped functions `wanted`, changed."""
    parts = []
    for exercise in (exercises.BY_NAME[w] for w in wanted):
        text = (ROOT / f"{exercise.file}.py").read_text()
        node, _ = exercises.find(text, exercise.function)
        part = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        owner = exercise.function.rpartition(".")[0]
        parts.append((f"class {owner}:\n" if owner else "") + part + "\n\n")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(change("\n".join(parts)))


@pytest.mark.slow
def test_xl_code_takes_a_file_of_functions_and_says_so(tmp_path):
    """Right and wrong functions, one a method; what is not handed in is ours, and not counted.

    The other tests that call the wrong one wait for it: no wall of red.
    """
    hand_in(tmp_path / "in", "mine.py", "rel_shift", "layer", "reach",
            change=lambda text: text.replace("T - 1 - first", "T - first"))
    status, out = pytest_in(ROOT, "tests/course/test_exercises.py", "tests/test_02_recurrence.py",
                            XL_CODE=str(tmp_path / "in"))
    assert status == 1 and "1 failed, " in out and "tests wait for reach" in out
    assert "04_rel_shift.py: ours, with rel_shift from XL_CODE, mine.py" in out
    assert "05_full_model.py: ours, with Layer.forward from XL_CODE, mine.py" in out
    assert "01_vanilla_segments.py: ours\n" in out and "reach: one too far" in out
    assert out.strip().splitlines()[-1] == (
        f"2 of 3 exercises solved ({len(EXERCISES) - 3} more are not in XL_CODE); next: reach (02)")


@pytest.mark.slow
def test_an_endless_loop_is_entered_once(tmp_path):
    """Its own test gives up after ten seconds; those that depend on it do not wait for it again."""
    (tmp_path / "mine.py").write_text("def reach(N, T, M):\n    while True:\n        pass\n")
    status, out = pytest_in(ROOT, "tests/course/test_exercises.py", "tests/test_02_recurrence.py",
                            XL_CODE=str(tmp_path))
    assert status == 1 and "1 failed, " in out and "an endless loop?" in " ".join(out.split())
    assert "tests wait for reach" in out


@pytest.mark.slow
def test_xl_code_takes_lesson_files_and_never_falls_back_to_ours(tmp_path):
    """A blank stays blank, a missing function is missing, though we have both; others import it."""
    folder = tmp_path / "in"
    folder.mkdir()
    text = (ROOT / "04_rel_shift.py").read_text().replace("def rel_shift_by_index", "def by_index")
    lesson = blank.Lesson(exercises.BY_NAME["rel_shift"])
    (folder / "04_rel_shift.py").write_text(text.replace(lesson.body, lesson.stub()))
    depends = "tests/test_05_full_model.py::test_attention_is_lesson_4s_score"
    status, out = pytest_in(ROOT, "tests/course/test_exercises.py", depends, XL_CODE=str(folder))
    assert f"04_rel_shift.py: from XL_CODE, {folder / '04_rel_shift.py'}" in out
    assert "2 failed" in out and "rel_shift is blank" in out
    assert "there is no rel_shift_by_index in 04_rel_shift.py" in out
    assert "5 tests wait for rel_shift" in out
    assert f"0 of 2 exercises solved ({len(EXERCISES) - 2} more are not in XL_CODE)" in out


@pytest.mark.parametrize("make, words", [
    (lambda f: None, "does not exist"),
    (lambda f: f.write_text("x"), "is a file"),
    (lambda f: f.mkdir(), "holds no lesson file"),
    (lambda f: (f.mkdir(), (f / "notes.txt").write_text("x")), "holds no lesson file"),
    (lambda f: (f.mkdir(), (f / "a.py").write_text("def reach(:")), "a.py, line 1: SyntaxError"),
    (lambda f: (f.mkdir(), (f / "a.py").write_text("if 1:\n\tx = 1\n        y = 2\n")), "TabError"),
    (lambda f: (f.mkdir(), (f / "a.py").write_bytes(b"# \xe9\ndef reach(): 0")), "a.py"),
    (lambda f: [hand_in(f, n, "reach") for n in ("a.py", "b.py")], "a.py and in b.py"),
], ids=["missing", "file", "empty", "no code", "syntax", "tabs", "latin-1", "twice"])
def test_xl_code_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, make, words):
    """Before any test runs, nothing laid over."""
    make(tmp_path / "in")
    monkeypatch.setattr(exercises, "overlay", None)
    with pytest.raises(ValueError, match="(?s)^XL_CODE: .*" + words) as error:
        exercises.lay_over(tmp_path / "in")
    assert "\n" not in str(error.value) and exercises.overlay is None


def test_a_lesson_that_cannot_be_imported_is_one_sentence(tmp_path):
    """The exercises of its file, and of those that import it, fail with it; the rest runs."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "04_rel_shift.py").write_text("import einops\n")
    hand_in(folder, "mine.py", "reach")
    status, out = pytest_in(ROOT, "tests/course/test_exercises.py", "tests/test_04_rel_shift.py",
                            "tests/test_05_full_model.py", XL_CODE=str(folder))
    assert status == 1 and "Traceback" not in out and "INTERNALERROR" not in out
    assert "04_rel_shift.py, line 1 (import einops): ModuleNotFoundError" in out
    assert "2 failed, 1 passed" in out and "2 test files wait for 04_rel_shift.py" in out
    assert "1 of 3 exercises solved (15 more are not in XL_CODE); next: rel_shift_by_index" in out
