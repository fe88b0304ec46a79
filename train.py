"""Train, evaluate, resume and sample a Transformer-XL: lesson 5's model on real text.

    python train.py                        the built-in corpus, five minutes
    python train.py --text notes.txt       the same on any file
    python train.py --dataset enwik8       the paper's 12 layers on a GPU
    python train.py --model wt103-large --dry-run      the resources that a run needs
    python train.py --resume               continue a run that was stopped
    python train.py --init RUN --text FILE     a new run from the weights of another one
    python train.py --sample "def main("   let the trained model continue a text
    python train.py --help                 everything else, with its defaults
    torchrun --nproc-per-node=2 train.py --dataset enwik8     the same on two GPUs

A run has one folder (--out) with checkpoint.pt, previous.pt (the checkpoint before it),
best.pt (lowest validation loss), metrics.tsv and curve.png.  Losses are in nats in the
code, and printed as bits per byte (bpc, as in the papers) or perplexity per word (ppl).

`recipe` holds the settings of data and training, `config` the model's sizes (both in
training/presets.py).  A Job is one run (training/job.py).  A rank is one of several
processes that train one model, one per GPU.  A Reader evaluates the model faster.
"""
import math
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

from support import corpora
from support.progress import progress

import torch

from training import checkpoint, estimate, log, machine, ranks
from training.command import exit_status
from training.flags import adapt_to_vocabulary, choose_folder, choose_model
from training.flags import find_folder, parse, restore_settings
from training.job import Job, load_model
from training.optimizers import set_rate
from training.reader import reader_of
from training.signals import Stop
from training.text import in_vocabulary, read_corpus

lesson_1 = import_module("01_vanilla_segments")
lesson_5 = import_module("05_full_model")


# ---- learning rate, one step --------------------------------------------------------

def fraction_done(recipe, state):
    """Return the fraction of the run that is done, 0 to 1, in minutes or steps."""
    if recipe.minutes:
        return min(1.0, state.seconds / (60 * recipe.minutes))
    return min(1.0, state.step / recipe.steps)


def learning_rate(recipe, step, done):
    """Return the smaller of a linear warm-up and a decay from lr to 0 over the run."""
    if recipe.schedule == "sqrt":
        decay = 1 - math.sqrt(done)
    else:  # the paper's cosine
        decay = (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * min((step + 1) / max(1, recipe.warmup), decay)


def micro_batches(B, size):
    """Split B lanes into slices of at most `size`, in order; 0: all at once.

    >>> micro_batches(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = size or B
    return [slice(first, min(first + size, B)) for first in range(0, B, size)]


def train_step(model, optimizer, x, y, memory, recipe):
    """Update the model once, from x, y (B, T) and the memory of the B lanes.

    The model reads recipe.micro_batch lanes at a time.  Gradients accumulate, so the
    update uses all lanes, but only one micro-batch's activations are in memory.

    Return the mean loss over all tokens (nats), the gradient norm before clipping, and
    the new memory.  If the norm is not finite, update nothing (one such number would
    corrupt every weight) and return the old memory.
    """
    optimizer.zero_grad()
    loss = 0.0
    new_memory = []  # of each micro-batch
    for lanes in micro_batches(len(x), recipe.micro_batch):
        past = None if memory is None else [h[lanes] for h in memory]  # of each layer
        with machine.autocast(recipe, x.device.type):  # bf16 products
            losses, part_memory = model(x[lanes], past, y[lanes])
        part = losses.sum() / y.numel()  # its share of the mean over all lanes
        part.backward()
        loss += part.detach()
        new_memory.append(part_memory)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    loss, norm = torch.stack([loss, norm]).tolist()  # waits for a GPU only once
    if not math.isfinite(norm):
        return loss, norm, memory
    optimizer.step()
    # concatenate the lanes of each layer, dimension 0 of (lanes, m, D)
    return loss, norm, [torch.cat(h) for h in zip(*new_memory)]


# ---- evaluation ---------------------------------------------------------------------

@contextmanager
def evaluating(model, recipe=None, **lengths):
    """Put the model in eval mode within the block, with a recipe's or other lengths."""
    training = model.training
    config = model.config
    lengths = lengths or {"mem_len": recipe.eval_mem_len, "same_length": True,
                          "clamp_len": recipe.eval_clamp_len}
    try:
        model.eval()
        model.config = replace(config, **lengths)
        yield
    finally:  # even after an exception, restore the training settings
        model.config = config
        model.train(training)


def evaluation_segment_length(recipe):
    """Return the segment length of `evaluate`: at least recipe.eval_segment.

    With same_length no loss depends on it.  Longer segments need fewer calls, but
    beyond M more scores are masked, and beyond 512 they need a lot of memory.
    """
    return max(recipe.eval_segment, min(recipe.eval_mem_len, 512))


@torch.no_grad()
def evaluate(model, tokens, recipe, label="evaluating"):
    """Return the mean loss in nats over the n - 1 predictions of n tokens.

    The tokens are one lane, read in order with recipe.eval_mem_len tokens of memory and
    same_length.  `model` may be a Reader, which is faster (training/reader.py).
    """
    device = model.u.device
    T = evaluation_segment_length(recipe)
    stream = lesson_1.lanes(tokens.to(device), 1)
    memory = None
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = math.ceil((len(tokens) - 1) / T)
    with evaluating(model, recipe), machine.autocast(recipe, device.type):
        for x, y in progress(lesson_1.segments(stream, T), label, parts):
            loss, memory = model(x, memory, y)  # (1, T)
            total += loss.double().sum()
    return total.item() / (len(tokens) - 1)


def score_line(model, corpus, recipe):
    """Evaluate the whole test split -> the line that reports it."""
    nats = ranks.on_rank_0(evaluate, model, corpus.test, recipe, "testing")
    return log.score_line(nats, corpus, recipe, evaluation_segment_length(recipe))


def is_validation_due(recipe, state):
    """Return True every eval_every steps (0: every tenth of the run) and at the end."""
    done = fraction_done(recipe, state)
    if state.validated_at == state.step:  # not twice at one step, nor at step 0
        return False
    if recipe.eval_every == 0:
        return int(10 * done) > state.tenths_validated
    return state.step % recipe.eval_every == 0 or done == 1


def validate_and_save(job, stop):
    """Save and validate if that is due; otherwise save every save_minutes."""
    recipe, state = job.recipe, job.state
    if job.reader is not None and is_validation_due(recipe, state):
        job.save()  # nothing is lost if the run is killed while validating
        count = recipe.eval_tokens or len(job.corpus.valid)  # predictions
        tokens = job.corpus.valid[: count + 1]
        with torch.compiler.set_stance("force_eager"):  # as written
            loss = ranks.on_rank_0(evaluate, job.reader, tokens, recipe, "validating")
        log.record_validation(job, loss)
        state.validated_at = state.step
        state.tenths_validated = int(10 * fraction_done(recipe, state))
        if loss < state.lowest:  # False if the loss is NaN
            state.lowest = loss
            job.save_best()
        stop.agree()  # on a signal that came meanwhile
    elif state.seconds - job.saved_at > 60 * recipe.save_minutes:
        job.save()


# ---- the training loop --------------------------------------------------------------

def fit(job):
    """Train until the recipe's end or a signal -> the signal's number, otherwise 0."""
    recipe, state = job.recipe, job.state
    # the same model; with several ranks, backward() averages its gradients over them
    wrapped = ranks.parallel(job.model, *job.segment(0), recipe.micro_batch)
    with log.open_metrics(job) as job.metrics, Stop() as stop:  # Ctrl-C: after a step
        while True:
            validate_and_save(job, stop)
            done = fraction_done(recipe, state)
            if stop.number or done == 1:
                job.save()
                return stop.number
            start = time.perf_counter()
            rate = learning_rate(recipe, state.step, done)
            set_rate(job.optimizer, rate)
            x, y = job.next_segment()  # (B, T)
            loss, norm, state.memory = train_step(
                wrapped, job.optimizer, x, y, state.memory, recipe)
            loss = ranks.mean(loss)
            seconds = ranks.largest(time.perf_counter() - start)  # of the slowest rank
            stop.agree()  # all ranks stop after the same step
            seconds = job.without_pause(seconds)  # if suspended
            state.record_step(x, loss, norm, seconds)
            log.record_training(job, rate, loss, norm, fraction_done(recipe, state))


def make_job(flags, device, chosen, path):
    """Build the Job of a new run, or resume a checkpoint."""
    if saved := checkpoint.find(path, flags.resume):
        name, config, recipe = restore_settings(flags, saved)
        corpus = read_corpus(recipe, flags.data_dir, saved)
    else:
        name, config, recipe = chosen
        corpus = read_corpus(recipe, flags.data_dir)
        corpus = in_vocabulary(corpus, flags.start, recipe)
        config = adapt_to_vocabulary(config, len(corpus.vocab), flags)
        recipe = ranks.on_rank_0(machine.choose_dtype, recipe, config, device)
    torch.manual_seed(recipe.seed)
    model = lesson_5.TransformerXL(config).to(device)
    if flags.start:
        model.load_state_dict(flags.start["model"])
    job = Job(path, name, model, recipe, corpus, reader=reader_of(model, recipe.plain))
    if flags.compile:
        machine.compile_layers(model)
    if saved:
        job.restore(saved)
    return job


def train(flags, device):
    """Train or resume a run, then test, sample and plot -> exit status."""
    chosen = choose_model(flags, device)
    name, _, recipe = chosen
    path = choose_folder(flags, name, recipe)
    with checkpoint.locked(path):  # until the end no other run uses it
        job = make_job(flags, device, chosen, path)
        if number := fit(job):
            print(f"\nstopped after step {job.state.step:,}, saved; continue with\n"
                  f"  python train.py --resume --out {log.quote(str(path))}")
            return 128 + number
        finish(job, flags)
    return 0


# ---- using a trained model ----------------------------------------------------------

def sample(model, prompt, recipe, flags):
    """Continue a prompt (P,), with the evaluation memory -> the new tokens (n,)."""
    device = model.u.device
    generator = torch.Generator(device).manual_seed(recipe.seed)
    with evaluating(model, recipe):
        new = lesson_5.generate(
            model, prompt[None].to(device), flags.n_tokens, flags.top_k,
            flags.temperature, generator)  # (1, n)
    return new[0].cpu()


def finish(job, flags):
    """Finish a run: plot the curve, print a sample, next commands, the test score."""
    corpus, recipe = job.corpus, job.recipe
    model = load_model(checkpoint.to_evaluate(job.path), job.device)
    reader = reader_of(model, recipe.plain)
    if ranks.RANK == 0:
        log.draw(job.path / "metrics.tsv", corpus)
        prompt = corpus.test[:200].long()
        new = sample(reader, prompt, recipe, flags)
        log.print_next_steps(job, prompt, new)
    print(score_line(reader, corpus, recipe))


def evaluate_or_sample(flags, device):
    """Run --eval-only and --sample: use a checkpoint, train nothing."""
    saved = checkpoint.to_evaluate(find_folder(flags, device))
    _, _, recipe = restore_settings(flags, saved)
    reader = reader_of(load_model(saved, device), recipe.plain)
    print(f"{saved['path']}: step {saved['state']['step']:,}")
    if flags.sample is not None:
        prompt = corpora.encode(flags.sample, saved["vocab"])
        tokens = torch.cat([prompt, sample(reader, prompt, recipe, flags)])
        print(corpora.decode(tokens, saved["vocab"]))
    if flags.eval_only:
        corpus = read_corpus(recipe, flags.data_dir, saved, is_evaluated=True)
        recipe = machine.choose_dtype(recipe, reader.config, device)
        print(score_line(reader, corpus, recipe))
    return 0


def run_command(argv):
    """Run the command line -> exit status."""
    flags = parse(argv, __doc__)
    device = machine.choose(flags.device, flags.compile)
    if flags.dry_run:
        return estimate.dry_run(flags, device)
    ranks.join(device)  # from here on only rank 0 prints
    using = flags.eval_only or flags.sample is not None
    return evaluate_or_sample(flags, device) if using else train(flags, device)


def main(argv=None):
    """Return the exit status: 0; 1 after an error message; 128 + n for signal n."""
    return exit_status("train.py", run_command, argv)


if __name__ == "__main__":
    ranks.end(main())
