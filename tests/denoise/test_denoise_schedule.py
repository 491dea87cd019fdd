"""The schedule: its exponents by minimizing the bound, its limits, bad input."""

import math

import contract
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise

test_contract = contract.function(
    contract.Case(
        "denoise_schedule",
        lambda: (
            lambda scales: denoise.denoise_schedule(
                10_000, 2, gain_scale=scales, learning_rate_scale=scales
            ),
            (jnp.linspace(0.5, 2.0, 8),),
        ),
    )
)
RATES = {1: 1 / 4, 2: 2 / 7, 3: 3 / 10, 4: 4 / 13, 5: 5 / 16, 6: 6 / 19, math.inf: 1 / 3}


def minimized(num_steps, order):
    """Returns the least bound and where it is: log(bound), log(gain), log(learning rate)."""
    optimize = pytest.importorskip("scipy.optimize")
    log_steps = math.log(num_steps)

    def terms(z):
        gain, rate = z
        bias = order * (rate - gain) if order < math.inf else 1e3 * (rate - gain)
        return np.array([-rate - log_steps, rate, gain / 2, bias])

    def bound(z):
        return np.logaddexp.reduce(terms(z))  # convex in the logarithms

    out = optimize.minimize(
        bound,
        [-log_steps / 2] * 2,
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000},
    )
    return np.array([out.fun, *out.x])


@pytest.mark.parametrize("order", RATES)
def test_rates_are_those_that_minimize_the_bound(order):
    """The slopes of bound, gain and rate in the number of steps, from T = 1e30 to 1e40."""
    slopes = (minimized(1e40, order) - minimized(1e30, order)) / math.log(1e10)
    assert slopes[0] == pytest.approx(-RATES[order], abs=2e-3)
    few, many = (np.log(denoise.denoise_schedule(t, order)) for t in (10**3, 10**9))
    np.testing.assert_allclose((many - few) / math.log(1e6), slopes[1:], atol=4e-3)


def test_values_on_paper():
    """T = 128, order 2: 2**-4 and 2**-5; order 1: T**(-1/2) and T**(-3/4)."""
    np.testing.assert_allclose(denoise.denoise_schedule(128, 2), [1 / 16, 1 / 32], rtol=1e-6)
    np.testing.assert_allclose(denoise.denoise_schedule(256, 1), [1 / 16, 1 / 64], rtol=1e-6)
    np.testing.assert_allclose(denoise.denoise_schedule(1000, math.inf), [0.01, 0.01], rtol=1e-6)
    np.testing.assert_array_equal(denoise.denoise_schedule(1, 3), [1, 1])


def test_factors_multiply_and_what_is_above_one_is_one():
    """Each scale moves its own value; traced scales stay arrays of their dtype."""
    gain, rate = denoise.denoise_schedule(128, 2, gain_scale=4, learning_rate_scale=64.0)
    assert (gain, rate) == (pytest.approx(1 / 4), 1)
    assert gain.dtype == rate.dtype == jnp.float32


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((0, 2), {}, ValueError, "num_steps must be at least 1, got 0"),
        ((10.0, 2), {}, TypeError, "num_steps must be a static whole number"),
        ((10, 0), {}, ValueError, "order must be at least 1, got 0"),
        ((10, 2.5), {}, TypeError, "order must be a static whole number"),
        ((10, 2), {"gain_scale": 0.0}, ValueError, r"gain_scale must be in \(0, inf\), got 0.0"),
        ((10, 2), {"learning_rate_scale": -1}, ValueError, "learning_rate_scale must be in"),
        ((10, 2), {"gain_scale": "big"}, TypeError, "gain_scale must be a number"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """With the argument and the value."""
    with pytest.raises(error, match=match):
        denoise.denoise_schedule(*args, **kwargs)
