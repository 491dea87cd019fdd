"""The noise: its distribution by SciPy, its bounds, its slope in alpha."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr
from jaxkit.blr import _geometry

KEY = jax.random.key(0)
SIZE = 200_000

test_contract = contract.function(
    contract.Case(
        "q_gaussian_noise",
        lambda: (lambda key, alpha: blr.q_gaussian_noise(key, (8, 16), alpha), (KEY, 1.5)),
        draws=True,
        dtypes=("float32",),
        skip={
            "sharded_equals_whole": "no argument has an axis",
        },
    )
)
draws = jax.jit(lambda alpha, key=KEY: blr.q_gaussian_noise(key, (SIZE,), alpha))


def distribution(alpha):
    """Returns SciPy's distribution of mean 0 and variance 1."""
    stats = pytest.importorskip("scipy.stats")
    if alpha == 1:
        return stats.norm()
    if alpha > 1:
        k, r = 1 / (alpha - 1), np.sqrt((3 * alpha - 1) / (alpha - 1))
        return stats.beta(k + 1, k + 1, loc=-r, scale=2 * r)
    df = (1 + alpha) / (1 - alpha)
    return stats.t(df, scale=np.sqrt((df - 2) / df))


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0, 1.5, 2.0, 5.0])
def test_draws_have_their_distribution(alpha):
    """By Kolmogorov and Smirnov, the variance to 4 standard errors, and never outside."""
    stats = pytest.importorskip("scipy.stats")
    z = np.float64(draws(alpha))
    assert stats.kstest(z, distribution(alpha).cdf).pvalue > 1e-3
    if alpha >= 0.7:
        error = np.sqrt((float(_geometry.kurtosis(alpha)) - 1) / SIZE)
        assert abs(np.mean(z**2) - 1) < 4 * error
    assert np.max(np.abs(z)) <= np.float64(_geometry.half_width(alpha))


@pytest.mark.parametrize(("alpha", "bound"), [(1.0, 5.7), (0.8, 15.4), (0.5, 204.0)])
def test_no_draw_lies_beyond_what_the_smallest_uniform_allows(alpha, bound):
    """The radius at U = 2^-23 is under the bound, and draws are never further out."""
    c = 2 * (alpha - 1) / (1 + alpha)
    log = -23 * np.log(2)
    rad2 = -2 * log if alpha == 1 else -2 * np.expm1(c * log) / c
    limit = np.sqrt((3 * alpha - 1) / (1 + alpha) * rad2)
    assert limit < bound
    assert jnp.max(jnp.abs(draws(alpha))) <= limit * (1 + 1e-5)


def test_neighbors_are_independent():
    """Both halves of a block and both ends of it: squares and signs do not go together."""
    z = np.float64(draws(2.0))
    for lag in (1, 2):
        for f in (np.sign, np.square, lambda x: x):
            a, b = f(z[lag:]) - np.mean(f(z)), f(z[:-lag]) - np.mean(f(z))
            assert abs(np.mean(a * b)) < 4.5 * np.std(a) * np.std(b) / SIZE**0.5


def test_draws_and_their_slope_pass_smoothly_through_the_gaussian():
    """Around alpha 1 float32 follows float64 of the same uniforms; the slope is the difference."""
    words = jax.random.key_data(jax.random.split(KEY, (1000,)))
    u, v = (np.float64(np.asarray(words)[:, i] >> 9) * 2.0**-23 for i in (0, 1))

    def exact(alpha):
        c, log = 2 * (alpha - 1) / (1 + alpha), np.log1p(-u)
        rad2 = -2 * log if c == 0 else -2 * np.expm1(c * log) / c
        return np.sqrt((3 * alpha - 1) / (1 + alpha) * rad2) * np.cos(np.pi * (v - 0.5) - np.pi / 2)

    run = jax.jit(lambda alpha: blr.q_gaussian_noise(KEY, (1000,), alpha))
    for alpha in (0.999, 1 - 1e-6, 1.0, 1 + 1e-6, 1.001, 2.0, 0.6):
        alpha = float(np.float32(alpha))
        np.testing.assert_allclose(run(alpha), exact(alpha), atol=3e-6, rtol=1e-5)
    slope = jax.jit(jax.jacfwd(run))
    for alpha in (1.0, 1.5):
        want = (exact(alpha + 1e-5) - exact(alpha - 1e-5)) / 2e-5
        np.testing.assert_allclose(slope(alpha), want, atol=1e-3, rtol=1e-2)


def test_dtypes_shapes_and_kinds_of_keys():
    """Halves are rounded floats, doubles have their own bits, alpha may be an array."""
    alphas = jnp.array([0.8, 1.0, 3.0])
    rbg = jax.random.key(0, impl="rbg")

    @jax.jit
    def run():
        dtypes = jnp.float32, jnp.bfloat16, jnp.float16
        halves = [blr.q_gaussian_noise(KEY, (5, 3), 3.0, dtype) for dtype in dtypes]
        both = blr.q_gaussian_noise(KEY, (5, 3), alphas)
        shapes = [blr.q_gaussian_noise(KEY, shape, 2.0) for shape in ((), (0, 3))]
        return halves, both, shapes, blr.q_gaussian_noise(rbg, (20_000,), 2.0)

    (z, *halves), both, shapes, other = run()
    for half in halves:
        np.testing.assert_array_equal(half, z.astype(half.dtype))
    np.testing.assert_allclose(both[:, 2], z[:, 2], rtol=1e-5)
    assert [x.shape for x in shapes] == [(), (0, 3)]
    stats = pytest.importorskip("scipy.stats")
    assert stats.kstest(np.float64(other), distribution(2.0).cdf).pvalue > 1e-3
    with jax.enable_x64(True):
        wide = jax.jit(lambda: blr.q_gaussian_noise(KEY, (2000,), 2.0, jnp.float64))()
    assert wide.dtype == jnp.float64
    assert stats.kstest(wide, distribution(2.0).cdf).pvalue > 1e-3


def test_a_traced_alpha_out_of_range_gives_nan():
    """Nothing is clamped: there is no distribution of variance 1."""
    assert jnp.isnan(jax.jit(lambda a: blr.q_gaussian_noise(KEY, (3,), a))(0.2)).all()


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((KEY, (3,), 1 / 3), ValueError, r"alpha must be in \(0.333\d*, inf\), got 0.333"),
        ((KEY, (3,), "one"), TypeError, "alpha must be a number, got 'one'"),
        ((KEY, (3,), 1.0, jnp.int32), TypeError, "dtype must be a real floating dtype"),
    ],
)
def test_bad_input_is_named(args, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        blr.q_gaussian_noise(*args)
