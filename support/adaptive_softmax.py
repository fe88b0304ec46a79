"""The adaptive softmax: words in and out where the vocabulary is large (Grave et al. 2017).

Most of WikiText-103's 267,735 words are rare, and a full softmax would spend most of its work on
them.  Lesson 5's model uses this class if its configuration has cutoffs; for bytes it needs none.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


def float32_at_least(logits):
    """Return logits as float32 or more: a softmax sums V small numbers, which bf16 would lose."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class AdaptiveSoftmax(nn.Module):
    """Embedding and softmax of a vocabulary sorted by decreasing count, in bands between cutoffs.

    Each word has one row, which is its embedding and its output weight (tied).  Frequent words are
    in the head.  Each rarer band i is one more entry of the head, and has a small softmax over its
    own words, computed only where it is needed, with rows of width D / div_val^i (Grave et al.
    2017; as input, Baevski & Auli 2019).  For cutoffs 20,000, 40,000 and 200,000:

        head    [ 20,000 words | tail 1 | tail 2 | tail 3 ]      for every token
                                   |        |        |
        tails           [ 20,000 words ]    |    [ 67,735 words ]        only for the tokens
                                   [ 160,000 words ]                     whose target is there

        p(word) = head[word]  in band 0,  head[tail i] * tail_i[word]  in band i

    With div_val > 1 one projection (D, width) maps each band's rows to the model's width, another
    maps back; with tie_projections the tails use one matrix for both, band 0 always has two.
    """

    def __init__(self, config):
        super().__init__()
        D, edges = config.d_model, (0, *config.cutoffs, config.vocab_size)
        self.bands = list(zip(edges, edges[1:]))  # first word of each band, and of the next
        widths = [D // config.div_val**i for i in range(len(self.bands))]
        self.rows = nn.ParameterList(
            torch.empty(end - first, width) for (first, end), width in zip(self.bands, widths))
        self.tail_rows = nn.Parameter(torch.empty(len(config.cutoffs), D))  # of the head
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.tail_bias = nn.Parameter(torch.zeros(len(config.cutoffs)))
        self.project_in = self.project_out = [None] * len(self.bands)  # all rows are D wide
        if config.div_val > 1:
            self.project_in = nn.ParameterList(torch.empty(D, width) for width in widths)
            self.project_out = nn.ParameterList(
                self.project_in[i] if i and config.tie_projections else torch.empty(D, width)
                for i, width in enumerate(widths))
        for weight in (*self.rows, self.tail_rows):  # the authors' initial values
            nn.init.normal_(weight, std=config.init_std)
        for weight in (*self.project_in, *self.project_out) if config.div_val > 1 else ():
            nn.init.normal_(weight, std=0.01)
        self.register_buffer("cutoffs", torch.tensor(config.cutoffs), persistent=False)

    def band(self, x):
        """Return the band of each token, (B, T) -> (B, T): the number of cutoffs not above it."""
        return (x[..., None] >= self.cutoffs).sum(-1)

    def forward(self, x):
        """Embed tokens, (B, T) -> (B, T, D), each by its own band's rows."""
        band = self.band(x)  # (B, T)
        h = self.tail_rows.new_zeros(*x.shape, self.tail_rows.shape[1])
        for i, (first, _) in enumerate(self.bands):
            here = (band == i).nonzero(as_tuple=True)  # (n,), (n,)
            rows = F.embedding(x[here] - first, self.rows[i])  # (n, width)
            rows = rows if self.project_in[i] is None else F.linear(rows, self.project_in[i])
            h = h.index_put(here, rows.to(h.dtype))
        return h

    def scores(self, h, i):
        """Return the logits of band i, (..., D) -> (..., words); band 0 also has each tail's."""
        (first, end), rows = self.bands[i], self.rows[i]
        bias = self.bias[first:end]
        if i == 0:
            rows, bias = torch.cat([rows, self.tail_rows]), torch.cat([bias, self.tail_bias])
        narrow = h if self.project_out[i] is None else h @ self.project_out[i]  # (..., width)
        return float32_at_least(F.linear(narrow, rows, bias))

    def logits(self, h):
        """Return log-probabilities of all words, (B, T, D) -> (B, T, V): they are also logits."""
        n_words = self.bands[0][1]  # of the head
        head, *tails = (self.scores(h, i).log_softmax(-1) for i in range(len(self.bands)))
        tails = [head[..., n_words + i, None] + tail for i, tail in enumerate(tails)]
        return torch.cat([head[..., :n_words], *tails], dim=-1)

    def losses(self, h, y):
        """Return -ln p(y) of targets y (B, T) in nats, (B, T), without a table (B, T, V)."""
        band, n_words = self.band(y), self.bands[0][1]  # (B, T); of the head
        target = torch.where(band == 0, y, n_words + band - 1)  # (B, T), entries of the head
        loss = F.cross_entropy(self.scores(h, 0).flatten(0, 1), target.flatten(),
                               reduction="none").view(y.shape)
        for i, (first, _) in enumerate(self.bands[1:], 1):
            here = (band == i).nonzero(as_tuple=True)  # only tokens whose target is in this tail
            tail = F.cross_entropy(self.scores(h[here], i), y[here] - first, reduction="none")
            loss = loss.index_put(here, tail, accumulate=True)
        return loss
