"""A Reader gives lesson 5's numbers, and is used only where it does."""
import copy
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import training
from course.exercises import LESSONS, ROOT
from helpers import assert_close, gradients, randomized
from training import presets, reader as readers

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


@pytest.mark.parametrize("block, with_losses", [
    (readers.BLOCK, True), (readers.BLOCK, False), (1, True), (3, True), (4, True)])
@pytest.mark.parametrize("name, B", CASES)
def test_a_reader_gives_the_models_numbers(name, B, block, with_losses, monkeypatch):
    """Calls of all lengths, before and after the memory is full, in any blocks, agree with it."""
    monkeypatch.setattr(readers, "BLOCK", block)
    model = model_of(CONFIGS[name])
    pieces = torch.randint(11, (B, sum(CUTS))).split(CUTS, dim=1)
    for i, (slow, quick) in enumerate(zip(
            read(model, pieces, with_losses), read(readers.Reader(model), pieces, with_losses))):
        assert_close(quick, slow, f"call {i} of {CUTS[i]} tokens", 1e-10)
        assert slow.requires_grad and not quick.requires_grad


def test_distance_keys_are_cached():
    """They are computed again only when a call needs larger distances."""
    model = model_of(replace(SMALL, mem_len=20))
    memories = [None]
    for _ in range(100):
        memories.append(readers.Reader(model)(torch.randint(11, (1, 2)), memories[-1])[1])
    assert len({id(memory.k_R) for memory in memories[1:]}) <= 5
    assert memories[-1].k_R[0].shape[1] <= 22 and memories[-1].past[0][0].shape[2] == 20


def test_lengths_may_change_between_calls():
    model, x = model_of(), torch.randint(11, (7, 2, 4))
    changes = [{"mem_len": 9}, {"mem_len": 2}, {"mem_len": 30, "clamp_len": 2}, {"mem_len": 0},
               {"clamp_len": 5, "mem_len": 8}, {"same_length": True}, {"clamp_len": 0}]
    outputs = []
    for form in (model, readers.Reader(model)):
        memory, form.config = None, SMALL
        for piece, change in zip(x, changes):
            form.config = replace(form.config, **change)
            out, memory = form(piece, memory)
            outputs.append(out)
    for i, change in enumerate(changes):
        assert_close(outputs[7 + i], outputs[i], f"after {change}", 1e-10)


def test_under_autocast_the_memory_is_bf16():
    """Its losses are near the model's, also if the memory is used outside afterwards."""
    model = model_of().float()
    x = torch.randint(11, (4, 2, 3))
    reader = readers.Reader(model)
    with torch.autocast("cpu", torch.bfloat16):
        slow, quick, memory = read(model, x), read(reader, x), reader(x[0])[1]
    assert {z.dtype for z in (*memory.past[0], memory.k_R[0])} == {torch.bfloat16}
    slow.append(model(x[1], model(x[0])[1])[0])
    quick.append(reader(x[1], memory)[0])
    for a, b in zip(slow, quick):
        assert_close(b.double(), a.detach().double(), "under autocast", 0.05)


X = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda r, m: r.train()(X), r"eval mode.* call eval\(\)"),
    (lambda r, m: r(X + 11), "token 11 outside vocabulary of 11"),
    (lambda r, m: r(X, m(X)[1]), "a Reader of this model has returned, got list"),
    (lambda r, m: r(X, readers.Reader(model_of())(X)[1]), "of this model has returned, got Memory"),
    (lambda r, m: r(X, r(X[:1])[1]), "memory has 1 lanes, x has 2"),
], ids=["training", "token", "list", "another model", "lanes"])
def test_what_does_not_fit_is_rejected(call, words):
    model = model_of()
    with pytest.raises(ValueError, match=words):
        call(readers.Reader(model), model)


AS_WRITTEN = "the model runs as it is written"


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_it_is_used_for_every_preset_without_a_message(name, capsys):
    """The model may have any dtype.  A subclass runs as it is written, which one line reports."""
    with torch.device("meta"):
        model = lesson_5.TransformerXL(presets.CONFIGS[name]).bfloat16()
    readers.say_once.cache_clear()
    reader = readers.reader_of(model)
    assert type(reader) is readers.Reader and reader.model is model
    assert capsys.readouterr().out == ""
    model.__class__ = type("Mine", (lesson_5.TransformerXL,), {})
    assert readers.reader_of(model) is model and readers.reader_of(model) is model
    out = capsys.readouterr().out
    assert out.startswith(AS_WRITTEN) and out.count("\n") == 1


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


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_effect_as_without_a_reader(
        name, tmp_path, monkeypatch, capsys, needs_shipped_solutions):
    """Training equals `--plain` bit for bit, evaluation up to rounding where a Reader agrees."""
    number, old, new = EDITS[name]
    for file in LESSONS[:-1]:
        text = (ROOT / f"{file}.py").read_text(encoding="utf-8")
        if file.startswith(f"0{number}"):
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / f"{file}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (*LESSONS[:-1], "training.reader"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(training, "reader", readers)  # the new import sets it
    lesson, edited = map(import_module, ("05_full_model", "training.reader"))
    torch.manual_seed(1)
    plain = randomized(lesson.TransformerXL(lesson.Config(**vars(SMALL) | {"dropout": 0.2})))
    model = copy.deepcopy(plain)
    reader = edited.reader_of(model)
    out = capsys.readouterr().out
    as_written = name in ("pre-norm", "u for v", "memory")  # a Reader uses the lessons' other parts
    assert (reader is model) == as_written and out.startswith(AS_WRITTEN * as_written)
    assert out.count("\n") == as_written
    pieces, results = torch.randint(11, (3, 2, 4)), []
    for form, read_by in ((plain, plain), (model, reader)):
        torch.manual_seed(2)
        losses = torch.cat(read(form.train(), pieces))
        form.eval()
        results.append([torch.cat(read(read_by, pieces)), losses, *gradients(
            losses, [*form.parameters()]), lesson.generate(read_by, pieces[0], 3, top_k=1)])
    (evaluated, *found), (wanted_evaluated, *wanted) = results
    assert all(a.equal(b) for a, b in zip(found, wanted))
    assert_close(evaluated, wanted_evaluated, "evaluation", 1e-9 if reader is not model else 1e-300)
