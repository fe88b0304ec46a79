"""Test the student edition: it reveals no solution by accident, and its messages are correct."""
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

import blank
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT
from course.rules import rules_of
from helpers import content_of, copy_of_project

NAMES, COUNT = list(BY_NAME), len(EXERCISES)
OF = Counter(exercise.lesson for exercise in EXERCISES)
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """Write the student edition once, and return its folder, which is named like ../course."""
    folder = tmp_path_factory.mktemp("class") / "course"
    assert blank.main(["--all", str(ROOT / os.path.relpath(folder, ROOT))]) == 0
    return folder


def test_the_edition_leaves_out_what_is_not_for_students(edition):
    found = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()}
    assert found - {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")} <= {
        f"tests/course/pristine/{lesson}.py" for lesson in LESSONS}
    assert not [name for name in found if re.search(
        r"^(experiments|figures)/|^tests/(formulas|system|experiments|classroom|grade|README)"
        r"|teaching|course/(test_|right|plain_reader|answers)", name)]
    assert {"LICENSE", ".gitignore"} <= found, "students would publish our solutions"
    assert (edition / blank.FAST).read_bytes() == (ROOT / blank.PLAIN).read_bytes()


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_no_telling_line_of_a_solution_is_in_what_students_read(edition, exercise):
    """Its longest line of its own may be only in files of tests/course/ that warn of spoilers."""
    body = lessons.solution(exercise).split(":\n", 1)[1].splitlines()
    lines = ["".join(line.split("  #")[0].split()) for line in body]
    all_lessons = "".join("".join(map(lessons.pristine, LESSONS)).split())
    line = max((line for line in lines if all_lessons.count(line) == 1), key=len)
    for path in edition.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if edition / "tests" / "course" not in path.parents:
            assert line not in "".join(text.split()), path
        elif path.stem.startswith(("mistakes", "oracles")) or path.parent.name == "pristine":
            assert "SPOILERS" in text.split("\n")[0], path


def test_its_readme_is_the_students_page(edition):
    text = (edition / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"[\w./]+\.(?:py|txt|md)\b|\b(?:tests|support|training)/[\w/]*", text):
        assert (edition / path).exists() or (edition / "tests" / path).exists(), path
    assert "pip install" in text and "grade.py" not in text and "experiments" not in text


def run(folder, *command, **environment):
    """Run python with these arguments -> (exit status, its output in one line, its last line)."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, text=True, timeout=600, capture_output=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
             **environment})
    out = done.stdout + done.stderr
    assert "Traceback" not in out
    return done.returncode, " ".join(out.split()), out.strip().splitlines()[-1]


def pytest_in(folder, *flags, **environment):
    return run(folder, "-m", "pytest", "-q", *flags, **environment)


def edit(path, old, new):
    """Replace a text that occurs once in the file."""
    text = lessons.text_of(path)
    assert text.count(old) == 1, old
    blank.write_whole(path, text.replace(old, new))


def solve(folder, name, old="", new=""):
    """Replace the task with the shipped solution, edited."""
    exercise = BY_NAME[name]
    lesson = blank.Lesson(exercise, folder / f"{exercise.file}.py")
    shipped = blank.Lesson(exercise, lessons.shipped_file(exercise.file))
    blank.write_whole(lesson.path, lesson.before + shipped.body.replace(old, new) + lesson.after)


OF_A_PARENT = "[pytest]\naddopts = --collect-only\npython_files = mine_*.py\n"


@pytest.mark.slow
def test_an_exam_of_some_exercises_has_no_solution_and_no_mistake(tmp_path):
    """Settings of a parent folder and modules with our names change no result."""
    (tmp_path / "pytest.ini").write_text(OF_A_PARENT)
    (tmp_path / "course.py").write_text("raise SystemExit('the wrong file')\n")
    folder = tmp_path / "exam"
    assert blank.main(["--all", str(folder), "--exam", "--only", "layer, reach"]) == 0
    assert not list(folder.rglob("pristine")) + list(folder.rglob("mistakes_*"))
    for exercise in EXERCISES:
        lesson = blank.Lesson(exercise, folder / f"{exercise.file}.py")
        assert lesson.is_blank() == (exercise.name in ("layer", "reach"))
    solve(folder, "reach", "return T - 1 - token", "return T - token")
    shutil.copy(tmp_path / "course.py", folder)
    status, out, _ = pytest_in(folder / "tests" / "course", "..", "-k", "reach",
                               "--import-mode=importlib", PYTHONPATH=str(tmp_path))
    assert status == 1 and "reach: One layer: the last token" in out and "expected got" in out
    assert run(folder, "tests/blank.py", "reach")[0] == 0
    assert not list(folder.rglob("pristine")), "an attempt is not a solution"
    assert "return T - token" in (folder / "runs" / "attempts.txt").read_text()
    edit(folder / "02_recurrence.py", "def reach(N, T, M):", "def reach(N, T, M)")
    status, _, last = pytest_in(folder / "tests" / "course")
    assert status == 4 and last.startswith("ERROR: 02_recurrence.py, line")
    status, out, last = run(folder, "-OO", "tests/blank.py", "--list")
    assert status == 1 and out == last and "without -O" in last


@pytest.mark.slow
def test_a_student_solves_one_and_then_all(edition):
    """A missing colon affects only its lesson.  In the end the trained model continues a text."""
    exercise, lesson_2 = BY_NAME["reach"], edition / "02_recurrence.py"
    status, out, last = pytest_in(edition)
    assert status == 1 and f"{COUNT} failed" in out and " error" not in out
    assert last == f"0 of {COUNT} exercises solved; next: lanes (01)"
    assert all(f"{one.name} is blank: write {one.function} in" in out for one in EXERCISES)
    status, out, _ = pytest_in(edition, "-k", "reach", "--hints")
    assert status == 1 and exercise.task[:60] in out and exercise.hint[:60] in out
    solve(edition, "reach", "return T", "return [*map(print, range(9999))], breakpoint(), T")
    status, out, _ = pytest_in(edition, "-k", "reach")
    assert status == 1 and "reach: RuntimeError in line" in out and "breakpoint() is still" in out
    assert " 9997 9998 " in out and " 9900 " not in out
    solve(edition, "reach", "return T - 1 - token", "return T - token")
    status, out, _ = pytest_in(edition, "-k", "reach")
    assert status == 1 and "reach: one too far" in out and "1 failed" in out
    for name in NAMES:
        solve(edition, name)
    count = len(rules_of("segments") + rules_of("reach"))
    status, out, last = pytest_in(edition, "-k", "segments or reach")
    assert status == 0 and f" {count} passed" in out and last == "reach is solved"
    assert "raech; did you mean reach?" in pytest_in(edition, "-k", "raech")[1]
    edit(lesson_2, "def reach(N, T, M):", "def reach(N, T, M)")
    _, out, _ = run(edition, "tests/blank.py", "--list")
    assert out.count(" failing ") == OF["02"] and out.count(" solved ") == COUNT - OF["02"]
    assert out.count("02_recurrence.py, line") == 1
    edit(lesson_2, "def reach(N, T, M)\n", "def reach(N, T, M):\n")
    status, _, last = pytest_in(edition)
    assert status == 0 and last == f"{COUNT} of {COUNT} exercises solved"
    assert run(edition, "train.py", "--sample", "def ", "--n-tokens", "9")[0] == 0


@pytest.mark.slow
def test_only_rules_run_until_all_exercises_are_solved(tmp_path):
    project = copy_of_project(tmp_path)

    def outcome():
        status, out, _ = pytest_in(project, "tests/system/test_layers.py")
        return status, "only rules ran: " in out, "skipped" in out

    assert run(project, "tests/blank.py", "rel_shift")[0] == 0
    assert outcome()[:2] == (5, True)
    solve(project, "rel_shift", "1:, :", ":-1, :")
    assert outcome()[:2] == (5, True)
    solve(project, "rel_shift", "x[..., 1:, :].reshape", "x[..., 1:, :].clone().reshape")
    assert outcome() == (0, False, True)
    assert run(project, "tests/blank.py", "--undo", "rel_shift")[0] == 0
    assert outcome() == (0, False, False)


ROAMS = """import os, shutil
for name in os.listdir("."):
    (shutil.rmtree if os.path.isdir(name) else os.remove)(name)
open("01_vanilla_segments.py", "w").write("mine")
os.makedirs("tests/course/pristine")
shutil.rmtree(os.getcwd())
os.chdir("..")
"""


@pytest.mark.slow
def test_xl_code_tests_a_students_files(tmp_path):
    """Missing lessons are not counted.  Code that writes, deletes and changes directory, on import
    or when called, does not change the project or its surroundings."""
    project, theirs, other = copy_of_project(tmp_path), tmp_path / "anna", tmp_path / "tmp"
    theirs.mkdir(), other.mkdir()
    (tmp_path / "pytest.ini").write_text(OF_A_PARENT)
    lesson = blank.Lesson(BY_NAME["rel_shift"], lessons.shipped_file("04_rel_shift"))
    text = f"# coding: utf-8\n# \xe9\n{lesson.before}{lesson.stub()}{lesson.after}"
    (theirs / "04_rel_shift.py").write_text(text, encoding="utf-8-sig")
    (theirs / "05_full_model.py").write_text("import einops\n")
    blank.write_whole(theirs / "02_recurrence.py", ROAMS + lessons.pristine("02_recurrence"))
    roams = textwrap.indent(ROAMS, "    ")
    edit(theirs / "02_recurrence.py", "    joined = ", f"{roams}    joined = ")
    before = content_of(project), content_of(theirs)
    status, out, last = pytest_in(project, XL_CODE="../anna", TMPDIR=str(other))
    for words in (f"code under test: {theirs / '04_rel_shift.py'}", "only rules ran",
                  f"{1 + OF['05']} failed", "rel_shift is blank",
                  "layer: 05_full_model.py: ModuleNotFoundError in line 1 (import einops): No"):
        assert words in out
    counted = OF["02"] + OF["04"] + OF["05"]
    solved = f"{OF['02'] + OF['04'] - 1} of {counted} exercises solved"
    more = f"({COUNT - counted} more are not in XL_CODE)"
    assert status == 1 and last == f"{solved} {more}; next: rel_shift (04)"
    assert (content_of(project), content_of(theirs)) == before
    assert not [path for path in other.iterdir() if "torch" not in path.name]  # torch's cache
    status, _, last = pytest_in(project / "tests", XL_CODE="../support")
    assert status == 4 and last.startswith("ERROR: XL_CODE: ../support is not a folder with lesson")
