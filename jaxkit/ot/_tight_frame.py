"""Directions of slices that add up to the identity."""

import jax
import jax.numpy as jnp

from jaxkit import _check


def tight_frame(key, num_directions, dim):
    r"""Returns random directions that weigh all of space alike.

    They are the rows of random orthogonal matrices, as many as it takes: if their number L is a
    multiple of d, :math:`\sum_l \theta_l \theta_l^\top = \frac Ld I` exactly, which independent
    directions obey only on average. The bound of :func:`untrained` rests on it. Draw them once
    for all pairs.

    Args:
      key: random key.
      num_directions: wanted number of directions, at least 1, static. It is rounded up to a
        multiple of ``dim``, but for a number below ``dim``: that many orthonormal rows, which are
        no tight frame, come back.
      dim: dimension d of the directions, static.

    Returns:
      Unit vectors ``[L, dim]`` float32, or float64 if that is JAX's default.

    Raises:
      TypeError: a number is not whole.
      ValueError: a number is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> theta = ot.tight_frame(jax.random.key(0), 10, 3)
      >>> print(theta.shape, jnp.diag(theta.T @ theta).round(3))
      (12, 3) [4. 4. 4.]

    Source: derived here; orthogonal directions are a known way to spread slices.

    Cost: L / d orthogonal factors of d x d matrices, O(L d^2).
    """
    num_directions = _check.count("num_directions", num_directions)
    dim = _check.count("dim", dim)
    # jax.random.orthogonal fixes the signs of the factors, so that they are uniform.
    theta = jax.random.orthogonal(key, dim, (-(-num_directions // dim),)).reshape(-1, dim)
    return theta if num_directions >= dim else theta[:num_directions]


def equispaced_frame(num_directions):
    r"""Returns directions of the plane at equal angles, :math:`\pi (l + \frac12) / L`.

    From L = 2 on they are a tight frame, and the most even one.

    Args:
      num_directions: number of directions L, at least 1, static.

    Returns:
      Unit vectors ``[L, 2]`` float32, or float64 if that is JAX's default.

    Raises:
      TypeError: ``num_directions`` is not a whole number.
      ValueError: ``num_directions`` is less than 1.

    Example:
      >>> from jaxkit import ot
      >>> print(ot.equispaced_frame(2).round(3))
      [[ 0.707  0.707]
       [-0.707  0.707]]

    Source: derived here; a known frame.

    Cost: L sines and cosines.
    """
    num_directions = _check.count("num_directions", num_directions)
    angles = jnp.pi * (jnp.arange(num_directions, dtype=float) + 0.5) / num_directions
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
