"""The optimal plan of two sorted point sets on the line: a staircase, found without a loop."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkit import _check
from jaxkit.ot import _pair
from jaxkit.ot._costs import squared


class Staircase(NamedTuple):
    """Sorted points and the two paths of the north-west corner rule through their matrix.

    Attributes:
      x: ``[n]`` sorted.
      y: ``[m]`` sorted.
      rank_x: ``[n]`` int32, for each atom a place in ``x`` that holds its value.
      rank_y: ``[m]`` int32.
      paths: of ties row-first and column-first, each ``(columns[n - 1], rows[m - 1])``: the
        column where a row ends, and the row where a column ends.
      ok: ``[]`` bool, False where points are not finite or weights not valid.
    """

    x: jax.Array
    y: jax.Array
    rank_x: jax.Array
    rank_y: jax.Array
    paths: tuple
    ok: jax.Array


@jax.jit  # for calls that are not compiled: a scan would compile at each of them
def staircase(x, y, a, b, mask_x, mask_y, tol):
    """Returns the :class:`Staircase` of points ``[n]`` and ``[m]`` as of ``_pair.points``.

    Masked atoms have weight zero and lie where another one does, so they need no care.
    """
    (x, rank_x), (y, rank_y) = _sort(x), _sort(y)
    ok = functools.reduce(jnp.logical_and, map(jnp.isfinite, (x[0], x[-1], y[0], y[-1])))
    if a is b is mask_x is mask_y is None:
        paths = _equal_weights(len(x), len(y))
    else:
        level_x = _levels(_pair.weights("a", a, mask_x, x), rank_x)
        level_y = _levels(_pair.weights("b", b, mask_y, y), rank_y)
        ok &= jnp.isfinite(level_x[-1]) & jnp.isfinite(level_y[-1])
        paths = _paths(level_x, level_y, tol)
    return Staircase(x, y, rank_x, rank_y, paths, ok)


def potentials(stair, cost):
    """Returns ``(f[n], g[m])`` in sorted order, the mean over the paths of ``stair``."""
    x, y = stair.x, stair.y
    steps = []
    for columns, rows in stair.paths:
        y_at, x_at = take(y, columns), take(x, rows)
        steps.append((rise(cost, x[:-1], x[1:], y_at), rise(_flipped(cost), y[:-1], y[1:], x_at)))
    df, dg = (sum(step) / len(steps) for step in zip(*steps, strict=True))
    start = jnp.zeros(1, x.dtype), cost(x[:1], y[:1])
    return tuple(_sums(jnp.concatenate(side)) for side in zip(start, (df, dg), strict=True))


def rise(cost, low, high, partner):
    """Returns ``cost(high, partner) - cost(low, partner)``.

    Of the squared cost it is a product, exact to its own rounding, not to that of two large costs.
    """
    if cost is squared:
        return (high - low) * ((high - partner) + (low - partner))
    return cost(high, partner) - cost(low, partner)


def search(levels, query, before):
    """Returns how many of the sorted ``levels`` are ``before`` each query: int32.

    It is ``jnp.searchsorted`` with one comparison a step, three times as fast on a CPU.
    """
    halves, size = [], len(levels)
    while size > 1:
        halves.append(size // 2)
        size -= size // 2

    def step(low, half):
        found = before(take(levels, low + (half - 1)), query)
        return low + jnp.where(found, half, 0), None

    # The first step is apart, so that inside shard_map the carry varies where the data do.
    first, *rest = *halves, 1
    low, _ = step(jnp.zeros(query.shape, jnp.int32), first)
    return lax.scan(step, low, jnp.asarray(rest, jnp.int32))[0]


def take(x, index):
    """Returns ``x[index]``, where the index is known to be right."""
    return x.at[index].get(mode="promise_in_bounds")


def check_options(cost, tol):
    """Checks what the functions of one dimension have in common."""
    _check.function("cost", cost)
    if tol is not None:
        _check.between("tol", tol, 0, float("inf"))


def _flipped(cost):
    return cost if cost is squared else lambda y, x: cost(x, y)


def _sums(steps):
    """Returns the cumulative sums, nearly as accurate as if they were rounded once.

    ``jnp.cumsum`` rounds large sums many times. The difference of two neighbors among them is exact
    to rounding of a step, so what it lacks of the given step is known, and is summed in turn.
    """
    sums = jnp.cumsum(steps)
    return sums + jnp.cumsum(steps - jnp.diff(sums, prepend=0))


@jax.custom_jvp
def _sort(x):
    """Returns ``x`` sorted, and a place of each entry in it; equal entries share their place.

    XLA's sort on a CPU is slow, four times less so for one array of integers: that, and a search
    for the places, takes a third of the time of a sort that carries an index.
    """
    keys = _keys(x)
    ordered = lax.sort(keys, is_stable=False)
    return lax.bitcast_convert_type(_flip(ordered), x.dtype), search(ordered, keys, jnp.less)


@_sort.defjvp
def _sort_jvp(primals, tangents):
    # A derivative belongs to an atom, so equal entries need places of their own.
    (x,), (dx,) = primals, tangents
    places = jnp.arange(len(x), dtype=jnp.int32)
    _, order = lax.sort((_keys(x), places), num_keys=1)
    rank = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    none = np.zeros(rank.shape, jax.dtypes.float0)
    return (take(x, order), rank), (take(dx, order), none)


def _keys(x):
    """Returns integers in the order of ``x``: NaN comes first or last."""
    return _flip(lax.bitcast_convert_type(x, jnp.int64 if x.dtype.itemsize == 8 else jnp.int32))


def _flip(bits):
    # A negative float is a sign and a size, a negative integer counts up. It is its own inverse.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _levels(weights, rank):
    """Returns the cumulative weights in sorted order; equal points pool theirs."""
    weights = lax.stop_gradient(weights)
    pooled = jnp.zeros_like(weights).at[rank].add(weights, mode="promise_in_bounds")
    # A cumulative sum in parallel need not grow, by its rounding.
    return lax.cummax(jnp.cumsum(pooled))


def _paths(level_x, level_y, tol):
    """Returns the paths of both tie rules, from cumulative weights."""
    dtype, m = level_x.dtype, len(level_y)
    tol = jnp.asarray(8 * jnp.finfo(dtype).eps if tol is None else tol, dtype)
    paths = []
    for ahead, before in ((-tol, jnp.less), (tol, jnp.less_equal)):
        columns = jnp.minimum(search(level_y, level_x[:-1] + ahead, before), m - 1)
        # A column ends in the row after the last one that ends no later.
        ends = jnp.zeros(m, jnp.int32).at[columns].add(1, mode="promise_in_bounds")
        paths.append((columns, jnp.cumsum(ends)[:-1]))
    return tuple(paths)


def _equal_weights(n, m):
    """Returns the paths of both tie rules by integers alone, before anything runs."""
    ends_x, ends_y = np.arange(1, n) * m, np.arange(1, m) * n
    paths = (-(-ends_x // n) - 1, ends_y // m), (ends_x // n, -(-ends_y // m) - 1)
    return jax.tree.map(lambda index: jnp.asarray(index, jnp.int32), paths)
