"""SPOILERS.  The mistakes that students and public code make: wrong implementations, with a name.

A mistake is an edit of the shipped solution, or a whole function.  It serves twice: diagnosis.py
identifies a student's mistake by it, and test_course.py tests the rules against it: each must be
rejected, and identified.  mistakes_01.py ... mistakes_train.py have the mistakes themselves:

    TABLE["sinusoid"] = (
        ("the frequencies grow: the exponent is negative", ("(-two_k", "(two_k")),
        ("test_an_odd_width_is_rejected", ("if D % 2:", "if D < 0:")),
    )

In the second no answer is wrong that could be compared: the rule of that name is the diagnosis.
"""
import linecache
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from course.exercises import BY_NAME
from course.lessons import solution

ANY = 987654321  # in the answer of a mistake: whatever number stands there


@dataclass(frozen=True)
class Mistake:
    """One wrong implementation of an exercise."""

    exercise: str
    name: str  # its diagnosis, or the test whose own sentence is that
    edits: tuple  # (old, new), (old, new), ...; old occurs once.  Or one text: the whole function

    @property
    def sentence(self):
        """The diagnosis for a student who made it; "" where the rule is one itself."""
        return "" if self.name.startswith("test_") else self.name

    def source(self):
        """The wrong function as text.  An edit that does not fit, since the lesson was edited,
        changes nothing: a right function answers as no wrong one does."""
        if isinstance(self.edits[0], str):
            return self.edits[0].strip("\n") + "\n"
        text = solution(BY_NAME[self.exercise])
        for old, new in self.edits:
            text = text.replace(old, new)
        return text

    @cache
    def function(self):
        """The wrong function."""
        return function_from(self.exercise, self.source())


def function_from(name, source):
    """Run the source of a function among the names of its lesson."""
    exercise = BY_NAME[name]
    filename = f"<{name} {hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    made = {}
    exec(compile(source, filename, "exec"), vars(import_module(exercise.file)), made)
    return made[exercise.function.split(".")[-1]]


@cache
def mistakes_for(name):
    """The known mistakes of this exercise, most specific first; none in an exam's edition."""
    module = f"course.mistakes_{BY_NAME[name].lesson}"
    table = import_module(module).TABLE if find_spec(module) else {}
    return [Mistake(name, sentence, tuple(edits)) for sentence, *edits in table.get(name, ())]
