"""SPOILERS.  Mistakes in the exercises of lesson 5 (see mistakes.py)."""
from course.mistakes import mistake

CLAMP = "    if clamp_len > 0:\n        distance = distance.clamp(max=clamp_len)\n"
SCORE = "lesson_4.relative_score(q, k, k_R, u, v)"
CONTENT, POSITION = "(q + u[:, None]) @ k.mT", "(q + v[:, None]) @ k_R.mT"  # whose sum it is
HEADS = "out.transpose(1, 2).flatten(2)"
MASKED = 'score.masked_fill(mask, float("-inf"))'

TABLE = {}
TABLE["attention_mask"] = (
    mistake("same_length is ignored: with it keys more than M back are masked",
      ("if same_length", "if False")),
    mistake("keys far back are masked although same_length is off", ("if same_length", "if True")),
    mistake("each query sees M keys, should be M + 1: itself and M before it; a key exactly M back "
      "must be seen", ("distance > M", "distance >= M"), bug=11),
    mistake("each query sees M + 2 keys, one too many", ("distance > M", "distance > M + 1"),
      bug=11),
    mistake("m, the rows held so far, was taken for M, the limit",
      ("distance > M", "distance > m")),
    mistake("T, the segment length, was taken for M", ("distance > M", "distance > T"), bug=18),
    mistake("the memory is forgotten: query i is key m + i", ("m + i - j", "i - j"), bug=10),
    mistake("True and False are exchanged: True means masked",
      ("(distance < 0) | (distance > M)", "(distance >= 0) & (distance <= M)"),
      ("return distance < 0", "return distance >= 0")),
    mistake("one key of the future shows: a query sees nothing after itself",
      ("(distance < 0) |", "(distance < -1) |"), ("return distance < 0", "return distance < -1")),
    mistake("test_the_mask_is_bool",
      ("return (distance < 0) | (distance > M)",
       "return ((distance < 0) | (distance > M)).float()")),
    mistake("test_the_mask_stands_on_the_device",
      ("torch.arange(T, device=device)", "torch.arange(T)")),
)
TABLE["distance_encoding"] = (
    mistake("your distances ascend; they must descend, from K - 1 in the first row to 0",
      ("torch.arange(K - 1, -1, -1, device=device)", "torch.arange(K, device=device)"), bug=2),
    mistake("the distances run from K to 1: the last row must be distance 0",
      ("K - 1, -1, -1", "K, 0, -1")),
    mistake("distance 0 is missing: a query sees itself as well",
      ("K - 1, -1, -1", "K - 1, 0, -1")),
    mistake("clamp_len has no effect: every DISTANCE beyond it becomes clamp_len (clamp gives a "
      "new tensor, clamp_ changes the old one)",
      (CLAMP, "    limit = clamp_len if clamp_len > 0 else K\n")),
    mistake("it is clamped from the wrong side: the FAR distances become clamp_len, the near ones "
      "stay as they are", ("clamp(max=clamp_len)", "clamp(min=clamp_len)"), bug=7),
    mistake("the row was clamped, not the distance",
      ("distance = distance.clamp(max=clamp_len)",
       "distance = K - 1 - distance.flip(0).clamp(max=clamp_len)"), bug=7),
    mistake("the far distances are not encoded at all: they count as clamp_len, so R has K rows",
      ("distance = distance.clamp(max=clamp_len)", "distance = distance[-clamp_len:]")),
    mistake("clamp_len = 0 means no clamp, but here everything became distance 0",
      (CLAMP, "    distance = distance.clamp(max=max(clamp_len, 0))\n")),
    mistake("a negative clamp_len means no clamp, as 0 does", ("clamp_len > 0", "clamp_len != 0")),
    mistake("test_R_stands_on_the_device", (", device=device)", ")")),
)
TABLE["relative_attention"] = (
    mistake("u and v are exchanged: u goes with the content (k), v with the position (k_R)",
      ("k_R, u, v)", "k_R, v, u)"), bug=8),
    mistake("u is used for both: the position has its own bias v", ("k_R, u, v)", "k_R, u, u)"),
      bug=8),
    mistake("the scale is missing: divide the score by sqrt(C)", (" / math.sqrt(self.C)", "")),
    mistake("the scale is 1 / sqrt(D): C, the width of a head, belongs there",
      ("math.sqrt(self.C)", "math.sqrt(self.W_o.out_features)"), bug=9),
    mistake("only the content part is scaled: 1 / sqrt(C) covers all four terms",
      (" / math.sqrt(self.C)", ""),
      (SCORE, f"{CONTENT} / self.C ** 0.5 + lesson_4.rel_shift({POSITION})"), bug=9),
    mistake("the position part is not shifted", (SCORE, f"{CONTENT} + {POSITION}"), bug=1),
    mistake("k_R is read backwards: it comes with descending distances already",
      ("(q, k, k_R,", "(q, k, k_R.flip(1),"), bug=2),
    mistake("keys and values are exchanged", ("(q, k, k_R,", "(q, value, k_R,"),
      ("(probability) @ value", "(probability) @ k")),
    mistake("nothing is masked: the future shows (masked_fill gives a new tensor, masked_fill_ "
      "changes the old one)", (MASKED, "score")),
    mistake("what is to be seen is masked, and the other way round",
      ("(mask, float", "(~mask, float")),
    mistake("masked probabilities are set to 0 after the softmax: the others then do not sum to 1",
      (MASKED, "score"),
      (".softmax(-1)", ".softmax(-1).masked_fill(mask, 0.0)")),
    mistake("masked keys get a large negative number: with scores like these that is not enough; "
      "use -inf", ('float("-inf")', "-1e3"), bug=12),
    mistake("a large negative number is added to the score of a masked key: with scores like these "
      "that is not enough; fill in -inf (masked_fill)",
      (MASKED, "(score + mask * -1e9)"), bug=12),
    mistake("dropout_attention is not called: it stands between the softmax and the values",
      ("self.dropout_attention(probability)", "probability")),
    mistake("dropout_attention gets the scores, should get the probabilities",
      ("self.dropout_attention(probability)", "probability"),
      ('score.masked_fill(mask, float("-inf")).softmax(-1)',
       'self.dropout_attention(score.masked_fill(mask, float("-inf"))).softmax(-1)')),
    mistake("the heads are joined in the wrong order: (B, H, T, C) must become (B, T, H, C) first, "
      "a reshape alone exchanges no axes",
      (HEADS, "out.reshape(len(q), q.shape[2], -1)")),
    mistake("view refuses what transpose leaves behind: reshape and flatten copy it",
      (HEADS, "out.transpose(1, 2).view(len(q), q.shape[2], -1)")),
    mistake("W_o is applied here, and once more where this function is called",
      (HEADS, "self.W_o(out.transpose(1, 2).flatten(2))")),
    mistake("the position part is not masked: add it BEFORE the mask, its upper cells are "
      "leftovers", (MASKED, "score"),
      (SCORE, f"({CONTENT}).masked_fill(mask, 0) + lesson_4.rel_shift({POSITION})"), bug=13),
)
TABLE["layer"] = (
    mistake("the norms stand before the blocks (pre-norm): this layer normalises each SUM", """
def forward(self, h, *past):
    h = h + self.dropout_output(self.attention(self.norm_1(h), *past))
    inner = self.dropout_inner(self.relu(self.W_1(self.norm_2(h))))
    return h + self.dropout_ff(self.W_2(inner))
"""),
    mistake("h is not added to the attention's result: the first residual is missing",
      ("norm_1(h + ", "norm_1(")),
    mistake("the second residual is missing: what norm_1 gave is added to the feed-forward's "
      "result", ("norm_2(h + ", "norm_2(")),
    mistake("the feed-forward network reads the layer's input; it must read what norm_1 gave",
      ("h = self.norm_1(", "o = self.norm_1("), ("norm_2(h + ", "norm_2(o + ")),
    mistake("norm_1 is missing", ("self.norm_1(", "(")),
    mistake("the residual is added after the norm, twice: each norm is of the SUM",
      ("self.norm_1(h + self.dropout_output(attended))",
       "h + self.norm_1(self.dropout_output(attended))"),
      ("self.norm_2(h + self.dropout_ff(self.W_2(inner)))",
       "h + self.norm_2(self.dropout_ff(self.W_2(inner)))")),
    mistake("ReLU is missing: two linear maps in a row are one",
      ("self.relu(self.W_1(h))", "self.W_1(h)")),
    mistake("dropout_inner is missing, between ReLU and W_2",
      ("self.dropout_inner(self.relu(self.W_1(h)))", "self.relu(self.W_1(h))")),
    mistake("dropout_ff is missing, after W_2", ("self.dropout_ff(", "(")),
    mistake("the dropout stands around the whole sum: only around what the attention made",
      ("h + self.dropout_output(attended)", "self.dropout_output(h + attended)")),
    mistake("u and v are exchanged on the way to the attention",
      ("self.attention(h, memory, R, u, v, mask)", "self.attention(h, memory, R, v, u, mask)"),
      bug=8),
    mistake("test_h_stays_as_it_was",
      ("h = self.norm_1(h + self.dropout_output(attended))",
       "h += self.dropout_output(attended)\n    h = self.norm_1(h)")),
)
TABLE["sample_top_k"] = (
    mistake("what multinomial draws is a place among the k best, not yet a token: translate it",
      ("tokens.gather(-1, choice)", "choice")),
    mistake("the place is translated by another row's tokens: gather along the last axis",
      ("tokens.gather(-1, choice)", "tokens[0][choice]")),
    mistake("the softmax runs over the rows: it must run over the tokens, the last dim",
      ("logits.float().topk(top_k)", "(logits / temperature).softmax(0).topk(top_k)"),
      ("(best / temperature).softmax(-1)", "best")),
    mistake("the result is (B, 1), one column: what multinomial gives, gathered, has that shape "
      "already", ("tokens.gather(-1, choice)", "tokens.gather(-1, choice)[:, 0]")),
    mistake("top_k is ignored: tokens beyond the k best are drawn",
      ("logits.float().topk(top_k)", "logits.float().topk(V)")),
    mistake("always the best token: draw by the probabilities (torch.multinomial)",
      ("tokens.gather(-1, choice)", "tokens[:, :1]")),
    mistake("one draw for all rows: each row of the logits is drawn by itself",
      ("torch.multinomial(probability, 1, generator=generator)",
       "torch.multinomial(probability[:1], 1, generator=generator).expand(len(logits), 1)")),
    mistake("you multiply the logits by the temperature; they must be divided by it",
      ("best / temperature", "best * temperature")),
    mistake("the temperature makes no difference: divide the logits by it, before the softmax "
      "(after it, it cancels)", ("best / temperature", "best")),
    mistake("test_the_same_seed_draws_the_same_tokens", (", generator=generator)", ")")),
    mistake("test_tokens_are_whole_numbers",
      ("tokens.gather(-1, choice)", "tokens.gather(-1, choice).float()")),
    mistake("the logits are divided in place: make a new tensor",
      ("    best, tokens", "    logits /= temperature\n    best, tokens"),
      ("best / temperature", "best")),
    mistake("test_a_top_k_outside_the_vocabulary_is_refused",
      ("if not 1 <= top_k <= V", "if not 0 <= top_k <= V")),
    mistake("test_a_temperature_not_above_0_is_refused",
      ("not temperature > 0", "temperature < 0")),
)
TABLE["generate"] = (
    mistake("the prompt is fed again in each step, although the memory holds it: all is read twice",
      ("x = sample_top_k", "new = sample_top_k"),
      ("tokens.append(x)", "tokens.append(new)\n        x = torch.cat([x, new], dim=1)"), bug=19),
    mistake("the memory is not handed on: every step forgets what was read before",
      ("logits, memory = model", "logits, _ = model")),
    mistake("only the prompt's memory is kept: the new tokens are forgotten",
      ("logits, memory = model(x, memory, last_only=True)",
       "logits, new = model(x, memory)\n        memory = new if memory is None else memory")),
    mistake("the logits are those of the first position: the LAST one predicts what follows",
      ("model(x, memory, last_only=True)", "model(x, memory)"), ("logits[:, -1]", "logits[:, 0]")),
    mistake("the prompt is returned as well: only the new tokens are asked for",
      ("[prompt[:, :0]]", "[prompt]")),
    mistake("the model reads a token as (B, 1), one column: keep the second axis of what was drawn",
      ("generator)  # (B, 1)", "generator)[:, 0]"),
      ("torch.cat(tokens, dim=1)", "torch.stack(tokens[1:], dim=1)")),
    mistake("of no tokens a tensor (B, 0) is wanted: torch.cat needs at least one",
      ("[prompt[:, :0]]", "[]")),
    mistake("test_the_first_call_has_no_memory", ("memory = None", "memory = 0 * prompt[:, :1]"),
      bug=17),
    mistake("test_without_temperature_and_generator", ("temperature=1.0", "temperature=0.8")),
    mistake("test_top_k_is_40_or_the_whole_vocabulary",
      ("min(top_k, model.config.vocab_size)", "1 * top_k")),
)
