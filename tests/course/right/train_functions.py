"""SPOILERS.  Right solutions of train.py in an unusual form: one weight, one loss at a time."""
import math


def train_step(model, optimizer, x, y, memory, recipe):
    optimizer.zero_grad(set_to_none=False)
    size, mean, new = recipe.micro_batch or len(x), 0.0, []
    for b in range(0, len(x), size):
        past = None if memory is None else [layer[b : b + size] for layer in memory]
        with ranks.no_sync(model, b + size >= len(x)):
            with machine.autocast(recipe, x.device.type):
                losses, part = model(x[b : b + size], past, y[b : b + size])
            (losses / y.numel()).sum().backward()
        mean += losses.sum().item() / y.numel()
        new.append(part)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    mean, norm = ranks.mean(mean), math.sqrt(sum(g.pow(2).sum().item() for g in grads))
    if not (math.isfinite(mean) and math.isfinite(norm)):
        return mean, norm, memory
    for g in grads:
        g *= min(1.0, recipe.clip / (norm + 1e-6))
    optimizer.step()
    return mean, norm, [torch.cat([part[n] for part in new]) for n in range(len(new[0]))]


def evaluate(model, tokens, recipe, label="evaluating"):
    device, memory, counted = model.u.device.type, None, []
    autocast_now = machine.autocast(recipe, device)
    with torch.no_grad(), evaluating(model, recipe):
        lane = lesson_1.lanes(tokens.to(model.u.device), 1)
        for x, y in lesson_1.segments(lane, recipe.eval_segment):
            with autocast_now:
                losses, memory = model(x, memory=memory, y=y)
            counted += losses[0].tolist()
    return math.fsum(counted) / len(counted)
