"""Random numbers written out: those of jax.random, in a loop, under a mesh and with other keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import both_kinds, make_mesh

from jaxkit import _random

KEY = jax.random.key(7)
SHAPES = [(), (5,), (3, 7, 2), (0, 3), (300, 33)]
KINDS = {
    "uniform": (_random.uniform, jax.random.uniform),
    "normal": (_random.normal, jax.random.normal),
}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_jax_random(name, impl):
    """Bit for bit, for every shape, in float32 and float64."""
    ours, theirs = KINDS[name]
    key = jax.random.key(7, impl=impl)
    for shape in SHAPES:
        got = jax.jit(ours, static_argnums=(1, 2))(key, shape, jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(got, theirs(key, shape, jnp.float32))
    with jax.enable_x64(True):
        got = jax.jit(ours, static_argnums=(1, 2))(key, (5, 3), jnp.dtype(jnp.float64))
        np.testing.assert_array_equal(got, theirs(key, (5, 3), jnp.float64))
        assert got.dtype == jnp.float64


def test_a_batch_of_keys_draws_as_each_alone():
    """Under vmap, in a map and in a loop of Python the numbers are the same."""
    keys = jax.random.split(KEY, 3)

    def draw(key):
        return _random.normal(key, (4, 5), jnp.dtype(jnp.float32))

    want = np.stack([draw(key) for key in keys])
    np.testing.assert_array_equal(jax.vmap(draw)(keys), want)
    np.testing.assert_array_equal(jax.lax.map(draw, keys), want)


def test_nothing_of_the_size_of_the_draw_is_kept_around_a_loop():
    """Adding 40 draws in a loop takes the array of 1.2 MB and less than a hundredth beside it."""

    def add(keys, x):
        def step(x, key):
            return x + _random.normal(key, x.shape, x.dtype), None

        return jax.lax.scan(step, x, keys)[0]

    args = jax.random.split(KEY, 40), jnp.zeros((3, 1000, 100))
    compiled = jax.jit(add, donate_argnums=1).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 12_000


@both_kinds
def test_a_mesh_does_not_change_the_numbers(kind):
    """Split over eight devices the numbers are those of one to rounding, and nothing crosses."""
    mesh = make_mesh(kind)
    sharding = jax.sharding.NamedSharding(mesh, P("data", "model"))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((8, 6, 5)), sharding)
        run = jax.jit(lambda x: x + _random.normal(KEY, x.shape, x.dtype))
        np.testing.assert_allclose(run(x), jax.random.normal(KEY, (8, 6, 5)), rtol=1e-6)
        text = run.lower(x).compile().as_text()
    assert run(x).sharding.is_equivalent_to(sharding, 3)
    assert not any(word in text for word in ("all-gather", "all-reduce", "permute(", "all-to-all"))
