"""Dynamic evaluation: a trained model keeps learning from the text that it is tested on.

    python experiments/dynamic_evaluation.py            a look: the model in pretrained/, 20 kB
    python experiments/dynamic_evaluation.py --checkpoint pretrained       the whole test split
    ... --checkpoint RUN RUN --sgd-rate 0.05 --rms-rate 1e-4               runs of `train.py`

Krause et al. 2018, https://arxiv.org/abs/1709.07432, and 2019, https://arxiv.org/abs/1904.08378.
The test split is read once in each way, in segments of T tokens with a memory of M.  The losses of
a segment are counted; only then the weights take one gradient step on their mean.  So nothing is
learned before it is predicted.  Afterwards the weights are what they were.

Two steps are compared.  g is the gradient of the segment that was just read, W_0 the trained
weights, s the root of the mean square that the gradient of each weight has on the first 200
segments of the training text:

    sgd    W <- W - rate * g                   the norm of g clipped to 1
    rms    W <- W - rate * g / (s + epsilon) + decay * s / mean(s) * (W_0 - W)

The second is the authors': all weights move about equally fast, except those that hardly ever had a
gradient (of rare words), and those on which the loss depends most are pulled back most to where
training had left them (at most all the way).  mean(s) is that of the tensors' means.

All settings were found on validation text (results.md): T, M, epsilon and decay for the default run
of train.py, the default rates for pretrained/.
"""
import math
import sys
from dataclasses import replace
from pathlib import Path

import common  # before torch

import torch

from common import fast, lesson_1, log, machine, train

NAME = "dynamic_evaluation"
STATISTICS = 200  # segments of the training text for s
LOOK = 20_000  # bytes of the test text
NAMES = {"static": "static evaluation", "sgd": "dynamic evaluation, sgd",
         "rms": "dynamic evaluation, rms"}


def sgd_step(weights, rate):
    """Take a step of gradient descent, after clipping the norm of all gradients to 1."""
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    with torch.no_grad():
        for W in weights:
            W -= rate * W.grad


def step_sizes(s, rate, epsilon, decay):
    """Return each weight's step sizes: along its gradient, and back to its trained value."""
    mean = sum(z.mean() for z in s) / len(s)
    return ([rate / (z + epsilon) for z in s],
            [(decay * z / mean).clamp(max=1) for z in s])  # not beyond W_0


def rms_step(weights, trained, forward, back):
    """Take the authors' step, from the gradients, the trained weights and the step sizes."""
    with torch.no_grad():
        for W, W_0, rate, pull in zip(weights, trained, forward, back):
            W += pull * (W_0 - W) - rate * W.grad


def segments_with_gradients(model, tokens, given, recipe, label):
    """Read tokens (n,) and yield for each segment its losses (T,) in nats; the gradients of their
    mean are in the weights meanwhile, which may change between two segments.
    """
    stream = lesson_1.lanes(tokens.to(model.u.device), 1)
    parts, memory = math.ceil((len(tokens) - 1) / given.segment), None
    with train.evaluating(model, replace(recipe, eval_mem_len=given.memory)):
        for x, y in train.progress(lesson_1.segments(stream, given.segment), label, parts):
            model.zero_grad()
            losses, memory = model(x, memory, y)  # (1, T)
            losses.mean().backward()
            yield losses[0].detach()


def gradient_sizes(model, corpus, given, recipe):
    """Return s: for each weight the root of the mean square of its gradient on training text."""
    squares = [torch.zeros_like(W) for W in model.parameters()]
    tokens = corpus.train[: STATISTICS * given.segment + 1]
    for _ in segments_with_gradients(model, tokens, given, recipe, "measuring gradients"):
        for square, W in zip(squares, model.parameters()):
            square += W.grad**2 / STATISTICS
    return [square.sqrt() for square in squares]


def dynamic_losses(step, model, corpus, given, recipe):
    """Read the test split once, with a "sgd" or "rms" step after each segment -> the loss of each
    prediction in nats, (n - 1,), in order.  At the end the weights are what they were.
    """
    weights = list(model.parameters())
    trained, losses = [W.detach().clone() for W in weights], []
    if step == "rms":
        s = gradient_sizes(model, corpus, given, recipe)
        forward, back = step_sizes(s, given.rms_rate, given.epsilon, given.decay)
    for loss in segments_with_gradients(model, corpus.test, given, recipe, NAMES[step]):
        losses.append(loss.cpu())
        if step == "sgd":
            sgd_step(weights, given.sgd_rate)
        else:
            rms_step(weights, trained, forward, back)
    with torch.no_grad():
        for W, W_0 in zip(weights, trained):
            W.copy_(W_0)
    return torch.cat(losses)


@common.make_main
def main(argv):
    """Read the test split of each run in three ways, and print the losses."""
    flags = common.new_parser(NAME, __doc__, "--data-dir", "--device")
    flags.add_argument("--checkpoint", type=Path, nargs="+", metavar="RUN",
                       help="runs of train.py on one text (default: a look at pretrained/)")
    flags.add_argument("--segment", type=int, default=32, help="T; default: 32")
    flags.add_argument("--memory", type=int, default=512, help="M; default: 512")
    flags.add_argument("--sgd-rate", type=float, default=0.01, help="default: 0.01")
    flags.add_argument("--rms-rate", type=float, default=5e-5, help="default: 5e-5")
    flags.add_argument("--epsilon", type=float, default=1e-4, help="of rms; default: 1e-4")
    flags.add_argument("--decay", type=float, default=3e-3, help="of rms; default: 3e-3")
    given = flags.parse_args(argv)
    if given.segment < 1 or given.memory < 0:
        raise ValueError("--segment must be at least 1 and --memory at least 0, got "
                         f"{given.segment} and {given.memory}")
    given.device = machine.choose(given.device)
    found = {step: [] for step in NAMES}  # in the corpus's unit, for each run
    for path in given.checkpoint or [common.PRETRAINED]:
        model, recipe, corpus, _ = common.open_run(path, given.data_dir, given.device)
        if not given.checkpoint:
            corpus = replace(corpus, test=corpus.test[: LOOK + 1])
        reader = fast.prepare(model)
        for step, runs in found.items():
            if step == "static":
                nats = train.evaluate(reader, corpus.test, replace(recipe, dtype="float32"))
            else:
                losses = dynamic_losses(step, model, corpus, given, recipe)
                nats = losses.double().mean().item()
            runs.append(log.in_unit(nats, corpus.unit))
            print(f"{path}, {NAMES[step]}: {runs[-1]:.4f}", flush=True)
    print(f"{corpus.name}: test split, {len(corpus.test) - 1:,} predictions, {corpus.unit}; mean "
          "and half the range of the runs")
    for step, runs in found.items():
        print(f"{NAMES[step]:24} {common.spread(runs)}")


if __name__ == "__main__":
    sys.exit(main())
