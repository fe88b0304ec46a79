"""How fast the model is: a training step, a segment of evaluation, a generated token.

Ours is lesson 5's model in the fast form (support/fast.py: prepare for training, Reader for the
others).  Another implementation, a file with `make(size, dtype, device)` that returns an object
with the methods step(), evaluate() and generate(), is measured in the same run, turn by turn, so
that both meet the same machine:

    python experiments/benchmark.py --what train --size S
    python experiments/benchmark.py --what eval --against experiments/plain.py
    python experiments/benchmark.py --size wt103-large --dtype bf16 --device cuda --micro-batch 32

What is measured: all memories full, tokens as rare as 1 / rank; the middle of the repetitions after
a warm-up and, in brackets, the fastest and the slowest.  A step is forward, backward, clip, Adam;
generation is one token (sixteen in a row).  Evaluation is a stretch of one lane with its losses:
others read it in segments of the size's T, ours in one, as train.py's `evaluate` does
(`reading_length`), since under same_length the cut changes no loss.  Memory is what a process of
its own takes at most, above what it takes at a tiny size.

What the machine allows is measured in the same run, the best of seven.  Generation reads, for one
token, P - N D HC weights (all but W_kR; P parameters), and N HC K (2 B + 1) keys, values and
distances, K = M + 1, of 4 bytes each, 2 in bf16; beside it stand the rates of a plain read (a sum)
and of a row times a matrix.  Training and evaluation are set beside the time of their matrix
products alone, in ours's shapes: those of N layers and of the output; in training that of the
forward pass times three.

FLOPs are the model's, the same for every implementation (support/estimate.py): for one token and
layer, forward, 2 (2 D HC + 2 D FF + (K/T) 2 D HC + 3 K HC) with K = M + T keys, and 2 D V for the
output; three times that in training.  A key that is read counts as projected, R's projection does
not, cells behind the mask do.  So an implementation that keeps its keys may show more than it does.
"""
import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support import distributed, estimate, fast

lesson_1, lesson_5, train = (import_module(name) for name in (
    "01_vanilla_segments", "05_full_model", "train"))
Config, CONFIGS, TransformerXL = lesson_5.Config, lesson_5.CONFIGS, lesson_5.TransformerXL


@dataclass(frozen=True)
class Size:
    """A shape that is measured: training with batch lanes, the others with eval_batch."""

    config: Config  # mem_len is that of training
    batch: int
    segment: int
    eval_segment: int
    eval_mem_len: int
    micro_batch: int = 0  # lanes at a time in training; 0: all
    eval_batch: int = 1


S = Config(256, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024, dropout=0.1, mem_len=128)
M = replace(S, n_layer=12, d_model=512, n_head=8, d_inner=2048)
SIZES = {
    "tiny": Size(replace(S, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16),
                 batch=2, segment=16, eval_segment=8, eval_mem_len=32),
    "S": Size(S, batch=8, segment=128, eval_segment=64, eval_mem_len=512),
    "M": Size(M, batch=4, segment=128, eval_segment=64, eval_mem_len=512),
    "enwik8-12L": Size(replace(CONFIGS["enwik8-12L"], vocab_size=256), batch=22, segment=512,
                       eval_segment=80, eval_mem_len=2100),
    "enwik8-24L": Size(replace(CONFIGS["enwik8-24L"], vocab_size=256), batch=64, segment=768,
                       eval_segment=128, eval_mem_len=3800),
    "wt103-large": Size(CONFIGS["wt103-large"], batch=128, segment=384, eval_segment=128,
                        eval_mem_len=1600),
    "lm1b-large": Size(CONFIGS["lm1b-large"], batch=512, segment=32, eval_segment=32,
                       eval_mem_len=128),
}
METHODS = {"train": "step", "eval": "evaluate", "generate": "generate"}
# tokens in a row: what one implementation leaves in the caches is of no use to the other, as it is
# to the next token of its own
IN_A_ROW = 16
RATE_AT = {"cpu": 2048, "cuda": 8192}  # the sizes of the product that speeds are compared with
FOLDER = Path(__file__).resolve().parent


def make(size, dtype, device):
    """Our model, as the benchmark calls it."""
    return Ours(size, dtype, device)


class Ours:
    """One training step, one segment of evaluation, one generated token, in the fast form."""

    def __init__(self, size, dtype, device):
        self.size, self.device = size, device
        self.run = replace(train.RUNS_OF["tiny"], dtype=dtype)
        self.model, self.memories = fast.prepare(TransformerXL(size.config).to(device)), {}
        self.reader = fast.Reader(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2.5e-4, fused=True)

    def tokens(self, B, T):
        """Random tokens (B, T), as rare as 1 / rank."""
        return (self.size.config.vocab_size ** torch.rand(B, T, device=self.device)).long() - 1

    def train(self, training):
        """Switch to training or evaluation, with its lengths, where that is not so yet."""
        if training != self.model.training:
            self.model.train(training)
            self.model.config = self.size.config if training else replace(
                self.size.config, mem_len=self.size.eval_mem_len, same_length=True)

    def step(self):
        """Forward, backward, clip, Adam."""
        self.train(True)
        x = self.tokens(self.size.batch, self.size.segment)
        learner = distributed.Learner(self.model, self.size.micro_batch)
        self.memories = {"train": train.train_step(  # those of the old weights go
            learner, self.optimizer, x, x, self.memories.get("train"), self.run)[2]}

    def read(self, kind, T, with_losses):
        """T tokens a lane after the memory of this kind -> losses, or the last logits."""
        x = self.tokens(self.size.eval_batch, T)
        self.train(False)
        with train.autocast(self.run, self.device):
            result, self.memories[kind] = self.reader(
                x, self.memories.get(kind), x if with_losses else None, last_only=not with_losses)
        return result

    def full(self, kind):
        """Fill the memory of this kind, if that is still to do: thrice, so that its buffers have
        moved before and lie in memory that the process has used.
        """
        if kind not in self.memories:
            for _ in range(3 * math.ceil(self.size.eval_mem_len / self.size.eval_segment)):
                self.read(kind, self.size.eval_segment, with_losses=False)

    def evaluate(self):
        """One segment with its losses."""
        self.full("evaluate")
        return self.read("evaluate", self.size.eval_segment, with_losses=True).mean()

    def generate(self):
        """One token."""
        self.full("generate")
        return self.read("generate", 1, with_losses=False).argmax()


def flops(size, what):
    """Operations of one call, and its tokens."""
    if what == "train":
        B, T = size.batch, size.segment
        return estimate.flops_per_step(size.config, B, T), B * T
    B, T = size.eval_batch, size.eval_segment if what == "eval" else 1
    config = replace(size.config, mem_len=size.eval_mem_len)
    return estimate.flops_per_step(config, B, T) / 3, B * T


def long_segments(size):
    """The size with the T that train.py's `evaluate` reads with, a multiple of its own."""
    run = replace(train.RUNS_OF["tiny"], eval_segment=size.eval_segment,
                  eval_mem_len=size.eval_mem_len)
    return replace(size, eval_segment=train.reading_length(run) // size.eval_segment
                   * size.eval_segment)


def bytes_of_a_token(size, dtype):
    """What generation has to read for one token of each lane."""
    c, HC = size.config, size.config.n_head * size.config.d_head
    weights = lesson_5.count_parameters(c) - c.n_layer * c.d_model * HC
    positions = c.n_layer * HC * (size.eval_mem_len + 1) * (2 * size.eval_batch + 1)
    return (weights + positions) * (2 if dtype == "bf16" else 4)


def products(size, what):
    """The matrix products of a forward pass of ours: (how many, batch, rows, inner, columns)."""
    c, HC = size.config, size.config.n_head * size.config.d_head
    if what == "train":
        B, T, M = size.micro_batch or size.batch, size.segment, c.mem_len
        keys, t = B * (M + T), T
    else:
        B, T, M = size.eval_batch, size.eval_segment, size.eval_mem_len
        keys, t = B * T, min(T, fast.BLOCK)
    N, D, H, C, K, blocks = c.n_layer, c.d_model, c.n_head, c.d_head, M + t, c.n_layer * T / t
    parts = size.batch / B if what == "train" else 1
    return [(parts * n, *shape) for n, *shape in (
        (N, 1, B * T, D, HC), (N, 1, keys, D, 2 * HC), (N, 1, B * T, HC, D),
        (N, 1, B * T, D, c.d_inner), (N, 1, B * T, c.d_inner, D), (1, 1, B * T, D, c.vocab_size),
        (blocks, H * B, t, C, K), (blocks, H, B * t, C, K + 1), (blocks, H * B, t, K, C))]


def best_seconds(call, device):
    """The shortest of seven calls."""
    best = math.inf
    for _ in range(7):
        start = now(device)
        call()
        best = min(best, now(device) - start)
    return best


def numbers(dtype, device, *shape):
    """Random numbers of the dtype that products have."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    return torch.randn(shape, device=device).to(kind)


def matmul_rate(dtype, device):
    """Operations per second of a product (n, n) x (n, n) here."""
    n = RATE_AT[device]
    a, b = numbers(dtype, device, 2, n, n)
    return 2 * n**3 / best_seconds(lambda: a @ b, device)


def limit(size, what, dtype, device):
    """What the machine allows: the amount that a call needs, its unit, and a line about both."""
    if what == "generate":
        needed, matrix = bytes_of_a_token(size, dtype), numbers(dtype, device, 16, 2048, 2048)
        row, bytes_ = matrix[0, :1], matrix.numel() * matrix.element_size()
        read = bytes_ / best_seconds(matrix.sum, device)
        times = bytes_ / best_seconds(lambda: [row @ z for z in matrix], device)
        return needed, "GB/s", (f"a token reads {needed / 1e6:,.1f} MB; a plain read runs at "
                                f"{read / 1e9:,.1f} GB/s, a row times a matrix at "
                                f"{times / 1e9:,.1f} GB/s")
    needed = seconds = 0
    for many, batch, rows, inner, columns in products(size, what):
        a, b = (numbers(dtype, device, batch, *z) for z in ((rows, inner), (inner, columns)))
        needed += many * 2 * batch * rows * inner * columns
        seconds += many * best_seconds(lambda: a @ b, device)
    passes, tokens = 3 if what == "train" else 1, flops(size, what)[1]
    return passes * needed, "GFLOP/s", (
        f"products of ours's shapes run at {needed / seconds / 1e9:,.0f} GFLOP/s, "
        f"{1000 * passes * seconds / tokens:.3f} ms a token")


def now(device):
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory(path, method, size, dtype, device):
    """Largest memory of three calls in a process of its own, in GB (on a GPU: allocated there)."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_here, (path, method, size, dtype, device))


def peak_here(path, method, size, dtype, device):
    """The same in this process, above what it takes to do so at a tiny size (torch's own parts)."""
    make = load(path)
    getattr(make(SIZES["tiny"], dtype, device), method)()
    before = resident_peak()
    call = getattr(make(size, dtype, device), method)
    for _ in range(3):
        call()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resident_peak() - before


def resident_peak():
    """The most memory that this process has had resident, in GB (Linux, macOS)."""
    if sys.platform == "darwin":
        import resource  # which Windows has not
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    # not getrusage: on Linux a new process begins with the peak of the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6


def load(path):
    """The function `make` of a file; ours if path is empty."""
    if not path:
        return make
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file")
    spec = spec_from_file_location(Path(path).stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "make"):
        raise ValueError(f"{path} has no function make(size, dtype, device)")
    return module.make


def measure(calls, repetitions, device, in_a_row=None):
    """{name: call} -> {name: seconds of a call in each repetition}, turn by turn after a warm-up.

    A repetition is the mean of so many calls in a row, {name: number}, else of one.
    """
    seconds = {name: [] for name in calls}
    for i in lesson_1.progress(range(repetitions + 2), "repetition", repetitions + 2):
        for name, call in calls.items():
            start = now(device)
            n = in_a_row[name] if in_a_row else 1
            for _ in range(n):
                call()
            if i >= 2:
                seconds[name].append((now(device) - start) / n)
    return seconds


def options(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description="Speed of training, evaluation and generation.")
    parser.add_argument("--what", choices=METHODS, default="train")
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--micro-batch", type=int, default=0, help="lanes at a time in training")
    parser.add_argument("--compile", action="store_true", help="both models, in --what train")
    parser.add_argument("--against", nargs="*", default=[], metavar="FILE.py")
    return parser.parse_args(argv)


def main(argv=None):
    """Print what the machine allows, and a line for each implementation."""
    given = options(argv)
    torch.set_num_threads(given.threads)
    size, what, where = SIZES[given.size], given.what, (given.dtype, given.device)
    size = replace(size, micro_batch=given.micro_batch)
    try:
        files = {"ours": "", **{Path(path).stem: path for path in given.against}}
        sizes = dict.fromkeys(files, size)
        if what == "eval":
            sizes["ours"] = long_segments(size)
        made = {name: load(path)(sizes[name], *where) for name, path in files.items()}
        for z in made.values() if given.compile and what == "train" else ():
            z.model = torch.compile(z.model, dynamic=False)
    except ValueError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 1
    rate, (needed, unit, line) = matmul_rate(*where), limit(sizes["ours"], what, *where)
    print(f"{what} {given.size}, {given.dtype}, {given.device}, {given.threads} threads; "
          f"a product of {RATE_AT[given.device]} squared runs at {rate / 1e9:,.0f} GFLOP/s\n{line}")
    tokens = [flops(sizes[name], what)[1] for name in files]
    operations, of_tokens = flops(size, what)
    in_a_row = {name: IN_A_ROW if what == "generate" else max(tokens) // n
                for name, n in zip(files, tokens)}
    calls = {name: getattr(z, METHODS[what]) for name, z in made.items()}
    seconds = measure(calls, given.repetitions, given.device, in_a_row)
    ours = statistics.median(seconds["ours"]) / tokens[0]
    for n, (name, times) in zip(tokens, seconds.items()):
        fastest, middle, slowest = (f(times) / n for f in (min, statistics.median, max))
        memory = peak_memory(files[name], METHODS[what], sizes[name], *where)
        print(f"{name:10} {1 / middle:10,.0f} tok/s  {1000 * middle:8.3f} ms a token "
              f"[{1000 * fastest:.3f} ... {1000 * slowest:.3f}]  "
              f"{needed / tokens[0] / middle / 1e9:6.1f} {unit}  "
              f"{operations / of_tokens / middle / rate:6.1%} of the product's rate  "
              f"{memory:5.2f} GB"
              + (f"  ours is {middle / ours:.2f} times as fast" if name != "ours" else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
