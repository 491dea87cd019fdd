"""The transformation behind denoise and its members."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.denoise import _auto_gain, _query_points
from jaxkit.denoise._state import DenoiseState


def link(
    kind,
    gain,
    *,
    gain_name="gain",
    order=None,
    taus=None,
    gain_scale=1.0,
    probe_length=None,
    trust_radius=None,
    relative_trust_radius=None,
    accumulator_dtype=None,
):
    """Returns the transformation with a :class:`DenoiseState` of ``kind``; checks its numbers.

    ``taus`` are the largest first, scaled to 1. ``gain_scale`` turns the gain as the user gives it
    into the one in the state.
    """
    radii = {"trust_radius": trust_radius, "relative_trust_radius": relative_trust_radius}
    radii = {name: _radius(name, radius) for name, radius in radii.items()}
    _check.floating("accumulator_dtype", accumulator_dtype)
    if gain is not None:
        _check_gain(gain_name, gain)
    is_auto, is_hvp = kind == "auto", kind == "hvp"
    asks_elsewhere = taus is not None or kind in ("disk", "storm")
    has_steps = asks_elsewhere or is_hvp or any(radius is not None for radius in radii.values())

    def described(dtype, next_step):
        """Returns the numbers of the state that ``next_step`` will use."""

        def array(x):
            return None if x is None else jnp.asarray(x, dtype)

        number = gain(next_step) if callable(gain) else gain
        return {
            "gain": None if gain is None else jnp.minimum(array(number) * array(gain_scale), 1),
            "taus": None if taus is None else jnp.stack([array(tau) for tau in taus]),
            "probe_length": array(probe_length),
            **{name: array(radius) for name, radius in radii.items()},
        }

    def init(params):
        _check_not_masked(params)
        params = jax.tree.map(jnp.asarray, params)
        _estimator.check_params(params)
        dtype = _numerics.wide(*(p.dtype for p in jax.tree.leaves(params)))
        step = jnp.zeros([], jnp.int32)

        def zeros(p):
            return _tree.zeros_like(p, accumulator_dtype or _numerics.wide(p.dtype))

        start = described(dtype, step)
        if not is_auto:
            start["gain"] = jnp.ones([], dtype)  # the first gradient counts in full
        return DenoiseState(
            step=step,
            prev_params=jax.tree.map(lambda p: jnp.array(p, copy=True), params)
            if has_steps
            else None,
            estimate=None if is_auto else jax.tree.map(zeros, params),
            noise_variance=jnp.zeros([], dtype),
            auto=jax.tree.map(_auto_gain.init, params) if is_auto else None,
            kind=kind,
            order=order,
            **start,
        )

    def update(
        updates,
        state,
        params=None,
        *,
        queried=None,
        noise_variance=None,
        query_variance=None,
        hvp=None,
        **extra,
    ):
        del extra
        if params is None:
            raise ValueError("params must be given to update, got None.")
        params = jax.tree.map(jnp.asarray, params)
        _query_points.check_like_state(state, params)
        _check.same_types("updates", updates, "params", params, dtypes=False)
        if asks_elsewhere and queried is None:
            raise ValueError(
                "queried must be given to update: ask for gradients at denoise.query_points, or "
                "use denoise.gradient_estimator."
            )
        if is_auto:
            out, auto = _auto_step(updates, state.auto, params, query_variance)
            estimate = None
        else:
            gain, _, _ = _query_points.nodes(state, params)
            drift = _checked_hvp(hvp, params) if is_hvp else None
            out, estimate = _step(updates, state.estimate, gain, drift)
            auto = None
        dtype = state.noise_variance.dtype
        step = optax.safe_increment(state.step)
        known = 0.0 if noise_variance is None else noise_variance
        _check.shape("noise_variance", known, "")
        return out, DenoiseState(
            step=step,
            prev_params=params if has_steps else None,
            estimate=estimate,
            noise_variance=jnp.asarray(known, dtype),
            auto=auto,
            kind=kind,
            order=order,
            **described(dtype, step),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_gain(name, gain):
    if callable(gain):
        return
    if isinstance(gain, jax.Array | np.ndarray):
        _check.shape(name, gain, "")
        return
    if isinstance(gain, numbers.Real) and not 0 < gain <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {gain}.")
    _check.between(name, gain, 0, math.inf)  # that it is a number


def _radius(name, radius):
    """Returns a checked trust radius, None for one that bounds nothing."""
    if radius is None or (isinstance(radius, float) and radius == math.inf):
        return None
    return _check.between(name, radius, 0, math.inf, closed=False)


def _step(updates, estimate, gain, drift):
    """Returns the new estimate, in the dtypes of ``updates`` and of the state."""

    def leaf(u, g, *h):
        dtype = _numerics.wide(u.dtype, g.dtype)
        a = gain.astype(dtype)
        old = sum((x.astype(dtype) for x in h), g.astype(dtype))
        return (1 - a) * old + a * u.astype(dtype)

    new = jax.tree.map(leaf, updates, estimate, *([] if drift is None else [drift]))
    return _estimator.cast_like(new, updates), _estimator.cast_like(new, estimate)


def _auto_step(updates, states, params, query_variance):
    """Returns the estimates, in the dtypes of ``updates``, and the states of all leaves."""
    _query_points.check_whole(params, "gain='auto'")
    if query_variance is None:
        raise ValueError(
            "query_variance must be given to update for gain='auto', that of the noise in each "
            "entry of the gradient: denoise.gradient_estimator measures it."
        )
    leaves, treedef = jax.tree.flatten(updates)
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(query_variance)):
        query_variance = treedef.unflatten([query_variance] * len(leaves))
    numbers_like_params = jax.tree.map(lambda p: jnp.zeros([], p.dtype), params)
    _check.same_types(
        "query_variance", query_variance, "a tree of []", numbers_like_params, dtypes=False
    )
    rows = zip(treedef.flatten_up_to(states), leaves, jax.tree.leaves(query_variance), strict=True)
    pairs = [_auto_gain.update(*row) for row in rows]
    estimates, states = zip(*pairs, strict=True) if pairs else ((), ())
    return _estimator.cast_like(treedef.unflatten(estimates), updates), treedef.unflatten(states)


def _checked_hvp(hvp, params):
    if hvp is None:
        raise ValueError(
            "hvp must be given to update, the Hessian in the middle of the step times the step: "
            "denoise.gradient_estimator makes it."
        )
    _check.same_types("hvp", hvp, "params", params, dtypes=False)
    return hvp


def _check_not_masked(params):
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_tree.is_masked)
    for path, leaf in flat:
        if _tree.is_masked(leaf):
            raise ValueError(
                "params must be whole for a denoiser, whose points move all of them, got a masked "
                f"part at {_tree.path_str(path)}; take it out of optax.masked and partition."
            )
