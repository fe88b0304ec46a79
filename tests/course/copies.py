"""Somebody else's lesson files, laid over a copy of the project, where pytest runs in a process of
its own, with limits.

    with laid_over("../anna") as copy:            ValueError: one sentence
        copy.run(["-k", "rel_shift"])             pytest's exit status
        results(copy.root / "report.xml")         what became of each exercise

This guards against accidents, not against a determined attacker.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from course.exercises import EXERCISES, LESSONS, ROOT
from course.lessons import keep_pristine, pristine

MEMORY = 4 << 30  # bytes that a student's code may have, over what torch itself takes
FILE_SIZE = 100 << 20  # bytes of one file that it writes
RULES = sorted({f"tests/{exercise.test_file}.py" for exercise in EXERCISES})
LEFT_OUT = ("data", "runs", "__pycache__")  # and what is hidden


def hidden(name):
    """.git, ._notes.py, __pycache__, __MACOSX: no student's work."""
    return name.startswith((".", "__"))


def copy_number(path):
    """The number that a browser or a learning platform adds to a name: 2 in x-2.py and x (2).py.
    """
    found = re.search(r"(-| \()(\d+)\)?\.\w+$", path.name)
    return int(found.group(2)) if found else 0


def lesson_of(path):
    """The lesson that a file is, by its name, or None."""
    stem = re.sub(r"(-\d+| \(\d+\))$", "", path.stem)
    return stem if stem in LESSONS and path.suffix == ".py" else None


def find_lessons(place):
    """{lesson: path} of the lesson files in a folder, or in the one folder below it that has some;
    or of one file.  Of several copies the last one counts.  ValueError: one sentence."""
    place = Path(place)
    if not place.exists():
        raise ValueError(f"{place} does not exist; name the folder with the student's files")
    if place.is_file() and place.suffix != ".py":
        raise ValueError(f"{place.name} is neither a folder nor a lesson file; unpack archives")
    paths = [place] if place.is_file() else [
        path for path in sorted(place.rglob("*.py"))
        if not any(map(hidden, path.relative_to(place).parts))]
    paths = sorted(filter(lesson_of, paths), key=copy_number)
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


@dataclass
class Copy:
    """A project in which some lessons are a student's."""

    root: Path
    files: dict  # lesson -> the student's own file

    def with_own_names(self, text):
        """What pytest says there, with the names of the student's own files, and of ours."""
        for lesson, path in self.files.items():
            text = text.replace(str(self.root / f"{lesson}.py"), str(path))
        return text.replace(str(self.root), str(ROOT))

    def with_one(self, lesson):
        """The same project with this file of the student's, and ours in place of the others."""
        for file, path in self.files.items():
            text = path.read_bytes() if file == lesson else pristine(file, self.root).encode()
            (self.root / f"{file}.py").write_bytes(text)
        return Copy(self.root, {lesson: self.files[lesson]})

    def start(self, arguments, cwd=None, **streams):
        """pytest in the copy; a process group of its own, so that nothing of it is left."""
        environment = os.environ | {
            "XL_HANDED_IN": " ".join(self.files), "TMPDIR": str(self.root.parent),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("XL_CODE", None)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=cwd or self.root, env=environment, stdin=subprocess.DEVNULL,
            start_new_session=True, **streams)

    def run(self, arguments, show=print):
        """Run pytest, show its lines as they come, and return its exit status."""
        here = Path.cwd().resolve()
        cwd = self.root / here.relative_to(ROOT) if here.is_relative_to(ROOT) else self.root
        arguments = [a.replace(str(ROOT), str(self.root)) for a in map(str, arguments)]
        process = self.start(arguments, cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace")
        try:
            for line in process.stdout:
                show(self.with_own_names(line.rstrip("\n")))
            return process.wait()
        finally:
            kill(process)


def kill(process):
    """A process and all that it has started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody is left
            pass
    process.kill()
    process.wait()


@contextmanager
def laid_over(place):
    """A Copy in a temporary folder.  Files beside the lessons, which they may import, come along;
    none takes the place of one of ours."""
    files = find_lessons(place)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        root = Path(temporary).resolve() / "project"
        shutil.copytree(ROOT, root, ignore=lambda folder, names: [
            name for name in names if name in LEFT_OUT
            or name.startswith(".") and name != ".gitignore"])
        for lesson, path in files.items():
            keep_pristine(lesson, root)
            shutil.copyfile(path, root / f"{lesson}.py")
        if Path(place).is_dir():
            for beside in next(iter(files.values())).parent.glob("*.py"):
                if not (root / beside.name).exists() and not hidden(beside.name):
                    shutil.copyfile(beside, root / beside.name)
        yield Copy(root, files)


def limit_resources():
    """In the copy's process: no endless memory, no endless file."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {resource.RLIMIT_FSIZE: FILE_SIZE}
    if Path("/proc/self/statm").exists():  # macOS has no such limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def results(report):
    """{exercise: (state, message)} from a file that pytest --junitxml has written.

    The states are "solved", "blank", "failing" and "missing"; or "untested", where the report holds
    no rule: its lesson, or one that this needs, could not be imported.
    """
    found, skipped_files = {}, {}
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {z.get("name"): z.get("value") for z in case.iter("property")}  # by conftest.py
        name, skipped = noted.get("exercise"), case.find("skipped")
        broken = next((z for z in case if z.tag in ("failure", "error")), None)
        if name is None:
            if skipped is not None:
                skipped_files[case.get("name").split(".")[-1]] = skipped.text
        elif broken is not None:
            found[name] = noted.get("state", "failing"), broken.text
        elif noted.get("state") == "missing":
            found[name] = "missing", ""
        elif skipped is None:
            found.setdefault(name, ("solved", ""))
    for exercise in EXERCISES:
        why = re.search(r"Skipped: (.*)['\"]\)", skipped_files.get(exercise.test_file, ""))
        why = why.group(1) if why else "was not tested"
        found.setdefault(exercise.name, ("untested", f"{exercise.name}: {why}"))
    return found


def problems(found):
    """One line for each lesson that could not be tested at all."""
    sentences = [message.split(": ", 1)[1] for state, message in found.values()
                 if state == "untested"]
    return list(dict.fromkeys(sentences))


def first_sentence(message):
    """The diagnosis, which stands at the top of a message, without the lines that belong below it.
    """
    lines = message.splitlines()
    below = next((n for n, line in enumerate(lines) if n and line.startswith("  ")), len(lines))
    return " ".join(lines[:below])
