"""Write a web page for each lesson and train.py, and an index: pages.py PROJECT FOLDER."""
import html
import re
import sys
from keyword import kwlist
from pathlib import Path
from textwrap import dedent

LINE = r"(?:\S.*|  (?:\*|\d\.) .*|    .*|)\n"  # of a paragraph, a list, a drawing
COMMENT = rf"(?:# {LINE}|#?\n)"
FILE = re.compile(  # title, docstring, code, questions, output; a match ends where it breaks
    rf'(?:"""([^"\n]+)\n((?:(?!"""){LINE})*)(?:"""\n'
    r"((?:(?!# Ask yourself|# It prints|#[ \t]*--(?!-- .+ --+\n)).*\n)*)"
    rf"(?:((?=# Ask yourself(?s:.*)\n# It prints)(?:(?!# It prints){COMMENT})*)"
    rf"((?=# It prints){COMMENT}*)?)?)?)?")
BLOCK = re.compile(  # by its tag
    r"(?P<h2>^(?:Ask yourself|Change and watch|It prints)\b ?)|(?P<tr>^\| .*\n)"
    r"|(?P<div>^  \S.*\n(?: {4}.*\n)*)|(?P<pre>(?:^ {4}.*\n(?:\n(?= {4}))?)+)"
    r"|(?P<p>(?:^\S.*\n)+|\(.*\n)", re.M)
INLINE = re.compile(
    r"`(?P<code>[^`]+)`|(?<!\w)\*(?P<em>[^\s*][^*]*)\*(?!\w)|(?P<mark>\bNEW\b)"
    r"|\A(?P<b>The (?:problem|one new idea|running experiment)|New letters?)\b")
COLOR = re.compile(r'(?P<doc>""".*?""")|(?P<string>"(?:\\.|[^"\n])*"|\'[^\'\n]*\')'
                   rf"|(?P<comment>#[^\n]*)|\b(?P<keyword>{'|'.join(kwlist)})\b", re.S)
PAGE = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/><title>{0}</title>
<meta name="viewport" content="width=device-width"/><link rel="stylesheet" href="pages.css"/></head>
<body><nav>{1}</nav><main><h1>{0}</h1>{2}</main><footer>{3}</footer></body></html>"""


def prose(text):
    """Convert a docstring, comments or rows of a table, block by block."""
    for block in BLOCK.finditer(re.sub("(?m)^# ?", "", text).replace("\n  * ", "\n  • ")):
        lines = html.escape(dedent(block[0]).rstrip(), quote=False)
        if not block["pre"]:
            lines = INLINE.sub(lambda z: f"<{z.lastgroup}>{z[z.lastgroup]}</{z.lastgroup}>", lines)
            lines = re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', lines)
        yield f"<{block.lastgroup}>{lines}</{block.lastgroup}>\n"


def code(text):
    """Color code; add headings of sections, anchors of definitions, and tints."""
    text = COLOR.sub(lambda z: re.sub("(?m)^.+", rf'<i class="{z.lastgroup}">\g<0></i>', z[0]),
                     html.escape(text.strip(), quote=False))
    text = re.sub(  # functions and classes, or constants
        r'(?m)^(<i class="keyword">(?:def|class)</i> |(?=[A-Z][A-Z_\d, ]* = ))([\w, ]+)',
        lambda z: z[1] + re.sub(r"\w+", r'<b id="\g<0>">\g<0></b>', z[2]), text)
    text = re.sub(r'(?ms)^<i class="keyword">class</i> <b id="(\w+).+?(?=^\S|\Z)', lambda z: re.sub(
        r"(?m)^(    <i .{,16}def</i> )(\w+)", rf'\1<b id="{z[1]}.\2">\2</b>', z[0]), text)
    text = re.sub(r"(?m)^(.*?) *# NEW</i>\n", r"<mark>\1</i>\n</mark>", text)
    return '<h2>The code</h2><pre class="code">' + re.sub(
        r'\n*<i class="comment"># ---- (.+?) --+</i>\n+', r'</pre><h2>\1</h2><pre class="code">',
        text) + "</pre>\n"


def page(name, text, names, figures):
    """Return title and body of a page: docstring, output with figures, code, questions."""
    found = FILE.match(text)
    if text[found.end() :]:
        line = text.count("\n", 0, found.end()) + 1
        sys.exit(f"pages.py: {name}.py, line {line} is not in the form of a lesson")
    title, docstring, source, questions, output = found.groups("")
    body = "".join([*prose(f"{docstring}\n{output}"), code(source), *prose(questions)])
    for z, last in figures.items():  # the last page that prints a figure shows it
        image = f'<img id="{z}" src="{z}" alt="{z}"/>' if last == name else ""
        body = body.replace(f"runs/{z}", f'runs/<a href="{last}.html#{z}">{z}</a>{image}')
    body = re.sub(r"\blesson_(\d)\.(\w+)", lambda z: (
        f'<a href="{names[int(z[1]) - 1]}.html#{z[2]}">{z[0]}</a>'), body)
    return title, re.sub("<h2>(.+?)<", lambda z: (
        f'<h2 id="{z[1].replace(" ", "-")}">{z[1]}<'), body)


def write(project, out):
    """Write the pages, their style and figures, and return a line that says so."""
    files = [*sorted(project.glob("0?_*.py")), project / "train.py"]
    texts = {file.stem: file.read_text(encoding="utf-8-sig").rstrip() + "\n" for file in files}
    figures = {file.name: name for file in project.glob("figures/*.png")
               for name, text in texts.items() if f"figure: runs/{file.name}" in text}
    pages = {name: page(name, text, [*texts], figures) for name, text in texts.items()}
    rows = [row for z in project.glob("README.md") for row in re.findall(
        r"(?m)^\| (?:lesson|\[0\d_|\[train\.py).*\n", z.read_text(encoding="utf-8"))]
    rows = rows or [f"| [{name}.py]({name}.py) | {title} |\n" for name, (title, _) in pages.items()]
    cells = "".join(prose("".join(rows))).replace("<tr>| ", "<tr><td>").replace(" |</", "</td></")
    cells = cells.replace(" | ", "</td><td>").replace('.py"', '.html"').replace("figures/", "")
    pages = {"index": ("Transformer-XL, from scratch", f"<table>{cells}</table>")} | pages
    out.mkdir(parents=True, exist_ok=True)
    for file in Path(__file__).with_suffix(".css"), *project.glob("figures/*.png"):
        (out / file.name).write_bytes(file.read_bytes())
    for i, (name, (title, body)) in enumerate(pages.items()):
        links = [f'<a href="{z}.html">{z}</a>' for z in pages]
        turn = "".join(links[max(0, i - 1) : i] + links[i + 1 : i + 2])  # previous and next
        links[i] += "".join(f'<a class="{z[0]}" href="{name}.html#{z[1]}">{z[2]}</a>'
                            for z in re.findall('<(h2|b) id="([^".]+)">([^<]+)', body))
        (out / f"{name}.html").write_text(PAGE.format(title, "".join(links), body, turn), "utf-8")
    return f"{out / 'index.html'}: the index of {len(texts)} pages, {len(figures)} figures"


if __name__ == "__main__":
    print(write(*map(Path, sys.argv[1:])))
