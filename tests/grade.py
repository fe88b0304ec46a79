"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table
    python tests/grade.py submissions/ --only lanes,reach  this week's exercises
    python tests/grade.py submissions/ --csv grades.csv    also a file, with all sentences
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ contains a folder or a .zip archive for each student, or it is the flat download of
Canvas, Moodle or Blackboard.  If file names do not tell two students apart, nothing is graded; one
folder for each student always works.  If a process hangs or dies, only the exercise that it was
testing gets no point.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import asyncio
import csv
import io
import json
import os
import re
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from textwrap import shorten

from blank import Parser, exercises_called, write_whole
from course import lessons
from course.exercises import BY_NAME, LESSONS, ROOT

SECONDS = 60  # a process without a new result in this time is killed; a rule has ten of CPU time
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-", "refused": "-"}
REMEDY = "put the files of each student into a folder"


@dataclass
class Row:
    """One submission and its result."""

    name: str
    files: dict = field(default_factory=dict)  # path, as lessons.choose_lessons needs it -> place
    handed_in: list = field(default_factory=list)  # the names of all files
    graded: list = field(default_factory=list)  # the names of those that count
    found: dict = field(default_factory=dict)  # exercise -> (a key of MARKS, a message)

    def cells(self):
        """Return the cells of a table: the name, the points, one letter per exercise, the
        sentences, the files.  Exercises with the same cause share a sentence."""
        marks = [MARKS[state] for state, _ in self.found.values()]
        found = {}
        for state, message in self.found.values():
            if state in ("failing", "refused"):
                sentence = message.split("\n  ")[0]  # without the lines below it
                found.setdefault(sentence.split(": ", 1)[-1], sentence)
        if blank := [name for name, (state, _) in self.found.items() if state == "blank"]:
            found["blank"] = f"blank: {', '.join(blank)}"
        found = found or {"": f"{marks.count('1')} of {len(marks)} exercises solved"}
        left_out = ", ".join(name for name in self.handed_in if name not in self.graded) or "none"
        used = (f"graded: {', '.join(self.graded) or 'none'}; left out: "
                + shorten(left_out, 300, placeholder=" ..."))
        cells = self.name, str(marks.count("1")), *marks, " | ".join(found.values()), used
        return ["".join(c if c.isprintable() else " " for c in cell) for cell in cells]


def by_student(paths):
    """Return {student: Row} of files and folders; student "" has the files of nobody."""
    rows = {}
    for (who, copy, name), path in sorted((lessons.parsed(path), path) for path in paths):
        row = rows.setdefault(who, Row(who))
        earlier, folder = row.files.get(name), path.parent / who
        has_folder = who and path.is_file() and folder.is_dir()
        if has_folder or earlier and lessons.parsed(earlier)[1] == copy:
            twin = folder.name if has_folder else earlier.name
            raise ValueError(f"{twin} and {path.name} may be of two students; {REMEDY}")
        row.handed_in += [earlier.name] if earlier else []
        row.files |= lessons.visible_files(path) if path.is_dir() else {name: path}
    return rows


def find_submissions(folder):
    """Return the rows of a class by name.  Raises ValueError if it is unclear whose a file is."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file or does not exist; name the folder of the class")
    rows = by_student(path for path in folder.iterdir()
                      if not lessons.is_hidden(PurePath(path.name)))
    for path in rows.pop("", Row("")).files.values():
        if re.search(r"\.(py|ipynb|tar|t?gz|xz|bz2|rar|7z)(\.txt)?$", path.name.lower()):
            raise ValueError(f"it is unclear whose file {path.name} is; {REMEDY}, and name the "
                             "folder that holds all of them, not the folder of one student")
        print(f"{path.name} is not a submission", file=sys.stderr)
    if not rows:
        raise ValueError(f"{folder} holds no submission; {REMEDY}")
    return [*rows.values()]


def take_lessons(row):
    """Return {lesson: its bytes}, and note in the row which files there are and which count."""
    files = {}  # path -> its name, a function that reads it
    for path, place in row.files.items():
        name, members = path.with_name(place.name), {}
        if zipfile.is_zipfile(place):
            archive = zipfile.ZipFile(place)
            members = {path / member: (str(name / member), partial(archive.read, member))
                       for member in archive.namelist()}
        files |= {path: members[path] for path in members if lessons.NAME.fullmatch(path.name)
                  and not lessons.is_hidden(path)} or {path: (str(name), place.read_bytes)}
    row.handed_in += [name for name, _ in files.values()]
    chosen = lessons.choose_lessons(files, row.name)
    row.graded = [files[path][0] for path in chosen.values()]
    return {lesson: files[path][1]() for lesson, path in chosen.items()}


async def run_rules(folder, names):
    """Run these rules on folder/lessons; return the notes of the process and how it ended."""
    report, output = folder / "report", folder / "output"
    report.write_text('{"importing": null}\n')
    environment = os.environ | {
        "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with open(output, "w") as stdout:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-Bm", "pytest", "-c", ROOT / "pytest.ini", "--confcutdir", ROOT,
            "-k", " or ".join(names), "--continue-on-collection-errors",  # a lesson lacks a name
            ROOT / "tests", cwd=folder, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=stdout, stderr=stdout, start_new_session=True)
    size, how = 0, f"still running after {SECONDS} seconds"
    try:
        while process.returncode is None and size < (size := report.stat().st_size):
            with suppress(asyncio.TimeoutError):
                status = await asyncio.wait_for(process.wait(), SECONDS)
                how = f"ended the process (status {status})"
    finally:
        with suppress(OSError):  # with every process that it has started
            getattr(os, "killpg", os.kill)(process.pid, 9)
        await process.wait()
    notes = [json.loads(line) for line in report.read_text("utf-8").splitlines()]
    if "importing" in notes[-1]:  # pytest says why
        how = ": ".join([how, *output.read_text(errors="replace").strip().splitlines()[-1:]])
    return notes, how


async def judged(files, names):
    """Return {exercise: (state, message)} for lesson files, {lesson: bytes}."""
    found = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary).resolve()
        (folder / "lessons").mkdir()
        for lesson, data in files.items():
            (folder / "lessons" / f"{lesson}.py").write_bytes(data)
        while todo := [n for n in names if n not in found and BY_NAME[n].file in files]:
            notes, how = await run_rules(folder, todo)
            found |= {n["exercise"]: (n["state"], n["message"]) for n in notes if "exercise" in n}
            at_fault = [name for name in todo if name not in found]
            if "importing" not in notes[-1]:
                at_fault = at_fault[:1]
            elif (place := folder / "lessons" / f"{notes[-1]['importing']}.py").exists():
                place.unlink()
                at_fault = [name for name in at_fault if BY_NAME[name].file == place.stem]
                how = f"{place.name}: {how}"
            found |= {name: ("failing", f"{name}: {how}") for name in at_fault}
    return found


async def grade_all(rows, names):
    """Grade these submissions, as many at a time as there are cores; print progress on stderr.
    Raises OSError if our own lessons do not pass here, because then no student's could."""
    ours = {file: lessons.pristine(file).encode() for file in LESSONS}
    for state, message in (await judged(ours, names)).values():
        if state != "solved":
            raise OSError("nothing was graded, because our own solutions fail; are all packages of "
                          f"requirements.txt installed for {sys.executable}? {message}")
    free = asyncio.Semaphore(os.cpu_count() or 1)  # each needs a core and 0.7 GB

    async def grade(row):
        async with free:
            row.found = {name: ("missing", f"{name}: not handed in") for name in names}
            try:
                row.found |= await judged(take_lessons(row), names)
            except Exception as error:  # of any kind: the other students must be graded
                row.found = dict.fromkeys(names, ("refused", str(error) or repr(error)))
        print(row.name, file=sys.stderr, flush=True)
    await asyncio.gather(*map(grade, rows))


def table(rows):
    """Return the table as text: marks and two sentences per submission, then the legend."""
    numbers = "".join(f"{number:>3}" for number in range(1, len(rows[0].found) + 1))
    lines = [f"{'submission':<30} points {numbers}"]
    for name, points, *marks, sentences, used in (row.cells() for row in rows):
        lines += [f"{name:<30} {points:>6} " + "".join(f"{mark:>3}" for mark in marks),
                  f"    {sentences.split(' | ')[0]}", f"    {used}"]
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(rows[0].found, 1))
    return "\n".join([*lines, "", "1 solved, 0 incorrect, b blank, - not handed in", legend,
                      __doc__.splitlines()[-1]])


def as_csv(rows):
    """Return the rows as CSV; a text that a spreadsheet would run as a formula begins with '."""
    file = io.StringIO(newline="")
    header = ["submission", "points", *rows[0].found, "sentences", "files"]
    csv.writer(file).writerows([header, *(
        [re.sub(r"^(?=[=+@-].)", "'", cell) for cell in row.cells()] for row in rows)])
    return file.getvalue()


def gradescope(rows):
    """Return Gradescope's results.json of the only row: one test of one point per exercise."""
    tests = [{"name": name, "score": float(state == "solved"), "max_score": 1.0,
              "output": message or "solved", "visibility": "visible"}
             for name, (state, message) in rows[0].found.items()]
    return json.dumps({"output": rows[0].cells()[-1], "visibility": "visible", "tests": tests})


def main(argv=None):
    """Grade, and return the exit status: 0, or 1 after a one-line error."""
    try:
        parser = Parser(prog="grade.py", description=__doc__)
        parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
        parser.add_argument("--only", metavar="NAME,NAME", help="grade only these exercises")
        parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table to FILE")
        parser.add_argument("--gradescope", type=Path, metavar="FILE", help="grade one student")
        given = parser.parse_args(argv)
        names = [exercise.name for exercise in exercises_called(given.only)]
        if given.csv and (given.csv.is_dir() or not given.csv.parent.is_dir()):
            raise ValueError(f"--csv {given.csv} is a folder or in no folder; choose another file")
        rows = find_submissions(given.folder) if not given.gradescope else [
            *by_student([given.folder]).values()]
        asyncio.run(grade_all(rows, names))
        print(table(rows))
        for path, text in (given.gradescope, gradescope), (given.csv, as_csv):
            if path:
                write_whole(path, text(rows))
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
