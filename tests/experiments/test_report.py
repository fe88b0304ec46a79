"""report.py pairs, judges and prints as it says, also from a part of the values."""
from importlib import import_module
from types import SimpleNamespace

import pytest

report = import_module("report")
HEADER = "row seed steps dtype measure length value commit machine torch minutes"


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
def folder(tmp_path, monkeypatch):
    """A project with two pages; .put(lines) writes its results.tsv, .page() reads results.md."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "figures").mkdir()
    for page in report.PAGES:
        (tmp_path / page).write_text("text\n<!-- claims -->\nold\n<!-- end -->\n"
                                     "<!-- figure lengths -->\n<!-- end -->\nlast\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    table, page = tmp_path / "experiments/results.tsv", tmp_path / "experiments/results.md"
    return SimpleNamespace(
        path=tmp_path, table=table, page=page.read_text, write=page.write_text,
        put=lambda lines: table.write_text("\n".join(("\t".join(HEADER.split()), *lines, ""))))


def test_the_pages_show_the_values_that_are_there():
    assert report.main(["--check"]) == 0


def compared(folder, lines, name="ours-none"):
    """Return what compare says of the loss of a row."""
    folder.put(lines)
    return report.compare(next(claim for claim in report.CLAIMS if claim.row == name),
                          report.read(folder.table))


@pytest.mark.parametrize("none, status", [
    ((1.2, 1.25, 1.33), "as in the paper"), ((0.8, 0.85, 0.93), "reversed"),
    ((0.9, 1.2, 1.2), "undecided"), ((1.2, 1.25), "undecided"), ((), "not run")])
def test_a_claim_is_judged_by_its_interval(folder, none, status):
    found = compared(folder, losses("ours", (1.0, 1.05, 1.1)) + losses("ours-none", none))
    assert found[0] == status
    if status == "as in the paper":  # the interval: 4.303 * 0.01732 / sqrt(3)
        assert found[1:3] == (pytest.approx([0.2, 0.2, 0.23]), pytest.approx(0.0430, abs=1e-4))
    assert compared(folder, losses("ours", (1, 1)) + losses("rope", none), "rope")[0] in (
        "not in the paper", status)


@pytest.mark.parametrize("other", [(1300, "bf16", "EPYC"), (4300, "float32", "EPYC"),
                                   (4300, "bf16", "Xeon")])
def test_only_equal_seeds_and_settings_are_paired(folder, other):
    lines = losses("ours", (1.0, 1.0)) + losses("ours-none", (1.1, 1.2, 9.0))
    found = compared(folder, lines + losses("ours", (5, 5, 5), other))
    assert found[1] == pytest.approx([0.1, 0.2])
    more = losses("ours", (5, 5, 5), other) + losses("ours-none", (6, 7, 8), other)
    status, differences, _, setting = compared(folder, lines + more)
    assert (status, differences, setting) == ("undecided", [1, 2, 3], other)


def test_the_length_is_chosen_in_validation(folder):
    """The shortest within 0.001 nats of the lowest; with a memory, if the row has one."""
    curves = {"valid": {64: 1.2, 128: 1.0, 256: 0.9995, 512: 1.1},
              "test": {64: 2.0, 128: 2.1, 256: 2.2, 512: 1.9}}
    folder.put(line(row, 0, f"{split} {reading}", L, loss + worse)
               for row, reading, worse in (("ours", "windows", 1.0), ("ours", "memory", 0.0),
                                           ("ours-none", "windows", 0.0))
               for split, curve in curves.items() for L, loss in curve.items())
    for run in report.read(folder.table):
        assert (run.values["length"], run.values["loss"], run.values["loss 512"]) == (128, 2.1, 1.9)


@pytest.mark.parametrize("wrong", ["ours\t0", line("ours", 0, "recl", 0.1, "long"),
                                   line("ours", "zero", "recl", 0.1, 64),
                                   line("ours", 1, "parameters", "", 878763)])
def test_a_bad_line_is_named(folder, wrong, capsys):
    folder.put([line("ours", 1, "parameters", "", 878762), wrong])
    assert report.exit_status("report.py", report.main, ["--write"]) == 1
    error = capsys.readouterr().err
    assert "results.tsv, line 3: " in error and "run lab.py again" in error
    assert error.count("\n") == 1 and "old" in folder.page()


def test_pages_are_written_and_checked_also_from_a_part(folder, capsys):
    """A page that differs is named, a figure without values is not run, a new row is listed."""
    folder.put([])
    assert report.main(["--check"]) == 1
    assert [name.split()[0] for name in capsys.readouterr().out.splitlines()] == [*report.PAGES]
    assert report.main(["--write"]) == 0 and report.main(["--check"]) == 0
    assert folder.page().startswith("text\n<!-- claims -->\n|status|claim|")
    assert folder.page().endswith("by encoding: not run.\n<!-- end -->\nlast\n")
    folder.put(losses("ours", (1.0, 1.1)) + [line("new", 0, "copying", 64, -1.5)]
               + [line("new", 0, "recl", r, 64) for r in (0.1, 0.5, 1.0)])
    assert report.main(["--check"]) == 1 and report.main(["--write"]) == 0
    assert "](../figures/lengths.png)" in folder.page()
    assert {path.stem for path in folder.path.glob("figures/*")} == {"lengths", "recl"}
    assert capsys.readouterr() and report.main([]) == 0
    printed = capsys.readouterr().out
    assert "|`new`|1 A|64|64|64|" in printed and "|`new`|1 A|||−1.500|" in printed


@pytest.mark.parametrize("text", ["<!-- clams -->\n<!-- end -->\n", "<!-- claims -->\nmy text\n"
                                  "<!-- recl -->\n<!-- end -->\n", "<!-- claims -->\n"])
def test_a_wrong_marker_is_named_and_nothing_is_written(folder, text):
    folder.put([])
    folder.write(text)
    with pytest.raises(ValueError, match="results.md: <!-- clai?ms -->"):
        report.main(["--write"])
    assert folder.page() == text and "old" in (folder.path / "README.md").read_text()


def test_figures_show_the_values(folder):
    folder.put(losses("ours", (1.0, 1.1)) + losses("ours-none", (1.2, 1.5))
               + [line("ours", seed, "test memory", 512, 0.8 + seed) for seed in (0, 1)]
               + [line("adam", 0, "attention b", D, 0.5) for D in (0, 1, 2)])
    _, figures = report.make_blocks(report.read(folder.table))
    assert [name for name in figures if figures[name]] == ["differences", "lengths", "terms"]
    assert figures["lengths"].axes[0].lines[0].get_xydata().tolist() == [
        pytest.approx([64, 1.05]), pytest.approx([512, 1.3])]
    assert figures["terms"].axes[0].lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.5]]
    assert figures["differences"].axes[0].lines[0].get_xdata() == pytest.approx([0.3])
