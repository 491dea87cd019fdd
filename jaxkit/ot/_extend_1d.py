"""Potentials on the line between and beyond the points that they were made from."""

import jax.numpy as jnp

from jaxkit import _check
from jaxkit.ot import _pair, _staircase
from jaxkit.ot._costs import squared


def extend_1d(q, x, y, a=None, b=None, *, cost=squared, mask_x=None, mask_y=None, tol=None):
    r"""Returns the potential f of :func:`duals_1d` at any numbers.

    Between two neighbors, :math:`x_i \le q < x_{i+1}`, it is
    :math:`f_i + c(q, y_J) - c(x_i, y_J)` with the partner :math:`y_J` where the row of :math:`x_i`
    ends in the optimal plan, the mean over both tie rules; left of all x the partner is the
    smallest y. At the points of x it is f itself, also at those of weight zero. For each tie rule
    it is the c-transform of that rule's g.

    Args:
      q: numbers ``[k]`` where to read the potential, real floating.
      x: numbers ``[n]``, as of :func:`duals_1d`.
      y: numbers ``[m]``.
      a: weights ``[n]``, not negative, of sum 1; None for equal ones.
      b: weights ``[m]``; None for equal ones.
      cost: convex cost of two numbers, elementwise with broadcasting, static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool; None for all.
      tol: cumulative weights that differ by no more are ties, as of :func:`duals_1d`.

    Returns:
      ``[k]`` in the dtype of ``q``, computed in float32 or wider. NaN where q is; NaN as a whole
      where :func:`duals_1d` is.

    Raises:
      TypeError: an array is not real floating, a mask not bool, ``cost`` not a function.
      ValueError: a shape is not as above, or ``tol`` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x = jnp.array([0.0, 1.0, 2.0])
      >>> print(ot.extend_1d(jnp.array([-1.0, 0.5, 2.0, 5.0]), x, x + 3))
      [  7.    -3.25 -12.   -21.  ]

    Source: derived here.

    Cost: :func:`duals_1d`, and O(log n) for each number.
    """
    dtype = jnp.result_type(q)
    (x, y), masks = _pair.points(x, y, mask_x, mask_y, spec="")
    q = _pair.real("q", q).astype(x.dtype)
    _check.shape("q", q, "k")
    _staircase.check_options(cost, tol)
    stair = _staircase.staircase(x, y, a, b, *masks, tol)
    f, _ = _staircase.potentials(stair, cost)
    place = _staircase.search(stair.x, q, jnp.less_equal)
    left = jnp.maximum(place - 1, 0)
    x_left, f_left = _staircase.take(stair.x, left), _staircase.take(f, left)
    last = jnp.full(1, len(y) - 1, jnp.int32)
    steps = []
    for columns, _ in stair.paths:
        partner = _staircase.take(jnp.concatenate([columns, last]), left)
        y_at = _staircase.take(stair.y, jnp.where(place == 0, 0, partner))
        steps.append(_staircase.rise(cost, x_left, q, y_at))
    return jnp.where(stair.ok, f_left + sum(steps) / len(steps), jnp.nan).astype(dtype)
