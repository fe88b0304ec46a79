"""The point in training at which a memory begins to pay, and the reason (left open by the paper).

A memory *pays* when the loss with the longest memory is 0.05 nats below that with the shortest.
At each validation the model is evaluated with several memory lengths, on the same excerpts, and its
*copying score* is measured.  It is the mean loss on a string of random tokens read after a copy of
itself, minus the mean loss on the same string read after its reverse.  Both contexts hold the same
tokens, so the score is below 0 only if the model uses their order, that is, if it copies.

    python experiments/when_memory_pays.py --dtype bf16        24 models on two cores

The models of the last two rows are trained without a memory.  At the end they are compared with
models of the same depth, each at its best length.  Losses are nats per token (validation split).
"""
import json
import sys
from dataclasses import replace

import common  # before torch

import torch
from matplotlib.figure import Figure

from common import Study, fast, lesson_5, presets
from support.files import write_atomically
from table6_ablation import interval

NAME = "when_memory_pays"
PAYS, COPIES = 0.05, -0.5  # nats: a memory pays above the first, a model copies below the second
# optimizer, layers N, whether it is trained with the longest memory or without one
ROWS = (*((name, N, True) for name in ("muon", "adam") for N in (1, 2, 4)),
        ("muon", 1, False), ("muon", 4, False))
# Adam with the best of eight settings after 1,300 steps (tuning.md)
OPTIMIZERS = {"muon": {}, "adam": {"optimizer": "adam", "lr": 0.003, "schedule": "cosine",
                                   "warmup": 100, "clip": 0.25}}
SCALES = {  # lengths are the memories of evaluation
    "tiny": Study(lesson_5.CONFIGS["tiny"],
                  presets.Recipe(batch=4, segment=8, steps=6, eval_every=3, eval_tokens=40,
                                 optimizer="muon", eval_mem_len=16), (4, 8, 16), count=2, n=30),
    "small": Study(presets.CONFIGS["laptop"], replace(
        presets.RECIPES["laptop"], minutes=0.0, steps=4300, eval_every=100, eval_tokens=4096),
        (32, 128, 512), count=16, n=480)}
COLORS = {1: "tab:orange", 2: "tab:green", 4: "tab:blue"}


@torch.no_grad()
def copying_score(reader, V, n):
    """Return the mean loss on 32 strings of n random tokens, each read after a copy of itself,
    minus the mean loss on the same strings, each read after its reverse.
    """
    string = torch.randint(V, (32, n), generator=torch.Generator().manual_seed(0))
    means = []
    with common.train.evaluating(reader, mem_len=2 * n, same_length=True, clamp_len=0):
        for before in string, string.flip(1):
            tokens = torch.cat([before, string], dim=1).to(reader.u.device)
            losses, _ = reader(tokens[:, :-1], None, tokens[:, 1:])
            means.append(losses[:, n:].mean().item())  # without the string's first token
    return means[0] - means[1]


class NotingReader:
    """A run's reader that also records, at each validation, how much a memory helps the model."""

    def __init__(self, job, study):
        self.job, self.study, self.reader = job, study, fast.prepare(job.model)
        self.tokens = common.excerpts(job.corpus.valid, study.lengths[-1], study.count, study.n,
                                      job.model.u.device)

    def __getattr__(self, name):  # all else is the reader's: u, training, eval, train
        return getattr(self.reader, name)

    config = property(lambda self: self.reader.config,
                      lambda self, config: setattr(self.reader, "config", config))

    def __call__(self, x, memory=None, y=None, last_only=False):
        """Return losses (B, T) and the memory, as the reader."""
        if memory is None:  # a validation begins
            self.note()
        return self.reader(x, memory, y, last_only)

    def note(self):
        """Record the loss at each memory length, and the copying score, for the current step."""
        job, study, reader = self.job, self.study, self.reader
        before = study.lengths[-1]
        with torch.autocast(self.u.device.type, enabled=False):
            losses = [common.memory_losses(reader, self.tokens, before, 128, mem_len=M,
                                           same_length=True, clamp_len=0).mean().item()
                      for M in study.lengths]
            score = copying_score(reader, len(job.corpus.vocab), before // 8)
        notes = read_notes(job.path) | {job.state.step: (*losses, score)}
        write_atomically(job.path / "notes.json",
                         lambda file: json.dump([*notes.items()], file), "w")


def read_notes(path):
    """Return {step: [loss with each length ..., score]} of the run in the folder `path`."""
    path = path / "notes.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def gain(values):
    """Return the loss with the shortest memory minus the loss with the longest."""
    return values[0] - values[-2]


def first_step(notes, holds):
    """Return the first step from which holds(values) stays true until the end, or "-"."""
    failing = [step for step, values in notes.items() if not holds(values)]
    return next((f"{step:,}" for step in notes if step > max(failing, default=-1)), "-")


def report(results, study):
    """Print a line for each row, and the gain from training with a memory."""
    last = {row: [[*notes.values()][-1] for notes in runs] for row, runs in results.items()}
    columns = "".join(f"{f'M {M}':>16}" for M in study.lengths)
    print("nats per token at the end, mean ± half the range over the seeds; pays from, copies "
          f"from: steps of the seeds\noptimizer N    M{columns}{'copying score':>17}"
          f"{'lowest':>8}  pays from             copies from")
    for (name, N, M), runs in results.items():
        pays = " ".join(first_step(notes, lambda z: gain(z) > PAYS) for notes in runs)
        copies = " ".join(first_step(notes, lambda z: z[-1] < COPIES) for notes in runs)
        print(f"{name:9}{N:2}{M:5}" + "".join(f"{common.spread(z):>16}"
                                               for z in zip(*last[name, N, M]))
              + f"{min(z[-1] for notes in runs for z in notes.values()):9.2f}  {pays:22}{copies}")
    for name, N, M in results:
        if M == 0:
            with_memory, without = ([min(values[:-1]) for values in last[name, N, length]]
                                    for length in (study.lengths[-1], 0))
            middle, half = interval([a - b for a, b in zip(with_memory, without)])
            print(f"N {N}: trained with M {study.lengths[-1]} instead of none: {middle:+.3f} ± "
                  f"{half:.3f} (half of the 95 percent interval)")


def draw(results, study, path, nats):
    """Plot the gain from the memory and the copying score by step, for each optimizer."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels = figure.subplots(2, len(OPTIMIZERS), sharex=True, sharey="row")
    for (name, N, M), runs in results.items():
        column = panels[:, list(OPTIMIZERS).index(name)]
        label = f"{N} layer{'s' * (N > 1)}{', trained without a memory' * (M == 0)}"
        for seed, notes in enumerate(runs):
            for axes, measure in zip(column, (gain, lambda values: values[-1])):
                axes.plot([*notes], [measure(z) for z in notes.values()], ":" if M == 0 else "-",
                          color=COLORS[N], label=label if seed == 0 else None)
    for column, name in zip(panels.T, OPTIMIZERS):
        column[0].set_title(f"{name.title()}, a line per seed")
        column[1].set(xlabel="step", xlim=(0, None))
        for axes, limit in zip(column, (PAYS, COPIES)):
            axes.axhline(limit, color="gray", linewidth=0.8)
    panels[0, 0].set(ylabel=f"{nats}: loss with M {study.lengths[0]}\nminus loss with M "
                            f"{study.lengths[-1]} (gray: it pays)")
    panels[1, 0].set(ylabel="nats: copying score\n(gray: it copies)")
    panels[0, 1].legend(*panels[0, 0].get_legend_handles_labels(), fontsize=9)  # room for it
    common.save_figure(figure, path)


@common.make_main
def main(argv):
    """Train the missing models, then print and plot the results."""
    given, corpus = common.begin(
        common.make_flags(NAME, __doc__, SCALES).parse_args(argv), NAME)
    study, results = SCALES[given.scale], {}
    longest = study.lengths[-1]
    common.excerpts(corpus.valid, longest, study.count, study.n, "cpu")  # long enough?
    for name, N, has_memory in ROWS:
        config = replace(study.config, vocab_size=len(corpus.vocab), n_layer=N,
                         mem_len=has_memory * longest)
        jobs = common.fit_seeds(
            lambda: lesson_5.TransformerXL(config).to(given.device), corpus,
            replace(study.recipe, **OPTIMIZERS[name]), given, f"{name}-N{N}-M{config.mem_len}",
            reader=lambda job: NotingReader(job, study))
        results[name, N, config.mem_len] = [read_notes(job.path) for job in jobs]
    print(f"{corpus.name}; segments of {study.recipe.segment}, {study.recipe.steps:,} steps of "
          f"{study.recipe.batch} lanes, seeds {given.seeds}, {given.dtype}")
    report(results, study)
    draw(results, study, given.out / f"{NAME}.png", common.nats_per_token(corpus))


if __name__ == "__main__":
    sys.exit(main())
