"""SPOILERS.  Mistakes in the exercises of lesson 4 (see mistakes.py)."""
TABLE = {}
TABLE["rel_shift_by_index"] = (
    ("the index exceeds the end of the row: use the last column there, distance 0",
     (".clamp(max=K - 1)", "")),
    ("gather runs along the wrong axis, the rows: the columns are the last one, -1",
     ("gather(-1", "gather(-2")),
    ("this is correct for one matrix, but with leading dimensions it raises an error",
     (".expand(x.shape)", "")),
    ("the index wraps around at the end: clamp it to the last column",
     (".clamp(max=K - 1)", " % K")),
    ("future cells are 0: they must repeat the value of distance 0",
     ("x.gather(-1, n.expand(x.shape))", "x.gather(-1, n.expand(x.shape)).tril(K - T)")),
    ("row i is moved by i; move it by T - 1 - i (i would be correct for ascending distances)",
     ("j + T - 1 - i", "j + i"),
     ("n.expand(x.shape))", "n.expand(x.shape)).where(j + i < K, 987654321)")),
    ("row i is moved by m - i: use T instead of m (they are equal only by chance)",
     ("(j + T - 1 - i).clamp(max=K - 1)", "(j + K - T - i).clamp(0, K - 1)"),
     ("n.expand(x.shape))", "n.expand(x.shape)).where(n == j + K - T - i, 987654321)")),
    ("every matrix became the first one",
     ("x.gather(-1, n.expand(x.shape))", "x.reshape(-1, T, K)[0].gather(-1, n).expand(x.shape)")),
    ("the index is the distance itself; but distances descend: distance d is in column K - 1 - d",
     ("(j + T - 1 - i).clamp(max=K - 1)", "(K - T + i - j).clamp(min=0)")),
)
TABLE["rel_shift"] = (
    ("the rows went to the right, into the future: did you drop the first row or the last? The "
     "first row holds only values that are not needed", ("x[..., 1:, :]", "x[..., :-1, :]")),
    ("nothing has moved: view the padded values as rows of T",
     ("*batch, K + 1, T", "*batch, T, K + 1"), ("x[..., 1:, :]", "x[..., :, 1:]")),
    ("the sizes do not fit: (T, K + 1) padded values are as many as (K + 1, T); without one row "
     "of T they are T x K", ("*batch, K + 1, T", "*batch, T + 1, K")),
    ("transpose swaps the axes; reshape keeps the values in their order",
     ("x.reshape(*batch, K + 1, T)", "x.transpose(-1, -2)")),
    ("the padded values keep their rows: view them as rows of T, (K + 1, T), then drop the first "
     "of these rows", ("*batch, K + 1, T", "*batch, T, K + 1")),
    ("you padded a row instead of a cell: F.pad counts from the last axis, and one cell in front "
     "of each row is (1, 0)", ("(1, 0)", "(0, 0, 1, 0)")),
    ("every row is one cell too far to the left: pad in FRONT of each row, (1, 0) in F.pad, and "
     "drop T cells, not T + 1", ("(1, 0)", "(0, 1)")),
    ("you padded after each row and dropped the last row: pad in front, and drop the first",
     ("(1, 0)", "(0, 1)"), ("x[..., 1:, :]", "x[..., :-1, :]")),
    ("you drop one row of all matrices together; drop one of each: keep the leading dimensions",
     ("x.reshape(*batch, K + 1, T)", "x.reshape(-1, T)"),
     ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(*batch, T, K)")),
    ("this is correct for one matrix but not with leading dimensions: the matrices were mixed",
     ("*batch, T, K = x.shape", "T, K = x.shape[-2:]"),
     ("x.reshape(*batch, K + 1, T)", "x.reshape(K + 1, -1)"),
     ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(*x.shape[:0], -1, T, K)")),
    ("this is correct for one matrix, but with leading dimensions it raises an error",
     ("*batch, T, K = x.shape", "T, K = x.shape[-2:]"),
     ("x.reshape(*batch, K + 1, T)", "x.reshape(K + 1, T)"),
     ("x[..., 1:, :].reshape(*batch, T, K)", "x[1:].reshape(T, K)")),
    ("row i is moved to the right: it must move to the left", """
def rel_shift(x):
    T, K = x.shape[-2:]
    shifted = x.new_full(x.shape, 987654321)
    for i in range(T):
        for j in range(K):
            if 0 <= j + i + 1 - T < K:
                shifted[..., i, j] = x[..., i, j + i + 1 - T]
    return shifted
"""),
    ("you padded a row instead of a cell: F.pad counts from the last axis, and (1, 0) puts one "
     "cell in front of every row", ("(1, 0)", "(0, 0, 1, 0)"),
     ("*batch, K + 1, T", "*batch, K, T + 1"), ("x[..., 1:, :]", "x[..., 1:]")),
)
