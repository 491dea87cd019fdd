"""The gradient of a quadratic by maximum likelihood from noisy gradients at several points."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxkit import _check, _numerics
from jaxkit.denoise import _normal_equations

PyTree = Any


class QuadraticFit(NamedTuple):
    """A quadratic fitted to noisy gradients.

    Attributes:
      gradient: the estimate, a tree like a point.
      weights: ``[n]`` of the rows of ``y``, of sum 1, with method "gram"; else None. The variance
        of an entry of the gradient is that of an entry of ``y`` times ``sum(weights**2)``.
      hessian: ``[d, d]``, with methods "hessian" and "symmetric"; else None.
    """

    gradient: PyTree
    weights: jax.Array | None
    hessian: jax.Array | None


def quadratic_mle(x, y, at, *, method="gram", hessian=None, hvp_fn=None, ridge=None):
    r"""Returns the most likely gradient at a point of a quadratic, from noisy gradients at others.

    The model is :math:`y_i = A x_i + c + \xi_i` with independent noise of one variance
    :math:`\sigma^2`. With c unknown and a normal prior of mean :math:`A_0` and variance
    :math:`\tau^2` on the entries of A, the estimate minimizes

    .. math:: \sum_i |y_i - A x_i - c|^2 + \lambda |A - A_0|^2, \quad
       \lambda = \sigma^2 / \tau^2.

    With ``ridge`` 0 and no Hessian this is maximum likelihood. A known Hessian averages all n
    gradients, carried to ``at``. An unknown one lets through a variance of
    :math:`\sigma^2 (1 + r) / n` on average over the points, r the rank of their scatter: with
    :math:`n \le r + 1` points it only interpolates. Knowing that A is symmetric
    lowers it on average.

    Directions in which the points spread less than ``sqrt(10 k eps)`` times the largest spread
    count as unseen, with k the order of the matrix that is decomposed and eps that of float32, or
    of float64 for float64 points; there A is :math:`A_0`. Derivatives take the number of these
    directions as fixed, and are always finite.

    Args:
      x: points, ``[n, d]`` or a tree of arrays with a leading axis n, real floating.
      y: noisy gradients, in the shapes of ``x``.
      at: point where the gradient is wanted, ``[d]`` or a tree.
      method: "gram" works with the n by n matrix of products of points, so n should be a small
        window and d may be anything; "hessian" forms the d by d matrix; "symmetric" does so for
        a symmetric A. Static. "gram" and "hessian" are the same estimate.
      hessian: ``[d, d]``, the mean :math:`A_0` of the prior, symmetric with method "symmetric";
        None for zero.
      hvp_fn: function ``v -> A_0 v`` in place of ``hessian``, linear, of a tree like ``at``; only
        for "gram", which calls it once.
      ridge: :math:`\lambda`, not negative, in units of ``x**2``; may be traced. None for inf where
        the Hessian is given, so that it counts as known, and for 0 where it is not.

    Returns:
      :class:`QuadraticFit`. The gradient has the dtypes of ``y``, weights and Hessian the widest
      of them.

    Raises:
      TypeError: an array is not real floating, or ``hvp_fn`` no function.
      ValueError: shapes do not fit, there is no point, ``ridge`` is negative, or the Hessian is
        given twice or in a form that the method cannot use.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> x = jnp.array([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0]])
      >>> y = x @ jnp.diag(jnp.array([1.0, 3.0])) + 5.0
      >>> fit = denoise.quadratic_mle(x, y, jnp.array([3.0, 3.0]))
      >>> print(fit.gradient.round(), fit.weights.round())
      [ 8. 14.] [ 1. -3.  3.]

    Source: least squares, the known technique; the symmetric case is Higham, "The symmetric
    Procrustes problem", BIT 28, 1988.

    Cost: "gram" :math:`O(n^2 d + n^3)` time, a centered copy of ``x`` and :math:`O(n^2)` memory;
    the others :math:`O(n d^2 + d^3)` and :math:`O(d^2)`. A known Hessian with "gram": one product
    with it. Where leaves are split over devices "gram" exchanges the n by n matrix.
    """
    _check.choice("method", method, ("gram", "hessian", "symmetric"))
    is_gram = method == "gram"
    _check_data(x, y, at, is_array=not is_gram or hessian is not None)
    is_given = _check_prior(at, is_gram, hessian, hvp_fn)
    is_known = is_given and ridge is None
    wide = _numerics.wide(*(jnp.result_type(z) for z in jax.tree.leaves((x, y, at))))
    ridge = check_ridge(ridge, is_given, wide)
    gradient_types, point_types = y, at
    dtype = max((jnp.result_type(z) for z in jax.tree.leaves(y)), key=lambda t: jnp.finfo(t).bits)
    x, y, at = (_cast(tree, wide) for tree in (x, y, at))
    x_mean = jax.tree.map(lambda z: jnp.mean(z, 0), x)
    x = jax.tree.map(lambda z, mean: z - mean[None], x, x_mean)
    ahead = jax.tree.map(jnp.subtract, at, x_mean)
    prior = None if hessian is None else jnp.asarray(hessian, wide)
    weights = formed = None
    if is_gram:
        num = jax.tree.leaves(x)[0].shape[0]
        weights = jnp.full(num, 1 / num, wide) if is_known else _weights(x, ahead, ridge)
        gradient = _weighted(weights, y)
        if is_given:
            # The weighted data speak of the weighted point, the prior of the way from there.
            rest = jax.tree.map(jnp.subtract, ahead, _weighted(weights, x))
            if hvp_fn is None:
                onward = _normal_equations.dot(prior, rest)
            else:
                onward = _cast(hvp_fn(_cast_like(rest, point_types)), wide)
                _check.same_types("the result of hvp_fn", onward, "at", at)
            gradient = jax.tree.map(jnp.add, gradient, onward)
        weights = weights.astype(dtype)
    else:
        y_mean = jnp.mean(y, 0)
        scatter = _normal_equations.dot(x.T, x)
        cross = _normal_equations.dot((y - y_mean[None]).T, x)
        formed = _normal_equations.hessian(scatter, cross, prior, ridge, method == "symmetric")
        gradient = y_mean + _normal_equations.dot(formed, ahead)
        formed = formed.astype(dtype)
    return QuadraticFit(_cast_like(gradient, gradient_types), weights, formed)


def check_ridge(ridge, is_given, dtype):
    """Returns ``ridge`` as an array; None is inf where a Hessian ``is_given``, else 0."""
    if ridge is None:
        ridge = math.inf if is_given else 0.0
    if not (isinstance(ridge, float) and ridge == math.inf):
        _check.between("ridge", ridge, 0, math.inf)
    return jnp.asarray(ridge, dtype)


def _check_data(x, y, at, *, is_array):
    for name, tree in (("x", x), ("y", y), ("at", at)):
        _check.floats(name, tree)
    if is_array:
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(x)):
            raise ValueError("x must be one array [n, d] for a Hessian matrix, got a tree.")
        _check.shape("x", x, "n d")
    num = _check.leading_axis("x", x)
    if num == 0:
        raise ValueError("x must hold at least one point, got none.")

    _check.same_types("y", y, "x", x, dtypes=False)
    row = jax.eval_shape(lambda: jax.tree.map(lambda z: z[0], x))
    _check.same_types("at", at, "a point of x", row, dtypes=False)


def _check_prior(at, is_gram, hessian, hvp_fn):
    """Returns whether the prior has a mean."""
    if hessian is not None:
        _check.shape("hessian", hessian, "d d", d=jnp.shape(at)[0])
    if hvp_fn is not None:
        _check.function("hvp_fn", hvp_fn)
        if hessian is not None or not is_gram:
            raise ValueError("hvp_fn must come without hessian and with method='gram'.")
    return hessian is not None or hvp_fn is not None


def _weights(x, ahead, ridge):
    """Returns the weights of the rows of centered ``x``."""
    inverse, *_ = _normal_equations.pseudo_inverse(_products(x, x), ridge)
    return 1 / len(inverse) + _normal_equations.dot(inverse, _products(x, ahead))


def _products(x, points):
    """Returns ``[n]`` or ``[n, n]`` inner products of the rows of ``x`` with ``points``."""
    # In an Explicit mesh a product over axes that are split must say that its result is not.
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    whole = PartitionSpec() if is_explicit else None

    def leaf(z, point):
        last = tuple(range(1 - z.ndim, 0))
        exact = jax.lax.Precision.HIGHEST
        return jnp.tensordot(z, point, (last, last), precision=exact, out_sharding=whole)

    return sum(jax.tree.leaves(jax.tree.map(leaf, x, points)))


def _weighted(weights, x):
    """Returns the sum of the rows of ``x`` with ``weights``."""
    return jax.tree.map(
        lambda z: jnp.tensordot(weights, z, 1, precision=jax.lax.Precision.HIGHEST), x
    )


def _cast(tree, dtype):
    return jax.tree.map(lambda z: jnp.asarray(z, dtype), tree)


def _cast_like(tree, types):
    return jax.tree.map(lambda z, t: z.astype(jnp.result_type(t)), tree, types)
