"""The exercises: which functions they are, in course order, with task and hint.

`python tests/blank.py --list` prints the table.  Their rules are tests: those of rel_shift stand
in tests/test_04_rel_shift.py and take `rel_shift` as an argument.
"""
import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LESSONS = ("01_vanilla_segments", "02_recurrence", "03_relative_attention", "04_rel_shift",
           "05_full_model", "train")


@dataclass(frozen=True)
class Exercise:
    """A function of one idea that a student writes again."""

    name: str  # what `pytest -k` and blank.py call it
    file: str  # the lesson
    function: str  # there: a function, or Class.method
    lines: int  # of the shipped solution
    minutes: int  # an estimate, until a class has measured it
    level: int  # 1 to 3: how difficult
    idea: str
    before: str  # what must be known
    task: str  # three sentences
    hint: str  # shown by --hints

    @property
    def lesson(self):
        """01 ... 05, train: short, for the progress line."""
        return self.file.split("_")[0]

    @property
    def test_file(self):
        """Where its rules stand."""
        return f"test_{self.file}"


EXERCISES = (
    Exercise(
        "lanes", "01_vanilla_segments", "lanes", 6, 15, 1,
        "one stream, B contiguous lanes", "slices, stack",
        "Cut the stream into B contiguous lanes of L + 1 tokens, where L = (n - 1) // B. The "
        "last column of a lane is the first of the next lane: it is only a target. Refuse B < 1 "
        "and a stream too short for one input a lane with a ValueError.",
        "Where does lane b begin in the stream, and where does it end if one token more than "
        "its L inputs belongs to it?"),
    Exercise(
        "segments", "01_vanilla_segments", "segments", 8, 15, 1,
        "inputs and their next tokens, in order", "yield",
        "Go through the columns of the lanes, T at a time from `start` on, and yield x and y, "
        "both (B, T) int64, y one column further than x. The last segment may be shorter, but "
        "no target is lost, and the last column is never an input. Refuse T < 1 with a "
        "ValueError.",
        "With L + 1 columns there are L inputs. Write down for the last segment at which column "
        "x ends and at which y ends. `yield`, do not return a list: train.py asks for one at a "
        "time."),
    Exercise(
        "sinusoid", "01_vanilla_segments", "sinusoid", 6, 15, 1,
        "a position as sines and cosines", "broadcasting",
        "Encode each position as D/2 sines, then D/2 cosines, in float64. Frequency k (k = 0, "
        "1, ...) is 10000^(-2k/D): the first is 1, and they fall. Refuse an odd D with a "
        "ValueError.",
        "Make the D/2 frequencies first, then the matrix of all angles (n, D/2); its sine and "
        "its cosine are joined, all sines first. Make positions and frequencies float64 before "
        "you multiply them."),
    Exercise(
        "update_memory", "02_recurrence", "update_memory", 3, 10, 1,
        "first in, first out, no gradient", "cat, detach",
        "Join the memory (B, m, D) and the hidden states h (B, T, D) along time and keep the "
        "last M of them, or all if there are fewer. The result carries no gradient, and the "
        "arguments stay as they were. M may be 0: then nothing is kept.",
        "In Python rows[-0:] is everything, and rows[k:] with a negative k counts from the end. "
        "Compute the first row that stays, and never let it be below 0."),
    Exercise(
        "causal_mask", "02_recurrence", "causal_mask", 3, 15, 1,
        "the future, after a memory of m keys", "comparing rows with columns",
        "Return (T, m + T) bool on `device`, True where a query must NOT look. The first m keys "
        "are the memory, so query i of the segment is itself key m + i. It sees the whole memory, "
        "itself, and nothing after itself.",
        "Compare a row of key numbers with a column of the queries' own key numbers. How many "
        "True has the last row?"),
    Exercise(
        "reach", "02_recurrence", "reach", 5, 25, 2,
        "how far back N layers see", "whole numbers alone",
        "Return how many tokens back the last token of a segment can see through N layers. In "
        "one layer a token sees its own segment up to itself and M tokens before the start of "
        "its SEGMENT. The token reached there belongs to an earlier segment, where the next layer "
        "goes on.",
        "Put the query's segment at 0, the query at T - 1. What is the first token that one "
        "layer sees? In which segment does that token stand, and where does that segment start?"),
    Exercise(
        "stream_losses", "02_recurrence", "stream_losses", 6, 10, 1,
        "the memory handed on", "a loop that hands something on",
        "Read x (B, n) in segments of T tokens, in order. The first call of the model gets no "
        "memory, None; each later one gets the memory that the call before has returned. Return "
        "the losses of all tokens, (B, n): lesson_1.token_losses(logits, y) gives those of a "
        "segment, and the last segment may be shorter.",
        "model(x, memory) returns two things, logits and the new memory. x.split(T, dim=1) cuts "
        "x into segments, and torch.cat(..., dim=1) joins losses along time."),
    Exercise(
        "four_terms", "03_relative_attention", "four_terms", 12, 35, 2,
        "the score, term by term", "dot products; the lesson's table",
        "For one head, fill a NumPy array (4, T, K) with the terms (a) to (d) of the table "
        "above. Query i is key m + i with m = K - T, and the distance to key j is m + i - j; row "
        "n of R encodes distance n. Future keys have no distance: leave NaN there, and do not "
        "divide by sqrt(C).",
        "Two loops, over i and over the j that are not in the future: 0 ... m + i. "
        "W_kR @ R[distance] occurs in two of the terms."),
    Exercise(
        "rel_shift_by_index", "04_rel_shift", "rel_shift_by_index", 5, 25, 2,
        "the shift as one gather", "gather",
        "Compute for every cell (i, j) of the result the column of x that it comes from, as one "
        "(T, K) tensor of indices. Gather along the last axis, whatever dimensions come before. "
        "Where that column would lie beyond the end (the future) take the last one, distance 0.",
        "rel_shift_loops says which column: read it off there. torch.gather wants an index of "
        "the shape of x, and expand makes one without copying."),
    Exercise(
        "rel_shift", "04_rel_shift", "rel_shift", 4, 25, 3,
        "the shift by pad and reshape", "how a matrix lies in memory; view",
        "Put one cell in front of every row, read the same numbers again in rows of T, drop one "
        "of these rows, and read the rest as (T, K). Row i has then moved left by T - 1 - i. "
        "Any number of leading dimensions may come first.",
        "Draw T = 3, K = 5 on paper, as at the top of the lesson. Which row of the reshaped "
        "matrix begins with a pad cell and holds nothing that is needed: the first or the last? "
        "If it is right for one matrix only: x.shape[-2:] is T and K, the rest stays in front."),
    Exercise(
        "attention_mask", "05_full_model", "attention_mask", 6, 20, 2,
        "same_length: every query sees M + 1 keys", "causal_mask",
        "Return a mask (T, m + T), bool, on `device`, True where a query must NOT look, for a "
        "memory of m hidden states; query i is key m + i. Hidden is the future. With same_length "
        "also every key that is more than M back, so that each query sees itself and at most M "
        "keys before it.",
        "Make the matrix of distances first: it answers both questions. A key that is exactly M "
        "back is still seen."),
    Exercise(
        "distance_encoding", "05_full_model", "distance_encoding", 4, 15, 1,
        "clamp: no unknown distance", "sinusoid, clamp",
        "Return the sinusoids R (K, D) of the distances K - 1, ..., 1, 0 in this order. With a "
        "clamp_len above 0 every distance beyond it is encoded as clamp_len itself. With 0 or "
        "less there is no clamp.",
        "torch.arange can count down. Clamp the distances, not their places in the tensor and not "
        "the encoding."),
    Exercise(
        "relative_attention", "05_full_model", "RelativeAttention.attend", 5, 30, 3,
        "attention by content and distance", "four_terms, rel_shift",
        "Score each query against each key by lesson 4's relative_score, divide by sqrt(C), and "
        "give the keys that `mask` names the score -inf. Take the softmax over the keys, then "
        "self.dropout_attention of these probabilities, then the weighted sum of the values. Join "
        "the heads, one after the other: (B, T, H * C); W_o is not your business.",
        "Write the shape beside every line: score and probability (B, H, T, K), weighted sum (B, "
        "H, T, C). A reshape alone never exchanges two axes: bring H next to C first."),
    Exercise(
        "layer", "05_full_model", "Layer.forward", 4, 15, 1,
        "attention, add, norm; feed-forward, add, norm", "residual connections, layer norm",
        "Add to h what self.attention(h, memory, R, u, v, mask) gives, after dropout_output, and "
        "normalise the SUM with norm_1. Add to that what the feed-forward network makes of it "
        "(W_1, ReLU, dropout_inner, W_2), after dropout_ff, and normalise the sum with norm_2. "
        "Each norm comes after its sum (post-norm), as in the paper.",
        "h = norm(h + dropout(block(h))), twice. The second block reads what the first norm "
        "gave."),
    Exercise(
        "sample_top_k", "05_full_model", "sample_top_k", 9, 20, 2,
        "draw from the k most probable tokens", "topk, softmax, multinomial",
        "Draw one token for each row of the logits (B, V) from its top_k most probable ones, with "
        "probabilities softmax(logits / temperature) among these, using `generator`. Return token "
        "numbers of the vocabulary, (B, 1). Refuse top_k outside 1..V and a temperature that is "
        "not above 0 (NaN is not, either) with a ValueError.",
        "topk gives values and indices. What multinomial draws is a place among the k best: it "
        "must be translated back into the vocabulary."),
    Exercise(
        "generate", "05_full_model", "generate", 9, 25, 2,
        "sampling with memory", "update_memory, sample_top_k",
        "Read the prompt (B, P) once, then one token at a time: sample_top_k draws from the "
        "logits of the LAST position, and the memory stands for all that was read before. Return "
        "the new tokens only, (B, n_tokens), also if n_tokens is 0. If the vocabulary "
        "(model.config.vocab_size) has fewer than top_k tokens, draw from all of them; gradients "
        "are off.",
        "Keep one variable for what the model reads next: first the prompt, then the (B, 1) "
        "token just drawn. Who feeds the prompt again reads it twice, since the memory holds "
        "it."),
    Exercise(
        "train_step", "train", "train_step", 18, 40, 3,
        "one update, the memory handed on", "backward, clipping, update_memory",
        "For each slice of micro_batches(B, recipe.micro_batch) call the model with x, memory and "
        "y of these lanes under machine.autocast(recipe, x.device.type): it gives losses (B, T) "
        "and the new memory, a list of (lanes, m, D), one for each layer; then send the "
        "gradient of their share of the MEAN over all lanes backward; call and backward belong "
        "inside `with ranks.no_sync(model, last=...)`, where last says if this part is the last. "
        "The gradients, cleared before the first part, add up: clip them to the norm recipe.clip, "
        "and update, but only if ranks.mean(loss), of a float, and the norm are finite; "
        "otherwise hand the old memory back. Return that loss, the norm before clipping (both "
        "floats), and the new memory of all lanes.",
        "Begin without the parts: one call with all lanes, loss.backward(), clip, step. "
        "clip_grad_norm_ clips in place and returns the norm of before; a float is loss.item()."),
    Exercise(
        "evaluate", "train", "evaluate", 11, 30, 2,
        "every token counted once", "no_grad, segments",
        "Cut the tokens, on model.u.device (a Reader has no parameters()), into one lane and "
        "into segments of evaluation_segment_length(recipe), and read them in order inside `with "
        "evaluating(model, recipe)`, under machine.autocast(recipe, device.type): model(x, memory, "
        "y) gives losses (1, T) and the new memory. Add up the losses of ALL predictions in "
        "float64; the last segment may be shorter. Return the sum divided by the number of "
        "predictions, a float.",
        "n tokens are n - 1 predictions. A mean of the segments' means is not the mean over the "
        "tokens. "
        "progress(items, label, total), which nothing asks for, shows how far the loop is."),
)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


def in_lines(text, width, **options):
    """The text in lines of at most so many columns; a formula is not cut at its operators."""
    kept = re.sub(r" ([-+*/=.]|//) ", r"~\1~", text)
    return [line.replace("~", " ") for line in textwrap.wrap(kept, width, **options)]


# ---- the source of a function -------------------------------------------------------------------

def find(source, function):
    """(node of the function, first line of its body after the docstring), lines from 1.

    Raises SyntaxError if the source is no Python, KeyError if the function is not in it.
    """
    body = ast.parse(source).body
    for part in function.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            raise KeyError(function)
        node, body = found[-1], found[-1].body
    documented = ast.get_docstring(node) is not None
    return node, body[0].end_lineno + 1 if documented else body[0].lineno
