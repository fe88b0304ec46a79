"""SPOILERS.  Right solutions of train.py in an unusual form: the optimizer's weights, all losses
gathered and cut at the end."""
import torch


def train_step(model, optimizer, x, y, memory, run):
    optimizer.zero_grad()
    cut = micro_batches(len(x), run.micro_batch)
    all_losses, after = [], []
    for i, lanes in enumerate(cut, 1):
        with ranks.no_sync(model, last=i == len(cut)):
            with machine.autocast(run, x.device.type):
                losses, new = model(x[lanes], [z[lanes] for z in memory] if memory else None,
                                    y[lanes])
            torch.sum(losses).div(y.numel()).backward()
        all_losses.append(losses.detach())
        after.append(new)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(weights, run.clip).item()
    loss = ranks.mean(torch.cat(all_losses).mean().item())
    if good := math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
    return loss, norm, [torch.cat(z) for z in zip(*after)] if good else memory


def evaluate(model, tokens, run, label="evaluating", skip=0):
    device, found, memory = model.u.device, [], None
    with torch.no_grad(), evaluating(model, run):
        cut = list(lesson_1.segments(lesson_1.lanes(tokens.to(device), 1), run.eval_segment))
        for x, y in progress(cut, label, len(cut)):
            with machine.autocast(run, device.type):
                losses, memory = model(x, memory, y)
            found.append(losses.flatten().to(torch.float64))
    return torch.cat(found)[skip:].mean().item()
