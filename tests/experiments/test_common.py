"""What the experiments share: training goes on to the bit, and losses are after so many tokens.

    pytest tests/experiments/test_common.py
"""
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from helpers import assert_close, randomized

common, table6 = import_module("common"), import_module("table6_ablation")
corpora, lesson_5 = import_module("support.corpora"), import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6,
                         dropout=0.2)
RUN = common.presets.Recipe(batch=2, segment=5, steps=8, dtype="float32", warmup=2)


def text(n, separator=None):
    """A corpus of n random tokens below 7."""
    tokens = torch.randint(7, (n,), dtype=torch.uint8)
    return corpora.Corpus(tokens, tokens, tokens, list(range(7)), "random", separator)


# ---- training -----------------------------------------------------------------------------------

def test_what_is_stopped_goes_on_to_the_bit(tmp_path, monkeypatch):
    """Killed in the second reading of the text, whose sentences are shuffled anew."""
    corpus, step, tuned = text(47, 3), common.train.train_step, []
    monkeypatch.setattr(common.machine, "tune", tuned.append)  # as train.py's runs are

    def fit(path, stop=99):
        calls = []

        def counted(*arguments):
            if len(calls) == stop:
                raise RuntimeError("the machine is gone")
            calls.append(1)
            return step(*arguments)

        monkeypatch.setattr(common.train, "train_step", counted)
        monkeypatch.setattr(common.train, "fraction_done", lambda recipe, state: (
            setattr(state, "seconds", 25 * state.step), state.step / recipe.steps)[1])
        job = common.fit(path, lambda: lesson_5.TransformerXL(CONFIG), corpus, RUN)
        assert not job.model.training
        return job.model.state_dict(), len(calls)

    whole, _ = fit(tmp_path / "whole")
    assert tuned == ["cpu"]
    with pytest.raises(RuntimeError):
        fit(tmp_path / "cut", 7)  # a step takes 25 seconds, so every third one is saved
    for left in (2, 0):  # the second time it is finished
        gone_on, steps = fit(tmp_path / "cut")
        assert steps == left and all(whole[name].equal(z) for name, z in gone_on.items())


def test_another_run_is_not_taken(tmp_path):
    """Other steps, seed, model, or a text that has changed."""
    path, corpus, recipe = tmp_path / "m", text(60), replace(RUN, steps=1)

    def fit(config=CONFIG, corpus=corpus, recipe=recipe, half_loss=False):
        common.fit(path, lambda: table6.AblationModel(config, 5, "ours", half_loss), corpus, recipe)

    fit()
    for other in ({"config": replace(CONFIG, d_inner=9)}, {"recipe": replace(recipe, steps=2)},
                  {"recipe": replace(recipe, seed=5)}, {"corpus": text(60)}, {"half_loss": True}):
        with pytest.raises(ValueError, match="other settings.*name another folder"):
            fit(**other)


@pytest.mark.parametrize(
    "path", [*Path(common.__file__).parent.glob("*.py")], ids=lambda z: z.stem)
def test_gomp_spincount_is_set_before_torch_is_imported(path):
    """train.py sets it, and common imports train.py first."""
    names = [line.split()[1].split(".")[0] for line in path.read_text().splitlines()
             if line.startswith(("import ", "from "))]
    first = next(z for z in names if z in ("torch", "support", "training", "common", "train"))
    assert first == ("train" if path.stem == "common" else "common")


# ---- losses after so many tokens ----------------------------------------------------------------

def model_of(kind, **changes):
    """A random model in float64 without dropout."""
    config = replace(CONFIG, dropout=0.0, **changes)
    if kind == "ours":
        return randomized(lesson_5.TransformerXL(config)).eval()
    return randomized(table6.AblationModel(config, 4, kind)).eval()


def test_pieces_are_spread_and_carry_their_context():
    """Three pieces of 4 predictions after 2 tokens of context: at both ends and in the middle."""
    found = common.pieces(torch.arange(27), 2, 3, 4, "cpu")
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16],
                              [20, 21, 22, 23, 24, 25, 26]]
    with pytest.raises(ValueError, match="14 tokens, 15 are needed"):
        common.pieces(torch.arange(14), 2, 3, 4, "cpu")


@pytest.mark.parametrize("kind", ["ours", "shaw"])
@pytest.mark.parametrize("segment", [3, 16])
def test_a_memory_is_what_one_pass_over_the_piece_sees(kind, segment):
    """With same_length any cut gives the one pass's losses, after the context."""
    model = model_of(kind)
    tokens = common.pieces(torch.randint(7, (60,)), 9, 2, 10, "cpu")
    found = common.memory_losses(model, tokens, 9, segment, mem_len=4, same_length=True)
    with common.evaluating_with(model, mem_len=4, same_length=True):
        wanted = model(tokens[:, :-1], None, tokens[:, 1:])[0]
    assert found.shape == (2, 10)
    assert_close(found.double(), wanted[:, 9:], "the losses", 1e-5)
    assert model.config.mem_len == 6 and not model.config.same_length


@pytest.mark.parametrize("L, stride", [(3, 1), (8, 2), (12, 3)])
def test_a_window_gives_its_last_quarter(L, stride):
    """Each prediction from a window of its own, cut out by hand; 10 is no multiple of 3."""
    model = model_of("vaswani", mem_len=0)
    tokens = common.pieces(torch.randint(7, (60,)), 12, 2, 10, "cpu")
    found, n = common.window_losses(model, tokens, 12, L), 10
    assert found.shape == (2, n)
    for j in range(n):
        end = min(12 + (j // stride + 1) * stride, 12 + n)  # after the window's last input
        window = tokens[:, end - L : end]
        loss = model(window, None, tokens[:, end - L + 1 : end + 1])[0]
        assert_close(found[:, j].double(), loss[:, L - (end - 12 - j)].detach(), f"loss {j}", 1e-5)


# ---- the command line ---------------------------------------------------------------------------

def test_a_folder_is_named_after_experiment_scale_and_text(tmp_path, monkeypatch):
    monkeypatch.setattr(common.lesson_1, "RUNS", tmp_path)
    monkeypatch.setattr(common.corpora, "load", lambda name, root: None)
    flags = common.make_flags("name", "about", ("small", "copies"))
    given, _ = common.begin(flags.parse_args(["--scale", "copies"]), "name")
    assert given.out == tmp_path / "name-copies-copies"


def test_ctrl_c_says_how_to_resume(capsys):
    """Status 130."""
    def stop(argv):
        raise KeyboardInterrupt
    assert common.exit_status(stop)([]) == 130
    assert "the same command resumes" in capsys.readouterr().err
