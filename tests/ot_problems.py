"""Problems on the line in NumPy float64, hard ones, and their solution by linear programming."""

import functools

import numpy as np


@functools.cache
def hard(n, m, num, seed=0):
    """Returns ``(x, y, a, b, p)`` stacked: ties of weights, duplicates, zero weights, powers."""
    rng = np.random.default_rng((seed, n, m))
    problems = []
    for k in range(num):
        x, y = rng.normal(size=n), rng.normal(size=m)
        if k % 2:  # points on a grid coincide within a side and between them
            x, y = x.round() + 0.0, y.round() + 0.0  # no -0.0
        a, b = rng.random(n), rng.random(m)
        if k % 3:  # weights in small fractions meet in their sums
            a, b = rng.integers(0, 3, n) + 0.0, rng.integers(0, 3, m) + 0.0
            a[rng.integers(n)] += 1
            b[rng.integers(m)] += 1
        problems.append((x, y, a / a.sum(), b / b.sum(), (1.0, 1.5, 2.0, 3.0)[k % 4]))
    return tuple(np.array(z) for z in zip(*problems, strict=True))


def cost_matrix(x, y, p=2.0):
    """Returns the costs ``|x_i - y_j| ** p``."""
    return np.abs(np.subtract.outer(x, y)) ** p


def optimum(c, a, b):
    """Returns the least transport cost for costs ``c``, by the simplex of HiGHS."""
    from scipy.optimize import linprog

    n, m = c.shape
    rows = np.kron(np.eye(n), np.ones(m))
    columns = np.kron(np.ones(n), np.eye(m))
    result = linprog(
        c.ravel(), A_eq=np.vstack([rows, columns])[:-1], b_eq=np.concatenate([a, b])[:-1]
    )
    assert result.status == 0, result.message
    return result.fun
