"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table, and what the class found hard
    python tests/grade.py submissions/ --only lanes,segments    this week's exercises
    python tests/grade.py submissions/ --all-mistakes      with every sentence, not only the first
    python tests/grade.py submissions/ --csv grades.csv    also write the table to a file
    python tests/grade.py submissions/ --feedback out/     a page for each student
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ holds for each student a folder with lesson files, or with the archive that blank.py
--submit packs, or that archive alone; or the flat download of a learning platform
(smithanna_123_456_04_rel_shift-1.py; of several the last upload counts).  Only the six lesson files
are taken, and only what a student handed in can give points: our own lesson stands in for a missing
or broken one, but scores nothing.

For each submission pytest runs the rules in a process that imports these files in place of ours,
in a temporary folder, with limits of time, memory and file size.  If that process hangs or dies,
the exercise that it was at has no point, and another process grades the others.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import argparse
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from blank import Parser, exercises_called, write_whole
from course import lessons
from course.exercises import BY_NAME, LESSONS, ROOT

NAMES = list(BY_NAME)
HONEST = __doc__.strip().splitlines()[-1]
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-"}
FLAT = re.compile(  # as a platform names it; it gives archives without two numbers to nobody
    r"(?P<who>[^_]+)_(LATE_)?((?P<id>\d+)_)?((?P<upload>\d+)_)?"
    rf"(.*?(?P<lesson>{'|'.join(LESSONS)}){lessons.COPY}?\.py|(?(upload).*\.zip|(?!)))")
PACKAGES = "numpy", "torch", "matplotlib", "pytest"
ARCHIVE = 20 << 20  # bytes that a student's archive may hold


@dataclass
class Row:
    """What became of one submission."""

    name: str
    states: dict  # exercise -> a key of MARKS
    messages: dict  # exercise -> what pytest says of it; "" -> why nothing could be graded

    def points(self):
        """How many are solved."""
        return list(self.states.values()).count("solved")

    def sentences(self):
        """The first sentence of each message; one cause may break several exercises."""
        found = {}
        for name, message in self.messages.items():
            if self.states.get(name) != "blank":
                sentence = first_sentence(message)
                found.setdefault(sentence.split(": ", 1)[-1], sentence)
        blank = [name for name, state in self.states.items() if state == "blank"]
        if blank:
            found["blank"] = f"blank: {', '.join(blank)}"
        return list(found.values()) or ["all solved"]


# ---- one submission -----------------------------------------------------------------------------

def printable(text):
    """One line without a terminal's control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def first_sentence(message):
    """The diagnosis, which is at the top of a message, without the indented lines below it."""
    return printable(message.split("\n  ")[0])


def run_rules(folder, names, seconds, stop):
    """Run the rules of these exercises on the lessons in folder/lessons.

    Returns (notes, {exercise: (state, message)}, how the process ended).  It is killed if it notes
    nothing new for so many seconds.
    """
    report = folder / "report"
    report.write_text("")
    environment = os.environ | {
        "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    process = subprocess.Popen(
        # no ini file and no conftest.py of a folder above; `tests`, so that nothing else is read
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ROOT, "--confcutdir", ROOT,
         "-k", " or ".join(names), ROOT / "tests"], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)
    size, end = 0, time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end and not stop.is_set():
            time.sleep(0.05)
            if size != report.stat().st_size:
                size, end = report.stat().st_size, time.monotonic() + seconds
        status = process.poll()
    finally:
        with suppress(ProcessLookupError, PermissionError, AttributeError):  # the last: on Windows
            os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
        process.kill()
        process.wait()
    how = f"still running after {seconds} seconds" if status is None else (
        f"ended the process (status {status})")  # -n: by signal n
    notes = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    found = {z["exercise"]: (z["state"], z["message"]) for z in notes if "exercise" in z}
    return notes, found, how


def judged(folder, names, seconds, stop):
    """{exercise: (state, message)} of the lessons in folder/lessons, where each has its own name.
    """
    found = {}
    todo = [name for name in names if (folder / "lessons" / f"{BY_NAME[name].file}.py").exists()]
    while todo and not stop.is_set():
        notes, new, how = run_rules(folder, todo, seconds, stop)
        found |= new
        at_fault = [name for name in todo if name not in found][:1]
        if notes and "importing" in notes[-1]:
            file = notes[-1]["importing"]
            (folder / "lessons" / f"{file}.py").unlink()
            at_fault, how = [n for n in todo if BY_NAME[n].file == file], f"{file}.py: {how}"
        found |= {name: ("failing", f"{name}: {how}") for name in at_fault}
        todo = [name for name in todo if name not in found]
    return found


def grade(submission, names, seconds, stop):
    """The row of one submission."""
    found, messages = {}, {}
    try:
        with unpacked(submission) as place, tempfile.TemporaryDirectory(
                ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary).resolve()
            (folder / "lessons").mkdir()
            for lesson, path in lessons.find_lessons(place).items():
                shutil.copyfile(path, folder / "lessons" / f"{lesson}.py")
            found = judged(folder, names, seconds, stop)
            messages = {name: text for name, (_, text) in found.items() if text}
    except (ValueError, OSError) as error:
        messages[""] = str(error)
    except Exception as error:  # whatever it is, the others must be graded
        messages[""] = f"the grader failed: {type(error).__name__}: {error}"
    states = {name: found.get(name, ("missing",))[0] for name in names}
    is_alone = not submission.with_suffix("").exists()  # else two were called anna
    name = submission.stem if submission.suffix == ".zip" and is_alone else submission.name
    return Row(printable(name), states, messages)


@contextmanager
def unpacked(submission):
    """The folder of a submission that is an archive, or that holds one and no lesson file; any
    other as it is.  Of several archives the last copy counts.  ValueError."""
    if submission.suffix != ".zip":
        archives = sorted(submission.rglob("*.zip"))
        if not archives or any(map(lessons.lesson_of, submission.rglob("*.py"))):
            yield submission
            return
        submission = max(archives, key=lessons.copy_number)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(submission) as archive:
                if sum(file.file_size for file in archive.infolist()) > ARCHIVE:
                    raise ValueError(f"{submission.name} holds more than {ARCHIVE >> 20} MB; hand "
                                     "in the lesson files alone")
                archive.extractall(folder)
        except zipfile.BadZipFile:
            raise ValueError(f"{submission.name} is damaged; pack it again") from None
        yield Path(folder)


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
    namesakes = Counter(who for who, _ in {(z["who"], z["id"]) for z in flat.values()})
    found = [path for path in there if path not in flat]

    def upload(path):
        return int(flat[path]["upload"] or 0), lessons.copy_number(path)
    for path in sorted(flat, key=upload):  # the last one overwrites the others
        who, number, lesson = flat[path]["who"], flat[path]["id"], flat[path]["lesson"]
        own = sorted_into / (who if namesakes[who] == 1 else f"{who}_{number}")
        own.mkdir(exist_ok=True)
        shutil.copyfile(path, own / (f"{lesson}.py" if lesson else "all.zip"))
        found.append(own)
    if not found:
        raise ValueError(f"{folder} holds no submission; put a folder for each student into it")
    return sorted(set(found), key=lambda path: path.name)


def grade_all(submissions, names, jobs, seconds):
    """The rows, in the order of the submissions; progress on stderr."""
    stop, pool = threading.Event(), ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(grade, path, names, seconds, stop) for path in submissions]
        for k, future in enumerate(as_completed(futures), 1):
            print(f"{k} of {len(futures)}: {future.result().name}", file=sys.stderr, flush=True)
        return [future.result() for future in futures]
    finally:
        stop.set()  # after Ctrl-C the processes still run
        pool.shutdown(cancel_futures=True)


def table(rows, names, all_mistakes=False):
    """What is printed: for each submission the marks and below them its sentences; the legend."""
    numbers = "".join(f"{i:3}" for i in range(1, len(names) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        marks = "".join(f"{MARKS[row.states[name]]:>3}" for name in names)
        lines.append(f"{row.name:<30} {f'{row.points()}/{len(names)}':>6} {marks}")
        for sentence in row.sentences() if all_mistakes else row.sentences()[:1]:
            lines += textwrap.wrap(sentence, 96, initial_indent="    ", subsequent_indent="      ")
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(names, 1))
    meaning = "1 solved, 0 wrong, b blank, - not handed in."
    return "\n".join([*lines, "", *textwrap.wrap(f"{meaning}  {legend}", 100), HONEST])


def summary(rows, names):
    """For each exercise how many of those who handed it in have solved it, and the diagnosis that
    the others get most often."""
    lines = ["the class: solved, and the commonest mistake"]
    for name in names:
        states = [row.states[name] for row in rows if row.states[name] != "missing"]
        common = Counter(first_sentence(row.messages[name]) for row in rows
                         if row.states[name] == "failing")
        (sentence, count), = common.most_common(1) or [("", 0)]
        often = f"{count} x {sentence.partition(': ')[2]}" if count else ""
        solved = f"{states.count('solved')}/{len(states)}"
        lines += textwrap.wrap(f"{name:<20} {solved:>6}  {often}", 100, subsequent_indent=" " * 29)
    return "\n".join(lines)


def page(row, names):
    """What one student is given: the points, and all that pytest says."""
    parts = [f"{row.name}: {row.points()} of {len(names)} exercises solved"]
    parts += [f"{name}: {row.states[name]}" for name in names if name not in row.messages]
    return "\n\n".join([*parts, *row.messages.values()]) + "\n"


def gradescope(row, names):
    """Gradescope's results.json: a test for each exercise, of one point."""
    tests = [{"name": name, "score": float(row.states[name] == "solved"), "max_score": 1.0,
              "output": row.messages.get(name, row.states[name]), "visibility": "visible"}
             for name in names]
    points = f"{row.points()} of {len(names)} exercises solved"
    return {"output": row.messages.get("", points), "visibility": "visible", "tests": tests}


def as_csv(rows, names):
    """The rows as text; a cell that a spreadsheet would take for a formula gets a ' in front."""
    def text(cell):
        return f"'{cell}" if cell.startswith(tuple("=+-@")) else cell
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["submission", "points", *names, "sentences"])
    for row in rows:
        marks = [MARKS[row.states[name]].strip("-") for name in names]
        writer.writerow([text(row.name), row.points(), *marks, text(" | ".join(row.sentences()))])
    return file.getvalue()


def parse(argv):
    """The command line.  ValueError: one sentence."""
    parser = Parser(prog="grade.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--only", metavar="NAME,NAME", help="these exercises alone")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--all-mistakes", action="store_true",
                        help="print a sentence for each exercise that is not solved")
    parser.add_argument("--feedback", type=Path, metavar="FOLDER",
                        help="write a page for each student there")
    parser.add_argument("--gradescope", type=Path, metavar="FILE",
                        help="SUBMISSIONS is one student's folder: write results.json")
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count() or 1,
                        help="submissions at a time (default: the cores, %(default)s)")
    parser.add_argument("--seconds", type=int, metavar="S", default=30,
                        help="without a result, after which an exercise counts as endless "
                        "(default: 30)")
    given = parser.parse_args(argv)
    if given.jobs < 1 or given.seconds < 12:
        raise ValueError(f"--jobs {given.jobs} --seconds {given.seconds}: at least 1 job and 12 "
                         "seconds are needed")
    if given.csv and (given.csv.is_dir() or not given.csv.parent.is_dir()):
        raise ValueError(f"--csv {given.csv} is a folder, or in none; name a file in a folder that "
                         "exists")
    lacking = [package for package in PACKAGES if find_spec(package) is None]
    if lacking:
        raise ValueError(f"{sys.executable} has no {', '.join(lacking)}, so every student would "
                         "get 0 points; install requirements.txt there")
    given.names = [exercise.name for exercise in exercises_called(given.only)]
    return given


def grade_one(given):
    """One student's folder for Gradescope: whatever happens, there is a file."""
    row = grade(given.folder, given.names, given.seconds, threading.Event())
    write_whole(given.gradescope, json.dumps(gradescope(row, given.names), indent=1))
    print(page(row, given.names), end="")


def grade_class(given):
    """Print the table and the summary of a class, and write the files that were asked for."""
    with tempfile.TemporaryDirectory() as temporary:
        submissions = find_submissions(given.folder, Path(temporary))
        rows = grade_all(submissions, given.names, given.jobs, given.seconds)
    print(table(rows, given.names, given.all_mistakes))
    print(f"\n{summary(rows, given.names)}")
    for row in rows if given.feedback else ():
        write_whole(given.feedback / f"{row.name}.txt", page(row, given.names))
    if given.csv:
        write_whole(given.csv, as_csv(rows, given.names))


def main(argv=None):
    """Grade the class.  Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    try:
        given = parse(argv)
        if given.gradescope:
            grade_one(given)
        else:
            grade_class(given)
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngrade.py: stopped, and nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a name that the terminal cannot show
    sys.exit(main())
