"""Draws of parameters from the posterior that an optimizer's state describes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxkit import _numerics
from jaxkit.blr import _state
from jaxkit.blr._q_gaussian_noise import q_gaussian_noise

# Keys of the noise of leaves are 0, 1, 2, ...; those of their rounding lie beyond.
_ROUNDING = np.uint32(2**31)


def sample_posterior(key, params, state, shape=()):
    r"""Returns parameters :math:`\theta = \mu + \sigma z` drawn from the posterior, and the noise.

    Each leaf draws with ``fold_in(key, index)``, so a leaf that is added at the end leaves the
    draws of the others alone. Leaves below float32 are rounded to one of their two neighbors at
    random, with the right mean; else draws around them would hit one number again and again.

    Args:
      key: typed random key, ``[]``.
      params: parameters, the means of the posterior.
      state: optimizer state that holds a :class:`GBLRState`, or several on disjoint leaves,
        anywhere inside.
      shape: leading axes of the draws, static.

    Returns:
      ``(theta, noise)``, trees like ``params`` with leaves ``[*shape, ...]``: ``theta`` in the
      dtypes of ``params``, ``noise`` z in float32 or wider. Leaves that the rule does not own are
      repeated, and have noise 0.

    Raises:
      ValueError: ``state`` holds no posterior, or two for a leaf; or ``params`` has other shapes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = blr.gblr(0.1, ess=1e4, alpha=2.0).init(params)
      >>> theta, noise = blr.sample_posterior(jax.random.key(0), params, state, (1000,))
      >>> print(theta["w"].mean(0).round(1), (theta["w"].std(0) * 100).round(1))
      [1. 2.] [1. 1.]

    Source: arXiv:2402.17641; derived here: the width for ``alpha`` other than 1.

    Cost: the noise, one block of the random generator for each number, and two for leaves below
    float32.
    """
    leaves, treedef = jax.tree.flatten(params)
    noise = draw(key, leaves, _state.marginals(params, state), shape)
    theta = [
        jnp.broadcast_to(jnp.asarray(leaf), (*shape, *jnp.shape(leaf))) if z is None else at(z)
        for leaf, (z, at) in zip(leaves, noise, strict=True)
    ]
    zeros = [
        jnp.zeros((*shape, *jnp.shape(leaf)), _wide_of(leaf)) if z is None else z
        for leaf, (z, _) in zip(leaves, noise, strict=True)
    ]
    return treedef.unflatten(theta), treedef.unflatten(zeros)


def draw(key, leaves, marginals, shape=()):
    """Returns ``(z, at)`` for each leaf: its noise, and the function from noise to parameters.

    Both are None where the leaf has no marginal. ``at`` rounds all noises alike.
    """
    owned = {i: m for i, m in enumerate(marginals) if m is not None}
    narrow = {i: m for i, m in owned.items() if jnp.result_type(leaves[i]) != m.mean.dtype}

    def noise(key, marginal):
        full = (*shape, *marginal.mean.shape)
        return q_gaussian_noise(key, full, marginal.alpha, marginal.mean.dtype)

    def uniform(key, marginal):
        return jax.random.uniform(key, (*shape, *marginal.mean.shape), marginal.mean.dtype)

    noises = _draw_alike(noise, key, 0, leaves, owned)
    uniforms = _draw_alike(uniform, key, _ROUNDING, leaves, narrow)

    def to_theta(i, noise):
        full = (*shape, *owned[i].mean.shape)
        mean, width = (jnp.broadcast_to(x, full) for x in owned[i][:2])
        theta = mean + width * noise
        if i not in uniforms:
            return theta
        return _numerics.round_at_random(theta, jnp.result_type(leaves[i]), uniforms[i])

    return [
        (noises[i], functools.partial(to_theta, i)) if i in owned else (None, None)
        for i in range(len(leaves))
    ]


def _draw_alike(sampler, key, first, leaves, marginals):
    """Returns ``{i: sampler(fold_in(key, first + i), marginal)}``, vectors of a size in one call.

    The generator is a long program and models have many vectors, so this compiles sooner. Matrices
    are drawn one by one: each may lie on a mesh in its own way.
    """
    if not marginals:
        return {}
    # Under vmap other kinds of keys draw other numbers.
    is_counter = str(jax.random.key_impl(key)) == "threefry2x32"
    numbers = jnp.array([np.uint32(first) + np.uint32(i) for i in marginals], jnp.uint32)

    def over(fun, *xs):
        return jax.vmap(fun)(*xs) if is_counter else jax.lax.map(lambda x: fun(*x), xs)

    keys = over(lambda i: jax.random.fold_in(key, i), numbers)
    groups = {}
    for row, (i, marginal) in enumerate(marginals.items()):
        shape, own = marginal.mean.shape, None if marginal.mean.ndim < 2 else i
        groups.setdefault((shape, marginal.mean.dtype, own), []).append((row, i))
    out = {}
    for group in groups.values():
        rows, members = zip(*group, strict=True)
        like = marginals[members[0]]
        alphas = jnp.stack([marginals[i].alpha for i in members])
        draws = over(
            lambda k, alpha, like=like: sampler(k, like._replace(alpha=alpha)),
            keys[np.array(rows)],
            alphas,
        )
        out |= {i: _place(x, leaves[i]) for i, x in zip(members, draws, strict=True)}
    return out


def _place(x, like):
    """Returns ``x`` split as ``like`` on a mesh with explicit axes, where it is then drawn too."""
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    spec = (None,) * (x.ndim - jnp.ndim(like)) + tuple(sharding.spec)
    return jax.sharding.reshard(x, PartitionSpec(*spec))


def _wide_of(leaf):
    dtype = jnp.result_type(leaf)
    return _numerics.wide(dtype) if _state.has_posterior(leaf) else jnp.float32
