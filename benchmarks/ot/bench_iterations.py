"""Iterations that Sinkhorn's algorithm needs from each start: digits, colors, high dimension."""

import concurrent.futures
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ott.initializers.linear import initializers

from benchmarks import harness
from benchmarks.ot import problems
from jaxkit import ot

ON_REQUEST = True

PRIOR, REGRESSION, OBJECTIVE = "untrained prior", "fit_regression", "fit_objective"
COLD, GAUSSIAN, PAPER = "ott, cold", "ott, Gaussian", "regression as in the paper"
OURS = (PRIOR, REGRESSION, OBJECTIVE)
INITIALIZERS = {
    COLD: initializers.DefaultInitializer(),
    GAUSSIAN: initializers.GaussianInitializer(),
    "ott, subsample": initializers.SubsampleInitializer(32),
    "ott, sorting": initializers.SortingInitializer(),
}
RIVALS = (*INITIALIZERS, PAPER)


class Case(NamedTuple):
    """``epsilon`` in units of the mean cost if ``relative``; ``directions`` of the slices."""

    make: object  # (seed, count) -> stacked Pair
    epsilon: float
    relative: bool
    train: int
    test: int
    directions: int
    size: str


def _digits(epsilon, train=50, test=60, directions=100):
    size = f"8 x 8 points, {train} pairs to fit, {test} to test, {directions} directions"
    return Case(problems.digits, epsilon, False, train, test, directions, size)


def _colors(train, test, pixels, directions):
    make = functools.partial(problems.colors, pixels=pixels)
    size = f"{pixels} pixels, {train} pairs to fit, {test} to test, {directions} directions"
    return Case(make, 0.005, True, train, test, directions, size)


def _noise(train, test, points):
    make = functools.partial(problems.noise_to_digits, points=points)
    size = f"{points} points in 64 dimensions, {train} pairs to fit, {test} to test, 128 directions"
    return Case(make, 0.1, True, train, test, 128, size)


CASES = {
    "smoke": {"colors": _colors(2, 2, 16, 6)},
    "short": {
        "digits, epsilon 0.1": _digits(0.1),
        "digits, epsilon 0.01": _digits(0.01),
        "colors": _colors(3, 3, 128, 99),
    },
    "full": {
        "digits, epsilon 0.1": _digits(0.1),
        "digits, epsilon 0.01": _digits(0.01),
        "digits, epsilon 0.003": _digits(0.003),
        "colors": _colors(16, 16, 256, 99),
        "noise to digits": _noise(16, 16, 128),
    },
}
SEEDS = {"smoke": (1,), "short": range(1, 6), "full": range(1, 11)}


def run(context):
    cases, seeds = CASES[context.form], SEEDS[context.form]
    for name in context.track(list(cases)):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # one solve takes one core
            first = _measure(cases[name], seeds[0])  # compiles
            found = [first, *pool.map(functools.partial(_measure, cases[name]), seeds[1:])]
        about = {"case": f"Sinkhorn, {name}", "size": cases[name].size, "seeds": seeds}

        def compare(ours, rivals, metric, unit, better, key, about=about, found=found):
            values = {x: [result[x][key] for result in found] for x in (*ours, *rivals)}
            return harness.versus(ours, values, **about, metric=metric, unit=unit, better=better)

        for level in problems.LEVELS:
            every = level == problems.LEVELS[1]
            yield from compare(
                OURS if every else OURS[:2],
                RIVALS if every else RIVALS[:2],
                f"iterations to {level:g}",
                "1",
                "down",
                level,
            )
        yield from compare(OURS, (GAUSSIAN, PAPER), "R2 of the potential", "1", "up", "r2")
        metric = "error of the cost after half a step"
        yield from compare(OURS, (GAUSSIAN,), metric, "1", "down", "half")


def _measure(case, seed):
    """Returns ``{start: {level: iterations, "r2": .., "half": ..}}``, means over the test pairs."""
    pairs = case.make(seed, case.train + case.test)
    if pairs.a is None:
        equal = jnp.full(pairs.x.shape[:2], 1 / pairs.x.shape[1])
        pairs = pairs._replace(a=equal, b=equal)
    epsilon = case.epsilon * (problems.mean_cost(pairs) if case.relative else 1)
    pairs, costs = problems.labelled(pairs, epsilon)
    fit = jax.tree.map(lambda x: x[: case.train], pairs)
    test, costs = jax.tree.map(lambda x: x[case.train :], (pairs, costs))
    starts = {name: _from_ott(start, test, epsilon) for name, start in INITIALIZERS.items()}
    key = jax.random.key(seed)
    theta = ot.tight_frame(key, case.directions, pairs.x.shape[-1])
    free = jax.random.normal(key, theta.shape)
    free = free / jnp.linalg.norm(free, axis=1, keepdims=True)
    as_published = {"prior": "zero", "weights": "atoms", "absolute_ridge": True}
    for name, params in {
        PRIOR: ot.untrained(theta, epsilon),
        REGRESSION: ot.fit_regression(fit, theta, epsilon),
        OBJECTIVE: ot.fit_objective(fit, theta, epsilon)[0],
        PAPER: ot.fit_regression(fit, free, epsilon, **as_published),
    }.items():
        starts[name] = _from_params(params, test, epsilon)
    found = {}
    for name, f in starts.items():
        errors, r2, half = _evaluate(test, f, epsilon)
        found[name] = problems.iterations(errors)
        found[name] |= {"r2": float(jnp.mean(r2)), "half": float(jnp.mean(abs(half / costs - 1)))}
    return found


@functools.partial(jax.jit, static_argnums=0)
def _from_ott(initializer, pairs, epsilon):
    """Returns the potentials an initializer of ott starts from, in ott's convention."""
    return jax.lax.map(
        lambda pair: initializer(problems.problem(pair, epsilon), lse_mode=True)[0], pairs
    )


@jax.jit
def _from_params(params, pairs, epsilon):
    """Returns the predicted potentials in ott's convention."""
    return jax.vmap(lambda pair: ot.to_ott(ot.predict_potential(params, pair), pair.a, epsilon))(
        pairs
    )


@jax.jit
def _evaluate(pairs, starts, epsilon):
    """Returns the errors of each iteration, R2 of the start, and the cost after half a step."""

    def one(x):
        pair, start = x
        init = start, jnp.zeros_like(start)
        out = problems.solve(pair, epsilon, level=min(problems.LEVELS), init=init)
        f = ot.from_ott(start, pair.a, epsilon)
        label, f = (z - jnp.sum(pair.a * z) for z in (pair.f, f))
        r2 = 1 - jnp.sum(pair.a * (label - f) ** 2) / jnp.sum(pair.a * label**2)
        plan = ot.plan_from_f(f, pair.x, pair.y, pair.a, pair.b, epsilon)
        squares = jnp.sum(jnp.square(pair.x[:, None] - pair.y), -1)
        return out.errors, r2, jnp.sum(plan * squares)

    return jax.lax.map(one, (pairs, starts))
