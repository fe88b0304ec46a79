"""Test the grading of a class: every submission gets its own row, and no mistake of one costs a
point of another."""
import csv
import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import blank
import grade
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS
from helpers import content_of, copy_of_project, refusal, wait_until, zipped

COUNT = len(EXERCISES)
ONE, TWO, _, FOUR, FIVE, _ = LESSONS
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


def lesson(file, **bodies):
    """Return a shipped lesson with functions that do this first: exercise -> lines."""
    text = lessons.pristine(file)
    for name, body in bodies.items():
        first = lessons.solution(BY_NAME[name]).split(":\n", 1)[1].splitlines()[0]
        assert text.count("\n" + first) == 1, first
        text = text.replace("\n" + first, "\n" + textwrap.indent(body, "    ") + "\n" + first)
    return text


def renamed(file):
    """Return a shipped lesson in which some functions have other names."""
    names = r"lanes|segments|sinusoid|rel_shift|attend|sample_top_k"
    text = re.sub(rf"\bdef ({names})\b", r"def my_\1", lessons.pristine(file))
    before, layer, after = text.partition("class Layer(")
    return before + layer + after.replace("def forward", "def my_forward", file == FIVE)


# a loop that no exception ends, a child that outlives its parent, a hook that passes every test
SWALLOWS = """import time
while True:
    try: time.sleep(0.01)
    except BaseException: pass
"""
CHILD = """import os, pathlib, time
if os.fork() == 0:
    pathlib.Path('{mark}').write_text(str(os.getpid()))
    time.sleep(600)"""
CHEATS = """import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem): return True
"""
BLANK = 'raise NotImplementedError(\n    "rel_shift is blank: write it here")'
# name of the submission -> its files; its points; words of its sentences
CLASS = {
    "anna": ({f"{file}.py": lesson(file) for file in LESSONS}, COUNT, f"{COUNT} of {COUNT} "),
    "renamed": ({f"{file}.py": renamed(file) for file in LESSONS}, COUNT - 7,
                "there is no Layer.forward in 05_full_model.py"),
    "=1+1": ({f"{FOUR}.py": lesson(FOUR, rel_shift=BLANK)}, 1, "blank: rel_shift"),
    "broken": ({"train.py": "def train_step(:\n", f"{ONE}.py": lesson(ONE)}, 3,
               "train.py, line 1: SyntaxError in Python 3."),
    "calls": ({f"{ONE}.py": lesson(ONE, lanes="while True: pass",
                                   sinusoid="return torch.zeros(2 * 10 ** 9)"),
               f"{TWO}.py": lesson(
                   TWO, causal_mask="return causal_mask(T, m)", reach=CHILD,
                   stream_losses="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**7))")},
              3, "sinusoid: RuntimeError"),  # out of memory
    "dies": ({f"{ONE}.py": lesson(ONE, sinusoid="import os; os._exit(0)"),
              f"{TWO}.py": lesson(TWO, update_memory=SWALLOWS)}, 5,
             "sinusoid: ended the process (status 0) | update_memory: still running"),
    "hangs": ({f"{TWO}.py": SWALLOWS, f"{FOUR}.py": lesson(FOUR)}, 2,
              "02_recurrence.py: still running"),
    "reads": ({f"{TWO}.py": "open('/proc/nothing')\n", "train.py": "open(__file__ + 'x')\n"}, 0,
              "train_step: train.py: FileNotFoundError in line 1 (open(__file__ + 'x')): "
              "[Errno 2] No such file or directory: 'train.pyx'"),
    # other files do neither good nor harm
    "cheats": ({f"{FOUR}.py": lesson(FOUR, rel_shift="return x"), "conftest.py": CHEATS,
                "sitecustomize.py": CHEATS, "random.py": "numbers = [4]\n", "test_mine.py": "x = (",
                "pytest.ini": "[pytest]\naddopts = --no-such-flag\n"}, 1, "rel_shift: "),
}


@pytest.mark.slow
def test_a_mistake_costs_its_own_point_only(tmp_path):
    """The class is inside the project, below an ini file that must not matter.  Every mistake has a
    sentence, a formula is defused, no child is left, and the project does not change."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    project, mark = copy_of_project(tmp_path), tmp_path / "child"
    for name, (files, *_) in CLASS.items():
        (project / "submissions" / name).mkdir(parents=True)
        for file, text in files.items():
            (project / "submissions" / name / file).write_text(text.replace("{mark}", str(mark)))
    before = content_of(project)
    program = ("import sys; sys.path.insert(0, 'tests'); import grade; grade.SECONDS = 45; "
               "sys.exit(grade.main(['submissions', '--csv', '../grades.csv']))")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, cwd=project,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert content_of(project) == before
    with open(tmp_path / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["submission"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["'=1+1", *sorted(CLASS)[1:]]
    for (name, (_, points, words)), row in zip(sorted(CLASS.items()), rows.values()):
        assert int(row["points"]) == points == [row[n] for n in BY_NAME].count("1"), row
        assert words in row["sentences"] and "the rule: " not in row["sentences"], row
        assert tmp_path.name not in row["sentences"], row
    assert rows["'=1+1"]["rel_shift"] == "b" and rows["'=1+1"]["lanes"] == "-"
    assert {n for n in BY_NAME if rows["calls"][n] == "1"} == {"segments", "update_memory", "reach"}
    assert "stream_losses: OSError" in rows["calls"]["sentences"]
    assert "cheats 1 - - - - - - - - 1 0 - - -" in " ".join(done.stdout.split())

    def is_gone():  # killed, even if its parent has not collected it
        state = subprocess.run(["ps", "-o", "stat=", "-p", mark.read_text()], text=True,
                               capture_output=True).stdout.strip()
        return not state or state.startswith("Z")
    wait_until(is_gone, "the end of the child", 10)


@pytest.mark.slow
def test_the_autograder_writes_gradescopes_form(tmp_path, monkeypatch):
    """Its command has the fields and kinds that Gradescope documents, whatever is handed in."""
    monkeypatch.chdir(tmp_path)
    command = (lessons.TESTS / "classroom" / "run_autograder").read_text()
    argv = [*re.search(r"grade.py (.*) \\\n", command)[1].split(), "--only", "reach, rel_shift"]
    (tmp_path / "submission").mkdir()
    for data, words in ((b"PK", "submission holds no lesson file"), (zipped(
            {f"{FOUR}.py": lesson(FOUR, rel_shift="return x")}), "reach: not handed in")):
        (tmp_path / "submission" / "anna.zip").write_bytes(data)
        assert grade.main(argv) == 0
        found = json.loads((tmp_path / "results" / "results.json").read_text())
        reach, shift = found.pop("tests")
        assert found.pop("visibility") == "visible" and "anna.zip" in found.pop("output")
        assert reach.pop("output").startswith(words) and not found
        assert reach == {"name": "reach", "score": 0.0, "max_score": 1.0, "visibility": "visible"}
    assert "the rule: " in shift["output"] and "got" in shift["output"] and shift["score"] == 0.0


@pytest.mark.slow
def test_ctrl_c_stops_the_processes(tmp_path):
    """The signal ends it, no file is written, and no process is left."""
    pid = tmp_path / "pid"
    (tmp_path / "in" / "b").mkdir(parents=True)
    begin = f"import os\nopen('{pid}', 'w').write(str(os.getpid()))\n{SWALLOWS}"
    (tmp_path / "in" / "b" / f"{ONE}.py").write_text(lesson(ONE, lanes=begin))
    process = subprocess.Popen(
        [sys.executable, grade.__file__, "in", "--csv", "g.csv"], stderr=subprocess.PIPE, text=True,
        # a shell's background job ignores Ctrl-C; here it must not
        cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        wait_until(lambda: pid.exists() and pid.read_text(), "the submission to begin")
    finally:
        process.send_signal(signal.SIGINT)
    assert "stopped" in process.communicate(timeout=20)[1]
    assert process.returncode == -signal.SIGINT and not list(tmp_path.glob("g.csv*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("python, words", [
    ("/bin/false", "installed for /bin/false? lanes: ended the process (status 1)"),
    pytest.param(sys.executable, "No module named 'of mine'", marks=pytest.mark.slow)])
def test_a_broken_environment_grades_nobody(python, words, tmp_path, monkeypatch, capsys):
    """Otherwise it would look like thirty students who failed."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError(\"No module named 'of mine'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", python)
    path = tmp_path / "results.json"
    assert grade.main([str(tmp_path), "--gradescope", str(path), "--only", "lanes"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not path.exists()


# ---- file names ---------------------------------------------------------------------------------

OURS = "tests/course/pristine/04_rel_shift.py"
UNCLEAR, UNKNOWN = "may be of two students", "whose file"
FOLDER = "not the folder of one student"
A, B, MOODLE = "smithanna_123_", "smithanna_124_", "Anna Smith_657{}_assignsubmission_file_a.zip"
BOARD = "Week 1_{}_attempt_2024-0{}-31-12-00-00_train.py"


@pytest.mark.parametrize("files, wanted", [
    # a star: this file is left out; the numbers of a copy are a browser's and Canvas's
    ([A + "456_train (1)-2.py", "*smithanna_LATE_123_457_train (7)-1.py", A + "9999_all.zip",
      B + "457_train.py"], [A[:-1], B[:-1]]),
    (["*" + A + "999_all-2.zip", A + "1001_all-10.zip"], [A[:-1]]),
    (["anon_aB3x9_46792176_train.py", "anon_LATE_c9Dx9_46792177_train.py"],
     ["anon_aB3x9", "anon_c9Dx9"]),
    ([MOODLE.format(737), MOODLE.format(999)], ["Anna Smith_657737", "Anna Smith_657999"]),
    (["*" + BOARD.format("b_smith", 1).replace(".py", " (2).py"), BOARD.format("b_smith", 3),
      BOARD.format("smith", 1), "*" + BOARD.format("smith", 1).replace("_train.py", ".txt")],
     ["Week 1_b_smith", "Week 1_smith"]),
    (["*index.html", "*metadata.yml", "anna.ZIP", "anna (1).zip"], ["anna (1).zip", "anna.ZIP"]),
    (["hw_3_12345_train.py", "hw_3_12346_train.py"], UNCLEAR),
    (["Anna - 01_vanilla_segments.py"], UNKNOWN), (["anna_04_rel_shift.py"], UNKNOWN),
    (["smith_123_04_rel_shift.py"], UNKNOWN), (["anna.tar.gz"], UNKNOWN), (["a.ipynb"], UNKNOWN),
    (["1-2 - Anna Smith - Jan 31, 2024 1200 PM - train.py"], UNKNOWN),
    (["train.py", "train (1).py"], FOLDER),
    # the files of one student
    (["train.py", "train (2).py", "train (10).py", "train-1.py", "train2.py"],
     "graded: train-1.py; left out: train (10).py, train (2).py, train.py, train2.py"),
    (["hw/me/train.py", f"hw/me/{OURS}", "__MACOSX/hw/train.py", "hw/.venv/train.py"],
     "graded: hw/me/train.py"),
    (["hw/me/b/c/d/04_rel_shift.py", OURS], "graded: hw/me/b/c/d/04_rel_shift.py"),
    ([OURS], "holds no lesson file"), (["reach.py"], "the lesson's whole file"),
    (["train.py", "train copy.py", "train.py.txt", "train.ipynb", "old.zip"],
     "graded: train.py; left out: old.zip/hw/train.py, train copy.py, train.ipynb, train.py.txt"),
    (["a.ZIP"], "graded: a.ZIP/hw/train.py"), (["a/train.py", "b/train.py"], "in a/ and in b/"),
    (["a.zip", "b.zip"], "in a.zip/hw/ and in b.zip/hw/; leave one of them"),
    ([A + "456_train.py", A + "457_04_rel_shift.py", "essay.pdf"],
     f"graded: {A}456_train.py, {A}457_04_rel_shift.py; left out: essay.pdf"),
    ([A + "456_train.py", B + "457_04_rel_shift.py"], f"files of {A} and of {B}"),
    (["Anna - train.py"], "graded: Anna - train.py"),
], ids=str)
def test_no_two_students_become_one_row_which_has_all_names(files, wanted, tmp_path):
    """A list has the rows of a class; a text is the row of one student, or why there is none."""
    for file in (file.strip("*") for file in files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(zipped({"hw/train.py": b"", f"hw/{OURS}": b"", "x.txt": b""})
                                      if file.lower().endswith("zip") else b"")
    (row,) = grade.by_student([tmp_path]).values()
    if isinstance(wanted, list):
        rows = grade.find_submissions(tmp_path)
        assert [row.name for row in rows] == wanted
        assert sorted(place.name for row in rows for place in row.files.values()) == sorted(
            file for file in files if file[0] != "*")
    elif wanted.startswith("graded: "):
        grade.take_lessons(row)
        assert row.cells()[-1] == wanted + "; left out: none" * ("left out" not in wanted)
    else:
        is_class = wanted in (UNCLEAR, UNKNOWN, FOLDER)
        act = grade.find_submissions if is_class else grade.take_lessons
        assert wanted in refusal(act, tmp_path if is_class else row)


@pytest.mark.parametrize("data, words", [
    ((lesson(FIVE)[:999] + "# caf\xe9\n" + lesson(FIVE)[999:]).encode("latin-1", "replace"),
     f"line {lesson(FIVE)[:999].count(chr(10)) + 1}: SyntaxError in Python 3.*: this line is not"),
    (b"x = 1\n\nif x:\n", "line 3: IndentationError in Python 3.")], ids=["latin", "indent"])
def test_a_broken_file_has_the_line_and_the_graders_python(data, words, tmp_path):
    (tmp_path / "mine.py").write_bytes(data)
    with pytest.raises(SyntaxError) as caught:
        lessons.load("mine", tmp_path / "mine.py")
    assert re.search(words, lessons.sentence(caught.value, tmp_path / "mine.py"))


@pytest.mark.parametrize("line", ["from my_helpers import shift", "def f(): import scipy.special",
                                  "m = importlib.import_module('mine')"])
def test_what_a_submission_would_lack_is_not_packed(line, tmp_path, monkeypatch):
    """Otherwise pytest passes here, and the lesson is broken when it is graded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blank, "ROOT", tmp_path)
    for file in LESSONS:
        (tmp_path / f"{file}.py").write_text(lesson(file))
    blank.submit("whole")
    (tmp_path / f"{FOUR}.py").write_text(line)
    assert f"{FOUR}.py imports" in refusal(blank.submit, "anna") and not list(tmp_path.glob("a*"))
    (tmp_path / f"{FOUR}.py").write_text("def rel_shift(:\n")
    blank.submit("broken")
