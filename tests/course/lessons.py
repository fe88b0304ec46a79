"""Find and import the lessons under test, and read the shipped solutions.

They come from this folder or, with XL_CODE, from a student's submission.  A shipped lesson replaces
one that is missing or broken, but only so that the others can be imported.
"""
import ast
import io
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import zlib
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import Mock, patch

from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, find
from support.files import write_atomically

TESTS = ROOT / "tests"
PRISTINE = TESTS / "course" / "pristine"  # has the shipped text of every lesson that was blanked
under_test = {file: ROOT / f"{file}.py" for file in LESSONS}  # the files that are judged
bodies = {}  # exercise -> its body_of, which is taken before the submission runs
broken = {}  # lesson -> one sentence, if it cannot be imported
missing = {}  # exercise without a function -> one sentence
home = None  # the temporary folder in which a submission runs, if one is under test
BREAKPOINT = Mock(side_effect=RuntimeError("breakpoint() is still in the code: delete it"))
MEMORY = 4 << 30  # bytes that a submission may use, beyond those of torch itself
FILE_SIZE = 100 << 20  # the largest file that it may write, in bytes
REPORT = os.environ.pop("XL_REPORT", None)  # the file in which grade.py reads the results


def take_lessons_from(place):
    """Test the lessons of a submission, which run and write their files in a temporary folder, with
    limits of memory and file size.  Raises ValueError: one sentence."""
    global under_test, home
    paths = {lesson: Path(place, f"{lesson}.py").resolve() for lesson in LESSONS}
    under_test = {lesson: path for lesson, path in paths.items() if path.is_file()}
    if not under_test:
        raise ValueError(f"{place} is not a folder with lesson files ({LESSONS[0]}.py, ..., "
                         f"{LESSONS[-1]}.py); unpack archives first")
    bodies.update((exercise.name, body_of(exercise)) for exercise in EXERCISES)
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    sys.dont_write_bytecode = True
    taken = Path("/proc/self/statm")
    if taken.exists():  # on Linux
        import resource
        memory = int(taken.read_text().split()[0]) * resource.getpagesize() + MEMORY
        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, FILE_SIZE)):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def go_home():
    """Change back to that temporary folder, because the submission may have changed directory."""
    if home:
        folder = Path(home.name) / "home"  # one deeper, so that .. is also temporary
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


def note(**facts):
    """Add a line to the report of grade.py, which can be read even if this process dies."""
    if REPORT:
        if "exercise" in facts:
            facts["body"] = bodies[facts["exercise"]]
        with open(REPORT, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def body_of(exercise):
    """Return the number of statements and a checksum of the function under test, without its
    docstring, comments and layout; "" if there is none."""
    with suppress(Exception):  # of any kind: it is a student's text
        tree = ast.parse(solution(exercise, under_test[exercise.file]))
        count = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - 1
        return f"{count:03} {zlib.crc32(ast.dump(tree).encode())}"
    return ""


def load(file, path):
    """Import a lesson from this path under this name, and return it, as later imports do."""
    spec = spec_from_file_location(file, path)
    module = sys.modules[file] = module_from_spec(spec)
    # of a text Python ignores `# coding:`, so what runs is what a teacher reads
    exec(compile(text_of(path), path, "exec"), vars(module))
    return module


def raised(error, file):
    """Describe an error and its place in this file in one line, without frames of libraries."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f" in line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = " ".join(str(error).split()) or "no message"
    folders = {path.parent for path in under_test.values()}
    for folder in folders | {Path(home.name, "home")} if home else folders:
        text = text.replace(f"{folder}{os.sep}", "")
    return f"{type(error).__name__}{where}: {text[:300]}"


def sentence(error, path):
    """Say in one line why a lesson file cannot be imported."""
    before, *after = path.read_bytes().decode(errors="replace").split("\ufffd")
    if isinstance(error, UnicodeDecodeError) and after:
        return (f"{path.name}, line {before.count(chr(10)) + 1}: this line is not UTF-8 text; save "
                "the file as UTF-8")
    if isinstance(error, SyntaxError):  # includes TabError
        where = f", line {error.lineno}" if error.lineno else ""
        python = ".".join(map(str, sys.version_info[:2]))
        return f"{path.name}{where}: {type(error).__name__} in Python {python}: {error.msg}"
    advice = "; use numpy, torch and matplotlib only" * isinstance(error, ModuleNotFoundError)
    return f"{path.name}: {raised(error, str(path))}{advice}"


def import_lessons(up_to=LESSONS[-1]):
    """Import the lessons up to this one.  Raises ValueError if a broken one has no replacement."""
    from course.rules import reset  # which imports torch
    for file in LESSONS[: LESSONS.index(up_to) + 1]:
        note(importing=file)
        shipped = shipped_file(file)
        for path in dict.fromkeys([under_test.get(file, shipped), shipped]):
            go_home()
            try:
                with time_limit(60), no_terminal(), warnings.catch_warnings():
                    load(file, path)
                break
            except (Exception, SystemExit) as error:
                broken[file] = broken.get(file) or sentence(error, path)
            finally:
                reset()
        else:
            raise ValueError(broken[file])
        replace_missing(file, path)
    note(imported=up_to)


def replace_missing(file, path):
    """Put our function, or its class, in the place of each exercise that this file lacks, because
    rules of other exercises may need it."""
    lesson = sys.modules[file]
    absent = {e: e.function.split(".")[0] for e in EXERCISES
              if e.file == file and not callable(function_of(e))}
    for exercise, name in absent.items():
        other = vars(lesson).get(name)
        missing[exercise.name] = (
            f"there is no {exercise.function} in {file}.py; its name must stay"
            if other is None or isinstance(other, type) else
            f"a later line of {file}.py assigns {name} again (a {type(other).__name__}); delete it")
    if absent and path != shipped_file(file):
        ours = load(f"{file} as shipped", shipped_file(file))
        for name in absent.values():
            setattr(lesson, name, getattr(ours, name))


def no_terminal():
    """Return a context that gives code its own streams, and a breakpoint() that raises an error."""
    streams = {name: io.StringIO() for name in ("stdin", "stdout", "stderr")}
    return patch.multiple(sys, breakpointhook=BREAKPOINT, **streams)


@contextmanager
def time_limit(seconds):
    """Raise TimeoutError after this much CPU time, on systems that have such a clock, and in the
    main thread: others may set no handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
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


def function_of(exercise):
    """Return the function under test, or None if it is missing, as an inherited method is."""
    found = import_module(exercise.file)
    for part in exercise.function.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def problem_of(exercise):
    """Say in one sentence why this exercise cannot be tested; return "" if it can."""
    why = broken.get(exercise.file) or missing.get(exercise.name)
    return f"{exercise.name}: {why}" if why else ""


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
    return path.read_text(encoding="utf-8-sig").removeprefix(WARNING)


def pristine(file):
    """Return the shipped text of a lesson."""
    return text_of(shipped_file(file))


def keep_pristine(file, root):
    """Keep the shipped text of a lesson in the copy of the project at `root`."""
    text = (WARNING + pristine(file)).encode()
    write_atomically(kept_file(file, root), lambda kept: kept.write(text))


@cache
def solution(exercise, path=None):
    """Return the solution in the shipped or another file, without docstring and indentation."""
    text = text_of(path or shipped_file(exercise.file))
    node, first = find(text, exercise.function)
    lines = text.splitlines()
    top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    kept = lines[top - 1 : node.body[0].lineno - 1] + lines[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in kept) + "\n"
