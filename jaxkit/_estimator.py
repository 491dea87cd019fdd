"""The joint between gradient estimators and optimizers: what every topic needs of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics, _tree

PyTree = Any


class Estimate(NamedTuple):
    """What a gradient estimator ``(key, params, opt_state, batch) -> Estimate`` returns.

    Attributes:
      value: the loss where the gradient was taken, ``[]`` float32.
      grads: gradient, same tree, shapes and dtypes as the parameters.
      aux: what the loss function returned beside the loss, else None.
      extras: keyword arguments for ``tx.update``, a dict of trees of floating arrays.
    """

    value: jax.Array
    grads: PyTree
    aux: Any
    extras: dict[str, PyTree]


class Stateful(NamedTuple):
    """The batch that a loss function gets when the model carries a state.

    The loss function returns the new model state as ``aux["model_state"]``.

    Attributes:
      model_state: ``TrainState.model_state``, a tree of arrays.
      batch: the batch itself, a tree of arrays with a leading axis of examples.
    """

    model_state: PyTree
    batch: PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tombstone:
    """A leafless tree in place of the states of ``kind`` that an outer estimator uses.

    ``kind`` None hides states of every kind.
    """

    kind: type | None = None

    def hides(self, kind):
        """Says whether a state of ``kind`` may be hidden here."""
        return self.kind is None or issubclass(self.kind, kind)


def check_inner(outer, inner):
    """Checks that the estimator called ``outer`` may wrap ``inner``."""
    _check.function("inner", inner)
    if getattr(inner, "is_private", False):
        # Clipping and noise are made for one release a step, of all that was asked.
        raise ValueError(f"inner of {outer} must not be private, got a private estimator.")


def find_states(opt_state, kind):
    """Returns all states of type ``kind`` in ``opt_state``, at least one, in tree order."""

    def is_found(x):
        return isinstance(x, (kind, Tombstone))

    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_found) if is_found(x)]
    if any(isinstance(x, Tombstone) and x.hides(kind) for x in found):
        raise ValueError(f"{kind.__name__} is already used by an outer estimator.")
    states = [x for x in found if isinstance(x, kind)]
    if not states:
        raise ValueError(f"opt_state must hold a {kind.__name__}, got none.")
    return states


def find_state(opt_state, kind):
    """Returns the only state of type ``kind`` in ``opt_state``."""
    states = find_states(opt_state, kind)
    if len(states) != 1:
        raise ValueError(f"opt_state must hold one {kind.__name__}, got {len(states)}.")
    return states[0]


def hide(opt_state, kind=None):
    """Returns ``opt_state`` with a tombstone for each state of ``kind``, or for all of it."""
    if kind is None:
        return Tombstone()

    def is_kind(x):
        return isinstance(x, kind)

    return jax.tree.map(
        lambda x: Tombstone(type(x)) if is_kind(x) else x, opt_state, is_leaf=is_kind
    )


def call_loss(loss_fn, params, batch, key):
    """Calls ``loss_fn``; returns its loss as ``[]`` float32, and aux or None."""
    loss, aux = split_loss(loss_fn(params, batch, key))
    return jnp.asarray(loss, jnp.float32), aux


def split_loss(out, *, per_example=False, has_aux=None):
    """Checks what a loss function returned; returns the loss, ``[]`` or ``[B]``, and aux or None.

    The loss keeps its dtype. With ``has_aux`` None it may come with aux or without.
    """
    is_pair = isinstance(out, tuple) and len(out) == 2
    if has_aux is not None and has_aux != is_pair:
        want = "the tuple (loss, aux)" if has_aux else "the loss alone"
        got = f"a tuple of length {len(out)}" if isinstance(out, tuple) else "no tuple"
        raise TypeError(f"loss_fn must return {want} with has_aux={has_aux}, got {got}.")
    loss, aux = out if is_pair else (out, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        size = f" of length {len(loss)}" if isinstance(loss, tuple | list) else ""
        raise TypeError(
            "loss_fn must return a loss or the tuple (loss, aux), "
            f"got {type(loss).__name__}{size} for the loss."
        )
    _check.arrays("the loss", loss)
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"the loss must be real floating, got {jnp.result_type(loss)}.")
    if jnp.ndim(loss) != per_example:
        want = "[B]" if per_example else "[]"
        raise ValueError(f"the loss must have shape {want}, got {jnp.shape(loss)}.")
    _check.arrays("aux", aux)
    return jnp.asarray(loss), aux


def check_params(params):
    """Checks that every leaf of ``params`` is real floating; the message names the path."""
    # jax.grad of a complex leaf is the conjugate of the direction of steepest ascent.
    _check.floats("params", params)


def split_model_state(aux, model_state):
    """Takes the new model state out of ``aux``; returns it and the rest of ``aux``."""
    returned = isinstance(aux, dict) and "model_state" in aux
    if model_state is None:
        if returned:
            raise ValueError(
                "aux must hold no 'model_state' for a state without one, got one; "
                "give create(..., model_state=...) the first."
            )
        return None, aux
    if not returned:
        got = f"a dict with {sorted(aux)}" if isinstance(aux, dict) else type(aux).__name__
        raise ValueError(f"aux must be a dict with 'model_state' for a state with one, got {got}.")
    new = aux["model_state"]
    _check.arrays("aux['model_state']", new)
    _check.same_types("aux['model_state']", new, "the state's model_state", model_state)
    return _tree.strong(new), {name: x for name, x in aux.items() if name != "model_state"}


def wide_zeros(types):
    """Returns zeros to sum trees of ``types`` (of ``jax.eval_shape``) in."""
    return jax.tree.map(lambda t: zeros_of(t, _numerics.wide(t.dtype)), types)


def zeros_of(struct, dtype=None):
    """Returns zeros of a ``ShapeDtypeStruct``, with its sharding in an Explicit mesh."""
    # Without a mesh in context plain zeros fit every sharding, and only there JAX takes them.
    in_mesh = not jax.sharding.get_abstract_mesh().empty
    sharding = struct.sharding if in_mesh else None
    zeros = jnp.zeros(struct.shape, dtype or struct.dtype, device=sharding)
    return _tree.vary(zeros, _tree.varying(struct))


def add_scaled(total, weight, tree):
    """Returns ``total + weight * tree`` in the dtypes of ``total``."""
    return jax.tree.map(
        lambda t, x: t + jnp.asarray(weight, t.dtype) * jnp.asarray(x, t.dtype), total, tree
    )


def cast_like(tree, types):
    """Returns ``tree`` in the dtypes of ``types``."""
    return jax.tree.map(lambda x, t: x.astype(t.dtype), tree, types)
