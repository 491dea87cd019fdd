r"""The one-dimensional q-Gaussian in closed form, and how its width follows the precision.

With :math:`e = \alpha - 1`, :math:`k = 1 / |e|` and the unit-variance density
:math:`p(z) = p(0) [1 - e z^2 / (3\alpha - 1)]_+^{1/e}` every formula here is analytic at
:math:`\alpha = 1`. ``alpha`` may be traced; at 1/3 and below it gives NaN or inf.
"""

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics

GEOMETRIES = ("tsallis", "logdet")
# Shifts the argument of the asymptotic series of log Gamma(x + 1/2) / Gamma(x) beyond 9.
_SHIFT = 8
# Its coefficients of 1/x, 1/x^3, ...: -1/8 is that of sqrt(x) (1 - 1/(8 x) + ...).
_SERIES = (-1 / 8, 1 / 192, -1 / 640, 17 / 14336, -31 / 18432)


def check_alpha(name, alpha, /, *, n=None):
    """Checks a static ``alpha``: finite second moments need more than n / (n + 2) jointly, n = 1.

    ``n`` is the dimension of a joint density, None for one of independent coordinates.
    """
    low = 1 / 3 if n is None else n / (n + 2)
    return _check.between(name, alpha, low, float("inf"), closed=False)


def as_float(x):
    """Returns ``x`` as an array of float32, or float64 if it is one."""
    x = jnp.asarray(x, None if jnp.issubdtype(jnp.result_type(x), jnp.floating) else float)
    return x.astype(_numerics.wide(x.dtype))


def gamma(alpha, geometry="tsallis"):
    """Returns the exponent of ``stddev**2 ~ precision**-gamma``."""
    alpha = as_float(alpha)
    _check.choice("geometry", geometry, GEOMETRIES)
    return jnp.ones_like(alpha) if geometry == "logdet" else 2 / (1 + alpha)


def kappa(exponent):
    """Returns the coefficient of the second-order term that keeps the precision positive."""
    return (as_float(exponent) + 1) / 4


def half_width(alpha):
    """Returns half the support in standard deviations; inf for ``alpha <= 1``."""
    alpha = as_float(alpha)
    bounded = alpha > 1
    excess = jnp.where(bounded, alpha - 1, 1)
    return jnp.where(bounded, jnp.sqrt((3 * alpha - 1) / excess), jnp.inf)


def kurtosis(alpha):
    """Returns the fourth moment of unit-variance noise; inf for ``alpha <= 3/5``."""
    alpha = as_float(alpha)
    # 0.6 itself rounds to either side of 3/5.
    finite = alpha > jnp.asarray(0.6, alpha.dtype)
    return jnp.where(finite, 3 * (3 * alpha - 1) / jnp.where(finite, 5 * alpha - 3, 1), jnp.inf)


def log_gamma_ratio(alpha):
    r"""Returns :math:`\log\Gamma(k+3/2) - \log\Gamma(k+1) - \frac12\log k`, and below 1 its kin.

    That is :math:`\log\Gamma(k) - \log\Gamma(k-1/2) - \frac12\log k`. Together they are one
    analytic function of ``alpha``, which is 0 at 1 and has slope 3/8 there.
    """
    excess = as_float(alpha) - 1
    above = excess > 0
    # 1 / x of log Gamma(x + 1/2) / Gamma(x); x is at least 1 for alpha above 1/3.
    inverse = jnp.where(above, excess, -2 * excess) / jnp.where(above, 1 + excess, 2 + excess)
    total = jnp.log1p(jnp.where(above, excess, excess / 2)) / 2
    for j in range(_SHIFT):
        total = total - jnp.log1p(inverse / (2 * (1 + j * inverse)))
    total = total + jnp.log1p(_SHIFT * inverse) / 2
    shifted = inverse / (1 + _SHIFT * inverse)
    series = jnp.zeros_like(shifted)
    for coefficient in reversed(_SERIES):
        series = series * jnp.square(shifted) + coefficient
    return total + shifted * series


def lebesgue(alpha):
    r"""Returns the reference precision that stands for the base measure ``d theta``.

    It solves :math:`S_{ref}^{\gamma - 1} = C_\alpha`, so one map serves every reference. It is
    :math:`2 \pi e^3` in the limit at 1, where the map does not depend on it.
    """
    alpha = as_float(alpha)
    excess = alpha - 1
    x = 1.5 * excess
    small = jnp.abs(x) < 1e-4
    # log1p(x) / x without the division by zero.
    slope = jnp.where(small, 1 - x / 2 + x * x / 3, jnp.log1p(x) / jnp.where(small, 1, x))
    return jnp.exp(jnp.log(2 * jnp.pi) - 2 * log_gamma_ratio(alpha) + 1.5 * (2 + excess) * slope)


def stddev(precision, exponent, reference):
    r"""Returns :math:`\sigma` with :math:`\sigma^2 = (S / S_{ref})^{-\gamma} / S_{ref}`.

    Args:
      precision: S, float32 or float64.
      exponent: :math:`\gamma`, of :func:`gamma`.
      reference: :math:`S_{ref}`, see :func:`lebesgue`.
    """
    exponent, reference = _like(precision, exponent, reference)
    return jax.lax.rsqrt(reference) * jnp.exp(-exponent / 2 * jnp.log(precision / reference))


def precision(stddev, exponent, reference):
    """Returns S of a standard deviation; the inverse of :func:`stddev`."""
    exponent, reference = _like(stddev, exponent, reference)
    return reference * jnp.exp(-2 / exponent * jnp.log(stddev * jnp.sqrt(reference)))


def _like(x, *others):
    return [jnp.asarray(other, x.dtype) for other in others]
