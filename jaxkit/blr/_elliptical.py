"""The learning rule for the joint q-Gaussian of a small model: full, diagonal or one precision."""

import functools
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.blr import _closed_forms, _geometry
from jaxkit.blr._joint_noise import joint_noise

# Exact where it says so on every device: accelerators may round factors to fewer bits.
_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class EllipticalState(NamedTuple):
    """State of :func:`elliptical`, the natural parameters of the posterior.

    With a full precision, ``MultivariateQGaussian.from_natural(mean, precision, alpha)`` is the
    posterior.

    Attributes:
      step: number of steps done, ``[]`` int32.
      mean: ``[n]`` float32 or wider.
      precision: natural precision S, ``[n, n]``, ``[n]`` or ``[]``, in the dtype of ``mean``.
    """

    step: jax.Array
    mean: jax.Array
    precision: jax.Array


class EllipticalInfo(NamedTuple):
    """What a step of :func:`elliptical` saw at the posterior that it started from.

    Attributes:
      loss: expectation of the loss, ``[]``.
      discrepancy: Fenchel-Young discrepancy from the prior, ``[]``; with ``loss`` it adds up to the
        free energy, which the rule makes small.
      grad: expectation of the gradient, ``[n]``.
      hess: the curvature H that the rule adds to the prior, in the shape of the precision.
    """

    loss: jax.Array
    discrepancy: jax.Array
    grad: jax.Array
    hess: jax.Array


class Elliptical(NamedTuple):
    """The pure functions that :func:`elliptical` returns.

    Attributes:
      init: ``(mean, precision=None) -> EllipticalState``; the precision of the prior for None.
      step: ``(key, state, *args) -> (EllipticalState, EllipticalInfo)``.
    """

    init: Callable
    step: Callable


def elliptical(
    loss_fn,
    *,
    prior_mean,
    prior_precision,
    alpha=1.0,
    learning_rate=0.1,
    num_samples=10,
    nodes=None,
    weights=None,
    positive=True,
):
    r"""Returns the learning rule for a joint q-Gaussian posterior over one vector of parameters.

    With the expected gradient g and the curvature
    :math:`H = V^{-1} E_q[(\theta - \mu) \nabla l(\theta)^\top]`, symmetrized, a step is

    .. math:: S \gets S + \rho G + \tfrac12 \rho^2 G S^{-1} G, \quad G = S_0 + H - S, \quad
       \mu \gets \mu - \rho S^{-1} (g + S_0 (\mu - \mu_0)).

    The second-order term keeps S positive definite whatever H is. Without it, a quadratic loss is
    solved in one step of rate 1. Only the width of the posterior at a precision depends on
    ``alpha``.

    For small models, teaching and tests, up to about a hundred parameters. The posterior at a fixed
    ``alpha`` above 1 contracts as :math:`S^{-1/(1 + n(\alpha - 1)/2)}`, so hardly at all if n is
    large; for networks use :func:`gblr`, whose coordinates are independent.

    Args:
      loss_fn: ``(theta, *args) -> []``, the total loss at one ``theta [n]``: the negative log
        likelihood of all data for Bayes' posterior.
      prior_mean: ``[n]`` real floating.
      prior_precision: natural precision of the prior, whose shape is that of the posterior's:
        ``[n, n]`` positive definite for a full covariance, positive ``[n]`` for a diagonal one,
        positive ``[]`` for the same in all directions.
      alpha: Tsallis index above n / (n + 2); may be traced.
      learning_rate: the step size of the rule, in (0, 1]; may be traced.
      num_samples: number of posterior samples a step, in pairs that mirror each other; even,
        static. Not used with ``nodes``.
      nodes: points ``[M, n]`` to take expectations at in place of samples, of mean 0 and covariance
        one under ``weights``; the key is not used then. The rows of the identity and their
        negatives times ``sqrt(n)`` are exact for polynomial losses up to degree 3.
      weights: ``[M]``, of sum 1; None for equal ones.
      positive: whether to keep the precision positive, static.

    Returns:
      An :class:`Elliptical`.

    Raises:
      TypeError: ``loss_fn`` is no function, or an option of a wrong kind.
      ValueError: a shape does not fit, or a static option is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> def loss_fn(theta, x, y):
      ...     return jnp.sum((x @ theta - y) ** 2) / 2
      >>> x, y = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([1.0, 3.0])
      >>> nodes = 2**0.5 * jnp.concatenate([jnp.eye(2), -jnp.eye(2)])
      >>> prior = {"prior_mean": jnp.zeros(2), "prior_precision": jnp.eye(2) / 1000}
      >>> init, step = blr.elliptical(
      ...     loss_fn, **prior, alpha=2.0, learning_rate=1.0, nodes=nodes, positive=False)
      >>> state, info = step(jax.random.key(0), init(jnp.zeros(2)), x, y)
      >>> print(state.mean.round(2), state.precision.round(2).tolist())
      [1. 2.] [[2.0, 1.0], [1.0, 1.0]]

    Source: arXiv:2107.04562, arXiv:2002.10060. Derived here: alpha other than 1.

    Cost: a gradient for each sample or node; :math:`O(n^3)` with a full covariance.
    """
    _check.function("loss_fn", loss_fn)
    prior_mean, prior_precision = _prior(prior_mean, prior_precision)
    n, dtype = prior_mean.size, prior_mean.dtype
    _geometry.check_alpha("alpha", alpha, n=n)
    _check.between("learning_rate", learning_rate, 0, float("inf"), closed=False)
    if isinstance(learning_rate, numbers.Real) and learning_rate > 1:
        raise ValueError(f"learning_rate must be in (0, 1], got {learning_rate}.")
    if nodes is None:
        if weights is not None:
            raise ValueError("weights must be None without nodes, got some.")
        if _check.count("num_samples", num_samples, minimum=2) % 2:
            raise ValueError(f"num_samples must be even, got {num_samples}.")
    else:
        nodes, weights = _rule(nodes, weights, n, dtype)

    def init(mean, precision=None):
        mean = jnp.array(mean, dtype, copy=True)
        _check.shape("mean", mean, "n", n=n)
        start = prior_precision if precision is None else precision
        start = jnp.array(start, dtype, copy=True)
        if start.shape != prior_precision.shape:
            want = prior_precision.shape
            raise ValueError(f"precision must have shape {want}, got {start.shape}.")
        return EllipticalState(jnp.zeros([], jnp.int32), mean, start)

    def points(key, index):
        if nodes is not None:
            return nodes, weights
        half = joint_noise(key, index, (num_samples // 2, n))
        return jnp.concatenate([half, -half]), jnp.full(num_samples, 1 / num_samples, dtype)

    def step(key, state, *args):
        mean, old = state.mean, state.precision
        index, rho = jnp.asarray(alpha, dtype), jnp.asarray(learning_rate, dtype)
        x, w = points(key, index)
        factor = _factor(old, n)
        scale, _ = _width(index, factor, n)
        offsets = jnp.sqrt(scale) * _spread(factor, x)
        value_and_grad = jax.value_and_grad(lambda theta: loss_fn(theta, *args))
        losses, grads = jax.vmap(value_and_grad)(mean[None] + offsets)
        grad = _dot(w, grads)
        hess = _curvature(factor, x, w[:, None] * grads, old.ndim) / jnp.sqrt(scale)
        change = rho * (prior_precision + hess - old)
        precision = old + change
        if positive:
            precision = precision + _second_order(factor, change)
        pull = grad + _times(prior_precision, mean - prior_mean)
        new = mean - rho * _solve(_factor(precision, n), pull)
        info = EllipticalInfo(
            _dot(w, losses),
            _discrepancy(index, mean - prior_mean, factor, _factor(prior_precision, n)),
            grad,
            hess,
        )
        return EllipticalState(state.step + 1, new, precision), info

    return Elliptical(init, step)


def _prior(mean, precision):
    """Returns the prior in one dtype, with its shapes checked."""
    mean, precision = _geometry.as_float(mean), _geometry.as_float(precision)
    n = _check.shape("prior_mean", mean, "n")["n"]
    if precision.shape not in ((), (n,), (n, n)):
        raise ValueError(
            f"prior_precision must have shape [], [n] or [n, n] with n={n}, got {precision.shape}."
        )
    dtype = _numerics.wide(mean.dtype, precision.dtype)
    return mean.astype(dtype), precision.astype(dtype)


def _rule(nodes, weights, n, dtype):
    """Returns nodes and weights in ``dtype``."""
    nodes = jnp.asarray(nodes, dtype)
    sizes = _check.shape("nodes", nodes, "m n", n=n)
    if weights is None:
        return nodes, jnp.full(sizes["m"], 1 / sizes["m"], dtype)
    _check.shape("weights", weights, "m", m=sizes["m"])
    return nodes, jnp.asarray(weights, dtype)


# A precision acts through its factor: the Cholesky factor C with S = C C' of a full one, and the
# roots of the diagonal [n] of the others.


def _factor(precision, n):
    if precision.ndim == 2:
        return jnp.linalg.cholesky(precision)
    return jnp.broadcast_to(jnp.sqrt(precision), (n,))


def _spread(factor, x):
    """Returns the rows C'^-1 x, of covariance S^-1 if x has covariance one."""
    if factor.ndim == 1:
        return x / factor[None]
    return jax.scipy.linalg.solve_triangular(factor, x.T, lower=True, trans=1).T


def _solve(factor, v):
    """Returns S^-1 v."""
    if factor.ndim == 1:
        return v / jnp.square(factor)
    return jax.scipy.linalg.cho_solve((factor, True), v)


def _times(precision, v):
    return _dot(precision, v) if precision.ndim == 2 else precision * v


def _curvature(factor, x, weighted, ndim):
    """Returns the sum of C x g' over the rows of both, symmetrized and in the precision's shape."""
    if factor.ndim == 1:
        diagonal = factor * jnp.sum(x * weighted, 0)
        return diagonal if ndim else jnp.mean(diagonal)
    product = _dot(factor, _dot(x.T, weighted))
    return (product + product.T) / 2


def _second_order(factor, change):
    """Returns change S^-1 change / 2."""
    if factor.ndim == 2:
        half = jax.scipy.linalg.solve_triangular(factor, change, lower=True)
        return _dot(half.T, half) / 2
    return jnp.square(change) / jnp.square(factor if change.ndim else factor[0]) / 2


def _width(alpha, factor, n):
    """Returns c with V = c S^-1, and the log determinant of V."""
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factor) if factor.ndim == 2 else factor))
    peak = _closed_forms.log_peak_of_precision(alpha, log_det, n)
    scale = _closed_forms.scale_of_peak(alpha, peak, n)
    return scale, n * jnp.log(scale) - log_det


def _discrepancy(alpha, shift, factor, prior):
    """Returns the discrepancy of two distributions with these factors of their precisions."""
    n = shift.size
    (scale, log_det), (prior_scale, prior_log_det) = (_width(alpha, f, n) for f in (factor, prior))
    if factor.ndim == 1:
        squares, trace = jnp.sum(jnp.square(prior * shift)), jnp.sum(jnp.square(prior / factor))
    else:
        squares = jnp.sum(jnp.square(_dot(prior.T, shift)))
        half = jax.scipy.linalg.solve_triangular(factor, prior, lower=True)
        trace = jnp.sum(jnp.square(half))
    return _closed_forms.discrepancy(
        alpha,
        squares / prior_scale,
        trace * scale / prior_scale,
        log_det - prior_log_det,
        prior_scale,
        n,
    )
