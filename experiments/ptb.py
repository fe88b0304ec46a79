"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

    python experiments/ptb.py                               a small model; again, to resume it
    python experiments/ptb.py --scale paper --dtype bf16    a GPU

The paper names variational dropout and weight averaging, and no script was published with it.  The
authors' later public code has settings for another architecture (no W_kR, no memory); the preset
"ptb" is ours, from those.  Here the paper's architecture has both parts, at most 24M parameters.

Variational dropout (Gal & Ghahramani 2016; Merity, Keskar and Socher 2017, 4.2) draws one mask for
all time steps of a segment, so a dropped feature cannot be read off the neighboring word.  Here it
is at the input and the output; inside the layers, where it hurt in trials, elements are dropped
independently.  The run's model is the mean of the weights after each step of its last 30 percent,
at a constant rate.  Its memory and clamp of evaluation are chosen on the validation split.
"""
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from variants import corpora, lesson_1, lesson_5, presets, train  # before torch

import torch
import torch.nn as nn

from training import fast, log, machine
from training.command import Parser
from training.flags import exit_status
from training.job import Job, open_job
from training.optimizers import OPTIMIZERS, set_rate

# a model, how it is trained, locked dropout of input and output, and the memories to choose from
SCALES = {
    "small": (replace(presets.CONFIGS["laptop-words"], n_layer=6, d_model=192, n_head=3,
                      d_inner=768, dropout=0.2, dropout_attention=0.1),  # 12 epochs
              replace(presets.RECIPES["laptop-words"], minutes=0.0, steps=5448, eval_every=908),
              (0.3, 0.4), (64, 128, 256)),
    # 12 layers of 384, multiples of 64 for a GPU, instead of the preset's 16 layers of 380
    "paper": (replace(presets.CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                      d_inner=1152),  # 150 epochs
              presets.Recipe("ptb", batch=20, segment=70, steps=99_600, lr=3e-4, warmup=3000,
                             eval_segment=512, eval_mem_len=140, eval_every=1992, eval_tokens=0),
              (0.6, 0.5), (70, 140, 280, 560, 1120))}


class LockedDropout(nn.Dropout1d):
    """Dropout with one mask for all time steps of a call: (B, T, D), mask (B, 1, D)."""

    def forward(self, z):
        """Return z (B, T, D) with dropped features and the same mean; in evaluation z itself."""
        return super().forward(z.mT).mT


def average(model, recipe):
    """Return the run's optimizer, which also updates model.mean: a model with the mean of the
    weights after each step of the last 30 percent; until then with those of the last step.
    """
    optimizer, first = OPTIMIZERS[recipe.optimizer](model, recipe), round(0.7 * recipe.steps)
    weights, step = list(model.parameters()), optimizer.step
    rate = train.learning_rate(recipe, first - 1, (first - 1) / recipe.steps)

    @torch.no_grad()
    def step_and_average():
        done = model.done.item()
        if done >= first:
            set_rate(optimizer, rate)
        step()
        for W_mean, W in zip(model.mean.parameters(), weights):
            W_mean.lerp_(W, 1 / max(1, done - first + 1))
        model.done += 1

    optimizer.step = step_and_average
    # parts of the model, so that checkpoints have both
    model.mean = deepcopy(model).requires_grad_(False)
    model.register_buffer("done", torch.tensor(0))  # steps
    return optimizer


def fit(path, config, recipe, locked, corpus, device):
    """Train, or resume, the run in the folder `path` -> its average, in eval mode."""
    def make_job(saved):
        torch.manual_seed(recipe.seed)
        model = lesson_5.TransformerXL(config).to(device)
        optimizer = average(model, recipe)
        model.dropout_embedding, model.dropout_final = map(LockedDropout, locked)
        return Job(path, "ptb", model, recipe, corpus, optimizer, fast.prepare(model.mean))

    with open_job(path, make_job, resume=any(path.glob("*.pt"))) as job:
        if train.fit(job):
            raise KeyboardInterrupt
    return job.reader.eval()


def choose_lengths(reader, corpus, recipe, memories):
    """Return the Recipe with the memory and clamp of evaluation that score best in validation."""
    tried, farthest = {}, recipe.segment + reader.config.mem_len - 1  # distance in training
    for M in memories:
        for clamp in (0, farthest) if M > farthest else (0,):
            changed = replace(recipe, eval_mem_len=M, eval_clamp_len=clamp, dtype="float32")
            tried[changed] = train.evaluate(reader, corpus.valid, changed)
            print(f"M {M}, clamp {clamp}: valid {log.in_unit(tried[changed], 'ppl'):.2f} ppl")
    return min(tried, key=tried.get)


def run(argv):
    """Train or resume the run, choose its evaluation, and test."""
    flags = Parser(prog="experiments/ptb.py", description=__doc__)
    flags.add_argument("--scale", choices=SCALES, default="small")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    flags.add_argument("--device", choices=("cpu", "cuda"), default="")
    flags.add_argument("--data-dir", default=lesson_1.RUNS.parent / "data", metavar="FOLDER")
    given = flags.parse_args(argv)
    device = machine.choose(given.device)
    config, recipe, locked, memories = SCALES[given.scale]
    recipe = replace(recipe, seed=given.seed, dtype=given.dtype)
    corpus = corpora.load("ptb", root=given.data_dir)
    config = replace(config, vocab_size=len(corpus.vocab))
    path = lesson_1.RUNS / f"ptb-{given.scale}-{given.seed}-{given.dtype}"
    reader = fit(path, config, recipe, locked, corpus, device)
    print(train.test_line(reader, corpus, choose_lengths(reader, corpus, recipe, memories)))


def main(argv=None):
    """Return the exit status."""
    return exit_status("ptb.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
