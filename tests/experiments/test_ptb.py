"""Penn Treebank: what is trained, going on, averages, the choice on valid, one reading of test.

    pytest tests/experiments/test_ptb.py
"""
import json
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ptb, lesson_5 = import_module("ptb"), import_module("05_full_model")
study, train, corpora, checkpoint = ptb.study, ptb.train, ptb.corpora, ptb.checkpoint
TINY = ptb.SIZES["tiny"]


def words(n, seed):
    """n lines of twelve words, after a rule that can be learned in part."""
    draw = torch.Generator().manual_seed(seed)
    lines = []
    for first in torch.randint(20, (n,), generator=draw).tolist():
        lines.append(" ".join(f"w{(first + k) % 20}" for k in range(12)))
    return lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small ptb: as --data-dir it is found whole."""
    data = tmp_path / "data"
    data.mkdir()
    source = corpora.SOURCES["ptb"]
    for file, n in zip(source.files, (600, 30, 40)):
        (data / file.name).write_text("\n".join(words(n, n)) + "\n")
    monkeypatch.setitem(corpora.SOURCES, "ptb", source._replace(
        files=tuple(file._replace(size=None, checksum=None) for file in source.files), counts=()))
    monkeypatch.setattr(study.Bar, "there", False)
    return data


@pytest.fixture
def setting(folder):
    """(config, run, corpus) of a tiny run of some 60 steps."""
    corpus = corpora.load("ptb", root=folder)
    corpus = replace(corpus, train=corpus.train[:1001])
    return (replace(TINY.config, vocab_size=len(corpus.vocab)),
            replace(TINY.run, tokens=2000, dtype="float32"), corpus)


def fit(setting, recipe, out, device="cpu", mode=None, **changes):
    config, run, corpus = setting
    out.mkdir(exist_ok=True)
    return ptb.fit(config, replace(run, **changes), recipe, corpus, out, device, mode)


def watch(monkeypatch, before=lambda n: None):
    """Record what each training step is given and leaves behind."""
    steps, step = [], train.train_step

    def watched(learner, optimizer, x, y, memory, run):
        before(len(steps))
        rates = [group["lr"] for group in optimizer.param_groups]
        result = step(learner, optimizer, x, y, memory, run)
        steps.append((x.clone(), rates, {name: z.clone() for name, z in
                                         learner.model.state_dict().items()}, memory))
        return result

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


def test_the_effects_change_one_part_each():
    """What each differs in from the recipe, written out; the baselines; no two are the same."""
    one = {"no word dropout": {"word": 0}, "no input dropout": {"input": 0},
           "no inside dropout": {"inside": 0}, "no attention dropout": {"attention": 0},
           "no output dropout": {"output": 0}, "not locked": {"locked": False},
           "locked inside": {"locked_inside": True}, "DropConnect 0.1": {"connect": 0.1},
           "no AR, no TAR": {"alpha": 0, "beta": 0}, "no decay": {"decay": 0},
           "decay 0.1 beside": {"decay": 0.1, "decoupled": True},
           "decay 1.2e-6 inside": {"decay": 1.2e-6, "decoupled": False},
           "random lengths": {"vary": True}, "exponential average": {"average": "ema"},
           "no average": {"average": "", "average_from": 1.0, "average_rate": 1.0},
           "embedding rate x 2": {"embedding_rate": 2}, "embedding rate x 1": {"embedding_rate": 1}}
    for size in ("laptop", "paper"):
        recipe = ptb.SIZES[size].recipe
        effects = ptb.effects(recipe)
        assert list(effects)[0] == "recipe" and effects.pop("recipe") == recipe
        assert effects.pop("nothing") == ptb.Recipe()
        assert effects.pop("only independent dropout") == ptb.Recipe(
            input=0.2, inside=0.2, attention=0.2, output=0.2, locked=False)
        wanted = {name: replace(recipe, **change) for name, change in one.items()}
        assert effects == {name: z for name, z in wanted.items() if z != recipe}
        assert len(set(effects.values())) == len(effects), "two names for one recipe"


def test_the_learning_rate():
    """Warm-up, a cosine to a third at the beginning of the average, then half of that; without
    averaging train.py's cosine to 0.
    """
    run = replace(TINY.run, lr=3.0, warmup=10)
    recipe = ptb.Recipe(average="equal", average_from=0.5, average_rate=0.5)
    found = [ptb.rate_at(run, recipe, step, done) for step, done in
             ((0, 0.0), (4, 0.0), (10, 0.0), (99, 0.25), (99, 0.4999), (99, 0.5), (99, 0.99))]
    assert found == pytest.approx([0.3, 1.5, 3.0, 2.0, 1.0, 0.5, 0.5], abs=1e-4)
    plain = [ptb.rate_at(run, ptb.Recipe(average_from=0.5, average_rate=0.5), 99, done)
             for done in (0.0, 0.5, 1.0)]
    assert plain == pytest.approx([3.0, 1.5, 0.0])


def test_every_token_once_an_epoch(setting, tmp_path, monkeypatch):
    """Two epochs in order, each from an empty memory; the rates are those of the groups."""
    config, run, corpus = setting
    steps = watch(monkeypatch)
    fit(setting, ptb.Recipe(embedding_rate=2.0), tmp_path / "a")
    read = torch.cat([x for x, *_ in steps], dim=1)
    lanes = ptb.lanes(corpus.train, run.batch)[:, :-1]
    assert torch.equal(read, torch.cat([lanes, lanes], dim=1))
    assert [i for i, (*_, memory) in enumerate(steps) if memory is None] == [0, len(steps) // 2]
    for i, (_, rates, *_) in enumerate(steps):
        epoch, part = divmod(i, len(steps) // 2)
        rate = ptb.rate_at(run, ptb.Recipe(), i, (1000 * epoch + 32 * part) / 2000)
        rate *= steps[i][0].shape[1] / 8  # the last segment of an epoch has 2 tokens, not 8
        assert rates == pytest.approx([2 * rate, rate, rate])


def test_random_lengths_scale_the_rate(setting, tmp_path, monkeypatch):
    """Each token still once an epoch; the rate of a step is in proportion to its length."""
    config, run, corpus = setting
    run = replace(run, segment=20, warmup=0)
    steps = watch(monkeypatch)
    fit((config, run, corpus), ptb.Recipe(vary=True), tmp_path / "a", seed=3)
    lengths = [x.shape[1] for x, *_ in steps]
    assert sum(lengths) == 2 * 250 and len(set(lengths)) > 3
    tokens = 0
    for i, (x, rates, *_) in enumerate(steps):
        wanted = ptb.rate_at(run, ptb.Recipe(), i, tokens / 2000) * x.shape[1] / 20
        assert rates[0] == pytest.approx(wanted)
        tokens += x.numel()
    assert lengths[:3] == [min(250, ptb.segment_length(20, 3, step)) for step in range(3)]


# ---- averages, and going on ---------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["equal", "ema", ""])
def test_what_is_kept(setting, tmp_path, monkeypatch, kind):
    """The mean of the weights after every update of the last part, in bf16, equal or forgetting in
    a tenth of that part; or the last ones.
    """
    steps = watch(monkeypatch)
    recipe = ptb.Recipe(average=kind, average_from=0.6, input=0.2) if kind else ptb.Recipe()
    model, curve = fit(setting, recipe, tmp_path / "a")
    tokens = [sum(x.numel() for x, *_ in steps[:i]) for i in range(len(steps))]
    last = [weights for (_, _, weights, _), t in zip(steps, tokens) if t >= 1200]
    assert 20 < len(last) < 30
    for name, z in model.state_dict().items():
        wanted = steps[-1][2][name]
        if kind == "equal":
            wanted = torch.stack([weights[name] for weights in last]).mean(0)
        elif kind == "ema":  # the last part is 800 tokens, 25 steps of 32
            wanted = last[0][name]
            for weights in last[1:]:
                wanted = wanted + (weights[name] - wanted) / 2.5
        assert torch.equal(z, z.bfloat16().float()), name
        assert ((z - wanted).abs() <= wanted.abs() / 250 + 1e-6).all(), name
    assert not model.training
    assert [row["averaged"] is None for row in curve] == [
        not kind or row["tokens"] < 1200 for row in curve]


def test_the_curve(setting, tmp_path):
    """A line at each validation and at the end: tokens, losses, in the file as perplexities."""
    config, run, corpus = setting
    model, curve = fit(setting, ptb.Recipe(alpha=3.0), tmp_path / "a", lr=0.01)
    assert [row["step"] for row in curve][:3] == [10, 20, 30] and curve[-1]["tokens"] == 2000
    assert curve[0]["valid"] > curve[-1]["valid"] + 0.2  # it learns
    assert all(abs(row["train"] - row["valid"]) < 1 for row in curve)  # no penalty in it
    wanted = train.evaluate(model, corpus.valid[:201], run)
    assert curve[-1]["valid"] == pytest.approx(wanted, abs=2e-3)  # the model is rounded
    assert curve.best() == min(row["valid"] for row in curve)
    head, *lines = (tmp_path / "a" / "curve.tsv").read_text().splitlines()
    last = dict(zip(head.split("\t"), lines[-1].split("\t")))
    assert float(last["valid"]) == pytest.approx(math.exp(curve[-1]["valid"]), abs=1e-3)
    assert last["averaged"] == "" and len(lines) == len(curve)


def test_the_reading_nearest_to_a_mark():
    """A validation just short of it counts, not the one after; the average where it is lower."""
    curve = ptb.Curve([{"tokens": t, "valid": v, "averaged": a} for t, v, a in (
        (10, 5.0, None), (29, 4.0, None), (50, 3.0, 2.5), (60, 3.5, 3.75))])
    assert [curve.near(t) for t in (10, 21, 30, 39, 45, 60)] == [5.0, 4.0, 4.0, 4.0, 2.5, 3.5]
    assert curve.best() == 2.5


@pytest.mark.parametrize("kind", ["equal", "ema"])
@pytest.mark.parametrize("at", [7, 60])
def test_going_on_to_the_bit(setting, tmp_path, monkeypatch, at, kind):
    """Stopped before and within the averaging, a run goes on to the same weights and curve."""
    recipe = replace(ptb.SMALL, average=kind, average_from=0.3, word=0.2, vary=True, connect=0.1)
    whole, curve = fit(setting, recipe, tmp_path / "a")

    def stop(n):
        if n == at:
            raise KeyboardInterrupt

    ticks = iter(range(0, 10**9, 100))  # a clock by which saving takes 100 s: every 10 steps or so
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(study, "EVERY", 0)
    with monkeypatch.context() as patch:
        watch(patch, stop)
        patch.setattr(study, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            fit(setting, recipe, tmp_path / "b")
    saved = checkpoint.read(tmp_path / "b" / "model.pt")
    assert 0 < saved["place"][0] < at and not saved["finished"]
    assert (saved["mean"]["n_averaged"] > 0) == (at == 60)
    torch.manual_seed(99)  # what happened in between must not matter
    steps = watch(monkeypatch)
    found, found_curve = fit(setting, recipe, tmp_path / "b")
    assert len(steps) == curve[-1]["step"] - saved["place"][0]
    for (name, a), b in zip(whole.state_dict().items(), found.state_dict().values()):
        assert torch.equal(a, b), name
    assert [{**row, "seconds": 0} for row in curve] == [{**row, "seconds": 0}
                                                        for row in found_curve]
    steps.clear()
    again, _ = fit(setting, recipe, tmp_path / "b")  # finished: nothing is trained
    assert not steps and all(torch.equal(a, b) for a, b in zip(
        whole.state_dict().values(), again.state_dict().values()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(setting, tmp_path):
    """With nothing drawn the curve is that of the CPU."""
    found = [fit(setting, ptb.Recipe(average="equal", average_from=0.5), tmp_path / device,
                 device)[1] for device in ("cpu", "cuda")]  # both draw their weights on the CPU
    assert [row["valid"] for row in found[1]] == pytest.approx(
        [row["valid"] for row in found[0]], abs=0.02)


def test_a_seed_decides_everything(setting, tmp_path):
    """The same seed gives the same weights, another one others."""
    recipe = replace(ptb.SMALL, connect=0.1)
    one, same, other = (
        fit(setting, recipe, tmp_path / str(i), seed=seed, tokens=600)[0].state_dict()
        for i, seed in enumerate((3, 3, 4)))
    assert all(torch.equal(a, b) for a, b in zip(one.values(), same.values()))
    assert not torch.equal(one["u"], other["u"])


def test_another_run_in_the_folder(setting, tmp_path):
    """A folder with another recipe's model is refused, and so is a damaged one; nothing is lost."""
    fit(setting, ptb.Recipe(), tmp_path / "a")
    path = tmp_path / "a" / "model.pt"
    data = path.read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        fit(setting, ptb.Recipe(input=0.1), tmp_path / "a")
    assert path.read_bytes() == data
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="damaged"):
        fit(setting, ptb.Recipe(), tmp_path / "a")


def test_a_step_that_is_not_finite_is_passed_over(setting, tmp_path, monkeypatch):
    """Nine such gradients in a row reach neither weights nor curve; the run goes on."""
    step, clip = train.train_step, torch.nn.utils.clip_grad_norm_
    calls, weights = [], []

    def bad(parameters, *rest):
        parameters, first = list(parameters), len(calls) % 10 > 0  # nine of ten
        parameters[0].grad.fill_(math.nan) if first else None
        return clip(parameters, *rest)

    def watched(learner, *rest):
        calls.append(1)
        result = step(learner, *rest)
        weights.append(learner.model.u.detach().clone())
        return result

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", bad)
    monkeypatch.setattr(train, "train_step", watched)
    _, curve = fit(setting, ptb.Recipe(), tmp_path / "a")
    moved = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert moved == [(i + 2) % 10 == 0 for i in range(len(moved))]
    assert curve[-1]["tokens"] == 2000
    assert [math.isfinite(row["train"]) for row in curve[:-1]] == [True] * (len(curve) - 1)


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


def test_temperature_1_is_the_evaluation_of_train_py(setting):
    """One lane, every token once; other temperatures divide the logits."""
    config, run, corpus = setting
    model = model_of(setting)
    run = replace(run, eval_segment=7, eval_mem_len=11, eval_clamp_len=9)
    tokens = corpus.valid[:100]
    found = ptb.losses_by_temperature(model, tokens, run, (1.0, 2.0, 0.5))
    assert found[0] == pytest.approx(train.evaluate(model, tokens, run), abs=1e-6)
    model.config = replace(config, mem_len=11, clamp_len=9, same_length=True)
    with torch.no_grad():
        logits, _ = model(tokens[None, :-1].long())  # one pass: with same_length the same
    for temperature, loss in zip((2.0, 0.5), found[1:]):
        wanted = F.cross_entropy(logits[0] / temperature, tokens[1:].long()).item()
        assert loss == pytest.approx(wanted, abs=1e-5)


def test_only_known_words_count(setting):
    """The mean over the predictions of words of the list, the others read all the same."""
    config, run, corpus = setting
    model, tokens = model_of(setting), corpus.valid[:100].long()
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens[5:9]] = True
    (found,) = ptb.losses_by_temperature(model, tokens, run, (1.0,), known)
    model.config = replace(config, mem_len=run.eval_mem_len, same_length=True)
    with torch.no_grad():
        losses, _ = model(tokens[None, :-1], None, tokens[None, 1:])
    wanted = [loss.item() for loss, y in zip(losses[0], tokens[1:]) if known[y]]
    assert 4 < len(wanted) < 90
    assert found == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)


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
    """Only if asked; each reading is noted before it begins; the same weights are not read again.
    """
    config, run, corpus = setting
    path, seen, losses = tmp_path / "result.json", [], ptb.losses_by_temperature
    run = replace(run, eval_mem_len=3)  # none of those to choose from

    def watched(model, tokens, at, temperatures=ptb.TEMPERATURES):
        seen.append("test" if tokens is corpus.test else "valid")
        assert seen[-1] == "valid" or json.loads(path.read_text())["readings"][-1].keys() == {
            "begun"}
        return losses(model, tokens, at, temperatures)

    def result(test, seed=0):
        return ptb.result_of(model_of(setting, seed), corpus, run, (8, 16), path, test)

    monkeypatch.setattr(ptb, "losses_by_temperature", watched)
    chosen = result(False)
    assert seen == ["valid"] * 3 and chosen["readings"] == [] and chosen["M"] in (8, 16)
    assert "test" not in ptb.said(chosen, corpus, (8, 16))
    found = result(True)
    assert seen == ["valid"] * 3 + ["test"], "the choice is made once"
    at = replace(run, eval_mem_len=found["M"], eval_clamp_len=found["clamp"])
    (reading,) = found["readings"]
    for name, temperature in (("test", found["temperature"]), ("at temperature 1", 1.0)):
        wanted = losses(model_of(setting), corpus.test, at, (temperature,))[0]
        assert reading[name] == pytest.approx(math.exp(wanted))
    line = ptb.said(found, corpus, (8, 16))
    for part in (f"valid {found['valid']:.2f} ppl", f"test {reading['test']:.2f} ppl",
                 f"{len(corpus.test) - 1:,} predictions", f"M {found['M']}"):
        assert part in line, part
    assert result(True) == found and len(seen) == 4, "read twice"
    other = result(True, seed=1)
    assert len(other["readings"]) == 1 and len(seen) == 8, "other weights"
    (earlier,) = other["earlier"]
    assert earlier.items() <= found.items() and earlier["readings"], "a reading is forgotten"


def test_a_reading_that_was_interrupted(setting, tmp_path, monkeypatch):
    """It stays in the log, and the split is read again."""
    config, run, corpus = setting
    path, losses = tmp_path / "result.json", ptb.losses_by_temperature
    ptb.result_of(model_of(setting), corpus, run, (8,), path, False)
    with monkeypatch.context() as patch:
        patch.setattr(ptb, "losses_by_temperature", lambda *z: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            ptb.result_of(model_of(setting), corpus, run, (8,), path, True)
    monkeypatch.setattr(ptb, "losses_by_temperature", losses)
    found = ptb.result_of(model_of(setting), corpus, run, (8,), path, True)
    assert ["test" in reading for reading in found["readings"]] == [False, True]
    assert "was interrupted | test " in ptb.said(found, corpus, (8,))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3"])
def test_a_damaged_log_of_readings(setting, tmp_path, text):
    """Refused by its name, and left as it is."""
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="result.json is damaged"):
        ptb.result_of(model_of(setting), setting[2], setting[1], (8,), path, False)
    assert path.read_text() == text


@pytest.mark.parametrize("M, temperature, edges", [
    (16, 1.0, []), (32, 1.0, ["M"]), (8, 0.9, ["temperature"]), (32, 1.15, ["M", "temperature"])])
def test_the_edge_of_what_was_tried(setting, M, temperature, edges):
    """A best value at the end of its list is said, since a better one may lie beyond."""
    line = ptb.said({"valid": 60.0, "M": M, "clamp": 0, "temperature": temperature,
                     "readings": []}, setting[2], (8, 16, 32))
    assert [name for name in ("M", "temperature") if f"; {name} is at the edge" in line] == edges


# ---- many runs ----------------------------------------------------------------------------------

def test_runs_of_other_processes_are_left_alone(tmp_path):
    """A run that somebody works on is passed over, and asked for again at the end."""
    jobs, done = [("a", 0), ("b, c", 0), ("d", 1)], []
    held = tmp_path / "a-0"
    held.mkdir()
    other = checkpoint.Lock(held)
    other.take()

    def work(job, folder):
        done.append(folder.name)
        if folder.name == "d-1":
            other.file.close()  # the other process ends meanwhile
        return job

    assert ptb.each_run(jobs, tmp_path, work) == ({job: job for job in jobs}, [])
    assert list(ptb.each_run(jobs, tmp_path, work)[0]) == jobs
    assert done == ["b-c-0", "d-1", "a-0", "a-0", "b-c-0", "d-1"]
    with checkpoint.Lock(held) as lock:
        lock.take()
        assert list(ptb.each_run(jobs, tmp_path, work)[0]) == jobs[1:]


def test_a_run_that_fails_keeps_no_other_from_being_done(tmp_path, capsys):
    """It is said, asked for once, and its folder is free again."""
    asked = []

    def work(job, folder):
        asked.append(job)
        if job == ("a", 0):
            raise ValueError("why")
        return 1

    found = ptb.each_run([("a", 0), ("b", 0)], tmp_path, work)
    assert found == ({("b", 0): 1}, [("a", 0)]) and asked == [("a", 0), ("b", 0)]
    assert capsys.readouterr().out == "a-0 failed: why\n"
    with checkpoint.Lock(tmp_path / "a-0") as lock:
        lock.take()


def test_the_recipe_can_be_changed():
    """--set: each part by its type."""
    found = ptb.changed(ptb.SMALL, ["word=0.25", "locked=False", "average=ema", "vary=True"])
    assert found == replace(ptb.SMALL, word=0.25, locked=False, average="ema", vary=True)


FLAGS = ["--size", "tiny", "--seeds", "0"]


def ready(out):
    """A folder for --out whose number type need not be measured."""
    out.mkdir()
    (out / "number_type").write_text("float32")
    return str(out)


def test_the_effects_in_small(folder, tmp_path, capsys):
    """A line for each recipe, its distance from the first, the averages, a figure; no test split.
    """
    flags = [*FLAGS, "--data-dir", str(folder), "--out", ready(tmp_path / "o"), "--what", "effects",
             "--only", "nothing", "recipe", "no word dropout"]
    assert ptb.main(flags) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith(("recipe", "nothing", "no word"))]
    assert [row.split("  ")[0] for row in rows] == ["recipe", "nothing", "no word dropout"]
    assert rows[0].split()[-1] == "+0.000" and float(rows[1].split()[-1]) != 0
    assert "averaging, seed 0:" in out and "predictions" not in out
    assert (tmp_path / "o" / "effects.png").stat().st_size > 10_000
    assert not list((tmp_path / "o").glob("*/result.json"))
    assert ptb.main(flags) == 0
    assert capsys.readouterr().out == out  # kept, not trained again


def test_the_recipe_in_small(folder, tmp_path, capsys):
    """A line for each seed; the test split only with --test; again: the same, read once."""
    flags = ["--size", "tiny", "--seeds", "0", "1", "--data-dir", str(folder), "--out",
             ready(tmp_path / "o")]
    paths = [tmp_path / "o" / f"recipe-{seed}" / "result.json" for seed in (0, 1)]
    assert ptb.main(flags) == 0
    assert "recipe-1: valid " in (out := capsys.readouterr().out) and " test " not in out
    assert ptb.main([*flags, "--test"]) == 0
    out = capsys.readouterr().out
    results = [json.loads(path.read_text()) for path in paths]
    for seed, result in enumerate(results):
        (reading,) = result["readings"]
        assert f"recipe-{seed}: valid {result['valid']:.2f} ppl" in out
        assert f"test {reading['test']:.2f} ppl" in out
    assert results[0]["weights"] != results[1]["weights"]
    assert ptb.main([*flags, "--test"]) == 0
    assert capsys.readouterr().out == out
    assert [json.loads(path.read_text()) for path in paths] == results


def test_a_hopeless_run_is_reported_like_the_others(folder, tmp_path, capsys):
    """A loss that no perplexity can show, and a run that belongs to another process."""
    out = ready(tmp_path / "o")
    flags = [*FLAGS, "--data-dir", str(folder), "--out", out, "--what", "effects", "--only",
             "nothing", "no decay", "--lr", "300"]
    (tmp_path / "o" / "no-decay-0").mkdir()
    with checkpoint.Lock(tmp_path / "o" / "no-decay-0") as lock:
        lock.take()
        assert ptb.main(flags) == 0
    printed = capsys.readouterr().out
    assert "nothing" in printed and "1 of 2 runs belong to other processes" in printed
    assert not (tmp_path / "o" / "effects.png").exists()


@pytest.mark.parametrize("flags, part", [
    (["--model", "16x380"], "--model is for --size paper"), (["--what", "all"], "invalid choice"),
    (["--what", "effects", "--only", "no luck"], "no luck"), (["--epochs", "0"], "--epochs"),
    (["--batch", "0"], "--batch"), (["--batch", "100000"], "100000 lanes"),
    (["--seeds", "-1"], "--seeds must"), (["--seeds", "1", "1"], "--seeds must"),
    (["--what", "effects", "--test"], "--test is for"), (["--only", "nothing"], "--only is for"),
    (["--compile", "--set", "vary=True"], "one length"), (["--size", "huge"], "invalid choice"),
    (["--out", "/dev/null/x"], "/dev/null"),
    (["--set", "luck=1"], "no such part; the parts are word, input,"),
    (["--set", "word=much"], "could not convert"), (["--set", "locked=1"], "True or False"),
    (["--set", "word=1"], "word must be in [0, 1)"), (["--set", "average=most"], "'most'"),
    (["--set", "average_from=1"], "average_from in (0, 1)"), (["--lr", "-1"], "--lr"),
    (["--warmup", "-1"], "--warmup")])
def test_mistakes_are_one_line(folder, tmp_path, capsys, flags, part):
    """What was wrong, on stderr; exit status 1; no file is left behind."""
    given = [*FLAGS, "--data-dir", str(folder), "--out", str(tmp_path / "o"), *flags]
    assert ptb.main(given) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and part in error[0], error
    assert not [path for path in tmp_path.glob("o/**/*") if path.is_file()]


def test_wrong_data_are_refused(folder, tmp_path, capsys, monkeypatch):
    """A split with other token counts: one line with the counts found and those published."""
    source = corpora.SOURCES["ptb"]
    monkeypatch.setitem(corpora.SOURCES, "ptb", source._replace(
        counts=(929_589, 73_760, 82_430, 10_000)))
    assert ptb.main([*FLAGS, "--data-dir", str(folder), "--out", str(tmp_path / "o")]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    for number in ("7800", "390", "520", "929589", "73760", "82430"):
        assert number in error.replace(",", ""), (number, error)
    assert not (tmp_path / "o").exists()


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
