"""The optax transformation of all spectral rules: momentum, one rule on every matrix, a scale."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkit import _check, _numerics, _tree
from jaxkit.spectral import _exchange, _leaf, _polar, _rules
from jaxkit.spectral._matrix_spec import unpair
from jaxkit.spectral._placement import assign_whole, read_shardings
from jaxkit.spectral._roles import leaves_with_parts


class ScaleBySpectralState(NamedTuple):
    """State of :func:`scale_by_spectral`.

    Attributes:
      step: number of updates so far, ``[]`` int32, saturating.
      mu: average of past gradients, or of past factors with ``polar_first``; tree, shapes and
        shardings of params, float32 or wider unless ``mu_dtype`` says otherwise.
      nu_unit: for ``rule="normuon"`` the average of the squares of each row of the factor; tree of
        params, shapes with 1 for the axes of the columns, float32 or wider. Else None.
    """

    step: jax.Array
    mu: optax.Updates
    nu_unit: Any = None


def scale_by_spectral(
    rule: str = "polar",
    *,
    b1=0.95,
    nesterov: bool = False,
    bias_correction: bool = False,
    alpha=None,
    eps=1e-8,
    eps_mode: str = "relative",
    row_floor=None,
    rows: str = "unit",
    centered: bool = False,
    polar_first: bool = False,
    b2=None,
    noise_damping=None,
    scale="rms",
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
) -> optax.GradientTransformationExtraArgs:
    r"""Returns a transformation that applies a spectral rule to the momentum of every matrix.

    With the momentum :math:`M \leftarrow \beta M + (1 - \beta) G` of each leaf, seen as matrices
    of ``[units, features]``, the update is :math:`s \, D(M)`, where the rule gives :math:`D`. It is
    strict: every leaf must be made of matrices. Use it behind ``optax.partition`` or
    ``optax.masked``, or take :func:`~jaxkit.spectral.muon` or
    :func:`~jaxkit.spectral.symmetry_compatible`, which do that for a whole model.

    ====================== =====================================================================
    rule                   :math:`D(X)`, with :math:`\nu = \langle X, D(X) \rangle` at alpha 0
    ====================== =====================================================================
    polar                  :math:`\nu^\alpha \, \mathrm{polar}(X)`: Muon, PolarGrad, Scion
    right_spectral         :math:`\nu^\alpha X (X^\top X + d I)^{-1/2}`
    left_spectral          :math:`\nu^\alpha (X X^\top + d I)^{-1/2} X`, the same matrix
    row_norm               :math:`X_i / (\lVert X_i \rVert + f)` for each row
    row_then_polar         polar of the normalized rows, times :math:`\nu^\alpha` of these
    polar_then_row         normalized rows of the polar factor; alpha cancels
    normuon                polar, each row divided by its root mean square over the steps
    sign                   the sign of every entry: no spectral rule, but Scion's for heads
    ====================== =====================================================================

    Args:
      rule: static; a name of the table.
      b1: momentum decay in [0, 1), a number or traced.
      nesterov: static; the rule sees :math:`\beta M + (1 - \beta) G` instead of :math:`M`.
      bias_correction: static; divides momentum by :math:`1 - \beta^t`, and with ``nesterov`` by
        :math:`1 - \beta^{t+1}` and the gradient by :math:`1 - \beta^t`, as
        ``optax.contrib.muon`` does. Without ``nesterov`` and with ``alpha=0`` it changes
        nothing.
      alpha: exponent of the size :math:`\nu`, a number or traced: 0 is Muon, 1 is PolarGrad. None
        is a static 0, the only one for row_norm, normuon and sign.
      eps: lower bound of :math:`\nu`; damping of the one-sided rules; with
        ``eps_mode="absolute"`` the floor of the rows. A number or traced.
      eps_mode: static; ``"relative"``: :math:`d` is eps times the Frobenius norm of
        :math:`X X^\top`, :math:`f` is ``row_floor`` times the root mean square of the row norms.
        The methods "auto" and "gram" leave out a damping below the rounding of that matrix (in
        float32 a static eps under 1.2e-7, as the default): the rule is then polar.
        ``"absolute"``: both are eps, as published; rules are then not scale-free.
      row_floor: see ``eps_mode``, a number or traced; None: 0.1. Rows far below the others move
        less: without it a row that gets no gradient any more keeps moving at full size until its
        momentum has decayed to eps, some 200 steps.
      rows: static; ``"unit"``, or ``"feature"`` for row rules, normuon and centering on the
        columns, as suits the down-projection of an MLP, whose features are its neurons.
      centered: static; subtracts the mean over the rows before the rule and after it, as suits an
        output head or router, where the same row added to all changes nothing.
      polar_first: static; the momentum averages the factors of the gradients instead, and is
        multiplied by :math:`\nu^\alpha` of the newest gradient.
      b2: decay of the second moment of normuon in [0, 1), a number or traced; None: 0.95.
      noise_damping: :math:`c \geq 0`, see ``noise_variance`` below, a number or traced; None: 4.
      scale: static; the factor :math:`s` by matrix shape, or a function of ``(units, features)``.
        ``"none"``: 1. ``"muon"``: :math:`\sqrt{\max(1, units/features)}`. ``"spectral"``:
        :math:`\sqrt{units/features}`. ``"scion"``: the same, for a convolution with its channels
        as features and divided by the area of its window. ``"unit_rms"``: entries of root mean
        square 1, for a full-rank matrix; needs ``alpha=None``. ``"rms"``: a fifth of that, as
        AdamW makes them, so that learning rates carry over; for polar this is
        :math:`0.2 \sqrt{\max(units, features)}`.
      method: static; as in :func:`~jaxkit.spectral.polar`, like the next four of no use to row_norm
        and sign, which make no products.
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
        the matrices. Trades bytes for operations; row_norm and sign have none to share.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; its state is :class:`ScaleBySpectralState`.
      Updates have the dtype of the incoming ones and the sharding of their leaf. ``update`` takes
      ``noise_variance=``, None or the known variance :math:`v` of the noise in each entry of what
      the rule sees, a number, ``[]``, or a tree of these like params: then polar, the one-sided
      rules and normuon take :math:`X (X^\top X + c v m I)^{-1/2}` with the longer side :math:`m`,
      which keeps noise out of the directions that hold nothing else. For gradients of variance
      :math:`v_G` that is :math:`v = v_G (1 - \beta) / (1 + \beta)` without ``nesterov``.

    Raises:
      ValueError: an unknown ``rule``, ``scale``, ``method`` or table; a static number out of
        range; an option of another rule; and, naming the path, a leaf that is no matrix or has an
        empty axis, whose layout cannot be told, that is not shaped like its momentum, or for
        which ``sharding`` or ``noise_variance`` has no entry; ``distribute`` in an Auto mesh
        without ``sharding``, or for a leaf that varies along such an axis of a surrounding
        ``shard_map``; a paired leaf whose fused axis is sharded.
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

    Source: arXiv:2605.18106 (the family), Muon (Keller Jordan), arXiv:2502.16982 (scale "rms"),
    arXiv:2505.21799 (alpha = 1), arXiv:2502.07529 (scale "scion"), arXiv:2510.05491 (normuon).
    Differs: momentum is kept in float32 for 16-bit params; statistics are per matrix, never over
    a stack; floors and damping are relative. Derived here: the relative floor of rows, the
    one-sided rules being one, and the noise damping.

    Cost: :func:`~jaxkit.spectral.polar` of every matrix, in one batched call for each shape; one
    array like params in memory. Damping takes the Gram form, which for square matrices costs a
    quarter more. Sharded matrices cross the network once each way, in the dtype of the products
    (one all-to-all for each bucket and direction), whatever their layout; a few long matrices
    stay and only sum their small Gram matrix; sharded stacks send nothing. Rows are normalized
    where they lie: that sums two numbers a row where rows are split, centering two or three times
    one row where units are, and a relative floor or normuon a few numbers a matrix.
    """
    rule = _rules.make_rule(
        rule,
        alpha=alpha,
        eps=eps,
        eps_mode=eps_mode,
        row_floor=row_floor,
        rows=rows,
        centered=centered,
        b2=b2,
    )
    _rules.check_scale(scale, rule)
    noise_damping = _rules.check_noise(rule, noise_damping)
    _check.between("b1", b1, 0.0, 1.0)
    _check.floating("mu_dtype", mu_dtype)
    settings = _polar.make_settings(method, coefficients, steps, dtype, precision)
    distribute = (distribute,) if isinstance(distribute, str) else tuple(distribute)
    if len(set(distribute)) < len(distribute):
        raise ValueError(f"distribute must name each mesh axis once, got {distribute}.")
    shardings = read_shardings(sharding)

    def plan(tree):
        items, places = assign_whole(tree, shardings, distribute, rules=rules, overrides=overrides)
        for item in items:
            _check_leaf(item)
        opened = [_open(item, place) for item, place in zip(items, places, strict=True)]
        views = [_leaf.view_of(item, place, rule.rows) for item, place in opened]
        return items, views

    def init(params):
        _, views = plan(params)
        mu = jax.tree.map(
            lambda x: _tree.zeros_like(x, mu_dtype or _numerics.wide(x.dtype)), params
        )
        nu_unit = None
        if rule.has_row_state:
            leaves, treedef = jax.tree.flatten(mu)
            pairs = zip(leaves, views, strict=True)
            nu_unit = treedef.unflatten(_row_zeros(x, view) for x, view in pairs)
        return ScaleBySpectralState(jnp.zeros([], jnp.int32), mu, nu_unit)

    # With polar_first the size is that of the newest gradient, and is multiplied on at the end.
    inner = rule._replace(alpha=None) if polar_first else rule

    def directions(xs, dtypes, views, variances, nu_units):
        """Returns the rule's direction for each leaf, and the new states of its rows."""
        xs = [inner.before(_leaf.opened(x, view), view) for x, view in zip(xs, views, strict=True)]
        sizes, squares = None, [{}] * len(xs)
        if variances is not None:
            xs, sizes = _leaf.over_noise(xs, views, variances, noise_damping)
        if inner.has_polar:
            # What a 16-bit product would round anyway crosses the network in 16 bits, unless it
            # would lose its range before the input is normalized.
            products = [settings.product_dtype(dtype) for dtype in dtypes]
            xs, squares = _exchange.map_matrices(
                lambda x, axis_names=(): inner.inside(settings, x, axis_names, sizes is not None),
                [_narrow(x, product) for x, product in zip(xs, products, strict=True)],
                [view.spec for view in views],
                placements=[view.place for view in views],
                distribute=distribute,
                in_place=method in ("auto", "gram"),
                squares=inner.has_row_sums,
            )
        xs = [x.astype(_numerics.wide(x.dtype)) for x in xs]
        if sizes is not None and inner.alpha is not None:
            xs = [x * s ** _rules.as_dtype(alpha, x.dtype) for x, s in zip(xs, sizes, strict=True)]
        done = [inner.after(*args) for args in zip(xs, squares, nu_units, views, strict=True)]
        return map(list, zip(*done, strict=True)) if done else ([], [])

    def update(updates, state, params=None, *, noise_variance=None, **extra):
        del params, extra
        items, views = plan(updates)
        _check_like_momentum(updates, state.mu)
        step = optax.safe_increment(state.step)
        grads, treedef = jax.tree.flatten(updates)
        dtypes = [g.dtype for g in grads]
        old = treedef.flatten_up_to(state.mu)
        nu_units = [None] * len(grads)
        if rule.has_row_state:
            nu_units = treedef.flatten_up_to(state.nu_unit)
        variances = _variances(noise_variance, rule, items)

        def average(xs):
            mu = [_average(m, x, b1) for m, x in zip(old, xs, strict=True)]
            pairs = zip(mu, xs, strict=True)
            return mu, [_look(m, x, b1, step, nesterov, bias_correction) for m, x in pairs]

        if polar_first:
            factors, nu_units = directions(grads, dtypes, views, variances, nu_units)
            mu, out = average([x.reshape(g.shape) for x, g in zip(factors, grads, strict=True)])
            out = [_leaf.opened(x, view) for x, view in zip(out, views, strict=True)]
            if rule.alpha is not None:
                newest = zip(out, grads, factors, views, strict=True)
                out = [x * _newest_size(rule, g, factor, view) for x, g, factor, view in newest]
        else:
            mu, seen = average(grads)
            out, nu_units = directions(seen, dtypes, views, variances, nu_units)
        out = [
            _scaled(x, scale, rule, item, view).astype(g.dtype).reshape(g.shape)
            for x, item, view, g in zip(out, items, views, grads, strict=True)
        ]
        nu_unit = treedef.unflatten(nu_units) if rule.has_row_state else None
        return treedef.unflatten(out), ScaleBySpectralState(step, treedef.unflatten(mu), nu_unit)

    return optax.GradientTransformationExtraArgs(init, update)


def _open(item, place):
    """Returns a paired leaf's axes after its fused axis is cut in two; others as they are."""
    spec, shape = unpair(item.spec, item.shape)
    if spec is item.spec:
        return item, place
    (axis,) = item.spec.unit
    names, size = place.axes[axis], shape[spec.unit[0]]
    fits = spec.unit[0] == axis and (
        place.mesh is None or size % math.prod(place.mesh.shape[name] for name in names) == 0
    )
    if names and not fits:
        raise ValueError(
            f"sharding must leave the fused axis {axis} of {item.path} whole, or its interleaved "
            f"units must divide over the devices, got axes {names}."
        )
    cut = (names, ()) if spec.unit[0] == axis else ((), names)
    place = place._replace(axes=(*place.axes[:axis], *cut, *place.axes[axis + 1 :]))
    return item._replace(spec=spec, shape=shape), place


def _narrow(x, dtype):
    """Returns ``x`` in ``dtype`` if that has the exponents of its own."""
    return x.astype(dtype) if jnp.finfo(dtype).maxexp >= jnp.finfo(x.dtype).maxexp else x


def _row_zeros(x, view):
    """Returns zeros, one for each row, that lie where the rows of ``x`` lie."""
    x = _leaf.opened(x, view).astype(_numerics.wide(x.dtype))
    return _leaf.total(x, view, view.columns) * 0


def _average(m, x, b1):
    """Returns ``b1 m + (1 - b1) x``, computed in float32 or wider."""
    wide = _numerics.wide(m.dtype, x.dtype)
    b1 = _rules.as_dtype(b1, wide)
    return (b1 * m.astype(wide) + (1 - b1) * x.astype(wide)).astype(m.dtype)


def _look(m, x, b1, step, nesterov, bias_correction):
    """Returns the look-ahead of momentum ``m`` (already averaged), given the newest ``x``."""
    wide = _numerics.wide(m.dtype, x.dtype)
    m, x, b1 = m.astype(wide), x.astype(wide), _rules.as_dtype(b1, wide)
    if bias_correction:
        t = step.astype(wide)
        m = m / (1 - b1 ** (t + 1 if nesterov else t))
        x = x / (1 - b1**t)
    return b1 * m + (1 - b1) * x if nesterov else m


def _newest_size(rule, grad, factor, view):
    """Returns the size of the newest gradient of each matrix, for ``polar_first``."""
    x = rule.before(_leaf.opened(grad, view), view)
    return rule.size(_leaf.total(x * factor.astype(x.dtype), view, view.rows + view.columns))


def _variances(given, rule, items):
    """Returns the noise variance of each leaf, or None."""
    if given is None or not items:
        return None
    _rules.check_noisy("noise_variance", rule)
    found = dict(leaves_with_parts(given))
    out = []
    for item in items:
        parts = () if () in found else tuple(item.path.split("/"))
        if parts not in found:
            paths = ", ".join("/".join(parts) for parts in found)
            raise ValueError(f"noise_variance must have an entry for {item.path}, got {paths}.")
        value = found[parts]
        _check.shape(f"noise_variance of {item.path}", value, "")
        if not isinstance(value, jax.Array):
            _check.between(f"noise_variance of {item.path}", value, 0.0, math.inf)
        out.append(value)
    return out


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


def _scaled(x, scale, rule, item, view):
    """Multiplies by the scale of each matrix, which depends on the shape of the whole leaf."""
    window = 1
    if item.role == "conv":  # (h, w, in, out), or (out, in, h, w)
        feature = item.spec.feature
        channels = feature[0] if item.spec.unit[0] < feature[0] else feature[-1]
        window = math.prod(item.shape[axis] for axis in feature if axis != channels)
    factors = [_rules.scale_of(scale, rule, *sizes[1:], window) for sizes in view.sizes()]
    return x * view.by_part(factors, x.dtype)
