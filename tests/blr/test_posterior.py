"""The posterior as distributions: what is drawn from the state has them."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr

pytest.importorskip("distrax")
stats = pytest.importorskip("scipy.stats")

PARAMS = contract.small_tree()


def _rule(alpha=2.0):
    return blr.gblr(0.1, ess=20.0, alpha=alpha)


def _state(params, alpha=2.0):
    return _rule(alpha).init(params)


test_contract = contract.function(
    contract.Case(
        "posterior",
        lambda: (blr.posterior, (PARAMS, _state(PARAMS))),
        dtypes=("float32", "float64"),
    )
)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 2.0])
def test_draws_have_the_distribution(alpha):
    """Those of sample_posterior, leaf by leaf, through the distribution function."""
    params = {"a": jnp.float32([1.0, -2.0]), "b": jnp.float32(3.0)}
    state = _state(params, alpha=alpha)
    state = state._replace(hess={"a": jnp.float32([0.5, 4.0]), "b": jnp.float32(1.0)})
    q = blr.posterior(params, state)
    assert set(q) == {"a", "b"}
    draws, _ = blr.sample_posterior(jax.random.key(0), params, state, (5000,))
    for name in params:
        levels = np.asarray(q[name].cdf(draws[name])).reshape(5000, -1)
        for column in levels.T:
            assert stats.kstest(column, "uniform").pvalue > 1e-3
        np.testing.assert_array_equal(q[name].mean(), params[name])


def test_support_is_the_box():
    """And the width at the start is that of precision ess (hess_init + weight_decay)."""
    q = blr.posterior(PARAMS, _state(PARAMS))
    low, high = blr.support_box(PARAMS, _state(PARAMS))
    for name in PARAMS:
        np.testing.assert_allclose(q[name].stddev(), (20 * 1.0001) ** -0.5, rtol=1e-6)
        for got, want in zip(q[name].support(), (low[name], high[name]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6)


def test_leaves_of_other_rules_have_none():
    """Under a mask and for integers; bfloat16 has a float32 posterior."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.arange(2), "d": None}
    q = blr.posterior(params, _state(params))
    assert (q["c"], q["d"], q["b"].dtype) == (None, None, jnp.float32)
    tx = optax.masked(blr.gblr(0.1, ess=20.0), {"a": True, "b": False, "c": False, "d": False})
    q = blr.posterior(params, optax.chain(optax.clip(1.0), tx).init(params))
    assert q["b"] is None and q["a"].batch_shape == (2,)


def test_distributions_of_split_parameters_are_split_alike():
    """On a mesh with explicit axes, through every method that maps the batch."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    split = jax.NamedSharding(mesh, jax.P("data", "model"))
    params = jax.device_put(PARAMS["first"], split)

    @jax.jit
    def everything(params, state):
        q = blr.posterior(params, state)
        values = q.log_prob(q.mean()), q.cdf(0.3), q.quantile(0.3), q.entropy(), q.natural()
        return q, *values, q.fenchel_young(q), q.sample(seed=jax.random.key(0))

    with jax.set_mesh(mesh):
        got = everything(params, jax.jit(_rule().init)(params))
    assert all(x.sharding.is_equivalent_to(split, 2) for x in jax.tree.leaves(got))
    want = everything(PARAMS["first"], _state(PARAMS["first"]))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_no_posterior_is_named():
    """The state of another optimizer has none."""
    with pytest.raises(ValueError, match="opt_state must hold a GBLRState, got none"):
        blr.posterior(PARAMS, optax.sgd(0.1).init(PARAMS))
