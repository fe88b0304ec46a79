"""The memory of evaluation equals the memory of training, and never changes what a caller holds.

    pytest tests/test_evaluation_memory.py

Where gradients are on, the model projects every row anew (the plain form, which the other tests
compare with the formulas); under no_grad it keeps projections.  Both must give the same numbers.
"""
import gc
import weakref
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

lesson = import_module("05_full_model")
Config, TransformerXL = lesson.Config, lesson.TransformerXL
SMALL = Config(vocab_size=11, n_layer=2, d_model=6, n_head=3, d_head=4, d_inner=7, mem_len=5)
CONFIGS = {
    "plain": SMALL, "same_length": replace(SMALL, same_length=True),
    "clamp": replace(SMALL, clamp_len=3), "no memory": replace(SMALL, mem_len=0),
    "long": replace(SMALL, mem_len=40, same_length=True), "one row": replace(SMALL, mem_len=1),
    "biases by layer": replace(SMALL, untie_r=True, same_length=True, clamp_len=2),
    "bands": replace(SMALL, cutoffs=(3, 7), div_val=2), "endless": replace(SMALL, mem_len=10**9)}
CUTS = (3, 1, 1, 7, 2, 1, 12, 1, 1, 1, 1, 4, 5, 1, 2, 9)  # ragged: below, at and above M


def model_of(config=SMALL):
    torch.manual_seed(1)
    return randomized(TransformerXL(config)).eval()


def both(model, pieces, with_losses=True):
    """Outputs of each piece (B, T), with the memory of training and with that of evaluation."""
    found = []
    for learning in (True, False):
        outputs, memory = [], None
        with torch.set_grad_enabled(learning):
            for x in pieces:
                out, memory = model(x, memory, (x + 1) % 11 if with_losses else None)
                outputs.append(out)
        assert isinstance(memory, list) == learning, "the wrong form of memory"
        found.append(outputs)
    return found


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("with_losses", [True, False], ids=["losses", "logits"])
@pytest.mark.parametrize("name", CONFIGS)
def test_both_forms_give_the_same_numbers(name, with_losses, B):
    """Many calls in a row, of all lengths, before and after the memory is full."""
    model = model_of(CONFIGS[name])
    pieces = torch.randint(11, (B, sum(CUTS))).split(CUTS, dim=1)
    for i, (slow, fast) in enumerate(zip(*both(model, pieces, with_losses))):
        assert_close(fast, slow, f"call {i} of {CUTS[i]} tokens", 1e-10)


def test_one_token_at_a_time():
    """As generation reads: a hundred calls, through several buffers."""
    slow, fast = both(model_of(replace(SMALL, same_length=True)), torch.randint(11, (100, 2, 1)))
    assert_close(torch.cat(fast), torch.cat(slow), "the losses", 1e-10)


def test_rows_are_projected_once():
    """W_kv sees each row once, W_kR nothing after the longest distance; few calls move rows."""
    model, seen, buffers = model_of(replace(SMALL, mem_len=20)), Counter(), []
    for n, layer in enumerate(model.layers):
        for name in ("W_kv", "W_kR"):
            getattr(layer.attention, name).register_forward_pre_hook(
                lambda module, args, key=(n, name): seen.update({key: args[0].shape[-2]}))
    memory, lengths = None, [2] * 100
    with torch.no_grad():
        for i, T in enumerate(lengths):
            _, memory = model(torch.randint(11, (1, T)), memory)
            buffers.append(memory.buffers)
            if i == 40:
                at_40 = dict(seen)
    assert all(seen[n, "W_kv"] == sum(lengths) for n in range(2))
    assert all(seen[n, "W_kR"] == at_40[n, "W_kR"] < 4 * 22 for n in range(2))
    moves = sum(a is not b for a, b in zip(buffers[40:], buffers[41:]))
    assert 1 <= moves <= 59 / 9, "rows of a full memory move once in M / T calls or so"
    assert memory.buffers.room <= 2 * 22, "buffers are at most twice what a call reads"


def test_what_a_caller_holds_never_changes():
    """Beams: several continuations of one prefix, in any order, each as if it were alone."""
    model, prefix = model_of(), torch.randint(11, (2, 4))
    beams = [torch.randint(11, (2, T)).split(cut, dim=1) for T, cut in (
        (8, 1), (9, 2), (6, 3), (12, 12), (7, 4))]
    alone = [both(model, [prefix, *beam])[0][1:] for beam in beams]
    with torch.no_grad():
        _, root = model(prefix)
        memories = [root] * len(beams)
        for step in range(8):  # all beams in turn, step by step
            for i, beam in enumerate(beams):
                if step < len(beam):
                    x = beam[step]
                    loss, memories[i] = model(x, memories[i], (x + 1) % 11)
                    assert_close(loss, alone[i][step], f"beam {i}, step {step}", 1e-10)
        for i, beam in enumerate(beams):  # and the root is what it was
            assert_close(model(beam[0], root, (beam[0] + 1) % 11)[0], alone[i][0], "later", 1e-10)


def test_a_call_that_fails_spoils_nothing(monkeypatch):
    """Out of memory, Ctrl-C: after a call that ended half-way the memory before it is good."""
    model, (a, b) = model_of(), torch.randint(11, (2, 1, 3))
    wanted = both(model, [a, b])[0][1]
    with torch.no_grad():
        _, memory = model(a)
        with monkeypatch.context() as patch:
            patch.setattr(model.layers[1], "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model((b + 5) % 11, memory)
        assert_close(model(b, memory, (b + 1) % 11)[0], wanted, "after a failed call", 1e-10)


def test_lengths_may_change_between_calls():
    """mem_len up and down, clamp_len, same_length: read at every call, as in training."""
    model, x = model_of(), torch.randint(11, (7, 2, 4))
    changes = [{"mem_len": 9}, {"mem_len": 2}, {"mem_len": 30, "clamp_len": 2}, {"mem_len": 0},
               {"clamp_len": 5, "mem_len": 8}, {"same_length": True}, {"clamp_len": 0}]
    outputs = []
    for learning in (True, False):
        memory, model.config = None, SMALL
        with torch.set_grad_enabled(learning):
            for piece, change in zip(x, changes):
                model.config = replace(model.config, **change)
                out, memory = model(piece, memory)
                outputs.append(out)
    for i, change in enumerate(changes):
        assert_close(outputs[7 + i], outputs[i], f"after {change}", 1e-10)


def test_a_memory_belongs_to_the_weights_that_made_it():
    """After a change of weights None is right, in the same model object."""
    model, x = model_of(), torch.randint(11, (2, 1, 4))
    with torch.no_grad():
        _, stale = model(x[0])
        for weight in model.parameters():
            weight.mul_(1.1)
        _, fresh = model(x[0])
        old, new = model(x[1], stale)[0], model(x[1], fresh)[0]
    memory = model(x[0])[1]
    assert_close(new, model(x[1], memory)[0], "begun with None", 1e-10)
    assert (old - new).abs().max() > 1e-3


def test_the_memory_has_the_number_type_of_the_projections():
    """Under autocast the rows are bf16, with the very numbers of training's form."""
    model, x = model_of().float(), torch.randint(11, (4, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        slow, fast = both(model, x)
        with torch.no_grad():
            memory = model(x[0])[1]
    assert memory.buffers.layers[0].dtype == memory.Q[0].dtype == torch.bfloat16
    for a, b in zip(slow, fast):
        assert_close(b.float(), a.detach().float(), "under autocast", 1e-5)


def test_the_number_type_may_change_between_calls():
    """The rows of before are converted, none is lost, in either direction."""
    wide, narrow, x = model_of(), model_of().float(), torch.randint(11, (3, 2, 4))
    wanted = both(wide, x)[0]
    with torch.no_grad():
        memory, model = None, wide
        for i, (piece, weights) in enumerate(zip(x, (wide, narrow, wide))):
            model.load_state_dict(weights.state_dict())
            model.to(weights.u.dtype)
            out, memory = model(piece, memory, (piece + 1) % 11)
            assert memory.buffers.layers[0].dtype == memory.Q[0].dtype == weights.u.dtype
            assert_close(out.double(), wanted[i], f"call {i}", 1e-4)
            assert out.dtype == weights.u.dtype
            model.double()


def test_inference_mode_and_no_grad_take_turns():
    """What inference_mode made may not be written to outside: the rows move first."""
    model, x = model_of(), torch.randint(11, (6, 2, 2))
    wanted, memory = both(model, x)[0], None
    for i, (piece, mode) in enumerate(zip(x, 2 * [torch.inference_mode, torch.no_grad,
                                                  torch.no_grad])):
        with mode():
            out, memory = model(piece, memory, (piece + 1) % 11)
            assert_close(out.clone(), wanted[i], f"call {i}", 1e-10)


def test_nothing_lives_longer_than_its_last_user():
    """No cycle: buffers go with the last memory that shows them, without a garbage collection."""
    model, x = model_of(), torch.randint(11, (4, 1, 3))
    gc.disable()
    try:
        with torch.no_grad():
            _, memory = model(x[0])
            first = weakref.ref(memory.buffers.layers[0])
            for piece in x[1:]:
                _, memory = model(piece, memory)
        assert first() is None, "the first buffers are alive though rows have moved out"
        last, weights = weakref.ref(memory.buffers.layers[0]), weakref.ref(model)
        del memory, model
        assert last() is None and weights() is None
    finally:
        gc.enable()


def test_float64_stays_float64_under_autocast():
    """Autocast leaves such a model alone, and so must the buffers."""
    model, x = model_of(), torch.randint(11, (2, 2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        slow, fast = both(model, x)
    assert_close(fast[1], slow[1], "float64 under autocast", 1e-10)


def test_in_training_mode_the_memory_is_that_of_training():
    """Dropouts draw anew in each call: nothing may be kept, under no_grad neither."""
    model = model_of(replace(SMALL, dropout=0.3)).train()
    with torch.no_grad():
        _, memory = model(torch.randint(11, (1, 3)))
    assert [rows.shape for rows in memory] == [(1, 3, 6)] * 2


X = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda m: m(X, [torch.zeros(2, 4, 6).double()] * 2), "in eval mode under no_grad.* got list"),
    (lambda m: m(X, model_of()(X)[1]), "of this model returned"),
    (lambda m: torch.enable_grad()(m)(X, [torch.zeros(2, n, 6).double() for n in (4, 3)]), "each"),
    (lambda m: m(X, m(X[:1])[1]), "memory is that of 1 lanes, x has 2"),
    (lambda m: torch.enable_grad()(m)(X, m(X)[1]), "list of 2 .* got EvaluationMemory"),
    (lambda m: (lambda memory: m.train()(X, memory))(m(X)[1]), "list of 2"),
], ids=["list", "another model", "ragged list", "lanes", "gradients on", "train mode"])
def test_the_wrong_memory_is_refused(call, words):
    """ValueError, with what it is and what it should be."""
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        call(model_of())
