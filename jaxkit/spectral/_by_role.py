"""Whole optimizers: each role of a model's leaves gets its rule, the rest another optimizer."""

import functools
import glob
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkit import _check, _numerics, _tree
from jaxkit.spectral._placement import assign_whole, read_shardings
from jaxkit.spectral._roles import HIDDEN_ROLES
from jaxkit.spectral._scale_by_spectral import scale_by_spectral


class Group(NamedTuple):
    """Roles that share a rule, a rate and a decay; static but for the numbers.

    Attributes:
      roles: names of roles.
      make: ``overrides -> transformation`` of their leaves, without a rate.
      learning_rate: number or schedule.
      weight_decay: number or schedule, decoupled.
    """

    roles: tuple[str, ...]
    make: Callable[[dict], Any]
    learning_rate: Any
    weight_decay: Any


def hidden(
    learning_rate,
    options,
    *,
    weight_decay,
    other,
    other_learning_rate,
    rules,
    overrides,
    strict,
    sharding,
):
    """Returns the optimizer that gives ``scale_by_spectral(**options)`` to hidden matrices."""
    make = functools.partial(scale_by_spectral, sharding=sharding, **options)
    groups = {
        "hidden": Group(
            HIDDEN_ROLES, lambda known: make(overrides=known), learning_rate, weight_decay
        )
    }
    other = other_or_adamw(other, learning_rate, other_learning_rate)
    return by_role(
        groups, other, rules=rules, overrides=overrides, strict=strict, sharding=sharding
    )


def by_role(groups, other, *, rules, overrides, strict, sharding):
    """Returns the optimizer that gives each group its rule and all other leaves ``other``."""
    for name, group in groups.items():
        check_rate("learning_rate", group.learning_rate)
        if not callable(group.weight_decay):
            _check.between("weight_decay", group.weight_decay, 0.0, math.inf)
        _check.transformation(name, group.make(None))  # options are checked here, not at init
    group_of = {role: name for name, group in groups.items() for role in group.roles}
    shardings = read_shardings(sharding)

    def parts(tree):
        # Roles and axes are found on the whole tree, where a leaf's neighbors tell what it is, and
        # handed to the part that sees only its own leaves.
        found, _ = assign_whole(tree, shardings, rules=rules, overrides=overrides, strict=strict)
        names = [group_of.get(item.role, "other") for item in found]
        chains = {"other": other}
        for name, group in groups.items():
            known = {
                glob.escape(item.path): (item.role, item.spec)
                for item, own in zip(found, names, strict=True)
                if own == name
            }
            chains[name] = _chain(group, known)
        labels = jax.tree.structure(tree).unflatten(names)
        # As a function: a model that can be called has labels that can be, too.
        return optax.partition(chains, lambda _: labels)

    def init(params):
        return parts(params).init(params)

    def update(updates, state, params=None, **extra):
        new, state = parts(updates).update(updates, state, params, **extra)
        # A rate that is an array would widen 16-bit updates.
        return jax.tree.map(lambda y, g: y.astype(g.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _chain(group, known):
    decay = group.weight_decay
    no_decay = isinstance(decay, int | float) and decay == 0
    return optax.chain(
        group.make(known),
        # Without decay, update needs no params; the state looks the same.
        optax.identity() if no_decay else optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(group.learning_rate),
    )


def other_or_adamw(other, learning_rate, other_learning_rate):
    """Returns ``other``, or for None the default AdamW at its own rate or the common one."""
    if other is not None:
        if other_learning_rate is not None:
            raise ValueError(
                f"other_learning_rate belongs to the default AdamW, got {other_learning_rate} "
                "together with other."
            )
        _check.transformation("other", other)
        return other
    if other_learning_rate is not None:
        check_rate("other_learning_rate", other_learning_rate)
    rate = learning_rate if other_learning_rate is None else other_learning_rate
    # eps_root gives the square root a derivative at a zero gradient.
    return in_float32(optax.nadam(rate, b2=0.95, eps_root=1e-16))


def check_rate(name, rate):
    """Checks a number or a schedule; optax takes None for a rate of -1, which ascends."""
    if not callable(rate):
        _check.between(name, rate, -math.inf, math.inf)


def in_float32(inner):
    """Runs ``inner`` in float32 or wider; in 16 bits its moments freeze and its eps is zero.

    Its updates are as wide; :func:`by_role` casts them, as those of the matrices.
    """
    inner = optax.with_extra_args_support(inner)

    def wide(tree):
        for path, leaf in _tree.leaves_with_paths(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"{path} must be real floating for the default of other, got {leaf.dtype}."
                )
        return jax.tree.map(lambda x: x.astype(_numerics.wide(x.dtype)), tree)

    def init(params):
        # Zeros by optax are constants, which jit puts on one device in an Auto mesh.
        def near(x, param):
            return x + _tree.zeros_like(param, x.dtype)

        return optax.tree.map_params(inner, near, inner.init(wide(params)), params)

    def update(updates, state, params=None, **extra):
        return inner.update(wide(updates), state, None if params is None else wide(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)
