"""The gain of a Kalman filter for a gradient that wanders."""

import math

import jax.numpy as jnp

from jaxkit import _check, _numerics


def kalman_gain(q_over_r):
    r"""Returns the schedule ``step -> gain`` of the optimal filter for a random walk in noise.

    The true gradient moves by a step of variance Q before each look at it with noise of variance R,
    and nothing is known at the start. With u = Q / R the recursion

    .. math:: K_0 = 1, \quad K_t = \frac{K_{t-1} + u}{K_{t-1} + u + 1}

    ends at :math:`(\sqrt{u^2 + 4 u} - u) / 2`. For u = 0 it is 1 / (step + 1), the plain mean. The
    variance of the estimate is K R. In training the move is that of the gradient between two
    queries, after what the denoiser's order predicts of it. Inside a training loop the gain of
    least error is too small for the best final loss, several times: see it as a lower end.

    Args:
      q_over_r: u, in [0, inf); may be traced.

    Returns:
      Function from the step, a whole number from 0 or an array of them, to the gain in (0, 1], of
      the shape of the step, float32 or wider.

    Raises:
      TypeError: ``q_over_r`` is no number.
      ValueError: ``q_over_r`` is negative or not finite.

    Example:
      >>> from jaxkit import denoise
      >>> gain = denoise.kalman_gain(0.1)
      >>> print(f"{gain(0):.4f} {gain(1):.4f} {gain(1000):.4f}")
      1.0000 0.5238 0.2702

    Source: the Kalman filter. Derived here: the closed form
    :math:`K_t = \sqrt u \cosh((t + 1/2) \theta) / \sinh((t + 1) \theta)`,
    :math:`\theta = 2 \,\mathrm{arsinh}(\sqrt u / 2)`.

    Cost: a few scalar operations, whatever the step.
    """
    _check.between("q_over_r", q_over_r, 0, math.inf)
    u = jnp.asarray(q_over_r, _numerics.wide(jnp.result_type(q_over_r, float)))

    def schedule(step):
        # As a float, since a step that is the largest whole number has no next one.
        looks = jnp.asarray(step).astype(u.dtype) + 1
        # To first order in u where that is exact: the derivative cancels there, and at 0 ends.
        still = 1 / looks + (looks - 1) * (2 * looks - 1) / (6 * looks) * u
        is_still = jnp.square(looks) * u < jnp.sqrt(jnp.finfo(u.dtype).eps)
        safe = jnp.where(is_still, 1, u)
        root = jnp.sqrt(safe)
        theta = 2 * jnp.arcsinh(root / 2)
        end = 2 * root / (root + jnp.sqrt(safe + 4))
        gain = end * (1 + jnp.exp((1 - 2 * looks) * theta)) / -jnp.expm1(-2 * looks * theta)
        return jnp.minimum(jnp.where(is_still, still, gain), 1)

    return schedule
