"""The student edition: it gives nothing away by accident, it ends, and a student is told the truth.

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
from course import copies, lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT

NAMES = [exercise.name for exercise in EXERCISES]
COUNT = len(EXERCISES)
pytestmark = pytest.mark.usefixtures("our_own")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The student edition, written once."""
    folder = tmp_path_factory.mktemp("class") / "course"
    named = ROOT / os.path.relpath(folder, ROOT)  # as ../course: by way of the project's own folder
    assert ".." in named.parts and blank.main(["--all", str(named)]) == 0
    return folder


# ---- no solution stands where a student reads ---------------------------------------------------

ROOM = """copies diagnosis exercises lessons mistakes mistakes_01 mistakes_02 mistakes_03
    mistakes_04 mistakes_05 mistakes_train oracles rules stand_ins""".split()


def test_the_edition_holds_what_is_listed_and_nothing_else(edition):
    """A file that is new in the project is not in it until it is put on this list."""
    found = {path.relative_to(edition).as_posix() for path in edition.rglob("*") if path.is_file()
             and "__pycache__" not in path.parts}
    top = {".gitignore", "README.md", "requirements.txt", *(f"{lesson}.py" for lesson in LESSONS)}
    support = {f"support/{path.name}" for path in (ROOT / "support").glob("*.py")}
    training = {f"training/{path.name}" for path in (ROOT / "training").glob("*.py")}
    model = {f"pretrained/{name}" for name in ("README.md", "best.pt", "curve.png")}
    tests = {"tests/conftest.py", "tests/helpers.py", "tests/blank.py"} | {
        f"tests/{exercise.test_file}.py" for exercise in EXERCISES}
    course = {f"tests/course/{name}.py" for name in ROOM}
    pristine = {f"tests/course/pristine/{lesson}.py" for lesson in LESSONS}
    assert found - {"LICENSE"} == top | support | model | tests | course | pristine | (
        training - {"training/official_weights.py"})


def squeezed(text):
    return re.sub(r"\s+", "", text)


def telling(exercise):
    """The longest line of a solution that no other function of the lessons has, without spaces and
    comment."""
    body = lessons.solution(exercise).split(":\n", 1)[1]
    all_lessons = "".join(map(lessons.pristine, LESSONS))
    lines = [squeezed(line.split("  #")[0]) for line in body.splitlines()]
    return max((line for line in lines if squeezed(all_lessons).count(line) == 1), key=len)


def read_by_students(folder):
    """The files that a student opens: all but tests/course/, which says that it spoils."""
    return [path for path in sorted(folder.rglob("*.py"))
            if (folder / "tests" / "course") not in path.parents]


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_no_telling_line_of_a_solution_stands_in_what_students_read(edition, exercise):
    """The line is one of the lesson's, so that it would be found."""
    line = telling(exercise)
    assert len(line) > 10
    found = [path.name for path in read_by_students(edition)
             if line in squeezed(path.read_text(encoding="utf-8"))]
    assert not found, f"{line} stands in {found}"


def test_what_knows_answers_says_so(edition):
    """Answers lie in tests/course/ alone, in files whose first line warns."""
    for path in (edition / "tests" / "course").rglob("*.py"):
        if path.stem.startswith(("mistakes", "oracles")) or path.parent.name == "pristine":
            assert "SPOILERS" in path.read_text().split("\n")[0], path.name


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_all_is_blank_there(edition, exercise):
    assert blank.Lesson(exercise, edition / f"{exercise.file}.py").is_blank()


def test_its_readme_speaks_only_of_what_is_in_it(edition):
    """Every file that it names is there, every exercise and flag exists; it says how to install,
    for which Python, and what each lesson is about."""
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
    asked = set(re.findall(r"\bfast\.(\w+)\(", "".join(path.read_text() for path in (
        edition / "train.py", *(edition / "training").glob("*.py")))))
    assert asked and all(names[name](model) is model for name in asked)


def test_an_exam_has_no_solution_and_no_mistake(tmp_path, capsys):
    """A broken rule shows itself, and what it compared; nothing names a mistake."""
    assert blank.main(["--all", str(tmp_path / "exam"), "--exam"]) == 0
    course = tmp_path / "exam" / "tests" / "course"
    assert not (course / "pristine").exists() and not list(course.glob("mistakes_*"))
    page = (tmp_path / "exam" / "README.md").read_text()
    assert "To hand in" in page and "hold the answers" not in page
    path = tmp_path / "exam" / "02_recurrence.py"
    exercise = BY_NAME["reach"]
    solve(tmp_path / "exam", exercise, "return T - 1 - token", "return T - token")
    assert "return T - token" in path.read_text()
    status, out = pytest_in(tmp_path / "exam", "-k", "reach")
    assert status == 1 and "reach: One layer: the last token" in out and "expected    got" in out
    assert "one too far" not in out and "Traceback" not in out
    assert blank.main(["--exam", "--undo", "reach"]) == 1
    assert "--exam and --only go with --all" in capsys.readouterr().err


def test_an_edition_of_a_later_week_has_the_earlier_lessons_written(tmp_path, capsys):
    """Two exercises are blank; everything else is as in the whole project."""
    folder = tmp_path / "week"
    assert blank.main(["--all", str(folder), "--only", "layer, rel_shift"]) == 0
    assert f"2 of {COUNT} exercises are blank" in capsys.readouterr().out
    for lesson in LESSONS:
        same = (folder / f"{lesson}.py").read_text() == (ROOT / f"{lesson}.py").read_text()
        assert same == (lesson not in ("04_rel_shift", "05_full_model")), lesson
    text = "".join((folder / f"{lesson}.py").read_text() for lesson in LESSONS)
    assert re.findall(r"# EXERCISE (\w+):", text) == ["rel_shift", "layer"]
    misspelt = ["--all", str(tmp_path / "no"), "--only", "later"]
    for wrong, said in ((["--only", "layer", "--list"], "go with --all"),
                        (misspelt, "did you mean layer?")):
        assert blank.main(wrong) == 1 and said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_what_is_handed_in_is_one_archive(tmp_path, monkeypatch, capsys):
    """All lesson files, as grade.py takes them; what is there is not overwritten."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:  # a lesson is missing: nothing blocks the next try
        patch.setattr(blank, "LESSONS", [*LESSONS, "06_missing"])
        assert blank.main(["--submit", "anna"]) == 1 and not list(tmp_path.iterdir())
        assert "06_missing.py" in capsys.readouterr().err
    assert blank.main(["--submit", "anna"]) == 0
    with zipfile.ZipFile("anna.zip") as archive:
        archive.extractall("out")
    assert list(copies.find_lessons(tmp_path / "out")) == list(LESSONS)
    assert blank.main(["--submit", "anna"]) == 1
    assert "is there already" in capsys.readouterr().err


# ---- an answer must be the student's own --------------------------------------------------------

@pytest.mark.parametrize("line", [
    "from course.oracles import shift", "import course.lessons",
    "from tests.course import oracles", "from helpers import visible", "import conftest",
    "import_module('course.mistakes')",
    "__import__('course')", "importlib.import_module('test_04_rel_shift')",
    "exec(open('tests/course/pristine/04_rel_shift.py').read())", "import shifts"])
def test_an_answer_that_imports_from_tests_is_refused(tmp_path, line):
    """By itself, or through a file beside it."""
    (tmp_path / "shifts.py").write_text("from course import oracles\n")
    (tmp_path / "mine.py").write_text(f"import torch\ndef rel_shift(x):\n    {line}\n")
    assert lessons.imported_from_tests(tmp_path / "mine.py")


def test_an_answer_may_import_what_is_its_own(tmp_path):
    """And speak of the course; a file beside it that is no Python gives it nothing."""
    (tmp_path / "helpers.py").write_text("import math\n")
    (tmp_path / "notes.py").write_text("these are :\n")
    (tmp_path / "mine.py").write_text("import torch, helpers\nfrom importlib import import_module\n"
                                      "lesson_1 = import_module('01_vanilla_segments')\n"
                                      "print('course')\nimport notes\n")
    assert lessons.imported_from_tests(tmp_path / "mine.py") == ""


@pytest.mark.parametrize("files, words", [
    (None, "does not exist"), ({}, "holds no lesson file"),
    ({"reach.py": "def reach(N, T, M): 0"}, "hand in the lesson's whole file"),
    ({"a/train.py": "", "b/train.py": ""}, "in a/ and in b/"),
], ids=["missing", "empty", "function", "two"])
def test_xl_code_that_cannot_be_used_is_one_sentence(tmp_path, files, words):
    folder = tmp_path / "in"
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if files == {}:
        folder.mkdir()
    with pytest.raises(ValueError, match=words) as error:
        copies.find_lessons(folder)
    assert "\n" not in str(error.value)


def test_a_whole_project_below_a_folder_is_found(tmp_path):
    """As an archive unpacks it, with what a system adds to it."""
    for name in ("hw/project/train.py", "hw/project/tests/train.py", "__MACOSX/hw/train.py",
                 "hw/.venv/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert copies.find_lessons(tmp_path) == {"train": tmp_path / "hw" / "project" / "train.py"}


# ---- runs of pytest as a student sees them ------------------------------------------------------

def pytest_in(folder, *flags, **environment):
    """(exit status, what pytest prints) there; -p no:cacheprovider keeps the folder as it is."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        timeout=600)
    return done.returncode, done.stdout + done.stderr


def last_line(out):
    return out.strip().splitlines()[-1]


def solve(folder, exercise, old="", new=""):
    """Write the shipped solution, edited, where the task stands."""
    lesson = blank.Lesson(exercise, folder / f"{exercise.file}.py")
    body = lessons.solution(exercise).split(":\n", 1)[1].replace(old, new)
    lesson.write(textwrap.indent(textwrap.dedent(body), lesson.indent))


@pytest.mark.slow
def test_plain_pytest_in_the_edition_ends(edition):
    """Every exercise shows its task, all else waits for one of them, and nothing is red."""
    status, out = pytest_in(edition, "-q")
    assert status == 1 and f"{COUNT} failed" in out and " error" not in out
    assert last_line(out) == f"0 of {COUNT} exercises solved; next: lanes (01)"
    for exercise in EXERCISES:
        assert f"{exercise.name} is blank: write {exercise.function} in" in " ".join(out.split())
    assert "tests wait for update_memory" in out and "Traceback" not in out


@pytest.mark.slow
def test_a_student_solves_one_and_then_all(tmp_path):
    """Blank: task and hint.  Wrong: the mistake's name.  Right: solved.  All: green."""
    folder, exercise = tmp_path / "course", BY_NAME["reach"]
    blank.main(["--all", str(folder)])
    status, out = pytest_in(folder, "-q", "-k", "reach", "--hints")
    assert status == 1 and exercise.task[:60] in " ".join(out.split())
    assert exercise.hint[:60] in " ".join(out.split())
    solve(folder, exercise, "return T - 1 - token", "return T - token")
    status, out = pytest_in(folder, "-k", "reach")
    assert status == 1 and "reach: one too far" in out and "1 failed" in out
    assert exercise.hint[:30] not in out
    for exercise in EXERCISES:
        solve(folder, exercise)
    status, out = pytest_in(folder, "-k", "reach")
    assert status == 0 and "reach is solved" in last_line(out)
    status, out = pytest_in(folder, "-q")
    assert status == 0, "\n".join(line for line in out.splitlines() if "FAILED" in line)
    assert last_line(out) == f"{COUNT} of {COUNT} exercises solved"


@pytest.mark.slow
def test_one_broken_line_is_said_once(tmp_path):
    """A colon is missing in lesson 2: its exercises, and those of the lessons that use it, cannot
    be tested, for one reason; lesson 1 can."""
    folder = tmp_path / "course"
    blank.main(["--all", str(folder)])
    solve(folder, BY_NAME["lanes"])
    path = folder / "02_recurrence.py"
    path.write_text(path.read_text().replace("def reach(N, T, M):", "def reach(N, T, M)"))
    done = subprocess.run([sys.executable, "tests/blank.py", "--list"], cwd=folder, text=True,
                          capture_output=True, timeout=60)
    states = [line.split()[5] for line in done.stdout.splitlines()[1 : COUNT + 1]]
    assert states == ["solved", "blank", "blank"] + ["untested"] * (COUNT - 3)
    assert done.stdout.count("02_recurrence.py, line") == 1
    assert last_line(done.stdout) == f"1 of {COUNT} exercises solved; next: segments (01)"


@pytest.mark.slow
def test_k_takes_exercises_by_their_names():
    """Two, and not those of which they are a part; a name that is none is answered."""
    _, out = pytest_in(ROOT, "-q", "--collect-only", "-k", "lanes or segments")
    found = re.findall(r"(test_\w+)\.py::(test_\w+)", out)
    assert {file for file, _ in found} == {"test_01_vanilla_segments"}
    assert ("test_01_vanilla_segments", "test_position_0") not in found and len(found) > 15
    _, out = pytest_in(ROOT, "-q", "-k", "lane_typo")
    assert "no exercise is called lane_typo; did you mean lanes?" in out
    _, out = pytest_in(ROOT, "-q", "tests/test_02_recurrence.py", "-k", "lanes")
    assert "did you mean" not in out


@pytest.fixture
def theirs(tmp_path):
    """A folder with lesson files in which functions are blank, wrong, endless, or renamed."""
    for name, old, new in (
            ("causal_mask", "    j = torch", "    while True:\n        pass\n    j = torch"),
            ("reach", "return T - 1 - token", "return T - token"),
            ("rel_shift_by_index", "def rel_shift_by_index", "def by_index")):
        exercise = BY_NAME[name]
        path = tmp_path / f"{exercise.file}.py"
        text = path.read_text() if path.exists() else lessons.pristine(exercise.file)
        shipped = textwrap.dedent(lessons.solution(exercise))
        assert old in (text if "def" in old else shipped)
        path.write_text(text.replace(old, new, 1))
    lesson = blank.Lesson(BY_NAME["rel_shift"], tmp_path / "04_rel_shift.py")
    lesson.write(lesson.stub())
    return tmp_path


@pytest.mark.slow
def test_xl_code_lays_lesson_files_over_a_copy(theirs):
    """Right, wrong, endless and blank ones; what is missing is not counted; what depends waits."""
    files = ("tests/test_02_recurrence.py", "tests/test_04_rel_shift.py")
    status, out = pytest_in(ROOT, "-q", *files, XL_CODE=str(theirs))
    said = " ".join(out.split())
    assert status == 1 and "4 failed" in out
    assert f"code under test: {theirs / '04_rel_shift.py'}" in out
    assert f"code under test: all else of {ROOT}" in out and "/project" not in out
    assert "rel_shift is blank" in out and "reach: one too far" in out
    assert "an endless loop?" in said
    assert "there is no rel_shift_by_index in 04_rel_shift.py" in said
    assert "wait for causal_mask" in out and "wait for rel_shift" in out
    assert last_line(out) == (f"2 of 6 exercises solved ({COUNT - 6} more are not in XL_CODE); "
                              "next: causal_mask (02)")


@pytest.mark.slow
def test_a_lesson_that_cannot_be_imported_is_one_sentence(tmp_path):
    """The exercises of its file fail with it, files that need it wait, the rest runs."""
    here = sum(exercise.file == "04_rel_shift" for exercise in EXERCISES)
    (tmp_path / "04_rel_shift.py").write_text("import einops\n")
    status, out = pytest_in(ROOT, "tests/test_02_recurrence.py", "tests/test_04_rel_shift.py",
                            "tests/test_05_full_model.py", XL_CODE=str(tmp_path))
    assert status != 0 and "Traceback" not in out and "INTERNALERROR" not in out
    assert "04_rel_shift.py, line 1 (import einops): ModuleNotFoundError" in out
    assert last_line(out).startswith(
        f"0 of {here} exercises solved ({COUNT - here} more are not in XL_CODE)")


@pytest.mark.slow
def test_who_waits_for_a_wrong_exercise_is_no_success(tmp_path):
    """A file whose own exercises are right, but which calls a wrong one of another lesson."""
    text = lessons.pristine("04_rel_shift").replace("x[..., 1:, :]", "x[..., :-1, :]")
    (tmp_path / "04_rel_shift.py").write_text(text)
    status, out = pytest_in(ROOT, "-q", "tests/test_05_full_model.py", XL_CODE=str(tmp_path))
    assert status == 1 and "tests wait for rel_shift" in out and " failed" not in out
