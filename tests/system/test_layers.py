"""Who may import whom: read from the sources.

    experiments/, tests/    everything
    train.py                lessons 1 and 5, training/, support/
    training/               the lessons, support/
    01 ... 05               earlier lessons, support/
    support/                nothing above it
"""
import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = sys.stdlib_module_names | {"numpy", "torch", "matplotlib", "pytest"}
SOURCES = [path.relative_to(ROOT) for path in sorted(
    z for pattern in ("0*.py", "train.py", "support/*.py", "training/*.py")
    for z in ROOT.glob(pattern))]


def ours_below(path):
    """The names of our own that the file at path may import."""
    lessons = {source.stem for source in SOURCES if source.stem[0] == "0"}
    if path.parent.name == "training":
        return lessons | {"support", "training"}
    if path.parent.name == "support":
        return {"support"}
    if path.stem == "train":
        return {"01_vanilla_segments", "05_full_model", "support", "training"}
    return {"support"} | {lesson for lesson in lessons if lesson < path.stem}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_from_the_floors_below_it_alone(path):
    """Its own floor with them, for support/ and training/; of packages the four, and Python's."""
    names = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names.append(node.args[0].value)
    assert {name.partition(".")[0] for name in names} <= ours_below(path) | PACKAGES


@pytest.mark.parametrize("path", [p for p in SOURCES if len(p.parts) == 1], ids=str)
def test_lines_of_lessons_and_of_train_py_have_at_most_88_columns(path):
    """So that they can be projected."""
    assert max(map(len, (ROOT / path).read_text(encoding="utf-8").splitlines())) <= 88
