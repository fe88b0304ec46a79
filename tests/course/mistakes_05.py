"""SPOILERS.  Mistakes in the exercises of lesson 5 (see mistakes.py)."""
CLAMP = "    if clamp_len > 0:\n        distance = distance.clamp(max=clamp_len)\n"
SCORE = "lesson_4.relative_score(q, k, k_R, u, v)"
CONTENT, POSITION = "(q + u[:, None]) @ k.mT", "(q + v[:, None]) @ k_R.mT"  # whose sum it is
HEADS = "out.transpose(1, 2).flatten(2)"
MASKED = 'score.masked_fill_(mask, float("-inf"))'

TABLE = {}
TABLE["attention_mask"] = (
    ("same_length is ignored: with it keys more than M back are masked",
     ("if same_length", "if False")),
    ("keys far back are masked although same_length is off", ("if same_length", "if True")),
    ("you apply same_length to the memory only: keys more than M back in the segment are also "
     "masked",
     ("(distance > M)", "((distance > M) & (j < m))")),
    ("each query sees M keys; it must see M + 1: itself and M before it; a key exactly M back is "
     "not masked", ("distance > M", "distance >= M")),
    ("each query sees M + 2 keys, one too many", ("distance > M", "distance > M + 1")),
    ("you use m, the current length, instead of M, the limit", ("distance > M", "distance > m")),
    ("you use T, the segment length, instead of M", ("distance > M", "distance > T")),
    ("the memory is missing: query i is key m + i", ("m + i - j", "i - j")),
    ("True and False are swapped: True means masked",
     ("(distance < 0) | (distance > M)", "(distance >= 0) & (distance <= M)"),
     ("return distance < 0", "return distance >= 0")),
    ("one future key is not masked: a query sees nothing after itself",
     ("(distance < 0) |", "(distance < -1) |"), ("return distance < 0", "return distance < -1")),
    ("test_the_mask_is_bool",
     ("return (distance < 0) | (distance > M)",
      "return ((distance < 0) | (distance > M)).float()")),
    ("test_the_mask_is_on_the_device", ("torch.arange(T, device=device)", "torch.arange(T)")),
)
TABLE["distance_encoding"] = (
    ("your distances ascend; they must descend, from K - 1 in the first row to 0",
     ("torch.arange(K - 1, -1, -1, device=device)", "torch.arange(K, device=device)")),
    ("the distances run from K to 1: the last row must be distance 0",
     ("K - 1, -1, -1", "K, 0, -1")),
    ("distance 0 is missing: a query also sees itself", ("K - 1, -1, -1", "K - 1, 0, -1")),
    ("clamp_len has no effect: every DISTANCE beyond it becomes clamp_len (clamp returns a new "
     "tensor, clamp_ changes the old one)",
     (CLAMP, "    limit = clamp_len if clamp_len > 0 else K\n")),
    ("it is clamped from the wrong side: the FAR distances become clamp_len, the near ones stay "
     "as they are", ("clamp(max=clamp_len)", "clamp(min=clamp_len)")),
    ("you clamped the row, not the distance",
     ("distance = distance.clamp(max=clamp_len)",
      "distance = K - 1 - distance.flip(0).clamp(max=clamp_len)")),
    ("the far distances are not encoded: encode them as clamp_len, so that R has K rows",
     ("distance = distance.clamp(max=clamp_len)", "distance = distance[-clamp_len:]")),
    ("clamp_len = 0 means no clamp, but here every distance became 0",
     (CLAMP, "    distance = distance.clamp(max=max(clamp_len, 0))\n")),
    ("a negative clamp_len means no clamp, as 0 does", ("clamp_len > 0", "clamp_len != 0")),
    ("test_far_distances_are_exact", ("-1, -1, ", "-1, -1, dtype=torch.bfloat16, ")),
    ("test_R_is_on_the_device", (", device=device)", ")")),
)
TABLE["relative_attention"] = (
    ("u and v are swapped: u goes with the content (k), v with the position (k_R)",
     ("k_R, u, v)", "k_R, v, u)")),
    ("u is used for both: the position has its own bias v", ("k_R, u, v)", "k_R, u, u)")),
    ("the scale is missing: divide the score by sqrt(C)", (" / math.sqrt(self.C)", "")),
    ("the scale is 1 / sqrt(D): use C, the width of a head",
     ("math.sqrt(self.C)", "math.sqrt(self.W_o.out_features)")),
    ("only the content part is scaled: 1 / sqrt(C) covers all four terms",
     (" / math.sqrt(self.C)", ""),
     (SCORE, f"{CONTENT} / self.C ** 0.5 + lesson_4.rel_shift({POSITION})")),
    ("(c) and (d) are not scaled: divide the whole score by sqrt(C), not q alone",
     ("score / math", "score * 1  # math"), ("score(q, k,", "score(q / math.sqrt(self.C), k,")),
    ("the position is missing: compute the score with relative_score(q, k, k_R, u, v)",
     (SCORE, "q @ k.mT")),
    ("the position part is not shifted", (SCORE, f"{CONTENT} + {POSITION}")),
    ("k_R is reversed: its distances already descend", ("(q, k, k_R,", "(q, k, k_R.flip(1),")),
    ("keys and values are swapped", ("(q, k, k_R,", "(q, value, k_R,"),
     ("(probability) @ value", "(probability) @ k")),
    ("nothing is masked: queries see the future (masked_fill returns a new tensor, masked_fill_ "
     "changes the old one)", (MASKED, "score")),
    ("you set masked scores to 0, which still gets weight: set them to -inf",
     ('float("-inf")', "0")),
    ("the mask is inverted: visible keys are masked and masked keys are visible",
     ("(mask, float", "(~mask, float")),
    ("you set masked probabilities to 0 after the softmax: the others then do not sum to 1",
     (MASKED, "score"), (".softmax(-1)", ".softmax(-1).masked_fill(mask, 0.0)")),
    ("masked keys get a large negative number: with scores like these it is not low enough; use "
     "-inf", ('float("-inf")', "-1e3")),
    ("you add a large negative number to the score of a masked key: with scores like these it is "
     "not low enough; use masked_fill with -inf", (MASKED, "(score + mask * -1e9)")),
    ("dropout_attention is not called: apply it between the softmax and the values",
     ("self.dropout_attention(probability)", "probability")),
    ("you call dropout_attention but do not use its result: it returns new probabilities",
     ("    out = self.dropout_attention(probability)",
      "    self.dropout_attention(probability)\n    out = probability")),
    ("dropout_attention gets the scores; it must get the probabilities",
     ("self.dropout_attention(probability)", "probability"),
     (f"{MASKED}.softmax(-1)", f"self.dropout_attention({MASKED}).softmax(-1)")),
    ("the heads are concatenated in the wrong order: (B, H, T, C) must become (B, T, H, C) first; "
     "a reshape alone swaps no axes", (HEADS, "out.reshape(len(q), q.shape[2], -1)")),
    ("view does not accept a transposed tensor: reshape and flatten copy it",
     (HEADS, "out.transpose(1, 2).view(len(q), q.shape[2], -1)")),
    ("you apply W_o here, and the caller applies it again",
     (HEADS, "self.W_o(out.transpose(1, 2).flatten(2))")),
    ("the position part is not masked: add it BEFORE the mask, its upper cells are leftovers",
     (MASKED, "score"),
     (SCORE, f"({CONTENT}).masked_fill(mask, 0) + lesson_4.rel_shift({POSITION})")),
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
     ("h = self.norm_1(", "o = self.norm_1("), ("norm_2(h + ", "norm_2(o + ")),
    ("norm_1 is missing", ("self.norm_1(", "(")),
    ("you add the residual after the norm, twice: each norm takes the SUM",
     ("self.norm_1(h + self.dropout_output(attended))",
      "h + self.norm_1(self.dropout_output(attended))"),
     ("self.norm_2(h + self.dropout_ff(self.W_2(inner)))",
      "h + self.norm_2(self.dropout_ff(self.W_2(inner)))")),
    ("ReLU is missing: two linear maps in a row are one",
     ("self.relu(self.W_1(h))", "self.W_1(h)")),
    ("dropout_inner is missing, between ReLU and W_2",
     ("self.dropout_inner(self.relu(self.W_1(h)))", "self.relu(self.W_1(h))")),
    ("dropout_ff is missing, after W_2", ("self.dropout_ff(", "(")),
    ("the dropout covers the whole sum: apply it only to the result of the attention",
     ("h + self.dropout_output(attended)", "self.dropout_output(h + attended)")),
    ("u and v are swapped in the call of the attention",
     ("self.attention(h, memory, R, u, v, mask)", "self.attention(h, memory, R, v, u, mask)")),
    ("test_h_is_not_changed",
     ("h = self.norm_1(h + self.dropout_output(attended))",
      "h += self.dropout_output(attended)\n    h = self.norm_1(h)")),
)
TABLE["sample_top_k"] = (
    ("multinomial samples a rank among the k best, not a token: map it back to a token",
     ("tokens.gather(-1, choice)", "choice")),
    ("the rank is mapped with another row's tokens: gather along the last axis",
     ("tokens.gather(-1, choice)", "tokens[0][choice]")),
    ("the softmax is over the rows: it must be over the tokens, the last dim",
     ("logits.float().topk(top_k)", "(logits / temperature).softmax(0).topk(top_k)"),
     ("(best / temperature).softmax(-1)", "best")),
    ("the result must be (B, 1), one column: the gathered ranks of multinomial already have this "
     "shape", ("tokens.gather(-1, choice)", "tokens.gather(-1, choice)[:, 0]")),
    ("top_k is ignored: tokens beyond the k best are sampled",
     ("logits.float().topk(top_k)", "logits.float().topk(logits.shape[-1])")),
    ("you set the other logits to 0, which still has probability: set them to -inf", """
def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    least = logits.topk(top_k).values[:, -1:]
    p = (logits.masked_fill(logits < least, 0) / temperature).softmax(-1)
    return torch.multinomial(p, 1, generator=generator)
"""),
    ("all rows share one random number: each row needs its own (torch.multinomial draws one "
     "for each row)", ("torch.multinomial(probability, 1, generator=generator)", "(probability."
      "cumsum(-1) < torch.rand(1, generator=generator)).sum(-1, keepdim=True)")),
    ("this is always the best token: sample from the probabilities (torch.multinomial)",
     ("tokens.gather(-1, choice)", "tokens[:, :1]")),
    ("this is one sample for all rows: sample each row of the logits separately",
     ("torch.multinomial(probability, 1, generator=generator)",
      "torch.multinomial(probability[:1], 1, generator=generator).expand(len(logits), 1)")),
    ("you multiply the logits by the temperature; they must be divided by it",
     ("best / temperature", "best * temperature")),
    ("the temperature has no effect: divide the logits by it before the softmax (after it, it "
     "cancels)", ("best / temperature", "best")),
    ("test_without_a_generator_torch_s_own_is_used",
     ("    best, tokens", "    torch.manual_seed(0)\n    best, tokens")),
    ("test_without_a_generator_torch_s_own_is_used",
     ("generator=generator)", "generator=generator or torch.Generator().manual_seed(0))")),
    ("test_the_generator_determines_the_tokens", (", generator=generator)", ")")),
    ("test_tokens_are_int64",
     ("tokens.gather(-1, choice)", "tokens.gather(-1, choice).float()")),
    ("the logits are divided in place: make a new tensor",
     ("    best, tokens", "    logits /= temperature\n    best, tokens"),
     ("best / temperature", "best")),
)
TABLE["generate"] = (
    ("each step feeds the prompt again, although it is already in the memory: everything is read "
     "twice", ("x = sample_top_k", "new = sample_top_k"),
     ("tokens.append(x)", "tokens.append(new)\n        x = torch.cat([x, new], dim=1)")),
    ("each step reads the whole text again: read only the new token, and carry the memory over",
     ("logits, memory = model(x, memory, last", "logits, _ = model(x, None, last"),
     ("x = sample_top_k", "new = sample_top_k"),
     ("tokens.append(x)", "tokens.append(new)\n        x = torch.cat([x, new], dim=1)")),
    ("the memory is not carried over: every step loses what was read before",
     ("logits, memory = model", "logits, _ = model")),
    ("the prompt's last token is read twice: its first call already predicts what follows",
     ("x = prompt", "_, memory = model(prompt)\n    x = prompt[:, -1:]")),
    ("each step feeds all new tokens again, although they are in the memory: feed the newest only",
     ("tokens.append(x)", "tokens.append(x)\n        x = torch.cat(tokens, dim=1)")),
    ("only the prompt's memory is kept: the new tokens are missing",
     ("logits, memory = model(x, memory, last_only=True)",
      "logits, new = model(x, memory)\n        memory = new if memory is None else memory")),
    ("the logits are those of the first position: the LAST one predicts what follows",
     ("model(x, memory, last_only=True)", "model(x, memory)"), ("logits[:, -1]", "logits[:, 0]")),
    ("logits[-1] is the last lane: the last position of every lane is logits[:, -1]",
     ("model(x, memory, last_only=True)", "model(x, memory)"), ("logits[:, -1]", "logits[-1]")),
    ("logits[-1] is the last lane: the last position of every lane is logits[:, -1]",
     ("logits[:, -1]", "logits[-1]")),
    ("the first new token is missing: it is sampled from the logits of the prompt",
     ("*tokens], dim=1)", "*tokens[1:]], dim=1)")),
    ("the first new token is missing: it is sampled from the logits of the prompt",
     ("range(n_tokens)", "range(n_tokens + 1)"), ("*tokens], dim=1)", "*tokens[1:]], dim=1)")),
    ("you also return the prompt: return only the new tokens", ("prompt[:, :0]", "prompt")),
    ("the model reads a token as (B, 1), one column: keep the second axis of the sampled tokens",
     ("generator)  # (B, 1)", "generator)[:, 0]"),
     ("torch.cat([prompt[:, :0], *tokens], dim=1)", "torch.stack(tokens, dim=1)")),
    ("for no tokens return a tensor (B, 0): torch.cat needs at least one tensor",
     ("[prompt[:, :0], *tokens]", "tokens")),
    ("test_generate_sets_no_seed",
     ("    memory = None", "    torch.manual_seed(torch.initial_seed())\n    memory = None")),
    ("test_defaults_and_the_largest_top_k", ("temperature=1.0", "temperature=0.8")),
    ("test_defaults_and_the_largest_top_k",
     ("min(top_k, model.config.vocab_size)", "1 * top_k")),
)
