"""The potentials of one dimension against linear programs, exact cases and their symmetries."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import ot_problems
import pytest

from jaxkit import ot

X, Y = contract.normal(8, seed=1), contract.normal(8, seed=2)
A = jnp.array([0.1, 0.2, 0.0, 0.3, 0.0, 0.1, 0.2, 0.1])
B = jnp.array([0.2, 0.1, 0.1, 0.0, 0.2, 0.1, 0.1, 0.2])
MASK = jnp.array([True, True, False, True, False, True, True, True])

DUALS = jax.jit(ot.duals_1d)

test_contract = contract.function(
    contract.Case("duals_1d", lambda: (ot.duals_1d, (X, Y, A, B))),
    contract.Case("equal_weights", lambda: (ot.duals_1d, (X, Y)), public="duals_1d"),
    contract.Case(
        "masks",
        lambda: (
            lambda x, y, a, m: ot.duals_1d(x, y, a, mask_x=m, mask_y=m, cost=ot.power(3)),
            (X, Y, A, MASK),
        ),
        public="duals_1d",
        mask={3: (0, 1, 2)},
    ),
)


def _excess(f, g, c):
    """Returns by how much the pair breaks its constraints at most."""
    return np.max(np.add.outer(np.float64(f), np.float64(g)) - c)


@pytest.mark.parametrize(("n", "m", "num"), [(7, 5, 120), (6, 6, 60), (1, 4, 12), (4, 1, 12)])
def test_the_pair_is_feasible_and_reaches_the_optimum(n, m, num):
    """Ties, duplicates and zero weights included; costs |.|^p with p from 1 to 3."""
    problems = ot_problems.hard(n, m, num)
    with jax.enable_x64(True):
        pairs = jax.jit(
            jax.vmap(
                lambda x, y, a, b, p: ot.duals_1d(x, y, a, b, cost=lambda x, y: jnp.abs(x - y) ** p)
            )
        )(*map(jnp.asarray, problems))
    for f, g, x, y, a, b, p in zip(*pairs, *problems, strict=True):
        c = ot_problems.cost_matrix(x, y, p)
        assert _excess(f, g, c) <= 1e-12
        assert a @ np.asarray(f) + b @ np.asarray(g) == pytest.approx(
            ot_problems.optimum(c, a, b), abs=1e-12
        )


@pytest.mark.parametrize(("n", "m"), [(9, 9), (9, 4), (4, 9), (6, 9), (1, 3), (3, 1), (1, 1)])
def test_no_weights_are_equal_weights(n, m):
    """The paths known beforehand are those found from weights, and they reach the optimum."""
    x, y = np.random.default_rng(n).normal(size=n), np.random.default_rng(m).normal(size=m)
    a, b = np.full(n, 1 / n), np.full(m, 1 / m)
    with jax.enable_x64(True):
        f, g = map(np.asarray, DUALS(x, y))
        want = DUALS(x, y, a, b)
    np.testing.assert_allclose(f, want[0], atol=1e-12)
    np.testing.assert_allclose(g, want[1], atol=1e-12)
    c = ot_problems.cost_matrix(x, y)
    assert _excess(f, g, c) <= 1e-12
    assert np.mean(f) + np.mean(g) == pytest.approx(ot_problems.optimum(c, a, b), abs=1e-12)


@pytest.mark.parametrize("tol", [0.0, 1e-3, 0.3])
def test_any_tolerance_of_ties_is_feasible(tol):
    """A wrong one costs optimality, never feasibility."""
    *problems, _ = ot_problems.hard(7, 5, 40)
    fun = jax.jit(
        jax.vmap(lambda x, y, a, b, tol: ot.duals_1d(x, y, a, b, tol=tol), (0,) * 4 + (None,))
    )
    with jax.enable_x64(True):
        pairs = fun(*map(jnp.asarray, problems), tol)
    for f, g, x, y in zip(*pairs, *problems[:2], strict=True):
        assert _excess(f, g, ot_problems.cost_matrix(x, y)) <= 1e-12


def test_without_tolerance_exact_ties_are_ties():
    """Weights 1/8 add up exactly in float32, so tol=0 gives the pair of known equal weights."""
    a = jnp.full(8, 0.125)
    for got, want in zip(DUALS(X, Y, a, a, tol=0.0), DUALS(X, Y), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_float32_is_feasible_and_optimal_to_rounding():
    """For 2,000 atoms: the constraints hold to 1e-6 of the largest cost, the value to 1e-6."""
    rng = np.random.default_rng(0)
    x, y = np.float32(rng.normal(size=2000)), np.float32(rng.normal(size=1500) + 1)
    a, b = rng.random(2000) * (rng.random(2000) < 0.5), rng.random(1500)
    a, b = a / a.sum(), b / b.sum()
    f, g = DUALS(x, y, jnp.float32(a), jnp.float32(b))
    c = ot_problems.cost_matrix(np.float64(x), np.float64(y))
    assert _excess(f, g, c) <= 1e-6 * c.max()
    ot_lib = pytest.importorskip("ot")
    want = ot_lib.emd2_1d(np.float64(x), np.float64(y), a, b)
    assert a @ np.float64(f) + b @ np.float64(g) == pytest.approx(want, abs=1e-6 * c.max())


def test_float32_errs_by_rounding_of_the_values_and_of_steps():
    """For 1,000 atoms: half an ulp of a value, and what independent roundings of steps add up to.

    With t = (x' - x) (|x' - y| + |x - y|), the size of a step of f, the two differences to y, their
    sum, the product, the mean over both tie rules and the correction of the sum err by at most
    u t sqrt(6) together. By Hoeffding's inequality errors of mean 0 leave 6 u sqrt(6 sum t^2) with
    probability 3e-8. One percent is for products of roundings.
    """
    x, y = (
        np.sort(np.random.default_rng(side).normal(side, 1 + side, (20, 1000)).astype(np.float32))
        for side in (0, 1)
    )
    f, g = jax.jit(jax.vmap(ot.duals_1d))(x, y)
    x, y, u = np.float64(x), np.float64(y), 2.0**-24
    for got, z, w, first in ((f, x, y, 0 * x[:, :1]), (g, y, x, (x[:, :1] - y[:, :1]) ** 2)):
        # Equal weights: rank meets rank, so the partner of a step is that of its start or its end.
        gaps = np.stack([z[:, 1:] - w[:, :-1], z[:, 1:] - w[:, 1:]])
        gaps_low = np.stack([z[:, :-1] - w[:, :-1], z[:, :-1] - w[:, 1:]])
        want = np.cumsum(np.hstack([first, np.mean(gaps**2 - gaps_low**2, axis=0)]), axis=1)
        sizes = np.diff(z) * np.mean(np.abs(gaps) + np.abs(gaps_low), axis=0)
        squares = np.cumsum(np.hstack([first, sizes]) ** 2, axis=1)
        bound = 1.01 * u * (np.abs(want) + 6 * np.sqrt(6 * squares))
        assert np.all(np.abs(np.float64(got) - want) <= bound)


def test_shifts_and_scalings_are_exact():
    """y = s x + t with the same weights has f = (1 - s) x^2 - 2 t x, up to a constant."""
    x = np.random.default_rng(0).normal(size=12)
    a = np.random.default_rng(1).dirichlet(np.ones(12))
    with jax.enable_x64(True):
        x = jnp.asarray(x)
        for s, t in ((1.0, 3.0), (2.5, -1.0), (0.3, 0.0), (1.0, 0.0)):
            y = jnp.roll(s * x + t, 5)
            want = (1 - s) * x**2 - 2 * t * x
            for pair in ((None, None), (jnp.asarray(a), jnp.roll(jnp.asarray(a), 5))):
                f, g = DUALS(x, y, *pair)
                np.testing.assert_allclose(f - f[0], want - want[0], atol=1e-12)
                back = (1 - 1 / s) * y**2 + 2 * t / s * y
                np.testing.assert_allclose(g - g[0], back - back[0], atol=1e-12)


def _centered(f, g, a, b):
    shift = np.asarray(a) @ np.asarray(f)
    return np.asarray(f) - shift, np.asarray(g) + shift


def test_symmetries():
    """Exchange, reflection, scaling, and order of the atoms, on hard weights."""
    *problems, _ = ot_problems.hard(7, 5, 24)
    with jax.enable_x64(True):
        for x, y, a, b in zip(*map(jnp.asarray, problems), strict=True):
            f, g = _centered(*DUALS(x, y, a, b), a, b)
            for other in (
                _centered(*DUALS(y, x, b, a)[::-1], a, b),
                _centered(*DUALS(-x, -y, a, b), a, b),
                tuple(z / 9 for z in _centered(*DUALS(3 * x, 3 * y, a, b), a, b)),
                tuple(
                    z[::-1]
                    for z in _centered(*DUALS(x[::-1], y[::-1], a[::-1], b[::-1]), a[::-1], b)
                ),
            ):
                np.testing.assert_allclose(other[0], f, atol=1e-12)
                np.testing.assert_allclose(other[1], g, atol=1e-12)


def test_f_starts_at_zero_and_equal_points_have_equal_potentials():
    """The smallest x has f = 0; duplicates differ in no bit, with weights and without."""
    x = jnp.array([2.0, -1.0, 2.0, 0.5, -1.0, 2.0])
    a = jnp.array([0.1, 0.0, 0.3, 0.2, 0.4, 0.0])
    for weights in (None, a):
        f, _ = DUALS(x, Y, weights)
        assert f[1] == f[4] == 0
        assert f[0] == f[2] == f[5] != 0


def test_atoms_of_weight_zero_change_no_other_and_get_the_extended_potential():
    """Leaving them out gives the same values up to one constant, and extend_1d gives theirs."""
    rng = np.random.default_rng(3)
    x, y, q = rng.normal(size=9), rng.normal(size=7), rng.normal(size=6) * 3
    a, b = rng.integers(0, 3, 9) / 9, np.full(7, 1 / 7)
    a[0] += 1 - a.sum()
    assert a[0] > 0
    with jax.enable_x64(True):
        x, y, a, b, q = map(jnp.asarray, (x, y, a, b, q))
        f, g = DUALS(x, y, a, b)
        f_more, g_more = DUALS(jnp.concatenate([q, x]), y, jnp.concatenate([jnp.zeros(6), a]), b)
        shift = f_more[6] - f[0]
        np.testing.assert_allclose(f_more[6:], f + shift, atol=1e-12)
        np.testing.assert_allclose(g_more, g - shift, atol=1e-12)
        want = jax.jit(ot.extend_1d)(q, x, y, a, b)
    np.testing.assert_allclose(f_more[:6], want + shift, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_changes_nothing(weighted):
    """Masked atoms of any place, at both sides; they get 0."""
    x, y = contract.normal(12, seed=3), contract.normal(10, seed=4)
    keep_x, keep_y = np.arange(12) % 3 > 0, np.arange(10) % 4 > 0
    a = np.float32(np.random.default_rng(0).dirichlet(np.ones(8))) if weighted else None
    full_a = jnp.full(12, jnp.inf).at[keep_x].set(a) if weighted else None
    f, g = DUALS(x[keep_x], y[keep_y], a)
    padded_x, padded_y = x.at[~keep_x].set(99.0), y.at[~keep_y].set(jnp.nan)
    f_pad, g_pad = DUALS(padded_x, padded_y, full_a, mask_x=keep_x, mask_y=keep_y)
    np.testing.assert_allclose(f_pad[keep_x], f, atol=1e-6)
    np.testing.assert_allclose(g_pad[keep_y], g, atol=1e-6)
    np.testing.assert_array_equal(f_pad[~keep_x], 0)
    np.testing.assert_array_equal(g_pad[~keep_y], 0)


def test_derivatives_agree_with_differences():
    """Of the dual value and of a sum of potentials, in x and y, for three powers."""
    rng = np.random.default_rng(5)
    a, b = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(5))
    z, h = np.r_[rng.normal(size=6), rng.normal(size=5) + 0.3], 1e-6

    def value(z, weights, p):
        f, g = ot.duals_1d(z[:6], z[6:], a, b, cost=lambda x, y: jnp.abs(x - y) ** p)
        return weights @ jnp.concatenate([f, g])

    @jax.jit
    def both(z, weights, p):
        steps = h * jnp.eye(11, dtype=z.dtype)
        values = jax.vmap(value, (0, None, None))
        ahead, behind = (values(z[None] + s, weights, p) for s in (steps, -steps))
        return jax.grad(value)(z, weights, p), (ahead - behind) / (2 * h)

    with jax.enable_x64(True):
        for weights in (np.r_[a, b], rng.normal(size=11)):
            for p in (1.5, 2.0, 3.0):
                got, want = both(z, weights, p)
                np.testing.assert_allclose(got, want, atol=1e-8)


def test_the_derivative_in_the_weights_is_zero():
    """They decide which atoms are partners, and nothing else."""

    def total(a, b):
        f, g = ot.duals_1d(X, Y, a, b)
        return jnp.sum(f) + jnp.sum(g)

    np.testing.assert_array_equal(jnp.stack(jax.jit(jax.grad(total, (0, 1)))(A, B)), 0)


def test_duplicates_share_the_slope_of_their_point():
    """The slopes at one point add up to that of moving the point: none is lost.

    The differentiated program has the values of the plain one, which finds places another way.
    """
    x, y = jnp.array([0.0, 1.0, 1.0, 2.0]), jnp.array([3.0, 2.0, 5.0, 0.0])

    @jax.jit
    def slopes(x, a):
        def value(x):
            f, g = ot.duals_1d(x, y, a)
            return (jnp.mean(f) if a is None else a @ f) + jnp.mean(g), (f, g)

        return value(x)[1], jax.grad(value, has_aux=True)(x)

    for a in (None, jnp.array([0.25, 0.5, 0.0, 0.25])):
        plain, (slope, differentiated) = slopes(x, a)
        np.testing.assert_allclose(jnp.stack(differentiated), jnp.stack(plain), atol=1e-6)
        # Weight 1/4 moves from 1 to each of 2 and 3, and from 2 to 5: slopes of 2 (x - y).
        got = slope[0], slope[1] + slope[2], slope[3]
        np.testing.assert_allclose(jnp.stack(got), [0, -1.5, -1.5], atol=1e-6)


@pytest.mark.parametrize(
    ("a", "x"),
    [
        (jnp.full(8, 0.13), X),
        (jnp.full(8, 0.125).at[0].set(-0.125).at[1].set(0.375), X),
        (jnp.full(8, 0.125).at[3].set(jnp.nan), X),
        (jnp.zeros(8), X),
        (A, X.at[2].set(jnp.nan)),
        (None, X.at[2].set(-jnp.nan)),
        (None, X.at[2].set(jnp.inf)),
        (A, X.at[0].set(-jnp.inf)),
    ],
)
def test_bad_values_give_nan_on_both_sides(a, x):
    """Weights without sum 1, negative or NaN, and points that are not finite: nothing plausible."""
    for args in ((x, Y, a, None), (Y, x, None, a)):
        f, g = DUALS(*args)
        assert jnp.isnan(f).all() and jnp.isnan(g).all()


def test_sixteen_bits_are_computed_in_float32():
    """The result is the rounded one of the same numbers in float32; weights may be off by 2^-8."""
    x, y = X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
    a = jnp.full(8, 1 / 7, jnp.bfloat16).at[0].set(0)
    f, g = DUALS(x, y, a)
    wide = a.astype(jnp.float32)
    want = DUALS(x.astype(jnp.float32), y.astype(jnp.float32), wide / wide.sum())
    assert f.dtype == g.dtype == jnp.bfloat16
    np.testing.assert_array_equal(f, want[0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(g, want[1].astype(jnp.bfloat16))
    mixed = DUALS(x, Y)
    assert (mixed[0].dtype, mixed[1].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((X[None], Y), {}, ValueError, r"x must have shape \[n\], got \(1, 8\)"),
        ((X, Y[:0]), {}, ValueError, r"y must hold at least one point, got \(0,\)"),
        ((X, jnp.arange(8)), {}, TypeError, "y must be real floating, got int32"),
        ((X, Y, A[:3]), {}, ValueError, r"a must have shape \[n\] with n=8, got \(3,\)"),
        ((X, Y, A, jnp.ones(8, bool)), {}, TypeError, "b must be real floating, got bool"),
        ((X, Y), {"cost": "squared"}, TypeError, "cost must be a function, got str"),
        ((X, Y), {"tol": -1.0}, ValueError, r"tol must be in \[0, inf\), got -1.0"),
        ((X, Y), {"mask_x": A}, TypeError, "mask_x must be bool, got float32"),
        ((X, Y), {"mask_y": MASK[:2]}, ValueError, r"mask_y must have shape .* got \(2,\)"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        ot.duals_1d(*args, **kwargs)
