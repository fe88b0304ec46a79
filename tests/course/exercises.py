"""List the exercises in course order, with the function, the task and the hint of each.

    python tests/blank.py --list         prints this list
    python tests/course/exercises.py     writes the table of tests/README.md
"""
import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "tests" / "README.md"
LESSONS = ("01_vanilla_segments", "02_recurrence", "03_relative_attention", "04_rel_shift",
           "05_full_model", "train")
ONE, TWO, THREE, FOUR, FIVE, TRAIN = LESSONS


@dataclass(frozen=True)
class Exercise:
    """A function with one idea that a student rewrites."""

    name: str  # its name for `pytest -k` and blank.py
    file: str  # the lesson
    function: str  # in that lesson: a function, or Class.method
    lines: int  # of the shipped solution
    minutes: int  # an estimate
    level: int  # difficulty, 1 to 3
    idea: str
    before: str  # prerequisites
    task: str  # three sentences
    hint: str  # shown by --hints

    @property
    def lesson(self):
        """Return the short name for the progress line: 01 ... 05, train."""
        return self.file.split("_")[0]

    @property
    def test_file(self):
        """Return the name of the test file with its rules."""
        return f"test_{self.file}"


EXERCISES = (
    Exercise(
        "lanes", ONE, "lanes", 5, 15, 1, "one stream, B contiguous lanes", "slices, stack",
        "Split the stream into B contiguous lanes of L + 1 tokens, where L = (n - 1) // B. The "
        "last column of a lane is only a target; it is also the first column of the next lane. "
        "Raise a ValueError if B < 1 or if the stream has B tokens or fewer.",
        "Where does lane b begin, and where does it end with one token more than its L inputs?"),
    Exercise(
        "segments", ONE, "segments", 6, 15, 1, "inputs and their next tokens, in order", "yield",
        "Go through the columns of the lanes, T at a time from column `start` on. Yield x and y, "
        "both (B, T) int64, where y is one column further than x. The last segment may be "
        "shorter, but every input has its target, and the last column is never an input.",
        "With L + 1 columns there are L inputs. For the last segment, write down the column at "
        "which x ends and the column at which y ends. Use `yield`, not a list."),
    Exercise(
        "sinusoid", ONE, "sinusoid", 4, 15, 1, "a position as sines and cosines", "broadcasting",
        "Encode each position as D/2 sines followed by D/2 cosines, in float64 on its device. "
        "Frequency k = 0, 1, ... is 10000^(-2k/D): the first is 1, and they decrease. D is even.",
        "Compute the D/2 frequencies in float64 and, with float64 positions, the matrix of all "
        "angles (n, D/2). Concatenate its sine and its cosine, all sines first."),
    Exercise(
        "update_memory", TWO, "update_memory", 3, 10, 1,
        "first in, first out, no gradient", "cat, detach",
        "Concatenate the memory (B, m, D) and the hidden states h (B, T, D) along time and keep "
        "the last M rows, or all rows if there are fewer. The result carries no gradient, and "
        "the arguments do not change. M may be 0: then no row is kept.",
        "In Python rows[-0:] is everything, and rows[k:] with a negative k counts from the end. "
        "Compute the index of the first row to keep, and never let it be below 0."),
    Exercise(
        "causal_mask", TWO, "causal_mask", 3, 15, 1,
        "the future, after a memory of m keys", "comparing rows with columns",
        "Return a bool mask (T, m + T) on `device` that is True where a query must NOT attend. "
        "The first m keys are the memory, so query i of the segment is key m + i. It attends to "
        "the whole memory and to the segment up to itself.",
        "Compare a row of key indices with a column of the queries' own key indices. How many "
        "True values does the last row have?"),
    Exercise(
        "reach", TWO, "reach", 5, 25, 2, "how far back N layers attend", "integer arithmetic",
        "Return how many tokens back the last token of a segment reaches through N layers. In "
        "one layer a token attends to its own segment up to itself and to the M tokens before "
        "the start of its SEGMENT. Each further layer continues in the same way from the farthest "
        "token reached so far, which may be inside an earlier segment.",
        "Let the query's segment start at 0, so that the query is token T - 1. Which is the "
        "first token that one layer attends to, and where does its segment start?"),
    Exercise(
        "stream_losses", TWO, "stream_losses", 6, 10, 1,
        "carrying the memory over", "a loop that carries a state",
        "Read x (B, n) in segments of T tokens, in order; y (B, n) holds the target of each token "
        "of x, so split it in the same way. The first call of the model gets None as its memory; "
        "each later call gets the memory that the previous call returned. Return the losses of all "
        "tokens, (B, n), in the logits' dtype: lesson_1.token_losses(logits, targets) computes "
        "those of one segment, and the last segment may be shorter.",
        "model(x, memory) returns the logits and the new memory. x.split(T, dim=1) splits x into "
        "segments, and torch.cat(..., dim=1) concatenates losses along time."),
    Exercise(
        "four_terms", THREE, "four_terms", 11, 35, 2,
        "the score, term by term", "dot products; the lesson's table",
        "For one head, fill a float64 array (4, T, K) with the terms (a) to (d) of the table in "
        "the lesson's docstring. Query i is key m + i with m = K - T, and its distance to key j is "
        "m + i - j; row n of R encodes distance n. A future key has no distance, so its four cells "
        "are NaN; do not divide by sqrt(C).",
        "Write two loops, over i and over all j that are not in the future: 0 ... m + i. W_kR @ "
        "R[distance] occurs in two of the terms."),
    Exercise(
        "rel_shift_by_index", FOUR, "rel_shift_by_index", 5, 25, 2,
        "the shift as one gather", "gather",
        "For every cell (i, j) of the result, compute the column of x that it comes from, as one "
        "(T, K) tensor on x.device. Gather along the last axis, for any leading dimensions. Where "
        "that column would be beyond the end (the future), use the last one, distance 0.",
        "rel_shift_loops contains the column: read it there. torch.gather needs an index of the "
        "shape of x, and expand makes one without copying."),
    Exercise(
        "rel_shift", FOUR, "rel_shift", 4, 25, 3,
        "the shift by pad and reshape", "the layout of a matrix in memory; view",
        "Pad one cell in front of every row, view the same values as rows of T, drop one of "
        "these rows, and view the rest as (T, K). This moves row i to the left by T - 1 - i. "
        "There may be any number of leading dimensions.",
        "Draw T = 3, K = 5 on paper, as at the top of the lesson. Which row of the reshaped "
        "matrix begins with a pad cell and contains only values that are not needed: the first "
        "or the last? With leading dimensions, x.shape[-2:] is T and K."),
    Exercise(
        "attention_mask", FIVE, "attention_mask", 6, 20, 2,
        "same_length: every query sees M + 1 keys", "causal_mask",
        "Return a bool mask (T, m + T) on `device` that is True where a query must NOT attend, "
        "for a memory of m hidden states; query i is key m + i. Keys in the future are masked. "
        "With same_length, keys more than M back are also masked, so that each query attends to "
        "itself and to at most M keys before it.",
        "Both conditions follow from the matrix of distances. A key exactly M back is not masked."),
    Exercise(
        "distance_encoding", FIVE, "distance_encoding", 4, 15, 1,
        "clamp: no unknown distance", "sinusoid, clamp",
        "Return the sinusoids R (K, D) of the distances K - 1, ..., 1, 0, in this order. If "
        "clamp_len is above 0, every larger distance is encoded as clamp_len. Otherwise none is.",
        "torch.arange can count down. Clamp distances, neither their indices nor the encoding."),
    Exercise(
        "relative_attention", FIVE, "RelativeAttention.attend", 5, 30, 3,
        "attention by content and distance", "four_terms, rel_shift",
        "Score each query against each key with lesson 4's relative_score, divide by sqrt(C), and "
        "set the scores of masked keys to -inf. Take the softmax over the keys, apply "
        "self.dropout_attention to these probabilities, and compute the weighted sum of the "
        "values. Concatenate the heads, in their order, to (B, T, H * C); the caller applies W_o.",
        "Write the shape next to every line: score and probability (B, H, T, K), weighted sum "
        "(B, H, T, C). A reshape alone never swaps two axes: first move H next to C."),
    Exercise(
        "layer", FIVE, "Layer.forward", 4, 15, 1,
        "attention, add, norm; feed-forward, add, norm", "residual connections, layer norm",
        "Add dropout_output of self.attention(h, memory, R, u, v, mask) to h, and normalize the "
        "SUM with norm_1. Apply the feed-forward network (W_1, ReLU, dropout_inner, W_2) and "
        "dropout_ff to the result, add this to it, and normalize the sum with norm_2. Each norm "
        "comes after its sum (post-norm), as in the paper.",
        "h = norm(h + dropout(block(h))), twice. The second block reads the first norm's result."),
    Exercise(
        "sample_top_k", FIVE, "sample_top_k", 5, 20, 2,
        "sample from the k most probable tokens", "topk, softmax, multinomial",
        "For each row of the logits (B, V), sample one of its top_k most probable tokens, using "
        "`generator`. The probabilities are softmax(logits / temperature) among these. Return "
        "indices into the vocabulary, (B, 1).",
        "topk returns values and indices. multinomial samples a rank among the k best, which you "
        "must map back to an index into the vocabulary."),
    Exercise(
        "generate", FIVE, "generate", 9, 25, 2,
        "sampling with memory", "update_memory, sample_top_k",
        "Read the prompt (B, P) once, then one token at a time: sample_top_k samples from the "
        "logits of the LAST position, and the memory holds everything that was read before. "
        "Return only the new tokens, (B, n_tokens), also if n_tokens is 0. If the vocabulary "
        "(model.config.vocab_size) has fewer than top_k tokens, sample from all of them; "
        "the caller has called model.eval().",
        "Keep one variable for the model's next input: first the prompt, which is then in the "
        "memory, and after it the (B, 1) token just sampled."),
    Exercise(
        "train_step", TRAIN, "train_step", 17, 40, 3,
        "one update that carries the memory over", "backward, clipping, update_memory",
        "(1) Clear the gradients; (2) for each slice of micro_batches(B, recipe.micro_batch), call "
        "the model with x, memory (a tensor (B, m, D) of each layer, or None) and y of these lanes "
        "under machine.autocast(recipe, x.device.type), then (3) call backward() on their share, "
        "by the number of tokens, of the MEAN over all lanes. After the last slice, (4) clip the "
        "gradients, which add up, to the norm recipe.clip, and (5) update the weights only if "
        "their norm before clipping is finite. Then (6) return this mean and this norm, both as "
        "floats, and the new memory of all lanes, or the old memory if there was no update.",
        "Start without micro-batches: one call with all lanes, loss.backward(), clip, step. The "
        "model returns losses (lanes, T) and the new memory, a list of (lanes, m, D), one per "
        "layer. clip_grad_norm_ clips in place and returns the norm before clipping; loss.item() "
        "is a float."),
    Exercise(
        "evaluate", TRAIN, "evaluate", 11, 30, 2, "every token counted once", "no_grad, segments",
        "Move the tokens to device = model.u.device, split them into one lane and into segments of "
        "evaluation_segment_length(recipe), and read these in order inside `with evaluating(model, "
        "recipe)`, under machine.autocast(recipe, device.type). A call model(x, memory, y) returns "
        "losses (1, T) and the new memory: sum the losses of ALL predictions in float64; the last "
        "segment may be shorter. Return the sum divided by the number of predictions, a float.",
        "n tokens are n - 1 predictions. A mean of the segments' means is not the mean over the "
        "tokens. The model may be a Reader, which has no parameters(). You may use "
        "progress(items, label, total), which displays the progress of the loop."),
)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def find(source, function):
    """Return the node of the function in this source (text or bytes), and the line number, from 1,
    at which its body begins after the docstring.  Raises SyntaxError, or KeyError if the function
    is not in the source."""
    node = ast.parse(source)
    for part in function.split("."):  # of several, the last one counts
        node = {own.name: own for own in node.body if hasattr(own, "name")}[part]
    documented = ast.get_docstring(node) is not None
    return node, node.body[0].end_lineno + 1 if documented else node.body[0].lineno


def page_with_table():
    """Return the text of the page with the table of all exercises between its markers."""
    minutes = sum(e.minutes for e in EXERCISES)
    head = f"{len(EXERCISES)} exercises", "lesson", "idea", "needs", f"{minutes} minutes", "level"
    rows = [head, ["---"] * len(head)]
    rows += [(e.name, e.lesson, e.idea, e.before, str(e.minutes), f"`{'*' * e.level}`")
             for e in EXERCISES]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    between = "(?s)(?<=<!-- exercises -->\n).*(?=<!-- end -->)"
    return re.sub(between, lambda _: table, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
