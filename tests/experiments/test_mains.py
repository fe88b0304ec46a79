"""What each experiment's main hands to training and to evaluation: corpus, split, T, memory.

Nothing is trained here: stubs note what they are handed.  Every split is a text of its own.
"""
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from helpers import assert_close
from support.corpora import Corpus
from training import presets

common, table6, table8, memory_length, appendix_e, figures, kneser_ney, optimizers, table9, ptb = (
    map(import_module, (
        "common", "table6_ablation", "table8_recl", "memory_length", "appendix_e_generation",
        "figures5_to_7_attention", "kneser_ney", "optimizers", "table9_eval_speed", "table5_ptb")))
lesson_5 = import_module("05_full_model")


class World:
    """A corpus, and what was asked of its splits."""

    def __init__(self):
        splits = [torch.arange(k, 4000 + k).remainder(20) for k in (0, 5, 11)]
        self.corpus = Corpus(*splits, list(range(20)), "made up", None)
        self.fitted, self.asked = [], []  # (corpus, T, M, seed) of a model; (split, how, ...)

    def split(self, tokens):
        """The name of the split that these tokens are a part of."""
        corpora = {"": self.corpus, "shuffled ": getattr(self, "shuffled", self.corpus)}
        return next(f"{kind}{name}" for kind, corpus in corpora.items()
                    for name in ("train", "valid", "test") if tokens.untyped_storage().data_ptr()
                    == getattr(corpus, name).untyped_storage().data_ptr())

    def fit(self, model, corpus, run, path):
        self.fitted.append((corpus, run.segment, model.config.mem_len, run.seed))
        return model.eval()

    def pieces(self, tokens, before, count, n):
        self.last = self.split(tokens)
        return torch.zeros(2, before + n + 1, dtype=torch.int64)

    def memory_losses(self, model, tokens, before, segment, **lengths):
        self.asked.append((self.last, segment, lengths))
        return torch.ones(len(tokens), tokens.shape[1] - before - 1)

    def window_losses(self, model, tokens, before, L):
        self.asked.append((self.last, L))
        return torch.ones(2, 30)


@pytest.fixture
def world(monkeypatch, tmp_path):
    made = World()

    def begin(given, name, lock=True):
        given.out, given.dataset = tmp_path, given.dataset or "made up"
        return given, made.corpus
    monkeypatch.setattr(common, "begin", begin)
    monkeypatch.setattr(common, "choose_dtype", lambda model, run, out: run)
    monkeypatch.setattr(common, "save_figure", lambda figure, path: setattr(made, "figure", figure))
    for name in ("fit", "pieces", "memory_losses", "window_losses"):
        monkeypatch.setattr(common, name, getattr(made, name))
    return made


@pytest.mark.parametrize("table, T, order", [(6, 8, ""), (7, 8, "shuffled "), (10, 11, "")])
def test_table_6_7_and_10(table, T, order, world, monkeypatch):
    """Table 7 knows the shuffled text alone; table 10 trains with longer segments.  As trained, and
    then with M = L - 1 and same_length, or in windows of L."""
    valid = torch.arange(4000).remainder(20)
    world.shuffled = replace(world.corpus, valid=valid)
    monkeypatch.setattr(table6, "without_order", lambda corpus: world.shuffled)
    monkeypatch.setattr(table6, "longest_segment", lambda row, setting, given: (11, 1.0))
    argv = ["--size", "tiny", "--tables", str(table), "--seeds", "3"]
    assert table6.main(argv) == 0
    wanted = world.shuffled if table == 7 else world.corpus
    assert {(id(corpus), *rest) for corpus, *rest in world.fitted} == {
        (id(wanted), T, M, 3) for M in {T * row.recurrence for row in table6.ROWS
                                        if row.table == table}}
    splits = {split for split, *_ in world.asked}
    assert splits == {f"{order}valid"}
    lengths = {(L, 64, L - 1) for L in (4, 8, 16, 24)}
    assert lengths <= {(z["mem_len"] + 1, segment, z["mem_len"]) for _, segment, *(z,) in (
        call for call in world.asked if len(call) == 3) if z.get("same_length")}


def test_table_6_is_measured_against_the_papers_best_figures(capsys):
    """Not those at the length of training."""
    rows = [row for row in table6.ROWS if row.table == 6][:2]
    results = {row: [(2.0, {4: 1.9}), (2.0, {4: 1.9})] for row in rows}
    points = table6.report(6, rows, results, dict.fromkeys(rows, 7))
    assert points[1][2] == pytest.approx(
        torch.tensor(rows[1].paper[1] / rows[0].paper[1]).log().item(), abs=1e-6)


def test_table_8(world, monkeypatch):
    """The length is chosen on valid, the losses are of the test split; baselines read T."""
    read = []
    monkeypatch.setattr(table8, "losses_by_context", lambda model, tokens, contexts, length, n: (
        read.append((world.split(tokens), type(model).__name__, model.config.mem_len, length))
        or torch.ones(len(contexts), 9)))
    monkeypatch.setattr(table8, "best_length", lambda model, setting, corpus: (
        common.pieces(corpus.valid, 9, 1, 1), 999)[1])
    assert table8.main(["--size", "tiny", "--seeds", "0"]) == 0
    assert {split for split, *_ in read} == {"test"} and world.last == "valid"
    by_name = dict(zip(table8.MODELS, [length for *_, length in read[:: len(read) // len(
        table8.MODELS)]]))
    assert by_name == {name: 8 if name in ("vanilla", "lstm") else 999 for name in table8.MODELS}


def test_the_best_length_of_table_8_is_that_of_valid(world):
    setting, _ = table6.setting_of(SimpleNamespace(dataset="", size="tiny"), world.corpus)
    table8.best_length(None, setting, world.corpus)
    assert [(split, z["mem_len"]) for split, _, z in world.asked] == [
        ("valid", 8 * k - 1) for k in (1, 2, 4, 8, 16)]


def test_the_lstm_by_its_own_equations():
    """Both layers by hand, with the state of the call before; sqrt(D) on the input."""
    config = lesson_5.Config(7, n_layer=1, d_model=4)
    model = table8.LSTM(config, 2000).double()
    x, y = torch.randint(7, (2, 2, 3))
    _, memory = model(x, None, y)
    losses, _ = model(x, memory, y)
    lstm, width = model.layers, model.layers.hidden_size
    size = sum(z.numel() for part in (lstm, model.out) for z in part.parameters())
    more = width + 8
    assert size <= 2000 < 4 * more * (4 + 3 * more + 4) + more * 4
    h, c = [memory[0], memory[1]], [memory[2], memory[3]]
    for t in range(3):
        given = model.embedding.weight[x[:, t]] * 4**0.5
        for n in (0, 1):
            W_x, W_h, b_x, b_h = (getattr(lstm, f"{name}_l{n}") for name in (
                "weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            i, f, g, o = (given @ W_x.T + b_x + h[n] @ W_h.T + b_h).split(width, dim=1)
            c[n] = f.sigmoid() * c[n] + i.sigmoid() * g.tanh()
            h[n] = given = o.sigmoid() * c[n].tanh()
        logits = given @ model.out.weight.T @ model.embedding.weight.T + model.embedding.bias
        wanted = nn.functional.cross_entropy(logits, y[:, t], reduction="none")
        assert (losses[:, t] - wanted).abs().max() < 1e-6


def test_memory_length(world):
    """Each model at all lengths, without a clamp and with its own, M + T - 1; as trained; and with
    same_length and as many keys, M + T / 2."""
    assert memory_length.main(["--size", "tiny", "--seeds", "0"]) == 0
    depths, memories, setting = memory_length.SIZES["tiny"]
    T = setting.run.segment
    wanted = []
    for _ in depths:
        for M in memories:
            wanted += [("valid", 64, {"mem_len": L, "same_length": True, "clamp_len": clamp})
                       for clamp in (0, M + T - 1) for L in setting.lengths]
            wanted += [("valid", T, {"mem_len": M + T // 2, "same_length": True}), ("valid", T, {})]
    assert sorted(map(str, world.asked)) == sorted(map(str, wanted))


def test_appendix_e_continues_the_test_split(world, monkeypatch):
    """And a name counts as near if it is within T of training."""
    seen = []
    monkeypatch.setattr(appendix_e, "load_run", lambda given: (
        {0: None}, presets.Run(steps=1, segment=7, eval_mem_len=55), world.corpus))
    monkeypatch.setattr(appendix_e, "sample", lambda models, prompts, run, given: (
        seen.append(prompts), {"with memory": [prompts], "without memory": [prompts]})[1])
    for name in ("write_samples", "draw"):
        monkeypatch.setattr(appendix_e, name, lambda *_: None)
    monkeypatch.setattr(appendix_e, "measure_names", lambda prompts, new, corpus, T: (
        seen.append(T), ((), {}))[1])
    assert appendix_e.main(["--size", "tiny"]) == 0
    prompts, T = seen
    assert prompts[0].equal(world.corpus.test[: prompts.shape[1]]) and T == 7


def test_appendix_e_reads_copies_with_128(world, tmp_path):
    given = SimpleNamespace(size="tiny", dataset="copies", seeds=[0], device="cpu", out=tmp_path)
    _, run = appendix_e.train_copies(given, world.corpus)
    assert (run.dataset, run.eval_mem_len) == ("copies", 128)
    assert [corpus for corpus, *_ in world.fitted] == [world.corpus]


class Content(dict):
    """A checkpoint, as far as it is printed."""

    path = "x"


def test_figures_5_to_7_read_valid_with_the_runs_clamp(world, monkeypatch, tmp_path):
    """Up to the position in question, itself included."""
    model = lesson_5.TransformerXL(lesson_5.Config(20, n_layer=2, d_model=8, n_head=2, d_head=4))
    run, read = presets.Run(steps=1, eval_clamp_len=33), []
    monkeypatch.setattr(common, "open_run", lambda *_: (
        model, run, world.corpus, Content(state={"step": 1})))

    def averages(model, tokens, n):
        read.append(tokens)
        c = model.config
        assert (c.mem_len, c.same_length, c.clamp_len) == (5, True, 33)
        return torch.full((4, 2, 2, 6), 1 / 6)
    monkeypatch.setattr(figures, "averages", averages)
    for name in ("report", "draw_heads", "draw_text", "draw_terms"):
        monkeypatch.setattr(figures, name, lambda *_: None)
    assert figures.main(["--checkpoint", "x", "--memory", "5", "--queries", "16", "--position",
                         "700", "--out", str(tmp_path)]) == 0
    pieces, last = read
    assert pieces[0].equal(world.corpus.valid[: 5 + 16 // figures.PIECES])
    assert last[0].equal(world.corpus.valid[700 - 2 * 5 : 701])


def test_kneser_ney_is_tested_on_test(world, monkeypatch):
    corpus = replace(world.corpus, vocab=[f"w{i}" for i in range(20)], test=world.corpus.test[:9])
    monkeypatch.setattr(kneser_ney.corpora, "load", lambda name, root: corpus)
    read = []
    monkeypatch.setattr(kneser_ney.KneserNey, "__init__",
                        lambda self, tokens, V, order: read.append((len(tokens), V, order)))
    monkeypatch.setattr(kneser_ney.KneserNey, "loss", lambda self, tokens: read.append(
        len(tokens)) or 1.0)
    assert kneser_ney.main([]) == 0 and read == [(4000, 20, 5), 9]


def test_adam_and_muon_differ_in_nothing_else(world, monkeypatch):
    """Same weights and text, equal trials on valid with M = T; the best of each trains every seed.
    """
    runs, weights = [], []

    def fit(model, corpus, run, path):
        runs.append(run)
        weights.append(next(model.parameters()).sum().item())
        model.loss = abs(math.log(run.lr / 0.006)) + (run.schedule == "sqrt")  # 0.006 is best
        assert corpus is world.corpus and paths.setdefault(path, run) == run
        return model.eval()
    paths, asked = {}, []
    monkeypatch.setattr(common, "fit", fit)
    monkeypatch.setattr(common, "memory_losses", lambda model, tokens, before, T, **lengths: (
        asked.append((world.last, T, lengths)), torch.full((2, 30), model.loss))[1])
    monkeypatch.setattr(optimizers, "spectra", lambda *_, **__: {"gradient": torch.ones(3)})
    assert optimizers.main(["--size", "tiny", "--seeds", "3", "4"]) == 0
    trials, chosen = runs[:16], runs[16:]
    assert len(set(weights[:17])) == 1 and {run.seed for run in trials} == {3}
    by_name = {name: [run for run in trials if run.optimizer == name] for name in ("adam", "muon")}
    assert [run.schedule for run in by_name["adam"]] == [run.schedule for run in by_name["muon"]]
    same = {replace(run, optimizer="adam", lr=1.0, muon_lr=1.0) for run in trials}
    assert len(same) == 2  # the schedules
    assert [(z.optimizer, z.lr, z.schedule, z.seed) for z in chosen] == [
        (name, pytest.approx(0.006), "cosine", seed) for name in by_name for seed in (3, 4)]
    assert {run.muon_lr for run in chosen if run.optimizer == "muon"} == {0.01}
    assert asked == [("valid", 16, {"mem_len": M, "same_length": True})
                     for M in (*[16] * 16, *(8, 16, 32) * 4)]


def test_singular_values_of_a_gradient_and_of_both_steps(monkeypatch):
    """After one gradient Adam's step is nearly its sign, and Muon's a matrix without favourites."""
    torch.manual_seed(0)
    config = lesson_5.Config(20, n_layer=2, d_model=12, n_head=2, d_head=8, d_inner=9, mem_len=8)
    model, run = lesson_5.TransformerXL(config).eval(), presets.Run(batch=4, segment=8, steps=1)
    corpus = World().corpus
    corpus.train[:] = torch.randint(20, (4000,))
    before = [z.clone() for z in model.parameters()]
    batches, memory, gradients = optimizers.Batches(corpus, run, torch.device("cpu")), None, []
    for _ in range(3):
        x, y = next(batches)
        losses, memory = model(x, memory, y)
        gradients += torch.autograd.grad(losses.mean(), model.layers[1].attention.W_q.weight)
    first, later = (optimizers.spectra(model, corpus, run, steps) for steps in (1, 3))
    a, b, c = gradients
    mean = (0.81 * a + 0.9 * b + c) / 2.71  # Adam's, with its beta of 0.9, then of 0.999
    square = (0.999**2 * a**2 + 0.999 * b**2 + c**2) / (0.999**2 + 0.999 + 1)
    for found, name, matrix in ((first, "gradient", a), (first, "adam", a / (a.abs() + 1e-8)),
                                (later, "gradient", c), (later, "adam", mean / square.sqrt())):
        values = torch.linalg.svdvals(matrix)
        assert_close(found[name], values / values[0], name, 0.01)
    assert first["muon"].median() > 0.5 > first["gradient"].median()
    assert all(map(torch.equal, model.parameters(), before))


def test_table_9_draws_tokens_per_second(world, monkeypatch, tmp_path):
    sizes = []
    monkeypatch.setattr(table9, "milliseconds_a_token", lambda size, given: (
        sizes.append((size.eval_segment, size.eval_mem_len)),
        {"ours": [2.0], "plain": [4.0], "window": [5.0]})[1])
    assert table9.main(["--size", "tiny", "--lengths", "5", "9", "--out", str(tmp_path)]) == 0
    assert [list(line.get_ydata()) for line in world.figure.axes[0].lines] == [
        [500, 500], [250, 250], [200, 200]]
    assert sizes == [(table9.SEGMENT, 5), (table9.SEGMENT, 9)]


def test_table_5_chooses_on_valid(world, monkeypatch, tmp_path):
    monkeypatch.setattr(ptb, "choose", lambda model, tokens, run, memories: (
        setattr(world, "last", world.split(tokens)), (1.0, run, 1.0))[1])
    ptb.result_of(lesson_5.TransformerXL(lesson_5.CONFIGS["tiny"]), world.corpus,
                  presets.Run(steps=1), (1,), tmp_path / "result.json", False)
    assert world.last == "valid"


def test_the_effects_of_table_5_are_over_words_that_training_knows(world, monkeypatch):
    seen = []
    world.corpus = replace(world.corpus, train=world.corpus.train.clamp(max=11))
    monkeypatch.setattr(ptb, "fit", lambda *given: (None, []))
    monkeypatch.setattr(ptb, "losses_by_temperature", lambda model, tokens, run, _, *known: (
        seen.append((world.split(tokens), *(int(z.sum()) for z in known))) or (1.0,)))
    for name in ("report", "draw"):
        monkeypatch.setattr(ptb, name, lambda *_: None)
    assert ptb.main(["--size", "tiny", "--what", "effects", "--only", "recipe"]) == 0
    assert set(seen) == {("valid", 12)}
