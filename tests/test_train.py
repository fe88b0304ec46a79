"""train.py's own ideas: its schedule, what stands around a model, and the place in the text.

    pytest tests/test_train.py

The loop is compared with the formulas in tests/system/test_loop.py; the folder of a run, stopping,
going on and mistakes are tested in tests/system/test_runs.py.
"""
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from support import checkpoint, corpora, distributed, fast, hardware

train, lesson_5 = import_module("train"), import_module("05_full_model")
Config, TransformerXL = lesson_5.Config, lesson_5.TransformerXL

RUN = train.Run(steps=10, batch=4, segment=8, dtype="float32", eval_segment=5, eval_mem_len=7,
                eval_clamp_len=4)


def model_of(dropout=0.0):
    """A small model of lesson 5, in float64, every weight random."""
    model = TransformerXL(Config(11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=12,
                                 mem_len=6, dropout=dropout)).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.4)
    return model


# ---- the schedule -------------------------------------------------------------------------------

def test_the_learning_rate_warms_up_and_ends_at_zero():
    """Linear over the warm-up, half at the middle of the cosine, 0 at the end."""
    run = replace(RUN, lr=2.0, warmup=4)
    assert [train.learning_rate(run, step, 0.0) for step in range(5)] == [0.5, 1, 1.5, 2, 2]
    assert train.learning_rate(run, 9, 0.5) == pytest.approx(1.0)
    assert train.learning_rate(run, 9, 0.25) == pytest.approx(1 + math.sqrt(0.5))
    assert train.learning_rate(run, 9, 1.0) == 0
    assert train.learning_rate(replace(run, warmup=0), 0, 0.0) == 2.0


@pytest.mark.parametrize("length", [{"steps": 8}, {"tokens": 200}, {"minutes": 2.0}], ids=str)
def test_a_run_knows_its_length_in_steps_tokens_or_minutes(length):
    """A quarter is done, by whichever length was given; never more than all."""
    run = replace(RUN, **{"steps": 0} | length)
    quarter = {"steps": 2, "tokens": 50, "minutes": 30.0}
    most = {"steps": 9, "tokens": 999, "minutes": 999.0}
    for done, wanted in ((quarter, 0.25), (most, 1)):
        place = most | {name: done[name] for name in length}
        state = checkpoint.State(place["steps"], place["tokens"], place["minutes"])
        assert train.fraction_done(run, state) == wanted


# ---- around a model -----------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, wanted", [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_autocast_is_for_matrix_products(dtype, wanted):
    """In 16 bits if the run says so, and only in the block; sums stay in float32."""
    z = torch.ones(2, 2)
    with train.autocast(replace(RUN, dtype=dtype), "cpu"):
        assert (z @ z).dtype == wanted and (z + z).dtype == torch.float32
    assert (z @ z).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_changes_mode_and_lengths_and_puts_both_back(training):
    """Whatever happens in the block, a Ctrl-C included."""
    model = nn.Dropout().train(training)
    model.config = config = Config(11, mem_len=6)
    with pytest.raises(KeyboardInterrupt), train.evaluating(model, RUN):
        assert not model.training
        assert model.config == replace(config, mem_len=7, same_length=True, clamp_len=4)
        raise KeyboardInterrupt
    assert model.config is config and model.training == training


def test_reader_of_prepares_the_model_unless_the_run_is_plain():
    """A Reader of the very same model, which then trains faster; with --plain nothing changes."""
    plain, quick = model_of(), model_of()
    assert train.reader_of(plain, replace(RUN, plain=True)) is plain
    assert type(plain.layers[0].dropout_inner) is nn.Dropout
    reader = train.reader_of(quick, RUN)
    assert isinstance(reader, fast.Reader) and reader.model is quick
    assert type(quick.layers[0].dropout_inner) is fast.DropoutReLU


def test_the_test_line_is_of_the_test_split_in_the_corpuss_unit(monkeypatch):
    """In bits of bytes and as perplexity of words, with the lengths that it belongs to."""
    bytes_, words = (corpora.Corpus(*torch.arange(12).split((7, 2, 3)), vocab, "made up")
                     for vocab in ([97], ["<eos>"]))
    monkeypatch.setattr(train, "evaluate", lambda model, tokens, *rest: tokens.sum() / 15)
    assert train.test_line(None, bytes_, RUN) == (  # 9 + 10 + 11 = 30
        f"test {2 / math.log(2):.4f} bpc (evaluation T 5, M 7, clamp 4; 2 predictions; made up)")
    assert train.test_line(None, words, replace(RUN, eval_clamp_len=0)) == (
        f"test {math.exp(2):.4f} ppl (evaluation T 5, M 7, clamp none; 2 predictions; made up)")


def test_a_sample_is_drawn_with_the_memory_of_evaluation(monkeypatch):
    """In eval mode; what was asked for is handed on."""
    def generate(model, prompt, **asked):
        return torch.tensor([model.config.mem_len, model.training, asked["n_tokens"], len(prompt)])

    monkeypatch.setattr(lesson_5, "generate", generate)
    found = train.continue_text(model_of().train(), TOKENS[:9], RUN, {"n_tokens": 3})
    assert found.tolist() == [7, False, 3, 9]


# ---- the place in the text ----------------------------------------------------------------------

def test_training_lanes_are_the_stream_or_the_epochs_sentences(monkeypatch):
    """A corpus with a separator is read sentence by sentence, in an order of seed and epoch."""
    monkeypatch.setattr(train, "lanes", lambda tokens, B: tokens * B)
    run, tokens = replace(RUN, batch=2, seed=5), torch.tensor([0, 1, 2, 0, 3, 0, 4, 5, 0, 6, 7, 0])
    stream = corpora.Corpus(tokens, tokens, tokens, [97], "made up")
    assert train.training_lanes(stream, run, 3, "cpu").equal(2 * tokens)
    sentences = replace(stream, separator=0)
    for epoch in range(3):
        found = train.training_lanes(sentences, run, epoch, "cpu")
        assert found[:, :].equal(corpora.SentenceLanes(tokens, 2, 0, 5, epoch)[:, :])


def test_at_the_end_of_the_text_sentences_come_in_a_new_order(monkeypatch):
    """That of the epoch which begins; the old lanes are let go first.  Other text stays."""
    job = SimpleNamespace(corpus=SimpleNamespace(separator=None), stream="old", run=RUN,
                          state=SimpleNamespace(epoch=7), model=model_of())
    assert train.next_stream(job) == "old"
    job.corpus.separator = 0
    monkeypatch.setattr(train, "training_lanes", lambda *given: (job.stream, *given))
    assert train.next_stream(job) == (None, job.corpus, RUN, 7, torch.device("cpu"))


def test_the_next_segment_is_that_of_this_ranks_lanes(monkeypatch):
    """From the column where the run stands."""
    monkeypatch.setattr(train, "segments", lambda stream, T, start: iter(
        [(stream + start, stream * T)]))
    monkeypatch.setattr(distributed, "my_lanes", {4: slice(2, 4)}.get)
    stream, state = torch.arange(20).view(4, 5), SimpleNamespace(column=3)
    x, y = train.next_segment(stream, RUN, state, "cpu")
    assert x.equal(stream[2:] + 3) and y.equal(stream[2:] * 8)


# ---- twice on one model -------------------------------------------------------------------------

TOKENS = torch.arange(60) * 7 % 11
CORPUS = corpora.Corpus(TOKENS, TOKENS, TOKENS, list(range(97, 108)), "made up")
USES = {
    "evaluate": lambda model: train.evaluate(model, TOKENS, RUN),
    "evaluate by a Reader": lambda model: train.evaluate(fast.Reader(model), TOKENS, RUN),
    "evaluate and skip": lambda model: train.evaluate(model, TOKENS, RUN, "here", 13),
    "test_line": lambda model: train.test_line(model, CORPUS, RUN),
    "evaluate_in_parts": lambda model: distributed.evaluate_in_parts(
        train.evaluate, model, TOKENS, RUN, "testing"),
    "generate": lambda model: lesson_5.generate(
        model, TOKENS[:9], 20, generator=torch.Generator().manual_seed(1)).tolist(),
    "continue_text": lambda model: train.continue_text(
        model, TOKENS[:9], RUN, {"n_tokens": 20}).tolist(),
    "continue_text by a Reader": lambda model: train.continue_text(
        fast.Reader(model), TOKENS[:9], RUN, {"n_tokens": 20, "seed": 3}).tolist(),
    "choose_dtype": lambda model: hardware.choose_dtype(
        train.train_step, model, replace(RUN, dtype="auto"), *TOKENS.view(2, 3, 10)) and None}


def all_of(model):
    """What a use of a model must leave as it was, the random state among it."""
    return [model.config, [module.training for module in model.modules()],
            {name: z.tolist() for name, z in model.state_dict().items()},
            [p.grad for p in model.parameters()], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("use", USES)
def test_a_second_use_of_a_model_gives_the_same_and_leaves_it_as_it_was(use, training):
    """Nothing is left in it: no memory, no mode, no length, no gradient, no draw."""
    model = model_of(dropout=0.3).train(training)
    before = all_of(model)
    assert USES[use](model) == USES[use](model)
    assert all_of(model) == before
