"""SPOILERS.  Compare train.py's loop and evaluation with the formulas, bit for bit.  The loop here
uses the model, lesson 1's lanes and segments, and the optimizers, but nothing from train.py."""
import copy
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

from support import corpora
from training import checkpoint, log, optimizers, presets

train = import_module("train")
lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")

RECIPE = presets.Recipe(
    steps=9, batch=4, segment=8, dtype="float32", eval_segment=5, eval_mem_len=7, eval_clamp_len=4,
    lr=0.02, warmup=3, eval_every=3, eval_tokens=20, log_every=2, clip=1.0, seed=3, muon_lr=0.05)
TINY = replace(lesson_5.CONFIGS["tiny"], vocab_size=7, cutoffs=(2, 4), div_val=2, dropout=0.2,
               mem_len=12)


def corpus_of(unit):
    """Train on a pattern, validate and test on noise, so that the best model is not the last."""
    valid, test = torch.randint(7, (2, 41), generator=torch.Generator().manual_seed(1))
    vocab = list(b"abcdefg") if unit == "bpc" else ["<eos>", *"abcdef"]
    return corpora.Corpus(torch.arange(4 * 36 + 1) % 5, valid, test, vocab, "made up")


def mean_loss(model, tokens, recipe):
    """Return the mean loss in nats of one lane, in a single pass with evaluation lengths."""
    model = copy.deepcopy(model).eval()
    model.config = replace(model.config, mem_len=recipe.eval_mem_len, same_length=True,
                           clamp_len=recipe.eval_clamp_len)
    return model(tokens[None, :-1], None, tokens[None, 1:])[0].mean().item()


def witness(corpus, recipe, shown):
    """Train, and return the learning rate, loss and norm of each step, the lines of metrics.tsv
    without seconds, the printed lines, the last and best model, and the memory."""
    torch.manual_seed(recipe.seed)
    model = lesson_5.TransformerXL(TINY)
    matrices = [weight for name, weight in model.named_parameters() if recipe.optimizer == "muon"
                and name.startswith("layers.") and weight.dim() == 2]
    adam = torch.optim.Adam([weight for weight in model.parameters()
                             if all(weight is not matrix for matrix in matrices)], fused=True)
    muon = optimizers.Muon([{"kind": "muon", "params": matrices, "dtype": torch.float32}]
                           ) if matrices else None
    stream = lesson_1.lanes(corpus.train, recipe.batch)  # (4, 37)
    steps, lines, said, tokens, lowest, column, memory = [], [], [], 0, math.inf, 0, None
    for step in range(recipe.steps):
        if column == 36:  # the text restarts
            column, memory = 0, None
        T = 4 if step < recipe.short_steps else 8
        x, y = next(lesson_1.segments(stream, T, column))
        column += x.shape[1]
        done = step / recipe.steps
        decay = 1 - math.sqrt(done) if recipe.optimizer == "muon" else (
            1 + math.cos(math.pi * done)) / 2
        rate = recipe.lr * min((step + 1) / recipe.warmup, decay)
        adam.param_groups[0]["lr"] = rate
        losses, memory = model(x, memory, y)
        loss = losses.sum() / y.numel()
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item()
        adam.step()
        if muon:
            muon.param_groups[0]["lr"] = rate * (recipe.muon_lr / recipe.lr)
            muon.step()
        steps.append((rate, loss.item(), norm))
        tokens, place = tokens + x.numel(), f"{step + 1}\t{tokens + x.numel()}"
        if (step + 1) % recipe.log_every == 0:
            since = [loss for _, loss, _ in steps[-recipe.log_every :]]
            lines.append(f"{place}\t{rate:.3g}\t{norm:.3g}\t{shown(sum(since) / len(since)):.4f}\t"
                         f"{shown(max(since)):.4f}\t0\t")
        if (step + 1) % recipe.eval_every == 0:
            valid = mean_loss(model, corpus.valid[: recipe.eval_tokens + 1], recipe)
            lines.append(f"{place}\t\t\t\t\t\t{shown(valid):.4f}")
            said.append(f"step {step + 1} | validation {shown(valid):.4f} {corpus.unit}")
            if valid < lowest:
                lowest, best = valid, copy.deepcopy(model)
    said.append(f"test {shown(mean_loss(best, corpus.test, recipe)):.4f} {corpus.unit}")
    return steps, lines, said, model, best, memory


@pytest.mark.parametrize("m, n", [(6, 6), (6, 20), (20, 6)])
def test_muon_equals_torchs_muon(m, n):
    """Both agree bit for bit in bf16; in float32 the polynomial acts on the singular values."""
    start = torch.randn(m, n)
    ours, theirs, skipped = (nn.Parameter(start.clone()) for _ in range(3))
    muon = optimizers.Muon([
        {"kind": "muon", "params": [ours, skipped], "dtype": torch.bfloat16}], lr=0.02)
    for name, dtype in ("bf16", torch.bfloat16), ("float32", torch.float32):
        chosen = optimizers.muon(lesson_5.TransformerXL(TINY), replace(RECIPE, dtype=name))
        assert chosen.param_groups[1]["dtype"] == dtype
    torchs = torch.optim.Muon([theirs], lr=0.02)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(m, n)
        muon.step(), torchs.step()
    assert ours.equal(theirs) and skipped.equal(start), "a weight without a gradient changed"
    U, S, V = torch.linalg.svd(start.double(), full_matrices=False)
    S = S / S.norm()
    for _ in range(5):
        S = 3.4445 * S - 4.775 * S**3 + 2.0315 * S**5
    assert torch.allclose(optimizers.orthogonalize(start), (U * S @ V).float(), atol=1e-4)


@pytest.mark.parametrize("plain, optimizer", [(True, "adam"), (False, "adam"), (False, "muon")],
                         ids=["plain", "fast", "muon"])
@pytest.mark.parametrize("unit, shown", [("bpc", lambda nats: nats / math.log(2)),
                                         ("ppl", math.exp)], ids=["bpc", "ppl"])
def test_the_loop_equals_the_formulas_bit_for_bit(
        needs_shipped_solutions, unit, shown, plain, optimizer, tmp_path, capsys, monkeypatch):
    """This compares learning rates, losses, norms, weights, memory, metrics.tsv and scores."""
    schedule = "sqrt" if optimizer == "muon" else "cosine"
    corpus = corpus_of(unit)
    recipe = replace(RECIPE, plain=plain, optimizer=optimizer, schedule=schedule,
                     short_steps=5 if optimizer == "muon" else 0)
    seen, real = [], train.train_step
    steps, lines, said, model, best, memory = witness(corpus, recipe, shown)
    assert max(norm for *_, norm in steps) > recipe.clip and best.u.ne(model.u).any()

    def step(model, optimizer, *rest):
        rate = optimizer.param_groups[0]["lr"]
        seen.append((rate, *(found := real(model, optimizer, *rest))))
        return found

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "read_corpus", lambda *given: corpus)
    monkeypatch.setattr(train, "choose_model", lambda *given: ("tiny", TINY, recipe))
    monkeypatch.setattr(log, "draw", lambda *given: None)
    assert train.main(["--out", str(tmp_path), "--device", "cpu", "--n-tokens", "5"]) == 0
    assert [found[:3] for found in seen] == steps
    rows = [row for row in log.read_metrics(tmp_path / "metrics.tsv") if row.pop("seconds")]
    assert ["\t".join(row.values()) for row in rows] == lines
    printed = capsys.readouterr().out.splitlines()
    scores = [line for line in printed if "validation" in line] + [printed[-1].partition(" (")[0]]
    assert scores == said
    content, kept = (checkpoint.load(tmp_path / f"{name}.pt") for name in ("checkpoint", "best"))
    assert all(weight.equal(content["model"][name]) for name, weight in model.state_dict().items())
    assert all(weight.equal(kept["model"][name]) for name, weight in best.state_dict().items())
    assert all(a.equal(b) for a, b in zip(content["state"]["memory"], memory, strict=True))
