"""Does a generated text come back to what its prompt introduced?  Samples, and a measure of it.

The problem.  Section 4.4 and appendix E show samples that keep to their subject for 1,000 tokens,
drawn from the 40 best symbols after a prompt of 512 test tokens.  A sample can convince by chance.

The idea.  A prompt introduces names.  A model that reads the last T tokens cannot know those last
seen before them; one with a memory can.  How many stand again in each of these texts?

    with memory        lesson 5's generate; M is that of the run's evaluation, or --memory
    without memory     same weights and seeds, but each token from the last T alone, read anew; T is
                       the segment of training (which had a memory; for models without see table 6)
    true continuation  what goes on in the test split
    chance             the texts with memory, and names of other prompts that their own lacks

    python experiments/appendix_e_generation.py --checkpoint runs/stdlib-laptop    a run, or a file
    python experiments/appendix_e_generation.py     trains two minutes first, in runs/generation

Rules.  A name is an identifier of four characters or more, or a word like that, not among the 500
most common of the training split (its first ten million tokens).  A prompt's names count once each,
at the age of the last: the tokens between it and the prompt's end (from T on, no part of it is
among the last T).  What touches an end of the prompt may be cut and does not count.  Shares are
over the names of all prompts.  Repetition is the share of n-grams that stood in the new text before
(16 bytes, of which an indent can be many, or 4 words), the mean over the prompts.

Minutes of training are too few: after 4 and 20 of them (one core of a busy machine; test 2.10 and
1.81 bpc) not one name in a hundred came back, with memory or without; in the true text 35 did.
"""
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure

import common
from common import RUNS, checkpoint, command_line, corpora, fast, train, validate

PROMPT, COMMON, COUNTED = 512, 500, 10_000_000
NAME = re.compile(r"\b[A-Za-z_]\w{3,}", re.ASCII)
COLORS = {"with memory": "tab:blue", "without memory": "tab:orange", "true continuation": "black",
          "chance": "tab:gray"}


# ---- the measures: a text is a str with a character for each byte, or a list of words -----------

def as_text(tokens, vocab):
    """Tokens (n,) -> n characters, or n words."""
    return corpora.as_bytes(tokens, vocab).decode("latin-1") if isinstance(vocab[0], int) else [
        vocab[token] for token in tokens.tolist()]


def repetition(text, n):
    """The share of the n-grams of a text that stood in it before, 0 to 1; 0 if it has none.

    >>> repetition("a b c d a b c d".split(), 4)  # abcd bcda cdab dabc abcd: one of five
    0.2
    """
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return (len(grams) - len(set(grams))) / max(1, len(grams))


def names(text):
    """The names in a text, in order -> [(name, where it begins, where it ends)]."""
    if isinstance(text, str):
        return [(match[0], *match.span()) for match in NAME.finditer(text)]
    return [(word, i, i + 1) for i, word in enumerate(text) if NAME.fullmatch(word)]


def come_back(prompt, before, new, left_out):
    """Which names of a prompt, `left_out` apart, stand in the new text -> [(age, whether)].

    The new text continues `before`; a name that begins there is not new.

    >>> come_back("read open(path) path, self.rea", "= self.op", "en(path)", {"self"})
    [(21, False), (10, True)]
    """
    last = {name: (start, end) for name, start, end in names(prompt)}
    there = {name for name, start, _ in names(before + new) if start >= len(before)}
    return [(len(prompt) - end, name in there) for name, (start, end) in last.items()
            if 0 < start and end < len(prompt) and name not in left_out]


def shares(pairs, T):
    """Of (age, whether) the share that came back: of all, age below T, age from T; NaN of none."""
    parts = ([back for age, back in pairs if youngest <= age < oldest]
             for youngest, oldest in ((0, math.inf), (0, T), (T, math.inf)))
    return [mean(part) if part else math.nan for part in parts]


def measure(prompts, texts, frequent, T):
    """Texts after their prompts -> [repetition, shares] of their own names; the same by chance."""
    own, others = [], []
    for before, new in zip(prompts, texts):
        own += come_back(before, before, new, frequent)
        known = frequent.union(name for name, *_ in names(before))  # none of `before` is left
        others += [pair for other in prompts for pair in come_back(other, before, new, known)]
    repeated = mean(repetition(text, 16 if isinstance(text, str) else 4) for text in texts)
    return [repeated, *shares(own, T)], [math.nan, *shares(others, T)]


# ---- the experiment -----------------------------------------------------------------------------

@torch.no_grad()
def without_memory(model, prompt, run, given):
    """As train.continue_text, (B, P) -> (B, n), but each token from the last T alone."""
    tokens = prompt.to(model.u.device)
    generator = torch.Generator(tokens.device).manual_seed(given["seed"])
    for _ in range(given["n_tokens"]):  # the model's config is still that of training
        logits, _ = model(tokens[:, -run.segment :], last_only=True)
        tokens = torch.cat([tokens, train.lesson_5.sample_top_k(
            logits[:, -1], given["top_k"], given["temperature"], generator)], dim=1)
    return tokens[:, prompt.shape[1] :].cpu()


def parse(argv):
    """The command line, checked.  ValueError."""
    parser = command_line.Parser(prog="experiments/appendix_e_generation.py", description=__doc__,
                                 argument_default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name, kind, default in (
            ("checkpoint", Path, None), ("data-dir", Path, RUNS.parent / "data"),
            ("out", Path, RUNS / "generation"), ("prompts", int, 8), ("n-tokens", int, 1000),
            ("top-k", int, 40), ("temperature", float, 1.0), ("memory", int, None)):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default}")
    given = parser.parse_args(argv)
    if len(set(given.seeds)) < len(given.seeds):
        raise ValueError(f"--seeds must be different, got {given.seeds}")
    for name, values, least in (("seeds", given.seeds, 0), ("prompts", [given.prompts], 2),
                                ("n-tokens", [given.n_tokens], 1), ("memory", [given.memory], 0)):
        if values != [None] and not least <= min(values) <= max(values) <= validate.MOST:
            raise ValueError(f"--{name} must be from {least} to {validate.MOST}, got {values}")
    return given


def load(given):
    """The model to sample from, its run and its corpus; one is trained first if none is named."""
    path = given.checkpoint or given.out
    if not given.checkpoint and not (path / "curve.png").exists():  # drawn when a run has ended
        if status := train.main(["--minutes", "2", "--out", str(path)]):
            raise SystemExit(status)  # train.py has said why
    if not (path.is_file() or any(path.glob("*.pt"))):
        raise ValueError(f"no checkpoint at {path}: name the folder of a run of train.py")
    content = checkpoint.newest(path) if path.is_file() else checkpoint.best(path)
    model, run, _ = train.restored(content, "cuda" if torch.cuda.is_available() else "cpu")
    if given.memory is not None:
        run = replace(run, eval_mem_len=given.memory)
    return model, run, train.read_corpus({"data_dir": given.data_dir}, run, content)


def draw(rows, T, path, title):
    """The table as bars, each the mean of its seeds, which are dots."""
    axes = Figure(figsize=(7.5, 4), layout="constrained").subplots()
    common.bars(axes, rows, COLORS)
    axes.set(xticks=range(4), ylabel="share", ylim=(0, None), title=title, xticklabels=(
        "n-grams\nthat repeat", "names that\ncome back: all",
        f"... last seen in\nthe last {T} tokens", "... last seen\nbefore these"))
    axes.figure.legend(loc="outside upper center", ncols=4)
    checkpoint.write(path, lambda file: axes.figure.savefig(file, dpi=120), "wb")


def experiment(argv):
    """Sample with and without memory, measure, write, draw, print."""
    given = parse(argv)
    model, run, corpus = load(given)
    B, n, T, vocab, seeds = given.prompts, given.n_tokens, run.segment, corpus.vocab, given.seeds
    command_line.check_sampling(vars(given), len(vocab))
    stride = len(corpus.test) // B
    if stride < PROMPT + n:
        raise ValueError(f"the test split has {len(corpus.test):,} tokens; {B} prompts of {PROMPT} "
                         f"and their continuations of {n} take {B * (PROMPT + n):,}")
    tokens = corpus.test[: B * stride].view(B, stride)[:, : PROMPT + n].long()
    given.out.mkdir(parents=True, exist_ok=True)
    new, reader = {}, fast.Reader(model)  # kind: (B, n) for each seed
    for kind, sample in zip(COLORS, (train.continue_text, without_memory)):
        bar = common.Bar(len(seeds) * n)
        # each token that is made is read by one call of the embedding
        hook = model.embedding.register_forward_hook(lambda *_: bar.advance(kind))
        new[kind] = [sample(reader, tokens[:, :PROMPT], run, vars(given) | {"seed": seed})
                     for seed in seeds]
        hook.remove()
        bar.clear()
    new["true continuation"] = [tokens[:, PROMPT:]]
    prompts = [as_text(z, vocab) for z in tokens[:, :PROMPT]]
    counts, parts = Counter(), corpus.train[:COUNTED].split(2**20)
    for part in train.progress(parts, "counting names", len(parts)):
        counts.update(name for name, *_ in names(as_text(part, vocab)))
    frequent = {name for name, _ in counts.most_common(COMMON)}
    both = {kind: [measure(prompts, [as_text(z, vocab) for z in texts], frequent, T)
                   for texts in new[kind]] for kind in new}
    rows = {kind: [own for own, _ in values] for kind, values in both.items()}
    rows["chance"] = [others for _, others in both["with memory"]]
    samples = [f"=== prompt {i + 1}, {kind} {k + 1}\n{corpora.decode(z[:PROMPT], vocab)}>>>"
               f"{corpora.decode(texts[i], vocab)}\n" for i, z in enumerate(tokens)
               for kind in new for k, texts in enumerate(new[kind])]
    checkpoint.write(given.out / "samples.txt",
                     lambda file: file.write("\n".join(samples).encode()), "wb")
    draw(rows, T, given.out / "generation.png", f"{n:,} new tokens after each of {B} prompts")

    ages = [age for z in prompts for age, _ in come_back(z, z, z[:0], frequent)]
    print(f"{samples[0]}===\n{corpus.name}\n{B} prompts of {PROMPT} tokens, {n:,} new ones each, "
          f"top-{given.top_k}, temperature {given.temperature}, seeds {seeds}\n"
          f"M {run.eval_mem_len}, T {T}; {len(ages)} names, {sum(age < T for age in ages)} of them "
          f"among the last T tokens\n"
          f"{'':17}{'repetition':>15}{'names back: all':>17}{'in the last T':>15}{'before':>15}")
    for kind, values in rows.items():
        print(f"{kind:17}" + "".join("-".rjust(w) if math.isnan(z[0]) else common.spread(z).rjust(w)
                                     for z, w in zip(zip(*values), (15, 17, 15, 15))))
    print(f"samples: {given.out / 'samples.txt'}\nfigure: {given.out / 'generation.png'}")


def main(argv=None):
    """Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    return common.run("appendix_e_generation", experiment, argv)


if __name__ == "__main__":
    sys.exit(main())
