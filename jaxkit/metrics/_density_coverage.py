"""Density and coverage."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.metrics import _balls, _samples


class DensityCoverage(NamedTuple):
    """Density, about 1 for a perfect model, and coverage in [0, 1]; higher is better.

    Attributes:
      density: ``[]``, the mean number of real balls around a fake, by k; ``[M]`` per point.
      coverage: ``[]``, the share of real balls with a fake in them; ``[N]`` of 0 and 1 per point.
    """

    density: jax.Array
    coverage: jax.Array


def density_coverage(*, real, fake, k=5, per_point=False, chunk=1024):
    """Returns how many real balls surround a fake, and the share of them that hold one.

    The ball of a real row reaches to its k-th nearest other real row. Fakes have no balls, so
    outliers among them do no harm; many fakes in few dense places have a density above 1.

    Args:
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.
      k: static number of neighbors.
      per_point: static; True for what both are means of, for :func:`bootstrap`.
      chunk: static number of rows that are compared at once.

    Returns:
      :class:`DensityCoverage`, float32 or wider. Derivatives are zero.

    Raises:
      TypeError: an array that is not real floating, or a ``k`` or ``chunk`` that is not a whole
        number.
      ValueError: other shapes, no fake, or fewer than ``k + 1`` real rows; outside ``jit`` also
        NaN or inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real, fake = jnp.array([[0.0], [1.0], [5.0]]), jnp.array([[0.5], [0.6]])
      >>> print(*metrics.density_coverage(real=real, fake=fake, k=1))
      2.0 0.6666667

    Source: arXiv:2002.09797, equations 4 and 5. Differs: a distance that equals the radius counts.

    Cost: 2 N (N + M) D operations of matrix products; memory O(``chunk`` ** 2) beside the
      arrays.
    """
    k, chunk = _check.count("k", k), _check.count("chunk", chunk)
    real, fake = _samples.checked(real=real, fake=fake)
    if real.shape[0] < k + 1:
        raise ValueError(f"real must have at least {k + 1} rows, got {real.shape[0]}.")
    inside, around = _balls.counts(real, fake, k=k, chunk=chunk)
    values = DensityCoverage(around / k, jnp.minimum(inside, 1))
    return values if per_point else jax.tree.map(jnp.mean, values)
