"""Training steps from forward passes alone, in the memory of inference."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import _check
from jaxkit.zo._directions import gaussian
from jaxkit.zo._measure import Options, check_key, measure
from jaxkit.zo._probe import ZOProbe, apply_probe


class ZOState(NamedTuple):
    """State of :func:`zo_update`: the last T probes of K directions each, as keys and scalars.

    Attributes:
      step: number of updates, ``[]`` int32.
      keys: typed keys of the draws, newest probe first, ``[T, K]``.
      coeffs: their coefficients, zero for probes that were not yet, ``[T, K]`` float32.
    """

    step: jax.Array
    keys: jax.Array
    coeffs: jax.Array


class ZOInfo(NamedTuple):
    """What to plot of a step of :func:`zo_update`.

    Attributes:
      value: the loss, ``[]`` float32, as of :func:`value_and_zo_grad`.
      slopes: derivative of the loss along each direction, ``[K]`` float32; for directions of
        covariance one the root of their mean square is the norm of the gradient.
      num_skipped: directions left out since their slope was not finite, ``[]`` int32.
      aux: what ``loss_fn`` returned beside the loss in its first call, else None.
    """

    value: jax.Array
    slopes: jax.Array
    num_skipped: jax.Array
    aux: Any


def zo_init(key, *, num_samples=1, num_probes=1):
    """Returns the state with which :func:`zo_update` starts.

    Args:
      key: typed key; only its kind matters, that of the keys of the updates.
      num_samples: number K of directions per step, over all devices together, static.
      num_probes: number T of probes that momentum remembers, static; 1 without momentum.

    Returns:
      A :class:`ZOState`.

    Raises:
      TypeError: ``key`` is no typed key, or a number is not whole.
      ValueError: a number is below 1.

    Example:
      >>> import jax
      >>> from jaxkit import zo
      >>> print(zo.zo_init(jax.random.key(0), num_samples=4, num_probes=10).coeffs.shape)
      (10, 4)

    Source: derived here.

    Cost: T K keys and scalars.
    """
    shape = _check.count("num_probes", num_probes), _check.count("num_samples", num_samples)
    keys = jnp.broadcast_to(check_key(key), shape)
    return ZOState(jnp.zeros([], jnp.int32), keys, jnp.zeros(shape, jnp.float32))


def zo_update(
    key,
    loss_fn,
    params,
    state,
    *args,
    learning_rate,
    momentum=None,
    rounding="nearest",
    has_aux=False,
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
    args_minus=None,
    oracle_key=None,
):
    r"""Returns parameters, state and information after one step from evaluations of the loss.

    A step of size ``learning_rate`` against the estimate of :func:`value_and_zo_grad`, or against
    :math:`m_t = \sum_{i<T} b^i \hat g_{t-i}` with the momentum b over the last T probes, drawn
    again from the state's keys. No gradient is formed. Donate ``params`` and ``state``:
    ``jax.jit(..., donate_argnums=...)``; then the step takes the memory of inference and one
    perturbed copy of the parameters. The options from ``has_aux`` on are those of
    :func:`probe`.

    Args:
      key: typed random key, another one for each step.
      loss_fn: as of :func:`value_and_zo_grad`.
      params: the parameters, a tree of real floating arrays.
      state: a :class:`ZOState`, of :func:`zo_init` at first. It says how many directions there
        are and how many probes momentum remembers.
      *args: further arguments of ``loss_fn``.
      learning_rate: a number, which may be traced, or a schedule of ``state.step``.
      momentum: decay b of the probes, a number that may be traced; None for no momentum, with a
        state of one probe. It needs a direction without a basis.
      rounding: as of :func:`apply_probe`.
      has_aux: whether ``loss_fn`` returns ``aux`` too, static.
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
      args_minus: the second call's data with ``matched=False``.
      oracle_key: from which each call gets a key with ``matched=False``.

    Returns:
      The tuple ``(params, state, info)``: new parameters of the same types, the new
      :class:`ZOState`, and a :class:`ZOInfo`.

    Raises:
      TypeError, ValueError: as :func:`value_and_zo_grad`; and if ``state`` is no state, holds
        another number of directions than the devices can share, or ``momentum`` and the number of
        its probes do not go together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> key, params = jax.random.key(0), jnp.array([1.0, 2.0])
      >>> state = zo.zo_init(key, num_samples=2)
      >>> loss_fn = lambda x: jnp.sum(x**2) / 2
      >>> params, state, info = zo.zo_update(key, loss_fn, params, state, learning_rate=1.0,
      ...                                    direction=zo.orthogonal(), mu=0.1)
      >>> print(params.round(2) + 0.0, info.value > 2.5, state.step)
      [0. 0.] True 1

    Source: arXiv:2305.17333, algorithm 1. Derived here: momentum by drawing again.

    Cost: the calls of :func:`value_and_zo_grad`, and T K draws of each leaf.
    """
    if not isinstance(state, ZOState):
        raise TypeError(f"state must be a ZOState, got {type(state).__name__}.")
    if state.keys.dtype != check_key(key).dtype:
        raise TypeError(
            f"state must hold keys of the kind of key, {key.dtype}, got {state.keys.dtype}."
        )
    num_probes, total = state.coeffs.shape
    num_devices = jax.lax.axis_size(axis_name) if axis_directions == "own" and axis_name else 1
    if total % num_devices:
        raise ValueError(
            f"state must hold a number of directions that divides by the {num_devices} devices, "
            f"got {total}."
        )
    if (momentum is None) != (num_probes == 1):
        raise ValueError(
            "momentum needs a state of several probes, and None one of one probe, "
            f"got momentum={momentum} and {num_probes}."
        )
    options = Options(
        has_aux,
        total // num_devices,
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
    m = measure(loss_fn, options)(key, params, args, args_minus, oracle_key)
    keys = jnp.concatenate([m.keys[None], state.keys[:-1]])
    coeffs = jnp.concatenate([m.coeffs[None].astype(state.coeffs.dtype), state.coeffs[:-1]])
    weights = coeffs
    if momentum is not None:
        if jax.tree.leaves(m.basis):
            raise ValueError(
                "momentum needs a direction without a basis, got one that looks at the model."
            )
        _check.between("momentum", momentum, 0, 1)
        decay = jnp.asarray(momentum, coeffs.dtype) ** np.arange(num_probes, dtype=np.float32)
        weights = decay[:, None] * coeffs
    rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
    whole = ZOProbe(keys.reshape(-1), weights.reshape(-1), m.value, m.basis, direction)
    params = apply_probe(params, whole, rate, rounding=rounding)
    info = ZOInfo(m.value, m.slopes, m.num_skipped, m.aux)
    return params, ZOState(optax.safe_increment(state.step), keys, coeffs), info
