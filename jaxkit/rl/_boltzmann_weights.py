"""Weights that turn samples of a policy into samples of its Boltzmann tilt."""

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.rl import _group


def boltzmann_weights(rewards, beta, *, mask=None):
    r"""Returns the weights :math:`w_i = e^{r_i / \beta} / \frac1N \sum_j e^{r_j / \beta}`.

    Of N outputs of a reference policy, the weighted likelihood
    :math:`-\frac1N \sum_i w_i \log \pi_\theta(y_i | x)` fits the policy
    :math:`\pi_{ref} e^{r / \beta} / Z`, the best one for reward at a price ``beta`` of divergence.
    Outputs and weights are a fixed data set, so both calls of a zeroth-order slope see the same.

    Large ``beta`` gives ones, the plain likelihood, as equal rewards do; small ``beta`` shares N
    among the best outputs. The effective number of outputs is ``sum(w)**2 / sum(w**2)``.

    Args:
      rewards: ``[N]`` real floating, the rewards of N outputs for one prompt.
      beta: temperature, positive; may be traced.
      mask: ``[N]`` bool, True for outputs that count; None for all.

    Returns:
      Weights ``[N]`` in the dtype of ``rewards``, of mean 1 over the outputs that count, zero
      elsewhere. A NaN reward that counts makes them NaN.

    Raises:
      TypeError: ``rewards`` is not real floating, or ``mask`` not bool.
      ValueError: ``rewards`` is not ``[N]``, ``mask`` of another shape, or ``beta`` not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import rl
      >>> print(rl.boltzmann_weights(jnp.log(jnp.array([1.0, 2.0, 3.0])), 1.0).round(1))
      [0.5 1.  1.5]

    Source: arXiv:2605.02469.

    Cost: a softmax.
    """
    wide, mask = _group.checked(rewards, mask)
    _check.between("beta", beta, 0, float("inf"), closed=False)
    # The largest goes first: the quotient of two small numbers may overflow, of differences not.
    top = jnp.max(wide, where=mask, initial=-jnp.inf)
    tilt = (wide - jnp.where(jnp.isfinite(top), top, 0)) / jnp.asarray(beta, wide.dtype)
    some = jnp.any(mask)
    weights = jax.nn.softmax(tilt, where=mask | ~some) * jnp.sum(mask, dtype=wide.dtype)
    return weights.astype(jnp.result_type(rewards))
