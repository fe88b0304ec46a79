"""The formula of experiments/scaling.py against sums by hand, and its page against its output.

    pytest tests/experiments/test_scaling.py
"""
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

scaling = import_module("scaling")
PAGE = Path(scaling.__file__).with_name("results.md").read_text(encoding="utf-8")


def test_an_all_reduce_by_hand():
    """4 GPUs, 1 GB at 100 GB/s: 1.5 GB cross each link in 15 ms; 39 buckets of 4 hops."""
    m = scaling.Machine(nvlink=100, network=10, latency=5)
    assert scaling.all_reduce(1e9, 4, m) == pytest.approx(0.015 + 39 * 4 * 5e-6)
    assert scaling.all_reduce(1e9, 1, m) == 0
    # 16 GPUs are two nodes: the network counts; 2 log2(16) hops
    assert scaling.all_reduce(1e9, 16, m) == pytest.approx(2 * 15 / 16 / 10 + 39 * 8 * 5e-6)


def test_a_step_by_hand():
    """enwik8-12L on 22 GPUs, one lane each: 12 layers of 2.2 ms, and the operations of a lane."""
    D, FF, T, K, V = 512, 2048, 512, 1024, 204
    layer = T * D * D + K * D * 2 * D + 3 * T * K * D + T * (D * D + 2 * D * FF)
    flops = 6 * (12 * layer + T * D * V)
    z = scaling.predict("enwik8-12L", 22, scaling.Machine())
    compute = 12 * 2.2e-3 + flops / (0.19 * 989e12)
    assert z["lanes"] == z["parts"] == 1
    assert z["step"] == pytest.approx(compute + z["exposed"])
    assert z["speed"] == pytest.approx(22 * T / z["step"])
    assert z["training"] == pytest.approx(400_000 * z["step"])
    assert z["cost"] == pytest.approx(22 * 3 * z["training"] / 3600)


COMMANDS = re.findall(r"^    python experiments/scaling\.py(.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("flags", COMMANDS)
def test_the_page_shows_what_the_command_prints(flags, capsys, tmp_path, monkeypatch):
    """Word for word, below the command, before the next one."""
    monkeypatch.setattr(scaling.lesson_1, "RUNS", tmp_path)
    assert scaling.main(shlex.split(flags)) == 0
    below = PAGE.split(f"    python experiments/scaling.py{flags}\n")[1]
    printed = capsys.readouterr().out
    if "figure" in flags:
        assert (tmp_path / "scaling.png").stat().st_size > 0
    else:
        assert below.split("    python experiments/scaling.py")[0].strip().startswith(
            printed.strip()), f"the page is stale; now it prints\n{printed}"
