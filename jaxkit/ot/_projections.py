"""Maps from points to numbers, one number for each direction."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics


def linear(points, theta):
    """Returns the inner products of points and directions.

    Args:
      points: ``[n, d]`` real floating.
      theta: directions ``[L, d]``.

    Returns:
      ``[n, L]`` in the dtype of ``points``; products are at the highest precision, since sorting
      depends on it.

    Raises:
      ValueError: a shape is not as above.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.linear(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0], [0.6, 0.8]])))
      [[2.  2.2]]

    Source: arXiv:2604.15114.

    Cost: n L d products.
    """
    sizes = _check.shape("points", points, "n d")
    _check.shape("theta", theta, "L d", d=sizes["d"])
    wide = _numerics.wide(jnp.result_type(points))
    points_wide, theta = jnp.asarray(points, wide), jnp.asarray(theta, wide)
    out = jnp.matmul(points_wide, theta.T, precision=jax.lax.Precision.HIGHEST)
    return out.astype(jnp.result_type(points))


def stereographic(points, theta):
    """Returns the inner products of the plane images of points on a sphere with directions.

    The map is the stereographic one from the north pole, ``2 (x1, x2) / (1 - x3)``, with ``1 - x3``
    held above 1e-6. Chordal slices, that is :func:`linear` with directions in three dimensions,
    have no pole, and predict much better.

    Args:
      points: unit vectors ``[n, 3]``, real floating.
      theta: directions ``[L, 2]`` in the plane.

    Returns:
      ``[n, L]`` in the dtype of ``points``.

    Raises:
      ValueError: a shape is not as above.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.stereographic(jnp.array([[0.8, 0.0, -0.6]]), jnp.eye(2)))
      [[1. 0.]]

    Source: arXiv:2604.15114.

    Cost: 2 n L products.
    """
    _check.shape("points", points, "n 3")
    _check.shape("theta", theta, "L 2")
    dtype = jnp.result_type(points)
    points = jnp.asarray(points, _numerics.wide(dtype))
    plane = 2 * points[:, :2] / jnp.maximum(1 - points[:, 2:], 1e-6)
    return linear(plane, theta).astype(dtype)
