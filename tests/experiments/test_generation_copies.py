"""Generation on the text of which all is known: what repeats is counted, and the lines are there.

    pytest tests/experiments/test_generation_copies.py
"""
from importlib import import_module

import pytest
import torch

experiment = import_module("generation_copies")
copies, study = experiment.copies, experiment.study


def test_the_true_text_repeats_as_often_as_it_says():
    """KEPT, and one in eight of the rest; a random text one in eight."""
    true = copies.text(40_000, 1).view(8, -1).long()
    right = copies.KEPT + (1 - copies.KEPT) / copies.EACH
    assert experiment.repeated(true, 200) == pytest.approx([right] * 4, abs=0.03)
    kinds = torch.arange(5000) % 4 * copies.EACH
    noise = torch.randint(copies.EACH, (8, 5000)) + kinds
    assert experiment.repeated(noise, 200) == pytest.approx([1 / 8] * 4, abs=0.02)


def test_only_new_tokens_count_each_at_its_distance():
    """Columns 100 to 107: two of each kind; of the second kind one of two repeats 48 before."""
    tokens = torch.arange(108)[None].clone()  # nothing repeats
    tokens[0, 101] = tokens[0, 101 - 48]
    tokens[0, 102] = tokens[0, 102 - 48]  # not the third kind's distance
    tokens[0, [103, 107]] = tokens[0, [7, 11]]  # 96 before
    tokens[0, 97] = tokens[0, 49]  # of the prompt
    assert experiment.repeated(tokens, 100) == [0.0, 0.5, 0.0, 1.0]


def test_each_token_is_of_the_kind_whose_turn_it_is():
    """After a prompt read once, or from the last T; the memory and the window give what one pass
    over as much text gives, so the most probable symbol of the kind.
    """
    config = experiment.lesson_5.Config(32, n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8,
                                        mem_len=40, same_length=True)
    model = experiment.lesson_5.TransformerXL(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=2.0)  # so sharp that the best symbol is drawn always
    prompt = copies.text(48, 1).view(2, 24).long()
    lengths = []
    model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    for T, read in ((0, [24] + [1] * 8), (12, [12] * 9)):
        lengths.clear()
        tokens = experiment.continued(model, prompt, 9, 3, T)
        assert lengths == read
        assert tokens[:, :24].equal(prompt) and tokens.shape == (2, 33)
        assert (tokens[:, 24:] // copies.EACH).equal((torch.arange(9) % 4).expand(2, -1))
        for t in range(24, 33):
            with torch.no_grad():
                logits, _ = model(tokens[:, max(0, t - T) if T else 0 : t], last_only=True)
            best = logits[:, 0].unflatten(-1, (4, 8))[:, t % 4].softmax(-1).max(-1)
            for row in range(2):
                if best.values[row] > 0.999:
                    assert tokens[row, t] == t % 4 * 8 + best.indices[row], (T, t, row)
