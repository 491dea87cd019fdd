"""Which leaf of a model plays which role, and which matrices it holds."""

import fnmatch
import glob
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.spectral._matrix_spec import MatrixSpec, resolve_spec
from jaxkit.spectral._roles import (
    ROLES,
    default_spec,
    find_role,
    leaves,
    leaves_with_parts,
    words_of,
)


class Assignment(NamedTuple):
    """What one leaf is: its path, shape and dtype, its role, and its matrices if it has any."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    role: str
    spec: MatrixSpec | None


def label_params(params, *, rules=None, overrides=None, strict=False):
    """Returns the tree of ``params`` with the role of each leaf in its place.

    The role follows from the path and the rank. Names are split into lower-case words at
    underscores, digits and capitals, and whole words of the last two parts of the path count; list
    indices and the ``value`` of a variable count for nothing. The first line that fits decides:

    1. rank 0 or 1, not floating, or ``bias``, ``scale``, ``norm``: other
    2. ``wpe``, ``pos``, ``position``: other
    3. ``embed``, ``embedding``, ``wte``: embedding; ``head``, ``logits``, ``unembed``: lm_head
    4. ``router``; or ``gate`` below or beside ``moe`` or ``experts``, but not beside ``up`` or
       ``down``: router
    5. ``query``, ``key``, ``value``, ``q``, ``k``, ``v``, ``qkv``, ``wq``, ...: attention_in;
       ``out``, ``o``, and beside those ``output``, ``wo``: attention_out
    6. ``gate``, ``up``, ``wi``, ``w1``, ``w3``: mlp_gate_up; ``down``, ``wo``, ``w2``: mlp_down
    7. a kernel or weight of rank 4: conv, or other if it is depthwise
    8. rank 2, or a stack of such below ``experts`` or among stacked biases and norms: hidden
    9. anything else: other

    The axes come from the layout of the libraries: the last axis of a leaf holds its units, but
    the first one of a matrix called ``weight`` or of an embedding. A ``(d, heads, head_dim)``
    kernel is one matrix a head. One axis more than the role needs is a stack on axis 0, and so is
    the axis that all leaves of a scanned module share, which its rank 2 biases and norms betray.
    A line whose layout does not fit the rank is passed over. A fused leaf is one matrix: give its
    split. A tree with masked leaves shows less, since their shapes are unknown.

    Args:
      params: any tree of arrays or ``jax.ShapeDtypeStruct``; ``None`` and masked leaves stay.
      rules: mapping from one lower-case word to a role, tried before line 2, static. A word that
        occurs nowhere is no error, so one mapping serves many models.
      overrides: mapping from a path pattern to a role, a :class:`MatrixSpec`, or a pair
        ``(role, MatrixSpec)``, tried before everything, static. Patterns are those of
        ``fnmatch``, where ``*`` also matches ``/``; a plain path counts
        before patterns, of several patterns the first that fits. A spec
        alone keeps the role that the leaf has anyway, or makes it hidden if that is other.
      strict: raise where only line 9 fits a leaf of rank 2 or more, static.

    Returns:
      Tree of strings: hidden, attention_in, attention_out, mlp_gate_up, mlp_down, conv,
      embedding, lm_head, router, other.

    Raises:
      ValueError: a pattern matches no leaf, a role is unknown, a spec or role does not fit its
        leaf, an axis of a matrix has size 0, or ``strict`` found a leaf that no line knows.
      TypeError: a leaf is no array, an override is none of the three kinds, or ``rules`` or
        ``overrides`` is no mapping.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> params = {"embed": jnp.ones((9, 4)), "up": {"kernel": jnp.ones((4, 8))}}
      >>> spectral.label_params(params)
      {'embed': 'embedding', 'up': {'kernel': 'mlp_gate_up'}}
      >>> spectral.label_params(params, overrides={"embed": "lm_head"})["embed"]  # tied
      'lm_head'

    Source: arXiv:2605.18106 for the roles. Derived here: finding them by names and siblings.

    Cost: host time linear in the number of leaves; no array is read.
    """
    found = assign(params, rules=rules, overrides=overrides, strict=strict)
    return jax.tree.structure(params).unflatten([leaf.role for leaf in found])


def assign(params, *, rules=None, overrides=None, strict=False):
    """Returns an :class:`Assignment` for every leaf, in leaf order; see :func:`label_params`."""
    rules = _check.mapping("rules", rules)
    for word, role in rules.items():
        _check.choice(f"role of rule {word!r}", role, ROLES)
        if word not in words_of(word):
            raise ValueError(f"rules must map one lower-case word to a role, got {word!r}.")
    overrides = _check.mapping("overrides", overrides)
    wanted = {pattern: _override(pattern, value) for pattern, value in overrides.items()}
    paths = ["/".join(parts) or "<root>" for parts, _ in leaves_with_parts(params, masked=True)]
    # Nearly all patterns are plain paths: these are looked up, not matched.
    patterns = [key for key in wanted if glob.has_magic(key)]
    for key in wanted:
        if key not in paths and not (key in patterns and fnmatch.filter(paths, key)):
            raise ValueError(
                f"overrides must match leaves of params, got {key!r}, which matches none."
            )
    out = []
    for leaf in leaves(params):
        keys = [leaf.path] if leaf.path in wanted else []
        keys += [key for key in patterns if fnmatch.fnmatchcase(leaf.path, key)]
        forced = wanted[keys[0]] if keys else (None, None)
        role, spec = _decide(leaf, forced, rules, strict)
        out.append(Assignment(leaf.path, leaf.shape, leaf.dtype, role, spec))
    return out


def _override(pattern, value):
    """Returns ``(role or None, spec or None)`` from what the user gave."""
    if isinstance(value, str):
        role, spec = value, None
    elif isinstance(value, MatrixSpec):
        role, spec = None, value
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], MatrixSpec):
        role, spec = value
    else:
        raise TypeError(
            f"overrides[{pattern!r}] must be a role, a MatrixSpec or (role, MatrixSpec), "
            f"got {value!r}."
        )
    if role is not None:
        _check.choice(f"role of overrides[{pattern!r}]", role, ROLES)
    if role == "other" and spec is not None:
        raise ValueError(
            f"overrides[{pattern!r}] must not have a MatrixSpec for other, got {spec}."
        )
    return role, spec


def _decide(leaf, forced, rules, strict):
    """Returns the role and the resolved spec of one leaf."""
    role, spec = forced
    if role is None:
        role = find_role(leaf, rules)
        if role is None:
            if strict and spec is None and len(leaf.shape) >= 2:
                raise ValueError(
                    f"overrides must name the role of {leaf.path!r} of shape {leaf.shape} under "
                    "strict=True, since no rule knows it."
                )
            role = "other"
        if role == "other" and spec is not None:
            role = "hidden"
    if role == "other":
        return role, None
    if len(leaf.shape) < 2 or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
            f"role {role!r} needs a floating leaf of rank 2 or more, got {leaf.dtype} of shape "
            f"{leaf.shape} at {leaf.path!r}."
        )
    if spec is None:
        spec = default_spec(leaf, role)
    if spec is None:
        raise ValueError(
            f"overrides must give a MatrixSpec for {leaf.path!r} as {role}, since its shape "
            f"{leaf.shape} is no layout known for that role."
        )
    return role, resolve_spec(spec, leaf.shape, leaf.path)
