"""The training loop of the experiments in its two uses, and another, written from the formulas.

They agree to the bit: what is read after which memory, rates, weights, the average; and the losses
that are recorded and printed are those of the model that is there.

    pytest tests/experiments/test_loop_of_experiments.py
"""
import math
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from training.batches import SentenceLanes
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

common, ptb, regularisers = (import_module(name) for name in (
    "common", "table5_ptb", "regularisers"))
lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")
corpora, fast = import_module("support.corpora"), import_module("training.fast")
differences = import_module("system.crash").differences
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6)
RUN = common.presets.Run(batch=2, segment=5, steps=9, dtype="float32", lr=0.02, warmup=4, clip=0.05,
                      seed=3, eval_every=6, eval_tokens=40, eval_segment=8, eval_mem_len=11,
                      eval_clamp_len=9)


def corpus_of(n, separator=None):
    """Three different splits of random tokens below 7."""
    draw = torch.Generator().manual_seed(5)
    splits = (torch.randint(7, (size,), generator=draw) for size in (n, 90, 70))
    return corpora.Corpus(*splits, [f"w{i}" for i in range(7)], "random words", separator)


@contextmanager
def watched():
    """Note for every step of any loop what the model reads, and each update's rates and weights."""
    steps = []

    def read(module, given):
        if isinstance(module, lesson_5.TransformerXL) and torch.is_grad_enabled():
            x, memory, _ = given
            steps.append({"x": x.clone(), "memory": memory, "updates": []})

    def updated(optimizer, *_):
        steps[-1]["updates"] += [(group["lr"], [z.detach().clone() for z in group["params"]])
                                 for group in optimizer.param_groups]

    hooks = register_module_forward_pre_hook(read), register_optimizer_step_post_hook(updated)
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()


def train(model, optimizer, streams, length, rate, steps):
    """The loop: at most so many steps over the streams, one for each reading of the text.

    length(step) is T, rate(step, tokens read so far, T) the learning rate -> losses in nats.
    """
    losses, tokens = [], 0
    for stream in streams:
        memory, column = None, 0
        while column < stream.shape[1] - 1 and len(losses) < steps:
            T = min(length(len(losses)), stream.shape[1] - 1 - column)
            x = stream[:, column : column + T].long()
            y = stream[:, column + 1 : column + T + 1].long()
            for group in optimizer.param_groups:
                group["lr"] = rate(len(losses), tokens, T) * group["factor"]
            optimizer.zero_grad()
            loss, memory = model(x, memory, y)
            (loss.sum() / y.numel()).backward()
            norm = torch.stack([z.grad.norm() for z in model.parameters()]).norm()
            for z in model.parameters():
                z.grad *= min(torch.tensor(1.0), RUN.clip / (norm + 1e-6))
            optimizer.step()
            losses.append(loss.mean().item())
            column, tokens = column + T, tokens + x.numel()
    return losses


def warm_up(step):
    return RUN.lr * (step + 1) / RUN.warmup


def cosine(done):
    return RUN.lr * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("separator", [None, 3], ids=["one text", "sentences"])
def test_training_as_train_py_does(separator, tmp_path, our_own):
    """Segments of 5, 5, 5, 5 and 3, and the text begins anew; with sentences in another
    order.  Dropout draws as in training, and the model comes back without it.
    """
    corpus = corpus_of(47, separator)
    config = replace(CONFIG, dropout=0.2, dropout_attention=0.1)
    torch.manual_seed(1)
    with watched() as found:
        model = common.fit(lesson_5.TransformerXL(config), corpus, RUN, tmp_path / "m.pt")
    torch.manual_seed(1)
    own = fast.prepare(lesson_5.TransformerXL(config)).train()
    streams = [lesson_1.lanes(corpus.train, 2) if separator is None else SentenceLanes(
        corpus.train, 2, separator, RUN.seed, epoch) for epoch in range(9)]
    optimizer = torch.optim.Adam(
        [{"params": list(own.parameters()), "factor": 1}], fused=True)
    with watched() as wanted:
        train(own, optimizer, streams, lambda step: 5,
              lambda step, *_: min(warm_up(step), cosine(step / 9)), 9)
    assert len(found) == 9 and not differences(found, wanted)
    assert [step["memory"] is None for step in found].count(True) > 1
    assert not model.training and not differences(model.state_dict(), own.state_dict())


# ---- by a recipe: groups, penalties, lengths, averages, validations -----------------------------

RECIPE = regularisers.Recipe(
    word=0.1, input=0.2, inside=0.1, attention=0.1, output=0.2, connect=0.1, alpha=2.0, beta=1.0,
    decay=0.1, embedding_rate=2.0, average_from=0.5, average_rate=0.5)


def groups_of(model):
    """Embedding, matrices, and the rest."""
    embedding = model.embedding.weight
    others = [z for z in model.parameters() if z is not embedding]
    return [[embedding], [z for z in others if z.dim() == 2], [z for z in others if z.dim() != 2]]


def rate_of(recipe, total):
    """(step, tokens, T) -> the rate by the recipe's rule; it grows with T."""
    def rate(step, tokens, T):
        done = tokens / total
        if not recipe.average:
            return min(warm_up(step), cosine(done)) * T / 5
        falling = (RUN.lr + 2 * cosine(min(1, done / 0.5))) / 3
        return min(warm_up(step), falling) * (0.5 if done >= 0.5 else 1) * T / 5
    return rate


def averaged(kind, weights, steps):
    """What is kept: the mean of these weights, or what is left of the old and 1 / steps of the new.
    """
    mean, decay = weights[0], 1 - 1 / steps
    for n, some in enumerate(weights[1:], 2):
        mean = [a.lerp(b, 1 / n if kind == "equal" else 1 - decay) for a, b in zip(mean, some)]
    return mean


def loss_of(weights, tokens):
    """Mean loss in nats of one pass with the lengths of evaluation (same_length: as in segments).
    """
    model = lesson_5.TransformerXL(replace(
        CONFIG, mem_len=RUN.eval_mem_len, clamp_len=RUN.eval_clamp_len, same_length=True))
    for z, value in zip(sum(groups_of(model), []), weights):
        z.data = value.double()
    with torch.no_grad():
        return model.double()(tokens[None, :-1], None, tokens[None, 1:])[0].mean().item()


def ptb_by_hand(corpus, recipe, run):
    """A model trained with the recipe -> the losses of its steps, and what the penalties add."""
    torch.manual_seed(run.seed)
    model = regularisers.regularise(lesson_5.TransformerXL(CONFIG), recipe)
    model = fast.prepare(model, attention=not recipe.connect).train()
    penalised, penalties = regularisers.Penalised(model, recipe.alpha, recipe.beta), []
    penalised.register_forward_hook(lambda *_: penalties.append(penalised.penalty.item()))
    optimizer = torch.optim.AdamW([
        {"params": z, "factor": factor, "weight_decay": decay}
        for z, factor, decay in zip(groups_of(model), (2, 1, 1), (0.1, 0.1, 0))], fused=True)

    def length(step):
        return regularisers.segment_length(5, run.seed, step) if recipe.vary else 5

    return train(penalised, optimizer, [lesson_1.lanes(corpus.train, 2)] * 2, length,
                 rate_of(recipe, run.tokens), 1000), penalties


@pytest.mark.parametrize("kind, vary", [("equal", False), ("ema", True), ("", False)])
def test_training_by_a_recipe(kind, vary, tmp_path, our_own):
    """Two readings of the text, the average exactly from the second on; the curve in nats, and
    in its file as perplexities.
    """
    corpus, recipe = corpus_of(105), replace(RECIPE, average=kind, vary=vary)
    run = replace(RUN, steps=0, tokens=2 * 2 * 52)
    with watched() as found:
        model, curve = ptb.fit(CONFIG, run, recipe, corpus, tmp_path, "cpu")
    with watched() as wanted:
        losses, penalties = ptb_by_hand(corpus, recipe, run)
    assert not differences(found, wanted)
    begun = [i for i, step in enumerate(found) if step["memory"] is None]
    assert len(begun) == 2 and begun[0] == 0

    weights = [[z for _, group in step["updates"] for z in group] for step in found]
    first = begun[1] if kind else len(found)  # of the steps that are averaged
    steps_left = run.tokens / 2 / (2 * 5) / 10
    kept = averaged(kind, weights[first:], steps_left) if kind else weights[-1]
    for z, value in zip(sum(groups_of(model), []), kept):
        assert z.equal(value.bfloat16().float())

    ends = [*range(6, len(found), 6), len(found)]
    assert [row["step"] for row in curve] == ends
    for past, at, row in zip([0, *ends], ends, curve):
        plain = [a - b for a, b in zip(losses[past:at], penalties[past:at])]
        assert row["train"] == pytest.approx(sum(plain) / len(plain), abs=1e-6)
        assert row["valid"] == pytest.approx(loss_of(weights[at - 1], corpus.valid[:41]), abs=1e-5)
        mean = loss_of(averaged(kind, weights[first:at], steps_left), corpus.valid[:41]
                       ) if at > first else None
        assert row["averaged"] == (mean and pytest.approx(mean, abs=1e-5))
    lines = (tmp_path / "curve.tsv").read_text().splitlines()
    shown = dict(zip(*(line.split("\t") for line in (lines[0], lines[-1]))))
    assert float(shown["valid"]) == pytest.approx(
        math.exp(curve[-1]["valid"]), abs=1e-3)
