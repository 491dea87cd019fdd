"""Two weighted point sets, and how all of the topic reads their weights and masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics


class Pair(NamedTuple):
    """Two weighted point sets, or a batch of such pairs stacked on a leading axis of every field.

    Pairs of different sizes stack after padding: masked atoms may hold anything, NaN too, and
    change nothing. An atom of weight zero is something else: a real point off the support, such as
    a black pixel, that gets a potential.

    Attributes:
      x: points ``[n, d]`` of the source, real floating.
      y: points ``[m, d]`` of the target, real floating.
      a: weights ``[n]`` of the source, not negative, of sum 1; None for equal ones.
      b: weights ``[m]`` of the target; None for equal ones.
      f: known potential ``[n]`` of the source in the product convention, a label for training;
        None if not known.
      mask_x: ``[n]`` bool, True for atoms that count; None for all.
      mask_y: ``[m]`` bool, True for atoms that count; None for all.
    """

    x: jax.Array
    y: jax.Array
    a: jax.Array | None = None
    b: jax.Array | None = None
    f: jax.Array | None = None
    mask_x: jax.Array | None = None
    mask_y: jax.Array | None = None


def fill(pair):
    """Returns one checked pair in float32 or wider, with weights and masks in place of None.

    Masked atoms lie at the first one that counts, with ``f`` and weight 0. Weights that are
    negative, NaN or not of sum 1 become NaN as a whole. ``f`` stays None if it is.
    """
    (x, y), (mask_x, mask_y) = points(pair.x, pair.y, pair.mask_x, pair.mask_y)
    a = weights("a", pair.a, mask_x, x)
    b = weights("b", pair.b, mask_y, y)
    f = pair.f
    if f is not None:
        f = real("f", f)
        _check.shape("f", f, "n", n=len(x))
        f = masked(f.astype(x.dtype), mask_x)
    mask_x = jnp.ones(len(x), bool) if mask_x is None else mask_x
    mask_y = jnp.ones(len(y), bool) if mask_y is None else mask_y
    return Pair(x, y, a, b, f, mask_x, mask_y)


def points(x, y, mask_x=None, mask_y=None, *, spec="d"):
    """Returns ``(x, y), (mask_x, mask_y)``, checked, in one dtype of at least 32 bits.

    Masked atoms lie at the first one that counts: elsewhere a projection or a cost may be NaN.

    ``spec`` names the axes of a point: "d", or "" for numbers. The masks may be None.
    """
    x, y = real("x", x), real("y", y)
    sizes = _check.shape("x", x, f"n {spec}")
    del sizes["n"]
    _check.shape("y", y, f"m {spec}", **sizes)
    masks = _mask("mask_x", mask_x, "x", x), _mask("mask_y", mask_y, "y", y)
    dtype = _numerics.wide(x.dtype, y.dtype)
    sides = tuple(_moved(z.astype(dtype), mask) for z, mask in zip((x, y), masks, strict=True))
    return sides, masks


def check(name, pair):
    """Checks that ``pair`` is a :class:`Pair`; any other tuple has no such fields."""
    if not isinstance(pair, Pair):
        raise TypeError(f"{name} must be a Pair, got {type(pair).__name__}.")


def weights(name, a, mask, x):
    """Returns the weights of the atoms ``x``: 0 where masked, of sum 1, or NaN as a whole."""
    if a is None:
        if mask is None:
            return jnp.full(len(x), 1 / len(x), x.dtype)
        return mask.astype(x.dtype) / jnp.sum(mask, dtype=x.dtype)
    a = real(name, a)
    _check.shape(name, a, "n", n=len(x))
    tol = tolerance(a)
    a = masked(a.astype(x.dtype), mask)
    total = jnp.sum(a)
    fits = jnp.all(a >= 0) & (jnp.abs(total - 1) <= tol)
    return a / jnp.where(fits, total, jnp.nan)


def tolerance(x):
    """Returns how far from 1 a sum of weights, or a norm, may be; 16 bits hold it less well."""
    return max(1e-4, float(jnp.finfo(jnp.result_type(x)).eps))


def masked(x, mask):
    """Returns ``x`` with 0 at masked atoms."""
    return x if mask is None else jnp.where(mask, x, 0)


def real(name, x):
    """Returns ``x`` as an array, checked to be real floating."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be real floating, got {dtype}.")
    return jnp.asarray(x)


def _mask(name, mask, side, x):
    if len(x) == 0:
        raise ValueError(f"{side} must hold at least one point, got {x.shape}.")
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"{name} must be bool, got {mask.dtype}.")
    _check.shape(name, mask, "n", n=len(x))
    return mask


def _moved(x, mask):
    """Returns ``x`` with masked atoms at the first one that counts; at 0 if none does."""
    if mask is None:
        return x
    first = jnp.argmax(mask)
    safe = jnp.where(mask[first], x[first], 0)
    return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, safe[None])
