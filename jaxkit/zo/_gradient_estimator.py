"""The gradient from evaluations of the loss alone, as an estimator."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator
from jaxkit.zo._directions import gaussian
from jaxkit.zo._value_and_zo_grad import value_and_zo_grad


def gradient_estimator(
    loss_fn,
    *,
    num_samples=1,
    mu=None,
    direction=gaussian(),  # noqa: B008
    per_example=False,
    mode="two_sided",
    aggregate="mean",
    batch="map",
    skip_nonfinite=False,
    axis_name=None,
    axis_directions="same",
):
    """Returns the estimator that evaluates ``loss_fn`` and never differentiates it.

    Every call of one estimate gets the same batch and key, and the same model state if the model
    carries one; ``aux``, and with it the new model state, is that of the first call. To change
    ``mu`` while training, make the estimator inside one of your own, which costs nothing. The
    options are those of :func:`value_and_zo_grad`, which explains them.

    Args:
      loss_fn: function ``(params, batch, key)`` that returns the loss, ``[]`` real floating, or
        the tuple ``(loss, aux)``; as of :func:`~jaxkit.train.backprop`.
      num_samples: number of directions, static.
      mu: radius of the perturbation; None for 1e-3, and 1e-2 for :func:`node`.
      direction: kind of the directions, or :func:`node`.
      per_example: whether the loss is ``[B]``, one for each example; the value is their mean.
      mode: "two_sided", "one_sided", "jvp" or "coordinate".
      aggregate: "mean", "project" or "rloo".
      batch: "map" or "vmap".
      skip_nonfinite: whether a slope that is not finite counts as zero.
      axis_name: axes of devices inside ``jax.shard_map``, or None.
      axis_directions: whether all devices try the "same" directions, or each its "own".

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``. It splits ``key`` into one for its
      directions and one for ``loss_fn``, and ignores ``opt_state``; ``value`` is the mean loss over
      the calls (at ``params`` for "one_sided" and "jvp"), ``extras`` is empty.

    Raises:
      TypeError, ValueError: as :func:`value_and_zo_grad`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((batch @ params) ** 2) / 2
      >>> estimator = zo.gradient_estimator(loss_fn, mode="coordinate", mu=0.1)
      >>> print(estimator(jax.random.key(0), jnp.array([1.0, 2.0]), (), jnp.eye(2)).grads.round(3))
      [0.5 1. ]

    Source: arXiv:2305.17333.

    Cost: as :func:`value_and_zo_grad`.
    """
    _check.function("loss_fn", loss_fn)

    def pair(params, batch, key):
        return _estimator.split_loss(loss_fn(params, batch, key), per_example=per_example)

    run = value_and_zo_grad(
        pair,
        has_aux=True,
        num_samples=num_samples,
        mu=mu,
        direction=direction,
        mode=mode,
        aggregate=aggregate,
        batch=batch,
        per_example=per_example,
        skip_nonfinite=skip_nonfinite,
        axis_name=axis_name,
        axis_directions=axis_directions,
    )

    def estimator(key, params, opt_state, batch):
        del opt_state
        own_key, loss_key = jax.random.split(key)
        (value, aux), grads = run(own_key, params, batch, loss_key)
        return _estimator.Estimate(jnp.asarray(value, jnp.float32), grads, aux, {})

    return estimator
