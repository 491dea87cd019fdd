"""Nodes on the line through two iterates: moments, gains, limits, refused sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.denoise import _line


def random_taus(rng, size):
    """Returns taus far from each other and from 0, the largest first and 1, NumPy float64."""
    while True:
        taus = np.append(rng.uniform(-0.9, 0.9, size - 1), 1.0)
        gaps = np.abs(taus[:, None] - taus[None]) + np.eye(size)
        if min(gaps.min(), np.abs(taus).min()) > 0.1 and taus.sum() > 0:
            return np.sort(taus)[::-1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_moments_of_random_nodes(size):
    """In float64 sum w s^k = 1 for k = 1..q, sum w = a, and 1 - a = prod(1 - tau), to 1e-10."""
    rng = np.random.default_rng(size)
    with jax.enable_x64(True):
        for _ in range(20):
            taus, alpha = random_taus(rng, size), rng.uniform(0.05, 1)
            gain, s, weights = (np.asarray(x) for x in _line.nodes(jnp.float64(alpha), taus))
            np.testing.assert_allclose(s, 1 / (alpha * taus), rtol=1e-14)
            np.testing.assert_allclose(1 - gain, np.prod(1 - alpha * taus), atol=1e-13)
            w = gain * weights
            np.testing.assert_allclose(weights.sum(), 1, atol=1e-10)
            for k in range(1, size + 1):
                terms = w * s**k
                np.testing.assert_allclose(terms.sum(), 1, atol=1e-10 * np.abs(terms).max())


def test_weights_extrapolate_through_the_nodes():
    """They are the values at 1 of Lagrange's polynomials on 0 and the nodes, by NumPy."""
    alpha, taus = 0.3, np.array([1.0, 0.5, -0.4])
    with jax.enable_x64(True):
        gain, s, weights = (np.asarray(x) for x in _line.nodes(jnp.float64(alpha), taus))
    nodes = np.append(0, s)
    vandermonde = np.vander(nodes, increasing=True).T  # row k: nodes^k
    want = np.linalg.solve(vandermonde, np.ones(4))
    np.testing.assert_allclose(np.append(1 - gain, gain * weights), want, atol=1e-11)


@pytest.mark.parametrize("gain", [0.02, 0.3, 1.0])
def test_one_node_is_asked_at_the_inverse_gain(gain):
    """Order 2: s = 1 / a, weight 1, in float32 exactly."""
    got, s, weights = _line.nodes(jnp.float32(gain), (1.0,))
    assert got == np.float32(gain) and s[0] == 1 / jnp.float32(gain) and weights[0] == 1


@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("gain", [1e-3, 0.1, 0.7, 1.0])
def test_the_closed_form_of_two_nodes(ratio, gain):
    """(1 - t)(1 + r t) = 1 - a, and the weights are those of the closed form, in float64."""
    with jax.enable_x64(True):
        a, taus = jnp.float64(gain), jnp.array([1.0, -ratio])
        t = float(_line.pair_alpha(a, taus))
        got, s, weights = (np.asarray(x) for x in _line.nodes(jnp.float64(t), taus))
    assert 0 < t <= 1
    np.testing.assert_allclose([(1 - t) * (1 + ratio * t), 1 - got], 1 - gain, atol=1e-15)
    w = [
        t**2 * (1 + ratio * t) / (t * (1 + ratio)),
        -((ratio * t) ** 2) * (1 - t) / t / (1 + ratio),
    ]
    np.testing.assert_allclose(got * weights, w, rtol=1e-12, atol=1e-16)
    np.testing.assert_allclose(s, [1 / t, -1 / (ratio * t)], rtol=1e-14)


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.4, 0.5, 0.6])
def test_small_gains_have_the_noise_and_bias_of_the_limit(ratio):
    """sum w^2 / a^2 -> (1 + r^4) / (1 - r^2)^2, sum |w| / a, and a^2 prod |s - 1|."""
    with jax.enable_x64(True):
        a, taus = jnp.float64(1e-6), jnp.array([1.0, -ratio])
        gain, s, weights = (np.asarray(x) for x in _line.nodes(_line.pair_alpha(a, taus), taus))
    noise, size = (1 + ratio**4) / (1 - ratio**2) ** 2, (1 + ratio**2) / (1 - ratio**2)
    np.testing.assert_allclose((weights**2).sum(), noise, rtol=1e-4)
    np.testing.assert_allclose(np.abs(weights).sum(), size, rtol=1e-4)
    np.testing.assert_allclose(
        gain**2 * np.prod(np.abs(s - 1)), (1 - ratio) ** 2 / ratio, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("taus", [(1.0,), (1.0, -0.4), (1.0, 0.3, -0.7), (1.0, 0.9, 0.1, -0.2)])
def test_gain_one_keeps_the_newest_gradient_alone(taus, dtype):
    """The weights are exactly (1, 0, ...) and the first node is the iterate, in both dtypes."""
    with jax.enable_x64(dtype == jnp.float64):
        one = jnp.ones([], dtype)
        alpha = _line.pair_alpha(one, taus) if len(taus) == 2 else one
        gain, s, weights = jax.jit(_line.nodes)(alpha, jnp.asarray(taus, dtype))
        assert gain == 1 and s[0] == 1 and gain.dtype == s.dtype == weights.dtype == dtype
        np.testing.assert_array_equal(weights, np.arange(len(taus)) == 0)


def test_derivatives_in_gain_and_ratio_are_finite():
    """Down to a gain of 1e-6 and at 1, in float32."""

    def total(gain, ratio):
        taus = jnp.stack([jnp.ones_like(ratio), -ratio])
        gain, s, weights = _line.nodes(_line.pair_alpha(gain, taus), taus)
        return gain + jnp.sum(weights / s)

    slope = jax.jit(jax.grad(total, (0, 1)))
    for gain in (1e-6, 0.3, 1.0):
        assert np.isfinite(slope(jnp.float32(gain), jnp.float32(0.4))).all()


def test_small_gains_are_not_rounded():
    """In float32 the gain of two nodes is within 1e-6 of the one asked for, down to 1e-6."""
    for gain in (1e-6, 1e-3, 0.1):
        alpha = _line.pair_alpha(jnp.float32(gain), (1.0, -0.4))
        np.testing.assert_allclose(_line.nodes(alpha, (1.0, -0.4))[0], gain, rtol=1e-6)


def test_taus_are_sorted_and_scaled():
    """The largest comes first and is 1; the scale is what it was."""
    assert _line.check_taus((-0.5, 2.0, 1.0), 0.1) == ((1.0, 0.5, -0.25), 2.0)


@pytest.mark.parametrize(
    ("taus", "gain", "error", "match"),
    [
        ((0.06, 0.12, -0.07, -0.2), 1.0, ValueError, "must keep the effective gain"),
        ((0.06, 0.12, -0.07, -0.2), jnp.float32(0.5), ValueError, r"in \(0, 1\].*at a gain near 0"),
        ((1.0, -1.5), 0.1, ValueError, "at gain=0.1"),
        ((-1.0,), 0.1, ValueError, "must keep the effective gain"),
        ((2.0,), 0.6, ValueError, r"gain \* max\(taus\) at most 1"),
        ((1.0, 1.0), 0.1, ValueError, r"distinct and not zero, got \(1.0, 1.0\)"),
        ((1.0, 0.0), 0.1, ValueError, "distinct and not zero"),
        ((), 0.1, ValueError, "distinct and not zero"),
        ((1.0, np.inf), 0.1, ValueError, "must be finite"),
        (3.0, 0.1, TypeError, "taus must be a sequence of static numbers, got 3.0"),
        (("a",), 0.1, TypeError, "must be a sequence of static numbers"),
    ],
)
def test_sets_that_lead_the_gain_astray_are_refused(taus, gain, error, match):
    """The message says what was given."""
    with pytest.raises(error, match=match):
        _line.check_taus(taus, gain)


def test_a_set_that_passes_keeps_its_gain_up_to_one():
    """From the given gain to the largest tau at 1 the effective gain grows from (0, 1] to 1."""
    # 1 - prod is negative below alpha = .17 and positive above: legal from a gain of .2.
    given = (1.0, -0.6, -0.5)
    with pytest.raises(ValueError, match="at gain=0.1"):
        _line.check_taus(given, 0.1)
    taus, _ = _line.check_taus(given, 0.2)
    gains = jax.vmap(lambda alpha: _line.nodes(alpha, taus)[0])(jnp.linspace(0.2, 1, 200))
    assert gains.min() > 0 and gains.max() == gains[-1] == 1
