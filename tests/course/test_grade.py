"""Test the grading of a class: every student has a row, and no mistake costs another's point."""
import asyncio
import csv
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from functools import partial
from pathlib import Path, PurePath
from unittest.mock import AsyncMock

import pytest

import blank
import grade
from course import lessons
from course.exercises import BY_NAME, LESSONS
from helpers import content_of, copy_of_project, refusal, zipped
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
    "=1+1": ({"train.py": "open(__file__ + 'x')\n", f"{FOUR}.py": lesson(
        FOUR, rel_shift="raise NotImplementedError('rel_shift is blank')")}, "train rel_shift",
             "train_step: train.py: FileNotFoundError in line 1 (open(__file__ + 'x')): [Errno 2] "
             "No such file or directory: 'train.pyx' | blank: rel_shift"),
    "broken": ({"train.py": "\n\nx = '\udce9'\n", f"{ONE}.py": lesson(ONE), f"{TWO}.py": LOOP},
               f"train {TWO}", "update_memory: 02_recurrence.py: still running after 60 seconds | "
               "train_step: train.py, line 3: this line is not UTF-8"),
    "calls": ({f"{ONE}.py": lesson(ONE, lanes="while True: pass",
                                   sinusoid="return torch.zeros(2 * 10 ** 9)"),
               f"{TWO}.py": lesson(
                   TWO, causal_mask="return causal_mask(*given)", reach=CHILD,
                   stream_losses="f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**7))")},
              "lanes sinusoid causal_mask stream_losses", "sinusoid: RuntimeError"),  # of memory
    "hangs": ({f"{TWO}.py": lesson(TWO, update_memory=LOOP)}, "update_memory", "still running"),
    # other files do neither good nor harm
    "cheats": ({f"{FOUR}.py": lesson(FOUR, rel_shift="return given[0]"), "conftest.py": CHEATS,
                "sitecustomize.py": CHEATS, "random.py": "", "train.py": "", "test_me.py": "x = (",
                "pytest.ini": "[pytest]\naddopts = --no-such-flag\n"},
               "train rel_shift", "rel_shift: "),
}


def test_a_dead_process_and_a_missing_function_cost_their_own_point(monkeypatch):
    """An inherited method is missing too.  A lesson that ends the process is not imported again,
    and one that rewrites its file, or has another encoding, hides nothing."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-flag")  # a teacher's
    files = {ONE: lesson(ONE, "del lanes\nopen(__file__, 'w')\n"), FOUR: "# coding: x",
             FIVE: lesson(FIVE, "del Layer.forward\n", sample_top_k="import os; os._exit(3)")}
    names = ["lanes", "segments", "reach", "layer", "sample_top_k", "rel_shift"]
    found = asyncio.run(grade.judged({name: files[name].encode() for name in files}, names))
    for name, words in {
            "lanes": f"failing lanes: there is no lanes in {ONE}.py; its name must stay",
            "segments": f"solved  {lessons.body_of(BY_NAME['segments'])}",
            "layer": f"failing layer: there is no Layer.forward in {FIVE}.py; its name must stay",
            "sample_top_k": "failing sample_top_k: ended the process (status 3)",
            "rel_shift": "failing rel_shift: there is no rel_shift"}.items():
        assert " ".join(found.pop(name)).startswith(words)
    ends = [("", {"lanes": 1}, "hung"), (TWO, {}, "died"), ("", {"layer": 2}, "")]
    monkeypatch.setattr(grade, "run_rules", AsyncMock(side_effect=ends))
    assert asyncio.run(grade.judged({ONE: 1, TWO: 2, FIVE: 5}, names[:4])) == {
        "lanes": 1, "segments": ("failing", "segments: hung", ""),
        "reach": ("failing", f"reach: {TWO}.py: died", ""), "layer": 2}
    assert [*grade.run_rules.call_args.args[0]] == [ONE, FIVE]


@pytest.mark.slow
def test_a_mistake_costs_its_own_point_only(tmp_path):
    """An ini file above does not matter.  The end and Ctrl-C leave no child, Ctrl-C no file."""
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
        end = time.monotonic() + 400
        while not mark.exists():
            assert time.monotonic() < end, "the first loop has not begun"
            time.sleep(0.01)
        stopped.send_signal(signal.SIGINT)
    assert stopped.returncode == -signal.SIGINT and not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob("tmp*"))
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
    assert rows["anna"]["remark"] == f"as shipped: {', '.join(BY_NAME)}"
    assert re.search(r"=1\+1 +1( +-)+ +1 +b( +-)+", out)
    time.sleep(1)
    assert mark.stat().st_size == size, "a child still writes"


@pytest.mark.slow
def test_a_broken_environment_grades_nobody(tmp_path, monkeypatch, capsys):
    """That would look like thirty students who failed.  The command is Gradescope's."""
    monkeypatch.chdir(tmp_path)
    command = (lessons.TESTS / "classroom" / "run_autograder").read_text()
    argv = re.search(r"grade.py (.*) \\\n", command)[1].split()
    (tmp_path / "results").mkdir()
    (tmp_path / "matplotlib.py").write_text("raise ImportError(\"No module named 'of mine'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert grade.main(argv) == 1 and not os.listdir("results")
    assert "No module named 'of mine'" in capsys.readouterr().err.splitlines()[-1]


OURS = "tests/course/pristine/04_rel_shift.py"
ONE_ZIP = zipped({"hw/train.py": b"", f"hw/{OURS}": b"", "__MACOSX/train.py": b"", "x.txt": b""})
LINK, FOLDER = zipfile.ZipInfo("train.py"), zipfile.ZipInfo(f"{FOUR}.py/")  # as Windows packs it
LINK.external_attr = stat.S_IFLNK << 16
MADE = {  # the content of files with these names
    "2.zip": zipped({"1.zip": ONE_ZIP}), "3.zip": zipped({"2.zip": zipped({"1.zip": ONE_ZIP})}),
    "large.zip": zipped({"train.py": bytes(1001)}), "train.py": bytes(1000),
    "odd.zip": zipped({LINK: b"", FOLDER: b"", f"{ONE}.py": b""}),
    "bomb.zip": zipped({"1.zip": bytes(100_001)})}


@pytest.mark.parametrize("files, wanted", [
    (["b.zip", "a/x", "c.7z", "train.py", "=1\n.zip", "index.html", "x.txt", "m.yml", "g.csv",
      ".git/x", "__MACOSX/x"], ["=1\n.zip", "a", "b.zip", "c.7z", "train.py"]),
    ([*"a.py b.py c.py d.py e.py f.py x.txt".split()], "no folder, no .zip archive and 6 .py files "
     "(a.py, b.py, c.py, d.py, e.py); hand in"),
    # the files of one student
    (["a.ZIP"], "graded: hw/train.py; left out: none"), (["2.zip"], "graded: 1.zip/hw/train.py; "
                                                         "left out: none"),
    (["a/2.zip"], "graded: 2.zip/1.zip/hw/train.py; left out: none"), (["3.zip"], "no lesson file"),
    (["a/b/train.py", f"a/b/{OURS}", "a/.venv/train.py", "a/b/backup/train.py", "a/1.zip",
      "a/train (1).py", "a/b/train.ipynb", "a/tests/test_train.py", "a/training/x.py", f"a/{OURS}"],
     "graded: b/train.py; left out: b/train.ipynb, train (1).py, 1.zip, b/backup/train.py"),
    (["a/b/train.py", "a/c/train.py"], "a holds b/train.py and c/train.py; leave one of them"),
    ([f"a/{i}.zip" for i in range(10)], "a holds 10 archives; hand in one .zip per student"),
    (["a/1.zip", "a/4.zip"], "a holds 1.zip/hw/train.py and 4.zip/hw/train.py; leave one"),
    ([f"a/{OURS}"], "a holds no lesson file"), (["a.7z"], "a.7z is not a folder or .zip archive"),
    (["@a"], "a link is neither"), (["|a.zip"], "a.zip is not a"),
    (["a/@train.py", "a/|train", f"a/{TWO}.py"], f"graded: {TWO}.py; left out: train, train.py"),
    (["odd.zip"], f"graded: {ONE}.py; left out: train.py, {FOUR}.py"),
    (["large.zip"], "train.py has more than 1 MB; hand in"), (["bomb.zip"], "more than 100 MB"),
    ([f"a/{'n' * 200}/{'n' * 200}/train.py"], f"graded: {'n' * 200}/{'n' * 99}; left out: none"),
], ids=str)
def test_each_entry_of_the_class_is_one_student(files, wanted, tmp_path, monkeypatch):
    """A list has rows, a text is a student's row or a refusal; @ is a link and | a pipe."""
    monkeypatch.setattr(grade, "MB", 1000)
    for file in files:
        path = tmp_path / re.sub("[@|]", "", file)
        path.parent.mkdir(parents=True, exist_ok=True)
        make = {"@": lambda: path.symlink_to(__file__ if path.suffix else tmp_path),
                "|": lambda: os.mkfifo(path)}
        make.get(PurePath(file).name[0], lambda: path.write_bytes(MADE.get(path.name, ONE_ZIP)))()
    if isinstance(wanted, list):
        assert [row.place.name for row in grade.find_submissions(tmp_path)] == wanted
    elif "no folder" in wanted:
        assert wanted in refusal(grade.find_submissions, tmp_path)
    else:
        (row,) = grade.find_submissions(tmp_path)
        if wanted.startswith("graded: "):
            grade.take_lessons(row)
            assert row.cells()[-2] == wanted
        else:
            assert wanted in refusal(grade.take_lessons, row)


def test_equal_functions_may_differ_in_docstrings_and_comments(tmp_path, monkeypatch):
    bodies = []
    for i, text in enumerate(("'x'\n    return x", "# y\n    return (x)", "return y", "return (")):
        monkeypatch.setitem(lessons.under_test, FOUR, tmp_path / f"{i}.py")
        lessons.under_test[FOUR].write_text(f"def rel_shift(x):\n    {text}\n")
        bodies.append(lessons.body_of(BY_NAME["rel_shift"]))
    assert bodies[0] == bodies[1] != bodies[2] and bodies[2][:4] == "001 " and bodies[3] == ""


def test_a_report_has_only_lines_of_the_tests():
    """Two results fail an exercise; a line of another form, or of another lesson, the student."""
    def read(*lines):
        return grade.read_report("".join(f"{json.dumps(line)}\n" for line in lines).encode(), ["a"])

    solved = {"exercise": "a", "state": "solved", "message": "", "body": ""}
    begin, end = {"importing": "train"}, {"imported": "train"}
    assert read(begin, end, solved, begin) == ("train", {}) and read(solved, begin, end) == ("", {})
    assert read(begin, end, solved, solved) == ("", {"a": ("solved", "", "")})
    twice = read(begin, end, solved | {"state": "failing"}, solved)[1]["a"]
    assert twice[:2] == ("failing", "a: its results contradict each other")
    for odd in ({"exercise": "b"}, {"state": "paid"}, {"message": 1}, {"body": None}):
        assert "read this student's code" in refusal(read, begin, end, solved | odd)
    for odd in (b"1", b"{", b"\xff"):
        assert "read this student's code" in refusal(grade.read_report, odd + b"\n", ["a"])
    assert grade.read_report(b'{"importing": "train"}\n{"impo', ["a"]) == ("train", {})


def test_what_is_known_is_written_after_each_student(tmp_path, monkeypatch, capsys):
    """Grading first stops at the last student.  No name or message controls the terminal."""
    async def judged(files, names):
        state, body = files["train"].decode().split(",") if len(files) == 1 else ("solved", "003 x")
        await asyncio.sleep(9 * (state == "sleeps"))
        if state == "stops":
            raise asyncio.CancelledError
        return {"lanes": (state, f"lanes: {'y' * 400}\n  \x1b" * (state == "failing"), body)}

    monkeypatch.setattr(grade, "judged", judged)
    monkeypatch.setattr(grade, "SECONDS", 0.01)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    long = "f" * 239 + "é" * 8  # 255 bytes, as long as a name may be
    argv = ["class", "--only", "lanes,reach", "--csv", "x.csv", "--feedback", "texts"]
    for name, text in {"c": "solved,010 y", "d": "blank,003 z", "e": "failing,003 z",
                       long: "stops,", "b": "solved,010 y", "＝a\x1b": "solved,003 x"}.items():
        blank.write_whole(tmp_path / "class" / name / "train.py", text)
    torn = zipped({"train.py": b"x"}).replace(b"\x83\x16\xdc\x8c", b"sums")  # another checksum
    Path("class/g.zip").write_bytes(torn)
    with pytest.raises(asyncio.CancelledError):
        grade.main(argv)
    blank.write_whole(tmp_path / "class" / long / "train.py", "sleeps,")
    before = Path("x.csv").read_text("utf-8")
    assert grade.main(argv) == 0 and "\x1b" not in (said := "".join(capsys.readouterr()))
    used = "graded: train.py; left out: none"
    rows = {row[0]: row[1:] for row in csv.reader(Path("x.csv").read_text("utf-8").splitlines())}
    assert rows == {
        "submission": ["points", "lanes", "reach", "sentences", "files", "remark"],
        "b": ["1", "1", "-", "1 of 2 exercises solved", used, "as c: lanes"],
        "c": ["1", "1", "-", "1 of 2 exercises solved", used, "as b: lanes"],
        "d": ["0", "b", "-", "blank: lanes", used, ""],
        "e": ["0", "0", "-", f"lanes: {'y' * 293}", used, ""],
        long: ["0", "-", "-", "not graded in an hour: TimeoutError()",
               "graded: none; left out: none", ""],
        "g.zip": ["0", "-", "-", "a .zip archive is damaged: Bad CRC-32 for file 'train.py'",
                  "graded: none; left out: none", ""],
        "'＝a ": ["1", "1", "-", "1 of 2 exercises solved", used, "as shipped: lanes"]}
    assert "damaged: Bad" in said and '"e","0","0","-",' in before and f'"{long}",""' in before
    assert Path("texts/e.txt").read_text("utf-8") == (
        f"lanes: {'y' * 400}\n  \ufffd\n\nreach: not handed in\n\n{used}\n")
    assert grade.main(["class/e", "--only", "lanes", "--gradescope", "x.json"]) == 0
    assert json.loads(Path("x.json").read_text()) == {  # the fields that Gradescope documents
        "output": used, "visibility": "visible", "tests": [
            {"name": "lanes", "score": 0.0, "max_score": 1.0, "visibility": "visible",
             "output": f"lanes: {'y' * 400}\n  \x1b"}]}
    assert len(os.listdir("texts")) == 7 and Path("texts/b.txt").read_text("utf-8") == (
        f"lanes is solved\n\nreach: not handed in\n\n{used}\n")
