"""SPOILERS.  Mistakes in the exercises of lesson 2 (see mistakes.py)."""
TABLE = {}
TABLE["update_memory"] = (
    ("everything is kept although M = 0: in Python rows[-0:] is all of rows",
     ("joined[:, first:]", "joined[:, -M:]")),
    ("old and new have changed places: time runs from the memory into the segment, so the old "
     "rows come first", ("[memory, h]", "[h, memory]")),
    ("lanes are joined, should be time: that is dimension 1 of (B, m, D)", ("dim=1", "dim=0")),
    ("as many rows are kept as the segment is long: M says how many, not T",
     ("shape[1] - M", "shape[1] - h.shape[1]")),
    ("there are fewer than M rows, and a negative index counts from the end: never let the first "
     "row be below 0", ("max(0, joined.shape[1] - M)", "joined.shape[1] - M")),
    ("rows of zeros are put in front until there are M: a past that is not there is no past of "
     "zeros",
     ("[memory, h]",
      "[h.new_zeros(len(h), max(0, M - memory.shape[1] - h.shape[1]), 3), memory, h]")),
    ("the old memory is thrown away: the last M rows of BOTH stay", ("[memory, h]", "[h]")),
    ("one row too many is kept", ("shape[1] - M", "shape[1] - M - 1")),
    ("test_the_memory_has_the_type_of_h", (".detach()", ".detach().float()")),
    ("test_no_gradient_goes_back", (".detach()", "")),
)
TABLE["causal_mask"] = (
    ("the offset m is forgotten: query i is key m + i, so the memory is masked from the first "
     "queries", ("j > m + i", "j > i")),
    ("a query does not see itself: only keys AFTER it are the future", ("j > m + i", "j >= m + i")),
    ("one key of the future shows: the first masked key of query i is m + i + 1",
     ("j > m + i", "j > m + i + 1")),
    ("True and False are exchanged: True means masked", ("j > m + i", "j <= m + i")),
    ("only the segment's T keys are there: the keys are m + T",
     ("torch.arange(m + T, ", "torch.arange(T, "), ("j > m + i", "j > i")),
    ("the memory is masked, too: it is the past, and every query sees all of it",
     ("j > m + i", "(j > m + i) | (j < m)")),
    ("the mask is upside down: the first query sees least", ("j > m + i", "(j > m + i).flip(0)")),
    ("nothing is masked: a query must not see the keys after it", ("j > m + i", "j > m + T + i")),
    ("these are numbers to be added to the scores: wanted is a mask, True where a key is masked",
     ("j > m + i", "torch.zeros(T, m + T).masked_fill(j > m + i, -math.inf)")),
    ("this is a window: keys far back are masked, too; here every query sees the whole memory, "
     "however long it is", ("return j > m + i", "return (j > m + i) | (j < i)")),
    ("T and m are exchanged: there are T queries, one row each, and m keys of the memory",
     ("torch.arange(T, ", "torch.arange(m, "), ("j > m + i", "j > T + i")),
)
TABLE["reach"] = (
    ("only the first layer looks back from the END of a segment; the others look from the START "
     "of the segment that was reached", ("return T - 1 - token", "return N * (M + T - 1)")),
    ("N (M + T): memory reaches back from the start of a segment, not from its end",
     ("return T - 1 - token", "return N * (M + T)")),
    ("N M: the query is the LAST token of its segment, so T - 1 must be added",
     ("return T - 1 - token", "return N * M")),
    ("N M + T - 1 is right only if M is a multiple of T: the token that was reached stands inside "
     "a segment, and the next layer sees from that segment's START on",
     ("token = T - 1 ", "token = 0 "), ("token - token % T", "token")),
    ("T - 1 is forgotten: the query is the LAST token of its segment",
     ("return T - 1 - token", "return -token")),
    ("one too far: the distance from the last token to the segment's start is T - 1",
     ("return T - 1 - token", "return T - token")),
    ("one layer only: each layer goes on from where the one above arrived",
     ("for _ in range(N):", "if N:")),
    ("a layer sees M tokens before the start of the segment, not before that of the segment "
     "before it", ("segment_start - M", "segment_start - T - M")),
    ("the place of the first token that is seen is returned: wanted is how far back it is, T - 1 "
     "minus that", ("return T - 1 - token", "return token")),
)
TABLE["stream_losses"] = (
    ("the memory is not handed on: each segment is read as if nothing stood before it",
     ("logits, memory = model(x_T, memory)", "logits, _ = model(x_T, memory)")),
    ("only the first segment's memory is handed on: each call gets that of the call before",
     ("logits, memory = model(x_T, memory)",
      "logits, new = model(x_T, memory)\n        memory = new if memory is None else memory")),
    ("the whole text is read in one call: segments of T tokens, the memory handed on",
     ("x.split(T, dim=1)", "[x]"), ("y.split(T, dim=1)", "[y]")),
    ("x is read from the beginning again in each call, although the memory holds it",
     ("    losses = []\n", "    losses = []\n    read = x[:, :0]\n"),
     ("logits, memory = model(x_T, memory)",
      "read = torch.cat([read, x_T], 1)\n        logits, memory = model(read, memory)\n"
      "        logits = logits[:, -x_T.shape[1] :]")),
    ("the token that was read is taken for the target: the targets are y",
     ("y.split(T, dim=1)", "x.split(T, dim=1)")),
    ("split(T) without dim cuts the lanes apart: time is dim 1",
     ("x.split(T, dim=1)", "x.split(T)"), ("y.split(T, dim=1)", "y.split(T)")),
    ("one loss for each token is wanted, (B, n): do not take means or sums here",
     ("token_losses(logits, y_T))", "token_losses(logits, y_T).mean())"),
     ("torch.cat(losses, dim=1)", "torch.stack(losses).mean()")),
    ("cat without dim joins along the lanes: join the losses along time, dim=1",
     ("torch.cat(losses, dim=1)", "torch.cat(losses)")),
    ("this is ln p, which is negative: a loss is -ln p",
     ("torch.cat(losses, dim=1)", "-torch.cat(losses, dim=1)")),
    ("the tokens of the last, shorter segment are left out: the losses of all are (B, n)",
     ("x.split(T, dim=1)", "x[:, : x.shape[1] // T * T].split(T, dim=1)")),
    ("test_the_first_segment_has_no_past",
     ("    memory = None\n", "    memory = torch.zeros(len(x), 3).double()\n")),
)
