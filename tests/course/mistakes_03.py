"""SPOILERS.  Mistakes in the exercises of lesson 3 (see mistakes.py)."""
from course.mistakes import mistake

TABLE = {}
TABLE["four_terms"] = (
    mistake("future keys have no distance, so NaN stands there, in all four terms: query i is key "
      "m + i and sees the keys 0 ... m + i", ("range(m + i + 1)", "range(K)"),
      ("distance = m + i - j", "distance = m + i - j")),
    mistake("the query's own key is still NaN: distance 0 is seen as well",
      ("range(m + i + 1)", "range(m + i)"), ("distance = m + i - j", "distance = m + i - j")),
    mistake("the distance is i - j, so the memory is forgotten: query i is key m + i",
      ("distance = m + i - j", "distance = i - j"), bug=3),
    mistake("R is read backwards: R[d] belongs to distance d",
      ("distance = m + i - j", "distance = K - 1 - (m + i - j)"), bug=2),
    mistake("you index R by the key; it must be by the distance, m + i - j",
      ("distance = m + i - j", "distance = j")),
    mistake("the distance is one too large: a query is 0 back from its own key",
      ("distance = m + i - j", "distance = min(K - 1, m + i - j + 1)")),
    mistake("T is taken for m: query i is key m + i, where m = K - T",
      ("distance = m + i - j", "distance = T + i - j")),
    mistake("u and v are exchanged: u goes with the content, v with the position",
      ("u @ k[j]", "v @ k[j]"), ("v @ (W_kR @", "u @ (W_kR @"), bug=8),
    mistake("u stands where v should: (d) has its own bias", ("v @ (W_kR @", "u @ (W_kR @"), bug=8),
    mistake("W_kR is forgotten: R_d alone is no key yet",
      ("q[i] @ (W_kR @ R[distance])", "q[i] @ R[distance]"),
      ("v @ (W_kR @ R[distance])", "v @ R[distance]")),
    mistake("v stands where q_i should: (b) belongs to this query", ("q[i] @ (W", "v @ (W")),
    mistake("u is added to the query here: (a) is without it, u . k_j is term (c)",
      ("q[i] @ k[j]", "(q[i] + u) @ k[j]")),
    mistake("the terms are divided by sqrt(C): that comes later, and covers all four at once",
      ("return terms", "terms[:] /= C ** 0.5\n    return terms")),
    mistake("the query is in (c), too: u takes the query's place there, u . k_j alone",
      ("u @ k[j]", "(q[i] + u) @ k[j]")),
)
