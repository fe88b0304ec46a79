"""Learning while reading: nothing is learned before it is predicted, and the steps are as written.

    pytest tests/experiments/test_dynamic_evaluation.py
"""
import math
import re
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from support import corpora
from training import fast, presets

dynamic = import_module("dynamic_evaluation")
lesson_5 = import_module("05_full_model")
Way = dynamic.Way
WAYS = [Way("sgd", 8, 16, 0.1), Way("rms", 8, 16, 1e-3, 1e-3)]
V, RUN = 8, presets.RUNS["tiny"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Less of all that takes time."""
    monkeypatch.setattr(dynamic, "STATISTICS", 10)
    monkeypatch.setattr(dynamic, "STRETCHES", 3)


@pytest.fixture
def model():
    """A small model for V symbols, as it was drawn."""
    torch.manual_seed(0)
    config = replace(presets.CONFIGS["tiny"], vocab_size=V, dropout=0.1)
    return fast.replace_parts(lesson_5.TransformerXL(config)).eval()


def a_corpus(n=400):
    """Symbols drawn uniformly: there is nothing to be learned."""
    draws = torch.Generator().manual_seed(1)
    splits = (torch.randint(V, (m,), generator=draws) for m in (2000, 90, n))
    return corpora.Corpus(*splits, list(range(65, 65 + V)), "noise")


@pytest.mark.parametrize("way", WAYS, ids=["sgd", "rms"])
def test_no_loss_moves_before_the_token_that_was_changed(way, model):
    """Neither by what the model has read nor by what it has learned; those after it do."""
    corpus, n = a_corpus(90), 53  # in the middle of a segment
    changed = corpus.test.clone()
    changed[n] = (changed[n] + 1) % V
    one, other = (dynamic.read(model, corpus, z, way, RUN) for z in (corpus.test, changed))
    assert one[: n - 1].equal(other[: n - 1]) and len(one) == 89
    assert (one[n - 1 :] != other[n - 1 :]).all()


@pytest.mark.parametrize("way", WAYS, ids=["sgd", "rms"])
def test_what_cannot_be_learned_costs_all_its_bits(way, model):
    """Of symbols drawn uniformly no reader pays less than log2 V bits each, but for luck."""
    losses = dynamic.read(model, a_corpus(), a_corpus().test, way, RUN) / math.log(2)
    assert losses.mean() > math.log2(V) - 3 * losses.std() / len(losses) ** 0.5


@pytest.mark.parametrize("way", WAYS, ids=["sgd", "rms"])
def test_it_learns_and_forgets(way, model):
    """A text that comes again and again costs less and less; in the end the model is what it was,
    and in the mode that it was in."""
    corpus = a_corpus()
    before = {name: W.clone() for name, W in model.state_dict().items()}
    losses = dynamic.read(model, corpus, corpus.test[:3].repeat(100), way, RUN)
    assert losses[200:].mean() < losses[:50].mean() - 0.3
    assert all(W.equal(before[name]) for name, W in model.state_dict().items())
    assert not model.training and model.config.mem_len == presets.CONFIGS["tiny"].mem_len


def test_sgd_goes_down_the_clipped_gradient():
    W = torch.tensor([1.0, 2.0], requires_grad=True)
    W.grad = torch.tensor([3.0, 4.0])  # norm 5
    dynamic.sgd_step([W], Way("sgd", 1, 1, 0.5))
    assert W.tolist() == pytest.approx([1 - 0.5 * 0.6, 2 - 0.5 * 0.8])


def test_rms_scales_by_the_training_gradients_and_goes_back():
    """Two tensors: s is 2 and 6, so its mean 4; and a decay that would lead beyond W_0 ends there.
    """
    weights = [torch.tensor([1.0], requires_grad=True), torch.tensor([[5.0]], requires_grad=True)]
    trained = [torch.tensor([2.0]), torch.tensor([[7.0]])]
    for W, gradient in zip(weights, (0.4, 0.9)):
        W.grad = torch.full_like(W, gradient)
    s = [torch.tensor([2.0]), torch.tensor([[6.0]])]
    dynamic.rms_step(weights, trained, *dynamic.paces(s, Way("rms", 1, 1, 0.1, 0.8, 0.5)))
    first = 1 - 0.1 * 0.4 / (2 + 0.5) + 0.8 * 2 / 4 * (2 - 1)
    second = 5 - 0.1 * 0.9 / (6 + 0.5) + 1.0 * (7 - 5)  # 0.8 * 6 / 4 is above 1
    assert [z.item() for z in weights] == pytest.approx([first, second])


def test_s_is_the_root_of_the_mean_square_on_the_training_text(model, monkeypatch):
    """Of the gradients of each segment's mean loss; the weights stay."""
    monkeypatch.setattr(dynamic, "STATISTICS", 2)
    corpus, way = a_corpus(), WAYS[1]
    s = dynamic.gradient_sizes(model, corpus, way, RUN)
    squares, memory, x = 0, None, corpus.train[:17].long()
    model.config = replace(model.config, mem_len=way.M, same_length=True)
    for a in (0, 8):
        model.zero_grad()
        losses, memory = model(x[None, a : a + 8], memory, x[None, a + 1 : a + 9])
        losses.mean().backward()
        squares += model.u.grad**2 / 2
    found = dict(zip((name for name, _ in model.named_parameters()), s))["u"]
    assert torch.allclose(found, squares.sqrt(), rtol=1e-5)


def test_settings_are_chosen_on_valid_and_test_is_read_once(
        model, monkeypatch, tmp_path, capsys):
    """For each setting in its turn the best of those tried stays; then each way reads test, with
    the weights of each seed; a second call reads nothing again."""
    corpus, asked = a_corpus(), []

    def read(model, corpus, tokens, way, run, label):
        split = "test" if tokens is corpus.test else "valid"
        assert split == "test" or tokens.equal(corpus.valid[: dynamic.VALIDATION + 1])
        asked.append((split, way, run.seed))
        loss = 3.0 - (way.rate in (0, 0.2, 2e-4)) - (way.T == 32)
        return torch.full((len(tokens) - 1,), loss)

    monkeypatch.setattr(dynamic, "read", read)
    monkeypatch.setattr(dynamic.common, "train_run", lambda path, flags: None)
    monkeypatch.setattr(dynamic.common, "open_run", lambda path, data_dir: (
        model, replace(RUN, seed=int(path.name[-1])), corpus, None))
    argv = ["--dataset", "stdlib", "--out", str(tmp_path), "--seeds", "0", "3"]
    assert dynamic.main(argv) == 0
    printed = capsys.readouterr().out
    assert {seed for split, _, seed in asked if split == "valid"} == {0}
    tests = [(way.step, way.T, way.rate, seed) for split, way, seed in asked if split == "test"]
    assert tests == [(*way, seed) for seed in (0, 3) for way in (
        ("none", 32, 0), ("sgd", 32, 0.2), ("rms", 32, 2e-4))]
    alone = f"{1 / math.log(2):.3f} ± 0.000"
    assert printed.count(alone) == 3 and "xz that has read the training text" in printed
    asked.clear()
    assert dynamic.main(argv) == 0 and asked == []


def test_a_run_is_read_from_its_folder(run_folder, monkeypatch, tmp_path, capsys):
    """Reading alone is what train.py's evaluation says; the figure has a line for each reader."""
    drawn, save = [], dynamic.common.save_figure
    monkeypatch.setattr(dynamic.common, "save_figure", lambda figure, path: (
        drawn.append(figure), save(figure, path)))
    first = {step: {name: values[:1] for name, values in tried.items()}
             for step, tried in dynamic.TRIED.items()}
    monkeypatch.setattr(dynamic, "TRIED", first)
    assert dynamic.main(["--checkpoint", str(run_folder), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    model, run, corpus, _ = dynamic.common.open_run(run_folder, "data")
    nats = dynamic.train.evaluate(model, corpus.test, run) / math.log(2)
    alone = re.search(r"reading alone +(\S+) ± 0.000", printed)
    assert float(alone[1]) == pytest.approx(nats, abs=0.001)  # rounded, and of other segments
    (axes,) = drawn[0].axes
    assert len(axes.patches) == 5 and axes.get_ylim()[0] == axes.get_xlim()[0] == 0
    assert (tmp_path / "dynamic_evaluation.png").stat().st_size > 10_000


def test_a_look_searches_nothing_and_reads_the_beginning(run_folder, monkeypatch, tmp_path, capsys):
    """Without --checkpoint and --dataset: the model in pretrained/ and what was chosen before."""
    monkeypatch.setattr(dynamic.common, "PRETRAINED", run_folder)
    monkeypatch.setattr(dynamic, "LOOK", 50)
    monkeypatch.setattr(dynamic, "choose", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(dynamic, "compressed", lambda *_: pytest.fail("compressed"))
    corpus, seen, read = dynamic.common.open_run(run_folder, "data")[2], [], dynamic.read
    monkeypatch.setattr(dynamic, "read", lambda model, corpus, tokens, *rest: (
        seen.append(tokens), read(model, corpus, tokens, *rest))[1])
    assert dynamic.main(["--out", str(tmp_path)]) == 0
    assert len(seen) == 3 and all(z.equal(corpus.test[:51]) for z in seen)
    assert "50 predictions" in capsys.readouterr().out


def test_the_stretches_of_the_figure_add_up(monkeypatch, tmp_path):
    """xz's too: the sizes of a text that grows, less what stands before it."""
    corpus, drawn = a_corpus(4001), []
    monkeypatch.setattr(dynamic, "draw", lambda lines, ends, *_: drawn.append((lines, ends)))
    way = Way("none", 8, 16)
    dynamic.report({way: [torch.arange(4000.0), torch.arange(4000.0) + 2]}, corpus, tmp_path, True)
    (lines, ends), = drawn
    assert ends[-1] == 4000 and len(ends) == dynamic.STRETCHES
    assert lines["reading alone"][0] == pytest.approx((1332 / 2 + 1) / math.log(2))
    size = corpora.xz_size(corpora.as_bytes(corpus.test[:4000], corpus.vocab))
    total = sum(bits * n for bits, n in zip(lines["xz"], dynamic.widths(ends)))
    assert total == pytest.approx(8 * (size - corpora.xz_size(b"")))
