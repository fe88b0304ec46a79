"""Who may import whom, read from the sources: each floor those below it, and its own."""
import ast
import re
import sys

import pytest

from course.exercises import LESSONS, ROOT

PACKAGES = sys.stdlib_module_names | {"numpy", "torch", "matplotlib", "pytest", "support"}
SOURCES = [path.relative_to(ROOT) for pattern in ("0*.py", "train.py", "support/*.py",
                                                  "training/*.py")
           for path in sorted(ROOT.glob(pattern))]


def below(path):
    """The names of our own that the file at path may import, support/ aside."""
    if path.parent.name == "support":
        return set()
    if path.parent.name == "training":
        return {*LESSONS[:-1], "training"}
    if path.stem == "train":
        return {LESSONS[0], LESSONS[4], "training"}
    return {lesson for lesson in LESSONS[:-1] if lesson < path.stem}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_from_the_floors_below_it_alone(path, needs_shipped_solutions):
    names = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names.append(node.args[0].value)
    assert {name.partition(".")[0] for name in names} <= below(path) | PACKAGES


@pytest.mark.parametrize("path", [p for p in SOURCES if len(p.parts) == 1], ids=str)
def test_a_lesson_can_be_projected(path, needs_shipped_solutions):
    """At most 88 columns."""
    assert max(map(len, (ROOT / path).read_text(encoding="utf-8").splitlines())) <= 88


@pytest.mark.parametrize("path", ["train.py", "training/job.py", "training/README.md", *(
    f"experiments/{path.name}" for path in sorted((ROOT / "experiments").glob("*.py")))])
def test_whether_fast_py_may_stand_in_is_decided_in_one_place(path):
    """Nobody else makes a Reader, or replaces a part of a model."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert set(re.findall(r"\bfast\.(\w+)", text)) <= {"prepared", "py"}
