"""How fast the model is: a training step, a segment of evaluation, a generated token.

Ours is lesson 5's model in the fast form (training/fast.py: prepare for training, Reader for the
others).  Another implementation, a file with `make(size, dtype, device)` that returns an object
with the methods step(), evaluate() and generate(), is measured in the same run, turn by turn, so
that both meet the same machine; baselines.py makes the plain form, as public code has it:

    python experiments/benchmark.py --what train --size S
    python experiments/benchmark.py --what eval --against experiments/baselines.py
    python experiments/benchmark.py --what window      evaluation beside the sliding window
    python experiments/benchmark.py --size wt103-large --dtype bf16 --device cuda --micro-batch 32
    python experiments/benchmark.py --what parts       also reading, softmax: the comparisons
                                                       of benchmark_parts.py

All memories are full; printed is the middle of the repetitions after a warm-up and, in brackets,
the fastest and the slowest.  A step is forward, backward, clip, Adam; generation is one token
(sixteen in a row).  Evaluation is a stretch of one lane with its losses: others read it in segments
of the size's T, ours in one, as train.py's `evaluate` does (`reading_length`), since under
same_length the cut changes no loss; the window reads its eval_mem_len tokens for each.  Memory is
what a process of its own takes at most, above what it takes at a tiny size.

The limit is what this machine gives to the same work, measured in the same run, the best of seven.
For training and evaluation it is the time of the matrix products alone, in our model's shapes:
those of N layers and of the output; in training that of the forward pass times three.  Generation
has to read, for one token, P - N D HC weights (all but W_kR; P parameters), and N HC K (2 B + 1)
keys, values and distances, K = M + 1, of 4 bytes each, 2 in bf16; there the limit is the rate at
which a row times a matrix reads (beside it stands that of a sum).

GFLOP/s and GB/s count what ours needs for a token over the time that a token takes, in the lines of
the others, too.  So a share of the limit of 50% means: twice its time.
"""
import math
import os
import runpy
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import baselines
import common
import benchmark_parts
from benchmark_parts import DTYPES, in_new_process, long_segments, measure, resident_peak
from common import lesson_5, presets, train
from training import fast, machine
from training.estimate import bands

NAME = "benchmark"


@dataclass(frozen=True)
class Size:
    """A shape that is measured: training with batch lanes, the others with eval_batch."""

    config: lesson_5.Config  # mem_len is that of training
    batch: int
    segment: int
    eval_segment: int
    eval_mem_len: int
    micro_batch: int = 0  # lanes at a time in training; 0: all
    eval_batch: int = 1


S = lesson_5.Config(256, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024,
                    dropout=0.1, mem_len=128)
M = replace(S, n_layer=12, d_model=512, n_head=8, d_inner=2048)
SIZES = {
    "tiny": Size(replace(S, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16),
                 batch=2, segment=16, eval_segment=8, eval_mem_len=32),
    "S": Size(S, batch=8, segment=128, eval_segment=64, eval_mem_len=512),
    "M": Size(M, batch=4, segment=128, eval_segment=64, eval_mem_len=512)}
for name in ("enwik8-12L", "enwik8-24L", "wt103-large", "lm1b-large"):
    config, run = presets.CONFIGS[name], presets.RUNS[name]  # as train.py trains and evaluates
    config = replace(config, vocab_size=max(256, config.vocab_size))
    SIZES[name] = Size(config, run.batch, run.segment, run.eval_segment, run.eval_mem_len)
METHODS = {"train": "step", "eval": "evaluate", "generate": "generate", "window": "evaluate"}
# comparisons inside our model, and the size that each is for
INSIDE = {"parts": (benchmark_parts.compare_parts, "S"),
          "reading": (benchmark_parts.compare_reading, "enwik8-12L"),
          "softmax": (benchmark_parts.compare_softmax, "wt103-large")}
# tokens in a row: what one implementation leaves in the caches is of no use to the other, as it is
# to the next token of its own
IN_A_ROW = 16


class Ours:
    """One training step, one segment of evaluation, one generated token, in the fast form."""

    def __init__(self, size, dtype, device):
        self.size, self.device, self.memory = size, device, None
        self.run = replace(presets.RUNS["tiny"], dtype=dtype)
        self.model = lesson_5.TransformerXL(size.config).to(device)
        self.reader = fast.prepared(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2.5e-4, fused=True)

    def train(self, training):
        """Switch to training, or to evaluation with a full memory, unless it is so already.

        It is filled thrice, so that its buffers lie in memory that the process has used before.
        """
        if training == self.model.training:
            return
        self.model.train(training)
        self.model.config, self.memory = self.size.config, None
        if not training:
            self.model.config = replace(
                self.size.config, mem_len=self.size.eval_mem_len, same_length=True)
            for _ in range(3 * math.ceil(self.size.eval_mem_len / self.size.eval_segment)):
                self.read(self.size.eval_segment, with_losses=False)

    def step(self):
        """Forward, backward, clip, Adam."""
        self.train(True)
        x = self.tokens(self.size.batch, self.size.segment)
        run = replace(self.run, micro_batch=self.size.micro_batch)
        self.memory = train.train_step(self.model, self.optimizer, x, x, self.memory, run)[2]

    def tokens(self, B, T):
        """Random tokens (B, T)."""
        return common.random_tokens(self.size.config.vocab_size, B, T, device=self.device)

    def read(self, T, with_losses):
        """T tokens a lane after the memory -> losses, or the last logits."""
        x = self.tokens(self.size.eval_batch, T)
        with machine.autocast(self.run, self.device):
            result, self.memory = self.reader(
                x, self.memory, x if with_losses else None, last_only=not with_losses)
        return result

    def evaluate(self):
        """One segment with its losses."""
        self.train(False)
        return self.read(self.size.eval_segment, with_losses=True).mean()

    def generate(self):
        """One token."""
        self.train(False)
        return self.read(1, with_losses=False).argmax()


OWN = {"ours": Ours, "window": baselines.SlidingWindow}


def tokens_of(size, what):
    """Tokens of one call."""
    if what == "train":
        return size.batch * size.segment
    return size.eval_batch * (1 if what == "generate" else size.eval_segment)


def bytes_of_a_token(size, dtype):
    """What generation has to read for one token of each lane."""
    c, HC = size.config, size.config.n_head * size.config.d_head
    weights = presets.count_parameters(c) - c.n_layer * c.d_model * HC
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
        (N, 1, B * T, D, c.d_inner), (N, 1, B * T, c.d_inner, D),
        *((1, 1, math.ceil(share * B * T), width, rows) for width, rows, share in bands(c)),
        (blocks, H * B, t, C, K), (blocks, H, B * t, C, K + 1), (blocks, H * B, t, K, C))]


def best_seconds(call, device):
    """The shortest of seven calls."""
    return min(measure({"call": call}, 7, device)["call"])


def limit_of_reading(size, dtype, device):
    """Bytes that a generated token needs, bytes a second of a row times a matrix, a line of both.
    """
    needed = bytes_of_a_token(size, dtype)
    matrix = torch.randn(16, 2048, 2048, device=device, dtype=DTYPES[dtype])
    row, bytes_ = matrix[0, :1], matrix.numel() * matrix.element_size()
    a_sum = bytes_ / best_seconds(matrix.sum, device)
    rate = bytes_ / best_seconds(lambda: [row @ z for z in matrix], device)
    return needed, rate, (f"a token reads {needed / 1e6:,.1f} MB; a row times a matrix reads "
                          f"{rate / 1e9:,.1f} GB/s, a sum {a_sum / 1e9:,.1f} GB/s")


def limit_of_products(size, what, dtype, device):
    """Operations that a call needs, those a second of its products alone, a line of both."""
    needed = seconds = 0
    for many, batch, rows, inner, columns in products(size, what):
        a, b = (torch.randn(batch, *shape, device=device, dtype=DTYPES[dtype])
                for shape in ((rows, inner), (inner, columns)))
        needed += many * 2 * batch * rows * inner * columns
        seconds += many * best_seconds(lambda: a @ b, device)
    passes, rate = 3 if what == "train" else 1, needed / seconds
    return passes * needed, rate, (
        f"the matrix products alone run at {rate / 1e9:,.0f} GFLOP/s, "
        f"{1000 * passes * seconds / tokens_of(size, what):.3f} ms a token")


def peak_memory(source, method, size, dtype, device):
    """Largest memory of three calls, in GB: on a GPU what is allocated there, else that of this
    process, above what it takes to do the same at a tiny size (torch's own parts).
    """
    make = load(source)
    getattr(make(SIZES["tiny"], dtype, device), method)()
    before = resident_peak()
    call = getattr(make(size, dtype, device), method)
    for _ in range(3):
        call()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resident_peak() - before


def load(source):
    """What makes one of our OWN, or the `make` of a file."""
    if source in OWN:
        return OWN[source]
    if not Path(source).is_file():
        raise ValueError(f"{source} is no file")
    content = runpy.run_path(source)
    if "make" not in content:
        raise ValueError(f"{source} has no function make(size, dtype, device)")
    return content["make"]


def compare(size, given):
    """Print what the machine allows, and a line for each implementation."""
    what, where = given.what, (given.dtype, given.device)
    sources = {Path(z).stem: z for z in ("ours", *given.against)}
    sizes = dict.fromkeys(sources, size)
    if what in ("eval", "window"):
        sizes["ours"] = long_segments(size)
    if what == "window":
        sources["window"] = "window"
        sizes["window"] = replace(size, eval_segment=1)  # a call predicts one token of each lane
    made = {name: load(source)(sizes[name], *where) for name, source in sources.items()}
    if given.compile and what == "train":
        for z in made.values():
            z.model = torch.compile(z.model, dynamic=False)
    calls = {name: getattr(z, METHODS[what]) for name, z in made.items()}
    tokens = {name: tokens_of(sizes[name], what) for name in sizes}
    in_a_row = {name: {"eval": tokens["ours"] // n, "generate": IN_A_ROW}.get(what, 1)
                for name, n in tokens.items()}
    if what == "generate":
        unit, (needed, limit, line) = "GB/s", limit_of_reading(size, *where)
    else:
        unit, (needed, limit, line) = "GFLOP/s", limit_of_products(sizes["ours"], what, *where)
    print(f"{what} {given.size}, {given.dtype}, {given.device}, {given.threads} threads\n"
          f"limit: {line}")
    seconds = measure(calls, given.repetitions, given.device, in_a_row)
    ours = statistics.median(seconds["ours"]) / tokens["ours"]
    for name, times in seconds.items():
        fastest, middle, slowest = (f(times) / tokens[name] for f in (min, statistics.median, max))
        rate = needed / tokens["ours"] / middle
        memory = in_new_process(peak_memory, sources[name], METHODS[what], sizes[name], *where)
        print(f"{name:10} {1 / middle:10,.0f} tok/s  {1000 * middle:8.3f} ms a token "
              f"[{1000 * fastest:.3f} ... {1000 * slowest:.3f}]  "
              f"{rate / 1e9:6.1f} {unit}, {rate / limit:4.0%} of the limit  {memory:5.2f} GB"
              + (f"  ours is {middle / ours:.2f} times as fast" if name != "ours" else ""))


@common.command
def main(argv):
    """Measure what is asked for."""
    flags = common.new_parser(NAME, __doc__, "--dtype", "--device")
    flags.set_defaults(device="cpu")
    flags.add_argument("--what", choices=[*METHODS, *INSIDE], default="train")
    flags.add_argument("--size", choices=SIZES, help="default: S; with --what reading enwik8-12L, "
                       "softmax wt103-large")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--repetitions", type=int, default=15)
    flags.add_argument("--micro-batch", type=int, default=0, help="lanes at a time in training")
    flags.add_argument("--compile", action="store_true", help="both models, in --what train")
    flags.add_argument("--against", nargs="*", default=[], metavar="FILE.py",
                       type=os.path.abspath)  # so that it is none of OWN
    given = flags.parse_args(argv)
    comparison, usual_size = INSIDE.get(given.what, (compare, "S"))
    given.size = given.size or usual_size
    common.machine.check(given.device)
    torch.set_num_threads(given.threads)
    comparison(replace(SIZES[given.size], micro_batch=given.micro_batch), given)


if __name__ == "__main__":
    sys.exit(main())
