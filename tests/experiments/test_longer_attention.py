"""longer_attention: the losses of each file, and the interval of their differences."""
from importlib import import_module

import torch

from helpers import assert_close, randomized

longer, common = import_module("longer_attention"), import_module("common")
corpora = import_module("support.corpora")


def test_the_parts_are_the_files_of_the_split():
    """All predictions but that of the very first byte; of another text 100 equal parts."""
    corpus = corpora.load("stdlib")
    sizes = longer.part_sizes(corpus, common.presets.Recipe(steps=1))
    text = corpora.as_bytes(corpus.test, corpus.vocab)
    assert 1 + sum(sizes) == len(text)
    files, start = corpora.standard_library()[2], 0
    for file, size in zip(files, [1 + sizes[0], *sizes[1:]], strict=True):
        assert text[start : start + size] == file
        start += size
    sizes = longer.part_sizes(corpus, common.presets.Recipe("notes", steps=1))
    assert len(sizes) == 100 and sum(sizes) == len(text) - 1 and max(sizes) - min(sizes) <= 1


def test_the_sums_are_those_of_one_stream():
    """Of lesson 5's losses with a memory of L - 1, clamped where that is asked."""
    config = common.replace(common.lesson_5.CONFIGS["tiny"], vocab_size=9)
    model = randomized(common.lesson_5.TransformerXL(config)).eval()
    tokens = torch.randint(9, (71,), generator=torch.Generator().manual_seed(0))
    for clamp in (0, 3):
        sums = longer.sums_by_part(model, tokens, [20, 50], 5, clamp)
        model.config = common.replace(config, mem_len=4, same_length=True, clamp_len=clamp)
        losses = model(tokens[None, :-1], None, tokens[None, 1:])[0][0].detach()
        assert_close(sums, torch.stack([losses[:20].sum(), losses[20:].sum()]), f"clamp {clamp}")


def test_the_interval_is_over_files_not_tokens():
    """Equal files leave nothing open; one long file that decides the sign leaves it open."""
    zeros = torch.zeros(20).double()
    assert longer.difference(zeros + 5, zeros, [10] * 20) == "0.5000 (0.5000 to 0.5000)"
    gaps, sizes = torch.tensor([-90.0] + [1.0] * 19).double(), [900] + [10] * 19
    found = longer.difference(gaps, zeros, sizes)  # the mean is -71 / 1090
    assert found.startswith("-0.0651 (-0.0") and found.endswith(" to 0.1000)")
