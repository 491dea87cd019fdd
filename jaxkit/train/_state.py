"""The state of training, and how it starts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkit import _check, _estimator, _tree


class TrainState(NamedTuple):
    """Everything that training changes, as one tree of arrays.

    Attributes:
      step: number of updates done, ``[]`` int32.
      params: parameters, a tree of floating arrays.
      opt_state: state of the optimizer.
      key: ``[]`` typed random key; a step uses ``fold_in(key, step)``, so it never changes.
      model_state: what the model carries from step to step beside its parameters (batch
        statistics, counters of random streams), or None.
      ema_params: average of the parameters, same tree and shapes, float32 or wider, or None.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    key: jax.Array
    model_state: Any = None
    ema_params: optax.Params | None = None


def create(params, tx, key, *, model_state=None):
    """Returns the state at step 0.

    The state may be donated, as :func:`~jaxkit.train.fit` does: it shares no buffer with the
    arguments, and no two of its leaves share one. If the parameters live on a mesh, or on a device
    that was chosen for them, all other leaves are put there too, on a mesh replicated unless the
    optimizer placed them.

    Args:
      params: parameters, a tree of real floating arrays or numbers.
      tx: optax transformation, or ``optax.MultiSteps``.
      key: ``[]`` typed random key, from ``jax.random.key``.
      model_state: tree of arrays that the model carries beside its parameters, or None. If
        given, the loss function gets :class:`~jaxkit.train.Stateful` as its batch and returns
        the new model state as ``aux["model_state"]``.

    Returns:
      :class:`~jaxkit.train.TrainState` without weak types.

    Raises:
      TypeError: ``key`` is not a typed key, ``tx`` no transformation, a leaf of ``params`` is not
        real floating, or a leaf of ``model_state`` or of the optimizer's state is not an array.
      ValueError: ``key`` is not one key, or ``params`` lie on more than one mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import train
      >>> state = train.create({"w": jnp.ones(3)}, optax.adam(1e-3), jax.random.key(0))
      >>> print(state.step, state.params["w"])
      0 [1. 1. 1.]

    Source: derived here.

    Cost: one copy of params, key and model state, and the init of ``tx``.
    """
    _check_key(key)
    _check.transformation("tx", tx)
    _estimator.check_params(params)
    _check.arrays("model_state", model_state)
    # The arguments stay with the caller: their buffers count as taken from the start.
    taken = set().union(*map(_buffers, jax.tree.leaves((params, key, model_state))))
    # On a CPU an array can share the memory of a NumPy array, which the caller may change.
    params, model_state = jax.tree.map(
        lambda x: jnp.array(x, jnp.result_type(x), copy=not isinstance(x, jax.Array)),
        (params, model_state),
    )
    opt_state = tx.init(params)
    _check.arrays("opt_state", opt_state)

    mesh, device = _mesh_of(params), _device_of(params)

    def own(x):
        x = jnp.array(x, jnp.result_type(x), copy=not isinstance(x, jax.Array))
        if mesh is not None and not _is_on(x, mesh):
            x = _replicate(x, mesh)
        elif device is not None and _sharding(x) is not None:
            x = jax.device_put(x, device)
        # A traced array is copied too: under vmap it stands for one of the caller's.
        if _sharding(x) is None or _buffers(x) & taken:
            x = jnp.array(x, copy=True)
        taken.update(_buffers(x))
        return x

    state = TrainState(jnp.zeros([], jnp.int32), params, opt_state, key, model_state)
    return jax.tree.map(own, state)


def placements(state):
    """Returns the sharding of each leaf on a mesh with automatic axes only, else None: static."""
    return tuple(_placement(x) for x in jax.tree.leaves(state))


def keep_placements(state, shardings):
    """Holds the leaves of a traced ``state`` to ``shardings``.

    Left alone, the compiler picks the sharding of each result. Where it is not that of the
    argument, the next call with the result compiles again.
    """
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(
        x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    )


def _replicate(x, mesh):
    """Returns ``x`` on all devices of ``mesh``, which may be those of several processes."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    # device_put takes no typed key to the devices of other processes, and where a process has one
    # device it makes of an array there what cannot be read.
    data = jax.random.key_data(x) if is_key else x
    if jax.process_count() > 1:
        data = np.asarray(data)
    data = jax.device_put(data, NamedSharding(mesh, PartitionSpec()))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if is_key else data


def _check_key(key):
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(f"key must be a typed key, as from jax.random.key(0), got {got}.")
    _check.shape("key", key, "")


def _mesh_of(params):
    """Returns the only mesh among the leaves of ``params``, or None."""
    found = {}
    for path, leaf in _tree.leaves_with_paths(params):
        sharding = _sharding(leaf)
        if isinstance(sharding, NamedSharding):
            found.setdefault(sharding.mesh, path)
    if len(found) > 1:
        places = " and ".join(f"{mesh} at {path}" for mesh, path in found.items())
        raise ValueError(f"params must lie on one mesh, got {places}.")
    return next(iter(found), None)


def _device_of(params):
    """Returns the only device that leaves of ``params`` are committed to, or None."""
    found = set()
    for leaf in jax.tree.leaves(params):
        if _sharding(leaf) is not None and leaf.committed:
            found |= leaf.devices()
    return found.pop() if len(found) == 1 else None


def _is_on(x, mesh):
    sharding = _sharding(x)
    return sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh == mesh)


def _placement(x):
    sharding = _sharding(x)
    if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_types) == {AxisType.Auto}:
        # As compiled programs return it. A spec that ends in None is another static argument.
        spec = list(sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    return None


def _sharding(x):
    """Returns the sharding of a JAX array that has devices (a traced one has none), else None."""
    return getattr(x, "sharding", None)


def _buffers(x):
    """Returns what tells the memory of ``x`` on this machine from that of other arrays."""
    if _sharding(x) is None:
        return set()
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards}
