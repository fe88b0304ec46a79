"""Generation with memory and without, on the text of which all is known.

A model of minutes brings no name of real prose back, with memory or without, so
appendix_e_generation.py says nothing of memory there.  Here is the same question for the text of
corpora.py (copies), which such a model learns: each new token should be, nine times in ten, the symbol that
stood 24, 48, 72 or 96 tokens before it, by its kind.  How often is it?  A symbol is drawn from the
eight of the kind whose turn it is: one of a wrong kind would shift all that follow.

    with memory       one token after the other is read, M = 128
    without memory    the same weights and prompts, each token from the last T = 64 alone, read anew

    python experiments/generation_copies.py      three minutes on two cores; models as in
                                                 memory_length.py --dataset copies
"""
import sys
from dataclasses import replace

import torch
from matplotlib.figure import Figure

import memory_length
import common
from common import corpora
from common import lesson_5

NAME, M = "generation_copies", 128
# prompts, their length, and new tokens after each
SIZES = {"tiny": (2, 100, 20), "laptop": (16, 200, 500)}
COLORS = {"with memory": "tab:blue", "without memory": "tab:orange", "true continuation": "black"}


def repeated(tokens, start):
    """The share of tokens (B, n) from column `start` on that repeat what stood their kind's
    distance before: one for each of DISTANCES.  Column 0 is of the first kind; start >= 96.
    """
    B, n = tokens.shape
    shares = []
    for kind, d in enumerate(corpora.DISTANCES):
        places = torch.arange(start, n)
        places = places[places % len(corpora.DISTANCES) == kind]
        shares.append((tokens[:, places] == tokens[:, places - d]).double().mean().item())
    return shares


@torch.no_grad()
def continued(model, prompt, n, seed, T=0):
    """Prompt (B, P) and n tokens more, (B, P + n): with the memory of the model's config, or (T
    above 0) each from the last T tokens alone.  P is a multiple of the number of kinds.
    """
    tokens, x, memory = prompt, prompt, None
    draws = torch.Generator(prompt.device).manual_seed(seed)
    for t in range(n):
        if T:
            logits, _ = model(tokens[:, -T:], last_only=True)
        else:
            logits, memory = model(x, memory, last_only=True)
        kind = t % len(corpora.DISTANCES)
        of_kind = logits[:, 0].float().unflatten(-1, (-1, corpora.EACH))[:, kind]  # (B, EACH)
        x = corpora.EACH * kind + torch.multinomial(of_kind.softmax(-1), 1, generator=draws)
        tokens = torch.cat([tokens, x], dim=1)
    return tokens


def draw(found, path):
    """Bars for each distance, the mean of the seeds, which are dots."""
    axes = Figure(figsize=(7, 4.3), layout="constrained").subplots()
    common.bars(axes, found, COLORS)
    axes.axhline(1 / corpora.EACH, color="gray", linestyle=":", label="by chance")
    axes.set(xticks=range(len(corpora.DISTANCES)), ylim=(0, 1), xticklabels=corpora.DISTANCES,
             xlabel="distance that a kind repeats (tokens)",
             ylabel="share of new tokens that repeat it",
             title="What a generated text repeats: memory of 128, or the last 64 tokens")
    axes.figure.legend(loc="outside lower center", ncols=4)
    axes.figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def experiment(argv):
    """Train what is missing, generate, print, draw."""
    given, corpus = common.begin(common.make_flags(NAME, __doc__, SIZES).parse_args(
        ["--dataset", "copies", *(sys.argv[1:] if argv is None else argv)]), NAME)
    if given.dataset != "copies":
        raise ValueError("this is for --dataset copies; appendix_e_generation.py is for others")
    *_, setting = memory_length.SIZES["copies" if given.size == "laptop" else given.size]
    T, (B, P, n) = setting.run.segment, SIZES[given.size]
    config = replace(setting.config, vocab_size=len(corpus.vocab), n_layer=2, mem_len=T)
    stride = len(corpus.test) // B // 4 * 4  # each prompt begins with the first kind
    true = corpus.test[: B * stride].view(B, stride)[:, : P + n].long()
    found = {kind: [] for kind in COLORS}
    found["true continuation"].append(repeated(true, P))
    bar = common.Bar((setting.run.steps + n) * len(given.seeds))
    for seed in given.seeds:
        torch.manual_seed(seed)
        model = lesson_5.TransformerXL(config).to(given.device)
        run = common.choose_dtype(model, setting.run, given.out)
        model = common.fit(model, corpus, replace(run, seed=seed),
                          given.out / f"N2-M{T}-{seed}.pt", bar)
        for kind, changes, window in (
                ("with memory", {"mem_len": M, "same_length": True}, 0),
                ("without memory", {}, T)):
            with common.evaluating_with(model, **changes):
                tokens = continued(model, true[:, :P].to(given.device), n, seed, window)
            found[kind].append(repeated(tokens.cpu(), P))
        bar.advance("generating", n)
    bar.clear()
    print(f"{corpus.name}; {B} prompts of {P} tokens, {n} new ones each, seeds {given.seeds}\n"
          f"{'share that repeats what stood':30}"
          + "".join(f"{f'{d} before':>16}" for d in corpora.DISTANCES))
    for kind, values in found.items():
        print(f"{kind:30}" + "".join(f"{common.spread(z):>16}" for z in zip(*values)))
    print(f"{'by chance':30}{1 / corpora.EACH:>8}")
    draw(found, given.out / "generation_copies.png")


def main(argv=None):
    """Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    return common.run(NAME, experiment, argv)


if __name__ == "__main__":
    sys.exit(main())
