"""SPOILERS.  A right solution of lesson 3 in an unusual form: Python numbers, one at a time."""
import math

import numpy as np


def four_terms(q, k, R, W_kR, u, v):
    def dot(a, b):
        return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))

    T, K = len(q), len(k)
    table = [[[math.nan] * K for _ in range(T)] for _ in range(4)]
    for j in range(K):
        for i in range(T):
            back = i + K - T - j
            if back < 0:
                continue
            r = [dot(row, R[back]) for row in W_kR]
            for n, (a, b) in enumerate([(q[i], k[j]), (q[i], r), (u, k[j]), (v, r)]):
                table[n][i][j] = dot(a, b)
    return np.array(table)
