"""Test the imports, as read from the sources: a layer imports only itself and those below it."""
import re
import sys

import pytest

from course.exercises import LESSONS, ROOT

PACKAGES = sys.stdlib_module_names | {"numpy", "torch", "matplotlib", "pytest", "support"}
BELOW = {  # files: what they may import of this project, except support/
    "support/*.py": [], "training/*.py": [*LESSONS[:-1], "training"],
    "train.py": [LESSONS[0], LESSONS[4], "training"],
    **{f"{lesson}.py": LESSONS[:n] for n, lesson in enumerate(LESSONS[:-1])}}


def imports(path):
    statement = r"^ *import (\w+)|^ *from (\w+)\S* import |import_module\(\"(\w+)"
    found = re.findall(statement, path.read_text(encoding="utf-8"), re.MULTILINE)
    return ["".join(name) for name in found]


@pytest.mark.parametrize("files", BELOW)
def test_a_file_imports_only_from_the_layers_below_it(files, needs_shipped_solutions):
    for path in ROOT.glob(files):
        assert {*imports(path)} <= PACKAGES.union(BELOW[files]), path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", path.read_text("utf-8")), path
        if path.parent == ROOT:  # lessons must fit on a projector
            assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 88


def test_the_process_is_prepared_before_torch_and_matplotlib_are_imported():
    """Importing support/ does so; the package of the experiments imports it."""
    for path in (*ROOT.glob("0*.py"), ROOT / "train.py", ROOT / "experiments/__init__.py"):
        names = [name for name in imports(path) if name in ("support", "torch", "matplotlib")]
        assert names[0] == "support", path
