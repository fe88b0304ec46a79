"""Blank an exercise, list all exercises, restore a solution, or write the edition for a class.

    python tests/blank.py rel_shift          replace the body of rel_shift with its task
    python tests/blank.py --list             show all exercises and your progress
    python tests/blank.py --undo rel_shift   restore the original body
    python tests/blank.py --submit anna      pack the lesson files into anna.zip, to hand in
    python tests/blank.py --all FOLDER       the student edition: all blank
    python tests/blank.py --all FOLDER --only reach,layer    only these are blank
    python tests/blank.py --all FOLDER --exam    without the solutions and known mistakes

Nothing is ever lost: a lesson is copied to tests/course/pristine before its first blank, and an
attempt of yours is appended to runs/attempts.txt before it is overwritten.
"""
import ast
import codecs
import shutil
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # support/ and training/
from course import lessons
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT, find
from support.files import write_atomically
from support.names import did_you_mean
from training.command import Parser

WIDTH = 88  # columns of a lesson, so that it can be projected, blank or not
# the content of the student edition; files that need the answers are in tests/course and say so
EDITION = """*.py .gitignore LICENSE pytest.ini requirements.txt support/*.py training/*.py
    pretrained/* tests/conftest.py tests/helpers.py tests/blank.py tests/test_*.py
    tests/course/__init__.py tests/course/compare.py tests/course/diagnosis.py
    tests/course/exercises.py tests/course/lessons.py tests/course/mistakes*.py
    tests/course/oracles.py tests/course/rules.py tests/course/stand_ins.py""".split()
FAST, PLAIN = "training/reader.py", "tests/course/plain_reader.py"  # PLAIN replaces FAST there


class Lesson:
    """A lesson file, split around the body of one exercise.  Raises ValueError: one sentence."""

    def __init__(self, exercise, path=None):
        self.exercise, self.path = exercise, path or ROOT / f"{exercise.file}.py"
        try:
            data = self.path.read_bytes()
            self.codec = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
            self.line_end = "\r\n" if b"\r\n" in data else "\n"
            node, first = find(data, exercise.function)
            lines = data.decode(self.codec).replace("\r\n", "\n").splitlines(keepends=True)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{lessons.sentence(error, self.path)}; nothing was changed") from None
        except KeyError:
            raise ValueError(f"there is no {exercise.function} in {self.path.name}; give it its "
                             "name back, nothing was changed") from None
        self.before = "".join(lines[: first - 1])
        self.after = "".join(lines[node.end_lineno :])
        self.body = "".join(lines[first - 1 : node.end_lineno])
        self.indent = " " * (node.col_offset + 4)

    def is_blank(self):
        """Return whether the body is the stub."""
        return f'"{self.exercise.name} is blank' in self.body

    def stub(self):
        """Return the task as a comment, followed by an error that reports the blank."""
        name = self.exercise.name
        task = textwrap.wrap(f"EXERCISE {name}: {self.exercise.task}",
                             WIDTH - 2 - len(self.indent))
        lines = [f"# {line}\n" for line in [*task, f"Test it with: pytest -k {name}"]]
        lines.append(f'raise NotImplementedError("{name} is blank: write it here")\n')
        return textwrap.indent("".join(lines), self.indent)

    def write(self, body):
        """Replace the body, and keep the lesson's first text as long as it differs from that."""
        kept, attempts = lessons.kept_file(self.path.stem, ROOT), ROOT / "runs" / "attempts.txt"
        text = f"{self.before}{body}{self.after}".replace("\n", self.line_end)
        try:
            if not kept.exists() and not is_student_edition():
                lessons.keep_pristine(self.path.stem, ROOT)
            is_shipped = kept.exists() and self.body in lessons.text_of(kept)
            if not self.is_blank() and not is_shipped:
                attempts.parent.mkdir(exist_ok=True)
                with open(attempts, "a", encoding="utf-8") as file:
                    file.write(f"{self.exercise.function}\n{self.body}")
                print("your attempt is kept in runs/attempts.txt")
            write_atomically(self.path, lambda file: file.write(text.encode(self.codec)))
        finally:  # if the disk is full, the lesson has not changed
            if not is_student_edition() and kept.exists() and (
                    lessons.text_of(kept) == lessons.text_of(self.path)):
                kept.unlink()


def write_whole(path, text):
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def exercise_called(name):
    """Return the exercise with this name or function; ValueError names the closest match."""
    known = {e.function: e for e in EXERCISES} | BY_NAME
    if name in known:
        return known[name]
    raise ValueError(f"no exercise is called {name!r}{did_you_mean(name, known)} "
                     "(blank.py --list shows all)")


def exercises_called(names):
    """Return the exercises of these names, "reach,layer", in course order; all if none is given."""
    asked = [exercise_called(name.strip()) for name in (names or "").split(",") if name]
    return [exercise for exercise in EXERCISES if exercise in asked or not asked]


def is_student_edition():
    """Return whether --all wrote this copy, without the teacher's grade.py."""
    return not (ROOT / "tests" / "grade.py").exists()


def blank(name):
    """Replace the body of an exercise with its task."""
    exercise = exercise_called(name)
    lesson = Lesson(exercise)
    if lesson.is_blank():
        print(f"{exercise.name} is blank already, in {lesson.path.name}")
    else:
        lesson.write(lesson.stub())
        print(f"{exercise.function} in {lesson.path.name} is blank now: {exercise.idea}")
    print(f"write it (about {exercise.lines} lines), then run:  pytest -k {exercise.name}")


def undo(name):
    """Restore the body that the first blank replaced."""
    exercise = exercise_called(name)
    lesson, kept = Lesson(exercise), lessons.kept_file(exercise.file, ROOT)
    if is_student_edition() or not kept.exists():
        raise ValueError(f"{exercise.name} was not blanked here; there is nothing to restore")
    lesson.write(Lesson(exercise, kept).body)
    print(f"{exercise.function} in {lesson.path.name} is as it was before it was blanked")


def show_list():
    """Print all exercises in course order, and whether their rules hold."""
    from course import rules  # which imports torch
    lessons.import_lessons()
    print(f"{'exercise':<20}lesson  lines  minutes  level  state    idea")
    for e in EXERCISES:
        print(f"{e.name:<20}{e.lesson:<8}{e.lines:<7}{e.minutes:<9}{'*' * e.level:<7}"
              f"{rules.state(e.name)[0]:<9}{e.idea}; needs {e.before}")
    print(*lessons.broken.values(), rules.progress_line(), sep="\n")


def submit(name):
    """Pack the lesson files of this folder into NAME.zip, which grade.py reads.  Raises ValueError
    if one of them imports a file that would be missing there."""
    path = Path(f"{name}.zip")
    if path.exists():
        raise ValueError(f"{path} is there already; move it away, or take another name")
    known = {*sys.stdlib_module_names, *LESSONS, *"numpy torch matplotlib support training".split()}
    for file in LESSONS:
        if unknown := imports_of(ROOT / f"{file}.py") - known:
            raise ValueError(f"{file}.py imports {min(unknown)}, which is neither in the archive "
                             "nor in the course; move its code into the lesson")

    def pack(target):
        with zipfile.ZipFile(target, "w") as archive:
            for file in LESSONS:
                archive.write(ROOT / f"{file}.py", f"{file}.py")

    write_atomically(path, pack)
    print(f"{path} holds your {len(LESSONS)} lesson files: hand it in as it is")


def imports_of(path):
    """Return the names of the modules that a lesson imports; none if it has a syntax error."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError) as error:
        print(f"{lessons.sentence(error, path)}; so this lesson gets no points")
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [given.value for node in nodes if isinstance(node, ast.Call)
              and "import_module" in ast.unparse(node.func)
              for given in node.args[:1] if isinstance(given, ast.Constant)]
    return {name.split(".")[0] for name in names}


def write_edition(folder, exam, blank_ones):
    """Copy what students need, with these exercises blank.  An exam contains no solution and no
    known mistake, so a broken rule shows only its sentence and the compared values."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; choose a new or an empty folder")
    if ROOT in (folder, *folder.parents):
        raise ValueError(f"{folder} is inside the project and would become a part of it; choose a "
                         "folder outside")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary) / "edition"
        for path in {path for pattern in EDITION for path in ROOT.glob(pattern)}:
            target = part / path.relative_to(ROOT)
            if not (exam and path.name.startswith("mistakes_")):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        shutil.copyfile(ROOT / PLAIN, part / FAST)
        page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
        write_whole(part / "README.md", page.split("\n## In the complete project\n")[0])
        for file in () if exam else LESSONS:
            lessons.keep_pristine(file, part)
        for exercise in blank_ones:
            lesson = Lesson(exercise, part / f"{exercise.file}.py")
            lesson.path.write_text(lesson.before + lesson.stub() + lesson.after, encoding="utf-8")
        if folder.exists():
            folder.rmdir()  # it is empty
        part.rename(folder)
    print(f"{folder} holds the student edition: {len(blank_ones)} of {len(EXERCISES)} exercises "
          f"are blank\nstudents start with pytest -k {blank_ones[0].name}")


def main(argv=None):
    """Run the command line, and return the exit status: 0, or 1 after a one-line error."""
    try:
        parser = Parser(prog="blank.py", description=__doc__)
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("name", nargs="?")
        what.add_argument("--list", action="store_true")
        what.add_argument("--undo", metavar="NAME")
        what.add_argument("--submit", metavar="NAME")
        what.add_argument("--all", metavar="FOLDER")
        parser.add_argument("--exam", action="store_true")
        parser.add_argument("--only", metavar="NAME,NAME")
        given = parser.parse_args(argv)
        if (given.exam or given.only) and given.all is None:
            raise ValueError("--exam and --only go with --all FOLDER")
        if given.list:
            show_list()
        elif given.undo is not None:
            undo(given.undo)
        elif given.all is not None:
            write_edition(given.all, given.exam, exercises_called(given.only))
        elif given.submit is not None:
            submit(given.submit)
        else:
            blank(given.name)
    except (ValueError, OSError) as error:
        print("blank.py:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
