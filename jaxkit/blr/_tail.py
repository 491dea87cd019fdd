r"""Tail probabilities of the unit-variance q-Gaussian in one dimension, and their inverse.

Written as :math:`p(z) = e^L e^{-s^2 / 2}`, the density defines a coordinate s that has the whole
line as its range, for bounded support and heavy tails alike. In it the tail is the integral of a
nearly Gaussian function, analytic in s and in alpha. One Gauss-Legendre rule gives it to rounding,
with derivatives in alpha, which the incomplete beta function of JAX lacks; in float32 that one
also loses four digits near alpha = 1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit.blr import _closed_forms, _geometry

_NODES, _WEIGHTS = (x / 2 for x in np.polynomial.legendre.leggauss(32))


@jax.jit
def tail(alpha, z):
    """Returns P(Z > z) for z >= 0; 0 beyond the edge."""
    outside = _closed_forms.is_outside(alpha, jnp.square(z))
    z, spread = jnp.where(outside, 0, z), _closed_forms.spread(alpha)
    x = (1 - alpha) * (jnp.square(z) / (2 * spread))
    s = z * jnp.sqrt(_closed_forms.log1p_ratio(x) / spread)
    return jnp.where(outside, 0, jnp.exp(_log_front(alpha, s)) * _integral(alpha, s))


@jax.jit
def inverse_tail(alpha, p):
    """Returns z >= 0 with P(Z > z) = p, for p in [0, 1/2]; the edge of the support at 0."""
    positive = p > 0
    safe = jnp.where(positive, p, 0.25)
    z = _solve(*jax.lax.stop_gradient((alpha, safe)))
    # The derivatives in alpha and p are those of one more step; its value is 0 up to rounding. A
    # root that rounds to the edge has none.
    log_density = _closed_forms.log_peak(alpha) + _closed_forms.log_density(alpha, jnp.square(z))
    found = tail(alpha, z)
    inside = found > 0
    width = jnp.exp(jnp.log(safe) - jnp.where(inside, log_density, 0))
    step = jnp.log(jnp.where(inside, found / safe, 1)) * jax.lax.stop_gradient(width)
    z = z + (step - jax.lax.stop_gradient(step))
    return jnp.where(positive, z, jnp.where(p == 0, _geometry.half_width(alpha), jnp.nan))


def _integral(alpha, s):
    """Returns the integral of the density from s to infinity, over ``exp(_log_front)`` at s."""
    digits = -jnp.log(jnp.finfo(s.dtype).eps)
    # Further out the integrand is below eps times what it is at s.
    end = jnp.sqrt(jnp.square(s) + 2 * digits / _rate(alpha))
    middle, width = (end + s) / 2, end - s
    wide = (1,) * s.ndim + (-1,)
    nodes, weights = (jnp.asarray(x, s.dtype).reshape(wide) for x in (_NODES, _WEIGHTS))
    alpha, start = alpha[..., None], s[..., None]
    x = middle[..., None] + width[..., None] * nodes
    decay = jnp.exp(-_rate(alpha) / 2 * (x - start) * (x + start))
    return width * jnp.sum(weights * decay * _stretch(alpha, x), -1)


def _log_front(alpha, s):
    """Returns the logarithm of p(z) dz / ds without the stretch."""
    return _closed_forms.log_peak(alpha) - _rate(alpha) * jnp.square(s) / 2


def _stretch(alpha, s):
    """Returns the part of dz / ds that does not fall like a Gaussian."""
    growth = _closed_forms.expm1_ratio(-_excess(alpha) * jnp.square(s) / 2)
    return jnp.sqrt(_closed_forms.spread(alpha) / growth)


def _solve(alpha, p):
    """Returns z as of ``inverse_tail``, by Newton's method on the logarithm of the tail in s."""
    # That is concave in s, so the steps come down to the root without overshoot. A normal tail is
    # below exp(-s**2 / 2) / 2.
    start = jnp.sqrt(-2 * jnp.log(2 * p) / _rate(alpha))

    def newton(_, s):
        inside = _integral(alpha, s)
        excess = _log_front(alpha, s) + jnp.log(inside / p)
        return s + excess * inside / _stretch(alpha, s)

    s = jax.lax.fori_loop(0, 6, newton, start)
    outward = jnp.exp(jnp.maximum(1 - alpha, 0) * jnp.square(s) / 4)
    return outward * s * _closed_forms.spread(alpha) / _stretch(alpha, s)


def _excess(alpha):
    # Not jnp.abs, whose derivative at 0 is 0 and not that of one side.
    return jnp.where(alpha > 1, alpha - 1, 1 - alpha)


def _rate(alpha):
    """Returns the rate of the Gaussian decay in s; with it no exponential overflows."""
    return jnp.where(alpha > 1, alpha, (1 + alpha) / 2)
