"""Who may import whom, and how long lines and functions may be: read from the sources.

    experiments/, tests/    may use everything
    train.py                lessons 1 and 5, support/
    01 ... 05               earlier lessons; of support/ what FOR_LESSONS names
    support/                nothing above it

    pytest tests/system/test_layers.py
"""
import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {"numpy", "torch", "matplotlib", "pytest"}
FOR_LESSONS = {f"support/{name}.py" for name in (
    "corpora", "progress", "adaptive_softmax", "validate")}
FOR_TRAIN = {"01_vanilla_segments.py", "05_full_model.py"}
WIDTH, LINES, PARAMETERS = 88, 60, 9  # columns; lines and parameters of a function


# ---- what a source imports ----------------------------------------------------------------------

@cache
def parsed(text):
    """The syntax tree of a source; the same object for the same text."""
    return ast.parse(text)


def imported(text, folder):
    """What a source in this folder imports, anywhere in it -> [(name, line, whether at once)].

    A name is dotted; of `from a import b` it is a.b, since b may be a module.  That of an
    import_module that cannot be read from the source is None.  What stands in a function is not
    imported at once, with the file, but when the function is called.
    """
    found = []

    def visit(node, loops, at_once):
        """loops: {variable of a loop around this node: the constants that it goes through}."""
        names = []
        for loop in (node, *getattr(node, "generators", ())):
            if isinstance(loop, ast.For | ast.comprehension) and isinstance(loop.target, ast.Name):
                loops = loops | {loop.target.id: constants(loop.iter)}
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = folder.split("/")[: None if node.level < 2 else 1 - node.level]
            before = [*(parents if node.level else ()), *([node.module] if node.module else ())]
            names = [".".join([*before, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and "import_module" in (
                getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
            names = loops.get(getattr(node.args[0], "id", ""), constants(node.args[0])) or [None]
        found.extend((name, node.lineno, at_once) for name in names)
        for inner in ast.iter_child_nodes(node):
            visit(inner, loops, at_once and not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(parsed(text), {}, True)
    return found


def constants(node):
    """The strings in a literal: one, or those of a tuple, list or set; else none."""
    parts = getattr(node, "elts", [node])
    return [z.value for z in parts if isinstance(z, ast.Constant) and isinstance(z.value, str)]


def file_of(name, folder, paths):
    """Which of our files a dotted name is, None if none.  "a.b" may be b in the file a, too.

    Of support/ modules are imported as support.x; of the other folders as x, from anywhere.
    """
    for dotted in (name, name.rpartition(".")[0]):
        own = f"{dotted.replace('.', '/')}.py"
        there = [path for path in paths if path in (own, f"tests/{own}") or (
            "." not in dotted and dotted and path.endswith(f"/{own}")
            and not path.startswith("support/"))]
        if there:
            return min(there, key=lambda path: not path.startswith(f"{folder}/"))
    return None


# ---- the rules ----------------------------------------------------------------------------------

def layer(path):
    """lesson, train, or the folder's name."""
    if re.fullmatch(r"\d\d_\w+\.py", path):
        return "lesson"
    return path.partition("/")[0].removesuffix(".py")


def may_import(path, other):
    """Whether the file at path may import our file `other`."""
    mine, its = layer(path), layer(other)
    if mine in ("experiments", "tests"):
        return True
    if its == "support":
        return mine != "lesson" or other in FOR_LESSONS
    return its == "lesson" and (mine == "lesson" and other < path
                                or mine == "train" and other in FOR_TRAIN)


def problems(sources):
    """Sources {path: text} -> what is against a rule, a sentence each."""
    found, graph = [], {}
    for path, text in sources.items():
        folder, ours = path.rpartition("/")[0], set()
        for name, line, at_once in imported(text, folder):
            if name is None:
                if layer(path) != "tests":  # theirs look at whatever lesson they are told to
                    found.append(f"{path}:{line} imports what cannot be read from the source")
            elif (other := file_of(name, folder, sources)) is not None:
                ours |= {other} if at_once else set()
                if not may_import(path, other):
                    found.append(f"{path}:{line} may not import {other}")
            elif (name.partition(".")[0] not in PACKAGES | sys.stdlib_module_names
                  and name.partition(".")[0] != "support"):
                found.append(f"{path}:{line} imports {name}: no file of ours, no package we use")
            elif name.startswith("support.") or path.startswith("support/") and name == "support":
                found.append(f"{path}:{line} imports {name}, which is not there")
        graph[path] = ours - {path}
        found += sizes(path, text)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle of imports: {' <- '.join(error.args[1])}")
    return found


def sizes(path, text):
    """What is too wide or too long in a source: see WIDTH, LINES, PARAMETERS."""
    found = []
    if layer(path) in ("lesson", "train"):
        found += [f"{path}:{number} has {len(line)} columns, more than {WIDTH}"
                  for number, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH]
    for node in ast.walk(parsed(text)) if layer(path) in ("train", "support") else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines, a = node.end_lineno - node.lineno + 1, node.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs) + len(
                [z for z in (a.vararg, a.kwarg) if z])
            if layer(path) == "train" and lines > LINES:
                found.append(f"{path}: {node.name} has {lines} lines, more than {LINES}")
            if count > PARAMETERS:
                found.append(f"{path}: {node.name} has {count} parameters, more than {PARAMETERS}")
    return found


# ---- our sources, and the rules themselves ------------------------------------------------------

def test_the_layers_hold():
    """All files that git knows."""
    listed = which("git") and subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    sources = {path: (ROOT / path).read_text(encoding="utf-8")
               for path in listed or () if path and (ROOT / path).is_file()}
    if "train.py" not in sources:
        pytest.skip("no git here that knows which files are ours")
    assert not problems(sources), "\n" + "\n".join(problems(sources))


HOUSE = {
    "01_vanilla_segments.py": "import torch\nfrom support.corpora import load\n",
    "02_recurrence.py": "from support import progress\nimport_module('01_vanilla_segments').x\n",
    "05_full_model.py": "lesson = import_module('02_recurrence')\nimport support.validate\n",
    "train.py": "one, five = (import_module(name) for name in (\n"
                "    '01_vanilla_segments', '05_full_model'))\nfrom support import log, corpora\n"
                "def f(a, b, c, d, e, /, f, *g, h, **i):\n" + 59 * "    x = 1\n",
    "support/__init__.py": "",
    "support/corpora.py": "from support.progress import progress\nimport os.path\n",
    "support/progress.py": "", "support/adaptive_softmax.py": "", "support/validate.py": "",
    "support/log.py": "from . import progress\nimport matplotlib.figure\n",
    "support/weights.py": "",
    "experiments/study.py": "import train\nfrom support import weights\n",
    "experiments/weights.py": "from study import fit\nfrom support import weights\n",
    "tests/helpers.py": "import pytest, numpy\n",
    "tests/test_all.py": "import weights\nimport helpers\nimport_module(what)\n",
}


def test_a_house_in_order():
    """The largest function that is allowed is in it, and every way to import."""
    assert problems(HOUSE) == []


@pytest.mark.parametrize("path, text, said", [
    ("support/log.py", "import train", "may not import train.py"),
    ("support/log.py", "def f():\n    from train import Run", "may not import train.py"),
    ("support/log.py", "import_module('05_full_model')", "may not import 05_full_model.py"),
    ("support/log.py", "import study", "may not import experiments/study.py"),
    ("support/log.py", "from helpers import x", "may not import tests/helpers.py"),
    ("support/log.py", "from support import missing", "imports support.missing, which is not"),
    ("01_vanilla_segments.py", "from support import log", "may not import support/log.py"),
    ("05_full_model.py", "import support.weights", "may not import support/weights.py"),
    ("05_full_model.py", "from support.log import draw", "may not import support/log.py"),
    ("05_full_model.py", "import train", "may not import train.py"),
    ("05_full_model.py", "import study", "may not import experiments/study.py"),
    ("01_vanilla_segments.py", "import_module('02_recurrence')", "may not import 02_recurrence.py"),
    ("train.py", "importlib.import_module('02_recurrence')", "may not import 02_recurrence.py"),
    ("train.py", "[import_module(z) for z in ['02_recurrence']]", "may not import 02_recurrence"),
    ("train.py", "import study", "may not import experiments/study.py"),
    ("train.py", "import helpers", "may not import tests/helpers.py"),
    ("train.py", "import_module(given['name'])", "imports what cannot be read"),
    ("support/progress.py", "import support.corpora", "a cycle of imports: "),
    ("experiments/study.py", "import weights", "a cycle of imports: "),
    ("experiments/study.py", "import transformers", "imports transformers: no file of ours"),
    ("tests/helpers.py", "from scipy.special import x", "imports scipy.special.x: no file of ours"),
    ("train.py", "import tqdm", "imports tqdm: no file of ours"),
    ("01_vanilla_segments.py", f"# {87 * 'x'}", "has 89 columns, more than 88"),
    ("train.py", f"x = '{84 * 'x'}'", "has 90 columns, more than 88"),
    ("train.py", "def f():\n" + 60 * "    x = 1\n", "train.py: f has 61 lines, more than 60"),
    ("train.py", "def f(a, b, c, d, e, f, g, h, i, j): 0", "f has 10 parameters, more than 9"),
    ("support/log.py", "class A:\n    def f(self, b, c, d, e, f, g, *h, i, **j): 0",
     "f has 10 parameters, more than 9")])
def test_what_breaks_a_rule_is_found(path, text, said):
    """A few lines more in one file of the house: said of that file, and at most a cycle besides."""
    found = problems(HOUSE | {path: HOUSE[path] + text})
    assert [one for one in found if said in one and path in one] == found[:1], found
    assert all("a cycle of imports: " in one for one in found[1:])


@pytest.mark.parametrize("path, text", [
    ("experiments/study.py", "import_module('02_recurrence')\nfrom support import log"),
    ("experiments/study.py", f"# {99 * 'x'}\ndef f(a, b, c, d, e, f, g, h, i, j): 0"),
    ("experiments/study.py", "def f():\n    import weights"),  # no cycle: not at once
    ("train.py", "[import_module(z) for z in ('05_full_model', 'torch')]\nfor z in range(9): 0"),
    ("tests/helpers.py", "import train, study"),
    ("01_vanilla_segments.py", f"# {86 * 'x'}"),
    ("05_full_model.py", "from support.adaptive_softmax import x\nimport __future__")])
def test_what_is_allowed_is_not(path, text):
    """The other side of the rules."""
    assert problems(HOUSE | {path: HOUSE[path] + text}) == []
