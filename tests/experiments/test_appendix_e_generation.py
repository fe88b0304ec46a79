"""Names that recur, by hand, and what each token is sampled from."""
import doctest
import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from helpers import randomized
from training import presets

generation, lesson_5 = import_module("appendix_e_generation"), import_module("05_full_model")
RECIPE = presets.Recipe(segment=5, steps=1, dtype="bf16", eval_mem_len=9, eval_clamp_len=7)
CONFIG = lesson_5.Config(23, n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=4)


def test_the_whole_measure():
    """A text repeats names of its own prompt, or by chance those that only the other one has."""
    assert doctest.testmod(generation, raise_on_error=True).attempted
    prompts = ["- anna bert both -", "- carl dora both -"]  # ages 12, 7 and 2
    texts = [" bert dora", " anna both"]  # bert; by chance dora; both; by chance anna
    own, others = generation.measure(prompts, texts, {"nobody"}, 7)
    assert own == [2 / 6, 1 / 2, 1 / 4]
    assert others[::2] == [2 / 4, 2 / 4] and math.isnan(others[1])


@pytest.mark.parametrize("memory, P", [(True, 8), (False, 8), (False, 3)])
def test_each_token_is_sampled_after_what_its_kind_may_read(memory, P):
    """A model with memory reads the whole text once with evaluation lengths; one without reads the
    last T tokens with training lengths.  Neither uses the bf16 of the run."""
    model, prompt = randomized(lesson_5.TransformerXL(CONFIG)).eval(), torch.randint(23, (9, P))
    for weight in (model.u, model.v, *(layer.attention.W_q.weight for layer in model.layers)):
        weight.data *= 0.05  # all keys count alike, so each token that is read changes the logits
    given = SimpleNamespace(n_tokens=25, device="cpu", seeds=[5, 4])
    kind = "with memory" if memory else "without memory"
    new = generation.sample(model, prompt, RECIPE, given)[kind][1]
    text, draws = torch.cat([prompt, new], dim=1), torch.Generator().manual_seed(4)
    if memory:
        model.config = replace(CONFIG, mem_len=9, clamp_len=7, same_length=True)
    for t in range(P, P + 25):
        logits = model(text[:, 0 if memory else max(0, t - 5) : t])[0][:, -1].detach()
        token = lesson_5.sample_top_k(logits, 23, 1.0, draws)
        assert token.equal(text[:, t : t + 1]), f"token {t}"


def test_prompts_and_true_continuations_are_of_test(run_folder, tmp_path):
    """They are written with the samples."""
    text = (run_folder.parent / "notes.txt").read_text()
    n = len(text) // 20  # of the test split; its two prompts begin at its first and middle token
    assert generation.main(["--checkpoint", str(run_folder), "--prompts", "2", "--n-tokens", "9",
                            "--length", "30", "--seeds", "3", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "samples.txt").read_text()
    for i, a in enumerate((len(text) - n, len(text) - n + n // 2)):
        assert (f"prompt {i + 1}, true continuation 1\n{text[a : a + 30]}>>>"
                f"{text[a + 30 : a + 39]}\n") in written
