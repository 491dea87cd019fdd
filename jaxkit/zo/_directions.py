"""Random directions of zeroth-order estimates, as pure functions of a key."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics, _random
from jaxkit.zo import _node_noise
from jaxkit.zo._low_rank_sites import low_rank_loss


def no_basis(loss_fn, params, args):
    """The ``prepare`` of a direction that does not look at the model."""
    del loss_fn, params, args
    return ()


class Direction(NamedTuple):
    """How random directions are drawn: pure functions, all static.

    A direction is never stored. Whoever needs it draws it again from its key, leaf by leaf.

    Attributes:
      prepare: ``(loss_fn, params, args) -> basis``, a tree of arrays that ``draw`` reads, computed
        once per estimate; an empty tree for directions that do not look at the model.
      draw: ``(key, leaf_index, like, basis) -> u``, the part of one direction that belongs to leaf
        ``leaf_index`` of the parameters, in the shape of ``like``. The key is that leaf's own.
      estimate: as ``draw``, what the coefficients multiply in the gradient; None if that is ``u``.
      loss_at: ``loss_fn -> fun`` with ``fun(params, scale, key, basis, *args)`` the output of
        ``loss_fn`` at ``params + scale * u``, evaluated without forming that tree; or None. The
        key is the direction's: leaf ``i`` draws with ``fold_in(key, i)``.
      combine: ``(keys, coeffs, leaf_index, like, basis) -> sum_k coeffs[k] * draw(keys[k], ...)``
        in one piece, or None for a leaf where it has no better way than a loop; or None.
      mixing: what turns independent draws into directions: None, "sphere" or "orthogonal".
      alike: whether ``draw`` looks at key, shape and dtype alone, so that leaves of one shape may
        be drawn together.
    """

    prepare: Callable
    draw: Callable
    estimate: Callable | None = None
    loss_at: Callable | None = None
    combine: Callable | None = None
    mixing: str | None = None
    alike: bool = False


def normal(key, leaf_index, like, basis):
    """Draws independent standard normal numbers, in float32 or wider."""
    del leaf_index, basis
    return _random.normal(key, like.shape, _numerics.wide(like.dtype))


def signs(key, leaf_index, like, basis):
    """Draws independent signs, one random bit each, in float32 or wider."""
    del leaf_index, basis
    return _node_noise.rademacher(key, like)


def gaussian():
    r"""Returns independent standard normal directions.

    They are the numbers of ``jax.random.normal``, computed where they are added: even a leaf that
    fills half the memory needs no scratch for them with keys of the kind threefry2x32.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(jnp.sum, direction=zo.gaussian(), num_samples=4000)
      >>> print(run(jax.random.key(0), jnp.array([1.0, 2.0]))[1].round())
      [1. 1.]

    Source: arXiv:2305.17333, definition 1.

    Cost: one normal number per parameter and use.
    """
    return Direction(no_basis, normal, alike=True)


def rademacher():
    r"""Returns directions of independent signs, which are several times faster to draw.

    Of all directions with independent entries they have the least variance.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(lambda x: 3 * x, direction=zo.rademacher())
      >>> print(run(jax.random.key(0), jnp.array(1.0))[1].round(2))
      3.0

    Source: simultaneous perturbation stochastic approximation, the known technique.

    Cost: one random bit per parameter and use.
    """
    return Direction(no_basis, signs, alike=True)


def sphere():
    r"""Returns directions uniform on the sphere of radius :math:`\sqrt d`, d the parameters.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(lambda x: 3 * x, direction=zo.sphere(), mu=0.1)
      >>> print(run(jax.random.key(0), jnp.array(1.0))[1].round(2))
      3.0

    Source: randomized smoothing over a ball, the known technique.

    Cost: one more draw of each direction, for its norm.
    """
    return Direction(no_basis, normal, mixing="sphere", alike=True)


def orthogonal():
    r"""Returns K directions that are orthogonal to each other, each of norm :math:`\sqrt d`.

    They are the first K columns of a random orthogonal matrix, times :math:`\sqrt d`. K must not
    pass d, the number of parameters; at K = d the two-sided estimate of a quadratic is exact.
    Derived here: they are never formed. With Z the K independent draws and
    :math:`Z Z^\top = L L^\top`, the rows of :math:`L^{-1} Z` are orthonormal, so K numbers per
    direction say how it is mixed from the draws.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(jnp.sum, direction=zo.orthogonal(), num_samples=3, mu=0.1)
      >>> print(run(jax.random.key(0), jnp.ones(3))[1].round(2))
      [1. 1. 1.]

    Source: arXiv:2505.19720.

    Cost: K(K + 1) draws of a direction for the products of all pairs, and K for each evaluation.
    """
    return Direction(no_basis, normal, mixing="orthogonal", alike=True)


def low_rank(rank):
    r"""Returns directions of rank ``rank`` for matrices, and normal ones for other leaves.

    The direction of a leaf of shape ``[..., n]``, read as a matrix ``[m, n]``, is
    :math:`A B^\top / \sqrt{r}` with A ``[m, r]`` and B ``[n, r]`` standard normal. It has the same
    covariance as a normal one; only the fourth moment differs, by :math:`(2m + 2n + 2) / r`.
    Where a leaf is multiplied with data, the loss sees the two factors and no perturbed copy of
    the leaf is made; the update by K directions is one product of inner size K r.

    Args:
      rank: the rank r, static, at least 1.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Raises:
      TypeError: ``rank`` is not a whole number.
      ValueError: ``rank`` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(jnp.sum, direction=zo.low_rank(1), mu=0.1)
      >>> print(jnp.linalg.matrix_rank(run(jax.random.key(0), jnp.ones((4, 3)))[1]))
      1

    Source: arXiv:2511.16652; arXiv:2410.07698.

    Cost: (m + n) r normal numbers per matrix and use.
    """
    return _low_rank(_check.count("rank", rank))


def low_rank_factors(key, like, rank):
    """Returns A ``[..., r]`` and B ``[n, r]`` of a leaf ``[..., n]``; A has the root of r in it."""
    dtype = _numerics.wide(like.dtype)
    left_key, right_key = jax.random.split(key)
    left = _random.normal(left_key, (*like.shape[:-1], rank), dtype) / rank**0.5
    return left, _random.normal(right_key, (like.shape[-1], rank), dtype)


# Cached, so that two calls give equal directions, for which nothing compiles twice.
@functools.lru_cache
def _low_rank(rank):
    # Directions that perturb and directions that update must agree on every device.
    exact = jax.lax.Precision.HIGHEST

    def draw(key, leaf_index, like, basis):
        if like.ndim < 2:
            return normal(key, leaf_index, like, basis)
        left, right = low_rank_factors(key, like, rank)
        return jnp.tensordot(left, right, (-1, -1), precision=exact)

    def combine(keys, coeffs, leaf_index, like, basis):
        del leaf_index, basis
        if like.ndim < 2:
            return None
        left, right = jax.lax.map(lambda key: low_rank_factors(key, like, rank), keys)
        coeffs = coeffs.astype(left.dtype)
        return jnp.einsum("k,k...r,knr->...n", coeffs, left, right, precision=exact)

    def loss_at(loss_fn):
        return low_rank_loss(loss_fn, draw, lambda key, like: low_rank_factors(key, like, rank))

    return Direction(no_basis, draw, loss_at=loss_at, combine=combine)
