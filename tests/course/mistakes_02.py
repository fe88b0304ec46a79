"""SPOILERS.  Mistakes in the exercises of lesson 2 (see mistakes.py)."""
from course.mistakes import M

CUT_THEN_JOIN = """
def update_memory(memory, h, M):
    m, T = memory.shape[1], h.shape[1]
    old, new = memory[:, max(0, m + T - M) :], h[:, max(0, T - M) :]
    return torch.cat([{order}], dim=1).detach()
"""

IN_PLACE = """
def update_memory(memory, h, M):
    m, T = memory.shape[1], h.shape[1]
    if m != M or T > M or T == 0:
        return torch.cat([memory, h], 1)[:, max(0, m + T - M) :].detach()
    memory[:, : M - T] = memory[:, T:].clone()
    memory[:, M - T :] = h
    return memory.detach()
"""

ZEROS = "[h.new_zeros(h.shape[0], max(0, M - memory.shape[1] - h.shape[1]), h.shape[2]), memory, h]"

OTHER_AXIS = "the rows are joined along another axis than time, which is dim 1"
CHANGED_PLACES = ("old and new have changed places: time runs from the memory into the segment, so "
                  "the old rows come first")
NEW_ROWS_MISSING = "a full memory is frozen: the new rows must go in, and the oldest ones out"

UPDATE_MEMORY = (
    M("update_memory", "everything is kept although M = 0: in Python rows[-0:] is all of rows",
      ("joined[:, first:]", "joined[:, -M:]"), bug=16),
    M("update_memory", "everything is kept: only the last M rows are",
      ("joined[:, first:]", "joined")),
    M("update_memory", CHANGED_PLACES, ("[memory, h]", "[h, memory]"), bug=15),
    M("update_memory", CHANGED_PLACES, CUT_THEN_JOIN.format(order="new, old"), bug=15),
    M("update_memory", "the oldest rows are kept: the newest M are wanted",
      ("joined[:, first:]", "joined[:, :M]")),
    M("update_memory", "as many rows are kept as the segment is long: M says how many, not T",
      ("shape[1] - M", "shape[1] - h.shape[1]"), bug=18),
    M("update_memory", "there are fewer than M rows, and a negative index counts from the end: "
      "never let the first row be below 0", ("max(0, joined.shape[1] - M)", "joined.shape[1] - M")),
    M("update_memory", "rows of zeros are put in front until there are M: a past that is not there "
      "is no past of zeros", ("[memory, h]", ZEROS), bug=17),
    M("update_memory", "as many old rows go out as new ones come in, also while there is room",
      ("[memory, h]", "[memory[:, h.shape[1] :], h]")),
    M("update_memory", "the old memory is thrown away: the last M rows of BOTH stay",
      ("[memory, h]", "[h]")),
    M("update_memory", NEW_ROWS_MISSING,
      ("joined[:, first:]", "(memory if memory.shape[1] >= M else joined[:, first:])")),
    M("update_memory", NEW_ROWS_MISSING, ("[memory, h]", "[memory, h[:, : M - memory.shape[1]]]")),
    M("update_memory", "the new rows do not go in: the memory stays as it was",
      ("[memory, h]", "[memory]")),
    M("update_memory", "the rows come newest first: the oldest is the first row",
      ("joined[:, first:]", "joined[:, first:].flip(1)")),
    M("update_memory", "one row too many is kept", ("shape[1] - M", "shape[1] - M - 1")),
    M("update_memory", "one row too few is kept", ("shape[1] - M", "shape[1] - M + 1")),
    M("update_memory", OTHER_AXIS, ("dim=1", "dim=0")),
    M("update_memory", OTHER_AXIS, ("dim=1", "dim=2")),
    M("update_memory", "the rows are cut off from the wrong axis: time is dim 1",
      ("joined[:, first:]", "joined[first:]")),
    M("update_memory", "torch.stack makes a new dimension: torch.cat joins along time, dim 1",
      ("torch.cat", "torch.stack")),
    # ---- what stays as it was
    M("update_memory", "test_the_memory_has_the_type_of_h", (".detach()", ".detach().float()")),
    M("update_memory", "test_no_gradient_goes_back", (".detach()", ""), bug=14),
    M("update_memory", "test_no_gradient_goes_back", ("[memory, h]", "[memory.detach(), h]"),
      (".detach()\n", "\n"), bug=14),
    M("update_memory", "test_the_segment_keeps_its_gradient",
      ("[memory, h]", "[memory, h.detach_()]")),
    M("update_memory", "test_the_old_memory_stays_as_it_was", IN_PLACE),
)

CAUSAL_MASK = (
    M("causal_mask", "the offset M is forgotten: query i is key M + i, so the memory is hidden "
      "from the first queries", ("j > M + i", "j > i"), bug=10),
    M("causal_mask", "a query does not see itself: only keys AFTER it are the future",
      ("j > M + i", "j >= M + i")),
    M("causal_mask", "one key of the future shows: the first hidden key of query i is M + i + 1",
      ("j > M + i", "j > M + i + 1"), bug=10),
    M("causal_mask", "True and False are exchanged: True means hidden",
      ("j > M + i", "j <= M + i")),
    M("causal_mask", "only the segment's T keys are there: the keys are M + T", """
def causal_mask(T, M, device=None):
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
"""),
    M("causal_mask", "the memory has rows of its own: only the segment's T tokens are queries", """
def causal_mask(T, M, device=None):
    return torch.ones(M + T, M + T, dtype=torch.bool, device=device).triu(1)
"""),
    M("causal_mask", "the memory is hidden, too: it is the past, and every query sees all of it",
      ("j > M + i", "(j > M + i) | (j < M)")),
    M("causal_mask", "the mask is upside down: the first query sees least",
      ("j > M + i", "(j > M + i).flip(0)")),
    M("causal_mask", "the past is hidden and the future shows", ("j > M + i", "j < T - 1 - i")),
    M("causal_mask", "the past is hidden and the future shows", ("j > M + i", "j < M + i")),
    M("causal_mask", "the memory stands after the segment: the first M keys are the memory",
      ("j > M + i", "(j > i) & (j < T)")),
    M("causal_mask", "queries and keys have changed places: each row belongs to a query",
      ("arange(T, device=device)[:, None]", "arange(T, device=device)"),
      ("arange(M + T, device=device)", "arange(M + T, device=device)[:, None]")),
    M("causal_mask", "nothing is hidden: a query must not see the keys after it",
      ("j > M + i", "j > M + T + i")),
    M("causal_mask", "everything is hidden: a query sees the memory and itself",
      ("j > M + i", "j >= 0 * i")),
    M("causal_mask", "these are numbers to be added to the scores: wanted is a mask, True where a "
      "key is hidden", ("j > M + i", "torch.zeros(T, M + T).masked_fill(j > M + i, -math.inf)")),
    M("causal_mask", "M is taken for the length of all keys: the keys are M + T",
      ("arange(M + T, device=device)", "arange(M, device=device)")),
    M("causal_mask", "the hidden keys begin at T + i, should be at M + i + 1 (they are equal only "
      "by chance)", ("j > M + i", "j >= T + i")),
    M("causal_mask", "test_a_mask_is_bool", ("j > M + i", "(j > M + i).int()")),
    M("causal_mask", "test_a_mask_stands_on_its_device",
      ("torch.arange(T, device=device)", "torch.arange(T)"),
      ("torch.arange(M + T, device=device)", "torch.arange(M + T)")),
    M("causal_mask", "test_a_mask_stands_on_its_device",
      ("torch.arange(T, device=device)", "torch.arange(T)")),
)


def formula(sentence, result):
    """A reach that is written as one formula."""
    return M("reach", sentence, f"def reach(N, T, M):\n    return {result}\n")


FROM_THE_END = ("only the first layer looks back from the END of a segment; the others look from "
                "the START of the segment that was reached")
INSIDE = ("N M + T - 1 is right only if M is a multiple of T: the token that was reached stands "
          "inside a segment, and the next layer sees from that segment's START on")
WHOLE_SEGMENTS = ("whole segments were counted: the memory holds M tokens, and that may be a part "
                  "of a segment")

REACH = (
    formula(FROM_THE_END, "N * (M + T - 1)"),
    formula(FROM_THE_END, "N * (M + T) - 1"),
    formula("N (M + T): memory reaches back from the start of a segment, not from its end",
            "N * (M + T)"),
    formula("N M: the query is the LAST token of its segment, so T - 1 must be added", "N * M"),
    formula(WHOLE_SEGMENTS, "N * math.ceil(M / T) * T + T - 1"),
    formula(WHOLE_SEGMENTS, "N * (M // T) * T + T - 1"),
    M("reach", INSIDE, ("first // T * T - M", "first - M")),
    M("reach", "T - 1 is forgotten: the query is the LAST token of its segment",
      ("return T - 1 - first", "return -first")),
    M("reach", "one too far: the distance from the last token to the segment's start is T - 1",
      ("T - 1 - first", "T - first")),
    M("reach", "the start of a segment before the query's is missed: int(x / T) rounds towards 0, "
      "so below 0 it rounds up", ("first // T * T", "int(first / T) * T")),
    M("reach", "one layer only: each layer goes on from where the one above arrived",
      ("for _ in range(N):", "if N:")),
    M("reach", "the last layer is missing: this is the reach of N - 1 layers",
      ("range(N)", "range(N - 1)")),
    M("reach", "one layer too many: this is the reach of N + 1 layers",
      ("range(N)", "range(N + 1)")),
    M("reach", "a layer sees M tokens before the start of the segment, not before that of the "
      "segment before it", ("first // T * T - M", "first // T * T - T - M")),
    M("reach", "the place of the first token that is seen is returned: wanted is how far back it "
      "is, T - 1 minus that", ("return T - 1 - first", "return first")),
)

WITHOUT_STREAM_LOSSES = """
def gradient_into(model, x, y, T):
    inputs, losses, memory = [], [], None
    with model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out)):
        for a, b in zip(x.split(T, 1), y.split(T, 1)):
            logits, memory = model(a, memory)
            losses.append(token_losses(logits, b))
    {}
"""


def alone(name, end):
    """Adds up the losses of segment 2 without those of segment 1."""
    return M("gradient_into", name, WITHOUT_STREAM_LOSSES.format("\n    ".join(end)))


LARGEST = "h.grad.abs().max().item()"
NOT_CONNECTED = ("{}, since segment 1's input is not connected to the loss: that is the answer "
                 "0.0, not an error")

GRADIENT_INTO = (
    M("gradient_into", "the loss is that of both segments: only the second one's is asked for",
      ("[:, T:].sum()", ".sum()")),
    M("gradient_into", "the loss is that of the first segment: the second one's is asked for",
      ("[:, T:]", "[:, :T]")),
    M("gradient_into", "each segment has its own loss: segment 2's alone goes into both",
      ("loss_2 = stream_losses(model, x, y, T)[:, T:].sum()",
       "losses = [z.sum() for z in stream_losses(model, x, y, T).split(T, 1)]"),
      ("    loss_2.backward()\n", ""),
      ("[h.grad.abs()", "[torch.autograd.grad(loss, h, retain_graph=True)[0].abs()"),
      ("for h in inputs", "for h, loss in zip(inputs, losses)")),
    M("gradient_into", "there is no token in this loss: losses are (B, n), lanes, then tokens",
      ("[:, T:]", "[T:]")),
    M("gradient_into", "you take the mean of the losses; it must be their sum",
      ("[:, T:].sum()", "[:, T:].mean()")),
    M("gradient_into", "you take the mean of both segments' losses; it must be the sum of the "
      "second's", ("[:, T:].sum()", ".mean()")),
    M("gradient_into", "you take the mean over the lanes; it must be the sum of all losses",
      ("[:, T:].sum()", "[:, T:].sum(1).mean()")),
    M("gradient_into", "the loss is that of one token; it must be the sum of all in segment 2",
      ("[:, T:].sum()", "[:, -1].sum()")),
    M("gradient_into", "the loss is that of one token; it must be the sum of all in segment 2",
      ("[:, T:].sum()", "[:, T].sum()")),
    M("gradient_into", "you return the largest value; it must be the largest absolute value",
      (LARGEST, "h.grad.max().item()")),
    M("gradient_into", "you return the mean |gradient|; it must be the largest",
      (LARGEST, "h.grad.abs().mean().item()")),
    M("gradient_into", "you return the sum of the |gradient|; it must be the largest",
      (LARGEST, "h.grad.abs().sum().item()")),
    M("gradient_into", "you return the norm of the gradient; it must be its largest entry",
      (LARGEST, "h.grad.norm().item()")),
    M("gradient_into", "the segments come in reverse order", ("in inputs]", "in inputs[::-1]]")),
    M("gradient_into", "this is the gradient with respect to the weights of the embedding, where a "
      "token of both segments is one row: catch what the embedding puts OUT", """
def gradient_into(model, x, y, T):
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    slope, = torch.autograd.grad(loss_2, model.embedding.weight)
    return [slope[part].abs().max().item() for part in x.split(T, 1)]
"""),
    M("gradient_into", "segment 1's gradient is not measured: this memory lets some of it through",
      ("[h.grad.abs().max().item() for h in inputs]", "[0.0, inputs[1].grad.abs().max().item()]")),
    M("gradient_into", "that is segment 1's alone: the answer has one number for each segment",
      ("[h.grad.abs().max().item() for h in inputs]", "inputs[0].grad.abs().max().item()")),
    M("gradient_into", "that is segment 2's alone: the answer has one number for each segment",
      ("[h.grad.abs().max().item() for h in inputs]", "inputs[1].grad.abs().max().item()")),
    # ---- errors on the way
    # what h.grad is without retain_grad(); to read it there would print a warning of PyTorch's
    M("gradient_into", "h.grad is None: that takes output.retain_grad() first, then backward()",
      ("h.grad.abs()", "None.abs()")),
    M("gradient_into", "nothing was caught: the hook must be there before the stream is read", """
def gradient_into(model, x, y, T):
    inputs = []
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    hook = model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out))
    hook.remove()
    loss_2.backward()
    return [h.grad.abs().max().item() for h in inputs]
"""),
    M("gradient_into", "backward() wants one number: the SUM of the second segment's losses",
      ("[:, T:].sum()", "[:, T:]")),
    M("gradient_into", "tokens are whole numbers and have no gradient: catch what the embedding "
      "puts out", ("inputs = []", "inputs = [x.requires_grad_()]")),
    alone(NOT_CONNECTED.format("autograd refuses"), [
        "found = torch.autograd.grad(losses[1].sum(), inputs)",
        "return [g.abs().max().item() for g in found]"]),
    alone(NOT_CONNECTED.format("h.grad is None"), [
        "for h in inputs:", "    h.retain_grad()", "losses[1].sum().backward()",
        "return [h.grad.abs().max().item() for h in inputs]"]),
    alone("test_not_connected_is_exactly_0", [
        "found = torch.autograd.grad(losses[1].sum(), inputs, allow_unused=True)",
        "return [g if g is None else g.abs().max().item() for g in found]"]),
    # ---- the right numbers
    M("gradient_into", "test_the_gradients_are_floats", (LARGEST, "h.grad.abs().max()")),
    M("gradient_into", "test_no_hook_is_left_behind", ("hook.remove()", "pass")),
)

TABLE = (*UPDATE_MEMORY, *CAUSAL_MASK, *REACH, *GRADIENT_INTO)
