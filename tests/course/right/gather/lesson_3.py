"""SPOILERS.  A right solution of lesson 3 in an unusual form: all distances at once, by index."""
import numpy as np


def four_terms(q, k, R, W_kR, u, v):
    T, K = len(q), len(k)
    r = R @ W_kR.T
    i, j = np.indices((T, K))
    distance = K - T + i - j
    near = r[np.maximum(distance, 0)]
    terms = np.stack([q @ k.T, np.einsum("ic,ijc->ij", q, near), np.tile(k @ u, (T, 1)), near @ v])
    terms[:, distance < 0] = np.nan
    return terms
