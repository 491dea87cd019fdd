"""Checks of shapes, dtypes and static options; they cost nothing after tracing."""

import collections.abc
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _tree


def shape(name, x, spec, /, **sizes):
    """Checks ``x.shape`` against ``spec`` such as ``"n d"``; returns the sizes it named."""
    dims, got, known = spec.split(), jnp.shape(x), dict(sizes)
    fits = len(dims) == len(got)
    for dim, size in zip(dims, got, strict=False) if fits else ():
        want = int(dim) if dim.isdigit() else known.setdefault(dim, size)
        fits = fits and want == size
    if not fits:
        hint = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise ValueError(
            f"{name} must have shape [{', '.join(dims)}]"
            + (f" with {hint}" if hint else "")
            + f", got {got}."
        )
    return known


def choice(name, value, options, /):
    """Checks that a static ``value`` is one of ``options``; the message lists them."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}.")
    return value


def count(name, value, /, *, minimum=1):
    """Checks that a static ``value`` is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a static whole number, got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}.")
    return int(value)


def between(name, value, low, high, /, *, closed=True):
    """Checks ``low <= value < high`` where ``value`` is a Python number; traced values pass.

    ``closed=False`` leaves ``low`` out too.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if not low <= value < high or (value == low and not closed):
            bracket = "[" if closed else "("
            raise ValueError(f"{name} must be in {bracket}{low}, {high}), got {value}.")
    elif not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return value


def function(name, value, /):
    """Checks that ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}.")


def transformation(name, value, /):
    """Checks that ``value`` has the methods of an optax transformation."""
    if not callable(getattr(value, "init", None)) or not callable(getattr(value, "update", None)):
        kind = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{name} must be an optax transformation, got {kind}.")


def mapping(name, value, /):
    """Returns ``value``, a mapping, or an empty one for None."""
    if value is not None and not isinstance(value, collections.abc.Mapping):
        raise TypeError(f"{name} must be a mapping, got {value!r}.")
    return {} if value is None else value


def floating(name, dtype, /):
    """Checks that a static ``dtype`` is None or real floating."""
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(f"{name} must be a real floating dtype or None, got {dtype!r}.")


def arrays(name, tree, /):
    """Checks that every leaf of ``tree`` is an array or a number; the message names the path."""
    for path, leaf in _tree.leaves_with_paths(tree):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            kind = type(leaf).__name__
            raise TypeError(f"{name} must hold arrays only, got {kind} at {path}.") from error


def floats(name, tree, /):
    """Checks that every leaf of ``tree`` is a real floating array; the message names the path."""
    arrays(name, tree)
    for path, leaf in _tree.leaves_with_paths(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"{name} must be real floating, got {jnp.result_type(leaf)} at {path}.")


def leading_axis(name, tree, /):
    """Checks that all leaves of ``tree`` have the same leading axis; returns its size."""
    arrays(name, tree)
    leaves = _tree.leaves_with_paths(tree)
    if not leaves:
        raise ValueError(f"{name} must hold at least one array, got an empty tree.")
    for path, leaf in leaves:
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"{name} must have a leading axis in every leaf, got [] at {path}.")
    first, size = leaves[0][0], jnp.shape(leaves[0][1])[0]
    for path, leaf in leaves:
        if jnp.shape(leaf)[0] != size:
            raise ValueError(
                f"{name} must have the same leading axis in every leaf, got {size} at {first} "
                f"and {jnp.shape(leaf)[0]} at {path}."
            )
    return size


def same_types(name, got, want_name, want, /, *, dtypes=True):
    """Checks that two trees agree in structure, shapes and dtypes; names the first difference."""

    def types(tree):
        return {
            path: f"{jnp.result_type(leaf) if dtypes else ''}{list(jnp.shape(leaf))}"
            for path, leaf in _tree.leaves_with_paths(tree)
        }

    what = "types" if dtypes else "shapes"
    got_types, want_types = types(got), types(want)
    for path in {**want_types, **got_types}:
        pair = want_types.get(path, "nothing"), got_types.get(path, "nothing")
        if pair[0] != pair[1]:
            raise ValueError(
                f"{name} must have the {what} of {want_name}, wanted {pair[0]} at {path}, "
                f"got {pair[1]}."
            )
    got_tree, want_tree = jax.tree.structure(got), jax.tree.structure(want)
    if got_tree != want_tree:
        raise ValueError(
            f"{name} must have the structure of {want_name}, wanted {want_tree}, got {got_tree}."
        )
