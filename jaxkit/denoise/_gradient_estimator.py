"""Gradients at the query points of a denoiser, as an estimator."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _slices
from jaxkit.denoise import _combine, _query_points
from jaxkit.denoise._state import DenoiseState


def gradient_estimator(inner, *, value_at_params=False, num_parts=None):
    """Returns the estimator that asks ``inner`` where the denoiser in ``opt_state`` wants it.

    All points are asked with the same key and the same batch, and combined in float32 or wider.
    What the update needs beside the gradient goes into ``extras``: ``queried``; for :func:`hvp`
    the product of that name, the derivative of the gradient of ``inner`` in the middle of the last
    step; for ``gain="auto"`` the ``query_variance`` of each leaf, from how far the gradients of
    parts of the batch lie apart.

    Inside ``jax.shard_map`` let the loss function take the mean over devices, ``jax.lax.pmean``.

    Args:
      inner: estimator ``(key, params, opt_state, batch) -> Estimate``: ``train.backprop``,
        ``zo.gradient_estimator``, ``blr.gradient_estimator``, or ``train.accumulate`` of one.
      value_at_params: whether ``value`` is the loss at the parameters, by one more forward pass
        where they are no query point, static; else it is combined as the gradient is, and while
        training moves fast lower than that.
      num_parts: for ``gain="auto"`` only, parts of the batch, static, at least 2: every
        ``num_parts``-th example is one. None: 2.

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``. ``aux`` and the model state are
      those of the first evaluation. It hands ``key`` on as it is, but splits it for
      ``random_node``, and folds the index of the part into it for "auto".

    Raises:
      TypeError: ``inner`` is no function, or ``num_parts`` not a whole number.
      ValueError: ``inner`` is private or ``num_parts`` below 2; or, when called, ``opt_state``
        holds no :class:`DenoiseState`, or several, or an outer estimator uses it already; the
        batch does not divide by ``num_parts``, or that is given for another gain; ``inner`` gives
        one of these extras too; or as :func:`query_points`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise, train
      >>> inner = train.backprop(lambda params, batch, key: jnp.mean(params * batch))
      >>> tx = denoise.denoise(0.2)
      >>> estimator = denoise.gradient_estimator(inner)
      >>> params = jnp.array(2.0)
      >>> estimate = estimator(jax.random.key(0), params, tx.init(params), jnp.array([1.0, 5.0]))
      >>> print(estimate.value, estimate.grads, estimate.extras)
      6.0 3.0 {'queried': Array(1., dtype=float32)}

    Source: arXiv:1906.03532, arXiv:2002.03305. Derived here: its form, and "auto".

    Cost: ``inner`` at each query point, traced once: at one point called directly, at more in a
    scan with the memory of one. :func:`hvp`: one gradient and one Hessian-vector product.
    """
    _estimator.check_inner("denoise.gradient_estimator", inner)
    if num_parts is not None:
        num_parts = _check.count("num_parts", num_parts, minimum=2)
    inner = jax.jit(inner)

    def estimator(key, params, opt_state, batch):
        state = _estimator.find_state(opt_state, DenoiseState)
        _query_points.check_like_state(state, params)
        hidden = _estimator.hide(opt_state, DenoiseState)
        if state.kind == "auto":
            return _with_variance(inner, key, params, hidden, batch, num_parts or 2)
        if num_parts is not None:
            raise ValueError(f"num_parts must be None unless gain='auto', got {num_parts}.")
        own_key = None
        if state.kind == "random":
            own_key, key = jax.random.split(key)
        plan = _query_points.plan_query(state, params, own_key)

        def evaluate(point):
            value, grads, aux, extras = inner(key, point, hidden, batch)
            return (value, grads, extras), (aux, value)

        (value, grads, extras), (aux, first) = _combine.combined(
            evaluate, lambda j: plan.point(plan.s[j]), plan.weights
        )
        if value_at_params:
            # Without taus the first point is there; else XLA leaves the backward pass out.
            value = first if state.taus is None else inner(key, params, hidden, batch).value
        own = {"queried": jnp.ones([], jnp.float32)}
        if state.kind == "hvp":
            own["hvp"] = _product(lambda at: inner(key, at, hidden, batch).grads, state, params)
        return _estimator.Estimate(value, grads, aux, _with_own(extras, own))

    return estimator


def _with_variance(inner, key, params, hidden, batch, num):
    """Returns the mean over parts of the batch, with the variance of an entry of the gradient."""
    (value, grads, aux, extras), squares = _slices.mean(
        inner, key, params, hidden, batch, num=num, name="num_parts", spread=True
    )
    own = {
        "queried": jnp.ones([], jnp.float32),
        "query_variance": jax.tree.map(
            lambda s, g: s / (num * (num - 1) * max(g.size, 1)), squares, grads
        ),
    }
    return _estimator.Estimate(value, grads, aux, _with_own(extras, own))


def _product(grads_at, state, params):
    """Returns the Hessian in the middle of the last step times the step."""
    steps = _query_points.steps(state, params)
    middle = jax.tree.map(lambda p, d: (p.astype(d.dtype) - d / 2).astype(p.dtype), params, steps)
    return jax.jvp(grads_at, (middle,), (_estimator.cast_like(steps, params),))[1]


def _with_own(extras, own):
    if taken := sorted(own.keys() & extras.keys()):
        raise ValueError(f"inner must leave the extra {taken[0]!r} to this estimator, got one.")
    return {**extras, **own}
