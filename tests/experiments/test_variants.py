"""Test the lab's models against lesson 5, lesson 1 and formulas, and the rows' settings."""
import cmath
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from experiments import variants
from helpers import assert_close, randomized
from support import corpora
from training.reader import Reader

lesson_1, lesson_2, lesson_5 = map(import_module, (
    "01_vanilla_segments", "02_recurrence", "05_full_model"))
CONFIG = lesson_5.Config(11, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=10, mem_len=5)


def made(encoding, half_loss=False):
    """A model in float64, for segments of 4; what is frozen stays 0."""
    config = replace(CONFIG, mem_len=0) if encoding == "vaswani" else CONFIG
    model = variants.Variant(config, 4, encoding, half_loss)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5)
    return model.double().eval()


def test_ours_is_lesson_5_and_the_half_loss_counts_the_later_half_twice_in_training_only():
    """The same weights give the same losses; in an odd segment of 5, tokens 2 to 4 count twice."""
    ours, half, wanted = made("ours"), made("ours", True), lesson_5.TransformerXL(CONFIG).double()
    x, y = torch.randint(11, (2, 2, 10))
    for model, weights in (ours, torch.ones(5)), (half, torch.tensor([0, 0, 2, 2, 2])):
        wanted.load_state_dict(model.state_dict())
        found, losses = (lesson_2.stream_losses(each, x, y, 5) for each in (model, wanted))
        assert_close(found, losses, "in evaluation")
        found, _ = model.train()(x[:, :5], None, y[:, :5])
        assert_close(found, losses[:, :5] * weights, "in training")


def test_vaswani_is_lesson_1():
    """Weights match; those lesson 1 lacks are 0."""
    wanted = randomized(lesson_1.VanillaTransformer(11, N=2, D=12, H=3, FF=10))
    ours, state = made("vaswani"), wanted.state_dict()
    for old, new in (("W_k.", "W_kE."), ("feed_forward.0", "W_1"), ("feed_forward.2", "W_2")):
        state = {name.replace(old, new): weight for name, weight in state.items()}
    ours.embedding.bias.data.zero_()
    assert not ours.load_state_dict(state, strict=False).unexpected_keys
    x, y = torch.randint(11, (2, 2, 9))  # longer than T = 4: a sinusoid continues
    assert_close(ours(x, None, y)[0], lesson_1.token_losses(wanted(x), y), "the losses")


@pytest.mark.parametrize("encoding", ["ours", "shaw", "vaswani", "rope", "alibi"])
def test_a_row_says_whether_a_reader_gives_its_losses(encoding):
    """With Vaswani's the losses differ, since a Reader does not call the hook that adds them."""
    model, (x, y) = made(encoding), torch.randint(11, (2, 2, 12))
    wanted, found = (lesson_2.stream_losses(form, x, y, 6) for form in (model, Reader(model)))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12) == variants.Row(encoding).has_reader


def learned_distance(q, k, distance, head, attention):
    """Terms (a) and (b); the farthest distance of training is 8."""
    return q @ (k + attention.W_kR.rows[min(distance, 8), 4 * head :][:4].detach())


def rotated_product(q, k, distance, *rest):
    """q · k, its pairs (x_i, x_i+C/2) as complex numbers, k turned back by the distance."""
    turns = [cmath.exp(1j * distance * 10000 ** (-2 * i / 4)) for i in range(2)]
    return sum((complex(q[i], q[i + 2]) * turn * complex(k[i], k[i + 2]).conjugate()).real
               for i, turn in enumerate(turns))


def linear_bias(q, k, distance, head, attention):
    return q @ k - 2 * 2 ** (-8 * (head + 1) / 3) * distance  # times sqrt(C)


@pytest.mark.parametrize("encoding, score_of", [
    ("shaw", learned_distance), ("rope", rotated_product), ("alibi", linear_bias)])
def test_an_encoding_pair_by_pair(encoding, score_of):
    """The last three of twelve keys are queries, in three heads.  R, u and v do not count."""
    model = made(encoding)
    attention = model.layers[0].attention
    q, k, value = (torch.randn(1, 3, n, 4).double() for n in (3, 12, 12))
    k_R = attention.heads(attention.W_kR(torch.randn(12, 12).double()))
    mask = lesson_5.attention_mask(3, 9, 9, False)
    found = attention.attend(q, k, value, k_R, model.u[0], model.v[0], mask)
    for head in range(3):
        for i in range(3):
            scores = [score_of(q[0, head, i], k[0, head, j], 9 + i - j, head, attention) / 2
                      for j in range(10 + i)]
            wanted = torch.tensor(scores).double().softmax(-1) @ value[0, head, : 10 + i]
            assert_close(found[0, i, 4 * head : 4 * head + 4], wanted, f"head {head} query {i}",
                         1e-6)  # angles and slopes are float32


@pytest.mark.parametrize("name", variants.ROWS)
def test_a_row_has_its_settings(name):
    """M is T or 0; ours uses u and v, ours and shaw W_kR."""
    scale, row = variants.SCALES["tiny"], variants.ROWS[name]
    recipe = variants.recipe_of(row, scale, 3, "bf16")
    model = variants.make(row, scale, recipe.segment, 11)
    T = 11 if name.endswith("176") else 8
    assert (model.config.mem_len, recipe.segment) == (0 if "none" in name else T, T)
    small = variants.recipe_of(row, variants.SCALES["small"], 3, "bf16")
    assert (small.optimizer, small.lr, small.schedule, small.warmup, small.clip) == (
        ("adam", 0.003, "cosine", 100, 0.25) if name in ("adam", "lstm") else
        ("muon", 0.012, "sqrt", 20, 1.0))
    if name == "lstm":
        most = variants.make(variants.ROWS["ours"], scale, 8, 11)
        sizes = [sum(weight.numel() for weight in each.parameters()) for each in (model, most)]
        assert sizes[1] / 3 < sizes[0] <= sizes[1]
        return
    locked = [module for module in model.modules() if isinstance(module, variants.LockedDropout)]
    assert len(locked) == (6 if row.locked else 0)  # two, and two of each layer
    assert model.half_loss == ("half" in name)
    assert len(model.layers) == (int(name[7]) if name.startswith("layers") else 2)
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    assert not any(weight.any() for weight in frozen.values())
    assert ("u" in frozen) == ("v" in frozen) == (row.encoding != "ours")
    assert any("W_kR" in name for name in frozen) == (row.encoding not in ("ours", "shaw"))


def test_locked_dropout_has_one_mask_for_a_segment():
    """It differs by lane and by call, and keeps half of the features, doubled."""
    dropout, z = variants.LockedDropout(0.5), torch.ones(9, 7, 20)
    first, other = dropout(z), dropout(z)
    assert first.equal(first[:, :1].expand(9, 7, 20)) and not first.equal(other)
    assert {*first.unique().tolist()} == {0, 2} and first[0, 0].ne(first[1, 0]).any()
    assert dropout.eval()(z).equal(z)


def test_the_text_begins_elsewhere_for_each_seed_and_may_be_shuffled(tmp_path):
    """The splits keep their lines, except the last, cut one; training draws an order each epoch."""
    (tmp_path / "lines.txt").write_text("".join(f"line {i}\n" for i in range(4400)))
    corpus = corpora.load(tmp_path / "lines.txt")
    first, other = (variants.text_of(variants.Row(), corpus, seed) for seed in (0, 1))
    place = (other.train.unfold(0, 99, 1) == corpus.train[:99]).all(-1).nonzero()[0].item()
    assert place and other.train.roll(-place).equal(corpus.train)
    assert first.train.equal(corpus.train) and other.valid.equal(corpus.valid)
    shuffled = variants.text_of(variants.Row(shuffled=True), corpus, 1)
    assert shuffled.separator == corpus.vocab.index(10) and shuffled.train.equal(corpus.train)
    before, after = (Counter(corpora.decode(each.test.long(), corpus.vocab).split("\n"))
                     for each in (corpus, shuffled))
    assert (before - after).total() <= 3 and (after - before).total() <= 3
    assert not shuffled.test.equal(corpus.test[: len(shuffled.test)])
