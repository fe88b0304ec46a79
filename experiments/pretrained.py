"""What is measured of the model in pretrained/ alone, as in measures.py; without dropout."""
import re
from collections import Counter
from copy import deepcopy
from functools import partial
from unittest.mock import patch

import measures  # before torch

import torch

from training.reader import reader_of
from variants import corpora, lesson_1, lesson_5, train

NAME = re.compile(r"\b[A-Za-z_]\w{3,}", re.ASCII)  # an identifier of four characters or more


def measure_all(model, corpus, recipe):
    """Take every measure of a model that was trained on bytes with this recipe."""
    torch.manual_seed(0)
    T = recipe.segment
    return (memory_by_layer(model, corpus, T) | stopped_gradient(model, corpus, T)
            | dynamic_evaluation(model, corpus) | names_that_recur(model, corpus, recipe))


def change_memory(is_shuffled, attention, given):
    """Return an attention's arguments with the memory in random order, or without it: a hook."""
    h, memory, R, u, v, mask = given
    T, m = h.shape[1], memory.shape[1]
    if is_shuffled:
        return h, memory[:, torch.randperm(m)], R, u, v, mask
    return h, memory[:, :0], R[-T:], u, v, mask[:, -T:]


def memory_by_layer(model, corpus, T, count=8, n=2500):
    """Return the bits per byte of count * n test bytes with the M of training: with all memory,
    with none, without that of layer k = 1, 2, ..., and with all rows in random order.
    """
    M, layers = model.config.mem_len, range(1, model.config.n_layer + 1)
    tokens, found = measures.excerpts(corpus.test, M, count, n), {}
    cases = {("memory all", ""): [], ("memory none", ""): layers, ("memory shuffled", ""): layers,
             **{("memory without", k): [k] for k in layers}}
    for case, changed in cases.items():
        hook = partial(change_memory, case[0] == "memory shuffled")
        hooks = [model.layers[k - 1].attention.register_forward_pre_hook(hook) for k in changed]
        found[case] = lesson_1.bits(measures.memory_losses(model, tokens, M, T, mem_len=M))
        for each in hooks:
            each.remove()
    return found


def gradient(model, tokens, T, k):
    """Return the gradient (P,), through k segments of memory, with respect to all weights of the
    mean loss of an excerpt's (1, n + 1) last segment; T divides n, and M is above 0.
    """
    memory, segments = None, list(lesson_1.segments(tokens, T))
    with patch.object(lesson_5.lesson_2, "update_memory",  # without its detach()
                      lambda past, h, M: torch.cat([past, h], dim=1)[:, -M:]):
        for i, (x, y) in enumerate(segments):
            with torch.set_grad_enabled(i >= len(segments) - 1 - k):
                losses, memory = model(x, memory, y)
    parts = torch.autograd.grad(losses.mean(), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def stopped_gradient(model, corpus, T, places=16):
    """Compare the gradient g_0 of training with g_k through k = 1, 2, 3 segments of memory, each
    the mean over places of the validation text: |g_k - g_0| / |g_k|, their cosine, and |g_k|.
    """
    before = model.config.mem_len // T * T + 3 * T
    excerpts = measures.excerpts(corpus.valid, before, places, T).split(1)
    g = sum(torch.stack([gradient(model, tokens, T, k) for k in range(4)]).double() / places
            for tokens in train.progress(excerpts, "comparing gradients, place", places))  # (4, P)
    found = {"lacks": (g - g[0]).norm(dim=1) / g.norm(dim=1),
             "cosine": torch.cosine_similarity(g, g[:1]), "norm": g.norm(dim=1)}
    return {("gradient norm", 0): g[0].norm().item()} | {
        (f"gradient {name}", k): row[k].item() for name, row in found.items() for k in (1, 2, 3)}


def losses_with_gradients(model, tokens, T, M):
    """Yield the losses of each segment of tokens (n,); meanwhile the weights have the gradients."""
    memory, segments = None, list(lesson_1.segments(tokens[None], T))
    with train.evaluating(model, mem_len=M, same_length=True):
        for x, y in train.progress(segments, "learning from segment", len(segments)):
            model.zero_grad()
            losses, memory = model(x, memory, y)  # (1, T)
            losses.mean().backward()
            yield losses[0].detach()


def dynamic_evaluation(trained, corpus, n=10**5, T=32, M=512, rate=5e-5, decay=3e-3, epsilon=1e-4):
    """Return the bits per byte of the first 100,000 test bytes, without and with learning.  After
    each segment, a weight W with gradient g and trained value W_0 is updated (arXiv 1709.07432) by

        W <- W - rate * g / (s + epsilon) + min(1, decay * s / mean(s)) * (W_0 - W)

    s is the root mean square of g on 200 segments of training text; mean(s) averages tensors.
    """
    tokens, model, losses = corpus.test[: n + 1], deepcopy(trained), []
    static = measures.memory_losses(reader_of(trained), tokens[None], 0, M, mem_len=M,
                                    same_length=True)
    weights = list(zip(model.parameters(), trained.parameters()))
    squares = [0] * len(weights)
    for _ in losses_with_gradients(model, corpus.train[: 200 * T + 1], T, M):
        squares = [square + W.grad**2 / 200 for square, (W, _) in zip(squares, weights)]
    mean = sum(square.sqrt().mean() for square in squares) / len(squares)
    steps = [(rate / (square.sqrt() + epsilon), (decay * square.sqrt() / mean).clamp(max=1))
             for square in squares]
    for loss in losses_with_gradients(model, tokens, T, M):
        losses.append(loss)
        with torch.no_grad():
            for (W, W_0), (forward, back) in zip(weights, steps):
                W += back * (W_0 - W) - forward * W.grad
    return {("static bpc", ""): lesson_1.bits(static),
            ("dynamic bpc", ""): lesson_1.bits(torch.cat(losses))}


def names_that_recur(model, corpus, recipe, P=512, n=500, count=32):
    """Return the percent of the names in `count` prompts of P test bytes that recur in samples of n
    bytes with memory, and from the last T bytes alone; for chance, other prompts' names count.
    The 500 most common names and names at an end of a prompt do not count (appendix E).
    """
    def texts(tokens):
        return [corpora.as_bytes(row, corpus.vocab).decode("latin-1") for row in tokens]

    def percent(old, new):
        recurs = [name in found for given, found in zip(old, new) for name in given]
        return 100 * sum(recurs) / len(recurs)

    reader, prompts = reader_of(model), measures.excerpts(corpus.test, 0, count, P + n)[:, :P]
    with train.evaluating(reader, recipe):
        samples = torch.cat([prompts, lesson_5.generate(reader, prompts, n)], dim=1)
    without = prompts
    for _ in train.progress(range(n), "sampling token", n):
        token = lesson_5.generate(reader, without[:, -recipe.segment :], 1)
        without = torch.cat([without, token], dim=1)
    new, without = ([NAME.findall(text, P) for text in texts(each)]  # that begin in the sample
                    for each in (samples, without))
    common = Counter(NAME.findall(*texts(corpus.train[None]))).most_common(500)
    left_out, prompts = {name for name, _ in common}, texts(prompts)
    own = [{*NAME.findall(re.sub(r"(?a)^\w+|\w+\Z", "", prompt))} - left_out for prompt in prompts]
    others = [set().union(*own) - {*NAME.findall(prompt)} for prompt in prompts]
    return {("recurs with", ""): percent(own, new), ("recurs without", ""): percent(own, without),
            ("recurs chance", ""): percent(others, new)}
