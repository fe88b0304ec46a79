"""The authors' weights evaluated in our model, and a run of ours written in their layout.

    python experiments/official_weights.py model.bin            evaluate a file of such weights
    python experiments/official_weights.py --to out.bin --run runs/enwik8-enwik8-12L    write ours

support/official_weights.py says which of their tensors is which of ours, and what differs.
"""
import argparse
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
import train
from support import checkpoint, fast, official_weights
from support.folder import ROOT
from support.official_weights import description, looks_like, official_state

lesson_5 = import_module("05_full_model")
CONFIGS, TransformerXL = lesson_5.CONFIGS, lesson_5.TransformerXL
# load_official_weights(model, state) -> model; a refusal names the size that would fit
load_official_weights = partial(official_weights.load_official_weights, configs=CONFIGS)
PAPER = {"enwik8-12L": "1.06 bpc", "enwik8-24L": "0.99 bpc", "text8-24L": "1.08 bpc",
         "wt103-standard": "24.0 ppl", "wt103-large": "18.3 ppl", "lm1b-large": "21.8 ppl"}


def read(path):
    """A file of weights -> {name: tensor}, without running any code in it.  ValueError if not."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except Exception:  # cut off, no such file format, or a pickled model, which would run code
        raise ValueError(f"{path} is no state dict; from a whole pickled model, save its "
                         "state_dict() with the code that it belongs to") from None
    if not isinstance(state, dict) or not all(
            isinstance(name, str) and torch.is_tensor(z) for name, z in state.items()):
        raise ValueError(f"{path} holds no state dict (names and tensors)")
    return state


def evaluate(path, given):
    """Evaluate official weights on the test split of their data set: one line."""
    state = read(path)
    name = given.model or looks_like(state, CONFIGS)
    if given.model and name not in CONFIGS:
        raise ValueError(f"unknown model {name!r}, known are {', '.join(CONFIGS)}")
    if name not in CONFIGS:
        raise ValueError(f"{path} has none of the known sizes ({name}); name one with --model: "
                         f"{', '.join(CONFIGS)}")
    config = replace(CONFIGS[name], untie_r=description(state)["untie_r"])
    model = load_official_weights(TransformerXL(config), state).eval()
    run = train.RUNS_OF[name]
    run = replace(run, dataset=given.dataset or run.dataset)
    run = replace(run, drop_newlines=run.dataset == "enwik8" and config.vocab_size == 204)
    corpus = train.read_corpus({"data_dir": given.data_dir}, run)
    if len(corpus.vocab) != config.vocab_size:
        raise ValueError(f"{path} has {config.vocab_size:,} words, {corpus.name} has "
                         f"{len(corpus.vocab):,}: other data, or another vocabulary")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line = train.test_line(fast.Reader(model.to(device)), corpus, run)
    print(f"{line}; published: {PAPER.get(name, 'nothing')}")


def main(argv=None):
    """Evaluate a file of official weights, or write ours in their layout."""
    parser = argparse.ArgumentParser(description="The authors' weights in our model, and back.")
    parser.add_argument("file", nargs="?", help="a state dict in the official layout")
    parser.add_argument("--model", help="its configuration (default: told by its shapes)")
    parser.add_argument("--dataset", help="evaluate on this one (default: the model's own)")
    parser.add_argument("--data-dir", default=str(ROOT / "data"))
    parser.add_argument("--to", help="write the weights of the run in --run to this file")
    parser.add_argument("--run", help="the folder of that run, with its checkpoint")
    parser.add_argument("--port", action="store_true", help="with the names of the port")
    given = parser.parse_args(argv)
    try:
        if bool(given.file) == bool(given.to) or bool(given.to) != bool(given.run):
            raise ValueError("name either a file to evaluate, or --to FILE and --run FOLDER")
        if given.file:
            evaluate(given.file, given)
        else:
            content = checkpoint.best(Path(given.run))
            model, *_ = train.restored(content, "cpu")
            state = official_state(model, given.port)
            checkpoint.save(Path(given.to), state)
            print(f"{given.to}: {len(state)} tensors of {content.path}")
    except (ValueError, OSError) as error:
        print(f"official_weights.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
