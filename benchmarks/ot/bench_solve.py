"""Time of a whole solve: from the slices, cold, from a Gaussian, and by POT, by size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ot as pot
from ott.initializers.linear import initializers
from ott.solvers.linear import sinkhorn

from benchmarks import harness
from benchmarks.ot import problems
from jaxkit import ot

SIZES = {"smoke": (16,), "short": (64, 1024), "full": (64, 128, 256, 512, 1024, 4096)}
ROUNDS = {"smoke": 1, "short": 5, "full": 5}
DIRECTIONS, EPSILON, LEVEL = 99, 0.005, 1e-2  # epsilon in units of the mean cost
HALF, SOLVED, EXACT = "untrained, half a step", "untrained, then ott", "POT emd2"
BEST_SLICE, MEAN_PLAN = "POT min-SWGG", "POT mean plan of the slices"


def run(context):
    rounds = ROUNDS[context.form]
    for n in context.track(SIZES[context.form]):
        stack = problems.colors(1, rounds + 1, n)
        theta = ot.tight_frame(jax.random.key(0), DIRECTIONS, 3)
        params = ot.untrained(theta, EPSILON * problems.mean_cost(stack))
        # The first pair compiles and warms up; then one pair a round.
        pairs = [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(rounds + 1)]
        found = {name: [] for name in SOLVERS}
        calls = {
            name: functools.partial(next, _turns(solver, params, pairs, found[name]))
            for name, solver in SOLVERS.items()
        }
        harness.in_pairs(calls, iter)
        seconds = harness.alternate(calls, range(rounds))
        about = {"case": "one pair of color sets", "size": f"{n} pixels, to {LEVEL:g}"}
        about |= {"seeds": range(rounds), "better": "down"}
        times = {name: [1e3 * s for s in values] for name, values in seconds.items()}
        yield from harness.versus(OURS, times, **about, metric="time of a solve", unit="ms")
        exact = np.array(found.pop(EXACT)[1:])
        costs = {name: found.pop(name)[1:] for name in (BEST_SLICE, MEAN_PLAN)}
        costs |= {
            name: [_upper(params, pair, f) for pair, f in zip(pairs[1:], fs[1:], strict=True)]
            for name, fs in found.items()
        }
        above = {name: np.array(values) / exact - 1 for name, values in costs.items()}
        metric = "cost of the rounded plan above the exact one"
        yield from harness.versus(OURS, above, **about, metric=metric, unit="1")


def _turns(solver, params, pairs, found):
    """Yields the results for one pair after the other, and keeps them."""
    for pair in pairs:
        found.append(jax.block_until_ready(solver(params, pair)))
        yield


def _solve_sliced(params, pair):
    f = ot.predict_potential(params, pair)
    start = ot.warm_start(
        f, None, params.epsilon, b=jnp.full(len(pair.y), 1 / len(pair.y), f.dtype)
    )
    return _sinkhorn(params, pair, None, start)


def _solve_ott(initializer, params, pair):
    return _sinkhorn(params, pair, initializer, None)


def _sinkhorn(params, pair, initializer, start):
    """Returns f; the error is looked at every ten iterations, as ott does by itself."""
    solver = sinkhorn.Sinkhorn(
        threshold=LEVEL, max_iterations=problems.MOST, initializer=initializer
    )
    out = solver(problems.problem(pair, params.epsilon), init=start)
    return ot.from_ott(out.f, None, params.epsilon)


def _exact(params, pair):
    """Returns the exact cost."""
    del params
    x, y = _double(pair)
    equal = np.full(len(x), 1 / len(x))
    return pot.emd2(equal, equal, pot.dist(x, y), numItermax=10**7)


def _sliced(solver, params, pair):
    """Returns the cost of a plan that POT makes of the plans of our slices."""
    projections = np.asarray(params.theta, "float64").T
    return solver(*_double(pair), projections=projections, dense=False)[1]


def _double(pair):
    return (np.asarray(z, "float64") for z in (pair.x, pair.y))


@jax.jit
def _upper(params, pair, f):
    """Returns what the plan of f costs after rounding to exact marginals."""
    return ot.certificate(f, pair.x, pair.y, None, None, params.epsilon).upper


OURS = (HALF, SOLVED)
SOLVERS = {
    HALF: jax.jit(ot.predict_potential),
    SOLVED: jax.jit(_solve_sliced),
    "ott, cold": jax.jit(functools.partial(_solve_ott, None)),
    "ott, Gaussian": jax.jit(functools.partial(_solve_ott, initializers.GaussianInitializer())),
    EXACT: _exact,
    BEST_SLICE: functools.partial(_sliced, pot.min_sliced_transport_plan),
    MEAN_PLAN: functools.partial(_sliced, pot.expected_sliced_plan),
}
