"""The functions under test: where they stand, what keeps one from being tested, what replaces it.

    import_lessons()          all six, once; one that cannot be imported goes into `broken`
    function_of(exercise)     the function as its lesson has it
    put(exercise, function)   another one in its place, under its full name
    problem_of(exercise)      why it cannot be tested at all, in one sentence, or ""
    solution(exercise)        the shipped solution as text
"""
import ast
import os
import signal
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, find

TESTS = ROOT / "tests"
PRISTINE = TESTS / "course" / "pristine"  # of lessons that are blank: as they were before that
broken = {}  # lesson -> one sentence, if it cannot be imported
handed_in = os.environ.get("XL_HANDED_IN", " ".join(LESSONS)).split()  # lessons that count


# ---- the lessons, imported in order -------------------------------------------------------------

def sentence(error, path):
    """An error of a student's file in one line: what, where."""
    if isinstance(error, SyntaxError):  # TabError, and text that is not UTF-8, among them
        where = f", line {error.lineno}" if error.lineno else ""
        return f"{Path(path).name}{where}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f", line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        text += "; the course uses numpy, torch and matplotlib only"
    return f"{Path(path).name}{where}: {type(error).__name__}: {text[:300]}"


def import_lessons(up_to=LESSONS[-1]):
    """Import all six, or those up to one.  What needs a broken one is broken for the same reason.
    """
    for file in LESSONS[: LESSONS.index(up_to) + 1]:
        try:
            with time_limit(60):  # the first one imports torch
                import_module(file)
        except (Exception, SystemExit) as error:
            sys.modules[file] = None  # from now on an import of it fails at once
            needed = getattr(error, "name", None)
            broken[file] = broken.get(needed) or sentence(error, ROOT / f"{file}.py")


@contextmanager
def time_limit(seconds):
    """TimeoutError after so many seconds of computing (where the system has such a clock)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number, frame):
        raise TimeoutError(f"still running after {seconds} seconds: an endless loop?")

    # of this process, however busy the machine is; six times as long for one that sleeps
    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds),
              (signal.SIGALRM, signal.ITIMER_REAL, 6 * seconds))
    before = [signal.signal(number, ring) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit, limit)  # again and again: the first may be swallowed
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


# ---- one function -------------------------------------------------------------------------------

def owner_of(exercise):
    """(the module or class that holds the function, its name there)."""
    *classes, name = exercise.function.split(".")
    owner = import_module(exercise.file)
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def function_of(exercise):
    """The function under test, as its lesson has it; AttributeError if it is missing."""
    owner, name = owner_of(exercise)
    return getattr(owner, name)


def put(exercise, function):
    """Another function in the exercise's place: who calls it by its full name gets this one."""
    owner, name = owner_of(exercise)
    setattr(owner, name, function)


def set_aside(exercise):
    """From now on, whoever calls this wrong exercise is told so, at once."""
    def stub(*args, **kwargs):
        raise NotImplementedError(f"{exercise.name} is wrong")
    put(exercise, stub)


def is_missing(exercise):
    """Does its lesson not define the function any more?"""
    try:
        return not callable(function_of(exercise))
    except AttributeError:
        return True


def is_blank(exercise):
    """Does the task stand where the function should be?"""
    text = (ROOT / f"{exercise.file}.py").read_text(errors="replace")
    return f'"{exercise.name} is blank' in text


@cache
def problem_of(exercise):
    """Why this exercise cannot be tested, in one sentence; "" if it can."""
    if exercise.file in broken:
        return broken[exercise.file]
    if is_missing(exercise):
        return f"there is no {exercise.function} in {exercise.file}.py; its name must stay"
    borrowed = imported_from_tests(ROOT / f"{exercise.file}.py")
    if borrowed:
        return (f"the file imports {borrowed} from tests/, where the answers are: write the "
                "function yourself, without that import")
    return ""


@cache
def imported_from_tests(path, seen=()):
    """The first name of tests/ that a source, or a file beside it, imports or opens; else ""."""
    ours = {p.stem for p in TESTS.rglob("*.py")} - set(LESSONS) | {"tests", "course", "system"}
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # a file beside the lesson that is no Python imports nothing
        return ""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            names = [z.value for z in node.args if isinstance(z, ast.Constant)
                     and ("import" in ast.unparse(node.func) or "course/" in str(z.value))]
        for name in map(str, names):
            parts = name.replace("/", ".").split(".")
            beside = path.parent / f"{parts[0]}.py"
            if beside.exists() and beside not in (path, *seen) and parts[0] not in LESSONS:
                if found := imported_from_tests(beside, (path, *seen)):
                    return found
            elif ours & set(parts) and not beside.exists():
                return name
    return ""


def blank_in(error):
    """The exercise whose stub raised this error, or None."""
    while error is not None:
        name = str(error).split(" is ")[0]
        if isinstance(error, NotImplementedError) and name in BY_NAME:
            return BY_NAME[name]
        inner = getattr(error, "exc_info", (None, None))[1]  # of doctest
        error = inner or error.__cause__ or error.__context__
    return None


# ---- the shipped solutions ----------------------------------------------------------------------

WARNING = "# SPOILERS: this lesson before it was blanked; the known mistakes are edits of it.\n"


def kept_file(file, root=ROOT):
    """Where a lesson is kept as it was before its first blank, or before a student's was laid over.
    """
    return root / PRISTINE.relative_to(ROOT) / f"{file}.py"


def pristine(file, root=ROOT):
    """The text of a lesson as it is shipped, whether it is blank now or not."""
    kept = kept_file(file, root)
    if kept.exists():
        return kept.read_text(encoding="utf-8").removeprefix(WARNING)
    return (root / f"{file}.py").read_text(encoding="utf-8")


def keep_pristine(file, root):
    """Lay the shipped text of a lesson aside, in this copy of the project."""
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


def is_as_shipped(exercise):
    """Is it our own solution, but for comments and docstring?"""
    if problem_of(exercise):
        return False
    node, _ = find((ROOT / f"{exercise.file}.py").read_text(), exercise.function)
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    shipped = ast.parse(solution(exercise)).body[0]
    parts = [[n.args, *n.decorator_list, *n.body] for n in (node, shipped)]
    return ast.unparse(parts[0]) == ast.unparse(parts[1])
