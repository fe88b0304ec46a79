"""train.py: the rules of train_step and evaluate.

    pytest -k train_step      the rules of one exercise, in the order of this file
"""
import math
from contextlib import suppress
from importlib import import_module

import pytest
import torch

from course import oracles
from course.compare import same, sets_no_seed
from course.rules import replaced
from course.stand_ins import Descent, Ledger, OpaqueReader, Recorded
from training import machine, presets

train = import_module("train")


# ---- exercise train_step ------------------------------------------------------------------------
# The model has two weights W = u = 1, losses W * y + u * memory (B, T), and as its new memory two
# layers, 2 x and -x for the last token x of each lane; they count as their sum.  Here B = 2, T = 3,
# and the losses are [[2, 4, 6], [12, 11, 7]]: their mean is 7, and its gradient (mean of y, mean of
# memory) = (3, 4), of norm 5.  The rate is 1/2.

X, Y = torch.tensor([[9, 7, 2], [8, 0, 5]]), torch.tensor([[0, 2, 4], [6, 5, 1]])
NON_FINITE = "loss and gradient", "gradient"  # values of a Ledger


def past():
    """Return the memory before the step: two layers, (B, 1, 1) each."""
    last = torch.tensor([2.0, 6.0], dtype=torch.float64)[:, None, None]
    return [2 * last, -last]


def step(train_step, model, memory, clip=100.0, micro_batch=0, x=X, y=Y):
    """Return the result of one step; clip 100 is too high to clip anything."""
    model.optimizer = Descent(model)
    device = model.W.device
    recipe = presets.Recipe(steps=9, dtype="float32", clip=clip, micro_batch=micro_batch)
    with replaced(machine, autocast=model.autocast):
        return train_step(model, model.optimizer, x.to(device), y.to(device), memory, recipe)


def stepped(train_step, memory, *more, bad="", **settings):
    """Return the model after one step."""
    model = Ledger(bad)
    step(train_step, model, memory, *more, **settings)
    return model


def weights(model):
    """Return W and u as one tensor (2,)."""
    return torch.cat([model.W, model.u])


def layers_of(memory):
    """Return the layers of a memory as one tensor, (2, B, 1, 1); an empty one if it has none."""
    return torch.stack([*memory]) if isinstance(memory, tuple | list) else torch.zeros(0)


def test_the_loss_is_the_mean(train_step):
    """Call the model with x, the memory and y: it returns the losses (B, T) in nats and the new
    memory. Return the mean of these losses first."""
    result = step(train_step, Ledger(), past())
    assert same(result[0] if isinstance(result, tuple | list) else result, 7.0, tolerance=1e-9)


@pytest.mark.parametrize("bad", ["", *NON_FINITE])
def test_three_results_are_returned(train_step, bad):
    """Return three things: the mean loss, the norm of the gradient before clipping, and the new
    memory. If the norm is not finite, three things are still returned: the run continues."""
    result = step(train_step, Ledger(bad), past())
    assert isinstance(result, tuple | list) and len(result) == 3


def test_a_step_descends_the_gradient_of_the_mean(train_step):
    """Call backward() on the mean loss, and let the optimizer make one step."""
    assert same(weights(stepped(train_step, past())), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_the_gradient_is_clipped_before_the_step(train_step, micro_batch):
    """Clip the gradient of all weights together to the norm recipe.clip, once, after the last
    micro-batch and before the optimizer's step: here (3, 4) of norm 5 becomes (0.6, 0.8)."""
    model = stepped(train_step, past(), 1.0, micro_batch)
    assert same(weights(model), [1 - 0.6 / 2, 1 - 0.8 / 2], tolerance=1e-5)


@pytest.mark.parametrize("clip, micro_batch", [(1.0, 0), (100.0, 0), (1.0, 1)])
def test_the_norm_is_taken_before_clipping(train_step, clip, micro_batch):
    """Return the norm of the whole gradient before clipping."""
    assert same(step(train_step, Ledger(), past(), clip, micro_batch)[1], 5.0, tolerance=1e-5)


@pytest.mark.parametrize("B, micro_batch", [(2, 0), (2, 1), (1, 0)])
def test_the_new_memory_is_returned(train_step, B, micro_batch):
    """The third result is the new memory, as the model returned it. It covers all lanes, in their
    order: concatenate the memories of the micro-batches."""
    _, _, memory = step(train_step, Ledger(), None, 100.0, micro_batch, X[:B], Y[:B])
    assert same(layers_of(memory)[..., 0, 0], [[4, 10][:B], [-2, -5][:B]])


@pytest.mark.parametrize("m", [1, 0, 3])
def test_every_lane_is_read_once_and_in_order(train_step, m):
    """Call the model with all lanes of x, y and memory as they are, if recipe.micro_batch is 0."""
    memory = [layer.expand(-1, m, -1) for layer in past()]
    (call, *more) = stepped(train_step, memory).calls
    assert same(layers_of(call.memory), layers_of(memory))
    assert same(call.x, X) and same(call.y, Y) and not more


def test_without_a_memory_the_model_gets_none(train_step):
    """At the beginning of the text the model gets None: zeros would be a memory to attend to."""
    assert stepped(train_step, None).calls[0].memory is None


def test_each_call_reads_the_lanes_of_one_micro_batch(train_step):
    """Call the model for the lanes of each slice of micro_batches(B, recipe.micro_batch), in order:
    here for 1 of 2 lanes at a time."""
    calls = stepped(train_step, past(), micro_batch=1).calls
    assert same([len(call.x) for call in calls], [1, 1])
    assert same(torch.cat([call.x for call in calls]), X)


def test_each_micro_batch_has_the_memory_of_its_own_lanes(train_step):
    """Each micro-batch is read with the memory of its own lanes."""
    calls = stepped(train_step, past(), micro_batch=1).calls
    memories = [layers_of(call.memory) for call in calls]
    assert same(torch.cat(memories, dim=1), layers_of(past()))


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_the_gradients_of_one_step_add_up(train_step, micro_batch):
    """Gradients add up until they are cleared: clear those of the previous step before the first
    micro-batch. Make one step with the gradient of the mean over all B x T tokens."""
    model = Ledger()
    model.W.grad = torch.tensor([10.0], dtype=torch.float64)
    step(train_step, model, past(), micro_batch=micro_batch)
    assert same(weights(model), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


def test_a_micro_batch_counts_by_its_number_of_tokens(train_step):
    """The last micro-batch may be smaller: lanes of losses 1, 2, 6, read in twos, have mean 3."""
    model, y = Ledger(), torch.tensor([[1], [2], [6]])
    loss, *_ = step(train_step, model, None, micro_batch=2, x=y, y=y)
    assert same([loss, weights(model)[0].item()], [3.0, 1 - 3 / 2], tolerance=1e-6)


def test_a_weight_may_have_no_gradient(train_step):
    """A weight that the loss does not depend on (here u, without a memory) has no gradient: its
    .grad is None, and it does not change."""
    assert same(weights(stepped(train_step, None)), [1 - 3 / 2, 1], tolerance=1e-9)


def test_loss_and_norm_are_floats(train_step):
    """Loss and norm are floats (.item() or .tolist()): a tensor would keep the graph alive."""
    loss, norm, memory = step(train_step, Ledger(), past())
    assert isinstance(loss, float) and isinstance(norm, float)


def test_the_old_memory_is_not_changed(train_step):
    """The given memory is not changed in place: a step without an update must return it."""
    memory = past()
    step(train_step, Ledger(), memory)
    assert same(layers_of(memory), layers_of(past()))


def test_a_step_sets_no_seed(train_step):
    """A run sets its seed once, and a step sets none: torch's own generator is left alone."""
    assert sets_no_seed(step, train_step, Ledger(), past())


@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_non_finite_step_keeps_the_weights(train_step, bad):
    """If the norm is not finite, the weights do not change and the optimizer makes no step: one
    such value makes all weights NaN, and Adam moves them even if gradients are 0."""
    model = stepped(train_step, past(), bad=bad)
    assert same(weights(model), [1, 1]) and model.optimizer.steps == 0


@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_non_finite_step_returns_the_old_memory(train_step, bad):
    """If the norm is not finite, the third result is the old memory, not the new one."""
    memory = step(train_step, Ledger(bad), past())[2]
    assert same(layers_of(memory), layers_of(past()))


@pytest.mark.parametrize("bad, loss, norm", [
    ("loss and gradient", math.nan, math.nan), ("loss", math.inf, 5.0),
    ("gradient", 7.0, math.inf)])
def test_non_finite_values_are_returned_as_they_are(train_step, bad, loss, norm):
    """Loss and norm are returned even if they are not finite, so that the loop can report them."""
    assert same(list(step(train_step, Ledger(bad), past())[:2]), [loss, norm], tolerance=1e-5)


def test_the_norm_alone_decides(train_step):
    """A finite gradient makes the step, even if the loss is infinite: all ranks have the same norm,
    but each its own loss, and they must make the same steps."""
    model = stepped(train_step, past(), bad="loss")
    assert same(weights(model), [1 - 3 / 2, 1 - 4 / 2], tolerance=1e-9)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_called_under_autocast(train_step, device):
    """Call the model inside `with machine.autocast(recipe, x.device.type):`, which enables bf16."""
    model = Ledger().to(device)  # meta: a device without numbers, instead of a GPU
    with suppress(Recorded):
        step(train_step, model, None)
    assert ("autocast", device) in model.calls[0].open and not model.open


# ---- exercise evaluate --------------------------------------------------------------------------
# The same model.  Eight tokens are seven predictions; in segments of T = 3:
#
#     x       3 1 4 | 1 5 9 | 2
#     y       1 4 1 | 5 9 2 | 6
#     memory  none  |   4   | 9       the last x of the segment before
#     loss    1 4 1 | 9 13 6 | 15     their sum is 49, their mean 7

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def read(evaluate, model=None, tokens=TOKENS, eval_segment=3, eval_mem_len=1, *label):
    """Evaluate with stand-ins for everything outside this exercise."""
    model = model or Ledger()
    tokens = torch.as_tensor(tokens, dtype=torch.uint8)
    recipe = presets.Recipe(steps=9, dtype="float32", batch=2, segment=2,
                            eval_segment=eval_segment, eval_mem_len=eval_mem_len)
    with replaced(train, progress=model.progress, evaluating=model.evaluating), replaced(
            machine, autocast=model.autocast):
        return evaluate(model, tokens, recipe, *label)


def after(evaluate, device="cpu"):
    """Return the model after an evaluation; meta has no numbers, and replaces a GPU."""
    model = Ledger().to(device)
    with suppress(Recorded):
        read(evaluate, model)
    return model


def test_the_mean_over_all_predictions(evaluate):
    """Return the sum of all predictions' losses (in nats, from the model), divided by their number.
    Read each segment, of evaluation_segment_length(recipe), with the memory of the previous one."""
    assert same(read(evaluate), 49 / 7, tolerance=1e-5)


def test_a_second_evaluation_returns_the_same(evaluate):
    """Each evaluation starts without a memory (None): earlier evaluations have no effect."""
    model = Ledger()
    assert same([read(evaluate, model), read(evaluate, model)], [7.0, 7.0], tolerance=1e-5)


@pytest.mark.parametrize("n, T", [(24, 5), (23, 11), (13, 1), (9, 50), (16, 5), (2, 4)])
def test_other_texts_and_segments(evaluate, n, T):
    """The same holds for any n and T = evaluation_segment_length(recipe): one token per segment,
    all in one segment, a last segment that is shorter or not."""
    tokens = [i * i % 11 for i in range(n)]
    assert same(read(evaluate, None, tokens, 1, T), oracles.mean_loss(tokens, T), tolerance=1e-5)


def test_the_result_is_a_float(evaluate):
    """The result is a float, made by .item()."""
    assert isinstance(read(evaluate), float)


def test_the_first_segment_has_no_memory(evaluate):
    """The first segment is read with memory None: zeros would be a memory to attend to."""
    assert after(evaluate).calls[0].memory is None


def test_the_model_is_called_inside_evaluating(evaluate):
    """Read inside `with evaluating(model, recipe):` (defined above in train.py), which turns off
    dropout and sets the lengths of evaluation; model.eval() alone keeps those of training."""
    assert all(["evaluating" in call.open for call in after(evaluate).calls])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(evaluate, training):
    """After the evaluation the model is in the same mode as before."""
    model = Ledger().train(training)
    read(evaluate, model)
    assert model.training == training


def test_there_are_no_gradients(evaluate):
    """Nothing is trained here: without @torch.no_grad() each segment's graph would be kept."""
    assert not any([call.grad for call in after(evaluate).calls])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_evaluation_is_also_under_autocast(evaluate, device):
    """Call the model inside `with machine.autocast(recipe, model.u.device.type):`."""
    model = after(evaluate, device)
    assert all([("autocast", device) in call.open for call in model.calls]) and not model.open


def test_the_tokens_go_to_the_models_device(evaluate):
    """The tokens go to the device of the model's weights, such as model.u."""
    assert {call.x.device.type for call in after(evaluate, "meta").calls} == {"meta"}


def test_the_model_may_be_a_reader(evaluate):
    """The model may be a Reader (training/reader.py). It has no parameters(), so take the device of
    model.u. Its memory is opaque: pass it on as it is."""
    assert same(read(evaluate, OpaqueReader(Ledger())), 49 / 7, tolerance=1e-9)


@pytest.mark.parametrize("T", [1, 300])
def test_the_sum_is_kept_in_float64(evaluate, T):
    """Add up in float64 (losses.double()): in float32, 299 losses of 1 vanish next to 2^24."""
    model = Ledger()
    model.losses = lambda memory, y: torch.ones(y.shape).index_fill(
        1, torch.tensor(0), 1.0 if memory else 2.0**24)  # the first loss of the text is large
    found = read(evaluate, model, [0] * 301, T)
    assert same(found, (2**24 + 299) / 300, tolerance=1e-6)


@pytest.mark.parametrize("n, parts", [(8, 3), (7, 2)])
def test_progress_gets_the_number_of_segments(evaluate, n, parts):
    """If you use progress(items, label, total), pass it the label and the number of segments."""
    model = Ledger()
    read(evaluate, model, TOKENS[:n], 3, 1, "here")
    assert set(model.asked) <= {("here", parts), ("here", None)}
