"""The Wasserstein distance of projections to lines."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check
from jaxkit.metrics import _samples


def sliced_wasserstein(key, *, real, fake, p=2.0, num_directions=128, chunk=16):
    r"""Returns the sliced Wasserstein distance :math:`(\frac1L \sum_l W_p^p(r_l, f_l))^{1/p}`.

    Each direction projects both samples to a line, where the distance is that of the quantile
    functions: exact for any sizes. Directions are uniform on the sphere, and orthogonal in groups
    of up to D, so their mean varies less than that of independent ones. The same key gives the
    same directions: use one for all samples that are compared.

    Args:
      key: random key, of the directions.
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.
      p: static power of the distance on the line, at least 1.
      num_directions: static number L of directions.
      chunk: static number of directions that are sorted at once.

    Returns:
      ``[]``, float32 or wider, in units of the features; lower is better.

    Raises:
      TypeError: an array that is not real floating, or an option that is not a number.
      ValueError: other shapes, no rows, or an option out of range; outside ``jit`` also NaN or
        inf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real, fake = jnp.array([[0.0], [3.0]]), jnp.array([[1.0], [2.0], [3.0]])
      >>> value = metrics.sliced_wasserstein(jax.random.key(0), real=real, fake=fake, p=1)
      >>> print(f"{value:.3f}")
      0.833

    Source: known technique, as in arXiv:2605.06797; orthogonal directions are derived here.

    Cost: L projections, 2 L (N + M) D operations, and sorts of N and of M numbers; memory
      O(``chunk`` (N + M)).
    """
    real, fake = _samples.checked(real=real, fake=fake)
    _check.between("p", p, 1, float("inf"))
    num_directions = _check.count("num_directions", num_directions)
    return _distance(key, real, fake, float(p), num_directions, _check.count("chunk", chunk))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _distance(key, real, fake, p, num_directions, chunk):
    rows, columns, widths = _coupling(real.shape[0], fake.shape[0])
    widths = jnp.asarray(widths, real.dtype)

    def power(direction):
        x, y = (
            jnp.sort(jnp.matmul(z, direction, precision=jax.lax.Precision.HIGHEST))
            for z in (real, fake)
        )
        gaps = jnp.abs(x[rows] - y[columns])
        return jnp.sum(widths * (jnp.square(gaps) if p == 2 else gaps**p))

    directions = _directions(key, num_directions, real.shape[1], real.dtype)
    powers = jax.lax.map(power, directions, batch_size=min(chunk, num_directions))
    mean = jnp.mean(powers)
    some = mean > 0  # the root has no derivative at 0
    return jnp.where(some, jnp.where(some, mean, 1) ** (1 / p), mean)


def _coupling(n, m):
    """Returns which quantiles of n and of m sorted numbers meet, and for which share."""
    # In units of 1 / lcm both have whole steps, so nothing is rounded.
    units = math.lcm(n, m)
    steps = np.arange(1, n + 1) * (units // n), np.arange(1, m + 1) * (units // m)
    ends = np.union1d(*steps)
    widths = np.diff(ends, prepend=0) / units
    return (*(np.searchsorted(step, ends).astype(np.int32) for step in steps), widths)


def _directions(key, num, dim, dtype):
    """Returns unit vectors ``[num, dim]``: rows of random orthogonal matrices."""
    per_basis = min(num, dim)
    bases = -(-num // per_basis)
    columns = jnp.linalg.qr(jax.random.normal(key, (bases, dim, per_basis), dtype))[0]
    # A distance does not change with the sign of a direction.
    return columns.swapaxes(1, 2).reshape(-1, dim)[:num]
