"""Every size of a model that has a name: lesson 5's three, and those of the paper's tables.

"tiny", "laptop" and "laptop-words" are ours; the others are those of the authors' scripts.  For
enwik8-18L, ptb and lm1b-medium the paper gives only the number of parameters: these sizes are ours.
wt103-large has 285M, where the paper says 257M.  V is that of the published parameter counts
(enwik8: without newlines); train.py puts its corpus's own there.
"""
from dataclasses import replace
from importlib import import_module

import torch

lesson_5 = import_module("05_full_model")

WT103_CUTOFFS = (20_000, 40_000, 200_000)
LM1B_CUTOFFS = (60_000, 100_000, 640_000)

CONFIGS = lesson_5.CONFIGS | {
    "laptop-words": lesson_5.Config(
        vocab_size=10_000, n_layer=4, d_model=128, n_head=2, d_head=64, d_inner=512, mem_len=64,
        dropout=0.1, cutoffs=(2000,)),
    "enwik8-18L": lesson_5.Config(
        vocab_size=204, n_layer=18, d_model=640, n_head=10, d_head=64, d_inner=2208, mem_len=512,
        dropout=0.1),
    "enwik8-24L": lesson_5.Config(
        vocab_size=204, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072, mem_len=768,
        dropout=0.15, dropout_attention=0.15),
    "text8-12L": lesson_5.Config(
        vocab_size=27, n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=512,
        dropout=0.1),
    "text8-24L": lesson_5.Config(
        vocab_size=27, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072, mem_len=768,
        dropout=0.15, dropout_attention=0.15),
    "ptb": lesson_5.Config(
        vocab_size=10_000, n_layer=16, d_model=380, n_head=10, d_head=38, d_inner=704, mem_len=70,
        dropout=0.2, dropout_attention=0.2),
    "wt103-standard": lesson_5.Config(
        vocab_size=267_735, n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100,
        mem_len=150, dropout=0.1, cutoffs=WT103_CUTOFFS),
    "wt103-large": lesson_5.Config(
        vocab_size=267_735, n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096,
        mem_len=384, dropout=0.2, dropout_attention=0.2, cutoffs=WT103_CUTOFFS, div_val=4),
    "lm1b-base": lesson_5.Config(
        vocab_size=793_471, n_layer=18, d_model=1024, n_head=8, d_head=128, d_inner=4096,
        mem_len=32, cutoffs=LM1B_CUTOFFS, div_val=4, tie_projections=False),
    "lm1b-medium": lesson_5.Config(
        vocab_size=793_471, n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=4608,
        mem_len=32, cutoffs=LM1B_CUTOFFS, div_val=4, tie_projections=False),
    "lm1b-large": lesson_5.Config(
        vocab_size=793_471, n_layer=24, d_model=1280, n_head=16, d_head=80, d_inner=8192,
        mem_len=32, dropout=0.05, dropout_attention=0.05, cutoffs=LM1B_CUTOFFS, div_val=4,
        tie_projections=False),
}


def count_parameters(config):
    """The exact number of parameters, without making any (torch's meta device)."""
    with torch.device("meta"):  # all layers are alike, so two are enough
        models = [lesson_5.TransformerXL(replace(config, n_layer=n)) for n in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    return one + (config.n_layer - 1) * (two - one)
