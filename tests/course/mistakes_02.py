"""SPOILERS.  Mistakes in the exercises of lesson 2 (see mistakes.py)."""
TABLE = {}
TABLE["update_memory"] = (
    ("everything is kept although M = 0: in Python rows[-0:] is all of rows", ("first:", "-M:")),
    ("old and new rows are swapped: the memory is earlier, so its rows come first",
     "joined = torch.cat([h, memory], dim=1)"),
    ("you keep the first M rows; keep the last M, since the oldest rows are dropped",
     ("first:", ":M")),
    ("you concatenated lanes; concatenate along time, dimension 1 of (B, m, D)",
     "joined = torch.cat([memory, h], dim=0)"),
    ("you keep as many rows as the segment has: keep M rows, not T",
     "first = max(0, joined.shape[1] - h.shape[1])"),
    ("with fewer than M rows the index is negative and counts from the end: let it be 0 or more",
     "first = joined.shape[1] - M"),
    ("you pad with rows of zeros up to M rows: no memory is not a memory of zeros",
     "return nn.functional.pad(joined[:, first:], (0, 0, max(0, M - joined.size(1)), 0)).detach()"),
    ("the old memory is dropped: keep the last M rows of BOTH", "joined = h"),
    ("one row too many is kept", "first = max(0, joined.shape[1] - M - 1)"),
    ("test_the_memory_has_the_dtype_of_h", (".detach()", ".detach().float()")),
)
TABLE["causal_mask"] = (
    ("the offset m is missing: query i is key m + i; without m the first queries do not see all of "
     "the memory", "return j > i"),
    ("a query does not see itself: only keys AFTER it are the future", "return j >= m + i"),
    ("one future key is not masked: the first masked key of query i is m + i + 1",
     "return j > m + i + 1"),
    ("True and False are swapped: True means masked", "return j <= m + i"),
    ("the mask covers only the segment's T keys: there are m + T keys",
     ("m + T", "T"), "return j > i"),
    ("the memory is also masked: it is in the past, and every query sees all of it",
     "return (j > m + i) | (j < m)"),
    ("the mask is upside down: the first query sees least", "return (j > m + i).flip(0)"),
    ("nothing is masked: a query must not see the keys after it", "return j > m + T + i"),
    ("these are values to add to the scores: return a bool mask, True where a key is masked",
     "return torch.zeros(T, m + T).masked_fill(j > m + i, -math.inf)"),
    ("this is a window, which also masks keys far back: here every query sees the whole memory",
     "return (j > m + i) | (j < i)"),
    ("T and m are swapped: there are T queries, one per row, and the memory has m keys",
     ("arange(T", "arange(m"), "return j > T + i"),
)
TABLE["reach"] = (
    ("only the first layer looks back from the END of a segment; the others look from the START of "
     "the segment that was reached", "return N * (M + T - 1)"),
    ("N (M + T): memory reaches back from the start of a segment, not from its end",
     "return N * (M + T)"),
    ("N M: the query is the LAST token of its segment, so T - 1 must be added", "return N * M"),
    ("N M + T - 1 is correct only if M is a multiple of T: the token that was reached is inside a "
     "segment, and a further layer looks back from that segment's START",
     ("token = T...", "token = 0"), "segment_start = token"),
    ("T - 1 is missing: the query is the LAST token of its segment", "return -token"),
    ("one too far: the distance from the last token to the segment's start is T - 1",
     "return T - token"),
    ("this is one layer only: each further layer continues from the farthest token reached so far",
     ("for ...", "if N:")),
    ("int() rounds negative numbers toward 0: use //, which rounds down",
     "segment_start = int(token / T) * T"),
    ("a layer sees the M tokens before the start of its own segment, not of the previous segment",
     ("token = seg...", "token = segment_start - T - M")),
    ("you return the position of the first token that is seen; return how far back it is, T - 1 "
     "minus the position", "return token"),
)
TABLE["stream_losses"] = (
    ("the memory is not carried over: each segment is read without context",
     ("logits, memory", "logits, _")),
    ("only the first segment's memory is carried over: each call gets the memory of the previous "
     "call", ("logits, memory = ...", "logits, new = model(x_T, memory)\n"
              "        memory = new if memory is None else memory")),
    ("the whole text is read in one call: read segments of T tokens and carry the memory over",
     ("zip...", "[(x, y)]:")),
    ("chunk(T) makes T pieces; split(T) makes pieces of T tokens",
     ("zip...", "zip(x.chunk(T, 1), y.chunk(T, 1)):")),
    ("test_the_first_segment_has_no_memory",  # the memory of the previous text
     ("memory = None", "memory = getattr(model, 'kept', None)"),
     ("return", "model.kept = memory\n    return")),
    ("each call reads x from the beginning again, although the memory already holds it",
     "logits, memory = model(x[:, : (len(losses) + 1) * T], memory)",
     ("(logits", "(logits[:, -x_T.shape[1] :]")),
    ("you use the input token as the target: the targets are y", ("y.split", "x.split")),
    ("split(T) without dim separates the lanes: time is dim 1",
     ("zip...", "zip(x.split(T), y.split(T)):")),
    ("return one loss per token, (B, n): do not take means or sums here",
     "return torch.cat(losses, dim=1).mean()"),
    ("cat without dim concatenates lanes: concatenate the losses along time, dim=1",
     "return torch.cat(losses)"),
    ("this is ln p, which is negative: a loss is -ln p", "return -torch.cat(losses, dim=1)"),
    ("the last, shorter segment is missing: return the losses of all tokens, (B, n)",
     ("x.split", "x[:, : x.shape[1] // T * T].split")),
)
