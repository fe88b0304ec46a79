"""Learning while reading: a trained model goes on learning from the text that it is tested on.

    python experiments/dynamic_evaluation.py                     a look: the model in pretrained/,
                                                                 20,000 bytes, nothing is searched
    python experiments/dynamic_evaluation.py --checkpoint RUN    one run of train.py
    python experiments/dynamic_evaluation.py --dataset stdlib    the default run, three seeds
    python experiments/dynamic_evaluation.py --dataset ptb       words; further flags are train.py's

Dynamic evaluation (Krause et al. 2018, https://arxiv.org/abs/1709.07432; of Transformer-XL, 2019,
https://arxiv.org/abs/1904.08378).  The test text is read once, in order, in segments of T tokens,
with a memory of M.  Each segment is predicted and its losses are counted; only then the weights
take one gradient step on the mean of these losses.  So nothing is learned before it was predicted.

Two steps are compared.  g is the gradient of the segment that was just read, W_0 the trained
weights, s the root of the mean square that the gradient of each weight has on the first 200
segments of the training text:

    sgd    W <- W - rate * g                   the norm of g clipped to 1
    rms    W <- W - rate * g / (s + epsilon) + decay * s / mean(s) * (W_0 - W)

The second is the authors': all weights move about equally fast, but those that hardly ever had a
gradient (of rare words) do not leap, and those on which the loss depends most are drawn back most
to where training had left them (at most all the way).  mean(s) is that of the tensors' means.

Rate, epsilon, decay, T and M are chosen with the first seed, on the beginning of the validation
split; the test split is read once by each model in each way.  It is compared with compressors:
xz, and xz that has the training and validation text in its window (bytes only).  What is finished
is kept in --out.
"""
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

import common
from common import corpora, lesson_1, train
from training import checkpoint, fast, log

NAME = "dynamic_evaluation"
STATISTICS = 200  # segments of the training text for s
VALIDATION = 100_000  # tokens of the validation text that settings are chosen on
STRETCHES = 12  # of the test text, in the figure


@dataclass(frozen=True)
class Way:
    """How a text is read: what step follows each segment ("none": reading alone), the lengths."""

    step: str
    T: int
    M: int
    rate: float = 0.0
    decay: float = 0.0
    epsilon: float = 1e-5

    def __str__(self):
        names = {"none": "TM", "sgd": ["T", "M", "rate"]}.get(self.step, list(vars(self))[1:])
        return "-".join([self.step, *(f"{name}{getattr(self, name):g}" for name in names)])


NAMES = {"none": "reading alone", "sgd": "learning while reading, sgd",
         "rms": "learning while reading, rms"}

# what is tried on the validation split, one setting after the other; the first is the start
TRIED = {
    "sgd": {"T": (32, 16, 64), "rate": (0.05, 0.025, 0.1, 0.2), "M": (384, 256, 512)},
    "rms": {"epsilon": (1e-5, 1e-4, 1e-3), "T": (32, 16, 64), "rate": (1e-4, 5e-5, 2e-4, 4e-4),
            "decay": (1e-3, 0.0, 3e-3, 1e-2), "M": (384, 256, 512)}}

# a look: so many bytes of the test text, with what the search has chosen for the default run, and
# smaller rates: the rates of the default run make the model in pretrained/, which has trained for
# longer, forget what it knows (2.5 and 5.8 bits a byte).  These were the best of six and of five
# on the first 20,000 bytes of the validation text (1.008 reading alone, 0.999, 0.979).
LOOK = 20_000
CHOSEN = (Way("sgd", 32, 512, rate=5e-4),
          Way("rms", 32, 512, rate=1e-5, decay=3e-3, epsilon=1e-4))


# ---- one step -----------------------------------------------------------------------------------

def sgd_step(weights, way):
    """Plain gradient descent; the gradients' norm, over all weights, is at most 1."""
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    with torch.no_grad():
        for W in weights:
            W -= way.rate * W.grad


def paces(s, way):
    """How fast each weight of the rms step follows its gradient, and how fast it goes back."""
    mean = sum(z.mean() for z in s) / len(s)
    return ([way.rate / (z + way.epsilon) for z in s],
            [(way.decay * z / mean).clamp(max=1) for z in s])  # not beyond W_0


def rms_step(weights, trained, forward, back):
    """The authors' step, from the gradients, the trained weights and the two paces."""
    with torch.no_grad():
        for W, W_0, pace, pull in zip(weights, trained, forward, back):
            W += pull * (W_0 - W) - pace * W.grad


def segments_with_gradients(model, tokens, way, run, label):
    """Read tokens (n,) -> for each segment its losses (T,) in nats; the gradients of their mean are
    in the weights meanwhile.  The model may change between two segments.
    """
    lengths = replace(run, eval_mem_len=way.M)
    stream = lesson_1.lanes(tokens.to(model.u.device), 1)
    parts, memory = math.ceil((len(tokens) - 1) / way.T), None
    with train.evaluating(model, lengths):
        for x, y in train.progress(lesson_1.segments(stream, way.T), label, parts):
            model.zero_grad()
            losses, memory = model(x, memory, y)  # (1, T)
            losses.mean().backward()
            yield losses[0].detach()


def gradient_sizes(model, corpus, way, run):
    """s: for each weight the root of the mean square of its gradient on the training text."""
    squares = [torch.zeros_like(W) for W in model.parameters()]
    tokens = corpus.train[: STATISTICS * way.T + 1]
    for _ in segments_with_gradients(model, tokens, way, run, "measuring gradients"):
        for square, W in zip(squares, model.parameters()):
            square += W.grad**2 / STATISTICS
    return [square.sqrt() for square in squares]


def read(model, corpus, tokens, way, run, label=""):
    """Read tokens (n,) once -> the loss of each prediction in nats, (n - 1,), in order.

    The model is in the end what it was, however it has learned meanwhile.
    """
    if way.step == "none":
        return common.memory_losses(model, tokens[None], 0, way.T, mem_len=way.M, same_length=True,
                                    clamp_len=run.eval_clamp_len)[0]
    weights = list(model.parameters())
    trained, losses = [W.detach().clone() for W in weights], []
    if way.step == "rms":
        forward, back = paces(gradient_sizes(model, corpus, way, run), way)
    for loss in segments_with_gradients(model, tokens, way, run, label or "reading, learning"):
        losses.append(loss.cpu())
        if way.step == "sgd":
            sgd_step(weights, way)
        else:
            rms_step(weights, trained, forward, back)
    with torch.no_grad():
        for W, W_0 in zip(weights, trained):
            W.copy_(W_0)
    return torch.cat(losses)


# ---- many readings ------------------------------------------------------------------------------

def kept(path, model, make):
    """The losses that are saved at path for this very model, or make(), saved there."""
    mark = sum(W.double().sum().item() for W in model.parameters())
    if path.exists() and (content := checkpoint.read(path))["mark"] == mark:
        return content["losses"]
    losses = make()
    checkpoint.save(path, {"mark": mark, "losses": losses})
    return losses


def choose(step, model, corpus, run, out):
    """The Way of this step with the lowest loss on the validation text: one setting after the other
    is tried, the others as they are best so far.
    """
    tokens, tried = corpus.valid[: VALIDATION + 1], TRIED[step]

    def loss(way):
        path = out / f"valid-{run.seed}-{way}.pt"
        return kept(path, model, lambda: read(model, corpus, tokens, way, run, f"{way}")).mean()

    best = Way(step, **{name: values[0] for name, values in tried.items()})
    for name, values in tried.items():
        ways = [replace(best, **{name: value}) for value in values]
        best = min(ways, key=loss)
        print(f"validation, {step}: " + ", ".join(
            f"{name} {getattr(way, name):g} {in_unit(loss(way), corpus)}" for way in ways),
            flush=True)
    return best


def in_unit(nats, corpus):
    """A mean loss as it is reported: bits per byte, or perplexity per word."""
    digits = 4 if corpus.unit == "bpc" else 2
    return f"{log.in_unit(nats, corpus.unit):.{digits}f}"


def compressed(corpus, ends):
    """{name: bits per byte of each stretch of the test text}, which end at `ends`."""
    before = torch.cat([corpus.train, corpus.valid])
    found = {}
    for name, tokens in (("xz", before[:0]), ("xz that has read the training text", before)):
        texts = [torch.cat([tokens, corpus.test[:end]]) for end in (0, *ends)]
        sizes = [corpora.xz_size(corpora.as_bytes(text, corpus.vocab))
                 for text in train.progress(texts, "compressing text", len(texts))]
        found[name] = [8 * (b - a) / n for a, b, n in zip(sizes, sizes[1:], widths(ends))]
    return found


def widths(ends):
    """How long the stretches are that end there."""
    return [b - a for a, b in zip((0, *ends), ends)]


def draw(lines, ends, unit, path):
    """The figure of {name: [loss of each stretch]}."""
    axes = Figure(figsize=(7.5, 4), layout="constrained").subplots()
    for name, values in lines.items():
        bold = "learning" in name
        axes.stairs(values, [0, *(end / 1000 for end in ends)], baseline=None, label=name,
                    linewidth=2.5 if bold else 1.5, linestyle=":" if "xz" in name else "-")
    axes.set(xlabel=f"place in the test text (thousand {'bytes' if unit == 'bpc' else 'words'})",
             ylabel="bits per byte" if unit == "bpc" else "loss (nats per word)",
             xlim=(0, None), ylim=(0, None), title="What each reader pays, stretch by stretch")
    axes.legend(loc="lower left", fontsize=8)
    common.save_figure(axes.figure, path)


def report(losses, corpus, out, with_compressors):
    """Print the table, and draw the figure, of {way: [the test text's losses of each seed, (n,)]}.
    """
    n = len(corpus.test) - 1
    ends = [n * (i + 1) // STRETCHES for i in range(STRETCHES)]
    unit = math.log(2) if corpus.unit == "bpc" else 1.0
    lines = {}
    for way, seeds in losses.items():
        stretches = torch.stack(seeds).mean(0).split(widths(ends))
        lines[NAMES[way.step]] = [stretch.mean().item() / unit for stretch in stretches]
    print(f"{corpus.name}: test split, {n:,} predictions, {corpus.unit}; mean and half the range "
          "of the seeds")
    for way, seeds in losses.items():
        values = [float(in_unit(z.mean(), corpus)) for z in seeds]
        print(f"{NAMES[way.step]:34} {common.spread(values)}   {values}   {way}")
    if with_compressors and corpus.unit == "bpc" and len(corpus.train) < corpora.PRIMED:
        lines |= compressed(corpus, ends)
        for name in list(lines)[-2:]:
            print(f"{name:34} {sum(map(math.prod, zip(lines[name], widths(ends)))) / n:.4f}")
    draw(lines, ends, corpus.unit, out / f"{NAME}.png")


@common.command
def main(argv):
    """Train what is missing, choose on validation, read the test text, print, draw."""
    flags = common.new_parser(NAME, __doc__, "--seeds", "--data-dir", "--checkpoint")
    flags.add_argument("--dataset", help="train a new run on it for each seed, in place of one run")
    flags.add_argument("--out", type=Path, metavar="FOLDER",
                       help=f"where all is kept (default: runs/{NAME}-NAME)")
    given, others = flags.parse_known_args(argv)
    common.check_seeds(given.seeds)
    name = given.checkpoint.name if given.checkpoint else given.dataset or "look"
    if look := name == "look":
        given.checkpoint = common.PRETRAINED
    out = given.out or lesson_1.RUNS / f"{NAME}-{name}"
    out.mkdir(parents=True, exist_ok=True)
    ways, losses = [], {}
    for seed in given.seeds[:1] if given.checkpoint else given.seeds:
        if not given.checkpoint:
            common.train_run(out / f"run-{seed}", [
                "--dataset", given.dataset, "--seed", str(seed), *others,
                "--data-dir", str(given.data_dir)])
        path = given.checkpoint or out / f"run-{seed}"
        model, run, corpus, _ = common.open_run(path, given.data_dir)
        fast.prepared(model)  # it learns faster, too
        if look:
            corpus = replace(corpus, test=corpus.test[: LOOK + 1])
        if not ways:
            alone = Way("none", train.reading_length(run), run.eval_mem_len)
            learners = CHOSEN if look else [
                choose(step, model, corpus, run, out) for step in TRIED]
            ways = [alone, *learners]
        for way in ways:
            file = out / f"test-{run.seed}-{way}.pt"
            found = kept(file, model, lambda: read(model, corpus, corpus.test, way, run, f"{way}"))
            losses.setdefault(way, []).append(found)
            print(f"test, seed {run.seed}, {way}: {in_unit(found.mean(), corpus)}", flush=True)
    report(losses, corpus, out, with_compressors=not look)


if __name__ == "__main__":
    sys.exit(main())
