"""The automatic gain: what it measures is unbiased, and it goes where it should."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.denoise import _auto_gain

KEY = jax.random.key(0)


def gain(state):
    """Returns K of the last update."""
    return jnp.clip(state.excess / state.power, 0.02, 1)


def run(gradients, variance):
    """Returns estimates and states after each of the gradients."""

    def step(state, y):
        estimate, state = _auto_gain.update(state, y, variance)
        return state, (estimate, state)

    return jax.lax.scan(step, _auto_gain.init(gradients[0]), gradients)[1]


def of_parts(parts):
    """Returns mean and variance of an entry of it, from parts ``[k, size]``."""
    mean = parts.mean(0)
    k, size = parts.shape
    return mean, np.sum((parts - mean[None]) ** 2) / (k * (k - 1) * size)


@pytest.mark.parametrize("k", [2, 3])
def test_the_excess_is_unbiased(k):
    """Over all draws its mean is |g - h|**2; each is the mean of <yi - h, yj - h> over pairs.

    The state is put at its second step, where the measurement weighs one half.
    """
    g, h = np.array([1.0, -2.0]), np.array([0.5, 1.5])
    noises = np.array([[-1.0, 0.0], [1.0, 1.0], [0.0, -1.0]])  # of mean zero
    start = _auto_gain.init(jnp.zeros(2))
    start = start._replace(shadow=jnp.float32(h), step=jnp.int32(1))
    update = jax.jit(_auto_gain.update)
    measured = []
    for draw in itertools.product(noises, repeat=k):
        parts = g + np.stack(draw)
        mean, variance = of_parts(parts)
        excess = 2 * update(start, jnp.float32(mean), variance)[1].excess
        pairs = [(parts[i] - h) @ (parts[j] - h) for i, j in itertools.combinations(range(k), 2)]
        assert excess == pytest.approx(np.mean(pairs), abs=1e-5)
        measured.append(excess)
    assert np.mean(measured) == pytest.approx(np.sum((g - h) ** 2), rel=1e-5)


def test_halves_are_the_case_of_two_parts():
    """The variance of two parts is |y1 - y2|**2 / 4, and |y-h|**2 = <y1-h, y2-h> + that."""
    y1, y2, h = np.random.default_rng(0).normal(size=(3, 5))
    mean, variance = of_parts(np.stack([y1, y2]))
    assert 5 * variance == pytest.approx(np.sum((y1 - y2) ** 2) / 4)
    assert np.sum((mean - h) ** 2) - 5 * variance == pytest.approx((y1 - h) @ (y2 - h))


def test_one_step_by_hand():
    """Averages with weight max(.05, 1/t), the shadow by K, the estimate by its square root."""
    state = _auto_gain.AutoGain(
        jnp.int32(3), jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0]), jnp.float32(1), jnp.float32(8)
    )
    estimate, new = _auto_gain.update(state, jnp.array([3.0, 2.0]), 1.5)
    excess, power = 1 + (9 - 3 - 1) / 4, 8 + (9 - 8) / 4
    k = excess / power
    np.testing.assert_allclose([new.excess, new.power], [excess, power], rtol=1e-6)
    np.testing.assert_allclose(new.shadow, [3 * k, 2.0], rtol=1e-6)
    np.testing.assert_allclose(estimate, [1 + np.sqrt(k) * 2, np.sqrt(k) * 2], rtol=1e-6)
    np.testing.assert_array_equal(new.estimate, estimate)
    assert new.step == 4
    late = _auto_gain.update(new._replace(step=jnp.int32(1000)), jnp.array([3.0, 2.0]), 0.0)[1]
    assert late.power == pytest.approx(
        0.95 * power + 0.05 * np.sum((np.asarray(new.shadow) - [3, 2]) ** 2)
    )


def test_a_constant_gradient_in_noise_drives_the_gain_to_its_floor():
    """K follows the recursion of expected values to .02, and the estimate has the error of it."""
    size, steps = 4000, 400
    y = 3 + jax.random.normal(KEY, (steps, size))
    estimates, states = jax.jit(run)(y, 1.0)
    excess, power, shadow, out, want = 0.0, 0.0, 0.0, 0.0, []
    for t in range(1, steps + 1):
        weight = max(0.05, 1 / t)
        excess += weight * ((shadow if t > 1 else 0) - excess)
        power += weight * ((shadow + 1 if t > 1 else 0) - power)
        k = max(0.02, excess / power) if t > 1 else 1.0
        shadow = (1 - k) ** 2 * shadow + k**2
        out = (1 - np.sqrt(k)) ** 2 * out + k
        want.append((k, shadow, out))
    k, shadow, out = np.transpose(want)
    assert (k[300:] == 0.02).all()
    np.testing.assert_allclose(jax.vmap(gain)(states)[1:], k[1:], atol=4 * np.sqrt(2 / size))
    got = jnp.mean(jnp.square(jnp.stack([states.shadow, estimates]) - 3), 2)
    np.testing.assert_allclose(got[:, 300:].mean(1), [0.02 / 1.98, out[-1]], rtol=0.15)


def test_a_gradient_that_jumps_drives_the_gain_to_one():
    """Moves of 10 in noise of 1: the optimal gain is .99, and the estimate stays with y."""
    y = jnp.cumsum(10 * jax.random.normal(KEY, (100, 500)), 0)
    noisy = y + jax.random.normal(jax.random.key(1), y.shape)
    estimates, states = jax.jit(run)(noisy, 1.0)
    assert (jax.vmap(gain)(states)[20:] > 0.98).all()
    assert jnp.mean(jnp.square(estimates[50:] - y[50:])) < 2


@pytest.mark.parametrize("moves", [0.0, 1.0])
def test_without_noise_nothing_is_changed(moves):
    """K is exactly 1, also where the gradient stands still and nothing is measured."""
    y = 1 + moves * jax.random.normal(KEY, (30, 5))
    estimates, states = jax.jit(run)(y, 0.0)
    np.testing.assert_allclose(estimates, y, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(states.excess, states.power)


def test_the_first_gradient_is_the_estimate_and_shifts_and_scales_pass_through():
    """What is measured never involves the zeros of the start."""
    y = jax.random.normal(KEY, (40, 6)).cumsum(0) / 3
    runs = jax.jit(run)
    want = runs(y, 0.5)[0]
    np.testing.assert_array_equal(want[0], y[0])
    np.testing.assert_allclose(runs(8 * y, 0.5 * 64)[0], 8 * want, rtol=1e-5)
    np.testing.assert_allclose(runs(y + 5, 0.5)[0], want + 5, atol=1e-4)


def test_types_of_the_state():
    """float32 for bfloat16 leaves, stable, with buffers of its own; a scalar and an empty leaf."""
    for leaf in (jnp.ones(3, jnp.bfloat16), jnp.float32(2.0), jnp.zeros((0, 2))):
        state = _auto_gain.init(leaf)
        pointers = [x.unsafe_buffer_pointer() for x in state if x.size]
        assert len(set(pointers)) == len(pointers)
        estimate, new = _auto_gain.update(state, leaf, jnp.float32(0.1))
        assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, state)
        assert not any(x.weak_type for x in new)
        assert estimate.dtype == jnp.float32
        assert all(jnp.isfinite(x).all() for x in new)


def test_derivatives_are_finite():
    """In gradients and variance, at zero gradients and at noise of zero too."""
    for y, variance in ((jnp.zeros((4, 3)), 0.0), (jax.random.normal(KEY, (4, 3)), 0.1)):
        slopes = jax.grad(lambda y, v: jnp.sum(run(y, v)[0]), (0, 1))(y, jnp.float32(variance))
        assert all(jnp.isfinite(s).all() for s in slopes)
