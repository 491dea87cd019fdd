"""Noise of the joint q-Gaussian: one radius for all coordinates, covariance one."""

import jax
import jax.numpy as jnp

from jaxkit.blr import _closed_forms


def joint_noise(key, alpha, shape):
    """Returns draws ``[*shape]`` of covariance one over the last axis, in the dtype of ``alpha``.

    ``alpha`` broadcasts to ``shape[:-1]``. The radius is that of a normal draw against a gamma
    variable, which has the same mean, 1, for every alpha.
    """
    normal_key, gamma_key = jax.random.split(key)
    *batch, n = shape
    alpha = jnp.broadcast_to(alpha, batch)
    z = jax.random.normal(normal_key, shape, alpha.dtype)
    # From here on to the Gaussian no number of draws tells the two apart.
    bounded = alpha > 1
    eps = jnp.maximum(jnp.where(bounded, alpha - 1, 1 - alpha), 1e-6)
    concentration = jnp.where(bounded, 1 / eps + 1, 1 / eps - n / 2)
    g = eps * jax.random.gamma(gamma_key, concentration, batch, alpha.dtype)
    inside = jnp.where(bounded, eps, 0) * jnp.sum(jnp.square(z), -1) / 2
    return z * jnp.sqrt(_closed_forms.spread(alpha, n) / (inside + g))[..., None]
