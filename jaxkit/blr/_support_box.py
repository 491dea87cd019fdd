"""The box that holds every draw of a posterior with bounded support."""

import jax
import jax.numpy as jnp

from jaxkit import _numerics
from jaxkit.blr import _geometry, _state


def support_box(params, state):
    r"""Returns bounds of every entry that the posterior can draw.

    The support of independent coordinates is the box :math:`|\theta_i - \mu_i| \le r(\alpha)
    \sigma_i` with :math:`r(\alpha) = \sqrt{(3\alpha - 1) / (\alpha - 1)}`. The bounds are rounded
    outwards: no draw of :func:`sample_posterior` lies outside.

    Args:
      params: parameters, the means of the posterior.
      state: optimizer state that holds a :class:`GBLRState`.

    Returns:
      ``(low, high)``, trees like ``params`` in their dtypes; infinite for ``alpha`` up to 1, and
      the parameters themselves where the rule owns no leaf.

    Raises:
      ValueError: ``state`` holds no posterior, or ``params`` has other shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = jnp.array([0.0, 3.0])
      >>> state = blr.gblr(0.1, ess=1e4, alpha=3.0, weight_decay=0.0).init(params)
      >>> low, high = blr.support_box(params, state)
      >>> print(low.round(2), high.round(2))
      [-0.02  2.98] [0.02 3.02]

    Source: derived here.

    Cost: elementwise.
    """
    leaves, treedef = jax.tree.flatten(params)
    pairs = [
        (leaf, leaf) if marginal is None else _bounds(jnp.asarray(leaf), marginal)
        for leaf, marginal in zip(leaves, _state.marginals(params, state), strict=True)
    ]
    low, high = zip(*pairs, strict=True) if pairs else ((), ())
    return treedef.unflatten(low), treedef.unflatten(high)


def linear_range(c, low, high):
    """Returns the least and the largest value of ``sum(c * theta)`` for ``theta`` in a box.

    With the bounds of :func:`support_box` and ``c`` the difference of two logits of a linear
    classifier as a function of its parameters, a positive minimum says that all of the posterior
    prefers the first class. Map over inputs with ``jax.vmap(linear_range, (0, None, None))``.

    Args:
      c: coefficients, a tree of floating arrays like ``low``.
      low: lower bounds, a tree; may be ``-inf``.
      high: upper bounds, a tree like ``low``; may be ``inf``.

    Returns:
      ``(minimum, maximum)``, each ``[]`` in float32 or wider, up to the rounding of the sum.
      Entries with ``c`` 0 count as 0 where the bound is infinite too.

    Raises:
      ValueError: the trees differ in structure or shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import blr
      >>> c, low, high = jnp.array([1.0, -2.0]), jnp.array([0.0, 1.0]), jnp.array([1.0, 3.0])
      >>> print(*blr.linear_range(c, low, high))
      -6.0 -1.0

    Source: interval arithmetic, the known technique.

    Cost: elementwise, and two sums.
    """
    for name, tree in (("low", low), ("high", high)):
        _state.check_shapes(name, _state.cut(name, tree, c), c)
    rows = [
        [_geometry.as_float(x) for x in row]
        for row in zip(*map(jax.tree.leaves, (c, low, high)), strict=True)
    ]
    dtype = _numerics.wide(*(x.dtype for row in rows for x in row))
    lows = highs = jnp.zeros([], dtype)
    for row in rows:
        slope, *bounds = (x.astype(dtype) for x in row)
        ends = [jnp.where(slope == 0, 0, slope * bound) for bound in bounds]
        lows = lows + jnp.sum(jnp.minimum(*ends))
        highs = highs + jnp.sum(jnp.maximum(*ends))
    return lows, highs


def _bounds(leaf, marginal):
    mean, width, alpha = marginal
    unit = float(jnp.finfo(mean.dtype).eps)
    half = width * _geometry.half_width(alpha).astype(width.dtype)
    # Three roundings of a draw, and those of this line.
    slack = 4 * unit * (jnp.abs(mean) + jnp.where(half < jnp.inf, half, 0))

    def outwards(bound, far):
        near = bound.astype(leaf.dtype)
        beyond = jax.lax.nextafter(jax.lax.stop_gradient(near), jnp.full_like(near, far))
        back = near.astype(bound.dtype)
        step = jnp.where(back > bound if far < 0 else back < bound, beyond - near, 0)
        return near + jax.lax.stop_gradient(step)

    return outwards(mean - half - slack, -jnp.inf), outwards(mean + half + slack, jnp.inf)
