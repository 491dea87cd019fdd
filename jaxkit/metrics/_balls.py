"""How many points lie in balls."""

import functools

import jax
import jax.numpy as jnp

from jaxkit.metrics import _nearest, _samples


@functools.partial(jax.jit, static_argnames=("k", "chunk"))
def counts(centers, points, *, k, chunk):
    """Returns for each ball how many points lie in it, and for each point in how many balls.

    The ball of a center reaches to its k-th nearest other center. A distance that equals the
    radius counts as inside, also where it only does so within rounding.
    """
    centers, points = jax.lax.stop_gradient((centers, points))
    squares, _ = _nearest.squared_nearest(centers, centers, k=k, chunk=chunk, exclude_self=True)
    origin = jnp.mean(centers, axis=0, keepdims=True)
    x, y = centers - origin, points - origin
    # What a product and a sum of D terms may be off by.
    slack = (4 + x.shape[1] ** 0.5) * jnp.finfo(x.dtype).eps
    limits = (1 + slack) * squares[:, -1] - (1 - slack) * jnp.sum(jnp.square(x), axis=1)
    norms = (1 - slack) * jnp.sum(jnp.square(y), axis=1)
    # No ball reaches a filled-in point, and a filled-in ball nothing.
    blocks = _samples.per_block(y, chunk), _samples.per_block(norms, chunk, jnp.inf)

    def block_of_balls(around, ball):
        rows, limits = ball

        def block_of_points(block):
            columns, norms = block
            product = jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)
            inside = norms[None] - 2 * product <= limits[:, None]
            return inside.sum(axis=1, dtype=jnp.int32), inside.sum(axis=0, dtype=jnp.int32)

        inside, new = jax.lax.map(block_of_points, blocks)
        return around + new, inside.sum(axis=0, dtype=jnp.int32)

    start = jnp.zeros(blocks[1].shape, jnp.int32)
    balls = _samples.per_block(x, chunk), _samples.per_block(limits, chunk, -jnp.inf)
    around, inside = jax.lax.scan(block_of_balls, start, balls)
    poison = _samples.poison(centers, points)
    found = _samples.per_row(inside, len(centers)), _samples.per_row(around, len(points))
    return tuple(number.astype(x.dtype) + poison for number in found)
