"""Lesson 5, generation: draw from the most probable tokens; the memory stands for the past.

    pytest -k sample_top_k      the rules of one exercise, in the order in which they stand here
    pytest -k generate

A test that takes an exercise by its name is one of its rules; what follows below is about both.
"""
import math
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course import oracles
from course.rules import replaced, same
from course.stand_ins import Adder, Greedy
from helpers import assert_close

lesson = import_module("05_full_model")


# ---- exercise sample_top_k ----------------------------------------------------------------------
# The probabilities of five tokens are as 2 to 32 to 1 to 0.5 to 6; the logits are their logarithms.

WEIGHTS = [2.0, 32.0, 1.0, 0.5, 6.0]


def shares(sample_top_k, top_k, temperature=1.0):
    """How often each token is drawn, (5,): shares of 1,000 draws, so chance is below 0.07."""
    logits = torch.tensor(WEIGHTS).log().repeat(1000, 1)
    return sample_top_k(logits, top_k, temperature).flatten().bincount(minlength=5) / 1000


def test_the_best_token_of_each_row(sample_top_k):
    """The result is (B, 1): a token for each row.  With top_k 1 it is the row's best one."""
    logits = torch.tensor([[2.0, 3.0, 1.0, 0.0],
                           [5.0, 7.0, 1.5, 9.0],
                           [8.0, 0.0, 1.0, 2.0]])
    assert same(sample_top_k(logits, 1), [[1], [3], [0]])


def test_tokens_are_whole_numbers(sample_top_k):
    """Tokens are int64, as the model reads them."""
    assert sample_top_k(torch.randn(3, 5), 2).dtype == torch.int64


def test_only_the_k_best_are_drawn(sample_top_k):
    """With top_k 3 each of the three best tokens comes in 1,000 draws, and no other one."""
    assert same((shares(sample_top_k, 3) > 0).int(), [1, 1, 0, 0, 1])


def test_shares_are_the_softmax_of_the_k_best(sample_top_k):
    """The three best are drawn in proportion to e^logit, here 2 to 32 to 6."""
    assert same(shares(sample_top_k, 3), [0.05, 0.8, 0, 0, 0.15], tolerance=0.07)


def test_half_the_temperature_squares_the_proportions(sample_top_k):
    """The logits are divided by the temperature: at 0.5 the three best are as 4 to 1024 to 36."""
    assert same(shares(sample_top_k, 3, 0.5), [0.004, 0.962, 0, 0, 0.034], tolerance=0.07)


@pytest.mark.parametrize("top_k, temperature", [(5, 2.0), (2, 3.0)])
def test_other_top_k_and_temperatures(sample_top_k, top_k, temperature):
    """The same for any top_k from 1 to V and any temperature above 0."""
    wanted = oracles.shares(WEIGHTS, top_k, temperature)
    assert same(shares(sample_top_k, top_k, temperature), wanted, tolerance=0.07)


def test_each_row_by_its_own_logits(sample_top_k):
    """Rows with a clear winner each, and still drawn from two: the winner must come."""
    logits = torch.eye(4, 7)[:, [1, 0, 2, 4, 5, 3, 6]] * 50
    assert same(sample_top_k(logits, 2), [[1], [0], [2], [5]])


def test_rows_are_drawn_one_by_one(sample_top_k):
    """In a hundred rows with the same logits not all draws are alike."""
    assert len(sample_top_k(torch.zeros(100, 3), 3).unique()) > 1


def draws(sample_top_k, seed):
    """Fifty tokens with a generator of this seed."""
    logits = torch.linspace(-1, 1, 450).sin().view(50, 9)
    return sample_top_k(logits, 5, 1.0, torch.Generator().manual_seed(seed))


def test_the_same_seed_draws_the_same_tokens(sample_top_k):
    """`generator` decides: the same seed gives the same tokens."""
    assert same(draws(sample_top_k, 3), draws(sample_top_k, 3))


def test_another_seed_draws_other_tokens(sample_top_k):
    """`generator` decides: another seed gives other tokens."""
    assert not draws(sample_top_k, 3).equal(draws(sample_top_k, 4))


def test_all_chance_is_the_generators(sample_top_k):
    """With a `generator` no number is drawn from torch's own."""
    before = torch.get_rng_state()
    draws(sample_top_k, 3)
    assert torch.get_rng_state().equal(before)


def test_logits_stay_as_they_were(sample_top_k):
    """The logits are not changed."""
    logits = torch.randn(3, 5)
    before = logits.clone()
    sample_top_k(logits, 2, 0.5)
    assert same(logits, before)


@pytest.mark.parametrize("top_k", [0, -1, 6])
def test_a_top_k_outside_the_vocabulary_is_refused(sample_top_k, top_k):
    """A top_k outside 1 ... V is a ValueError."""
    with pytest.raises(ValueError):
        sample_top_k(torch.zeros(2, 5), top_k)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_not_above_0_is_refused(sample_top_k, temperature):
    """A temperature that is not above 0 is a ValueError; NaN is not above 0."""
    with pytest.raises(ValueError):
        sample_top_k(torch.zeros(2, 5), 2, temperature)


# ---- exercise generate --------------------------------------------------------------------------
# The next token of an Adder is the sum of all that it has read, and Greedy draws the best token: so
# each new token is the sum of all before it.

def run(generate, model, prompt, *more, draw=None):
    """Call generate with Greedy in place of sample_top_k."""
    with replaced(lesson, sample_top_k=draw or Greedy(), generate=generate):
        return generate(model, torch.tensor(prompt), *more)


def test_each_token_follows_from_all_before_it(generate):
    """The new tokens only, (B, n_tokens), each drawn from the model's logits at the last position
    after all that came before: the prompt and the tokens drawn so far."""
    assert same(run(generate, Adder(), [[1, 2, 3], [10, 20, 30]], 4), [[6, 12, 24, 48],
                                                                       [60, 120, 240, 480]])


@pytest.mark.parametrize("B, P, n", [(3, 1, 4), (1, 5, 1), (2, 4, 0), (1, 1, 6)])
def test_other_numbers_of_tokens(generate, B, P, n):
    """The same for any prompt, and for any number of new tokens, 0 among them."""
    prompt = torch.randint(1, 53, (B, P))
    assert same(run(generate, Adder(53), prompt.tolist(), n), oracles.running_sums(prompt, n, 53))


@pytest.mark.parametrize("n", [0, 2])
def test_new_tokens_are_whole_numbers(generate, n):
    """Tokens are int64, as the model reads them, even if there are none."""
    assert run(generate, Adder(), [[1, 2, 3]], n).dtype == torch.int64


def test_the_prompt_is_read_once(generate):
    """The prompt is read once, then one token at a time: the memory holds what was read before."""
    model = Adder()
    run(generate, model, [[1, 2, 3], [10, 20, 30]], 4)
    assert same(model.lengths[:4], [3, 1, 1, 1])


def test_nothing_is_read_in_vain(generate):
    """n_tokens calls of the model are enough; one more, for the last token, does no harm."""
    model = Adder()
    run(generate, model, [[1, 2, 3]], 4)
    assert len(model.lengths) <= 5


def test_the_first_call_has_no_memory(generate):
    """Before the prompt there is nothing: the memory is None, not zeros."""
    model = Adder()
    run(generate, model, [[1, 2, 3]], 2)
    assert model.memories[0] is None


def test_no_gradients(generate):
    """Gradients are off: nothing is trained here (@torch.no_grad())."""
    model = Adder()
    run(generate, model, [[1, 2, 3]], 2)
    assert not any(model.gradients)


def test_top_k_temperature_and_generator_are_handed_on(generate):
    """sample_top_k gets top_k, temperature and generator as they were given."""
    draw, generator = Greedy(), torch.Generator()
    run(generate, Adder(), [[1, 2], [3, 4]], 2, 7, 0.5, generator, draw=draw)
    assert draw.given == [(7, 0.5, generator)] * 2


def test_without_temperature_and_generator(generate):
    """If they are not given, the temperature is 1 and there is no generator."""
    draw = Greedy()
    run(generate, Adder(), [[1, 2], [3, 4]], 1, 7, draw=draw)
    assert draw.given == [(7, 1.0, None)]


@pytest.mark.parametrize("V, asked, top_k", [(101, (), 40), (27, (), 27), (27, (50,), 27)])
def test_top_k_is_40_or_the_whole_vocabulary(generate, V, asked, top_k):
    """top_k is 40 if it is not given, and never more than the vocabulary has tokens."""
    draw = Greedy()
    run(generate, Adder(V), [[1, 2, 3]], 1, *asked, draw=draw)
    assert draw.given[0][0] == top_k


def test_the_prompt_stays_as_it_was(generate):
    """The prompt is not changed."""
    prompt = torch.tensor([[1, 2, 3]])
    with replaced(lesson, sample_top_k=Greedy(), generate=generate):
        generate(Adder(), prompt, 2)
    assert same(prompt, [[1, 2, 3]])


# ---- beyond the exercises: generation with the whole model --------------------------------------

def model_of(M=5, same_length=False):
    """A small float64 model whose best token depends on the text; the gains are 1, the biases 0."""
    config = lesson.Config(vocab_size=11, n_layer=2, d_model=24, n_head=3, d_head=4, d_inner=7,
                           mem_len=M, same_length=same_length)
    torch.manual_seed(17)
    model = lesson.TransformerXL(config).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and name != "embedding.bias":
            nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("M, same_length", [(20, False), (3, True), (0, True), (20, True)])
def test_greedy_generation_is_the_argmax_of_one_pass_at_every_step(M, same_length):
    """One token at a time with memory equals reading the whole text again: exact, only cheaper."""
    model, text = model_of(M, same_length), torch.randint(11, (2, 4))
    winners = model(torch.arange(11)[None])[0].argmax(-1)
    assert len(winners.unique()) > 2, "a model on which this test could not fail"
    tokens = lesson.generate(model, text, 8, top_k=1)
    for step in range(8):
        best = model(text)[0][:, -1].argmax(-1, keepdim=True)
        assert tokens[:, step : step + 1].equal(best), f"token {step}"
        text = torch.cat([text, best], 1)


def test_last_only_gives_the_logits_of_the_last_position():
    """What generation needs of a model, and the same memory."""
    model, x = model_of(), torch.randint(11, (2, 4))
    logits, memory = model(x)
    last, same_memory = model(x, last_only=True)
    assert_close(last, logits[:, -1:], "the last logits")  # to rounding: a product of other shape
    assert all(map(torch.equal, memory, same_memory))


def test_a_second_call_with_the_same_seed_gives_the_same():
    """A call leaves nothing behind in the model."""
    model = model_of()
    first, second = (lesson.generate(model, torch.tensor([[1, 2]]), 9,
                                     generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.equal(second) and len(first.unique()) > 1


@pytest.mark.parametrize("prompt", [[[1, 99]], [[-1]]], ids=["above V", "below 0"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    """The model itself refuses it."""
    with pytest.raises(ValueError):
        lesson.generate(model_of(), torch.tensor(prompt), 5)
