"""The model as one file is lesson 5's model, and needs nothing else of this project."""
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from training import one_file

lesson_5 = import_module("05_full_model")
USE = """
torch.manual_seed(0)
model = TransformerXL(Config(13, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=9, mem_len=5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory, outputs = None, []
for x in torch.randint(13, (3, 2, 4)):
    losses, memory = model(x, memory, x)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    outputs += [losses.detach(), *memory]
outputs += [*model.parameters(), generate(model.eval(), x, 6)]
torch.save([output.detach() for output in outputs], "outputs.pt")
"""


@pytest.mark.slow
def test_the_file_alone_trains_and_generates_as_lesson_5(tmp_path, monkeypatch):
    """In an empty folder, three steps with a memory and a sample are equal up to rounding."""
    (tmp_path / "xl.py").write_text(one_file.one_file() + USE, encoding="utf-8")
    subprocess.run([sys.executable, "-I", "xl.py"], cwd=tmp_path, check=True, timeout=60)
    found = torch.load(tmp_path / "outputs.pt")
    monkeypatch.chdir(tmp_path)
    exec(USE, vars(lesson_5) | {"torch": torch})
    wanted = torch.load(tmp_path / "outputs.pt")
    assert all(a.allclose(b, rtol=0, atol=1e-5) for a, b in zip(found, wanted, strict=True))
