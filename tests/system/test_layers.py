"""Who may import whom, and how long lines and functions may be: read from the sources.

    experiments/, tests/    may use everything
    train.py                lessons 1 and 5, training/, support/
    training/               the lessons, support/
    01 ... 05               earlier lessons; of support/ what FOR_LESSONS names
    support/                nothing above it

    pytest tests/system/test_layers.py
"""
import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {"numpy", "torch", "matplotlib", "pytest"} | sys.stdlib_module_names
FOR_LESSONS = {f"support.{name}" for name in (
    "corpora", "progress", "adaptive_softmax", "validate")}
DOTTED = "support", "training"  # folders of modules with the folder in their names
FOR_TRAIN = {"01_vanilla_segments", "05_full_model"}
WIDTH, LINES, PARAMETERS = 88, 60, 9  # columns; lines and parameters of a function
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# ---- what a source imports ----------------------------------------------------------------------

def imported(tree):
    """What a source imports, anywhere in it -> [(name, line, whether at once)].

    A name is dotted; of `from a import b` it is a.b, since b may be a module.  It is None if it
    cannot be read from the source.  What stands in a function is not imported at once, with the
    file, but when the function is called.
    """
    found, nodes, looped = [], list(ast.walk(tree)), {}
    later = {inner for node in nodes if isinstance(node, FUNCTIONS) for inner in ast.walk(node)}
    for node in nodes:  # calls in a loop -> the constants that its variable goes through
        for loop in (node, *getattr(node, "generators", ())):
            if isinstance(loop, ast.For | ast.comprehension) and constants(loop.iter):
                looped |= dict.fromkeys(ast.walk(node), constants(loop.iter))
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [None if node.level else f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Call) and node.args and "import_module" in (
                getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
            names = constants(node.args[0]) or looped.get(node, [None])
        found += [(name, node.lineno, node not in later) for name in names]
    return found


def constants(node):
    """The strings in a literal: one, or those of a tuple, list or set; else none."""
    parts = getattr(node, "elts", [node])
    return [z.value for z in parts if isinstance(z, ast.Constant) and isinstance(z.value, str)]


def module_of(path):
    """What others call a file: support.log, but common for experiments/common.py."""
    if layer(path) in DOTTED:
        return path.removesuffix(".py").replace("/", ".")
    return Path(path).stem


# ---- the rules ----------------------------------------------------------------------------------

def layer(path):
    """lesson, train, or the folder's name."""
    if re.fullmatch(r"\d\d_\w+\.py", path):
        return "lesson"
    return path.partition("/")[0].removesuffix(".py")


def may_import(path, other, module):
    """Whether the file at path may import our file `other`, called `module`."""
    mine, its = layer(path), layer(other)
    if mine in ("experiments", "tests"):
        return True
    if its == "support":
        return mine != "lesson" or module in FOR_LESSONS
    if its == "training":
        return mine in ("train", "training")
    return its == "lesson" and (mine == "lesson" and other < path or mine == "training"
                                or mine == "train" and module in FOR_TRAIN)


def problems(sources):
    """Sources {path: text} -> what is against a rule, a sentence each."""
    found, graph = [], {}
    ours = {module_of(path): path for path in sources} | {
        "support": "support/__init__.py", "training": "training/__init__.py",
        "course": "tests/course", "system": "tests/system"}
    for path, text in sources.items():
        tree, at_start = ast.parse(text), set()
        for name, line, at_once in imported(tree):
            first = (name or "").partition(".")[0]
            module = next((z for z in (name, (name or "").rpartition(".")[0], first) if z in ours),
                          None)
            if name is None:
                if layer(path) != "tests":  # theirs look at whatever lesson they are told to
                    found.append(f"{path}:{line} imports what cannot be read from the source")
            elif module is None and first not in PACKAGES or module in DOTTED and module != name:
                found.append(f"{path}:{line} imports {name}: no file of ours, no package we use")
            elif module and not may_import(path, ours[module], module):
                found.append(f"{path}:{line} may not import {ours[module]}")
            if module and at_once and layer(path) not in ("experiments", "tests"):
                at_start.add(ours[module])
        graph[path] = at_start - {path}
        found += sizes(path, text, tree)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle of imports: {' <- '.join(error.args[1])}")
    return found


def sizes(path, text, tree):
    """What is too wide or too long in a source: see WIDTH, LINES, PARAMETERS."""
    found = []
    if layer(path) in ("lesson", "train"):
        found += [f"{path}:{number} has {len(line)} columns, more than {WIDTH}"
                  for number, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH]
    for node in ast.walk(tree) if layer(path) in ("train", *DOTTED) else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines, a = node.end_lineno - node.lineno + 1, node.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)
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
    found = problems(sources)
    assert not found, "\n" + "\n".join(found)


HOUSE = {
    "01_vanilla_segments.py": "import torch\nfrom support.corpora import load\n",
    "02_recurrence.py": "from support import progress\nimport_module('01_vanilla_segments').x\n",
    "05_full_model.py": f"import_module('02_recurrence')\n# {86 * 'x'}\n",
    "train.py": "one, five = (import_module(name) for name in (\n"
                "    '01_vanilla_segments', '05_full_model'))\nfrom support import log, corpora\n"
                "from training import presets\n"
                "def f(a, b, c, d, e, /, f, *g, h, **i):\n" + 59 * "    x = 1\n",
    "support/__init__.py": "",
    "support/corpora.py": "from support.progress import progress\nimport os.path\n",
    "support/progress.py": "def f():\n    import support.corpora  # not at once: no cycle\n",
    "support/log.py": "from support import progress\nimport matplotlib.figure\n",
    "training/__init__.py": "",
    "training/presets.py": "lesson_2 = import_module('02_recurrence')\nfrom support import log\n",
    "experiments/common.py": "import train\nfrom training.presets import CONFIGS\n",
    "tests/helpers.py": "import pytest, numpy, common\nimport_module(what)\n",
}


def test_a_house_in_order():
    """The largest function that is allowed is in it, and every way to import."""
    assert problems(HOUSE) == []


@pytest.mark.parametrize("path, text, said", [
    ("support/log.py", "def f():\n    from train import Run", "may not import train.py"),
    ("support/log.py", "from training import presets", "may not import training/presets.py"),
    ("05_full_model.py", "from training.presets import x", "may not import training/presets.py"),
    ("training/presets.py", "import train", "may not import train.py"),
    ("training/presets.py", "import common", "may not import experiments/common.py"),
    ("training/presets.py", "from training import missing", "imports training.missing: no file"),
    ("support/log.py", "from support import missing", "imports support.missing: no file of ours"),
    ("01_vanilla_segments.py", "import_module('02_recurrence')", "may not import 02_recurrence.py"),
    ("train.py", "[import_module(z) for z in ['02_recurrence']]", "may not import 02_recurrence"),
    ("train.py", "importlib.import_module(given['name'])", "imports what cannot be read"),
    ("support/progress.py", "import support.corpora", "a cycle of imports: "),
    ("tests/helpers.py", "from scipy.special import x", "imports scipy.special.x: no file of ours"),
    ("01_vanilla_segments.py", f"# {87 * 'x'}", "has 89 columns, more than 88"),
    ("train.py", "def f():\n" + 60 * "    x = 1\n", "train.py: f has 61 lines, more than 60"),
    ("support/log.py", "class A:\n    def f(self, b, c, d, e, f, g, *h, i, **j): 0",
     "f has 10 parameters, more than 9")])
def test_what_breaks_a_rule_is_found(path, text, said):
    """A few lines more in one file of the house: said of that file, and at most a cycle besides."""
    found = problems(HOUSE | {path: HOUSE[path] + text})
    assert [one for one in found if said in one and path in one] == found[:1], found
    assert all("a cycle of imports: " in one for one in found[1:])
