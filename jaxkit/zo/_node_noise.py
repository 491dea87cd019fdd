"""Noise of node perturbation: the same numbers whenever an entry is asked for, at little memory."""

import jax
import jax.numpy as jnp

from jaxkit import _numerics, _random


def zero_after(x):
    """Returns the integer 0, but not before ``x`` is known.

    Noise depends on no data, so that XLA would draw all of it before the model starts, and keep
    it. No barrier stops it, but what depends on ``x`` must wait. So a key that is folded with this
    is always the same, but not known early.
    """
    if x.size == 0:
        return jnp.uint32(0)
    # Under Explicit sharding an entry cannot be read, the largest one can.
    first = jnp.max(x) if _is_split(x) else x[(0,) * x.ndim]
    word = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    return (word >> 31) >> 1


def rademacher(key, y):
    """Returns signs in the shape of ``y``, from random bits of which 32 share a word."""
    if y.ndim == 0:
        return rademacher(key, y[None])[0]
    # Words along the longest axis but that of the examples, which devices share.
    axis = max(range(y.ndim), key=lambda i: (i > 0 or y.ndim == 1, y.shape[i]))
    size, words = y.shape[axis], list(y.shape)
    words[axis] = -(-size // 32)
    bits = jax.random.bits(key, words, jnp.uint32)
    place = jnp.arange(32, dtype=jnp.uint32).reshape(32, *[1] * (y.ndim - axis - 1))
    place = jnp.broadcast_to(place, (*words[: axis + 1], 32, *words[axis + 1 :]))
    bits = jax.lax.shift_right_logical(
        jnp.expand_dims(bits, axis + 1) + jnp.zeros_like(place), place
    )
    words[axis] *= 32
    bits = jax.lax.slice_in_dim((bits & 1).reshape(words), 0, size, axis=axis)
    dtype = _numerics.wide(y.dtype)
    return _placed_like(1 - 2 * bits.astype(dtype), y)


def normal(key, y):
    """Returns normal numbers in the shape of ``y``."""
    return _placed_like(_random.normal(key, y.shape, _numerics.wide(y.dtype)), y)


KINDS = {"rademacher": rademacher, "normal": normal}


def _is_split(y):
    return any(axis is not None for axis in jax.typeof(y).sharding.spec)


def _placed_like(noise, y):
    return jax.sharding.reshard(noise, jax.typeof(y).sharding) if _is_split(y) else noise
