"""Test the grading of a class: every student has a row, and no mistake costs another's point."""
import csv
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest

import grade
from course import lessons
from course.exercises import BY_NAME, LESSONS
from helpers import content_of, copy_of_project, refusal, wait_until, zipped
from support.files import write_atomically

ONE, TWO, _, FOUR, FIVE, _ = LESSONS
pytestmark = pytest.mark.usefixtures("needs_shipped_solutions")


def lesson(file, end="", **bodies):
    """Return a shipped lesson with functions that do this first: exercise -> lines."""
    return lessons.pristine(file) + end + "".join(
        f"\ndef {name}(*given, ours={name}, **more):\n{textwrap.indent(body, '    ')}\n"
        "    return ours(*given, **more)\n" for name, body in bodies.items())


# a loop that no exception ends, in a child that outlives its parent, and a hook that passes all
LOOP = """import time
while True:
    try: open('{mark}', 'a').write('.'), time.sleep(0.1)
    except BaseException: pass
"""
CHILD = f"import os\nif os.fork() == 0:\n{textwrap.indent(LOOP, '    ')}"
CHEATS = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(): return True\n"
# name of the submission -> its files; exercises, or all of a lesson, without a point; its sentences
CLASS = {
    "anna": ({f"{file}.py": lesson(file) for file in LESSONS}, "", "exercises solved"),
    "renamed": ({f"{ONE}.py": lesson(ONE, "del lanes, segments, sinusoid\n"),
                 f"{FOUR}.py": lesson(FOUR, "del rel_shift\n"), "train.py": lesson("train"),
                 f"{FIVE}.py": lesson(FIVE, "del RelativeAttention.attend, Layer.forward\n")},
                "lanes segments sinusoid rel_shift relative_attention layer",
                "there is no Layer.forward in 05_full_model.py"),
    "=1+1": ({"train.py": "open(__file__ + 'x')\n", f"{FOUR}.py": lesson(
        FOUR, rel_shift="raise NotImplementedError('rel_shift is blank')")}, "train rel_shift",
             "train_step: train.py: FileNotFoundError in line 1 (open(__file__ + 'x')): [Errno 2] "
             "No such file or directory: 'train.pyx' | blank: rel_shift"),
    "broken": ({"train.py": "\n\nx = '\udce9'\n", f"{ONE}.py": lesson(ONE), f"{TWO}.py": LOOP},
               f"train {TWO}", "update_memory: 02_recurrence.py: still running after 60 seconds | "
               "train_step: train.py, line 3: SyntaxError in Python 3."),
    "calls": ({f"{ONE}.py": lesson(ONE, lanes="while True: pass",
                                   sinusoid="return torch.zeros(2 * 10 ** 9)"),
               f"{TWO}.py": lesson(
                   TWO, causal_mask="return causal_mask(*given)", reach=CHILD,
                   stream_losses="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**7))")},
              "lanes sinusoid causal_mask stream_losses", "sinusoid: RuntimeError"),  # of memory
    "dies": ({f"{ONE}.py": lesson(ONE, sinusoid="import os; os._exit(0)"),
              f"{TWO}.py": lesson(TWO, update_memory=LOOP)}, "sinusoid update_memory",
             "sinusoid: ended the process (status 0) | update_memory: still running"),
    # other files do neither good nor harm
    "cheats": ({f"{FOUR}.py": lesson(FOUR, rel_shift="return given[0]"), "conftest.py": CHEATS,
                "sitecustomize.py": CHEATS, "random.py": "", "train.py": "", "test_me.py": "x = (",
                "pytest.ini": "[pytest]\naddopts = --no-such-flag\n"},
               "train rel_shift", "rel_shift: "),
}


@pytest.mark.slow
def test_a_mistake_costs_its_own_point_only(tmp_path):
    """The class is inside the project, below an ini file that must not matter.  Every mistake has a
    sentence, a formula is defused, and the project does not change.  Neither the end nor an earlier
    Ctrl-C leaves a child, and Ctrl-C leaves no file."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    project, mark, path = copy_of_project(tmp_path), tmp_path / "mark", tmp_path / "grades.csv"
    for name, (files, *_) in CLASS.items():
        for file, text in files.items():
            data = text.replace("{mark}", str(mark)).encode("utf-8", "surrogateescape")
            write_atomically(project / "submissions" / name / file, lambda out: out.write(data))
    before = content_of(project)
    process = partial(
        subprocess.Popen, [sys.executable, "tests/grade.py", "submissions", "--csv", path],
        text=True, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)},
        # a shell's background job ignores Ctrl-C; here it must not
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    with process() as stopped:
        wait_until(mark.exists, "the first loop", 400)
        stopped.send_signal(signal.SIGINT)
    assert stopped.returncode == -signal.SIGINT and not list(tmp_path.glob("grades.csv*"))
    with process() as done:
        out, error = done.communicate(timeout=900)
    size = mark.stat().st_size
    assert done.returncode == 0, error
    assert content_of(project) == before
    rows = {row["submission"]: row for row in csv.DictReader(path.read_text("utf-8").splitlines())}
    assert [*rows] == ["'=1+1", *sorted(CLASS)[1:]]
    for (name, (files, lost, words)), row in zip(sorted(CLASS.items()), rows.values()):
        solved = [n for n, exercise in BY_NAME.items() if f"{exercise.file}.py" in files
                  and not {n, exercise.file} & {*lost.split()}]
        assert solved == [n for n in BY_NAME if row[n] == "1"], row
        assert row["points"] == str(len(solved)) and "the rule: " not in row["sentences"], row
        assert words in row["sentences"] and tmp_path.name not in row["sentences"], row
    assert "stream_losses: OSError" in rows["calls"]["sentences"]
    assert re.search(r"=1\+1 +1( +-)+ +1 +b( +-)+", out)
    time.sleep(1)
    assert mark.stat().st_size == size, "a child still writes"


@pytest.mark.slow
def test_the_autograder_writes_gradescopes_form(tmp_path, monkeypatch, capsys):
    """Its output has the fields and types that Gradescope documents.  In a broken environment it
    grades nobody, because that would look like thirty students who failed."""
    monkeypatch.chdir(tmp_path)
    command = (lessons.TESTS / "classroom" / "run_autograder").read_text()
    argv = [*re.search(r"grade.py (.*) \\\n", command)[1].split(), "--only", "reach, rel_shift"]
    archive = zipped({f"{FOUR}.py": lesson(FOUR, rel_shift="return given[0]")})
    write_atomically(tmp_path / "submission" / "a.zip", lambda file: file.write(archive))
    results = tmp_path / "results" / "results.json"
    assert grade.main(argv) == 0
    found = json.loads(results.read_text())
    assert re.search("the rule: (.|\n)* got", said := found["tests"][1]["output"])
    test = {"name": "reach", "score": 0.0, "max_score": 1.0, "visibility": "visible",
            "output": "reach: not handed in"}
    assert found == {"output": f"graded: a.zip/{FOUR}.py; left out: none", "visibility": "visible",
                     "tests": [test, test | {"name": "rel_shift", "output": said}]}
    results.unlink()
    (tmp_path / "matplotlib.py").write_text("raise ImportError(\"No module named 'of mine'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert grade.main(argv) == 1 and not results.exists()
    assert "No module named 'of mine'" in capsys.readouterr().err.splitlines()[-1]


# ---- file names ---------------------------------------------------------------------------------

OURS = "tests/course/pristine/04_rel_shift.py"
ZIPPED = zipped({"hw/train.py": b"", f"hw/{OURS}": b"", "x.txt": b""})
UNCLEAR, UNKNOWN = "may be of two students", "whose file"
A, B, MOODLE = "smithanna_123_", "smithanna_124_", "A Smith_657{}_assignsubmission_file_a.zip"
BOARD = "Week 1_{}_attempt_2024-0{}-31-12-00-00{}"


@pytest.mark.parametrize("files, wanted", [
    # a star: this file is left out; the numbers of a copy are a browser's and Canvas's
    ([A + "456_train (1)-2.py", "*smithanna_LATE_123_457_train (7)-1.py", "*" + A + "999_all-2.zip",
      A + "1001_all-10.zip", B + "457_train.py"], [A[:-1], B[:-1]]),
    (["anon_aB3x9_46792_train.py", "anon_LATE_c9Dx9_46793_train.py"], ["anon_aB3x9", "anon_c9Dx9"]),
    ([MOODLE.format(737), MOODLE.format(999)], ["A Smith_657737", "A Smith_657999"]),
    (["*" + BOARD.format("b_smith", 1, "_train (2).py"), BOARD.format("b_smith", 3, "_train.py"),
      BOARD.format("smith", 1, "_train.py"), "*" + BOARD.format("smith", 1, ".txt")],
     ["Week 1_b_smith", "Week 1_smith"]),
    (["*index.html", "*metadata.yml", "anna.ZIP", "anna (1).zip"], ["anna (1).zip", "anna.ZIP"]),
    (["hw_3_12345_train.py", "hw_3_12346_train.py"], UNCLEAR), (["train.py"], UNKNOWN),
    ([A + "456_train.py", A[:-1] + "/04_rel_shift.py"], UNCLEAR),
    (["smith_123_04_rel_shift.py"], UNKNOWN), (["anna.tar.gz"], UNKNOWN), (["a.ipynb"], UNKNOWN),
    (["1-2 - Anna Smith - Jan 31, 2024 1200 PM - train.py"], UNKNOWN),
    # the files of one student
    (["train.py", "train (2).py", "train-1.py", "train copy.py", "train.py.txt", "old.zip"],
     "graded: train-1.py; left out: old.zip/hw/train.py, train (2).py, train copy.py, train.py, "
     "train.py.txt"),
    (["hw/me/b/c/d/train.py", f"hw/me/{OURS}", "__MACOSX/train.py", "hw/.venv/train.py", OURS],
     "graded: hw/me/b/c/d/train.py"),
    ([OURS], "holds no lesson file"), (["reach.py"], "the lesson's whole file"),
    (["train (2).py", "train (10).py"], "graded: train (10).py; left out: train (2).py"),
    (["a.ZIP"], "graded: a.ZIP/hw/train.py"), (["a/train.py", "b/train.py"], "in a/ and in b/"),
    (["a.zip", "b.zip"], "in a.zip/hw/ and in b.zip/hw/; leave one of them"),
    ([A + "456_train.py", A + "457_04_rel_shift.py", "essay.pdf"],
     f"graded: {A}456_train.py, {A}457_04_rel_shift.py; left out: essay.pdf"),
    ([A + "456_train.py", B + "457_04_rel_shift.py"], f"files of {A} and of {B}"),
    (["Anna - train.py"], "graded: Anna - train.py"),
], ids=str)
def test_no_two_students_share_a_row(files, wanted, tmp_path):
    """A list has the rows of a class; a text is the row of one student, or why there is none."""
    for file in (file.strip("*") for file in files):
        data = ZIPPED if file.lower().endswith("zip") else b""
        write_atomically(tmp_path / file, lambda out: out.write(data))
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
        is_class = wanted in (UNCLEAR, UNKNOWN)
        act = grade.find_submissions if is_class else grade.take_lessons
        assert wanted in refusal(act, tmp_path if is_class else row)
