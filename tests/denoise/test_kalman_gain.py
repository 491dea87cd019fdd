"""The Kalman gain: its recursion, its ends, and that no other gain has less error."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise

RATIOS = (0.0, 1e-12, 1e-4, 0.01, 0.1, 1.0, 30.0, 1e6)


def gains(q_over_r, steps):
    return denoise.kalman_gain(q_over_r)(steps)


jitted = jax.jit(gains)

test_contract = contract.function(
    contract.Case(
        "kalman_gain",
        lambda: (gains, (jnp.float32(0.1), jnp.arange(8))),
        dtypes=("float32", "float64"),
    )
)


def riccati(u, num_steps):
    """Returns the gains by the recursion of the variance from infinity, in NumPy's float64."""
    predicted, out = np.inf, []
    for _ in range(num_steps):
        gain = 1.0 if predicted == np.inf else predicted / (predicted + 1)
        out.append(gain)
        predicted = gain + u  # the variance after an update is the gain, in units of R
    return np.array(out)


@pytest.mark.parametrize("u", RATIOS)
@pytest.mark.parametrize(("dtype", "tol"), [(np.float32, 1e-6), (np.float64, 1e-13)])
def test_the_closed_form_is_the_recursion(u, dtype, tol):
    """Over 3,000 steps from a variance of infinity, in float32 and float64."""
    with jax.enable_x64(True):
        got = np.asarray(jitted(dtype(u), jnp.arange(3000)))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, riccati(float(dtype(u)), 3000), rtol=tol)
    assert (got <= 1).all()


@pytest.mark.parametrize(("u", "want"), [(0.01, 0.0951249), (0.1, 0.2701562), (1.0, 0.6180340)])
def test_the_end_solves_the_quadratic_equation(u, want):
    """K**2 + u K = u, and the values known on paper; also at the last step there is."""
    for step in (10_000, 2**31 - 1):
        gain = float(denoise.kalman_gain(u)(step))
        assert gain == pytest.approx(want, abs=2e-7)
        assert gain**2 + u * gain == pytest.approx(u, rel=1e-5)


def test_without_motion_it_is_the_mean():
    """1 / (step + 1), exact in float32 up to a million steps and beyond."""
    steps = jnp.array([0, 1, 2, 9, 999_999, 2**31 - 1], jnp.int32)
    want = (1 / (np.float64(steps) + 1)).astype(np.float32)
    np.testing.assert_allclose(gains(0, steps), want, rtol=1e-7)
    np.testing.assert_allclose(gains(1e-30, steps), want, rtol=1e-6)


def test_no_other_gain_has_less_error():
    """The variance of a filter with any gains, K**2 + (1 - K)**2 (v + u), is least at these."""
    u, steps = 0.1, 6

    def variance(gains):
        v = 0.0
        for gain in gains:
            v = gain**2 + (1 - gain) ** 2 * (v + u)
        return v

    best = np.float64(gains(u, jnp.arange(steps)))
    assert variance(best) == pytest.approx(best[-1], rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(100):
        other = best.copy()
        other[1:] += rng.normal(size=steps - 1) * 0.05
        assert variance(other) > variance(best)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float32, 1e-3), (np.float64, 1e-6)])
def test_derivatives_are_those_of_differences(dtype, tol):
    """In the ratio, also at 0 where its square root has none."""
    ratios = np.array([0.0, 1e-8, 1e-5, 1e-3, 0.3])
    with jax.enable_x64(True):
        slopes = jax.jit(jax.vmap(jax.vmap(jax.grad(gains), (None, 0)), (0, None)))
        got = np.asarray(slopes(ratios.astype(dtype), jnp.arange(50)))
    for slope, u in zip(got, ratios, strict=True):
        step = max(u, 1e-6) * 1e-3
        want = (riccati(u + step, 50) - riccati(u, 50)) / step
        np.testing.assert_allclose(slope, want, rtol=3e-3, atol=tol)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-0.1, ValueError, r"q_over_r must be in \[0, inf\), got -0.1"),
        (np.inf, ValueError, r"q_over_r must be in \[0, inf\), got inf"),
        ("q", TypeError, "q_over_r must be a number, got 'q'"),
    ],
)
def test_bad_input_is_named(value, error, match):
    """With the argument and the value."""
    with pytest.raises(error, match=match):
        denoise.kalman_gain(value)
