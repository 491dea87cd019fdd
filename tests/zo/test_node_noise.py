"""The noise of node perturbation: its law, and that it can be drawn again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.zo import _node_noise

SHAPES = [(), (2, 33, 5), (300, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", _node_noise.KINDS)
def test_noise_is_the_same_for_all_values(name, shape):
    """Values, even NaN, change nothing, nor does jit; another key does."""
    draw, key = jax.jit(_node_noise.KINDS[name]), jax.random.key(0)
    first = draw(key, jnp.ones(shape))
    for value in -1.0, jnp.nan, jnp.inf:
        np.testing.assert_array_equal(draw(key, jnp.full(shape, value)), first)
    np.testing.assert_array_equal(_node_noise.KINDS[name](key, jnp.zeros(shape)), first)
    assert (first.shape, first.dtype) == (shape, jnp.float32)
    others = [draw(jax.random.key(i), jnp.ones(shape)) for i in range(1, 9)]
    assert any(np.any(np.asarray(x != first)) for x in others)


@pytest.mark.parametrize("name", _node_noise.KINDS)
def test_noise_is_white(name):
    """Mean zero, variance one, and no correlation between neighbors on any axis."""
    draws = jax.vmap(_node_noise.KINDS[name], (0, None))
    x = np.asarray(draws(jax.random.split(jax.random.key(1), 400), jnp.zeros((3, 70, 4))))
    bound = 4.5 / x.size**0.5
    assert abs(x.mean()) < bound
    assert abs((x**2).mean() - 1) < 2 * bound
    for axis in range(4):
        for step in 1, 2:
            if x.shape[axis] > step:
                assert abs((x * np.roll(x, step, axis)).mean()) < 1.5 * bound


def test_every_bit_of_a_word_serves_one_entry():
    """64 signs come from two words, the 32 bits of each in order."""
    key = jax.random.key(3)
    signs = _node_noise.rademacher(key, jnp.zeros(64))
    words = jax.random.bits(key, (2,), jnp.uint32)
    bits = (np.asarray(words)[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    np.testing.assert_array_equal(signs, 1.0 - 2.0 * bits.reshape(-1))


def test_zero_is_zero_after_anything():
    """The number that waits for an array is 0 whatever is in it, and if nothing is."""
    for x in jnp.array([-1.0, 2.0]), jnp.full((2, 2), -jnp.nan), jnp.zeros((0, 3)), jnp.float16(-2):
        assert _node_noise.zero_after(x) == 0
