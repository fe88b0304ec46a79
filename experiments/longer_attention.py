"""The paper's second claim: a longer attention in evaluation than in training helps (section 3.3).

Each run reads the whole test split with attention lengths L: a query sees L keys, itself included.
In training it sees at most T + M.  The result is the mean loss minus that with L = T + M.  Clamped,
distances beyond those of training count as the largest of training; this needs a longer L.

A few long files may decide the sign of a difference.  So the files of the split are drawn 1,000
times with replacement; 95 percent of the resulting differences lie in the interval (bootstrap).  A
text without files has 100 parts, which are less independent, so its interval is too narrow.

    python experiments/longer_attention.py                         the model in pretrained/
    python experiments/longer_attention.py --checkpoint RUN RUN    runs of train.py
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
    if recipe.text or recipe.dataset != "stdlib":
        return [len(part) for part in corpus.test[1:].tensor_split(100)]
    first, *others = map(len, corpora.standard_library()[2])
    return [first - 1, *others]  # the first byte of the split is not predicted


def sums_by_part(reader, tokens, sizes, L, clamp_len):
    """Read tokens (n + 1,) with an attention of L -> the sum of the losses of each part, nats."""
    losses = common.memory_losses(reader, tokens.to(reader.u.device)[None].long(), 0, 512,
                                  mem_len=L - 1, same_length=True, clamp_len=clamp_len)[0]
    return torch.stack([part.double().sum() for part in losses.split(sizes)])


def difference(sums, trained, sizes):
    """Return the mean of sums - trained per prediction, and the ends of its interval, as text."""
    gaps, sizes = sums - trained, torch.tensor(sizes)
    draws = torch.randint(len(sizes), (1000, len(sizes)),
                          generator=torch.Generator().manual_seed(0))
    return common.with_interval(gaps.sum() / sizes.sum(),
                                gaps[draws].sum(1) / sizes[draws].sum(1), digits=4)


@common.make_main
def main(argv):
    """Read the test split of each run with each length, and print the differences."""
    flags = common.new_parser(NAME, __doc__, "--data-dir", "--device")
    flags.add_argument("--checkpoint", type=Path, nargs="+", default=[common.PRETRAINED],
                       metavar="RUN", help="default: the model in pretrained/")
    given = flags.parse_args(argv)
    given.device = machine.choose(given.device)
    for path in given.checkpoint:
        model, recipe, corpus, _ = common.open_run(path, given.data_dir, given.device)
        reader, sizes = fast.prepare(model), part_sizes(corpus, recipe)
        longest = recipe.segment + model.config.mem_len
        trained = sums_by_part(reader, corpus.test, sizes, longest, 0)
        print(f"{path}: {corpus.name}, {sum(sizes):,} predictions in {len(sizes)} parts\n"
              f"L {longest}: {trained.sum() / sum(sizes):.4f} {common.nats_per_token(corpus)}")
        for L in LENGTHS:
            for clamp_len in (0, longest - 1) if L > longest else (0,):
                sums = sums_by_part(reader, corpus.test, sizes, L, clamp_len)
                print(f"L {L}{', clamped' * (clamp_len > 0)}: {difference(sums, trained, sizes)}",
                      flush=True)


if __name__ == "__main__":
    sys.exit(main())
