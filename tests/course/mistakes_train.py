"""SPOILERS.  Mistakes in the exercises of train.py (see mistakes.py)."""
CALL = "model(x[lanes], past, y[lanes])"
CLIP = "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)\n"
MEMORY = "[torch.cat(h) for h in zip(*new_memory)]"
LOOP = "    for lanes in micro_batches(len(x), recipe.micro_batch):\n"

TABLE = {}
TABLE["train_step"] = (
    ("the memory is not passed to the model", (CALL, "model(x[lanes], None, y[lanes])")),
    ("x and y are swapped: x is the input, y the target",
     (CALL, "model(y[lanes], past, x[lanes])")),
    ("you return the sum of the losses; return their mean over all B x T tokens",
     ("losses.sum() / y.numel()", "losses.sum()")),
    ("test_three_results_are_returned", (f"return loss, norm, {MEMORY}", f"return loss, {MEMORY}")),
    ("you leave out the losses of target 0, which is a token like any other",
     ("losses.sum()", "(losses * (y[lanes] != 0)).sum()")),
    ("you make the targets from x: the targets are y, as it is",
     (CALL, "model(x[lanes], past, torch.cat([x[:, 1:], y[:, -1:]], 1)[lanes])")),
    ("test_the_new_memory_is_returned",
     (f"return loss, norm, {MEMORY}", f"return loss, norm, [h.squeeze(0) for h in {MEMORY}]")),
    ("the weights have not moved: optimizer.step() is missing, or the gradients are cleared just "
     "before it", ("    optimizer.step()\n", "")),
    ("the weights have not moved: loss.backward() is missing, so there is no gradient",
     ("        part.backward()\n", "")),
    ("the gradients of the previous step are still included: clear them first",
     ("    optimizer.zero_grad()\n", "")),
    ("the gradient is not clipped, or only after the step",
     (CLIP, "    norm = torch.stack([p.grad for p in model.parameters() if p.grad is not "
      "None]).norm()\n")),
    ("the gradient is clipped before backward() has made it", (CLIP, ""),
     ("        part.backward()\n",
      "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)\n"
      "        part.backward()\n")),
    ("you return the norm after clipping; it must be the one before, which clip_grad_norm_ returns",
     (f"return loss, norm, {MEMORY}", f"return loss, min(norm, recipe.clip), {MEMORY}")),
    ("all lanes go through the model at once: split them into micro_batches(len(x), "
     "recipe.micro_batch)", (LOOP, "    for lanes in [slice(0, len(x))]:\n")),
    ("the gradients are cleared before each micro-batch: only the last one's remain",
     ("    optimizer.zero_grad()\n", ""), (LOOP, f"{LOOP}        optimizer.zero_grad()\n")),
    ("you add up the gradients of the micro-batches' means: each micro-batch counts by its share "
     "of all B x T tokens", ("losses.sum() / y.numel()", "losses.mean()")),
    ("the micro-batches share one memory: each needs the memory of its own lanes",
     ("None if memory is None else [h[lanes] for h in memory]", "memory")),
    ("every layer gets the memory of the first one",
     ("[h[lanes] for h in memory]", "[memory[0][lanes] for h in memory]")),
    ("you return the memory of the last micro-batch only: concatenate those of all micro-batches",
     (f"return loss, norm, {MEMORY}", "return loss, norm, part_memory")),
    ("this is the old memory: return the new one, which the model returned",
     (f"return loss, norm, {MEMORY}", "return loss, norm, memory")),
    ("a weight that the loss does not depend on has no gradient: its .grad is None",
     (CLIP, "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
      "    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)\n")),
    ("you changed the old memory in place: a step without an update must still return it",
     ("    optimizer.step()\n", "    optimizer.step()\n    if memory:\n"
      f"        memory[0].copy_({MEMORY}[0])\n")),
    ("test_a_step_sets_no_seed",
     ("    optimizer.zero_grad()\n", "    torch.manual_seed(0)\n    optimizer.zero_grad()\n")),
    ("an infinite loss stops the step: the norm alone decides, since it is equal on all ranks",
     ("math.isfinite(norm)", "math.isfinite(loss + norm)")),
    ("test_three_results_are_returned", ("return loss, norm, memory", "return")),
    ("you return the new memory of a step without an update: return the old one",
     ("return loss, norm, memory", f"return loss, norm, {MEMORY}")),
)
TABLE["evaluate"] = (
    ("a mean of the segments' means: the last, shorter segment counts too much",
     ("total.item() / (len(tokens) - 1)", "total.item() / parts"),
     (".double().sum()", ".double().mean()")),
    ("you read everything in one call: read segments of evaluation_segment_length(recipe)",
     ("lesson_1.segments(stream, T)", "lesson_1.segments(stream, len(tokens))")),
    ("the sum is divided by the number of tokens: n tokens are n - 1 predictions",
     ("total.item() / (len(tokens) - 1)", "total.item() / len(tokens)")),
    ("the last, shorter segment is missing",
     ("            loss, memory = model(x, memory, y)",
      "            if x.shape[1] < T:\n                break\n"
      "            loss, memory = model(x, memory, y)")),
    ("the last segment is padded, and its padding counts: read it as it is",
     ("loss, memory = model(x, memory, y)",
      "x, y = (torch.nn.functional.pad(z, (0, T - x.shape[1])) for z in (x, y))\n"
      "            loss, memory = model(x, memory, y)")),
    ("test_the_result_is_a_float",
     ("total.item() / (len(tokens) - 1)", "total / (len(tokens) - 1)")),
    ("you split the text into recipe.batch lanes: evaluation reads it as ONE lane, since each "
     "further lane would start without context",
     ("lanes(tokens.to(device), 1)", "lanes(tokens.to(device), recipe.batch)")),
    ("the segments have recipe.eval_segment tokens: they must have "
     "evaluation_segment_length(recipe)",
     ("evaluation_segment_length(recipe)", "recipe.eval_segment")),
    ("the last token is dropped: it is the last target",
     ("lanes(tokens.to(device), 1)", "lanes(tokens[:max(2, len(tokens) - 1)].to(device), 1)")),
    ("test_the_tokens_go_to_the_models_device", ("tokens.to(device)", "tokens")),
    ("the memory is not carried over from segment to segment",
     ("loss, memory = model(x, memory, y)", "loss, _ = model(x, memory, y)")),
    ("this evaluation starts with the memory of the previous one: start with None, since the text "
     "starts again", ("memory = None", "memory = getattr(model, 'kept', None)"),
     ("    return", "    model.kept = memory\n    return")),
    ("test_the_first_segment_has_no_memory", ("memory = None", "memory = [torch.zeros(1, 1, 1)]")),
    ("a Reader's memory is opaque: pass it on as it is and do not look inside",
     ("loss, memory = model(x, memory, y)",
      "loss, memory = model(x, memory, y)\n            memory = [z.detach() for z in memory]")),
    ("a Reader has no parameters(): ask model.u.device",
     ("model.u.device", "next(model.parameters()).device")),
    ("test_the_model_is_called_inside_evaluating", ("with evaluating(model, recipe), ", "with ")),
    ("test_the_mode_of_the_model_is_restored", ("    return", "    model.train()\n    return")),
    ("test_there_are_no_gradients", ("@torch.no_grad()\n", "")),
    ("test_evaluation_is_also_under_autocast", (", machine.autocast(recipe, device.type):", ":")),
    ("the sum is in float32, where small losses vanish next to a large sum: add up in float64 "
     "(losses.double())", ("torch.zeros((), dtype=torch.float64, device=device)", "0.0"),
     (".double().sum()", ".sum()")),
    ("test_progress_gets_the_number_of_segments", ("label, parts)", "label, len(tokens) - 1)")),
)
