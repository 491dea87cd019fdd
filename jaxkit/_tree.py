"""Helpers for pytrees that ``jax.tree`` and ``optax.tree`` lack."""

import jax
import jax.numpy as jnp
import optax


def path_str(path):
    """Returns a key path as ``block/attention/kernel``; the root is ``<root>``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def leaves_with_paths(tree):
    """Returns ``[(path string, leaf)]``; ``None`` and masked leaves do not occur."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_str(path), leaf) for path, leaf in flat]


def zeros_like(tree, dtype=None):
    """Returns zeros that keep each leaf's sharding, under ``jit`` and in Auto meshes too.

    ``jnp.zeros_like`` makes a constant, which ``jit`` puts on one device; a value computed from
    the leaf stays where the leaf is. The ``where`` keeps inf and NaN in a leaf out of the zeros.
    """

    def zeros(x):
        x = jnp.asarray(x)
        return (jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)) * 0).astype(dtype or x.dtype)

    return jax.tree.map(zeros, tree)


def is_masked(x):
    """Says whether ``x`` is the mark that ``optax.masked`` leaves in place of a subtree."""
    return isinstance(x, optax.MaskedNode)


def varying(x):
    """Returns the axes of a surrounding ``shard_map`` over which an array, or its type, varies."""
    kind = getattr(x if hasattr(x, "manual_axis_type") else jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def vary(x, axes):
    """Returns ``x`` marked as one that may differ over ``axes`` of a surrounding ``shard_map``."""
    new = tuple(axes - varying(x))
    return jax.lax.pcast(x, new, to="varying") if new else x


def strong(tree):
    """Returns ``tree`` as arrays without weak types; a weak leaf compiles its user once more."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)
