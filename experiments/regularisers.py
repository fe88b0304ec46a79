"""What keeps a model of 24 million parameters from learning 929,589 words by heart, part by part.

Penn Treebank is small: a model as large as the paper's knows the training text after a few
readings, and its validation loss rises from then on.  The paper names variational dropout and
weight averaging (section 4.1) and no more.  The parts here are those with which Merity, Keskar and
Socher (2018, "Regularizing and Optimizing LSTM Language Models", here MKS) trained their LSTM.

Lesson 5 has no option for any of them: `regularise` puts its modules in the place of the model's.
They own no weights, and those that wrap a weight share it under its name, so that a regularised
model has the state dict of the plain one, and in eval mode its results.
"""
import math
import random
import statistics
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common import Training, checkpoint, fast, lesson_5, log, machine, train
from training.optimizers import Optimizer

DROPOUTS = "word", "input", "inside", "attention", "output", "connect"  # the rates among the parts


@dataclass(frozen=True)
class Recipe:
    """How strongly a model is regularised; the defaults are: not at all."""

    word: float = 0.0  # the dropout rates: words of the embedding,
    input: float = 0.0  # the embedded words,
    inside: float = 0.0  # R, after the attention, inside and after the feed-forward network,
    attention: float = 0.0  # the attention probabilities,
    output: float = 0.0  # the last hidden state,
    connect: float = 0.0  # the matrices of each attention
    locked: bool = True  # input and output have one mask for all time steps ...
    locked_inside: bool = False  # ... and so have those inside
    alpha: float = 0.0  # AR: the price of large hidden states
    beta: float = 0.0  # TAR: the price of jumping ones
    decay: float = 0.0  # weight decay of the matrices
    decoupled: bool = True  # as in AdamW, else in the gradient
    embedding_rate: float = 1.0  # the embedding's learning rate, in units of the others'
    muon: float = 0.0  # the learning rate of Muon for the other matrices; 0: Adam's, as all
    vary: bool = False  # segments of random length
    average: str = ""  # "equal", "ema" or "": no averaging
    average_from: float = 1.0  # where it begins, as a part of the run ...
    average_rate: float = 1.0  # ... and the learning rate from there on, in units of the one there

    def __post_init__(self):
        for field in fields(self):
            value, most = getattr(self, field.name), 1.0 if field.name in DROPOUTS else math.inf
            if field.type is float and not 0 <= value < most:
                raise ValueError(f"{field.name} must be in [0, {most:g}), got {value}")
        if self.muon and self.decay and not self.decoupled:
            raise ValueError("Muon's decay is beside the gradient: muon needs decoupled=True")
        if self.average not in ("equal", "ema", ""):
            raise ValueError(f"average must be equal, ema or empty, got {self.average!r}")
        if self.average and not 0 < self.average_from < 1:
            raise ValueError("an average needs average_from in (0, 1), the part of the run before "
                             f"it, got {self.average_from}")


def changed(recipe, settings):
    """The recipe with ["word=0.1", ...] -> Recipe.  ValueError for what is no part or no value."""
    kinds = {field.name: field.type for field in fields(Recipe)}
    for setting in settings:
        part, _, text = setting.partition("=")
        try:
            if part not in kinds:
                raise ValueError("no such part")
            if kinds[part] is bool and text not in ("True", "False"):
                raise ValueError("True or False is needed")
            value = text == "True" if kinds[part] is bool else kinds[part](text)
            recipe = replace(recipe, **{part: value})
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}; the parts are {', '.join(kinds)}"
                             ) from None
    return recipe


# ---- dropouts -----------------------------------------------------------------------------------

class LockedDropout(nn.Module):
    """Dropout with one mask for all time steps of a call: (..., T, D), mask (..., 1, D) (MKS 4.2;
    Gal & Ghahramani 2016).

    Each lane has its own.  A feature that is dropped is absent for the whole segment, so that it
    cannot be read off the neighbouring word.  No nn.Dropout, since fast.prepare exchanges those.
    """

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, z):
        """(..., T, D) -> (..., T, D), the mean kept; in evaluation z itself."""
        return F.dropout1d(z.mT, self.p, self.training).mT if self.p else z


class WordDropout(lesson_5.TiedEmbedding):
    """Lesson 5's embedding that loses words: with probability p all of a word in a call are zeros.

    The others are scaled by 1 / (1 - p).  It shares weight and bias with the embedding that it
    replaces, and the output, `logits` and `losses`, sees all words as they are.
    """

    def __init__(self, embedding, p):
        nn.Embedding.__init__(self, *embedding.weight.shape, device="meta")  # no memory
        self.weight, self.bias, self.p = embedding.weight, embedding.bias, p

    def forward(self, x):
        """(B, T) int64 -> (B, T, D)."""
        kept = F.dropout(self.weight.new_ones(len(self.weight), 1), self.p, self.training)  # (V, 1)
        return super().forward(x) * kept[x]


class DropConnect(nn.Linear):
    """A linear layer that loses single weights, drawn anew for each call; it shares its weight."""

    def __init__(self, linear, p):
        super().__init__(linear.in_features, linear.out_features, device="meta")  # no memory
        self.weight, self.bias, self.p = linear.weight, linear.bias, p

    def forward(self, z):
        """(..., in) -> (..., out)."""
        return F.linear(z, F.dropout(self.weight, self.p, self.training), self.bias)


# lesson 5's names, and the rate of the recipe that each is given
PLACES = {"dropout_embedding": "input", "dropout_R": "inside", "dropout_attention": "attention",
          "dropout_output": "inside", "dropout_inner": "inside", "dropout_ff": "inside",
          "dropout_final": "output"}


def regularise(model, recipe):
    """Put the recipe's dropouts in the place of lesson 5's (and of what they wrap) -> the model."""
    for name, module in list(model.named_modules()):
        parent, _, kind = name.rpartition(".")
        if kind in PLACES:
            locked = recipe.locked_inside if PLACES[kind] == "inside" else recipe.locked
            make = LockedDropout if locked and kind != "dropout_attention" else nn.Dropout
            new = make(getattr(recipe, PLACES[kind]))
        elif isinstance(module, lesson_5.TiedEmbedding) and recipe.word:
            new = WordDropout(module, recipe.word)
        elif parent.endswith("attention") and isinstance(module, nn.Linear) and recipe.connect:
            new = DropConnect(module, recipe.connect)
        else:
            continue
        setattr(model.get_submodule(parent), kind, new)
    return model


# ---- the price of activations -------------------------------------------------------------------

def activation_penalty(h, dropped, alpha, beta):
    """AR + TAR: alpha mean(dropped^2) + beta mean((h_t+1 - h_t)^2), of states (B, T, D), in nats.

    AR looks at the state after its dropout, TAR at the one before it (MKS 4.6, which has norms
    where their code, and this, has mean squares).  An LSTM's state may grow; here the last norm
    sets the size of the states, so that AR mostly shrinks its gains and biases.
    """
    penalty = alpha * dropped.float().square().mean()
    if h.shape[1] > 1:
        penalty = penalty + beta * h.float().diff(dim=1).square().mean()
    return penalty


class Penalised(nn.Module):
    """A model whose losses have the penalty added to each, so that their mean has it once.

    The last hidden state is read by a forward hook of the model's last dropout.
    """

    def __init__(self, model, alpha, beta):
        super().__init__()
        self.model, self.alpha, self.beta = model, alpha, beta
        model.dropout_final.register_forward_hook(self.look)

    def look(self, module, inputs, output):
        """Called by torch after the module: keep what went in and what came out."""
        self.seen = *inputs, output

    def forward(self, x, memory, y):
        """As lesson 5's model: losses (B, T) with the penalty, and the new memory."""
        losses, memory = self.model(x, memory, y)
        seen, self.seen = self.seen, None  # else the graph of this step would outlive it
        penalty = activation_penalty(*seen, self.alpha, self.beta)
        self.penalty = penalty.detach()  # for those who want the loss without it
        return losses + penalty, memory


# ---- length, optimizer --------------------------------------------------------------------------

def segment_length(T, seed, step):
    """The length of a step's segment: near T, or, one segment in twenty, near T / 2.

    Normal, T / 14 wide as with MKS's 5 of 70, then rounded to tenths of T, so that there are few
    different ones.  The learning rate of the step is to be scaled by length / T.
    """
    draw = random.Random(f"{seed} {step}")
    length = draw.gauss(T if draw.random() < 0.95 else T / 2, T / 14)
    return max(1, round(T * max(1, round(10 * length / T)) / 10))


def optimizer_of(model, recipe, lr):
    """Adam over three groups: the embedding, the other matrices, which Muon may move instead, and
    the rest, which never decays (MKS decay all weights).  A decay beside the gradient is multiplied
    by the learning rate of the group.
    """
    embedding = model.embedding.weight
    matrices = [z for z in model.parameters() if z.dim() == 2 and z is not embedding]
    rest = [z for z in model.parameters() if z.dim() != 2]
    groups = [{"params": [embedding], "factor": recipe.embedding_rate},
              {"params": matrices, "factor": 1.0},
              {"params": rest, "factor": 1.0, "weight_decay": 0.0}]
    muon = []
    if recipe.muon:
        moved = groups.pop(1) | {"factor": recipe.muon / lr}
        muon = [torch.optim.Muon([moved], lr=recipe.muon, weight_decay=recipe.decay)]
    kind = torch.optim.AdamW if recipe.decoupled else torch.optim.Adam
    return Optimizer(kind(groups, lr=lr, weight_decay=recipe.decay, fused=True), *muon)


# ---- training with them -------------------------------------------------------------------------

ppl = partial(log.in_unit, unit="ppl")  # of a mean loss in nats


def shown(nats):
    """A loss as it stands in curve.tsv; empty, if it was not measured."""
    return "" if nats is None else f"{ppl(nats):.3f}"


COLUMNS = {"step": str, "tokens": str, "seconds": "{:.1f}".format, "rate": "{:.3g}".format,
           "train": shown, "valid": shown, "averaged": shown}  # of curve.tsv


def write_curve(curve, path):
    """A curve, with losses in nats -> curve.tsv, with perplexities."""
    lines = [COLUMNS, *([form(row[name]) for name, form in COLUMNS.items()] for row in curve)]
    checkpoint.write(path, lambda file: file.writelines("\t".join(z) + "\n" for z in lines))


class Regularised(Training):
    """What common.fit asks for, by a recipe; with a curve of validations, dicts of COLUMNS."""

    def __init__(self, model, run, recipe, corpus, folder, mode):
        # DropConnect draws when it is called; the fast attention would only read its weight
        self.model = fast.prepare(regularise(model, recipe), attention=not recipe.connect)
        self.run, self.recipe = run, recipe
        self.optimizer = optimizer_of(model, recipe, run.lr)
        steps = (1 - recipe.average_from) * run.tokens / (run.batch * run.segment)  # averaged ones
        # after a tenth of them an update has lost 1 - 1/e of its weight in the exponential mean
        rule = get_ema_multi_avg_fn(1 - 1 / max(1, steps / 10)) if recipe.average == "ema" else None
        self.mean = AveragedModel(model, multi_avg_fn=rule)  # a copy, and one without penalties
        self.penalised = Penalised(model, recipe.alpha, recipe.beta)
        self.valid, self.curve = train.validation_tokens(corpus, run), []
        self.losses = []  # of the steps since the last line of the curve
        self.folder, self.mode = folder, mode

    @property
    def learner(self):
        """The model with its penalties; with a mode of torch.compile, compiled."""
        if self.mode is None:
            return self.penalised
        run, device = self.run, self.model.u.device
        x = torch.zeros(run.batch, run.segment, dtype=torch.int64, device=device)
        return machine.compiled(
            self.penalised, machine.autocast(run, device.type), x, x, self.mode)

    def length(self, step):
        """Random, if the recipe says so."""
        T = self.run.segment
        return segment_length(T, self.run.seed, step) if self.recipe.vary else T

    def rate(self, step, done, T):
        """train.py's; with averaging the cosine ends where that begins, at a third of run.lr, and
        the rate is constant from there on.  In proportion to T.
        """
        run, recipe = self.run, self.recipe
        rate = train.learning_rate(run, step, done)
        if recipe.average:
            cosine = train.learning_rate(run, step, min(1.0, done / recipe.average_from))
            rate = min((run.lr + 2 * cosine) / 3, run.lr * (step + 1) / max(1, run.warmup))
            if done >= recipe.average_from:
                rate *= recipe.average_rate
        return rate * T / run.segment

    def after_step(self, state, loss, done):
        """Average; every eval_every steps a line for the curve, whose losses have no penalty."""
        run, recipe = self.run, self.recipe
        if state.skipped_in_a_row == 0:
            self.losses.append(loss - self.penalised.penalty.item())
        if recipe.average and done >= recipe.average_from:
            self.mean.update_parameters(self.model)
        if state.step % run.eval_every == 0 or state.tokens >= run.tokens:
            self.curve.append({
                "step": state.step, "tokens": state.tokens, "seconds": state.seconds,
                "rate": self.rate(state.step - 1, done, run.segment),
                "train": statistics.mean(self.losses) if self.losses else math.inf,
                "valid": self.validate(self.model),
                "averaged": self.validate(self.mean.module) if self.mean.n_averaged else None})
            self.losses = []

    def validate(self, model):
        """The validation loss in nats."""
        return train.evaluate(fast.Reader(model), self.valid, self.run, "validating")

    def keep(self, finished):
        """A finished model becomes the average, if there is one, rounded to bf16 (2 bytes each)."""
        write_curve(self.curve, self.folder / "curve.tsv")
        if not finished:
            return super().keep(False) | {"curve": self.curve, "losses": self.losses,
                                          "mean": self.mean.state_dict()}
        best = self.mean.module if self.mean.n_averaged else self.model
        rounded = {name: z.bfloat16() for name, z in best.state_dict().items()}
        self.model.load_state_dict(rounded)
        return {"curve": self.curve, "model": rounded}

    def restore(self, content):
        """The same back."""
        super().restore(content)
        self.curve, self.losses = content["curve"], content.get("losses", [])
        if "mean" in content:
            self.mean.load_state_dict(content["mean"])
