"""The student edition: it gives nothing away by accident, it ends, and a student is told the truth.

    pytest tests/course/test_edition.py
    pytest -m slow tests/course/test_edition.py      runs of pytest as a student sees them
"""
import ast
import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

import blank
from course import mistakes, rules, submission
from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT

NAMES = [exercise.name for exercise in EXERCISES]
COUNT = len(EXERCISES)
RIGHT = ROOT / "tests" / "course" / "right"


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The student edition, written once."""
    if submission.overlay or any(rules.state(name)[0] != "solved" for name in NAMES):
        pytest.skip("needs the shipped solutions of all exercises")
    folder = tmp_path_factory.mktemp("class") / "course"
    named = ROOT / os.path.relpath(folder, ROOT)  # as ../course: by way of the project's own folder
    assert ".." in named.parts and blank.main(["--all", str(named)]) == 0
    return folder


# ---- no solution stands where a student reads ---------------------------------------------------

def form(node):
    """A statement as text in which names and constants are the same, so that only its form counts.
    """
    text = ast.dump(node)
    text = re.sub(r"(Name\(id|arg\(arg)='\w+'", r"\1='_'", text)
    return re.sub(r"JoinedStr\(.*?\]\)|Constant\(.*?\)", "Constant()", text)


def bodies(tree):
    """Every list of statements in a tree, docstrings left out."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            found = getattr(node, field, None)
            if isinstance(found, list) and found:
                yield node, [z for z in found if not (
                    isinstance(z, ast.Expr) and isinstance(z.value, ast.Constant))]


def forms(tree):
    """The forms of all whole function bodies, of all runs of three statements, and of each long
    statement."""
    found = set()
    for owner, statements in bodies(tree):
        lines = [form(z) for z in statements]
        found |= {tuple(lines[n : n + 3]) for n in range(len(lines) - 2)}
        found |= {line for z, line in zip(statements, lines)
                  if not hasattr(z, "body") and is_long(z)}
        if isinstance(owner, ast.FunctionDef) and lines:
            found.add(("def", *lines))
    return found


def is_long(statement):
    """Does it do so much that it is an idea?  h = norm(h + dropout(attention(h, ...))) does."""
    return sum(isinstance(z, ast.Call | ast.BinOp | ast.Subscript | ast.Compare)
               for z in ast.walk(statement)) >= 4 and not isinstance(statement, ast.Raise)


def leaks(source):
    """The exercises of whose solutions a whole body, or three statements, stand in this source."""
    here = forms(ast.parse(source))
    return {name for name in NAMES if forms(ast.parse(mistakes.solution(name))) & here}


def read_by_students(folder):
    """The files that a student opens: all but tests/course/, which says that it spoils."""
    return [path for path in sorted(folder.rglob("*.py"))
            if (folder / "tests" / "course") not in path.parents]


def test_no_solution_stands_in_what_students_read(edition):
    found = {path.name: leaks(path.read_text()) for path in read_by_students(edition)}
    assert len(found) > 20 and not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize("name, old, new", [
    ("layer", "h", "rows"), ("rel_shift", "x", "matrix"), ("attention_mask", "distance", "far"),
    ("distance_encoding", "distance", "far"), ("update_memory", "joined", "all_rows"),
    ("relative_attention", "score", "logits")])
def test_a_solution_is_found_under_other_names(name, old, new):
    """As a function of another name, with other variables, in the middle of another file."""
    source = re.sub(rf"\b{old}\b", new, mistakes.solution(name))
    source = re.sub(r"def \w+\(", "def helper(", source)
    assert name in leaks(f"import math\n\n\n{source}\n\nclass Other:\n    pass\n")


def test_three_statements_of_a_solution_are_found():
    """Inside a longer function, too."""
    source = ("def run(a, n):\n    print(n)\n    both = torch.cat([a, n], dim=2)\n"
              "    begin = max(1, both.shape[0] - n)\n    return both[:, begin:].detach()\n")
    assert leaks(source) == {"update_memory"}


def test_what_knows_answers_says_so(edition):
    """Answers lie in tests/course/ alone, in files whose first line warns."""
    room = edition / "tests" / "course"
    names = {path.name for path in room.glob("*.py")}
    assert {"solutions.py", "mistakes.py", "oracles.py"} <= names
    for path in room.glob("*.py"):
        if path.stem.startswith(("solutions", "mistakes", "oracles")):
            assert path.read_text().startswith('"""SPOILERS.'), path.name
        else:
            assert not leaks(path.read_text()), path.name


def test_the_edition_is_blank_and_whole(edition):
    """All exercises blank; no experiment, no test of the system, no original, no repository."""
    for exercise in EXERCISES:
        assert blank.Lesson(exercise, edition).is_blank()
    assert not [p for p in edition.rglob("*") if p.name in (".exercises", ".git", "right")]
    assert {path.name for path in edition.iterdir()} == {
        ".gitignore", "README.md", "requirements.txt", "support", "tests", "train.py", "training",
        *(f"{lesson}.py" for lesson in LESSONS)} | ({"LICENSE"} & set(os.listdir(ROOT)))


def test_its_readme_speaks_only_of_what_is_in_it(edition):
    """Every file that it names is there, every exercise and flag exists."""
    assert [path.name for path in edition.rglob("*.md")] == ["README.md"]
    text = (edition / "README.md").read_text()
    for path in re.findall(r"[\w./]+\.(?:py|txt|md)\b|\b(?:tests|support|training)/[\w/]*", text):
        assert (edition / path).exists() or (edition / "tests" / path).exists(), path
    assert set(re.findall(r"pytest -k (\w+)", text)) <= set(NAMES)
    assert "grade.py" not in text and "experiments" not in text


def test_its_fast_form_is_the_plain_one(edition):
    """What train.py and training/ ask of training/fast.py is there, and gives the model itself."""
    names, model = {}, object()
    exec((edition / "training" / "fast.py").read_text(), names)
    asked = set(re.findall(r"\bfast\.(\w+)\(", "".join(path.read_text() for path in (
        edition / "train.py", *(edition / "training").glob("*.py")))))
    assert asked and all(names[name](model) is model for name in asked)


# ---- an answer must be the student's own --------------------------------------------------------

@pytest.mark.parametrize("line", [
    "from course.oracles import shift", "import course.solutions",
    "from tests.course import oracles", "from helpers import visible", "import conftest",
    "import_module('course.mistakes')",
    "__import__('course')", "importlib.import_module('test_04_rel_shift')",
    "exec(open('tests/course/oracles.py').read())", "import shifts"])
def test_an_answer_that_imports_from_tests_is_refused(tmp_path, line):
    """In one sentence, wherever in the file the import stands."""
    path = tmp_path / "mine.py"
    (tmp_path / "shifts.py").write_text("from course.oracles import shift\n")
    path.write_text(f"import importlib\n\n\ndef rel_shift(x):\n    {line}\n    return x\n")
    assert submission.imported_from_tests(path)


@pytest.mark.parametrize("line", ["import math", "from support.corpora import load", "import torch",
                                  "import_module('04_rel_shift')", "x = 'course'",
                                  "import solutions"])
def test_other_imports_are_no_offence(tmp_path, line):
    """Among them a file of the student's own, whatever its name."""
    path = tmp_path / "mine.py"
    (tmp_path / "solutions.py").write_text("import math\n")
    path.write_text(f"{line}\n")
    assert not submission.imported_from_tests(path)


# ---- XL_CODE that cannot be used ----------------------------------------------------------------

@pytest.mark.parametrize("make, words", [
    (lambda f: None, "does not exist"),
    (lambda f: f.write_text("x = 1\n"), "holds no lesson file"),
    (lambda f: f.mkdir(), "holds no lesson file"),
    (lambda f: (f.mkdir(), (f / "a.py").write_text("def reach(:")), "a.py, line 1: SyntaxError"),
    (lambda f: (f.mkdir(), (f / "a.py").write_text("if 1:\n\tx = 1\n        y = 2\n")), "TabError"),
    (lambda f: (f.mkdir(), (f / "a.py").write_bytes(b"# \xe9\ndef reach(): 0")), "a.py"),
    (lambda f: (f.mkdir(), [(f / n).write_text("def reach(N, T, M):\n    return 0\n")
                            for n in ("a.py", "b.py")]), "a.py and in b.py"),
], ids=["missing", "file", "empty", "syntax", "tabs", "latin-1", "twice"])
def test_xl_code_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, make, words):
    """Before any test runs, nothing laid over."""
    make(tmp_path / "in")
    monkeypatch.setattr(submission, "overlay", None)
    with pytest.raises(ValueError, match="(?s)^XL_CODE: .*" + words) as error:
        submission.lay_over(tmp_path / "in")
    assert "\n" not in str(error.value) and submission.overlay is None


# ---- runs of pytest as a student sees them ------------------------------------------------------

def pytest_in(folder, *flags, **environment):
    """(exit status, what pytest prints) there; -p no:cacheprovider keeps the folder as it is."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        timeout=600)
    return done.returncode, done.stdout + done.stderr


def last_line(out):
    return out.strip().splitlines()[-1]


@pytest.mark.slow
def test_plain_pytest_in_the_edition_ends(edition):
    """Every exercise shows its task, all else waits for one of them, and nothing is red."""
    status, out = pytest_in(edition, "-q")
    assert status == 1 and f"{COUNT} failed" in out and " error" not in out
    assert last_line(out) == f"0 of {COUNT} exercises solved; next: lanes (01)"
    for exercise in EXERCISES:
        assert f"{exercise.name} is blank: write {exercise.function} in" in " ".join(out.split())
    assert "tests wait for update_memory" in out and "Traceback" not in out


@pytest.mark.slow
def test_a_student_who_solves_all_sees_green(edition):
    """Nothing in the edition needs more than the eighteen functions."""
    try:
        for exercise in EXERCISES:
            lesson = blank.Lesson(exercise, edition)
            body = mistakes.solution(exercise.name).split(":\n", 1)[1]
            lesson.write(textwrap.indent(textwrap.dedent(body), lesson.indent))
        status, out = pytest_in(edition, "-q")
    finally:
        for exercise in EXERCISES:
            lesson = blank.Lesson(exercise, edition)
            lesson.write(lesson.stub())
    assert status == 0, "\n".join(line for line in out.splitlines() if "FAILED" in line)
    assert last_line(out) == f"{COUNT} of {COUNT} exercises solved"


@pytest.mark.slow
def test_a_student_solves_one(edition):
    """Blank: task and hint.  Wrong: the mistake's name.  Right: solved.  -q says whose code."""
    exercise, lesson = BY_NAME["reach"], blank.Lesson(BY_NAME["reach"], edition)
    status, out = pytest_in(edition, "-q", "-k", "reach", "--hints")
    assert status == 1 and exercise.task[:60] in " ".join(out.split())
    assert exercise.hint[:60] in " ".join(out.split())
    assert f"code under test: all of {edition}" in out
    body = mistakes.solution("reach").split("\n", 1)[1]
    try:
        lesson.write(body.replace("return T - 1 - token", "return T - token"))
        status, out = pytest_in(edition, "-k", "reach")
        assert status == 1 and "reach: one too far" in out and "1 failed" in out
        assert exercise.hint[:30] not in out
        lesson.write(body)
        status, out = pytest_in(edition, "-k", "reach")
        assert status == 0 and "reach is solved" in last_line(out)
    finally:
        lesson.write(lesson.stub())


@pytest.mark.slow
def test_xl_code_takes_functions_and_lesson_files(tmp_path):
    """Right, wrong, endless and blank ones; what is missing is never ours; what depends waits."""
    lesson = blank.Lesson(BY_NAME["rel_shift"])
    text = (ROOT / "04_rel_shift.py").read_text().replace("def rel_shift_by_index", "def by_index")
    (tmp_path / "04_rel_shift.py").write_text(text.replace(lesson.body, lesson.stub()))
    (tmp_path / "mine.py").write_text(
        mistakes.solution("update_memory") + "\n\ndef causal_mask(T, M, device=None):\n"
        "    while True:\n        pass\n\n\n"
        + mistakes.solution("reach").replace("return T - 1 - token", "return T - token"))
    files = ("tests/test_02_recurrence.py", "tests/test_04_rel_shift.py")
    status, out = pytest_in(ROOT, "-q", *files, XL_CODE=str(tmp_path))
    said = " ".join(out.split())
    assert status == 1 and "4 failed" in out
    assert f"04_rel_shift.py: from XL_CODE, {tmp_path / '04_rel_shift.py'}" in out
    assert "02_recurrence.py: ours, with update_memory, causal_mask, reach from XL_CODE" in out
    assert "01_vanilla_segments.py: ours" in out and "reach: one too far" in out
    assert "rel_shift is blank" in out and "an endless loop?" in said
    assert "there is no rel_shift_by_index in 04_rel_shift.py" in said
    assert "wait for causal_mask" in out and "wait for rel_shift" in out
    assert last_line(out) == (f"1 of 5 exercises solved ({COUNT - 5} more are not in XL_CODE); "
                              "next: causal_mask (02)")


@pytest.mark.slow
def test_a_lesson_that_cannot_be_imported_is_one_sentence(tmp_path):
    """The exercises of its file fail with it, files that need it wait, the rest runs."""
    (tmp_path / "04_rel_shift.py").write_text("import einops\n")
    (tmp_path / "mine.py").write_text(mistakes.solution("reach"))
    status, out = pytest_in(ROOT, "tests/test_02_recurrence.py", "tests/test_04_rel_shift.py",
                            "tests/test_05_full_model.py", XL_CODE=str(tmp_path))
    assert status != 0 and "Traceback" not in out and "INTERNALERROR" not in out
    assert "04_rel_shift.py, line 1 (import einops): ModuleNotFoundError" in out
    assert last_line(out).startswith("1 of 3 exercises solved (15 more are not in XL_CODE)")


@pytest.mark.slow
def test_who_waits_for_a_wrong_exercise_is_no_success(tmp_path):
    """A file whose own exercises are right, but which calls a wrong one of another lesson."""
    (tmp_path / "mine.py").write_text("def rel_shift(x):\n    return x\n")
    status, out = pytest_in(ROOT, "-q", "tests/test_05_full_model.py", XL_CODE=str(tmp_path))
    assert status == 1 and "tests wait for rel_shift" in out and " failed" not in out


@pytest.fixture(scope="module")
def overlaid():
    """Plain pytest with each folder of right/ laid over, all at once: {name: (status, out)}."""
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(pytest_in, ROOT, "-q", XL_CODE=str(RIGHT / name))
                for name in ("gather", "loops", "other")}
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "loops", "other"])
def test_nobody_relies_on_more_than_the_rules_ask(overlaid, name):
    """With an unusual right solution of every exercise plain pytest is green."""
    status, out = overlaid[name]
    assert status == 0, "\n".join(line for line in out.splitlines() if "FAILED" in line)
    assert last_line(out) == f"{COUNT} of {COUNT} exercises solved"
