"""The authors' weights in our model: against loops in NumPy, strict, and there and back exactly.

    pytest tests/system/test_official_weights.py
    pytest tests/system/test_official_weights.py -k agreement -s     the table of differences

official_oracle.py computes the losses from the official layout itself, one query and key at a time.
"""
import ast
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import official_oracle as oracle

official, layout = import_module("official_weights"), import_module("support.official_weights")
lesson_5, train = import_module("05_full_model"), import_module("train")
Config, TransformerXL, CONFIGS = lesson_5.Config, lesson_5.TransformerXL, lesson_5.CONFIGS

FULL = Config(vocab_size=29, n_layer=2, d_model=16, n_head=3, d_head=4, d_inner=11, mem_len=6)
BANDS = replace(FULL, cutoffs=(5, 11, 19))
CASES = {
    "full softmax": FULL,
    "full, u and v for each layer": replace(FULL, untie_r=True),
    "div_val 1": BANDS,
    "div_val 1, for each layer, same_length, clamp": replace(
        BANDS, untie_r=True, same_length=True, clamp_len=4, mem_len=5),
    "div_val 4, two bands": replace(BANDS, div_val=4, cutoffs=(7,)),
    "div_val 2, tails tied": replace(BANDS, div_val=2),
    "div_val 2, none tied": replace(BANDS, div_val=2, tie_projections=False),
    "div_val 2, tied, for each layer, clamp": replace(BANDS, div_val=2, untie_r=True, clamp_len=3),
    "div_val 2, untied, same_length": replace(
        BANDS, div_val=2, tie_projections=False, same_length=True, mem_len=3),
    "div_val 4, three bands": replace(BANDS, div_val=4, cutoffs=(5, 11)),
    "div_val 4, three bands, untied, no memory": replace(
        BANDS, div_val=4, cutoffs=(5, 11), tie_projections=False, untie_r=True, mem_len=0),
}
SHAPE = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "vocab_size", "cutoffs", "div_val")


# ---- helpers ------------------------------------------------------------------------------------

def arrays(config, port, seed=0):
    """A random state in the official layout, as the oracle makes it: NumPy arrays, float64."""
    tied = [i > 0 and config.tie_projections for i in range(len(config.cutoffs) + 1)]
    return oracle.random_state(np.random.default_rng(seed), untie_r=config.untie_r, port=port,
                               tie_projections=tuple(tied) if config.div_val > 1 else (),
                               **{key: getattr(config, key) for key in SHAPE})


def tensors(state):
    return {name: torch.from_numpy(np.array(z)) for name, z in state.items()}


def loaded(config, state):
    return official.load_official_weights(TransformerXL(config).double(), tensors(state)).eval()


def segments_of(config, words, seed=1):
    """Three segments of unequal length, two lanes, words drawn from `words`."""
    draw = np.random.default_rng(seed)
    return [tuple(draw.choice(words, size=(2, T)) for _ in range(2)) for T in (4, 3, 5)]


def refusal(config, state):
    """The message with which the weights are refused, after which the model is as it was."""
    torch.manual_seed(0)
    model = TransformerXL(config).double()
    before = {name: z.clone() for name, z in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        official.load_official_weights(model, state)
    assert all(z.equal(before[name]) for name, z in model.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the same losses ----------------------------------------------------------------------------

@pytest.mark.parametrize("port", [False, True], ids=["official", "port"])
@pytest.mark.parametrize("case", CASES)
def test_agreement(case, port):
    """Three segments with memory; targets in every band, then in the first and the last alone."""
    config = CASES[case]
    state = arrays(config, port)
    model, worst = loaded(config, state), 0.0
    edges = (0, *config.cutoffs, config.vocab_size)
    for words in (range(29), range(edges[0], edges[1]), range(edges[-2], edges[-1])):
        pieces = segments_of(config, list(words))
        wanted = oracle.losses(
            state, pieces, n_layer=2, n_head=3, d_head=4, cutoffs=config.cutoffs,
            div_val=config.div_val, mem_len=config.mem_len, clamp_len=config.clamp_len,
            same_length=config.same_length, port=port)
        memory = None
        with torch.no_grad():
            for (x, y), losses in zip(pieces, wanted):
                found, memory = model(torch.tensor(x), memory, torch.tensor(y))
                worst = max(worst, np.abs(found.numpy() - losses).max())
                assert np.ptp(losses) > 0.5, "losses that hardly differ would hide a mistake"
    print(f"  {case:48} {'port' if port else 'official':8}  {worst:.1e} nats")
    assert worst < 1e-5


def test_the_order_of_the_tails_is_told_by_the_names():
    """The same tensors with the other names mean tails in the opposite order."""
    config = CASES["div_val 2, none tied"]
    state = arrays(config, port=False)
    renamed = {name if name.startswith("crit.") else f"transformer.{name}": z
               for name, z in state.items()}
    one, other = loaded(config, state).embedding, loaded(config, renamed).embedding
    assert one.tail_rows.flip(0).equal(other.tail_rows)
    assert one.tail_bias.flip(0).equal(other.tail_bias)
    assert not one.tail_rows.equal(other.tail_rows)


# ---- there and back -----------------------------------------------------------------------------

@pytest.mark.parametrize("port", [False, True], ids=["official", "port"])
@pytest.mark.parametrize("case", CASES)
def test_the_round_trip_is_exact(case, port):
    """Theirs -> ours -> theirs gives the same names and numbers, and ours -> theirs -> ours too."""
    config, state = CASES[case], arrays(CASES[case], port)
    model = loaded(config, state)
    back = layout.official_state(model, port)
    assert back.keys() == state.keys()
    for name, z in state.items():
        assert back[name].shape == z.shape
        if "inv_freq" in name:
            assert np.allclose(back[name].numpy(), z)
        else:
            assert np.array_equal(back[name].numpy(), z), name
    copy = official.load_official_weights(TransformerXL(config).double(), back)
    assert all(a.equal(b) for a, b in zip(model.parameters(), copy.parameters()))


def test_float16_weights_are_taken():
    """The port's files may be half precision; the model's dtype stays."""
    config = CASES["full softmax"]
    half = {name: z.half() for name, z in tensors(arrays(config, True)).items()}
    model = official.load_official_weights(TransformerXL(config), half)
    assert model.u.dtype == torch.float32
    assert model.embedding.bias.equal(half["crit.out_layers.0.bias"].float())


def test_the_port_may_list_shared_u_and_v_under_every_layer():
    """It registers them there as well; they must be the same."""
    config = CASES["full softmax"]
    state = tensors(arrays(config, True))
    for n in range(2):
        for bias in ("r_w_bias", "r_r_bias"):
            state[f"transformer.layers.{n}.dec_attn.{bias}"] = state[f"transformer.{bias}"].clone()
    official.load_official_weights(TransformerXL(config).double(), state)
    state["transformer.layers.1.dec_attn.r_w_bias"] += 1
    assert "layers.1.dec_attn.r_w_bias is not equal" in refusal(config, state)


def test_the_layout_needs_no_lesson():
    """support/ is handed what it needs; without a table of names a refusal says the sizes."""
    tree = ast.parse(Path(layout.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
                 for alias in node.names}
    assert imported == {"dataclasses", "itertools", "torch", "torch.nn"}
    small = CONFIGS["tiny"]
    state = layout.official_state(TransformerXL(small))
    with pytest.raises(ValueError, match="They look like vocab_size 205, n_layer 2, d_model 32"):
        layout.load_official_weights(TransformerXL(FULL), state)
    with pytest.raises(ValueError, match="They look like tiny$"):
        official.load_official_weights(TransformerXL(FULL), state)


# ---- strict -------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", ["div_val 1", "div_val 2, tails tied", "full softmax"])
@pytest.mark.parametrize("port", [False, True], ids=["official", "port"])
def test_every_missing_or_misshapen_tensor_is_named(case, port):
    """One at a time: left out, with a row too many, flat."""
    config = CASES[case]
    state = tensors(arrays(config, port))
    for name, z in state.items():
        if name.endswith(("r_w_bias", "layers.0.pos_ff.CoreNet.0.weight")):
            continue  # the sizes are read from these: the next test
        others = {k: v for k, v in state.items() if k != name}
        assert f"{name} is missing" in refusal(config, others)
        if "inv_freq" not in name:
            message = refusal(config, state | {name: torch.cat([z, z[:1]])})
            assert f"{name} is {(len(z) + 1, *z.shape[1:])}, not {tuple(z.shape)}" in message
    assert "crit.extra is too much" in refusal(config, state | {"crit.extra": torch.zeros(2)})


def test_tied_weights_that_differ_are_refused():
    """A model whose output has rows of its own is not this one."""
    config = CASES["div_val 2, tails tied"]
    state = tensors(arrays(config, False))
    state["crit.out_layers.1.weight"] = state["crit.out_layers.1.weight"] + 1
    assert "crit.out_layers.1.weight is not equal to word_emb" in refusal(config, state)


def test_projections_that_the_file_does_not_tie_become_two():
    """Any band may be tied or not: the model follows the file, and says so in its config."""
    config = CASES["div_val 2, tails tied"]
    state = arrays(config, False)
    state["crit.out_projs.2"] = state["crit.out_projs.2"] + 0.3
    model = loaded(config, state)
    pairs = zip(model.embedding.project_in, model.embedding.project_out)
    assert [a is b for a, b in pairs] == [False, True, False, True]
    assert not model.config.tie_projections
    x, y = segments_of(config, list(range(29)))[0]
    wanted, = oracle.losses(state, [(x, y)], 2, 3, 4, config.cutoffs, 2, mem_len=6)
    found = model(torch.tensor(x), None, torch.tensor(y))[0].detach().numpy()
    assert np.abs(found - wanted).max() < 1e-10
    back = layout.official_state(model)
    assert np.array_equal(back["crit.out_projs.2"].numpy(), state["crit.out_projs.2"])


def test_other_frequencies_are_refused():
    """R is not learned; a file with another sinusoid belongs to another model."""
    state = tensors(arrays(FULL, False))
    state["pos_emb.inv_freq"] = state["pos_emb.inv_freq"] * 1.01
    assert "other frequencies" in refusal(FULL, state)


def test_weights_of_another_configuration_are_recognised():
    """By their shapes, without reading a number: on the meta device."""
    def shapes(name, **changes):
        with torch.device("meta"):
            model = TransformerXL(replace(CONFIGS[name], **changes))
        return {k: torch.empty([sum(len(z) for z in parts), *parts[0].shape[1:]], device="meta")
                for k, parts in layout.places(model, True).items()}

    for name in CONFIGS:
        assert layout.looks_like(shapes(name), CONFIGS) == name
    assert layout.looks_like(shapes("wt103-large", untie_r=True), CONFIGS) == "wt103-large"
    other = replace(CONFIGS["wt103-large"], cutoffs=(20_000, 40_000, 100_000))
    with torch.device("meta"):
        model = TransformerXL(other)
    found = {k: torch.empty([sum(len(z) for z in parts), *parts[0].shape[1:]], device="meta")
             for k, parts in layout.places(model, False).items()}
    assert "cutoffs (20000, 40000, 100000)" in layout.looks_like(found, CONFIGS)
    assert "d_model 16" in layout.looks_like(tensors(arrays(FULL, False)), CONFIGS)
    small = tensors(arrays(replace(FULL, untie_r=True), False))
    message = refusal(FULL, small)
    assert "r_w_bias is missing" in message and "untie_r=True" in message
    with pytest.raises(ValueError, match="no weights of the official"):
        layout.looks_like({"weight": torch.zeros(2)}, CONFIGS)


# ---- the command --------------------------------------------------------------------------------

@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A text, and a configuration `small` that fits it, known to both tables."""
    text = tmp_path / "notes.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat; " * 20)
    V = len(set(text.read_text()))
    monkeypatch.setitem(CONFIGS, "small", replace(FULL, vocab_size=V))
    monkeypatch.setitem(train.RUNS_OF, "small", replace(
        train.RUNS_OF["tiny"], dataset=str(text), eval_mem_len=20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return text


def test_a_file_is_evaluated_beside_the_published_figure(tiny, tmp_path, capsys):
    """Its configuration is told by its shapes; the figure is that of the model in memory."""
    state = tensors(arrays(CONFIGS["small"], False))
    torch.save(state, tmp_path / "model.bin")
    assert official.main([str(tmp_path / "model.bin")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    model = official.load_official_weights(TransformerXL(CONFIGS["small"]), state).eval()
    corpus = train.corpora.load(str(tiny))
    value = train.evaluate(model, corpus.test, train.RUNS_OF["small"])
    assert line.startswith(f"test {train.log.in_unit(value, 'bpc'):.4f} bpc")
    assert line.endswith("published: nothing")


def test_a_run_is_written_in_the_official_layout(tiny, tmp_path, capsys):
    """--to, and the file evaluates to what the run's own test line says."""
    out = tmp_path / "run"
    flags = ["--model", "small", "--text", str(tiny), "--out", str(out), "--steps", "3", "--device",
             "cpu", "--dtype", "float32"]
    assert train.main(flags) == 0
    wanted = capsys.readouterr().out.splitlines()[-1].split(" (")[0]
    target = tmp_path / "theirs.bin"
    assert official.main(["--to", str(target), "--run", str(out)]) == 0
    assert f"{target}: " in capsys.readouterr().out
    assert official.main([str(target), "--model", "small"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(wanted)


@pytest.mark.parametrize("content, words", [
    (None, "cannot be read"), (b"not a checkpoint", "no state dict"), ([1, 2], "no state dict"),
    ({"a": 3}, "no state dict"),
    ({0: torch.zeros(2)}, "no state dict"), ({"a": torch.zeros(2)}, "no weights of the official"),
    ("other sizes", "none of the known sizes"), ("other vocabulary", "another vocabulary")])
def test_bad_files_are_one_sentence(content, words, tiny, tmp_path, capsys):
    """No traceback, status 1, and the reason."""
    path = tmp_path / "model.bin"
    if content == "other sizes":
        content = tensors(arrays(FULL, False))
    elif content == "other vocabulary":
        content = tensors(arrays(CONFIGS["small"], False))
        tiny.write_text(tiny.read_text().replace("cat", "CAT"))
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert official.main([str(path)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and words in error[0] and error[0].startswith("official_weights.py: ")


@pytest.mark.parametrize("flags", [[], ["a.bin", "--to", "b.bin"], ["--to", "b.bin"]])
def test_flags_that_do_not_fit_together_are_refused(flags, capsys):
    """One or the other."""
    assert official.main(flags) == 1
    assert "name either" in capsys.readouterr().err
