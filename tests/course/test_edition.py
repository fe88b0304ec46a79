"""The student edition: it gives nothing away by accident, it ends, and what it prints is true.

    pytest tests/course/test_edition.py
    pytest -m slow tests/course/test_edition.py      runs of pytest as a student sees them
"""
import os
import re
import subprocess
import sys
import textwrap
import zipfile

import pytest

import blank
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT
from course.rules import rules_of
from helpers import content_of, copy_of_project

NAMES = list(BY_NAME)
COUNT = len(EXERCISES)
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The student edition, written once; the folder is named as ../course is."""
    folder = tmp_path_factory.mktemp("class") / "course"
    assert blank.main(["--all", str(ROOT / os.path.relpath(folder, ROOT))]) == 0
    return folder


# ---- no solution is where a student reads -------------------------------------------------------

COURSE = """diagnosis exercises lessons mistakes mistakes_01 mistakes_02 mistakes_03 mistakes_04
    mistakes_05 mistakes_train oracles rules stand_ins""".split()


def test_the_edition_holds_what_is_listed_and_nothing_else(edition):
    """A file that is new in the project is not in it until it is put on this list."""
    found = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()}
    assert found - {"LICENSE"} == {
        ".gitignore", "README.md", "requirements.txt", *(f"{lesson}.py" for lesson in LESSONS),
        *(path.relative_to(ROOT).as_posix() for folder in ("support", "training")
          for path in (ROOT / folder).glob("*.py")),
        *(f"pretrained/{name}" for name in ("README.md", "best.pt", "curve.png")),
        *(f"tests/{name}.py" for name in ("conftest", "helpers", "blank")),
        *(f"tests/{exercise.test_file}.py" for exercise in EXERCISES),
        *(f"tests/course/{name}.py" for name in COURSE),
        *(f"tests/course/pristine/{lesson}.py" for lesson in LESSONS)}


def squeezed(text):
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_no_telling_line_of_a_solution_is_in_what_students_read(edition, exercise):
    """The longest line that no other function has.  Answers are in tests/course/ alone, in files
    whose first line warns."""
    body = lessons.solution(exercise).split(":\n", 1)[1]
    lines = [squeezed(line.split("  #")[0]) for line in body.splitlines()]
    all_lessons = squeezed("".join(map(lessons.pristine, LESSONS)))
    line = max((line for line in lines if all_lessons.count(line) == 1), key=len)
    assert len(line) > 10 and blank.Lesson(exercise, edition / f"{exercise.file}.py").is_blank()
    for path in edition.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if edition / "tests" / "course" not in path.parents:
            assert line not in squeezed(text), path
        elif path.stem.startswith(("mistakes", "oracles")) or path.parent.name == "pristine":
            assert "SPOILERS" in text.split("\n")[0], path


def test_its_readme_is_the_students_page(edition):
    """Every file that it names is there, every exercise exists; it says how to install, for which
    Python, and what each lesson is about."""
    text = (edition / "README.md").read_text()
    assert "pip install -r requirements.txt" in text and "Python 3.10" in text
    assert all(f"| {lesson}.py |" in text for lesson in LESSONS)
    for path in re.findall(r"[\w./]+\.(?:py|txt|md)\b|\b(?:tests|support|training)/[\w/]*", text):
        assert (edition / path).exists() or (edition / "tests" / path).exists(), path
    assert set(re.findall(r"pytest -k (\w+)", text)) <= set(NAMES)
    assert "grade.py" not in text and "experiments" not in text


def test_its_fast_form_is_the_plain_one(edition):
    """What train.py and training/ ask of training/fast.py is there, and gives the model itself."""
    names, model = {}, object()
    exec((edition / "training" / "fast.py").read_text(), names)
    asked = set(re.findall(r"\bfast\.(\w+)", "".join(path.read_text() for path in (
        edition / "train.py", *(edition / "training").glob("*.py"))))) - {"py"}
    assert asked and all(names[name](model) is model for name in asked)


def test_an_exam_of_some_exercises_has_no_solution_and_no_mistake(tmp_path):
    """A broken rule shows what it compared, nothing identifies a mistake; the others are written.
    """
    folder = tmp_path / "exam"
    assert blank.main(["--all", str(folder), "--exam", "--only", "layer, reach"]) == 0
    texts = {lesson: (folder / f"{lesson}.py").read_text() for lesson in LESSONS}
    assert re.findall(r"# EXERCISE (\w+):", "".join(texts.values())) == ["reach", "layer"]
    assert {lesson for lesson in LESSONS if texts[lesson] != lessons.pristine(lesson)} == {
        "02_recurrence", "05_full_model"}
    course = folder / "tests" / "course"
    assert not (course / "pristine").exists() and not list(course.glob("mistakes_*"))
    page = (folder / "README.md").read_text()
    assert "To hand in" in page and "hold the answers" not in page
    solve(folder, "reach", "return T - 1 - token", "return T - token")
    status, out = pytest_in(folder, "-k", "reach")
    assert status == 1 and "reach: One layer: the last token" in out and "expected    got" in out
    assert "one too far" not in out and "Traceback" not in out
    edit(folder / "02_recurrence.py", "def reach(N, T, M):", "def reach(N, T, M)")
    status, out = pytest_in(folder)
    assert status == 4 and last_line(out).startswith("ERROR: 02_recurrence.py, line")


def test_what_is_handed_in_is_one_archive(tmp_path, monkeypatch):
    """All lesson files, as grade.py takes them."""
    monkeypatch.chdir(tmp_path)
    assert blank.main(["--submit", "anna"]) == 0
    with zipfile.ZipFile("anna.zip") as archive:
        archive.extractall("out")
    assert list(lessons.find_lessons(tmp_path / "out")) == list(LESSONS)


# ---- runs of pytest as a student sees them ------------------------------------------------------

def pytest_in(folder, *flags, **environment):
    """(exit status, what pytest prints) there; -p no:cacheprovider keeps the folder as it is."""
    keep = [] if "XL_CODE" in environment else ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *keep, *flags], cwd=folder, text=True, timeout=600,
        capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment})
    return done.returncode, done.stdout + done.stderr


def last_line(out):
    return out.strip().splitlines()[-1]


def edit(path, old, new):
    """Replace what is in the file once."""
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def solve(folder, name, old="", new=""):
    """Write the shipped solution, edited, where the task is."""
    exercise = BY_NAME[name]
    lesson = blank.Lesson(exercise, folder / f"{exercise.file}.py")
    body = lessons.solution(exercise).split(":\n", 1)[1].replace(old, new)
    lesson.write(textwrap.indent(textwrap.dedent(body), lesson.indent))


@pytest.mark.slow
def test_a_student_solves_one_and_then_all(edition):
    """Blank: each task once, and a hint.  Wrong: the mistake's name.  Right: solved.  A colon is
    missing: the lesson's exercises say so, the others are tested.  At last all are green."""
    exercise, lesson_2 = BY_NAME["reach"], edition / "02_recurrence.py"
    status, out = pytest_in(edition, "-q")
    said = " ".join(out.split())
    assert status == 1 and f"{COUNT} failed" in out and " error" not in out
    assert last_line(out) == f"0 of {COUNT} exercises solved; next: lanes (01)"
    assert all(f"{one.name} is blank: write {one.function} in" in said for one in EXERCISES)
    status, out = pytest_in(edition, "-q", "-k", "reach", "--hints")
    said = " ".join(out.split())
    assert status == 1 and exercise.task[:60] in said and exercise.hint[:60] in said
    solve(edition, "reach", "return T - 1 - token", "return T - token")
    status, out = pytest_in(edition, "-k", "reach")
    assert status == 1 and "reach: one too far" in out and "1 failed" in out
    assert exercise.hint[:30] not in out and "Traceback" not in out
    for name in NAMES:
        solve(edition, name)
    status, out = pytest_in(edition, "-k", "reach")
    assert status == 0 and "reach is solved" in last_line(out)
    edit(lesson_2, "def reach(N, T, M):", "def reach(N, T, M)")
    done = subprocess.run([sys.executable, "tests/blank.py", "--list"], cwd=edition, text=True,
                          capture_output=True, timeout=60)
    states = dict(zip(NAMES, (line.split()[5] for line in done.stdout.splitlines()[1:])))
    assert states == {name: "failing" if BY_NAME[name].file == lesson_2.stem else "solved"
                      for name in NAMES}
    assert done.stdout.count("02_recurrence.py, line") == 1
    edit(lesson_2, "def reach(N, T, M)\n", "def reach(N, T, M):\n")
    status, out = pytest_in(edition, "-q")
    assert status == 0 and last_line(out) == f"{COUNT} of {COUNT} exercises solved"


@pytest.mark.slow
def test_only_rules_run_until_all_exercises_are_solved(tmp_path):
    """Blank, wrong, then solved without --undo, and restored."""
    project, other = copy_of_project(tmp_path), "tests/system/test_layers.py"

    def run(*paths):
        status, out = pytest_in(project, "-q", *(paths or ("tests/test_04_rel_shift.py", other)))
        return status, "only rules ran: " in out, "skipped" in out

    assert run(other) == (0, False, False)
    blank_py = [sys.executable, "tests/blank.py"]
    subprocess.run([*blank_py, "rel_shift"], cwd=project, check=True)
    assert run()[:2] == (1, True)
    solve(project, "rel_shift", "1:, :", ":-1, :")
    assert run(other)[:2] == (5, True)
    solve(project, "rel_shift", "x[..., 1:, :].reshape", "x[..., 1:, :].clone().reshape")
    assert run() == (0, False, True)
    subprocess.run([*blank_py, "--undo", "rel_shift"], cwd=project, check=True)
    assert run() == (0, False, False)


@pytest.mark.slow
def test_k_takes_exercises_by_their_names():
    """All rules of two, and no others of a file that has such a name; a misspelt one is answered.
    """
    _, out = pytest_in(ROOT, "-q", "--collect-only", "-k", "segments or reach")
    found = re.findall(r"::(test_\w+)", out)
    assert found == [rule.function.__name__ for name in ("segments", "reach")
                     for rule in rules_of(name)]
    _, out = pytest_in(ROOT, "-q", "tests/test_02_recurrence.py", "-k", "lane_typo or lanes")
    assert "no exercise is called lane_typo; did you mean lanes?" in out


# ---- XL_CODE: somebody else's files -------------------------------------------------------------

@pytest.mark.slow
def test_xl_code_judges_the_files_of_somebody_else(tmp_path):
    """Right, wrong, endless, renamed and blank ones, and a lesson that cannot be imported; what is
    missing is not counted, and nothing that is handed in falls back to ours."""
    for file in ("02_recurrence", "04_rel_shift"):
        (tmp_path / f"{file}.py").write_text(lessons.pristine(file))
    edit(tmp_path / "02_recurrence.py", "    j = torch", "    while True: pass\n    j = torch")
    edit(tmp_path / "02_recurrence.py", "return T - 1 - token", "return T - token")
    edit(tmp_path / "04_rel_shift.py", "def rel_shift_by_index", "def by_index")
    (tmp_path / "05_full_model.py").write_text("import einops\n")
    lesson = blank.Lesson(BY_NAME["rel_shift"], tmp_path / "04_rel_shift.py")
    lesson.write(lesson.stub())
    status, out = pytest_in(ROOT, "-q", XL_CODE=os.path.relpath(tmp_path, ROOT))
    counted = sum(exercise.file[:2] in ("02", "04", "05") for exercise in EXERCISES)
    assert status == 1 and f"{counted - 2} failed" in out and "Traceback" not in out
    said = " ".join(out.split())
    for words in (f"code under test: {tmp_path / '04_rel_shift.py'}", "only rules ran",
                  "rel_shift is blank", "reach: one too far", "an endless loop?",
                  "there is no rel_shift_by_index in 04_rel_shift.py",
                  "layer: 05_full_model.py: ModuleNotFoundError in line 1 (import einops): No"):
        assert words in said
    assert last_line(out) == (f"2 of {counted} exercises solved ({COUNT - counted} more are not in "
                              "XL_CODE); next: causal_mask (02)")
    status, out = pytest_in(ROOT / "tests", XL_CODE="../support")
    assert status == 4 and last_line(out).startswith("ERROR: XL_CODE: ../support holds no lesson")


ROAMS = """import os, shutil
for name in os.listdir("."):
    (shutil.rmtree if os.path.isdir(name) else os.remove)(name)
open("01_vanilla_segments.py", "w").write("mine")
os.makedirs("tests/course/pristine")
shutil.rmtree(os.getcwd())
os.chdir("..")
"""


@pytest.mark.slow
def test_a_lesson_that_writes_deletes_and_changes_directory_leaves_the_project_alone(tmp_path):
    """By relative paths, when it is imported and when it is called."""
    project = copy_of_project(tmp_path)
    text, first = lessons.pristine("04_rel_shift"), "    *batch, T, K = x.shape\n"
    text = text.replace(first, textwrap.indent(ROAMS, "    ") + first)
    before, theirs = content_of(project), tmp_path / "04_rel_shift.py"
    theirs.write_text(ROAMS + text)
    (tmp_path / "tmp").mkdir()
    status, out = pytest_in(project, XL_CODE="../04_rel_shift.py", TMPDIR=str(tmp_path / "tmp"))
    assert status == 0 and last_line(out).startswith("2 of 2 exercises solved")
    assert content_of(project) == before and theirs.exists()
    assert not list((tmp_path / "tmp").iterdir())
