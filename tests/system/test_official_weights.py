"""The authors' weights in our model: against loops in NumPy, strict, and there and back exactly.

    pytest tests/system/test_official_weights.py
    pytest tests/system/test_official_weights.py -k agreement -s     the differences

official_oracle.py computes the losses from the official layout itself, one query and key at a time.
"""
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import official_oracle as oracle
from training import official_weights as layout
from system.archives import refusal
from training import presets

train, command = import_module("train"), import_module("official_weights")
lesson_5 = import_module("05_full_model")

FULL = lesson_5.Config(
    vocab_size=29, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=11, mem_len=6)
BANDS = replace(FULL, cutoffs=(5, 11, 19))
TIED = replace(BANDS, div_val=2)
CASES = {
    "full softmax": FULL,
    "full, u and v for each layer": replace(FULL, untie_r=True),
    "div_val 1, for each layer, same_length, clamp": replace(
        BANDS, untie_r=True, same_length=True, clamp_len=4, mem_len=5),
    "div_val 4, two bands": replace(BANDS, div_val=4, cutoffs=(7,)),
    "div_val 2, tails tied": TIED,
    "div_val 4, three bands, untied, no memory": replace(
        BANDS, div_val=4, cutoffs=(5, 11), tie_projections=False, untie_r=True, mem_len=0),
}
EACH_LAYOUT = pytest.mark.parametrize("port", [False, True], ids=["official", "port"])


# ---- helpers ------------------------------------------------------------------------------------

def state_of(config, port=False):
    """Random weights in the official layout, {name: float64 tensor}."""
    return {name: torch.from_numpy(z) for name, z in oracle.random_state(config, port).items()}


def load(config, state):
    model = lesson_5.TransformerXL(config).double()
    return layout.load_official_weights(model, state).eval()


def segments_of(words):
    """Three segments of unequal length, two lanes, words drawn from `words`."""
    draw = np.random.default_rng(1)
    return [tuple(draw.choice(words, size=(2, T)) for _ in range(2)) for T in (4, 3, 5)]


def check_losses(model, state, words, port):
    """The losses on words drawn from `words` are the oracle's -> the largest difference."""
    worst, arrays = 0.0, {name: z.numpy() for name, z in state.items()}
    pieces, memory = segments_of(words), None
    for (x, y), wanted in zip(pieces, oracle.losses(arrays, pieces, model.config, port)):
        with torch.no_grad():
            found, memory = model(torch.tensor(x), memory, torch.tensor(y))
        worst = np.maximum(worst, np.abs(found.numpy() - wanted).max())  # NaN, if there is one
        assert np.ptp(wanted) > 0.5, "losses that hardly differ would hide a mistake"
    assert worst < 1e-9
    return worst


class Refuse:
    """Refusals of one model, after each of which it is as it was."""

    def __init__(self, config):
        self.model = lesson_5.TransformerXL(config).double()
        self.before = {name: z.clone() for name, z in self.model.state_dict().items()}

    def __call__(self, state):
        message = refusal(layout.load_official_weights, self.model, state)
        assert all(z.equal(self.before[name]) for name, z in self.model.state_dict().items())
        return message


# ---- the same losses, there and back ------------------------------------------------------------

@EACH_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_agreement(case, port):
    """Three segments with memory; targets in every band, then in the first and the last alone."""
    config = CASES[case]
    state = state_of(config, port)
    model, edges = load(config, state), (0, *config.cutoffs, config.vocab_size)
    worst = [check_losses(model, state, range(*words), port) for words in {
        (0, 29), (edges[0], edges[1]), (edges[-2], edges[-1])}]
    print(f"  {case:48} {'port' if port else 'official':8}  {max(worst):.1e} nats")


@EACH_LAYOUT
@pytest.mark.parametrize("case", CASES)
def test_the_round_trip_is_exact(case, port):
    """Theirs -> ours -> theirs gives the same names and numbers, and ours -> theirs -> ours too."""
    config, state = CASES[case], state_of(CASES[case], port)
    model = load(config, state)
    back = layout.official_state(model, port)
    assert back.keys() == state.keys()
    sines = [name for name in state if name.endswith("inv_freq")]
    torch.testing.assert_close(back[sines[0]], state[sines[0]])
    assert all(back[name].equal(z) for name, z in state.items() if name not in sines)
    copy = load(config, back)
    assert all(a.equal(b) for a, b in zip(model.parameters(), copy.parameters()))


def test_float16_weights_are_taken():
    """The port's files may be half precision; the model's dtype stays."""
    half = {name: z.half() for name, z in state_of(FULL, port=True).items()}
    model = layout.load_official_weights(lesson_5.TransformerXL(FULL), half)
    assert model.u.dtype == torch.float32
    assert model.embedding.bias.equal(half["crit.out_layers.0.bias"].float())


def test_the_port_may_list_shared_u_and_v_under_every_layer():
    """It registers them there as well; they must be the same."""
    state = state_of(FULL, port=True)
    for n in range(2):
        for bias in ("r_w_bias", "r_r_bias"):
            state[f"transformer.layers.{n}.dec_attn.{bias}"] = state[f"transformer.{bias}"].clone()
    load(FULL, state)
    state["transformer.layers.1.dec_attn.r_w_bias"] += 1
    assert "layers.1.dec_attn.r_w_bias is not equal" in Refuse(FULL)(state)


def test_projections_that_the_file_does_not_tie_become_two():
    """Any band may be tied or not: the model follows the file, and says so in its config."""
    state = state_of(TIED)
    state["crit.out_projs.2"] = state["crit.out_projs.2"] + 0.3
    model = load(TIED, state)
    pairs = zip(model.embedding.project_in, model.embedding.project_out)
    assert [a is b for a, b in pairs] == [False, True, False, True]
    assert not model.config.tie_projections
    check_losses(model, state, range(29), port=False)
    assert layout.official_state(model)["crit.out_projs.2"].equal(state["crit.out_projs.2"])


# ---- strict -------------------------------------------------------------------------------------

@EACH_LAYOUT
@pytest.mark.parametrize("case", ["div_val 2, tails tied", "full softmax"])
def test_every_missing_or_misshapen_tensor_is_named(case, port):
    """One at a time: left out, with a row too many; or one too many."""
    config = CASES[case]
    state, refuse = state_of(config, port), Refuse(config)
    for name, z in state.items():
        if name.endswith(("r_w_bias", "layers.0.pos_ff.CoreNet.0.weight")):
            continue  # the sizes are read from these
        assert f"{name} is missing" in refuse({k: v for k, v in state.items() if k != name})
        if "inv_freq" not in name:
            message = refuse(state | {name: torch.cat([z, z[:1]])})
            assert f"{name} is {(len(z) + 1, *z.shape[1:])}, not {tuple(z.shape)}" in message
    assert "crit.extra is too much" in refuse(state | {"crit.extra": torch.zeros(2)})


@pytest.mark.parametrize("name, words", [
    ("crit.out_layers.1.weight", "crit.out_layers.1.weight is not equal to word_emb"),
    ("pos_emb.inv_freq", "pos_emb.inv_freq holds other frequencies")])
def test_weights_of_another_model_are_refused(name, words):
    """An output with rows of its own; another sinusoid."""
    state = state_of(TIED)
    assert words in Refuse(TIED)(state | {name: state[name] * 1.01})


def shapes_of(config, port=False):
    """Official weights without numbers; all layers are as the first."""
    with torch.device("meta"):
        state = layout.official_state(lesson_5.TransformerXL(replace(config, n_layer=1)), port)
    return {re.sub(r"(?<!emb_)layers\.0\.", f"layers.{n}.", name): z
            for n in range(config.n_layer) for name, z in state.items()}


@pytest.mark.parametrize("untie_r", [False, True])
def test_the_configuration_is_told_by_the_shapes(untie_r):
    """u and v for each layer or shared."""
    for name, config in presets.CONFIGS.items():
        shapes = shapes_of(replace(config, untie_r=untie_r), port=untie_r)
        assert layout.looks_like(shapes) == name


def test_a_refusal_says_what_the_weights_are():
    """By its name or its sizes; and what would take them."""
    other = replace(presets.CONFIGS["wt103-large"], cutoffs=(20_000, 40_000, 100_000))
    assert "cutoffs (20000, 40000, 100000)" in layout.looks_like(shapes_of(other))
    tiny = layout.official_state(lesson_5.TransformerXL(presets.CONFIGS["tiny"]))
    assert Refuse(FULL)(tiny).endswith("They look like tiny")
    message = Refuse(FULL)(state_of(replace(FULL, untie_r=True)))
    assert "r_w_bias is missing" in message and "u and v are one pair for each layer" in message
    assert "untie_r=True" in message
    message = refusal(layout.looks_like, {"weight": torch.zeros(2)})
    assert "no weights of the official" in message


# ---- the command --------------------------------------------------------------------------------

@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A text, and a configuration `small` that fits it, known to both tables."""
    text = tmp_path / "notes.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat; " * 20)
    V = len(set(text.read_text()))
    monkeypatch.setitem(presets.CONFIGS, "small", replace(FULL, vocab_size=V))
    monkeypatch.setitem(presets.RUNS, "small", replace(
        presets.RUNS["tiny"], dataset=str(text), eval_mem_len=20))
    monkeypatch.setitem(presets.MODELS, "small", (presets.CONFIGS["small"], presets.RUNS["small"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return text


def test_a_run_is_written_in_the_official_layout(tiny, tmp_path, monkeypatch, capsys):
    """--to, and the file, told by its shapes, evaluates to what the run's own test line says."""
    monkeypatch.setattr(train.log, "draw", lambda *arguments: None)
    out, target = tmp_path / "run", tmp_path / "theirs.bin"
    flags = ["--model", "small", "--text", str(tiny), "--out", str(out), "--steps", "3", "--device",
             "cpu", "--dtype", "float32"]
    assert train.main(flags) == 0
    wanted = capsys.readouterr().out.splitlines()[-1].split(" (")[0]
    assert command.main(["--to", str(target), "--run", str(out)]) == 0
    assert f"{target}: " in capsys.readouterr().out
    assert command.main([str(target)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(wanted) and line.endswith("published: nothing")


BAD_FILES = {
    "none": (None, "cannot be read"),
    "no checkpoint": (b"not a checkpoint", "no state dict"),
    "numbers": ({"a": 3}, "no state dict"),
    "other names": ({"a": torch.zeros(2)}, "no weights of the official"),
    "other sizes": (state_of(FULL), "none of the known sizes")}


def failure(capsys, argv):
    """The one line on stderr with which the command refuses."""
    assert command.main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("official_weights.py: ")
    return line


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_files_are_one_sentence(what, tmp_path, capsys):
    """No traceback, status 1, and the reason."""
    (content, words), path = BAD_FILES[what], tmp_path / "model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert words in failure(capsys, [str(path)])


def test_another_vocabulary_is_one_sentence(tiny, tmp_path, capsys):
    """The sizes fit, the data do not."""
    torch.save(state_of(presets.CONFIGS["small"]), tmp_path / "model.bin")
    tiny.write_text(tiny.read_text().replace("cat", "CAT"))
    assert "another vocabulary" in failure(capsys, [str(tmp_path / "model.bin")])


@pytest.mark.parametrize("flags", [[], ["a.bin", "--to", "b.bin"], ["--to", "b.bin"]])
def test_flags_that_do_not_fit_together_are_refused(flags, capsys):
    """One or the other."""
    assert "name either" in failure(capsys, flags)


def test_it_starts_as_a_program(tmp_path):
    """As README.md calls it: it finds train.py, and refuses a file that is not there."""
    done = subprocess.run([sys.executable, "experiments/official_weights.py", tmp_path / "no.bin"],
                          cwd=Path(train.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 1 and "no.bin cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1
