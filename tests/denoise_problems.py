"""Paths, polynomials and the loop of queries that several test files of denoise share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import denoise


@functools.cache
def path(num, size, seed=0, scale=0.3):
    """Returns a random walk ``[num, size]``, NumPy float64."""
    return np.cumsum(scale * np.random.default_rng(seed).normal(size=(num, size)), 0)


def polynomial(degree, size, seed=1):
    """Returns the gradient of a random polynomial of ``degree`` on points ``[size]``."""
    rng = np.random.default_rng((seed, degree))
    directions = rng.normal(size=(6, size)) / np.sqrt(size)
    coefficients = rng.normal(size=(6, degree))

    def gradient(x):
        # f(x) = sum_i sum_k c_ik (v_i . x)^k
        v = jnp.asarray(directions, x.dtype)
        along = jnp.sum(v * x[None], -1)
        slopes = sum(
            jnp.asarray(coefficients[:, k - 1] * k, x.dtype) * along ** (k - 1)
            for k in range(1, degree + 1)
        )
        return jnp.sum(v * slopes[:, None], 0)

    return gradient


def inverse(scale=1.0, dtype=jnp.float32):
    """Returns the schedule ``min(1, scale / (step + 1))``."""
    return lambda step: jnp.minimum(1, scale / (step.astype(dtype) + 1))


def follow(tx, grad_fn, points, noise=None, hessian_fn=None):
    """Returns the estimates along ``points`` ``[T, ...]``, asked by the pure triple in a scan.

    ``grad_fn(x)``, plus ``noise[t, j]`` at node j if given: ``[T, q, ...]``. ``hessian_fn(x)`` is
    for kind "hvp".
    """

    def step(carry, xs):
        state, last = carry
        x, errors = xs
        at, weights = denoise.query_points(state, x)
        answers = jax.vmap(grad_fn)(at)
        if errors is not None:
            answers = answers + errors
        grads = jnp.tensordot(weights.astype(answers.dtype), answers, 1)
        extra = {} if hessian_fn is None else {"hvp": hessian_fn((x + last) / 2) @ (x - last)}
        out, state = tx.update(grads, state, x, queried=True, **extra)
        return (state, x), out

    start = tx.init(points[0]), points[0]
    return jax.jit(lambda: jax.lax.scan(step, start, (points, noise))[1])()
