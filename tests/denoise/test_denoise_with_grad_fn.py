"""The one-call form: the numbers of the long form, inside what optax offers."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_equal

from jaxkit import denoise


def loss_fn(params):
    return jnp.sum(jnp.cosh(params["w"])) + jnp.sum(params["b"] ** 4)


PARAMS = {"b": contract.normal(3), "w": contract.normal(4, 2)}
PLACES = {
    "alone": lambda: denoise.denoise(0.3, order=3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), denoise.disk(0.3), optax.adam(0.1)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(denoise.storm)(gain=0.3),
    "apply_if_finite": lambda: optax.apply_if_finite(denoise.denoise(), 3),
}


def steps(update, tx, params, num=3):
    state = tx.init(params)
    for _ in range(num):
        updates, state = update(state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: -0.1 * u, updates))
    return params


def one_call(x, y):
    tx = denoise.denoise_with_grad_fn(optax.chain(denoise.denoise(0.3, order=3), optax.sgd(0.1)))
    state = tx.init(x)
    for _ in range(2):
        updates, state = tx.update(None, state, x, grad_fn=lambda z: jnp.tanh(z - y))
        x = x + updates
    return x


test_contract = contract.function(
    contract.Case(
        "denoise_with_grad_fn", lambda: (one_call, (contract.normal(8, 4), contract.normal(8, 4)))
    )
)


@pytest.mark.parametrize("place", PLACES)
def test_it_equals_asking_and_combining(place):
    """Under jit, over three steps, wherever the denoiser lies."""
    with jax.numpy_dtype_promotion("standard"):
        tx, grad_fn = PLACES[place](), jax.grad(loss_fn)
        short = denoise.denoise_with_grad_fn(tx)

        def long_form(state, params):
            points, weights = denoise.query_points(state, params)
            grads = denoise.combine(grad_fn, points, weights)
            return tx.update(grads, state, params, queried=True)

        def short_form(state, params):
            return short.update(None, state, params, grad_fn=grad_fn)

        got = steps(jax.jit(short_form), short, PARAMS)
        assert_equal(got, steps(jax.jit(long_form), tx, PARAMS))


def test_keys_and_other_arguments_are_handed_on():
    """A random node gets its key, the state its noise variance."""
    tx = denoise.denoise_with_grad_fn(denoise.denoise(0.3, order=3, random_node=True))
    args = {"grad_fn": jax.grad(loss_fn), "key": jax.random.key(0), "noise_variance": 0.5}
    _, state = tx.update(None, tx.init(PARAMS), PARAMS, **args)
    assert state.noise_variance == 0.5


def test_bad_input_is_named():
    """A gradient in the place of None, and missing arguments; no transformation at all."""
    tx, grad_fn = denoise.denoise_with_grad_fn(denoise.igt(0.3)), jax.grad(loss_fn)
    state = tx.init(PARAMS)
    for args, match in (
        (
            (PARAMS, state, PARAMS, grad_fn),
            "updates must be None, since grad_fn gives the gradient",
        ),
        ((None, state, None, grad_fn), "params must be given to update, got None"),
        ((None, state, PARAMS, None), "grad_fn must be given to update, got None"),
    ):
        with pytest.raises(ValueError, match=match):
            tx.update(*args[:3], grad_fn=args[3])
    with pytest.raises(TypeError, match="inner must be an optax transformation, got float"):
        denoise.denoise_with_grad_fn(0.3)
    np.testing.assert_array_equal(tx.init(PARAMS).gain, 1)
