"""What a GPU would show, without one: tensors on a wrong device, values it waits for, its memory.

A tensor on torch's device `meta` has a shape, a type and no numbers, so a step of the largest model
takes a second here; a tensor of FakeTensorMode is the same and says that it lies on any device that
is asked for.  What needs numbers is given some (Watch), and what depends on the device by its name
is done as for CUDA (LikeCuda).

    pytest tests/system/test_gpu_without_gpu.py      the small sizes; with -m slow the others
"""
import math
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training import estimate, fast, machine, presets
from training.optimizers import optimizer_of

train = import_module("train")
lesson_5 = import_module("05_full_model")
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("our_own")  # a student's step may read and hold more

# Where a value is read back, for which a GPU has to finish all that it was given before.
READS = {"train.py: train_step": "the loss and the norm: for the log, and whether they are finite",
         "train.py: evaluate": "its result, once",
         "adaptive_softmax.py: forward": "nonzero: how many of the words lie in a band",
         "adaptive_softmax.py: losses": "the same of the targets"}
ON_A_CPU = {"validate.py: tokens": "whether they lie in the vocabulary; left out on a GPU"}


# ---- tensors without numbers --------------------------------------------------------------------

class Watch(TorchDispatchMode):
    """Sees every operation: on which device its results lie, who reads a value, what is held.

    A number that is read is 0, and two tensors are equal.  As many words lie in a band as if they
    were as rare as 1 / rank.
    """

    def __init__(self, model, device):
        super().__init__()
        self.config, self.device, self.reads = model.config, device, set()
        self.storages, self.held, self.most = {}, 0, 0  # bytes, now and at most
        for z in (*model.parameters(), *model.buffers()):
            self.hold(z)

    def hold(self, z):
        """Count the storage of z, once, as long as it lives."""
        storage = z.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            def gone(_):
                del self.storages[key]
                self.held -= size
            self.storages[key] = weakref.ref(storage, gone)
            self.held += size
            self.most = max(self.most, self.held)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
            self.reads.add(place())
        if func is aten.equal.default:
            return True
        if func is aten._local_scalar_dense.default:
            return 0
        if func is aten.eq.Scalar:
            self.band = args[1]  # band == i, of which nonzero() is asked next
        if func is aten.nonzero.default:
            out = self.nonzero(args[0])
        else:
            out = func(*args, **(kwargs or {}))
        for z in tree_leaves(out):
            if isinstance(z, torch.Tensor):
                if z.dim() and z.device.type != self.device:
                    raise AssertionError(f"{func} at {place()} gives a tensor on {z.device}")
                self.hold(z)
        return out

    def nonzero(self, z):
        """(B, T) -> (n, 2), n being the share of band i in B * T words."""
        edges = (1, *self.config.cutoffs, self.config.vocab_size)
        first, end = edges[self.band : self.band + 2]
        n = round(z.numel() * math.log(end / first) / math.log(edges[-1]))
        return z.new_empty((n, z.dim()), dtype=torch.int64)


def place():
    """The code of ours that is being run, "file.py: function"."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].split(".")[0] in ("torch", __name__):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"


class LikeCuda(TorchFunctionMode):
    """Lets meta tensors do what CUDA's do: the mask of a dropout has a byte for each number, and
    with bf16, under autocast, products are made in 16 bits, softmax and the like in float32.

    The last test, where a CUDA build of torch is installed, holds it equal to the true autocast.
    """

    def __init__(self):
        super().__init__()
        self.casts = [False]  # whether autocast is on: the last of the blocks that are open
        self.copies = {}  # of weights: one for all calls, as autocast makes them

    @contextmanager
    def autocast(self, device, dtype=None, enabled=True):
        """In place of torch's, which knows no meta device."""
        self.casts.append(enabled)
        yield
        self.casts.pop()
        if len(self.casts) == 1:
            self.copies.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "dropout":
            z, p = args[0], kwargs["p"]
            return torch.native_dropout(z, p, True)[0] if kwargs["training"] and p > 0 else z
        if self.casts[-1] and name in ("linear", "matmul", "__matmul__"):
            args = [self.in_16_bits(z) for z in args]
        elif self.casts[-1] and name in ("softmax", "log_softmax", "layer_norm", "cross_entropy"):
            args = [z.float() if isinstance(z, torch.Tensor) and z.is_floating_point() else z
                    for z in args]
        return func(*args, **kwargs)

    def in_16_bits(self, z):
        """z as bf16, if it is a tensor of float32; a weight's copy is kept."""
        if not isinstance(z, torch.Tensor) or z.dtype != torch.float32:
            return z
        if not isinstance(z, torch.nn.Parameter):
            return z.bfloat16()
        if z not in self.copies:
            self.copies[z] = z.bfloat16()
        return self.copies[z]


@pytest.fixture
def on(monkeypatch):
    """A context in which tensors on a device, "meta" or FakeTensorMode's "cpu" or "cuda", work."""
    @contextmanager
    def context(device):
        like = LikeCuda()
        with monkeypatch.context() as patch:
            if device == "meta":
                patch.setattr(torch, "autocast", like.autocast)
                patch.setattr(torch, "is_autocast_enabled", lambda device: like.casts[-1])
                patch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
                patch.setattr(import_module("torch.optim.adam"),  # fused: neither
                              "_device_dtype_check_for_fused", lambda p: None)
            if device == "cuda":
                if not torch.backends.cuda.is_built():
                    pytest.skip("torch is built without CUDA: it has no autocast for its tensors")
                patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
                patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
            with like if device == "meta" else FakeTensorMode():
                yield

    return context


def made(name, form, dtype, device, layers=None):
    """A model of presets.CONFIGS in the plain or the fast form, in training, and its Run."""
    config = replace(presets.CONFIGS[name], n_layer=layers or presets.CONFIGS[name].n_layer)
    with torch.device(device):
        model = lesson_5.TransformerXL(config).train()
    run = replace(presets.RUNS[name], dtype=dtype, plain=form == "plain")
    return model if run.plain else fast.replace_parts(model), run


def a_full_memory(model, B):
    """N tensors (B, M, D)."""
    M, D = model.config.mem_len, model.config.d_model
    return [model.u.new_empty(B, M, D) for _ in model.layers]


def two_steps(model, run, watch, micro_batch=0):
    """Two steps of train.py with a full memory; -> the most bytes that the second held."""
    optimizer = optimizer_of(model, run)
    run = replace(run, micro_batch=micro_batch)
    x = torch.empty(run.batch, run.segment, dtype=torch.int64, device=model.u.device)
    memory = a_full_memory(model, run.batch)
    with watch:
        for _ in range(2):  # the first makes the moments
            watch.most = 0
            _, _, memory = train.train_step(model, optimizer, x, x, memory, run)
    return watch.most


def read(model, run):
    """Evaluate until the memory is full, and a shorter segment; then continue two prompts."""
    reader = model if run.plain else fast.Reader(model)
    n = run.eval_mem_len + 2 * run.eval_segment + run.eval_segment // 2
    train.evaluate(reader, torch.empty(n + 1, dtype=torch.uint8, device=model.u.device), run)
    prompt = torch.empty(2, 100, dtype=torch.int64, device=model.u.device)
    with train.evaluating(reader, run):
        assert lesson_5.generate(reader, prompt, 3).shape == (2, 3)


def forward(model, run, watch):
    """Losses with a full memory, held with all that a backward pass would need."""
    x = torch.empty(run.batch, run.segment, dtype=torch.int64, device=model.u.device)
    memory = a_full_memory(model, run.batch)
    with watch, machine.autocast(run, watch.device):
        return model(x, memory, x)


# ---- devices ------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["plain", "fast"])
@pytest.mark.parametrize("name, device", [
    pytest.param(name, device, marks=[] if name == "tiny" else pytest.mark.slow)
    for name in presets.CONFIGS for device in ("meta", "cuda", "cpu")
    if device != "cpu" or name in ("tiny", "laptop-words")])
def test_every_tensor_is_on_the_models_device(on, name, device, form):
    """In training, evaluation and generation, at the run's lengths; and nothing but what READS
    lists asks for a value.  (On CUDA without its backward pass, which needs a driver.  Steps of
    all layers are made below.)
    """
    with on(device):
        model, run = made(name, form, "bf16", device, layers=2)  # for time; all are alike
        watch = Watch(model, device)
        forward(model, run, watch) if device == "cuda" else two_steps(model, run, watch)
        with watch:
            read(model, run)
    listed = READS | ON_A_CPU if device == "cpu" else READS
    wanted = {where for where in listed if (model.config.cutoffs or "softmax" not in where)
              and (form == "fast" or "fast.py" not in where)}
    assert watch.reads == wanted - ({"train.py: train_step"} if device == "cuda" else set())


# ---- memory -------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, parts", [("float32", 1), ("bf16", 1), ("bf16", 2)])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if "laptop" in name else pytest.mark.slow)
    for name in presets.CONFIGS])
def test_a_dry_run_says_how_much_memory_a_step_takes(on, name, dtype, parts):
    """To 8 percent the most that is held at a time, in one go and in micro-batches."""
    with on("meta"):
        model, run = made(name, "fast", dtype, "meta")
        size = run.batch // parts if parts > 1 else 0
        most = two_steps(model, run, Watch(model, "meta"), size)
    needs = estimate.bytes_of_run(model.config, presets.count_parameters(model.config),
                                  run.batch, run.segment, dtype, size, run.optimizer)
    assert sum(needs.values()) == pytest.approx(most, rel=0.08)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["laptop", "ptb", "wt103-large"])
def test_meta_tensors_hold_what_cuda_tensors_hold(on, name, dtype):
    """To the byte: after a forward pass, and at most in it."""
    held = []
    for device in ("cuda", "meta"):
        with on(device):
            model, run = made(name, "fast", dtype, device, layers=2)
            watch = Watch(model, device)
            losses, memory = forward(model, run, watch)
            held.append((watch.held, watch.most))
    assert held[0] == held[1]
