"""How far a number varies from sample to sample."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics


class Interval(NamedTuple):
    """A value, and how it varies over resampled rows; trees like the value.

    Attributes:
      value: of the samples themselves; shape and dtype are those of ``fun``.
      low, high: ends of the interval, like ``value``.
      std_error: standard deviation of the resampled values, like ``value``.
      bias: mean of the resampled values less ``value``.
    """

    value: jax.Array
    low: jax.Array
    high: jax.Array
    std_error: jax.Array
    bias: jax.Array


def bootstrap(key, fun, *samples, num_samples=1000, level=0.95):
    """Returns ``fun(*samples)`` with the interval that holds most of its resampled values.

    Each sample is drawn again, as many rows with replacement, ``num_samples`` times. With values
    per point (``per_point=True`` of :func:`chamfer`, :func:`precision_recall` and
    :func:`density_coverage`) no neighbor is searched again; drawing features again would be wrong
    there, since a row would find its copies. The interval is then one for the sample that was
    searched. :func:`frechet_distance` and :func:`sliced_wasserstein` take features themselves;
    if ``bias`` is not small, as it is not for them near zero, resampled values are too large by
    it, and so are the ends.

    Args:
      key: random key.
      fun: function of the samples, such as ``jnp.mean``, that returns a tree of real floating
        arrays.
      *samples: trees of arrays with a common leading axis, of points. Samples are drawn
        independently, arrays of one sample together.
      num_samples: static number of resampled values.
      level: share of the resampled values in the interval, in (0, 1); may be traced.

    Returns:
      :class:`Interval`.

    Raises:
      TypeError: ``fun`` is not a function, or a leaf not an array.
      ValueError: no sample, leading axes that differ, or an option out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> out = metrics.bootstrap(jax.random.key(0), jnp.mean, jnp.arange(101.0))
      >>> print(out.value, bool(out.low < 47), bool(out.high > 53))
      50.0 True True

    Source: the percentile bootstrap, a known technique.

    Cost: ``num_samples`` + 1 calls of ``fun``, one after the other; memory of one.
    """
    _check.function("fun", fun)
    _check.between("level", level, 0, 1, closed=False)
    num_samples = _check.count("num_samples", num_samples)
    if not samples:
        raise ValueError("samples must hold at least one sample, got none.")
    for sample in samples:
        _check.leading_axis("samples", sample)
    value = jax.tree.map(jnp.asarray, fun(*samples))
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"fun must return real floating arrays, got {leaf.dtype}.")
    leaves, treedef = jax.tree.flatten(value)
    resampled = jax.tree.leaves(_resampled(key, samples, fun, num_samples))
    fields = zip(*map(functools.partial(_interval, level), leaves, resampled), strict=True)
    return Interval(*map(treedef.unflatten, fields))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _resampled(key, samples, fun, num_samples):
    def draw(key, sample):
        size = jnp.shape(jax.tree.leaves(sample)[0])[0]
        rows = jax.random.randint(key, (size,), 0, size)
        return jax.tree.map(lambda x: x[rows], sample)

    def once(key):
        return fun(*map(draw, jax.random.split(key, len(samples)), samples))

    return jax.lax.map(once, jax.random.split(key, num_samples))


def _interval(level, value, values):
    wide = values.astype(_numerics.wide(values.dtype))
    tail = (1 - jnp.asarray(level, wide.dtype)) / 2
    low, high = jnp.quantile(wide, jnp.stack([tail, 1 - tail]), axis=0)
    error, bias = jnp.std(wide, axis=0), jnp.mean(wide, axis=0) - value.astype(wide.dtype)
    return Interval(value, *(x.astype(value.dtype) for x in (low, high, error, bias)))
