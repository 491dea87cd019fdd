"""Means over samples: how often the loss is traced, and what non-finite curvatures do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr
from jaxkit.blr import _monte_carlo

KEY = jax.random.key(0)


@pytest.mark.parametrize("options", [{}, {"num_samples": 4}, {"hessian": "antithetic"}])
def test_the_loss_is_traced_once(options):
    """Whatever the number of samples, and for both of a pair."""
    traces = []

    def loss_fn(params):
        traces.append(1)
        return jnp.sum(params**2)

    params = jnp.ones(2)
    run = blr.gblr_value_and_grad(loss_fn, **{"num_samples": 2, **options})
    jax.jit(run).lower(KEY, params, blr.gblr(0.1, ess=1.0).init(params))
    assert len(traces) == 1


def test_a_curvature_that_is_not_finite_makes_its_gradient_nan():
    """Entry by entry; guards that look at gradients then see it."""
    params = jnp.array([1.0, 0.0])
    state = blr.gblr(0.1, ess=1.0).init(params)

    def evaluate(index, theta):
        del index
        return jnp.array([1.0, jnp.inf]), theta[0], None

    options = _monte_carlo.check(_monte_carlo.Options(1, "scan", "reparam", None, None))
    grads, hess, _, _ = _monte_carlo.estimate(evaluate, options, KEY, params, state)
    np.testing.assert_array_equal(jnp.isnan(grads), [False, True])
    assert jnp.isinf(hess[1]) and jnp.isfinite(hess[0])


def test_the_escort_weight_has_mean_one_and_stays_below_three_halves():
    """((3 alpha - 1) - (alpha - 1) z^2) / (2 alpha), 1 at alpha 1."""
    from jaxkit.blr._state import Marginal

    for alpha in (0.8, 1.0, 2.0, 50.0):
        z = jax.jit(lambda a: blr.q_gaussian_noise(KEY, (50_000,), a))(alpha)
        w = _monte_carlo._escort(Marginal(z, z, jnp.float32(alpha)), z)
        assert abs(jnp.mean(w) - 1) < 4.5 * (jnp.std(w) + 1e-6) / 50_000**0.5 + 1e-6
        if alpha >= 1:
            assert jnp.min(w) >= -1e-6 and jnp.max(w) <= (3 * alpha - 1) / (2 * alpha) + 1e-6
