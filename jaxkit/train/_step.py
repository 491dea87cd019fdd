"""One step of training: an estimator joined to an optimizer."""

import weakref

import jax
import jax.numpy as jnp
import optax

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.train._state import TrainState

# A step lives as long as somebody holds it, among them JAX's caches of compiled functions. So
# the same parts give the same step as long as anything is compiled for it, and then go.
_STEPS = weakref.WeakValueDictionary()


def make_step(estimator, tx, *, ema_decay=None):
    """Returns the function ``(state, batch) -> (state, metrics)`` that trains for one step.

    The step asks ``estimator`` for a gradient with the key ``fold_in(state.key, state.step)``,
    hands it to ``tx`` together with ``value`` (the loss) and the estimator's extras, and applies
    the update. It is pure and not jitted: give it to :func:`~jaxkit.train.fit` or
    ``train.loop``, or write ``jax.jit(step, donate_argnums=0)`` in a loop of your own. The same
    arguments give the same function, so making it again compiles nothing.

    ``metrics`` is ``{"loss": value, **aux}`` if the loss function returned a dict beside the
    loss, ``{"loss": value, "aux": aux}`` if something else, ``{"loss": value}`` if nothing.

    To accumulate gradients over slices of a batch, wrap the estimator in
    :func:`~jaxkit.train.accumulate`. ``optax.MultiSteps`` works as ``tx`` too, but of value and
    extras the wrapped optimizer sees those of the last slice only, and inside ``optax.chain`` none.

    Args:
      estimator: gradient estimator, e.g. ``train.backprop(loss_fn)``; hashable.
      tx: optax transformation, or ``optax.MultiSteps``. Not one that calls the loss itself.
      ema_decay: decay ``d`` in [0, 1) of the weight average ``ema <- d ema + (1 - d) params``
        after each update, static, or None for no average. The average starts from the
        parameters that the first step is given; in a loop of your own that step compiles alone,
        since its state has no average yet.

    Returns:
      Function ``(state, batch) -> (state, metrics)``. ``state`` is a
      :class:`~jaxkit.train.TrainState`, ``batch`` what the loss function takes.

    Raises:
      TypeError: ``estimator`` is no function, ``tx`` no transformation, one of them not hashable,
        ``ema_decay`` no number; or, when called, an entry of ``extras`` is not floating.
      ValueError: ``ema_decay`` is out of range; or, when called, ``aux`` holds "loss", ``extras``
        holds "value", the model state in ``aux`` is not like the one in ``state``, or ``state``
        has an average and the step has none.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((params - batch) ** 2) / 2
      >>> tx = optax.sgd(0.5)
      >>> step = train.make_step(train.backprop(loss_fn), tx)
      >>> state = train.create(jnp.array(2.0), tx, jax.random.key(0))
      >>> state, metrics = jax.jit(step)(state, jnp.array([0.0, 0.0]))
      >>> print(state.step, state.params, metrics["loss"])
      1 1.0 2.0

    Source: derived here.

    Cost: one estimate and one update.
    """
    _check.function("estimator", estimator)
    _check.transformation("tx", tx)
    if ema_decay is not None:
        ema_decay = float(_check.between("ema_decay", ema_decay, 0, 1))
    parts = estimator, tx, ema_decay
    # Transformations are tuples: two kinds of them with the same functions are equal.
    known = *parts, type(tx)
    try:
        hash(known)
    except TypeError as error:
        raise TypeError(f"estimator and tx must be hashable, got {error}.") from error
    step = _STEPS.get(known)
    if step is None:
        step = _STEPS[known] = _make_step(*parts)
    return step


def start(step, state):
    """Returns ``state`` as ``step`` returns it: with a weight average if the step keeps one."""
    _check.function("step", step)
    return getattr(step, "start", lambda state: state)(state)


def _make_step(estimator, tx, ema_decay):
    # MultiSteps passes extras on itself, and is not a transformation that optax could wrap.
    is_multi = isinstance(tx, optax.MultiSteps)
    update = tx.update if is_multi else optax.with_extra_args_support(tx).update

    def start(state):
        if not isinstance(state, TrainState):
            raise TypeError(f"state must be a TrainState, got {type(state).__name__}.")
        if ema_decay is None:
            if state.ema_params is not None:
                raise ValueError(
                    "state must have no ema_params for a step without ema_decay, got some."
                )
            return state
        if state.ema_params is not None:
            return state
        copies = jax.tree.map(
            lambda x: jnp.array(x, _numerics.wide(x.dtype), copy=True), state.params
        )
        return state._replace(ema_params=copies)

    def step(state, batch):
        state = start(state)
        if state.model_state is not None:
            batch = _estimator.Stateful(state.model_state, batch)
        key = jax.random.fold_in(state.key, state.step)
        value, grads, aux, extras = estimator(key, state.params, state.opt_state, batch)
        model_state, aux = _estimator.split_model_state(aux, state.model_state)
        metrics = _metrics(value, aux)
        _check_extras(extras)
        updates, opt_state = update(grads, state.opt_state, state.params, value=value, **extras)
        params = optax.apply_updates(state.params, updates)
        ema_params = state.ema_params
        if ema_decay is not None:
            ema_params = jax.tree.map(
                lambda e, p: ema_decay * e + (1 - ema_decay) * p.astype(e.dtype),
                ema_params,
                params,
            )
        state = state._replace(
            step=optax.safe_increment(state.step),
            params=params,
            opt_state=_tree.strong(opt_state),
            model_state=model_state,
            ema_params=ema_params,
        )
        return state, metrics

    step.start = start
    return step


def _metrics(value, aux):
    if aux is None:
        return {"loss": value}
    _check.arrays("aux", aux)
    if not isinstance(aux, dict):
        return {"loss": value, "aux": aux}
    if "loss" in aux:
        raise ValueError("aux must not hold 'loss', the name of the metric of the loss, got one.")
    return {"loss": value, **aux}


def _check_extras(extras):
    if "value" in extras:
        raise ValueError("extras must not hold 'value', which the step sets, got one.")
    _check.arrays("extras", extras)
    for path, leaf in _tree.leaves_with_paths(extras):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"extras must be floating, got {jnp.result_type(leaf)} at {path}.")
