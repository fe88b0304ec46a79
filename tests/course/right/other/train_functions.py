"""SPOILERS.  Right solutions of train.py in an unusual form: other names, another order."""
import math

import torch


def train_step(model, optimizer, x, y, memory, run):
    for parameter in model.parameters():
        parameter.grad = None
    loss, new = torch.zeros((), device=x.device), None
    for lanes in micro_batches(len(x), run.micro_batch):
        with ranks.no_sync(model, lanes.stop >= len(x)):
            with machine.autocast(run, x.device.type):
                losses, part = model(x[lanes], memory and [z[lanes] for z in memory], y[lanes])
                share = losses.sum() / y.numel()
            share.backward()
        loss = loss + share.detach()
        new = part if new is None else [torch.cat(pair) for pair in zip(new, part)]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip))
    loss = ranks.mean(float(loss))
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
        memory = new
    return loss, norm, memory


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    lane, memory, total, count = lesson_1.lanes(tokens.to(model.u.device), 1), None, 0.0, -skip
    with evaluating(model, run):
        for x, y in lesson_1.segments(lane, run.eval_segment):
            with machine.autocast(run, model.u.device.type):
                losses, memory = model(x, memory, y)
            count += y.numel()  # of those that count, or below 0
            new = losses[0, -count:] if count < y.numel() else losses[0]
            total += new.double().sum().item() if count > 0 else 0.0
    return total / count
