"""Find and import the lessons under test, and read the shipped solutions.

They come from this folder or, with XL_CODE, from a student's submission.  A shipped lesson replaces
one that is missing or broken, but only so that the others can be imported.
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
from support.files import write_atomically

TESTS = ROOT / "tests"
PRISTINE = TESTS / "course" / "pristine"  # has the shipped text of every lesson that was blanked
under_test = {file: ROOT / f"{file}.py" for file in LESSONS}  # the files that are judged
broken = {}  # lesson -> one sentence, if it cannot be imported
home = None  # the temporary folder in which a submission runs, if one is under test
MEMORY = 4 << 30  # bytes that a submission may use, beyond those of torch itself
FILE_SIZE = 100 << 20  # the largest file that it may write, in bytes
COPY = r"(-\d+| \(\d+\))"  # the number that a browser adds to a name that exists already


# ---- the lessons of a submission ----------------------------------------------------------------

def is_hidden(name):
    """Return whether this is not a student's work: .git, ._notes.py, __pycache__, __MACOSX."""
    return name.startswith((".", "__"))


def copy_number(path):
    """Return the number that a browser or a learning platform adds to a name: 2 for x-2.py and for
    x (2).py."""
    found = re.search(COPY + "$", path.stem)
    return int(found.group().strip("- ()")) if found else 0


def lesson_of(path):
    """Return the lesson that this file contains, judging by its name, or None."""
    stem = re.sub(COPY + "$", "", path.stem)
    return stem if stem in LESSONS and path.suffix == ".py" else None


def find_lessons(place):
    """Return {lesson: path} of the lesson files in a folder, or in the only folder below it that
    has some.  The last of several copies counts.  Raises ValueError with one sentence."""
    place = Path(place)
    if not place.is_dir():
        raise ValueError(f"{place} is not a folder; unpack archives, and give the folder with the "
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
    """Test the lessons of a submission, which run and write their files in a temporary folder."""
    global under_test, home
    under_test = find_lessons(place)
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    sys.dont_write_bytecode = True
    limit_resources()


def go_home():
    """Change back to that temporary folder, because the submission may have changed directory."""
    if home:
        folder = Path(home.name) / "home"  # one deeper, so that .. is also temporary
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


def limit_resources():
    """Limit the memory of this process and the size of the files that it writes (on Linux)."""
    taken = Path("/proc/self/statm")
    if taken.exists():
        import resource
        memory = int(taken.read_text().split()[0]) * resource.getpagesize() + MEMORY
        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, FILE_SIZE)):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def note(**facts):
    """Add a line to the file XL_REPORT, which can be read even if this process dies."""
    if path := os.environ.get("XL_REPORT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


# ---- the lessons, imported in order -------------------------------------------------------------

def load(file, path):
    """Import a lesson from this path under its own name, so that later imports return it."""
    spec = spec_from_file_location(file, path)
    sys.modules[file] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[file])


def raised(error, file):
    """Describe an error and its place in this file in one line, without frames of libraries."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f" in line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}{where}: {text[:300]}"


def sentence(error, path):
    """Say in one line why a lesson file cannot be imported."""
    if isinstance(error, SyntaxError):  # includes TabError and text that is not UTF-8
        where = f", line {error.lineno}" if error.lineno else ""
        return f"{path.name}{where}: {type(error).__name__}: {error.msg}"
    advice = "; the course uses numpy, torch and matplotlib only"
    return f"{path.name}: {raised(error, str(path))}" + (
        advice if isinstance(error, ModuleNotFoundError) else "")


def import_lessons(up_to=LESSONS[-1]):
    """Import the lessons up to this one.  Raises ValueError if a broken one has no replacement."""
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
    """Raise TimeoutError after this much CPU time, on systems that have such a clock."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number, frame):
        raise TimeoutError(f"still running after {seconds} seconds: an endless loop?")

    before = signal.signal(signal.SIGPROF, ring)  # measures this process, not busy neighbors
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # repeatedly: one may be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# ---- one function -------------------------------------------------------------------------------

def function_of(exercise):
    """Return the function under test from its lesson, or None if it is missing."""
    found = import_module(exercise.file)
    for part in exercise.function.split("."):
        found = getattr(found, part, None)
    return found


def problem_of(exercise):
    """Say in one sentence why this exercise cannot be tested; return "" if it can."""
    if exercise.file in broken:
        return broken[exercise.file]
    if callable(function_of(exercise)):
        return ""
    return f"there is no {exercise.function} in {exercise.file}.py; its name must stay"


# ---- the shipped solutions ----------------------------------------------------------------------

WARNING = "# SPOILERS: this lesson before it was blanked; the known mistakes are edits of it.\n"


def kept_file(file, root=ROOT):
    """Return the path that keeps the text of a lesson from before its first blank."""
    return root / PRISTINE.relative_to(ROOT) / f"{file}.py"


def in_work():
    """Return whether an exercise was blanked and has not been restored by --undo."""
    return any(PRISTINE.glob("*.py"))


def shipped_file(file):
    """Return the file with the shipped text of a lesson, even if the lesson is blank now."""
    kept = kept_file(file)
    return kept if kept.exists() else ROOT / f"{file}.py"


def text_of(path):
    """Return the text of a lesson file, without the warning above a kept one."""
    return path.read_text(encoding="utf-8").removeprefix(WARNING)


def pristine(file):
    """Return the shipped text of a lesson."""
    return text_of(shipped_file(file))


def keep_pristine(file, root):
    """Keep the shipped text of a lesson in the copy of the project at `root`."""
    text = (WARNING + pristine(file)).encode()
    write_atomically(kept_file(file, root), lambda kept: kept.write(text))


@cache
def solution(exercise):
    """Return the shipped solution as text, without its docstring and a class's indentation."""
    text = pristine(exercise.file)
    node, first = find(text, exercise.function)
    lines = text.splitlines()
    top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    kept = lines[top - 1 : node.body[0].lineno - 1] + lines[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in kept) + "\n"
