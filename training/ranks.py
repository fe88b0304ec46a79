"""Training on many GPUs: what stands around train.py's step.

    torchrun --nproc-per-node=8 train.py --dataset enwik8 --batch 24

starts train.py eight times and tells each its rank.  Each has a GPU, the whole model, and its share
of the B lanes with their memory.  In the backward pass torch's DistributedDataParallel averages the
gradients, so all ranks make the same step.  Started without torchrun there is one rank.
"""
import os
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COUNT = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if COUNT > 1 else 0
launch = None  # torchrun's store, the same for all its restarts


def join(device):
    """Meet the other ranks; only rank 0 prints from here on.  ValueError if they do not come."""
    global launch
    if COUNT == 1:
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    patience = timedelta(minutes=2)  # until all are there
    try:
        # torchrun keeps one store of addresses for all its restarts, where a rank would find those
        # of ranks that are dead: so each restart has a part of its own
        launch, *_ = next(dist.rendezvous("env://", timeout=patience))
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"start {restarts}", launch)
        store.set(f"rank {RANK} is here", "")
        store.wait([f"rank {other} is here" for other in range(COUNT)], patience)
        # later they wait longer, as when rank 0 fetches a corpus or evaluates
        # gradients meet on the GPUs, all else on the CPUs
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store,
                                rank=RANK, world_size=COUNT, timeout=timedelta(hours=2))
    except RuntimeError as error:
        raise ValueError(f"the {COUNT} ranks do not find each other: {error}") from None
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")


def end(status):
    """End the process.  A rank ends at once: closing its connections while Python itself ends may
    hang, or abort (seen once in six runs, and torchrun took it for a failure).
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; Python's own end would flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.flush()
    if COUNT > 1:
        os._exit(status)
    sys.exit(status)


def lost(error):
    """Whether an error says that the connection to another rank broke."""
    return COUNT > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


def note_begin():
    """Note for the restarts of this torchrun that its run has begun, and was not refused."""
    if launch and RANK == 0:
        launch.set("the run has begun", "")


def is_own_restart():
    """Return whether an earlier start by this torchrun (--max-restarts) has begun the run."""
    return launch is not None and launch.check(["the run has begun"])


def my_lanes(B):
    """Return the slice of this rank's lanes among all B.  ValueError if COUNT does not divide B."""
    if B % COUNT:
        fits = ", ".join(str(n) for n in range(1, B + 1) if B % n == 0)
        raise ValueError(f"--batch {B} is not divisible by {COUNT} ranks; {fits} ranks can take "
                         f"them, or --batch {B - B % COUNT or COUNT} fits")
    return slice(RANK * B // COUNT, (RANK + 1) * B // COUNT)


def parallel(model, x, y):
    """Return the model, with gradients that are the mean over the ranks after backward().

    In its first backward pass DistributedDataParallel sees in which order gradients arrive, and
    sorts them again, which changes how their sums are rounded.  So a first pass is made here, on
    one lane of x, y (B, T): a resumed run then adds in the same order as an uninterrupted one.
    """
    if COUNT == 1:
        return model
    cuda = [torch.cuda.current_device()] if x.is_cuda else []
    model = DistributedDataParallel(model, cuda or None, gradient_as_bucket_view=True)
    with torch.random.fork_rng(cuda):  # all ranks must come here: they exchange gradients
        model(x[:1], None, y[:1])[0].sum().backward()
    model.zero_grad()
    return model


def no_sync(model, last):
    """A context for the backward pass of one micro-batch: gradients meet those of the other ranks
    with the last one, once a step.  On one rank nothing is to be done.
    """
    return nullcontext() if last or COUNT == 1 else model.no_sync()


@contextmanager
def rank_0_first():
    """The first rank goes through the block before the others enter it: it may write files."""
    if RANK > 0:
        broadcast(None)
    yield
    if RANK == 0:
        broadcast(None)


def on_rank_0(function, *arguments):
    """Call function(*arguments) on rank 0 while the other ranks wait -> its value, on all ranks."""
    return broadcast(function(*arguments) if RANK == 0 else None)


def all_reduce(numbers, operation):
    """Return each of the numbers, reduced over the ranks; the same bits on each rank."""
    z = torch.tensor(numbers, dtype=torch.float64)
    if COUNT > 1:
        dist.all_reduce(z, operation)
    return z.tolist()


def mean(number):
    """Return the mean of a number over the ranks."""
    return all_reduce([number], dist.ReduceOp.SUM)[0] / COUNT


def largest(*numbers):
    """Return each number's largest value over the ranks."""
    return all_reduce(numbers, dist.ReduceOp.MAX)


def broadcast(value):
    """Return rank 0's value, on all ranks."""
    box = [value]
    if COUNT > 1:
        dist.broadcast_object_list(box)
    return box[0]


def gather(z):
    """Return the rows of all ranks' tensors (n, ...) in order, on the CPU of rank 0; None elsewhere.
    """
    z = z.detach().cpu().contiguous()
    if COUNT == 1:
        return z.clone()  # a copy: torch.save would write all of which z is a part
    parts = [torch.empty_like(z) for _ in range(COUNT)] if RANK == 0 else None
    dist.gather(z, parts)
    return torch.cat(parts) if RANK == 0 else None
