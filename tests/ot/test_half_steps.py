"""Half steps against logsumexp and minima in float64, and their derivatives, masks and memory."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxkit import ot

X, Y, F = contract.normal(16, 3), contract.normal(8, 3), contract.normal(16)
KEEP_X = jnp.arange(16) % 5 != 3
KEEP_Y = jnp.arange(8) != 2
A = jnp.where(KEEP_X, jnp.abs(contract.normal(16, seed=1)), 0)
A = A / A.sum()
EPSILON = jnp.float32(0.3)
HALF = functools.partial(ot.soft_g, chunk=3)

test_contract = contract.function(
    contract.Case(
        "soft_g",
        lambda: (
            lambda f, x, y, a, e, mx, my: HALF(f, x, y, a, e, mask_x=mx, mask_y=my),
            (F, X, Y, A, EPSILON, KEEP_X, KEEP_Y),
        ),
        mask={5: (0, 1, 3), 6: (2,)},
    ),
    contract.Case(
        "soft_f",
        lambda: (
            lambda g, x, y, b, e, mx, my: ot.soft_f(g, x, y, b, e, mask_x=mx, mask_y=my),
            (F, Y, X, A, EPSILON, KEEP_Y, KEEP_X),
        ),
        mask={5: (1,), 6: (0, 2, 3)},
    ),
)


def _costs(x=X, y=Y):
    return np.sum((np.float64(x)[:, None] - np.float64(y)) ** 2, -1)


def _answer(f, a, costs, epsilon):
    """Returns the half step in float64, for positive weights only."""
    score = (np.float64(f)[:, None] - costs)[np.asarray(a) > 0]
    if epsilon == 0:
        return -score.max(0)
    return -epsilon * logsumexp(score / epsilon, axis=0, b=np.float64(a[a > 0])[:, None])


@pytest.mark.parametrize("chunk", [None, 1, 3, 8, 100])
def test_half_steps_are_soft_minima(chunk):
    """Both equal -eps logsumexp in float64, minima for eps = 0, in chunks that divide m or not."""
    a = np.asarray(A)
    soft_g = jax.jit(functools.partial(ot.soft_g, chunk=chunk))
    soft_f = jax.jit(functools.partial(ot.soft_f, chunk=chunk))
    for epsilon in (0.0, 1e-3, 0.3, 30.0):
        want = _answer(F, a, _costs(), epsilon)
        np.testing.assert_allclose(soft_g(F, X, Y, A, epsilon), want, rtol=1e-5, atol=1e-5)
        want = _answer(F, a, _costs(X, X), epsilon)
        np.testing.assert_allclose(soft_f(F, X, X, A, epsilon), want, rtol=1e-5, atol=1e-5)


def test_soft_f_is_soft_g_of_the_other_side():
    """A cost that is not symmetric gets its arguments in the order (x, y) from both."""

    def cost(x, y):
        return jnp.sum(jnp.square(x - 2 * y))

    costs = _costs(X, 2 * Y)
    want = _answer(F, np.asarray(A), costs, 0.3)
    np.testing.assert_allclose(ot.soft_g(F, X, Y, A, 0.3, cost=cost), want, rtol=1e-5)
    want = _answer(F[:8], np.full(8, 1 / 8), costs.T, 0.3)
    np.testing.assert_allclose(ot.soft_f(F[:8], X, Y, None, 0.3, cost=cost), want, rtol=1e-5)


def test_two_c_transforms_do_not_fall_and_a_third_changes_nothing():
    """f <= f^cc where x has weight, and both have one c-transform: the bound of a certificate."""
    g = ot.soft_g(F, X, Y, A, 0.0)
    f = ot.soft_f(g, X, Y, None, 0.0)
    assert jnp.all((f >= F - 1e-6)[A > 0])
    np.testing.assert_allclose(ot.soft_g(f, X, Y, A, 0.0), g, atol=1e-5)
    assert np.max(np.float64(f)[:, None] + np.float64(g) - _costs()) < 1e-5


@pytest.mark.parametrize("chunk", [None, 3])
def test_derivatives_are_exact_at_weight_zero_too(chunk):
    """In f, shares of the plan; in a, by hand: a zero weight has a slope as any other."""
    with jax.enable_x64(True):
        x, y, f, a = (jnp.asarray(z, jnp.float64) for z in (X, Y, F, A))
        a = a / a.sum()

        @jax.jit
        def slopes(f, a):
            return jax.grad(
                lambda f, a: ot.soft_g(f, x, y, a, 0.3, chunk=chunk).sum(), argnums=(0, 1)
            )(f, a)

        by_f, by_a = slopes(f, a)
    powers = np.exp((np.float64(F)[:, None] - _costs()) / 0.3)
    totals = np.asarray(a) @ powers
    np.testing.assert_allclose(by_f, -(np.asarray(a)[:, None] * powers / totals).sum(1), atol=1e-12)
    # Weights are divided by their sum, hence the 1.
    np.testing.assert_allclose(by_a, -0.3 * (powers / totals - 1).sum(1), rtol=1e-10)
    assert np.any((np.asarray(a) == 0) & (np.abs(by_a) > 1))


@pytest.mark.parametrize("chunk", [None, 3])
def test_costs_of_many_coordinates_keep_their_digits_far_from_the_origin(chunk):
    """In 12 coordinates around 100, by products of centered points, as differences in float64."""
    x, y = contract.normal(16, 12) + 100, contract.normal(8, 12) + 100

    @jax.jit
    def run(x, y):
        def total(x, y):
            g = ot.soft_g(F, x, y, None, 3.0, chunk=chunk)
            return g.sum(), g

        return jax.grad(total, argnums=(0, 1), has_aux=True)(x, y)

    (by_x, by_y), got = run(x, y)
    gaps = np.float64(x)[:, None] - np.float64(y)
    costs = np.sum(gaps**2, -1)
    np.testing.assert_allclose(got, _answer(F, np.full(16, 1 / 16), costs, 3.0), rtol=1e-5)
    shares = np.exp((np.float64(F)[:, None] - costs) / 3)
    slopes = 2 * gaps * (shares / shares.sum(0))[:, :, None]
    np.testing.assert_allclose(by_x, slopes.sum(1), atol=1e-4)
    np.testing.assert_allclose(by_y, -slopes.sum(0), atol=1e-4)


def test_derivative_of_a_minimum_is_shared_among_ties():
    """For eps = 0 two x as far from y each carry half of the slope, also if rounding parts them."""
    slope = jax.jit(jax.grad(lambda f, x, y: ot.soft_g(f, x, y, None, 0.0)[0]))
    for near, far, middle in ((0.0, 2.0, 1.0), (0.1, 0.7, 0.4)):
        x, y = jnp.array([[near], [far], [9.0]]), jnp.array([[middle]])
        np.testing.assert_array_equal(slope(jnp.zeros(3), x, y), [-0.5, -0.5, 0])


def test_derivative_through_a_potential_is_right():
    """As finite differences in float64; ott's implicit differentiation raises on this jax."""
    with jax.enable_x64(True):
        x, y, theta = (jnp.asarray(z, jnp.float64) for z in (X, Y, jnp.eye(3)))
        params = ot.untrained(theta, 0.3)

        @jax.jit
        def value(x):
            return jnp.sum(ot.soft_g(ot.predict_potential(params, ot.Pair(x, y)), x, y, None, 0.3))

        slope = jax.jit(jax.grad(value))(x)
        step = 1e-6 * jnp.asarray(np.random.default_rng(0).normal(size=x.shape))
        want = (value(x + step) - value(x - step)) / 2
        assert jnp.sum(slope * step) == pytest.approx(float(want), rel=1e-6)


def test_memory_is_of_one_chunk():
    """With n = m = 1024 and chunks of 16 no buffer of n m numbers exists, in derivatives too."""
    n, chunk = 1024, 16
    args = jax.ShapeDtypeStruct((n,), jnp.float32), *[jax.ShapeDtypeStruct((n, 2), jnp.float32)] * 2

    def temp(chunk, grad):
        def total(f, x, y):
            return ot.soft_g(f, x, y, None, 0.1, chunk=chunk).sum()

        fun = jax.grad(total, argnums=(0, 1, 2)) if grad else total
        compiled = jax.jit(fun).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 4

    assert temp(None, grad=False) > n * n
    assert temp(chunk, grad=False) < 4 * chunk * n
    assert temp(chunk, grad=True) < 12 * chunk * n


def test_atoms_that_do_not_count_meet_no_cost():
    """A cost that is NaN at 0 and at NaN changes neither values nor derivatives."""

    def cosine(x, y):
        return 1 - jnp.vdot(x, y) / jnp.sqrt(jnp.vdot(x, x) * jnp.vdot(y, y))

    def total(f, x, y, a, mask_x, mask_y):
        masks = {"mask_x": mask_x, "mask_y": mask_y}
        return jnp.sum(ot.soft_g(f, x, y, a, 0.3, cost=cosine, **masks))

    kept = F[KEEP_X], X[KEEP_X], Y[KEEP_Y], A[KEEP_X], None, None
    whole = F, jnp.where(KEEP_X[:, None], X, 0), jnp.where(KEEP_Y[:, None], Y, jnp.nan), A
    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    want, slopes = run(*kept)
    got, padded = run(*whole, KEEP_X, KEEP_Y)
    assert got == pytest.approx(float(want), rel=1e-6)
    for slope, all_of_it, keep in zip(slopes, padded, (KEEP_X, KEEP_X, KEEP_Y), strict=True):
        np.testing.assert_allclose(all_of_it[keep], slope, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(all_of_it[~keep], 0)


def test_a_potential_of_minus_infinity_counts_as_no_atom():
    """Values and all derivatives are those without the atom; with no atom left, inf and 0."""
    out = jnp.arange(16) == 4
    f = jnp.where(out, -jnp.inf, F)

    @jax.jit
    def run(f, x, y, a, epsilon):
        return jax.grad(lambda *args: ot.soft_g(*args).sum(), argnums=(0, 1, 2, 4))(
            f, x, y, a, epsilon
        ), ot.soft_g(f, x, y, a, epsilon)

    slopes, got = run(f, X, Y, A, EPSILON)
    b = jnp.where(out, 0, A)  # a share of weight less moves g by a constant
    want = ot.soft_g(F, X, Y, b / b.sum(), EPSILON) - EPSILON * jnp.log(b.sum())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert slopes[0][4] == 0
    for slope in slopes:
        assert jnp.isfinite(slope).all()
    slopes, got = run(jnp.where(A > 0, -jnp.inf, F), X, Y, A, EPSILON)
    np.testing.assert_array_equal(got, jnp.inf)
    for slope in slopes:
        assert jnp.isfinite(slope).all()


def test_geodesic_cost_has_finite_derivatives_at_its_ends():
    """A point meets itself and its opposite."""
    x = jnp.eye(3)
    y = jnp.concatenate([x, -x])

    def total(x, y):
        return jnp.sum(ot.soft_g(jnp.zeros(3), x, y, None, 0.2, cost=ot.geodesic))

    for slope in jax.jit(jax.grad(total, argnums=(0, 1)))(x, y):
        assert jnp.isfinite(slope).all()


def test_costs_of_ott_are_costs():
    """An object of ott is a function of two points, and needs nothing else."""
    costs = pytest.importorskip("ott.geometry.costs")
    want = _answer(F, np.asarray(A), np.sqrt(_costs()), 0.3)
    got = ot.soft_g(F, X, Y, A, 0.3, cost=costs.Euclidean())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_half_precision_is_rounded_once():
    """bfloat16 input is computed in float32, and equals that result rounded."""
    half = [z.astype(jnp.bfloat16) for z in (F, X, Y)]
    got = ot.soft_g(*half, None, 0.1)
    want = ot.soft_g(*[z.astype(jnp.float32) for z in half], None, 0.1)
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"f": jnp.arange(16)}, TypeError, "f must be real floating, got int32"),
        ({"f": F[:3]}, ValueError, r"f must have shape \[n\] with n=16, got \(3,\)"),
        ({"y": Y[:, :2]}, ValueError, r"y must have shape \[m, d\] with d=3, got \(8, 2\)"),
        ({"a": A[:3]}, ValueError, r"a must have shape \[n\] with n=16, got \(3,\)"),
        ({"epsilon": -0.1}, ValueError, r"epsilon must be in \[0, inf\), got -0.1"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"chunk": 1.5}, TypeError, "chunk must be a static whole number, got 1.5"),
        ({"mask_y": jnp.ones(8)}, TypeError, "mask_y must be bool, got float32"),
        ({"cost": 2.0}, TypeError, "cost must be a function, got float"),
    ],
)
def test_bad_input_is_named(change, error, match):
    """Each message names the argument and what it got."""
    args = {"f": F, "x": X, "y": Y, "a": A, "epsilon": 0.1, **change}
    with pytest.raises(error, match=match):
        ot.soft_g(**args)


def test_names_of_the_other_side_in_messages():
    """soft_f speaks of g and b."""
    with pytest.raises(ValueError, match=r"g must have shape \[m\] with m=8, got \(16,\)"):
        ot.soft_f(F, X, Y, None, 0.1)
    with pytest.raises(ValueError, match=r"b must have shape"):
        ot.soft_f(F[:8], X, Y, A, 0.1)


@pytest.mark.parametrize("change", ["negative", "nan", "sum", "epsilon"])
def test_bad_values_give_nan(change):
    """Weights that are none, and a traced negative strength, show in every entry."""
    bad = {"negative": A.at[0].set(-A[0]), "nan": A.at[0].set(jnp.nan), "sum": 2 * A, "epsilon": A}
    epsilon = jnp.float32(-0.1 if change == "epsilon" else 0.1)
    assert jnp.isnan(ot.soft_g(F, X, Y, bad[change], epsilon)).all()
