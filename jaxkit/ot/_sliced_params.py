"""The parameters of a potential that is a weighted sum of sliced potentials."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.ot._costs import squared
from jaxkit.ot._projections import linear


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["theta", "weights", "weights_g", "epsilon"],
    meta_fields=["project", "slice_cost"],
)
@dataclasses.dataclass(frozen=True)
class SlicedParams:
    """A potential as a weighted sum of 1-D potentials: L numbers for pairs of any size.

    The directions belong to it, since a weight belongs to a direction.

    Attributes:
      theta: directions ``[L, k]``, unit vectors.
      weights: ``[L]``, of the potential f.
      weights_g: ``[L]``, of the potential g, or None if g is to follow from f.
      epsilon: ``[]``, entropic strength of the potentials that it was made for, in units of the
        cost; 0 for exact transport.
      project: ``(points[n, d], theta[L, k]) -> [n, L]``, static.
      slice_cost: convex cost of two numbers, elementwise, static.
    """

    theta: jax.Array
    weights: jax.Array
    weights_g: jax.Array | None
    epsilon: jax.Array
    project: Callable
    slice_cost: Callable


def untrained(theta, epsilon, *, two_sided=False, slice_cost=squared, project=linear):
    r"""Returns the potential before any training: weight ``k / L`` for each of L directions.

    For squared Euclidean cost and the directions of :func:`tight_frame`, L a multiple of d, the
    two potentials :math:`\Phi w, \Psi w` are feasible for the dual problem, since
    :math:`\frac dL \sum_l \langle\theta_l, x - y\rangle^2 = |x - y|^2`. So
    :math:`\langle a, \Phi w\rangle + \langle b, \Psi w\rangle = d\, SW_2^2` is a lower bound of
    the exact transport cost, with no training. For other costs it is only a start; there
    :func:`fit_regression` with ``prior="scale"`` finds one number from data.

    Args:
      theta: directions ``[L, k]``, unit vectors, such as those of :func:`tight_frame`.
      epsilon: entropic strength, not negative, in units of the cost.
      two_sided: whether g gets weights too, static.
      slice_cost: convex cost of two numbers, such as :func:`squared`, static.
      project: ``(points[n, d], theta[L, k]) -> [n, L]``, static.

    Returns:
      :class:`SlicedParams` in the dtype of ``theta``.

    Raises:
      TypeError: ``project`` or ``slice_cost`` is not a function, or ``theta`` not real floating.
      ValueError: ``theta`` is not ``[L, k]`` with L at least 1, or ``epsilon`` is negative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
      >>> params = ot.untrained(ot.equispaced_frame(4), 0.0)
      >>> phi, psi = ot.sliced_potentials(x, x + 1, None, None, params.theta)
      >>> print(jnp.mean((phi + psi) @ params.weights).round(3))  # the exact cost is 2
      2.0

    Source: derived here; the bound is a known one of sliced distances.

    Cost: none.
    """
    _check.function("project", project)
    _check.function("slice_cost", slice_cost)
    dtype = jnp.result_type(theta)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"theta must be real floating, got {dtype}.")
    sizes = _check.shape("theta", theta, "L k")
    _check.count("the number of directions in theta", sizes["L"])
    _check.between("epsilon", epsilon, 0, float("inf"))
    weights = jnp.full(sizes["L"], sizes["k"] / sizes["L"], dtype)
    return SlicedParams(
        theta=jnp.asarray(theta),
        weights=weights,
        weights_g=weights if two_sided else None,
        epsilon=jnp.asarray(epsilon, dtype),
        project=project,
        slice_cost=slice_cost,
    )
