"""The transport plan of a potential, after none, one or two half steps."""

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.ot import _half_steps
from jaxkit.ot._costs import sqeuclidean


def plan_from_f(
    f,
    x,
    y,
    a,
    b,
    epsilon,
    *,
    half_steps=1,
    g=None,
    cost=sqeuclidean,
    mask_x=None,
    mask_y=None,
):
    r"""Returns the plan :math:`P_{ij} = a_i b_j \exp((f_i + g_j - c(x_i, y_j)) / \epsilon)`.

    One half step takes the g that answers f, so the columns of the plan are exact: they sum to
    ``b``, whatever f is. Two then take the f that answers this g: the rows are exact. That
    holds for any ``epsilon``, since the plan is built from shares, not from exponentials of
    f + g - c. A plan that has seen more half steps looks better: say how many with each figure.

    Args:
      f: ``[n]`` real floating, the potential at ``x``, product convention.
      x: ``[n, d]`` points.
      y: ``[m, d]`` points.
      a: ``[n]`` weights, not negative; None for equal ones.
      b: ``[m]`` weights, not negative; None for equal ones.
      epsilon: entropic strength, positive, in the unit of the cost; may be traced.
      half_steps: 1 for exact columns, 2 for exact rows, 0 to take f and ``g`` as they are, with no
        guarantee; static.
      g: ``[m]`` potential at ``y``; needed by ``half_steps=0``, unknown to the others.
      cost: function of two points ``[d]``, returns ``[]``; static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool, as ``mask_x``.

    Returns:
      The plan ``[n, m]`` in the dtype of ``f``, 0 at masked atoms and at weight 0.

    Raises:
      TypeError: an array is not real floating, a mask not bool, or ``cost`` no function.
      ValueError: a shape does not fit, ``epsilon`` is not positive, ``half_steps`` is unknown, or
        ``g`` is missing or not used.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [1.0]])
      >>> print(ot.plan_from_f(jnp.zeros(2), x, y, None, None, 0.1).round(3))
      [[0.5 0. ]
       [0.  0.5]]

    Source: arXiv:2604.15114. Derived here: the shares.

    Cost: n m costs and exponentials for each half step; memory O(n m).
    """
    _check.choice("half_steps", half_steps, (0, 1, 2))
    if (g is None) == (half_steps == 0):
        given = "None" if g is None else "a potential"
        raise ValueError(f"g must go with half_steps=0 only, got {given} with {half_steps}.")
    pair = _half_steps.fill(x, y, a, b, mask_x, mask_y, cost)
    values = _half_steps.potential("f", f, pair.x, pair.mask_x)
    epsilon = _half_steps.strength(epsilon, pair.x, closed=False)
    if half_steps == 0:
        other = _half_steps.potential("g", g, pair.y, pair.mask_y)
        plan = _as_it_is(values, other, pair, epsilon, cost)
    else:
        others, shares = _columns(values, pair, epsilon, cost)
        plan = (shares * pair.b[:, None]).T
        if half_steps == 2:
            flipped = _half_steps.flip(pair)
            _, shares = _columns(others, flipped, epsilon, _half_steps.flip_cost(cost))
            plan = shares * pair.a[:, None]
    return plan.astype(jnp.result_type(f))


def _columns(f, pair, epsilon, cost):
    """Returns the answer ``[m]`` to ``f`` and the shares ``[m, n]`` of all columns."""
    price = _half_steps.price_matrix(cost, pair)
    return jax.vmap(_half_steps.soft, (None, None, 0, None))(f, pair.a, price, epsilon)


def _as_it_is(f, g, pair, epsilon, cost):
    costs = _half_steps.price_matrix(cost, pair).T
    mass = pair.a[:, None] * pair.b[None]
    power = (f[:, None] + g[None] - costs) / epsilon
    # Without weight, any power: the product is 0, and so must its derivative stay finite.
    limit = jnp.log(jnp.finfo(power.dtype).max) / 2
    return mass * jnp.exp(jnp.where(mass > 0, power, jnp.minimum(power, limit)))
