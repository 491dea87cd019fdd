"""The potentials of all slices at once, against the 1-D solver of ott-jax and POT's loop."""

import jax
import jax.numpy as jnp
import numpy as np
import ot as pot
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import univariate

from benchmarks import harness
from jaxkit import ot

# Points of each side and directions; the rivals run where the third entry says so.
SIZES = {
    "smoke": ((8, 3, True),),
    "short": ((64, 100, True), (1000, 100, True), (4000, 100, False)),
    "full": (
        *((64, 100, True), (1000, 100, True), (4000, 100, True)),
        *((16000, 100, False), (64000, 100, False), (1000, 400, False), (1000, 1600, False)),
    ),
}
ROUNDS = {"smoke": 1, "short": 3, "full": 11}
METHOD, SORT = "ot.duals_1d", "the sorts alone"


def run(context):
    rounds = ROUNDS[context.form]
    for n, directions, rivals in context.track(SIZES[context.form]):
        x, y = (
            jnp.asarray(
                np.random.default_rng(side).normal(side, 1 + side, (directions, n)), "float32"
            )
            for side in (0, 1)
        )
        calls = {METHOD: (jax.vmap(ot.duals_1d), x, y), SORT: (_sorts, x, y)}
        if rivals:
            calls["ott.univariate"] = (ott_duals, x, y)
        measured = harness.measure(calls, rounds=rounds, compiles=0)
        times = {name: [1e3 * s for s in result.run_s] for name, result in measured.items()}
        if rivals:
            double = np.asarray(x, "float64"), np.asarray(y, "float64")
            slow = harness.alternate({"POT emd_1d": lambda z=double: _pot(*z)}, range(rounds))
            times |= {name: [1e3 * s for s in seconds] for name, seconds in slow.items()}
        about = {
            "case": "potentials of all slices",
            "size": f"n = m = {n}, {directions} directions",
        }
        yield from harness.versus(
            (METHOD,),
            times,
            **about,
            metric="run time",
            unit="ms",
            better="down",
            seeds=range(rounds),
        )
        if rivals:
            worst = {name: [_violation(fun, x, y)] for name, fun in _PAIRS.items()}
            metric = "largest f + g - cost, of the largest cost"
            yield from harness.versus(
                (METHOD,), worst, **about, metric=metric, unit="1", better="down"
            )


def _sorts(x, y):
    return jnp.sort(x), jnp.sort(y)


def ott_duals(x, y):
    problem = linear_problem.LinearProblem(pointcloud.PointCloud(x.T, y.T))
    out = univariate.north_west_solver(problem)
    return out.dual_a, out.dual_b


def _pot(x, y):
    """Sends each slice through POT's solver, whose plan gives no potentials."""
    return [pot.lp.emd_1d(a, b, dense=False) for a, b in zip(x, y, strict=True)]


_PAIRS = {METHOD: jax.vmap(ot.duals_1d), "ott.univariate": ott_duals}


def _violation(fun, x, y):
    """Returns how far float32 potentials are from feasible, as a share of the slice's top cost."""
    f, g, x, y = (np.asarray(z, "float64") for z in (*jax.jit(fun)(x, y), x, y))
    worst = 0.0
    for slice_f, slice_g, slice_x, slice_y in zip(f, g, x, y, strict=True):
        costs = np.square(np.subtract.outer(slice_x, slice_y))
        worst = max(worst, np.max(np.add.outer(slice_f, slice_g) - costs) / np.max(costs))
    return worst
