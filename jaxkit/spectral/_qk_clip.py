"""QK-clip: query and key weights shrink after a step that made logits too large."""

import collections.abc
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkit import _check, _numerics
from jaxkit.spectral._roles import leaves_with_parts, words_of

# A fused leaf is of several kinds.
_KINDS = {
    "query": frozenset("q query wq bq qkv wqkv qk wqk".split()),
    "key": frozenset("k key wk bk qkv wqkv qk wqk kv wkv".split()),
    "value": frozenset("v value wv bv qkv wqkv kv wkv".split()),
}
_BIAS = frozenset("bias b bq bk".split())


def qk_clip(params, max_logits, *, tau=100.0):
    r"""Returns ``params`` with the query and key weights of too large attention logits shrunk.

    Call it on the params after each step. A head :math:`h` whose largest logit :math:`S_h` is
    above ``tau`` gets :math:`\gamma_h = \tau / S_h`, any other :math:`\gamma_h = 1`. The weights
    and biases of key head :math:`g` are multiplied by :math:`\sqrt{m_g}`, where :math:`m_g` is
    the largest :math:`\gamma_h` of the query heads that share it, and those of query head
    :math:`h` by :math:`\gamma_h / \sqrt{m_g}`. So the logits of head :math:`h` are multiplied by
    :math:`\gamma_h` and no weight grows. Without sharing both factors are
    :math:`\sqrt{\gamma_h}`. What is multiplied by one stays bit for bit.

    In a block the leaves with a whole word ``query``, ``q``, ``wq`` or ``bq`` in their path are
    the queries', those with ``key``, ``k``, ``wk`` or ``bk`` the keys'. Their heads are the last
    axis but one of a ``(d, heads, head_dim)`` kernel and its ``(heads, head_dim)`` bias. A kernel
    ``(d, heads * head_dim)`` has them on its last axis, a ``weight`` on its first. With :math:`r`
    query heads to a key head, query head :math:`h` uses key head :math:`\lfloor h / r \rfloor`.

    Every leaf keeps its sharding; ``max_logits`` is gathered where an Explicit mesh splits it. In
    an Auto mesh the compiler may split a whole leaf as ``max_logits`` is split.

    Args:
      params: any tree of arrays, such as a dict or an ``nnx.State``.
      max_logits: mapping from the path of an attention block in ``params``, such as
        ``block_0/attention``, or ``""`` for the root, to the largest logit of each query head
        over the whole batch: floating, ``[heads]``, or ``[..., heads]`` with the axes of stacked
        layers in front, as the weights have them.
      tau: largest logit that is left alone, a number above 0, may be traced.

    Returns:
      Tree like ``params``, same dtypes. A logit that is NaN or plus infinity gives NaN weights.

    Raises:
      ValueError: a path is not in ``params``, or below it there is no query or key matrix, or
        several, or one beside a norm (which undoes the clip), or one fused with others, as in
        latent attention; two blocks overlap; a shape does not fit the number of heads; a Python
        number ``tau`` is not above 0, or it is no scalar.
      TypeError: ``max_logits`` is no mapping from strings to floating arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> kernel = jnp.ones((4, 2, 3))  # d, heads, head_dim
      >>> params = {"attention": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
      >>> params = spectral.qk_clip(params, {"attention": jnp.array([400.0, 7.0])})
      >>> print(params["attention"]["query"]["kernel"][0, :, 0])
      [0.5 1. ]

    Source: arXiv:2507.20534, section 2.1. Derived here: the factors of shared key heads.

    Cost: one elementwise pass over the query and key leaves; the product in float32 or wider.
    """
    if not isinstance(max_logits, collections.abc.Mapping):
        raise TypeError(f"max_logits must be a mapping, got {type(max_logits).__name__}.")
    _check.between("tau", tau, 0, math.inf, closed=False)
    _check.shape("tau", tau, "")
    found, owner = leaves_with_parts(params), {}
    leaves, treedef = jax.tree.flatten(params)
    for block, logits in max_logits.items():
        logits = _logits(block, logits)
        for index, factor in _factors(found, block, logits, tau).items():
            if index in owner:
                raise ValueError(
                    f"max_logits must name separate blocks, got {owner[index]!r} and {block!r}, "
                    f"which share {'/'.join(found[index][0])!r}."
                )
            owner[index] = block
            leaves[index] = _multiply(leaves[index], factor)
    return treedef.unflatten(leaves)


def _logits(block, logits):
    """Returns the logits of a block in float32 or wider, not split by an Explicit mesh."""
    if not isinstance(block, str):
        raise TypeError(f"max_logits must map paths to arrays, got {block!r} for a path.")
    if not _is_floating(logits):
        kind = getattr(logits, "dtype", type(logits).__name__)
        raise TypeError(f"max_logits[{block!r}] must be a floating array, got {kind}.")
    if 0 in (logits.shape or (0,)):
        raise ValueError(f"max_logits[{block!r}] must have shape [..., heads], got {logits.shape}.")
    logits = jnp.asarray(logits, _numerics.wide(logits.dtype))
    sharding = jax.typeof(logits).sharding
    if any(sharding.spec):
        # Else the factors would meet weights that are split in another way, or split whole ones.
        whole = NamedSharding(sharding.mesh, PartitionSpec(*[None] * logits.ndim))
        logits = jax.sharding.reshard(logits, whole)
    return logits


def _is_floating(leaf):
    """Says whether a leaf is an array of real floating numbers; a random key is not."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        leaf.dtype, jnp.floating
    )


def _factors(found, block, logits, tau):
    """Returns ``{index: factor}`` of the leaves of one block; a factor broadcasts to its leaf."""
    query, key = (_projection(found, block, kind) for kind in ("query", "key"))
    layouts = {index: _layout(*found[index], block, logits.shape) for index in query + key}
    heads, units, key_units = logits.shape[-1], layouts[query[0]][0], layouts[key[0]][0]
    head_dim = units[1] if units[1:] else units[0] // heads
    key_heads = key_units[0] if key_units[1:] else key_units[0] // max(head_dim, 1)
    wanted = f"to fit max_logits[{block!r}] of shape {logits.shape}"
    for index, num in [(i, heads) for i in query] + [(i, key_heads) for i in key]:
        path, shape = "/".join(found[index][0]), found[index][1].shape
        if layouts[index][0] not in ((num, head_dim), (num * head_dim,)):
            raise ValueError(
                f"{path!r} must hold {num} heads of size {head_dim} {wanted}, got shape {shape}."
            )
        if not num or heads % num:
            raise ValueError(
                f"{path!r} must hold a number of heads that divides {heads} {wanted}, got {num} "
                f"in shape {shape}."
            )
    gamma = _gamma(logits, tau)
    root = jnp.sqrt(jnp.max(gamma.reshape(*gamma.shape[:-1], key_heads, -1), axis=-1))
    rest = gamma / jnp.repeat(root, heads // key_heads, axis=-1)
    return {i: _spread(rest if i in query else root, *layouts[i]) for i in layouts}


def _projection(found, block, kind):
    """Returns the indices of the one matrix that makes the queries or keys, and of its bias."""
    prefix = tuple(block.split("/")) if block else ()
    below = [i for i, (parts, _) in enumerate(found) if parts[: len(prefix)] == prefix]
    if not below:
        raise ValueError(f"max_logits must have paths in params, got {block!r}, which has no leaf.")
    matrices, biases = [], []
    for i in below:
        parts, leaf = found[i]
        kinds = _kinds(parts[len(prefix) :])
        if kind in kinds and _is_floating(leaf):
            if len(kinds) > 1:
                raise ValueError(
                    f"max_logits[{block!r}] must be of a block whose queries and keys have leaves "
                    f"of their own, got {'/'.join(parts)!r} for {' and '.join(kinds)}."
                )
            (biases if words_of(parts[-1]) & _BIAS else matrices).append(i)
    if len(matrices) != 1 or len(biases) > 1:
        paths = ["/".join(found[i][0]) for i in matrices + biases]
        raise ValueError(
            f"max_logits[{block!r}] must be of one attention block, with one {kind} matrix, at "
            f"most one bias and no norm, got {', '.join(map(repr, paths)) or 'none'}."
        )
    return matrices + biases


def _kinds(parts):
    """Returns what the deepest part of a path that names queries, keys or values names."""
    for part in reversed(parts):
        kinds = [kind for kind, words in _KINDS.items() if words & words_of(part)]
        if kinds:
            return kinds
    return []


def _layout(parts, leaf, block, logits_shape):
    """Returns the sizes of the unit axes of a leaf, and the shape of its factor before repeats."""
    lead, shape = logits_shape[:-1], leaf.shape
    is_bias, is_weight = bool(words_of(parts[-1]) & _BIAS), parts[-1] == "weight"
    before, after = int(not is_bias and not is_weight), int(is_weight)
    core = shape[len(lead) :]
    units = core[before : len(core) - after]
    if shape[: len(lead)] != lead or not 1 <= len(units) <= 2 - after:
        raise ValueError(
            f"max_logits[{block!r}] must have shape [..., heads], in front the axes of stacked "
            f"layers of {'/'.join(parts)!r} of shape {shape}, got {logits_shape}."
        )
    return units, (*lead, *[1] * before, units[0], *[1] * (len(units) - 1 + after))


def _gamma(logits, tau):
    """Returns the factor of each head's logits; NaN where the largest is NaN or infinite."""
    is_over = ~(logits <= jnp.asarray(tau, logits.dtype))  # NaN too
    divisor = jnp.where(is_over, logits, 1)
    # Not zero at infinity: weights at zero would get no gradient ever after.
    divisor = jnp.where(divisor == jnp.inf, jnp.nan, divisor)
    return jnp.where(is_over, jnp.asarray(tau, logits.dtype) / divisor, 1)


def _spread(factor, units, shape):
    """Returns the factor of each head as that of each unit, in the rank of the leaf."""
    return jnp.repeat(factor, units[0] // factor.shape[-1], axis=-1).reshape(shape)


def _multiply(leaf, factor):
    """Returns ``leaf * factor`` in the dtype of ``leaf``, the same bits where the factor is 1."""
    leaf = jnp.asarray(leaf)
    wide = _numerics.wide(leaf.dtype)
    factor = factor.astype(wide)
    product = (leaf.astype(wide) * factor).astype(leaf.dtype)
    # A product by 1 may still flush a subnormal number to zero. The part that is always true gives
    # the condition the leaf's shape and sharding, which an Explicit mesh wants; it compiles away.
    keep = (factor == 1) & ((leaf == leaf) | True)
    return jnp.where(keep, leaf, product)
