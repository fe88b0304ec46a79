"""Lesson 5: the rules of four parts and of generation, then the whole model against the formulas.

    pytest -k attention_mask            the rules of one exercise, in their order
    pytest -k distance_encoding
    pytest -k relative_attention
    pytest -k layer
    pytest -k sample_top_k
    pytest -k generate
    pytest tests/test_05_full_model.py

A test that takes an exercise by its name is one of its rules.  Lesson 4's part of the attention and
lesson 1's sinusoid are done by oracles there, so that no other exercise must be solved.
"""
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn

from course import oracles
from course.rules import replaced, same
from course.stand_ins import Adder, Gives, Greedy, Mix, Times, on_the_device
from helpers import gradients, run_examples

lesson = import_module("05_full_model")
Config, TransformerXL, CONFIGS = lesson.Config, lesson.TransformerXL, lesson.CONFIGS
lesson_1, lesson_2, lesson_4 = (import_module(name) for name in (
    "01_vanilla_segments", "02_recurrence", "04_rel_shift"))

SMALL = Config(vocab_size=11, n_layer=2, d_model=6, n_head=3, d_head=4, d_inner=7, mem_len=5)


# ---- exercise attention_mask ---------------------------------------------------------------------

def test_the_future_is_masked(attention_mask):
    """True means masked.  A query sees the whole memory and the segment up to itself (query i is
    key m + i); without same_length that is all."""
    assert same(attention_mask(4, 2, 3, False), [[0, 0, 0, 1, 1, 1],
                                              [0, 0, 0, 0, 1, 1],
                                              [0, 0, 0, 0, 0, 1],
                                              [0, 0, 0, 0, 0, 0]])


def test_keys_more_than_M_back_are_masked_with_same_length(attention_mask):
    """With same_length a query sees itself and at most the M keys before it, here 3."""
    assert same(attention_mask(4, 2, 3, True), [[0, 0, 0, 1, 1, 1],
                                             [0, 0, 0, 0, 1, 1],
                                             [1, 0, 0, 0, 0, 1],
                                             [1, 1, 0, 0, 0, 0]])


def test_the_first_segment_has_no_memory(attention_mask):
    """With m = 0 query i is key i; the limit M holds inside the segment as well."""
    assert same(attention_mask(3, 0, 1, True), [[0, 1, 1],
                                             [0, 0, 1],
                                             [1, 0, 0]])


def test_with_M_0_a_query_sees_itself(attention_mask):
    """With M = 0 and same_length each query sees itself alone."""
    assert same(attention_mask(3, 0, 0, True), [[0, 1, 1],
                                             [1, 0, 1],
                                             [1, 1, 0]])


@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("T, m, M", [
    (6, 2, 4), (3, 2, 2), (4, 3, 3), (4, 0, 3), (7, 3, 3), (1, 3, 3), (5, 4, 2), (2, 6, 6)])
def test_masks_of_other_lengths(attention_mask, T, m, M, same_length):
    """The same for any T, m and M: M is the limit, m is what the memory holds by now."""
    seen = oracles.seen_cells(T, m, M + 1 if same_length else None)
    assert same(attention_mask(T, m, M, same_length), ~seen)


@pytest.mark.parametrize("same_length", [True, False])
def test_the_mask_is_bool(attention_mask, same_length):
    """The mask is a torch tensor of type torch.bool: masked_fill takes no other."""
    assert getattr(attention_mask(2, 1, 1, same_length), "dtype", None) == torch.bool


@pytest.mark.parametrize("same_length", [True, False])
def test_the_mask_stands_on_the_device(attention_mask, same_length):
    """Every tensor that is made here gets `device=device`: on a GPU the scores stand there, too."""
    assert on_the_device(lambda device: attention_mask(2, 3, 3, same_length, device=device))


# ---- exercise distance_encoding -----------------------------------------------------------------

def encoded(distance_encoding, *sizes):
    """R, made with an oracle in the place of sinusoid."""
    with replaced(lesson_1, sinusoid=oracles.sinusoid):
        return distance_encoding(*sizes)


def test_distances_descend(distance_encoding):
    """The rows of R are the sinusoids of the distances K - 1, ..., 1, 0, the farthest first."""
    wanted = oracles.unit_circle([4, 3, 2, 1, 0], 6)
    assert same(encoded(distance_encoding, 5, 6), wanted, tolerance=1e-9)


def test_far_distances_count_as_clamp_len(distance_encoding):
    """Every distance beyond clamp_len is encoded as clamp_len, here 2; nearer ones stay."""
    R = encoded(distance_encoding, 7, 4, 2)
    assert same(oracles.distances_in(R), [2, 2, 2, 2, 2, 1, 0])


@pytest.mark.parametrize("clamp_len", [0, -1])
def test_without_a_clamp(distance_encoding, clamp_len):
    """A clamp_len of 0 or less means no clamp."""
    R = encoded(distance_encoding, 5, 4, clamp_len)
    assert same(oracles.distances_in(R), [4, 3, 2, 1, 0])


@pytest.mark.parametrize("K, D, clamp_len", [
    (4, 6, 9), (5, 6, 1), (9, 4, 8), (9, 4, 3), (1, 2, 0), (1, 2, 3)])
def test_other_distances(distance_encoding, K, D, clamp_len):
    """The same for any K, D and clamp_len, also one that no distance reaches."""
    R = encoded(distance_encoding, K, D, clamp_len)
    assert same(oracles.distances_in(R), oracles.clamped_distances(K, clamp_len))


@pytest.mark.parametrize("clamp_len", [0, 2])
def test_R_stands_on_the_device(distance_encoding, clamp_len):
    """R stands on `device`, and so do the distances: sinusoid computes where they stand."""
    with replaced(lesson_1, sinusoid=lambda z, D: z[:, None].expand(-1, D) * 1.0):
        assert on_the_device(lambda device: distance_encoding(5, 4, clamp_len, device=device))


# ---- exercise relative_attention ----------------------------------------------------------------

def attended(attend, given, mask, dropout=None):
    """What the exercise makes of given = [q, k, value, k_R, u, v]; oracles do lesson 4's part."""
    _, H, _, C = given[0].shape
    part = lesson.RelativeAttention(Config(7, n_layer=1, d_model=10, n_head=H, d_head=C, d_inner=9))
    part.to(given[0].dtype).dropout_attention = dropout or Times(1.0)
    mask = torch.as_tensor(mask).bool()
    with replaced(lesson_4, relative_score=oracles.relative_score, rel_shift=oracles.shift):
        return attend(part, *given, mask)


def inputs(make, B, H, T, K, C):
    """q, k, value, k_R, u and v in float64."""
    shapes = (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C)
    return [make(shape, dtype=torch.float64) for shape in shapes]


def test_equal_scores(relative_attention):
    """With equal scores a query takes the mean of the values it sees.  A masked key's score is -inf
    (by masked_fill, for 0 * -inf is NaN), and the softmax over the keys makes that 0."""
    q, k, value, k_R, u, v = inputs(torch.zeros, B=1, H=1, T=2, K=3, C=5)
    value[0, 0] = torch.eye(3, 5)  # so the result shows each key's weight
    assert same(attended(relative_attention, [q, k, value, k_R, u, v], [[0, 0, 1], [0, 0, 0]]),
                [[[1 / 2, 1 / 2, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0]]], tolerance=1e-6)


def test_heads_stand_one_after_the_other(relative_attention):
    """Each query's result is (H * C) numbers: the C of head 0, then the C of head 1."""
    q, k, value, k_R, u, v = inputs(torch.zeros, B=1, H=2, T=4, K=5, C=3)
    value[0, 0, :], value[0, 1, :] = torch.tensor([[1, 2, 3], [10, 20, 30]])
    assert same(attended(relative_attention, [q, k, value, k_R, u, v], ~oracles.seen_cells(4, 1)),
                [[[1, 2, 3, 10, 20, 30]] * 4], tolerance=1e-6)


def test_the_score_is_divided_by_sqrt_C(relative_attention):
    """The score is divided by sqrt(C): 2 ln 3 with C = 4 becomes ln 3, three times e^0."""
    q, k, value, k_R, u, v = inputs(torch.zeros, B=1, H=3, T=1, K=2, C=4)
    q[..., 0], k[:, :, 1, 0], value[:] = 1, 2 * math.log(3), torch.eye(2, 4)
    assert same(attended(relative_attention, [q, k, value, k_R, u, v], [[0, 0]]),
                [[[1 / 4, 3 / 4, 0, 0] * 3]], tolerance=1e-6)


def test_the_last_row_of_Q_is_distance_0(relative_attention):
    """k_R descends, so each query's own key, distance 0, meets the last row of k_R; relative_score
    does that.  Here it is the only one that is not 0."""
    q, k, value, k_R, u, v = inputs(torch.zeros, B=1, H=1, T=2, K=3, C=4)
    v[..., 0], k_R[:, 2, 0], value[:] = 1, 2 * math.log(3), torch.eye(3, 4)
    assert same(attended(relative_attention, [q, k, value, k_R, u, v], [[0, 0, 1], [0, 0, 0]]),
                [[[1 / 4, 3 / 4, 0, 0], [1 / 5, 1 / 5, 3 / 5, 0]]], tolerance=1e-6)


@pytest.mark.parametrize("B, H, T, K, C", [
    (2, 5, 3, 7, 6), (3, 5, 4, 6, 7), (2, 3, 5, 5, 4), (2, 3, 1, 6, 4), (4, 2, 3, 8, 7)])
def test_attention_of_any_size(relative_attention, B, H, T, K, C):
    """softmax(relative_score(q, k, k_R, u, v) / sqrt(C)) over the keys that `mask` leaves, times
    the values; u goes with the content (k), v with the position (k_R)."""
    given, mask = inputs(torch.randn, B, H, T, K, C), ~oracles.seen_cells(T, K - T, max(2, K - 2))
    assert same(attended(relative_attention, [z.clone() for z in given], mask),
                oracles.attention(*given, mask), tolerance=1e-9)


@pytest.mark.parametrize("dtype, size", [
    (torch.float64, 1e100), (torch.float32, 1e18), (torch.bfloat16, 1e18), (torch.float16, 100)])
def test_a_masked_key_gets_nothing_at_all(relative_attention, dtype, size):
    """However low the scores of the keys that a query sees, and in every dtype: a masked key
    gets exactly 0.  A number like -1e9 is not low enough; -inf is."""
    q, k, value, k_R, u, v = (z.to(dtype) for z in inputs(torch.zeros, B=1, H=1, T=2, K=2, C=4))
    # query 0 sees a key with a very low score, and not the other, which has a value
    q[:, :, 0, 0], k[..., 0], value[0, 0, 1] = size, -size, 1
    assert same(attended(relative_attention, [q, k, value, k_R, u, v], [[0, 1], [0, 0]]),
                [[[0] * 4, [1 / 2] * 4]])


def test_dropout_sees_the_probabilities(relative_attention):
    """dropout_attention gets the probabilities, each once, in whatever shape: it stands after the
    softmax and before the values."""
    dropout, given = Times(1.0), inputs(torch.zeros, B=1, H=2, T=2, K=3, C=4)
    attended(relative_attention, given, [[0, 0, 1], [0, 0, 0]], dropout)
    assert same(dropout.seen(), [0] * 2 + [1 / 3] * 6 + [1 / 2] * 4, tolerance=1e-6)


def test_what_dropout_gives_is_used(relative_attention):
    """The values are weighted with what dropout_attention gives, here twice the probabilities."""
    given = inputs(torch.ones, B=1, H=1, T=2, K=3, C=4)
    assert same(attended(relative_attention, given, [[0, 0, 1], [0, 0, 0]], Times(2.0)),
                [[[2] * 4] * 2], tolerance=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "value", "k_R", "u", "v"])
def test_the_gradient_reaches_every_input(relative_attention, name):
    """The gradient goes back into q, k, value, k_R, u and v: nothing is detached on the way."""
    given, mask = inputs(torch.randn, B=2, H=3, T=4, K=6, C=5), ~oracles.seen_cells(4, 2)
    leaf = given[["q", "k", "value", "k_R", "u", "v"].index(name)].requires_grad_()
    found = gradients(attended(relative_attention, given, mask), [leaf])[0]
    wanted = gradients(oracles.attention(*given, mask), [leaf])[0]
    assert (found - wanted).abs().max() < 1e-8


# ---- exercise layer -----------------------------------------------------------------------------

def simple_layer(attention):
    """Width 2, FF 3, the dropouts multiply by 2, 3 (inner) and 5.  The norms change nothing, and
    the feed-forward network gives 0."""
    part = lesson.Layer(Config(7, n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=3)).double()
    part.dropout_output, part.dropout_inner, part.dropout_ff = Times(2.0), Times(3.0), Times(5.0)
    part.attention, part.norm_1, part.norm_2 = attention, nn.Identity(), nn.Identity()
    for z in part.parameters():
        nn.init.zeros_(z)
    return part


def set_network(part):
    """Let W_1 give (a, b, a + b) for (a, b), and W_2 (x + 1, y + z) for (x, y, z)."""
    part.W_1.weight.data[:] = torch.tensor([[1, 0], [0, 1], [1, 1]])
    part.W_2.weight.data[:], part.W_2.bias.data[0] = torch.tensor([[1, 0, 0], [0, 1, 1]]), 1
    return part


def layer_inputs(B=2, T=3, M=4, H=8, C=5, D=2):
    """h, memory, R, u, v and mask."""
    shapes = (B, T, D), (B, M, D), (M + T, D), (H, C), (H, C)
    return [*(torch.randn(z, dtype=torch.float64) for z in shapes), ~oracles.seen_cells(T, M)]


def numbers(*row):
    """One lane with one token, (1, 1, D)."""
    return torch.tensor([[row]], dtype=torch.float64)


def test_attention_is_added_to_h(layer):
    """The first sum: h + dropout_output(attention); the dropout multiplies by 2 here."""
    part, (_, *context) = simple_layer(Gives(numbers(10, 20))), layer_inputs(1, 1)
    assert same(layer(part, numbers(1, -1), *context), numbers(1 + 20, -1 + 40))


def test_the_attention_gets_all_six(layer):
    """The attention gets h, memory, R, u, v and mask, as they are and in this order."""
    part, given = simple_layer(Mix()), layer_inputs()
    assert same(layer(part, *(z.clone() for z in given)), given[0] + 2 * Mix()(*given),
                tolerance=1e-9)


def test_the_feed_forward_network_is_added(layer):
    """The second sum: o + dropout_ff(W_2(dropout_inner(relu(W_1(o))))), o the first sum."""
    part, (_, *context) = set_network(simple_layer(Gives(numbers(0, 0)))), layer_inputs(1, 1)
    # W_1: 4, -3, 1; ReLU and times 3: 12, 0, 3; W_2: 13, 3; times 5: 65, 15
    assert same(layer(part, numbers(4, -3), *context), numbers(4 + 65, -3 + 15))


def test_the_second_block_goes_on_from_the_first(layer):
    """The feed-forward network reads what the first sum gave, and is added to that."""
    part, (_, *context) = set_network(simple_layer(Gives(numbers(10, 20)))), layer_inputs(1, 1)
    # the first sum is 21, 39; W_1: 21, 39, 60; times 3: 63, 117, 180; W_2: 64, 297
    assert same(layer(part, numbers(1, -1), *context), numbers(21 + 5 * 64, 39 + 5 * 297))


def test_each_norm_comes_after_its_sum(layer):
    """Each norm takes a whole sum (post-norm), and what it gives goes on; norm_1 multiplies by 7,
    norm_2 by 11 here, and the feed-forward network gives 0."""
    part, (_, *context) = simple_layer(Gives(numbers(10, 20))), layer_inputs(1, 1)
    part.norm_1, part.norm_2 = Times(7.0), Times(11.0)
    assert same(layer(part, numbers(1, -1), *context), numbers(11 * 7 * 21, 11 * 7 * 39))


def random_layer(D=6, FF=9):
    """All weights random, Mix in the place of the attention; the dropouts multiply."""
    part = lesson.Layer(Config(9, n_layer=1, d_model=D, n_head=8, d_head=5, d_inner=FF)).double()
    for z in part.parameters():
        nn.init.normal_(z)
    part.dropout_output, part.dropout_inner, part.dropout_ff = Times(1.5), Times(0.7), Times(1.9)
    part.attention = Mix()
    return part


@pytest.mark.parametrize("B, T, M, D, FF", [(2, 3, 4, 6, 9), (3, 1, 2, 4, 3), (1, 4, 0, 8, 5)])
def test_the_whole_layer(layer, B, T, M, D, FF):
    """h = norm(h + dropout(block(h))), twice: attention with norm_1, feed-forward with norm_2."""
    part, given = random_layer(D, FF), layer_inputs(B, T, M, D=D)
    assert same(layer(part, *(z.clone() for z in given)), oracles.layer(part, *given),
                tolerance=1e-9)


def test_h_stays_as_it_was(layer):
    """h itself stays as it was (`h += ...` changes it, `h = h + ...` does not): the gradient of the
    attention needs it."""
    part, given = random_layer(), layer_inputs(D=6)
    before = given[0].clone()
    layer(part, *given)
    assert same(given[0], before)


@pytest.mark.parametrize("name", ["h", "memory", "norm_1.weight", "W_1.weight", "W_2.weight"])
def test_the_gradient_reaches_every_part(layer, name):
    """The gradient goes back into h, through the attention, and into every weight."""
    part, given = random_layer(), layer_inputs(D=6)
    leaf = {"h": given[0], "memory": given[1], **dict(part.named_parameters())}[name]
    leaf.requires_grad_()
    found = gradients(layer(part, *given), [leaf])[0]
    wanted = gradients(oracles.layer(part, *given), [leaf])[0]
    assert (found - wanted).abs().max() < 1e-8


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


# ---- beyond the exercises: the parts ------------------------------------------------------------

def test_heads_are_consecutive_features():
    """Head a of a projected state is its features a C ... (a + 1) C - 1."""
    attention, z = lesson.RelativeAttention(SMALL), torch.arange(2 * 5 * 12).view(2, 5, 12)
    heads = attention.heads(z)
    assert heads.shape == (2, 3, 5, 4)
    assert all(heads[:, a].equal(z[..., 4 * a : 4 * a + 4]) for a in range(3))
    assert attention.heads(z[0]).equal(heads[0])  # as for R, which has no lanes


def test_attention_projects_and_calls_attend_by_its_name():
    """Queries from h, keys and values from [memory ; h], k_R from R; W_o takes what `attend` gives,
    which can be replaced: training/fast.py does."""
    part = lesson.RelativeAttention(SMALL)
    h, memory, R, made = (torch.randn(z) for z in ((2, 4, 6), (2, 3, 6), (7, 6), (2, 4, 12)))
    rest = [torch.randn(3, 4), torch.randn(3, 4), torch.ones(4, 7)]
    attend = Gives(made)
    part.attend = attend.forward
    assert part(h, memory, R, *rest).equal(part.W_o(made))
    rows, (*found, u, v, mask) = torch.cat([memory, h], 1), attend.given[0]
    projected = part.W_q(h), part.W_kE(rows), part.W_v(rows), part.W_kR(R)
    assert all(a.equal(part.heads(b)) for a, b in zip(found, projected, strict=True))
    assert all(a is b for a, b in zip((u, v, mask), rest))


@pytest.mark.parametrize("T, M", [(1, 0), (1, 4), (4, 0), (3, 2), (2, 5)])
def test_attention_is_lesson_4s_score(T, M):
    """The chain of the course: with lesson 4's own relative_score it is the formula, too."""
    part, mask = lesson.RelativeAttention(SMALL).double(), ~oracles.seen_cells(T, M)
    given = inputs(torch.randn, B=2, H=3, T=T, K=M + T, C=4)
    assert (part.attend(*given, mask) - oracles.attention(*given, mask)).abs().max() < 1e-12


def test_the_loss_is_minus_log_p_of_each_target_in_nats():
    """TiedEmbedding: logits h E^T + b; -ln p(y) for every token, in float32 at least."""
    part = lesson.TiedEmbedding(SMALL).double()
    nn.init.normal_(part.bias)
    h, y = torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(11, (2, 5))
    logits, losses = part.logits(h), part.losses(h, y)
    wanted = torch.einsum("btd,vd->btv", h, part.weight) + part.bias
    assert (logits - wanted).abs().max() < 1e-12
    p = np.exp(wanted.detach().numpy())
    for b, t in np.ndindex(2, 5):
        assert losses[b, t].item() == pytest.approx(-math.log(p[b, t, y[b, t]] / p[b, t].sum()))
    assert part.bfloat16().losses(h.bfloat16(), y).dtype == torch.float32


def test_mask_and_distances_are_made_from_the_config():
    """mask and distances hand on what the config says at that moment."""
    model, names = TransformerXL(SMALL), ("attention_mask", "distance_encoding")
    with replaced(lesson, **{name: lambda *given: given for name in names}):
        assert model.attention_mask(3, 2, "cpu") == (3, 2, 5, False, "cpu")
        model.config = replace(SMALL, mem_len=9, same_length=True, clamp_len=7)
        assert model.attention_mask(3, 2, "cpu") == (3, 2, 9, True, "cpu")
        assert model.distances(8, "cpu") == (8, 6, 7, "cpu")


def test_the_model_hands_each_layer_what_it_needs():
    """The state, the layer's own memory, R, its u and v, and the mask; and logits at the end.
    Dropout of the embedding, of R (once for all layers) and of the last state."""
    model, x = TransformerXL(replace(SMALL, untie_r=True)).double(), torch.randint(11, (2, 3))
    model.dropout_embedding, model.dropout_R, model.dropout_final = map(Times, (2, 3, 5))
    memory, states = torch.randn(2, 2, 4, 6).double(), torch.randn(2, 2, 3, 6).double()
    model.layers, R = nn.ModuleList(map(Gives, states)), torch.randn(7, 6).double()
    mask, kept = torch.ones(3, 7).bool(), []
    with replaced(lesson, distance_encoding=lambda *given: R, attention_mask=lambda *given: mask), (
            replaced(lesson_2, update_memory=lambda *given: kept.append(given) or "new")):
        logits, new = model(x, list(memory))
    assert new == ["new", "new"] and logits.equal(model.embedding.logits(5 * states[1]))
    for n, h in enumerate((2 * model.embedding(x) * math.sqrt(6), states[0])):
        wanted = h, memory[n], 3 * R, model.u[n], model.v[n], mask
        for a, b in zip(model.layers[n].given[0], wanted, strict=True):
            assert a.shape == b.shape and (a.double() - b.double()).abs().max() < 1e-12
        assert kept[n][0].equal(memory[n]) and kept[n][1].equal(h) and kept[n][2] == 5


# ---- the model against the formulas -------------------------------------------------------------

def model_of(config=SMALL, std=0.4, seed=0):
    """Float64, every weight random and large, so that a wrong one shows."""
    torch.manual_seed(seed)
    model = TransformerXL(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def read(model, x, cuts, y=None):
    """Read x (B, n) in segments of lengths `cuts`, the memory handed on -> outputs, memories."""
    memory, outputs, memories = None, [], []
    for i, part in enumerate(x.split(list(cuts), 1)):
        out, memory = model(part, memory, None if y is None else y.split(list(cuts), 1)[i])
        outputs.append(out)
        memories.append(memory)
    return torch.cat(outputs, dim=1), memories


VARIANTS = {"plain": SMALL, "untied u and v": replace(SMALL, untie_r=True),
            "same_length": replace(SMALL, same_length=True, mem_len=3),
            "clamp": replace(SMALL, clamp_len=2), "no memory": replace(SMALL, mem_len=0),
            "all": replace(SMALL, untie_r=True, same_length=True, clamp_len=3, mem_len=4)}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cuts", [(3, 4, 2), (1, 1, 7), (6, 2, 1)], ids=str)
def test_the_model_is_the_papers_equations(name, cuts):
    """Four terms, memory, post-norm, tied output: equal to loops over queries and keys."""
    model = model_of(VARIANTS[name])
    x = torch.randint(11, (2, sum(cuts)))
    logits, _ = read(model, x, cuts)
    for lane in range(2):
        wanted = oracles.transformer_xl(model, x[lane].tolist(), cuts)
        assert (logits[lane] - wanted).abs().max() < 1e-10, f"lane {lane}"


def test_the_gradient_of_each_weight_is_the_slope_of_the_loss():
    """Over two segments, against differences: nothing is detached but the memory."""
    model, (x, y) = model_of(), torch.randint(11, (2, 2, 4))
    memory = model(x)[1]

    def loss():
        return model(x, memory, y)[0].sum()

    loss().backward()
    for name, z in model.named_parameters():
        step, start = 1e-5 * torch.randn_like(z), z.detach().clone()
        up, down = (loss_at(z, start + sign * step, loss) for sign in (1, -1))
        found = (z.grad * step).sum().item()
        assert found == pytest.approx((up - down) / 2, rel=1e-4, abs=1e-11), name
        z.data.copy_(start)


def loss_at(z, value, loss):
    """The loss if the weight z had this value."""
    z.data.copy_(value)
    return loss().item()


# ---- the two golden equalities ------------------------------------------------------------------

@pytest.mark.parametrize("cuts", [(3, 3, 3, 3), (1,) * 12, (5, 1, 6), (2, 10)], ids=str)
def test_golden_1_segments_with_enough_memory_are_one_pass(cuts):
    """While nothing has left the memory, cutting the text changes no logit."""
    model = model_of(replace(SMALL, mem_len=12))
    x = torch.randint(11, (2, 12))
    assert (read(model, x, cuts)[0] - model(x)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("M", [0, 1, 4, 20])
def test_golden_2_with_same_length_no_loss_depends_on_the_cut(M):
    """Every query sees M + 1 keys: any cut, a single pass included, from the first token on."""
    model = model_of(replace(SMALL, mem_len=M, same_length=True))
    x, y = torch.randint(11, (2, 2, 12))
    one = model(x, None, y)[0]
    for cuts in ((1,) * 12, (2,) * 6, (4,) * 3, (5, 1, 6)):
        loss = read(model, x, cuts, y)[0]
        assert torch.isfinite(loss).all(), "a query that sees no key at all gives NaN"
        assert (loss - one).abs().max() < 1e-12, f"cut into {cuts}"


def test_without_same_length_the_cut_does_matter():
    """The second equality is same_length's doing, not trivial."""
    model = model_of(replace(SMALL, mem_len=2))
    x, y = torch.randint(11, (2, 1, 12))
    difference = (read(model, x, (2,) * 6, y)[0] - read(model, x, (4,) * 3, y)[0]).abs().max()
    assert difference > 1e-3


# ---- memory -------------------------------------------------------------------------------------

@pytest.mark.parametrize("M, cuts", [
    (5, (2, 2, 2, 2)), (3, (4, 4)), (0, (2, 2, 2)), (4, (1, 6, 2))])
def test_memory_is_the_last_rows_of_each_layers_input(M, cuts):
    """First in, first out, M rows, for M larger and smaller than T, and 0."""
    model = model_of(replace(SMALL, mem_len=M, same_length=True))
    inputs = [[] for _ in model.layers]
    for layer, kept in zip(model.layers, inputs):
        layer.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(args[0].detach()))
    _, memories = read(model, torch.randint(11, (2, sum(cuts))), cuts)
    for i, memory in enumerate(memories):
        end = sum(cuts[: i + 1])
        for rows, kept in zip(memory, inputs, strict=True):
            assert rows.shape == (2, min(M, end), 6) and not rows.requires_grad
            assert rows.equal(torch.cat(kept, 1)[:, end - rows.shape[1] : end])


def test_memory_is_never_changed_in_place():
    """The caller may keep a memory and go on from it twice."""
    model, x = model_of(), torch.randint(11, (2, 3))
    _, memory = model(x)
    copies = [z.clone() for z in memory]
    first = model(x, memory)[0]
    assert model(x, memory)[0].equal(first)
    assert all(a.equal(b) for a, b in zip(memory, copies)) and len(memory) == 2


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "gradients"])
def test_the_memory_is_a_list_in_every_mode(training, gradients):
    """N detached tensors (B, m, D), and the same losses; one mode goes on from another's."""
    model = model_of().train(training)  # no dropout
    x, y = torch.randint(11, (2, 2, 4))
    wanted, past = model_of()(x, None, y)
    with torch.set_grad_enabled(gradients):
        losses, memory = model(x, None, y)
        assert type(memory) is type(model(x)[1]) is list and len(memory) == 2
        assert not any(rows.requires_grad for rows in memory)
        assert losses.requires_grad == gradients
        for a, b in zip((losses, *memory, model(x, past, y)[0]),
                        (wanted, *past, model_of()(x, memory, y)[0]), strict=True):
            assert (a - b).abs().max() < 1e-12  # torch may multiply otherwise without gradients


def test_lengths_are_read_at_every_call():
    """A trained model is evaluated at other lengths by replacing its config; no weight moves."""
    model, x = model_of(replace(SMALL, mem_len=8)), torch.randint(11, (2, 6))
    _, memory = model(x)
    model.config = replace(model.config, mem_len=4)
    shorter, new = model(x, memory)
    assert new[0].shape[1] == 4
    assert shorter.equal(model(x, [rows[:, -4:] for rows in memory])[0])
    model.config = replace(model.config, mem_len=0)
    assert (model(x, memory)[0] - model(x)[0]).abs().max() == 0


def test_no_gradient_crosses_the_boundary_and_two_backwards_work():
    """The memory carries no gradient, so each segment's loss has a graph of its own."""
    model = model_of()
    x, y = torch.randint(11, (2, 1, 6))
    loss_1, memory = model(x[:, :3], None, y[:, :3])
    loss_2, _ = model(x[:, 3:], memory, y[:, 3:])
    assert not any(layer.requires_grad for layer in memory)
    loss_1.sum().backward()
    loss_2.sum().backward()


# ---- sizes, initial values, dropout -------------------------------------------------------------

@pytest.mark.parametrize("words", [{}, {"cutoffs": (900, 1900), "div_val": 2}],
                         ids=["full", "bands"])
def test_first_values_are_the_authors(words):
    """N(0, 0.02) for matrices, embedding, u, v; N(0, 0.01) for projections of the adaptive softmax;
    gains N(1, 0.02); biases 0.  Each parameter draws its own."""
    model = TransformerXL(Config(3000, n_layer=3, d_model=128, n_head=3, d_head=32, d_inner=256,
                                 untie_r=True, **words))
    kinds = {}
    for name, z in model.named_parameters():
        kind = next((kind for kind in ("bias", "norm", "project") if kind in name), "weight")
        kinds.setdefault(kind, {})[name] = z.detach()
    assert not any(z.any() for z in kinds.pop("bias").values())
    assert len(kinds["norm"]) == 6 and len(kinds.get("project", ())) == (4 if words else 0)
    for kind, (mean, std) in {"norm": (1, 0.02), "project": (0, 0.01), "weight": (0, 0.02)}.items():
        for name, z in kinds.get(kind, {}).items():  # within five standard errors
            n = z.numel()
            assert z.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(n)), name
            assert z.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
    first = [tuple(z.flatten()[:8].tolist()) for part in kinds.values() for z in part.values()]
    assert len(set(first)) == len(first), "two parameters begin alike"


def test_the_weights_have_the_names_of_the_lesson():
    """What checkpoints, the authors' layout and the experiments go by."""
    model = TransformerXL(replace(SMALL, n_layer=1))
    layer = {f"attention.W_{z}.weight": (12, 6) for z in ("q", "kE", "kR", "v")}
    layer |= {"attention.W_o.weight": (6, 12), "W_1.weight": (7, 6), "W_1.bias": (7,),
              "W_2.weight": (6, 7), "W_2.bias": (6,)}
    layer |= {f"norm_{n}.{z}": (6,) for n in (1, 2) for z in ("weight", "bias")}
    wanted = {"u": (1, 3, 4), "v": (1, 3, 4), "embedding.weight": (11, 6), "embedding.bias": (11,)}
    wanted |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    assert {name: tuple(z.shape) for name, z in model.state_dict().items()} == wanted


def test_dropout_stands_at_the_authors_places():
    """Embedding, R (once a segment, for all layers), probabilities, after W_o, inside FF, final."""
    model = TransformerXL(replace(SMALL, dropout=0.25, dropout_attention=0.5)).train()
    drops = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    layer = ("attention.dropout_attention", "dropout_output", "dropout_inner", "dropout_ff")
    assert drops.keys() == {"dropout_embedding", "dropout_R", "dropout_final"} | {
        f"layers.{n}.{place}" for n in range(2) for place in layer}
    assert all(m.p == (0.5 if n.endswith("attention") else 0.25) for n, m in drops.items())


# ---- bad input ----------------------------------------------------------------------------------

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda m: m(TOKENS + 11), "token 11 outside vocabulary of 11"),
    (lambda m: m(TOKENS - 1), "token -1 outside"),
    (lambda m: m(TOKENS, None, TOKENS + 12), "token 12"),
    (lambda m: m(TOKENS.float()), "int64"),
    (lambda m: m(TOKENS[0]), r"\(B, T\)"),
    (lambda m: m(TOKENS[:, :0]), "both at least 1"),
    (lambda m: m(TOKENS, None, TOKENS[:, :2]), r"\(2, 2\)"),
    (lambda m: m(TOKENS, m(TOKENS[:1])[1]), "memory must be"),
    (lambda m: m(TOKENS, m(TOKENS)[1][:1]), "list of 2"),
    (lambda m: m(TOKENS, torch.zeros(2, 2, 5, 6)), "list of 2"),
    (lambda m: m(TOKENS, [torch.zeros(2, 5, 8)] * 2), r"\(2, m, 6\)"),
    (lambda m: replace(SMALL, mem_len=-1), "mem_len must be at least 0, got -1"),
    (lambda m: replace(SMALL, n_layer=0), "n_layer must be at least 1, got 0"),
    (lambda m: replace(SMALL, d_model=7), "even"),
    (lambda m: replace(SMALL, dropout=1.0), "dropout must be in"),
    (lambda m: replace(SMALL, dropout_attention=-0.1), "dropout_attention"),
], ids=lambda z: z if isinstance(z, str) else "")
def test_bad_input_is_a_value_error_with_the_numbers(call, words):
    """What would fail far from its cause, or silently, is refused where it comes in."""
    with pytest.raises(ValueError, match=words):
        call(model_of())


# ---- the file itself ----------------------------------------------------------------------------

def test_the_examples_in_the_docstrings_are_true():
    """The worked examples run."""
    run_examples(lesson)


def test_the_lesson_prints_what_a_cut_changes(capsys):
    """Rounding with enough memory and with same_length; without it much more."""
    for M, same_length, lowest, highest in ((96, False, 0, 1e-12), (16, False, 1e-6, 1),
                                            (16, True, 0, 1e-12)):
        lesson.show_what_a_cut_changes(M, same_length, "as expected")
        lines = capsys.readouterr().out.splitlines()[1:]
        found = [float(line.split(": ")[1]) for line in lines]
        assert len(found) == 3 and lowest <= min(found) <= max(found) < highest


def test_at_one_token_a_call_same_length_changes_nothing():
    """With T = 1 a full memory shows each query M keys and itself in any case."""
    model, x, y = model_of(), *torch.randint(11, (2, 1, 30))
    found = []
    for same_length in (False, True):
        model.config = replace(SMALL, same_length=same_length)
        found.append(read(model, x, [1] * 30, y)[0])
    assert (found[0] - found[1]).abs().max() < 1e-12


# ---- beyond the exercises: generation with the whole model --------------------------------------

def generator_of(M=5, same_length=False):
    """A small float64 model whose best token depends on the text; the gains are 1, the biases 0."""
    config = Config(vocab_size=11, n_layer=2, d_model=24, n_head=3, d_head=4, d_inner=7,
                           mem_len=M, same_length=same_length)
    torch.manual_seed(17)
    model = TransformerXL(config).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and name != "embedding.bias":
            nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("M, same_length", [(20, False), (3, True), (0, True), (20, True)])
def test_greedy_generation_is_the_argmax_of_one_pass_at_every_step(M, same_length):
    """One token at a time with memory equals reading the whole text again: exact, only cheaper."""
    model, text = generator_of(M, same_length), torch.randint(11, (2, 4))
    winners = model(torch.arange(11)[None])[0].argmax(-1)
    assert len(winners.unique()) > 2, "a model on which this test could not fail"
    tokens = lesson.generate(model, text, 8, top_k=1)
    for step in range(8):
        best = model(text)[0][:, -1].argmax(-1, keepdim=True)
        assert tokens[:, step : step + 1].equal(best), f"token {step}"
        text = torch.cat([text, best], 1)


def test_last_only_gives_the_logits_of_the_last_position():
    """What generation needs of a model, and the same memory."""
    model, x = generator_of(), torch.randint(11, (2, 4))
    logits, memory = model(x)
    last, same_memory = model(x, last_only=True)
    assert last.equal(logits[:, -1:]) and all(map(torch.equal, memory, same_memory))


def test_a_second_call_with_the_same_seed_gives_the_same():
    """A call leaves nothing behind in the model."""
    model = generator_of()
    first, second = (lesson.generate(model, torch.tensor([[1, 2]]), 9,
                                     generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.equal(second) and len(first.unique()) > 1


@pytest.mark.parametrize("prompt", [[[1, 99]], [[-1]]], ids=["above V", "below 0"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    """The model itself refuses it."""
    with pytest.raises(ValueError):
        lesson.generate(generator_of(), torch.tensor(prompt), 5)
