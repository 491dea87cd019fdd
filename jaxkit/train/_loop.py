"""The one training loop that runs on the host: log, checkpoints, exact resume, clean stop."""

import collections.abc
import contextlib
import functools
import itertools
import math
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check, _tree
from jaxkit.train import _disk, _host, _state, _step

_NEVER = np.iinfo(np.int32).max
_END = object()


def loop(
    step,
    state,
    batches,
    *,
    num_steps,
    log_every=100,
    checkpoint_dir=None,
    checkpoint_every=None,
    keep=3,
    progress=True,
    eval_fn=None,
    eval_every=None,
    best_metric=None,
    best_mode="min",
):
    """Returns the state after ``num_steps`` steps in all, and the history of the metrics.

    Steps are dispatched without waiting for the device, which is asked only where something is
    logged or saved. With ``checkpoint_dir`` a run that was killed goes on from its newest
    complete checkpoint and ends with the same bits as a run that was not.

    A checkpoint further than ``state`` is resumed from; a ``state`` at least as far is used as
    it is; one that cannot be read is moved aside for the next older one. ``num_steps`` below the
    further of the two is an error, equal to it returns at once. Ctrl-C finishes the running step,
    saves, says so on stderr and returns early (a second one interrupts as usual); SIGTERM
    finishes, saves and raises ``SystemExit(143)``. Both are seen from the main thread only, and
    with several processes at the next step that logs.

    Args:
      step: pure function ``(state, batch) -> (state, metrics)`` with ``metrics["loss"]``, such
        as :func:`~jaxkit.train.make_step` gives. Compiled once, also over several calls, unless
        batches live where the state does not.
      state: :class:`~jaxkit.train.TrainState`. It is consumed: its buffers are donated.
      batches: function of the step's index, a Python int from 0, or an iterable read from its
        start, whose first ``state.step`` items are skipped. What is callable is a function.
      num_steps: total number of steps, with those that ``state`` or a checkpoint has done.
      log_every: a record is made every so many steps, at each evaluation and at the end.
      checkpoint_dir: folder for ``history.jsonl`` and the checkpoints, orbax folders named by
        the number of steps done, with the items ``layout`` (path, shape and dtype of each leaf)
        and ``state`` (the leaves that are not empty, keys as key data). Made if absent; on disk
        or mounted. None saves nothing.
      checkpoint_every: steps from one checkpoint to the next; None saves only where the run
        stops. Written in the background.
      keep: how many of the last checkpoints stay.
      progress: whether process 0 draws a progress bar on stderr, if that is a terminal.
      eval_fn: function ``state -> dict`` of real scalars that joins the record. It must not
        keep or donate the state.
      eval_every: steps from one evaluation to the next; None evaluates at the end only.
      best_metric: name in the records. Each record that improves on it is saved at once, and
        the best one stays beside the ``keep`` last.
      best_mode: ``"min"`` or ``"max"``, what best means for ``best_metric``.

    Returns:
      ``(state, history)``. A record is a dict: ``"step"``, the number of steps done (int), and
      each real scalar in ``metrics`` (nested names joined by ``/``) or from ``eval_fn`` as a
      float; arrays are left out. ``history.jsonl`` holds the same, one JSON object a line, with
      the strings ``"nan"``, ``"inf"`` and ``"-inf"``; on resume both begin with the old records.

    Raises:
      FloatingPointError: the loss of a step is not finite (the message has its index), or the
        parameters to be saved are not. Such a state and later ones are never saved.
      ValueError: an option is out of range or lacks its partner, ``state`` is a batch of states,
        the metrics lack ``"loss"``, ``checkpoint_dir`` cannot be written, lacks room for the state
        or holds another model (the first differing leaf is named) or nothing readable, an iterable
        ends early (after a last checkpoint), or names in a record collide.
      ConnectionError: another process has stopped. JAX then ends this one too, at the latest after
        the ``heartbeat_timeout_seconds`` of ``jax.distributed.initialize``.
      TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import train
      >>> tx = optax.sgd(0.5)
      >>> step = train.make_step(train.backprop(lambda w, x, key: jnp.sum((w - x) ** 2) / 2), tx)
      >>> state = train.create(jnp.zeros(2), tx, jax.random.key(0))
      >>> state, history = train.loop(step, state, lambda i: jnp.ones(2), num_steps=2, log_every=1)
      >>> print(state.params, history)
      [0.75 0.75] [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 0.25}]

    Source: derived here.

    Cost: one dispatch a step; one wait for the device a record; a checkpoint copies the state to
    the host and writes it while training goes on.
    """
    _check_kinds(step, state, batches, eval_fn)
    state = _tree.strong(_step.start(step, state))
    _check.count("num_steps", num_steps, minimum=0)
    _check.count("log_every", log_every)
    _check.count("keep", keep)
    _check.choice("best_mode", best_mode, ("min", "max"))
    _check_partner("checkpoint_every", checkpoint_every, "checkpoint_dir", checkpoint_dir)
    _check_partner("eval_every", eval_every, "eval_fn", eval_fn)
    _check_partner("best_metric", best_metric, "checkpoint_dir", checkpoint_dir)
    _check.count("checkpoint_every", 1 if checkpoint_every is None else checkpoint_every)
    _check.count("eval_every", 1 if eval_every is None else eval_every)

    history, log, manager, best, stop = [], None, None, math.inf, 0

    def score(record):  # the lowest is the best; what lacks the metric never is
        sign = 1 if best_mode == "min" else -1
        return sign * record[best_metric] if best_metric in record else math.inf

    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(_host.signals())
        if checkpoint_dir is not None:
            folder = _disk.writable(checkpoint_dir, state)
            manager = stack.enter_context(_disk.open_manager(folder, keep, best_metric and score))
            state = _disk.restore(manager, state)
            best = _disk.best_score(manager, score)
        stack.enter_context(_host.company())
        done = int(state.step)
        if num_steps < done:
            raise ValueError(f"num_steps must be at least the {done} steps done, got {num_steps}.")
        if manager is not None:
            history = _disk.read_history(folder, done)
            if jax.process_index() == 0:
                log = stack.enter_context(_disk.open_history(folder, history))
        show = stack.enter_context(_host.progress_bar(done, num_steps, progress))
        if callable(batches):
            items = map(batches, range(done, num_steps))
        else:
            items = itertools.islice(batches, done, None)
        # Computed from the step to lie where the step lies: else the second call compiles again.
        first_bad = state.step * 0 + _NEVER
        placements = _state.placements((state, first_bad))
        while done < num_steps and not stop:
            batch = next(items, _END)
            if batch is _END:
                _check_losses(first_bad)
                if manager is not None:
                    _disk.save(manager, done, state, {})
                raise ValueError(f"batches must last for num_steps={num_steps}, got {done} items.")
            state, metrics, first_bad = _advance(step, state, batch, first_bad, placements)
            done += 1
            last, save, improved = done == num_steps, _divides(checkpoint_every, done), {}
            evaluate = eval_fn is not None and (last or _divides(eval_every, done))
            due = last or evaluate or done % log_every == 0
            stop = _host.agreed(caught, due)
            if due or save or stop:
                _check_losses(first_bad)
            if due:
                record = _record(done, metrics, eval_fn(state) if evaluate else {})
                if best_metric is not None and (evaluate or eval_fn is None):
                    _check.choice("best_metric", best_metric, tuple(record)[1:])
                if score(record) < best:
                    best, improved = score(record), {best_metric: record[best_metric]}
                history.append(record)
                if log is not None:
                    print(_disk.line(record), end="", file=log, flush=True)
            show(done, record["loss"] if due else None)
            if manager is not None and (last or save or stop or improved):
                _disk.save(manager, done, state, improved)
    if signal.SIGTERM in (stop, *caught):  # also one that came during the last write
        raise SystemExit(128 + signal.SIGTERM)
    if done < num_steps and jax.process_index() == 0:
        where = "not saved" if manager is None else f"saved in {folder}"
        print(f"Interrupted after step {done} of {num_steps}, {where}.", file=sys.stderr)
    return state, history


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
def _advance(step, state, batch, first_bad, placements):
    """Does one step and keeps the index of the first whose loss is not finite."""
    index = state.step
    state, metrics = step(state, batch)
    if not isinstance(metrics, dict) or "loss" not in metrics:
        got = sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__
        raise ValueError(f"step must return metrics with 'loss', got {got}.")
    bad = jnp.where(jnp.isfinite(metrics["loss"]), _NEVER, index)
    carry = _tree.strong(state), jnp.minimum(first_bad, bad)
    state, first_bad = _state.keep_placements(carry, placements)
    return state, metrics, first_bad


def _check_losses(first_bad):
    if int(first_bad) != _NEVER:
        raise FloatingPointError(f"The loss of step {int(first_bad)} (from 0) is not finite.")


def _check_kinds(step, state, batches, eval_fn):
    _check.function("step", step)
    if not isinstance(state, _state.TrainState):
        raise TypeError(f"state must be a TrainState, got {type(state).__name__}.")
    _check.shape("state.step", state.step, "")
    # A dict of stacked batches, as fit takes, would be read as its names.
    is_dict = isinstance(batches, collections.abc.Mapping)
    if not callable(batches) and (is_dict or not isinstance(batches, collections.abc.Iterable)):
        raise TypeError(
            f"batches must be a function of the step or an iterable, got {type(batches).__name__}."
        )
    if eval_fn is not None:
        _check.function("eval_fn", eval_fn)


def _check_partner(name, value, other, partner):
    if value is not None and partner is None:
        raise ValueError(f"{name} must be None without {other}, got {value!r}.")


def _divides(every, done):
    return every is not None and done % every == 0


def _record(done, metrics, evaluated):
    """Returns the record after ``done`` steps: its number and all scalars, as Python floats."""
    record = {"step": done}
    scalars = _scalars(evaluated)
    if not isinstance(evaluated, dict):
        raise TypeError(f"eval_fn must return a dict, got {type(evaluated).__name__}.")
    if odd := sorted(map(str, evaluated.keys() - scalars.keys())):
        raise TypeError(f"eval_fn must return real scalars only, got others at {odd}.")
    for name, values in (("metrics", _scalars(metrics)), ("eval_fn", scalars)):
        if clash := sorted(record.keys() & values.keys()):
            raise ValueError(f"{name} must not use names that the record has, got {clash}.")
        record.update(values)
    return record


def _scalars(tree):
    flat = {path: x for path, x in _tree.leaves_with_paths(tree) if np.ndim(x) == 0}
    flat = {path: x for path, x in flat.items() if _is_real(x)}
    return {path: float(x) for path, x in jax.device_get(flat).items()}


def _is_real(x):
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
