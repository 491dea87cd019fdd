"""Gradients of a large batch as the mean over slices that fit into memory."""

import jax

from jaxkit import _check, _estimator, _slices


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
      ValueError: ``inner`` is private, or ``num_micro`` below 1; or, when called, ``inner``
        measures a variance, as under ``gain="auto"``, the batch holds no array, its leaves
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
    _estimator.check_inner("train.accumulate", inner)
    num_micro = _check.count("num_micro", num_micro)
    inner = jax.jit(inner)

    def estimator(key, params, opt_state, batch):
        estimate, _ = _slices.mean(
            inner, key, params, opt_state, batch, num=num_micro, name="num_micro"
        )
        if "query_variance" in estimate.extras:
            # The mean over slices is not the variance of their mean.
            raise ValueError(
                "inner must not measure the variance of a gradient, got the extra "
                "'query_variance'; give denoise.gradient_estimator num_parts instead."
            )
        return estimate

    return estimator
