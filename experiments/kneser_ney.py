"""A bar for the word models: an n-gram model with interpolated, modified Kneser-Ney smoothing.

What counting can do (Chen & Goodman 1998, "An empirical study of smoothing techniques").  The idea:
take something off every count, and give what was taken to a shorter context, in which a word counts
not by how often it came but by how many different words it came after ("Francisco" is frequent, but
only after "San"):

    p(w | h) = (c(h w) - D) / c(h)  +  g(h) p(w | h without its first word)

with c(h w) the count at the longest context, the number of different words before h w at shorter
ones (but the count, if h begins a line: nothing stands before it); D one of three discounts, for a
c(h w) of 1, of 2 and of more; g(h) what the discounts of h free, so that all sums to 1; and below a
single word the uniform 1 / V.  Contexts begin with the `<eos>` of the line before and never reach
across it.  Like the neural models it predicts all of the test split with `<eos>`, but for the first
token.  For small corpora: the counts are a dictionary.

    python experiments/kneser_ney.py --dataset ptb --data-dir data      a 5-gram, half a minute
    python experiments/kneser_ney.py --dataset ptb --order 3
"""
import math
import sys
from collections import Counter

import common
from support import corpora
from support.progress import progress

NAME = "kneser_ney"
EOS = 0  # the token of <eos>


def contexts(tokens, order):
    """Yield (context, word) for each token but the first: up to order - 1 tokens of its own line.

    The `<eos>` before the line is the context of its first word.
    """
    context = tuple(tokens[:1])
    for word in tokens[1:]:
        context = context[max(0, len(context) - order + 1) :]
        yield context, word
        context = (word,) if word == EOS else context + (word,)


class KneserNey:
    """Counts of a training text (n,) of tokens below V; `order` words long at most."""

    def __init__(self, tokens, V, order):
        if order < 1:
            raise ValueError(f"--order must be at least 1, got {order}")
        self.V, self.order = V, order
        self.counts = Counter()  # of n-grams of all lengths
        for context, word in progress(contexts(tokens, order), "counting token", len(tokens)):
            gram = context + (word,)
            self.counts[gram] += 1
            while len(gram) > 1 and self.counts[gram] == 1:  # a new word before the shorter one
                gram = gram[1:]
                self.counts[gram] += 1
        self.discounts = [self.discount(length) for length in range(order + 1)]
        self.total, self.freed = Counter(), Counter()  # c(h), and g(h) c(h)
        for gram, count in self.counts.items():
            self.total[gram[:-1]] += count
            self.freed[gram[:-1]] += self.discounts[len(gram)][min(count, 3)]

    def discount(self, length):
        """[0, D1, D2, D3] from the numbers n of n-grams that count 1, 2, 3 and 4 (section 3)."""
        n = Counter(count for gram, count in self.counts.items() if len(gram) == length)
        if n[1] and n[2] and n[3]:
            Y = n[1] / (n[1] + 2 * n[2])
            D = [k - (k + 1) * Y * n[k + 1] / n[k] for k in (1, 2, 3)]
            if all(0 < d < k for k, d in enumerate(D, 1)):
                return [0.0, *D]
        return [0.0, 0.5, 0.5, 0.5]  # too little text to estimate them

    def probability(self, context, word):
        """p(word | context), from the shortest context to the longest."""
        p = 1 / self.V
        for start in range(len(context), -1, -1):
            h = context[start:]
            if h not in self.total:
                return p  # a context that never came; no longer one can have come either
            count = self.counts[h + (word,)]
            discount = self.discounts[len(h) + 1][min(count, 3)]
            p = (count - discount + self.freed[h] * p) / self.total[h]
        return p

    def loss(self, tokens):
        """Mean -ln p over tokens (n,) but the first, in nats."""
        pairs = progress(contexts(tokens, self.order), "testing token", len(tokens))
        return -sum(math.log(self.probability(*pair)) for pair in pairs) / (len(tokens) - 1)


@common.command
def main(argv):
    """Print the perplexity of the test split."""
    flags = common.new_parser(NAME, __doc__, "--data-dir")
    flags.add_argument("--dataset", default="ptb")
    flags.add_argument("--order", type=int, default=5)
    given = flags.parse_args(argv)
    corpus = corpora.load(given.dataset, root=given.data_dir)
    if corpus.unit != "ppl":
        raise ValueError(f"{corpus.name} is no text of words")
    model = KneserNey(corpus.train.tolist(), len(corpus.vocab), given.order)
    value = math.exp(model.loss(corpus.test.tolist()))
    print(f"test {value:.2f} ppl ({given.order}-gram, interpolated modified Kneser-Ney, "
          f"{len(corpus.test) - 1:,} predictions; {corpus.name})")


if __name__ == "__main__":
    sys.exit(main())
