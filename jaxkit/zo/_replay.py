"""Sums and inner products of directions that are drawn again from their keys, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxkit import _numerics, _random
from jaxkit.zo._node_noise import zero_after

# Keys of leaves are 0, 1, 2, ...; those of their rounding lie beyond.
_ROUNDING = np.uint32(2**31)
# Entries up to which leaves of one shape are drawn in one loop: each draw takes to compile.
_SMALL = 2**12


def add(direction, params, keys, coeffs, basis, *, draw=None, rounding="nearest"):
    """Returns ``params + sum_k coeffs[k] * u_k``, each entry rounded once to its dtype.

    ``draw`` None is the direction's own.
    """

    def sampler(index):
        return _sampler(draw or direction.draw, index, basis)

    def rounded(total, dtype, draw_uniforms):
        if rounding == "stochastic":
            return _numerics.round_at_random(total, dtype, draw_uniforms())
        return total.astype(dtype)

    def leaf(index, x):
        total, combined = x.astype(_numerics.wide(x.dtype)), None
        leaf_keys = all_keys[:, index]
        if draw is None and direction.combine is not None:
            combined = direction.combine(leaf_keys, coeffs, index, x, basis)
        if combined is not None:
            total = total + combined.astype(total.dtype)
        else:
            total = _add_draws(total, leaf_keys, coeffs, lambda key: sampler(index)(key, x))
        return rounded(total, x.dtype, lambda: _uniform(round_key(index), x))

    def group(indices):
        """Returns the new leaves of one shape."""
        like = leaves[indices[0]]
        x = jnp.stack([leaves[i] for i in indices])

        def each(fun, keys):
            return jax.lax.map(lambda key: fun(key, like), keys)

        total = x.astype(_numerics.wide(x.dtype))
        leaf_keys = all_keys[:, np.array(indices)]
        total = _add_draws(total, leaf_keys, coeffs, lambda keys: each(sampler(indices[0]), keys))
        return rounded(
            total, x.dtype, lambda: each(_uniform, jnp.stack([round_key(i) for i in indices]))
        )

    def round_key(index):
        return jax.random.fold_in(keys[0], _ROUNDING + np.uint32(index))

    # Without their coefficient, whose sign changes, XLA would draw all directions before the loop
    # over the calls, and keep them.
    data = jax.random.key_data(keys) + zero_after(coeffs)
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
    leaves, treedef = jax.tree.flatten(params)
    numbers = jnp.arange(len(leaves), dtype=jnp.int32)
    # No vmap: keys of the kind unsafe_rbg feel it.
    all_keys = jax.lax.map(
        lambda key: jax.lax.map(lambda i: jax.random.fold_in(key, i), numbers), keys
    )
    groups, out = {}, [None] * len(leaves)
    for index, x in enumerate(leaves):
        alone = not direction.alike or x.size > _SMALL or _is_split(x)
        groups.setdefault(index if alone else (x.shape, x.dtype), []).append(index)
    for indices in groups.values():
        new = [leaf(indices[0], leaves[indices[0]])] if len(indices) == 1 else group(indices)
        for index, x in zip(indices, new, strict=True):
            out[index] = x
    return treedef.unflatten(out)


def gram(direction, params, keys, basis):
    """Returns ``[K, K]``: the inner products of K independent draws over all of ``params``."""

    def dots(first):
        return jax.lax.map(lambda second: _dot(direction, params, first, second, basis), keys)

    return jax.lax.map(dots, keys)


def squared_norms(direction, params, keys, basis):
    """Returns ``[K]``: the squared norms of K independent draws over all of ``params``."""
    return jax.lax.map(lambda key: _dot(direction, params, key, key, basis), keys)


def _dot(direction, params, first, second, basis):
    dots = []
    for index, x in enumerate(jax.tree.leaves(params)):
        sampler = _sampler(direction.draw, index, basis)
        u, v = (sampler(jax.random.fold_in(key, index), x) for key in (first, second))
        dots.append(jnp.sum(u * v))
    dtype = _numerics.wide(*(x.dtype for x in dots))
    return sum(x.astype(dtype) for x in dots)


def _add_draws(total, keys, coeffs, draw):
    def add(total, pair):
        key, coeff = pair
        return total + coeff.astype(total.dtype) * draw(key), None

    if len(keys) == 1:
        return add(total, (keys[0], coeffs[0]))[0]
    return jax.lax.scan(add, _varying(total, keys, coeffs), (keys, coeffs))[0]


def _sampler(draw, index, basis):
    """Returns ``(key, like) -> u`` of one leaf, in float32 or wider."""
    return lambda key, like: draw(key, index, like, basis).astype(_numerics.wide(like.dtype))


def _uniform(key, like):
    return _random.uniform(key, like.shape, _numerics.wide(like.dtype))


def _varying(x, *others):
    """Returns ``x``; inside ``shard_map`` as something that varies over devices as all of them do.

    The carry of a loop must have the type of what is added to it.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return x
    for other in others:
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            other = jax.random.key_data(other)
        x = x + (other.reshape(-1)[0] != other.reshape(-1)[0]).astype(x.dtype) * 0
    return x


def _is_split(x):
    """Says whether a mesh may split ``x``: under Auto axes nothing more is known."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}
