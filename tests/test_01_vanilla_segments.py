"""Lesson 1: the rules of lanes, segments and sinusoid.

    pytest -k lanes       the rules of one exercise, in the order of this file
"""
from itertools import islice

import pytest
import torch

from course import oracles
from course.compare import WrongKind, same, unchanged
from course.stand_ins import kind_of


# ---- exercise lanes -----------------------------------------------------------------------------
# The stream is 0, 1, 2, ..., so each number is its own index in the stream.

@pytest.mark.parametrize("n", [15, 13])
def test_a_lane_is_one_piece_of_the_stream(lanes, n):
    """Lane b is one contiguous piece of the stream, L + 1 tokens from b * L on, with L = (n - 1) //
    B. Its last token is the first one of the next lane. Tokens left over at the end are unused."""
    assert same(lanes(torch.arange(n), 3), [[0, 1, 2, 3, 4],
                                            [4, 5, 6, 7, 8],
                                            [8, 9, 10, 11, 12]])


@pytest.mark.parametrize("n, B", [(5, 4), (8, 2), (21, 5), (7, 1), (2, 1), (9, 5), (101, 7)])
def test_any_tokens(lanes, n, B):
    """The stream may have any tokens and any length from B + 1 on: one input per lane is enough."""
    stream = torch.arange(n).flip(0)  # token 0 is the last one
    assert same(lanes(stream.clone(), B), oracles.lanes(stream, B))


def test_tokens_keep_their_dtype(lanes):
    """Tokens keep their device and their dtype: in int64 a corpus takes eight times as much."""
    assert kind_of(lanes, torch.arange(11, dtype=torch.uint8), 2) == (torch.uint8, "meta")


def test_the_stream_is_not_changed(lanes):
    """The stream itself is not changed."""
    assert unchanged(lambda stream: lanes(stream, 3), torch.arange(15))


@pytest.mark.parametrize("n, B", [(9, 0), (9, -2), (5, 5), (3, 7), (1, 1), (0, 1)])
def test_less_than_one_lane_or_input_is_rejected(lanes, n, B):
    """B < 1, or B tokens or fewer, raise a ValueError: each lane needs an input and its target."""
    with pytest.raises(ValueError):
        lanes(torch.arange(n), B)


# ---- exercise segments --------------------------------------------------------------------------
# Three lanes of 10 inputs and a last target: lane b holds 100 * b + column.

def three_lanes():
    return 100 * torch.arange(3)[:, None] + torch.arange(11)


def listed(result):
    """Return the segments as a list; an incorrect function may never stop."""
    found = list(islice(result, 20))
    if len(found) == 20:
        raise WrongKind("your loop does not end: advance by T, and stop when no input is left")
    return found


def joined(result):
    """Return all segments, concatenated, with x above y: (2, B, ...)."""
    return torch.cat([torch.stack([x, y]) for x, y in listed(result)], dim=-1)


def test_x_begins_with_the_first_column(segments):
    """The first x is the first T columns of all lanes, (B, T)."""
    x, y = next(segments(three_lanes(), 4))
    assert same(x, [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]])


def test_y_is_one_column_further(segments):
    """y is one column further than x: the target of each input is the next token of its lane."""
    x, y = next(segments(three_lanes(), 4))
    assert same(y, [[1, 2, 3, 4], [101, 102, 103, 104], [201, 202, 203, 204]])


@pytest.mark.parametrize("T, start, widths", [
    (4, 0, (4, 4, 2)), (5, 0, (5, 5)), (11, 0, (10,)), (1, 7, (1, 1, 1)), (4, 10, ())])
def test_widths_of_the_segments(segments, T, start, widths):
    """The first segment begins at column `start`. Each is T wide and begins where the previous one
    ended; the last may be shorter, but is never empty. The last column is not an input."""
    assert same([x.shape[1] for x, y in listed(segments(three_lanes(), T, start))], widths)


def test_no_target_is_missing(segments):
    """The last y ends with the last column: each input has its target, also in a short segment."""
    x, y = listed(segments(three_lanes(), 4))[-1]
    assert same(y, [[9, 10], [109, 110], [209, 210]])


@pytest.mark.parametrize("B, L, T, start", [
    (2, 11, 4, 0), (3, 12, 3, 0), (2, 3, 7, 0), (5, 6, 1, 0), (1, 9, 2, 4), (3, 12, 5, 3)])
def test_all_tokens_come_in_order(segments, B, L, T, start):
    """Over all segments, x is all inputs from `start` on, and y is all their targets."""
    stream = torch.arange(B * (L + 1)).flip(0).view(B, L + 1)  # token 0 is the last target
    assert same(joined(segments(stream.clone(), T, start)),
                joined(oracles.segments(stream, T, start)))


def test_x_and_y_are_int64(segments):
    """x and y are int64, as an embedding and a loss require; a corpus is stored as bytes."""
    x, y = next(segments(torch.arange(250, 256, dtype=torch.uint8)[None], 4))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)


# ---- exercise sinusoid --------------------------------------------------------------------------

def test_position_0(sinusoid):
    """All D/2 sines come first, then all D/2 cosines: position 0 has sines of 0, cosines of 1."""
    assert same(sinusoid(torch.tensor([0]), 6), [[0, 0, 0, 1, 1, 1]])


def test_frequencies_decrease_from_1(sinusoid):
    """Frequency k is 10000^(-2k/D), k = 0, 1, ...; for D = 8 these are 1, 0.1, 0.01, 0.001."""
    wanted = [[0.841471, 0.099833, 0.010000, 0.001000, 0.540302, 0.995004, 0.999950, 1.000000]]
    assert same(sinusoid(torch.tensor([1]), 8), wanted, tolerance=1e-5)


def test_row_r_encodes_position_r(sinusoid):
    """Row r encodes position[r], in any order: later lessons encode distances."""
    wanted = [[0.656987, 0.753902], [0, 1], [0.656987, 0.753902], [0.909297, -0.416147]]
    assert same(sinusoid(torch.tensor([7, 0, 7, 2]), 2), wanted, tolerance=1e-5)


@pytest.mark.parametrize("D", [2, 4, 6, 30, 64])
def test_other_widths(sinusoid, D):
    """The same holds for any even D."""
    wanted = oracles.unit_circle(range(30), D)
    assert same(sinusoid(torch.arange(30), D), wanted, tolerance=1e-5)


def test_float64_is_returned(sinusoid):
    """The result is float64 and on the device of the positions: create every tensor there."""
    assert kind_of(sinusoid, torch.arange(3), 4) == (torch.float64, "meta")


def test_float64_before_the_product(sinusoid):
    """Far positions keep their digits: convert positions and frequencies to float64 *before* you
    multiply them, and the exponents before you compute the powers of 10000."""
    far = [1000, 123456]
    assert same(sinusoid(torch.tensor(far), 10), oracles.unit_circle(far, 10), tolerance=1e-8)
