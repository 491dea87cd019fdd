"""Draws from the posterior: keys, shapes, moments, rounding, meshes."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problems import assert_same_layout, both_kinds, make_mesh, place

from jaxkit import blr

KEY = jax.random.key(0)


def _case():
    params = {"a": contract.normal(8), "b": contract.normal(8, seed=1)}
    state = blr.gblr(0.1, ess=50.0, alpha=1.5).init(params)
    return blr.sample_posterior, (KEY, params, state)


test_contract = contract.function(
    contract.Case(
        "sample_posterior",
        _case,
        draws=True,
        vary=lambda args: (contract.vary(args[0]), contract.vary(args[1]), args[2]),
        dtypes=("float32",),
    )
)


def test_draws_are_means_plus_widths_times_noise():
    """theta = mu + S^-1/2 z at alpha 1, with the noise that comes back, over any leading axes."""
    params = {"a": contract.normal(3), "b": contract.normal(2, 4)}
    state = blr.gblr(0.1, ess=20.0, hess_init=2.0, weight_decay=0.5).init(params)
    theta, noise = jax.jit(lambda p: blr.sample_posterior(KEY, p, state, (50, 40)))(params)
    for name, p in params.items():
        assert theta[name].shape == (50, 40, *p.shape)
        want = np.asarray(p) + np.asarray(noise[name]) / 50**0.5
        np.testing.assert_allclose(theta[name], want, rtol=1e-5, atol=1e-6)
        assert abs(jnp.std(noise[name]) - 1) < 4 / (2 * 2000 * p.size) ** 0.5
        assert abs(jnp.mean(noise[name])) < 4 / (2000 * p.size) ** 0.5


def test_a_new_leaf_at_the_end_leaves_the_others_their_noise():
    """Leaf i draws with fold_in(key, i), alone or together with leaves of its shape."""
    first = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    more = {**first, "c": jnp.zeros(4), "d": jnp.zeros(2)}
    tx = blr.gblr(0.1, ess=1.0, alpha=2.0)

    @jax.jit
    def run():
        noises = [blr.sample_posterior(KEY, p, tx.init(p))[1] for p in (first, more)]
        keys = [jax.random.fold_in(KEY, i) for i in range(4)]
        sizes = [x.shape for x in jax.tree.leaves(more)]
        return noises, [blr.q_gaussian_noise(k, n, 2.0) for k, n in zip(keys, sizes, strict=True)]

    (few, many), alone = run()
    for x, y in zip(jax.tree.leaves(many), alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    for name, x in few.items():
        np.testing.assert_allclose(x, many[name], rtol=1e-6)
    assert len({float(x[0]) for x in many.values()}) == 4


def test_leaves_below_float32_round_at_random_with_the_right_mean():
    """At a width of 1/8 of a unit in the last place the mean of draws is off the grid, too."""
    unit = 2.0**-7
    params = {"w": jnp.ones(50_000, jnp.bfloat16)}
    tx = blr.gblr(0.1, ess=(8 / unit) ** 2, weight_decay=0.0)
    state = tx.init(params)._replace(master={"w": jnp.full(50_000, 1 + unit / 3)})
    theta, noise = jax.jit(lambda: blr.sample_posterior(KEY, params, state))()
    assert theta["w"].dtype == jnp.bfloat16 and noise["w"].dtype == jnp.float32
    drawn = np.float64(theta["w"])
    assert set(np.unique(drawn)) <= {1 - unit / 2, 1.0, 1 + unit, 1 + 2 * unit}
    assert abs(drawn.mean() - (1 + unit / 3)) < 4 * unit / 50_000**0.5
    slope = np.mean((drawn - 1 - unit / 3) * np.float64(noise["w"])) / (unit / 8)
    assert abs(slope - 1) < 4 * 8 / 50_000**0.5


def test_rounding_has_the_derivative_of_a_cast():
    """Draws of bfloat16 leaves pass slopes on to the parameters, so predictions can be trained."""
    params = jnp.ones(50, jnp.bfloat16)
    state = blr.gblr(0.1, ess=1e3).init(params)._replace(master=None)
    slopes = jax.jit(jax.grad(lambda p: jnp.sum(blr.sample_posterior(KEY, p, state)[0])))(params)
    np.testing.assert_array_equal(slopes, jnp.ones(50, jnp.bfloat16))


@both_kinds
def test_noise_lies_where_the_parameters_lie(kind):
    """On a mesh the numbers are those of one device, and each leaf keeps its sharding."""
    params = {"a": contract.normal(8, 16), "b": contract.normal(8, 16, seed=1)}
    specs = {"a": P("data", "model"), "b": P(None, "model")}
    mesh = make_mesh(kind)
    tx = blr.gblr(0.1, ess=5.0, alpha=1.5)
    with jax.set_mesh(mesh):
        placed, shardings = place(mesh, params, specs)
        run = jax.jit(lambda p, s: blr.sample_posterior(KEY, p, s))
        got = run(placed, tx.init(placed))
        assert_same_layout(got[0], shardings)
        if kind == "explicit":  # with automatic axes the compiler decides
            assert_same_layout(got[1], shardings)
    want = jax.jit(lambda p, s: blr.sample_posterior(KEY, p, s))(params, tx.init(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_the_state_is_found_and_told_apart():
    """Nested states work; none, or two for one leaf, are refused; so are other shapes."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = blr.gblr(0.1, ess=1.0)
    nested = optax.chain(optax.clip(1.0), optax.apply_if_finite(tx, 3)).init(params)
    jax.eval_shape(blr.sample_posterior, KEY, params, nested)
    for state, match in (
        (optax.sgd(0.1).init(params), "opt_state must hold a GBLRState, got none"),
        (optax.chain(tx, tx).init(params), "one GBLRState for each leaf, got two for a"),
    ):
        with pytest.raises(ValueError, match=match):
            blr.sample_posterior(KEY, params, state)
    with pytest.raises(ValueError, match=r"wanted \(3,\) at b, got \(4,\)"):
        blr.sample_posterior(KEY, {**params, "b": jnp.ones(4)}, nested)
    with pytest.raises(ValueError, match="params must have the structure"):
        blr.sample_posterior(KEY, {"a": jnp.ones(2)}, nested)
