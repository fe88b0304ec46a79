"""The measures of a trained model, as {(measure, length): value}, and their helper functions.

Losses are in nats per token, in float32.  The attention length L is the number of keys that a query
sees, itself included.

RECL, the relative effective context length (section 4.3, appendix C), is the context beyond which
a model hardly improves on its group's best loss, at the positions where that loss is largest.  With
l_i(c, t) = -ln p_i(x_t | the c tokens before):

    b(c, t)    = min_i l_i(c, t)                          the best model's loss at context c
    T_r(c)     = the fraction r of positions where b(c, t) is largest: the hard ones
    f_i(c, c') = mean over T_r(c) of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Start with a small c; if a context of c' = c + step gains less than 1 percent, g_i < 0.01, the RECL
of model i is c; otherwise continue from c'.  The paper does not say which step.
"""
import math
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

import train

lesson_1 = import_module("01_vanilla_segments")
lesson_4 = import_module("04_rel_shift")


# ---- losses by attention length -----------------------------------------------------------------

def excerpts(tokens, before, count, n):
    """Take count excerpts (count, before + n + 1) of the tokens (N,), evenly spread.

    The first `before` tokens are context, the next n are inputs whose predictions count.
    ValueError if the text is too short for excerpts whose counted parts do not overlap.
    """
    need = before + count * n + 1
    if len(tokens) < need:
        raise ValueError(f"the split to evaluate has {len(tokens):,} tokens, {need:,} are needed")
    every = tokens.unfold(0, before + n + 1, 1)  # views
    return every[[(len(every) - 1) * i // max(1, count - 1) for i in range(count)]].long()


@torch.no_grad()
def memory_losses(model, tokens, before, T, **changes):
    """Read excerpts (B, before + n + 1) with a memory of the changed config -> losses (B, n)."""
    memory, losses = None, []
    with train.evaluating(model, **changes):
        for x, y in train.progress(lesson_1.segments(tokens, T), "evaluating segment"):
            loss, memory = model(x, memory, y)
            losses.append(loss)
    return torch.cat(losses, dim=1)[:, before:].cpu()


@torch.no_grad()
def window_losses(model, tokens, before, L):
    """Read excerpts without a memory, in windows of L tokens; the last quarter of each is counted:
    each prediction has a context of L - L // 4 + 1 to L tokens."""
    stride, n = max(1, L // 4), tokens.shape[1] - 1 - before
    ends = [*range(before + stride, before + n, stride), before + n]
    windows = torch.stack([tokens[:, end - L : end + 1] for end in ends], 1)  # (B, W, L + 1)
    at_once = max(1, min(8192, 2**27 // model.config.vocab_size) // L)  # their logits fit
    parts = windows.flatten(0, 1).split(at_once)
    with train.evaluating(model, mem_len=0):
        losses = [model(part[:, :-1], None, part[:, 1:])[0][:, L - stride :].cpu()
                  for part in train.progress(parts, "evaluating windows", len(parts))]
    losses = torch.cat(losses).view(len(tokens), len(ends), stride)
    shared = len(ends) * stride - n  # tokens of the last two windows
    return torch.cat([losses[:, :-1].flatten(1), losses[:, -1, shared:]], dim=1)


def losses_by_length(reader, row, scale, corpus):
    """Return the mean losses by attention length, in windows and with a memory of L - 1."""
    found, before = {}, scale.lengths[-1]
    for split, tokens, n in (("valid", corpus.valid, scale.n // 2), ("test", corpus.test, scale.n)):
        tokens = excerpts(tokens, before, scale.count, n)
        if row.encoding == "lstm":  # its state has no length
            found[f"{split} memory", ""] = memory_losses(reader, tokens, before, 128, mem_len=0)
            continue
        for L in scale.lengths:
            if row.recurrence:
                found[f"{split} memory", L] = memory_losses(reader, tokens, before, 128,
                                                            mem_len=L - 1, same_length=True)
            found[f"{split} windows", L] = window_losses(reader, tokens, before, L)
    return {key: losses.mean().item() for key, losses in found.items()}


def losses_of_splits(reader, lengths, corpus, recipe):
    """Return the mean losses of the whole validation and test splits for each attention length."""
    return {(f"{split} memory", L): train.evaluate(
        reader, getattr(corpus, split), replace(recipe, eval_mem_len=L - 1, dtype="float32"))
        for L in lengths for split in ("valid", "test")}


@torch.no_grad()
def copying_score(reader, n, device="cpu"):
    """Return the mean loss on 32 strings of n random tokens, each read after a copy of itself,
    minus the mean loss on the same strings, each read after its reverse.

    Both contexts hold the same tokens, so the score is below 0 only if the model uses their order.
    """
    generator = torch.Generator().manual_seed(0)
    string = torch.randint(reader.config.vocab_size, (32, n), generator=generator)
    means = []
    with train.evaluating(reader, mem_len=2 * n, same_length=True, clamp_len=0):
        for before in string, string.flip(1):
            tokens = torch.cat([before, string], dim=1).to(device)
            losses, _ = reader(tokens[:, :-1], None, tokens[:, 1:])
            means.append(losses[:, n:].mean().item())  # without the string's first token
    return means[0] - means[1]


# ---- attention by distance (appendix D) ---------------------------------------------------------

@torch.no_grad()
def attention_by_distance(model, tokens, n):
    """Return the mean attention of the last n tokens of each lane (B, L) by distance; L - n >= M.

    (4, N, H, M + 1) float64: by all terms, and by (a), (b) and (d) alone; each row sums to 1.
    """
    c = model.config
    sums = torch.zeros(4, c.n_layer, c.n_head, c.mem_len + 1, dtype=torch.float64)

    def look(number, attend, *arguments):
        q, k, _, k_R, u, v, mask = arguments
        q = q[:, :, -n:]
        u, v = (bias[:, None].expand_as(q) for bias in (u, v))  # the same for every query
        b, d = (lesson_4.rel_shift(left @ k_R.mT) for left in (q, v))
        table = torch.stack([q @ k.mT, b, u @ k.mT, d]) / q.shape[-1] ** 0.5
        table = table[..., ~mask[-n:]].unflatten(-1, (n, c.mem_len + 1)).flip(-1)  # nearest first
        for i, score in enumerate((table.sum(0), *table[[0, 1, 3]])):
            sums[i, number] += score.double().softmax(-1).sum((0, 2)).cpu()
        return attend(*arguments)

    for number, layer in enumerate(model.layers):  # lesson 5 returns no scores
        layer.attention.attend = partial(look, number, layer.attention.attend)
    for lane in train.progress(tokens.long().split(1), "reading lane", len(tokens)):
        model(lane, last_only=True)  # logits of one token are enough
    for layer in model.layers:
        del layer.attention.attend  # what remains is the class's own
    return sums / (n * len(tokens))


def attention(model, corpus, M, n=512, each_head=False):
    """Return the attention of 8 n queries of the validation split by distance, M tokens back: the
    mean over all heads, or of each; its entropy (bits); and how far each term's is from the whole
    (total variation, the share of the probability that is elsewhere)."""
    tokens = lesson_1.lanes(corpus.valid, 8)[:, : M + n]
    with train.evaluating(model, mem_len=M, same_length=True, clamp_len=0):
        by_head = attention_by_distance(model, tokens, n).flatten(1, 2)  # (4, N * H, M + 1)
    found, distances = {}, [0, *(2**i for i in range(20) if 2**i <= M)]
    for part, heads in zip(("whole", "a", "b", "d"), by_head):  # the paper leaves out (c)
        found |= {(f"attention {part}", d): heads[:, d].mean().item() for d in distances}
        found[f"entropy {part}", ""] = torch.special.entr(heads).sum(-1).mean().item() / math.log(2)
        if part != "whole":
            found[f"apart {part}", ""] = (heads - by_head[0]).abs().sum(-1).mean().item() / 2
    if each_head:
        found |= {(f"head {i}", d): row[d].item() for i, row in enumerate(by_head[0])
                  for d in distances}
    return found


# ---- the memory: of which layers, and with a gradient -------------------------------------------

def memory_by_layer(model, corpus, T, count=8, n=2500):
    """Return the bits per byte of count * n test bytes with the M of training: with all memory,
    with none, without that of layer k = 1, 2, ..., and with all rows in random order."""
    def without(attention, arguments):  # hooks: the arguments with another memory
        h, memory, R, u, v, mask = arguments
        T = h.shape[1]
        return h, memory[:, :0], R[-T:], u, v, mask[:, -T:]

    def shuffled(attention, arguments):
        h, memory, *rest = arguments
        return h, memory[:, torch.randperm(memory.shape[1])], *rest

    torch.manual_seed(0)  # of the order
    M, layers = model.config.mem_len, range(1, model.config.n_layer + 1)
    tokens, found = excerpts(corpus.test, M, count, n), {}
    cases = {("memory all", ""): [], ("memory none", ""): layers, ("memory shuffled", ""): layers,
             **{("memory without", k): [k] for k in layers}}
    for case, changed in cases.items():
        hook = shuffled if case[0] == "memory shuffled" else without
        hooks = [model.layers[k - 1].attention.register_forward_pre_hook(hook) for k in changed]
        found[case] = lesson_1.bits(memory_losses(model, tokens, M, T, mem_len=M))
        for each in hooks:
            each.remove()
    return found


def gradient(model, tokens, T, k):
    """Return the gradient (P,), through k segments of memory, with respect to all weights of the
    mean loss of an excerpt's (1, n + 1) last segment; T divides n, and M is above 0."""
    def keep(layer, arguments):  # a hook: what lesson 2's update_memory detaches
        h, past, *_ = arguments
        kept.append(torch.cat([past, h], dim=1))  # the model uses its last M rows

    hooks = [layer.register_forward_pre_hook(keep) for layer in model.layers]
    memory, segments = None, list(lesson_1.segments(tokens, T))
    for i, (x, y) in enumerate(segments):
        kept = []
        with torch.set_grad_enabled(i >= len(segments) - 1 - k):
            losses, _ = model(x, memory, y)
        memory = kept
    for each in hooks:
        each.remove()
    parts = torch.autograd.grad(losses.mean(), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def stopped_gradient(model, corpus, T, places=16):
    """Compare the gradient g_0 of training with g_k through k = 1, 2, 3 segments of memory, each
    the mean over places of the validation text: |g_k - g_0| / |g_k|."""
    before = model.config.mem_len // T * T + 3 * T
    pieces = excerpts(corpus.valid, before, places, T).split(1)
    g = sum(torch.stack([gradient(model, tokens, T, k) for k in range(4)]).double() / places
            for tokens in train.progress(pieces, "comparing gradients, place", places))  # (4, P)
    lacks = (g - g[0]).norm(dim=1) / g.norm(dim=1)
    return {("gradient lacks", k): lacks[k].item() for k in (1, 2, 3)}


# ---- RECL ---------------------------------------------------------------------------------------

def losses_by_context(model, tokens, contexts, L):
    """Return -ln p in nats after exactly c tokens, for each c in contexts: (contexts, positions).

    L is the attention length; contexts are step, 2 step, 3 step ...  One pass over a window gives
    the losses after exactly 1, 2, 3 ... tokens.  The windows begin a step apart:

        window 0    [ step 1 ][ step 2 ][ step 3 ]
        window 1              [ step 1 ][ step 2 ][ step 3 ]
        window 2                        [ step 1 ][ step 2 ][ step 3 ]
                                                  ^ predicted from 3, 2 and 1 steps
    """
    step, I = contexts[0], len(contexts)
    windows = tokens.unfold(0, contexts[-1] + 1, step).long()  # (W, the longest context + 1)
    losses = [memory_losses(model, part, 0, 64, mem_len=L - 1, same_length=True)
              for part in windows.split(100)]
    # (W, I): the loss of window w at column i is that of position w + i + 1, counted in steps
    table = torch.cat(losses)[:, step - 1 :: step]
    return torch.stack([table[I - 1 - i : len(table) - i, i] for i in range(I)])


def context_losses(model, scale, corpus, L):
    """Return losses_by_context of eight places of the test split, (contexts, positions)."""
    need = scale.contexts[0] * (scale.windows - 1) + scale.contexts[-1] + 1
    starts = range(0, len(corpus.test) - need + 1, max(1, (len(corpus.test) - need) // 7))
    return torch.cat([losses_by_context(model, corpus.test[start : start + need], scale.contexts, L)
                      for start in starts], dim=1)


def gain(losses, i, c, r):
    """Return g_i(c, the next c); c is the index of a context, and T_r has at least a position."""
    best = losses[:, c].min(0).values  # b(c, t)
    hard = best.topk(max(1, round(r * len(best)))).indices  # T_r(c)
    here = best[hard].double().mean()
    there = torch.minimum(best, losses[i, c + 1])[hard].double().mean()
    return 1 - math.exp(there - here)  # (exp here - exp there) / exp here


def recl(losses, contexts, r):
    """Return the RECL of each model, in tokens; the largest context means "at least that".

    losses (models, contexts, positions) in nats, contexts ascending.  Two models and one position:
    the first gains from 200 tokens and no more, the second never.

    >>> recl(torch.tensor([[[3.0], [2.0], [2.0]], [[3.0], [3.0], [3.0]]]), [100, 200, 300], r=1.0)
    [200, 100]
    """
    lengths = []
    for i in range(len(losses)):
        c = 0
        while c + 1 < len(contexts) and gain(losses, i, c, r) >= 0.01:
            c += 1
        lengths.append(contexts[c])
    return lengths
