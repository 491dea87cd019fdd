"""Bounds against exact solvers, the rounding against its definition, limits."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import logsumexp

from jaxkit import ot

X, Y, F = contract.normal(16, 3), contract.normal(8, 3), contract.normal(16)
KEEP_X = jnp.arange(16) % 5 != 3
KEEP_Y = jnp.arange(8) != 2
A = jnp.where(KEEP_X, jnp.abs(contract.normal(16, seed=1)), 0)
B = jnp.where(KEEP_Y, jnp.abs(contract.normal(8, seed=1)), 0)
A, B = A / A.sum(), B / B.sum()
COSTS = np.sum((np.float64(X)[:, None] - np.float64(Y)) ** 2, -1)
BOUNDS = jax.jit(functools.partial(ot.certificate, chunk=3))

test_contract = contract.function(
    contract.Case(
        "certificate",
        lambda: (
            lambda f, x, y, a, b, e, mx, my: ot.certificate(
                f, x, y, a, b, e, mask_x=mx, mask_y=my, chunk=3
            ),
            (F, X, Y, A, B, jnp.float32(0.3), KEEP_X, KEEP_Y),
        ),
        mask={6: (0, 1, 3), 7: (2, 4)},
    )
)


@functools.cache
def _exact():
    """Returns the exact cost by a linear program, and its potential of x."""
    n, m = COSTS.shape
    sums = np.zeros((n + m, n * m))
    for i in range(n):
        sums[i, i * m : (i + 1) * m] = 1
    for j in range(m):
        sums[n + j, j::m] = 1
    weights = np.concatenate([np.float64(A) / np.sum(np.float64(A)), B / np.sum(np.float64(B))])
    result = linprog(COSTS.ravel(), A_eq=sums, b_eq=weights)
    return result.fun, result.eqlin.marginals[:n]


@functools.cache
def _entropic(epsilon):
    """Returns the entropic cost by Sinkhorn's iteration in float64, and its potential of x."""
    a, b, f = np.float64(A), np.float64(B), np.zeros(16)
    for _ in range(3000):
        g = -epsilon * logsumexp((f[:, None] - COSTS) / epsilon, axis=0, b=a[:, None])
        f = -epsilon * logsumexp((g[:, None] - COSTS.T) / epsilon, axis=0, b=b[:, None])
    return a @ f + b @ g, f


def _rounded(plan, a, b):
    """Returns the nearest plan with exact marginals, by the three steps of the paper."""
    plan = plan * np.minimum(a / np.where(plan.sum(1) > 0, plan.sum(1), 1), 1)[:, None]
    plan = plan * np.minimum(b / np.where(plan.sum(0) > 0, plan.sum(0), 1), 1)
    rows, columns = a - plan.sum(1), b - plan.sum(0)
    return plan + np.outer(rows, columns) / rows.sum()


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("start", ["any", "zero", "exact"])
def test_exact_cost_lies_between_the_bounds(epsilon, start):
    """For any f and any eps, against a linear program; weights of zero are among both."""
    cost, best = _exact()
    f = {"any": F, "zero": jnp.zeros(16), "exact": jnp.float32(best)}[start]
    bounds = BOUNDS(f, X, Y, A, B, epsilon)
    assert bounds.lower <= cost + 1e-5
    assert cost - 1e-5 <= bounds.upper
    if start == "exact":
        assert bounds.lower == pytest.approx(cost, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 3.0])
@pytest.mark.parametrize("start", ["any", "zero", "best"])
def test_entropic_cost_lies_between_its_bounds(epsilon, start):
    """For any f, against Sinkhorn in float64; at its solution both bounds meet."""
    cost, best = _entropic(epsilon)
    f = {"any": F, "zero": jnp.zeros(16), "best": jnp.float32(best)}[start]
    bounds = BOUNDS(f, X, Y, A, B, epsilon)
    assert bounds.entropic_lower <= cost + 1e-5
    assert cost - 1e-5 <= bounds.entropic_upper
    if start == "best":
        assert bounds.entropic_lower == pytest.approx(cost, abs=1e-5)
        assert bounds.entropic_upper == pytest.approx(cost, abs=1e-4)
        assert bounds.marginal_error < 1e-4
    else:
        assert bounds.marginal_error > 1e-2


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_upper_bounds_are_of_the_plan_rounded_by_its_definition(epsilon):
    """Both costs and the error of the rows, from a whole plan in float64."""
    a, b = np.float64(A), np.float64(B)
    g = -epsilon * logsumexp((np.float64(F)[:, None] - COSTS) / epsilon, axis=0, b=a[:, None])
    plan = a[:, None] * b * np.exp((np.float64(F)[:, None] + g - COSTS) / epsilon)
    rounded = _rounded(plan, a, b)
    np.testing.assert_allclose(rounded.sum(1), a, atol=1e-6)
    some = rounded > 0
    divergence = np.sum(rounded[some] * np.log(rounded[some] / np.outer(a, b)[some]))
    bounds = BOUNDS(F, X, Y, A, B, epsilon)
    assert bounds.upper == pytest.approx(np.sum(rounded * COSTS), rel=1e-5)
    want = np.sum(rounded * COSTS) + epsilon * divergence
    assert bounds.entropic_upper == pytest.approx(want, rel=1e-5)
    assert bounds.marginal_error == pytest.approx(np.abs(plan.sum(1) - a).sum(), rel=1e-5)
    assert bounds.entropic_lower == pytest.approx(a @ np.float64(F) + b @ g, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1.0])
def test_the_rounded_plan_has_exact_marginals(epsilon):
    """Of a cost h(x) + k(y) every such plan costs the same, so an error of a row would show."""

    def cost(x, y):
        return jnp.sin(3 * x[0]) + jnp.cos(2 * y[1])

    want = np.sin(3 * np.float64(X[:, 0])) @ np.float64(A)
    want += np.cos(2 * np.float64(Y[:, 1])) @ np.float64(B)
    bounds = jax.jit(functools.partial(ot.certificate, cost=cost))(F, X, Y, A, B, epsilon)
    assert bounds.upper == pytest.approx(want, abs=1e-6)
    assert bounds.lower == pytest.approx(want, abs=1e-6)


def test_a_shift_is_certified_exactly():
    """y = x + t: the untrained potential proves |t|^2 from below, and its plan from above."""
    x = jnp.round(4 * X) + jnp.arange(16.0)[:, None]
    t = jnp.array([[1.0, 2.0, 2.0]])

    @jax.jit
    def run(x, y, epsilon):
        f = ot.predict_potential(ot.untrained(jnp.eye(3), 0.0), ot.Pair(x, y))
        return ot.certificate(f, x, y, None, None, epsilon)

    for epsilon in (0.0, 0.01):
        bounds = run(x, x + t, epsilon)
        assert bounds.lower == pytest.approx(9, rel=1e-5)
        assert bounds.upper == pytest.approx(9, rel=1e-5)


def test_large_epsilon_gives_the_cost_of_the_product():
    """The plan is a b^T, which needs no rounding."""
    bounds = BOUNDS(F, X, Y, A, B, 1e5)
    assert bounds.upper == pytest.approx(np.float64(A) @ COSTS @ np.float64(B), rel=1e-4)
    assert bounds.marginal_error < 1e-4


def test_chunks_change_nothing():
    """At an optimal f too, where rounding decides whether there are ties at eps = 0."""
    f = jnp.float32(_exact()[1])
    runs = [jax.jit(functools.partial(ot.certificate, chunk=chunk)) for chunk in (None, 1, 8, 100)]
    for epsilon in (0.0, 0.3):
        whole, *others = [jnp.stack(run(f, X, Y, A, B, epsilon)) for run in runs]
        for got in others:
            np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-5)


def test_memory_is_of_one_chunk():
    """With n = m = 1024 and chunks of 16 no buffer of n m numbers exists."""
    n, chunk = 1024, 16
    points = jax.ShapeDtypeStruct((n, 2), jnp.float32)

    def run(f, x, y, chunk):
        return ot.certificate(f, x, y, None, None, 0.1, chunk=chunk)

    def temp(chunk):
        fun = jax.jit(functools.partial(run, chunk=chunk))
        compiled = fun.lower(jax.ShapeDtypeStruct((n,), jnp.float32), points, points).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 4

    assert temp(None) > n * n
    assert temp(chunk) < 8 * chunk * n


def test_a_potential_of_minus_infinity_is_no_source():
    """As ott has at weight zero: at eps = 0 it ties with no other."""
    whole = jnp.stack(ot.certificate(F, X, Y, A, B, 0.0))
    f = jnp.where(A > 0, F, -jnp.inf)
    np.testing.assert_allclose(jnp.stack(ot.certificate(f, X, Y, A, B, 0.0)), whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"f": F[:3]}, ValueError, r"f must have shape \[n\] with n=16, got \(3,\)"),
        ({"epsilon": -1.0}, ValueError, r"epsilon must be in \[0, inf\), got -1.0"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"cost": "far"}, TypeError, "cost must be a function, got str"),
    ],
)
def test_bad_input_is_named(change, error, match):
    """Each message names the argument and what it got."""
    args = {"f": F, "x": X, "y": Y, "a": A, "b": B, "epsilon": 0.1, **change}
    with pytest.raises(error, match=match):
        ot.certificate(**args)


def test_bad_values_give_nan():
    """Weights of either side that do not sum to 1 leave no bound that looks like one."""
    for a, b in ((2 * A, B), (A, 2 * B)):
        bounds = BOUNDS(F, X, Y, a, b, 0.3)
        assert jnp.isnan(jnp.stack(bounds[:4])).all()
