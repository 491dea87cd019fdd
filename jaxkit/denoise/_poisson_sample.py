"""Batches in which each example is included by a coin of its own."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check

PyTree = Any
# Folded into the key, so that the step's own key may be given: its children have small numbers.
_OWN = np.uint32(0x706F6973)


class Padded(NamedTuple):
    """Examples of which only those under the mask count, in arrays of a fixed size.

    Attributes:
      examples: tree of arrays with a leading axis of ``B`` rows.
      mask: which rows are examples, ``[B]`` bool.
    """

    examples: PyTree
    mask: jax.Array


def poisson_sample(key, examples, *, rate, max_size):
    r"""Returns a batch that holds each example independently with probability ``rate``.

    This is the sampling that the accounting of private training assumes; shuffled batches of a
    fixed size have other guarantees. The number of examples is random, the arrays are not: they
    have ``max_size`` rows, of which a mask says which count. The others hold examples too, which
    were not drawn: everything that takes a batch must leave them out, as
    :func:`private_gradient_estimator` does.

    If more than ``max_size`` examples are drawn, that many of them are kept, uniformly at random.
    With ``n`` examples this happens with probability :math:`\sum_{k > max\_size} \binom{n}{k}
    rate^k (1 - rate)^{n - k}`; add that, for each step, to the ``delta`` of the accounting.
    ``scipy.stats.binom.isf(1e-9, n, rate)`` is the smallest size for which it is at most 1e-9.

    Args:
      key: random key. The key of the estimator's step will do: the draws are independent.
      examples: tree of arrays with a leading axis of ``n`` examples.
      rate: probability of each example in (0, 1], static; rounded down to a multiple of
        ``2**-32``, since it must never be larger.
      max_size: number of rows, static, from 1 to ``n``; with ``n`` nothing is ever left out.

    Returns:
      :class:`Padded`, the drawn examples first.

    Raises:
      TypeError: ``rate`` is no number, or ``max_size`` no whole number.
      ValueError: one of them is out of range, or the examples have no common leading axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> batch = denoise.poisson_sample(jax.random.key(0), jnp.arange(8), rate=0.5, max_size=8)
      >>> print(batch.examples.shape, batch.mask.dtype)
      (8,) bool

    Source: arXiv:1607.00133, section 3.1. Derived here: one selection by rank draws and truncates.

    Cost: ``n`` words of the generator, the ``max_size`` smallest of them, and one gather.
    """
    size = _check.leading_axis("examples", examples)
    max_size = _check.count("max_size", max_size)
    if max_size > size:
        raise ValueError(f"max_size must be at most the {size} examples, got {max_size}.")
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise TypeError(f"rate must be a static number, got {rate!r}.")
    if not 2.0**-32 <= rate <= 1:
        raise ValueError(f"rate must be in [2**-32, 1], got {rate}.")
    last = np.uint32(math.floor(rate * 2**32) - 1)  # the largest word of an example that is drawn
    words = jax.random.bits(jax.random.fold_in(key, _OWN), (size,), jnp.uint32)
    # All that are drawn or, since these are exchangeable, a random choice of them. As float32, in
    # which it loses ties only, a selection by rank is a hundred times faster on a CPU.
    scores = jnp.where(words <= last, -words.astype(jnp.float32), -jnp.inf)
    best, rows = jax.lax.top_k(scores, max_size)
    return Padded(jax.tree.map(lambda x: jnp.asarray(x)[rows], examples), best > -jnp.inf)
