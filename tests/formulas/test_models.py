"""Test all models against the paper's equations and two equalities of every Transformer-XL."""
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course.exercises import LESSONS
from course.stand_ins import Multiply
from helpers import assert_close, gradients, randomized
from formulas import oracle

lesson_1, lesson_2, lesson_3, lesson_4, lesson = map(import_module, LESSONS[:5])
TransformerXL = lesson.TransformerXL

SMALL = lesson.Config(vocab_size=11, n_layer=2, d_model=6, n_head=3, d_head=4, d_inner=7, mem_len=5)
BANDS = replace(SMALL, d_model=12, cutoffs=(3, 7), div_val=2)


def early(kind, **sizes):
    """Make a model of lesson 1, 2 or 3 in float64, with different sizes and random weights."""
    return randomized(kind(**dict(V=11, N=2, D=12, H=3, FF=20) | sizes))


def full(config=SMALL):
    """Make a model of lesson 5 in float64 and eval mode, with random weights."""
    return randomized(TransformerXL(config)).eval()


def with_factors():
    """Make a model of lesson 5 in which each dropout multiplies by a different factor."""
    model = full()
    dropouts = [(part, name) for part in model.modules() for name, child in part.named_children()
                if isinstance(child, nn.Dropout)]
    for i, (part, name) in enumerate(dropouts):
        setattr(part, name, Multiply(0.8 + 0.05 * i))
    return model


def read(model, x, lengths, *y):
    """Read x (and y) in segments; return the outputs (B, n, ...) and the memory after each."""
    memory, outputs, memories = None, [], []
    for part, *targets in zip(*(tokens.split(list(lengths), dim=1) for tokens in (x, *y))):
        is_lesson_1 = isinstance(model, lesson_1.VanillaTransformer)
        output, memory = (model(part), []) if is_lesson_1 else model(part, memory, *targets)
        outputs.append(output)
        memories.append(memory)
    return torch.cat(outputs, dim=1), memories


MODELS = {
    "lesson 1": lambda: early(lesson_1.VanillaTransformer),
    "lesson 2": lambda: early(lesson_2.RecurrentTransformer, M=4),
    "lesson 3": lambda: early(lesson_3.RelativeTransformer, M=4),
    "lesson 4": lambda: early(lesson_3.RelativeTransformer, M=4, attention=lesson_4.ShiftAttention),
    "lesson 5": full,
    "same_length": lambda: full(replace(SMALL, same_length=True, mem_len=3)),
    "M 0": lambda: full(replace(SMALL, mem_len=0)),
    "all": lambda: full(replace(SMALL, untie_r=True, same_length=True, clamp_len=3, mem_len=4)),
    "dropouts": with_factors,
    "bands": lambda: full(BANDS),
    "bands of one width": lambda: full(replace(BANDS, div_val=1)),
    "bands of one word": lambda: full(replace(BANDS, cutoffs=(1, 2, 10))),
    "untied bands": lambda: full(replace(BANDS, tie_projections=False, untie_r=True))}


@pytest.mark.parametrize("lengths", [(3, 4, 2), (1, 7, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_the_papers_equations(name, lengths):
    model, (x, y) = MODELS[name](), torch.randint(11, (2, 2, sum(lengths)))
    found, memories = read(model, x, lengths)
    found, wanted = found.log_softmax(-1), oracle.read(model, x, lengths)
    assert_close(found, wanted, "log-probabilities", tolerance=1e-10)
    names, weights = zip(*model.named_parameters())
    for weight, a, b in zip(names, gradients(found, weights), gradients(wanted, weights)):
        assert_close(a, b, f"gradient of {weight}", tolerance=1e-8)
    M = model.config.mem_len if isinstance(model, TransformerXL) else getattr(model, "M", 0)
    for s, memory in enumerate(memories, 1):
        assert all(h.shape[1] == min(sum(lengths[:s]), M) for h in memory), f"segment {s}"
    if isinstance(model, TransformerXL):
        losses = read(model, x, lengths, y)[0]
        assert_close(losses, -wanted.gather(-1, y[..., None])[..., 0], "losses", tolerance=1e-10)
    if name == "dropouts":
        assert len(model.dropout_R.given) == 2 * len(lengths), "once for all layers"


def test_only_the_needed_rows_are_computed_and_in_float32():
    """A tail is computed for tokens with a target in it, and last_only needs one position."""
    model, y, asked = TransformerXL(BANDS), torch.randint(3, (2, 50)), []
    y[0, :5], y[1, 20:31] = 3, 10
    assert TransformerXL(SMALL).bfloat16()(y, None, y)[0].dtype == torch.float32
    words, scores = model.embedding, model.embedding.scores
    words.scores = lambda h, i: asked.append((*h.shape[:-1], i)) or scores(h, i)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(y, None, y)[0]
        logits = model(y, last_only=True)[0]
    assert asked == [(2, 50, 0), (5, 1), (11, 2), *((2, 1, i) for i in range(3))]
    assert losses.dtype == logits.dtype == torch.float32


@pytest.mark.parametrize("token", [0, 3, 10])
def test_every_parameter_has_a_gradient_if_a_batch_holds_one_band(token):
    """Several ranks wait for the gradients of all parameters, also of a band without tokens."""
    model = TransformerXL(replace(BANDS, tie_projections=False))
    x = torch.full((2, 4), token)
    model(x, None, x)[0].sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("make", [
    lambda: early(lesson_3.RelativeTransformer, M=12), lambda: full(replace(SMALL, mem_len=12)),
    *(lambda M=M: full(replace(SMALL, mem_len=M, same_length=True)) for M in (0, 1, 4))])
def test_segments_equal_one_pass(make):
    """Segments change no logit while no state has left the memory, or with same_length."""
    model = make()
    x = torch.randint(11, (2, 12))
    for lengths in ((3, 3, 3, 3), (1,) * 12, (5, 1, 6), (2, 10)):
        assert_close(read(model, x, lengths)[0], read(model, x, (12,))[0], str(lengths))


@pytest.mark.parametrize("words", [
    {}, {"cutoffs": (900, 1900), "div_val": 2, "init_std": 0.005}], ids=["full", "bands"])
def test_first_values_are_the_authors(words):
    """Projections of the adaptive softmax are N(0, 0.01), gains N(1, 0.02), biases 0."""
    model = TransformerXL(lesson.Config(3000, n_layer=3, d_model=128, n_head=3, d_head=32,
                                        d_inner=256, untie_r=True, **words))
    for name, weight in model.named_parameters():
        n, bias = weight.numel(), name.endswith("bias")
        mean = float("norm" in name and not bias)
        std = 0.02 if mean else 0.01 if "project" in name else 0 if bias else model.config.init_std
        # within five standard errors
        assert weight.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(n)), name
        assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name


def test_each_dropout_has_its_rate():
    """dropout_attention is for attention probabilities, and dropout for all hidden states."""
    model = TransformerXL(replace(SMALL, dropout=0.25, dropout_attention=0.5))
    rates = {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout)}
    assert len(rates) == 3 + 2 * 4
    assert all(p == (0.5 if name.endswith("attention") else 0.25) for name, p in rates.items())
