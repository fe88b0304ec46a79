"""Wrong solutions that students and public code make, and right ones in another form: as data.

    WRONG    a mistake as an edit of the shipped solution, and words that its diagnosis must hold
    RIGHT    whole functions that look different and must pass

test_the_tests.py tries them all on checks.py.  To add one, add a line here: to a new exercise
belong at least three wrong solutions and two right ones.
"""
from dataclasses import dataclass

# bugs that stood in public code for months or years, mostly unseen: the loss still falls
BUGS = {
    1: "the shift drops the last row in place of the first",
    2: "distances ascend along the keys",
    3: "the memory's offset is forgotten: distance i - j",
    5: "a shift that is right only for T = K, or for T = 1",
    7: "clamp_len clamps from the wrong side, or the key's number",
    8: "u and v swapped, or one for both",
    9: "only the content terms are scaled, or by 1 / sqrt(D)",
    10: "the causal diagonal begins at 1, not at 1 + M",
    11: "same_length is off by one",
    12: "hidden scores are filled with a small or a merely large number",
    13: "the position term is not hidden where the shift leaves leftovers",
    14: "the stop-gradient is dropped",
    15: "the memory is put behind the segment",
    16: "memory[-0:] keeps everything if mem_len is 0",
    17: "a memory of zeros that is attended to, in place of none",
    18: "mem_len and the segment length are mixed up",
    19: "the prompt is fed again although the memory holds it",
    20: "lanes are not contiguous, or neighbours are mixed",
    21: "targets are shifted twice or not at all",
    22: "a mean of segment means, though the last segment is shorter",
    24: "resuming forgets the position or the memory",
}


@dataclass(frozen=True)
class Mistake:
    """One wrong solution."""

    exercise: str
    words: str  # must stand in the first line of the message: the right diagnosis
    edits: tuple  # (old, new), (old, new), ...; old occurs once.  Or one text: the whole function
    bug: int = 0  # which of BUGS it is, if any


def M(exercise, words, *edits, bug=0):
    """A line of the table: pairs of old and new text, or the whole function as one text."""
    return Mistake(exercise, words, edits, bug)


CUT_THEN_JOIN = """
def update_memory(memory, h, M):
    m, T = memory.shape[1], h.shape[1]
    old, new = memory[:, max(0, m + T - M) :], h[:, max(0, T - M) :]
    return torch.cat([old, new], dim=1).detach()
"""

def own(old, new):
    """OWN_SCORE with one pair of old and new text."""
    if OWN_SCORE.count(old) != 1:
        raise ValueError(f"{old!r} is not once in OWN_SCORE")
    return OWN_SCORE.replace(old, new)


OWN_SCORE = """
def attend(self, q, k, value, Q, u, v, hidden):
    content = (q + u[:, None]) @ k.mT
    position = import_module("04_rel_shift").rel_shift((q + v[:, None]) @ Q.mT)
    score = (content + position) / self.C ** 0.5
    probability = score.masked_fill(hidden, -torch.inf).softmax(-1)
    out = self.dropout_attention(probability) @ value
    return torch.cat(out.unbind(1), dim=-1)
"""

WRONG = (
    # ---- lesson 1 -------------------------------------------------------------------------------
    M("lanes", "the lanes do not share a token", """
def lanes(tokens, B):
    if B < 1 or len(tokens) <= B:
        raise ValueError("too short")
    n = len(tokens) // B
    return tokens[: n * B].view(B, n)
"""),
    M("lanes", "the last column is missing", ("(b + 1) * L + 1]", "(b + 1) * L]")),
    M("lanes", "the tokens are dealt out in turn",
      ("tokens[b * L : (b + 1) * L + 1]", "tokens[b::B][: L + 1]"), bug=20),
    M("lanes", "dealt out in turn, and then the targets, too", """
def lanes(tokens, B):
    L = (len(tokens) - 1) // B
    x, y = tokens[: B * L].view(L, B).T, tokens[1 : B * L + 1].view(L, B).T
    return torch.cat([x, y[:, -1:]], dim=1)
"""),
    M("lanes", "the lanes do not share a token",
      ("b * L : (b + 1) * L + 1", "b * (L + 1) : (b + 1) * (L + 1)"), bug=20),
    M("lanes", "stand as columns", ("for b in range(B)])", "for b in range(B)], dim=1)")),
    M("lanes", "lanes of different lengths", ("(len(tokens) - 1) // B", "len(tokens) // B")),
    M("lanes", "their type is torch.int64, should be torch.uint8",
      ("[tokens[b * L", "[tokens.long()[b * L")),
    M("lanes", "must be refused with a ValueError", ("if B < 1:", "if B < 0:")),
    M("lanes", "must be refused with a ValueError", ("if L < 1:", "if L < 0:")),

    M("segments", "the last column is used as an input",
      ("stream.shape[1] - 1", "stream.shape[1]")),
    M("segments", "the last, shorter segment is lost",
      ("range(start, L, T)", "range(start, L - T + 1, T)")),
    M("segments", "`start` is ignored", ("range(start, L, T)", "range(0, L, T)"), bug=24),
    M("segments", "the targets are not shifted", ("t + 1 : end + 1", "t:end"), bug=21),
    M("segments", "the targets are shifted twice", ("t + 1 : end + 1", "t + 2 : end + 2"), bug=21),
    M("segments", "should be int64",
      ("yield stream[:, t:end].long(), stream[:, t + 1 : end + 1].long()",
       "yield stream[:, t:end], stream[:, t + 1 : end + 1]")),
    M("segments", "use `yield`", """
def segments(stream, T, start=0):
    if T < 1:
        raise ValueError(T)
    x, y = stream[:, start:-1].long(), stream[:, start + 1 :].long()
    return list(zip(x.split(T, dim=1), y.split(T, dim=1)))
"""),
    M("segments", "begin one token after each other", ("range(start, L, T)", "range(start, L)")),
    M("segments", "cuts the lanes, not the columns",
      ("stream[:, t:end].long(), stream[:, t + 1 : end + 1]",
       "stream[t:end].long(), stream[t + 1 : end + 1]"), bug=20),
    M("segments", "T = -3 must be refused", ("if T < 1:", "if T == 0:")),

    M("sinusoid", "interleaved", ("torch.cat([angle.sin(), angle.cos()], dim=-1)",
                                  "torch.stack([angle.sin(), angle.cos()], -1).flatten(1)")),
    M("sinusoid", "the cosines stand first", ("[angle.sin(), angle.cos()]",
                                              "[angle.cos(), angle.sin()]")),
    M("sinusoid", "the exponent is -2k/D, not -k/D", ("arange(0, D, 2, ", "arange(0, D // 2, ")),
    M("sinusoid", "the frequencies grow", ("(-two_k", "(two_k")),
    M("sinusoid", "use float64", ("dtype=torch.float64", "dtype=torch.float32"),
      ("position.double()", "position.float()")),
    M("sinusoid", "in torch.float32",
      ("dtype=torch.float64, ", ""), ("position.double()", "position")),
    M("sinusoid", "something on the way is float32", ("dtype=torch.float64, ", "")),
    M("sinusoid", "made float64 too late", """
def sinusoid(position, D):
    if D % 2:
        raise ValueError(D)
    angle = (position[:, None] * 10000 ** (-2 * torch.arange(D // 2) / D)).double()
    return torch.cat([angle.sin(), angle.cos()], -1)
"""),
    M("sinusoid", "row r encodes r", ("position.double()[:, None]",
                                      "torch.arange(len(position)).double()[:, None]")),
    M("sinusoid", "k/(D/2 - 1)", ("(-two_k / D)", "(-two_k / max(1, D - 2))")),
    M("sinusoid", "an odd D = 7 must be refused", ("if D % 2:", "if D < 0:")),

    # ---- lesson 2 -------------------------------------------------------------------------------
    M("update_memory", "although M = 0", ("joined[:, first:]", "joined[:, -M:]"), bug=16),
    M("update_memory", "the gradient is not stopped", (".detach()", ""), bug=14),
    M("update_memory", "old and new have changed places: time runs",
      ("[memory, h]", "[h, memory]"), bug=15),
    M("update_memory", "old and new have changed places: the old rows come first",
      CUT_THEN_JOIN.replace("[old, new]", "[new, old]"), bug=15),
    M("update_memory", "the oldest rows are kept", ("joined[:, first:]", "joined[:, :M]")),
    M("update_memory", "M, not T", ("shape[1] - M", "shape[1] - h.shape[1]"), bug=18),
    M("update_memory", "counts from the end",
      ("max(0, joined.shape[1] - M)", "joined.shape[1] - M")),
    M("update_memory", "rows of zeros", ("[memory, h]",
      "[h.new_zeros(h.shape[0], max(0, M - memory.shape[1] - h.shape[1]), h.shape[2]), memory, h]"
      ), bug=17),
    M("update_memory", "the old memory is thrown away", ("[memory, h]", "[h]")),
    M("update_memory", "detached in place", (".detach()", ".detach() + 0 * h.detach_().sum()")),
    M("update_memory", "changed in place", """
def update_memory(memory, h, M):
    m, T = memory.shape[1], h.shape[1]
    if m != M or T > M or T == 0:
        return torch.cat([memory, h], 1)[:, max(0, m + T - M) :].detach()
    memory[:, : M - T] = memory[:, T:].clone()
    memory[:, M - T :] = h
    return memory.detach()
"""),

    M("causal_mask", "the offset M is forgotten", ("j > M + i", "j > i"), bug=10),
    M("causal_mask", "does not see itself", ("j > M + i", "j >= M + i")),
    M("causal_mask", "one key of the future shows", ("j > M + i", "j > M + i + 1"), bug=10),
    M("causal_mask", "True means hidden", ("j > M + i", "j <= M + i")),
    M("causal_mask", "only the segment's T keys", """
def causal_mask(T, M, device=None):
    return torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
"""),
    M("causal_mask", "the memory is hidden, too", ("j > M + i", "(j > M + i) | (j < M)")),
    M("causal_mask", "should be bool", ("j > M + i", "(j > M + i).int()")),
    M("causal_mask", "`device` is ignored", ("torch.arange(T, device=device)", "torch.arange(T)"),
      ("torch.arange(M + T, device=device)", "torch.arange(M + T)")),
    M("causal_mask", "each row belongs to a query", ("arange(T, device=device)[:, None]",
                                          "arange(T, device=device)"),
      ("arange(M + T, device=device)", "arange(M + T, device=device)[:, None]")),

    M("reach", "N (M + T - 1)", """
def reach(N, T, M):
    return N * (M + T - 1)
"""),
    M("reach", "right only if M is a multiple of T", ("first // T * T - M", "first - M")),
    M("reach", "N (M + T)", """
def reach(N, T, M):
    return N * (M + T)
"""),
    M("reach", "T - 1 is forgotten", ("return T - 1 - first", "return -first")),
    M("reach", "one too far", ("T - 1 - first", "T - first")),
    M("reach", "rounds towards 0", ("first // T * T", "int(first / T) * T")),
    M("reach", "one layer only", ("for _ in range(N):", "if N:")),
    M("reach", "the last layer is missing", ("range(N)", "range(N - 1)")),

    M("gradient_into", "the loss is that of both segments", ("[:, T:].sum()", ".sum()")),
    M("gradient_into", "that is the answer 0, not an error", """
def gradient_into(model, x, y, T):
    inputs, losses, memory = [], [], None
    with model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out)):
        for a, b in zip(x.split(T, 1), y.split(T, 1)):
            logits, memory = model(a, memory)
            losses.append(token_losses(logits, b))
    found = torch.autograd.grad(losses[1].sum(), inputs)
    return [g.abs().max().item() for g in found]
"""),
    M("gradient_into", "the answer there is 0.0", """
def gradient_into(model, x, y, T):
    inputs, losses, memory = [], [], None
    with model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out)):
        for a, b in zip(x.split(T, 1), y.split(T, 1)):
            logits, memory = model(a, memory)
            losses.append(token_losses(logits, b))
    found = torch.autograd.grad(losses[1].sum(), inputs, allow_unused=True)
    return [g if g is None else g.abs().max().item() for g in found]
"""),
    M("gradient_into", "it must be the largest absolute value",
      ("h.grad.abs().max()", "h.grad.max()")),
    M("gradient_into", "the hook on model.embedding is left behind", ("hook.remove()", "pass")),
    M("gradient_into", "the mean of the losses; it must be their sum",
      ("[:, T:].sum()", "[:, T:].mean()")),
    M("gradient_into", "should be floats", ("h.grad.abs().max().item()", "h.grad.abs().max()")),
    M("gradient_into", "that of the first segment", ("[:, T:]", "[:, :T]")),
    M("gradient_into", "with respect to the weights", """
def gradient_into(model, x, y, T):
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    slope, = torch.autograd.grad(loss_2, model.embedding.weight)
    return [slope[part].abs().max().item() for part in x.split(T, 1)]
"""),

    # ---- lesson 3 -------------------------------------------------------------------------------
    M("four_terms", "the memory is forgotten", ("distance = M + i - j", "distance = i - j"), bug=3),
    M("four_terms", "R is read backwards",
      ("distance = M + i - j", "distance = K - 1 - (M + i - j)"),
      bug=2),
    M("four_terms", "u and v are exchanged", ("u @ k[j]", "v @ k[j]"),
      ("v @ (W_kR @", "u @ (W_kR @"), bug=8),
    M("four_terms", "(d) has its own bias", ("v @ (W_kR @", "u @ (W_kR @"), bug=8),
    M("four_terms", "divided by sqrt(C)", ("return terms", "return terms / C ** 0.5"), bug=9),
    M("four_terms", "future keys have no distance", ("range(M + i + 1)", "range(K)")),
    M("four_terms", "future keys have no distance", ("np.full((4, T, K), np.nan)",
                                                     "np.zeros((4, T, K))")),
    M("four_terms", "still NaN", ("range(M + i + 1)", "range(M + i)")),
    M("four_terms", "the memory is forgotten, so cells that count are still NaN",
      ("range(M + i + 1)", "range(i + 1)"), ("distance = M + i - j", "distance = i - j")),
    M("four_terms", "not summed over the width", ("q[i] @ k[j]", "q[i] * k[j]")),
    M("four_terms", "the order is (a), (b), (c), (d)", ("terms[1, i, j]", "terms[2, i, j]"),
      ("terms[2, i, j] = u", "terms[1, i, j] = u")),
    M("four_terms", "you index R by the key", ("distance = M + i - j", "distance = j")),

    # ---- lesson 4 -------------------------------------------------------------------------------
    M("rel_shift_by_index", "that would be right for ascending distances",
      ("j + T - 1 - i", "j + i"), bug=2),
    M("rel_shift_by_index", "one too far", ("j + T - 1 - i", "j + T - i")),
    M("rel_shift_by_index", "beyond the end", (".clamp(max=K - 1)", "")),
    M("rel_shift_by_index", "T, not M, belongs there", ("j + T - 1 - i", "j + K - T - i"), bug=5),
    M("rel_shift_by_index", "gather runs along the wrong axis", ("gather(-1", "gather(-2")),
    M("rel_shift_by_index", "runs around the end", (".clamp(max=K - 1)", " % K")),
    M("rel_shift_by_index", "it must go to the left",
      ("(j + T - 1 - i).clamp(max=K - 1)", "(j - T + 1 + i).clamp(min=0)")),
    M("rel_shift_by_index", "distance 0", ("x.gather(-1, source.expand(x.shape))",
      "x.gather(-1, source.expand(x.shape)).tril(K - T)")),
    M("rel_shift_by_index", "with leading dimensions", (".expand(x.shape)", "")),
    M("rel_shift_by_index", "all rows are moved by T - 1", """
def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    source = (torch.arange(K) + T - 1).clamp(max=K - 1).expand(T, K)
    return x.gather(-1, source.expand(x.shape))
"""),

    M("rel_shift", "did you drop the first row or the last",
      ("x[..., 1:, :]", "x[..., :-1, :]"), bug=1),
    M("rel_shift", "the pad cell goes in front of each row", ("(1, 0)", "(0, 1)")),
    M("rel_shift", "nothing has moved", ("*batch, K + 1, T", "*batch, T, K + 1"),
      ("x[..., 1:, :]", "x[..., :, 1:]")),
    M("rel_shift", "the numbers do not fit", ("*batch, K + 1, T", "*batch, T + 1, K"), bug=5),
    M("rel_shift", "transpose turns the table", ("x.reshape(*batch, K + 1, T)",
                                                 "x.transpose(-1, -2)")),
    M("rel_shift", "leading dimensions", ("*batch, T, K = x.shape", "T, K = x.shape[-2:]"),
      ("x.reshape(*batch, K + 1, T)", "x.reshape(K + 1, T)"),
      ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(T, K)")),
    M("rel_shift", "that would be right for ascending distances", """
def rel_shift(x):
    T = x.shape[-2]
    return torch.stack([x[..., i, :].roll(-i, -1) for i in range(T)], -2)
""", bug=2),
    M("rel_shift", "T, not M, belongs there", """
def rel_shift(x):
    T, K = x.shape[-2:]
    return torch.stack([x[..., i, :].roll(i + T - K, -1) for i in range(T)], -2)
""", bug=5),
    M("rel_shift", "as_strided looks at the memory", """
def rel_shift(x):
    *batch, T, K = x.shape
    return x.as_strided((*batch, T, K), (*x.stride()[:-2], max(1, K - 1), 1),
                        x.storage_offset() + T - 1)
"""),

    # ---- lesson 5 -------------------------------------------------------------------------------
    M("hidden_keys", "a key exactly M back is seen", ("distance > M", "distance >= M"), bug=11),
    M("hidden_keys", "each query sees M keys", """
def hidden_keys(T, m, M, same_length, device=None):
    ones = torch.ones(T, m + T, dtype=torch.bool, device=device)
    if not same_length:
        return ones.triu(1 + m)
    beyond = m + T - M
    shift = T - beyond if beyond > 0 else T
    return ones.triu(1 + m) | ones.tril(-shift)
""", bug=11),
    M("hidden_keys", "the memory is forgotten",
      ("distance = m + i - j", "distance = i - j"), bug=10),
    M("hidden_keys", "T, the segment length, was taken for M", ("distance > M", "distance > T"),
      bug=18),
    M("hidden_keys", "m, the rows held so far, was taken for M", ("distance > M", "distance > m")),
    M("hidden_keys", "query i is taken for key M + i", ("distance = m + i - j",
                                                        "distance = M + i - j")),
    M("hidden_keys", "same_length is ignored", ("if same_length", "if False")),
    M("hidden_keys", "same_length is off", ("if same_length", "if True")),
    M("hidden_keys", "and the future shows", ("(distance < 0) | (distance > M)", "distance > M")),
    M("hidden_keys", "does not see itself", ("(distance < 0) |", "(distance <= 0) |"),
      ("else distance < 0", "else distance <= 0")),
    M("hidden_keys", "nothing is hidden", ("(distance < 0) | (distance > M)",
                                           "(distance < 0) & (distance > M)")),

    M("distance_encoding", "your distances ascend", ("torch.arange(K - 1, -1, -1, device=device)",
                                                    "torch.arange(K, device=device)"), bug=2),
    M("distance_encoding", "clamped from the wrong side", ("clamp(max=clamp_len)",
                                                           "clamp(min=clamp_len)"), bug=7),
    M("distance_encoding", "the row was clamped", ("torch.arange(K - 1, -1, -1, device=device)",
      "torch.arange(K, device=device)"), ("distance.clamp(max=clamp_len)",
      "K - 1 - distance.clamp(max=clamp_len)"),
      ("else distance,", "else K - 1 - distance,"), bug=7),
    M("distance_encoding", "clamp_len has no effect",
      ("distance.clamp(max=clamp_len) if clamp_len > 0 else distance", "distance")),
    M("distance_encoding", "means no clamp", (" if clamp_len > 0 else distance", "")),
    M("distance_encoding", "the last row must be distance 0", ("K - 1, -1, -1", "K, 0, -1")),
    M("distance_encoding", "distance 0 is missing", ("K - 1, -1, -1", "K - 1, 0, -1")),
    M("distance_encoding", "every DISTANCE beyond it",
      ("sinusoid(distance.clamp(max=clamp_len) if clamp_len > 0 else distance, D)",
       "sinusoid(distance, D).clamp(max=max(clamp_len, 1))")),
    M("distance_encoding", "`device` is ignored", (", device=device)", ")")),

    M("relative_attention", "u and v are exchanged", ("Q, u, v)", "Q, v, u)"), bug=8),
    M("relative_attention", "u is used for both", ("Q, u, v)", "Q, u, u)"), bug=8),
    M("relative_attention", "only the content part is scaled", own(
        "(content + position) / self.C ** 0.5", "content / self.C ** 0.5 + position"), bug=9),
    M("relative_attention", "only q is scaled", (
        "(q, k, Q, u, v) / math.sqrt(self.C)", "(q / math.sqrt(self.C), k, Q, u, v)"), bug=9),
    M("relative_attention", "1 / sqrt(D)",
      ("math.sqrt(self.C)", "math.sqrt(self.W_o.out_features)"), bug=9),
    M("relative_attention", "the width of ONE head",
      ("math.sqrt(self.C)", "math.sqrt(self.H * self.C)"), bug=9),
    M("relative_attention", "the scale is missing", (" / math.sqrt(self.C)", "")),
    M("relative_attention", "the position part is not shifted", own(
        'import_module("04_rel_shift").rel_shift((q + v[:, None]) @ Q.mT)',
        "(q + v[:, None]) @ Q.mT"), bug=1),
    M("relative_attention", "only term (a)", ("relative_score(q, k, Q, u, v)", "q @ k.mT")),
    M("relative_attention", "shifted once more", (
        "relative_score(q, k, Q, u, v)",
        'import_module("04_rel_shift").rel_shift(relative_score(q, k, Q, u, v))')),
    M("relative_attention", "is one column off", own(
        'import_module("04_rel_shift").rel_shift((q + v[:, None]) @ Q.mT)',
        "F.pad((q + v[:, None]) @ Q.mT, (0, 1)).flatten(-2)[..., q.shape[2] :].unflatten(-1, "
        "hidden.shape)"), bug=2),
    M("relative_attention", "not less", own(
        'import_module("04_rel_shift").rel_shift((q + v[:, None]) @ Q.mT)',
        "torch.stack([row.roll(i - q.shape[2] + 2, -1) for i, row in "
        "enumerate(((q + v[:, None]) @ Q.mT).unbind(2))], 2)")),
    M("relative_attention", "a column more than there are keys", own(
        'import_module("04_rel_shift").rel_shift((q + v[:, None]) @ Q.mT)',
        "F.pad((q + v[:, None]) @ Q.mT, (1, 0))")),
    M("relative_attention", "relative_score takes q", ("(q, k, Q, u, v)", "(k, q, Q, u, v)")),
    M("relative_attention", "nothing is hidden", (
        'score.masked_fill(hidden, float("-inf"))', "score")),
    M("relative_attention", "masked_fill gives a new tensor", """
def attend(self, q, k, value, Q, u, v, hidden):
    score = relative_score(q, k, Q, u, v) / math.sqrt(self.C)
    score.masked_fill(hidden, -torch.inf)
    p = self.dropout_attention(score.softmax(-1))
    return (p @ value).transpose(1, 2).flatten(2)
"""),
    M("relative_attention", "fill with -inf", ('float("-inf")', "-1e3"), bug=12),
    M("relative_attention", "fill with -inf", ('float("-inf")', "-1e30"), bug=12),
    M("relative_attention", "a score of 0", ('float("-inf")', "1e-12"), bug=12),
    M("relative_attention", "the mask was multiplied by -inf",
      ('score.masked_fill(hidden, float("-inf"))', "(score + hidden * -math.inf)")),
    M("relative_attention", "the position part is not hidden", own(
        "(content + position) / self.C ** 0.5\n    probability = score.masked_fill(hidden, "
        "-torch.inf)", "(content.masked_fill(hidden, 0) + position) / self.C ** 0.5\n"
        "    probability = score"), bug=13),
    M("relative_attention", "a reshape alone exchanges no axes",
      ("out.transpose(1, 2).flatten(2)", "out.reshape(len(q), q.shape[2], -1)")),
    M("relative_attention", "(B, T, C, H) mixes them",
      ("out.transpose(1, 2).flatten(2)", "out.permute(0, 2, 3, 1).flatten(2)")),
    M("relative_attention", "the heads are not joined",
      ("out.transpose(1, 2).flatten(2)", "out.transpose(1, 2)")),
    M("relative_attention", "W_o is applied here",
      ("out.transpose(1, 2).flatten(2)", "self.W_o(out.transpose(1, 2).flatten(2))")),
    M("relative_attention", "keys and values are exchanged",
      ("(q, k, Q,", "(q, value, Q,"), ("(probability) @ value", "(probability) @ k")),
    M("relative_attention", "the keys serve as values",
      ("(probability) @ value", "(probability) @ k")),
    M("relative_attention", "added along time", own("q + u[:, None]", "q + u")),
    M("relative_attention", "added along the lanes", own("q + u[:, None]", "q + u[:, None, None]")),
    M("relative_attention", "the softmax runs over the queries", (".softmax(-1)", ".softmax(-2)")),
    M("relative_attention", "the softmax does not run over the keys",
      (".softmax(-1)", ".softmax(1)")),
    M("relative_attention", "there is no softmax", (".softmax(-1)", "")),
    M("relative_attention", "dropout_attention is not called",
      ("self.dropout_attention(probability)", "probability")),
    M("relative_attention", "should see each of the probabilities", (
        "self.dropout_attention(probability) @ value",
        "self.dropout_attention(probability @ value)")),
    M("relative_attention", "Q is read backwards", ("(q, k, Q,", "(q, k, Q.flip(1),"), bug=2),
    M("relative_attention", "something is detached", ("(q, k, Q,", "(q.detach(), k, Q,")),

    M("layer", "pre-norm", """
def forward(self, h, *past):
    h = h + self.dropout_output(self.attention(self.norm_1(h), *past))
    inner = self.dropout_inner(self.relu(self.W_1(self.norm_2(h))))
    return h + self.dropout_ff(self.W_2(inner))
"""),
    M("layer", "norm_2 stands before the feed-forward network", """
def forward(self, h, *past):
    h = self.norm_1(h + self.dropout_output(self.attention(h, *past)))
    inner = self.dropout_inner(self.relu(self.W_1(self.norm_2(h))))
    return h + self.dropout_ff(self.W_2(inner))
"""),
    M("layer", "the first residual is missing", ("norm_1(h + ", "norm_1(")),
    M("layer", "the second residual is missing", ("norm_2(h + ", "norm_2(")),
    M("layer", "norm_2 is missing", ("self.norm_2(", "(")),
    M("layer", "ReLU is missing", ("self.relu(self.W_1(h))", "self.W_1(h)")),
    M("layer", "dropout_inner is missing", ("self.dropout_inner(self.relu(self.W_1(h)))",
                                            "self.relu(self.W_1(h))")),
    M("layer", "dropout_inner stands before W_1", (
        "self.dropout_inner(self.relu(self.W_1(h)))",
        "self.relu(self.W_1(self.dropout_inner(h)))")),
    M("layer", "dropout_inner stands after W_2", (
        "self.dropout_inner(self.relu(self.W_1(h)))", "self.relu(self.W_1(h))"),
      ("self.W_2(inner)", "self.dropout_inner(self.W_2(inner))")),
    M("layer", "your second sum adds the layer's input", """
def forward(self, h, *past):
    o = self.norm_1(h + self.dropout_output(self.attention(h, *past)))
    return self.norm_2(h + self.dropout_ff(self.W_2(self.dropout_inner(F.relu(self.W_1(o))))))
"""),
    M("layer", "the residual is added after the norm",
      ("self.norm_1(h + self.dropout_output(attended))",
       "h + self.norm_1(self.dropout_output(attended))"),
      ("self.norm_2(h + self.dropout_ff(self.W_2(inner)))",
       "h + self.norm_2(self.dropout_ff(self.W_2(inner)))")),
    M("layer", "the dropout stands around the whole sum",
      ("h + self.dropout_output(attended)", "self.dropout_output(h + attended)")),
    M("layer", "the dropout stands around the whole second sum",
      ("h + self.dropout_ff(self.W_2(inner))", "self.dropout_ff(h + self.W_2(inner))")),
    M("layer", "dropout_output stands after norm_1",
      ("self.norm_1(h + self.dropout_output(attended))",
       "self.dropout_output(self.norm_1(h + attended))")),
    M("layer", "dropout_output is used twice", ("self.dropout_ff(", "self.dropout_output(")),
    M("layer", "memory and R are exchanged", ("self.attention(h, memory, R, u, v, hidden)",
                                              "self.attention(h, R, memory, u, v, hidden)")),
    M("layer", "u and v are exchanged", ("self.attention(h, memory, R, u, v, hidden)",
                                         "self.attention(h, memory, R, v, u, hidden)"), bug=8),

    M("sample_top_k", "over the tokens (the last dim)", (".softmax(-1)", ".softmax(0)")),
    M("sample_top_k", "does your softmax run over the tokens",
      ("logits.float().topk(top_k)", "(logits / temperature).softmax(0).topk(top_k)"),
      ("(best / temperature).softmax(-1)", "best")),
    M("sample_top_k", "a place among the k best", ("tokens.gather(-1, choice)", "choice")),
    M("sample_top_k", "you multiply the logits by the temperature",
      ("best / temperature", "best * temperature")),
    M("sample_top_k", "temperature is ignored", ("best / temperature", "best")),
    M("sample_top_k", "top_k is ignored", ("topk(top_k)", "topk(V)")),
    M("sample_top_k", "`generator` is ignored", (", generator=generator)", ")")),
    M("sample_top_k", "always the best token", ("tokens.gather(-1, choice)", "tokens[:, :1]")),
    M("sample_top_k", "needs probabilities",
      ("(best / temperature).softmax(-1)", "best / temperature")),
    M("sample_top_k", "the softmax is taken twice", """
def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if not 1 <= top_k <= logits.shape[-1] or not temperature > 0:
        raise ValueError("top_k or temperature")
    p, tokens = (logits.float() / temperature).softmax(-1).topk(top_k)
    return tokens.gather(-1, torch.multinomial(p.softmax(-1), 1, generator=generator))
"""),
    M("sample_top_k", "must be refused with a ValueError",
      ("not temperature > 0", "temperature < 0")),
    M("sample_top_k", "must be refused with a ValueError",
      ("if not 1 <= top_k", "if not 0 <= top_k")),
    M("sample_top_k", "every row gets the same token",
      ("tokens.gather(-1, choice)", "tokens.gather(-1, choice)[:1].expand(len(logits), 1)")),

    M("generate", "the prompt is fed again", ("x = sample_top_k", "new = sample_top_k"),
      ("tokens.append(x)", "tokens.append(new)\n            x = torch.cat([x, new], dim=1)"),
      bug=19),
    M("generate", "and the new token never", ("model(x, memory", "model(prompt, memory")),
    M("generate", "the memory is not handed on", ("logits, memory = model", "logits, _ = model")),
    M("generate", "the first position", ("model(x, memory, last_only=True)", "model(x, memory)"),
      ("logits[:, -1]", "logits[:, 0]")),
    M("generate", "the prompt is returned as well", ("[prompt[:, :0]]", "[prompt]")),
    M("generate", "the model is in training mode", ("model.eval()", "pass")),
    M("generate", "the model's mode is not put back", ("model.train(training)", "pass")),
    M("generate", "it was in eval mode", ("model.train(training)", "model.train()")),
    M("generate", "try ... finally", """
@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if n_tokens < 0:
        raise ValueError(n_tokens)
    if prompt.dim() == 1:
        return generate(model, prompt[None], n_tokens, top_k, temperature, generator)[0]
    top_k, mode = top_k or min(40, model.config.vocab_size), model.training
    model.eval()
    tokens, x, memory = [prompt[:, :0]], prompt, None
    for _ in range(n_tokens):
        logits, memory = model(x, memory)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)
        tokens.append(x)
    model.train(mode)
    return torch.cat(tokens, 1)
"""),
    M("generate", "top_k None is min(40, V)", ("min(40, model.config.vocab_size) if", "40 if")),
    M("generate", "must be refused with a ValueError",
      ("if n_tokens < 0:", "if n_tokens is None:")),
    M("generate", "(B, V)", ("logits[:, -1]", "logits")),

    # ---- train.py -------------------------------------------------------------------------------
    M("train_step", "zero them first", ("optimizer.zero_grad()", "pass")),
    M("train_step", "clear them first", ("    optimizer.zero_grad()\n", ""),
      ("    loss.backward()", "    optimizer.zero_grad()\n    loss.backward()")),
    M("train_step", "the sum, not the mean", ("losses.mean()", "losses.sum()")),
    M("train_step", "the last token only", ("losses.mean()", "losses[:, -1].mean()")),
    M("train_step", "is not clipped",
      ("    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)\n", ""),
      ("    loss, norm = loss.item(), norm.item()\n    if not math.isfinite(loss + norm):",
       "    loss = loss.item()\n    if not math.isfinite(loss):"),
      ("    optimizer.step()", "    optimizer.step()\n    norm = torch.nn.utils.clip_grad_norm_("
       "model.parameters(), run.clip).item()")),
    M("train_step", "reached the weights", ("if not math.isfinite(loss + norm):", "if False:")),
    M("train_step", "the gradient is not: this step",
      ("if not math.isfinite(loss + norm):", "if not math.isfinite(loss):")),
    M("train_step", "the memory of a bad step was kept", ("return loss, norm, memory",
                                                          "return loss, norm, new_memory")),
    M("train_step", "outside `with autocast", ("with autocast(run, x.device.type):", "if True:")),
    M("train_step", "should be floats", ("    loss, norm = loss.item(), norm.item()\n", "")),
    M("train_step", "after clipping", ("loss.item(), norm.item()",
                                       "loss.item(), min(norm.item(), run.clip)")),
    M("train_step", "without targets", ("model(x, memory, y)", "model(x, memory)")),
    M("train_step", "the memory is not handed", ("model(x, memory, y)", "model(x, None, y)")),
    M("train_step", "optimizer.step() is missing", ("    optimizer.step()\n", "")),
    M("train_step", "the old memory: the model returned a new one",
      ("return loss, norm, new_memory", "return loss, norm, memory"), bug=24),

    M("evaluate", "a mean of the segments' means", (".double().sum()", ".double().mean()"),
      ("total.item() / (len(tokens) - 1 - skip)", "total.item() / parts"), bug=22),
    M("evaluate", "the memory is not handed on", ("loss, memory = model", "loss, _ = model")),
    M("evaluate", "n tokens are n - 1 predictions", ("total.item() / (len(tokens) - 1 - skip)",
                                                     "total.item() / (len(tokens) - skip)")),
    M("evaluate", "add up in float64",
      ("torch.zeros((), dtype=torch.float64, device=device)", "0.0"),
      (".double().sum()", ".sum()")),
    M("evaluate", "evaluating(model, run)", ("with evaluating(model, run), ", "with ")),
    M("evaluate", "outside `with autocast", (", autocast(run, device.type):", ":")),
    M("evaluate", "perplexity", ("return total.item() / (len(tokens) - 1 - skip)",
                                 "return math.exp(total.item() / (len(tokens) - 1 - skip))")),
    M("evaluate", "in bits", ("return total.item() / (len(tokens) - 1 - skip)",
                              "return total.item() / (len(tokens) - 1 - skip) / math.log(2)")),
    M("evaluate", "should be a float", ("total.item() /", "total /")),
    M("evaluate", "gradients are on", ("@torch.no_grad()\n", "")),
    M("evaluate", "the first `skip` predictions are counted",
      ("loss[:, max(0, skip - i * run.eval_segment) :]", "loss"), ("- 1 - skip)", "- 1)")),
    M("evaluate", "the sum of the others is divided by all", ("- 1 - skip)", "- 1)")),
    M("evaluate", "skip counts predictions, not segments",
      ("max(0, skip - i * run.eval_segment)", "min(skip, 1) * (i == 0) * run.eval_segment")),
    M("evaluate", "ONE lane",
      ("lanes(tokens.to(device), 1)", "lanes(tokens.to(device), run.batch)")),
)

RIGHT = {
    "lanes": ("""
def lanes(tokens, B):
    n = len(tokens)
    if B < 1 or n <= B:
        raise ValueError(f"{n} tokens do not fill {B} lanes")
    L = (n - 1) // B
    return tokens.unfold(0, L + 1, L)[:B]
""", """
def lanes(tokens, B):
    if B < 1 or len(tokens) < B + 1:
        raise ValueError("too few tokens, or no lane")
    L = (len(tokens) - 1) // B
    index = torch.arange(B)[:, None] * L + torch.arange(L + 1)[None, :]
    return tokens[index]
"""),
    "segments": ("""
def segments(stream, T, start=0):
    if T < 1:
        raise ValueError("T")
    t = start
    while t < stream.shape[1] - 1:
        y = stream[:, t + 1 : t + T + 1]
        x = stream[:, t : t + y.shape[1]]
        yield x.to(torch.int64), y.to(torch.int64)
        t += T
""", """
def segments(stream, T, start=0):
    if T < 1:
        raise ValueError("T")
    stream = stream.long()[:, start:]
    x, y = stream[:, :-1], stream[:, 1:]
    if x.shape[1]:
        yield from zip(x.split(T, dim=1), y.split(T, dim=1))
"""),
    "sinusoid": ("""
def sinusoid(position, D):
    if D % 2 == 1:
        raise ValueError("odd")
    table = torch.zeros(len(position), D, dtype=torch.float64)
    for r, p in enumerate(position.tolist()):
        for k in range(D // 2):
            table[r, k] = math.sin(p / 10000 ** (2 * k / D))
            table[r, D // 2 + k] = math.cos(p / 10000 ** (2 * k / D))
    return table
""", """
def sinusoid(position, D):
    if D % 2:
        raise ValueError("odd")
    k = torch.arange(D // 2, device=position.device).double()
    frequency = torch.exp(k * (-2 * math.log(10000.0) / D))
    angle = torch.outer(position.to(torch.float64), frequency)
    return torch.hstack([torch.sin(angle), torch.cos(angle)])
"""),
    "update_memory": (CUT_THEN_JOIN, """
def update_memory(memory, h, M):
    rows = torch.cat([memory.detach(), h.detach()], dim=1)
    if M == 0:
        return rows[:, :0]
    return rows[:, -M:]
""", """
@torch.no_grad()
def update_memory(memory, h, M):
    from_h = min(M, h.shape[1])
    from_memory = min(M - from_h, memory.shape[1])
    old = memory.narrow(1, memory.shape[1] - from_memory, from_memory)
    return torch.cat([old, h.narrow(1, h.shape[1] - from_h, from_h)], dim=1)
"""),
    "causal_mask": ("""
def causal_mask(T, M, device=None):
    return torch.ones(T, M + T, dtype=torch.bool, device=device).triu(1 + M)
""", """
def causal_mask(T, M, device=None):
    mask = torch.zeros(T, M + T, dtype=torch.bool, device=device)
    for i in range(T):
        mask[i, M + i + 1 :] = True
    return mask
"""),
    "reach": ("""
def reach(N, T, M):
    token = T - 1
    for _ in range(N):
        token = token - token % T - M
    return T - 1 - token
""", """
def reach(N, T, M):
    def first_seen(layers):
        if layers == 0:
            return T - 1
        return math.floor(first_seen(layers - 1) / T) * T - M
    return T - 1 - first_seen(N)
"""),
    "gradient_into": ("""
def gradient_into(model, x, y, T):
    inputs, largest = [], []
    def keep(module, args, out):
        out.retain_grad()
        inputs.append(out)
    handle = model.embedding.register_forward_hook(keep)
    try:
        losses = stream_losses(model, x, y, T)
    finally:
        handle.remove()
    losses[:, T : 2 * T].sum().backward()
    for h in inputs:
        largest.append(0.0 if h.grad is None else float(h.grad.abs().max()))
    return largest
""", """
def gradient_into(model, x, y, T):
    inputs = []
    with model.embedding.register_forward_hook(lambda m, a, out: inputs.append(out)):
        losses = stream_losses(model, x, y, T)
    second = losses.split(T, dim=1)[1]
    found = torch.autograd.grad(second.sum(), inputs, allow_unused=True, materialize_grads=True)
    return [max(g.max().item(), -g.min().item()) for g in found]
"""),
    "four_terms": ("""
def four_terms(q, k, R, W_kR, u, v):
    T, K = len(q), len(k)
    r = R @ W_kR.T
    i, j = np.indices((T, K))
    distance = K - T + i - j
    near = r[np.maximum(distance, 0)]
    terms = np.stack([q @ k.T, np.einsum("ic,ijc->ij", q, near),
                      np.tile(k @ u, (T, 1)), near @ v])
    terms[:, distance < 0] = np.nan
    return terms
""", """
def four_terms(q, k, R, W_kR, u, v):
    T, K = q.shape[0], k.shape[0]
    out = np.empty((4, T, K))
    out[:] = np.nan
    for i in range(T):
        for j in range(K):
            if j <= K - T + i:
                p = W_kR.dot(R[K - T + i - j])
                out[:, i, j] = [q[i].dot(k[j]), q[i].dot(p), u.dot(k[j]), v.dot(p)]
    return out
"""),
    "rel_shift_by_index": ("""
def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    source = torch.zeros(T, K, dtype=torch.int64)
    for i in range(T):
        for j in range(K):
            source[i, j] = min(K - 1, j + T - 1 - i)
    return torch.take_along_dim(x, source.expand(x.shape), dim=-1)
""", """
def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    i = torch.arange(T, device=x.device).view(T, 1)
    j = torch.arange(K, device=x.device).view(1, K)
    return x[..., i, torch.minimum(j - i + T - 1, torch.tensor(K - 1))]
"""),
    "rel_shift": ("""
def rel_shift(x):
    T = x.shape[-2]
    rows = [torch.cat([x[..., i, T - 1 - i :], 0 * x[..., i, : T - 1 - i]], -1) for i in range(T)]
    return torch.stack(rows, dim=-2)
""", """
def rel_shift(x):
    T, K = x.shape[-2:]
    flat = torch.cat([x.new_zeros(*x.shape[:-1], 1), x], dim=-1).flatten(-2)
    return flat[..., T:].unflatten(-1, (T, K))
""", """
def rel_shift(x):
    T, K = x.shape[-2:]
    return x.flatten(-2)[..., T - 1 :].unfold(-1, K, max(1, K - 1))
"""),
    "hidden_keys": ("""
def hidden_keys(T, m, M, same_length, device=None):
    ones = torch.ones(T, m + T, dtype=torch.bool, device=device)
    hidden = ones.triu(m + 1)
    if same_length:
        hidden = hidden | ones.tril(m - M - 1)
    return hidden
""", """
def hidden_keys(T, m, M, same_length, device=None):
    hidden = torch.ones(T, m + T, dtype=torch.bool, device=device)
    for i in range(T):
        first = max(0, m + i - M) if same_length else 0
        hidden[i, first : m + i + 1] = False
    return hidden
"""),
    "distance_encoding": ("""
def distance_encoding(K, D, clamp_len=0, device=None):
    distance = torch.arange(K, device=device).flip(0)
    if clamp_len > 0:
        distance = torch.minimum(distance, torch.full_like(distance, clamp_len))
    return sinusoid(distance, D)
""", """
def distance_encoding(K, D, clamp_len=0, device=None):
    limit = clamp_len if clamp_len > 0 else K
    return sinusoid(torch.tensor([min(limit, K - 1 - r) for r in range(K)], device=device), D)
""", """
def distance_encoding(K, D, clamp_len=0, device=None):
    near = min(K, clamp_len + 1) if clamp_len > 0 else K  # distances that are told apart
    R = sinusoid(torch.arange(near - 1, -1, -1, device=device), D)
    return torch.cat([R[:1].expand(K - near, D), R])
"""),
    "relative_attention": (OWN_SCORE, """
def attend(self, q, k, value, Q, u, v, hidden):
    (B, H, T, C), K = q.shape, k.shape[2]
    rel_shift = import_module("04_rel_shift").rel_shift
    q = q.transpose(1, 2)
    score = torch.einsum("bihc,bhjc->bihj", q + u, k) + rel_shift(
        torch.einsum("bihc,hjc->bhij", q + v, Q)).transpose(1, 2)
    score = score / C ** 0.5
    score = score.where(~hidden[:, None], torch.tensor(-torch.inf, dtype=score.dtype))
    p = self.dropout_attention(F.softmax(score, dim=-1))  # (B, T, H, K)
    return torch.einsum("bihj,bhjc->bihc", p, value).reshape(B, T, H * C)
""", """
def attend(self, q, k, value, Q, u, v, hidden):
    heads = []
    for n in range(self.H):
        one = slice(n, n + 1)
        score = relative_score(q[:, one], k[:, one], Q[one], u[one], v[one])[:, 0] * self.C ** -0.5
        score = score + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        heads.append(self.dropout_attention(score.softmax(-1)) @ value[:, n])  # (B, T, K) each
    return torch.cat(heads, -1)
""", """
def attend(self, q, k, value, Q, u, v, hidden):
    T, K = hidden.shape
    heads = []
    for n in range(self.H):
        a = (q[:, n] + u[n]) @ k[:, n].mT  # (B, T, K)
        b = (q[:, n] + v[n]) @ Q[n].mT
        b = torch.stack([F.pad(b[:, i, T - 1 - i :], (0, T - 1 - i)) for i in range(T)], 1)
        score = ((a + b) * self.C ** -0.5).masked_fill(hidden, -torch.inf)
        weight = (score - score.amax(-1, keepdim=True)).exp()
        p = self.dropout_attention(weight / weight.sum(-1, keepdim=True))
        heads.append(p @ value[:, n])
    return torch.stack(heads, 2).reshape(len(q), T, -1)
"""),
    "layer": ("""
def forward(self, h, memory, R, u, v, hidden):
    made = self.attention(h, memory, R, u, v, hidden)
    o = self.norm_1(self.dropout_output(made) + h)
    made = self.W_2(self.dropout_inner(self.W_1(o).clamp(min=0)))
    return self.norm_2(self.dropout_ff(made) + o)
""", """
def forward(self, h, *past):
    attend = lambda z: self.dropout_output(self.attention(z, *past))
    feed = nn.Sequential(self.W_1, nn.ReLU(), self.dropout_inner, self.W_2, self.dropout_ff)
    for block, norm in ((attend, self.norm_1), (feed, self.norm_2)):
        h = norm(h + block(h))
    return h
"""),
    "sample_top_k": ("""
def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if top_k < 1 or top_k > logits.shape[1]:
        raise ValueError("top_k")
    if not temperature > 0:
        raise ValueError("temperature")
    worst = logits.topk(top_k).values[:, -1:]
    score = (logits / temperature).masked_fill(logits < worst, -torch.inf)
    return score.softmax(-1).multinomial(1, generator=generator)
""", """
def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    if not (1 <= top_k <= logits.shape[1] and temperature > 0):
        raise ValueError("top_k or temperature")
    order = logits.argsort(dim=-1, descending=True)[:, :top_k]
    p = (logits.take_along_dim(order, -1) / temperature).softmax(-1)
    chance = torch.rand(len(logits), 1, generator=generator)
    place = (p.cumsum(-1) < chance).sum(-1, keepdim=True).clamp(max=top_k - 1)
    return order.take_along_dim(place, -1)
"""),
    "generate": ("""
@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if n_tokens < 0:
        raise ValueError("n_tokens")
    batch = prompt if prompt.dim() == 2 else prompt.view(1, -1)
    if top_k is None:
        top_k = min(40, model.config.vocab_size)
    new = torch.zeros(len(batch), n_tokens, dtype=torch.int64, device=prompt.device)
    mode = model.training
    try:
        model.eval()
        read, memory = batch, None
        for n in range(n_tokens):
            logits, memory = model(read, memory)
            read = sample_top_k(logits[:, -1, :], top_k, temperature, generator)
            new[:, n] = read[:, 0]
    finally:
        model.train(mode)
    return new if prompt.dim() == 2 else new[0]
""", """
@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if n_tokens < 0:
        raise ValueError("n_tokens")
    top_k = top_k or min(40, model.config.vocab_size)
    x, memory, mode = torch.atleast_2d(prompt), None, model.training
    out = x[:, :0]
    model.train(False)
    try:
        while out.shape[1] < n_tokens:
            logits, memory = model(x, memory)
            x = sample_top_k(logits[:, logits.shape[1] - 1], top_k, temperature, generator)
            out = torch.hstack([out, x])
    finally:
        model.train(mode)
    return out.view(*prompt.shape[:-1], n_tokens)
""", """
@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if n_tokens < 0:
        raise ValueError("n_tokens")
    top_k = min(40, model.config.vocab_size) if not top_k else top_k
    mode, new = model.training, []
    model.eval()
    try:
        logits, memory = model(prompt.reshape(-1, prompt.shape[-1]))
        for _ in range(n_tokens):
            new.append(sample_top_k(logits[:, -1], top_k, temperature, generator))
            logits, memory = model(new[-1], memory=memory)
    finally:
        model.train(mode)
    found = torch.cat(new, 1) if new else prompt.reshape(-1, prompt.shape[-1])[:, :0]
    return found if prompt.dim() == 2 else found[0]
"""),
    "train_step": ("""
def train_step(model, optimizer, x, y, memory, run):
    for parameter in model.parameters():
        parameter.grad = None
    with autocast(run, x.device.type):
        losses, new = model(x, memory, y)
        loss = losses.sum() / y.numel()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip))
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
        memory = new
    return float(loss), norm, memory
""", """
def train_step(model, optimizer, x, y, memory, run):
    optimizer.zero_grad(set_to_none=False)
    with autocast(run, x.device.type):
        losses, new = model(x, memory, y)
    (losses / losses.numel()).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    mean, norm = losses.mean().item(), math.sqrt(sum(g.pow(2).sum().item() for g in grads))
    if not (math.isfinite(mean) and math.isfinite(norm)):
        return mean, norm, memory
    for g in grads:
        g *= min(1.0, run.clip / (norm + 1e-6))
    optimizer.step()
    return mean, norm, new
""", """
def train_step(model, optimizer, x, y, memory, run):
    optimizer.zero_grad()
    with autocast(run, x.device.type):
        losses, after = model(x, memory, y)
    torch.mean(losses).backward()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(weights, run.clip).item()
    good = math.isfinite(losses.mean().item()) and math.isfinite(norm)
    if good:
        optimizer.step()
    return losses.mean().item(), norm, after if good else memory
"""),
    "evaluate": ("""
@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    lane, memory, total, count = lanes(tokens.to(model.u.device), 1), None, 0.0, -skip
    with evaluating(model, run):
        for x, y in segments(lane, run.eval_segment):
            with autocast(run, model.u.device.type):
                losses, memory = model(x, memory, y)
            count += y.numel()  # of those that count, or below 0
            new = losses[0, -count:] if count < y.numel() else losses[0]
            total += new.double().sum().item() if count > 0 else 0.0
    return total / count
""", """
def evaluate(model, tokens, run, label="evaluating", skip=0):
    device, found, memory = model.u.device, [], None
    with torch.no_grad(), evaluating(model, run):
        cut = list(segments(lanes(tokens.to(device), 1), run.eval_segment))
        for x, y in progress(cut, label, len(cut)):
            with autocast(run, device.type):
                losses, memory = model(x, memory, y)
            found.append(losses.flatten().to(torch.float64))
    return torch.cat(found)[skip:].mean().item()
"""),
}
