"""Gain and learning rate that balance noise against bias over a number of steps."""

import math

import jax.numpy as jnp

from jaxkit import _check, _numerics


def denoise_schedule(num_steps, order, *, gain_scale=1.0, learning_rate_scale=1.0):
    r"""Returns the constant gain and learning rate of the best rate of convergence known.

    For T steps of length :math:`\eta` along a denoised gradient of order p and gain a,

    .. math:: \frac1T \sum_t E|\nabla f(x_t)| \le C \Big[ \frac{1}{\eta T} + L \eta
       + \sigma \sqrt{\kappa a} + M (\eta / a)^p \Big]

    if f is bounded below and L-smooth, its derivative of order p + 1 is bounded, and the noise is
    independent. The choice :math:`a = T^{-2p/(3p+1)}`, :math:`\eta = T^{-(2p+1)/(3p+1)}` makes this
    :math:`O(T^{-p/(3p+1)})`: 1/4 for p = 1, 2/7 for p = 2, 3/10 for p = 3, and 1/3 in the limit,
    which is optimal. It tells how to scale settings that were tuned at another length of training.

    Args:
      num_steps: T, static, at least 1.
      order: p, static, at least 1; ``math.inf`` for the limit, which STORM reaches.
      gain_scale: factor of the gain, positive; may be traced.
      learning_rate_scale: factor of the rate, positive; may be traced.

    Returns:
      ``(gain, learning_rate)``, each ``[]`` in (0, 1]: what is above 1 is 1.

    Raises:
      TypeError: ``num_steps`` or ``order`` is no whole number, or a factor no number.
      ValueError: ``num_steps`` or ``order`` is below 1, or a factor not positive.

    Example:
      >>> from jaxkit import denoise
      >>> gain, learning_rate = denoise.denoise_schedule(10_000, 2)
      >>> print(gain.round(4), learning_rate.round(4))
      0.0052 0.0014

    Source: arXiv:2002.03305 for order 2, arXiv:2412.14488 for higher ones. Derived here: all orders
    by one bound.

    Cost: none.
    """
    num_steps = _check.count("num_steps", num_steps)
    inverse = 1 / (order if order == math.inf else _check.count("order", order))

    def scaled(name, scale, power):
        _check.between(name, scale, 0, math.inf, closed=False)
        dtype = jnp.result_type(scale, float)
        wide = jnp.asarray(scale, _numerics.wide(dtype)) * num_steps ** (-power / (3 + inverse))
        return jnp.minimum(wide, 1).astype(dtype)

    return (
        scaled("gain_scale", gain_scale, 2),
        scaled("learning_rate_scale", learning_rate_scale, 2 + inverse),
    )
