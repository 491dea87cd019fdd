"""What tests of the update rules share: directions of float64 matrices, and their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec

SPEC = {"x": MatrixSpec(unit=0, feature=1)}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def orthogonal(n, seed=0):
    return np.linalg.qr(normal(n, n, seed=seed))[0]


def polar(x):
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def rows(x, floor=0.0):
    """Returns the definition of the row norm with a relative floor."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return x / (norm + floor * np.sqrt(np.mean(norm**2)))


@functools.cache
def _updater(options, spec):
    options = {"b1": 0.0, "scale": "none", "method": "eigh", **dict(options)}
    tx = spectral.scale_by_spectral(**options, overrides=dict(spec))

    def update(grads, noise):
        state = tx.init(grads[0])
        for g in grads:
            out, state = tx.update(g, state, noise_variance=noise)
        return out["x"], state

    return jax.jit(update)


def run(rule, *grads, spec=SPEC, noise=None, **options):
    """Returns the last update and the state, a step for each gradient ``[units, features]``."""
    with jax.enable_x64(True):
        update = _updater(tuple({"rule": rule, **options}.items()), tuple(spec.items()))
        out, state = update([{"x": jnp.asarray(g)} for g in grads], noise)
        return np.asarray(out), jax.tree.map(np.asarray, state)


def direction(rule, x, **options):
    return run(rule, x, **options)[0]
