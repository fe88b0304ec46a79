"""Write lesson 5's model as one file that imports torch alone, from the lessons' own text.

    python -m training.one_file > xl.py

The file has the model, its memory and its generation.  It leaves out the adaptive softmax, which
only large vocabularies need, and the checks of what is passed.
"""
import inspect
import re
from importlib import import_module

lesson_1, lesson_2, lesson_4, lesson_5 = map(import_module, (
    "01_vanilla_segments", "02_recurrence", "04_rel_shift", "05_full_model"))
PARTS = (
    lesson_1.sinusoid, lesson_1.token_losses, lesson_2.update_memory, lesson_4.rel_shift,
    lesson_4.relative_score, lesson_5.Config, lesson_5.attention_mask, lesson_5.distance_encoding,
    lesson_5.initialize, lesson_5.RelativeAttention, lesson_5.Layer, lesson_5.TiedEmbedding,
    lesson_5.TransformerXL, lesson_5.sample_top_k, lesson_5.generate)
HEAD = '''"""Transformer-XL (Dai et al., ACL 2019) in one file, written by training/one_file.py.

    model = TransformerXL(Config(vocab_size=256))
    losses, memory = model(x, memory, y)        x, y (B, T) int64; memory starts as None
    tokens = generate(model.eval(), prompt, n_tokens=100)

Letters: B lanes, T segment length, M memory length (m so far), K = m + T keys, N layers, D model
width, H heads of width C, V vocabulary.  The adaptive softmax for large vocabularies is left out.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


'''
CHANGES = {  # regular expressions: what the checks and the adaptive softmax need goes
    r"lesson_\d\.": "",
    r"  Raises ValueError.*": "",
    r"\n    def __post_init__.*\n.*\n": "",
    r" +validate\..*\n": "",
    r"    # three for large.*\n    cutoffs.*\n    div_val.*\n    tie_projections.*\n": "",
    r"\(AdaptiveSoftmax if .* else TiedEmbedding\)": "TiedEmbedding",
    r"float32_at_least\(self\.logits\(h\)\)": "self.logits(h).float()"}


def one_file():
    """Return the text of the file.  ValueError if a lesson no longer has what is changed."""
    text = "\n\n".join(map(inspect.getsource, PARTS))
    for pattern, new in CHANGES.items():
        text, count = re.subn(pattern, new, text)
        if not count:
            raise ValueError(f"the lessons have no {pattern}: adapt CHANGES in one_file.py")
    return HEAD + text


if __name__ == "__main__":
    print(one_file(), end="")
