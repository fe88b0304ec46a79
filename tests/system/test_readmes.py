"""What the READMEs and the docstrings name exists: links, files, commands, flags, models.

    pytest tests/system/test_readmes.py
"""
import argparse
import ast
import contextlib
import io
import re
import shlex
from functools import partialmethod
from importlib import import_module

import pytest

from course.exercises import BY_NAME, ROOT
from training import presets
from training.flags import parse, settings

train = import_module("train")
READMES = sorted(path for folder in (".", "training", "tests", "tests/course", "experiments")
                 for path in (ROOT / folder).glob("*.md"))
SCRIPTS = sorted(path for folder in (
                     ".", "support", "training", "tests", "tests/system", "experiments")
                 for path in (ROOT / folder).glob("*.py"))
TORCHRUN = {"--nproc-per-node", "--nnodes", "--max-restarts"}
# words that stand for a name of the reader's own
OWN = re.compile(r"NN?\b|\.\./|[A-Z]{3,}|runs/|\*")


def name_of(path):
    """For the test's name and messages."""
    return str(path.relative_to(ROOT))


def module_of(path):
    """What import_module calls it."""
    folder = path.parent.name
    return f"{folder}.{path.stem}" if folder in ("support", "training", "system") else path.stem


def text_of(path):
    """A README without its Python, or a script's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    return re.sub(r"^```python.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_in(text):
    """What stands in `code`, and the indented lines, without what explains them."""
    blocks = re.findall(r"^ {4}(.+)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", text)
    return [" ".join(z.split()) for z in spans] + [
        re.split(r"\s{2,}(?![-\\])|\s+# | & done|; ", z)[0] for z in blocks]


def commands_in(text):
    """[argv] of each command; what P="..." says stands for $P."""
    short = re.search(r'^ +P="(.+?)"', text, re.MULTILINE)
    found = []
    for line in code_in(text.replace("\\\n", " ")):
        line = line.replace("$P", short[1]) if short else line
        match = re.search(r"(?:^|&& |/bin/|[A-Z_]+=\S+ )((python|pytest|torchrun) ?[^&|]*)$", line)
        words = shlex.split(match[1]) if match else []
        if words[1:] and not words[1].endswith("..."):  # N and X stand for numbers
            found.append([re.sub(r"^(--[a-z-]+=)?[NX]$", r"\g<1>1", z) for z in words
                          if z != "..."])
    return found


class Parsed(BaseException):
    """A command line was taken."""


def take(argv, monkeypatch, capsys):
    """Parse a command as it would be; AssertionError unless it is taken."""
    program, *rest = argv
    if program == "torchrun":
        rest = rest[[z.endswith(".py") for z in rest].index(True):]
    if program == "pytest":
        return take_pytest(rest)
    if rest[0] == "-m":
        rest = [rest[1].replace(".", "/") + ".py", *rest[2:]]
    path = ROOT / rest[0]
    assert path.is_file(), f"there is no {path.name}"
    if "--help" in rest:
        return None
    if path.name == "train.py":
        return settings(parse(rest[1:], ""), "cpu")
    if rest[1:]:
        plain = argparse.ArgumentParser.parse_known_args

        def taken(self, *given, all_known=True):
            _, unknown = plain(self, *given)
            if unknown and all_known:
                self.error(f"unrecognized arguments: {unknown}")
            raise Parsed
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", taken)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", partialmethod(
            taken, all_known=False))
        with pytest.raises(Parsed):
            status = import_module(module_of(path)).main(rest[1:])
            raise AssertionError(f"status {status}: {capsys.readouterr().err}")
        monkeypatch.undo()


def take_pytest(rest):
    """The files of a pytest command exist, and -k names an exercise or a test."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for flag, value in zip(rest, [*rest[1:], ""]):
        if flag.endswith(".py") or "/" in flag:
            assert [*ROOT.glob(flag)], flag
        if flag == "-k":
            assert value in BY_NAME or re.search(rf"def test_\w*{value}", tests), value


@pytest.mark.parametrize("path", [*READMES, *SCRIPTS], ids=name_of)
def test_commands_are_taken(path, monkeypatch, capsys):
    """Each is parsed by its own program: flags, values, choices."""
    for argv in commands_in(text_of(path)):
        try:
            take(argv, monkeypatch, capsys)
        except (AssertionError, ValueError, SystemExit) as error:
            raise AssertionError(f"{name_of(path)}: {' '.join(argv)}: {error}") from None


@pytest.fixture(scope="module")
def flags():
    """All that any program of ours takes, from their --help, and those of torchrun and pytest."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        for path in SCRIPTS:
            if re.search(r"add_argument|make_flags\(|parse\(argv", path.read_text()):
                with contextlib.suppress(SystemExit, AttributeError):
                    import_module(module_of(path)).main(["--help"])
    ours = (ROOT / "tests/conftest.py").read_text()
    return {*re.findall(r"--[a-z][a-z-]*", said.getvalue()), *re.findall(r'"(--[a-z-]+)"', ours),
            *TORCHRUN}


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_what_is_named_exists(path, flags):
    """Links, files, flags, models and exercises."""
    text = text_of(path)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for code in code_in(text):
        for word in re.findall(r"[\w./*-]+\.(?:py|md)\b", code):
            assert OWN.search(word) or list(ROOT.glob(word)) or list(path.parent.glob(word)) or (
                "/" not in word and any(z.name == word for z in [*SCRIPTS, *READMES, *(
                    ROOT / "tests").rglob("*.py")])), word
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
            assert flag in flags, flag
        for name in re.findall(r"blank\.py (?:--undo )?([a-z]\w+)", code):
            assert name in BY_NAME, name
    for model in re.findall(r"\b(?:enwik8|text8)-\d+L|\b(?:wt103|lm1b)-[a-z]{4,}", text):
        assert model in presets.CONFIGS, model


def test_each_figure_is_shown():
    """What stands in figures/ is looked at from some README."""
    texts = "".join(path.read_text(encoding="utf-8") for path in READMES)
    assert not [path.name for path in (ROOT / "figures").iterdir()
                if not re.search(rf"figures/{path.name}[)\"]", texts)]


def test_each_question_of_the_lessons_has_an_answer():
    """As many, lesson by lesson, and in the order of the two lists."""
    answers = (ROOT / "tests/course/answers.md").read_text(encoding="utf-8")
    for path, section in zip(sorted(ROOT.glob("0*.py")), answers.split("\n## ")[1:], strict=True):
        asked = path.read_text(encoding="utf-8").partition("\n# Ask yourself (answers: ")[2]
        assert asked, "the questions say where their answers are"
        assert section.startswith(f"Lesson {int(path.name[:2])}\n")
        assert re.findall(r"^#   (\d)", asked, re.M) == re.findall(r"^(\d)", section, re.M)


@pytest.mark.parametrize("text, part", [
    ("    python train.py --datset enwik8", "datset"),
    ("`python train.py --model enwik9`", "enwik9"),
    ("`python tests/blank.py --lists`", "name --list"),
    ("`python experiments/kneser_ney.py --ordr 3`", "ordr"),
    ("    python nothing.py      says nothing", "nothing.py"),
    ("`pytest -k rel_shft`", "rel_shft")])
def test_a_wrong_command_is_found(text, part, monkeypatch, capsys):
    """The test of the tests."""
    argv, = commands_in(text)
    with pytest.raises((AssertionError, ValueError, SystemExit), match=part):
        take(argv, monkeypatch, capsys)
