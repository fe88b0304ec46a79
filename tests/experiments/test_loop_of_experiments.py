"""The training loop of the experiments and another, written from the formulas.

They agree to the bit: what is read after which memory, rates, weights.

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

common = import_module("common")
lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")
corpora, fast = import_module("support.corpora"), import_module("training.fast")
differences = import_module("system.crash").differences
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6)
RUN = common.presets.Run(batch=2, segment=5, steps=9, dtype="float32", lr=0.02, warmup=4, clip=0.05,
                         seed=3)


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


def train(model, streams, steps):
    """The loop: at most so many steps over the streams, one for each reading of the text."""
    optimizer, step = torch.optim.Adam(model.parameters(), fused=True), 0
    for stream in streams:
        memory, column = None, 0
        while column < stream.shape[1] - 1 and step < steps:
            T = min(RUN.segment, stream.shape[1] - 1 - column)
            x = stream[:, column : column + T].long()
            y = stream[:, column + 1 : column + T + 1].long()
            warm_up = RUN.lr * (step + 1) / RUN.warmup
            cosine = RUN.lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = min(warm_up, cosine)
            optimizer.zero_grad()
            loss, memory = model(x, memory, y)
            (loss.sum() / y.numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.clip)
            optimizer.step()
            column, step = column + T, step + 1


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
    own = fast.replace_parts(lesson_5.TransformerXL(config)).train()
    streams = [lesson_1.lanes(corpus.train, 2) if separator is None else SentenceLanes(
        corpus.train, 2, separator, RUN.seed, epoch) for epoch in range(9)]
    with watched() as wanted:
        train(own, streams, 9)
    assert len(found) == 9 and not differences(found, wanted)
    assert [step["memory"] is None for step in found].count(True) > 1
    assert not model.training and not differences(model.state_dict(), own.state_dict())
