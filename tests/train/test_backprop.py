"""Tests of train.backprop."""

from typing import Any, NamedTuple

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import train

KEY = jax.random.key(0)

test_contract = contract.estimator(contract.Case("backprop", lambda: train.backprop))


def squares(params, batch, key):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def problem(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, y, w = rng.normal(size=(16, 4)), rng.normal(size=16), rng.normal(size=4)
    params = {"w": jnp.asarray(w, dtype), "b": jnp.asarray(0.5, dtype)}
    return params, (jnp.asarray(x, dtype), jnp.asarray(y, dtype)), (x, y, w)


def test_gradient_of_least_squares_is_the_closed_form():
    """Value and gradient agree with the normal equations in float64."""
    params, batch, (x, y, w) = problem()
    residual = x @ w + 0.5 - y
    estimate = jax.jit(train.backprop(squares))(KEY, params, (), batch)
    np.testing.assert_allclose(estimate.value, np.mean(residual**2), rtol=1e-6)
    np.testing.assert_allclose(estimate.grads["w"], 2 * x.T @ residual / 16, rtol=1e-5)
    np.testing.assert_allclose(estimate.grads["b"], 2 * residual.mean(), rtol=1e-5)
    assert estimate.aux is None and estimate.extras == {}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_grads_have_the_dtypes_of_params_and_the_value_is_float32(dtype):
    """Half-precision parameters give half-precision gradients and a float32 loss."""
    params, batch, _ = problem(dtype)
    value, grads, _, _ = jax.eval_shape(train.backprop(squares), KEY, params, (), batch)
    assert value.dtype == jnp.float32 and value.shape == ()
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}


def test_the_loss_gets_the_key_as_it_is():
    """The key is handed on unchanged, and the optimizer's state is not looked at."""
    estimator = train.backprop(lambda params, batch, key: (jnp.sum(params), jax.random.bits(key)))
    estimate = estimator(KEY, jnp.ones(3), object(), None)
    assert estimate.aux == jax.random.bits(KEY)


class Nested(NamedTuple):
    layers: Any
    rest: Any


@pytest.mark.parametrize(
    "params",
    [
        jnp.ones(3),
        [jnp.ones(3), (jnp.ones(2), None)],
        Nested({"w": jnp.ones(3), "none": None}, [jnp.ones(2), {}]),
        {},
        None,
    ],
    ids=["array", "list", "named_tuple", "empty", "none"],
)
def test_any_tree_may_hold_the_params(params):
    """The gradient of half the sum of squares is params, in the same tree."""

    def loss_fn(params, batch, key):
        return sum((jnp.sum(x**2) for x in jax.tree.leaves(params)), jnp.float32(0)) / 2

    grads = train.backprop(loss_fn)(KEY, params, (), None).grads
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(lambda g, p: bool((g == p).all()), grads, params)))


@pytest.mark.parametrize(
    ("params", "loss_fn", "error", "match"),
    [
        ({"a": jnp.ones(2, jnp.int32)}, squares, TypeError, "real floating, got int32 at a"),
        ({"a": jnp.ones(2, jnp.complex64)}, squares, TypeError, "got complex64 at a"),
        (jnp.ones(3), lambda p, b, k: p, ValueError, r"shape \[\], got \(3,\)"),
        (jnp.ones(3), lambda p, b, k: jnp.sum(p > 0), TypeError, "got int32"),
        (jnp.ones(3), lambda p, b, k: (p.sum(), 1, 2), TypeError, "tuple of length 3"),
        (jnp.ones(3), lambda p, b, k: (p.sum(), {"n": "x"}), TypeError, "got str at n"),
    ],
)
def test_bad_params_and_losses_are_refused(params, loss_fn, error, match):
    """Parameters without a gradient and results that are no loss raise, with path or shape."""
    with pytest.raises(error, match=match):
        train.backprop(loss_fn)(KEY, params, (), None)
