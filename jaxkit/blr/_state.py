"""The state of the learning rule, and the posterior that it describes, leaf by leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.blr import _geometry

PyTree = Any


class GBLRState(NamedTuple):
    """State of :func:`gblr` and :func:`scale_by_gblr`, from which the posterior can be drawn.

    Trees have the structure of the parameters, with None for leaves that are not floating. The
    numbers are float32, or float64 if a parameter is.

    Attributes:
      step: number of updates done, ``[]`` int32.
      momentum: average of gradients, float32 or wider.
      hess: estimate of the curvature of the mean loss, float32 or wider; the precision of the
        posterior is ``ess * (hess + weight_decay)``.
      master: mean in float32 of parameters of fewer bits, None where the parameter is its own mean.
      ess: effective sample size, ``[]``.
      weight_decay: prior precision over ``ess``, ``[]``.
      alpha: Tsallis index, ``[]``.
      exponent: of the variance, which falls as ``precision**-exponent``, ``[]``.
      reference: precision at which the variance is its inverse, ``[]`` or a tree.
    """

    step: jax.Array
    momentum: PyTree
    hess: PyTree
    master: PyTree
    ess: jax.Array
    weight_decay: jax.Array
    alpha: jax.Array
    exponent: jax.Array
    reference: PyTree


class Marginal(NamedTuple):
    """The posterior of one leaf, a product of q-Gaussians."""

    mean: jax.Array
    stddev: jax.Array
    alpha: jax.Array  # []


def marginals(params, opt_state):
    """Returns a :class:`Marginal` for each leaf of ``params``, None where no rule owns the leaf."""
    paths = _tree.leaves_with_paths(params)
    found = [None] * len(paths)
    for state in _estimator.find_states(opt_state, GBLRState):
        layout = jax.tree.structure(state.hess, is_leaf=_is_hole)
        hess, means, references = (
            _leaves(name, layout, tree)
            for name, tree in (
                ("opt_state", state.hess),
                ("opt_state", state.master),
                ("opt_state", spread(state.reference, state.hess)),
            )
        )
        index = 0
        for part, h, master, reference in zip(
            _leaves("params", layout, params), hess, means, references, strict=True
        ):
            leaves = jax.tree.leaves(part)
            if not _is_hole(h):
                path, leaf = paths[index]
                if len(leaves) != 1 or jnp.shape(leaf) != h.shape:
                    raise ValueError(
                        f"params must have the shapes that opt_state was made for, wanted "
                        f"{h.shape} at {path}, got {jnp.shape(leaf)}."
                    )
                if found[index] is not None:
                    raise ValueError(
                        f"opt_state must hold one GBLRState for each leaf, got two for {path}."
                    )
                found[index] = _marginal(leaf, state, h, master, reference)
            index += len(leaves)
    return found


def mean(leaf, master):
    """Returns the mean of a leaf in float32 or wider.

    That is the master where it rounds to the leaf, up to one unit in the last place. Elsewhere
    something but the rule has changed the leaf, and the leaf counts.
    """
    wide = leaf.astype(_numerics.wide(leaf.dtype))
    if master is None:
        return wide
    info = jnp.finfo(leaf.dtype)
    unit = float(info.eps) * jnp.maximum(jnp.abs(wide), float(info.tiny))
    return jnp.where(jnp.abs(master - wide) <= unit, master, wide)


def has_posterior(leaf):
    """Says whether the rule owns a leaf if it may: real floating."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def is_shared(reference):
    """Says whether a reference is one number, or array, instead of a tree."""
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(reference))


def spread(reference, tree):
    """Returns a reference as a tree with the leaves of ``tree``."""
    return jax.tree.map(lambda _: reference, tree) if is_shared(reference) else reference


def cut(name, tree, params):
    """Returns the leaves of ``tree`` at those of ``params``, of which parts may be masked out."""
    layout = jax.tree.structure(params, is_leaf=_tree.is_masked)
    parts = _leaves(name, layout, tree)
    kept = jax.tree.leaves(params, is_leaf=_tree.is_masked)
    return [x for x, p in zip(parts, kept, strict=True) if not _tree.is_masked(p)]


def check_shapes(name, leaves, params, *, scalars=False):
    """Checks that each of ``leaves`` has the shape of its parameter, or ``[]`` with ``scalars``."""
    for (path, p), x in zip(_tree.leaves_with_paths(params), leaves, strict=True):
        _check.arrays(f"{name} at {path}", x)
        if jnp.shape(x) != jnp.shape(p) and not (scalars and jnp.shape(x) == ()):
            raise ValueError(
                f"{name} must have the shapes of params, wanted {jnp.shape(p)} at {path}, "
                f"got {jnp.shape(x)}."
            )


def _marginal(leaf, state, hess, master, reference):
    precision = state.ess.astype(hess.dtype) * (hess + state.weight_decay.astype(hess.dtype))
    width = _geometry.stddev(precision, state.exponent, reference)
    return Marginal(mean(jnp.asarray(leaf), master), width, state.alpha)


def _leaves(name, layout, tree):
    try:
        return layout.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} must have the structure {layout}, got {jax.tree.structure(tree)}."
        ) from error


def _is_hole(x):
    return x is None or _tree.is_masked(x)
