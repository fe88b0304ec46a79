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


@pytest.mark.parametrize("none, status", [
    ((1.2, 1.25, 1.33), "agrees"), ((0.8, 0.85, 0.93), "reversed"),
    ((0.9, 1.2, 1.2), "undecided"), ((1.2, 1.25), "undecided"), ((), "not run")])
def test_a_claim_is_judged_by_its_interval(put, none, status):
    """The interval of 0.2, 0.2 and 0.23 is 4.303 * 0.01732 / sqrt(3)."""
    runs = put(losses("ours", (1.0, 1.05, 1.1)) + losses("ours-none", none))
    found = report.compare(report.Claim("", "ours-none", "ours", "yes"), runs)
    assert found[0] == status
    if status == "agrees":
        assert found[1:3] == (pytest.approx([0.2, 0.2, 0.23]), pytest.approx(0.0430, abs=1e-4))
    assert report.compare(report.Claim("", "ours-none", "ours"), runs)[0] in (
        "new", "not run")


@pytest.mark.parametrize("n", range(2, 11))
def test_an_interval_has_95_percent_of_students_t(put, n):
    """With t = sqrt(n - 1) tan(angle) its density is proportional to cos(angle)^(n - 2)."""
    runs = put(losses("ours", n * [1.0]) + losses("ours-none", [1 + i * i for i in range(n)]))
    _, found, half, _ = report.compare(report.Claim("", "ours-none", "ours"), runs)
    edge = math.atan(half / statistics.stdev(found) * math.sqrt(n / (n - 1)))
    angles = np.linspace(0, math.pi / 2, 100_001)[1::2]
    density = np.cos(angles) ** (n - 2)
    assert density[angles < edge].sum() / density.sum() == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("other", [(1300, "bf16", "EPYC"), (4300, "float32", "EPYC"),
                                   (4300, "bf16", "Xeon")])
def test_only_equal_seeds_and_settings_are_paired(put, other):
    """With pairs in two settings, the one with more of them counts."""
    claim = report.Claim("", "ours-none", "ours", "yes")
    lines = losses("ours", (1.0, 1.0)) + losses("ours-none", (1.1, 1.2, 9.0))
    lines += losses("ours", (5, 5, 5), other)
    assert report.compare(claim, put(lines))[1] == pytest.approx([0.1, 0.2])
    lines += losses("ours-none", (6, 7, 8), other)
    assert report.compare(claim, put(lines))[1::2] == ([1, 2, 3], other)


def test_the_length_is_chosen_in_validation(put):
    """It is the shortest within 0.001 nats of the lowest; with a memory, if the row has one."""
    curves = {"valid": {64: 1.2, 128: 1.0, 256: 0.9995, 512: 1.1},
              "test": {64: 2.0, 128: 2.1, 256: 2.2, 512: 1.9}}
    runs = put(line(row, 0, f"{split} {reading}", L, loss + worse)
               for row, reading, worse in (("ours", "windows", 1.0), ("ours", "memory", 0.0),
                                           ("ours-none", "windows", 0.0))
               for split, curve in curves.items() for L, loss in curve.items())
    for run in runs:
        assert (run.values["length"], run.values["loss"], run.values["loss 512"]) == (128, 2.1, 1.9)


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
    assert page.read_text().endswith("by encoding: not run.\n<!-- end -->\nlast\n")
    runs = put([*losses("ours", (1.0, 1.1)), *losses("ours-none", (1.2, 1.5)),
                line("new", 0, "copying", 64, -1.5), line("ours", 0, "test memory", 512, 0.8),
                line("ours", 1, "test memory", 512, 1.8), line("ours", 0, "attention b", 4, 0.5),
                line("ours", 1, "attention b", 4, 0.7), line("adam", 0, "attention d", 8, 0.1)])
    assert report.main(["--check"]) == 1 and report.main(["--write"]) == 0
    assert "](../figures/lengths.png)" in page.read_text()
    assert {path.stem for path in tmp_path.glob("figures/*")} == {"lengths", "differences", "terms"}
    figures = {name: figure for name, _, figure in report.make_figures(runs) if figure}
    assert figures["lengths"].axes[0].lines[0].get_xydata().tolist() == [
        pytest.approx([64, 1.05]), pytest.approx([512, 1.3])]
    assert figures["differences"].axes[0].lines[0].get_xdata() == pytest.approx([0.3])
    (bar,) = figures["differences"].axes[0].collections[0].get_segments()
    assert bar[:, 0] == pytest.approx([0.3 - 1.2706, 0.3 + 1.2706])  # 0.2 and 0.4
    assert [(panel.get_title(), each.get_label(), *map(tuple, each.get_data()))
            for panel in figures["terms"].axes for each in panel.lines] == [
        ("ours", "(b)", (4,), pytest.approx((0.6,))), ("adam", "(d)", (8,), (0.1,))]
    assert "|`new`|1 A|||−1.500|" in report.make_blocks(runs)[0]["rows"]
