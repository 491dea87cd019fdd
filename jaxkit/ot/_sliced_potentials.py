"""Features of a pair of point sets: the exact potentials of its slices."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkit import _check
from jaxkit.ot import _pair
from jaxkit.ot._costs import squared
from jaxkit.ot._duals_1d import duals_1d
from jaxkit.ot._projections import linear


def sliced_potentials(
    x, y, a, b, theta, *, cost=squared, project=linear, mask_x=None, mask_y=None, chunk=None
):
    r"""Returns the 1-D potentials of a pair in each of L directions, one column a direction.

    Column l holds :func:`duals_1d` of :math:`\langle\theta_l, x_i\rangle` and
    :math:`\langle\theta_l, y_j\rangle` with the same weights. Nothing is averaged: a weighted sum
    of the columns is the potential of :func:`predict_potential`. Derivatives in the points pass
    through, as of :func:`duals_1d`; fits take them in the weights of the columns only.

    Args:
      x: points ``[n, d]`` of the source, real floating.
      y: points ``[m, d]`` of the target, real floating.
      a: weights ``[n]``, not negative, of sum 1; None for equal ones.
      b: weights ``[m]``; None for equal ones.
      theta: directions ``[L, k]``; k = d for linear slices.
      cost: convex cost of two numbers, as of :func:`duals_1d`, static.
      project: ``(points[n, d], theta[L, k]) -> [n, L]``, static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool; None for all.
      chunk: number of directions at a time, static; None for all at once. It bounds the memory
        and changes no value.

    Returns:
      ``(phi, psi)``, ``[n, L]`` and ``[m, L]`` in the dtypes of ``x`` and ``y``; 0 at masked atoms.
      A column is NaN where :func:`duals_1d` is. The smallest projection has the value 0 in
      ``phi``.

    Raises:
      TypeError: an array is not real floating, a mask not bool, ``cost`` or ``project`` not a
        function, ``chunk`` not a whole number.
      ValueError: a shape is not as above, or ``chunk`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x = jnp.array([[0.0, 0.0], [1.0, 2.0]])
      >>> phi, psi = jax.jit(ot.sliced_potentials)(x, x + 1, None, None, jnp.eye(2))
      >>> print(phi)
      [[ 0.  0.]
       [-2. -4.]]

    Source: arXiv:2604.15114. Derived here: the symmetric pair in each direction.

    Cost: O(L (n d + (n + m) log(n + m))) time. Memory O(L (n + m)) for the result, and on the way
    ten times the part of ``chunk`` directions.
    """
    dtypes = jnp.result_type(x), jnp.result_type(y)
    (x, y), masks = _pair.points(x, y, mask_x, mask_y)
    columns = features(x, y, a, b, *masks, theta, cost, project, chunk)
    return tuple(side.T.astype(dtype) for side, dtype in zip(columns, dtypes, strict=True))


def features(x, y, a, b, mask_x, mask_y, theta, cost, project, chunk):
    """Returns the potentials as rows, ``[L, n]`` and ``[L, m]``, of points as of `_pair.points`."""
    _check.function("project", project)
    sizes = _check.shape("theta", theta, "L k")
    _check.count("the number of directions in theta", sizes["L"])
    theta = jnp.asarray(theta, x.dtype)

    def one(sides):
        return duals_1d(*sides, a, b, cost=cost, mask_x=mask_x, mask_y=mask_y)

    rows = project(x, theta), project(y, theta)
    for name, side, points in zip("xy", rows, (x, y), strict=True):
        _check.shape(f"project({name}, theta)", side, "n L", n=len(points), L=sizes["L"])
    rows = tuple(side.T for side in rows)
    if chunk is None:
        return jax.vmap(one)(rows)
    return lax.map(one, rows, batch_size=_check.count("chunk", chunk))
