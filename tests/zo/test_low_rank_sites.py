"""Low-rank perturbations at the sites, against the perturbed tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from spectral.models import quick_jit
from zo.tapped import PROBLEMS, normal

from jaxkit import zo
from jaxkit.zo import _directions, _low_rank_sites, _tap_plan

KEY = jax.random.key(1)
# Leaves with two axes that are perturbed as a whole: positions, scales, biases and what a loop
# takes in or gives out; and convolutions whose groups the factors do not respect.
DENSE = {
    "linen_scanned": {"bias", "scale", "pos_embed"},
    "nnx_transformer": {"value"},
    "recurrent": {"w", "scale"},
    "branches": {"d"},
}


def at_sites(loss_fn, rank):
    factors = functools.partial(_directions.low_rank_factors, rank=rank)
    draw = zo.low_rank(rank).draw
    return _low_rank_sites.low_rank_loss(loss_fn, draw, factors), draw, factors


def perturbed(params, scale, draw):
    leaves, treedef = jax.tree.flatten(params)
    keys = [jax.random.fold_in(KEY, i) for i in range(len(leaves))]
    moved = [
        x + scale * draw(k, i, x, ()) for i, (k, x) in enumerate(zip(keys, leaves, strict=True))
    ]
    return treedef.unflatten(moved)


@pytest.mark.parametrize("name", PROBLEMS)
def test_loss_is_that_at_the_perturbed_parameters(name):
    """Factors at the sites give the losses of ``params + scale * A B'``, whatever the model."""
    loss_fn, params, *args = PROBLEMS[name]()
    loss, draw, _ = at_sites(loss_fn, 2)

    def both(params, *args):
        moved = loss_fn(perturbed(params, 0.1, draw), *args)
        return loss(params, 0.1, KEY, (), *args), moved

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got, want = quick_jit(both)(params, *args)
        plan = _tap_plan.plan(loss_fn, params, tuple(args))
    np.testing.assert_allclose(got, want, 2e-4)
    dense = _low_rank_sites._adders(plan)[None]
    found = {plan.paths[i].split("/")[-1] for i in dense if plan.types[i].ndim > 1}
    assert found == DENSE.get(name, set())


def assert_same(fun, rank, w, x):
    """Checks the factors against the perturbed leaf, and that the perturbation is felt."""
    loss, draw, _ = at_sites(fun, rank)

    @quick_jit
    def both(w, x):
        return loss(w, 0.5, KEY, (), x), fun(perturbed(w, 0.5, draw), x), fun(w, x)

    for got, want, start in zip(*map(jax.tree.leaves, both(w, x)), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)
        assert np.abs(want - start).max() > 0.01


@pytest.mark.parametrize("spec", ["btd,dm->btm", "dm,btd->mbt", "bed,edm->bem", "btd,dhk->bhtk"])
def test_any_product_takes_the_factors(spec):
    """The leaf first or second, batched, with several free or contracted axes."""
    shapes = {"b": 2, "t": 3, "d": 4, "m": 5, "e": 3, "h": 2, "k": 6}
    first, second = spec.split("->")[0].split(",")
    leaf_first = spec.startswith("dm")
    leaf, data = (first, second) if leaf_first else (second, first)
    w, x = (normal(*(shapes[c] for c in names)) for names in (leaf, data))

    def fun(w, x):
        return jnp.einsum(spec, w, x) if leaf_first else jnp.einsum(spec, x, w)

    assert_same(fun, 1, w, x)


def test_last_axis_may_be_contracted():
    """A head that is tied, x E', meets the factor of the columns first."""
    w, x = normal(7, 4), normal(3, 4)
    fun = lambda w, x: x @ w.T  # noqa: E731
    assert_same(fun, 3, w, x)


def test_convolution_with_features_first_is_perturbed_as_a_whole():
    """The factor of the last axis is one of the window then, which no convolution can take."""

    def fun(w, x):
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME")

    assert_same(fun, 1, normal(5, 4, 3), normal(2, 4, 6))


def test_leaf_that_is_read_by_itself_is_perturbed_as_a_whole():
    """Weight decay, an output of parameters alone, and a comparison see the perturbed leaf."""
    w, x = normal(5, 4), normal(3, 5)
    assert_same(lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(w**2), 1, w, x)
    assert_same(lambda w, x: (x @ w, jnp.sum(w**2)), 1, w, x)
    assert_same(lambda w, x: (x @ w) * jnp.sum(jnp.where(x.T > w[:, :3], 1.0, 0.0)), 1, w, x)


def test_bfloat16_weights_feel_a_step_below_their_spacing():
    """Weights of one and a scale of 1e-4: at the site the change of the loss is right to 1 %."""
    w, x = jnp.ones((64, 8), jnp.bfloat16), jnp.ones((4, 64), jnp.bfloat16)

    def fun(w, x):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    loss, draw, _ = at_sites(fun, 1)
    change = loss(w, 1e-4, KEY, (), x) - fun(w, x)
    u = draw(jax.random.fold_in(KEY, 0), 0, w, ())
    want = 1e-4 * jnp.sum(u, 0)
    np.testing.assert_allclose(change[0], want, 0.01, 0.01 * np.abs(want).max())


def test_no_perturbed_copy_is_made():
    """Temporaries of a wide layer stay below a tenth of the weight that is perturbed."""
    w, x = (
        jax.ShapeDtypeStruct((2048, 1024), jnp.float32),
        jax.ShapeDtypeStruct((4, 2048), "float32"),
    )
    loss, _, _ = at_sites(lambda w, x: jnp.sum(jnp.sin(x @ w)), 1)
    compiled = jax.jit(lambda w, x: loss(w, 0.1, KEY, (), x)).lower(w, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * w.size / 10


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_give_the_loss_of_one(axis_type):
    """Examples over four devices, columns over two: factors at the sites change nothing of it."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    params, ids = {"e": normal(11, 6), "w": normal(6, 8)}, jnp.arange(32).reshape(8, 4) % 11

    def losses(p, ids):
        return jnp.mean(jnp.tanh(p["e"].at[ids].get(out_sharding=place) @ p["w"]), (1, 2))

    place = None
    loss, _, _ = at_sites(losses, 2)
    want = loss(params, 0.5, KEY, (), ids)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    split = {"e": put(params["e"], None, None), "w": put(params["w"], None, "model")}
    with jax.set_mesh(mesh):
        place = P("data", None, None) if axis_type == AxisType.Explicit else None
        got = jax.jit(lambda p, ids: loss(p, 0.5, KEY, (), ids))(split, put(ids, "data", None))
    np.testing.assert_allclose(got, want, 1e-5)
