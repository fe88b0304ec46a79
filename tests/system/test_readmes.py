"""Test that each link, figure, file, command, flag, model and exercise of the pages exists."""
import re
import shlex
from textwrap import indent
from xml.etree import ElementTree

import pytest

import blank
from classroom import pages
from course import exercises
from course.exercises import BY_NAME, ROOT
from training import presets
from training.flags import choose_model, parse

READMES = [path for pages in ("README.md", "[ept]*/*.md", "tests/course/*.md", ".github/*.md")
           for path in sorted(ROOT.glob(pages))]
# with the flags of torchrun, pip and Chromium
SOURCES = "--nnodes --nproc-per-node --shutdown-timeout --index-url --print-to-pdf" + "".join(
    path.read_text(encoding="utf-8") for pattern in (
        "*.py", "training/*.py", "experiments/*.py", "tests/[bcg]*.py", "tests/system/[cf]*.py")
    for path in ROOT.glob(pattern))


def code_in(text):
    """Return the text of each `code` span, and the indented lines without their explanations."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.+?```", "", text, flags=re.DOTALL))
    blocks = re.findall(r"^ {4}(.+)$", text.replace("\\\n", " "), re.MULTILINE)
    return [" ".join(span.split()) for span in spans] + [
        re.split(r"\s{2,}(?![-\\])|\s+# | & done|; ", block)[0] for block in blocks]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_named_exists(path):
    """Check links, files, flags, exercises and models; train.py accepts the commands."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"^ {4}.{98,}", text, re.MULTILINE), "GitHub shows 97 characters of code"
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for code in code_in(text):
        command = re.search(r"\bpython train\.py ([^&|]*)$", code)
        if command and "..." not in code and "--help" not in code:
            argv = re.sub(r"(?<=[ =])[NX]\b", "1", command[1])  # N and X are numbers
            choose_model(parse(shlex.split(argv), ""), "cpu")
        code = re.sub(r"python -m (\w+)\.(\w+)", r"\1/\2.py", code)
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


def test_the_students_page_shows_the_exercises_as_they_are():
    """`python tests/course/exercises.py` writes the table."""
    assert exercises.PAGE.read_text(encoding="utf-8") == exercises.page_with_table()


def test_the_front_page_is_short_and_shows_lesson_5_as_it_is():
    """It has at most 120 lines and 1,300 words; its code block is a part of the lesson."""
    text = READMES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1300
    (block,) = re.findall(r"```python\n(.+?)```", text, re.S)
    assert indent(block, "    ") in (ROOT / "05_full_model.py").read_text(encoding="utf-8")


def test_each_question_of_the_lessons_has_an_answer():
    answers = (ROOT / "tests/course/answers.md").read_text(encoding="utf-8")
    sections = answers.partition("\n## Week 4")[0].split("\n## ")[1:]
    for path, section in zip(sorted(ROOT.glob("0*.py")), sections, strict=True):
        asked = path.read_text(encoding="utf-8").partition("\n# Ask yourself\n")[2]
        assert section.startswith(f"Lesson {int(path.name[:2])}\n")
        assert re.findall(r"^#   (\d)", asked, re.M) == re.findall(r"^(\d)", section, re.M)


def squeeze(text):  # without space and marks of new lines, links, emphasis, lists and sections
    return re.sub(r"# NEW$|\]\(.+?\)|[-\s#`*•|[]", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("is_edition", [False, True])
def test_a_web_page_has_all_text_of_its_file_and_a_target_for_each_link(is_edition, tmp_path):
    """Its order is: docstring, output, code, questions.  All tags are closed."""
    project = tmp_path / "course" if is_edition else ROOT
    assert not is_edition or blank.main(["--all", str(project)]) == 0
    pages.write(project, tmp_path / "out")
    found = {z.name: ElementTree.parse(z).getroot() for z in tmp_path.glob("out/*.html")}
    nodes = [(name, node) for name, page in found.items() for node in page.iter()]
    anchors = [f"{name}#{node.get('id')}" for name, node in nodes if node.get("id")]
    targets = {node.get(key) for _, node in nodes for key in ("href", "src") if node.get(key)}
    assert len(anchors) == len({*anchors})
    assert not [z for z in targets if z not in anchors and not (tmp_path / "out" / z).exists()]
    assert [len(found[name][1][2]) for name in sorted(found)] == [2, 2, 2, 2, 2, 1, 1]  # footers
    texts = {name: squeeze("".join(page[1][1].itertext())) for name, page in found.items()}
    rows = re.findall(r"^\| \[(?:0|train).+", (project / "README.md").read_text("utf-8"), re.M)
    for lesson in exercises.LESSONS:
        docstring, code = (project / f"{lesson}.py").read_text("utf-8")[3:].split('"""', 1)
        code, *tail = re.split("(?m)^(?=# Ask yourself|# It prints)", code)
        order = [docstring, *tail[1:], "The code", code, *tail[:1]]
        assert texts[f"{lesson}.html"] == squeeze("\n".join(order))
        row = docstring.split("\n")[0] if is_edition else rows.pop(0)
        assert squeeze(row) in texts["index.html"]


@pytest.mark.parametrize("old, new, line", [
    ('"""', '# x\n"""', "# x"), ("    python 01", "   python 01", "   python"),
    ("# ---- the data", "# --- the data", "# --- the"), ("#   1. Why", "#  1. Why", "#  1."),
    ("# Change and", "Change = 1  #", "Change"), ("# It prints", "# It printed", "# Ask")])
def test_a_lesson_in_another_form_has_no_page_but_an_error_with_the_line(old, new, line):
    text = (ROOT / "01_vanilla_segments.py").read_text("utf-8").replace(old, new, 1)
    number = text[: text.index(line)].count("\n") + 1
    with pytest.raises(SystemExit, match=f"01_vanilla_segments.py, line {number} "):
        pages.page("01_vanilla_segments", text, [], {})
