"""The lab: train a row of variants.py with a seed, measure everything, append to results.tsv.

    python -m experiments.lab --dtype bf16                    every row that is missing, three seeds
    python -m experiments.lab --rows ours ours-none --seeds 3 4
    python -m experiments.lab --rows pretrained               the model in pretrained/
    python -m experiments.lab --scale words                   Penn Treebank
    python -m experiments.lab --scale paper --dtype bf16      WikiText-103; GPUs
    python -m experiments.report --write                      the pages, from results.tsv

A model is trained (train.fit, saved every minute; the same command resumes it) and measured, and
its numbers are appended in one write; it is trained again only if RECL lacks its contexts.  Seeds
differ in their initial weights and in where they begin to read the text (seed 0: at its start).
RECL compares the models of a group with one seed, so it is added once all are measured.
"""
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

__package__ or sys.exit("run python -m experiments.lab in the project's folder")

import torch

import train
from experiments import measures
from experiments.variants import ROWS, SCALES, make, optimizer_of, recipe_of, text_of
from support import corpora
from training import checkpoint, log, machine
from training.command import Parser, exit_status
from training.flags import PRETRAINED
from training.job import Job, load_model
from training.presets import Recipe
from training.reader import Reader
from training.text import read_corpus

lesson_1 = import_module("01_vanilla_segments")
RESULT_COLUMNS = ("row", "seed", "steps", "dtype", "measure", "length", "value", "commit",
                  "machine", "torch", "minutes")
GROUPS = {"recl": ("ours", "ours-none", "rope", "alibi"), "second recl": ("ours", "lstm")}


def read_results(path):
    """Return the lines of a table of results as dicts of text; none if it is missing."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return [dict(zip(RESULT_COLUMNS, line.split("\t"))) for line in lines]


def append(path, fixed, found):
    """Append numbers, {(measure, length): value}, in one write; fixed: the columns they share."""
    lines = [] if path.exists() else ["\t".join(RESULT_COLUMNS)]
    for (measure, length), value in found.items():
        line = fixed | {"measure": measure, "length": length, "value": f"{value:.7g}"}
        lines.append("\t".join(str(line[column]) for column in RESULT_COLUMNS))
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def train_row(name, seed, scale, corpus, flags):
    """Train the model of a row with a seed, or resume it -> its Job, finished."""
    row, path = ROWS[name], flags.out / f"{name}-{seed}"
    recipe, corpus = recipe_of(row, scale, seed, flags.dtype), text_of(row, corpus, seed)
    with checkpoint.locked(path):
        saved = checkpoint.find(path, resume=any(path.glob("*.pt")))
        torch.manual_seed(seed)
        model = make(row, scale, recipe.segment, len(corpus.vocab)).to(flags.device)
        optimizer = optimizer_of(row, model, recipe)
        job = Job(path, name, model, recipe, corpus, optimizer)
        job.identity["machine"] = machine.name(flags.device)  # threads also change the last digits
        if saved:
            other = [key for key, value in job.identity.items() if saved.get(key) != value]
            if other:
                raise ValueError(f"{path} was trained with other settings ({', '.join(other)}); "
                                 "name another folder with --out")
            job.restore(saved)
        if train.fit(job):
            print(f"{path} is saved; the same command resumes it", file=sys.stderr)
            raise KeyboardInterrupt
    job.model.eval()
    return job


def measure_row(job, row, scale):
    """Return {(measure, length): value} of a row's model; what RECL needs is kept in its folder."""
    model, T = job.model, job.recipe.segment
    corpus = replace(job.corpus, **{split: getattr(job.corpus, split).to(job.device)
                                    for split in ("valid", "test")})
    found = {("parameters", ""): sum(W.numel() for W in model.parameters() if W.requires_grad)}
    if row.averaged:
        for W, mean in zip(model.parameters(), model.average.module):
            W.data.copy_(mean)
    reader = Reader(model) if row.has_reader else model
    if scale.dataset == "ptb":
        return found | measures.losses_of_splits(reader, scale.lengths, corpus, job.recipe)
    n = scale.recipe.segment // 2
    found["copying", n] = measures.copying_score(reader, n, job.device)
    found |= measures.losses_by_length(reader, row, scale, corpus)
    if row.encoding == "ours":
        found |= measures.attention(model, corpus, 2 * T, scale.n // 4)
    if any(job.name in group for group in GROUPS.values()):
        by_length = {L: found[key, L] for key, L in found if key == "valid memory" and L}
        L = min(by_length, key=by_length.get, default=T)  # T: trained without, or an LSTM
        losses = measures.context_losses(reader, scale, corpus, L)
        torch.save(losses, job.path / "contexts.pt")
    return found


def measure_pretrained(scale, flags):
    """Return the columns of the model in pretrained/, and its measures."""
    saved = checkpoint.to_evaluate(PRETRAINED)
    model, recipe = load_model(saved, "cpu"), Recipe(**saved["recipe"])
    corpus = read_corpus(recipe, flags.data_dir, saved, is_evaluated=True)
    found = (measures.losses_by_length(Reader(model), ROWS["ours"], scale, corpus)
             | measures.attention(model, corpus, 2 * recipe.segment, each_head=True)
             | measures.memory_by_layer(model, corpus, recipe.segment)
             | measures.stopped_gradient(model, corpus, recipe.segment))
    return {"row": "pretrained", "seed": recipe.seed, "steps": saved["state"]["step"],
            "dtype": recipe.dtype, "minutes": f"{saved['state']['seconds'] / 60:.1f}"}, found


def parse(argv):
    """Return the flags.  ValueError for impossible ones."""
    parser = Parser(prog="python -m experiments.lab", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, "pretrained"),
                        help="default: the scale's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: the scale's; small: 4300")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32",
                        help="of matrix products in training; measures are in float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="")
    parser.add_argument("--data-dir", default=lesson_1.RUNS.parent / "data", metavar="FOLDER")
    parser.add_argument("--out", type=Path, help="where models and results.tsv are kept (default: "
                        "runs/lab-SCALE; results.tsv of small and words: experiments/)")
    flags = parser.parse_args(argv)
    flags.device = machine.choose(flags.device)
    flags.rows = flags.rows or SCALES[flags.scale].rows
    is_default = flags.scale in ("small", "words") and not flags.out
    flags.out = flags.out or lesson_1.RUNS / f"lab-{flags.scale}"
    flags.results = (Path(__file__).parent if is_default else flags.out) / "results.tsv"
    flags.out.mkdir(parents=True, exist_ok=True)
    return flags


def run(argv=None):
    """Train, measure and append what is missing."""
    flags = parse(argv)
    scale = SCALES[flags.scale]
    scale = replace(scale, recipe=replace(scale.recipe, steps=flags.steps or scale.recipe.steps))
    corpus = corpora.load(scale.dataset, root=flags.data_dir)
    setting = {"steps": str(scale.recipe.steps), "dtype": flags.dtype,
               "machine": machine.name(flags.device)}
    shared = setting | {"commit": log.commit(), "torch": torch.__version__}

    def is_there(**key):
        return any(key.items() <= line.items() for line in read_results(flags.results))

    if "pretrained" in flags.rows and not is_there(row="pretrained"):
        own, found = measure_pretrained(scale, flags)
        append(flags.results, shared | own, found)
    for seed in map(str, flags.seeds):
        contexts = {name: flags.out / f"{name}-{seed}/contexts.pt" for name in ROWS}
        for name in (name for name in flags.rows if name in ROWS):
            own = setting | {"row": name, "seed": seed}
            is_needed = any(name in group and not is_there(**own, measure=measure)
                            for measure, group in GROUPS.items())  # for RECL, on this machine
            if not is_there(**own) or is_needed and not contexts[name].exists():
                job = train_row(name, int(seed), scale, corpus, flags)
                minutes = f"{job.state.seconds / 60:.1f}"
                print(f"{name}, seed {seed}: trained {job.state.step:,} steps in {minutes} "
                      "minutes; measuring", flush=True)
                found = measure_row(job, ROWS[name], scale)
                if not is_there(**own):
                    append(flags.results, shared | own | {"minutes": minutes}, found)
        for measure, group in GROUPS.items():
            paths = [contexts[name] for name in group]
            if (all(path.exists() for path in paths)
                    and not is_there(**setting, row=group[0], seed=seed, measure=measure)):
                losses = torch.stack([torch.load(path, weights_only=True) for path in paths])
                lengths = {r: measures.recl(losses, scale.contexts, r) for r in (0.1, 0.5, 1.0)}
                for i, name in enumerate(group):
                    append(flags.results, shared | {"row": name, "seed": seed, "minutes": "0"},
                           {(measure, r): lengths[r][i] for r in lengths})


main = partial(exit_status, "lab.py", run)

if __name__ == "__main__":
    sys.exit(main())
