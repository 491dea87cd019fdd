"""Iterations that Sinkhorn's algorithm needs from each start: digits, colors, high dimension."""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ott.initializers.linear import initializers

from benchmarks import harness
from benchmarks.ot import network, problems
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
NETWORK, NETWORK_FRESH = "network on the same pairs", "network on fresh pairs of 1,200 images"
RIVALS = (*INITIALIZERS, PAPER, NETWORK, NETWORK_FRESH)
FEW = COLD, GAUSSIAN, NETWORK, NETWORK_FRESH
ITERATIONS, R2 = "iterations to {:g}", "R2 of the potentials"
HALF = "error of the cost after half a step"


class Case(NamedTuple):
    """``epsilon`` in units of the mean cost if ``relative``; ``directions`` of the slices."""

    make: object  # (seed, count) -> stacked Pair
    epsilon: float
    relative: bool
    train: int
    test: int
    directions: int
    size: str
    steps: int | None = None  # of the networks, which need one set of points


def _digits(epsilon, steps=None, train=50, test=60, directions=100):
    size = f"8 x 8 points, {train} pairs to fit, {test} to test, {directions} directions"
    size += f", network of {steps} steps" if steps else ""
    return Case(problems.digits, epsilon, False, train, test, directions, size, steps)


def _colors(train, test, pixels, directions):
    make = functools.partial(problems.colors, pixels=pixels)
    size = f"{pixels} pixels, {train} pairs to fit, {test} to test, {directions} directions"
    return Case(make, 0.005, True, train, test, directions, size)


def _noise(train, test, points):
    make = functools.partial(problems.noise_to_digits, points=points)
    size = f"{points} points in 64 dimensions, {train} pairs to fit, {test} to test, 128 directions"
    return Case(make, 0.1, True, train, test, 128, size)


CASES = {
    "smoke": {"digits": _digits(0.1, 2, 2, 2, 4)},
    "short": {
        "digits, epsilon 0.1": _digits(0.1),
        "colors": _colors(3, 3, 128, 99),
        "digits, epsilon 0.01": _digits(0.01, 500),  # with 50 pairs as good as 1,500
    },
    "full": {
        "digits, epsilon 0.1": _digits(0.1, 1500),
        "colors": _colors(16, 16, 256, 99),
        "digits, epsilon 0.01": _digits(0.01, 1500),
        "digits, epsilon 0.003": _digits(0.003, 1500),
        "noise to digits": _noise(16, 16, 128),
    },
}
IMAGES = 1200  # that fresh pairs are of, in the full form
SEEDS = {"smoke": (1,), "short": range(1, 6), "full": range(1, 11)}


def run(context):
    cases, seeds = CASES[context.form], SEEDS[context.form]
    networks, seconds = {}, {}
    learners = [name for name in cases if cases[name].steps]
    for label in (NETWORK, NETWORK_FRESH)[: 2 if context.form == "full" else 1]:
        for_each, seconds[label] = _networks([cases[x] for x in learners], seeds, label)
        for name, predicted in zip(learners, for_each, strict=True):
            networks.setdefault(name, {})[label] = predicted
    # The first seed of two sizes at once, since compiling takes one core, as one solve does.
    calls = {
        f"{name}, seed {seed}": functools.partial(
            _measure, cases[name], seed, {x: f[i] for x, f in networks.get(name, {}).items()}
        )
        for i, seed in enumerate(seeds)
        for name in cases
    }
    found = harness.in_pairs(calls, context.track)
    for name, case in cases.items():
        results = [found[f"{name}, seed {seed}"] for seed in seeds]
        about = {"case": f"Sinkhorn, {name}", "size": case.size}
        compare = functools.partial(_compare, results, **about, seeds=seeds)
        for level in problems.LEVELS:
            every = level == problems.LEVELS[1]
            ours, rivals = (OURS, RIVALS) if every else (OURS[:2], FEW)
            yield from compare(ours, rivals, ITERATIONS.format(level), "down")
        yield from compare(OURS, (GAUSSIAN, PAPER, *FEW[2:]), R2, "up")
        yield from compare(OURS, FEW[1:], HALF, "down")
        if name in learners:
            values = {x: [s] for x, s in {**_seconds(case, seeds[-1]), **seconds}.items()}
            metric = "time to fit, with the labels that it needs"
            yield from harness.versus(
                OURS[1:], values, **about, metric=metric, unit="s", better="down"
            )


def _compare(results, ours, rivals, metric, better, **about):
    names = [x for x in (*ours, *rivals) if x in results[0]]
    values = {x: [result[x][metric] for result in results] for x in names}
    return harness.versus(ours, values, **about, metric=metric, unit="1", better=better)


def _pairs(case, seed):
    """Returns all pairs of a seed, those to fit first, and epsilon."""
    pairs = case.make(seed, case.train + case.test)
    if pairs.a is None:
        equal = jnp.full(pairs.x.shape[:2], 1 / pairs.x.shape[1])
        pairs = pairs._replace(a=equal, b=equal)
    return pairs, case.epsilon * (problems.mean_cost(pairs) if case.relative else 1)


def _part(case, tree):
    """Returns what is to fit and what is to test of a stack."""
    fit = jax.tree.map(lambda x: x[: case.train], tree)
    return fit, jax.tree.map(lambda x: x[case.train :], tree)


def _networks(cases, seeds, label):
    """Returns the predictions ``[seeds, test pairs, n]`` of networks for each case, and seconds.

    The networks of all cases and seeds train in one program; the time is that of one.
    """
    sides, tests = [], []
    for case in cases:
        for seed in seeds:
            fit, test = _part(case, jax.device_get(_pairs(case, seed)[0]))
            tests.append((test.a, test.b))
            if label == NETWORK_FRESH:
                count = case.train + case.test
                sides.append((problems.other_digits(seed, count, case.train, IMAGES), None))
            else:
                sides.append((fit.a, fit.b))
    stack = functools.partial(jax.tree.map, lambda *x: jnp.asarray(np.stack(x)))
    arguments = (
        jnp.asarray(np.tile(seeds, len(cases))),
        *stack(*sides),
        jnp.asarray(test.x[0]),
        jnp.asarray(np.repeat([case.epsilon for case in cases], len(seeds)), jnp.float32),
    )
    train = network.train.lower(*arguments, steps=cases[0].steps).compile()
    start = time.perf_counter()
    params = jax.block_until_ready(train(*arguments))
    seconds = (time.perf_counter() - start) / len(tests)
    predicted = jax.jit(jax.vmap(network.predict))(params, *stack(*tests))
    return predicted.reshape(len(cases), len(seeds), *predicted.shape[1:]), seconds


def _seconds(case, seed):
    """Returns the times of our fits, which are compiled."""
    pairs, epsilon = _pairs(case, seed)
    theta = _directions(case, seed, pairs.x.shape[-1])
    start = time.perf_counter()
    pairs, _ = jax.block_until_ready(problems.labelled(pairs, epsilon))
    share = case.train / (case.train + case.test)  # of the labels that fits need
    labels = share * (time.perf_counter() - start)
    fit, _ = _part(case, pairs)
    calls = {
        REGRESSION: lambda: ot.fit_regression(fit, theta, epsilon),
        OBJECTIVE: lambda: ot.fit_objective(fit, theta, epsilon),
    }
    (regression,), (objective,) = harness.alternate(calls, range(1)).values()
    return {REGRESSION: labels + regression, OBJECTIVE: objective}


def _directions(case, seed, dim):
    return ot.tight_frame(jax.random.key(seed), case.directions, dim)


def _measure(case, seed, networks):
    """Returns ``{start: {metric: value}}``, means over the test pairs; R2 is of all together."""
    pairs, epsilon = _pairs(case, seed)
    (fit, _), (test, costs) = _part(case, problems.labelled(pairs, epsilon))
    costs = np.asarray(costs)
    starts = {name: _from_ott(start, test, epsilon) for name, start in INITIALIZERS.items()}
    starts |= {name: _to_ott(f, test.a, epsilon) for name, f in networks.items()}
    theta = _directions(case, seed, pairs.x.shape[-1])
    free = jax.random.normal(jax.random.key(seed), theta.shape)
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
        errors, (left, total), half = jax.device_get(_evaluate(test, f, epsilon))
        counts = problems.iterations(errors)
        found[name] = {ITERATIONS.format(level): count for level, count in counts.items()}
        found[name][R2] = float(1 - np.sum(left) / np.sum(total))
        found[name][HALF] = float(np.mean(np.abs(half / costs - 1)))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _from_ott(initializer, pairs, epsilon):
    """Returns the potentials an initializer of ott starts from, in ott's convention."""
    return jax.lax.map(
        lambda pair: initializer(problems.problem(pair, epsilon), lse_mode=True)[0], pairs
    )


_to_ott = jax.jit(jax.vmap(ot.to_ott, (0, 0, None)))


@jax.jit
def _from_params(params, pairs, epsilon):
    """Returns the predicted potentials in ott's convention."""
    return jax.vmap(lambda pair: ot.to_ott(ot.predict_potential(params, pair), pair.a, epsilon))(
        pairs
    )


@jax.jit
def _evaluate(pairs, starts, epsilon):
    """Returns for each pair the errors of each iteration, squares, and the cost after half a step.

    The squares, weighted and centered, are of what the start lacks of the label, and of the label.
    """

    def one(x):
        pair, start = x
        init = start, jnp.zeros_like(start)
        out = problems.solve(pair, epsilon, level=min(problems.LEVELS), init=init)
        f = ot.from_ott(start, pair.a, epsilon)
        label, f = (z - jnp.sum(pair.a * z) for z in (pair.f, f))
        squares = jnp.sum(pair.a * (label - f) ** 2), jnp.sum(pair.a * label**2)
        plan = ot.plan_from_f(f, pair.x, pair.y, pair.a, pair.b, epsilon)
        costs = jnp.sum(jnp.square(pair.x[:, None] - pair.y), -1)
        return out.errors, squares, jnp.sum(plan * costs)

    return jax.lax.map(one, (pairs, starts))
