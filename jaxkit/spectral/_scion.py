"""Scion: each role moves to the extreme point of its own norm ball."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxkit import _check
from jaxkit.spectral import _by_role
from jaxkit.spectral._roles import HIDDEN_ROLES
from jaxkit.spectral._scale_by_spectral import scale_by_spectral

_TABLES = {  # for embeddings and heads
    "sign": {"rule": "sign", "scale": lambda units, features: 1 / features},
    "col_norm": {"rule": "row_norm", "row_floor": 0.0, "scale": "unit_rms"},
    "row_norm": {
        "rule": "row_norm",
        "row_floor": 0.0,
        "scale": lambda units, features: 1 / math.sqrt(features),
    },
    "spectral": {"rule": "polar", "scale": "spectral"},
}


def scion(
    learning_rate,
    *,
    radius=50.0,
    head_radius=3000.0,
    constrained: bool = True,
    b1=0.9,
    scale="scion",
    embedding: str = "col_norm",
    head: str = "sign",
    method: str = "auto",
    coefficients="polar_express_5",
    steps: int | None = None,
    dtype=None,
    precision=None,
    mu_dtype=None,
    other: optax.GradientTransformation | None = None,
    rules=None,
    overrides=None,
    strict: bool = False,
    sharding=None,
    distribute: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Returns Scion for a whole model: conditional gradients with a norm for each role.

    Every leaf moves by :math:`-\eta \, (\rho \, \mathrm{lmo}(M) + W)`, or without the constraint
    by :math:`-\eta \, \rho \, \mathrm{lmo}(M)`, where :math:`-\rho \, \mathrm{lmo}(M)` is the
    point of the ball of radius :math:`\rho` that lies farthest down the momentum :math:`M`. With
    the constraint weights that start in the ball stay in it for :math:`\eta \leq 1`.

    ============= ==========================================================================
    norm          lmo
    ============= ==========================================================================
    spectral      :math:`\sqrt{units/features} \, \mathrm{polar}(M)`; for a convolution
                  with its channels as features, and divided by the area of its window
    sign          :math:`\mathrm{sign}(M) / features`
    col_norm      each unit (the vector of a token) to a root mean square of 1
    row_norm      each unit to the norm :math:`1/\sqrt{features}`
    vectors       to a root mean square of 1; so all that has no role
    ============= ==========================================================================

    Args:
      learning_rate: :math:`\eta`, a number or a schedule; with the constraint in [0, 1].
      radius: :math:`\rho` of hidden matrices, routers and vectors. The authors take 50 for a
        language model, 1 for an MLP, 8 for a convolutional net.
      head_radius: :math:`\rho` of embedding and head: 3000, 1024, 128 in the same order.
      constrained: static; whether weights decay into the ball.
      b1: momentum decay in [0, 1); 1 minus the paper's :math:`\alpha`.
      scale: static; of the spectral norm: ``"scion"``, or ``"muon"`` for factors of at least 1,
        as in :func:`~jaxkit.spectral.scale_by_spectral`.
      embedding: static; norm of the embedding: ``"col_norm"``, ``"sign"``, ``"row_norm"`` or
        ``"spectral"``.
      head: static; norm of the output head, one of the same.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      other: transformation for what has no role, with its own learning rate, in place of Scion's.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`.
      strict: static; as in :func:`~jaxkit.spectral.muon`.
      sharding: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      distribute: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params`` if constrained.

    Raises:
      ValueError: an unknown norm, a radius below 0; and as in
        :func:`~jaxkit.spectral.scale_by_spectral`.
      TypeError: as in :func:`~jaxkit.spectral.muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> params = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
      >>> tx = spectral.scion(0.5, radius=2.0, method="eigh")
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5])), "bias": jnp.array([3.0, 0.0])}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> print(updates["kernel"].round(3).diagonal(), updates["bias"].round(3) + 0.0)
      [-1.  1.] [-1.414  0.   ]

    Source: arXiv:2502.07529, algorithms 1 and 2, table 2. Differs: five Polar Express steps by
    default, so that the spectral ball is kept to 20 percent; ``method="qdwh"`` keeps it exactly.

    Cost: as :func:`~jaxkit.spectral.muon`, with one array like params in memory.
    """
    for name, value in (("radius", radius), ("head_radius", head_radius)):
        _check.between(name, value, 0.0, math.inf)
    polar = {"method": method, "coefficients": coefficients, "steps": steps}
    polar |= {"dtype": dtype, "precision": precision}
    common = {"b1": b1, "mu_dtype": mu_dtype, "sharding": sharding, "distribute": distribute}
    tables = (
        ("hidden", (*HIDDEN_ROLES, "router"), radius, {"rule": "polar", "scale": scale}),
        ("embedding", ("embedding",), head_radius, _table("embedding", embedding)),
        ("lm_head", ("lm_head",), head_radius, _table("head", head)),
    )
    decay = 1.0 if constrained else 0.0
    groups = {
        name: _by_role.Group(
            roles, _make({**options, **polar, **common}, size), learning_rate, decay
        )
        for name, roles, size, options in tables
    }
    if other is None:
        _by_role.check_rate("learning_rate", learning_rate)
        other = _by_role.in_float32(
            optax.chain(
                optax.ema(b1, debias=False, accumulator_dtype=mu_dtype),
                optax.stateless(lambda updates, _: jax.tree.map(_unit_rms, updates)),
                optax.scale(radius),
                optax.add_decayed_weights(decay) if constrained else optax.identity(),
                optax.scale_by_learning_rate(learning_rate),
            )
        )
    return _by_role.by_role(
        groups, other, rules=rules, overrides=overrides, strict=strict, sharding=sharding
    )


def _table(name, norm):
    return _TABLES[_check.choice(name, norm, tuple(_TABLES))]


def _make(options, radius):
    def make(known):
        return optax.chain(scale_by_spectral(overrides=known, **options), optax.scale(radius))

    return make


def _unit_rms(x):
    """Divides by the root mean square, over- and underflow-free; zero stays zero."""
    top = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), initial=0)
    top = jnp.where(top == 0, 1, top)
    square = jnp.mean(jnp.square(x / top))
    return x / top / jnp.sqrt(jnp.where(square == 0, 1, square))
