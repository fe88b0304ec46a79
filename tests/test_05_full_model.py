"""Lesson 5: the rules of attention_mask, distance_encoding, relative_attention, layer, sample_top_k
and generate.

    pytest -k attention_mask          the rules of one exercise, in the order of this file
"""
import math
from collections import namedtuple
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course import oracles
from course.compare import same, sets_no_seed, unchanged
from course.rules import replaced
from course.stand_ins import Adder, Greedy, Mix, Multiply, kind_of
from helpers import gradients

lesson = import_module("05_full_model")


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
    assert same(attention_mask(5, 2, 3, True), [[0, 0, 0, 1, 1, 1, 1],
                                             [0, 0, 0, 0, 1, 1, 1],
                                             [1, 0, 0, 0, 0, 1, 1],
                                             [1, 1, 0, 0, 0, 0, 1],
                                             [1, 1, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("T, m, M", [
    (3, 0, 1), (3, 0, 0), (6, 2, 4), (3, 2, 2), (4, 3, 3), (4, 0, 3), (7, 3, 3), (1, 3, 3),
    (5, 4, 2), (2, 6, 6), (3, 3, 5), (4, 4, 4), (3, 3, 2), (2, 2099, 2099)])
def test_masks_of_other_lengths(attention_mask, T, m, M, same_length):
    """The same holds for any T, m and M: M is the limit, also inside the segment, and m is the
    current length of the memory, 0 in the first segment."""
    seen = oracles.visible_entries(T, m, M + 1 if same_length else None)
    assert same(attention_mask(T, m, M, same_length), ~seen)


@pytest.mark.parametrize("same_length", [True, False])
def test_the_mask_is_bool_and_on_the_device(attention_mask, same_length):
    """The mask is a bool tensor, because masked_fill accepts no other dtype. Create every tensor
    with `device=device`: on a GPU the scores are there."""
    found = kind_of(attention_mask, 2, 3, 3, same_length, torch.device("meta"))
    assert found == (torch.bool, "meta")


# ---- exercise distance_encoding -----------------------------------------------------------------

def test_distances_descend(distance_encoding):
    """The rows of R are the sinusoids of the distances K - 1, ..., 1, 0, the largest first."""
    wanted = oracles.unit_circle([4, 3, 2, 1, 0], 6)
    assert same(distance_encoding(5, 6), wanted, tolerance=1e-9)


def test_far_distances_are_encoded_as_clamp_len(distance_encoding):
    """A distance beyond clamp_len, here 2, is encoded as clamp_len; smaller ones do not change."""
    assert same(oracles.distances_in(distance_encoding(7, 4, 2)), [2, 2, 2, 2, 2, 1, 0])


@pytest.mark.parametrize("K, D, clamp_len", [
    (5, 4, 0), (5, 4, -1), (4, 6, 9), (5, 6, 1), (9, 4, 8), (9, 4, 3), (1, 2, 0), (1, 2, 3)])
def test_other_distances(distance_encoding, K, D, clamp_len):
    """The same holds for any K, D and clamp_len. A clamp_len of 0 or less means no clamp."""
    largest = clamp_len if clamp_len > 0 else K
    wanted = [min(distance, largest) for distance in range(K - 1, -1, -1)]
    assert same(oracles.distances_in(distance_encoding(K, D, clamp_len)), wanted)


def test_far_distances_are_exact(distance_encoding):
    """Far distances are exact: bfloat16 rounds them above 256, float16 above 2048."""
    wanted = oracles.unit_circle(range(2099, -1, -1), 4)
    assert same(distance_encoding(2100, 4), wanted, tolerance=1e-9)


@pytest.mark.parametrize("clamp_len", [0, 2])
def test_R_is_on_the_device(distance_encoding, clamp_len):
    """R is on `device`, and so are the distances: sinusoid computes on their device."""
    found = kind_of(distance_encoding, 5, 4, clamp_len, torch.device("meta"))
    assert found == (torch.float64, "meta")


# ---- exercise relative_attention ----------------------------------------------------------------

Given = namedtuple("Given", "q k value k_R u v")


def attended(attend, given, dropout=None, most=None):
    """Call the exercise with a mask of the future and of all keys more than `most` - 1 back."""
    _, H, T, C = given.q.shape
    part = lesson.RelativeAttention(lesson.Config(7, n_head=H, d_head=C))
    part.to(given.q.dtype).dropout_attention = dropout or Multiply(1.0)
    return attend(part, *given, ~oracles.visible_entries(T, given.k.shape[2] - T, most))


def inputs(make, B, H, T, K, C, dtype=torch.float64):
    """Return q, k, value, k_R, u and v."""
    shapes = (B, H, T, C), (B, H, K, C), (B, H, K, C), (H, K, C), (H, C), (H, C)
    return Given(*(make(shape, dtype=torch.float64).to(dtype) for shape in shapes))


def test_equal_scores(relative_attention):
    """With equal scores a query gets the mean of the values it sees. A masked key's score is -inf
    (use masked_fill, since 0 * -inf is NaN), and the softmax over the keys turns it into 0."""
    given = inputs(torch.zeros, B=1, H=1, T=2, K=3, C=5)
    given.value[0, 0] = torch.eye(3, 5)  # so the result shows each key's weight
    assert same(attended(relative_attention, given),
                [[[1 / 2, 1 / 2, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0]]], tolerance=1e-6)


def test_heads_are_concatenated(relative_attention):
    """Each query's result is (H * C) numbers: the C of head 0, then the C of head 1."""
    given = inputs(torch.zeros, B=1, H=2, T=4, K=5, C=3)
    given.value[:] = torch.tensor([[[1, 2, 3]], [[10, 20, 30]]])
    assert same(attended(relative_attention, given), [[[1, 2, 3, 10, 20, 30]] * 4], tolerance=1e-6)


def test_the_score_is_divided_by_sqrt_C(relative_attention):
    """The score is divided by sqrt(C): 2 ln 3 with C = 4 becomes ln 3, and e^ln 3 is 3."""
    given = inputs(torch.zeros, B=1, H=3, T=1, K=2, C=4)
    given.q[..., 0], given.k[:, :, 1, 0], given.value[:] = 1, 2 * math.log(3), torch.eye(2, 4)
    assert same(attended(relative_attention, given), [[[1 / 4, 3 / 4, 0, 0] * 3]], tolerance=1e-6)


def test_the_last_row_of_k_R_is_distance_0(relative_attention):
    """k_R descends, so relative_score combines each query's own key, distance 0, with the last row
    of k_R. Here it is the only row that is not 0."""
    given = inputs(torch.zeros, B=1, H=1, T=2, K=3, C=4)
    given.v[..., 0], given.k_R[:, 2, 0], given.value[:] = 1, 2 * math.log(3), torch.eye(3, 4)
    assert same(attended(relative_attention, given),
                [[[1 / 4, 3 / 4, 0, 0], [1 / 5, 1 / 5, 3 / 5, 0]]], tolerance=1e-6)


@pytest.mark.parametrize("B, H, T, K, C", [
    (2, 5, 3, 7, 6), (3, 5, 4, 6, 7), (2, 3, 5, 5, 4), (1, 3, 1, 6, 4), (4, 2, 4, 8, 7)])
def test_attention_of_any_size(relative_attention, B, H, T, K, C):
    """softmax(relative_score(q, k, k_R, u, v) / sqrt(C)) over the keys that are not masked, times
    the values; u goes with the content (k), v with the position (k_R)."""
    given = inputs(torch.randn, B, H, T, K, C)
    wanted = oracles.attention(*given, ~oracles.visible_entries(T, K - T, max(2, K - 2)))
    found = attended(relative_attention, given, most=max(2, K - 2))
    assert same(found, wanted, tolerance=1e-9)


@pytest.mark.parametrize("dtype, size", [
    (torch.float64, 1e100), (torch.float32, 1e18), (torch.bfloat16, 1e18), (torch.float16, 100)])
def test_a_masked_key_gets_probability_0(relative_attention, dtype, size):
    """A masked key gets exactly 0, in every dtype, even if its score is very high and that of the
    visible key very low. A number like -1e9 is not low enough; -inf is."""
    given = inputs(torch.zeros, B=1, H=1, T=2, K=2, C=4, dtype=dtype)
    given.q[:, :, 0, 0], given.k[:, :, 0, 0], given.k[:, :, 1, 0] = size, -size, size
    given.value[0, 0, 1] = 1
    assert same(attended(relative_attention, given), [[[0] * 4, [1 / 2] * 4]])


def test_dropout_gets_the_probabilities(relative_attention):
    """dropout_attention gets each probability once, in any shape, before the values."""
    dropout = Multiply(1.0)
    attended(relative_attention, inputs(torch.zeros, B=1, H=2, T=2, K=3, C=4), dropout)
    seen = torch.cat([torch.zeros(0), *map(torch.flatten, dropout.given)])
    assert same(seen.sort().values, [0] * 2 + [1 / 3] * 6 + [1 / 2] * 4, tolerance=1e-6)


def test_the_result_of_dropout_is_used(relative_attention):
    """The result of dropout_attention, here twice the probabilities, weights the values."""
    given = inputs(torch.ones, B=1, H=1, T=2, K=3, C=4)
    found = attended(relative_attention, given, Multiply(2.0))
    assert same(found, [[[2] * 4] * 2], tolerance=1e-6)


def test_the_attention_is_on_the_device(relative_attention):
    """The result has the dtype and the device of the arguments."""
    part = lesson.RelativeAttention(lesson.Config(7, n_head=2, d_head=4))
    given, mask = inputs(torch.ones, B=1, H=2, T=2, K=3, C=4), ~oracles.visible_entries(2, 1)
    assert kind_of(relative_attention, part, *given, mask) == (torch.float64, "meta")


@pytest.mark.parametrize("name", Given._fields)
def test_the_gradient_reaches_every_input(relative_attention, name):
    """The gradient goes back into q, k, value, k_R, u and v: nothing is detached on the way."""
    given = inputs(torch.randn, B=2, H=3, T=4, K=6, C=5)
    leaf = getattr(given, name).requires_grad_()
    found = gradients(attended(relative_attention, given), [leaf])[0]
    wanted = gradients(oracles.attention(*given, ~oracles.visible_entries(4, 2)), [leaf])[0]
    assert (found - wanted).abs().max() < 1e-8


# ---- exercise layer -----------------------------------------------------------------------------

def simple_layer(attended):
    """Return a layer of width 2 and FF 3, whose dropouts multiply by 2, 3 (inner) and 5.  Its
    attention returns `attended`, its norms change nothing, its feed-forward network returns 0."""
    part = random_layer(2, 3, (2.0, 3.0, 5.0))
    part.attention.forward = lambda h, memory, R, u, v, mask: attended
    part.norm_1, part.norm_2 = nn.Identity(), nn.Identity()
    for weight in part.parameters():
        nn.init.zeros_(weight)
    return part


def layer_inputs(B=2, T=3, M=4, H=8, C=5, D=2):
    """Return h, memory, R, u, v and mask."""
    shapes = (B, T, D), (B, M, D), (M + T, D), (H, C), (H, C)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [*given, ~oracles.visible_entries(T, M)]


def numbers(*row):
    """Return one lane with one token, (1, 1, D)."""
    return torch.tensor([[row]], dtype=torch.float64)


def test_attention_is_added_to_h(layer):
    """The first sum: h + dropout_output(attention); the dropout multiplies by 2 here."""
    part, (_, *context) = simple_layer(numbers(10, 20)), layer_inputs(1, 1)
    assert same(layer(part, numbers(1, -1), *context), numbers(1 + 20, -1 + 40))


def test_the_attention_gets_all_six_arguments(layer):
    """The attention gets h, memory, R, u, v and mask, as they are and in this order."""
    part, given = simple_layer(None), layer_inputs()
    part.attention = Mix()
    assert same(layer(part, *(tensor.clone() for tensor in given)), given[0] + 2 * Mix()(*given),
                tolerance=1e-9)


def test_the_feed_forward_network_continues_from_the_first_sum(layer):
    """The second sum: o + dropout_ff(W_2(dropout_inner(relu(W_1(o))))), o the first sum."""
    part, (_, *context) = simple_layer(numbers(2, -1)), layer_inputs(1, 1)
    # W_1 turns (a, b) into (a, b, a + b), and W_2 turns (x, y, z) into (x + 1, y + z)
    part.W_1.weight.data[:] = torch.tensor([[1, 0], [0, 1], [1, 1]])
    part.W_2.weight.data[:], part.W_2.bias.data[0] = torch.tensor([[1, 0, 0], [0, 1, 1]]), 1
    # the first sum is 5, -3; W_1: 5, -3, 2; ReLU and times 3: 15, 0, 6; W_2: 16, 6; times 5: 80, 30
    assert same(layer(part, numbers(1, -1), *context), numbers(5 + 80, -3 + 30))


def test_each_norm_comes_after_its_sum(layer):
    """Each norm takes a whole sum (post-norm), and its result is used from there on. Here norm_1
    multiplies by 7, norm_2 by 11, and the feed-forward network gives 0."""
    part, (_, *context) = simple_layer(numbers(10, 20)), layer_inputs(1, 1)
    part.norm_1, part.norm_2 = Multiply(7.0), Multiply(11.0)
    assert same(layer(part, numbers(1, -1), *context), numbers(11 * 7 * 21, 11 * 7 * 39))


def random_layer(D=6, FF=9, factors=(1.5, 0.7, 1.9)):
    """Return a layer with random weights, Mix as its attention, and dropouts that multiply."""
    part = lesson.Layer(lesson.Config(9, d_model=D, n_head=8, d_head=5, d_inner=FF)).double()
    for weight in part.parameters():
        nn.init.normal_(weight)
    part.dropout_output, part.dropout_inner, part.dropout_ff = map(Multiply, factors)
    part.attention = Mix()
    return part


@pytest.mark.parametrize("B, T, M, D, FF", [(2, 3, 3, 6, 9), (3, 1, 2, 4, 3), (1, 4, 0, 8, 5)])
def test_the_whole_layer(layer, B, T, M, D, FF):
    """h = norm(h + dropout(block(h))), twice: attention with norm_1, feed-forward with norm_2."""
    part, given = random_layer(D, FF), layer_inputs(B, T, M, D=D)
    wanted = oracles.layer(part, given[0], part.attention(*given))
    assert same(layer(part, *(tensor.clone() for tensor in given)), wanted, tolerance=1e-9)


def test_h_is_not_changed(layer):
    """h itself does not change (`h += ...` changes it): the attention's gradient needs it."""
    assert unchanged(lambda *given: layer(random_layer(), *given), *layer_inputs(D=6))


@pytest.mark.parametrize("name", ["h", "memory", "norm_1.weight", "W_1.weight", "W_2.weight"])
def test_the_gradient_reaches_every_part(layer, name):
    """The gradient goes back into h, through the attention, and into every weight."""
    part, given = random_layer(), layer_inputs(D=6)
    leaf = {"h": given[0], "memory": given[1], **dict(part.named_parameters())}[name]
    leaf.requires_grad_()
    found = gradients(layer(part, *given), [leaf])[0]
    wanted = gradients(oracles.layer(part, given[0], part.attention(*given)), [leaf])[0]
    assert (found - wanted).abs().max() < 1e-8


# ---- exercise sample_top_k ----------------------------------------------------------------------
# The probabilities of five tokens are as 2 : 32 : 1 : 0.5 : 6; the logits are their logarithms, and
# in each row another constant, -1000 to 1000, is added, which changes no probability.

def shares(sample_top_k, top_k, temperature=1.0):
    """Return the share of each token in 1,000 samples, (5,); its random error is below 0.07."""
    logits = torch.tensor([2, 32, 1, 0.5, 6]).log() + torch.linspace(-1000, 1000, 1000)[:, None]
    return sample_top_k(logits, top_k, temperature).flatten().bincount(minlength=5) / 1000


@pytest.mark.parametrize("B", [3, 1])
def test_the_best_token_of_each_row(sample_top_k, B):
    """The result is (B, 1): one token per row. With top_k 1 it is the row's best token."""
    logits = torch.tensor([[2.0, 3.0, 1.0, 0.0], [5.0, 7.0, 1.5, 9.0], [8.0, 0.0, 1.0, 2.0]])
    assert same(sample_top_k(logits[:B], 1), [[1], [3], [0]][:B])


def test_tokens_are_int64(sample_top_k):
    """Tokens are int64, as the model requires, and on the device of the logits."""
    assert kind_of(sample_top_k, torch.ones(3, 5), 2) == (torch.int64, "meta")


def test_only_the_k_best_are_sampled(sample_top_k):
    """With top_k 3, each of the three best tokens occurs in 1,000 samples, and no other one."""
    assert same((shares(sample_top_k, 3) > 0).int(), [1, 1, 0, 0, 1])


@pytest.mark.parametrize("top_k, temperature, wanted", [
    (3, 1.0, [0.05, 0.8, 0, 0, 0.15]), (3, 0.5, [0.004, 0.962, 0, 0, 0.034]),
    (2, 2.0, [0, 0.698, 0, 0, 0.302]), (5, 3.0, [0.157, 0.395, 0.124, 0.099, 0.226])])
def test_shares_are_the_softmax_of_the_k_best(sample_top_k, top_k, temperature, wanted):
    """The k best are sampled in proportion to e^(logit / temperature): with k = 3, the shares are
    as 2 to 32 to 6 at temperature 1, and as 4 to 1024 to 36 at 0.5."""
    assert same(shares(sample_top_k, top_k, temperature), wanted, tolerance=0.07)


def test_each_row_is_sampled_by_its_own_logits(sample_top_k):
    """Each row has a clear winner and is sampled from its two best: the winner must occur."""
    logits = torch.eye(7)[:, [1, 0, 2, 4, 5, 3, 6]] * 50
    assert same(sample_top_k(logits, 2), [[1], [0], [2], [5], [3], [4], [6]])


def test_rows_are_sampled_separately(sample_top_k):
    """In a hundred rows with the same logits, not all samples are equal."""
    assert len(sample_top_k(torch.zeros(100, 3), 3).unique()) > 1


def draws(sample_top_k, seed=None):
    """Sample fifty tokens with a generator of this seed, or without a generator."""
    logits = torch.linspace(-1, 1, 450).sin().view(50, 9)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return sample_top_k(logits, 5, 1.0, generator)


def test_without_a_generator_torch_s_own_is_used(sample_top_k):
    """Without a `generator`, torch's own one is used as it is. The function sets no seed: two calls
    differ, and the caller's torch.manual_seed determines the tokens."""
    state = torch.get_rng_state()
    first, second = draws(sample_top_k), draws(sample_top_k)
    torch.set_rng_state(state)
    assert draws(sample_top_k).equal(first) and not second.equal(first)


def test_the_generator_determines_the_tokens(sample_top_k):
    """The same seed of `generator` gives the same tokens, another seed gives others."""
    first, again, other = (draws(sample_top_k, seed) for seed in (3, 3, 4))
    assert same(again, first) and not first.equal(other)


def test_only_the_given_generator_is_used(sample_top_k):
    """With a `generator`, torch's own generator is not used, and gets no seed."""
    assert sets_no_seed(draws, sample_top_k, 3)


def test_logits_are_not_changed(sample_top_k):
    """The logits are not changed."""
    assert unchanged(sample_top_k, torch.randn(3, 5), 2, 0.5)


# ---- exercise generate --------------------------------------------------------------------------
# An Adder predicts the sum of x + 1 over all tokens x read, modulo V, and Greedy returns its best
# token.  Each new token is therefore this sum over all tokens before it.

def run(generate, model, prompt, *more, draw=None):
    """Call generate with Greedy instead of sample_top_k."""
    with replaced(lesson, sample_top_k=draw or Greedy(), generate=generate):
        return generate(model, torch.as_tensor(prompt), *more)


def test_each_token_follows_from_all_before_it(generate):
    """Only the new tokens are returned, (B, n_tokens). Each is sampled from the model's logits at
    the last position after everything before it: the prompt and the tokens sampled so far."""
    assert same(run(generate, Adder(), [[1, 2, 3], [500, 600, 30]], 4), [[9, 19, 39, 79],
                                                                         [133, 267, 535, 71]])


@pytest.mark.parametrize("B, P, n", [(4, 1, 4), (1, 5, 1), (2, 4, 0), (1, 1, 6)])
def test_other_numbers_of_tokens(generate, B, P, n):
    """The same holds for any prompt and number of new tokens. Token 0 is a token like any other."""
    prompt = torch.arange(B * P).view(B, P)  # after a token 0 follow 1, 3, 0, 1, 3, 0
    assert same(run(generate, Adder(7), prompt, n), oracles.running_sums(prompt, n, 7))


@pytest.mark.parametrize("n", [0, 2])
def test_new_tokens_are_int64(generate, n):
    """Tokens are int64 and on the prompt's device, even if there are none."""
    found = kind_of(run, generate, Adder(), torch.tensor([[1, 2, 3]]), n)
    assert found == (torch.int64, "meta")


def test_the_prompt_is_read_once(generate):
    """The prompt is read once, then one token at a time: the memory holds what was read before. One
    more call, for the last token, is allowed."""
    model = Adder()
    run(generate, model, [[1, 2, 3], [10, 20, 30]], 4)
    lengths = [call.x.shape[1] for call in model.calls]
    assert same(lengths[:4], [3, 1, 1, 1]) and len(lengths) <= 5


def test_no_gradients(generate):
    """Gradients are off, since nothing is trained here (@torch.no_grad())."""
    model = Adder()
    run(generate, model, [[1, 2, 3]], 2)
    assert not any([call.grad for call in model.calls])


def test_top_k_temperature_and_generator_are_passed_on(generate):
    """sample_top_k gets the top_k, temperature and generator of this call."""
    draw, generator = Greedy(), torch.Generator()
    run(generate, Adder(), [[1, 2], [3, 4]], 2, 7, 0.5, generator, draw=draw)
    assert draw.given == [(7, 0.5, generator)] * 2


@pytest.mark.parametrize("V, asked, top_k", [(101, (), 40), (27, (), 27), (27, (50,), 27)])
def test_defaults_and_the_largest_top_k(generate, V, asked, top_k):
    """By default top_k is 40, but at most the vocabulary's size, temperature 1, generator None."""
    draw = Greedy()
    run(generate, Adder(V), [[1, 2, 3]], 1, *asked, draw=draw)
    assert draw.given == [(top_k, 1.0, None)]


def test_generate_sets_no_seed(generate):
    """A caller may set a seed, but generate does not: torch's own generator is left alone."""
    assert sets_no_seed(run, generate, Adder(), [[1, 2, 3]], 2)


def test_the_prompt_is_not_changed(generate):
    """The prompt is not changed."""
    assert unchanged(lambda prompt: run(generate, Adder(), prompt, 2), torch.tensor([[1, 2, 3]]))
