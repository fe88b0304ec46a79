"""Are the tests of the exercises themselves right?  Every known wrong solution must get its
diagnosis, every right one must pass, and no solution may be written down where students read.
"""
import ast
import copy
import linecache
import os
import re
import textwrap
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch

from course import exercises
from course.checks import CHECKS
from course.exercises import BY_NAME, EXERCISES, ROOT, find, function_of, judge, state
from course.wrong_solutions import BUGS, RIGHT, WRONG

# what students get, and where therefore no statement of a solution may stand
READ_BY_STUDENTS = ("checks.py", "diagnosis.py", "exercises.py")
NAMES = [exercise.name for exercise in EXERCISES]
HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.skipif("XL_CODE" in os.environ, reason="tests the tests, on our code only"),
    pytest.mark.filterwarnings("ignore:Converting a tensor")]  # one wrong solution does that


# ---- from a line of the table to a function ------------------------------------------------------

def shipped(name):
    """The source of an exercise's solution, decorators too, as a function without indent."""
    exercise = BY_NAME[name]
    text = (ROOT / f"{exercise.file}.py").read_text()
    node, _ = find(text, exercise.function)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n")


def edited(mistake):
    """The source of a wrong solution; ValueError if an edit does not fit."""
    if isinstance(mistake.edits[0], str):
        return mistake.edits[0]
    source = shipped(mistake.exercise)
    for old, new in mistake.edits:
        if source.count(old) != 1:
            raise ValueError(f"{mistake.exercise} holds {old!r} {source.count(old)} times, "
                             "should be once; mend wrong_solutions.py")
        source = source.replace(old, new)
    return source


def function_from(name, source):
    """Run the source with the lesson's own globals, which the checks replace some names of."""
    exercise, filename = BY_NAME[name], f"<a solution of {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    made = {}
    exec(compile(source, filename, "exec"), vars(import_module(exercise.file)), made)
    return made[exercise.function.split(".")[-1]]


def verdict(name, source):
    """What judge says about the function in this source."""
    return judge(BY_NAME[name], function_from(name, source))


def slug(text):
    """Words for the name of a test."""
    return "-".join(re.findall(r"\w+", text.lower())[:7])


def waits(name):
    """Skip while the solution in the working copy is not done: the variants are made from it."""
    if state(name)[0] != "solved":
        pytest.skip(f"waits for {name}")


def one_line(message):
    """The first line of a message, after checking what every message must be."""
    first = message.split("\n")[0]
    assert len(first) < 300, f"the diagnosis is too long to read:\n{message}"
    assert "site-packages" not in message and "Traceback" not in message, message
    return first


# ---- wrong ones fail, right ones pass ------------------------------------------------------------

@pytest.mark.parametrize("mistake", WRONG, ids=lambda m: f"{m.exercise}-{slug(m.words)}")
def test_wrong_solution_gets_its_diagnosis(mistake):
    waits(mistake.exercise)
    found, message = verdict(mistake.exercise, edited(mistake))
    assert found == "failing", f"{mistake.exercise}: this mistake passes: {mistake.words}"
    assert mistake.words in one_line(message), f"should say '{mistake.words}':\n{message}"
    rows = [line for line in message.split("\n")[1:] if re.match(r" +\[.*\d\]", line)]
    if rows and "Error: " not in message:  # numbers are shown: then the right ones beside them
        assert re.search(r"^ +expected\b", message, re.M), message
        assert re.search(r"\bgot\b", message), message
    assert max(map(len, rows), default=0) <= 110, f"too wide to read:\n{message}"


@pytest.mark.parametrize("name, n", [(name, n) for name in RIGHT for n in range(len(RIGHT[name]))])
def test_right_solution_passes(name, n):
    waits(name)
    assert verdict(name, RIGHT[name][n]) == ("solved", "")


@pytest.mark.parametrize("name", NAMES)
def test_shipped_solution_passes(name):
    waits(name)
    assert verdict(name, shipped(name)) == ("solved", "")


# ---- accidents that happen in every exercise -----------------------------------------------------

def with_body(name, body):
    """The source of a function with the shipped first line and another body."""
    tree = ast.parse(shipped(name))
    tree.body[0].body = ast.parse(textwrap.dedent(body)).body
    return ast.unparse(tree)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("body, words", [
    ("pass", "nothing is returned"),
    ("return 'text'", "str"),
    ("[][3]", "IndexError in line {line} ([][3]): list index out of range"),
    ("torch.ones(2) @ torch.ones(3)",
     "RuntimeError in line {line} (torch.ones(2) @ torch.ones(3)): ")])
def test_accident_is_told_in_one_line(name, body, words):
    waits(name)
    source = with_body(name, body)
    found, message = verdict(name, source)
    assert found == "failing"
    words = words.format(line=source.count("\n") + 1)
    assert words in one_line(message), message


@pytest.mark.parametrize("name", NAMES)
def test_numpy_array_in_place_of_a_tensor_is_told(name):
    waits(name)
    made, ours = [], function_of(BY_NAME[name])

    def to_numpy(*args, **kwargs):
        made.append(ours(*args, **kwargs))
        return made[-1].detach().numpy() if isinstance(made[-1], torch.Tensor) else made[-1]

    found, message = judge(BY_NAME[name], to_numpy)
    if any(isinstance(z, torch.Tensor) for z in made):
        assert found == "failing" and "is a NumPy array, should be a torch tensor" in message or (
            name == "sample_top_k" and "ndarray, should be a tensor" in message), message
    else:
        assert found == "solved"


def test_printing_is_no_mistake():
    waits("reach")
    source = shipped("reach").replace("    for _", "    print(first)\n    for _")
    assert verdict("reach", source) == ("solved", "")


def test_endless_loop_is_told(monkeypatch):
    waits("reach")
    monkeypatch.setattr(exercises, "SECONDS", 1)
    found, message = verdict("reach", with_body("reach", "while True: pass"))
    assert found == "failing" and "endless loop" in one_line(message)
    assert "in line" in message


# ---- the tables are complete ---------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_exercise_has_wrong_and_right_solutions(name):
    wrong, right = sum(m.exercise == name for m in WRONG), len(RIGHT.get(name, ()))
    assert wrong >= 3 and right >= 2, (
        f"{name} has {wrong} wrong and {right} right solutions in wrong_solutions.py; it needs at "
        "least 3 wrong ones, each with the words of its diagnosis, and 2 right ones")


def test_every_exercise_has_a_check_and_every_check_an_exercise():
    assert set(CHECKS) == set(NAMES), "exercises.EXERCISES and checks.py name different exercises"
    assert len(NAMES) == len(set(NAMES)), "two exercises have one name"
    assert set(RIGHT) | {m.exercise for m in WRONG} <= set(NAMES), "wrong_solutions.py knows more"


def test_wrong_solutions_differ_from_each_other():
    for name in NAMES:
        waits(name)
    sources = Counter(ast.unparse(ast.parse(edited(m))) for m in WRONG)
    sources.update(ast.unparse(ast.parse(shipped(name))) for name in NAMES)
    twice = [source for source, count in sources.items() if count > 1]
    assert not twice, f"two wrong solutions are one, or one is the right one:\n{twice[0]}"


def test_every_public_bug_is_among_the_wrong_solutions():
    assert {m.bug for m in WRONG} - {0} == set(BUGS)


@pytest.mark.parametrize("name", NAMES)
def test_lines_and_task_of_an_exercise(name):
    waits(name)
    exercise = BY_NAME[name]
    text = (ROOT / f"{exercise.file}.py").read_text()
    node, first = find(text, exercise.function)
    body = [line.strip() for line in text.splitlines()[first - 1 : node.end_lineno]]
    lines = sum(bool(line) and not line.startswith("#") for line in body)
    assert exercise.lines == lines <= 15
    sentences = len(re.findall(r"\S[.!?](?= [A-Z]|$)", exercise.task))
    assert sentences == 3, f"{sentences} sentences in the task of {name}, should be 3"


# ---- no solution where students read -------------------------------------------------------------

class Rename(ast.NodeTransformer):
    """Every name becomes the number of its first use, so that only the form counts."""

    def __init__(self):
        self.numbers = {}

    def visit_Name(self, node):
        number = self.numbers.setdefault(node.id, len(self.numbers))
        return ast.Name(f"v{number}", ast.Load())


def form(node):
    """A part of a program as text, with other names."""
    return ast.unparse(Rename().visit(copy.deepcopy(node)))


def parts_of_solutions():
    """Form of every expression that stands as a statement in a solution, or right of its `=`."""
    found = {}
    for name in NAMES:
        if state(name)[0] != "solved":
            continue
        function = ast.parse(shipped(name)).body[0]
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)) and node.value:
                value = node.value.value if isinstance(node.value, ast.Yield) else node.value
                text = ast.unparse(value)
                if len(text) > 25 and not isinstance(value, ast.Constant):
                    found[form(value)] = f"{name}: {text}"
    return found


def test_a_solution_is_found_under_other_names():
    waits("update_memory")
    copied = ast.parse("every[:, start:].detach()", mode="eval").body
    assert form(copied) in parts_of_solutions()


@pytest.mark.parametrize("file", READ_BY_STUDENTS)
def test_no_solution_is_written_down(file):
    solutions = parts_of_solutions()
    for node in ast.walk(ast.parse((HERE / file).read_text())):
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.List,
                             ast.ListComp, ast.Subscript, ast.Tuple)):
            same = solutions.get(form(node)) if len(ast.unparse(node)) > 20 else None
            assert not same, f"{file}, line {node.lineno} gives a part of a solution away: {same}"
