"""Directions with the geometry of the inputs of each layer."""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics, _tree
from jaxkit.zo import _directions, _tap, _tap_layout, _tap_plan


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["perturb", "estimate"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class Factors:
    """What multiplies the normal draw of a leaf: ``[s, n, n]`` to perturb, and to estimate."""

    perturb: jax.Array
    estimate: Any
    layout: _tap_layout.Layout


def activation(kappa, *, center=None, corrected=False, floor=1e-3, keep_mean=False):
    r"""Returns directions :math:`C^\kappa Z` with C the covariance of the inputs of each layer.

    A leaf W that multiplies inputs x, of length n, gets :math:`U = C^\kappa Z` with Z normal,
    scaled so that :math:`\mathrm{tr}\, C^{2\kappa} = n`. With G the gradient the estimate has mean
    :math:`C^{2\kappa} G`: for ``kappa`` > 0 it favors what the inputs vary in, and sees far more
    of the gradient in one call; ``inf`` keeps the leading eigenvector alone. With ``corrected``
    the directions in the gradient are :math:`C^{-2\kappa} U`, and the estimate is unbiased in all
    that C reaches; its variance is then least at ``kappa = -0.25``. Leaves without a dense or
    convolution site get normal directions, biases among them. The basis is computed once per
    estimate. Powers 0.5, and -0.25 with ``corrected``, train best of the family; which of them is
    ahead depends on the problem and on the number of steps.

    On a CPU with jax 0.10.2 eight vmapped runs of a scan over these estimates have hung, as
    decompositions do there; run them one after the other with ``jax.lax.map``.

    Args:
      kappa: power of the covariance, a Python number, static; 0.5 with ``floor=0`` and without
        ``corrected`` needs no eigenvectors.
      center: whether C is about the mean of the inputs, static; None for ``kappa > 0``. Not
        centered, C is ruled by the mean, and with a positive power the layers learn little but a
        bias. Centered, C does not reach along the mean.
      corrected: whether the estimate is corrected to be unbiased, static.
      floor: eigenvalues of C below this share of the largest are left out, with the part of the
        gradient along them; a Python number in [0, 1), static. Below zero powers it must not be
        too small, else perturbations go where the inputs hardly are.
      keep_mean: whether the direction of the mean is added to a centered C, with an eigenvalue as
        large as the average one, static.

    Returns:
      A :class:`~jaxkit.zo.Direction`.

    Raises:
      TypeError: ``kappa`` or ``floor`` is no Python number.
      ValueError: ``kappa`` is NaN or -inf, or infinite with ``corrected``; ``floor`` not in [0, 1);
        ``keep_mean`` where C is not centered. When called: as :func:`tap`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> def loss_fn(w, x):
      ...     return jnp.sum(x @ w)
      >>> x = jnp.array([[1.0, 2.0], [-1.0, -2.0]])
      >>> run = zo.value_and_zo_grad(loss_fn, direction=zo.activation(jnp.inf))
      >>> grad = run(jax.random.key(0), jnp.ones((2, 1)), x)[1]
      >>> print(jnp.allclose(grad[1], 2 * grad[0], atol=1e-2))
      True

    Source: arXiv:2601.17261 for infinite ``kappa``, arXiv:2312.04709 for 0.5. Derived here: the
    family, centering and the correction.

    Cost: one call of :func:`tap` per estimate, and per covered leaf one eigendecomposition or
    Cholesky factor of an n x n matrix, n² numbers of memory (twice with ``corrected``), and a
    product with that matrix per draw.
    """
    for name, value in {"kappa": kappa, "floor": floor}.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a Python number, got {value!r}.")
    if math.isnan(kappa) or kappa == -math.inf or (corrected and math.isinf(kappa)):
        want = "finite with corrected=True" if corrected else "a number above -inf"
        raise ValueError(f"kappa must be {want}, got {kappa}.")
    _check.between("floor", floor, 0, 1)
    center = kappa > 0 if center is None else bool(center)
    if keep_mean and not center:
        raise ValueError("keep_mean=True needs a centered covariance, got center=False.")
    return _activation(float(kappa), center, bool(corrected), float(floor), bool(keep_mean))


# Cached, so that two calls give equal directions, for which nothing compiles twice.
@functools.lru_cache
def _activation(kappa, center, corrected, floor, keep_mean):
    exact = jax.lax.Precision.HIGHEST

    def prepare(loss_fn, params, args):
        plan = _tap_plan.plan(loss_fn, params, args)
        layouts = plan.layouts()
        _, moments = _tap.capture(plan, params, args)

        def factors(leaf, found):
            matrix = _matrix(found, center, keep_mean)
            perturb, estimate = _powers(matrix, kappa, corrected, floor)
            return Factors(perturb, estimate, layouts[leaf])

        return {leaf: factors(leaf, found) for leaf, found in moments.items()}

    def shaped(normal, factor, layout):
        z = _tap_layout.to_matrices(normal, layout)
        u = jnp.einsum("sij,sjm->sim", factor.astype(z.dtype), z, precision=exact)
        return _tap_layout.from_matrices(u, layout, normal.shape)

    def drawer(which):
        def draw(key, leaf_index, like, basis):
            z = _directions.normal(key, leaf_index, like, basis)
            if leaf_index not in basis:
                return z
            return shaped(z, getattr(basis[leaf_index], which), basis[leaf_index].layout)

        return draw

    def combine(keys, coeffs, leaf_index, like, basis):
        if leaf_index not in basis:
            return None

        def add(total, pair):
            key, coeff = pair
            z = _directions.normal(key, leaf_index, like, basis)
            return total + coeff.astype(total.dtype) * z, None

        zeros = _tree.zeros_like(like, _numerics.wide(like.dtype))
        total, _ = jax.lax.scan(add, zeros, (keys, coeffs))
        return shaped(total, basis[leaf_index].perturb, basis[leaf_index].layout)

    estimate = drawer("estimate") if corrected else None
    return _directions.Direction(prepare, drawer("perturb"), estimate, combine=combine)


def _matrix(moments, center, keep_mean):
    """Returns C, ``[s, n, n]``, with eigenvalues of mean one."""
    covariance, mean = moments.covariance, moments.mean
    n = mean.shape[-1]
    outer = mean[:, :, None] * mean[:, None, :]
    if not center:
        covariance += outer
    average = jnp.trace(covariance, axis1=1, axis2=2) / n
    # Inputs that never vary have no geometry.
    eye = jnp.eye(n, dtype=mean.dtype)[None]
    varies = (average > 0)[:, None, None]
    covariance = jnp.where(varies, covariance / jnp.where(varies, average[:, None, None], 1), eye)
    if keep_mean:
        length = jnp.sum(mean * mean, -1)
        covariance += outer / jnp.where(length > 0, length, 1)[:, None, None]
    return covariance


def _powers(matrix, kappa, corrected, floor):
    """Returns P with ``P P' = c matrix^(2 kappa)`` and trace n, and the inverse of P' or None."""
    n, eps = matrix.shape[-1], jnp.finfo(matrix.dtype).eps
    if kappa == 0.5 and floor == 0 and not corrected:
        matrix /= (jnp.trace(matrix, axis1=1, axis2=2) / n)[:, None, None]
        return jnp.linalg.cholesky(
            matrix + 2 * n * eps * jnp.eye(n, dtype=matrix.dtype)[None]
        ), None
    values, vectors = jnp.linalg.eigh(matrix)
    values /= values[:, -1:]
    kept = values > max(floor, n * eps)
    powers = jnp.where(kept, jnp.where(kept, values, 1) ** kappa, 0)
    powers *= jnp.sqrt(n / jnp.sum(powers * powers, -1, keepdims=True))

    def rebuilt(x):
        scaled = vectors * x[:, None, :]
        return jnp.einsum("sij,skj->sik", scaled, vectors, precision=jax.lax.Precision.HIGHEST)

    inverse = jnp.where(kept, 1 / jnp.where(kept, powers, 1), 0)
    return rebuilt(powers), rebuilt(inverse) if corrected else None
