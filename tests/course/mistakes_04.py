"""SPOILERS.  Mistakes in the exercises of lesson 4 (see mistakes.py)."""
from course.mistakes import ANY, M

NO_PAD = ("the pad is missing: with one cell in front of each row there are T * (K + 1) numbers, "
          "which can be read as (K + 1, T)")

LOOPS = """
def {name}(x):
    T, K = x.shape[-2:]
    shifted = x.new_full(x.shape, {any})
    for i in range(T):
        for j in range(K):
            if 0 <= j + {step} < K:
                shifted[..., i, j] = x[..., i, j + {step}]
    return shifted
"""


def moved(name, sentence, step, bug=0):
    """A shift that moves row i left by `step`; what comes in from outside may be anything."""
    return M(name, sentence, LOOPS.format(name=name, step=step, any=ANY), bug=bug)


def both(sentence, step, bug=0):
    """The same mistake in both exercises."""
    return [moved(name, sentence, step, bug) for name in ("rel_shift_by_index", "rel_shift")]


TABLE = (
    # ---- made with pad and reshape
    M("rel_shift", "the rows went to the right, into the future: did you drop the first row or the "
      "last? The first one holds what nobody needs", ("x[..., 1:, :]", "x[..., :-1, :]"), bug=1),
    M("rel_shift", "every row is moved one too far: the pad cell goes in front of each row, not "
      "after it", ("(1, 0)", "(0, 1)")),
    M("rel_shift", "nothing has moved: the padded numbers must be read in rows of T",
      ("*batch, K + 1, T", "*batch, T, K + 1"), ("x[..., 1:, :]", "x[..., :, 1:]")),
    M("rel_shift", "the numbers do not fit: (T, K + 1) padded numbers are as many as (K + 1, T); "
      "without one row of T they are T x K", ("*batch, K + 1, T", "*batch, T + 1, K"), bug=5),
    M("rel_shift", "transpose turns the table; reshape leaves the numbers in their order",
      ("x.reshape(*batch, K + 1, T)", "x.transpose(-1, -2)")),
    M("rel_shift", "transpose turns the table; reshape leaves the numbers in their order",
      "def rel_shift(x):\n    return x.mT.reshape(x.shape)"),
    M("rel_shift", NO_PAD, ("x = F.pad(x, (1, 0))", "x = x.clone()")),
    M("rel_shift", NO_PAD, ("x = F.pad(x, (1, 0))", "pass"), ("K + 1, T)", "K, T)")),
    M("rel_shift", "the padded numbers are not read anew: read them in rows of T, (K + 1, T), and "
      "then drop the first of these rows", ("*batch, K + 1, T", "*batch, T, K + 1")),
    M("rel_shift", "a row was padded in place of a cell: F.pad counts from the last axis, and one "
      "cell in front of each row is (1, 0)", ("(1, 0)", "(0, 0, 1, 0)")),
    M("rel_shift", "row i is moved to the right by i: the pad cell goes in front of each row, and "
      "the first row is dropped, not the last", ("(1, 0)", "(0, 1)"),
      ("x[..., 1:, :]", "x[..., :-1, :]")),
    M("rel_shift", "right for one matrix, wrong with leading dimensions: the matrices were mixed",
      ("*batch, T, K = x.shape", "T, K = x.shape[-2:]"),
      ("x.reshape(*batch, K + 1, T)", "x.reshape(K + 1, -1)"),
      ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(*x.shape[:0], -1, T, K)")),
    M("rel_shift", "right for one matrix, but with leading dimensions it ends in an error",
      ("*batch, T, K = x.shape", "T, K = x.shape[-2:]"),
      ("x.reshape(*batch, K + 1, T)", "x.reshape(K + 1, T)"),
      ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(T, K)")),
    M("rel_shift", "test_rows_need_not_stand_one_after_the_other", """
def rel_shift(x):
    *batch, T, K = x.shape
    return x.as_strided((*batch, T, K), (*x.stride()[:-2], max(1, K - 1), 1),
                        x.storage_offset() + T - 1)
"""),
    # ---- made with an index
    M("rel_shift_by_index", "the index runs beyond the end of the row: there the last column is "
      "wanted, distance 0", (".clamp(max=K - 1)", "")),
    M("rel_shift_by_index", "gather runs along the wrong axis, the rows: the columns are the last "
      "one, -1", ("gather(-1", "gather(-2")),
    M("rel_shift_by_index", "right for one matrix, but with leading dimensions it ends in an error",
      (".expand(x.shape)", "")),
    M("rel_shift_by_index", "the index runs around the end: clamp it to the last column",
      (".clamp(max=K - 1)", " % K")),
    M("rel_shift_by_index", "the future holds 0: it repeats the number of distance 0",
      ("x.gather(-1, n.expand(x.shape))", "x.gather(-1, n.expand(x.shape)).tril(K - T)")),
    # ---- the amount is wrong
    *both("row i is moved by i, should be T - 1 - i: that would be right for ascending distances",
          "i", bug=2),
    *both("every row is moved one too far: row i goes by T - 1 - i", "T - i"),
    *both("every row is moved one too little: row i goes by T - 1 - i", "T - 2 - i"),
    *both("row i is moved to the right: it must go to the left", "i + 1 - T"),
    *both("row i is moved by m - i: T, not m, belongs there (they are equal only by chance)",
          "K - T - i", bug=5),
    *both("row i is moved by i + 1 in place of T - 1 - i", "i + 1"),
    *both("all rows are moved by T - 1: row i goes by its own T - 1 - i", "T - 1"),
    moved("rel_shift_by_index", "nothing has moved: row i goes to the left by T - 1 - i", "0"),
    # ---- each matrix by itself, the gradient
    *(M(name, "every matrix became the first one", text) for name, text in {
        "rel_shift": """
def rel_shift(x):
    first = x.reshape(-1, *x.shape[-2:])[0]
    T, K = first.shape
    return F.pad(first, (1, 0)).flatten()[T:].view(T, K).expand(x.shape)
""", "rel_shift_by_index": """
def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    source = (torch.arange(K) + T - 1 - torch.arange(T)[:, None]).clamp(max=K - 1)
    return x.reshape(-1, T, K)[0].gather(-1, source).expand(x.shape)
"""}.items()),
    M("rel_shift", "test_gradient_goes_back", ("x = F.pad(x, (1, 0))",
                                               "x = F.pad(x.detach(), (1, 0))")),
    M("rel_shift_by_index", "test_gradients_go_back_through_the_gather",
      ("x.gather(", "x.detach().gather(")),
    M("rel_shift", "test_numbers_keep_their_dtype", ("x = F.pad(x, (1, 0))",
                                                     "x = F.pad(x.float(), (1, 0))")),
    M("rel_shift_by_index", "test_the_gather_leaves_x_alone",
      ("return x.gather(-1", "return x.copy_(x.gather(-1"),
      ("expand(x.shape))", "expand(x.shape)))")),
)
