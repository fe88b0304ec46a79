"""A tool: the authors' weights in our model, evaluated; and ours written in their layout.

    python experiments/official_weights.py model.bin
    python experiments/official_weights.py --to out.bin --run runs/enwik8-enwik8-12L

The layout, and what cannot be shown without the released files: training/official_weights.py.
"""
import sys
from dataclasses import replace
from pathlib import Path

import common
from common import (
    Flags, checkpoint, fast, lesson_5, machine, presets, read_corpus, restored, train)
from training.official_weights import (
    description, load_official_weights, looks_like, official_state, read)

NAME = "official_weights"
PAPER = {"enwik8-12L": "1.06 bpc", "enwik8-24L": "0.99 bpc", "text8-24L": "1.08 bpc",
         "wt103-standard": "24.0 ppl", "wt103-large": "18.3 ppl", "lm1b-large": "21.8 ppl"}


def evaluate(given):
    """Evaluate official weights on the test split of their data set: one line."""
    state, configs = read(given.file), presets.CONFIGS
    name = given.model or looks_like(state)
    if name not in configs:
        raise ValueError(f"{given.file} has none of the known sizes ({name}); name one with "
                         f"--model: {', '.join(configs)}")
    config = replace(configs[name], untie_r=description(state)["untie_r"])
    model = load_official_weights(lesson_5.TransformerXL(config), state).eval()
    dataset = given.dataset or presets.RUNS[name].dataset
    run = replace(presets.RUNS[name], dataset=dataset,
                  drop_newlines=dataset == "enwik8" and config.vocab_size == 204)
    corpus = read_corpus(Flags(data_dir=given.data_dir), run)
    if len(corpus.vocab) != config.vocab_size:
        raise ValueError(f"{given.file} has {config.vocab_size:,} words, {corpus.name} has "
                         f"{len(corpus.vocab):,}: other data, or another vocabulary")
    line = train.test_line(fast.prepared(model.to(machine.choose())), corpus, run)
    print(f"{line}; published: {PAPER.get(name, 'nothing')}")


@common.command
def main(argv):
    """Evaluate a file of official weights, or write ours in their layout."""
    flags = common.new_parser(NAME, __doc__, "--data-dir")
    flags.add_argument("file", nargs="?", help="a state dict in the official layout")
    flags.add_argument("--model", choices=presets.CONFIGS, metavar="NAME",
                       help="its configuration (default: told by its shapes)")
    flags.add_argument("--dataset", help="evaluate on this one (default: the model's own)")
    flags.add_argument("--to", type=Path, help="write the weights of the run in --run to this file")
    flags.add_argument("--run", type=Path, help="the folder of that run, with its checkpoint")
    flags.add_argument("--port", action="store_true", help="with the names of the port")
    given = flags.parse_args(argv)
    if bool(given.file) == bool(given.to) or bool(given.to) != bool(given.run):
        raise ValueError("name either a file to evaluate, or --to FILE and --run FOLDER")
    if given.file:
        evaluate(given)
    else:
        content = checkpoint.best(given.run)
        model, *_ = restored(content, "cpu")
        state = official_state(model, given.port)
        checkpoint.save(given.to, state)
        print(f"{given.to}: {len(state)} tensors of {content.path}")


if __name__ == "__main__":
    sys.exit(main())
