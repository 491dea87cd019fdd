"""The gradient by reverse-mode differentiation, as an estimator."""

import jax

from jaxkit import _check, _estimator


def backprop(loss_fn):
    """Returns the estimator that differentiates ``loss_fn`` exactly.

    Args:
      loss_fn: function ``(params, batch, key)`` that returns the loss, ``[]`` real floating, or
        the tuple ``(loss, aux)`` with ``aux`` a tree of arrays. Its ``batch`` is what the step
        is given: a tree of arrays with a leading axis of examples, inside a
        :class:`~jaxkit.train.Stateful` if the model carries a state.

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``. It hands ``key`` to ``loss_fn``
      and ignores ``opt_state``; ``extras`` is empty.

    Raises:
      TypeError: ``loss_fn`` is no function; or, when called, a leaf of ``params`` is not real
        floating, ``loss_fn`` returns anything else than the above, or a leaf of ``aux`` is not an
        array.
      ValueError: when called, if the loss is not a scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((batch @ params) ** 2) / 2
      >>> estimator = train.backprop(loss_fn)
      >>> print(estimator(jax.random.key(0), jnp.array([1.0, 2.0]), (), jnp.eye(2)).grads)
      [0.5 1. ]

    Source: reverse-mode differentiation, ``jax.value_and_grad``.

    Cost: one forward and one backward pass.
    """
    _check.function("loss_fn", loss_fn)

    def estimator(key, params, opt_state, batch):
        del opt_state
        _estimator.check_params(params)

        def loss(params):
            return _estimator.call_loss(loss_fn, params, batch, key)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return _estimator.Estimate(value, grads, aux, {})

    return estimator
