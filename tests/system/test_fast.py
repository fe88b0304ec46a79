"""A Reader gives lesson 5's numbers, and is used only where it does."""
import copy
import math
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn as nn

import training
from course.exercises import LESSONS, ROOT
from helpers import assert_close, gradients, randomized
from training import fast, presets

lesson_5 = import_module("05_full_model")
SMALL = lesson_5.Config(
    vocab_size=11, n_layer=2, d_model=6, n_head=3, d_head=4, d_inner=7, mem_len=5)
CONFIGS = {
    "plain": SMALL, "same_length": replace(SMALL, same_length=True),
    "clamp": replace(SMALL, clamp_len=3), "no memory": replace(SMALL, mem_len=0),
    "long": replace(SMALL, mem_len=40, same_length=True), "M 1": replace(SMALL, mem_len=1),
    "untie_r": replace(SMALL, untie_r=True, same_length=True, clamp_len=2),
    "bands": replace(SMALL, cutoffs=(3, 7), div_val=2), "endless": replace(SMALL, mem_len=10**9)}
CASES = [*((name, 3) for name in CONFIGS), ("plain", 1)]  # and lanes
CUTS = (3, 1, 1, 7, 2, 1, 12, 1, 1, 1, 1, 4, 5, 1, 2, 9)  # ragged: below, at and above M


def model_of(config=SMALL):
    torch.manual_seed(1)
    return randomized(lesson_5.TransformerXL(config)).eval()


def read(model, pieces, with_losses=True):
    """Return the losses of each piece (B, T), or the logits after it, carrying the memory over."""
    outputs, memory = [], None
    for x in pieces:
        out, memory = model(x, memory, (x + 1) % 11 if with_losses else None, last_only=True)
        outputs.append(out)
    return outputs


# ---- dropout ------------------------------------------------------------------------------------

@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_a_share_and_keeps_the_mean(p):
    """Each element is zero or scaled, also in sizes that 4 does not divide; gradients agree."""
    z = torch.ones(101, 997, requires_grad=True)
    out = fast.Dropout(p)(z)
    assert out.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-3)
    share = (out == 0).float().mean().item()
    assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / z.numel()))
    out.sum().backward()
    assert z.grad.equal(out.detach()) and fast.Dropout(p)(z.bfloat16()).dtype == torch.bfloat16
    assert fast.Dropout(p).eval()(z) is z and fast.Dropout(0.0)(z) is z


# ---- the Reader ---------------------------------------------------------------------------------

@pytest.mark.parametrize("block, with_losses", [
    (fast.BLOCK, True), (fast.BLOCK, False), (1, True), (3, True), (4, True)])
@pytest.mark.parametrize("name, B", CASES)
def test_a_reader_gives_the_models_numbers(name, B, block, with_losses, monkeypatch):
    """Calls of all lengths, before and after the memory is full, in any blocks, agree with it."""
    monkeypatch.setattr(fast, "BLOCK", block)
    model = model_of(CONFIGS[name])
    pieces = torch.randint(11, (B, sum(CUTS))).split(CUTS, dim=1)
    for i, (slow, quick) in enumerate(zip(
            read(model, pieces, with_losses), read(fast.Reader(model), pieces, with_losses))):
        assert_close(quick, slow, f"call {i} of {CUTS[i]} tokens", 1e-10)
        assert slow.requires_grad and not quick.requires_grad


def test_distance_keys_are_cached():
    """They are computed again only when a call needs larger distances."""
    model, memories = model_of(replace(SMALL, mem_len=20)), [None]
    for _ in range(100):
        memories.append(fast.Reader(model)(torch.randint(11, (1, 2)), memories[-1])[1])
    assert len({id(memory.k_R) for memory in memories[1:]}) <= 5
    assert memories[-1].k_R[0].shape[1] <= 22 and memories[-1].past[0][0].shape[2] == 20


def test_a_memory_does_not_change_when_it_is_used():
    """Two texts may continue one prefix."""
    model, (prefix, *texts) = model_of(), torch.randint(11, (3, 2, 4))
    reader, past = fast.Reader(model), model(prefix)[1]
    memory = reader(prefix)[1]
    for x in texts:
        assert_close(reader(x, memory)[0], model(x, past)[0], "after the prefix", 1e-10)


def test_lengths_may_change_between_calls():
    """A Reader reads mem_len, clamp_len and same_length at every call, as the model does."""
    model, x = model_of(), torch.randint(11, (7, 2, 4))
    changes = [{"mem_len": 9}, {"mem_len": 2}, {"mem_len": 30, "clamp_len": 2}, {"mem_len": 0},
               {"clamp_len": 5, "mem_len": 8}, {"same_length": True}, {"clamp_len": 0}]
    outputs = []
    for form in (model, fast.Reader(model)):
        memory, form.config = None, SMALL
        for piece, change in zip(x, changes):
            form.config = replace(form.config, **change)
            out, memory = form(piece, memory)
            outputs.append(out)
    for i, change in enumerate(changes):
        assert_close(outputs[7 + i], outputs[i], f"after {change}", 1e-10)


def test_under_autocast_the_memory_is_bf16():
    """Its losses are near the model's."""
    model, x = model_of().float(), torch.randint(11, (4, 2, 3))
    reader = fast.Reader(model)
    with torch.autocast("cpu", torch.bfloat16):
        slow, quick, memory = read(model, x), read(reader, x), reader(x[0])[1]
    assert {z.dtype for z in (*memory.past[0], memory.k_R[0])} == {torch.bfloat16}
    for a, b in zip(slow, quick):
        assert_close(b.double(), a.detach().double(), "under autocast", 0.05)


X = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda r, m: r.train()(X), r"eval mode.* call eval\(\)"),
    (lambda r, m: r(X + 11), "token 11 outside vocabulary of 11"),
    (lambda r, m: r(X, m(X)[1]), "a Reader of this model has returned, got list"),
    (lambda r, m: r(X, fast.Reader(model_of())(X)[1]), "of this model has returned, got Memory"),
    (lambda r, m: r(X, r(X[:1])[1]), "memory has 1 lanes, x has 2"),
], ids=["training", "token", "list", "another model", "lanes"])
def test_what_does_not_fit_is_rejected(call, words):
    """A ValueError says what was passed and what is expected."""
    model = model_of()
    with pytest.raises(ValueError, match=words):
        call(fast.Reader(model), model)


# ---- where it is used ---------------------------------------------------------------------------

AS_WRITTEN = "the model runs as it is written"


def prints(capsys, model):
    """Return what `prepare` returns, and what it prints when it is called for the first time."""
    fast.say_once.cache_clear()
    return fast.prepare(model), capsys.readouterr().out


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_it_is_used_for_every_preset_without_a_message(name, capsys):
    """The model may have any dtype, be prepared twice, and have another dropout rate."""
    with torch.device("meta"):
        model = lesson_5.TransformerXL(presets.CONFIGS[name]).bfloat16()
    model.dropout_final = nn.Dropout(0.7)
    for _ in range(2):
        reader, out = prints(capsys, model)
        assert type(reader) is fast.Reader and reader.model is model and out == ""
    assert fast.Dropout in map(type, model.modules())


VARIANTS = {  # changes of a model m, or of its last layer z, which a Reader would miss
    "a model of another class": lambda m, z: setattr(m, "__class__", type("Mine", (type(m),), {
        "forward": lambda self, *given: lesson_5.TransformerXL.forward(self, *given)[::-1]})),
    "a hook": lambda m, z: z.norm_1.register_forward_hook(print),
    "a parametrization": lambda m, z: nn.utils.parametrizations.weight_norm(z.W_1),
    "GELU": lambda m, z: setattr(z, "relu", nn.GELU()),
    "another eps": lambda m, z: setattr(z, "norm_2", nn.LayerNorm(6, 1e-3)),
    "a method of its own": lambda m, z: setattr(z.attention, "attend", print),
    "a parameter more": lambda m, z: setattr(z, "gain", nn.Parameter(torch.ones(1))),
    "one layer twice": lambda m, z: m.layers.__setitem__(0, z)}


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_that_is_not_exactly_lesson_5s_runs_as_it_is(name, is_prepared, capsys):
    """It is returned unchanged, before and after `prepare`; one message reports it."""
    model = model_of(replace(SMALL, dropout=0.1))
    if is_prepared:
        fast.prepare(model)
    VARIANTS[name](model, model.layers[-1])
    before = [*map(type, model.modules())]
    found, out = prints(capsys, model)
    assert found is model and out.startswith(AS_WRITTEN) and out.count("\n") == 1
    assert fast.prepare(model) is model and capsys.readouterr().out == ""
    assert [*map(type, model.modules())] == before


EDITS = {  # a lesson, its text, the edited text
    "GELU": (5, "nn.ReLU()", "nn.GELU()"),
    "pre-norm": (5, "self.norm_1(h + self.dropout_output(attended))",
                 "h + self.norm_1(self.dropout_output(attended))"),
    "mask": (5, "    return distance < 0\n", "    return (distance < 0) | (distance > 2)\n"),
    "score": (5, "score / math.sqrt(self.C)", "score / self.C"),
    "bias": (5, "F.linear(h, self.weight, self.bias)", "F.linear(h, self.weight)"),
    "dropout": (5, "h = self.dropout_final(h)", "pass"),
    "u for v": (5, "u[n], v[n], mask", "u[n], u[n], mask"),
    "shift": (4, "x[..., 1:, :].reshape", "x[..., :-1, :].reshape"),
    "cosines": (1, "[angle.sin(), angle.cos()]", "[angle.cos(), angle.sin()]"),
    "memory": (5, "[past[:, past.shape[1] - m :] for", "[0 * past[:, past.shape[1] - m :] for"),
    "comment": (5, "# expand one pair to all layers", "# one pair serves all layers")}


def edited_modules(name, folder, monkeypatch):
    """Return lesson 5 and training/fast.py, imported again with one lesson edited."""
    number, old, new = EDITS[name]
    for lesson in LESSONS[:-1]:
        text = (ROOT / f"{lesson}.py").read_text(encoding="utf-8")
        if lesson.startswith(f"0{number}"):
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / f"{lesson}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    for module in (*LESSONS[:-1], "training.fast"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(training, "fast", fast)  # the new import sets it
    return import_module("05_full_model"), import_module("training.fast")


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_effect_as_without_a_reader(
        name, tmp_path, monkeypatch, capsys, needs_shipped_solutions):
    """Training with an edit equals `--plain` bit for bit, except the dropouts.  So do evaluation
    and sampling, or up to rounding error where a Reader agrees; a comment changes nothing."""
    lesson, edited = edited_modules(name, tmp_path, monkeypatch)
    torch.manual_seed(1)
    plain = randomized(lesson.TransformerXL(lesson.Config(**vars(SMALL) | {"dropout": 0.2})))
    model = copy.deepcopy(plain)
    reader, out = edited.prepare(model), capsys.readouterr().out
    as_written = name in ("pre-norm", "u for v", "memory")  # a Reader uses the lessons' other parts
    assert (reader is model) == as_written and out.startswith(AS_WRITTEN * as_written)
    assert out.count("\n") == as_written
    if not as_written:
        edited.replace_dropouts(plain)
    pieces, results = torch.randint(11, (3, 2, 4)), []
    for form, read_by in ((plain, plain), (model, reader)):
        torch.manual_seed(2)
        losses = torch.cat(read(form.train(), pieces))
        leaves = [*form.parameters()]
        form.eval()
        results.append([losses, *gradients(losses, leaves), torch.cat(read(read_by, pieces)),
                        lesson.generate(read_by, pieces[0], 3, top_k=1)])
    (*trained, evaluated, sample), (*wanted, wanted_evaluated, wanted_sample) = results
    assert all(a.equal(b) for a, b in zip(trained, wanted))
    assert_close(evaluated, wanted_evaluated, "evaluation", 1e-9 if reader is not model else 1e-300)
    assert sample.equal(wanted_sample)
