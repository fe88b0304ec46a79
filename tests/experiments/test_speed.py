"""Table 9: a small run prints each length, and a window sees all of its tokens."""
from importlib import import_module

import torch

from experiments import speed

lesson_5 = import_module("05_full_model")
CONFIG = lesson_5.Config(11, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=5)


@torch.no_grad()
def test_a_small_run(monkeypatch, capsys):
    """It prints a line for each length; the window predicts a token per lane, from all of it."""
    monkeypatch.setattr(speed, "PAPER_SLOWDOWN", {5: 3, 300: 7})
    monkeypatch.setitem(speed.SIZES, "small", CONFIG)
    assert speed.main(["--dtype", "bf16", "--device", "cpu"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["5:", "300:"] and lines[1].endswith("paper 7")
    predict = speed.make_window(CONFIG)
    x = torch.arange(10).view(2, 5)
    before, x[0, 0] = predict(x), 10
    assert (predict(x) != before).any(-1).tolist() == [[True], [False]]
