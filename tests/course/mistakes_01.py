"""SPOILERS.  Mistakes in the exercises of lesson 1 (see mistakes.py)."""
TABLE = {}
TABLE["lanes"] = (
    ("the lanes do not share a token: a lane's last target is the first token of the next lane, so "
     "lane b begins at b * L", ("tokens[b... for", "tokens[b * (L + 1) : (b + 1) * (L + 1)] for")),
    ("the last column is missing: a lane has L + 1 tokens, of which the last is also the first of "
     "the next lane", ("tokens[b... for", "tokens[b * L : (b + 1) * L] for")),
    ("you assigned the tokens to the lanes in turn, so no lane is a text; each lane must be one "
     "contiguous piece of the stream", ("tokens[b... for", "tokens[b::B][: L + 1] for")),
    ("the lanes are correct but are columns: (B, L + 1) has one lane per row",
     "return torch.stack(rows, dim=1)"),
    ("the lanes have different lengths: L is (n - 1) // B, rounded down, so that the last lane "
     "also has a target", "L = len(tokens) // B"),
    ("you concatenated the lanes into a single row: (B, L + 1) has one lane per row",
     "return torch.cat(rows)"),
    ("you use assert, which raises an AssertionError; use `if` and `raise ValueError`",
     ("if B...", "assert 0 < B < len(tokens)\n    if False:")),
    ("B = 0 must raise a ValueError before anything is divided by it",
     ("if B...", "if len(tokens) <= B:")),
    ("you removed token 0, which is a token like any other",
     ("L = ", "tokens = tokens[: int(tokens.nonzero()[-1]) + 1]\n    L = ")),
    ("the lanes are columns: (B, L + 1) has one lane per row, and each has L + 1 tokens, of which "
     "the last is only a target", "return tokens[: len(tokens) // B * B].view(B, -1).t()"),
    ("this is one long row: each lane is a separate row, (B, L + 1)", "return tokens[: L * B]"),
)
LIST = "L = ", "found = []\n    L = "
TABLE["segments"] = (
    ("nothing is returned: use `yield`", ("yield ...", "pass")),
    ("use `yield`, not `return`: the segments are made one at a time", ("yield", "return")),
    ("you return a list: use `yield`, because train.py asks for one segment at a time",
     LIST, ("yield ...", "found.append((x, y))\n    return found")),
    ("you return a tuple: use `yield`, because train.py asks for one segment at a time",
     LIST, ("yield ...", "found.append((x, y))\n    return tuple(found)")),
    ("you split into pieces of T + 1 columns, so each segment begins one column late: pieces must "
     "overlap by one column", ("range(...)", "range(start, L + 1, T + 1)")),
    ("your loop does not end: advance by T, and stop when no input is left",
     ("range(...)", "range(start, start + 99 * T, T)")),
    ("you split the lanes, not the columns: each segment has a piece of ALL lanes",
     "yield stream[t:end].long(), stream[t + 1 : end + 1].long()"),
    ("x and y are swapped: y is what follows x", "yield y, x"),
    ("the targets are not shifted: y is x itself, and the model would learn to copy", "yield x, x"),
    ("the targets are shifted twice: y is one token further than x, not two",
     "y = stream[:, t + 2 : end + 2].long()"),
    ("the last column is used as an input: it is only a target", "L = stream.shape[1]"),
    ("the last, shorter segment is missing: its tokens count as well",
     ("range(...)", "range(start, L - T + 1, T)")),
    ("the last segment is empty: stop when no input is left",
     ("range(...)", "range(start, L + 1, T)")),
    ("`start` is ignored: the first column that is read is column `start`",
     ("range(...)", "range(0, L, T)")),
)
TABLE["sinusoid"] = (
    ("sines and cosines are interleaved: here all sines come first, then all cosines",
     "return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)"),
    ("the cosines come first: return sines, then cosines",
     "return torch.cat([angle.cos(), angle.sin()], -1)"),
    ("positions and frequencies are swapped: each row is one position",
     "return torch.cat([angle.sin(), angle.cos()], -1).T"),
    ("the cosines are below the sines: concatenate along the last dimension", ("dim=-1", "dim=0")),
    ("the frequencies decrease half as fast as they should: the exponent is -2k/D, not -k/D",
     ("D, 2,", "D // 2,")),
    ("the frequencies increase: the exponent must be negative", ("-two_k", "two_k")),
    ("row r encodes r; it must encode position[r]",
     ("position.double()", "torch.arange(len(position)).double()")),
    ("positions and frequencies need separate axes: (n, 1) times (D/2,) is (n, D/2)",
     ("[:, None]", "")),
    ("test_float64_is_returned", (", device=position.device", "")),
)
