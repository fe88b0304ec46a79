"""SPOILERS.  Known mistakes of students and of public code: incorrect implementations with a name.

A mistake is an edit of the shipped solution.  mistakes_01.py ... mistakes_train.py contain them:

    TABLE["update_memory"] = (
        ("old and new rows are swapped", "joined = torch.cat([h, memory], dim=1)"),
        ("test_the_memory_has_the_dtype_of_h", (".detach()", ".detach().float()")),
    )

An edit is a line or a pair.  A line replaces the line that begins with the same word or `name =`.
A pair is a short part of a line and its replacement, where `...` is any text, also up to the line's
end.  So an edit still fits if the lesson's line is changed elsewhere.  The second mistake gives no
wrong values to compare: the rule of that name is the diagnosis.
"""
import linecache
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from course.exercises import BY_NAME
from course.lessons import solution

ANY = 987654321  # marks a cell of a mistake's answer that may have any value


@dataclass(frozen=True)
class Mistake:
    """One incorrect implementation of an exercise."""

    exercise: str
    name: str  # its diagnosis, or the test whose docstring is the diagnosis
    edits: tuple  # lines and (part, new), where part occurs once

    @property
    def sentence(self):
        """Return the diagnosis for a student, "" if the rule itself is the diagnosis."""
        return "" if self.name.startswith("test_") else self.name

    @cache
    def function(self):
        """Return the incorrect function.  An edit that does not fit an edited lesson changes
        nothing: the function is then correct, and matches no incorrect result."""
        text = solution(BY_NAME[self.exercise])
        for edit in self.edits:
            beginning = isinstance(edit, str) and re.match(r"[\w, ]+ = |\w+ ", edit)[0]
            part, new = (f"{beginning}...", edit) if beginning else edit
            pattern = ".*".join(map(re.escape, part.split("...")))
            text = re.sub(pattern, lambda found: new, text)
        return function_from(self.exercise, text)


def function_from(name, source):
    """Run the source of a function with the names of its lesson, and return the function."""
    exercise = BY_NAME[name]
    filename = f"<{name} {hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    made = {}
    exec(compile(source, filename, "exec"), vars(import_module(exercise.file)), made)
    return made[exercise.function.split(".")[-1]]


@cache
def mistakes_for(name):
    """Return the known mistakes of this exercise, most specific first; none in an exam edition."""
    module = f"course.mistakes_{BY_NAME[name].lesson}"
    table = import_module(module).TABLE if find_spec(module) else {}
    return [Mistake(name, sentence, tuple(edits)) for sentence, *edits in table.get(name, ())]
