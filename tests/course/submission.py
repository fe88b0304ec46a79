"""Whose code is tested: ours, or a student's files laid over ours (XL_CODE).

    lay_over(folder)         choose a student's lesson files, or files of functions
    import_lessons()         import all six, the student's where there are some
    function_of(exercise)    the function under test
    problem_of(exercise)     why it cannot be tested at all, in one sentence, or ""
"""
import ast
import importlib.util
import inspect
import signal
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, exercises_in, find

TESTS = ROOT / "tests"
overlay = None  # an Overlay while XL_CODE is set
broken = {}  # lesson file -> one sentence, if it cannot be imported


def sentence(error, path):
    """An error of a student's file in one line: what, where."""
    if isinstance(error, SyntaxError):  # TabError, and text that is not UTF-8, among them
        where = f", line {error.lineno}" if error.lineno else ""
        return f"{Path(path).name}{where}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if Path(f.filename).resolve() == Path(path).resolve()]
    where = f", line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        text += "; the course uses numpy, torch and matplotlib only"
    return f"{Path(path).name}{where}: {type(error).__name__}: {text[:300]}"


# ---- a student's files --------------------------------------------------------------------------

class Overlay:
    """A folder, or a file, with lesson files (same names as ours) and files of functions (any
    other name), which are put into the lessons that they belong to."""

    def __init__(self, place):
        self.place, self.files, self.functions = place, {}, {}
        paths = [place] if place.is_file() else [
            path for path in sorted(place.glob("*.py")) if not path.name.startswith(".")]
        for path in paths:
            if path.stem in LESSONS:
                self.files[path.stem] = path
        for path in paths:
            if path.stem in self.files:
                continue
            try:
                found = exercises_in(ast.parse(path.read_bytes().decode()))
            except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, null bytes
                raise ValueError(f"{sentence(error, path)}; mend it, then test again") from None
            for exercise in found:
                other = self.functions.get(exercise.name) or self.files.get(exercise.file)
                if other:
                    raise ValueError(f"{exercise.function} stands in {other.name} and in "
                                     f"{path.name}; take one of them away")
                self.functions[exercise.name] = path
        if not self.files and not self.functions:
            raise ValueError(
                f"{place} holds no lesson file ({LESSONS[0]}.py, ...) and no file with a function "
                f"of the exercises ({EXERCISES[0].name}, ...); name the folder they are in")

    def has(self, exercise):
        """Did the student hand this exercise in (blank or not)?"""
        return exercise.file in self.files or exercise.name in self.functions

    def insert_functions(self, module):
        """Run the files of functions that belong to a lesson inside it: their helpers stay, the
        exercises go in, and all else of the lesson is put back."""
        mine = [e for e in EXERCISES if e.file == module.__name__ and e.name in self.functions]
        for path in dict.fromkeys(self.functions[e.name] for e in mine):
            before = dict(vars(module))
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
            after = dict(vars(module))
            vars(module).update(before)
            for exercise in mine:
                if self.functions[exercise.name] == path:
                    owner, _, attribute = exercise.function.rpartition(".")
                    made = vars(after[owner])[attribute] if owner else after[attribute]
                    setattr(before[owner] if owner else module, attribute, made)


def lay_over(place):
    """Use the files of this folder, laid over ours.  ValueError: one sentence."""
    global overlay
    place = Path(place)
    if not place.exists():
        raise ValueError(f"XL_CODE: {place} does not exist; name the folder with the student's "
                         "files")
    try:
        overlay = Overlay(place.resolve())
    except ValueError as error:
        raise ValueError(f"XL_CODE: {error}") from None


# ---- the lessons, imported in order -------------------------------------------------------------

def path_of(file):
    """Where the code of a lesson stands."""
    return overlay.files.get(file, ROOT / f"{file}.py") if overlay else ROOT / f"{file}.py"


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


def import_lessons(up_to=LESSONS[-1]):
    """Import all six, or those up to one; a file that cannot be imported goes into `broken`.

    A lesson uses earlier ones only, and derives classes from theirs when it is imported.  So a
    student's functions are put into each lesson before the next one is imported.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if overlay:  # last: helper files are found, nothing is shadowed
        folder = overlay.place if overlay.place.is_dir() else overlay.place.parent
        sys.path.append(str(folder))
    for file in LESSONS[: LESSONS.index(up_to) + 1]:
        if file in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(file, path_of(file))
        module = sys.modules[file] = importlib.util.module_from_spec(spec)
        try:
            with time_limit(60):  # the first one imports torch
                spec.loader.exec_module(module)
            if overlay:
                overlay.insert_functions(module)
        except (Exception, SystemExit) as error:
            sys.modules[file] = None  # nobody gets ours instead
            broken[file] = why_broken(file, error)


def source_of(exercise):
    """The file in which the function under test stands."""
    mine = overlay.functions.get(exercise.name) if overlay else None
    return mine or path_of(exercise.file)


def why_broken(file, error):
    """One sentence: the error if it is this file's own, else that of the lesson it needs."""
    frames = traceback.extract_tb(error.__traceback__)
    paths = [getattr(error, "filename", None) if isinstance(error, SyntaxError) else None,
             *(frame.filename for frame in reversed(frames))]
    theirs = [path_of(file)] + [p for e in EXERCISES if overlay for p in (
        overlay.functions.get(e.name),) if p and e.file == file]
    place = next((p for p in paths if p and Path(p) in theirs), path_of(file))
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return broken.get(missing) or sentence(error, place)


# ---- one function -------------------------------------------------------------------------------

def function_of(exercise):
    """The function under test, as its lesson has it; AttributeError if it is missing."""
    found = import_module(exercise.file)
    for part in exercise.function.split("."):
        found = getattr(found, part)
    return found


def is_missing(exercise):
    """Is its lesson broken, or does it not define the function any more?"""
    try:
        return not callable(function_of(exercise))
    except (ImportError, AttributeError):
        return True


def is_blank(exercise):
    """Does the task stand where the function should be?"""
    return f'"{exercise.name} is blank' in source_of(exercise).read_text()


@cache
def problem_of(exercise):
    """Why this exercise cannot be tested, in one sentence; "" if it can."""
    if exercise.file in broken:
        return broken[exercise.file]
    if is_missing(exercise):
        return f"there is no {exercise.function} in {exercise.file}.py; its name must stay"
    borrowed = imported_from_tests(source_of(exercise))
    if borrowed:
        return (f"the file imports {borrowed} from tests/, where the answers are: write the "
                "function yourself, without that import")
    return ""


@cache
def imported_from_tests(path, seen=()):
    """The first name of tests/ that a source, or a file beside it, imports or opens; else ""."""
    ours = {p.stem for p in TESTS.rglob("*.py")} | {"tests", "course", "system"}
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            names = [z.value for z in node.args if isinstance(z, ast.Constant)
                     and ("import" in ast.unparse(node.func) or "course" in str(z.value))]
        for name in map(str, names):
            parts = name.replace("/", ".").split(".")
            mine = path.parent / f"{parts[0]}.py"
            if mine.exists() and mine not in (path, *seen) and parts[0] not in LESSONS:
                if found := imported_from_tests(mine, (path, *seen)):
                    return found
            elif ours & set(parts) and not mine.exists():
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


@cache
def is_as_shipped(exercise):
    """Is it our own solution, but for comments and docstring?"""
    from course import mistakes
    if is_missing(exercise):
        return False
    node, _ = find(source_of(exercise).read_text(), exercise.function)
    shipped = ast.parse(mistakes.solution(exercise.name)).body[0]
    return without_docstring(node) == without_docstring(shipped)


def without_docstring(node):
    """A function as text, from which its docstring is gone, and comments, too."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.unparse([node.args, *node.decorator_list, *body])


def set_aside(exercise):
    """From now on, whoever calls this wrong exercise is told so, at once.

    The code of the function is exchanged, so this holds under all names that it has.
    """
    def stub(*args, **kwargs):
        raise NotImplementedError("NAME is wrong")

    constants = tuple(f"{exercise.name} is wrong" if z == "NAME is wrong" else z
                      for z in stub.__code__.co_consts)
    function = inspect.unwrap(function_of(exercise))
    if getattr(function, "__code__", None) is None or function.__code__.co_freevars:
        return  # no plain function: the tests that call it fail by themselves
    function.__code__ = stub.__code__.replace(co_consts=constants)


def whose():
    """What a test run says: whose code is tested, file by file."""
    if not overlay:
        return [f"code under test: all of {ROOT}"]
    lines = [f"code under test: XL_CODE = {overlay.place}, laid over {ROOT}"]
    for file in LESSONS:
        taken = {}
        for exercise in EXERCISES:
            if exercise.file == file and exercise.name in overlay.functions:
                path = overlay.functions[exercise.name].name
                taken.setdefault(path, []).append(exercise.function)
        if file in overlay.files:
            text = f"from XL_CODE, {overlay.files[file]}"
        elif taken:
            text = "ours, with " + "; ".join(
                f"{', '.join(names)} from XL_CODE, {path}" for path, names in taken.items())
        else:
            text = "ours"
        lines.append(f"  {file}.py: {text}")
    return lines
