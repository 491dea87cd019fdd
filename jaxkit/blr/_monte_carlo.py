"""Means of gradient and curvature over samples of the posterior."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.blr import _gblr, _sample_posterior, _state

HESSIANS = ("reparam", "antithetic", "hutchinson", "gradsq")
# Keys of probes lie beyond those of noise and of rounding.
_PROBE = np.uint32(2**30)


class Options(NamedTuple):
    """The options of both estimators of gradient and curvature."""

    num_samples: int
    mode: str
    hessian: str
    batch_size: float | None
    axis_name: str | tuple[str, ...] | None


def check(options, hessians=HESSIANS):
    """Checks the options; returns them with a whole number of samples."""
    num_samples = _check.count("num_samples", options.num_samples)
    _check.choice("mode", options.mode, ("scan", "vmap"))
    _check.choice("hessian", options.hessian, hessians)
    _gblr.check_gradsq(options.hessian, options.batch_size)
    if options.hessian == "antithetic" and num_samples % 2:
        raise ValueError(f"num_samples must be even with hessian='antithetic', got {num_samples}.")
    return options._replace(num_samples=num_samples)


def estimate(evaluate, options, key, params, opt_state):
    """Returns ``(grads, hess, rest, aux)``: means over samples, and the first sample's aux.

    ``evaluate(index, theta) -> (grads, rest, aux)`` with ``rest`` a tree of floating arrays that
    is linear in the evaluations. ``hess`` is 0 where no rule owns a leaf, and a gradient is NaN
    where it is not finite.
    """
    leaves, treedef = jax.tree.flatten(params)
    marginals = _state.marginals(params, opt_state)
    axis_name = options.axis_name
    # As a jitted function it is traced once, for types and for the two halves of a pair.
    evaluate = jax.jit(evaluate)

    def vary(tree):
        """Marks what is the same on all devices as their own, since all is averaged at the end."""
        if axis_name is None:
            return tree
        # Not pcast, which refuses what is the device's own already.
        zero = jax.lax.axis_index(axis_name) * 0

        def leaf(x):
            own = zero.astype(jnp.result_type(x))
            return x | own if own.dtype == jnp.bool else x + own

        return jax.tree.map(leaf, tree)

    def sample(index):
        """Returns ``(grads, hess, rest), aux`` of one sample, or pair of them."""
        own = jax.random.fold_in(key, index)
        drawn = _sample_posterior.draw(own, leaves, marginals)

        def at(sign):
            return treedef.unflatten(
                vary(leaf if z is None else to_theta(z if sign > 0 else -z))
                for leaf, (z, to_theta) in zip(leaves, drawn, strict=True)
            )

        def each(fun, *trees):
            """Returns the curvatures by ``fun(marginal, z, leaf of each tree)``, 0 elsewhere."""
            rows = zip(marginals, drawn, *map(treedef.flatten_up_to, trees), strict=True)
            return treedef.unflatten(
                _tree.zeros_like(xs[0], jnp.float32)
                if marginal is None
                else fun(marginal, z, *(x.astype(z.dtype) for x in xs))
                for marginal, (z, _), *xs in rows
            )

        if options.hessian == "antithetic":
            grads, rest, aux = evaluate(index, at(1))
            other_grads, other_rest, _ = evaluate(index, at(-1))
            hess = each(lambda m, z, g, o: z * (g - o) / (2 * m.stddev), grads, other_grads)
            grads, rest = _mean_of_two((grads, rest), (other_grads, other_rest))
        elif options.hessian == "hutchinson":
            grads, rest, aux, probes, products = _probed(own, index, at(1))
            hess = each(lambda m, z, u, p: u * p * _escort(m, z), probes, products)
        else:
            grads, rest, aux = evaluate(index, at(1))
            if options.hessian == "gradsq":
                hess = each(lambda m, z, g: options.batch_size * jnp.square(g), grads)
            else:
                hess = each(lambda m, z, g: g * z / m.stddev, grads)
        return vary((_wide((grads, hess, rest)), aux))

    def _probed(own, index, theta):
        """Returns an evaluation, random signs u, and the Hessian times them."""
        points = treedef.flatten_up_to(theta)
        owned = [i for i, marginal in enumerate(marginals) if marginal is not None]

        def of_owned(values):
            changed = dict(zip(owned, values, strict=True))
            at = treedef.unflatten(changed.get(i, x) for i, x in enumerate(points))
            grads, rest, aux = evaluate(index, at)
            return grads, (rest, aux)

        signs = [
            jax.random.rademacher(
                jax.random.fold_in(own, _PROBE + np.uint32(i)), points[i].shape, points[i].dtype
            )
            for i in owned
        ]
        at = ([points[i] for i in owned],)
        grads, products, (rest, aux) = jax.jvp(of_owned, at, (vary(signs),), has_aux=True)
        chosen = dict(zip(owned, signs, strict=True))
        signs = treedef.unflatten(chosen.get(i, x) for i, x in enumerate(points))
        return grads, rest, aux, signs, products

    num = options.num_samples // 2 if options.hessian == "antithetic" else options.num_samples
    if num == 1:
        total, aux = sample(0)
    elif options.mode == "vmap":
        stacked, auxes = jax.vmap(sample)(jnp.arange(num, dtype=jnp.int32))
        total = jax.tree.map(lambda x: jnp.sum(x, 0), stacked)
        aux = jax.tree.map(lambda x: x[0], auxes)
    else:
        total, aux = _scan(sample, num, vary)
    mean = jax.tree.map(lambda x: x / num, total)
    if axis_name is not None:
        mean = jax.lax.pmean(mean, axis_name)
    grads, hess, rest = mean
    grads = jax.tree.map(
        lambda g, h, p: jnp.where(jnp.isfinite(h), g, jnp.nan).astype(jnp.result_type(p)),
        grads,
        hess,
        params,
    )
    return grads, hess, rest, aux


def device_key(key, axis_name):
    """Returns a key of the device's own inside ``shard_map``."""
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def _scan(sample, num, vary):
    def add(carry, index):
        total, first = carry
        new, aux = sample(index)
        total = jax.tree.map(jnp.add, total, new)
        first = jax.tree.map(lambda x, old: jnp.where(index == 0, x, old), aux, first)
        return (total, first), None

    types = jax.eval_shape(sample, jnp.int32(0))
    start = vary(jax.tree.map(_estimator.zeros_of, types))
    return jax.lax.scan(add, start, jnp.arange(num, dtype=jnp.int32))[0]


def _escort(marginal, noise):
    """Returns the weight, of mean 1, that turns a mean of Hessians into that of the rule."""
    alpha = marginal.alpha.astype(noise.dtype)
    return ((3 * alpha - 1) - (alpha - 1) * jnp.square(noise)) / (2 * alpha)


def _wide(tree):
    return jax.tree.map(lambda x: x.astype(_numerics.wide(x.dtype)), tree)


def _mean_of_two(first, second):
    return jax.tree.map(lambda x, y: (x + y) / 2, _wide(first), _wide(second))
