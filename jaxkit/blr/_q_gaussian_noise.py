"""Noise of unit variance with bounded support, normal, or with heavy tails."""

import math

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.blr import _geometry


def q_gaussian_noise(key, shape, alpha, dtype=jnp.float32):
    r"""Returns draws of the q-Gaussian of mean 0 and variance 1.

    One formula without rejection for all ``alpha``: 1 is the normal distribution, above 1 the
    support is :math:`|z| \le \sqrt{(3\alpha - 1) / (\alpha - 1)}`, below 1 the tails are those of
    Student's t with :math:`(1 + \alpha) / (1 - \alpha)` degrees of freedom. It has derivatives in
    ``alpha``, at 1 too. The uniform numbers behind a draw are multiples of :math:`2^{-23}`
    (:math:`2^{-52}` in float64), so no draw lies further out than that allows: 5.7 for 1, 15.4 for
    0.8, 204 for 0.5 in float32.

    Args:
      key: typed random key, ``[]``.
      shape: shape of the draws, static.
      alpha: Tsallis index above 1/3, a number or an array that broadcasts to ``shape``; may be
        traced, and then gives NaN out of range.
      dtype: real floating, static; below float32 the draws are rounded once.

    Returns:
      Draws ``[*shape]`` of ``dtype``.

    Raises:
      TypeError: ``dtype`` is not real floating, or ``alpha`` no number.
      ValueError: a static ``alpha`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> z = blr.q_gaussian_noise(jax.random.key(0), (100_000,), 2.0)
      >>> print(jnp.std(z).round(2), bool(jnp.max(jnp.abs(z)) <= 5**0.5))
      1.0 True

    Source: arXiv:cond-mat/0605570.

    Cost: one block of the generator (two words), a logarithm, an exponential, a root and a short
    polynomial for each draw; no more than two uniform numbers.
    """
    _check.floating("dtype", dtype)
    _geometry.check_alpha("alpha", alpha)
    wide = _numerics.wide(dtype)
    alpha = jnp.asarray(alpha, wide)
    radius, angle = _uniforms(key, shape, wide)
    scale, curve = (3 * alpha - 1) / (1 + alpha), 2 * (alpha - 1) / (1 + alpha)
    normal = jnp.abs(curve) < 1e-6
    safe = jnp.where(normal, 1, curve)

    def each(x):
        return x if x.ndim == 0 else jnp.broadcast_to(x, shape)

    # Exact: 1 - radius is a multiple of the same power of two, and never 0.
    log = jnp.log(1 - radius)
    squared = jnp.where(
        each(normal),
        -2 * log * (1 + each(curve) / 2 * log),
        each(-2 / safe) * jnp.expm1(each(safe) * log),
    )
    # The root has no derivative at 0.
    length = jnp.where(log < 0, jnp.sqrt(each(scale) * jnp.where(log < 0, squared, 1)), 0)
    bound = each(_geometry.half_width(alpha))
    return jnp.clip(length * _sine(angle - 0.5), -bound, bound).astype(dtype)


def _uniforms(key, shape, dtype):
    """Returns two arrays of independent uniform numbers in [0, 1)."""
    if dtype == jnp.float64:
        return (jax.random.uniform(k, shape, dtype) for k in jax.random.split(key))
    if str(jax.random.key_impl(key)) == "threefry2x32":
        # Keys of this kind are blocks of the generator's output: two words for the price of one.
        words = jax.random.key_data(jax.random.split(key, shape))
        pair = words[..., 0], words[..., 1]
    else:
        pair = (jax.random.bits(k, shape, jnp.uint32) for k in jax.random.split(key))
    return ((x >> 9).astype(dtype) * 2.0**-23 for x in pair)


def _sine(x):
    """Returns sin(pi x) on [-1/2, 1/2], by its series: cheaper than a cosine of any argument."""
    square = jnp.square(jnp.pi * x)
    total = jnp.zeros_like(x)
    for i in reversed(range(11 if x.dtype == jnp.float64 else 6)):
        total = total * square + (-1) ** i / math.factorial(2 * i + 1)
    return total * jnp.pi * x
