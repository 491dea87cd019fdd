"""The half steps of Sinkhorn's iteration, one column at a time or in chunks."""

import functools

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.ot import _pair
from jaxkit.ot._costs import sqeuclidean
from jaxkit.ot._pair import Pair


def soft_g(f, x, y, a, epsilon, *, cost=sqeuclidean, mask_x=None, mask_y=None, chunk=None):
    r"""Returns the potential g that answers f, so that the plan of (f, g) has the weights of y.

    .. math:: g_j = -\epsilon \log \sum_i a_i \exp((f_i - c(x_i, y_j)) / \epsilon),

    and for :math:`\epsilon = 0` its limit, the c-transform
    :math:`g_j = \min_{i: a_i > 0} c(x_i, y_j) - f_i`. It reads the weights of x only. ``y`` may be
    any points: this extends a potential off the support.

    Args:
      f: ``[n]`` real floating, the potential at ``x``, product convention.
      x: ``[n, d]`` points.
      y: ``[m, d]`` points.
      a: ``[n]`` weights, not negative; None for equal ones.
      epsilon: entropic strength, not negative, in the unit of the cost; may be traced.
      cost: function of two points ``[d]``, returns ``[]``; static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool, as ``mask_x``.
      chunk: number of points of ``y`` at a time, static; None for all at once.

    Returns:
      The potential ``[m]`` in the dtype of ``f``, 0 where ``mask_y`` is False; inf if f is ``-inf``
      at every atom with weight. The derivative through it is exact, in the weights too; for
      ``epsilon=0`` it is shared among the minima by their weights.

    Raises:
      TypeError: an array is not real floating, a mask not bool, or ``cost`` no function.
      ValueError: a shape does not fit, ``epsilon`` is negative, or ``chunk`` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [3.0]])
      >>> print(ot.soft_g(jnp.array([1.0, 2.0]), x, y, None, 0.0))
      [-1.  2.]

    Source: arXiv:1306.0895, in the logarithmic domain. Derived here: the chunks, and the derivative
    at weight zero.

    Cost: n m costs and exponentials. Memory O(n m), with ``chunk`` O(n chunk), in the derivative
    too, which then computes everything twice.
    """
    pair = fill(x, y, a, None, mask_x, mask_y, cost)
    values = potential("f", f, pair.x, pair.mask_x)
    out = answer(values, pair, strength(epsilon, pair.x), cost, chunk)
    return jnp.where(pair.mask_y, out, 0).astype(jnp.result_type(f))


def soft_f(g, x, y, b, epsilon, *, cost=sqeuclidean, mask_x=None, mask_y=None, chunk=None):
    r"""Returns the potential f that answers g, so that the plan of (f, g) has the weights of x.

    :func:`soft_g` with the two sides exchanged. At an atom of weight zero, for which ott keeps no
    potential, it returns the one that extends the others.

    Args:
      g: ``[m]`` real floating, the potential at ``y``, product convention.
      x: ``[n, d]`` points.
      y: ``[m, d]`` points.
      b: ``[m]`` weights, not negative; None for equal ones.
      epsilon: entropic strength, not negative, in the unit of the cost; may be traced.
      cost: function of two points ``[d]``, returns ``[]``; static.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool, as ``mask_x``.
      chunk: number of points of ``x`` at a time, static; None for all at once.

    Returns:
      The potential ``[n]`` in the dtype of ``g``, 0 where ``mask_x`` is False.

    Raises:
      TypeError: an array is not real floating, a mask not bool, or ``cost`` no function.
      ValueError: a shape does not fit, ``epsilon`` is negative, or ``chunk`` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [3.0]])
      >>> print(ot.soft_f(jnp.array([0.0, 3.0]), x, y, None, 0.0))
      [0. 1.]

    Source: arXiv:1306.0895, in the logarithmic domain.

    Cost: as :func:`soft_g`.
    """
    pair = flip(fill(x, y, None, b, mask_x, mask_y, cost))
    values = potential("g", g, pair.x, pair.mask_x)
    out = answer(values, pair, strength(epsilon, pair.x), flip_cost(cost), chunk)
    return jnp.where(pair.mask_y, out, 0).astype(jnp.result_type(g))


def fill(x, y, a, b, mask_x, mask_y, cost):
    """Returns a checked pair with no field left None but f; checks the cost too."""
    _check.function("cost", cost)
    pair = _pair.fill(Pair(x, y, a, b, None, mask_x, mask_y))
    if _by_products(cost, pair.x):
        center = jax.lax.stop_gradient(jnp.mean(pair.x, 0))[None]
        pair = pair._replace(x=pair.x - center, y=pair.y - center)
    return pair


def flip(pair):
    """Returns the pair with its sides exchanged."""
    return Pair(pair.y, pair.x, pair.b, pair.a, None, pair.mask_y, pair.mask_x)


def flip_cost(cost):
    """Returns the cost with its arguments exchanged."""
    return cost if cost is sqeuclidean else lambda x, y: cost(y, x)


def potential(name, values, points, mask):
    """Returns a checked potential at ``points`` in their dtype, 0 at masked atoms, and finite.

    For -inf, which ott has at weight zero, stands a number that takes part in no sum, so that
    derivatives are finite.
    """
    values = _pair.real(name, values)
    size = "n" if name == "f" else "m"
    _check.shape(name, values, size, **{size: len(points)})
    values = jnp.maximum(values.astype(points.dtype), _least(points.dtype))
    return jnp.where(mask, values, 0)


def strength(epsilon, points, *, closed=True):
    """Returns ``epsilon`` in the dtype of ``points``, NaN if negative (or 0, if not closed)."""
    _check.between("epsilon", epsilon, 0, float("inf"), closed=closed)
    epsilon = jnp.asarray(epsilon, points.dtype)
    return jnp.where(epsilon >= 0 if closed else epsilon > 0, epsilon, jnp.nan)


def answer(f, pair, epsilon, cost, chunk):
    """Returns the soft c-transform ``[m]`` of ``f``, of checked arguments."""
    return over_points(lambda y_j: column(f, pair, y_j, epsilon, cost)[0], pair.y, chunk)


def column(f, pair, y_j, epsilon, cost):
    """Returns g at the point ``y_j``, and the shares ``[n]`` of its mass that come from each x_i.

    The shares are of sum 1 to rounding at any ``epsilon``, unlike exponentials of f + g - c.
    ``epsilon`` is an array, or None for the limit 0.
    """
    price = prices(cost, pair.x, y_j)
    if epsilon is None:
        return _hard(f, pair.a, price)
    # Not a `where`: the limit costs as much as the rest.
    return jax.lax.cond(
        epsilon == 0,
        lambda: _hard(f, pair.a, price),
        lambda: soft(f, pair.a, price, epsilon),
    )


def prices(cost, x, y_j):
    """Returns the costs ``[n]`` of one point against all others."""
    if _by_products(cost, x):
        cross = jnp.matmul(x, y_j, precision=jax.lax.Precision.HIGHEST)
        return jnp.sum(jnp.square(x), 1) + jnp.sum(jnp.square(y_j)) - 2 * cross
    return jax.vmap(cost, (0, None))(x, y_j)


def _by_products(cost, x):
    """Says whether costs come from one product of matrices, many times faster in many coordinates.

    Of centered points, as those of :func:`fill`, they are exact to rounding of the largest cost;
    differences are to rounding of each.
    """
    return cost is sqeuclidean and x.shape[-1] > 8


def price_matrix(cost, pair):
    """Returns the costs of all pairs of points, ``[m, n]``."""
    return jax.vmap(lambda y_j: prices(cost, pair.x, y_j))(pair.y)


def soft(f, a, price, epsilon):
    """Returns what :func:`column` does for positive ``epsilon``, given the costs ``[n]``."""
    score, least = f - price, _least(f.dtype)
    # No derivative goes through the maximum: recomputed with other rounding, no score equals it.
    top = jnp.max(jax.lax.stop_gradient(score), where=a > 0, initial=least)
    # Only an atom of weight zero can lie above the top. Where it does, the sum does not change,
    # and its derivative in the weight stays finite.
    limit = jnp.log(jnp.finfo(f.dtype).max) / 2
    terms = a * jnp.exp(jnp.minimum((score - top) / epsilon, limit))
    total = jnp.sum(terms)
    return jnp.where(top > least, 0, jnp.inf) - top - epsilon * jnp.log(total), terms / total


def _hard(f, a, price):
    """Returns the limit of :func:`soft` for ``epsilon`` to 0; its derivative is the shares."""
    score, least = f - price, _least(f.dtype)
    here = jax.lax.stop_gradient(score)
    top = jnp.max(here, where=a > 0, initial=least)
    # Where f is optimal there are ties, which rounding must not break.
    slack = 8 * jnp.finfo(f.dtype).eps * (jnp.abs(f) + jnp.abs(price))
    terms = jnp.where(here >= top - slack, a, 0)
    shares = jax.lax.stop_gradient(terms / jnp.sum(terms))
    rise = jnp.sum(shares * (score - here))  # zero, but for its derivative
    return jnp.where(top > least, 0, jnp.inf) - top - rise, shares


def _least(dtype):
    return -jnp.sqrt(jnp.finfo(dtype).max)


def over_points(fun, points, chunk):
    """Returns ``fun`` of every point, stacked; ``chunk`` of them at a time, in the derivative too.

    ``points`` is a tree of arrays with the points on the leading axis.
    """
    if chunk is None:
        return jax.vmap(fun)(points)
    _check.count("chunk", chunk)
    size = min(chunk, len(jax.tree.leaves(points)[0]))
    # Scan alone would keep what the derivative needs of every chunk.
    return jax.lax.map(jax.checkpoint(fun, prevent_cse=False), points, batch_size=size)


def sum_over(fun, points, chunk):
    """Returns the sums of ``fun`` over all points; ``chunk`` of them at a time.

    ``fun`` takes the arrays of ``points`` at one point, and returns a tree.
    """
    if chunk is None:
        return _block_sum(fun, points)
    _check.count("chunk", chunk)
    num = len(points[0])
    size = min(chunk, num)
    whole = num // size * size
    blocks = [z[:whole].reshape(-1, size, *z.shape[1:]) for z in points]
    block_sum = jax.checkpoint(functools.partial(_block_sum, fun), prevent_cse=False)

    def add(total, block):
        return jax.tree.map(jnp.add, total, block_sum(block)), None

    types = jax.eval_shape(block_sum, points)
    zeros = jax.tree.map(lambda z: jnp.zeros(z.shape, z.dtype), types)
    total, _ = jax.lax.scan(add, zeros, blocks)
    return total if whole == num else add(total, [z[whole:] for z in points])[0]


def _block_sum(fun, points):
    return jax.tree.map(lambda z: jnp.sum(z, 0), jax.vmap(fun)(*points))
