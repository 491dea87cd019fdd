"""Bounds of the transport cost that a potential proves, however it was found."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit.ot import _half_steps
from jaxkit.ot._costs import sqeuclidean


class Certificate(NamedTuple):
    r"""What a potential proves about transport costs.

    The exact cost is :math:`W = \min_P \langle P, C \rangle` over all plans P from a to b, the
    entropic cost :math:`\min_P \langle P, C \rangle + \epsilon\,\mathrm{KL}(P \,|\, a b^\top)`.

    Attributes:
      lower: ``[]``, not above the exact cost.
      upper: ``[]``, not below it: what the rounded plan costs.
      entropic_lower: ``[]``, not above the entropic cost: the value of the semi-dual at f.
      entropic_upper: ``[]``, not below it: the entropic cost of the rounded plan.
      marginal_error: ``[]``, sum of ``|P 1 - a|`` over the atoms of x for the plan after one half
        step, whose columns are exact. 0 says that f is optimal.
    """

    lower: jax.Array
    upper: jax.Array
    entropic_lower: jax.Array
    entropic_upper: jax.Array
    marginal_error: jax.Array


def certificate(f, x, y, a, b, epsilon, *, cost=sqeuclidean, mask_x=None, mask_y=None, chunk=None):
    r"""Returns lower and upper bounds of the transport cost, exact and entropic, from any f.

    The lower bounds are values of dual problems: of the exact one after two c-transforms of f, of
    the entropic one at f and its answer :func:`soft_g`. The upper bounds are costs of one plan:
    that of f after one half step, rounded so that both of its marginals are exact. All hold for
    any f, up to rounding relative to the costs and to ``epsilon``; a good f brings them together.

    With ``epsilon=0`` both costs are the exact one, and the plan sends each y to the x of smallest
    ``cost - f``, or to several by their weights. A small positive ``epsilon`` often has the lower
    ``upper``; ``lower`` does not depend on it.

    Args:
      f: ``[n]`` real floating, the potential at ``x``, product convention.
      x: ``[n, d]`` points.
      y: ``[m, d]`` points.
      a: ``[n]`` weights, not negative; None for equal ones.
      b: ``[m]`` weights, not negative; None for equal ones.
      epsilon: entropic strength, not negative, in the unit of the cost; may be traced.
      cost: function of two points ``[d]``, returns ``[]``; static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool, as ``mask_x``.
      chunk: number of points at a time, static; None for all at once.

    Returns:
      :class:`Certificate` in the dtype of ``f``, rounded to the nearest.

    Raises:
      TypeError: an array is not real floating, a mask not bool, or ``cost`` no function.
      ValueError: a shape does not fit, ``epsilon`` is negative, or ``chunk`` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [3.0]])
      >>> bounds = ot.certificate(jnp.array([0.0, -1.0]), x, y, None, None, 0.0)
      >>> print(bounds.lower, bounds.upper, bounds.marginal_error)
      2.0 2.0 0.0

    Source: arXiv:1705.09634, algorithm 2, for the rounding. Derived here: with exact columns it
    needs no second scaling, and is done a chunk at a time.

    Cost: five times n m costs, and two times n m exponentials; memory O(n m), with ``chunk``
    O((n + m) chunk).
    """
    pair = _half_steps.fill(x, y, a, b, mask_x, mask_y, cost)
    values = _half_steps.potential("f", f, pair.x, pair.mask_x)
    epsilon = _half_steps.strength(epsilon, pair.x)

    hard_g = _half_steps.answer(values, pair, None, cost, chunk)
    flipped, cost_back = _half_steps.flip(pair), _half_steps.flip_cost(cost)
    hard_f = _half_steps.answer(hard_g, flipped, None, cost_back, chunk)

    def column(y_j, b_j):
        g_j, shares = _half_steps.column(values, pair, y_j, epsilon, cost)
        return b_j * g_j, b_j * shares

    value, rows = _half_steps.sum_over(column, (pair.y, pair.b), chunk)
    # Of a plan with exact columns only rows are too heavy. They shrink, which leaves room in the
    # columns too, and the room of both is filled with a product.
    shrink = jnp.minimum(1, jnp.where(rows > 0, pair.a / jnp.where(rows > 0, rows, 1), 1))
    room = pair.a - shrink * rows
    lacking = jnp.sum(room)
    fill = jnp.where(lacking > 0, room / jnp.where(lacking > 0, lacking, 1), 0)

    def rounded(y_j, b_j):
        _, shares = _half_steps.column(values, pair, y_j, epsilon, cost)
        kept = shrink * shares
        plan = kept + fill * (1 - jnp.sum(kept))  # times b_j
        ratio = jnp.where(plan > 0, plan / jnp.where(pair.a > 0, pair.a, 1), 1)
        price = _half_steps.prices(cost, pair.x, y_j)
        return b_j * jnp.sum(plan * price), b_j * jnp.sum(plan * jnp.log(ratio))

    upper, divergence = _half_steps.sum_over(rounded, (pair.y, pair.b), chunk)
    bounds = Certificate(
        lower=jnp.sum(pair.a * hard_f) + jnp.sum(pair.b * hard_g),
        upper=upper,
        entropic_lower=jnp.sum(pair.a * values) + value,
        entropic_upper=upper + epsilon * divergence,
        marginal_error=jnp.sum(jnp.abs(rows - pair.a)),
    )
    return jax.tree.map(lambda bound: bound.astype(jnp.result_type(f)), bounds)
