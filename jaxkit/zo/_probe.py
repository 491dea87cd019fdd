"""A zeroth-order gradient as keys and scalars, and what is made of it by drawing again."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkit import _check, _tree
from jaxkit.zo import _replay
from jaxkit.zo._directions import Direction, gaussian
from jaxkit.zo._measure import Options, check_params, measure


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "coeffs", "value", "basis"],
    meta_fields=["direction"],
)
@dataclasses.dataclass(frozen=True)
class ZOProbe:
    """A zeroth-order gradient estimate that is not formed: a key and a scalar per direction.

    The estimate is ``sum_k coeffs[k] * z_k`` with ``z_k`` drawn from ``keys[k]``.

    Attributes:
      keys: typed keys of the K draws, ``[K]``.
      coeffs: ``[K]`` float32 or wider.
      value: the loss, ``[]`` float32 or wider, as of :func:`value_and_zo_grad`.
      basis: what the direction computed once from the model, a tree of arrays; mostly empty.
      direction: the :class:`~jaxkit.zo.Direction`, static.
    """

    keys: jax.Array
    coeffs: jax.Array
    value: jax.Array
    basis: Any
    direction: Direction


def probe(
    loss_fn,
    *,
    has_aux=False,
    num_samples=1,
    mu=1e-3,
    direction=gaussian(),  # noqa: B008
    mode="two_sided",
    aggregate="mean",
    matched=True,
    batch="map",
    per_example=False,
    skip_nonfinite=False,
    axis_name=None,
    axis_directions="same",
):
    """Returns the function that measures a zeroth-order gradient and keeps it as scalars.

    What comes back weighs a few bytes however large the model is. :func:`materialize` makes a
    gradient of it, :func:`apply_probe` a step. Both draw the directions again from the keys.
    The options are those of :func:`value_and_zo_grad`, which explains them, without mode
    "coordinate": that has as many scalars as the gradient.

    Args:
      loss_fn: as of :func:`value_and_zo_grad`.
      has_aux: whether ``loss_fn`` returns ``aux`` too, static.
      num_samples: number of directions, static.
      mu: radius of the perturbation.
      direction: kind of the directions; not :func:`node`.
      mode: "two_sided", "one_sided" or "jvp".
      aggregate: "mean", "project" or "rloo".
      matched: whether both calls of a pair get the same data.
      batch: "map" or "vmap".
      per_example: whether the loss is ``[B]``, one for each example.
      skip_nonfinite: whether a slope that is not finite counts as zero.
      axis_name: axes of devices inside ``jax.shard_map``, or None.
      axis_directions: whether all devices try the "same" directions, or each its "own".

    Returns:
      Function ``(key, params, *args, args_minus=None, oracle_key=None)`` that returns a
      :class:`ZOProbe`, or with ``has_aux`` the pair ``(probe, aux)``.

    Raises:
      TypeError, ValueError: as :func:`value_and_zo_grad`; and TypeError for ``zo.node()``, whose
        estimate is no sum of directions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> params = jnp.array([1.0, 2.0])
      >>> probe = zo.probe(jnp.sum, num_samples=3)(jax.random.key(0), params)
      >>> print(probe.value.round(2), probe.coeffs.shape, zo.materialize(probe, params).shape)
      3.0 (3,) (2,)

    Source: arXiv:2305.17333, section 2.

    Cost: as :func:`value_and_zo_grad`, without the sum of directions at its end.
    """
    options = Options(
        has_aux,
        num_samples,
        mu,
        direction,
        mode,
        aggregate,
        matched,
        batch,
        per_example,
        skip_nonfinite,
        axis_name,
        axis_directions,
    )
    run = measure(loss_fn, options)

    def measured(key, params, *args, args_minus=None, oracle_key=None):
        m = run(key, params, args, args_minus, oracle_key)
        out = ZOProbe(m.keys, m.coeffs, m.value, m.basis, direction)
        return (out, m.aux) if has_aux else out

    return measured


def materialize(probe, params):
    """Returns the gradient estimate that a probe stands for, as a tree for any optimizer.

    Args:
      probe: a :class:`ZOProbe`.
      params: the parameters, or a tree with their shapes, dtypes and shardings; the values do not
        matter.

    Returns:
      ``sum_k coeffs[k] * z_k``, a tree with the shapes, dtypes and shardings of ``params``, summed
      in float32 or wider.

    Raises:
      TypeError: ``probe`` is no probe, or a leaf of ``params`` is not real floating.
      ValueError: ``params`` is an empty tree.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> params = jnp.array([1.0, 2.0])
      >>> run = zo.probe(jnp.sum, num_samples=2, direction=zo.orthogonal(), mu=0.1)
      >>> print(zo.materialize(run(jax.random.key(0), params), params).round(2))
      [1. 1.]

    Source: arXiv:2305.17333, algorithm 1.

    Cost: K draws of each leaf; memory of the gradient and of the draw of one leaf.
    """
    _check_probe(probe)
    zeros = _tree.zeros_like(check_params(params))
    draw = probe.direction.estimate
    return _replay.add(probe.direction, zeros, probe.keys, probe.coeffs, probe.basis, draw=draw)


def apply_probe(params, probe, learning_rate, *, rounding="nearest"):
    """Returns ``params - learning_rate * materialize(probe, params)`` without the gradient tree.

    Each entry is computed in float32 or wider and rounded once, so there is no drift as of adding
    and taking away a perturbation in place. In bfloat16 small steps are still lost to rounding to
    the nearest number: round stochastically, or keep float32 parameters and cast in the loss.

    Args:
      params: the parameters, a tree of real floating arrays.
      probe: a :class:`ZOProbe`.
      learning_rate: a number, which may be traced.
      rounding: "nearest", or "stochastic" for one of the two neighbors so that the mean is exact;
        static. The draws come from the keys of the probe.

    Returns:
      The new parameters, with the tree, shapes, dtypes and shardings of ``params``.

    Raises:
      TypeError: ``probe`` is no probe, ``learning_rate`` no number, or a leaf of ``params`` is not
        real floating.
      ValueError: ``params`` is an empty tree, or ``rounding`` unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> params = jnp.array([1.0, 2.0])
      >>> run = zo.probe(jnp.sum, num_samples=2, direction=zo.orthogonal(), mu=0.1)
      >>> print(zo.apply_probe(params, run(jax.random.key(0), params), 0.5).round(2))
      [0.5 1.5]

    Source: arXiv:2305.17333, algorithm 1. Derived here: the rounding.

    Cost: K draws of each leaf, added in place if ``params`` is donated; memory of the draw of one
    leaf.
    """
    _check_probe(probe)
    _check.between("learning_rate", learning_rate, -float("inf"), float("inf"))
    _check.choice("rounding", rounding, ("nearest", "stochastic"))
    params = check_params(params)
    coeffs = -jnp.asarray(learning_rate, probe.coeffs.dtype) * probe.coeffs
    draw = probe.direction.estimate
    return _replay.add(
        probe.direction, params, probe.keys, coeffs, probe.basis, draw=draw, rounding=rounding
    )


def _check_probe(probe):
    if not isinstance(probe, ZOProbe):
        raise TypeError(f"probe must be a ZOProbe, got {type(probe).__name__}.")
