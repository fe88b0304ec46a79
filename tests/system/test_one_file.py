"""The model as one file is lesson 5's model, and needs nothing else of this project."""
import re
from importlib import import_module

import torch

from training import one_file

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
    outputs += [losses, *memory]
outputs += [*model.parameters(), generate(model.eval(), x, 6)]
"""


def test_the_file_alone_trains_and_generates_as_lesson_5():
    text, alone = one_file.one_file(), {"__name__": "xl"}
    assert re.findall(r"^ *(?:import|from) (.+)$", text, re.MULTILINE) == [
        "math", "dataclasses import dataclass", "torch", "torch.nn as nn",
        "torch.nn.functional as F"]
    lesson_5 = vars(import_module("05_full_model")) | {"torch": torch}
    exec(text + USE, alone)
    exec(USE, lesson_5)
    for a, b in zip(alone["outputs"], lesson_5["outputs"], strict=True):
        assert a.allclose(b, rtol=0, atol=1e-5)
