"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table
    python tests/grade.py submissions/ --only lanes,reach  this week's exercises
    python tests/grade.py submissions/ --csv grades.csv    also a file, with all sentences
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ holds for each student a folder with lesson files, or with the archive that blank.py
--submit packs, or that archive alone; or the flat download of a learning platform
(smithanna_123_456_04_rel_shift-1.py; of several the last upload counts).  Only the six lesson files
are taken, and only what a student handed in can give points.

For each submission pytest runs the rules in a process that imports these files in place of ours,
in a temporary folder, with limits of time, memory and file size.  If that process hangs or dies,
the exercise that it was at has no point, and another process grades the others.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import argparse
import asyncio
import csv
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

from blank import Parser, exercises_called, write_whole
from course import lessons
from course.exercises import BY_NAME, LESSONS, ROOT

NAMES = list(BY_NAME)
HONEST = __doc__.strip().splitlines()[-1]
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-"}
FLAT = re.compile(  # as a platform names it; it gives archives without two numbers to nobody
    r"(?P<who>[^_]+)_(LATE_)?((?P<id>\d+)_)?((?P<upload>\d+)_)?"
    rf"(.*?(?P<lesson>{'|'.join(LESSONS)}){lessons.COPY}?\.py|(?(upload).*\.zip|(?!)))")


@dataclass
class Row:
    """What became of one submission."""

    name: str
    found: dict  # exercise -> (a key of MARKS, what its author is told)
    error: str = ""  # why nothing could be graded

    def points(self):
        """3 of 18 exercises solved"""
        return f"{self.marks().count('1')} of {len(self.found)} exercises solved"

    def marks(self):
        """One letter for each exercise."""
        return [MARKS[state] for state, _ in self.found.values()]

    def sentences(self):
        """The first sentence of each message; one cause may break several exercises."""
        found = {"": self.error} if self.error else {}
        for state, message in self.found.values():
            if state == "failing":
                sentence = printable(message.split("\n  ")[0])  # without the lines below it
                found.setdefault(sentence.split(": ", 1)[-1], sentence)
        blank = [name for name, (state, _) in self.found.items() if state == "blank"]
        if blank:
            found["blank"] = f"blank: {', '.join(blank)}"
        return list(found.values()) or [self.points()]


# ---- one submission -----------------------------------------------------------------------------

def printable(text):
    """One line without a terminal's control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


async def run_rules(folder, names, seconds):
    """Run the rules of these exercises on folder/lessons -> (its notes, how the process ended).

    It is killed if it notes nothing new for so many seconds.
    """
    report = folder / "report"
    report.write_text("")
    environment = os.environ | {
        "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    process = await asyncio.create_subprocess_exec(
        # no ini file and no conftest.py of a folder above; `tests`, so that nothing else is read
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ROOT, "--confcutdir", ROOT,
        "-k", " or ".join(names), ROOT / "tests", cwd=folder, env=environment, stdin=DEVNULL,
        stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    size, end = 0, time.monotonic() + 4 * seconds  # until torch is imported: nobody's fault
    try:
        while process.returncode is None and time.monotonic() < end:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), 0.5)
            if size != report.stat().st_size:
                size, end = report.stat().st_size, time.monotonic() + seconds
        status = process.returncode
    finally:
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
            else:  # Windows
                process.kill()
        await process.wait()
    how = f"still running after {seconds} seconds" if status is None else (
        f"ended the process (status {status})")  # -n: by signal n
    notes = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    if not notes:
        raise ImportError(f"no rule could run: is all of requirements.txt installed for "
                          f"{sys.executable}? ({how})")
    return notes, how


async def judged(folder, names, seconds):
    """{exercise: (state, message)} of the lessons in folder/lessons, where each has its own name.
    """
    found = {}
    todo = [name for name in names if (folder / "lessons" / f"{BY_NAME[name].file}.py").exists()]
    while todo:
        notes, how = await run_rules(folder, todo, seconds)
        found |= {z["exercise"]: (z["state"], z["message"] or f"{z['exercise']}: solved")
                  for z in notes if "exercise" in z}
        at_fault = [name for name in todo if name not in found][:1]
        if "importing" in notes[-1]:
            file = notes[-1]["importing"]
            (folder / "lessons" / f"{file}.py").unlink()
            at_fault, how = [n for n in todo if BY_NAME[n].file == file], f"{file}.py: {how}"
        found |= {name: ("failing", f"{name}: {how}") for name in at_fault}
        todo = [name for name in todo if name not in found]
    return found


def unpacked(submission, folder):
    """Where a submission's files are: in `folder`, if it is an archive, or holds one and no lesson
    file.  Of several archives the last copy counts.  ValueError."""
    archives = sorted(submission.rglob("*.zip"), key=lessons.copy_number)
    if submission.suffix == ".zip":
        archives = [submission]
    elif any(map(lessons.lesson_of, submission.rglob("*.py"))) or not archives:
        return submission
    try:
        with zipfile.ZipFile(archives[-1]) as archive:
            names = [name for name in archive.namelist() if lessons.lesson_of(Path(name))]
            archive.extractall(folder, names)
    except zipfile.BadZipFile:
        raise ValueError(f"{archives[-1].name} is damaged; pack it again") from None
    return folder


async def grade(submission, names, seconds):
    """The row of one submission."""
    row = Row(printable(submission.name), {
        name: ("missing", f"{name}: not handed in") for name in names})
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary).resolve()
            (folder / "lessons").mkdir()
            (folder / "archive").mkdir()
            found = lessons.find_lessons(unpacked(submission, folder / "archive"))
            for lesson, path in found.items():
                shutil.copyfile(path, folder / "lessons" / f"{lesson}.py")
            row.found |= await judged(folder, names, seconds)
    except ImportError:
        raise  # else every student would get 0 points
    except Exception as error:  # whatever it is, the others must be graded
        row.error = str(error) or type(error).__name__
    return row


# ---- the class ----------------------------------------------------------------------------------

def find_submissions(folder, sorted_into):
    """The students' folders, by name; files of a flat download are sorted into folders there.

    ValueError if there is none, or if it is the folder of one student.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds the submissions")
    there = sorted(path for path in folder.iterdir() if not lessons.is_hidden(path.name))
    if any(path.name.removesuffix(".py") in LESSONS and path.is_file() for path in there):
        raise ValueError(f"{folder} holds lesson files, so it is the folder of one student; name "
                         "the folder above it")
    flat = {path: match for path in there if (match := FLAT.fullmatch(path.name))}
    found = [path for path in there if path not in flat]

    def upload(path):
        return int(flat[path]["upload"] or 0), lessons.copy_number(path)
    for path in sorted(flat, key=upload):  # the last one overwrites the others
        own = sorted_into / "_".join(filter(None, flat[path].group("who", "id")))
        own.mkdir(exist_ok=True)
        lesson = flat[path]["lesson"]
        shutil.copyfile(path, own / (f"{lesson}.py" if lesson else "all.zip"))
        # what is wrong with an archive is said when it is graded
        with suppress(Exception), tempfile.TemporaryDirectory() as place:
            for name, file in lessons.find_lessons(unpacked(path, Path(place))).items():
                shutil.copyfile(file, own / f"{name}.py")
        found.append(own)
    if not found:
        raise ValueError(f"{folder} holds no submission; put a folder for each student into it")
    return sorted(set(found), key=lambda path: path.name)


async def grade_all(submissions, names, seconds):
    """The rows, in the order of the submissions; progress on stderr."""
    free = asyncio.Semaphore(min(8, os.cpu_count() or 1))  # each takes a core and 0.7 GB

    async def one(submission):
        async with free:
            row = await grade(submission, names, seconds)
        print(row.name, file=sys.stderr, flush=True)
        return row
    return await asyncio.gather(*map(one, submissions))


def table(rows):
    """What is printed: for each submission the marks and below them a sentence; the legend."""
    names = list(rows[0].found)
    numbers = "".join(f"{i:3}" for i in range(1, len(names) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        marks = row.marks()
        points = f"{marks.count('1')}/{len(names)}"
        lines.append(f"{row.name:<30} {points:>6} " + "".join(f"{mark:>3}" for mark in marks))
        lines.append(f"    {row.sentences()[0]}")
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(names, 1))
    lines += ["", "1 solved, 0 wrong, b blank, - not handed in", legend, HONEST]
    return "\n".join(lines)


def gradescope(row):
    """Gradescope's results.json: a test for each exercise, of one point."""
    tests = [{"name": name, "score": float(state == "solved"), "max_score": 1.0,
              "output": message, "visibility": "visible"}
             for name, (state, message) in row.found.items()]
    return {"output": row.error or row.points(), "visibility": "visible", "tests": tests}


def as_csv(rows):
    """The rows as text; a cell that a spreadsheet would take for a formula gets a ' in front."""
    def text(cell):
        return f"'{cell}" if cell.startswith(tuple("=+-@")) else cell
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["submission", "points", *rows[0].found, "sentences"])
    for row in rows:
        marks = row.marks()
        writer.writerow([text(row.name), marks.count("1"), *marks,
                         text(" | ".join(row.sentences()))])
    return file.getvalue()


def parse(argv):
    """The command line.  ValueError: one sentence."""
    parser = Parser(prog="grade.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--only", metavar="NAME,NAME", help="these exercises alone")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--gradescope", type=Path, metavar="FILE",
                        help="SUBMISSIONS is one student's folder: write results.json")
    parser.add_argument("--seconds", type=int, metavar="S", default=30,
                        help="without a result, after which an exercise counts as endless "
                        "(default: 30)")
    given = parser.parse_args(argv)
    if given.seconds < 12:
        raise ValueError(f"--seconds {given.seconds}: at least 12 seconds are needed")
    if given.csv and (given.csv.is_dir() or not given.csv.parent.is_dir()):
        raise ValueError(f"--csv {given.csv} is a folder, or in none; name a file in a folder that "
                         "exists")
    given.names = [exercise.name for exercise in exercises_called(given.only)]
    return given


def grade_one(given):
    """One student's folder for Gradescope: whatever happens, there is a file."""
    row = asyncio.run(grade(given.folder, given.names, given.seconds))
    write_whole(given.gradescope, json.dumps(gradescope(row), indent=1))
    print(row.error or row.points())


def grade_class(given):
    """Print the table of a class, and write the files that were asked for."""
    with tempfile.TemporaryDirectory() as temporary:
        submissions = find_submissions(given.folder, Path(temporary))
        rows = asyncio.run(grade_all(submissions, given.names, given.seconds))
    print(table(rows))
    if given.csv:
        write_whole(given.csv, as_csv(rows))


def main(argv=None):
    """Grade the class.  Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    try:
        given = parse(argv)
        if given.gradescope:
            grade_one(given)
        else:
            grade_class(given)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngrade.py: stopped, and nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a name that the terminal cannot show
    sys.exit(main())
