"""The rewards of one group of outputs."""

import jax.numpy as jnp

from jaxkit import _check, _numerics


def checked(rewards, mask):
    """Checks one group; returns its rewards in float32 or wider, zero where masked, and a mask."""
    dtype = jnp.result_type(rewards)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"rewards must be real floating, got {dtype}.")
    sizes = _check.shape("rewards", rewards, "n")
    mask = jnp.ones(sizes["n"], bool) if mask is None else jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}.")
    _check.shape("mask", mask, "n", **sizes)
    wide = jnp.asarray(rewards, _numerics.wide(dtype))
    return jnp.where(mask, wide, 0), mask
