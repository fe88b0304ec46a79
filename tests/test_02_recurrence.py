"""Lesson 2: the rules of update_memory, causal_mask, reach and stream_losses.

    pytest -k update_memory     the rules of one exercise, in the order of this file
"""
import pytest
import torch

from course import oracles
from course.compare import same, unchanged
from course.stand_ins import Adder, kind_of


# ---- exercise update_memory ---------------------------------------------------------------------

def rows(first, end, B=2):
    """Return hidden states (B, end - first, 3), each 100 * lane + 10 * row + feature."""
    lane, row, feature = torch.arange(B), torch.arange(first, end), torch.arange(3)
    return 100 * lane[:, None, None] + 10 * row[:, None] + feature


def test_a_full_memory_drops_its_oldest_rows(update_memory):
    """First in, first out: new rows follow the old ones, and the last M of both remain."""
    assert same(update_memory(rows(0, 5), rows(5, 9), 5), rows(4, 9))


def test_a_memory_grows_until_it_is_full(update_memory):
    """While there are fewer than M rows, all of them remain; nothing is padded."""
    assert same(update_memory(rows(0, 1), rows(1, 5), 7), rows(0, 5))


@pytest.mark.parametrize("B", [2, 1])
@pytest.mark.parametrize("m, T, M, first", [
    (4, 2, 0, 6), (0, 2, 0, 2), (0, 3, 7, 0), (0, 4, 3, 1), (3, 2, 4, 1), (5, 1, 2, 4),
    (3, 2, 5, 0), (3, 2, 3, 2), (1, 5, 3, 3), (6, 2, 3, 5), (3, 3, 5, 1), (4, 4, 4, 4),
    (4, 4, 3, 5)])
def test_other_numbers_of_rows(update_memory, m, T, M, first, B):
    """The same holds for any m old rows, T new rows, B and M: M rows remain even if T is more.
    M = 0 keeps nothing: the result has no rows."""
    assert same(update_memory(rows(0, m, B), rows(m, m + T, B), M), rows(first, m + T, B))


def test_the_memory_has_the_dtype_of_h(update_memory):
    """The rows keep their dtype and their device."""
    old, new = rows(0, 2).half(), rows(2, 4).half()
    assert kind_of(update_memory, old, new, 3) == (torch.float16, "meta")


@pytest.mark.parametrize("m, M", [(3, 5), (3, 0), (0, 2), (0, 4), (3, 9)])
def test_the_memory_has_no_gradient(update_memory, m, M):
    """The gradient is stopped (SG in the paper): if the result is part of its segment's graph, the
    second backward() of a training loop fails. detach() cuts old and new rows from the graph."""
    old, new = (torch.randn(2, n, 3, requires_grad=True) for n in (m, 4))
    assert not update_memory(old * 1, new * 1, M).requires_grad  # * 1: results, as in a model


def test_the_segment_keeps_its_gradient(update_memory):
    """Only the result has no gradient. h itself is not detached, since its segment still needs the
    graph: use detach(), not detach_()."""
    h = torch.randn(2, 4, 3, requires_grad=True) * 1
    update_memory(torch.randn(2, 3, 3), h, 5)
    assert h.requires_grad


def test_the_old_memory_is_not_changed(update_memory):
    """The arguments are not changed in place: the caller still needs the old memory."""
    assert unchanged(update_memory, rows(0, 5), rows(5, 9), 5)


# ---- exercise causal_mask -----------------------------------------------------------------------
# 1 is True, a key that is masked; each row belongs to a query

def test_keys_after_the_query_are_masked(causal_mask):
    """Query i is key m + i: it sees all keys up to itself, and the keys after it are masked."""
    assert same(causal_mask(4, 2), [[0, 0, 0, 1, 1, 1],
                                    [0, 0, 0, 0, 1, 1],
                                    [0, 0, 0, 0, 0, 1],
                                    [0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("T, m", [
    (3, 0), (1, 4), (1, 0), (2, 1), (5, 3), (3, 3), (2, 6), (4, 9), (7, 1), (2, 2099)])
def test_masks_of_other_sizes(causal_mask, T, m):
    """The mask is (T, m + T) for any T and m, including no memory (m = 0) and a single query."""
    assert same(causal_mask(T, m), ~oracles.visible_entries(T, m))


def test_the_mask_is_bool_and_on_the_device(causal_mask):
    """The mask is a bool tensor, because masked_fill accepts no other dtype. Create every tensor
    with `device=device` (torch.arange, torch.ones): on a GPU the scores are there."""
    assert kind_of(causal_mask, 2, 3, torch.device("meta")) == (torch.bool, "meta")


# ---- exercise reach -----------------------------------------------------------------------------

def test_one_layer(reach):
    """One layer: the last token sees T - 1 tokens back to its segment's start, and M before it."""
    assert same(reach(1, 5, 10), 14)  # N = 1, T = 5, M = 10


def test_each_layer_continues_where_the_previous_one_ended(reach):
    """Each further layer begins at the farthest token reached so far: it goes back to the start of
    that token's segment, and M tokens further."""
    assert same(reach(2, 4, 4), 11)  # N = 2, T = M = 4


@pytest.mark.parametrize("N, T, M, tokens", [(3, 5, 2, 16), (2, 4, 6, 17), (2, 7, 3, 16)])
def test_memory_that_ends_inside_a_segment(reach, N, T, M, tokens):
    """If M is not a multiple of T, the farthest token is inside a segment: a further layer first
    goes back to that segment's start."""
    assert same(reach(N, T, M), tokens)


@pytest.mark.parametrize("N, T, M", [(3, 4, 0), (1, 1, 0), (1, 2, 5), (5, 1, 4), (2, 3, 2),
                                     (5, 5, 3), (3, 3, 3), (4, 3, 9), (5, 3, 4), (4, 4, 1),
                                     (4, 6, 8), (12, 2, 2)])
def test_reach_counted_token_by_token(reach, N, T, M):
    """The same holds for any N, T and M, counted token by token. Without a memory, M = 0, nothing
    before the segment is seen, however many layers there are."""
    t = 50 * T - 1
    assert same(reach(N, T, M), t - min(oracles.tokens_seen(t, N, T, M)))


# ---- exercise stream_losses ---------------------------------------------------------------------
# A stand-in replaces the model.  It predicts the sum of x + 1 over all tokens x read so far, modulo
# 3: then the loss is 0, otherwise 1000.1.  Its memory is that sum.  Y is not X shifted.

X = torch.tensor([[0, 1, 1, 2, 0],  # predictions 1, 0, 2, 2, 0
                  [2, 2, 1, 0, 1]])  # 0, 0, 2, 0, 2
Y = torch.tensor([[1, 2, 2, 0, 0],
                  [0, 0, 2, 0, 1]])


def test_each_token_is_read_once(stream_losses):
    """Segments have T tokens, and the last one has the rest: 5 tokens are 2, 2 and 1. The result is
    (B, n). The parameter T keeps its name, since lesson 3 passes T=16."""
    model = Adder(3)
    losses = stream_losses(model, X, Y, T=2)
    no_cell = torch.zeros(2, 5, dtype=torch.bool)  # compare the shape only
    lengths = [call.x.shape[1] for call in model.calls]
    assert same(losses, torch.zeros(2, 5), no_cell) and same(lengths, [2, 2, 1])


def test_the_first_segment_has_no_memory(stream_losses):
    """The first call gets None as its memory, not the memory of a text that was read before."""
    model = Adder(3)
    for _ in range(2):  # two calls each
        stream_losses(model, X, Y, 3)
    assert model.calls[2].memory is None


@pytest.mark.parametrize("T, B", [(2, 2), (3, 2), (5, 2), (1, 2), (2, 1)])
def test_the_memory_is_passed_on(stream_losses, T, B):
    """The segments are read in order, and each call of the model gets the memory that the previous
    call returned. The losses of all tokens are returned, (B, n)."""
    losses = stream_losses(Adder(3), X[:B], Y[:B], T)
    assert same(losses, [[0, 1000.1, 0, 1000.1, 0],
                         [0, 0, 0, 0, 1000.1]][:B], tolerance=1e-9)


def test_the_losses_have_the_dtype_of_the_logits(stream_losses):
    """The losses have the dtype and the device of the model's logits."""
    assert kind_of(stream_losses, Adder(3), X, Y, 2) == (torch.float64, "meta")


def test_the_losses_keep_their_gradient(stream_losses):
    """Training with these losses needs their graph: nothing is detached here."""
    assert stream_losses(Adder(3), X, Y, 3).requires_grad
