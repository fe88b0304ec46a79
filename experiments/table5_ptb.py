"""Penn Treebank: the paper's 54.52 test perplexity with 24 million parameters (section 4.1).

The paper names variational dropout and weight averaging, and no script was published with it.  The
authors' later public code has settings for another architecture (no W_kR, no memory); the preset
"ptb" is ours, from those.  Here the paper's architecture has both parts, at most 24M parameters.

    python experiments/table5_ptb.py                                      a small model
    python experiments/table5_ptb.py --scale paper --dtype bf16 --test    a GPU

Variational dropout (Gal & Ghahramani 2016; Merity, Keskar and Socher 2017, 4.2) draws one mask for
all time steps of a segment, so a dropped feature cannot be read off the neighboring word.  Here it
is at the input and the output; inside the layers, where it hurt in trials, elements are dropped
independently.  The weight average is the mean of the weights after each step of the run's last
part, at a constant rate; it is the run's model.  Memory and clamp of evaluation are chosen on the
validation split.  The test split is read only with --test, once for each finished model.
"""
import json
import sys
import time
from dataclasses import dataclass, replace

import common  # before torch

import torch.nn as nn
from torch.optim.swa_utils import AveragedModel

from common import fast, lesson_5, log, presets, train
from support.files import write_atomically
from training.optimizers import OPTIMIZERS, set_rate

NAME = "table5_ptb"
AVERAGE_FROM = 0.7  # fraction of the run where the weight average begins


@dataclass(frozen=True)
class Dropouts:
    """The dropout rates of a model."""

    input: float  # of the embedded words; one mask for all time steps
    inside: float  # of R, after the attention, inside and after the feed-forward network
    attention: float  # of the attention probabilities
    output: float  # of the last hidden state; one mask for all time steps


RECIPE = presets.Recipe("ptb", steps=1, eval_segment=64)
# a model, how it is trained, its dropouts, and the memories of evaluation to choose from
SCALES = {
    "tiny": (lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8),
             replace(RECIPE, batch=4, segment=8, steps=26, lr=3e-3, warmup=5, eval_mem_len=16,
                     eval_every=10, eval_tokens=200),
             Dropouts(0.3, 0.1, 0.1, 0.3), (8, 16)),
    "small": (replace(presets.CONFIGS["laptop-words"], n_layer=6, d_model=192, n_head=3,
                      d_inner=768, dropout=0.0),  # 12 epochs
              replace(presets.RECIPES["laptop-words"], minutes=0.0, steps=5448, eval_every=908),
              Dropouts(0.3, 0.2, 0.1, 0.4), (64, 128, 256)),
    # 12 layers of 384, multiples of 64 for a GPU, instead of the preset's 16 layers of 380
    "paper": (replace(presets.CONFIGS["ptb"], n_layer=12, d_model=384, n_head=6, d_head=64,
                      d_inner=1152, dropout=0.0, dropout_attention=0.0),  # 150 epochs
              replace(RECIPE, batch=20, segment=70, steps=99_600, lr=3e-4, warmup=3000,
                      eval_segment=512, eval_mem_len=140, eval_every=1992, eval_tokens=0),
              Dropouts(0.6, 0.2, 0.2, 0.5), (70, 140, 280, 560, 1120))}


class LockedDropout(nn.Dropout1d):
    """Dropout with one mask for all time steps of a call: (B, T, D), mask (B, 1, D)."""

    def forward(self, z):
        """Return z (B, T, D) with dropped features and the same mean; in evaluation z itself."""
        return super().forward(z.mT).mT


def regularize(model, dropouts):
    """Replace lesson 5's dropouts by these."""
    model.dropout_embedding = LockedDropout(dropouts.input)
    model.dropout_final = LockedDropout(dropouts.output)
    model.dropout_R = nn.Dropout(dropouts.inside)
    for layer in model.layers:
        layer.dropout_output, layer.dropout_inner, layer.dropout_ff = (
            nn.Dropout(dropouts.inside) for _ in range(3))
        layer.attention.dropout_attention = nn.Dropout(dropouts.attention)
    model.variant = str(dropouts)  # a part of the run's name: others are rejected in its folder


class Averaging:
    """The run's optimizer, and `mean`: the model of the mean of the weights after each step from
    AVERAGE_FROM of the run on; until then it has the weights of the last step.
    """

    def __init__(self, model, recipe):
        self.first, self.model = round(AVERAGE_FROM * recipe.steps), model
        self.optimizer = OPTIMIZERS[recipe.optimizer](model, recipe)
        self.zero_grad = self.optimizer.zero_grad
        self.rate = train.learning_rate(recipe, self.first - 1, (self.first - 1) / recipe.steps)
        self.mean = AveragedModel(model, avg_fn=lambda mean, new, steps: (
            mean.lerp(new, 1 / (1 + (steps - self.first).clamp(min=0)))))

    @property
    def param_groups(self):
        """Return the groups of weights, whose rates the loop sets."""
        return self.optimizer.param_groups

    def step(self):
        """Update all weights, with one rate from where the average begins, and their mean."""
        if self.mean.n_averaged >= self.first:  # it counts all steps
            set_rate(self, self.rate)
        self.optimizer.step()
        self.mean.update_parameters(self.model)

    def state_dict(self):
        """Return the states of both."""
        return {"optimizer": self.optimizer.state_dict(), "mean": self.mean.state_dict()}

    def load_state_dict(self, states):
        """Restore them."""
        self.optimizer.load_state_dict(states["optimizer"])
        self.mean.load_state_dict(states["mean"])


def fit(config, recipe, dropouts, corpus, path, device):
    """Train, or resume, the run in the folder `path` -> its average, in eval mode."""
    def optimizer(model):
        averaging = Averaging(model, recipe)
        regularize(model, dropouts)  # not the mean, which only evaluates
        return averaging

    job = common.fit(path, lambda: lesson_5.TransformerXL(config).to(device), corpus, recipe,
                     optimizer, lambda job: fast.prepare(job.optimizer.mean.module))
    return job.optimizer.mean.module.eval()


def mean_loss(model, tokens, recipe, M, clamp_len):
    """Return train.py's mean loss in nats over n tokens with a memory of M, in float32."""
    recipe = replace(recipe, eval_mem_len=M, eval_clamp_len=clamp_len, dtype="float32")
    return train.evaluate(fast.prepare(model), tokens, recipe)


def result_of(model, corpus, recipe, memories, path, test):
    """Choose memory and clamp of evaluation and, if asked, read the test split -> what `path` says.
    Each is done once for a model.
    """
    def note(result):
        write_atomically(path, lambda file: json.dump(result, file, indent=1), "w")

    if not path.exists():
        farthest = recipe.segment + model.config.mem_len - 1  # distance in training
        nats = {(M, clamp): mean_loss(model, corpus.valid, recipe, M, clamp) for M in memories
                for clamp in (0, farthest) if M > farthest or not clamp}
        M, clamp = min(nats, key=nats.get)
        valid = {f"{M}, {clamp}": log.in_unit(loss, "ppl") for (M, clamp), loss in nats.items()}
        note({"valid": valid, "M": M, "clamp": clamp})
    result = json.loads(path.read_text())
    if test and "test" not in result:
        nats = mean_loss(model, corpus.test, recipe, result["M"], result["clamp"])
        result |= {"test": log.in_unit(nats, "ppl"), "read": time.strftime("%Y-%m-%d %H:%M:%S")}
        note(result)
    return result


@common.make_main
def main(argv):
    """Train what is missing, choose the evaluation and, if asked, test."""
    flags = common.make_flags(NAME, __doc__, SCALES)
    flags.set_defaults(dataset="ptb")
    flags.add_argument("--test", action="store_true", help="read the test split")
    given, corpus = common.begin(flags.parse_args(argv), NAME)
    config, recipe, dropouts, memories = SCALES[given.scale]
    config = replace(config, vocab_size=len(corpus.vocab))
    for seed in given.seeds:
        path = given.out / f"recipe-{seed}"
        recipe = replace(recipe, seed=seed, dtype=given.dtype)
        model = fit(config, recipe, dropouts, corpus, path, given.device)
        result = result_of(model, corpus, recipe, memories, path / "result.json", given.test)
        print(f"seed {seed}: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
