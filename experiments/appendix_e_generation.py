"""Appendix E of the paper: do the names of a prompt recur in the text generated after it?

The problem.  Section 4.4 and appendix E show samples that keep to their subject for 1,000 tokens,
drawn from the 40 best symbols after a prompt of 512 test tokens.  A sample can convince by chance.

The idea.  A prompt introduces names.  A model that reads the last T tokens cannot know those last
seen before them; one with a memory can.  How many stand again in each of these texts?

    with memory        one token after the other is read; M is --memory, or that of evaluation
    without memory     same weights and seeds, but each token from the last T alone, read anew; T is
                       the segment of training (which had a memory; for models without see table 6)
    true continuation  what goes on in the test split
    chance             the texts with memory, and names of other prompts that their own lacks

    python experiments/appendix_e_generation.py     of the model in pretrained/; --seeds 0: one draw
    python experiments/appendix_e_generation.py --checkpoint runs/stdlib-laptop    a run, or a file
    python experiments/appendix_e_generation.py --dataset stdlib     trains two minutes first
    python experiments/appendix_e_generation.py --dataset copies     where all is known; minutes

Rules.  A name is an identifier of four characters or more, or a word like that, not among the 500
most common of the training split (its first ten million tokens).  A prompt's names count once each,
at the age of the last: the tokens between it and the prompt's end (from T on, no part of it is
among the last T).  What touches an end of the prompt may be cut and does not count.  Shares are
over the names of all prompts.  Repetition is the share of n-grams that stood in the new text before
(16 bytes, of which an indent can be many, or 4 words), the mean over the prompts.

The synthetic text is one that a small model learns: each new token should be, nine times in ten,
the symbol that stood 24, 48, 72 or 96 tokens before it, by its kind.  How often is it, with M = 128
and from the last 64 alone?  It is drawn from the eight of the kind whose turn it is: one of a wrong
kind would shift all that follow.  A seed is that of a model, too; the models are those of
memory_length.py --dataset copies, and taken from there if --out names its folder.
"""
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from statistics import mean

import torch
from matplotlib.figure import Figure

import common
import memory_length
from common import Flags, checkpoint, corpora, fast, flag, lesson_1, lesson_5, machine, train

NAME = "appendix_e_generation"
COMMON, COUNTED = 500, 10_000_000
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w{3,}", re.ASCII)
COLORS = {"with memory": "C0", "without memory": "C1", "true continuation": "k", "chance": "C7"}
# prompts, their length, and new tokens after each
SIZES = {"tiny": (2, 100, 20), "laptop": (8, 512, 1000), "copies": (16, 200, 500)}


# ---- the measures: a text is a str with a character for each byte, or a list of words -----------

def as_text(tokens, vocab):
    """Tokens (n,) -> n characters, or n words."""
    if isinstance(vocab[0], int):
        return corpora.as_bytes(tokens, vocab).decode("latin-1")
    return [vocab[token] for token in tokens.tolist()]


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
        return [(match[0], *match.span()) for match in IDENTIFIER.finditer(text)]
    return [(word, i, i + 1) for i, word in enumerate(text) if IDENTIFIER.fullmatch(word)]


def recurring(prompt, before, new, left_out):
    """Which names of a prompt, `left_out` apart, stand in the new text -> [(age, whether)].

    The new text continues `before`; a name that begins there is not new.

    >>> recurring("read open(path) path, self.rea", "= self.op", "en(path)", {"self"})
    [(21, False), (10, True)]
    """
    last = {name: (start, end) for name, start, end in names(prompt)}
    there = {name for name, start, _ in names(before + new) if start >= len(before)}
    return [(len(prompt) - end, name in there) for name, (start, end) in last.items()
            if 0 < start and end < len(prompt) and name not in left_out]


def shares(pairs, T):
    """Of (age, whether) the share that recur: of all, age below T, age from T; NaN of none."""
    parts = ([again for age, again in pairs if youngest <= age < oldest]
             for youngest, oldest in ((0, math.inf), (0, T), (T, math.inf)))
    return [mean(part) if part else math.nan for part in parts]


def measure(prompts, texts, frequent, T):
    """Texts after their prompts -> [repetition, shares] of their own names; the same by chance."""
    own, others = [], []
    for before, new in zip(prompts, texts):
        own += recurring(before, before, new, frequent)
        known = frequent.union(name for name, *_ in names(before))  # none of `before` is left
        others += [pair for other in prompts for pair in recurring(other, before, new, known)]
    repeated = mean(repetition(text, 16 if isinstance(text, str) else 4) for text in texts)
    return [repeated, *shares(own, T)], [math.nan, *shares(others, T)]


def measure_names(prompts, new, corpus, T):
    """What recurs in real text: names of the columns, and a row for each kind of text, the
    columns of each seed; new {kind: (B, n) for each seed}, prompts (B, P).
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
    return ("repetition", "recurring: all", f"in the last {T}", "before"), rows


def repeated(tokens, start):
    """The share of tokens (B, n) from column `start` on that repeat what stood their kind's
    distance before: one for each of DISTANCES.  Column `start` is of the first kind; start >= 96.
    """
    shares = []
    for kind, d in enumerate(corpora.DISTANCES):
        mine = torch.arange(start + kind, tokens.shape[1], len(corpora.DISTANCES))
        shares.append((tokens[:, mine] == tokens[:, mine - d]).double().mean().item())
    return shares


def measure_copies(prompts, new):
    """As measure_names, for the synthetic text: what stands again at the known distances."""
    rows = {kind: [repeated(torch.cat([prompts, texts], dim=1), prompts.shape[1])
                   for texts in new[kind]] for kind in new}
    rows["chance"] = [[1 / corpora.EACH] * len(corpora.DISTANCES)]
    return [f"{d} before" for d in corpora.DISTANCES], rows


# ---- models and samples -------------------------------------------------------------------------

def parse(argv):
    """The command line, checked.  ValueError."""
    parser = common.make_flags(NAME, __doc__, ("tiny", "laptop"))
    parser.add_argument("--checkpoint", **common.SHARED["--checkpoint"])
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    numbers = {"prompts": (2, "8; 16 of copies"), "n_tokens": (1, "1000; 500 of copies"),
               "top_k": (1, "40"), "memory": (0, "the run's; 128 of copies")}
    for name, (_, default) in numbers.items():
        parser.add_argument(flag(name), type=int, help=f"default: {default}")
    given = parser.parse_args(argv)
    if given.checkpoint and (given.dataset or given.text):
        raise ValueError("--checkpoint has its own text: leave out --dataset and --text")
    if not (given.checkpoint or given.dataset or given.text):
        given.checkpoint = common.PRETRAINED
    if given.checkpoint and not given.out:
        given.out = lesson_1.RUNS / f"{NAME}-{given.checkpoint.stem}"
    for name, (least, _) in numbers.items():
        if (value := getattr(given, name)) is not None and value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
    return given


def load_run(given):
    """The model of a run, made first if none is named, for each seed; its Run and its corpus."""
    path = given.checkpoint or given.out / "run"
    if not given.checkpoint:
        length = ["--model", "tiny"] if given.size == "tiny" else ["--minutes", "2"]
        source = ["--text" if given.text else "--dataset", given.dataset]
        common.train_run(path, [*length, *source, "--data-dir", str(given.data_dir),
                                "--device", given.device])
    model, run, corpus, _ = common.open_run(path, given.data_dir, given.device)
    return dict.fromkeys(given.seeds, model), run, corpus


def train_copies(given, corpus):
    """A model of the synthetic text for each seed, {seed: model}, and how they were trained."""
    sizes = memory_length.SIZES
    _, (*_, M), setting = sizes[common.size_of(given, sizes)]
    config = replace(setting.config, vocab_size=len(corpus.vocab), n_layer=2, mem_len=M)

    def make():
        return lesson_5.TransformerXL(config).to(given.device)

    run = common.choose_dtype(make(), setting.run, given.out)
    models = common.fit_seeds(make, corpus, run, given, f"N2-M{M}")
    return dict(zip(given.seeds, models)), replace(run, dataset="copies", eval_mem_len=128)


@torch.no_grad()
def continued(model, prompts, given, seed, T=0, in_turn=False):
    """Prompts (B, P) -> what the model makes after them, (B, n_tokens): with the memory of its
    config or, T above 0, each token from the last T alone.  in_turn: only symbols of the kind whose
    turn it is in the synthetic text; the first kind begins.
    """
    text, x, memory = prompts, prompts, None
    draws = torch.Generator(prompts.device).manual_seed(seed)
    for t in train.progress(range(given.n_tokens), "sampling token", given.n_tokens):
        part, past = (text[:, -T:], None) if T else (x, memory)
        logits, memory = model(part, past, last_only=True)
        logits = logits[:, -1]  # (B, V)
        if in_turn:
            kinds = torch.arange(logits.shape[1], device=x.device) // corpora.EACH
            logits = logits.masked_fill(kinds != t % len(corpora.DISTANCES), float("-inf"))
        x = lesson_5.sample_top_k(logits, given.top_k, given.temperature, draws)  # (B, 1)
        text = torch.cat([text, x], dim=1)
    return text[:, prompts.shape[1] :].cpu()


def sample(models, prompts, run, given):
    """{kind: what each seed makes of the prompts (B, P), (B, n)}, with memory and without."""
    new, in_turn = {"with memory": [], "without memory": []}, run.dataset == "copies"
    prompts, T = prompts.to(given.device), run.segment
    for seed, model in models.items():
        reader = fast.prepared(model)
        with train.evaluating(reader, run), machine.finite_logits():
            new["with memory"].append(continued(reader, prompts, given, seed, 0, in_turn))
        new["without memory"].append(continued(reader, prompts, given, seed, T, in_turn))
    return new


# ---- the experiment -----------------------------------------------------------------------------

def prompts_of(corpus, given, run):
    """Prompts (B, P) of the test split, and how they go on there, (B, n).  Completes the flags that
    the text decides.  ValueError if they do not fit it.
    """
    synthetic, available = run.dataset == "copies", len(corpus.test)
    B, P, n = SIZES["copies" if synthetic and given.size == "laptop" else given.size]
    B, n = given.prompts or B, given.n_tokens or n
    given.n_tokens, given.top_k = n, min(given.top_k or 40, len(corpus.vocab))
    Flags(temperature=given.temperature)  # refuses what cannot be drawn
    turns = len(corpora.DISTANCES) if synthetic else 1
    stride = available // B // turns * turns  # each prompt begins with the first kind
    if stride < P + n:
        raise ValueError(f"the test split has {available:,} tokens; {B} prompts of {P} and their "
                         f"continuations of {n} take {B * (P + n):,}")
    tokens = corpus.test[: B * stride].view(B, stride)[:, : P + n].long()
    return tokens.tensor_split([P], dim=1)


def write_samples(prompts, new, vocab, path):
    """All texts after their prompts, into a file; print the first."""
    samples = [f"=== prompt {i + 1}, {kind} {k + 1}\n{corpora.decode(prompt, vocab)}>>>"
               f"{corpora.decode(texts[i], vocab)}\n" for i, prompt in enumerate(prompts)
               for kind in new for k, texts in enumerate(new[kind])]
    checkpoint.write(path, lambda file: file.write("\n".join(samples).encode()), "wb")
    print(f"{samples[0]}===\nsamples: {path}")


def draw(columns, rows, path, title):
    """The table as bars, each the mean of its seeds, which are dots."""
    axes = Figure(figsize=(7.5, 4), layout="constrained").subplots()
    for i, (name, seeds) in enumerate(rows.items()):
        x = [k + 0.2 * (i - 1.5) for k in range(len(columns))]
        axes.bar(x, list(map(mean, zip(*seeds))), 0.18, color=COLORS[name], alpha=0.5, label=name)
        axes.plot(x, list(zip(*seeds)), "o", color=COLORS[name], markersize=4)
    axes.set_xticks(range(len(columns)), columns)
    axes.set(ylabel="share", ylim=(0, None), title=title)
    axes.figure.legend(loc="outside upper center", ncols=4)
    common.save_figure(axes.figure, path)


@common.command
def main(argv):
    """Sample with and without memory, measure, write, print, draw."""
    given, corpus = common.begin(parse(argv), NAME)
    if given.dataset == "copies":
        models, run = train_copies(given, corpus)
    else:
        models, run, corpus = load_run(given)
    if given.memory is not None:
        run = replace(run, eval_mem_len=given.memory)
    prompts, true = prompts_of(corpus, given, run)
    (B, P), n = prompts.shape, given.n_tokens
    new = sample(models, prompts, run, given) | {"true continuation": [true]}
    write_samples(prompts, new, corpus.vocab, given.out / "samples.txt")
    print(f"{corpus.name}\n{B} prompts of {P} tokens, {n:,} new ones each, top-{given.top_k}, "
          f"temperature {given.temperature}, seeds {given.seeds}\n"
          f"M {run.eval_mem_len}, T {run.segment}")
    columns, rows = measure_copies(prompts, new) if run.dataset == "copies" else measure_names(
        prompts, new, corpus, run.segment)
    print(" " * 17 + "".join(f"{column:>17}" for column in columns))
    for kind, values in rows.items():
        print(f"{kind:17}" + "".join(f"{'-' if math.isnan(z[0]) else common.spread(z):>17}"
                                     for z in zip(*values)))
    draw(columns, rows, given.out / "generation.png", f"{n:,} new tokens after each of {B} prompts")


if __name__ == "__main__":
    sys.exit(main())
