"""The lessons under test: where they are, what keeps one from being tested, the shipped solutions.

They are those of this folder or, with XL_CODE, the files that somebody else has handed in.  Ours
stand in for a lesson that is missing or broken, but only so that the others can be imported.
"""
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from course.exercises import LESSONS, ROOT, find

TESTS = ROOT / "tests"
PRISTINE = TESTS / "course" / "pristine"  # of lessons that are blank: as they were before that
under_test = {file: ROOT / f"{file}.py" for file in LESSONS}  # the files that are judged
broken = {}  # lesson -> one sentence, if it cannot be imported
home = None  # the temporary folder in which somebody else's code runs, if it is under test
MEMORY = 4 << 30  # bytes that it may have, over what torch itself takes
FILE_SIZE = 100 << 20  # bytes of one file that it writes
COPY = r"(-\d+| \(\d+\))"  # what a browser adds to a name that is there already


# ---- somebody else's lessons --------------------------------------------------------------------

def is_hidden(name):
    """Is this not a student's work?  .git, ._notes.py, __pycache__, __MACOSX"""
    return name.startswith((".", "__"))


def copy_number(path):
    """The number that a browser or a learning platform adds to a name: 2 in x-2.py and x (2).py.
    """
    found = re.search(COPY + "$", path.stem)
    return int(found.group().strip("- ()")) if found else 0


def lesson_of(path):
    """The lesson that a file is, by its name, or None."""
    stem = re.sub(COPY + "$", "", path.stem)
    return stem if stem in LESSONS and path.suffix == ".py" else None


def find_lessons(place):
    """{lesson: path} of the lesson files in a folder, or in the one folder below it that has some.
    Of several copies the last one counts.  ValueError: one sentence."""
    place = Path(place)
    if not place.is_dir():
        raise ValueError(f"{place} is no folder; unpack archives, and name the folder with the "
                         "files of one student")
    paths = [path for path in place.rglob("*.py")
             if lesson_of(path) and not any(map(is_hidden, path.relative_to(place).parts))]
    paths.sort(key=copy_number)
    depth = min((len(path.parts) for path in paths), default=0)
    folders = sorted({path.parent for path in paths if len(path.parts) == depth})
    if len(folders) > 1:
        raise ValueError(f"{place} holds lesson files in {folders[0].name}/ and in "
                         f"{folders[1].name}/; leave one of them")
    if not folders:
        raise ValueError(
            f"{place} holds no lesson file ({LESSONS[0]}.py, ..., {LESSONS[-1]}.py); hand in the "
            "lesson's whole file, under its own name, with the function written in it")
    return {lesson_of(path): path.resolve() for path in paths if path.parent == folders[0]}


def take_lessons_from(place):
    """Test somebody else's lessons: they run, and leave their files, in a temporary folder."""
    global under_test, home
    under_test = find_lessons(place)
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    sys.dont_write_bytecode = True
    limit_resources()


def go_home():
    """Return there, wherever somebody else's code has gone."""
    if home:
        folder = Path(home.name) / "home"  # one deeper, so that .. is also temporary
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


def limit_resources():
    """Limit the memory of this process, and the size of a file that it writes (on Linux)."""
    taken = Path("/proc/self/statm")
    if taken.exists():
        import resource
        memory = int(taken.read_text().split()[0]) * resource.getpagesize() + MEMORY
        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, FILE_SIZE)):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def note(**facts):
    """Add a line to the file XL_REPORT: whatever becomes of this process, it can be read."""
    if path := os.environ.get("XL_REPORT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


# ---- the lessons, imported in order -------------------------------------------------------------

def load(file, path):
    """Import a lesson from this path, under its own name, so that every later import takes it."""
    spec = spec_from_file_location(file, path)
    sys.modules[file] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[file])


def raised(error, file):
    """An error in one line: what, and where in this file, without the frames of libraries."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f" in line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}{where}: {text[:300]}"


def sentence(error, path):
    """Why a lesson file cannot be imported, in one line."""
    if isinstance(error, SyntaxError):  # TabError, and text that is not UTF-8, among them
        where = f", line {error.lineno}" if error.lineno else ""
        return f"{path.name}{where}: {type(error).__name__}: {error.msg}"
    advice = "; the course uses numpy, torch and matplotlib only"
    return f"{path.name}: {raised(error, str(path))}" + (
        advice if isinstance(error, ModuleNotFoundError) else "")


def import_lessons(up_to=LESSONS[-1]):
    """Import all six, or those up to one.  ValueError if one is broken and nothing can stand in."""
    for file in LESSONS[: LESSONS.index(up_to) + 1]:
        note(importing=file)
        go_home()
        path = under_test.get(file, shipped_file(file))
        try:
            with time_limit(60):  # the first one imports torch
                load(file, path)
        except (Exception, SystemExit) as error:
            broken[file] = sentence(error, path)
            if path == shipped_file(file):
                raise ValueError(broken[file]) from None
            load(file, shipped_file(file))
    note(imported=up_to)


@contextmanager
def time_limit(seconds):
    """TimeoutError after so many seconds of computing (where the system has such a clock)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number, frame):
        raise TimeoutError(f"still running after {seconds} seconds: an endless loop?")

    before = signal.signal(signal.SIGPROF, ring)  # a clock of this process, however busy others are
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # repeatedly: one may be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# ---- one function -------------------------------------------------------------------------------

def function_of(exercise):
    """The function under test, as its lesson has it; None if it is missing."""
    found = import_module(exercise.file)
    for part in exercise.function.split("."):
        found = getattr(found, part, None)
    return found


def problem_of(exercise):
    """Why this exercise cannot be tested, in one sentence; "" if it can."""
    if exercise.file in broken:
        return broken[exercise.file]
    if callable(function_of(exercise)):
        return ""
    return f"there is no {exercise.function} in {exercise.file}.py; its name must stay"


# ---- the shipped solutions ----------------------------------------------------------------------

WARNING = "# SPOILERS: this lesson before it was blanked; the known mistakes are edits of it.\n"


def kept_file(file, root=ROOT):
    """Where a lesson is kept as it was before its first blank."""
    return root / PRISTINE.relative_to(ROOT) / f"{file}.py"


def in_work():
    """Has an exercise been blanked, and not restored by --undo?"""
    return any(PRISTINE.glob("*.py"))


def shipped_file(file):
    """The file that holds a lesson as it is shipped, whether it is blank now or not."""
    kept = kept_file(file)
    return kept if kept.exists() else ROOT / f"{file}.py"


def text_of(path):
    """The text of a lesson file, without the line that is put above a kept one."""
    return path.read_text(encoding="utf-8").removeprefix(WARNING)


def pristine(file):
    """The text of a lesson as it is shipped."""
    return text_of(shipped_file(file))


def keep_pristine(file, root):
    """Keep the shipped text of a lesson, in this copy of the project."""
    kept = kept_file(file, root)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(WARNING + pristine(file), encoding="utf-8")


@cache
def solution(exercise):
    """The shipped solution as text, without its docstring and the indentation of a class."""
    text = pristine(exercise.file)
    node, first = find(text, exercise.function)
    lines = text.splitlines()
    top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    kept = lines[top - 1 : node.body[0].lineno - 1] + lines[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in kept) + "\n"
