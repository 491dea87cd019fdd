"""Costs of moving mass: of two numbers, for slices, and of two points."""

import functools
import math
import numbers

import jax.numpy as jnp

from jaxkit import _check, _numerics


def squared(x, y):
    """Returns ``(x - y) ** 2``, the cost of slices by default.

    Args:
      x: real floating, of any shape.
      y: real floating, of a shape that broadcasts with that of ``x``.

    Returns:
      The costs, in the shape that both broadcast to.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.squared(jnp.array([1.0, 3.0]), 2.5))
      [2.25 0.25]

    Source: derived here.

    Cost: elementwise.
    """
    return jnp.square(x - y)


@functools.lru_cache(maxsize=64)
def power(p):
    """Returns the cost ``|x - y| ** p`` of two numbers, convex for ``p >= 1``.

    The same ``p`` gives the same function, so that nothing compiles twice.

    Args:
      p: a Python number, at least 1, static.

    Returns:
      Function ``(x, y) -> costs``, elementwise, with broadcasting.

    Raises:
      TypeError: ``p`` is not a Python number.
      ValueError: ``p`` is less than 1 or not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.power(3)(jnp.array([1.0, 3.0]), 1.0))
      [0. 8.]

    Source: derived here.

    Cost: elementwise.
    """
    if not isinstance(p, numbers.Real) or isinstance(p, bool):
        raise TypeError(f"p must be a static number, got {p!r}.")
    _check.between("p", p, 1, math.inf)

    def cost(x, y):
        gap = x - y
        return (gap * jnp.sign(gap)) ** p  # the derivative of abs at 0 is 1

    return cost


def sqeuclidean(x, y):
    """Returns the squared Euclidean distance of two points, the ground cost by default.

    Args:
      x: point ``[d]``, real floating.
      y: point ``[d]``, real floating.

    Returns:
      ``sum((x - y) ** 2)``, ``[]`` in the dtype of the points, summed in float32 or wider.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.sqeuclidean(jnp.array([0.0, 3.0]), jnp.array([4.0, 0.0])))
      25.0

    Source: derived here.

    Cost: d products.
    """
    gap = x - y
    return jnp.sum(jnp.square(gap.astype(_numerics.wide(gap.dtype)))).astype(gap.dtype)


def geodesic(x, y):
    """Returns the angle in radians between two unit vectors, the ground cost of a sphere.

    It is ``arccos`` of the inner product, computed as ``2 atan2(|x - y|, |x + y|)``: exact for
    close and for opposite points, where ``arccos`` loses half of the digits. The derivative there
    is 0 in place of infinite.

    Args:
      x: unit vector ``[d]``, real floating.
      y: unit vector ``[d]``, real floating.

    Returns:
      The angle, in ``[0, pi]``, ``[]`` in the dtype of the points.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.geodesic(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])) * 2 / jnp.pi)
      1.0

    Source: the half-angle formula for unit vectors.

    Cost: 2 d products and an arc tangent.
    """
    dtype = jnp.result_type(x, y)
    x, y = (jnp.asarray(z, _numerics.wide(dtype)) for z in (x, y))
    return (2 * jnp.arctan2(_norm(x - y), _norm(x + y))).astype(dtype)


def _norm(x):
    sq = jnp.sum(jnp.square(x))
    return jnp.where(sq > 0, jnp.sqrt(jnp.where(sq > 0, sq, 1)), 0)
