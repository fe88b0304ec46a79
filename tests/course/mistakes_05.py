"""SPOILERS.  Mistakes in the exercises of lesson 5 (see mistakes.py)."""
CONTENT, POSITION = "(q + u[:, None]) @ k.mT", "(q + v[:, None]) @ k_R.mT"  # their sum is the score

TABLE = {}
TABLE["attention_mask"] = (
    ("same_length is ignored: with it keys more than M back are masked",
     ("if same_length", "if False")),
    ("keys far back are masked although same_length is off", ("if same_length", "if True")),
    ("you apply same_length to the memory only: keys more than M back in the segment are also "
     "masked", ("> M", "> M) & (j < m")),
    ("each query sees M keys; it must see M + 1: itself and M before it; a key exactly M back is "
     "not masked", ("> M", ">= M")),
    ("each query sees M + 2 keys, one too many", ("> M", "> M + 1")),
    ("you use m, the current length, instead of M, the limit", ("> M", "> m")),
    ("you use T, the segment length, instead of M", ("> M", "> T")),
    ("the memory is missing: query i is key m + i", "distance = i - j"),
    ("True and False are swapped: True means masked",
     ("return (...", "return (distance >= 0) & (distance <= M)"),
     ("return distance <...", "return distance >= 0")),
    ("one future key is not masked: a query sees nothing after itself",
     ("return (...", "return (distance < -1) | (distance > M)"),
     ("return distance...", "return distance < -1")),
    ("test_the_mask_is_bool", ("return (...", "return ((distance < 0) | (distance > M)).float()")),
    ("test_the_mask_is_on_the_device", ("(T, device=device", "(T")),
)
TABLE["distance_encoding"] = (
    ("your distances ascend; they must descend, from K - 1 in the first row to 0",
     ("K - 1, -1, -1", "K")),
    ("the distances run from K to 1: the last row must be distance 0", ("K - 1, -1", "K, 0")),
    ("distance 0 is missing: a query also sees itself", ("K - 1, -1", "K - 1, 0")),
    ("clamp_len has no effect: every DISTANCE beyond it becomes clamp_len (clamp returns a new "
     "tensor, clamp_ changes the old one)", "if False:"),
    ("it is clamped from the wrong side: the FAR distances become clamp_len, the near ones stay as "
     "they are", ("max=", "min=")),
    ("you clamped the row, not the distance",
     ("distance = d...", "distance = K - 1 - distance.flip(0).clamp(max=clamp_len)")),
    ("the far distances are not encoded: encode them as clamp_len, so that R has K rows",
     ("distance = d...", "distance = distance[-clamp_len:]")),
    ("clamp_len = 0 means no clamp, but here every distance became 0",
     "if True:", ("max=clamp_len", "max=max(clamp_len, 0)")),
    ("a negative clamp_len means no clamp, as 0 does", "if clamp_len:"),
    ("test_far_distances_are_exact", ("-1, device", "-1, dtype=torch.bfloat16, device")),
    ("test_R_is_on_the_device", (", device=device", "")),
)
TABLE["relative_attention"] = (
    ("u and v are swapped: u goes with the content (k), v with the position (k_R)",
     ("u, v)", "v, u)")),
    ("u is used for both: the position has its own bias v", ("u, v)", "u, u)")),
    ("the scale is missing: divide the score by sqrt(C)", ("score / ...", "score")),
    ("the scale is 1 / sqrt(D): use C, the width of a head",
     ("score / ...", "score / math.sqrt(self.W_o.out_features)")),
    ("only the content part is scaled: 1 / sqrt(C) covers all four terms",
     ("score / ...", f"{CONTENT} / self.C ** 0.5 + lesson_4.rel_shift({POSITION})")),
    ("(c) and (d) are not scaled: divide the whole score by sqrt(C), not q alone",
     ("score / ...", "score"), ("(q, k", "(q / math.sqrt(self.C), k")),
    ("the position is missing: compute the score with relative_score(q, k, k_R, u, v)",
     ("score = lesson_4...", "score = q @ k.mT")),
    ("the position part is not shifted",
     ("score = lesson_4...", f"score = {CONTENT} + {POSITION}")),
    ("k_R is reversed: its distances already descend", ("k, k_R", "k, k_R.flip(1)")),
    ("keys and values are swapped", ("(q, k,", "(q, value,"), ("@ value", "@ k")),
    ("nothing is masked: queries see the future (masked_fill returns a new tensor, masked_fill_ "
     "changes the old one)", ("score.masked...", "score.softmax(-1)")),
    ("you set masked scores to 0, which still gets weight: set them to -inf",
     ('float("-inf")', "0")),
    ("the mask is inverted: visible keys are masked and masked keys are visible",
     ("(mask", "(~mask")),
    ("you set masked probabilities to 0 after the softmax: the others then do not sum to 1",
     ("score.masked...", "score.softmax(-1).masked_fill(mask, 0.0)")),
    ("masked keys get a large negative number: with scores like these it is not low enough; use "
     "-inf", ('float("-inf")', "-1e3")),
    ("you add a large negative number to the score of a masked key: with scores like these it is "
     "not low enough; use masked_fill with -inf",
     ("score.masked...", "(score + mask * -1e9).softmax(-1)")),
    ("dropout_attention is not called: apply it between the softmax and the values",
     "out = probability @ value"),
    ("you call dropout_attention but do not use its result: it returns new probabilities",
     ("out = ...", "self.dropout_attention(probability)\n    out = probability @ value")),
    ("dropout_attention gets the scores; it must get the probabilities",
     ("score.masked...", "self.dropout_attention(score.masked_fill(mask, -math.inf)).softmax(-1)"),
     "out = probability @ value"),
    ("the heads are concatenated in the wrong order: (B, H, T, C) must become (B, T, H, C) first; "
     "a reshape alone swaps no axes", "return out.reshape(len(q), q.shape[2], -1)"),
    ("view does not accept a transposed tensor: reshape and flatten copy it",
     "return out.transpose(1, 2).view(len(q), q.shape[2], -1)"),
    ("you apply W_o here, and the caller applies it again",
     "return self.W_o(out.transpose(1, 2).flatten(2))"),
    ("the position part is not masked: add it BEFORE the mask, its upper cells are leftovers",
     ("score.masked...", "score.softmax(-1)"), ("score = lesson_4...",
      f"score = ({CONTENT}).masked_fill(mask, 0) + lesson_4.rel_shift({POSITION})")),
)
TABLE["layer"] = (
    ("the norms are before the blocks (pre-norm): this layer normalizes each SUM", """
def forward(self, h, *past):
    h = h + self.dropout_output(self.attention(self.norm_1(h), *past))
    inner = self.dropout_inner(self.relu(self.W_1(self.norm_2(h))))
    return h + self.dropout_ff(self.W_2(inner))
"""),
    ("h is not added to the attention's result: the first residual is missing",
     ("norm_1(h + ", "norm_1(")),
    ("the second residual is missing: add the result of norm_1 to that of the feed-forward network",
     ("norm_2(h + ", "norm_2(")),
    ("the feed-forward network reads the layer's input; it must read the result of norm_1",
     ("h = ", "o = "), ("norm_2(h", "norm_2(o")),
    ("norm_1 is missing", ("self.norm_1", "")),
    ("you add the residual after the norm, twice: each norm takes the SUM",
     "h = h + self.norm_1(self.dropout_output(attended))",
     "return h + self.norm_2(self.dropout_ff(self.W_2(inner)))"),
    ("ReLU is missing: two linear maps in a row are one", ("self.relu", "")),
    ("dropout_inner is missing, between ReLU and W_2", ("self.dropout_inner", "")),
    ("dropout_ff is missing, after W_2", ("self.dropout_ff", "")),
    ("the dropout covers the whole sum: apply it only to the result of the attention",
     ("norm_1(...", "norm_1(self.dropout_output(h + attended))")),
    ("u and v are swapped in the call of the attention",
     "attended = self.attention(h, memory, R, v, u, mask)"),
    ("test_h_is_not_changed", "h = self.norm_1(h.add_(self.dropout_output(attended)))"),
)
TABLE["sample_top_k"] = (
    ("multinomial samples a rank among the k best, not a token: map it back to a token",
     "return choice"),
    ("the rank is mapped with another row's tokens: gather along the last axis",
     "return tokens[0][choice]"),
    ("the softmax is over the rows: it must be over the tokens, the last dim",
     ("logits.float()", "(logits / temperature).softmax(0)"), "probability = best"),
    ("the result must be (B, 1), one column: the gathered ranks of multinomial already have this "
     "shape", "return tokens.gather(-1, choice)[:, 0]"),
    ("top_k is ignored: tokens beyond the k best are sampled",
     ("topk(top_k", "topk(logits.shape[-1]")),
    ("you set the other logits to 0, which still has probability: set them to -inf", """
def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    least = logits.topk(top_k).values[:, -1:]
    p = (logits.masked_fill(logits < least, 0) / temperature).softmax(-1)
    return torch.multinomial(p, 1, generator=generator)
"""),
    ("all rows share one random number: each row needs its own (torch.multinomial draws one for "
     "each row)",
     "choice = (probability.cumsum(-1) < torch.rand(1, generator=generator)).sum(-1, True)"),
    ("this is always the best token: sample from the probabilities (torch.multinomial)",
     "return tokens[:, :1]"),
    ("this is one sample for all rows: sample each row of the logits separately",
     ("(probability, 1", "(probability[:1], 1"),
     "return tokens.gather(-1, choice.expand(len(logits), 1))"),
    ("you multiply the logits by the temperature; they must be divided by it",
     ("best /", "best *")),
    ("the temperature has no effect: divide the logits by it before the softmax (after it, it "
     "cancels)", "probability = best.softmax(-1)"),
    ("test_without_a_generator_torch_s_own_is_used",
     ("best, tokens", "torch.manual_seed(0)\n    best, tokens")),
    ("test_without_a_generator_torch_s_own_is_used",
     ("generator=generator", "generator=generator or torch.Generator().manual_seed(0)")),
    ("test_the_generator_determines_the_tokens", (", generator=generator)", ")")),
    ("test_tokens_are_int64", "return tokens.gather(-1, choice).float()"),
    ("the logits are divided in place: make a new tensor",
     ("best, tokens", "logits /= temperature\n    best, tokens"), "probability = best.softmax(-1)"),
)
READ_ALL = "tokens.append(x)", "tokens.append(new)\n        x = torch.cat([x, new], dim=1)"
TABLE["generate"] = (
    ("each step feeds the prompt again, although it is already in the memory: everything is read "
     "twice", ("x = sample", "new = sample"), READ_ALL),
    ("each step reads the whole text again: read only the new token, and carry the memory over",
     ("logits, memory", "logits, _"), ("x = sample", "new = sample"), READ_ALL),
    ("the memory is not carried over: every step loses what was read before",
     ("logits, memory", "logits, _")),
    ("the prompt's last token is read twice: its first call already predicts what follows",
     ("x = prompt", "_, memory = model(prompt)\n    x = prompt[:, -1:]")),
    ("each step feeds all new tokens again, although they are in the memory: feed the newest only",
     ("tokens.append(x)", "tokens.append(x)\n        x = torch.cat(tokens, dim=1)")),
    ("only the prompt's memory is kept: the new tokens are missing",
     ("logits, memory = ...", "logits, new = model(x, memory)\n"
      "        memory = new if memory is None else memory")),
    ("the logits are those of the first position: the LAST one predicts what follows",
     (", last_only=True", ""), ("logits[:, -1]", "logits[:, 0]")),
    ("logits[-1] is the last lane: the last position of every lane is logits[:, -1]",
     (", last_only=True", ""), ("logits[:, -1]", "logits[-1]")),
    ("logits[-1] is the last lane: the last position of every lane is logits[:, -1]",
     ("logits[:, -1]", "logits[-1]")),
    ("the first new token is missing: it is sampled from the logits of the prompt",
     ("*tokens", "*tokens[1:]")),
    ("the first new token is missing: it is sampled from the logits of the prompt",
     ("n_tokens):\n", "n_tokens + 1):\n"), ("*tokens", "*tokens[1:]")),
    ("you also return the prompt: return only the new tokens", ("prompt[:, :0]", "prompt")),
    ("the model reads a token as (B, 1), one column: keep the second axis of the sampled tokens",
     ("generator)...", "generator)[:, 0]"), "return torch.stack(tokens, dim=1)"),
    ("for no tokens return a tensor (B, 0): torch.cat needs at least one tensor",
     "return torch.cat(tokens, dim=1)"),
    ("test_generate_sets_no_seed",
     ("memory = None", "torch.manual_seed(torch.initial_seed())\n    memory = None")),
    ("test_defaults_and_the_largest_top_k", ("temperature=1.0", "temperature=0.8")),
    ("test_defaults_and_the_largest_top_k", "top_k = 1 * top_k"),
)
