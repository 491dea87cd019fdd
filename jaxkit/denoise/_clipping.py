"""The sum of clipped gradients of single examples, each combined over the query points first."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxkit import _check, _numerics, _tree

PyTree = Any
EXACT = jax.lax.Precision.HIGHEST  # a sum or norm in less would break the clip


class Sums(NamedTuple):
    """Sums over the examples that count: those under the mask with a gradient that is finite."""

    grads: PyTree  # clipped, like params, float32 or wider
    loss: jax.Array  # []
    aux: PyTree  # of the first query point, float32 or wider
    number: jax.Array  # [], float32


def clipped_sums(loss_fn, points, weights, examples, keys, mask, shift, *, l2_clip_norm, norms_fn):
    """Returns the :class:`Sums` of one slice of the examples.

    ``loss_fn(params, example, key) -> (loss, aux)`` gets an example with a leading axis of 1 and
    its key of ``keys``. ``shift`` is zero, like the parameters in float32 or wider: the derivative
    in it at zero is the combined gradient, summed in its dtype, and it varies over the devices
    where the examples do, so that JAX sums no gradients of single examples over devices.
    """

    def combined(shift, example, key):
        """Returns the weighted loss over the query points, and the aux of the first."""
        total, first = 0, None
        for j in range(weights.shape[0]):
            at = jax.tree.map(lambda z, v, j=j: z[j] + v.astype(z.dtype), points, shift)
            loss, aux = loss_fn(at, jax.tree.map(lambda x: x[None], example), key)
            wide = _numerics.wide(loss.dtype)
            total += weights[j].astype(wide) * loss.astype(wide)
            first = aux if j == 0 else first
        return total, first

    if norms_fn is None:
        run = jax.vmap(jax.value_and_grad(combined, has_aux=True), (None, 0, 0))
        (losses, aux), grads = run(shift, examples, keys)
        squared = _squared_norms(grads, mask)
        factors, counts = clip_factors(squared, l2_clip_norm, mask)
        total = jax.tree.map(lambda g, v: _weighted_sum(factors, counts, g, v), grads, shift)
    else:
        squared = norms_fn(points, weights, examples, keys)
        _check.shape("the result of norms_fn", squared, "B", B=mask.shape[0])
        dtype = jnp.result_type(squared)
        if dtype not in (jnp.float32, jnp.float64):
            raise TypeError(f"the result of norms_fn must be float32 or wider, got {dtype}.")
        factors, counts = clip_factors(squared, l2_clip_norm, mask)
        examples = jax.tree.map(lambda x: _replace_rows(x, counts), examples)

        def weighted(shift):
            losses, aux = jax.vmap(combined, (None, 0, 0))(shift, examples, keys)
            return jnp.sum(losses * factors.astype(losses.dtype)), (losses, aux)

        total, (losses, aux) = jax.grad(weighted, has_aux=True)(shift)
        total = jax.tree.map(lambda g: jnp.where(jnp.any(counts), g, 0), total)
    aux = jax.tree.map(lambda x: _sum(x.astype(_averaged(x)), counts), aux)
    return Sums(total, _sum(losses, counts), aux, jnp.sum(counts, dtype=jnp.float32))


def clip_factors(squared_norms, l2_clip_norm, mask):
    """Returns what to multiply each gradient by, ``[B]``, and which count; 0 for those that don't.

    Those under the mask count, unless their squared norm is not finite.
    """
    counts = jnp.isfinite(squared_norms) & mask
    norms = jnp.sqrt(jnp.where(counts, jnp.maximum(squared_norms, 0), 0))
    bound = jnp.asarray(l2_clip_norm, norms.dtype)
    return jnp.where(counts, bound / jnp.maximum(norms, bound), 0), counts


def check_aux(aux):
    """Checks that a mean of ``aux`` makes sense; the message names the path."""
    for path, leaf in _tree.leaves_with_paths(aux):
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.integer, bool)):
            raise TypeError(f"aux must hold real numbers only, got {leaf.dtype} at {path}.")


def _squared_norms(grads, mask):
    """Returns the squared norm of each gradient of ``[B, ...]`` leaves, ``[B]``."""
    leaves = jax.tree.leaves(grads)
    dtype = _numerics.wide(*(g.dtype for g in leaves))
    zero = jnp.zeros(mask.shape, dtype)
    return sum((_row_sums(jnp.square(g)).astype(dtype) for g in leaves), zero)


def _row_sums(x):
    return jnp.sum(x, range(1, x.ndim))


def _sum(x, counts):
    """Returns the sum over the examples that count."""
    return jnp.sum(jnp.where(_like(counts, x), x, 0), 0)


def _weighted_sum(factors, counts, g, like):
    """Returns the sum of ``factors * g`` over the examples that count, placed as ``like``."""
    # On a CPU a product with a vector is a hundred times faster than a sum over the first axis,
    # and the select, which keeps out the NaN that a factor of 0 does not, needs no memory.
    g = jnp.where(_like(counts, g), g, 0)
    sharding = jax.typeof(like).sharding
    placed = {"out_sharding": sharding} if AxisType.Explicit in sharding.mesh.axis_types else {}
    return jnp.einsum("b,b...->...", factors.astype(g.dtype), g, precision=EXACT, **placed)


def _like(rows, x):
    """Returns ``[B]`` flags in the rank of ``x``."""
    return rows.reshape(rows.shape + (1,) * (x.ndim - 1))


def _replace_rows(x, counts):
    """Returns rows in which one that counts stands for those that don't.

    Their own gradient may be NaN, which a factor of 0 does not remove.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    first = jnp.arange(len(counts)) == jnp.argmax(counts)
    # A sum, for that of rows on several devices needs no indexing.
    one = jnp.sum(jnp.where(_like(first, x), x, jnp.zeros((), x.dtype)), 0, x.dtype)
    return jnp.where(_like(counts, x), x, one[None])


def _averaged(x):
    """Returns the dtype for means of ``x``."""
    return _numerics.wide(x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32)
