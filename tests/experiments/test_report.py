"""Test how report.py pairs, judges and prints, also from a part of the values."""
import math
import statistics
import subprocess
import sys

import numpy as np
import pytest

from experiments import report


def line(row, seed, measure, length, value, setting=(4300, "bf16", "EPYC")):
    """Return a line of results.tsv."""
    about = "c0ffee", setting[2], "2.13", 4.5
    return "\t".join(map(str, (row, seed, *setting[:2], measure, length, value, *about)))


def losses(row, by_seed, setting=(4300, "bf16", "EPYC")):
    """Return the lines of a row that has these losses, by seed, at attention length 64 only."""
    reading = "windows" if "none" in row else "memory"
    return [line(row, seed, f"{split} {reading}", 64, value, setting)
            for seed, value in enumerate(by_seed) for split in ("valid", "test")]


@pytest.fixture
def put(tmp_path, monkeypatch):
    """put(lines) writes the results.tsv of a project with two pages, in the current folder."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in "experiments", "figures":
        (tmp_path / folder).mkdir()
    for page in report.PAGES:
        (tmp_path / page).write_text("text\n<!-- claims -->\nold\n<!-- end -->\n"
                                     "<!-- figure lengths -->\n<!-- end -->\nlast\n")
    table = tmp_path / "experiments/results.tsv"
    return lambda lines: table.write_text("\n".join(("", *lines, ""))) and report.read_runs(table)


def test_the_pages_equal_the_report_which_needs_no_torch():
    check = ("import sys; sys.modules['torch'] = None; from experiments import report; "
             "sys.exit(report.main(['--check']))")
    assert subprocess.run([sys.executable, "-c", check], cwd=report.ROOT).returncode == 0


@pytest.mark.parametrize("n", range(2, 11))
def test_a_claim_is_judged_by_pairs_of_most_seeds_and_students_interval(put, n):
    """With t = sqrt(n - 1) tan(angle) its density is proportional to cos(angle)^(n - 2).

    Only equal seeds and settings are paired; the setting with most pairs counts.
    """
    lines = [text for other in ((1300, "bf16", "EPYC"), (4300, "float32", "EPYC"), (
        4300, "bf16", "Xeon")) for text in losses("ours", 12 * [5], other) + losses(
        "ours-none", [6], other)]
    lines += losses("ours", n * [1]) + losses("ours-none", [*(8 + i * i for i in range(n)), 0])
    status, found, half, setting = report.compare(
        report.Claim("", "ours-none", "ours", "yes"), put(lines))
    assert found == [7 + i * i for i in range(n)] and setting == (4300, "bf16", "EPYC")
    assert status == ("agrees" if n > 2 else "undecided")
    edge = math.atan(half / statistics.stdev(found) * math.sqrt(n / (n - 1)))
    angles = np.linspace(0, math.pi / 2, 100_001)[1::2]
    density = np.cos(angles) ** (n - 2)
    assert density[angles < edge].sum() / density.sum() == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("wrong, page, message", [
    ("ours\t0", "", "results.tsv, line 3: "),
    (line("ours", 0, "recl", 0.1, "long"), "", "results.tsv, line 3: "),
    (line("ours", 1, "parameters", "", 878763), "", "has another value of parameters"),
    ("", "<!-- clams -->\n<!-- end -->\n", "results.md: <!-- clams -->"),
    ("", "<!-- claims -->\nmy text\n<!-- recl -->\n<!-- end -->\n", "results.md: <!-- claims -->"),
    ("", "<!-- claims -->\n", "results.md: <!-- claims -->")])
def test_a_bad_line_or_marker_is_named_and_nothing_is_written(
        put, wrong, page, message, tmp_path):
    put([])
    with open("experiments/results.tsv", "a") as file:
        file.write(line("ours", 1, "parameters", "", 878762) + f"\n{wrong}\n" * bool(wrong))
    (tmp_path / report.PAGES[0]).write_text(page)
    with pytest.raises(ValueError, match=message):
        report.main(["--write"])
    assert [(tmp_path / name).read_text().count("old") for name in report.PAGES] == [0, 1]


def test_pages_and_figures_are_written_and_checked_also_from_a_part(put, tmp_path, capsys):
    """Pages that differ and new rows are listed; a figure without values reads 'not run.'"""
    put([])
    assert report.main(["--check"]) == 1
    assert [name.split()[0] for name in capsys.readouterr().out.splitlines()] == [*report.PAGES]
    assert report.main(["--write"]) == 0 and report.main(["--check"]) == 0
    page = tmp_path / report.PAGES[0]
    assert page.read_text().startswith("text\n<!-- claims -->\n|status|claim|")
    assert page.read_text().endswith("by encoding and depth: not run.\n<!-- end -->\nlast\n")
    runs = put([*losses("words", [2]), *losses("ours", (1, 1.1)), *losses("ours-none", (1.2, 1.5)),
                line("new", 0, "copying", 64, -1.5), line("ours", 0, "test memory", 512, 0.8),
                line("ours", 1, "test memory", 512, 1.8), line("ours", 0, "attention b", 4, 0.5),
                line("ours", 1, "attention b", 4, 0.7), line("adam", 0, "attention d", 8, 0.1)])
    assert report.main(["--check"]) == 1 and report.main(["--write"]) == 0
    assert "](../figures/lengths.png)" in page.read_text()
    assert {path.stem for path in tmp_path.glob("figures/*")} == {"lengths", "differences", "terms"}
    figures = {name: figure for name, _, figure in report.make_figures(runs) if figure}
    assert [each.get_xydata().tolist() for each in figures["lengths"].axes[0].lines] == [[
        pytest.approx([64, 1.05]), pytest.approx([512, 1.3])], [pytest.approx([64, 1.35])]]
    assert figures["differences"].axes[0].lines[0].get_xdata() == pytest.approx([0.3])
    (bar,) = figures["differences"].axes[0].collections[0].get_segments()
    assert bar[:, 0] == pytest.approx([0.3 - 1.2706, 0.3 + 1.2706])  # 0.2 and 0.4
    assert [(panel.get_title(), each.get_label(), *map(tuple, each.get_data()))
            for panel in figures["terms"].axes for each in panel.lines] == [
        ("ours", "(b)", (4,), pytest.approx((0.6,))), ("adam", "(d)", (8,), (0.1,))]
    blocks = report.make_blocks(runs)[0]  # ours has two seeds; loss, length and copying by row
    assert "|`new`|1 A|||−1.500|" in blocks["rows"] and "`words" not in blocks["rows"]
    assert "--rows ours ours-none " in blocks["not run"] and "|1 A|7.389|64|" in blocks["words"]
