"""Many steps of training as one compiled scan."""

import functools

import jax

from jaxkit import _check
from jaxkit.train import _state, _step


def fit(step, state, batches, num_steps=None):
    """Trains for many steps in one compiled scan, and returns the state and all metrics.

    It consumes ``state``: the buffers are donated, so the state given cannot be used again (JAX
    says that its buffer was donated). Go on with the one returned. 12 steps and then 8 give the
    same bits as 20. A second call with the same step and the same shapes compiles nothing, also
    if the parameters are sharded: each leaf comes back where it was. (Parameters that no device
    was chosen for, with batches for which one was, compile once more: the state moves to them.)

    Args:
      step: function ``(state, batch) -> (state, metrics)`` from
        :func:`~jaxkit.train.make_step`, static.
      state: :class:`~jaxkit.train.TrainState`, donated.
      batches: tree of arrays with a leading axis of steps; step ``i`` gets ``leaf[i]``. Or None,
        then each step gets None, for a loss that draws or holds its data.
      num_steps: number of steps, static; needed if ``batches`` is None, else it must agree.

    Returns:
      The new state, and the metrics of all steps with a leading axis of steps.

    Raises:
      TypeError: ``step`` is no function, ``state`` not what it takes, ``num_steps`` is missing or
        not a whole number, or a leaf of ``batches`` is not an array.
      ValueError: ``batches`` is empty, its leaves differ in their leading axis, or ``num_steps``
        disagrees with it or is negative.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((params - batch) ** 2) / 2
      >>> tx = optax.sgd(0.5)
      >>> step = train.make_step(train.backprop(loss_fn), tx)
      >>> state = train.create(jnp.array(2.0), tx, jax.random.key(0))
      >>> state, metrics = train.fit(step, state, jnp.zeros((3, 5)))
      >>> print(state.params, metrics["loss"])
      0.25 [2.    0.5   0.125]

    Source: derived here.

    Cost: one compilation a step function and set of shapes; the metrics of all steps in memory.
    """
    state = _step.start(step, state)
    if batches is None and num_steps is None:
        raise TypeError("num_steps must be given if batches is None, got None for both.")
    if num_steps is not None:
        num_steps = _check.count("num_steps", num_steps, minimum=0)
    if batches is not None:
        size = _check.leading_axis("batches", batches)
        if num_steps not in (None, size):
            raise ValueError(
                f"num_steps must be the leading axis of batches, {size}, got {num_steps}."
            )
        num_steps = size
    return _scan(step, state, batches, num_steps, _state.placements(state))


@functools.partial(jax.jit, static_argnums=(0, 3, 4), donate_argnums=1)
def _scan(step, state, batches, num_steps, shardings):
    state, metrics = jax.lax.scan(step, state, batches, length=num_steps)
    return _state.keep_placements(state, shardings), metrics
