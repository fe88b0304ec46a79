"""The relative effective context length: how many tokens back does a model gain by looking?

A plain test, after how many tokens the loss stops falling, is unfair to a model that is good with
few tokens already.  The RECL (section 4.3, appendix C) measures each model of a group against the
best of the group at the shorter context, where that is worst.  With l_i(c, t) = -ln p_i(x_t | the c
tokens before), in nats:

    b(c, t)    = min_i l_i(c, t)                          the best model's loss at context c
    T_r(c)     = the fraction r of positions where b(c, t) is largest: the hard ones
    f_i(c, c') = mean over T_r(c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Start with a small c; if a context of c' = c + step gains less than 1 percent, g_i < 0.01, the RECL
of model i is c; otherwise go on from c'.  The paper does not say which step; its figures are
multiples of 100, but for the 128 that is all the vanilla model can see.  Only what improves counts
(min), so even random changes from c to c' are a small gain, and g never falls below 0.
table8_recl.py trains a group and measures it.
"""
from math import exp

import torch


def hard_loss(losses, i, c, other, r):
    """f_i(c, other) of appendix C, in nats; c and other count among the contexts of losses.

    losses (models, contexts, positions); T_r is the fraction r of the positions, at least one.
    """
    best = losses[:, c].min(0).values  # b(c, t)
    hard = best.topk(max(1, round(r * len(best)))).indices  # T_r(c)
    return torch.minimum(best, losses[i, other])[hard].double().mean().item()


def recl(losses, contexts, r, threshold=0.01):
    """The RECL of each model, in tokens; the largest context stands for "at least that".

    losses (models, contexts, positions) in nats, contexts ascending.  ValueError if they disagree.
    Two models and one position: the first gains from 200 tokens and no more, the second never.

    >>> recl(torch.tensor([[[3.0], [2.0], [2.0]], [[3.0], [3.0], [3.0]]]), [100, 200, 300], r=1.0)
    [200, 100]
    """
    if losses.dim() != 3 or losses.shape[1] != len(contexts) or not 0 < r <= 1:
        raise ValueError(f"losses must be (models, {len(contexts)}, positions) and 0 < r <= 1, got "
                         f"{tuple(losses.shape)} and {r}")
    lengths = []
    for i in range(len(losses)):
        c = 0
        while c + 1 < len(contexts):
            here, there = (hard_loss(losses, i, c, other, r) for other in (c, c + 1))
            if 1 - exp(there - here) < threshold:  # g = (exp here - exp there) / exp here
                break
            c += 1
        lengths.append(contexts[c])
    return lengths
