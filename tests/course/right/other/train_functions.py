"""SPOILERS.  Right solutions of train.py in an unusual form: other names, another order."""
import math

import torch


def train_step(model, optimizer, x, y, memory, run):
    for parameter in model.parameters():
        parameter.grad = None
    with autocast(run, x.device.type):
        losses, new = model(x, memory, y)
        loss = losses.sum() / y.numel()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip))
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
        memory = new
    return float(loss), norm, memory


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    lane, memory, total, count = lesson_1.lanes(tokens.to(model.u.device), 1), None, 0.0, -skip
    with evaluating(model, run):
        for x, y in lesson_1.segments(lane, run.eval_segment):
            with autocast(run, model.u.device.type):
                losses, memory = model(x, memory, y)
            count += y.numel()  # of those that count, or below 0
            new = losses[0, -count:] if count < y.numel() else losses[0]
            total += new.double().sum().item() if count > 0 else 0.0
    return total / count
