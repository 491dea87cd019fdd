"""Where on the line through the last two iterates to ask, and with which weights."""

import math
import numbers

import jax.numpy as jnp


def nodes(alpha, taus):
    r"""Returns ``(gain, s[q], weights[q])`` of the rule with :math:`\tau_j` = ``alpha * taus[j]``.

    Node j lies at ``s[j]`` :math:`= 1 / \tau_j` on the line from the last iterate (0) to this one
    (1). With the weights :math:`w_j` = ``gain * weights[j]`` the estimate
    :math:`(1 - gain) g + \sum_j w_j y_j` is Lagrange's extrapolation through 0, where g stands for
    the gradient, and the nodes, read at 1. ``taus`` starts with 1, its largest. At ``alpha`` 1
    the weights are exactly (1, 0, ...) and ``s[0]`` is 1.
    """
    taus = jnp.asarray(taus, alpha.dtype)
    tau = alpha * taus
    gain = jnp.zeros_like(alpha)
    weights = []
    for j in range(taus.shape[0]):
        # Not 1 - prod(1 - tau), which rounds a small gain.
        gain = gain + tau[j] * (1 - gain)
        weight = tau[j]
        for i in range(taus.shape[0]):
            if i != j:
                weight = weight * (taus[j] * (1 - tau[i]) / (taus[j] - taus[i]))
        weights.append(weight)
    return gain, 1 / tau, jnp.stack(weights) / gain


def pair_alpha(gain, taus):
    """Returns the ``alpha`` at which the nodes of ``taus`` (1, -ratio) have the gain ``gain``."""
    ratio = -jnp.asarray(taus, gain.dtype)[1]
    alpha = 2 * gain / ((1 - ratio) + jnp.sqrt(jnp.square(1 - ratio) + 4 * ratio * gain))
    return jnp.where(gain < 1, alpha, 1)  # exact there, which rounding would not be


def check_taus(taus, gain):
    """Returns ``taus`` sorted and scaled to a largest of 1, and that scale.

    The gain of the rule must lie in (0, 1] for every multiple of ``taus`` from ``gain``, if it is
    a number, else from 0, up to where the largest is 1.
    """
    try:
        given = sorted((float(tau) for tau in taus), reverse=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"taus must be a sequence of static numbers, got {taus!r}.") from error
    if not given or 0 in given or len({*given}) < len(given) or not all(map(math.isfinite, given)):
        raise ValueError(f"taus must be finite, distinct and not zero, got {tuple(taus)}.")
    # log prod(1 - alpha tau) is concave and 0 at alpha = 0: once below 0 it stays there.
    is_number = isinstance(gain, numbers.Real)
    if is_number:
        effective = 1 - math.prod(1 - gain * tau for tau in given)
        fits = given[0] > 0 and gain * given[0] <= 1 and effective > 0
    else:
        fits = given[0] > 0 and sum(given) >= 0
    if not fits:
        at = f"gain={gain}" if is_number else "a gain near 0"
        raise ValueError(
            "taus must keep the effective gain 1 - prod(1 - gain * taus) in (0, 1] and "
            f"gain * max(taus) at most 1, got {tuple(taus)} at {at}."
        )
    return tuple(tau / given[0] for tau in given), given[0]
