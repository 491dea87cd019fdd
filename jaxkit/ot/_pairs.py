"""Training sets of pairs, checked by value where their values are known."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check
from jaxkit.ot import _pair
from jaxkit.ot._pair import Pair


def stacks(pairs, *, labels=None):
    """Returns a training set as a list of stacked pairs, after a check of shapes and values.

    ``pairs`` is a Pair, stacked or not, or a list of such, each with sizes of its own. ``labels``
    says which atoms need a finite ``f``: None for none of them, "measure" for those of positive
    weight, "atoms" for all that count.
    """
    items = [pairs] if isinstance(pairs, Pair) else list(pairs)
    if not items:
        raise ValueError("pairs must hold at least one Pair, got an empty list.")
    names = ["pairs"] if isinstance(pairs, Pair) else [f"pairs[{i}]" for i in range(len(items))]
    return [_stack(name, item, labels) for name, item in zip(names, items, strict=True)]


def check_directions(theta):
    """Checks that the rows of ``theta`` are unit vectors, if their values are known."""
    known = _known(theta)
    if known is not None:
        norms = np.linalg.norm(known, axis=-1)
        worst = norms[np.argmax(np.abs(norms - 1))]
        if not abs(worst - 1) <= _pair.tolerance(theta):
            raise ValueError(f"theta must have rows of norm 1, got a row of norm {worst:.6g}.")


def check_solution(weights, ridge):
    """Checks that fitted weights are finite, if their values are known."""
    known = _known(jnp.stack(weights))
    if known is not None and not np.isfinite(known).all():
        raise ValueError(f"ridge must be larger for features that are so dependent, got {ridge}.")


def _stack(name, pair, labels):
    _pair.check(name, pair)
    if labels is not None and pair.f is None:
        raise ValueError(f"{name} must hold known potentials f, got None.")
    if jnp.ndim(pair.x) == 2:
        pair = jax.tree.map(lambda z: jnp.asarray(z)[None], pair)
    _check.count(f"the number of pairs in {name}", _check.leading_axis(name, pair))
    jax.eval_shape(jax.vmap(_pair.fill), pair)  # checks shapes and dtypes
    _check_side(name, "x", "a", pair.x, pair.a, pair.mask_x)
    _check_side(name, "y", "b", pair.y, pair.b, pair.mask_y)
    if labels is not None:
        counts = _known(pair.mask_x)
        counts = np.ones(1, bool) if counts is None else counts
        a = _known(pair.a)
        if labels == "measure" and a is not None:
            counts = counts * a > 0
        _refuse(name, "f must be finite where it counts", pair.f, np.isfinite, counts)
    return pair


def _check_side(name, points_name, weights_name, points, weights, mask):
    known = _known(mask)
    mask = np.ones(1) if known is None else known
    _refuse(name, f"{points_name} must be finite", points, np.isfinite, mask[..., None])
    _refuse(name, f"{weights_name} must not be negative", weights, lambda a: a >= 0, mask)
    a = _known(weights)
    if a is not None:
        sums = np.sum(np.where(mask, a, 0), axis=-1)
        wrong = np.abs(sums - 1) > _pair.tolerance(weights)
        if wrong.any():
            k = int(np.argmax(wrong))
            raise ValueError(
                f"{weights_name} must sum to 1, got {sums[k]:.6g} in {name}, pair {k}."
            )


def _refuse(name, rule, x, fits, counts):
    """Raises for the first entry of ``x`` that counts and does not fit."""
    known = _known(x)
    if known is not None:
        bad = np.broadcast_to(counts, known.shape).astype(bool) & ~fits(known)
        if bad.any():
            where = tuple(np.argwhere(bad)[0])
            raise ValueError(f"{rule}, got {known[where]:.6g} in {name}, pair {where[0]}.")


def _known(x):
    """Returns the values of ``x`` in float64, or None if it is traced or None."""
    try:
        return None if x is None else np.asarray(x).astype(np.float64)
    except jax.errors.TracerArrayConversionError:
        return None
