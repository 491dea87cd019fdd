"""Reads a checkpoint that the loop has written, such as its best one."""

import pathlib

from jaxkit import _check
from jaxkit.train import _disk, _state


def restore(checkpoint_dir, state, *, num_steps=None):
    """Returns the state after ``num_steps`` steps, from the checkpoints of :func:`loop`.

    Which checkpoint is the best stands in the history, of which the loop keeps the best by
    ``best_metric``. To go on with training, call the loop: it restores the newest by itself.

    Args:
      checkpoint_dir: folder that :func:`~jaxkit.train.loop` was given.
      state: :class:`~jaxkit.train.TrainState` of the same model, with ``ema_params`` if the saved
        one has them. Its values do not matter. It is consumed: its buffers are freed.
      num_steps: number of steps done, which names the checkpoint; None takes the newest.

    Returns:
      :class:`~jaxkit.train.TrainState` with the shardings of ``state``.

    Raises:
      ValueError: the folder holds no checkpoint of that number, none that can be read, or one of
        another model (the first differing leaf is named).
      TypeError: ``state`` is no TrainState.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> from jaxkit import train
      >>> tx = optax.sgd(1.0)
      >>> step = train.make_step(train.backprop(lambda w, x, key: w), tx)
      >>> new = lambda: train.create(jnp.float32(3), tx, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     done = train.loop(step, new(), jnp.ones, num_steps=2, checkpoint_dir=folder)
      ...     print(train.restore(folder, new(), num_steps=2).params)
      1.0

    Source: derived here; files by orbax-checkpoint.

    Cost: reads one checkpoint; no other is touched.
    """
    if not isinstance(state, _state.TrainState):
        raise TypeError(f"state must be a TrainState, got {type(state).__name__}.")
    folder = pathlib.Path(checkpoint_dir).absolute()
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir must be a folder that exists, got {str(folder)!r}.")
    with _disk.open_manager(folder, None, None) as manager:
        known = sorted(manager.all_steps())
        number = max(known, default=None) if num_steps is None else num_steps
        if num_steps is not None:
            _check.count("num_steps", num_steps, minimum=0)
        if number not in known:
            raise ValueError(
                f"num_steps must be one of the checkpoints {known} in {str(folder)!r}, "
                f"got {num_steps}."
            )
        return _disk.restore(manager, state, [number])
