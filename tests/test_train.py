"""train.py's own ideas: a step, an evaluation, the schedule, and the place in the text.

    pytest -k train_step      the rules of one exercise, in the order in which they stand here
    pytest -k evaluate
    pytest tests/test_train.py

A test that takes an exercise by its name is one of its rules; what follows below is about all else.
"""
import copy
import itertools
import math
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from course import oracles
from course.rules import replaced, same
from course.stand_ins import Descent, Ledger, Noted, OneLargeLoss, OpaqueReader
from support import corpora
from training import fast, machine, presets, ranks
from training.batches import Batches, SentenceLanes
from training.flags import Flags
from training.run import State

train, lesson_5 = import_module("train"), import_module("05_full_model")
lesson_1, lesson_2 = train.lesson_1, import_module("02_recurrence")
Config, TransformerXL = lesson_5.Config, lesson_5.TransformerXL


# ---- exercise train_step ------------------------------------------------------------------------
# The model has two weights W = u = 1, losses W * y + u * memory (B, T), and as its new memory the
# last token of each lane.  Here B = 2, T = 3, and the losses are [[3, 4, 5], [12, 11, 7]]: their
# mean is 7, and its gradient (mean of y, mean of memory) = (3, 4), of norm 5.  The rate is 1/2.

X, Y = torch.tensor([[9, 1, 2], [8, 6, 5]]), torch.tensor([[1, 2, 3], [6, 5, 1]])
STEPPING = presets.Run(steps=9, dtype="float32")
in_parts = pytest.mark.parametrize("micro_batch", [0, 1])


def past():
    """The memory before the step: one layer, (B, 1, 1)."""
    return [torch.tensor([2.0, 6.0], dtype=torch.float64)[:, None, None]]


def step(train_step, model, memory, clip=100.0, micro_batch=0, x=X, y=Y):
    """What one step returns; clip 100 is too high to clip anything."""
    model.optimizer = Descent(model)
    device = model.W.device
    with replaced(machine, autocast=model.autocast), replaced(
            ranks, no_sync=model.no_sync, mean=model.mean):
        return train_step(model, model.optimizer, x.to(device), y.to(device), memory,
                          replace(STEPPING, clip=clip, micro_batch=micro_batch))


def weights(model):
    """W and u as one tensor (2,)."""
    return torch.cat([model.W, model.u])


def first(result):
    """The loss, also of a step that returns nothing else."""
    return result[0] if isinstance(result, tuple | list) and result else result


def is_three(result):
    return isinstance(result, tuple | list) and len(result) == 3


def lanes_of(memory):
    """The numbers of a memory, one for each lane; none, if it is no memory of one layer."""
    one_layer = isinstance(memory, tuple | list) and len(memory) == 1
    return memory[0].flatten() if one_layer else torch.zeros(0)


def test_the_loss_is_the_mean(train_step):
    """Call the model with x, the memory and y: it gives the losses (B, T) in nats and the new
    memory.  Their mean is what is returned first."""
    assert same(first(step(train_step, Ledger(), past())), 7.0, tolerance=1e-9)


def test_three_things_come_back(train_step):
    """Return three things: the mean loss, the norm of the gradient before clipping, and the new
    memory."""
    assert is_three(step(train_step, Ledger(), past()))


def test_a_step_goes_down_the_gradient_of_the_mean(train_step):
    """The gradient of the mean loss is sent back, and the optimizer makes one step with it."""
    model = Ledger()
    step(train_step, model, past())
    assert same(weights(model), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


def test_gradients_of_the_step_before_are_cleared(train_step):
    """Gradients add up until they are cleared: those of the step before must be gone."""
    model = Ledger()
    model.W.grad = torch.tensor([10.0], dtype=torch.float64)
    step(train_step, model, past())
    assert same(weights(model), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


def test_the_gradient_is_clipped_before_the_step(train_step):
    """Clip the gradient of all weights together to the norm run.clip, before the optimizer's step:
    here (3, 4) of norm 5 becomes (0.6, 0.8) of norm 1."""
    model = Ledger()
    step(train_step, model, past(), clip=1.0)
    assert same(weights(model), [1 - 0.6 / 2, 1 - 0.8 / 2], tolerance=1e-5)


@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_the_norm_is_that_before_clipping(train_step, clip):
    """The norm that is returned is that of the whole gradient before clipping."""
    assert same(step(train_step, Ledger(), past(), clip)[1], 5.0, tolerance=1e-5)


def test_the_new_memory_comes_back(train_step):
    """The third result is the new memory, as the model returned it."""
    assert same(lanes_of(step(train_step, Ledger(), past())[2]), [2, 5])


def test_every_lane_is_read_once_and_in_order(train_step):
    """Call the model with all lanes of x, y and memory as they are, if run.micro_batch is 0."""
    model = Ledger()
    step(train_step, model, past())
    (call, *more) = model.calls
    assert not more and call.x.equal(X) and call.y.equal(Y) and call.memory[0].equal(past()[0])


def test_run_micro_batch_lanes_are_read_at_a_time(train_step):
    """Call the model for the lanes of each slice of micro_batches(B, run.micro_batch), in order:
    here for 1 of 2 lanes at a time."""
    model = Ledger()
    step(train_step, model, past(), micro_batch=1)
    assert same([len(call.x) for call in model.calls], [1, 1])
    assert same(torch.cat([call.x for call in model.calls]), X)


def test_each_part_has_the_memory_of_its_own_lanes(train_step):
    """The lanes that go through the model together are read after their own memory."""
    model = Ledger()
    step(train_step, model, past(), micro_batch=1)
    assert same(torch.cat([call.memory[0] for call in model.calls]).flatten(), [2, 6])


def test_the_parts_add_up_to_the_step_of_all_lanes(train_step):
    """Clear the gradients before the first part; those of the parts add up, and one step is made,
    with the gradient of the mean over all B x T tokens."""
    model = Ledger()
    model.W.grad = torch.tensor([10.0], dtype=torch.float64)
    step(train_step, model, past(), micro_batch=1)
    assert same(weights(model), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


def test_a_part_counts_by_its_number_of_tokens(train_step):
    """The last part may be smaller: of three lanes with the losses 1, 2 and 6, read two at a time,
    the mean is 3."""
    model, y = Ledger(), torch.tensor([[1], [2], [6]])
    result = step(train_step, model, None, micro_batch=2, x=y, y=y)
    assert same([first(result), weights(model)[0].item()], [3.0, 1 - 3 / 2], tolerance=1e-6)


def test_the_parts_are_clipped_together(train_step):
    """Clip once, after the last part: the gradient of all lanes, of norm 5."""
    model = Ledger()
    norm = step(train_step, model, past(), clip=1.0, micro_batch=1)[1]
    assert same([norm, *weights(model).tolist()], [5, 1 - 0.6 / 2, 1 - 0.8 / 2], tolerance=1e-5)


def test_the_memories_of_the_parts_are_joined(train_step):
    """The new memory is that of all lanes, in their order: join what the parts returned."""
    assert same(lanes_of(step(train_step, Ledger(), past(), micro_batch=1)[2]), [2, 5])


def test_only_the_last_part_meets_the_other_ranks(train_step):
    """Forward and backward of a part stand inside `with ranks.no_sync(model, last=...):`, where
    last says whether it is the last part: several ranks add up their gradients once a step."""
    model = Ledger()
    step(train_step, model, past(), micro_batch=1)
    assert model.synced == [False, True] and model.backward_in == [("no_sync", False),
                                                                   ("no_sync", True)]


def test_without_a_past_the_model_gets_none(train_step):
    """At the beginning of the text memory is None, and the model gets it as it is: zeros would be a
    past that is attended to."""
    model = Ledger()
    step(train_step, model, None)
    assert model.calls[0].memory is None


def test_a_weight_may_have_no_gradient(train_step):
    """A weight that the loss does not depend on (here u, without a memory) has no gradient: its
    .grad is None, and it stays as it is."""
    model = Ledger()
    step(train_step, model, None)
    assert same(weights(model), [1 - 3 / 2, 1], tolerance=1e-9)


def test_loss_and_norm_are_floats(train_step):
    """Loss and norm are floats, made by .item(): a tensor would keep the whole graph alive."""
    loss, norm, memory = step(train_step, Ledger(), past())
    assert isinstance(loss, float) and isinstance(norm, float)


def test_the_old_memory_stays_as_it_was(train_step):
    """The memory that was given is not changed in place: a bad step must be able to hand it back.
    """
    memory = past()
    step(train_step, Ledger(), memory)
    assert same(lanes_of(memory), [2, 6])


bad_steps = pytest.mark.parametrize("bad", ["loss and gradient", "loss", "gradient"])


@bad_steps
def test_a_bad_step_returns_three_things_too(train_step, bad):
    """If loss or norm is not finite, three things are returned as ever, and the run goes on."""
    assert is_three(step(train_step, Ledger(bad), past()))


@bad_steps
def test_a_bad_step_leaves_the_weights(train_step, bad):
    """If loss or norm is not finite, the weights stay: one such number would spoil all of them."""
    model = Ledger(bad)
    step(train_step, model, past())
    assert same(weights(model), [1, 1])


@bad_steps
def test_a_bad_step_leaves_the_optimizer(train_step, bad):
    """If loss or norm is not finite, the optimizer makes no step at all: Adam would move the
    weights by what it remembers."""
    model = Ledger(bad)
    step(train_step, model, past())
    assert model.optimizer.steps == 0


@bad_steps
def test_a_bad_step_hands_the_old_memory_back(train_step, bad):
    """If loss or norm is not finite, the third result is the old memory, not the new one."""
    assert same(lanes_of(step(train_step, Ledger(bad), past())[2]), [2, 6])


@pytest.mark.parametrize("bad, loss, norm", [
    ("loss and gradient", math.nan, math.nan), ("loss", math.inf, 5.0),
    ("gradient", 7.0, math.inf)])
def test_bad_numbers_are_returned_as_they_are(train_step, bad, loss, norm):
    """Loss and norm of a bad step are returned as they are, so that the loop can say so."""
    assert same(list(step(train_step, Ledger(bad), past())[:2]), [loss, norm], tolerance=1e-5)


@pytest.mark.parametrize("others, moved", [(9.0, True), (math.nan, False)])
def test_the_loss_is_the_mean_over_the_ranks(train_step, others, moved):
    """The loss that is judged and returned is ranks.mean(loss), a float: if it is not finite on
    one rank, no rank makes the step."""
    model = Ledger(others=others)
    loss = first(step(train_step, model, past()))
    assert same([loss, float(weights(model).ne(1).any())], [others, float(moved)])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_called_under_autocast(train_step, device):
    """Call the model inside `with machine.autocast(run, x.device.type):`, which knows whether this
    run computes in bf16, and end that block before backward()."""
    model = Ledger().to(device)  # meta: a device without numbers, in the place of a GPU
    with suppress(Noted):
        step(train_step, model, None)
    assert ("autocast", device) in model.calls[0].open and not model.open
    assert all(block[0] != "autocast" for block in model.backward_in)


# ---- exercise evaluate --------------------------------------------------------------------------
# The same model.  Eight tokens are seven predictions; in segments of T = 3:
#
#     x       3 1 4 | 1 5 9 | 2
#     y       1 4 1 | 5 9 2 | 6
#     memory  none  |   4   | 9       the last x of the segment before
#     loss    1 4 1 | 9 13 6 | 15     their sum is 49, their mean 7

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
READING = presets.Run(steps=9, dtype="float32", batch=2, segment=2, eval_segment=3)


def read(evaluate, model=None, tokens=TOKENS, T=3, **more):
    """Evaluate with stand-ins for all that is no part of this exercise."""
    model, told = model or Ledger(), more.pop("told", [])
    ledger = model.model if isinstance(model, OpaqueReader) else model
    tokens = torch.as_tensor(tokens, dtype=torch.uint8)

    def progress(items, label, total=None):
        told.append((label, total))
        return items

    with replaced(lesson_1, lanes=oracles.lanes, segments=oracles.segments), replaced(
            train, progress=progress, evaluating=ledger.evaluating), replaced(
            machine, autocast=ledger.autocast):
        return evaluate(model, tokens, replace(READING, eval_segment=T, eval_mem_len=T), **more)


def test_the_mean_over_all_predictions(evaluate):
    """The sum of all predictions' losses (in nats, as the model gives them), divided by their
    number; each segment is read after the memory of the one before."""
    assert same(read(evaluate), 49 / 7, tolerance=1e-9)


def test_a_second_evaluation_gives_the_same(evaluate):
    """Each evaluation begins with no memory (None): what another one has read does not count."""
    model = Ledger()
    assert same([read(evaluate, model), read(evaluate, model)], [7.0, 7.0], tolerance=1e-9)


@pytest.mark.parametrize("skip, wanted", [(3, 43 / 4), (4, 34 / 3), (6, 15.0)])
def test_skip(evaluate, skip, wanted):
    """The first `skip` predictions are made for the memory of the others, and not counted: neither
    in the sum nor in the number by which it is divided."""
    assert same(read(evaluate, skip=skip), wanted, tolerance=1e-9)


@pytest.mark.parametrize("n, T, skip", [
    (24, 5, 0), (23, 11, 0), (13, 1, 0), (9, 50, 0), (16, 5, 0), (2, 4, 0),
    (24, 5, 12), (23, 11, 11), (13, 1, 6), (9, 50, 4), (16, 5, 14)])
def test_other_texts_and_segments(evaluate, n, T, skip):
    """The same for any n and T: one token a segment, all in one, a last one that is shorter or not.
    """
    tokens = [i * i % 11 for i in range(n)]
    wanted = oracles.mean_loss(tokens, T, skip)
    assert same(read(evaluate, None, tokens, T, skip=skip), wanted, tolerance=1e-9)


def test_the_result_is_a_float(evaluate):
    """The result is a float, made by .item()."""
    assert isinstance(read(evaluate), float)


def test_the_first_segment_has_no_memory(evaluate):
    """The first segment is read with memory None: zeros would be a past that is attended to."""
    model = Ledger()
    read(evaluate, model)
    assert model.calls[0].memory is None


def test_the_model_is_called_inside_evaluating(evaluate):
    """Read inside `with evaluating(model, run):`, which stands above in train.py: it ends dropout
    and sets the lengths of evaluation; model.eval() alone leaves those of training."""
    model = Ledger()
    read(evaluate, model)
    assert all("evaluating" in call.open for call in model.calls)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_goes_on_as_before(evaluate, training):
    """After the evaluation the model is in the mode in which it was before."""
    model = Ledger().train(training)
    read(evaluate, model)
    assert model.training == training


def test_there_are_no_gradients(evaluate):
    """Nothing is trained here: without @torch.no_grad() every segment's graph would be kept."""
    model = Ledger()
    read(evaluate, model)
    assert not any(call.grad for call in model.calls)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_evaluation_is_under_autocast_too(evaluate, device):
    """Call the model inside `with autocast(run, device.type):`, where device is the model's."""
    model = Ledger().to(device)  # meta: a device without numbers, in the place of a GPU
    with suppress(Noted):
        read(evaluate, model)
    assert all(("autocast", device) in call.open for call in model.calls) and not model.open


def test_the_text_goes_to_the_model(evaluate):
    """The tokens go to the device of the model's weights, such as model.u."""
    model = Ledger().to("meta")
    with suppress(Noted):
        read(evaluate, model)
    assert {call.x.device.type for call in model.calls} == {"meta"}


def test_the_model_may_be_a_reader(evaluate):
    """The model may be a Reader (training/fast.py).  It has no parameters(), so ask model.u for the
    device; and its memory is for itself alone, so hand it on as it is."""
    assert same(read(evaluate, OpaqueReader(Ledger())), 49 / 7, tolerance=1e-9)


@pytest.mark.parametrize("T", [1, 300])
def test_the_sum_is_kept_in_float64(evaluate, T):
    """Add up in float64 (losses.double()): in float32 small losses vanish beside a large sum, here
    299 ones beside 2^24."""
    found = read(evaluate, OneLargeLoss(), [0] * 301, T)
    assert same(found, (2**24 + 299) / 300, tolerance=1e-6)


@pytest.mark.parametrize("n, parts", [(8, 3), (7, 2)])
def test_progress_is_told_how_many_segments(evaluate, n, parts):
    """progress(items, label, total), if you use it, is told the label and the number of segments,
    of which the last may be shorter."""
    told = []
    read(evaluate, None, TOKENS[:n], told=told, label="here")
    assert set(told) <= {("here", parts), ("here", None)}


# ---- beyond the exercises: stand-ins ------------------------------------------------------------

RUN = presets.Run(steps=10, batch=4, segment=8, dtype="float32", eval_segment=5, eval_mem_len=7,
                eval_clamp_len=4)


def model_of(dropout=0.0):
    """A small model of lesson 5, in float64, every weight random."""
    model = TransformerXL(Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12,
                                 mem_len=6, dropout=dropout)).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.4)
    return model


# ---- the schedule -------------------------------------------------------------------------------

def test_the_learning_rate_warms_up_and_ends_at_zero():
    """Linear over the warm-up, half at the middle of the cosine, 0 at the end."""
    run = replace(RUN, lr=2.0, warmup=4)
    assert [train.learning_rate(run, step, 0.0) for step in range(5)] == [0.5, 1, 1.5, 2, 2]
    assert train.learning_rate(run, 9, 0.5) == pytest.approx(1.0)
    assert train.learning_rate(run, 9, 0.25) == pytest.approx(1 + math.sqrt(0.5))
    assert train.learning_rate(run, 9, 1.0) == 0
    assert train.learning_rate(replace(run, warmup=0), 0, 0.0) == 2.0
    steep = replace(run, schedule="sqrt")
    assert [train.learning_rate(steep, 9, done) for done in (0.0, 0.25, 0.81, 1.0)] == (
        pytest.approx([2.0, 1.0, 0.2, 0.0]))
    assert train.learning_rate(steep, 0, 0.0) == 0.5


@pytest.mark.parametrize("length", [{"steps": 8}, {"tokens": 200}, {"minutes": 2.0}], ids=str)
def test_a_run_knows_its_length_in_steps_tokens_or_minutes(length):
    """A quarter is done, by whichever length was given; never more than all."""
    run = replace(RUN, **{"steps": 0} | length)
    quarter = {"steps": 2, "tokens": 50, "minutes": 30.0}
    most = {"steps": 9, "tokens": 999, "minutes": 999.0}
    for done, wanted in ((quarter, 0.25), (most, 1)):
        place = most | {name: done[name] for name in length}
        state = State(place["steps"], place["tokens"], place["minutes"])
        assert train.fraction_done(run, state) == wanted


# ---- around a model -----------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, wanted", [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_autocast_is_for_matrix_products(dtype, wanted):
    """In 16 bits if the run says so, and only in the block; sums stay in float32."""
    z = torch.ones(2, 2)
    with machine.autocast(replace(RUN, dtype=dtype), "cpu"):
        assert (z @ z).dtype == wanted and (z + z).dtype == torch.float32
    assert (z @ z).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_changes_mode_and_lengths_and_puts_both_back(training):
    """Whatever happens in the block, a Ctrl-C included."""
    model = nn.Dropout().train(training)
    model.config = config = Config(11, mem_len=6)
    with pytest.raises(KeyboardInterrupt), train.evaluating(model, RUN):
        assert not model.training
        assert model.config == replace(config, mem_len=7, same_length=True, clamp_len=4)
        raise KeyboardInterrupt
    assert model.config is config and model.training == training


def test_the_test_line_is_of_the_test_split_in_the_corpuss_unit(monkeypatch):
    """In bits of bytes and as perplexity of words, with the lengths that it belongs to."""
    bytes_, words = (corpora.Corpus(*torch.arange(12).split((7, 2, 3)), vocab, "made up")
                     for vocab in ([97], ["<eos>"]))
    monkeypatch.setattr(train, "evaluate", lambda model, tokens, *rest: tokens.sum() / 15)
    assert train.test_line(None, bytes_, RUN) == (  # 9 + 10 + 11 = 30
        f"test {2 / math.log(2):.4f} bpc (evaluation T 5, M 7, clamp 4; 2 predictions; made up)")
    assert train.test_line(None, words, replace(RUN, eval_clamp_len=0)) == (
        f"test {math.exp(2):.4f} ppl (evaluation T 5, M 7, clamp none; 2 predictions; made up)")


def test_a_sample_is_drawn_with_the_memory_of_evaluation(monkeypatch):
    """In eval mode; what was asked for is handed on."""
    def generate(model, prompt, **asked):
        return torch.tensor([[model.config.mem_len, model.training, asked["n_tokens"],
                              prompt.shape[1]]])

    monkeypatch.setattr(lesson_5, "generate", generate)
    found = train.sample(model_of().train(), TOKENS[:9], RUN, Flags(n_tokens=3))
    assert found.tolist() == [7, False, 3, 9]


# ---- the place in the text ----------------------------------------------------------------------

TEXT = torch.tensor([0, 1, 2, 0, 3, 0, 4, 5, 0, 6, 7, 0])
STREAM = corpora.Corpus(TEXT, TEXT, TEXT, [97], "made up")
TWO = replace(RUN, batch=2, segment=2, seed=5)


def test_batches_are_the_segments_of_the_lanes_again_and_again():
    """Lanes of 5 inputs in segments of 2, 2, 1; then the text begins again, which is said."""
    made, wanted = Batches(STREAM, TWO, "cpu"), list(lesson_1.segments(lesson_1.lanes(TEXT, 2), 2))
    for i, (x, y) in zip(range(7), made):
        assert x.equal(wanted[i % 3][0]) and y.equal(wanted[i % 3][1])
        assert made.text_begins == (i % 3 == 0)
        assert 5 * made.epoch + made.column == (2, 4, 5, 7, 9, 10, 12)[i]


@pytest.mark.parametrize("separator", [None, 0], ids=["one text", "sentences"])
def test_batches_go_on_where_they_stood(our_own, separator):
    """At any place, at the end of the text, too; the place is what a checkpoint keeps."""
    corpus = replace(STREAM, separator=separator)
    made = Batches(corpus, TWO, "cpu")
    for _ in range(8):
        again = Batches(corpus, TWO, "cpu", **made.state())
        for (x, y), (same_x, same_y) in zip(itertools.islice(copy.deepcopy(made), 4), again):
            assert x.equal(same_x) and y.equal(same_y)
        next(made)


def test_sentences_come_in_an_order_of_seed_and_epoch(our_own):
    """A new one in each epoch; to see a segment moves nothing."""
    made = Batches(replace(STREAM, separator=0), TWO, "cpu")
    for epoch in range(3):
        stream = SentenceLanes(TEXT, 2, 0, 5, epoch)
        x, _ = made.segment(0) if epoch == 0 else next(made)
        assert x.equal(stream[:, :2]) and made.epoch == epoch
        made.column = stream.shape[1] - 1


def test_batches_are_of_this_ranks_lanes(monkeypatch):
    """And the segments as long as T says."""
    monkeypatch.setattr(ranks, "my_lanes", {2: slice(1, 2)}.get)
    made = Batches(STREAM, TWO, "cpu")
    made.T = 3
    x, y = next(made)
    assert x.tolist() == [[0, 4, 5]] and y.tolist() == [[4, 5, 0]]


@pytest.mark.parametrize("every, due", [(16, [16, 32, 40]), (0, [*range(4, 41, 4)]), (99, [40])])
def test_a_validation_is_due_every_so_many_steps_or_at_each_tenth(every, due):
    """Of a run of 40 steps; at its end, too, and never twice at one step."""
    run, state, found = replace(RUN, steps=40, eval_every=every), State(), []
    for state.step in [*range(41), 40]:
        if train.is_validation_due(run, state):
            found.append(state.step)
            state.evaluated, state.tenths = state.step, int(10 * train.fraction_done(run, state))
    assert found == due


# ---- the length that evaluation reads with ------------------------------------------------------

@pytest.mark.parametrize("T, M, wanted", [
    (80, 2100, 512), (512, 512, 512), (64, 128, 128), (16, 512, 512), (700, 512, 700), (5, 0, 5)])
def test_evaluation_reads_at_least_its_t(T, M, wanted):
    """Up to M or 512, whichever is less."""
    assert train.reading_length(replace(RUN, eval_segment=T, eval_mem_len=M)) == wanted


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("read_by", ["the model", "a Reader"])
@pytest.mark.parametrize("T, M, clamp", [(5, 7, 4), (3, 0, 0), (1, 16, 0), (4, 30, 9), (2, 70, 0)])
def test_evaluation_gives_what_segments_of_its_t_give(T, M, clamp, read_by, count, monkeypatch):
    """To rounding, in texts that no length divides, in one part and in those of three ranks."""
    run, model = replace(RUN, eval_segment=T, eval_mem_len=M, eval_clamp_len=clamp), model_of()
    tokens = torch.randint(11, (200,), generator=torch.Generator().manual_seed(M))
    found = []
    monkeypatch.setattr(ranks, "mean", lambda number: number)  # of one rank
    monkeypatch.setattr(ranks, "COUNT", count)
    for rank in range(count):
        monkeypatch.setattr(ranks, "RANK", rank)
        found.append(ranks.evaluate_in_parts(
            train.evaluate, fast.Reader(model) if read_by == "a Reader" else model, tokens, run,
            "testing"))
    with torch.no_grad(), train.evaluating(model, run):
        losses = lesson_2.stream_losses(model, tokens[None, :-1], tokens[None, 1:], T)
    assert sum(found) / count == pytest.approx(losses.mean().item(), rel=1e-12)


def test_evaluation_reads_in_long_segments(our_own, monkeypatch):
    """Of reading_length, not of the T that is asked for."""
    reads, run, cut = [], replace(RUN, eval_segment=4, eval_mem_len=30), lesson_1.segments
    monkeypatch.setattr(lesson_1, "segments", lambda stream, T: (
        reads.append(T), cut(stream, T))[1])
    train.evaluate(model_of(), torch.arange(70) % 11, run)
    assert reads == [30]


# ---- twice on one model -------------------------------------------------------------------------

TOKENS = torch.arange(60) * 7 % 11
CORPUS = corpora.Corpus(TOKENS, TOKENS, TOKENS, list(range(97, 108)), "made up")
USES = {
    "evaluate": lambda model: train.evaluate(model, TOKENS, RUN),
    "evaluate by a Reader": lambda model: train.evaluate(fast.Reader(model), TOKENS, RUN),
    "evaluate and skip": lambda model: train.evaluate(model, TOKENS, RUN, "here", 13),
    "test_line": lambda model: train.test_line(model, CORPUS, RUN),
    "evaluate_in_parts": lambda model: ranks.evaluate_in_parts(
        train.evaluate, model, TOKENS, RUN, "testing"),
    "sample": lambda model: train.sample(
        model, TOKENS[:9], RUN, Flags(n_tokens=20)).tolist(),
    "sample by a Reader": lambda model: train.sample(
        fast.Reader(model), TOKENS[:9], RUN, Flags(n_tokens=20, typed={"seed": 3})).tolist(),
    "choose_dtype": lambda model: machine.choose_dtype(
        train.train_step, model, replace(RUN, dtype="auto"), *TOKENS.view(2, 3, 10)) and None}


def all_of(model):
    """What a use of a model must leave as it was, the random state among it."""
    return [model.config, [module.training for module in model.modules()],
            {name: z.tolist() for name, z in model.state_dict().items()},
            [p.grad for p in model.parameters()], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("use", USES)
def test_a_second_use_of_a_model_gives_the_same_and_leaves_it_as_it_was(use, training):
    """Nothing is left in it: no memory, no mode, no length, no gradient, no draw."""
    model = model_of(dropout=0.3).train(training)
    before = all_of(model)
    assert USES[use](model) == USES[use](model)
    assert all_of(model) == before
