"""Gradients of a large batch as the mean over slices that fit into memory."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator


def accumulate(inner, num_micro):
    """Returns the estimator that means ``inner`` over ``num_micro`` slices of the batch.

    For a loss that is a mean over examples the result is the estimate of the whole batch, with
    the activations of one slice in memory at a time. Slice ``i`` holds the examples ``i``,
    ``i + num_micro``, ``i + 2 * num_micro``, ..., so a batch that is sharded over devices is
    sliced without any exchange: each device keeps its examples, as long as the examples per
    slice still divide by the devices. The key of slice ``i`` is ``fold_in(key, i)``.

    Gradients, value and extras are summed in float32 or wider and cast back. ``aux`` is that of
    the first slice. If the model carries a state, it passes through the slices in order, and
    ``aux["model_state"]`` is that of the last.

    Args:
      inner: estimator ``(key, params, opt_state, batch) -> Estimate``.
      num_micro: number of slices, static, at least 1.

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``.

    Raises:
      TypeError: ``inner`` is no function, or ``num_micro`` not a whole number.
      ValueError: ``num_micro`` is below 1; or, when called, the batch holds no array, its leaves
        differ in their leading axis, or that does not divide by ``num_micro``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean(params * batch)
      >>> estimator = train.accumulate(train.backprop(loss_fn), 2)
      >>> estimate = estimator(jax.random.key(0), jnp.array(3.0), (), jnp.arange(4.0))
      >>> print(estimate.value, estimate.grads)
      4.5 1.5

    Source: gradient accumulation, the known technique.

    Cost: ``num_micro`` calls of ``inner`` in a scan (traced once), each on ``1 / num_micro`` of
    the batch; one copy of the gradient and extras in float32.
    """
    _check.function("inner", inner)
    num_micro = _check.count("num_micro", num_micro)
    # As a jitted function, `inner` is traced once: for its types, which the scan then reuses.
    inner = jax.jit(inner)

    def estimator(key, params, opt_state, batch):
        stateful = isinstance(batch, _estimator.Stateful)
        model_state, examples = batch if stateful else (None, batch)
        strided = _strided(examples, num_micro)

        def evaluate(index, model_state):
            """Returns (value, grads, extras), aux and model state of slice ``index``."""
            micro = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), strided
            )
            if stateful:
                micro = _estimator.Stateful(model_state, micro)
            estimate = inner(jax.random.fold_in(key, index), params, opt_state, micro)
            aux = estimate.aux
            if stateful:
                model_state, aux = _estimator.split_model_state(aux, model_state)
            return (estimate.value, estimate.grads, estimate.extras), aux, model_state

        def add(carry, index):
            total, first_aux, model_state = carry
            linear, aux, model_state = evaluate(index, model_state)
            total = _estimator.add_scaled(total, 1.0, linear)
            first_aux = jax.tree.map(
                lambda new, old: jnp.where(index == 0, new, old), aux, first_aux
            )
            return (total, first_aux, model_state), None

        linear, aux, _ = jax.eval_shape(lambda: evaluate(jnp.int32(0), model_state))
        start = _estimator.wide_zeros(linear), jax.tree.map(_estimator.zeros_of, aux), model_state
        carry, _ = jax.lax.scan(add, start, jnp.arange(num_micro, dtype=jnp.int32))
        total, aux, model_state = carry
        mean = jax.tree.map(lambda x: x / num_micro, total)
        value, grads, extras = _estimator.cast_like(mean, linear)
        if stateful:
            aux = {**aux, "model_state": model_state}
        return _estimator.Estimate(value, grads, aux, extras)

    return estimator


def _strided(examples, num_micro):
    """Returns leaves ``[B / num_micro, num_micro, ...]``: slice ``i`` is ``[:, i]``."""
    size = _check.leading_axis("batch", examples)
    if size % num_micro:
        raise ValueError(
            f"batch must have a leading axis that divides by num_micro={num_micro}, got {size}."
        )
    return jax.tree.map(
        lambda x: jnp.reshape(x, (size // num_micro, num_micro, *jnp.shape(x)[1:])), examples
    )
