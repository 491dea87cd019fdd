"""How much of a perturbation the dtype of the parameters lets through."""

import warnings

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics, _tree
from jaxkit.zo import _replay
from jaxkit.zo._directions import gaussian
from jaxkit.zo._measure import check_params, direction_keys


def realised_cosine(key, params, mu=1e-3, *, minimum=0.9):
    r"""Returns the cosine between a normal direction and what rounding leaves of it.

    The losses see :math:`\theta + \mu u` and :math:`\theta - \mu u` rounded to the dtype of the
    parameters; their difference is the direction that was tried. In bfloat16 entries near 0.05
    hardly move at ``mu=1e-4``, while the update still follows ``u``. Called outside ``jit`` it
    warns below ``minimum``: raise ``mu``, or keep float32 parameters and cast in the loss.

    Args:
      key: typed random key.
      params: the parameters, a tree of real floating arrays.
      mu: radius of the perturbation, positive; may be traced.
      minimum: cosine below which it warns, static.

    Returns:
      The cosine over all entries, ``[]`` float32 or wider; NaN if nothing moves.

    Raises:
      TypeError: a leaf of ``params`` is not real floating, or ``mu`` no number.
      ValueError: ``params`` is an empty tree, or ``mu`` or ``minimum`` out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> params = jnp.full(1000, 0.05, jnp.bfloat16)
      >>> print(zo.realised_cosine(jax.random.key(0), params, 1e-2) > 0.999)
      True

    Source: derived here.

    Cost: one draw of each leaf.
    """
    _check.between("mu", mu, 0, float("inf"), closed=False)
    _check.between("minimum", minimum, -1, 1)
    params = check_params(params)
    keys = direction_keys(key, 1)

    def moved(tree, scale):
        return jax.tree.leaves(_replay.add(gaussian(), tree, keys, jnp.full(1, scale), ()))

    def wide(x):
        return x.astype(_numerics.wide(x.dtype))

    seen = [wide(p) - wide(m) for p, m in zip(moved(params, mu), moved(params, -mu), strict=True)]
    meant = moved(jax.tree.map(lambda x: _tree.zeros_like(x, wide(x).dtype), params), 1.0)
    dots = [
        (jnp.sum(s * u), jnp.sum(s * s), jnp.sum(u * u)) for s, u in zip(seen, meant, strict=True)
    ]
    dtype = _numerics.wide(*(d.dtype for row in dots for d in row))
    both, first, second = (
        sum(x.astype(dtype) for x in column) for column in zip(*dots, strict=True)
    )
    cosine = both / jnp.sqrt(first * second)
    if _is_below(cosine, minimum):
        warnings.warn(
            f"Of perturbations with mu={mu} rounding leaves a cosine of {cosine:.3f}, wanted "
            f"{minimum}.",
            stacklevel=2,
        )
    return cosine


def _is_below(cosine, minimum):
    try:
        return not cosine >= minimum
    except jax.errors.ConcretizationTypeError:  # inside a transformation, where nothing is known
        return False
