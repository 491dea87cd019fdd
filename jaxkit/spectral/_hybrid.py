"""Hybrid: the polar factor of the normalized rows, or the normalized rows of the polar factor."""

import optax

from jaxkit import _check
from jaxkit.spectral import _by_role


def hybrid(
    learning_rate,
    *,
    order: str = "row_then_polar",
    b1=0.95,
    nesterov: bool = False,
    alpha=None,
    eps=1e-8,
    eps_mode: str = "relative",
    row_floor=None,
    rows: str = "unit",
    centered: bool = False,
    weight_decay=0.0,
    scale="rms",
    method: str = "auto",
    coefficients="polar_express_5",
    steps: int | None = None,
    dtype=None,
    precision=None,
    mu_dtype=None,
    other: optax.GradientTransformation | None = None,
    other_learning_rate=None,
    rules=None,
    overrides=None,
    strict: bool = False,
    sharding=None,
    distribute: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Returns the hybrid of row norm and polar factor for a whole model.

    Hidden matrices move by
    :math:`-\eta \, (s \, \nu^\alpha \, \mathrm{polar}(Y) + \lambda W)`, where :math:`Y` is the
    momentum with normalized rows and :math:`\nu = \langle Y, \mathrm{polar}(Y) \rangle`, or in the
    other order by the normalized rows of :math:`\mathrm{polar}(M)`. All other leaves go to
    ``other``.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      order: static; ``"row_then_polar"`` or ``"polar_then_row"``, in which alpha cancels.
      b1: momentum decay :math:`\beta` in [0, 1).
      nesterov: static; whether the rule looks one gradient ahead of the momentum.
      alpha: exponent of the size, a number or traced; None is a static 0. With 1, the
        published setting, a tall matrix moves about ``sqrt(units * features)`` times as far.
      eps: see ``eps_mode``.
      eps_mode: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      row_floor: as in :func:`~jaxkit.spectral.scale_by_spectral`.
      rows: static; ``"unit"`` or ``"feature"``, what counts as a row.
      centered: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      weight_decay: :math:`\lambda`, decoupled, of the hidden matrices only; a number or a schedule.
      scale: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      other: as in :func:`~jaxkit.spectral.muon`.
      other_learning_rate: as in :func:`~jaxkit.spectral.muon`.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`.
      strict: static; as in :func:`~jaxkit.spectral.muon`.
      sharding: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      distribute: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params`` if there is weight
      decay, and hands extra arguments on to ``other``.

    Raises:
      ValueError: as in :func:`~jaxkit.spectral.muon`.
      TypeError: as in :func:`~jaxkit.spectral.muon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxkit import spectral
      >>> tx = spectral.hybrid(1.0, b1=0.0, scale="none", method="eigh", other=optax.sgd(1.0))
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5]))}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates["kernel"].round(3) + 0.0)
      [[-1.  0.]
       [ 0.  1.]]

    Source: arXiv:2605.18106. Derived here: the relative floor.

    Cost: as :func:`~jaxkit.spectral.muon`.
    """
    options = {
        "rule": _check.choice("order", order, ("row_then_polar", "polar_then_row")),
        "b1": b1,
        "nesterov": nesterov,
        "alpha": alpha,
        "eps": eps,
        "eps_mode": eps_mode,
        "row_floor": row_floor,
        "rows": rows,
        "centered": centered,
        "scale": scale,
        "method": method,
        "coefficients": coefficients,
        "steps": steps,
        "dtype": dtype,
        "precision": precision,
        "mu_dtype": mu_dtype,
        "distribute": distribute,
    }
    return _by_role.hidden(
        learning_rate,
        options,
        weight_decay=weight_decay,
        other=other,
        other_learning_rate=other_learning_rate,
        rules=rules,
        overrides=overrides,
        strict=strict,
        sharding=sharding,
    )
