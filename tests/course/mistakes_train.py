"""SPOILERS.  Mistakes in the exercises of train.py (see mistakes.py)."""
from course.mistakes import M

# ---- train_step ---------------------------------------------------------------------------------

CALL = "model(x[lanes], past, y[lanes])"
SHARE, BACK = "losses.sum() / y.numel()", "            part.backward()\n"
FIRST = "    optimizer.zero_grad()\n"
LOOP = "    for lanes in micro_batches(len(x), run.micro_batch):\n"
PAST = "memory and [layer[lanes] for layer in memory]"
CLIP = "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip).item()\n"
LOSS = "loss = ranks.mean(loss.item())"
FINITE = "if not math.isfinite(loss + norm):"
WITH = "with machine.autocast(run, x.device.type):"
LAST = "last=lanes.stop == len(x)"
STEP = "    optimizer.step()\n"
NORM = ("    norm = torch.stack([p.grad for p in model.parameters() if p.grad is not None])"
        ".norm().item()\n")
NEW = "[torch.cat(layer) for layer in zip(*new_memory)]"
RETURN = f"return loss, norm, {NEW}"

TRAIN_STEP = (
    # ---- the loss
    M("train_step", "the model is called without targets: model(x, memory, y) gives the losses, "
      "model(x, memory) the logits", (CALL, "model(x[lanes], past)")),
    M("train_step", "you compute the losses from the logits: model(x, memory, y) gives the losses",
      (CALL, "model(x[lanes], past)"),
      ("losses.sum()", "torch.nn.functional.cross_entropy(losses.transpose(1, 2), y[lanes], "
       'reduction="sum")')),
    M("train_step", "the memory is not handed to the model", (CALL, "model(x[lanes], None, "
                                                                    "y[lanes])")),
    M("train_step", "x and y are exchanged: x is read, y is to be predicted",
      (CALL, "model(y[lanes], past, x[lanes])")),
    M("train_step", "memory and y are exchanged: the call is model(x, memory, y)",
      (CALL, "model(x[lanes], y[lanes], past)")),
    M("train_step", "the loss is the sum of the losses, should be their mean over all B x T tokens",
      (SHARE, "losses.sum()")),
    M("train_step", "the loss is summed over the tokens of a lane: take the mean over all B x T",
      (SHARE, "losses.sum() / len(y)")),
    M("train_step", "the loss is summed over the lanes: take the mean over all B x T tokens",
      (SHARE, "losses.sum() / y.shape[1]")),
    M("train_step", "the loss is that of the last token only: every token of the segment is one to "
      "learn from", (SHARE, "losses[:, -1].sum() / len(y)")),
    M("train_step", "the loss is that of the first lane only", (SHARE, "losses[0].mean()")),
    M("train_step", "the loss has the wrong sign: the model gives -ln p, which is to fall",
      (SHARE, "-losses.sum() / y.numel()")),
    M("train_step", "the loss is in bits: nats are asked for, as the model gives them",
      (LOSS, "loss = ranks.mean(loss.item()) / math.log(2)")),
    M("train_step", "the loss is a perplexity: nats are asked for, as the model gives them",
      (LOSS, "loss = math.exp(ranks.mean(loss.item()))")),
    M("train_step", "loss and norm are exchanged: the loss comes first",
      (RETURN, RETURN.replace("loss, norm", "norm, loss"))),
    M("train_step", "test_three_things_come_back", (RETURN, f"return loss, {NEW}")),
    M("train_step", "test_the_loss_is_the_mean_over_the_ranks", (LOSS, "loss = loss.item()")),
    M("train_step", "the loss is judged before the mean over the ranks is taken: all ranks must "
      "judge the same number", (RETURN, RETURN.replace("loss,", "ranks.mean(loss),")),
      (LOSS, "loss = loss.item()")),
    # ---- the gradient
    M("train_step", "the weights have not moved: optimizer.step() is missing, or the gradients are "
      "cleared just before it", (STEP, "")),
    M("train_step", "the weights have not moved: loss.backward() is missing, so there is no "
      "gradient", (BACK, "")),
    M("train_step", "the gradient is that of the sum: the mean over B x T tokens is asked for",
      ("part.backward()", "losses.sum().backward()")),
    M("train_step", "the gradient is that of the last token only",
      ("part.backward()", "(losses[:, -1].sum() / len(y)).backward()")),
    M("train_step", "the update goes uphill", ("part.backward()", "(-part).backward()")),
    M("train_step", "the gradients of the step before are still in: clear them first",
      (FIRST, "")),
    M("train_step", "the weights have not moved: optimizer.step() is missing, or the gradients are "
      "cleared just before it", (FIRST, ""), (STEP, FIRST + STEP)),
    # ---- to clip
    M("train_step", "the gradient is not clipped, or only after the step", (CLIP, NORM)),
    M("train_step", "the gradient is not clipped, or only after the step", (CLIP, NORM),
      (STEP, STEP + CLIP.replace("norm = ", ""))),
    M("train_step", "the gradient is clipped before backward() has made it", (CLIP, ""),
      (BACK, "        " + CLIP + BACK)),
    M("train_step", "each weight's gradient is clipped by itself: clip the norm of all together",
      (CLIP, NORM + "    torch.nn.utils.clip_grad_value_(model.parameters(), run.clip)\n")),
    M("train_step", "the norm is clipped to 1, should be to run.clip", ("run.clip", "1.0")),
    M("train_step", "a gradient whose norm is below run.clip was made longer: it stays as it is",
      (CLIP, NORM + "    for p in model.parameters():\n"
       "        p.grad = None if p.grad is None else p.grad * run.clip / norm\n")),
    M("train_step", "you return the norm after clipping; it must be the one before, which "
      "clip_grad_norm_ returns", (RETURN, RETURN.replace("norm,", "min(norm, run.clip),"))),
    # ---- micro-batches
    M("train_step", "all lanes go through the model at once: cut them into "
      "micro_batches(len(x), run.micro_batch)",
      (LOOP, "    for lanes in [slice(0, len(x))]:\n")),
    M("train_step", "the gradients are cleared before each part: only the last part's are left",
      (FIRST, ""), (LOOP, LOOP + "    " + FIRST)),
    M("train_step", "the gradients of the parts' means were added up: each part counts by its "
      "share of all B x T tokens", (SHARE, "losses.mean()")),
    M("train_step", "the mean of the parts' means is taken: a smaller last part counts too much",
      (SHARE, "losses.mean() / len(micro_batches(len(x), run.micro_batch))")),
    M("train_step", "each part was clipped by itself: clip once, the gradient of all lanes",
      (CLIP, ""), (BACK, BACK + "        " + CLIP)),
    M("train_step", "each part made a step of its own: one step is made with the gradient of all "
      "lanes", (BACK, BACK + "        " + CLIP + "        " + STEP)),
    M("train_step", "the parts share one memory: each wants that of its own lanes", (PAST, "memory"
                                                                                     )),
    M("train_step", "the new memory is that of the last part only: join those of all parts",
      (RETURN, "return loss, norm, part_memory")),
    M("train_step", "only the last part's loss is returned: add up the parts' shares",
      ("loss += part.detach()", "loss = part.detach()")),
    M("train_step", "test_every_lane_is_read_once_and_in_order",
      (PAST, "memory and [layer[lanes].flip(0) for layer in memory]")),
    M("train_step", "test_only_the_last_part_meets_the_other_ranks",
      (f"with ranks.no_sync(model, {LAST}):", "if True:")),
    M("train_step", "test_only_the_last_part_meets_the_other_ranks", (LAST, "last=lanes.start == 0"
                                                                      )),
    # ---- the memory
    M("train_step", "this is the old memory: hand on the new one, which the model returned",
      (RETURN, "return loss, norm, memory"), bug=24),
    M("train_step", "there is no memory in the third place: it is the model's second result, as it "
      "is", (RETURN, "return loss, norm, None"), bug=24),
    M("train_step", "test_without_a_past_the_model_gets_none",
      (CALL, "model(x[lanes], past or [torch.zeros(len(x[lanes]), 1, 1)], y[lanes])"), bug=17),
    M("train_step", "a weight that the loss does not depend on has no gradient: its .grad is None",
      (CLIP, "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()\n"
       "    torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)\n")),
    M("train_step", "the old memory was changed in place: a bad step must be able to hand it back",
      (STEP, STEP + f"    if memory:\n        memory[0].copy_({NEW.replace('layer', 'z')}[0])\n")),
    # ---- what is not finite
    M("train_step", "test_loss_and_norm_are_floats", ("run.clip).item()", "run.clip)")),
    M("train_step", "test_a_bad_step_returns_three_things_too", ("return loss, norm, memory",
                                                                 "return")),
    M("train_step", "test_a_bad_step_leaves_the_weights", (FINITE, "if False:")),
    M("train_step", "the loss is finite, but the gradient is not: this step must be left out as "
      "well", (FINITE, "if not math.isfinite(loss):")),
    M("train_step", "the gradient is finite, but the loss is not: this step must be left out as "
      "well", (FINITE, "if not math.isfinite(norm):")),
    M("train_step", "NaN is held back, infinity is not: math.isfinite(z) is False for both",
      (FINITE, "if math.isnan(loss + norm):")),
    M("train_step", "the gradient of a bad step is mended: leave the whole step out",
      (CLIP, "    for p in model.parameters():\n"
       "        p.grad = None if p.grad is None else p.grad.nan_to_num(0, 0, 0)\n" + CLIP)),
    M("train_step", "the new memory of a bad step was handed on: hand back the old one",
      ("return loss, norm, memory", RETURN.replace("layer", "z"))),
    M("train_step", "a bad step hands back no memory: hand back the old one",
      ("return loss, norm, memory", "return loss, norm, None")),
    M("train_step", "the bad numbers are hidden: return loss and norm as they are",
      ("return loss, norm, memory", "return 0.0, 0.0, memory")),
    # ---- autocast
    M("train_step", "test_the_model_is_called_under_autocast", (WITH, "if True:")),
    M("train_step", "test_the_model_is_called_under_autocast",
      (WITH, 'with machine.autocast(run, "cpu"):')),
)

# ---- evaluate -----------------------------------------------------------------------------------

READ = "loss, memory = model(x, memory, y)"
SUM = "loss[:, max(0, skip - i * T) :].double().sum()"
OUT = "max(0, skip - i * T)"
RESULT = "total.item() / (len(tokens) - 1 - skip)"
LOOP = "        for i, (x, y) in enumerate(read):\n"
EVALUATING = "with evaluating(model, run), machine.autocast(run, device.type):"


def results(name, result, *edits, bug=0):
    """A mistake in what is returned in the end."""
    return M("evaluate", name, (RESULT, result), *edits, bug=bug)


MEANS = (".double().sum()", ".double().mean()")
NO_SKIP = ("loss[:, max(0, skip - i * T) :]", "loss")
WHOLE = (LOOP, LOOP + "            if x.shape[1] < T:\n                break\n")

EVALUATE = (
    # ---- what is divided by what
    results("a mean of the segments' means: the last, shorter segment counts too much",
            "total.item() / parts", MEANS, bug=22),
    results("the segments' means are added up: add up the losses of the tokens", "total.item()",
            MEANS),
    M("evaluate", "the segments' means are added up and divided by the number of predictions: add "
      "up the losses of the tokens", MEANS),
    results("the sum is divided by the number of tokens: n tokens are n - 1 predictions",
            "total.item() / (len(tokens) - skip)"),
    results("the sum is divided by one less than the predictions: n tokens are n - 1 of them",
            "total.item() / max(1, len(tokens) - 2 - skip)"),
    results("the sum is not divided by the number of predictions", "total.item()"),
    results("the sum is divided by the number of segments, should be by that of the predictions",
            "total.item() / parts"),
    results("the result is in bits: nats are asked for", RESULT + " / math.log(2)"),
    results("the result is a perplexity: nats are asked for", f"math.exp({RESULT})"),
    results("a mean of the segments' perplexities: add up the losses, in nats",
            "total.item() / parts", (SUM, "loss.double().mean().exp()")),
    M("evaluate", "the last, shorter segment is left out", WHOLE),
    results("the last, shorter segment is left out, and not counted",
            "total.item() / max(1, (len(tokens) - 1) // T * T)",
            WHOLE),
    M("evaluate", "only the last segment's losses are in the sum", ("total +=", "total =")),
    results("the result is the mean of the last segment only", "total.item()", MEANS,
            ("total +=", "total =")),
    M("evaluate", "only the last token of each segment is in the sum",
      (SUM, "loss[:, -1].double().sum()")),
    results("test_the_result_is_a_float", RESULT.replace(".item()", "")),
    # ---- what is read
    M("evaluate", "the text is cut into run.batch lanes: evaluation reads it as ONE lane, since at "
      "each lane's start the past would be missing", ("lanes(tokens.to(device), 1)",
                                                      "lanes(tokens.to(device), run.batch)")),
    M("evaluate", "the segments have the length of training: evaluation's is reading_length(run)",
      ("segments(stream, T)", "segments(stream, run.segment)")),
    M("evaluate", "segments wants the lane (1, n) as lanes gives it, not the tokens (n,)",
      ("segments(stream, T)", "segments(stream[0], T)")),
    M("evaluate", "the first token is thrown away: it is the first input",
      ("lanes(tokens.to(device), 1)", "lanes(tokens[min(1, len(tokens) - 2):].to(device), 1)")),
    M("evaluate", "the last token is thrown away: it is the last target",
      ("lanes(tokens.to(device), 1)", "lanes(tokens[:max(2, len(tokens) - 1)].to(device), 1)")),
    M("evaluate", "the model is called without targets: model(x, memory, y) gives the losses, "
      "model(x, memory) the logits", (READ, "loss, memory = model(x, memory)")),
    M("evaluate", "x and y are exchanged: x is read, y is to be predicted",
      (READ, "loss, memory = model(y, memory, x)")),
    M("evaluate", "test_the_text_goes_to_the_model", ("tokens.to(device)", "tokens")),
    # ---- the memory
    M("evaluate", "the memory is not handed on from segment to segment",
      (READ, "loss, _ = model(x, memory, y)"), bug=24),
    M("evaluate", "all segments are read after the memory of the first: hand on the newest",
      (READ, "loss, new = model(x, memory, y)\n            memory = memory or new")),
    M("evaluate", "this evaluation begins with the memory of the one before: begin with None, for "
      "the text begins anew", ("memory = None", "memory = getattr(model, 'kept', None)"),
      ("    return", "    model.kept = memory\n    return")),
    M("evaluate", "test_the_first_segment_has_no_memory",
      ("memory = None", "memory = [torch.zeros(1, 1, 1)]"), bug=17),
    M("evaluate", "a Reader's memory is opaque: hand it on as it is, and look at nothing in it",
      (READ, READ + "\n            memory = [z.detach() for z in memory]")),
    M("evaluate", "a Reader has no parameters(): ask model.u.device",
      ("model.u.device", "next(model.parameters()).device")),
    # ---- skip
    results("the first `skip` predictions are counted, too: leave them out of sum and number",
            "total.item() / (len(tokens) - 1)", NO_SKIP),
    M("evaluate", "the sum of all predictions is divided by the number of those after `skip`",
      NO_SKIP),
    results("the sum of the predictions after `skip` is divided by the number of all",
            "total.item() / (len(tokens) - 1)"),
    M("evaluate", "one segment was skipped: skip counts predictions, not segments",
      (OUT, "min(skip, 1) * (i == 0) * T")),
    M("evaluate", "`skip` predictions of every segment were left out: only the first of the whole "
      "text are", (OUT, "skip")),
    M("evaluate", "`skip` predictions of the first segment were left out, also where that is "
      "shorter: the rest of them are in the next", (OUT, "skip * (i == 0)")),
    M("evaluate", "a segment is skipped as a whole or not at all: skip may end inside of one",
      (SUM, "loss.double().sum() * ((i + 1) * T > skip)")),
    M("evaluate", "one prediction too many is left out",
      (OUT, "max(0, skip + 1 - i * T) * (skip > 0)")),
    M("evaluate", "one prediction too few is left out",
      (OUT, "max(0, skip - 1 - i * T)")),
    M("evaluate", "the skipped tokens are not read at all: they make the memory of the others",
      (LOOP, LOOP + "            if (i + 1) * T <= skip:\n"
       "                continue\n")),
    results("the skipped tokens are cut away: they are to be read, as the memory of the others",
            "total.item() / (len(tokens) - 1)", ("    device =", "    tokens = tokens[skip:]\n"
                                                 "    device ="), NO_SKIP),
    # ---- the helpers
    M("evaluate", "test_the_model_is_called_inside_evaluating",
      ("with evaluating(model, run), ", "with ")),
    M("evaluate", "test_the_model_is_called_inside_evaluating",
      ("    " + EVALUATING, "    model.eval()\n    with machine.autocast(run, device.type):"),
      ("    return", "    model.train()\n    return")),
    M("evaluate", "test_the_model_goes_on_as_before",
      ("    return", "    model.train()\n    return")),
    M("evaluate", "test_the_model_goes_on_as_before",
      ("    device =", "    model.eval()\n    device =")),
    M("evaluate", "test_there_are_no_gradients", ("@torch.no_grad()\n", "")),
    M("evaluate", "test_evaluation_is_under_autocast_too",
      (", machine.autocast(run, device.type):", ":")),
    M("evaluate", "test_evaluation_is_under_autocast_too",
      (", machine.autocast(run, device.type):", ', machine.autocast(run, "cpu"):')),
    M("evaluate", "the sum is kept in float32, where small losses vanish beside a large sum: add "
      "up in float64 (losses.double())",
      ("torch.zeros((), dtype=torch.float64, device=device)", "0.0"),
      (".double().sum()", ".sum()")),
    M("evaluate", "each segment is added up in float32 before the sum becomes float64: "
      "losses.double().sum(), not losses.sum().double()", (".double().sum()", ".sum().double()")),
    M("evaluate", "test_progress_is_told_how_many_segments",
      ("label, parts)", "label, len(tokens) - 1)")),
    M("evaluate", "test_progress_is_told_how_many_segments",
      ("math.ceil((len(tokens) - 1) / T)",
       "(len(tokens) - 1) // T")),
    M("evaluate", "test_progress_is_told_how_many_segments", ("label, parts)",
                                                              '"evaluating", parts)')),
)

TABLE = TRAIN_STEP + EVALUATE
