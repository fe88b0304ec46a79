"""SPOILERS.  Mistakes in the exercises of lesson 2 (see mistakes.py)."""
TABLE = {}
TABLE["update_memory"] = (
    ("everything is kept although M = 0: in Python rows[-0:] is all of rows",
     ("joined[:, first:]", "joined[:, -M:]")),
    ("old and new rows are swapped: the memory is before the segment in time, so the old rows "
     "come first", ("[memory, h]", "[h, memory]")),
    ("you keep the first M rows; keep the last M, since the oldest rows are dropped",
     ("joined[:, first:]", "joined[:, :M]")),
    ("you concatenated lanes; concatenate along time, dimension 1 of (B, m, D)",
     ("dim=1", "dim=0")),
    ("you keep as many rows as the segment has: keep M rows, not T",
     ("shape[1] - M", "shape[1] - h.shape[1]")),
    ("there are fewer than M rows, and a negative index counts from the end: never let the first "
     "row be below 0", ("max(0, joined.shape[1] - M)", "joined.shape[1] - M")),
    ("you pad with rows of zeros up to M rows: no memory is not a memory of zeros",
     ("[memory, h]",
      "[h.new_zeros(len(h), max(0, M - memory.shape[1] - h.shape[1]), 3), memory, h]")),
    ("the old memory is dropped: keep the last M rows of BOTH", ("[memory, h]", "[h]")),
    ("one row too many is kept", ("shape[1] - M", "shape[1] - M - 1")),
    ("test_the_memory_has_the_dtype_of_h", (".detach()", ".detach().float()")),
)
TABLE["causal_mask"] = (
    ("the offset m is missing: query i is key m + i; without m the first queries do not see all "
     "of the memory", ("j > m + i", "j > i")),
    ("a query does not see itself: only keys AFTER it are the future", ("j > m + i", "j >= m + i")),
    ("one future key is not masked: the first masked key of query i is m + i + 1",
     ("j > m + i", "j > m + i + 1")),
    ("True and False are swapped: True means masked", ("j > m + i", "j <= m + i")),
    ("the mask covers only the segment's T keys: there are m + T keys",
     ("torch.arange(m + T, ", "torch.arange(T, "), ("j > m + i", "j > i")),
    ("the memory is also masked: it is in the past, and every query sees all of it",
     ("j > m + i", "(j > m + i) | (j < m)")),
    ("the mask is upside down: the first query sees least", ("j > m + i", "(j > m + i).flip(0)")),
    ("nothing is masked: a query must not see the keys after it", ("j > m + i", "j > m + T + i")),
    ("these are values to add to the scores: return a bool mask, True where a key is masked",
     ("j > m + i", "torch.zeros(T, m + T).masked_fill(j > m + i, -math.inf)")),
    ("this is a window, which also masks keys far back: here every query sees the whole memory, "
     "however long it is", ("return j > m + i", "return (j > m + i) | (j < i)")),
    ("T and m are swapped: there are T queries, one per row, and the memory has m keys",
     ("torch.arange(T, ", "torch.arange(m, "), ("j > m + i", "j > T + i")),
)
TABLE["reach"] = (
    ("only the first layer looks back from the END of a segment; the others look from the START "
     "of the segment that was reached", ("return T - 1 - token", "return N * (M + T - 1)")),
    ("N (M + T): memory reaches back from the start of a segment, not from its end",
     ("return T - 1 - token", "return N * (M + T)")),
    ("N M: the query is the LAST token of its segment, so T - 1 must be added",
     ("return T - 1 - token", "return N * M")),
    ("N M + T - 1 is correct only if M is a multiple of T: the token that was reached is inside a "
     "segment, and a further layer looks back from that segment's START",
     ("token = T - 1 ", "token = 0 "), ("token - token % T", "token")),
    ("T - 1 is missing: the query is the LAST token of its segment",
     ("return T - 1 - token", "return -token")),
    ("one too far: the distance from the last token to the segment's start is T - 1",
     ("return T - 1 - token", "return T - token")),
    ("this is one layer only: each further layer continues from the farthest token reached so far",
     ("for _ in range(N):", "if N:")),
    ("int() rounds negative numbers toward 0: use //, which rounds down",
     ("token - token % T", "int(token / T) * T")),
    ("a layer sees the M tokens before the start of its own segment, not of the previous segment",
     ("segment_start - M", "segment_start - T - M")),
    ("you return the position of the first token that is seen; return how far back it is, T - 1 "
     "minus the position", ("return T - 1 - token", "return token")),
)
TABLE["stream_losses"] = (
    ("the memory is not carried over: each segment is read without context",
     ("logits, memory = model(x_T, memory)", "logits, _ = model(x_T, memory)")),
    ("only the first segment's memory is carried over: each call gets the memory of the previous "
     "call",
     ("logits, memory = model(x_T, memory)",
      "logits, new = model(x_T, memory)\n        memory = new if memory is None else memory")),
    ("the whole text is read in one call: read segments of T tokens and carry the memory over",
     ("x.split(T, dim=1)", "[x]"), ("y.split(T, dim=1)", "[y]")),
    ("chunk(T) makes T pieces; split(T) makes pieces of T tokens", ("x.split(", "x.chunk("),
     ("y.split(", "y.chunk(")),
    ("test_the_first_segment_has_no_memory",  # the memory of the previous text
     ("memory = None", "memory = getattr(model, 'kept', None)"),
     ("    return", "    model.kept = memory\n    return")),
    ("each call reads x from the beginning again, although the memory already holds it",
     ("    losses = []\n", "    losses = []\n    read = x[:, :0]\n"),
     ("logits, memory = model(x_T, memory)",
      "read = torch.cat([read, x_T], 1)\n        logits, memory = model(read, memory)\n"
      "        logits = logits[:, -x_T.shape[1] :]")),
    ("you use the input token as the target: the targets are y",
     ("y.split(T, dim=1)", "x.split(T, dim=1)")),
    ("split(T) without dim separates the lanes: time is dim 1", ("x.split(T, dim=1)", "x.split(T)"),
     ("y.split(T, dim=1)", "y.split(T)")),
    ("return one loss per token, (B, n): do not take means or sums here",
     ("token_losses(logits, y_T))", "token_losses(logits, y_T).mean())"),
     ("torch.cat(losses, dim=1)", "torch.stack(losses).mean()")),
    ("cat without dim concatenates lanes: concatenate the losses along time, dim=1",
     ("torch.cat(losses, dim=1)", "torch.cat(losses)")),
    ("this is ln p, which is negative: a loss is -ln p",
     ("torch.cat(losses, dim=1)", "-torch.cat(losses, dim=1)")),
    ("the tokens of the last, shorter segment are missing: return the losses of all tokens, (B, n)",
     ("x.split(T, dim=1)", "x[:, : x.shape[1] // T * T].split(T, dim=1)")),
)
