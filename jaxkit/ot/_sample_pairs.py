"""Pairs of indices drawn from a plan: the coupling of a mini-batch."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.ot import _pair


def sample_pairs(key, plan, *, num_samples=None):
    r"""Returns indices ``(i, j)`` of pairs drawn from a plan, to couple two batches.

    By default every source is used once, in order: i = 0, ..., n - 1, and j is drawn from row i,
    so that the batch of x stays as it is and only its partners are chosen. With ``num_samples``
    pairs are drawn from the whole plan, independent of each other, as for flow matching.

    Args:
      key: typed random key.
      plan: ``[n, m]`` real floating, not negative, of any positive sum; such as of
        :func:`plan_from_f`.
      num_samples: number of independent pairs, static; None for one of each row.

    Returns:
      Two int32 arrays, ``[n]`` or ``[num_samples]``. -1 stands for j where row i has no mass, and
      for both where the plan has none; a plan with NaN or infinite sums counts as without mass.

    Raises:
      TypeError: ``plan`` is not real floating, or ``num_samples`` no whole number.
      ValueError: ``plan`` is not ``[n, m]``, or ``num_samples`` below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> plan = jnp.array([[0.0, 0.5], [0.5, 0.0]])
      >>> i, j = ot.sample_pairs(jax.random.key(0), plan)
      >>> print(i, j)
      [0 1] [1 0]

    Source: arXiv:2302.00482. Derived here: one draw of each row.

    Cost: cumulative sums of the plan, a binary search and one or two uniform numbers a pair; memory
    O(n m), with ``num_samples`` O((n + num_samples) m).
    """
    plan = _pair.real("plan", plan)
    sizes = _check.shape("plan", plan, "n m")
    plan = plan.astype(_numerics.wide(plan.dtype))
    key_row, key_column = jax.random.split(key)
    if num_samples is None:
        rows = jnp.arange(sizes["n"], dtype=jnp.int32)
    else:
        _check.count("num_samples", num_samples)
        ends = _cumulative(jnp.sum(plan, 1))
        u = jax.random.uniform(key_row, (num_samples,), plan.dtype)
        rows = jax.vmap(_index, (None, 0))(ends, u)
    # In two stages: in one cumulative sum of n m entries the small ones would be lost.
    u = jax.random.uniform(key_column, rows.shape, plan.dtype)
    columns = jax.vmap(_index)(jax.vmap(_cumulative)(plan)[rows], u)
    return rows, jnp.where(rows < 0, -1, columns)


def _index(ends, u):
    """Returns the first index whose cumulative sum is above the share ``u`` of the total."""
    total = ends[-1]
    index = jnp.searchsorted(ends, u * total, side="right")  # u < 1: below the total, rounded too
    some = (total > 0) & jnp.isfinite(total)
    return jnp.where(some, index, -1).astype(jnp.int32)


def _cumulative(x):
    # A parallel sum of rounded numbers need not grow, as a binary search demands.
    return jax.lax.cummax(jnp.cumsum(x))
