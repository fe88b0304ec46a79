"""SPOILERS.  Mistakes in the exercises of lesson 4 (see mistakes.py)."""
ONE_MATRIX = "this is correct for one matrix, but with leading dimensions it raises an error"
PADDED_ROW = "you padded a row, not a cell: in F.pad (1, 0) puts one cell in front of every row"
TABLE = {}
TABLE["rel_shift_by_index"] = (
    ("the index exceeds the end of the row: use the last column there, distance 0",
     "n = j + T - 1 - i"),
    ("gather runs along the wrong axis, the rows: the columns are the last one, -1",
     "return x.gather(-2, n.expand(x.shape))"),
    (ONE_MATRIX, "return x.gather(-1, n)"),
    ("the index wraps around at the end: clamp it to the last column", "n = (j + T - 1 - i) % K"),
    ("future cells are 0: they must repeat the value of distance 0",
     "return x.gather(-1, n.expand(x.shape)).tril(K - T)"),
    ("row i is moved by i; move it by T - 1 - i (i would be correct for ascending distances)",
     "n = (j + i).clamp(max=K - 1)",
     "return x.gather(-1, n.expand(x.shape)).where(j + i < K, 987654321)"),
    ("row i is moved by m - i: use T instead of m (they are equal only by chance)",
     "n = (j + K - T - i).clamp(0, K - 1)",
     "return x.gather(-1, n.expand(x.shape)).where(n == j + K - T - i, 987654321)"),
    ("every matrix became the first one",
     "return x.reshape(-1, T, K)[0].gather(-1, n).expand(x.shape)"),
    ("test_the_gather_keeps_the_dtype", ("(T, device=x.device", "(T"),
     ("(K, device=x.device", "(K")),
    ("the index is the distance itself; but distances descend: distance d is in column K - 1 - d",
     "n = (K - T + i - j).clamp(min=0)"),
)
TABLE["rel_shift"] = (
    ("the rows went to the right, into the future: did you drop the first row or the last? The "
     "first row holds only values that are not needed", ("1:, :", ":-1, :")),
    ("nothing has moved: view the padded values as rows of T",
     ("x = x...", "x = x.reshape(*batch, T, K + 1)"), ("1:, :", ":, 1:")),
    ("the sizes do not fit: (T, K + 1) padded values are as many as (K + 1, T); without one row of "
     "T they are T x K", ("x = x...", "x = x.reshape(*batch, T + 1, K)")),
    ("transpose swaps the axes; reshape keeps the values in their order",
     ("x = x...", "x = x.transpose(-1, -2)")),
    ("the padded values keep their rows: view them as rows of T, (K + 1, T), and drop the first",
     ("x = x...", "x = x.reshape(*batch, T, K + 1)")),
    (PADDED_ROW, ("1, 0", "0, 0, 1, 0")),
    ("every row is one cell too far to the left: pad in FRONT of each row, (1, 0) in F.pad, and "
     "drop T cells, not T + 1", ("1, 0", "0, 1")),
    ("you padded after each row and dropped the last row: pad in front, and drop the first",
     ("1, 0", "0, 1"), ("1:, :", ":-1, :")),
    ("you drop one row of all matrices together; drop one of each: keep the leading dimensions",
     ("x = x...", "x = x.reshape(-1, T)"), "return x[1:].reshape(*batch, T, K)"),
    ("this is correct for one matrix but not with leading dimensions: the matrices were mixed",
     ("x = x...", "x = x.reshape(K + 1, -1)"), "return x[1:].reshape(-1, T, K)"),
    (ONE_MATRIX, ("x = x...", "x = x.reshape(K + 1, T)"), "return x[1:].reshape(T, K)"),
    ("row i is moved to the right: it must move to the left",
     ("x = F...", "x = [F.pad(x[..., i, :], (T - 1 - i, 0), value=987654321) for i in range(T)]"),
     ("x = x...", "x = torch.stack([row[..., :K] for row in x], -2)"), "return x"),
    (PADDED_ROW, ("1, 0", "0, 0, 1, 0"), ("x = x...", "x = x.reshape(*batch, K, T + 1)"),
     ("1:, :", "1:")),
)
