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


@pytest.mark.parametrize("files", BELOW)
def test_a_file_imports_only_from_the_layers_below_it(files, needs_shipped_solutions):
    statement = r"^ *import (\w+)|^ *from (\w+)\S* import |import_module\(\"(\w+)"
    for path in ROOT.glob(files):
        text = path.read_text(encoding="utf-8")
        names = {"".join(name) for name in re.findall(statement, text, re.MULTILINE)}
        assert names <= PACKAGES.union(BELOW[files]), path
        if path.parent == ROOT:  # lessons must fit on a projector
            assert max(map(len, text.splitlines())) <= 88
