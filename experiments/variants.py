"""The models of the lab by name: lesson 5's with another encoding, recurrence, loss, depth, ...

    ours        R_i-j, a sinusoid of the distance, through W_kR; all four terms     lessons 3 and 4
    shaw        a learned vector for each distance, in terms (a) and (b) only      lesson 3, preface
    vaswani     a sinusoid of the position in the segment, added to the embedding   lesson 1
    rope        query and key are rotated by their positions (Su et al. 2021)
    alibi       the score falls linearly with the distance, a slope per head (Press et al. 2021)
    lstm        two layers with a state instead of a memory, as wide as the parameters of ours allow
"""
import math
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

import train
from training import presets
from training.optimizers import OPTIMIZERS, set_rate
from training.text import sentence_lanes

lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")


@dataclass(frozen=True)
class Row:
    """One model of the lab: what differs from the first row; M is T, or 0 without recurrence."""

    encoding: str = "ours"
    recurrence: bool = True
    half_loss: bool = False  # train the later half of each segment only
    n_layer: int = 0  # 0: the scale's
    longer: float = 1.0  # T is this many times the scale's
    shuffled: bool = False  # lines in random order
    optimizer: str = "muon"
    locked: bool = False  # dropout with one mask for all time steps
    averaged: bool = False  # evaluate the mean weights of the last 30 percent

    @property
    def has_reader(self):
        """Return whether a Reader gives the same losses: it calls no hook, as Vaswani's needs."""
        return self.encoding not in ("vaswani", "lstm")


BYTES = {
    "ours": Row(),
    "ours-half": Row(half_loss=True),
    "ours-none-half": Row(recurrence=False, half_loss=True),
    "ours-none": Row(recurrence=False),
    "shaw": Row("shaw"),
    "vaswani-none-half": Row("vaswani", recurrence=False, half_loss=True),
    "vaswani": Row("vaswani"),
    "rope": Row("rope"),
    "alibi": Row("alibi"),
    "layers-1": Row(n_layer=1),
    "layers-2": Row(n_layer=2),
    "layers-1-none": Row(n_layer=1, recurrence=False),
    "layers-2-none": Row(n_layer=2, recurrence=False),
    "shuffled": Row(shuffled=True),
    "shuffled-none": Row(shuffled=True, recurrence=False),
    "ours-none-176": Row(recurrence=False, longer=11 / 8),  # table 10's ratio
    "adam": Row(optimizer="adam"),
    "lstm": Row("lstm", optimizer="adam"),
}
WORDS = {  # the two parts that the paper names for Penn Treebank (section 4.1)
    "words": Row(),
    "words-both": Row(locked=True, averaged=True),
    "words-locked": Row(locked=True),
    "words-averaged": Row(averaged=True),
}
ROWS = BYTES | WORDS
# of the rates 0.001, 0.003 and 0.01 the LSTM's validation loss is lowest with 0.003 (seed 0)
ADAM = {"optimizer": "adam", "lr": 0.003, "schedule": "cosine", "warmup": 100, "clip": 0.25}


@dataclass(frozen=True)
class Scale:
    """What a row is trained and measured with."""

    dataset: str
    config: lesson_5.Config  # the corpus decides vocab_size
    recipe: presets.Recipe
    lengths: tuple  # attention lengths in tokens, ascending
    count: int  # excerpts that are read side by side in evaluation ...
    n: int  # ... and predictions in each; half as many on the validation split
    contexts: range  # of RECL
    windows: int  # in each of eight places of the test split, for RECL
    rows: tuple = tuple(BYTES)


# 128M parameters as in the paper's table 6, which names no dimensions: these are ours
WT103 = replace(presets.CONFIGS["wt103-standard"], d_model=350, d_head=35, d_inner=2150)
SCALES = {
    "tiny": Scale("stdlib", lesson_5.Config(2, n_layer=2, d_model=16, n_head=2, d_head=8,
                                            d_inner=16),
                  presets.Recipe(batch=4, segment=8, steps=6, optimizer="muon"), (4, 8, 16, 24),
                  count=2, n=32, contexts=range(4, 25, 4), windows=20),
    # written out, so that another default of train.py changes no row; Muon is optimizers.py's
    "small": Scale("stdlib", lesson_5.Config(2, n_layer=4, d_model=128, n_head=2, d_head=64,
                                             d_inner=512),
                   presets.Recipe(batch=16, segment=128, steps=4300, lr=0.012, warmup=20,
                                  optimizer="muon", muon_lr=0.02, schedule="sqrt", clip=1.0,
                                  eval_every=0, eval_tokens=20_000),
                   (64, 128, 192, 256, 384, 512, 768, 1024), count=16, n=2048,
                   contexts=range(64, 1025, 64), windows=150),
    "paper": Scale("wt103", WT103, replace(presets.RECIPES["wt103-standard"], segment=128),
                   (60, 120, 180, 256, 300, 360, 400, 450, 500, 560, 640), count=16, n=12_000,
                   contexts=range(100, 1601, 100), windows=250),
    # splits of Penn Treebank are read whole; 3,800 steps are eight epochs
    "words": Scale("ptb", presets.CONFIGS["laptop-words"],
                   replace(presets.RECIPES["laptop-words"], minutes=0.0, steps=3800),
                   (64, 128, 256), 0, 0, range(0), 0, tuple(WORDS)),
    "words-paper": Scale("ptb", presets.CONFIGS["ptb"], presets.RECIPES["ptb"],
                         (140, 280, 560), 0, 0, range(0), 0, tuple(WORDS)),
}


# ---- attention with another encoding ------------------------------------------------------------

class LearnedDistances(nn.Module):
    """Learned vectors by distance instead of W_kR, one matrix for Muon; the last one repeats."""

    def __init__(self, distances, width):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(distances, width) * 0.02)

    def forward(self, R):
        """R (K, D), of which only K counts -> (K, H * C) by descending distance."""
        distance = torch.arange(len(R) - 1, -1, -1, device=R.device)
        return self.rows[distance.clamp(max=len(self.rows) - 1)]


def rotate(x, position):
    """Rotate each pair (x_i, x_i+C/2) of x (..., n, C) by the angle position / 10000^(2i / C)."""
    C = x.shape[-1]
    rate = 10000.0 ** (-torch.arange(0, C, 2, device=x.device) / C)  # (C / 2,), in radians
    angle = position[:, None] * rate  # (n, C / 2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(),
                      first * angle.sin() + second * angle.cos()], dim=-1).to(x.dtype)


def rotary_score(q, k, query, key):
    """RoPE."""
    return rotate(q, query) @ rotate(k, key).mT / math.sqrt(q.shape[-1])


def linear_bias_score(q, k, query, key):
    """ALiBi: head h of H subtracts 2^(-8 h / H) per token of distance."""
    H, C = q.shape[1], q.shape[3]
    slope = 2.0 ** (-8 * torch.arange(1, H + 1, device=q.device) / H)
    return q @ k.mT / math.sqrt(C) - slope[:, None, None] * (query[:, None] - key)


def attend(attention, score_of, q, k, value, k_R, u, v, mask):
    """As lesson 5's attend, with the score of two positions; k_R, u and v are not used."""
    key = torch.arange(mask.shape[1], device=q.device)
    score = score_of(q, k, key[-mask.shape[0] :], key).masked_fill(mask, float("-inf"))
    probability = attention.dropout_attention(score.softmax(-1)).to(value)
    return (probability @ value).transpose(1, 2).flatten(2)


SCORES = {"rope": rotary_score, "alibi": linear_bias_score}


def add_sinusoid(dropout, arguments, h):
    """Add Vaswani's positions to the embedding (B, T, D): a hook of dropout_embedding."""
    positions = lesson_1.sinusoid(torch.arange(h.shape[1], device=h.device), h.shape[2]).to(h)
    return h + F.dropout(positions, dropout.p, dropout.training)


# ---- the models ---------------------------------------------------------------------------------

LOCKED = "dropout_embedding", "dropout_output", "dropout_ff", "dropout_final"


class LockedDropout(nn.Dropout1d):
    """Variational dropout: one mask for all time steps of a segment (Gal & Ghahramani 2016)."""

    def forward(self, z):
        """Return z (B, T, D) with some features of each lane set to 0, and the same mean."""
        return super().forward(z.mT).mT


class Variant(lesson_5.TransformerXL):
    """Lesson 5's model with another encoding; T is the segment length of training.

    In training half_loss counts the later half of each segment twice, the earlier not at all.
    locked: dropout of the embedding, sublayers and last states is variational (Merity et al. 2017).
    """

    def __init__(self, config, T=128, encoding="ours", half_loss=False, locked=False):
        super().__init__(config)
        self.half_loss = half_loss
        for name, module in self.named_modules():
            if locked and name.endswith(LOCKED):
                module.__class__ = LockedDropout
        if encoding != "ours":  # only ours has u and v
            for bias in self.u, self.v:
                nn.init.zeros_(bias).requires_grad_(False)
        if encoding == "vaswani":
            self.dropout_embedding.register_forward_hook(add_sinusoid)
        for layer in self.layers:
            if encoding == "shaw":
                layer.attention.W_kR = LearnedDistances(
                    config.mem_len + T, config.n_head * config.d_head)
            elif encoding != "ours":  # no term (b)
                nn.init.zeros_(layer.attention.W_kR.weight).requires_grad_(False)
            if encoding in SCORES:
                layer.attention.attend = partial(attend, layer.attention, SCORES[encoding])

    def forward(self, x, memory=None, y=None, last_only=False):
        """As lesson 5's; in training with half_loss the losses (B, T) are weighted 0 and 2."""
        out, memory = super().forward(x, memory, y, last_only)
        if self.half_loss and self.training:
            T = x.shape[1]
            out = 2 * out * (torch.arange(T, device=x.device) >= T // 2)
        return out, memory


class LSTM(nn.Module):
    """Two layers of torch's with a state instead of a memory, as wide as `parameters` allow."""

    def __init__(self, config, parameters):
        super().__init__()
        self.config, D = config, config.d_model
        width = max(w for w in range(8, 4096, 8)  # two layers, and a matrix back to D
                    if 4 * w * (D + 3 * w + 4) + w * D <= parameters)
        self.embedding = lesson_5.TransformerXL(replace(config, n_layer=1)).embedding
        self.layers = nn.LSTM(D, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, D, bias=False)

    def forward(self, x, memory, y):
        """As lesson 5's; the memory is the state (2, B, width) and the cell (2, B, width)."""
        h, state = self.layers(self.embedding(x) * math.sqrt(self.config.d_model), memory)
        return self.embedding.losses(self.out(h), y), [part.detach() for part in state]


def make(row, scale, T, vocab_size):
    """Return the untrained model of a row, for the segment length T of its recipe."""
    config = replace(scale.config, vocab_size=vocab_size, mem_len=T if row.recurrence else 0,
                     n_layer=row.n_layer or scale.config.n_layer)
    model = Variant(config, T, row.encoding, row.half_loss, row.locked)
    if row.encoding == "lstm":
        return LSTM(config, sum(weight.numel() for weight in model.layers.parameters()))
    return model


def recipe_of(row, scale, seed, dtype):
    """Return the Recipe that a row is trained with."""
    return replace(scale.recipe, segment=int(row.longer * scale.recipe.segment), seed=seed,
                   dtype=dtype, save_minutes=1.0, **(ADAM if row.optimizer == "adam" else {}))


def optimizer_of(row, model, recipe):
    """Return the optimizer of a row.  With row.averaged it also averages weights, in model.average,
    after each step of the last 30 percent, at the learning rate of their first."""
    optimizer = OPTIMIZERS[recipe.optimizer](model, recipe)
    if not row.averaged:
        return optimizer
    step, first, weights = optimizer.step, 0.7, nn.ParameterList(model.parameters())
    model.average = AveragedModel(weights).requires_grad_(False)  # so that a checkpoint has it

    def step_and_average():
        done = int(optimizer.state[model.u].get("step", 0)) / recipe.steps
        if done >= first:
            set_rate(optimizer, train.learning_rate(recipe, recipe.warmup, first))
        step()
        if done >= first:
            model.average.update_parameters(weights)

    optimizer.step = step_and_average
    return optimizer


def text_of(row, corpus, seed):
    """Return the text for a row and seed: only seed 0 begins at its start; or shuffled lines."""
    if row.shuffled:
        end = corpus.vocab.index("<eos>" if "<eos>" in corpus.vocab else 10)  # 10: of bytes
        return replace(corpus, separator=end, **{  # a fixed order; in training each epoch's own
            split: sentence_lanes(getattr(corpus, split), 1, end, 0, 0)[0]
            for split in ("valid", "test")})
    start = torch.randint(len(corpus.train), (), generator=torch.Generator().manual_seed(seed))
    return replace(corpus, train=corpus.train.roll(-start.item())) if seed else corpus
