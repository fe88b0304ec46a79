"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table
    python tests/grade.py submissions/ --only lanes,reach  this week's exercises
    python tests/grade.py submissions/ --csv grades.csv    also a file, with all sentences
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ contains a folder or a .zip archive for each student, or it is the flat download of
Canvas, Moodle or Blackboard.  Only the last copy of each lesson file is read.  If file names do not
tell two students apart, nothing is graded; one folder for each student always works.

If the process of a student hangs or dies, the exercise that it was testing gets no point, and
another process grades the remaining exercises.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import argparse
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
from pathlib import Path, PurePath
from subprocess import DEVNULL, STDOUT

from blank import Parser, exercises_called, write_whole
from course import lessons
from course.exercises import BY_NAME, LESSONS, ROOT

DISCLAIMER = __doc__.strip().splitlines()[-1]
SECONDS = 60  # without a result, after which a process is killed; a rule has ten of CPU time
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-", "refused": "-"}
REMEDY = "put the files of each student into a folder"
PLATFORMS = (  # the file names of Canvas, Moodle and Blackboard
    r"(?P<who>[^_\s]+_(LATE_)?\d+|anon_(LATE_)?[^_]+)_\d{3,}_(?P<date>)(?P<file>.+)",
    r"(?P<who>.+_\d+)_assignsubmission_[a-z]+_(?P<date>)(?P<file>.+)",
    r"(?P<who>.+)_attempt_(?P<date>\d+(-\d+){5})_(?P<file>.+)")


@dataclass
class Row:
    """One submission and its result."""

    name: str
    files: dict  # path, as lessons.choose_lessons needs it -> place
    left_out: list = field(default_factory=list)  # names of files that do not count
    used: str = ""  # the names of the files that count, and of those that do not
    found: dict = field(default_factory=dict)  # exercise -> (a key of MARKS, a message)

    def cells(self):
        """Return the cells of a table: the name, the points, one letter per exercise, the
        sentences, the files.  Exercises with the same cause share a sentence."""
        marks = [MARKS[state] for state, _ in self.found.values()]
        found = {}
        for state, message in self.found.values():
            if state in ("failing", "refused"):
                sentence = printable(message.split("\n  ")[0])  # without the lines below it
                found.setdefault(sentence.split(": ", 1)[-1], sentence)
        if blank := [name for name, (state, _) in self.found.items() if state == "blank"]:
            found["blank"] = f"blank: {', '.join(blank)}"
        points = marks.count("1")
        found = found or {"": f"{points} of {len(marks)} exercises solved"}
        return self.name, points, *marks, " | ".join(found.values()), self.used


def printable(text):
    """Return the text as one line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def by_student(paths):
    """Return {student: Row} of files in one folder, with the last copy of each; student "" has the
    files that no platform has named.  Raises ValueError if two could be of two students."""
    def parsed(path):
        match = next(filter(None, (re.fullmatch(form, path.name) for form in PLATFORMS)), None)
        if not match:
            return "", "", path.name
        name, copy = lessons.split_copy(match["file"])
        return match["who"].replace("_LATE", ""), (match["date"], copy), name
    rows = {}
    for path in sorted(paths, key=lambda path: (*parsed(path)[:2], path)):
        who, age, name = parsed(path)
        row = rows.setdefault(who, Row(printable(who), {}))
        if earlier := row.files.get(PurePath(name)):
            if parsed(earlier)[1] == age:
                raise ValueError(f"{earlier.name} and {path.name} may be of two students; {REMEDY}")
            row.left_out.append(earlier.name)
        row.files[PurePath(name)] = path
    return rows


def submission(place):
    """Return the Row of one student's folder or archive."""
    return Row(printable(place.name), lessons.visible_files(place) if place.is_dir() else {
        PurePath(place.name): place})


def find_submissions(folder):
    """Return the rows of a class by name.  Raises ValueError if there is no submission, or if it
    is unclear whose a file is."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds the submissions")
    there = sorted(path for path in folder.iterdir()
                   if not lessons.is_hidden(path.relative_to(folder)))
    rows = by_student(path for path in there if path.is_file())
    others = rows.pop("", Row("", {})).files.values()
    rows = [*rows.values(), *map(submission, filter(Path.is_dir, there))]
    for path in others:
        if path.suffix.lower() == ".zip":
            rows.append(submission(path))
        elif re.search(r"\.(py|ipynb|tar|t?gz|xz|bz2|rar|7z)(\.txt)?$", path.name.lower()):
            raise ValueError(f"it is unclear whose file {path.name} is; {REMEDY}, and name the "
                             "folder that holds all of them, not the folder of one student")
        else:
            print(f"{path.name} is not a submission", file=sys.stderr)
    if not rows:
        raise ValueError(f"{folder} holds no submission; {REMEDY}")
    return sorted(rows, key=lambda row: row.name)


def take_lessons(row):
    """Return {lesson: its bytes}, and note in the row which files count and which do not."""
    content = {}
    for name, place in row.files.items():
        content[name] = place.read_bytes() if lessons.NAME.fullmatch(name.name) else None
        with suppress(Exception), zipfile.ZipFile(place) as archive:  # others are left out
            for path, member in ((name / member, member) for member in archive.namelist()):
                if lessons.NAME.fullmatch(path.name) and not lessons.is_hidden(path):
                    content[path] = archive.read(member)
    row.used = f"graded: none; left out: {listed(row.left_out + list(row.files))}"
    chosen = lessons.choose_lessons(content, row.name)
    used = {part for path in chosen.values() for part in (path, *path.parents)}
    left_out = [path for path in content if path not in used and (
        path in row.files or path.parent in used)]  # an archive, not each file in it
    taken, left_out = ([path.with_name(row.files[path].name) if path in row.files else path
                        for path in paths] for paths in (chosen.values(), left_out))
    row.used = f"graded: {listed(taken)}; left out: {listed(row.left_out + left_out)}"
    return {lesson: content[path] for lesson, path in chosen.items()}


def listed(paths):
    """Return the first paths as text."""
    return ", ".join([*map(str, paths[:9]), *["..."] * (len(paths) > 9)]) or "none"


async def run_rules(folder, names):
    """Run the rules of these exercises on folder/lessons; return the notes of the process and
    how it ended."""
    report, output = folder / "report", folder / "output"
    report.write_text("")
    environment = os.environ | {
        "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with open(output, "w") as stdout:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pytest", "-c", ROOT / "pytest.ini", "--confcutdir", ROOT,
            "-k", " or ".join(names), ROOT / "tests", cwd=folder, env=environment,
            stdin=DEVNULL, stdout=stdout, stderr=STDOUT, start_new_session=True)
    size, silence, how = 0, 0, f"still running after {SECONDS} seconds"
    try:
        while silence < SECONDS and process.returncode is None:
            with suppress(asyncio.TimeoutError):
                how = f"ended the process (status {await asyncio.wait_for(process.wait(), 1)})"
            before, size = size, report.stat().st_size
            silence = silence + 1 if size == before else 0
    finally:
        with suppress(OSError):  # with every process that it has started
            getattr(os, "killpg", os.kill)(process.pid, 9)
        await process.wait()
    notes = [json.loads(line) for line in report.read_text("utf-8").splitlines()]
    if not any("imported" in note for note in notes):  # pytest says why
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
            found |= {z["exercise"]: (z["state"], z["message"] or f"{z['exercise']}: solved")
                      for z in notes if "exercise" in z}
            at_fault = [name for name in todo if name not in found]
            file = notes[-1].get("importing") if notes else None
            if files.pop(file, None) is not None:  # the process ended while it imported this file
                (folder / "lessons" / f"{file}.py").unlink()
                at_fault = [name for name in at_fault if BY_NAME[name].file == file]
                how = f"{file}.py: {how}"
            elif any("imported" in note for note in notes):
                at_fault = at_fault[:1]
            found |= {name: ("failing", f"{name}: {how}") for name in at_fault}
    return found


async def grade_all(rows, names):
    """Grade these submissions, as many at a time as there are cores; print progress on stderr.
    Raises OSError if our own lessons do not pass here, because then no student's could."""
    ours = {file: lessons.pristine(file).encode() for file in LESSONS}
    for state, message in (await judged(ours, names)).values():
        if state != "solved":
            raise OSError("nothing was graded, because our own solutions fail; are all packages of "
                          f"requirements.txt installed for {sys.executable}? {printable(message)}")
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
                      DISCLAIMER])


def as_csv(rows):
    """Return the rows as CSV; a text that a spreadsheet would run as a formula begins with '."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["submission", "points", *rows[0].found, "sentences", "files"])
    for row in rows:
        writer.writerow(f"'{cell}" if re.match(r"[=+@-].", str(cell)) else cell
                        for cell in row.cells())
    return file.getvalue()


def gradescope(rows):
    """Return Gradescope's results.json of the only row: one test of one point per exercise."""
    tests = [{"name": name, "score": float(state == "solved"), "max_score": 1.0,
              "output": message, "visibility": "visible"}
             for name, (state, message) in rows[0].found.items()]
    return json.dumps({"output": rows[0].used, "visibility": "visible", "tests": tests}, indent=1)


def main(argv=None):
    """Grade, and return the exit status: 0, 1 after an error, 130 after Ctrl-C."""
    try:
        parser = Parser(prog="grade.py", description=__doc__, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
        parser.add_argument("--only", metavar="NAME,NAME", help="grade only these exercises")
        parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table to FILE")
        parser.add_argument("--gradescope", type=Path, metavar="FILE",
                            help="grade one student's folder or archive; write results.json")
        given = parser.parse_args(argv)
        names = [exercise.name for exercise in exercises_called(given.only)]
        if given.csv and (given.csv.is_dir() or not given.csv.parent.is_dir()):
            raise ValueError(f"--csv {given.csv} is a folder, or its folder does not exist; choose "
                             "a file in an existing folder")
        rows = [submission(given.folder)] if given.gradescope else find_submissions(given.folder)
        asyncio.run(grade_all(rows, names))
        print(table(rows))
        for path, text in (given.gradescope, gradescope), (given.csv, as_csv):
            if path:
                write_whole(path, text(rows))
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngrade.py: stopped, and nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # for names that the terminal cannot display
    sys.exit(main())
