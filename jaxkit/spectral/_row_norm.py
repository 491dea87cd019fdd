"""Row-norm: each row of the momentum divided by its norm."""

import optax

from jaxkit.spectral import _by_role


def row_norm(
    learning_rate,
    *,
    b1=0.95,
    nesterov: bool = False,
    eps=1e-8,
    eps_mode: str = "relative",
    row_floor=None,
    rows: str = "unit",
    centered: bool = False,
    weight_decay=0.0,
    scale="rms",
    mu_dtype=None,
    other: optax.GradientTransformation | None = None,
    other_learning_rate=None,
    rules=None,
    overrides=None,
    strict: bool = False,
    sharding=None,
    distribute: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Returns row-normalized momentum for a whole model.

    Hidden matrices move by :math:`-\eta \, (s \, M_i / (\lVert M_i \rVert + f) + \lambda W_i)` in
    each row, the weights of one unit. All other leaves go to ``other``.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b1: momentum decay :math:`\beta` in [0, 1).
      nesterov: static; whether the rule looks one gradient ahead of the momentum.
      eps: see ``eps_mode``.
      eps_mode: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      row_floor: as in :func:`~jaxkit.spectral.scale_by_spectral`.
      rows: static; ``"unit"`` or ``"feature"``, what counts as a row.
      centered: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      weight_decay: :math:`\lambda`, decoupled, of the hidden matrices only; a number or a schedule.
      scale: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
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
      >>> tx = spectral.row_norm(1.0, b1=0.0, scale="none", row_floor=0.0, other=optax.sgd(1.0))
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5]))}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates["kernel"].round(3) + 0.0)
      [[-1.  0.]
       [ 0.  1.]]

    Source: arXiv:2605.18106. Derived here: the relative floor.

    Cost: a few passes over each leaf; no product of matrices. Over the network: see
    :func:`~jaxkit.spectral.scale_by_spectral`.
    """
    options = {
        "rule": "row_norm",
        "b1": b1,
        "nesterov": nesterov,
        "eps": eps,
        "eps_mode": eps_mode,
        "row_floor": row_floor,
        "rows": rows,
        "centered": centered,
        "scale": scale,
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
