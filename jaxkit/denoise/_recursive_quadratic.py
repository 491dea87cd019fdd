"""The gradient of a quadratic by least squares, one noisy gradient at a time."""

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics, _tree
from jaxkit.denoise import _normal_equations
from jaxkit.denoise._quadratic_mle import QuadraticFit, check_ridge


class RecursiveQuadratic(NamedTuple):
    """Pure functions that fit a quadratic to noisy gradients as they come.

    Attributes:
      init: ``point -> state``; of the point, ``[d]``, only shape and dtype count.
      update: ``(state, x, y) -> state`` with a noisy gradient y at the point x, both ``[d]``.
      predict: ``(state, at) -> QuadraticFit`` at any point ``[d]``; NaN before the first update.
    """

    init: Callable
    update: Callable
    predict: Callable


class RecursiveQuadraticState(NamedTuple):
    """Weighted sums over the noisy gradients so far, in float32 or wider.

    Attributes:
      weight: ``[]``, sum of the weights; the newest has 1, each older one ``forgetting`` of the
        next.
      x_mean: ``[d]``, mean of the points.
      y_mean: ``[d]``, mean of the gradients.
      scatter: ``[d, d]``, sum of ``x x^T`` around the means.
      cross: ``[d, d]``, sum of ``y x^T`` around the means.
    """

    weight: jax.Array
    x_mean: jax.Array
    y_mean: jax.Array
    scatter: jax.Array
    cross: jax.Array


def recursive_quadratic(*, forgetting=1.0, symmetric=False, hessian=None, ridge=None):
    r"""Returns init, update and predict of the most likely gradient of a quadratic.

    It is :func:`quadratic_mle` with method "hessian" or "symmetric", of all gradients so far with
    weights :math:`\rho^{age}`, in memory that does not grow. With :math:`\rho = 1` the two agree.
    Older points keep about :math:`1 / (1 - \rho)` points' worth of weight, so that a function that
    is not quadratic is fitted near the newest. Updates are cheap; only a prediction solves.

    Args:
      forgetting: :math:`\rho` in (0, 1]; may be traced.
      symmetric: whether the Hessian is known to be symmetric, static.
      hessian: as in :func:`quadratic_mle`.
      ridge: as in :func:`quadratic_mle`.

    Returns:
      :class:`RecursiveQuadratic`; its functions are pure, for ``scan`` and ``vmap``.

    Raises:
      TypeError: an option is no number; or, when called, an array is not real floating.
      ValueError: an option is out of range; or, when called, shapes do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> fit = denoise.recursive_quadratic()
      >>> x = jnp.array([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0]])
      >>> data = x, x @ jnp.diag(jnp.array([1.0, 3.0])) + 5.0
      >>> state, _ = jax.lax.scan(lambda s, xy: (fit.update(s, *xy), None), fit.init(x[0]), data)
      >>> print(fit.predict(state, jnp.array([3.0, 3.0])).gradient.round())
      [ 8. 14.]

    Source: recursive least squares with exponential forgetting, the known technique; updates after
    Welford, "Note on a method for calculating corrected sums of squares and products", 1962.

    Cost: :math:`O(d^2)` memory and time of an update, :math:`O(d^3)` of a prediction.
    """
    if isinstance(forgetting, numbers.Real) and not 0 < forgetting <= 1:
        raise ValueError(f"forgetting must be in (0, 1], got {forgetting}.")
    _check.between("forgetting", forgetting, 0, math.inf)  # that it is a number
    if hessian is not None:
        _check.shape("hessian", hessian, "d d")
    check_ridge(ridge, hessian is not None, jnp.float32)

    def checked(state, **points):
        for name, point in points.items():
            _check.floats(name, point)
            _check.shape(name, point, "d", d=len(state.x_mean))
        return [jnp.asarray(point, state.x_mean.dtype) for point in points.values()]

    def init(point):
        _check.floats("point", point)
        size = _check.shape("point", point, "d")["d"]
        if hessian is not None:
            _check.shape("hessian", hessian, "d d", d=size)
        dtype = _numerics.wide(jnp.result_type(point))
        # Five buffers of their own, so that the state may be donated.
        means = (_tree.zeros_like(point, dtype) for _ in range(2))
        sums = (jnp.zeros((size, size), dtype) for _ in range(2))
        return RecursiveQuadraticState(jnp.zeros([], dtype), *means, *sums)

    def update(state, x, y):
        x, y = checked(state, x=x, y=y)
        rho = jnp.asarray(forgetting, x.dtype)
        weight = rho * state.weight + 1
        dx, dy = x - state.x_mean, y - state.y_mean
        share = 1 - 1 / weight
        return RecursiveQuadraticState(
            weight,
            state.x_mean + dx / weight,
            state.y_mean + dy / weight,
            rho * state.scatter + share * jnp.outer(dx, dx),
            rho * state.cross + share * jnp.outer(dy, dx),
        )

    def predict(state, at):
        (point,) = checked(state, at=at)
        dtype = point.dtype
        prior = None if hessian is None else jnp.asarray(hessian, dtype)
        strength = check_ridge(ridge, hessian is not None, dtype)
        formed = _normal_equations.hessian(state.scatter, state.cross, prior, strength, symmetric)
        gradient = state.y_mean + _normal_equations.dot(formed, point - state.x_mean)
        gradient = jnp.where(state.weight > 0, gradient, jnp.nan)
        dtype = jnp.result_type(at)
        return QuadraticFit(gradient.astype(dtype), None, formed.astype(dtype))

    return RecursiveQuadratic(init, update, predict)
