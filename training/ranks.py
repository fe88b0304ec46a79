"""Training on several GPUs:

    torchrun --nproc-per-node=8 train.py --dataset enwik8 --batch 24

starts eight processes, the ranks.  Each has a GPU, the whole model, and its share of the B lanes
with their memory.  In the backward pass torch's DistributedDataParallel averages the gradients, so
all ranks make the same step.  Without torchrun there is one rank.
"""
import math
import os
import sys
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import progress

COUNT, RANK = 1, 0  # unless a program joins; experiments do not, whatever a cluster has set


def join(device):
    """Connect to the other ranks; from here on only rank 0 prints.  ValueError if that fails."""
    global COUNT, RANK
    try:
        COUNT = int(os.environ.get("WORLD_SIZE", 1))
        if COUNT == 1:
            return
        RANK = int(os.environ.get("RANK", 0))
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # nccl is for gradients, gloo for numbers on the CPU; ranks may have to wait for hours while
        # rank 0 fetches a corpus or evaluates
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                                timeout=timedelta(hours=2))
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"rank {RANK} cannot join the ranks (WORLD_SIZE {os.environ['WORLD_SIZE']}"
                         f"): start one for each GPU, or unset WORLD_SIZE: {error}") from None
    if RANK > 0:
        sys.stdout, progress.is_quiet = open(os.devnull, "w"), True


def end(status):
    """Exit; one of several ranks at once, since closing its connections may hang or abort."""
    if COUNT > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def my_lanes(B):
    """Return this rank's slice of all B lanes.  ValueError if COUNT does not divide B."""
    if B % COUNT:
        raise ValueError(f"--batch {B} is not divisible by {COUNT} ranks; use --batch "
                         f"{B - B % COUNT or COUNT}, or another number of ranks")
    return slice(RANK * B // COUNT, (RANK + 1) * B // COUNT)


def parallel(model, x, y, micro_batch):
    """Return the model, wrapped so that backward() averages its gradients over the ranks, once per
    step: in the last of the micro-batches of its lanes.

    After its first backward pass DistributedDataParallel changes the order in which it adds, and
    so the rounding.  That pass is made here, on one lane of x, y (B, T): a resumed run then adds
    in the same order as an uninterrupted one.
    """
    if COUNT == 1:
        return model
    cuda = [torch.cuda.current_device()] if x.is_cuda else []
    model = DistributedDataParallel(model, cuda or None, gradient_as_bucket_view=True)
    with torch.random.fork_rng(cuda), torch.compiler.set_stance("force_eager"):
        model(x[:1], None, y[:1])[0].sum().backward()
    model.zero_grad()
    parts, calls = math.ceil(len(x) / (micro_batch or len(x))), count(1)

    def synchronize_last(model, given):  # until then gradients add up on each rank
        model.require_backward_grad_sync = next(calls) % parts == 0

    model.register_forward_pre_hook(synchronize_last)
    return model


def on_rank_0(function, *arguments):
    """Return function(*arguments), called on rank 0 while the others wait, on all ranks."""
    return broadcast(function(*arguments) if RANK == 0 else None)


def all_reduce(number, operation):
    """Return a number reduced over the ranks, bitwise identical on all of them."""
    if COUNT == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total, operation)
    return total.item()


def mean(number):
    """Return the mean of a number over the ranks."""
    return all_reduce(number, dist.ReduceOp.SUM) / COUNT


def largest(number):
    """Return the largest value of a number over the ranks."""
    return all_reduce(number, dist.ReduceOp.MAX)


def broadcast(value):
    """Return rank 0's value, on all ranks."""
    box = [value]
    if COUNT > 1:
        dist.broadcast_object_list(box)
    return box[0]


def gather(tensor):
    """Return, on the CPU of rank 0, the rows of all ranks' tensors (n, ...) in order; else None."""
    tensor = tensor.detach().cpu().contiguous()
    if COUNT == 1:
        return tensor.clone()  # torch.save would write the whole tensor behind a view
    parts = [torch.empty_like(tensor) for _ in range(COUNT)] if RANK == 0 else None
    dist.gather(tensor, parts)
    return torch.cat(parts) if RANK == 0 else None
