"""What the experiments share: another run is refused, and losses are after so many tokens."""
import signal
from argparse import Namespace
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from helpers import assert_close, randomized

common, table6 = import_module("common"), import_module("table6_ablation")
corpora, lesson_5 = import_module("support.corpora"), import_module("05_full_model")
CONFIG = lesson_5.Config(7, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=6)
RECIPE = common.presets.Recipe(batch=2, segment=5, steps=1)
TEXTS = [corpora.Corpus(z, z, z, [*range(7)], "text") for z in torch.arange(120).view(2, 60) % 7]


def test_another_run_is_not_taken(tmp_path):
    """Other steps, model or text.  Each seed has a run."""
    given = Namespace(seeds=[0, 5], dtype="float32", out=tmp_path)

    def fit(config=CONFIG, corpus=TEXTS[0], recipe=RECIPE, half_loss=False):
        return [job.model for job in common.fit_seeds(lambda: table6.AblationModel(
            config, 5, "ours", half_loss), corpus, recipe, given, "m")]

    one, other = fit()
    assert not one.training and not one.u.equal(other.u)
    for changed in ({"config": replace(CONFIG, d_inner=9)}, {"recipe": replace(RECIPE, steps=2)},
                    {"corpus": TEXTS[1]}, {"half_loss": True}):
        with pytest.raises(ValueError, match="other settings.*name another folder"):
            fit(**changed)


def test_excerpts_are_spread_and_carry_their_context():
    """Three excerpts of 4 predictions after 2 tokens of context: at both ends and in the middle."""
    found = common.excerpts(torch.arange(27), 2, 3, 4, "cpu")
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16],
                              [20, 21, 22, 23, 24, 25, 26]]


@pytest.mark.parametrize("segment", [3, 16])
def test_a_memory_is_what_one_pass_over_the_piece_sees(segment):
    """With same_length any cut gives the one pass's losses, after the context."""
    model = randomized(table6.AblationModel(CONFIG, 4, "shaw")).eval()
    tokens = common.excerpts(torch.randint(7, (60,)), 9, 2, 10, "cpu")
    found = common.memory_losses(model, tokens, 9, segment, mem_len=4, same_length=True)
    assert model.config == CONFIG
    model.config = replace(CONFIG, mem_len=4, same_length=True)
    wanted = model(tokens[:, :-1], None, tokens[:, 1:])[0]
    assert_close(found.double(), wanted[:, 9:].detach(), "the losses", 1e-5)


@pytest.mark.parametrize("L, stride", [(3, 1), (8, 2), (12, 3)])
def test_a_window_gives_its_last_quarter(L, stride):
    """Each prediction from a window of its own, cut out by hand; 10 is no multiple of 3."""
    model = randomized(table6.AblationModel(replace(CONFIG, mem_len=0), 4, "vaswani")).eval()
    tokens = common.excerpts(torch.randint(7, (60,)), 12, 2, 10, "cpu")
    found = common.window_losses(model, tokens, 12, L)
    assert found.shape == (2, 10)
    for j in range(10):
        end = min(12 + (j // stride + 1) * stride, 22)  # after the window's last input
        window = tokens[:, end - L : end]
        loss = model(window, None, tokens[:, end - L + 1 : end + 1])[0]
        assert_close(found[:, j].double(), loss[:, L - (end - 12 - j)].detach(), f"loss {j}", 1e-5)


def test_ctrl_c_says_how_to_resume(notes, tmp_path, monkeypatch, capsys):
    """Status 130, and no other model is begun; the folder is named after what is in it."""
    step = common.train.train_step
    monkeypatch.setattr(common.train, "train_step", lambda *given: (
        signal.raise_signal(signal.SIGINT), step(*given))[1])
    monkeypatch.setattr(common.lesson_1, "RUNS", tmp_path)
    main = import_module("when_memory_pays").main
    assert main(["--scale", "tiny", "--dataset", str(notes)]) == 130
    assert "the same command resumes" in capsys.readouterr().err
    out = tmp_path / "when_memory_pays-tiny-notes"
    assert list(out.iterdir()) == [out / "muon-N1-M16-0"]
