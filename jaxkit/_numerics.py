"""Numerics that several topics share."""

import jax
import jax.numpy as jnp


def wide(*dtypes):
    """Returns the dtype for sums and norms of ``dtypes``: float64 if one is, else float32."""
    # Not jnp.promote_types, which refuses to widen under strict promotion.
    is_double = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


def round_at_random(x, dtype, uniform):
    """Rounds to one of the two nearest numbers of ``dtype``, so that the mean is ``x``.

    ``uniform`` holds a number in [0, 1) for each entry. The derivative is that of a cast.
    """
    near = x.astype(dtype)
    error = x - near.astype(x.dtype)
    beyond = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(dtype)
    far = jax.lax.nextafter(jax.lax.stop_gradient(near), beyond)
    gap = jnp.abs(far.astype(x.dtype) - near.astype(x.dtype))
    step = jnp.where(uniform * gap < jnp.abs(error), far - near, 0)
    return near + jax.lax.stop_gradient(step)
