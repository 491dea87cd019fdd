"""The optax transformation of all spectral rules: momentum, one rule on every matrix, a scale."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import _check, _numerics, _tree
from jaxkit.spectral import _exchange, _polar
from jaxkit.spectral._matrix_spec import matrix_shape
from jaxkit.spectral._placement import assign_whole, read_shardings

RULES = ("polar",)
SCALES = {
    "none": lambda units, features: 1.0,
    "muon": lambda units, features: math.sqrt(max(1.0, units / features)),
    "spectral": lambda units, features: math.sqrt(units / features),
    "rms": lambda units, features: 0.2 * math.sqrt(max(units, features)),
    "unit_rms": lambda units, features: math.sqrt(max(units, features)),
}


class ScaleBySpectralState(NamedTuple):
    """State of :func:`scale_by_spectral`.

    Attributes:
      step: number of updates so far, ``[]`` int32, saturating.
      mu: average of past updates; tree, shapes and shardings of params, float32 or wider unless
        ``mu_dtype`` says otherwise.
    """

    step: jax.Array
    mu: optax.Updates


def scale_by_spectral(
    rule: str = "polar",
    *,
    b1=0.95,
    nesterov: bool = False,
    bias_correction: bool = False,
    alpha=0.0,
    eps: float = 1e-8,
    scale: str = "rms",
    method: str = "auto",
    coefficients="polar_express_5",
    steps: int | None = None,
    dtype=None,
    precision=None,
    mu_dtype=None,
    rules=None,
    overrides=None,
    sharding=None,
    distribute: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    r"""Returns a transformation that applies a spectral rule to the momentum of every matrix.

    With the momentum :math:`M \leftarrow \beta M + (1 - \beta) G` of each leaf, seen as matrices
    of ``[units, features]``, the update is :math:`s \, \nu^\alpha \, \mathrm{polar}(M)` with
    :math:`\nu = \langle M, \mathrm{polar}(M) \rangle`. It is strict: every leaf must be made of
    matrices. Use it behind ``optax.partition`` or ``optax.masked``, or take
    :func:`~jaxkit.spectral.muon`, which does that for a whole model.

    Args:
      rule: static; ``"polar"``.
      b1: momentum decay in [0, 1), a number or traced.
      nesterov: static; the rule sees :math:`\beta M + (1 - \beta) G` instead of :math:`M`.
      bias_correction: static; divides momentum by :math:`1 - \beta^t`, and with ``nesterov`` by
        :math:`1 - \beta^{t+1}` and the gradient by :math:`1 - \beta^t`, as
        ``optax.contrib.muon`` does. Without ``nesterov`` and with ``alpha=0`` it changes
        nothing.
      alpha: exponent of the size :math:`\nu`, a number or traced: 0 is Muon, 1 is PolarGrad.
      eps: lower bound of :math:`\nu`.
      scale: static; the factor :math:`s` by matrix shape. ``"none"``: 1. ``"muon"``:
        :math:`\sqrt{\max(1, units/features)}`. ``"spectral"``: :math:`\sqrt{units/features}`.
        ``"rms"``: :math:`0.2 \sqrt{\max(units, features)}`, entries of root mean square 0.2 as
        AdamW makes them, so that learning rates carry over. ``"unit_rms"``: five times that;
        needs ``alpha=0``.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; dtype of the products, and of what crosses the network. ``None``: bfloat16
        for bfloat16 updates, else float32 or wider.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`: a role or a MatrixSpec for
        leaves whose layout cannot be told from their name.
      sharding: static; where the params live: a tree like params of ``NamedSharding`` or
        ``PartitionSpec``, or the sharded params themselves (only their shardings are kept).
        Needed on Auto and Manual mesh axes; Explicit axes are read from the types and win.
        Inside your own ``shard_map`` over sharded params it is required: without it shards are
        taken for whole matrices, which cannot be noticed here. Under ``vmap`` over seeds on a
        mesh axis of their own, use Auto axes and ``spmd_axis_name``; JAX refuses Explicit ones.
      distribute: static; mesh axes over which leaves are replicated and whose devices shall share
        the matrices. Trades bytes for operations.

    Returns:
      An ``optax.GradientTransformation``; its state is :class:`ScaleBySpectralState`. Updates
      have the dtype of the incoming ones and the sharding of their leaf.

    Raises:
      ValueError: an unknown ``rule``, ``scale``, ``method`` or table; a static number out of
        range; and, naming the path, a leaf that is no matrix or has an empty axis, whose layout
        cannot be told, that is not shaped like its momentum, or for which ``sharding`` has no
        entry; ``distribute`` in an Auto mesh without ``sharding``, or for a leaf that varies
        along such an axis of a surrounding ``shard_map``.
      TypeError: a leaf, ``dtype`` or ``mu_dtype`` that is not real floating, or an argument of
        another kind.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> tx = spectral.scale_by_spectral(b1=0.0, scale="none", method="eigh")
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5]))}
      >>> update, state = tx.update(grads, tx.init(grads))
      >>> print(update["kernel"].round(3) + 0.0)
      [[ 1.  0.]
       [ 0. -1.]]

    Source: Muon (Keller Jordan), arXiv:2502.16982 (scale), arXiv:2505.21799 (alpha = 1),
    arXiv:2605.18106 (the family). Differs: momentum is kept in float32 for 16-bit params;
    statistics are per matrix, never over a stack.

    Cost: :func:`~jaxkit.spectral.polar` of every matrix, in one batched call for each shape; one
    array like params in memory. Sharded matrices cross the network once each way, in the dtype
    of the products (one all-to-all for each bucket and direction), whatever their layout; a few
    long matrices stay and only sum their small Gram matrix; sharded stacks send nothing.
    """
    _check.choice("rule", rule, RULES)
    _check.choice("scale", scale, tuple(SCALES))
    _check.between("b1", b1, 0.0, 1.0)
    _check.between("eps", eps, 0.0, math.inf)
    _check.between("alpha", alpha, -math.inf, math.inf)
    _check.floating("mu_dtype", mu_dtype)
    no_alpha = isinstance(alpha, int | float) and alpha == 0
    if scale == "unit_rms" and not no_alpha:
        raise ValueError(
            f"scale='unit_rms' needs a static alpha=0, got alpha={alpha} (inject_hyperparams takes "
            "static_args='alpha')."
        )
    settings = _polar.make_settings(method, coefficients, steps, dtype, precision)
    distribute = (distribute,) if isinstance(distribute, str) else tuple(distribute)
    if len(set(distribute)) < len(distribute):
        raise ValueError(f"distribute must name each mesh axis once, got {distribute}.")
    shardings = read_shardings(sharding)

    def plan(tree):
        found, places = assign_whole(tree, shardings, distribute, rules=rules, overrides=overrides)
        for item in found:
            _check_leaf(item)
        return found, places

    def init(params):
        plan(params)
        return ScaleBySpectralState(jnp.zeros([], jnp.int32), _zero_momentum(params, mu_dtype))

    def apply_rule(x, axis_names=()):
        factor = _polar.apply(settings, x, axis_names)
        if no_alpha:
            return factor
        wide = _numerics.wide(x.dtype)
        nu = jnp.sum(x.astype(wide) * factor.astype(wide), axis=(-2, -1), keepdims=True)
        if axis_names:
            nu = jax.lax.psum(nu, axis_names)
        size = jnp.maximum(nu, _as(eps, wide)) ** _as(alpha, wide)
        return (size * factor.astype(wide)).astype(factor.dtype)

    def update(updates, state, params=None):
        del params
        found, places = plan(updates)
        _check_like_momentum(updates, state.mu)
        step = optax.safe_increment(state.step)
        mu = jax.tree.map(lambda m, g: _average(m, g, b1), state.mu, updates)
        grads, treedef = jax.tree.flatten(updates)
        seen = [
            _look(m, g, b1, step, nesterov, bias_correction)
            for m, g in zip(treedef.flatten_up_to(mu), grads, strict=True)
        ]
        # What a 16-bit product would round anyway crosses the network in 16 bits, unless it would
        # lose its range before the input is normalized.
        sent = []
        for x, g in zip(seen, grads, strict=True):
            product = settings.product_dtype(g.dtype)
            sent.append(x.astype(product) if _same_range(product, x.dtype) else x)
        done = _exchange.map_matrices(
            apply_rule,
            sent,
            [item.spec for item in found],
            placements=places,
            distribute=distribute,
            in_place=method in ("auto", "gram"),
        )
        out = [
            (_scaled(y.astype(_numerics.wide(y.dtype)), item, place, scale)).astype(g.dtype)
            for y, g, item, place in zip(done, grads, found, places, strict=True)
        ]
        return treedef.unflatten(out), ScaleBySpectralState(step, mu)

    return optax.GradientTransformation(init, update)


def _as(value, dtype):
    """Gives a traced hyperparameter the dtype of what it meets; Python numbers are weak anyway."""
    return value if isinstance(value, int | float) else jnp.asarray(value).astype(dtype)


def _same_range(narrow, dtype):
    """Says whether ``narrow`` has the exponents of ``dtype``."""
    return jnp.finfo(narrow).maxexp >= jnp.finfo(dtype).maxexp


def _zero_momentum(params, mu_dtype):
    """Returns zeros that keep shardings, in ``mu_dtype`` or float32 or wider."""
    return jax.tree.map(lambda x: _tree.zeros_like(x, mu_dtype or _numerics.wide(x.dtype)), params)


def _average(m, g, b1):
    """Returns ``b1 m + (1 - b1) g``, computed in float32 or wider."""
    wide = _numerics.wide(m.dtype, g.dtype)
    b1 = _as(b1, wide)
    return (b1 * m.astype(wide) + (1 - b1) * g.astype(wide)).astype(m.dtype)


def _look(m, g, b1, step, nesterov, bias_correction):
    """Returns what the rule sees of momentum ``m`` (already averaged) and gradient ``g``."""
    wide = _numerics.wide(m.dtype, g.dtype)
    m, g, b1 = m.astype(wide), g.astype(wide), _as(b1, wide)
    if bias_correction:
        t = step.astype(wide)
        m = m / (1 - b1 ** (t + 1 if nesterov else t))
        g = g / (1 - b1**t)
    return b1 * m + (1 - b1) * g if nesterov else m


def _check_like_momentum(updates, mu):
    """Raises an error that names the first gradient that is not shaped like its momentum."""
    momenta = jax.tree.structure(updates).flatten_up_to(mu)
    for (path, g), m in zip(_tree.leaves_with_paths(updates), momenta, strict=True):
        if g.shape != m.shape:
            raise ValueError(
                f"updates must have the shapes of params, wanted {m.shape} at {path}, "
                f"got {g.shape}."
            )


def _check_leaf(item):
    """Raises an error that names the path of a leaf to which no rule can be applied."""
    if not jnp.issubdtype(item.dtype, jnp.floating):
        raise TypeError(f"{item.path} must be real floating, got {item.dtype}.")
    if len(item.shape) < 2:
        raise ValueError(
            f"{item.path} must be a matrix or a stack of matrices, got shape {item.shape}."
        )
    if item.spec is None:
        raise ValueError(
            f"{item.path} of shape {item.shape} has no known matrix layout (role {item.role!r}); "
            f"give one by overrides={{{item.path!r}: MatrixSpec(...)}}."
        )


def _scaled(x, item, place, scale):
    """Multiplies by the scale of each matrix, which depends on the shape of the whole leaf."""
    shapes = matrix_shape(item.spec, item.shape)
    factors = [SCALES[scale](units, features) for _, units, features in shapes]
    if len(set(factors)) == 1:
        return x * factors[0]
    sizes, axis = item.spec.split
    factor = jnp.asarray(np.repeat(factors, sizes), x.dtype)
    local = tuple(name for name in place.axes[axis] if name in place.manual)
    if local:
        start = jax.lax.axis_index(local) * x.shape[axis]
        factor = jax.lax.dynamic_slice_in_dim(factor, start, x.shape[axis])
    return x * factor.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
