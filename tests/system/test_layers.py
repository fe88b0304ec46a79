"""Test the imports, as read from the sources: a layer imports only itself and those below it."""
import re
import sys

import pytest

from course.exercises import LESSONS, ROOT

PACKAGES = sys.stdlib_module_names | {"numpy", "torch", "matplotlib", "pytest", "support"}
SOURCES = [path.relative_to(ROOT) for pattern in ("0*.py", "train.py", "support/*.py",
                                                  "training/*.py")
           for path in sorted(ROOT.glob(pattern))]


def below(path):
    """Return the names of this project, except support/, that the file at `path` may import."""
    if path.parent.name == "support":
        return set()
    if path.parent.name == "training":
        return {*LESSONS[:-1], "training"}
    if path.stem == "train":
        return {LESSONS[0], LESSONS[4], "training"}
    return {lesson for lesson in LESSONS[:-1] if lesson < path.stem}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_only_from_the_layers_below_it(path, needs_shipped_solutions):
    text = (ROOT / path).read_text(encoding="utf-8")
    statement = r"^ *import (\w+)|^ *from (\w+)\S* import |import_module\(\"(\w+)"
    names = re.findall(statement, text, re.MULTILINE)
    assert {"".join(name) for name in names} <= below(path) | PACKAGES
    if len(path.parts) == 1:  # lessons must fit on a projector
        assert max(map(len, text.splitlines())) <= 88


def test_only_prepare_decides_whether_fast_py_is_used():
    """No other file makes a Reader or replaces a module of a model."""
    for path in (ROOT / "train.py", ROOT / "training/job.py", *ROOT.glob("experiments/*.py")):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"\bfast\.(\w+)", text)) <= {"prepare", "py"}, path
