"""Grading a class: whatever a submission does, it gets one row, and the others keep their points.

    pytest tests/course/test_grade.py
    pytest -m slow tests/course/test_grade.py     a class of twelve, and Ctrl-C
"""
import csv
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import grade
from course import mistakes, rules
from course.exercises import LESSONS, ROOT
from helpers import wait_until

NAMES = grade.NAMES
SECONDS = 36  # for a submission: 3 for an exercise by the alarm, 9 by the parent


# ---- submissions --------------------------------------------------------------------------------

def right(*names):
    """The source of the solutions of these exercises (functions, not methods)."""
    return "\n\n".join(mistakes.solution(name) for name in names) + "\n"


def lesson(file):
    return (ROOT / f"{file}.py").read_text(encoding="utf-8")


def wrong(**bodies):
    """The source of functions that do this instead: name of the exercise -> lines."""
    head = "import math, os, sys, time\nimport torch\nfrom pathlib import Path\n"
    return head + "".join(f"\n\ndef {name}(*args, **options):\n{textwrap.indent(body, '    ')}\n"
                          for name, body in bodies.items())


def swallows(indent=""):
    """A loop that no exception ends."""
    return f"\n{indent}".join(("while True:", "    try:", "        time.sleep(0.01)",
                               "    except BaseException:", "        pass"))


EARLY = ("lanes", "segments")  # 01: judged first
CHILD = ("if os.fork() == 0:\n    Path('{mark}').write_text(str(os.getpid()))\n"
         "    time.sleep(600)\nreturn our_reach(*args, **options)")
BORROWED = ("from course import mistakes\nlanes = mistakes.function_from("
            "'lanes', mistakes.solution('lanes'))\n")

# name of the submission -> its files, or text of a single file; its points; words of its sentences
CLASS = {
    "anna": ({f"{file}.py": lesson(file) for file in LESSONS}, 18, "all solved"),
    "=1+1.py": (right(*EARLY, "sinusoid", "rel_shift"), 4, "all solved of the 4 handed in"),
    "broken": ({"train.py": "def train_step(:\n", "01_vanilla_segments.py":
                lesson("01_vanilla_segments"), "05_full_model.py": "import nosuchpackage\n"},
               3, "No module named 'nosuchpackage'"),
    "syntax": ({"a.py": right(*EARLY), "b.py": "x = 1\ndef (\n"}, 0, "b.py, line 2: SyntaxError"),
    "latin.py": (b"def lanes(a):\n    return '\xe4'\n", 0, "utf-8"),
    "notes": ({"essay.txt": "my solution"}, 0, "the submission holds no lesson file"),
    "calls.py": (right("rel_shift", "attention_mask")
                 + right("reach").replace("def reach", "def our_reach") + wrong(
                     lanes="while True:\n    pass", segments="sys.exit(0)",
                     sinusoid="return torch.zeros(10 ** 11)", causal_mask="return causal_mask()",
                     update_memory="raise KeyboardInterrupt", reach=CHILD,
                     stream_losses="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**7))",
                     distance_encoding="while True:\n    print('x' * 10_000)",
                     rel_shift_by_index="x = []\nwhile True:\n    x.append(bytearray(10 ** 8))"),
                 3, "lanes: TimeoutError"),
    "dies.py": (right(*EARLY, "causal_mask", "reach") + wrong(
        sinusoid="os._exit(0)", update_memory=swallows()), 4,
        "sinusoid: ended the process (status 0)"),
    "two.py": (right("lanes").replace("(b + 1) * L + 1", "(b + 1) * L")
               + right("reach").replace("return T - 1 - token", "return T - token"), 0,
               "reach: one too far"),
    "leaves.py": (right(*EARLY) + "\nimport os\nos._exit(3)\n", 0, "at import: ended the process"),
    "hangs.py": (right("reach") + f"\nimport time\n{swallows()}\n", 0, "at import: still running"),
    "borrows.py": (BORROWED.replace("lanes =", "found =") + "\n\ndef lanes(tokens, B):\n"
                   "    return found(tokens, B)\n", 0, "imports course from tests/"),
}


def hand_in(folder, submissions):
    """Write the submissions as files and folders."""
    for name, (content, *_) in submissions.items():
        path = folder / name
        if isinstance(content, dict):
            path.mkdir(parents=True)
        files = {path / file: text for file, text in content.items()} if (
            isinstance(content, dict)) else {path: content}
        for file, text in files.items():
            file.write_bytes(text if isinstance(text, bytes) else text.replace(
                "{mark}", str(folder / "child.txt")).encode())


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The class, graded once: (its folder, {name: row of the csv}, what was printed)."""
    if "XL_CODE" in os.environ or any(rules.state(name)[0] != "solved" for name in NAMES):
        pytest.skip("right submissions are copied from the lessons, which are not all solved here")
    folder = tmp_path_factory.mktemp("class") / "in"
    folder.mkdir()
    hand_in(folder, CLASS)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = subprocess.run(
        [sys.executable, grade.__file__, str(folder), "--csv", str(folder.parent / "grades.csv"),
         "--all-mistakes", "--seconds", str(SECONDS)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")
             if path.name != "child.txt"}
    assert after == before, "something was written beside the files"
    with open(folder.parent / "grades.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["submission"].lstrip("'") for row in rows] == sorted(CLASS)
    return folder, {row["submission"].lstrip("'"): row for row in rows}, done


# ---- one row each -------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("name", CLASS)
def test_a_submission_gets_its_points_and_its_sentences(graded, name):
    """Points are the sum of the marks; the sentences say what and where, and no path of ours."""
    row, (_, points, words) = graded[1][name], CLASS[name]
    assert int(row["points"]) == points == [row[n] for n in NAMES].count("1"), row
    assert words in row["sentences"], row["sentences"]
    assert "\n" not in row["sentences"] and "tmp" not in row["sentences"]


@pytest.mark.slow
def test_what_is_not_handed_in_is_empty_and_gives_nothing(graded):
    """And a name that a spreadsheet would take for a formula is defused."""
    row = graded[1]["=1+1.py"]
    assert row["submission"] == "'=1+1.py"
    assert {n for n in NAMES if row[n] == "1"} == {*EARLY, "sinusoid", "rel_shift"}
    assert all(row[n] == "" for n in NAMES if n not in {*EARLY, "sinusoid", "rel_shift"})


@pytest.mark.slow
def test_what_hangs_or_dies_costs_its_own_point_only(graded):
    """Endless, exit, memory, recursion, a file without end: the exercises after it are graded."""
    calls, dies = graded[1]["calls.py"], graded[1]["dies.py"]
    assert {n for n in NAMES if calls[n] == "1"} == {"rel_shift", "attention_mask", "reach"}
    assert sum(calls[n] == "0" for n in NAMES) == 8
    assert [n for n in NAMES if dies[n] == "0"] == ["sinusoid", "update_memory"]


@pytest.mark.slow
def test_every_mistake_of_a_student_is_said(graded):
    """--all-mistakes: a line for each exercise that is not solved; progress on stderr."""
    sentences = graded[1]["two.py"]["sentences"].split(" | ")
    assert [sentence.split(":")[0] for sentence in sentences] == ["lanes", "reach"]
    printed = " ".join(graded[2].stdout.split())
    assert all(" ".join(sentence.split()) in printed for sentence in sentences)
    assert f"{len(CLASS)} of {len(CLASS)}: " in graded[2].stderr


@pytest.mark.slow
def test_no_child_is_left_running(graded):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    child = int((graded[0] / "child.txt").read_text())

    def is_gone():  # killed, but somebody must still collect it
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], text=True,
                               capture_output=True).stdout.strip()
        return not state or state.startswith("Z")
    wait_until(is_gone, f"the end of child {child}", 10)


# ---- the table, mistakes of the teacher ---------------------------------------------------------

def test_the_table_is_at_most_100_columns_wide():
    """One sentence for each student, or all of them."""
    rows = [grade.Row("x" * 80, dict.fromkeys(NAMES, True), [grade.clean("y " * 500), "second"]),
            grade.Row("b", dict.fromkeys(NAMES), ["holds no exercise"])]
    lines = grade.table(rows).splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1] == grade.HONEST
    assert lines[1].split()[1:] == [f"{len(NAMES)}/{len(NAMES)}"] + ["1"] * len(NAMES)
    row = next(line for line in lines if line.startswith("b "))
    assert row.split() == ["b", f"0/{len(NAMES)}"] + ["-"] * len(NAMES)
    assert "    second" in grade.table(rows, all_mistakes=True).splitlines()


def test_what_cannot_be_graded_is_named(tmp_path, capsys):
    """An archive, as learning platforms hand it over, gives no row; its author must not be lost."""
    (tmp_path / "anna").mkdir()
    (tmp_path / "gina.zip").write_bytes(b"PK")
    assert [path.name for path in grade.find_submissions(tmp_path)] == ["anna"]
    assert capsys.readouterr().err.startswith("not graded: gina.zip ")


@pytest.mark.parametrize("found, goes_on", [("solved", True), ("failing", False)])
def test_the_next_exercise_is_named_after_a_solved_one(found, goes_on, monkeypatch):
    """Who has one that fails stays with it."""
    monkeypatch.setattr(rules, "state", lambda name: (found, ""))
    monkeypatch.setattr(rules.submission, "is_blank", lambda e: e.name == "segments")
    line = rules.line_of("lanes")
    assert line.startswith(f"lanes is {found}") and ("next: segments" in line) == goes_on


@pytest.mark.parametrize("make, words", [
    (lambda tmp: [tmp / "nowhere"], "does not exist"),
    (lambda tmp: [tmp / "one.py"], "is a file"),
    (lambda tmp: [tmp / "none"], "holds no submission"),
    (lambda tmp: [tmp, "--cvs", "x"], "--cvs"),
    (lambda tmp: [], "SUBMISSIONS"),
    (lambda tmp: [tmp, "--jobs", "0"], "at least 1 job"),
    (lambda tmp: [tmp, "--seconds", "few"], "--seconds"),
    (lambda tmp: [tmp, "--csv", tmp / "nowhere" / "a.csv"], "--csv"),
    (lambda tmp: [tmp, "--csv", tmp / "none"], "is a folder"),
])
def test_a_mistake_is_one_line_before_the_grading(tmp_path, capsys, monkeypatch, make, words):
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / ".hidden.py").write_text("x = 1\n")
    monkeypatch.setattr(grade, "grade_all", lambda *_: pytest.fail("graded"))
    assert grade.main([str(argument) for argument in make(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("grade.py: ") and words in error[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "one.py"]


@pytest.mark.slow
def test_ctrl_c_stops_the_workers(tmp_path):
    """Status 130, nothing written, nobody left running."""
    hand_in(tmp_path, {"a.py": ("x = 1\n",), "b.py": (
        f"import os, time\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))\n{swallows()}\n"
        + right("lanes"),)})
    process = subprocess.Popen([sys.executable, grade.__file__, str(tmp_path), "--csv",
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
