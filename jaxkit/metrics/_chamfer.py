"""Chamfer distances: how far fakes are from the real, and the real from the fakes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.metrics import _nearest, _samples


class Chamfer(NamedTuple):
    """Chamfer distances; lower is better for all.

    Attributes:
      fidelity: ``[]``, the mean distance of a fake to the nearest real row; ``[M]`` per point.
      coverage: ``[]``, the mean distance of a real row to the nearest fake; ``[N]`` per point.
      total: ``[]``, their sum; None per point.
    """

    fidelity: jax.Array
    coverage: jax.Array
    total: jax.Array | None


def chamfer(
    *,
    real,
    fake,
    k=1,
    mean_over_k=False,
    squared=False,
    normalize=None,
    trim=0.0,
    median=False,
    per_point=False,
    chunk=1024,
):
    r"""Returns the mean distances from each sample to the other one's nearest rows.

    Fidelity :math:`\frac1M \sum_j \min_i |f_j - r_i|` is large if fakes are off, coverage
    :math:`\frac1N \sum_i \min_j |r_i - f_j|` if parts of the real have no fake near. Both fall as
    the sample in the minimum grows: compare equal sizes, and with the value of two
    :func:`halves` of the real. A few outliers move a mean: see ``trim`` and ``median``.

    Args:
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.
      k: static; the distance to the k-th nearest row counts.
      mean_over_k: static; True for the mean of the distances to the k nearest rows.
      squared: static; True for squared distances.
      normalize: static; ``"real"`` divides by the same summary of the distances of real rows to
        the other real rows, so that 1 means as close as real ones. None for no scale.
      trim: static share of the largest distances that is left out of each mean, in [0, 1).
      median: static; True for medians in place of means.
      per_point: static; True for the distances themselves, which :func:`bootstrap` resamples.
      chunk: static number of rows that are compared at once.

    Returns:
      :class:`Chamfer`, float32 or wider. Real rows that are all equal make a normalized one NaN
      or infinite.

    Raises:
      TypeError: an array that is not real floating, or an option of the wrong kind.
      ValueError: other shapes, fewer than ``k`` rows (``k + 1`` real ones if normalized), an
        option out of range, both ``trim`` and ``median``, either with ``per_point``; outside
        ``jit`` also NaN or inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real, fake = jnp.array([[0.0], [4.0]]), jnp.array([[1.0]])
      >>> print(*metrics.chamfer(real=real, fake=fake))
      1.0 2.0 3.0

    Source: the mean distance of nearest neighbors, a known technique; scale and summaries are
      derived here.

    Cost: two calls of :func:`nearest`, one more if normalized.
    """
    k, chunk = _check.count("k", k), _check.count("chunk", chunk)
    _check.choice("normalize", normalize, (None, "real"))
    _check.between("trim", trim, 0, 1)
    if median and trim:
        raise ValueError(f"trim must be 0 with median, got {trim}.")
    if per_point and (median or trim):
        raise ValueError("per_point must be False with trim or median, got True.")
    real, fake = _samples.checked(real=real, fake=fake, minimum=k)
    if normalize and real.shape[0] < k + 1:
        raise ValueError(f"real must have at least {k + 1} rows, got {real.shape[0]}.")

    def distances(x, y, **options):
        squares, _ = _nearest.squared_nearest(x, y, k=k, chunk=chunk, **options)
        values = squares if squared else _nearest.root(squares)
        return values.mean(axis=1) if mean_over_k else values[:, -1]

    summary = jnp.median if median else functools.partial(_trimmed_mean, trim=trim)
    fidelity, coverage = distances(fake, real), distances(real, fake)
    if not per_point:
        fidelity, coverage = summary(fidelity), summary(coverage)
    if normalize:
        scale = summary(distances(real, real, exclude_self=True))
        fidelity, coverage = fidelity / scale, coverage / scale
    return Chamfer(fidelity, coverage, None if per_point else fidelity + coverage)


def halves(key, x):
    """Returns two random halves of a sample, without a row in common.

    Any metric of one half as real and the other as fake is the baseline that a perfect model
    meets; compare it with the metric of as many fakes. An odd row is left out.

    Args:
      key: random key.
      x: ``[N, D]`` real floating.

    Returns:
      Two arrays ``[N // 2, D]`` in the dtype of ``x``.

    Raises:
      TypeError: ``x`` is not real floating.
      ValueError: another shape, or fewer than two rows; outside ``jit`` also NaN or inf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> first, second = metrics.halves(jax.random.key(0), jnp.arange(6.0).reshape(6, 1))
      >>> print(jnp.sort(jnp.concatenate([first, second]).ravel()))
      [0. 1. 2. 3. 4. 5.]

    Source: derived here.

    Cost: a random permutation of N numbers.
    """
    x = jnp.asarray(x)
    _samples.checked(x=x, minimum=2)
    order = jax.random.permutation(key, x.shape[0])
    size = x.shape[0] // 2
    return x[order[:size]], x[order[size : 2 * size]]


def _trimmed_mean(values, trim):
    """Returns the mean of all but the largest ones."""
    if not trim:
        return values.mean()
    num_left_out = int(trim * values.shape[0] + 1e-9)  # 0.29 * 100 is below 29
    kept = jnp.sort(values)[: values.shape[0] - num_left_out]
    return kept.mean() + _samples.poison(values)  # NaN sorts as the largest
