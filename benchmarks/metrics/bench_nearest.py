"""Nearest neighbors: time against scikit-learn and scipy, memory and error against all pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.metrics import samples
from jaxkit import metrics

# Rows of each sample, features, neighbors.
SIZES = {
    "smoke": [(64, 4, 1)],
    "short": [(2000, 64, 1), (7000, 64, 1), (7000, 64, 5), (7000, 4, 1)],
    "full": [(2000, 64, 1), (50_000, 64, 1), (50_000, 64, 5), (50_000, 4, 1)],
}
TREES = {"smoke": 64, "short": 2000, "full": 2000}  # rows up to which trees search 64 features
ROUNDS = {"smoke": 2, "short": 5, "full": 9}
MEMORY_ROWS = {"smoke": 256, "short": 50_000, "full": 50_000}
ERROR_ROWS = {"smoke": 64, "short": 1000, "full": 4000}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 6)}
OURS, PAIRS = "jaxkit", "all pairs in jax"
BRUTE, TREE, SCIPY = "scikit-learn, brute", "scikit-learn, kd_tree", "scipy, cKDTree"


def run(context):
    rounds = ROUNDS[context.form]
    stages = [f"{rows} x {d}, k = {k}" for rows, d, k in SIZES[context.form]]
    for stage, (rows, d, k) in zip(context.track(stages), SIZES[context.form], strict=True):
        calls = _calls(*_clouds(rows, d), k)
        if d == 64 and rows > TREES[context.form]:  # they take a minute
            calls = {name: calls[name] for name in (OURS, BRUTE)}
        harness.alternate(calls, range(1))  # compiles, warms up
        seconds = harness.alternate(calls, range(rounds))
        yield from harness.versus(
            (OURS,),
            {name: 1e3 * np.array(times) for name, times in seconds.items()},
            case=f"nearest, {stage}",
            size="noisy digits, or their first principal components",
            metric="time",
            unit="ms",
            better="down",
            seeds=range(rounds),
        )
    yield from _memory(MEMORY_ROWS[context.form])
    yield from _errors(ERROR_ROWS[context.form], SEEDS[context.form])


def _clouds(rows, d):
    """Returns two samples of digits, in the coordinates of largest variance."""
    x = samples.digits(2 * rows)
    if d < 64:
        x = x @ np.linalg.svd(x - x.mean(0), full_matrices=False)[2][:d].T
    return x[::2].copy(), x[1::2].copy()


def _calls(x, y, k):
    from scipy.spatial import cKDTree
    from sklearn.neighbors import NearestNeighbors

    ours = jax.jit(functools.partial(metrics.nearest, k=k))
    placed = jnp.asarray(x), jnp.asarray(y)

    def by_sklearn(algorithm):
        search = NearestNeighbors(n_neighbors=k, algorithm=algorithm, n_jobs=-1)
        return search.fit(y).kneighbors(x)

    return {
        OURS: lambda: ours(*placed),
        BRUTE: functools.partial(by_sklearn, "brute"),
        TREE: functools.partial(by_sklearn, "kd_tree"),
        SCIPY: lambda: cKDTree(y).query(x, k, workers=-1),
    }


def _memory(rows):
    shape = jax.ShapeDtypeStruct((rows, 64), jnp.float32)

    def temporary(fun):
        compiled = jax.jit(fun).lower(shape, shape).compile()
        return [compiled.memory_analysis().temp_size_in_bytes / 2**20]

    yield from harness.versus(
        (OURS,),
        {OURS: temporary(metrics.nearest), PAIRS: temporary(_all_pairs)},
        case="nearest, memory",
        size=f"{rows} x {rows} rows of 64",
        metric="scratch memory",
        unit="MiB",
        better="down",
    )


def _errors(rows, seeds):
    """Measures distances of rows to copies of themselves that moved by about 0.01."""
    both = {OURS: [], PAIRS: []}
    for seed in seeds:
        y = samples.digits(rows)
        x = (y + 1e-3 * np.random.default_rng(seed).normal(size=y.shape)).astype(np.float32)
        want = np.linalg.norm(np.float64(x) - np.float64(y), axis=1)
        for name, fun in ((OURS, metrics.nearest), (PAIRS, _all_pairs)):
            got = np.float64(jax.jit(fun)(jnp.asarray(x), jnp.asarray(y))[0][:, 0])
            both[name].append(np.max(np.abs(got / want - 1)))
    yield from harness.versus(
        (OURS,),
        both,
        case="nearest, rows close to each other",
        size=f"{rows} x {rows} rows of 64, at distances of 0.01",
        metric="largest relative error",
        unit="1",
        better="down",
        seeds=seeds,
    )


def _all_pairs(x, y):
    """Returns what a user would write: the whole matrix, and its smallest entries."""
    squares = jnp.sum(x**2, axis=1)[:, None] - 2 * x @ y.T + jnp.sum(y**2, axis=1)[None]
    values, indices = jax.lax.top_k(-squares, 1)
    return jnp.sqrt(jnp.maximum(-values, 0)), indices
