"""Two samples of feature vectors: checks, blocks of rows, and what a bad row does."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics


def checked(*, minimum=1, **samples):
    """Checks arrays ``[n, d]`` of one d; returns them in float32 or wider, the same for all."""
    arrays = {name: jnp.asarray(x) for name, x in samples.items()}
    sizes = {}
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be real floating, got {x.dtype}.")
        sizes = {"d": _check.shape(name, x, "n d", **sizes)["d"]}
        if x.shape[0] < minimum:
            raise ValueError(f"{name} must have at least {minimum} rows, got {x.shape[0]}.")
        _finite_rows(name, x)
    dtype = _numerics.wide(*(x.dtype for x in arrays.values()))
    return tuple(x.astype(dtype) for x in arrays.values())


def per_block(x, chunk, fill=0):
    """Returns ``x`` as ``[blocks, rows, ...]``, at most ``chunk`` rows each, the rest ``fill``."""
    rows = min(chunk, x.shape[0])
    pad = [(0, -x.shape[0] % rows)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad, constant_values=fill).reshape(-1, rows, *x.shape[1:])


def per_row(blocks, num_rows):
    """Undoes :func:`per_block`."""
    return blocks.reshape(-1, *blocks.shape[2:])[:num_rows]


def poison(*arrays):
    """Returns NaN if an entry is NaN or infinite, else 0; comparisons would lose it."""
    fine = jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]).all()
    return jnp.where(fine, 0, jnp.nan).astype(arrays[0].dtype)


def _finite_rows(name, x):
    """Checks the values of an array that is not traced."""
    try:
        bad = int(jnp.sum(~jnp.isfinite(x).all(axis=1)))
    except jax.errors.ConcretizationTypeError:
        return
    if bad:
        raise ValueError(f"{name} must be finite, got NaN or inf in {bad} of {len(x)} rows.")
