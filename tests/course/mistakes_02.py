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
    M("causal_mask", "the offset m is forgotten: query i is key m + i, so the memory is masked "
      "from the first queries", ("j > m + i", "j > i"), bug=10),
    M("causal_mask", "a query does not see itself: only keys AFTER it are the future",
      ("j > m + i", "j >= m + i")),
    M("causal_mask", "one key of the future shows: the first masked key of query i is m + i + 1",
      ("j > m + i", "j > m + i + 1"), bug=10),
    M("causal_mask", "True and False are exchanged: True means masked",
      ("j > m + i", "j <= m + i")),
    M("causal_mask", "only the segment's T keys are there: the keys are m + T", """
def causal_mask(T, m, device=None):
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
"""),
    M("causal_mask", "the memory has rows of its own: only the segment's T tokens are queries", """
def causal_mask(T, m, device=None):
    return torch.ones(m + T, m + T, dtype=torch.bool, device=device).triu(1)
"""),
    M("causal_mask", "the memory is masked, too: it is the past, and every query sees all of it",
      ("j > m + i", "(j > m + i) | (j < m)")),
    M("causal_mask", "the mask is upside down: the first query sees least",
      ("j > m + i", "(j > m + i).flip(0)")),
    M("causal_mask", "the past is masked and the future shows", ("j > m + i", "j < T - 1 - i")),
    M("causal_mask", "the past is masked and the future shows", ("j > m + i", "j < m + i")),
    M("causal_mask", "the memory stands after the segment: the first m keys are the memory",
      ("j > m + i", "(j > i) & (j < T)")),
    M("causal_mask", "queries and keys have changed places: each row belongs to a query",
      ("arange(T, device=device)[:, None]", "arange(T, device=device)"),
      ("arange(m + T, device=device)", "arange(m + T, device=device)[:, None]")),
    M("causal_mask", "nothing is masked: a query must not see the keys after it",
      ("j > m + i", "j > m + T + i")),
    M("causal_mask", "everything is masked: a query sees the memory and itself",
      ("j > m + i", "j >= 0 * i")),
    M("causal_mask", "these are numbers to be added to the scores: wanted is a mask, True where a "
      "key is masked", ("j > m + i", "torch.zeros(T, m + T).masked_fill(j > m + i, -math.inf)")),
    M("causal_mask", "m is taken for the length of all keys: the keys are m + T",
      ("arange(m + T, device=device)", "arange(m, device=device)")),
    M("causal_mask", "the masked keys begin at T + i, should be at m + i + 1 (they are equal only "
      "by chance)", ("j > m + i", "j >= T + i")),
    M("causal_mask", "test_a_mask_is_bool", ("j > m + i", "(j > m + i).int()")),
    M("causal_mask", "test_a_mask_stands_on_its_device",
      ("torch.arange(T, device=device)", "torch.arange(T)"),
      ("torch.arange(m + T, device=device)", "torch.arange(m + T)")),
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
    M("reach", INSIDE, ("token = T - 1 ", "token = 0 "), ("token - token % T", "token")),
    M("reach", "T - 1 is forgotten: the query is the LAST token of its segment",
      ("return T - 1 - token", "return -token")),
    M("reach", "one too far: the distance from the last token to the segment's start is T - 1",
      ("return T - 1 - token", "return T - token")),
    M("reach", "the start of a segment before the query's is missed: int(x / T) rounds towards 0, "
      "so below 0 it rounds up", ("token - token % T", "int(token / T) * T")),
    M("reach", "one layer only: each layer goes on from where the one above arrived",
      ("for _ in range(N):", "if N:")),
    M("reach", "the last layer is missing: this is the reach of N - 1 layers",
      ("range(N)", "range(N - 1)")),
    M("reach", "one layer too many: this is the reach of N + 1 layers",
      ("range(N)", "range(N + 1)")),
    M("reach", "a layer sees M tokens before the start of the segment, not before that of the "
      "segment before it", ("segment_start - M", "segment_start - T - M")),
    M("reach", "the place of the first token that is seen is returned: wanted is how far back it "
      "is, T - 1 minus that", ("return T - 1 - token", "return token")),
)

CALL = "logits, memory = model(x_T, memory)"
FORGOTTEN = "the memory is not handed on: each segment is read as if nothing stood before it"
SHORT = "the tokens of the last, shorter segment are left out: the losses of all are (B, n)"
ONE_LOSS = "one loss for each token is wanted, (B, n): do not take means or sums here"


def stream(sentence, *edits, bug=0):
    return M("stream_losses", sentence, *edits, bug=bug)


STREAM_LOSSES = (
    stream(FORGOTTEN, (CALL, "logits, _ = model(x_T, memory)"), bug=24),
    stream(FORGOTTEN, (CALL, "logits, memory = model(x_T)"), bug=24),
    stream("only the first segment's memory is handed on: each call gets that of the call before",
           (CALL, "logits, new = model(x_T, memory)\n        memory = new if memory is None else "
            "memory")),
    stream("the whole text is read in one call: segments of T tokens, the memory handed on",
           ("x.split(T, dim=1)", "[x]"), ("y.split(T, dim=1)", "[y]")),
    stream("x is read from the beginning again in each call, although the memory holds it",
           ("    losses = []\n", "    losses = []\n    read = x[:, :0]\n"),
           (CALL, "read = torch.cat([read, x_T], 1)\n        logits, memory = model(read, memory)\n"
            "        logits = logits[:, -x_T.shape[1] :]"), bug=19),
    stream("the token that was read is taken for the target: the targets are y",
           ("y.split(T, dim=1)", "x.split(T, dim=1)"), bug=21),
    stream("split(T) without dim cuts the lanes apart: time is dim 1",
           ("x.split(T, dim=1)", "x.split(T)"), ("y.split(T, dim=1)", "y.split(T)")),
    stream("chunk(T) makes T segments: split(T) makes segments of T tokens",
           ("x.split(T, dim=1)", "x.chunk(T, dim=1)"), ("y.split(T, dim=1)", "y.chunk(T, dim=1)")),
    stream("the losses are joined along the lanes: time is dim 1",
           ("cat(losses, dim=1)", "cat([z.T for z in losses], dim=0)")),
    stream(ONE_LOSS, ("token_losses(logits, y_T))", "token_losses(logits, y_T).mean())"),
           ("torch.cat(losses, dim=1)", "torch.stack(losses).mean()"), bug=22),
    stream(ONE_LOSS, ("torch.cat(losses, dim=1)", "torch.cat(losses, dim=1).mean()")),
    stream(ONE_LOSS, ("torch.cat(losses, dim=1)", "torch.cat(losses, dim=1).sum()")),
    stream("the losses of the last segment alone are returned: keep those of each",
           ("torch.cat(losses, dim=1)", "losses[-1]")),
    stream("this is ln p, which is negative: a loss is -ln p",
           ("torch.cat(losses, dim=1)", "-torch.cat(losses, dim=1)")),
    stream("the losses are in bits: nats are wanted",
           ("torch.cat(losses, dim=1)", "torch.cat(losses, dim=1) / math.log(2)")),
    stream(SHORT, ("x.split(T, dim=1)", "x[:, : x.shape[1] // T * T].split(T, dim=1)")),
    stream("test_the_first_segment_has_no_past",
           ("    memory = None\n", "    memory = torch.zeros(len(x), 3).double()\n"), bug=17),
    stream("test_the_losses_keep_their_gradient",
           ("torch.cat(losses, dim=1)", "torch.cat(losses, dim=1).detach()")),
)

TABLE = (*UPDATE_MEMORY, *CAUSAL_MASK, *REACH, *STREAM_LOSSES)
