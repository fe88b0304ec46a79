"""Appendix E of the paper: do the names of a prompt recur in the text generated after it?

Section 4.4 and appendix E show samples that keep to their subject for 1,000 tokens, drawn from the
40 best symbols after a prompt of 512 test tokens.  A sample can convince by chance.  But a prompt
introduces names, and a model that reads the last T tokens cannot know those last seen before them;
one with a memory can.  How many recur in each of these texts?

    with memory        one token after the other is read; M is that of the run's evaluation
    without memory     same weights and seeds, but each token from the last T alone, all read again;
                       T is the segment length of training (models without memory: table 6)
    true continuation  the next tokens of the test split
    chance             the texts with memory, and names of other prompts that their own lacks

    python experiments/appendix_e_generation.py     the model in pretrained/; --seeds 0: one draw
    python experiments/appendix_e_generation.py --checkpoint runs/stdlib-laptop    a run, or a file

Rules.  A name is an identifier of four characters or more, or a word like that, not among the 500
most common of the training split (its first ten million tokens).  A prompt's names count once each,
at the age of the last: the tokens between it and the prompt's end (from T on, no part of it is
among the last T).  What touches an end of the prompt may be incomplete and does not count.
"""
import math
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

import common  # before torch

import torch

from common import corpora, fast, lesson_1, lesson_5, machine, train
from support.files import write_atomically

NAME = "appendix_e_generation"
COMMON, COUNTED = 500, 10_000_000
TOP_K = 40  # the paper's
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w{3,}", re.ASCII)


def as_text(tokens, vocab):
    """Return tokens (n,) as n characters, or n words."""
    if isinstance(vocab[0], int):
        return corpora.as_bytes(tokens, vocab).decode("latin-1")
    return [vocab[token] for token in tokens.tolist()]


def names(text):
    """Return the names in a text, in order: [(name, where it begins, where it ends)]."""
    if isinstance(text, str):
        return [(match[0], *match.span()) for match in IDENTIFIER.finditer(text)]
    return [(word, i, i + 1) for i, word in enumerate(text) if IDENTIFIER.fullmatch(word)]


def recurring(prompt, before, new, left_out):
    """Return [(age, whether it recurs in the new text)] for the names of a prompt but `left_out`.

    The new text continues `before`; a name that begins there is not new.

    >>> recurring("read open(path) path, self.rea", "= self.op", "en(path)", {"self"})
    [(21, False), (10, True)]
    """
    last = {name: (start, end) for name, start, end in names(prompt)}
    there = {name for name, start, _ in names(before + new) if start >= len(before)}
    return [(len(prompt) - end, name in there) for name, (start, end) in last.items()
            if 0 < start and end < len(prompt) and name not in left_out]


def shares(pairs, T):
    """Return the share of (age, whether) that recur: all, age below T, from T; NaN of none."""
    parts = ([again for age, again in pairs if youngest <= age < oldest]
             for youngest, oldest in ((0, math.inf), (0, T), (T, math.inf)))
    return [mean(part) if part else math.nan for part in parts]


def measure(prompts, texts, frequent, T):
    """Return the shares of the prompts' own names that recur, and of others', by chance."""
    own, others = [], []
    for before, new in zip(prompts, texts):
        own += recurring(before, before, new, frequent)
        known = frequent.union(name for name, *_ in names(before))  # none of `before` is left
        others += [pair for other in prompts for pair in recurring(other, before, new, known)]
    return shares(own, T), shares(others, T)


def measure_all(prompts, new, corpus, T):
    """Return a row for each kind of text, the shares of each seed, of new {kind: [(B, n) per seed]}
    after prompts (B, P).
    """
    def texts_of(rows):
        return [as_text(row, corpus.vocab) for row in rows]

    prompts, counts, parts = texts_of(prompts), Counter(), corpus.train[:COUNTED].split(2**20)
    for part in train.progress(parts, "counting names", len(parts)):
        counts.update(name for name, *_ in names(as_text(part, corpus.vocab)))
    frequent = {name for name, _ in counts.most_common(COMMON)}
    measured = {kind: [measure(prompts, texts_of(z), frequent, T) for z in seeds]
                for kind, seeds in new.items()}
    rows = {kind: [own for own, _ in seeds] for kind, seeds in measured.items()}
    rows["chance"] = [others for _, others in measured["with memory"]]
    ages = [age for z in prompts for age, _ in recurring(z, z, z[:0], frequent)]
    print(f"{len(ages)} names, {sum(age < T for age in ages)} of them among the last T tokens")
    return rows


@torch.no_grad()
def continued(model, prompts, given, seed, T=0):
    """Continue prompts (B, P) -> (B, n_tokens): with the memory of the model's config or, T above
    0, each token from the last T alone.
    """
    text, x, memory = prompts, prompts, None
    generator = torch.Generator(prompts.device).manual_seed(seed)
    for _ in train.progress(range(given.n_tokens), "sampling token", given.n_tokens):
        part, past = (text[:, -T:], None) if T else (x, memory)
        logits, memory = model(part, past, last_only=True)  # (B, 1, V)
        top_k = min(TOP_K, logits.shape[-1])
        x = lesson_5.sample_top_k(logits[:, -1], top_k, 1.0, generator)
        text = torch.cat([text, x], dim=1)
    return text[:, prompts.shape[1] :].cpu()


def sample(model, prompts, recipe, given):
    """Return {kind: [the texts (B, n) of each seed]} after prompts (B, P)."""
    reader, new = fast.prepare(model), {"with memory": [], "without memory": []}
    prompts = prompts.to(given.device)
    for seed in given.seeds:
        with train.evaluating(reader, recipe):
            new["with memory"].append(continued(reader, prompts, given, seed))
        new["without memory"].append(continued(reader, prompts, given, seed, recipe.segment))
    return new


def prompts_of(corpus, given):
    """Return prompts (B, P) of the test split, and how they continue there, (B, n).  ValueError if
    the split is too short.
    """
    available, (B, P, n) = len(corpus.test), (given.prompts, given.length, given.n_tokens)
    stride = available // B
    if stride < P + n:
        raise ValueError(f"the test split has {available:,} tokens; {B} prompts of {P} and their "
                         f"continuations of {n} take {B * (P + n):,}")
    return corpus.test[: B * stride].view(B, stride)[:, : P + n].long().tensor_split([P], dim=1)


def write_samples(prompts, new, vocab, path):
    """Write all texts, after their prompts, into a file; print the first."""
    samples = [f"=== prompt {i + 1}, {kind} {k + 1}\n{corpora.decode(prompt, vocab)}>>>"
               f"{corpora.decode(texts[i], vocab)}\n" for i, prompt in enumerate(prompts)
               for kind in new for k, texts in enumerate(new[kind])]
    write_atomically(path, lambda file: file.write("\n".join(samples).encode()))
    print(f"{samples[0]}===\nsamples: {path}")


@common.make_main
def main(argv):
    """Sample with and without memory, write the texts, print the shares."""
    flags = common.new_parser(NAME, __doc__, "--seeds", "--data-dir", "--device", "--checkpoint")
    flags.set_defaults(checkpoint=common.PRETRAINED)
    for name, value in (("--prompts", 8), ("--length", 512), ("--n-tokens", 1000)):
        flags.add_argument(name, type=int, default=value, help=f"default: {value}")
    flags.add_argument("--out", type=Path, help=f"default: runs/{NAME}-, and the run's folder")
    given = flags.parse_args(argv)
    given.device = machine.choose(given.device)
    if given.prompts < 2 or given.length < 1 or given.n_tokens < 1:
        raise ValueError("--prompts must be at least 2, --length and --n-tokens at least 1")
    model, recipe, corpus, saved = common.open_run(given.checkpoint, given.data_dir, given.device)
    prompts, true = prompts_of(corpus, given)
    given.out = given.out or lesson_1.RUNS / f"{NAME}-{saved.path.resolve().parent.name}"
    given.out.mkdir(parents=True, exist_ok=True)
    new = sample(model, prompts, recipe, given) | {"true continuation": [true]}
    write_samples(prompts, new, corpus.vocab, given.out / "samples.txt")
    print(f"{corpus.name}\n{given.prompts} prompts of {given.length} tokens, {given.n_tokens:,} "
          f"new ones each, seeds {given.seeds}\n"
          f"M {recipe.eval_mem_len}, T {recipe.segment}")
    rows = measure_all(prompts, new, corpus, recipe.segment)
    print(f"{'recurring:':17}{'all':>17}{f'in the last {recipe.segment}':>17}{'before':>17}")
    for kind, values in rows.items():
        print(f"{kind:17}" + "".join(f"{'-' if math.isnan(z[0]) else common.spread(z):>17}"
                                     for z in zip(*values)))


if __name__ == "__main__":
    sys.exit(main())
