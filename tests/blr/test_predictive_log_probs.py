"""The mean prediction over the posterior against a sum by hand."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr

KEY = jax.random.key(0)


def apply_fn(params, x):
    return jnp.tanh(x @ params)


def _case():
    params = contract.normal(8, 3)
    state = blr.gblr(0.1, ess=5.0).init(params)

    def run(key, params, state, x):
        return blr.predictive_log_probs(apply_fn, key, params, state, x, num_samples=3)

    return run, (KEY, params, state, contract.normal(8, 8))


test_contract = contract.function(
    contract.Case(
        "predictive_log_probs",
        _case,
        draws=True,
        vary=lambda args: (contract.vary(args[0]), contract.vary(args[1]), *args[2:]),
        dtypes=("float32",),
    )
)


def test_it_is_the_logarithm_of_the_mean_probability():
    """By NumPy in float64 from the samples of the keys fold_in(key, k); logits may be shifted."""
    run, (key, params, state, x) = _case()
    got = jax.jit(run)(key, params, state, x)
    sample = jax.jit(lambda k: apply_fn(blr.sample_posterior(k, params, state)[0], x))
    probabilities = []
    for k in range(3):
        logits = np.float64(sample(jax.random.fold_in(KEY, k)))
        unnormalized = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities.append(unnormalized / unnormalized.sum(-1, keepdims=True))
    np.testing.assert_allclose(got, np.log(np.mean(probabilities, 0)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1, rtol=1e-5)


def test_small_probabilities_do_not_vanish():
    """Logits of -1e3 stay, also in half precision, since the mean is taken in the logarithm."""
    params = jnp.zeros(2)
    state = blr.gblr(0.1, ess=1e12).init(params)

    def far(params, x):
        return (x + params).astype(jnp.float16)

    x = jnp.array([0.0, -1e3])
    got = blr.predictive_log_probs(far, KEY, params, state, x, num_samples=2)
    np.testing.assert_allclose(got, [0, -1e3])
    assert got.dtype == jnp.float32


def test_bad_input_is_named():
    """A function of classes and at least one sample are wanted."""
    params = jnp.zeros(2)
    state = blr.gblr(0.1, ess=1.0).init(params)
    for fun, num, opt_state, error, match in (
        (None, 2, state, TypeError, "apply_fn must be a function, got None"),
        (apply_fn, 0, state, ValueError, "num_samples must be at least 1, got 0"),
        (
            lambda p, x: jnp.sum(p),
            2,
            state,
            ValueError,
            r"must return logits \[..., C\], got shape",
        ),
        (apply_fn, 2, (), ValueError, "opt_state must hold a GBLRState, got none"),
    ):
        with pytest.raises(error, match=match):
            blr.predictive_log_probs(fun, KEY, params, opt_state, None, num_samples=num)
