"""Table 9: a small run prints each length, and a window sees all of its tokens.  A GPU's table."""
from functools import partial
from importlib import import_module

import torch

from experiments import speed

lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(11, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=5)


@torch.no_grad()
def test_a_small_run(monkeypatch, capsys):
    monkeypatch.setattr(speed, "PAPER_SLOWDOWN", {5: 3, 300: 7})
    monkeypatch.setitem(speed.SIZES, "small", CONFIG)
    seconds, found = speed.seconds, iter((64, 2.5, 64, 640))
    monkeypatch.setattr(speed, "seconds", lambda call: seconds(call) and next(found))
    assert speed.main(["--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "M 5: memory 500.000, window 2500.000; times slower 5, paper 3",
        "M 300: memory 500.000, window 640000.000; times slower 1280, paper 7"]
    predict = speed.make_window(CONFIG)
    x = torch.arange(10).view(2, 5)
    before, x[0, 0] = predict(x), 10
    assert (predict(x) != before).any(-1).tolist() == [[True], [False]]


def test_the_table_of_a_gpu(monkeypatch, capsys):
    """Here each call takes two seconds, and the product is not made."""
    monkeypatch.setattr(speed, "seconds", lambda call: (
        "square" in call.__code__.co_freevars or call() is None or 2))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(speed.machine, "choose", lambda device: "cpu")
    monkeypatch.setitem(speed.presets.MODELS, "enwik8-12L", speed.presets.MODELS["tiny"])
    assert speed.main(["--scale", "gpu"]) == 0
    _, plain, _, compiled = capsys.readouterr().out.splitlines()
    for row, form in (plain, "plain"), (compiled, "compiled"):
        assert row.endswith(f"|{form}|2000.0|32|0|0%|0.0|0.1|256|0|")
