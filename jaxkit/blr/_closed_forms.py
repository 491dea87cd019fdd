r"""Closed forms of the joint q-Gaussian density in n dimensions, for every index alpha.

With :math:`\epsilon = \alpha - 1` and :math:`m = 1 + \epsilon (n + 2) / 2`, the density of natural
precision S and covariance V is

.. math:: p(x) = e^L (1 - \epsilon\, x^\top V^{-1} x / (2 m))_+^{1 / \epsilon}, \quad
   V = e^{\epsilon L} S^{-1} / m,

with L its logarithm at the mode. The usual formulas, in :math:`2 / \epsilon` and gamma functions
of its half, have a pole at the Gaussian, and one form on either side of it. These have neither:
the gamma functions are a finite product and one function of :math:`\epsilon`, which is analytic.

All arguments but ``n`` may be traced arrays that broadcast. ``n`` is static.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkit.blr import _geometry

# Called eagerly too, by the distributions: one program in place of fifty small ones.
_jit = functools.partial(jax.jit, static_argnames="n")


def spread(alpha, n=1):
    """Returns m, which is positive where the covariance exists: alpha > n / (n + 2)."""
    return 1 + (alpha - 1) * ((n + 2) / 2)


@_jit
def log_peak(alpha, n=1):
    """Returns L of the density of covariance one; subtract half the log determinant of V."""
    normalizer = _log_gamma_ratio(alpha - 1, n)
    return normalizer - (n / 2) * jnp.log(2 * jnp.pi * spread(alpha, n))


@_jit
def log_peak_of_precision(alpha, log_det, n=1):
    """Returns L of the density whose natural precision has the log determinant ``log_det``."""
    eps = alpha - 1
    top = _log_gamma_ratio(eps, n) - (n / 2) * jnp.log(2 * jnp.pi) + log_det / 2
    return top / (1 + eps * (n / 2))


def scale_of_peak(alpha, peak, n=1):
    """Returns c with V = c / S, from L."""
    return jnp.exp((alpha - 1) * peak) / spread(alpha, n)


@_jit
def log_density(alpha, square, n=1):
    """Returns log p - L where ``square`` is x' V^-1 x; -inf beyond the edge, where slopes are 0."""
    outside = is_outside(alpha, square, n)
    t = jnp.where(outside, 0, square) / (2 * spread(alpha, n))
    return jnp.where(outside, -jnp.inf, -t * log1p_ratio((1 - alpha) * t))


def is_outside(alpha, square, n=1):
    """Says whether x' V^-1 x is at the edge of the support or beyond, or infinite."""
    # The same roundings as of the argument of the logarithm, which is above -1 elsewhere.
    return ((1 - alpha) * (square / (2 * spread(alpha, n))) <= -1) | (square == jnp.inf)


@_jit
def shannon(alpha, peak, n=1):
    """Returns the entropy -E log p, from L."""
    eps = jnp.asarray(alpha - 1)
    _, slope = jax.jvp(lambda e: _log_gamma_ratio(e, n), (eps,), (jnp.ones_like(eps),))
    return n / 2 - eps * slope - peak


@_jit
def renyi(alpha, peak, n=1):
    """Returns the entropy log(int p**alpha) / (1 - alpha), from L."""
    # log int p**alpha = eps L + log alpha - log m, here over eps.
    eps, half = alpha - 1, (n + 2) / 2
    return half * log1p_ratio(half * eps) - log1p_ratio(eps) - peak


@_jit
def negentropy(alpha, peak, n=1):
    """Returns Omega = (int p**alpha - 1) / (alpha (alpha - 1)), from L."""
    entropy = renyi(alpha, peak, n)
    return -entropy * expm1_ratio(-(alpha - 1) * entropy) / alpha


@_jit
def conjugate(alpha, peak, n=1):
    """Returns Omega* - mu' S mu / 2, from L."""
    eps, half = alpha - 1, n / 2
    rest = half * log1p_ratio(half * eps) - renyi(alpha, peak, n)
    return -rest * expm1_ratio(eps * rest) / alpha


@_jit
def discrepancy(alpha, shift, trace, log_det, scale, n=1):
    r"""Returns the Fenchel-Young discrepancy of q from p, at least 0 and 0 only if they are one.

    Omega(q) + Omega* - <q, f> with f of p, both of index ``alpha``, is
    :math:`c (shift + trace - n) / 2 + c (e^{-\epsilon\, logdet / 2} - 1) / \epsilon`. It is the
    Kullback-Leibler divergence at alpha = 1.

    Args:
      alpha: the index.
      shift: (mu_q - mu_p)' V_p^-1 (mu_q - mu_p).
      trace: tr V_p^-1 V_q.
      log_det: log(det V_q / det V_p).
      scale: c of p, V_p S_p = c I.
      n: the dimension.
    """
    growth = log_det / 2
    return scale * ((shift + trace - n) / 2 - growth * expm1_ratio((1 - alpha) * growth))


def _log_gamma_ratio(eps, n):
    """Returns log gamma(k + 1 + n/2) / (gamma(k + 1) k**(n/2)) at k = 1 / eps, continued below 0.

    There it is log gamma(k) / (gamma(k - n/2) k**(n/2)) at k = -1 / eps.
    """
    eps = jnp.asarray(eps)
    first, odd = (1.5, True) if n % 2 else (1.0, False)
    steps = first + jnp.arange(n // 2, dtype=eps.dtype)
    total = jnp.sum(jnp.log1p(eps[..., None] * steps.reshape((1,) * eps.ndim + (-1,))), -1)
    return total + _geometry.log_gamma_ratio(1 + eps) if odd else total


def log1p_ratio(x):
    """Returns log(1 + x) / x, with its derivatives at 0."""
    return _with_series(lambda x: jnp.log1p(x) / x, [(-1) ** j / (j + 1) for j in range(9)], x)


def expm1_ratio(x):
    """Returns (exp(x) - 1) / x, with its derivatives at 0."""
    terms = [1.0]
    for j in range(1, 8):
        terms.append(terms[-1] / (j + 1))
    return _with_series(lambda x: jnp.expm1(x) / x, terms, x)


def _with_series(fun, terms, x):
    """Returns ``fun(x)``, near 0 by its series: the quotient loses digits in the derivative."""
    x = jnp.asarray(x)
    near = jnp.abs(x) < 0.03
    small, series = jnp.where(near, x, 0), 0.0
    for term in reversed(terms):
        series = series * small + term
    return jnp.where(near, series, fun(jnp.where(near, 1, x)))
