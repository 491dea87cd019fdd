"""Drawing again: key discipline, memory, rounding and sharded leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import assert_same_layout, both_kinds, make_mesh, place

from jaxkit import zo
from jaxkit.zo import _replay

KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)
COEFFS = jnp.array([1.0, -2.0, 0.5])
PARAMS = {"a": jnp.ones((7, 3)), "b": jnp.arange(4.0), "c": jnp.float32(2.0)}


def test_each_leaf_draws_from_its_own_key():
    """Leaf i adds normal(fold_in(key, i)), alone or with others of its shape, as when alone."""
    params = {**PARAMS, "d": jnp.ones(4), "large": jnp.ones(5000), "larger": jnp.ones((70, 70))}
    got = jax.jit(lambda: _replay.add(zo.gaussian(), params, KEYS, COEFFS, ()))()
    for index, (name, x) in enumerate(params.items()):
        draws = [jax.random.normal(jax.random.fold_in(key, index), x.shape) for key in KEYS]
        want = x + jnp.tensordot(COEFFS, jnp.stack(draws), 1)
        np.testing.assert_allclose(got[name], want, atol=1e-6)
    plain = jax.jit(lambda: _replay.add(zo.gaussian(), PARAMS, KEYS, COEFFS, ()))()
    for name in PARAMS:
        np.testing.assert_allclose(plain[name], got[name], atol=1e-6)


@both_kinds
def test_a_mesh_does_not_change_the_draws(kind):
    """A leaf that a mesh splits gets the numbers of one device, in all ways to round."""
    params = {"stack": jnp.ones((4, 8, 5), jnp.bfloat16), "vector": jnp.ones(50)}
    specs = {"stack": P("data", "model"), "vector": P("model")}

    def run(params):
        def at(direction, rounding):
            return _replay.add(direction, params, KEYS, COEFFS, (), rounding=rounding)

        steps = map(at, (zo.gaussian(), zo.rademacher()), ("nearest", "stochastic"))
        return *steps, _replay.gram(zo.gaussian(), params, KEYS[:2], ())

    want = jax.jit(run)(params)
    mesh = make_mesh(kind)
    placed, _ = place(mesh, params, specs)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(placed)
    for x, y in zip(got[:2], want[:2], strict=True):
        assert_same_layout(x, placed)
        # Another order of sums may round one entry in bfloat16 the other way.
        differs = jnp.mean(x["stack"] != y["stack"])
        assert differs < 0.02 and jnp.max(jnp.abs(x["stack"] - y["stack"])) < 0.05
        np.testing.assert_allclose(x["vector"], y["vector"], atol=2e-6)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-4)


@pytest.mark.parametrize("num", [1, 3])
def test_a_huge_leaf_needs_no_scratch(num):
    """A donated leaf of 64 MiB moves along directions in less than a thousandth of its size."""
    leaf = jax.ShapeDtypeStruct((4, 2048, 2048), jnp.float32)
    run = jax.jit(
        lambda x: _replay.add(zo.gaussian(), x, KEYS[:num], COEFFS[:num], ()), donate_argnums=0
    )
    assert run.lower(leaf).compile().memory_analysis().temp_size_in_bytes < 4 * leaf.size / 1000


def test_inner_products_are_those_of_the_directions():
    """The Gram matrix by drawing again is that of the directions written out."""
    direction = zo.gaussian()
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    rows = [
        np.concatenate(
            [
                np.reshape(x, -1)
                for x in jax.tree.leaves(
                    _replay.add(direction, zeros, KEYS[k : k + 1], jnp.ones(1), ())
                )
            ]
        )
        for k in range(3)
    ]
    rows = np.stack(rows)
    gram = jax.jit(lambda: _replay.gram(direction, PARAMS, KEYS, ()))()
    np.testing.assert_allclose(gram, rows @ rows.T, atol=2e-5)
    norms = jax.jit(lambda: _replay.squared_norms(direction, PARAMS, KEYS, ()))()
    np.testing.assert_allclose(norms, np.sum(rows**2, 1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_stochastic_rounding_takes_one_of_two_neighbors_with_the_exact_mean(dtype):
    """Every entry is a neighbor of the sum, the mean of many is the sum; exact sums stay."""
    x = np.float32([1.0, -3.0, 1e-3, 0.0, 100.0])
    delta = np.float32([1e-3, 2e-3, -3e-7, 1e-30, 0.0])
    total = np.float64(x.astype(dtype)) + delta
    direction = zo.gaussian()._replace(draw=lambda *args: jnp.asarray(delta))

    def at(key):
        two = [jnp.asarray(x, dtype)] * 2
        first, second = _replay.add(
            direction, two, key[None], jnp.ones(1), (), rounding="stochastic"
        )
        return first.astype(jnp.float32), second.astype(jnp.float32)

    num = 40_000
    got, other = np.float64(jax.jit(jax.vmap(at))(jax.random.split(KEY, num)))
    assert (got != other).any()  # leaves of one shape round by themselves
    near = jnp.asarray(total, jnp.float32).astype(dtype)
    gap = np.float64(jnp.abs(jnp.nextafter(near, jnp.full_like(near, jnp.inf)) - near))
    assert (np.abs(got - total) <= gap).all()
    error = got.std(0) / num**0.5
    np.testing.assert_array_less(
        np.abs(got.mean(0) - total), 4.5 * error + 1e-7 * np.abs(total) + 1e-12
    )
    np.testing.assert_array_equal(got[:, 4], 100.0)


@both_kinds
def test_sharded_parameters_get_the_draws_of_one_device_and_keep_their_layout(kind):
    """Draws do not depend on the mesh; estimate and step lie where the parameters lie."""
    rng = np.random.default_rng(0)
    params = {"w": np.float32(rng.normal(size=(8, 6))), "b": np.float32(rng.normal(size=8))}
    specs = {"w": P("data", "model"), "b": P("model")}

    def run(params):
        probes = [
            zo.ZOProbe(KEYS, COEFFS, jnp.float32(0), (), direction)
            for direction in (zo.gaussian(), zo.low_rank(1))
        ]
        estimates = [zo.materialize(probe, params) for probe in probes]
        mixed = zo.probe(
            lambda p: jnp.sum(p["w"]), num_samples=2, mu=0.1, direction=zo.orthogonal()
        )(KEY, params)
        return estimates, zo.apply_probe(params, probes[0], 0.1), mixed.coeffs

    want = jax.jit(run)(params)
    mesh = make_mesh(kind)
    placed, _ = place(mesh, params, specs)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(placed)
    for tree in (*got[0], got[1]):
        assert_same_layout(tree, placed)
    # Losses differ by the order of a sum, which is divided by mu.
    np.testing.assert_allclose(got[2], want[2], rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got[:2], want[:2])
