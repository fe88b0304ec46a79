"""SPOILERS.  Mistakes in the exercises of lesson 5 (see mistakes.py)."""
from course.mistakes import M
from course.mistakes_05_generation import TABLE as GENERATION

# ---- attention_mask ------------------------------------------------------------------------------

MASKS = (
    M("attention_mask", "same_length is ignored: with it keys more than M back are masked",
      ("if same_length", "if False")),
    M("attention_mask", "keys far back are masked although same_length is off",
      ("if same_length", "if True")),
    M("attention_mask", "each query sees M keys, should be M + 1: itself and M before it; a key "
      "exactly M back must be seen", ("distance > M", "distance >= M"), bug=11),
    M("attention_mask", "each query sees M keys, should be M + 1: itself and M before it; a key "
      "exactly M back must be seen", """
def attention_mask(T, m, M, same_length, device=None):
    ones = torch.ones(T, m + T, dtype=torch.bool, device=device)
    if not same_length:
        return ones.triu(1 + m)
    beyond = m + T - M
    shift = T - beyond if beyond > 0 else T
    return ones.triu(1 + m) | ones.tril(-shift)
""", bug=11),
    M("attention_mask", "each query sees M + 2 keys, one too many", ("distance > M",
                                                                  "distance > M + 1"), bug=11),
    M("attention_mask", "m, the rows held so far, was taken for M, the limit",
      ("distance > M", "distance > m")),
    M("attention_mask", "T, the segment length, was taken for M", ("distance > M", "distance > T"),
      bug=18),
    M("attention_mask", "the memory is forgotten: query i is key m + i", ("m + i - j", "i - j"),
      bug=10),
    M("attention_mask", "query i is taken for key M + i: the memory holds m rows so far",
      ("m + i - j", "M + i - j")),
    M("attention_mask", "M, the limit, was taken for m, the rows that the memory holds by now: "
      "there are m + T keys", ("torch.arange(m + T", "torch.arange(M + T"),
      ("m + i - j", "M + i - j"), bug=18),
    M("attention_mask", "a slice ends before 0, which counts from the end: the first queries may "
      "have no key that is too far back", """
def attention_mask(T, m, M, same_length, device=None):
    mask = torch.ones(T, m + T, dtype=torch.bool, device=device).triu(m + 1)
    for i in range(T):
        if same_length:
            mask[i, : m + i - M] = True
    return mask
"""),
    M("attention_mask", "True and False are exchanged: True means masked",
      ("(distance < 0) | (distance > M)", "(distance >= 0) & (distance <= M)"),
      ("return distance < 0", "return distance >= 0")),
    M("attention_mask", "nothing is masked: no key is too far back AND in the future, it is one OR "
      "the other", ("(distance < 0) | (", "(distance < 0) & (")),
    M("attention_mask", "nothing is masked: at least the future must be", """
def attention_mask(T, m, M, same_length, device=None):
    return torch.zeros(T, m + T, dtype=torch.bool, device=device)
"""),
    M("attention_mask", "only far keys are masked, and the future shows",
      ("(distance < 0) | (distance > M)", "distance > M")),
    M("attention_mask", "one key of the future shows: a query sees nothing after itself",
      ("(distance < 0) |", "(distance < -1) |"), ("return distance < 0", "return distance < -1")),
    M("attention_mask", "a query does not see itself", ("(distance < 0) |", "(distance <= 0) |"),
      ("return distance < 0", "return distance <= 0")),
    M("attention_mask", "the memory is cut to M rows once for all queries: the limit moves on with "
      "each query", ("(distance > M)", "(j < m - M)")),
    M("attention_mask", "only keys of the memory are masked when they are far back: the limit "
      "holds for those of the segment, too", ("(distance > M)", "(distance > M) & (j < m)")),
    M("attention_mask", "far keys are masked in the segment only: the limit holds for the memory, "
      "too",
      ("(distance > M)", "(distance > M) & (j >= m)")),
    M("attention_mask", "queries and keys have changed places: each row belongs to a query",
      ("return distance < 0", "return (distance < 0).T"),
      ("return (distance < 0) | (distance > M)", "return ((distance < 0) | (distance > M)).T")),
    M("attention_mask", "test_the_mask_is_bool", ("return (distance < 0) | (distance > M)",
                                              "return ((distance < 0) | (distance > M)).float()")),
    M("attention_mask", "test_the_mask_stands_on_the_device",
      ("torch.arange(T, device=device)", "torch.arange(T)")),
    M("attention_mask", "test_the_mask_stands_on_the_device",
      ("torch.arange(T, device=device)", "torch.arange(T)"),
      ("torch.arange(m + T, device=device)", "torch.arange(m + T)")),
)

# ---- distance_encoding --------------------------------------------------------------------------

NO_EFFECT = ("clamp_len has no effect: every DISTANCE beyond it becomes clamp_len (clamp gives a "
             "new tensor, clamp_ changes the old one)")
CLAMP = "    if clamp_len > 0:\n        distance = distance.clamp(max=clamp_len)\n"


def encodes(sentence, distances, bug=0):
    """Another choice of distances where there is a clamp; `limit` is clamp_len, or K if none."""
    other = f"    limit = clamp_len if clamp_len > 0 else K\n    distance = {distances}\n"
    return M("distance_encoding", sentence, (CLAMP, other), bug=bug)


DISTANCES = (
    M("distance_encoding", "your distances ascend; they must descend, from K - 1 in the first row "
      "to 0", ("torch.arange(K - 1, -1, -1, device=device)", "torch.arange(K, device=device)"),
      bug=2),
    M("distance_encoding", "the distances run from K to 1: the last row must be distance 0",
      ("K - 1, -1, -1", "K, 0, -1")),
    M("distance_encoding", "distance 0 is missing: a query sees itself as well",
      ("K - 1, -1, -1", "K - 1, 0, -1")),
    M("distance_encoding", "the largest distance, K - 1, is missing",
      ("K - 1, -1, -1", "K - 2, -1, -1")),
    M("distance_encoding", "rows and columns have changed places: one row for each distance",
      ("sinusoid(distance, D)", "sinusoid(distance, D).T")),
    encodes(NO_EFFECT, "distance"),
    M("distance_encoding", NO_EFFECT,
      (CLAMP, ""), ("sinusoid(distance, D)", "sinusoid(distance, D).clamp(max=max(clamp_len, 1))")),
    M("distance_encoding", NO_EFFECT,
      ("distance = distance.clamp", "distance.clamp")),
    M("distance_encoding", "it is clamped from the wrong side: the FAR distances become clamp_len, "
      "the near ones stay as they are", ("clamp(max=clamp_len)", "clamp(min=clamp_len)"), bug=7),
    encodes("the row was clamped, not the distance",
            "K - 1 - torch.arange(K, device=device).clamp(max=limit)", bug=7),
    encodes("the far distances became clamp_len - 1", "distance.clamp(max=limit - 1)"),
    encodes("the far distances became clamp_len + 1", "distance.clamp(max=limit + 1)"),
    encodes("the far distances became 0: they become clamp_len", "distance * (distance <= limit)"),
    encodes("the far distances wrap around: they become clamp_len", "distance % limit"),
    encodes("the far distances wrap around: they become clamp_len", "distance % (limit + 1)"),
    encodes("only the first half of the rows is clamped: every row beyond clamp_len is",
            "torch.cat([distance[: K // 2].clamp(max=limit), distance[K // 2 :]])"),
    encodes("only the second half of the rows is clamped: the far distances stand in the first",
            "torch.cat([distance[: K // 2], distance[K // 2 :].clamp(max=limit)])"),
    encodes("the far distances are not encoded at all: they count as clamp_len, so R has K rows",
            "distance[distance <= limit]"),
    M("distance_encoding", "clamp_len = 0 means no clamp, but here everything became distance 0",
      (CLAMP, "    distance = distance.clamp(max=max(clamp_len, 0))\n")),
    M("distance_encoding", "a negative clamp_len means no clamp, as 0 does", ("clamp_len > 0",
                                                                             "clamp_len != 0")),
    M("distance_encoding", "clamp_len = 0 means no clamp, but here everything became distance 0",
      ("clamp_len > 0", "clamp_len >= 0")),
    M("distance_encoding", "a clamp_len of 0 or less means no clamp",
      ("    if clamp_len > 0:\n    ", "")),
    M("distance_encoding", "test_R_stands_on_the_device", (", device=device)", ")")),
)

# ---- relative_attention -------------------------------------------------------------------------

OWN = """
def attend(self, q, k, value, k_R, u, v, mask):
    content = (q + u[:, None]) @ k.mT
    position = import_module("04_rel_shift").rel_shift((q + v[:, None]) @ k_R.mT)
    score = (content + position) / self.C ** 0.5
    probability = score.masked_fill(mask, -torch.inf).softmax(-1)
    out = self.dropout_attention(probability) @ value
    return torch.cat(out.unbind(1), dim=-1)
"""
SHIFTED = 'import_module("04_rel_shift").rel_shift((q + v[:, None]) @ k_R.mT)'
SHIFT = 'import_module("04_rel_shift").rel_shift'


def A(sentence, *edits, bug=0):
    """An edit of the solution of relative_attention."""
    return M("relative_attention", sentence, *edits, bug=bug)


def own(sentence, *edits, bug=0):
    """An edit of OWN, in which the score is computed without relative_score."""
    text = OWN
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is not once in OWN")
        text = text.replace(old, new)
    return M("relative_attention", sentence, text, bug=bug)


NOT_MASKED = ("nothing is masked: the future shows (masked_fill gives a new tensor, masked_fill_ "
              "changes the old one)")
OVER_KEYS = "a query's probabilities over its KEYS sum to 1"
FINITE = ("masked keys get a large negative number: with scores like these that is not enough; use "
          "-inf")
RESHAPE = ("the heads are joined in the wrong order: (B, H, T, C) must become (B, T, H, C) first, "
           "a reshape alone exchanges no axes")
MIXED = ("the heads are joined in the wrong order: (B, T, C, H) mixes them; one head after the "
         "other is (B, T, H, C)")
SCORE = "lesson_4.relative_score(q, k, k_R, u, v)"
HIDDEN = 'score.masked_fill(mask, float("-inf"))'
JOINED = "out.transpose(1, 2).flatten(2)"

ATTENTION = (
    # ---- the score
    A("u and v are exchanged: u goes with the content (k), v with the position (k_R)",
      ("k_R, u, v)", "k_R, v, u)"), bug=8),
    A("u is used for both: the position has its own bias v", ("k_R, u, v)", "k_R, u, u)"), bug=8),
    A("v is used for both: the content has its own bias u", ("k_R, u, v)", "k_R, v, v)"), bug=8),
    A("u is missing: term (c)", ("k_R, u, v)", "k_R, 0 * u, v)")),
    A("v is missing: term (d)", ("k_R, u, v)", "k_R, u, 0 * v)")),
    A("u and v are missing: terms (c) and (d)", ("k_R, u, v)", "k_R, 0 * u, 0 * v)")),
    A("the scale is missing: divide the score by sqrt(C)", (" / math.sqrt(self.C)", "")),
    A("the scale is 1 / sqrt(D): C, the width of a head, belongs there",
      ("math.sqrt(self.C)", "math.sqrt(self.W_o.out_features)"), bug=9),
    A("the scale is 1 / sqrt(H C): C, the width of ONE head",
      ("math.sqrt(self.C)", "math.sqrt(self.H * self.C)"), bug=9),
    A("the scale is 1 / C, not 1 / sqrt(C)", ("math.sqrt(self.C)", "self.C"), bug=9),
    A("the scale is 1 / sqrt(K): C, the width of a head, belongs there",
      ("math.sqrt(self.C)", "math.sqrt(k.shape[2])")),
    A("the scale is 1 / sqrt(H): C, the width of a head, belongs there",
      ("math.sqrt(self.C)", "math.sqrt(self.H)"), bug=9),
    A("the score is multiplied by sqrt(C), not divided", (" / math.sqrt", " * math.sqrt")),
    A("the probabilities are divided by sqrt(C), not the score: the scale comes before the softmax",
      (" / math.sqrt(self.C)", ""), (".softmax(-1)", ".softmax(-1) / math.sqrt(self.C)")),
    own("only the content part is scaled: 1 / sqrt(C) covers all four terms",
        ("(content + position) / self.C ** 0.5", "content / self.C ** 0.5 + position"), bug=9),
    own("only the position part is scaled: 1 / sqrt(C) covers all four terms",
        ("(content + position) / self.C ** 0.5", "content + position / self.C ** 0.5"), bug=9),
    A("only q is scaled, u and v are not: 1 / sqrt(C) covers all four terms",
      ("score = score / math.sqrt(self.C)", "pass"), ("(q, k,", "(q / math.sqrt(self.C), k,"),
      bug=9),
    own("the position part is not shifted", (SHIFTED, "(q + v[:, None]) @ k_R.mT"), bug=1),
    A("the whole score is shifted once more: relative_score has shifted what is to be shifted",
      (SCORE, f"{SHIFT}({SCORE})")),
    own("the content part was shifted as well: only the position part stands in the wrong columns",
        ("(q + u[:, None]) @ k.mT", f"{SHIFT}((q + u[:, None]) @ k.mT)")),
    own("the content part was shifted and the position part not",
        ("(q + u[:, None]) @ k.mT", f"{SHIFT}((q + u[:, None]) @ k.mT)"),
        (SHIFTED, "(q + v[:, None]) @ k_R.mT")),
    own("the position part is missing: terms (b) and (d)", ("content + position", "content")),
    own("the content part is missing: terms (a) and (c)", ("content + position", "position")),
    A("only term (a), q k^T, is there: relative_score gives all four", (SCORE, "q @ k.mT")),
    own("the position part is one column off: row i goes to the left by T - 1 - i", (
        SHIFTED, "F.pad((q + v[:, None]) @ k_R.mT, (0, 1)).flatten(-2)[..., q.shape[2] :]"
        ".unflatten(-1, mask.shape)"), bug=2),
    own("the position part is one column off: row i goes by T - 1 - i, not less", (
        SHIFTED, "torch.stack([row.roll(i - q.shape[2] + 2, -1) for i, row in "
        "enumerate(((q + v[:, None]) @ k_R.mT).unbind(2))], 2)")),
    own("the position part is one column off: row i goes by T - 1 - i, not more", (
        SHIFTED, "torch.stack([row.roll(i - q.shape[2], -1) for i, row in "
        "enumerate(((q + v[:, None]) @ k_R.mT).unbind(2))], 2)")),
    own("the position part has a column more than there are keys: of the padded numbers the first "
        "T are dropped", (SHIFTED, "F.pad((q + v[:, None]) @ k_R.mT, (1, 0))")),
    A("k_R is read backwards: it comes with descending distances already",
      ("(q, k, k_R,", "(q, k, k_R.flip(1),"), bug=2),
    A("q and k have changed places on the way to relative_score", ("(q, k, k_R,", "(k, q, k_R,")),
    A("k and k_R have changed places on the way to relative_score", ("(q, k, k_R,", "(q, k_R, k,")),
    own("u or v is added along time: (H, C) needs one axis more to meet (B, H, T, C)",
        ("q + u[:, None]", "q + u")),
    own("u or v is added along the lanes: (H, C) needs one axis more, not two, to meet "
        "(B, H, T, C)", ("q + u[:, None]", "q + u[:, None, None]")),
    A("keys and values are exchanged", ("(q, k, k_R,", "(q, value, k_R,"),
      ("(probability) @ value", "(probability) @ k")),
    A("the keys serve as values, too", ("(probability) @ value", "(probability) @ k")),
    # ---- the mask
    A(NOT_MASKED, (HIDDEN, "score")),
    A(NOT_MASKED, ("    probability = " + HIDDEN, f"    {HIDDEN}\n    probability = score")),
    A("what is to be seen is masked, and the other way round",
      ("(mask, float", "(~mask, float")),
    A("what is to be seen is masked, and the other way round",
      (HIDDEN, "torch.where(mask, score, -1e9)"), bug=12),
    A("`mask` is not used: it may hide more than the future", (HIDDEN, "score.masked_fill("
      "torch.ones_like(mask).triu(k.shape[2] - q.shape[2] + 1), -torch.inf)")),
    A("mask is (T, K), the score (B, H, T, K): an index needs `...` in front, masked_fill needs "
      "nothing", ("    probability = " + HIDDEN,
                  "    score[mask] = -torch.inf\n    probability = score")),
    A("masked keys get the score +inf: the softmax makes NaN of it", ('float("-inf")',
                                                                    'float("inf")')),
    own("the position part is not masked: add it BEFORE the mask, its upper cells are leftovers",
        ("(content + position) /", "(content.masked_fill(mask, 0) + position) /"),
        ("score.masked_fill(mask, -torch.inf)", "score"), bug=13),
    A("masked keys get a score of about 0: a score of 0 is not a probability of 0",
      ('float("-inf")', "1e-12"), bug=12),
    A("masked keys get a score of about 0: a score of 0 is not a probability of 0",
      (HIDDEN, "(score * ~mask)"), bug=12),
    A("masked probabilities are set to 0 after the softmax: the others then do not sum to 1",
      (HIDDEN, "score"), (".softmax(-1)", ".softmax(-1).masked_fill(mask, 0.0)")),
    A("the mask is taken from the score after the softmax: masked keys get -inf before it",
      (HIDDEN, "score"), (".softmax(-1)", '.softmax(-1).masked_fill(mask, float("-inf"))')),
    *(A(FINITE, ('float("-inf")', fill), bug=12) for fill in ("-1e3", "-1e4", "-1e9", "-1e30")),
    A("test_equal_scores", (HIDDEN, "(score + mask * -math.inf)")),
    # ---- the softmax, the dropout
    A(f"the softmax runs over the queries: {OVER_KEYS}", (".softmax(-1)", ".softmax(-2)")),
    A(f"the softmax runs over the heads: {OVER_KEYS}", (".softmax(-1)", ".softmax(1)")),
    A(f"the softmax runs over the lanes: {OVER_KEYS}", (".softmax(-1)", ".softmax(0)")),
    A("e to the power of scores as low as these is 0, and 0 / 0 is NaN: take each row's maximum "
      "away first, as softmax does", (HIDDEN + ".softmax(-1)", "score.exp() * ~mask\n"
      "    probability = probability / probability.sum(-1, keepdim=True)")),
    A("there is no softmax: the scores themselves, among them -inf, are taken for weights",
      (".softmax(-1)", "")),
    A("this is the logarithm of the softmax: the values are weighted with the probabilities "
      "themselves", (".softmax(-1)", ".log_softmax(-1)")),
    A("dropout_attention is not called: it stands between the softmax and the values",
      ("self.dropout_attention(probability)", "probability")),
    A("dropout_attention stands after the values, should be between the softmax and the values", (
        "self.dropout_attention(probability) @ value",
        "self.dropout_attention(probability @ value)")),
    A("dropout_attention gets the scores, should get the probabilities", (
        "self.dropout_attention(probability)", "probability"), (HIDDEN + ".softmax(-1)",
        'self.dropout_attention(score.masked_fill(mask, float("-inf"))).softmax(-1)')),
    A("dropout_attention gets the values, should get the probabilities", (
        "self.dropout_attention(probability) @ value",
        "probability @ self.dropout_attention(value)")),
    A("dropout_attention is called, but what it gives is not used", (
        "    out = self.dropout_attention(probability) @ value",
        "    self.dropout_attention(probability)\n    out = probability @ value")),
    # ---- the heads, the gradient
    A(RESHAPE, (JOINED, "out.reshape(len(q), q.shape[2], -1)")),
    A(MIXED, (JOINED, "out.permute(0, 2, 3, 1).flatten(2)")),
    A("the heads are not joined: (B, T, H, C) becomes (B, T, H * C)",
      (JOINED, "out.transpose(1, 2)")),
    A("the heads are not joined: (B, H, T, C) becomes (B, T, H * C)", (JOINED, "out")),
    A("the heads are added up or averaged: they stand side by side, (B, T, H * C)",
      (JOINED, "out.sum(1)")),
    A("the heads are added up or averaged: they stand side by side, (B, T, H * C)",
      (JOINED, "out.mean(1)")),
    A("view refuses what transpose leaves behind: reshape and flatten copy it",
      (JOINED, "out.transpose(1, 2).view(len(q), q.shape[2], -1)")),
    A("W_o is applied here, and once more where this function is called",
      (JOINED, f"self.W_o({JOINED})")),
    *(A("test_the_gradient_reaches_every_input", (old, new)) for old, new in (
        ("(q, k, k_R,", "(q.detach(), k, k_R,"), ("(q, k, k_R,", "(q, k, k_R.detach(),"),
        ("float(\"-inf\")).softmax(-1)", "float(\"-inf\")).softmax(-1).detach()"))),
)

# ---- layer --------------------------------------------------------------------------------------


def L(sentence, *edits, bug=0):
    """An edit of the solution of layer."""
    return M("layer", sentence, *edits, bug=bug)


FIRST, SECOND = ("self.norm_1(h + self.dropout_output(attended))",
                 "self.norm_2(h + self.dropout_ff(self.W_2(inner)))")
INNER = "self.dropout_inner(self.relu(self.W_1(h)))"
CALL = "self.attention(h, memory, R, u, v, mask)"

LAYER = (
    L("both norms stand at the end: each takes the sum of its own block", ("h = self.norm_1(h + "
      "self.dropout_output(attended))", "h = h + self.dropout_output(attended)"),
      ("self.norm_2(h + self.dropout_ff(self.W_2(inner)))",
       "self.norm_2(self.norm_1(h + self.dropout_ff(self.W_2(inner))))")),
    # ---- sums and norms
    L("the norms stand before the blocks (pre-norm): this layer normalises each SUM", """
def forward(self, h, *past):
    h = h + self.dropout_output(self.attention(self.norm_1(h), *past))
    inner = self.dropout_inner(self.relu(self.W_1(self.norm_2(h))))
    return h + self.dropout_ff(self.W_2(inner))
"""),
    L("norm_1 stands before the attention (pre-norm): it normalises the SUM",
      (CALL, "self.attention(self.norm_1(h), memory, R, u, v, mask)"),
      (FIRST, "h + self.dropout_output(attended)")),
    L("norm_2 stands before the feed-forward network (pre-norm): it normalises the SUM",
      ("self.W_1(h)", "self.W_1(self.norm_2(h))"),
      (SECOND, "h + self.dropout_ff(self.W_2(inner))")),
    L("h is not added to the attention's result: the first residual is missing",
      ("norm_1(h + ", "norm_1(")),
    L("the second residual is missing: what norm_1 gave is added to the feed-forward's result",
      ("norm_2(h + ", "norm_2(")),
    L("both residuals are missing", ("norm_1(h + ", "norm_1("), ("norm_2(h + ", "norm_2(")),
    L("your second sum adds the layer's input again; it must add what norm_1 gave", """
def forward(self, h, *past):
    o = self.norm_1(h + self.dropout_output(self.attention(h, *past)))
    return self.norm_2(h + self.dropout_ff(self.W_2(self.dropout_inner(F.relu(self.W_1(o))))))
"""),
    L("the feed-forward network reads the layer's input; it must read what norm_1 gave", """
def forward(self, h, *past):
    o = self.norm_1(h + self.dropout_output(self.attention(h, *past)))
    return self.norm_2(o + self.dropout_ff(self.W_2(self.dropout_inner(F.relu(self.W_1(h))))))
"""),
    L("the second block knows nothing of the first: its sum and its input are what norm_1 gave", """
def forward(self, h, *past):
    self.norm_1(h + self.dropout_output(self.attention(h, *past)))
    return self.norm_2(h + self.dropout_ff(self.W_2(self.dropout_inner(F.relu(self.W_1(h))))))
"""),
    L("norm_1 and norm_2 are exchanged", ("self.norm_1(", "self.norm_2 ("),
      ("self.norm_2(", "self.norm_1(")),
    L("norm_1 is used twice", ("self.norm_2(", "self.norm_1(")),
    L("norm_2 is used twice", ("self.norm_1(", "self.norm_2(")),
    L("norm_1 is missing", ("self.norm_1(", "(")),
    L("norm_2 is missing", ("self.norm_2(", "(")),
    L("both norms are missing", ("self.norm_1(", "("), ("self.norm_2(", "(")),
    L("the residual is added after the norm, twice: each norm is of the SUM",
      (FIRST, "h + self.norm_1(self.dropout_output(attended))"),
      (SECOND, "h + self.norm_2(self.dropout_ff(self.W_2(inner)))")),
    L("the first residual is added after norm_1: the norm is of the SUM",
      (FIRST, "h + self.norm_1(self.dropout_output(attended))")),
    L("the second residual is added after norm_2: the norm is of the SUM",
      (SECOND, "h + self.norm_2(self.dropout_ff(self.W_2(inner)))")),
    L("the norms stand before the blocks as well as after the sums",
      (CALL, "self.attention(self.norm_1(h), memory, R, u, v, mask)"),
      ("self.W_1(h)", "self.W_1(self.norm_2(h))")),
    # ---- the feed-forward network
    L("ReLU is missing: two linear maps in a row are one",
      ("self.relu(self.W_1(h))", "self.W_1(h)")),
    L("the network between W_1 and W_2 is ReLU here, not GELU", ("self.relu(", "F.gelu(")),
    L("ReLU stands before W_1, should be between W_1 and W_2",
      ("self.relu(self.W_1(h))", "self.W_1(self.relu(h))")),
    L("ReLU stands after W_2, should be between W_1 and W_2", ("self.relu(self.W_1(h))",
      "self.W_1(h)"), ("self.W_2(inner)", "self.relu(self.W_2(inner))")),
    L("the feed-forward part is missing", (f"    return {SECOND}", "    return h")),
    # ---- the dropouts
    L("dropout_output is missing, after the attention",
      ("self.dropout_output(attended)", "attended")),
    L("dropout_inner is missing, between ReLU and W_2", (INNER, "self.relu(self.W_1(h))")),
    L("dropout_ff is missing, after W_2", ("self.dropout_ff(", "(")),
    L("all three dropouts are missing", ("self.dropout_output(attended)", "attended"),
      (INNER, "self.relu(self.W_1(h))"), ("self.dropout_ff(", "(")),
    L("dropout_output and dropout_ff are exchanged", ("self.dropout_output(", "self.dropout_ff ("),
      ("self.dropout_ff(", "self.dropout_output(")),
    L("dropout_inner and dropout_ff are exchanged", ("self.dropout_inner(", "self.dropout_ff ("),
      ("self.dropout_ff(", "self.dropout_inner(")),
    L("dropout_output is used twice: after W_2 stands dropout_ff",
      ("self.dropout_ff(", "self.dropout_output(")),
    L("the dropout stands around the whole sum: only around what the attention made",
      ("h + self.dropout_output(attended)", "self.dropout_output(h + attended)")),
    L("the dropout stands around the whole second sum: only around what W_2 made",
      ("h + self.dropout_ff(self.W_2(inner))", "self.dropout_ff(h + self.W_2(inner))")),
    L("both dropouts stand around the whole sums: each only around what its block made",
      ("h + self.dropout_output(attended)", "self.dropout_output(h + attended)"),
      ("h + self.dropout_ff(self.W_2(inner))", "self.dropout_ff(h + self.W_2(inner))")),
    L("dropout_output stands after norm_1: it belongs to what the attention made, before the sum",
      (FIRST, "self.dropout_output(self.norm_1(h + attended))")),
    L("dropout_ff stands after norm_2: it belongs to what W_2 made, before the sum",
      (SECOND, "self.dropout_ff(self.norm_2(h + self.W_2(inner)))")),
    L("dropout_output and dropout_ff stand after the norms: they belong before the sums",
      (FIRST, "self.dropout_output(self.norm_1(h + attended))"),
      (SECOND, "self.dropout_ff(self.norm_2(h + self.W_2(inner)))")),
    L("dropout_output stands before the attention, should be after it", """
def forward(self, h, *past):
    z = self.dropout_output(h)
    h = self.norm_1(z + self.attention(z, *past))
    return self.norm_2(h + self.dropout_ff(self.W_2(self.dropout_inner(F.relu(self.W_1(h))))))
"""),
    L("dropout_output stands before the attention, should be after it",
      (CALL, "self.attention(self.dropout_output(h), memory, R, u, v, mask)"),
      ("self.dropout_output(attended)", "attended")),
    L("dropout_inner stands before W_1, should be between ReLU and W_2",
      (INNER, "self.relu(self.W_1(self.dropout_inner(h)))")),
    L("dropout_inner stands after W_2, should be between ReLU and W_2",
      (INNER, "self.relu(self.W_1(h))"),
      ("self.W_2(inner)", "self.dropout_inner(self.W_2(inner))")),
    # ---- the attention, the gradient
    L("memory and R are exchanged on the way to the attention",
      (CALL, "self.attention(h, R, memory, u, v, mask)")),
    L("u and v are exchanged on the way to the attention",
      (CALL, "self.attention(h, memory, R, v, u, mask)"), bug=8),
    L("the attention is given no memory: it joins memory and segment itself",
      (CALL, "self.attention(h, memory[:, :0], R, u, v, mask)")),
    L("test_h_stays_as_it_was", (f"h = {FIRST}",
                                 "h += self.dropout_output(attended)\n    h = self.norm_1(h)")),
    L("test_the_gradient_reaches_every_part", ("(attended))", "(attended.detach()))")),
    L("test_the_gradient_reaches_every_part", (INNER, INNER.replace("h)", "h.data)"))),
)

TABLE = MASKS + DISTANCES + ATTENTION + LAYER + GENERATION
