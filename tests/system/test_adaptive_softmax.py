"""The adaptive softmax: every word, and the tables that it must not build."""
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, gradients, randomized
from maths import oracle

lesson_5 = import_module("05_full_model")
SMALL = lesson_5.Config(vocab_size=23, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=7,
                        mem_len=5, cutoffs=(5, 9, 16))
KINDS = {"one width": SMALL, "tied": replace(SMALL, div_val=2),
         "untied": replace(SMALL, div_val=2, tie_projections=False),
         "narrow": replace(SMALL, cutoffs=(1, 2, 22), div_val=2)}


@pytest.mark.parametrize("name", KINDS)
def test_logits_losses_and_embeddings_are_those_of_the_oracle(name):
    """Of each word, in vocabulary order; losses and their gradients also if one band has all."""
    words, h = randomized(lesson_5.AdaptiveSoftmax(KINDS[name])), torch.randn(2, 23, 12).double()
    all_words = torch.stack([torch.randperm(23) for _ in h])
    assert_close(words(all_words), oracle.embeddings(words)[all_words], "embedding")
    assert_close(words.logits(h), oracle.log_probabilities(words, h), "logits")
    leaves = [h.requires_grad_(), *(z for part, z in words.named_parameters() if "_in" not in part)]
    for y in (all_words, *(torch.randint(*band, (2, 23)) for band in words.bands)):
        loss = words.losses(h, y)
        wanted = -oracle.log_probabilities(words, h).gather(-1, y[..., None])[..., 0]
        assert_close(loss, wanted, "losses")
        for a, b in zip(gradients(loss, leaves), gradients(wanted, leaves)):
            assert_close(a, b, "gradient")


def test_only_the_needed_rows_are_built_and_in_float32():
    """A tail's for the tokens whose target is in it; for the next token the last position's.  A sum
    over thousands of words needs 32 bits."""
    model, y, asked = lesson_5.TransformerXL(KINDS["tied"]), torch.randint(5, (2, 50)), []
    y[0, :3], y[1, :7], y[1, 20:31] = 5, 15, 22
    words, scores = model.embedding, model.embedding.scores
    words.scores = lambda h, i: asked.append((*h.shape[:-1], i)) or scores(h, i)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, logits = model(y, None, y)[0], model(y, last_only=True)[0]
    assert asked[:4] == [(2, 50, 0), (3, 1), (7, 2), (11, 3)]
    assert asked[4:] == [(2, 1, i) for i in range(4)]
    assert losses.dtype == logits.dtype == torch.float32
