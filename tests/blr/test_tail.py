"""Tail probabilities against scipy's beta, t and normal distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.blr import _tail

ALPHAS = (0.34, 0.5, 0.8, 0.999, 1.0, 1.001, 1.5, 2.0, 10.0)
POINTS = np.array([0, 1e-3, 0.3, 1, 1.7, 2.2, 4, 8, 100])
PROBABILITIES = np.array([1e-30, 1e-6, 1e-3, 0.1, 0.3, 0.49])


def oracle(alpha):
    """Returns the distribution of variance one of scipy, and its half-width."""
    stats = pytest.importorskip("scipy.stats")
    if alpha == 1:
        return stats.norm(), np.inf
    k = 1 / abs(alpha - 1)
    if alpha > 1:
        edge = np.sqrt(2 * k + 3)
        return stats.beta(k + 1, k + 1, loc=-edge, scale=2 * edge), edge
    return stats.t(2 * k - 1, scale=np.sqrt((2 * k - 3) / (2 * k - 1))), np.inf


def _all_tails(dtype):
    shape = len(ALPHAS), len(POINTS)
    alphas = np.broadcast_to(np.array(ALPHAS, dtype)[:, None], shape)
    return _tail.tail(
        jnp.asarray(alphas), jnp.asarray(np.broadcast_to(POINTS.astype(dtype), shape))
    )


def test_tails_in_float32_are_exact_to_rounding():
    """In value 1e-6; relative to the tail 1e-4 down to 1e-30, on both sides of alpha = 1."""
    for alpha, got in zip(ALPHAS, np.float64(_all_tails(np.float32)), strict=True):
        want = oracle(alpha)[0].sf(POINTS)
        np.testing.assert_allclose(got, want, atol=1e-6)
        some = want > 1e-30
        np.testing.assert_allclose(got[some], want[some], rtol=1e-4)
        np.testing.assert_array_equal(got[POINTS >= oracle(alpha)[1]], 0)


def test_tails_in_float64():
    """The same rule, to 1e-11 relative."""
    with jax.enable_x64(True):
        for alpha, got in zip(ALPHAS, _all_tails(np.float64), strict=True):
            np.testing.assert_allclose(got, oracle(alpha)[0].sf(POINTS), rtol=1e-11, atol=1e-300)


def test_inverse_is_the_quantile():
    """Of scipy, in float32; the edge of the support at 0."""
    shape = len(ALPHAS), len(PROBABILITIES)
    alphas = jnp.broadcast_to(jnp.float32(ALPHAS)[:, None], shape)
    got = _tail.inverse_tail(alphas, jnp.broadcast_to(jnp.float32(PROBABILITIES), shape))
    for alpha, row in zip(ALPHAS, got, strict=True):
        # Near alpha = 1/3 the deviation hangs on the rounding of alpha.
        rtol = 2e-6 if alpha > 0.4 else 1e-5
        want = oracle(alpha)[0].isf(PROBABILITIES)
        np.testing.assert_allclose(row, want, rtol=rtol, atol=5e-7)
    ends = _tail.inverse_tail(jnp.float32(ALPHAS), jnp.zeros(len(ALPHAS)))
    np.testing.assert_allclose(ends, [oracle(alpha)[1] for alpha in ALPHAS], rtol=1e-4)


@pytest.mark.parametrize("fun", [_tail.tail, _tail.inverse_tail])
def test_derivatives_in_both_arguments(fun):
    """Equal central differences, at and around the Gaussian too."""
    with jax.enable_x64(True):
        for alpha in (0.5, 0.99, 1.0, 1.01, 2.0):
            args, step = (jnp.float64(alpha), jnp.float64(0.2)), 1e-4
            got = jax.grad(fun, (0, 1))(*args)
            for i in range(2):
                up, down = (list(args) for _ in range(2))
                up[i], down[i] = args[i] + step, args[i] - step
                want = (fun(*up) - fun(*down)) / (2 * step)
                np.testing.assert_allclose(got[i], want, rtol=2e-5)


def test_values_beyond_the_range_are_nan_and_beyond_the_edge_zero():
    """A probability below 0 has no quantile; beyond the edge derivatives are 0 too."""
    assert jnp.isnan(_tail.inverse_tail(jnp.float32([2.0]), jnp.float32([-0.1])))
    assert jnp.isnan(_tail.tail(jnp.float32([2.0]), jnp.float32([np.nan])))
    alphas, z = jnp.float32([2, 2, 0.5, 1]), jnp.float32([2.3, np.inf, np.inf, np.inf])
    value, slopes = jax.jit(jax.vmap(jax.value_and_grad(_tail.tail, (0, 1))))(alphas, z)
    np.testing.assert_array_equal(jnp.stack([value, *slopes]), 0)
