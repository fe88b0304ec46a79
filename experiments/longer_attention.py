"""The paper's second claim: a longer attention in evaluation than in training helps (section 3.3).

Each run reads the whole test split with several attention lengths L: a query sees L keys, itself
included.  In training it sees at most T + M.  Each loss is given as the difference to the loss with
that length, once as the model is, and once clamped: distances beyond those of training count as the
largest of training.

The test split is a sample of texts, and a few long files may decide the sign of a difference.  So
the files are drawn 1,000 times with replacement, as many as there are; 95 percent of the resulting
differences lie in the interval (bootstrap).  A text without files has 100 equal parts, which are
less independent, so its interval is too narrow.

    python experiments/longer_attention.py                         the model in pretrained/
    python experiments/longer_attention.py --checkpoint RUN RUN    runs of train.py; also models of
                                            table 6 with our encoding and recurrence
"""
import sys
from pathlib import Path

import common  # before torch

import torch

from common import corpora, fast, machine

NAME = "longer_attention"
LENGTHS = 128, 256, 512, 1024, 2048


def part_sizes(corpus, recipe):
    """Return the number of predictions in each file, or part, of the test split."""
    n = len(corpus.test) - 1
    if recipe.text or recipe.dataset != "stdlib":
        return [len(part) for part in torch.arange(n).tensor_split(100)]
    first, *others = map(len, corpora.standard_library()[2])
    return [first - 1, *others]  # the first byte of the split is not predicted


def sums_by_part(reader, tokens, sizes, L, clamp_len):
    """Read tokens (n + 1,) with an attention of L -> the sum of the losses of each part, nats."""
    losses = common.memory_losses(reader, tokens.to(reader.u.device)[None].long(), 0, 512,
                                  mem_len=L - 1, same_length=True, clamp_len=clamp_len)[0]
    return torch.stack([part.double().sum() for part in losses.split(sizes)])


def difference(sums, trained, sizes):
    """Return the mean of sums - trained per prediction, and the ends of its 95 percent interval,
    from the sums of each part and the parts' sizes.
    """
    gaps, sizes = sums - trained, torch.tensor(sizes)
    draws = torch.randint(len(sizes), (1000, len(sizes)),
                          generator=torch.Generator().manual_seed(0))
    means = gaps[draws].sum(1) / sizes[draws].sum(1)
    return gaps.sum() / sizes.sum(), *means.quantile(torch.tensor([0.025, 0.975]).double())


@common.make_main
def main(argv):
    """Read the test split of each run with each length, and print the differences."""
    flags = common.new_parser(NAME, __doc__, "--data-dir", "--device")
    flags.add_argument("--checkpoint", type=Path, nargs="+", metavar="RUN",
                       default=[common.PRETRAINED], help="default: the model in pretrained/")
    flags.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in tokens")
    given = flags.parse_args(argv)
    if min(given.lengths) < 1:
        raise ValueError(f"--lengths must be at least 1, got {min(given.lengths)}")
    given.device = machine.choose(given.device)
    for path in given.checkpoint:
        model, recipe, corpus, _ = common.open_run(path, given.data_dir, given.device)
        reader, sizes = fast.prepare(model), part_sizes(corpus, recipe)
        longest = recipe.segment + model.config.mem_len
        trained = sums_by_part(reader, corpus.test, sizes, longest, 0)
        print(f"{path}: {corpus.name}, {sum(sizes):,} predictions in {len(sizes)} parts; at the "
              f"attention of training, {longest}: {trained.sum() / sum(sizes):.4f} "
              f"{common.nats_per_token(corpus)}\n{'L':>6}{'difference':>12}{'interval':>20}"
              f"{'clamped':>12}{'interval':>20}")
        for L in given.lengths:
            clamps = (0, longest - 1) if L > longest else (0,)
            columns = [difference(sums_by_part(reader, corpus.test, sizes, L, clamp), trained,
                                  sizes) for clamp in clamps]
            print(f"{L:6}" + "".join(f"{middle:+12.4f}{f'{low:+.4f} to {high:+.4f}':>20}"
                                     for middle, low, high in columns), flush=True)


if __name__ == "__main__":
    sys.exit(main())
