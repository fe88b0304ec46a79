"""Penn Treebank: recipes, going on, the choice on valid, one reading of test, the figures.

    pytest tests/experiments/test_ptb.py
"""
import json
import math
import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ptb, lesson_5 = import_module("ptb"), import_module("05_full_model")
study, train, corpora, checkpoint = ptb.study, ptb.train, ptb.corpora, ptb.checkpoint
TINY = ptb.SIZES["tiny"]


@pytest.fixture
def setting(words, monkeypatch):
    """(config, run, corpus) of a tiny run of some 26 steps."""
    monkeypatch.setattr(study.Bar, "advance", lambda *_: None)
    corpus = corpora.load("ptb", root=words)
    corpus = replace(corpus, train=corpus.train[:401])
    return (replace(TINY.config, vocab_size=len(corpus.vocab)),
            replace(TINY.run, tokens=800, dtype="float32"), corpus)


def fit(setting, recipe, out, device="cpu", mode=None, **changes):
    config, run, corpus = setting
    out.mkdir(exist_ok=True)
    return ptb.fit(config, replace(run, **changes), recipe, corpus, out, device, mode)


def stop_at(monkeypatch, n):
    """Ctrl-C in step n -> the steps that were begun."""
    steps, step = [], train.train_step

    def watched(*given):
        if len(steps) == n:
            raise KeyboardInterrupt
        steps.append(1)
        return step(*given)

    monkeypatch.setattr(train, "train_step", watched)
    return steps


# ---- what is trained ----------------------------------------------------------------------------

def test_the_published_architecture_within_24_1_million():
    """The exact counts; W_kR is there; ten thousand words."""
    counts = {name: lesson_5.count_parameters(config) for name, config in ptb.MODELS.items()}
    assert counts == {"16x380": 23_965_064, "12x384": 23_351_824}
    for config in ptb.MODELS.values():
        assert config.vocab_size == 10_000 and config.mem_len == 70 and not config.cutoffs
        assert config.dropout == config.dropout_attention == 0  # the recipe has them all
        small = replace(config, n_layer=1, vocab_size=5)
        assert "layers.0.attention.W_kR.weight" in lesson_5.TransformerXL(small).state_dict()


def test_the_effects_are_different_recipes():
    """None stands there twice, and most differ in one part from the recipe, which is the first."""
    for size in ("laptop", "paper"):
        recipe = ptb.SIZES[size].recipe
        effects = ptb.effects(recipe)
        assert list(effects)[0] == "recipe" and len(set(effects.values())) == len(effects)
        assert effects["recipe"] == recipe and effects["nothing"] == ptb.Recipe()
        parts = [sum(a != b for a, b in zip(vars(z).values(), vars(recipe).values()))
                 for z in effects.values()]
        assert parts.count(1) >= 12


def test_the_reading_nearest_to_a_mark():
    """A validation just short of it counts, not the one after; the average where it is lower."""
    curve = ptb.Curve([{"tokens": t, "valid": v, "averaged": a} for t, v, a in (
        (10, 5.0, None), (29, 4.0, None), (50, 3.0, 2.5), (60, 3.5, 3.75))])
    assert [curve.near(t) for t in (10, 21, 30, 39, 45, 60)] == [5.0, 4.0, 4.0, 4.0, 2.5, 3.5]
    assert curve.best() == 2.5


# ---- going on -----------------------------------------------------------------------------------

@pytest.mark.parametrize("at", [7, 24])
def test_going_on_to_the_bit(setting, tmp_path, monkeypatch, at):
    """Stopped before and within the averaging, a run goes on to the same weights and curve; then
    it is finished, and nothing is trained.  Another recipe is refused.
    """
    recipe = replace(ptb.SMALL, average_from=0.3, word=0.2, vary=True, connect=0.1)
    whole, curve = fit(setting, recipe, tmp_path / "a")
    ticks = iter(range(0, 10**9, 100))  # a clock by which saving takes 100 s: every 21 steps
    monkeypatch.setattr(study, "EVERY", 0)
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        patch.setattr(study, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        with pytest.raises(KeyboardInterrupt):
            fit(setting, recipe, tmp_path / "b")
    saved = checkpoint.read(tmp_path / "b" / "model.pt")
    assert 0 < saved["place"][0] < at and not saved["finished"]
    assert (saved["mean"]["n_averaged"] > 0) == (at == 24)
    torch.manual_seed(99)  # what happened in between must not matter
    steps = stop_at(monkeypatch, None)
    for left in (curve[-1]["step"] - saved["place"][0], 0):
        steps.clear()
        found, found_curve = fit(setting, recipe, tmp_path / "b")
        assert len(steps) == left and not found.training
        for (name, a), b in zip(whole.state_dict().items(), found.state_dict().values()):
            assert torch.equal(a, b), name
        assert [{**row, "seconds": 0} for row in curve] == [
            {**row, "seconds": 0} for row in found_curve]
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, replace(recipe, input=0.1), tmp_path / "b")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(setting, tmp_path):
    """With nothing drawn the curve is that of the CPU."""
    found = [fit(setting, ptb.Recipe(average="equal", average_from=0.5), tmp_path / device,
                 device)[1] for device in ("cpu", "cuda")]  # both draw their weights on the CPU
    assert [row["valid"] for row in found[1]] == pytest.approx(
        [row["valid"] for row in found[0]], abs=0.02)


def test_a_step_that_is_not_finite_is_passed_over(setting, tmp_path, monkeypatch):
    """Nine of ten such steps: the run goes on, and its curve does not have them."""
    step, calls = train.train_step, []

    def often_bad(*given):
        calls.append(1)
        loss, norm, memory = step(*given)
        return (loss, norm, memory) if len(calls) % 10 == 1 else (math.nan, norm, memory)

    monkeypatch.setattr(train, "train_step", often_bad)
    _, curve = fit(setting, ptb.Recipe(), tmp_path / "a")
    assert curve[-1]["tokens"] == 800 and all(math.isfinite(row["train"]) for row in curve)


def test_a_loss_that_is_not_finite(setting, tmp_path):
    """Said with the step; nothing half-written."""
    with pytest.raises(ValueError, match="ten steps in a row, up to step 1[0-9],"):
        fit(setting, ptb.Recipe(), tmp_path / "a", lr=1e30, warmup=0)
    assert list((tmp_path / "a").iterdir()) == []


# ---- evaluation ---------------------------------------------------------------------------------

def model_of(setting, seed=0):
    torch.manual_seed(seed)
    model = lesson_5.TransformerXL(setting[0]).eval()
    for z in model.parameters():
        torch.nn.init.normal_(z, std=0.3)
    return model


def logits_by_hand(model, tokens, M, clamp):
    """Of every prediction, in one pass: with same_length the same as segment by segment."""
    model = model.double()
    model.config = replace(model.config, mem_len=M, clamp_len=clamp, same_length=True)
    with torch.no_grad():
        return model(tokens[None, :-1].long())[0][0]


def test_losses_by_temperature(setting):
    """One lane, every token once, the logits divided; or the mean over known words alone, while the
    others are read all the same.
    """
    config, run, corpus = setting
    model, tokens = model_of(setting), corpus.valid[:100].long()
    run = replace(run, eval_segment=7, eval_mem_len=11, eval_clamp_len=9)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens[5:9]] = True
    found = ptb.losses_by_temperature(model, tokens, run, (1.0, 2.0, 0.5))
    (some,) = ptb.losses_by_temperature(model, tokens, run, (1.0,), known)
    assert found[0] == pytest.approx(train.evaluate(model, tokens, run), abs=1e-6)
    logits = logits_by_hand(model, tokens, 11, 9)
    for temperature, loss in zip((1.0, 2.0, 0.5), found):
        assert loss == pytest.approx(
            F.cross_entropy(logits / temperature, tokens[1:]).item(), abs=1e-5)
    those = known[tokens[1:]]
    assert 4 < those.sum() < 90
    assert some == pytest.approx(
        F.cross_entropy(logits[those], tokens[1:][those]).item(), abs=1e-5)


def test_the_choice_is_made_on_valid(setting, monkeypatch):
    """All memories, with and without the clamp of training, all temperatures; the lowest wins."""
    config, run, corpus = setting
    seen = []

    def losses(model, tokens, at, temperatures=ptb.TEMPERATURES):
        assert tokens is corpus.valid
        seen.append((at.eval_mem_len, at.eval_clamp_len))
        return [5.0] * len(temperatures) if seen[-1] != (16, 15) else [
            5.0, 4.0, 3.0, 4.5, 5.0, 5.0]

    monkeypatch.setattr(ptb, "losses_by_temperature", losses)
    nats, at, temperature = ptb.choose(model_of(setting), corpus.valid, run, (8, 16, 32))
    assert seen == [(8, 0), (16, 0), (16, 15), (32, 0), (32, 15)]  # 15 is 8 + 8 - 1
    assert (nats, at.eval_mem_len, at.eval_clamp_len) == (3.0, 16, 15)
    assert temperature == ptb.TEMPERATURES[2]


def test_the_test_split_is_read_once(setting, tmp_path, monkeypatch):
    """Only if asked; each reading is noted before it begins, and if it is interrupted the note
    stays; the same weights are not read again, and those of other weights are not forgotten.
    """
    config, run, corpus = setting
    path, seen, losses = tmp_path / "result.json", [], ptb.losses_by_temperature

    def watched(model, tokens, at, temperatures=ptb.TEMPERATURES):
        seen.append("test" if tokens is corpus.test else "valid")
        if seen[-1] == "test":
            assert json.loads(path.read_text())["readings"][-1].keys() == {"begun"}
            if seen.count("test") == 1:
                raise KeyboardInterrupt
        return losses(model, tokens, at, temperatures)

    def result(test, seed=0):
        return ptb.result_of(model_of(setting, seed), corpus, run, (8, 16), path, test)

    monkeypatch.setattr(ptb, "losses_by_temperature", watched)
    chosen = result(False)
    assert seen == ["valid"] * 3 and chosen["readings"] == []
    assert "test" not in ptb.said(chosen, corpus, (8, 16))
    with pytest.raises(KeyboardInterrupt):
        result(True)
    found = result(True)
    assert seen == ["valid"] * 3 + ["test"] * 2, "the choice is made once"
    assert ["test" in reading for reading in found["readings"]] == [False, True]
    assert "was interrupted | test " in ptb.said(found, corpus, (8, 16))
    assert result(True) == found and len(seen) == 5, "read twice"
    other = result(True, seed=1)
    assert len(other["readings"]) == 1 and seen[5:] == ["valid"] * 3 + ["test"]
    assert other["earlier"][0]["readings"] == found["readings"], "a reading is forgotten"


def test_a_damaged_log_of_readings_is_refused_and_left_as_it_is(setting, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="result.json is damaged"):
        ptb.result_of(model_of(setting), setting[2], setting[1], (8,), path, False)
    assert path.read_text() == "[1, 2]"


@pytest.mark.parametrize("M, temperature, edges", [
    (16, 1.0, []), (32, 1.0, ["M"]), (8, 0.9, ["temperature"]), (32, 1.15, ["M", "temperature"])])
def test_the_edge_of_what_was_tried(setting, M, temperature, edges):
    """A best value at the end of its list is said, since a better one may lie beyond."""
    line = ptb.said({"valid": 60.0, "M": M, "clamp": 0, "temperature": temperature,
                     "readings": []}, setting[2], (8, 16, 32))
    assert [name for name in ("M", "temperature") if f"; {name} is at the edge" in line] == edges


# ---- many runs ----------------------------------------------------------------------------------

def test_each_run_is_done_by_one_process(tmp_path, capsys):
    """One that somebody works on is passed over, and asked for again at the end; one that fails is
    said, and keeps no other from being done.
    """
    jobs, done = [("a", 0), ("b, c", 0), ("d", 1)], []
    held = tmp_path / "a-0"
    held.mkdir()
    other = checkpoint.Lock(held)
    other.take()

    def work(job, folder):
        done.append(folder.name)
        if folder.name == "d-1":
            other.file.close()  # the other process ends meanwhile
        if folder.name == "b-c-0":
            raise ValueError("why")
        return job

    found = ptb.each_run(jobs, tmp_path, work)
    assert found == ({job: job for job in (jobs[0], jobs[2])}, [jobs[1]])
    assert done == ["b-c-0", "d-1", "a-0"] and capsys.readouterr().out == "b-c-0 failed: why\n"
    for folder in tmp_path.iterdir():
        with checkpoint.Lock(folder) as lock:
            lock.take()  # free again


def test_the_recipe_can_be_changed():
    """--set: each part by its type."""
    found = ptb.changed(ptb.SMALL, ["word=0.25", "locked=False", "average=ema", "vary=True"])
    assert found == replace(ptb.SMALL, word=0.25, locked=False, average="ema", vary=True)


def test_the_figures_are_those_of_the_models(words, tmp_path, capsys, monkeypatch):
    """The best evaluation on valid, and, with --test alone, test with the same one:
    perplexities of the model that is kept, by one pass over each split.  Again: the same.
    """
    out = tmp_path / "o"
    out.mkdir()
    (out / "number_type").write_text("bf16")  # of training; figures are in full precision
    flags = ["--size", "tiny", "--seeds", "1", "--data-dir", str(words), "--out", str(out)]
    assert ptb.main(flags) == 0
    printed = capsys.readouterr().out
    assert "| test" not in printed and ", 780 tokens of training, 2 epochs, 4 lanes of 8" in printed
    assert ptb.main([*flags, "--test"]) == 0
    printed = capsys.readouterr().out
    corpus = corpora.load("ptb", root=words)
    config = replace(TINY.config, vocab_size=len(corpus.vocab))
    model = lesson_5.TransformerXL(config)
    model.load_state_dict(checkpoint.read(out / "recipe-1" / "model.pt")["model"])

    def losses(tokens, M, clamp):
        """{temperature: mean loss in nats}."""
        logits, y = logits_by_hand(model, tokens, M, clamp), tokens[1:].long()
        return {z: F.cross_entropy(logits / z, y).item() for z in ptb.TEMPERATURES}

    found = {(M, clamp, temperature): loss for M, clamp in ((8, 0), (16, 0), (16, 15))
             for temperature, loss in losses(corpus.valid, M, clamp).items()}
    M, clamp, temperature = best = min(found, key=found.get)
    test = losses(corpus.test, M, clamp)
    line = re.search(rf"^recipe-1: .*$", printed, re.MULTILINE)[0]
    assert f"(M {M}, clamp {clamp or 'none'}, temperature {temperature}" in line
    shown = [float(z) for z in re.findall(r"([\d.]+) (?:ppl|at temperature 1,)", line)]
    wanted = [found[best], test[temperature], test[1.0]]
    assert shown == pytest.approx([math.exp(z) for z in wanted], abs=0.006)
    assert f"{len(corpus.test) - 1:,} predictions" in line
    assert ptb.main([*flags, "--test"]) == 0 and capsys.readouterr().out == printed
    assert (out / "recipe.png").stat().st_size > 10_000


def test_the_effects_are_counted_from_the_recipe(capsys):
    """Perplexity after each sixth of the run, the best, and the kept model's loss above the first's
    with the same seed.
    """
    def curve(*losses):
        return ptb.Curve({"tokens": 10 * (i + 1), "valid": math.log(z), "averaged": None}
                         for i, z in enumerate(losses))

    curves = {("recipe", 0): curve(60, 50, 40, 30, 20, 21), ("nothing", 0): curve(*[70] * 6),
              ("nothing", 1): curve(*[80] * 6)}
    kept = {("recipe", 0): 2.0, ("nothing", 0): 2.5, ("nothing", 1): 2.25}
    ptb.report(curves, kept, "recipe", 6, 60)
    _, recipe, nothing = capsys.readouterr().out.splitlines()
    assert recipe.split() == ["recipe", "60", "50", "40", "30", "20", "21", "20.0", "|", "+0.000"]
    assert nothing.split() == ["nothing", *["75"] * 6, "75.0", "|", "+0.500"]


@pytest.mark.slow
def test_compiling_changes_nothing(setting, tmp_path, capsys):
    """The compiled step has the losses of the plain one, step by step, to rounding; dropout off, so
    that nothing is drawn.
    """
    setting = replace(setting[0], n_layer=1), *setting[1:]
    curves = [fit(setting, ptb.Recipe(alpha=0.1, beta=0.1), tmp_path / str(mode), mode=mode,
                  tokens=320, warmup=0, eval_every=1, lr=0.02)[1]
              for mode in (None, "reduce-overhead")]
    assert "compiled in" in capsys.readouterr().out
    plain, compiled = ([(row["train"], row["valid"]) for row in curve] for curve in curves)
    assert plain[0][1] - plain[-1][1] > 0.02  # it has moved, by far more than ...
    assert torch.allclose(torch.tensor(compiled), torch.tensor(plain), atol=2e-4)
