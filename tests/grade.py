"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table
    python tests/grade.py submissions/ --only lanes,reach  this week's exercises
    python tests/grade.py submissions/ --csv grades.csv    also a file, with all sentences
    python tests/grade.py submissions/ --feedback texts/   also a text for each student
    python tests/grade.py anna/ --gradescope results.json  one student, in Gradescope's form

submissions/ contains one .zip archive per student, as blank.py --submit packs it, or one folder per
student.  If a process hangs or dies, only the exercise that it was testing gets no point.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import asyncio
import csv
import io
import json
import os
import re
import stat
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath

from blank import Parser, exercises_called, write_whole
from course import lessons
from course.exercises import BY_NAME, LESSONS, ROOT
from support.names import printable, visible

SECONDS = 60  # a process without a new result in this time is killed; a rule has ten of CPU time
MARKS = {"solved": "1", "blank": "b", "failing": "0", "missing": "-", "refused": "-"}
# a name that could be a lesson's: train (1).py, but no test and no folder
LIKE = re.compile(rf"(?<!test_)(?<!mistakes_)({'|'.join(LESSONS)}).*\.", re.IGNORECASE)
REMEDY = "hand in one .zip per student, as blank.py --submit packs it"
MB = 1 << 20


@dataclass
class Row:
    """One submission and its result."""

    place: Path  # a folder or an archive; all else is refused
    graded: list = field(default_factory=list)  # the lesson files that count
    left_out: list = field(default_factory=list)  # what looks like one
    found: dict = field(default_factory=dict)  # exercise -> (a key of MARKS, a message, its body)
    remark: str = ""  # for the teacher only

    def cells(self):
        """Return the cells of a table.  Exercises with the same cause share a sentence."""
        marks, sentences = [MARKS[state] for state, *_ in self.found.values()], {}
        for state, message, _ in self.found.values():
            if state in ("failing", "refused"):
                sentence = message.split("\n  ")[0][:300]  # without the lines below it
                sentences.setdefault(sentence.split(": ", 1)[-1], sentence)
        if blank := [name for name, (state, *_) in self.found.items() if state == "blank"]:
            sentences["blank"] = f"blank: {', '.join(blank)}"
        points = str(marks.count("1"))
        sentences = sentences or {"": f"{points} of {len(marks)} exercises solved"}
        graded, left_out = (", ".join(map(str, paths))[:300] or "none"
                            for paths in (self.graded, self.left_out))
        return [*map(printable, [self.place.name, points, *marks, " | ".join(sentences.values()),
                                 f"graded: {graded}; left out: {left_out}", self.remark])]


def find_submissions(folder):
    """Return the rows of a class by name: all that is visible except the files of a platform.
    Raises ValueError if it is not the folder of a class."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file or does not exist; name the folder of the class")
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "__"))
             and path.name != "index.html" and path.suffix not in (".txt", ".yml", ".csv")]
    loose = [path.name for path in paths if path.suffix == ".py" and not path.is_dir()]
    if len(loose) == len(paths):
        raise ValueError(f"{folder} has no folder, no .zip archive and {len(loose)} .py files "
                         f"({', '.join(loose[:5])}); {REMEDY}, or name the folder of the class")
    return [Row(path) for path in paths]


def content(place):
    """Yield (path, kind of file, a function that opens it) for all in a folder or an archive."""
    if isinstance(place, Path) and place.is_dir():
        for path in sorted(place.rglob("*")):
            kind = stat.S_IFMT(path.lstat().st_mode)
            yield path.relative_to(place), kind, partial(open, path, "rb")
        return
    archive = zipfile.ZipFile(place)
    for info in archive.infolist():
        kind = stat.S_IFDIR if info.is_dir() else stat.S_IFMT(info.external_attr >> 16)
        yield PurePath(info.filename), kind or stat.S_IFREG, partial(archive.open, info)


def copied(path, opens, most):
    """Return a temporary copy of a file.  Raises ValueError if it is larger than `most` MB."""
    copy = tempfile.TemporaryFile()
    with opens() as file:
        for part in iter(partial(file.read, 4096), b""):  # 1 MB of an archive may expand to 1 GB
            if copy.write(part) and copy.tell() > most * MB:
                raise ValueError(f"{path} has more than {most} MB; {REMEDY}")
    copy.seek(0)
    return copy


def take_lessons(row):
    """Return {lesson: its bytes}, of several copies the one nearest to the top; note the others in
    the row.  Archives are opened if there is no lesson file yet.  Raises ValueError."""
    name, mode, chosen = row.place.name, row.place.lstat().st_mode, {}
    if not stat.S_ISDIR(mode) and not (stat.S_ISREG(mode) and name.lower().endswith(".zip")):
        raise ValueError(f"{name} is not a folder or .zip archive (a link is neither); {REMEDY}")
    found, archives = [], {PurePath(): row.place}
    for _ in range(2 + stat.S_ISDIR(mode)):
        places, archives = archives, {}
        for folder, place in places.items():
            for path, kind, opens in content(place):
                if any(part.startswith((".", "__")) or part == lessons.PRISTINE.name
                       for part in path.parts):
                    continue  # .git, ._notes.py, __pycache__, __MACOSX and our solutions
                if kind == stat.S_IFREG and path.stem in LESSONS and path.suffix == ".py":
                    found.append((folder / path, opens))
                elif kind == stat.S_IFREG and path.suffix.lower() == ".zip":
                    archives[folder / path] = opens
                elif LIKE.search(path.name[:99]) or kind not in (stat.S_IFREG, stat.S_IFDIR):
                    row.left_out.append(folder / path)
        if found:
            break
        if len(archives) > 9:  # at each depth, of 100 MB each
            raise ValueError(f"{name} holds {len(archives)} archives; {REMEDY}")
        archives = {path: copied(path, opens, 100) for path, opens in archives.items()}
    row.left_out += archives
    if not found:
        raise ValueError(f"{name} holds no lesson file ({LESSONS[0]}.py, ..., {LESSONS[-1]}.py); "
                         + REMEDY)
    for path, opens in sorted(found, key=lambda pair: len(pair[0].parts)):
        first, _ = chosen.setdefault(path.stem, (path, opens))
        if first is not path and len(first.parts) == len(path.parts):
            raise ValueError(f"{name} holds {first} and {path}; leave one of them")
        (row.graded if first is path else row.left_out).append(path)
    return {lesson: copied(path, opens, 1).read() for lesson, (path, opens) in chosen.items()}


async def run_rules(files, names):
    """Run these rules on lesson files; return what read_report returns, and how the process ended.
    The report is in another folder than the student's lessons and temporary files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as theirs, (
            tempfile.TemporaryDirectory()) as ours, tempfile.TemporaryFile() as output:
        folder, report = Path(theirs).resolve(), Path(ours).resolve() / "report"
        report.touch()
        (folder / "lessons").mkdir()
        for lesson, data in files.items():
            (folder / "lessons" / f"{lesson}.py").write_bytes(data)
        environment = os.environ | {
            "XL_CODE": str(folder / "lessons"), "XL_REPORT": str(report), "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-Bm", "pytest", "-c", ROOT / "pytest.ini", "--confcutdir", ROOT,
            "-k", " or ".join(names), "--continue-on-collection-errors",  # a lesson lacks a name
            ROOT / "tests", cwd=folder, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        size, how = -1, f"still running after {SECONDS} seconds"
        try:
            while process.returncode is None and size < (size := report.stat().st_size):
                with suppress(asyncio.TimeoutError):
                    status = await asyncio.wait_for(process.wait(), SECONDS)
                    how = f"ended the process (status {status})"
        finally:
            with suppress(OSError):  # with every process that it has started
                getattr(os, "killpg", os.kill)(process.pid, 9)
            await process.wait()
        with open(report, "rb") as file:
            importing, found = read_report(file.read(MB), names)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 1000))
        if importing and (last := output.read().decode(errors="replace").strip().splitlines()):
            how = f"{how}: {last[-1]}"  # pytest says why
    return importing, found, how


def read_report(data, names):
    """Return the lesson whose import a report ends in, or "", and what was noted after the imports:
    {exercise: (state, message, body)}.  Raises ValueError for a line of another form."""
    importing, found = "the tests", {}
    try:
        for line in data.split(b"\n")[:-1]:  # the complete ones
            match json.loads(line):
                case {"importing": str(lesson)}:
                    importing, found = lesson, {}
                case {"imported": _}:
                    importing, found = "", {}
                case {"exercise": name, "state": "solved" | "blank" | "failing" as state,
                      "message": str(message), "body": str(body)} if name in names:
                    result = state, message, body
                    if not importing and found.setdefault(name, result) != result:
                        found[name] = "failing", f"{name}: its results contradict each other", ""
                case _:
                    raise ValueError(line)
    except (ValueError, RecursionError):
        raise ValueError("the report of the tests has a line that they do not write; read this "
                         "student's code") from None
    return importing, found


async def judged(files, names):
    """Return {exercise: (state, message, body)} for lesson files, {lesson: bytes}."""
    found = {}
    while todo := [name for name in names if name not in found and BY_NAME[name].file in files]:
        importing, noted, how = await run_rules(files, todo)
        found |= noted
        at_fault = [name for name in todo if name not in found]
        if not importing:
            at_fault = at_fault[:1]
        elif importing in files:
            at_fault = [name for name in at_fault if BY_NAME[name].file == importing]
            files = {lesson: data for lesson, data in files.items() if lesson != importing}
            how = f"{importing}.py: {how}"
        found |= {name: ("failing", f"{name}: {how}", "") for name in at_fault}
    return found


async def grade_all(rows, names, path):
    """Grade these submissions; after each, write what is known as CSV and print its name.
    Raises OSError if our own lessons do not pass here, because then no student's could."""
    ours = await judged({file: lessons.pristine(file).encode() for file in LESSONS}, names)
    for state, message, _ in ours.values():
        if state != "solved":
            raise OSError("nothing was graded, because our own solutions fail; are all packages of "
                          f"requirements.txt installed for {sys.executable}? {message}")
    free = asyncio.Semaphore(os.cpu_count() or 1)  # each needs a core and 0.7 GB

    async def grade(row):
        async with free:
            found = {name: ("missing", f"{name}: not handed in", "") for name in names}
            try:
                found |= await asyncio.wait_for(judged(take_lessons(row), names), 60 * SECONDS)
            except Exception as error:  # the other students must be graded
                why = {zipfile.BadZipFile: "a .zip archive is damaged: ",
                       asyncio.TimeoutError: "not graded in an hour: "}.get(type(error), "")
                found = dict.fromkeys(names, ("refused", why + (str(error) or repr(error)), ""))
                row.graded = []
        row.found = found
        for known in rows:
            known.remark = remark(known, rows, ours)
        if path:
            write_whole(path, as_csv(rows, names))
        print(printable(row.place.name), file=sys.stderr, flush=True)
    await asyncio.gather(*map(grade, rows))


def remark(row, rows, shipped):
    """Return which bodies of a row equal the shipped ones, and which those of others: of nine
    statements or more, because shorter ones are equal by chance."""
    equal = {}
    for name, (*_, body) in row.found.items():
        others = [other.place.name for other in rows if other is not row and other.found
                  and other.found[name][-1] == body > "009"]
        if names := ["shipped"] if body and body == shipped[name][-1] else others:
            equal.setdefault(", ".join(names), []).append(name)
    return " | ".join(f"as {who}: {', '.join(names)}" for who, names in equal.items())[:300]


def table(rows):
    """Return the table as text: marks, a sentence and files per submission, then the legend."""
    numbers = "".join(f"{number:>3}" for number in range(1, len(rows[0].found) + 1))
    lines = [f"{'submission':<30} points {numbers}"]
    for name, points, *marks, sentences, files, remark in (row.cells() for row in rows):
        lines += [f"{name:<30} {points:>6} " + "".join(f"{mark:>3}" for mark in marks)]
        lines += [f"    {text}" for text in (sentences.split(" | ")[0], files, remark) if text]
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(rows[0].found, 1))
    return "\n".join([*lines, "", "1 solved, 0 incorrect, b blank, - not handed in", legend,
                      __doc__.splitlines()[-1]])


def as_csv(rows, names):
    """Return the rows as CSV, with empty cells for those that are not graded yet; a text that a
    spreadsheet would run as a formula begins with '."""
    header = ["submission", "points", *names, "sentences", "files", "remark"]
    file = io.StringIO(newline="")
    out = csv.DictWriter(file, header, quoting=csv.QUOTE_ALL)
    out.writeheader()
    for row in rows:
        cells = [re.sub("^(?=[-=+@－＝＋＠].)", "'", cell) for cell in row.cells()]
        out.writerow(dict(zip(header, cells if row.found else cells[:1])))
    return file.getvalue()


def results(row):
    """Return what a student reads, without the remark, as a text and as Gradescope's JSON: one test
    of one point per exercise."""
    tests = [{"name": name, "score": float(state == "solved"), "max_score": 1.0,
              "output": message or f"{name} is solved", "visibility": "visible"}
             for name, (state, message, _) in row.found.items()]
    texts = [*dict.fromkeys(test["output"] for test in tests), files := row.cells()[-2]]
    return visible("\n\n".join(texts)) + "\n", json.dumps(
        {"output": files, "visibility": "visible", "tests": tests})


def main(argv=None):
    """Grade, and return the exit status: 0, or 1 after a one-line error."""
    try:
        parser = Parser(prog="grade.py", description=__doc__)
        parser.add_argument("folder", type=Path, metavar="SUBMISSIONS")
        parser.add_argument("--only", metavar="NAME,NAME")
        for flag in ("--csv", "--feedback", "--gradescope"):
            parser.add_argument(flag, type=Path, metavar="PATH")
        given = parser.parse_args(argv)
        names = [exercise.name for exercise in exercises_called(given.only)]
        for path in filter(None, (given.csv, given.gradescope)):
            if path.is_symlink() or path.exists() > path.is_file() or not path.parent.is_dir():
                raise ValueError(f"{path} is no regular file, or is in no folder; choose another")
        if (path := given.feedback) and (any(path.glob("*")) or path.exists() > path.is_dir()):
            raise ValueError(f"--feedback {path} is not an empty folder; choose a new one")
        rows = [Row(given.folder)] if given.gradescope else find_submissions(given.folder)
        asyncio.run(grade_all(rows, names, given.csv))
        print(table(rows))
        for number, row in enumerate(rows if given.feedback else (), 1):
            name = row.place.name
            name = name if len(os.fsencode(name)) <= 240 else f"{number} {name[:50]}"
            write_whole(given.feedback / f"{name}.txt", results(row)[0])
        if given.gradescope:
            write_whole(given.gradescope, results(rows[0])[1])
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {printable(str(error))}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
