"""Denoising of gradients between any estimator and any optimizer, as a transformation."""

from jaxkit import _check
from jaxkit.denoise import _line, _link


def denoise(
    gain=None,
    *,
    order=2,
    ratio=0.4,
    taus=None,
    trust_radius=None,
    relative_trust_radius=None,
    random_node=False,
    accumulator_dtype=None,
):
    r"""Returns the link of a chain that turns noisy gradients into a better estimate.

    The gradient of the last iterate is carried to this one by extrapolation: gradients y are asked
    at nodes on the line through both, and the estimate becomes

    .. math:: g_t = (1 - a) \, g_{t-1} + \sum_j w_j \, y(x_{t-1} + s_j (x_t - x_{t-1}))

    with :math:`w_j, s_j` such that order p makes no error on polynomials of degree p. Order 1
    averages and asks at :math:`x_t`; order 2 asks once, ahead of it; order 3 asks ahead and behind.
    Memory of about :math:`1 / a` gradients takes the variance down to about :math:`a / 2` of it.

    Put it behind clipping and before the optimizer, ``optax.chain(clip, denoise, optimizer)``, over
    all parameters at once: inside ``optax.masked`` or ``optax.partition`` it is refused. Gradients
    must come from where it asks: :func:`gradient_estimator` does that for ``train.make_step``.
    A loop of your own calls three pure functions, also in a scan or under ``vmap``: ``tx.init``,
    :func:`query_points` (with :func:`combine`), and ``tx.update(..., queried=True)``.
    Put ``optax.apply_if_finite`` around the whole chain to skip gradients that are not finite.
    To accumulate over slices use ``train.accumulate``, inside the estimator or, unless the gain is
    "auto", around it: ``optax.MultiSteps`` knows ``query_variance`` and ``hvp`` of the last slice
    only.

    Step 0 has gain 1 and asks at the parameters. Update uses the gain in the state, with which
    points were asked, and writes the next. Under ``optax.inject_hyperparams`` give ``static_args=
    ("order", "accumulator_dtype")``, and with parameters below float32 its ``hyperparam_dtype``.

    If training with order 2 or 3 becomes unstable, set a trust radius first.

    Args:
      gain: :math:`a` in (0, 1], a number, a ``[]`` array or a schedule ``step -> gain`` as
        :func:`kalman_gain`; "auto" to measure it in each leaf, for order 1 only; None for order 2
        takes .02 and ``relative_trust_radius`` .05.
      order: 1, 2 or 3, static.
      ratio: of order 3, how far behind over how far ahead, in (0, 1), a number or traced; noise
        grows and bias falls with it.
      taus: inverse node positions :math:`1 / s_j` over ``gain`` for order ``len(taus) + 1``, static
        and distinct; then the gain is :math:`a = 1 - \prod_j (1 - gain \cdot taus_j)`. None for
        those of ``order``.
      trust_radius: length of a step from which on nothing is remembered, positive; the gain, with
        ``taus`` the largest of their multiples, is at least the length over it. None for no bound.
      relative_trust_radius: the same as a share of the norm of the parameters. Of two the smaller
        counts.
      random_node: whether to ask at one of the nodes, drawn by its weight, static; for two or
        more. Unbiased, at one query a step, with more noise than it saves in most problems.
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`. Its update takes
      ``queried``, not None, unless the order is 1; ``noise_variance``, None or ``[]``, to store as
      that of the noise in each entry of the new estimate; and for "auto" ``query_variance``, the
      variance of the noise in each entry of the gradient, ``[]`` or a tree of them.

    Raises:
      TypeError: a number is none, or a leaf of the parameters is not real floating.
      ValueError: an option is out of range or without effect, ``taus`` lead the gain out of (0, 1];
        or, when called, parts of the parameters are masked, trees are not alike, or ``params``,
        ``queried`` or ``query_variance`` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import denoise, train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((params - batch) ** 2)
      >>> tx = optax.chain(denoise.denoise(0.2), optax.sgd(0.1))
      >>> step = train.make_step(denoise.gradient_estimator(train.backprop(loss_fn)), tx)
      >>> state = train.create(jnp.array(0.0), tx, jax.random.key(0))
      >>> state, _ = train.fit(step, state, jnp.full((200, 4), 3.0))
      >>> print(state.params.round(2))
      3.0

    Source: arXiv:1906.03532 and arXiv:2002.03305 for order 2, arXiv:2412.14488 for more nodes.
    Derived here: order 3, its ratio, trust radii, the random node, "auto".

    Cost: elementwise, beside ``order - 1`` gradients a step (one for order 1); two copies of the
    parameters in the state, one for order 1 without a trust radius. Over devices go the sums of
    squares of a trust radius, and nothing else.
    """
    if isinstance(gain, str):
        _check.choice("gain", gain, ("auto",))
        given = trust_radius, relative_trust_radius, taus, accumulator_dtype
        if order != 1 or random_node or any(x is not None for x in given):
            raise ValueError("gain='auto' must come with order=1 and no other option.")
        return _link.link("auto", None, order=1)
    radii = {"trust_radius": trust_radius, "relative_trust_radius": relative_trust_radius}
    order, taus, scale, default = _rule(gain, order, ratio, taus)
    if gain is None:
        gain = default
        if relative_trust_radius is None:
            radii["relative_trust_radius"] = 0.05
    if random_node and (taus is None or len(taus) < 2):
        raise ValueError("random_node must come with order 3 or at least 2 taus, got fewer nodes.")
    return _link.link(
        "random" if random_node else "line",
        gain,
        order=order,
        taus=taus,
        gain_scale=scale,
        accumulator_dtype=accumulator_dtype,
        **radii,
    )


def _rule(gain, order, ratio, taus):
    """Returns the order (None for the user's taus), taus, their scale and the default gain."""
    if taus is not None:
        if gain is None:
            raise ValueError("gain must be given with taus, got None.")
        if order not in (2, len(taus) + 1):
            raise ValueError(f"order must be left out with taus, got {order!r}.")
        return None, *_line.check_taus(taus, gain), None
    _check.choice("order", order, (1, 2, 3))
    if gain is None and order != 2:
        raise ValueError(f"gain must be given for order {order}, got None.")
    _check.between("ratio", ratio, 0, 1, closed=False)
    return order, {1: None, 2: (1.0,), 3: (1.0, -ratio)}[order], 1.0, 0.02
