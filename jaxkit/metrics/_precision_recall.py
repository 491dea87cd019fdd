"""Improved precision and recall."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.metrics import _balls, _samples


class PrecisionRecall(NamedTuple):
    """Shares in [0, 1]; higher is better for both.

    Attributes:
      precision: ``[]``, the share of fakes in the ball of a real row; ``[M]`` of 0 and 1 per point.
      recall: ``[]``, the share of real rows in the ball of a fake; ``[N]`` of 0 and 1 per point.
    """

    precision: jax.Array
    recall: jax.Array


def precision_recall(*, real, fake, k=3, per_point=False, chunk=1024):
    """Returns the shares of fakes near the real, and of real rows near the fakes.

    Near a sample is what lies in the ball of one of its rows, whose radius is the distance to the
    k-th nearest other row of that sample. One outlier has a large ball; widely spread fakes reach
    a recall of 1, so read it together with :func:`density_coverage`.

    Args:
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.
      k: static number of neighbors.
      per_point: static; True for what the shares are means of, for :func:`bootstrap`.
      chunk: static number of rows that are compared at once.

    Returns:
      :class:`PrecisionRecall`, float32 or wider. Derivatives are zero.

    Raises:
      TypeError: an array that is not real floating, or a ``k`` or ``chunk`` that is not a whole
        number.
      ValueError: other shapes, or fewer than ``k + 1`` rows; outside ``jit`` also NaN or inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real, fake = jnp.array([[0.0], [1.0], [5.0]]), jnp.array([[0.5], [0.6]])
      >>> print(*metrics.precision_recall(real=real, fake=fake, k=1))
      1.0 0.0

    Source: arXiv:1904.06991.

    Cost: 2 (N + M) ** 2 D operations of matrix products; memory O(``chunk`` ** 2)
      beside the arrays.
    """
    k, chunk = _check.count("k", k), _check.count("chunk", chunk)
    real, fake = _samples.checked(real=real, fake=fake, minimum=k + 1)
    _, around_fake = _balls.counts(real, fake, k=k, chunk=chunk)
    _, around_real = _balls.counts(fake, real, k=k, chunk=chunk)
    values = PrecisionRecall(jnp.minimum(around_fake, 1), jnp.minimum(around_real, 1))
    return values if per_point else jax.tree.map(jnp.mean, values)
