"""Query points: places and weights of every kind, lookup, keys, precision, what is refused."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problems import make_mesh

from jaxkit import denoise


def after_one_step(tx, params):
    """Returns the state after an update at ``params``, as one array or a tree."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return tx.update(zeros, tx.init(params), params, queried=True, hvp=zeros)[1]


def points_of(make):
    def fun(before, params):
        return denoise.query_points(after_one_step(make(), before), params)[0]

    return lambda: (fun, (contract.normal(8, 4), contract.normal(8, 4, seed=1)))


test_contract = contract.function(
    contract.Case("query_points", points_of(lambda: denoise.denoise(0.3, order=3))),
    contract.Case(
        "relative_radius", points_of(lambda: denoise.denoise(0.02)), public="query_points"
    ),
)

X = np.array([1.0, -2.0], np.float32)
D = np.array([0.5, 0.25], np.float32)


@pytest.mark.parametrize(
    ("tx", "s", "weights"),
    [
        (denoise.ema(0.25), (1,), (1,)),
        (denoise.igt(0.25), (4,), (1,)),
        (denoise.hvp(0.25), (1,), (1,)),
        (denoise.storm(0.25), (1, 0), (4, -3)),
        (denoise.disk(0.25, gamma=0.5), (1, 1.5), (1 - 6, 6)),
        # tau = (1/2, -1/4): a = 1 - 1/2 * 5/4; w by the formula of two nodes.
        (denoise.denoise(0.5, taus=(1, -0.5)), (2, -4), (10 / 9, -1 / 9)),
    ],
)
def test_each_kind_asks_where_it_should(tx, s, weights):
    """Points are x_prev + s d, the parameters bit for bit where s is 1."""
    points, got = denoise.query_points(after_one_step(tx, X), X + D)
    want = np.array(s, np.float32)[:, None] * D + X
    np.testing.assert_allclose(points, want, rtol=1e-6)
    np.testing.assert_allclose(got, weights, rtol=1e-5)
    for point, at in zip(points, s, strict=True):
        assert at != 1 or (point == X + D).all()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_first_query_is_at_the_parameters(order):
    """Before any update all weight is on the parameters, whatever the step since init."""
    state = denoise.denoise(0.1, order=order).init(X)
    points, weights = denoise.query_points(state, X + D)
    assert (points[0] == X + D).all()
    np.testing.assert_array_equal(weights, np.arange(len(weights)) == 0)


def test_steps_of_half_precision_are_exact_before_they_are_stretched():
    """In bfloat16 a point is within half a unit in its last place of the exact one."""
    x = jnp.array([1.0, 100.0], jnp.bfloat16)
    moved = jnp.array([1.0078125, 100.5], jnp.bfloat16)
    points, _ = denoise.query_points(after_one_step(denoise.igt(0.1), x), moved)
    want = np.array([1 + 10 * 0.0078125, 105.0])
    got = np.asarray(points[0], np.float64)
    assert points.dtype == jnp.bfloat16
    np.testing.assert_array_less(np.abs(got - want), np.array([2**-8, 2**-2]) + 1e-9)


def test_trees_keep_their_structure_and_dtypes():
    """None leaves, scalars and mixed dtypes get a leading axis and no other change."""
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": (jnp.zeros([]), None)}
    points, weights = denoise.query_points(denoise.denoise(0.3, order=3).init(params), params)
    assert jax.tree.structure(points) == jax.tree.structure(params)
    assert points["a"].shape == (2, 3) and points["a"].dtype == jnp.bfloat16
    assert points["b"][0].shape == (2,) and weights.dtype == jnp.float32


def test_a_state_is_found_at_any_depth():
    """Through chain, inject_hyperparams, MultiSteps and apply_if_finite the points are the same."""
    want = denoise.query_points(after_one_step(denoise.igt(0.25), X), X + D)
    with jax.numpy_dtype_promotion("standard"):
        for tx in (
            optax.chain(optax.clip(1.0), optax.chain(denoise.igt(0.25), optax.sgd(0.1))),
            optax.inject_hyperparams(denoise.igt)(gain=0.25),
            optax.MultiSteps(denoise.igt(0.25), 1),
            optax.apply_if_finite(optax.chain(denoise.igt(0.25), optax.adam(0.1)), 2),
        ):
            state = tx.init(X)
            _, state = tx.update(jnp.zeros(2), state, X, queried=True)
            got = denoise.query_points(state, X + D)
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_bad_input_is_named():
    """No state, several states, other parameters, a key too many or too few."""
    igt = denoise.igt(0.3)
    random = denoise.denoise(0.3, order=3, random_node=True).init(X)
    key = jax.random.key(0)
    for args, error, match in (
        ((optax.adam(0.1).init(X), X), ValueError, "opt_state must hold a DenoiseState, got none"),
        (((igt.init(X), igt.init(X)), X), ValueError, "must hold one DenoiseState, got 2"),
        (
            (igt.init({"w": X}), {"w": jnp.ones(3)}),
            ValueError,
            r"params must have the shapes of the denoiser's state, wanted \[2\] at w, got \[3\]",
        ),
        ((igt.init(X), jnp.arange(2)), TypeError, "params must be real floating, got int32"),
        ((random, X), ValueError, "key must be a key for a denoiser of kind 'random', got None"),
        ((igt.init(X), X, key), ValueError, "key must be None for a denoiser of kind 'line', got"),
    ):
        with pytest.raises(error, match=match):
            denoise.query_points(*args)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_trust_radius_refuses_shards_in_a_shard_map_and_names_them(kind):
    """The norm of a shard is not that of the leaf; without a radius shards pass."""
    mesh = make_mesh(kind, (8,), ("data",))
    params = {"same": jnp.ones(8), "split": jnp.ones(8)}
    specs = {"same": P(), "split": P("data")}

    def ask(tx):
        def body(params):
            return denoise.query_points(tx.init(params), params)[0]

        out = {"same": P(), "split": P(None, "data")}
        run = jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=out)
        named = jax.tree.map(
            lambda s: jax.NamedSharding(mesh, s), specs, is_leaf=lambda s: type(s) is P
        )
        return jax.jit(run)(jax.device_put(params, named))

    np.testing.assert_array_equal(ask(denoise.denoise(0.3, order=3))["split"], np.ones((2, 8)))
    for tx in (denoise.denoise(), denoise.denoise(0.1, trust_radius=1.0)):
        with pytest.raises(ValueError, match="for a trust radius, got split varying over data"):
            ask(tx)


def test_the_automatic_gain_refuses_shards_too():
    """Its averages are those of a whole leaf."""
    mesh, tx = make_mesh("auto", (8,), ("data",)), denoise.ema("auto")

    def body(params):
        return tx.update(params, tx.init(params), params, query_variance=0.1)[0]

    run = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="for gain='auto', got w varying over data"):
        jax.eval_shape(run, {"w": jnp.ones(8)})
