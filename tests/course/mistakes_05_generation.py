"""SPOILERS.  Mistakes in generation, the last two exercises of lesson 5 (see mistakes.py)."""
from course.mistakes import M

SOFTMAX = "(best / temperature).softmax(-1)"
TOP = "logits.float().topk(top_k)"
CHOSEN = "tokens.gather(-1, choice)"

NO_SOFTMAX = ("the logits are drawn from as they are: multinomial needs probabilities, so take the "
              "softmax")
EVENLY = ("the k best are drawn evenly; they must be drawn by their softmax, over the tokens (the "
          "last dim), not over the rows")
TWICE = "the softmax is taken twice"
NO_TEMPERATURE = ("the temperature makes no difference: divide the logits by it, before the "
                  "softmax (after it, it cancels)")
FLAT = "the result is (B, 1), one column: what multinomial gives, gathered, has that shape already"

LOOP = """
@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    top_k = min(top_k, model.config.vocab_size)
    {loop}
    return new
"""
FORGETFUL = """tokens = prompt
    for _ in range(n_tokens):
        logits, _ = model(tokens)
        tokens = torch.cat([tokens, sample_top_k(logits[:, -1], top_k, temperature, generator)], 1)
    new = tokens[:, prompt.shape[1]:]"""
ONE_BY_ONE = """memory, new = None, prompt[:, :0]
    for t in range(prompt.shape[1] - 1):
        _, memory = model(prompt[:, t : t + 1], memory)
    x = prompt[:, -1:]
    for _ in range(n_tokens):
        logits, memory = model(x, memory)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)
        new = torch.cat([new, x], 1)"""
TWICE_READ = """_, memory = model(prompt)
    x, new = prompt[:, -1:], prompt[:, :0]
    for _ in range(n_tokens):
        logits, memory = model(x, memory)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)
        new = torch.cat([new, x], 1)"""


def sample(name, *edits, bug=0):
    return M("sample_top_k", name, *edits, bug=bug)


def gen(name, *edits, bug=0):
    return M("generate", name, *edits, bug=bug)


SAMPLE_TOP_K = (
    # ---- which token
    sample("what multinomial draws is a place among the k best, not yet a token: translate it",
           (CHOSEN, "choice")),
    sample("the place is translated by another row's tokens: gather along the last axis",
           (CHOSEN, "tokens[0][choice]")),
    sample("every row gets the same token: each row of the logits is drawn by itself",
           (CHOSEN, "tokens.gather(-1, choice)[:1].expand(len(logits), 1)")),
    sample("the k worst tokens are drawn", (TOP, "logits.float().topk(top_k, largest=False)")),
    sample("the softmax runs over the rows: it must run over the tokens, the last dim",
           (TOP, "(logits / temperature).softmax(0).topk(top_k)"), (SOFTMAX, "best")),
    sample(FLAT, (CHOSEN, "tokens.gather(-1, choice)[:, 0]")),
    sample(FLAT, (CHOSEN, "tokens.gather(-1, choice)[0]")),
    sample("tokens[choice] takes whole rows: gather takes one token of each row",
           (CHOSEN, "tokens[choice]")),
    sample("the k-th best is hidden, too: hide what is smaller than it (<), not what is as large",
           (TOP, "logits.masked_fill(logits <= logits.topk(top_k)[0][:, -1:], -torch.inf).sort()")),
    sample("multinomial needs probabilities, not their logarithms: softmax, not log_softmax",
           (".softmax(-1)", ".log_softmax(-1)")),
    # ---- which tokens are drawn at all
    sample("k + 1 candidates", (TOP, "logits.float().topk(min(V, top_k + 1))")),
    sample("k - 1 candidates", (TOP, "logits.float().topk(max(1, top_k - 1))")),
    sample("top_k is ignored: tokens beyond the k best are drawn", (TOP, "logits.float().topk(V)")),
    sample("always the best token: draw by the probabilities (torch.multinomial)",
           (CHOSEN, "tokens[:, :1]")),
    sample("one draw for all rows: each row of the logits is drawn by itself",
           ("torch.multinomial(probability, 1, generator=generator)",
            "torch.multinomial(probability[:1], 1, generator=generator).expand(len(logits), 1)")),
    # ---- with which probabilities
    sample(EVENLY, (".softmax(-1)", ".softmax(0)")),
    sample(EVENLY, (SOFTMAX, "torch.ones_like(best)")),
    sample(NO_SOFTMAX, (SOFTMAX, "best / temperature")),
    sample(NO_SOFTMAX, (SOFTMAX, "(logits.float() / temperature)"), (CHOSEN, "choice")),
    sample(TWICE, (TOP, "(logits.float() / temperature).softmax(-1).topk(top_k)"),
           (SOFTMAX, "best.softmax(-1)")),
    sample(TWICE, (SOFTMAX, "(best / temperature).softmax(-1).softmax(-1)")),
    sample("you multiply the logits by the temperature; they must be divided by it",
           ("best / temperature", "best * temperature")),
    sample(NO_TEMPERATURE, ("best / temperature", "best")),
    sample(NO_TEMPERATURE, (SOFTMAX, "best.softmax(-1) / temperature")),
    sample("the logits are divided by the temperature twice",
           ("best / temperature", "best / temperature**2")),
    # ---- the generator, the arguments
    sample("test_the_same_seed_draws_the_same_tokens", (", generator=generator)", ")")),
    sample("test_another_seed_draws_other_tokens",
           ("generator=generator)", "generator=generator and torch.Generator().manual_seed(0))")),
    sample("test_all_chance_is_the_generators",
           ("    choice = ", "    torch.rand(1)\n    choice = ")),
    sample("test_tokens_are_whole_numbers", (CHOSEN, "tokens.gather(-1, choice).float()")),
    sample("the logits are divided in place: make a new tensor",
           ("    best, tokens", "    logits /= temperature\n    best, tokens"),
           ("best / temperature", "best")),
    sample("test_logits_stay_as_they_were",
           ("    best, tokens", "    logits[logits < logits.topk(top_k)[0][:, -1:]] = -torch.inf\n"
            "    best, tokens")),
    sample("test_a_top_k_outside_the_vocabulary_is_refused",
           ("if not 1 <= top_k <= V", "if not 0 <= top_k <= V")),
    sample("test_a_top_k_outside_the_vocabulary_is_refused",
           ("if not 1 <= top_k <= V:", "top_k = min(top_k, V)\n    if top_k < 1:")),
    sample("test_a_top_k_outside_the_vocabulary_is_refused",
           ("raise ValueError(f\"top_k", "raise IndexError(f\"top_k")),
    *(sample("test_a_temperature_not_above_0_is_refused", ("not temperature > 0", wrong))
      for wrong in ("temperature < 0", "temperature <= 0", "temperature == 0")),
)

GENERATE = (
    # ---- which tokens
    gen("the prompt is fed again in each step, although the memory holds it: all is read twice",
        ("x = sample_top_k", "new = sample_top_k"),
        ("tokens.append(x)", "tokens.append(new)\n        x = torch.cat([x, new], dim=1)"),
        bug=19),
    gen("the prompt is read again in each step, and the new token never",
        ("model(x, memory", "model(prompt, memory")),
    gen("the memory is not handed on: every step forgets what was read before",
        ("logits, memory = model", "logits, _ = model")),
    gen("only the prompt's memory is kept: the new tokens are forgotten",
        ("logits, memory = model(x, memory, last_only=True)", "logits, new = model(x, memory)\n"
         "        memory = new if memory is None else memory")),
    gen("the logits are those of the first position: the LAST one predicts what follows",
        ("model(x, memory, last_only=True)", "model(x, memory)"),
        ("logits[:, -1]", "logits[:, 0]")),
    gen("only the last token of the prompt is read", ("x = prompt\n", "x = prompt[:, -1:]\n")),
    gen("the prompt's last token is read twice: its logits are there after the prompt",
        LOOP.format(loop=TWICE_READ)),
    gen("the prompt is returned as well: only the new tokens are asked for",
        ("[prompt[:, :0]]", "[prompt]")),
    gen("the last token of the prompt is returned as well: only the new ones are asked for",
        ("[prompt[:, :0]]", "[prompt[:, -1:]]")),
    gen("the first new token is lost", ("range(n_tokens)", "range(n_tokens + 1)"),
        ("torch.cat(tokens, dim=1)", "torch.cat(tokens, dim=1)[:, 1:]")),
    gen("the first new token is lost",
        ("torch.cat(tokens, dim=1)", "torch.cat(tokens, dim=1)[:, 1:]")),
    gen("one token too many", ("range(n_tokens)", "range(n_tokens + 1)")),
    gen("one token too few", ("range(n_tokens)", "range(n_tokens - 1)")),
    gen("the last token alone is returned", ("torch.cat(tokens, dim=1)", "x")),
    gen("the tokens are joined along the lanes: (B, n_tokens) is one row for each prompt",
        ("torch.cat(tokens, dim=1)", "torch.cat(tokens[1:], dim=0)")),
    gen("the tokens are joined along a new axis: (B, n_tokens) is one row for each prompt",
        ("torch.cat(tokens, dim=1)", "torch.stack(tokens[1:], dim=1)")),
    *(gen("sample_top_k takes the logits of the last position, (B, V), not those of all",
          ("logits[:, -1]", "logits"), ("model(x, memory, last_only=True)", call))
      for call in ("model(x, memory)", "model(x, memory, None, True)")),
    gen("sample_top_k takes the logits of the last position, (B, V): -1 belongs to the second axis",
        ("model(x, memory, last_only=True)", "model(x, memory)"), ("logits[:, -1]", "logits[-1]")),
    # ---- the shapes
    gen("the model reads a token as (B, 1), one column: keep the second axis of what was drawn",
        ("generator)  # (B, 1)", "generator)[:, 0]"), ("torch.cat(tokens, dim=1)",
                                                       "torch.stack(tokens[1:], dim=1)")),
    gen("of no tokens a tensor (B, 0) is wanted: torch.cat needs at least one",
        ("[prompt[:, :0]]", "[]")),
    gen("test_new_tokens_are_whole_numbers",
        ("torch.cat(tokens, dim=1)", "torch.cat(tokens, dim=1).float()")),
    gen("test_new_tokens_are_whole_numbers",
        ("[prompt[:, :0]]", "[]"), ("torch.cat(tokens, dim=1)", "torch.cat(tokens, dim=1) "
                                    "if tokens else torch.zeros(len(prompt), 0)")),
    # ---- how the model is called
    gen("the whole text is read again in each step: hand the memory on, read the new token only",
        LOOP.format(loop=FORGETFUL)),
    gen("the prompt is read token by token: the model reads all of it in one call",
        LOOP.format(loop=ONE_BY_ONE)),
    gen("test_nothing_is_read_in_vain",
        ("return torch.cat", "model(x, memory), model(x, memory)\n    return torch.cat")),
    gen("test_the_first_call_has_no_memory",
        ("memory = None", "memory = 0 * prompt[:, :1]"), bug=17),
    gen("test_no_gradients", ("@torch.no_grad()\n", "")),
    # ---- what is handed on
    gen("test_top_k_temperature_and_generator_are_handed_on",
        ("top_k, temperature, generator)  # (B, 1)", "top_k, temperature)")),
    gen("test_top_k_temperature_and_generator_are_handed_on",
        ("top_k, temperature, generator)  # (B, 1)", "top_k, generator=generator)")),
    gen("test_without_temperature_and_generator", ("temperature=1.0", "temperature=0.8")),
    *(gen("test_top_k_temperature_and_generator_are_handed_on",
          ("min(top_k, model.config.vocab_size)", wrong)) for wrong in ("40", "10")),
    gen("test_top_k_is_40_or_the_whole_vocabulary",
        ("min(top_k, model.config.vocab_size)", "1 * top_k")),
    gen("test_top_k_is_40_or_the_whole_vocabulary", ("top_k=40", "top_k=10")),
    gen("test_the_prompt_stays_as_it_was",
        ("return torch.cat", "if n_tokens:\n        prompt[:, -1:] = x\n    return torch.cat")),
)

TABLE = SAMPLE_TOP_K + GENERATE
