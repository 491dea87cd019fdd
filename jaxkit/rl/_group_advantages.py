"""Advantages relative to the other outputs for the same prompt."""

import jax.numpy as jnp

from jaxkit import _check
from jaxkit.rl import _group


def group_advantages(rewards, *, eps=1e-6, mask=None):
    r"""Returns the advantages :math:`(r_i - \bar r) / (\mathrm{std}(r) + \epsilon)` of a group.

    Mean and standard deviation (dividing by N) are those of the group itself, so no critic is
    needed. Equal rewards give zeros.

    Args:
      rewards: ``[N]`` real floating, the rewards of N outputs for one prompt.
      eps: added to the standard deviation, not negative; may be traced. With 0, equal rewards give
        zeros still.
      mask: ``[N]`` bool, True for outputs that count; None for all.

    Returns:
      Advantages ``[N]`` in the dtype of ``rewards``, zero where the mask is False. A NaN reward
      that counts makes them NaN.

    Raises:
      TypeError: ``rewards`` is not real floating, or ``mask`` not bool.
      ValueError: ``rewards`` is not ``[N]``, ``mask`` of another shape, or ``eps`` negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import rl
      >>> print(rl.group_advantages(jnp.array([0.0, 0.0, 1.0, 1.0])).round(3))
      [-1. -1.  1.  1.]

    Source: arXiv:2402.03300, section 4.1.

    Cost: O(N).
    """
    wide, mask = _group.checked(rewards, mask)
    _check.between("eps", eps, 0, float("inf"))
    num = jnp.maximum(jnp.sum(mask, dtype=wide.dtype), 1)
    centered = jnp.where(mask, wide - jnp.sum(wide) / num, 0)
    variance = jnp.sum(jnp.square(centered)) / num
    # Equal rewards: neither a division by zero nor the infinite slope of the root there.
    some = ~(variance <= 0)
    spread = jnp.sqrt(jnp.where(some, variance, 1)) + jnp.asarray(eps, wide.dtype)
    return jnp.where(some, centered / spread, 0).astype(jnp.result_type(rewards))
