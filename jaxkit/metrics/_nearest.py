"""Exact nearest neighbors in bounded memory."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.metrics import _samples

_GROUP = 16  # rows of y that stand or fall together until distances are taken as differences
_SPARE = 4  # groups looked at beyond k, since their scores are rounded
_REFINED = 2**19  # entries of the rows that are compared as differences at once


class Neighbors(NamedTuple):
    """Nearest neighbors of each row.

    Attributes:
      distances: ``[N, k]`` float32 or wider, rising along a row.
      indices: ``[N, k]`` int32, rows of ``y``.
    """

    distances: jax.Array
    indices: jax.Array


def nearest(x, y, *, k=1, exclude_self=False, chunk=1024):
    r"""Returns the ``k`` rows of ``y`` that are nearest to each row of ``x``.

    The matrix product :math:`|y|^2 - 2 x y^\top` of centered rows only nominates: groups of rows,
    four more than asked for. Among their members the distance is taken as a difference, so a row
    finds its copy at distance 0, and nearly equal rows are told apart. The order is exact unless
    more than four groups tie within rounding of the largest squared norm. Of equal distances any
    may come first. Derivatives are those of the distances to the neighbors found.

    Args:
      x: ``[N, D]`` real floating; half precision is computed in float32.
      y: ``[M, D]`` real floating.
      k: static number of neighbors.
      exclude_self: static; True if ``y`` is ``x``: row i is no neighbor of row i. Copies of it are.
      chunk: static number of rows of ``x`` and of ``y`` that are compared at once.

    Returns:
      :class:`Neighbors`. A NaN or infinity in ``y``, or in a row of ``x``, makes what depends on
      it NaN or infinite.

    Raises:
      TypeError: an array that is not real floating, or a ``k`` or ``chunk`` that is not a whole
        number.
      ValueError: other shapes, fewer than ``k`` rows of ``y`` (``k + 1`` with ``exclude_self``),
        other sizes than one with ``exclude_self``, ``k`` or ``chunk`` below 1; outside ``jit``
        also NaN or inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> points = jnp.array([[0.0, 0.0], [3.0, 4.0], [3.0, 3.0]])
      >>> print(metrics.nearest(points[:1], points, k=2).distances.round(3))
      [[0.    4.243]]
      >>> print(metrics.nearest(points, points, exclude_self=True).indices[:, 0])
      [2 2 1]

    Source: derived here.

    Cost: 2 N M D operations of a matrix product; memory O(``chunk`` ** 2) beside the arrays.
    """
    x, y = _samples.checked(x=x, y=y)
    k, chunk = _check.count("k", k), _check.count("chunk", chunk)
    if exclude_self and x.shape != y.shape:
        raise ValueError(f"y must be x with exclude_self, got {y.shape} and {x.shape}.")
    if y.shape[0] < k + exclude_self:
        raise ValueError(f"y must have at least {k + exclude_self} rows, got {y.shape[0]}.")
    squares, indices = squared_nearest(x, y, k=k, exclude_self=bool(exclude_self), chunk=chunk)
    return Neighbors(root(squares), indices)


@functools.partial(jax.jit, static_argnames=("k", "exclude_self", "chunk"))
def squared_nearest(x, y, *, k, chunk, exclude_self=False):
    """Returns squared distances and indices of the nearest neighbors."""
    num_rows, num_candidates = x.shape[0], y.shape[0]
    num_groups = k + exclude_self + _SPARE
    pad = (0, -num_candidates % _GROUP)
    center = jnp.mean(y, axis=0, keepdims=True)
    norms = jnp.pad(jnp.sum(jnp.square(y - center), axis=1), pad, constant_values=jnp.inf)
    padded = jnp.pad(y, (pad, (0, 0)))
    groups = padded.reshape(-1, _GROUP, y.shape[1])
    chunk_y = -(-chunk // _GROUP) * _GROUP
    blocks = jax.lax.stop_gradient(
        (
            _samples.per_block(padded - center, chunk_y),
            _samples.per_block(norms, chunk_y, jnp.inf),
        )
    )

    def block_of_x(operands):
        rows, own = operands
        nominated = _nominate(jax.lax.stop_gradient(rows - center), blocks, num_groups)

        def refine(operands):
            row, own, nominated = operands
            members = nominated[:, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)[None]
            real = (members >= 0) & (members < num_candidates)
            if exclude_self:
                real &= members != own
            found = groups[jnp.maximum(nominated, 0)]
            closeness = jnp.where(real, -_squared(row[None, None], found), -jnp.inf)
            return members.reshape(-1)[jax.lax.top_k(closeness.reshape(-1), k)[1]]

        # A power of two goes into the usual chunks, and nothing is compiled for the rest.
        batch = max(1, _REFINED // (_GROUP * num_groups * x.shape[1]))
        batch = 2 ** (batch.bit_length() - 1)
        operands = jax.lax.stop_gradient(rows), own, nominated
        found = jax.lax.map(refine, operands, batch_size=min(batch, rows.shape[0]))
        return _squared(rows[:, None], y[found]), found

    own = jnp.arange(num_rows, dtype=jnp.int32)
    squares, indices = jax.lax.map(
        block_of_x, (_samples.per_block(x, chunk), _samples.per_block(own, chunk))
    )
    squares = _samples.per_row(squares, num_rows) + _samples.poison(y)
    return squares, _samples.per_row(indices, num_rows)


def root(squares):
    """Returns square roots with the derivative 0 at 0."""
    some = squares > 0
    # Not where(some, root, 0), which would turn NaN into 0.
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, 1)), squares)


def _nominate(rows, blocks, num_groups):
    """Returns ``[rows, num_groups]``: the groups of y with the least scores, -1 for none."""
    per_block = blocks[1].shape[1] // _GROUP

    def block_of_y(carry, block):
        best, groups, number = carry
        centered, norms = block
        product = jnp.matmul(rows, centered.T, precision=jax.lax.Precision.HIGHEST)
        scores = norms[None] - 2 * product
        least = scores.reshape(-1, per_block, _GROUP).min(axis=2)
        new = number * per_block + jnp.arange(per_block, dtype=jnp.int32)
        ids = jnp.concatenate([groups, jnp.broadcast_to(new[None], least.shape)], axis=1)
        values, at = jax.lax.top_k(-jnp.concatenate([best, least], axis=1), num_groups)
        return (-values, jnp.take_along_axis(ids, at, axis=1), number + 1), None

    shape = rows.shape[0], num_groups
    start = jnp.full(shape, jnp.inf, rows.dtype), jnp.full(shape, -1, jnp.int32), jnp.int32(0)
    (_, groups, _), _ = jax.lax.scan(block_of_y, start, blocks)
    return groups


def _squared(x, y):
    return jnp.sum(jnp.square(x - y), axis=-1)
