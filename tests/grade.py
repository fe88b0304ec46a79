"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table, progress on stderr
    python tests/grade.py submissions/ --all-mistakes      with every sentence, not only the first
    python tests/grade.py submissions/ --csv grades.csv    the table as a file, too

submissions/ holds one folder with lesson files for each student, or the flat download of a learning
platform (smithanna_123_456_04_rel_shift-1.py; of several the last one counts).  Only what a student
handed in can give points: where a lesson is missing, our own stands in for those that need it, but
counts nothing.

Each submission is laid over a copy of the project, where pytest runs its rules in a process with
limits of time, memory and file size.  If that process hangs or dies, each exercise gets a run of
its own: the one that does it has no point, and the others are graded.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from blank import Parser
from course import copies
from course.exercises import EXERCISES, LESSONS

NAMES = [exercise.name for exercise in EXERCISES]
HONEST = __doc__.strip().splitlines()[-1]
LENGTH = 200  # of a sentence
MARKS = {"solved": "1", "blank": "b", "failing": "0", "untested": "0", "missing": "-"}
FLAT = re.compile(rf"(?P<who>[^_]+)_.*?(?P<lesson>{'|'.join(LESSONS)})(-(?P<n>\d+))?\.py")
Row = namedtuple("Row", "name states sentences")  # states: exercise -> a key of MARKS


# ---- one submission -----------------------------------------------------------------------------

def clean(text):
    """One printable line of at most LENGTH characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."


def run_rules(copy, arguments, seconds, stop):
    """Run pytest in the copy: (what became of each exercise, or None; how its process ended)."""
    report = copy.root.parent / "report.xml"
    report.unlink(missing_ok=True)
    process = copy.start([*arguments, f"--junitxml={report}"],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end and not stop.is_set():
            time.sleep(0.05)
        how = process.poll()
    finally:
        copies.kill(process)
    if how is None:
        return None, f"still running after {seconds:.0f} seconds"
    return (copies.results(report) if report.exists() else None,
            f"ended the process (status {how})")  # -n: by signal n


def judged(copy, seconds, stop):
    """{exercise: (state, message)} of a submission."""
    found, _ = run_rules(copy, ["-m", "rule", *copies.RULES], seconds, stop)
    if found:
        return found
    found = {}
    for exercise in EXERCISES:  # one of them has hung or died
        found[exercise.name] = "missing", ""
        if exercise.file in copy.files and not stop.is_set():
            one, how = run_rules(copy, ["-k", exercise.name], seconds / 4, stop)
            failed = "failing", f"{exercise.name}: {how}"
            found[exercise.name] = one[exercise.name] if one else failed
    return found


def grade(submission, seconds, stop):
    """The row of one submission."""
    nothing = dict.fromkeys(NAMES, "missing")
    try:
        with copies.laid_over(submission) as copy:
            found = judged(copy, seconds, stop)
            messages = [copy.with_own_names(text.split("hint:")[0]) for _, text in found.values()]
    except (ValueError, OSError) as error:
        return Row(clean(submission.name), nothing, [clean(str(error))])
    except Exception as error:  # whatever it is, the others must be graded
        return Row(clean(submission.name), nothing, [
            clean(f"the grader failed: {type(error).__name__}: {error}")])
    states = {name: state for name, (state, _) in found.items()}
    sentences = [clean(copies.first_sentence(text)) for text in messages if text]
    told_once = {}  # one cause may break several exercises: the first tells it
    for sentence in sentences:
        told_once.setdefault(sentence.split(": ", 1)[-1], sentence)
    return Row(clean(submission.name), states, [*told_once.values()] or ["all solved"])


# ---- the class ----------------------------------------------------------------------------------

def find_submissions(folder, sorted_into):
    """The students' folders, by name; files of a flat download are sorted into folders there.

    ValueError if there is none, or if it is the folder of one student.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds the submissions")
    there = sorted(path for path in folder.iterdir() if not copies.hidden(path.name))
    if any(path.name.removesuffix(".py") in LESSONS and path.is_file() for path in there):
        raise ValueError(f"{folder} holds lesson files, so it is the folder of one student; name "
                         "the folder above it")
    found = [path for path in there if path.is_dir()]
    flat = sorted((match["who"], match["lesson"], int(match["n"] or 0), path)
                  for path in there if (match := FLAT.fullmatch(path.name)))
    for who, lesson, _, path in flat:  # the last one overwrites the others
        (sorted_into / who).mkdir(exist_ok=True)
        shutil.copyfile(path, sorted_into / who / f"{lesson}.py")
    found += sorted({sorted_into / who for who, *_ in flat})
    found += [path for path in there if path not in found and path not in [f[-1] for f in flat]]
    if not found:
        raise ValueError(f"{folder} holds no submission; put a folder for each student into it")
    return sorted(found, key=lambda path: path.name)


def grade_all(submissions, jobs, seconds):
    """The rows, in the order of the submissions; progress on stderr."""
    stop, pool = threading.Event(), ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(grade, path, seconds, stop) for path in submissions]
        for k, future in enumerate(as_completed(futures), 1):
            print(f"{k} of {len(futures)}: {future.result().name}", file=sys.stderr, flush=True)
        return [future.result() for future in futures]
    finally:
        stop.set()  # after Ctrl-C the processes still run
        pool.shutdown(cancel_futures=True)


def points(row):
    return list(row.states.values()).count("solved")


def table(rows, all_mistakes=False):
    """What is printed: for each submission the marks and below them its sentences; the legend."""
    numbers = "".join(f"{i:3}" for i in range(1, len(NAMES) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        marks = "".join(f"{MARKS[row.states[name]]:>3}" for name in NAMES)
        lines += textwrap.wrap(row.name, 100)[:-1]
        name = textwrap.wrap(row.name, 100)[-1]
        if len(name) > 30:
            lines, name = [*lines, name], ""
        lines += [f"{name:<30} {f'{points(row)}/{len(NAMES)}':>6} {marks}"]
        for sentence in row.sentences if all_mistakes else row.sentences[:1]:
            lines += textwrap.wrap(sentence, 96, initial_indent="    ", subsequent_indent="      ")
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(NAMES, 1))
    meaning = "1 solved, 0 wrong, b blank, - not handed in."
    lines += ["", *textwrap.wrap(f"{meaning}  {legend}", 100), HONEST]
    return "\n".join(lines)


def write_csv(path, rows):
    """The rows as a file; a cell that a spreadsheet would take for a formula gets a ' in front."""
    def text(cell):
        return f"'{cell}" if cell.startswith(tuple("=+-@")) else cell
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["submission", "points", *NAMES, "sentences"])
        for row in rows:
            marks = [MARKS[row.states[name]].strip("-") for name in NAMES]
            writer.writerow([text(row.name), points(row), *marks, text(" | ".join(row.sentences))])


def reserve(path):
    """Where the csv stands until it is whole.  ValueError now, not after the grading."""
    part = Path(f"{path}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        part.open("w").close()
    except OSError as error:
        raise ValueError(f"--csv {path}: {error.strerror}; name a file in a folder that exists and "
                         "can be written") from None
    return part


def parse(argv):
    """The command line.  ValueError: one sentence."""
    parser = Parser(prog="grade.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--all-mistakes", action="store_true",
                        help="print a sentence for each exercise that is not solved")
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count() or 1,
                        help="submissions at a time (default: the cores, %(default)s)")
    parser.add_argument("--seconds", type=int, metavar="S", default=120,
                        help="for one submission; a quarter of it for an exercise that is run by "
                        "itself (default: 120)")
    given = parser.parse_args(argv)
    if given.jobs < 1 or given.seconds < 12:
        raise ValueError(f"--jobs {given.jobs} --seconds {given.seconds}: at least 1 job and 12 "
                         "seconds are needed")
    return given


def main(argv=None):
    """Grade the class.  Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    part = None
    try:
        given = parse(argv)
        with tempfile.TemporaryDirectory() as temporary:
            submissions = find_submissions(given.folder, Path(temporary))
            part = given.csv and reserve(given.csv)
            rows = grade_all(submissions, given.jobs, given.seconds)
        print(table(rows, given.all_mistakes))
        if part:
            write_csv(part, rows)
            os.replace(part, given.csv)
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngrade.py: stopped, and nothing was written", file=sys.stderr)
        return 130
    finally:
        if part:
            part.unlink(missing_ok=True)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a name that the terminal cannot show
    sys.exit(main())
