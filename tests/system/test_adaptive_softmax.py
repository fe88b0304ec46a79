"""Lesson 5's adaptive softmax: every word against loops, and what it must not build.

    pytest tests/system/test_adaptive_softmax.py
"""
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import assert_close, gradients, randomized

lesson_5 = import_module("05_full_model")
SMALL = lesson_5.Config(vocab_size=23, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=7,
                        mem_len=5, cutoffs=(5, 9, 16))
KINDS = {"one width": SMALL, "tied": replace(SMALL, div_val=2),
         "untied": replace(SMALL, div_val=2, tie_projections=False),
         "two bands": replace(SMALL, cutoffs=(20,), div_val=3),
         "narrow": replace(SMALL, cutoffs=(1, 2, 22), div_val=2)}


def softmax_of(kind):
    """Float64 and every weight random."""
    return randomized(lesson_5.AdaptiveSoftmax(KINDS[kind]))


def probabilities(words, h):
    """p of every word after the state h (D,), one word and one band at a time."""
    def softmax(i, rows, biases):
        narrow = h if words.project_out[i] is None else words.project_out[i].T @ h
        scores = [((row * narrow).sum() + bias).exp() for row, bias in zip(rows, biases)]
        return [score / sum(scores) for score in scores]

    n_head = len(words.rows[0])
    head = softmax(0, [*words.rows[0], *words.tail_rows], [*words.bias[:n_head], *words.tail_bias])
    p, tails = head[:n_head], head[n_head:]
    for i, tail in enumerate(tails, 1):
        biases = words.bias[len(p):]  # of this band, and of those after it
        p += [tail * inner for inner in softmax(i, words.rows[i], biases)]
    return torch.stack(p)


# ---- what it computes ---------------------------------------------------------------------------

@pytest.mark.parametrize("name", KINDS)
def test_every_words_probability_is_that_of_the_loops(name):
    """Head times tail, for all words; they sum to 1; they come in the order of the vocabulary."""
    words, h = softmax_of(name), torch.randn(2, 3, 12).double()
    found = words.logits(h).exp()  # (2, 3, 23)
    wanted = torch.stack([probabilities(words, state) for state in h.flatten(0, 1)])
    assert_close(found.flatten(0, 1), wanted, "p of every word")
    assert_close(found.sum(-1), torch.ones(2, 3).double(), "their sums")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("only", [None, 0, -1], ids=["all bands", "the first", "the last"])
def test_losses_are_those_of_the_whole_table(name, only):
    """In stream order, with targets of all bands or of one alone, and with the same gradients."""
    words, h = softmax_of(name), torch.randn(3, 23, 12).double().requires_grad_()
    y = torch.stack([torch.randperm(23) for _ in range(3)])  # each word three times
    if only is not None:
        y = torch.randint(*words.bands[only], y.shape)
    loss, wanted = words.losses(h, y), -words.logits(h).gather(-1, y[..., None])[..., 0]
    assert_close(loss, wanted, "the losses")
    leaves = [h, *words.rows, words.tail_rows, words.bias, words.tail_bias]
    leaves += [p for p in words.project_out if p is not None]
    for a, b in zip(gradients(loss, leaves), gradients(wanted, leaves)):
        assert_close(a, b, "a gradient")


@pytest.mark.parametrize("name", KINDS)
def test_the_embedding_is_the_bands_row_projected(name):
    """One word at a time; the same rows serve input and output."""
    words, x = softmax_of(name), torch.randperm(23)[None]
    wanted = [row if project is None else (project * row).sum(1)  # (D, width) times (width,)
              for rows, project in zip(words.rows, words.project_in) for row in rows]
    assert_close(words(x), torch.stack(wanted)[x], "the embedding")


def test_which_projections_are_tied():
    """The tails' if asked for, the head's never; rows get narrower by div_val from band to band."""
    for name, tied in (("tied", [False, True, True, True]), ("untied", [False] * 4)):
        words = softmax_of(name)
        pairs = list(zip(words.project_in, words.project_out))
        assert [a is b for a, b in pairs] == tied
        assert [a.shape[1] for a, _ in pairs] == [12, 6, 3, 1] == [z.shape[1] for z in words.rows]
    assert softmax_of("one width").project_in == [None] * 4


def test_initial_values_are_the_authors():
    """Rows N(0, 0.02), projections N(0, 0.01), biases 0."""
    torch.manual_seed(0)
    config = lesson_5.Config(3000, n_layer=1, d_model=64, cutoffs=(1000, 2000), div_val=2)
    for name, z in lesson_5.TransformerXL(config).embedding.named_parameters():
        if name.endswith("bias"):
            assert (z == 0).all(), name
        elif z.numel() > 200:
            wanted = 0.01 if name.startswith("project") else 0.02
            assert z.std().item() == pytest.approx(wanted, rel=0.1), name


def test_losses_are_float32_under_autocast():
    """A sum over thousands of words in bf16 would lose them."""
    model = lesson_5.TransformerXL(KINDS["tied"])
    x, y = torch.randint(23, (2, 2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model(x, None, y)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert all(p.grad is not None for p in model.embedding.parameters())


class Shapes(TorchDispatchMode):
    """Notes the shapes of all tensors that are made inside the block."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.seen |= {tuple(z.shape) for z in tensors if isinstance(z, torch.Tensor)}
        return result


def test_only_the_needed_rows_are_built():
    """Neither forward nor backward makes (B, T, V); a tail sees only the tokens that are in it; the
    next token needs the last position only.
    """
    model = lesson_5.TransformerXL(
        replace(SMALL, vocab_size=997, cutoffs=(101, 211, 503), div_val=2))
    y = torch.randint(101, (2, 50))
    y[0, :3], y[1, :7], y[1, 20:31] = 150, 300, 700
    with Shapes() as training:
        model(y, None, y)[0].sum().backward()
    assert max(math.prod(shape) for shape in training.seen) < 100 * 200
    assert {(3, 110), (7, 292), (11, 494)} <= training.seen  # tokens of a tail, words of a tail
    with Shapes() as last:
        model(y, last_only=True)
    assert (2, 50, 997) not in last.seen and (2, 1, 997) in last.seen
    with Shapes() as logits:
        model(y)
    assert (2, 50, 997) in logits.seen  # so the watch sees what it should not see above
