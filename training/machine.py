"""The machine: its device, its fastest dtype, compiled layers, process settings."""
import ctypes
import sys
import timeit
from dataclasses import replace
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def choose(device="", is_compiling=False):
    """Return the requested or the best device; tune the process.  ValueError if it is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here; leave out the flag that asks for one")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if is_compiling and device == "cpu":
        raise ValueError("--compile needs a GPU; leave the flag out")
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 in products of float32
    elif sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):  # glibc
        library.mallopt(M_MMAP_MAX, 0)  # keep freed memory
        library.mallopt(M_TRIM_THRESHOLD, -1)
    return device


def name(device):
    """Return what computes: a GPU's name, or a CPU's, its threads, and whether it has bf16."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")  # Linux has it
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = [line.partition(": ")[2] for line in text.splitlines() if "model name" in line]
    bf16 = " with bf16" if "avx512_bf16" in text or "amx_bf16" in text else ""
    return f"{(models or ['CPU'])[0]}{bf16}, {torch.get_num_threads()} threads"


def autocast(recipe, device):
    """Return a context: with bf16, products are in 16 bits, weights, norms, loss in float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=recipe.dtype == "bf16")


def choose_dtype(recipe, config, device):
    """Return the recipe, with the faster dtype if it is auto: bf16 on a GPU that has it, and on a
    CPU that makes a product of the model's size 1.5 times as fast (a step is more).
    """
    if recipe.dtype != "auto":
        return recipe
    if device == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(recipe, dtype="bf16" if has_bf16 else "float32")
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        h = torch.ones(min(2048, recipe.batch * recipe.segment), config.d_model, dtype=dtype)
        W_1 = torch.ones(config.d_model, config.d_inner, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda: h @ W_1, number=1, repeat=10))
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    dtype = "bf16" if ratio >= 1.5 else "float32"
    speed = f"makes a product {ratio:.2g} times as fast as float32" if ratio > 1 else "is slower"
    print(f"dtype: {dtype}, since bf16 {speed} here")
    return replace(recipe, dtype=dtype)


def compile_layers(model):
    """Compile the layers to fewer kernels: once for all, at each new length of memory.

    If torch cannot, as without a C compiler or Triton, they run as they are written.
    """
    try:
        torch.compile(torch.relu)(torch.ones(1, device=model.u.device))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return print(f"the layers run as written, since torch cannot compile: {reason}")
    print("compiling the layers: a step with a new length of memory may take a minute")
    torch._dynamo.config.recompile_limit = 64  # M = 8 T has nine lengths
    torch._dynamo.config.suppress_errors = True  # what fails runs as written
    for layer in model.layers:
        layer.compile(dynamic=False)
