"""SPOILERS.  Mistakes in the exercises of lesson 1 (see mistakes.py)."""
X, Y = "x = stream[:, t:end].long()\n", "        y = stream[:, t + 1 : end + 1].long()\n"
YIELD = f"{X}{Y}        yield x, y"

TABLE = {}
TABLE["lanes"] = (
    ("the lanes do not share a token: the target of a lane's last input is the first token of the "
     "next lane, which begins at b * L",
     ("b * L : (b + 1) * L + 1", "b * (L + 1) : (b + 1) * (L + 1)")),
    ("the last column is missing: the last input of a lane has its target in the next lane, so a "
     "lane is L + 1 tokens and shares one with its neighbour",
     ("tokens[b * L : (b + 1) * L + 1]", "tokens[b * L : (b + 1) * L]")),
    ("the tokens are dealt out in turn, so every lane is a text that nobody wrote: a lane is one "
     "contiguous piece of the stream",
     ("tokens[b * L : (b + 1) * L + 1]", "tokens[b::B][: L + 1]")),
    ("the lanes are right, but stand as columns: (B, L + 1) has a lane in each row",
     ("torch.stack(rows)", "torch.stack(rows, dim=1)")),
    ("these are lanes of different lengths: L is (n - 1) // B, rounded down, so that the last "
     "lane has a target, too", ("(len(tokens) - 1) // B", "len(tokens) // B")),
    ("one lane after the other stands in a single row: (B, L + 1) has a lane in each row",
     ("torch.stack(", "torch.cat(")),
    ("B = 0 must be refused with a ValueError, before anything is divided by it",
     (" if B > 0 else 0", "")),
    ("the lanes stand as columns: (B, L + 1) has a lane in each row, and each is L + 1 tokens, "
     "the last of them a target only", """
def lanes(tokens, B):
    return tokens[: len(tokens) // B * B].view(B, -1).t()
"""),
    ("this is one long row, or a stream that is not cut: each lane is a row of its own, (B, L + "
     "1)", """
def lanes(tokens, B):
    return tokens[: (len(tokens) - 1) // B * B]
"""),
)
TABLE["segments"] = (
    ("nothing is returned: use `yield`", """
def segments(stream, T, start=0): pass
"""),
    ("use `yield`, not `return`: the segments are made one at a time",
     (YIELD, f"{X}{Y}        return x, y")),
    ("this cuts the lanes, not the columns: each segment holds a piece of ALL lanes",
     (YIELD, "yield stream[t:end].long(), stream[t + 1 : end + 1].long()")),
    ("x and y have changed places: y is what comes after x",
     (YIELD, "yield stream[:, t + 1 : end + 1].long(), stream[:, t:end].long()")),
    ("the targets are not shifted: y is x itself, and the model would learn to copy",
     ("t + 1 : end + 1", "t:end")),
    ("the targets are shifted twice: y is one token further than x, not two",
     ("t + 1 : end + 1", "t + 2 : end + 2")),
    ("the last column is used as an input: it is only a target",
     ("stream.shape[1] - 1", "stream.shape[1]")),
    ("the last, shorter segment is lost: its tokens count as well",
     ("range(start, L, T)", "range(start, L - T + 1, T)")),
    ("at the end comes an empty segment: where no input is left, there is none",
     ("range(start, L, T)", "range(start, L + 1, T)")),
    ("`start` is ignored: the first column that is read is column `start`",
     ("range(start, L, T)", "range(0, L, T)")),
)
TABLE["sinusoid"] = (
    ("sines and cosines are interleaved: here all sines come first, then all cosines",
     ("torch.cat([angle.sin(), angle.cos()], dim=-1)",
      "torch.stack([angle.sin(), angle.cos()], -1).flatten(1)")),
    ("the cosines stand first: sines, then cosines",
     ("[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]")),
    ("positions and frequencies have changed places: a row is a position",
     ("torch.cat([angle.sin(), angle.cos()], dim=-1)",
      "torch.cat([angle.sin(), angle.cos()], dim=-1).T")),
    ("the cosines stand below the sines: join them along the last dimension", ("dim=-1", "dim=0")),
    ("the frequencies fall half as fast as they should: the exponent is -2k/D, not -k/D",
     ("arange(0, D, 2, ", "arange(0, D // 2, ")),
    ("the frequencies grow: the exponent is negative", ("(-two_k", "(two_k")),
    ("row r encodes r, should encode position[r]",
     ("position.double()[:, None]", "torch.arange(len(position)).double()[:, None]")),
    ("positions and frequencies need an axis each: (n, 1) times (D/2,) is (n, D/2)",
     ("[:, None]", "")),
    ("test_an_odd_width_is_refused", ("if D % 2:", "if D < 0:")),
)
