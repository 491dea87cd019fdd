"""The gain of exponential averaging that measures its own noise, for one leaf."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkit import _numerics, _tree

_SMALLEST_GAIN = 0.02
_SMALLEST_WEIGHT = 0.05


class AutoGain(NamedTuple):
    r"""What the automatic gain of one leaf keeps, in float32 or wider.

    Attributes:
      step: ``[]`` int32, number of updates.
      estimate: shape of the leaf, the denoised gradient m.
      shadow: shape of the leaf, the filter h of least error, against which noise is measured: a
        gain that is measured on the filter it drives confirms itself at a wrong value.
      excess: ``[]``, average of :math:`|g - h|^2`, g the true gradient, without bias.
      power: ``[]``, average of :math:`|y - h|^2`.
    """

    step: jax.Array
    estimate: jax.Array
    shadow: jax.Array
    excess: jax.Array
    power: jax.Array


def init(leaf):
    """Returns the state for a leaf of the parameters, all zeros."""
    zeros = _tree.zeros_like(leaf, _numerics.wide(jnp.result_type(leaf)))
    scalar = jnp.zeros([], zeros.dtype)
    return AutoGain(jnp.zeros([], jnp.int32), zeros, zeros * 1, scalar, scalar * 1)


def update(state, y, variance):
    r"""Returns the estimate of the gradient, in the dtype of the state, and the next state.

    ``variance`` ``[]`` is that of an entry of ``y``. For the mean of k independent gradients it is
    :math:`\sum_j |y_j - y|^2 / (k (k - 1) \cdot size)`, for which the excess is the mean of
    :math:`\langle y_i - h, y_j - h \rangle` over all pairs: the noise is not in it, since no part
    meets itself.
    """
    dtype = state.power.dtype
    y = y.astype(dtype)
    step = optax.safe_increment(state.step)
    is_first = state.step == 0
    # Before the first gradient there is no estimate to measure. Only the quotient of the averages
    # is used, so starting both from zero leaves no bias.
    power = jnp.where(is_first, 0, jnp.sum(jnp.square(y - state.shadow)))
    excess = jnp.where(is_first, 0, power - y.size * jnp.asarray(variance, dtype))
    weight = jnp.maximum(_SMALLEST_WEIGHT, 1 / step.astype(dtype))
    power = state.power + weight * (power - state.power)
    excess = state.excess + weight * (excess - state.excess)
    is_exact = power == 0
    quotient = jnp.where(is_exact, 1, excess / jnp.where(is_exact, 1, power))
    gain = jnp.clip(quotient, _SMALLEST_GAIN, 1)
    shadow = state.shadow + gain * (y - state.shadow)
    estimate = state.estimate + jnp.sqrt(gain) * (y - state.estimate)
    return estimate, AutoGain(step, estimate, shadow, excess, power)
