"""A network that predicts potentials from two weight vectors on one grid (Meta-OT, 2206.05262)."""

import functools

import jax
import jax.numpy as jnp
import optax

from benchmarks.mlp import MLP

WIDTHS, BATCH = (256, 256), 16
RATE = 1e-3  # of Adam, as published; of five from 1e-4 to 1e-2 none is better with 50 pairs


@functools.partial(jax.jit, static_argnames=("steps", "rate"))
def train(seeds, a, b, points, epsilon, *, steps, rate=RATE):
    """Returns the parameters of one network for each of ``seeds`` ``[R]``, trained side by side.

    Each maximizes the semi-dual objective of random pairs, by Adam. ``a`` and ``b`` ``[R, K, n]``
    are the weights of the pairs at ``points`` ``[n, d]``, ``epsilon`` is ``[R]``. ``b`` None stands
    for fresh pairs: two of the K weights in ``a``, drawn at each step.
    """
    costs = jnp.sum(jnp.square(points[:, None] - points), -1)
    optimizer = optax.adam(rate)

    def one(seed, a, b, epsilon):
        def loss(params, a, b):
            f = predict(params, a, b)
            score = (f[:, None] - costs) / epsilon
            g = -epsilon * jax.nn.logsumexp(score, -1, a[:, None])
            return -jnp.mean(jnp.sum(a * f, -1) + jnp.sum(b * g, -1))

        def step(carry, key):
            params, state = carry
            draws = jax.random.randint(key, (2, BATCH), 0, len(a))
            batch = (a[draws[0]], a[draws[1]]) if b is None else (a[draws[0]], b[draws[0]])
            updates, state = optimizer.update(jax.grad(loss)(params, *batch), state)
            return (optax.apply_updates(params, updates), state), None

        init_key, key = jax.random.split(jax.random.key(seed))
        params = _model(len(points)).init(init_key, jnp.zeros(2 * len(points)))
        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jax.random.split(key, steps))[0][0]

    return jax.vmap(one)(seeds, a, b, epsilon)


def predict(params, a, b):
    """Returns the potentials ``[..., n]`` of weights ``[..., n]``, product convention."""
    return _model(a.shape[-1]).apply(params, jnp.concatenate([a, b], -1))


def _model(n):
    return MLP((*WIDTHS, n))
