"""The machine: its device, its dtype, and the memory that a step frees."""
import ctypes
import sys
import timeit

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def choose(device=""):
    """Return the device that was asked for, or the best present.  ValueError if it is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave the flag out")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def autocast(recipe, device):
    """With dtype bf16, matrix products in 16 bits; weights, norms, loss in float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=recipe.dtype == "bf16")


def tune(device):
    """Set up the process: on a GPU what stays float32 may use TF32; on a CPU under Linux the C
    library keeps what a step frees for the next one (training/README.md says what that brings).
    """
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    elif sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):  # glibc
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)  # never


def choose_dtype(recipe, config, device):
    """Return the dtype that recipe.dtype asks for; for auto bf16 where it pays: on a GPU that has
    it, and on a CPU where a product of the model's size is 1.5 times as fast (a step is more than
    products), else float32.
    """
    if recipe.dtype != "auto":
        return recipe.dtype
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        h = torch.ones(min(2048, recipe.batch * recipe.segment), config.d_model, dtype=dtype)
        W_1 = torch.ones(config.d_model, config.d_inner, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda: h @ W_1, number=1, repeat=10))
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    dtype = "bf16" if ratio >= 1.5 else "float32"
    print(f"dtype: {dtype}, as a product in bf16 is {ratio:.1f} times as fast as in float32 here")
    return dtype
