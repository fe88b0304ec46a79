"""Grading a class: whatever a submission does, it gets one row, and the others keep their points.

    pytest tests/course/test_grade.py
    pytest -m slow tests/course/test_grade.py     a class of thirty, and Ctrl-C
"""
import csv
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from course import exercises
import grade
from helpers import wait_until

NAMES = grade.NAMES
SECONDS = 24  # for a submission: 2 for an exercise by the alarm, 3 by the parent


# ---- submissions --------------------------------------------------------------------------------

@pytest.fixture(scope="module", autouse=True)
def our_solutions():
    """Right submissions are copied from the lessons: these must be solved, and be our own."""
    if "XL_CODE" in os.environ:
        pytest.skip("XL_CODE: grading is tested with the solutions of the course")
    unsolved = [name for name in NAMES if exercises.state(name)[0] != "solved"]
    if unsolved:
        pytest.skip(f"{unsolved[0]} is not solved here, and right submissions are copied from here")


def right(*names):
    """The source of our solutions of these exercises (functions, not methods)."""
    parts = []
    for name in names:
        exercise = exercises.BY_NAME[name]
        source = lesson(exercise.file)
        try:
            node = exercises.find(source, exercise.function)[0]
        except (KeyError, SyntaxError):  # then the fixture skips
            return ""
        parts.append("\n".join(source.splitlines()[node.lineno - 1: node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"


def lesson(file):
    return (exercises.ROOT / f"{file}.py").read_text(encoding="utf-8")


def wrong(**bodies):
    """The source of functions that do this instead: name of the exercise -> lines."""
    head = "import builtins, math, os, sys, time\nimport torch\nfrom pathlib import Path\n"
    return head + "".join(f"\n\ndef {name}(*args, **options):\n{textwrap.indent(body, '    ')}\n"
                          for name, body in bodies.items())


def swallows(indent=""):
    """A loop that no exception ends."""
    return f"\n{indent}".join(("while True:", "    try:", "        time.sleep(0.01)",
                               "    except BaseException:", "        pass"))


HONEST = "This guards against accidents, not against a determined attacker: read what looks odd."
EARLY = ("lanes", "segments")  # 01: judged first
CHILD = ("if os.fork() == 0:\n    Path('{mark}').write_text(str(os.getpid()))\n"
         "    time.sleep(600)\nreturn our_reach(*args, **options)")

# name of the submission -> (its files, or text of a single file; its points; words of its sentence;
# the marks that are not 0)
QUICK = {
    "anna": ({f"{file}.py": lesson(file) for file in exercises.LESSONS}, 18, "all solved"),
    "=1+1.py": (right(*EARLY, "sinusoid", "rel_shift"), 4, "all solved of the 4 handed in"),
    "broken": ({"train.py": "def train_step(:\n", "01_vanilla_segments.py":
                lesson("01_vanilla_segments"), "05_full_model.py": "import nosuchpackage\n"},
               3, "No module named 'nosuchpackage'"),
    "syntax": ({"a.py": right(*EARLY), "b.py": "x = 1\ndef (\n"}, 0, "b.py, line 2: SyntaxError"),
    "latin.py": (b"def lanes(a):\n    return '\xe4'\n", 0, "utf-8"),
    "empty": ({}, 0, "the submission holds no lesson file"),
    "notes": ({"essay.txt": "my solution"}, 0, "the submission holds no lesson file"),
    "calls.py": (right("rel_shift", "hidden_keys")
                 + right("reach").replace("def reach", "def our_reach") + wrong(
                     lanes="while True:\n    pass", segments="sys.exit(0)",
                     sinusoid="return torch.zeros(10 ** 11)", causal_mask="return causal_mask()",
                     update_memory="raise KeyboardInterrupt", reach=CHILD,
                     gradient_into="Path('left.txt').write_text('x')\ninput()",
                     distance_encoding="while True:\n    print('x' * 10_000)",
                     rel_shift_by_index="x = []\nwhile True:\n    x.append(bytearray(10 ** 8))"),
                 3, "lanes: TimeoutError"),
    "dies.py": (right(*EARLY, "causal_mask", "reach") + wrong(
        sinusoid="os._exit(0)", update_memory=swallows()), 4,
        "sinusoid: ended the process (status 0)"),
    "late.py": (right(*EARLY, "causal_mask", "reach") + wrong(
        sinusoid="builtins.all = lambda *a: True"), 2,
        "sinusoid: changes builtins.all: not graded"),
}

SLOW = {
    "tabs.py": ("def lanes(a):\n\tif a:\n        return 1\n", 0, "tabs.py, line 3: TabError"),
    "nothing.py": ("x = 1\n", 0, "holds no lesson file"),
    "leaves.py": (right(*EARLY) + "\nimport os\nos._exit(3)\n", 0, "at import: ended the process"),
    "patches.py": (right(*EARLY) + "\nimport torch\ntorch.allclose = lambda *a, **b: True\n", 0,
                   "at import: changes torch.allclose: not graded"),
    "exits.py": (right(*EARLY) + "\nimport sys\nsys.exit(0)\n", 0, "SystemExit"),
    "interrupts.py": (right(*EARLY) + "\nraise KeyboardInterrupt\n", 0, "raises KeyboardInterrupt"),
    "hangs.py": (right("train_step") + "\nimport time\nwhile True:\n    time.sleep(0.01)\n",
                 0, "still running"),
    "swallows.py": (right("train_step") + f"\nimport time\n{swallows()}\n", 0,
                    "at import: still running"),
    "equal.py": (right(*EARLY) + wrong(sinusoid="torch.Tensor.__eq__ = lambda *a: True"), 2,
                 "changes torch.Tensor.__eq__"),
    "inherited.py": (right(*EARLY) + wrong(sinusoid="torch.Tensor.all = lambda *a: True"), 2,
                     "changes torch.Tensor.all"),
    "math.py": (right(*EARLY) + "\nimport math\nmath.pi = 3\n", 0, "changes math.pi"),
    "prints.py": (right(*EARLY) + "\nimport builtins\nbuiltins.print = lambda *a: None\n", 0,
                  "changes builtins.print"),
    "shadows.py": (right(*EARLY) + "\ndef print(*a):\n    pass\n", 2, "all solved of the 2"),
    "numpys.py": (right(*EARLY) + "\nimport numpy\nnumpy.allclose = lambda *a, **b: True\n", 0,
                  "changes numpy.allclose"),
    "clears.py": (right(*EARLY) + "\nimport sys\nsys.modules['checks'].CHECKS.clear()\n", 0,
                  "changes checks.CHECKS.lanes"),
    "judges.py": (right(*EARLY) + "\nimport exercises\nexercises.judge = lambda *a: 1 / 0\n", 0,
                  "changes exercises.judge"),
    "deletes.py": (right(*EARLY) + "\nimport sys\ndel sys.modules['exercises'].state\n", 0,
                   "changes exercises.state"),
    "modules.py": (right(*EARLY) + "\nimport sys\ndel sys.modules['checks']\n", 0,
                   "changes sys.modules.checks"),
    "claims.py": (wrong(lanes="sys.modules['exercises'].states['segments'] = 'solved', ''",
                        segments="return 1"), 0, "lanes: "),
    "borrows": ({"01_vanilla_segments.py": "import importlib.util as u, exercises as e\n"
                 "s = u.spec_from_file_location('ours', e.ROOT / '01_vanilla_segments.py')\n"
                 "m = u.module_from_spec(s)\ns.loader.exec_module(m)\nglobals().update(vars(m))\n"},
                0, "our own function"),
    "compiles.py": (right(*EARLY) + "\nimport torch._dynamo\n", 2, "all solved of the 2"),
    "writes.py": (wrong(lanes="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10 ** 7))")
                  + right("segments"), 1, "lanes: OSError"),
    "missing": ({"04_rel_shift.py": "import torch\nimport torch.nn.functional as F\n"
                 "pad = F.pad\nfrom torch import nn\n\n\n" + right("rel_shift")}, 1,
                "there is no rel_shift_by_index"),
    "threads.py": (right("segments") + wrong(lanes="import threading\nthreading.Thread(target="
                   "time.sleep, args=(600,)).start()"), 1, "lanes: "),
    "forges.py": (wrong(lanes="import json\nlines = [{'name': 'lanes', 'solved': True, 'why': ''}, "
                        "{'end': True}]\ntext = ''.join(json.dumps(z) + chr(10) for z in lines)\n"
                        "for n in range(3, 20):\n    try:\n        os.write(n, text.encode())\n"
                        "    except OSError:\n        pass"), 0, "lanes: "),
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


def grade_class(folder, submissions):
    """Hand in and grade -> {name: row of the csv}."""
    hand_in(folder, submissions)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    table = folder.parent / "grades.csv"
    assert grade.main([str(folder), "--csv", str(table), "--seconds", str(SECONDS)]) == 0
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")
             if path.name != "child.txt"}
    assert after == {path: after[path] for path in before}, "something was written beside the files"
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["submission"].lstrip("'") for row in rows] == sorted(submissions)
    return {row["submission"].lstrip("'"): row for row in rows}


def check_row(row, content, points, words):
    """Points, sentence, and marks that add up."""
    marks = [row[name] for name in NAMES]
    assert int(row["points"]) == points == marks.count("1"), row
    assert words in row["sentence"], row["sentence"]
    assert len(row["sentence"]) <= 120 and "\n" not in row["sentence"]
    assert "tmp" not in row["sentence"], "the path of the temporary folder helps nobody"


@pytest.fixture(scope="module")
def quick(our_solutions, tmp_path_factory):
    """The class of QUICK, graded once."""
    (tmp_path_factory.mktemp("class") / "in").mkdir()
    folder = tmp_path_factory.getbasetemp() / "class0" / "in"
    return folder, grade_class(folder, QUICK)


# ---- one row each -------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_submission_gets_its_points_and_one_sentence(quick, name):
    check_row(quick[1][name], *QUICK[name])


@pytest.mark.slow
def test_what_is_not_handed_in_is_empty_and_gives_nothing(quick):
    row = quick[1]["=1+1.py"]
    assert {name for name in NAMES if row[name] == "1"} == {*EARLY, "sinusoid", "rel_shift"}
    assert all(row[name] == "" for name in NAMES if name not in {*EARLY, "sinusoid", "rel_shift"})


@pytest.mark.slow
def test_every_nasty_call_costs_its_own_point_only(quick):
    marks = quick[1]["calls.py"]
    assert {name for name in NAMES if marks[name] == "1"} == {"rel_shift", "hidden_keys", "reach"}
    assert sum(marks[name] == "0" for name in NAMES) == 8


@pytest.mark.slow
def test_the_others_are_graded_after_the_worker_died_twice(quick):
    marks = quick[1]["dies.py"]
    assert [name for name in NAMES if marks[name] == "0"] == ["sinusoid", "update_memory"]


@pytest.mark.slow
def test_a_change_ends_the_grading_of_that_submission(quick):
    marks = quick[1]["late.py"]
    assert [marks[name] for name in (*EARLY, "sinusoid", "causal_mask", "reach")] == list("11000")


@pytest.mark.slow
def test_a_name_that_is_a_formula_is_defused(quick):
    assert quick[1]["=1+1.py"]["submission"] == "'=1+1.py"


@pytest.mark.slow
def test_no_child_is_left_running(quick):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    child = int((quick[0] / "child.txt").read_text())
    for _ in range(50):  # killed, but somebody must still collect it
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], text=True,
                               capture_output=True)
        if state.stdout.strip().startswith("Z") or not state.stdout.strip():
            return
        time.sleep(0.1)
    pytest.fail(f"the child {child} of a submission still runs")


# ---- the table, mistakes ------------------------------------------------------------------------

def test_the_table_is_at_most_100_columns_wide():
    rows = [grade.Row("x" * 80, dict.fromkeys(NAMES, True), grade.clean("y" * 500)),
            grade.Row("b", dict.fromkeys(NAMES), "holds no exercise")]
    lines = grade.table(rows).splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1] == HONEST
    assert lines[1].split()[1:] == [f"{len(NAMES)}/{len(NAMES)}"] + ["1"] * len(NAMES)
    row = next(line for line in lines if line.startswith("b "))
    assert row.split() == ["b", f"0/{len(NAMES)}"] + ["-"] * len(NAMES)


def test_the_help_is_honest(capsys):
    with pytest.raises(SystemExit):
        grade.main(["--help"])
    assert HONEST in capsys.readouterr().out


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


# ---- slow ---------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_class_of_thirty(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    peaceful = {f"student{i}.py": (right(*EARLY, "reach"), 3, "all solved of the 3")
                for i in range(30 - len(SLOW))}
    submissions = SLOW | peaceful
    rows = grade_class(tmp_path / "in", submissions)
    for name, submission in submissions.items():
        check_row(rows[name], *submission)
    out, err = capsys.readouterr()
    assert "30 of 30: " in err and out.count(f"/{len(NAMES)} ") == 30
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_ctrl_c_stops_the_workers(tmp_path):
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
