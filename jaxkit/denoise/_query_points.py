"""Where a denoiser wants the next gradients, read from its state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.denoise import _auto_gain, _line
from jaxkit.denoise._state import DenoiseState


def query_points(opt_state, params, key=None):
    r"""Returns the points at which to ask for gradients, and the weights to combine them with.

    The update of a denoiser takes the one combination
    :math:`u = \sum_j weights_j \, y(points_j)` of the gradients y; :func:`combine` computes it.
    Ask all points with the same key and the same batch.

    Args:
      opt_state: state that holds one :class:`DenoiseState`, at any depth, as of ``optax.chain``.
      params: the parameters, a tree of real floating arrays.
      key: typed random key, for ``random_node`` only.

    Returns:
      The pair ``(points, weights)``: a tree like ``params`` with a leading axis ``[q]`` in every
      leaf, in the dtypes of ``params``, and weights ``[q]`` float32 or wider. They sum to 1; the
      only one of ``random_node`` has that mean.

    Raises:
      TypeError: a leaf of ``params`` is not real floating.
      ValueError: ``opt_state`` holds no :class:`DenoiseState` or several, or ``params`` are not
        like those it was made for; ``key`` is missing or not wanted; or a trust radius would see a
        shard of a leaf only.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx = denoise.denoise(0.5)
      >>> state = tx.init(jnp.array(1.0))
      >>> _, state = tx.update(jnp.array(1.0), state, jnp.array(1.0), queried=True)
      >>> points, weights = denoise.query_points(state, jnp.array(3.0))  # d = 2, s = 1 / 0.5
      >>> print(points, weights)
      [5.] [1.]

    Source: arXiv:1906.03532 and arXiv:2002.03305 for one node. Derived here: several nodes, and
    the trust radius.

    Cost: elementwise; q copies of the parameters.
    """
    state = _estimator.find_state(opt_state, DenoiseState)
    check_like_state(state, params)
    plan = plan_query(state, params, key)
    return jax.vmap(plan.point)(plan.s), plan.weights


class Plan(NamedTuple):
    """One query: nodes, weights and the gain with which the update takes their combination."""

    gain: jax.Array  # [], of the update, None for kind "auto"
    s: jax.Array  # [q]
    weights: jax.Array  # [q]
    params: object
    steps: object  # params - prev_params in float32 or wider, or None: all nodes are at params

    def point(self, s):
        """Returns the point at ``s`` on the line, ``params`` bit for bit at 1."""
        if self.steps is None:
            return self.params
        return jax.tree.map(
            lambda p, d: (p.astype(d.dtype) + (s - 1).astype(d.dtype) * d).astype(p.dtype),
            self.params,
            self.steps,
        )


def plan_query(state, params, key=None):
    """Returns the :class:`Plan` of the next query; ``key`` for kind "random" only."""
    if (key is None) == (state.kind == "random"):
        want, got = ("a key", "None") if key is None else ("None", "a key")
        raise ValueError(f"key must be {want} for a denoiser of kind {state.kind!r}, got {got}.")
    params = jax.tree.map(jnp.asarray, params)
    gain, s, weights = nodes(state, params)
    if state.kind == "random":
        s, weights = _draw(key, s, weights)
    is_on_line = state.taus is not None or state.kind in ("disk", "storm")
    return Plan(gain, s, weights, params, steps(state, params) if is_on_line else None)


def nodes(state, params):
    """Returns ``(gain, s[q], weights[q])`` before a node is drawn; the gain is what update uses."""
    one = jnp.ones(1, state.noise_variance.dtype)
    if state.kind == "auto":
        return None, one, one
    gain = _raised(state, params)
    if state.kind == "disk":
        # Their weights c and 1 - c, the parameters first.
        c = (1 - gain) / (gain * state.probe_length)
        return gain, jnp.stack([one[0], 1 + state.probe_length]), jnp.stack([1 - c, c])
    if state.kind == "storm":
        return gain, jnp.arange(1, -1, -1, dtype=one.dtype), jnp.stack([one[0], gain - 1]) / gain
    if state.taus is None:
        return gain, one, one
    alpha = _line.pair_alpha(gain, state.taus) if state.order == 3 else gain
    gain, s, weights = _line.nodes(alpha, state.taus)
    # One node has weight 1, but only a constant costs no multiplication.
    return gain, s, one if s.shape[0] == 1 else weights


def steps(state, params):
    """Returns ``params - prev_params`` in float32 or wider."""

    def leaf(p, prev):
        dtype = _numerics.wide(p.dtype)
        return p.astype(dtype) - prev.astype(dtype)

    return jax.tree.map(leaf, params, state.prev_params)


def check_like_state(state, params):
    """Checks that ``params`` are real floating and like those that ``state`` was made for."""
    _estimator.check_params(params)
    made_for = state.estimate
    if state.kind == "auto":
        made_for = jax.tree.map(lambda x: x.estimate, state.auto, is_leaf=_is_auto)
    _check.same_types("params", params, "the denoiser's state", made_for, dtypes=False)


def check_whole(params, reader):
    """Checks that no leaf is a shard, of which ``reader`` would take the norm for that of all."""
    for path, leaf in _tree.leaves_with_paths(params):
        if axes := _tree.varying(leaf):
            raise ValueError(
                f"params must be the same on all devices of a shard_map for {reader}, got {path} "
                f"varying over {', '.join(sorted(axes))}."
            )


def _raised(state, params):
    """Returns the gain as the trust radii raise it: to 1 where the step is a radius long."""
    radii = [state.trust_radius]
    if state.relative_trust_radius is not None:
        radii.append(state.relative_trust_radius * _norm(params, state.gain.dtype))
    radii = [radius for radius in radii if radius is not None]
    if not radii:
        return state.gain
    radius = radii[0] if len(radii) == 1 else jnp.minimum(*radii)
    check_whole(params, "a trust radius")
    distance = _norm(steps(state, params), state.gain.dtype)
    is_inside = (distance < radius) | (distance == 0)
    share = distance / jnp.where(is_inside & (radius > 0), radius, 1)
    return jnp.maximum(state.gain, jnp.where(is_inside, share, 1))


def _is_auto(x):
    return isinstance(x, _auto_gain.AutoGain)


def _norm(tree, dtype):
    """Returns the norm over all leaves, with the derivative 0 at 0."""
    square = sum(
        (jnp.sum(jnp.square(x.astype(_numerics.wide(x.dtype)))).astype(dtype))
        for x in jax.tree.leaves(tree)
    )
    square = jnp.asarray(square, dtype)
    is_positive = square > 0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, 1)), 0)


def _draw(key, s, weights):
    """Returns one node, drawn by the size of its weight, and the weight that keeps the mean."""
    bounds = jnp.cumsum(jnp.abs(weights))
    at = jax.random.uniform(key, dtype=bounds.dtype) * bounds[-1]
    j = jnp.minimum(jnp.sum(at >= bounds), len(weights) - 1)
    return s[j][None], (jnp.sign(weights[j]) * bounds[-1])[None]
