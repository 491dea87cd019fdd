"""Estimates of a large batch as means over interleaved slices of it."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator


def strided(examples, num, name):
    """Returns leaves ``[B / num, num, ...]``, of which slice ``i`` is ``[:, i]``."""
    size = _check.leading_axis("batch", examples)
    if size % num:
        raise ValueError(
            f"batch must have a leading axis that divides by {name}={num}, got {size}."
        )
    return jax.tree.map(lambda x: jnp.reshape(x, (size // num, num, *jnp.shape(x)[1:])), examples)


def pick(slices, index):
    """Returns slice ``index`` of what :func:`strided` returned."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), slices
    )


def mean(inner, key, params, opt_state, batch, *, num, name, spread=False):
    """Returns the mean estimate of ``inner`` over slices, and what the gradients differ by.

    Slice ``i`` has the key ``fold_in(key, i)``; a model state passes through the slices in order.
    ``inner`` is a jitted function, so that it is traced once, for its types, which the scan then
    reuses. The second result is None, or with ``spread`` the sum over slices of the squared
    distance of their gradient to the mean, ``[]`` for each leaf. ``name`` of ``num`` is for errors.
    """
    stateful = isinstance(batch, _estimator.Stateful)
    model_state, examples = batch if stateful else (None, batch)
    slices = strided(examples, num, name)

    def evaluate(index, model_state):
        """Returns (value, grads, extras), aux and model state of slice ``index``."""
        micro = pick(slices, index)
        if stateful:
            micro = _estimator.Stateful(model_state, micro)
        estimate = inner(jax.random.fold_in(key, index), params, opt_state, micro)
        aux = estimate.aux
        if stateful:
            model_state, aux = _estimator.split_model_state(aux, model_state)
        return (estimate.value, estimate.grads, estimate.extras), aux, model_state

    def add(carry, index):
        total, first_aux, model_state, squares = carry
        linear, aux, model_state = evaluate(index, model_state)
        if spread:
            squares = jax.tree.map(
                lambda s, t, y: s + _distance(index, t, y), squares, total[1], linear[1]
            )
        total = _estimator.add_scaled(total, 1.0, linear)
        first_aux = jax.tree.map(lambda new, old: jnp.where(index == 0, new, old), aux, first_aux)
        return (total, first_aux, model_state, squares), None

    linear, aux, _ = jax.eval_shape(lambda: evaluate(jnp.int32(0), model_state))
    squares = None
    if spread:
        types = jax.eval_shape(lambda grads: jax.tree.map(jnp.sum, grads), linear[1])
        squares = _estimator.wide_zeros(types)
    start = _estimator.wide_zeros(linear), jax.tree.map(_estimator.zeros_of, aux)
    start = *start, model_state, squares
    carry, _ = jax.lax.scan(add, start, jnp.arange(num, dtype=jnp.int32))
    total, aux, model_state, squares = carry
    value, grads, extras = _estimator.cast_like(jax.tree.map(lambda x: x / num, total), linear)
    if stateful:
        aux = {**aux, "model_state": model_state}
    return _estimator.Estimate(value, grads, aux, extras), squares


def _distance(index, total, y):
    """Returns by how much the sum of squared distances to the mean grows with ``y``."""
    # As differences to the mean so far: their squares do not cancel, those of gradients would.
    done = index.astype(total.dtype)
    before = total / jnp.maximum(done, 1)
    return done / (done + 1) * jnp.sum(jnp.square(y.astype(total.dtype) - before))
