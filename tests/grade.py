"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table
    python tests/grade.py submissions/ --only lanes,reach  this week's exercises
    python tests/grade.py submissions/ --csv grades.csv    also a file, with all sentences
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ contains one folder per student, with lesson files or with the archive that blank.py
--submit packs, or one such archive per student.  It may also be the flat download of a learning
platform (smithanna_123_456_04_rel_shift-1.py), where the last upload of each lesson counts.  Only
the six lesson files are read, and only what a student handed in can score points.

For each submission, pytest runs the rules in a process that imports these files instead of ours, in
a temporary folder, with limits on time, memory and file size.  If that process hangs or dies, the
exercise that it was testing gets no point, and another process grades the remaining exercises.
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
DISCLAIMER = __doc__.strip().splitlines()[-1]
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-"}
FLAT = re.compile(  # a platform's file name; an archive needs two numbers in it
    r"(?P<who>[^_]+)_(LATE_)?((?P<id>\d+)_)?((?P<upload>\d+)_)?"
    rf"(.*?(?P<lesson>{'|'.join(LESSONS)}){lessons.COPY}?\.py|(?(upload).*\.zip|(?!)))")


@dataclass
class Row:
    """The result of one submission."""

    name: str
    found: dict  # exercise -> (a key of MARKS, the message for its author)
    error: str = ""  # why nothing could be graded

    def points(self):
        """Return the score as a sentence: 3 of 18 exercises solved."""
        return f"{self.marks().count('1')} of {len(self.found)} exercises solved"

    def marks(self):
        """Return one letter per exercise."""
        return [MARKS[state] for state, _ in self.found.values()]

    def sentences(self):
        """Return the first sentence of each message; exercises with the same cause share one."""
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
    """Return the text as one line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


async def run_rules(folder, names, seconds):
    """Run the rules of these exercises on folder/lessons, and return the notes of the process and
    how it ended.  It is killed if it adds no note for this many seconds.
    """
    report = folder / "report"
    report.write_text("")
    environment = os.environ | {
        "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    process = await asyncio.create_subprocess_exec(
        # ini files and conftest.py in parent folders are ignored, and only tests/ is collected
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ROOT, "--confcutdir", ROOT,
        "-k", " or ".join(names), ROOT / "tests", cwd=folder, env=environment, stdin=DEVNULL,
        stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    size, end = 0, time.monotonic() + 4 * seconds  # importing torch is not the student's time
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
                os.killpg(process.pid, signal.SIGKILL)  # and every process that it has started
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
    """Return {exercise: (state, message)} of the lesson files in folder/lessons."""
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
    """Return the folder with a submission's files: `folder`, into which its archive is unpacked, or
    the submission itself if it contains lesson files or no archive.  The last copy of several
    archives counts.  Raises ValueError if it is damaged."""
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
    """Return the row of one submission."""
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
        raise  # otherwise every student would get 0 points
    except Exception as error:  # of any kind: the other students must be graded
        row.error = str(error) or type(error).__name__
    return row


# ---- the class ----------------------------------------------------------------------------------

def find_submissions(folder, sorted_into):
    """Return the submissions by name; the files of a flat download are copied into one folder per
    student in `sorted_into`.

    Raises ValueError if there is none, or if this is the folder of one student.
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
    for path in sorted(flat, key=upload):  # the last one overwrites earlier ones
        own = sorted_into / "_".join(filter(None, flat[path].group("who", "id")))
        own.mkdir(exist_ok=True)
        lesson = flat[path]["lesson"]
        shutil.copyfile(path, own / (f"{lesson}.py" if lesson else "all.zip"))
        # an archive that cannot be unpacked is reported when it is graded
        with suppress(Exception), tempfile.TemporaryDirectory() as place:
            for name, file in lessons.find_lessons(unpacked(path, Path(place))).items():
                shutil.copyfile(file, own / f"{name}.py")
        found.append(own)
    if not found:
        raise ValueError(f"{folder} holds no submission; put a folder for each student into it")
    return sorted(set(found), key=lambda path: path.name)


async def grade_all(submissions, names, seconds):
    """Return the rows in the order of the submissions; print progress on stderr."""
    free = asyncio.Semaphore(min(8, os.cpu_count() or 1))  # each needs a core and 0.7 GB

    async def one(submission):
        async with free:
            row = await grade(submission, names, seconds)
        print(row.name, file=sys.stderr, flush=True)
        return row
    return await asyncio.gather(*map(one, submissions))


def table(rows):
    """Return the table as text: marks and a sentence per submission, then the legend."""
    names = list(rows[0].found)
    numbers = "".join(f"{i:3}" for i in range(1, len(names) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        marks = row.marks()
        points = f"{marks.count('1')}/{len(names)}"
        lines.append(f"{row.name:<30} {points:>6} " + "".join(f"{mark:>3}" for mark in marks))
        lines.append(f"    {row.sentences()[0]}")
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(names, 1))
    lines += ["", "1 solved, 0 incorrect, b blank, - not handed in", legend, DISCLAIMER]
    return "\n".join(lines)


def gradescope(row):
    """Return the content of Gradescope's results.json: one test of one point per exercise."""
    tests = [{"name": name, "score": float(state == "solved"), "max_score": 1.0,
              "output": message, "visibility": "visible"}
             for name, (state, message) in row.found.items()]
    return {"output": row.error or row.points(), "visibility": "visible", "tests": tests}


def as_csv(rows):
    """Return the rows as CSV; a cell that a spreadsheet would run as a formula begins with '."""
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
    """Parse the command line.  Raises ValueError with one sentence."""
    parser = Parser(prog="grade.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--only", metavar="NAME,NAME", help="grade only these exercises")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--gradescope", type=Path, metavar="FILE",
                        help="grade one student's folder or archive; write results.json")
    parser.add_argument("--seconds", type=int, metavar="S", default=30,
                        help="without a result, after which an exercise counts as endless "
                        "(default: 30)")
    given = parser.parse_args(argv)
    if given.seconds < 12:
        raise ValueError(f"--seconds {given.seconds}: at least 12 seconds are needed")
    if given.csv and (given.csv.is_dir() or not given.csv.parent.is_dir()):
        raise ValueError(f"--csv {given.csv} is a folder, or its folder does not exist; choose a "
                         "file in an existing folder")
    given.names = [exercise.name for exercise in exercises_called(given.only)]
    return given


def grade_one(given):
    """Grade one student's submission, and always write Gradescope's file."""
    row = asyncio.run(grade(given.folder, given.names, given.seconds))
    write_whole(given.gradescope, json.dumps(gradescope(row), indent=1))
    print(row.error or row.points())


def grade_class(given):
    """Print the table of a class, and write --csv."""
    with tempfile.TemporaryDirectory() as temporary:
        submissions = find_submissions(given.folder, Path(temporary))
        rows = asyncio.run(grade_all(submissions, given.names, given.seconds))
    print(table(rows))
    if given.csv:
        write_whole(given.csv, as_csv(rows))


def main(argv=None):
    """Grade, and return the exit status: 0, 1 after an error, 130 after Ctrl-C."""
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
        stream.reconfigure(errors="replace")  # for names that the terminal cannot display
    sys.exit(main())
