"""SPOILERS.  A right solution of lesson 3 in an unusual form: a view of another layout, mended in
place; the distances by rows that roll.
"""
import numpy as np


def four_terms(queries, keys, R, W, u, v):
    T, K = queries.shape[0], keys.shape[0]
    out = np.empty((T, 4, K))
    projected = np.einsum("dc,kc->kd", W, R)[::-1]
    out[:, 0], out[:, 2] = queries.dot(keys.T), keys.dot(u)
    for i, row in enumerate(out):
        rolled = np.roll(projected, i + 1 - T, axis=0)
        row[1], row[3] = rolled.dot(queries[i]), rolled.dot(v)
        row[:, K - T + i + 1 :] *= np.nan
    return np.swapaxes(out, 0, 1)
