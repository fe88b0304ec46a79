"""Test that each link, figure, file, command, flag, model and exercise of the pages exists."""
import re
import shlex
from textwrap import indent

import pytest

from course.exercises import BY_NAME, EXERCISES, LESSONS, ROOT
from training import presets
from training.flags import choose_model, parse

READMES = [ROOT / name for name in ("README.md", "training/README.md", "tests/README.md",
                                    "tests/teaching.md", "tests/course/answers.md",
                                    "experiments/results.md", "experiments/questions.md",
                                    "experiments/tuning.md", "pretrained/README.md",
                                    ".github/CONTRIBUTING.md")]
# with the flags of torchrun and pip
SOURCES = "--nnodes --nproc-per-node --shutdown-timeout --index-url" + "".join(
    path.read_text(encoding="utf-8") for pattern in (
        "*.py", "training/*.py", "experiments/*.py", "tests/[bcg]*.py", "tests/system/[cf]*.py")
    for path in ROOT.glob(pattern))


def code_in(text):
    """Return the text of each `code` span, and the indented lines without their explanations."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.+?```", "", text, flags=re.DOTALL))
    blocks = re.findall(r"^ {4}(.+)$", text.replace("\\\n", " "), re.MULTILINE)
    short = re.search(r'^ +P="(.+?)"', text, re.MULTILINE)  # is written $P below
    blocks = [line.replace("$P", short[1]) if short else line for line in blocks]
    return [" ".join(code.split()) for code in spans] + [
        re.split(r"\s{2,}(?![-\\])|\s+# | & done|; ", code)[0] for code in blocks]


def parse_commands(text):
    """Parse each `python train.py ...`; N and X are numbers.  ValueError for a wrong one."""
    for code in code_in(text):
        found = re.search(r"\bpython train\.py ([^&|]*)$", code)
        if found and "..." not in found[1] and "--help" not in found[1]:
            argv = re.sub(r"(?<=[ =])[NX]\b", "1", found[1])
            choose_model(parse(shlex.split(argv), ""), "cpu")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_what_is_named_exists(path):
    """Check links, files, flags, exercises and models; train.py accepts the commands."""
    text = path.read_text(encoding="utf-8")
    parse_commands(text)
    with pytest.raises(ValueError, match="datset"):
        parse_commands(text + "\n    python train.py --datset enwik8   says why\n")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for code in code_in(text):
        for word in re.findall(r"(?<![\w./*-])[\w./*-]+\.(?:py|md)\b", code):
            own = re.search(r"NN?\b|\.\./|[A-Z]{3,}|runs/|\*|^xl", word)  # the reader's own file
            assert own or [*ROOT.glob(word), *path.parent.glob(word), *(ROOT / "tests").rglob(
                word), *(ROOT / "support").glob(word)], word
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
            field = flag[2:].replace("-", "_")  # train.py's flags are fields of dataclasses
            assert re.search(rf"{flag}\b|^    {field}: ", SOURCES, re.MULTILINE), flag
        for name in re.findall(r"(?:blank\.py (?:--undo )?|pytest -k )([a-z]\w+)", code):
            assert name in BY_NAME, name
    for model in re.findall(r"\b(?:enwik8|text8)-\d+L|\b(?:wt103|lm1b)-[a-z]{4,}", text):
        assert model in presets.CONFIGS, model


def test_the_exercises_are_counted_and_listed_as_they_are():
    """The pages state their number, in words, and list those of each lesson."""
    count = "sixteen seventeen eighteen nineteen twenty twenty-one".split()[len(EXERCISES) - 16]
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "tests/README.md")]
    for page in pages:
        found = re.findall(r"(\w+teen|twenty\S*) (?:exercises|functions)", page.lower())
        assert set(found) == {count}
    assert re.findall(r"\d+ of (\d+) exercises", pages[1]) == [str(len(EXERCISES))]
    for lesson in LESSONS:
        (row,) = re.findall(rf"^\| {lesson}\.py \| .* \| (.+) \|$", pages[1], re.MULTILINE)
        assert row.split(", ") == [e.name for e in EXERCISES if e.file == lesson]


def test_each_figure_is_shown():
    """Every figure in figures/ is shown or linked on some page."""
    texts = "".join(path.read_text(encoding="utf-8") for path in READMES)
    assert not [path.name for path in (ROOT / "figures").iterdir()
                if not re.search(rf"figures/{path.name}[)\"]", texts)]


def test_the_front_page_shows_lesson_5_as_it_is():
    """Its code block is a part of the lesson."""
    (block,) = re.findall(r"```python\n(.+?)```", READMES[0].read_text(encoding="utf-8"), re.S)
    assert indent(block, "    ") in (ROOT / "05_full_model.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_no_line_of_code_has_to_be_scrolled(path):
    """GitHub shows 97 characters of a code block."""
    text = path.read_text(encoding="utf-8")
    fenced = "".join(re.findall(r"```\w*\n(.+?)```", text, re.S)).splitlines()
    assert not [line for line in fenced + re.findall(r"^ {4}(.+)$", text, re.M) if len(line) > 97]


def test_each_question_of_the_lessons_has_an_answer():
    """Each lesson has as many answers as questions, in the order of its two lists."""
    answers = (ROOT / "tests/course/answers.md").read_text(encoding="utf-8")
    sections = answers.partition("\n## Week 4")[0].split("\n## ")[1:]
    for path, section in zip(sorted(ROOT.glob("0*.py")), sections, strict=True):
        asked = path.read_text(encoding="utf-8").partition("\n# Ask yourself (answers: ")[2]
        assert asked, "the questions say where their answers are"
        assert section.startswith(f"Lesson {int(path.name[:2])}\n")
        assert re.findall(r"^#   (\d)", asked, re.M) == re.findall(r"^(\d)", section, re.M)
