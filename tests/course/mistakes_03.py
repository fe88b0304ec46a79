"""SPOILERS.  Mistakes in the exercise of lesson 3 (see mistakes.py)."""
from itertools import combinations

from course.mistakes import M

IN_TERMS = "distance = m + i - j"
RETURN = "return terms"


def distance(sentence, wrong, bug=0):
    """Another row of R."""
    return M("four_terms", sentence, (IN_TERMS, f"distance = {wrong}"), bug=bug)


def seen(sentence, keys, wrong=IN_TERMS):
    """Other keys are filled in, those of `keys`."""
    return M("four_terms", sentence, ("range(m + i + 1)", keys), (IN_TERMS, wrong))


def scaled(sentence, terms, width):
    """Some terms are divided by the root of a width."""
    return M("four_terms", sentence,
             (RETURN, f"terms[{terms}] /= {width} ** 0.5\n    return terms"))


FUTURE = ("future keys have no distance, so NaN stands there, in all four terms: query i is key "
          "m + i and sees the keys 0 ... m + i")
FORGOTTEN = ("the memory is forgotten, so cells that count are still NaN: query i is key m + i and "
             "sees the keys up to that one")
ORDER = "the right numbers in the wrong place: the order of the terms is (a), (b), (c), (d)"
NOT_YET = "the terms are divided by sqrt(C): that comes later, and covers all four at once"
NOT_FILLED = "was never entered: all its cells are still NaN"
VECTOR = ("a cell gets a whole vector: the products are not summed over the width (@ multiplies "
          "and sums)")
AXES = ("W_kR (C, D) makes a key of width C from a row of R, which is of width D: multiply it from "
        "the left, W_kR @ R[d]")

TABLE = (
    # ---- which cells are filled
    seen(FUTURE, "range(K)"),
    M("four_terms", FUTURE, ("np.full((4, T, K), np.nan)", "np.zeros((4, T, K))")),
    *(M("four_terms", FUTURE, (RETURN, f"terms[{which}] = np.nan_to_num(terms[{which}])\n    "
                                       "return terms")) for which in ("::2", "1::2")),
    seen("the query's own key is still NaN: distance 0 is seen as well", "range(m + i)"),
    seen(FORGOTTEN, "range(i + 1)", "distance = i - j"),
    seen("one future key is seen: query i is key m + i, the last that it sees",
         "range(min(K, m + i + 2))"),
    seen("T is taken for m: query i is key m + i, where m = K - T", "range(min(K, T + i + 1))"),
    seen("NaN stands in the past and numbers in the future: query i sees the keys 0 ... m + i",
         "range(m + i + 1, K)"),
    seen("the memory is left out: the keys 0 ... m - 1 are seen as well", "range(m, m + i + 1)"),
    *(M("four_terms", f"term ({name}) {NOT_FILLED}", (f"terms[{n}, i, j] =", "_ ="))
      for n, name in enumerate("abcd")),
    M("four_terms", "the axes are (4, T, K), queries before keys: yours are exchanged",
      (RETURN, "return terms.transpose(0, 2, 1)")),
    M("four_terms", "the four terms come first: (4, T, K)",
      (RETURN, "return terms.transpose(1, 2, 0)")),
    M("four_terms", "the four terms are added up: return them one by one, (4, T, K)",
      (RETURN, "return terms.sum(0)")),
    # ---- which distance
    distance("the distance is i - j, so the memory is forgotten: query i is key m + i", "i - j",
             bug=3),
    distance("R is read backwards: R[d] belongs to distance d", "K - 1 - (m + i - j)", bug=2),
    distance("the distance is j - (m + i), its sign is wrong: R[-1] is the largest one",
             "j - m - i"),
    distance("you index R by the key; it must be by the distance, m + i - j", "j"),
    distance("you index R by the query; it must be by the distance, m + i - j", "m + i"),
    distance("you index R by the query; it must be by the distance, m + i - j", "i"),
    distance("the distance is one too large: a query is 0 back from its own key",
             "min(K - 1, m + i - j + 1)"),
    distance("a distance goes beyond the last row of R, K - 1: query i is key m + i, 0 back from "
             "itself", "m + i - j + 1"),
    distance("the distance is one too small: a query is 0 back from its own key", "m + i - j - 1"),
    distance("T is taken for m: query i is key m + i, where m = K - T", "T + i - j"),
    distance("you count from the last query, K - 1; each counts from itself, m + i", "K - 1 - j"),
    # ---- which vector
    M("four_terms", "u and v are exchanged: u goes with the content, v with the position",
      ("u @ k[j]", "v @ k[j]"), ("v @ (W_kR @", "u @ (W_kR @"), bug=8),
    M("four_terms", "u stands where v should: (d) has its own bias", ("v @ (W_kR @", "u @ (W_kR @"),
      bug=8),
    M("four_terms", "v stands where u should: (c) has its own bias", ("u @ k[j]", "v @ k[j]"),
      bug=8),
    M("four_terms", "W_kR is forgotten: R_d alone is no key yet", ("q[i] @ (W_kR @ R[distance])",
      "q[i] @ R[distance]"), ("v @ (W_kR @ R[distance])", "v @ R[distance]")),
    M("four_terms", AXES, ("q[i] @ (W_kR @ R[distance])", "q[i] @ (W_kR.T @ R[distance])")),
    M("four_terms", AXES, ("q[i] @ (W_kR @ R[distance])", "q[i] @ (R[distance] @ W_kR)")),
    M("four_terms", "u stands where q_i should: (a) belongs to this query", ("q[i] @ k", "u @ k")),
    M("four_terms", "v stands where q_i should: (b) belongs to this query",
      ("q[i] @ (W", "v @ (W")),
    M("four_terms", "the query meets the distance in place of the key: (a) is q_i . k_j",
      ("q[i] @ k[j]", "q[i] @ (W_kR @ R[distance])")),
    M("four_terms", "the query's number is taken for the key's: key j, not key i",
      ("q[i] @ k[j]", "q[i] @ k[i]"), ("u @ k[j]", "u @ k[i]")),
    M("four_terms", "the memory's keys stand in front: key j is k[j]",
      ("q[i] @ k[j]", "q[i] @ k[j - m]"), ("u @ k[j]", "u @ k[j - m]")),
    M("four_terms", "u is added to the query here: (a) is without it, u . k_j is term (c)",
      ("q[i] @ k[j]", "(q[i] + u) @ k[j]")),
    M("four_terms", "v is added to the query here: (b) is without it, v has a term of its own, (d)",
      ("q[i] @ (W", "(q[i] + v) @ (W")),
    *(M("four_terms", ORDER, (RETURN, f"terms[[{m}, {n}]] = terms[[{n}, {m}]]\n    return terms"))
      for m, n in combinations(range(4), 2)),
    # ---- which number
    scaled(NOT_YET, ":", "C"),
    scaled(NOT_YET, "::2", "C"),
    scaled(NOT_YET, "1::2", "C"),
    M("four_terms", "the terms are divided by sqrt(D): they are not divided at all here",
      (RETURN, "return terms / R.shape[1] ** 0.5"), bug=9),
    M("four_terms", VECTOR, ("q[i] @ k[j]", "q[i] * k[j]")),
    M("four_terms", VECTOR, ("u @ k[j]", "u * k[j]")),
    M("four_terms", "test_arguments_stay_as_they_were", (RETURN, "R *= 2\n    return terms")),
)
