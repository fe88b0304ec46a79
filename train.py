"""Train, evaluate, resume and sample a Transformer-XL: lesson 5's model on real text.

    python train.py                        the built-in corpus, five minutes
    python train.py --text notes.txt       the same on any file
    python train.py --dataset enwik8       the paper's 12 layers on a GPU
    python train.py --model wt103-large --dry-run      what a run will take
    python train.py --resume               go on where the run was stopped, to the bit
    python train.py --sample "def main("   let the trained model continue a text
    python train.py --help                 everything else, with its defaults
    torchrun --nproc-per-node=2 train.py --dataset enwik8     the same on two GPUs

A run lives in one folder (--out): checkpoint.pt and the one before it, previous.pt,
best.pt (best validation loss), metrics.tsv and curve.png.  Losses are in nats inside,
and shown as bits per byte (called bpc, as in the papers) or perplexity per word (ppl).

Words of this file: `flags` is a dict of the flags that were typed, and nothing else;
`state` is where a run stands (checkpoint.State: steps, tokens and seconds so far, the
place in the text, the memory, the best validation loss); `saved` is what a checkpoint
holds: weights, optimizer, random numbers, settings, state; it is None for a new run.  A
rank is one of the processes of a run, one for each GPU.
"""
import math
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # waiting threads soon go to sleep

import torch

from support import corpora, validate
from training import checkpoint, estimate, fast, log, machine, ranks
from training import flags as command_line
from training.run import Folder, folder_of, read_corpus
from training.optimizers import optimizer_of
from support.progress import progress
from training import presets

lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")


# ---- settings: every field is a flag, and its comment the help ----------------------

@dataclass(frozen=True)
class Run:
    """Data and training.  Lengths are in tokens."""

    dataset: str = "stdlib"  # stdlib copies enwik8 text8 wt103 wikitext-2 ptb lm1b
    batch: int = 16  # lanes B
    segment: int = 128  # segment length T
    steps: int = 0  # length of the run in steps (or --tokens, or --minutes)
    lr: float = 3e-3  # highest learning rate
    warmup: int = 100  # steps until it is reached
    eval_segment: int = 512  # least T of evaluation; a longer one gives equal losses
    eval_mem_len: int = 512  # memory length M of evaluation
    eval_clamp_len: int = 0  # the largest distance told apart there; 0: no clamp
    optimizer: str = "adam"  # adam; muon: also Muon, for the matrices of the layers
    muon_lr: float = 0.02  # highest learning rate of Muon; lr is Adam's
    schedule: str = "cosine"  # how the rates fall to 0: cosine, or sqrt, steep at first
    eval_every: int = 1000  # steps between validations
    eval_tokens: int = 100_000  # validation tokens during training; 0: all
    log_every: int = 50  # steps between lines of metrics.tsv
    tokens: int = 0  # length of the run in tokens, in place of steps
    minutes: float = 0.0  # length of the run in minutes of training, in place of steps
    text: str = ""  # train on this file instead of a dataset, as bytes, cut 90/5/5
    drop_newlines: bool = False  # enwik8 as the authors count it: V = 204
    micro_batch: int = 0  # lanes at a time, gradients accumulated; 0: all
    clip: float = 0.25  # largest norm of the gradient
    save_minutes: float = 10.0  # minutes of training between two checkpoints, at most
    seed: int = 0  # seed of weights, dropout and samples
    dtype: str = "auto"  # dtype of matrix products: auto (measured), float32 or bf16
    plain: bool = False  # the model as lesson 5 has it, without training/fast.py

    def __post_init__(self):
        validate.run(self)


# The official schedules: Adam, cosine to 0, clip 0.25.  None is published for 18 layers
# and for lm1b-medium, none for ptb (its regularisers: experiments/table5_ptb.py).
RUNS_OF = {name: Run(*values, eval_every=4000, log_every=200,
                     eval_tokens=500_000 if values[0] in ("enwik8", "text8") else 0)
           for name, values in {
    #                  dataset   B    T    steps      lr      warm-up  test: T, M, clamp
    "enwik8-12L":     ("enwik8", 22,  512, 400_000,   2.5e-4, 0,       80,  2100, 820),
    "enwik8-18L":     ("enwik8", 22,  512, 400_000,   2.5e-4, 4000,    80,  2100, 820),
    "enwik8-24L":     ("enwik8", 64,  768, 400_000,   2.5e-4, 4000,    128, 3800, 1000),
    "text8-12L":      ("text8",  22,  512, 400_000,   2.5e-4, 0,       80,  2100, 820),
    "text8-24L":      ("text8",  64,  768, 400_000,   2.5e-4, 4000,    128, 3800, 1000),
    "wt103-standard": ("wt103",  60,  150, 200_000,   2.5e-4, 0,       64,  640,  400),
    "wt103-large":    ("wt103",  128, 384, 4_000_000, 2.5e-4, 16_000,  128, 1600, 1000),
    "lm1b-base":      ("lm1b",   224, 32,  500_000,   2.5e-4, 20_000,  32,  128,  0),
    "lm1b-medium":    ("lm1b",   224, 32,  500_000,   2.5e-4, 20_000,  32,  128,  0),
    "lm1b-large":     ("lm1b",   512, 32,  1_200_000, 1e-4,   30_000,  32,  128,  0),
}.items()}
RUNS_OF |= {
    "tiny": Run(batch=4, segment=16, steps=200, eval_segment=16, eval_mem_len=32,
                eval_every=100),
    # Muon (training/optimizers.py) learns more in minutes; the paper's runs have Adam
    "laptop": Run(minutes=4.2, lr=0.012, optimizer="muon", schedule="sqrt", warmup=20,
                  clip=1.0),
    "laptop-words": Run("ptb", batch=32, segment=64, minutes=10, lr=3e-3, warmup=50,
                        eval_segment=64, eval_mem_len=128, optimizer="muon",
                        schedule="sqrt", eval_every=500, eval_tokens=20_000),
    "ptb": Run("ptb", batch=10, segment=70, steps=166_000, lr=3e-4, warmup=3000,
               eval_segment=70, eval_mem_len=280, eval_every=1328, eval_tokens=0,
               log_every=100)}
# what --dataset trains: with a GPU, without one
MODELS_OF = {
    "stdlib": ("laptop", "laptop"), "enwik8": ("enwik8-12L", "laptop"),
    "text8": ("text8-12L", "laptop"), "wt103": ("wt103-standard", "laptop-words"),
    "lm1b": ("lm1b-base", "laptop-words"), "ptb": ("ptb", "laptop-words"),
    "wikitext-2": ("ptb", "laptop-words"), "copies": ("laptop", "laptop")}


def settings(flags, device):
    """Flags -> name of the model, Config and Run."""
    return command_line.settings(flags, device, presets.CONFIGS, RUNS_OF, MODELS_OF)


# ---- learning rate, one step --------------------------------------------------------

def fraction_done(run, state):
    """How much of the run is done, 0 to 1, by whichever length it was given."""
    if run.minutes:
        return min(1.0, state.seconds / (60 * run.minutes))
    if run.tokens:
        return min(1.0, state.tokens / run.tokens)
    return min(1.0, state.step / run.steps)


def learning_rate(run, step, done):
    """The smaller of a linear warm-up and a fall from lr to 0 over the whole run."""
    sqrt = run.schedule == "sqrt"  # else the paper's cosine
    fall = 1 - math.sqrt(done) if sqrt else (1 + math.cos(math.pi * done)) / 2
    return run.lr * min((step + 1) / max(1, run.warmup), fall)


def autocast(run, device):
    """With dtype bf16, matrix products in 16 bits; weights, norms, loss in float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=run.dtype == "bf16")


def train_step(model, optimizer, x, y, memory, run):
    """One update from x, y (B, T) and the memory of the B lanes.

    Returns the mean loss (nats), the gradient norm before clipping, and the new memory.
    If loss or norm is not finite nothing is updated and the old memory comes back: one
    such number would poison every weight.  (In `train` the model is wrapped in a
    ranks.Learner, which reads the lanes in micro-batches and makes all backward
    passes but the last itself: so zero_grad comes before the call.)
    """
    optimizer.zero_grad()
    with autocast(run, x.device.type):
        losses, new_memory = model(x, memory, y)  # (B, T)
    loss = losses.mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    loss, norm = loss.item(), norm.item()
    if not math.isfinite(loss + norm):
        return loss, norm, memory
    optimizer.step()
    return loss, norm, new_memory


# ---- evaluation ---------------------------------------------------------------------

@contextmanager
def evaluating(model, run):
    """In the block: eval mode, the run's lengths of evaluation, same_length."""
    training, config = model.training, model.config
    try:
        model.eval()
        model.config = replace(config, mem_len=run.eval_mem_len, same_length=True,
                               clamp_len=run.eval_clamp_len)
        yield
    finally:  # whatever happens, Ctrl-C included, the model trains on as it did
        model.config = config
        model.train(training)


def reading_length(run):
    """The T that `evaluate` reads with: same_length lets no loss depend on the cut, and
    a longer segment is fewer calls and larger products.  Beyond M a plain model scores
    ever more pairs that the mask hides; 512 bounds the room that its scores take.
    """
    return max(run.eval_segment, min(run.eval_mem_len, 512))


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    """Mean loss in nats over the n - 1 predictions of n tokens, each counted once.

    One lane, read in order with run.eval_mem_len tokens of memory and same_length; the
    first token is context only.  The first `skip` predictions are made for the memory
    of the others and not counted.  `model` may be a Reader (training/fast.py).
    """
    device, T = model.u.device, reading_length(run)
    stream, memory = lesson_1.lanes(tokens.to(device), 1), None
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = math.ceil((len(tokens) - 1) / T)
    with evaluating(model, run), autocast(run, device.type):  # one cast of the weights
        read = progress(lesson_1.segments(stream, T), label, parts)
        for i, (x, y) in enumerate(read):
            loss, memory = model(x, memory, y)  # (1, T)
            total += loss[:, max(0, skip - i * T) :].double().sum()
    return total.item() / (len(tokens) - 1 - skip)


def test_line(model, corpus, run):
    """Evaluate the whole test split: the one line that a run is quoted by."""
    nats = ranks.evaluate_in_parts(evaluate, model, corpus.test, run, "testing")
    return log.test_line(nats, corpus, run)


# ---- the training loop --------------------------------------------------------------

def reader_of(model, run):
    """A fast.Reader of the model, to evaluate and sample.  `prepare` changes the model
    in place, so that it trains faster, too.  With --plain: the model itself, unchanged.
    """
    return model if run.plain else fast.Reader(fast.prepare(model))


def training_lanes(corpus, run, epoch, device):
    """The lanes of one pass over the text: in order, or sentences in a new order."""
    if corpus.separator is None:  # one text, in order; lm1b has a separator
        return lesson_1.lanes(corpus.train, run.batch).to(device)
    return corpora.SentenceLanes(
        corpus.train, run.batch, corpus.separator, run.seed, epoch)


def next_stream(job):
    """The lanes to go on with at the end of the text: the same, or in a new order."""
    if job.corpus.separator is None:
        return job.stream
    job.stream = None  # makes room
    return training_lanes(job.corpus, job.run, job.state.epoch, job.model.u.device)


def next_segment(stream, run, state, device):
    """x, y (B, T) where the run stands, of this rank's lanes."""
    mine = ranks.my_lanes(run.batch)
    x, y = next(lesson_1.segments(stream, run.segment, state.column))
    return x[mine].to(device), y[mine].to(device)


def begin(flags, device, folder):
    """A new run, or the one in the folder: all that `train` works with."""
    # 1. what is trained, on what
    name, config, run, state, saved = folder.resume(flags, *settings(flags, device))
    ranks.my_lanes(run.batch)  # refuses a batch that cannot be dealt out
    corpus = read_corpus(flags, run, saved)
    command_line.check_sampling(flags, len(corpus.vocab))
    # 2. the model, with new weights from the seed or those of the checkpoint
    config = command_line.for_vocabulary(config, len(corpus.vocab), flags)
    torch.manual_seed(run.seed)
    estimate.check_weights_fit(presets.count_parameters(config))
    machine.tune(device)
    model = checkpoint.make_model(
        lesson_5.TransformerXL, presets.count_parameters, config, saved)
    reader = reader_of(model.to(device), run)
    optimizer = optimizer_of(model, run)
    # 3. the place in the text, and what else the checkpoint holds
    stream = training_lanes(corpus, run, state.epoch, device)
    checkpoint.check_place(saved, state, stream)
    x, y = next_segment(stream, run, state, device)  # a sample: the place stays
    if saved:  # the optimizer's moments, the random numbers, the memory
        checkpoint.restore(saved, optimizer, state, config, run, device)
    folder.own(new=saved is None)  # locked: no other process writes to it
    part = slice(run.micro_batch or len(x))  # what goes through the model at a time
    if not saved:
        log.say_what_a_gpu_trains(flags, device, MODELS_OF, RUNS_OF)
        ranks.draw_differently(run.seed)  # to each rank its own dropout
        dtype = machine.choose_dtype(train_step, model, run, x[part], y[part])
        run = replace(run, dtype=ranks.first(dtype))
    # 4. what stands around the model in a step: ranks, compiler, micro-batches
    learner = ranks.parallel(model, x, y)
    if "compile" in flags:
        learner = machine.compiled(learner, autocast(run, device), x[part], y[part])
    job = SimpleNamespace(
        name=name, config=config, run=run, corpus=corpus, state=state, stream=stream,
        model=model, reader=reader, optimizer=optimizer,
        learner=ranks.Learner(learner, run.micro_batch))
    folder.open(job, saved)  # metrics.tsv, begun or gone on with
    return job


def validation_tokens(corpus, run):
    """What a validation reads: run.eval_tokens predictions, or, if that is 0, all."""
    return corpus.valid[: run.eval_tokens + 1] if run.eval_tokens else corpus.valid


def validate_and_save(job, folder, stop):
    """Validate every eval_every steps and at the end.  Save after each validation, and
    at least every save_minutes.
    """
    run, state = job.run, job.state
    due = state.step % run.eval_every == 0 or fraction_done(run, state) == 1
    if due and state.evaluated < state.step:  # not twice at one step, when resumed
        valid, loss = validation_tokens(job.corpus, run), None
        if stop.asked():
            return
        with stop.at_once():  # a signal ends this block, and need not wait for it
            loss = ranks.evaluate_in_parts(
                evaluate, job.reader, valid, run, "validating")
        if loss is None:  # a signal has ended it; --resume will begin with it
            return
        folder.metrics.validation(state, loss)
        state.evaluated = state.step
        if loss < state.best:  # never if it is not a number
            state.best = loss
            folder.save_best(job.model, state)
        folder.save(job.model, job.optimizer, state)
    elif state.seconds - folder.saved > 60 * run.save_minutes:
        folder.save(job.model, job.optimizer, state)


def train(flags, device):
    """Train from the start or from a checkpoint, then test, sample and draw."""
    with Folder(folder_of(flags, *settings(flags, device))) as folder:
        job = begin(flags, device, folder)
        run, state = job.run, job.state
        with checkpoint.Stop() as stop:  # Ctrl-C, SIGTERM: finish the step, then stop
            validate_and_save(job, folder, stop)  # if it was stopped in a validation
            while not stop.asked() and (done := fraction_done(run, state)) < 1:
                start = time.perf_counter()
                rate = learning_rate(run, state.step, done)
                job.optimizer.set_rate(rate)
                x, y = next_segment(job.stream, run, state, device)
                # out of memory: the error will say how many lanes would fit
                with estimate.what_would_fit(job.config, job.model, run):
                    loss, norm, state.memory = train_step(
                        job.learner, job.optimizer, x, y, state.memory, run)
                state.count(x, loss, norm, time.perf_counter() - start)
                if state.column == job.stream.shape[1] - 1:
                    state.begin_text_again()
                    job.stream = next_stream(job)
                folder.metrics.training(state, run, rate, loss, norm,
                                        fraction_done(run, state))
                state.stop_if_never_finite()
                validate_and_save(job, folder, stop)
            if stop.asked():
                folder.save(job.model, job.optimizer, state)
                print(f"\nstopped after step {state.step:,}, saved; go on with\n"
                      f"  python train.py --resume --out {folder.path}")
                return 128 + stop.number
        report(job, folder.path, flags)
    return 0


# ---- using a trained model ----------------------------------------------------------

def restored(saved, device):
    """A checkpoint's saved -> its model in eval mode, Run and State."""
    config, run, state = checkpoint.unpack(saved, lesson_5.Config, Run)
    model = checkpoint.make_model(
        lesson_5.TransformerXL, presets.count_parameters, config, saved)
    return model.to(device).eval(), run, state


def continue_text(model, prompt, run, flags):
    """Sample after a prompt (P,) with the memory of evaluation -> new tokens (n,).

    The model is in eval mode meanwhile; afterwards its mode is what it was.  ValueError
    if the logits are not finite, or if what is asked for cannot be drawn.
    """
    options = command_line.sampling(flags, run, model)
    prompt = prompt[None].to(model.u.device)  # (1, P)
    with evaluating(model, run), machine.finite_logits():
        return lesson_5.generate(model, prompt, **options)[0].cpu()


def report(job, out, flags):
    """The end of a run: curve, sample, what to try next, and the test figure."""
    model, corpus = job.model, job.corpus
    if (out / "best.pt").exists():  # not if no validation loss was finite
        model, _, _ = restored(checkpoint.best(out), model.u.device)
    reader = reader_of(model.eval(), job.run)
    if ranks.RANK == 0:
        log.draw(out / "metrics.tsv", corpus)
        prompt = corpus.test[:200].long()
        sample = continue_text(reader, prompt, job.run, {"n_tokens": 300} | flags)
        log.report(out, job.run, corpus, prompt, sample)
    print(test_line(reader, corpus, job.run))


def use(flags, device):
    """--eval-only and --sample: what a checkpoint can do without being trained."""
    out = folder_of(flags, *settings(flags, device))
    saved = checkpoint.best(out)
    model, run, state = restored(saved, device)
    run = replace(run, **command_line.other_lengths(flags, saved))
    reader = reader_of(model, run)
    print(f"{saved.path}: step {state.step:,}")
    if "sample" in flags:
        prompt = corpora.encode(flags["sample"], saved["vocab"])
        new = continue_text(reader, prompt, run, flags)
        print(corpora.decode(torch.cat([prompt, new]), saved["vocab"]))
    if "eval_only" in flags:
        print(test_line(reader, read_corpus(flags, run, saved), run))
    return 0


def command(argv):
    """Do what the command line says -> exit status."""
    flags = command_line.parse(argv, __doc__, {
        Run: RUNS_OF, lesson_5.Config: presets.CONFIGS})
    device = machine.device(flags)
    if "dry_run" in flags:  # says what the run will take, and reads no data
        return estimate.report(*settings(flags, device), presets.count_parameters,
                               device, flags.get("tokens_per_second"))
    ranks.join(device)
    using = flags.keys() & {"eval_only", "sample"}
    status = use(flags, device) if using else train(flags, device)
    ranks.leave()
    return status


def main(argv=None):
    """Exit status: 0, 1 after one line for a mistake, 128 + n after signal n."""
    return command_line.exit_status("train.py", command, argv)


if __name__ == "__main__":
    ranks.end(main())
