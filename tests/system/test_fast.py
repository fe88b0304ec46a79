"""The fast form gives the numbers of the plain one, forward and gradient, whatever is asked; and it
stands in for nothing but the text and the classes that were compared here.

Lesson 5's file, compared with the formulas by its own tests, is the oracle here.
"""
import copy
import math
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from helpers import assert_close, gradients, randomized
from training import fast, presets

lesson_1 = import_module("01_vanilla_segments")
lesson_2 = import_module("02_recurrence")
lesson_4 = import_module("04_rel_shift")
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
    """Losses of a model or a Reader for each piece (B, T), or logits after it; the memory is handed
    on."""
    outputs, memory = [], None
    for x in pieces:
        out, memory = model(x, memory, (x + 1) % 11 if with_losses else None, last_only=True)
        outputs.append(out)
    return outputs


# ---- dropout ------------------------------------------------------------------------------------

@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_a_share_and_keeps_the_mean(p):
    """Zero or scaled, nothing else, also in sizes that 4 does not divide; the same in gradients."""
    z = torch.ones(101, 997, requires_grad=True)
    out = fast.Dropout(p)(z)
    assert out.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-3)
    share = (out == 0).float().mean().item()
    assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / z.numel()))
    out.sum().backward()
    assert z.grad.equal(out.detach()) and fast.Dropout(p)(z.bfloat16()).dtype == torch.bfloat16
    assert fast.Dropout(p).eval()(z) is z and fast.Dropout(0.0)(z) is z


def test_dropouts_entries_are_independent():
    """The four that share a draw of 64 bits, and those far apart."""
    out = (fast.Dropout(0.5)(torch.ones(40_000, 8)) == 0).float() - 0.5
    for columns in (out, out.view(8, -1).T):
        correlation = columns.T @ columns / (0.25 * len(columns))
        assert (correlation - torch.eye(8)).abs().max() < 5 / math.sqrt(len(out))


# ---- the model in training ----------------------------------------------------------------------

@pytest.mark.parametrize("name, B", CASES)
def test_a_model_with_replaced_parts_gives_the_same_numbers_and_gradients(name, B):
    """Losses of every segment and the gradient of every parameter, in training without dropout."""
    plain = model_of(CONFIGS[name]).train()
    quick = fast.replace_parts(copy.deepcopy(plain))
    pieces = torch.randint(11, (B, sum(CUTS[:8]))).split(CUTS[:8], dim=1)
    found, wanted = (torch.cat(read(model, pieces), dim=1) for model in (quick, plain))
    assert_close(found, wanted, "the losses", 1e-10)
    names = [name for name, _ in plain.named_parameters()]
    for name, a, b in zip(names, gradients(found, [*quick.parameters()]),
                          gradients(wanted, [*plain.parameters()])):
        assert_close(a / b.abs().max(), b / b.abs().max(), f"the gradient into {name}", 1e-10)


# ---- the Reader ---------------------------------------------------------------------------------

@pytest.mark.parametrize("block, with_losses", [
    (fast.BLOCK, True), (fast.BLOCK, False), (1, True), (2, True), (3, True), (4, True)])
@pytest.mark.parametrize("name, B", CASES)
def test_a_reader_gives_the_models_numbers(name, B, block, with_losses, monkeypatch):
    """Many calls in a row, of all lengths, before and after the memory is full; whichever corners
    of a block of queries are masked.
    """
    model = model_of(CONFIGS[name])
    pieces = torch.randint(11, (B, sum(CUTS))).split(CUTS, dim=1)
    monkeypatch.setattr(fast, "BLOCK", block)
    for i, (slow, quick) in enumerate(zip(
            read(model, pieces, with_losses), read(fast.Reader(model), pieces, with_losses))):
        assert_close(quick, slow, f"call {i} of {CUTS[i]} tokens", 1e-10)
        assert slow.requires_grad and not quick.requires_grad


def test_what_is_computed_is_kept():
    """The layers' weights; the distances, until the longest; keys in a buffer with room."""
    model, memories = model_of(replace(SMALL, mem_len=20)), [None]
    for _ in range(100):
        memories.append(fast.Reader(model)(torch.randint(11, (1, 2)), memories[-1])[1])
    layers, k_R, buffers = ({id(getattr(memory, name)) for memory in memories[1:]}
                            for name in ("layers", "k_R", "buffer"))
    assert len(layers) == 1 and len(k_R) <= 5 and len(buffers) <= 5 + 200 / 20
    assert memories[-1].buffer.room <= 2 * 22


def test_what_a_caller_holds_never_changes():
    """Beams: several continuations of one prefix, in turn, each as if it were alone."""
    model, prefix = model_of(), torch.randint(11, (2, 4))
    reader = fast.Reader(model)
    beams = [torch.randint(11, (2, T)).split(cut, dim=1) for T, cut in (
        (8, 1), (9, 2), (6, 3), (12, 12), (7, 4))]
    alone = [read(model, [prefix, *beam])[1:] for beam in beams]
    _, root = reader(prefix)
    memories = [root] * len(beams)
    for step in range(8):
        for i, beam in enumerate(beams):
            if step < len(beam):
                x = beam[step]
                loss, memories[i] = reader(x, memories[i], (x + 1) % 11)
                assert_close(loss, alone[i][step], f"beam {i}, step {step}", 1e-10)
    x = beams[0][0]
    assert_close(reader(x, root, (x + 1) % 11)[0], alone[0][0], "the prefix once more", 1e-10)


def test_lengths_may_change_between_calls():
    """mem_len up and down, clamp_len, same_length: read at every call, as the model does."""
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
    """With the model's numbers."""
    model, x = fast.replace_parts(model_of().float()), torch.randint(11, (4, 2, 3))
    reader = fast.Reader(model)
    with torch.autocast("cpu", torch.bfloat16):
        slow, quick, memory = read(model, x), read(reader, x), reader(x[0])[1]
    buffer, layer = memory.buffer, memory.layers[0]
    assert {z.dtype for z in (buffer.keys, memory.k_R[0], layer.W_1)} == {torch.bfloat16}
    for a, b in zip(slow, quick):
        assert_close(b.double(), a.detach().double(), "under autocast", 0.05)


X = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("call, words", [
    (lambda r, m: r.train()(X), r"eval mode.* call eval\(\)"),
    (lambda r, m: r(X + 11), "token 11 outside vocabulary of 11"),
    (lambda r, m: r(X, m(X)[1]), "a Reader of this model has returned for 2 lanes, got list"),
    (lambda r, m: r(X, fast.Reader(model_of())(X)[1]), "of this model .*, got Memory"),
    (lambda r, m: r(X, r(X[:1])[1]), "for 2 lanes, got Memory"),
], ids=["training", "token", "list", "another model", "lanes"])
def test_what_does_not_fit_is_refused(call, words):
    """ValueError, with what it is and what it should be."""
    model = model_of()
    with pytest.raises(ValueError, match=words):
        call(fast.Reader(model), model)


# ---- what may stand in --------------------------------------------------------------------------

EDITED = "lesson 5 (or an earlier one) was edited, so the model runs as it is written there"
OTHER = "the model is not exactly lesson 5's"
COMPARED = fast.COMPARED


@pytest.fixture(autouse=True)
def text_of_now(monkeypatch):
    """Compare the text of now: one test alone asks whether the checksum is stale."""
    monkeypatch.setattr(fast, "COMPARED", fast.checksum_of_lessons())


def prints(capsys, model):
    """What `prepare` returns, and what it prints, as if it were called for the first time."""
    fast.say_once.cache_clear()
    return fast.prepare(model), capsys.readouterr().out


@pytest.mark.parametrize("name", presets.CONFIGS)
def test_it_stands_in_for_every_preset_and_says_nothing(name, capsys):
    """Of any dtype, twice, and after a dropout was given another rate."""
    with torch.device("meta"):
        model = lesson_5.TransformerXL(presets.CONFIGS[name]).bfloat16()
    model.dropout_final = nn.Dropout(0.7)
    for _ in range(2):
        reader, out = prints(capsys, model)
        assert type(reader) is fast.Reader and reader.model is model and out == ""
    assert {fast.Attention, fast.Dropout} <= {*map(type, model.modules())}


PARTS = [(lesson_1, "sinusoid"), (lesson_2, "update_memory"), (lesson_4, "rel_shift"),
         (lesson_4, "relative_score"), (lesson_5, "attention_mask"),
         (lesson_5, "distance_encoding"), (lesson_5.RelativeAttention, "attend"),
         (lesson_5.Layer, "__init__"), (lesson_5.TiedEmbedding, "logits"),
         (lesson_5.TransformerXL, "forward")]


@pytest.mark.parametrize("owner, name", PARTS, ids=lambda z: getattr(z, "__name__", z))
def test_another_function_is_run_as_it_is_written(owner, name, monkeypatch, capsys):
    """Whichever of them it is: the model is returned unchanged, and one line says why, once."""
    real, model = getattr(owner, name), model_of()
    monkeypatch.setattr(owner, name, lambda *given, **more: real(*given, **more))
    found, out = prints(capsys, model)
    assert found is model and out.startswith(EDITED) and out.count("\n") == 1
    assert fast.prepare(model) is model and capsys.readouterr().out == ""
    assert type(model.layers[0].attention) is lesson_5.RelativeAttention


VARIANTS = {  # changes of a model m, or of its last layer z, which Attention or Reader would miss
    "a model of another class": lambda m, z: setattr(m, "__class__", type("Mine", (type(m),), {})),
    "a hook": lambda m, z: z.norm_1.register_forward_hook(print),
    "GELU": lambda m, z: setattr(z, "relu", nn.GELU()),
    "another eps": lambda m, z: setattr(z, "norm_2", nn.LayerNorm(6, 1e-3)),
    "a method of its own": lambda m, z: setattr(z.attention, "attend", print),
    "a parameter more": lambda m, z: setattr(z, "gain", nn.Parameter(torch.ones(1))),
    "one layer twice": lambda m, z: m.layers.__setitem__(0, z)}


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_that_is_not_exactly_lesson_5s_runs_as_it_is(name, is_prepared, capsys):
    """Before and after `prepare` has made it faster."""
    model = model_of(replace(SMALL, dropout=0.1))
    if is_prepared:
        fast.prepare(model)
    VARIANTS[name](model, model.layers[-1])
    before = [*map(type, model.modules())]
    found, out = prints(capsys, model)
    assert found is model and out.startswith(OTHER) and out.count("\n") == 1
    assert [*map(type, model.modules())] == before


def test_the_checksum_is_of_the_text_that_was_compared(needs_shipped_solutions):
    """The other tests of this file compare the text of now."""
    now = fast.checksum_of_lessons()
    assert COMPARED == now, (
        "the lessons have changed; if all other tests of this file pass, put this line into "
        f'training/fast.py:\nCOMPARED = "{now}"')


@pytest.mark.parametrize("old, new, is_edit", [
    ("nn.ReLU()", "nn.GELU()", True), ("memory[n], R, u[n]", "memory[n], R, v[n]", True),
    ("\n", "\r\n", False)], ids=["GELU", "another u", "line ends of Windows"])
def test_the_text_in_the_file_decides(old, new, is_edit, tmp_path, monkeypatch):
    """Of lesson 5, here edited."""
    text = Path(lesson_5.__file__).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "edited.py"
    path.write_bytes(text.replace(old, new).encode())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    monkeypatch.setattr(fast, "lesson_5", import_module(path.stem))
    assert (fast.checksum_of_lessons() != fast.COMPARED) == is_edit
