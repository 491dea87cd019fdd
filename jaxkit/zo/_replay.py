"""Sums and inner products of directions that are drawn again from their keys, leaf by leaf."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxkit import _numerics
from jaxkit.zo._node_noise import zero_after

# Keys of leaves are 0, 1, 2, ...; those of their rounding lie beyond.
_ROUNDING = np.uint32(2**31)
# Entries above which the scratch of a draw counts.
_LARGE = 2**12
# Entries of a chunk on an accelerator.
_CHUNK = 2**22


def add(direction, params, keys, coeffs, basis, *, draw=None, rounding="nearest"):
    """Returns ``params + sum_k coeffs[k] * u_k``, each entry rounded once to its dtype.

    ``draw`` None is the direction's own.
    """

    def leaf(index, x, before):
        sampler = _sampler(draw or direction.draw, index, basis)
        leaf_keys = _after(before, all_keys[:, index])
        round_key = jax.random.fold_in(keys[0], _ROUNDING + np.uint32(index))
        sample, over_chunks = _ways(direction, x)

        def part(x, first):
            total = x.astype(_numerics.wide(x.dtype))
            combined = None
            if draw is None and direction.combine is not None:
                combined = direction.combine(leaf_keys, coeffs, index, x, basis)
            if combined is not None:
                total = total + combined.astype(total.dtype)
            else:
                total = _add_draws(
                    total, leaf_keys, coeffs, lambda key: sample(sampler, key, x, first)
                )
            if rounding == "stochastic":
                uniforms = sample(_uniform, round_key, x, first)
                return _numerics.round_at_random(total, x.dtype, uniforms)
            return total.astype(x.dtype)

        def step(rows, start, size, first):
            new = part(jax.lax.dynamic_slice_in_dim(rows, start, size), first)
            return jax.lax.dynamic_update_slice_in_dim(rows, new, start, 0)

        if over_chunks is None:
            return part(x, 0)
        return over_chunks(step, _varying(_rows(x), leaf_keys, coeffs)).reshape(x.shape)

    def group(indices):
        """Returns the new leaves of one shape, drawn in one loop: each draw takes to compile."""
        x = jnp.stack([leaves[i] for i in indices])
        sampler = _sampler(draw or direction.draw, indices[0], basis)

        def each(fun, keys):
            return jax.lax.map(lambda key: fun(key, leaves[indices[0]]), keys)

        total = x.astype(_numerics.wide(x.dtype))
        leaf_keys = all_keys[:, np.array(indices)]
        total = _add_draws(total, leaf_keys, coeffs, lambda keys: each(sampler, keys))
        if rounding == "stochastic":
            round_keys = [jax.random.fold_in(keys[0], _ROUNDING + np.uint32(i)) for i in indices]
            uniforms = each(_uniform, jnp.stack(round_keys))
            return _numerics.round_at_random(total, x.dtype, uniforms)
        return total.astype(x.dtype)

    leaves, treedef = jax.tree.flatten(params)
    numbers = jnp.arange(len(leaves), dtype=jnp.int32)
    # No vmap: keys of the kind unsafe_rbg feel it.
    all_keys = jax.lax.map(
        lambda key: jax.lax.map(lambda i: jax.random.fold_in(key, i), numbers), keys
    )
    groups, out, before = {}, [None] * len(leaves), None
    for index, x in enumerate(leaves):
        # A direction with blocks draws all leaves alike.
        if x.size <= min(direction.block_size or 0, _LARGE) and not _is_split(x):
            groups.setdefault((x.shape, x.dtype), []).append(index)
    for indices in groups.values():
        if len(indices) > 1:
            for index, new in zip(indices, group(indices), strict=True):
                out[index] = new
    for index, x in enumerate(leaves):
        if out[index] is None:
            out[index] = leaf(index, x, before)
            before = out[index] if x.size > _LARGE and not _is_split(x) else before
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
    def leaf(index, x):
        sampler = _sampler(direction.draw, index, basis)
        sample, over_chunks = _ways(direction, x)
        pair = [jax.random.fold_in(key, index) for key in (first, second)]

        def dot(like, block):
            u, v = (sample(sampler, key, like, block) for key in pair)
            return jnp.sum(u * v)

        def step(total, start, size, block):
            rows = jax.ShapeDtypeStruct((size, *_rows(x).shape[1:]), x.dtype)
            return total + dot(rows, block)

        if over_chunks is None:
            return dot(x, 0)
        zero = jnp.zeros((), _numerics.wide(x.dtype))
        return over_chunks(step, _varying(zero, first, second))

    dots = [leaf(i, x) for i, x in enumerate(jax.tree.leaves(params))]
    dtype = _numerics.wide(*(x.dtype for x in dots))
    return sum(x.astype(dtype) for x in dots)


def _add_draws(total, keys, coeffs, draw):
    def add(total, pair):
        key, coeff = pair
        return total + coeff.astype(total.dtype) * draw(key), None

    if len(keys) == 1:
        return add(total, (keys[0], coeffs[0]))[0]
    return jax.lax.scan(add, _varying(total, keys, coeffs), (keys, coeffs))[0]


def _after(x, keys):
    """Returns ``keys``, but not before ``x`` is known, so that large leaves wait for each other.

    XLA would draw all of them at once, and hold several times the parameters in random bits.
    """
    if x is None:
        return keys
    data = jax.random.key_data(keys) + zero_after(x)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def _sampler(draw, index, basis):
    """Returns ``(key, like) -> u`` of one leaf, in float32 or wider."""
    return lambda key, like: draw(key, index, like, basis).astype(_numerics.wide(like.dtype))


def _uniform(key, like):
    return jax.random.uniform(key, like.shape, _numerics.wide(like.dtype))


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


# A large leaf has blocks of whole rows, and block b draws from ``fold_in(leaf key, b)``. How many
# of them are drawn at a time does not change the numbers: a chunk in a loop, which needs the
# scratch of a chunk; or all where a mesh may split the leaf, since there a slice of rows would
# travel, while draws are made where they are needed.


def _ways(direction, x):
    """Returns ``sample(sampler, key, like, first block)``, and ``over_chunks`` or None.

    Without ``over_chunks(step, carry)``, ``sample`` draws all of the leaf; with it, the rows of a
    chunk, for ``step(carry, first row, number of rows, first block)``.
    """
    size = direction.block_size
    if size is None or x.ndim == 0 or x.size <= size:
        return (lambda sampler, key, like, first: sampler(key, like)), None
    num_rows, *row = jax.eval_shape(_rows, x).shape
    rows = max(1, size // math.prod(row))
    block = jax.ShapeDtypeStruct((rows, *row), x.dtype)

    def sample(sampler, key, like, first):
        def draw(b):
            return sampler(jax.random.fold_in(key, first + b), block)

        kept = like.size // math.prod(row)
        num = -(-kept // rows)
        over = jax.lax.map if "rbg" in str(jax.random.key_impl(key)) else _vmap
        draws = draw(0) if num == 1 else over(draw, jnp.arange(num, dtype=jnp.int32))
        return draws.reshape(-1, *row)[:kept].reshape(like.shape)

    if _is_split(x):
        return sample, None
    # A CPU likes a chunk that fits into its caches, others not to start a loop's kernels too often.
    blocks = 1 if jax.default_backend() == "cpu" else max(1, _CHUNK // size)
    whole, rest = divmod(num_rows, blocks * rows)

    def over_chunks(step, carry):
        def body(i, carry):
            return step(carry, i * blocks * rows, blocks * rows, i * blocks)

        carry = jax.lax.fori_loop(0, whole, body, carry)
        return step(carry, whole * blocks * rows, rest, whole * blocks) if rest else carry

    return sample, over_chunks


def _vmap(fun, xs):
    return jax.vmap(fun)(xs)


def _is_split(x):
    """Says whether a mesh may split ``x``: under Auto axes nothing more is known."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}


def _rows(x):
    return x if x.ndim == 1 else x.reshape(-1, x.shape[-1])
