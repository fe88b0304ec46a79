"""Grading a class: whatever a submission does, it gets one row, and the others keep their points.
"""
import asyncio
import csv
import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import grade
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS
from helpers import content_of, copy_of_project, wait_until, zipped

NAMES = list(BY_NAME)
COUNT = len(NAMES)
ONE, TWO, _, FOUR, _, _ = LESSONS
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


# ---- a class ------------------------------------------------------------------------------------

def lesson(file, **bodies):
    """A lesson as it is shipped, except that functions do this first: exercise -> lines."""
    text = lessons.pristine(file)
    for name, body in bodies.items():
        first = lessons.solution(BY_NAME[name]).split(":\n", 1)[1].splitlines()[0]
        assert text.count("\n" + first) == 1, first
        text = text.replace("\n" + first, "\n" + textwrap.indent(body, "    ") + "\n" + first)
    return text


IN_ONE, IN_TWO = (sum(e.file == file for e in EXERCISES) for file in (ONE, TWO))
# a loop that no exception ends
SWALLOWS = """import time
while True:
    try:
        time.sleep(0.01)
    except BaseException:
        pass
"""
CHILD = """import os, pathlib, time
if os.fork() == 0:
    pathlib.Path('{mark}').write_text(str(os.getpid()))
    time.sleep(600)
    os._exit(0)"""
# a hook that lets every test pass
CHEATS = """import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
BLANK = 'raise NotImplementedError(\n    "rel_shift is blank: write it here")'

# name of the submission -> its files; its points; words of its sentences
CLASS = {
    "anna": ({f"{file}.py": lesson(file) for file in LESSONS}, COUNT, f"{COUNT} of {COUNT} "),
    "some": ({f"{FOUR}.py": lesson(FOUR)}, 2, f"2 of {COUNT} exercises solved"),
    "=1+1": ({f"{FOUR}.py": lesson(FOUR, rel_shift=BLANK)}, 1, "blank: rel_shift"),
    "broken": ({"train.py": "def train_step(:\n", f"{ONE}.py": lesson(ONE)}, IN_ONE,
               "train.py, line 1: SyntaxError"),
    "calls": ({f"{ONE}.py": lesson(ONE, lanes="while True: pass",
                                   sinusoid="return torch.zeros(2 * 10 ** 9)"),
               f"{TWO}.py": lesson(
                   TWO, causal_mask="return causal_mask(T, m)", reach=CHILD,
                   stream_losses="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**7))")},
              3, "sinusoid: RuntimeError"),  # out of memory
    "dies": ({f"{ONE}.py": lesson(ONE, sinusoid="import os; os._exit(0)"),
              f"{TWO}.py": lesson(TWO, update_memory=SWALLOWS)}, IN_ONE + IN_TWO - 2,
             "sinusoid: ended the process (status 0) | update_memory: still running"),
    "hangs": ({f"{TWO}.py": SWALLOWS, f"{FOUR}.py": lesson(FOUR)}, 2,
              "02_recurrence.py: still running"),
    # what is beside the lessons does neither good nor harm
    "cheats": ({f"{FOUR}.py": lesson(FOUR, rel_shift="return x"), "conftest.py": CHEATS,
                "sitecustomize.py": CHEATS, "random.py": "numbers = [4]\n", "test_mine.py": "x = (",
                "pytest.ini": "[pytest]\naddopts = --no-such-flag\n"}, 1, "rel_shift: "),
}


@pytest.mark.slow
def test_a_mistake_costs_its_own_point_only(tmp_path):
    """A class inside the project, beside an ini file that is none of its business.  Points are the
    sum of the marks; what hangs or dies leaves the rest, every mistake has a sentence, a
    spreadsheet's formula is defused, no child is left, and the project stays as it is."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    project, mark = copy_of_project(tmp_path), tmp_path / "child"
    for name, (files, *_) in CLASS.items():
        (project / "submissions" / name).mkdir(parents=True)
        for file, text in files.items():
            (project / "submissions" / name / file).write_text(text.replace("{mark}", str(mark)))
    before = content_of(project)
    done = subprocess.run(
        [sys.executable, "tests/grade.py", "submissions", "--csv", "../grades.csv", "--seconds",
         "15"], capture_output=True, text=True, timeout=500, cwd=project,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert content_of(project) == before
    with open(tmp_path / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["submission"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["'=1+1", *sorted(CLASS)[1:]]
    for (name, (_, points, words)), row in zip(sorted(CLASS.items()), rows.values()):
        assert int(row["points"]) == points == [row[n] for n in NAMES].count("1"), row
        assert words in row["sentences"] and "the rule: " not in row["sentences"], row
    assert rows["'=1+1"]["rel_shift"] == "b" and rows["'=1+1"]["lanes"] == "-"
    assert {n for n in NAMES if rows["calls"][n] == "1"} == {"segments", "update_memory", "reach"}
    assert "stream_losses: OSError" in rows["calls"]["sentences"]
    printed = " ".join(done.stdout.split())
    assert f"cheats 1/{COUNT} - - - - - - - - 1 0 - - -" in printed

    def is_gone():  # killed, but somebody must still collect it
        state = subprocess.run(["ps", "-o", "stat=", "-p", mark.read_text()], text=True,
                               capture_output=True).stdout.strip()
        return not state or state.startswith("Z")
    wait_until(is_gone, "the end of the child", 10)


@pytest.mark.slow
def test_one_student_in_gradescopes_form(tmp_path):
    """From the archive that blank.py --submit packs, with the fields and kinds that it documents;
    there is a file whatever is handed in."""
    archive = zipped({f"{FOUR}.py": lesson(FOUR, rel_shift="return x")})
    (tmp_path / "anna.zip").write_bytes(archive)
    path = tmp_path / "results" / "results.json"
    assert grade.main([str(tmp_path / "anna.zip"), "--gradescope", str(path), "--only",
                       "rel_shift, rel_shift_by_index"]) == 0
    found = json.loads(path.read_text())
    by_index, shift = found.pop("tests")
    assert found == {"output": "1 of 2 exercises solved", "visibility": "visible"}
    assert by_index == {"name": "rel_shift_by_index", "score": 1.0, "max_score": 1.0,
                        "output": "rel_shift_by_index: solved", "visibility": "visible"}
    assert shift["score"] == 0.0 and shift["output"].startswith("rel_shift: ")
    assert "the rule: " in shift["output"] and "got" in shift["output"]
    (tmp_path / "empty").mkdir()
    assert grade.main([str(tmp_path / "empty"), "--gradescope", str(path)]) == 0
    found = json.loads(path.read_text())
    assert "holds no lesson file" in found["output"]
    assert [test["score"] for test in found["tests"]] == [0.0] * COUNT


@pytest.mark.slow
def test_ctrl_c_stops_the_processes(tmp_path):
    """Status 130, nothing written, nobody left running."""
    (tmp_path / "in" / "b").mkdir(parents=True)
    begin = f"import os\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))\n{SWALLOWS}"
    (tmp_path / "in" / "b" / f"{ONE}.py").write_text(lesson(ONE, lanes=begin))
    process = subprocess.Popen([sys.executable, grade.__file__, str(tmp_path / "in"), "--csv",
                                str(tmp_path / "g.csv")], stderr=subprocess.PIPE, text=True,
                               # a shell's background job ignores Ctrl-C; here it must not
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(),
                   "the submission to begin")
    finally:
        process.send_signal(signal.SIGINT)
    assert "grade.py: stopped" in process.communicate(timeout=20)[1]
    assert process.returncode == 130 and not list(tmp_path.glob("g.csv*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_python_without_the_packages_grades_nobody(tmp_path, monkeypatch, capsys):
    """Otherwise a broken autograder looks like thirty students who failed."""
    for name in ("anna", "bo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{ONE}.py").touch()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for argv in ([tmp_path], [tmp_path / "bo", "--gradescope", tmp_path / "results.json"]):
        assert grade.main(list(map(str, argv))) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "requirements.txt installed for /bin/false?" in line
    assert not (tmp_path / "results.json").exists()


# ---- what is taken from a folder ----------------------------------------------------------------

def test_a_flat_download_is_sorted_by_student(tmp_path):
    """As Canvas gives it: one student's files are one submission, the last upload of a lesson
    counts, in an archive or not (999 comes before 1000), and the platform's number tells two
    students of one name apart."""
    there, sorted_into = tmp_path / "in", tmp_path / "sorted"
    there.mkdir(), sorted_into.mkdir()
    archive = zipped({"train.py": "1000", "04_rel_shift.py": "1000"})
    (there / "leo_15_1000_all.zip").write_bytes(archive)
    (there / "leo_15_999_train.py").write_text("999")
    (there / "leo_15_1001_04_rel_shift.py").write_text("1001")
    for file in ("anna_12_345_01_vanilla_segments.py", "anna_12_999_04_rel_shift.py",
                 "anna_12_1000_04_rel_shift.py", "bo_LATE_13_347_train.py", "bo_14_348_train.py",
                 "bo_13_348_essay.pdf", "kay_14_349_kay-3.zip", "kay_LATE_14_351_kay-10.zip",
                 "mia_04_rel_shift-2.py", "mia_04_rel_shift-10.py"):
        (there / file).write_text(file)
    found = grade.find_submissions(there, sorted_into)
    assert [path.name for path in found] == [
        "anna_12", "bo_13", "bo_13_348_essay.pdf", "bo_14", "kay_14", "leo_15", "mia"]
    assert {path.relative_to(sorted_into).as_posix(): path.read_text()
            for path in sorted_into.rglob("*.*") if path.name != "all.zip"} == {
        "anna_12/01_vanilla_segments.py": "anna_12_345_01_vanilla_segments.py",
        "anna_12/04_rel_shift.py": "anna_12_1000_04_rel_shift.py",
        "bo_13/train.py": "bo_LATE_13_347_train.py", "bo_14/train.py": "bo_14_348_train.py",
        "leo_15/train.py": "1000", "leo_15/04_rel_shift.py": "1001",
        "mia/04_rel_shift.py": "mia_04_rel_shift-10.py"}
    assert (sorted_into / "kay_14/all.zip").read_text() == "kay_LATE_14_351_kay-10.zip"


def test_an_archive_in_a_folder_is_unpacked(tmp_path):
    """As Moodle gives it; the last of several; where lesson files are beside it, they count."""
    (tmp_path / "in").mkdir()
    archive = zipped({"course/train.py": "", "course/essay.txt": ""})
    (tmp_path / "in" / "anna (10).zip").write_bytes(archive)
    (tmp_path / "in" / "anna (9).zip").touch()
    grade.unpacked(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == ["train.py"]
    (tmp_path / "in" / "04_rel_shift.py").touch()
    assert grade.unpacked(tmp_path / "in", None) == tmp_path / "in"


@pytest.mark.parametrize("files, wanted", [
    (["train.py", "train (2).py", "train (10).py", "train-1.py", "train2.py"], "train (10).py"),
    (["hw/me/train.py", "hw/me/tests/course/pristine/02_recurrence.py", "__MACOSX/hw/train.py",
      "hw/.venv/train.py"], "hw/me/train.py"),
    (["essay.txt"], "holds no lesson file"), (["reach.py"], "hand in the lesson's whole file"),
    (["a/train.py", "b/train.py"], "in a/ and in b/"),
], ids=["copies", "project", "essay", "function", "two"])
def test_the_lessons_in_a_folder_are_found(tmp_path, files, wanted):
    """The last copy; those of a whole project as an archive unpacks it, not the solutions in it."""
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    try:
        assert lessons.find_lessons(tmp_path) == {"train": tmp_path / wanted}
    except ValueError as error:
        assert wanted in str(error) and "\n" not in str(error)


def test_what_cannot_be_graded_has_a_row(tmp_path):
    """A damaged archive, or one of another kind."""
    for name, words in (("anna.zip", "is damaged"), ("hugo.tar", "unpack archives")):
        (tmp_path / name).write_bytes(b"PK")
        row = asyncio.run(grade.grade(tmp_path / name, NAMES, 60))
        assert row.name == name and words in row.error and row.marks() == ["-"] * COUNT


def test_the_autograders_command_is_one_of_grade_py():
    text = (lessons.TESTS / "classroom" / "run_autograder").read_text()
    line = re.search(r"grade.py (.*) \\\n", text).group(1)
    assert grade.parse([*line.split(), "--only", "lanes"]).gradescope.name == "results.json"
