"""Numerics that several topics share."""

import jax.numpy as jnp


def wide(*dtypes):
    """Returns the dtype for sums and norms of ``dtypes``: float64 if one is, else float32."""
    # Not jnp.promote_types, which refuses to widen under strict promotion.
    is_double = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)
