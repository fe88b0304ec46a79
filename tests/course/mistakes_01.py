"""SPOILERS.  Mistakes in the exercises of lesson 1 (see mistakes.py)."""
from course.mistakes import ANY, M

PIECE = "tokens[b * L : (b + 1) * L + 1]"
TURN = ("the tokens are dealt out in turn, so every lane is a text that nobody wrote: a lane is "
        "one contiguous piece of the stream")
NO_SHARE = ("the lanes do not share a token: the target of a lane's last input is the first token "
            "of the next lane, which begins at b * L")
YIELD = ("x = stream[:, t:end].long()\n        y = stream[:, t + 1 : end + 1].long()\n"
         "        yield x, y")
NO_YIELD = "use `yield`, not `return`: the segments are made one at a time"
PAIR = "each segment is a pair x, y, of which each is a tensor (B, T)"
LEFT_OUT = "between two segments an input is left out: it is the last target of the one before"
LOST = "the last, shorter segment is lost: its tokens count as well"
EMPTY = "at the end comes an empty segment: where no input is left, there is none"
ANGLE = "10000.0 ** (-two_k / D)"
COLUMNS = "torch.cat([angle.sin(), angle.cos()], dim=-1)"

TABLE = (
    # ---- lanes
    M("lanes", NO_SHARE, """
def lanes(tokens, B):
    if B < 1 or len(tokens) <= B:
        raise ValueError("too short")
    n = len(tokens) // B
    return tokens[: n * B].view(B, n)
"""),
    M("lanes", NO_SHARE, ("b * L : (b + 1) * L + 1", "b * (L + 1) : (b + 1) * (L + 1)"), bug=20),
    M("lanes", "the last column is missing: the last input of a lane has its target in the next "
      "lane, so a lane is L + 1 tokens and shares one with its neighbour",
      (PIECE, "tokens[b * L : (b + 1) * L]")),
    M("lanes", TURN, (PIECE, "tokens[b::B][: L + 1]"), bug=20),
    M("lanes", TURN, (PIECE, "tokens[b : B * L : B]")),
    M("lanes", TURN, """
def lanes(tokens, B):
    L = (len(tokens) - 1) // B
    x, y = tokens[: B * L].view(L, B).T, tokens[1 : B * L + 1].view(L, B).T
    return torch.cat([x, y[:, -1:]], dim=1)
"""),
    M("lanes", "the lanes are right, but stand as columns: (B, L + 1) has a lane in each row",
      ("torch.stack(rows)", "torch.stack(rows, dim=1)")),
    M("lanes", "B is the number of the lanes, not their length", """
def lanes(tokens, B):
    return tokens[: len(tokens) // B * B].view(-1, B)
"""),
    M("lanes", "these are lanes of different lengths: L is (n - 1) // B, rounded down, so that the "
      "last lane has a target, too", ("(len(tokens) - 1) // B", "len(tokens) // B")),
    M("lanes", "the inputs are right, the last column is not: each lane ends with the token that "
      "comes next in the stream, which is the first of the next lane", f"""
def lanes(tokens, B):
    L = (len(tokens) - 1) // B
    return torch.cat([tokens[: B * L].view(B, L), torch.full((B, 1), {ANY})], dim=1)
"""),
    M("lanes", "tokens are lost at the front: what is left over stands at the end of the stream",
      ("    rows = [", "    tokens = tokens[-(B * L + 1) :]\n    rows = [")),
    M("lanes", "these are more than B lanes: what is left over at the end is not used", """
def lanes(tokens, B):
    L = (len(tokens) - 1) // B
    return tokens.unfold(0, L + 1, L)
"""),
    M("lanes", "the first token is lost", (PIECE, "tokens[b * L + 1 : (b + 1) * L + 2]")),
    M("lanes", "the lanes come in reverse order", ("range(B)", "reversed(range(B))")),
    M("lanes", "one lane after the other stands in a single row: (B, L + 1) has a lane in each row",
      ("torch.stack(", "torch.cat(")),
    M("lanes", "the lanes are too short: n tokens hold n - 1 inputs, so L is (n - 1) // B",
      ("(len(tokens) - 1) // B", "len(tokens) // B - 1")),
    M("lanes", "one input a lane is enough: such a stream must not be refused",
      ("if L < 1:", "if L < 2:")),
    M("lanes", "these are the places of the tokens in the stream, not the tokens", """
def lanes(tokens, B):
    L = (len(tokens) - 1) // B
    return torch.arange(B)[:, None] * L + torch.arange(L + 1)
"""),
    M("lanes", "test_tokens_keep_their_type", ("[tokens[b * L", "[tokens.long()[b * L")),
    M("lanes", "test_the_stream_stays_as_it_was", ("return torch.stack(",
                                                   "tokens.resize_(B * L + 1)\n"
                                                   "    return torch.stack(")),
    M("lanes", "B = 0 must be refused with a ValueError, before anything is divided by it",
      (" if B > 0 else 0", "")),
    M("lanes", "test_less_than_one_lane_is_refused", """
def lanes(tokens, B):
    L = (len(tokens) - 1) // B if B else 0
    return tokens.new_tensor([tokens[b * L : (b + 1) * L + 1].tolist() for b in range(B)])
"""),
    M("lanes", "test_a_stream_too_short_is_refused", ("if L < 1:", "if B < 1:")),

    # ---- segments: what is yielded
    M("segments", "nothing is returned: use `yield`", "def segments(stream, T, start=0): pass"),
    M("segments", "no segment comes at all: is the range empty?",
      ("range(start, L, T)", "range(L, start, T)")),
    M("segments", NO_YIELD, """
def segments(stream, T, start=0):
    if T < 1:
        raise ValueError(T)
    x, y = stream[:, start:-1].long(), stream[:, start + 1 :].long()
    return list(zip(x.split(T, dim=1), y.split(T, dim=1)))
"""),
    M("segments", NO_YIELD, (YIELD, YIELD.replace("yield", "return"))),
    M("segments", PAIR, (YIELD, "yield stream[:, t : end + 1].long()")),
    M("segments", PAIR, (YIELD, YIELD + ", t")),
    M("segments", "the lanes come one by one: each segment holds a piece of ALL lanes, (B, T)", """
def segments(stream, T, start=0):
    for lane in stream.long():
        for t in range(start, len(lane) - 1, T):
            yield lane[t : t + T], lane[t + 1 : t + T + 1]
"""),
    M("segments", "this cuts the lanes, not the columns: each segment holds a piece of ALL lanes",
      (YIELD, "yield stream[t:end].long(), stream[t + 1 : end + 1].long()"), bug=20),
    M("segments", "T is the length of a segment, not the number of segments",
      ("range(start, L, T)", "range(start, L, -(-L // T))"), ("t + T, L", "t + -(-L // T), L")),
    M("segments", "x and y have changed places: y is what comes after x",
      (YIELD, "yield stream[:, t + 1 : end + 1].long(), stream[:, t:end].long()")),
    M("segments", "the first column is lost: it is an input",
      (YIELD, "yield stream[:, t + 1 : end + 1].long(), stream[:, t + 2 : end + 2].long()")),
    M("segments", "a segment of T columns gives only T - 1 inputs: x is T wide, and the target of "
      "its last input stands in the next segment",
      (YIELD, "yield stream[:, t : end - 1].long(), stream[:, t + 1 : end].long()")),
    M("segments", "the targets are not shifted: y is x itself, and the model would learn to copy",
      ("t + 1 : end + 1", "t:end"), bug=21),
    M("segments", "the targets are shifted twice: y is one token further than x, not two",
      ("t + 1 : end + 1", "t + 2 : end + 2"), bug=21),
    M("segments", "the targets are the tokens before: y is one column further than x",
      ("stream[:, t + 1 : end + 1]", "stream.roll(1, 1)[:, t:end]")),
    M("segments", "a target is one token, not T of them: y is (B, T), one column further than x",
      ("t + 1 : end + 1", "end")),
    M("segments", "the targets are the next segment: y is one column further than x, not T",
      ("t + 1 : end + 1", "end : end + T")),
    M("segments", "x and y lie on their side: (B, T) has a lane in each row",
      (YIELD, YIELD.replace(".long()", ".long().T"))),
    M("segments", "x and y are lists: tensors (B, T) are wanted",
      (YIELD, YIELD.replace(".long()", ".tolist()"))),
    # ---- segments: how many, and how wide
    M("segments", "the last column is used as an input: it is only a target",
      ("stream.shape[1] - 1", "stream.shape[1]")),
    M("segments", "the last input is lost: L + 1 columns are L inputs, and `end` is not in a slice",
      ("stream.shape[1] - 1", "stream.shape[1] - 2")),
    M("segments", LOST, ("range(start, L, T)", "range(start, L - T + 1, T)")),
    M("segments", "the segments begin one token after each other: the next one begins where the "
      "one before has ended", ("range(start, L, T)", "range(start, L)")),
    M("segments", LEFT_OUT, ("range(start, L, T)", "range(start, L, T + 1)")),
    M("segments", LEFT_OUT, """
def segments(stream, T, start=0):
    for piece in stream[:, start:].long().split(T + 1, dim=1):
        yield piece[:, :-1], piece[:, 1:]
"""),
    M("segments", "only the first segment comes: `yield` stands in a loop over all of them",
      ("range(start, L, T)", "(start,)")),
    M("segments", "the segments never end: `t` must go on by T", """
def segments(stream, T, start=0):
    while start < stream.shape[1]:
        yield stream[:, start : start + T], stream[:, start + 1 : start + T + 1]
"""),
    M("segments", EMPTY, ("range(start, L, T)", "range(start, L + 1, T)")),
    M("segments", EMPTY, """
def segments(stream, T, start=0):
    x, y = stream[:, start:-1].long(), stream[:, start + 1 :].long()
    yield from zip(x.split(T, dim=1), y.split(T, dim=1))
"""),
    M("segments", "the last x is wider than its y: each input has exactly one target",
      ("t:end]", "t : t + T]")),
    M("segments", "the last target is lost: a slice ends before the number behind the colon",
      ("t + 1 : end + 1", "t + 1 : min(end + 1, L)")),
    # ---- segments: start, type, refusal
    M("segments", "`start` is ignored: the first column that is read is column `start`",
      ("range(start, L, T)", "range(0, L, T)"), bug=24),
    M("segments", "`start` is a column, not the number of a segment",
      ("range(start, L, T)", "range(start * T, L, T)")),
    M("segments", "`start` moves y, too: it stays one column further than x",
      ("t + 1 : end + 1", "t + 1 - start : end + 1 - start")),
    M("segments", "the targets are computed: any token may follow, so read y from the lanes",
      ("stream[:, t + 1 : end + 1]", "1 + stream[:, t:end]")),
    M("segments", "test_x_and_y_are_int64",
      (YIELD, "yield stream[:, t:end], stream[:, t + 1 : end + 1]")),
    M("segments", "test_x_and_y_are_int64",
      (YIELD, "yield stream[:, t:end].long(), stream[:, t + 1 : end + 1]")),
    M("segments", "test_less_than_one_column_is_refused", ("if T < 1:", "if T == 0:")),
    M("segments", "test_less_than_one_column_is_refused",
      ("if T < 1:", "if T < 0:"), ("range(start, L, T)", "range(start, L, max(1, T))")),

    # ---- sinusoid: the columns
    M("sinusoid", "sines and cosines are interleaved: here all sines come first, then all cosines",
      (COLUMNS, "torch.stack([angle.sin(), angle.cos()], -1).flatten(1)")),
    M("sinusoid", "the cosines stand first: sines, then cosines",
      ("[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]")),
    M("sinusoid", "positions and frequencies have changed places: a row is a position",
      (COLUMNS, COLUMNS + ".T")),
    M("sinusoid", "the cosines stand below the sines: join them along the last dimension",
      ("dim=-1", "dim=0")),
    M("sinusoid", "these are D sines and D cosines: D/2 frequencies give D/2 of each",
      ("arange(0, D, 2, ", "arange(0, D, ")),
    M("sinusoid", "sines and cosines stand on an axis of their own: join them, do not stack them",
      ("torch.cat(", "torch.stack(")),
    M("sinusoid", "the angles themselves are returned: take their sines and cosines",
      (COLUMNS, "torch.cat([angle, angle], dim=-1)")),
    # ---- sinusoid: the frequencies
    M("sinusoid", "the frequencies fall half as fast as they should: the exponent is -2k/D, not "
      "-k/D", ("arange(0, D, 2, ", "arange(0, D // 2, ")),
    M("sinusoid", "the frequencies fall twice as fast as they should: the exponent is -2k/D",
      ("(-two_k / D)", "(-2 * two_k / D)")),
    M("sinusoid", "the frequencies grow: the exponent is negative", ("(-two_k", "(two_k")),
    M("sinusoid", "the frequencies end at exactly 1/10000: k/(D/2 - 1) in place of 2k/D",
      ("(-two_k / D)", "(-two_k / max(1, D - 2))")),
    M("sinusoid", "the frequencies come in reverse order", (COLUMNS,
      "torch.cat([angle.flip(1).sin(), angle.flip(1).cos()], dim=-1)")),
    M("sinusoid", "the frequencies begin with k = 1: the first one is 10000^0 = 1",
      ("(-two_k / D)", "(-(two_k + 2) / D)")),
    M("sinusoid", "the frequencies are taken times 2 pi: the angle is position times frequency",
      (ANGLE, "(2 * math.pi * " + ANGLE + ")")),
    M("sinusoid", "each cosine has the next frequency, as if they were numbered through the whole "
      "row: sine k and cosine k share frequency k", (COLUMNS,
      "torch.cat([angle.sin(), (angle * 10000 ** (-1 / D)).cos()], dim=-1)")),
    # ---- sinusoid: the rows
    M("sinusoid", "row r encodes r, should encode position[r]", ("position.double()[:, None]",
      "torch.arange(len(position)).double()[:, None]")),
    M("sinusoid", "position holds the positions themselves, not how many there are",
      ("position.double()", "torch.arange(1 + int(position.max())).double()")),
    M("sinusoid", "positions and frequencies need an axis each: (n, 1) times (D/2,) is (n, D/2)",
      ("[:, None]", "")),
    M("sinusoid", "the positions are counted from 1",
      ("position.double()[", "(1 + position.double())[")),
    # ---- sinusoid: float64, refusal
    M("sinusoid", "test_float64_is_returned", ("dtype=torch.float64", "dtype=torch.float32"),
      ("position.double()", "position.float()")),
    M("sinusoid", "test_float64_is_returned",
      ("dtype=torch.float64, ", ""), ("position.double()", "position")),
    M("sinusoid", "test_float64_is_returned", (COLUMNS, COLUMNS + ".float()")),
    M("sinusoid", "test_float64_before_the_product", ("dtype=torch.float64, ", "")),
    M("sinusoid", "test_float64_before_the_product", ("position.double()", "position.float()"),
      ("(-two_k / D)", "(-two_k / D).float()"), ("angle.sin(), angle.cos()",
                                                 "angle.double().sin(), angle.double().cos()")),
    M("sinusoid", "test_float64_before_the_product", """
def sinusoid(position, D):
    if D % 2:
        raise ValueError(D)
    angle = (position[:, None] * 10000 ** (-2 * torch.arange(D // 2) / D)).double()
    return torch.cat([angle.sin(), angle.cos()], -1)
"""),
    M("sinusoid", "test_an_odd_width_is_refused", ("if D % 2:", "if D < 0:")),
)
