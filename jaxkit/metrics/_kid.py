"""The kernel distance: an unbiased squared maximum mean discrepancy."""

import functools

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.metrics import _samples


def kid(*, real, fake, num_blocks=None, chunk=1024):
    r"""Returns the unbiased squared discrepancy with the kernel :math:`(x \cdot y / D + 1)^3`.

    :math:`\frac{1}{N (N - 1)} \sum_{i \ne j} k(r_i, r_j) + \frac{1}{M (M - 1)} \sum_{i \ne j}
    k(f_i, f_j) - \frac{2}{N M} \sum_{i, j} k(r_i, f_j)`. Its mean is 0 for two samples of one
    distribution, whatever their sizes, so it may be negative. The kernel sees moments up to the
    third and depends on where the origin lies.

    Rows drawn with replacement would meet themselves, so :func:`bootstrap` fits no single value.
    Take ``num_blocks``: the mean over the blocks is an estimate, their standard deviation by
    :math:`\sqrt{B}` its standard error, and ``bootstrap`` may resample them.

    Args:
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.
      num_blocks: static number B of disjoint blocks of ``N // B`` and ``M // B`` rows, in the
        order given, which should be random; left-over rows do not count. None for all pairs.
      chunk: static number of rows that are compared at once.

    Returns:
      ``[]``, or ``[B]`` with ``num_blocks``, float32 or wider; lower is better.

    Raises:
      TypeError: an array that is not real floating, or a count that is not a whole number.
      ValueError: other shapes, or fewer than two rows (in a block); outside ``jit`` also NaN or
        inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real, fake = jnp.array([[0.0], [1.0]]), jnp.array([[1.0], [1.0]])
      >>> print(metrics.kid(real=real, fake=fake))
      0.0

    Source: arXiv:1801.01401, section 4.

    Cost: 2 (N + M) ** 2 D operations of a matrix product, a B-th of it in blocks; memory
      O(``chunk`` ** 2) beside the arrays.
    """
    chunk = _check.count("chunk", chunk)
    num_blocks = num_blocks if num_blocks is None else _check.count("num_blocks", num_blocks)
    real, fake = _samples.checked(real=real, fake=fake, minimum=2 * (num_blocks or 1))
    return _discrepancies(real, fake, num_blocks, chunk)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _discrepancies(real, fake, num_blocks, chunk):
    if num_blocks is None:
        return _discrepancy(chunk, (real, fake))

    def cut(x):
        rows = x.shape[0] // num_blocks
        return x[: rows * num_blocks].reshape(num_blocks, rows, -1)

    return jax.lax.map(functools.partial(_discrepancy, chunk), (cut(real), cut(fake)))


def _discrepancy(chunk, samples):
    def within(x):
        own = jnp.mean(_kernel(jnp.mean(jnp.square(x), axis=1)))
        return (x.shape[0] * _mean_kernel(x, x, chunk) - own) / (x.shape[0] - 1)

    real, fake = samples
    return within(real) + within(fake) - 2 * _mean_kernel(real, fake, chunk)


def _mean_kernel(x, y, chunk):
    """Returns the mean of the kernel over all pairs."""

    # Recomputed in the backward pass, which would store all pairs else.
    @jax.checkpoint
    def sum_of_pairs(rows, columns):
        product = jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)
        return jnp.sum(_kernel(product / x.shape[1]))

    # Rows of zeros, which fill the last block, add nothing.
    blocks = _samples.per_block(y, chunk)
    sums = jax.lax.map(
        lambda rows: jnp.sum(jax.lax.map(functools.partial(sum_of_pairs, rows), blocks)),
        _samples.per_block(x, chunk),
    )
    return jnp.sum(sums) / x.shape[0] / y.shape[0]  # their product may not fit an int32


def _kernel(product):
    """Returns the kernel less 1, which cancels in the discrepancy before it is rounded."""
    return product * (product * (product + 3) + 3)
