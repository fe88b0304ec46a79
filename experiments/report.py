"""The tables and figures of results.md and README.md, from the values in results.tsv.

    python -m experiments.report --write    puts the tables into the pages and draws the figures
    python -m experiments.report --check    exits with status 1 if a page differs from results.tsv

A page has each table between <!-- its name --> and <!-- end -->; a figure likewise.

The loss of a model is its test loss at the shortest attention length within 0.001 nats of the best
in validation.  Rows with recurrence are read with a memory, others in windows.  Two rows are
compared seed by seed in one setting (steps, dtype, machine), that with most seeds.  If Student's 95
percent interval of the difference contains 0, or with fewer than three seeds, a claim is undecided.
"""
import re
import sys
from dataclasses import dataclass, field
from fnmatch import filter as select
from itertools import zip_longest
from math import exp, inf, sqrt
from pathlib import Path
from statistics import mean, stdev

__package__ or sys.exit("run python -m experiments.report in the project's folder")

from matplotlib.figure import Figure

from support.files import write_atomically
from training.command import Parser, exit_status

ROOT = Path(__file__).resolve().parent.parent
PAGES = "experiments/results.md", "README.md"
STATUS = "agrees", "reversed", "undecided", "new", "not run"  # new: the paper has no such claim
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True)
class Claim:
    """The claim that a value of one row is larger than a value of another."""

    text: str
    row: str
    other: str
    paper: str = ""  # its values; none if the paper does not compare these
    key: str = "loss"
    minus: str = ""  # as key


CLAIMS = [
    Claim("no recurrence, full loss", "ours-none", "ours", "29.02 − 26.77 ppl"),
    Claim("no recurrence, half loss", "ours-none-half", "ours-half", "30.10 − 28.33 ppl"),
    Claim("no recurrence, longer segment", "ours-none-176", "ours", "27.98 − 26.77 ppl"),
    Claim("no recurrence, shuffled lines", "shuffled-none", "shuffled", "27.1 − 25.2 ppl"),
    Claim("no recurrence, one layer", "layers-1-none", "layers-1"),
    Claim("no recurrence, two layers", "layers-2-none", "layers-2"),
    Claim("words (ppl): no variational dropout", "words-averaged", "words-both", key="ppl"),
    Claim("words (ppl): no averaged weights", "words-locked", "words-both", key="ppl"),
    Claim("words (ppl): neither", "words", "words-both", key="ppl"),
    Claim("Shaw's encoding instead", "shaw", "ours", "27.94 − 26.77 ppl"),
    Claim("Vaswani's encoding instead", "vaswani-none-half", "ours-none-half", "30.97 − 30.10 ppl"),
    Claim("Vaswani's and half loss instead", "vaswani-none-half", "ours-none", "30.97 − 29.02 ppl"),
    Claim("absolute positions", "vaswani", "ours", "section 3.3"),
    Claim("RoPE instead", "rope", "ours"),
    Claim("ALiBi instead", "alibi", "ours"),
    Claim("half loss", "ours-half", "ours", "28.33 − 26.77 ppl"),
    Claim("half loss, no recurrence", "ours-none-half", "ours-none", "30.10 − 29.02 ppl"),
    Claim("Adam's recipe instead", "adam", "ours"),
    *(Claim(f"attention {one} instead of {two}", row, row,
            f"best at {best} words" if best else "", f"loss {one}", f"loss {two}")
      for row, one, two, best in (
          ("ours", 256, 512, 500), ("shaw", 512, 256, 256), ("ours-half", 256, 512, 460),
          ("ours-none", 128, 256, 260), ("ours-none-half", 256, 128, 120), ("rope", 512, 256, 0))),
    Claim("RECL 1.0 (bytes) is longer", "ours", "ours-none", "500 − 300 words", "recl 1.0"),
    Claim("RECL 1.0 (bytes) is longer", "ours", "lstm", "700 − 200 words", "second recl 1.0"),
    *(Claim(text, "adam", "adam", "figure 7", *keys) for text, *keys in (
        ("(a) is flatter than the whole (bits)", "entropy a", "entropy whole"),
        ("(d) is less like the whole than (b) (share)", "apart d", "apart b"),
        ("(d) is flatter than (b) (bits)", "entropy d", "entropy b")))]
PAPER = (  # claims and open questions: where, what was measured here, their CLAIMS or else a status
    ("0.99 on enwik8; 18.3 on WikiText-103; 12 layers match 64", "tables 1, 2", "", "not run"),
    ("longer context than RNNs and plain transformers", "table 8", "RECL, 0.9M weights", "RECL"),
    ("evaluation up to 1,874 times faster", "table 9", "24 layers, one run", "agrees"),
    ("both parts are necessary", "tables 6, 10", "loss, 0.9M weights",
     "no recurrence, [flh]|Shaw|Vasw|abs"),
    ("recurrence helps also where context is short", "table 7", "loss, 0.9M weights", ".* shuf"),
    ("*used:* variational dropout, averaged weights", "section 4.1", "ppl, 2.1M weights", "words"),
    ("*open:* memory length and depth", "", "gain with 1, 2 layers", ".* layer"),
    ("*open:* the stopped gradient", "", "gradients, 2.9M weights", "undecided"),
    ("*open:* sparse attention; other tasks", "", "", "not run"))
FRONT = {  # the claims of the front page, in its words
    ("ours-none", "ours"): "without − with recurrence, trained on all bytes",
    ("ours-none-half", "ours-half"): "without − with recurrence, trained on segments' later halves",
    ("vaswani", "ours"): "absolute − relative positions, with recurrence",
    ("ours-none-half", "ours-none"): "trained on later halves − on all bytes, without recurrence",
    ("rope", "rope"): "RoPE, attending to 512 − 256 bytes (256 in training)"}
ROW_ORDER = [*dict.fromkeys(name for claim in CLAIMS for name in (claim.other, claim.row)),
             "pretrained"]
TABLES = {  # name: the rows (none: all), the patterns of the columns
    "rows": ((), ("loss", "length", "copying 64")),
    "second recl": ((), ("second recl *",)),
    "words": (("words", "words-both", "words-locked", "words-averaged"), ("ppl", "ppl length")),
    "terms": (("ours", "adam"), ("entropy *", "apart *")),
    "memory": ((), ("memory *",)),
    "gradient": ((), ("gradient lacks *",))}


# ---- results.tsv --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    """A trained model and its values, {"measure length": value}."""

    row: str
    seed: int
    setting: tuple  # steps, dtype, machine
    about: tuple  # commit, torch, minutes
    values: dict = field(default_factory=dict)

    def over(self, measure):
        """Return {length: value} of a measure."""
        keys = [key for key in self.values if key.rpartition(" ")[0] == measure]
        return {int(key.rpartition(" ")[2]): self.values[key] for key in keys}

    def add_losses(self):
        """Add "loss L", the test loss by attention length, "length", the chosen one, and "loss";
        for words "ppl" instead, the perplexity, and its "ppl length"."""
        valid, test = (self.over(f"{split} memory") or self.over(f"{split} windows")
                       for split in ("valid", "test"))
        self.values.update({f"loss {L}": loss for L, loss in test.items()})
        if valid:
            L = min(L for L, loss in valid.items() if loss <= min(valid.values()) + 0.001)
            self.values.update({"ppl length": L, "ppl": exp(test[L])}
                               if self.row.startswith("words") else {"length": L, "loss": test[L]})
        elif "test memory" in self.values:  # an LSTM's, which has no length
            self.values["loss"] = self.values["test memory"]


def read_runs(path):
    """Return the runs of a table, in the order of ROW_ORDER.  ValueError with a bad line."""
    runs, lines = {}, path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[1:], 2):
        try:
            row, seed, steps, dtype, measure, length, value, *about = line.split("\t")
            commit, machine, torch, minutes = about
            run = Run(row, int(seed), (int(steps), dtype, machine), (commit, torch, float(minutes)))
            values = runs.setdefault((row, seed, run.setting), run).values
            key = f"{measure} {length}".strip()
            if values.setdefault(key, float(value)) != float(value):
                raise ValueError(f"{row}, seed {seed} has another value of {key}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; remove the lines of this row and "
                             "seed, and run the lab again") from None
    for run in runs.values():
        run.add_losses()
    names = [*ROW_ORDER, *(row for row, *_ in runs)]
    return sorted(runs.values(), key=lambda run: (names.index(run.row), run.seed))


def groups(runs, row=None):
    """Return [(row, setting, its runs)], of a row or of all; a row's most seeds first."""
    found = {}
    for run in runs:
        if row in (None, run.row):
            found.setdefault((run.row, run.setting), []).append(run)
    rows = [run.row for run in runs]
    return sorted(((*key, group) for key, group in found.items()),
                  key=lambda group: (rows.index(group[0]), -len(group[2])))


def letters(runs):
    """Return {setting: the letter that the tables have for it}."""
    return dict(zip(dict.fromkeys(run.setting for run in runs), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))


def compare(claim, runs):
    """Return (status, differences by seed, half of their 95 percent interval, setting)."""
    found, others = {}, {(run.setting, run.seed): run for run in runs if run.row == claim.other}
    for run in runs:
        if run.row == claim.row and (other := others.get((run.setting, run.seed))):
            pair = run.values.get(claim.key), other.values.get(claim.minus or claim.key)
            if None not in pair:
                found.setdefault(run.setting, []).append(pair[0] - pair[1])
    if not found:
        return "not run", [], 0.0, None
    setting, values = max(found.items(), key=lambda item: len(item[1]))
    n = len(values)
    half = T95[min(n, 10)] * stdev(values) / sqrt(n) if n > 1 else inf
    status = ("undecided" if n < 3 or not abs(mean(values)) > half else
              "new" if not claim.paper else
              "agrees" if mean(values) > 0 else "reversed")
    return status, values, half, setting


# ---- tables -------------------------------------------------------------------------------------

def table(header, rows):
    """Return a table of Markdown, with real minus signs."""
    lines = (header, ["---"] * len(header), *rows)
    text = "\n".join(f"|{'|'.join(map(str, cells))}|" for cells in lines)
    return re.sub(r"(?<=\|)-(?=\d)", "−", text)


def claims_tables(runs):
    """Return the table of all claims by status, and that of the front page."""
    lines, front = [], []
    for claim in CLAIMS:
        status, values, half, setting = compare(claim, runs)
        digits = 0 if "recl" in claim.key else 3
        here = f"{mean(values):+.{digits}f}" if values else ""
        here += f" ± {half:.{digits}f}" if len(values) > 1 else ""
        rows = claim.row + f" − {claim.other}" * (claim.other != claim.row)
        seeds = f"{len(values)} {letters(runs).get(setting, '')}".strip()
        lines.append((status, claim.text, f"`{rows}`", claim.paper, here, seeds))
        if (claim.row, claim.other) in FRONT and "loss" in claim.key:
            front.append((FRONT[claim.row, claim.other], here, len(values), claim.paper, status))
    lines.sort(key=lambda cells: STATUS.index(cells[0]))
    return (table(("status", "claim", "rows", "paper", "here", "seeds"), lines),
            table(("models compared", "here", "seeds", "paper", "status"), front))


def paper_table(runs):
    """Return the lines of PAPER with the worst status of their claims; reversed ones by name."""
    lines = []
    for text, place, here, pattern in PAPER:
        claims = [claim for claim in CLAIMS if re.match(pattern, claim.text)]
        found = [compare(claim, runs)[0] for claim in claims]
        against = [claim.text for claim, status in zip(claims, found) if status == "reversed"]
        worst = max(found, key=("new", "agrees", "not run", "undecided", "reversed").index,
                    default=pattern)
        counts = [f"{found.count(status)} {status}" for status in STATUS if status in found]
        lines.append((text, place, here, ", ".join(counts), "; ".join([worst, *against])))
    return table(("claim or question", "where", "here", "rows", "worst"), lines)


def spread(values):
    """Return the mean of the values that are there ± half their range; nothing without any."""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    digits = 3 if any(value % 1 for value in values) else 0
    half = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if min(values) < max(values) else ""
    return f"{mean(values):,.{digits}f}{half}"


def values_table(runs, rows, patterns):
    """Return a table of each row and setting that has some of the values.  Named rows are shown
    in one setting, that with most seeds."""
    most = [group for row in rows for group in groups(runs, row)[:1]]
    there = dict.fromkeys(key for run in runs for key in run.values)
    keys = [key for pattern in patterns for key in select(there, pattern)]
    lines = []
    for row, setting, group in most if rows else groups(runs):
        cells = [spread([run.values.get(key) for run in group]) for key in keys]
        if "length" in keys and cells[0]:
            chosen = sorted({int(run.values["length"]) for run in group if "length" in run.values})
            cells[keys.index("length")] = ", ".join(map(str, chosen))
        if any(cells):
            seeds = sum(not run.values.keys().isdisjoint(keys) for run in group)
            lines.append((f"`{row}`", f"{seeds} {letters(runs)[setting]}", *cells))
    names = [key.removeprefix(patterns[0][:-1]) if len(patterns) == 1 else key for key in keys]
    cells = [("row", "seeds", *names), *lines]
    first, *others = zip(*cells) if len(keys) > 6 else cells  # wide tables as columns
    return table(first, others) if lines else "Not run."


def settings_table(runs):
    """Return the steps, dtypes and machines, with the letters of the tables."""
    lines = []
    for setting, letter in letters(runs).items():
        commits, torches, minutes = zip(*(run.about for run in runs if run.setting == setting))
        lines.append((letter, *setting, len(commits), f"{min(minutes):.0f} to {max(minutes):.0f}",
                      ", ".join(sorted({*torches})), ", ".join(sorted({*commits}))))
    return table(("", "steps", "dtype", "machine", "models", "minutes", "torch", "commits"), lines)


# ---- figures: blue, orange and black ------------------------------------------------------------

def curve(runs, row, measure):
    """Return {length: mean over the seeds} of a measure, from 1, in the setting with most seeds."""
    tables = [run.over(measure) for _, _, group in groups(runs, row)[:1] for run in group]
    return {L: mean(values[L] for values in tables) for L in tables[0] if L} if tables else {}


def draw_marks(marks, **labels):
    """Plot [(name, value, half of its interval, style)], a line for each name; None if empty."""
    if not marks:
        return None
    height = 1.2 + 0.3 * len({name for name, *_ in marks})
    axes = Figure(figsize=(7, height), layout="constrained").subplots()
    for name, value, half, style in marks:
        axes.errorbar(value, name, xerr=half, fmt=style, mfc="none", capsize=3 * (half > 0))
    axes.set_ylim(len(axes.get_yticks()) - 0.5, -0.5)  # the first on top
    axes.grid(axis="x", alpha=0.4)
    axes.set(xmargin=0.1, **labels)
    if axes.get_xscale() == "linear":
        axes.axvline(0, color="black", linewidth=2, zorder=0)
    axes.minorticks_off()
    return axes.figure


def draw_lines(panels, title, xlabel, ylabel, **labels):
    """Plot {title: {name: (points, style)}} over logarithmic lengths; None without points."""
    panels = {title: named for title, lines in panels.items()
              if (named := {name: line for name, line in lines.items() if line[0]})}
    if not panels:
        return None
    figure = Figure(figsize=(3 + 4 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axes, (panel, lines) in zip(grid.flat, panels.items()):
        axes.set(xscale="log", title=panel, **labels)
        for name, (points, style) in lines.items():
            axes.plot(*zip(*points.items()), style, markersize=4, label=name)
        axes.set_xticks(list(points), list(points))
        axes.minorticks_off()
        axes.legend()
    figure.suptitle(title)
    figure.supxlabel(xlabel)
    figure.supylabel(ylabel)
    return figure


def make_figures(runs):
    """Yield (name, description, figure), the figure None if nothing of it has been run."""
    pairs = [(claim, *compare(claim, runs)) for claim in CLAIMS if claim.key == "loss"]
    styles = {"agrees": "C0o", "reversed": "C1s"}
    yield "differences", "Difference of losses, with its interval", draw_marks(
        [(claim.text, mean(values), half, styles.get(status, "ko"))
         for claim, status, values, half, _ in pairs if len(values) > 1],
        title="Blue agrees, orange is reversed, black is neither",
        xlabel="increase of the test loss (nats per byte), 95 percent interval")
    ours = {"ours": "ko-", "ours-none": "k^--"}
    settings = [run.setting for run in runs if run.row == "layers-1"]
    panels = {"four layers": (runs, ours | {"shaw": "ks:", "rope": "C1o-", "alibi": "C0o-"}),
              "one, two and four layers": (  # all of one setting
                  [run for run in runs if run.setting in settings],
                  ours | {"layers-1": "C1o-", "layers-1-none": "C1^--",
                          "layers-2": "C0o-", "layers-2-none": "C0^--"})}
    yield "lengths", "Test loss over attention length, by encoding and depth", draw_lines(
        {layers: {row: (curve(of, row, "loss"), style) for row, style in styles.items()}
         for layers, (of, styles) in panels.items()},
        "Beyond the 256 bytes of training RoPE fails; ours hardly changes up to 768",
        "attention length (bytes, logarithmic)", "nats per byte (not from 0)")
    ticks = 32, 64, 128, 256, 512, 1024
    yield "recl", "Relative effective context length", draw_marks(
        [(f"{row}, r = {r}", mean(lengths), (max(lengths) - min(lengths)) / 2, style)
         for r, style in (("0.1", "C0o"), ("0.5", "C1s"), ("1.0", "k^"))
         for row, _, group in groups(runs)
         if (lengths := [run.values[key] for run in group if (key := f"recl {r}") in run.values])],
        xscale="log", xticks=ticks, xticklabels=ticks,
        xlabel="effective context in bytes (logarithmic), mean ± half range",
        title="Read with T = 128, ours-none uses the least context")
    styles = {"whole": "k-", "(a)": "k:", "(b)": "C0.-", "(d)": "C1.-"}
    yield "terms", "Attention over distance, whole and by term", draw_lines(
        {row: {part: (curve(runs, row, f"attention {part.strip('()')}"), style)
               for part, style in styles.items()} for row in ("ours", "adam")},
        "Averaged over queries (a) is nearly uniform; (d) is close to the whole, with Adam (b) too",
        "distance (bytes, logarithmic)", "mean attention (logarithmic)", yscale="log")
    names = {"all": "memory in all layers", "none": "no memory", "shuffled": "memory, shuffled"}
    yield "layers", "Loss without the memory of a layer", draw_marks(
        [(names.get(key[7:], f"layer {key[-1]} without memory"), value, 0, "C0o")
         for run in runs for key, value in run.values.items() if key.startswith("memory ")],
        title="Here the last layer's memory matters most", xlabel="bits per byte", xlim=(0, None))


# ---- pages --------------------------------------------------------------------------------------

def make_blocks(runs):
    """Return {name: text} of all tables and figures, and {name: figure}."""
    missing = [row for row in ROW_ORDER[:-1]  # the model in pretrained/ is one
               if max((len(group) for *_, group in groups(runs, row)), default=0) < 3]
    commands = {"--scale small": [row for row in missing if not row.startswith("words")],
                "--scale words": [row for row in missing if row.startswith("words")]}
    claims, front = claims_tables(runs)
    blocks = {"claims": claims, "front": front, "paper": paper_table(runs),
              **{name: values_table(runs, *of) for name, of in TABLES.items()},
              "settings": settings_table(runs),
              "not run": "\n".join(f"`python -m experiments.lab {flags} --rows {' '.join(rows)}`"
                                    for flags, rows in commands.items() if rows) or "Nothing."}
    figures = {}
    for name, about, figures[name] in make_figures(runs):
        blocks[f"figure {name}"] = (f"![{about}](../figures/{name}.png)" if figures[name]
                                    else f"{about}: not run.")
    return blocks, figures


def fill(page, text, blocks):
    """Return a page's text with the blocks between its markers.  ValueError for a wrong marker."""
    marks = re.findall(r"<!-- ([a-z ]+) -->", text)
    for name, end in zip_longest(marks[::2], marks[1::2]):
        if name not in blocks or end != "end":
            raise ValueError(f"{page}: <!-- {name} --> is not a table of report.py, or it has no "
                             "<!-- end -->")
    return re.sub(r"(<!-- ([a-z ]+) -->\n).*?(<!-- end -->)", lambda found: (
        f"{found[1]}{blocks[found[2]]}\n{found[3]}"), text, flags=re.DOTALL)


def main(argv=None):
    """Write the tables and figures, or check the tables."""
    parser = Parser(prog="python -m experiments.report", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    flags = parser.parse_args(argv)
    blocks, figures = make_blocks(read_runs(ROOT / "experiments/results.tsv"))
    old = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    new = {page: fill(page, text, blocks) for page, text in old.items()}
    if flags.check:
        different = [page for page in PAGES if new[page] != old[page]]
        for page in different:
            print(f"{page} differs from results.tsv: run python -m experiments.report --write")
        return int(different != [])
    for page in PAGES:
        write_atomically(ROOT / page, lambda file: file.write(new[page]), "x")
    for name, figure in figures.items():
        if figure:
            figure.savefig(ROOT / f"figures/{name}.png", dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("report.py", main))
