"""Train, evaluate and generate with every size on torch's device `meta`, which has only shapes.
This finds tensors on another device than the model's, and values for which the CPU would wait."""
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course import lessons
from training import presets
from training.reader import reader_of
from training.optimizers import OPTIMIZERS

train = import_module("train")
lesson_5 = import_module("05_full_model")
aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Watches every operation.  Values that are read are 0, and each band contains three words."""

    reads = Counter()  # function of this project -> the number of values that it waits for

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if func in (aten._local_scalar_dense.default, aten.nonzero.default) or is_copy:
            frame = sys._getframe(1)
            while frame.f_globals["__name__"].split(".")[0] in ("torch", __name__.split(".")[0]):
                frame = frame.f_back
            self.reads = self.reads + Counter([frame.f_code.co_name])
            if is_copy:
                return torch.zeros(args[0].shape, device="cpu")
            return 0 if func is aten._local_scalar_dense.default else args[0].new_empty(
                (3, args[0].dim()), dtype=torch.int64)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.device.type != "meta":
                raise AssertionError(f"{func} returns a tensor on {tensor.device}")
        return out


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("tiny", "laptop-words") else pytest.mark.slow)
    for name in presets.CONFIGS])
def test_every_tensor_is_on_the_models_device(name, plain, monkeypatch):
    """A two-layer model of each size trains two steps, fills the evaluation memory and samples."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **more: nullcontext())  # has no meta
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(import_module("torch.optim.adam"), "_device_dtype_check_for_fused", id)
    recipe = replace(presets.RECIPES[name], plain=plain)
    with torch.device("meta"):
        model = lesson_5.TransformerXL(replace(presets.CONFIGS[name], n_layer=2)).train()
        x = torch.empty(recipe.batch, recipe.segment, dtype=torch.int64)
        text = torch.empty(recipe.eval_mem_len + 5 * recipe.eval_segment // 2, dtype=torch.uint8)
        prompt = torch.empty(2, 100, dtype=torch.int64)
    reader, memory = reader_of(model, plain), None
    optimizer = OPTIMIZERS[recipe.optimizer](model, recipe)
    with Watch() as watch:
        for _ in range(2):
            loss, norm, memory = train.train_step(model, optimizer, x, x, memory, recipe)
        train.evaluate(reader, text, recipe)
        with train.evaluating(reader, recipe):
            assert lesson_5.generate(reader, prompt, 3).shape == (2, 3)
    if not plain:  # the blocks of a long prompt
        assert [len(mask) for *_, mask in reader.in_blocks(1100, 0, x.device)] == [512, 512, 76]
    words = {"forward", "losses"} if model.config.cutoffs else set()
    assert set(watch.reads) == {"train_step", "evaluate", *words}
    if not lessons.in_work():  # a correct solution may wait for loss and norm separately
        assert watch.reads["train_step"] == 2, "one per step"
